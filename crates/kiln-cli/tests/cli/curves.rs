//! `kiln curves`.

use super::{error, kiln, place};
use std::fs;
use std::path::Path;

/// A run whose validation loss goes as low as this.
fn run(place: &Path, folder: &str, lowest: f64) {
    let folder = place.join(folder);
    fs::create_dir_all(&folder).unwrap();
    let config = "[data]\nsources = [\"a\"]\n[model]\ncontext = 10\n[train]\nbatch_size = 6\n";
    fs::write(folder.join("config.toml"), config).unwrap();
    let line = |step: u64, kind: &str, loss: f64| {
        format!(
            "{{\"step\":{step},\"kind\":\"{kind}\",\"loss\":{loss},\"tokens_per_second\":{step}}}\n"
        )
    };
    let lines = [
        line(1, "train", 4.0),
        line(2, "train", 3.0),
        line(3, "train", 2.5),
        line(3, "validation", lowest),
        line(5, "train", 2.0),
        line(5, "validation", lowest + 1.0),
    ];
    fs::write(folder.join("metrics.jsonl"), lines.concat()).unwrap();
}

#[test]
fn runs_of_one_name_have_a_mean_and_a_colour() {
    let place = place();
    let place = place.path();
    run(place, "runs/a", 1.5);
    run(place, "runs/b", 1.75);
    run(place, "runs/c=d", 1.25);
    let runs = ["plain=runs/a", "plain=runs/b", "runs/c=d"];
    let (status, out, err) =
        kiln(place, &[&["curves", "--markdown", "--svg", "loss.svg"], &runs[..]].concat());
    assert_eq!((status, err.as_str()), (0, ""));
    let rows: Vec<Vec<&str>> = out
        .lines()
        .skip(2)
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(
        rows,
        [
            ["plain", "runs/a", "-", "5", "1.5000", "3"],
            ["plain", "runs/b", "-", "5", "1.7500", "3"],
            ["plain", "mean", "", "", "1.6250", ""],
            ["runs/c=d", "runs/c=d", "-", "5", "1.2500", "3"],
        ]
    );
    let svg = fs::read_to_string(place.join("loss.svg")).unwrap();
    assert!(
        svg.contains("plain, mean of lowest validation 1.625") && svg.contains("c=d, lowest"),
        "{svg}"
    );
    assert!(svg.contains("step\n") && !svg.contains("seconds"), "{svg}");
    // 60 tokens a step, 3 a second: the last step is at 100 seconds.
    let over = ["curves", "plain=runs/a", "--over", "time", "--svg", "time.svg"];
    assert_eq!(kiln(place, &over).0, 0);
    let svg = fs::read_to_string(place.join("time.svg")).unwrap();
    assert!(svg.contains("seconds of training\n") && svg.contains("100\n"), "{svg}");
}

/// `data.json` of a run on so many tokens.
fn text(place: &Path, folder: &str, tokens: u64) {
    let json = format!(
        "{{\"tokenizer_hash\":\"a\",\"train_tokens\":{tokens},\"validation_tokens\":1,\"vocab_size\":2}}"
    );
    fs::write(place.join(folder).join("data.json"), json).unwrap();
}

#[test]
fn runs_of_several_texts_are_told_apart() {
    let place = place();
    let place = place.path();
    for folder in ["a", "b", "c"] {
        run(place, folder, 1.5);
    }
    text(place, "a", 10);
    text(place, "b", 10);
    let (status, out, err) = kiln(place, &["curves", "--markdown", "a", "b", "c"]);
    let warning = "warning: 1 of 3 runs do not say whether their text is the same\n";
    assert_eq!((status, err.as_str()), (0, warning));
    assert_eq!(kiln(place, &["curves", "a", "b"]).2, "");
    let texts = |out: &str| -> Vec<String> {
        let cell = |line: &str| line.split('|').nth(3).unwrap().trim().to_string();
        out.lines().skip(2).map(cell).collect()
    };
    let same = texts(&out);
    assert!(same[0].len() == 8 && same[0] == same[1] && same[2] == "-", "{same:?}");
    text(place, "c", 11);
    let (status, out, err) = kiln(place, &["curves", "--markdown", "a", "b", "c"]);
    let warning = "warning: the runs are of several texts, tokenizers or splits, whose losses do not compare\n";
    assert_eq!((status, err.as_str()), (0, warning));
    assert_ne!(texts(&out)[2], same[0]);
    fs::write(place.join("c/data.json"), "{").unwrap();
    let (status, out, err) = kiln(place, &["curves", "--markdown", "c"]);
    assert_eq!((status, texts(&out)), (0, vec!["-".to_string()]));
    assert!(err.contains("warning: c/data.json: expected what tells the text of the run"), "{err}");
}

#[test]
fn what_is_no_run_is_named() {
    let place = place();
    let place = place.path();
    run(place, "a", 1.5);
    run(place, "other", 1.5);
    text(place, "a", 10);
    fs::create_dir(place.join("empty")).unwrap();
    for (runs, expected) in [
        (&["x=empty"][..], "empty"),
        (&["gone"], "gone"),
        (&["a", "b=./a"], "./a is named twice"),
        (&["=a"], "expected a folder, or NAME=FOLDER"),
        (&["x="], "expected a folder, or NAME=FOLDER"),
        (&["runs/x=y"], "runs/x=y"),
        (
            &["a", "--svg", "a/metrics.jsonl"],
            "--svg a/metrics.jsonl is there and no SVG, expected another file",
        ),
        (&["x=a", "--svg", "a/config.toml"], "--svg a/config.toml is there and no SVG"),
        (&["a", "--svg", "a/data.json"], "--svg a/data.json is there and no SVG"),
        (&["a", "--svg", "other/metrics.jsonl"], "--svg other/metrics.jsonl is there and no SVG"),
        (&["a/config.toml"], "a/config.toml holds no run: expected a folder"),
        (&["a", "--svg", "."], "expected a file"),
        (&["a", "--title", "T"], "--svg"),
        (&["a", "--over", "time"], "--svg"),
        (&["a", "--svg", "x.svg", "--over", "years"], "possible values: step, time"),
        (&[], "[NAME=]FOLDER"),
    ] {
        let line = error(place, &[&["curves"], runs].concat());
        assert!(line.contains(expected), "{runs:?}: {line}");
    }
    // Into what is no file it is written.
    #[cfg(unix)]
    {
        let (status, out, _) = kiln(place, &["curves", "a", "--svg", "/dev/stdout"]);
        assert!(status == 0 && out.contains("1.5000") && out.contains("</svg>"), "{out}");
    }
    let (status, out, _) = kiln(place, &["curves", "--markdown", "p|q=a"]);
    assert!(status == 0 && out.contains("| p\\|q"), "{out}");
    let lone = "{\"step\":3,\"kind\":\"validation\",\"loss\":2.0}\n";
    fs::write(place.join("a/metrics.jsonl"), lone).unwrap();
    let line = error(place, &["curves", "a", "--svg", "x.svg", "--over", "time"]);
    assert!(line.contains("metrics.jsonl has no record of a speed"), "{line}");
    fs::write(place.join("a/metrics.jsonl"), "").unwrap();
    let line = error(place, &["curves", "a"]);
    assert!(line.contains("metrics.jsonl has no records yet"), "{line}");
    fs::write(place.join("a/metrics.jsonl"), "nonsense\n{}\n").unwrap();
    let line = error(place, &["curves", "a"]);
    assert!(line.contains("metrics.jsonl:1: expected a record of metrics"), "{line}");
}

//! The program as its user meets it: training, generation, and errors of one line.
#![cfg(feature = "flex")]

mod bench;
mod curves;
mod policy;
mod streams;

use assert_cmd::Command;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const CONFIG: &str = r#"
[data]
sources = ["text.txt"]
tokenizer = "char"

[model]
layers = 1
width = 16
heads = 2
context = 16

[schedule]
warmup = 2

[train]
steps = 6
batch_size = 2
log_every = 2
eval_every = 3
eval_batches = 2
checkpoint_every = 4
out = "runs/test"

[sample]
prompt = "the "
tokens = 8
"#;

/// A folder with a configuration and a text.
fn place() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("small.toml"), CONFIG).unwrap();
    fs::write(folder.path().join("text.txt"), "the kiln fires the clay\n".repeat(60)).unwrap();
    folder
}

/// Runs `kiln` there: exit status, stdout, stderr.
fn kiln(place: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::cargo_bin("kiln").unwrap();
    let output =
        command.current_dir(place).env_remove("RUST_BACKTRACE").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The one line that a failing command prints.
fn error(place: &Path, args: &[&str]) -> String {
    let (status, out, err) = kiln(place, args);
    assert_eq!((status, out.as_str()), (2, ""), "{args:?}: {err}");
    // What was said before it (device, model) is no error.
    let lines: Vec<&str> = err.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(lines.len() == 1 && err.lines().last() == Some(lines[0]), "{args:?}: {err}");
    assert!(err.lines().count() <= 2, "{args:?}: {err}");
    lines[0].to_string()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn says_what_became_of_seeds() {
    let place = place();
    let place = place.path();
    let seeded = ["train", "small.toml", "--device", "cpu", "--set", "model.mlp=kasmina", "--set"];
    let (status, _, err) = kiln(place, &[&seeded[..], &["seeds.first=3"]].concat());
    assert_eq!(status, 0, "{err}");
    assert!(err.contains("no seed germinates in 6 steps: the first would after step 30"), "{err}");
    assert!(err.contains("seeds            1 Dormant, of 1: "), "{err}");
    assert!(!err.contains("[seeds] changes nothing"), "{err}");
}

#[test]
fn says_that_nothing_has_the_seeds_that_are_described() {
    let place = place();
    let without = ["train", "small.toml", "--device", "cpu", "--set", "seeds.first=3"];
    let (status, _, err) = kiln(place.path(), &without);
    assert_eq!(status, 0, "{err}");
    assert!(err.contains("warning: [seeds] changes nothing: the model has no seeds"), "{err}");
}

#[test]
fn trains_resumes_and_generates() {
    let place = place();
    let place = place.path();
    let train = ["train", "small.toml", "--device", "cpu"];
    let (status, out, err) = kiln(place, &train);
    assert_eq!((status, out.as_str()), (0, ""), "{err}");
    for part in [
        "device: cpu",
        "step 6/6: loss ",
        "validation loss ",
        "  | the ",
        "the unigram baseline of ",
    ] {
        assert!(err.contains(part), "{part}: {err}");
    }
    // What tells the text from others is the same wherever it is said.
    let digits = |said: &str| {
        let (_, text) = said.split_once(" kinds, text ").unwrap_or_else(|| panic!("{said}"));
        text.chars().take_while(char::is_ascii_hexdigit).collect::<String>()
    };
    let text = digits(&err);
    assert_eq!(text.len(), 8, "{err}");
    assert_eq!(digits(&kiln(place, &["data", "prepare", "small.toml"]).1), text);
    let (_, out, _) = kiln(place, &["curves", "runs/test"]);
    assert!(out.contains(&text), "{text}: {out}");
    let line = error(place, &train);
    assert!(line.contains("holds a run already") && line.contains("--resume"), "{line}");

    let resume = [&train[..], &["--resume", "--set", "train.steps=8"]].concat();
    let (status, _, err) = kiln(place, &resume);
    assert!(status == 0 && err.contains("step 8/8: loss ") && !err.contains("step 6/8"), "{err}");

    // The run has a configuration of its own: what else stands in the file is not looked at.
    fs::write(place.join("small.toml"), CONFIG.replace("width = 16", "widht = 17")).unwrap();
    let resume = [&train[..], &["--resume", "--set", "train.steps=9"]].concat();
    let (status, _, err) = kiln(place, &resume);
    assert!(status == 0 && err.contains("step 9/9: loss "), "{err}");
    let gone = ["train", "gone.toml", "--device", "cpu", "--resume", "--set"];
    let (status, _, err) = kiln(place, &[&gone[..], &["train.out=runs/test"]].concat());
    assert!(status == 0 && err.contains("finished at step 9"), "{err}");
    let mut checkpoints = fs::read_dir(place.join("runs/test/checkpoints")).unwrap();
    let saved = checkpoints.next().unwrap().unwrap().path().join("config.toml");
    let line = error(place, &["train", saved.to_str().unwrap(), "--device", "cpu", "--resume"]);
    assert!(line.contains("is of a checkpoint, expected the file of its run"), "{line}");
    // A copy of a run is a run of its own, whatever its configuration says.
    let copied = place.join("runs/copy");
    copy(&place.join("runs/test"), &copied);
    let resume = ["train", "runs/copy/config.toml", "--device", "cpu", "--resume"];
    let (status, _, err) = kiln(place, &[&resume[..], &["--set", "train.steps=10"]].concat());
    assert!(status == 0 && err.contains("step 10/10: loss "), "{err}");
    let (status, _, err) = kiln(place, &resume);
    assert!(status == 0 && err.contains("finished at step 10"), "{err}");
    let (status, _, err) = kiln(place, &[&train[..], &["--resume"]].concat());
    assert!(status == 0 && err.contains("finished at step 9"), "{err}");
    let text = "data.sources=[\"../../text.txt\"]";
    let resume = ["train", "config.toml", "--device", "cpu", "--resume", "--set", text];
    let (status, _, err) = kiln(&copied, &resume);
    assert!(status == 0 && err.contains("finished at step 10"), "{err}");

    for (other, named) in
        [("model.width=17", "model.width is 17"), ("model.mlp=kasmina", "model.mlp is ")]
    {
        let line = error(place, &[&train[..], &["--resume", "--set", other]].concat());
        assert!(line.contains(named), "{line}");
    }

    let generate = ["generate", "--run", "runs/test", "--device", "cpu", "--seed", "1"];
    let more = ["--prompt", "the kiln", "--tokens", "20", "--temperature", "0.9", "--top-k", "5"];
    let generate = [&generate[..], &more].concat();
    let (status, out, err) = kiln(place, &generate);
    assert!(status == 0 && out.starts_with("the kiln"), "{err}");
    assert_eq!(out.chars().count(), 8 + 20 + 1);
    assert_eq!(kiln(place, &generate).1, out);

    let unknown =
        error(place, &["generate", "--run", "runs/test", "--device", "cpu", "--prompt", "Ω"]);
    assert!(unknown.contains("--prompt") && unknown.contains('Ω'), "{unknown}");
    let range =
        error(place, &["generate", "--run", "runs/test", "--device", "cpu", "--top-p", "2"]);
    assert!(range.contains("top_p is 2, must be above 0 and at most 1"), "{range}");
    let negative = ["generate", "--run", "runs/test", "--device", "cpu", "--temperature", "-1"];
    let negative = error(place, &negative);
    assert!(negative.contains("temperature is -1, must be 0 or more and finite"), "{negative}");
}

#[test]
fn prints_the_effective_configuration() {
    let place = place();
    let args = ["train", "small.toml", "--set", "model.width=32", "--print-config"];
    let (status, out, err) = kiln(place.path(), &args);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(out.contains("width = 32") && out.contains("rope_base = 10000.0"), "{out}");
    fs::write(place.path().join("effective.toml"), &out).unwrap();
    let again = kiln(place.path(), &["train", "effective.toml", "--print-config"]);
    assert_eq!(again.1, out);
    assert!(!place.path().join("runs").exists());
}

#[test]
fn prepares_data_once() {
    let place = place();
    let args = ["data", "prepare", "small.toml"];
    let (status, first, err) = kiln(place.path(), &args);
    assert!(status == 0 && first.contains("1 file, 1440 bytes"), "{first} {err}");
    assert!(first.contains("written in data/"), "{first}");
    assert!(kiln(place.path(), &args).1.contains("found ready in data/"));
}

#[test]
fn errors_are_one_line_that_names_what_is_wrong() {
    let place = place();
    let place = place.path();
    let train = |set: &[&str]| {
        let set: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
        error(place, &[&["train", "small.toml", "--device", "cpu"], &set[..]].concat())
    };
    let cases = [
        ("model.widht=3", "widht"),
        ("model.width=\"wide\"", "model.width"),
        ("model.width=17", "model.width is 17"),
        ("train.steps=0", "train.steps is 0"),
        ("train.steps=-1", "expected a whole number, 0 or more"),
        ("train.steps=1", "--set train.steps=1: schedule.warmup is 2"),
        ("nothing", "--set nothing"),
        ("data.sources=[\"gone.txt\"]", "gone.txt"),
        ("data.tokenizer.file=gone.json", "tokenizer gone.json: "),
        ("data.tokenizer.file=text.txt", "expected a tokenizer.json"),
        ("data.tokenizer.file=.", "it is no regular file; expected a tokenizer.json"),
        ("model.context=200", "validation split"),
        ("sample.prompt=Ω", "sample.prompt"),
    ];
    for (set, named) in cases {
        let line = train(&[set]);
        assert!(line.contains(named), "{set}: {line}");
    }
    if cfg!(target_os = "linux") {
        for (set, named) in [
            ("data.sources=[\"/dev/null\"]", "`/dev/null` is no regular file"),
            ("model.width=1000000", "training takes at least "),
            ("model.layers=2000000000", "training takes at least "),
            ("train.batch_size=2147483647", "training takes at least "),
        ] {
            let line = train(&[set]);
            assert!(line.contains(named), "{set}: {line}");
        }
    }
    fs::write(place.join("bad.toml"), CONFIG.replace("layers = 1", "layers = 1\nlayer = 2"))
        .unwrap();
    let line = error(place, &["train", "bad.toml"]);
    assert!(line.contains("bad.toml:8") && line.contains("layer"), "{line}");
    let line = error(place, &["train", "gone.toml"]);
    assert!(line.contains("gone.toml"), "{line}");
    let line = error(place, &["train", "small.toml", "--device", "abacus"]);
    assert!(line.contains("unknown device `abacus`"), "{line}");
    let line = error(place, &["train", "small.toml", "--device", "cpu", "--kernel", "fused"]);
    assert!(line.contains("--kernel fused") && line.contains("not on cpu"), "{line}");
    let line = error(place, &["train", "small.toml", "--device", "cpu", "--resume"]);
    assert!(line.contains("holds no run"), "{line}");
    let line = error(place, &["generate", "--run", "nowhere", "--device", "cpu"]);
    assert!(line.contains("nowhere holds no run"), "{line}");
    assert!(!place.join("runs").exists());
}

#[test]
fn a_wrong_flag_exits_with_2_and_help_with_0() {
    let place = place();
    let (status, _, err) = kiln(place.path(), &["train", "--kernel", "magic"]);
    assert!(status == 2 && err.contains("`magic` is no implementation"), "{err}");
    assert_eq!(kiln(place.path(), &["train", "--help"]).0, 0);
}

#[test]
fn numbers_that_are_none_are_refused_with_what_was_expected() {
    let place = place();
    let (whole, positive) = ("expected a whole number, 0 or more", "expected a whole number, 1 or");
    let generate = ["generate", "--run", "runs/test"];
    for (args, flag, value, expected) in [
        (&generate[..], "--tokens", "-1", whole),
        (&generate, "--tokens", "many", whole),
        (&generate, "--top-k", "-1", whole),
        (&generate, "--seed", "-1", whole),
        (&["verify"], "--seed", "-1", whole),
        (&["verify"], "--seed", "18446744073709551616", whole),
        (&["verify"], "--fuzz", "-1", whole),
        (
            &["verify"],
            "--fuzz",
            "99999999999",
            "expected a whole number, 0 or more and at most 100000",
        ),
        (&["verify"], "--jobs", "-1", positive),
        (&["verify"], "--jobs", "0", positive),
        (&["bench"], "--rounds", "-1", "-1 is not in 1..="),
        (&["bench", "--ladder"], "--size", "-1", whole),
    ] {
        let line = error(place.path(), &[args, &[flag, value]].concat());
        assert!(
            line.starts_with(&format!("error: invalid value '{value}' for '{flag} <")),
            "{line}"
        );
        assert!(line.contains(&format!(">': {expected}")), "{line}");
    }
}

#[test]
fn no_flag_is_passed_over() {
    let place = place();
    for (args, named) in [
        (&["bench", "rms_norm", "--size", "512"][..], "--size is for --ladder"),
        (&["bench", "rms_norm", "--size", "512", "--shapes", "small"], "--size is for --ladder"),
        (&["bench", "--svg", "a.svg", "--json", "a.json"], "--svg is for --compare"),
        (&["bench", "--check", "--device", "cpu"], "--check is for --tables"),
        (&["bench", "rms_norm", "--compare", "a.json"], "cannot be used with"),
        (&["bench", "--compare", "a.json", "--dtype", "bf16"], "cannot be used with"),
        (&["bench", "--tables", "a.md", "--markdown"], "cannot be used with"),
    ] {
        let line = error(place.path(), args);
        assert!(line.contains(named), "{args:?}: {line}");
    }
}

#[test]
fn verify_writes_every_check_and_says_nothing_about_displays() {
    let place = place();
    for device in ["cpu", "wgpu"] {
        let args = ["verify", "rms_norm", "--device", device, "--fuzz", "1", "--json", "r.json"];
        let mut command = Command::cargo_bin("kiln").unwrap();
        let command = command.current_dir(place.path()).env_remove("XDG_RUNTIME_DIR").args(args);
        let output = command.output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        if device == "wgpu" && err.contains("no graphics driver found") {
            kiln_test::skip("wgpu", err);
            continue;
        }
        assert!(output.status.success(), "{err}");
        assert!(err.lines().count() == 1 && err.starts_with("device: "), "{err}");
        let json = fs::read_to_string(place.path().join("r.json")).unwrap();
        let reports: serde_json::Value = serde_json::from_str(&json).unwrap();
        for report in reports.as_array().unwrap() {
            assert!(report["cases"].as_u64().unwrap() > 1, "{report}");
            let checks = report["checks"].as_array().unwrap();
            let check = |name: &str| checks.iter().find(|c| c["check"] == name).unwrap();
            assert_eq!(checks.len(), 9);
            assert_eq!(check("forward")["outcome"], "passed");
            let worst = check("gradients")["worst"].as_f64().unwrap();
            assert!(worst > 0.0 && worst <= 1.0, "{report}");
            assert!(check("bias")["at"].as_str().unwrap().contains("of "), "{report}");
            assert!(check("repeat")["runs"].as_u64().unwrap() > 1, "{report}");
            let guards = if device == "cpu" { "not_applicable" } else { "passed" };
            assert_eq!(check("guards")["outcome"], guards);
            assert_eq!(check("inputs")["outcome"], "passed");
        }
    }
}

#[test]
fn verify_finds_the_same_in_one_process_and_in_several() {
    let place = place();
    let verify = |jobs: &str| {
        let args = ["verify", "rope", "rms_norm", "--device", "cpu", "--fuzz", "1"];
        let more = ["--json", "r.json", "--jobs", jobs];
        let (status, out, err) = kiln(place.path(), &[&args[..], &more].concat());
        assert!(status == 0 && err.lines().count() == 1, "{err}");
        (out, fs::read_to_string(place.path().join("r.json")).unwrap())
    };
    let (table, reports) = verify("1");
    let (shared_table, shared_reports) = verify("2");
    assert_eq!(shared_reports, reports);
    let reports: serde_json::Value = serde_json::from_str(&reports).unwrap();
    let reports = reports.as_array().unwrap();
    assert_eq!(reports[0]["op"], "rope", "as asked for");
    for table in [table, shared_table] {
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 1 + reports.len() + 2, "{table}");
        let references = "left out: kernels, which do not run on cpu: these are the references";
        assert_eq!(lines[1 + reports.len()], references);
        assert!(lines[0].starts_with("operator  dtype  ran "), "{table}");
        assert_eq!(lines.last(), Some(&&*format!("{} green, 0 red, on cpu", reports.len())));
        let verdict = lines[0].find("verdict");
        let rows = &lines[1..=reports.len()];
        assert!(rows.iter().all(|row| row.find("green") == verdict), "{table}");
    }
    let line = error(place.path(), &["verify", "rope", "--device", "cpu", "--stress", "3"]);
    assert!(line.ends_with("3 is no operator; for so many calls: --stress=3"), "{line}");
    for jobs in ["0", "-1", "many"] {
        let line = error(place.path(), &["verify", "--device", "cpu", &format!("--jobs={jobs}")]);
        assert!(line.contains("--jobs") && line.contains(jobs), "{line}");
    }
}

#[test]
fn verify_takes_one_element_type() {
    let place = place();
    let place = place.path();
    for jobs in ["1", "2"] {
        let args = ["verify", "bk", "rms_norm", "--device", "cpu", "--fuzz", "1", "--jobs", jobs];
        let (status, out, err) = kiln(place, &[&args[..], &["--dtype", "f32"]].concat());
        assert_eq!((status, err.lines().count()), (0, 1), "{err}");
        let types = |line: &str| line.split_whitespace().nth(1).map(String::from);
        let rows: Vec<_> = out.lines().filter(|line| line.contains("green  ")).collect();
        assert!(rows.iter().all(|row| types(row).as_deref() == Some("f32")), "{out}");
        assert_eq!(rows.len(), 2, "{out}");
    }
    let line = error(place, &["verify", "bk", "--device", "cpu", "--dtype", "f64"]);
    assert_eq!(line, "error: unknown element type `f64`, expected f32, bf16 or f16");
    let line = error(place, &["verify", "bk", "--device", "cpu", "--dtype", "bf16"]);
    assert_eq!(line, "error: bk: not verified in bf16, expected f32");
    let line = error(place, &["bench", "bk", "--device", "cpu", "--dtype", "bf16"]);
    assert_eq!(line, "error: bk: not timed in bf16, expected f32");
}

#[test]
fn reports_of_a_verification_that_is_stopped_are_there() {
    let place = place();
    // All operators, of which most are left.
    let args = ["verify", "--device", "cpu", "--jobs", "1", "--dtype", "f32", "--json", "r.json"];
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kiln"));
    let command = command.current_dir(place.path()).args(args);
    // What another run has left.
    let read = || fs::read_to_string(place.path().join("r.json")).unwrap_or_default();
    fs::write(place.path().join("r.json"), "old").unwrap();
    let mut verifying = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(300);
    while !read().contains("checks") && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(verifying.try_wait().unwrap().is_none(), "ended before it was stopped");
    verifying.kill().unwrap();
    verifying.wait().unwrap();
    let reports: serde_json::Value = serde_json::from_str(&read()).unwrap();
    assert_eq!(reports[0]["checks"][0]["outcome"], "passed", "{reports}");
}

#[test]
fn a_worker_ends_when_nobody_waits_for_it() {
    // More parts than it gets done.
    let args = ["verify", "--worker", "rms_norm", "--device", "cpu", "--fuzz", "20000"];
    let mut worker = std::process::Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = worker.stdin.take().unwrap();
    for part in 0..1000 {
        writeln!(stdin, "{part}").unwrap();
    }
    std::thread::sleep(Duration::from_millis(200));
    assert!(worker.try_wait().unwrap().is_none(), "it is at work");
    drop(stdin);
    let begin = Instant::now();
    let status = loop {
        match worker.try_wait().unwrap() {
            Some(status) => break status,
            None if begin.elapsed() > Duration::from_secs(60) => {
                worker.kill().unwrap();
                panic!("it went on for a minute");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{status}");
}

#[test]
fn a_precision_is_refused_where_a_device_does_not_have_it() {
    let place = place();
    let opened = match kiln_ops::device::open("wgpu") {
        Ok(opened) => opened,
        Err(error) => return kiln_test::skip("wgpu", error),
    };
    let train = ["train", "small.toml", "--set", "train.precision=bf16", "--device", "wgpu"];
    if opened.device.supports_dtype(burn::tensor::DType::BF16) {
        let (status, _, err) = kiln(place.path(), &train);
        assert_eq!(status, 0, "{err}");
        return;
    }
    let line = error(place.path(), &train);
    let expected = "train.precision is bf16, which wgpu does not have; expected one that it has";
    assert!(line.contains(expected), "{line}");
    assert!(!place.path().join("runs").exists());
}

//! Reading, overriding and writing configurations, and the lines that name what is wrong.

use super::super::{
    GroupConfig, MixerKind, Mixers, OptimizerKind, Precision, ScheduleKind, TokenizerConfig,
};
use super::*;

const TEXT: &str = r#"# A small run.
[data]
sources = ["shakespeare.txt"]
tokenizer = "char"

[model]
layers = 6
width = 384
heads = 6

[schedule]
kind = "wsd"
"#;

fn with(overrides: &[&str]) -> Result<Config, ConfigError> {
    let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
    parse(TEXT, "x.toml", &overrides)
}

fn error(text: &str, overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
    match parse(text, "x.toml", &overrides) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n'), "more than one line: {line}");
            line
        }
    }
}

#[test]
fn keys_that_are_given_are_read_and_the_others_have_defaults() {
    let config = with(&[]).expect("valid");
    assert_eq!(config.data.tokenizer, TokenizerConfig::Char);
    assert_eq!((config.model.layers, config.model.width), (6, 384));
    assert_eq!(config.schedule.kind, ScheduleKind::Wsd);
    assert_eq!(config.optimizer, Default::default());
}

#[test]
fn overrides_replace_and_add() {
    let config = with(&[
        "data.tokenizer=byte",
        "train.out=runs/x",
        "data.sources=[\"a\", \"b\"]",
        "model.width = 96",
        "optimizer.learning_rate=3e-4",
        "train.precision=bf16",
        "sample.prompt=To be, or",
        "train.steps=100",
        "train.steps=200",
        "model.tied_embeddings=false",
    ])
    .expect("valid");
    assert_eq!(config.data.tokenizer, TokenizerConfig::Byte);
    assert_eq!(config.train.out, PathBuf::from("runs/x"));
    assert_eq!(config.data.sources, ["a", "b"]);
    assert_eq!(config.model.width, 96);
    assert_eq!(config.optimizer.learning_rate, 3e-4);
    assert_eq!(config.train.precision, Precision::Bf16);
    assert_eq!(config.sample.prompt, "To be, or");
    assert_eq!(config.train.steps, 200);
    assert!(!config.model.tied_embeddings);
    // Untouched.
    assert_eq!(config.model.layers, 6);
}

#[test]
fn a_tokenizer_with_a_value_can_be_set_in_two_ways() {
    let inline = with(&["data.tokenizer={ bpe = 512 }"]).expect("valid");
    assert_eq!(inline.data.tokenizer, TokenizerConfig::Bpe(512));
    let dotted =
        with(&["data.tokenizer={ bpe = 512 }", "data.tokenizer.file=t.json"]).expect("valid");
    assert_eq!(dotted.data.tokenizer, TokenizerConfig::File("t.json".into()));
}

#[test]
fn overrides_alone_make_a_configuration() {
    let config = parse("", "none", &["data.sources=[\"a.txt\"]".to_string()]).expect("valid");
    assert_eq!(config.data.sources, ["a.txt"]);
}

#[test]
fn what_is_written_reads_back_equal() {
    let mut config = with(&["sample.prompt='''a \"quoted\" \\ line'''"]).expect("valid");
    config.train.seed = u64::MAX;
    config.optimizer.learning_rate = 0.1 + 0.2;
    config.sample.prompt.push_str("\n\u{1F525}\t");
    for tokenizer in [
        TokenizerConfig::Byte,
        TokenizerConfig::Char,
        TokenizerConfig::Bpe(4096),
        TokenizerConfig::File("a b/tokenizer.json".into()),
    ] {
        config.data.tokenizer = tokenizer;
        let text = to_toml(&config).expect("writable");
        assert_eq!(parse(&text, "written", &[]).expect(&text), config, "{text}");
        // The effective configuration: also what was left at its default.
        assert!(text.contains("beta1 = 0.9"), "{text}");
    }
}

#[cfg(unix)]
#[test]
fn what_toml_cannot_hold_is_an_error() {
    use std::os::unix::ffi::OsStrExt;
    let mut config = with(&[]).expect("valid");
    config.train.out = std::ffi::OsStr::from_bytes(b"runs/\xff").into();
    assert!(matches!(to_toml(&config), Err(ConfigError::Write(_))));
}

#[test]
fn unknown_names_come_with_the_line_and_those_that_exist() {
    let line = error("[data]\nsources = [\"a\"]\n\n[model]\nlayers = 2\nwidht = 3\n", &[]);
    assert!(
        line.starts_with(
            "x.toml:6: unknown key 'widht' in [model], expected one of: layers, width, heads,"
        ),
        "{line}"
    );
    let line = error("[data]\nsources = [\"a\"]\n[modle]\nlayers = 2\n", &[]);
    assert_eq!(
        line,
        "x.toml:3: unknown section [modle], expected one of: data, model, optimizer, schedule, seeds, train, sample"
    );
    let line = error(TEXT, &["train.steps=3", "model.widht=3"]);
    assert!(
        line.starts_with("--set model.widht=3: unknown key 'widht' in [model], expected"),
        "{line}"
    );
    let line = error(TEXT, &["modle.width=3"]);
    assert!(line.starts_with("--set modle.width=3: unknown section [modle], expected"), "{line}");
}

#[test]
fn wrong_types_come_with_the_line_and_what_was_expected() {
    let line = error("[data]\nsources = [\"a\"]\n[model]\nwidth = \"wide\"\n", &[]);
    assert_eq!(
        line,
        "x.toml:4: model.width: invalid type: string \"wide\", expected a whole number, 0 or more"
    );
    let line = error(TEXT, &["model.layers=-1"]);
    assert!(
        line.starts_with("--set model.layers=-1: model.layers: invalid value: integer `-1`"),
        "{line}"
    );
    let line = error(TEXT, &["seeds.stability='high'"]);
    assert!(line.ends_with("invalid type: string \"high\", expected a number"), "{line}");
    let line = error(TEXT, &["seeds.schedule=3"]);
    assert!(line.ends_with("seeds.schedule: expected a name in quotes"), "{line}");
    let line = error("[data]\nsources = \"a\"\n", &[]);
    assert!(
        line.contains("x.toml:2: data.sources: invalid type: string \"a\", expected an array"),
        "{line}"
    );
    let line = error(TEXT, &["schedule.kind=linear"]);
    assert_eq!(
        line,
        "--set schedule.kind=linear: schedule.kind: unknown variant `linear`, expected one of `constant`, `cosine`, `wsd`"
    );
    let line = error("model = 3\n[data]\nsources = [\"a\"]\n", &[]);
    assert!(
        line.starts_with("x.toml:1: model: invalid type: integer `3`, expected a section"),
        "{line}"
    );
    let line = error(TEXT, &["data.tokenizer={ bpe = 512, file = 'a' }"]);
    assert!(line.contains("data.tokenizer: expected one key"), "{line}");
    let line = error(TEXT, &["data.sources=[\"a\", 2]"]);
    assert!(
        line.starts_with("--set data.sources=[\"a\", 2]: data.sources: invalid type"),
        "{line}"
    );
    let line = error("[data]\nsources = [\"a\"]\ntokenizer = { bpe = true }\n", &[]);
    assert!(
        line.starts_with("x.toml:3: data.tokenizer.bpe: invalid type: boolean `true`"),
        "{line}"
    );
}

#[test]
fn groups_of_parameters_are_read_and_written() {
    let text = format!(
        "{TEXT}[optimizer]\nkind = \"adamw\"\nweight_decay = 0.2\n\
         [[optimizer.groups]]\nparameters = \"embedding.*\"\nlearning_rate_scale = 0.5\n\
         [[optimizer.groups]]\nparameters = \"*.mlp.*\"\nkind = \"adamw\"\nweight_decay = 0\n"
    );
    let config = parse(&text, "x.toml", &[]).expect("valid");
    let group = |parameters: &str, kind, learning_rate_scale, weight_decay| GroupConfig {
        parameters: parameters.into(),
        kind,
        learning_rate_scale,
        weight_decay,
    };
    let adamw = Some(OptimizerKind::AdamW);
    let expected = [group("embedding.*", None, 0.5, None), group("*.mlp.*", adamw, 1.0, Some(0.0))];
    assert_eq!(config.optimizer.groups, expected);
    let written = to_toml(&config).expect("writable");
    assert_eq!(parse(&written, "written", &[]).expect(&written), config, "{written}");
    let set = ["optimizer.groups=[{ parameters = 'head.*', weight_decay = 0.3 }]".to_string()];
    let config = parse(&text, "x.toml", &set).expect("valid");
    assert_eq!(config.optimizer.groups, [group("head.*", None, 1.0, Some(0.3))]);

    let line = error(&format!("{text}decay = 0\n"), &[]);
    assert!(
        line.contains("unknown key 'decay' in [optimizer.groups], expected one of: parameters,"),
        "{line}"
    );
    assert!(line.starts_with("x.toml:23: "), "{line}");
    let line = error(&format!("{text}kind = \"sgd\"\n").replacen("kind = \"adamw\"\n", "", 2), &[]);
    assert!(line.contains("optimizer.groups.kind: unknown variant `sgd`"), "{line}");
    let line = error(TEXT, &["optimizer.groups=[{ weight_decay = 0.3 }]"]);
    assert!(line.contains("[optimizer.groups] lacks the key 'parameters'"), "{line}");
    let line = error(&format!("{TEXT}[optimizer.groups]\nparameters = \"a\"\n"), &[]);
    assert!(line.contains("optimizer.groups: invalid type: table, expected [[…]]"), "{line}");
    let line = error(TEXT, &["optimizer.groups=3"]);
    assert!(line.ends_with("`3`, expected [[optimizer.groups]], one for each"), "{line}");
}

#[test]
fn the_parts_of_a_block_are_chosen_and_unknown_ones_are_named() {
    let chosen = with(&["model.mixer=attention", "model.mlp=swiglu", "model.residual=plain"]);
    assert_eq!(chosen.expect("valid").model, with(&[]).expect("valid").model);
    for (set, known) in [
        ("model.mixer=convolution", "attention` or `bk"),
        ("model.mlp=relu", "swiglu` or `kasmina"),
        ("model.residual=none", "plain` or `mhc"),
        ("optimizer.kind=sgd", "adamw` or `muon"),
    ] {
        let (key, value) = set.split_once('=').unwrap();
        let line = error(TEXT, &[set]);
        let expected = format!("--set {set}: {key}: unknown variant `{value}`, expected `{known}`");
        assert_eq!(line, expected);
    }
}

#[test]
fn mixers_are_one_or_several_by_turns() {
    let (attention, bk) = (MixerKind::Attention, MixerKind::Bk);
    assert_eq!(with(&[]).expect("valid").model.mixer, attention.into());
    for (set, by_turns, of_six, written) in [
        ("bk", vec![bk], [bk; 6], "mixer = \"bk\"\n"),
        ("'attention'", vec![attention], [attention; 6], "mixer = \"attention\"\n"),
        ("['bk']", vec![bk], [bk; 6], "mixer = \"bk\"\n"),
        (
            "[\"bk\", \"bk\", \"attention\"]",
            vec![bk, bk, attention],
            [bk, bk, attention, bk, bk, attention],
            "mixer = [\"bk\", \"bk\", \"attention\"]\n",
        ),
    ] {
        let config = with(&[&format!("model.mixer={set}"), "model.bk_channels=7"]).expect(set);
        assert_eq!(config.model.mixer, Mixers::new(by_turns), "{set}");
        assert!(config.model.mixers().eq(of_six), "{set}");
        let text = to_toml(&config).expect("writable");
        assert!(text.contains(written) && text.contains("bk_channels = 7\n"), "{text}");
        assert_eq!(parse(&text, "written", &[]).expect(&text), config, "{text}");
    }
    // A file of an earlier version has no such key, and its copy has none either.
    let text = to_toml(&with(&[]).expect("valid")).expect("writable");
    assert!(!text.contains("bk_channels") && text.contains("mixer = \"attention\"\n"), "{text}");

    let line = error(TEXT, &["model.mixer=['bk', 'conv']"]);
    assert!(line.contains("model.mixer: unknown variant `conv`, expected `attention`"), "{line}");
    let line = error(TEXT, &["model.mixer=3"]);
    assert_eq!(
        line,
        "--set model.mixer=3: model.mixer: invalid type: integer `3`, expected a mixer such as \
         \"attention\", or an array of them"
    );
    let line = error(TEXT, &["model.mixer=[]"]);
    assert_eq!(line, "--set model.mixer=[]: model.mixer is [], must name at least one mixer");
}

#[test]
fn the_files_that_come_with_the_program_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut count = 0;
    for file in std::fs::read_dir(folder).expect("a folder") {
        let path = file.expect("a file").path();
        let config = load(&path, &[]).expect("valid");
        let name = path.file_stem().and_then(|name| name.to_str());
        assert_eq!(config.train.out.to_str(), name.map(|name| format!("runs/{name}")).as_deref());
        count += 1;
    }
    assert!(count > 2, "{count}");
}

#[test]
fn syntax_errors_come_with_the_line() {
    let line = error("[data]\nsources = [\"a\"]\n[model]\nwidth = = 3\n", &[]);
    assert!(line.starts_with("x.toml:4: "), "{line}");
    let line = error("[data]\nsources = [\"a\"]\nsources = [\"b\"]\n", &[]);
    assert!(line.starts_with("x.toml:3: duplicate key"), "{line}");
}

#[test]
fn missing_sections_and_keys_are_named() {
    assert_eq!(
        error("[model]\nwidth = 8\n", &[]),
        "x.toml: the section [data] is missing: it names the sources"
    );
    assert_eq!(
        error("\n[data]\nvalidation = 0.1\n", &[]),
        "x.toml:2: [data] lacks the key 'sources'"
    );
}

#[test]
fn malformed_overrides_say_what_an_override_is() {
    for given in ["model.width", "width=3", "=3", ".width=3", "model.=3", "model..width=3", ""] {
        let line = error(TEXT, &[given]);
        assert_eq!(
            line,
            format!("--set {given}: expected section.key=value, such as model.width=256")
        );
    }
    let line = error("model = 3\n", &["model.width=8"]);
    assert_eq!(
        line,
        "--set model.width=8: 'model' is no section here: its value is of type integer"
    );
}

#[test]
fn violations_come_with_the_line_and_are_all_named() {
    let line = error("[data]\nsources = [\"a\"]\n[model]\n\ndropout = 1.5\n", &["sample.top_p=0"]);
    assert_eq!(
        line,
        "x.toml:5: model.dropout is 1.5, must be 0 or more and below 1; \
         --set sample.top_p=0: sample.top_p is 0, must be above 0 and at most 1"
    );
}

#[test]
fn a_violation_by_an_override_of_what_the_file_says_is_the_overrides() {
    assert_eq!(
        error(TEXT, &["model.width=100"]),
        "--set model.width=100: model.width is 100, must be a multiple of model.heads (6)"
    );
}

#[test]
fn a_violation_of_several_keys_is_that_of_the_override_among_them() {
    let text = format!("{TEXT}warmup = 100\n\n[train]\nsteps = 500\n");
    let long = "schedule.warmup is 100, must be at most train.steps (50)";
    assert_eq!(error(&text, &["train.steps=50"]), format!("--set train.steps=50: {long}"));
    let set = ["train.steps=50", "schedule.warmup=100"];
    assert_eq!(error(&text, &set), format!("--set schedule.warmup=100: {long}"));
    for (set, more, violation) in [
        ("model.heads=5", "", "model.width is 384, must be a multiple of model.heads (5)"),
        ("model.heads=4", "kv_heads = 3\n", "model.kv_heads is 3, must divide model.heads (4)"),
        ("model.heads=128", "", "model.width is 384, must give an even width per head"),
        ("model.mixer=attention", "mixer = 'bk'\nkv_heads = 4\n", "model.kv_heads is 4, must"),
    ] {
        let text = TEXT.replace("[model]\n", &format!("[model]\n{more}"));
        let line = error(&text, &[set]);
        assert!(line.starts_with(&format!("--set {set}: {violation}")), "{line}");
    }
    // Nothing is overridden: where the value stands, else where the other one does.
    assert!(error(&text.replace("500", "50"), &[]).starts_with("x.toml:13: schedule.warmup is"));
    let default = text.replace("warmup = 100\n", "").replace("500", "10");
    assert!(error(&default, &[]).starts_with("x.toml:15: schedule.warmup is 20, must"));
}

#[test]
fn files_are_loaded_and_a_missing_one_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.toml");
    let missing = load(&path, &[]).expect_err("no such file").to_string();
    assert!(missing.starts_with(&format!("cannot read the configuration {}: ", path.display())));
    std::fs::write(&path, TEXT).expect("written");
    assert_eq!(load(&path, &["model.layers=2".into()]).expect("valid").model.layers, 2);
    std::fs::write(&path, "nonsense\n").expect("written");
    let line = load(&path, &[]).expect_err("not TOML").to_string();
    assert!(line.starts_with(&format!("{}:1: ", path.display())), "{line}");
}

#[test]
fn the_folder_of_a_run_is_found_in_a_file_that_is_wrong_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.toml");
    let folder = |text: &str, overrides: &[&str]| {
        std::fs::write(&path, text).unwrap();
        let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
        run_folder(&path, &overrides).map_err(|error| error.to_string())
    };
    let wrong = "[model]\nwidht = 17\n[train]\nsteps = \"many\"\nout = \"runs/a\"\n";
    assert_eq!(folder(wrong, &[]), Ok("runs/a".into()));
    assert_eq!(folder(wrong, &["train.steps=3", "train.out=b", "train.out=c"]), Ok("c".into()));
    assert_eq!(folder("", &[]), Ok("runs/default".into()));
    let error = folder("[train]\n\nout = 3\n", &[]).unwrap_err();
    assert!(error.contains("x.toml:3: train.out: ") && error.contains("a path"), "{error}");
    assert!(folder("[train", &[]).unwrap_err().contains("x.toml:1: "));
    assert_eq!(folder("[train", &["train.out=d"]), Ok("d".into()));
    let gone = run_folder(&dir.path().join("gone.toml"), &[]).unwrap_err().to_string();
    assert!(gone.contains("cannot read the configuration"), "{gone}");
}

//! Where output goes: pipes that close, disks that are full, files that are replaced.

use super::*;

/// What prints.
#[cfg(unix)]
const PRINTING: [&[&str]; 7] = [
    &["op", "--list"],
    &["train", "small.toml", "--print-config"],
    &["data", "prepare", "small.toml"],
    &["verify", "rms_norm", "--device", "cpu", "--fuzz", "1"],
    &["verify", "rms_norm", "--device", "cpu", "--fuzz", "1", "--jobs", "1"],
    &["bench", "--cases"],
    &["--help"],
];

#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_printed_is_an_error() {
    let place = place();
    for args in PRINTING {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.current_dir(place.path()).env_remove("RUST_BACKTRACE").args(args);
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = command.stdout(full).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        let expected =
            "error: cannot write to standard output: No space left on device (os error 28)";
        assert_eq!((output.status.code(), err.lines().last()), (Some(2), Some(expected)));
        assert!(err.lines().count() <= 2, "{args:?}: {err}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_said_beside_the_result_may_be_lost() {
    let place = place();
    let verify = ["verify", "rms_norm", "--device", "cpu", "--fuzz", "1", "--jobs", "1"];
    for (args, status) in [
        (&verify[..], 0),
        (&["train", "small.toml", "--device", "cpu"], 0),
        (&["verify", "--device", "abacus"], 2),
        (&["verify", "--abacus"], 2),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.current_dir(place.path()).env_remove("RUST_BACKTRACE").args(args);
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = command.stderr(full).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{args:?}");
    }
}

#[cfg(unix)]
#[test]
fn reports_replace_files_and_are_written_into_what_is_none() {
    let place = place();
    let place = place.path();
    let verify = ["verify", "rms_norm", "--device", "cpu", "--fuzz", "1", "--jobs", "1", "--json"];
    fs::write(place.join("old.json"), "old").unwrap();
    fs::hard_link(place.join("old.json"), place.join("kept.json")).unwrap();
    std::os::unix::fs::symlink("old.json", place.join("link.json")).unwrap();
    let (status, _, err) = kiln(place, &[&verify[..], &["link.json"]].concat());
    assert_eq!(status, 0, "{err}");
    assert!(place.join("link.json").is_symlink());
    assert!(fs::read_to_string(place.join("old.json")).unwrap().starts_with('['));
    assert_eq!(fs::read_to_string(place.join("kept.json")).unwrap(), "old");

    // A pipe, then a file that has the table too.
    let (status, out, err) = kiln(place, &[&verify[..], &["/dev/stdout"]].concat());
    assert!(status == 0 && out.ends_with("\n]\n"), "{out}{err}");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kiln"));
    let log = fs::OpenOptions::new().append(true).create(true).open(place.join("log")).unwrap();
    command.current_dir(place).args(verify).arg("/dev/stdout").stdout(log);
    assert!(command.output().unwrap().status.success());
    assert!(fs::read_to_string(place.join("log")).unwrap().ends_with("\n]\n"));

    std::os::unix::fs::symlink("gone.json", place.join("nowhere.json")).unwrap();
    for (path, expected) in [
        (".", "cannot write .: it is no regular file, expected a file"),
        ("nowhere.json", "cannot write nowhere.json: it is a link to what is not there"),
    ] {
        let line = error(place, &[&verify[..], &[path]].concat());
        assert!(line.contains(expected), "{line}");
    }
    assert!(place.join("nowhere.json").is_symlink());
}

#[test]
fn one_file_is_not_given_twice() {
    let place = place();
    let place = place.path();
    fs::copy(bench::pages().join("kiln.json"), place.join("kiln.json")).unwrap();
    let before = fs::read(place.join("kiln.json")).unwrap();
    let line = error(place, &["bench", "--compare", "kiln.json", "--svg", "./kiln.json"]);
    let expected = "error: --svg ./kiln.json is there and no SVG, expected another file";
    assert_eq!(line, expected);
    assert_eq!(fs::read(place.join("kiln.json")).unwrap(), before);
    let args = ["bench", "rms_norm", "--device", "cpu", "--json", "new", "--policy", "./new"];
    let line = error(place, &args);
    assert_eq!(line, "error: --policy ./new is the file of --json new, expected another");
    assert!(!place.join("new").exists());
}

#[cfg(unix)]
#[test]
fn nothing_is_said_where_nobody_reads_on() {
    let place = place();
    for (args, backtrace) in PRINTING.iter().flat_map(|args| [(args, "0"), (args, "1")]) {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.current_dir(place.path()).env("RUST_BACKTRACE", backtrace).args(*args);
        let output = command.stdout(writer).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(141), "{args:?}: {err}");
        assert!(err.lines().all(|line| line.starts_with("device: ")), "{args:?}: {err}");
    }
}

#[cfg(unix)]
#[test]
fn who_reads_a_fifo_has_the_whole_report() {
    let place = place();
    let place = place.path();
    let fifo = place.join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let reader = std::thread::spawn(move || fs::read_to_string(fifo).unwrap());
    let verify = ["verify", "rms_norm", "--device", "cpu", "--fuzz", "0", "--jobs", "1"];
    let (status, _, err) = kiln(place, &[&verify[..], &["--json", "fifo"]].concat());
    assert_eq!(status, 0, "{err}");
    let reports: serde_json::Value = serde_json::from_str(&reader.join().unwrap()).unwrap();
    assert_eq!(reports[0]["op"], "rms_norm");
}

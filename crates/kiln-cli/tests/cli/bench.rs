//! `kiln bench`: what it refuses, its tables and its runs.

use super::*;

#[test]
fn the_ladder_is_that_of_one_operator() {
    let place = place();
    for (args, named) in [
        (&["bench", "--ladder"][..], "kiln bench tril_matmul --ladder"),
        (&["bench", "tril_matmul", "--ladder", "--device", "cpu"], "not cpu"),
    ] {
        let line = error(place.path(), args);
        assert!(line.contains(named), "{line}");
    }
}

#[test]
fn what_cannot_be_done_is_said_before_anything_is_timed() {
    let place = place();
    let bench = ["bench", "matmul", "--device", "cpu"];
    let verify = ["verify", "rms_norm", "--device", "cpu"];
    let bk = ["bench", "bk", "--device", "cpu"];
    for (args, more, named) in [
        (&bench, ["--tiles", "wgmma"], "--tiles wgmma: cpu has no such tiles"),
        (&bk, ["--shapes", "lengths"], "cpu has no kernels for these shapes"),
        (&bench, ["--json", "no/run.json"], "cannot write no/run.json"),
        (&bench, ["--policy", "no/policy.toml"], "cannot write no/policy.toml"),
        (&verify, ["--json", "no/reports.json"], "cannot write no/reports.json"),
    ] {
        let line = error(place.path(), &[&args[..], &more].concat());
        assert!(line.contains(named), "{line}");
    }
}

/// The files of a run of Kiln, one of a peer on the same GPU, and a page with their table.
pub(super) fn pages() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pages")
}

#[test]
fn runs_of_different_gpus_are_not_compared() {
    let place = place();
    let run = fs::read_to_string(pages().join("peers.json")).unwrap();
    fs::write(place.path().join("other.json"), run.replace("NVIDIA H200", "NVIDIA H100")).unwrap();
    let kiln_run = pages().join("kiln.json");
    let compare = ["bench", "--compare", kiln_run.to_str().unwrap(), "other.json"];
    let line = error(place.path(), &compare);
    assert!(line.contains("NVIDIA H200 and NVIDIA H100"), "{line}");
}

#[test]
fn tables_of_pages_are_those_of_their_run_files() {
    // The documents of this repository, then a page of a test.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (status, out, err) = kiln(&root, &["bench", "--tables", "docs", "README.md", "--check"]);
    assert_eq!((status, out.as_str()), (0, ""), "{err}");

    let place = place();
    let place = place.path();
    for name in ["kiln.json", "peers.json", "page.md"] {
        fs::copy(pages().join(name), place.join(name)).unwrap();
    }
    let check = ["bench", "--tables", "page.md", "--check"];
    let (status, out, err) = kiln(place, &check);
    assert_eq!((status, out.as_str()), (0, ""), "{err}");

    let page = fs::read_to_string(place.join("page.md")).unwrap();
    fs::write(place.join("page.md"), page.replace("2.00×", "9.00×")).unwrap();
    let (status, out, err) = kiln(place, &check);
    assert!(status == 1 && out.starts_with("page.md: "), "{out}{err}");
    assert!(fs::read_to_string(place.join("page.md")).unwrap().contains("9.00×"));
    let (status, out, err) = kiln(place, &["bench", "--tables", "."]);
    assert!(status == 0 && out.contains("page.md"), "{out}{err}");
    assert_eq!(fs::read_to_string(place.join("page.md")).unwrap(), page);

    fs::write(place.join("page.md"), page.replace("peers.json", "gone.json")).unwrap();
    let line = error(place, &check);
    assert!(line.contains("gone.json"), "{line}");

    // What checks nothing says so, and an empty run is none.
    fs::write(place.join("page.md"), "no table\n").unwrap();
    let line = error(place, &check);
    assert!(line.contains("no `<!-- table` in the Markdown pages of page.md"), "{line}");
    let mut run: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(place.join("kiln.json")).unwrap()).unwrap();
    run["rows"] = serde_json::json!([]);
    fs::write(place.join("empty.json"), run.to_string()).unwrap();
    let line = error(place, &["bench", "--compare", "empty.json"]);
    assert!(line.contains("empty.json: a run without rows"), "{line}");
    let bench = ["bench", "rms_norm", "--device", "cpu", "--shapes", "small"];
    let line = error(place, &[&bench[..], &["--data", "page.md/numbers"]].concat());
    assert!(line.contains("--data: cannot make page.md/numbers"), "{line}");
}

#[test]
fn a_run_has_all_passes_and_reads_its_data_again() {
    let place = place();
    let place = place.path();
    let bench = ["bench", "linear_cross_entropy", "--device", "cpu", "--shapes", "small"];
    let line = error(place, &[&bench[..], &["--pass", "backward"]].concat());
    assert!(line.ends_with("gradients are made in the forward, expected --pass forward or both"));
    let more = ["--rounds", "1", "--data", "numbers", "--json", "run.json"];
    let bench = [&bench[..], &more].concat();
    let (status, out, err) = kiln(place, &bench);
    assert_eq!(status, 0, "{err}");
    assert!(out.contains("forward+backward"), "{out}");
    let file = place.join("numbers/linear_cross_entropy-2048x128-128x256-f32.safetensors");
    let bytes = fs::read(&file).unwrap();

    let json = fs::read_to_string(place.join("run.json")).unwrap();
    let run: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(run["versions"]["burn"].is_string() && run["board"].is_null(), "{run}");
    let rows = run["rows"].as_array().unwrap();
    let passes: Vec<_> = rows.iter().map(|row| row["pass"].as_str().unwrap()).collect();
    assert_eq!(passes, ["forward", "both"]);
    assert_eq!(rows[1]["recorded"], false);
    for name in ["grad.x", "grad.weight", "dlogits"] {
        let share = rows[1]["zeros"][name].as_f64().unwrap();
        assert!((0.0..0.01).contains(&share), "{name}: {share}");
    }

    fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
    let (status, out, _) = kiln(place, &bench);
    assert!(status == 1 && out.contains("-f32.safetensors: "), "{out}");
}

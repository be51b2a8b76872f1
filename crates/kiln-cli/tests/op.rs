//! `kiln op` as its user meets it: numbers of a hand formula, and errors of one line.
#![cfg(feature = "flex")]

use assert_cmd::Command;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Name, element type, shape, bytes.
type Entry = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn floats(name: &'static str, shape: &[usize], values: &[f32]) -> Entry {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    (name, Dtype::F32, shape.to_vec(), bytes)
}

fn integers(name: &'static str, shape: &[usize], values: &[i64]) -> Entry {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    (name, Dtype::I64, shape.to_vec(), bytes)
}

/// Zeros of any element type.
fn zeros(name: &'static str, dtype: Dtype, shape: &[usize]) -> Entry {
    let bits = shape.iter().product::<usize>() * dtype.bitsize();
    (name, dtype, shape.to_vec(), vec![0; bits / 8])
}

fn file(entries: &[Entry], metadata: &[(&str, &str)]) -> Vec<u8> {
    let views = entries.iter().map(|(name, dtype, shape, bytes)| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    safetensors::serialize(views, Some(metadata)).unwrap()
}

/// Runs `kiln op` there on `in.st`: exit status, stdout, stderr.
fn op(place: &Path, input: &[u8], op: &str, args: &[&str]) -> (i32, String, String) {
    fs::write(place.join("in.st"), input).unwrap();
    let mut command = Command::cargo_bin("kiln").unwrap();
    command.current_dir(place).env_remove("RUST_BACKTRACE").args(["op", op, "--input", "in.st"]);
    let of = |flag: &str| args.contains(&flag);
    if !of("--output") {
        command.args(["--output", "out.st"]);
    }
    if !of("--device") {
        command.args(["--device", "cpu"]);
    }
    let output = command.args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn place() -> TempDir {
    tempfile::tempdir().unwrap()
}

const X: [f32; 6] = [1.0, -2.0, 3.5, 0.25, 4.0, -1.5];
const WEIGHT: [f32; 3] = [2.0, -0.5, 1.25];
const DY: [f32; 6] = [0.5, 1.0, -1.0, 2.0, -0.75, 0.125];

/// y, dx and dweight of rms_norm.
fn rms_norm(eps: f64) -> [Vec<f64>; 3] {
    let (mut y, mut dx, mut dweight) = (vec![], vec![], vec![0.0; 3]);
    for (x, dy) in X.chunks(3).zip(DY.chunks(3)) {
        let (x, dy) = ([x[0], x[1], x[2]].map(f64::from), [dy[0], dy[1], dy[2]].map(f64::from));
        let weight = WEIGHT.map(f64::from);
        let r = (x.iter().map(|x| x * x).sum::<f64>() / 3.0 + eps).powf(-0.5);
        let dot: f64 = (0..3).map(|i| dy[i] * weight[i] * x[i]).sum();
        for (i, dweight) in dweight.iter_mut().enumerate() {
            y.push(x[i] * weight[i] * r);
            dx.push(r * dy[i] * weight[i] - x[i] * r.powi(3) * dot / 3.0);
            *dweight += dy[i] * x[i] * r;
        }
    }
    [y, dx, dweight]
}

#[test]
fn rms_norm_and_its_gradients_are_those_of_the_hand_formula() {
    let place = place();
    let place = place.path();
    let inputs = [floats("x", &[2, 1, 3], &X), floats("weight", &[3], &WEIGHT)];
    let both = [&inputs[..], &[floats("grad.y", &[2, 1, 3], &DY)]].concat();
    // From `--set`, else from the metadata, else the default; other keys are not read.
    for (metadata, set, eps) in [
        (("format", "pt"), &[] as &[&str], 1e-5),
        (("eps", "0.5"), &[], 0.5),
        (("eps", "0.5"), &["--set", "eps=2"], 2.0),
    ] {
        let metadata = [("producer", "by hand"), metadata];
        let (status, out, err) = op(place, &file(&both, &metadata), "rms_norm", set);
        assert_eq!((status, out.as_str(), err.as_str()), (0, "", ""));
        let bytes = fs::read(place.join("out.st")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        assert_eq!(names, ["grad.weight", "grad.x", "y"]);
        let [y, dx, dweight] = rms_norm(eps);
        for (name, shape, expected) in
            [("y", &[2, 1, 3][..], y), ("grad.x", &[2, 1, 3], dx), ("grad.weight", &[3], dweight)]
        {
            let view = tensors.tensor(name).unwrap();
            assert_eq!((view.dtype(), view.shape()), (Dtype::F32, shape), "{name}");
            let found = view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            for (found, expected) in found.zip(expected) {
                let wrong = (f64::from(found) - expected).abs();
                assert!(wrong < 2e-6, "{name}, eps {eps}: {found}, expected {expected}");
            }
        }
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let ran =
            [("op", "rms_norm"), ("device", "cpu"), ("kernel", "reference"), ("dtype", "f32")];
        let ran = HashMap::from(ran.map(|(k, v)| (k.to_string(), v.to_string())));
        assert_eq!(header.metadata().as_ref(), Some(&ran));
    }
    // No cotangent, no gradient.
    let (status, _, err) = op(place, &file(&inputs, &[]), "rms_norm", &[]);
    assert_eq!((status, err.as_str()), (0, ""));
    let bytes = fs::read(place.join("out.st")).unwrap();
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().names(), ["y"]);
}

/// What `kiln op` says of a file: status 2, one line, the output as it was before.
fn error(input: &[u8], name: &str, args: &[&str]) -> String {
    let mut lines = vec![];
    for before in [None, Some(b"old")] {
        let place = place();
        let place = place.path();
        let out = place.join("out.st");
        if let Some(before) = before {
            fs::write(&out, before).unwrap();
        }
        let (status, stdout, err) = op(place, input, name, args);
        assert_eq!((status, stdout.as_str()), (2, ""), "{name} {args:?}: {err}");
        assert_eq!(fs::read(&out).ok().as_deref(), before.map(|old| &old[..]), "{name} {args:?}");
        let files = fs::read_dir(place).unwrap().count();
        assert_eq!(files, 1 + usize::from(before.is_some()), "{name} {args:?}: files left");
        let line = err.strip_suffix('\n').filter(|line| !line.contains('\n'));
        lines.push(line.unwrap_or_else(|| panic!("{name} {args:?}: {err}")).to_string());
    }
    let line = lines.swap_remove(0);
    line.strip_prefix("error: ").unwrap_or_else(|| panic!("{line}")).to_string()
}

#[test]
fn errors_are_one_line_and_leave_no_file() {
    let zero = |name, shape: &[usize]| zeros(name, Dtype::F32, shape);
    let x = || floats("x", &[2, 3], &X);
    let weight = || floats("weight", &[3], &WEIGHT);
    let norm = |x, weight| file(&[x, weight], &[]);
    let with = |entry| file(&[x(), weight(), entry], &[]);
    let eps = file(&[x(), weight()], &[("eps", "-1")]);
    let good = norm(x(), weight());
    let cut = good[..good.len() - 1].to_vec();
    let missing = file(&[x()], &[]);
    let targets = file(&[zero("logits", &[2, 4]), integers("targets", &[2], &[0, 4])], &[]);
    let kv = ["k", "v"].map(|name| zero(name, &[1, 2, 5, 4]));
    let attention = file(&[&[zero("q", &[1, 3, 2, 4])][..], &kv].concat(), &[]);
    let alike = ["q", "k", "v"].map(|name| zero(name, &[1, 2, 4, 4]));
    let no_ends = file(&[&[integers("cu_seqlens", &[0], &[])][..], &alike].concat(), &[]);
    let rope = file(&[zero("x", &[1, 1, 2, 8])], &[]);
    let chains = [zero("a", &[2, 8]), zero("b", &[2, 9]), zero("c", &[2, 7]), zero("z", &[1, 2])];
    let bk = file(&chains, &[]);
    let rank = norm(x(), zero("weight", &[1, 3]));
    let empty = norm(zero("x", &[0, 3]), weight());
    let double = norm(zeros("x", Dtype::F64, &[2, 3]), weight());
    let mixed = norm(x(), zeros("weight", Dtype::BF16, &[3]));
    // Each line begins with the operator's name and a colon, but for the first three.
    let cases: [(&[u8], &str, &str, &str); 23] = [
        (b"", "rms_norm", "", "in.st: not a whole safetensors file: header too small"),
        (b"not a tensor", "rms_norm", "", "in.st: not a whole safetensors file: header too large"),
        (
            &cut,
            "rms_norm",
            "",
            "in.st: not a whole safetensors file: incomplete metadata, file not fully covered",
        ),
        (&missing, "rms_norm", "", "missing tensor `weight`, expected [D]"),
        (
            &with(zero("extra", &[1])),
            "rms_norm",
            "",
            "unknown tensor `extra`, expected x, weight, grad.y",
        ),
        (&with(zero("grad.y", &[6])), "rms_norm", "", "`grad.y` has shape [6], expected [2, 3]"),
        (&norm(zero("x", &[]), weight()), "rms_norm", "", "`x` has shape [], expected [..., D]"),
        (&rank, "rms_norm", "", "`weight` has shape [1, 3], expected [3]"),
        (&norm(x(), zero("weight", &[4])), "rms_norm", "", "`weight` has shape [4], expected [3]"),
        (&empty, "rms_norm", "", "`x` has no elements, its shape is [0, 3]"),
        (&double, "rms_norm", "", "`x` is F64, expected F32, BF16 or F16"),
        (&mixed, "rms_norm", "", "`weight` is BF16, expected F32 like the first input"),
        (&eps, "rms_norm", "", "attribute eps = -1, expected a number of at least 0"),
        (&good, "rms_norm", "eps=NaN", "attribute eps = NaN, expected a number of at least 0"),
        (&good, "rms_norm", "epsilon=1", "unknown attribute `epsilon`, expected eps"),
        (&rope, "rope", "offset=-1", "attribute offset = -1, expected an integer of at least 0"),
        (&rope, "rope", "layout=x", "attribute layout = x, expected half or interleaved"),
        (&bk, "bk", "", "`b` has shape [2, 9], expected [Bb, 7]"),
        (
            &no_ends,
            "attention",
            "",
            "`cu_seqlens` has shape [0], expected numbers, or that it is left out",
        ),
        (&attention, "attention", "causal=1", "attribute causal = 1, expected true or false"),
        (
            &attention,
            "attention",
            "",
            "`k` has shape [1, 2, 5, 4], expected [1, Hkv, S, 4] with 3 a multiple of \
             Hkv, S at least 1",
        ),
        (
            &targets,
            "cross_entropy",
            "",
            "`targets` is 4 at position 1, expected 0 to 3 or -100 (ignored)",
        ),
        (
            &targets,
            "cross_entropy",
            "ignore_index=x",
            "attribute ignore_index = x, expected an integer",
        ),
    ];
    for (case, (input, op, set, expected)) in cases.into_iter().enumerate() {
        let expected = if case < 3 { expected.to_string() } else { format!("{op}: {expected}") };
        let args = ["--set", set];
        assert_eq!(error(input, op, if set.is_empty() { &[] } else { &args }), expected);
    }

    // Lines that end in what there is to choose from, or in what the system says.
    for (op, args, expected) in [
        ("norm", ["--device", "cpu"], "unknown operator `norm`, expected one of rms_norm, "),
        ("rms_norm", ["--device", "abacus"], "unknown device `abacus`, expected auto, "),
        ("rms_norm", ["--set", "eps"], "--set eps: expected key=value"),
        ("rms_norm", ["--output", "."], "cannot write .: it is no regular file, expected a file"),
        ("rms_norm", ["--kernel", "fused"], "rms_norm: the fused kernel cannot run on cpu: "),
        ("rms_norm", ["--output", "gone/out.st"], "cannot write gone/out.st: "),
    ] {
        let line = error(&good, op, &args);
        assert!(line.starts_with(expected), "{op} {args:?}: {line}");
    }
}

/// Seeds that each fit and together do not are refused too, and what does not contribute needs no blueprint.
#[test]
fn seeds_are_looked_at() {
    let place = place();
    let place = place.path();
    let seeds = |alpha: [f32; 2], codes: [[i64; 2]; 3]| {
        let [lifecycle, rows, blend] = codes;
        vec![
            floats("x", &[1, 4], &[2.0; 4]),
            floats("alpha", &[2], &alpha),
            floats("blueprints", &[1, 4], &[3.0; 4]),
            integers("lifecycle", &[2], &lifecycle),
            integers("blueprint_id", &[2], &rows),
            integers("blend", &[2], &blend),
        ]
    };
    let right = seeds([0.5, 1.0], [[0, 7], [-1, 0], [0, 2]]);
    let both = [&right[..], &[floats("grad.y", &[1, 4], &[1.0; 4])]].concat();
    let (status, out, err) = op(place, &file(&both, &[]), "kasmina", &[]);
    assert_eq!((status, out.as_str(), err.as_str()), (0, "", ""));
    let bytes = fs::read(place.join("out.st")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for (name, expected) in [
        ("y", vec![2.0, 2.0, 5.0, 5.0]),
        ("mean", vec![2.0, 2.0]),
        ("var", vec![0.0, 0.0]),
        ("grad.x", vec![1.0; 4]),
        ("grad.alpha", vec![0.0, 6.0]),
        ("grad.blueprints", vec![0.0; 4]),
    ] {
        let found = tensors.tensor(name).unwrap();
        let found = found.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        assert_eq!(found.collect::<Vec<_>>(), expected, "{name}");
    }
    let cotangent = [&right[..], &[floats("grad.mean", &[2], &[1.0; 2])]].concat();
    for (input, what) in [
        (
            seeds([0.5; 2], [[0, 11], [0, 0], [0, 0]]),
            "`lifecycle` is 11 at position 1, expected 0 to 10",
        ),
        (
            seeds([0.5; 2], [[0, 0], [0, -2], [0, 0]]),
            "`blueprint_id` is -2 at position 1, expected -1 to 0",
        ),
        (seeds([0.5; 2], [[0, 0], [0, 0], [4, 0]]), "`blend` is 4 at position 0, expected 0 to 3"),
        (seeds([1.5, 0.5], [[0, 0], [0, 0], [0, 0]]), "`alpha` of seed 0 is 1.5, expected 0 to 1"),
        (
            seeds([0.5; 2], [[3, 0], [-1, 0], [0, 0]]),
            "`blueprint_id` of seed 0 is -1, expected a blueprint, since a seed that is Grafting contributes",
        ),
        (cotangent, "`mean` has no gradient, so it takes no cotangent"),
    ] {
        assert_eq!(error(&file(&input, &[]), "kasmina", &[]), format!("kasmina: {what}"));
    }
}

/// Runs `kiln op` there with nothing else: exit status, stdout, stderr.
fn plain(place: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::cargo_bin("kiln").unwrap();
    command.current_dir(place).env_remove("RUST_BACKTRACE").arg("op");
    let output = command.args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_list_is_of_all_operators_or_of_the_one_that_is_named() {
    let place = place();
    let (status, all, err) = plain(place.path(), &["--list"]);
    assert_eq!((status, err.as_str()), (0, ""));
    let heads = || all.lines().filter(|line| !line.starts_with(' '));
    assert!(heads().count() > 9, "{all}");
    let mut parts = String::new();
    for head in heads() {
        let (name, _) = head.split_once(": ").unwrap();
        let (status, one, err) = plain(place.path(), &[name, "--list"]);
        assert_eq!((status, err.as_str()), (0, ""), "{name}");
        parts += &one;
    }
    assert_eq!(parts, all);

    for (args, expected) in [
        (&["norm", "--list"][..], "error: unknown operator `norm`, expected one of rms_norm, "),
        (&["norm"], "error: unknown operator `norm`, expected one of rms_norm, "),
        (&["rms_norm"], "error: --input FILE and --output FILE are missing"),
        (&["rms_norm", "--input", "in.st"], "error: --output FILE is missing"),
        (&["--list", "--input", "in.st"], "error: the argument '--list' cannot be used with"),
        (&["--list", "--output", "out.st"], "error: the argument '--list' cannot be used with"),
        (&["--list", "--set", "eps=1"], "error: the argument '--list' cannot be used with"),
    ] {
        let (status, out, err) = plain(place.path(), args);
        assert_eq!((status, out.as_str(), err.lines().count()), (2, "", 1), "{args:?}: {err}");
        assert!(err.starts_with(expected), "{args:?}: {err}");
    }
}

#[test]
fn the_input_is_not_written_over() {
    let place = place();
    let place = place.path();
    let input = file(&[floats("x", &[2, 3], &X), floats("weight", &[3], &WEIGHT)], &[]);
    fs::create_dir(place.join("folder")).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink("in.st", place.join("link.st")).unwrap();
    let link = cfg!(unix).then_some("link.st");
    for output in ["in.st", "./in.st", "folder/../in.st"].into_iter().chain(link) {
        let (status, out, err) = op(place, &input, "rms_norm", &["--output", output]);
        let expected =
            format!("error: --output {output} is the file of --input in.st, expected another\n");
        assert_eq!((status, out.as_str(), err), (2, "", expected));
        assert_eq!(fs::read(place.join("in.st")).unwrap(), input);
    }
}

#[test]
fn an_attribute_is_set_once() {
    let input = file(&[floats("x", &[2, 3], &X), floats("weight", &[3], &WEIGHT)], &[]);
    let line = error(&input, "rms_norm", &["--set", "eps=1", "--set", "eps=2"]);
    assert_eq!(line, "rms_norm: --set eps=2: `eps` is set before, expected once");
}

#[cfg(unix)]
#[test]
fn the_output_is_a_file_or_leads_to_one() {
    let place = place();
    let place = place.path();
    let input = file(&[floats("x", &[2, 3], &X), floats("weight", &[3], &WEIGHT)], &[]);
    // A socket, since a device would be one of this machine.
    let _socket = std::os::unix::net::UnixListener::bind(place.join("socket")).unwrap();
    std::os::unix::fs::symlink("socket", place.join("special.st")).unwrap();
    std::os::unix::fs::symlink("gone", place.join("nowhere.st")).unwrap();
    for (output, what) in [
        ("socket", "it is no regular file"),
        ("special.st", "it is no regular file"),
        ("nowhere.st", "it is a link to what is not there"),
    ] {
        let (status, _, err) = op(place, &input, "rms_norm", &["--output", output]);
        let expected = format!("error: cannot write {output}: {what}, expected a file\n");
        assert_eq!((status, err), (2, expected));
    }
    assert!(place.join("special.st").is_symlink() && place.join("nowhere.st").is_symlink());

    fs::create_dir(place.join("folder")).unwrap();
    fs::write(place.join("folder/real.st"), "old").unwrap();
    std::os::unix::fs::symlink("folder/real.st", place.join("link.st")).unwrap();
    let (status, _, err) = op(place, &input, "rms_norm", &["--output", "link.st"]);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(place.join("link.st").is_symlink());
    let bytes = fs::read(place.join("folder/real.st")).unwrap();
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().names(), ["y"]);
}

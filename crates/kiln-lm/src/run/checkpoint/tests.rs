//! Damage of every kind, pruning, and a save cut off after each of its steps.

use super::super::disk::fault;
use super::*;
use std::io::Write;

struct Place {
    _folder: tempfile::TempDir,
    dir: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("checkpoints");
        Self { _folder: folder, dir }
    }

    fn open(&self, keep: usize) -> CheckpointStore {
        CheckpointStore::open(&self.dir, keep).expect("opened")
    }

    fn names(&self) -> Vec<String> {
        let mut names = CheckpointStore::view(&self.dir).names().expect("listed");
        names.sort();
        names
    }
}

/// Weights that tell the step and the attempt they are of.
fn weights(step: u64, attempt: u8) -> Vec<u8> {
    (0..1000).map(|i| (i as u8).wrapping_mul(7).wrapping_add(step as u8) ^ attempt).collect()
}

fn save(store: &CheckpointStore, step: u64, loss: Option<f64>) -> PathBuf {
    save_attempt(store, step, loss, 0).expect("saved")
}

fn save_attempt(
    store: &CheckpointStore,
    step: u64,
    loss: Option<f64>,
    attempt: u8,
) -> Result<PathBuf, CheckpointError> {
    let weights = weights(step, attempt);
    store.save(step, &[("weights.safetensors", &weights), ("state.json", b"{\"seed\":1}")], loss)
}

fn latest(store: &CheckpointStore) -> (Checkpoint, Vec<String>) {
    let latest = store.latest().expect("one is whole");
    let rejected = latest.rejected.iter().map(ToString::to_string).collect();
    (latest.checkpoint.expect("not empty"), rejected)
}

#[test]
fn what_is_saved_is_read_back() {
    let place = Place::new();
    let store = place.open(2);
    assert!(store.latest().expect("empty").checkpoint.is_none());
    assert!(store.best().expect("empty").checkpoint.is_none());

    let path = save(&store, 1000, Some(1.5));
    assert!(path.ends_with("step-00001000"));
    let (checkpoint, rejected) = latest(&store);
    assert_eq!(rejected, [""; 0]);
    assert_eq!(checkpoint.step(), 1000);
    assert_eq!(checkpoint.validation_loss(), Some(1.5));
    assert_eq!(checkpoint.path(), path);
    assert_eq!(checkpoint.read("weights.safetensors").expect("read"), weights(1000, 0));
    assert_eq!(checkpoint.read("state.json").expect("read"), b"{\"seed\":1}");
    let line = checkpoint.read("optimizer").expect_err("not there").to_string();
    assert!(line.ends_with("holds no file \"optimizer\", only state.json, weights.safetensors"));
}

#[test]
fn a_store_that_does_not_exist_reads_as_empty_and_is_not_created() {
    let place = Place::new();
    let store = CheckpointStore::view(&place.dir);
    assert!(store.latest().expect("empty").checkpoint.is_none());
    assert!(!place.dir.exists());
}

#[test]
fn damaged_checkpoints_are_passed_over_and_named() {
    let place = Place::new();
    let store = place.open(10);
    for step in (1..=7).map(|i| i * 1000) {
        save(&store, step, None);
    }
    let file = |step: u64, name: &str| store.path(step).join(name);
    // Truncated.
    fs::write(file(2000, "weights.safetensors"), &weights(2000, 0)[..120]).expect("written");
    // One bit.
    let mut altered = weights(3000, 0);
    altered[500] ^= 1;
    fs::write(file(3000, "weights.safetensors"), altered).expect("written");
    fs::remove_file(file(4000, "state.json")).expect("removed");
    fs::remove_file(file(5000, MANIFEST)).expect("removed");
    let manifest = fs::read_to_string(file(6000, MANIFEST)).expect("read");
    fs::write(file(6000, MANIFEST), &manifest[..manifest.len() / 2]).expect("written");
    fs::write(file(7000, MANIFEST), manifest.replace("\"format\": 1", "\"format\": 9"))
        .expect("written");

    let (checkpoint, rejected) = latest(&store);
    assert_eq!(checkpoint.step(), 1000);
    assert_eq!(rejected.len(), 6);
    assert_eq!(
        rejected[0],
        "step-00007000: manifest.json is of format 9, this version reads format 1"
    );
    assert!(rejected[1].starts_with("step-00006000: manifest.json is damaged: "), "{rejected:?}");
    assert_eq!(rejected[2], "step-00005000: manifest.json is missing");
    assert_eq!(rejected[3], "step-00004000: state.json is missing");
    assert!(rejected[4].starts_with("step-00003000: weights.safetensors was altered: checksum "));
    assert_eq!(
        rejected[5],
        "step-00002000: weights.safetensors is 120 bytes, the manifest says 1000"
    );

    fs::remove_file(file(1000, "weights.safetensors")).expect("removed");
    match store.latest() {
        Err(error @ CheckpointError::NoneValid { .. }) => {
            let line = error.to_string();
            for step in 1..=7 {
                assert!(line.contains(&format!("step-0000{step}000: ")), "{line}");
            }
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn manifests_of_another_step_or_with_paths_are_refused() {
    let place = Place::new();
    let store = place.open(10);
    save(&store, 1, None);
    let path = save(&store, 2, None).join(MANIFEST);
    fs::copy(store.path(1).join(MANIFEST), &path).expect("copied");
    let (checkpoint, rejected) = latest(&store);
    assert_eq!(checkpoint.step(), 1);
    assert_eq!(rejected, ["step-00000002: manifest.json is damaged: it is of step 1"]);

    let text = fs::read_to_string(&path).expect("read");
    let text = text.replace("\"step\": 1", "\"step\": 2").replace("state.json", "../state.json");
    fs::write(&path, text).expect("written");
    let (_, rejected) = latest(&store);
    assert!(rejected[0].contains("\"../state.json\" is no file name"), "{rejected:?}");
}

#[test]
fn a_file_altered_after_it_was_verified_is_not_read() {
    let place = Place::new();
    let store = place.open(1);
    let path = save(&store, 5, None);
    let (checkpoint, _) = latest(&store);
    let mut file =
        fs::OpenOptions::new().append(true).open(path.join("state.json")).expect("opened");
    file.write_all(b" ").expect("written");
    let line = checkpoint.read("state.json").expect_err("altered").to_string();
    assert!(line.ends_with("state.json is 11 bytes, the manifest says 10"), "{line}");
}

#[test]
fn the_last_and_the_best_stay() {
    let place = Place::new();
    let store = place.open(2);
    for (step, loss) in [(1, 2.0), (2, 1.0), (3, 1.5), (4, f64::NAN), (5, 1.2), (6, 1.3)] {
        save(&store, step, Some(loss));
    }
    assert_eq!(place.names(), ["step-00000002", "step-00000005", "step-00000006"]);
    assert_eq!(store.best().expect("readable").checkpoint.expect("measured").step(), 2);
    // A better one takes the place of the best.
    save(&store, 7, Some(0.9));
    assert_eq!(place.names(), ["step-00000006", "step-00000007"]);
}

#[test]
fn nan_is_not_a_validation_loss() {
    let place = Place::new();
    let store = place.open(5);
    save(&store, 1, Some(f64::NAN));
    save(&store, 2, Some(f64::INFINITY));
    assert!(store.best().expect("readable").checkpoint.is_none());
    assert_eq!(latest(&store).0.validation_loss(), None);
}

#[test]
fn the_best_is_verified_too() {
    let place = Place::new();
    let store = place.open(5);
    save(&store, 1, Some(1.1));
    let best = save(&store, 2, Some(1.0));
    save(&store, 3, Some(1.2));
    fs::write(best.join("state.json"), b"{\"seed\":2}").expect("written");
    let found = store.best().expect("readable");
    assert_eq!(found.checkpoint.expect("another").step(), 1);
    let rejected: Vec<_> = found.rejected.iter().map(|rejected| &rejected.name[..]).collect();
    assert_eq!(rejected, ["step-00000002"]);
}

#[test]
fn damaged_checkpoints_neither_count_nor_vanish_and_the_saved_one_stays() {
    let place = Place::new();
    let store = place.open(1);
    save(&store, 1000, None);
    fs::remove_file(save(&store, 3000, None).join(MANIFEST)).expect("removed");
    assert_eq!(place.names(), ["step-00003000"]);
    save(&store, 1500, None);
    save(&store, 2000, None);
    assert_eq!(place.names(), ["step-00002000", "step-00003000"]);
    assert_eq!(latest(&store).0.step(), 2000);
    // Going on from an older step: the one just saved stays although a newer one is there.
    save(&store, 3000, None);
    save(&store, 2500, None);
    assert_eq!(place.names(), ["step-00002500", "step-00003000"]);
}

#[test]
fn a_step_is_replaced() {
    let place = Place::new();
    let store = place.open(1);
    save(&store, 1, Some(2.0));
    save_attempt(&store, 1, Some(1.0), 9).expect("replaced");
    assert_eq!(place.names(), ["step-00000001"]);
    let (checkpoint, _) = latest(&store);
    assert_eq!(checkpoint.validation_loss(), Some(1.0));
    assert_eq!(checkpoint.read("weights.safetensors").expect("read"), weights(1, 9));
}

#[test]
fn leftovers_go_when_the_store_is_opened_and_only_then() {
    let place = Place::new();
    let store = place.open(2);
    save(&store, 1, None);
    for name in [".saving-step-00000002", ".pruned-step-00000000", ".replaced-step-00000001"] {
        fs::create_dir_all(place.dir.join(name)).expect("created");
        fs::write(place.dir.join(name).join("weights.safetensors"), b"torn").expect("written");
    }
    fs::write(place.dir.join("notes.txt"), b"mine").expect("written");
    assert_eq!(latest(&CheckpointStore::view(&place.dir)).0.step(), 1);
    assert_eq!(place.names().len(), 5);
    place.open(2);
    assert_eq!(place.names(), ["notes.txt", "step-00000001"]);
    // The only copy of a step comes back.
    fs::rename(store.path(1), place.dir.join(".replaced-step-00000001")).expect("renamed");
    assert_eq!(latest(&place.open(2)).0.read("state.json").expect("read"), b"{\"seed\":1}");
}

#[test]
fn names_that_are_no_plain_file_names_are_refused() {
    let place = Place::new();
    let store = place.open(1);
    for name in ["", ".", "..", "../x", "a/b", "a\\b", "C:x", "manifest.json"] {
        let error = store.save(1, &[(name, b"x")], None).expect_err(name);
        assert!(matches!(error, CheckpointError::FileName { .. }), "{name}: {error}");
    }
    let error = store.save(1, &[("a", b"x"), ("a", b"y")], None).expect_err("twice");
    assert!(error.to_string().ends_with("it is given twice"));
    assert_eq!(place.names(), [""; 0]);
}

/// Cuts the disk off after every number of steps that a save of `step` takes, and checks that
/// the store then holds the checkpoint from before or the complete new one.
fn cut_off_everywhere(step: u64) {
    let mut outcomes = BTreeSet::new();
    for steps in 0.. {
        let place = Place::new();
        let store = place.open(1);
        save(&store, 1, Some(1.0));
        save(&store, 2, Some(2.0));
        let (result, failed) =
            fault::after(steps, || save_attempt(&store, step, Some(3.0), 5).is_ok());
        if !failed {
            assert!(result, "nothing failed");
            break;
        }

        let view = CheckpointStore::view(&place.dir).latest().expect("one is whole");
        let seen = view.checkpoint.expect("one is there").step();
        // Only while the sole rename is under way may a reader see step 1 in place of step 2.
        assert!(seen == 2 || seen == step || step == 2, "{steps}: reader sees {seen}");

        let (checkpoint, rejected) = latest(&place.open(1));
        assert_eq!(rejected, [""; 0], "after {steps} steps");
        let new = checkpoint.validation_loss() == Some(3.0);
        let expected = if new { (step, weights(step, 5)) } else { (2, weights(2, 0)) };
        let read = checkpoint.read("weights.safetensors").expect("whole");
        assert_eq!((checkpoint.step(), read), expected, "after {steps} steps");
        assert!(new || !result, "reported saved but lost, after {steps} steps");
        // The best is never lost on the way.
        let best = place.open(1).best().expect("readable").checkpoint.expect("measured");
        assert_eq!(best.step(), 1, "after {steps} steps");
        assert!(place.names().iter().all(|name| name.starts_with("step-")), "{:?}", place.names());
        outcomes.insert(new);
    }
    assert_eq!(outcomes, BTreeSet::from([false, true]), "both sides of the rename were cut");
}

#[test]
fn a_save_cut_off_at_any_step_loses_nothing() {
    cut_off_everywhere(3);
}

#[test]
fn a_replacement_cut_off_at_any_step_loses_nothing() {
    cut_off_everywhere(2);
}

#[test]
fn a_save_that_fails_can_be_tried_again() {
    let place = Place::new();
    let store = place.open(3);
    save(&store, 1, None);
    for steps in 0..9 {
        let (result, _) = fault::after(steps, || save_attempt(&store, 2, None, 1));
        assert!(result.is_err(), "{steps}");
        assert!(result.expect_err("failed").to_string().contains("the disk was cut off"));
    }
    save_attempt(&store, 2, None, 2).expect("the disk is back");
    assert_eq!(latest(&store).0.read("weights.safetensors").expect("read"), weights(2, 2));
    assert_eq!(place.names(), ["step-00000001", "step-00000002"]);
}

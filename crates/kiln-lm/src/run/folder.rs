//! What stands where in the folder of a run.

use super::checkpoint::{CheckpointError, CheckpointStore};
use super::disk::{DiskError, create_folder, named, replace_file};
use super::metrics::{METRICS, MetricsError, MetricsLog};
use super::tensorboard::EventWriter;
use crate::config::{self, Config, ConfigError};
use crate::data::DataId;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a run folder cannot be created or opened.
#[derive(Debug, Error)]
pub enum RunDirError {
    /// There is a run in the folder.
    #[error(
        "the folder {} holds a run already: continue it with --resume, or choose another with \
         --set train.out=...", path.display()
    )]
    HoldsRun {
        /// The folder.
        path: PathBuf,
    },
    /// There is no run in the folder.
    #[error("{} holds no run: expected a folder with a config.toml in it", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// Another process trains there.
    #[error("the folder {} is in use: a run goes on in it, and has to stop first", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// The filesystem refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// `data.json` says nothing.
    #[error("{}: expected what tells the text of the run from others: {reason}", path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: serde_json::Error,
    },
    /// The configuration cannot be read or written.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// The folder of a run.
///
/// ```text
/// config.toml       the effective configuration
/// tokenizer.json    the tokenizer
/// data.json         what tells its text from others
/// metrics.jsonl     the metrics, one record a line
/// loss.svg          the loss curve, drawn from the metrics
/// seeds.svg         of a model with seeds, their states and alphas too
/// checkpoints/      step-00001000 and so on
/// tensorboard/      the metrics as event files
/// lock              locked by the process that trains
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    root: PathBuf,
}

/// Keeps others from training in a folder, as long as it lives.
#[derive(Debug)]
pub struct RunLock {
    _file: Option<File>,
}

impl RunDir {
    /// Starts a run in a folder, which is created if need be, must not hold another run, and is locked before anything
    /// is written.
    pub fn create(
        root: impl Into<PathBuf>,
        config: &Config,
    ) -> Result<(Self, RunLock), RunDirError> {
        let run = Self { root: root.into() };
        let text = config::to_toml(config)?;
        create_folder(&run.root)?;
        let lock = run.lock()?;
        for path in [run.config(), run.metrics(), run.checkpoints()] {
            if named(path.try_exists(), "look at", &path)? {
                return Err(RunDirError::HoldsRun { path: run.root });
            }
        }
        replace_file(&run.config(), text.as_bytes())?;
        Ok((run, lock))
    }

    /// Opens the folder of a run that was created before.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, RunDirError> {
        let run = Self { root: root.into() };
        let config = run.config();
        let is_file = run.root.is_file();
        if !is_file && named(config.try_exists(), "look at", &config)? {
            Ok(run)
        } else {
            Err(RunDirError::NoRun { path: run.root })
        }
    }

    /// The folder of a run whose own `config.toml` this is; none if it lies elsewhere.
    pub fn of_config(path: &Path) -> Option<PathBuf> {
        let folder = path.parent()?;
        let here = folder.as_os_str().is_empty();
        let run = Self { root: if here { ".".into() } else { folder.to_path_buf() } };
        // A copy may have lost its checkpoints; the folder of a checkpoint has a file of that name, too, and none of these.
        let remains = [run.checkpoints(), run.metrics(), run.lock_file()];
        let own = path.file_name() == run.config().file_name();
        (own && remains.iter().any(|of| of.exists())).then_some(run.root)
    }

    /// Takes the folder for training. On a filesystem without locks nobody is kept away.
    ///
    /// # Errors
    ///
    /// [`RunDirError::InUse`] if another has it.
    pub fn lock(&self) -> Result<RunLock, RunDirError> {
        let path = self.lock_file();
        let file = File::options().create(true).append(true).open(&path);
        let file = named(file, "write", &path)?;
        match file.try_lock() {
            Ok(()) => Ok(RunLock { _file: Some(file) }),
            Err(TryLockError::WouldBlock) => Err(RunDirError::InUse { path: self.root.clone() }),
            Err(TryLockError::Error(_)) => Ok(RunLock { _file: None }),
        }
    }

    fn lock_file(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `config.toml`.
    pub fn config(&self) -> PathBuf {
        self.root.join("config.toml")
    }

    /// `tokenizer.json`.
    pub fn tokenizer(&self) -> PathBuf {
        self.root.join("tokenizer.json")
    }

    /// `data.json`.
    pub fn data(&self) -> PathBuf {
        self.root.join("data.json")
    }

    /// `metrics.jsonl`.
    pub fn metrics(&self) -> PathBuf {
        self.root.join(METRICS)
    }

    /// `loss.svg`.
    pub fn curve(&self) -> PathBuf {
        self.root.join("loss.svg")
    }

    /// `seeds.svg`.
    pub fn seeds(&self) -> PathBuf {
        self.root.join("seeds.svg")
    }

    /// `checkpoints/`.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// `tensorboard/`.
    pub fn tensorboard(&self) -> PathBuf {
        self.root.join("tensorboard")
    }

    /// Reads `config.toml`, with overrides as in [`config::load`].
    pub fn load_config(&self, overrides: &[String]) -> Result<Config, RunDirError> {
        Ok(config::load(&self.config(), overrides)?)
    }

    /// Replaces `config.toml`, as a resumed run with overrides does.
    pub fn save_config(&self, config: &Config) -> Result<(), RunDirError> {
        Ok(replace_file(&self.config(), config::to_toml(config)?.as_bytes())?)
    }

    /// Replaces `data.json`.
    pub fn save_data(&self, data: &DataId) -> Result<(), RunDirError> {
        let json = serde_json::to_vec_pretty(data).expect("plain numbers and strings");
        self.save_file(&self.data(), &json)
    }

    /// Reads `data.json`; none in a run of Kiln before 2026-11-29.
    pub fn load_data(&self) -> Result<Option<DataId>, RunDirError> {
        let path = self.data();
        let json = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => named(read, "read", &path)?,
        };
        let data = serde_json::from_slice(&json);
        data.map(Some).map_err(|reason| RunDirError::Data { path, reason })
    }

    /// Replaces a file of the run as a whole, such as `tokenizer.json`.
    pub fn save_file(&self, path: &Path, bytes: &[u8]) -> Result<(), RunDirError> {
        Ok(replace_file(path, bytes)?)
    }

    /// Opens the checkpoints to save to; [`CheckpointStore::view`] reads them beside a run.
    pub fn open_checkpoints(&self, keep: usize) -> Result<CheckpointStore, CheckpointError> {
        CheckpointStore::open(self.checkpoints(), keep)
    }

    /// Opens the metrics; see [`MetricsLog::open`].
    pub fn open_metrics(&self, resume_from_step: Option<u64>) -> Result<MetricsLog, MetricsError> {
        MetricsLog::open(&self.root, resume_from_step)
    }

    /// Starts an event file; see [`EventWriter::create`].
    pub fn open_tensorboard(
        &self,
        resume_from_step: Option<u64>,
    ) -> Result<EventWriter, DiskError> {
        EventWriter::create(&self.tensorboard(), resume_from_step)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Record, curve, metrics};
    use super::*;

    fn config() -> Config {
        config::parse("[data]\nsources = [\"a.txt\"]\n", "test", &[]).expect("valid")
    }

    #[test]
    fn a_run_is_created_once_and_opened_afterwards() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().join("runs/x");
        assert!(matches!(RunDir::open(&root), Err(RunDirError::NoRun { .. })));
        let run = RunDir::create(&root, &config()).expect("created").0;
        let line = RunDir::create(&root, &config()).expect_err("taken").to_string();
        assert_eq!(
            line,
            format!(
                "the folder {} holds a run already: continue it with --resume, or choose another \
                 with --set train.out=...",
                root.display()
            )
        );
        assert_eq!(RunDir::open(&root).expect("opened"), run);
        assert_eq!(run.load_config(&[]).expect("valid"), config());
        let changed = run.load_config(&["train.steps=7".into()]).expect_err("warm-up is longer");
        assert!(changed.to_string().contains("schedule.warmup is 20"), "{changed}");
        let changed = run.load_config(&["train.steps=70".into()]).expect("valid");
        run.save_config(&changed).expect("saved");
        assert_eq!(run.load_config(&[]).expect("valid").train.steps, 70);
    }

    #[test]
    fn the_configuration_of_a_run_is_told_from_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let (run, _lock) = RunDir::create(folder.path(), &config()).expect("created");
        // It has no checkpoint yet.
        assert_eq!(RunDir::of_config(&run.config()).as_deref(), Some(run.root()));
        assert_eq!(RunDir::of_config(&run.data()), None);
        let checkpoint = run.checkpoints().join("step-00000001/config.toml");
        fs::create_dir_all(checkpoint.parent().expect("a folder")).expect("created");
        fs::write(&checkpoint, b"").expect("written");
        assert_eq!(RunDir::of_config(&checkpoint), None);
    }

    #[test]
    fn one_trains_in_a_folder_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let (run, lock) = RunDir::create(folder.path(), &config()).expect("created");
        let again = RunDir::create(folder.path(), &config());
        assert!(matches!(again, Err(RunDirError::InUse { .. })));
        let line = run.lock().expect_err("taken").to_string();
        let root = folder.path().display();
        assert_eq!(
            line,
            format!("the folder {root} is in use: a run goes on in it, and has to stop first")
        );
        drop(lock);
        run.lock().expect("free again");
    }

    #[test]
    fn a_folder_with_other_files_is_fine_and_one_with_remains_of_a_run_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("notes.txt"), b"mine").expect("written");
        fs::create_dir(folder.path().join("checkpoints")).expect("created");
        assert!(matches!(
            RunDir::create(folder.path(), &config()),
            Err(RunDirError::HoldsRun { .. })
        ));
        fs::remove_dir(folder.path().join("checkpoints")).expect("removed");
        RunDir::create(folder.path(), &config()).expect("created");
        assert!(folder.path().join("notes.txt").exists());
    }

    #[test]
    fn the_parts_of_a_run_stand_in_its_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = RunDir::create(folder.path(), &config()).expect("created").0;
        let record = Record::new(Kind::Train, 1).with("loss", 2.0);
        run.open_metrics(None).expect("opened").log(&record).expect("logged");
        run.open_tensorboard(None).expect("opened").log(&record).expect("logged");
        run.open_checkpoints(1).expect("opened").save(1, &[("a", b"x")], None).expect("saved");
        run.save_file(&run.tokenizer(), b"{}").expect("saved");
        let records = metrics::read(&run.metrics()).expect("read");
        curve::draw(&records, &run.curve(), "run", None).expect("drawn");
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .expect("listed")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [
                "checkpoints",
                "config.toml",
                "lock",
                "loss.svg",
                "metrics.jsonl",
                "tensorboard",
                "tokenizer.json"
            ]
        );
    }
}

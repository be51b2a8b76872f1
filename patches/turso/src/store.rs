//! The entries: one file each, named by a hash of namespace and key.

use crate::{Error, Result};
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A directory of entries.
#[derive(Clone, Debug)]
pub struct Database {
    directory: PathBuf,
    read_only: bool,
}

pub(crate) struct Entry {
    pub namespace: String,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub origin: i64,
}

const MAGIC: &[u8; 8] = b"kilnent2";
/// The namespace of what stands in the table `meta`; the table of entries has none of that name.
const META: &str = "";

impl Entry {
    /// None for a file that is not an entry, or not all of one.
    fn read(path: &Path) -> Result<Option<Entry>> {
        let mut bytes = Vec::new();
        match File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)) {
            Ok(_) => Ok(Entry::decode(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::IoError(error.kind(), "reading a kept kernel")),
        }
    }

    fn decode(bytes: &[u8]) -> Option<Entry> {
        // A file that a crash cut short or filled with something else is none.
        let (body, sum) = bytes.split_last_chunk::<16>()?;
        if hash(body) != u128::from_le_bytes(*sum) {
            return None;
        }
        let mut rest = body.strip_prefix(MAGIC)?;
        let mut number = || -> Option<i64> {
            let (head, tail) = rest.split_first_chunk::<8>()?;
            rest = tail;
            Some(i64::from_le_bytes(*head))
        };
        let origin = number()?;
        let [namespace, key, value] = [number()?, number()?, number()?];
        let mut part = |length: i64| -> Option<Vec<u8>> {
            let (head, tail) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            rest = tail;
            Some(head.to_vec())
        };
        let namespace = String::from_utf8(part(namespace)?).ok()?;
        let (key, value) = (part(key)?, part(value)?);
        rest.is_empty().then_some(Entry { namespace, key, value, origin })
    }
}

impl Database {
    pub(crate) fn open(directory: PathBuf, read_only: bool) -> Result<Self> {
        if !read_only {
            fs::create_dir_all(&directory)
                .map_err(|error| Error::IoError(error.kind(), "creating the store of kernels"))?;
            tidy(&directory);
        }
        Ok(Self { directory, read_only })
    }

    pub(crate) fn get(&self, namespace: &str, key: &[u8]) -> Result<Option<Entry>> {
        let entry = Entry::read(&self.path(namespace, key))?;
        Ok(entry.filter(|entry| entry.namespace == namespace && entry.key == key))
    }

    /// Whole entries; others are left out.
    pub(crate) fn scan(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for path in self.files()? {
            entries.extend(Entry::read(&path)?.filter(|entry| entry.namespace != META));
        }
        Ok(entries)
    }

    /// One that is there stays, unless it was imported (origin 1) and this one was not, or cannot be read.
    pub(crate) fn insert(
        &self,
        namespace: &str,
        key: &[u8],
        value: &[u8],
        origin: i64,
    ) -> Result<u64> {
        let path = self.path(namespace, key);
        let staged = self.stage(namespace, key, value, origin)?;
        match fs::hard_link(&staged, &path) {
            Ok(()) => {
                let _ = fs::remove_file(staged);
                return Ok(1);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let stays =
                    self.get(namespace, key)?.is_some_and(|old| old.origin != 1 || origin != 0);
                if stays {
                    let _ = fs::remove_file(staged);
                    return Ok(0);
                }
            }
            Err(_) => {} // a file system without links: the last writer wins
        }
        place(&staged, &path)
    }

    pub(crate) fn replace(
        &self,
        namespace: &str,
        key: &[u8],
        value: &[u8],
        origin: i64,
    ) -> Result<u64> {
        place(&self.stage(namespace, key, value, origin)?, &self.path(namespace, key))
    }

    pub(crate) fn remove_one(&self, namespace: &str, key: &[u8]) -> Result<u64> {
        match self.get(namespace, key)? {
            Some(_) => remove(&self.path(namespace, key)),
            None => Ok(0),
        }
    }

    pub(crate) fn remove(&self, which: impl Fn(&str, &[u8]) -> bool) -> Result<u64> {
        let mut count = 0;
        for path in self.files()? {
            let goes =
                |entry: Entry| entry.namespace != META && which(&entry.namespace, &entry.key);
            if Entry::read(&path)?.is_none_or(goes) {
                count += remove(&path)?;
            }
        }
        Ok(count)
    }

    pub(crate) fn meta(&self, key: &str) -> Result<Option<String>> {
        Ok(self.get(META, key.as_bytes())?.and_then(|entry| String::from_utf8(entry.value).ok()))
    }

    pub(crate) fn set_meta(&self, key: &str, value: &str) -> Result<u64> {
        self.replace(META, key.as_bytes(), value.as_bytes(), 0)
    }

    fn path(&self, namespace: &str, key: &[u8]) -> PathBuf {
        // An entry is known by what stands in it, the name only finds it.
        let name = hash(&[namespace.as_bytes(), &[0], key].concat());
        self.directory.join(format!("{name:032x}"))
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let read = || -> io::Result<Vec<PathBuf>> {
            let paths = fs::read_dir(&self.directory)?.map(|entry| Ok(entry?.path()));
            paths.filter(|path| path.as_ref().map_or(true, |path| named(path))).collect()
        };
        match read() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read.map_err(|error| Error::IoError(error.kind(), "listing kept kernels")),
        }
    }

    /// The entry in a file of its own, beside its place.
    fn stage(&self, namespace: &str, key: &[u8], value: &[u8], origin: i64) -> Result<PathBuf> {
        if self.read_only {
            return Err(Error::IoError(io::ErrorKind::ReadOnlyFilesystem, "keeping a kernel"));
        }
        let mut bytes = MAGIC.to_vec();
        let lengths = [namespace.len(), key.len(), value.len()].map(|length| length as i64);
        for number in [origin].into_iter().chain(lengths) {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend([namespace.as_bytes(), key, value].concat());
        bytes.extend(hash(&bytes).to_le_bytes());
        // Of a name that no other process has, on this machine or on one that shares the directory.
        let (path, mut file) = loop {
            let random = RandomState::new().build_hasher().finish();
            let path = self.directory.join(format!("{random:016x}.tmp"));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::IoError(error.kind(), "keeping a kernel")),
                Ok(file) => break (path, file),
            }
        };
        match file.write_all(&bytes) {
            Ok(()) => Ok(path),
            Err(error) => {
                let _ = fs::remove_file(&path);
                Err(Error::IoError(error.kind(), "keeping a kernel"))
            }
        }
    }
}

/// FNV-1a of 128 bits.
fn hash(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0x6c62272e07bb014262b821756295c58d, |hash, &byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013B)
    })
}

/// Whether a file is named as entries are.
fn named(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Removes what writers that did not live to the end have left, an hour ago or longer.
fn tidy(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let age =
            entry.metadata().and_then(|data| data.modified()).ok().and_then(|t| t.elapsed().ok());
        let stale = age.is_some_and(|age| age > Duration::from_secs(3600));
        if stale && path.extension().is_some_and(|extension| extension == "tmp") {
            let _ = fs::remove_file(path);
        }
    }
}

fn place(staged: &Path, path: &Path) -> Result<u64> {
    fs::rename(staged, path).map(|()| 1).map_err(|error| {
        let _ = fs::remove_file(staged);
        Error::IoError(error.kind(), "keeping a kernel")
    })
}

fn remove(path: &Path) -> Result<u64> {
    match fs::remove_file(path) {
        Ok(()) => Ok(1),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(Error::IoError(error.kind(), "removing a kept kernel")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (PathBuf, Database) {
        let random = RandomState::new().build_hasher().finish();
        let directory = std::env::temp_dir().join(format!("kept-{random:x}"));
        (directory.clone(), Database::open(directory, false).unwrap())
    }

    fn value(store: &Database, key: &[u8]) -> Option<Vec<u8>> {
        store.get("cuda", key).unwrap().map(|entry| entry.value)
    }

    #[test]
    fn the_first_local_value_stays_and_replaces_an_imported_one() {
        let (directory, store) = store();
        assert_eq!(store.insert("cuda", b"k", b"imported", 1), Ok(1));
        assert_eq!(store.insert("cuda", b"k", b"again", 1), Ok(0));
        assert_eq!(store.insert("cuda", b"k", b"local", 0), Ok(1));
        assert_eq!(store.insert("cuda", b"k", b"other", 0), Ok(0));
        assert_eq!(value(&store, b"k").unwrap(), b"local");
        assert_eq!(store.replace("cuda", b"k", b"new", 0), Ok(1));
        let again = Database::open(directory.clone(), true).unwrap();
        assert_eq!(value(&again, b"k").unwrap(), b"new");
        assert!(again.insert("cuda", b"l", b"x", 0).is_err(), "it is read-only");
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_broken_file_is_no_entry_and_is_written_again() {
        let (directory, store) = store();
        store.insert("cuda", b"k", b"whole", 0).unwrap();
        let path = store.path("cuda", b"k");
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[50] ^= 1;
        for broken in [&whole[..whole.len() - 3], &whole[..5], &[], &flipped] {
            fs::write(&path, broken).unwrap();
            assert_eq!(value(&store, b"k"), None);
            assert_eq!(store.insert("cuda", b"k", b"mended", 0), Ok(1));
            assert_eq!(value(&store, b"k").unwrap(), b"mended");
        }
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn removing_keeps_other_files_and_what_is_known_of_the_store() {
        let (directory, store) = store();
        store.set_meta("schema_version", "3").unwrap();
        fs::write(directory.join("README"), "mine").unwrap();
        for key in [b"a", b"b"] {
            store.insert("cuda", key, b"x", 0).unwrap();
        }
        assert_eq!(store.remove_one("cuda", b"a"), Ok(1));
        assert_eq!(store.scan().unwrap().len(), 1);
        assert_eq!(store.remove(|namespace, _| namespace == "cuda"), Ok(1));
        assert_eq!(store.meta("schema_version").unwrap().unwrap(), "3");
        assert!(directory.join("README").exists());
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn of_many_writers_one_wins() {
        let (directory, store) = store();
        let write = |i: u8| store.insert("cuda", b"k", &vec![i; 100_000], 0).unwrap();
        let wins: u64 = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8).map(|i| scope.spawn(move || write(i))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).sum()
        });
        assert_eq!(wins, 1);
        let kept = value(&store, b"k").unwrap();
        assert!(kept.len() == 100_000 && kept.iter().all(|byte| *byte == kept[0]));
        let left = fs::read_dir(&directory).unwrap().count();
        assert_eq!(left, 1, "nothing is left of the others");
        fs::remove_dir_all(directory).unwrap();
    }
}

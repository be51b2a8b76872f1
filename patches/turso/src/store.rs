//! The entries: one file each, named by a hash of namespace and key.

use crate::{Error, Result};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

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

const MAGIC: &[u8; 8] = b"kilnent1";
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
        let mut rest = bytes.strip_prefix(MAGIC)?;
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
                let stays = self.get(namespace, key)?.is_some_and(|old| old.origin != 1 || origin != 0);
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
            let goes = |entry: Entry| entry.namespace != META && which(&entry.namespace, &entry.key);
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
        // FNV-1a of 128 bits; an entry is known by what stands in it, the name only finds it.
        let bytes = namespace.as_bytes().iter().chain([&0]).chain(key);
        let hash = bytes.fold(0x6c62272e07bb014262b821756295c58d_u128, |hash, &byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013B)
        });
        self.directory.join(format!("{hash:032x}"))
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let read = || -> io::Result<Vec<PathBuf>> {
            let paths = fs::read_dir(&self.directory)?.map(|entry| Ok(entry?.path()));
            paths.filter(|path| path.as_ref().map_or(true, |p| p.extension().is_none())).collect()
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
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{count}.tmp", std::process::id());
        let path = self.directory.join(name);
        let mut bytes = MAGIC.to_vec();
        let lengths = [namespace.len(), key.len(), value.len()].map(|length| length as i64);
        for number in [origin].into_iter().chain(lengths) {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend([namespace.as_bytes(), key, value].concat());
        let written = File::create(&path).and_then(|mut file| file.write_all(&bytes));
        match written {
            Ok(()) => Ok(path),
            Err(error) => {
                let _ = fs::remove_file(&path);
                Err(Error::IoError(error.kind(), "keeping a kernel"))
            }
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

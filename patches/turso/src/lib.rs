//! Stand-in for `turso` 0.8: the statements that `cubecl-environment` 0.11.3 sends to its database of
//! compiled kernels, answered from a directory with one file an entry, and no database engine.
//!
//! The statements are told apart by their text. One that is not known here (those of CubeCL's bundles) is an
//! error, which CubeCL reports and goes on without the store. A directory is safe to share: an entry is written
//! beside its place and linked into it, so that readers see all of it or none and the first writer wins, and
//! compiled kernels are not taken out one by one.

mod store;

use std::{fmt, io, path::PathBuf, time::Duration};

pub use store::Database;

/// What can go wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    Error(String),
    Busy(String),
    BusySnapshot(String),
    IoError(io::ErrorKind, &'static str),
}

pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Error(text) | Error::Busy(text) | Error::BusySnapshot(text) => f.write_str(text),
            Error::IoError(kind, doing) => write!(f, "{doing}: {kind}"),
        }
    }
}

impl std::error::Error for Error {}

/// Opens a database.
pub struct Builder {
    location: PathBuf,
    read_only: bool,
}

impl Builder {
    pub fn new_local(location: &str) -> Self {
        // A file of that name may be there, from a build with the real crate.
        Self { location: format!("{location}.d").into(), read_only: false }
    }

    pub fn experimental_multiprocess_wal(self, _on: bool) -> Self {
        self
    }

    pub fn experimental_vacuum(self, _on: bool) -> Self {
        self
    }

    pub fn read_only(self, read_only: bool) -> Self {
        Self { read_only, ..self }
    }

    pub async fn build(self) -> Result<Database> {
        Database::open(self.location, self.read_only)
    }
}

impl Database {
    pub fn connect(&self) -> Result<Connection> {
        Ok(Connection { database: self.clone() })
    }
}

/// A connection; it has no state of its own.
pub struct Connection {
    database: Database,
}

impl Connection {
    pub fn busy_timeout(&self, _timeout: Duration) -> Result<()> {
        Ok(())
    }

    /// Every pragma is ignored.
    pub async fn pragma_query(
        &self,
        _pragma: &str,
        _row: impl FnMut(&Row) -> Result<()>,
    ) -> Result<()> {
        Ok(())
    }

    /// The number of rows that changed.
    pub async fn execute(&self, sql: impl AsRef<str>, params: impl IntoParams) -> Result<u64> {
        use Value::{Blob, Integer, Text};
        let store = &self.database;
        match (words(sql.as_ref()).as_str(), params.into_params().as_slice()) {
            (sql, []) if sql.starts_with("CREATE TABLE IF NOT EXISTS ") => Ok(0),
            ("DROP TABLE IF EXISTS entries", []) => store.remove(|_, _| true),
            ("DELETE FROM entries WHERE namespace = ?1", [Text(space)]) => {
                store.remove(|namespace, _| namespace == space)
            }
            // CubeCL takes a kernel out to put it in under another name, and panics if it is not there right
            // after that, because another process is at the same: it stays under the old name too.
            (DELETE, [Text(space), Blob(_)]) if space.starts_with("cuda/") => Ok(0),
            (DELETE, [Text(space), Blob(key)]) => store.remove_one(space, key),
            (META_SET, [Text(key), Text(value)]) => store.set_meta(key, value),
            (INSERT, [Text(space), Blob(key), Blob(value), Integer(origin)]) => {
                store.insert(space, key, value, *origin)
            }
            (REPLACE, [Text(space), Blob(key), Blob(value), Integer(origin)]) => {
                store.replace(space, key, value, *origin)
            }
            (sql, _) => Err(unknown(sql)),
        }
    }

    pub async fn query(&self, sql: impl AsRef<str>, params: impl IntoParams) -> Result<Rows> {
        use Value::{Blob, Integer, Text};
        let store = &self.database;
        let rows = match (words(sql.as_ref()).as_str(), params.into_params().as_slice()) {
            ("SELECT v FROM meta WHERE k = ?1", [Text(key)]) => {
                store.meta(key)?.map(|value| vec![Text(value)]).into_iter().collect()
            }
            (SELECT, [Text(space), Blob(key)]) => {
                let entry = store.get(space, key)?;
                entry.map(|entry| vec![Blob(entry.value)]).into_iter().collect()
            }
            ("SELECT key, value, origin FROM entries WHERE namespace = ?1", [Text(space)]) => {
                let entries = store.scan()?.into_iter().filter(|entry| entry.namespace == *space);
                entries
                    .map(|entry| vec![Blob(entry.key), Blob(entry.value), Integer(entry.origin)])
                    .collect()
            }
            (SUMMARY, []) => {
                let mut sums = std::collections::BTreeMap::<String, (i64, i64)>::new();
                for entry in store.scan()? {
                    let sum = sums.entry(entry.namespace).or_default();
                    sum.0 += 1;
                    sum.1 += (entry.key.len() + entry.value.len()) as i64;
                }
                sums.into_iter()
                    .map(|(space, (count, bytes))| {
                        vec![Text(space), Integer(count), Integer(bytes)]
                    })
                    .collect()
            }
            (sql, _) => return Err(unknown(sql)),
        };
        Ok(Rows(Vec::into_iter(rows)))
    }

    pub async fn transaction_with_behavior(
        &mut self,
        _behavior: transaction::TransactionBehavior,
    ) -> Result<transaction::Transaction<'_>> {
        Ok(transaction::Transaction(self))
    }
}

const INSERT: &str = "INSERT INTO entries (namespace, key, value, origin) VALUES (?1, ?2, ?3, ?4) \
    ON CONFLICT(namespace, key) DO UPDATE SET value = excluded.value, origin = excluded.origin \
    WHERE entries.origin = 1 AND excluded.origin = 0";
const REPLACE: &str = "INSERT INTO entries (namespace, key, value, origin) VALUES (?1, ?2, ?3, ?4) \
    ON CONFLICT(namespace, key) DO UPDATE SET value = excluded.value, origin = excluded.origin";
const SELECT: &str = "SELECT value FROM entries WHERE namespace = ?1 AND key = ?2";
const DELETE: &str = "DELETE FROM entries WHERE namespace = ?1 AND key = ?2";
const META_SET: &str =
    "INSERT INTO meta (k, v) VALUES (?1, ?2) ON CONFLICT(k) DO UPDATE SET v = excluded.v";
const SUMMARY: &str = "SELECT namespace, COUNT(*), SUM(length(key) + length(value)) FROM entries \
    GROUP BY namespace ORDER BY namespace";

/// The statement without line breaks and runs of blanks.
fn words(sql: &str) -> String {
    sql.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn unknown(sql: &str) -> Error {
    Error::Error(format!(
        "the stand-in for turso in Kiln's patches/ does not know the statement `{sql}`"
    ))
}

pub mod transaction {
    //! Transactions in name only: each statement stands for itself.

    use super::{Connection, Result};

    pub enum TransactionBehavior {
        Deferred,
        Immediate,
        Exclusive,
    }

    pub struct Transaction<'a>(pub(super) &'a mut Connection);

    impl Transaction<'_> {
        pub async fn commit(self) -> Result<()> {
            Ok(())
        }
    }

    impl std::ops::Deref for Transaction<'_> {
        type Target = Connection;
        fn deref(&self) -> &Connection {
            self.0
        }
    }
}

/// A value of a row or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Text(String),
    Blob(Vec<u8>),
    Integer(i64),
}

/// The rows of an answer.
pub struct Rows(std::vec::IntoIter<Vec<Value>>);

impl Rows {
    pub async fn next(&mut self) -> Result<Option<Row>> {
        Ok(self.0.next().map(Row))
    }
}

pub struct Row(Vec<Value>);

impl Row {
    pub fn get<T: TryFrom<Value>>(&self, column: usize) -> Result<T> {
        let value = self.0.get(column).cloned();
        value
            .and_then(|value| T::try_from(value).ok())
            .ok_or_else(|| Error::Error(format!("column {column} is not there or of another type")))
    }
}

macro_rules! values {
    ($($variant:ident($ty:ty)),*) => { $(
        impl From<$ty> for Value {
            fn from(value: $ty) -> Self {
                Value::$variant(value)
            }
        }
        impl TryFrom<Value> for $ty {
            type Error = ();
            fn try_from(value: Value) -> std::result::Result<Self, ()> {
                match value {
                    Value::$variant(value) => Ok(value),
                    _ => Err(()),
                }
            }
        }
    )* };
}
values!(Text(String), Blob(Vec<u8>), Integer(i64));

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Value::Text(value.to_owned())
    }
}

/// The parameters of a statement: a tuple.
pub trait IntoParams {
    fn into_params(self) -> Vec<Value>;
}

impl IntoParams for () {
    fn into_params(self) -> Vec<Value> {
        Vec::new()
    }
}

macro_rules! params {
    ($($name:ident)*) => {
        impl<$($name: Into<Value>),*> IntoParams for ($($name,)*) {
            #[allow(non_snake_case)]
            fn into_params(self) -> Vec<Value> {
                let ($($name,)*) = self;
                vec![$($name.into()),*]
            }
        }
    };
}
params!(A);
params!(A B);
params!(A B C);
params!(A B C D);

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, Hasher, RandomState};
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    /// What a future comes to: none of them waits.
    fn now<T>(future: impl Future<Output = T>) -> T {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => value,
            Poll::Pending => unreachable!("it waits"),
        }
    }

    #[test]
    fn a_kernel_stays_where_it_is_taken_from() {
        let random = RandomState::new().build_hasher().finish();
        let location = std::env::temp_dir().join(format!("taken-{random:x}"));
        let location = location.to_str().unwrap();
        let database = now(Builder::new_local(location).build()).unwrap();
        let connection = database.connect().unwrap();
        let key = || b"key".to_vec();
        for (space, stays) in [("cuda/1/sm_90", true), ("cuda-second-line/1/sm_90", false)] {
            let entry = (space, key(), b"value".to_vec(), 0i64);
            assert_eq!(now(connection.execute(INSERT, entry)), Ok(1));
            now(connection.execute(DELETE, (space, key()))).unwrap();
            let mut rows = now(connection.query(SELECT, (space, key()))).unwrap();
            assert_eq!(now(rows.next()).unwrap().is_some(), stays, "{space}");
        }
        std::fs::remove_dir_all(format!("{location}.d")).unwrap();
    }
}

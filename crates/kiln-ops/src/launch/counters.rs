//! Memory of the device by which cubes of a launch find each other: counters, zero, or words for numbers that have not
//! come yet, [`VACANT`]. A kernel leaves it as it found it, for the next launch of the stream.
//!
//! It belongs to the stream that asks. A recorded graph keeps those of the stream that recorded it, and must not run
//! beside launches of that stream; what is recorded has been launched before, as kernels have to be compiled too.

use burn::backend::StreamId;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

/// All bits of what no kernel leaves there for a number: a NaN, but not that which arithmetic makes.
pub(crate) const VACANT: u32 = u32::MAX;

/// By what it is for, its words, device and stream: launches of a stream follow each other.
type Kept = HashMap<(&'static str, usize, String, StreamId), Handle>;

static KEPT: LazyLock<Mutex<Kept>> = LazyLock::new(Default::default);

/// So many counters of an operator, on the current stream, as a kernel takes them.
pub(crate) fn argument(client: &Client, of: &'static str, count: usize) -> BufferArg {
    kept(client, of, count, 0)
}

/// So many words that are [`VACANT`].
#[cfg(feature = "cuda")]
pub(crate) fn vacant(client: &Client, of: &'static str, count: usize) -> BufferArg {
    kept(client, of, count, VACANT)
}

fn kept(client: &Client, of: &'static str, count: usize, word: u32) -> BufferArg {
    let key = (of, count, format!("{:?}", client.service_id()), StreamId::current());
    let mut kept = KEPT.lock().unwrap_or_else(|e| e.into_inner());
    let words = || client.create_from_slice(&word.to_ne_bytes().repeat(count));
    let handle = kept.entry(key).or_insert_with(words);
    // SAFETY: there are as many.
    unsafe { BufferArg::from_raw_parts(handle.clone(), count) }
}

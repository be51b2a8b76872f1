//! Memory of the device by which cubes of a launch find each other: counters, which are zero, or words that are [`VACANT`]
//! until a number comes. A kernel leaves it as it found it, for the next launch of the stream.
//!
//! It belongs to the stream of the device that asks, of which launches follow each other. A recorded graph keeps that of
//! the stream that recorded it, and must not run beside launches of that stream; what is recorded has been launched on the
//! stream before.

use burn::backend::StreamId;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

/// All bits of what no kernel leaves for a number: a NaN, but not that which arithmetic makes.
pub(crate) const VACANT: u32 = u32::MAX;

/// By what it is for, its words, device and stream.
type Kept = HashMap<(&'static str, usize, String, u64), Handle>;

static KEPT: LazyLock<Mutex<Kept>> = LazyLock::new(Default::default);

/// So many counters of an operator, on the current stream, as a kernel takes them.
pub(crate) fn counters(client: &Client, of: &'static str, count: usize) -> BufferArg {
    kept(client, of, count, 0)
}

/// So many vacant words.
pub(crate) fn vacant(client: &Client, of: &'static str, count: usize) -> BufferArg {
    kept(client, of, count, VACANT)
}

fn kept(client: &Client, of: &'static str, count: usize, word: u32) -> BufferArg {
    // As CubeCL has it: there are more numbers, one for each thread, than streams of a device.
    let streams = CubeClRuntimeConfig::get().streaming.max_streams.max(1);
    let stream = StreamId::current().value % u64::from(streams);
    let key = (of, count, format!("{:?}", client.service_id()), stream);
    let mut kept = KEPT.lock().unwrap_or_else(|e| e.into_inner());
    let words = || client.create_from_slice(&word.to_ne_bytes().repeat(count));
    let handle = kept.entry(key).or_insert_with(words);
    // SAFETY: there are as many.
    unsafe { BufferArg::from_raw_parts(handle.clone(), count) }
}

//! Counters in the device's memory by which cubes of a launch find each other. A kernel leaves them as it found them,
//! zero, for the next launch of the stream.
//!
//! They belong to the stream that asks. A recorded graph keeps those of the stream that recorded it, and must not run
//! beside launches of that stream; what is recorded has been launched before, as kernels have to be compiled too.

use burn::backend::StreamId;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

/// By operator, device and stream: launches of a stream follow each other.
type Counters = HashMap<(&'static str, String, StreamId), Handle>;

static COUNTERS: LazyLock<Mutex<Counters>> = LazyLock::new(Default::default);

/// Those of an operator, always as many, on the current stream, as a kernel takes them.
pub(crate) fn argument(client: &Client, of: &'static str, count: usize) -> BufferArg {
    let key = (of, format!("{:?}", client.service_id()), StreamId::current());
    let mut counters = COUNTERS.lock().unwrap_or_else(|e| e.into_inner());
    let zeros = || client.create_from_slice(&vec![0; 4 * count]);
    let handle = counters.entry(key).or_insert_with(zeros);
    // SAFETY: there are as many.
    unsafe { BufferArg::from_raw_parts(handle.clone(), count) }
}

//! The counters by which cubes take tiles in turn.

use burn::backend::StreamId;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

/// Two counters for each stream of a device: tickets taken, and cubes that are done. The last cube of a launch sets
/// both to 0 for the next one, and launches of a stream follow each other.
static COUNTERS: LazyLock<Mutex<HashMap<(String, StreamId), Handle>>> =
    LazyLock::new(Default::default);

/// Those of the current stream, as a kernel takes them.
pub(super) fn argument(client: &Client) -> BufferArg {
    let key = (format!("{:?}", client.service_id()), StreamId::current());
    let mut counters = COUNTERS.lock().unwrap_or_else(|e| e.into_inner());
    let handle = counters.entry(key).or_insert_with(|| client.create_from_slice(&[0; 8]));
    // SAFETY: there are two.
    unsafe { BufferArg::from_raw_parts(handle.clone(), 2) }
}

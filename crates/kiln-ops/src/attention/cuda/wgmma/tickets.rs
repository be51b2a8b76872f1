//! The counters by which cubes take tiles in turn, and turns at sums.

use burn::backend::StreamId;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

/// Counters of each stream of a device. A launch leaves all of them 0 for the next one, and launches of a stream
/// follow each other.
type Counters = LazyLock<Mutex<HashMap<(String, StreamId), (Handle, usize)>>>;

/// Two: tickets taken, and cubes that are done.
static TICKETS: Counters = LazyLock::new(Default::default);

/// Those that have had their turn at a sum.
static TURNS: Counters = LazyLock::new(Default::default);

/// At least `count` counters of the current stream, as a kernel takes them.
fn of_stream(counters: &Counters, client: &Client, count: usize) -> BufferArg {
    let key = (format!("{:?}", client.service_id()), StreamId::current());
    let mut counters = counters.lock().unwrap_or_else(|e| e.into_inner());
    let zeros = |count: usize| (client.create_from_slice(&vec![0; 4 * count]), count);
    let held = counters.entry(key).or_insert_with(|| zeros(count));
    if held.1 < count {
        *held = zeros(count.next_power_of_two());
    }
    // SAFETY: there are so many.
    unsafe { BufferArg::from_raw_parts(held.0.clone(), held.1) }
}

/// The tickets of the current stream.
pub(super) fn argument(client: &Client) -> BufferArg {
    of_stream(&TICKETS, client, 2)
}

/// So many turns of the current stream.
pub(super) fn turns(client: &Client, count: usize) -> BufferArg {
    of_stream(&TURNS, client, count)
}

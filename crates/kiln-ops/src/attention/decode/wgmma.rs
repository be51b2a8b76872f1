//! Many query heads that read the same keys, on Hopper: wgmma, fed by TMA.

use super::plan::{Work, fastest_parts};
use super::{NAME, Target};
use crate::attention::cuda::wgmma::{
    Forward, Parts, attend_meeting, attend_parts, can_meet, plan_of_parts,
};
use crate::attention::problem::Problem;
use crate::launch;

/// Query heads that read the same keys for which this is faster than mma.sync, whatever else. (67 MB of keys and values in
/// bf16 on an H100, one KV head, share of the copy bandwidth: 0.77 in place of 0.70 with 32 heads, 0.74 in place of 0.62
/// with 64.)
const FEWEST_TOGETHER: usize = 17;
/// So few gain where each tile has so many multiprocessors at least: its keys are divided, and mma.sync would need a second
/// launch. (8 heads of 128 elements on an H200, beside another run: 8 tiles, 67 MB, 21.7 µs in place of 22.6; 64 tiles,
/// 537 MB, 134 in place of 128. Between these, and with other widths, nothing has been measured.)
const FEW_TOGETHER: usize = 8;
const MANY_FOR_A_TILE: usize = 8;

pub(super) struct Plan {
    forward: Forward,
    /// Cubes that are there at a time.
    slots: usize,
}

impl Plan {
    /// With the work, for `keys` keys that somebody sees; none where others are to do it.
    pub(super) fn new(problem: &Problem, keys: usize) -> Option<(Self, Work)> {
        let sizes = &problem.sizes;
        let slots = launch::multiprocessors(&problem.q.tensor.client);
        let tiles = sizes.kv_heads * launch::limits::reckoned(sizes.batches);
        let many = MANY_FOR_A_TILE * tiles <= slots;
        let fewest = if many { FEW_TOGETHER } else { FEWEST_TOGETHER };
        let forward = plan_of_parts(problem).filter(|_| sizes.together() >= fewest)?;
        let round = forward.tile.keys;
        let planned = launch::limits::reckoned(keys);
        let few = sizes.together() < FEWEST_TOGETHER;
        let parts = |tiles| {
            let parts = fastest_parts(tiles, slots, planned, round);
            // Few heads in several waves would gain nothing.
            Some(if few { parts.min(slots / tiles) } else { parts })
        };
        let mut work = Work::new(sizes, keys, sizes.together(), round, parts);
        // Their cubes make the parts one.
        work.direct = can_meet(problem, work.parts, slots);
        let faster = work.direct || !few;
        faster.then_some((Self { forward, slots }, work))
    }
}

/// Writes o, or the sums of every part and their statistics.
pub(super) fn run(problem: &Problem, target: &Target<'_>, plan: Plan, work: Work) {
    let Plan { forward, slots } = plan;
    let o = &target.o.tensor;
    let address = launch::address_type(&[o]);
    let name = format!("{NAME} on wgmma");
    let tiles = ("several tiles a cube", work.cubes(&problem.sizes) > slots);
    let [several, heads, _] = work.ways(&problem.sizes);
    let meets = target.statistics.is_none();
    launch::plans::note(&name, &(&forward, meets, address), &[several, heads, tiles]);
    let parts = Parts { count: work.parts, length: work.length, slots };
    match target.statistics {
        Some(statistics) => attend_parts(problem, [o, statistics], forward, parts, address),
        None => attend_meeting(problem, target.o, forward, parts, address),
    }
}

//! Many query heads that read the same keys, on Hopper: wgmma, fed by TMA.

use super::plan::{Work, fastest_parts};
use super::{NAME, Target};
use crate::attention::cuda::wgmma::{
    Forward, Parts, attend_meeting, attend_parts, can_meet, plan_of_parts,
};
use crate::attention::problem::Problem;
use crate::launch;

/// Query heads that read the same keys for which this is faster than mma.sync: (67 MB of
/// keys and values in bf16 on an H100, one KV head, share of the copy bandwidth: 0.77 in place of 0.70 with 32 heads,
/// 0.74 in place of 0.62 with 64. With 8 heads both are within two hundredths.)
const FEWEST_TOGETHER: usize = 17;

pub(super) struct Plan(Forward);

impl Plan {
    /// With the work, for `keys` keys that somebody sees; none where others are to do it.
    pub(super) fn new(problem: &Problem, keys: usize) -> Option<(Self, Work)> {
        let sizes = &problem.sizes;
        let plan = plan_of_parts(problem).filter(|_| sizes.together() >= FEWEST_TOGETHER)?;
        let slots = launch::multiprocessors(&problem.q.tensor.client);
        let round = plan.tile.keys;
        let planned = launch::limits::reckoned(keys);
        let parts = |tiles| Some(fastest_parts(tiles, slots, planned, round));
        let mut work = Work::new(sizes, keys, sizes.together(), round, parts);
        work.direct = can_meet(problem, work.parts, slots);
        Some((Self(plan), work))
    }
}

/// Writes o, or the sums of every part and their statistics.
pub(super) fn run(problem: &Problem, target: &Target<'_>, Plan(plan): Plan, work: Work) {
    let o = &target.o.tensor;
    let address = launch::address_type(&[o]);
    let name = format!("{NAME} on wgmma");
    let slots = launch::multiprocessors(&o.client);
    let tiles = ("several tiles a cube", work.cubes(&problem.sizes) > slots);
    let [several, heads, _] = work.ways(&problem.sizes);
    let meets = target.statistics.is_none();
    launch::plans::note(&name, &(&plan, meets, address), &[several, heads, tiles]);
    let parts = Parts { count: work.parts, length: work.length };
    match target.statistics {
        Some(statistics) => attend_parts(problem, [o, statistics], plan, parts, address),
        None => attend_meeting(problem, target.o, plan, parts, address),
    }
}

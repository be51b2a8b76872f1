//! What a cube has to do, and how it leaves what its planes have found.

use super::super::simt::block::{Heads, Numbers, Rules, seen};
use super::super::simt::forward::LOWEST;
use crate::exponential::factor;
use cubecl::prelude::*;

/// How the work is divided, and the distance of two parts' results.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Division {
    pub(super) sets: usize,
    pub(super) parts: usize,
    pub(super) length: usize,
    pub(super) part_stride: usize,
}

/// Some queries that read the same keys and a part of these. Cubes that read the same keys follow each other.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Job {
    /// Cubes past the end do the last job again and write nothing: all units meet the barriers.
    writes: bool,
    pub(super) batch: usize,
    kv_head: usize,
    /// Query heads that read it.
    group_heads: usize,
    /// Queries that read the same keys.
    pub(super) together: usize,
    set: usize,
    part: usize,
    /// The keys.
    pub(super) from: usize,
    pub(super) to: usize,
}

#[cube]
impl Job {
    pub(super) fn new(
        of: &Numbers,
        by: &Division,
        documents: &[u32],
        #[comptime] rules: Rules,
    ) -> Job {
        let jobs = by.sets * by.parts * of.kv_heads * of.batches;
        let job = min(CUBE_POS, jobs - 1);
        let (set, rest) = (job % by.sets, job / by.sets);
        let (part, stack) = (rest % by.parts, rest / by.parts);
        let from = seen(0usize.runtime(), of, documents, rules).start + part * by.length;
        let group_heads = of.heads / of.kv_heads;
        Job {
            writes: CUBE_POS < jobs,
            batch: stack / of.kv_heads,
            kv_head: stack % of.kv_heads,
            group_heads,
            together: group_heads * of.queries,
            set,
            part,
            from,
            to: min(seen(of.queries - 1, of, documents, rules).end, from + by.length),
        }
    }

    /// Where its keys or values begin.
    pub(super) fn rows<E: Float, N: Size>(&self, of: &Heads<E, N>) -> usize {
        of.head(self.batch, self.kv_head)
    }

    /// The number of row `i` of a set of `rows` among the queries that read the same keys.
    fn row(&self, i: usize, #[comptime] rows: usize) -> usize {
        self.set * rows + i
    }

    /// Head and query of a row; past the last those of the last.
    pub(super) fn query(&self, i: usize, of: &Numbers, #[comptime] rows: usize) -> (usize, usize) {
        let row = min(self.row(i, rows), self.together - 1);
        (self.kv_head * self.group_heads + row / of.queries, row % of.queries)
    }
}

/// What is in shared memory at the end: of each plane, or group, and each query the sums, `pitch` from one to the
/// next, the largest score and the sum of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Found {
    pub(super) slots: usize,
    pub(super) rows: usize,
    pub(super) pitch: usize,
    pub(super) units: usize,
    /// A cube sees all keys: its results are those of the call.
    pub(super) direct: bool,
}

impl Found {
    pub(super) fn lines(&self) -> usize {
        self.slots * self.rows
    }

    /// Units that write a row: as few as keep all busy, but those of a plane.
    fn across(&self) -> usize {
        (self.units / self.rows.next_power_of_two()).max(32)
    }
}

/// Writes what the planes have found as one.
#[cube]
pub(super) fn write_found<W: Float, M: Size>(
    sums: &[f32],
    largest: &[f32],
    totals: &[f32],
    out: &mut Heads<W, M>,
    statistics: &mut [f32],
    job: &Job,
    of: &Numbers,
    by: &Division,
    #[comptime] found: Found,
    #[comptime] ptx: bool,
) {
    let (slots, rows) = comptime!((found.slots, found.rows));
    let (across, down) = comptime!((found.across(), found.units / found.across()));
    let (own, first) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    for i in range_stepped(own, rows, down) {
        if job.writes && job.row(i, rows) < job.together {
            let mut most = f32::new(LOWEST);
            #[unroll]
            for slot in 0..slots {
                most = max(most, largest[slot * rows + i]);
            }
            let mut weights = Array::<f32>::new(slots);
            let mut total = f32::new(0.0);
            #[unroll]
            for slot in 0..slots {
                let weight = factor(largest[slot * rows + i] - most, ptx);
                total += totals[slot * rows + i] * weight;
                weights[slot] = weight;
            }
            let (head, query) = job.query(i, of, rows);
            let at = out.head(job.batch, head) + query * out.row_stride + job.part * by.part_stride;
            if comptime!(!found.direct) && first == 0 {
                let line = (job.batch * of.heads + head) * of.queries + query;
                let lines = of.batches * of.heads * of.queries;
                statistics[2 * (job.part * lines + line)] = most;
                statistics[2 * (job.part * lines + line) + 1] = total;
            }
            for column in range_stepped(first, of.width, across) {
                let mut sum = f32::new(0.0);
                #[unroll]
                for slot in 0..slots {
                    let place = (slot * rows + i) * comptime!(found.pitch) + column;
                    sum += sums[place] * weights[slot];
                }
                if comptime!(found.direct) {
                    sum = select(total == 0.0f32, f32::new(0.0), sum / total);
                }
                out.elements[at + column] = Vector::<W, M>::new(W::cast_from(sum));
            }
        }
    }
}

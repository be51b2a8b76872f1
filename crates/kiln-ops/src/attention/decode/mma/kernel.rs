//! A cube for some queries that read the same keys and a part of these; its warps take blocks of keys in turn.

use super::super::job::{Division, Job, write_found};
use super::{Plan, WARPS};
use crate::attention::simt::block::{Heads, Numbers, Rules, score, seen};
use crate::attention::simt::forward::LOWEST;
use crate::exponential::exp2;
use crate::reduce::{Shuffle, shuffle};
use crate::tile::cuda::fragment::{quad_max, quad_sum};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Rows of a head as a lane reads them: a chunk of 16 bytes of each.
#[derive(CubeType, Clone, Copy)]
struct Rows {
    address: u64,
    /// Bytes from one row to the next.
    step: u64,
    last: u32,
}

#[cube]
impl Rows {
    fn new<E: Float, N: Size>(of: &Heads<E, N>, head: usize, chunk: u32, last: u32) -> Rows {
        let address = global_address::<Vector<E, N>>(of.elements.as_ptr())
            + (u64::cast_from(head) + u64::cast_from(chunk)) * 16u64;
        Rows { address, step: u64::cast_from(of.row_stride) * 16u64, last }
    }

    /// That of a row; past the last that one again, which counts for nothing.
    fn row(&self, row: u32) -> u64 {
        self.address + u64::cast_from(min(row, self.last)) * self.step
    }
}

/// Loads a lane's chunks of a block of keys, of a key one after the other.
#[cube]
fn load_keys(
    keys: &mut Array<Vector<u32, Const<4>>>,
    rows: &Rows,
    first: u32,
    #[comptime] plan: Plan,
) {
    let chunks = comptime!(plan.width / 32);
    #[unroll]
    for n in 0..comptime!(2 * plan.sixteens) {
        let row = rows.row(first + UNIT_POS % 32 / 4 + comptime!(8 * n as u32));
        #[unroll]
        for c in 0..chunks {
            keys[comptime!(n * chunks + c)] = load_16(row, comptime!(64 * c as u32));
        }
    }
}

/// Loads a lane's chunks of the values of a block of keys: of sixteen keys those of its four, one after the other.
#[cube]
fn load_values(
    values: &mut Array<Vector<u32, Const<4>>>,
    rows: &Rows,
    first: u32,
    #[comptime] plan: Plan,
) {
    let chunks = comptime!(plan.width / 64);
    #[unroll]
    for r in 0..comptime!(4 * plan.sixteens) {
        let of_quad = comptime!((r / 4 * 16 + r / 2 % 2 * 8 + r % 2) as u32);
        let row = rows.row(first + UNIT_POS % 4 * 2 + of_quad);
        #[unroll]
        for c in 0..chunks {
            values[comptime!(r * chunks + c)] = load_16(row, comptime!(128 * c as u32));
        }
    }
}

/// Lays the queries down as left operands, those of a step of 16 elements for all lanes side by side.
#[cube]
fn stage_queries<E: Float, N: Size>(
    queries: &mut Shared<[Vector<u32, Const<4>>]>,
    q: &Heads<E, N>,
    job: &Job,
    of: &Numbers,
    #[comptime] plan: Plan,
) {
    let chunks = comptime!(plan.width / 32);
    let (lane, warp) = (UNIT_POS as usize % 32, UNIT_POS as usize / 32);
    for i in range_stepped(warp, comptime!(plan.tiles() * chunks), WARPS) {
        let (tile, chunk) = (i / chunks, i % chunks);
        let mut words = Array::<Vector<u32, Const<4>>>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            let row = tile * 16 + lane / 4 + comptime!(half * 8);
            let (head, query) = job.query(row, of, comptime!(plan.rows()));
            let row = q.head(job.batch, head) + query * q.row_stride;
            let at = row + chunk * 4 + lane % 4;
            let elements = global_address::<Vector<E, N>>(q.elements.as_ptr());
            words[half] = load_16(elements + u64::cast_from(at) * 16u64, 0u32);
        }
        #[unroll]
        for step in 0..2usize {
            let mut operand = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for r in 0..4usize {
                let word = words[comptime!(r % 2)].extract(comptime!(2 * step + r / 2));
                operand.insert(r, word);
            }
            queries[(2 * i + step) * 32 + lane] = operand;
        }
    }
}

/// What a warp has of its queries. Of each eight: of the weighted sums of values fragments of 16 elements and the
/// 8 queries; the largest score of query lane / 4, and the lane's part of the sum of its weights.
#[derive(CubeType)]
struct Running {
    sums: Array<Vector<f32, Const<4>>>,
    largest: Array<f32>,
    totals: Array<f32>,
}

/// The keys that query lane / 4 of each eight sees.
#[derive(CubeType)]
struct Spans {
    starts: Array<u32>,
    ends: Array<u32>,
}

#[cube]
fn spans(
    job: &Job,
    of: &Numbers,
    documents: &[u32],
    #[comptime] plan: Plan,
    #[comptime] rules: Rules,
) -> Spans {
    let mut starts = Array::<u32>::new(plan.eights);
    let mut ends = Array::<u32>::new(plan.eights);
    #[unroll]
    for e in 0..plan.eights {
        if comptime!(plan.single) {
            starts[e] = 0u32;
            ends[e] = u32::cast_from(job.to);
        } else {
            let row = UNIT_POS as usize % 32 / 4 + comptime!(8 * e);
            let (_, query) = job.query(row, of, comptime!(plan.rows()));
            let span = seen(query, of, documents, rules);
            starts[e] = u32::cast_from(span.start);
            ends[e] = u32::cast_from(min(span.end, job.to));
        }
    }
    Spans { starts, ends }
}

/// The sums q·k of a block of keys: of 16 queries and each 8 keys a fragment.
#[cube]
fn multiply(
    queries: &Shared<[Vector<u32, Const<4>>]>,
    keys: &Array<Vector<u32, Const<4>>>,
    #[comptime] plan: Plan,
) -> Array<Vector<f32, Const<4>>> {
    let (tiles, across, steps) = comptime!((plan.tiles(), 2 * plan.sixteens, plan.steps()));
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(tiles * across));
    #[unroll]
    for i in 0..comptime!(tiles * across) {
        scores[i] = Vector::new(0.0f32);
    }
    #[unroll]
    for step in 0..steps {
        #[unroll]
        for tile in 0..tiles {
            let left = queries[comptime!((tile * steps + step) * 32) + UNIT_POS as usize % 32];
            #[unroll]
            for n in 0..across {
                let right = keys[comptime!((n * steps + step) / 2)];
                let (low, high) = (
                    right.extract(comptime!(step % 2 * 2)),
                    right.extract(comptime!(step % 2 * 2 + 1)),
                );
                let to = comptime!(tile * across + n);
                scores[to] = mma_16x8x16(left, low, high, scores[to], plan.float);
            }
        }
    }
    scores
}

/// Makes scores weights by the largest of their query so far, by which what has been added up is weighed anew; and
/// these, rounded, right operands: of each eight queries those of each sixteen keys from `first` on.
#[cube]
fn weigh(
    scores: &mut Array<Vector<f32, Const<4>>>,
    running: &mut Running,
    spans: &Spans,
    first: u32,
    of: &Numbers,
    #[comptime] plan: Plan,
    #[comptime] rules: Rules,
) -> Array<u32> {
    let (across, steps) = comptime!((2 * plan.sixteens, plan.steps()));
    let mut weights = Array::<u32>::new(comptime!(plan.eights * across));
    let quad = UNIT_POS % 4;
    #[unroll]
    for e in 0..plan.eights {
        // The upper or the lower half of 16 queries.
        let (tile, half) = comptime!((e / 2 * across, e % 2 * 2));
        let mut most = running.largest[e];
        #[unroll]
        for n in 0..across {
            let mut pair = scores[comptime!(tile + n)];
            #[unroll]
            for i in 0..2usize {
                let key = first + quad * 2 + comptime!((8 * n + i) as u32);
                let mut visible = key < spans.ends[e];
                if comptime!(rules.window && !plan.single) {
                    visible = visible && key >= spans.starts[e];
                }
                let x = score(pair.extract(comptime!(half + i)), of, rules);
                let x = select(visible, x, f32::new(LOWEST));
                pair.insert(comptime!(half + i), x);
                most = max(most, x);
            }
            scores[comptime!(tile + n)] = pair;
        }
        most = quad_max(most);
        // Where nothing has been seen yet, weights are 0.
        let shift = select(most == f32::new(LOWEST), f32::new(0.0), most);
        let shrink = exp2(running.largest[e] - shift);
        running.largest[e] = most;
        let mut total = running.totals[e] * shrink;
        #[unroll]
        for n in 0..across {
            let mut pair = Array::<f32>::new(2usize);
            #[unroll]
            for i in 0..2usize {
                let x = scores[comptime!(tile + n)].extract(comptime!(half + i));
                pair[i] = exp2(x - shift);
                total += pair[i];
            }
            weights[comptime!(e * across + n)] = round_pair(pair[0], pair[1], plan.float);
        }
        running.totals[e] = total;
        // Those of the queries whose sums the lane has.
        let own = shuffle(shrink, quad * 8, Shuffle::Lane, true);
        let next = shuffle(shrink, quad * 8 + 4, Shuffle::Lane, true);
        #[unroll]
        for i in 0..steps {
            let mut sum = running.sums[comptime!(e * steps + i)];
            #[unroll]
            for r in 0..2usize {
                sum.insert(comptime!(2 * r), sum.extract(comptime!(2 * r)) * own);
                sum.insert(comptime!(2 * r + 1), sum.extract(comptime!(2 * r + 1)) * next);
            }
            running.sums[comptime!(e * steps + i)] = sum;
        }
    }
    weights
}

/// Adds the weighted values.
#[cube]
fn add_values(
    running: &mut Running,
    weights: &Array<u32>,
    values: &Array<Vector<u32, Const<4>>>,
    #[comptime] plan: Plan,
) {
    let (chunks, steps) = comptime!((plan.width / 64, plan.steps()));
    #[unroll]
    for j in 0..plan.sixteens {
        #[unroll]
        for step in 0..steps {
            let (c, i) = comptime!((step / 4, step % 4));
            let mut operand = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for r in 0..4usize {
                // Two neighbouring keys of one element: the lower halves of words, or the upper.
                let pair = comptime!((j * 4 + r / 2 * 2) * chunks + c);
                let (low, high) = (values[pair], values[comptime!(pair + chunks)]);
                operand.insert(r, halves(low.extract(i), high.extract(i), comptime!(r % 2 == 1)));
            }
            // As an element of an array it is passed by its value.
            let mut left = Array::<Vector<u32, Const<4>>>::new(1usize);
            left[0] = operand;
            #[unroll]
            for e in 0..plan.eights {
                let right = comptime!((e * plan.sixteens + j) * 2);
                let (low, high) = (weights[right], weights[comptime!(right + 1)]);
                let to = comptime!(e * steps + step);
                running.sums[to] = mma_16x8x16(left[0], low, high, running.sums[to], plan.float);
            }
        }
    }
}

/// Leaves what a warp has in shared memory.
#[cube]
fn leave(
    running: &Running,
    slot: usize,
    sums: &mut Shared<[f32]>,
    largest: &mut Shared<[f32]>,
    totals: &mut Shared<[f32]>,
    #[comptime] plan: Plan,
) {
    let (steps, pitch) = comptime!((plan.steps(), plan.found().pitch));
    let (group, quad) = (UNIT_POS as usize % 32 / 4, UNIT_POS as usize % 4);
    #[unroll]
    for e in 0..plan.eights {
        let row = slot * comptime!(plan.rows()) + comptime!(8 * e);
        let total = quad_sum(running.totals[e]);
        if quad == 0 {
            largest[row + group] = running.largest[e];
            totals[row + group] = total;
        }
        #[unroll]
        for step in 0..steps {
            let sum = running.sums[comptime!(e * steps + step)];
            let column = group * 8 + comptime!(step / 4 * 64 + step % 4 * 2);
            let at = (row + quad * 2) * pitch + column;
            #[unroll]
            for i in 0..4usize {
                sums[at + comptime!(i % 2 * pitch + i / 2)] = sum.extract(i);
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn decode_mma_kernel<E: Float, W: Float, N: Size, M: Size>(
    q: &Heads<E, N>,
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    documents: &[u32],
    out: &mut Heads<W, M>,
    statistics: &mut [f32],
    of: Numbers,
    by: Division,
    #[comptime] plan: Plan,
    #[comptime] rules: Rules,
    #[define(E, W)] _dtypes: [ElemType; 2],
) {
    let (found, block) = comptime!((plan.found(), plan.block() as u32));
    let operands = comptime!(plan.tiles() * plan.steps() * 32);
    let mut queries = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(operands, 16usize);
    let mut sums = Shared::<[f32]>::new_slice(comptime!(found.lines() * found.pitch));
    let mut largest = Shared::<[f32]>::new_slice(comptime!(found.lines()));
    let mut totals = Shared::<[f32]>::new_slice(comptime!(found.lines()));

    let job = Job::new(&of, &by, documents, rules);
    let (lane, warp) = (UNIT_POS % 32, plane_broadcast(UNIT_POS / 32, 0u32));
    let end = u32::cast_from(job.to);
    let key_rows = Rows::new::<E, N>(k, job.rows::<E, N>(k), lane % 4, end - 1);
    let value_rows = Rows::new::<E, N>(v, job.rows::<E, N>(v), lane / 4, end - 1);
    let from = u32::cast_from(job.from) + warp * block;
    let mut keys = Array::<Vector<u32, Const<4>>>::new(comptime!(plan.held()));
    let mut values = Array::<Vector<u32, Const<4>>>::new(comptime!(plan.held()));
    load_keys(&mut keys, &key_rows, from, plan);
    load_values(&mut values, &value_rows, from, plan);

    stage_queries::<E, N>(&mut queries, q, &job, &of, plan);
    let spans = spans(&job, &of, documents, plan, rules);
    let mut running = Running {
        sums: Array::<Vector<f32, Const<4>>>::new(comptime!(plan.eights * plan.steps())),
        largest: Array::<f32>::new(plan.eights),
        totals: Array::<f32>::new(plan.eights),
    };
    #[unroll]
    for i in 0..comptime!(plan.eights * plan.steps()) {
        running.sums[i] = Vector::new(0.0f32);
    }
    #[unroll]
    for e in 0..plan.eights {
        running.largest[e] = LOWEST;
        running.totals[e] = 0.0f32;
    }
    sync_cube();

    let round = comptime!(WARPS as u32 * block);
    for first in range_stepped(from, end, round) {
        let mut scores = multiply(&queries, &keys, plan);
        let next = first + round;
        if next < end {
            load_keys(&mut keys, &key_rows, next, plan);
        }
        let weights = weigh(&mut scores, &mut running, &spans, first, &of, plan, rules);
        add_values(&mut running, &weights, &values, plan);
        if next < end {
            load_values(&mut values, &value_rows, next, plan);
        }
    }

    leave(&running, warp as usize, &mut sums, &mut largest, &mut totals, plan);
    sync_cube();
    write_found::<W, M>(
        &sums, &largest, &totals, out, statistics, &job, &of, &by, found, rules.ptx,
    );
}

//! A cube for some queries that read the same keys and a part of these.

use super::super::simt::block::{Heads, Numbers, Rules, score, seen};
use super::super::simt::forward::LOWEST;
use super::job::{Division, Job, write_found};
use super::plan::Plan;
use crate::exponential::factor;
use cubecl::prelude::*;

/// Adds up `s` over the units of a key.
#[cube]
fn sum_lanes(s: &mut Array<f32>, exchange: &mut [f32], #[comptime] plan: Plan) {
    let count = comptime!(plan.flight * plan.rows);
    if comptime!(plan.plane > 1) {
        #[unroll]
        for level in 0..comptime!(plan.lanes.ilog2()) {
            #[unroll]
            for i in 0..count {
                s[i] += plane_shuffle_xor(s[i], comptime!(1u32 << level));
            }
        }
    } else {
        let unit = UNIT_POS as usize;
        let first = unit - unit % plan.lanes;
        // Nobody reads what was there.
        sync_cube();
        #[unroll]
        for i in 0..count {
            exchange[i * comptime!(plan.units()) + unit] = s[i];
        }
        sync_cube();
        #[unroll]
        for i in 0..count {
            let mut sum = f32::new(0.0);
            for lane in 0..plan.lanes {
                sum += exchange[i * comptime!(plan.units()) + first + lane];
            }
            s[i] = sum;
        }
    }
}

/// What a unit has of its queries: elements of the weighted sums of values, and of each query the largest score
/// and the sum of the weights.
#[derive(CubeType)]
struct Running<N: Size> {
    sums: Array<Vector<f32, N>>,
    largest: Array<f32>,
    totals: Array<f32>,
}

/// Takes in what other units of the plane have of the same elements.
#[cube]
fn join_planes<N: Size>(
    running: &mut Running<N>,
    #[comptime] plan: Plan,
    #[comptime] rules: Rules,
) {
    #[unroll]
    for level in 0..comptime!((plan.plane / plan.lanes).ilog2()) {
        let step = comptime!((plan.lanes << level) as u32);
        #[unroll]
        for i in 0..plan.rows {
            let (own, other) = (running.largest[i], plane_shuffle_xor(running.largest[i], step));
            let most = max(own, other);
            let (own, other) = (factor(own - most, rules.ptx), factor(other - most, rules.ptx));
            running.largest[i] = most;
            let total = plane_shuffle_xor(running.totals[i], step);
            running.totals[i] = running.totals[i] * own + total * other;
            #[unroll]
            for c in 0..plan.chunks {
                let at = comptime!(i * plan.chunks + c);
                let held = running.sums[at];
                let mut sum = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for e in 0..N::value() {
                    let value = held.extract(e);
                    sum.insert(e, value * own + plane_shuffle_xor(value, step) * other);
                }
                running.sums[at] = sum;
            }
        }
    }
}

/// Loads a unit's elements of the keys or of the values that it has under way, from row `first` on.
#[cube]
fn load<E: Float, N: Size>(
    from: &Heads<E, N>,
    head: usize,
    first: usize,
    end: usize,
    vectors: usize,
    #[comptime] plan: Plan,
) -> Array<Vector<E, N>> {
    let lane = UNIT_POS as usize % plan.lanes;
    let mut loaded = Array::<Vector<E, N>>::new(comptime!(plan.flight * plan.chunks));
    #[unroll]
    for j in 0..plan.flight {
        // Past the end that one again, which counts for nothing.
        let row = min(first + comptime!(j * plan.groups), end - 1);
        #[unroll]
        for c in 0..plan.chunks {
            let mut column = comptime!(c * plan.lanes) + lane;
            if comptime!(!plan.even) {
                column = min(column, vectors - 1);
            }
            loaded[comptime!(j * plan.chunks + c)] =
                from.elements[head + row * from.row_stride + column];
        }
    }
    loaded
}

/// A unit's share of the products of its queries and keys.
#[cube]
fn multiply<E: Float, N: Size>(
    held: &Array<Vector<f32, N>>,
    keys: &Array<Vector<E, N>>,
    s: &mut Array<f32>,
    vectors: usize,
    #[comptime] plan: Plan,
) {
    let (lanes, rows, chunks, flight) =
        comptime!((plan.lanes, plan.rows, plan.chunks, plan.flight));
    let lane = UNIT_POS as usize % lanes;
    #[unroll]
    for j in 0..flight {
        #[unroll]
        for c in 0..chunks {
            let key = Vector::<f32, N>::cast_from(keys[comptime!(j * chunks + c)]);
            #[unroll]
            for i in 0..rows {
                let query = held[comptime!(i * chunks + c)];
                let mut sum = f32::new(0.0);
                #[unroll]
                for e in 0..N::value() {
                    sum = fma(query.extract(e), key.extract(e), sum);
                }
                if comptime!(!plan.even) {
                    let there = comptime!(c * lanes) + lane < vectors;
                    sum = select(there, sum, f32::new(0.0));
                }
                let at = comptime!(j * rows + i);
                if comptime!(c == 0) {
                    s[at] = sum;
                } else {
                    s[at] += sum;
                }
            }
        }
    }
}

/// Makes scores weights by the largest of their query so far, by which what has been added up is weighed anew. The
/// unit's keys begin at `first`.
#[cube]
fn weigh<N: Size>(
    s: &mut Array<f32>,
    running: &mut Running<N>,
    first: usize,
    to: usize,
    starts: &Array<usize>,
    ends: &Array<usize>,
    of: &Numbers,
    #[comptime] plan: Plan,
    #[comptime] rules: Rules,
) {
    let (rows, chunks, flight) = comptime!((plan.rows, plan.chunks, plan.flight));
    #[unroll]
    for i in 0..rows {
        let mut most = running.largest[i];
        let mut seen_here = Array::<bool>::new(flight);
        #[unroll]
        for j in 0..flight {
            let key = first + comptime!(j * plan.groups);
            let mut visible = key < to;
            if comptime!(!plan.single) {
                visible = visible && key >= starts[i] && key < ends[i];
            }
            seen_here[j] = visible;
            let x = score(s[comptime!(j * rows + i)], of, rules);
            s[comptime!(j * rows + i)] = x;
            most = max(most, select(visible, x, f32::new(LOWEST)));
        }
        let shrink = factor(running.largest[i] - most, rules.ptx);
        running.largest[i] = most;
        let mut total = running.totals[i] * shrink;
        #[unroll]
        for j in 0..flight {
            let p = factor(s[comptime!(j * rows + i)] - most, rules.ptx);
            let p = select(seen_here[j], p, f32::new(0.0));
            total += p;
            s[comptime!(j * rows + i)] = p;
        }
        running.totals[i] = total;
        #[unroll]
        for c in 0..chunks {
            running.sums[comptime!(i * chunks + c)] *= Vector::new(shrink);
        }
    }
}

/// Adds the weighted values.
#[cube]
fn add_values<E: Float, N: Size>(
    running: &mut Running<N>,
    s: &Array<f32>,
    values: &Array<Vector<E, N>>,
    #[comptime] plan: Plan,
) {
    let (rows, chunks, flight) = comptime!((plan.rows, plan.chunks, plan.flight));
    #[unroll]
    for j in 0..flight {
        #[unroll]
        for c in 0..chunks {
            let value = Vector::<f32, N>::cast_from(values[comptime!(j * chunks + c)]);
            #[unroll]
            for i in 0..rows {
                let p = Vector::<f32, N>::new(s[comptime!(j * rows + i)]);
                running.sums[comptime!(i * chunks + c)] += p * value;
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn decode_kernel<E: Float, W: Float, N: Size, M: Size>(
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
    let (lanes, rows, chunks) = comptime!((plan.lanes, plan.rows, plan.chunks));
    let (flight, found) = comptime!((plan.flight, plan.found()));
    let mut exchange = Shared::<[f32]>::new_slice(comptime!(plan.exchange()));
    let mut sums = Shared::<[f32]>::new_slice(comptime!(found.lines() * found.pitch));
    let mut largest = Shared::<[f32]>::new_slice(comptime!(found.lines()));
    let mut totals = Shared::<[f32]>::new_slice(comptime!(found.lines()));

    let job = Job::new(&of, &by, documents, rules);
    let (k_head, v_head) = (job.rows::<E, N>(k), job.rows::<E, N>(v));
    let vectors = of.width / N::value();
    let (lane, group) = (UNIT_POS as usize % lanes, UNIT_POS as usize / lanes);

    let mut held = Array::<Vector<f32, N>>::new(comptime!(rows * chunks));
    let mut running = Running::<N> {
        sums: Array::<Vector<f32, N>>::new(comptime!(rows * chunks)),
        largest: Array::<f32>::new(rows),
        totals: Array::<f32>::new(rows),
    };
    let mut starts = Array::<usize>::new(rows);
    let mut ends = Array::<usize>::new(rows);
    #[unroll]
    for i in 0..rows {
        let (head, query) = job.query(i, &of, rows);
        let at = q.head(job.batch, head) + query * q.row_stride;
        #[unroll]
        for c in 0..chunks {
            let column = min(comptime!(c * lanes) + lane, vectors - 1);
            held[comptime!(i * chunks + c)] = Vector::<f32, N>::cast_from(q.elements[at + column]);
            running.sums[comptime!(i * chunks + c)] = Vector::<f32, N>::new(0.0f32);
        }
        running.largest[i] = LOWEST;
        running.totals[i] = 0.0f32;
        let span = seen(query, &of, documents, rules);
        starts[i] = span.start;
        ends[i] = span.end;
    }

    let to = job.to;
    for block in range_stepped(job.from, to, comptime!(plan.groups * flight)) {
        let at = block + group;
        let keys = load::<E, N>(k, k_head, at, to, vectors, plan);
        let values = load::<E, N>(v, v_head, at, to, vectors, plan);
        let mut s = Array::<f32>::new(comptime!(flight * rows));
        multiply::<E, N>(&held, &keys, &mut s, vectors, plan);
        sum_lanes(&mut s, &mut exchange, plan);
        weigh::<N>(&mut s, &mut running, at, to, &starts, &ends, &of, plan, rules);
        add_values::<E, N>(&mut running, &s, &values, plan);
    }

    let mut slot = group;
    let mut writes = true.runtime();
    if comptime!(plan.plane > 1) {
        join_planes::<N>(&mut running, plan, rules);
        slot = UNIT_POS as usize / comptime!(plan.plane);
        writes = UNIT_POS as usize % comptime!(plan.plane) < lanes;
    }
    if writes {
        #[unroll]
        for i in 0..rows {
            let at = slot * rows + i;
            if lane == 0 {
                largest[at] = running.largest[i];
                totals[at] = running.totals[i];
            }
            #[unroll]
            for c in 0..chunks {
                let sum = running.sums[comptime!(i * chunks + c)];
                let column = (comptime!(c * lanes) + lane) * N::value();
                #[unroll]
                for e in 0..N::value() {
                    sums[at * comptime!(found.pitch) + column + e] = sum.extract(e);
                }
            }
        }
    }
    sync_cube();

    write_found::<W, M>(
        &sums, &largest, &totals, out, statistics, &job, &of, &by, found, rules.ptx,
    );
}

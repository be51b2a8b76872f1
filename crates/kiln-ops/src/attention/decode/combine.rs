//! The results of the parts as one.

use super::super::simt::block::{Heads, Numbers};
use super::super::simt::forward::LOWEST;
use crate::exponential::factor;
use cubecl::prelude::*;

/// Parts that a unit reads at a time.
const TOGETHER: usize = 4;

/// A cube for a query of a head: units side by side for its elements, and groups of them for its parts.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn combine_kernel<E: Float, N: Size>(
    sums: &[Vector<f32, N>],
    statistics: &[f32],
    o: &mut Heads<E, N>,
    of: Numbers,
    parts: usize,
    #[comptime] columns: usize,
    #[comptime] groups: usize,
    #[comptime] ptx: bool,
    #[define(E)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(columns * groups));
    let mut largest = Shared::<[f32]>::new_slice(groups);
    let mut totals = Shared::<[f32]>::new_slice(groups);
    let lines = of.batches * of.heads * of.queries;
    // Cubes past the end do the last line again and write nothing: all units meet the barriers.
    let line = min(CUBE_POS, lines - 1);
    let (query, stack) = (line % of.queries, line / of.queries);
    let (head, batch) = (stack % of.heads, stack / of.heads);
    let vectors = of.width / N::value();
    let to = o.head(batch, head) + query * o.row_stride;
    let (x, group) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    for block in range_stepped(0usize, vectors, columns) {
        let column = min(block + x, vectors - 1);
        let mut most = f32::new(LOWEST);
        let mut total = f32::new(0.0);
        let mut sum = Vector::<f32, N>::new(0.0f32);
        for first in range_stepped(group, parts, comptime!(groups * TOGETHER)) {
            // All of them are on their way before the first is needed.
            let mut found = Array::<f32>::new(comptime!(2 * TOGETHER));
            let mut sums_of = Array::<Vector<f32, N>>::new(TOGETHER);
            let mut next = most;
            #[unroll]
            for i in 0..TOGETHER {
                let part = first + comptime!(i * groups);
                let at = min(part, parts - 1) * lines + line;
                sums_of[i] = sums[at * vectors + column];
                found[comptime!(2 * i)] = select(part < parts, statistics[2 * at], LOWEST);
                found[comptime!(2 * i + 1)] = statistics[2 * at + 1];
            }
            #[unroll]
            for i in 0..TOGETHER {
                next = max(next, found[comptime!(2 * i)]);
            }
            let own = factor(most - next, ptx);
            most = next;
            total *= own;
            sum *= Vector::new(own);
            #[unroll]
            for i in 0..TOGETHER {
                // Nothing of what is past the last part, were it infinite.
                if first + comptime!(i * groups) < parts {
                    let weight = factor(found[comptime!(2 * i)] - next, ptx);
                    total += found[comptime!(2 * i + 1)] * weight;
                    sum += sums_of[i] * Vector::new(weight);
                }
            }
        }
        // Nobody reads what was there.
        sync_cube();
        shared[group * columns + x] = sum;
        if x == 0 {
            largest[group] = most;
            totals[group] = total;
        }
        sync_cube();
        if group == 0 && block + x < vectors && CUBE_POS < lines {
            let mut most = f32::new(LOWEST);
            #[unroll]
            for group in 0..groups {
                most = max(most, largest[group]);
            }
            let mut total = f32::new(0.0);
            let mut sum = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for group in 0..groups {
                let weight = factor(largest[group] - most, ptx);
                total += totals[group] * weight;
                sum += shared[group * columns + x] * Vector::new(weight);
            }
            let inverse = select(total == 0.0f32, f32::new(0.0), 1.0f32 / total);
            o.elements[to + column] = Vector::cast_from(sum * Vector::new(inverse));
        }
    }
}

//! The results of the parts as one.

use super::super::simt::block::{Heads, Numbers};
use super::super::simt::forward::LOWEST;
use crate::exponential::factor;
use cubecl::prelude::*;

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
        for part in range_stepped(group, parts, groups) {
            let at = part * lines + line;
            let (part_most, part_total) = (statistics[2 * at], statistics[2 * at + 1]);
            let part_sum = sums[at * vectors + column];
            let next = max(most, part_most);
            let (own, other) = (factor(most - next, ptx), factor(part_most - next, ptx));
            most = next;
            total = total * own + part_total * other;
            sum = sum * Vector::new(own) + part_sum * Vector::new(other);
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

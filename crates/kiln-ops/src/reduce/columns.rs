//! Reductions down columns: the second stage of a sum over rows, where cubes have left partial sums.

use super::combine::{Combine, Sums, assign, read, write};
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Columns of a cube.
const COLUMNS: u32 = 32;

#[cube(launch_unchecked, address_type = "dynamic")]
fn columns_kernel<C: Combine, W: Float>(
    items: &[f32],
    out: &mut [W],
    rows: usize,
    width: usize,
    #[comptime] groups: u32,
    #[define(W)] _dtype: ElemType,
) {
    let column = CUBE_POS * comptime!(COLUMNS as usize) + UNIT_POS_X as usize;
    let part = comptime!((COLUMNS * groups) as usize);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(C::REGISTERS * part));
    // A group takes every so many rows, or, to keep the order, rows that follow each other.
    let share = (rows + comptime!(groups as usize - 1)) / comptime!(groups as usize);
    let group = UNIT_POS_Y as usize;
    let first = if comptime!(C::COMMUTATIVE) { group } else { group * share };
    let end = if comptime!(C::COMMUTATIVE) { rows } else { min(first + share, rows) };
    let step = comptime!(if C::COMMUTATIVE { groups as usize } else { 1 });
    let mut item = C::identity();
    if column < width {
        for row in range_stepped(first, end, step) {
            let next = read::<C>(items, row * comptime!(C::REGISTERS) * width + column, width);
            let both = C::combine(&item, &next);
            assign::<C>(&mut item, &both);
        }
    }
    write::<C>(&mut shared, UNIT_POS as usize, part, &item);
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut all = read::<C>(&shared, UNIT_POS_X as usize, part);
        #[unroll]
        for group in 1..groups {
            let next = read::<C>(&shared, (group * COLUMNS) as usize + UNIT_POS_X as usize, part);
            let both = C::combine(&all, &next);
            assign::<C>(&mut all, &both);
        }
        #[unroll]
        for k in 0..comptime!(C::REGISTERS) {
            out[k * width + column] = W::cast_from(all[k]);
        }
    }
}

/// Combines the `rows` rows of `items` (f32, contiguous) into `out`. A row is a matrix of as many rows as
/// an item has registers, and so is `out`.
pub fn columns<C: Combine>(items: CubeTensor, rows: usize, out: &CubeTensor) {
    let client = &out.client;
    let width = out.meta.shape().num_elements() / C::REGISTERS;
    let groups = (client.properties().hardware.max_units_per_cube / COLUMNS).min(16);
    let address = launch::address_type(&[&items, out]);
    let ways = [("several rows a group", rows > groups as usize)];
    launch::plans::note("sum of rows", &(C::REGISTERS, groups, address), &ways);
    // SAFETY: columns are checked against the width, rows against their number.
    unsafe {
        columns_kernel::launch_unchecked::<C>(
            client,
            launch::grid(client, width.div_ceil(COLUMNS as usize)),
            CubeDim::new_2d(COLUMNS, groups),
            address,
            items.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rows,
            width,
            groups,
            dtype_to_elem_type(out.dtype),
        );
    }
}

/// Adds the `rows` rows of `partial` (f32, contiguous) into `out`.
pub(crate) fn column_sum(partial: CubeTensor, rows: usize, out: &CubeTensor) {
    columns::<Sums<1>>(partial, rows, out);
}

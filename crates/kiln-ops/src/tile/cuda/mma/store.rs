//! What a warp does with its sums at the end.

use super::warp::{Lanes, MmaProduct};
use crate::tile::cuda::fragment::{Addend, offset};
use crate::tile::cuda::schedule::{ROWS, WorkTile};
use cubecl::prelude::*;

/// Sizes of the result, the distance of its rows, and what happens to it: alpha, and C's distances with beta.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Finish {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) pitch: usize,
    pub(crate) alpha: f32,
    pub(crate) addend: Addend,
}

/// Stores the sums of a tile, two neighbours at once; rows are an even number of elements apart then. Of a
/// symmetric result, whose `V` is one, what is on and below the diagonal, and that mirrored.
#[cube]
pub(super) fn store<C: Float, O: Float, V: Size>(
    sums: &Array<Vector<f32, Const<4>>>,
    out: &mut [Vector<O, V>],
    add: &[C],
    scales: &[f32],
    finish: &Finish,
    lanes: &Lanes,
    tile: &WorkTile,
    #[comptime] product: MmaProduct,
) {
    let across = comptime!(2 * product.fragments_n());
    let width = V::value();
    let row0 = tile.row * comptime!(ROWS as u32) + lanes.row;
    let col0 = tile.col * comptime!(product.n as u32) + lanes.col;
    let mut alpha = finish.alpha;
    if comptime!(product.linear.device_scale) {
        alpha *= scales[tile.out as usize];
    }
    #[unroll]
    for i in 0..4usize {
        #[unroll]
        for j in 0..across {
            let fragment = sums[comptime!(i * across + j)];
            #[unroll]
            for part in 0..comptime!(4 / width) {
                let first = comptime!(part * width);
                let row = row0 + comptime!(16 * i as u32 + offset(first).0);
                let col = col0 + comptime!(8 * j as u32 + offset(first).1);
                store_neighbours::<C, O, V>(
                    fragment, out, add, finish, alpha, tile.out, row, col, first, product,
                );
            }
        }
    }
}

/// Elements `first ..` of a fragment, at `row` and `col` of the result, as many as are stored at once.
#[cube]
fn store_neighbours<C: Float, O: Float, V: Size>(
    fragment: Vector<f32, Const<4>>,
    out: &mut [Vector<O, V>],
    add: &[C],
    finish: &Finish,
    alpha: f32,
    matrix: u32,
    row: u32,
    col: u32,
    #[comptime] first: usize,
    #[comptime] product: MmaProduct,
) {
    let symmetric = comptime!(product.scheduler.symmetric);
    let width = V::value();
    if row < finish.m && col < finish.n && (comptime!(!symmetric) || col <= row) {
        let mut neighbours = Vector::<f32, V>::empty();
        let addend = &finish.addend;
        let c_row = matrix as usize * addend.batch_stride + row as usize * addend.row;
        #[unroll]
        for e in 0..width {
            let mut x = fragment.extract(comptime!(first + e));
            let col = col + comptime!(e as u32);
            if comptime!(product.linear.scaled) {
                x *= alpha;
            }
            if comptime!(product.linear.add) && col < finish.n {
                x += addend.beta * f32::cast_from(add[c_row + col as usize * addend.col]);
            }
            if comptime!(product.scheduler.triangles.out_lower) && col > row {
                x = 0.0f32;
            }
            neighbours.insert(e, x);
        }
        let base = matrix as usize * (finish.m as usize * finish.pitch);
        // Of an odd width the second one is in the row's padding.
        let at = base + row as usize * finish.pitch + col as usize;
        out[at / width] = Vector::cast_from(neighbours);
        if comptime!(symmetric) {
            let mirrored = base + col as usize * finish.pitch + row as usize;
            out[mirrored / width] = Vector::cast_from(neighbours);
        }
    }
}

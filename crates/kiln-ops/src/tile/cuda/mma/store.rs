//! What a warp does with its sums at the end.

use super::warp::{Lanes, MmaProduct};
use crate::tile::cuda::fragment::offset;
use crate::tile::cuda::schedule::{ROWS, TileGrid, WorkTile};
use crate::tile::finish::Finish;
use cubecl::prelude::*;

/// Stores the sums of a tile, two neighbours at once; rows are an even number of elements apart then. Of a
/// symmetric result, whose `V` is one, what is on and below the diagonal, and that mirrored.
#[cube]
pub(super) fn store<C: Float, O: Float, V: Size>(
    sums: &Array<Vector<f32, Const<4>>>,
    out: &mut [Vector<O, V>],
    add: &[C],
    scales: &[f32],
    finish: &Finish,
    grid: &TileGrid,
    pitch: usize,
    lanes: &Lanes,
    tile: &WorkTile,
    #[comptime] product: MmaProduct,
) {
    let across = comptime!(2 * product.fragments_n());
    let width = V::value();
    let row0 = tile.row * comptime!(ROWS as u32) + lanes.row;
    let col0 = tile.col * comptime!(product.n as u32) + lanes.col;
    let alpha = finish.alpha(scales, tile.out as usize, product.linear);
    let beta = finish.beta(scales, tile.out as usize, product.linear);
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
                    fragment, out, add, finish, grid, pitch, alpha, beta, tile.out, row, col,
                    first, product,
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
    grid: &TileGrid,
    pitch: usize,
    alpha: f32,
    beta: f32,
    matrix: u32,
    row: u32,
    col: u32,
    #[comptime] first: usize,
    #[comptime] product: MmaProduct,
) {
    let symmetric = comptime!(product.scheduler.symmetric);
    let width = V::value();
    if row < grid.m && col < grid.n && (comptime!(!symmetric) || col <= row) {
        let mut neighbours = Vector::<f32, V>::empty();
        #[unroll]
        for e in 0..width {
            let col = col + comptime!(e as u32);
            // Of an odd width the second one is in the row's padding.
            let inside = if comptime!(e > 0) { min(col, grid.n - 1) } else { col } as usize;
            let sum = fragment.extract(comptime!(first + e));
            let mut x = finish.element::<C>(
                sum,
                alpha,
                beta,
                add,
                matrix as usize,
                row as usize,
                inside,
                product.linear,
            );
            if comptime!(product.scheduler.triangles.out_lower) && col > row {
                x = 0.0f32;
            }
            neighbours.insert(e, x);
        }
        let base = matrix as usize * (grid.m as usize * pitch);
        let at = base + row as usize * pitch + col as usize;
        out[at / width] = Vector::cast_from(neighbours);
        if comptime!(symmetric) {
            let mirrored = base + col as usize * pitch + row as usize;
            out[mirrored / width] = Vector::cast_from(neighbours);
        }
    }
}

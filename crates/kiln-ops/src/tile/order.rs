//! The order of triangular tiles: made on the host, so that every cube has as much to do.

use super::{Triangle, Triangles};
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{LazyLock, Mutex};

/// Diagonals of a band. In lower · lower, tiles of one length lie on a diagonal and share nothing: the
/// longest come first only by bands, inside which tiles of one column follow each other. (8192² in bf16
/// on an H200: 465 µs by length alone, 361 µs in bands of 8, 345 µs with equal work for the cubes.)
const BAND: usize = 8;
/// Products of a stack that are made side by side: few enough to stay in the cache. (16 of 1024² in bf16 on
/// an H200, both passes: 28.0 and 55.5 µs by twos, 27.2 and 54.0 by eights, 27.7 and 57.8 all at once.)
const GROUP: usize = 8;
/// What a tile costs beside its blocks of K, and one that is only filled with zeros, in hundredths of a block
/// of 128. (4096² there: 48.5 µs with 100 and 70, 47.1 so.)
const TILE: u64 = 200;
const ZEROS: u64 = 100;
const BLOCK: u64 = 100;

/// A tile: row, column and product.
type Tile = [usize; 3];

/// Tiles of `size`×`size` triangles by decreasing length of their sums, then the empty ones.
fn tiles(size: usize, batches: usize, triangles: Triangles) -> Vec<(Tile, u64)> {
    let mut places = vec![];
    // In the gradients those of one length share a column or a row.
    let band = match (triangles.a, triangles.b) {
        (Triangle::Lower, Triangle::Lower) => BAND,
        _ => 1,
    };
    for first in (0..size).step_by(band) {
        let rows = first..(first + band).min(size);
        for i in 0..rows.end {
            // g counts diagonals, columns or rows, whichever have sums of one length, from the longest.
            for g in rows.clone().filter(|g| *g >= i) {
                let place = match (triangles.a, triangles.b) {
                    // Lengths: row - col + 1, col + 1, size - row.
                    (Triangle::Lower, Triangle::Lower) => [i + size - 1 - g, i],
                    (Triangle::Lower, _) => [i + size - 1 - g, size - 1 - g],
                    _ => [g, i],
                };
                places.push((place, TILE + BLOCK * (size - g) as u64));
            }
        }
    }
    for row in 0..size {
        places.extend((row + 1..size).map(|col| ([row, col], ZEROS)));
    }
    let mut all = vec![];
    for first in (0..batches).step_by(GROUP) {
        for ([row, col], cost) in &places {
            let products = first..(first + GROUP).min(batches);
            all.extend(products.map(|product| ([*row, *col, product], *cost)));
        }
    }
    all
}

/// Tiles of each cube, round by round: `tile = (row · size + col) · batches + batch`, and after the
/// last one a number that is none.
fn order(size: usize, batches: usize, cubes: usize, triangles: Triangles) -> Vec<u32> {
    let mut lists = vec![vec![]; cubes];
    // Each tile goes to the cube that is done first.
    let mut free: BinaryHeap<_> = (0..cubes).map(|cube| Reverse((0, cube))).collect();
    for ([row, col, batch], cost) in tiles(size, batches, triangles) {
        let Reverse((time, cube)) = free.pop().expect("there is a cube");
        lists[cube].push(((row * size + col) * batches + batch) as u32);
        free.push(Reverse((time + cost, cube)));
    }
    let rounds = lists.iter().map(Vec::len).max().unwrap_or(0) + 1;
    let tile = |round: usize, cube: usize| lists[cube].get(round).copied().unwrap_or(u32::MAX);
    (0..rounds)
        .flat_map(|round| (0..cubes).map(move |cube| (round, cube)))
        .map(|(r, c)| tile(r, c))
        .collect()
}

type Key = (String, usize, usize, usize, Triangles);

/// Orders on their devices: a few kilobytes each, made once.
static ORDERS: LazyLock<Mutex<HashMap<Key, (Handle, usize)>>> = LazyLock::new(Default::default);

/// The order on the device of `like`, and its length.
pub(super) fn upload(
    like: &CubeTensor,
    size: usize,
    batches: usize,
    cubes: usize,
    triangles: Triangles,
) -> (Handle, usize) {
    let client = &like.client;
    let key = (format!("{:?}", client.service_id()), size, batches, cubes, triangles);
    let mut orders = ORDERS.lock().unwrap_or_else(|e| e.into_inner());
    let made = orders.entry(key).or_insert_with(|| {
        let order = order(size, batches, cubes, triangles);
        let bytes: Vec<u8> = order.iter().flat_map(|tile| tile.to_ne_bytes()).collect();
        (client.create_from_slice(&bytes), order.len())
    });
    made.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOWER: Triangles = Triangles { a: Triangle::Lower, b: Triangle::Lower, out_lower: true };

    #[test]
    fn every_tile_comes_once_and_cubes_have_as_much_to_do() {
        let variants = [
            LOWER,
            Triangles { b: Triangle::Upper, ..LOWER },
            Triangles { a: Triangle::Upper, ..LOWER },
        ];
        for triangles in variants {
            for (size, batches, cubes) in [(1, 1, 1), (5, 3, 4), (8, 16, 132), (32, 1, 132)] {
                let all = tiles(size, batches, triangles);
                for ([row, col, _], cost) in &all {
                    let blocks = match (triangles.a, triangles.b) {
                        (Triangle::Lower, Triangle::Lower) => row + 1 - col.min(&(row + 1)),
                        (Triangle::Lower, _) => col + 1,
                        _ => size - row,
                    };
                    let expected = if col > row { ZEROS } else { TILE + BLOCK * blocks as u64 };
                    assert_eq!(*cost, expected, "{row} {col} of {size}, {triangles:?}");
                }
                let order = order(size, batches, cubes, triangles);
                let mut seen: Vec<_> = order.iter().filter(|t| **t != u32::MAX).collect();
                seen.sort();
                assert!(seen.iter().enumerate().all(|(i, tile)| i as u32 == **tile));
                assert_eq!(seen.len(), size * size * batches);
                // The last round ends every list.
                assert!(order[order.len() - cubes..].iter().all(|tile| *tile == u32::MAX));
            }
        }
    }
}

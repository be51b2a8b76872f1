//! The order of the tiles of triangles and of symmetric results: made on the host, so that every cube has
//! as much to do.

use super::ROWS;
use crate::launch;
use crate::tile::problem::{Problem, Triangle, Triangles};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
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

/// Rows of tiles of a symmetric result that are made together, column by column.
const ROWS_TOGETHER: usize = 8;

/// A tile: row, column and product.
type Tile = [usize; 3];

/// The tiles that have an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::tile::cuda) enum Tiles {
    /// Square ones, so many in a row.
    Triangular(usize, Triangles),
    /// Of so many columns, of a result of so many rows: those that have a part on or below the diagonal.
    Symmetric { size: usize, columns: usize },
}

impl Tiles {
    /// Those of a problem that have an order, in tiles of so many columns.
    pub(in crate::tile::cuda) fn of(problem: &Problem, columns: usize) -> Option<Self> {
        if problem.symmetric {
            return Some(Self::Symmetric { size: problem.m, columns });
        }
        let triangular = problem.triangles.masked();
        triangular.then(|| Self::Triangular(problem.m.div_ceil(ROWS), problem.triangles))
    }

    /// Those of a stack of products in the order in which they are given out, with their costs.
    fn listed(self, batches: usize) -> Vec<(Tile, u64)> {
        match self {
            Self::Triangular(size, triangles) => tiles(size, batches, triangles),
            Self::Symmetric { size, columns } => {
                let places = symmetric(size, columns);
                let tile = |product| places.iter().map(move |[row, col]| [*row, *col, product]);
                (0..batches).flat_map(tile).map(|tile| (tile, 1)).collect()
            }
        }
    }

    /// How many a row of the whole matrix has.
    fn across(self) -> usize {
        match self {
            Self::Triangular(size, _) => size,
            Self::Symmetric { size, columns } => size.div_ceil(columns),
        }
    }
}

/// Tiles of a row of a symmetric result.
fn symmetric_row(row: usize, size: usize, columns: usize) -> usize {
    size.min((row + 1) * ROWS).div_ceil(columns)
}

/// The number of tiles of a symmetric result.
pub(in crate::tile::cuda) fn symmetric_tiles(size: usize, columns: usize) -> usize {
    (0..size.div_ceil(ROWS)).map(|row| symmetric_row(row, size, columns)).sum()
}

/// Rows and columns of these tiles.
fn symmetric(size: usize, columns: usize) -> Vec<[usize; 2]> {
    let rows = size.div_ceil(ROWS);
    let mut places = vec![];
    for first in (0..rows).step_by(ROWS_TOGETHER) {
        let end = (first + ROWS_TOGETHER).min(rows);
        for col in 0..symmetric_row(end - 1, size, columns) {
            let below = (first..end).filter(|row| col < symmetric_row(*row, size, columns));
            places.extend(below.map(|row| [row, col]));
        }
    }
    places
}

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

/// Tiles of each cube, round by round: `tile = (row · across + col) · batches + batch`, and after the
/// last one a number that is none.
fn order(tiles: Tiles, batches: usize, cubes: usize) -> Vec<u32> {
    let across = tiles.across();
    let mut lists = vec![vec![]; cubes];
    // Each tile goes to the cube that is done first.
    let mut free: BinaryHeap<_> = (0..cubes).map(|cube| Reverse((0, cube))).collect();
    for ([row, col, batch], cost) in tiles.listed(batches) {
        let Reverse((time, cube)) = free.pop().expect("there is a cube");
        lists[cube].push(((row * across + col) * batches + batch) as u32);
        free.push(Reverse((time + cost, cube)));
    }
    let rounds = lists.iter().map(Vec::len).max().unwrap_or(0) + 1;
    let tile = |round: usize, cube: usize| lists[cube].get(round).copied().unwrap_or(u32::MAX);
    (0..rounds)
        .flat_map(|round| (0..cubes).map(move |cube| (round, cube)))
        .map(|(r, c)| tile(r, c))
        .collect()
}

type Key = (String, Tiles, usize, usize);

/// Orders on their devices: a few kilobytes each, made once.
static ORDERS: LazyLock<Mutex<HashMap<Key, (Handle, usize)>>> = LazyLock::new(Default::default);

/// The order of these tiles of a batch of products for so many cubes, as a kernel takes it; anything where
/// the kernel makes it.
pub(in crate::tile::cuda) fn argument(
    tiles: Option<Tiles>,
    problem: &Problem,
    cubes: usize,
    out: &CubeTensor,
) -> BufferArg {
    let Some(tiles) = tiles else {
        return launch::unused(out, DType::U32).into_buffer_arg();
    };
    let (handle, length) = upload(&out.client, tiles, problem.batches, cubes);
    // SAFETY: the length is that of the order.
    unsafe { BufferArg::from_raw_parts(handle, length) }
}

/// The order on a device, and its length.
fn upload(client: &Client, tiles: Tiles, batches: usize, cubes: usize) -> (Handle, usize) {
    let key = (format!("{:?}", client.service_id()), tiles, batches, cubes);
    let mut orders = ORDERS.lock().unwrap_or_else(|e| e.into_inner());
    let made = orders.entry(key).or_insert_with(|| {
        let order = order(tiles, batches, cubes);
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
                let order = order(Tiles::Triangular(size, triangles), batches, cubes);
                let mut seen: Vec<_> = order.iter().filter(|t| **t != u32::MAX).collect();
                seen.sort();
                assert!(seen.iter().enumerate().all(|(i, tile)| i as u32 == **tile));
                assert_eq!(seen.len(), size * size * batches);
                // The last round ends every list.
                assert!(order[order.len() - cubes..].iter().all(|tile| *tile == u32::MAX));
            }
        }
    }

    #[test]
    fn the_lower_half_of_a_symmetric_result_is_covered_once() {
        for (size, columns, batches, cubes) in [
            (1usize, 256usize, 1, 1),
            (520, 192, 3, 4),
            (2112, 192, 1, 132),
            (768, 256, 24, 132),
            (4200, 128, 1, 132),
        ] {
            // As the kernel finds a tile's row and column.
            let (rows, across) = (size.div_ceil(ROWS), size.div_ceil(columns));
            assert_eq!(symmetric(size, columns).len(), symmetric_tiles(size, columns));
            let mut seen = vec![0; rows * across * batches];
            let order = order(Tiles::Symmetric { size, columns }, batches, cubes);
            order.iter().filter(|t| **t != u32::MAX).for_each(|t| seen[*t as usize] += 1);
            for row in 0..rows {
                for col in 0..across {
                    // Its first column and its last row meet on or below the diagonal.
                    let wanted = usize::from(col * columns < row * ROWS + ROWS);
                    let at = (row * across + col) * batches;
                    assert!(
                        seen[at..][..batches].iter().all(|times| *times == wanted),
                        "{row} {col}"
                    );
                }
            }
            assert!(order[order.len() - cubes..].iter().all(|tile| *tile == u32::MAX));
        }
    }
}

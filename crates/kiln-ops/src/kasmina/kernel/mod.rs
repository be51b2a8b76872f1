//! The kernels: a cube has some columns and walks down its part of the rows.
//!
//! A unit has the same columns in every row, so what the seeds make of them is found out once: y = x·factor + shift for
//! each. On the way down it takes the mean and M2 = Σ (x − mean)² of each column, some rows at a time, in the backward the
//! sums of dy and x·dy. A small second launch brings the columns of a chunk and the parts of the rows together, in a fixed
//! order, so two runs agree bit for bit.

#[cfg(feature = "cuda")]
mod ahead;
#[cfg(not(feature = "cuda"))]
#[path = "no_ahead.rs"]
mod ahead;
mod backward;
mod change;
mod forward;
mod seed;

pub use backward::Backward;
pub(crate) use backward::backward;
pub use change::State;
pub(super) use change::change;
pub(crate) use forward::forward;
pub use seed::Blueprints;
pub(crate) use seed::{Garden, MlpSeed, mlp_of};

use crate::launch::{self, limits};
use crate::reduce::RowUnits;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Vectors of a row that a cube takes at most: 1 KB.
const COLUMNS: u32 = 64;
/// Units of a cube, which is the only one of its multiprocessor: with more, the last of them worked alone for a while
/// (H200, 2026-11-27, 65536×4096 in bf16: forward 281 µs, 304 with two, 346 with four).
const UNITS: u32 = 512;
/// Rows of a unit whose loads are under way together.
const ROWS: usize = 4;
/// Units that bring a seed's numbers together, at most.
const GATHERERS: u32 = 256;
/// Most bytes of shared memory of what a cube brings together.
const SHARED: usize = 32 << 10;

/// How rows and columns are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Units along a row, each with one vector of it.
    columns: u32,
    /// Units below each other.
    below: u32,
}

/// The same in numbers that a kernel takes at run time.
struct Parts {
    /// Cubes along a row.
    tiles: usize,
    /// Parts of the rows, a cube of each tile for each.
    parts: usize,
    /// Rows of a part; of the last perhaps fewer.
    share: usize,
}

impl Plan {
    /// For so many rows of `vectors` vectors of `size` elements.
    fn new(client: &Client, rows: usize, vectors: usize, size: usize) -> Self {
        let rows = limits::reckoned(rows);
        // A unit leaves two vectors of f32 for the others.
        let hardware = &client.properties().hardware;
        let shared = SHARED.min(hardware.max_shared_memory_size);
        let fits = (shared / (2 * size * size_of::<f32>())) as u32;
        let units = UNITS.min(hardware.max_units_per_cube).min(fits);
        let columns = (vectors as u32).next_power_of_two().min(COLUMNS).min(units);
        // Both are powers of two: what units below each other have seen is brought together in a tree.
        let below = (units / columns).min(rows.div_ceil(ROWS).next_power_of_two() as u32);
        Self { columns, below: 1 << below.ilog2() }
    }

    fn parts(&self, client: &Client, rows: usize, vectors: usize) -> Parts {
        let tiles = vectors.div_ceil(self.columns as usize);
        let wanted = (launch::multiprocessors(client) / tiles).max(1);
        // No part with fewer rows than its units can have under way.
        let share = rows.div_ceil(wanted).max(self.below as usize * ROWS);
        Parts { tiles, parts: rows.div_ceil(share), share }
    }

    /// Who brings chunks of up to `size` features together.
    fn gather(&self, client: &Client, rows: usize, vectors: usize, size: usize) -> Gather {
        Gather::new(client, size, self.parts(client, limits::reckoned(rows), vectors).parts)
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.columns, self.below)
    }
}

/// The sizes of a launch; strides in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    rows: usize,
    vectors: usize,
    tiles: usize,
    share: usize,
    x: usize,
    dy: usize,
}

/// What a unit works on.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    /// The part of the rows.
    part: usize,
    /// The vector of a row, and whether there is one: else it stands for the last and writes nothing.
    at: usize,
    own: bool,
    /// Its first row, how many it has, `below` apart, and the last of its part.
    first: usize,
    count: usize,
    last: usize,
}

/// Rows of the part that begins at `begin`: every `step`-th from the one `below` on.
#[cube]
fn rows_of(sizes: &Sizes, begin: usize, below: usize, #[comptime] step: usize) -> usize {
    let end = min(begin + sizes.share, sizes.rows);
    let mut count = 0usize;
    if begin + below < end {
        count = (end - begin - below + comptime!(step - 1)) / step;
    }
    count
}

#[cube]
fn place(sizes: &Sizes, #[comptime] plan: Plan) -> Place {
    let part = CUBE_POS / sizes.tiles;
    let tile = CUBE_POS - part * sizes.tiles;
    let at = tile * comptime!(plan.columns as usize) + UNIT_POS_X as usize;
    let begin = part * sizes.share;
    let below = UNIT_POS_Y as usize;
    Place {
        part,
        at: min(at, sizes.vectors - 1),
        own: at < sizes.vectors && begin < sizes.rows,
        first: begin + below,
        count: rows_of(sizes, begin, below, comptime!(plan.below as usize)),
        last: min(begin + sizes.share, sizes.rows) - 1,
    }
}

/// The units that bring the columns of a seed and the parts of its rows together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Gather {
    /// Units of a seed and seeds of a cube.
    row: RowUnits,
    /// Of the units of a seed those with columns of their own; the others have other parts of the rows.
    columns: u32,
}

impl Gather {
    /// For chunks of up to `size` features whose rows are in so many parts.
    fn new(client: &Client, size: usize, parts: usize) -> Self {
        let most = client.properties().hardware.max_units_per_cube.min(GATHERERS);
        let most = 1 << most.ilog2();
        let up_to = |number: usize, most: u32| (number.next_power_of_two() as u32).min(most);
        let columns = up_to(size, most);
        let units = columns * up_to(parts, most / columns);
        Self { row: RowUnits::new(client, units, most / units), columns }
    }

    fn cubes(&self, seeds: usize) -> usize {
        seeds.div_ceil(self.row.rows as usize)
    }
}

/// What one launch leaves for the next: of each part of the rows two numbers a column, `[parts, 2, H]`.
fn left(like: &CubeTensor, op: &'static str, name: &'static str, of: [usize; 3]) -> CubeTensor {
    launch::scratch(like, op, name, burn::tensor::Shape::new(of), burn::tensor::DType::F32)
}

/// [`ROWS`] rows of a unit from its `group`-th on, all their loads under way. Those past the end of its part are the last
/// once more.
#[cube]
fn load<E: Float, N: Size>(
    of: &[Vector<E, N>],
    stride: usize,
    place: &Place,
    group: usize,
    #[comptime] plan: Plan,
) -> Array<Vector<E, N>> {
    let mut held = Array::<Vector<E, N>>::new(comptime!(ROWS));
    let first = place.first + group * comptime!(ROWS * plan.below as usize);
    #[unroll]
    for r in 0..ROWS {
        let row = min(first + comptime!(r * plan.below as usize), place.last);
        held[r] = of[row * stride + place.at];
    }
    held
}

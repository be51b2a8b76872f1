//! The sums of rows.
//!
//! In one launch each group of units adds up the numbers of [`ROWS`] neighbouring rows of the table, those that at most
//! [`PIECE`] tokens name, and cubes among them add up pieces of the order of that length: of longer rows, those that begin
//! before a piece and those that begin in it, of which there is at most one. What becomes of these is in
//! [pieces](super::pieces).

use super::order::{self, Order};
use super::pieces::{self, Arrival, arrive};
use super::rows::{
    BATCH, Range, add_groups, add_row, add_rows, finish_row, load_rows, write_row, zeros,
};
use super::{named, vector_size};
use crate::device::Hardware;
use crate::launch::{self, Rows};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Positions of a piece, and of a row that is not cut.
pub(super) const PIECE: usize = 32;
/// Neighbouring rows of a group, whose tokens follow each other in the order, so that it asks for numbers of several rows
/// together: of 32,768 evenly drawn tokens of 50,304 rows of 768 in bf16 an H200 adds up four rows a group, with the order, in
/// 50.2 µs, two in 55.8, eight in 52.1, one in 67.5.
const ROWS: usize = 4;
/// Units beside each other in a row.
const LANES: u32 = 32;
/// Groups of a cube: with 8 the sums and their order take 58.5 µs in place of 50.2; with 2 they take 49.6, but 62.4 in place
/// of 58.9 where all tokens are one.
const GROUPS: u32 = 4;
/// Most vectors of a unit.
const VECTORS: usize = 4;

/// What sums are added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Onto {
    /// Nothing: rows without tokens are zeros.
    Zeros,
    /// Another table.
    Other,
    /// What stands where they go: rows without tokens stay as they are.
    Same,
}

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// Units of a group.
    pub(super) lanes: u32,
    pub(super) groups: u32,
    /// Vectors of a unit.
    pub(super) vectors: usize,
    /// Elements of a vector.
    size: usize,
    pub(super) onto: Onto,
    /// Whether the last cube of a row adds up its pieces: memory has an order between cubes. Else a launch does.
    pub(super) arrives: bool,
}

impl Plan {
    fn new(client: &Client, width: usize, size: usize, onto: Onto) -> Self {
        let most = client.properties().hardware.max_units_per_cube;
        let all = width / size;
        let lanes = (all.next_power_of_two() as u32).clamp(8, LANES).min(most);
        let parts = all.div_ceil(lanes as usize * VECTORS);
        let vectors = all.div_ceil(lanes as usize * parts);
        let arrives = Hardware::of(client).ptx;
        Self { lanes, groups: GROUPS.min(most / lanes), vectors, size, onto, arrives }
    }

    /// Vectors of a group.
    pub(super) fn span(&self) -> usize {
        self.lanes as usize * self.vectors
    }

    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.lanes, self.groups)
    }
}

/// Sizes, in vectors and rows.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub(super) width: usize,
    /// Parts of a row, one for a group.
    pub(super) parts: usize,
    /// From a row of dy to the next.
    stride: usize,
    /// Rows of the table.
    pub(super) rows: usize,
    /// Cubes of pieces, a piece for each part, and at how many cubes there is one: among those of rows, which write while
    /// these wait for what they read.
    pub(super) pieces: usize,
    every: usize,
}

/// The row that stands at a place of the order.
#[cube]
pub(super) fn row_at<I: Int>(tokens: &[I], order: &[u32], at: usize, rows: usize) -> usize {
    named::<I>(tokens[order[at] as usize], rows).row
}

/// The sums of neighbouring rows, none of which is cut.
#[cube]
fn whole_rows<E: Float, F: Float, N: Size>(
    dy: &[Vector<E, N>],
    order: &[u32],
    starts: &[u32],
    onto: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    rows: Range,
    first: usize,
    sizes: &Sizes,
    #[comptime] plan: Plan,
) {
    let mut sum = zeros::<N>(comptime!(plan.vectors));
    let mut row = rows.from;
    let end = starts[rows.to] as usize;
    for i in range_stepped(starts[rows.from] as usize, end, BATCH) {
        let own = Range { from: i, to: end };
        let held =
            load_rows::<E, N>(dy, order, own, 1usize, sizes.stride, first, sizes.width, true, plan);
        #[unroll]
        for k in 0..BATCH {
            if i + k < end {
                while i + k >= starts[row + 1] as usize {
                    finish_next::<F, N>(sums, onto, starts, row, &mut sum, first, sizes, plan);
                    row += 1;
                }
                add_row::<E, N>(&mut sum, &held, k, plan);
            }
        }
    }
    while row < rows.to {
        finish_next::<F, N>(sums, onto, starts, row, &mut sum, first, sizes, plan);
        row += 1;
    }
}

/// Writes the sum of a row, and begins that of the next.
#[cube]
fn finish_next<F: Float, N: Size>(
    sums: &mut [Vector<F, N>],
    onto: &[Vector<F, N>],
    starts: &[u32],
    row: usize,
    sum: &mut Array<Vector<f32, N>>,
    first: usize,
    sizes: &Sizes,
    #[comptime] plan: Plan,
) {
    let mut changes = true;
    if comptime!(plan.onto == Onto::Same) {
        changes = starts[row + 1] > starts[row];
    }
    if changes {
        finish_row::<F, N>(sums, onto, row, &*sum, first, sizes.width, plan);
    }
    #[unroll]
    for c in 0..comptime!(plan.vectors) {
        sum[c] = Vector::new(0.0f32);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn sums_kernel<E: Float, F: Float, I: Int, N: Size>(
    dy: &[Vector<E, N>],
    tokens: &[I],
    order: &[u32],
    starts: &[u32],
    onto: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    partials: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(E, F, I)] _dtypes: [ElemType; 3],
) {
    let mut shared =
        Shared::<[Vector<f32, N>]>::new_slice(comptime!((plan.lanes * plan.groups) as usize));
    let mut told = Shared::<[u32]>::new_slice(1usize);
    let groups = comptime!(plan.groups as usize);
    let group = UNIT_POS_Y as usize;
    let number = CUBE_POS / sizes.every;
    if number < sizes.pieces && number * sizes.every == CUBE_POS {
        let piece = number / sizes.parts;
        let part = number - piece * sizes.parts;
        let first = part * comptime!(plan.span()) + UNIT_POS_X as usize;
        let all = starts[sizes.rows] as usize;
        let from = piece * PIECE;
        let to = min(from + PIECE, all);
        if from < to {
            let one = row_at::<I>(tokens, order, from, sizes.rows);
            let other = row_at::<I>(tokens, order, to - 1, sizes.rows);
            for end in 0..2usize {
                let row = select(end == 0, one, other);
                let of = Range { from: starts[row] as usize, to: starts[row + 1] as usize };
                let twice = one == other && end == 1;
                if of.to - of.from > PIECE && !twice {
                    let own = Range { from: max(of.from, from) + group, to: min(of.to, to) };
                    let mut sum = zeros::<N>(comptime!(plan.vectors));
                    add_rows::<E, N>(
                        &mut sum,
                        dy,
                        order,
                        own,
                        groups,
                        sizes.stride,
                        first,
                        sizes.width,
                        true,
                        plan,
                    );
                    add_groups::<N>(&mut sum, &mut shared, plan);
                    if group == 0 {
                        let slot = 2 * piece + end;
                        write_row::<N>(partials, slot, &sum, first, sizes.width, plan);
                    }
                    if comptime!(plan.arrives) {
                        let at = Arrival { piece, part, first };
                        arrive::<F, N>(
                            row,
                            of,
                            at,
                            order,
                            partials,
                            counters,
                            onto,
                            sums,
                            &mut shared,
                            &mut told,
                            sizes,
                            plan,
                        );
                    }
                }
            }
        }
    } else {
        let at = (CUBE_POS - min(number + 1, sizes.pieces)) * groups + group;
        let block = at / sizes.parts;
        let first = (at - block * sizes.parts) * comptime!(plan.span()) + UNIT_POS_X as usize;
        let all = min((block + 1) * ROWS, sizes.rows);
        let mut row = block * ROWS;
        while row < all {
            // Up to a row that is cut.
            let mut to = row;
            while to < all && starts[to + 1] - starts[to] <= PIECE as u32 {
                to += 1;
            }
            let of = Range { from: row, to };
            whole_rows::<E, F, N>(dy, order, starts, onto, sums, of, first, sizes, plan);
            row = to + 1;
        }
    }
}

/// dweight of so many rows in an element type, and what it is added to: a table of that type without gaps.
pub(super) fn sums(
    op: &'static str,
    dy: Rows,
    tokens: &CubeTensor,
    (rows, dtype): (usize, DType),
    onto: Option<CubeTensor>,
) -> CubeTensor {
    let client = &dy.tensor.client;
    let output = || {
        let shape = Shape::new([rows, dy.width]);
        launch::output(&dy.tensor, op, "grad.weight", shape, dtype)
    };
    let (onto, sums, way) = match onto {
        None => (launch::unused(&dy.tensor, dtype), output(), Onto::Zeros),
        Some(mut onto) => match launch::in_place(&mut onto, op, "grad.weight") {
            true => (onto.clone(), onto, Onto::Same),
            false => (onto, output(), Onto::Other),
        },
    };
    let dtypes = [dy.tensor.dtype, dtype, tokens.dtype].map(dtype_to_elem_type);
    let of = |rows: &Rows| vector_size(client, [rows.tensor.dtype, DType::F32], rows);
    let size = if way == Onto::Zeros { of(&dy) } else { of(&dy).min(of(&Rows::new(onto.clone()))) };
    let plan = Plan::new(client, dy.width, size, way);
    let (count, width) = (dy.rows, dy.width / size);
    let parts = width.div_ceil(plan.span());
    // Without a row that more tokens name than a piece has there are no pieces.
    let pieces = if count > PIECE { count.div_ceil(PIECE) } else { 0 };
    let slots = (2 * pieces).max(1);
    let shape = Shape::new([slots, dy.width]);
    let partials = launch::scratch(&dy.tensor, op, "pieces of rows", shape, DType::F32);
    let counters = if plan.arrives { pieces::counters(pieces, parts) } else { 0 };
    let Order { positions, starts, counters } = order::order(op, tokens, rows, counters);
    let tensors = [&dy.tensor, tokens, &starts, &onto, &sums, &partials, &counters];
    let address = launch::address_type(&tensors);
    let cubes = pieces * parts + (rows.div_ceil(ROWS) * parts).div_ceil(plan.groups as usize);
    // All pieces in the first half.
    let every = (cubes / (2 * pieces * parts).max(1)).max(1);
    let stride = dy.stride / size;
    let sizes = || SizesLaunch::new(width, parts, stride, rows, pieces * parts, every);
    let argument = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
    let ways = [
        ("pieces", pieces > 0),
        ("pieces among rows", pieces > 0 && every > 1),
        ("pieces in several lots", plan.arrives && pieces > pieces::LOT),
        ("several parts", parts > 1),
        ("in place", way == Onto::Same),
    ];
    launch::plans::note("sums of rows", &(&plan, address), &ways);
    // SAFETY: columns, rows and pieces are checked against their numbers; positions are those of rows of dy; where sums are
    // added to what stands in their place, the unit that writes has read it.
    unsafe {
        sums_kernel::launch_unchecked(
            client,
            launch::grid(client, cubes),
            plan.cube_dim(),
            address,
            size,
            argument(&dy.tensor),
            argument(tokens),
            argument(&positions),
            argument(&starts),
            argument(&onto),
            argument(&sums),
            argument(&partials),
            argument(&counters),
            sizes(),
            plan,
            dtypes,
        );
        if pieces > 0 && !plan.arrives {
            pieces::long_rows_kernel::launch_unchecked(
                client,
                launch::grid(client, (pieces * parts).div_ceil(plan.groups as usize)),
                plan.cube_dim(),
                address,
                size,
                argument(tokens),
                argument(&positions),
                argument(&starts),
                argument(&partials),
                argument(&onto),
                argument(&sums),
                sizes(),
                plan,
                [dtypes[1], dtypes[2]],
            );
        }
    }
    sums
}

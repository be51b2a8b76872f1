//! The sums of rows.
//!
//! In one launch each group of units adds up the numbers of one row of the table, if at most [`PIECE`] tokens name it, and
//! cubes among them add up pieces of the order of that length: of longer rows, those that begin before a piece and
//! those that begin in it, of which there is at most one. A second launch adds up the pieces of each of these.

use super::order::Order;
use super::{named, vector_size};
use crate::launch::{self, Rows};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Positions of a piece, and of a row that is not cut.
const PIECE: usize = 32;
/// Units beside each other in a row.
const LANES: u32 = 64;
/// Groups of a cube.
const GROUPS: u32 = 4;
/// Pieces of a cube that adds up pieces of rows. Most cubes find nothing: of tokens with rows as often as one over their rank,
/// 32768 of 50304 rows of 768 in bf16, an H200 takes 74.4 µs, with 64 pieces and 32 groups 78.8.
const PIECES: usize = 16;
/// Its groups, and their units, of a vector each, so that several cubes share a row.
const GROUPS_OF_LONG: u32 = 16;
const LANES_OF_LONG: u32 = 32;
/// Pieces behind the first up to which a group takes a row by itself.
const FEW: usize = 8;
/// Most vectors of a unit.
const VECTORS: usize = 4;
/// Rows that are under way together, of pieces and of what is added up from them.
const BATCH: usize = 4;
const BATCH_OF_LONG: usize = 8;

/// What sums are added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Onto {
    /// Nothing: rows without tokens are zeros.
    Zeros,
    /// Another table.
    Other,
    /// What stands where they go: rows without tokens stay as they are.
    Same,
}

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Units of a group.
    lanes: u32,
    groups: u32,
    /// Vectors of a unit.
    vectors: usize,
    /// Elements of a vector.
    size: usize,
    /// Rows that are under way together.
    batch: usize,
    onto: Onto,
}

impl Plan {
    fn new(client: &Client, width: usize, size: usize, onto: Onto) -> Self {
        let most = client.properties().hardware.max_units_per_cube;
        let all = width / size;
        let lanes = (all.next_power_of_two() as u32).clamp(8, LANES).min(most);
        let parts = all.div_ceil(lanes as usize * VECTORS);
        let vectors = all.div_ceil(lanes as usize * parts);
        Self { lanes, groups: GROUPS.min(most / lanes), vectors, size, batch: BATCH, onto }
    }

    /// Vectors of a group.
    fn span(&self) -> usize {
        self.lanes as usize * self.vectors
    }

    /// For rows that are cut, of which there are few.
    fn of_long_rows(self, client: &Client) -> Self {
        let most = client.properties().hardware.max_units_per_cube;
        let lanes = LANES_OF_LONG.min(self.lanes);
        let groups = GROUPS_OF_LONG.min(most / lanes);
        Self { lanes, groups, vectors: 1, batch: BATCH_OF_LONG, ..self }
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.lanes, self.groups)
    }
}

/// Sizes, in vectors and rows.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    width: usize,
    /// Parts of a row, one for a group.
    parts: usize,
    /// From a row of dy to the next.
    stride: usize,
    /// Rows of the table.
    rows: usize,
    /// Cubes of pieces, a piece for each part, and at how many cubes there is one: among those of rows, which write while
    /// these wait for what they read.
    pieces: usize,
    every: usize,
}

/// Positions whose rows of dy are added up.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Range {
    from: usize,
    to: usize,
}

/// Adds every `step`th row of `range` to `sum`; if `ordered`, of the rows in the order that `order` names.
#[cube]
fn add_rows<E: Float, N: Size>(
    sum: &mut Array<Vector<f32, N>>,
    values: &[Vector<E, N>],
    order: &[u32],
    range: Range,
    step: usize,
    stride: usize,
    first: usize,
    width: usize,
    #[comptime] ordered: bool,
    #[comptime] plan: Plan,
) {
    let (batch, count) = comptime!((plan.batch, plan.vectors));
    for i in range_stepped(range.from, range.to, step * batch) {
        let mut held = Array::<Vector<E, N>>::new(comptime!(batch * count));
        #[unroll]
        for k in 0..batch {
            // What is past the end loads the first again.
            let at = select(i + k * step < range.to, i + k * step, i);
            let mut row = at;
            if comptime!(ordered) {
                row = order[at] as usize;
            }
            #[unroll]
            for c in 0..count {
                let column = min(first + comptime!(c * plan.lanes as usize), width - 1);
                held[comptime!(k * count + c)] = values[row * stride + column];
            }
        }
        #[unroll]
        for k in 0..batch {
            if i + k * step < range.to {
                #[unroll]
                for c in 0..count {
                    sum[c] += Vector::<f32, N>::cast_from(held[comptime!(k * count + c)]);
                }
            }
        }
    }
}

#[cube]
fn zeros<N: Size>(#[comptime] count: usize) -> Array<Vector<f32, N>> {
    let mut zeros = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for c in 0..count {
        zeros[c] = Vector::new(0.0f32);
    }
    zeros
}

/// The sums of a cube's groups, in their order, one vector of a unit after the other; the first group has them.
#[cube]
fn add_groups<N: Size>(
    sum: &mut Array<Vector<f32, N>>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] plan: Plan,
) {
    let unit = UNIT_POS_X as usize;
    let lanes = comptime!(plan.lanes as usize);
    #[unroll]
    for c in 0..comptime!(plan.vectors) {
        sync_cube();
        shared[UNIT_POS_Y as usize * lanes + unit] = sum[c];
        sync_cube();
        if UNIT_POS_Y == 0 {
            let mut all = sum[c];
            #[unroll]
            for group in 1..comptime!(plan.groups as usize) {
                all += shared[group * lanes + unit];
            }
            sum[c] = all;
        }
    }
}

/// Of a piece of a row.
#[cube]
fn write_row<N: Size>(
    to: &mut [Vector<f32, N>],
    row: usize,
    sum: &Array<Vector<f32, N>>,
    first: usize,
    width: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for c in 0..comptime!(plan.vectors) {
        let column = first + comptime!(c * plan.lanes as usize);
        if column < width {
            to[row * width + column] = sum[c];
        }
    }
}

/// The same of a whole row.
#[cube]
fn finish_row<F: Float, N: Size>(
    to: &mut [Vector<F, N>],
    onto: &[Vector<F, N>],
    row: usize,
    sum: &Array<Vector<f32, N>>,
    first: usize,
    width: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for c in 0..comptime!(plan.vectors) {
        let column = first + comptime!(c * plan.lanes as usize);
        if column < width {
            let at = row * width + column;
            let mut value = sum[c];
            if comptime!(plan.onto != Onto::Zeros) {
                value += Vector::<f32, N>::cast_from(onto[at]);
            }
            to[at] = Vector::cast_from(value);
        }
    }
}

/// The row that stands at a place of the order.
#[cube]
fn row_at<I: Int>(tokens: &[I], order: &[u32], at: usize, rows: usize) -> usize {
    named::<I>(tokens[order[at] as usize], rows).row
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
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(E, F, I)] _dtypes: [ElemType; 3],
) {
    let mut shared =
        Shared::<[Vector<f32, N>]>::new_slice(comptime!((plan.lanes * plan.groups) as usize));
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
            let ends = Range {
                from: row_at::<I>(tokens, order, from, sizes.rows),
                to: row_at::<I>(tokens, order, to - 1, sizes.rows),
            };
            #[unroll]
            for end in 0..2usize {
                let mut row = ends.from;
                if comptime!(end == 1) {
                    row = ends.to;
                }
                let of = Range { from: starts[row] as usize, to: starts[row + 1] as usize };
                let twice = ends.from == ends.to && end == 1;
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
                }
            }
        }
    } else {
        let at = (CUBE_POS - min(number + 1, sizes.pieces)) * groups + group;
        let row = at / sizes.parts;
        let first = (at - row * sizes.parts) * comptime!(plan.span()) + UNIT_POS_X as usize;
        if row < sizes.rows {
            let own = Range { from: starts[row] as usize, to: starts[row + 1] as usize };
            let mut cut = own.to - own.from > PIECE;
            if comptime!(plan.onto == Onto::Same) {
                cut = cut || own.to == own.from;
            }
            if !cut {
                let mut sum = zeros::<N>(comptime!(plan.vectors));
                add_rows::<E, N>(
                    &mut sum,
                    dy,
                    order,
                    own,
                    1usize,
                    sizes.stride,
                    first,
                    sizes.width,
                    true,
                    plan,
                );
                finish_row::<F, N>(sums, onto, row, &sum, first, sizes.width, plan);
            }
        }
    }
}

/// A row that is cut: the slot of its first piece, and how many pieces follow.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Long {
    slot: usize,
    more: usize,
}

/// Of a row that is cut, the sums of every `step`th piece from number `from` on.
#[cube]
fn add_pieces<N: Size>(
    partials: &[Vector<f32, N>],
    order: &[u32],
    of: Long,
    from: usize,
    step: usize,
    first: usize,
    width: usize,
    #[comptime] plan: Plan,
) -> Array<Vector<f32, N>> {
    let mut sum = zeros::<N>(comptime!(plan.vectors));
    if from == 0 {
        let only = Range { from: of.slot, to: of.slot + 1 };
        add_rows::<f32, N>(
            &mut sum, partials, order, only, 1usize, width, first, width, false, plan,
        );
    }
    // Those that follow begin with the row.
    let next = of.slot / 2 + 1;
    let others = Range { from: next + from, to: next + of.more };
    add_rows::<f32, N>(
        &mut sum,
        partials,
        order,
        others,
        step,
        2 * width,
        first,
        width,
        false,
        plan,
    );
    sum
}

/// The rows that are cut, by the cube of the pieces that they begin in: one of few pieces by a group, the others, of which
/// there are few, by all groups.
#[cube(launch_unchecked, address_type = "dynamic")]
fn long_rows_kernel<F: Float, I: Int, N: Size>(
    tokens: &[I],
    order: &[u32],
    starts: &[u32],
    partials: &[Vector<f32, N>],
    onto: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let groups = comptime!(plan.groups as usize);
    let mut shared =
        Shared::<[Vector<f32, N>]>::new_slice(comptime!((plan.lanes * plan.groups) as usize));
    // Of the row that begins in each piece; no row where none does.
    let mut begun = Shared::<[u32]>::new_slice(comptime!(3 * PIECES));
    let lot = CUBE_POS / sizes.parts;
    let part = CUBE_POS - lot * sizes.parts;
    let first = part * comptime!(plan.span()) + UNIT_POS_X as usize;
    let group = UNIT_POS_Y as usize;
    let all = starts[sizes.rows] as usize;
    // A cube has more units than pieces.
    if UNIT_POS < comptime!(PIECES as u32) {
        let piece = lot * PIECES + UNIT_POS as usize;
        let from = piece * PIECE;
        let mut row = sizes.rows;
        if from < all {
            // One that begins here ends behind this piece.
            let last = row_at::<I>(tokens, order, min(from + PIECE, all) - 1, sizes.rows);
            let begin = starts[last] as usize;
            let end = starts[last + 1] as usize;
            if begin >= from && end - begin > PIECE {
                row = last;
                // Whether the piece's first row or its last.
                let slot = 2 * piece + select(begin == from, 0usize, 1usize);
                begun[comptime!(PIECES) + UNIT_POS as usize] = slot as u32;
                begun[comptime!(2 * PIECES) + UNIT_POS as usize] =
                    ((end - 1) / PIECE - piece) as u32;
            }
        }
        begun[UNIT_POS as usize] = row as u32;
    }
    sync_cube();
    for i in range_stepped(group, PIECES, groups) {
        let row = begun[i] as usize;
        if row < sizes.rows {
            let slot = begun[PIECES + i] as usize;
            let more = begun[2 * PIECES + i] as usize;
            if more <= FEW {
                let of = Long { slot, more };
                let sum =
                    add_pieces::<N>(partials, order, of, 0usize, 1usize, first, sizes.width, plan);
                finish_row::<F, N>(sums, onto, row, &sum, first, sizes.width, plan);
            }
        }
    }
    for i in 0..PIECES {
        let row = begun[i] as usize;
        if row < sizes.rows {
            let slot = begun[PIECES + i] as usize;
            let more = begun[2 * PIECES + i] as usize;
            if more > FEW {
                let of = Long { slot, more };
                let mut sum =
                    add_pieces::<N>(partials, order, of, group, groups, first, sizes.width, plan);
                add_groups::<N>(&mut sum, &mut shared, plan);
                if group == 0 {
                    finish_row::<F, N>(sums, onto, row, &sum, first, sizes.width, plan);
                }
            }
        }
    }
}

/// dweight of so many rows in an element type, and what it is added to: a table of that type without gaps.
pub(super) fn sums(
    op: &'static str,
    dy: Rows,
    tokens: &CubeTensor,
    order: &Order,
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
    let tensors = [&dy.tensor, tokens, &order.starts, &onto, &sums, &partials];
    let address = launch::address_type(&tensors);
    let cubes = pieces * parts + (rows * parts).div_ceil(plan.groups as usize);
    // All pieces in the first half.
    let every = (cubes / (2 * pieces * parts).max(1)).max(1);
    let stride = dy.stride / size;
    let sizes = |parts| SizesLaunch::new(width, parts, stride, rows, pieces * parts, every);
    let argument = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
    let ways = [
        ("pieces", pieces > 0),
        ("pieces among rows", pieces > 0 && every > 1),
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
            argument(&order.positions),
            argument(&order.starts),
            argument(&onto),
            argument(&sums),
            argument(&partials),
            sizes(parts),
            plan,
            dtypes,
        );
        if pieces > 0 {
            let plan = plan.of_long_rows(client);
            let parts = width.div_ceil(plan.span());
            long_rows_kernel::launch_unchecked(
                client,
                launch::grid(client, pieces.div_ceil(PIECES) * parts),
                plan.cube_dim(),
                address,
                size,
                argument(tokens),
                argument(&order.positions),
                argument(&order.starts),
                argument(&partials),
                argument(&onto),
                argument(&sums),
                sizes(parts),
                plan,
                [dtypes[1], dtypes[2]],
            );
        }
    }
    sums
}

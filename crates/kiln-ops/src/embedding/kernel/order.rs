//! The order of tokens by the rows that they name.
//!
//! A cube has some neighbouring rows. Its walkers, which are planes or, without PTX, units, go twice through shares of
//! all tokens that follow each other: they count the tokens of each row, and then, after what stands before their share
//! and before each row is known, put each token's position where it belongs. So positions of a row are in their order,
//! and nothing depends on who came first.

use crate::device::Hardware;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Tokens of a lane that are under way together.
const BATCH: usize = 8;
/// Walkers of a cube that are units.
const SINGLE: u32 = 128;
/// u32 of shared memory that counts take.
const COUNTS: usize = 16_384;
/// The same of walkers that are units: other devices have less.
const COUNTS_OF_SINGLE: usize = 4096;
/// Fewest rows of a cube.
const FEWEST: usize = 16;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    walkers: u32,
    /// Units of a walker.
    lanes: u32,
    /// Rows of a cube.
    rows: usize,
}

impl Plan {
    fn new(client: &Client, rows: usize) -> Self {
        let hardware = &client.properties().hardware;
        let ptx = Hardware::of(client).ptx;
        let lanes = if ptx { launch::plane_size(client) } else { 1 };
        let most = if lanes > 1 { 1024 } else { SINGLE };
        let walkers = most.min(hardware.max_units_per_cube) / lanes;
        let counts = if lanes > 1 { COUNTS } else { COUNTS_OF_SINGLE };
        // A cube for each multiprocessor, if there are as many rows.
        let rows = launch::limits::reckoned(rows);
        let wanted = rows.div_ceil(launch::multiprocessors(client)).next_power_of_two();
        let rows = wanted.clamp(FEWEST, counts / walkers as usize);
        let mut plan = Self { walkers, lanes, rows };
        while plan.shared() * size_of::<u32>() > hardware.max_shared_memory_size && plan.rows > 1 {
            plan.rows /= 2;
        }
        plan
    }

    /// u32 of shared memory.
    fn shared(&self) -> usize {
        (self.walkers as usize + 2) * self.rows + self.units() as usize
    }

    fn units(&self) -> u32 {
        self.walkers * self.lanes
    }

    /// Tokens of a walker that are under way together.
    fn batch(&self) -> usize {
        BATCH * self.lanes as usize
    }
}

/// The tokens of a walker.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Share {
    from: usize,
    to: usize,
    /// Behind the last batch.
    end: usize,
}

/// The rows of a cube.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Own {
    first: usize,
    /// Rows of the table.
    all: usize,
}

/// Where a token stands among those of its plane that name the same row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Among {
    before: u32,
    all: u32,
}

#[cube]
fn among(row: u32, #[comptime] lanes: u32) -> Among {
    let mut before = u32::new(0);
    let mut all = u32::new(1);
    if comptime!(lanes > 1) {
        let mut own = Array::<u32>::new(1usize);
        own[0] = row;
        let same: u32;
        gpu_asm!(
            "match.any.sync.b32 {same}, {row}, 0xffffffff;",
            same = out(_) same, row = in(_) own[0], options(nomem)
        );
        let earlier = (1u32 << (UNIT_POS_X % lanes)) - 1u32;
        before = u32::count_ones(same & earlier);
        all = u32::count_ones(same);
    }
    Among { before, all }
}

/// No row.
const NONE: u32 = u32::MAX;

/// Goes through a share: counts tokens of each of the cube's rows in `counts`, from what it holds, and, if `puts`,
/// writes positions. Returns how many of this unit's tokens name rows before those of the cube.
// One condition is known when the kernel is compiled, the other is not.
#[allow(clippy::collapsible_if)]
#[cube]
fn walk<I: Int>(
    tokens: &[I],
    order: &mut [u32],
    counts: &mut [u32],
    starts: &[u32],
    share: Share,
    own: Own,
    count: usize,
    #[comptime] puts: bool,
    #[comptime] plan: Plan,
) -> u32 {
    let lanes = comptime!(plan.lanes as usize);
    let lane = UNIT_POS_X as usize % lanes;
    let base = UNIT_POS_X as usize / lanes * comptime!(plan.rows);
    let first = own.first as u32;
    let mut below = u32::new(0);
    for batch in range_stepped(share.from, share.end, comptime!(plan.batch())) {
        let mut held = Array::<u32>::new(comptime!(BATCH));
        #[unroll]
        for k in 0..BATCH {
            let i = batch + k * lanes + lane;
            let token = tokens[min(i, count - 1)];
            let is = i < share.to && token >= I::new(0) && token < I::cast_from(own.all);
            held[k] = select(is, u32::cast_from(token), NONE);
        }
        #[unroll]
        for k in 0..BATCH {
            // Numbers before the first wrap around.
            let row = held[k] - first;
            let here = row < comptime!(plan.rows as u32) && held[k] != NONE;
            if comptime!(!puts) {
                below += u32::cast_from(held[k] < first);
            }
            let mut some = here;
            if comptime!(plan.lanes > 1) {
                some = plane_any(here);
            }
            if some {
                // Lanes without a token of the cube's rows share a number that is no row of it.
                let row = select(here, row, comptime!(plan.rows as u32));
                let among = among(row, plan.lanes);
                let at = base + min(row, comptime!(plan.rows as u32 - 1)) as usize;
                let counted = counts[at];
                if here {
                    if comptime!(puts) {
                        let to = starts[row as usize] + counted + among.before;
                        order[to as usize] = (batch + k * lanes + lane) as u32;
                    }
                }
                if comptime!(plan.lanes > 1) {
                    sync_plane();
                }
                if here && among.before == 0 {
                    counts[at] = counted + among.all;
                }
                if comptime!(plan.lanes > 1) {
                    sync_plane();
                }
            }
        }
    }
    below
}

/// Positions in the order of the rows that their tokens name, and where each row begins in it.
#[cube(launch_unchecked, address_type = "dynamic")]
fn order_kernel<I: Int>(
    tokens: &[I],
    order: &mut [u32],
    starts: &mut [u32],
    zeros: &mut [u32],
    count: usize,
    rows: usize,
    wanted: usize,
    #[comptime] plan: Plan,
    #[define(I)] _dtype: ElemType,
) {
    let own_rows = comptime!(plan.rows);
    let units = comptime!(plan.units() as usize);
    let walkers = comptime!(plan.walkers as usize);
    let mut counts = Shared::<[u32]>::new_slice(comptime!(plan.rows * plan.walkers as usize));
    let mut firsts = Shared::<[u32]>::new_slice(comptime!(2 * plan.rows));
    let mut belows = Shared::<[u32]>::new_slice(comptime!(plan.units() as usize));
    let unit = UNIT_POS_X as usize;
    let own = Own { first: CUBE_POS * own_rows, all: rows };
    let batch = comptime!(plan.batch());
    let length = count.div_ceil(walkers * batch) * batch;
    let from = unit / comptime!(plan.lanes as usize) * length;
    let share = Share { from, to: min(from + length, count), end: from + length };

    for i in range_stepped(unit, walkers * own_rows, units) {
        counts[i] = 0u32;
    }
    for i in range_stepped(CUBE_POS * units + unit, wanted, CUBE_COUNT * units) {
        zeros[i] = 0u32;
    }
    sync_cube();
    belows[unit] = walk::<I>(tokens, order, &mut counts, &firsts, share, own, count, false, plan);
    sync_cube();
    // Of each row what stands before each share, and how many there are.
    for row in range_stepped(unit, own_rows, units) {
        let mut all = u32::new(0);
        for walker in 0..walkers {
            let at = walker * own_rows + row;
            let counted = counts[at];
            counts[at] = all;
            all += counted;
        }
        firsts[row] = all;
    }
    // What stands before the cube's rows: a tree.
    let levels = comptime!(plan.units().ilog2());
    #[unroll]
    for level in 0..levels {
        let half = comptime!(plan.units() as usize >> (level + 1));
        sync_cube();
        if unit < half {
            let other = belows[unit + half];
            belows[unit] += other;
        }
    }
    sync_cube();
    let below = belows[0];
    // What stands before each row of them: the sums of 1, 2, 4 ... rows up to each, in two halves by turns.
    let steps = comptime!(plan.rows.ilog2() as usize);
    #[unroll]
    for step in 0..steps {
        let by = comptime!(1usize << step);
        let (source, to) = comptime!((step % 2 * plan.rows, (step + 1) % 2 * plan.rows));
        for row in range_stepped(unit, own_rows, units) {
            let mut sum = firsts[source + row];
            if row >= by {
                sum += firsts[source + row - by];
            }
            firsts[to + row] = sum;
        }
        sync_cube();
    }
    let (last, free) = comptime!((steps % 2 * plan.rows, (steps + 1) % 2 * plan.rows));
    for row in range_stepped(unit, own_rows, units) {
        let mut first = below;
        if row > 0 {
            first += firsts[last + row - 1];
        }
        firsts[free + row] = first;
        if own.first + row < rows {
            starts[own.first + row] = first;
        }
        if own.first + row == rows - 1 {
            starts[rows] = below + firsts[last + row];
        }
    }
    sync_cube();
    let firsts = &firsts[free..comptime!(free + plan.rows)];
    walk::<I>(tokens, order, &mut counts, firsts, share, own, count, true, plan);
}

/// Tokens in the order of the rows that they name.
pub(super) struct Order {
    /// Positions, `[T]`; those of tokens that name no row are not there.
    pub(super) positions: CubeTensor,
    /// `[V + 1]`: where each row begins among them, and the last one ends.
    pub(super) starts: CubeTensor,
    /// Zeros for the launch behind this one.
    pub(super) counters: CubeTensor,
}

/// The order, and so many counters.
pub(super) fn order(op: &'static str, tokens: &CubeTensor, rows: usize, counters: usize) -> Order {
    let client = &tokens.client;
    let count = tokens.meta.num_elements();
    let shape = |size| Shape::new([size]);
    let positions = launch::scratch(tokens, op, "positions", shape(count), DType::U32);
    let starts = launch::output(tokens, op, "starts", shape(rows + 1), DType::U32);
    let wanted = counters;
    let counters = match wanted {
        0 => launch::unused(tokens, DType::U32),
        _ => launch::scratch(tokens, op, "counters", shape(wanted), DType::U32),
    };
    let plan = Plan::new(client, rows);
    let address = launch::address_type(&[tokens, &positions, &starts]);
    let ways = [
        ("several cubes", rows > plan.rows),
        ("several batches", { count > plan.walkers as usize * plan.batch() }),
    ];
    launch::plans::note("order of tokens", &(&plan, address), &ways);
    // SAFETY: tokens are clamped to their number; positions are as many as tokens that name rows, at most all.
    unsafe {
        order_kernel::launch_unchecked(
            client,
            launch::grid(client, rows.div_ceil(plan.rows)),
            CubeDim::new_1d(plan.units()),
            address,
            tokens.clone().into_buffer_arg(),
            positions.clone().into_buffer_arg(),
            starts.clone().into_buffer_arg(),
            counters.clone().into_buffer_arg(),
            count,
            rows,
            wanted,
            plan,
            dtype_to_elem_type(tokens.dtype),
        );
    }
    Order { positions, starts, counters }
}

//! Scans from both sides at once: what stands before a unit's items, and what stands behind them.
//!
//! A unit takes the few neighbouring items of an [`Around`], combines them, and the units of a cube scan
//! their totals to both sides. A sequence of several blocks is read twice: first for the totals of the
//! blocks, then with what stands around each block. On CUDA, where what a cube writes is visible to another
//! in the same launch, that is one launch: cubes take tasks by a ticket, the totals of a group of sequences
//! before the blocks of the group before it, so that whoever is waited for has begun and what is read for
//! the second time still is in the cache. Elsewhere the totals are scanned in a launch of their own.
//!
//! The order of the combinations follows from the lengths and the device alone.

use super::sides::{self, Acts, Sides, read_state, write_state};
use super::units;
use crate::device::Hardware;
use crate::launch;
use crate::reduce::{self, Combine, RowUnits, assign, choose, read, write};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use std::marker::PhantomData;

/// The items of a unit: those from `first` up to `end` of a sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Span {
    /// The sequence.
    pub sequence: usize,
    /// The first item, a multiple of [`ITEMS`](Around::ITEMS); perhaps beyond the end.
    pub first: usize,
    /// Behind the last item of the sequence.
    pub end: usize,
    /// Whether results are written: units past the end do the work of others again.
    pub own: bool,
}

/// What is scanned to both sides.
#[cube]
pub trait Around: Send + Sync + 'static {
    /// What combines, and acts on states.
    type Combine: Acts;
    /// What is read and written: a `#[derive(CubeType, CubeLaunch)]` struct.
    type Buffers: LaunchArg;
    /// A unit's items in registers.
    type Held: CubeType;
    /// Items of a unit.
    const ITEMS: usize;

    /// Loads items; those past the end are identities.
    fn load(buffers: &Self::Buffers, span: &Span) -> Self::Held;

    /// What the items combine to.
    fn total(held: &mut Self::Held) -> Array<f32>;

    /// Takes the states before the first item and behind the last.
    fn store(buffers: &mut Self::Buffers, span: &Span, held: &mut Self::Held, sides: &Sides);
}

/// Sequences that are scanned to both sides.
#[derive(Clone, Copy, Debug)]
pub struct AroundRequest {
    /// The operator, for the audit.
    pub op: &'static str,
    /// Number of sequences.
    pub sequences: usize,
    /// Items of each.
    pub length: usize,
}

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    row: RowUnits,
    /// Items of a unit.
    items: usize,
    /// Blocks have something around them, which is in memory.
    carried: bool,
}

impl Plan {
    fn tile(&self) -> usize {
        self.row.units as usize * self.items
    }
}

/// How sequences are cut.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Cut {
    length: usize,
    /// Blocks of a sequence.
    blocks: usize,
    /// Blocks of all sequences.
    parts: usize,
    /// Blocks of a group of sequences.
    group: usize,
}

/// A block of a sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Block {
    /// Its number among those of all sequences.
    part: usize,
    /// The first of its sequence.
    first: usize,
    span: Span,
}

#[cube]
fn block_at(at: usize, cut: &Cut, #[comptime] plan: Plan) -> Block {
    let part = min(at, cut.parts - 1);
    let sequence = part / cut.blocks;
    let start = (part - sequence * cut.blocks) * comptime!(plan.tile());
    let first = start + UNIT_POS_X as usize * plan.items;
    let span = Span { sequence, first, end: cut.length, own: at < cut.parts };
    Block { part, first: sequence * cut.blocks, span }
}

#[cube]
fn block(cut: &Cut, #[comptime] plan: Plan) -> Block {
    block_at(CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize, cut, plan)
}

/// The combination of each block.
#[cube(launch_unchecked, address_type = "dynamic")]
fn totals_kernel<S: Around>(
    buffers: &S::Buffers,
    totals: &mut [f32],
    cut: &Cut,
    #[comptime] plan: Plan,
) {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(registers * units::shared(&plan.row)));
    let block = block(cut, plan);
    let mut held = S::load(buffers, &block.span);
    let own = S::total(&mut held);
    let total = sides::total::<S::Combine>(&own, &mut shared, plan.row);
    if UNIT_POS_X == 0 && block.span.own {
        write::<S::Combine>(totals, block.part, cut.parts, &total);
    }
}

/// The items of each block, within what stands around it.
#[cube(launch_unchecked, address_type = "dynamic")]
fn around_kernel<S: Around>(
    buffers: &mut S::Buffers,
    before: &[f32],
    after: &[f32],
    cut: &Cut,
    #[comptime] plan: Plan,
) {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(registers * units::shared(&plan.row)));
    let block = block(cut, plan);
    let mut held = S::load(&*buffers, &block.span);
    let total = S::total(&mut held);
    if comptime!(plan.carried) {
        let left = read_state::<S::Combine>(before, block.part, cut.parts);
        let right = read_state::<S::Combine>(after, block.part, cut.parts);
        let ends = Sides { left, right };
        let sides = sides::sides::<S::Combine>(&total, &ends, &mut shared, plan.row);
        S::store(buffers, &block.span, &mut held, &sides);
    } else {
        let ends = Sides { left: S::Combine::start(), right: S::Combine::end() };
        let sides = sides::sides::<S::Combine>(&total, &ends, &mut shared, plan.row);
        S::store(buffers, &block.span, &mut held, &sides);
    }
}

/// Both, by tickets. `state` is the ticket and a count of totals for each sequence, all zeros; `totals`
/// holds the bits of the totals.
#[cube(launch_unchecked, address_type = "dynamic")]
fn tickets_kernel<S: Around>(
    buffers: &mut S::Buffers,
    totals: &mut [Atomic<u32>],
    state: &mut [Atomic<u32>],
    cut: &Cut,
    #[comptime] plan: Plan,
) {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let size = comptime!(<S::Combine as Acts>::STATE);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(registers * units::shared(&plan.row)));
    let mut states = Shared::<[f32]>::new_slice(comptime!(2 * size));
    let mut ticket = Shared::<u32>::new();
    if UNIT_POS == 0 {
        *ticket = state[0].fetch_add(1u32);
    }
    sync_cube();
    // The totals of the first group; then in turns those of a group and the blocks of the one before.
    let number = *ticket as usize;
    let pair = (max(number, cut.group) - cut.group) / (2 * cut.group);
    let within = number - select(number < cut.group, 0usize, cut.group * (2 * pair + 1));
    let of_totals = number < cut.group || within < cut.group;
    let mut at = number;
    if number >= cut.group {
        at = (pair + 1) * cut.group + within;
        if within >= cut.group {
            at = pair * cut.group + within - cut.group;
        }
    }
    let block = block_at(at, cut, plan);
    if block.span.own {
        let mut held = S::load(&*buffers, &block.span);
        let own = S::total(&mut held);
        if of_totals {
            let total = sides::total::<S::Combine>(&own, &mut shared, plan.row);
            if UNIT_POS == 0 {
                #[unroll]
                for k in 0..registers {
                    totals[k * cut.parts + block.part].store(u32::reinterpret(total[k]));
                }
            }
            // Device scope: the total is there before it is counted.
            sync_storage();
            if UNIT_POS == 0 {
                state[block.span.sequence + 1].fetch_add(1u32);
            }
        } else {
            if UNIT_POS == 0 {
                loop {
                    if state[block.span.sequence + 1].load() as usize >= cut.blocks {
                        break;
                    }
                }
            }
            sync_cube();
            sync_storage();
            // A plane goes through what stands before the block, another through what stands behind it.
            let plane = UNIT_POS / comptime!(plan.row.plane);
            if plane == 0 {
                let mut all =
                    combined::<S::Combine>(&*totals, block.first, block.part, cut.parts, plan);
                reduce::plane::<S::Combine>(&mut all, comptime!(plan.row.plane));
                let state = S::Combine::from_left(&S::Combine::start(), &all);
                if UNIT_POS_PLANE == 0 {
                    write_state::<S::Combine>(&mut states, 0usize, 2usize, &state);
                }
            } else if plane == 1 {
                let last = block.first + cut.blocks;
                let mut all =
                    combined::<S::Combine>(&*totals, block.part + 1, last, cut.parts, plan);
                reduce::plane::<S::Combine>(&mut all, comptime!(plan.row.plane));
                let state = S::Combine::from_right(&S::Combine::end(), &all);
                if UNIT_POS_PLANE == 0 {
                    write_state::<S::Combine>(&mut states, 1usize, 2usize, &state);
                }
            }
            sync_cube();
            let left = read_state::<S::Combine>(&states, 0usize, 2usize);
            let right = read_state::<S::Combine>(&states, 1usize, 2usize);
            let ends = Sides { left, right };
            let sides = sides::sides::<S::Combine>(&own, &ends, &mut shared, plan.row);
            S::store(buffers, &block.span, &mut held, &sides);
        }
    }
}

/// A lane's share of the totals from `first` up to `last`: equal shares that follow each other.
#[cube]
fn combined<C: Combine>(
    totals: &[Atomic<u32>],
    first: usize,
    last: usize,
    parts: usize,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let registers = comptime!(C::REGISTERS);
    let lanes = comptime!(plan.row.plane as usize);
    let share = (last - first + comptime!(lanes - 1)) / lanes;
    let from = first + UNIT_POS_PLANE as usize * share;
    let mut all = C::identity();
    let identity = C::identity();
    // As often in all lanes: they shuffle afterwards.
    for k in 0..share {
        let i = min(from + k, parts - 1);
        let mut next = C::identity();
        #[unroll]
        for r in 0..registers {
            next[r] = f32::reinterpret(totals[r * parts + i].load());
        }
        let next = choose::<C>(from + k < last, &next, &identity);
        let both = C::combine(&all, &next);
        assign::<C>(&mut all, &both);
    }
    all
}

/// The totals of blocks, with what stands around them.
struct Totals<C>(PhantomData<C>);

#[derive(CubeType, CubeLaunch)]
struct TotalsBuffers {
    totals: Box<[f32]>,
    before: Box<[f32]>,
    after: Box<[f32]>,
    blocks: usize,
    parts: usize,
}

#[cube]
impl<C: Acts> Around for Totals<C> {
    type Combine = C;
    type Buffers = TotalsBuffers;
    type Held = Array<f32>;
    const ITEMS: usize = 1;

    fn load(buffers: &Self::Buffers, span: &Span) -> Self::Held {
        let at = span.sequence * buffers.blocks + min(span.first, span.end - 1);
        let total = read::<C>(&buffers.totals, at, buffers.parts);
        let identity = C::identity();
        choose::<C>(span.first < span.end, &total, &identity)
    }

    fn total(held: &mut Self::Held) -> Array<f32> {
        let mut total = C::identity();
        assign::<C>(&mut total, &*held);
        total
    }

    fn store(buffers: &mut Self::Buffers, span: &Span, _held: &mut Self::Held, sides: &Sides) {
        if span.own && span.first < span.end {
            let at = span.sequence * buffers.blocks + span.first;
            write_state::<C>(&mut buffers.before, at, buffers.parts, &sides.left);
            write_state::<C>(&mut buffers.after, at, buffers.parts, &sides.right);
        }
    }
}

/// Most units of a sequence of several blocks, with planes and without.
const UNITS: [u32; 2] = [256, 128];
/// Most units of a sequence that is one block.
const WIDEST: u32 = 512;
/// Units of a cube that narrow sequences share.
const CUBE: u32 = 128;
/// Most blocks of a sequence whose totals each of them combines anew.
const BLOCKS: usize = 4096;
/// Blocks of a group of sequences, for each multiprocessor: enough that nobody waits.
const GROUP: usize = 8;

/// Scans to both sides. `like` is on the device where that happens, `address` reaches the end of the
/// buffers, and `buffers` makes the arguments of one launch.
///
/// # Safety
///
/// [`Around::load`] and [`Around::store`] stay within their buffers for every span of the request.
pub unsafe fn around<S: Around>(
    like: &CubeTensor,
    address: AddressType,
    request: AroundRequest,
    buffers: &dyn Fn() -> <S::Buffers as LaunchArg>::RuntimeArg,
) {
    let AroundRequest { op, sequences, length } = request;
    if sequences * length == 0 {
        return;
    }
    let client = &like.client;
    let plan = plan::<S>(client, length);
    let blocks = length.div_ceil(plan.tile());
    let parts = sequences * blocks;
    let registers = <S::Combine as Combine>::REGISTERS;
    let group = blocks * (launch::multiprocessors(client) * GROUP).div_ceil(blocks).min(sequences);
    let cut = || CutLaunch::new(length, blocks, parts, group);
    let of_parts = |name: &'static str, size: usize| {
        launch::output(like, op, name, Shape::new([size, parts]), DType::F32)
    };
    let cubes = |parts: usize| launch::grid(client, parts.div_ceil(plan.row.rows as usize));
    let dim = plan.row.cube_dim();
    let nothing = || launch::unused(like, DType::F32).into_buffer_arg();
    let tickets = Hardware::of(client).ptx && client.features().device_memory_scope;
    let tickets = tickets && plan.row.units >= 2 * plan.row.plane && blocks <= BLOCKS;
    launch::plans::note(
        op,
        &(&plan, address),
        &[("several blocks", blocks > 1), ("by tickets", blocks > 1 && tickets)],
    );
    if blocks == 1 {
        // SAFETY: the caller's.
        return unsafe {
            around_kernel::launch_unchecked::<S>(
                client,
                cubes(parts),
                dim,
                address,
                buffers(),
                nothing(),
                nothing(),
                cut(),
                plan,
            )
        };
    }
    let totals = of_parts("totals of blocks", registers);
    if tickets {
        let state = launch::zeros(like, Shape::new([sequences + 1]), DType::U32);
        let tasks = group + parts.div_ceil(group) * 2 * group;
        // SAFETY: the caller's; there is a total for each part and a count for each sequence; tickets past the
        // last block are dropped.
        return unsafe {
            tickets_kernel::launch_unchecked::<S>(
                client,
                launch::grid(client, tasks),
                dim,
                address,
                buffers(),
                totals.into_buffer_arg(),
                state.into_buffer_arg(),
                cut(),
                plan,
            )
        };
    }
    let [before, after] = ["what stands before blocks", "what stands behind blocks"]
        .map(|name| of_parts(name, <S::Combine as Acts>::STATE));
    let carried = Plan { carried: true, ..plan };
    // SAFETY: the caller's for the buffers; there is an item for each part.
    unsafe {
        totals_kernel::launch_unchecked::<S>(
            client,
            cubes(parts),
            dim,
            address,
            buffers(),
            totals.clone().into_buffer_arg(),
            cut(),
            plan,
        );
        let between = AroundRequest { op, sequences, length: blocks };
        around::<Totals<S::Combine>>(like, address, between, &|| {
            TotalsBuffersLaunch::new(
                totals.clone().into_buffer_arg(),
                before.clone().into_buffer_arg(),
                after.clone().into_buffer_arg(),
                blocks,
                parts,
            )
        });
        around_kernel::launch_unchecked::<S>(
            client,
            cubes(parts),
            dim,
            address,
            buffers(),
            before.into_buffer_arg(),
            after.into_buffer_arg(),
            cut(),
            carried,
        );
    }
}

fn plan<S: Around>(client: &Client, length: usize) -> Plan {
    let hardware = &client.properties().hardware;
    let plane = launch::plane_size(client);
    let registers = <S::Combine as Combine>::REGISTERS;
    let fits = |row: RowUnits| {
        registers * units::shared(&row) * size_of::<f32>() <= hardware.max_shared_memory_size
    };
    let wanted = length.div_ceil(S::ITEMS).next_power_of_two();
    let most = match plane {
        1 => UNITS[1],
        _ if wanted <= WIDEST as usize => WIDEST,
        _ => UNITS[0],
    };
    let mut units = wanted.min(most.min(hardware.max_units_per_cube) as usize) as u32;
    while units > 1 && !fits(RowUnits { units, rows: 1, plane }) {
        units /= 2;
    }
    let mut rows = (CUBE.min(hardware.max_units_per_cube) / units).max(1);
    while rows > 1 && !fits(RowUnits { units, rows, plane }) {
        rows /= 2;
    }
    Plan { row: RowUnits { units, rows, plane }, items: S::ITEMS, carried: false }
}

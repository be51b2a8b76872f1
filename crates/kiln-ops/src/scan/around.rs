//! Scans from both sides at once: what stands before a unit's items, and what stands behind them.
//!
//! A unit takes the few neighbouring items of an [`Around`], combines them, and the units of a cube scan
//! their totals to both sides. A sequence of several blocks takes three launches: the totals of the blocks,
//! what stands around each of them, and the blocks with that; its items are read twice. (In one launch,
//! with tickets and flags, so that the second reading finds the items in the cache, it was slower on an H200.)
//!
//! The order of the combinations follows from the lengths and the device alone.

use super::row_units;
use super::runs;
use super::sides::{self, Acts, Sides};
use crate::device::Hardware;
use crate::launch;
use crate::reduce::{Combine, RowUnits, assign, choose};
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
    /// Lanes of a plane whose units follow each other, and have [`SHARED`](Around::SHARED) memory; else 0.
    #[cube(comptime)]
    pub lanes: u32,
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
    /// f32 of shared memory for a unit, a multiple of 4, where the units of a plane follow each other.
    const SHARED: usize;

    /// Loads items; those past the end are identities. The memory is the cube's.
    fn load(buffers: &Self::Buffers, span: &Span, memory: &mut [f32]) -> Self::Held;

    /// What the items combine to.
    fn total(buffers: &Self::Buffers, span: &Span, held: &mut Self::Held) -> Array<f32>;

    /// Takes the states before the first item and behind the last.
    fn store(
        buffers: &mut Self::Buffers,
        span: &Span,
        held: &mut Self::Held,
        sides: &Sides,
        memory: &mut [f32],
    );
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
    /// f32 of shared memory for a unit.
    shared: usize,
    /// Numbers of an item between launches are read and written in vectors, which WGSL cannot.
    vectors: bool,
}

impl Plan {
    fn tile(&self) -> usize {
        self.row.units as usize * self.items
    }

    /// f32 of shared memory of a cube's units.
    fn memory(&self) -> usize {
        (self.shared * (self.row.units * self.row.rows) as usize).max(4)
    }

    fn lanes(&self) -> u32 {
        if self.shared > 0 { self.row.plane } else { 0 }
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
}

/// A block of a sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Block {
    /// Its number among those of all sequences.
    part: usize,
    span: Span,
}

#[cube]
fn block(cut: &Cut, #[comptime] plan: Plan) -> Block {
    let at = CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    let mut part = min(at, cut.parts - 1);
    if comptime!(plan.carried) {
        // From the last to the first: what the totals were made of last is in the cache still.
        part = cut.parts - 1 - part;
    }
    let sequence = part / cut.blocks;
    let start = (part - sequence * cut.blocks) * comptime!(plan.tile());
    let span = Span {
        sequence,
        first: start + UNIT_POS_X as usize * plan.items,
        end: cut.length,
        own: at < cut.parts,
        lanes: comptime!(plan.lanes()),
    };
    Block { part, span }
}

/// The combinations of each block, in as many shares as [`sides::totals`] says.
#[cube(launch_unchecked, address_type = "dynamic")]
fn totals_kernel<S: Around>(
    buffers: &S::Buffers,
    totals: &mut [f32],
    cut: &Cut,
    #[comptime] plan: Plan,
) {
    let mut shared =
        Shared::<[f32]>::new_slice(comptime!(sides::shared_of_total::<S::Combine>(&plan.row)));
    let mut memory = Shared::<[f32]>::new_aligned_slice(comptime!(plan.memory()), 16usize);
    let block = block(cut, plan);
    let mut held = S::load(buffers, &block.span, &mut memory);
    let own = S::total(buffers, &block.span, &mut held);
    let total = sides::total::<S::Combine>(&own, &mut shared, plan.row);
    let shares = comptime!(sides::totals(&plan.row));
    let units = comptime!(plan.row.units / shares);
    let unit = UNIT_POS_X % units;
    if unit == 0 && block.span.own {
        let at = block.part * comptime!(shares as usize) + (UNIT_POS_X / units) as usize;
        put(totals, at, &total, comptime!(<S::Combine as Combine>::REGISTERS), plan.vectors);
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
    let mut shared = Shared::<[f32]>::new_slice(comptime!(sides::shared::<S::Combine>(&plan.row)));
    let mut memory = Shared::<[f32]>::new_aligned_slice(comptime!(plan.memory()), 16usize);
    let block = block(cut, plan);
    let mut held = S::load(&*buffers, &block.span, &mut memory);
    let total = S::total(&*buffers, &block.span, &mut held);
    let mut ends = Sides { left: S::Combine::start(), right: S::Combine::end() };
    if comptime!(plan.carried) {
        let size = comptime!(<S::Combine as Acts>::STATE);
        ends.left = taken(before, block.part, size, plan.vectors);
        ends.right = taken(after, block.part, size, plan.vectors);
    }
    let sides = sides::sides::<S::Combine>(&total, &ends, &mut shared, plan.row);
    S::store(buffers, &block.span, &mut held, &sides, &mut memory);
}

/// Item `at` of memory, whose numbers follow each other.
#[cube]
fn taken(
    memory: &[f32],
    at: usize,
    #[comptime] size: usize,
    #[comptime] vectors: bool,
) -> Array<f32> {
    runs::run(memory, at * size, size, vectors)
}

/// Writes one, as [`taken`] reads it.
#[cube]
fn put(
    memory: &mut [f32],
    at: usize,
    item: &Array<f32>,
    #[comptime] size: usize,
    #[comptime] vectors: bool,
) {
    runs::write_run(memory, at * size, item, 0usize, size, vectors);
}

/// The totals of blocks, with what stands around them.
struct Totals<C>(PhantomData<C>);

#[derive(CubeType, CubeLaunch)]
struct TotalsBuffers {
    totals: Box<[f32]>,
    before: Box<[f32]>,
    after: Box<[f32]>,
    blocks: usize,
    /// Totals of a block.
    #[cube(comptime)]
    shares: usize,
    #[cube(comptime)]
    vectors: bool,
}

#[cube]
impl<C: Acts> Around for Totals<C> {
    type Combine = C;
    type Buffers = TotalsBuffers;
    type Held = Array<f32>;
    const ITEMS: usize = 1;
    const SHARED: usize = 0;

    fn load(buffers: &Self::Buffers, span: &Span, _memory: &mut [f32]) -> Self::Held {
        let shares = comptime!(buffers.shares);
        let vectors = comptime!(buffers.vectors);
        let at = (span.sequence * buffers.blocks + min(span.first, span.end - 1)) * shares;
        let mut total = taken(&buffers.totals, at, comptime!(C::REGISTERS), vectors);
        #[unroll]
        for i in 1..shares {
            let next = taken(&buffers.totals, at + i, comptime!(C::REGISTERS), vectors);
            let both = C::combine(&total, &next);
            assign::<C>(&mut total, &both);
        }
        let identity = C::identity();
        choose::<C>(span.first < span.end, &total, &identity)
    }

    fn total(_buffers: &Self::Buffers, _span: &Span, held: &mut Self::Held) -> Array<f32> {
        let mut total = C::identity();
        assign::<C>(&mut total, &*held);
        total
    }

    fn store(
        buffers: &mut Self::Buffers,
        span: &Span,
        _held: &mut Self::Held,
        sides: &Sides,
        _memory: &mut [f32],
    ) {
        if span.own && span.first < span.end {
            let at = span.sequence * buffers.blocks + span.first;
            let vectors = comptime!(buffers.vectors);
            put(&mut buffers.before, at, &sides.left, comptime!(C::STATE), vectors);
            put(&mut buffers.after, at, &sides.right, comptime!(C::STATE), vectors);
        }
    }
}

/// Most units of a sequence that is one block.
const WIDEST: u32 = 512;
/// Units of a block where blocks of a plane would be more than [`WIDEST`], or the device has no planes: on an H200 128 are
/// faster than 64 and 256, and a plane of 32, which waits for nobody, than 128.
const UNITS: u32 = 128;

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
    let planned = launch::limits::reckoned(request.length);
    // SAFETY: the caller's.
    unsafe { around_as::<S>(like, address, request, request.op, planned, buffers) };
}

/// [`around`] by this name, planned for so many elements.
///
/// # Safety
///
/// As there.
unsafe fn around_as<S: Around>(
    like: &CubeTensor,
    address: AddressType,
    request: AroundRequest,
    name: &str,
    planned: usize,
    buffers: &dyn Fn() -> <S::Buffers as LaunchArg>::RuntimeArg,
) {
    let AroundRequest { op, sequences, length } = request;
    if sequences * length == 0 {
        return;
    }
    let client = &like.client;
    let plan = plan::<S>(client, planned);
    let blocks = length.div_ceil(plan.tile());
    let parts = sequences * blocks;
    let registers = <S::Combine as Combine>::REGISTERS;
    let cut = || CutLaunch::new(length, blocks, parts);
    let of_parts = |name: &'static str, size: usize| {
        launch::output(like, op, name, Shape::new([parts, size]), DType::F32)
    };
    let cubes = |parts: usize| launch::grid(client, parts.div_ceil(plan.row.rows as usize));
    let dim = plan.row.cube_dim();
    let nothing = || launch::unused(like, DType::F32).into_buffer_arg();
    launch::plans::note(name, &(&plan, address), &[("several blocks", blocks > 1)]);
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
    let shares = sides::totals(&plan.row) as usize;
    let totals = of_parts("totals of blocks", registers * shares);
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
        let planned = planned.div_ceil(plan.tile());
        let name = format!("{name} between blocks");
        around_as::<Totals<S::Combine>>(like, address, between, &name, planned, &|| {
            TotalsBuffersLaunch::new(
                totals.clone().into_buffer_arg(),
                before.clone().into_buffer_arg(),
                after.clone().into_buffer_arg(),
                blocks,
                shares,
                plan.vectors,
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

/// Lanes of a plane whose units follow each other in one sequence, as [`Span::lanes`] has it.
pub(crate) fn lanes<S: Around>(client: &Client, length: usize) -> u32 {
    plan::<S>(client, launch::limits::reckoned(length)).lanes()
}

fn plan<S: Around>(client: &Client, length: usize) -> Plan {
    let plane = launch::plane_size(client);
    let ptx = Hardware::of(client).ptx;
    let plan = |row: RowUnits| {
        let exchanges = ptx && row.units >= plane;
        let shared = if exchanges { S::SHARED } else { 0 };
        Plan { row, items: S::ITEMS, carried: false, shared, vectors: ptx }
    };
    let wanted = length.div_ceil(S::ITEMS);
    let most = match (plane > 1).then(|| wanted.div_ceil(WIDEST as usize)) {
        Some(..=1) => WIDEST,
        // What stands around blocks is one launch then.
        Some(units) if units <= plane as usize => plane,
        _ => UNITS,
    };
    let row = row_units(client, wanted, most, |row| {
        sides::shared::<S::Combine>(row) + plan(*row).memory()
    });
    plan(row)
}

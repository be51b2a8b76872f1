//! Scans: the combinations of all beginnings of a sequence, or of all its ends.
//!
//! A unit takes a few neighbouring elements, the units of a cube scan their totals, and a cube walks
//! over its block tile by tile. A sequence of several blocks takes three launches: the totals of the
//! blocks, the scan of the totals, and the scan of each block behind what stands before it
//! (reduce-then-scan: Dotsenko et al., ICS 2008; Merrill and Grimshaw, 2009), and its elements are read
//! twice. On CUDA, where what a cube writes is visible to another in the same launch, blocks are single
//! tiles that wait for the totals of those before them, and elements are read once (after the look-back
//! of Merrill and Garland, 2016, but for totals alone: theirs takes prefixes from wherever they are
//! first, and f32 would round differently from run to run).
//!
//! The order of the combinations follows from the lengths and the device alone: two runs agree bit for
//! bit. Elsewhere nothing is needed of the device beyond barriers; planes are used where there are any.

// `#[cube]` makes public items without documentation of what is public here.
#![allow(missing_docs)]

mod around;
mod kernel;
pub(crate) mod runs;
mod sides;
mod units;

pub(crate) use around::lanes;
pub use around::{Around, AroundRequest, Span, around};
pub use sides::{Acts, Sides};
pub use units::{Prefix, rows, shared};

use crate::device::Hardware;
use crate::launch;
use crate::reduce::{Combine, RowUnits, read, write};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{CutLaunch, look_back_kernel, scan_kernel, totals_kernel};
use std::marker::PhantomData;

/// What is scanned: how elements become items, and prefixes results. An operator does its own
/// elementwise work in both, so that nothing is stored that it does not need.
#[cube]
pub trait Scan: Send + Sync + 'static {
    /// What combines.
    type Combine: Combine;
    /// What is read and written: a `#[derive(CubeType, CubeLaunch)]` struct, with buffers as
    /// `Box<[f32]>`.
    type Buffers: LaunchArg;

    /// The item at `i` of a sequence. Called more than once for an element, and past the end of a block,
    /// where the item is dropped: a result may take the place of an element.
    fn load(buffers: &Self::Buffers, sequence: usize, i: usize) -> Array<f32>;

    /// Takes the combination up to `i`. Called once for each element, by the unit that loaded it.
    fn store(buffers: &mut Self::Buffers, sequence: usize, i: usize, prefix: &Array<f32>);
}

/// Which scan, of what.
#[derive(Clone, Copy, Debug)]
pub struct ScanRequest {
    /// The operator, for the audit.
    pub op: &'static str,
    /// Number of sequences.
    pub sequences: usize,
    /// Elements of each.
    pub length: usize,
    /// From the last element to the first: `earlier` in [`Combine::combine`] is then what stands behind.
    pub reverse: bool,
    /// Element i gets what comes before it, without its own item.
    pub exclusive: bool,
    /// Blocks of a sequence, at most, in three launches; by default as suits the device.
    pub blocks: Option<usize>,
}

/// f32 of items that a unit holds.
const HELD: usize = 32;
/// Most items of a unit.
const ITEMS: usize = 8;
/// Most units of a sequence, with planes: every unit walks over the totals of all planes.
const UNITS: u32 = 256;
/// Without planes every level of the scan over units is a barrier.
const UNITS_WITHOUT_PLANES: u32 = 128;
/// Units of a cube that narrow sequences share.
const CUBE: u32 = 128;
/// Cubes a multiprocessor that blocks are made for; fewer than `FEWEST` blocks of a sequence are not
/// worth two more launches. None of these was swept.
const CUBES: usize = 4;
const FEWEST: usize = 4;
/// Most blocks of a sequence that wait for each other: their loads grow with the square.
const WAITING: usize = 4096;

/// `wanted` units for a sequence, rounded up to a power of two and at most `most`, and rows of them for a cube; fewer if
/// `floats`, the f32 of shared memory that they take, do not fit.
fn row_units(
    client: &Client,
    wanted: usize,
    most: u32,
    floats: impl Fn(&RowUnits) -> usize,
) -> RowUnits {
    let hardware = &client.properties().hardware;
    let fits = |row: &RowUnits| floats(row) * size_of::<f32>() <= hardware.max_shared_memory_size;
    let most = most.min(hardware.max_units_per_cube);
    let units = wanted.next_power_of_two().min(most as usize) as u32;
    let mut row = RowUnits::new(client, units, 1);
    while row.units > 1 && !fits(&row) {
        row.units /= 2;
    }
    row.rows = (CUBE.min(hardware.max_units_per_cube) / row.units).max(1);
    while row.rows > 1 && !fits(&row) {
        row.rows /= 2;
    }
    row
}

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    row: RowUnits,
    /// Items of a unit in a tile.
    items: usize,
    reverse: bool,
    exclusive: bool,
    /// Blocks have something before them.
    carried: bool,
}

impl Plan {
    fn new<C: Combine>(client: &Client, request: &ScanRequest) -> Self {
        let items = (HELD / C::REGISTERS).clamp(1, ITEMS);
        let most = if launch::plane_size(client) > 1 { UNITS } else { UNITS_WITHOUT_PLANES };
        let wanted = request.length.div_ceil(items);
        let row = row_units(client, wanted, most, |row| 2 * C::REGISTERS * shared(row));
        let ScanRequest { reverse, exclusive, .. } = *request;
        Self { row, items, reverse, exclusive, carried: false }
    }

    /// Elements that a sequence's units take at once.
    fn tile(&self) -> usize {
        self.row.units as usize * self.items
    }

    /// Tiles of a block.
    fn tiles(&self, client: &Client, request: &ScanRequest) -> usize {
        let tiles = request.length.div_ceil(self.tile());
        let blocks = request.blocks.unwrap_or_else(|| {
            let blocks = launch::multiprocessors(client) * CUBES / request.sequences;
            if blocks < FEWEST { 1 } else { blocks }
        });
        tiles.div_ceil(blocks.max(1))
    }
}

/// The totals of blocks, scanned in between.
struct Totals<C>(PhantomData<C>);

#[derive(CubeType, CubeLaunch)]
struct TotalsBuffers {
    totals: Box<[f32]>,
    carries: Box<[f32]>,
    blocks: usize,
    parts: usize,
}

#[cube]
impl<C: Combine> Scan for Totals<C> {
    type Combine = C;
    type Buffers = TotalsBuffers;

    fn load(buffers: &Self::Buffers, sequence: usize, i: usize) -> Array<f32> {
        read::<C>(&buffers.totals, sequence * buffers.blocks + i, buffers.parts)
    }

    fn store(buffers: &mut Self::Buffers, sequence: usize, i: usize, prefix: &Array<f32>) {
        let at = sequence * buffers.blocks + i;
        write::<C>(&mut buffers.carries, at, buffers.parts, prefix);
    }
}

/// Scans. `like` is on the device where that happens, `address` reaches the end of the buffers, and
/// `buffers` makes the arguments of one launch.
///
/// # Safety
///
/// [`Scan::load`] and [`Scan::store`] stay within their buffers for every sequence and element of the
/// request.
pub unsafe fn scan<S: Scan>(
    like: &CubeTensor,
    address: AddressType,
    request: ScanRequest,
    buffers: impl Fn() -> <S::Buffers as LaunchArg>::RuntimeArg,
) {
    let ScanRequest { op, sequences, length, .. } = request;
    if sequences * length == 0 {
        return;
    }
    let client = &like.client;
    let pass = Pass::new::<S::Combine>(client, &request, address);
    if pass.blocks == 1 {
        let nothing = launch::unused(like, DType::F32);
        // SAFETY: the caller's.
        return unsafe { pass.scan::<S>(client, buffers(), nothing) };
    }
    if let Some(pass) = pass.waiting(client, &request) {
        let shape = Shape::new([S::Combine::REGISTERS, pass.parts()]);
        let totals = launch::output(like, op, "totals of blocks", shape, DType::F32);
        let state = launch::zeros(like, Shape::new([pass.parts() + 1]), DType::U32);
        // SAFETY: the caller's for the buffers; there is a total and a flag for each part.
        return unsafe { pass.look_back::<S>(client, buffers(), totals, state) };
    }
    let pass = Pass { plan: Plan { carried: true, ..pass.plan }, ..pass };
    let (blocks, parts) = (pass.blocks, pass.parts());
    let items = |name: &'static str| {
        let shape = Shape::new([S::Combine::REGISTERS, parts]);
        launch::output(like, op, name, shape, DType::F32)
    };
    let (totals, carries) = (items("totals of blocks"), items("what stands before blocks"));
    let between =
        ScanRequest { length: blocks, reverse: false, exclusive: true, blocks: Some(1), ..request };
    let of_totals = TotalsBuffersLaunch::new(
        totals.clone().into_buffer_arg(),
        carries.clone().into_buffer_arg(),
        blocks,
        parts,
    );
    // SAFETY: the caller's for the buffers; there are as many totals and carries as parts, which is
    // sequences × blocks.
    unsafe {
        pass.totals::<S>(client, buffers(), totals);
        let nothing = launch::unused(like, DType::F32);
        Pass::new::<S::Combine>(client, &between, address)
            .scan::<Totals<S::Combine>>(client, of_totals, nothing);
        pass.scan::<S>(client, buffers(), carries);
    }
}

/// A pass over the sequences: one launch.
#[derive(Clone, Copy)]
struct Pass {
    plan: Plan,
    address: AddressType,
    sequences: usize,
    length: usize,
    /// Blocks of a sequence.
    blocks: usize,
    /// Tiles of a block.
    tiles: usize,
}

impl Pass {
    fn new<C: Combine>(client: &Client, request: &ScanRequest, address: AddressType) -> Self {
        let plan = Plan::new::<C>(client, request);
        let ScanRequest { sequences, length, .. } = *request;
        let tiles = plan.tiles(client, request);
        let blocks = length.div_ceil(plan.tile()).div_ceil(tiles);
        Self { plan, address, sequences, length, blocks, tiles }
    }

    /// This pass with blocks of one tile, if they are to wait for each other.
    fn waiting(&self, client: &Client, request: &ScanRequest) -> Option<Self> {
        let visible = Hardware::of(client).ptx && client.features().device_memory_scope;
        let blocks = self.length.div_ceil(self.plan.tile());
        let wanted = request.blocks.is_none() && self.plan.row.rows == 1 && blocks <= WAITING;
        (visible && wanted).then_some(Self { blocks, tiles: 1, ..*self })
    }

    /// Blocks of all sequences.
    fn parts(&self) -> usize {
        self.sequences * self.blocks
    }

    fn cubes(&self, client: &Client) -> CubeCount {
        launch::grid(client, self.parts().div_ceil(self.plan.row.rows as usize))
    }

    fn cut(&self) -> CutLaunch {
        CutLaunch::new(self.length, self.blocks, self.parts(), self.tiles)
    }

    /// # Safety
    ///
    /// As [`scan`]; `totals` holds an item for each part.
    unsafe fn totals<S: Scan>(
        &self,
        client: &Client,
        buffers: <S::Buffers as LaunchArg>::RuntimeArg,
        totals: CubeTensor,
    ) {
        // SAFETY: the caller's; parts are checked against their number.
        unsafe {
            totals_kernel::launch_unchecked::<S>(
                client,
                self.cubes(client),
                self.plan.row.cube_dim(),
                self.address,
                buffers,
                totals.into_buffer_arg(),
                self.cut(),
                self.plan,
            );
        }
    }

    /// # Safety
    ///
    /// As [`scan`]; if the plan is to carry, `carries` holds an item for each part.
    unsafe fn scan<S: Scan>(
        &self,
        client: &Client,
        buffers: <S::Buffers as LaunchArg>::RuntimeArg,
        carries: CubeTensor,
    ) {
        // SAFETY: the caller's; elements are checked against the length.
        unsafe {
            scan_kernel::launch_unchecked::<S>(
                client,
                self.cubes(client),
                self.plan.row.cube_dim(),
                self.address,
                buffers,
                carries.into_buffer_arg(),
                self.cut(),
                self.plan,
            );
        }
    }

    /// # Safety
    ///
    /// As [`scan`]; `totals` holds an item for each part, and `state` a zero more than parts.
    unsafe fn look_back<S: Scan>(
        &self,
        client: &Client,
        buffers: <S::Buffers as LaunchArg>::RuntimeArg,
        totals: CubeTensor,
        state: CubeTensor,
    ) {
        // SAFETY: the caller's; a block waits for blocks that a lower ticket has begun.
        unsafe {
            look_back_kernel::launch_unchecked::<S>(
                client,
                self.cubes(client),
                self.plan.row.cube_dim(),
                self.address,
                buffers,
                totals.into_buffer_arg(),
                state.into_buffer_arg(),
                self.cut(),
                self.plan,
            );
        }
    }
}

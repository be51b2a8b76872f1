//! Rows on their way through shared memory: asked for by cp.async long before they are needed, they take no registers
//! meanwhile, and those of one stage are under way while another is worked on. A unit reads what it has asked for itself, so
//! nobody waits for others.

use super::backward::{Columns, Wanted, columns};
use super::{Garden, Place, Plan, Sizes};
use crate::device::Hardware;
use crate::tile::cuda::ptx::{copy_16, copy_commit, copy_wait, global_address, unknown};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Stages of the ring, and rows of a unit in one.
const STAGES: usize = 4;
const ROWS: usize = 2;
const _: () = assert!(ROWS == 2, "behind whole stages one row is left at most");
/// What a copy has.
const BYTES: usize = 16;

/// Whether a backward goes down its parts of `share` rows so, a vector of so many bytes at a time: where a unit has more rows
/// than the ring.
pub(super) fn takes(
    client: &Client,
    plan: Plan,
    wanted: Wanted,
    share: usize,
    bytes: usize,
) -> bool {
    let units = (plan.columns * plan.below) as usize;
    let ring = STAGES * ROWS * units * BYTES;
    // For sums a second ring, and what is added up at the end.
    let shared = if wanted.sums { 2 * ring + super::SHARED } else { ring };
    let long = wraps(plan, share);
    let fits = shared <= client.properties().hardware.max_shared_memory_size;
    long && bytes == BYTES && fits && Hardware::of(client).async_copies
}

/// Whether a unit has more rows than the ring.
pub(super) fn wraps(plan: Plan, share: usize) -> bool {
    share > STAGES * ROWS * plan.below as usize
}

/// Where a unit asks for rows, and finds them.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Ring {
    /// The vector of the tensor's first row.
    from: u64,
    stride: usize,
    /// Its place in the first row of the first stage.
    to: u32,
    /// Its first row, and the last of the part.
    first: usize,
    last: usize,
}

#[cube]
impl Ring {
    /// Asks for the rows of a stage. Those past the end of the part are the last once more.
    fn ask(&self, stage: usize, #[comptime] plan: Plan) {
        let (step, pitch) =
            comptime!((plan.below as usize, plan.columns * plan.below * BYTES as u32));
        let first = self.first + stage * comptime!(ROWS * step);
        let to = self.to + (stage % comptime!(STAGES)) as u32 * comptime!(ROWS as u32 * pitch);
        #[unroll]
        for r in 0..ROWS {
            let row = min(first + comptime!(r * step), self.last);
            let from = self.from + u64::cast_from(row * self.stride) * comptime!(BYTES as u64);
            copy_16(to + comptime!(r as u32 * pitch), from, comptime!(BYTES as u32).runtime());
        }
    }
}

/// Writes the columns of dx, and adds up dy and x·dy.
#[cube]
pub(super) fn down<E: Float, W: Float, I: Int, N: Size>(
    x: &[Vector<E, N>],
    dy: &[Vector<E, N>],
    garden: &Garden<W, I>,
    dx: &mut [Vector<E, N>],
    sums: &mut Array<Vector<f32, N>>,
    sizes: &Sizes,
    place: &Place,
    #[comptime] plan: Plan,
    #[comptime] wanted: Wanted,
) {
    let (step, units) = comptime!((plan.below as usize, (plan.columns * plan.below) as usize));
    let ring = comptime!(STAGES * ROWS * units);
    let rings = comptime!(if wanted.sums { 2 } else { 1 });
    let shared = Shared::<[Vector<E, N>]>::new_aligned_slice(comptime!(rings * ring), 128usize);
    // What the compiler knows it makes again in every stage.
    let own = unknown(UNIT_POS);
    let to =
        unknown(generic_to_shared::<Vector<E, N>>(shared.as_ptr())) + own * comptime!(BYTES as u32);
    let first = place.part * sizes.share + unknown(UNIT_POS_Y) as usize;
    let last = place.last;
    let column = u64::cast_from(place.at) * comptime!(BYTES as u64);
    let from = global_address::<Vector<E, N>>(dy.as_ptr()) + column;
    let of_dy = Ring { from, stride: sizes.dy, to, first, last };
    let from = global_address::<Vector<E, N>>(x.as_ptr()) + column;
    let of_x =
        Ring { from, stride: sizes.x, to: to + comptime!((ring * BYTES) as u32), first, last };
    // Under way while the seeds are looked up.
    #[unroll]
    for stage in 0..comptime!(STAGES - 1) {
        of_dy.ask(stage, plan);
        if comptime!(wanted.sums) {
            of_x.ask(stage, plan);
        }
        copy_commit();
    }
    let of = columns::<W, I, N>(garden, place, wanted);
    let reads = of.reads_dy && place.own;
    let whole = place.count / comptime!(ROWS);
    if reads {
        for stage in 0..whole {
            // Where the stage before was, which has been read.
            of_dy.ask(stage + comptime!(STAGES - 1), plan);
            if comptime!(wanted.sums) && of.reads_x {
                of_x.ask(stage + comptime!(STAGES - 1), plan);
            }
            copy_commit();
            copy_wait(comptime!(STAGES as u32 - 1));
            let held = stage % comptime!(STAGES) * comptime!(ROWS * units) + own as usize;
            #[unroll]
            for r in 0..ROWS {
                let row = first + (stage * comptime!(ROWS) + r) * step;
                let to = row * sizes.vectors + place.at;
                let held = held + comptime!(r * units);
                take(&shared, held, ring, dx, to, sums, &of, wanted);
            }
        }
    }
    // No unit leaves with copies under way.
    copy_wait(0u32);
    if reads && whole * comptime!(ROWS) < place.count {
        let held = whole % comptime!(STAGES) * comptime!(ROWS * units) + own as usize;
        let row = first + whole * comptime!(ROWS * step);
        take(&shared, held, ring, dx, row * sizes.vectors + place.at, sums, &of, wanted);
    }
}

/// Of a row that is there.
#[cube]
fn take<E: Float, N: Size>(
    shared: &Shared<[Vector<E, N>]>,
    held: usize,
    #[comptime] ring: usize,
    dx: &mut [Vector<E, N>],
    to: usize,
    sums: &mut Array<Vector<f32, N>>,
    of: &Columns<N>,
    #[comptime] wanted: Wanted,
) {
    let d = Vector::<f32, N>::cast_from(shared[held]);
    if comptime!(wanted.x) {
        dx[to] = Vector::cast_from(d * of.by);
    }
    if comptime!(wanted.sums) {
        sums[0] += d;
        if of.reads_x {
            sums[1] += Vector::<f32, N>::cast_from(shared[held + ring]) * d;
        }
    }
}

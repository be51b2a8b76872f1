//! Decoding: up to 64 query heads that read the same keys are the rows of a tile, and the keys are divided.
//!
//! The warp that loads has as many keys and values on their way as shared memory holds, so that memory is what there
//! is to wait for. One warpgroup multiplies 64 rows, whether there are as many heads or fewer, and leaves the weighted
//! sums of its part in f32, not yet divided, with the shift and the sum of the weights of each row. Where all cubes are
//! there at a time they [meet] and add these up.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::block::{Reading, Rings, Warpgroup};
use super::consumer::{attend, warpgroup};
use super::forward::{Maps, produce, rings};
use super::meet::{self, Left};
use super::places::{NONE, Places, PlacesLaunch, QueryTile, blocks, query_tile};
use super::plan::{Forward, ForwardTile, Limited, PART_ROWS};
use super::softmax::{RowPair, begin};
use super::{maps, places, takes};
use crate::attention::problem::{HeadsView, Problem, Sizes};
use crate::attention::simt::{block::Heads, heads};
use crate::device::Hardware;
use crate::launch;
use crate::tile::cuda::fragment::{offset, origin, row_sum};
use crate::tile::cuda::pipeline::{PipelineState, rings_ready};
use crate::tile::cuda::ptx::*;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

/// What the kernel is specialised on, for a problem that it takes: one query of a head, which sees all keys.
pub(crate) fn plan(problem: &Problem) -> Option<Forward> {
    let (p, sizes) = (problem, &problem.sizes);
    let whole = sizes.queries == 1 && p.mask.window.is_none() && !p.mask.documents;
    (whole && sizes.together() <= PART_ROWS as usize && p.q.first == 0 && takes(p)).then(|| {
        Forward {
            float: Float16::of(p.q.tensor.dtype),
            width: sizes.width,
            tile: ForwardTile::of_parts(sizes.width),
            limited: Limited::PARTS,
            softcap: p.softcap.is_some(),
            lse: false,
        }
    })
}

/// How keys are divided.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) count: usize,
    /// Keys of each, a multiple of those of a block.
    pub(crate) length: usize,
    /// Cubes that are there at a time.
    pub(crate) slots: usize,
}

/// Whether the cubes of so many parts can [meet] and write o, of which `slots` are there at a time.
pub(crate) fn can_meet(problem: &Problem, parts: usize, slots: usize) -> bool {
    let s = &problem.sizes;
    let multiprocessors = Hardware::of(&problem.q.tensor.client).multiprocessors;
    let batches = launch::limits::reckoned(s.batches).max(s.batches);
    batches * s.kv_heads * parts <= slots && multiprocessors.is_some_and(|all| slots <= all)
}

/// Writes o, by the [`plan`] and of parts that [can meet](can_meet).
pub(crate) fn attend_meeting(
    problem: &Problem,
    o: &HeadsView,
    forward: Forward,
    parts: Parts,
    address: AddressType,
) {
    let s = &problem.sizes;
    assert!(o.fits(s.width, 2), "elements are written in pairs");
    let client = &o.tensor.client;
    let words = parts.slots * meet::part_bytes(&forward) / 4;
    let sums = launch::kept::vacant(client, "attention of parts", words);
    let statistics = launch::unused(&o.tensor, DType::F32).into_buffer_arg();
    run(problem, Some(o), [sums, statistics], forward, parts, address);
}

/// Writes, by the [`plan`], the sums of every part `[parts, B, H, T, D]`, and of each line its shift and the sum of its
/// weights `[parts, B, H, T, 2]`, both f32.
pub(crate) fn attend_parts(
    problem: &Problem,
    left: [&CubeTensor; 2],
    forward: Forward,
    parts: Parts,
    address: AddressType,
) {
    let left = left.map(|tensor| tensor.clone().into_buffer_arg());
    run(problem, None, left, forward, parts, address);
}

fn run(
    problem: &Problem,
    o: Option<&HeadsView>,
    [sums, statistics]: [BufferArg; 2],
    forward: Forward,
    parts: Parts,
    address: AddressType,
) {
    let (p, s) = (problem, &problem.sizes);
    let client = &p.q.tensor.client;
    let group = s.heads / s.kv_heads;
    let Parts { count: parts, length, slots } = parts;
    debug_assert!(plan(p) == Some(forward) && length.is_multiple_of(forward.tile.keys));
    debug_assert!(parts * length >= s.keys && (parts - 1) * length < s.keys);
    // The heads that read the same keys as the queries of one.
    let sizes = Sizes { heads: s.kv_heads, queries: group, ..*s };
    let q = HeadsView {
        head_stride: group * p.q.head_stride,
        row_stride: p.q.head_stride,
        ..p.q.clone()
    };
    let total = parts * s.kv_heads * s.batches;
    let unused = launch::unused(&p.q.tensor, DType::U32);
    let meets = o.is_some();
    // Who waits for a cube that is not there waits for ever.
    assert!(!meets || total <= slots, "{total} cubes, expected {slots} at most");
    let nowhere = || HeadsView {
        tensor: launch::unused(&p.q.tensor, p.q.tensor.dtype),
        first: 0,
        batch_stride: 0,
        head_stride: 0,
        row_stride: 0,
    };
    let keys = [s.kv_heads, s.keys];
    let (scale, cap) = places::factors(p);
    let all_heads = (s.batches * s.kv_heads) as u32;
    // SAFETY: TMA keeps to the shapes of its maps; there are sums and statistics for all parts, or for as many as there are
    // slots, of which each begins before the last key; rows are checked against the group, which is not larger than a
    // tile, and o has pairs.
    unsafe {
        attention_parts_kernel::launch_unchecked(
            client,
            launch::grid(client, total.min(slots)),
            CubeDim::new_1d(forward.units()),
            address,
            maps::map(&q, &sizes, [s.kv_heads, group], forward.rows()),
            maps::map(&p.k, s, keys, forward.keys()),
            maps::map(&p.v, s, keys, forward.keys()),
            sums,
            statistics,
            unused.into_buffer_arg(),
            heads(&o.cloned().unwrap_or_else(nowhere), 2),
            launch::kept::counters(client, "attention", 2),
            PlacesLaunch::new(
                total as u32,
                parts as u32,
                all_heads,
                all_heads,
                s.kv_heads as u32,
                1,
                parts as u32 * PART_ROWS,
                s.keys as u32,
                0,
                length as u32,
                0,
                p.k.first as u32,
                p.v.first as u32,
                0,
                scale,
                cap,
            ),
            group as u32,
            meets,
            forward,
            dtype_to_elem_type(p.q.tensor.dtype),
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn attention_parts_kernel<E: Float>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    sums: &mut [f32],
    statistics: &mut [f32],
    documents: &[u32],
    o: &mut Heads<E, Const<2>>,
    tickets: &mut [Atomic<u32>],
    places: Places,
    group: u32,
    #[comptime] meets: bool,
    #[comptime] forward: Forward,
    #[define(E)] _dtype: ElemType,
) {
    let words = comptime!(forward.bytes() / 4);
    let mut shared = Shared::<[u32]>::new_aligned_slice(words, 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let rings = rings(base, forward);
    rings_ready();
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp >= 4u32 {
        let lane = UNIT_POS % 32;
        if warp == 4u32 && lane == 0 {
            let maps = Maps {
                q: tensor_map_address(q),
                k: tensor_map_address(k),
                v: tensor_map_address(v),
            };
            produce(&mut shared, base, &maps, &rings, documents, tickets, &places, forward);
        }
    } else {
        let left = Left {
            sums: global_address::<f32>(sums.as_ptr()),
            statistics: global_address::<f32>(statistics.as_ptr()),
            rows: group,
        };
        consume::<E>(&shared, base, &rings, &left, o, documents, &places, meets, forward);
    }
}

/// Makes all tiles of this cube; for the units of the warpgroup.
#[cube]
fn consume<E: Float>(
    shared: &Shared<[u32]>,
    base: u32,
    rings: &Rings,
    left: &Left,
    o: &mut Heads<E, Const<2>>,
    documents: &[u32],
    places: &Places,
    #[comptime] meets: bool,
    #[comptime] forward: Forward,
) {
    let size!(Scores) = comptime!(forward.scores().op.held());
    let size!(Weights) = comptime!(forward.weights_held());
    let size!(Out) = comptime!(forward.values().op.held());
    let me = warpgroup(base, 0u32, forward);
    let word = comptime!(forward.number_at() as usize / 4);
    let rows = comptime!(forward.rows());
    let mut reading = Reading { k: PipelineState::start(), v: PipelineState::start() };
    let mut q_phase = 0u32;
    rings.q.wait(0u32, q_phase);
    let mut at = shared[word];
    while at != NONE {
        let tile = query_tile(at, places, rows);
        let last = tile.first + comptime!(rows - 1);
        let all = blocks(tile.first, last, documents, places, forward.keys(), forward.limited);
        let mut out = Array::<Vector<f32, Out>>::new(1usize);
        let mut stats = Array::<RowPair>::new(2usize);
        out[0] = Vector::new(0.0f32);
        begin(&mut stats);
        attend::<Scores, Weights, Out>(
            &me,
            rings,
            &mut reading,
            &mut out,
            &mut stats,
            &tile,
            &all,
            documents,
            places,
            forward,
        );
        sync_units(1u32, 128u32);
        if me.unit == 0u32 {
            rings.q.release(0u32);
        }
        let totals = row_sum(stats[1]);
        if comptime!(meets) {
            let part = meet::Part::new(left, &me, &tile, places, forward);
            part.leave::<Out>(out[0], stats[0], totals, forward);
            part.meet::<E>(o, forward);
        } else {
            leave::<Out>(out[0], stats[0], totals, &me, &tile, left, places, forward);
        }
        q_phase ^= 1;
        rings.q.wait(0u32, q_phase);
        at = shared[word];
    }
}

/// Writes the sums of a unit's two rows, and their statistics, line by line.
#[cube]
fn leave<O: Size>(
    out: Vector<f32, O>,
    shifts: RowPair,
    totals: RowPair,
    me: &Warpgroup,
    tile: &QueryTile,
    left: &Left,
    places: &Places,
    #[comptime] forward: Forward,
) {
    let (row, col) = origin(me.unit);
    let part = tile.first / comptime!(forward.rows());
    #[unroll]
    for r in 0..2usize {
        let row = row + comptime!(8 * r as u32);
        if row < left.rows {
            let line = (part * places.all_heads + tile.number) * left.rows + row;
            if col == 0u32 {
                let to = left.statistics + u64::cast_from(line) * 8;
                store_two(to + 0, shifts.extract(r), totals.extract(r));
            }
            let columns = comptime!(forward.width as u64);
            let at = left.sums + (u64::cast_from(line) * columns + u64::cast_from(col)) * 4u64;
            // Of four elements two are of this row, side by side.
            #[unroll]
            for i in 0..comptime!(forward.width / 8) {
                let (first, second) = comptime!((4 * i + 2 * r, 4 * i + 2 * r + 1));
                let column = comptime!(4 * offset(first).1 as u64);
                store_two(at + column, out.extract(first), out.extract(second));
            }
        }
    }
}

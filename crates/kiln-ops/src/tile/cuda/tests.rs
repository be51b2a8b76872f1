//! Fragments and pipelines as attention uses them: softmax(A·B)·C of one tile by one warpgroup, the scores never
//! leaving the registers.

use super::fragment::*;
use super::maps::map;
use super::pipeline::{PipelineState, Ring, barrier_bytes, rings_ready};
use super::ptx::*;
use crate::tile::tests::{like, numbers, tensor, upload};
use crate::tile::{Family, families};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

/// Bytes of a block of 64×64.
const BLOCK: u32 = 8192;

/// `[64, 64]` rows of `softmax` over the columns of all `blocks` blocks of B, times those of C: B is
/// `[64·blocks, 64]` with K contiguous, C `[64·blocks, 64]`. A stays in a ring of one stage while B and C
/// circle in rings of two.
#[cube(launch_unchecked)]
fn chained_kernel<E: Float>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    c: &TensorMap<E, Tiled>,
    out: &mut [f32],
    blocks: u32,
    #[comptime] float: Float16,
    #[define(E)] _dtype: ElemType,
) {
    let bytes = comptime!(5 * BLOCK as usize + barrier_bytes(1) + 2 * barrier_bytes(2));
    let shared = Shared::<[u32]>::new_aligned_slice(comptime!(bytes / 4), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let barriers = base + comptime!(5 * BLOCK);
    let a_ring = Ring::new(barriers, 1u32, 1u32, 1u32);
    let b_ring = Ring::new(barriers + 16, 2u32, 1u32, 1u32);
    let c_ring = Ring::new(barriers + 48, 2u32, 1u32, 1u32);
    rings_ready();
    let b_base = base + BLOCK;
    let c_base = base + comptime!(3 * BLOCK);
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp == 4u32 {
        let lane = UNIT_POS % 32;
        if lane == 0u32 {
            let (b_map, c_map) = (tensor_map_address(b), tensor_map_address(c));
            let bar = a_ring.acquire(0u32, 0u32, BLOCK);
            tma_load(base, tensor_map_address(a), bar, 0u32, 0u32, 0u32);
            let mut state = PipelineState::start();
            for block in 0..blocks {
                let bar = b_ring.acquire(state.stage, state.phase, BLOCK);
                tma_load(b_base + state.stage * BLOCK, b_map, bar, 0u32, block * 64, 0u32);
                let bar = c_ring.acquire(state.stage, state.phase, BLOCK);
                tma_load(c_base + state.stage * BLOCK, c_map, bar, 0u32, block * 64, 0u32);
                state.advance(2u32);
            }
        }
    } else {
        let scores_op = comptime!(Wgmma { float, n: 64, a_transposed: false, b_transposed: false });
        let values = comptime!(WgmmaChain {
            op: Wgmma { float, n: 64, a_transposed: false, b_transposed: true },
            steps: 4,
            a_block: 0,
            b_block: 0
        });
        let mut total = Array::<Vector<f32, Const<32>>>::new(1usize);
        total[0] = Vector::new(0.0f32);
        let mut rows = Array::<Vector<f32, Const<2>>>::new(2usize);
        rows[0] = Vector::new(-1.0e30f32);
        rows[1] = Vector::new(0.0f32);
        a_ring.wait(0u32, 0u32);
        let a_desc = descriptor(base, 1u32);
        let mut state = PipelineState::start();
        for _block in 0..blocks {
            let mut scores = Array::<Vector<f32, Const<32>>>::new(1usize);
            scores[0] = Vector::new(0.0f32);
            b_ring.wait(state.stage, state.phase);
            let b_desc = descriptor(b_base + state.stage * BLOCK, 1u32);
            scores[0] = wgmma_issue::<Const<32>>(scores[0], a_desc, b_desc, scores_op);
            wgmma_commit();
            scores[0] = wgmma_wait::<Const<32>>(scores[0], 0u32, scores_op);
            if UNIT_POS == 0u32 {
                b_ring.release(state.stage);
            }
            let found = row_max::<Const<32>>(scores[0], 32usize);
            let mut largest = Vector::<f32, Const<2>>::empty();
            let mut factors = Vector::<f32, Const<2>>::empty();
            let mut shifted = scores[0];
            #[unroll]
            for r in 0..2usize {
                let new = max(rows[0].extract(r), found.extract(r));
                largest.insert(r, new);
                factors.insert(r, f32::exp(rows[0].extract(r) - new));
            }
            #[unroll]
            for i in 0..32usize {
                let row = largest.extract(comptime!(i % 4 / 2));
                shifted.insert(i, f32::exp(scores[0].extract(i) - row));
            }
            scores[0] = shifted;
            rows[0] = largest;
            let mut sums = rows[1] * factors;
            #[unroll]
            for i in 0..32usize {
                let r = comptime!(i % 4 / 2);
                sums.insert(r, sums.extract(r) + scores[0].extract(i));
            }
            rows[1] = sums;
            total[0] = scale_rows::<Const<32>>(total[0], factors);
            // An element of an array is passed by value.
            let mut weights = Array::<Vector<u32, Const<16>>>::new(1usize);
            weights[0] = operand::<Const<32>, Const<16>>(scores[0], 16usize, float);
            c_ring.wait(state.stage, state.phase);
            let c_desc = descriptor(c_base + state.stage * BLOCK, 512u32);
            total[0] =
                wgmma_chain_registers::<Const<32>, Const<16>>(total[0], weights[0], c_desc, values);
            wgmma_commit();
            total[0] = wgmma_wait::<Const<32>>(total[0], 0u32, comptime!(values.op));
            if UNIT_POS == 0u32 {
                c_ring.release(state.stage);
            }
            state.advance(2u32);
        }
        let one = Vector::<f32, Const<2>>::new(1.0f32);
        total[0] = scale_rows::<Const<32>>(total[0], one / row_sum(rows[1]));
        let (row, col) = origin(UNIT_POS);
        #[unroll]
        for i in 0..32usize {
            let (row, col) = (row + comptime!(offset(i).0), col + comptime!(offset(i).1));
            out[(row * 64 + col) as usize] = total[0].extract(i);
        }
    }
}

#[test]
fn a_chain_of_products_stays_in_registers() {
    let Some((device, like)) = like() else { return };
    if !families(&device, DType::BF16).contains(&Family::Wgmma) {
        return kiln_test::skip("wgmma", format!("{device:?} has none"));
    }
    let dtype = DType::BF16;
    let blocks = 5;
    let rows = 64 * blocks;
    // Scores of a few units.
    let a_held: Vec<f32> = tensor(&like, [64, 64], dtype, 1).1.iter().map(|x| x / 32.0).collect();
    let a = upload(&like, Shape::new([64, 64]), dtype, &a_held);
    let (b, b_held) = tensor(&like, [rows, 64], dtype, 2);
    let (c, c_held) = tensor(&like, [rows, 64], dtype, 3);
    let out = tensor(&like, [64, 64], DType::F32, 0).0;
    let boxes = |t: &CubeTensor, lines: usize| map(t, [1, lines, 64], [lines * 64, 64], 64);
    let client = &like.client;
    // SAFETY: TMA keeps to the shapes of its maps; units write inside 64×64.
    unsafe {
        chained_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(160),
            boxes(&a, 64),
            boxes(&b, rows),
            boxes(&c, rows),
            out.clone().into_buffer_arg(),
            blocks as u32,
            Float16::Bf16,
            dtype_to_elem_type(dtype),
        );
    }

    let found = numbers(out);
    for i in 0..64 {
        let score = |j: usize| -> f64 {
            (0..64).map(|l| f64::from(a_held[i * 64 + l] * b_held[j * 64 + l])).sum()
        };
        let scores: Vec<f64> = (0..rows).map(score).collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for col in 0..64 {
            let value = |j: usize| weights[j] * f64::from(c_held[j * 64 + col]);
            let expected = (0..rows).map(value).sum::<f64>() / sum;
            // Weights are rounded to bf16, 2⁻⁹ of each; values are 4 at most.
            let error = (f64::from(found[i * 64 + col]) - expected).abs();
            assert!(error <= 4.0 * 2f64.powi(-8), "{i} {col}: {} {expected}", found[i * 64 + col]);
        }
    }
}

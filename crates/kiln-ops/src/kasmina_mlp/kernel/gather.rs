//! The gradients of MLPs and of alpha, of what the cubes of a backward have left.

use super::{CubeTensor, record};
use crate::kasmina::backend::Blueprints;
use crate::kasmina::kernel::{Garden, mlp_of};
use crate::launch;
use burn_cubecl::CubeBackend;
use cubecl::prelude::*;

/// Elements of an MLP that a cube makes, and units of each, which have some of the seeds.
const ELEMENTS: u32 = 32;
const BESIDE: u32 = 8;
/// Parts of the rows that are read together.
const TOGETHER: usize = 4;

/// What is brought together.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Records {
    parts: usize,
    /// f32 of each.
    record: usize,
    mlps: usize,
    widest: usize,
    /// Elements of an MLP, and cubes that make them.
    elements: usize,
    tiles: usize,
}

/// Whether an element of an MLP is one of a chunk of `size` features.
#[cube]
fn belongs(element: usize, widest: usize, size: usize) -> bool {
    let row = element / widest;
    let column = element - row * widest;
    let bias = element - min(element, 4 * widest * widest);
    let of_weights = row % (2 * widest) < 2 * size && column < size;
    let of_biases = select(row < 4 * widest + 2, bias < 2 * size, column < size);
    select(row < 4 * widest, of_weights, of_biases)
}

/// Σ over the parts of the rows of an element of a seed's record.
#[cube]
fn of_parts(left: &[f32], at: usize, step: usize, parts: usize) -> f32 {
    let mut sum = f32::new(0.0);
    for first in range_stepped(0, parts, TOGETHER) {
        let mut held = Array::<f32>::new(TOGETHER);
        #[unroll]
        for i in 0..TOGETHER {
            held[i] = left[min(first + i, parts - 1) * step + at];
        }
        #[unroll]
        for i in 0..TOGETHER {
            if first + i < parts {
                sum += held[i];
            }
        }
    }
    sum
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel<E: Float, W: Float, I: Int>(
    left: &[f32],
    garden: &Garden<W, I>,
    dalpha: &mut [W],
    dmlps: &mut [E],
    records: Records,
    #[comptime] wanted: [bool; 2],
    #[define(E, W, I)] _dtypes: [ElemType; 3],
) {
    let step = garden.seeds * records.record;
    let of_mlps = records.mlps * records.tiles;
    if comptime!(wanted[0]) && CUBE_POS >= of_mlps {
        let units = comptime!((ELEMENTS * BESIDE) as usize);
        let seed = (CUBE_POS - of_mlps) * units + UNIT_POS as usize;
        if seed < garden.seeds {
            let of = mlp_of::<W, I>(garden, seed, records.mlps);
            if of.contributes {
                let at = (seed + 1) * records.record - 1;
                dalpha[seed] = W::cast_from(of_parts(left, at, step, records.parts));
            }
        }
    }
    if comptime!(wanted[1]) {
        let mlp = CUBE_POS / records.tiles;
        let first = (CUBE_POS - mlp * records.tiles) * comptime!(ELEMENTS as usize);
        let element = first + UNIT_POS_X as usize;
        let own = mlp < records.mlps && element < records.elements;
        let mut sum = f32::new(0.0);
        if own {
            let beside = comptime!(BESIDE as usize);
            for seed in range_stepped(UNIT_POS_Y as usize, garden.seeds, beside) {
                let of = mlp_of::<W, I>(garden, seed, records.mlps);
                if of.trains && of.mlp == mlp && belongs(element, records.widest, of.size) {
                    let at = seed * records.record + element;
                    sum += of_parts(left, at, step, records.parts);
                }
            }
        }
        let mut shared = Shared::<[f32]>::new_slice(comptime!((ELEMENTS * BESIDE) as usize));
        shared[UNIT_POS as usize] = sum;
        sync_cube();
        if own && UNIT_POS_Y == 0 {
            #[unroll]
            for y in 1..BESIDE {
                sum += shared[(y * ELEMENTS + UNIT_POS_X) as usize];
            }
            dmlps[mlp * records.elements + element] = E::cast_from(sum);
        }
    }
}

/// Writes every element of the gradient of the MLPs, and the gradients of the alphas of seeds that blend one.
pub(super) fn gather(
    left: CubeTensor,
    mlps: [usize; 2],
    of: Blueprints<CubeBackend>,
    dalpha: Option<&CubeTensor>,
    dmlps: Option<&CubeTensor>,
) {
    let [count, widest] = mlps;
    let parts = left.meta.shape()[0];
    let [seeds, ..] = of.sizes();
    let client = left.client.clone();
    let elements = record(widest) - 1;
    let tiles = if dmlps.is_some() { elements.div_ceil(ELEMENTS as usize) } else { 0 };
    let of_alphas = seeds.div_ceil((ELEMENTS * BESIDE) as usize);
    let wanted = [dalpha.is_some(), dmlps.is_some()];
    let dtype = dmlps.map_or(left.dtype, |of| of.dtype);
    let types = of.types(dtype);
    let unused = |dtype| launch::unused(&left, dtype);
    let of_alpha = dalpha.cloned().unwrap_or_else(|| unused(of.alpha.dtype));
    let of_mlps = dmlps.cloned().unwrap_or_else(|| unused(dtype));
    let address = launch::address_type(&[&left, &of_mlps, &of.rows]);
    launch::plans::note("kasmina_mlp gradients", &(wanted, address), &[]);
    // SAFETY: elements, seeds and parts are looked at before every read and write.
    unsafe {
        gather_kernel::launch_unchecked(
            &client,
            launch::grid(&client, count * tiles + of_alphas),
            CubeDim::new_2d(ELEMENTS, BESIDE),
            address,
            left.into_buffer_arg(),
            of.garden(),
            of_alpha.into_buffer_arg(),
            of_mlps.into_buffer_arg(),
            RecordsLaunch::new(parts, record(widest), count, widest, elements, tiles),
            wanted,
            types,
        );
    }
}

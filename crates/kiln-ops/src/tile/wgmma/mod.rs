//! The launch of products on Hopper's tensor cores.

mod kernel;
mod plan;

use super::maps::{map, operand};
use super::operand::Order;
use super::order::{self, Tiles};
use super::product::Operands;
use super::ptx::{Half, Stored};
use super::schedule::{DEPTH, ROWS, Walk};
use super::{Epilogue, Pair, splits};
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{UNITS, WgmmaProduct, wgmma_cluster_kernel, wgmma_kernel};
use plan::Plan;

/// Rows of tiles that are made together, so that they share columns of B in the cache. Where a row has few
/// tiles, row after row: A is read once then. (dX of 32768×50304·50304×768 on an H200: 3084 µs in bands of 16,
/// 3065 of 8, 3038 of 4, 3013 of 1; 8192³: 1326, 1327, 1347 and 1407.)
fn group(tiles_n: usize) -> u32 {
    if tiles_n <= 8 { 1 } else { 16 }
}

/// Makes `out`, whose rows are aligned to 16 bytes. Of a gate it is `[2, M, N]`, or anything if its
/// products are not kept.
pub(super) fn run(o: &Operands, out: &CubeTensor) {
    let client = &out.client;
    // The transposed half is rounded to halves before it is transposed.
    let symmetric = o.symmetric && out.dtype != DType::F32;
    let Plan { tile, splits } = plan::plan(o, symmetric, launch::multiprocessors(client));
    let blocks = o.blocks_of_k(DEPTH);
    let depth = blocks.div_ceil(splits * tile.cluster);
    let splits = blocks.div_ceil(depth * tile.cluster);
    let split = splits > 1;
    // Parts stand in rows of their own, padded as TMA wants them.
    let pitch = match split {
        true => o.n.next_multiple_of(4),
        false => out.meta.strides()[out.meta.strides().len() - 2],
    };
    let target = match split {
        true => splits::workspace(out, o.op, splits * o.batches * o.m, o.n, pitch),
        false => out.clone(),
    };
    let stored = match target.dtype {
        DType::F32 => Stored::F32,
        dtype => Stored::Half(Half::of(dtype)),
    };
    let mut epilogue = o.epilogue(split);
    // What stands where the result goes is added on the way there, once: no second reader.
    if epilogue.add && o.in_place && o.beta() == 1.0 && out.dtype == DType::F32 {
        epilogue = Epilogue { add: false, accumulate: true, ..epilogue };
    }
    let (a, b) = (o.a.order, o.b.order);
    let (half, triangles, pair) = (Half::of(o.a.tensor.dtype), o.triangles, o.pair());
    let gated = o.second.as_ref().and_then(|second| second.gated.as_ref());
    let second = o.second.as_ref().map_or(&o.b, |second| &second.b);
    let columns = pair.columns(tile.n);
    let (tiles_m, tiles_n) = (o.m.div_ceil(ROWS), o.n.div_ceil(columns));
    let mut walk = Walk { group: 1, cluster: tile.cluster as u32, triangles, symmetric };
    if !walk.ordered() {
        walk.group = group(tiles_n);
    }
    let product = WgmmaProduct { tile, half, a, b, stored, epilogue, walk, pair };
    let add = o.add.as_ref().filter(|_| epilogue.add).map(|(add, _)| add.tensor.clone());
    let add = add.unwrap_or_else(|| launch::unused(out, DType::F32));
    let dtypes = [o.a.tensor.dtype, add.dtype, target.dtype];
    let whole = tiles_m * tiles_n * splits;
    let places = if symmetric { order::symmetric_tiles(o.m, columns) } else { whole };
    let total = places * tile.cluster * o.batches;
    let cubes = match tile.cluster {
        1 => total.min(launch::multiprocessors(client) * tile.cubes),
        _ => total,
    };
    let tiles = match symmetric {
        true => Some(Tiles::Symmetric { size: o.m, columns }),
        false => o.triangular(tiles_m),
    };
    // The rows of `hidden` are those of `out`.
    let result = |tensor: &CubeTensor, matrices: usize, pitch: usize| {
        map(tensor, [matrices, o.m, o.n], [o.m * pitch, pitch], 64)
    };
    let matrices = if pair == (Pair::Gate { keep: true }) { 2 } else { splits * o.batches };
    let kernel = match tile.cluster {
        1 => wgmma_kernel::launch_unchecked,
        _ => wgmma_cluster_kernel::launch_unchecked,
    };
    // SAFETY: TMA keeps to the shapes of its maps, C is read inside M and N only.
    unsafe {
        kernel(
            client,
            launch::grid(client, cubes),
            CubeDim::new_1d(UNITS),
            launch::address_type(&[&add]),
            operand(&o.a, ROWS, a == Order::Rows),
            operand(&o.b, columns, b == Order::Columns),
            operand(second, columns, b == Order::Columns),
            result(&target, matrices, pitch),
            result(gated.map_or(&target, |gated| &gated.hidden), 1, pitch),
            add.into_buffer_arg(),
            o.order(tiles, cubes / tile.cluster, out),
            o.addend(),
            o.m as u32,
            o.n as u32,
            o.blocks([tiles_m, tiles_n], depth, splits, walk),
            o.alpha as f32,
            product,
            dtypes.map(dtype_to_elem_type),
        );
    }
    if split {
        splits::add_up(&target, splits, o, out);
    }
}

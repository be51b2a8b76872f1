//! The launch of products on Hopper's tensor cores.

mod kernel;
mod plan;

use super::operand::{Order, Stack};
use super::product::Operands;
use super::ptx::{Half, Stored};
use super::schedule::{DEPTH, ROWS};
use super::{Epilogue, splits};
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::zspace::{shape, strides};
use kernel::{UNITS, WgmmaProduct, wgmma_kernel};
use plan::Plan;

/// Matrices `[batches, lines, along]` in boxes of 128 bytes by `lines`.
fn map(
    tensor: &CubeTensor,
    [batches, lines, along]: [usize; 3],
    [batch, line]: [usize; 2],
    box_lines: usize,
) -> TensorMapArg<Tiled> {
    // SAFETY: the shape and the strides are those of the tensor.
    let arg = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle.clone(),
            strides![batch, line, 1],
            shape![batches, lines, along],
        )
    };
    let args = TiledArgs { tile_size: shape![1, box_lines, 128 / tensor.dtype.size()] };
    TensorMapArg::new(args, arg, dtype_to_elem_type(tensor.dtype))
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(TensorMapPrefetch::B256)
}

/// An operand, whose boxes are `extent` by the depth of a stage.
fn operand(stack: &Stack, extent: usize, along_k: bool) -> TensorMapArg<Tiled> {
    // A single line or matrix has any distance; TMA wants a multiple of 16 bytes.
    let along = stack.along().next_multiple_of(8);
    let line = if stack.lines() > 1 { stack.line } else { along };
    let batch = if stack.batches > 1 { stack.batch } else { line * stack.lines() };
    let shape = [stack.batches, stack.lines(), stack.along()];
    map(&stack.tensor, shape, [batch, line], if along_k { extent } else { DEPTH })
}

/// Makes `out`, whose rows are aligned to 16 bytes.
pub(super) fn run(o: &Operands, out: &CubeTensor) {
    let client = &out.client;
    let Plan { tile, splits } = plan::plan(o, launch::multiprocessors(client));
    let blocks = o.k.div_ceil(DEPTH);
    let depth = blocks.div_ceil(splits);
    let splits = blocks.div_ceil(depth);
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
    let (half, triangles) = (Half::of(o.a.tensor.dtype), o.triangles);
    let product = WgmmaProduct { tile, half, a, b, stored, epilogue, triangles };
    let [add_batch, add_row, add_col] = o.add_strides();
    let add = o.add.as_ref().filter(|_| epilogue.add).map(|(add, _)| add.tensor.clone());
    let add = add.unwrap_or_else(|| launch::unused(out, DType::F32));
    let dtypes = [o.a.tensor.dtype, add.dtype, target.dtype];
    let (tiles_m, tiles_n) = (o.m.div_ceil(ROWS), o.n.div_ceil(tile.n));
    let total = tiles_m * tiles_n * splits * o.batches;
    let cubes = total.min(launch::multiprocessors(client));
    // SAFETY: TMA keeps to the shapes of its maps, C is read inside M and N only.
    unsafe {
        wgmma_kernel::launch_unchecked(
            client,
            launch::grid(client, cubes),
            CubeDim::new_1d(UNITS),
            launch::address_type(&[&add]),
            operand(&o.a, ROWS, a == Order::Rows),
            operand(&o.b, tile.n, b == Order::Columns),
            map(&target, [splits * o.batches, o.m, o.n], [o.m * pitch, pitch], 64),
            add.into_buffer_arg(),
            o.order(tiles_m, cubes, out),
            add_batch,
            add_row,
            add_col,
            o.m as u32,
            o.n as u32,
            o.blocks([tiles_m, tiles_n], depth, splits),
            o.alpha as f32,
            o.beta() as f32,
            product,
            dtypes.map(dtype_to_elem_type),
        );
    }
    if split {
        splits::add_up(&target, splits, o, out);
    }
}

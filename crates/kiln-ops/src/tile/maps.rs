//! Tensors as TMA reads and writes them.

use super::operand::Stack;
use super::schedule::DEPTH;
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::zspace::{shape, strides};

/// Matrices `[batches, lines, along]` in boxes of 128 bytes by `lines`.
pub(super) fn map(
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
pub(super) fn operand(stack: &Stack, extent: usize, along_k: bool) -> TensorMapArg<Tiled> {
    // A single line or matrix has any distance; TMA wants a multiple of 16 bytes.
    let along = stack.along().next_multiple_of(8);
    let line = if stack.lines() > 1 { stack.line } else { along };
    let batch = if stack.batches > 1 { stack.batch } else { line * stack.lines() };
    let shape = [stack.batches, stack.lines(), stack.along()];
    map(&stack.tensor, shape, [batch, line], if along_k { extent } else { DEPTH })
}

//! Tensors as TMA reads and writes them.

use super::schedule::DEPTH;
use crate::tile::view::MatrixView;
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::zspace::{shape, strides};

/// Matrices `[batches, lines, along]` in boxes of 128 bytes by `lines`.
pub(crate) fn map(
    tensor: &CubeTensor,
    shape: [usize; 3],
    strides: [usize; 2],
    box_lines: usize,
) -> TensorMapArg<Tiled> {
    map_of_boxes(tensor, shape, strides, [1, box_lines])
}

/// The same in boxes of so many matrices, by so many lines, by 128 bytes.
pub(crate) fn map_of_boxes(
    tensor: &CubeTensor,
    [batches, lines, along]: [usize; 3],
    [batch_stride, ld]: [usize; 2],
    [box_batches, box_lines]: [usize; 2],
) -> TensorMapArg<Tiled> {
    // SAFETY: the shape and the strides are those of the tensor.
    let arg = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle.clone(),
            strides![batch_stride, ld, 1],
            shape![batches, lines, along],
        )
    };
    let args = TiledArgs { tile_size: shape![box_batches, box_lines, 128 / tensor.dtype.size()] };
    TensorMapArg::new(args, arg, dtype_to_elem_type(tensor.dtype))
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(TensorMapPrefetch::B256)
}

/// An operand, whose boxes are `extent` by the depth of a stage.
pub(super) fn operand(view: &MatrixView, extent: usize, along_k: bool) -> TensorMapArg<Tiled> {
    // A single line or matrix has any distance; TMA wants a multiple of 16 bytes.
    let along = view.along().next_multiple_of(8);
    let ld = if view.lines() > 1 { view.ld } else { along };
    let batch_stride = if view.batches > 1 { view.batch_stride } else { ld * view.lines() };
    let shape = [view.batches, view.lines(), view.along()];
    map(&view.tensor, shape, [batch_stride, ld], if along_k { extent } else { DEPTH })
}

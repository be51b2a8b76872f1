//! Heads as TMA reads and writes them.

use crate::attention::problem::{HeadsView, Sizes};
use burn::backend::cubecl::dtype_to_elem_type;
use cubecl::prelude::*;
use cubecl::zspace::{shape, strides};

/// Whether TMA is known to take the distances: nothing is said of a distance of 0, from one to the same again.
pub(super) fn takes(view: &HeadsView, sizes: &Sizes, [heads, rows]: [usize; 2]) -> bool {
    let distances =
        [(sizes.batches, view.batch_stride), (heads, view.head_stride), (rows, view.row_stride)];
    distances.into_iter().all(|(count, stride)| count <= 1 || stride > 0)
}

/// `[B, H, rows, D]` in boxes of 64 elements of so many rows.
pub(super) fn map(
    view: &HeadsView,
    sizes: &Sizes,
    [heads, rows]: [usize; 2],
    box_rows: u32,
) -> TensorMapArg<Tiled> {
    let heads = view.first + heads;
    // What there is one of has any distance; TMA wants a multiple of 16 bytes.
    let distance = |count: usize, stride: usize, dense: usize| {
        if count > 1 { stride } else { dense }
    };
    let row = distance(rows, view.row_stride, sizes.width);
    let head = distance(heads, view.head_stride, rows * row);
    let batch = distance(sizes.batches, view.batch_stride, heads * head);
    // SAFETY: the shape and the strides are those of the heads in the tensor.
    let arg = unsafe {
        TensorArg::from_raw_parts(
            view.tensor.handle.clone(),
            strides![batch, head, row, 1],
            shape![sizes.batches, heads, rows, sizes.width],
        )
    };
    let args = TiledArgs { tile_size: shape![1, 1, box_rows as usize, 64] };
    TensorMapArg::new(args, arg, dtype_to_elem_type(view.tensor.dtype))
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(TensorMapPrefetch::B256)
}

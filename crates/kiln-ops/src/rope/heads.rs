//! Heads as the kernel sees them, by their strides.

use crate::launch::Rows;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;

/// A `[B, H, T, D]` tensor whose channels stand side by side.
pub(super) struct Heads {
    pub(super) tensor: CubeTensor,
    pub(super) dims: [usize; 4],
    /// Of B, H and T; 0 where there is only one.
    pub(super) strides: [usize; 3],
}

impl Heads {
    /// Copies only where the channels are apart.
    pub(super) fn new(tensor: CubeTensor) -> Self {
        let tensor = untile(tensor);
        let tensor = if tensor.meta.strides()[3] == 1 { tensor } else { into_contiguous(tensor) };
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let dims = [shape[0], shape[1], shape[2], shape[3]];
        let stride = |i: usize| if dims[i] > 1 { strides[i] } else { 0 };
        let strides = [stride(0), stride(1), stride(2)];
        Self { tensor, dims, strides }
    }

    /// The first `heads` of a `[B, T, …·D]` tensor whose channels stand side by side.
    pub(super) fn packed(tensor: CubeTensor, heads: usize, width: usize) -> Self {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let dims = [shape[0], heads, shape[1], width];
        let strides = [strides[0], width, strides[1]];
        Self {
            tensor,
            dims,
            strides: std::array::from_fn(|i| if dims[i] > 1 { strides[i] } else { 0 }),
        }
    }

    /// Half-heads as rows: every stride is a multiple of the distance of these.
    pub(super) fn halves(&self) -> Rows {
        let width = self.dims[3] / 2;
        let stride = self.strides.iter().fold(width, |a, b| greatest_common_divisor(a, *b));
        Rows { tensor: self.tensor.clone(), rows: 2, width, stride }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

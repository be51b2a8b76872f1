//! The rungs that are kernels of the ladder's own, as one operation of Burn.

use super::{naive, tiled, zeros};
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, kernel::into_contiguous};
use kiln_ops::launch;

/// Which kernel, and how it is launched.
#[derive(Clone, Copy, Debug)]
pub enum Own {
    /// One unit for each output.
    Naive,
    /// Tiles through shared memory.
    Tiled,
    /// The naive kernel in a launch of the wrong shape.
    FirstRow,
    /// Writes zeros.
    Zeros,
}

/// The rungs as operations.
#[backend_extension(Cube, Fusion)]
pub trait LadderOps: Backend {
    /// What the kernel makes of two lower triangles.
    #[fusion(dtype = a, shape = a)]
    fn ladder(a: FloatTensor<Self>, b: FloatTensor<Self>, own: Own) -> FloatTensor<Self>;
}

impl LadderOps for CubeBackend {
    fn ladder(a: FloatTensor<Self>, b: FloatTensor<Self>, own: Own) -> FloatTensor<Self> {
        let (a, b): (CubeTensor, CubeTensor) = (into_contiguous(a), into_contiguous(b));
        // As every kernel gets its output: memory as the allocator hands it back.
        let y = launch::output(&a, super::OP, "y", a.shape(), a.dtype);
        match own {
            Own::Naive => naive::launch(a, b, &y),
            Own::Tiled => tiled::launch(a, b, &y),
            Own::FirstRow => naive::launch_as_rows(a, b, &y),
            Own::Zeros => zeros::launch(&y),
        }
        y
    }
}

/// Runs one of the kernels.
pub(super) fn run(a: Tensor<2>, b: Tensor<2>, own: Own) -> Tensor<2> {
    let (a, b) = (a.into_dispatch(), b.into_dispatch());
    Tensor::from_dispatch(<Dispatch as LadderOps>::ladder(a, b, own))
}

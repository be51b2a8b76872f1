//! The matrix product as a Burn operation: dispatch and fusion.

use super::{F32Precision, MatmulOptions, OP};
use crate::autodiff::Maybe;
use crate::tile::{self, Alpha, Family, Product};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;

/// Factors and element types of a product.
#[derive(Debug, Clone, Copy)]
pub struct Scaled {
    pub(super) alpha: f64,
    pub(super) beta: f64,
    pub(super) dtype: DType,
    pub(super) precision: F32Precision,
    pub(super) symmetric: bool,
    pub(super) family: Option<Family>,
}

impl Scaled {
    /// alpha · A·B + beta · C, in `dtype` if the options name none, on the kernels that this thread has
    /// forced.
    pub fn new(options: MatmulOptions, dtype: DType) -> Self {
        let MatmulOptions { alpha, beta, precision, symmetric, .. } = options;
        let dtype = options.dtype.unwrap_or(dtype);
        Self { alpha, beta, dtype, precision, symmetric, family: tile::forced() }
    }
}

/// Products, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait MatmulOps: Backend {
    /// alpha · a·b, plus beta · c if there is a c, in an element type.
    #[fusion(meta = |a, b, _c, scaled| {
        TensorSpec::new(tile::shape(&a.shape, &b.shape), scaled.dtype)
    })]
    fn kiln_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        #[extension_type] c: Maybe<Self>,
        scaled: Scaled,
    ) -> FloatTensor<Self>;
}

impl MatmulOps for CubeBackend {
    fn kiln_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: Maybe<Self>,
        Scaled { alpha, beta, dtype, precision, symmetric, family }: Scaled,
    ) -> FloatTensor<Self> {
        let product = Product::new(OP, a, b, dtype);
        let product = Product { alpha: Alpha::new(alpha), precision, symmetric, family, ..product };
        match c {
            Maybe::Some(c) => product.accumulate(c, beta).run(),
            Maybe::None => product.run(),
        }
    }
}

/// The gradients of both operands of a·b through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    a: Tensor<D>,
    b: Tensor<D>,
    alpha: f64,
) -> (Tensor<D>, Tensor<D>) {
    let options = MatmulOptions { alpha, ..MatmulOptions::default() };
    let da = fused(dy.clone(), b.swap_dims(D - 2, D - 1), None, options);
    (da, fused(a.swap_dims(D - 2, D - 1), dy, None, options))
}

/// [`matmul`](fn@super::matmul) and [`matmul_add`](super::matmul_add) through the kernels, without
/// their checks.
pub(crate) fn fused<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    c: Option<Tensor<D>>,
    options: MatmulOptions,
) -> Tensor<D> {
    let scaled = Scaled::new(options, a.dtype());
    let c = Maybe::from(c.map(Tensor::into_dispatch));
    Tensor::from_dispatch(Dispatch::kiln_matmul(a.into_dispatch(), b.into_dispatch(), c, scaled))
}

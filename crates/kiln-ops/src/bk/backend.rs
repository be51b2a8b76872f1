//! The resolvent's diagonal as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::{Backward, Forward};

use super::{BkOptions, OP, kernel};
use crate::autodiff::{Graph, Maybe, maybe};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;

fn f32<const D: usize>(shape: [usize; D]) -> TensorSpec {
    TensorSpec::new(Shape::new(shape), DType::F32)
}

fn sizes(a: &TensorSpec) -> [usize; 2] {
    [a.shape[0], a.shape[1]]
}

/// The resolvent's diagonal, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait BkOps: Backend {
    /// G, `[B, N, 2]`; if `keep`, what a backward needs, which under autodiff is kept there.
    #[fusion(meta = |of, keep| {
        let [rows, length] = sizes(&of.a);
        let records = [rows, length.div_ceil(kernel::SITES), kernel::RECORD];
        (f32([rows, length, 2]), maybe(*keep, &f32(records)))
    })]
    fn bk(#[extension_type] of: Forward<Self>, keep: bool) -> (FloatTensor<Self>, Maybe<Self>);
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait BkGradOps: Backend {
    /// da, db and dc for each row, and dz in the shape of z.
    #[fusion(meta = |of| {
        let [rows, length] = sizes(&of.a);
        let couplings = f32([rows, length - 1]);
        (
            maybe(of.wanted[0], &f32([rows, length])),
            maybe(of.wanted[1], &couplings),
            maybe(of.wanted[2], &couplings),
            maybe(of.wanted[3], &f32([of.z.shape[0], 2])),
        )
    })]
    fn bk_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl BkOps for CubeBackend {
    fn bk(of: Forward<Self>, keep: bool) -> (FloatTensor<Self>, Maybe<Self>) {
        let (g, records) = kernel::forward(of, keep);
        (g, records.into())
    }
}

impl BkGradOps for CubeBackend {
    fn bk_backward(of: Backward<Self>) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>) {
        let [da, db, dc, dz] = kernel::backward(of);
        (da.into(), db.into(), dc.into(), dz.into())
    }
}

impl<B: BkOps + BkGradOps, C: CheckpointStrategy> BkOps for Autodiff<B, C> {
    fn bk(of: Forward<Self>, _keep: bool) -> (FloatTensor<Self>, Maybe<Self>) {
        let Forward { op, a, b, c, z, mode, max_abs } = of;
        let g = Graph::<C>::output([a, b, c, z], [0, 1, 2, 3], |[a, b, c, z], wanted| {
            let (g, records) =
                B::bk(Forward { op, a, b, c, z, mode, max_abs }, wanted.contains(&true));
            (g, move |dg, [a, b, c, z]| {
                let records = records.expect("the forward kept it");
                gradients::<B>(Backward { op, dg, a, b, c, z, records, mode, max_abs, wanted })
            })
        });
        (g, Maybe::None)
    }
}

/// Those of all inputs, in their shapes.
fn gradients<B: BkGradOps>(of: Backward<B>) -> [Maybe<B>; 4] {
    let shared = [&of.b, &of.c].map(|tensor| tensor.shape()[0] == 1);
    let (da, db, dc, dz) = B::bk_backward(of);
    let of_all = |gradient: Maybe<B>, shared: bool| {
        let all = |rows| if shared { B::float_sum_dim(rows, 0) } else { rows };
        gradient.option().map(all).into()
    };
    [da, of_all(db, shared[0]), of_all(dc, shared[1]), dz]
}

/// [`bk`](fn@super::bk) through the kernels, without its checks.
pub(crate) fn fused(
    a: Tensor<2>,
    b: Tensor<2>,
    c: Tensor<2>,
    z: Tensor<2>,
    options: BkOptions,
) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::bk(forward([a, b, c, z], options), false).0)
}

fn forward(inputs: [Tensor<2>; 4], options: BkOptions) -> Forward<Dispatch> {
    let [a, b, c, z] = inputs.map(Tensor::into_dispatch);
    Forward { op: OP, a, b, c, z, mode: options.mode, max_abs: options.max_abs }
}

/// What the forward keeps for [`backward`], past autodiff and without checks.
pub fn kept(inputs: [Tensor<2>; 4], options: BkOptions) -> Tensor<3> {
    Dispatch::bk(forward(inputs, options), true).1.tensor()
}

/// The gradients of a, b, c and z through the kernels, past autodiff and without checks.
pub fn backward(
    dg: Tensor<3>,
    inputs: [Tensor<2>; 4],
    records: Tensor<3>,
    options: BkOptions,
) -> [Tensor<2>; 4] {
    let Forward { op, a, b, c, z, mode, max_abs } = forward(inputs, options);
    let (dg, records, wanted) = (dg.into_dispatch(), records.into_dispatch(), [true; 4]);
    gradients(Backward { op, dg, a, b, c, z, records, mode, max_abs, wanted }).map(Maybe::tensor)
}

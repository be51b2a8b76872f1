//! The Kasmina layer as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::{Backward, Blueprints, State};

use super::{Blend, OP, SeedChange, SeedState, Seeds, Telemetry, kernel};
use crate::autodiff::{Graph, Maybe, maybe};
use crate::cross_entropy::backend::known;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Int, IntDType, Tensor, TensorData};
use burn_cubecl::CubeBackend;

/// The Kasmina layer, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait KasminaOps: Backend {
    /// y, and mean and variance of the chunks of x, `[C]` in f32, which have no gradient.
    #[fusion(meta = |x, of| {
        let statistic = TensorSpec::new(of.alpha.shape.clone(), DType::F32);
        (x.clone(), statistic.clone(), statistic)
    })]
    fn kasmina(
        x: FloatTensor<Self>,
        #[extension_type] of: Blueprints<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

/// Changes of seeds, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait KasminaSeedOps: Backend {
    /// alpha, lifecycle, blueprint_id and blend after changes, in their memory unless somebody else holds it; `[U, 5]`
    /// integers, which seed, which fields (bit 0 lifecycle, 1 blueprint_id, 2 blend, 3 alpha) and the first three of them, and
    /// `[U]` alphas.
    #[fusion(meta = |of, _codes, _alphas| {
        (of.alpha.clone(), of.lifecycle.clone(), of.blueprint_id.clone(), of.blend.clone())
    })]
    fn kasmina_change(
        #[extension_type] of: State<Self>,
        codes: IntTensor<Self>,
        alphas: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);
}

impl KasminaSeedOps for CubeBackend {
    fn kasmina_change(
        of: State<Self>,
        codes: IntTensor<Self>,
        alphas: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        let [alpha, lifecycle, blueprint_id, blend] = kernel::change(of, codes, alphas);
        (alpha, lifecycle, blueprint_id, blend)
    }
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait KasminaGradOps: Backend {
    /// dx, dalpha and dblueprints.
    #[fusion(meta = |of| (
        maybe(of.wanted[0], &of.dy),
        maybe(of.wanted[1], &of.of.alpha),
        maybe(of.wanted[2], &of.of.rows),
    ))]
    fn kasmina_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl KasminaOps for CubeBackend {
    fn kasmina(
        x: FloatTensor<Self>,
        of: Blueprints<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let [y, mean, variance] = kernel::forward(OP, x, of, false);
        (y, mean, variance)
    }
}

impl KasminaGradOps for CubeBackend {
    fn kasmina_backward(of: Backward<Self>) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>) {
        let [dx, dalpha, dblueprints] = kernel::backward(OP, of, false).map(Maybe::from);
        (dx, dalpha, dblueprints)
    }
}

impl<B: KasminaOps + KasminaGradOps, C: CheckpointStrategy> KasminaOps for Autodiff<B, C> {
    fn kasmina(
        x: FloatTensor<Self>,
        of: Blueprints<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Blueprints { rows, alpha, lifecycle, blueprint_id, blend } = of;
        let mut seen = None;
        let mut forward = |x: FloatTensor<B>, of: Blueprints<B>| {
            let (y, mean, variance) = B::kasmina(x, of);
            seen = Some((mean, variance));
            y
        };
        let inputs = [x, alpha, rows];
        // Nobody keeps x for the gradient of x alone.
        let y = if inputs[1].is_tracked() || inputs[2].is_tracked() {
            Graph::<C>::output(inputs, [0, 1, 2], |[x, alpha, rows], wanted| {
                let codes = [lifecycle, blueprint_id, blend];
                let of = garden::<B>(rows, alpha, codes.clone());
                (forward(x, of), move |dy, [x, alpha, rows]| {
                    let of = garden::<B>(rows, alpha, codes);
                    B::kasmina_backward(Backward { dy, x, of, wanted }).into()
                })
            })
        } else {
            Graph::<C>::output(inputs, [1, 2], |[x, alpha, rows], wanted| {
                let codes = [lifecycle, blueprint_id, blend];
                let of = garden::<B>(rows, alpha, codes.clone());
                (forward(x, of), move |dy: FloatTensor<B>, [alpha, rows]| {
                    let of = garden::<B>(rows, alpha, codes);
                    B::kasmina_backward(Backward { x: dy.clone(), dy, of, wanted }).into()
                })
            })
        };
        let (mean, variance) = seen.expect("the forward has run");
        (y, Self::from_inner(mean), Self::from_inner(variance))
    }
}

pub(crate) fn garden<B: Backend>(
    rows: FloatTensor<B>,
    alpha: FloatTensor<B>,
    [lifecycle, blueprint_id, blend]: [IntTensor<B>; 3],
) -> Blueprints<B> {
    Blueprints { rows, alpha, lifecycle, blueprint_id, blend }
}

/// The codes in one integer type that kernels know.
fn codes_of(seeds: Seeds) -> [Tensor<1, Int>; 3] {
    let codes = [seeds.lifecycle, seeds.blueprint_id, seeds.blend].map(known);
    let alike = codes.iter().all(|of| of.dtype() == codes[0].dtype());
    codes.map(|of| if alike { of } else { of.cast(IntDType::I32) })
}

pub(crate) fn blueprints(rows: Tensor<2>, seeds: &Seeds) -> Blueprints<Dispatch> {
    let (alpha, codes) = (seeds.alpha.clone(), codes_of(seeds.clone()));
    let (rows, alpha) = match rows.dtype() == alpha.dtype() {
        true => (rows, alpha),
        false => (rows.cast(DType::F32), alpha.cast(DType::F32)),
    };
    garden::<Dispatch>(
        rows.into_dispatch(),
        alpha.into_dispatch(),
        codes.map(|of| of.into_dispatch()),
    )
}

/// [`kasmina`](fn@super::kasmina) through the kernels, without its checks.
pub(super) fn fused<const D: usize>(
    x: Tensor<D>,
    rows: Tensor<2>,
    seeds: &Seeds,
) -> (Tensor<D>, Telemetry) {
    let (y, mean, variance) = Dispatch::kasmina(x.into_dispatch(), blueprints(rows, seeds));
    let [mean, variance] = [mean, variance].map(Tensor::from_dispatch);
    (Tensor::from_dispatch(y), Telemetry { mean, variance })
}

/// [`Seeds::change`](super::Seeds::change) through the kernel, without its checks and autodiff; no seed changes twice.
pub(super) fn change(seeds: Seeds, changes: &[SeedChange]) -> Seeds {
    let device = seeds.alpha.device();
    let codes = changes.iter().flat_map(|change| {
        let row = change.blueprint.map(|row| row.map_or(-1, |row| row as i64));
        let values = [change.state.map(SeedState::code), row, change.blend.map(Blend::code)];
        let mut mask = i64::from(change.alpha.is_some()) << values.len();
        for (bit, value) in values.iter().enumerate() {
            mask |= i64::from(value.is_some()) << bit;
        }
        let [state, row, blend] = values.map(Option::unwrap_or_default);
        [change.seed as i64, mask, state, row, blend].map(|value| value as i32)
    });
    let codes = TensorData::new(codes.collect::<Vec<i32>>(), [changes.len(), 5]);
    let codes = Tensor::<2, Int>::from_data(codes, (&device, DType::I32)).into_dispatch();
    let alphas: Vec<f32> = changes.iter().map(|change| change.alpha.unwrap_or(0.0)).collect();
    let alphas = Tensor::<1>::from_data(alphas.as_slice(), (&device, DType::F32)).into_dispatch();
    let alpha = seeds.alpha.clone().into_dispatch();
    let [lifecycle, blueprint_id, blend] = codes_of(seeds).map(Tensor::into_dispatch);
    let of = State { alpha, lifecycle, blueprint_id, blend };
    let (alpha, lifecycle, blueprint_id, blend) = Dispatch::kasmina_change(of, codes, alphas);
    let [lifecycle, blueprint_id, blend] =
        [lifecycle, blueprint_id, blend].map(Tensor::from_dispatch);
    Seeds { alpha: Tensor::from_dispatch(alpha), lifecycle, blueprint_id, blend }
}

/// dx, dalpha and dblueprints through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    x: Tensor<D>,
    rows: Tensor<2>,
    seeds: &Seeds,
) -> (Tensor<D>, Tensor<1>, Tensor<2>) {
    let (dtypes, of) = ([seeds.alpha.dtype(), rows.dtype()], blueprints(rows, seeds));
    let (dy, x) = (dy.into_dispatch(), x.into_dispatch());
    let (dx, dalpha, dblueprints) =
        Dispatch::kasmina_backward(Backward { dy, x, of, wanted: [true; 3] });
    let (dalpha, dblueprints): (Tensor<1>, Tensor<2>) = (dalpha.tensor(), dblueprints.tensor());
    let dalpha = if dalpha.dtype() == dtypes[0] { dalpha } else { dalpha.cast(dtypes[0]) };
    let same = dblueprints.dtype() == dtypes[1];
    (dx.tensor(), dalpha, if same { dblueprints } else { dblueprints.cast(dtypes[1]) })
}

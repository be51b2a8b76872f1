//! Attention as a Burn operation: dispatch, fusion and autodiff.

use super::delta::delta;
use super::family::{self, kernels};
use super::problem::{self, HeadsView, Kernels, Mask, Problem, Sizes};
use super::{AttentionOptions, Documents, OP};
use crate::autodiff::{Graph, Maybe, maybe};
use crate::launch;
use crate::tile::{self, Family};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, ExtensionType, backend_extension};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;

/// Queries, keys and values.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub enum Heads<B: Backend> {
    /// `[B, H, T, D]` and twice `[B, Hkv, S, D]`.
    Separate(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    /// `[B, T, (H + 2·Hkv)·D]`.
    Packed(FloatTensor<B>),
}

/// The documents that are packed in a sequence.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub enum Bounds<B: Backend> {
    /// `[2, T]`: for each row the first of its document, and one past the last.
    Documents(IntTensor<B>),
    /// One document is all.
    None,
}

/// What is no tensor.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// H and Hkv.
    pub(super) heads: [usize; 2],
    pub(super) options: AttentionOptions,
    /// The kernels that it should run on.
    pub(super) family: Option<Family>,
}

impl Settings {
    /// For H and Hkv heads, on the kernels that this thread has forced.
    pub fn new(heads: [usize; 2], options: AttentionOptions) -> Self {
        Self { heads, options, family: tile::forced() }
    }
}

/// A call.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Attention<B: Backend> {
    /// Queries, keys and values.
    #[extension_type]
    pub of: Heads<B>,
    /// Documents.
    #[extension_type]
    pub bounds: Bounds<B>,
    /// The rest.
    pub settings: Settings,
}

/// What the gradients are made of.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The gradient of y.
    pub dy: FloatTensor<B>,
    /// The call.
    #[extension_type]
    pub call: Attention<B>,
    /// Its result.
    pub y: FloatTensor<B>,
    /// The log-sum-exp of each query's scores.
    pub lse: FloatTensor<B>,
    /// Which of dq, dk and dv are wanted; of packed inputs all or none.
    pub wanted: [bool; 3],
}

/// Attention, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait AttentionOps: Backend {
    /// y; if `keep`, the log-sum-exp of each query's scores, which a backward needs and under autodiff keeps
    /// for itself.
    #[fusion(meta = |call, keep| {
        let (sizes, like) = call.of.sizes(call.settings);
        let lse = TensorSpec::new(sizes.statistics(), DType::F32);
        let shape = sizes.output(matches!(call.of, HeadsMetadata::Packed(_)));
        (TensorSpec::new(shape, like.dtype), maybe(*keep, &lse))
    })]
    fn attend(
        #[extension_type] call: Attention<Self>,
        keep: bool,
    ) -> (FloatTensor<Self>, Maybe<Self>);
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait AttentionGradOps: Backend {
    /// dq, dk and dv where they are wanted; of packed inputs all in the first.
    #[fusion(meta = |of| match &of.call.of {
        HeadsMetadata::Separate(q, k, v) => {
            let [dq, dk, dv] = of.wanted;
            (maybe(dq, q), maybe(dk, k), maybe(dv, v))
        }
        HeadsMetadata::Packed(qkv) => (maybe(true, qkv), maybe(false, qkv), maybe(false, qkv)),
    })]
    fn attend_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl HeadsMetadata {
    fn sizes(&self, settings: Settings) -> (Sizes, &TensorSpec) {
        match self {
            Self::Separate(q, k, _) => (Sizes::separate(&q.shape, &k.shape), q),
            Self::Packed(qkv) => (Sizes::packed(&qkv.shape, settings.heads), qkv),
        }
    }
}

impl Sizes {
    /// Of `[B, H, T, D]` and `[B, Hkv, S, D]`.
    fn separate(q: &[usize], k: &[usize]) -> Self {
        let (batches, heads, queries, width) = (q[0], q[1], q[2], q[3]);
        Self { batches, heads, kv_heads: k[1], queries, keys: k[2], width }
    }

    /// Of `[B, T, (H + 2·Hkv)·D]`.
    fn packed(qkv: &[usize], [heads, kv_heads]: [usize; 2]) -> Self {
        let width = qkv[2] / (heads + 2 * kv_heads);
        Self { batches: qkv[0], heads, kv_heads, queries: qkv[1], keys: qkv[1], width }
    }

    /// The shape of y.
    pub(super) fn output(&self, packed: bool) -> Shape {
        let Self { batches, heads, queries, width, .. } = *self;
        match packed {
            true => Shape::new([batches, queries, heads * width]),
            false => Shape::new([batches, heads, queries, width]),
        }
    }

    /// One number for each row of each head.
    fn statistics(&self) -> Shape {
        Shape::new([self.batches, self.heads, self.queries])
    }
}

/// A `[B, H, T, D]` tensor for a kernel to write, in memory in the order of `like`. Without a name nobody reads it.
fn output(like: &CubeTensor, name: Option<&'static str>) -> CubeTensor {
    let new = |shape| match name {
        Some(name) => launch::output(like, OP, name, shape, like.dtype),
        None => launch::unread(like, shape, like.dtype),
    };
    let (shape, strides) = (like.meta.shape().clone(), like.meta.strides());
    let [batch, heads, rows, width] = [0, 1, 2, 3].map(|i| shape[i]);
    if heads == 1 || rows == 1 || strides[1] >= strides[2] {
        return new(shape);
    }
    let mut tensor = new(Shape::new([batch, rows, heads, width]));
    tensor.meta.swap(1, 2);
    tensor
}

impl Attention<CubeBackend> {
    fn sizes(&self) -> Sizes {
        match &self.of {
            Heads::Separate(q, k, _) => Sizes::separate(q.meta.shape(), k.meta.shape()),
            Heads::Packed(qkv) => Sizes::packed(qkv.meta.shape(), self.settings.heads),
        }
    }

    fn problem(&self) -> Problem {
        let sizes = self.sizes();
        let [q, k, v] = match &self.of {
            Heads::Separate(q, k, v) => [q, k, v].map(|tensor| HeadsView::new(tensor.clone())),
            Heads::Packed(qkv) => parts(&rows(qkv.clone()), &sizes),
        };
        let AttentionOptions { causal, window, softcap, .. } = self.settings.options;
        let documents = match &self.bounds {
            Bounds::Documents(bounds) => Some(into_contiguous(bounds.clone())),
            Bounds::None => None,
        };
        Problem {
            q,
            k,
            v,
            sizes,
            // A window as long as the keys hides none.
            mask: Mask {
                causal,
                window: window.filter(|window| *window < sizes.keys),
                documents: documents.is_some(),
            },
            scale: self.settings.options.scale_for(sizes.width) as f32,
            softcap: softcap.map(|cap| cap as f32),
            documents,
        }
    }
}

/// A tensor whose rows have their elements next to each other.
pub(super) fn rows(tensor: CubeTensor) -> CubeTensor {
    let tensor = untile(tensor);
    if tensor.meta.strides()[2] == 1 { tensor } else { into_contiguous(tensor) }
}

/// Queries, keys and values of a packed tensor.
fn parts(qkv: &CubeTensor, sizes: &Sizes) -> [HeadsView; 3] {
    let Sizes { heads, kv_heads, width, .. } = *sizes;
    [0, heads, heads + kv_heads].map(|first| HeadsView::packed(qkv, first, width))
}

impl AttentionOps for CubeBackend {
    fn attend(call: Attention<Self>, keep: bool) -> (FloatTensor<Self>, Maybe<Self>) {
        let sizes = call.sizes();
        let (y, view) = match &call.of {
            Heads::Separate(q, ..) => {
                let y = output(q, Some("y"));
                (y.clone(), HeadsView::new(y))
            }
            Heads::Packed(qkv) => {
                let y = launch::output(qkv, OP, "y", sizes.output(true), qkv.dtype);
                (y.clone(), HeadsView::packed(&y, 0, sizes.width))
            }
        };
        let lse = keep.then(|| launch::output(&y, OP, "lse", sizes.statistics(), DType::F32));
        if y.meta.num_elements() > 0 {
            family::forward(&call.problem(), &view, lse.as_ref(), call.settings.family);
        }
        (y, lse.into())
    }
}

impl AttentionGradOps for CubeBackend {
    fn attend_backward(of: Backward<Self>) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>) {
        let Backward { dy, call, y, lse, wanted } = of;
        let given = |[dq, dk, dv]: [CubeTensor; 3]| {
            let given = |i: usize, gradient: CubeTensor| Maybe::from(wanted[i].then_some(gradient));
            (given(0, dq), given(1, dk), given(2, dv))
        };
        let sizes = call.sizes();
        let gradients = match &call.of {
            Heads::Separate(q, k, v) => {
                // Without queries nobody writes the gradients of the keys.
                let zeros = |x: &CubeTensor| launch::zeros(x, x.meta.shape().clone(), x.dtype);
                if y.meta.num_elements() == 0 {
                    return given([q, k, v].map(zeros));
                }
                // A kernel that makes several of them writes those that nobody wants too.
                let output = |i: usize, x, name| output(x, wanted[i].then_some(name));
                [output(0, q, "grad.q"), output(1, k, "grad.k"), output(2, v, "grad.v")]
            }
            Heads::Packed(qkv) => {
                let shape = qkv.meta.shape().clone();
                let gradient = launch::output(qkv, OP, "grad.qkv", shape, qkv.dtype);
                if y.meta.num_elements() == 0 {
                    return (Maybe::Some(gradient), Maybe::None, Maybe::None);
                }
                [gradient.clone(), gradient.clone(), gradient]
            }
        };
        let packed = matches!(call.of, Heads::Packed(_));
        let [dq, dk, dv] = match packed {
            true => parts(&gradients[0], &sizes),
            false => gradients.each_ref().map(|gradient| HeadsView::new(gradient.clone())),
        };
        let view = |tensor: CubeTensor| match packed {
            true => HeadsView::packed(&rows(tensor), 0, sizes.width),
            false => HeadsView::new(tensor),
        };
        let problem = call.problem();
        let Kernels { family, backward, .. } = kernels(&problem, call.settings.family);
        let (mut dy, y) = (view(dy), view(y));
        if *family != Family::Simt && !dy.aligned(sizes.width) {
            dy = view(into_contiguous(dy.tensor));
        }
        let rowsums = launch::output(&lse, OP, "delta", sizes.statistics(), DType::F32);
        delta(&dy, &y, &sizes, &rowsums);
        let lse = into_contiguous(lse);
        let (dy, lse, delta) = (&dy, &lse, &rowsums);
        let [dq, dk, dv] = [&dq, &dk, &dv];
        backward(&problem, &problem::Backward { dy, lse, delta, dq, dk, dv, wanted });
        match packed {
            true => (Maybe::Some(gradients.into_iter().next().unwrap()), Maybe::None, Maybe::None),
            false => given(gradients),
        }
    }
}

impl<B: AttentionOps + AttentionGradOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn attend(call: Attention<Self>, _keep: bool) -> (FloatTensor<Self>, Maybe<Self>) {
        let Attention { of, bounds, settings } = call;
        let bounds = match bounds {
            Bounds::Documents(bounds) => Bounds::Documents(bounds),
            Bounds::None => Bounds::None,
        };
        let with = move |of: Heads<B>| Attention { of, bounds: bounds.clone(), settings };
        let y = match of {
            Heads::Separate(q, k, v) => {
                Graph::<C>::output([q, k, v], [0, 1, 2], |[q, k, v], wanted| {
                    let call = with(Heads::Separate(q, k, v));
                    let (y, lse) = B::attend(call, wanted.contains(&true));
                    (y.clone(), move |dy, [q, k, v]| {
                        let (call, lse) = (with(Heads::Separate(q, k, v)), lse.expect(KEPT));
                        B::attend_backward(Backward { dy, call, y, lse, wanted }).into()
                    })
                })
            }
            Heads::Packed(qkv) => Graph::<C>::output([qkv], [0], |[qkv], [wanted]| {
                let (y, lse) = B::attend(with(Heads::Packed(qkv)), wanted);
                (y.clone(), move |dy, [qkv]| {
                    let (call, lse) = (with(Heads::Packed(qkv)), lse.expect(KEPT));
                    [B::attend_backward(Backward { dy, call, y, lse, wanted: [true; 3] }).0]
                })
            }),
        };
        (y, Maybe::None)
    }
}

/// Of what a forward whose gradients are wanted leaves.
const KEPT: &str = "the forward kept it";

/// A call with or without documents.
fn call(
    of: Heads<Dispatch>,
    heads: [usize; 2],
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Attention<Dispatch> {
    let bounds = match documents {
        Some(documents) => Bounds::Documents(documents.bounds.clone().into_dispatch()),
        None => Bounds::None,
    };
    Attention { of, bounds, settings: Settings::new(heads, options) }
}

fn separate(
    of: [Tensor<4>; 3],
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Attention<Dispatch> {
    let heads = [of[0].dims()[1], of[1].dims()[1]];
    let [q, k, v] = of.map(Tensor::into_dispatch);
    call(Heads::Separate(q, k, v), heads, documents, options)
}

/// y and the log-sum-exp of each query's scores, as the forward keeps it, past autodiff and without checks.
pub fn forward(
    of: [Tensor<4>; 3],
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    let (y, lse) = Dispatch::attend(separate(of, documents, options), true);
    (Tensor::from_dispatch(y), lse.tensor())
}

/// dq, dk and dv through the kernels, from the inputs and what [`forward`] made of them, past autodiff and without
/// checks.
pub fn backward(
    dy: Tensor<4>,
    of: [Tensor<4>; 3],
    (y, lse): (Tensor<4>, Tensor<3>),
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> [Tensor<4>; 3] {
    let (dy, y, lse) = (dy.into_dispatch(), y.into_dispatch(), lse.into_dispatch());
    let call = separate(of, documents, options);
    let of = Backward { dy, call, y, lse, wanted: [true; 3] };
    let gradients: [_; 3] = Dispatch::attend_backward(of).into();
    gradients.map(Maybe::tensor)
}

/// [`attention`](fn@super::attention) through the kernels, without its checks.
pub(crate) fn fused(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Tensor<4> {
    let (y, _) = Dispatch::attend(separate([q, k, v], documents, options), false);
    Tensor::from_dispatch(y)
}

/// [`attention_qkv`](super::attention_qkv) through the kernels, without its checks.
pub(crate) fn fused_qkv(
    qkv: Tensor<3>,
    heads: [usize; 2],
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Tensor<3> {
    let of = Heads::Packed(qkv.into_dispatch());
    Tensor::from_dispatch(Dispatch::attend(call(of, heads, documents, options), false).0)
}

//! What is launched: passes over x, and small kernels with one unit a token between them.
//!
//! Forward: [`once`] makes everything from one pass over x where it can, and mixes the streams with a layer's output before,
//! if that is wanted too; elsewhere there are [products](parts) x·φᵀ, [`apply`]
//! reads x once more, and [`token`] makes h_post and h_res.
//! Backward: [`token`] goes back to the gradients of x·φᵀ, and [`together`] takes dh_in to each stream and makes dx and dφ
//! where it can, and in place of dx what the layer before takes back of it; elsewhere [`dots`] takes dh_in to each stream
//! before, and [`input`] and a product make the others.

mod apply;
mod dots;
mod input;
#[cfg(feature = "cuda")]
mod once;
#[cfg(not(feature = "cuda"))]
#[path = "no_once.rs"]
mod once;
mod parts;
mod sinkhorn;
#[cfg(feature = "cuda")]
mod together;
#[cfg(not(feature = "cuda"))]
#[path = "no_together.rs"]
mod together;
mod token;

use super::MhcPreOptions;
use crate::autodiff::Maybe;
#[cfg(feature = "cuda")]
use crate::device::Hardware;
use crate::launch;
use crate::mhc_post;
use crate::tile::Family;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;

/// What goes in, γ in φ.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Forward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// `[B, S, n, D]`.
    pub x: FloatTensor<B>,
    /// `[n² + 2n, n·D]`.
    pub phi: FloatTensor<B>,
    /// `[3]`.
    pub alpha: FloatTensor<B>,
    /// `[n² + 2n]`.
    pub bias: FloatTensor<B>,
    /// Options.
    pub options: MhcPreOptions,
    /// The kernels that products run on.
    pub family: Option<Family>,
}

/// What the gradients are made of.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The inputs.
    #[extension_type]
    pub of: Forward<B>,
    /// The cotangent of h_in.
    #[extension_type]
    pub dh_in: Maybe<B>,
    /// That of h_post.
    #[extension_type]
    pub dh_post: Maybe<B>,
    /// That of h_res.
    #[extension_type]
    pub dh_res: Maybe<B>,
    /// x·φᵀ, as the forward left it.
    pub mix: FloatTensor<B>,
    /// The inverse root mean squares.
    pub norm: FloatTensor<B>,
    /// What dx has from elsewhere, which is added.
    #[extension_type]
    pub also: Maybe<B>,
    /// Whose gradients are wanted: x, φ, α, bias.
    pub wanted: [bool; 4],
}

/// Streams and a layer's output that are mixed first.
type Post = mhc_post::kernel::Forward<CubeBackend>;

/// What the forward leaves.
pub(crate) struct Left {
    /// The streams that were read, in one piece if they had to be copied.
    pub(crate) x: CubeTensor,
    pub(crate) h_in: CubeTensor,
    pub(crate) h_post: CubeTensor,
    pub(crate) h_res: CubeTensor,
    pub(crate) mix: CubeTensor,
    pub(crate) norm: CubeTensor,
}

/// What one pass over the streams makes.
struct Made {
    dphi: CubeTensor,
    /// The gradients of α and bias.
    totals: [CubeTensor; 2],
    /// The gradient of x, if the layer before does not take it back.
    dx: Option<CubeTensor>,
    /// Those of the streams, the output, h_post and h_res of the layer before.
    layer: Option<[CubeTensor; 4]>,
}

/// Sizes of a call.
#[derive(Clone, Copy)]
struct Dims {
    tokens: usize,
    streams: usize,
    /// Elements of a stream.
    width: usize,
    /// Of φ.
    rows: usize,
}

impl Dims {
    fn of(x: &CubeTensor) -> Self {
        let [b, s, streams, width] = x.meta.shape()[..] else { unreachable!("rank 4") };
        Self { tokens: b * s, streams, width, rows: streams * (streams + 2) }
    }

    /// Numbers of a token's h_res and h_post.
    #[cfg(feature = "cuda")]
    fn mixing(&self) -> usize {
        self.streams * (self.streams + 1)
    }

    /// Whether the bytes of φ·x of all tokens, sixteens of them, are counted in 32 bits.
    #[cfg(feature = "cuda")]
    fn counted(&self) -> bool {
        u32::try_from(4 * self.rows * self.tokens.next_multiple_of(16)).is_ok()
    }
}

/// Whether the kernels that are written for Hopper take these, in bf16: TMA wants whole sixteens of bytes, and what is small
/// of a token, h_res and φ·x, is counted in bytes, in 32 bits.
#[cfg(feature = "cuda")]
fn hopper(tensors: &[&CubeTensor], d: Dims, family: Option<Family>) -> bool {
    let fits = |of: &&CubeTensor| of.dtype == DType::BF16 && launch::begins_at_16(of);
    Hardware::of(&tensors[0].client).wgmma
        && matches!(family, None | Some(Family::Wgmma))
        && d.width.is_multiple_of(8)
        && d.counted()
        && tensors.iter().all(fits)
}

/// `[T, n·D]`.
fn flat(x: CubeTensor, d: Dims) -> CubeTensor {
    reshape(into_contiguous(x), Shape::new([d.tokens, d.streams * d.width]))
}

/// Streams that lie one after the other, or of which one stands for all, as those with which a model begins.
#[derive(Clone)]
struct Streams {
    tensor: CubeTensor,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // TMA alone reads it so
    one_for_all: bool,
}

impl Streams {
    /// Of `[B, S, n, D]`, if they lie so.
    fn find(x: &CubeTensor, d: Dims) -> Option<Self> {
        let tensor = x.clone();
        if x.is_contiguous() {
            return Some(Self { tensor, one_for_all: false });
        }
        let (shape, strides) = (x.meta.shape(), x.meta.strides());
        let one_for_all = [shape[1] * d.width, d.width, 0, 1];
        let lies_so = (0..4).all(|i| shape[i] == 1 || strides[i] == one_for_all[i]);
        lies_so.then_some(Self { tensor, one_for_all: true })
    }

    /// A copy if they do not.
    fn new(x: CubeTensor, d: Dims) -> Self {
        Self::find(&x, d).unwrap_or_else(|| Self::one_after_the_other(x))
    }

    /// A copy if they are not.
    fn one_after_the_other(x: CubeTensor) -> Self {
        Self { tensor: into_contiguous(x), one_for_all: false }
    }

    /// From a stream to the next, and from a token to the next. That TMA takes a distance of 0 is not in CUDA's documentation,
    /// but products read broadcast matrices so, too.
    #[cfg(feature = "cuda")]
    fn strides(&self, d: Dims) -> [usize; 2] {
        if self.one_for_all { [0, d.width] } else { [d.width, d.streams * d.width] }
    }
}

pub(super) fn forward(of: Forward<CubeBackend>) -> Left {
    run(of, None)
}

/// The same of the streams that a layer leaves: x of `of` is contiguous, and is written, too.
pub(crate) fn forward_after(post: Post, of: Forward<CubeBackend>) -> Left {
    // Streams that lie in another way go to two launches as they are.
    let Post { op, x, f, h_post, h_res } = post;
    let [f, h_post, h_res] = [f, h_post, h_res].map(into_contiguous);
    run(of, Some(Post { op, x, f, h_post, h_res }))
}

fn run(of: Forward<CubeBackend>, mut before: Option<Post>) -> Left {
    let Forward { op, x: streams, phi, alpha, bias, options, family } = of;
    let d = Dims::of(&streams);
    let [b, s, n, width] = streams.meta.shape()[..] else { unreachable!("rank 4") };
    let f32 = |name, shape: &[usize]| {
        launch::output(&bias, op, name, Shape::from(shape.to_vec()), DType::F32)
    };
    let h_post = f32("h_post", &[b, s, n]);
    let h_res = f32("h_res", &[b, s, n, n]);
    let norm = f32("norm", &[d.tokens]);
    let h_in = launch::output(&streams, op, "h_in", Shape::new([b, s, width]), streams.dtype);
    if d.tokens == 0 {
        let mix = f32("mix", &[0, d.rows]);
        return Left { x: streams, h_in, h_post, h_res, mix, norm };
    }
    let mut x = Streams::new(streams, d);
    let phi = into_contiguous(phi);
    let plan_for = |before: Option<&Post>| {
        once::Plan::new([&x.tensor, &phi, &h_in], before, d, options.sinkhorn > 0, family)
    };
    let mut plan = plan_for(before.as_ref());
    if let Some(post) = before.take_if(|_| plan.is_none()) {
        mhc_post::kernel::launch_forward(post, &x.tensor);
        plan = plan_for(None);
    }
    if plan.is_none() {
        x = Streams::one_after_the_other(x.tensor);
    }
    let mix = match plan {
        Some(_) => f32("mix", &[d.tokens, d.rows]),
        None => parts::mix(op, flat(x.tensor.clone(), d), phi.clone(), d, family),
    };
    let given = token::Given {
        mix: &mix,
        norm: &norm,
        alpha: &into_contiguous(alpha),
        bias: &into_contiguous(bias.clone()),
        options,
        d,
    };
    match plan {
        Some(plan) => plan.run(op, &x, before.as_ref(), &phi, &given, [&h_in, &h_post, &h_res]),
        None => {
            apply::launch(flat(x.tensor.clone(), d), &given, &h_in);
            token::forward(&given, &h_post, &h_res);
        }
    }
    Left { x: x.tensor, h_in, h_post, h_res, mix, norm }
}

/// dx, dφ, dα and dbias, those that are wanted.
pub(crate) fn backward(backward: Backward<CubeBackend>) -> [Option<CubeTensor>; 4] {
    backward_through(backward, None).0
}

/// The same; in place of dx all gradients of the layer `before`, whose streams x is, if one pass makes them.
pub(crate) fn backward_through(
    backward: Backward<CubeBackend>,
    before: Option<&Post>,
) -> ([Option<CubeTensor>; 4], Option<[CubeTensor; 4]>) {
    let Backward { of, dh_in, dh_post, dh_res, mix, norm, also, wanted } = backward;
    let Forward { op, x, phi, alpha, bias, options, family } = of;
    let d = Dims::of(&x);
    if d.tokens == 0 {
        let zeros = |of: &CubeTensor| launch::zeros(of, of.meta.shape().clone(), of.dtype);
        let inputs = [&x, &phi, &alpha, &bias];
        return ([0, 1, 2, 3].map(|i| wanted[i].then(|| zeros(inputs[i]))), None);
    }
    let also = also.option().map(|also| flat(also, d));
    let shape = x.meta.shape().clone();
    let x = Streams::new(x, d);
    let dh_in = dh_in.option().map(into_contiguous);
    let given = token::Given {
        mix: &mix,
        norm: &norm,
        alpha: &into_contiguous(alpha),
        bias: &into_contiguous(bias),
        options,
        d,
    };
    let phi = into_contiguous(phi);
    let plan = match (&dh_in, wanted) {
        (Some(dh_in), [true, true, ..]) => {
            together::Plan::new([&x.tensor, dh_in], also.as_ref(), before, d, family)
        }
        _ => None,
    };
    let (post, res) = (dh_post.option().map(into_contiguous), dh_res.option().map(into_contiguous));
    if let (Some(plan), Some(dh_in)) = (plan, &dh_in) {
        let cotangents = token::Cotangents { dots: None, later: true, post, res };
        let back = token::backward(op, &given, cotangents);
        let Made { dphi, totals: [dalpha, dbias], dx, layer } =
            plan.run(op, &x, [&phi, dh_in], &given, &back, also.as_ref(), shape);
        let [dalpha, dbias] = [wanted[2].then_some(dalpha), wanted[3].then_some(dbias)];
        return ([dx, Some(dphi), dalpha, dbias], layer);
    }
    let x = flat(x.tensor, d);
    let dots = dh_in.as_ref().map(|dh_in| dots::launch(op, &x, dh_in, d));
    let cotangents = token::Cotangents { dots, later: false, post, res };
    let token::Back { dm, along, weights, sums, .. } = token::backward(op, &given, cotangents);
    let [dalpha, dbias] = sums.add_up(op, [wanted[2], wanted[3]]);
    let dx = wanted[0].then(|| launch::output(&x, op, "grad.x", shape, x.dtype));
    if let Some(dx) = &dx {
        let gradients =
            input::Gradients { dm: &dm, along: &along, weights: &weights, also: also.as_ref() };
        input::launch(&x, &phi, dh_in.as_ref(), gradients, d, dx);
    }
    let dphi = wanted[1].then(|| parts::of_phi(op, x, dm, d, family));
    ([dx, dphi, dalpha, dbias], None)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::Dims;

    #[test]
    fn bytes_of_small_things_are_counted_in_32_bits() {
        let most = (1 << 32) / 96 / 16 * 16;
        let of = |tokens| Dims { tokens, streams: 4, width: 8, rows: 24 };
        assert!(of(most).counted());
        assert!(!of(most + 1).counted());
    }
}

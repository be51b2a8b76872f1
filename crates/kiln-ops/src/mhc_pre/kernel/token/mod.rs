//! From x·φᵀ of a token to h_post and h_res, and from their gradients back: one unit a token, which reads and writes all
//! there is of it in vectors. Neighbours' numbers are far apart, and each access of a warp goes to as many lines.

mod backward;

pub(super) use backward::{Back, Cotangents, backward};
#[cfg(feature = "cuda")]
pub(super) use backward::{Later, Totals};

use super::{Dims, MhcPreOptions, sinkhorn};
use crate::exponential::{self, has_ptx};
use crate::launch::{self, Rows};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Tokens of a cube, or half as many.
const UNITS: u32 = 64;

/// 1 / (1 + e^-x).
#[cube]
pub(super) fn sigmoid(x: f32, #[comptime] ptx: bool) -> f32 {
    exponential::sigmoid::<Const<1>>(Vector::new(x), ptx).extract(0usize)
}

/// What a token's numbers are made of.
pub(super) struct Given<'a> {
    /// x·φᵀ.
    pub(super) mix: &'a CubeTensor,
    pub(super) norm: &'a CubeTensor,
    pub(super) alpha: &'a CubeTensor,
    pub(super) bias: &'a CubeTensor,
    pub(super) options: MhcPreOptions,
    pub(super) d: Dims,
}

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    streams: usize,
    sinkhorn: bool,
    ptx: bool,
}

impl Plan {
    fn new(given: &Given<'_>, client: &Client) -> Self {
        Self {
            streams: given.d.streams,
            sinkhorn: given.options.sinkhorn > 0,
            ptx: has_ptx(client),
        }
    }

    fn rows(&self) -> usize {
        self.streams * (self.streams + 2)
    }
}

/// Which α a row of φ belongs to.
fn part(j: usize, n: usize) -> usize {
    (j / n).min(2)
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    tokens: usize,
    /// From a row of x·φᵀ to the next.
    mix: usize,
    repeats: usize,
    hc_eps: f32,
    /// Elements of a token.
    width: f32,
}

impl Given<'_> {
    fn sizes(&self, mix: &Rows) -> SizesLaunch {
        let (d, options) = (self.d, self.options);
        let width = (d.streams * d.width) as f32;
        SizesLaunch::new(d.tokens, mix.stride, options.sinkhorn, options.hc_eps as f32, width)
    }
}

/// What x·φᵀ is made to logits with.
#[derive(CubeType, CubeLaunch)]
struct Inputs {
    norm: Box<[f32]>,
    alpha: Box<[f32]>,
    bias: Box<[f32]>,
}

/// So many neighbouring f32 from element `first` on, whole vectors.
#[cube]
fn take<N: Size>(from: &[Vector<f32, N>], first: usize, #[comptime] count: usize) -> Array<f32> {
    let size = N::value();
    let mut taken = Array::<f32>::new(count);
    #[unroll]
    for i in 0..comptime!(count / size) {
        let vector = from[first / size + i];
        #[unroll]
        for e in 0..size {
            taken[comptime!(i * size + e)] = vector.extract(e);
        }
    }
    taken
}

/// Writes them so.
#[cube]
fn put<N: Size>(
    to: &mut [Vector<f32, N>],
    first: usize,
    numbers: &Array<f32>,
    #[comptime] count: usize,
) {
    let size = N::value();
    #[unroll]
    for i in 0..comptime!(count / size) {
        let mut vector = Vector::<f32, N>::new(0.0);
        #[unroll]
        for e in 0..size {
            vector.insert(e, numbers[comptime!(i * size + e)]);
        }
        to[first / size + i] = vector;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<N: Size>(
    mix: &[Vector<f32, N>],
    inputs: &Inputs,
    h_post: &mut [Vector<f32, N>],
    h_res: &mut [Vector<f32, N>],
    sizes: Sizes,
    #[comptime] plan: Plan,
) {
    let n = comptime!(plan.streams);
    let token = ABSOLUTE_POS;
    if token < sizes.tokens {
        let mix = take(mix, token * sizes.mix, comptime!(plan.rows()));
        let r = inputs.norm[token];
        let mut post = Array::<f32>::new(n);
        #[unroll]
        for i in 0..n {
            let y = mix[comptime!(n + i)] * r;
            let s = sigmoid(inputs.alpha[1] * y + inputs.bias[comptime!(n + i)], plan.ptx);
            post[i] = 2.0 * s;
        }
        put(h_post, token * n, &post, n);
        let mut res = logits(inputs, &mix, r, plan);
        if comptime!(plan.sinkhorn) {
            sinkhorn::project(&mut res, sizes.repeats as u32, sizes.hc_eps, n, plan.ptx);
        }
        put(h_res, token * comptime!(n * n), &res, comptime!(n * n));
    }
}

/// What Sinkhorn is given.
#[cube]
fn logits(of: &Inputs, mix: &Array<f32>, r: f32, #[comptime] plan: Plan) -> Array<f32> {
    let n = comptime!(plan.streams);
    let mut res = Array::<f32>::new(comptime!(n * n));
    #[unroll]
    for i in 0..comptime!(n * n) {
        let j = comptime!(2 * n + i);
        res[i] = of.alpha[2] * (mix[j] * r) + of.bias[j];
    }
    res
}

/// h_post and h_res.
pub(super) fn forward(given: &Given<'_>, h_post: &CubeTensor, h_res: &CubeTensor) {
    let client = &given.norm.client;
    let plan = Plan::new(given, client);
    let mix = Rows::new(given.mix.clone());
    let size = given.vector_size(&mix, &[h_post, h_res]);
    let address = launch::address_type(&[&mix.tensor, h_res]);
    launch::plans::note("mhc_pre token forward", &(plan, size, address), &[]);
    let sizes = given.sizes(&mix);
    // SAFETY: tokens are checked against their number, of which all tensors have as many rows, of whole vectors.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            launch::grid(client, given.d.tokens.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address,
            size,
            mix.tensor.into_buffer_arg(),
            given.inputs(),
            h_post.clone().into_buffer_arg(),
            h_res.clone().into_buffer_arg(),
            sizes,
            plan,
        );
    }
}

impl Given<'_> {
    fn inputs(&self) -> InputsLaunch {
        InputsLaunch::new(
            self.norm.clone().into_buffer_arg(),
            self.alpha.clone().into_buffer_arg(),
            self.bias.clone().into_buffer_arg(),
        )
    }

    /// The widest vectors of which what there is of a token in each of these consists.
    fn vector_size(&self, mix: &Rows, others: &[&CubeTensor]) -> usize {
        let per_token = |of: &CubeTensor| {
            let width = of.meta.num_elements() / self.d.tokens;
            let shape = Shape::new([self.d.tokens, width]);
            Rows::new(burn_cubecl::ops::reshape(of.clone(), shape))
        };
        let others: Vec<Rows> = others.iter().map(|of| per_token(of)).collect();
        let all: Vec<&Rows> = others.iter().chain([mix]).collect();
        launch::vector_size(&self.norm.client, DType::F32, &all)
    }
}

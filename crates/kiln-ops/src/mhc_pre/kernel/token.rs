//! From x·φᵀ of a token to h_post and h_res, and from their gradients back: one unit a token.

use super::{Dims, MhcPreOptions, sinkhorn};
use crate::exponential::{self, has_ptx};
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine, RowUnits, Sums, column_sum};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Tokens of a cube, or half as many.
const UNITS: u32 = 64;
/// f32 of shared memory for the sums of a cube.
const SHARED: usize = 4096;

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

#[derive(CubeType, CubeLaunch)]
struct Inputs {
    mix: Box<[f32]>,
    norm: Box<[f32]>,
    alpha: Box<[f32]>,
    bias: Box<[f32]>,
}

/// y of row `j`.
#[cube]
fn y(of: &Inputs, token: usize, r: f32, j: usize, sizes: &Sizes) -> f32 {
    of.mix[token * sizes.mix + j] * r
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel(
    inputs: &Inputs,
    h_post: &mut [f32],
    h_res: &mut [f32],
    sizes: Sizes,
    #[comptime] plan: Plan,
) {
    let n = comptime!(plan.streams);
    let token = ABSOLUTE_POS;
    if token < sizes.tokens {
        let r = inputs.norm[token];
        #[unroll]
        for i in 0..n {
            let y = y(inputs, token, r, comptime!(n + i), &sizes);
            let s = sigmoid(inputs.alpha[1] * y + inputs.bias[comptime!(n + i)], plan.ptx);
            h_post[token * n + i] = 2.0 * s;
        }
        let mut res = logits(inputs, token, r, &sizes, plan);
        if comptime!(plan.sinkhorn) {
            sinkhorn::project(&mut res, sizes.repeats as u32, sizes.hc_eps, n, plan.ptx);
        }
        #[unroll]
        for i in 0..comptime!(n * n) {
            h_res[token * comptime!(n * n) + i] = res[i];
        }
    }
}

/// What Sinkhorn is given.
#[cube]
fn logits(of: &Inputs, token: usize, r: f32, sizes: &Sizes, #[comptime] plan: Plan) -> Array<f32> {
    let n = comptime!(plan.streams);
    let mut res = Array::<f32>::new(comptime!(n * n));
    #[unroll]
    for i in 0..comptime!(n * n) {
        let j = comptime!(2 * n + i);
        res[i] = of.alpha[2] * y(of, token, r, j, sizes) + of.bias[j];
    }
    res
}

/// h_post and h_res.
pub(super) fn forward(given: &Given<'_>, h_post: &CubeTensor, h_res: &CubeTensor) {
    let client = &given.norm.client;
    let plan = Plan::new(given, client);
    let mix = Rows::new(given.mix.clone());
    let address = launch::address_type(&[&mix.tensor, h_res]);
    launch::plans::note("mhc_pre token forward", &(plan, address), &[]);
    let sizes = given.sizes(&mix);
    // SAFETY: tokens are checked against their number, of which all tensors have as many rows.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            launch::grid(client, given.d.tokens.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address,
            given.inputs(mix),
            h_post.clone().into_buffer_arg(),
            h_res.clone().into_buffer_arg(),
            sizes,
            plan,
        );
    }
}

impl Given<'_> {
    fn inputs(&self, mix: Rows) -> InputsLaunch {
        InputsLaunch::new(
            mix.tensor.into_buffer_arg(),
            self.norm.clone().into_buffer_arg(),
            self.alpha.clone().into_buffer_arg(),
            self.bias.clone().into_buffer_arg(),
        )
    }
}

/// What the outputs give: ⟨dh_in, x[i]⟩, and the cotangents of h_post and h_res.
pub(super) struct Cotangents {
    pub(super) dots: Option<CubeTensor>,
    pub(super) post: Option<CubeTensor>,
    pub(super) res: Option<CubeTensor>,
}

/// What a backward needs of each token, and the gradients of α and bias.
pub(super) struct Back {
    /// The gradient of x·φᵀ, `[T, rows]`.
    pub(super) dm: CubeTensor,
    /// The factor of X.
    pub(super) along: CubeTensor,
    /// h_pre, `[T, n]`.
    pub(super) weights: CubeTensor,
    pub(super) dalpha: Option<CubeTensor>,
    pub(super) dbias: Option<CubeTensor>,
}

#[derive(CubeType, CubeLaunch)]
struct Pulled {
    dots: Box<[f32]>,
    post: Box<[f32]>,
    res: Box<[f32]>,
}

#[derive(CubeType, CubeLaunch)]
struct Results {
    dm: Box<[f32]>,
    along: Box<[f32]>,
    weights: Box<[f32]>,
    /// The sums that tokens were divided by: all tokens of one sum, of one division after the other.
    sums: Box<[f32]>,
    /// Sums over the tokens of a cube.
    bias: Box<[f32]>,
    alpha: Box<[f32]>,
}

/// Which cotangents there are, and the units whose sums are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Way {
    dots: bool,
    post: bool,
    res: bool,
    row: RowUnits,
}

/// Keeps the sums of a division.
#[cube]
fn keep(
    to: &mut [f32],
    sums: &Array<f32>,
    number: usize,
    token: usize,
    tokens: usize,
    #[comptime] n: usize,
) {
    #[unroll]
    for i in 0..n {
        to[(number * n + i) * tokens + token] = sums[i];
    }
}

#[cube]
fn kept(
    from: &[f32],
    number: usize,
    token: usize,
    tokens: usize,
    #[comptime] n: usize,
) -> Array<f32> {
    let mut sums = Array::<f32>::new(n);
    #[unroll]
    for i in 0..n {
        sums[i] = from[(number * n + i) * tokens + token];
    }
    sums
}

/// The gradient of the logits from that of h_res, in its place.
#[cube]
fn back_through_sinkhorn(
    g: &mut Array<f32>,
    logits: &Array<f32>,
    sums: &mut [f32],
    token: usize,
    sizes: &Sizes,
    #[comptime] n: usize,
    #[comptime] ptx: bool,
) {
    let tokens = sizes.tokens;
    let mut a = Array::<f32>::new(comptime!(n * n));
    #[unroll]
    for i in 0..comptime!(n * n) {
        a[i] = logits[i];
    }
    sinkhorn::softmax(&mut a, n, ptx);
    let mut p = Array::<f32>::new(comptime!(n * n));
    #[unroll]
    for i in 0..comptime!(n * n) {
        p[i] = a[i];
    }
    sinkhorn::add(&mut a, sizes.hc_eps, n);
    let first = sinkhorn::divide(&mut a, sizes.hc_eps, n, false, ptx);
    for repeat in 1..sizes.repeats {
        let rows = sinkhorn::divide(&mut a, sizes.hc_eps, n, true, ptx);
        keep(sums, &rows, 2 * repeat - 2, token, tokens, n);
        let columns = sinkhorn::divide(&mut a, sizes.hc_eps, n, false, ptx);
        keep(sums, &columns, 2 * repeat - 1, token, tokens, n);
    }
    for back in 1..sizes.repeats {
        let repeat = sizes.repeats - back;
        let columns = kept(&*sums, 2 * repeat - 1, token, tokens, n);
        sinkhorn::undivide(g, &mut a, &columns, n, false, ptx);
        let rows = kept(&*sums, 2 * repeat - 2, token, tokens, n);
        sinkhorn::undivide(g, &mut a, &rows, n, true, ptx);
    }
    sinkhorn::undivide(g, &mut a, &first, n, false, ptx);
    sinkhorn::unsoftmax(g, &p, n);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<C: Combine>(
    inputs: &Inputs,
    pulled: &Pulled,
    out: &mut Results,
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[comptime] way: Way,
) {
    let n = comptime!(plan.streams);
    let rows = comptime!(plan.rows());
    // Those past the end do the last one again, and add and write nothing: all units meet the barriers.
    let first = CUBE_POS * comptime!(way.row.units as usize);
    let at = first + UNIT_POS_X as usize;
    let (token, own) = (min(at, sizes.tokens - 1), at < sizes.tokens);
    let r = inputs.norm[token];
    // The gradients of what the sigmoids and Sinkhorn are given.
    let mut g = Array::<f32>::new(rows);
    #[unroll]
    for i in 0..n {
        let y = y(inputs, token, r, i, &sizes);
        let s = sigmoid(inputs.alpha[0] * y + inputs.bias[i], plan.ptx);
        if comptime!(way.dots) {
            g[i] = pulled.dots[token * n + i] * s * (1.0 - s);
        }
        if own {
            out.weights[token * n + i] = s + sizes.hc_eps;
        }
    }
    if comptime!(way.post) {
        #[unroll]
        for i in 0..n {
            let j = comptime!(n + i);
            let y = y(inputs, token, r, j, &sizes);
            let s = sigmoid(inputs.alpha[1] * y + inputs.bias[j], plan.ptx);
            g[j] = 2.0 * pulled.post[token * n + i] * s * (1.0 - s);
        }
    }
    if comptime!(way.res) {
        let mut res = Array::<f32>::new(comptime!(n * n));
        #[unroll]
        for i in 0..comptime!(n * n) {
            res[i] = pulled.res[token * comptime!(n * n) + i];
        }
        if comptime!(plan.sinkhorn) {
            let logits = logits(inputs, token, r, &sizes, plan);
            // Those past the end would write the sums of the last token beside it.
            if own {
                back_through_sinkhorn(&mut res, &logits, &mut out.sums, token, &sizes, n, plan.ptx);
            }
        }
        #[unroll]
        for i in 0..comptime!(n * n) {
            g[comptime!(2 * n + i)] = res[i];
        }
    }
    let mut along = f32::new(0.0);
    let mut sums = C::identity();
    #[unroll]
    for j in 0..rows {
        let part = comptime!(part(j, n));
        let y = y(inputs, token, r, j, &sizes);
        let dy = inputs.alpha[part] * g[j];
        along += dy * y;
        if own {
            out.dm[token * rows + j] = r * dy;
            sums[j] = g[j];
            sums[comptime!(rows + part)] += g[j] * y;
        }
    }
    if own {
        out.along[token] = -along * r * r / sizes.width;
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(C::REGISTERS * way.row.shared()));
    sync_cube();
    reduce::rows::<C>(&mut sums, &mut shared, way.row);
    if UNIT_POS_X == 0 && first < sizes.tokens {
        #[unroll]
        for j in 0..rows {
            out.bias[CUBE_POS * rows + j] = sums[j];
        }
        #[unroll]
        for part in 0..3 {
            out.alpha[CUBE_POS * 3 + part] = sums[comptime!(rows + part)];
        }
    }
}

pub(super) fn backward(
    op: &'static str,
    given: &Given<'_>,
    cotangents: Cotangents,
    wanted: [bool; 2],
) -> Back {
    let launch = match given.d.streams {
        1 => run::<Sums<6>>,
        2 => run::<Sums<11>>,
        3 => run::<Sums<18>>,
        4 => run::<Sums<27>>,
        5 => run::<Sums<38>>,
        6 => run::<Sums<51>>,
        7 => run::<Sums<66>>,
        8 => run::<Sums<83>>,
        _ => unreachable!("the number of streams has been checked"),
    };
    launch(op, given, cotangents, wanted)
}

fn run<C: Combine>(
    op: &'static str,
    given: &Given<'_>,
    cotangents: Cotangents,
    [alpha_wanted, bias_wanted]: [bool; 2],
) -> Back {
    let (d, like) = (given.d, given.norm);
    let client = &like.client;
    let plan = Plan::new(given, client);
    let Cotangents { dots, post, res } = cotangents;
    let row = RowUnits::new(client, UNITS, 1);
    let row = match C::REGISTERS * row.shared() <= SHARED {
        true => row,
        false => RowUnits::new(client, UNITS / 2, 1),
    };
    let units = row.units as usize;
    let way = Way { dots: dots.is_some(), post: post.is_some(), res: res.is_some(), row };
    let cubes = d.tokens.div_ceil(units);
    let f32 =
        |name, shape: [usize; 2]| launch::output(like, op, name, Shape::new(shape), DType::F32);
    let dm = f32("dm", [d.tokens, d.rows]);
    let along = f32("along", [d.tokens, 1]);
    let weights = f32("weights", [d.tokens, d.streams]);
    let (bias, alpha) = (f32("partial bias", [cubes, d.rows]), f32("partial alpha", [cubes, 3]));
    let divisions = 2 * given.options.sinkhorn.max(1) - 2;
    let sums = match way.res && divisions > 0 {
        true => f32("sums", [divisions * d.streams, d.tokens]),
        false => launch::unused(like, DType::F32),
    };
    let unused = || launch::unused(like, DType::F32);
    let mix = Rows::new(given.mix.clone());
    let address = launch::address_type(&[&mix.tensor, &dm, &sums]);
    launch::plans::note("mhc_pre token backward", &(plan, way, address), &[]);
    let sizes = given.sizes(&mix);
    let argument = |of: Option<CubeTensor>| of.unwrap_or_else(unused).into_buffer_arg();
    // SAFETY: tokens are checked against their number, of which all tensors have as many rows; cotangents that there
    // are not are not read.
    unsafe {
        backward_kernel::launch_unchecked::<C>(
            client,
            launch::grid(client, cubes),
            row.cube_dim(),
            address,
            given.inputs(mix),
            PulledLaunch::new(argument(dots), argument(post), argument(res)),
            ResultsLaunch::new(
                dm.clone().into_buffer_arg(),
                along.clone().into_buffer_arg(),
                weights.clone().into_buffer_arg(),
                sums.into_buffer_arg(),
                bias.clone().into_buffer_arg(),
                alpha.clone().into_buffer_arg(),
            ),
            sizes,
            plan,
            way,
        );
    }
    let total = |name, partial: CubeTensor, width: usize| {
        let out = launch::output(like, op, name, Shape::new([width]), DType::F32);
        column_sum(partial, cubes, &out);
        out
    };
    let dalpha = alpha_wanted.then(|| total("grad.alpha", alpha, 3));
    let dbias = bias_wanted.then(|| total("grad.bias", bias, d.rows));
    Back { dm, along, weights, dalpha, dbias }
}

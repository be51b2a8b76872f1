//! From the gradients of what a token is mixed with back to that of x·φᵀ.

use super::super::sinkhorn;
use super::{Given, Inputs, Plan, Sizes, UNITS, logits, part, put, sigmoid, take};
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine, RowUnits, Sums, column_sum};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// f32 of shared memory for the sums of a cube.
const SHARED: usize = 4096;
/// f32 of shared memory that a driver may take.
const BESIDE: usize = 512;

/// What the outputs give: ⟨dh_in, x[i]⟩, `[T, n]`, and the cotangents of h_post and h_res.
pub(in super::super) struct Cotangents {
    /// None if there is no dh_in, or they come later.
    pub(in super::super) dots: Option<CubeTensor>,
    /// They are found when dx is made.
    pub(in super::super) later: bool,
    pub(in super::super) post: Option<CubeTensor>,
    pub(in super::super) res: Option<CubeTensor>,
}

/// What a backward needs of each token, and what cubes have of the gradients of α and bias.
pub(in super::super) struct Back {
    /// The gradient of x·φᵀ, `[T, rows]`. Its first n rows are to be multiplied with ⟨dh_in, x[i]⟩ if these come later.
    pub(in super::super) dm: CubeTensor,
    /// The factor of X.
    pub(in super::super) along: CubeTensor,
    /// What ⟨dh_in, x[i]⟩ are multiplied with if they come later.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // they come later there alone
    pub(in super::super) later: Option<Later>,
    /// h_pre, `[T, n]`.
    pub(in super::super) weights: CubeTensor,
    pub(in super::super) sums: Totals,
}

/// Of the first n rows the slopes of the sigmoids and y, `[T, n]`.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // as above
pub(in super::super) struct Later {
    pub(in super::super) slopes: CubeTensor,
    pub(in super::super) y: CubeTensor,
}

/// What cubes have of dbias and dα: a row each.
pub(in super::super) struct Totals {
    pub(in super::super) bias: CubeTensor,
    pub(in super::super) alpha: CubeTensor,
}

#[derive(CubeType, CubeLaunch)]
struct Pulled<N: Size> {
    dots: Box<[Vector<f32, N>]>,
    post: Box<[Vector<f32, N>]>,
    res: Box<[Vector<f32, N>]>,
}

#[derive(CubeType, CubeLaunch)]
struct Results<N: Size> {
    dm: Box<[Vector<f32, N>]>,
    along: Box<[f32]>,
    slopes: Box<[Vector<f32, N>]>,
    y: Box<[Vector<f32, N>]>,
    weights: Box<[Vector<f32, N>]>,
    /// The sums that tokens were divided by, if a cube has no memory for them: all tokens of one sum, of one division after
    /// the other.
    sums: Box<[f32]>,
    /// Sums over the tokens of a cube.
    bias: Box<[f32]>,
    alpha: Box<[f32]>,
}

/// Which cotangents there are, the units whose sums are added up, and where those of divisions are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Way {
    dots: bool,
    /// They come later.
    later: bool,
    post: bool,
    res: bool,
    row: RowUnits,
    /// f32 of shared memory for the sums that tokens are divided by; none if those go to global memory.
    room_for_sums: usize,
}

/// Where the sums of a token's divisions are kept: which of those of a sum, and how many there are.
#[derive(CubeType, Clone, Copy)]
struct Place {
    at: usize,
    size: usize,
}

/// Keeps the sums of a division.
#[cube]
fn keep(to: &mut [f32], sums: &Array<f32>, number: usize, place: &Place, #[comptime] n: usize) {
    #[unroll]
    for i in 0..n {
        to[(number * n + i) * place.size + place.at] = sums[i];
    }
}

#[cube]
fn kept_sums(from: &[f32], number: usize, place: &Place, #[comptime] n: usize) -> Array<f32> {
    let mut sums = Array::<f32>::new(n);
    #[unroll]
    for i in 0..n {
        sums[i] = from[(number * n + i) * place.size + place.at];
    }
    sums
}

/// The gradient of the logits from that of h_res, in its place.
#[cube]
fn back_through_sinkhorn(
    g: &mut Array<f32>,
    logits: &Array<f32>,
    sums: &mut [f32],
    place: Place,
    sizes: &Sizes,
    #[comptime] n: usize,
    #[comptime] ptx: bool,
) {
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
        keep(sums, &rows, 2 * repeat - 2, &place, n);
        let columns = sinkhorn::divide(&mut a, sizes.hc_eps, n, false, ptx);
        keep(sums, &columns, 2 * repeat - 1, &place, n);
    }
    sinkhorn::times(g, &a, n);
    for back in 1..sizes.repeats {
        let repeat = sizes.repeats - back;
        let columns = kept_sums(&*sums, 2 * repeat - 1, &place, n);
        sinkhorn::undivide(g, &mut a, &columns, n, false);
        let rows = kept_sums(&*sums, 2 * repeat - 2, &place, n);
        sinkhorn::undivide(g, &mut a, &rows, n, true);
    }
    sinkhorn::undivide(g, &mut a, &first, n, false);
    sinkhorn::unsoftmax(g, &p, sizes.hc_eps, n, ptx);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<C: Combine, N: Size>(
    mix: &[Vector<f32, N>],
    inputs: &Inputs,
    pulled: &Pulled<N>,
    out: &mut Results<N>,
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
    let mix = take(mix, token * sizes.mix, rows);
    let r = inputs.norm[token];
    // The gradients of what the sigmoids and Sinkhorn are given.
    let mut g = Array::<f32>::new(rows);
    let mut weights = Array::<f32>::new(n);
    // Of ⟨dh_in, x[i]⟩ that come later dm has the factors in its first rows.
    let mut dm = Array::<f32>::new(rows);
    let (mut slopes, mut ys) = (Array::<f32>::new(n), Array::<f32>::new(n));
    let mut dots = Array::<f32>::new(n);
    if comptime!(way.dots) {
        dots = take(&pulled.dots, token * n, n);
    }
    #[unroll]
    for i in 0..n {
        let y = mix[i] * r;
        let s = sigmoid(inputs.alpha[0] * y + inputs.bias[i], plan.ptx);
        if comptime!(way.dots) {
            g[i] = dots[i] * s * (1.0 - s);
        }
        if comptime!(way.later) {
            slopes[i] = s * (1.0 - s);
            ys[i] = y;
            dm[i] = r * (inputs.alpha[0] * slopes[i]);
        }
        weights[i] = s + sizes.hc_eps;
    }
    if comptime!(way.post) {
        let post = take(&pulled.post, token * n, n);
        #[unroll]
        for i in 0..n {
            let j = comptime!(n + i);
            let y = mix[j] * r;
            let s = sigmoid(inputs.alpha[1] * y + inputs.bias[j], plan.ptx);
            g[j] = 2.0 * post[i] * s * (1.0 - s);
        }
    }
    if comptime!(way.res) {
        let mut res = take(&pulled.res, token * comptime!(n * n), comptime!(n * n));
        if comptime!(plan.sinkhorn) {
            let logits = logits(inputs, &mix, r, plan);
            if comptime!(way.room_for_sums > 0) {
                let mut divided_by = Shared::<[f32]>::new_slice(way.room_for_sums);
                let size = comptime!(way.row.units as usize).runtime();
                let place = Place { at: UNIT_POS_X as usize, size };
                back_through_sinkhorn(
                    &mut res,
                    &logits,
                    &mut divided_by,
                    place,
                    &sizes,
                    n,
                    plan.ptx,
                );
            } else if own {
                // Those past the end would write the sums of the last token beside it.
                let place = Place { at: token, size: sizes.tokens };
                let sums = &mut out.sums;
                back_through_sinkhorn(&mut res, &logits, sums, place, &sizes, n, plan.ptx);
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
        let y = mix[j] * r;
        let dy = inputs.alpha[part] * g[j];
        along += dy * y;
        if comptime!(!way.later || j >= n) {
            dm[j] = r * dy;
        }
        if own {
            sums[j] = g[j];
            sums[comptime!(rows + part)] += g[j] * y;
        }
    }
    if own {
        put(&mut out.dm, token * rows, &dm, rows);
        put(&mut out.weights, token * n, &weights, n);
        if comptime!(way.later) {
            put(&mut out.slopes, token * n, &slopes, n);
            put(&mut out.y, token * n, &ys, n);
        }
        out.along[token] = -along * r * r / sizes.width;
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(C::REGISTERS * way.row.shared()));
    // It may be where the sums of divisions were: all units are done with them.
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

pub(in super::super) fn backward(
    op: &'static str,
    given: &Given<'_>,
    cotangents: Cotangents,
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
    launch(op, given, cotangents)
}

fn run<C: Combine>(op: &'static str, given: &Given<'_>, cotangents: Cotangents) -> Back {
    let (d, like) = (given.d, given.norm);
    let client = &like.client;
    let plan = Plan::new(given, client);
    let Cotangents { dots, later, post, res } = cotangents;
    let row = units_of_sums::<C>(client);
    let units = row.units as usize;
    let (has_post, has_res) = (post.is_some(), res.is_some());
    let divisions = 2 * given.options.sinkhorn.max(1) - 2;
    let wanted = if has_res { divisions * d.streams * units } else { 0 };
    // The sums of divisions go to global memory, which is slower, where fewer than four cubes would have room for them.
    let room = client.properties().hardware.max_shared_memory_size / size_of::<f32>() / 4;
    let fits = wanted + C::REGISTERS * row.shared() + BESIDE <= room;
    let room_for_sums = if fits { wanted } else { 0 };
    let way = Way { dots: dots.is_some(), later, post: has_post, res: has_res, row, room_for_sums };
    let cubes = d.tokens.div_ceil(units);
    let f32 =
        |name, shape: [usize; 2]| launch::output(like, op, name, Shape::new(shape), DType::F32);
    let dm = f32("dm", [d.tokens, d.rows]);
    let along = f32("along", [d.tokens, 1]);
    let later = later.then(|| {
        let [slopes, y] = ["slopes", "y"].map(|name| f32(name, [d.tokens, d.streams]));
        Later { slopes, y }
    });
    let weights = f32("weights", [d.tokens, d.streams]);
    let (bias, alpha) = (f32("partial bias", [cubes, d.rows]), f32("partial alpha", [cubes, 3]));
    let sums = match wanted > 0 && room_for_sums == 0 {
        true => f32("sums", [divisions * d.streams, d.tokens]),
        false => launch::unused(like, DType::F32),
    };
    let unused = || launch::unused(like, DType::F32);
    let mix = Rows::new(given.mix.clone());
    let of_tokens = [Some(&dm), Some(&weights), dots.as_ref(), post.as_ref(), res.as_ref()];
    let of_tokens: Vec<&CubeTensor> = of_tokens.into_iter().flatten().collect();
    let size = given.vector_size(&mix, &of_tokens);
    let address = launch::address_type(&[&mix.tensor, &dm, &sums]);
    launch::plans::note("mhc_pre token backward", &(plan, way, size, address), &[]);
    let sizes = given.sizes(&mix);
    let argument = |of: Option<CubeTensor>| of.unwrap_or_else(unused).into_buffer_arg();
    // SAFETY: tokens are checked against their number, of which all tensors have as many rows, of whole vectors;
    // cotangents that there are not are not read.
    unsafe {
        backward_kernel::launch_unchecked::<C>(
            client,
            launch::grid(client, cubes),
            row.cube_dim(),
            address,
            size,
            mix.tensor.into_buffer_arg(),
            given.inputs(),
            PulledLaunch::new(argument(dots), argument(post), argument(res)),
            ResultsLaunch::new(
                dm.clone().into_buffer_arg(),
                along.clone().into_buffer_arg(),
                argument(later.as_ref().map(|later| later.slopes.clone())),
                argument(later.as_ref().map(|later| later.y.clone())),
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
    Back { dm, along, later, weights, sums: Totals { bias, alpha } }
}

/// The units whose sums are added up.
fn units_of_sums<C: Combine>(client: &Client) -> RowUnits {
    let row = RowUnits::new(client, UNITS, 1);
    match C::REGISTERS * row.shared() <= SHARED {
        true => row,
        false => RowUnits::new(client, UNITS / 2, 1),
    }
}

impl Totals {
    /// dα and dbias, those that are wanted.
    pub(in super::super) fn add_up(
        self,
        op: &'static str,
        wanted: [bool; 2],
    ) -> [Option<CubeTensor>; 2] {
        let Self { bias, alpha } = self;
        let total = |name, partial: CubeTensor| {
            let [cubes, width] = partial.meta.shape()[..] else { unreachable!("rank 2") };
            let out = launch::output(&partial, op, name, Shape::new([width]), DType::F32);
            column_sum(partial, cubes, &out);
            out
        };
        let dalpha = wanted[0].then(|| total("grad.alpha", alpha));
        let dbias = wanted[1].then(|| total("grad.bias", bias));
        [dalpha, dbias]
    }
}

//! The kernels: the units of a token share its columns, and each has the same columns of all streams.
//!
//! Forward: one pass. Backward: one pass for all four gradients. The products with dy of a unit's columns are added up in
//! registers and over the units of the token in a fixed order, so two runs agree bit for bit.

use super::MAX_STREAMS;
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine, RowUnits, Sums};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Vectors of a stream that a unit takes, one after another, before there are more units.
const CHUNKS: usize = 2;
/// Units of a cube, of one token or of several.
const UNITS: u32 = 128;
/// f32 of shared memory for the sums of a cube.
const SHARED: usize = 4096;

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    row: RowUnits,
    streams: usize,
    /// Whose gradients are made: x, f, h_post, h_res.
    wanted: [bool; 4],
}

impl Plan {
    /// For streams of `vectors` vectors, and `sums` sums over the units of a token.
    fn new(
        client: &Client,
        vectors: usize,
        streams: usize,
        wanted: [bool; 4],
        sums: usize,
    ) -> Self {
        let plane = launch::plane_size(client);
        let most = client.properties().hardware.max_units_per_cube.min(UNITS);
        let columns = (vectors.div_ceil(CHUNKS) as u32).min(most);
        // A power of two within a plane or without planes, else whole planes.
        let mut units = match columns <= plane || plane == 1 {
            true => columns.next_power_of_two().min(most),
            false => columns.next_multiple_of(plane).min(most),
        };
        let fits = |row: &RowUnits| sums * row.shared() <= SHARED;
        while units > 1 && !fits(&RowUnits::new(client, units, 1)) {
            units /= 2;
        }
        let mut rows = (most / units).max(1);
        while rows > 1 && !fits(&RowUnits::new(client, units, rows)) {
            rows /= 2;
        }
        Self { row: RowUnits::new(client, units, rows), streams, wanted }
    }

    /// Those of `h_post`, then those of `h_res`.
    fn sums(&self) -> usize {
        self.streams * (self.streams + 1)
    }

    /// Whether there are sums over the columns.
    fn adds(&self) -> bool {
        self.wanted[2] || self.wanted[3]
    }
}

/// Tokens, their columns in vectors, and the distances between rows of what is read.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    tokens: usize,
    vectors: usize,
    x: usize,
    f: usize,
    dy: usize,
}

/// The token of this unit. Those past the end do the last one again and write nothing: all units meet the barriers.
#[cube]
fn token(sizes: &Sizes, #[comptime] plan: Plan) -> (usize, bool) {
    let at = CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    (min(at, sizes.tokens - 1), at < sizes.tokens)
}

/// The numbers of a token from `first` on.
#[cube]
fn numbers(of: &[f32], first: usize, #[comptime] count: usize) -> Array<f32> {
    let mut numbers = Array::<f32>::new(count);
    #[unroll]
    for k in 0..count {
        numbers[k] = of[first + k];
    }
    numbers
}

/// Vector `at` of each stream of a token, whose first row is `row`.
#[cube]
fn streams<E: Float, N: Size>(
    of: &[Vector<E, N>],
    row: usize,
    stride: usize,
    at: usize,
    #[comptime] count: usize,
) -> Array<Vector<f32, N>> {
    let mut streams = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for i in 0..count {
        streams[i] = Vector::cast_from(of[(row + i) * stride + at]);
    }
    streams
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    f: &[Vector<E, N>],
    h_post: &[f32],
    h_res: &[f32],
    y: &mut [Vector<E, N>],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let n = comptime!(plan.streams);
    let (token, own) = token(&sizes, plan);
    let post = numbers(h_post, token * n, n);
    let res = numbers(h_res, token * comptime!(n * n), comptime!(n * n));
    let units = comptime!(plan.row.units as usize);
    for at in range_stepped(UNIT_POS_X as usize, sizes.vectors, units) {
        let x = streams::<E, N>(x, token * n, sizes.x, at, n);
        let f = Vector::<f32, N>::cast_from(f[token * sizes.f + at]);
        if own {
            #[unroll]
            for o in 0..n {
                let mut sum = Vector::new(post[o]) * f;
                #[unroll]
                for i in 0..n {
                    sum += Vector::new(res[comptime!(o * n + i)]) * x[i];
                }
                y[(token * n + o) * sizes.vectors + at] = Vector::cast_from(sum);
            }
        }
    }
}

#[derive(CubeType, CubeLaunch)]
struct Inputs<E: Float, N: Size> {
    dy: Box<[Vector<E, N>]>,
    x: Box<[Vector<E, N>]>,
    f: Box<[Vector<E, N>]>,
    h_post: Box<[f32]>,
    h_res: Box<[f32]>,
}

#[derive(CubeType, CubeLaunch)]
struct Gradients<E: Float, N: Size> {
    x: Box<[Vector<E, N>]>,
    f: Box<[Vector<E, N>]>,
    h_post: Box<[f32]>,
    h_res: Box<[f32]>,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<C: Combine, E: Float, N: Size>(
    inputs: &Inputs<E, N>,
    gradients: &mut Gradients<E, N>,
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let n = comptime!(plan.streams);
    let wanted = comptime!(plan.wanted);
    let (token, own) = token(&sizes, plan);
    let post = numbers(&inputs.h_post, token * n, n);
    let res = numbers(&inputs.h_res, token * comptime!(n * n), comptime!(n * n));
    let units = comptime!(plan.row.units as usize);
    let mut sums = C::identity();
    for at in range_stepped(UNIT_POS_X as usize, sizes.vectors, units) {
        let dy = streams::<E, N>(&inputs.dy, token * n, sizes.dy, at, n);
        if comptime!(plan.adds()) {
            let x = streams::<E, N>(&inputs.x, token * n, sizes.x, at, n);
            let f = Vector::<f32, N>::cast_from(inputs.f[token * sizes.f + at]);
            #[unroll]
            for o in 0..n {
                sums[o] += reduce::vector::<Sums<1>, N>(f * dy[o]);
                #[unroll]
                for i in 0..n {
                    let at = comptime!(n + o * n + i);
                    sums[at] += reduce::vector::<Sums<1>, N>(x[i] * dy[o]);
                }
            }
        }
        if own {
            if comptime!(wanted[0]) {
                #[unroll]
                for i in 0..n {
                    let mut sum = Vector::new(res[i]) * dy[0];
                    #[unroll]
                    for o in 1..n {
                        sum += Vector::new(res[comptime!(o * n + i)]) * dy[o];
                    }
                    gradients.x[(token * n + i) * sizes.vectors + at] = Vector::cast_from(sum);
                }
            }
            if comptime!(wanted[1]) {
                let mut sum = Vector::new(post[0]) * dy[0];
                #[unroll]
                for o in 1..n {
                    sum += Vector::new(post[o]) * dy[o];
                }
                gradients.f[token * sizes.vectors + at] = Vector::cast_from(sum);
            }
        }
    }
    if comptime!(plan.adds()) {
        let size = comptime!(C::REGISTERS * plan.row.shared());
        let mut shared = Shared::<[f32]>::new_slice(size);
        // Units that shuffle have to be together again: their numbers of columns differ.
        sync_cube();
        reduce::rows::<C>(&mut sums, &mut shared, plan.row);
        if own && UNIT_POS_X == 0 {
            #[unroll]
            for k in 0..comptime!(plan.sums()) {
                if comptime!(k < n && wanted[2]) {
                    gradients.h_post[token * n + k] = sums[k];
                }
                if comptime!(k >= n && wanted[3]) {
                    gradients.h_res[token * comptime!(n * n) + comptime!(k - n)] = sums[k];
                }
            }
        }
    }
}

/// What is mixed.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Forward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// `[B, S, n, D]`.
    pub x: FloatTensor<B>,
    /// `[B, S, D]`.
    pub f: FloatTensor<B>,
    /// `[B, S, n]`.
    pub h_post: FloatTensor<B>,
    /// `[B, S, n, n]`.
    pub h_res: FloatTensor<B>,
}

/// What the gradients are made of.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// The cotangent of y.
    pub dy: FloatTensor<B>,
    /// `[B, S, n, D]`.
    pub x: FloatTensor<B>,
    /// `[B, S, D]`.
    pub f: FloatTensor<B>,
    /// `[B, S, n]`.
    pub h_post: FloatTensor<B>,
    /// `[B, S, n, n]`.
    pub h_res: FloatTensor<B>,
    /// Whose gradients are wanted: x, f, h_post, h_res.
    pub wanted: [bool; 4],
}

/// y, contiguous.
pub(super) fn forward(of: Forward<CubeBackend>) -> CubeTensor {
    let shape = of.x.meta.shape().clone();
    let y = launch::output(&of.x, of.op, "y", shape.clone(), of.x.dtype);
    if shape.num_elements() > 0 {
        launch_forward(of, &y);
    }
    y
}

/// Writes y, which is contiguous and has elements.
pub(crate) fn launch_forward(of: Forward<CubeBackend>, y: &CubeTensor) {
    let Forward { x, f, h_post, h_res, .. } = of;
    let shape = x.meta.shape().clone();
    let (streams, client) = (shape[2], x.client.clone());
    let (x, f) = (Rows::new(x), Rows::new(f));
    let size = launch::vector_size(&client, y.dtype, &[&x, &f]);
    let vectors = x.width / size;
    let plan = Plan::new(&client, vectors, streams, [false; 4], 0);
    // h_res has more elements than x where there are more streams than columns.
    let address = launch::address_type(&[&x.tensor, &f.tensor, &h_res, y]);
    launch::plans::note("mhc_post forward", &(&plan, size, address), &[]);
    let cubes = f.rows.div_ceil(plan.row.rows as usize);
    // SAFETY: tokens and columns are within the tensors, which have `streams` rows of x and y for one of f.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.row.cube_dim(),
            address,
            size,
            x.tensor.into_buffer_arg(),
            f.tensor.into_buffer_arg(),
            into_contiguous(h_post).into_buffer_arg(),
            into_contiguous(h_res).into_buffer_arg(),
            y.clone().into_buffer_arg(),
            SizesLaunch::new(f.rows, vectors, x.stride / size, f.stride / size, 0),
            plan,
            dtype_to_elem_type(y.dtype),
        );
    }
}

/// Those gradients that are wanted; contiguous.
pub(crate) fn backward(of: Backward<CubeBackend>) -> [Option<CubeTensor>; 4] {
    let streams = of.x.meta.shape()[2];
    let launch = match streams {
        1 => launch_backward::<Sums<2>>,
        2 => launch_backward::<Sums<6>>,
        3 => launch_backward::<Sums<12>>,
        4 => launch_backward::<Sums<20>>,
        5 => launch_backward::<Sums<30>>,
        6 => launch_backward::<Sums<42>>,
        7 => launch_backward::<Sums<56>>,
        MAX_STREAMS => launch_backward::<Sums<72>>,
        _ => unreachable!("the number of streams has been checked"),
    };
    launch(of, streams)
}

fn launch_backward<C: Combine>(
    of: Backward<CubeBackend>,
    streams: usize,
) -> [Option<CubeTensor>; 4] {
    let Backward { op, dy, x, f, h_post, h_res, wanted } = of;
    let like = x.clone();
    let shapes = [&x, &f, &h_post, &h_res].map(|of| (of.meta.shape().clone(), of.dtype));
    let names = ["grad.x", "grad.f", "grad.h_post", "grad.h_res"];
    let gradient = |i: usize| {
        let (shape, dtype): (Shape, DType) = shapes[i].clone();
        wanted[i].then(|| launch::output(&like, op, names[i], shape, dtype))
    };
    let gradients = [0, 1, 2, 3].map(gradient);
    if x.meta.shape().num_elements() == 0 {
        return gradients;
    }
    let (dtype, client) = (x.dtype, x.client.clone());
    let (dy, x, f) = (Rows::new(dy), Rows::new(x), Rows::new(f));
    let size = launch::vector_size(&client, dtype, &[&dy, &x, &f]);
    let vectors = x.width / size;
    let plan = Plan::new(&client, vectors, streams, wanted, C::REGISTERS);
    let address = launch::address_type(&[&dy.tensor, &x.tensor, &f.tensor, &h_res, &like]);
    launch::plans::note("mhc_post backward", &(&plan, size, address), &[]);
    let cubes = f.rows.div_ceil(plan.row.rows as usize);
    let [of_x, of_f, of_post, of_res] = [0, 1, 2, 3].map(|i| {
        let unused = || launch::unused(&like, shapes[i].1);
        gradients[i].clone().unwrap_or_else(unused).into_buffer_arg()
    });
    let sizes = [x.stride, f.stride, dy.stride].map(|stride| stride / size);
    // SAFETY: as forward; gradients that are not wanted are not written.
    unsafe {
        backward_kernel::launch_unchecked::<C>(
            &client,
            launch::grid(&client, cubes),
            plan.row.cube_dim(),
            address,
            size,
            InputsLaunch::new(
                dy.tensor.into_buffer_arg(),
                x.tensor.into_buffer_arg(),
                f.tensor.into_buffer_arg(),
                into_contiguous(h_post).into_buffer_arg(),
                into_contiguous(h_res).into_buffer_arg(),
            ),
            GradientsLaunch::new(of_x, of_f, of_post, of_res),
            SizesLaunch::new(f.rows, vectors, sizes[0], sizes[1], sizes[2]),
            plan,
            dtype_to_elem_type(dtype),
        );
    }
    gradients
}

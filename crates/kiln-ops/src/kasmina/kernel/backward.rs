//! dx, and the gradients of blueprints and alpha.

use super::ahead;
use super::seed::{
    Garden, begin_of, factor, feature, of_alpha, of_blueprint, seed_after, seed_of, wants_products,
};
use super::{Blueprints, Gather, Place, Plan, ROWS, Sizes, SizesLaunch, left, load, place};
use crate::launch::{self, Rows, limits};
use crate::reduce::{self, Combine, Sums};
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// What a backward makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Wanted {
    /// dx.
    pub(super) x: bool,
    /// The sums that the other gradients are made of.
    pub(super) sums: bool,
    /// Others see to chunks with MLPs.
    pub(super) mlps: bool,
}

/// What a unit makes of its columns.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Columns<N: Size> {
    /// What dy is multiplied with.
    pub(super) by: Vector<f32, N>,
    /// What is read: what nobody wants is not. Most seeds have no use for x, and where all is blended with an MLP others
    /// read. Where dx is wanted it is written for all of dy that is read.
    pub(super) reads_dy: bool,
    pub(super) reads_x: bool,
}

#[cube]
pub(super) fn columns<W: Float, I: Int, N: Size>(
    garden: &Garden<W, I>,
    place: &Place,
    #[comptime] wanted: Wanted,
) -> Columns<N> {
    let mut by = Vector::<f32, N>::new(1.0f32);
    let mut reads_x = comptime!(false).runtime();
    let mut blended = comptime!(false).runtime();
    let mut others = comptime!(!wanted.mlps).runtime();
    let mut seed = seed_of::<W, I>(garden, place.at * N::value());
    #[unroll]
    for i in 0..N::value() {
        let at = place.at * N::value() + i;
        if comptime!(i > 0) {
            seed = seed_after::<W, I>(garden, at, seed);
        }
        let of = feature::<W, I>(garden, at, seed);
        by.insert(i, factor(&of));
        blended = blended || of.contributes;
        reads_x = reads_x || wants_products(&of);
        if comptime!(wanted.mlps) {
            others = others || !of.mlp;
        }
    }
    let mut reads_dy = others;
    if comptime!(!wanted.x) {
        reads_dy = blended;
    }
    Columns::<N> { by, reads_dy, reads_x }
}

/// Brings together what the units below each other have seen, and leaves it.
#[cube]
fn leave<N: Size>(
    found: &Array<Vector<f32, N>>,
    sums: &mut [Vector<f32, N>],
    vectors: usize,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let (columns, step) = comptime!((plan.columns as usize, plan.below as usize));
    let units = comptime!((plan.columns * plan.below) as usize);
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(2 * units));
    shared[UNIT_POS as usize] = found[0];
    shared[units + UNIT_POS as usize] = found[1];
    sync_cube();
    // One row of units for each of the two.
    for kind in range_stepped(UNIT_POS_Y as usize, 2, step) {
        if place.own {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            for below in 0..step {
                sum += shared[kind * units + below * columns + UNIT_POS_X as usize];
            }
            sums[(place.part * 2 + kind) * vectors + place.at] = sum;
        }
    }
}

/// Writes the columns of dx, and adds up dy and x·dy, with some rows at a time in registers.
#[cube]
fn down<E: Float, W: Float, I: Int, N: Size>(
    x: &[Vector<E, N>],
    dy: &[Vector<E, N>],
    garden: &Garden<W, I>,
    dx: &mut [Vector<E, N>],
    sums: &mut Array<Vector<f32, N>>,
    sizes: &Sizes,
    place: &Place,
    #[comptime] plan: Plan,
    #[comptime] wanted: Wanted,
) {
    // Under way while the seeds are looked up.
    let mut held = load::<E, N>(dy, sizes.dy, place, 0, plan);
    let mut held_x = Array::<Vector<E, N>>::new(comptime!(ROWS));
    if comptime!(wanted.sums) {
        held_x = load::<E, N>(x, sizes.x, place, 0, plan);
    }
    let of = columns::<W, I, N>(garden, place, wanted);
    let writes = of.reads_dy && place.own;
    let step = comptime!(plan.below as usize);
    let groups = (place.count + comptime!(ROWS - 1)) / comptime!(ROWS);
    for group in 0..groups {
        let before = group * comptime!(ROWS);
        let first = place.first + before * step;
        #[unroll]
        for r in 0..ROWS {
            if before + r < place.count {
                let d = Vector::<f32, N>::cast_from(held[r]);
                if comptime!(wanted.x) && writes {
                    let at = (first + r * step) * sizes.vectors + place.at;
                    dx[at] = Vector::cast_from(d * of.by);
                }
                if comptime!(wanted.sums) {
                    sums[0] += d;
                    sums[1] += Vector::<f32, N>::cast_from(held_x[r]) * d;
                }
            }
        }
        if of.reads_dy {
            let next = load::<E, N>(dy, sizes.dy, place, group + 1, plan);
            #[unroll]
            for r in 0..ROWS {
                held[r] = next[r];
            }
        }
        if comptime!(wanted.sums) && of.reads_x {
            let next = load::<E, N>(x, sizes.x, place, group + 1, plan);
            #[unroll]
            for r in 0..ROWS {
                held_x[r] = next[r];
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<E: Float, W: Float, I: Int, N: Size>(
    x: &[Vector<E, N>],
    dy: &[Vector<E, N>],
    garden: &Garden<W, I>,
    dx: &mut [Vector<E, N>],
    sums: &mut [Vector<f32, N>],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[comptime] wanted: Wanted,
    #[comptime] ahead: bool,
    #[define(E, W, I)] _dtypes: [ElemType; 3],
) {
    let place = place(&sizes, plan);
    let mut found = Array::<Vector<f32, N>>::new(2usize);
    #[unroll]
    for kind in 0..2usize {
        found[kind] = Vector::new(0.0f32);
    }
    if comptime!(ahead) {
        ahead::down::<E, W, I, N>(x, dy, garden, dx, &mut found, &sizes, &place, plan, wanted);
    } else {
        down::<E, W, I, N>(x, dy, garden, dx, &mut found, &sizes, &place, plan, wanted);
    }
    if comptime!(wanted.sums) {
        leave(&found, sums, sizes.vectors, &place, plan);
    }
}

/// From the sums of the columns the gradients of the blueprints, every element, and of alpha.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel<W: Float, I: Int>(
    sums: &[f32],
    garden: &Garden<W, I>,
    dalpha: &mut [W],
    dblueprints: &mut [W],
    parts: usize,
    #[comptime] gather: Gather,
    #[comptime] wanted: [bool; 2],
    #[define(W, I)] _dtypes: [ElemType; 2],
) {
    let seed = CUBE_POS * comptime!(gather.row.rows as usize) + UNIT_POS_Y as usize;
    let own = seed < garden.seeds;
    let of = min(seed, garden.seeds - 1);
    let features = garden.features;
    let end = begin_of::<W, I>(garden, of + 1);
    let units = comptime!(gather.row.units as usize);
    let mut sum = Sums::<1>::identity();
    for at in range_stepped(begin_of::<W, I>(garden, of) + UNIT_POS_X as usize, end, units) {
        let (mut cotangents, mut products) = (f32::new(0.0), f32::new(0.0));
        for first in range_stepped(0, parts, comptime!(ROWS)) {
            let mut held = Array::<f32>::new(comptime!(2 * ROWS));
            #[unroll]
            for r in 0..ROWS {
                let part = min(first + r, parts - 1);
                held[2 * r] = sums[part * 2 * features + at];
                held[2 * r + 1] = sums[(part * 2 + 1) * features + at];
            }
            #[unroll]
            for r in 0..ROWS {
                if first + r < parts {
                    cotangents += held[2 * r];
                    products += held[2 * r + 1];
                }
            }
        }
        let feature = feature::<W, I>(garden, at, of);
        sum[0] += of_alpha(&feature, cotangents, products);
        if comptime!(wanted[1]) && own {
            let gradient = of_blueprint(&feature, cotangents, products);
            for row in 0..garden.count {
                let here = select(row == feature.row, gradient, f32::new(0.0));
                dblueprints[row * features + at] = W::cast_from(here);
            }
        }
    }
    if comptime!(wanted[0]) {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(gather.row.shared()));
        // Units that shuffle have to be together again: their numbers of columns differ.
        sync_cube();
        reduce::rows::<Sums<1>>(&mut sum, &mut shared, gather.row);
        if UNIT_POS_X == 0 && own {
            dalpha[seed] = W::cast_from(sum[0]);
        }
    }
}

/// What the gradients are made of.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The cotangent of y.
    pub dy: FloatTensor<B>,
    /// `[..., H]`.
    pub x: FloatTensor<B>,
    /// Seeds and blueprints.
    #[extension_type]
    pub of: Blueprints<B>,
    /// Whose gradients are wanted: x, alpha, blueprints.
    pub wanted: [bool; 3],
}

/// Those gradients that are wanted; contiguous. With `mlps` the caller writes dx in the chunks that one is
/// blended into: here it is left as it is where a vector lies in them.
pub(crate) fn backward(
    op: &'static str,
    backward: Backward<CubeBackend>,
    mlps: bool,
) -> [Option<CubeTensor>; 3] {
    let Backward { dy, x, of, wanted } = backward;
    let (shape, dtype, client) = (dy.meta.shape().clone(), dy.dtype, dy.client.clone());
    let [seeds, features, _] = of.sizes();
    let like = dy.clone();
    if shape.num_elements() == 0 {
        let dx = wanted[0].then(|| launch::output(&like, op, "grad.x", shape, dtype));
        let zeros = |of: &CubeTensor| launch::zeros(&like, of.meta.shape().clone(), of.dtype);
        return [dx, wanted[1].then(|| zeros(&of.alpha)), wanted[2].then(|| zeros(&of.rows))];
    }
    let output = |name, shape: &Shape, dtype| launch::output(&like, op, name, shape.clone(), dtype);
    let dx = wanted[0].then(|| output("grad.x", &shape, dtype));
    let dalpha = wanted[1].then(|| output("grad.alpha", of.alpha.meta.shape(), of.alpha.dtype));
    let dblueprints =
        wanted[2].then(|| output("grad.blueprints", of.rows.meta.shape(), of.rows.dtype));
    let sums_wanted = wanted[1] || wanted[2];
    let (x, dy) = (Rows::new(x), Rows::new(dy));
    let size = launch::vector_size(&client, dtype, &[&x, &dy]);
    let vectors = features / size;
    let plan = Plan::new(&client, dy.rows, vectors, size);
    let parts = plan.parts(&client, dy.rows, vectors);
    let sums = match sums_wanted {
        true => left(&like, op, "sums", [parts.parts, 2, features]),
        false => launch::unused(&like, DType::F32),
    };
    let unused = |dtype| launch::unused(&like, dtype);
    let address = launch::address_type(&[&x.tensor, &dy.tensor, &like, &sums, &of.rows]);
    let share = plan.parts(&client, limits::reckoned(dy.rows), vectors).share;
    let makes = Wanted { x: wanted[0], sums: sums_wanted, mlps };
    let ahead = ahead::takes(&client, plan, makes, share, size * dtype.size());
    let ways = [("ring wraps", ahead && ahead::wraps(plan, parts.share))];
    launch::plans::note("kasmina backward", &(&plan, &makes, ahead, size, address), &ways);
    let (strides, types) = ([x.stride / size, dy.stride / size], of.types(dtype));
    // SAFETY: rows and columns are within the tensors; gradients that are not wanted are not written.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, parts.tiles * parts.parts),
            plan.cube_dim(),
            address,
            size,
            x.tensor.into_buffer_arg(),
            dy.tensor.into_buffer_arg(),
            of.clone().garden(),
            dx.clone().unwrap_or_else(|| unused(dtype)).into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            SizesLaunch::new(dy.rows, vectors, parts.tiles, parts.share, strides[0], strides[1]),
            plan,
            makes,
            ahead,
            types,
        );
    }
    if sums_wanted {
        let gather = Gather::new(&client, features.div_ceil(seeds), 1);
        let address = launch::address_type(&[&sums, &of.rows]);
        let wanted = [wanted[1], wanted[2]];
        launch::plans::note("kasmina gradients", &(&gather, wanted, address), &[]);
        let of_alpha = dalpha.clone().unwrap_or_else(|| unused(of.alpha.dtype));
        let of_rows = dblueprints.clone().unwrap_or_else(|| unused(of.rows.dtype));
        // SAFETY: a seed that is none stands for the last and writes nothing.
        unsafe {
            gather_kernel::launch_unchecked(
                &client,
                launch::grid(&client, gather.cubes(seeds)),
                gather.row.cube_dim(),
                address,
                sums.into_buffer_arg(),
                of.garden(),
                of_alpha.into_buffer_arg(),
                of_rows.into_buffer_arg(),
                parts.parts,
                gather,
                wanted,
                [types[1], types[2]],
            );
        }
    }
    [dx, dalpha, dblueprints]
}

//! y, and the telemetry of x.

use super::super::OP;
use super::seed::{Garden, factor, feature, seed_of, shift};
use super::{Blueprints, Gather, Place, Plan, Sizes, SizesLaunch, left, place, rows_of};
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine, Sums};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Mean and M2 of the columns of a vector, and of how many rows.
#[derive(CubeType)]
struct Moments<N: Size> {
    mean: Vector<f32, N>,
    m2: Vector<f32, N>,
    count: usize,
}

#[cube]
impl<N: Size> Moments<N> {
    fn new() -> Self {
        Moments::<N> { mean: Vector::new(0.0f32), m2: Vector::new(0.0f32), count: 0usize }
    }

    /// Takes some rows in: their own mean and M2 first (Chan, Golub and LeVeque, 1979).
    fn take<E: Float>(&mut self, rows: &Array<Vector<E, N>>, #[comptime] number: usize) {
        let mut sum = Vector::<f32, N>::cast_from(rows[0]);
        #[unroll]
        for r in 1..number {
            sum += Vector::<f32, N>::cast_from(rows[r]);
        }
        let mean = sum * Vector::new(comptime!(1.0f32 / number as f32));
        let mut m2 = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for r in 0..number {
            let centred = Vector::<f32, N>::cast_from(rows[r]) - mean;
            m2 += centred * centred;
        }
        let apart = mean - self.mean;
        let before = f32::cast_from(self.count as u32);
        let share = f32::cast_from(comptime!(number as u32)) / (before + comptime!(number as f32));
        self.mean += apart * Vector::new(share);
        self.m2 += m2 + apart * apart * Vector::new(before * share);
        self.count += comptime!(number);
    }

    /// Takes one more row in.
    fn take_one(&mut self, row: Vector<f32, N>) {
        let apart = row - self.mean;
        let before = f32::cast_from(self.count as u32);
        let share = 1.0 / (before + 1.0);
        self.mean += apart * Vector::new(share);
        self.m2 += apart * apart * Vector::new(before * share);
        self.count += 1;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float, W: Float, I: Int, N: Size>(
    x: &[Vector<E, N>],
    garden: &Garden<W, I>,
    y: &mut [Vector<E, N>],
    moments: &mut [Vector<f32, N>],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(E, W, I)] _dtypes: [ElemType; 3],
) {
    let place = place(&sizes, plan);
    let (mut by, mut more) = (Vector::<f32, N>::empty(), Vector::<f32, N>::empty());
    #[unroll]
    for i in 0..N::value() {
        let at = place.at * N::value() + i;
        let of = feature::<W, I>(garden, at, seed_of::<W, I>(garden, at));
        by.insert(i, factor(&of));
        more.insert(i, shift(&of, garden.minus_zero));
    }
    let step = comptime!(plan.below as usize);
    let mut seen = Moments::<N>::new();
    let mut held = Array::<Vector<E, N>>::new(comptime!(plan.held));
    let whole = place.count / comptime!(plan.held);
    for group in 0..whole {
        let first = place.first + group * comptime!(plan.held * plan.below as usize);
        #[unroll]
        for r in 0..comptime!(plan.held) {
            held[r] = x[(first + r * step) * sizes.x + place.at];
        }
        if place.own {
            #[unroll]
            for r in 0..comptime!(plan.held) {
                let value = Vector::<f32, N>::cast_from(held[r]) * by + more;
                y[(first + r * step) * sizes.vectors + place.at] = Vector::cast_from(value);
            }
        }
        seen.take::<E>(&held, plan.held);
    }
    // The rest; rows past the end are the last once more, and count for nothing.
    let rest = place.count - whole * comptime!(plan.held);
    let first = place.first + whole * comptime!(plan.held * plan.below as usize);
    #[unroll]
    for r in 0..comptime!(plan.held - 1) {
        held[r] = x[min(first + r * step, sizes.rows - 1) * sizes.x + place.at];
    }
    #[unroll]
    for r in 0..comptime!(plan.held - 1) {
        if r < rest {
            let row = Vector::<f32, N>::cast_from(held[r]);
            if place.own {
                y[(first + r * step) * sizes.vectors + place.at] =
                    Vector::cast_from(row * by + more);
            }
            seen.take_one(row);
        }
    }
    write_moments::<N>(&seen, moments, &sizes, &place, plan);
}

/// Brings the units below each other together and writes what they have seen.
#[cube]
fn write_moments<N: Size>(
    seen: &Moments<N>,
    moments: &mut [Vector<f32, N>],
    sizes: &Sizes,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let columns = comptime!(plan.columns as usize);
    let units = comptime!((plan.columns * plan.below) as usize);
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(2 * units));
    let unit = UNIT_POS_X as usize;
    shared[UNIT_POS as usize] = seen.mean;
    shared[units + UNIT_POS as usize] = seen.m2;
    sync_cube();
    if UNIT_POS_Y == 0 && place.own {
        let begin = place.part * sizes.share;
        let rows = min(begin + sizes.share, sizes.rows) - begin;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        for below in 0..comptime!(plan.below as usize) {
            let count = f32::cast_from(rows_of(sizes, begin, below, plan) as u32);
            sum += shared[below * columns + unit] * Vector::new(count);
        }
        let mean = sum / Vector::new(f32::cast_from(rows as u32));
        let mut m2 = Vector::<f32, N>::new(0.0f32);
        for below in 0..comptime!(plan.below as usize) {
            let count = f32::cast_from(rows_of(sizes, begin, below, plan) as u32);
            let apart = shared[below * columns + unit] - mean;
            m2 += shared[units + below * columns + unit] + apart * apart * Vector::new(count);
        }
        let at = place.part * 2 * sizes.vectors + place.at;
        moments[at] = mean;
        moments[at + sizes.vectors] = m2;
    }
}

/// Brings the columns of each chunk and the parts of its rows together.
#[cube(launch_unchecked, address_type = "dynamic")]
fn telemetry_kernel(
    moments: &[f32],
    mean: &mut [f32],
    variance: &mut [f32],
    rows: usize,
    share: usize,
    features: usize,
    seeds: usize,
    #[comptime] gather: Gather,
) {
    let seed = CUBE_POS * comptime!(gather.row.rows as usize) + UNIT_POS_Y as usize;
    let (short, longer) = (features / seeds, features % seeds);
    let of = min(seed, seeds - 1);
    let begin = of * short + min(of, longer);
    let next = of + 1;
    let end = next * short + min(next, longer);
    let units = comptime!(gather.row.units as usize);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * gather.row.shared()));
    let size = comptime!(gather.row.shared());
    let parts = (rows + share - 1) / share;
    let count = f32::cast_from((end - begin) as u32) * f32::cast_from(rows as u32);
    let mut sum = Sums::<1>::identity();
    for part in 0..parts {
        let here = f32::cast_from(min(share, rows - part * share) as u32);
        for column in range_stepped(begin + UNIT_POS_X as usize, end, units) {
            sum[0] += here * moments[part * 2 * features + column];
        }
    }
    sync_cube();
    reduce::rows::<Sums<1>>(&mut sum, &mut shared[0..size], gather.row);
    let about = sum[0] / count;
    let mut m2 = Sums::<1>::identity();
    for part in 0..parts {
        let here = f32::cast_from(min(share, rows - part * share) as u32);
        for column in range_stepped(begin + UNIT_POS_X as usize, end, units) {
            let at = part * 2 * features + column;
            let apart = moments[at] - about;
            m2[0] += moments[at + features] + here * apart * apart;
        }
    }
    sync_cube();
    reduce::rows::<Sums<1>>(&mut m2, &mut shared[size..2 * size], gather.row);
    if UNIT_POS_X == 0 && seed < seeds {
        mean[seed] = about;
        variance[seed] = m2[0] / count;
    }
}

/// y, and mean and variance of the chunks; contiguous.
pub(in super::super) fn forward(x: CubeTensor, of: Blueprints<CubeBackend>) -> [CubeTensor; 3] {
    let (shape, dtype, client) = (x.meta.shape().clone(), x.dtype, x.client.clone());
    let [seeds, features, _] = of.sizes();
    let y = launch::output(&x, OP, "y", shape.clone(), dtype);
    if shape.num_elements() == 0 {
        let zeros = || launch::zeros(&y, Shape::new([seeds]), DType::F32);
        return [y.clone(), zeros(), zeros()];
    }
    let statistic = |name| launch::output(&y, OP, name, Shape::new([seeds]), DType::F32);
    let (mean, variance) = (statistic("mean"), statistic("var"));
    let x = Rows::new(x);
    let size = launch::vector_size(&client, dtype, &[&x]);
    let vectors = features / size;
    let plan = Plan::new(&client, vectors);
    let parts = plan.parts(&client, x.rows, vectors);
    let moments = left(&y, OP, "moments", [parts.parts, 2, features]);
    let address = launch::address_type(&[&x.tensor, &y, &moments]);
    launch::plans::note("kasmina forward", &(&plan, size, address), &[]);
    let (rows, types) = (x.rows, of.types(dtype));
    // SAFETY: rows and columns are within the tensors, seeds follow from columns.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, parts.tiles * parts.parts),
            plan.cube_dim(),
            address,
            size,
            x.tensor.into_buffer_arg(),
            of.garden(),
            y.clone().into_buffer_arg(),
            moments.clone().into_buffer_arg(),
            SizesLaunch::new(rows, vectors, parts.tiles, parts.share, x.stride / size, 0),
            plan,
            types,
        );
    }
    let gather = Gather::new(&client, features.div_ceil(seeds));
    let address = launch::address_type(&[&moments]);
    launch::plans::note("kasmina telemetry", &(&gather, address), &[]);
    // SAFETY: a seed that is none stands for the last and writes nothing.
    unsafe {
        telemetry_kernel::launch_unchecked(
            &client,
            launch::grid(&client, gather.cubes(seeds)),
            gather.row.cube_dim(),
            address,
            moments.into_buffer_arg(),
            mean.clone().into_buffer_arg(),
            variance.clone().into_buffer_arg(),
            rows,
            parts.share,
            features,
            seeds,
            gather,
        );
    }
    [y, mean, variance]
}

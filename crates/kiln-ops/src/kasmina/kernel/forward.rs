//! y, and the telemetry of x.

use super::super::OP;
use super::seed::{Garden, factor, feature, seed_after, seed_of, shift};
use super::{
    Blueprints, Gather, Place, Plan, ROWS, Sizes, SizesLaunch, left, load, place, rows_of,
};
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine};
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

    /// Takes [`ROWS`] rows in: their own mean and M2 first (Chan, Golub and LeVeque, 1979).
    fn take<E: Float>(&mut self, rows: &Array<Vector<E, N>>) {
        let mut sum = Vector::<f32, N>::cast_from(rows[0]);
        #[unroll]
        for r in 1..ROWS {
            sum += Vector::<f32, N>::cast_from(rows[r]);
        }
        let mean = sum * Vector::new(comptime!(1.0f32 / ROWS as f32));
        let mut m2 = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for r in 0..ROWS {
            let centred = Vector::<f32, N>::cast_from(rows[r]) - mean;
            m2 += centred * centred;
        }
        let apart = mean - self.mean;
        let before = f32::cast_from(self.count as u32);
        let share = f32::cast_from(comptime!(ROWS as u32)) / (before + comptime!(ROWS as f32));
        self.mean += apart * Vector::new(share);
        self.m2 += m2 + apart * apart * Vector::new(before * share);
        self.count += comptime!(ROWS);
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
    // Under way while the seeds are looked up.
    let mut held = load::<E, N>(x, sizes.x, &place, 0, plan);
    let (mut by, mut more) = (Vector::<f32, N>::empty(), Vector::<f32, N>::empty());
    let mut seed = seed_of::<W, I>(garden, place.at * N::value());
    #[unroll]
    for i in 0..N::value() {
        let at = place.at * N::value() + i;
        if comptime!(i > 0) {
            seed = seed_after::<W, I>(garden, at, seed);
        }
        let of = feature::<W, I>(garden, at, seed);
        by.insert(i, factor(&of));
        more.insert(i, shift(&of, garden.minus_zero));
    }
    let step = comptime!(plan.below as usize);
    let mut seen = Moments::<N>::new();
    let whole = place.count / comptime!(ROWS);
    let mut row = place.first;
    for group in 0..whole {
        if place.own {
            #[unroll]
            for r in 0..ROWS {
                let value = Vector::<f32, N>::cast_from(held[r]) * by + more;
                y[(row + r * step) * sizes.vectors + place.at] = Vector::cast_from(value);
            }
        }
        seen.take::<E>(&held);
        let next = load::<E, N>(x, sizes.x, &place, group + 1, plan);
        #[unroll]
        for r in 0..ROWS {
            held[r] = next[r];
        }
        row += comptime!(ROWS * plan.below as usize);
    }
    let rest = place.count - whole * comptime!(ROWS);
    #[unroll]
    for r in 0..comptime!(ROWS - 1) {
        if r < rest {
            let x = Vector::<f32, N>::cast_from(held[r]);
            if place.own {
                y[(row + r * step) * sizes.vectors + place.at] = Vector::cast_from(x * by + more);
            }
            seen.take_one(x);
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

/// Number, mean and M2 of some elements.
struct Telemetry;

#[cube]
impl Combine for Telemetry {
    const REGISTERS: usize = 3;
    const COMMUTATIVE: bool = false;

    fn identity() -> Array<f32> {
        Array::<f32>::new(3usize)
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        let mut both = Array::<f32>::new(3usize);
        let apart = later[1] - earlier[1];
        both[0] = earlier[0] + later[0];
        let share = later[0] / max(both[0], 1.0);
        both[1] = earlier[1] + apart * share;
        both[2] = earlier[2] + later[2] + apart * apart * (earlier[0] * share);
        both
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
    parts: usize,
    features: usize,
    seeds: usize,
    #[comptime] gather: Gather,
) {
    let seed = CUBE_POS * comptime!(gather.row.rows as usize) + UNIT_POS_Y as usize;
    let (short, longer) = (features / seeds, features % seeds);
    let of = min(seed, seeds - 1);
    let begin = of * short + min(of, longer);
    let size = short + select(of < longer, 1usize, 0usize);
    let units = comptime!(gather.row.units as usize);
    let mut all = Telemetry::identity();
    for first in range_stepped(UNIT_POS_X as usize, parts * size, comptime!(ROWS) * units) {
        let mut held = Array::<f32>::new(comptime!(3 * ROWS));
        #[unroll]
        for r in 0..ROWS {
            let asked = first + r * units;
            let number = min(asked, parts * size - 1);
            let part = number / size;
            let at = part * 2 * features + begin + (number - part * size);
            let here = f32::cast_from(min(share, rows - part * share) as u32);
            held[3 * r] = select(asked == number, here, f32::new(0.0));
            held[3 * r + 1] = moments[at];
            held[3 * r + 2] = moments[at + features];
        }
        #[unroll]
        for r in 0..ROWS {
            let mut next = Telemetry::identity();
            next[0] = held[3 * r];
            next[1] = held[3 * r + 1];
            // M2 is not divided by a count that is none.
            next[2] = select(held[3 * r] > 0.0, held[3 * r + 2], f32::new(0.0));
            let both = Telemetry::combine(&all, &next);
            reduce::assign::<Telemetry>(&mut all, &both);
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(3 * gather.row.shared()));
    // Units that shuffle have to be together again: they have had different numbers.
    sync_cube();
    reduce::rows::<Telemetry>(&mut all, &mut shared, gather.row);
    if UNIT_POS_X == 0 && seed < seeds {
        mean[seed] = all[1];
        variance[seed] = all[2] / all[0];
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
    let plan = Plan::new(&client, vectors, size);
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
    let gather = Gather::new(&client, features.div_ceil(seeds) * parts.parts);
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
            parts.parts,
            features,
            seeds,
            gather,
        );
    }
    [y, mean, variance]
}

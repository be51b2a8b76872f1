//! y, and the telemetry of x.

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
        self.m2 += m2 + apart * (apart * Vector::new(before * share));
        self.count += comptime!(ROWS);
    }

    /// Takes one more row in.
    fn take_one(&mut self, row: Vector<f32, N>) {
        let apart = row - self.mean;
        let before = f32::cast_from(self.count as u32);
        let share = 1.0 / (before + 1.0);
        self.mean += apart * Vector::new(share);
        self.m2 += apart * (apart * Vector::new(before * share));
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
    #[comptime] mlps: bool,
    #[define(E, W, I)] _dtypes: [ElemType; 3],
) {
    let place = place(&sizes, plan);
    // Under way while the seeds are looked up.
    let mut held = load::<E, N>(x, sizes.x, &place, 0, plan);
    // Where all is blended with an MLP others write.
    let mut writes = comptime!(!mlps).runtime();
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
        if comptime!(mlps) {
            writes = writes || !of.mlp;
        }
    }
    writes = writes && place.own;
    let step = comptime!(plan.below as usize);
    let mut seen = Moments::<N>::new();
    let whole = place.count / comptime!(ROWS);
    let mut row = place.first;
    for group in 0..whole {
        if writes {
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
            if writes {
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
    let unit = UNIT_POS as usize;
    let (mut mean, mut m2) = (seen.mean, seen.m2);
    shared[unit] = mean;
    shared[units + unit] = m2;
    sync_cube();
    // The upper half is folded onto the lower one. A unit has then seen the rows of every `step`-th from it on.
    let begin = place.part * sizes.share;
    let below = UNIT_POS_Y as usize;
    #[unroll]
    for level in 0..comptime!(plan.below.ilog2()) {
        let step = comptime!((plan.below >> (level + 1)) as usize);
        if below < step {
            let first = rows_of(sizes, begin, below, comptime!(2 * step));
            let second = rows_of(sizes, begin, below + step, comptime!(2 * step));
            let other = unit + step * columns;
            let apart = shared[other] - mean;
            let share =
                f32::cast_from(second as u32) / f32::cast_from(max(first + second, 1) as u32);
            mean += apart * Vector::new(share);
            m2 += shared[units + other]
                + apart * (apart * Vector::new(f32::cast_from(first as u32) * share));
            shared[unit] = mean;
            shared[units + unit] = m2;
        }
        sync_cube();
    }
    if below == 0 && place.own {
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
        both[2] = earlier[2] + later[2] + apart * (apart * (earlier[0] * share));
        both
    }
}

/// What the first launch has seen: rows, those of a part, and parts; features, C, H div C and H mod C.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Seen {
    rows: usize,
    share: usize,
    parts: usize,
    features: usize,
    seeds: usize,
    short: usize,
    longer: usize,
}

/// Brings the columns of each chunk and the parts of its rows together.
#[cube(launch_unchecked, address_type = "dynamic")]
fn telemetry_kernel(
    moments: &[f32],
    mean: &mut [f32],
    variance: &mut [f32],
    seen: Seen,
    #[comptime] gather: Gather,
) {
    let Seen { rows, share, parts, features, seeds, short, longer } = seen;
    let seed = CUBE_POS * comptime!(gather.row.rows as usize) + UNIT_POS_Y as usize;
    let of = min(seed, seeds - 1);
    let begin = of * short + min(of, longer);
    let end = begin + short + select(of < longer, 1usize, 0usize);
    let columns = comptime!(gather.columns as usize);
    let column = UNIT_POS_X as usize % columns;
    let others = comptime!((gather.row.units / gather.columns) as usize);
    let mut all = Telemetry::identity();
    for part in range_stepped(UNIT_POS_X as usize / columns, parts, others) {
        let here = f32::cast_from(min(share, rows - part * share) as u32);
        for at in
            range_stepped(part * 2 * features + begin + column, part * 2 * features + end, columns)
        {
            let mut next = Telemetry::identity();
            next[0] = here;
            next[1] = moments[at];
            next[2] = moments[at + features];
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

/// y, and mean and variance of the chunks; contiguous. With `mlps` the caller writes y in the chunks that one is
/// blended into: here it is left as it is where a vector lies in them.
pub(crate) fn forward(
    op: &'static str,
    x: CubeTensor,
    of: Blueprints<CubeBackend>,
    mlps: bool,
) -> [CubeTensor; 3] {
    let (shape, dtype, client) = (x.meta.shape().clone(), x.dtype, x.client.clone());
    let [seeds, features, _] = of.sizes();
    let y = launch::output(&x, op, "y", shape.clone(), dtype);
    if shape.num_elements() == 0 {
        let zeros = || launch::zeros(&y, Shape::new([seeds]), DType::F32);
        return [y.clone(), zeros(), zeros()];
    }
    let statistic = |name| launch::output(&y, op, name, Shape::new([seeds]), DType::F32);
    let (mean, variance) = (statistic("mean"), statistic("var"));
    let x = Rows::new(x);
    let size = launch::vector_size(&client, dtype, &[&x]);
    let vectors = features / size;
    let plan = Plan::new(&client, x.rows, vectors, size);
    let parts = plan.parts(&client, x.rows, vectors);
    let moments = left(&y, op, "moments", [parts.parts, 2, features]);
    let address = launch::address_type(&[&x.tensor, &y, &moments, &of.rows]);
    launch::plans::note("kasmina forward", &(&plan, mlps, size, address), &[]);
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
            mlps,
            types,
        );
    }
    let gather = plan.gather(&client, rows, vectors, features.div_ceil(seeds));
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
            SeenLaunch::new(
                rows,
                parts.share,
                parts.parts,
                features,
                seeds,
                features / seeds,
                features % seeds,
            ),
            gather,
        );
    }
    [y, mean, variance]
}

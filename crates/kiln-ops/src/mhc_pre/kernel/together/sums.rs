//! What cubes and boxes have left of gradients, added up in one launch: dφ, of the layer before dh_res and dh_post, and dbias
//! and dα. Each has cubes of its own.

use super::token::Totals;
use crate::launch;
use crate::tile::cuda::ptx::{global_address, load_quad, store_quad};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

const UNITS: u32 = 256;
/// Units that have different parts of the same four sums: each takes every so manieth.
const GROUPS: u32 = 4;
/// Sums of a cube.
const SUMS: u32 = 4 * UNITS / GROUPS;
/// Parts whose loads are on their way at a time.
const AT_A_TIME: usize = 6;

/// Parts of sums, one after another, and how many sums there are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Stack {
    parts: u32,
    /// From a part to the next.
    size: usize,
    sums: usize,
}

/// What has been left.
#[derive(CubeType, CubeLaunch)]
struct Parts {
    phi: Box<[f32]>,
    layer: Box<[f32]>,
    /// Of dbias and dα, a row each.
    bias: Box<[f32]>,
    alpha: Box<[f32]>,
    /// What ⟨dh_in, x[i]⟩ give the first n of dbias, and the first dα.
    dots: Box<[f32]>,
}

#[derive(CubeType, CubeLaunch)]
struct Results {
    phi: Box<[f32]>,
    post: Box<[f32]>,
    res: Box<[f32]>,
    bias: Box<[f32]>,
    alpha: Box<[f32]>,
}

/// Of the rows that dbias and dα are sums of: how many of the tokens' and how many of ⟨dh_in, x[i]⟩.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Rows {
    tokens: u32,
    dots: u32,
}

/// Numbers of dbias.
fn biases(n: usize) -> u32 {
    (n * (n + 2)) as u32
}

/// Units that share the rows of a number of dbias or dα out.
fn sharing(n: usize) -> u32 {
    UNITS / (biases(n) + 3)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_up_kernel(
    parts: &Parts,
    results: &mut Results,
    phi: Stack,
    layer: Stack,
    rows: Rows,
    cubes_of_phi: u32,
    #[comptime] n: usize,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!((4 * UNITS) as usize));
    let cube = CUBE_POS as u32;
    if cube == 0 {
        add_rows(parts, results, &mut shared, rows, n);
    } else if cube <= cubes_of_phi {
        let at = (cube - 1) * comptime!(SUMS) + UNIT_POS_X * 4;
        let sum = add_parts(&parts.phi, &mut shared, at as usize, phi);
        if UNIT_POS_Y == 0 && (at as usize) < phi.sums {
            let to = global_address::<f32>(results.phi.as_ptr());
            store_quad(to + u64::cast_from(at) * 4, &sum);
        }
    } else {
        let first = (cube - 1 - cubes_of_phi) as usize * comptime!(SUMS as usize);
        let first = first + (UNIT_POS_X * 4) as usize;
        let sum = add_parts(&parts.layer, &mut shared, first, layer);
        #[unroll]
        for e in 0..4usize {
            let at = first + e;
            let (token, k) = (at / comptime!(n * (n + 1)), at % comptime!(n * (n + 1)));
            if UNIT_POS_Y == 0 && at < layer.sums {
                if k < comptime!(n * n) {
                    results.res[token * comptime!(n * n) + k] = sum.extract(e);
                } else {
                    results.post[token * n + (k - comptime!(n * n))] = sum.extract(e);
                }
            }
        }
    }
}

/// Four sums from number `at` on, in the first group of units.
#[cube]
fn add_parts(
    of: &[f32],
    shared: &mut Shared<[f32]>,
    at: usize,
    stack: Stack,
) -> Vector<f32, Const<4>> {
    let groups = comptime!(GROUPS);
    // Behind the last sums are others, or nothing: those are the first ones.
    let from = global_address::<f32>(of.as_ptr())
        + u64::cast_from(select(at < stack.sums, at, 0usize)) * 4;
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    for first in range_stepped(UNIT_POS_Y, stack.parts, comptime!(GROUPS * AT_A_TIME as u32)) {
        let mut some = Array::<Vector<f32, Const<4>>>::new(AT_A_TIME);
        #[unroll]
        for i in 0..AT_A_TIME {
            let part = min(first + comptime!(i as u32 * groups), stack.parts - 1);
            some[i] = load_quad(from + u64::cast_from(part) * (u64::cast_from(stack.size) * 4));
        }
        #[unroll]
        for i in 0..AT_A_TIME {
            let there = first + comptime!(i as u32 * groups) < stack.parts;
            sum += select(there, some[i], Vector::new(0.0f32));
        }
    }
    #[unroll]
    for e in 0..4usize {
        shared[(comptime!(e as u32 * UNITS) + UNIT_POS) as usize] = sum.extract(e);
    }
    sync_cube();
    let mut all = Vector::<f32, Const<4>>::new(0.0f32);
    if UNIT_POS_Y == 0 {
        #[unroll]
        for e in 0..4usize {
            let mut total = f32::new(0.0);
            #[unroll]
            for group in 0..groups {
                let at = comptime!(e as u32 * UNITS + group * UNITS / GROUPS) + UNIT_POS_X;
                total += shared[at as usize];
            }
            all.insert(e, total);
        }
    }
    all
}

/// dbias and dα.
#[cube]
fn add_rows(
    parts: &Parts,
    results: &mut Results,
    shared: &mut Shared<[f32]>,
    rows: Rows,
    #[comptime] n: usize,
) {
    let (biases, groups) = comptime!((biases(n), sharing(n)));
    let (columns, dots) = comptime!((biases + 3, n as u32 + 1));
    let (group, column) = (UNIT_POS / columns, UNIT_POS % columns);
    let mut sum = f32::new(0.0);
    if group < groups {
        if column < biases {
            sum = add_column(&parts.bias, column, group, rows.tokens, biases, groups);
        } else {
            sum = add_column(&parts.alpha, column - biases, group, rows.tokens, 3u32, groups);
        }
        if column < comptime!(n as u32) {
            sum += add_column(&parts.dots, column, group, rows.dots, dots, groups);
        } else if column == biases {
            sum += add_column(&parts.dots, dots - 1, group, rows.dots, dots, groups);
        }
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS < columns {
        let mut all = f32::new(0.0);
        #[unroll]
        for group in 0..groups {
            all += shared[(UNIT_POS + comptime!(group * columns)) as usize];
        }
        if UNIT_POS < biases {
            results.bias[UNIT_POS as usize] = all;
        } else {
            results.alpha[(UNIT_POS - biases) as usize] = all;
        }
    }
}

/// The sum of every so manyth row of a column, from that of a group on.
#[cube]
fn add_column(
    of: &[f32],
    column: u32,
    group: u32,
    rows: u32,
    #[comptime] columns: u32,
    #[comptime] groups: u32,
) -> f32 {
    let mut sum = f32::new(0.0);
    for first in range_stepped(group, rows, comptime!(groups * AT_A_TIME as u32)) {
        let mut some = Array::<f32>::new(AT_A_TIME);
        #[unroll]
        for i in 0..AT_A_TIME {
            let row = min(first + comptime!(i as u32 * groups), rows - 1);
            some[i] = of[(row * columns + column) as usize];
        }
        #[unroll]
        for i in 0..AT_A_TIME {
            let there = first + comptime!(i as u32 * groups) < rows;
            sum += select(there, some[i], 0.0);
        }
    }
    sum
}

/// What has been left: of dφ by groups, of the layer before by boxes, a row each, of the last two by tokens and by groups.
pub(super) struct Left<'a> {
    pub(super) phi: &'a CubeTensor,
    pub(super) layer: Option<&'a CubeTensor>,
    pub(super) totals: &'a Totals,
    pub(super) dots: &'a CubeTensor,
}

/// Where sums go: dφ, if there is more than one part, dh_post and dh_res, dα and dbias.
pub(super) struct Sums<'a> {
    pub(super) phi: Option<&'a CubeTensor>,
    pub(super) layer: Option<[&'a CubeTensor; 2]>,
    pub(super) totals: [&'a CubeTensor; 2],
}

/// Adds parts up, always in the same order.
pub(super) fn add_up(left: Left<'_>, sums: Sums<'_>, n: usize) {
    let [alpha, bias] = sums.totals;
    let client = &alpha.client;
    let elements = |of: &CubeTensor| of.meta.num_elements();
    let stack = |of: Option<&CubeTensor>, size: usize, sums: usize| {
        let parts = of.map_or(0, |of| elements(of) / size) as u32;
        (StackLaunch::new(parts, size, sums), parts, sums.div_ceil(SUMS as usize))
    };
    let of_phi = sums.phi.map_or(0, elements);
    let (phi, groups, cubes_of_phi) = stack(sums.phi.map(|_| left.phi), of_phi, of_phi);
    let of_layer = sums.layer.map_or(0, |[post, res]| elements(post) + elements(res));
    let of_box = left.layer.map_or(0, |of| of.meta.shape()[1]);
    let (layer, boxes, cubes_of_layer) = stack(left.layer, of_box, of_layer);
    let rows = [&left.totals.bias, left.dots].map(|of| of.meta.shape()[0] as u32);
    let unused = left.dots;
    let layer_parts = left.layer.unwrap_or(unused);
    let [post, res] = sums.layer.unwrap_or([unused; 2]);
    let phi_sums = sums.phi.unwrap_or(unused);
    let address = launch::address_type(&[left.phi, layer_parts, phi_sums, res]);
    let at_a_time = |units: u32| units * AT_A_TIME as u32;
    let ways = [
        ("several groups", groups > 1),
        ("several boxes", boxes > 1),
        ("more groups than at a time", groups > at_a_time(GROUPS)),
        ("more boxes than at a time", boxes > at_a_time(GROUPS)),
        ("more rows than at a time", rows.iter().any(|rows| *rows > at_a_time(sharing(n)))),
    ];
    launch::plans::note("mhc_pre sums", &(n, address), &ways);
    let argument = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
    // SAFETY: sums are checked against their number, rows against theirs, and parts hold whole fours; what there is not has
    // no cubes.
    unsafe {
        add_up_kernel::launch_unchecked(
            client,
            launch::grid(client, 1 + cubes_of_phi + cubes_of_layer),
            CubeDim::new_2d(UNITS / GROUPS, GROUPS),
            address,
            PartsLaunch::new(
                argument(left.phi),
                argument(layer_parts),
                argument(&left.totals.bias),
                argument(&left.totals.alpha),
                argument(left.dots),
            ),
            ResultsLaunch::new(
                argument(phi_sums),
                argument(post),
                argument(res),
                argument(bias),
                argument(alpha),
            ),
            phi,
            layer,
            RowsLaunch::new(rows[0], rows[1]),
            cubes_of_phi as u32,
            n,
        );
    }
}

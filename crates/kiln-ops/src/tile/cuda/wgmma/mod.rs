//! The launch of products on Hopper's tensor cores.

mod consumer;
mod kernel;
mod plan;
mod product;

use super::maps::{map, operand};
use super::ptx::Float16;
use super::schedule::order::{self, Tiles};
use super::schedule::{ROWS, Scheduler, TileGridLaunch};
use super::store::Stored;
use crate::launch;
use crate::tile::cuda::second::{Dual, Second};
use crate::tile::epilogue::Epilogue;
use crate::tile::finish::{FinishLaunch, Linear};
use crate::tile::problem::Problem;
use crate::tile::split_k;
use crate::tile::view::{MatrixView, Order};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{wgmma_cluster_kernel, wgmma_kernel};
use plan::Plan;
use product::{UNITS, WgmmaProduct, WgmmaStore};

/// Rows of tiles that are made together, so that they share columns of B in the cache. Where a row has few
/// tiles, row after row: A is read once then. (dX of 32768×50304·50304×768 on an H200: 3084 µs in bands of 16,
/// 3065 of 8, 3038 of 4, 3013 of 1; 8192³: 1326, 1327, 1347 and 1407.)
fn group(tiles_n: usize) -> u32 {
    if tiles_n <= 8 { 1 } else { 16 }
}

/// Makes `out`, whose rows are aligned to 16 bytes. Of joined products it is `[2, M, N]`, or anything if they
/// are not kept.
pub(super) fn run<Ep: Epilogue>(
    problem: &Problem,
    second: Option<&Second>,
    in_place: bool,
    out: &CubeTensor,
) {
    let client = &out.client;
    let p = problem;
    let dual = second.map_or(Dual::None, |second| second.dual);
    let plan = plan::plan(p, dual, launch::multiprocessors(client));
    let Plan { tile, depth, splits } = plan;
    let split = splits > 1;
    // Parts stand in rows of their own, padded as TMA wants them.
    let pitch = match split {
        true => p.n.next_multiple_of(4),
        false => out.meta.strides()[out.meta.strides().len() - 2],
    };
    let target = match split {
        true => split_k::workspace(out, p.op, splits * p.batches * p.m, p.n, pitch),
        false => out.clone(),
    };
    let columns = dual.columns(tile.n);
    let tiles @ [tiles_m, tiles_n] = [p.m.div_ceil(ROWS), p.n.div_ceil(columns)];
    let mut scheduler = Scheduler {
        group: 1,
        cluster: tile.cluster as u32,
        triangles: p.triangles,
        symmetric: p.symmetric,
    };
    if !scheduler.ordered() {
        scheduler.group = group(launch::limits::reckoned(p.n).div_ceil(columns));
    }
    let (a, b, float) = (p.a.order, p.b.order, Float16::of(p.a.tensor.dtype));
    let store = store(p, &plan, dual, in_place, target.dtype);
    let product = WgmmaProduct { tile, float, a, b, store, scheduler, dual };
    let places = match p.symmetric {
        true => order::symmetric_tiles(p.m, columns),
        false => tiles_m * tiles_n * splits,
    };
    let total = places * tile.cluster * p.batches;
    let cubes = match tile.cluster {
        1 => total.min(launch::multiprocessors(client) * tile.cubes),
        _ => total,
    };
    let order = Tiles::of(p, columns);
    let unused = || launch::unused(out, DType::F32);
    let added = p.add.as_ref().map(|(add, _)| add).filter(|_| store.linear.add);
    let add = added.map(|add| add.tensor.clone());
    let add = add.unwrap_or_else(unused);
    let scales = p.alpha.scales.clone().filter(|_| store.linear.device_scale);
    let dtypes = [p.a.tensor.dtype, add.dtype, target.dtype].map(dtype_to_elem_type);
    let [rows, cols] = if p.transposed { [p.n, p.m] } else { [p.m, p.n] };
    // The rows of the joined result are those of `out`.
    let result = |tensor: &CubeTensor, matrices: usize, pitch: usize| {
        map(tensor, [matrices, rows, cols], [rows * pitch, pitch], 64)
    };
    let matrices = if dual == (Dual::Joined { keep: true }) { 2 } else { splits * p.batches };
    let joined = second.and_then(|second| second.joined.as_ref()).unwrap_or(&target);
    let more = match added.filter(|_| store.loaded) {
        Some(add) => operand(add, 64, true),
        None => operand(second.map_or(&p.b, |second| &second.b), columns, b == Order::ColMajor),
    };
    let kernel = match tile.cluster {
        1 => wgmma_kernel::launch_unchecked::<Ep>,
        _ => wgmma_cluster_kernel::launch_unchecked::<Ep>,
    };
    let address = launch::address_type(&[&add]);
    let ways = [
        ("parts of K", split),
        ("a batch", p.batches > 1),
        ("several tiles a cube", total > cubes),
        ("more blocks than stages", depth + if store.loaded { 2 } else { 0 } > tile.stages),
        ("C through the ring", store.loaded),
    ];
    launch::plans::note("product on wgmma", &(&product, address, dtypes), &ways);
    // SAFETY: TMA keeps to the shapes of its maps, C is read inside M and N only.
    unsafe {
        kernel(
            client,
            launch::grid(client, cubes),
            CubeDim::new_1d(UNITS),
            address,
            operand(&p.a, ROWS, a == Order::RowMajor),
            operand(&p.b, columns, b == Order::ColMajor),
            more,
            result(&target, matrices, pitch),
            result(joined, 1, pitch),
            add.into_buffer_arg(),
            scales.unwrap_or_else(unused).into_buffer_arg(),
            order::argument(order, p, cubes / tile.cluster, out),
            FinishLaunch::of(p),
            TileGridLaunch::of(p, tiles, depth, splits, scheduler),
            product,
            dtypes,
        );
    }
    if split {
        split_k::add_up(&target, splits, p, out);
    }
}

/// How the result is finished and stored, or a part of it.
fn store(problem: &Problem, plan: &Plan, dual: Dual, in_place: bool, dtype: DType) -> WgmmaStore {
    let mut linear = Linear::of(problem, plan.splits > 1);
    let stored = match dtype {
        DType::F32 => Stored::F32,
        dtype => Stored::Float16(Float16::of(dtype)),
    };
    // What stands where the result goes is added on the way there, once: no second reader.
    let transposed = problem.transposed;
    let straight = !problem.symmetric && !transposed;
    let once = in_place && problem.beta() == 1.0 && problem.alpha.scales.is_none() && straight;
    let accumulate = linear.add && once && dtype == DType::F32;
    linear.add &= !accumulate;
    // Rows that TMA can read, a matrix for each product; a cube that makes whole tiles reads them.
    let loads = |add: &MatrixView| {
        let own = add.batches == problem.batches && add.row_major() && add.aligned();
        own && add.tensor.dtype == problem.a.tensor.dtype
    };
    let single = dual == Dual::None && !problem.triangles.masked();
    let whole = plan.tile.cluster == 1 && single;
    let loaded = whole && linear.add && problem.add.as_ref().is_some_and(|(add, _)| loads(add));
    WgmmaStore { linear, loaded, stored, accumulate, transposed }
}

//! The launch of products on tensor cores through mma.sync.

mod cp_async;
mod store;
mod tma;
mod warp;

use super::maps::operand;
use super::ptx::Float16;
use super::schedule::order::{self, Tiles};
use super::schedule::{DEPTH, ROWS, Scheduler, TileGridLaunch};
use crate::launch;
use crate::tile::finish::{FinishLaunch, Linear};
use crate::tile::problem::Problem;
use crate::tile::split_k;
use crate::tile::view::{OperandLaunch, Order};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cp_async::mma_kernel;
use cubecl::prelude::*;
use tma::mma_tma_kernel;
use warp::{MmaProduct, UNITS};

/// Rows of tiles that are made together, so that they share columns of B in the cache.
const GROUP: u32 = 8;
/// Bytes of shared memory for barriers, alignment and what the driver takes.
const BESIDE: usize = 2048;

/// Columns of a tile and stages of the ring for so many bytes of shared memory: 227 KiB on Hopper, 163
/// on an A100, 99 on cards for desktops, where wide tiles have no room for three stages.
fn ring(wide: bool, memory: usize) -> (usize, usize) {
    let stages = |n: usize| (memory - BESIDE) / ((ROWS + n) * DEPTH * 2);
    let n = if wide && stages(256) >= 3 { 256 } else { ROWS };
    (n, stages(n).min(4))
}

/// How many tiles and cubes, and over which parts of K.
struct Plan {
    n: usize,
    stages: usize,
    depth: usize,
    splits: usize,
}

impl Plan {
    fn new(problem: &Problem, client: &Client) -> Self {
        let p = problem;
        let [m, columns, k, batches] = [p.m, p.n, p.k, p.batches].map(launch::limits::reckoned);
        let number = |n: usize| m.div_ceil(ROWS) * columns.div_ceil(n) * batches;
        // Triangles have long and short sums, which parts of K would not even out; a symmetric result is
        // finished by those that multiply.
        let whole = p.triangles.masked() || p.symmetric;
        // Wide tiles read less; where they leave multiprocessors idle, or for triangles, square ones.
        let wide = !p.triangles.masked() && number(256) >= launch::multiprocessors(client);
        let (n, stages) = ring(wide, client.properties().hardware.max_shared_memory_size);
        let parts = || split_k::number(client, 2 * number(n), k.div_ceil(DEPTH));
        let wanted = if whole { 1 } else { parts() };
        let blocks = p.k.div_ceil(DEPTH);
        let depth = blocks.div_ceil(wanted);
        Self { n, stages, depth, splits: blocks.div_ceil(depth) }
    }
}

/// Makes `out`, whose rows are at any even distance; fed by TMA or by cp.async.
pub(super) fn run(problem: &Problem, out: &CubeTensor, tma: bool) {
    let client = &out.client;
    let p = problem;
    let Plan { n, stages, depth, splits } = Plan::new(p, client);
    let split = splits > 1;
    let pitch = match split {
        true => p.n.next_multiple_of(2),
        false => out.meta.strides()[out.meta.strides().len() - 2],
    };
    let target = match split {
        true => split_k::workspace(out, p.op, splits * p.batches * p.m, p.n, pitch),
        false => out.clone(),
    };
    let linear = Linear::of(p, split);
    let (a, b, float) = (p.a.order, p.b.order, Float16::of(p.a.tensor.dtype));
    let (triangles, symmetric) = (p.triangles, p.symmetric);
    let scheduler = Scheduler { group: GROUP, cluster: 1, triangles, symmetric };
    let product = MmaProduct { n, stages, float, a, b, linear, scheduler };
    let unused = || launch::unused(out, DType::F32);
    let add = p.add.as_ref().filter(|_| linear.add).map(|(add, _)| add.tensor.clone());
    let add = add.unwrap_or_else(unused);
    let scales = p.alpha.scales.clone().filter(|_| linear.device_scale).unwrap_or_else(unused);
    let dtypes = [p.a.tensor.dtype, add.dtype, target.dtype].map(dtype_to_elem_type);
    let tiles = [p.m.div_ceil(ROWS), p.n.div_ceil(n)];
    let places = match symmetric {
        true => order::symmetric_tiles(p.m, n),
        false => tiles[0] * tiles[1] * splits,
    };
    let cubes = (places * p.batches).min(launch::multiprocessors(client));
    let grid = TileGridLaunch::of(p, tiles, depth, splits, scheduler);
    let order = order::argument(Tiles::of(p, n), p, cubes, out);
    let finish = FinishLaunch::of(p);
    // What is mirrored is stored element by element.
    let neighbours = if symmetric { 1 } else { 2 };
    let tensors = [&p.a.tensor, &p.b.tensor, &add, &target];
    let address = launch::address_type(if tma { &tensors[2..] } else { &tensors[..] });
    let ways = [
        ("parts of K", split),
        ("a batch", p.batches > 1),
        ("several tiles a cube", places * p.batches > cubes),
        ("more blocks than stages", depth > stages),
    ];
    let kernel = if tma { "product on mma.sync, by TMA" } else { "product on mma.sync" };
    launch::plans::note(kernel, &(&product, neighbours, address, dtypes), &ways);
    if tma {
        // SAFETY: TMA keeps to the shapes of its maps, C and the result are only touched inside M
        // and N.
        unsafe {
            mma_tma_kernel::launch_unchecked(
                client,
                launch::grid(client, cubes),
                CubeDim::new_1d(UNITS),
                address,
                neighbours,
                operand(&p.a, 64, a == Order::RowMajor),
                operand(&p.b, 64, b == Order::ColMajor),
                add.into_buffer_arg(),
                scales.into_buffer_arg(),
                order,
                target.clone().into_buffer_arg(),
                finish,
                pitch,
                grid,
                product,
                dtypes,
            );
        }
    } else {
        // SAFETY: copies beyond the operands have no bytes, C and the result are only touched inside
        // M and N.
        unsafe {
            mma_kernel::launch_unchecked(
                client,
                launch::grid(client, cubes),
                CubeDim::new_1d(UNITS),
                address,
                neighbours,
                p.a.tensor.clone().into_buffer_arg(),
                p.b.tensor.clone().into_buffer_arg(),
                add.into_buffer_arg(),
                scales.into_buffer_arg(),
                order,
                target.clone().into_buffer_arg(),
                OperandLaunch::new(p.a.batch_step(), p.a.ld),
                OperandLaunch::new(p.b.batch_step(), p.b.ld),
                finish,
                pitch,
                grid,
                p.k as u32,
                product,
                dtypes,
            );
        }
    }
    if split {
        split_k::add_up(&target, splits, p, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_into_shared_memory() {
        for (memory, expected) in
            [(227, [(128, 4), (256, 4)]), (163, [(128, 4), (256, 3)]), (99, [(128, 3), (128, 3)])]
        {
            assert_eq!(
                [false, true].map(|wide| ring(wide, memory << 10)),
                expected,
                "{memory} KiB"
            );
        }
    }
}

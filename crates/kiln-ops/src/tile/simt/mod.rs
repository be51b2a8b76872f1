//! The launch of products on plain units.

mod kernel;

use super::finish::{FinishLaunch, Linear};
use super::problem::Problem;
use super::split_k;
use super::view::OperandLaunch;
use crate::launch::{self, limits::reckoned};
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{SimtProduct, SimtTile, SizesLaunch, simt_kernel};
pub(crate) use kernel::{fragment, load_block, place};

/// Makes `out`, contiguous.
pub(super) fn run(problem: &Problem, out: &CubeTensor) {
    run_tiles(problem, out, tile(&out.client, problem));
}

/// The same where M or N is small, with tiles that are no wider.
pub(super) fn run_thin(problem: &Problem, out: &CubeTensor) {
    let unrolled = launch::plane_size(&out.client) != 1;
    run_tiles(problem, out, SimtTile::thin(problem.m, problem.n, unrolled));
}

fn run_tiles(problem: &Problem, out: &CubeTensor, tile: SimtTile) {
    let p = problem;
    let client = &out.client;
    let tiles_n = p.n.div_ceil(tile.n);
    let tiles = p.m.div_ceil(tile.m) * tiles_n;
    // Triangles have long and short sums, which parts of K would not even out.
    let wanted = match p.triangles.masked() {
        true => 1,
        false => {
            let [m, n, k, batches] = [p.m, p.n, p.k, p.batches].map(reckoned);
            let tiles = m.div_ceil(tile.m) * n.div_ceil(tile.n) * batches;
            split_k::number(client, tiles, k.div_ceil(tile.k))
        }
    };
    let part = p.k.div_ceil(wanted).next_multiple_of(tile.k);
    let splits = p.k.div_ceil(part);
    let split = splits > 1;
    let target = match split {
        true => split_k::workspace(out, p.op, splits * p.batches * p.m, p.n, p.n),
        false => out.clone(),
    };
    let [a_size, b_size] = [&p.a, &p.b].map(|view| view.vector_size(client, 16));
    // What is mirrored is stored element by element.
    let out_size = if p.n.is_multiple_of(4) && !p.symmetric { 4 } else { 1 };
    let linear = Linear::of(p, split);
    let (a, b, triangles, symmetric) = (p.a.order, p.b.order, p.triangles, p.symmetric);
    let product = SimtProduct { tile, a, b, triangles, symmetric, linear };
    let add = p.add.as_ref().filter(|_| linear.add).map(|(add, _)| &add.tensor);
    let scales = p.alpha.scales.clone().filter(|_| linear.device_scale);
    let dtypes = [p.a.tensor.dtype, add.map_or(p.a.tensor.dtype, |add| add.dtype), target.dtype];
    let address = launch::address_type(&[&p.a.tensor, &p.b.tensor, &target]);
    let ways = [("parts of K", split), ("a batch", p.batches > 1)];
    launch::plans::note(
        "product on plain units",
        &(&product, a_size, b_size, out_size, address, dtypes),
        &ways,
    );
    // SAFETY: positions are checked against M, N and K before every read and write; aliases that
    // stand in for C and the scales are not touched.
    unsafe {
        simt_kernel::launch_unchecked(
            client,
            launch::grid(client, tiles * splits * p.batches),
            CubeDim::new_1d(tile.units() as u32),
            address,
            a_size,
            b_size,
            out_size,
            p.a.tensor.clone().into_buffer_arg(),
            p.b.tensor.clone().into_buffer_arg(),
            add.map_or_else(|| BufferArg::alias(0, 1), |add| add.clone().into_buffer_arg()),
            scales.map_or_else(|| BufferArg::alias(0, 1), CubeTensor::into_buffer_arg),
            target.clone().into_buffer_arg(),
            OperandLaunch::new(p.a.batch_step() / a_size, p.a.ld / a_size),
            OperandLaunch::new(p.b.batch_step() / b_size, p.b.ld / b_size),
            SizesLaunch::new(p.m, p.n, p.k, p.batches, splits, part, tiles_n, tiles),
            FinishLaunch::of(p),
            product,
            dtypes.map(dtype_to_elem_type),
        );
    }
    if split {
        split_k::add_up(&target, splits, p, out);
    }
}

/// The tile: as large as fills the device.
fn tile(client: &Client, problem: &Problem) -> SimtTile {
    if launch::plane_size(client) == 1 {
        return SimtTile::PORTABLE;
    }
    let [m, n, batches] = [problem.m, problem.n, problem.batches].map(reckoned);
    let tiles = |tile: SimtTile| m.div_ceil(tile.m) * n.div_ceil(tile.n) * batches;
    if tiles(SimtTile::LARGE) >= launch::multiprocessors(client) {
        SimtTile::LARGE
    } else {
        SimtTile::SMALL
    }
}

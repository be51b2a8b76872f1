//! The launch of products on tensor cores through mma.sync.

mod kernel;
mod tma;
mod warp;

use super::maps::operand;
use super::operand::Order;
use super::product::Operands;
use super::ptx::Half;
use super::schedule::{DEPTH, ROWS, Walk};
use super::splits;
use super::units::LinesLaunch;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::mma_kernel;
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

/// Makes `out`, whose rows are at any even distance; fed by TMA or by cp.async.
pub(super) fn run(o: &Operands, out: &CubeTensor, tma: bool) {
    let client = &out.client;
    let multiprocessors = launch::multiprocessors(client);
    let tiles = |n: usize| [o.m.div_ceil(ROWS), o.n.div_ceil(n)];
    let number = |n: usize| tiles(n).iter().product::<usize>() * o.batches;
    // Wide tiles read less; where they leave multiprocessors idle, or for triangles, square ones.
    let wide = !o.triangles.masked() && number(256) >= multiprocessors;
    let (n, stages) = ring(wide, client.properties().hardware.max_shared_memory_size);
    let blocks = o.k.div_ceil(DEPTH);
    let wanted = match o.triangles.masked() {
        true => 1,
        false => splits::number(client, 2 * number(n), blocks),
    };
    let depth = blocks.div_ceil(wanted);
    let splits = blocks.div_ceil(depth);
    let split = splits > 1;
    let pitch = match split {
        true => o.n.next_multiple_of(2),
        false => out.meta.strides()[out.meta.strides().len() - 2],
    };
    let target = match split {
        true => splits::workspace(out, o.op, splits * o.batches * o.m, o.n, pitch),
        false => out.clone(),
    };
    let epilogue = o.epilogue(split);
    let (a, b, triangles) = (o.a.order, o.b.order, o.triangles);
    let half = Half::of(o.a.tensor.dtype);
    let walk = Walk { group: GROUP, cluster: 1, triangles, symmetric: false };
    let product = MmaProduct { n, stages, half, a, b, epilogue, walk };
    let add = o.add.as_ref().filter(|_| epilogue.add).map(|(add, _)| add.tensor.clone());
    let add = add.unwrap_or_else(|| launch::unused(out, DType::F32));
    let dtypes = [o.a.tensor.dtype, add.dtype, target.dtype].map(dtype_to_elem_type);
    let [tiles_m, _] = tiles(n);
    let cubes = (number(n) * splits).min(multiprocessors);
    let (grid, sizes) = (launch::grid(client, cubes), o.blocks(tiles(n), depth, splits, walk));
    let (order, alpha) = (o.order(o.triangular(tiles_m), cubes, out), o.alpha as f32);
    if tma {
        // SAFETY: TMA keeps to the shapes of its maps, C and the result are only touched inside M
        // and N.
        unsafe {
            mma_tma_kernel::launch_unchecked(
                client,
                grid,
                CubeDim::new_1d(UNITS),
                launch::address_type(&[&add, &target]),
                2,
                operand(&o.a, 64, a == Order::Rows),
                operand(&o.b, 64, b == Order::Columns),
                add.into_buffer_arg(),
                order,
                target.clone().into_buffer_arg(),
                o.addend(),
                pitch,
                o.m as u32,
                o.n as u32,
                sizes,
                alpha,
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
                grid,
                CubeDim::new_1d(UNITS),
                launch::address_type(&[&o.a.tensor, &o.b.tensor, &add, &target]),
                2,
                o.a.tensor.clone().into_buffer_arg(),
                o.b.tensor.clone().into_buffer_arg(),
                add.into_buffer_arg(),
                order,
                target.clone().into_buffer_arg(),
                LinesLaunch::new(o.a.step(), o.a.line),
                LinesLaunch::new(o.b.step(), o.b.line),
                o.addend(),
                pitch,
                o.m as u32,
                o.n as u32,
                o.k as u32,
                sizes,
                alpha,
                product,
                dtypes,
            );
        }
    }
    if split {
        splits::add_up(&target, splits, o, out);
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

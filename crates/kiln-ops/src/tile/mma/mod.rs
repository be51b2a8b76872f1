//! The launch of products on tensor cores through mma.sync.

mod kernel;

use super::product::Operands;
use super::ptx::Half;
use super::schedule::{DEPTH, ROWS};
use super::splits;
use super::units::LinesLaunch;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{MmaProduct, UNITS, mma_kernel};

/// Makes `out`, whose rows are at any even distance.
pub(super) fn run(o: &Operands, out: &CubeTensor) {
    let client = &out.client;
    let multiprocessors = launch::multiprocessors(client);
    let tiles = |n: usize| [o.m.div_ceil(ROWS), o.n.div_ceil(n)];
    let number = |n: usize| tiles(n).iter().product::<usize>() * o.batches;
    // Wide tiles read less; where they leave multiprocessors idle, or for triangles, square ones.
    let wide = !o.triangles.masked() && number(256) >= multiprocessors;
    let n = if wide { 256 } else { ROWS };
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
    let product = MmaProduct { n, half, a, b, epilogue, triangles };
    let [add_batch, add_row, add_col] = o.add_strides();
    let add = o.add.as_ref().filter(|_| epilogue.add).map(|(add, _)| add.tensor.clone());
    let add = add.unwrap_or_else(|| launch::unused(out, DType::F32));
    let dtypes = [o.a.tensor.dtype, add.dtype, target.dtype];
    let [tiles_m, _] = tiles(n);
    let cubes = (number(n) * splits).min(multiprocessors);
    // SAFETY: copies beyond the operands have no bytes, C and the result are only touched inside M
    // and N.
    unsafe {
        mma_kernel::launch_unchecked(
            client,
            launch::grid(client, cubes),
            CubeDim::new_1d(UNITS),
            launch::address_type(&[&o.a.tensor, &o.b.tensor, &add, &target]),
            o.a.tensor.clone().into_buffer_arg(),
            o.b.tensor.clone().into_buffer_arg(),
            add.into_buffer_arg(),
            o.order(tiles_m, cubes, out),
            target.clone().into_buffer_arg(),
            LinesLaunch::new(o.a.step(), o.a.line),
            LinesLaunch::new(o.b.step(), o.b.line),
            add_batch,
            add_row,
            add_col,
            pitch,
            o.m as u32,
            o.n as u32,
            o.k as u32,
            o.blocks(tiles(n), depth, splits),
            o.alpha as f32,
            o.beta() as f32,
            product,
            dtypes.map(dtype_to_elem_type),
        );
    }
    if split {
        splits::add_up(&target, splits, o, out);
    }
}

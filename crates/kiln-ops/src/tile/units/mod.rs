//! The launch of products on plain units.

mod kernel;

use super::product::Operands;
use super::splits;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
#[cfg(feature = "cuda")]
pub(super) use kernel::Lines;
pub(super) use kernel::LinesLaunch;
use kernel::{SizesLaunch, UnitProduct, UnitTile, units_kernel};

/// Makes `out`, contiguous.
pub(super) fn run(o: &Operands, out: &CubeTensor) {
    run_tiles(o, out, tile(&out.client, o));
}

/// The same where M or N is small, with tiles that are no wider.
pub(super) fn run_thin(o: &Operands, out: &CubeTensor) {
    let unrolled = launch::plane_size(&out.client) != 1;
    run_tiles(o, out, UnitTile::thin(o.m, o.n, unrolled));
}

fn run_tiles(o: &Operands, out: &CubeTensor, tile: UnitTile) {
    let client = &out.client;
    let tiles_n = o.n.div_ceil(tile.n);
    let tiles = o.m.div_ceil(tile.m) * tiles_n;
    // Triangles have long and short sums, which parts of K would not even out.
    let wanted = match o.triangles.masked() {
        true => 1,
        false => splits::number(client, tiles * o.batches, o.k.div_ceil(tile.k)),
    };
    let part = o.k.div_ceil(wanted).next_multiple_of(tile.k);
    let splits = o.k.div_ceil(part);
    let split = splits > 1;
    let target = match split {
        true => splits::workspace(out, o.op, splits * o.batches * o.m, o.n, o.n),
        false => out.clone(),
    };
    let [a_size, b_size] = [&o.a, &o.b].map(|stack| stack.vector_size(client, 16));
    let out_size = if o.n.is_multiple_of(4) { 4 } else { 1 };
    let epilogue = o.epilogue(split);
    let product =
        UnitProduct { tile, a: o.a.order, b: o.b.order, triangles: o.triangles, epilogue };
    let [add_batch, add_row, add_col] = o.add_strides();
    let add = o.add.as_ref().filter(|_| epilogue.add).map(|(add, _)| &add.tensor);
    let dtypes = [o.a.tensor.dtype, add.map_or(o.a.tensor.dtype, |add| add.dtype), target.dtype];
    // SAFETY: positions are checked against M, N and K before every read and write; without C the
    // alias that stands in for it is not touched.
    unsafe {
        units_kernel::launch_unchecked(
            client,
            launch::grid(client, tiles * splits * o.batches),
            CubeDim::new_1d(tile.units() as u32),
            launch::address_type(&[&o.a.tensor, &o.b.tensor, &target]),
            a_size,
            b_size,
            out_size,
            o.a.tensor.clone().into_buffer_arg(),
            o.b.tensor.clone().into_buffer_arg(),
            add.map_or_else(|| BufferArg::alias(0, 1), |add| add.clone().into_buffer_arg()),
            target.clone().into_buffer_arg(),
            LinesLaunch::new(o.a.step() / a_size, o.a.line / a_size),
            LinesLaunch::new(o.b.step() / b_size, o.b.line / b_size),
            add_batch,
            add_row,
            add_col,
            SizesLaunch::new(o.m, o.n, o.k, o.batches, splits, part, tiles_n, tiles),
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

/// The tile: as large as fills the device.
fn tile(client: &Client, o: &Operands) -> UnitTile {
    if launch::plane_size(client) == 1 {
        return UnitTile::PORTABLE;
    }
    let tiles = |tile: UnitTile| o.m.div_ceil(tile.m) * o.n.div_ceil(tile.n) * o.batches;
    if tiles(UnitTile::LARGE) >= launch::multiprocessors(client) {
        UnitTile::LARGE
    } else {
        UnitTile::SMALL
    }
}

//! Keys and values of new positions on their way into a cache, in one launch.

use super::super::problem::{HeadsView, Sizes, vector_size};
use super::super::simt::block::Heads;
use super::super::simt::heads;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: usize = 256;

/// What there is, and where it goes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Positions {
    batches: usize,
    heads: usize,
    rows: usize,
    vectors: usize,
    /// Positions in front.
    before: usize,
}

#[cube]
fn copy<E: Float, N: Size>(from: &Heads<E, N>, to: &mut Heads<E, N>, at: usize, of: &Positions) {
    let (column, row) = (at % of.vectors, at / of.vectors);
    let (row, stack) = (row % of.rows, row / of.rows);
    let (head, batch) = (stack % of.heads, stack / of.heads);
    let source = from.head(batch, head) + row * from.row_stride + column;
    let place = to.head(batch, head) + (of.before + row) * to.row_stride + column;
    to.elements[place] = from.elements[source];
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn append_kernel<E: Float, N: Size>(
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    to_k: &mut Heads<E, N>,
    to_v: &mut Heads<E, N>,
    of: Positions,
    #[define(E)] _dtype: ElemType,
) {
    let at = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    let half = of.batches * of.heads * of.rows * of.vectors;
    if at < half {
        copy::<E, N>(k, to_k, at, &of);
    } else if at < 2 * half {
        copy::<E, N>(v, to_v, at - half, &of);
    }
}

/// Writes `k` and `v`, T rows a head, after the first `before` rows of `to_k` and `to_v`, which were `copied` for it
/// if somebody else reads them.
pub(super) fn append(
    [k, v]: [&HeadsView; 2],
    [to_k, to_v]: [&HeadsView; 2],
    sizes: &Sizes,
    before: usize,
    copied: bool,
) {
    let client = &to_k.tensor.client;
    let size = vector_size(&[k, v, to_k, to_v], sizes.width, 16);
    let vectors = sizes.width / size;
    let total = 2 * sizes.batches * sizes.kv_heads * sizes.queries * vectors;
    let most = UNITS.min(client.properties().hardware.max_units_per_cube as usize);
    let address = launch::address_type(&[&k.tensor, &to_k.tensor, &to_v.tensor]);
    launch::plans::note(
        "keys and values into a cache",
        &(size, address),
        &[("after a copy", copied)],
    );
    // SAFETY: places are checked against their number, and a cache has room for the rows.
    unsafe {
        append_kernel::launch_unchecked(
            client,
            launch::grid(client, total.div_ceil(most)),
            CubeDim::new_1d(most as u32),
            address,
            size,
            heads(k, size),
            heads(v, size),
            heads(to_k, size),
            heads(to_v, size),
            PositionsLaunch::new(sizes.batches, sizes.kv_heads, sizes.queries, vectors, before),
            dtype_to_elem_type(k.tensor.dtype),
        );
    }
}

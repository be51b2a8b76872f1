//! Products of x with f32 matrices. x of 16 bits is multiplied on tensor cores, where the other operand has 16 bits too:
//! it becomes the sum of three numbers of x's type, 24 bits or more together. What is left for the next is scaled up, so
//! that it does not become too small for the type.

use super::Dims;
use crate::launch::{self, Rows};
use crate::tile::{Family, Product, view};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

const CUBE: u32 = 256;

/// Into how many numbers of x's type an f32 is cut.
const PARTS: usize = 3;

/// How an f32 is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Parts {
    /// By how many bits each is scaled up beside the one before.
    bits: u32,
    /// By how many bits all are scaled down.
    down: u32,
}

/// For gradients, which may be larger than f16 holds; three parts of it have bits to spare.
const ROOM: u32 = 8;

impl Parts {
    /// Beside an x of this type.
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self { bits: 8, down: 0 },
            DType::F16 => Self { bits: 11, down: 0 },
            _ => unreachable!("f32 is multiplied as it is"),
        }
    }

    /// The same of gradients.
    fn of_gradients(dtype: DType) -> Self {
        let down = if dtype == DType::F16 { ROOM } else { 0 };
        Self { down, ..Self::of(dtype) }
    }

    /// From a part to the next.
    fn step(self) -> f32 {
        (1u32 << self.bits) as f32
    }

    /// Of all of them.
    fn scale(self) -> f32 {
        (1u32 << self.down) as f32
    }
}

/// The number whose parts stand `apart` from each other, the first at `at`.
#[cube]
fn joined(of: &[f32], at: usize, apart: usize, #[comptime] parts: Parts) -> f32 {
    let mut sum = of[at];
    let step = comptime!(1.0 / parts.step());
    sum += (of[at + apart] + of[at + 2 * apart] * step) * step;
    sum * comptime!(parts.scale())
}

/// Where a matrix is, and where its parts go.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    elements: usize,
    columns: usize,
    /// From a row to the next: of what is read, and of what is written.
    from: usize,
    to: usize,
    /// From a part to the next.
    apart: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn split_kernel<E: Float>(
    of: &[f32],
    out: &mut [E],
    places: Places,
    #[comptime] parts: Parts,
    #[define(E)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < places.elements {
        let (row, column) = (at / places.columns, at % places.columns);
        let mut left = of[row * places.from + column] * comptime!(1.0 / parts.scale());
        #[unroll]
        for part in 0..comptime!(PARTS) {
            let stored = E::cast_from(left);
            out[row * places.to + part * places.apart + column] = stored;
            left = (left - f32::cast_from(stored)) * comptime!(parts.step());
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn join_kernel(of: &[f32], out: &mut [f32], places: Places, #[comptime] parts: Parts) {
    let at = ABSOLUTE_POS;
    if at < places.elements {
        let (row, column) = (at / places.columns, at % places.columns);
        out[row * places.to + column] = joined(of, row * places.from + column, places.apart, parts);
    }
}

/// The parts of a matrix, stacked by columns, or by rows.
fn split(
    op: &'static str,
    of: &CubeTensor,
    by_rows: bool,
    parts: Parts,
    dtype: DType,
) -> CubeTensor {
    let [rows, columns] = of.meta.shape()[..] else { unreachable!("a matrix") };
    let (shape, to, apart) = match by_rows {
        true => ([PARTS * rows, columns], columns, rows * columns),
        false => ([rows, PARTS * columns], PARTS * columns, columns),
    };
    let out = launch::output(of, op, "parts", Shape::new(shape), dtype);
    let client = &of.client;
    let address = launch::address_type(&[of, &out]);
    launch::plans::note("mhc_pre split", &(parts, address), &[]);
    let places = PlacesLaunch::new(rows * columns, columns, columns, to, apart);
    // SAFETY: elements are checked against their number, and each has its parts in the result.
    unsafe {
        split_kernel::launch_unchecked(
            client,
            launch::grid(client, (rows * columns).div_ceil(CUBE as usize)),
            CubeDim::new_1d(CUBE),
            address,
            of.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            places,
            parts,
            dtype_to_elem_type(dtype),
        );
    }
    out
}

fn product(
    op: &'static str,
    name: &'static str,
    a: CubeTensor,
    b: CubeTensor,
    family: Option<Family>,
) -> CubeTensor {
    Product { name, family, ..Product::new(op, a, b, DType::F32) }.run()
}

/// The sum of the parts of a matrix of `[rows, columns]` that stand `apart` elements from each other.
fn join(
    op: &'static str,
    name: &'static str,
    of: Rows,
    [rows, columns]: [usize; 2],
    apart: usize,
    parts: Parts,
) -> CubeTensor {
    let client = of.tensor.client.clone();
    let out = launch::output(&of.tensor, op, name, Shape::new([rows, columns]), DType::F32);
    let address = launch::address_type(&[&of.tensor, &out]);
    launch::plans::note("mhc_pre join", &(parts, address), &[]);
    let places = PlacesLaunch::new(rows * columns, columns, of.stride, columns, apart);
    // SAFETY: elements are checked against their number, and each has its parts in the product.
    unsafe {
        join_kernel::launch_unchecked(
            &client,
            launch::grid(&client, (rows * columns).div_ceil(CUBE as usize)),
            CubeDim::new_1d(CUBE),
            address,
            of.tensor.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            places,
            parts,
        );
    }
    out
}

/// x·φᵀ, `[T, rows]`.
pub(super) fn mix(
    op: &'static str,
    x: CubeTensor,
    phi: CubeTensor,
    d: Dims,
    family: Option<Family>,
) -> CubeTensor {
    let dtype = x.dtype;
    if dtype == DType::F32 {
        return product(op, "mix", x, view::transposed(phi), family);
    }
    let parts = Parts::of(dtype);
    let phi = split(op, &phi, true, parts, dtype);
    let of = Rows::new(product(op, "parts of mix", x, view::transposed(phi), family));
    join(op, "mix", of, [d.tokens, d.rows], d.rows, parts)
}

/// dφ = dmᵀ·x.
pub(super) fn of_phi(
    op: &'static str,
    x: CubeTensor,
    dm: CubeTensor,
    d: Dims,
    family: Option<Family>,
) -> CubeTensor {
    let dtype = x.dtype;
    if dtype == DType::F32 {
        return product(op, "grad.phi", view::transposed(dm), x, family);
    }
    let parts = Parts::of_gradients(dtype);
    let dm = split(op, &dm, false, parts, dtype);
    let of = Rows::new(product(op, "parts of grad.phi", view::transposed(dm), x, family));
    let (shape, apart) = ([d.rows, of.width], d.rows * of.stride);
    join(op, "grad.phi", of, shape, apart, parts)
}

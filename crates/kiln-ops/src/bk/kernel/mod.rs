//! The kernels of the resolvent's diagonal: one scan to both sides forward, one backward.
//!
//! With α_j = a_j − z, β_j = b_j·c_j and the minors θ (of what stands before j) and φ (of what stands behind j),
//! sites are steps M_j = [[α_j, −1], [β_j, 0]] of two recurrences:
//!
//! * from the left (θ_{j+1}, β_j θ_j) = M_j · (θ_j, β_{j−1} θ_{j−1}), from (1, 0),
//! * from the right (φ_{j−1}, −φ_j) = (φ_j, −φ_{j+1}) · M_j, from (1, 0),
//!
//! so that one associative product serves both: its first column applied from the left, its first row from the
//! right. Minors leave f32 within a hundred sites, but only ratios are wanted: products and vectors are scaled by
//! powers of two, which rounds nothing. There is no division before the last one, so a pivot of 0 is nothing
//! special. Within a unit the forward goes by the pivots, the ratios themselves, as long as their squares are within
//! f32, and the backward by minors without scaling, as long as they are: that is quicker.
//!
//! The guard: G's denominator is taken for no smaller than [`SMALLEST`] of what it would be without cancellation.
//! Numbers beyond [`LARGEST`] are limited to it. Where a part of T − zI is exactly singular by itself, and coupled by
//! an exact 0 to what follows, all minors behind it are 0: then results are finite, and no more.

mod backward;
mod cap;
mod careful;
mod complex;
mod forward;
mod minors;
mod moebius;
mod recurrences;
mod sites;
mod steps;
mod vectors;

pub use backward::Backward;
pub(crate) use backward::backward;
pub use forward::Forward;
pub(crate) use forward::forward;

use super::BkMode;
use crate::device::Hardware;
use crate::launch::{self, Rows};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Sites of a unit of the forward.
const FORWARD: usize = 16;
/// Sites of a unit of the backward. So many share a record of where the recurrences stand, which it starts from.
pub(crate) const SITES: usize = 8;
/// f32 of that record: the vectors from the left and from the right.
pub(crate) const RECORD: usize = 8;

/// The smallest denominator, 2⁻⁴⁰: a rounding is 2⁻²⁴.
const SMALLEST: f32 = 1.0 / (1u64 << 40) as f32;
/// The largest factor from a scaled G to G, 2⁸⁰: with the smallest denominator G stays within f32.
const SCALED: f32 = (1u128 << 80) as f32;
/// The largest number of a matrix or a gradient, 2¹²⁰.
const LARGEST: f32 = (1u128 << 120) as f32;

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Options {
    causal: bool,
    /// |G| has a limit.
    capped: bool,
    /// `rcp.approx`.
    ptx: bool,
    /// Rows of b and c begin where vectors may, and those of a.
    vectors: bool,
    vectors_of_a: bool,
    /// Indices are 32-bit numbers below 2³¹.
    narrow: bool,
}

/// The matrix T and z, as the kernels read them.
#[derive(CubeType, CubeLaunch)]
struct Matrix {
    a: Box<[f32]>,
    b: Box<[f32]>,
    c: Box<[f32]>,
    z: Box<[f32]>,
    /// Sites of a row.
    length: usize,
    /// Distances of rows; 0 where all share one.
    a_stride: usize,
    b_stride: usize,
    c_stride: usize,
    z_stride: usize,
    /// [`SITES`], for loops that the compiler is to leave loops.
    number: usize,
    #[cube(comptime)]
    options: Options,
}

/// The inputs on the host.
struct Inputs {
    a: Rows,
    b: Rows,
    c: Rows,
    z: Rows,
    options: Options,
    /// Reaches the end of everything.
    address: AddressType,
}

impl Inputs {
    fn new(tensors: [CubeTensor; 4], mode: BkMode, capped: bool) -> Self {
        let [a, b, c, z] = tensors.map(Rows::new);
        let ptx = Hardware::of(&a.tensor.client).ptx;
        let [vectors_of_a, of_b, of_c] = [&a, &b, &c].map(|of| ptx && of.begins(4));
        let vectors = of_b && of_c;
        // To the ends of the inputs' buffers, of G and its cotangent, and of the records.
        let held = [&a, &b, &c, &z].map(|of| of.tensor.handle.size() as usize / size_of::<f32>());
        let of_row = usize::max(2 * a.width, RECORD * a.width.div_ceil(SITES));
        let longest = held.into_iter().fold(a.rows * of_row, usize::max);
        let address = AddressType::from_len_signed(longest);
        let narrow = address == AddressType::U32;
        let causal = mode == BkMode::Causal;
        let options = Options { causal, capped, ptx, vectors, vectors_of_a, narrow };
        Self { a, b, c, z, options, address }
    }

    fn argument(&self) -> MatrixLaunch {
        let stride = |of: &Rows| if of.rows == 1 { 0 } else { of.stride };
        // One site has no neighbours: no buffer is empty.
        let buffer = |of: &Rows| match of.width {
            0 => launch::unused(&of.tensor, of.tensor.dtype).into_buffer_arg(),
            _ => of.tensor.clone().into_buffer_arg(),
        };
        MatrixLaunch::new(
            buffer(&self.a),
            buffer(&self.b),
            buffer(&self.c),
            buffer(&self.z),
            self.a.width,
            stride(&self.a),
            stride(&self.b),
            stride(&self.c),
            stride(&self.z),
            SITES,
            self.options,
        )
    }
}

//! Products with one thin side: 1 to 80 columns (or rows) beside an operand that is large.
//!
//! Decoding is x·W of a few rows, hyper-connections multiply a long matrix by 24 columns, and so do
//! the gradients of their weights. The large operand, R×K elements, is read once and there is little
//! else: R·K·size bytes are the floor, at 4.26 TB/s of copies on an H200 31.5 µs for 8192² of bf16.
//! The tiles of most families are at least 128 wide and pad the thin side to that.
//!
//! A product is transposed so that the large operand is on the left, `Y[R, C] = L[R, K]·T[K, C]`; what was
//! M×N is stored as it was. With C columns each element of L is multiplied C times: at the rate of copies
//! 2.1·10¹² bf16 a second make 34 TFLOP/s of 8 columns and 341 of 80, f32 half of that. Hence
//!
//! * wgmma, in tiles of 64 or 128 columns: bf16 and f16 of more than 32 columns, on Hopper, where R has tiles for
//!   most multiprocessors (64 columns of 8192² on an H200: 36.4 µs, through mma.sync 44.6);
//! * [`mma`]: bf16 and f16 through mma.sync (it makes 430 to 450 TFLOP/s), for any C; CUDA;
//! * [`stream`]: any element type on plain units, up to 8 columns: 17 TFLOP/s of f32; any device;
//! * the tiles of the plain family, only narrower, for f32 of 9 columns and more: 51 TFLOP/s of 24
//!   columns would keep up with memory, and plain units make about 45, so that arithmetic is the floor.
//!
//! Where R alone has too few tiles to fill the device, K is cut into parts as everywhere.
//!
//! This is no member of [`Family`](super::Family): a family can be asked for any product, and these kernels run for
//! few. The path is taken where no family is forced; a thread that forces one gets that.

#[cfg(feature = "cuda")]
mod mma;
#[cfg(not(feature = "cuda"))]
mod mma {
    //! Never asked for: no device of this build is CUDA.

    pub(super) fn run(_: &super::Oriented<'_>, _: &burn_cubecl::tensor::CubeTensor) {
        unreachable!("there are no tensor cores in this build")
    }
}
#[cfg(feature = "cuda")]
mod plan;
mod stream;

use super::cuda;
use super::finish::FinishLaunch;
use super::problem::Problem;
use super::view::MatrixView;
use crate::device::Hardware;
use crate::launch;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Columns of the thin side.
const THIN: usize = 80;
/// Columns that warps multiply at the rate of memory; of more wgmma does.
const WIDE: usize = 32;
/// Columns that plain units multiply at the rate of memory.
const FEW: usize = 8;
/// What the large operand has at least: times the elements of the thin one and of the result, and bytes.
/// Below that it is not what counts: the other operand and the result do, or launches.
const RATIO: usize = 4;
const LEAST: usize = 1 << 16;

/// The kernels of a thin product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Mma,
    Stream,
    /// Narrow tiles of the plain family.
    Simt,
}

/// A product transposed so that its large operand is on the left.
pub(super) struct Oriented<'a> {
    pub(super) o: &'a Problem,
    pub(super) large: &'a MatrixView,
    pub(super) thin: &'a MatrixView,
    /// Rows of the large operand and columns of the thin one.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// The thin side is M.
    pub(super) swapped: bool,
}

impl<'a> Oriented<'a> {
    pub(super) fn new(o: &'a Problem) -> Self {
        if o.n <= o.m {
            Self { o, large: &o.a, thin: &o.b, rows: o.m, cols: o.n, swapped: false }
        } else {
            Self { o, large: &o.b, thin: &o.a, rows: o.n, cols: o.m, swapped: true }
        }
    }

    /// Whether k is the contiguous dimension of the large and of the thin operand.
    pub(super) fn along_k(&self) -> [bool; 2] {
        let left = MatrixView::row_major;
        match self.swapped {
            false => [left(self.large), !left(self.thin)],
            true => [!left(self.large), left(self.thin)],
        }
    }

    /// Distances of matrices, of rows of the large operand and of columns of the thin one, in a matrix
    /// with these distances of matrices, rows and columns.
    fn transposed(&self, [batch, row, col]: [usize; 3]) -> [usize; 3] {
        if self.swapped { [batch, col, row] } else { [batch, row, col] }
    }

    /// Those of the result, or of parts of it, without gaps.
    pub(super) fn out_places(&self) -> PlacesLaunch {
        let [batch, row, col] = self.transposed([self.o.m * self.o.n, self.o.n, 1]);
        PlacesLaunch::new(batch, row, col)
    }

    /// alpha, beta and those of C.
    pub(super) fn finish(&self) -> FinishLaunch {
        FinishLaunch::with_strides(self.o, self.transposed(self.o.add_strides()))
    }
}

/// Where elements of a matrix are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Places {
    /// Distance of two matrices.
    pub(super) batch: usize,
    /// Of two rows.
    pub(super) row: usize,
    /// Of two columns.
    pub(super) col: usize,
}

/// Whether wgmma makes it faster, a tile of all columns for every 128 rows of the large operand.
fn wide(oriented: &Oriented<'_>, client: &Client) -> bool {
    let Oriented { o, large, rows, cols, .. } = oriented;
    let long = *rows >= RATIO * cols && o.k >= RATIO * cols;
    // Pairs of cubes share a tile, and need most of the device.
    let [all, batches] = [*rows, o.batches].map(launch::limits::reckoned);
    let cubes = 2 * all.div_ceil(128) * batches;
    let busy = 4 * cubes >= 3 * launch::multiprocessors(client);
    let whole = !o.triangles.masked() && !o.symmetric;
    let half = large.tensor.dtype != DType::F32;
    half && long && whole && (WIDE + 1..=THIN).contains(cols) && busy && Hardware::of(client).wgmma
}

/// Transposes a product for wgmma so that its large operand is on the left, where that is the faster way.
pub(super) fn transpose(o: &mut Problem, client: &Client) {
    let oriented = Oriented::new(o);
    if oriented.swapped && wide(&oriented, client) {
        o.transpose();
    }
}

/// The kernels for this problem, if the path is theirs; with `high` f32 precision only where they are exact at
/// the rate of memory.
pub(super) fn kernel(
    o: &mut Problem,
    client: &Client,
    high: bool,
    given: Option<&CubeTensor>,
) -> Option<Kernel> {
    let oriented = Oriented::new(o);
    let (rows, cols) = (oriented.rows, oriented.cols);
    let dtype = oriented.large.tensor.dtype;
    let bytes = oriented.large.batches * rows * o.k * dtype.size();
    let fits = !o.triangles.masked()
        && !o.symmetric
        && o.alpha.scales.is_none()
        && cols <= THIN
        && rows >= RATIO * cols
        && o.k >= RATIO * cols
        && bytes >= LEAST;
    let families = wide(&oriented, client) && given.is_none_or(cuda::holds);
    if !fits || (high && cols > FEW) || families {
        return None;
    }
    if dtype != DType::F32 && Hardware::of(client).async_copies {
        if oriented.large.aligned() {
            let swapped = oriented.swapped;
            let thin = if swapped { &mut o.a } else { &mut o.b };
            if !thin.aligned() {
                thin.align();
            }
            if thin.aligned() {
                return Some(Kernel::Mma);
            }
        } else if cols > FEW {
            // The tensor cores of the families are worth a copy into aligned lines.
            return None;
        }
    }
    Some(if cols <= FEW { Kernel::Stream } else { Kernel::Simt })
}

/// Makes `out`, contiguous.
pub(super) fn run(kernel: Kernel, o: &Problem, out: &CubeTensor) {
    match kernel {
        Kernel::Mma => mma::run(&Oriented::new(o), out),
        Kernel::Stream => stream::run(&Oriented::new(o), out),
        Kernel::Simt => super::simt::run_thin(o, out),
    }
}

//! The kernels: after those of rows, one launch for the chunks that MLPs are blended into.
//!
//! A cube has the chunk of one seed and a part of the rows; that of a seed without an MLP ends at once. Hidden units never
//! leave the cube. In the backward it adds the gradients of its MLP up, and a small second launch brings the parts of the
//! rows and the seeds that share an MLP together, in a fixed order, so two runs agree bit for bit.

mod gather;
#[cfg(feature = "cuda")]
mod mma;
mod units;

use super::{OP, mlp_rows};
use crate::kasmina::backend::{self, Blueprints};
use crate::kasmina::kernel as rows;
use crate::launch::{self, Rows};
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// About the cubes of a multiprocessor, of all seeds; those of other seeds end at once. (H200, 2026-11-28, 65536×4096 in bf16,
/// forward and backward: in 128 chunks 999 µs with 16, 972 with 32, 971 with 64; in 64 chunks 1151, 1165 and 1173, all with parts of one length.)
const CUBES: usize = 32;
/// How much shorter short parts are.
const SHORTER: usize = 4;
/// Most f32 of what the cubes of a backward leave for the second launch, unless the seeds of one part need more.
const LEFT: usize = 1 << 24;

/// What the gradients are made of.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The cotangent of y.
    pub dy: FloatTensor<B>,
    /// `[..., H]`.
    pub x: FloatTensor<B>,
    /// Seeds and rows.
    #[extension_type]
    pub of: Blueprints<B>,
    /// `[Q, 4S + 3, S]`.
    pub mlps: FloatTensor<B>,
    /// Whose gradients are wanted: x, alpha, rows, MLPs.
    pub wanted: [bool; 4],
}

/// The sizes of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    rows: usize,
    /// Long parts, and rows of one and of a short one.
    longs: usize,
    long: usize,
    short: usize,
    /// From one row to the next.
    x: usize,
    dy: usize,
    /// Q, and S.
    mlps: usize,
    widest: usize,
}

/// Where the parts of an MLP begin.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Weights {
    first: usize,
    second: usize,
    first_bias: usize,
    second_bias: usize,
}

/// Those of an MLP.
#[cube]
fn weights(mlp: usize, widest: usize) -> Weights {
    let first = mlp * (4 * widest + 3) * widest;
    Weights {
        first,
        second: first + 2 * widest * widest,
        first_bias: first + 4 * widest * widest,
        second_bias: first + (4 * widest + 2) * widest,
    }
}

/// What a backward makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Wanted {
    /// dx.
    x: bool,
    /// What the other gradients are made of.
    sums: bool,
}

/// f32 that a cube leaves: of an MLP, and of alpha.
fn record(widest: usize) -> usize {
    mlp_rows(widest) * widest + 1
}

/// The first row of a part, and the one after its last.
#[cube]
fn part_of(sizes: &Sizes, part: usize) -> (usize, usize) {
    (begin_of(sizes, part), begin_of(sizes, part + 1))
}

#[cube]
fn begin_of(sizes: &Sizes, part: usize) -> usize {
    let longs = min(part, sizes.longs);
    min(longs * sizes.long + (part - longs) * sizes.short, sizes.rows)
}

/// How rows are in parts: of those that are wanted half are long, and come first. Where all were as long as each other, the last ones
/// worked alone for a while (H200, 2026-11-28, 65536×4096 in bf16, in 128 and in 64 chunks: backward 527 and 628 µs, now 511
/// and 586; forward 396 and 424, now 403 and 402).
struct Parts {
    rows: usize,
    count: usize,
    longs: usize,
    long: usize,
    short: usize,
}

impl Parts {
    /// Of which a cube takes `block` rows at a time, at most so many.
    fn new(client: &Client, rows: usize, seeds: usize, block: usize, most: usize) -> Self {
        let wanted = (launch::multiprocessors(client) * CUBES / seeds).clamp(1, most.max(1));
        let shorts = wanted / 2;
        let longs = wanted - shorts;
        let long = (rows * SHORTER).div_ceil(longs * SHORTER + shorts).next_multiple_of(block);
        let short = (long / SHORTER).next_multiple_of(block);
        let left = rows.saturating_sub(longs * long);
        let count = rows.div_ceil(long).min(longs) + left.div_ceil(short);
        Self { rows, count, longs, long, short }
    }

    /// Which ways a launch takes.
    fn ways(&self) -> [(&'static str, bool); 2] {
        let short = self.count > self.longs && self.short < self.long;
        [("parts", self.count > 1), ("short parts", short)]
    }

    /// With distances of rows, the number of MLPs and the width of the widest.
    fn sizes(&self, [x, dy]: [usize; 2], mlps: usize, widest: usize) -> SizesLaunch {
        SizesLaunch::new(self.rows, self.longs, self.long, self.short, x, dy, mlps, widest)
    }
}

/// y, and mean and variance of the chunks; contiguous.
pub(super) fn forward(
    x: CubeTensor,
    of: Blueprints<CubeBackend>,
    mlps: CubeTensor,
) -> [CubeTensor; 3] {
    let outputs = rows::forward(OP, x.clone(), of.clone(), true);
    if x.meta.shape().num_elements() > 0 {
        let (x, mlps, y) = (Rows::new(x), into_contiguous(mlps), &outputs[0]);
        #[cfg(feature = "cuda")]
        if let Some(plan) = mma_plan(&of, &[&x], &mlps) {
            mma::forward(x, of, mlps, y, plan);
            return outputs;
        }
        units::forward(x, of, mlps, y);
    }
    outputs
}

/// Those gradients that are wanted; contiguous.
pub(super) fn backward(backward: Backward<CubeBackend>) -> [Option<CubeTensor>; 4] {
    let Backward { dy, x, of, mlps, wanted } = backward;
    let [wants_x, wants_alpha, wants_rows, wants_mlps] = wanted;
    let rows = backend::Backward {
        dy: dy.clone(),
        x: x.clone(),
        of: of.clone(),
        wanted: [wants_x, wants_alpha, wants_rows],
    };
    let [dx, dalpha, drows] = match wants_x || wants_alpha || wants_rows {
        true => rows::backward(OP, rows, true),
        false => [const { None }; 3],
    };
    if dy.meta.shape().num_elements() == 0 {
        let zeros = || launch::zeros(&dy, mlps.meta.shape().clone(), mlps.dtype);
        let dmlps = wants_mlps.then(zeros);
        return [dx, dalpha, drows, dmlps];
    }
    let output = || launch::output(&dy, OP, "grad.mlps", mlps.meta.shape().clone(), mlps.dtype);
    let dmlps = wants_mlps.then(output);
    if !wants_x && !wants_alpha && !wants_mlps {
        return [dx, dalpha, drows, dmlps];
    }
    let (x, dy, mlps) = (Rows::new(x), Rows::new(dy), into_contiguous(mlps));
    let (of_x, sums) = (dx.as_ref(), wants_alpha || wants_mlps);
    #[cfg(feature = "cuda")]
    let left = match mma_plan(&of, &[&x, &dy], &mlps) {
        Some(plan) => mma::backward(x, dy, of.clone(), mlps, of_x, sums, plan),
        None => units::backward(x, dy, of.clone(), mlps, of_x, sums),
    };
    #[cfg(not(feature = "cuda"))]
    let left = units::backward(x, dy, of.clone(), mlps, of_x, sums);
    if let Some((left, parts)) = left {
        gather::gather(left, parts, of, dalpha.as_ref(), dmlps.as_ref());
    }
    [dx, dalpha, drows, dmlps]
}

/// How tensor cores make it, where they do.
#[cfg(feature = "cuda")]
fn mma_plan(of: &Blueprints<CubeBackend>, rows: &[&Rows], mlps: &CubeTensor) -> Option<mma::Plan> {
    let ([seeds, features, _], [.., widest]) = (of.sizes(), mlps.meta.shape().dims::<3>());
    mma::Plan::new(widest, features, seeds, rows, mlps)
}

/// What the cubes of a backward leave, `[parts, C, …]`.
fn left(like: &CubeTensor, parts: usize, seeds: usize, widest: usize) -> CubeTensor {
    launch::scratch(like, OP, "sums", Shape::new([parts, seeds, record(widest)]), DType::F32)
}

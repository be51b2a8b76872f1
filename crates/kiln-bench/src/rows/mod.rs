//! One row an operator.

mod adamw;
mod add_rms_norm;
mod attention;
mod attention_qkv;
mod bk;
mod cross_entropy;
mod embedding;
mod gram;
mod kasmina;
mod kasmina_mlp;
mod linear_cross_entropy;
mod matmul;
mod matmul_add;
mod mhc_post;
mod mhc_post_pre;
mod mhc_pre;
mod muon;
mod newton_schulz;
mod rms_norm;
mod rope;
mod rope_qk;
mod rope_qkv;
mod sum_squares;
mod swiglu;
mod swiglu_mlp;
mod tril_matmul;

use crate::dims::{SHRUNK, replace, shrink};
use crate::operator::{Case, Dims, Operator};

/// The registry's rows.
pub(crate) const ALL: &[&dyn Operator] = &[
    &rms_norm::Row,
    &add_rms_norm::Row,
    &rope::Row,
    &rope_qk::Row,
    &rope_qkv::Row,
    &swiglu::Row,
    &swiglu_mlp::Row,
    &attention::Row,
    &attention_qkv::Row,
    &bk::Row,
    &mhc_pre::Row,
    &mhc_post::Row,
    &mhc_post_pre::Row,
    &embedding::Row,
    &cross_entropy::Row,
    &linear_cross_entropy::Row,
    &matmul::NN,
    &matmul::NT,
    &matmul::TN,
    &matmul::TT,
    &matmul_add::Row,
    &gram::Row,
    &newton_schulz::Row,
    &sum_squares::Row,
    &adamw::Row,
    &muon::Row,
    &tril_matmul::Row,
    &kasmina::Row,
    &kasmina_mlp::Row,
];

/// One of several, by a random number, of which the rest is left for the next.
fn pick<T: Copy>(number: &mut u64, of: &[T]) -> T {
    let count = of.len() as u64;
    let index = (*number % count) as usize;
    *number /= count;
    of[index]
}

/// Elements of an input of a case, as a number to count bytes and operations with.
fn elements(case: &Case, input: usize) -> f64 {
    case.shapes[input].iter().product::<usize>() as f64
}

/// Leaves a part of the rows, of long ones fewer.
fn shrink_rows(dims: &mut Dims) -> Vec<[usize; 2]> {
    let width = dims.iter().filter(|(name, _)| **name != "...").map(|(_, sizes)| sizes[0]);
    let rows = (1 << 20) / width.product::<usize>().max(1);
    vec![replace(dims, "...", rows.clamp(40, 264))]
}

/// Makes matrices small, and leaves three of a stack.
fn shrink_batch(dims: &mut Dims) -> Vec<[usize; 2]> {
    let mut pairs = shrink(dims, |name, size| name != "..." && size > SHRUNK);
    if dims["..."].iter().product::<usize>() > 3 {
        pairs.push(replace(dims, "...", 3));
    }
    pairs
}

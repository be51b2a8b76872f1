//! Matrix products by tiles: what every operator that multiplies matrices is made of.
//!
//! A `Product` says what is multiplied: batches of matrices in any storage order, which of them
//! are triangular, what is added, the element type of the result. How is decided here: by which
//! [`Family`] of kernels, with which tile, in how many parts of K. All families compute the same and
//! stand behind the same tests.
//!
//! From the bottom up: `view` is a matrix by its strides, `problem` what is multiplied, as data, `finish` alpha and
//! beta at its end, `epilogue` what an operator does with sums in registers. A family is a folder: `simt` on
//! plain units, and in `cuda`, over tile scheduler, pipelines, fragments and PTX that they share, `mma` and
//! `wgmma`. `thin` is for products with one thin side, `product` on top.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
pub(crate) mod epilogue;
mod family;
mod finish;
mod problem;
mod product;
pub(crate) mod simt;
mod split_k;
#[cfg(test)]
pub(crate) mod tests;
mod thin;
pub(crate) mod view;

pub(crate) use cuda::dual;
pub use family::{Family, families, force};
pub(crate) use family::{choose as family, forced};
pub(crate) use problem::{Alpha, Keep, Triangle, Triangles};
pub(crate) use product::{Product, dual_runs, shape};

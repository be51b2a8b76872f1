//! What an operator does with the sums of a tile while they are in registers.

use cubecl::prelude::*;

/// One result of the two products of a dual GEMM, element by element.
#[cube]
pub(crate) trait Epilogue: Send + Sync + 'static {
    /// The result where the products are `first` and `second`; `ptx` as in
    /// [`exponential`](crate::exponential).
    fn join(first: f32, second: f32, #[comptime] ptx: bool) -> f32;
}

/// That of a single product, which is never asked.
pub(crate) struct Plain;

#[cube]
impl Epilogue for Plain {
    fn join(first: f32, _second: f32, #[comptime] _ptx: bool) -> f32 {
        first
    }
}

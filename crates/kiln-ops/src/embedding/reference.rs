//! Rows of a table in Burn operations: what the kernel is compared with, and what runs where there is none.

use burn::tensor::{DType, FloatDType, Int, Tensor};

/// weight\[tokens\] in `dtype`; checks are the caller's.
pub fn embedding(weight: Tensor<2>, tokens: Tensor<1, Int>, dtype: DType) -> Tensor<2> {
    let ([rows, width], [count]) = (weight.dims(), tokens.dims());
    let last = rows as i64 - 1;
    let wrong = tokens.clone().lower_elem(0).bool_or(tokens.clone().greater_elem(last));
    // The gradient is summed in f32.
    let y = weight.cast(DType::F32).select(0, tokens.clamp(0, last));
    let y = y.mask_fill(wrong.unsqueeze_dim::<2>(1).expand([count, width]), f32::NAN);
    y.cast(FloatDType::from(dtype))
}

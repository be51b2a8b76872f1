//! Autodiff of a product: products again, summed over what was broadcast.

use super::backend::{MatmulOps, Scaled};
use crate::autodiff::{Graph, Maybe, transposed};
use crate::tile;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, Shape};

impl<B: MatmulOps, C: CheckpointStrategy> MatmulOps for Autodiff<B, C> {
    fn kiln_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: Maybe<Self>,
        scaled: Scaled,
    ) -> FloatTensor<Self> {
        let Maybe::Some(c) = c else {
            return Graph::<C>::output([a, b], [0, 1], |[a, b], wanted| {
                (B::kiln_matmul(a, b, Maybe::None, scaled), move |dy, factors| {
                    of_factors(dy, factors, scaled, wanted)
                })
            });
        };
        let (shape, dtype) = (c.shape(), c.dtype());
        Graph::<C>::output([a, b, c], [0, 1], |[a, b, c], [of_a, of_b, of_c]| {
            let y = B::kiln_matmul(a, b, Maybe::Some(c), scaled);
            (y, move |dy: FloatTensor<B>, factors| {
                let dc = || of_addend::<B>(dy.clone(), scaled.beta, &shape, dtype);
                let dc = of_c.then(dc).into();
                let [da, db] = of_factors(dy, factors, scaled, [of_a, of_b]);
                [da, db, dc]
            })
        })
    }
}

/// dA and dB where they are wanted, in the element type of the factors.
fn of_factors<B: MatmulOps>(
    dy: FloatTensor<B>,
    [a, b]: [FloatTensor<B>; 2],
    scaled: Scaled,
    [of_a, of_b]: [bool; 2],
) -> [Maybe<B>; 2] {
    let scaled = Scaled { symmetric: false, dtype: a.dtype(), ..scaled };
    let dy = cast::<B>(dy, scaled.dtype);
    let shapes = [a.shape(), b.shape()];
    let da = of_a.then(|| factor::<B>(dy.clone(), transposed::<B>(b), &shapes[0], scaled));
    let db = of_b.then(|| right::<B>(dy, a, shapes, scaled));
    [da.into(), db.into()]
}

/// dC: beta · dY in its shape and element type.
fn of_addend<B: Backend>(
    dy: FloatTensor<B>,
    beta: f64,
    shape: &Shape,
    dtype: DType,
) -> FloatTensor<B> {
    let mut dc = cast::<B>(dy, DType::F32);
    if beta != 1.0 {
        dc = B::float_mul_scalar(dc, beta.into());
    }
    cast::<B>(sum_to::<B>(dc, shape), dtype)
}

/// Aᵀ·dY.
fn right<B: MatmulOps>(
    dy: FloatTensor<B>,
    a: FloatTensor<B>,
    [of_a, of_b]: [Shape; 2],
    scaled: Scaled,
) -> FloatTensor<B> {
    let last = of_b.num_dims() - 2;
    let shared = of_b[..last].iter().all(|size| *size == 1);
    let stacked = of_a[..last].iter().any(|size| *size != 1);
    if !(shared && stacked && of_a.num_elements() > 0) {
        return factor::<B>(transposed::<B>(a), dy, &of_b, scaled);
    }
    // One matrix for a stack: the sum over the stack is one product over all its rows.
    let rows: usize = of_a[..=last].iter().product();
    let flat = |t, cols| B::float_reshape(t, Shape::new([rows, cols]));
    let left = transposed::<B>(flat(a, of_a[last + 1]));
    let right = flat(dy, of_b[last + 1]);
    B::float_reshape(B::kiln_matmul(left, right, Maybe::None, scaled), of_b)
}

/// a·b, summed over the dimensions that an operand of shape `like` was broadcast along.
fn factor<B: MatmulOps>(
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    like: &Shape,
    scaled: Scaled,
) -> FloatTensor<B> {
    if tile::shape(&a.shape(), &b.shape()) == *like {
        return B::kiln_matmul(a, b, Maybe::None, scaled);
    }
    let wide = Scaled { dtype: DType::F32, ..scaled };
    cast::<B>(sum_to::<B>(B::kiln_matmul(a, b, Maybe::None, wide), like), scaled.dtype)
}

/// Sums over the dimensions that are 1 in `like`.
fn sum_to<B: Backend>(mut tensor: FloatTensor<B>, like: &Shape) -> FloatTensor<B> {
    for (i, size) in like.iter().enumerate() {
        if *size == 1 && tensor.shape()[i] != 1 {
            tensor = B::float_sum_dim(tensor, i);
        }
    }
    tensor
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype { tensor } else { B::float_cast(tensor, FloatDType::from(dtype)) }
}

//! Sums of squares in Burn operations: what the kernel is compared with, and what runs where there is none.

use super::CHUNK;
use burn::tensor::{DType, Tensor};

/// `sums`, with the squares of `x` added, behind `first` chunks of its batch; checks are the caller's.
pub fn sum_squares<const D: usize>(x: Tensor<D>, sums: Tensor<1>, first: usize) -> Tensor<1> {
    let (elements, [count]) = (x.shape().num_elements(), sums.dims());
    let chunks = elements.div_ceil(CHUNK);
    let (rounds, taken) = (chunks.div_ceil(count), chunks.min(count));
    let x = filled(x.cast(DType::F32).reshape([elements]), rounds * taken * CHUNK);
    let squares: Tensor<3> = x.square().reshape([rounds, taken, CHUNK]);
    let own = filled(squares.sum_dim(2).sum_dim(0).reshape([taken]), count);
    let first = first % count;
    let turned = match first {
        0 => own,
        _ => {
            let [behind, before] = [(count - first, first), (0, count - first)]
                .map(|(from, size)| own.clone().narrow(0, from, size));
            Tensor::cat(vec![behind, before], 0)
        }
    };
    sums + turned
}

/// `x` with zeros behind it, so many elements in all.
fn filled(x: Tensor<1>, size: usize) -> Tensor<1> {
    let rest = size - x.dims()[0];
    if rest == 0 {
        return x;
    }
    let zeros = Tensor::zeros([rest], (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], 0)
}

//! The Kasmina layer with MLPs in plain Burn operations: batched products of all seeds.

use crate::kasmina::reference::{self as rows, Chunks, contributes};
use crate::kasmina::{Blend, SeedState, Seeds, Telemetry};
use burn::tensor::{Bool, DType, Int, Tensor};

/// [`kasmina_mlp`](fn@super::kasmina_mlp) without its checks.
pub fn kasmina_mlp<const D: usize>(
    x: Tensor<D>,
    blueprints: Tensor<2>,
    mlps: Tensor<3>,
    seeds: &Seeds,
) -> (Tensor<D>, Telemetry) {
    let (shape, dtype) = (x.dims(), x.dtype());
    let features = shape[D - 1];
    let rows = shape[..D - 1].iter().product();
    let (y, telemetry) = rows::kasmina(x.clone(), blueprints, seeds);
    if rows == 0 {
        return (y, telemetry);
    }
    let chunks = Chunks { features, seeds: seeds.count() };
    let of = contributes(seeds, |blend| blend.equal_elem(Blend::Mlp.code()));
    // What no MLP is blended into becomes harmless before, not after: no infinity times a zero.
    let x = x.reshape([rows, features]).cast(DType::F32);
    let others = chunks.spread(of.clone()).bool_not().unsqueeze::<2>().expand([rows, features]);
    let x = x.mask_fill(others.clone(), 0.0);
    let mlps = mlps.cast(DType::F32);
    let mut begin = 0;
    let mut parts = vec![];
    for (which, size) in chunks.classes() {
        let width = which.len() * size;
        let part = x.clone().narrow(1, begin, width).reshape([rows, which.len(), size]);
        begin += width;
        let cut = |of: Tensor<1, Int>| of.slice([which.clone()]);
        let (id, state) = (cut(seeds.blueprint_id.clone()), cut(seeds.lifecycle.clone()));
        let alpha = seeds.alpha.clone().cast(DType::F32).slice([which.clone()]);
        let others = of.clone().slice([which.clone()]).bool_not();
        let blended = blend(part.swap_dims(0, 1), mlps.clone(), id, state, alpha, others);
        parts.push(blended.swap_dims(0, 1).reshape([rows, width]));
    }
    let blended = Tensor::cat(parts, 1).cast(dtype);
    let y = blended.mask_where(others, y.reshape([rows, features]));
    (y.reshape(shape), telemetry)
}

/// (1 − alpha)·x + alpha·f(x) of chunks of one size, `[C, M, s]`.
fn blend(
    x: Tensor<3>,
    mlps: Tensor<3>,
    id: Tensor<1, Int>,
    state: Tensor<1, Int>,
    alpha: Tensor<1>,
    others: Tensor<1, Bool>,
) -> Tensor<3> {
    let ([seeds, _, size], [count, _, widest]) = (x.dims(), mlps.dims());
    let last = count as i64 - 1;
    let id = id.clone().mask_fill(id.lower_elem(0), last).clamp(0, last);
    let weights = mlps.select(0, id);
    let others = others.reshape([seeds, 1, 1]).expand(weights.dims());
    let weights = weights.mask_fill(others, 0.0);
    let is = |wanted: SeedState| state.clone().equal_elem(wanted.code());
    let trains = is(SeedState::Grafting).bool_or(is(SeedState::FineTuning));
    let trains = trains.reshape([seeds, 1, 1]).expand(weights.dims());
    let weights = weights.clone().detach().mask_where(trains, weights);
    let rows = |first: usize, count: usize| weights.clone().narrow(1, first, count);
    let first = rows(0, 2 * size).narrow(2, 0, size);
    let second = rows(2 * widest, 2 * size).narrow(2, 0, size);
    let bias = rows(4 * widest, 2).reshape([seeds, 1, 2 * widest]).narrow(2, 0, 2 * size);
    let hidden = x.clone().matmul(first.swap_dims(1, 2)) + bias;
    // Not a number stays what it is.
    let hidden = hidden.clone().mask_fill(hidden.lower_equal_elem(0.0), 0.0);
    let bias = rows(4 * widest + 2, 1).narrow(2, 0, size);
    let out = hidden.matmul(second) + bias;
    let alpha = alpha.reshape([seeds, 1, 1]);
    x * (alpha.clone().neg() + 1.0) + out * alpha
}

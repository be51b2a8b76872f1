//! Muon in Burn operations: what the kernels are compared with, and what runs where there are none.

use super::{MuonOptions, MuonWeight};
use crate::newton_schulz::reference::newton_schulz;
use burn::tensor::Tensor;

/// One step, in the element type of the weights, which have elements and are of one shape; checks are the caller's.
pub fn muon<const D: usize>(
    of: Vec<MuonWeight<D>>,
    grads: Vec<Tensor<D>>,
    scale: Option<Tensor<1>>,
    options: &MuonOptions,
) -> Vec<MuonWeight<D>> {
    let shape = of[0].value.shape();
    let [rows, columns] = [shape[D - 2], shape[D - 1]];
    let matrices: usize = shape[..D - 2].iter().product();
    let (count, dtype) = (of.len(), of[0].value.dtype());
    let (mut moved, mut updates) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for (MuonWeight { value, momentum, copy }, grad) in of.into_iter().zip(grads) {
        let grad = grad.cast(dtype);
        let grad = match &scale {
            Some(scale) => grad * scale.clone().cast(dtype).unsqueeze(),
            None => grad,
        };
        let new = grad.mul_scalar(1.0 - options.momentum);
        let momentum = momentum.mul_scalar(options.momentum) + new.clone();
        let update = match options.nesterov {
            true => momentum.clone().mul_scalar(options.momentum) + new,
            false => momentum.clone(),
        };
        updates.push(update.reshape([matrices, rows, columns]).cast(options.dtype));
        moved.push(MuonWeight { value, momentum, copy });
    }
    let parts = Tensor::<3>::cat(updates, 0).split_with_sizes(options.parts(columns), 2);
    let made = parts.into_iter().map(|part| {
        let [_, _, columns] = part.dims();
        let y = newton_schulz(part, options.newton_schulz);
        y.cast(dtype).mul_scalar(options.rate(rows, columns))
    });
    let updates = Tensor::cat(made.collect(), 2).chunk(count, 0);
    let kept = options.kept();
    let step = |(of, update): (MuonWeight<D>, Tensor<3>)| {
        let MuonWeight { value, momentum, copy } = of;
        let value = if kept == 1.0 { value } else { value.mul_scalar(kept) };
        let value = value - update.reshape(shape.clone());
        let copy = copy.map(|copy| value.clone().cast(copy.dtype()));
        MuonWeight { value, momentum, copy }
    };
    moved.into_iter().zip(updates).map(step).collect()
}

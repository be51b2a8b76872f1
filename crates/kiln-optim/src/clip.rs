//! The global norm of all gradients, and clipping by it: g · min(1, max / ‖g‖).
//!
//! Source: Pascanu et al., On the difficulty of training recurrent neural networks, 2013
//! (arXiv 1211.5063). The norm stays on the device, so that clipping waits for nothing.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::prelude::SumSquaresBatch;

/// Sums that squares are spread over: cubes that work at a time.
const SUMS: usize = 1024;

/// ‖g‖₂ over the gradients of all parameters of `module`, `[1]`.
///
/// A NaN or an infinity in any gradient makes it non-finite.
pub fn global_norm<M: Module>(module: &M, grads: &GradientsParams) -> Tensor<1> {
    global_norm_without(module, grads, &[])
}

/// The same without some of the parameters, such as those that learn beside the model.
pub fn global_norm_without<M: Module>(
    module: &M,
    grads: &GradientsParams,
    without: &[ParamId],
) -> Tensor<1> {
    struct Squares<'a> {
        grads: &'a GradientsParams,
        without: &'a [ParamId],
        batch: SumSquaresBatch,
        device: Option<Device>,
    }
    impl ModuleVisitor for Squares<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.without.contains(&param.id) {
                return;
            }
            if let Some(grad) = self.grads.get::<D>(param.id) {
                self.device.get_or_insert_with(|| grad.device());
                let grad = match grad.dtype() {
                    DType::F32 | DType::BF16 | DType::F16 => grad,
                    _ => grad.cast(DType::F32),
                };
                self.batch.push(grad).unwrap_or_else(|error| panic!("{error}"));
            }
        }
    }
    let mut squares = Squares { grads, without, batch: SumSquaresBatch::new(), device: None };
    module.visit(&mut squares);
    match squares.device {
        Some(device) => {
            let zeros = Tensor::zeros([SUMS], (&device, DType::F32));
            let sums = squares.batch.sum(zeros).unwrap_or_else(|error| panic!("{error}"));
            sums.sum().sqrt()
        }
        None => {
            let device = module.devices().into_iter().next().unwrap_or_default();
            Tensor::zeros([1], &device.inner())
        }
    }
}

/// The factor that clips gradients of this global norm, min(1, max / ‖g‖), `[1]`: for
/// [`Optimizer::step_scaled`](crate::Optimizer::step_scaled).
pub fn clip_scale(norm: &Tensor<1>, max_norm: f64) -> Tensor<1> {
    // 1e-6 as in PyTorch: no division by 0 where every gradient is 0.
    norm.clone().add_scalar(1e-6).recip().mul_scalar(max_norm).clamp_max(1.0)
}

/// Scales all gradients by one factor so that their global norm is at most `max_norm`; returns
/// them and the norm before, which the caller reads when it likes.
///
/// Non-finite gradients stay non-finite, and so is the norm: check it before the parameters are
/// saved.
pub fn clip_global_norm<M: Module>(
    module: &M,
    grads: GradientsParams,
    max_norm: f64,
) -> (GradientsParams, Tensor<1>) {
    struct Scale {
        grads: GradientsParams,
        factor: Tensor<1>,
    }
    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.remove::<D>(param.id) {
                let factor = self.factor.clone().cast(grad.dtype());
                self.grads.register(param.id, grad * factor.unsqueeze());
            }
        }
    }
    let norm = global_norm(module, &grads);
    let mut scale = Scale { grads, factor: clip_scale(&norm, max_norm) };
    module.visit(&mut scale);
    (scale.grads, norm)
}

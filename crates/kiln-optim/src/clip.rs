//! The global norm of all gradients, and clipping by it: g · min(1, max / ‖g‖).
//!
//! Source: Pascanu et al., On the difficulty of training recurrent neural networks, 2013
//! (arXiv 1211.5063). The norm stays on the device, so that clipping waits for nothing.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// ‖g‖₂ over the gradients of all parameters of `module`, `[1]`.
///
/// A NaN or an infinity in any gradient makes it non-finite.
pub fn global_norm<M: Module>(module: &M, grads: &GradientsParams) -> Tensor<1> {
    struct Squares<'a> {
        grads: &'a GradientsParams,
        sums: Vec<Tensor<1>>,
    }
    impl ModuleVisitor for Squares<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.get::<D>(param.id) {
                self.sums.push(grad.square().sum());
            }
        }
    }
    let mut squares = Squares { grads, sums: Vec::new() };
    module.visit(&mut squares);
    if squares.sums.is_empty() {
        let device = module.devices().into_iter().next().unwrap_or_default();
        return Tensor::zeros([1], &device.inner());
    }
    Tensor::cat(squares.sums, 0).sum().sqrt()
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
                self.grads.register(param.id, grad * self.factor.clone().unsqueeze());
            }
        }
    }
    let norm = global_norm(module, &grads);
    // 1e-6 as in PyTorch: no division by 0 where every gradient is 0.
    let factor = norm.clone().add_scalar(1e-6).recip().mul_scalar(max_norm).clamp_max(1.0);
    let mut scale = Scale { grads, factor };
    module.visit(&mut scale);
    (scale.grads, norm)
}

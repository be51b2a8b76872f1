//! A parameter apart from its value.

use burn::module::{Param, ParamId, ParamMapper};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};

/// What a parameter is beside its value, while that is out of its module.
pub(crate) struct Rest<const D: usize> {
    pub(crate) id: ParamId,
    pub(crate) name: String,
    mapper: ParamMapper<Tensor<D>>,
    autodiff: bool,
    requires_grad: bool,
    checkpointing: Option<GradientCheckpointingStrategy>,
}

impl<const D: usize> Rest<D> {
    /// Takes a parameter apart.
    pub(crate) fn of(param: Param<Tensor<D>>, name: String) -> (Self, Tensor<D>) {
        let (id, value, mapper) = param.consume();
        let (autodiff, requires_grad) = (value.is_autodiff(), value.is_require_grad());
        let checkpointing = value.gradient_checkpointing_strategy();
        let rest = Self { id, name, mapper, autodiff, requires_grad, checkpointing };
        (rest, value.inner())
    }

    /// Puts it together, with this value.
    pub(crate) fn with(self, value: Tensor<D>) -> Param<Tensor<D>> {
        let mut value = if self.autodiff { value.autodiff() } else { value };
        if let Some(strategy) = self.checkpointing {
            value = value.with_gradient_checkpointing_strategy(strategy);
        }
        let value = if self.requires_grad { value.require_grad() } else { value };
        Param::from_mapped_value(self.id, value, self.mapper)
    }
}

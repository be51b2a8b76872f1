//! A parameter apart from its value.

use burn::module::{Param, ParamId, ParamMapper};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};

/// What a parameter that requires a gradient is beside its value, while that is out of its module.
pub(crate) struct Rest<const D: usize> {
    pub(crate) id: ParamId,
    pub(crate) name: String,
    mapper: ParamMapper<Tensor<D>>,
    checkpointing: Option<GradientCheckpointingStrategy>,
}

impl<const D: usize> Rest<D> {
    /// Takes a parameter apart.
    pub(crate) fn of(param: Param<Tensor<D>>, name: String) -> (Self, Tensor<D>) {
        let (id, value, mapper) = param.consume();
        let checkpointing = value.gradient_checkpointing_strategy();
        (Self { id, name, mapper, checkpointing }, value.inner())
    }

    /// Puts it together, with this value.
    pub(crate) fn with(self, value: Tensor<D>) -> Param<Tensor<D>> {
        let mut value = value.autodiff();
        if let Some(strategy) = self.checkpointing {
            value = value.with_gradient_checkpointing_strategy(strategy);
        }
        Param::from_mapped_value(self.id, value.require_grad(), self.mapper)
    }
}

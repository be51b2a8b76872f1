//! AdamW: Adam with weight decay decoupled from the gradient.
//!
//! Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019 (arXiv 1711.05101).
//! With g the gradient, η the learning rate, λ the decay and t the step, counted from 1,
//!
//! * m = β1·m + (1 − β1)·g
//! * v = β2·v + (1 − β2)·g²
//! * p = p·(1 − η·λ) − η · m/(1 − β1ᵗ) / (√(v/(1 − β2ᵗ)) + ε)
//!
//! as in PyTorch's `torch.optim.AdamW`.

use burn::config::Config;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::optim::GradientsParams;
use burn::tensor::container::TensorContainer;
use burn::tensor::{DType, Tensor, TensorData};
use std::collections::BTreeMap;

/// Configuration of [`AdamW`], for all parameters or one group.
#[derive(Config, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay rate of the first moment.
    #[config(default = 0.9)]
    pub beta1: f64,
    /// Decay rate of the second moment.
    #[config(default = 0.999)]
    pub beta2: f64,
    /// Added to the root of the second moment.
    #[config(default = 1e-8)]
    pub eps: f64,
    /// Decoupled weight decay.
    #[config(default = 0.0)]
    pub weight_decay: f64,
}

impl AdamWConfig {
    /// An optimizer that has taken no step.
    pub fn init(&self) -> AdamW {
        AdamW { default: self.clone(), groups: Vec::new(), moments: Moments::default(), steps: 0 }
    }
}

/// A saved state that does not fit the module.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StateError {
    /// A moment has another shape or element type than its parameter.
    #[error("optimizer state `{name}` is {found}, expected {expected}")]
    Mismatch {
        /// Path of the parameter and the moment.
        name: String,
        /// What is saved.
        found: String,
        /// What the parameter needs.
        expected: String,
    },
    /// One of the two moments of a parameter is saved and the other is not.
    #[error("optimizer state lacks `{0}`")]
    Missing(String),
    /// No parameter has this name.
    #[error("optimizer state `{0}` belongs to no parameter of the model")]
    Unknown(String),
}

/// AdamW over the parameters of a module, in groups; its moments are kept by parameter path.
///
/// One step count serves all parameters; one without a gradient is left as it is.
pub struct AdamW {
    default: AdamWConfig,
    groups: Vec<(ParamGroup, AdamWConfig)>,
    moments: Moments,
    steps: u64,
}

/// First and second moments by parameter path.
#[derive(Default)]
struct Moments {
    first: TensorContainer<String>,
    second: TensorContainer<String>,
}

impl AdamW {
    /// Gives the parameters in `group` their own configuration. Of several groups that hold a
    /// parameter the last counts.
    pub fn with_group(mut self, group: ParamGroup, config: AdamWConfig) -> Self {
        self.groups.push((group, config));
        self
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One step: the module with its parameters moved against their gradients.
    pub fn step<M: Module>(&mut self, module: M, grads: GradientsParams, learning_rate: f64) -> M {
        self.steps += 1;
        let path = Vec::new();
        module.map(&mut Step { optimizer: self, grads, learning_rate, path })
    }

    /// The moments as data, named `<path>.first` and `<path>.second`.
    pub fn state<M: Module>(&self, module: &M) -> Vec<(String, TensorData)> {
        struct Save<'a> {
            moments: &'a Moments,
            path: Vec<String>,
            state: Vec<(String, TensorData)>,
        }
        impl ModuleVisitor for Save<'_> {
            fn enter_module(&mut self, name: &str, _container_type: &str) {
                self.path.push(name.to_string());
            }
            fn exit_module(&mut self, _name: &str, _container_type: &str) {
                self.path.pop();
            }
            fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
                let path = self.path.join(".");
                for (kind, moments) in
                    [("first", &self.moments.first), ("second", &self.moments.second)]
                {
                    if let Some(moment) = moments.get::<Tensor<D>>(&path) {
                        self.state.push((format!("{path}.{kind}"), moment.into_data()));
                    }
                }
            }
        }
        let mut save = Save { moments: &self.moments, path: Vec::new(), state: Vec::new() };
        module.visit(&mut save);
        save.state
    }

    /// Takes a saved state in place of its own: the next step goes on as if it had never stopped.
    ///
    /// # Errors
    ///
    /// [`StateError`] if a moment does not fit its parameter, lacks its twin or has no parameter.
    pub fn load_state<M: Module>(
        &mut self,
        module: &M,
        steps: u64,
        state: BTreeMap<String, TensorData>,
    ) -> Result<(), StateError> {
        let moments = Moments::default();
        let mut load = Load { state, moments, path: Vec::new(), result: Ok(()) };
        module.visit(&mut load);
        load.result?;
        if let Some(name) = load.state.into_keys().next() {
            return Err(StateError::Unknown(name));
        }
        (self.moments, self.steps) = (load.moments, steps);
        Ok(())
    }
}

struct Step<'a> {
    optimizer: &'a mut AdamW,
    grads: GradientsParams,
    learning_rate: f64,
    path: Vec<String>,
}

impl ModuleMapper for Step<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(grad) = self.grads.remove::<D>(param.id) else {
            return param;
        };
        let path = self.path.join(".");
        let AdamW { default, groups, moments, steps } = &mut *self.optimizer;
        let group = groups.iter().rev().find(|(group, _)| group.matches(&param.id, Some(&path)));
        let config = group.map_or(&*default, |(_, config)| config);

        let (id, parameter, mapper) = param.consume();
        let checkpointing = parameter.gradient_checkpointing_strategy();
        let value = parameter.inner();

        let first = grad.clone().mul_scalar(1.0 - config.beta1);
        let first = match moments.first.remove::<Tensor<D>>(&path) {
            Some(old) => old.mul_scalar(config.beta1) + first,
            None => first,
        };
        let second = grad.square().mul_scalar(1.0 - config.beta2);
        let second = match moments.second.remove::<Tensor<D>>(&path) {
            Some(old) => old.mul_scalar(config.beta2) + second,
            None => second,
        };

        // The corrections are numbers: they cost no pass over the tensors.
        let correction1 = 1.0 - config.beta1.powf(*steps as f64);
        let correction2 = 1.0 - config.beta2.powf(*steps as f64);
        let rate = self.learning_rate / correction1;
        let root = second.clone().sqrt().mul_scalar(correction2.sqrt().recip());
        let update = first.clone().mul_scalar(rate) / root.add_scalar(config.eps);
        let decay = self.learning_rate * config.weight_decay;
        let value = if decay == 0.0 { value } else { value.mul_scalar(1.0 - decay) };
        let mut value = (value - update).autodiff();

        moments.first.register(path.clone(), first);
        moments.second.register(path, second);
        if let Some(strategy) = checkpointing {
            value = value.with_gradient_checkpointing_strategy(strategy);
        }
        // Only parameters that require a gradient have one.
        Param::from_mapped_value(id, value.require_grad(), mapper)
    }
}

struct Load {
    state: BTreeMap<String, TensorData>,
    moments: Moments,
    path: Vec<String>,
    result: Result<(), StateError>,
}

impl Load {
    /// The data of one moment, checked against its parameter.
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Option<TensorData>, StateError> {
        let Some(data) = self.state.remove(name) else {
            return Ok(None);
        };
        let (dtype, found) = (data.dtype(), data.shape().as_slice());
        if dtype != DType::F32 || found != shape {
            return Err(StateError::Mismatch {
                name: name.to_string(),
                found: format!("{dtype:?} of shape {found:?}"),
                expected: format!("F32 of shape {shape:?}"),
            });
        }
        Ok(Some(data))
    }

    fn load<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<(), StateError> {
        let path = self.path.join(".");
        let (shape, device) = (param.lazy_shape(), param.lazy_device().inner());
        let [first, second] = ["first", "second"].map(|kind| format!("{path}.{kind}"));
        match (self.take(&first, shape.as_slice())?, self.take(&second, shape.as_slice())?) {
            (None, None) => {}
            (None, Some(_)) => return Err(StateError::Missing(first)),
            (Some(_), None) => return Err(StateError::Missing(second)),
            (Some(first), Some(second)) => {
                let tensor = |data| Tensor::<D>::from_data(data, &device);
                self.moments.first.register(path.clone(), tensor(first));
                self.moments.second.register(path, tensor(second));
            }
        }
        Ok(())
    }
}

impl ModuleVisitor for Load {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.result.is_ok() {
            self.result = self.load(param);
        }
    }
}

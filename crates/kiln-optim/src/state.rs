//! What formulas keep of each parameter from step to step, by the name of the parameter: `<name>.first`.

use crate::by_name::ByName;
use crate::groups::Groups;
use crate::names::Names;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use std::collections::BTreeMap;

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
    /// A part of a parameter's state is saved and another is not.
    #[error("optimizer state lacks `{0}`")]
    Missing(String),
    /// No parameter has this name, or it moves by a rule that keeps something else.
    #[error("optimizer state `{0}` is none of a parameter of the model, as it moves now")]
    Unknown(String),
}

/// What a formula keeps of each parameter, in the order of the names that it has for it.
#[derive(Default)]
pub(crate) struct State(ByName);

fn key(parameter: &str, what: &str) -> String {
    format!("{parameter}.{what}")
}

/// What is kept of a parameter, and its names.
type Kept<const D: usize> = (&'static [&'static str], Vec<Tensor<D>>);

impl State {
    /// Takes the state of a parameter out; none before its first step, or if it was of a rule that keeps something else.
    pub(crate) fn take<const D: usize>(
        &mut self,
        parameter: &str,
        what: &[&str],
    ) -> Option<Vec<Tensor<D>>> {
        let (kept, tensors) = self.0.take::<Kept<D>>(parameter)?;
        (kept == what).then_some(tensors)
    }

    /// Puts the state of a parameter in.
    pub(crate) fn put<const D: usize>(
        &mut self,
        parameter: String,
        what: &'static [&'static str],
        tensors: Vec<Tensor<D>>,
    ) {
        self.0.put::<Kept<D>>(parameter, (what, tensors));
    }
}

/// What a tensor holds now. Burn reads memory of CUDA when its data are first looked at, which may be after another step
/// has written there.
pub(crate) fn read<const D: usize>(tensor: &Tensor<D>) -> TensorData {
    let data = tensor.to_data();
    let _ = data.as_bytes();
    data
}

/// Reads the state as data, in the order of the parameters.
pub(crate) struct Save<'a> {
    pub(crate) groups: &'a Groups,
    pub(crate) state: &'a State,
    pub(crate) names: Names,
    pub(crate) saved: Vec<(String, TensorData)>,
}

impl ModuleVisitor for Save<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = self.names.name();
        let settings = self.groups.settings(self.groups.of(&param.id, &name));
        let kept = self.state.0.get::<Kept<D>>(&name);
        let Some((what, kept)) = kept.filter(|(what, _)| *what == settings.rule.state(D)) else {
            return;
        };
        for (what, tensor) in what.iter().zip(kept) {
            self.saved.push((key(&name, what), read(tensor)));
        }
    }
}

/// Makes a state of data, checked against the parameters.
pub(crate) struct Load<'a> {
    pub(crate) groups: &'a Groups,
    pub(crate) names: Names,
    /// What is left to take.
    pub(crate) saved: BTreeMap<String, TensorData>,
    pub(crate) state: State,
    pub(crate) result: Result<(), StateError>,
}

impl Load<'_> {
    /// One tensor of a state, checked against its parameter.
    fn take(&mut self, key: &str, shape: &[usize]) -> Result<Option<TensorData>, StateError> {
        let Some(data) = self.saved.remove(key) else {
            return Ok(None);
        };
        let (dtype, found) = (data.dtype(), data.shape().as_slice());
        if dtype != DType::F32 || found != shape {
            return Err(StateError::Mismatch {
                name: key.to_string(),
                found: format!("{dtype:?} of shape {found:?}"),
                expected: format!("F32 of shape {shape:?}"),
            });
        }
        Ok(Some(data))
    }

    fn load<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<(), StateError> {
        let name = self.names.name();
        let (shape, device) = (param.lazy_shape(), param.lazy_device().inner());
        let what = self.groups.settings(self.groups.of(&param.id, &name)).rule.state(D);
        let mut tensors = Vec::with_capacity(what.len());
        let mut missing = None;
        for what in what {
            let key = key(&name, what);
            match self.take(&key, shape.as_slice())? {
                Some(data) => tensors.push(Tensor::<D>::from_data(data, &device)),
                None => missing = missing.or(Some(key)),
            }
        }
        // A parameter that had no gradient yet has no state at all.
        match missing {
            Some(key) if !tensors.is_empty() => Err(StateError::Missing(key)),
            Some(_) => Ok(()),
            None => {
                self.state.put(name, what, tensors);
                Ok(())
            }
        }
    }
}

impl ModuleVisitor for Load<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.result.is_ok() {
            self.result = self.load(param);
        }
    }
}

//! Named f32 tensors as safetensors, and the parameters of a module by their path.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::{Dtype, SafeTensorError, SafeTensors, View};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Tensors that cannot be written, read or put into a model.
#[derive(Debug, thiserror::Error)]
pub enum TensorsError {
    /// The bytes are no safetensors, or cannot be made ones.
    #[error("{what}: {source}")]
    Format {
        /// What was read or written.
        what: &'static str,
        /// What was wrong.
        source: SafeTensorError,
    },
    /// The tensor has another element type or shape than the parameter.
    #[error("{what}: `{name}` is {found}, expected {expected}")]
    Mismatch {
        /// What was read.
        what: &'static str,
        /// Name of the tensor.
        name: String,
        /// What it is.
        found: String,
        /// What would fit.
        expected: String,
    },
    /// A parameter of the model has no tensor.
    #[error("{what}: no tensor for the parameter `{name}`")]
    Missing {
        /// What was read.
        what: &'static str,
        /// Path of the parameter.
        name: String,
    },
    /// A tensor has no parameter.
    #[error("{what}: `{name}` is no parameter of the model")]
    Unknown {
        /// What was read.
        what: &'static str,
        /// Name of the tensor.
        name: String,
    },
}

struct F32<'a>(&'a TensorData);

impl View for F32<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.0.shape().as_slice()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.0.bytes())
    }

    fn data_len(&self) -> usize {
        self.0.bytes().len()
    }
}

/// f32 tensors by name as the bytes of a safetensors file; `what` names it in errors.
pub fn to_safetensors(
    what: &'static str,
    tensors: &[(String, TensorData)],
) -> Result<Vec<u8>, TensorsError> {
    for (name, data) in tensors {
        if data.dtype() != DType::F32 {
            let (name, found) = (name.clone(), format!("{:?}", data.dtype()));
            return Err(TensorsError::Mismatch { what, name, found, expected: "F32".into() });
        }
    }
    let views = tensors.iter().map(|(name, data)| (name, F32(data)));
    safetensors::serialize(views, None).map_err(|source| TensorsError::Format { what, source })
}

/// The f32 tensors in the bytes of a safetensors file.
pub fn from_safetensors(
    what: &'static str,
    bytes: &[u8],
) -> Result<BTreeMap<String, TensorData>, TensorsError> {
    let file = SafeTensors::deserialize(bytes);
    let file = file.map_err(|source| TensorsError::Format { what, source })?;
    let tensor = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        let name = name.to_string();
        if view.dtype() != Dtype::F32 {
            let found = format!("{:?}", view.dtype());
            return Err(TensorsError::Mismatch { what, name, found, expected: "F32".into() });
        }
        let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape(), DType::F32);
        Ok((name, data))
    };
    file.iter().map(tensor).collect()
}

/// The float parameters of a module by path, such as `blocks.0.attention.w_q.weight`.
pub fn parameters<M: Module>(module: &M) -> Vec<(String, TensorData)> {
    struct Collect {
        path: Vec<String>,
        found: Vec<(String, TensorData)>,
    }
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.push((self.path.join("."), param.val().into_data()));
        }
    }
    let mut collect = Collect { path: Vec::new(), found: Vec::new() };
    module.visit(&mut collect);
    collect.found
}

/// The module with the tensors of the same names as its parameters: all of them, and no others.
/// Every parameter is trainable afterwards.
pub fn with_parameters<M: Module>(
    what: &'static str,
    module: M,
    tensors: BTreeMap<String, TensorData>,
) -> Result<M, TensorsError> {
    let mut place = Place { what, tensors, path: Vec::new(), result: Ok(()) };
    let module = module.map(&mut place);
    place.result?;
    match place.tensors.into_keys().next() {
        Some(name) => Err(TensorsError::Unknown { what, name }),
        None => Ok(module),
    }
}

struct Place {
    what: &'static str,
    tensors: BTreeMap<String, TensorData>,
    path: Vec<String>,
    result: Result<(), TensorsError>,
}

impl Place {
    fn take(&mut self, shape: &[usize]) -> Result<TensorData, TensorsError> {
        let (what, name) = (self.what, self.path.join("."));
        let Some(data) = self.tensors.remove(&name) else {
            return Err(TensorsError::Missing { what, name });
        };
        let found = data.shape().as_slice();
        if found != shape {
            let (found, expected) = (format!("{found:?}"), format!("{shape:?}"));
            return Err(TensorsError::Mismatch { what, name, found, expected });
        }
        Ok(data)
    }
}

impl ModuleMapper for Place {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.result.is_err() {
            return param;
        }
        match self.take(param.lazy_shape().as_slice()) {
            Ok(data) => {
                // Not `map`, which would make the first value of a lazy parameter only to drop it.
                let value = Tensor::from_data(data, &param.lazy_device());
                Param::initialized(param.id, value).set_require_grad(true)
            }
            Err(error) => {
                self.result = Err(error);
                param
            }
        }
    }
}

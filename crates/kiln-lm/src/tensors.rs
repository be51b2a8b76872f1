//! Named tensors as safetensors, and the record of a module: everything it holds, by name.
//!
//! A record holds parameters and buffers in f32, integers as I64 and booleans as BOOL, whatever a device
//! keeps them in, so that every device reads it. Burn's `Param<Flag>` is no part of it: that is how a module
//! is set up, such as dropout's switch, and not what it has become.

use crate::names::names;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, BoolStore, DType, Int, Tensor, TensorData};
use kiln_optim::Names;
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
    /// The tensor has another element type or shape than what it is for.
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
    /// Something of the model has no tensor.
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

/// Element types of a record, and what safetensors calls them.
const TYPES: [(DType, Dtype); 3] = [
    (DType::F32, Dtype::F32),
    (DType::I64, Dtype::I64),
    (DType::Bool(BoolStore::Native), Dtype::BOOL),
];

struct Bytes<'a> {
    data: &'a TensorData,
    dtype: Dtype,
}

impl View for Bytes<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.data.shape().as_slice()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.data.bytes())
    }

    fn data_len(&self) -> usize {
        self.data.bytes().len()
    }
}

fn other_type(what: &'static str, name: &str, found: &dyn std::fmt::Debug) -> TensorsError {
    let (name, found) = (name.to_string(), format!("{found:?}"));
    TensorsError::Mismatch { what, name, found, expected: "F32, I64 or BOOL".into() }
}

/// Tensors by name as the bytes of a safetensors file; `what` names it in errors.
///
/// # Errors
///
/// [`TensorsError`] if a tensor is neither F32, I64 nor of native booleans.
pub fn to_safetensors(
    what: &'static str,
    tensors: &[(String, TensorData)],
) -> Result<Vec<u8>, TensorsError> {
    let mut views = Vec::with_capacity(tensors.len());
    for (name, data) in tensors {
        let known = TYPES.iter().find(|(dtype, _)| *dtype == data.dtype());
        let (_, dtype) = known.ok_or_else(|| other_type(what, name, &data.dtype()))?;
        views.push((name, Bytes { data, dtype: *dtype }));
    }
    safetensors::serialize(views, None).map_err(|source| TensorsError::Format { what, source })
}

/// The tensors in the bytes of a safetensors file.
///
/// # Errors
///
/// [`TensorsError`] if it is no such file or holds other element types than a record.
pub fn from_safetensors(
    what: &'static str,
    bytes: &[u8],
) -> Result<BTreeMap<String, TensorData>, TensorsError> {
    let file = SafeTensors::deserialize(bytes);
    let file = file.map_err(|source| TensorsError::Format { what, source })?;
    let tensor = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        let known = TYPES.iter().find(|(_, dtype)| *dtype == view.dtype());
        let (dtype, _) = known.ok_or_else(|| other_type(what, name, &view.dtype()))?;
        let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape(), *dtype);
        Ok((name.to_string(), data))
    };
    file.iter().map(tensor).collect()
}

/// Everything that a module holds, by name: `blocks.0.attention.w_qkv.weight`.
pub fn record<M: Module>(module: &M) -> Vec<(String, TensorData)> {
    struct Collect {
        names: Names,
        found: Vec<(String, TensorData)>,
    }
    impl Collect {
        fn push(&mut self, data: TensorData) {
            // Of CUDA's memory it would be read when it is first looked at, which may be after another step.
            let _ = data.as_bytes();
            self.found.push((self.names.name(), data));
        }
    }
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.names.enter(name);
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.names.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.push(param.val().into_data());
        }
        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            self.push(param.val().into_data().convert_dtype(DType::I64));
        }
        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            let data = param.val().into_data();
            self.push(data.convert_dtype(DType::Bool(BoolStore::Native)));
        }
    }
    let mut collect = Collect { names: names(), found: vec![] };
    module.visit(&mut collect);
    collect.found
}

/// The module with a [`record`] in place of what it holds: all of it, and nothing else. Parameters are
/// trainable and buffers are not, as they were.
///
/// # Errors
///
/// [`TensorsError`] if the record does not fit the module; `what` names it.
pub fn with_record<M: Module>(
    what: &'static str,
    module: M,
    record: BTreeMap<String, TensorData>,
) -> Result<M, TensorsError> {
    let mut place = Place { what, record, names: names(), result: Ok(()) };
    let module = module.map(&mut place);
    place.result?;
    match place.record.into_keys().next() {
        Some(name) => Err(TensorsError::Unknown { what, name }),
        None => Ok(module),
    }
}

struct Place {
    what: &'static str,
    record: BTreeMap<String, TensorData>,
    names: Names,
    result: Result<(), TensorsError>,
}

impl Place {
    /// What the record has for the place that the walk is at; nothing after an error.
    fn take(&mut self, dtype: DType, shape: &[usize]) -> Option<TensorData> {
        self.result.as_ref().ok()?;
        let (what, name) = (self.what, self.names.name());
        let Some(data) = self.record.remove(&name) else {
            self.result = Err(TensorsError::Missing { what, name });
            return None;
        };
        let found = data.shape().as_slice();
        let (found, expected) = match (data.dtype() == dtype, found == shape) {
            (true, true) => return Some(data),
            (true, false) => (format!("{found:?}"), format!("{shape:?}")),
            (false, _) => (format!("{:?} {found:?}", data.dtype()), format!("{dtype:?} {shape:?}")),
        };
        self.result = Err(TensorsError::Mismatch { what, name, found, expected });
        None
    }
}

impl ModuleMapper for Place {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.take(DType::F32, param.lazy_shape().as_slice()) {
            Some(data) => {
                // Not `map`, which would make the first value of a lazy parameter only to drop it.
                let (id, value) = (param.id, Tensor::from_data(data, &param.lazy_device()));
                param.transform_for_load(value, id)
            }
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.take(DType::I64, param.lazy_shape().as_slice()) {
            Some(data) => {
                let options = (&param.lazy_device(), param.val().dtype());
                let (id, value) = (param.id, Tensor::from_data(data, options));
                param.transform_for_load(value, id)
            }
            None => param,
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.take(DType::Bool(BoolStore::Native), param.lazy_shape().as_slice()) {
            Some(data) => {
                let (id, value) = (param.id, Tensor::from_data(data, &param.lazy_device()));
                param.transform_for_load(value, id)
            }
            None => param,
        }
    }
}

//! Master weights: values in f32 of parameters that a module has in 16 bits.

use crate::by_name::ByName;
use crate::names::Names;
use crate::rest::Rest;
use burn::module::{ModuleMapper, Param};
use burn::tensor::{DType, Tensor};

/// A tensor of each.
pub(crate) type Masters = ByName;

/// Takes them out of a module, which gets them rounded.
pub(crate) struct Lower<'a, F> {
    pub(crate) names: Names,
    pub(crate) masters: &'a mut Masters,
    pub(crate) dtype: DType,
    /// Whether a parameter of this name and rank is one.
    pub(crate) which: F,
}

impl<F: Fn(&str, usize) -> bool> ModuleMapper for Lower<'_, F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.names.name();
        let value = param.val();
        if !value.is_require_grad() || value.dtype() != DType::F32 || !(self.which)(&name, D) {
            return param;
        }
        drop(value);
        let (rest, value) = Rest::of(param, name);
        let rounded = value.clone().cast(self.dtype);
        self.masters.put(rest.name.clone(), value);
        rest.with(rounded)
    }
}

/// Puts them where a module has them rounded.
pub(crate) struct Raise<'a> {
    pub(crate) names: Names,
    pub(crate) masters: &'a Masters,
}

impl ModuleMapper for Raise<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.names.name();
        match self.masters.get::<Tensor<D>>(&name) {
            Some(master) => Rest::of(param, name).0.with(master.clone()),
            None => param,
        }
    }
}

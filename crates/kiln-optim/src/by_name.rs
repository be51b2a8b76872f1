//! What belongs to a parameter, by its name.

use std::any::Any;
use std::collections::HashMap;

/// Values of any types by the names of their parameters, each of whom has one.
#[derive(Default)]
pub(crate) struct ByName(HashMap<String, Box<dyn Any + Send>>);

const TYPE: &str = "a parameter keeps its rank";

impl ByName {
    pub(crate) fn take<T: 'static>(&mut self, parameter: &str) -> Option<T> {
        Some(*self.0.remove(parameter)?.downcast().expect(TYPE))
    }

    pub(crate) fn get<T: 'static>(&self, parameter: &str) -> Option<&T> {
        Some(self.0.get(parameter)?.downcast_ref().expect(TYPE))
    }

    pub(crate) fn put<T: Send + 'static>(&mut self, parameter: String, value: T) {
        self.0.insert(parameter, Box::new(value));
    }
}

//! What parameters are called while a module is walked.

/// From the path of a parameter in its module, such as `blocks.0.mixer.w_q.weight`, to its name.
pub type Naming = fn(&str) -> String;

/// The way from the module to where a walk is.
pub(crate) struct Names {
    naming: Naming,
    path: Vec<String>,
}

impl Names {
    pub(crate) fn new(naming: Naming) -> Self {
        Self { naming, path: Vec::new() }
    }

    pub(crate) fn enter(&mut self, field: &str) {
        self.path.push(field.to_string());
    }

    pub(crate) fn exit(&mut self) {
        self.path.pop();
    }

    /// The name of the parameter that the walk is at.
    pub(crate) fn name(&self) -> String {
        (self.naming)(&self.path.join("."))
    }
}

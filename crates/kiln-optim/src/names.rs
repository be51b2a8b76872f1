//! What parameters are called while a module is walked.

/// From the path of a parameter in its module, such as `blocks.0.mixer.w_qkv.weight`, to its name.
pub type Naming = fn(&str) -> String;

/// What the parameter is called that a walk over a module is at: a `ModuleVisitor` or `ModuleMapper` that needs
/// names passes `enter_module` and `exit_module` on.
#[derive(Clone, Debug)]
pub struct Names {
    naming: Naming,
    path: Vec<String>,
}

impl Names {
    /// Of a walk that is at the module itself.
    pub fn new(naming: Naming) -> Self {
        Self { naming, path: Vec::new() }
    }

    /// The walk goes into this field.
    pub fn enter(&mut self, field: &str) {
        self.path.push(field.to_string());
    }

    /// And out of it again.
    pub fn exit(&mut self) {
        self.path.pop();
    }

    /// The name of the parameter that the walk is at.
    pub fn name(&self) -> String {
        (self.naming)(&self.path.join("."))
    }
}

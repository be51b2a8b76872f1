//! Which parameters belong together.

use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::tensor::Tensor;

/// Norm scales and biases: the parameters that weight decay spares by custom. Add the embeddings
/// with [`ParamGroup::fuse`].
pub fn below_rank_two<M: Module>(module: &M) -> ParamGroup {
    struct Vectors(Vec<ParamId>);
    impl ModuleVisitor for Vectors {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if D < 2 {
                self.0.push(param.id);
            }
        }
    }
    let mut vectors = Vectors(Vec::new());
    module.visit(&mut vectors);
    ParamGroup::from_ids(vectors.0)
}

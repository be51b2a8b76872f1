//! How many numbers of a pass are exactly zero: a multiplication by zero takes less power, and a GPU at its power
//! limit is then faster than on other data.

use super::workload::Workload;
use crate::host::{Input, download};
use crate::registry::Operator;
use burn::tensor::Tensor;
use kiln_ops::policy::{self, Implementation};
use std::collections::BTreeMap;

/// Rows that are looked at.
const ROWS: usize = 1024;

/// The share of exact zeros in each gradient and in what the operator names between, of the first rows and the
/// first set of inputs.
pub(super) fn zeros(
    op: &dyn Operator,
    workload: &Workload<'_>,
    implementation: Implementation,
) -> Result<BTreeMap<String, f64>, String> {
    let graph = workload.graph(0, implementation, false)?;
    let gradients = graph.root.backward();
    let mut shares = BTreeMap::new();
    for (input, leaf) in op.spec().inputs.iter().zip(&graph.leaves) {
        let Input::Float { leaf, .. } = leaf else { continue };
        if let Some(gradient) = leaf.grad(&gradients) {
            shares.insert(format!("grad.{}", input.name), share(gradient)?);
        }
    }
    let between = policy::force(implementation, || op.intermediates(&workload.call()));
    for (name, tensor) in between {
        shares.insert(name.into(), share(tensor)?);
    }
    Ok(shares)
}

/// The share of exact zeros in the first rows.
fn share(tensor: Tensor<2>) -> Result<f64, String> {
    let rows = tensor.dims()[0].min(ROWS);
    let zeros = download(&tensor.narrow(0, 0, rows).equal_elem(0.0).float().mean())?;
    Ok(zeros[0])
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn zeros_are_counted() {
        let rows = [[0.0, 1.0, -0.0, 1e-30], [2.0, 3.0, 4.0, 5.0]];
        assert_eq!(share(Tensor::from_data(rows, &Device::flex())).unwrap(), 0.25);
    }
}

//! rope_qk: queries and keys in one launch.

use super::rope::{BASE, LAYOUT, OFFSET, TRUNCATED, check_width, table, turned, vary};
use crate::host::BoundedTensor;
use crate::operator::*;
use burn::tensor::DType;
use kiln_ops::OpError;
use kiln_ops::rope::{oracle, rope_qk};

pub(crate) struct Row;

const fn heads(name: &'static str, shape: &'static [&'static str]) -> InputSpec {
    InputSpec { name, shape, holds: Holds::Float, mean: 0.2, fan_in: None }
}

const fn output(name: &'static str, shape: &'static [&'static str]) -> OutputSpec {
    OutputSpec { name, shape, f32: false, constant: false }
}

const Q: &[&str] = &["B", "H", "T", "D"];
const K: &[&str] = &["B", "Hkv", "T", "D"];

const SPEC: Spec = Spec {
    name: "rope_qk",
    formula: "rope of queries and keys",
    inputs: &[heads("q", Q), heads("k", K)],
    attributes: &[BASE, LAYOUT, OFFSET, TRUNCATED],
    outputs: &[output("rotated_q", Q), output("rotated_k", K)],
    differentiable: true,
    kernel: true,
};

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let [q, k] = [0, 1].map(|i| call.float::<4>(i));
        let [_, _, length, width] = q.dims();
        check_width([SPEC.name, "q"], &q.dims(), "[B, H, T, D]", width, call.attributes)?;
        let (table, offset) = table([length, width], call.attributes, q.device().inner())?;
        let (q, k) = rope_qk(q, k, &table, offset)?;
        Ok(vec![q.into(), k.into()])
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        turned(call.inputs, call.attributes, oracle::forward)
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        turned(dy, call.attributes, oracle::backward)
    }

    fn fit(&self, dims: &mut Dims) {
        dims.entry("D").and_modify(|d| d[0] *= 2);
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let width = case.shapes[0][3];
        vary(case, width, &mut number)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B", "H", "Hkv", "T"]
    }

    fn cases(&self) -> Vec<Case> {
        let case = |[b, h, kv, t, d]: [usize; 5]| Case::new([&[b, h, t, d], &[b, kv, t, d]]);
        vec![
            case([1, 1, 1, 1, 2]),
            case([2, 3, 1, 17, 48]),
            case([1, 4, 2, 65, 80]).with("offset", 37),
            case([2, 1, 3, 5, 6]).with("layout", "interleaved").with("base", 500),
            case([1, 2, 2, 31, 64]).with("truncated", true).with("offset", 3),
            case([2, 5, 1, 9, 128]),
        ]
    }

    // What is timed is a rotation, whoever's it is.
    fn shapes(&self, _scale: Scale) -> Vec<Case> {
        vec![]
    }

    fn stressed(&self) -> Option<Case> {
        Some(Case::new([&[8, 12, 1024, 64], &[8, 12, 1024, 64]]))
    }

    fn work(&self, _case: &Case, _dtype: DType) -> (Work, Work) {
        Default::default()
    }
}

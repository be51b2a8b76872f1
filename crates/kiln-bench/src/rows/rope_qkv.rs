//! rope_qkv: queries and keys where one product has left them, beside the values.

use super::rope::{BASE, LAYOUT, OFFSET, TRUNCATED, check_width, options, table, vary};
use crate::attributes::{Attribute, Attributes, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use burn::tensor::DType;
use kiln_ops::OpError;
use kiln_ops::oracle::Bounded;
use kiln_ops::rope::{oracle, rope_qkv};

pub(crate) struct Row;

const QKV: &[&str] = &["B", "T", "W"];

pub(super) const HEADS: Attribute =
    Attribute { name: "heads", default: "1", kind: Kind::IntegerAtLeast(1) };
pub(super) const KV_HEADS: Attribute =
    Attribute { name: "kv_heads", default: "1", kind: Kind::IntegerAtLeast(1) };

const SPEC: Spec = Spec {
    name: "rope_qkv",
    formula: "rope of the heads of queries and of keys in [queries | keys | values]; \
              W is (heads + 2·kv_heads)·D",
    inputs: &[InputSpec { name: "qkv", shape: QKV, holds: Holds::Float, mean: 0.2, fan_in: None }],
    attributes: &[BASE, LAYOUT, OFFSET, TRUNCATED, HEADS, KV_HEADS],
    outputs: &[OutputSpec { name: "rotated", shape: QKV, f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

/// Heads of the queries, and of keys and of values.
pub(super) fn heads(attributes: &Attributes) -> [usize; 2] {
    ["heads", "kv_heads"].map(|name| attributes.integer(name) as usize)
}

/// All heads of queries, keys and values.
pub(super) fn total(attributes: &Attributes) -> usize {
    let [heads, kv_heads] = heads(attributes);
    kv_heads.saturating_mul(2).saturating_add(heads)
}

/// What `rotate` makes of each head of queries and keys, from its offset; the values as they are.
fn heads_rotated(
    qkv: &BoundedTensor,
    attributes: &Attributes,
    rotate: impl Fn(&[Bounded], [usize; 2], usize) -> Vec<Bounded>,
) -> BoundedTensor {
    let [heads, kv_heads] = heads(attributes);
    let (length, all) = (qkv.shape[1], qkv.shape[2]);
    let width = all / total(attributes);
    let offset = attributes.integer("offset") as usize;
    let row = |(row, x): (usize, &[Bounded])| {
        let (queries_and_keys, values) = x.split_at((heads + kv_heads) * width);
        let rotated = queries_and_keys.chunks_exact(width);
        let rotated = rotated.flat_map(|x| rotate(x, [1, width], offset + row % length));
        rotated.chain(values.iter().copied()).collect::<Vec<_>>()
    };
    let rows = qkv.values.chunks_exact(all.max(1)).enumerate();
    BoundedTensor::new(qkv.shape.clone(), rows.flat_map(row).collect())
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let qkv = call.float::<3>(0);
        let [heads, kv_heads] = heads(call.attributes);
        let [_, length, all] = qkv.dims();
        let total = total(call.attributes);
        if all == 0 || !all.is_multiple_of(total) {
            return Err(OpError::Shape {
                op: SPEC.name,
                tensor: "qkv",
                found: qkv.dims().to_vec(),
                expected: format!("[B, T, W], W a multiple of heads + 2·kv_heads = {total}"),
            });
        }
        let width = all / total;
        let form = format!("[B, T, {total}·D]");
        check_width([SPEC.name, "qkv"], &qkv.dims(), &form, width, call.attributes)?;
        let (table, offset) = table([length, width], call.attributes, qkv.device().inner())?;
        Ok(vec![rope_qkv(qkv, heads, kv_heads, &table, offset)?.into()])
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let options = options(call.attributes);
        let rotate =
            |x: &[Bounded], size, offset: usize| oracle::forward(x, size, &options, offset);
        vec![heads_rotated(&call.inputs[0], call.attributes, rotate)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let options = options(call.attributes);
        let rotate =
            |x: &[Bounded], size, offset: usize| oracle::backward(x, size, &options, offset);
        vec![heads_rotated(&dy[0], call.attributes, rotate)]
    }

    // Heads of an even width, for all numbers of heads that may be drawn.
    fn fit(&self, dims: &mut Dims) {
        dims.entry("W").and_modify(|w| w[0] *= 24);
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let [heads, kv_heads] = super::pick(&mut number, &[[1, 1], [2, 1], [2, 2]]);
        let width = case.shapes[0][2] / (heads + 2 * kv_heads);
        vary(case.with("heads", heads).with("kv_heads", kv_heads), width, &mut number)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B", "T"]
    }

    fn cases(&self) -> Vec<Case> {
        let case = |[b, t]: [usize; 2], [heads, kv_heads, width]: [usize; 3]| {
            let case = Case::new([&[b, t, (heads + 2 * kv_heads) * width]]);
            case.with("heads", heads).with("kv_heads", kv_heads)
        };
        vec![
            case([1, 1], [1, 1, 2]),
            case([2, 17], [3, 1, 24]),
            case([1, 21], [4, 2, 32]).with("offset", 37),
            case([2, 5], [3, 3, 6]).with("layout", "interleaved").with("base", 500),
            case([1, 31], [1, 1, 64]).with("truncated", true).with("offset", 3),
            case([2, 3], [5, 1, 128]),
        ]
    }

    // What is timed is a rotation, wherever it stands.
    fn shapes(&self, _scale: Scale) -> Vec<Case> {
        vec![]
    }

    fn stressed(&self) -> Option<Case> {
        let case = Case::new([&[8, 1024, 3 * 768]]);
        Some(case.with("heads", 12).with("kv_heads", 12))
    }

    fn work(&self, _case: &Case, _dtype: DType) -> (Work, Work) {
        Default::default()
    }
}

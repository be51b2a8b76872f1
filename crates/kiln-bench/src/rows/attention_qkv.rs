//! attention_qkv: queries, keys and values where one product has left them.

use super::attention::{
    self, CAUSAL, CU_SEQLENS, SCALE, SOFTCAP, WINDOW, documents, leaves_out, options, rule, vary,
};
use super::rope_qkv::{HEADS, KV_HEADS, heads, total};
use crate::attributes::Attributes;
use crate::dims::replace;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why};
use burn::tensor::DType;
use kiln_ops::OpError;
use kiln_ops::attention::{WIDEST, attention_qkv, oracle};
use kiln_ops::oracle::Bounded;

pub(crate) struct Row;

/// The input that holds the ends of documents.
const ENDS: usize = 1;

const SPEC: Spec = Spec {
    name: "attention_qkv",
    formula: "attention of the heads of queries, keys and values in [queries | keys | values]; \
              W is (heads + 2·kv_heads)·D, Wy heads·D",
    inputs: &[
        InputSpec {
            name: "qkv",
            shape: &["B", "T", "W"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: None,
        },
        CU_SEQLENS,
    ],
    attributes: &[CAUSAL, SCALE, WINDOW, SOFTCAP, HEADS, KV_HEADS],
    outputs: &[OutputSpec { name: "y", shape: &["B", "T", "Wy"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

/// Of `[B, T, W]` those heads from `first` on, as the oracle of attention has them: `[B, count, T, D]`.
fn split(
    of: &BoundedTensor,
    [first, count]: [usize; 2],
    total: usize,
) -> (Vec<usize>, Vec<Bounded>) {
    let [batch, length, all] = of.shape[..] else { unreachable!("the rank was checked") };
    let width = all / total;
    let at = |[b, h, t]: [usize; 3]| ((b * length + t) * total + first + h) * width;
    let values = heads_of([batch, count, length]).flat_map(|i| &of.values[at(i)..][..width]);
    (vec![batch, count, length, width], values.copied().collect())
}

/// `[B, T, W]` of parts of `[B, heads, T, D]`, beside each other in their order.
fn join(parts: &[(usize, Vec<Bounded>)], [batch, length, width]: [usize; 3]) -> BoundedTensor {
    let row = |[b, t]: [usize; 2]| {
        parts.iter().flat_map(move |(heads, values)| {
            (0..*heads)
                .flat_map(move |h| &values[((b * heads + h) * length + t) * width..][..width])
        })
    };
    let rows = (0..batch).flat_map(|b| (0..length).map(move |t| [b, t]));
    let values = rows.flat_map(row).copied().collect();
    let heads: usize = parts.iter().map(|(heads, _)| heads).sum();
    BoundedTensor::new(vec![batch, length, heads * width], values)
}

/// All indices of a batch, a head and a position, in order.
fn heads_of([batch, heads, length]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    let of = move |b| (0..heads).flat_map(move |h| (0..length).map(move |t| [b, h, t]));
    (0..batch).flat_map(of)
}

/// A call as the oracle of attention takes it: queries, keys and values.
struct Apart {
    parts: [Vec<Bounded>; 3],
    dims: oracle::Dims,
    rule: oracle::Rule,
}

impl Apart {
    fn new(call: &HostCall<'_>) -> Self {
        let [heads, kv_heads] = heads(call.attributes);
        let [qkv, ends] = call.inputs else { unreachable!("two inputs") };
        let total = total(call.attributes);
        let parts = [[0, heads], [heads, kv_heads], [heads + kv_heads, kv_heads]];
        let [q, k, v] = parts.map(|part| split(qkv, part, total));
        let dims = attention::dims(&q.0, &k.0);
        let rule = rule(call.attributes, dims.width, &ends.integers());
        Self { parts: [q.1, k.1, v.1], dims, rule }
    }

    fn sizes(&self) -> [usize; 3] {
        [self.dims.batch, self.dims.queries, self.dims.width]
    }
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn output_shape(
        &self,
        _output: &OutputSpec,
        dims: &Dims,
        attributes: &Attributes,
    ) -> Result<Vec<usize>, String> {
        let ([heads, _], all) = (heads(attributes), dims["W"][0]);
        let (batch, length, total) = (dims["B"][0], dims["T"][0], total(attributes));
        if all == 0 || !all.is_multiple_of(total) {
            let found = [batch, length, all];
            return Err(format!(
                "{}: `qkv` has shape {found:?}, expected [B, T, W], W a multiple of heads + 2·kv_heads = {total}",
                SPEC.name
            ));
        }
        Ok(vec![batch, length, all / total * heads])
    }

    fn kernels_take(&self, shapes: &[Vec<usize>], attributes: &Attributes) -> bool {
        shapes[0][2] / total(attributes) <= WIDEST
    }

    fn families(&self) -> &'static [&'static str] {
        attention::FAMILIES
    }

    // Few queries.
    fn untracked(&self) -> bool {
        true
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let ([heads, kv_heads], options) = (heads(call.attributes), options(call.attributes));
        let documents = documents(call, ENDS)?;
        let y = attention_qkv(call.float(0), heads, kv_heads, documents.as_ref(), options)?;
        Ok(vec![y.into()])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let of = Apart::new(call);
        let [q, k, v] = &of.parts;
        let y = oracle::forward(q, k, v, of.dims, &of.rule);
        vec![join(&[(of.dims.heads, y)], of.sizes())]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let of = Apart::new(call);
        let ([q, k, v], [heads, kv_heads]) = (&of.parts, [of.dims.heads, of.dims.kv_heads]);
        let (_, dy) = split(&dy[0], [0, heads], heads);
        let (dq, dk, dv) = oracle::backward(q, k, v, of.dims, &of.rule, &dy);
        vec![join(&[(heads, dq), (kv_heads, dk), (kv_heads, dv)], of.sizes())]
    }

    // Heads of all numbers that may be drawn, and of few widths: each has kernels of its own.
    fn fit(&self, dims: &mut Dims) {
        dims.entry("W").and_modify(|w| w[0] = 48 * (1 + w[0] % 4));
        // Some are packed documents.
        if (2..8).contains(&dims["N"][0]) {
            dims.insert("B", vec![1]);
        } else {
            dims.insert("N", vec![0]);
        }
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let [heads, kv_heads] = super::pick(&mut number, &[[1, 1], [2, 1], [2, 2]]);
        vary(case.with("heads", heads).with("kv_heads", kv_heads), &mut number)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        vec![replace(dims, "B", 2)]
    }

    // Queries and keys are one input: scores of what is far from 0 are beyond f16, and rounded to bf16 they say nothing of
    // their exponentials.
    fn leaves_out(&self, holder: Holder, special: Special, dtype: DType) -> Option<Why> {
        let far = special.far() && matches!(holder, Holder::Input(_));
        let of_type = match dtype {
            DType::F16 => Some(Why::Type),
            DType::BF16 => Some(Why::Bound),
            _ => None,
        };
        leaves_out(special).or(of_type.filter(|_| far))
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B"]
    }

    fn cases(&self) -> Vec<Case> {
        let packed = |[b, t]: [usize; 2], [heads, kv, width]: [usize; 3], documents: usize| {
            let case = Case::new([&[b, t, (heads + 2 * kv) * width], &[documents]]);
            case.with("heads", heads).with("kv_heads", kv)
        };
        let case = |sizes, heads| packed(sizes, heads, 0);
        vec![
            case([1, 1], [1, 1, 1]),
            case([2, 9], [4, 2, 8]),
            // Few queries; a few tiles, some of them whole.
            case([3, 2], [8, 2, 64]),
            case([1, 130], [1, 1, 64]).with("causal", false),
            case([2, 97], [2, 1, 64]).with("window", 33),
            case([1, 65], [2, 1, 128]).with("softcap", 3),
            packed([1, 150], [4, 2, 16], 6),
        ]
    }

    // What is timed is attention, wherever its operands stand.
    fn shapes(&self, _scale: Scale) -> Vec<Case> {
        vec![]
    }

    fn stressed(&self) -> Option<Case> {
        let case = Case::new([&[8, 1024, 3 * 768], &[0]]);
        Some(case.with("heads", 12).with("kv_heads", 12))
    }

    fn work(&self, _case: &Case, _dtype: DType) -> (Work, Work) {
        Default::default()
    }
}

//! attention.

use super::elements;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::dims::{replace, shrink};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::{self, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
#[cfg(feature = "cube")]
use kiln_ops::attention::backend;
use kiln_ops::attention::oracle;
use kiln_ops::attention::{AttentionOptions, Documents, WIDEST, attention, attention_documents};

pub(crate) struct Row;

/// The input that holds the ends of documents.
const ENDS: usize = 3;

pub(super) const CU_SEQLENS: InputSpec = InputSpec {
    name: "cu_seqlens",
    shape: &["N"],
    holds: Holds::Ends("T"),
    mean: 0.0,
    fan_in: None,
};
pub(super) const CAUSAL: Attribute =
    Attribute { name: "causal", default: "true", kind: Kind::Flag };
pub(super) const SCALE: Attribute =
    Attribute { name: "scale", default: "D^-½", kind: Kind::Optional };
pub(super) const WINDOW: Attribute =
    Attribute { name: "window", default: "none", kind: Kind::OptionalInteger(1) };
pub(super) const SOFTCAP: Attribute =
    Attribute { name: "softcap", default: "none", kind: Kind::OptionalAbove(0.0) };

pub(super) const FAMILIES: &[&str] = &["wgmma", "mma", "simt"];

const SPEC: Spec = Spec {
    name: "attention",
    formula: "y = softmax(cap(scale · q·kᵀ) + mask) · v; causal: query t sees keys up to t + S - T",
    inputs: &[
        InputSpec {
            name: "q",
            shape: &["B", "H", "T", "D"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: None,
        },
        InputSpec {
            name: "k",
            shape: &["B", "Hkv", "S", "D"],
            holds: Holds::Float,
            mean: -0.1,
            fan_in: None,
        },
        InputSpec {
            name: "v",
            shape: &["B", "Hkv", "S", "D"],
            holds: Holds::Float,
            mean: 0.3,
            fan_in: None,
        },
        CU_SEQLENS,
    ],
    attributes: &[CAUSAL, SCALE, WINDOW, SOFTCAP],
    outputs: &[OutputSpec { name: "y", shape: &["B", "H", "T", "D"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

pub(super) fn dims(q: &[usize], k: &[usize]) -> oracle::Dims {
    oracle::Dims {
        batch: q[0],
        heads: q[1],
        kv_heads: k[1],
        queries: q[2],
        keys: k[2],
        width: q[3],
    }
}

pub(super) fn options(attributes: &Attributes) -> AttentionOptions {
    AttentionOptions {
        causal: attributes.flag("causal"),
        scale: attributes.optional("scale"),
        window: attributes.optional("window").map(|window| window as usize),
        softcap: attributes.optional("softcap"),
    }
}

/// As the oracle takes it, with the ends of documents.
pub(super) fn rule(attributes: &Attributes, width: usize, ends: &[i64]) -> oracle::Rule {
    let documents = ends.iter().map(|end| *end as usize).collect();
    let rule = oracle::Rule::new(options(attributes), width);
    oracle::Rule { documents: (!ends.is_empty()).then_some(documents), ..rule }
}

/// The documents whose ends an input holds, if there are any.
pub(super) fn documents(call: &Call<'_>, ends: usize) -> Result<Option<Documents>, OpError> {
    if call.inputs[ends].shape()[0] == 0 {
        return Ok(None);
    }
    let ends: Vec<i64> = call.int(ends).into_data().iter().collect();
    let end = |end: i64| {
        usize::try_from(end).map_err(|_| OpError::Attribute {
            op: SPEC.name,
            attribute: "cu_seqlens",
            found: end.to_string(),
            expected: "ends of 0 and more".into(),
        })
    };
    let ends = ends.into_iter().map(end).collect::<Result<Vec<_>, _>>()?;
    Documents::from_cu_seqlens(&ends, &call.rows(0).device()).map(Some)
}

/// What is not finite: a query whose scores are −∞ takes nothing in, and the weights 0 of keys that it does not see are
/// multiplied, too.
pub(super) fn leaves_out(special: Special) -> Option<Why> {
    undefined(!special.finite())
}

/// Attributes by a random number.
pub(super) fn vary(case: Case, number: &mut u64) -> Case {
    let case = match super::pick(number, &[0, 1, 2, 3]) {
        0 => case.with("causal", false),
        1 => case.with("window", super::pick(number, &[1, 7, 32, 100])),
        _ => case,
    };
    let case = match super::pick(number, &[0, 1, 2, 3]) {
        0 => case.with("softcap", super::pick(number, &[2.5, 30.0])),
        _ => case,
    };
    match super::pick(number, &[0, 1, 2]) {
        0 => case.with("scale", super::pick(number, &[0.3, 1.0, -0.5, 0.0])),
        _ => case,
    }
}

fn tensors(call: &Call<'_>) -> [Tensor<4>; 3] {
    [0, 1, 2].map(|i| call.float(i))
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        FAMILIES
    }

    // Few queries.
    fn untracked(&self) -> bool {
        true
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let ([q, k, v], options) = (tensors(call), options(call.attributes));
        let y = match documents(call, ENDS)? {
            Some(documents) => attention_documents(q, k, v, &documents, options)?,
            None => attention(q, k, v, options)?,
        };
        Ok(vec![y.into()])
    }

    #[cfg(feature = "cube")]
    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        let documents = documents(call, ENDS).expect("the call was checked");
        let options = options(call.attributes);
        let (y, lse) = backend::forward(tensors(call), documents.as_ref(), options);
        vec![y.flatten(0, 2), lse.flatten(0, 1)]
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let documents = documents(call, ENDS).expect("the call was checked");
        let inputs = tensors(call);
        let shape = inputs[0].dims();
        let [batch, heads, rows, _] = shape;
        let y = call.rows(ENDS + 1).reshape(shape);
        let lse = call.rows(ENDS + 2).reshape([batch, heads, rows]);
        let dy = dy[0].clone().reshape(shape);
        let options = options(call.attributes);
        let gradients = backend::backward(dy, inputs, (y, lse), documents.as_ref(), options);
        Some(gradients.map(|gradient| gradient.flatten(0, 2)).into())
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [q, k, v, ends] = call.inputs else { unreachable!("four inputs") };
        let d = dims(&q.shape, &k.shape);
        let rule = rule(call.attributes, d.width, &ends.integers());
        let y = oracle::forward(&q.values, &k.values, &v.values, d, &rule);
        vec![BoundedTensor::new(q.shape.clone(), y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [q, k, v, ends] = call.inputs else { unreachable!("four inputs") };
        let (d, dy) = (dims(&q.shape, &k.shape), &dy[0].values);
        let rule = rule(call.attributes, d.width, &ends.integers());
        let (dq, dk, dv) = oracle::backward(&q.values, &k.values, &v.values, d, &rule, dy);
        [dq, dk, dv]
            .into_iter()
            .zip(call.inputs)
            .map(|(g, i)| BoundedTensor::new(i.shape.clone(), g))
            .collect()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let [q, k] = [0, 1].map(|i| spot.call.inputs[i].shape());
        let d = dims(q, k);
        let ends = spot.integers(ENDS)?;
        spot::attention(self, spot, d, &rule(spot.call.attributes, d.width, &ends))
    }

    fn kernels_take(&self, shapes: &[Vec<usize>], _attributes: &Attributes) -> bool {
        shapes[0][3] <= WIDEST
    }

    fn fit(&self, dims: &mut Dims) {
        dims.entry("D").and_modify(|width| width[0] = width[0].min(WIDEST));
        let kv_heads = dims["Hkv"][0];
        dims.entry("H").and_modify(|h| h[0] = kv_heads * h[0].min(3));
        // Some are packed documents.
        let (queries, ends) = (dims["T"][0], dims["N"][0]);
        if (2..8).contains(&ends) {
            dims.insert("B", vec![1]);
            dims.insert("S", vec![queries]);
        } else {
            dims.insert("N", vec![0]);
        }
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        vary(case, &mut number)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        let batches = replace(dims, "B", 2);
        if dims["T"][0] > 8 {
            let group = dims["H"][0] / dims["Hkv"][0];
            replace(dims, "Hkv", 2);
            replace(dims, "H", 2 * group);
        }
        let sizes = shrink(dims, |name, size| ["T", "S"].contains(&name) && size > 8);
        sizes.into_iter().chain([batches]).collect()
    }

    fn leaves_out(&self, _holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        leaves_out(special)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B", "T"]
    }

    fn cases(&self) -> Vec<Case> {
        let packed = |[b, h, kv, t, s, d]: [usize; 6], documents: usize| {
            Case::new([&[b, h, t, d], &[b, kv, s, d], &[b, kv, s, d], &[documents]])
        };
        let case = |sizes: [usize; 6]| packed(sizes, 0);
        vec![
            case([1, 1, 1, 1, 1, 1]),
            case([2, 4, 2, 9, 9, 8]),
            case([1, 3, 1, 31, 31, 48]),
            case([1, 2, 2, 5, 17, 16]),
            // The first rows see nothing; whole tiles of them.
            case([1, 2, 1, 11, 4, 16]),
            case([1, 2, 1, 150, 37, 16]).with("window", 5),
            // Long enough for errors to average out.
            case([1, 2, 1, 97, 97, 32]),
            case([1, 2, 1, 7, 13, 20]).with("causal", false).with("scale", 0.3),
            // Several tiles, some of them whole.
            case([1, 2, 1, 200, 260, 16]),
            case([1, 1, 1, 130, 190, 16]).with("causal", false),
            // Few queries, as in decoding: one part of the keys, several; sets of queries that read the same keys.
            case([2, 4, 1, 1, 133, 64]),
            case([1, 2, 1, 1, 700, 32]),
            case([5, 8, 4, 1, 90, 48]),
            case([1, 18, 1, 3, 50, 33]).with("window", 9).with("softcap", 3),
            case([1, 40, 1, 1, 300, 128]),
            case([2, 12, 2, 3, 150, 64]).with("window", 70).with("softcap", 3),
            case([1, 4, 2, 1, 190, 256]),
            case([1, 2, 2, 40, 40, 80]),
            case([1, 2, 1, 33, 65, 128]),
            case([1, 1, 1, 20, 35, 256]),
            // Scores of ±100 and more.
            case([1, 2, 1, 50, 50, 32]).with("scale", 8),
            case([1, 2, 1, 140, 140, 24]).with("window", 33),
            case([1, 2, 1, 40, 70, 32]).with("window", 1),
            case([1, 2, 1, 45, 45, 32]).with("softcap", 1.5).with("scale", 0.5),
            case([1, 2, 1, 45, 45, 16]).with("softcap", 30).with("scale", 20).with("window", 20),
            // Scores of some rows are all far below zero; these widths have blocks of 96 and of 80 keys.
            case([2, 4, 1, 20, 20, 192]).with("scale", 3),
            case([2, 4, 1, 20, 20, 256]).with("scale", 3),
            packed([1, 2, 1, 90, 90, 32], 4),
            packed([1, 4, 2, 150, 150, 16], 6).with("window", 16),
            packed([1, 2, 2, 70, 70, 16], 3).with("causal", false).with("softcap", 2),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let case = |[b, h, t, d]: [usize; 4]| {
            Case::new([&[b, h, t, d], &[b, h, t, d], &[b, h, t, d], &[0]])
        };
        match scale {
            Scale::Small => vec![case([16, 4, 128, 32])],
            Scale::Train => vec![case([32, 12, 1024, 64])],
            // 16384 tokens of 2048 elements, the 124M model, and what takes memory if anything does.
            Scale::Large => (9..15)
                .map(|log2| 1 << log2)
                .flat_map(|t| [[16384 / t, 16, t, 128], [16384 / t, 32, t, 64]])
                .chain([[32, 12, 1024, 64], [4, 16, 16384, 128]])
                .map(case)
                .collect(),
            // Decoding: one query of each head over the keys of a cache.
            Scale::Thin => [
                [1, 12, 12, 1024, 64],
                [1, 32, 8, 4096, 128],
                [1, 32, 8, 16384, 128],
                [1, 64, 8, 16384, 128],
                [8, 32, 8, 4096, 128],
                [4, 16, 8, 8192, 256],
                [64, 32, 8, 2048, 128],
                [64, 32, 32, 1024, 64],
                [16, 32, 4, 16384, 128],
                [8, 32, 1, 16384, 128],
                [8, 64, 1, 16384, 128],
                [16, 64, 1, 16384, 128],
            ]
            .map(|[b, h, kv, s, d]| {
                Case::new([&[b, h, 1, d], &[b, kv, s, d], &[b, kv, s, d], &[0]])
            })
            .into(),
            Scale::Lengths => vec![],
        }
    }

    fn times_backward(&self, case: &Case) -> bool {
        case.shapes[0][2] > 1
    }

    fn times_reference(&self, case: &Case, _: bool) -> bool {
        // Several times, and for each graph that waits.
        let (q, k) = (&case.shapes[0], &case.shapes[1]);
        q[0] * q[1] * q[2] * k[2] <= 1 << 29
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (q, k) = (elements(case, 0), elements(case, 1));
        let causal =
            !case.attributes.iter().any(|(name, value)| *name == "causal" && value == "false");
        let (queries, keys) = (case.shapes[0][2] as f64, case.shapes[1][2] as f64);
        // Under a causal mask a query sees on average all keys but half as many as there are queries.
        let seen = if causal { keys - queries.min(keys) / 2.0 } else { keys };
        let flops = 4.0 * q * seen;
        let size = dtype.size() as f64;
        (
            Work { bytes: (2.0 * q + 2.0 * k) * size, flops },
            Work { bytes: (4.0 * q + 4.0 * k) * size, flops: 2.5 * flops },
        )
    }
}

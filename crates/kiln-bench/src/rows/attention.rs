//! attention.

use super::elements;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::attention::{AttentionOptions, attention};
use kiln_ops::{OpError, oracle::attention as oracle};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "attention",
    formula: "y = softmax(scale · q·kᵀ + mask) · v; causal: query t sees keys up to t + S - T",
    inputs: &[
        InputSpec {
            name: "q",
            shape: &["B", "H", "T", "D"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: false,
        },
        InputSpec {
            name: "k",
            shape: &["B", "Hkv", "S", "D"],
            holds: Holds::Float,
            mean: -0.1,
            fan_in: false,
        },
        InputSpec {
            name: "v",
            shape: &["B", "Hkv", "S", "D"],
            holds: Holds::Float,
            mean: 0.3,
            fan_in: false,
        },
    ],
    attributes: &[
        Attribute { name: "causal", default: "true", kind: Kind::Flag },
        Attribute { name: "scale", default: "D^-½", kind: Kind::Optional },
    ],
    outputs: &[OutputSpec { name: "y", shape: &["B", "H", "T", "D"], f32: false }],
    differentiable: true,
    kernel: false,
};

fn dims(q: &[usize], k: &[usize]) -> oracle::Dims {
    oracle::Dims {
        batch: q[0],
        heads: q[1],
        kv_heads: k[1],
        queries: q[2],
        keys: k[2],
        width: q[3],
    }
}

fn mask(attributes: &Attributes, width: usize) -> (bool, f64) {
    let causal = attributes.flag("causal");
    let scale = attributes.optional("scale");
    let options = AttentionOptions { causal, scale, ..Default::default() };
    (causal, options.scale_for(width))
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Tensor<1>>, OpError> {
        let options = AttentionOptions {
            causal: call.attributes.flag("causal"),
            scale: call.attributes.optional("scale"),
            ..Default::default()
        };
        let y = attention(call.float::<4>(0), call.float::<4>(1), call.float::<4>(2), options)?;
        Ok(vec![y.flatten(0, 3)])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [q, k, v] = call.inputs else { unreachable!("three inputs") };
        let d = dims(&q.shape, &k.shape);
        let (causal, scale) = mask(call.attributes, d.width);
        let y = oracle::forward(&q.values, &k.values, &v.values, d, causal, scale);
        vec![BoundedTensor::new(q.shape.clone(), y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [q, k, v] = call.inputs else { unreachable!("three inputs") };
        let (d, dy) = (dims(&q.shape, &k.shape), &dy[0].values);
        let (causal, scale) = mask(call.attributes, d.width);
        let (dq, dk, dv) = oracle::backward(&q.values, &k.values, &v.values, d, causal, scale, dy);
        [dq, dk, dv]
            .into_iter()
            .zip(call.inputs)
            .map(|(g, i)| BoundedTensor::new(i.shape.clone(), g))
            .collect()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let [q, k] = [0, 1].map(|i| spot.call.inputs[i].shape());
        let d = dims(q, k);
        let (causal, scale) = mask(spot.call.attributes, d.width);
        spot::attention(self, spot, d, causal, scale)
    }

    fn fit(&self, dims: &mut Dims) {
        let kv_heads = dims["Hkv"][0];
        dims.entry("H").and_modify(|h| h[0] = kv_heads * h[0].min(3));
    }

    fn cases(&self) -> Vec<Case> {
        let case = |[b, h, kv, t, s, d]: [usize; 6]| {
            Case::new([&[b, h, t, d], &[b, kv, s, d], &[b, kv, s, d]])
        };
        vec![
            case([1, 1, 1, 1, 1, 1]),
            case([2, 4, 2, 9, 9, 8]),
            case([1, 3, 1, 31, 31, 48]),
            case([1, 2, 2, 5, 17, 16]),
            case([1, 2, 1, 11, 4, 16]),
            // Long enough for errors to average out.
            case([1, 2, 1, 97, 97, 32]),
            case([1, 2, 1, 7, 13, 20]).with("causal", false).with("scale", 0.3),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let [b, h, t, d] = match scale {
            Scale::Small => [16, 4, 128, 32],
            Scale::Train => [32, 12, 1024, 64],
            Scale::Large => [4, 16, 4096, 128],
            Scale::Thin => return vec![],
        };
        vec![Case::new([&[b, h, t, d], &[b, h, t, d], &[b, h, t, d]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (q, k) = (elements(case, 0), elements(case, 1));
        let causal =
            !case.attributes.iter().any(|(name, value)| *name == "causal" && value == "false");
        let keys = case.shapes[1][2] as f64;
        let flops = 4.0 * q * keys / if causal { 2.0 } else { 1.0 };
        let size = dtype.size() as f64;
        (
            Work { bytes: (2.0 * q + 2.0 * k) * size, flops },
            Work { bytes: (4.0 * q + 4.0 * k) * size, flops: 2.5 * flops },
        )
    }
}

//! rope.

use super::elements;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::dims::replace;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use burn::tensor::{DType, Device};
use kiln_ops::OpError;
use kiln_ops::oracle::Bounded;
use kiln_ops::rope::oracle;
use kiln_ops::rope::{RopeLayout, RopeOptions, RopeTable, rope};
use std::sync::{Mutex, PoisonError};

pub(crate) struct Row;

pub(super) const BASE: Attribute =
    Attribute { name: "base", default: "10000", kind: Kind::Above(0.0) };
pub(super) const LAYOUT: Attribute =
    Attribute { name: "layout", default: "half", kind: Kind::OneOf(&["half", "interleaved"]) };
pub(super) const OFFSET: Attribute =
    Attribute { name: "offset", default: "0", kind: Kind::IntegerAtLeast(0) };
pub(super) const TRUNCATED: Attribute =
    Attribute { name: "truncated", default: "false", kind: Kind::Flag };

const SPEC: Spec = Spec {
    name: "rope",
    formula: "pairs rotated by angle (t + offset) · base^(-2k/D): \
              y1 = x1 cos + x2 sin, y2 = -x1 sin + x2 cos",
    inputs: &[InputSpec {
        name: "x",
        shape: &["B", "H", "T", "D"],
        holds: Holds::Float,
        mean: 0.2,
        fan_in: None,
    }],
    attributes: &[BASE, LAYOUT, OFFSET, TRUNCATED],
    outputs: &[OutputSpec { name: "y", shape: &["B", "H", "T", "D"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

pub(super) fn options(attributes: &Attributes) -> RopeOptions {
    RopeOptions {
        base: attributes.number("base"),
        layout: match attributes.word("layout") {
            "interleaved" => RopeLayout::Interleaved,
            _ => RopeLayout::Half,
        },
        truncated: attributes.flag("truncated"),
    }
}

/// A table and what it was made for.
type Made = ((usize, usize, usize, RopeOptions, Device), RopeTable);

/// The most that a call is behind its table's first position, to which the table brings the rest of the offset.
const BEHIND: usize = 3;

/// The table of the last call: a model makes it once, so its making is not timed.
static TABLE: Mutex<Option<Made>> = Mutex::new(None);

pub(super) fn table(
    [length, width]: [usize; 2],
    attributes: &Attributes,
    device: Device,
) -> Result<(RopeTable, usize), OpError> {
    let offset = attributes.integer("offset") as usize;
    let behind = offset.min(BEHIND);
    let options = options(attributes);
    let mut last = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (offset, length, width, options, device);
    if let Some((_, table)) = last.as_ref().filter(|(made_for, _)| *made_for == key) {
        return Ok((table.clone(), behind));
    }
    let table = RopeTable::window(offset - behind, length + behind, width, options, &key.4)?;
    *last = Some((key, table.clone()));
    Ok((table, behind))
}

/// Refuses heads of a width that has no pairs, by the tensor that has them.
pub(super) fn check_width(
    [op, tensor]: [&'static str; 2],
    shape: &[usize],
    form: &str,
    width: usize,
    attributes: &Attributes,
) -> Result<(), OpError> {
    let (multiple, why) = if attributes.flag("truncated") { (4, " (truncated)") } else { (2, "") };
    if width.is_multiple_of(multiple) {
        return Ok(());
    }
    let expected = format!("{form} with D a multiple of {multiple}{why}");
    Err(OpError::Shape { op, tensor, found: shape.to_vec(), expected })
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let x = call.float::<4>(0);
        let [_, _, length, width] = x.dims();
        check_width(["rope", "x"], &x.dims(), "[B, H, T, D]", width, call.attributes)?;
        let (table, offset) = table([length, width], call.attributes, x.device().inner())?;
        Ok(vec![rope(x, &table, offset)?.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(
        &self,
        call: &Call<'_>,
        cotangents: &[Tensor<1>],
    ) -> Option<Vec<Tensor<2>>> {
        let x = call.float::<4>(0);
        let dy = cotangents[0].clone().reshape(x.dims());
        let [_, _, length, width] = x.dims();
        let (table, offset) = table([length, width], call.attributes, x.device().inner()).ok()?;
        Some(vec![kiln_ops::rope::backend::backward(dy, &table, offset).flatten(0, 2)])
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

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let (shape, attributes) = (spot.call.inputs[0].shape(), spot.call.attributes);
        let (length, width) = (shape[2], shape[3]);
        let rows = spot.sample(shape[0] * shape[1] * length, spot::ROWS);
        let x = match spot.backward() {
            true => spot.cotangent_rows(0, &rows)?,
            false => spot.input_rows(0, &rows)?,
        };
        let (options, offset) = (options(attributes), attributes.integer("offset") as usize);
        // A row alone is a call of its own, at the position of the row.
        let rotated = |(row, x): (&usize, &[f64])| -> Vec<Bounded> {
            let (x, offset) = (spot.numbers(x), offset + row % length);
            match spot.backward() {
                true => oracle::backward(&x, [1, width], &options, offset),
                false => oracle::forward(&x, [1, width], &options, offset),
            }
        };
        let each = rows.iter().zip(x.chunks_exact(width));
        let expected: Vec<Bounded> = each.flat_map(rotated).collect();
        spot.compare_rows(0, &rows, &expected)
    }

    fn fit(&self, dims: &mut Dims) {
        dims.entry("D").and_modify(|d| d[0] *= 2);
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let width = case.shapes[0][3];
        vary(case, width, &mut number)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        replace(dims, "B", 2);
        replace(dims, "T", 40);
        vec![]
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B", "H", "T"]
    }

    fn cases(&self) -> Vec<Case> {
        vec![
            Case::new([&[1, 1, 1, 2]]),
            Case::new([&[2, 3, 17, 48]]),
            Case::new([&[1, 2, 129, 80]]).with("offset", 37),
            Case::new([&[2, 1, 5, 6]]).with("layout", "interleaved").with("base", 500),
            Case::new([&[1, 3, 31, 64]]).with("truncated", true).with("offset", 3),
            Case::new([&[2, 5, 9, 128]]).with("layout", "interleaved").with("offset", 2),
            Case::new([&[3, 7, 33, 128]]),
            Case::new([&[1, 1, 300, 34]]),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let sizes: &[[usize; 4]] = match scale {
            Scale::Small => &[[16, 4, 128, 32]],
            Scale::Train => &[[32, 12, 1024, 64]],
            Scale::Large => &[[8, 40, 2048, 128]],
            Scale::Thin | Scale::Lengths => return vec![],
        };
        sizes.iter().map(|shape| Case::new([shape])).collect()
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let n = elements(case, 0);
        let work = Work { bytes: 2.0 * n * dtype.size() as f64, flops: 3.0 * n };
        (work, work)
    }
}

/// Gives a case of heads of this width attributes, by a random number.
pub(super) fn vary(case: Case, width: usize, number: &mut u64) -> Case {
    let base = super::pick(number, &[10_000.0, 2.0, 500.0, 1e6]);
    let layout = super::pick(number, &["half", "interleaved"]);
    let truncated =
        layout == "half" && width.is_multiple_of(4) && super::pick(number, &[true, false]);
    let case = case.with("base", base).with("layout", layout).with("truncated", truncated);
    case.with("offset", *number % 3000)
}

/// What one of the oracle's functions makes of each of these.
pub(super) fn turned(
    tensors: &[BoundedTensor],
    attributes: &Attributes,
    turn: impl Fn(&[Bounded], [usize; 2], &RopeOptions, usize) -> Vec<Bounded>,
) -> Vec<BoundedTensor> {
    let (options, offset) = (options(attributes), attributes.integer("offset") as usize);
    let one = |x: &BoundedTensor| {
        let y = turn(&x.values, [x.shape[2], x.shape[3]], &options, offset);
        BoundedTensor::new(x.shape.clone(), y)
    };
    tensors.iter().map(one).collect()
}

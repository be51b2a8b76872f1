//! bk.

use super::elements;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::dims::replace;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::Spot;
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::bk::oracle;
use kiln_ops::bk::{BkMode, BkOptions, bk};
use kiln_ops::oracle::Bounded;
use rayon::prelude::*;
use std::collections::BTreeSet;

pub(crate) struct Row;

const fn input(name: &'static str, shape: &'static [&'static str], mean: f64) -> InputSpec {
    InputSpec { name, shape, holds: Holds::F32, mean, fan_in: None }
}

const SPEC: Spec = Spec {
    name: "bk",
    formula: "g = diag((T - zI)^-1), T tridiagonal: a, b above, c below; causal: of what is not behind; \
              Bb, Bc, Bz: B or 1",
    inputs: &[
        input("a", &["B", "N"], -2.0),
        input("b", &["Bb", "N-1"], 0.8),
        input("c", &["Bc", "N-1"], 0.8),
        input("z", &["Bz", "2"], 0.7),
    ],
    attributes: &[
        Attribute { name: "mode", default: "full", kind: Kind::OneOf(&["full", "causal"]) },
        Attribute { name: "max_abs", default: "none", kind: Kind::OptionalAbove(0.0) },
    ],
    outputs: &[OutputSpec { name: "g", shape: &["B", "N", "2"], f32: true, constant: false }],
    differentiable: true,
    kernel: true,
};

fn options(attributes: &Attributes) -> BkOptions {
    BkOptions {
        mode: match attributes.word("mode") {
            "causal" => BkMode::Causal,
            _ => BkMode::Full,
        },
        max_abs: attributes.optional("max_abs"),
    }
}

fn dims(shapes: [&[usize]; 4]) -> oracle::Dims {
    let [a, b, c, z] = shapes;
    oracle::Dims { rows: a[0], length: a[1], shared: [b[0], c[0], z[0]] }
}

fn tensors(call: &Call<'_>) -> [Tensor<2>; 4] {
    [0, 1, 2, 3].map(|i| call.float(i))
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let [a, b, c, z] = tensors(call);
        Ok(vec![bk(a, b, c, z, options(call.attributes))?.into()])
    }

    #[cfg(feature = "cube")]
    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        let records = kiln_ops::bk::backend::kept(tensors(call), options(call.attributes));
        vec![records.flatten(0, 1)]
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dg: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let inputs = tensors(call);
        let [rows, length] = inputs[0].dims();
        let dg = dg[0].clone().reshape([rows, length, 2]);
        let records = call.rows(4);
        let [all, record] = records.dims();
        let records = records.reshape([rows, all / rows, record]);
        let options = options(call.attributes);
        Some(kiln_ops::bk::backend::backward(dg, inputs, records, options).into())
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [a, b, c, z] = call.inputs else { unreachable!("four inputs") };
        let d = dims([&a.shape, &b.shape, &c.shape, &z.shape]);
        let inputs = [a, b, c, z].map(|of| of.values.as_slice());
        let g = oracle::forward(inputs, d, options(call.attributes));
        vec![BoundedTensor::new(vec![d.rows, d.length, 2], g)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dg: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [a, b, c, z] = call.inputs else { unreachable!("four inputs") };
        let d = dims([&a.shape, &b.shape, &c.shape, &z.shape]);
        let inputs = [a, b, c, z].map(|of| of.values.as_slice());
        let gradients = oracle::backward(inputs, d, options(call.attributes), &dg[0].values);
        gradients
            .into_iter()
            .zip(call.inputs)
            .map(|(gradient, input)| BoundedTensor::new(input.shape.clone(), gradient))
            .collect()
    }

    // Rows stand for themselves, but for what they share.
    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let shapes = [0, 1, 2, 3].map(|i| spot.call.inputs[i].shape());
        let (d, options) = (dims(shapes), options(spot.call.attributes));
        let one = oracle::Dims { rows: 1, shared: [1; 3], ..d };
        let owned = [d.rows, d.shared[0], d.shared[1], d.shared[2]];
        let inputs = |row: usize| -> Result<[Vec<Bounded>; 4], String> {
            let mut of = vec![];
            for (i, rows) in owned.iter().enumerate() {
                of.push(spot.numbers(&spot.input_rows(i, &[row.min(rows - 1)])?));
            }
            Ok(of.try_into().expect("four inputs"))
        };
        let results = |row: usize| -> Result<[Vec<Bounded>; 4], String> {
            let places: Vec<usize> = (row * d.length..(row + 1) * d.length).collect();
            let inputs = inputs(row)?;
            let inputs = inputs.each_ref().map(Vec::as_slice);
            if !spot.backward() {
                let g = oracle::forward(inputs, one, options);
                spot.compare_rows(0, &places, &g)?;
                return Ok(Default::default());
            }
            let dg = spot.numbers(&spot.cotangent_rows(0, &places)?);
            Ok(oracle::backward(inputs, one, options, &dg))
        };
        let shares = owned.iter().any(|rows| *rows < d.rows);
        let rows: BTreeSet<usize> = match spot.backward() && shares {
            true => (0..d.rows).collect(),
            false => [0, d.rows / 2, d.rows - 1].into(),
        };
        let rows: Vec<usize> = rows.into_iter().collect();
        let found: Vec<[Vec<Bounded>; 4]> =
            rows.par_iter().map(|row| results(*row)).collect::<Result<_, _>>()?;
        if !spot.backward() {
            return Ok(());
        }
        for (i, count) in owned.into_iter().enumerate().filter(|(i, _)| d.length > 1 || i % 3 == 0)
        {
            if count == d.rows {
                for (row, of) in rows.iter().zip(&found) {
                    spot.compare_rows(i, &[*row], &of[i])?;
                }
            } else {
                let sum = |j: usize| kiln_ops::oracle::Number::sum(found.iter().map(|of| of[i][j]));
                let sums: Vec<Bounded> = (0..found[0][i].len()).map(sum).collect();
                spot.compare_rows(i, &[0], &sums)?;
            }
        }
        Ok(())
    }

    // One site has no couplings.
    fn may_be_empty(&self, input: usize) -> bool {
        input == 1 || input == 2
    }

    fn operations(&self, dims: &Dims) -> usize {
        dims["B"][0] * dims["N"][0]
    }

    fn fit(&self, dims: &mut Dims) {
        let rows = dims["B"][0];
        for name in ["Bb", "Bc", "Bz"] {
            let shared = dims[name][0].is_multiple_of(2);
            dims.insert(name, vec![if shared { 1 } else { rows }]);
        }
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let case = case.with("mode", super::pick(&mut number, &["full", "causal"]));
        match super::pick(&mut number, &[0, 1, 2]) {
            0 => case.with("max_abs", super::pick(&mut number, &[0.4, 2.0])),
            _ => case,
        }
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        let rows = dims["B"].clone();
        let alike = ["Bb", "Bc", "Bz"].into_iter().filter(|name| dims[name] == rows);
        for name in alike.collect::<Vec<_>>() {
            replace(dims, name, 2);
        }
        replace(dims, "B", 2);
        // Several blocks where there are several, and where those are more than one cube takes, several of theirs.
        let length = match dims["N"][0] {
            length if length > 1 << 19 => 40_000,
            length => length.min(5000),
        };
        vec![replace(dims, "N", length)]
    }

    // Which parts of complex numbers are infinite, or no numbers, hangs on how products are made. A real z may be an
    // eigenvalue, or as near to one as to have no bound.
    fn leaves_out(&self, holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        let real =
            holder == Holder::Input("z") && matches!(special, Special::Zeros | Special::Subnormals);
        undefined(real || !special.finite())
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &[]
    }

    fn cases(&self) -> Vec<Case> {
        let case = |rows: usize, length: usize, [b, c, z]: [usize; 3]| {
            Case::new([&[rows, length], &[b, length - 1], &[c, length - 1], &[z, 2]])
        };
        vec![
            case(1, 2, [1; 3]),
            case(3, 7, [3, 1, 3]),
            case(2, 8, [1, 2, 1]).with("mode", "causal"),
            case(70, 65, [1, 1, 70]),
            case(5, 129, [5; 3]).with("max_abs", 0.3),
            case(2, 1009, [2, 1, 1]).with("mode", "causal").with("max_abs", 0.5),
            case(2, 5003, [2, 2, 1]),
            case(1, 8501, [1; 3]),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let case = |[rows, length]: [usize; 2]| {
            Case::new([&[rows, length], &[rows, length - 1], &[rows, length - 1], &[1, 2]])
        };
        let sizes = match scale {
            Scale::Small => vec![[16, 256]],
            Scale::Train => vec![[16, 4096]],
            Scale::Large => vec![[256, 4096], [64, 131_072]],
            Scale::Thin => vec![],
            Scale::Lengths => (10..=20).map(|power| [16, 1 << power]).collect(),
        };
        sizes.into_iter().map(case).collect()
    }

    fn stressed(&self) -> Option<Case> {
        self.shapes(Scale::Large).pop()
    }

    fn times_reference(&self, case: &Case, _: bool) -> bool {
        // A dozen products of all matrices for each doubling.
        case.shapes[0][1] < 1024
    }

    fn work(&self, case: &Case, _dtype: DType) -> (Work, Work) {
        let sites = elements(case, 0);
        let inputs = 4.0 * (0..4).map(|i| elements(case, i)).sum::<f64>();
        (
            Work { bytes: inputs + 8.0 * sites, flops: 60.0 * sites },
            Work { bytes: 2.0 * inputs + 8.0 * sites, flops: 120.0 * sites },
        )
    }
}

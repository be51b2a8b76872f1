//! matmul, in the four storage orders of its operands.

use super::elements;
use crate::attributes::{Attribute, Kind};
use crate::host::{BoundedTensor, Input};
use crate::operator::*;
use crate::spot::{Product, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::matmul::oracle;
use kiln_ops::matmul::{MatmulOptions, matmul};

/// One storage order: a `t` for each operand that is transposed.
pub(crate) struct Row {
    spec: &'static Spec,
    a: bool,
    b: bool,
}

const fn input(name: &'static str, shape: &'static [&'static str]) -> InputSpec {
    InputSpec { name, shape, holds: Holds::Float, mean: 0.1, fan_in: None }
}

const fn spec(name: &'static str, formula: &'static str, inputs: &'static [InputSpec]) -> Spec {
    Spec {
        name,
        formula,
        inputs,
        attributes: &[Attribute { name: "alpha", default: "1", kind: Kind::Number }],
        outputs: &[OutputSpec {
            name: "y",
            shape: &["...", "M", "N"],
            f32: false,
            constant: false,
        }],
        differentiable: true,
        kernel: true,
    }
}

const A: InputSpec = input("a", &["...", "M", "K"]);
const AT: InputSpec = input("a", &["...", "K", "M"]);
const B: InputSpec = input("b", &["...", "K", "N"]);
const BT: InputSpec = input("b", &["...", "N", "K"]);

static NN_SPEC: Spec = spec("matmul", "y = alpha · a·b", &[A, B]);
static NT_SPEC: Spec = spec("matmul_nt", "y = alpha · a·bᵀ", &[A, BT]);
static TN_SPEC: Spec = spec("matmul_tn", "y = alpha · aᵀ·b", &[AT, B]);
static TT_SPEC: Spec = spec("matmul_tt", "y = alpha · aᵀ·bᵀ", &[AT, BT]);

const THIN: [[usize; 3]; 7] = [
    [1, 8192, 8192],
    [8, 8192, 8192],
    [16, 8192, 8192],
    [64, 8192, 8192],
    [8192, 8192, 64],
    [16_384, 8192, 24],
    [16_384, 8192, 80],
];
const THIN_NT: [[usize; 3]; 6] = [
    [1, 8192, 8192],
    [8, 8192, 8192],
    [16, 8192, 8192],
    [64, 8192, 8192],
    [16_384, 24, 8192],
    [16_384, 80, 8192],
];
const THIN_TN: [[usize; 3]; 2] = [[8192, 16_384, 24], [8192, 16_384, 80]];

pub(crate) const NN: Row = Row { spec: &NN_SPEC, a: false, b: false };
pub(crate) const NT: Row = Row { spec: &NT_SPEC, a: false, b: true };
pub(crate) const TN: Row = Row { spec: &TN_SPEC, a: true, b: false };
pub(crate) const TT: Row = Row { spec: &TT_SPEC, a: true, b: true };

/// [batches, rows, cols] of a stack.
pub(super) fn stack(shape: &[usize]) -> [usize; 3] {
    let last = shape.len() - 2;
    [shape[..last].iter().product(), shape[last], shape[last + 1]]
}

fn device(call: &Call<'_>, input: usize, transposed: bool) -> Tensor<3> {
    let tensor = call.shaped(input, stack(call.inputs[input].shape()));
    if transposed { tensor.swap_dims(1, 2) } else { tensor }
}

/// The matrices of a stack, transposed.
pub(super) fn transpose(tensor: &BoundedTensor) -> BoundedTensor {
    let [batches, rows, cols] = stack(&tensor.shape);
    let mut values = Vec::with_capacity(tensor.values.len());
    for z in 0..batches {
        for j in 0..cols {
            values.extend((0..rows).map(|i| tensor.values[(z * rows + i) * cols + j].transposed()));
        }
    }
    let mut shape = tensor.shape.clone();
    let last = shape.len() - 2;
    shape.swap(last, last + 1);
    BoundedTensor::new(shape, values)
}

fn transposed_if(tensor: BoundedTensor, transposed: bool) -> BoundedTensor {
    if transposed { transpose(&tensor) } else { tensor }
}

impl Row {
    fn host(&self, call: &HostCall<'_>) -> [BoundedTensor; 2] {
        let [a, b] = [0, 1].map(|i| call.inputs[i].clone());
        [transposed_if(a, self.a), transposed_if(b, self.b)]
    }

    /// [batches, M, K, N].
    fn sizes(&self, shapes: [&[usize]; 2]) -> [usize; 4] {
        let ([batches, a0, a1], [_, b0, b1]) = (stack(shapes[0]), stack(shapes[1]));
        let (m, k) = if self.a { (a1, a0) } else { (a0, a1) };
        [batches, m, k, if self.b { b0 } else { b1 }]
    }

    fn case(&self, leading: &[usize], [m, k, n]: [usize; 3]) -> Case {
        let shape = |rows, cols, transposed| {
            let matrix = if transposed { [cols, rows] } else { [rows, cols] };
            [leading, &matrix].concat()
        };
        Case::new([shape(m, k, self.a).as_slice(), shape(k, n, self.b).as_slice()])
    }
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        self.spec
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    fn tf32_reference(&self) -> bool {
        true
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let options =
            MatmulOptions { alpha: call.attributes.number("alpha"), ..MatmulOptions::default() };
        let y = matmul(device(call, 0, self.a), device(call, 1, self.b), options)?;
        Ok(vec![y.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let (a, b) = (device(call, 0, self.a), device(call, 1, self.b));
        let dy = dy[0].clone().reshape([a.dims()[0], a.dims()[1], b.dims()[2]]);
        let alpha = call.attributes.number("alpha");
        let (da, db) = kiln_ops::matmul::backend::backward(dy, a, b, alpha);
        Some([da, db].map(|t| t.flatten(0, 1)).into())
    }

    /// They are of the operands: of one that is transposed, as it is stored.
    fn gradients(
        &self,
        call: &Call<'_>,
        _dy: &[Tensor<1>],
        kernels: Vec<Tensor<2>>,
    ) -> Vec<Tensor<1>> {
        let transposed = [self.a, self.b].into_iter().zip(call.inputs);
        let as_stored =
            |(gradient, (transposed, input)): (Tensor<2>, (bool, &Input))| -> Tensor<1> {
                if !transposed {
                    return gradient.flatten(0, 1);
                }
                let [batches, rows, cols] = stack(input.shape());
                let gradient: Tensor<3> = gradient.reshape([batches, cols, rows]);
                gradient.swap_dims(1, 2).flatten(0, 2)
            };
        kernels.into_iter().zip(transposed).map(as_stored).collect()
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [a, b] = self.host(call);
        let sizes = self.sizes([&call.inputs[0].shape, &call.inputs[1].shape]);
        let y = oracle::forward(&a.values, &b.values, sizes, call.attributes.number("alpha"));
        let mut shape = a.shape.clone();
        *shape.last_mut().expect("rank 2 or more") = sizes[3];
        vec![BoundedTensor::new(shape, y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [a, b] = self.host(call);
        let sizes = self.sizes([&call.inputs[0].shape, &call.inputs[1].shape]);
        let alpha = call.attributes.number("alpha");
        let (da, db) = oracle::backward(&a.values, &b.values, sizes, alpha, &dy[0].values);
        let [da, db] =
            [(da, a.shape), (db, b.shape)].map(|(d, shape)| BoundedTensor::new(shape, d));
        vec![transposed_if(da, self.a), transposed_if(db, self.b)]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let alpha = spot.call.attributes.number("alpha");
        let (a, b) = (spot.input(0)?, spot.input(1)?);
        let (a, b) = (a.stack().transposed_if(self.a), b.stack().transposed_if(self.b));
        let check = |result: usize, factors, transposed: bool| {
            let out = spot.result(result)?;
            let (terms, out) = (vec![factors], out.stack().transposed_if(transposed));
            Product { result, terms, out, alpha, lower: false }.check(spot)
        };
        if !spot.backward() {
            return check(0, [a, b], false);
        }
        let dy = spot.cotangent(0)?;
        let dy = dy.stack();
        check(0, [dy, b.transposed()], self.a)?;
        check(1, [a.transposed(), dy], self.b)
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        case.with("alpha", super::pick(&mut number, &[1.0, 0.3, -0.7, 0.0]))
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "M", "N"]
    }

    fn cases(&self) -> Vec<Case> {
        vec![
            self.case(&[], [1, 1, 1]),
            self.case(&[], [7, 5, 3]),
            self.case(&[], [130, 70, 257]).with("alpha", 0.3),
            // Whole tiles, whole vectors.
            self.case(&[], [128, 192, 256]),
            self.case(&[2, 3], [33, 17, 65]),
            self.case(&[3], [40, 96, 136]),
            // K long and few tiles: in parts.
            self.case(&[], [16, 2056, 24]).with("alpha", -0.7),
            // The same with one thin side.
            self.case(&[], [8, 2056, 264]),
            // One thin side, for plain units and for tensor cores.
            self.case(&[], [5, 520, 264]),
            self.case(&[], [264, 520, 24]).with("alpha", 0.3),
            // Thin, and tiles enough for a large GPU.
            self.case(&[26], [33, 136, 136]),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let sizes: &[[usize; 3]] = match scale {
            Scale::Small => &[[64, 64, 64], [128, 128, 128], [256, 256, 256]],
            // The products of a 124M model: attention, its output, the MLP, the head.
            Scale::Train => &[
                [32_768, 768, 768],
                [32_768, 768, 2304],
                [32_768, 768, 4096],
                [32_768, 2048, 768],
                [32_768, 768, 50_304],
                [8192, 768, 768],
                [8192, 768, 2304],
                [8192, 768, 4096],
                [8192, 2048, 768],
                [8192, 768, 50_304],
            ],
            Scale::Large => &[[2048; 3], [4096; 3], [8192; 3]],
            Scale::Lengths => &[],
            Scale::Thin => match (self.a, self.b) {
                // Decoding, and a weight of few columns as hyper-connections have it.
                (false, false) => &THIN,
                // Decoding with a weight that is stored transposed; dX of the few columns.
                (false, true) => &THIN_NT,
                // dW of the few columns.
                (true, false) => &THIN_TN,
                (true, true) => return vec![],
            },
        };
        let turn = |[m, k, n]: [usize; 3]| match (scale, self.a, self.b) {
            // The gradients of those: dX = dY·Wᵀ and dW = Xᵀ·dY.
            (Scale::Train, false, true) => [m, n, k],
            (Scale::Train, true, false) => [k, m, n],
            _ => [m, k, n],
        };
        sizes.iter().map(|size| self.case(&[], turn(*size))).collect()
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let [batches, m, k, n] = self.sizes([&case.shapes[0], &case.shapes[1]]);
        let [a, b] = [elements(case, 0), elements(case, 1)];
        let y = (batches * m * n) as f64;
        let (size, flops) = (dtype.size() as f64, 2.0 * y * k as f64);
        (
            Work { bytes: (a + b + y) * size, flops },
            Work { bytes: (2.0 * (a + b) + y) * size, flops: 2.0 * flops },
        )
    }
}

//! matmul_add, with operands and C that are broadcast.

use crate::attributes::{Attribute, Kind};
use crate::host::{BoundedTensor, HostTensor};
use crate::operator::*;
use burn::tensor::DType;
use kiln_ops::OpError;
use kiln_ops::matmul::{MatmulOptions, matmul_add};
use kiln_ops::oracle::{Bounded, Number};

pub(crate) struct Row;

const fn input(name: &'static str, shape: &'static [&'static str]) -> InputSpec {
    InputSpec { name, shape, holds: Holds::Float, mean: 0.1, fan_in: None }
}

/// What has a name of its own beside P, Q, M or N is that, or 1.
const SPEC: Spec = Spec {
    name: "matmul_add",
    formula: "y = alpha · a·b + beta · c; Qa is Q or 1, Pb is P or 1, and c has P, Q, M, N or 1 each",
    inputs: &[
        input("a", &["P", "Qa", "M", "K"]),
        input("b", &["Pb", "Q", "K", "N"]),
        input("c", &["Pc", "Qc", "Mc", "Nc"]),
    ],
    attributes: &[
        Attribute { name: "alpha", default: "1", kind: Kind::Number },
        Attribute { name: "beta", default: "1", kind: Kind::Number },
    ],
    outputs: &[OutputSpec { name: "y", shape: &["P", "Q", "M", "N"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

/// Sizes that may be 1 instead, and what they are otherwise.
const SHARED: [(&str, &str); 6] =
    [("Qa", "Q"), ("Pb", "P"), ("Pc", "P"), ("Qc", "Q"), ("Mc", "M"), ("Nc", "N")];

/// Shapes of a call.
struct Sizes {
    /// Of the stack of results.
    stack: [usize; 2],
    /// M, K and N.
    matrix: [usize; 3],
    /// Of the stacks of a and b.
    stacks: [[usize; 2]; 2],
    c: [usize; 4],
}

impl Sizes {
    fn new(call: &HostCall<'_>) -> Self {
        let shape = |i: usize| -> [usize; 4] {
            call.inputs[i].shape.as_slice().try_into().expect("the rank was checked")
        };
        let [[p, qa, m, k], [pb, q, _, n], c] = [0, 1, 2].map(shape);
        Self { stack: [p, q], matrix: [m, k, n], stacks: [[p, qa], [pb, q]], c }
    }

    /// Places in the stack of results.
    fn places(&self) -> impl Iterator<Item = [usize; 2]> + use<> {
        let [p, q] = self.stack;
        (0..p).flat_map(move |p| (0..q).map(move |q| [p, q]))
    }

    /// The number of the matrix of an operand that is read there.
    fn of_operand(&self, operand: usize, place: [usize; 2]) -> usize {
        flat(&place, &self.stacks[operand])
    }
}

/// The row-major index of a place in what is 1 where it is broadcast.
fn flat(place: &[usize], shape: &[usize]) -> usize {
    let within = place.iter().zip(shape).map(|(at, size)| if *size == 1 { 0 } else { *at });
    within.zip(shape).fold(0, |index, (at, size)| index * size + at)
}

/// A matrix of a stack.
fn matrix(tensor: &BoundedTensor, number: usize, size: usize) -> &[Bounded] {
    &tensor.values[number * size..][..size]
}

fn times(x: Bounded, factor: f64) -> Bounded {
    // What f32 makes of it, as kernels do.
    if factor == 1.0 { x } else { x * f64::from(factor as f32) }
}

/// The gradient of an operand of matrices of so many elements: for each of them the sum of what those products give it that
/// read it.
fn summed(shares: Vec<Vec<Vec<Bounded>>>, elements: usize, alpha: f64) -> Vec<Bounded> {
    let one = |shares: Vec<Vec<Bounded>>| -> Vec<Bounded> {
        let sum = |i: usize| Bounded::sum(shares.iter().map(|share| times(share[i], alpha)));
        (0..elements).map(|i| sum(i).stored()).collect()
    };
    shares.into_iter().flat_map(one).collect()
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    fn tf32_reference(&self) -> bool {
        true
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let [alpha, beta] = ["alpha", "beta"].map(|name| call.attributes.number(name));
        let options = MatmulOptions { alpha, beta, ..MatmulOptions::default() };
        let [a, b, c] = [0, 1, 2].map(|i| call.float::<4>(i));
        Ok(vec![matmul_add(a, b, c, options)?.into()])
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [a, b, c] = call.inputs else { unreachable!("three inputs") };
        let [alpha, beta] = ["alpha", "beta"].map(|name| call.attributes.number(name));
        let sizes = Sizes::new(call);
        let ([p, q], [m, k, n]) = (sizes.stack, sizes.matrix);
        let mut y = vec![];
        for place in sizes.places() {
            let left = matrix(a, sizes.of_operand(0, place), m * k);
            let right = matrix(b, sizes.of_operand(1, place), k * n);
            let product = Bounded::product(left, right, [m, k, n], [false; 2]);
            for (i, product) in product.into_iter().enumerate() {
                let at = flat(&[place[0], place[1], i / n, i % n], &sizes.c);
                y.push((times(product, alpha) + times(c.values[at], beta)).stored());
            }
        }
        vec![BoundedTensor::new([p, q, m, n], y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [a, b, c] = call.inputs else { unreachable!("three inputs") };
        let [alpha, beta] = ["alpha", "beta"].map(|name| call.attributes.number(name));
        let sizes = Sizes::new(call);
        let ([p, _], [m, k, n]) = (sizes.stack, sizes.matrix);
        let count = |stack: [usize; 2]| stack.iter().product::<usize>();
        let mut of_a = vec![vec![]; count(sizes.stacks[0])];
        let mut of_b = vec![vec![]; count(sizes.stacks[1])];
        let mut of_c = vec![vec![]; c.values.len()];
        // One b for a stack: a sum over the stack is one product over all its rows.
        let together = p > 1 && sizes.stacks[1] == [1, 1];
        if together {
            of_b[0].push(Bounded::product(&a.values, &dy[0].values, [k, p * m, n], [true, false]));
        }
        for (z, place) in sizes.places().enumerate() {
            let [left, right] = [0, 1].map(|operand| sizes.of_operand(operand, place));
            let dy = matrix(&dy[0], z, m * n);
            let b = matrix(b, right, k * n);
            of_a[left].push(Bounded::product(dy, b, [m, n, k], [false, true]));
            if !together {
                let a = matrix(a, left, m * k);
                of_b[right].push(Bounded::product(a, dy, [k, m, n], [true, false]));
            }
            for (i, dy) in dy.iter().enumerate() {
                let at = flat(&[place[0], place[1], i / n, i % n], &sizes.c);
                of_c[at].push(times(*dy, beta));
            }
        }
        let of_c = of_c.into_iter().map(|terms| Bounded::sum(terms).stored()).collect();
        let gradients = [summed(of_a, m * k, alpha), summed(of_b, k * n, alpha), of_c];
        let pairs = gradients.into_iter().zip(call.inputs);
        pairs.map(|(of, input)| BoundedTensor::new(input.shape.clone(), of)).collect()
    }

    fn refuse(&self, inputs: &[HostTensor]) -> Result<(), String> {
        let dims =
            SPEC.dims(&inputs.iter().map(|input| input.shape.clone()).collect::<Vec<_>>())?;
        for (name, of) in SHARED {
            let (size, whole) = (dims[name][0], dims[of][0]);
            if size != 1 && size != whole {
                let input = SPEC.inputs.iter().find(|input| input.shape.contains(&name));
                let input = input.map_or("", |input| input.name);
                return Err(format!(
                    "{}: `{input}` has {name} = {size}, expected {of} = {whole} or 1",
                    SPEC.name
                ));
            }
        }
        Ok(())
    }

    // Of what is broadcast the products are summed up by Burn, and dC is. The rows of matmul see what kernels write.
    fn by_burn(&self) -> &'static [&'static str] {
        &["a", "b", "c"]
    }

    fn operations(&self, dims: &Dims) -> usize {
        ["P", "Q", "M", "K", "N"].map(|name| dims[name][0]).iter().product()
    }

    fn fit(&self, dims: &mut Dims) {
        for name in ["P", "Q"] {
            dims.entry(name).and_modify(|sizes| sizes[0] = sizes[0] % 3 + 1);
        }
        for (name, of) in SHARED {
            let size = if dims[name][0].is_multiple_of(2) { 1 } else { dims[of][0] };
            dims.insert(name, vec![size]);
        }
    }

    fn zero(&self, dims: &mut Dims, dim: &'static str) {
        dims.insert(dim, vec![0]);
        for (name, _) in SHARED.into_iter().filter(|(_, of)| *of == dim) {
            dims.entry(name).and_modify(|sizes| sizes[0] = if sizes[0] == 1 { 1 } else { 0 });
        }
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let alpha = super::pick(&mut number, &[1.0, 0.3, -0.7, 0.0]);
        let beta = super::pick(&mut number, &[1.0, 0.5, -2.0, 0.0]);
        case.with("alpha", alpha).with("beta", beta)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["P", "Q", "M", "N"]
    }

    fn cases(&self) -> Vec<Case> {
        let case = |[p, q]: [usize; 2], [m, k, n]: [usize; 3], shared: &[&str]| {
            let of = |name: &str, size: usize| if shared.contains(&name) { 1 } else { size };
            let c = [of("Pc", p), of("Qc", q), of("Mc", m), of("Nc", n)];
            Case::new([&[p, of("Qa", q), m, k], &[of("Pb", p), q, k, n], &c])
        };
        vec![
            case([1, 1], [1, 1, 1], &[]),
            // A bias, a number for each row, one for all.
            case([1, 1], [7, 5, 3], &["Mc"]).with("alpha", -0.7),
            case([1, 1], [130, 70, 257], &["Nc"]).with("alpha", 0.3).with("beta", -2),
            case([2, 1], [17, 9, 33], &["Pc", "Mc", "Nc"]).with("beta", 0.5),
            // Whole tiles, whole vectors.
            case([1, 1], [128, 192, 256], &[]),
            // Stacks beside one another.
            case([2, 3], [33, 17, 65], &["Qa", "Pb"]).with("beta", 0.5),
            case([3, 2], [12, 16, 40], &["Qa", "Pc", "Mc"]),
            // One weight for a stack, and several. The second is the largest small case, which may be without stacks or rows.
            case([3, 1], [40, 96, 136], &["Pb", "Pc", "Mc"]),
            case([3, 2], [48, 16, 24], &["Pb", "Pc", "Mc"]),
            // K long and few tiles: in parts. The same with a thin side.
            case([1, 1], [16, 2056, 24], &[]).with("beta", -2),
            case([1, 1], [8, 2056, 264], &[]),
            case([1, 1], [264, 520, 24], &["Mc"]).with("alpha", 0.3),
        ]
    }

    // A product with C is timed within what it is a part of.
    fn shapes(&self, _scale: Scale) -> Vec<Case> {
        vec![]
    }

    fn stressed(&self) -> Option<Case> {
        Some(Case::new([&[1, 1, 4096, 768], &[1, 1, 768, 3072], &[1, 1, 4096, 3072]]))
    }

    fn work(&self, _case: &Case, _dtype: DType) -> (Work, Work) {
        Default::default()
    }
}

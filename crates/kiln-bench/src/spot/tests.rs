//! Right products pass, whatever the signs; one lost part of one tile does not.

use super::blocks;
use super::products::{Product, Single};
use super::stored::{Stack, Stored};
use super::{Spot, sample};
use crate::host::{HostTensor, Input, Layout};
use crate::registry::{self, Call, Case};
use burn::tensor::{DType, Tensor, TensorData};
use kiln_ops::oracle::{Format, Number, Path, Products, Rounding};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

const SIDE: usize = 256;
const LONG: usize = 8192;
const TENSOR_CORES: Rounding =
    Rounding { format: Format::Bf16, path: Path::Fused, products: Products::TensorCores };

/// A matrix in bf16, and its numbers.
struct Operand {
    stored: Stored,
    values: Vec<f64>,
}

fn stored(values: &[f64], shape: [usize; 2], dtype: DType) -> Stored {
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
    Stored::new(data, &shape).unwrap()
}

fn operand(shape: [usize; 2], rng: &mut ChaCha8Rng) -> Operand {
    let values = HostTensor::normal(&shape, 0.1, rng).rounded(DType::BF16).values;
    Operand { stored: stored(&values, shape, DType::BF16), values }
}

/// A, B and A·B, of a long K as the largest shapes that are timed have it.
struct Long {
    a: Operand,
    b: Operand,
    c: Vec<f64>,
}

impl Long {
    fn new() -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (a, b) = (operand([SIDE, LONG], &mut rng), operand([LONG, SIDE], &mut rng));
        let c = f64::product(&a.values, &b.values, [SIDE, LONG, SIDE], [false; 2]);
        Self { a, b, c }
    }

    /// What the blocks say of a result that is stored in bf16.
    fn blocks(&self, c: &[f64], seed: u64) -> Result<(), String> {
        let out = stored(c, [SIDE, SIDE], DType::BF16);
        let product = single(self.a.stored.stack(), self.b.stored.stack(), out.stack(), false);
        blocks::check(&product, TENSOR_CORES, &mut ChaCha8Rng::seed_from_u64(seed))
    }

    /// The same with rows and columns.
    fn all(&self, c: &[f64], seed: u64) -> Result<(), String> {
        let out = stored(c, [SIDE, SIDE], DType::BF16);
        let product = single(self.a.stored.stack(), self.b.stored.stack(), out.stack(), false);
        product.check(1 << 20, TENSOR_CORES, &mut ChaCha8Rng::seed_from_u64(seed))
    }

    /// The result with the elements of a tile replaced.
    fn with_tile(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        of: impl Fn(usize, usize) -> f64,
    ) -> Vec<f64> {
        let mut c = self.c.clone();
        for i in rows {
            for j in columns.clone() {
                c[i * SIDE + j] = of(i, j);
            }
        }
        c
    }
}

fn single<'a>(a: Stack<'a>, b: Stack<'a>, out: Stack<'a>, lower: bool) -> Single<'a> {
    Single { terms: vec![[a.matrix(0), b.matrix(0)]], out: out.matrix(0), alpha: 1.0, lower }
}

#[test]
fn a_right_product_passes_with_all_signs() {
    let long = Long::new();
    for seed in 0..24 {
        assert_eq!(long.blocks(&long.c, seed), Ok(()), "seed {seed}");
    }
    for seed in 0..3 {
        assert_eq!(long.all(&long.c, seed), Ok(()), "seed {seed}");
    }
}

/// The tile is the smallest there is, 128 rows of 64 columns.
#[test]
fn one_lost_step_of_64_in_one_tile_is_convicted() {
    let long = Long::new();
    let (a, b) = (&long.a.values, &long.b.values);
    let lost = |i: usize, j: usize| {
        let terms = (4096..4160).map(|k| a[i * LONG + k] * b[k * SIDE + j]);
        long.c[i * SIDE + j] - terms.sum::<f64>()
    };
    let wrong = long.with_tile(128..256, 64..128, lost);
    for seed in 0..24 {
        let error = long.blocks(&wrong, seed).unwrap_err();
        assert!(error.contains("columns 64 to 127"), "seed {seed}: {error}");
    }
    assert!(long.all(&wrong, 0).is_err());
}

#[test]
fn wrong_tiles_and_wrong_sizes_are_convicted() {
    let long = Long::new();
    let lost = long.with_tile(0..128, 128..192, |_, _| 0.0);
    let neighbour = long.with_tile(0..128, 128..192, |i, j| long.c[i * SIDE + j + 64]);
    for wrong in [lost, neighbour] {
        for seed in 0..8 {
            let error = long.blocks(&wrong, seed).unwrap_err();
            assert!(error.contains("columns 128 to 191"), "seed {seed}: {error}");
        }
    }
    let large: Vec<f64> = long.c.iter().map(|c| c * 1.02).collect();
    for seed in 0..3 {
        assert!(long.all(&large, seed).is_err(), "seed {seed}: 2 % too large");
    }
    for number in [f64::NAN, f64::INFINITY] {
        let wrong = long.with_tile(7..8, 9..10, |_, _| number);
        assert!(long.blocks(&wrong, 0).is_err() && long.all(&wrong, 0).is_err(), "{number}");
    }
}

/// tril(X·Yᵀ) of lower triangles is what the gradients of a triangular product are.
#[test]
fn triangles_are_lower_and_have_zeros_above() {
    const N: usize = 150;
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (x, y) = (operand([N, N], &mut rng), operand([N, N], &mut rng));
    let tril = |m: &[f64]| -> Vec<f64> {
        (0..N * N).map(|at| if at % N > at / N { 0.0 } else { m[at] }).collect()
    };
    let right = f64::product(&tril(&x.values), &tril(&y.values), [N; 3], [false, true]);
    let right = tril(&right);
    let check = |c: &[f64]| {
        let out = stored(c, [N, N], DType::BF16);
        let (x, y) = (x.stored.stack().lower(), y.stored.stack().lower().transposed());
        let product = single(x, y, out.stack(), true);
        blocks::check(&product, TENSOR_CORES, &mut ChaCha8Rng::seed_from_u64(4))
    };
    assert_eq!(check(&right), Ok(()));
    for (wrong, to) in [(3 * N + 4, 1e-3), (5 * N + 140, 1e-3), (140 * N + 2, 1e3)] {
        let mut c = right.clone();
        c[wrong] = to;
        assert!(check(&c).is_err(), "element {wrong}");
    }
    let mut lost = right.clone();
    for i in 64..128 {
        lost[i * N + 64..i * N + 128].fill(0.0);
    }
    assert!(check(&lost).is_err(), "a block of the diagonal");
}

/// Of f32 the bounds are so narrow that one term shows.
#[test]
fn one_lost_term_of_f32_is_convicted() {
    let [m, k, n] = [70, 300, 90];
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (a, b) = (operand([m, k], &mut rng), operand([k, n], &mut rng));
    let mut c = f64::product(&a.values, &b.values, [m, k, n], [false; 2]);
    let rounding = Rounding::fused(Format::F32);
    let check = |c: &[f64]| {
        let out = stored(c, [m, n], DType::F32);
        let product = single(a.stored.stack(), b.stored.stack(), out.stack(), false);
        blocks::check(&product, rounding, &mut ChaCha8Rng::seed_from_u64(6))
    };
    assert_eq!(check(&c), Ok(()));
    let terms = (0..k).map(|x| a.values[69 * k + x] * b.values[x * n + 89]);
    c[69 * n + 89] -= terms.fold(0.0, f64::max);
    let error = check(&c).unwrap_err();
    assert!(error.contains("rows 64 to 69, columns 64 to 89"), "{error}");
}

/// The sum of two products that are stored before.
#[test]
fn a_sum_of_products_loses_none() {
    let [n, k] = [128, 512];
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let (a, b) = (operand([n, k], &mut rng), operand([k, n], &mut rng));
    let (c, d) = (operand([n, k], &mut rng), operand([k, n], &mut rng));
    let of = |a: &Operand, b: &Operand| -> Vec<f64> {
        let product = f64::product(&a.values, &b.values, [n, k, n], [false; 2]);
        product.into_iter().map(|x| Format::Bf16.round(x)).collect()
    };
    let (one, other) = (of(&a, &b), of(&c, &d));
    let sum: Vec<f64> = one.iter().zip(&other).map(|(one, other)| one + other).collect();
    for (result, right) in [(&sum, true), (&one, false)] {
        let out = stored(result, [n, n], DType::BF16);
        let product = Single {
            terms: [(&a, &b), (&c, &d)]
                .map(|(a, b)| [a, b].map(|of| of.stored.stack().matrix(0)))
                .into(),
            out: out.stack().matrix(0),
            alpha: 1.0,
            lower: false,
        };
        let checked = product.check(1 << 20, TENSOR_CORES, &mut rng);
        assert_eq!(checked.is_ok(), right, "{checked:?}");
    }
}

/// Transposed operands and results of a stack, in f32 on the CPU.
#[test]
fn a_stack_is_checked_matrix_by_matrix() {
    let device = kiln_ops::device::open("cpu").expect("the CPU is always there").device;
    let [z, m, k, n] = [3, 70, 40, 65];
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let hosts = [[z, k, m], [z, k, n]].map(|shape| HostTensor::normal(&shape, 0.1, &mut rng));
    let inputs: Vec<Input> = hosts
        .iter()
        .map(|host| Input::float(host, DType::F32, Layout::Allocated, false, &device))
        .collect();
    let op = registry::find("matmul_tn").unwrap();
    let case = Case::new([&[z, k, m], &[z, k, n]]);
    let attributes = case.attributes(op.spec()).unwrap();
    let call = Call { inputs: &inputs, attributes: &attributes };
    let y = op.run(&call).unwrap().remove(0).flat;
    let check = |y: Tensor<1>| {
        let call = Call { inputs: &inputs, attributes: &attributes };
        let results = [y];
        let rounding = Rounding::reference(Format::F32);
        let spot = Spot::new(op.spec(), call, &[], &results, rounding)?;
        let (a, b, out) = (spot.input(0)?, spot.input(1)?, spot.result(0)?);
        let terms = vec![[a.stack().transposed(), b.stack()]];
        let by_hand =
            Product { result: 0, terms, out: out.stack(), alpha: 1.0, lower: false }.check(&spot);
        assert_eq!(by_hand, op.spot(&spot));
        by_hand
    };
    assert_eq!(check(y.clone()), Ok(()));
    let scale = |i: usize| if i < 2 * m * n { 1.0 } else { 1.02 };
    let scales: Vec<f32> = (0..z * m * n).map(scale).collect();
    let error = check(y * Tensor::<1>::from_data(scales.as_slice(), &device)).unwrap_err();
    assert!(error.starts_with("`y` is ") && error.ends_with(", in matrix 2"), "{error}");
}

#[test]
fn samples_have_both_ends_and_every_part() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    assert_eq!(sample(0, 5, &mut rng), Vec::<usize>::new());
    assert_eq!(sample(1, 5, &mut rng), [0]);
    assert_eq!(sample(4, 9, &mut rng), [0, 1, 2, 3]);
    let chosen = sample(1000, 10, &mut rng);
    assert!(chosen.starts_with(&[0]) && chosen.ends_with(&[999]), "{chosen:?}");
    for part in 0..10 {
        assert!(chosen.iter().any(|i| i / 100 == part), "{chosen:?}");
    }
}

//! No time without a check of that very call.

use super::*;
use crate::gate::rounding;
use crate::operator::Spec;
use crate::registry::{self, Call, Dims, HostCall};
use crate::{host::BoundedTensor, spot::Spot};
use burn::tensor::Tensor;
use kiln_ops::OpError;

fn cpu() -> Device {
    device::open("cpu").expect("the CPU is always there").device
}

/// What every operator leaves at a size that is timed passes, each result 2 % larger does not.
#[test]
fn results_of_every_operator_are_checked() {
    let (device, reference) = (cpu(), Implementation::Reference);
    for op in registry::all() {
        let name = op.spec().name;
        for (pass, dtype) in [
            (Pass::Forward, DType::F32),
            (Pass::Backward, DType::F32),
            (Pass::Forward, DType::BF16),
            (Pass::Backward, DType::BF16),
        ] {
            let case = &op.shapes(Scale::Small)[0];
            // So many bytes that one set of inputs is enough.
            let workload = Workload::new(*op, case, dtype, &device, pass, 1e9).unwrap();
            let right = workload.results(reference).unwrap();
            let rounding = rounding(*op, dtype, &device, reference, None);
            let check = |results: &[Tensor<1>]| workload.check(reference, rounding, results);
            assert_eq!(check(&right), Ok(()), "{name} {case} {pass} {dtype:?}");
            if dtype == DType::BF16 {
                continue;
            }
            for i in 0..right.len() {
                let mut wrong = right.clone();
                wrong[i] = wrong[i].clone().mul_scalar(1.02);
                let error = check(&wrong).expect_err(name);
                assert!(error.contains(" off"), "{name} {pass}: {error}");
            }
        }
    }
}

/// A product that is right wherever the gate looks and 2 % off where it is timed.
struct OffWhereTimed(&'static dyn Operator);

/// No size of the gate's.
const SIDE: usize = 192;

impl Operator for OffWhereTimed {
    fn spec(&self) -> &'static Spec {
        self.0.spec()
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Tensor<1>>, OpError> {
        let timed = call.inputs.iter().all(|input| input.shape() == [SIDE, SIDE]);
        let off = |y: Tensor<1>| if timed { y.mul_scalar(1.02) } else { y };
        Ok(self.0.run(call)?.into_iter().map(off).collect())
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        self.0.oracle(call)
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        self.0.oracle_backward(call, dy)
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        self.0.spot(spot)
    }

    fn fit(&self, dims: &mut Dims) {
        self.0.fit(dims);
    }

    fn cases(&self) -> Vec<Case> {
        vec![Case::new([&[7, 5], &[5, 3]])]
    }

    fn shapes(&self, _: Scale) -> Vec<Case> {
        vec![Case::new([&[SIDE, SIDE], &[SIDE, SIDE]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        self.0.work(case, dtype)
    }
}

#[test]
fn a_call_that_is_wrong_gets_no_time() {
    let device = cpu();
    let right = registry::find("matmul").unwrap();
    let plan =
        Plan { scale: Scale::Small, dtype: DType::F32, rounds: 1, family: None, pass: None };
    let mut run = Run::new(&device, String::new());
    let error = bench(&OffWhereTimed(right), &plan, &device, &mut run, &mut |_| {}).unwrap_err();
    let expected = "matmul: what is timed is wrong, so no time (192×192, forward, reference: `y` is ";
    assert!(error.starts_with(expected) && error.ends_with(" times))"), "{error}");
    assert!(run.rows.is_empty(), "{:?}", run.rows);
}

/// Products lose tiles, and sampled rows may miss them.
#[test]
fn a_lost_block_of_products_is_convicted() {
    let (device, reference) = (cpu(), Implementation::Reference);
    let made_of_products = registry::all().iter().filter(|op| op.tiled());
    for op in made_of_products.chain([&registry::find("attention").unwrap()]) {
        for pass in [Pass::Forward, Pass::Backward] {
            let shapes = op.shapes(Scale::Small);
            let case = shapes.last().unwrap();
            let workload = Workload::new(*op, case, DType::F32, &device, pass, 1e9).unwrap();
            let right = workload.results(reference).unwrap();
            let rounding = rounding(*op, DType::F32, &device, reference, None);
            for (i, result) in right.iter().enumerate() {
                let name = format!("{} {case} {pass}, result {i}", op.spec().name);
                let n = result.dims()[0];
                if n == 1 {
                    continue; // a loss
                }
                // Every result has rows of the last dimension of one of these.
                let widths = [case.shapes[0].last(), case.shapes.get(1).and_then(|s| s.last())];
                let width = widths.into_iter().flatten().copied().max().unwrap_or(1);
                let inside = |at: usize| (64..128).contains(&(at / width)) && at % width < 32;
                let mask: Vec<f32> = (0..n).map(|at| if inside(at) { 0.0 } else { 1.0 }).collect();
                let mut wrong = right.clone();
                wrong[i] = result.clone() * Tensor::<1>::from_data(mask.as_slice(), &device);
                assert!(workload.check(reference, rounding, &wrong).is_err(), "{name}");
            }
        }
    }
}

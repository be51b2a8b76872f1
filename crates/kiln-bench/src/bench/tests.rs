//! No time without a check of that very call.

use super::workload::Results;
use super::*;
use crate::gate::rounding;
use crate::operator::Spec;
use crate::registry::{self, Call, Dims, HostCall, Output};
use crate::{host::BoundedTensor, spot::Spot};
use burn::tensor::Tensor;
use kiln_ops::{OpError, device};

fn cpu() -> Device {
    device::open("cpu").expect("the CPU is always there").device
}

/// Calls `check` with what every pass of an operator leaves of a case, and with what judges it.
fn each_pass(
    op: &dyn Operator,
    case: &Case,
    dtype: DType,
    check: impl Fn(&str, Results, &dyn Fn(&Results) -> Result<(), String>),
) {
    let (device, reference) = (cpu(), Implementation::Reference);
    for (pass, _) in passes(op, case, dtype) {
        // So many bytes that one set of inputs is enough.
        let workload = Workload::new(op, case, dtype, &device, pass, 1e9, None).unwrap();
        workload.warm_up(reference).unwrap();
        let right = workload.results(reference).unwrap();
        let rounding = rounding(op, dtype, &device, reference, None);
        let judge = |results: &Results| workload.check(reference, rounding, results);
        check(&format!("{} {case} {pass} {dtype:?}", op.spec().name), right, &judge);
    }
}

/// The results of a pass, each of them with `wrong` done to it.
fn each_wrong(right: &Results, wrong: impl Fn(Tensor<1>) -> Option<Tensor<1>>) -> Vec<Results> {
    let mut all = vec![];
    for i in 0..right.outputs.len() + right.gradients.len() {
        let mut results = right.clone();
        let mut each = results.outputs.iter_mut().chain(&mut results.gradients);
        let result = each.nth(i).expect("there is one");
        if let Some(wrong) = wrong(result.clone()) {
            *result = wrong;
            all.push(results);
        }
    }
    all
}

/// What every operator that is timed leaves at such a size passes, each result 2 % larger does not.
#[test]
fn results_of_every_operator_are_checked() {
    for op in registry::all().iter().copied() {
        let shapes = op.shapes(Scale::Small);
        let Some(case) = shapes.first() else { continue };
        each_pass(op, case, DType::F32, |what, right, judge| {
            assert_eq!(judge(&right), Ok(()), "{what}");
            // The gradient of what there is not is empty.
            let larger = |x: Tensor<1>| (x.dims()[0] > 0).then(|| x.mul_scalar(1.02));
            for wrong in each_wrong(&right, larger) {
                let error = judge(&wrong).expect_err(what);
                assert!(error.contains(" off"), "{what}: {error}");
            }
        });
        each_pass(op, case, DType::BF16, |what, right, judge| {
            assert_eq!(judge(&right), Ok(()), "{what}");
        });
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

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let timed = call.inputs.iter().all(|input| input.shape() == [SIDE, SIDE]);
        let off =
            |y: Output| Output { flat: if timed { y.flat.mul_scalar(1.02) } else { y.flat }, ..y };
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

    fn vary(&self, case: Case, number: u64) -> Case {
        self.0.vary(case, number)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        self.0.may_be_zero()
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
    let plan = Plan {
        scale: Scale::Small,
        only: vec![],
        dtype: DType::F32,
        rounds: 1,
        family: None,
        pass: None,
        data: None,
    };
    let mut run = Run::new(&device, String::new());
    let op = OffWhereTimed(right);
    let verified = gate::verify(&op, DType::F32, &device, plan.gate());
    let error = bench(&op, &verified, &plan, &device, &mut run, &mut |_| {}).unwrap_err();
    let expected =
        "matmul: what is timed is wrong, so no time (192×192, forward, reference: `y` is ";
    assert!(error.starts_with(expected) && error.ends_with(" times))"), "{error}");
    assert!(run.rows.is_empty(), "{:?}", run.rows);

    // What was verified is what is timed, and all of it.
    let part = gate::verify(&op, DType::F32, &device, gate::Options { fuzz: 0, ..plan.gate() });
    let error = bench(&op, &part, &plan, &device, &mut run, &mut |_| {}).unwrap_err();
    let [some, all] = [0, plan.gate().fuzz].map(|fuzz| gate::cases(&op, DType::F32, fuzz, &device));
    assert!(some < all, "{some} of {all}");
    let found = format!("the gate verified {some} cases of matmul f32 (as it runs)");
    assert!(error.starts_with(&found), "{error}");
    assert!(error.contains(&format!(", expected {all} cases of matmul f32")), "{error}");
}

/// Products lose tiles, and the rows that are compared may miss them.
#[test]
fn a_lost_block_of_products_is_convicted() {
    let device = cpu();
    for op in registry::all().iter().copied().filter(|op| !op.families().is_empty()) {
        let shapes = op.shapes(Scale::Small);
        let Some(case) = shapes.last() else { continue };
        let matrices = case.shapes.iter().filter(|shape| shape.len() > 1);
        let width = matrices.filter_map(|shape| shape.last().copied()).max().unwrap_or(1);
        each_pass(op, case, DType::F32, |what, right, judge| {
            let lose = |result: Tensor<1>| {
                let n = result.dims()[0];
                let block = |at: usize| (64..128).contains(&(at / width)) && at % width < 32;
                // Of small results beside products some numbers.
                let part = |at: usize| (n / 2..n / 2 + n.div_ceil(16)).contains(&at);
                let lost = |at: usize| if n > 64 * width { block(at) } else { part(at) };
                let mask: Vec<f32> = (0..n).map(|at| if lost(at) { 0.0 } else { 1.0 }).collect();
                // A loss has no blocks.
                assert!(n <= 1 || mask.contains(&0.0), "{what}");
                (n > 1).then(|| result * Tensor::<1>::from_data(mask.as_slice(), &device))
            };
            for (i, wrong) in each_wrong(&right, lose).iter().enumerate() {
                assert!(judge(wrong).is_err(), "{what}, wrong result {i}");
            }
        });
    }
}

#[test]
fn cases_are_named_by_all_of_them_or_by_their_first_shape() {
    let of = |op: &str, scale, only: &str| {
        let op = registry::find(op).expect("it is there");
        let cases = cases_of(op, scale, &[only.to_string()]);
        cases.iter().map(Case::to_string).collect::<Vec<_>>()
    };
    assert_eq!(of("matmul_tn", Scale::Train, "8192×768")[..], ["8192×768"]);
    let several = of("matmul", Scale::Train, "8192×768");
    assert!(several.len() > 1 && several.iter().all(|case| case.starts_with("8192×768, ")));
    assert_eq!(of("matmul", Scale::Train, &several[1])[..], several[1..2]);
    let whole = "8×4096×4×2560, 24×10240 sinkhorn=20";
    for only in [whole, "8×4096×4×2560"] {
        assert_eq!(of("mhc_pre", Scale::Large, only)[..], [whole]);
    }
    assert!(of("mhc_pre", Scale::Large, "8×4096").is_empty());
}

/// What runs as no case of the gate does gets no time.
#[test]
fn kernels_that_nobody_verified_get_no_time() {
    let (op, device) = (registry::find("rms_norm").unwrap(), cpu());
    let plan = Plan {
        scale: Scale::Small,
        dtype: DType::F32,
        rounds: 1,
        family: None,
        only: vec![],
        pass: None,
        data: None,
    };
    let case = &plan.cases(op)[0];
    let mut gate = gate::verify(op, DType::F32, &device, gate::Options { fuzz: 0, ..plan.gate() });
    gate.plans.insert("a kernel: 7".into());
    let mut verified = Verified { gate: &gate, more: None };
    let mut expect = |of: &str| verified.expect(&[of.to_string()].into(), op, case, &plan, &device);
    assert_eq!(expect("a kernel: 7"), Ok(()));
    let error = expect("a kernel: 8").unwrap_err();
    assert!(error.contains("no case has verified how it runs (a kernel: 8)"), "{error}");
}

/// The small case of a timed shape runs as that shape does, and is right.
#[test]
#[cfg(feature = "cube")]
fn a_small_case_verifies_how_a_timed_one_runs() {
    let opened = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
    let Some(device) = opened.map(|opened| opened.device) else { return };
    for (name, scale) in [("gram", Scale::Small), ("cross_entropy", Scale::Small)] {
        let op = registry::find(name).unwrap();
        let case = op.shapes(scale).pop().unwrap();
        for (pass, work) in passes(op, &case, DType::F32) {
            let workload =
                Workload::new(op, &case, DType::F32, &device, pass, work.bytes, None).unwrap();
            let (audited, plans) = gate::plans(|| workload.audit(Implementation::Fused));
            audited.unwrap();
            let small = gate::verify_as(op, &case, DType::F32, &device, gate::Options::default());
            assert!(small.green(), "{name} {case}: {:?}", small.failures);
            let specialised = |plan: &String| plan.split("; ").next().unwrap().to_string();
            let ran: BTreeSet<String> = small.plans.iter().map(specialised).collect();
            let expected: BTreeSet<String> = plans.iter().map(specialised).collect();
            assert!(!plans.is_empty() && expected.is_subset(&ran), "{expected:?} {ran:?}");
        }
    }
}

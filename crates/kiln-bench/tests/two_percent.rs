//! The gate must convict a gradient that is 2 % off everywhere, each gradient of every operator by itself, in bf16: the bound
//! of a single element that has gone through several roundings is wider than that.

use burn::tensor::DType;
use kiln_bench::gate::{self, Check, Options, Report};
use kiln_bench::host::{BoundedTensor, HostTensor, Input};
use kiln_bench::registry::{self, Call, Case, Dims, HostCall, Operator, Output, Scale, Spec, Work};
use kiln_bench::special::{Holder, Special, Why};
use kiln_ops::{OpError, device};

/// An operator with a gradient that is too large by a factor.
struct Off {
    op: &'static dyn Operator,
    input: usize,
    factor: f64,
}

impl Operator for Off {
    fn spec(&self) -> &'static Spec {
        self.op.spec()
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let mut inputs = call.inputs.to_vec();
        if let Input::Float { rows, .. } = &mut inputs[self.input] {
            let value = rows.clone().detach();
            // Nothing, with a gradient.
            let none = (rows.clone() - value.clone()).mul_scalar(self.factor);
            *rows = value + none;
        }
        self.op.run(&Call { inputs: &inputs, attributes: call.attributes })
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        self.op.oracle(call)
    }

    fn oracle_backward(
        &self,
        call: &HostCall<'_>,
        cotangents: &[BoundedTensor],
    ) -> Vec<BoundedTensor> {
        self.op.oracle_backward(call, cotangents)
    }

    fn tf32_reference(&self) -> bool {
        self.op.tf32_reference()
    }

    fn by_burn(&self) -> &'static [&'static str] {
        self.op.by_burn()
    }

    fn fit(&self, dims: &mut Dims) {
        self.op.fit(dims);
    }

    fn vary(&self, case: Case, number: u64) -> Case {
        self.op.vary(case, number)
    }

    // An infinity less itself is no number.
    fn leaves_out(&self, holder: Holder, special: Special, dtype: DType) -> Option<Why> {
        let left_out = [Special::Infinities, Special::Masked].contains(&special);
        let why = left_out.then_some(Why::Operator);
        why.or(self.op.leaves_out(holder, special, dtype))
    }

    fn operations(&self, dims: &Dims) -> usize {
        self.op.operations(dims)
    }

    fn zero(&self, dims: &mut Dims, dim: &'static str) {
        self.op.zero(dims, dim);
    }

    fn may_be_empty(&self, input: usize) -> bool {
        self.op.may_be_empty(input)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        self.op.may_be_zero()
    }

    fn frozen(&self, inputs: &[HostTensor], input: usize, element: usize) -> bool {
        self.op.frozen(inputs, input, element)
    }

    fn cases(&self) -> Vec<Case> {
        let elements = |case: &Case| -> usize {
            case.shapes.iter().map(|shape| shape.iter().product::<usize>()).sum()
        };
        self.op.cases().into_iter().filter(|case| elements(case) < 40_000).collect()
    }

    fn shapes(&self, _: Scale) -> Vec<Case> {
        vec![]
    }

    fn work(&self, _: &Case, _: DType) -> (Work, Work) {
        Default::default()
    }
}

fn verify(op: &'static dyn Operator, input: usize, factor: f64) -> Report {
    let device = device::open("cpu").expect("the CPU is always there").device;
    let options = Options { seed: 5, fuzz: 0, family: None };
    gate::verify(&Off { op, input, factor }, DType::BF16, &device, options)
}

/// Every gradient of some operators.
fn convicts(ops: &[&'static dyn Operator]) {
    for op in ops {
        let name = op.spec().name;
        let floats = op.spec().inputs.iter().enumerate().filter(|(_, of)| !of.holds.integers());
        for (number, (input, of)) in floats.enumerate() {
            if number == 0 {
                let right = verify(*op, input, 1.0);
                assert!(right.green(), "{name}: {:?}", right.failures);
            }
            let off = verify(*op, input, 1.02);
            assert_eq!(off.failed(Check::Forward), 0, "{name}: {:?}", off.failures);
            let grad = format!("`grad.{}", of.name);
            let convicted = off.failures.iter().any(|(check, _, what)| {
                [Check::Gradients, Check::Bias].contains(check) && what.starts_with(&grad)
            });
            assert!(convicted, "{name}: a gradient of {} 2 % off got through", of.name);
        }
    }
}

#[test]
fn a_gradient_two_percent_off_is_convicted() {
    let ops = registry::all().iter().filter(|op| op.spec().differentiable);
    let ops: Vec<&'static dyn Operator> = ops.copied().collect();
    std::thread::scope(|scope| {
        // Neighbours are alike, so each has every other one.
        for first in 0..2 {
            let own: Vec<_> = ops.iter().skip(first).step_by(2).copied().collect();
            scope.spawn(move || convicts(&own));
        }
    });
}

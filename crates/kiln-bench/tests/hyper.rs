//! Hyper-connections through the gate as the first layer of a model and its head have them: streams that `mhc_pre` hands on,
//! whose gradient its own pass adds, and streams that only the head reads, so that they have no gradient of their own. (One stream
//! that stands for all, with which a model begins, is in the operator's tests.)

#![cfg(feature = "cube")]

use burn::tensor::DType;
use kiln_bench::attributes::Attributes;
use kiln_bench::gate::{self, Options};
use kiln_bench::host::BoundedTensor;
use kiln_bench::registry::{
    self, Call, Case, Dims, HostCall, Operator, Output, OutputSpec, Scale, Spec, Work,
};
use kiln_bench::special::{Holder, Special, Why};
use kiln_ops::mhc_post_pre::oracle::of_streams;
use kiln_ops::mhc_pre::oracle::{Inputs, over_tokens, tokens_backward};
use kiln_ops::mhc_pre::{MhcPreOptions, mhc_pre};
use kiln_ops::{OpError, device};
use std::sync::{Mutex, PoisonError};

/// Elements of x of the largest case, where a kernel has rings to go round and where none has.
const LARGE: usize = 200_000;
const SMALL: usize = 2000;

/// What an operator has to say of itself that the other says for it. What the kernels of a backward leave by themselves is not
/// part of it: those of the other have other cotangents.
macro_rules! as_the_other {
    () => {
        fn spec(&self) -> &'static Spec {
            self.spec
        }

        fn fit(&self, dims: &mut Dims) {
            self.of.fit(dims);
        }

        fn vary(&self, case: Case, number: u64) -> Case {
            self.of.vary(case, number)
        }

        fn leaves_out(&self, holder: Holder, special: Special, dtype: DType) -> Option<Why> {
            self.of.leaves_out(holder, special, dtype)
        }

        fn may_be_zero(&self) -> &'static [&'static str] {
            self.of.may_be_zero()
        }

        fn cases(&self) -> Vec<Case> {
            let elements = |case: &Case| case.shapes[0].iter().product::<usize>();
            self.of.cases().into_iter().filter(|case| elements(case) <= self.largest).collect()
        }

        fn shapes(&self, _: Scale) -> Vec<Case> {
            vec![]
        }

        fn work(&self, _: &Case, _: DType) -> (Work, Work) {
            Default::default()
        }
    };
}

/// The same of the outputs that are given.
fn spec(of: &'static dyn Operator, outputs: Vec<OutputSpec>) -> &'static Spec {
    let Spec { name, formula, inputs, attributes, .. } = *of.spec();
    let outputs = outputs.leak();
    let spec =
        Spec { name, formula, inputs, attributes, outputs, differentiable: true, kernel: true };
    Box::leak(Box::new(spec))
}

/// The outputs of an operator.
fn outputs(of: &dyn Operator) -> impl Iterator<Item = OutputSpec> {
    of.spec().outputs.iter().copied()
}

/// `mhc_pre` with the streams that it hands on.
struct HandsOn {
    of: &'static dyn Operator,
    spec: &'static Spec,
    largest: usize,
}

const STREAMS: &str = "streams";

impl HandsOn {
    fn new(largest: usize) -> Self {
        let of = registry::find("mhc_pre").expect("an operator");
        let shape = of.spec().inputs[0].shape;
        let streams = OutputSpec { name: STREAMS, shape, f32: false, constant: false };
        Self { of, spec: spec(of, outputs(of).chain([streams]).collect()), largest }
    }
}

fn options(attributes: &Attributes) -> MhcPreOptions {
    MhcPreOptions {
        norm_eps: attributes.number("norm_eps"),
        hc_eps: attributes.number("hc_eps"),
        sinkhorn: attributes.integer("sinkhorn") as usize,
    }
}

impl Operator for HandsOn {
    as_the_other!();

    fn by_burn(&self) -> &'static [&'static str] {
        &["gamma", STREAMS]
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let missing = call.inputs[4].shape().contains(&0);
        let gamma = (!missing).then(|| call.float(4));
        let (phi, alpha, bias) = (call.float(1), call.float(2), call.float(3));
        let of = mhc_pre(call.float(0), phi, alpha, bias, gamma, options(call.attributes))?;
        Ok(vec![of.h_in.into(), of.h_post.into(), of.h_res.into(), of.x.into()])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let mut outputs = self.of.oracle(call);
        outputs.push(call.inputs[0].clone());
        outputs
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [h_in, h_post, h_res, streams] = dy else { unreachable!("four outputs") };
        let [x, phi, alpha, bias, gamma] = call.inputs else { unreachable!("five inputs") };
        let (n, options) = (x.shape[2], options(call.attributes));
        let inputs = Inputs {
            x: &x.values,
            phi: &phi.values,
            alpha: &alpha.values,
            bias: &bias.values,
            gamma: &gamma.values,
        };
        let cotangents = [&h_in.values[..], &h_post.values, &h_res.values];
        let back = tokens_backward(inputs, n, options, cotangents);
        let dx = of_streams(inputs, n, &back, &h_in.values, &streams.values);
        let gradients = [dx].into_iter().chain(over_tokens(inputs, n, &back));
        let shapes = call.inputs.iter().map(|input| input.shape.clone());
        shapes.zip(gradients).map(|(shape, of)| BoundedTensor::new(shape, of)).collect()
    }
}

/// `mhc_post_pre` whose streams nobody but the head reads.
struct ReadsAlone {
    of: &'static dyn Operator,
    spec: &'static Spec,
    largest: usize,
}

impl ReadsAlone {
    fn new(largest: usize) -> Self {
        let of = registry::find("mhc_post_pre").expect("an operator");
        Self { of, spec: spec(of, outputs(of).skip(1).collect()), largest }
    }
}

impl Operator for ReadsAlone {
    as_the_other!();

    fn by_burn(&self) -> &'static [&'static str] {
        self.of.by_burn()
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        Ok(self.of.run(call)?.into_iter().skip(1).collect())
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        self.of.oracle(call).into_iter().skip(1).collect()
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let x = &call.inputs[0];
        let nothing = x.values.iter().map(|x| *x * 0.0).collect();
        let all: Vec<BoundedTensor> = [BoundedTensor::new(x.shape.clone(), nothing)]
            .into_iter()
            .chain(dy.iter().cloned())
            .collect();
        self.of.oracle_backward(call, &all)
    }
}

/// Audits are the process's.
static ONE: Mutex<()> = Mutex::new(());

/// In all types of a device without kernels, and of one with kernels if there is one. `new` makes the operator, with
/// cases of so many elements of x at most.
fn verify<O: Operator>(new: impl Fn(usize) -> O) {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cpu = device::open("cpu").expect("the CPU is always there");
    let with_kernels = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
    for device in [Some(cpu), with_kernels].into_iter().flatten().map(|opened| opened.device) {
        let hopper = device::hardware(&device).is_some_and(|it| it.wgmma);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            let rings = hopper && dtype == DType::BF16;
            let op = new(if rings { LARGE } else { SMALL });
            let options = Options { seed: 2, fuzz: 0, family: None };
            let report = gate::verify(&op, dtype, &device, options);
            let name = op.spec().name;
            assert!(report.green(), "{name} in {dtype:?} on {device:?}: {:?}", report.failures);
        }
    }
}

#[test]
fn streams_that_are_handed_on() {
    verify(HandsOn::new);
}

#[test]
fn streams_that_only_the_head_reads() {
    verify(ReadsAlone::new);
}

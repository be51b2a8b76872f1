//! Master weights: a module in 16 bits whose parameters the optimizer keeps in f32.

use crate::common::{on_each, tensor};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_optim::prelude::*;
use std::collections::BTreeMap;

const STEPS: usize = 8;

#[derive(Module, Debug)]
struct Weights {
    first: Param<Tensor<2>>,
    second: Param<Tensor<2>>,
    exact: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    fixed: Param<Tensor<2>>,
}

fn weights(device: &Device) -> Weights {
    fn param<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
        Param::initialized(ParamId::new(), tensor.require_grad())
    }
    Weights {
        first: param(tensor([4, 6], 0, device)),
        second: param(tensor([4, 6], 100, device)),
        exact: param(tensor([3, 5], 200, device)),
        bias: param(tensor([6], 300, device)),
        fixed: Param::initialized(ParamId::new(), tensor([2, 2], 400, device)),
    }
}

/// What a module is rounded to: wgpu has no bf16.
fn low(device: &Device) -> DType {
    if device.supports_dtype(DType::BF16) { DType::BF16 } else { DType::F16 }
}

/// Those that a product in 16 bits reads.
fn which(name: &str, rank: usize) -> bool {
    rank >= 2 && name != "exact"
}

/// Numbers in steps of 2⁻⁷.
fn held<const D: usize>(shape: [usize; D], start: usize, device: &Device) -> Tensor<D> {
    tensor(shape, start, device).mul_scalar(128.0).round().div_scalar(128.0)
}

/// Gradients that bf16 and f16 hold, in the element types of the parameters.
fn gradients(of: &Weights, step: usize, device: &Device) -> GradientsParams {
    fn register<const D: usize>(
        to: &mut GradientsParams,
        of: &Param<Tensor<D>>,
        start: usize,
        device: &Device,
    ) {
        let (shape, dtype) = (of.val().dims(), of.val().dtype());
        to.register(of.id, held(shape, start, device).inner().cast(dtype));
    }
    let mut all = GradientsParams::new();
    for (i, param) in [&of.first, &of.second, &of.exact].into_iter().enumerate() {
        // Now and then one has none.
        if i == 1 && step % 3 == 1 {
            continue;
        }
        register(&mut all, param, 1000 * step + 50 * i, device);
    }
    register(&mut all, &of.bias, 1000 * step + 900, device);
    all
}

fn values(of: &Weights) -> Vec<Vec<f32>> {
    let data = |data: TensorData| data.iter::<f32>().collect();
    let matrices = [&of.first, &of.second, &of.exact, &of.fixed];
    let matrices = matrices.into_iter().map(|param| data(param.val().into_data()));
    matrices.chain([data(of.bias.val().into_data())]).collect()
}

fn dtypes(of: &Weights) -> [DType; 5] {
    let [first, second, exact, fixed] =
        [&of.first, &of.second, &of.exact, &of.fixed].map(|param| param.val().dtype());
    [first, second, exact, fixed, of.bias.val().dtype()]
}

fn train(
    mut of: Weights,
    optimizer: &mut Optimizer,
    steps: std::ops::Range<usize>,
    device: &Device,
) -> Weights {
    for step in steps {
        let grads = gradients(&of, step, device);
        of = optimizer.step(of, grads, 0.01);
    }
    of
}

fn optimizers() -> [fn() -> Optimizer; 2] {
    [
        || AdamWConfig::new().with_weight_decay(0.1).init(),
        || MuonConfig::new().with_weight_decay(0.1).init(),
    ]
}

#[test]
fn a_rounded_module_moves_as_the_exact_one() {
    on_each(|device| {
        let (low, device) = (low(&device), device.autodiff());
        for optimizer in optimizers() {
            let start = weights(&device);
            let exact = train(start.clone(), &mut optimizer(), 0..STEPS, &device);
            let mut of_rounded = optimizer();
            let rounded = of_rounded.keep_masters(start.clone(), low, which);
            let all = DType::F32;
            // What requires no gradient is none of the optimizer's business.
            assert_eq!(dtypes(&rounded), [low, low, all, all, all]);
            assert_eq!(values(&of_rounded.with_masters(&rounded)), values(&start));
            let rounded = train(rounded, &mut of_rounded, 0..STEPS, &device);
            assert_eq!(dtypes(&rounded), [low, low, all, all, all]);
            assert!(rounded.first.is_require_grad() && !rounded.fixed.is_require_grad());
            let masters = of_rounded.with_masters(&rounded);
            assert_eq!(dtypes(&masters), [all; 5]);
            assert!(masters.first.is_require_grad());
            assert_eq!(values(&masters), values(&exact));
            let of = |param: &Param<Tensor<2>>| -> Vec<f32> {
                param.val().cast(low).into_data().iter::<f32>().collect()
            };
            assert_eq!(of(&rounded.first), of(&exact.first));
            assert_ne!(values(&rounded), values(&exact));
        }
    });
}

/// What is put into a module in f32 counts, and moves from then on in f32.
#[test]
fn a_value_in_f32_takes_the_place_of_a_master() {
    on_each(|device| {
        let (low, device) = (low(&device), device.autodiff());
        for optimizer in optimizers() {
            let mut of_rounded = optimizer();
            let rounded = of_rounded.keep_masters(weights(&device), low, which);
            let rounded = train(rounded, &mut of_rounded, 0..3, &device);
            let raised = of_rounded.with_masters(&rounded);
            let expected = values(&train(rounded, &mut of_rounded, 3..4, &device));
            let mut again = optimizer();
            let rounded = again.keep_masters(weights(&device), low, which);
            drop(train(rounded, &mut again, 0..3, &device));
            let moved = train(raised, &mut again, 3..4, &device);
            assert_eq!(dtypes(&moved), [DType::F32; 5]);
            let rounded = |of: &Param<Tensor<2>>| -> Vec<f32> {
                of.val().cast(low).into_data().iter::<f32>().collect()
            };
            assert_eq!([rounded(&moved.first), rounded(&moved.second)], expected[..2]);
            // Without autodiff it stays without.
            let valid = again.with_masters(&moved.valid());
            assert!(!valid.first.val().is_autodiff());
        }
    });
}

#[test]
fn what_is_saved_goes_on_bit_for_bit() {
    on_each(|device| {
        let (low, device) = (low(&device), device.autodiff());
        for optimizer in optimizers() {
            let mut whole = optimizer();
            let start = whole.keep_masters(weights(&device), low, which);
            let end = train(start, &mut whole, 0..STEPS, &device);

            let mut first = optimizer();
            let start = first.keep_masters(weights(&device), low, which);
            let half = train(start, &mut first, 0..STEPS / 2, &device);
            let state: BTreeMap<_, _> = first.state(&half).into_iter().collect();
            assert!(state.values().all(|data| data.dtype() == DType::F32));
            let record = first.with_masters(&half).into_record();
            let other = weights(&device).load_record(record);
            let mut second = optimizer();
            second.load_state(&other, first.steps(), state).unwrap();
            let other = second.keep_masters(other, low, which);
            let other = train(other, &mut second, STEPS / 2..STEPS, &device);
            assert_eq!(values(&other), values(&end));
            let [found, expected] = [second.with_masters(&other), whole.with_masters(&end)];
            assert_eq!(values(&found), values(&expected));
        }
    });
}

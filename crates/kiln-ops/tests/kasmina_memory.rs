//! A hundred forwards and backwards of the Kasmina layer need no more memory than the first few, and move nothing between
//! host and device. By themselves, since memory and the driver are a process's.

use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Tensor};
use kiln_ops::prelude::*;
use kiln_test::cupti::driver_calls;

#[allow(dead_code)] // of what the tests share
mod common;

/// One test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// The layer as models call it, its operands made once.
struct Layer {
    seeds: Seeds,
    x: Tensor<2>,
    table: Tensor<2>,
    mlps: Tensor<3>,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let grafting =
            Seed { state: SeedState::Grafting, blueprint: Some(1), alpha: 0.5, ..Seed::default() };
        let mlp = Seed { blend: Blend::Mlp, ..grafting };
        Self {
            seeds: Seeds::new(&[Seed::default(), grafting, grafting, mlp], device).unwrap(),
            x: Tensor::ones([64, 100], device),
            table: Tensor::ones([2, 100], device),
            mlps: Tensor::ones([2, mlp_rows(25), 25], device),
        }
    }

    fn forward(&self, x: Tensor<2>, table: Tensor<2>, mlps: Tensor<3>) -> Tensor<2> {
        let unchecked = KasminaOptions { check_seeds: false };
        let (y, _) = kasmina(x, table.clone(), &self.seeds, unchecked).unwrap();
        kasmina_mlp(y.mul_scalar(1e-3), table, mlps, &self.seeds, unchecked).unwrap().0
    }

    fn infer(&self) -> Tensor<2> {
        self.forward(self.x.clone(), self.table.clone(), self.mlps.clone())
    }

    /// The gradients of both kinds of weights.
    fn train(&self) -> (Tensor<2>, Tensor<3>) {
        let x = self.x.clone().autodiff().require_grad();
        let table = self.table.clone().autodiff().require_grad();
        let mlps = self.mlps.clone().autodiff().require_grad();
        let grads = self.forward(x, table.clone(), mlps.clone()).sum().backward();
        (table.grad(&grads).unwrap(), mlps.grad(&grads).unwrap())
    }
}

#[test]
fn memory_stays() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for device in common::kernel_devices() {
        let layer = Layer::new(&device);
        let run = |times: usize| {
            for _ in 0..times {
                let (table, mlps) = layer.train();
                let _ = (table.into_data(), mlps.into_data());
            }
            let usage = device.memory_pool_usage().expect("this device knows");
            (usage.bytes_reserved, usage.number_allocs)
        };
        assert_eq!(run(20), run(100), "{device:?}");
    }
}

/// Counted at the driver: copies of any kind, memory asked for.
#[test]
fn nothing_travels() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = match kiln_ops::device::open("cuda") {
        Ok(opened) => opened.device,
        Err(error) => return kiln_test::skip("cuda", error),
    };
    let layer = Layer::new(&device);
    let infer = || drop(layer.infer());
    let train = || drop(layer.train());
    for (name, once) in [("inference", &infer as &dyn Fn()), ("training", &train)] {
        let run = |times: usize| {
            (0..times).for_each(|_| once());
            device.sync().unwrap();
        };
        run(20);
        let calls = match driver_calls(|| run(100)) {
            Ok(calls) => calls,
            Err(error) => return kiln_test::skip("toolkit", error),
        };
        let copies_and_memory = calls.of(&["cuMemcpy", "cuMemAlloc", "cuMemHostAlloc"]);
        assert_eq!(copies_and_memory, 0, "{name}: {calls:?}");
        // Both operators of every call, so that something was counted.
        assert!(calls.of(&["cuLaunchKernel"]) >= 200, "{name}: {calls:?}");
    }
    let read = driver_calls(|| _ = layer.infer().into_data().try_to_vec::<f32>()).unwrap();
    assert!(read.of(&["cuMemcpy"]) > 0, "a read is not seen: {read:?}");
    let made = driver_calls(|| {
        _ = Tensor::<1>::from_floats([1.0, 2.0], &device).add_scalar(1.0);
        device.sync().unwrap();
    })
    .unwrap();
    assert!(made.of(&["cuMemcpy"]) > 0, "an upload is not seen: {made:?}");
}

//! A hundred forwards and backwards of the Kasmina layer need no more memory than the first few, and wait for nothing that
//! the host would have to read. By itself, since the memory of a device is that of a process.

use burn::tensor::{Device, Tensor};
use kiln_ops::prelude::*;

#[path = "common/basics.rs"]
mod basics;

/// The gradients of a table and of blueprints, through both operators.
fn gradients(x: &Tensor<2>, seeds: &Seeds) -> (Tensor<2>, Tensor<3>) {
    let device = x.device();
    let (x, table) = (x.clone().autodiff(), Tensor::<2>::ones([2, 100], &device));
    let (x, table) = (x.require_grad(), table.autodiff().require_grad());
    let unchecked = KasminaOptions { check_seeds: false };
    let (y, _) = kasmina(x, table.clone(), seeds, unchecked).unwrap();
    let mlps = Tensor::<3>::ones([2, mlp_rows(25), 25], &device).autodiff().require_grad();
    let (x, rows) = (y.mul_scalar(1e-3), table.clone());
    let (y, _) = kasmina_mlp(x, rows, mlps.clone(), seeds, unchecked).unwrap();
    let grads = y.sum().backward();
    (table.grad(&grads).unwrap(), mlps.grad(&grads).unwrap())
}

/// Records what `work` launches as a graph: no memory can be asked for meanwhile, and nothing read.
fn recorded<T>(device: &Device, work: impl Fn() -> Result<T, String>) -> Result<(), String> {
    use burn::backend::{Backend, Dispatch};
    let error = |e| format!("{e:?}");
    let dispatch = device.as_dispatch();
    Dispatch::graph_prepare(dispatch).map_err(error)?;
    for _ in 0..2 {
        work()?;
        device.sync().unwrap();
    }
    Dispatch::graph_start_capture(dispatch).map_err(error)?;
    let kept = work();
    let graph = Dispatch::graph_stop_capture(dispatch).map_err(error);
    kept.and(graph).map(|_| ())
}

#[test]
fn memory_stays_and_nothing_is_read() {
    let _ = basics::numbers(1, 1, 0.0);
    for device in basics::devices().into_iter().filter(kiln_ops::device::is_cube) {
        let grafting =
            Seed { state: SeedState::Grafting, blueprint: Some(1), alpha: 0.5, ..Seed::default() };
        let mlp = Seed { blend: Blend::Mlp, ..grafting };
        let seeds = Seeds::new(&[Seed::default(), grafting, grafting, mlp], &device).unwrap();
        let x = Tensor::<2>::ones([64, 100], &device);
        let run = |times: usize| {
            for _ in 0..times {
                let (of_table, of_mlps) = gradients(&x, &seeds);
                let _ = (of_table.into_data(), of_mlps.into_data());
            }
            let usage = device.memory_pool_usage().expect("this device knows");
            (usage.bytes_reserved, usage.number_allocs)
        };
        assert_eq!(run(20), run(100), "{device:?}");

        if !kiln_ops::device::is_cuda(&device) {
            kiln_test::skip("cuda", "nothing else records launches");
            continue;
        }
        let hundred = || Ok((0..100).map(|_| gradients(&x, &seeds)).collect::<Vec<_>>());
        assert_eq!(recorded(&device, hundred), Ok(()));
        let read = || gradients(&x, &seeds).0.try_to_data().map_err(|e| format!("{e:?}"));
        assert!(recorded(&device, read).is_err(), "what is read cannot be recorded");
    }
}

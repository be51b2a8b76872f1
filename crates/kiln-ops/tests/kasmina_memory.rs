//! A hundred forwards and backwards of the Kasmina layer need no more memory than the first few. By itself, since the
//! memory of a device is that of a process.

use burn::tensor::Tensor;
use kiln_ops::prelude::*;

#[path = "common/basics.rs"]
mod basics;

#[test]
fn memory_stays() {
    let _ = basics::numbers(1, 1, 0.0);
    for device in basics::devices().into_iter().filter(kiln_ops::device::is_cube) {
        let grafting =
            Seed { state: SeedState::Grafting, blueprint: Some(1), alpha: 0.5, ..Seed::default() };
        let mlp = Seed { blend: Blend::Mlp, ..grafting };
        let seeds = Seeds::new(&[Seed::default(), grafting, grafting, mlp], &device).unwrap();
        let x = Tensor::<2>::ones([64, 100], &device);
        let run = |times: usize| {
            for _ in 0..times {
                let (x, table) = (x.clone().autodiff(), Tensor::<2>::ones([2, 100], &device));
                let (x, table) = (x.require_grad(), table.autodiff().require_grad());
                let unchecked = KasminaOptions { check_seeds: false };
                let (y, _) = kasmina(x.clone(), table.clone(), &seeds, unchecked).unwrap();
                let mlps = Tensor::<3>::ones([2, mlp_rows(25), 25], &device).autodiff();
                let (x, rows, mlps) = (y.mul_scalar(1e-3), table.clone(), mlps.require_grad());
                let (y, _) = kasmina_mlp(x, rows, mlps.clone(), &seeds, unchecked).unwrap();
                let grads = y.sum().backward();
                let _ = table.grad(&grads).unwrap().into_data();
                let _ = mlps.grad(&grads).unwrap().into_data();
            }
            let usage = device.memory_pool_usage().expect("this device knows");
            (usage.bytes_reserved, usage.number_allocs)
        };
        assert_eq!(run(20), run(100), "{device:?}");
    }
}

//! Temporary: sweeps kernel parameters.
use burn::backend::{Dispatch, ProfileOptions};
use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_ops::rms_norm::backend::{RmsNormGradOps, RmsNormOps};

fn time(device: &Device, f: impl Fn(usize) -> Vec<burn::backend::DispatchTensor> + Sync + Send) -> f64 {
    let mut ts = vec![];
    for round in 0..7 {
        let calls = if round == 0 { 3 } else { 30 };
        device.sync().unwrap();
        let (kept, d) = {
            let mut out = None;
            let slot = &mut out;
            let f = &f;
            let (_, d) = device
                .profile_with(ProfileOptions::default().flush(), move || *slot = Some((0..calls).map(f).collect::<Vec<_>>()))
                .unwrap();
            (out, d)
        };
        let t = cubecl::future::block_on(d.resolve()).unwrap().duration().as_secs_f64() / calls as f64;
        drop(kept);
        if round > 0 { ts.push(t * 1e6); }
    }
    ts.sort_by(f64::total_cmp);
    ts[ts.len() / 2]
}

fn main() {
    let device = kiln_ops::device::open(&std::env::var("KILN_DEVICE").unwrap_or("cuda".into())).unwrap().device;
    let small = std::env::var("SMALL").is_ok();
    let shapes: &[[usize; 2]] = if small { &[[64, 256]] } else { &[[16384, 4096], [32768, 768], [8192, 8192], [4096, 16384], [131072, 128]] };
    let dtype = if small { DType::F32 } else { DType::BF16 };
    for [m, d] in shapes.iter().copied() {
        let sets = ((512 << 20) / (m * d * 4)).clamp(1, 8);
        let r = |s: [usize; 2]| Tensor::<2>::random(s, Distribution::Normal(0.1, 1.0), (&device, dtype));
        let xs: Vec<_> = (0..sets).map(|_| (r([m, d]), r([m, d]))).collect();
        let w = Tensor::<1>::random([d], Distribution::Normal(1.0, 0.3), (&device, dtype));
        for fchunks in [1usize, 2, 4, 8] {
            unsafe { std::env::set_var("FCHUNKS", fchunks.to_string()) };
            let t = time(&device, |i| {
                let (x, _) = &xs[i % sets];
                vec![<Dispatch as RmsNormOps>::rms_norm(x.clone().into_dispatch(), w.clone().into_dispatch(), 1e-5)]
            });
            println!("fwd {m}x{d} chunks {fchunks}: {t:.1} us {:.0} GB/s", 4e-3 * (m * d) as f64 / t);
        }
        for chunks in [1usize, 2, 4] {
            for prefetch in [0usize, 1] {
                for cubes in [1usize, 2, 3, 4, 6, 8] {
                    if cubes * (d / 8).div_ceil(chunks).next_power_of_two() > 2048 { continue; }
                    for (k, v) in [("CHUNKS", chunks), ("PREFETCH", prefetch), ("CUBES", cubes)] {
                        unsafe { std::env::set_var(k, v.to_string()) };
                    }
                    let t = time(&device, |i| {
                        let (x, dy) = &xs[i % sets];
                        let (a, b) = <Dispatch as RmsNormGradOps>::rms_norm_backward(dy.clone().into_dispatch(), x.clone().into_dispatch(), w.clone().into_dispatch(), 1e-5);
                        vec![a, b]
                    });
                    println!("bwd {m}x{d} chunks {chunks} prefetch {prefetch} cubes {cubes}: {t:.1} us {:.0} GB/s", 6e-3 * (m * d) as f64 / t);
                }
            }
        }
    }
}

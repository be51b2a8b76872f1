//! Kiln's attention beside `burn::tensor::module::attention`, which on CubeCL devices is `cubek-attention` or
//! separate kernels, whichever Burn measures to be faster:
//!
//! ```text
//! cargo run --release --example burn_attention -- cuda 8x16x2048x128 2x16x8192x128
//! ```
//!
//! Causal, in bf16 on CUDA and f32 elsewhere; milliseconds of a call, the median of bursts in turns.

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData, module};
use kiln_ops::prelude::{AttentionOptions, attention};
use kiln_ops::{device, oracle};
use std::time::Instant;

const BURSTS: usize = 7;
const CALLS: usize = 20;

type Inputs = [Tensor<4>; 3];

fn burn(call: &Inputs) -> Tensor<4> {
    let [q, k, v] = call.clone();
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    module::attention(q, k, v, None, None, options)
}

fn kiln(call: &Inputs) -> Tensor<4> {
    let [q, k, v] = call.clone();
    attention(q, k, v, AttentionOptions::default()).expect("the shapes are right")
}

/// Milliseconds of a call, with the gradients of all inputs if they are wanted.
fn burst(of: fn(&Inputs) -> Tensor<4>, inputs: &Inputs, backward: bool) -> f64 {
    let device = inputs[0].device();
    let start = Instant::now();
    let mut kept = vec![];
    for _ in 0..CALLS {
        if backward {
            let leaves = inputs.clone().map(|x| x.autodiff().require_grad());
            let gradients = of(&leaves).sum().backward();
            kept.push(leaves.map(|leaf| leaf.grad(&gradients).expect("it was asked for")));
        } else {
            kept.push([of(inputs), inputs[1].clone(), inputs[2].clone()]);
        }
    }
    device.sync().expect("the device answers");
    start.elapsed().as_secs_f64() * 1e3 / CALLS as f64
}

fn case(name: &str, device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let sizes: Vec<usize> = name.split('x').map(str::parse).collect::<Result<_, _>>()?;
    let shape: [usize; 4] = sizes.try_into().map_err(|_| format!("{name} is not BxHxSxD"))?;
    let dtype = if device::is_cuda(device) { DType::BF16 } else { DType::F32 };
    let make = || Tensor::random(shape, Distribution::Normal(0.0, 1.0), (device, dtype));
    let inputs = [make(), make(), make()];
    let numbers = |data: TensorData| data.iter::<f64>().collect::<Vec<_>>();
    let [theirs, ours] = [burn, kiln].map(|of| numbers(of(&inputs).into_data()));
    let apart = oracle::distance(&ours, &theirs).relative;
    for (what, backward) in [("forward", false), ("forward + backward", true)] {
        let both: [fn(&Inputs) -> Tensor<4>; 2] = [burn, kiln];
        let mut times = [vec![], vec![]];
        for round in 0..=BURSTS {
            for (times, of) in times.iter_mut().zip(both) {
                let time = burst(of, &inputs, backward);
                // The first compiles.
                if round > 0 {
                    times.push(time);
                }
            }
        }
        let [theirs, ours] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[BURSTS / 2]
        });
        let ratio = theirs / ours;
        println!("{name} {what}: Burn {theirs:.3} ms, Kiln {ours:.3} ms, {ratio:.2} ×");
    }
    println!("{name}: results differ by {apart:.1e} of the largest");
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "auto".into());
    let opened = device::open(&name)?;
    println!("device: {}", opened.why);
    let cases: Vec<String> = arguments.collect();
    let small = ["1x2x256x64".to_string()];
    for name in if cases.is_empty() { &small[..] } else { &cases } {
        case(name, &opened.device)?;
    }
    Ok(())
}

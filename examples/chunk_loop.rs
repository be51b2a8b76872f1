//! The Kasmina layer as its source has it, one chunk after another, in Burn's own operations, beside the operators that
//! take all chunks in a launch or two:
//!
//! ```text
//! cargo run --release --example chunk_loop -- [DEVICE] [--rows N] [--features N] [--seeds N] [--mlps]
//! cargo run --release --example chunk_loop -- cuda --rows 64 --features 1024 --seeds 1000
//! ```
//!
//! Microseconds of a call by the host's clock, the best of five bursts, as a loop of many small operations takes the host's
//! time: both are timed alike. bf16 on CUDA, f32 elsewhere. With `--mlps` every other seed that contributes blends an MLP.

use burn::tensor::{DType, Device, Distribution, Tensor, activation::relu};
use kiln_ops::device;
use kiln_ops::kasmina::chunk;
use kiln_ops::prelude::*;
use std::time::Instant;

const BLUEPRINTS: usize = 10;
const BURSTS: usize = 5;
/// Seconds that a burst has at least.
const BURST: f64 = 0.3;

type Error = Box<dyn std::error::Error>;

struct Layer {
    seeds: Vec<Seed>,
    on_device: Seeds,
    blueprints: Tensor<2>,
    mlps: Tensor<3>,
}

type Outputs = (Tensor<2>, Telemetry);

impl Layer {
    /// One chunk after another; what the seeds are is known on the host.
    fn chunk_by_chunk(&self, x: &Tensor<2>) -> Outputs {
        let (features, count) = (x.dims()[1], self.seeds.len());
        let chunks = (0..count).map(|i| chunk(i, features, count));
        let sizes = chunks.clone().map(|of| of.len()).collect();
        let (mut ys, mut means, mut variances) = (vec![], vec![], vec![]);
        for ((part, chunk), seed) in
            x.clone().split_with_sizes(sizes, 1).into_iter().zip(chunks).zip(&self.seeds)
        {
            let wide = part.clone().cast(DType::F32);
            let mean = wide.clone().mean();
            let off = wide.clone() - mean.clone().unsqueeze();
            variances.push((off.clone() * off).mean());
            means.push(mean);
            let (true, Some(blueprint)) = (seed.state.contributes(), seed.blueprint) else {
                ys.push(part);
                continue;
            };
            let alpha = seed.alpha;
            let w = || {
                let rows = self.blueprints.clone();
                rows.slice([blueprint..blueprint + 1, chunk.clone()]).cast(DType::F32)
            };
            let y = match seed.blend {
                Blend::Lerp => wide * ((w() - 1.0) * alpha + 1.0),
                Blend::Scale => wide * w(),
                Blend::Add => wide + w() * alpha,
                Blend::Mixed => wide * (1.0 - alpha) + w() * alpha,
                Blend::Mlp => {
                    let out = self.mlp(part, blueprint).cast(DType::F32);
                    wide * (1.0 - alpha) + out * alpha
                }
            };
            ys.push(y.cast(x.dtype()));
        }
        let [mean, variance] = [means, variances].map(|of| Tensor::cat(of, 0));
        (Tensor::cat(ys, 1), Telemetry { mean, variance })
    }

    fn mlp(&self, x: Tensor<2>, number: usize) -> Tensor<2> {
        let ([_, size], [_, _, widest]) = (x.dims(), self.mlps.dims());
        let own = self.mlps.clone().slice([number..number + 1]).squeeze_dim::<2>(0);
        let rows = |first: usize, count: usize| own.clone().narrow(0, first, count);
        let first = rows(0, 2 * size).narrow(1, 0, size);
        let second = rows(2 * widest, 2 * size).narrow(1, 0, size);
        let bias = rows(4 * widest, 2).reshape([1, 2 * widest]).narrow(1, 0, 2 * size);
        let hidden = relu(x.matmul(first.transpose()) + bias);
        hidden.matmul(second) + rows(4 * widest + 2, 1).narrow(1, 0, size)
    }

    fn fused(&self, x: &Tensor<2>, with_mlps: bool) -> Result<Outputs, OpError> {
        let options = KasminaOptions { check_seeds: false };
        let (x, rows, seeds) = (x.clone(), self.blueprints.clone(), &self.on_device);
        match with_mlps {
            true => kasmina_mlp(x, rows, self.mlps.clone(), seeds, options),
            false => kasmina(x, rows, seeds, options),
        }
    }
}

/// Microseconds of a call.
fn time(device: &Device, mut call: impl FnMut() -> Result<Outputs, Error>) -> Result<f64, Error> {
    let mut burst = |calls: usize| -> Result<f64, Error> {
        device.sync()?;
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        device.sync()?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    };
    burst(1)?;
    let calls = (BURST / burst(3)?).ceil() as usize;
    let bursts = (0..BURSTS).map(|_| burst(calls)).collect::<Result<Vec<_>, _>>()?;
    Ok(1e6 * bursts.into_iter().fold(f64::INFINITY, f64::min))
}

/// How far two are apart, beside the largest number.
fn distance(found: Tensor<2>, expected: Tensor<2>) -> Result<f32, Error> {
    let [found, expected] = [found, expected].map(|of| of.cast(DType::F32));
    let largest: f32 = expected.clone().abs().max().into_scalar();
    let apart: f32 = (found - expected).abs().max().into_scalar();
    Ok(apart / largest)
}

fn main() -> Result<(), Error> {
    let mut name = "auto".to_string();
    let (mut rows, mut features, mut count, mut with_mlps) = (64, 1024, 128, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || {
            args.next()
                .ok_or(format!("{arg}: expected a number"))?
                .parse::<usize>()
                .map_err(Error::from)
        };
        match arg.as_str() {
            "--rows" => rows = number()?,
            "--features" => features = number()?,
            "--seeds" => count = number()?,
            "--mlps" => with_mlps = true,
            _ => name = arg,
        }
    }
    let opened = device::open(&name)?;
    println!("device: {}", opened.why);
    let device = &opened.device;
    let dtype = if device::is_cuda(device) { DType::BF16 } else { DType::F32 };

    let widest = features.div_ceil(count);
    let random = |deviation: f64| Distribution::Normal(0.3, deviation);
    let seed = |i: usize| Seed {
        state: SeedState::ALL[i * 7 % SeedState::ALL.len()],
        blueprint: Some(i * 3 % BLUEPRINTS),
        blend: match with_mlps && i % 2 == 0 {
            true => Blend::Mlp,
            false => Blend::OF_ROWS[i / 2 % Blend::OF_ROWS.len()],
        },
        alpha: (i * 37 % 101) as f32 / 100.0,
    };
    let seeds: Vec<Seed> = (0..count).map(seed).collect();
    let x = Tensor::<2>::random([rows, features], random(1.0), device).cast(dtype);
    let deviation = 1.0 / (widest as f64).sqrt();
    let layer = Layer {
        on_device: Seeds::new(&seeds, device)?,
        seeds,
        blueprints: Tensor::<2>::random([BLUEPRINTS, features], random(1.0), device).cast(dtype),
        mlps: Tensor::<3>::random(
            [BLUEPRINTS, mlp_rows(widest), widest],
            random(deviation),
            device,
        )
        .cast(dtype),
    };

    let (y, telemetry) = layer.fused(&x, with_mlps)?;
    let (expected, seen) = layer.chunk_by_chunk(&x);
    let apart =
        distance(y, expected)?.max(distance(telemetry.mean.unsqueeze(), seen.mean.unsqueeze())?);
    let apart = apart.max(distance(telemetry.variance.unsqueeze(), seen.variance.unsqueeze())?);
    println!("the two differ by {apart:.1e} of the largest number");
    // The loop rounds the hidden units to bf16.
    if !(apart < 2e-2) {
        return Err("they do not agree".into());
    }
    let looped = time(device, || Ok(layer.chunk_by_chunk(&x)))?;
    let fused = time(device, || Ok(layer.fused(&x, with_mlps)?))?;
    let op = if with_mlps { "kasmina_mlp" } else { "kasmina" };
    println!(
        "{rows}×{features} {dtype:?}, {count} seeds: loop {looped:.0} µs, {op} {fused:.1} µs, {:.1}×",
        looped / fused
    );
    Ok(())
}

//! The Kasmina layer as its source has it, one chunk after another, in Burn's own operations, beside the operator that
//! takes all chunks in two launches, or three with MLPs:
//!
//! ```text
//! cargo run --release --example chunk_loop -- [DEVICE] [--rows N] [--features N] [--seeds N] [--mlps]
//! cargo run --release --example chunk_loop -- cuda --rows 64 --features 1024 --seeds 1000
//! ```
//!
//! Microseconds of a call by the host's clock, the best of five bursts, as a loop of many small operations takes the host's
//! time: both are timed alike. bf16 on CUDA, f32 elsewhere. With `--mlps` every other seed blends an MLP.

use burn::tensor::{DType, Device, Distribution, Tensor, activation::relu};
use kiln_ops::device;
use kiln_ops::kasmina::chunk;
use kiln_ops::prelude::*;
use std::time::Instant;

const BLUEPRINTS: usize = 10;
const BURSTS: usize = 5;
/// About the seconds of a burst.
const BURST: f64 = 0.3;

type Error = Box<dyn std::error::Error>;

struct Layer {
    seeds: Vec<Seed>,
    on_device: Seeds,
    blueprints: Tensor<2>,
    mlps: Option<Tensor<3>>,
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
        let mlps = self.mlps.as_ref().expect("a seed that blends an MLP has one");
        let ([_, size], [_, _, widest]) = (x.dims(), mlps.dims());
        let own = mlps.clone().narrow(0, number, 1).squeeze_dim::<2>(0);
        let rows = |first: usize, count: usize| own.clone().narrow(0, first, count);
        let first = rows(0, 2 * size).narrow(1, 0, size);
        let second = rows(2 * widest, 2 * size).narrow(1, 0, size);
        let bias = rows(4 * widest, 2).reshape([1, 2 * widest]).narrow(1, 0, 2 * size);
        let hidden = relu(x.matmul(first.transpose()) + bias);
        hidden.matmul(second) + rows(4 * widest + 2, 1).narrow(1, 0, size)
    }

    /// The same by the operator: its kernels, or on a device without, its reference.
    fn operator(&self, x: &Tensor<2>) -> Result<Outputs, OpError> {
        let options = KasminaOptions { check_seeds: false };
        let (x, rows, seeds) = (x.clone(), self.blueprints.clone(), &self.on_device);
        match &self.mlps {
            Some(mlps) => kasmina_mlp(x, rows, mlps.clone(), seeds, options),
            None => kasmina(x, rows, seeds, options),
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

/// Refuses what is further apart than roundings make it.
fn expect_near<const D: usize>(
    what: &str,
    found: &Tensor<D>,
    expected: &Tensor<D>,
    bound: f64,
) -> Result<(), Error> {
    let [found, expected] =
        [found, expected].map(|of| of.clone().into_data().iter::<f64>().collect::<Vec<_>>());
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= bound * (1.0 + b.abs());
    match found.iter().zip(&expected).position(|pair| !near(pair)) {
        Some(at) => Err(format!("{what}[{at}] is {} and {}", found[at], expected[at]).into()),
        None => Ok(()),
    }
}

/// What was asked for.
struct Args {
    device: String,
    rows: usize,
    features: usize,
    seeds: usize,
    mlps: bool,
}

impl Args {
    fn read() -> Result<Self, String> {
        let mut read =
            Self { device: "auto".into(), rows: 64, features: 1024, seeds: 128, mlps: false };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let number = match arg.as_str() {
                "--rows" => &mut read.rows,
                "--features" => &mut read.features,
                "--seeds" => &mut read.seeds,
                "--mlps" => {
                    read.mlps = true;
                    continue;
                }
                _ if arg.starts_with('-') => {
                    return Err(format!("`{arg}`: expected --rows, --features, --seeds or --mlps"));
                }
                _ => {
                    read.device = arg;
                    continue;
                }
            };
            let given = args.next().unwrap_or_default();
            let expected = || format!("{arg} `{given}`: expected a number from 1 on");
            *number = given.parse().ok().filter(|n| *n > 0).ok_or_else(expected)?;
        }
        let Self { features, seeds, .. } = read;
        if seeds > features {
            return Err(format!(
                "--seeds {seeds}: expected at most one for each of {features} features"
            ));
        }
        Ok(read)
    }
}

impl Layer {
    /// Seeds in all states, with all blends of rows; with `mlps` every other one has an MLP.
    fn new(args: &Args, dtype: DType, device: &Device) -> Result<Self, Error> {
        let widest = args.features.div_ceil(args.seeds);
        let seed = |i: usize| Seed {
            state: SeedState::ALL[i * 7 % SeedState::ALL.len()],
            blueprint: Some(i * 3 % BLUEPRINTS),
            blend: match args.mlps && i.is_multiple_of(2) {
                true => Blend::Mlp,
                false => Blend::OF_ROWS[i / 2 % Blend::OF_ROWS.len()],
            },
            alpha: (i * 37 % 101) as f32 / 100.0,
        };
        let seeds: Vec<Seed> = (0..args.seeds).map(seed).collect();
        let mlps = args.mlps.then(|| {
            let shape = [BLUEPRINTS, mlp_rows(widest), widest];
            let weights = Distribution::Normal(0.0, 1.0 / (widest as f64).sqrt());
            Tensor::<3>::random(shape, weights, device).cast(dtype)
        });
        Ok(Self {
            on_device: Seeds::new(&seeds, device)?,
            seeds,
            blueprints: numbers([BLUEPRINTS, args.features], device).cast(dtype),
            mlps,
        })
    }
}

fn numbers(shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::random(shape, Distribution::Normal(0.3, 1.0), device)
}

fn main() -> Result<(), Error> {
    let args = Args::read()?;
    let opened = device::open(&args.device)?;
    println!("device: {}", opened.why);
    let device = &opened.device;
    let dtype = if device::is_cuda(device) { DType::BF16 } else { DType::F32 };
    let layer = Layer::new(&args, dtype, device)?;
    let x = numbers([args.rows, args.features], device).cast(dtype);

    let (y, telemetry) = layer.operator(&x)?;
    let (expected, seen) = layer.chunk_by_chunk(&x);
    // In 16 bits the loop rounds hidden units.
    expect_near("y", &y, &expected, if dtype == DType::F32 { 1e-4 } else { 2e-2 })?;
    expect_near("mean", &telemetry.mean, &seen.mean, 1e-4)?;
    expect_near("variance", &telemetry.variance, &seen.variance, 1e-4)?;

    let looped = time(device, || Ok(layer.chunk_by_chunk(&x)))?;
    let operator = time(device, || Ok(layer.operator(&x)?))?;
    let Args { rows, features, seeds, .. } = args;
    let name = if args.mlps { "kasmina_mlp" } else { "kasmina" };
    println!(
        "{rows}×{features} {dtype:?}, {seeds} seeds: loop {looped:.0} µs, {name} {operator:.1} µs, {:.1}×",
        looped / operator
    );
    Ok(())
}

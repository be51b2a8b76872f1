//! A layer within manifold-constrained hyper-connections: shapes, checks and times of a forward and a backward.
//!
//! ```text
//! cargo run --release --example mhc_block -- cuda 2x256x4x256
//! ```
//!
//! Checked, and an error where it is not so: kernels and reference agree in the streams that come out and in all
//! gradients, columns of h_res add up to 1 and rows do in the mean, and the gradient is what finite differences say. In bf16
//! on CUDA and f32 elsewhere; milliseconds of a call with its launches, the median of bursts in turns. A device without kernels has
//! the reference alone.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_nn::{HyperConnection, HyperConnectionConfig};
use kiln_ops::mhc_post::MAX_STREAMS;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::{device, oracle};
use std::time::Instant;

/// Most elements of x, and columns of the layer, whose weight is a square.
const LARGEST: usize = 1 << 28;
const WIDEST: usize = 1 << 13;
/// n·D with which α is 1.
const USUAL: f64 = 1024.0;
const BURSTS: usize = 7;
const CALLS: usize = 10;
/// How far kernels and reference may be apart, relative to the largest number.
const APART_F32: f64 = 1e-3;
const APART_BF16: f64 = 3e-2;
/// How far columns and rows of h_res may be from 1 after 20 repeats, which are few where a matrix begins near the
/// identity.
const COLUMNS: f64 = 1e-5;
const ROWS: f64 = 5e-3;
/// Of the finite differences, and how far they may be off.
const STEP: f64 = 1e-2;
const OFF: f64 = 1e-2;

type Failure = Box<dyn std::error::Error>;

struct Block {
    connection: HyperConnection,
    layer: Linear,
}

/// Streams after a block, and the gradients of x, φ, α, bias and the layer's weight if they are wanted.
struct Run {
    y: Tensor<4>,
    gradients: Vec<Vec<f64>>,
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

impl Block {
    fn new([_, _, streams, width]: [usize; 4], device: &Device) -> Self {
        // Logits are sums of n·D products: as far apart at every size.
        let alpha = (USUAL / (streams * width) as f64).sqrt();
        let connection = HyperConnectionConfig::new(width).with_streams(streams).with_alpha(alpha);
        let layer = LinearConfig::new(width, width).with_bias(false).init(device);
        Self { connection: connection.init(device), layer }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let dtype = x.dtype();
        // The layer is f32, as it is initialised.
        let layer = |x: Tensor<3>| silu(self.layer.forward(x.cast(DType::F32))).cast(dtype);
        self.connection.forward(x, layer)
    }

    /// Of Σ y·weights.
    fn run(&self, x: &Tensor<4>, weights: &Tensor<4>, backward: bool) -> Run {
        if !backward {
            return Run { y: self.forward(x.clone()), gradients: vec![] };
        }
        let x = x.clone().autodiff().require_grad();
        let y = self.forward(x.clone());
        let loss = (y.clone().cast(DType::F32) * weights.clone().autodiff()).sum();
        let gradients = loss.backward();
        let of = &self.connection;
        let wanted = "it was asked for";
        let all = vec![
            numbers(x.grad(&gradients).expect(wanted)),
            numbers(of.phi.val().grad(&gradients).expect(wanted)),
            numbers(of.alpha.val().grad(&gradients).expect(wanted)),
            numbers(of.bias.val().grad(&gradients).expect(wanted)),
            numbers(self.layer.weight.val().grad(&gradients).expect(wanted)),
        ];
        Run { y: y.inner(), gradients: all }
    }
}

fn check(what: &str, found: f64, allowed: f64) -> Result<(), Failure> {
    println!("{what}: {found:.1e}");
    match found <= allowed {
        true => Ok(()),
        false => Err(format!("{what}: {found:.1e}, {allowed:.1e} is allowed").into()),
    }
}

/// ⟨gradient, direction⟩ beside (loss(x + step·direction) − loss(x − step·direction)) / 2·step, in f32.
fn differences(block: &Block, x: &Tensor<4>, weights: &Tensor<4>) -> Result<(), Failure> {
    let x = x.clone().cast(DType::F32);
    let direction = Tensor::random(x.dims(), Distribution::Normal(0.0, 1.0), &x.device());
    let loss = |by: f64| -> f64 {
        let moved = x.clone() + direction.clone() * by;
        let y = block.run(&moved, weights, false).y;
        numbers(y).iter().zip(numbers(weights.clone())).map(|(y, weight)| y * weight).sum()
    };
    let expected = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
    let gradient = &block.run(&x, weights, true).gradients[0];
    let along = gradient.iter().zip(numbers(direction.clone())).map(|(g, d)| g * d);
    let size = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
    let off = (along.sum::<f64>() - expected).abs() / size;
    check("gradient along a direction, beside finite differences", off, OFF)
}

fn checks(block: &Block, x: &Tensor<4>, weights: &Tensor<4>) -> Result<(), Failure> {
    let of = block.connection.read(x.clone());
    println!(
        "h_in {:?}, h_post {:?}, h_res {:?}",
        of.h_in.dims(),
        of.h_post.dims(),
        of.h_res.dims()
    );
    let from_one = |dim: usize| -> Vec<f64> {
        numbers(of.h_res.clone().sum_dim(dim)).iter().map(|sum| (sum - 1.0).abs()).collect()
    };
    // Sinkhorn ends with the columns; rows of matrices whose logits are far apart need more repeats.
    let columns = from_one(2).into_iter().fold(0.0, f64::max);
    check("columns of h_res, furthest from 1", columns, COLUMNS)?;
    let rows = from_one(3);
    check("rows of h_res, from 1 in the mean", rows.iter().sum::<f64>() / rows.len() as f64, ROWS)?;
    differences(block, x, weights)?;
    if !device::is_cube(&x.device()) {
        println!("no kernels on this device: the reference is all there is");
        return Ok(());
    }
    let both = [Implementation::Fused, Implementation::Reference]
        .map(|which| policy::force(which, || block.run(x, weights, true)));
    let [fused, reference] = both;
    let allowed = if x.dtype() == DType::BF16 { APART_BF16 } else { APART_F32 };
    let apart = |a: &[f64], b: &[f64]| oracle::distance(a, b).relative;
    check(
        "streams, kernels beside reference",
        apart(&numbers(fused.y), &numbers(reference.y)),
        allowed,
    )?;
    let names = ["x", "φ", "α", "bias", "the layer's weight"];
    for (name, (a, b)) in names.iter().zip(fused.gradients.iter().zip(&reference.gradients)) {
        check(&format!("gradient of {name}, kernels beside reference"), apart(a, b), allowed)?;
    }
    Ok(())
}

/// Milliseconds of a call.
fn burst(block: &Block, x: &Tensor<4>, backward: bool) -> f64 {
    let device = x.device();
    let start = Instant::now();
    let mut kept = vec![];
    for _ in 0..CALLS {
        if backward {
            let x = x.clone().autodiff().require_grad();
            let gradients = block.forward(x.clone()).sum().backward();
            kept.push(x.grad(&gradients).expect("it was asked for"));
        } else {
            kept.push(block.forward(x.clone()).inner());
        }
    }
    device.sync().expect("the device answers");
    start.elapsed().as_secs_f64() * 1e3 / CALLS as f64
}

/// B, S, n and D of `BxSxNxD`.
fn sizes(shape: &str) -> Result<[usize; 4], Failure> {
    let sizes: Result<Vec<usize>, _> = shape.split('x').map(str::parse).collect();
    let sizes = sizes.ok().and_then(|sizes| <[usize; 4]>::try_from(sizes).ok());
    let fits = |[b, s, n, d]: &[usize; 4]| {
        let elements = [*b, *s, *n, *d].into_iter().try_fold(1usize, usize::checked_mul);
        (1..=MAX_STREAMS).contains(n)
            && *d <= WIDEST
            && elements.is_some_and(|all| (1..=LARGEST).contains(&all))
    };
    sizes.filter(fits).ok_or_else(|| {
        let expected =
            format!("N from 1 to {MAX_STREAMS}, D up to {WIDEST}, 1 to {LARGEST} elements in all");
        format!("`{shape}` is no shape BxSxNxD, expected {expected}").into()
    })
}

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}

fn run() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (name, shape) = match &arguments[..] {
        [] => ("auto", "2x256x4x256"),
        [name] => (&name[..], "2x256x4x256"),
        [name, shape] => (&name[..], &shape[..]),
        _ => return Err("expected a device, such as cuda or cpu, and a shape BxSxNxD".into()),
    };
    let sizes = sizes(shape)?;
    let opened = device::open(name)?;
    println!("device: {}", opened.why);
    let device = &opened.device;
    let dtype = if device::is_cuda(device) { DType::BF16 } else { DType::F32 };
    let x = Tensor::random(sizes, Distribution::Normal(0.0, 1.0), (device, dtype));
    let weights = Tensor::random(sizes, Distribution::Normal(0.0, 1.0), (device, DType::F32));
    let block = Block::new(sizes, &device.clone().autodiff());
    checks(&block, &x, &weights)?;

    let all = [("auto", Implementation::Auto), ("reference", Implementation::Reference)];
    for (what, backward) in [("forward", false), ("forward + backward", true)] {
        let mut times = [vec![], vec![]];
        for round in 0..=BURSTS {
            for (times, (_, which)) in times.iter_mut().zip(all) {
                let time = policy::force(which, || burst(&block, &x, backward));
                // The first compiles.
                if round > 0 {
                    times.push(time);
                }
            }
        }
        for (mut times, (name, _)) in times.into_iter().zip(all) {
            times.sort_by(f64::total_cmp);
            println!("{shape} {what}, {name}: {:.3} ms", times[BURSTS / 2]);
        }
    }
    Ok(())
}

//! How to test a kernel so that it cannot pass on memory that somebody else has written:
//!
//! ```text
//! cargo run --release --example tril_matmul -- wgpu    # or cuda
//! ```
//!
//! `kiln bench tril_matmul --ladder` asks the same of kernels that cheat; docs/tril_matmul.md has the
//! story.

use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_ops::launch::audit::Audit;
use kiln_ops::oracle::distance;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::tril_matmul;
use kiln_ops::tril_matmul::oracle;
use kiln_ops::{OpError, device};

const N: usize = 96;

/// Runs one implementation on numbers that nobody has seen before, against float64.
fn check(implementation: Implementation, device: &Device) -> Result<f64, OpError> {
    let random = || Tensor::<2>::random([N, N], Distribution::Normal(0.0, 1.0), device);
    let (a, b) = (random(), random());
    let y = policy::force(implementation, || tril_matmul(a.clone(), b.clone()))?;
    let numbers = |tensor: Tensor<2>| tensor.into_data().iter::<f64>().collect::<Vec<_>>();
    let expected = oracle::forward(&numbers(a), &numbers(b), [1, N]);
    let distance = distance(&numbers(y), &expected);
    assert!(distance.within(DType::F32, 1), "{implementation}: {distance:?}");
    Ok(distance.relative)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "wgpu".into());
    let opened = device::open(&name)?;
    println!("device: {}", opened.why);
    let (device, kernel, reference) =
        (opened.device, Implementation::Fused, Implementation::Reference);

    // Both orders, always on other numbers: what one run leaves in memory is wrong for the next.
    for order in [[kernel, reference, kernel], [reference, kernel, reference]] {
        for implementation in order {
            println!("{implementation}: off by {:.1e}", check(implementation, &device)?);
        }
    }

    // Outputs are handed out poisoned: what was never written shows, and so does what was written
    // outside.
    let audit = Audit::begin();
    check(kernel, &device)?;
    for finding in audit.finish() {
        println!("audit: {finding}");
        assert!(finding.clean());
    }
    Ok(())
}

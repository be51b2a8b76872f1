//! Which implementation of an operator runs, chosen through the policy, and how far the two are
//! apart:
//!
//! ```text
//! cargo run --release --example fused_or_reference -- wgpu
//! ```
//!
//! On the CPU there is no kernel, and asking for it is an error.

use burn::tensor::{Device, Distribution, Tensor};
use kiln_ops::policy::{self, Implementation, Policy};
use kiln_ops::prelude::{OpError, add_rms_norm};
use kiln_ops::{device, oracle};

type Pair = (Vec<f64>, Vec<f64>);

/// Sum and norm of the same inputs, on the host.
fn run(x: &Tensor<2>, residual: &Tensor<2>, weight: &Tensor<1>) -> Result<Pair, OpError> {
    let (sum, y) = add_rms_norm(x.clone(), residual.clone(), weight.clone(), 1e-5)?;
    let numbers = |tensor: Tensor<2>| tensor.into_data().iter::<f64>().collect();
    Ok((numbers(sum), numbers(y)))
}

fn random(device: &Device) -> Tensor<2> {
    Tensor::random([64, 768], Distribution::Normal(0.0, 1.0), device)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let opened = device::open(&name)?;
    println!("device: {}", opened.why);
    let device = &opened.device;
    let (x, residual, weight) = (random(device), random(device), Tensor::ones([768], device));

    // For one closure on this thread, whatever the policy of the process is.
    let reference = policy::force(Implementation::Reference, || run(&x, &residual, &weight))?;
    match policy::force(Implementation::Fused, || run(&x, &residual, &weight)) {
        Ok(fused) => {
            let distance = |a: &[f64], b: &[f64]| oracle::distance(a, b).relative;
            println!(
                "sum: kernel and reference differ by {:.1e}",
                distance(&fused.0, &reference.0)
            );
            println!(
                "y:   kernel and reference differ by {:.1e}",
                distance(&fused.1, &reference.1)
            );
        }
        Err(error) => println!("refused: {error}"),
    }

    // For the whole process: every operator by its kernel where there is one, but this one not.
    let ops = [("add_rms_norm".to_string(), Implementation::Reference)].into();
    policy::set(Policy { ops, ..Policy::default() });
    let again = run(&x, &residual, &weight)?;
    println!("under the policy the reference ran: {}", again == reference);
    Ok(())
}

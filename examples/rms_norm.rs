//! One operator, forward and backward, on whatever device there is:
//!
//! ```text
//! cargo run --release --example rms_norm            # CUDA if it is there, else the CPU
//! cargo run --release --example rms_norm -- wgpu
//! ```

use burn::tensor::{Distribution, Tensor};
use kiln_ops::device;
use kiln_ops::prelude::rms_norm;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let opened = device::open(&name)?;
    println!("device: {}", opened.why);

    // Tensors of a device with autodiff record what happens to them.
    let device = opened.device.autodiff();
    let x = Tensor::<2>::random([4, 8], Distribution::Normal(0.0, 1.0), &device).require_grad();
    let weight = Tensor::<1>::ones([8], &device).require_grad();

    let y = rms_norm(x.clone(), weight.clone(), 1e-5)?;
    println!("mean square of each row: {}", y.clone().square().mean_dim(1).into_data());

    let grads = y.exp().sum().backward();
    let dx = x.grad(&grads).ok_or("x has no gradient")?;
    let dweight = weight.grad(&grads).ok_or("weight has no gradient")?;
    // The norm of a row does not change with its length: the gradient is orthogonal to the row.
    println!("x · dx of each row: {}", (x.inner() * dx).sum_dim(1).into_data());
    println!("dweight: {}", dweight.into_data());

    // A wrong call is an error that says what was expected.
    let wrong = Tensor::<1>::ones([9], &device);
    if let Err(error) = rms_norm(Tensor::<2>::ones([4, 8], &device), wrong, 1e-5) {
        println!("refused: {error}");
    }
    Ok(())
}

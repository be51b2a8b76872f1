//! Numbers of the tests, and where they run.

use burn::tensor::{Device, Tensor, TensorData};
use kiln_ops::device;

/// The same numbers every time, between -1 and 1.
pub fn numbers(count: usize, start: usize) -> Vec<f32> {
    (start..start + count).map(|i| (((i * 7919 + 13) % 1009) as f32) / 504.5 - 1.0).collect()
}

/// A tensor of them.
pub fn tensor<const D: usize>(shape: [usize; D], start: usize, device: &Device) -> Tensor<D> {
    let data = numbers(shape.iter().product(), start);
    Tensor::from_data(TensorData::new(data, shape), device)
}

/// Runs a test on the CPU and on the device that runs kernels.
pub fn on_each(test: impl Fn(Device)) {
    let kernels = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
    let kernels = kernels.map(|opened| opened.device);
    for device in std::iter::once(Device::flex()).chain(kernels) {
        // Seen where it fails.
        println!("on {device:?}");
        test(device);
    }
}

//! Numbers of the tests.

use burn::tensor::{Device, Tensor, TensorData};

/// The same numbers every time, between -1 and 1.
pub fn numbers(count: usize, start: usize) -> Vec<f32> {
    (start..start + count).map(|i| (((i * 7919 + 13) % 1009) as f32) / 504.5 - 1.0).collect()
}

/// A tensor of them.
pub fn tensor<const D: usize>(shape: [usize; D], start: usize, device: &Device) -> Tensor<D> {
    let data = numbers(shape.iter().product(), start);
    Tensor::from_data(TensorData::new(data, shape), device)
}

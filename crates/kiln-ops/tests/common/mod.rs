//! What the operator tests share: devices, data, comparison with the oracles.

mod basics;

pub use basics::{devices, numbers};
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use kiln_ops::oracle::distance;

/// The float types a device has.
pub fn dtypes(device: &Device) -> Vec<DType> {
    [DType::F32, DType::BF16, DType::F16]
        .into_iter()
        .filter(|d| device.supports_dtype(*d))
        .collect()
}

/// A tensor of these numbers, and the numbers as it holds them.
pub fn tensor<const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> (Tensor<D>, Vec<f64>) {
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
    let held = data.iter::<f64>().collect();
    (Tensor::from_data(data, (device, dtype)), held)
}

/// The numbers of a tensor.
pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Fails unless `out` is as near to `reference` as `roundings` roundings to `dtype` leave it.
pub fn assert_near(out: &[f64], reference: &[f64], dtype: DType, roundings: u32, what: &str) {
    let distance = distance(out, reference);
    assert!(distance.within(dtype, roundings), "{what}, {dtype:?}: {distance:?}");
}

/// The scalar whose gradient at `y` is `dy`.
pub fn pull<const D: usize>(y: Tensor<D>, dy: &Tensor<D>) -> Tensor<1> {
    let dy = dy.clone();
    (y.cast(DType::F32) * dy.cast(DType::F32)).sum()
}

/// Fills freed memory with NaN, so that a kernel that leaves part of its output cannot pass.
pub fn poison(elements: usize, dtype: DType, device: &Device) {
    let poisoned: Vec<Tensor<1>> = (0..4)
        .map(|_| {
            Tensor::<1>::random([elements.max(1)], Distribution::Default, (device, dtype))
                * f32::NAN
        })
        .collect();
    for tensor in &poisoned {
        let _ = tensor.to_data();
    }
}

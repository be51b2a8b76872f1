//! What the operator tests share: devices, data, comparison with the oracles.

pub mod families;
pub mod orders;
pub mod timing;

use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use kiln_ops::oracle::distance;

/// The device named by `KILN_DEVICE`, else the CPU and, where a graphics driver is found, wgpu.
#[track_caller]
pub fn devices() -> Vec<Device> {
    let open = |name: &str| kiln_ops::device::open(name).map(|opened| opened.device);
    if let Ok(name) = std::env::var("KILN_DEVICE") {
        kiln_test::only(&[&name]);
        return vec![open(&name).unwrap_or_else(|e| panic!("KILN_DEVICE: {e}"))];
    }
    kiln_test::only(&["the CPU", "wgpu"]);
    let mut devices = vec![open("cpu").expect("the CPU is always there")];
    match open("wgpu") {
        Ok(device) => devices.push(device),
        Err(error) => kiln_test::skip("wgpu", error),
    }
    devices
}

/// Those of them that run kernels.
#[track_caller]
pub fn kernel_devices() -> Vec<Device> {
    kiln_test::or_skip("kernels", devices().into_iter().filter(kiln_ops::device::is_cube))
}

/// Those of them that have an element type. CUDA has all of them.
#[track_caller]
pub fn those_with(dtype: DType) -> Vec<Device> {
    kiln_test::or_skip("cuda", devices().into_iter().filter(|d| d.supports_dtype(dtype)))
}

/// Repeatable numbers, about normal, around `mean`.
pub fn numbers(n: usize, seed: u64, mean: f64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..n).map(|_| mean + 1.7 * ((0..4).map(|_| uniform()).sum::<f64>() - 2.0)).collect()
}

/// The float types a device has. CUDA has all of them.
#[track_caller]
pub fn dtypes(device: &Device) -> Vec<DType> {
    let all = [DType::F32, DType::BF16, DType::F16].into_iter();
    let (there, missing): (Vec<_>, Vec<_>) = all.partition(|dtype| device.supports_dtype(*dtype));
    if kiln_ops::device::is_cuda(device) && !missing.is_empty() {
        kiln_test::skip("cuda", format!("{missing:?} on {device:?}"));
    }
    there
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

/// Fails unless `out` is as near to `reference` as `roundings` roundings to `dtype` leave it; of 16 bits at most 24,
/// a tenth: of 256 zeros would be near.
pub fn assert_near(out: &[f64], reference: &[f64], dtype: DType, roundings: u32, what: &str) {
    let distance = distance(out, reference);
    let roundings = if dtype == DType::F32 { roundings } else { roundings.min(24) };
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

//! Where tests run, and numbers for them.

use burn::tensor::Device;

/// The device named by `KILN_DEVICE`, else the CPU and, where a graphics driver is found, wgpu.
#[track_caller]
pub fn devices() -> Vec<Device> {
    let open = |name: &str| kiln_ops::device::open(name).map(|opened| opened.device);
    if let Ok(name) = std::env::var("KILN_DEVICE") {
        return vec![open(&name).unwrap_or_else(|e| panic!("KILN_DEVICE: {e}"))];
    }
    let mut devices = vec![open("cpu").expect("the CPU is always there")];
    match open("wgpu") {
        Ok(device) => devices.push(device),
        Err(error) => kiln_test::skip("wgpu", error),
    }
    devices
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

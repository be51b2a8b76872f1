//! What the device can do at best, measured in the same run.

#[cfg(feature = "cube")]
use super::timer;
use burn::tensor::{DType, Device};
#[cfg(feature = "cube")]
use burn::tensor::{Distribution, Tensor};
#[cfg(feature = "cube")]
use kiln_ops::rms_norm::rms_norm;
use serde::{Deserialize, Serialize};

/// Ceilings of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// A copy of a large tensor: bytes read and written, GB/s.
    pub copy_gbps: f64,
    /// Burn's own matmul of large squares, TFLOP/s.
    pub matmul_tflops: f64,
    /// The smallest launch, microseconds.
    pub launch_us: f64,
}

impl Ceilings {
    /// Measures them on a CUDA `device` in `dtype`; other devices have none that this project knows
    /// how to measure well.
    ///
    /// # Errors
    ///
    /// One line if the device fails.
    #[cfg(feature = "cube")]
    pub fn measure(device: &Device, dtype: DType) -> Result<Option<Self>, String> {
        if !kiln_ops::device::is_cuda(device) {
            return Ok(None);
        }
        let (elements, side) = (1 << 28, 8192);
        let random =
            |shape| Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), (device, dtype));
        let x = random([elements / 4096, 4096]);
        let copy = best(device, 30, || super::pull::copy(x.clone()))?;
        drop(x);
        let (a, b) = (random([side, side]), random([side, side]));
        let matmul = best(device, 10, || a.clone().matmul(b.clone()))?;
        let row = random([1, 16]);
        let weight = Tensor::<1>::ones([16], (device, dtype));
        let launch = best(device, 500, || {
            rms_norm(row.clone(), weight.clone(), 1e-5).expect("the shapes fit")
        })?;
        Ok(Some(Self {
            copy_gbps: 2.0 * (elements * dtype.size()) as f64 / copy / 1e9,
            matmul_tflops: 2.0 * (side as f64).powi(3) / matmul / 1e12,
            launch_us: launch * 1e6,
        }))
    }
}

#[cfg(not(feature = "cube"))]
impl Ceilings {
    /// Without CubeCL there is no device whose ceilings are measured.
    ///
    /// # Errors
    ///
    /// None.
    pub fn measure(_device: &Device, _dtype: DType) -> Result<Option<Self>, String> {
        Ok(None)
    }
}

/// Seconds of a call: the median of some bursts.
#[cfg(feature = "cube")]
fn best(device: &Device, calls: usize, call: impl Fn() -> Tensor<2> + Sync) -> Result<f64, String> {
    let mut times = vec![];
    for _ in 0..7 {
        // Our own operations run whether their result is seen or not, Burn's matmul too.
        let burst = || (0..calls).map(|_| drop(call())).count();
        times.push(timer::time(device, burst)?.1 / calls as f64);
    }
    times.remove(0);
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

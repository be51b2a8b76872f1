//! CUDA devices: whether there is one, what it is, and what is missing.

use super::{DeviceError, Opened, facts};
use burn::tensor::Device;
use cudarc::driver;
use cudarc::nvrtc::sys;

/// The device of this index.
pub(super) fn open(index: usize) -> Result<Opened, DeviceError> {
    let name = format!("cuda:{index}");
    let model =
        model(index).map_err(|reason| DeviceError::Unavailable { name: name.clone(), reason })?;
    Ok(Opened { device: Device::cuda(index), why: format!("{name} ({model})"), name })
}

/// The kind of the CUDA device of this index, as [`kind`](super::kind) has it, without opening it; `None` if there is
/// no such GPU.
pub(crate) fn cuda_kind(index: usize) -> Option<String> {
    gpu(index).ok().map(|part| facts::kind_of("cuda", &part))
}

/// The version of NVRTC, which compiles kernels for CUDA; `None` where it is not in this build or not here.
pub fn nvrtc() -> Option<String> {
    // SAFETY: it only tries to open a shared library.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both numbers outlive the call.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
    Some(format!("{major}.{minor}"))
}

/// The GPU's name, or what CUDA lacks here to compile for it.
fn model(index: usize) -> Result<String, String> {
    let name = gpu(index)?;
    // SAFETY: it only tries to open a shared library.
    if !unsafe { sys::is_culib_present() } {
        return Err("NVRTC (libnvrtc, of the CUDA toolkit) was not found".into());
    }
    let toolkit = std::env::var("CUDA_PATH").unwrap_or_else(|_| "/usr/local/cuda".into());
    let header = std::path::Path::new(&toolkit).join("include").join("cuda_runtime.h");
    if !header.exists() {
        return Err(format!(
            "{} was not found: set CUDA_PATH to the CUDA toolkit",
            header.display()
        ));
    }
    Ok(name)
}

/// The GPU's name, or why there is none.
fn gpu(index: usize) -> Result<String, String> {
    // SAFETY: it only tries to open a shared library.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err("the NVIDIA driver (libcuda) was not found".into());
    }
    driver::result::init().map_err(|e| format!("the NVIDIA driver does not start: {e}"))?;
    let count = driver::result::device::get_count().map_err(|e| format!("no GPU listed: {e}"))?;
    if index >= count as usize {
        return Err(format!("there are {count} CUDA devices, no index {index}"));
    }
    let device = driver::result::device::get(index as i32).map_err(|e| e.to_string())?;
    driver::result::device::get_name(device).map_err(|e| e.to_string())
}

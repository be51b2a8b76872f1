//! Opening a device by name, as every program of Kiln does it: `auto`, `cuda`, `cuda:1`, `wgpu`,
//! `vulkan`, `cpu`, `ndarray`; and what is known of one that is open.
//!
//! What a device needs is looked at before it is opened, so that a missing driver or toolkit is an
//! error that says so.

mod facts;

#[cfg(feature = "cube")]
pub(crate) use facts::client;
#[cfg(feature = "cube")]
pub use facts::{Hardware, hardware};
pub use facts::{is_cube, is_cuda, kind, memory, name, part, pci_address};

use burn::tensor::Device;

/// An open device, and why it is this one.
#[derive(Debug, Clone)]
pub struct Opened {
    /// The device.
    pub device: Device,
    /// Its name as one may give it: `cuda:0`, `wgpu`, `cpu`.
    pub name: String,
    /// One line: what was taken and why.
    pub why: String,
}

/// Why a device cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No such device.
    #[error("unknown device `{0}`, expected auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray")]
    Unknown(String),
    /// The program was built without it.
    #[error("device `{name}` is not part of this build: build with `--features {feature}`")]
    NotBuilt {
        /// The device.
        name: String,
        /// The Cargo feature that adds it.
        feature: &'static str,
    },
    /// The machine lacks something.
    #[error("device `{name}` cannot be used: {reason}")]
    Unavailable {
        /// The device.
        name: String,
        /// What is missing.
        reason: String,
    },
}

/// Opens the device called `name`.
///
/// `auto` takes CUDA if its driver, NVRTC and headers are there and the CPU otherwise.
///
/// # Errors
///
/// [`DeviceError`] if there is no such device, the build does not have it, or the machine lacks
/// what it needs.
pub fn open(name: &str) -> Result<Opened, DeviceError> {
    let (kind, index) = match name.split_once(':') {
        Some(("cuda", index)) => match index.parse::<usize>() {
            Ok(index) => ("cuda", index),
            Err(_) => return Err(DeviceError::Unknown(name.into())),
        },
        Some(_) => return Err(DeviceError::Unknown(name.into())),
        None => (name, 0),
    };
    match kind {
        "auto" => auto(),
        "cuda" => cuda(index),
        "wgpu" => wgpu(),
        "vulkan" => vulkan(),
        "cpu" => cpu(),
        "ndarray" => ndarray(),
        _ => Err(DeviceError::Unknown(name.into())),
    }
}

fn auto() -> Result<Opened, DeviceError> {
    match cuda(0) {
        Ok(mut cuda) => {
            cuda.why = format!("{}: CUDA's driver, NVRTC and headers are there", cuda.why);
            Ok(cuda)
        }
        Err(error) => {
            let mut cpu = cpu()?;
            let reason = match error {
                DeviceError::Unavailable { reason, .. } => format!("no CUDA here ({reason})"),
                _ => "this build has no CUDA".into(),
            };
            cpu.why = format!("{}: {reason}", cpu.why);
            Ok(cpu)
        }
    }
}

#[cfg(not(all(
    feature = "flex",
    feature = "ndarray",
    feature = "wgpu",
    feature = "vulkan",
    feature = "cuda"
)))]
fn not_built(name: &str, feature: &'static str) -> Result<Opened, DeviceError> {
    Err(DeviceError::NotBuilt { name: name.into(), feature })
}

fn cpu() -> Result<Opened, DeviceError> {
    #[cfg(feature = "flex")]
    return Ok(Opened {
        device: Device::flex(),
        name: "cpu".into(),
        why: "cpu (burn-flex)".into(),
    });
    #[cfg(not(feature = "flex"))]
    not_built("cpu", "flex")
}

#[allow(deprecated)] // burn-ndarray is deprecated upstream; it stays for those who test with it
fn ndarray() -> Result<Opened, DeviceError> {
    #[cfg(feature = "ndarray")]
    return Ok(Opened { device: Device::ndarray(), name: "ndarray".into(), why: "ndarray".into() });
    #[cfg(not(feature = "ndarray"))]
    not_built("ndarray", "ndarray")
}

fn wgpu() -> Result<Opened, DeviceError> {
    #[cfg(feature = "wgpu")]
    {
        use burn::tensor::{DeviceKind, DeviceType};
        let devices = Device::enumerate(DeviceType::Wgpu).into_vec();
        if devices.is_empty() {
            return Err(DeviceError::Unavailable {
                name: "wgpu".into(),
                reason: "no graphics driver found (on Debian, mesa-vulkan-drivers has one that \
                         runs on the CPU)"
                    .into(),
            });
        }
        let gpu = devices.into_iter().find(|device| !is_software(device));
        let (device, what) = match gpu {
            Some(device) => (device, "a GPU"),
            None => (Device::wgpu(DeviceKind::Cpu), "a software driver on the CPU"),
        };
        let adapter = device.identity().map_or_else(String::new, |i| format!(" {}", i.name));
        let why = format!("wgpu:{adapter}, {what}");
        Ok(Opened { device, name: "wgpu".into(), why })
    }
    #[cfg(not(feature = "wgpu"))]
    not_built("wgpu", "wgpu")
}

#[cfg(feature = "wgpu")]
fn is_software(device: &Device) -> bool {
    use burn::backend::DispatchDevice;
    match device.as_dispatch() {
        DispatchDevice::Cube(cubecl::Device::Wgpu(device)) => {
            matches!(device.kind, cubecl::wgpu::WgpuDeviceKind::Cpu)
        }
        _ => false,
    }
}

fn vulkan() -> Result<Opened, DeviceError> {
    #[cfg(feature = "vulkan")]
    {
        use burn::tensor::DeviceType;
        let mut devices = Device::enumerate(DeviceType::Vulkan).into_vec();
        devices.retain(|device| !is_software(device));
        if devices.is_empty() {
            let reason = "no Vulkan GPU found (the software driver lavapipe cannot run SPIR-V \
                          kernels; use `wgpu` there)";
            return Err(DeviceError::Unavailable { name: "vulkan".into(), reason: reason.into() });
        }
        Ok(Opened { device: devices.remove(0), name: "vulkan".into(), why: "vulkan".into() })
    }
    #[cfg(not(feature = "vulkan"))]
    not_built("vulkan", "vulkan")
}

fn cuda(index: usize) -> Result<Opened, DeviceError> {
    #[cfg(feature = "cuda")]
    {
        let name = format!("cuda:{index}");
        let model = cuda_model(index)
            .map_err(|reason| DeviceError::Unavailable { name: name.clone(), reason })?;
        Ok(Opened { device: Device::cuda(index), why: format!("{name} ({model})"), name })
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = index;
        not_built("cuda", "cuda")
    }
}

/// The kind of the CUDA device of this index, as [`kind`] has it, without opening it; `None` if there is
/// no such GPU.
pub(crate) fn cuda_kind(index: usize) -> Option<String> {
    #[cfg(feature = "cuda")]
    return gpu(index).ok().map(|part| facts::kind_of("cuda", &part));
    #[cfg(not(feature = "cuda"))]
    {
        let _ = index;
        None
    }
}

/// The GPU's name, or what CUDA lacks here to compile for it.
#[cfg(feature = "cuda")]
fn cuda_model(index: usize) -> Result<String, String> {
    use cudarc::nvrtc;
    let name = gpu(index)?;
    // SAFETY: it only tries to open a shared library.
    if !unsafe { nvrtc::sys::is_culib_present() } {
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

/// The version of NVRTC, which compiles kernels for CUDA; `None` where it is not in this build or not here.
pub fn nvrtc() -> Option<String> {
    #[cfg(feature = "cuda")]
    {
        use cudarc::nvrtc::sys;
        // SAFETY: it only tries to open a shared library.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers outlive the call.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
        Some(format!("{major}.{minor}"))
    }
    #[cfg(not(feature = "cuda"))]
    None
}

/// The GPU's name, or why there is none.
#[cfg(feature = "cuda")]
fn gpu(index: usize) -> Result<String, String> {
    use cudarc::driver;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_refused() {
        for name in ["gpu", "cuda:x", "cpu:1", ""] {
            assert_eq!(open(name).unwrap_err(), DeviceError::Unknown(name.into()));
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn auto_always_finds_something() {
        let opened = open("auto").unwrap();
        assert!(opened.name == "cpu" || is_cuda(&opened.device), "{opened:?}");
    }
}

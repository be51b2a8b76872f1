//! What is known of an open device: whose it is, what kind of part it is, and what it can do.

use burn::backend::DispatchDevice;
use burn::tensor::Device;
#[cfg(feature = "cube")]
use cubecl::client::Client;
#[cfg(feature = "cube")]
use cubecl::ir::features::Tma;

/// Whether kernels can run on this device: CUDA, wgpu and Vulkan are CubeCL devices.
pub fn is_cube(device: &Device) -> bool {
    fn inner(device: &DispatchDevice) -> bool {
        match device {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(_) => true,
            DispatchDevice::Autodiff(device) => inner(device),
            #[allow(unreachable_patterns)] // every variant is behind a feature
            _ => false,
        }
    }
    inner(device.as_dispatch())
}

/// Whether this is a CUDA device.
pub fn is_cuda(device: &Device) -> bool {
    fn inner(device: &DispatchDevice) -> bool {
        match device {
            #[cfg(feature = "cuda")]
            DispatchDevice::Cube(device) => matches!(device, cubecl::Device::Cuda(_)),
            DispatchDevice::Autodiff(device) => inner(device),
            #[allow(unreachable_patterns)] // every variant is behind a feature
            _ => false,
        }
    }
    inner(device.as_dispatch())
}

/// Short name of a device, as in `--device`: `cuda:0`, `wgpu`, `cpu`, `ndarray`.
pub fn name(device: &Device) -> String {
    fn inner(device: &DispatchDevice) -> String {
        match device {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => match device {
                #[cfg(feature = "cuda")]
                cubecl::Device::Cuda(device) => format!("cuda:{}", device.index),
                other => runtime(&other.client()).to_string(),
            },
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => "cpu".into(),
            #[cfg(feature = "ndarray")]
            DispatchDevice::NdArray(_) => "ndarray".into(),
            DispatchDevice::Autodiff(device) => inner(device),
            #[allow(unreachable_patterns)]
            other => format!("{other:?}").to_lowercase(),
        }
    }
    inner(device.as_dispatch())
}

/// The memory of a device in bytes, where it tells.
pub fn memory(device: &Device) -> Option<u64> {
    #[cfg(feature = "cube")]
    return client(device)?.properties().memory.max_memory();
    #[cfg(not(feature = "cube"))]
    {
        let _ = device;
        None
    }
}

/// The kind of a device, equal for all of one model: `cuda NVIDIA H200`, `wgpu llvmpipe (LLVM 15.0.6, 256
/// bits)`, `cpu`. What was measured on one holds for the others.
pub fn kind(device: &Device) -> String {
    #[cfg(feature = "cube")]
    if let Some(client) = client(device) {
        return kind_of(runtime(&client), &client.properties().identity.name);
    }
    name(device)
}

/// What a part calls itself: `NVIDIA H200`, `CPU` where no kernels run.
pub fn part(device: &Device) -> String {
    #[cfg(feature = "cube")]
    if let Some(client) = client(device) {
        return client.properties().identity.name.clone();
    }
    let _ = device;
    "CPU".into()
}

/// Address of a card on its bus, as `nvidia-smi` takes it; none where there is no card.
pub fn pci_address(device: &Device) -> Option<String> {
    #[cfg(feature = "cube")]
    if let Some(client) = client(device) {
        let card = client.properties().identity.physical.as_ref()?;
        return Some(card.pci_address.as_ref()?.to_string());
    }
    let _ = device;
    None
}

/// The kind of a device of a runtime, `cuda` or `wgpu`, by the name that the part gives itself.
#[cfg(feature = "cube")]
pub(super) fn kind_of(runtime: &str, part: &str) -> String {
    format!("{runtime} {part}")
}

/// The client of a CubeCL device.
#[cfg(feature = "cube")]
pub(crate) fn client(device: &Device) -> Option<Client> {
    fn inner(device: &DispatchDevice) -> Option<Client> {
        match device {
            DispatchDevice::Cube(device) => Some(device.client()),
            DispatchDevice::Autodiff(device) => inner(device),
            #[allow(unreachable_patterns)] // every variant is behind a feature
            _ => None,
        }
    }
    inner(device.as_dispatch())
}

/// `cuda` or `wgpu`, without the language that its kernels are compiled to.
#[cfg(feature = "cube")]
fn runtime(client: &Client) -> &'static str {
    client.name().split('<').next().unwrap_or("cube")
}

/// What the hardware of a CubeCL device can do.
#[cfg(feature = "cube")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hardware {
    /// Whether kernels may hold PTX: CUDA alone takes it.
    pub ptx: bool,
    /// Major and minor compute capability of a CUDA device.
    pub compute_capability: Option<(u32, u32)>,
    /// Multiprocessors, where the device tells.
    pub multiprocessors: Option<usize>,
    /// Copies of tiles by the tensor memory accelerator: compute capability 9.0 and later.
    pub tma: bool,
    /// `cp.async`: compute capability 8.0 and later.
    pub async_copies: bool,
    /// Products of a warpgroup: compute capability 9.0 and no other.
    pub wgmma: bool,
}

#[cfg(feature = "cube")]
impl Hardware {
    /// Of the device behind a client.
    pub fn of(client: &Client) -> Self {
        let ptx = client.name() == "cuda";
        let (features, properties) = (client.features(), client.properties());
        let compute_capability =
            if ptx { capability(&properties.identity.fingerprint) } else { None };
        let tma = ptx && features.tma.contains(Tma::Base);
        Self {
            ptx,
            compute_capability,
            multiprocessors: properties.hardware.num_streaming_multiprocessors.map(|n| n as usize),
            tma,
            async_copies: ptx && features.copy_async,
            wgmma: tma && compute_capability == Some((9, 0)),
        }
    }
}

/// What the hardware of a device can do; `None` where no kernels run.
#[cfg(feature = "cube")]
pub fn hardware(device: &Device) -> Option<Hardware> {
    client(device).map(|client| Hardware::of(&client))
}

/// The compute capability in what CUDA compiles for: `ptx_sm90`.
#[cfg(feature = "cube")]
fn capability(fingerprint: &str) -> Option<(u32, u32)> {
    let number: u32 = fingerprint.strip_prefix("ptx_sm")?.parse().ok()?;
    Some((number / 10, number % 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "cube")]
    #[test]
    fn capabilities_are_read_from_what_is_compiled_for() {
        assert_eq!(capability("ptx_sm90"), Some((9, 0)));
        assert_eq!(capability("ptx_sm89"), Some((8, 9)));
        assert_eq!(capability("ptx_sm120"), Some((12, 0)));
        assert_eq!(capability("spirv_65541_0"), None);
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_cpu_is_its_own_kind() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            assert_eq!((name(&device), kind(&device)), ("cpu".into(), "cpu".into()));
            assert!(!is_cube(&device) && !is_cuda(&device));
            assert_eq!(memory(&device), None);
        }
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn a_kind_is_the_runtime_and_the_part() {
        let opened = match crate::device::open("wgpu") {
            Ok(opened) => opened,
            Err(error) => return kiln_test::skip("wgpu", error),
        };
        let part = opened.device.identity().unwrap().name;
        for device in [opened.device.clone(), opened.device.autodiff()] {
            assert_eq!(kind(&device), format!("wgpu {part}"));
            assert_eq!(name(&device), "wgpu");
            assert!(is_cube(&device) && !is_cuda(&device));
            let hardware = hardware(&device).unwrap();
            assert!(!hardware.ptx && !hardware.tma && hardware.compute_capability.is_none());
        }
    }
}

//! CUDA devices: whether there is one, what it is, and what is missing.

use super::{DeviceError, Opened, facts};
use burn::tensor::Device;
use cudarc::driver::result::{device, function, module, primary_ctx};
use cudarc::driver::{self, DriverError, sys as cuda};
use cudarc::nvrtc::sys;
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::{LazyLock, Mutex, PoisonError};

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

/// What a cluster takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cluster {
    pub(crate) cubes: usize,
    /// Of a cube.
    pub(crate) units: usize,
    /// Bytes of shared memory of a cube.
    pub(crate) shared: usize,
}

/// How many clusters the GPU of this index runs at a time: the multiprocessors of one have to be neighbours, and how many
/// neighbours there are differs from GPU to GPU of a model. `None` where the driver does not say.
pub(crate) fn clusters(index: usize, cluster: Cluster) -> Option<usize> {
    static KNOWN: LazyLock<Mutex<HashMap<(usize, Cluster), usize>>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&count) = known().get(&(index, cluster)) {
        return Some(count);
    }
    // SAFETY: it only tries to open a shared library.
    if !unsafe { driver::sys::is_culib_present() } {
        return None;
    }
    let count = ask_clusters(index, cluster).ok()?;
    known().insert((index, cluster), count);
    Some(count)
}

/// Asks the driver, in the context that everybody uses; this thread's is afterwards the one that it was before.
fn ask_clusters(index: usize, of: Cluster) -> Result<usize, DriverError> {
    let device = device::get(index as i32)?;
    // SAFETY: what is retained is released, and what is pushed is popped, in any case.
    unsafe {
        let context = primary_ctx::retain(device)?;
        let asked = cuda::cuCtxPushCurrent_v2(context).result().and_then(|()| {
            let asked = ask_here(of);
            let mut popped = std::ptr::null_mut();
            cuda::cuCtxPopCurrent_v2(&mut popped).result().and(asked)
        });
        primary_ctx::release(device).and(asked)
    }
}

/// The same in the context that is current. The driver wants a kernel: one that does nothing.
fn ask_here(of: Cluster) -> Result<usize, DriverError> {
    const NOTHING: &CStr =
        c".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n";
    let shared = cuda::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let cluster_dim =
        cuda::CUlaunchAttributeValue_union__bindgen_ty_1 { x: of.cubes as u32, y: 1, z: 1 };
    let mut attribute = cuda::CUlaunchAttribute {
        id: cuda::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: cuda::CUlaunchAttributeValue { clusterDim: cluster_dim },
    };
    let config = cuda::CUlaunchConfig {
        gridDimX: of.cubes as u32,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: of.units as u32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: of.shared as u32,
        hStream: std::ptr::null_mut(),
        attrs: &mut attribute,
        numAttrs: 1,
    };
    let mut count = 0;
    // SAFETY: all that is pointed to outlives the calls, the value of the attribute is what its id says, and the kernel is
    // not used after its module.
    unsafe {
        let module = module::load_data(NOTHING.as_ptr().cast())?;
        let asked = module::get_function(module, c"nothing".into()).and_then(|nothing| {
            function::set_function_attribute(nothing, shared, of.shared as i32)?;
            cuda::cuOccupancyMaxActiveClusters(&mut count, nothing, &config).result()
        });
        module::unload(module).and(asked)?;
    }
    Ok(count.max(0) as usize)
}

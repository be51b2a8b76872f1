//! A CUDA device that is not there: launches compile the kernel to CUDA C++ and are dropped.

use cubecl::client::Client;
use cubecl::ir::features::{Plane, Tma};
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, OpaqueType,
};
use cubecl::prelude::CubeCount;
use cubecl::server::*;
use cubecl::{Compiler, CubeKernel};
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl_common::profile::{ProfileDuration, TimingMethod};
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_environment::future::DynFut;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::dry_run::LaunchMode;
use cubecl_runtime::kernel::define_kernel;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, StreamMemoryReport,
};
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId};
use cubecl_server::allocator::PitchedMemoryLayoutPolicy;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// What a launch compiled to.
pub struct Source {
    pub kernel: &'static str,
    /// Or the error of CubeCL.
    pub code: Result<String, String>,
    pub shared: usize,
}

/// What launches compiled to that nobody has asked for yet, by the compute capability of their device.
static COMPILED: Mutex<BTreeMap<u32, Vec<Source>>> = Mutex::new(BTreeMap::new());

/// Tensors that were uploaded, by the compute capability of their device. What is read panics.
static UPLOADS: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// Uploads of `f` on the [`client`] of this compute capability, on which nobody else is at work.
pub fn uploads(client: &Client, capability: u32, f: impl FnOnce()) -> usize {
    let count = || {
        let _ = client.flush();
        UPLOADS.lock().unwrap().get(&capability).copied().unwrap_or(0)
    };
    let before = count();
    f();
    count() - before
}

/// The kernels that `f` is the first to launch on the [`client`] of this compute capability.
pub fn compiled(client: &Client, capability: u32, f: impl FnOnce()) -> Vec<Source> {
    f();
    let _ = client.flush();
    COMPILED.lock().unwrap().remove(&capability).unwrap_or_default()
}

/// The device of compute capability 8.0, 8.9 or 9.0.
pub fn client(capability: u32) -> Client {
    let id = DeviceId::new(0, capability as u16);
    Client::init(id, Offline::init(id))
}

fn properties(capability: u32) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: if capability == 90 { 232_448 } else { 166_912 },
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(if capability == 90 { 132 } else { 108 }),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: usize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: "offline".into(),
        fingerprint: format!("ptx_sm{capability}"),
        physical: None,
    };
    let memory = MemoryDeviceProperties::new(32 << 30, 512);
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::Device, identity);
    cubecl_cpp::register_supported_types(&mut properties);
    let features = &mut properties.features;
    features.plane.insert(Plane::Sync);
    features.plane.insert(Plane::Ops);
    features.plane.insert(Plane::NonUniformControlFlow);
    features.copy_async = true;
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    for half in [FloatKind::F16, FloatKind::BF16].map(ElemType::Float) {
        features.matmul.ldmatrix.insert(half);
    }
    properties.register_opaque_type(OpaqueType::Barrier);
    if capability == 90 {
        properties.features.tma.insert(Tma::Base);
        properties.features.cube_cluster = true;
        properties.register_opaque_type(OpaqueType::TensorMap);
        for half in [FloatKind::F16, FloatKind::BF16].map(ElemType::Float) {
            properties.features.matmul.stmatrix.insert(half);
        }
    }
    properties
}

fn utilities(id: DeviceId, capability: u32) -> Arc<ServerUtilities> {
    let (utilities, _) = ServerUtilities::init(
        ServiceId::of::<Offline>(id),
        "cuda",
        properties(capability),
        cubecl_cuda::CudaRuntime::target_properties(),
        Arc::new(ServerLogger::default()),
        PitchedMemoryLayoutPolicy::new(512),
    );
    Arc::new(utilities)
}

#[derive(Debug)]
struct Offline {
    capability: u32,
    utilities: Arc<ServerUtilities>,
    /// Kernels that were launched.
    seen: BTreeSet<String>,
}

impl Offline {
    fn compile(&self, kernel: &dyn CubeKernel) -> Result<(String, usize), String> {
        let definition = define_kernel(kernel).map_err(|e| e.to_string())?;
        let hopper = self.capability == 90;
        let supports_features = CppSupportedFeatures {
            grid_constants: true,
            clusters: hopper,
            fast_tanh: true,
            elect_sync: hopper,
            ..Default::default()
        };
        let options = CompilationOptions { warp_size: 32, supports_features, ..Default::default() };
        let kernel = CppCompiler::<Cuda>::default()
            .compile(definition, &options)
            .map_err(|e| e.to_string())?;
        Ok((kernel.source, kernel.shared_memory_size))
    }
}

impl DeviceService for Offline {
    fn init(id: DeviceId) -> Self {
        let capability = id.index_id as u32;
        Self { capability, utilities: utilities(id, capability), seen: BTreeSet::new() }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for Offline {}

impl Server for Offline {
    fn initialize_memory(
        &mut self,
        _memory: ManagedMemoryHandle,
        _size: u64,
        _stream: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        _descriptors: Vec<CopyDescriptor>,
        _stream: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        unreachable!("nothing is computed here, so nothing can be read")
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _stream: StreamId) {
        *UPLOADS.lock().unwrap().entry(self.capability).or_default() += descriptors.len();
    }

    fn sync(
        &mut self,
        _handles: Vec<BufferBinding>,
        _stream: StreamId,
    ) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn check(
        &mut self,
        _handles: Vec<BufferBinding>,
        _stream: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        _count: CubeCount,
        _bindings: KernelArguments,
        _stream: StreamId,
        _mode: LaunchMode,
    ) {
        if !self.seen.insert(format!("{:?}", kernel.id())) {
            return;
        }
        let (code, shared) = match self.compile(&*kernel) {
            Ok((code, shared)) => (Ok(code), shared),
            Err(error) => (Err(error), 0),
        };
        let source = Source { kernel: kernel.name(), code, shared };
        COMPILED.lock().unwrap().entry(self.capability).or_default().push(source);
    }

    fn flush(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _stream: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _stream: StreamId) -> Result<ProfilingToken, ServerError> {
        unreachable!("nothing runs here, so nothing is timed")
    }

    fn end_profile(
        &mut self,
        _stream: StreamId,
        _token: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        unreachable!("nothing runs here, so nothing is timed")
    }

    fn allocation_mode(&mut self, _mode: MemoryAllocationMode, _stream: StreamId) {}
}

/// Stands for the device's memory, of which there is none.
pub struct NoStorage;

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        512
    }

    fn get(&mut self, _handle: &StorageHandle) -> Result<(), IoError> {
        Ok(())
    }

    fn alloc(&mut self, _size: u64) -> Result<StorageHandle, IoError> {
        unreachable!("no memory is handed out here")
    }

    fn dealloc(&mut self, _id: StorageId) {}

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        0
    }
}

impl ServerStorage for Offline {
    type Storage = NoStorage;

    fn get_resource(
        &mut self,
        _binding: BufferBinding,
        _stream: StreamId,
    ) -> Result<ManagedResource<()>, ServerError> {
        unreachable!("nothing is computed here, so nothing can be read")
    }
}

//! Compiled kernels kept on disk, from one process to the next.

use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

/// Keeps what is compiled from now on in the user's cache directory, and takes from there what the same
/// build of the same program has compiled before for the same kind of GPU. A program calls it before it
/// touches a device; what its `cubecl.toml` says of the directory stands. Programs that run at the same time
/// share it: a kernel is there as a whole or not at all.
///
/// CubeCL names a kernel by its type and arguments, not by its body: what tells two builds apart is the
/// build id that the linker leaves in the program. Where it leaves none nothing is kept, nor where
/// somebody has configured CubeCL in the program before. Returns whether anything is.
pub fn keep() -> bool {
    if buildid::build_id().is_none() {
        return false;
    }
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Global;
    }
    CubeClRuntimeConfig::try_set(config)
}

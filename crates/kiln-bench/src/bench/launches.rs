//! How many kernels a call launches, Burn's and Kiln's, and what Kiln's allocate.

#[cfg(feature = "cube")]
use cubecl::logging::{LaunchObservation, LaunchObserver};
#[cfg(feature = "cube")]
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

#[cfg(feature = "cube")]
#[derive(Default)]
struct Count(AtomicU64);

#[cfg(feature = "cube")]
impl LaunchObserver for Count {
    fn launched(&self, _kernel: &'static str) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// What `work` returns, and the kernels that were launched meanwhile by anybody in this process; none
/// where there are no kernels.
pub(super) fn count<T>(work: impl FnOnce() -> T) -> (T, u64) {
    #[cfg(feature = "cube")]
    {
        let count = Arc::new(Count::default());
        let observation = LaunchObservation::new(count.clone());
        let result = work();
        drop(observation);
        (result, count.0.load(Ordering::Relaxed))
    }
    #[cfg(not(feature = "cube"))]
    (work(), 0)
}

/// Bytes that Kiln's kernels have allocated so far.
pub(super) fn allocated() -> u64 {
    #[cfg(feature = "cube")]
    return kiln_ops::launch::allocated();
    #[cfg(not(feature = "cube"))]
    0
}

//! Time of a burst of calls.

use burn::tensor::Device;

/// Launches that were recorded once and run again as a whole: what the device needs for them, without
/// the host's time between one launch and the next.
#[cfg(feature = "cube")]
pub(crate) struct Recording<T> {
    graph: burn::backend::BackendGraph<burn::backend::Dispatch>,
    /// What `work` returned while it was recorded. Every run writes its tensors anew.
    pub(crate) results: T,
}

#[cfg(feature = "cube")]
impl<T> Recording<T> {
    /// Records what `work` launches, where the device can record. `work` runs twice: what it allocates
    /// the second time must be what it freed the first.
    pub(crate) fn new(device: &Device, work: impl Fn() -> T) -> Option<Self> {
        use burn::backend::{Backend, Dispatch};
        if !kiln_ops::device::is_cuda(device) {
            return None;
        }
        device.sync().ok()?;
        let dispatch = device.as_dispatch();
        Dispatch::graph_prepare(dispatch).ok()?;
        // Burn's fusion leaves out what is dropped before it ran, and the memory for it.
        let first = work();
        device.sync().ok()?;
        drop(first);
        Dispatch::graph_start_capture(dispatch).ok()?;
        let results = work();
        let graph = Dispatch::graph_stop_capture(dispatch).ok()?;
        Some(Self { graph, results })
    }

    /// Runs it; returns the seconds that the device took.
    ///
    /// # Safety
    ///
    /// The tensors that the recorded launches read must still be there.
    pub(crate) unsafe fn time(&self, device: &Device) -> Result<f64, String> {
        use burn::backend::{Backend, Dispatch};
        let replay = || {
            // SAFETY: the caller keeps the inputs; the graph keeps the rest.
            unsafe { Dispatch::graph_replay(device.as_dispatch(), &self.graph) }
        };
        let (result, time) = time(device, replay)?;
        result.map_err(|e| format!("{e:?}"))?;
        Ok(time)
    }
}

/// What `work` returned and the seconds that `device` spent on what it queued: by its own clock if
/// it has one.
///
/// What `work` returns stays alive until all has run.
pub(crate) fn time<T: Send>(
    device: &Device,
    work: impl FnOnce() -> T + Send,
) -> Result<(T, f64), String> {
    let sync = || device.sync().map_err(|e| format!("{e:?}"));
    sync()?;
    #[cfg(feature = "cube")]
    if kiln_ops::device::is_cube(device) {
        use burn::backend::ProfileOptions;
        let mut result = None;
        let slot = &mut result;
        let (_, duration) = device
            .profile_with(ProfileOptions::default().flush(), move || *slot = Some(work()))
            .map_err(|e| format!("{e:?}"))?;
        let ticks = cubecl::future::block_on(duration.resolve());
        let time = ticks.map(|t| t.duration().as_secs_f64());
        return result.zip(time).ok_or_else(|| "nothing ran".into());
    }
    let start = std::time::Instant::now();
    let result = work();
    sync()?;
    Ok((result, start.elapsed().as_secs_f64()))
}

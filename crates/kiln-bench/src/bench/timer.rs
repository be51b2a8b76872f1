//! Time of a burst of calls.

use burn::tensor::Device;

/// Launches that were recorded once and run again as a whole: what the device needs for them, without
/// the host's time between one launch and the next.
#[cfg(feature = "cube")]
pub(crate) struct Recording {
    graph: burn::backend::BackendGraph<burn::backend::Dispatch>,
}

#[cfg(feature = "cube")]
impl Recording {
    /// Records what `work` launches, where the device can record. `work` runs three times: Burn's fusion finds
    /// its kernels in the first, and what the last allocates must be what the one before freed. What it
    /// returns is kept until all is launched: fusion leaves out what nobody can see any more. What the last
    /// returned comes back; every run writes its tensors anew.
    pub(crate) fn new<T>(device: &Device, work: impl Fn() -> T) -> Option<(Self, T)> {
        use burn::backend::{Backend, Dispatch};
        if !kiln_ops::device::is_cuda(device) {
            return None;
        }
        device.sync().ok()?;
        let dispatch = device.as_dispatch();
        Dispatch::graph_prepare(dispatch).ok()?;
        for _ in 0..2 {
            let kept = work();
            device.sync().ok()?;
            drop(kept);
        }
        Dispatch::graph_start_capture(dispatch).ok()?;
        let kept = work();
        let graph = Dispatch::graph_stop_capture(dispatch).ok()?;
        Some((Self { graph }, kept))
    }

    /// Runs it some times, one after the other; returns the seconds that the device took.
    ///
    /// # Safety
    ///
    /// The tensors that the recorded launches read must still be there.
    pub(crate) unsafe fn time(&self, device: &Device, repeats: usize) -> Result<f64, String> {
        use burn::backend::{Backend, Dispatch};
        let replay = || {
            (0..repeats).try_for_each(|_| {
                // SAFETY: the caller keeps the inputs; the graph keeps the rest.
                unsafe { Dispatch::graph_replay(device.as_dispatch(), &self.graph) }
            })
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

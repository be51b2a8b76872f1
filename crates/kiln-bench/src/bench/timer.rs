//! Time of a burst of calls.

use burn::tensor::Device;

/// Seconds that `device` spends on what `work` queues: by its own clock if it has one.
///
/// `work` flushes after each call and holds the results until then: Burn's fusion leaves out what
/// nobody can see any more, and joins calls that wait together.
pub(super) fn time(device: &Device, work: impl FnOnce() + Send) -> Result<f64, String> {
    let sync = || device.sync().map_err(|e| format!("{e:?}"));
    sync()?;
    #[cfg(feature = "cube")]
    if kiln_ops::policy::is_cube(device) {
        use burn::backend::ProfileOptions;
        let (_, duration) = device
            .profile_with(ProfileOptions::default().flush(), work)
            .map_err(|e| format!("{e:?}"))?;
        let ticks = cubecl::future::block_on(duration.resolve());
        return ticks.map(|t| t.duration().as_secs_f64()).ok_or_else(|| "nothing ran".into());
    }
    let start = std::time::Instant::now();
    work();
    sync()?;
    Ok(start.elapsed().as_secs_f64())
}

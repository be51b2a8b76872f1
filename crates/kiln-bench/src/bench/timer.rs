//! Time of a burst of calls.

use burn::tensor::Device;

/// What `work` returned and the seconds that `device` spent on what it queued: by its own clock if
/// it has one.
///
/// What `work` returns stays alive until all has run.
pub(super) fn time<T: Send>(
    device: &Device,
    work: impl FnOnce() -> T + Send,
) -> Result<(T, f64), String> {
    let sync = || device.sync().map_err(|e| format!("{e:?}"));
    sync()?;
    #[cfg(feature = "cube")]
    if kiln_ops::policy::is_cube(device) {
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

//! How long calls take on the device.

use burn::tensor::Device;

/// Seconds of one of the calls that `work` makes, the least of some bursts; recorded where the device can.
pub fn seconds<T>(device: &Device, calls: usize, work: impl Fn() -> T) -> f64 {
    use burn::backend::{Backend, Dispatch};
    let sync = || device.sync().unwrap();
    drop(work());
    sync();
    let dispatch = device.as_dispatch();
    let graph = Dispatch::graph_prepare(dispatch).ok().and_then(|()| {
        for _ in 0..2 {
            let kept = work();
            sync();
            drop(kept);
        }
        Dispatch::graph_start_capture(dispatch).ok()?;
        let kept = work();
        Some((Dispatch::graph_stop_capture(dispatch).ok()?, kept))
    });
    let repeats = 10;
    let burst = |_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let start = std::time::Instant::now();
        for _ in 0..repeats {
            match &graph {
                // SAFETY: the inputs are the caller's, the outputs are kept.
                Some((graph, _)) => unsafe { Dispatch::graph_replay(dispatch, graph).unwrap() },
                None => drop(work()),
            }
        }
        sync();
        start.elapsed().as_secs_f64() / (repeats * calls) as f64
    };
    (0..5).map(burst).fold(f64::INFINITY, f64::min)
}

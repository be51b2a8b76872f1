//! What a device is taken for: small shapes reach the plans of large ones on a device with few
//! multiprocessors.

use std::sync::{Mutex, MutexGuard};

/// Limits that are not the device's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Number of multiprocessors that plans reckon with.
    pub multiprocessors: Option<usize>,
    /// Bytes of the logits that [`linear_cross_entropy`](fn@crate::linear_cross_entropy::linear_cross_entropy)
    /// makes at once.
    pub chunk_bytes: Option<usize>,
}

static RUNNING: Mutex<()> = Mutex::new(());
static LIMITS: Mutex<Limits> = Mutex::new(Limits { multiprocessors: None, chunk_bytes: None });

/// Lifts them, also where the work panics.
struct Limited {
    /// Held until they are lifted.
    _running: MutexGuard<'static, ()>,
}

impl Drop for Limited {
    fn drop(&mut self) {
        set(Limits::default());
    }
}

fn set(limits: Limits) {
    *LIMITS.lock().unwrap_or_else(|e| e.into_inner()) = limits;
}

/// Runs `work` under `limits`, which hold for all threads: Burn may launch on another one. One caller at a time
/// in a process; others wait.
pub fn limited<T>(limits: Limits, work: impl FnOnce() -> T) -> T {
    let running = RUNNING.lock().unwrap_or_else(|e| e.into_inner());
    let _limited = Limited { _running: running };
    set(limits);
    work()
}

/// Those that hold now.
pub(crate) fn now() -> Limits {
    *LIMITS.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_while_the_work_runs() {
        let limits = Limits { multiprocessors: Some(3), chunk_bytes: None };
        assert_eq!(limited(limits, now), limits);
        let panicked = std::panic::catch_unwind(|| limited(limits, || panic!("work")));
        assert!(panicked.is_err());
        assert_eq!(now(), Limits::default());
    }
}

//! What a device and a problem are taken for: small shapes reach the plans of large ones on a device with few
//! multiprocessors, or where plans reckon with larger sizes.

use std::sync::{Mutex, MutexGuard};

/// Limits that are not the device's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Number of multiprocessors that plans reckon with.
    pub multiprocessors: Option<usize>,
    /// Bytes of the logits that [`linear_cross_entropy`](fn@crate::linear_cross_entropy::linear_cross_entropy)
    /// makes at once.
    pub chunk_bytes: Option<usize>,
    /// Sizes, and those that plans reckon with where they meet them. What kernels can take is decided by the
    /// sizes that there are.
    pub sizes: Vec<[usize; 2]>,
}

const NONE: Limits = Limits { multiprocessors: None, chunk_bytes: None, sizes: vec![] };

static RUNNING: Mutex<()> = Mutex::new(());
static LIMITS: Mutex<Limits> = Mutex::new(NONE);

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
    LIMITS.lock().unwrap_or_else(|e| e.into_inner()).clone()
}

/// The size that a plan reckons with: this one, if nothing else is said.
pub(crate) fn reckoned(size: usize) -> usize {
    let now = now();
    now.sizes.iter().find(|[from, _]| *from == size).map_or(size, |[_, to]| *to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_while_the_work_runs() {
        let limits = Limits { multiprocessors: Some(3), sizes: vec![[5, 70]], ..NONE };
        assert_eq!(limited(limits.clone(), now), limits);
        assert_eq!(limited(limits, || [5, 6].map(reckoned)), [70, 6]);
        assert_eq!(reckoned(5), 5);
        let panicked = std::panic::catch_unwind(|| limited(NONE, || panic!("work")));
        assert!(panicked.is_err());
        assert_eq!(now(), Limits::default());
    }
}

//! Plans of kernels that are launched, for whoever listens.
//!
//! A plan is all that a kernel is specialised on, and which ways through it a launch takes: parts of K,
//! several tiles a cube. The gate gathers those that it has verified; the bench times no others.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

static LISTENING: AtomicBool = AtomicBool::new(false);
static RUNNING: Mutex<()> = Mutex::new(());
static HEARD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Ends listening, also where the work panics.
struct Listener {
    /// Held until it ends.
    _running: MutexGuard<'static, ()>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        LISTENING.store(false, Ordering::SeqCst);
    }
}

fn heard() -> MutexGuard<'static, BTreeSet<String>> {
    HEARD.lock().unwrap_or_else(|e| e.into_inner())
}

/// What `work` returns, and the plans of the kernels that were launched meanwhile. One listens at a time in a
/// process; others wait.
pub fn listen<T>(work: impl FnOnce() -> T) -> (T, BTreeSet<String>) {
    let running = RUNNING.lock().unwrap_or_else(|e| e.into_inner());
    heard().clear();
    LISTENING.store(true, Ordering::SeqCst);
    let listener = Listener { _running: running };
    let result = work();
    let plans = std::mem::take(&mut *heard());
    drop(listener);
    (result, plans)
}

/// A kernel is launched: its name, what it is specialised on, and the ways it takes beside.
pub(crate) fn note(kernel: &str, plan: &dyn std::fmt::Debug, ways: &[(&str, bool)]) {
    if !LISTENING.load(Ordering::Relaxed) {
        return;
    }
    let mut text = format!("{kernel}: {plan:?}");
    for (way, _) in ways.iter().filter(|(_, taken)| *taken) {
        text = text + ", " + way;
    }
    heard().insert(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_heard_while_somebody_listens() {
        note("before", &1, &[]);
        let (result, plans) = listen(|| {
            note("kernel", &[4, 2], &[("in parts", true), ("in turns", false)]);
            note("kernel", &[4, 2], &[("in parts", true)]);
            7
        });
        note("after", &1, &[]);
        // Other tests launch kernels meanwhile.
        let own: Vec<&String> = plans.iter().filter(|plan| plan.starts_with("kernel")).collect();
        assert_eq!((result, own), (7, vec![&"kernel: [4, 2], in parts".to_string()]));
        assert!(!plans.contains("before: 1") && !plans.contains("after: 1"));
    }
}

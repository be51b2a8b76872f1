//! Plans of kernels that are launched, for whoever listens.
//!
//! A plan is all that a kernel is specialised on, and which ways through it a launch takes: parts of K,
//! several tiles a cube. The gate gathers those that it has verified.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

/// What the plans of products with a thin side begin with.
pub const THIN: &str = "thin product";

static RUNNING: Mutex<()> = Mutex::new(());
/// What has been heard, while somebody listens.
static HEARD: Mutex<Option<BTreeSet<String>>> = Mutex::new(None);

fn heard() -> MutexGuard<'static, Option<BTreeSet<String>>> {
    HEARD.lock().unwrap_or_else(|e| e.into_inner())
}

/// Ends listening, also where the work panics.
struct Listener {
    /// Held until it ends.
    _running: MutexGuard<'static, ()>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        *heard() = None;
    }
}

/// What `work` returns, and the plans of the kernels that were launched meanwhile. One listens at a time in a
/// process; others wait.
pub fn listen<T>(work: impl FnOnce() -> T) -> (T, BTreeSet<String>) {
    let running = RUNNING.lock().unwrap_or_else(|e| e.into_inner());
    *heard() = Some(BTreeSet::new());
    let listener = Listener { _running: running };
    let result = work();
    let plans = heard().take().unwrap_or_default();
    drop(listener);
    (result, plans)
}

/// A kernel is launched: its name, what it is specialised on, and the ways it takes beside.
pub(crate) fn note(kernel: &str, plan: &dyn std::fmt::Debug, ways: &[(&str, bool)]) {
    if let Some(heard) = heard().as_mut() {
        let taken = ways.iter().filter(|(_, taken)| *taken);
        let ways = taken.map(|(way, _)| *way).collect::<Vec<_>>().join(", ");
        let before = if ways.is_empty() { "" } else { "; " };
        heard.insert(format!("{kernel}: {plan:?}{before}{ways}"));
    }
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
        assert_eq!((result, own), (7, vec![&"kernel: [4, 2]; in parts".to_string()]));
        assert!(!plans.contains("before: 1") && !plans.contains("after: 1"));
    }
}

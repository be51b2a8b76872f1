//! Barriers in shared memory and of the hardware.

use cubecl::prelude::*;

/// A barrier that `count` arrivals complete.
#[cube]
pub(crate) fn barrier_init(bar: u32, #[comptime] count: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{b}], {n};", b = in(_) bar, n = const count);
}

/// Makes the initialised barriers visible to TMA; by the unit that initialised them.
#[cube]
pub(crate) fn barrier_init_fence() {
    gpu_asm!("fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;");
}

/// Waits for the phase of this parity to complete.
#[cube]
pub(crate) fn barrier_wait(bar: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred p;",
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [{b}], {ph};",
        "@p bra DONE;",
        "bra WAIT;",
        "DONE: }}",
        b = in(_) bar, ph = in(_) parity
    );
}

/// Arrives, and lets the barrier wait for `bytes` bytes of TMA loads.
#[cube]
pub(crate) fn barrier_expect(bar: u32, #[comptime] bytes: u32) {
    gpu_asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};", b = in(_) bar, n = const bytes);
}

/// The same for a number of bytes that is not known before.
#[cube]
pub(crate) fn barrier_expect_some(bar: u32, bytes: u32) {
    gpu_asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};", b = in(_) bar, n = in(_) bytes);
}

#[cube]
pub(crate) fn barrier_arrive(bar: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{b}];", b = in(_) bar);
}

/// Barrier number `id` of the hardware, among `units` units.
#[cube]
pub(crate) fn sync_units(id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.sync {i}, {n};", i = in(_) id, n = const units);
}

/// The same for units that come to it by different instructions of a kernel, which `bar.sync` does not allow.
#[cube]
pub(crate) fn meet_units(id: u32, #[comptime] units: u32) {
    gpu_asm!("barrier.sync {i}, {n};", i = in(_) id, n = const units);
}

/// Arrives at it without waiting.
#[cube]
pub(crate) fn arrive_units(id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.arrive {i}, {n};", i = in(_) id, n = const units);
}

/// Waits until another cube has made a counter `value`, and sees what it wrote before.
#[cube]
pub(crate) fn counter_wait(counter: u64, value: u32) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 found;",
        "WAIT: ld.acquire.gpu.global.u32 found, [{c}];",
        "setp.eq.u32 p, found, {v};",
        "@!p bra WAIT; }}",
        c = in(_) counter, v = in(_) value
    );
}

/// Makes a counter `value`, for those that wait for it, after all that this unit wrote.
#[cube]
pub(crate) fn counter_set(counter: u64, value: u32) {
    gpu_asm!("st.release.gpu.global.u32 [{c}], {v};", c = in(_) counter, v = in(_) value);
}

/// Adds 1 to a counter, for those that wait for it, after all that this unit wrote, or saw written.
#[cube]
pub(crate) fn counter_add(counter: u64) {
    gpu_asm!("fence.acq_rel.gpu;", "red.relaxed.gpu.global.add.u32 [{c}], 1;", c = in(_) counter);
}

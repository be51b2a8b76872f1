//! Boxes of tensors between global and shared memory.

use cubecl::prelude::*;

/// Loads `bytes` bytes, a multiple of 16, from global memory to shared, both from a multiple of 16 on; arrives at the barrier
/// and lets it wait for them.
#[cube]
pub(crate) fn bulk_load_arriving(to: u32, from: u64, bytes: u32, bar: u32) {
    gpu_asm!(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{g}], {n}, [{b}];",
        s = in(_) to, g = in(_) from, n = in(_) bytes, b = in(_) bar
    );
}

/// Loads a box at column `x` and row `y` of matrix `z`; zero outside. Completes on `bar`.
#[cube]
pub(crate) fn tma_load(dst: u32, map: u64, bar: u32, x: u32, y: u32, z: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes",
        "[{d}], [{m}, {{{x}, {y}, {z}}}], [{b}];",
        d = in(_) dst, m = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z, b = in(_) bar
    );
}

/// The same of a tensor of four dimensions, `at` from the innermost on.
#[cube]
pub(crate) fn tma_load_rank4(dst: u32, map: u64, bar: u32, at: (u32, u32, u32, u32)) {
    let (x, y, z, w) = at;
    gpu_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes",
        "[{d}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}];",
        d = in(_) dst, m = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z, w = in(_) w, b = in(_) bar
    );
}

/// The same, of what is read once: it is the first to leave the cache.
#[cube]
pub(crate) fn tma_load_rank4_once(dst: u32, map: u64, bar: u32, at: (u32, u32, u32, u32)) {
    let (x, y, z, w) = at;
    gpu_asm!(
        "{{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;",
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
        "[{d}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}], policy; }}",
        d = in(_) dst, m = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z, w = in(_) w, b = in(_) bar
    );
}

/// Stores a box, as a group of its own; what is outside the matrix is left out.
#[cube]
pub(crate) fn tma_store(map: u64, src: u32, x: u32, y: u32, z: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [{m}, {{{x}, {y}, {z}}}], [{s}];",
        "cp.async.bulk.commit_group;",
        s = in(_) src, m = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z
    );
}

/// The same of a tensor of four dimensions, `at` from the innermost on; in the group that is committed next.
#[cube]
pub(crate) fn tma_store_rank4(map: u64, src: u32, at: (u32, u32, u32, u32)) {
    let (x, y, z, w) = at;
    gpu_asm!(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [{m}, {{{x}, {y}, {z}, {w}}}], [{s}];",
        s = in(_) src, m = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z, w = in(_) w
    );
}

/// Makes a group of the stores of this unit since the last.
#[cube]
pub(crate) fn tma_store_commit() {
    gpu_asm!("cp.async.bulk.commit_group;");
}

/// The same as [`tma_store`], but adds f32 to what is there.
#[cube]
pub(crate) fn tma_add(map: u64, src: u32, x: u32, y: u32, z: u32) {
    gpu_asm!(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [{m}, {{{x}, {y}, {z}}}], [{s}];",
        "cp.async.bulk.commit_group;",
        s = in(_) src, m = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z
    );
}

/// Waits until all but `pending` stores of this unit have read their shared memory.
#[cube]
pub(crate) fn tma_store_read(#[comptime] pending: u32) {
    gpu_asm!("cp.async.bulk.wait_group.read {n};", n = const pending);
}

/// Waits until all stores of this unit are done.
#[cube]
pub(crate) fn tma_store_wait() {
    gpu_asm!("cp.async.bulk.wait_group 0;");
}

/// What this unit wrote to shared memory becomes visible to TMA and wgmma.
#[cube]
pub(crate) fn async_proxy_fence() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Copies contiguous bytes, a multiple of 16, to shared memory. Completes on `bar`.
#[cube]
pub(crate) fn bulk_load(dst: u32, src: u64, bar: u32, #[comptime] bytes: u32) {
    gpu_asm!(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{s}], {n}, [{b}];",
        d = in(_) dst, s = in(_) src, b = in(_) bar, n = const bytes
    );
}

/// Copies contiguous bytes, a multiple of 16, from shared memory; in the group that is committed next.
#[cube]
pub(crate) fn bulk_store(dst: u64, src: u32, #[comptime] bytes: u32) {
    gpu_asm!(
        "cp.async.bulk.global.shared::cta.bulk_group [{d}], [{s}], {n};",
        d = in(_) dst, s = in(_) src, n = const bytes
    );
}

/// The same as [`bulk_store`], but adds f32 to what is there.
#[cube]
pub(crate) fn bulk_add(dst: u64, src: u32, #[comptime] bytes: u32) {
    gpu_asm!(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{d}], [{s}], {n};",
        d = in(_) dst, s = in(_) src, n = const bytes
    );
}

/// Orders what this unit does to global memory itself and what it lets TMA do.
#[cube]
pub(crate) fn async_proxy_fence_global() {
    gpu_asm!("fence.proxy.async.global;");
}

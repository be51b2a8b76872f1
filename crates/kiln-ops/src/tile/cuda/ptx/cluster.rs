//! Cubes of a cluster, and sums that they hand to each other.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::{Wgmma, list};
use cubecl::prelude::*;

/// Waits for all units of the cluster that have not ended, and makes what they wrote visible to each other.
#[cube]
pub(crate) fn sync_cluster() {
    gpu_asm!("barrier.cluster.arrive.release;", "barrier.cluster.wait.acquire;");
}

/// Where `addr` is in the shared memory of cube `rank` of the cluster.
#[cube]
pub(crate) fn cluster_address(addr: u32, rank: u32) -> u32 {
    let there: u32;
    gpu_asm!(
        "mapa.shared::cluster.u32 {o}, {a}, {r};",
        o = out(_) there, a = in(_) addr, r = in(_) rank, options(pure, nomem)
    );
    there
}

/// Stores four f32 at `to` in a cube of the cluster, and completes 16 bytes of the barrier `bar` there.
#[cube]
pub(crate) fn send_quad(to: u32, quad: Vector<f32, Const<4>>, bar: u32) {
    let (x, y) = (quad.extract(0usize), quad.extract(1usize));
    let (z, w) = (quad.extract(2usize), quad.extract(3usize));
    gpu_asm!(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{t}], {{{x}, {y}, {z}, {w}}}, [{b}];",
        t = in(_) to + 0, x = in(_) x, y = in(_) y, z = in(_) z, w = in(_) w, b = in(_) bar + 0
    );
}

/// Arrives at a barrier of a cube of the cluster.
#[cube]
pub(crate) fn barrier_arrive_there(bar: u32) {
    gpu_asm!("mbarrier.arrive.shared::cluster.b64 _, [{b}];", b = in(_) bar + 0);
}

/// Bytes between parts of 16 that a unit of 128 hands over.
const HANDED: usize = 128 * 16;

/// Stores the sums `%0..` from address `at` on, of this cube or of the cluster.
fn send(op: Wgmma, within: &str) -> String {
    let store = |i: usize| {
        let sums = list(4, |e| format!("%{}", 4 * i + e));
        format!("st.shared::{within}.v4.f32 [at+{}], {{{sums}}};\n", i * HANDED)
    };
    (0..op.sums() / 4).map(store).collect()
}

/// Adds what stands from address `at` on.
fn add(op: Wgmma) -> String {
    let held = op.held();
    let add = |i: usize| {
        let load = format!("ld.shared.v4.f32 {{x0, x1, x2, x3}}, [at+{}];\n", i * HANDED);
        let sum = |e| format!("add.f32 %{}, %{}, x{e};\n", 4 * i + e, held + 4 * i + e);
        load + &(0..4).map(sum).collect::<String>()
    };
    (0..op.sums() / 4).map(add).collect()
}

/// Writes the sums of unit `t` of 128 to memory from `addr` on, in a cube of the cluster.
#[cube]
pub(crate) fn send_sums<N: Size>(sums: Vector<f32, N>, addr: u32, t: u32, #[comptime] op: Wgmma) {
    gpu_asm!(
        "{{ .reg .b32 at; // {acc}", "mov.b32 at, {a};", "{body} }}",
        acc = in(_) sums, a = in(_) addr + t * 16, body = const send(op, "cluster")
    );
}

/// The same in this cube.
#[cube]
pub(crate) fn hand_sums<N: Size>(sums: Vector<f32, N>, addr: u32, t: u32, #[comptime] op: Wgmma) {
    gpu_asm!(
        "{{ .reg .b32 at; // {acc}", "mov.b32 at, {a};", "{body} }}",
        acc = in(_) sums, a = in(_) addr + t * 16, body = const send(op, "cta")
    );
}

/// The sums with those added that unit `t` of another warpgroup wrote from `addr` on, in this cube.
#[cube]
pub(crate) fn add_sent<N: Size>(
    sums: Vector<f32, N>,
    addr: u32,
    t: u32,
    #[comptime] op: Wgmma,
) -> Vector<f32, N> {
    let next: Vector<f32, N>;
    gpu_asm!(
        "{{ .reg .b32 at; .reg .f32 x<4>; // {o} {i}", "mov.b32 at, {a};", "{body} }}",
        o = out(_) next, i = in(_) sums, a = in(_) addr + t * 16, body = const add(op)
    );
    next
}

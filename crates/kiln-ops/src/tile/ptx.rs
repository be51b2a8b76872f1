//! The raw PTX of products: barriers, copies, TMA and tensor cores, behind functions that say what they
//! do.
//!
//! Addresses of shared memory are 32-bit integers, as the instructions take them. An operand of
//! `gpu_asm!` that is a mutable variable is passed by its address: pass expressions or array elements.

use burn::tensor::DType;
use cubecl::prelude::*;

/// Element type of the operands of a tensor-core instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Half {
    Bf16,
    F16,
}

impl Half {
    pub(crate) fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            _ => Self::F16,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// `{x(0), x(1), ...}` without the braces.
fn list(n: usize, x: impl Fn(usize) -> String) -> String {
    (0..n).map(x).collect::<Vec<_>>().join(", ")
}

// ---- barriers ----------------------------------------------------------------------------------

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

#[cube]
pub(crate) fn barrier_arrive(bar: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{b}];", b = in(_) bar);
}

/// Barrier number `id` of the hardware, among `units` units.
#[cube]
pub(crate) fn sync_units(id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.sync {i}, {n};", i = in(_) id, n = const units);
}

// ---- clusters ----------------------------------------------------------------------------------

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

// ---- TMA ---------------------------------------------------------------------------------------

/// Loads a box at column `x` and row `y` of matrix `z`; zero outside. Completes on `bar`.
#[cube]
pub(crate) fn tma_load(dst: u32, map: u64, bar: u32, x: u32, y: u32, z: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes",
        "[{d}], [{m}, {{{x}, {y}, {z}}}], [{b}];",
        d = in(_) dst, m = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z, b = in(_) bar
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

/// The same, but adds f32 to what is there.
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

// ---- wgmma -------------------------------------------------------------------------------------

/// A matrix in shared memory, swizzled by 128 bytes: groups of 8 rows are 1024 bytes apart.
///
/// `columns`, in units of 16 bytes, is the distance of blocks of 64 columns where M or N is the
/// contiguous dimension; 1, unused, where it is K.
#[cube]
pub(crate) fn descriptor(addr: u32, #[comptime] columns: u32) -> u64 {
    let fixed = comptime!((1u64 << 62) | (64u64 << 32) | (u64::from(columns) << 16));
    u64::cast_from((addr & 0x3FFFF) >> 4) | fixed
}

/// What a wgmma instruction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wgmma {
    pub(crate) half: Half,
    /// Columns, a multiple of 8 up to 256; rows are 64.
    pub(crate) n: usize,
    /// A is stored with M contiguous, not K.
    pub(crate) a_transposed: bool,
    /// B is stored with N contiguous, not K.
    pub(crate) b_transposed: bool,
}

impl Wgmma {
    /// Sums that each of the 128 units holds: number 4j + e of unit t is in row
    /// 16·(t / 32) + (t % 32) / 4 + 8·(e / 2) and column 8j + 2·(t % 4) + e % 2.
    pub(crate) fn sums(&self) -> usize {
        self.n / 2
    }

    /// Elements of the vector that holds them: vectors have powers of two.
    pub(crate) fn held(&self) -> usize {
        self.sums().next_power_of_two()
    }

    /// Four steps of 16 along a block of 64 of K; operands `da`, `db`, predicate `p` in scope. A step
    /// is 32 bytes along a row where K is contiguous, else 16 rows of 128 bytes.
    fn block(&self) -> String {
        let (n, half) = (self.sums(), self.half.name());
        let (ta, tb) = (u32::from(self.a_transposed), u32::from(self.b_transposed));
        let mut text: String =
            (0..n).map(|i| format!("mov.f32 %{i}, %{};\n", self.held() + i)).collect();
        text += "wgmma.fence.sync.aligned;\n";
        let sums = list(n, |i| format!("%{i}"));
        for step in 0..4 {
            text += &format!(
                "wgmma.mma_async.sync.aligned.m64n{}k16.f32.{half}.{half} {{{sums}}}, da, db, p, 1, 1, {ta}, {tb};\n",
                self.n
            );
            if step < 3 {
                let (a, b) = (2 + 126 * ta, 2 + 126 * tb);
                text += &format!("add.s64 da, da, {a};\nadd.s64 db, db, {b};\n");
            }
        }
        text + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    }

    /// Stores the sums `%0..` from address `at` on.
    fn send(&self) -> String {
        let store = |i: usize| {
            let sums = list(4, |e| format!("%{}", 4 * i + e));
            format!("st.shared::cluster.v4.f32 [at+{}], {{{sums}}};\n", i * HANDED)
        };
        (0..self.sums() / 4).map(store).collect()
    }

    /// Adds what stands from address `at` on.
    fn add_sent(&self) -> String {
        let held = self.held();
        let add = |i: usize| {
            let load = format!("ld.shared.v4.f32 {{x0, x1, x2, x3}}, [at+{}];\n", i * HANDED);
            let sum = |e| format!("add.f32 %{}, %{}, x{e};\n", 4 * i + e, held + 4 * i + e);
            load + &(0..4).map(sum).collect::<String>()
        };
        (0..self.sums() / 4).map(add).collect()
    }
}

/// sums + A·B over a block of 64 of K, by a group of 128 units.
#[cube]
pub(crate) fn wgmma_block<N: Size>(
    sums: Vector<f32, N>,
    a: u64,
    b: u64,
    #[comptime] op: Wgmma,
) -> Vector<f32, N> {
    let next: Vector<f32, N>;
    // The copies of the sums in and out vanish: the compiler keeps them in the same registers.
    gpu_asm!(
        "{{ .reg .pred p; .reg .b64 da, db; // {o} {i}",
        "mov.b64 da, {a}; mov.b64 db, {b}; setp.eq.u64 p, da, da;",
        "{body} }}",
        o = out(_) next, i = in(_) sums, a = in(_) a, b = in(_) b, body = const op.block()
    );
    next
}

/// Bytes between parts of 16 that a unit of 128 hands over.
const HANDED: usize = 128 * 16;

/// Writes the sums of unit `t` of 128 to memory from `addr` on, in a cube of the cluster.
#[cube]
pub(crate) fn send_sums<N: Size>(sums: Vector<f32, N>, addr: u32, t: u32, #[comptime] op: Wgmma) {
    gpu_asm!(
        "{{ .reg .b32 at; // {acc}", "mov.b32 at, {a};", "{body} }}",
        acc = in(_) sums, a = in(_) addr + t * 16, body = const op.send()
    );
}

/// The sums with those added that unit `t` of another group of 128 wrote from `addr` on, in this cube.
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
        o = out(_) next, i = in(_) sums, a = in(_) addr + t * 16, body = const op.add_sent()
    );
    next
}

/// Element type of a stored tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stored {
    Half(Half),
    F32,
}

impl Stored {
    /// Columns of a chunk: 128 bytes.
    pub(crate) fn columns(self) -> usize {
        match self {
            Self::Half(_) => 64,
            Self::F32 => 32,
        }
    }

    /// Stores chunk `c` of the sums `%0..` to the addresses s0..s3, `turned` or as it is.
    fn chunk(self, c: usize, turned: bool) -> String {
        let mut text = String::new();
        let trans = if turned { ".trans" } else { "" };
        for i in 0..4 {
            match self {
                Self::Half(half) => {
                    let j = 4 * (8 * c + 2 * i);
                    for r in 0..4 {
                        text += &format!(
                            "cvt.rn.{}x2.f32 r{r}, %{}, %{};\n",
                            half.name(),
                            j + 2 * r + 1,
                            j + 2 * r
                        );
                    }
                    text += &format!(
                        "stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [s{i}], {{r0, r1, r2, r3}};\n"
                    );
                }
                Self::F32 => {
                    let j = 4 * (4 * c + i);
                    text += &format!(
                        "st.shared.v2.f32 [s{i}], {{%{}, %{}}};\nst.shared.v2.f32 [s{i}+1024], {{%{}, %{}}};\n",
                        j,
                        j + 1,
                        j + 2,
                        j + 3
                    );
                }
            }
        }
        text
    }
}

/// Where unit `t` of 128 stores its four parts of a chunk of 64 rows of 128 swizzled bytes; of halves also
/// of the chunk transposed.
#[cube]
pub(crate) fn chunk_address(
    base: u32,
    t: u32,
    #[comptime] part: u32,
    #[comptime] stored: Stored,
    #[comptime] turned: bool,
) -> u32 {
    let (warp, lane) = (t / 32, t % 32);
    if comptime!(stored == Stored::F32) {
        let row = lane / 4;
        let block = comptime!(2 * part) + lane % 4 / 2;
        base + (warp * 16 + row) * 128 + ((block ^ row) << 4) + lane % 2 * 8
    } else if comptime!(turned) {
        let row = comptime!(16 * part) + lane / 16 * 8 + lane % 8;
        base + row * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) << 4)
    } else {
        let block = comptime!(2 * part) + lane / 16;
        base + (warp * 16 + lane % 16) * 128 + ((block ^ (lane % 8)) << 4)
    }
}

/// Rounds chunk `c` of the sums and stores it, `turned` or as it is, `offset` bytes after the addresses.
#[cube]
pub(crate) fn store_chunk<N: Size>(
    sums: Vector<f32, N>,
    s0: u32,
    s1: u32,
    s2: u32,
    s3: u32,
    #[comptime] offset: u32,
    #[comptime] c: usize,
    #[comptime] stored: Stored,
    #[comptime] turned: bool,
) {
    gpu_asm!(
        "{{ .reg .b32 r<4>, s<4>; // {acc}",
        "add.u32 s0, {s0}, {o}; add.u32 s1, {s1}, {o}; add.u32 s2, {s2}, {o}; add.u32 s3, {s3}, {o};",
        "{body} }}",
        acc = in(_) sums, s0 = in(_) s0, s1 = in(_) s1, s2 = in(_) s2, s3 = in(_) s3,
        o = const offset, body = const stored.chunk(c, turned)
    );
}

// ---- cp.async, ldmatrix and mma.sync -----------------------------------------------------------

/// The address of global memory behind a pointer.
#[cube]
pub(crate) fn global_address<T: CubePrimitive>(pointer: *const T) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {o}, {p};",
        o = out(_) address, p = in(_) pointer, options(pure, nomem)
    );
    address
}

/// Copies 16 bytes, of which those after the first `bytes` become zero, without waiting.
#[cube]
pub(crate) fn copy_16(dst: u32, src: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{d}], [{s}], 16, {n};",
        d = in(_) dst, s = in(_) src, n = in(_) bytes
    );
}

/// Makes one group of the copies since the last.
#[cube]
pub(crate) fn copy_commit() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits for all but the last `pending` groups of this unit.
#[cube]
pub(crate) fn copy_wait(#[comptime] pending: u32) {
    gpu_asm!("cp.async.wait_group {n};", n = const pending);
}

/// Four 8×8 matrices of halves, whose rows of 16 bytes the lanes name, eight each; transposed on the
/// way if the contiguous dimension is not K.
#[cube]
pub(crate) fn load_matrices(addr: u32, #[comptime] transposed: bool) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{t}.shared.b16 {o}, [{a}];",
        o = out(_) out, a = in(_) addr, t = const if transposed { ".trans" } else { "" }
    );
    out
}

/// c + A·B of 16×16 and 16×8 halves by a warp: of c, elements 2h and 2h + 1 are in row lane / 4 + 8h,
/// columns 2·(lane % 4) and the next.
#[cube]
pub(crate) fn mma_16x8x16(
    a: Vector<u32, Const<4>>,
    b0: u32,
    b1: u32,
    c: Vector<f32, Const<4>>,
    #[comptime] half: Half,
) -> Vector<f32, Const<4>> {
    let out: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {o}, {a}, {{{b0}, {b1}}}, {c};",
        o = out(_) out, a = in(_) a, b0 = in(_) b0, b1 = in(_) b1, c = in(_) c,
        t = const half.name(), options(pure, nomem)
    );
    out
}

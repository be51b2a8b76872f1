//! wgmma: asynchronous products by warpgroups, of 128 units, on Hopper's tensor cores.
//!
//! Issued, committed and waited for in steps of their own, so that a group of products may be under way while
//! the next one is issued. Until it has been waited for nobody may look at its sums, nor overwrite what it
//! reads: [`wgmma_wait`] hands out the sums anew, so that the compiler moves no reader before it.

use super::{Float16, list};
use cubecl::prelude::*;

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
    pub(crate) float: Float16,
    /// Columns, a multiple of 8 up to 256; rows are 64.
    pub(crate) n: usize,
    /// A is stored with M contiguous, not K.
    pub(crate) a_transposed: bool,
    /// B is stored with N contiguous, not K.
    pub(crate) b_transposed: bool,
}

impl Wgmma {
    /// Sums that each of the 128 units holds, as [`fragment`](crate::tile::cuda::fragment) says.
    pub(crate) fn sums(&self) -> usize {
        self.n / 2
    }

    /// Elements of the vector that holds them: vectors have powers of two.
    pub(crate) fn held(&self) -> usize {
        self.sums().next_power_of_two()
    }

    /// Four steps of 16 along a block of 64 of K; operands `da`, `db`, predicate `p` in scope. A step
    /// is 32 bytes along a row where K is contiguous, else 16 rows of 128 bytes.
    fn issue(&self) -> String {
        let (n, float) = (self.sums(), self.float.name());
        let (ta, tb) = (u32::from(self.a_transposed), u32::from(self.b_transposed));
        let mut text: String =
            (0..n).map(|i| format!("mov.f32 %{i}, %{};\n", self.held() + i)).collect();
        text += "wgmma.fence.sync.aligned;\n";
        let sums = list(n, |i| format!("%{i}"));
        for step in 0..4 {
            text += &format!(
                "wgmma.mma_async.sync.aligned.m64n{}k16.f32.{float}.{float} {{{sums}}}, da, db, p, 1, 1, {ta}, {tb};\n",
                self.n
            );
            if step < 3 {
                let [a, b] = [ta, tb].map(|transposed| 2 + 126 * transposed);
                text += &format!("add.s64 da, da, {a};\nadd.s64 db, db, {b};\n");
            }
        }
        text
    }

    /// Hands the sums on after a wait.
    fn wait(&self, pending: u32) -> String {
        let moves = (0..self.sums()).map(|i| format!("mov.f32 %{i}, %{};\n", self.held() + i));
        format!("wgmma.wait_group.sync.aligned {pending};\n") + &moves.collect::<String>()
    }
}

/// Begins sums + A·B over a block of 64 of K, A and B in shared memory, by a warpgroup.
#[cube]
pub(crate) fn wgmma_issue<N: Size>(
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
        o = out(_) next, i = in(_) sums, a = in(_) a, b = in(_) b, body = const op.issue()
    );
    next
}

/// Makes one group of the products since the last.
#[cube]
pub(crate) fn wgmma_commit() {
    gpu_asm!("wgmma.commit_group.sync.aligned;");
}

/// Waits until all but the last `pending` groups are done; those whose sums somebody looks at are to be waited
/// for by [`wgmma_wait`].
#[cube]
pub(crate) fn wgmma_wait_pending(#[comptime] pending: u32) {
    gpu_asm!("wgmma.wait_group.sync.aligned {n};", n = const pending);
}

/// Waits until all but the last `pending` groups are done, these sums among them.
#[cube]
pub(crate) fn wgmma_wait<N: Size>(
    sums: Vector<f32, N>,
    #[comptime] pending: u32,
    #[comptime] op: Wgmma,
) -> Vector<f32, N> {
    let done: Vector<f32, N>;
    gpu_asm!("// {o} {i}", "{body}", o = out(_) done, i = in(_) sums, body = const op.wait(pending));
    done
}

/// Gives registers of this warpgroup back, down to `count` a unit, a multiple of 8; for a group that loads.
#[cube]
pub(crate) fn registers_decrease(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {n};", n = const count);
}

/// Takes registers that others gave back, up to `count` a unit, a multiple of 8; for a group that multiplies.
#[cube]
pub(crate) fn registers_increase(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {n};", n = const count);
}

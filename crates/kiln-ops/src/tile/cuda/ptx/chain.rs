//! wgmma over all of K at once: what attention multiplies, whose K is a head's width or a block of keys.

use super::{Wgmma, list};
use cubecl::prelude::*;

/// The instructions of a product over all of K, issued one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaChain {
    pub(crate) op: Wgmma,
    /// Steps of 16 of K.
    pub(crate) steps: usize,
    /// Of an operand in shared memory with K contiguous, the distance of blocks of 64 of K in units of 16 bytes.
    pub(crate) a_block: u32,
    pub(crate) b_block: u32,
}

/// From a descriptor to that of a step: 32 bytes along a row where K is contiguous, else 16 rows of 128 bytes.
fn offset(step: usize, block: u32, transposed: bool) -> u32 {
    let step = step as u32;
    if transposed { step * 128 } else { step / 4 * block + step % 4 * 2 }
}

impl WgmmaChain {
    /// Operands `a`, `b`, predicates `p` and `q`, true and false, in scope. Of A in registers, four of 32 bits for
    /// each step, the numbers begin at `registers`. A `fresh` sum begins at zero, others at what follows the
    /// outputs.
    fn issue(&self, registers: Option<usize>, fresh: bool) -> String {
        let op = self.op;
        let given = (0..op.sums()).filter(|_| !fresh);
        let moves: String = given.map(|i| format!("mov.f32 %{i}, %{};\n", op.held() + i)).collect();
        moves + &self.issue_into(&list(op.sums(), |i| format!("%{i}")), registers, fresh)
    }

    /// The same into the registers `sums`.
    fn issue_into(&self, sums: &str, registers: Option<usize>, fresh: bool) -> String {
        let op = self.op;
        let float = op.float.name();
        let (ta, tb) = (u32::from(op.a_transposed), u32::from(op.b_transposed));
        let mut text = "wgmma.fence.sync.aligned;\n".to_string();
        for step in 0..self.steps {
            let (a, transposed) = match registers {
                Some(first) => {
                    let a = list(4, |i| format!("%{}", first + 4 * step + i));
                    (format!("{{{a}}}"), format!("{tb}"))
                }
                None => {
                    let at = offset(step, self.a_block, op.a_transposed);
                    text += &format!("add.s64 da, a, {at};\n");
                    ("da".to_string(), format!("{ta}, {tb}"))
                }
            };
            let add = if fresh && step == 0 { "q" } else { "p" };
            text += &format!(
                "add.s64 db, b, {};\n\
                 wgmma.mma_async.sync.aligned.m64n{}k16.f32.{float}.{float} {{{sums}}}, {a}, db, {add}, 1, 1, {transposed};\n",
                offset(step, self.b_block, op.b_transposed),
                op.n
            );
        }
        text
    }
}

/// Begins A·B, A and B in shared memory, by a warpgroup.
#[cube]
pub(crate) fn wgmma_chain<N: Size>(
    a: u64,
    b: u64,
    #[comptime] chain: WgmmaChain,
) -> Vector<f32, N> {
    let next: Vector<f32, N>;
    gpu_asm!(
        "{{ .reg .pred p, q; .reg .b64 a, b, da, db; // {o}",
        "mov.b64 a, {a}; mov.b64 b, {b}; setp.eq.u64 p, a, a; setp.ne.u64 q, a, a;",
        "{body} }}",
        o = out(_) next, a = in(_) a, b = in(_) b, body = const chain.issue(None, true)
    );
    next
}

/// Begins sums + A·B, A in registers, B in shared memory, by a warpgroup.
#[cube]
pub(crate) fn wgmma_chain_registers<N: Size, A: Size>(
    sums: Vector<f32, N>,
    a: Vector<u32, A>,
    b: u64,
    #[comptime] chain: WgmmaChain,
) -> Vector<f32, N> {
    let next: Vector<f32, N>;
    gpu_asm!(
        "{{ .reg .pred p; .reg .b64 b, db; // {o} {i} {a}",
        "mov.b64 b, {b}; setp.eq.u64 p, b, b;",
        "{body} }}",
        o = out(_) next, i = in(_) sums, a = in(_) a, b = in(_) b,
        body = const chain.issue(Some(2 * chain.op.held()), false)
    );
    next
}

/// Sums that have registers of a name of their own through a kernel. The compiler keeps a copy of other sums where
/// many are added to in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NamedSums {
    pub(crate) name: &'static str,
    pub(crate) count: usize,
}

impl NamedSums {
    fn each(&self, text: impl Fn(usize, String) -> String) -> String {
        (0..self.count).map(|i| text(i, format!("{}{i}", self.name))).collect()
    }

    fn issue(&self, chain: WgmmaChain, registers: Option<usize>) -> String {
        let sums = list(self.count, |i| format!("{}{i}", self.name));
        chain.issue_into(&sums, registers, false)
    }
}

/// Declares them, where the kernel begins.
#[cube]
pub(crate) fn sums_declare(#[comptime] sums: NamedSums) {
    gpu_asm!(".reg .f32 {name}<{count}>;", name = const sums.name, count = const sums.count);
}

/// Makes them zero.
#[cube]
pub(crate) fn sums_clear(#[comptime] sums: NamedSums) {
    gpu_asm!("{body}", body = const sums.each(|_, sum| format!("mov.f32 {sum}, 0f00000000;\n")));
}

/// What they are, after the products have been waited for.
#[cube]
pub(crate) fn sums_read<N: Size>(#[comptime] sums: NamedSums) -> Vector<f32, N> {
    let read: Vector<f32, N>;
    gpu_asm!(
        "// {o}", "{body}",
        o = out(_) read, body = const sums.each(|i, sum| format!("mov.f32 %{i}, {sum};\n"))
    );
    read
}

/// Begins to add A·B, A and B in shared memory, by a warpgroup.
#[cube]
pub(crate) fn sums_add(a: u64, b: u64, #[comptime] sums: NamedSums, #[comptime] chain: WgmmaChain) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b64 a, b, da, db;",
        "mov.b64 a, {a}; mov.b64 b, {b}; setp.eq.u64 p, a, a;",
        "{body} }}",
        a = in(_) a, b = in(_) b, body = const sums.issue(chain, None)
    );
}

/// Begins to add A·B, A in registers, B in shared memory, by a warpgroup.
#[cube]
pub(crate) fn sums_add_registers<A: Size>(
    a: Vector<u32, A>,
    b: u64,
    #[comptime] sums: NamedSums,
    #[comptime] chain: WgmmaChain,
) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b64 b, db; // {a}",
        "mov.b64 b, {b}; setp.eq.u64 p, b, b;",
        "{body} }}",
        a = in(_) a, b = in(_) b, body = const sums.issue(chain, Some(0))
    );
}

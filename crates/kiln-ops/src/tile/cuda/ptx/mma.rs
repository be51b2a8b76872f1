//! cp.async, ldmatrix and mma.sync.

use super::Float16;
use cubecl::prelude::*;

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

/// 16 bytes of global memory, `offset` bytes past an address, that nobody writes meanwhile and that are read once.
#[cube]
pub(crate) fn load_16(addr: u64, #[comptime] offset: u32) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.global.nc.L1::no_allocate.v4.b32 {o}, [{a}+{n}];",
        o = out(_) out, a = in(_) addr, n = const offset
    );
    out
}

/// Four f32 of global memory that others write, from an address that is a multiple of 16.
#[cube]
pub(crate) fn load_quad(addr: u64) -> Vector<f32, Const<4>> {
    let quad: Vector<f32, Const<4>>;
    gpu_asm!("ld.global.v4.f32 {o}, [{a}];", o = out(_) quad, a = in(_) addr);
    quad
}

/// Stores four f32 to global memory, to an address that is a multiple of 16.
#[cube]
pub(crate) fn store_quad(addr: u64, quad: &Vector<f32, Const<4>>) {
    gpu_asm!(
        "st.global.v4.f32 [{to}], {{{a}, {b}, {c}, {d}}};",
        to = in(_) addr, a = in(_) quad.extract(0usize), b = in(_) quad.extract(1usize),
        c = in(_) quad.extract(2usize), d = in(_) quad.extract(3usize)
    );
}

/// The lower halves of two words side by side, or the upper ones.
#[cube]
pub(crate) fn halves(first: u32, second: u32, #[comptime] upper: bool) -> u32 {
    let out: u32;
    gpu_asm!(
        "prmt.b32 {o}, {a}, {b}, {s};",
        o = out(_) out, a = in(_) first, b = in(_) second,
        s = const if upper { "0x7632" } else { "0x5410" }, options(pure, nomem)
    );
    out
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

/// Stores four 8×8 matrices of halves, to where the lanes name their rows as [`load_matrices`] wants them.
#[cube]
pub(crate) fn store_matrices(addr: u32, quad: Vector<u32, Const<4>>) {
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{to}], {{{a}, {b}, {c}, {d}}};",
        to = in(_) addr, a = in(_) quad.extract(0usize), b = in(_) quad.extract(1usize),
        c = in(_) quad.extract(2usize), d = in(_) quad.extract(3usize)
    );
}

/// c + A·B of 16×16 and 16×8 halves by a warp: of c, elements 2h and 2h + 1 are in row lane / 4 + 8h,
/// columns 2·(lane % 4) and the next.
#[cube]
pub(crate) fn mma_16x8x16(
    a: Vector<u32, Const<4>>,
    b0: u32,
    b1: u32,
    c: Vector<f32, Const<4>>,
    #[comptime] float: Float16,
) -> Vector<f32, Const<4>> {
    let out: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {o}, {a}, {{{b0}, {b1}}}, {c};",
        o = out(_) out, a = in(_) a, b0 = in(_) b0, b1 = in(_) b1, c = in(_) c,
        t = const float.name(), options(pure, nomem)
    );
    out
}

/// The same of 16×8 and 8×8.
#[cube]
pub(crate) fn mma_16x8x8(
    a0: u32,
    a1: u32,
    b: u32,
    c: Vector<f32, Const<4>>,
    #[comptime] float: Float16,
) -> Vector<f32, Const<4>> {
    let out: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k8.row.col.f32.{t}.{t}.f32 {o}, {{{a0}, {a1}}}, {{{b}}}, {c};",
        o = out(_) out, a0 = in(_) a0, a1 = in(_) a1, b = in(_) b, c = in(_) c,
        t = const float.name(), options(pure, nomem)
    );
    out
}

/// Copies 4 bytes, or makes them zero, without waiting.
#[cube]
pub(crate) fn copy_4(dst: u32, src: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.ca.shared.global [{d}], [{s}], 4, {n};",
        d = in(_) dst, s = in(_) src, n = in(_) bytes
    );
}

/// Two neighbouring f32 of shared memory.
#[cube]
pub(crate) fn load_pair(addr: u32) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!("ld.shared.v2.f32 {o}, [{a}];", o = out(_) pair, a = in(_) addr);
    pair
}

/// Two neighbouring words of shared memory.
#[cube]
pub(crate) fn load_words(addr: u32) -> Vector<u32, Const<2>> {
    let pair: Vector<u32, Const<2>>;
    gpu_asm!("ld.shared.v2.b32 {o}, [{a}];", o = out(_) pair, a = in(_) addr);
    pair
}

/// Four neighbouring words of shared memory.
#[cube]
pub(crate) fn load_16_shared(addr: u32) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!("ld.shared.v4.b32 {o}, [{a}];", o = out(_) out, a = in(_) addr);
    out
}

/// Stores two f32 side by side to shared memory, to an address that is a multiple of 8.
#[cube]
pub(crate) fn store_two_shared(addr: u32, first: f32, second: f32) {
    gpu_asm!(
        "st.shared.v2.f32 [{to}], {{{a}, {b}}};",
        to = in(_) addr, a = in(_) first, b = in(_) second
    );
}

/// Stores eight numbers, rounded, to global memory: 16 bytes that begin at a multiple of 16.
#[cube]
pub(crate) fn store_eight(addr: u64, x: &Array<f32>, #[comptime] float: Float16) {
    gpu_asm!(
        "{{ .reg .b32 p<4>;",
        "cvt.rn.{t}x2.f32 p0, {b}, {a}; cvt.rn.{t}x2.f32 p1, {d}, {c};",
        "cvt.rn.{t}x2.f32 p2, {f}, {e}; cvt.rn.{t}x2.f32 p3, {h}, {g};",
        "st.global.v4.b32 [{to}], {{p0, p1, p2, p3}}; }}",
        to = in(_) addr, t = const float.name(),
        a = in(_) x[0], b = in(_) x[1], c = in(_) x[2], d = in(_) x[3],
        e = in(_) x[4], f = in(_) x[5], g = in(_) x[6], h = in(_) x[7]
    );
}

/// Stores eight numbers, rounded, to global memory if `there`: 16 bytes that begin at a multiple of 16. Without a branch, so
/// that what comes before is not put behind one.
#[cube]
pub(crate) fn store_eight_if(there: bool, addr: u64, x: &Array<f32>, #[comptime] float: Float16) {
    let there = u32::cast_from(there);
    gpu_asm!(
        "{{ .reg .b32 p<4>; .reg .pred there; setp.ne.u32 there, {is}, 0;",
        "cvt.rn.{t}x2.f32 p0, {b}, {a}; cvt.rn.{t}x2.f32 p1, {d}, {c};",
        "cvt.rn.{t}x2.f32 p2, {f}, {e}; cvt.rn.{t}x2.f32 p3, {h}, {g};",
        "@there st.global.v4.b32 [{to}], {{p0, p1, p2, p3}}; }}",
        is = in(_) there, to = in(_) addr, t = const float.name(),
        a = in(_) x[0], b = in(_) x[1], c = in(_) x[2], d = in(_) x[3],
        e = in(_) x[4], f = in(_) x[5], g = in(_) x[6], h = in(_) x[7]
    );
}

/// Four words of global memory, each as it is now, from an address that is a multiple of 16.
#[cube]
pub(crate) fn load_words_now(addr: u64) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!("ld.relaxed.gpu.global.v4.b32 {o}, [{a}];", o = out(_) words, a = in(_) addr);
    words
}

/// Stores four words for cubes that look for them, to an address that is a multiple of 16.
#[cube]
pub(crate) fn store_words_now(addr: u64, quad: Vector<u32, Const<4>>) {
    gpu_asm!(
        "st.relaxed.gpu.global.v4.b32 [{to}], {{{a}, {b}, {c}, {d}}};",
        to = in(_) addr, a = in(_) quad.extract(0usize), b = in(_) quad.extract(1usize),
        c = in(_) quad.extract(2usize), d = in(_) quad.extract(3usize)
    );
}

/// Stores two numbers side by side to global memory, from an address that is a multiple of 8.
#[cube]
pub(crate) fn store_two(addr: u64, first: f32, second: f32) {
    gpu_asm!(
        "st.global.v2.f32 [{to}], {{{a}, {b}}};",
        to = in(_) addr, a = in(_) first, b = in(_) second
    );
}

/// The two bf16 of a word, the lower one first.
#[cube]
pub(crate) fn bf16_pair(word: u32) -> (f32, f32) {
    (f32::reinterpret(word << 16), f32::reinterpret(word & 0xFFFF_0000u32))
}

/// One of the two numbers of a word.
#[cube]
pub(crate) fn half_of(word: u32, #[comptime] upper: bool, #[comptime] float: Float16) -> f32 {
    if comptime!(float == Float16::Bf16) {
        if comptime!(upper) {
            f32::reinterpret(word & 0xFFFF_0000u32)
        } else {
            f32::reinterpret(word << 16)
        }
    } else {
        let out: f32;
        gpu_asm!(
            "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {w}; cvt.f32.f16 {o}, {part}; }}",
            o = out(_) out, w = in(_) word, part = const if upper { "high" } else { "low" },
            options(pure, nomem)
        );
        out
    }
}

/// Two numbers as sums of two bf16: the first parts side by side, and the second ones.
#[cube]
pub(crate) fn two_bf16(first: f32, second: f32) -> (u32, u32) {
    let high = round_pair(first, second, Float16::Bf16);
    let (a, b) = bf16_pair(high);
    (high, round_pair(first - a, second - b, Float16::Bf16))
}

/// A word of shared memory.
#[cube]
pub(crate) fn load_word(addr: u32) -> u32 {
    let word: u32;
    gpu_asm!("ld.shared.b32 {o}, [{a}];", o = out(_) word, a = in(_) addr);
    word
}

/// Stores a word to shared memory.
#[cube]
pub(crate) fn store_word(addr: u32, word: u32) {
    gpu_asm!("st.shared.b32 [{a}], {w};", a = in(_) addr, w = in(_) word);
}

/// Stores four neighbouring words to shared memory, to an address that is a multiple of 16.
#[cube]
pub(crate) fn store_16_shared(addr: u32, quad: Vector<u32, Const<4>>) {
    gpu_asm!(
        "st.shared.v4.b32 [{to}], {{{a}, {b}, {c}, {d}}};",
        to = in(_) addr, a = in(_) quad.extract(0usize), b = in(_) quad.extract(1usize),
        c = in(_) quad.extract(2usize), d = in(_) quad.extract(3usize)
    );
}

/// Stores two numbers, rounded, side by side to shared memory.
#[cube]
pub(crate) fn store_pair(addr: u32, first: f32, second: f32, #[comptime] float: Float16) {
    gpu_asm!(
        "{{ .reg .b32 pair; cvt.rn.{t}x2.f32 pair, {h}, {l}; st.shared.b32 [{a}], pair; }}",
        a = in(_) addr, h = in(_) second, l = in(_) first, t = const float.name()
    );
}

/// Two numbers rounded, the first one in the lower half.
#[cube]
pub(crate) fn round_pair(first: f32, second: f32, #[comptime] float: Float16) -> u32 {
    let rounded: u32;
    gpu_asm!(
        "cvt.rn.{t}x2.f32 {o}, {h}, {l};",
        o = out(_) rounded, h = in(_) second, l = in(_) first, t = const float.name(),
        options(pure, nomem)
    );
    rounded
}

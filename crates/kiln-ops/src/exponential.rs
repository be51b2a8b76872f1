//! Exponentials and sigmoids that keep up with memory.
//!
//! At the speed of memory they must cost few instructions. On CUDA an exponential is one
//! multiply-add and `ex2.approx` (relative error near 2⁻²²), and shifts are kept in units of log 2
//! there: with a shift that is exact in those units the multiply-add rounds once. A reciprocal is
//! `rcp.approx` (1 unit in the last place). Elsewhere they are what the device has.

use cubecl::prelude::*;

/// Whether the device takes PTX instructions, the comptime flag of the functions here.
pub(crate) fn has_ptx(client: &Client) -> bool {
    crate::device::Hardware::of(client).ptx
}

/// What shifts are measured in: one of these is a factor e.
#[cube]
pub(crate) fn unit_of_shifts(#[comptime] ptx: bool) -> f32 {
    let unit = comptime!(if ptx { std::f32::consts::LOG2_E } else { 1.0f32 });
    f32::new(unit)
}

/// e^x / e^(shift / unit).
#[cube]
pub(crate) fn exponential<N: Size>(
    x: Vector<f32, N>,
    shift: f32,
    #[comptime] ptx: bool,
) -> Vector<f32, N> {
    let mut out = Vector::<f32, N>::new(0.0f32);
    if comptime!(ptx) {
        #[unroll]
        for i in 0..N::value() {
            out.insert(i, exp2(fma(x.extract(i), unit_of_shifts(ptx), -shift)));
        }
    } else {
        out = Vector::exp(x - Vector::new(shift));
    }
    out
}

/// The factor that a shift is.
#[cube]
pub(crate) fn factor(shift: f32, #[comptime] ptx: bool) -> f32 {
    exponential::<Const<1>>(Vector::new(0.0f32), -shift, ptx).extract(0usize)
}

/// 1 / (1 + e^-x). Where e^-x overflows the quotient is 0, as it should be.
#[cube]
pub(crate) fn sigmoid<N: Size>(x: Vector<f32, N>, #[comptime] ptx: bool) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    let mut out = one + exponential::<N>(-x, f32::new(0.0), ptx);
    if comptime!(ptx) {
        #[unroll]
        for i in 0..N::value() {
            out.insert(i, reciprocal(out.extract(i)));
        }
    } else {
        out = one / out;
    }
    out
}

/// 1 / x by `rcp.approx`, on CUDA.
#[cube]
pub(crate) fn reciprocal(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("rcp.approx.ftz.f32 {o}, {x};", o = out(_) out, x = in(_) x, options(pure, nomem));
    out
}

/// 2^x by `ex2.approx`, on CUDA.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {o}, {x};", o = out(_) out, x = in(_) x, options(pure, nomem));
    out
}

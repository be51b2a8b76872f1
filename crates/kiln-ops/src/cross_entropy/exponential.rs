//! Exponentials that keep up with memory.
//!
//! At the speed of memory an exponential must cost few instructions, so on CUDA it is one
//! multiply-add and `ex2.approx` (relative error near 2⁻²²), and shifts are kept in units of log 2
//! there: with a shift that is exact in those units the multiply-add rounds once.

use cubecl::prelude::*;

/// What shifts are measured in: one of these is a factor e.
#[cube]
pub(super) fn unit_of_shifts(#[comptime] ptx: bool) -> f32 {
    let unit = comptime!(if ptx { std::f32::consts::LOG2_E } else { 1.0f32 });
    f32::new(unit)
}

/// e^x / e^(shift / unit).
#[cube]
pub(super) fn exponential<N: Size>(
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
pub(super) fn factor(shift: f32, #[comptime] ptx: bool) -> f32 {
    exponential::<Const<1>>(Vector::new(0.0f32), -shift, ptx).extract(0usize)
}

#[cube]
fn exp2(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {o}, {x};", o = out(_) out, x = in(_) x, options(pure, nomem));
    out
}

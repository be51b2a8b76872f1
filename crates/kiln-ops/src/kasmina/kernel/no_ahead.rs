//! Without CUDA no rows come through shared memory.

use super::backward::Wanted;
use super::{Garden, Place, Plan, Sizes};
use cubecl::prelude::*;

pub(super) fn takes(_: &Client, _: Plan, _: Wanted, _share: usize, _bytes: usize) -> bool {
    false
}

pub(super) fn wraps(_: Plan, _share: usize) -> bool {
    false
}

#[cube]
pub(super) fn down<E: Float, W: Float, I: Int, N: Size>(
    _x: &[Vector<E, N>],
    _dy: &[Vector<E, N>],
    _garden: &Garden<W, I>,
    _dx: &mut [Vector<E, N>],
    _sums: &mut Array<Vector<f32, N>>,
    _sizes: &Sizes,
    _place: &Place,
    #[comptime] _plan: Plan,
    #[comptime] _wanted: Wanted,
) {
}

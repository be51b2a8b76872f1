//! Numbers of other units of a plane.

use cubecl::prelude::*;

/// Whose number a unit gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shuffle {
    /// The lane that differs in these bits.
    Xor,
    /// So many lanes before; where there is none, some number.
    Up,
    /// So many lanes behind.
    Down,
    /// This lane.
    Lane,
}

impl Shuffle {
    /// In PTX, with the lane it stops at.
    fn ptx(self) -> (&'static str, u32) {
        match self {
            Self::Xor => ("bfly", 31),
            Self::Up => ("up", 0),
            Self::Down => ("down", 31),
            Self::Lane => ("idx", 31),
        }
    }
}

/// The number of another unit. `whole`: all lanes of the plane are there and call this, on a device that takes PTX. Else
/// CubeCL asks at every shuffle which are, three instructions that wait for each other.
#[cube]
pub(crate) fn shuffle(x: f32, by: u32, #[comptime] whose: Shuffle, #[comptime] whole: bool) -> f32 {
    if comptime!(whole) {
        shuffle_whole(x, by, whose)
    } else if comptime!(whose == Shuffle::Xor) {
        plane_shuffle_xor(x, by)
    } else if comptime!(whose == Shuffle::Up) {
        plane_shuffle_up(x, by)
    } else if comptime!(whose == Shuffle::Down) {
        plane_shuffle_down(x, by)
    } else {
        plane_shuffle(x, by)
    }
}

#[cube]
fn shuffle_whole(x: f32, by: u32, #[comptime] whose: Shuffle) -> f32 {
    let (mode, last) = comptime!(whose.ptx());
    // An operand that is a mutable variable would be passed by its address.
    let mut own = Array::<f32>::new(1usize);
    own[0] = x;
    let out: f32;
    gpu_asm!(
        "shfl.sync.{mode}.b32 {o}, {x}, {by}, {last}, 0xffffffff;",
        mode = const mode, o = out(_) out, x = in(_) own[0], by = in(_) by, last = const last, options(nomem)
    );
    out
}

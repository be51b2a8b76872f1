//! What is combined: items of a few f32 registers under an associative operation.

use cubecl::prelude::*;

/// An associative operation on items of a few f32 registers.
///
/// An item is an array of [`REGISTERS`](Self::REGISTERS) f32. The operation need not be commutative:
/// reductions and scans keep the order of the items. Rounding makes it only nearly associative, so the
/// order of the combinations is fixed as well, and two runs agree bit for bit.
#[cube]
pub trait Combine: Send + Sync + 'static {
    /// f32 of an item.
    const REGISTERS: usize;
    /// Whether `combine(a, b)` and `combine(b, a)` are the same, bit for bit; saves exchanges.
    const COMMUTATIVE: bool;

    /// The item that changes none.
    fn identity() -> Array<f32>;

    /// Two neighbours as one.
    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32>;
}

/// `N` sums at once.
pub struct Sums<const N: usize>;

#[cube]
impl<const N: usize> Combine for Sums<N> {
    const REGISTERS: usize = N;
    const COMMUTATIVE: bool = true;

    fn identity() -> Array<f32> {
        // Arrays begin with zeros.
        Array::<f32>::new(comptime!(N))
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        let mut sums = Array::<f32>::new(comptime!(N));
        #[unroll]
        for k in 0..comptime!(N) {
            sums[k] = earlier[k] + later[k];
        }
        sums
    }
}

/// The maximum of finite numbers.
pub struct Max;

#[cube]
impl Combine for Max {
    const REGISTERS: usize = 1;
    const COMMUTATIVE: bool = true;

    fn identity() -> Array<f32> {
        let mut lowest = Array::<f32>::new(1usize);
        lowest[0] = f32::new(-f32::MAX);
        lowest
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        let mut largest = Array::<f32>::new(1usize);
        largest[0] = max(earlier[0], later[0]);
        largest
    }
}

/// Takes `value` into the registers of `item`.
#[cube]
pub(crate) fn assign<C: Combine>(item: &mut Array<f32>, value: &Array<f32>) {
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        item[k] = value[k];
    }
}

/// `then` where the condition holds, else `or_else`.
#[cube]
pub(crate) fn choose<C: Combine>(
    condition: bool,
    then: &Array<f32>,
    or_else: &Array<f32>,
) -> Array<f32> {
    let mut item = Array::<f32>::new(comptime!(C::REGISTERS));
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        item[k] = select(condition, then[k], or_else[k]);
    }
    item
}

/// Item `at` of `memory`, whose registers are `part` f32 apart.
#[cube]
pub(crate) fn read<C: Combine>(memory: &[f32], at: usize, part: usize) -> Array<f32> {
    let mut item = Array::<f32>::new(comptime!(C::REGISTERS));
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        item[k] = memory[k * part + at];
    }
    item
}

/// Writes item `at` of `memory`, as [`read`] reads it.
#[cube]
pub(crate) fn write<C: Combine>(memory: &mut [f32], at: usize, part: usize, item: &Array<f32>) {
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        memory[k * part + at] = item[k];
    }
}

//! Reductions in a fixed order: over a vector, over the units of a plane, of a row or of a cube, down
//! columns. What they combine is a [`Combine`].

// `#[cube]` makes public items without documentation of what is public here.
#![allow(missing_docs)]

mod columns;
mod combine;
mod exchange;
mod plan;
mod units;

pub(crate) use columns::column_sum;
pub use columns::columns;
pub use combine::{Combine, Max, Sums};
pub(crate) use combine::{assign, choose, read, write};
pub(crate) use exchange::{Shuffle, shuffle};
pub(crate) use plan::RowPlan;
pub(crate) use units::plane;
pub use units::{RowUnits, rows};

use cubecl::prelude::*;

/// Combines the elements of a vector, first to last; an item is one f32.
#[cube]
pub fn vector<C: Combine, N: Size>(value: Vector<f32, N>) -> f32 {
    let mut item = Array::<f32>::new(1usize);
    item[0] = value.extract(0usize);
    #[unroll]
    for i in 1..N::value() {
        let mut next = Array::<f32>::new(1usize);
        next[0] = value.extract(i);
        let both = C::combine(&item, &next);
        assign::<C>(&mut item, &both);
    }
    item[0]
}

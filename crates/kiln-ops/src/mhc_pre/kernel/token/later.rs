//! What ⟨dh_in, x[i]⟩ adds to the gradients of α and bias where they come with dx.

use super::backward::{Totals, units_of_sums};
use super::{Given, Inputs, Plan, Sizes, sigmoid, take};
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine, RowUnits, Sums};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
fn later_kernel<C: Combine, N: Size>(
    mix: &[Vector<f32, N>],
    inputs: &Inputs,
    dots: &[Vector<f32, N>],
    bias: &mut [f32],
    alpha: &mut [f32],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[comptime] row: RowUnits,
) {
    let n = comptime!(plan.streams);
    let first = CUBE_POS * comptime!(row.units as usize);
    let at = first + UNIT_POS_X as usize;
    let mut sums = C::identity();
    if at < sizes.tokens {
        let (mix, dots) = (take(mix, at * sizes.mix, n), take(dots, at * n, n));
        let r = inputs.norm[at];
        #[unroll]
        for i in 0..n {
            let y = mix[i] * r;
            let s = sigmoid(inputs.alpha[0] * y + inputs.bias[i], plan.ptx);
            let g = dots[i] * s * (1.0 - s);
            sums[i] = g;
            sums[n] += g * y;
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(C::REGISTERS * row.shared()));
    sync_cube();
    reduce::rows::<C>(&mut sums, &mut shared, row);
    if UNIT_POS_X == 0 && first < sizes.tokens {
        #[unroll]
        for i in 0..n {
            bias[CUBE_POS * comptime!(plan.rows()) + i] = sums[i];
        }
        alpha[CUBE_POS * 3] = sums[n];
    }
}

/// Puts what ⟨dh_in, x[i]⟩ gives α and bias, which nothing else gives their rows, in its place among the sums.
pub(in super::super) fn add_later(given: &Given<'_>, dots: &CubeTensor, to: &Totals) {
    // One row a cube, so the units must be those of the backward, whose registers come first.
    match given.d.streams {
        1 => later::<Sums<6>, Sums<2>>(given, dots, to),
        2 => later::<Sums<11>, Sums<3>>(given, dots, to),
        3 => later::<Sums<18>, Sums<4>>(given, dots, to),
        4 => later::<Sums<27>, Sums<5>>(given, dots, to),
        5 => later::<Sums<38>, Sums<6>>(given, dots, to),
        _ => unreachable!("of more streams they do not come later"),
    }
}

fn later<All: Combine, C: Combine>(given: &Given<'_>, dots: &CubeTensor, to: &Totals) {
    let client = &dots.client;
    let plan = Plan::new(given, client);
    let row = units_of_sums::<All>(client);
    let mix = Rows::new(given.mix.clone());
    let size = given.vector_size(&mix, &[dots]);
    let address = launch::address_type(&[&mix.tensor, dots, &to.bias]);
    launch::plans::note("mhc_pre token later", &(plan, row, size, address), &[]);
    let sizes = given.sizes(&mix);
    // SAFETY: tokens are checked against their number, of which all tensors have as many rows, of whole
    // vectors; sums have a row a cube.
    unsafe {
        later_kernel::launch_unchecked::<C>(
            client,
            launch::grid(client, given.d.tokens.div_ceil(row.units as usize)),
            row.cube_dim(),
            address,
            size,
            mix.tensor.into_buffer_arg(),
            given.inputs(),
            dots.clone().into_buffer_arg(),
            to.bias.clone().into_buffer_arg(),
            to.alpha.clone().into_buffer_arg(),
            sizes,
            plan,
            row,
        );
    }
}

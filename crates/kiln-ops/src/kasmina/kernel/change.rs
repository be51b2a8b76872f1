//! Changes of seeds: a unit for each, which writes the fields that it names.

use crate::kasmina::OP;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor, tensor::IntTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 64;
/// Integers of a change: which seed, which fields (bit 0 lifecycle, 1 blueprint_id, 2 blend, 3 alpha), and the first three.
const NUMBERS: usize = 5;

/// Seeds of a backend.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct State<B: Backend> {
    /// `[C]`.
    pub alpha: FloatTensor<B>,
    /// `[C]`.
    pub lifecycle: IntTensor<B>,
    /// `[C]`.
    pub blueprint_id: IntTensor<B>,
    /// `[C]`.
    pub blend: IntTensor<B>,
}

#[cube(launch_unchecked)]
fn change_kernel<A: Float, I: Int, U: Int>(
    codes: &[U],
    alphas: &[f32],
    alpha: &mut [A],
    lifecycle: &mut [I],
    blueprint_id: &mut [I],
    blend: &mut [I],
    changes: usize,
    #[define(A, I, U)] _dtypes: [ElemType; 3],
) {
    let change = ABSOLUTE_POS;
    if change < changes {
        let at = change * comptime!(NUMBERS);
        let seed = u32::cast_from(codes[at]) as usize;
        let fields = u32::cast_from(codes[at + 1]);
        if fields & 1 != 0 {
            lifecycle[seed] = I::cast_from(codes[at + 2]);
        }
        if fields & 2 != 0 {
            blueprint_id[seed] = I::cast_from(codes[at + 3]);
        }
        if fields & 4 != 0 {
            blend[seed] = I::cast_from(codes[at + 4]);
        }
        if fields & 8 != 0 {
            alpha[seed] = A::cast_from(alphas[change]);
        }
    }
}

/// alpha, lifecycle, blueprint_id and blend after the changes: where they were, if nobody else holds them, else in copies.
pub(in super::super) fn change(
    of: State<CubeBackend>,
    codes: CubeTensor,
    alphas: CubeTensor,
) -> [CubeTensor; 4] {
    let own = |mut tensor: CubeTensor| match tensor.is_contiguous()
        && launch::is_own(&mut tensor, OP, "seeds")
    {
        true => tensor,
        false => into_contiguous(tensor).copy(),
    };
    let client = of.alpha.client.clone();
    let fields = [of.alpha, of.lifecycle, of.blueprint_id, of.blend].map(own);
    let changes = codes.meta.shape()[0];
    let dtypes = [fields[0].dtype, fields[1].dtype, codes.dtype].map(dtype_to_elem_type);
    let [alpha, lifecycle, blueprint_id, blend] =
        fields.each_ref().map(|of| of.clone().into_buffer_arg());
    // SAFETY: the seeds have been checked, and a unit past the last change does nothing.
    unsafe {
        change_kernel::launch_unchecked(
            &client,
            launch::grid(&client, changes.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            into_contiguous(codes).into_buffer_arg(),
            into_contiguous(alphas).into_buffer_arg(),
            alpha,
            lifecycle,
            blueprint_id,
            blend,
            changes,
            dtypes,
        );
    }
    fields
}

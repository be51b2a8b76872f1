//! dh_post and dh_res: the sums of what boxes of columns have of them.

use super::Dims;
use crate::launch;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

const UNITS: u32 = 256;

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_up_kernel(
    parts_of: &[f32],
    post: &mut [f32],
    res: &mut [f32],
    all: usize,
    parts: usize,
    #[comptime] n: usize,
) {
    let at = CUBE_POS * comptime!(UNITS as usize) + UNIT_POS as usize;
    if at < all {
        let mut sum = parts_of[at];
        for part in 1..parts {
            sum += parts_of[part * all + at];
        }
        let (token, k) = (at / comptime!(n * (n + 1)), at % comptime!(n * (n + 1)));
        if k < comptime!(n * n) {
            res[token * comptime!(n * n) + k] = sum;
        } else {
            post[token * n + (k - comptime!(n * n))] = sum;
        }
    }
}

/// Adds parts up, in their order, each `[T·(n² + n)]`: of each token what dh_res has, then dh_post.
pub(super) fn add_up(parts_of: &CubeTensor, d: Dims, post: &CubeTensor, res: &CubeTensor) {
    let client = &post.client;
    let all = d.tokens * d.mixing();
    let parts = parts_of.meta.shape()[0];
    let address = launch::address_type(&[parts_of, post, res]);
    launch::plans::note("mhc_post sums", &(d.streams, address), &[("several", parts > 1)]);
    // SAFETY: numbers of a token are checked against those of all.
    unsafe {
        add_up_kernel::launch_unchecked(
            client,
            launch::grid(client, all.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address,
            parts_of.clone().into_buffer_arg(),
            post.clone().into_buffer_arg(),
            res.clone().into_buffer_arg(),
            all,
            parts,
            d.streams,
        );
    }
}

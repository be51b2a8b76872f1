//! dh_post and dh_res: the sums of what boxes of columns have of them.

use super::Dims;
use crate::launch;
use crate::tile::cuda::ptx::{global_address, load_quad};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

const UNITS: u32 = 256;
/// Parts whose loads are on their way at a time.
const AT_A_TIME: usize = 6;

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_up_kernel(
    parts_of: &[f32],
    post: &mut [f32],
    res: &mut [f32],
    all: usize,
    parts: usize,
    size: usize,
    #[comptime] n: usize,
) {
    let first = (CUBE_POS * comptime!(UNITS as usize) + UNIT_POS as usize) * 4;
    if first < all {
        let from = global_address::<f32>(parts_of.as_ptr()) + u64::cast_from(first) * 4;
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        for of in range_stepped(0usize, parts, AT_A_TIME) {
            let mut some = Array::<Vector<f32, Const<4>>>::new(AT_A_TIME);
            #[unroll]
            for i in 0..AT_A_TIME {
                let part = min(of + i, parts - 1);
                some[i] = load_quad(from + u64::cast_from(part) * (u64::cast_from(size) * 4));
            }
            #[unroll]
            for i in 0..AT_A_TIME {
                sum += select(of + i < parts, some[i], Vector::new(0.0f32));
            }
        }
        #[unroll]
        for e in 0..4usize {
            let at = first + e;
            let (token, k) = (at / comptime!(n * (n + 1)), at % comptime!(n * (n + 1)));
            if at < all {
                if k < comptime!(n * n) {
                    res[token * comptime!(n * n) + k] = sum.extract(e);
                } else {
                    post[token * n + (k - comptime!(n * n))] = sum.extract(e);
                }
            }
        }
    }
}

/// Adds parts up, in their order, each of whole sixteens of tokens: of a token what dh_res has, then dh_post.
pub(super) fn add_up(parts_of: &CubeTensor, d: Dims, post: &CubeTensor, res: &CubeTensor) {
    let client = &post.client;
    let all = d.tokens * d.mixing();
    let [parts, size] = parts_of.meta.shape()[..] else { unreachable!("rank 2") };
    let address = launch::address_type(&[parts_of, post, res]);
    launch::plans::note("mhc_post sums", &(d.streams, address), &[("several", parts > 1)]);
    // SAFETY: numbers of a token are checked against those of all, and parts hold whole fours.
    unsafe {
        add_up_kernel::launch_unchecked(
            client,
            launch::grid(client, all.div_ceil(4 * UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address,
            parts_of.clone().into_buffer_arg(),
            post.clone().into_buffer_arg(),
            res.clone().into_buffer_arg(),
            all,
            parts,
            size,
            d.streams,
        );
    }
}

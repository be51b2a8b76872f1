//! dx and dφ from one pass over x and dh_in, and over what dx has from elsewhere, bf16, on Hopper; and, where x is what a layer
//! left, what that layer takes back of dx.
//!
//! A warp has 64 columns of a stream, of which it holds φ and the sum of dφ in registers, and goes over tokens, sixteen at
//! a time: dφ += dmᵀ·x, and dx = dm·φ with what x and dh_in add, in the place of x in shared memory, from where TMA
//! takes it, or the warps of all streams make what the layer before takes back. The warps of a cube have the same columns of
//! all streams, and share dh_in. Another warp loads, and cuts dm into two bf16. φ and dm are sums of two bf16 each, all four
//! products of which are added up.
//!
//! Cubes that have other tokens leave sums of their own, which are added up in order.

mod back;
mod kernel;
mod load;
mod plan;
mod sums;

use super::input::Gradients;
use super::{Dims, Post, flat, hopper};
use crate::launch;
use crate::reduce::column_sum;
use crate::tile::Family;
use crate::tile::cuda::maps::map;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{InputsLaunch, PartialsLaunch, SizesLaunch, together_kernel};
use plan::{BOX, Beside, TOKENS, Together};

/// The layer before, whose streams and output made x: as `[T, n·D]` and `[T, D]`, and its h_post and h_res.
struct Before<'a> {
    x: &'a CubeTensor,
    f: &'a CubeTensor,
    h_post: &'a CubeTensor,
    h_res: &'a CubeTensor,
    /// Where the gradient of the output goes.
    df: &'a CubeTensor,
}

/// How many cubes go through the tokens beside each other.
pub(super) struct Plan {
    together: Together,
    across: usize,
    groups: usize,
}

impl Plan {
    /// For x as `[T, n·D]`, if this kernel takes it.
    pub(super) fn new(
        x: &CubeTensor,
        dh_in: &CubeTensor,
        also: Option<&CubeTensor>,
        d: Dims,
        family: Option<Family>,
    ) -> Option<Self> {
        let tensors = [x, dh_in, also.unwrap_or(x)];
        let beside = if also.is_some() { Beside::Also } else { Beside::Nothing };
        Self::of(&tensors, beside, d, family)
    }

    fn of(
        tensors: &[&CubeTensor],
        beside: Beside,
        d: Dims,
        family: Option<Family>,
    ) -> Option<Self> {
        let client = &tensors[0].client;
        if !hopper(tensors, d, family) {
            return None;
        }
        let memory = client.properties().hardware.max_shared_memory_size;
        let together = Together::new(d.streams, d.width, beside, memory)?;
        let across = d.width.div_ceil(together.boxes * BOX);
        let groups = (launch::multiprocessors(client) / across).max(1);
        Some(Self { together, across, groups: groups.min(d.tokens.div_ceil(TOKENS)) })
    }

    /// Writes dx, and returns dφ.
    pub(super) fn run(
        self,
        op: &'static str,
        x: &CubeTensor,
        phi: &CubeTensor,
        dh_in: &CubeTensor,
        of: &Gradients<'_>,
        d: Dims,
        dx: &CubeTensor,
    ) -> CubeTensor {
        self.launch(op, x, phi, dh_in, of, None, d, dx).0
    }

    /// The same; also what there is of dh_res and dh_post of each token of the layer before, a part for each box of columns.
    fn launch(
        self,
        op: &'static str,
        x: &CubeTensor,
        phi: &CubeTensor,
        dh_in: &CubeTensor,
        of: &Gradients<'_>,
        before: Option<&Before<'_>>,
        d: Dims,
        dx: &CubeTensor,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let Self { together, across, groups } = self;
        let client = &x.client;
        let columns = d.streams * d.width;
        let output =
            |name, rows| launch::output(phi, op, name, Shape::new([rows, columns]), DType::F32);
        let partial = output("partial phi", groups * d.rows);
        let dots = before.map(|_| {
            let shape = Shape::new([across * together.boxes, d.tokens * d.mixing()]);
            launch::output(phi, op, "partial dots", shape, DType::F32)
        });
        let of_dots = dots.as_ref().unwrap_or(&partial);
        let address = launch::address_type(&[phi, of.dm, &partial, of_dots]);
        let turns = d.tokens.div_ceil(TOKENS).div_ceil(groups);
        let ways = [
            ("more tokens than stages", turns > together.stages),
            ("several groups", groups > 1),
            ("columns beyond the last", d.width < across * together.boxes * BOX),
        ];
        launch::plans::note("mhc_pre together", &(&together, address), &ways);
        let of_streams = |tensor: &CubeTensor| {
            map(tensor, [d.streams, d.tokens, d.width], [d.width, columns], TOKENS)
        };
        let of_one = |tensor: &CubeTensor| {
            map(tensor, [1, d.tokens, d.width], [d.tokens * d.width, d.width], TOKENS)
        };
        let argument = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        // What there is not is not looked at.
        let (x_before, f) = before.map_or((x, dh_in), |before| (before.x, before.f));
        let df = before.map_or(dh_in, |before| before.df);
        let [h_post, h_res] =
            before.map_or([of.weights, of.weights], |before| [before.h_post, before.h_res]);
        // SAFETY: TMA keeps to the shapes of its maps; rows, columns and tokens are checked against their numbers.
        unsafe {
            together_kernel::launch_unchecked(
                client,
                launch::grid(client, across * groups),
                CubeDim::new_1d(32 * (together.warps() as u32 + 1)),
                address,
                of_streams(x),
                of_one(dh_in),
                of_streams(of.also.unwrap_or(x)),
                of_streams(x_before),
                of_one(f),
                of_streams(dx),
                of_one(df),
                InputsLaunch::new(
                    argument(phi),
                    argument(of.dm),
                    argument(of.along),
                    argument(of.weights),
                    argument(h_post),
                    argument(h_res),
                ),
                PartialsLaunch::new(argument(&partial), argument(of_dots)),
                SizesLaunch::new(d.tokens as u32, d.width as u32, across as u32, groups as u32),
                together,
                dtype_to_elem_type(x.dtype),
            );
        }
        if groups == 1 {
            return (partial, dots);
        }
        let dphi = output("grad.phi", d.rows);
        column_sum(partial, groups, &dphi);
        (dphi, dots)
    }
}

/// dφ, and the gradients of the layer before: of its streams, its output, h_post and h_res. None if this kernel does not take
/// them.
pub(super) fn through(
    op: &'static str,
    x: &CubeTensor,
    phi: &CubeTensor,
    dh_in: &CubeTensor,
    of: &Gradients<'_>,
    before: &Post,
    d: Dims,
    family: Option<Family>,
) -> Option<(CubeTensor, [CubeTensor; 4])> {
    let also = of.also?;
    let gradient =
        |name, of: &CubeTensor| launch::output(x, op, name, of.meta.shape().clone(), of.dtype);
    // What follows copies, so it asks first.
    let plan = Plan::of(&[x, dh_in, also], Beside::Before, d, family)?;
    let streams = flat(before.x.clone(), d);
    let [f, h_post, h_res] =
        [&before.f, &before.h_post, &before.h_res].map(|of| into_contiguous(of.clone()));
    if ![&streams, &f].into_iter().all(launch::begins_at_16) {
        return None;
    }
    let (dx, df) = (gradient("grad.x", &before.x), gradient("grad.f", &f));
    let (dpost, dres) = (gradient("grad.h_post", &h_post), gradient("grad.h_res", &h_res));
    let mixed = Before { x: &streams, f: &f, h_post: &h_post, h_res: &h_res, df: &df };
    let (dphi, dots) = plan.launch(op, x, phi, dh_in, of, Some(&mixed), d, &dx);
    sums::add_up(&dots.expect("there is a layer before"), d, &dpost, &dres);
    Some((dphi, [dx, df, dpost, dres]))
}

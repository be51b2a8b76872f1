//! All that needs the streams in a backward, from one pass over x and dh_in, and over what dx has from elsewhere, bf16, on
//! Hopper: ⟨dh_in, x⟩, dx and dφ; and, where x is what a layer left, what that layer takes back of dx.
//!
//! Cubes that have different columns of the same tokens are a group. A cube goes over tokens, sixteen at a time, which a warp
//! loads. Another takes dh_in to each stream and leaves that for the group; one or two more, by turns, add up what the group
//! has of it, make dm, cut into two bf16, and the factors of x and dh_in, and add to dbias and dα. The others have 64 columns
//! of a stream each, of which they hold φ and the sum of dφ in registers: dφ += xᵀ·dm, and dx = dm·φ with what x and dh_in
//! add, in the place of x in shared memory, from where TMA takes it, or the warps of all streams make what the layer before
//! takes back. φ and dm are sums of two bf16 each.
//!
//! Groups have other tokens and leave sums of their own, which one launch adds up after, always in the same order.

mod back;
mod exchange;
mod kernel;
mod load;
mod numbers;
mod plan;
mod products;
mod sums;

use super::{Dims, Made, Post, Streams, hopper, token};
use crate::launch;
use crate::tile::Family;
use crate::tile::cuda::maps::map;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use exchange::ExchangeLaunch;
use kernel::{InputsLaunch, PartialsLaunch, SizesLaunch, together_kernel};
use plan::{BOX, Beside, COUNTERS, TOKENS, Together};
use sums::{Left, Sums};

/// The layer before, whose streams and output made x, and its h_post and h_res.
struct Before {
    x: Streams,
    f: CubeTensor,
    h_post: CubeTensor,
    h_res: CubeTensor,
    /// Of its streams.
    shape: Shape,
}

/// How many cubes go through the tokens beside each other.
pub(super) struct Plan {
    together: Together,
    across: usize,
    groups: usize,
    before: Option<Before>,
}

impl Plan {
    /// For x, if this kernel takes it.
    pub(super) fn new(
        [x, dh_in]: [&CubeTensor; 2],
        also: Option<&CubeTensor>,
        before: Option<&Post>,
        d: Dims,
        family: Option<Family>,
    ) -> Option<Self> {
        let plan = |beside| Self::of([x, dh_in, also.unwrap_or(x)], beside, d, family);
        if let Some(before) = before
            && let Some(plan) = plan(Beside::Before { also: also.is_some() })
        {
            let Post { x, f, h_post, h_res, .. } = before.clone();
            let shape = x.meta.shape().clone();
            let x = Streams::new(x, d);
            let [f, h_post, h_res] = [f, h_post, h_res].map(into_contiguous);
            if [&x.tensor, &f].into_iter().all(launch::begins_at_16) {
                return Some(Self { before: Some(Before { x, f, h_post, h_res, shape }), ..plan });
            }
        }
        plan(if also.is_some() { Beside::Also } else { Beside::Nothing })
    }

    fn of(
        tensors: [&CubeTensor; 3],
        beside: Beside,
        d: Dims,
        family: Option<Family>,
    ) -> Option<Self> {
        let client = &tensors[0].client;
        if !hopper(&tensors, d, family) {
            return None;
        }
        let memory = client.properties().hardware.max_shared_memory_size;
        let together = Together::new(d.streams, d.width, beside, memory)?;
        let across = d.width.div_ceil(together.boxes * BOX);
        // Cubes of a group wait for each other, so there are no more than multiprocessors: each has one for itself, and a
        // device begins all of a launch before those of the next one.
        let groups = (launch::multiprocessors(client) / across).min(d.tokens.div_ceil(TOKENS));
        let counted = groups * together.counters() <= COUNTERS;
        (groups > 0 && counted).then_some(Self { together, across, groups, before: None })
    }

    pub(super) fn run(
        self,
        op: &'static str,
        streams: &Streams,
        [phi, dh_in]: [&CubeTensor; 2],
        given: &token::Given<'_>,
        of: &token::Back,
        also: Option<&CubeTensor>,
        shape: Shape,
    ) -> Made {
        let Self { together, across, groups, before } = self;
        let d = given.d;
        let x = &streams.tensor;
        let client = &x.client;
        let columns = d.streams * d.width;
        let f32 =
            |name, shape: [usize; 2]| launch::output(phi, op, name, Shape::new(shape), DType::F32);
        let gradient =
            |name, of: &CubeTensor| launch::output(x, op, name, of.meta.shape().clone(), of.dtype);
        let dots = f32("partial dots", [groups * together.makers(), d.streams + 1]);
        let partial = f32("partial phi", [groups * d.rows, columns]);
        let sixteens = d.tokens.div_ceil(TOKENS);
        let layer_partial = before.as_ref().map(|_| {
            f32("partial layer", [across * together.boxes, sixteens * TOKENS * d.mixing()])
        });
        let parts = groups * together.places() * across * together.dots();
        let parts = launch::scratch(x, op, "parts", Shape::new([parts]), DType::F32);
        let shape = before.as_ref().map_or(shape, |before| before.shape.clone());
        let dx = launch::output(x, op, "grad.x", shape, x.dtype);
        let df = before.as_ref().map(|before| gradient("grad.f", &before.f));
        let of_layer = layer_partial.as_ref().unwrap_or(&partial);
        let address = launch::address_type(&[phi, &of.dm, &partial, of_layer, &parts]);
        let turns = sixteens.div_ceil(groups);
        let ways = [
            ("more tokens than stages", turns > together.stages_of_x),
            ("several groups", groups > 1),
            ("several cubes", across > 1),
            ("places taken again", across > 1 && turns > together.places()),
            ("columns beyond the last", d.width < across * together.boxes * BOX),
        ];
        let one_for_all = before.as_ref().map_or(streams, |before| &before.x).one_for_all;
        launch::plans::note("mhc_pre together", &(&together, address, one_for_all), &ways);
        let of_streams =
            |of: &Streams| map(&of.tensor, [d.streams, d.tokens, d.width], of.strides(d), TOKENS);
        let written = |tensor: &CubeTensor| {
            map(tensor, [d.streams, d.tokens, d.width], [d.width, columns], TOKENS)
        };
        let of_one = |tensor: &CubeTensor| {
            map(tensor, [1, d.tokens, d.width], [d.tokens * d.width, d.width], TOKENS)
        };
        let argument = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        // What there is not is not looked at.
        let token::Later { slopes, y } = of.later.as_ref().expect("dots come later");
        let (x_before, f) =
            before.as_ref().map_or((streams, dh_in), |before| (&before.x, &before.f));
        let [h_post, h_res] = before
            .as_ref()
            .map_or([&of.weights, &of.weights], |before| [&before.h_post, &before.h_res]);
        // SAFETY: TMA keeps to the shapes of its maps; rows, columns and tokens are checked against their numbers, and parts
        // are inside the places of the groups.
        unsafe {
            together_kernel::launch_unchecked(
                client,
                launch::grid(client, across * groups),
                CubeDim::new_1d(together.units() as u32),
                address,
                of_streams(streams),
                of_one(dh_in),
                also.map_or_else(|| of_streams(streams), written),
                of_streams(x_before),
                of_one(f),
                written(&dx),
                of_one(df.as_ref().unwrap_or(dh_in)),
                InputsLaunch::new(
                    argument(phi),
                    argument(&of.dm),
                    argument(&of.along),
                    argument(slopes),
                    argument(y),
                    argument(given.alpha),
                    argument(given.norm),
                    argument(&of.weights),
                    argument(h_post),
                    argument(h_res),
                ),
                ExchangeLaunch::new(
                    argument(&parts),
                    launch::kept::counters(client, "mhc_pre together", COUNTERS),
                ),
                PartialsLaunch::new(argument(&partial), argument(of_layer), argument(&dots)),
                SizesLaunch::new(d.tokens as u32, d.width as u32, across as u32, groups as u32),
                together,
                dtype_to_elem_type(x.dtype),
            );
        }
        let dphi = (groups > 1).then(|| f32("grad.phi", [d.rows, columns]));
        let layer = before.as_ref().map(|before| {
            [gradient("grad.h_post", &before.h_post), gradient("grad.h_res", &before.h_res)]
        });
        let [dalpha, dbias] = [("grad.alpha", 3), ("grad.bias", d.rows)]
            .map(|(name, sums)| launch::output(phi, op, name, Shape::new([sums]), DType::F32));
        let left =
            Left { phi: &partial, layer: layer_partial.as_ref(), totals: &of.sums, dots: &dots };
        let sums = Sums {
            phi: dphi.as_ref(),
            layer: layer.as_ref().map(|layer| layer.each_ref()),
            totals: [&dalpha, &dbias],
        };
        sums::add_up(left, sums, d.streams);
        let (dphi, totals) = (dphi.unwrap_or(partial), [dalpha, dbias]);
        match (layer, df) {
            (Some([dpost, dres]), Some(df)) => {
                Made { dphi, totals, dx: None, layer: Some([dx, df, dpost, dres]) }
            }
            _ => Made { dphi, totals, dx: Some(dx), layer: None },
        }
    }
}

//! Everything that a forward makes, from one pass over x, bf16, on Hopper.
//!
//! A cube holds a part of φ in registers, as the sum of two bf16: the columns of all streams from one place to another.
//! As many cubes as that takes for all columns are a group and go through the same tokens, sixteen at a time, which TMA
//! brings into a ring of stages. Eight warps multiply them with φ and add up squares. Four more warps take sixteen tokens
//! each in turn: one adds up what the eight have, hands it to the other cubes of the group, adds up what all of these
//! have, in order, and weights the streams, which still are in shared memory. Of the tokens of some turns, no more than it has
//! lanes, it makes h_post and h_res, a token a lane, some of Sinkhorn's repeats at each turn that follows: after the last
//! token nothing is loaded, so only those of the last tokens are left for then.
//!
//! Where a layer's output is to be mixed into the streams first, TMA brings it beside them, with the weights. Each warp mixes the
//! columns that it multiplies, in its registers, and puts them where the streams were, from where TMA takes them.
//!
//! A group of at most eight cubes is a cluster, whose cubes write into each other's memory. A larger one hands its sums
//! around in a workspace; its cubes wait for each other, so all of them have to run at a time. There are no more cubes than
//! multiprocessors, each has one for itself, and the cubes of a group follow each other: of a launch at most one group
//! is there in part, and waits until others that are done make room.
//!
//! A multiprocessor's share of 4 TB/s is 30 KB in a microsecond, so a stage of 40 KB takes 1.4. From a stage's load to its
//! end it is longer than that: the ring and the warps that take turns hide it.

mod coefficients;
mod exchange;
mod kernel;
mod multiply;
mod plan;
mod weight;

use super::token::Given;
use super::{Dims, Post, Streams, hopper};
use crate::launch;
use crate::tile::Family;
use crate::tile::cuda::maps::{map, map_of_boxes};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{SizesLaunch, once_kernel};
use plan::{BOX, COUNTERS, Once, TOKENS, UNITS};

/// How many tokens are made by how many groups.
pub(super) struct Plan {
    once: Once,
    groups: usize,
    /// The streams that are mixed, if that is done before.
    before: Option<Streams>,
}

impl Plan {
    /// For x, φ and h_in, if this kernel takes them; x is mixed of what was `before`.
    pub(super) fn new(
        [x, phi, h_in]: [&CubeTensor; 3],
        before: Option<&Post>,
        d: Dims,
        sinkhorn: bool,
        family: Option<Family>,
    ) -> Option<Self> {
        let client = &x.client;
        if !hopper(&[x, h_in], d, family) || !launch::begins_at_16(phi) {
            return None;
        }
        let mut mixed = None;
        if let Some(Post { x, f, h_post, h_res, .. }) = before {
            // Weights come in sixteens of bytes.
            let whole = (d.tokens * d.streams).is_multiple_of(4);
            let weights = [h_post, h_res].into_iter().all(launch::begins_at_16);
            if !whole || !weights || !hopper(&[x, f], d, family) {
                return None;
            }
            mixed = Some(Streams::find(x, d)?);
        }
        let multiprocessors = launch::multiprocessors(client);
        let memory = client.properties().hardware.max_shared_memory_size;
        let mixes = before.is_some();
        let once = Once::new(d.streams, d.width, sinkhorn, mixes, multiprocessors, memory)?;
        let most = once.groups(&x.device, multiprocessors);
        let groups = most.min(d.tokens.div_ceil(TOKENS));
        let fits = groups > 0 && groups * once.counters() <= COUNTERS;
        fits.then_some(Self { once, groups, before: mixed })
    }

    /// Writes h_in, h_post and h_res, and what `given` names: x·φᵀ and the norms; and x, if it is mixed.
    pub(super) fn run(
        self,
        op: &'static str,
        streams: &Streams,
        before: Option<&Post>,
        phi: &CubeTensor,
        given: &Given<'_>,
        [h_in, h_post, h_res]: [&CubeTensor; 3],
    ) {
        let Self { once, groups, before: mixed } = self;
        let (x, read) = (&streams.tensor, mixed.as_ref().unwrap_or(streams));
        let (d, options, client) = (given.d, given.options, &x.client);
        let parts = if once.clustered() {
            launch::unused(x, DType::F32)
        } else {
            let places = groups * once.places() * once.cubes * once.part();
            launch::scratch(x, op, "parts", Shape::new([places]), DType::F32)
        };
        let address = launch::address_type(&[phi, h_in, h_res, given.mix, &parts]);
        let sixteens = d.tokens.div_ceil(TOKENS);
        let name = match (once.mixes, once.clustered()) {
            (false, false) => "mhc_pre once",
            (false, true) => "mhc_pre once, in clusters",
            (true, false) => "mhc_post_pre once",
            (true, true) => "mhc_post_pre once, in clusters",
        };
        let ways = [
            ("more tokens than stages", sixteens.div_ceil(groups) > once.stages),
            ("places taken again", !once.clustered() && sixteens.div_ceil(groups) > once.places()),
            (
                "repeats while tokens pass",
                options.sinkhorn > 1 && once.passes(sixteens.div_ceil(groups)),
            ),
            ("columns beyond the last", d.width < once.cubes * once.boxes * BOX),
            ("ragged tokens", once.mixes && !d.tokens.is_multiple_of(TOKENS)),
        ];
        launch::plans::note(name, &(&once, address, read.one_for_all), &ways);
        let shape = [d.streams, d.tokens, d.width];
        // Longer pieces in the cache than are asked for took 4 % longer.
        let of_streams = |of: &Streams| {
            map_of_boxes(&of.tensor, shape, of.strides(d), [d.streams, TOKENS])
                .with_prefetch(TensorMapPrefetch::B128)
        };
        let layer = |of: &CubeTensor| {
            map(of, [1, d.tokens, d.width], [d.tokens * d.width, d.width], TOKENS)
                .with_prefetch(TensorMapPrefetch::B128)
        };
        // What there is not, is not touched.
        let (layer, weights) = match before {
            Some(Post { f, h_post, h_res, .. }) => (layer(f), [h_post.clone(), h_res.clone()]),
            None => {
                let unused = launch::unused(x, DType::F32);
                (layer(h_in), [unused.clone(), unused])
            }
        };
        let [layer_post, layer_res] = weights;
        let sizes = SizesLaunch::new(
            d.tokens as u32,
            d.width as u32,
            groups as u32,
            options.norm_eps as f32,
            options.hc_eps as f32,
            options.sinkhorn as u32,
        );
        // SAFETY: TMA keeps to the shape of its map; φ and results are only touched inside their rows and columns, the
        // workspace inside the places of the groups.
        unsafe {
            once_kernel::launch_unchecked(
                client,
                launch::grid(client, groups * once.cubes),
                CubeDim::new_1d(UNITS as u32),
                address,
                of_streams(read),
                phi.clone().into_buffer_arg(),
                given.alpha.clone().into_buffer_arg(),
                given.bias.clone().into_buffer_arg(),
                h_in.clone().into_buffer_arg(),
                h_post.clone().into_buffer_arg(),
                h_res.clone().into_buffer_arg(),
                given.mix.clone().into_buffer_arg(),
                given.norm.clone().into_buffer_arg(),
                parts.into_buffer_arg(),
                match once.clustered() {
                    true => launch::unused(x, DType::U32).into_buffer_arg(),
                    false => launch::kept::counters(client, "mhc_pre", COUNTERS),
                },
                layer,
                of_streams(streams),
                layer_post.into_buffer_arg(),
                layer_res.into_buffer_arg(),
                sizes,
                once,
                dtype_to_elem_type(x.dtype),
            );
        }
    }
}

//! Seeds as kernels see them.

use super::super::{Blend, SeedState};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor, tensor::IntTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use cubecl::prelude::*;

const LERP: u32 = Blend::Lerp as u32;
const SCALE: u32 = Blend::Scale as u32;
const ADD: u32 = Blend::Add as u32;
const MLP: u32 = Blend::Mlp as u32;
const FIRST: u32 = SeedState::Grafting as u32;
const LAST: u32 = SeedState::Fossilized as u32;
const FINE_TUNING: u32 = SeedState::FineTuning as u32;

/// Seeds and blueprints of a backend.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Blueprints<B: Backend> {
    /// `[P, H]`.
    pub rows: FloatTensor<B>,
    /// `[C]`, the element type of `rows`.
    pub alpha: FloatTensor<B>,
    /// `[C]`.
    pub lifecycle: IntTensor<B>,
    /// `[C]`.
    pub blueprint_id: IntTensor<B>,
    /// `[C]`.
    pub blend: IntTensor<B>,
}

/// The same as a kernel takes it.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Garden<W: Float, I: Int> {
    rows: Box<[W]>,
    alpha: Box<[W]>,
    lifecycle: Box<[I]>,
    blueprint_id: Box<[I]>,
    blend: Box<[I]>,
    /// P, and H.
    pub(super) count: usize,
    pub(crate) features: usize,
    /// C, H div C and H mod C.
    pub(crate) seeds: usize,
    short: usize,
    longer: usize,
    /// What changes no sum, not even the sign of a zero.
    pub(super) minus_zero: f32,
}

/// What a feature's seed makes of it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Feature {
    /// Its seed contributes and blends a row.
    pub(super) contributes: bool,
    /// Its seed contributes and blends an MLP.
    pub(super) mlp: bool,
    trains: bool,
    blend: u32,
    alpha: f32,
    /// Row of the blueprints, and what stands there.
    pub(super) row: usize,
    w: f32,
}

/// The seed of a feature.
#[cube]
pub(super) fn seed_of<W: Float, I: Int>(of: &Garden<W, I>, feature: usize) -> usize {
    let long = of.longer * (of.short + 1);
    let mut seed = feature / (of.short + 1);
    if feature >= long {
        seed = of.longer + (feature - long) / of.short;
    }
    seed
}

/// The same of the feature after one of seed `before`.
#[cube]
pub(super) fn seed_after<W: Float, I: Int>(
    of: &Garden<W, I>,
    feature: usize,
    before: usize,
) -> usize {
    before + select(feature == begin_of::<W, I>(of, before + 1), 1usize, 0usize)
}

/// The first feature of a seed.
#[cube]
pub(super) fn begin_of<W: Float, I: Int>(of: &Garden<W, I>, seed: usize) -> usize {
    seed * of.short + min(seed, of.longer)
}

#[cube]
#[allow(clippy::manual_range_contains)] // kernels have no ranges
pub(super) fn feature<W: Float, I: Int>(of: &Garden<W, I>, feature: usize, seed: usize) -> Feature {
    let state = u32::cast_from(of.lifecycle[seed]);
    let blend = u32::cast_from(of.blend[seed]);
    // Whatever stands there, a row that is there is read.
    let row = min(u32::cast_from(of.blueprint_id[seed]) as usize, of.count - 1);
    let contributes = state >= FIRST && state <= LAST;
    Feature {
        contributes: contributes && blend != MLP,
        mlp: contributes && blend == MLP,
        trains: (state == FIRST || state == FINE_TUNING) && blend != MLP,
        blend,
        alpha: f32::cast_from(of.alpha[seed]),
        row,
        w: f32::cast_from(of.rows[row * of.features + feature]),
    }
}

/// A seed as those see it that blend MLPs.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct MlpSeed {
    /// An MLP is blended into its chunk, and that one has a gradient.
    pub(crate) contributes: bool,
    pub(crate) trains: bool,
    pub(crate) alpha: f32,
    /// Which MLP.
    pub(crate) mlp: usize,
    /// The first feature of the chunk, and how many it has.
    pub(crate) begin: usize,
    pub(crate) size: usize,
}

/// A seed where there are `mlps` MLPs.
#[cube]
#[allow(clippy::manual_range_contains)] // kernels have no ranges
pub(crate) fn mlp_of<W: Float, I: Int>(of: &Garden<W, I>, seed: usize, mlps: usize) -> MlpSeed {
    let state = u32::cast_from(of.lifecycle[seed]);
    let mlp = u32::cast_from(of.blend[seed]) == MLP;
    let begin = begin_of::<W, I>(of, seed);
    MlpSeed {
        contributes: state >= FIRST && state <= LAST && mlp,
        trains: (state == FIRST || state == FINE_TUNING) && mlp,
        alpha: f32::cast_from(of.alpha[seed]),
        mlp: min(u32::cast_from(of.blueprint_id[seed]) as usize, mlps - 1),
        begin,
        size: begin_of::<W, I>(of, seed + 1) - begin,
    }
}

/// What x is multiplied with. Here and below all is computed and one thing chosen: behind branches the loads of a unit's
/// features would wait for each other.
#[cube]
pub(super) fn factor(of: &Feature) -> f32 {
    let one = f32::new(1.0);
    let lerp = 1.0 + of.alpha * (of.w - 1.0);
    let others = select(of.blend == ADD, one, 1.0 - of.alpha);
    let blended = select(of.blend == LERP, lerp, select(of.blend == SCALE, of.w, others));
    select(of.contributes, blended, one)
}

/// What is added then.
#[cube]
pub(super) fn shift(of: &Feature, minus_zero: f32) -> f32 {
    let shifts = of.contributes && of.blend != LERP && of.blend != SCALE;
    select(shifts, of.alpha * of.w, minus_zero)
}

/// Whether some gradient is made of the sum of x·dy.
#[cube]
pub(super) fn wants_products(of: &Feature) -> bool {
    of.contributes && of.blend != ADD && (of.blend != SCALE || of.trains)
}

/// The gradient of w from the sums of dy and of x·dy.
#[cube]
pub(super) fn of_blueprint(of: &Feature, cotangents: f32, products: f32) -> f32 {
    let mut gradient = f32::new(0.0);
    if of.trains {
        if of.blend == LERP {
            gradient = of.alpha * products;
        } else if of.blend == SCALE {
            gradient = products;
        } else {
            gradient = of.alpha * cotangents;
        }
    }
    gradient
}

/// Its part of the gradient of alpha.
#[cube]
pub(super) fn of_alpha(of: &Feature, cotangents: f32, products: f32) -> f32 {
    let mut gradient = f32::new(0.0);
    if of.contributes && of.blend != SCALE {
        if of.blend == LERP {
            gradient = (of.w - 1.0) * products;
        } else if of.blend == ADD {
            gradient = of.w * cotangents;
        } else {
            gradient = of.w * cotangents - products;
        }
    }
    gradient
}

impl Blueprints<CubeBackend> {
    /// The element types of a kernel: of x, of the blueprints, of the codes.
    pub(crate) fn types(&self, dtype: burn::tensor::DType) -> [ElemType; 3] {
        [dtype, self.rows.dtype, self.lifecycle.dtype].map(dtype_to_elem_type)
    }

    /// Seeds, features and blueprints.
    pub(crate) fn sizes(&self) -> [usize; 3] {
        let rows = self.rows.meta.shape();
        [self.alpha.meta.shape()[0], rows[1], rows[0]]
    }

    /// As an argument.
    pub(crate) fn garden<W: Float, I: Int>(self) -> GardenLaunch<W, I> {
        let [seeds, features, count] = self.sizes();
        let of = |tensor| into_contiguous(tensor).into_buffer_arg();
        GardenLaunch::new(
            of(self.rows),
            of(self.alpha),
            of(self.lifecycle),
            of(self.blueprint_id),
            of(self.blend),
            count,
            features,
            seeds,
            features / seeds,
            features % seeds,
            -0.0,
        )
    }
}

//! Seeds inside a layer: they germinate, learn by themselves, are grafted in, and stay for good or are taken out.
//!
//! A [`KasminaLayer`] stands around a base layer and blends blueprints into its output, in the chunk of features of each
//! seed (`kiln_ops`' `kasmina`). What a seed does follows from its [state](SeedState): until it is grafted nobody sees it,
//! then its share alpha grows, then it is frozen and measured, learns once more, and becomes part of the layer.
//!
//! The [`Lifecycle`] decides on the host, with a typed error for every step that is refused. The device has the state as a
//! structure of arrays, which changes in one launch; a forward or backward copies nothing to the host.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Tensor};
//! use kiln_nn::kasmina::{SeedMetrics, SeedState};
//! use kiln_nn::prelude::*;
//!
//! let device = Device::flex();
//! let base = LinearConfig::new(16, 16).init(&device);
//! let mut layer = KasminaLayerConfig::new(16, 4).init(&device);
//! let mut lifecycle = layer.lifecycle()?;
//! lifecycle.germinate(2, 0, Blend::Lerp)?;
//! lifecycle.transition(2, SeedState::Training, &SeedMetrics::default())?;
//! layer.follow(&lifecycle)?;
//!
//! let h = base.forward(Tensor::<2>::ones([8, 16], &device));
//! let loss = layer.reconstruction(h.clone()); // of each seed, to be added to the model's
//! let y = layer.forward(h, |h| h);
//! assert_eq!((y.dims(), loss.dims()), ([8, 16], [4]));
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod lifecycle;
mod schedule;
mod stored;

pub use lifecycle::{
    HISTORY, Life, Lifecycle, LifecycleConfig, SeedMetrics, Step, TransitionError, following,
};
use schedule::Progress;
pub use schedule::Schedule;

pub use kiln_ops::prelude::{Blend, Seed, SeedState};

use crate::{check_size, check_width, expect};
use burn::config::Config;
use burn::module::{
    Content, DisplaySettings, Module, ModuleDisplay, Param, ParamId, ParameterValue,
};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, Distribution, Int, Shape, Tensor};
use kiln_ops::kasmina::chunk_means;
use kiln_ops::prelude::{
    BlueprintCounts, KasminaOptions, OpError, SeedChange, Seeds, Telemetry, kasmina, kasmina_mlp,
    mlp_rows,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// A [`Lifecycle`] is checked when the layer follows it, and when it is made of a record.
const CHECKED: KasminaOptions = KasminaOptions { check_seeds: false };

/// Configuration of [`KasminaLayer`].
#[derive(Config, Debug)]
pub struct KasminaLayerConfig {
    /// Features of the base layer's output.
    pub features: usize,
    /// Seeds, up to one for each feature.
    pub seeds: usize,
    /// Rows that seeds choose from.
    #[config(default = 1)]
    pub blueprints: usize,
    /// MLPs that seeds choose from, by [`Blend::Mlp`].
    #[config(default = 0)]
    pub mlps: usize,
    /// Forwards whose telemetry is kept on the device.
    #[config(default = 16)]
    pub forwards: usize,
    /// Rules of the seeds' lives.
    #[config(default = "LifecycleConfig::new()")]
    pub lifecycle: LifecycleConfig,
    /// Start values of the rows: about 1, with which `lerp` and `scale` change little.
    #[config(default = "Initializer::Normal { mean: 1.0, std: 0.02 }")]
    pub initializer: Initializer,
}

/// Seeds around a base layer. All of their state is part of its record, as of the last [`follow`](KasminaLayer::follow).
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct KasminaLayer {
    /// `[P, H]`.
    pub blueprints: Param<Tensor<2>>,
    /// `[Q, 4S + 3, S]` for chunks of up to S features, as `kiln_ops`' `kasmina_mlp` has them.
    pub mlps: Option<Param<Tensor<3>>>,
    alpha: Param<Tensor<1>>,
    lifecycle: Param<Tensor<1, Int>>,
    blueprint_id: Param<Tensor<1, Int>>,
    blend: Param<Tensor<1, Int>>,
    /// What only the host asks for, as [`stored`] has it.
    lives: Param<Tensor<2, Int>>,
    progress: Param<Tensor<2>>,
    steps: Param<Tensor<1, Int>>,
    features: usize,
    forwards: usize,
    #[module(skip)]
    rules: LifecycleConfig,
    #[module(skip)]
    seen: Ring,
}

/// The telemetry of the last forwards, of a layer and its clones.
#[derive(Debug, Clone, Default)]
struct Ring(Arc<Mutex<VecDeque<Telemetry>>>);

impl KasminaLayerConfig {
    /// Float numbers of the layer, a float, which no size overflows: blueprints, and of each seed alpha and how far it is.
    pub fn parameters(&self) -> f64 {
        let Self { features, seeds, blueprints, mlps, .. } = *self;
        let widest = features.div_ceil(seeds.max(1));
        let rows = (blueprints * features) as f64;
        let mlps = mlps as f64 * mlp_rows(widest) as f64 * widest as f64;
        rows + mlps + (1 + Progress::NUMBERS) as f64 * seeds as f64
    }

    /// A layer of dormant seeds, which changes nothing.
    ///
    /// # Panics
    ///
    /// If a size is 0 or there are more seeds than features.
    #[track_caller]
    pub fn init(&self, device: &Device) -> KasminaLayer {
        let Self { features, seeds, blueprints, forwards, .. } = *self;
        check_size("kasmina", "features", features);
        check_size("kasmina", "blueprints", blueprints);
        let fits = (1..=features).contains(&seeds);
        assert!(fits, "kasmina: seeds = {seeds}, expected 1 to {features}, the features");
        let lifecycle = Lifecycle::new(seeds, self.lifecycle.clone());
        let of = expect(Seeds::new(&vec![Seed::default(); seeds], device));
        let stored = stored::store(&lifecycle, device);
        let mlps = (self.mlps > 0).then(|| mlps(self.mlps, features.div_ceil(seeds), device));
        KasminaLayer {
            mlps,
            blueprints: self.initializer.init([blueprints, features], device),
            alpha: constant(of.alpha),
            lifecycle: integers(of.lifecycle),
            blueprint_id: integers(of.blueprint_id),
            blend: integers(of.blend),
            lives: integers(stored.lives),
            progress: constant(stored.progress),
            steps: integers(stored.steps),
            features,
            forwards,
            rules: self.lifecycle.clone(),
            seen: Ring::default(),
        }
    }
}

/// Weights by Glorot and Bengio, biases of zero; made when they are first asked for, as other parameters are.
fn mlps(count: usize, features: usize, device: &Device) -> Param<Tensor<3>> {
    let rows = mlp_rows(features);
    let make = move |device: &Device, require_grad: bool| {
        let bound = (6.0 / (features + 2 * features) as f64).sqrt();
        let weights = Tensor::<3>::random(
            [count, 4 * features, features],
            Distribution::Uniform(-bound, bound),
            device,
        );
        let biases = Tensor::zeros([count, rows - 4 * features, features], device);
        let all = Tensor::cat(vec![weights, biases], 1);
        if require_grad { all.require_grad() } else { all }
    };
    let shape = Shape::new([count, rows, features]);
    Param::uninitialized(ParamId::new(), make, device.clone(), true, shape)
}

fn integers<const D: usize>(of: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), of)
}

/// Puts another value into a parameter; returns the one that it had.
fn replace<T: ParameterValue>(of: &mut Param<T>, value: T) -> T {
    let kept = std::mem::replace(of, Param::initialized(ParamId::new(), value.clone()));
    let (id, old, mapper) = kept.consume();
    *of = Param::from_mapped_value(id, value, mapper);
    old
}

/// A float that no optimizer moves.
fn constant<const D: usize>(of: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), of).set_require_grad(false)
}

impl KasminaLayer {
    /// The output of `base`, `[..., H]`, with what its seeds make of it, in its element type. Gradients flow to what `base`
    /// hangs on and, from seeds that are grafted or fine-tuned, to the blueprints.
    ///
    /// # Panics
    ///
    /// If `base` returns another width or element type than the layer takes.
    #[track_caller]
    pub fn forward<const D: usize, const E: usize>(
        &self,
        x: Tensor<D>,
        base: impl FnOnce(Tensor<D>) -> Tensor<E>,
    ) -> Tensor<E> {
        let h = base(x);
        check_width("kasmina", &h, self.features);
        let (y, telemetry) = self.blend(h, &self.seeds());
        let mut seen = self.seen.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push_back(telemetry);
        let more = seen.len().saturating_sub(self.forwards);
        seen.drain(..more);
        y
    }

    fn blend<const D: usize>(&self, h: Tensor<D>, seeds: &Seeds) -> (Tensor<D>, Telemetry) {
        let blueprints = self.blueprints.val();
        let alike = blueprints.dtype() == h.dtype();
        let blueprints = if alike { blueprints } else { blueprints.cast(DType::F32) };
        expect(match &self.mlps {
            None => kasmina(h, blueprints, seeds, CHECKED),
            Some(mlps) => {
                let mlps = mlps.val().cast(h.dtype());
                kasmina_mlp(h, blueprints, mlps, seeds, CHECKED)
            }
        })
    }

    /// The self-supervised loss of each seed that is in training, `[C]`, f32, and 0 of every other seed: the mean square of
    /// the difference between its chunk of `h` and what its blueprint, blended in whole, makes of it. `h` is the base layer's
    /// output, which gets no gradient. A blueprint with a NaN makes its seed's loss one: leave that out of a sum.
    ///
    /// # Panics
    ///
    /// If `h` has another width.
    #[track_caller]
    pub fn reconstruction<const D: usize>(&self, h: Tensor<D>) -> Tensor<1> {
        check_width("kasmina", &h, self.features);
        let rows = h.shape().num_elements() / self.features;
        let h = h.detach().reshape([rows, self.features]);
        let seeds = self.seeds();
        let training = seeds.lifecycle.clone().equal_elem(SeedState::Training.code());
        let grafted = training.clone().int() * SeedState::Grafting.code();
        if rows == 0 {
            return seeds.alpha.zeros_like();
        }
        let alone = Seeds { alpha: seeds.alpha.ones_like(), lifecycle: grafted, ..seeds };
        let (y, _) = self.blend(h.clone(), &alone);
        let off = (y.cast(DType::F32) - h.cast(DType::F32))
            .powi_scalar(2)
            .mean_dim(0)
            .squeeze_dim::<1>(0);
        chunk_means(off, alone.count()).mask_fill(training.bool_not(), 0.0)
    }

    /// The seeds as they are on the device.
    pub fn seeds(&self) -> Seeds {
        Seeds {
            alpha: self.alpha.val(),
            lifecycle: self.lifecycle.val(),
            blueprint_id: self.blueprint_id.val(),
            blend: self.blend.val(),
        }
    }

    /// How many blueprints seeds choose from.
    pub fn counts(&self) -> BlueprintCounts {
        // Parameters without a value stay so.
        let mlps = self.mlps.as_ref().map_or(0, |mlps| mlps.lazy_shape()[0]);
        BlueprintCounts { rows: self.blueprints.lazy_shape()[0], mlps }
    }

    /// The same layer in which a seed does not contribute, to measure what it is worth; it has telemetry of its own.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`] if there is no such seed, [`OpError`] where the fused kernel was asked for on a device that has none.
    pub fn without(&self, seed: usize) -> Result<Self, OpError> {
        let mut layer = Self { seen: Ring::default(), ..self.clone() };
        let mut seeds = self.seeds();
        let state = Some(SeedState::Dormant);
        seeds.change(&[SeedChange { seed, state, ..SeedChange::default() }])?;
        replace(&mut layer.lifecycle, seeds.lifecycle);
        Ok(layer)
    }

    /// Telemetry of the last forwards, the latest last. It stays on the device until it is read.
    pub fn telemetry(&self) -> Vec<Telemetry> {
        self.seen.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// The seeds' lives, read from the device.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`] where the record of the layer holds what is no seed, [`OpError::Shape`] where it is that of another
    /// layer.
    pub fn lifecycle(&self) -> Result<Lifecycle, OpError> {
        let [seeds] = self.alpha.dims();
        let expected = stored::sizes(seeds);
        let found = [self.lives.dims(), self.progress.dims()];
        for ((tensor, found), expected) in
            ["lives", "progress"].into_iter().zip(found).zip(expected)
        {
            if found != expected {
                let (found, expected) = (found.to_vec(), format!("{expected:?}"));
                return Err(OpError::Shape { op: "kasmina", tensor, found, expected });
            }
        }
        let stored = stored::Stored {
            lives: self.lives.val(),
            progress: self.progress.val(),
            steps: self.steps.val(),
        };
        let seeds = self.seeds().read()?;
        let counts = self.counts();
        let mut numbered = seeds.iter().enumerate();
        numbered.try_for_each(|(number, seed)| seed.check(number, counts))?;
        Ok(stored::restore(self.rules.clone(), &seeds, stored))
    }

    /// Takes over the states of `lifecycle`: one launch changes the seeds, and nothing is read. What the lifecycle counts
    /// afterwards, as steps of an epoch, is not in the layer's record before the next call: make one before saving.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`] on a seed with a blueprint that the layer does not have, [`OpError`] where the fused kernel was asked
    /// for on a device that has none; the layer is what it was.
    ///
    /// # Panics
    ///
    /// If `lifecycle` has another number of seeds.
    #[track_caller]
    pub fn follow(&mut self, lifecycle: &Lifecycle) -> Result<(), OpError> {
        let (counts, [expected]) = (self.counts(), self.alpha.dims());
        let found = lifecycle.lives().len();
        assert!(found == expected, "kasmina: the lives of {found} seeds, expected {expected}");
        let mut changes = Vec::with_capacity(found);
        for (number, life) in lifecycle.lives().iter().enumerate() {
            let seed = life.seed();
            seed.check(number, counts)?;
            let blueprints = counts.of(seed.blend);
            // Those in training read theirs too.
            if let Some(row) = seed.blueprint.filter(|row| *row >= blueprints) {
                let (field, expected) = ("blueprint_id", format!("0 to {}", blueprints - 1));
                let (op, found) = ("kasmina", row.to_string());
                return Err(OpError::Seed { op, seed: number, field, found, expected });
            }
            changes.push(SeedChange {
                seed: number,
                state: Some(seed.state),
                blueprint: Some(seed.blueprint),
                blend: Some(seed.blend),
                alpha: Some(seed.alpha),
            });
        }
        let device = self.alpha.device();
        let stored = stored::store(lifecycle, &device);
        // Nobody else may hold them, or they would not change where they are.
        let mut seeds = Seeds {
            alpha: replace(&mut self.alpha, Tensor::empty([1], &device)),
            lifecycle: replace(&mut self.lifecycle, Tensor::empty([1], &device)),
            blueprint_id: replace(&mut self.blueprint_id, Tensor::empty([1], &device)),
            blend: replace(&mut self.blend, Tensor::empty([1], &device)),
        };
        let changed = seeds.change(&changes);
        replace(&mut self.alpha, seeds.alpha);
        replace(&mut self.lifecycle, seeds.lifecycle);
        replace(&mut self.blueprint_id, seeds.blueprint_id);
        replace(&mut self.blend, seeds.blend);
        changed?;
        replace(&mut self.lives, stored.lives);
        replace(&mut self.progress, stored.progress);
        replace(&mut self.steps, stored.steps);
        Ok(())
    }
}

impl ModuleDisplay for KasminaLayer {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let (counts, [seeds]) = (self.counts(), self.alpha.dims());
        let content = content.add("features", &self.features).add("seeds", &seeds);
        content.add("blueprints", &counts.rows).add("mlps", &counts.mlps).optional()
    }
}

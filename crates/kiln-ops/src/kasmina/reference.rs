//! The Kasmina layer in plain Burn operations.

use super::{Blend, SeedChange, SeedState, Seeds, Telemetry};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Tensor};

/// [`kasmina`](fn@super::kasmina) without its checks.
pub fn kasmina<const D: usize>(
    x: Tensor<D>,
    blueprints: Tensor<2>,
    seeds: &Seeds,
) -> (Tensor<D>, Telemetry) {
    let (shape, dtype) = (x.dims(), x.dtype());
    let features = shape[D - 1];
    let rows = shape[..D - 1].iter().product();
    if rows == 0 {
        let zeros = Tensor::zeros([seeds.count()], (&x.device().inner(), DType::F32));
        return (x, Telemetry { mean: zeros.clone(), variance: zeros });
    }
    let x = x.reshape([rows, features]).cast(DType::F32);
    let chunks = Chunks { features, seeds: seeds.count() };
    let active = chunks.spread(contributes(seeds, |blend| blend.not_equal_elem(Blend::Mlp.code())));
    let (factor, shift) = terms(blueprints, seeds, active.clone(), chunks);
    let telemetry = telemetry(x.clone(), chunks);
    // Without a factor and a shift the chunk is what it was, the sign of a zero too.
    let passes = active.bool_not().unsqueeze::<2>().expand([rows, features]);
    let y = (x.clone() * factor.unsqueeze() + shift.unsqueeze()).mask_where(passes, x);
    (y.cast(dtype).reshape(shape), telemetry)
}

/// [`Seeds::change`](super::Seeds::change) without its checks and autodiff.
pub fn change(seeds: Seeds, changes: &[SeedChange]) -> Seeds {
    let (device, count) = (seeds.alpha.device(), seeds.count());
    // Where a field changes, and to what.
    let changed = |of: &dyn Fn(&SeedChange) -> Option<f64>| {
        let (mut places, mut values) = (vec![false; count], vec![0.0; count]);
        for change in changes {
            if let Some(value) = of(change) {
                (places[change.seed], values[change.seed]) = (true, value);
            }
        }
        (Tensor::<1, Bool>::from_bool(places.as_slice(), &device), values)
    };
    let integers = |field: Tensor<1, Int>, of: &dyn Fn(&SeedChange) -> Option<i64>| {
        let (places, values) = changed(&|change| of(change).map(|value| value as f64));
        let values: Vec<i64> = values.into_iter().map(|value| value as i64).collect();
        let values = Tensor::<1, Int>::from_ints(values.as_slice(), &device).cast(field.dtype());
        field.mask_where(places, values)
    };
    let (places, values) = changed(&|change| change.alpha.map(f64::from));
    let values = Tensor::<1>::from_data(values.as_slice(), (&device, seeds.alpha.dtype()));
    let row = |row: Option<usize>| row.map_or(-1, |row| row as i64);
    Seeds {
        alpha: seeds.alpha.mask_where(places, values),
        lifecycle: integers(seeds.lifecycle, &|change| change.state.map(SeedState::code)),
        blueprint_id: integers(seeds.blueprint_id, &|change| change.blueprint.map(row)),
        blend: integers(seeds.blend, &|change| change.blend.map(Blend::code)),
    }
}

/// Seeds whose state contributes and whose blend is one of those.
pub(crate) fn contributes(
    seeds: &Seeds,
    blends: impl FnOnce(Tensor<1, Int>) -> Tensor<1, Bool>,
) -> Tensor<1, Bool> {
    let [first, last] = [SeedState::Grafting, SeedState::Fossilized].map(SeedState::code);
    let lifecycle = seeds.lifecycle.clone();
    let state = lifecycle.clone().greater_equal_elem(first);
    state.bool_and(lifecycle.lower_equal_elem(last)).bool_and(blends(seeds.blend.clone()))
}

/// What every feature is multiplied with, and what is added to it.
fn terms(
    blueprints: Tensor<2>,
    seeds: &Seeds,
    active: Tensor<1, Bool>,
    chunks: Chunks,
) -> (Tensor<1>, Tensor<1>) {
    let rows = blueprints.dims()[0];
    // Of seeds that nobody has checked: what is no row is the last.
    let (id, last) = (seeds.blueprint_id.clone(), rows as i64 - 1);
    let id = id.clone().mask_fill(id.lower_elem(0), last).clamp(0, last);
    let id = chunks.spread(id);
    let w = blueprints.cast(DType::F32).gather(0, id.unsqueeze()).squeeze_dim::<1>(0);
    let state = chunks.spread(seeds.lifecycle.clone());
    let is = |wanted: SeedState| state.clone().equal_elem(wanted.code());
    let trains = is(SeedState::Grafting).bool_or(is(SeedState::FineTuning));
    let w = w.clone().detach().mask_where(trains, w);
    let alpha = chunks.spread(seeds.alpha.clone().cast(DType::F32));
    let blend = chunks.spread(seeds.blend.clone());
    // What a formula does not apply to becomes harmless before it, not after: no infinity times a zero.
    let of = |which: Blend, otherwise: f64| {
        let applies = match which {
            Blend::Mixed => {
                let (first, last) = (Blend::Lerp.code(), Blend::Add.code());
                let blend = blend.clone();
                blend.clone().lower_elem(first).bool_or(blend.greater_elem(last))
            }
            _ => blend.clone().equal_elem(which.code()),
        };
        let applies = applies.bool_and(active.clone());
        let (w, alpha) = (w.clone(), alpha.clone());
        let w = w.mask_fill(applies.clone().bool_not(), otherwise);
        (w, alpha.mask_fill(applies.bool_not(), 0.0))
    };
    let (lerp, by) = of(Blend::Lerp, 1.0);
    let (scale, _) = of(Blend::Scale, 1.0);
    let (added, added_by) = of(Blend::Add, 0.0);
    let (mixed, mixed_by) = of(Blend::Mixed, 0.0);
    let factor = (lerp.sub_scalar(1.0) * by + scale) - mixed_by.clone();
    (factor, added * added_by + mixed * mixed_by)
}

/// Means, then the squares of what is left, as the formula says.
fn telemetry(x: Tensor<2>, chunks: Chunks) -> Telemetry {
    let x = x.detach().inner();
    let mean = chunks.mean(x.clone().mean_dim(0).squeeze_dim(0));
    let centred = x - chunks.spread(mean.clone()).unsqueeze();
    let squares = (centred.clone() * centred).mean_dim(0).squeeze_dim(0);
    Telemetry { mean, variance: chunks.mean(squares) }
}

/// The chunk map over tensors: those that have one feature more come first.
#[derive(Clone, Copy)]
pub(crate) struct Chunks {
    pub(crate) features: usize,
    pub(crate) seeds: usize,
}

/// The mean over each seed's features of `[H]`, `[C]`; differentiable.
pub fn chunk_means(of: Tensor<1>, seeds: usize) -> Tensor<1> {
    Chunks { features: of.dims()[0], seeds }.mean(of)
}

impl Chunks {
    /// Seeds and features of each, of the longer chunks and of the others; none of the longer perhaps.
    pub(crate) fn classes(self) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> {
        let (short, longer) = (self.features / self.seeds, self.features % self.seeds);
        let classes = [(0..longer, short + 1), (longer..self.seeds, short)];
        classes.into_iter().filter(|(seeds, _)| !seeds.is_empty())
    }

    /// The number of each feature's seed.
    pub(crate) fn spread<K: Basic>(self, of: Tensor<1, K>) -> Tensor<1, K> {
        let parts = self.classes().map(|(seeds, size)| {
            let count = seeds.len();
            let part = of.clone().slice([seeds]).unsqueeze_dim::<2>(1);
            part.expand([count, size]).reshape([count * size])
        });
        Tensor::cat(parts.collect(), 0)
    }

    /// The mean over each seed's features.
    fn mean(self, of: Tensor<1>) -> Tensor<1> {
        let mut begin = 0;
        let parts = self.classes().map(|(seeds, size)| {
            let part = of.clone().narrow(0, begin, seeds.len() * size);
            begin += seeds.len() * size;
            part.reshape([seeds.len(), size]).mean_dim(1).squeeze_dim(1)
        });
        Tensor::cat(parts.collect(), 0)
    }
}

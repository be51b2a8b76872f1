//! Seeds: what they are on the host, and as a structure of arrays on the device.

#[cfg(feature = "cube")]
use super::backend;
use super::{OP, reference};
use crate::OpError;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Device, Int, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;

/// Where a seed is in its life; the numbers are the codes on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
pub enum SeedState {
    /// Nothing yet.
    #[default]
    Dormant = 0,
    /// It has a blueprint.
    Germinated = 1,
    /// The blueprint learns on the chunk by itself; nobody else sees it.
    Training = 2,
    /// Blended in more and more; the blueprint learns.
    Grafting = 3,
    /// Blended in, the blueprint frozen.
    Stabilization = 4,
    /// Blended in, frozen and measured.
    Evaluating = 5,
    /// Blended in; the blueprint learns.
    FineTuning = 6,
    /// Blended in for good, frozen.
    Fossilized = 7,
    /// Taken out as useless.
    Culled = 8,
    /// Given up before it was blended in.
    Cancelled = 9,
    /// Taken out after a fault.
    RolledBack = 10,
}

impl SeedState {
    /// All of them, by their codes.
    pub const ALL: [Self; 11] = [
        Self::Dormant,
        Self::Germinated,
        Self::Training,
        Self::Grafting,
        Self::Stabilization,
        Self::Evaluating,
        Self::FineTuning,
        Self::Fossilized,
        Self::Culled,
        Self::Cancelled,
        Self::RolledBack,
    ];

    /// The number that stands for it on the device.
    pub fn code(self) -> i64 {
        self as i64
    }

    /// Whether its chunk is blended.
    pub fn contributes(self) -> bool {
        (Self::Grafting..=Self::Fossilized).contains(&self)
    }

    /// Whether the blueprint has a gradient.
    pub fn trains(self) -> bool {
        matches!(self, Self::Grafting | Self::FineTuning)
    }
}

/// How a blueprint comes into a chunk, w being a row of them; the numbers are the codes on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Blend {
    /// x·(1 + alpha·(w − 1)).
    #[default]
    Lerp = 0,
    /// w·x, whatever alpha is.
    Scale = 1,
    /// x + alpha·w.
    Add = 2,
    /// (1 − alpha)·x + alpha·w.
    Mixed = 3,
    /// (1 − alpha)·x + alpha·f(x), f being one of the MLPs of [`kasmina_mlp`](fn@crate::kasmina_mlp::kasmina_mlp).
    Mlp = 4,
}

impl Blend {
    /// All of them, by their codes.
    pub const ALL: [Self; 5] = [Self::Lerp, Self::Scale, Self::Add, Self::Mixed, Self::Mlp];
    /// Those of a row of the blueprints, by their codes.
    pub const OF_ROWS: [Self; 4] = [Self::Lerp, Self::Scale, Self::Add, Self::Mixed];

    /// The number that stands for it on the device.
    pub fn code(self) -> i64 {
        self as i64
    }
}

/// A seed on the host.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Seed {
    /// Where it is in its life.
    pub state: SeedState,
    /// Its row of the blueprints, or which of the MLPs.
    pub blueprint: Option<usize>,
    /// How that comes into the chunk.
    pub blend: Blend,
    /// How much of it, 0 to 1.
    pub alpha: f32,
}

/// How many blueprints a call has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlueprintCounts {
    /// Rows.
    pub rows: usize,
    /// MLPs.
    pub mlps: usize,
}

impl BlueprintCounts {
    /// Of rows alone.
    pub fn rows(rows: usize) -> Self {
        Self { rows, mlps: 0 }
    }

    /// Of the kind that a blend takes.
    pub fn of(self, blend: Blend) -> usize {
        if blend == Blend::Mlp { self.mlps } else { self.rows }
    }
}

impl Seed {
    /// Refuses what no call with so many blueprints takes; `seed` is its number, for the error.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`] on an alpha outside 0 to 1, on a blend of MLPs where there are none, and on a seed that
    /// contributes without a blueprint or with one that is not there.
    pub fn check(&self, seed: usize, counts: BlueprintCounts) -> Result<(), OpError> {
        self.check_with(seed, Some(counts))
    }

    /// The number of blueprints may be unknown.
    fn check_with(&self, seed: usize, counts: Option<BlueprintCounts>) -> Result<(), OpError> {
        if !(0.0..=1.0).contains(&self.alpha) {
            return Err(refuse(seed, "alpha", self.alpha, "0 to 1"));
        }
        if self.blend == Blend::Mlp && counts.is_some_and(|counts| counts.mlps == 0) {
            let last = Blend::OF_ROWS.len() - 1;
            let expected = format!("0 to {last}, since there are no MLPs");
            return Err(refuse(seed, "blend", self.blend.code(), expected));
        }
        if !self.state.contributes() {
            return Ok(());
        }
        match (self.blueprint, counts.map(|counts| counts.of(self.blend))) {
            (None, _) => Err(without(seed, self.state)),
            (Some(row), Some(rows)) if row >= rows => {
                Err(refuse(seed, "blueprint_id", row, format!("0 to {}", rows.saturating_sub(1))))
            }
            _ => Ok(()),
        }
    }
}

fn without(seed: usize, state: SeedState) -> OpError {
    let expected = format!("a blueprint, since a seed that is {state:?} contributes");
    refuse(seed, "blueprint_id", -1, expected)
}

fn refuse(
    seed: usize,
    field: &'static str,
    found: impl ToString,
    expected: impl Into<String>,
) -> OpError {
    OpError::Seed { op: OP, seed, field, found: found.to_string(), expected: expected.into() }
}

/// What becomes of a seed; what is none stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SeedChange {
    /// Which one.
    pub seed: usize,
    /// Where it goes in its life.
    pub state: Option<SeedState>,
    /// Its row of the blueprints, or none.
    pub blueprint: Option<Option<usize>>,
    /// How that comes into the chunk.
    pub blend: Option<Blend>,
    /// How much of it, 0 to 1.
    pub alpha: Option<f32>,
}

impl SeedChange {
    fn check(&self, seeds: usize) -> Result<(), OpError> {
        let Self { seed, state, blueprint, alpha, .. } = *self;
        if seed >= seeds {
            return Err(refuse(seed, "seed", seed, format!("0 to {}", seeds.saturating_sub(1))));
        }
        if let Some(alpha) = alpha.filter(|alpha| !(0.0..=1.0).contains(alpha)) {
            return Err(refuse(seed, "alpha", alpha, "0 to 1"));
        }
        match (state, blueprint) {
            (Some(state), Some(None)) if state.contributes() => Err(without(seed, state)),
            _ => Ok(()),
        }
    }
}

/// C seeds on a device, a structure of arrays.
#[derive(Debug, Clone)]
pub struct Seeds {
    /// `[C]`, 0 to 1: f32, or the element type of what the seeds live in. It may be tracked.
    pub alpha: Tensor<1>,
    /// `[C]`, codes of [`SeedState`].
    pub lifecycle: Tensor<1, Int>,
    /// `[C]`, rows of the blueprints, −1 for none.
    pub blueprint_id: Tensor<1, Int>,
    /// `[C]`, codes of [`Blend`].
    pub blend: Tensor<1, Int>,
}

impl Seeds {
    /// Uploads them.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`] on an alpha outside 0 to 1 and on one that contributes without a blueprint.
    pub fn new(seeds: &[Seed], device: &Device) -> Result<Self, OpError> {
        for (number, seed) in seeds.iter().enumerate() {
            seed.check_with(number, None)?;
        }
        let codes = |of: fn(&Seed) -> i64| {
            let codes: Vec<i64> = seeds.iter().map(of).collect();
            Tensor::from_ints(codes.as_slice(), device)
        };
        let alpha: Vec<f32> = seeds.iter().map(|seed| seed.alpha).collect();
        Ok(Self {
            alpha: Tensor::from_data(alpha.as_slice(), (device, DType::F32)),
            lifecycle: codes(|seed| seed.state.code()),
            blueprint_id: codes(|seed| seed.blueprint.map_or(-1, |row| row as i64)),
            blend: codes(|seed| seed.blend.code()),
        })
    }

    /// Reads them back; `None` of a blueprint is any negative number.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`] on a code that is none.
    pub fn read(&self) -> Result<Vec<Seed>, OpError> {
        let integers = |of: &Tensor<1, Int>| of.to_data().iter::<i64>().collect::<Vec<_>>();
        let alpha: Vec<f32> = self.alpha.to_data().iter::<f32>().collect();
        let (lifecycle, blend) = (integers(&self.lifecycle), integers(&self.blend));
        let blueprint = integers(&self.blueprint_id);
        let one = |seed: usize| {
            let of = lifecycle[seed];
            let state = SeedState::ALL.into_iter().find(|state| state.code() == of);
            let last = SeedState::ALL.len() - 1;
            let state =
                state.ok_or_else(|| refuse(seed, "lifecycle", of, format!("0 to {last}")))?;
            let of = blend[seed];
            let blend = Blend::ALL.into_iter().find(|blend| blend.code() == of);
            let last = Blend::ALL.len() - 1;
            let blend = blend.ok_or_else(|| refuse(seed, "blend", of, format!("0 to {last}")))?;
            let blueprint = usize::try_from(blueprint[seed]).ok();
            Ok(Seed { state, blueprint, blend, alpha: alpha[seed] })
        };
        (0..alpha.len()).map(one).collect()
    }

    /// Refuses seeds that no call with so many blueprints takes. It reads them, which waits for the device.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`], which names the seed and the field.
    pub fn check(&self, counts: BlueprintCounts) -> Result<(), OpError> {
        let seeds = self.read()?;
        seeds.iter().enumerate().try_for_each(|(number, seed)| seed.check(number, counts))
    }

    /// Changes some seeds on the device, in place where nobody else holds the tensors: two small
    /// uploads, one launch, and nothing is read. Of several changes of a seed later ones win. A tracked alpha is not
    /// tracked through it.
    ///
    /// What the seed holds is not looked at, nor how many blueprints there are: whoever changes a state to one that
    /// contributes sees to its blueprint.
    ///
    /// # Errors
    ///
    /// [`OpError::Seed`] on a seed that is not there, an alpha outside 0 to 1, and a change that contributes and has no
    /// blueprint; [`OpError`] where the fused kernel was asked for on a device that has none.
    pub fn change(&mut self, changes: &[SeedChange]) -> Result<(), OpError> {
        let count = self.count();
        for change in changes {
            change.check(count)?;
        }
        if changes.is_empty() {
            return Ok(());
        }
        // One record for each seed: units write at the same time.
        let mut merged = BTreeMap::new();
        for change in changes {
            let of = merged.entry(change.seed).or_insert(*change);
            of.state = change.state.or(of.state);
            of.blueprint = change.blueprint.or(of.blueprint);
            of.blend = change.blend.or(of.blend);
            of.alpha = change.alpha.or(of.alpha);
        }
        let changes: Vec<SeedChange> = merged.into_values().collect();
        let choice = policy::choose(OP, count, &self.alpha)?;
        // Here nobody else holds them: they are changed where they are.
        let none = || Tensor::<1, Int>::empty([1], &self.alpha.device());
        let empty = Self {
            alpha: Tensor::empty([1], &self.alpha.device()),
            lifecycle: none(),
            blueprint_id: none(),
            blend: none(),
        };
        let (seeds, autodiff) = std::mem::replace(self, empty).plain();
        let seeds = match choice {
            #[cfg(feature = "cube")]
            Choice::Fused => backend::change(seeds, &changes),
            Choice::Reference => reference::change(seeds, &changes),
        };
        *self = if autodiff { seeds.autodiff() } else { seeds };
        Ok(())
    }

    /// Without autodiff, and whether they had it.
    fn plain(self) -> (Self, bool) {
        let autodiff = self.alpha.is_autodiff();
        let plain = |of: Tensor<1, Int>| if of.is_autodiff() { of.inner() } else { of };
        let seeds = Self {
            alpha: if autodiff { self.alpha.inner() } else { self.alpha },
            lifecycle: plain(self.lifecycle),
            blueprint_id: plain(self.blueprint_id),
            blend: plain(self.blend),
        };
        (seeds, autodiff)
    }

    fn autodiff(self) -> Self {
        Self {
            alpha: self.alpha.autodiff(),
            lifecycle: self.lifecycle.autodiff(),
            blueprint_id: self.blueprint_id.autodiff(),
            blend: self.blend.autodiff(),
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.alpha.dims()[0]
    }
}

/// The features of a seed, of `features` that `seeds` share.
pub fn chunk(seed: usize, features: usize, seeds: usize) -> Range<usize> {
    let (short, longer) = (features / seeds, features % seeds);
    let begin = |seed: usize| seed * short + seed.min(longer);
    begin(seed)..begin(seed + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_each_other() {
        for features in 1..20 {
            for seeds in 1..=features {
                let mut end = 0;
                for seed in 0..seeds {
                    let chunk = chunk(seed, features, seeds);
                    let longer = usize::from(seed < features % seeds);
                    assert_eq!((chunk.start, chunk.len()), (end, features / seeds + longer));
                    end = chunk.end;
                }
                assert_eq!(end, features);
            }
        }
    }

    #[test]
    fn codes_are_places() {
        assert!((0..).zip(SeedState::ALL).all(|(code, state)| state.code() == code));
        assert!((0..).zip(Blend::ALL).all(|(code, blend)| blend.code() == code));
        let contributing: Vec<i64> =
            SeedState::ALL.into_iter().filter(|s| s.contributes()).map(SeedState::code).collect();
        assert_eq!(contributing, [3, 4, 5, 6, 7]);
    }
}

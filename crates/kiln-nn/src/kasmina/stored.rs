//! What only the host asks for of the seeds' lives, as tensors of a record.
//!
//! `lives` is `[C, 3 + 3·HISTORY]`: epochs in the state, errors, the state before, and the steps, oldest first, each as
//! from, to and epochs, −1 where there is none. `progress` is `[C, 7]`, `steps` `[1]`: the optimizer's of this epoch.

use super::lifecycle::{HISTORY, Life, Lifecycle, LifecycleConfig, Step};
use super::schedule::Progress;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_ops::prelude::{Seed, SeedState};

/// Numbers of a life before its history.
const FIRST: usize = 3;
const NUMBERS: usize = FIRST + 3 * HISTORY;

/// The tensors.
pub(super) struct Stored {
    pub(super) lives: Tensor<2, Int>,
    pub(super) progress: Tensor<2>,
    pub(super) steps: Tensor<1, Int>,
}

/// Shapes of the lives and of the progress of so many seeds.
pub(super) fn sizes(seeds: usize) -> [[usize; 2]; 2] {
    [[seeds, NUMBERS], [seeds, Progress::NUMBERS]]
}

pub(super) fn store(lifecycle: &Lifecycle, device: &Device) -> Stored {
    let seeds = lifecycle.lives.len();
    let mut lives = Vec::with_capacity(seeds * NUMBERS);
    let mut progress = Vec::with_capacity(seeds * Progress::NUMBERS);
    for life in &lifecycle.lives {
        let first = [life.epochs as i64, life.errors as i64, life.parent.code()];
        let steps = life.history.iter();
        let steps = steps.flat_map(|step| [step.from.code(), step.to.code(), step.epochs as i64]);
        lives.extend(first.into_iter().chain(steps).chain(std::iter::repeat(-1)).take(NUMBERS));
        progress.extend(life.progress.numbers());
    }
    let [of_lives, of_progress] = sizes(seeds);
    let progress = TensorData::new(progress, of_progress);
    Stored {
        lives: Tensor::from_data(TensorData::new(lives, of_lives), device),
        progress: Tensor::from_data(progress, (device, DType::F32)),
        steps: Tensor::from_ints([lifecycle.steps as i64], device),
    }
}

/// The lives of `seeds`. Numbers that are no state, which no layer writes, are Dormant and no step.
pub(super) fn restore(config: LifecycleConfig, seeds: &[Seed], stored: Stored) -> Lifecycle {
    let integers = |data: TensorData| data.iter::<i64>().collect::<Vec<_>>();
    let state = |code: i64| SeedState::ALL.into_iter().find(|state| state.code() == code);
    let lives = integers(stored.lives.into_data());
    let progress: Vec<f32> = stored.progress.into_data().iter::<f32>().collect();
    let steps = integers(stored.steps.into_data())[0];
    let (lives, progress) = (lives.as_chunks::<NUMBERS>().0, progress.as_chunks().0);
    let life = |((seed, life), progress): ((&Seed, &[i64; NUMBERS]), &[f32; Progress::NUMBERS])| {
        let step = |of: &[i64; 3]| {
            let [from, to, epochs] = *of;
            Some(Step { from: state(from)?, to: state(to)?, epochs: epochs.max(0) as usize })
        };
        Life {
            seed: *seed,
            epochs: life[0].max(0) as usize,
            errors: life[1].max(0) as usize,
            parent: state(life[2]).unwrap_or_default(),
            progress: Progress::of(*progress),
            history: life[FIRST..].as_chunks::<3>().0.iter().map_while(step).collect(),
        }
    };
    let lives = seeds.iter().zip(lives).zip(progress).map(life).collect();
    Lifecycle::of(config, lives, steps.max(0) as usize)
}

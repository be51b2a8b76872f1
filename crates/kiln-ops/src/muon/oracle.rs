//! Muon in float64.

use super::{LearningRateScale, MuonOptions};
use crate::newton_schulz::oracle;
use crate::oracle::Number;

/// The weight and its momentum after a step, of a stack of `batches` matrices `[m, n]`; `scale` is one number or none.
pub fn forward<N: Number>(
    [value, grad, momentum]: [&[N]; 3],
    scale: Option<N>,
    [batches, m, n]: [usize; 3],
    options: &MuonOptions,
) -> [Vec<N>; 2] {
    // A factor that is no f32 is rounded to one.
    let times = |x: N, factor: f64| (x * factor).off_by(1.0);
    let rate = options.momentum;
    let (mut moved, mut updates) = (vec![], vec![]);
    for (grad, momentum) in grad.iter().zip(momentum) {
        let grad = scale.map_or(*grad, |scale| *grad * scale);
        let new = times(grad, 1.0 - rate);
        let momentum = times(*momentum, rate) + new;
        let update = if options.nesterov { times(momentum, rate) + new } else { momentum };
        updates.push(update.stored());
        moved.push(momentum);
    }
    let mut values = value.to_vec();
    let mut start = 0;
    // Matrices side by side, or one.
    let side_by_side = &options.columns;
    let all =
        side_by_side.iter().all(|width| *width > 0) && side_by_side.iter().sum::<usize>() == n;
    for width in if all { side_by_side.clone() } else { vec![n] } {
        let row = |row: usize| &updates[row * n + start..][..width];
        let part: Vec<N> = (0..batches * m).flat_map(row).copied().collect();
        let made = oracle::forward(&part, [batches, m, width], options.newton_schulz);
        let (rows, columns) = (m as f64, width as f64);
        let scale = match options.learning_rate_scale {
            LearningRateScale::Original => f64::max(1.0, columns / rows).sqrt(),
            LearningRateScale::MatchRmsAdamW => 0.2 * f64::max(rows, columns).sqrt(),
        };
        let kept = 1.0 - options.learning_rate * options.weight_decay;
        for (i, made) in made.into_iter().enumerate() {
            let at = i / width * n + start + i % width;
            let update = times(made, options.learning_rate * scale);
            values[at] = times(values[at], kept) - update;
        }
        start += width;
    }
    [values, moved]
}

//! Cross-entropy in float64.

use super::CrossEntropyOptions;
use crate::oracle::{Number, Path};

/// The mean loss for rows of `classes` logits.
pub fn forward<N: Number>(
    logits: &[N],
    targets: &[i64],
    classes: usize,
    options: &CrossEntropyOptions,
) -> N {
    let counted = logits.chunks_exact(classes).zip(targets);
    let losses =
        counted.filter(|(_, target)| **target != options.ignore_index).map(|(row, target)| {
            let of = Normaliser::new(row);
            // Relative to the largest logit, which is exact.
            let mut loss = of.log - (row[*target as usize] - of.largest);
            // Without smoothing a class may be masked out by −∞, which makes the mean −∞.
            if options.label_smoothing > 0.0 {
                let mean = N::sum(row.iter().copied()) / classes as f64 - of.largest;
                let smoothing = options.label_smoothing;
                loss = loss * (1.0 - smoothing) + (of.log - mean) * smoothing;
            }
            if options.z_loss > 0.0 {
                let lse = of.log_sum_exp();
                loss = loss + lse * lse * options.z_loss;
            }
            loss
        });
    N::sum(losses) / count(targets, options)
}

/// The gradient of the logits for the cotangent `dloss`.
pub fn backward<N: Number>(
    logits: &[N],
    targets: &[i64],
    classes: usize,
    options: &CrossEntropyOptions,
    dloss: N,
) -> Vec<N> {
    backward_rows(logits, targets, classes, options, dloss / count(targets, options))
}

/// The same of some rows: `factor` is the cotangent over the number of targets that count in all of them.
pub fn backward_rows<N: Number>(
    logits: &[N],
    targets: &[i64],
    classes: usize,
    options: &CrossEntropyOptions,
    factor: N,
) -> Vec<N> {
    let grad = gradient(logits, targets, classes, options, factor);
    grad.into_iter().map(N::stored).collect()
}

/// The gradient before it is stored.
pub(crate) fn gradient<N: Number>(
    logits: &[N],
    targets: &[i64],
    classes: usize,
    options: &CrossEntropyOptions,
    factor: N,
) -> Vec<N> {
    let mut grad = Vec::with_capacity(logits.len());
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        if *target == options.ignore_index {
            grad.extend(row.iter().map(|_| N::exact(0.0)));
            continue;
        }
        let (lse, row) = (log_sum_exp(row), row.iter().copied().enumerate());
        grad.extend(of_classes(row, *target, lse, classes, options, factor));
    }
    grad
}

/// The gradient of some logits of a row, each with its class, from the log-sum-exp of the row.
pub(crate) fn of_classes<N: Number>(
    logits: impl IntoIterator<Item = (usize, N)>,
    target: i64,
    lse: N,
    classes: usize,
    options: &CrossEntropyOptions,
    factor: N,
) -> impl Iterator<Item = N> {
    let scale = slope(lse, options) * factor;
    logits.into_iter().map(move |(class, x)| {
        // Kernels divide by the classes and take the target out afterwards.
        let wanted = (factor * wanted(class, target, classes, options)).off_by(8.0);
        (x - lse).exp() * scale - wanted
    })
}

/// ln Σ e^x of a row.
pub fn log_sum_exp<N: Number>(row: &[N]) -> N {
    Normaliser::new(row).log_sum_exp()
}

/// Targets that count; 1 if none does.
pub fn count(targets: &[i64], options: &CrossEntropyOptions) -> f64 {
    targets.iter().filter(|target| **target != options.ignore_index).count().max(1) as f64
}

/// The smoothed target.
pub(crate) fn wanted(
    class: usize,
    target: i64,
    classes: usize,
    options: &CrossEntropyOptions,
) -> f64 {
    let smoothing = options.label_smoothing;
    let onehot = if class as i64 == target { 1.0 - smoothing } else { 0.0 };
    onehot + smoothing / classes as f64
}

/// What makes a softmax of a row: its largest logit and ln Σ e^(x − largest).
pub(crate) struct Normaliser<N> {
    pub(crate) largest: N,
    pub(crate) log: N,
}

impl<N: Number> Normaliser<N> {
    pub(crate) fn new(row: &[N]) -> Self {
        let values = || row.iter().map(|x| x.value()).filter(|x| x.is_finite());
        let (least, most) = (values().fold(f64::INFINITY, f64::min), largest(row));
        // Any number will do to be relative to, so it has no error.
        let largest = N::exact(most);
        let sum = N::sum(row.iter().map(|x| (*x - largest).exp()));
        // A kernel that reads a row once scales what it has whenever the maximum rises, some ln n times, by
        // exponentials of a range that adds up to at most that of the row.
        let rescaled = match sum.path() {
            Path::Fused => {
                6.0 * (8.0 + 2.0 * (row.len() as f64).ln()) + 4.0 * (most - least).max(0.0)
            }
            Path::Reference => 0.0,
        };
        Self { largest, log: sum.off_by(rescaled).ln().of_row() }
    }

    /// ln Σ e^x. Kernels keep it in units of log 2 too: three roundings of the largest logit and two of the
    /// result.
    pub(crate) fn log_sum_exp(&self) -> N {
        (self.largest.off_by(6.0) + self.log).off_by(4.0).of_row()
    }
}

/// Factor of the softmax in the gradient.
pub(crate) fn slope<N: Number>(lse: N, options: &CrossEntropyOptions) -> N {
    match options.z_loss {
        0.0 => N::exact(1.0),
        z_loss => lse * (2.0 * z_loss) + 1.0,
    }
}

fn largest<N: Number>(row: &[N]) -> f64 {
    row.iter().fold(f64::NEG_INFINITY, |most, x| most.max(x.value()))
}

//! Linear cross-entropy in float64.

use super::reference::CHUNK;
use crate::cross_entropy::oracle::{Normaliser, count, gradient, of_classes, slope, wanted};
use crate::cross_entropy::{CrossEntropyOptions, oracle as cross_entropy};
use crate::oracle::{Number, Path, product};

/// The mean loss; sizes are `[M, D, V]`.
pub fn forward<N: Number>(
    x: &[N],
    weight: &[N],
    targets: &[i64],
    sizes: [usize; 3],
    options: &CrossEntropyOptions,
) -> N {
    let logits = logits(x, weight, sizes);
    mean(cross_entropy::forward(&logits, targets, sizes[2], options))
}

/// A mean loss as it is off here: means of chunks are weighted and added up.
pub fn mean<N: Number>(loss: N) -> N {
    loss.off_by(16.0)
}

/// dx and dweight for the cotangent `dloss`.
pub fn backward<N: Number>(
    x: &[N],
    weight: &[N],
    targets: &[i64],
    sizes: [usize; 3],
    options: &CrossEntropyOptions,
    dloss: N,
) -> (Vec<N>, Vec<N>) {
    let cotangent = Cotangent::new(x, dloss);
    let factor = cotangent.first / count(targets, options);
    let logits = logits(x, weight, sizes);
    let grad = gradient(&logits, targets, sizes[2], options, factor);
    let dx = of_input(&logits, &grad, weight, targets, sizes, options, factor);
    let grad: Vec<N> = grad.into_iter().map(N::stored).collect();
    (cotangent.finished(dx), cotangent.finished(of_weight(x, &grad, sizes)))
}

/// dx of some rows from their logits, of which `counted` targets count in all of them. `weight` may be some
/// of its rows: then dx has these columns, and sizes are theirs.
pub fn backward_input<N: Number>(
    logits: &[N],
    weight: &[N],
    targets: &[i64],
    sizes: [usize; 3],
    options: &CrossEntropyOptions,
    dloss: N,
    counted: f64,
) -> Vec<N> {
    let cotangent = Cotangent::new(logits, dloss);
    let factor = cotangent.first / counted;
    let grad = gradient(logits, targets, sizes[2], options, factor);
    cotangent.finished(of_input(logits, &grad, weight, targets, sizes, options, factor))
}

/// dweight of some classes of all, from the logits of these classes and the log-sum-exp of every row. `x` may
/// be some of its columns: then these are the rows of dweight.
pub fn backward_weight<N: Number>(
    x: &[N],
    logits: &[N],
    lse: &[N],
    targets: &[i64],
    chosen: &[usize],
    classes: usize,
    options: &CrossEntropyOptions,
    dloss: N,
) -> Vec<N> {
    let cotangent = Cotangent::new(x, dloss);
    let factor = cotangent.first / count(targets, options);
    let mut grad = Vec::with_capacity(logits.len());
    for ((row, lse), target) in logits.chunks_exact(chosen.len()).zip(lse).zip(targets) {
        if *target == options.ignore_index {
            grad.extend(row.iter().map(|_| N::exact(0.0)));
            continue;
        }
        let row = chosen.iter().copied().zip(row.iter().copied());
        grad.extend(of_classes(row, *target, *lse, classes, options, factor).map(N::stored));
    }
    let width = x.len() / targets.len().max(1);
    cotangent.finished(of_weight(x, &grad, [targets.len(), width, chosen.len()]))
}

/// Where the cotangent is multiplied in: a kernel makes gradients for a cotangent of 1, stores them and
/// multiplies; the reference multiplies first.
struct Cotangent<N> {
    first: N,
    last: Option<N>,
}

impl<N: Number> Cotangent<N> {
    fn new(like: &[N], dloss: N) -> Self {
        match fused(like) {
            true => Self { first: N::exact(1.0), last: Some(dloss) },
            false => Self { first: dloss, last: None },
        }
    }

    fn finished(&self, gradient: Vec<N>) -> Vec<N> {
        let times = |x: N| self.last.map_or(x, |dloss| (x * dloss).stored());
        gradient.into_iter().map(|x| times(x.stored())).collect()
    }
}

fn fused<N: Number>(like: &[N]) -> bool {
    like.first().is_none_or(|x| x.path() == Path::Fused)
}

/// xᵀ·g: the kernels add up over all rows, the reference rounds what each chunk adds. Both add in f32.
fn of_weight<N: Number>(x: &[N], grad: &[N], [rows, width, classes]: [usize; 3]) -> Vec<N> {
    let part = |from: usize, to: usize| {
        let (x, grad) = (&x[from * width..to * width], &grad[from * classes..to * classes]);
        product(x, grad, width, to - from, classes, true, false)
    };
    let step = if fused(x) { rows.max(1) } else { CHUNK };
    let mut parts: Vec<Vec<N>> =
        (0..rows).step_by(step).map(|from| part(from, rows.min(from + step))).collect();
    if parts.len() < 2 {
        return parts.pop().unwrap_or_default();
    }
    let of_chunks = |i: usize| N::sum(parts.iter().map(|part| part[i].stored()));
    (0..width * classes).map(of_chunks).collect()
}

/// g·Wᵀ, with what the softmax of a row has in common outside of the sums: its errors do not average out in
/// there.
fn of_input<N: Number>(
    logits: &[N],
    grad: &[N],
    weight: &[N],
    targets: &[i64],
    [rows, width, classes]: [usize; 3],
    options: &CrossEntropyOptions,
    factor: N,
) -> Vec<N> {
    let none = N::exact(0.0);
    let (mut scales, mut exponentials, mut targeted) = (vec![], vec![], vec![]);
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        if *target == options.ignore_index {
            scales.push(none);
            exponentials.extend(row.iter().map(|_| none));
            targeted.extend(row.iter().map(|_| none));
            continue;
        }
        let of = Normaliser::new(row);
        let lse = of.log_sum_exp();
        // Exponentials are those of x − lse, whose rounding the row has in common.
        let (log, size) = (of.log.value().abs(), lse.value().abs());
        let inverse = (-of.log).exp().off_by(6.0 + 4.0 * log + 10.0 * size);
        scales.push((inverse * slope(lse, options) * factor).of_row());
        exponentials.extend(row.iter().map(|x| (*x - of.largest).exp()));
        let wanted = |class| N::exact(wanted(class, *target, classes, options));
        targeted.extend((0..classes).map(wanted));
    }
    // Both are added up as one sum, in which a target's part stands while all others are added. (What adding up is off in
    // the two alone is counted beside it, though it is part of that.)
    let stored: Vec<N> = grad.iter().map(|g| N::exact(g.value()) + g.storing()).collect();
    let times_weight =
        |of: &[N]| product(of, weight, rows, classes, width, false, true).into_iter();
    let sums = times_weight(&exponentials).zip(times_weight(&targeted)).zip(times_weight(&stored));
    sums.enumerate()
        .map(|(i, ((softmax, target), stored))| {
            let adding = stored - N::exact(stored.value());
            softmax * scales[i / width] - (target * factor).off_by(8.0) + adding
        })
        .collect()
}

/// x·weight as it is stored.
pub fn logits<N: Number>(x: &[N], weight: &[N], [rows, width, classes]: [usize; 3]) -> Vec<N> {
    let logits = product(x, weight, rows, width, classes, false, false);
    logits.into_iter().map(N::stored).collect()
}

//! Linear cross-entropy in float64.

use super::reference::CHUNK;
use crate::cross_entropy::oracle::{Normaliser, count, gradient, wanted};
use crate::cross_entropy::{CrossEntropyOptions, oracle as cross_entropy};
use crate::oracle::{Number, Path, product};

/// The mean loss; sizes are `[M, D, V]`.
pub fn forward<N: Number>(
    x: &[N],
    weight: &[N],
    targets: &[i64],
    [rows, width, classes]: [usize; 3],
    options: &CrossEntropyOptions,
) -> N {
    let logits = logits(x, weight, [rows, width, classes]);
    // Means of chunks are weighted and added up.
    cross_entropy::forward(&logits, targets, classes, options).off_by(16.0)
}

/// dx and dweight for the cotangent `dloss`.
///
/// A kernel makes them for a cotangent of 1, stores them and multiplies; the reference multiplies first.
pub fn backward<N: Number>(
    x: &[N],
    weight: &[N],
    targets: &[i64],
    sizes: [usize; 3],
    options: &CrossEntropyOptions,
    dloss: N,
) -> (Vec<N>, Vec<N>) {
    let [rows, width, classes] = sizes;
    let fused = x.first().is_none_or(|x| x.path() == Path::Fused);
    let (first, last) = if fused { (N::exact(1.0), Some(dloss)) } else { (dloss, None) };
    let finished = |gradient: Vec<N>| -> Vec<N> {
        let times = |x: N| last.map_or(x, |dloss| (x * dloss).stored());
        gradient.into_iter().map(|x| times(x.stored())).collect()
    };
    let logits = logits(x, weight, sizes);
    let grad = gradient(&logits, targets, classes, options, first);
    let dx = of_input(&logits, &grad, weight, targets, sizes, options, first);

    let grad: Vec<N> = grad.into_iter().map(N::stored).collect();
    let of_weight = |from: usize, to: usize| {
        let (x, grad) = (&x[from * width..to * width], &grad[from * classes..to * classes]);
        product(x, grad, width, to - from, classes, true, false)
    };
    // The kernels add up over all rows in f32, the reference rounds what each chunk adds.
    let step = if fused { rows.max(1) } else { CHUNK };
    let parts = (0..rows).step_by(step).map(|from| of_weight(from, rows.min(from + step)));
    let add = |sum: Vec<N>, part: Vec<N>| {
        sum.into_iter().zip(part).map(|(a, b)| (a.stored() + b.stored()).stored()).collect()
    };
    (finished(dx), finished(parts.reduce(add).unwrap_or_default()))
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
    dloss: N,
) -> Vec<N> {
    let factor = dloss / count(targets, options);
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
        // Exponentials are those of x − lse, whose rounding the row has in common.
        let (log, lse) = (of.log.value().abs(), of.log_sum_exp().value().abs());
        let inverse = (-of.log).exp().off_by(6.0 + 4.0 * log + 10.0 * lse);
        scales.push((inverse * of.slope(options) * factor).of_row());
        exponentials.extend(row.iter().map(|x| (*x - of.largest).exp()));
        let wanted = |class| N::exact(wanted(class, *target, classes, options));
        targeted.extend((0..classes).map(wanted));
    }
    let storing: Vec<N> = grad.iter().map(|g| g.storing()).collect();
    let times_weight =
        |of: &[N]| product(of, weight, rows, classes, width, false, true).into_iter();
    let sums = times_weight(&exponentials).zip(times_weight(&targeted)).zip(times_weight(&storing));
    sums.enumerate()
        .map(|(i, ((softmax, target), storing))| {
            softmax * scales[i / width] - (target * factor).off_by(8.0) + storing
        })
        .collect()
}

fn logits<N: Number>(x: &[N], weight: &[N], [rows, width, classes]: [usize; 3]) -> Vec<N> {
    let logits = product(x, weight, rows, width, classes, false, false);
    logits.into_iter().map(N::stored).collect()
}

//! AdamW in float64.

use super::AdamWOptions;
use crate::oracle::Number;

/// The parameter and its moments after a step, p, m and v; `scale` is one number or none.
pub fn forward<N: Number>(
    [value, grad, first, second]: [&[N]; 4],
    scale: Option<N>,
    options: AdamWOptions,
) -> [Vec<N>; 3] {
    let AdamWOptions { learning_rate, beta1, beta2, eps, weight_decay, step } = options;
    // What means that begin at 0 are too small by.
    let seen = |beta: f64| 1.0 - beta.powf(step as f64);
    // A factor that is no f32 is rounded to one.
    let times = |x: N, factor: f64| (x * factor).off_by(1.0);
    let mut moved = [vec![], vec![], vec![]];
    for i in 0..value.len() {
        let grad = scale.map_or(grad[i], |scale| grad[i] * scale);
        let m = times(first[i], beta1) + times(grad, 1.0 - beta1);
        let v = times(second[i], beta2) + times(grad * grad, 1.0 - beta2);
        // √0 has no slope, and what is 0 in f32 has a root that is nothing beside an eps above 0.
        let root = if v.value() < (-149f64).exp2() { v } else { v * v.rsqrt() };
        let divisor = times(root, seen(beta2).sqrt().recip()) + eps;
        let update = times(m, learning_rate / seen(beta1)) / divisor;
        let p = times(value[i], 1.0 - learning_rate * weight_decay) - update;
        moved.iter_mut().zip([p, m, v]).for_each(|(all, one)| all.push(one));
    }
    moved
}

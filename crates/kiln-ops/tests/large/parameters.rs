//! What optimizers move, and what is made of gradients.

use super::*;

/// A parameter of so many elements and its moments, and a sum of so many squares.
#[test]
fn a_parameter_beyond_two_to_the_32() {
    on_each(|device| {
        let width = 4096;
        let rows = rows(device, width);
        let grad = random(rows, width, device);
        // The second step reads what the first has made.
        let two_steps = |rows: usize, grad: Tensor<2>| -> [Tensor<2>; 3] {
            let full = |x: f64| Tensor::<2>::full([rows, width], x, (device, DType::F32));
            let mut of =
                Moving { value: full(0.5), first: full(0.0), second: full(0.0), copy: None };
            for step in 1..=2 {
                let options = AdamWOptions { step, weight_decay: 0.1, ..AdamWOptions::default() };
                of = adamw(of, grad.clone(), None, options).unwrap();
            }
            [of.value, of.first, of.second]
        };
        let all = two_steps(rows, grad.clone());
        for first in places(rows, width) {
            let some = two_steps(ROWS, distinct(&grad, first));
            for (i, (all, some)) in all.iter().zip(&some).enumerate() {
                let what = format!("number {i}, {ROWS} of {rows} rows from {first} on, {device:?}");
                assert_eq!(values(&distinct(all, first)), values(some), "{what}");
            }
        }
        // Zeros and ones are counted exactly.
        drop((all, grad));
        let x = Tensor::<2>::random(
            [rows, width],
            Distribution::Bernoulli(0.5),
            (device, dtype(device)),
        );
        let squares = |x: Tensor<2>| -> f64 {
            values(&sum_squares(x, Tensor::zeros([1024], device)).unwrap()).iter().sum()
        };
        let part = rows.div_ceil(64);
        let parts = (0..rows).step_by(part).map(|first| (first, part.min(rows - first)));
        let of_parts: f64 = parts.map(|(from, n)| squares(x.clone().narrow(0, from, n))).sum();
        assert_eq!(squares(x), of_parts, "{device:?}");
    });
}

/// Muon moves a stack of matrices of so many elements as it moves some of them.
#[test]
fn matrices_that_muon_moves_beyond_two_to_the_32() {
    on_each(|device| {
        let [m, n] = if has_room(device) { [256, 1024] } else { [8, 32] };
        let count = rows(device, m * n);
        let grad = random(count, m * n, device);
        let options = MuonOptions { dtype: dtype(device), ..MuonOptions::default() };
        // The second step reads what the first has made.
        let two_steps = |grad: Tensor<2>| -> [Tensor<2>; 2] {
            let shape = [grad.dims()[0], m, n];
            let zeros = || Tensor::<3>::zeros(shape, (device, DType::F32));
            let mut of = vec![MuonWeight { value: zeros(), momentum: zeros(), copy: None }];
            for _ in 0..2 {
                of = muon(of, vec![grad.clone().reshape(shape)], None, &options).unwrap();
            }
            let MuonWeight { value, momentum, .. } = of.remove(0);
            [value, momentum].map(|of| of.reshape([shape[0], m * n]))
        };
        let all = two_steps(grad.clone());
        for first in places(count, m * n) {
            let some = two_steps(distinct(&grad, first));
            for (name, (all, some)) in ["value", "momentum"].iter().zip(all.iter().zip(&some)) {
                let what = format!("{name}, {ROWS} of {count} from {first} on, {device:?}");
                assert_near(&values(&distinct(all, first)), &values(some), dtype(device), 2, &what);
            }
        }
    });
}

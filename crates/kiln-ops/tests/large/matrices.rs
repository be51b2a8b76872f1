//! Stacks of matrices.

use super::*;

/// Matrices, some of which lie across 2³¹ and 2³² elements, against the same alone.
#[test]
fn matrices_beyond_two_to_the_32() {
    on_each(|device| {
        let [m, n] = if has_room(device) { [256, 1024] } else { [8, 32] };
        let count = rows(device, m * n);
        let some_of = |x: &Tensor<3>, first: usize| x.clone().narrow(0, first, ROWS);
        let other_some_of = |x: &Tensor<3>, first: usize| {
            let [count, m, n] = x.dims();
            distinct(&x.clone().reshape([count, m * n]), first).reshape([ROWS, m, n])
        };
        let agree = |name: &str, all: &Tensor<3>, some: &Tensor<3>, first: usize| {
            let what = format!("{name}, {ROWS} of {count} matrices from {first} on, {device:?}");
            assert_near(&values(&some_of(all, first)), &values(some), dtype(device), 2, &what);
        };
        let g = random(count * m, n, device).reshape([count, m, n]);
        let options = NewtonSchulzOptions::default();
        let all = newton_schulz(g.clone(), options).unwrap();
        for first in places(count, m * n) {
            let some = newton_schulz(other_some_of(&g, first), options).unwrap();
            agree("newton_schulz", &all, &some, first);
        }
        drop((g, all));
        free(device);
        // As many elements, in squares.
        let n = m * 2;
        let squares = || random(count * n, n, device).reshape([count, n, n]);
        let (a, b, dy) = (squares(), squares(), squares());
        let run = |a: Tensor<3>, b: Tensor<3>, dy: Tensor<3>| -> [Tensor<3>; 3] {
            let leaves = [a, b].map(|x| x.autodiff().require_grad());
            let y = tril_matmul(leaves[0].clone(), leaves[1].clone()).unwrap();
            let held = y.clone().inner();
            let grads = (y * dy.autodiff()).sum().backward();
            let [da, db] = leaves.map(|x| x.grad(&grads).unwrap());
            [held, da, db]
        };
        let all = run(a.clone(), b.clone(), dy.clone());
        for first in places(count, n * n) {
            let [a, b, dy] = [&a, &b, &dy].map(|of| other_some_of(of, first));
            let some = run(a, b, dy);
            for ((name, all), some) in ["tril_matmul", "da", "db"].iter().zip(&all).zip(&some) {
                agree(name, all, some, first);
            }
        }
        drop((b, all));
        free(device);
        let run = |a: Tensor<3>, dy: Tensor<3>| -> [Tensor<3>; 2] {
            let leaf = a.autodiff().require_grad();
            let options = MatmulOptions { symmetric: true, ..MatmulOptions::default() };
            let y = matmul(leaf.clone(), leaf.clone().swap_dims(1, 2), options).unwrap();
            let held = y.clone().inner();
            [held, leaf.grad(&(y * dy.autodiff()).sum().backward()).unwrap()]
        };
        let all = run(a.clone(), dy.clone());
        for first in places(count, n * n) {
            let some = run(other_some_of(&a, first), other_some_of(&dy, first));
            agree("gram", &all[0], &some[0], first);
            agree("gradient of gram", &all[1], &some[1], first);
        }
    });
}

use super::{Graph, Maybe};
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Autodiff, AutodiffBackend, Flex, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{TensorData, read_sync};
use std::sync::Arc;

type A<C> = Autodiff<Flex, C>;
type Plain = A<NoCheckpointing>;
type Inner = FloatTensor<Flex>;
/// Of every strategy: Burn's type does not name it.
type Outer = FloatTensor<Plain>;
type Gradients = <Plain as AutodiffBackend>::Gradients;

fn tensor(values: [f32; 2]) -> Inner {
    Flex::float_from_data(TensorData::from(values), &Default::default())
}

fn values(tensor: Inner) -> Vec<f32> {
    read_sync(Flex::float_into_data(tensor)).unwrap().iter::<f32>().collect()
}

fn leaf(values: [f32; 2], tracked: bool) -> Outer {
    let leaf = Plain::from_inner(tensor(values));
    if tracked { leaf.require_grad() } else { leaf }
}

/// The scalar whose gradient at `y` is `dy`.
fn pull<C: CheckpointStrategy>(y: Outer, dy: [f32; 2]) -> Outer {
    A::<C>::float_sum(A::<C>::float_mul(y, leaf(dy, false)))
}

fn gradient(of: &Outer, grads: &Gradients) -> Option<Vec<f32>> {
    Plain::grad(of, grads).map(values)
}

/// (a·b, b + c, 2·a); gives every gradient that its cotangents say something of, wanted or not.
fn three<C: CheckpointStrategy>(inputs: [Outer; 3], tracked: [bool; 3]) -> [Outer; 3] {
    Graph::<C>::outputs(inputs, [0, 1], |[a, b, c], wanted| {
        assert_eq!(wanted, tracked, "the forward is told what is tracked");
        let outputs = [
            Flex::float_mul(a.clone(), b.clone()),
            Flex::float_add(b, c),
            Flex::float_mul_scalar(a, 2.0.into()),
        ];
        (outputs, |cotangents: [Maybe<Flex>; 3], [a, b]: [Inner; 2]| {
            let alone = |dy: &Inner| assert!(dy.can_mut(), "somebody else holds a cotangent");
            let [du, dv, dw] = cotangents.map(Maybe::option);
            [&du, &dv, &dw].into_iter().flatten().for_each(alone);
            let add = |one: Option<Inner>, other: Option<Inner>| match (one, other) {
                (Some(one), Some(other)) => Some(Flex::float_add(one, other)),
                (one, other) => one.or(other),
            };
            let times = |x: Inner| du.clone().map(|du| Flex::float_mul(du, x));
            let twice = dw.map(|dw| Flex::float_mul_scalar(dw, 2.0.into()));
            let (da, db) = (add(times(b), twice), add(times(a), dv.clone()));
            [da.into(), db.into(), dv.into()]
        })
    })
}

fn every_set<C: CheckpointStrategy>() {
    let sets = || (1..8_u32).map(|set| [0, 1, 2].map(|i| (set >> i) & 1 == 1));
    let (a, b, c) = ([2.0, 3.0], [5.0, 7.0], [11.0, 13.0]);
    let cotangents = [[1.5, -2.0], [0.5, 4.0], [-3.0, 0.25]];
    for tracked in sets() {
        for used in sets() {
            let leaves = [leaf(a, tracked[0]), leaf(b, tracked[1]), leaf(c, tracked[2])];
            let outputs = three::<C>(leaves.clone(), tracked);
            let parts = outputs.into_iter().zip(cotangents).zip(used);
            let parts = parts.filter(|(_, used)| *used).map(|((y, dy), _)| pull::<C>(y, dy));
            let loss = parts.reduce(A::<C>::float_add).unwrap();
            let grads = A::<C>::backward(loss);
            let at =
                |output: usize, i: usize| if used[output] { cotangents[output][i] } else { 0.0 };
            let expected = [
                [0, 1].map(|i| at(0, i) * b[i] + 2.0 * at(2, i)),
                [0, 1].map(|i| at(0, i) * a[i] + at(1, i)),
                [0, 1].map(|i| at(1, i)),
            ];
            for i in 0..3 {
                let expected = tracked[i].then(|| expected[i].to_vec());
                let what = format!("input {i}, tracked {tracked:?}, used {used:?}");
                assert_eq!(gradient(&leaves[i], &grads), expected, "{what}");
            }
        }
    }
}

#[test]
fn any_outputs_used_and_any_inputs_tracked() {
    every_set::<NoCheckpointing>();
    every_set::<BalancedCheckpointing>();
}

/// a·b.
fn product<C: CheckpointStrategy>(a: Outer, b: Outer) -> Outer {
    Graph::<C>::output([a, b], [0, 1], |[a, b], _| {
        (Flex::float_mul(a, b), |dy: Inner, [a, b]: [Inner; 2]| {
            assert!(dy.can_mut(), "somebody else holds the cotangent");
            let da = Flex::float_mul(dy.clone(), b);
            [Maybe::Some(da), Maybe::Some(Flex::float_mul(dy, a))]
        })
    })
}

#[test]
fn one_tensor_twice() {
    let x = leaf([3.0, -4.0], true);
    let y = product::<NoCheckpointing>(x.clone(), x.clone());
    let grads = Plain::backward(pull::<NoCheckpointing>(y, [1.0, 0.5]));
    assert_eq!(gradient(&x, &grads).unwrap(), [6.0, -4.0]);

    let x = leaf([3.0, -4.0], true);
    let outputs = three::<NoCheckpointing>([x.clone(), x.clone(), x.clone()], [true; 3]);
    let parts = outputs.into_iter().zip([[1.0, 0.5], [1.0, 1.0], [1.0, 1.0]]);
    let parts = parts.map(|(y, dy)| pull::<NoCheckpointing>(y, dy));
    let grads = Plain::backward(parts.reduce(Plain::float_add).unwrap());
    assert_eq!(gradient(&x, &grads).unwrap(), [10.0, 0.0]);
}

/// Inputs that are made again, and an output that others make again.
fn between_others<C: CheckpointStrategy>() {
    let (x, w) = (leaf([2.0, -3.0], true), leaf([5.0, 7.0], true));
    let squared = A::<C>::float_powi_scalar(x.clone(), 2.into());
    let y = product::<C>(A::<C>::float_neg(squared), w.clone());
    let y = A::<C>::float_powi_scalar(y, 2.into());
    let grads = A::<C>::backward(pull::<C>(y, [1.0, 1.0]));
    // y = x⁴·w²: dx = 4·x³·w², dw = 2·x⁴·w.
    assert_eq!(gradient(&x, &grads).unwrap(), [800.0, -5292.0]);
    assert_eq!(gradient(&w, &grads).unwrap(), [160.0, 1134.0]);

    let constant = product::<C>(leaf([2.0, -3.0], false), leaf([5.0, 7.0], false));
    assert!(!constant.is_tracked());
    let y = A::<C>::float_mul(constant, x.clone());
    let grads = A::<C>::backward(pull::<C>(y, [1.0, 2.0]));
    assert_eq!(gradient(&x, &grads).unwrap(), [10.0, -42.0]);
}

#[test]
fn with_and_without_gradient_checkpointing() {
    between_others::<NoCheckpointing>();
    between_others::<BalancedCheckpointing>();
}

#[test]
fn a_gradient_that_is_not_given_is_zero_and_the_tape_goes_on() {
    let (x, w) = (leaf([2.0, -3.0], true), leaf([5.0, 7.0], true));
    let inputs = [Plain::float_neg(x.clone()), w.clone()];
    let y = Graph::<NoCheckpointing>::output(inputs, [], |[x, w], wanted| {
        assert_eq!(wanted, [true; 2]);
        (Flex::float_add(x, w), |dy: Inner, []: [Inner; 0]| [Maybe::None, Maybe::Some(dy)])
    });
    let grads = Plain::backward(pull::<NoCheckpointing>(y, [1.5, 4.0]));
    assert_eq!(gradient(&x, &grads).unwrap(), [0.0, 0.0]);
    assert_eq!(gradient(&w, &grads).unwrap(), [1.5, 4.0]);
}

#[test]
fn the_backward_is_kept_for_tracked_calls_alone() {
    let held = Arc::new(());
    let run = |tracked: bool| {
        let held = held.clone();
        Graph::<NoCheckpointing>::output([leaf([1.0, 2.0], tracked)], [], |[x], _| {
            (x, move |dy: Inner, []: [Inner; 0]| {
                let _ = &held;
                [Maybe::Some(dy)]
            })
        })
    };
    let untracked = run(false);
    assert_eq!(Arc::strong_count(&held), 1, "the state of an untracked call is kept");
    let tracked = run(true);
    assert_eq!(Arc::strong_count(&held), 2);
    let _ = Plain::backward(pull::<NoCheckpointing>(tracked, [1.0, 1.0]));
    assert_eq!(Arc::strong_count(&held), 1, "the state outlives the backward");
    drop(untracked);
}

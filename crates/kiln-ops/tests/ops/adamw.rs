//! adamw on every device: values against float64, views, tensors that somebody else holds, moments of zeros, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::adamw::oracle;
use kiln_ops::prelude::*;

/// One element, a ragged row, rows that CUDA pitches, more than one cube.
const SHAPES: &[[usize; 2]] = &[[1, 1], [13, 7], [5, 257], [37, 768], [3, 4099]];

const OPTIONS: AdamWOptions = AdamWOptions {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 7,
};

/// p, g, m and v, and the same numbers as they are held; v has no number below 0, and some that are 0.
fn given(
    shape: [usize; 2],
    dtype: DType,
    seed: u64,
    device: &Device,
) -> ([Tensor<2>; 4], [Vec<f64>; 4]) {
    let n = shape[0] * shape[1];
    let made: Vec<_> = (0..4u64)
        .map(|i| {
            let mut of = numbers(n, 10 * seed + i, 0.1);
            if i == 3 {
                of.iter_mut().enumerate().for_each(|(at, v)| *v = (at % 3) as f64 * *v * *v);
            }
            let dtype = if i == 1 { dtype } else { DType::F32 };
            tensor(&of, shape, dtype, device)
        })
        .collect();
    let (tensors, held): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    (tensors.try_into().unwrap(), held.try_into().unwrap())
}

fn moving<const D: usize>([value, grad, first, second]: &[Tensor<D>; 4]) -> Moving<D> {
    let copy = copy_like(grad);
    Moving { value: value.clone(), first: first.clone(), second: second.clone(), copy }
}

/// A copy in the element type of gradients of 16 bits.
fn copy_like<const D: usize>(grad: &Tensor<D>) -> Option<Tensor<D>> {
    (grad.dtype() != DType::F32).then(|| grad.zeros_like())
}

/// p, m and v; a copy is p rounded.
fn found<const D: usize>(of: &Moving<D>) -> [Vec<f64>; 3] {
    if let Some(copy) = &of.copy {
        assert_eq!(values(copy), values(&of.value.clone().cast(copy.dtype())));
    }
    [values(&of.value), values(&of.first), values(&of.second)]
}

#[test]
fn agrees_with_the_oracle() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (seed, &shape) in SHAPES.iter().enumerate() {
                for factor in [None, Some(0.25)] {
                    let (tensors, held) = given(shape, dtype, seed as u64, &device);
                    let scale = factor.map(|s| Tensor::<1>::full([1], s, &device));
                    poison(shape[0] * shape[1], DType::F32, &device);
                    let step =
                        |of| found(&adamw(of, tensors[1].clone(), scale.clone(), OPTIONS).unwrap());
                    let of = moving(&tensors);
                    let copy = of.copy.clone();
                    let moved = step(of);
                    let expected =
                        oracle::forward(held.each_ref().map(|of| &of[..]), factor, OPTIONS);
                    for ((moved, expected), name) in
                        moved.iter().zip(&expected).zip(["p", "m", "v"])
                    {
                        let what = format!("{name}, {shape:?}, {factor:?}, {device:?}");
                        assert_near(moved, expected, DType::F32, 2, &what);
                    }
                    // Somebody else held them: they are what they were.
                    for (tensor, held) in tensors.iter().zip(&held) {
                        assert_eq!(&values(tensor), held);
                    }
                    assert!(copy.iter().flat_map(values).all(|x| x == 0.0));
                    // Now nobody does.
                    let [value, grad, first, second] = tensors;
                    let copy = copy_like(&grad);
                    let of = Moving { value, first, second, copy };
                    let again = found(&adamw(of, grad, scale, OPTIONS).unwrap());
                    assert_eq!(again, moved, "{shape:?}, {device:?}");
                }
            }
        }
    }
}

#[test]
fn views_are_read_where_they_are() {
    for device in devices() {
        let (wide, held) = given([6, 300], DType::F32, 3, &device);
        let tensors = wide.map(|of| of.narrow(1, 4, 128));
        let cut = |of: &Vec<f64>| -> Vec<f64> {
            of.chunks(300).flat_map(|row| row[4..132].to_vec()).collect()
        };
        let held = held.each_ref().map(cut);
        let moved = found(&adamw(moving(&tensors), tensors[1].clone(), None, OPTIONS).unwrap());
        let expected = oracle::forward(held.each_ref().map(|of| &of[..]), None, OPTIONS);
        for (moved, expected) in moved.iter().zip(&expected) {
            assert_near(moved, expected, DType::F32, 2, &format!("{device:?}"));
        }
        let turned = tensors.map(|of| of.transpose());
        let moved = adamw(moving(&turned), turned[1].clone(), None, OPTIONS).unwrap();
        let back = values(&moved.value.transpose());
        assert_near(&back, &expected[0], DType::F32, 2, &format!("{device:?}"));
    }
}

/// Two steps one after the other are those of one that goes on: the moments are handed over.
#[test]
fn many_steps_follow_the_oracle() {
    for device in devices() {
        let (tensors, held) = given([9, 33], DType::F32, 5, &device);
        let zeros = || Tensor::<2>::zeros([9, 33], &device);
        let [value, grad, ..] = tensors;
        let mut of = Moving { value, first: zeros(), second: zeros(), copy: None };
        let nothing = || vec![0.0; 9 * 33];
        let mut expected = [held[0].clone(), nothing(), nothing()];
        for step in 1..20 {
            let options = AdamWOptions { step, ..OPTIONS };
            of = adamw(of, grad.clone(), None, options).unwrap();
            let [p, m, v] = &expected;
            expected = oracle::forward([p, &held[1], m, v], None, options);
        }
        for (moved, expected) in found(&of).iter().zip(&expected) {
            assert_near(moved, expected, DType::F32, 20, &format!("{device:?}"));
        }
    }
}

#[test]
fn no_gradient_flows() {
    for device in devices() {
        let (tensors, _) = given([4, 5], DType::F32, 2, &device);
        let expected = adamw(moving(&tensors), tensors[1].clone(), None, OPTIONS).unwrap();
        let grad = tensors[1].clone().autodiff().require_grad();
        let of = Moving { value: tensors[0].clone().autodiff(), ..moving(&tensors) };
        let moved = adamw(of, grad.clone(), None, OPTIONS).unwrap().value;
        let ones = moved.ones_like();
        let grads = pull(moved * grad.clone(), &ones).backward();
        assert_eq!(values(&grad.grad(&grads).unwrap()), values(&expected.value));
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = devices().remove(0);
    let (tensors, _) = given([2, 3], DType::F32, 1, &device);
    let error = |of: Moving<2>, grad: Tensor<2>, scale, options| {
        adamw(of, grad, scale, options).unwrap_err().to_string()
    };
    let grad = || tensors[1].clone();
    let first = Moving { first: grad().narrow(0, 0, 1), ..moving(&tensors) };
    let wide = Moving { second: grad().cast(DType::F64), ..moving(&tensors) };
    let long = Some(Tensor::<1>::ones([2], &device));
    let beta1 = AdamWOptions { beta1: 1.0, ..OPTIONS };
    let step = AdamWOptions { step: 0, ..OPTIONS };
    for (found, expected) in [
        (error(first, grad(), None, OPTIONS), "adamw: `first` has shape [1, 3], expected [2, 3]"),
        (error(wide, grad(), None, OPTIONS), "adamw: `second` is F64, expected F32"),
        (
            error(moving(&tensors), grad(), long, OPTIONS),
            "adamw: `scale` has shape [2], expected [1]",
        ),
        (
            error(moving(&tensors), grad(), None, beta1),
            "adamw: beta1 = 1, expected at least 0 and below 1",
        ),
        (error(moving(&tensors), grad(), None, step), "adamw: step = 0, expected at least 1"),
    ] {
        assert_eq!(found, expected);
    }
}

/// Several parameters of a rank, with gradients of an element type.
fn add<const D: usize>(
    batch: &mut AdamWBatch,
    shapes: &[[usize; D]],
    dtype: DType,
    scale: Option<&Tensor<1>>,
    device: &Device,
) -> Vec<[Vec<f64>; 3]> {
    let mut expected = vec![];
    for (seed, shape) in shapes.iter().enumerate() {
        let width = shape[D - 1];
        let (of, _) = given(
            [shape.iter().product::<usize>() / width, width],
            dtype,
            50 + seed as u64,
            device,
        );
        let of = of.map(|of| of.reshape(*shape));
        let mut moving = moving(&of);
        let alone = adamw(moving.clone(), of[1].clone(), scale.cloned(), OPTIONS).unwrap();
        expected.push(found(&alone));
        // Some of them have none.
        if seed == 1 {
            moving.copy = None;
        }
        batch.push(moving, of[1].clone()).unwrap();
    }
    expected
}

/// More than a launch takes, of several ranks, element types and sizes of vectors, some without elements.
#[test]
fn together_they_move_as_each_alone() {
    for device in kernel_devices() {
        for scale in [None, Some(Tensor::<1>::full([1], 0.5, &device))] {
            let mut batch = AdamWBatch::new(scale.clone(), OPTIONS).unwrap();
            let scale = scale.as_ref();
            let rows: Vec<[usize; 1]> = (1..40).map(|k| [k * 96 - k % 3]).collect();
            let mut expected = vec![add(&mut batch, &rows, DType::F32, scale, &device)];
            for dtype in dtypes(&device) {
                let shapes = [[37, 768], [5, 257], [0, 3], [1, 1]];
                expected.push(add(&mut batch, &shapes, dtype, scale, &device));
            }
            expected.push(add(&mut batch, &[[2, 3, 64], [1, 5, 7]], DType::F32, scale, &device));
            let mut moved = batch.step();
            let last = expected.len() - 1;
            for (k, expected) in expected.into_iter().enumerate() {
                for expected in expected {
                    let of = match k {
                        0 => found(&moved.take::<1>().unwrap()),
                        k if k == last => found(&moved.take::<3>().unwrap()),
                        _ => found(&moved.take::<2>().unwrap()),
                    };
                    assert_eq!(of, expected, "{device:?}");
                }
            }
            assert!(moved.take::<1>().is_none());
        }
    }
}

/// Views of rows with gaps between them share a launch too.
#[test]
fn views_move_together() {
    for device in kernel_devices() {
        let mut batch = AdamWBatch::new(None, OPTIONS).unwrap();
        let mut expected = vec![];
        for seed in 0..3 {
            let (wide, _) = given([5, 512], DType::F32, 20 + seed, &device);
            let of = wide.map(|of| of.narrow(1, 256, 256 - 32 * seed as usize));
            expected.push(found(&adamw(moving(&of), of[1].clone(), None, OPTIONS).unwrap()));
            // A copy of its own, where a view that stays one would begin at no vector.
            let copy =
                dtypes(&device).into_iter().find(|dtype| *dtype != DType::F32).map(|dtype| {
                    let shape = of[0].dims();
                    let line = Tensor::<1>::zeros([shape[0] * shape[1] + 1], (&device, dtype));
                    line.narrow(0, 1, shape[0] * shape[1]).reshape(shape)
                });
            batch.push(Moving { copy, ..moving(&of) }, of[1].clone()).unwrap();
        }
        let mut moved = batch.step();
        for expected in expected {
            let moved = moved.take::<2>().unwrap();
            assert_eq!(moved.copy.is_some(), dtypes(&device).len() > 1);
            assert_eq!(found(&moved), expected, "{device:?}");
        }
    }
}

#[test]
#[should_panic(expected = "a parameter has the rank that it had")]
fn a_parameter_comes_back_at_its_rank() {
    let device = devices().remove(0);
    let (tensors, _) = given([2, 3], DType::F32, 1, &device);
    let mut batch = AdamWBatch::new(None, OPTIONS).unwrap();
    batch.push(moving(&tensors), tensors[1].clone()).unwrap();
    batch.step().take::<1>();
}

#[cfg(feature = "cuda")]
#[test]
fn parameters_that_nobody_else_holds_share_a_launch_and_stay_in_their_memory() {
    for device in
        kiln_test::or_skip("cuda", devices().into_iter().filter(kiln_ops::device::is_cuda))
    {
        let mut batch = AdamWBatch::new(None, OPTIONS).unwrap();
        let mut expected = vec![];
        // No other test has so many that nobody else holds, and all of a process are heard.
        for seed in 0..17 {
            let (of, _) = given([seed as usize + 1, 256], DType::BF16, seed, &device);
            expected.push(found(&adamw(moving(&of), of[1].clone(), None, OPTIONS).unwrap()));
            let [value, grad, first, second] = of;
            let copy = copy_like(&grad);
            batch.push(Moving { value, first, second, copy }, grad).unwrap();
        }
        let (moved, plans) = kiln_ops::launch::plans::listen(|| {
            let mut moved = batch.step();
            std::iter::from_fn(|| moved.take::<2>()).map(|of| found(&of)).collect::<Vec<_>>()
        });
        assert_eq!(moved, expected);
        let one = |plan: &&String| {
            plan.starts_with("adamw")
                && plan.contains("count: 32")
                && plan.ends_with("in place, several")
        };
        assert_eq!(plans.iter().filter(one).count(), 1, "{plans:?}");
    }
}

#[test]
fn what_is_no_number_stays_where_it_is() {
    for device in devices() {
        for wrong in [f64::NAN, f64::INFINITY] {
            let (tensors, _) = given([3, 64], DType::F32, 4, &device);
            let mut grad = vec![0.5; 3 * 64];
            grad[70] = wrong;
            let (grad, _) = tensor(&grad, [3, 64], DType::F32, &device);
            let moved = found(&adamw(moving(&tensors), grad, None, OPTIONS).unwrap());
            for (name, of) in ["p", "m", "v"].iter().zip(&moved) {
                let at: Vec<usize> = (0..of.len()).filter(|i| !of[*i].is_finite()).collect();
                assert_eq!(at, [70], "{name}, {device:?}");
            }
        }
    }
}

#[test]
fn what_is_refused_is_not_in_the_batch() {
    let device = devices().remove(0);
    let (tensors, _) = given([2, 3], DType::F32, 1, &device);
    let mut batch = AdamWBatch::new(None, OPTIONS).unwrap();
    let short = Moving { first: tensors[1].clone().narrow(0, 0, 1), ..moving(&tensors) };
    batch.push(short, tensors[1].clone()).unwrap_err();
    batch.push(moving(&tensors), tensors[1].clone()).unwrap();
    let mut moved = batch.step();
    let alone = adamw(moving(&tensors), tensors[1].clone(), None, OPTIONS).unwrap();
    assert_eq!(found(&moved.take::<2>().unwrap()), found(&alone));
    assert!(moved.take::<2>().is_none());
}

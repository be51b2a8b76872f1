//! muon on every device: values against float64, matrices side by side, many weights as each alone, views, what others
//! hold, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::device;
use kiln_ops::muon::oracle;
use kiln_ops::prelude::*;

fn options() -> MuonOptions {
    MuonOptions {
        learning_rate: 0.1,
        momentum: 0.9,
        weight_decay: 0.5,
        newton_schulz: NewtonSchulzOptions { steps: 1, ..Default::default() },
        ..Default::default()
    }
}

/// p, g and m, and the same numbers as they are held.
fn given(
    shape: [usize; 3],
    dtype: DType,
    seed: u64,
    device: &Device,
) -> ([Tensor<3>; 3], [Vec<f64>; 3]) {
    let made = [0, 1, 2].map(|i| {
        let of = numbers(shape.iter().product(), 10 * seed + i, 0.2);
        tensor(&of, shape, if i == 1 { dtype } else { DType::F32 }, device)
    });
    (made.each_ref().map(|(tensor, _)| tensor.clone()), made.map(|(_, held)| held))
}

/// With a copy in the element type of gradients of 16 bits.
fn weight([value, grad, momentum]: &[Tensor<3>; 3]) -> MuonWeight<3> {
    let copy = (grad.dtype() != DType::F32).then(|| grad.zeros_like());
    MuonWeight { value: value.clone(), momentum: momentum.clone(), copy }
}

/// p and m; a copy is p rounded.
fn found(of: &MuonWeight<3>) -> [Vec<f64>; 2] {
    if let Some(copy) = &of.copy {
        assert_eq!(values(copy), values(&of.value.clone().cast(copy.dtype())));
    }
    [values(&of.value), values(&of.momentum)]
}

#[test]
fn agrees_with_the_oracle() {
    for device in devices() {
        for dtype in dtypes(&device) {
            // Steps in 16 bits multiply what was rounded before: one of those, five in f32.
            let steps = if dtype == DType::F32 { 5 } else { 1 };
            for (seed, shape) in [[1, 1, 13], [2, 9, 9], [1, 65, 24], [3, 33, 80], [1, 40, 4100]]
                .into_iter()
                .enumerate()
            {
                for nesterov in [true, false] {
                    let (tensors, held) = given(shape, dtype, seed as u64, &device);
                    let scale = nesterov.then(|| Tensor::<1>::full([1], 0.25, &device));
                    let newton_schulz = NewtonSchulzOptions { steps, ..Default::default() };
                    let options = MuonOptions { nesterov, dtype, newton_schulz, ..options() };
                    let count = shape.iter().product();
                    poison(count, DType::F32, &device);
                    let step = |of, grad| {
                        found(&muon(vec![of], vec![grad], scale.clone(), &options).unwrap()[0])
                    };
                    let moved = step(weight(&tensors), tensors[1].clone());
                    let factor = nesterov.then_some(0.25);
                    let of = held.each_ref().map(|of| &of[..]);
                    let [value, momentum] = oracle::forward(of, factor, shape, &options);
                    let what = format!("{shape:?}, {nesterov}, {dtype:?}, {device:?}");
                    // As five steps of newton_schulz in f32, and one in 16 bits.
                    let growth = if steps == 5 { 1024 } else { 4 };
                    assert_near(&moved[0], &value, dtype, growth, &what);
                    assert_near(&moved[1], &momentum, DType::F32, 2, &what);
                    // Somebody else held them: they are what they were.
                    for (tensor, held) in tensors.iter().zip(&held) {
                        assert_eq!(&values(tensor), held);
                    }
                    // Now nobody does.
                    let [value, grad, momentum] = tensors;
                    assert!(
                        step(MuonWeight { value, momentum, copy: None }, grad) == moved,
                        "{what}"
                    );
                }
            }
        }
    }
}

/// Queries, keys and values of a weight move as three weights do; other columns as one matrix.
#[test]
fn matrices_side_by_side_move_by_themselves() {
    for device in devices() {
        let (tensors, held) = given([2, 24, 96], DType::F32, 3, &device);
        for (widths, split) in [
            (vec![48, 24, 24], true),
            (vec![32, 32, 32], true),
            (vec![31, 32, 33], true),
            (vec![50, 50], false),
        ] {
            let options = MuonOptions { columns: widths.clone(), ..options() };
            let step = |of: &[Tensor<3>; 3], options: &MuonOptions| {
                found(&muon(vec![weight(of)], vec![of[1].clone()], None, options).unwrap()[0])
            };
            let whole = step(&tensors, &options);
            let of = held.each_ref().map(|of| &of[..]);
            let expected = oracle::forward(of, None, [2, 24, 96], &options);
            let what = format!("{widths:?}, {device:?}");
            for (whole, expected) in whole.iter().zip(&expected) {
                assert_near(whole, expected, DType::F32, 8, &what);
            }
            let alone = MuonOptions { columns: vec![], ..options };
            let parts = if split { widths } else { vec![96] };
            let mut start = 0;
            for width in parts {
                let of = tensors.clone().map(|of| of.narrow(2, start, width));
                for (whole, part) in whole.iter().zip(step(&of, &alone)) {
                    let cut = whole.chunks(96).flat_map(|row| row[start..start + width].to_vec());
                    let cut: Vec<f64> = cut.collect();
                    assert_near(&cut, &part, DType::F32, 8, &format!("{start}, {device:?}"));
                }
                start += width;
            }
        }
    }
}

/// More than a launch takes, in one element type after the other.
#[test]
fn many_move_as_each_alone() {
    for device in devices() {
        let dtypes = dtypes(&device);
        let one = |seed: usize| {
            let dtype = dtypes[seed % dtypes.len()];
            // Every fifth one stands at an odd place of wider rows, where no vectors begin. CUDA pads rows of other widths
            // than 64: those have gaps, and do not stay where they are.
            match seed % 5 {
                4 => {
                    given([1, 12, 67], dtype, seed as u64, &device).0.map(|of| of.narrow(2, 3, 64))
                }
                _ => given([1, 12, 64], dtype, seed as u64, &device).0,
            }
        };
        let all: Vec<[Tensor<3>; 3]> = (0..37).map(one).collect();
        let scale = || Some(Tensor::<1>::full([1], 0.5, &device));
        let grads = |all: &[[Tensor<3>; 3]]| all.iter().map(|of| of[1].clone()).collect();
        let moved =
            muon(all.iter().map(weight).collect(), grads(&all), scale(), &options()).unwrap();
        assert_eq!(moved.len(), all.len());
        for (i, (of, moved)) in all.chunks(1).zip(&moved).enumerate() {
            let alone = muon(vec![weight(&of[0])], grads(of), scale(), &options()).unwrap();
            for (alone, moved) in found(&alone[0]).iter().zip(found(moved)) {
                assert_near(&moved, alone, DType::F32, 1, &format!("{i}, {device:?}"));
            }
        }
        // In their own memory, where they may stay there.
        let expected: Vec<_> = moved.iter().map(found).collect();
        let (mut given_away, mut grads) = (vec![], vec![]);
        for [value, grad, momentum] in all {
            let copy = weight(&[value.clone(), grad.clone(), momentum.clone()]).copy;
            given_away.push(MuonWeight { value, momentum, copy });
            grads.push(grad);
        }
        let (again, plans) = kiln_ops::launch::plans::listen(|| {
            let moved = muon(given_away, grads, scale(), &options()).unwrap();
            moved.iter().map(found).collect::<Vec<_>>()
        });
        assert_eq!(again, expected, "{device:?}");
        if device::is_cuda(&device) {
            let ours = |plan: &String| plan.starts_with("momentum") && plan.contains("in place");
            assert!(plans.iter().any(ours), "{plans:?}");
        }
        assert!(muon::<3>(vec![], vec![], None, &options()).unwrap().is_empty());
    }
}

#[test]
fn views_and_weights_of_nothing() {
    for device in kernel_devices() {
        let (tensors, _) = given([3, 40, 24], DType::F32, 5, &device);
        let copied = |of: &Tensor<3>| Tensor::<3>::from_data(of.to_data(), &device);
        let views: [fn(Tensor<3>) -> Tensor<3>; 3] = [
            |of| of.swap_dims(1, 2),
            |of| of.narrow(2, 4, 16).narrow(1, 3, 30),
            |of| of.swap_dims(0, 1),
        ];
        for view in views {
            let views = tensors.clone().map(view);
            let copies = views.each_ref().map(copied);
            let step = |of: &[Tensor<3>; 3]| {
                found(&muon(vec![weight(of)], vec![of[1].clone()], None, &options()).unwrap()[0])
            };
            for (view, copy) in step(&views).iter().zip(step(&copies)) {
                assert_near(view, &copy, DType::F32, 2, &format!("{device:?}"));
            }
        }
        let none = Tensor::<3>::zeros([2, 0, 3], &device);
        let of = MuonWeight { value: none.clone(), momentum: none.clone(), copy: None };
        let moved = muon(vec![of], vec![none], None, &options()).unwrap();
        assert_eq!(moved[0].value.dims(), [2, 0, 3]);
    }
}

#[test]
fn no_gradient_flows() {
    for device in devices() {
        let (tensors, _) = given([1, 4, 5], DType::F32, 2, &device);
        let step = |of: [Tensor<3>; 3]| {
            muon(vec![weight(&of)], vec![of[1].clone()], None, &options()).unwrap().remove(0).value
        };
        let expected = values(&step(tensors.clone()));
        let tracked = tensors.map(|of| of.autodiff().require_grad());
        let moved = step(tracked.clone()).autodiff();
        let ones = moved.ones_like();
        let grads = pull(moved * tracked[1].clone(), &ones).backward();
        assert_eq!(values(&tracked[1].grad(&grads).unwrap()), expected);
        assert!(tracked[0].grad(&grads).is_none());
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = devices().remove(0);
    let ([value, grad, momentum], _) = given([1, 2, 3], DType::F32, 1, &device);
    let error = |value: &Tensor<3>, grad: &Tensor<3>, options: MuonOptions| {
        let of = MuonWeight { value: value.clone(), momentum: momentum.clone(), copy: None };
        muon(vec![of], vec![grad.clone()], None, &options).unwrap_err().to_string()
    };
    assert_eq!(
        error(&value, &grad.clone().swap_dims(1, 2), options()),
        "muon: `grad` has shape [1, 3, 2], expected [1, 2, 3]"
    );
    let found = error(&value.clone().cast(DType::F64), &grad, options());
    assert_eq!(found, "muon: `value` is F64, expected F32");
    let found = error(&value, &grad, MuonOptions { momentum: 1.0, ..options() });
    assert_eq!(found, "muon: momentum = 1, expected at least 0 and below 1");
    let found = error(&value, &grad, MuonOptions { dtype: DType::F64, ..options() });
    assert_eq!(found, "muon: `dtype` is F64, expected F32, BF16 or F16");
    let vector = Tensor::<1>::ones([3], &device);
    let of = MuonWeight { value: vector.clone(), momentum: vector.clone(), copy: None };
    let found = muon(vec![of], vec![vector], None, &options()).unwrap_err().to_string();
    assert_eq!(found, "muon: `value` has shape [3], expected [..., in, out] of rank 2 or more");
}

//! Results that take the memory of an input which nobody else needs, on CUDA: what the kernels allocate is less by them.
//! wgpu refuses a buffer that is read and written in one launch, so that nothing is taken there.

use crate::common::*;
use burn::tensor::{DType, Device, Int, Tensor};
use kiln_ops::attention::KvCache;
use kiln_ops::device::is_cuda;
use kiln_ops::launch::allocated;
use kiln_ops::launch::audit::Audit;
use kiln_ops::prelude::*;

const BYTES: usize = size_of::<f32>();

/// What the kernels allocate while `run` makes a result, and the result.
fn allocates<const D: usize>(run: impl FnOnce() -> Tensor<D>) -> (usize, Vec<f64>) {
    let before = allocated();
    let found = values(&run());
    (usize::try_from(allocated() - before).unwrap(), found)
}

fn some<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let made = tensor(&numbers(shape.iter().product(), 5, 0.1), shape, DType::F32, device).0;
    // What is uploaded may be held by what uploads it.
    made * 2.0
}

/// `of` an input of `shape` writes `taken` elements over it unless somebody holds it, with the same result. A matrix whose
/// rows CUDA pads has gaps, and is not taken.
#[track_caller]
fn takes<const D: usize, const R: usize>(
    name: &str,
    shape: [usize; D],
    taken: usize,
    device: &Device,
    of: impl Fn(Tensor<D>) -> Tensor<R>,
) {
    let (free, found) = allocates(|| of(some(shape, device)));
    let held = some(shape, device);
    let before = values(&held);
    let (not_free, expected) = allocates(|| of(held.clone()));
    assert_eq!(found, expected, "{name} on {device:?}");
    assert_eq!(values(&held), before, "what is held, of {name} on {device:?}");
    let taken = if is_cuda(device) { taken * BYTES } else { 0 };
    assert_eq!(not_free - free, taken, "{name} on {device:?}: bytes that were taken");
}

#[test]
fn rotated_heads() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let table = RopeTable::new(32, 16, RopeOptions::default(), &device).unwrap();
        let shape = [2, 4, 32, 16];
        let count = shape.iter().product();
        takes("rope", shape, count, &device, |x| rope(x, &table, 0).unwrap());
        let k = some([2, 2, 32, 16], &device);
        takes("rope_qk, q", shape, count, &device, |q| rope_qk(q, k.clone(), &table, 0).unwrap().0);
        takes("rope_qk, k", shape, count, &device, |q| rope_qk(k.clone(), q, &table, 0).unwrap().1);
        let packed = [2, 32, 8 * 16];
        let count = packed.iter().product();
        takes("rope_qkv", packed, count, &device, |x| rope_qkv(x, 4, 2, &table, 0).unwrap());
    }
}

#[test]
fn what_is_added() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let [m, k, n] = [160, 64, 256];
        let (a, b) = (some([m, k], &device), some([k, n], &device));
        let options = MatmulOptions { beta: 1.0, ..MatmulOptions::default() };
        takes("matmul_add", [m, n], m * n, &device, |c| {
            matmul_add(a.clone(), b.clone(), c, options).unwrap()
        });
        let (x, more) = (some([70, 300], &device), some([5, 9], &device));
        takes("sum_squares", [40], 40, &device, |sums| {
            let mut batch = SumSquaresBatch::new();
            batch.push(x.clone()).unwrap();
            batch.push(more.clone()).unwrap();
            batch.sum(sums).unwrap()
        });
    }
}

#[test]
fn a_divided_matrix() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let options = NewtonSchulzOptions { steps: 0, ..NewtonSchulzOptions::default() };
        takes("newton_schulz", [48, 256], 48 * 256, &device, |g| {
            newton_schulz(g, options).unwrap()
        });
    }
}

#[test]
fn gradients_of_logits() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let [rows, classes] = [24, 200];
        let targets = Tensor::<1, Int>::arange(0..rows as i64, &device).autodiff();
        let gradient = |hold: bool| {
            let leaf = some([rows, classes], &device).autodiff().require_grad();
            let logits = leaf.clone() * 2.0;
            let held = hold.then(|| logits.clone());
            let loss = cross_entropy(logits, targets.clone(), CrossEntropyOptions::default());
            // The forward is made before its backward is counted.
            let loss = loss.unwrap();
            values(&loss.clone().inner());
            let before = held.as_ref().map(values);
            let found = allocates(|| leaf.grad(&loss.backward()).unwrap());
            assert_eq!(held.as_ref().map(values), before, "{device:?}");
            found
        };
        let ((more, found), (less, expected)) = (gradient(true), gradient(false));
        assert_eq!(found, expected, "{device:?}");
        let taken = if is_cuda(&device) { rows * classes * BYTES } else { 0 };
        assert_eq!(more - less, taken, "{device:?}");
    }
}

/// What the gates make of their gradient stands in the place of that.
#[test]
fn what_goes_into_the_last_product() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let [rows, width, inner] = [512, 16, 256];
        let backward = |down_is_trained: bool| {
            let [x, gate, up, down] =
                [[rows, width], [width, inner], [width, inner], [inner, width]]
                    .map(|shape| some(shape, &device).autodiff());
            let x = x.require_grad();
            let down = if down_is_trained { down.require_grad() } else { down };
            let y = swiglu_mlp(x.clone(), gate, up, down.clone()).unwrap();
            // So too.
            values(&y.clone().inner());
            let (bytes, _) = allocates(|| {
                let grads = y.sum().backward();
                down.grad(&grads).inspect(|of_down| _ = values(of_down));
                x.grad(&grads).unwrap()
            });
            bytes
        };
        let (more, hidden) = (backward(true) - backward(false), rows * inner * BYTES);
        let of_down = width * inner * BYTES;
        assert!(more >= of_down, "{more} bytes for a gradient on {device:?}");
        // Products may have sums of parts.
        assert_eq!(more < hidden, is_cuda(&device), "{more} bytes beside {hidden} on {device:?}");
    }
}

/// The rows of a table that is the head too are added to the gradient that the head has made.
#[test]
fn gradients_of_a_tied_table() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let [rows, width] = [70, 128];
        let tokens = Tensor::<2, Int>::from_data([[3, 1, 3, 69, 0]], &device).autodiff();
        let backward = |tied: bool| {
            let weight = some([rows, width], &device).autodiff().require_grad();
            let (y, table) =
                tied_embedding(weight.clone(), tokens.clone(), EmbeddingOptions::default())
                    .unwrap();
            let loss = if tied { y.sum() + (table * 0.5).sum() } else { y.sum() };
            allocates(|| weight.grad(&loss.backward()).unwrap()).0
        };
        // Where nothing is added to, a few elements stand for it.
        let expected = if is_cuda(&device) { (rows * width + 16) * BYTES } else { 16 * BYTES };
        assert_eq!(backward(false) - backward(true), expected, "{device:?}");
    }
}

/// A call, and what it finds.
type Call<'a> = &'a dyn Fn() -> Vec<f64>;

/// What a call finds where what it writes, and then memory that it changes, stands between guards is what it finds without,
/// and nothing is beside it. How much there was that it writes, and how often the second time there was some that it changes.
#[track_caller]
fn keeps_to_its_places(name: &str, device: &Device, call: impl Fn() -> Vec<f64>) -> [usize; 2] {
    let expected = call();
    device.sync().unwrap();
    let (mut places, mut seen) = (0, vec![]);
    for begin in [Audit::begin, Audit::begin_in_place] {
        let audit = begin();
        let found = call();
        device.sync().unwrap();
        places = audit.places();
        let findings = audit.finish();
        seen.push(findings.len());
        for finding in findings {
            let clean = finding.unwritten == 0 || !finding.full;
            let clean = clean && finding.guard_bytes == 0 && finding.error.is_none();
            assert!(clean, "{name}: {finding}");
        }
        assert_eq!(found, expected, "{name} on {device:?}");
    }
    [seen[0], places]
}

/// As a call does with several tensors in a launch, which the gate has no row for, and the same again and again.
#[test]
fn what_launches_of_several_write_is_between_guards() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        // More than a launch takes, of several sizes. CUDA pads rows of 64 elements, of which no copy is changed in place.
        let shapes = |unit| (1..45).map(move |k| [k % 7 + 1, unit * (k % 5 + 1)]).enumerate();
        let numbers = some([7 * 1280 + 64], &device);
        // Other numbers in each.
        let made = |k: usize, [rows, width]: [usize; 2]| {
            numbers.clone().narrow(0, k, rows * width).reshape([rows, width]) * 2.0
        };
        let one = |all: Vec<Tensor<2>>| {
            let flat = |of: Tensor<2>| of.cast(DType::F32).flatten::<1>(0, 1);
            values(&Tensor::cat(all.into_iter().map(flat).collect(), 0))
        };
        for dtype in dtypes(&device) {
            let low = |k: usize, shape: [usize; 2]| made(k, shape).cast(dtype);
            let copy = |shape: [usize; 2]| (dtype != DType::F32).then(|| low(0, shape));
            let norms = || {
                let mut batch = SumSquaresBatch::new();
                for (k, shape) in shapes(64) {
                    batch.push(low(k, shape)).unwrap();
                }
                values(&batch.sum(made(0, [1, 13]).squeeze::<1>()).unwrap())
            };
            let moved = |unit| {
                let mut batch = AdamWBatch::new(None, AdamWOptions::default()).unwrap();
                for (k, shape) in shapes(unit) {
                    let [value, first, second] = [k, k + 1, k + 2].map(|k| made(k, shape));
                    let of = Moving { value, first, second: second.square(), copy: copy(shape) };
                    batch.push(of, low(k + 3, shape)).unwrap();
                }
                let mut moved = batch.step();
                let all = std::iter::from_fn(|| moved.take::<2>());
                one(all
                    .flat_map(|Moving { value, first, second, copy }| {
                        [value, first, second].into_iter().chain(copy)
                    })
                    .collect())
            };
            let turned = || {
                let shape = [24, 256];
                let weight = |k| {
                    let [value, momentum] = [k, k + 1].map(|k| made(k, shape));
                    MuonWeight { value, momentum, copy: copy(shape) }
                };
                let options = MuonOptions { dtype, ..MuonOptions::default() };
                let grads = (0..37).map(|k| low(k + 2, shape)).collect();
                let moved = muon((0..37).map(weight).collect(), grads, None, &options).unwrap();
                one(moved
                    .into_iter()
                    .flat_map(|of| [of.value, of.momentum].into_iter().chain(of.copy))
                    .collect())
            };
            // All that is new, with the copies of weights.
            let [with_copy, of_muon] = if dtype == DType::F32 { [3, 2] } else { [4, 3] };
            let calls: [(&str, [usize; 2], Call<'_>); 4] = [
                ("sum_squares", [1, 1], &norms),
                ("adamw", [with_copy * 44, with_copy * 44], &|| moved(256)),
                ("adamw of padded rows", [with_copy * 44, 3 * 44], &|| moved(64)),
                ("muon", [of_muon * 37, of_muon * 37], &turned),
            ];
            for (name, [new, own], call) in calls {
                let [seen, places] = keeps_to_its_places(name, &device, call);
                assert!(seen >= new, "{name} on {device:?}: {seen} results of {new}");
                let in_place = places >= own || !is_cuda(&device);
                assert!(in_place, "{name}: {places} in place of {own}");
                let expected = call();
                let repeats = if is_cuda(&device) { 100 } else { 5 };
                for repeat in 0..repeats {
                    assert!(call() == expected, "{name} on {device:?}, again {repeat}");
                }
            }
        }
    }
}

#[test]
fn what_is_changed_in_parts_is_between_guards() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        // Rows of 24 and of 64: those that CUDA pads, and others.
        for width in [24, 64] {
            let qkv = some([2, 41, 8 * width], &device);
            let [_, places] = keeps_to_its_places("a cache", &device, || {
                let mut cache = KvCache::new([2, 2, 41, width], DType::F32, &device).unwrap();
                let options = AttentionOptions::default();
                let mut found = vec![];
                for (start, count) in [(0, 20), (20, 1), (21, 20)] {
                    let new = qkv.clone().narrow(1, start, count);
                    found.extend(values(&attention_cached(new, 4, &mut cache, options).unwrap()));
                }
                found.extend(cache.filled().unwrap().iter().flat_map(values));
                found
            });
            assert_eq!(places, 3 * 2, "{device:?}: calls, each with keys and values");
        }
        let [_, places] = keeps_to_its_places("seeds", &device, || {
            let mut seeds = Seeds::new(&[Seed::default(); 37], &device).unwrap();
            let change = |seed| SeedChange { seed, alpha: Some(0.25), ..SeedChange::default() };
            seeds.change(&[change(0), change(36)]).unwrap();
            seeds.read().unwrap().iter().map(|seed| f64::from(seed.alpha)).collect()
        });
        assert_eq!(places, 4, "{device:?}: fields");
    }
}

/// What the gate has no row for: every element of a gradient that rows are added to where it stands, and nothing beside it.
#[test]
fn rows_are_added_between_guards() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let [rows, width, count] = [70, 1024, 3000];
        let token = |i: usize| if i.is_multiple_of(2) { 5 } else { i as i64 % 60 };
        let tokens: Vec<i64> = (0..count).map(token).collect();
        let tokens = Tensor::<1, Int>::from_data(tokens.as_slice(), &device).unsqueeze::<2>();
        let dy = some([count, width], &device);
        let gradient = || {
            let weight = some([rows, width], &device).autodiff().require_grad();
            let options = EmbeddingOptions::default();
            let (y, table) =
                tied_embedding(weight.clone(), tokens.clone().autodiff(), options).unwrap();
            let loss = (y.squeeze::<2>() * dy.clone().autodiff()).sum() + (table * 0.5).sum();
            values(&weight.grad(&loss.backward()).unwrap())
        };
        let [seen, places] = keeps_to_its_places("a tied table", &device, gradient);
        assert!(seen > 0, "{device:?}: nothing was seen");
        assert!(places > 0 || !is_cuda(&device), "{device:?}: nothing was in place");
    }
}

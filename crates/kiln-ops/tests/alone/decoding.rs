//! Attention of few queries over many keys: its kernels on every device that has some.

use crate::common::timing::seconds;
use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::attention::{KvCache, oracle};
use kiln_ops::device;
use kiln_ops::launch::{limits, plans};
use kiln_ops::policy;
use kiln_ops::prelude::*;

/// B, H, Hkv, T, S, D.
type Sizes = [usize; 6];

fn inputs([b, h, kv, t, s, d]: Sizes, dtype: DType, device: &Device) -> [(Tensor<4>, Vec<f64>); 3] {
    let make = |shape: [usize; 4], seed| {
        tensor(&numbers(shape.iter().product(), seed, 0.1), shape, dtype, device)
    };
    [make([b, h, t, d], 1), make([b, kv, s, d], 2), make([b, kv, s, d], 3)]
}

fn check(sizes: Sizes, options: AttentionOptions, device: &Device, way: Option<&str>) {
    let [batch, heads, kv_heads, queries, keys, width] = sizes;
    let d = oracle::Dims { batch, heads, kv_heads, queries, keys, width };
    for dtype in dtypes(device) {
        let [(q, q64), (k, k64), (v, v64)] = inputs(sizes, dtype, device);
        poison(batch * heads * queries * width, dtype, device);
        let call = || values(&attention(q.clone(), k.clone(), v.clone(), options).unwrap());
        let (found, plans) = plans::listen(call);
        let what = format!("{sizes:?}, {options:?}, {device:?}");
        let expected = oracle::forward(&q64, &k64, &v64, d, &oracle::Rule::new(options, width));
        assert_near(&found, &expected, dtype, 4, &what);
        assert!(found == call(), "{what} repeats");
        let plan = plans.iter().find(|plan| plan.starts_with("attention of few queries"));
        let plan = plan.unwrap_or_else(|| panic!("{what} ran on {plans:?}"));
        assert!(way.is_none_or(|way| plan.contains(way)), "{what}: {plan}");
        let together = heads / kv_heads * queries;
        let hardware = device::hardware(device);
        let hopper = hardware.as_ref().is_some_and(|hardware| hardware.wgmma);
        let tensor_cores = device::is_cuda(device) && dtype != DType::F32;
        let whole = queries == 1 && options.window.is_none_or(|window| window >= keys);
        // Fewer than 17 heads want eight multiprocessors for each KV head. Where a test has fewer, no call has so few heads.
        let multiprocessors = hardware.and_then(|hardware| hardware.multiprocessors).unwrap_or(0);
        let fewest = if 8 * batch * kv_heads <= multiprocessors { 8 } else { 17 };
        let on_wgmma = hopper && whole && (fewest..=64).contains(&together) && width % 8 == 0;
        let on_wgmma = tensor_cores && on_wgmma && options.scale.is_none_or(|scale| scale > 0.0);
        let on_mma = tensor_cores && together > 1 && matches!(width, 64 | 128 | 192 | 256);
        assert_eq!(plan.contains("on wgmma"), on_wgmma, "{what}: {plan}");
        assert_eq!(plan.contains("on mma.sync"), on_mma && !on_wgmma, "{what}: {plan}");
    }
}

#[test]
fn agrees_with_the_oracle() {
    let _alone = crate::alone();
    let plain = AttentionOptions::default();
    for device in kernel_devices() {
        for (sizes, way) in [
            ([1, 1, 1, 1, 1, 1], None),
            ([1, 2, 1, 1, 5000, 64], Some("several parts")),
            ([3, 6, 2, 1, 77, 48], Some("heads that share keys")),
            ([2, 4, 4, 3, 131, 20], None),
            ([1, 8, 1, 5, 97, 33], Some("several sets of queries")),
            ([1, 1, 1, 8, 65, 128], None),
            ([1, 2, 2, 1, 41, 256], None),
            ([1, 1, 1, 2, 39, 255], None),
            // The first queries see nothing.
            ([1, 2, 1, 7, 4, 16], None),
        ] {
            check(sizes, plain, &device, way);
        }
        let sizes = [2, 4, 2, 4, 200, 32];
        for options in [
            AttentionOptions { causal: false, ..plain },
            AttentionOptions { window: Some(1), ..plain },
            AttentionOptions { window: Some(37), ..plain },
            AttentionOptions { window: Some(usize::MAX), ..plain },
            AttentionOptions { window: Some(1000), softcap: Some(2.5), ..plain },
            AttentionOptions { scale: Some(8.0), ..plain },
        ] {
            check(sizes, options, &device, None);
        }
    }
}

/// On tensor cores where there are some: one set of queries and several, of which the last has fewer; keys that are
/// no multiple of a block; queries that see different keys.
#[test]
fn several_queries_agree_with_the_oracle() {
    let _alone = crate::alone();
    let plain = AttentionOptions::default();
    let cut = AttentionOptions { window: Some(37), softcap: Some(2.5), ..plain };
    for device in kernel_devices() {
        for (sizes, way) in [
            ([1, 2, 1, 1, 1, 64], None),
            ([3, 8, 2, 1, 1000, 64], Some("several parts")),
            ([1, 9, 1, 1, 77, 64], None),
            ([1, 6, 1, 5, 140, 64], None),
            ([1, 2, 1, 1, 5000, 128], Some("several parts")),
            ([2, 16, 1, 1, 301, 128], None),
            ([1, 23, 1, 1, 90, 128], None),
            ([1, 64, 1, 1, 129, 128], None),
            ([1, 128, 2, 1, 1, 128], None),
            ([3, 40, 2, 1, 5003, 128], Some("several parts")),
            ([2, 33, 1, 1, 900, 64], Some("several parts")),
            ([1, 64, 1, 1, 700, 192], None),
            ([2, 64, 2, 1, 333, 256], None),
            ([1, 32, 1, 1, 2000, 80], None),
            ([1, 32, 1, 2, 129, 128], Some("several sets of queries")),
            ([1, 18, 1, 1, 65, 192], None),
            ([1, 20, 1, 1, 300, 16], None),
            ([1, 17, 1, 1, 130, 24], None),
            ([2, 33, 1, 1, 900, 72], Some("several parts")),
            ([1, 4, 2, 3, 200, 256], None),
            ([1, 10, 1, 2, 64, 256], Some("several sets of queries")),
            // Too many tiles for so few heads on wgmma.
            ([20, 10, 1, 1, 64, 256], Some("several sets of queries")),
            // The first queries see nothing.
            ([1, 2, 1, 7, 4, 128], None),
        ] {
            check(sizes, plain, &device, way);
        }
        for sizes in [
            [2, 4, 2, 4, 200, 64],
            [2, 4, 2, 4, 200, 128],
            [2, 4, 2, 4, 200, 256],
            [2, 40, 2, 1, 200, 128],
            [1, 64, 1, 1, 300, 64],
        ] {
            let width = sizes[5];
            for options in [
                cut,
                AttentionOptions { causal: false, ..plain },
                AttentionOptions { softcap: Some(2.5), ..plain },
                AttentionOptions { window: Some(1), ..plain },
                AttentionOptions { window: Some(usize::MAX), ..plain },
                AttentionOptions { scale: Some(128.0 / width as f64), ..plain },
                AttentionOptions { scale: Some(-0.1), ..plain },
            ] {
                check(sizes, options, &device, None);
            }
        }
    }
}

/// What is to be differentiated runs on the kernels that leave what a backward needs.
#[test]
fn a_tracked_call_has_its_gradient() {
    let _alone = crate::alone();
    let sizes = [1, 2, 1, 3, 40, 16];
    let options = AttentionOptions::default();
    for device in kernel_devices() {
        let [(q, _), (k, _), (v, _)] = inputs(sizes, DType::F32, &device);
        let untracked = attention(q.clone(), k.clone(), v.clone(), options).unwrap();
        let leaf = k.autodiff().require_grad();
        let y = attention(q.autodiff(), leaf.clone(), v.autodiff(), options).unwrap();
        assert_near(&values(&y), &values(&untracked), DType::F32, 1, "tracked");
        let grads = pull(y, &untracked.autodiff()).backward();
        assert!(values(&leaf.grad(&grads).unwrap()).iter().any(|dk| *dk != 0.0));
    }
}

/// A small device has all keys in one cube, a large one divides them.
#[test]
fn results_of_one_part_are_those_of_several() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        for (sizes, way) in [
            ([5, 4, 4, 1, 150, 64], Some("direct: true")),
            ([1, 2, 2, 1, 150, 64], Some("direct: false")),
            // Several queries that read the same keys.
            ([5, 8, 4, 1, 150, 64], Some("direct: true")),
            ([4, 16, 4, 2, 150, 128], Some("direct: true")),
            ([1, 8, 2, 1, 1500, 128], Some("direct: false")),
            // Of two multiprocessors.
            ([9, 32, 1, 1, 1500, 128], None),
        ] {
            let limits = limits::Limits { multiprocessors: Some(2), ..Default::default() };
            limits::limited(limits, || {
                check(sizes, AttentionOptions::default(), &device, way);
            });
        }
    }
}

/// Cubes that meet wait for those of their own launch, whatever was launched before, and beside launches of another thread.
#[test]
fn every_launch_finds_all_its_parts() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let dtype = *dtypes(&device).last().unwrap();
        let sizes = [
            [2, 64, 1, 1, 5003, 128],
            [1, 20, 1, 1, 900, 64],
            [9, 32, 1, 1, 700, 128],
            [1, 16, 2, 1, 1300, 128],
        ];
        let calls = sizes.map(|sizes| inputs(sizes, dtype, &device).map(|(tensor, _)| tensor));
        let call = |[q, k, v]: &[Tensor<4>; 3]| {
            attention(q.clone(), k.clone(), v.clone(), AttentionOptions::default()).unwrap()
        };
        let (first, plans) = plans::listen(|| calls.each_ref().map(|inputs| values(&call(inputs))));
        if device::hardware(&device).is_some_and(|hardware| hardware.wgmma) {
            // No other kernel adds up parts.
            assert!(!plans.iter().any(|plan| plan.starts_with("attention of parts")), "{plans:?}");
        }
        let repeats = if device::is_cuda(&device) { 200 } else { 2 };
        let repeat = || {
            for repeat in 0..repeats {
                let all = calls.each_ref().map(call);
                for (found, expected) in all.iter().zip(&first) {
                    assert!(values(found) == *expected, "repeat {repeat}, {device:?}");
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(repeat);
            scope.spawn(repeat);
        });
        // What is no number is found as such, and leaves nothing behind.
        let [q, k, v] = &calls[0];
        let nan = call(&[q.clone(), k.clone() * f32::NAN, v.clone()]);
        assert!(values(&nan).iter().all(|x| x.is_nan()), "{device:?}");
        assert!(values(&call(&calls[0])) == first[0], "{device:?}");
    }
}

/// What all positions see of each other in float64, `[B, T, H·D]`, of what [`attention_qkv`] takes.
fn expected_of(
    qkv: &[f64],
    [batch, length, heads, kv_heads, width]: [usize; 5],
    options: AttentionOptions,
) -> Vec<f64> {
    let all = heads + 2 * kv_heads;
    let of = |first: usize, count: usize| -> Vec<f64> {
        let head = |b: usize, h: usize, t: usize| ((b * length + t) * all + first + h) * width;
        let places = (0..batch).flat_map(|b| (0..count).map(move |h| (b, h)));
        let rows = places.flat_map(|(b, h)| (0..length).map(move |t| head(b, h, t)));
        rows.flat_map(|at| qkv[at..at + width].iter().copied()).collect()
    };
    let [q, k, v] =
        [(0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)].map(|(f, c)| of(f, c));
    let d = oracle::Dims { batch, heads, kv_heads, queries: length, keys: length, width };
    let y = oracle::forward(&q, &k, &v, d, &oracle::Rule::new(options, width));
    let head = |b: usize, t: usize, h: usize| ((b * heads + h) * length + t) * width;
    let places = (0..batch).flat_map(|b| (0..length).map(move |t| (b, t)));
    let rows = places.flat_map(|(b, t)| (0..heads).map(move |h| head(b, t, h)));
    rows.flat_map(|at| y[at..at + width].iter().copied()).collect()
}

/// Positions come a few at a time: what they see is what they would see all at once.
#[test]
fn a_cache_is_filled_in_place() {
    let _alone = crate::alone();
    let (batch, capacity) = (2, 64);
    let plain = AttentionOptions::default();
    let cut = AttentionOptions { window: Some(7), softcap: Some(2.5), ..plain };
    let scaled = AttentionOptions { scale: Some(0.4), ..plain };
    for device in devices() {
        for dtype in dtypes(&device) {
            // The last two on wgmma, where there is some.
            for (heads, kv_heads, width, options) in [
                (4, 1, 24, plain),
                (4, 2, 24, cut),
                (4, 2, 24, scaled),
                (4, 4, 24, plain),
                (40, 2, 64, plain),
                (40, 2, 64, scaled),
            ] {
                let all = (heads + 2 * kv_heads) * width;
                let length = 41;
                let shape = [batch, length, all];
                let (qkv, held) =
                    tensor(&numbers(shape.iter().product(), 5, 0.1), shape, dtype, &device);
                let whole = expected_of(&held, [batch, length, heads, kv_heads, width], options);
                let row = heads * width;
                let seen = |start: usize, count: usize| -> Vec<f64> {
                    let of = |b: usize| &whole[(b * length + start) * row..][..count * row];
                    (0..batch).flat_map(of).copied().collect()
                };
                let mut cache =
                    KvCache::new([batch, kv_heads, capacity, width], dtype, &device).unwrap();
                assert!(cache.filled().is_none());
                let mut copy = None;
                // A prompt longer than what decodes, tokens one by one, and a few together.
                let (_, plans) = plans::listen(|| {
                    for (start, count) in [(0, 20), (20, 1), (21, 1), (22, 3), (25, 16)] {
                        let new = qkv.clone().narrow(1, start, count);
                        let y = attention_cached(new, heads, &mut cache, options).unwrap();
                        let what =
                            format!("{heads} heads, {options:?}, {start}..{}", start + count);
                        assert_near(&values(&y), &seen(start, count), dtype, 4, &what);
                    }
                });
                assert!(!plans.iter().any(|plan| plan.contains("after a copy")), "{plans:?}");
                assert_eq!((cache.len(), cache.is_empty()), (41, false));
                // Two continuations of one cache do not write over each other.
                let mut other = copy.insert(cache.clone()).clone();
                let next = |at| qkv.clone().narrow(1, at, 1);
                let before = cache.filled().unwrap().map(|held| values(&held));
                attention_cached(next(3), heads, &mut cache, options).unwrap();
                attention_cached(next(7), heads, &mut other, options).unwrap();
                let kept = copy.unwrap();
                assert_eq!(kept.filled().unwrap().map(|held| values(&held)), before);
                let [own, others] =
                    [&cache, &other].map(|of| of.filled().unwrap().map(|x| values(&x)));
                assert_ne!(own, others);
                cache.clear();
                let y = attention_cached(qkv.clone().narrow(1, 0, 2), heads, &mut cache, options);
                assert_near(&values(&y.unwrap()), &seen(0, 2), dtype, 4, "after it was cleared");
            }
        }
    }
}

#[test]
fn what_does_not_fit_a_cache_is_named() {
    let _alone = crate::alone();
    let device = devices().remove(0);
    let new = |shape, dtype| KvCache::new(shape, dtype, &device).map_err(|e| e.to_string());
    assert_eq!(
        new([1, 2, 3, 4], DType::I32).unwrap_err(),
        "attention: `cache` is I32, expected F32, BF16 or F16"
    );
    assert_eq!(
        new([1, 0, 3, 4], DType::F32).unwrap_err(),
        "attention: `cache` has shape [1, 0, 3, 4], expected [B, Hkv, capacity, D], each at least 1"
    );
    // Beyond usize, and beyond what an allocation may have.
    for sequences in [usize::MAX, 1 << 57] {
        let impossible = new([sequences, 2, 3, 4], DType::F32).unwrap_err();
        assert!(impossible.ends_with("expected [B, Hkv, capacity, D] that fits into memory"));
    }
    for device in devices() {
        let new = KvCache::new([1, 2, 3, 4], DType::BF16, &device);
        match device.supports_dtype(DType::BF16) {
            true => assert!(new.is_ok()),
            false => assert_eq!(
                new.map(|_| ()).unwrap_err().to_string(),
                "attention: `cache` is BF16, expected an element type that the device has"
            ),
        }
    }
    let mut cache = new([1, 2, 3, 4], DType::F32).unwrap();
    let mut call = |shape, heads| {
        let qkv = Tensor::<3>::ones(shape, &device);
        attention_cached(qkv, heads, &mut cache, AttentionOptions::default())
    };
    assert!(call([1, 2, 32], 4).is_ok());
    assert_eq!(
        call([1, 2, 32], 4).unwrap_err().to_string(),
        "attention: positions = 4, expected at most 3, the capacity of the cache"
    );
    assert_eq!(
        call([2, 1, 32], 4).unwrap_err().to_string(),
        "attention: `qkv` has shape [2, 1, 32], expected [1, T, 32] for 4 heads and the cache, T at least 1"
    );
    assert_eq!(
        call([1, 1, 32], 3).unwrap_err().to_string(),
        "attention: heads = 3, expected a multiple of the cache's 2 KV heads, both at least 1"
    );
}

/// At which speed keys and values are read, beside a copy that moves as many bytes.
#[test]
#[ignore = "a time and no test"]
fn speed() {
    let _alone = crate::alone();
    for device in kernel_devices() {
        let dtype = if device.supports_dtype(DType::BF16) { DType::BF16 } else { DType::F32 };
        for [batch, heads, kv_heads, keys, width] in [
            [1, 12, 12, 1024, 64],
            [1, 32, 8, 4096, 128],
            [1, 32, 8, 16384, 128],
            [1, 64, 8, 16384, 128],
            [1, 16, 16, 16384, 64],
            [8, 32, 8, 4096, 128],
            [8, 64, 8, 4096, 128],
            [16, 32, 8, 16384, 128],
            [64, 12, 12, 1024, 64],
            [64, 32, 8, 2048, 128],
            [64, 32, 32, 1024, 64],
            [64, 32, 4, 16384, 128],
            [4, 16, 8, 8192, 256],
            [4, 64, 4, 16384, 128],
            [8, 32, 1, 16384, 128],
            [8, 64, 1, 16384, 128],
            [16, 32, 1, 16384, 128],
            [32, 64, 1, 16384, 128],
        ] {
            let bytes = 2 * batch * kv_heads * keys * width * dtype.size();
            // More than a cache holds.
            let sets = (1usize << 29).div_ceil(bytes).clamp(1, 32);
            let filled = |shape: [usize; 4]| Tensor::<4>::full(shape, 0.5, (&device, dtype));
            let of: Vec<_> = (0..sets)
                .map(|_| {
                    let keys = || filled([batch, kv_heads, keys, width]);
                    (filled([batch, heads, 1, width]), keys(), keys())
                })
                .collect();
            let options = AttentionOptions::default();
            let decode = || -> Vec<Tensor<4>> {
                policy::force(policy::Implementation::Fused, || {
                    let all = of.iter().cloned();
                    all.map(|(q, k, v)| attention(q, k, v, options).unwrap()).collect()
                })
            };
            // Reads one half of as many bytes and writes the other.
            let copy = || -> Vec<Tensor<4>> {
                of.iter().map(|(_, k, _)| k.clone().mul_scalar(2.0)).collect()
            };
            let [decoded, copied] = [seconds(&device, sets, decode), seconds(&device, sets, copy)]
                .map(|s| bytes as f64 / s / 1e9);
            let (megabytes, ratio) = (bytes as f64 / 1e6, decoded / copied);
            eprintln!(
                "b{batch} h{heads}/{kv_heads} s{keys} d{width}: {megabytes:.0} MB, {decoded:.0} GB/s, \
                 copy {copied:.0}, ratio {ratio:.2}"
            );
        }
    }
}

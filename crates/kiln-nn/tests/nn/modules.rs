//! The modules on the CPU: shapes, element types, parameters, devices, messages.

use burn::module::Module;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_nn::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex())
}

fn close<const D: usize>(a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
    let error: f32 = (a - b).abs().max().into_scalar();
    assert!(error <= tolerance, "{error}");
}

fn message(f: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("a panic");
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).expect("a message")
}

#[test]
fn linear_is_a_product_of_any_rank_in_the_type_of_its_input() {
    let device = Device::flex();
    let layer = LinearConfig::new(6, 4).with_bias(true).init(&device);
    assert_eq!(layer.num_params(), 28);
    let x = random([2, 3, 6]);
    let y = layer.forward(x.clone());
    assert_eq!(y.dims(), [2, 3, 4]);
    let flat = x.clone().reshape([6, 6]).matmul(layer.weight.val());
    close(y.clone().reshape([6, 4]), flat, 1e-6); // the bias starts at 0
    let half = layer.forward(x.cast(DType::BF16));
    assert_eq!(half.dtype(), DType::BF16);
    close(half.cast(DType::F32), y, 0.05);
}

#[test]
fn a_bf16_input_gives_f32_gradients() {
    let device = Device::flex().autodiff();
    let attention = CausalSelfAttentionConfig::new(8, 2, 4).with_qk_norm(true).init(&device);
    let mlp = SwiGluConfig::new(8, 12).init(&device);
    let x = random([1, 4, 8]).autodiff().cast(DType::BF16);
    let y = mlp.forward(attention.forward(x));
    assert_eq!(y.dtype(), DType::BF16);
    let grads = y.cast(DType::F32).square().sum().backward();
    let weight = attention.w_qkv.weight.val().grad(&grads).unwrap();
    let norm = attention.q_norm.as_ref().unwrap().weight.val().grad(&grads).unwrap();
    assert_eq!((weight.dtype(), norm.dtype()), (DType::F32, DType::F32));
    assert!(mlp.w_down.val().grad(&grads).is_some());
}

#[test]
fn rms_norm_and_its_residual_form_agree() {
    let norm = RmsNormConfig::new(16).with_eps(1e-6).init(&Device::flex());
    let (x, residual) = (random([3, 16]), random([3, 16]));
    let (sum, y) = norm.forward_add(x.clone(), residual.clone());
    close(sum.clone(), x + residual, 0.0);
    close(y.clone(), norm.forward(sum), 0.0);
    close(y.square().mean_dim(1), Tensor::ones([3, 1], &Device::flex()), 1e-4);
}

/// As the user of a layer sees it, `x` is wrong and no weight.
#[test]
fn another_width_is_that_of_x() {
    let device = Device::flex();
    let norm = RmsNormConfig::new(16).init(&device);
    let linear = LinearConfig::new(16, 4).init(&device);
    let mlp = SwiGluConfig::new(16, 12).init(&device);
    let attention = CausalSelfAttentionConfig::new(16, 4, 8).init(&device);
    let x = || random([1, 2, 5]);
    let mut cache = KvCache::new(8);
    for (layer, line) in [
        ("rms_norm", message(|| drop(norm.forward(x())))),
        ("add_rms_norm", message(|| drop(norm.forward_add(x(), x())))),
        ("linear", message(|| drop(linear.forward(x())))),
        ("swiglu_mlp", message(|| drop(mlp.forward(x())))),
        ("attention", message(|| drop(attention.forward(x())))),
        ("attention", message(|| drop(attention.forward_cached(x(), &mut cache)))),
    ] {
        assert_eq!(line, format!("{layer}: `x` has shape [1, 2, 5], expected [..., 16]"));
    }
    assert!(cache.is_empty());
}

#[test]
fn a_size_of_zero_is_refused() {
    let device = Device::flex();
    for (layer, size, line) in [
        ("rms_norm", "d_model", message(|| drop(RmsNormConfig::new(0).init(&device)))),
        ("linear", "d_input", message(|| drop(LinearConfig::new(0, 4).init(&device)))),
        ("linear", "d_output", message(|| drop(LinearConfig::new(4, 0).init(&device)))),
        ("swiglu_mlp", "d_model", message(|| drop(SwiGluConfig::new(0, 4).init(&device)))),
        ("swiglu_mlp", "d_hidden", message(|| drop(SwiGluConfig::new(4, 0).init(&device)))),
        (
            "attention",
            "d_model",
            message(|| drop(CausalSelfAttentionConfig::new(0, 4, 8).init(&device))),
        ),
    ] {
        assert_eq!(line, format!("{layer}: {size} = 0, expected at least 1"));
    }
}

#[test]
fn attention_sees_the_past_alone_and_the_cache_changes_nothing() {
    for kv_heads in [1, 2, 4] {
        let attention = CausalSelfAttentionConfig::new(16, 4, 8)
            .with_kv_heads(Some(kv_heads))
            .with_qk_norm(kv_heads == 2)
            .init(&Device::flex());
        assert_eq!(attention.w_qkv.weight.dims(), [16, 16 + 8 * kv_heads]);
        assert_eq!(attention.parts(), [16, 4 * kv_heads, 4 * kv_heads]);
        let x = random([2, 6, 16]);
        let y = attention.forward(x.clone());
        let changed = x.clone().slice_assign([0..2, 4..5, 0..16], random([2, 1, 16]));
        close(attention.forward(changed).narrow(1, 0, 4), y.clone().narrow(1, 0, 4), 0.0);

        let mut cache = KvCache::new(7);
        for _ in 0..2 {
            assert!(cache.is_empty());
            for (start, length) in [(0, 3), (3, 1), (4, 2)] {
                let part = attention.forward_cached(x.clone().narrow(1, start, length), &mut cache);
                close(part, y.clone().narrow(1, start, length), 1e-5);
            }
            assert_eq!((cache.len(), cache.capacity()), (6, 7));
            let more = || drop(attention.forward_cached(random([2, 2, 16]), &mut cache.clone()));
            let line = message(more);
            assert_eq!(
                line,
                "attention: positions = 8, expected at most 7, the capacity of the cache"
            );
            cache.clear();
        }
        // What was forgotten may be followed by another number of sequences.
        let one = x.clone().narrow(0, 1, 1);
        close(attention.forward_cached(one, &mut cache), y.clone().narrow(0, 1, 1), 1e-5);
        let line = message(|| drop(attention.forward(random([1, 9, 16]))));
        assert_eq!(line, "attention: positions = 9, expected at most 8, those of the layer");
        let mut longer = KvCache::new(20);
        drop(attention.forward_cached(random([1, 8, 16]), &mut longer));
        let line = message(|| drop(attention.forward_cached(random([1, 2, 16]), &mut longer)));
        assert_eq!(line, "attention: positions = 10, expected at most 8, those of the layer");
    }
    let line = message(|| drop(CausalSelfAttentionConfig::new(10, 4, 8).init(&Device::flex())));
    assert_eq!(line, "attention: d_model = 10, expected a multiple of heads = 4");
}

#[test]
fn rope_is_no_parameter_and_follows_its_module() {
    let device = Device::flex();
    let rope = RopeConfig::new(10, 4).init(&device);
    assert_eq!(
        (rope.num_params(), rope.positions(), rope.devices()),
        (0, 10, vec![device.clone()])
    );
    let x = random([1, 2, 3, 4]);
    let turned = rope.forward(x.clone(), 0);
    close(turned.clone().narrow(2, 0, 1), x.clone().narrow(2, 0, 1), 0.0);
    let keys = random([1, 1, 3, 4]);
    let (q, k) = rope.forward_qk(x.clone(), keys.clone(), 2);
    close(q, rope.forward(x.clone(), 2), 0.0);
    close(k, rope.forward(keys, 2), 0.0);
    let moved = rope.to_device(&device.autodiff());
    close(moved.forward(x, 0), turned, 0.0);
}

/// Queries, keys and values start as matrices of their own would.
#[test]
fn start_values_are_those_of_three_matrices() {
    let xavier = burn::nn::Initializer::XavierUniform { gain: 1.0 };
    let attention = CausalSelfAttentionConfig::new(64, 8, 4)
        .with_kv_heads(Some(1))
        .with_initializer(xavier)
        .init(&Device::flex());
    let weight = attention.w_qkv.weight.val();
    let mut first = 0;
    for columns in attention.parts() {
        // The bound of its own shape, which some of so many numbers come near.
        let bound = (6.0 / (64 + columns) as f32).sqrt();
        let part = weight.clone().narrow(1, first, columns);
        let most: f32 = part.abs().max().into_scalar();
        assert!(most <= bound && most > 0.95 * bound, "{columns}: {most} {bound}");
        first += columns;
    }
}

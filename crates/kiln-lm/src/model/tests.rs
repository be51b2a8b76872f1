//! The model against what can be said without running it elsewhere.

use super::*;
use crate::config::{MixerKind, Mixers, ResidualKind};
use burn::tensor::TensorData;

fn config() -> ModelConfig {
    ModelConfig { layers: 2, width: 16, heads: 4, kv_heads: 2, context: 12, ..Default::default() }
}

/// With attention, with `bk`, and with both.
fn configs() -> [ModelConfig; 3] {
    let (attention, bk) = (MixerKind::Attention, MixerKind::Bk);
    [vec![attention], vec![bk], vec![bk, attention]]
        .map(|by_turns| ModelConfig { mixer: Mixers::new(by_turns), ..config() })
}

/// With three streams.
fn streams() -> ModelConfig {
    ModelConfig { residual: ResidualKind::Mhc, streams: Some(3), ..config() }
}

fn tokens(values: &[i32], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [1, values.len()]), device)
}

fn data(t: Tensor<3>) -> Vec<f32> {
    t.into_data().iter::<f32>().collect()
}

#[test]
fn has_the_parameters_it_should() {
    let device = Device::flex();
    let block = 2 * 16 + 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 64;
    assert_eq!(config().init(50, 1, &device).num_params(), 50 * 16 + 2 * block + 16);
    let untied = ModelConfig { tied_embeddings: false, qk_norm: true, ..config() };
    let expected = 2 * 50 * 16 + 2 * (block + 2 * 4) + 16;
    assert_eq!(untied.init(50, 1, &device).num_params(), expected);
    let [_, bk, both] = configs();
    let bk_block = 2 * 16 + 16 * 4 + 8 * 16 + 3 * 16 * 64;
    assert_eq!(bk.init(50, 1, &device).num_params(), 50 * 16 + 2 * bk_block + 16);
    assert_eq!(both.init(50, 1, &device).num_params(), 50 * 16 + bk_block + block + 16);
    // Heads are nothing to a model without attention.
    let bk = ModelConfig { heads: 0, bk_channels: Some(3), ..bk };
    let fewer = 2 * (16 + 2 * 16);
    assert_eq!(bk.init(50, 1, &device).num_params(), 50 * 16 + 2 * bk_block + 16 - fewer);
}

#[test]
fn parameters_are_known_before_there_are_any() {
    let device = Device::flex();
    let untied = ModelConfig { tied_embeddings: false, qk_norm: true, ..config() };
    let [_, bk, both] = configs();
    let chains = ModelConfig { heads: 0, bk_channels: Some(3), mlp_width: 5, ..bk.clone() };
    // Two mixers by turns, which do not come out even.
    let by_turns = ModelConfig { layers: 5, ..both.clone() };
    let four = ModelConfig { streams: None, ..streams() };
    for config in [config(), untied, bk, both, chains, by_turns, streams(), four] {
        let made = config.init(50, 1, &device).num_params();
        assert_eq!(config.parameters(50), made as f64, "{config:?}");
    }
}

#[test]
fn a_token_changes_only_what_comes_at_and_after_it() {
    let device = Device::flex();
    let normed = ModelConfig { qk_norm: true, ..config() };
    for config in configs().into_iter().chain([normed, streams()]) {
        let model = config.init(50, 1, &device);
        let first = data(model.forward(tokens(&[1, 2, 3, 4, 5], &device)));
        let second = data(model.forward(tokens(&[1, 2, 9, 4, 5], &device)));
        assert_eq!(first[..100], second[..100]);
        assert!((100..250).step_by(50).all(|i| first[i..i + 50] != second[i..i + 50]));
    }
}

#[test]
fn the_loss_is_the_cross_entropy_of_the_logits() {
    let device = Device::flex();
    for tied_embeddings in [true, false] {
        let model = ModelConfig { tied_embeddings, ..config() }.init(50, 1, &device);
        let (x, targets) = ([1, 2, 3], [2, 3, 49]);
        let logits = data(model.forward(tokens(&x, &device)));
        let expected: f64 = targets
            .iter()
            .zip(logits.chunks(50))
            .map(|(target, row)| {
                let sum: f64 = row.iter().map(|x| (*x as f64).exp()).sum();
                sum.ln() - row[*target as usize] as f64
            })
            .sum::<f64>()
            / 3.0;
        let loss = model.loss(tokens(&x, &device), tokens(&targets, &device));
        let loss: f64 = loss.into_scalar();
        assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
        // At the start every token is about as likely as any other.
        assert!((loss - 50f64.ln()).abs() < 0.2, "{loss}");
    }
}

#[test]
fn the_cache_changes_nothing() {
    let device = Device::flex();
    for config in configs().into_iter().chain([streams()]) {
        let model = config.init(50, 3, &device);
        let x = [4, 8, 15, 16, 23, 42, 0];
        let all = data(model.forward(tokens(&x, &device)));
        let mut cache = model.empty_cache();
        for (start, end) in [(0, 3), (3, 4), (4, 5), (5, 7)] {
            let last = model.forward_cached(tokens(&x[start..end], &device), &mut cache);
            let last: Vec<f32> = last.into_data().iter::<f32>().collect();
            let expected = &all[(end - 1) * 50..end * 50];
            let close = last.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close && cache.iter().all(|c| c.len() == end), "{last:?} {expected:?}");
        }
    }
}

#[test]
#[should_panic(expected = "a cache of another kind of mixer")]
fn a_cache_of_another_mixer_is_refused() {
    let device = Device::flex();
    let [attention, bk, _] = configs().map(|config| config.init(50, 3, &device));
    attention.forward_cached(tokens(&[1], &device), &mut bk.empty_cache());
}

#[test]
fn bf16_activations_give_f32_logits_and_gradients() {
    let device = Device::flex().autodiff();
    let exact = config().init(50, 1, &device);
    let model = exact.clone().with_activations(DType::BF16);
    let x = tokens(&[1, 2, 3], &device);
    let (logits, exact) = (model.forward(x.clone()), exact.forward(x.clone()));
    assert_eq!(logits.dtype(), DType::F32);
    let error = (logits - exact.clone()).abs().max().into_scalar::<f32>();
    assert!(error > 0.0 && error < 0.02, "{error}");
    let grads = model.loss(x.clone(), x).backward();
    let Mlp::SwiGlu(mlp) = &model.blocks[0].mlp else { panic!("not the kind that was asked for") };
    let grad = mlp.w_up.val().grad(&grads).unwrap();
    assert_eq!(grad.dtype(), DType::F32);
    assert!(grad.abs().sum().into_scalar::<f32>() > 0.0);
}

#[test]
fn parameters_have_the_names_that_checkpoints_give_them() {
    let untied = ModelConfig { tied_embeddings: false, qk_norm: true, layers: 1, ..config() };
    let model = untied.init(50, 1, &Device::flex());
    let names: Vec<String> = tensors::record(&model).into_iter().map(|(name, _)| name).collect();
    let expected = [
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.w_qkv.weight",
        "blocks.0.attention.w_o.weight",
        "blocks.0.attention.q_norm.weight",
        "blocks.0.attention.k_norm.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.w_gate",
        "blocks.0.mlp.w_up",
        "blocks.0.mlp.w_down",
        "norm.weight",
        "head.weight",
    ];
    assert_eq!(names, expected);

    // The first block of two.
    let [_, _, both] = configs();
    let names = tensors::record(&both.init(50, 1, &Device::flex())).into_iter();
    let names: Vec<String> = names.map(|(name, _)| name).filter(|n| n.contains("_")).collect();
    let expected = [
        "blocks.0.attention_norm.weight",
        "blocks.0.bk.w_in.weight",
        "blocks.0.bk.w_out.weight",
        "blocks.0.mlp_norm.weight",
    ];
    assert_eq!(names[..4], expected);
    assert!(names.contains(&"blocks.1.attention.w_qkv.weight".to_string()), "{names:?}");
}

#[test]
fn first_values_are_those_of_every_earlier_version() {
    // They follow from seed and name: a new name would be another run.
    let model = config().init(50, 1, &Device::flex());
    let record: BTreeMap<String, TensorData> = tensors::record(&model).into_iter().collect();
    let residual = 0.02 / 2.0;
    for (name, deviation) in [
        ("embedding.weight", 0.02),
        ("blocks.1.attention.w_o.weight", residual),
        ("blocks.0.mlp.w_gate", 0.02),
        ("blocks.0.mlp.w_down", residual),
    ] {
        let found: Vec<f32> = record[name].iter::<f32>().collect();
        assert_eq!(found, initial::normal(name, 1, deviation, found.len()), "{name}");
    }
    let [_, bk, _] = configs();
    let of_bk = tensors::record(&bk.init(50, 1, &Device::flex()));
    let of_bk: BTreeMap<String, TensorData> = of_bk.into_iter().collect();
    for (part, deviation) in [("w_in", 0.02), ("w_out", residual)] {
        let name = format!("blocks.1.bk.{part}.weight");
        let found: Vec<f32> = of_bk[&name].iter::<f32>().collect();
        assert_eq!(found, initial::normal(&name, 1, deviation, found.len()), "{name}");
    }
    // Queries, keys and values were matrices of their own, of 16, 8 and 8 columns.
    let qkv: Vec<f32> = record["blocks.1.attention.w_qkv.weight"].iter::<f32>().collect();
    for (part, first, columns) in [("w_q", 0, 16), ("w_k", 16, 8), ("w_v", 24, 8)] {
        let name = format!("blocks.1.attention.{part}.weight");
        let expected = initial::normal(&name, 1, 0.02, 16 * columns);
        let found = qkv.chunks(32).flat_map(|row| &row[first..first + columns]);
        assert!(found.eq(&expected), "{name}");
    }
}

#[test]
fn a_model_for_inference_says_the_same() {
    let device = Device::flex();
    let untied = ModelConfig { tied_embeddings: false, ..config() };
    for config in configs().into_iter().chain([untied]) {
        let model = config.init(50, 1, &device.clone().autodiff());
        for dtype in [DType::F32, DType::BF16] {
            let model = model.clone().with_activations(dtype);
            let inference = model.for_inference();
            assert_eq!(inference.embedding.weight.val().dtype(), dtype);
            let logits =
                |model: &Transformer| data(model.forward(tokens(&[1, 2, 3, 4, 5], &device)));
            assert_eq!(logits(&inference), logits(&model.valid()), "{dtype:?}");
        }
    }
}

#[test]
fn the_logits_are_a_product_of_kiln_ops() {
    // Burn's own would be TF32 on CUDA. Only the public function refuses a kernel where there is none.
    use kiln_ops::policy::{Implementation, force};
    let device = Device::flex();
    let model = config().init(50, 1, &device);
    let y = Tensor::<2>::ones([1, 16], &device);
    let weight = model.embedding.weight.val();
    let logits = || force(Implementation::Fused, || logits(y.clone(), Head::Table(weight.clone())));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(logits)).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.starts_with("matmul: the fused kernel cannot run on cpu"), "{message}");
}

/// Streams begin equal, and with α = 0 their weights are those of the plain residual connection.
#[test]
fn streams_begin_as_one() {
    let device = Device::flex();
    let (plain, mut hyper) = (config().init(50, 1, &device), streams().init(50, 1, &device));
    let x = tokens(&[1, 2, 3, 4, 5], &device);
    let expected = data(plain.forward(x.clone()));
    let off = |model: &Transformer| {
        let found = data(model.forward(x.clone()));
        found.iter().zip(&expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()))
    };
    // The weights that tokens choose are near them.
    let chosen = off(&hyper);
    assert!(chosen > 0.0 && chosen < 0.02, "{chosen}");
    let still =
        |alpha: &mut Param<Tensor<1>>| *alpha = Param::from_tensor(alpha.val().zeros_like());
    for block in &mut hyper.blocks {
        for connection in [&mut block.mixer_connection, &mut block.mlp_connection] {
            still(&mut connection.as_mut().unwrap().alpha);
        }
    }
    still(&mut hyper.stream_head.as_mut().unwrap().alpha);
    assert!(off(&hyper) < 1e-3 * chosen.max(0.1), "{}", off(&hyper));
}

/// For inference φ stays in f32.
#[test]
fn weights_of_streams_are_not_rounded_for_inference() {
    let model =
        streams().init(50, 1, &Device::flex()).with_activations(DType::BF16).for_inference();
    let connection = model.blocks[0].mixer_connection.as_ref().unwrap();
    assert_eq!(connection.phi.val().dtype(), DType::F32);
    let head = model.stream_head.as_ref().unwrap();
    assert_eq!(head.phi.val().dtype(), DType::F32);
    assert_eq!(model.embedding.weight.val().dtype(), DType::BF16);
}

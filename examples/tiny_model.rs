//! A block of `kiln-nn` layers between an embedding and a projection, trained for a few steps by
//! `kiln-optim` to continue a sentence:
//!
//! ```text
//! cargo run --release --example tiny_model
//! ```

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_nn::prelude::*;
use kiln_ops::device;
use kiln_optim::prelude::*;

const TEXT: &[u8] = b"the kiln fires the clay, and the clay becomes a cup. ";
const CONTEXT: usize = 16;
const WIDTH: usize = 32;

#[derive(Module, Debug)]
struct Tiny {
    embedding: Embedding,
    norm: RmsNorm,
    attention: CausalSelfAttention,
    mlp_norm: RmsNorm,
    mlp: SwiGlu,
    last_norm: RmsNorm,
    head: Linear,
}

impl Tiny {
    fn new(device: &Device) -> Self {
        let norm = || RmsNormConfig::new(WIDTH).init(device);
        Self {
            embedding: EmbeddingConfig::new(256, WIDTH).init(device),
            norm: norm(),
            attention: CausalSelfAttentionConfig::new(WIDTH, 4, CONTEXT).init(device),
            mlp_norm: norm(),
            mlp: SwiGluConfig::new(WIDTH, 64).init(device),
            last_norm: norm(),
            head: LinearConfig::new(WIDTH, 256).init(device),
        }
    }

    /// Logits of the byte after each of `tokens`: `[B, T]` to `[B, T, 256]`.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let attended = self.attention.forward(self.norm.forward(x.clone()));
        // Each residual addition is one operation with the norm after it.
        let (x, y) = self.mlp_norm.forward_add(attended, x);
        let (_, y) = self.last_norm.forward_add(self.mlp.forward(y), x);
        self.head.forward(y)
    }
}

/// One window from each place of the text, and its targets.
fn batch(device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let token = |at: usize| i32::from(TEXT[at % TEXT.len()]);
    let window = |shift: usize| -> Vec<i32> {
        (0..TEXT.len())
            .flat_map(|start| (0..CONTEXT).map(move |t| token(start + t + shift)))
            .collect()
    };
    let inputs = TensorData::new(window(0), [TEXT.len(), CONTEXT]);
    let targets = TensorData::new(window(1), [TEXT.len() * CONTEXT]);
    (Tensor::from_data(inputs, device), Tensor::from_data(targets, device))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let opened = device::open("auto")?;
    println!("device: {}", opened.why);
    let device = opened.device.clone().autodiff();
    device.seed(1);

    let mut model = Tiny::new(&device);
    let config = AdamWConfig::new().with_weight_decay(0.1);
    let spared = config.clone().with_weight_decay(0.0);
    let mut optimizer = config.init().with_group(below_rank_two(&model), spared);
    let (inputs, targets) = batch(&device);
    println!("{} parameters", model.num_params());

    for step in 0..=60 {
        let logits = model.forward(inputs.clone());
        let [windows, context, classes] = logits.dims();
        let logits = logits.reshape([windows * context, classes]);
        let loss = cross_entropy(logits, targets.clone(), CrossEntropyOptions::default())?;
        if step % 10 == 0 {
            println!("step {step}: loss {:.4}", loss.clone().into_scalar::<f32>());
        }
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let (grads, _norm) = clip_global_norm(&model, grads, 1.0);
        model = optimizer.step(model, grads, 1e-2);
    }

    // The most likely bytes after a beginning.
    let model = model.valid();
    let mut text = TEXT[..CONTEXT].to_vec();
    for _ in 0..30 {
        let window = text[text.len() - CONTEXT..].iter().map(|byte| i32::from(*byte));
        let tokens = TensorData::new(window.collect::<Vec<_>>(), [1, CONTEXT]);
        let logits = model.forward(Tensor::from_data(tokens, &opened.device));
        let next = logits.narrow(1, CONTEXT - 1, 1).argmax(2).into_scalar::<i32>();
        text.push(u8::try_from(next)?);
    }
    println!("{}", String::from_utf8_lossy(&text));
    Ok(())
}

//! First values of the parameters, made on the host from the seed and the name of the parameter, so
//! that they are the same on every device and do not change when a layer is added beside them. What has a
//! value already, such as a buffer, keeps it.

use super::Transformer;
use crate::config::ModelConfig;
use crate::names::names;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use kiln_optim::Names;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::f64::consts::TAU;

/// Standard deviation, as in GPT-2.
const DEVIATION: f64 = 0.02;

pub(super) fn initialize(model: Transformer, config: &ModelConfig, seed: u64) -> Transformer {
    // 2·layers projections add up in the residual stream.
    let residual = DEVIATION / (2.0 * config.layers as f64).sqrt();
    model.map(&mut Initial { seed, residual, queries: config.width, names: names() })
}

struct Initial {
    seed: u64,
    residual: f64,
    /// Columns of the queries.
    queries: usize,
    names: Names,
}

impl Initial {
    /// Queries, keys and values side by side, with the values of the matrices that they were: a seed goes on
    /// giving the same model.
    fn projections(&self, name: &str, shape: &[usize]) -> Vec<f32> {
        let keys = (shape[1] - self.queries) / 2;
        let parts = [("w_q", self.queries), ("w_k", keys), ("w_v", keys)].map(|(part, columns)| {
            let name = name.replace("w_qkv", part);
            (normal(&name, self.seed, DEVIATION, shape[0] * columns), columns)
        });
        let row = |row: usize| parts.iter().flat_map(move |(of, n)| &of[row * n..(row + 1) * n]);
        (0..shape[0]).flat_map(row).copied().collect()
    }

    /// MLPs of seeds, which learn to return what goes in before anyone sees them: weights by Glorot and Bengio, biases 0.
    fn mlps(&self, name: &str, shape: &[usize]) -> Vec<f32> {
        let (size, features) = (shape[1] * shape[2], shape[2]);
        let deviation = (2.0 / (3 * features) as f64).sqrt();
        let mut values = normal(name, self.seed, deviation, shape[0] * size);
        for mlp in values.chunks_exact_mut(size) {
            mlp[4 * features * features..].fill(0.0);
        }
        values
    }
}

impl ModuleMapper for Initial {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.is_initialized() {
            return param;
        }
        let name = self.names.name();
        let shape = param.lazy_shape();
        let values = match name.rsplit('.').collect::<Vec<_>>()[..] {
            // The scale of a norm.
            _ if D == 1 => vec![1.0; shape.num_elements()],
            ["weight", "w_qkv", ..] => self.projections(&name, shape.as_slice()),
            ["mlps", "seeds", ..] => self.mlps(&name, shape.as_slice()),
            // About 1, with which a blend changes little.
            ["blueprints", "seeds", ..] => {
                let off = normal(&name, self.seed, DEVIATION, shape.num_elements());
                off.into_iter().map(|off| 1.0 + off).collect()
            }
            ["weight", "w_o" | "w_out", ..] | ["w_down", ..] => {
                normal(&name, self.seed, self.residual, shape.num_elements())
            }
            _ => normal(&name, self.seed, DEVIATION, shape.num_elements()),
        };
        let value = Tensor::from_data(TensorData::new(values, shape), &param.lazy_device());
        let trainable = !name.ends_with(".seeds.blueprints");
        Param::initialized(param.id, value).set_require_grad(trainable)
    }
}

/// Normal numbers by Box and Muller's transform.
pub(super) fn normal(name: &str, seed: u64, deviation: f64, count: usize) -> Vec<f32> {
    let mut key = blake3::Hasher::new_derive_key("kiln-lm 2026 initial parameter values");
    key.update(&seed.to_le_bytes()).update(name.as_bytes());
    let mut rng = ChaCha8Rng::from_seed(*key.finalize().as_bytes());
    // In (0, 1], so that its logarithm is finite.
    let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt() * deviation, TAU * uniform());
        values.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
    }
    values.truncate(count);
    values
}

#[cfg(test)]
mod tests {
    use super::normal;

    #[test]
    fn values_are_normal_and_follow_from_seed_and_name() {
        let values = normal("a.weight", 1, 0.02, 100_001);
        let n = values.len() as f64;
        let mean = values.iter().map(|v| *v as f64).sum::<f64>() / n;
        let deviation = (values.iter().map(|v| (*v as f64 - mean).powi(2)).sum::<f64>() / n).sqrt();
        assert!(mean.abs() < 3e-4 && (deviation - 0.02).abs() < 3e-4, "{mean} {deviation}");
        let within = values.iter().filter(|v| v.abs() < 0.02).count() as f64 / n;
        assert!((within - 0.6827).abs() < 0.01, "{within}");

        assert_eq!(values[..10], normal("a.weight", 1, 0.02, 10));
        assert_ne!(values[..10], normal("a.weight", 2, 0.02, 10));
        assert_ne!(values[..10], normal("b.weight", 1, 0.02, 10));
    }
}

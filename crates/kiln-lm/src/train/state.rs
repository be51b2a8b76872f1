//! What a checkpoint holds: the model, the state of the optimizer, and where the run is.

use super::replica::Replica;
use super::{TrainError, Trainer};
use crate::config::{self, Config};
use crate::data::{BatchSampler, DataId, Dataset, SamplerState};
use crate::model::Transformer;
use crate::run::Checkpoint;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

pub(super) const STATE: &str = "state.json";
pub(super) const CONFIG: &str = "config.toml";
pub(super) const TOKENIZER: &str = "tokenizer.json";

/// Where a run is. There is no state of a random number generator in it: dropout and samples are
/// seeded from the seed of the run and the step. Losses are f32, which JSON brings back exactly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// Optimizer steps done.
    pub(super) step: u64,
    /// Tokens trained on.
    pub(super) tokens: u64,
    /// Position in the data.
    pub(super) sampler: SamplerState,
    /// Training loss of the first step.
    pub(super) first_loss: Option<f32>,
    /// Training loss of the last step.
    pub(super) last_loss: Option<f32>,
    /// Step and value of the lowest validation loss.
    pub(super) best_validation: Option<(u64, f32)>,
    /// Training losses at the ends of the last epochs of seeds; none without seeds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) epoch_losses: Vec<f32>,
    /// What the run is trained on.
    pub(super) data: DataId,
}

/// Refuses another data set than the one the run began with.
fn check_data(saved: &DataId, found: &DataId) -> Result<(), TrainError> {
    let differ = |what, saved: &dyn ToString, found: &dyn ToString| {
        let (saved, found) = (saved.to_string(), found.to_string());
        if saved == found { Ok(()) } else { Err(TrainError::OtherData { what, saved, found }) }
    };
    differ("the tokenizer's hash", &saved.tokenizer_hash, &found.tokenizer_hash)?;
    differ("the number of training tokens", &saved.train_tokens, &found.train_tokens)?;
    let [before, now] = [saved, found].map(|data| data.validation_tokens);
    differ("the number of validation tokens", &before, &now)?;
    match saved.tokens_hash {
        Some(_) => differ("the text", &saved.short(), &found.short()),
        None => Ok(()),
    }
}

impl Trainer {
    /// Writes a checkpoint of the step and returns its folder.
    pub(super) fn save(&self, validation_loss: Option<f32>) -> Result<PathBuf, TrainError> {
        let record = self.replica.record();
        for (name, data) in &record {
            // A step may leave the range of f32 with a loss and a norm that were still in it.
            if let Some(value) = data.iter::<f32>().find(|value| !value.is_finite()) {
                return Err(self.diverged(self.state.step, format!("parameter `{name}`"), value));
            }
        }
        let [model, optimizer] = self.replica.files(&record)?;
        let state = State { sampler: self.replica.position(), ..self.state.clone() };
        let state = serde_json::to_vec_pretty(&state).expect("plain numbers and strings");
        let config = config::to_toml(&self.config)?;
        let tokenizer = self.dataset.tokenizer.to_json()?;
        let files: [(&str, &[u8]); 5] = [
            (model.0, &model.1),
            (optimizer.0, &optimizer.1),
            (STATE, &state),
            (CONFIG, config.as_bytes()),
            (TOKENIZER, tokenizer.as_bytes()),
        ];
        Ok(self.store.save(self.state.step, &files, validation_loss.map(f64::from))?)
    }
}

/// Before the first step.
pub(super) fn first(
    config: &Config,
    dataset: &Dataset,
    device: &Device,
) -> Result<(Replica<Transformer>, State), TrainError> {
    let (data, seed) = (DataId::of(dataset), config.train.seed);
    let model = config.model.init(data.vocab_size, seed, device);
    let model = model.with_activations(config.train.precision.dtype(device));
    let sampler = BatchSampler::new(dataset.train.clone(), seed);
    let state = State {
        step: 0,
        tokens: 0,
        sampler: sampler.state(),
        first_loss: None,
        last_loss: None,
        best_validation: None,
        epoch_losses: vec![],
        data,
    };
    Ok((Replica::new(config, model, sampler, device.clone())?, state))
}

/// As in a checkpoint, which must be of the same data and model.
pub(super) fn restored(
    config: &Config,
    dataset: &Dataset,
    device: &Device,
    checkpoint: &Checkpoint,
) -> Result<(Replica<Transformer>, State), TrainError> {
    let state = read_state(checkpoint)?;
    let data = DataId::of(dataset);
    check_data(&state.data, &data)?;
    // An earlier version may have known less of it.
    let state = State { data, ..state };
    let skeleton = config.model.skeleton(state.data.vocab_size, device);
    let skeleton = skeleton.with_activations(config.train.precision.dtype(device));
    let sampler = BatchSampler::from_state(dataset.train.clone(), state.sampler);
    let replica = Replica::restored(config, skeleton, sampler, device.clone(), checkpoint);
    let replica = replica.map_err(|error| match (error, differing(config, checkpoint)) {
        (TrainError::Unfit { path, reason }, Some(differing)) => {
            TrainError::Unfit { path, reason: format!("{reason}; {differing}") }
        }
        (error, _) => error,
    })?;
    Ok((replica, state))
}

/// Where model or optimizer are others than those that the checkpoint is of.
fn differing(config: &Config, checkpoint: &Checkpoint) -> Option<String> {
    let text = String::from_utf8(checkpoint.read(CONFIG).ok()?).ok()?;
    let saved: toml::Table = text.parse().ok()?;
    let now: toml::Table = config::to_toml(config).ok()?.parse().ok()?;
    let mut reasons = vec![];
    for section in ["model", "optimizer"] {
        let [saved, now] = [&saved, &now].map(|table| table.get(section)?.as_table());
        let (Some(saved), Some(now)) = (saved, now) else { continue };
        let keys: BTreeSet<&String> = saved.keys().chain(now.keys()).collect();
        reasons.extend(keys.into_iter().filter(|key| saved.get(*key) != now.get(*key)).map(
            |key| {
                let value =
                    |of: Option<&toml::Value>| of.map_or("not given".into(), ToString::to_string);
                let (saved, now) = (value(saved.get(key)), value(now.get(key)));
                format!("{section}.{key} is {now}, where it was saved {saved}")
            },
        ));
    }
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// Where the run was when the checkpoint was saved.
pub(super) fn read_state(checkpoint: &Checkpoint) -> Result<State, TrainError> {
    let json = checkpoint.read(STATE)?;
    let state = serde_json::from_slice(&json);
    state.map_err(|error| TrainError::unfit(checkpoint.path(), format!("{STATE}: {error}")))
}

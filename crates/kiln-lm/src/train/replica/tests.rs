//! A model that holds more than parameters: what it counts, switches and averages goes through checkpoints,
//! and it is called after every step.

use super::*;
use crate::config::parse;
use crate::data::{Rank, TokenShard};
use crate::run::CheckpointStore;
use crate::tensors::TensorsError;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, BoolStore, DType, Int};
use std::collections::BTreeMap;

/// An embedding with a life of its own: it counts steps, lets one more token wake up in each, and keeps a
/// mean of its weights that lags behind.
#[derive(Module, Debug)]
struct Living {
    weight: Param<Tensor<2>>,
    steps: Param<Tensor<1, Int>>,
    awake: Param<Tensor<1, Bool>>,
    mean: Param<Tensor<2>>,
}

const TOKENS: usize = 6;

impl Living {
    fn new(device: &Device) -> Self {
        let values: Vec<f32> = (0..TOKENS * 2).map(|i| 0.1 * i as f32 - 0.5).collect();
        let weight = Tensor::from_data(TensorData::new(values, [TOKENS, 2]), device);
        Self {
            weight: Param::from_tensor(weight),
            steps: Param::initialized(ParamId::new(), Tensor::zeros([1], device)),
            awake: Param::initialized(ParamId::new(), Tensor::from_data([false; TOKENS], device)),
            mean: Param::initialized(ParamId::new(), Tensor::zeros([TOKENS, 2], device)),
        }
    }
}

impl LanguageModel for Living {
    /// Depends on all that it holds.
    fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let near = self.weight.val() - self.mean.val().mul_scalar(0.5);
        let rows = |of: Tensor<2, Int>| near.clone().select(0, of.flatten::<1>(0, 1));
        let awake = self.awake.val().float().sum() + self.steps.val().float();
        let difference = rows(tokens).mul_scalar(1.5) - rows(targets) - awake.unsqueeze();
        difference.square().mean()
    }

    fn after_step(self, step: u64) -> Self {
        let wakes: Vec<bool> = (0..TOKENS).map(|token| token as u64 == step).collect();
        let wakes = Tensor::<1, Bool>::from_data(wakes.as_slice(), &self.awake.device());
        let weight = self.weight.val().inner().mul_scalar(0.1);
        Self {
            steps: self.steps.map(|steps| steps.add_scalar(1)),
            awake: self.awake.map(|awake| awake.bool_or(wakes)),
            mean: self.mean.map(|mean| (mean.inner().mul_scalar(0.9) + weight).autodiff()),
            ..self
        }
    }
}

struct Place {
    folder: tempfile::TempDir,
    shard: TokenShard,
    config: Config,
    device: Device,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tokens: Vec<u32> = (0..200).map(|i| (i * i + i / 7) % TOKENS as u32).collect();
        let shard = crate::data::shard_of(&folder.path().join("tokens.bin"), &tokens, TOKENS);
        let text = "[data]\nsources = [\"a\"]\n[model]\ncontext = 5\n\
                    [train]\nbatch_size = 2\naccumulation = 4\n";
        let config = parse(text, "test", &[]).unwrap();
        Self { folder, shard, config, device: Device::flex().autodiff() }
    }

    fn sampler(&self) -> BatchSampler {
        BatchSampler::new(self.shard.clone(), 1)
    }

    fn first(&self) -> Replica<Living> {
        let model = Living::new(&self.device);
        Replica::new(&self.config, model, self.sampler(), self.device.clone()).unwrap()
    }

    /// Losses and norms of some steps, to the bit.
    fn train(&self, replica: &mut Replica<Living>, steps: usize) -> Vec<u32> {
        let mut step = || replica.step(&self.config, 0.05).unwrap().into_data();
        (0..steps)
            .flat_map(|_| step().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>())
            .collect()
    }
}

#[test]
fn what_a_model_holds_beside_parameters_is_saved_and_resumed() {
    let place = Place::new();
    let mut whole = place.first();
    let numbers = place.train(&mut whole, 5);

    let mut first = place.first();
    let mut found = place.train(&mut first, 3);
    let store = CheckpointStore::open(place.folder.path().join("checkpoints"), 1).unwrap();
    let files = first.files(&first.record()).unwrap();
    let files = files.each_ref().map(|(name, bytes)| (*name, bytes.as_slice()));
    store.save(3, &files, None).unwrap();

    let checkpoint = store.latest().unwrap().checkpoint.unwrap();
    let sampler = BatchSampler::from_state(place.shard.clone(), first.position());
    let device = place.device.clone();
    let skeleton = Living::new(&device);
    let mut second =
        Replica::restored(&place.config, skeleton, sampler, device, &checkpoint).unwrap();
    assert_eq!(second.record(), first.record());
    found.extend(place.train(&mut second, 2));
    assert_eq!(found, numbers);
    assert_eq!(second.record(), whole.record());

    let record: BTreeMap<_, _> = second.record().into_iter().collect();
    assert_eq!(record["steps"], TensorData::from([5i64]));
    assert_eq!(record["awake"], TensorData::from([false, true, true, true, true, true]));
    assert!(record["mean"].iter::<f32>().all(|mean| mean != 0.0));
    // A buffer is no parameter after a resume either, and the optimizer keeps nothing for it.
    let model = second.model();
    assert!(model.weight.is_require_grad() && !model.mean.is_require_grad());
    let state: Vec<_> = second.optimizer.state(model).into_iter().map(|(name, _)| name).collect();
    assert_eq!(state, ["weight.first", "weight.second"]);
}

#[test]
fn a_record_of_other_types_is_refused() {
    let place = Place::new();
    let replica = place.first();
    let error = |change: &dyn Fn(&mut BTreeMap<String, TensorData>)| {
        let mut record = replica.record().into_iter().collect();
        change(&mut record);
        with_record("x", Living::new(&place.device), record).err().unwrap().to_string()
    };
    let line = error(&|record| drop(record.remove("steps")));
    assert_eq!(line, "x: no tensor for the parameter `steps`");
    let line = error(&|record| drop(record.insert("awake".into(), TensorData::from([0i64; 6]))));
    assert!(line.starts_with("x: `awake` is I64 [6], expected Bool"), "{line}");
    let line = error(&|record| drop(record.insert("steps".into(), TensorData::from([0i64; 2]))));
    assert_eq!(line, "x: `steps` is [2], expected [1]");
    let line = error(&|record| drop(record.insert("rest".into(), TensorData::from([0i64]))));
    assert_eq!(line, "x: `rest` is no parameter of the model");

    let bytes = to_safetensors("x", &replica.record()).unwrap();
    assert_eq!(from_safetensors("x", &bytes).unwrap(), replica.record().into_iter().collect());
    for dtype in [DType::F64, DType::I32, DType::Bool(BoolStore::U8)] {
        let data = TensorData::from([1f32]).convert_dtype(dtype);
        let refused = to_safetensors("x", &[("a".into(), data)]);
        assert!(matches!(refused, Err(TensorsError::Mismatch { .. })), "{dtype:?}");
    }
}

#[test]
fn a_rank_without_a_micro_batch_is_refused() {
    let place = Place::new();
    let ranks = place.config.train.accumulation + 1;
    let sampler = place.sampler().for_rank(Rank::new(0, ranks).unwrap());
    let (model, device) = (Living::new(&place.device), place.device.clone());
    let refused = Replica::new(&place.config, model, sampler, device).map(|_| ()).unwrap_err();
    let expected = format!("expected at least {ranks}");
    assert!(refused.to_string().contains(&expected), "{refused}");
}

#[test]
fn two_ranks_make_the_step_of_one() {
    // What a collective would do: the sum of the losses of all ranks.
    let place = Place::new();
    let one = place.first().step(&place.config, 0.05).unwrap().into_data();
    let rank = |index| {
        let rank = Rank::new(index, 2).unwrap();
        let (model, sampler) = (Living::new(&place.device), place.sampler().for_rank(rank));
        let device = place.device.clone();
        let mut replica = Replica::new(&place.config, model, sampler, device).unwrap();
        let step = replica.step(&place.config, 0.05).unwrap().into_data();
        (step.iter::<f32>().next().unwrap(), replica.position())
    };
    let (first, second) = (rank(0), rank(1));
    let loss = one.iter::<f32>().next().unwrap();
    assert!((first.0 + second.0 - loss).abs() < 1e-6 * loss, "{first:?} {second:?} {loss}");
    assert!(first.0 < loss && second.0 < loss);
    assert_eq!(first.1, second.1);
}

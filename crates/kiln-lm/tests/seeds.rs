//! Seeds in the MLPs of a model in training: they live their lives, nobody sees them before they are grafted, and a run that
//! is stopped in the middle of a life goes on bit for bit.
#![cfg(feature = "flex")]

mod common;

use common::{Memory, Place, checkpoint, one_at_a_time};
use kiln_lm::config::{ConfigError, parse};
use kiln_lm::run::{Kind, metrics, seeds};
use kiln_nn::kasmina::SeedState;
use std::fs;

/// Short lives: an epoch is two steps.
const SEEDS: &[&str] = &[
    "model.mlp=kasmina",
    "model.seeds=3",
    "model.seed_mlps=2",
    "seeds.epoch_steps=2",
    "seeds.first=2",
    "seeds.every=2",
    "seeds.most=3",
    "seeds.minimum_epochs=[2, 2, 1, 2, 2]",
    "seeds.ramp=2",
    "seeds.eval_batches=1",
    "seeds.reconstruction_loss=1e9",
    "seeds.total_improvement=-1",
    "train.sample_every=0",
    "train.checkpoint_every=0",
];

fn with(more: &[&'static str]) -> Vec<&'static str> {
    SEEDS.iter().chain(more).copied().collect()
}

#[test]
fn a_whole_life() {
    let _one = one_at_a_time();
    let place = Place::new();
    let mut trainer = place.new_trainer("run", &with(&["train.steps=60", "train.log_every=10"]));
    let mut memory = Memory::default();
    let summary = memory.run(&mut trainer).unwrap();
    assert!(summary.last_loss.unwrap() < 0.7 * summary.first_loss.unwrap());
    let ended: usize = summary.seeds.values().sum();
    assert_eq!(ended, 6, "three of each block: {:?}", summary.seeds);
    assert_eq!(summary.seeds.get(&SeedState::Dormant), Some(&3), "{:?}", summary.seeds);
    // One block after the other.
    let germinated: Vec<(usize, usize, u64)> = memory
        .seeds
        .iter()
        .filter(|of| of.to == SeedState::Germinated)
        .map(|of| (of.block, of.seed, of.step))
        .collect();
    assert_eq!(germinated, [(0, 0, 4), (1, 0, 8), (0, 1, 12)]);
    let first: Vec<SeedState> =
        memory.seeds.iter().filter(|of| (of.block, of.seed) == (0, 0)).map(|of| of.to).collect();
    use SeedState::*;
    let whole = [Germinated, Training, Grafting, Stabilization, Evaluating, FineTuning, Fossilized];
    assert_eq!(first, whole, "{:?}", memory.seeds);
    // It was judged by what the model is without it.
    let judged = memory.seeds.iter().find(|of| of.to == FineTuning).unwrap();
    assert!(judged.gain.unwrap() > 0.0);

    let records = metrics::read(&place.run("run").join("metrics.jsonl")).unwrap();
    let of_seeds: Vec<_> = records.iter().filter(|record| record.kind == Kind::Seeds).collect();
    assert_eq!(of_seeds.first().unwrap().step, 4);
    assert_eq!(of_seeds.last().unwrap().get("block0.seed0.state"), Some(7.0));
    assert_eq!(of_seeds.last().unwrap().get("block0.seed0.alpha"), Some(1.0));
    let svg = fs::read_to_string(place.run("run").join("seeds.svg")).unwrap();
    assert_eq!(svg, seeds::picture(&records, "run").unwrap());
}

/// Until the first seed is grafted loss and gradient norm are those of the model without seeds, bit for bit, also while
/// blueprints learn.
#[test]
fn nobody_sees_a_seed_in_training() {
    let _one = one_at_a_time();
    let place = Place::new();
    let steps = ["train.steps=14", "optimizer.clip_norm=0.05"];
    let mut seeded = Memory::default();
    seeded.run(&mut place.new_trainer("seeded", &with(&steps))).unwrap();
    let mut plain = Memory::default();
    let plainly = [&steps[..], &["train.sample_every=0", "train.checkpoint_every=0"]].concat();
    plain.run(&mut place.new_trainer("plain", &plainly)).unwrap();
    let grafted = seeded.seeds.iter().find(|of| of.to == SeedState::Grafting).unwrap().step;
    let trained = seeded.seeds.iter().find(|of| of.to == SeedState::Training).unwrap().step;
    assert!(trained < grafted && grafted < 14, "{:?}", seeded.seeds);
    let same = grafted as usize;
    assert_eq!(seeded.numbers()[..same], plain.numbers()[..same]);
    assert_ne!(seeded.numbers()[13], plain.numbers()[13]);
}

#[test]
fn a_resumed_life_goes_on_bit_for_bit() {
    let _one = one_at_a_time();
    let place = Place::new();
    let overrides = with(&["train.steps=24"]);
    let mut whole = Memory::default();
    whole.run(&mut place.new_trainer("whole", &overrides)).unwrap();
    // In the middle of a graft, and of an epoch.
    let mut part = Memory::stopping_after(13);
    part.run(&mut place.new_trainer("parts", &overrides)).unwrap();
    assert!(part.seeds.iter().any(|of| of.to == SeedState::Grafting), "{:?}", part.seeds);
    let mut rest = Memory::default();
    rest.run(&mut place.resume("parts", &overrides).unwrap()).unwrap();
    assert_eq!([part.seeds, rest.seeds].concat(), whole.seeds);
    assert_eq!([part.steps, rest.steps].concat().len(), 24);
    let of = |run: &str| checkpoint(&place.run(run), 24);
    assert!(of("whole") == of("parts"));
}

/// Under a shorter ramp a seed on its way goes on from its alpha, though its patience would be over.
#[test]
fn a_shorter_ramp_goes_on() {
    let _one = one_at_a_time();
    let place = Place::new();
    let overrides = |ramp: &'static str| with(&["seeds.most=1", "train.steps=60", ramp]);
    let mut part = Memory::stopping_after(41);
    part.run(&mut place.new_trainer("ramps", &overrides("seeds.ramp=40"))).unwrap();
    use SeedState::*;
    assert_eq!(part.seeds.last().map(|of| of.to), Some(Grafting), "{:?}", part.seeds);
    let mut rest = Memory::default();
    rest.run(&mut place.resume("ramps", &overrides("seeds.ramp=4")).unwrap()).unwrap();
    assert_eq!(rest.seeds.first().map(|of| of.to), Some(Stabilization), "{:?}", rest.seeds);
    let records = metrics::read(&place.run("ramps").join("metrics.jsonl")).unwrap();
    let alphas = records.iter().filter_map(|record| record.get("block0.seed0.alpha"));
    let alphas: Vec<f64> = alphas.collect();
    assert!(alphas.is_sorted(), "{alphas:?}");
}

/// A seed whose blueprint returns no numbers is taken out, and nobody sees it: the run is the one without it, bit for bit.
#[test]
fn a_broken_blueprint_is_taken_out() {
    let _one = one_at_a_time();
    let place = Place::new();
    let steps = ["train.steps=40", "train.checkpoint_every=10"];
    // Far beyond what a square of f32 holds.
    let groups = "optimizer.groups=[{parameters=\"*.seeds.mlps\", learning_rate_scale=1e30}]";
    let mut broken = Memory::default();
    let overrides = with(&[&steps[..], &["seeds.most=1", groups]].concat());
    broken.run(&mut place.new_trainer("broken", &overrides)).unwrap();
    let ways: Vec<SeedState> = broken.seeds.iter().map(|of| of.to).collect();
    use SeedState::*;
    assert_eq!(ways, [Germinated, Training, Culled], "{:?}", broken.seeds);
    let mut plain = Memory::default();
    let plainly = ["train.steps=40", "train.sample_every=0", "train.checkpoint_every=0"];
    plain.run(&mut place.new_trainer("plain", &plainly)).unwrap();
    assert_eq!(broken.numbers(), plain.numbers());
    // It can be saved, and gone on from.
    place.resume("broken", &overrides).unwrap();
}

/// A seed gets an MLP that no other has had.
#[test]
fn every_seed_has_an_mlp_of_its_own() {
    let _one = one_at_a_time();
    let place = Place::new();
    // All are taken out in training, those of a block before its next begins.
    let more = ["model.seed_mlps=3", "seeds.reconstruction_loss=0", "seeds.every=5"];
    let overrides = [&["seeds.most=0", "train.steps=60"], &more[..]].concat();
    let mut memory = Memory::default();
    memory.run(&mut place.new_trainer("culled", &with(&overrides))).unwrap();
    let germinated = memory.seeds.iter().filter(|of| of.to == SeedState::Germinated);
    let found: Vec<_> = germinated.map(|of| (of.block, of.seed, of.mlp)).collect();
    let expected = [(0, 0, Some(0)), (1, 0, Some(0)), (0, 1, Some(1)), (1, 1, Some(1))];
    assert_eq!(found[..4], expected, "{found:?}");
    // Which gate it was, in its own words.
    let culled = memory.seeds.iter().find(|of| of.to == SeedState::Culled).unwrap();
    let shut = culled.shut.as_ref().unwrap().to_string();
    let begins = "kasmina: seed 0 cannot become Grafting: reconstruction_loss is ";
    assert!(shut.starts_with(begins) && shut.ends_with("expected at most 0"), "{shut}");
    assert!(memory.seeds.iter().all(|of| of.to == SeedState::Culled || of.shut.is_none()));
}

/// Seeds of one MLP do not live at the same time; one that learns nothing is taken out, and the next one has its MLP.
#[test]
fn an_mlp_is_one_seeds_own() {
    let _one = one_at_a_time();
    let place = Place::new();
    let overrides = with(&["model.seeds=2", "model.seed_mlps=1", "seeds.most=0", "train.steps=40"]);
    let ways = |name: &str, more: &[&'static str]| {
        let mut memory = Memory::default();
        memory.run(&mut place.new_trainer(name, &[&overrides[..], more].concat())).unwrap();
        memory.seeds.into_iter().map(|of| (of.block, of.seed, of.to)).collect::<Vec<_>>()
    };
    let fossil = ways("fossil", &[]);
    assert!(fossil.contains(&(0, 0, SeedState::Fossilized)), "{fossil:?}");
    assert!(fossil.iter().all(|(_, seed, _)| *seed == 0), "{fossil:?}");
    let culled = ways("culled", &["seeds.reconstruction_loss=0"]);
    assert!(culled.contains(&(0, 0, SeedState::Culled)), "{culled:?}");
    assert!(culled.contains(&(0, 1, SeedState::Training)), "{culled:?}");
    // By gains and by norms.
    let adaptive = ways("adaptive", &["seeds.schedule=adaptive"]);
    assert!(adaptive.contains(&(0, 0, SeedState::Evaluating)), "{adaptive:?}");
}

#[test]
fn configurations_that_do_not_fit_are_refused() {
    let refused = |overrides: &[&str]| {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        match parse("[data]\nsources = [\"a.txt\"]\n", "x.toml", &overrides) {
            Err(ConfigError::Invalid(violations)) => violations[0].to_string(),
            other => panic!("{other:?}"),
        }
    };
    for (overrides, expected) in [
        (
            &["model.mlp=kasmina", "model.width=8", "model.heads=1", "model.seeds=9"][..],
            "model.seeds is 9, must be from 1 to model.width (8)",
        ),
        (&["model.mlp=kasmina", "model.seed_mlps=0"], "model.seed_mlps is 0, must be from 1"),
        (
            &["model.mlp=kasmina", "model.seeds=2", "model.seed_mlps=3"],
            "model.seed_mlps is 3, must be from 1 to model.seeds (2)",
        ),
        (&["seeds.epoch_steps=0"], "seeds.epoch_steps is 0, must be 1 or more"),
        (&["seeds.final_stability=1.5"], "seeds.final_stability is 1.5, must be from 0 to 1"),
        (&["seeds.reconstruction_loss=nan"], "seeds.reconstruction_loss is NaN, must be 0 or more"),
    ] {
        let found = refused(overrides);
        assert!(found.contains(expected), "{found}");
    }
}

//! Seeds: every transition and the schedules of alpha, and a layer through a whole life, on the CPU and where there are
//! kernels.
#![cfg(feature = "flex")]

use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use kiln_nn::kasmina::{Schedule, SeedMetrics, Step, TransitionError, following};
use kiln_nn::prelude::*;

use SeedState::*;

/// The spec's table.
const WAYS: [(SeedState, &[SeedState]); 11] = [
    (Dormant, &[Germinated]),
    (Germinated, &[Training, Cancelled]),
    (Training, &[Grafting, Culled, Cancelled]),
    (Grafting, &[Stabilization, RolledBack]),
    (Stabilization, &[Evaluating, RolledBack]),
    (Evaluating, &[FineTuning, Culled, RolledBack]),
    (FineTuning, &[Fossilized, Culled, RolledBack]),
    (Fossilized, &[]),
    (Culled, &[]),
    (Cancelled, &[]),
    (RolledBack, &[]),
];

/// With which every gate on the way to Fossilized opens.
const GOOD: SeedMetrics = SeedMetrics {
    reconstruction_loss: Some(0.01),
    performance_delta: Some(0.001),
    stability: Some(0.95),
    error_rate: Some(0.0),
    total_improvement: Some(0.01),
    weight_norm: None,
    loss_variance: None,
    gradient_norm: None,
    accuracy_variance: None,
};

const WORSE: SeedMetrics = SeedMetrics { performance_delta: Some(-0.06), ..GOOD };

fn wait(lifecycle: &mut Lifecycle, epochs: usize) {
    for _ in 0..epochs {
        lifecycle.epoch(&vec![GOOD; lifecycle.lives().len()]);
    }
}

/// One seed in this state, as long in it as it has to be.
fn seed_in(state: SeedState) -> Lifecycle {
    let mut lifecycle = Lifecycle::new(1, LifecycleConfig::new());
    let way: &[SeedState] = match state {
        Dormant => &[],
        Germinated => &[Germinated],
        Cancelled => &[Germinated, Cancelled],
        Culled => &[Germinated, Training, Culled],
        RolledBack => &[Germinated, Training, Grafting, RolledBack],
        _ => &[Germinated, Training, Grafting, Stabilization, Evaluating, FineTuning, Fossilized],
    };
    for to in way {
        match to {
            Germinated => lifecycle.germinate(0, 0, Blend::Lerp).unwrap(),
            to => lifecycle.transition(0, *to, &GOOD).unwrap(),
        }
        wait(&mut lifecycle, 100);
        if *to == state {
            break;
        }
    }
    assert_eq!(lifecycle.lives()[0].seed().state, state);
    lifecycle
}

/// All 121 pairs: those of the table happen, all others are refused and change nothing.
#[test]
fn every_transition() {
    for (from, ways) in WAYS {
        assert_eq!(following(from), ways);
        for to in SeedState::ALL {
            let mut lifecycle = seed_in(from);
            let before = lifecycle.clone();
            let metrics = if (from, to) == (Evaluating, Culled) { WORSE } else { GOOD };
            let done = match (from, to) {
                (Dormant, Germinated) => lifecycle.germinate(0, 3, Blend::Add),
                _ => lifecycle.transition(0, to, &metrics),
            };
            if ways.contains(&to) {
                assert_eq!(done, Ok(()), "{from:?} to {to:?}");
                let life = &lifecycle.lives()[0];
                assert_eq!((life.seed().state, life.parent(), life.epochs()), (to, from, 0));
                let epochs = before.lives()[0].epochs();
                assert_eq!(life.history().last(), Some(&Step { from, to, epochs }));
            } else {
                let error = done.expect_err("a refusal");
                let refused = matches!(&error, TransitionError::NoWay { seed: 0, .. });
                assert!(refused, "{from:?} to {to:?}: {error}");
                assert_eq!(lifecycle, before);
            }
        }
    }
    let germinated = seed_in(Germinated).germinate(0, 0, Blend::Lerp).unwrap_err().to_string();
    assert_eq!(
        germinated,
        "kasmina: seed 0 cannot go from Germinated to Germinated, expected Training or Cancelled"
    );
    let ended = seed_in(Culled).transition(0, Dormant, &GOOD).unwrap_err().to_string();
    assert!(ended.ends_with("expected nothing: its life has ended"), "{ended}");
    let nobody = seed_in(Culled).transition(1, Dormant, &GOOD).unwrap_err().to_string();
    assert_eq!(nobody, "kasmina: seed 1, expected 0 to 0");
}

#[test]
fn minimum_epochs() {
    let least = [
        (Training, Grafting, 100),
        (Grafting, Stabilization, 50),
        (Stabilization, Evaluating, 20),
        (Evaluating, FineTuning, 30),
        (FineTuning, Fossilized, 50),
    ];
    for (from, to, minimum) in least {
        let before = WAYS.iter().find(|(_, ways)| ways.contains(&from)).unwrap().0;
        let mut lifecycle = seed_in(before);
        lifecycle.transition(0, from, &GOOD).unwrap();
        wait(&mut lifecycle, minimum - 1);
        let error = lifecycle.transition(0, to, &GOOD).unwrap_err();
        let epochs = minimum - 1;
        assert_eq!(error, TransitionError::TooEarly { seed: 0, state: from, epochs, minimum });
        if following(from).contains(&RolledBack) {
            lifecycle.clone().transition(0, RolledBack, &GOOD).unwrap();
        }
        wait(&mut lifecycle, 1);
        lifecycle.transition(0, to, &GOOD).unwrap();
    }
}

/// Each condition at its limit, just beyond, not a number and not measured.
#[test]
fn gates() {
    type Set = fn(&mut SeedMetrics, Option<f32>);
    let cases: [(SeedState, SeedState, &str, Set, f32, f32); 5] = [
        (Training, Grafting, "reconstruction_loss", |m, x| m.reconstruction_loss = x, 0.01, 0.0101),
        (Evaluating, FineTuning, "performance_delta", |m, x| m.performance_delta = x, 1e-9, 0.0),
        (Evaluating, FineTuning, "stability", |m, x| m.stability = x, 0.8, 0.7999),
        (FineTuning, Fossilized, "total_improvement", |m, x| m.total_improvement = x, 0.01, 0.0099),
        (FineTuning, Fossilized, "stability", |m, x| m.stability = x, 0.95, 0.9499),
    ];
    for (from, to, name, set, good, bad) in cases {
        for (value, opens) in
            [(Some(good), true), (Some(bad), false), (Some(f32::NAN), false), (None, false)]
        {
            let mut metrics = GOOD;
            set(&mut metrics, value);
            let mut lifecycle = seed_in(from);
            match lifecycle.transition(0, to, &metrics) {
                Ok(()) => assert!(opens, "{name} = {value:?}"),
                Err(TransitionError::Gate { metric, .. }) => {
                    assert!(!opens && metric == name, "{name} = {value:?}");
                    assert_eq!(lifecycle, seed_in(from));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    let culled = |metrics: &SeedMetrics, errors: usize| {
        let mut lifecycle = seed_in(Evaluating);
        for _ in 0..errors {
            lifecycle.error(0).unwrap();
        }
        lifecycle.transition(0, Culled, metrics)
    };
    assert_eq!(culled(&WORSE, 0), Ok(()));
    assert_eq!(culled(&SeedMetrics { error_rate: Some(0.11), ..GOOD }, 0), Ok(()));
    assert_eq!(culled(&GOOD, 6), Ok(()));
    let kept =
        culled(&SeedMetrics { performance_delta: Some(-0.05), error_rate: Some(0.1), ..GOOD }, 5);
    assert_eq!(
        kept.unwrap_err().to_string(),
        "kasmina: seed 0 cannot become Culled: performance_delta is -0.05, expected below -0.05, an error_rate above 0.1 or \
         more than 5 errors"
    );
}

#[test]
fn errors_ask_for_the_end() {
    for (state, end) in [
        (Dormant, None),
        (Germinated, Some(Cancelled)),
        (Training, Some(Culled)),
        (Grafting, Some(RolledBack)),
        (Stabilization, Some(RolledBack)),
        (Evaluating, Some(Culled)),
        (FineTuning, Some(Culled)),
        (Fossilized, None),
    ] {
        let mut lifecycle = seed_in(state);
        let asked: Vec<_> = (0..6).map(|_| lifecycle.error(0).unwrap()).collect();
        assert_eq!(asked, [None, None, None, None, end, end], "{state:?}");
        assert_eq!(lifecycle.lives()[0].errors(), 6);
    }
}

#[test]
fn an_epoch_is_some_steps() {
    let mut lifecycle = Lifecycle::new(1, LifecycleConfig::new().with_epoch_steps(3));
    let passed: Vec<bool> = (0..7).map(|_| lifecycle.step()).collect();
    assert_eq!(passed, [false, false, true, false, false, true, false]);
}

/// Alphas of a seed over the epochs of its grafting.
fn alphas(schedule: Schedule, metrics: &[SeedMetrics]) -> Vec<f32> {
    let config = LifecycleConfig::new().with_schedule(schedule).with_ramp(10);
    let mut lifecycle = Lifecycle::new(1, config.with_minimum_epochs([0; 5]));
    lifecycle.germinate(0, 0, Blend::Lerp).unwrap();
    lifecycle.transition(0, Training, &GOOD).unwrap();
    lifecycle.transition(0, Grafting, &GOOD).unwrap();
    assert_eq!(lifecycle.lives()[0].seed().alpha, 0.0);
    let epoch = |metrics: &SeedMetrics| {
        assert!(lifecycle.epoch(&[*metrics]).is_empty());
        lifecycle.lives()[0].seed().alpha
    };
    metrics.iter().map(epoch).collect()
}

fn near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let off = found.iter().zip(expected).any(|(a, b)| (a - b).abs() > 1e-6);
    assert!(!off, "{found:?}, expected {expected:?}");
}

#[test]
fn schedules() {
    let calm = SeedMetrics::default();
    let linear: Vec<f32> = (1..=12).map(|i| (i as f32 / 10.0).min(1.0)).collect();
    for schedule in [
        Schedule::Linear,
        Schedule::DriftControlled,
        Schedule::Momentum,
        Schedule::Adaptive,
        Schedule::Stability,
    ] {
        near(&alphas(schedule, &[calm; 12]), &linear);
    }
    let norm = |weight_norm| SeedMetrics { weight_norm: Some(weight_norm), ..calm };
    // 2 % off the mean holds alpha for ten epochs.
    let mut drifting = vec![norm(1.0); 14];
    drifting[2] = norm(1.02);
    let held: Vec<f32> = [vec![0.1], vec![0.2; 11], vec![0.3, 0.4]].concat();
    near(&alphas(Schedule::DriftControlled, &drifting), &held);
    // Gains add a hundredth of themselves and a tenth of what was added, and alpha never falls.
    let gains = |delta| SeedMetrics { performance_delta: Some(delta), ..calm };
    let found = alphas(Schedule::Momentum, &[gains(2.0), gains(0.0), gains(-30.0), calm]);
    near(&found, &[0.12, 0.202, 0.202, 0.37002]);
    // Gains count until there is half of the drift, which holds nothing yet.
    let mut both = vec![gains(2.0); 4];
    (both[1].weight_norm, both[3].weight_norm) = (Some(1.0), Some(1.006));
    near(&alphas(Schedule::Adaptive, &both), &[0.12, 0.222, 0.3222, 0.4]);
    // Looks at epochs 5, 10, 15: each halves the way, the third puts back what was calm last, nothing.
    let wild = SeedMetrics { loss_variance: Some(0.1), ..calm };
    let found = alphas(Schedule::Stability, &[wild; 16]);
    let expected = [0.1, 0.2, 0.3, 0.4, 0.2, 0.3, 0.4, 0.5, 0.6, 0.3, 0.4, 0.5, 0.6, 0.7, 0.0, 0.1];
    near(&found, &expected);
    // A calm look is remembered.
    let mut late = vec![calm; 5];
    late.extend([wild; 15]);
    assert_eq!(alphas(Schedule::Stability, &late)[19], 0.4);
}

#[test]
fn failing_grafts_are_named() {
    let mut lifecycle = seed_in(Training);
    lifecycle.transition(0, Grafting, &GOOD).unwrap();
    let failing = SeedMetrics { error_rate: Some(0.51), ..GOOD };
    assert_eq!(lifecycle.epoch(&[failing]), [0]);
    assert_eq!(lifecycle.lives()[0].seed().alpha, 0.0);
    assert!(lifecycle.epoch(&[GOOD]).is_empty());
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn values<const D: usize>(of: Tensor<D>) -> Vec<f32> {
    of.into_data().iter::<f32>().collect()
}

/// The CPU, and the device that runs kernels.
fn devices() -> Vec<Device> {
    let kernels = kiln_test::device(kiln_ops::device::open).map(|opened| opened.device);
    std::iter::once(Device::flex()).chain(kernels).collect()
}

fn layer(device: &Device) -> KasminaLayer {
    let rules = LifecycleConfig::new().with_minimum_epochs([0; 5]).with_ramp(4);
    KasminaLayerConfig::new(10, 3).with_blueprints(2).with_lifecycle(rules).init(device)
}

/// A seed that trains changes neither what the layer returns nor a gradient of the host, bit for bit, and learns.
#[test]
fn training_is_seen_by_nobody() {
    for device in devices() {
        training_is_seen_by_nobody_on(device.autodiff());
    }
}

fn training_is_seen_by_nobody_on(device: Device) {
    let mut layer = layer(&device);
    let x = random([6, 10], &device);
    let weight = random([10, 10], &device).require_grad();
    let run = |layer: &KasminaLayer| {
        let h = x.clone().matmul(weight.clone());
        let y = layer.forward(h.clone(), |h| h);
        let loss = layer.reconstruction(h);
        let losses = values(loss.clone());
        let grads = (y.clone().powi_scalar(2).sum() + loss.sum()).backward();
        let learned = layer.blueprints.grad(&grads).map(values);
        (values(y), values(weight.grad(&grads).unwrap()), losses, learned)
    };
    let (y, gradient, losses, _) = run(&layer);
    assert_eq!(losses, [0.0; 3]);
    let mut lifecycle = layer.lifecycle().unwrap();
    lifecycle.germinate(1, 1, Blend::Lerp).unwrap();
    lifecycle.transition(1, Training, &GOOD).unwrap();
    layer.follow(&lifecycle).unwrap();
    let (with, gradient_with, losses, learned) = run(&layer);
    assert_eq!((y, gradient), (with, gradient_with));
    assert!(losses[1] > 0.0 && losses[0] == 0.0 && losses[2] == 0.0, "{losses:?}");
    let learned = learned.unwrap();
    // Row 1 at the features of seed 1, which are 4 to 6.
    for (at, gradient) in learned.iter().enumerate() {
        assert_eq!(*gradient != 0.0, (14..17).contains(&at), "{learned:?}");
    }
}

/// One that trains an MLP either; it learns f(x) = x, and two seeds of one MLP add up.
#[test]
fn training_of_an_mlp_is_seen_by_nobody() {
    for device in devices() {
        training_of_an_mlp_is_seen_by_nobody_on(device.autodiff());
    }
}

fn training_of_an_mlp_is_seen_by_nobody_on(device: Device) {
    let rules = LifecycleConfig::new().with_minimum_epochs([0; 5]);
    let config = KasminaLayerConfig::new(10, 3).with_mlps(2).with_lifecycle(rules);
    let mut layer = config.init(&device);
    assert_eq!(layer.counts(), BlueprintCounts { rows: 1, mlps: 2 });
    assert_eq!(config.parameters(), (10 + 2 * 19 * 4 + 7 * 3) as f64);
    let x = random([6, 10], &device);
    let weight = random([10, 10], &device).require_grad();
    let mut lifecycle = layer.lifecycle().unwrap();
    let run = |layer: &KasminaLayer| {
        let h = x.clone().matmul(weight.clone());
        let y = layer.forward(h.clone(), |h| h);
        let loss = layer.reconstruction(h);
        let losses = values(loss.clone());
        let grads = (y.clone().powi_scalar(2).sum() + loss.sum()).backward();
        let learned = layer.mlps.as_ref().unwrap().grad(&grads).map(values);
        (values(y), values(weight.grad(&grads).unwrap()), losses, learned.unwrap())
    };
    let (y, gradient, ..) = run(&layer);
    lifecycle.germinate(1, 1, Blend::Mlp).unwrap();
    lifecycle.transition(1, Training, &GOOD).unwrap();
    layer.follow(&lifecycle).unwrap();
    let (with, gradient_with, losses, learned) = run(&layer);
    assert_eq!((&y, &gradient), (&with, &gradient_with));
    assert!(losses[1] > 0.0 && losses[0] == 0.0 && losses[2] == 0.0, "{losses:?}");
    let (first, second) = learned.split_at(learned.len() / 2);
    assert!(first.iter().all(|g| *g == 0.0) && second.iter().any(|g| *g != 0.0));
    // Grafted whole it is seen, and what the layer is without it is what it was.
    lifecycle.transition(1, Grafting, &GOOD).unwrap();
    wait(&mut lifecycle, 50);
    layer.follow(&lifecycle).unwrap();
    assert_eq!(layer.lifecycle().unwrap(), lifecycle);
    let (grafted, ..) = run(&layer);
    let changed = |at: usize| (4..7).contains(&(at % 10));
    assert!((0..60).all(|at| (grafted[at] != y[at]) == changed(at)));
    assert_eq!(run(&layer.without(1).unwrap()).0, y);
    assert_eq!(run(&layer).0, grafted);
    let error = layer.without(3).unwrap_err().to_string();
    assert_eq!(error, "kasmina: `seed` of seed 3 is 3, expected 0 to 2");
    // An MLP that is not there.
    let mut other = Lifecycle::new(3, LifecycleConfig::new());
    other.germinate(0, 2, Blend::Mlp).unwrap();
    other.transition(0, Training, &GOOD).unwrap();
    let error = layer.follow(&other).unwrap_err().to_string();
    assert_eq!(error, "kasmina: `blueprint_id` of seed 0 is 2, expected 0 to 1");
    assert_eq!(run(&layer).0, grafted);
}

/// In the middle of a graft the record holds all: what goes on from it goes on as the layer itself does, bit for bit.
#[test]
fn a_record_goes_on() {
    use Schedule::*;
    for device in devices() {
        for schedule in [Linear, DriftControlled, Momentum, Adaptive, Stability] {
            a_record_goes_on_with(schedule, &device);
        }
    }
}

fn a_record_goes_on_with(schedule: Schedule, device: &Device) {
    let x = random([6, 10], device);
    let rules = LifecycleConfig::new().with_minimum_epochs([0; 5]).with_ramp(40);
    let config = KasminaLayerConfig::new(10, 3).with_blueprints(2);
    let config = config.with_lifecycle(rules.with_schedule(schedule));
    let mut first = config.init(device);
    // With which every schedule has something to remember.
    let wait = |lifecycle: &mut Lifecycle, epochs: usize| {
        for epoch in 0..epochs {
            let metrics = SeedMetrics {
                weight_norm: Some(1.0 + 0.02 * epoch as f32),
                performance_delta: Some(0.02),
                loss_variance: Some(if epoch < 6 { 0.0 } else { 1.0 }),
                ..GOOD
            };
            lifecycle.epoch(&[metrics; 3]);
        }
    };
    let mut lifecycle = first.lifecycle().unwrap();
    for (seed, blend) in [(0, Blend::Add), (2, Blend::Mixed)] {
        lifecycle.germinate(seed, seed / 2, blend).unwrap();
        lifecycle.transition(seed, Training, &GOOD).unwrap();
        lifecycle.transition(seed, Grafting, &GOOD).unwrap();
    }
    lifecycle.error(2).unwrap();
    wait(&mut lifecycle, 12);
    lifecycle.step();
    first.follow(&lifecycle).unwrap();
    assert_eq!(first.lifecycle().unwrap(), lifecycle);
    let mut second = config.init(device).load_record(first.clone().into_record());
    assert_eq!(second.lifecycle().unwrap(), lifecycle);
    for epoch in 0..3 {
        let mut ys = vec![];
        for layer in [&mut first, &mut second] {
            let mut lifecycle = layer.lifecycle().unwrap();
            wait(&mut lifecycle, 1);
            if epoch == 1 {
                lifecycle.transition(2, Stabilization, &GOOD).unwrap();
            }
            layer.follow(&lifecycle).unwrap();
            ys.push((values(layer.forward(x.clone(), |x| x)), lifecycle));
        }
        assert!(ys[0] == ys[1] && ys[0].0 != values(x.clone()));
    }
}

/// What has not been measured is calm, what is not a number is not.
#[test]
fn not_a_number_is_no_good_news() {
    let broken = SeedMetrics { weight_norm: Some(f32::NAN), ..SeedMetrics::default() };
    near(&alphas(Schedule::DriftControlled, &[broken; 3]), &[0.0; 3]);
    near(&alphas(Schedule::Adaptive, &[broken; 3]), &[0.0; 3]);
    let mut lifecycle = seed_in(Training);
    lifecycle.transition(0, Grafting, &GOOD).unwrap();
    assert_eq!(lifecycle.epoch(&[SeedMetrics { error_rate: Some(f32::NAN), ..GOOD }]), [0]);
}

/// The way so far is no longer than the ramp: a look that is not calm halves alpha, however late.
#[test]
fn late_looks_count() {
    let wild = SeedMetrics { gradient_norm: Some(10.0), ..SeedMetrics::default() };
    let mut metrics = vec![SeedMetrics::default(); 34];
    metrics.push(wild);
    assert_eq!(alphas(Schedule::Stability, &metrics)[34], 0.5);
}

#[test]
fn ends_wait_too_and_blueprints_are_needed() {
    let mut lifecycle = seed_in(Germinated);
    lifecycle.transition(0, Training, &GOOD).unwrap();
    for end in [Culled, Cancelled] {
        let error = lifecycle.transition(0, end, &GOOD).unwrap_err();
        assert!(matches!(error, TransitionError::TooEarly { minimum: 100, .. }), "{error}");
    }
    let error = Lifecycle::new(1, LifecycleConfig::new()).transition(0, Germinated, &GOOD);
    assert_eq!(error, Err(TransitionError::NoBlueprint { seed: 0, to: Germinated }));
}

#[test]
fn telemetry_of_the_last_forwards() {
    for device in devices() {
        telemetry_of_the_last_forwards_on(device);
    }
}

fn telemetry_of_the_last_forwards_on(device: Device) {
    let layer = KasminaLayerConfig::new(4, 2).with_forwards(3).init(&device);
    for i in 0..5 {
        layer.forward(Tensor::<2>::full([2, 4], i as f32, &device), |x| x);
    }
    let means: Vec<f32> = layer.telemetry().into_iter().flat_map(|of| values(of.mean)).collect();
    assert_eq!(means, [2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
}

#[test]
fn wrong_calls() {
    let device = Device::flex();
    let mut layer = layer(&device);
    let mut lifecycle = layer.lifecycle().unwrap();
    lifecycle.germinate(1, 2, Blend::Lerp).unwrap();
    lifecycle.transition(1, Training, &GOOD).unwrap();
    lifecycle.transition(1, Grafting, &GOOD).unwrap();
    let error = layer.follow(&lifecycle).unwrap_err().to_string();
    assert_eq!(error, "kasmina: `blueprint_id` of seed 1 is 2, expected 0 to 1");
    // One in training reads its blueprint too.
    let mut training = layer.lifecycle().unwrap();
    training.germinate(1, 7, Blend::Lerp).unwrap();
    let error = layer.follow(&training).unwrap_err().to_string();
    assert_eq!(error, "kasmina: `blueprint_id` of seed 1 is 7, expected 0 to 1");
    assert_eq!(layer.lifecycle().unwrap().lives()[1].seed(), Seed::default());
    assert!(format!("{layer}").contains("seeds: 3"));
}

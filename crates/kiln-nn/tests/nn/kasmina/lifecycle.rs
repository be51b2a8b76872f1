//! What a seed may do next, and when.

use super::{GOOD, wait};
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

const WORSE: SeedMetrics = SeedMetrics { performance_delta: Some(-0.06), ..GOOD };

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

/// A seed that is to be grafted under this schedule, over ten epochs.
fn grafting(schedule: Schedule) -> Lifecycle {
    let config = LifecycleConfig::new().with_schedule(schedule).with_ramp(10);
    let mut lifecycle = Lifecycle::new(1, config.with_minimum_epochs([0; 5]));
    lifecycle.germinate(0, 0, Blend::Lerp).unwrap();
    lifecycle.transition(0, Training, &GOOD).unwrap();
    lifecycle.transition(0, Grafting, &GOOD).unwrap();
    assert_eq!(lifecycle.lives()[0].seed().alpha, 0.0);
    lifecycle
}

/// Its alpha after one more epoch.
fn next(lifecycle: &mut Lifecycle, metrics: &SeedMetrics) -> f32 {
    assert!(lifecycle.epoch(&[*metrics]).is_empty());
    lifecycle.lives()[0].seed().alpha
}

/// Alphas of a seed over the epochs of its grafting.
fn alphas(schedule: Schedule, metrics: &[SeedMetrics]) -> Vec<f32> {
    let mut lifecycle = grafting(schedule);
    metrics.iter().map(|metrics| next(&mut lifecycle, metrics)).collect()
}

const SCHEDULES: [Schedule; 5] = [
    Schedule::Linear,
    Schedule::DriftControlled,
    Schedule::Momentum,
    Schedule::Adaptive,
    Schedule::Stability,
];

fn near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let off = found.iter().zip(expected).any(|(a, b)| (a - b).abs() > 1e-6);
    assert!(!off, "{found:?}, expected {expected:?}");
}

#[test]
fn schedules() {
    let calm = SeedMetrics::default();
    let linear: Vec<f32> = (1..=12).map(|i| (i as f32 / 10.0).min(1.0)).collect();
    for schedule in SCHEDULES {
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

/// A seed on its way goes on from its alpha under a longer ramp and under a shorter one.
#[test]
fn another_ramp_keeps_the_way_so_far() {
    let calm = SeedMetrics::default();
    for schedule in SCHEDULES {
        for (ramp, expected) in [(20, 0.25), (100, 0.21), (2, 0.7), (1, 1.0), (10, 0.3)] {
            let mut lifecycle = grafting(schedule);
            next(&mut lifecycle, &calm);
            near(&[next(&mut lifecycle, &calm)], &[0.2]);
            let rules = lifecycle.config().clone().with_ramp(ramp);
            let mut lifecycle = lifecycle.with_config(rules);
            near(&[next(&mut lifecycle, &calm)], &[expected]);
        }
    }
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

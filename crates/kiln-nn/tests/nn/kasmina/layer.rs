//! The layer, in training and blended in.

use super::{GOOD, wait};
use burn::module::Module;
use burn::tensor::{Device, Distribution, Gradients, Tensor};
use kiln_nn::kasmina::{Schedule, SeedMetrics};
use kiln_nn::prelude::*;
use kiln_ops::device;

use SeedState::*;

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn values<const D: usize>(of: Tensor<D>) -> Vec<f32> {
    of.into_data().iter::<f32>().collect()
}

/// The CPU, and the device that runs kernels.
fn devices() -> Vec<Device> {
    let kernels = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
    let kernels = kernels.map(|opened| opened.device);
    std::iter::once(Device::flex()).chain(kernels).collect()
}

fn layer(device: &Device) -> KasminaLayer {
    let rules = LifecycleConfig::new().with_minimum_epochs([0; 5]).with_ramp(4);
    KasminaLayerConfig::new(10, 3).with_blueprints(2).with_lifecycle(rules).init(device)
}

/// What the layer returns, the gradient of a host's weight, and the reconstruction losses.
type Found = (Vec<f32>, Vec<f32>, Vec<f32>);

/// Those of a layer behind x·weight, and all gradients.
fn trained(layer: &KasminaLayer, x: &Tensor<2>, weight: &Tensor<2>) -> (Found, Gradients) {
    let h = x.clone().matmul(weight.clone());
    let y = layer.forward(h.clone(), |h| h);
    let loss = layer.reconstruction(h);
    let losses = values(loss.clone());
    let grads = (y.clone().powi_scalar(2).sum() + loss.sum()).backward();
    ((values(y), values(weight.grad(&grads).unwrap()), losses), grads)
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
        let (found, grads) = trained(layer, &x, &weight);
        (found, layer.blueprints.grad(&grads).map(values))
    };
    let ((y, gradient, losses), _) = run(&layer);
    assert_eq!(losses, [0.0; 3]);
    let mut lifecycle = layer.lifecycle().unwrap();
    lifecycle.germinate(1, 1, Blend::Lerp).unwrap();
    lifecycle.transition(1, Training, &GOOD).unwrap();
    layer.follow(&lifecycle).unwrap();
    let ((with, gradient_with, losses), learned) = run(&layer);
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
    assert_eq!(config.parameters(), (10 + 2 * 19 * 4 + 8 * 3) as f64);
    let x = random([6, 10], &device);
    let weight = random([10, 10], &device).require_grad();
    let mut lifecycle = layer.lifecycle().unwrap();
    let run = |layer: &KasminaLayer| {
        let (found, grads) = trained(layer, &x, &weight);
        (found, layer.mlps.as_ref().unwrap().grad(&grads).map(values).unwrap())
    };
    let ((y, gradient, _), _) = run(&layer);
    lifecycle.germinate(1, 1, Blend::Mlp).unwrap();
    lifecycle.transition(1, Training, &GOOD).unwrap();
    layer.follow(&lifecycle).unwrap();
    let ((with, gradient_with, losses), learned) = run(&layer);
    assert_eq!((&y, &gradient), (&with, &gradient_with));
    assert!(losses[1] > 0.0 && losses[0] == 0.0 && losses[2] == 0.0, "{losses:?}");
    let (first, second) = learned.split_at(learned.len() / 2);
    assert!(first.iter().all(|g| *g == 0.0) && second.iter().any(|g| *g != 0.0));
    // Grafted whole it is seen, and what the layer is without it is what it was.
    lifecycle.transition(1, Grafting, &GOOD).unwrap();
    wait(&mut lifecycle, 50);
    layer.follow(&lifecycle).unwrap();
    assert_eq!(layer.lifecycle().unwrap(), lifecycle);
    let ((grafted, ..), _) = run(&layer);
    let changed = |at: usize| (4..7).contains(&(at % 10));
    assert!((0..60).all(|at| (grafted[at] != y[at]) == changed(at)));
    assert_eq!(run(&layer.without(1).unwrap()).0.0, y);
    assert_eq!(run(&layer).0.0, grafted);
    let error = layer.without(3).unwrap_err().to_string();
    assert_eq!(error, "kasmina: `seed` of seed 3 is 3, expected 0 to 2");
    // An MLP that is not there.
    let mut other = Lifecycle::new(3, LifecycleConfig::new());
    other.germinate(0, 2, Blend::Mlp).unwrap();
    other.transition(0, Training, &GOOD).unwrap();
    let error = layer.follow(&other).unwrap_err().to_string();
    assert_eq!(error, "kasmina: `blueprint_id` of seed 0 is 2, expected 0 to 1");
    assert_eq!(run(&layer).0.0, grafted);
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

//! Training on a device with kernels: fused attention learns what the reference learns, step by step.

// It has what other tests need too.
#[allow(dead_code)]
mod common;

use burn::tensor::{DType, Device};
use common::{Memory, Place, dataset};
use kiln_lm::config::Precision;
use kiln_lm::train::Trainer;
use kiln_ops::policy::{self, Implementation, Policy};

/// The loss of every step.
fn curve(place: &Place, device: &Device, attention: Implementation) -> Vec<f32> {
    let ops = [("attention".to_string(), attention)].into();
    policy::set(Policy { ops, ..Policy::default() });
    let overrides = [
        "model.context=80",
        "model.layers=1",
        "model.dropout=0",
        "model.qk_norm=true",
        "optimizer.learning_rate=1e-2",
        "train.steps=20",
        "train.accumulation=1",
        "train.eval_every=0",
        "train.sample_every=0",
        "train.checkpoint_every=0",
    ];
    let config = place.config(&attention.to_string(), &overrides);
    let data = dataset(&config);
    let mut trainer = Trainer::new(config, data, device).unwrap();
    let mut memory = Memory::default();
    memory.run(&mut trainer).unwrap();
    memory.steps.iter().map(|step| step.loss).collect()
}

#[test]
fn fused_attention_trains_as_the_reference_does() {
    let name = std::env::var("KILN_DEVICE").unwrap_or_else(|_| "wgpu".into());
    let device = match kiln_ops::device::open(&name) {
        Ok(opened) => opened.device,
        Err(error) => return eprintln!("SKIPPED on {name}: {error}"),
    };
    if !policy::is_cube(&device) {
        return eprintln!("SKIPPED: {name} has no kernels");
    }
    let place = Place::new();
    let fused = curve(&place, &device, Implementation::Fused);
    let reference = curve(&place, &device, Implementation::Reference);
    assert_eq!((fused.len(), reference.len()), (20, 20));
    assert!(reference[19] < 0.6 * reference[0], "it learns: {reference:?}");
    // What is off in one step is carried on by those that follow.
    let allowed = if Precision::Auto.dtype(&device) == DType::F32 { 1e-4 } else { 3e-2 };
    for (step, (a, b)) in fused.iter().zip(&reference).enumerate() {
        let apart = (a - b).abs() / b;
        eprintln!("step {}: {a} {b}, {apart:.1e} apart", step + 1);
        assert!(apart < allowed, "step {}: {a} fused, {b} of the reference", step + 1);
    }
}

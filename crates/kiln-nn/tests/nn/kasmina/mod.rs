//! Seeds: every transition and the schedules of alpha, and a layer through a whole life, on the CPU and where there are
//! kernels.

mod layer;
mod lifecycle;

use kiln_nn::kasmina::SeedMetrics;
use kiln_nn::prelude::*;

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

fn wait(lifecycle: &mut Lifecycle, epochs: usize) {
    for _ in 0..epochs {
        lifecycle.epoch(&vec![GOOD; lifecycle.lives().len()]);
    }
}

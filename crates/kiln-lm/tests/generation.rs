//! Generation on a device with kernels: nothing is compiled anew from token to token.

use cubecl::config::compilation::CompilationLogLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use kiln_lm::config::{MixerKind, Mixers, ModelConfig};
use kiln_lm::generate::{Sampling, generate};
use kiln_ops::device;
use kiln_ops::policy::{self, Implementation, Policy};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

/// Kernels that are compiled by now, by what CubeCL has logged; it does so on a thread of its own.
fn compiled(log: &Path) -> Vec<String> {
    std::thread::sleep(Duration::from_millis(500));
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().filter(|line| line.contains("Compiling kernel")).map(String::from).collect()
}

/// The number of positions seen is in no kernel, with one part of the keys and with many.
#[test]
fn no_kernel_depends_on_the_length() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("compiled");
    let mut config = CubeClRuntimeConfig::default();
    config.compilation.logger.level = CompilationLogLevel::Basic;
    config.compilation.logger.file = Some(log.clone());
    assert!(CubeClRuntimeConfig::try_set(config), "nobody has set it");
    let opened = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
    let Some(device) = opened.map(|opened| opened.device) else { return };
    // Also where it would take the reference by itself.
    let ops = [("attention".to_string(), Implementation::Fused)].into();
    policy::set(Policy { ops, ..Policy::default() });
    let (attention, bk) = (MixerKind::Attention, MixerKind::Bk);
    for (qk_norm, by_turns) in
        [(false, vec![attention]), (true, vec![attention]), (false, vec![bk, attention])]
    {
        let (heads, kv_heads) = (4, 2);
        let model =
            ModelConfig { layers: 2, width: 64, heads, kv_heads, qk_norm, ..Default::default() };
        let mixer = Mixers::new(by_turns);
        let model = ModelConfig { context: 256, mixer, ..model }.init(97, 1, &device);
        let model = model.with_activations(kiln_lm::config::Precision::Auto.dtype(&device));
        let sampling = Sampling { temperature: 0.8, top_k: 20, top_p: 0.9 };
        let mut half = vec![];
        let mut count = 0;
        let mut take = |_| {
            count += 1;
            if count == 100 {
                half = compiled(&log);
            }
            ControlFlow::Continue(())
        };
        generate(&model, &[1, 2, 3], 200, &sampling, 0, &mut take).unwrap();
        let all = compiled(&log);
        assert!(half.len() > 5, "the log is read: {half:?}");
        assert_eq!(all[half.len()..], [] as [String; 0], "compiled after 100 tokens");
    }
}

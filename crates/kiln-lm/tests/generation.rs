//! Generation on a CubeCL device: what is compiled on the way.

use kiln_lm::config::ModelConfig;
use kiln_lm::generate::{Sampling, generate};
use std::fs;
use std::ops::ControlFlow;

#[test]
fn probe() {
    let log = std::env::temp_dir().join(format!("kiln-compiled-{}", std::process::id()));
    let mut config = cubecl::config::CubeClRuntimeConfig::default();
    config.compilation.logger.level = cubecl::config::compilation::CompilationLogLevel::Full;
    config.compilation.logger.file = Some(log.clone());
    use cubecl::config::RuntimeConfig;
    assert!(cubecl::config::CubeClRuntimeConfig::try_set(config));
    let Ok(opened) = kiln_ops::device::open("wgpu") else { return };
    let config = ModelConfig {
        layers: 2,
        width: 64,
        heads: 4,
        kv_heads: 2,
        context: 256,
        ..Default::default()
    };
    let model = config.init(97, 1, &opened.device);
    let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };
    if std::env::var("REF").is_ok() {
        let ops = [("attention".to_string(), kiln_ops::policy::Implementation::Reference)].into();
        kiln_ops::policy::set(kiln_ops::policy::Policy { ops, ..Default::default() });
    }
    let mut n = 0;
    generate(&model, &[1, 2, 3], 120, &sampling, 0, &mut |_| {
        n += 1;
        let text = fs::read_to_string(&log).unwrap_or_default();
        eprintln!("{n}: {}", text.matches("[START_KERNEL").count());
        ControlFlow::Continue(())
    })
    .unwrap();
    eprintln!("{}", log.display());
}

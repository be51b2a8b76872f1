//! Whether there is room to train, before anything is allocated: an allocation that fails ends the process.
//!
//! Training takes at least, in bytes for P parameters,
//!
//! values 4·P + moments of AdamW 8·P (from the second step on) + the larger of gradients 4·P and activations,
//!
//! since activations go as gradients come. Of those only what certainly stands in memory at once is counted: the
//! residual stream, and the scores of one block where attention stores them. Logits are made in chunks. What is
//! refused could not have run; what is not may still not fit.

use super::TrainError;
use crate::config::{Config, MixerKind, OptimizerKind};
use burn::tensor::{DType, Device};
use kiln_ops::device;

/// Refuses a configuration that takes more memory than the device has, where that is known.
///
/// # Errors
///
/// [`TrainError::Memory`].
pub(super) fn check(config: &Config, vocab_size: usize, device: &Device) -> Result<(), TrainError> {
    let Some(memory) = memory(device) else { return Ok(()) };
    let dtype = config.train.precision.dtype(device);
    // Where no kernels run attention is the reference, which stores its scores.
    let Need { least, parameters, activations } =
        need(config, vocab_size, dtype, !device::is_cube(device));
    if least <= memory {
        return Ok(());
    }
    let device = device::name(device);
    Err(TrainError::Memory { least, parameters, activations, device, memory })
}

/// Bytes that training takes at least. Floats, which no configuration overflows.
#[derive(Debug, PartialEq)]
struct Need {
    least: f64,
    /// Of the parameters with what the optimizer keeps of them.
    parameters: f64,
    /// Of one batch.
    activations: f64,
}

fn need(config: &Config, vocab_size: usize, dtype: DType, scores: bool) -> Need {
    let Config { model, train, optimizer, .. } = config;
    let parameters = model.parameters(vocab_size);
    let moments = match optimizer.kind {
        OptimizerKind::AdamW if train.steps > 1 => 8.0 * parameters,
        OptimizerKind::AdamW => 0.0,
    };
    let (values, gradients) = (4.0 * parameters, 4.0 * parameters);
    let tokens = train.batch_size as f64 * model.context as f64;
    let stream = tokens * model.width as f64 * dtype.size() as f64;
    let scores = if scores && model.has(MixerKind::Attention) {
        tokens * model.context as f64 * model.heads as f64 * 4.0
    } else {
        0.0
    };
    let activations = stream + scores;
    Need {
        least: values + moments + gradients.max(activations),
        parameters: values + moments + gradients,
        activations,
    }
}

/// The memory of a device in bytes, where it is known: all of a GPU, and what nobody uses of the host.
fn memory(device: &Device) -> Option<f64> {
    if device::is_cube(device) {
        return device::memory(device).map(|bytes| bytes as f64);
    }
    free(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// What Linux can still give in memory and swap, in what it says of them.
fn free(meminfo: &str) -> Option<f64> {
    let bytes = |name: &str| -> Option<f64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024.0)
    };
    Some(bytes("MemAvailable:")? + bytes("SwapFree:").unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    fn config(overrides: &[&str]) -> Config {
        let text = "[data]\nsources = ['a']\n[model]\nlayers = 2\nwidth = 16\nheads = 4\n\
                    kv_heads = 2\ncontext = 12\n[train]\nbatch_size = 3\n";
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        parse(text, "test", &overrides).unwrap()
    }

    #[test]
    fn what_training_takes_is_added_up() {
        const P: f64 = 8560.0;
        let need = |overrides: &[&str], dtype, scores| need(&config(overrides), 50, dtype, scores);
        let (parameters, stream, scores) = (16.0 * P, 3.0 * 12.0 * 16.0, 3.0 * 12.0 * 12.0 * 4.0);
        let small = Need { least: parameters, parameters, activations: 4.0 * stream };
        assert_eq!(need(&[], DType::F32, false), small);
        let activations = 2.0 * stream + 4.0 * scores;
        assert_eq!(need(&[], DType::BF16, true), Need { activations, ..small });

        let batch = "train.batch_size=3000";
        let activations = 1e3 * (4.0 * stream + 4.0 * scores);
        let large = Need { least: 12.0 * P + activations, parameters, activations };
        assert_eq!(need(&[batch], DType::F32, true), large);
        // One step has no moments before its end.
        let one = Need { least: 4.0 * P + activations, parameters: 8.0 * P, activations };
        let few = [batch, "train.steps=1", "schedule.warmup=0"];
        assert_eq!(need(&few, DType::F32, true), one);
        // No attention, no scores.
        let bk = need(&[batch, "model.mixer=bk"], DType::F32, true);
        assert_eq!(bk.activations, 4e3 * stream);
    }

    #[test]
    fn the_largest_sizes_overflow_nothing() {
        let largest =
            ["layers", "mlp_width", "context"].map(|key| format!("model.{key}=2147483647"));
        let mut all: Vec<&str> = largest.iter().map(String::as_str).collect();
        all.extend(["model.width=2147483646", "model.heads=1073741823", "model.kv_heads=0"]);
        all.extend(["train.batch_size=2147483647", "train.steps=9223372036854775807"]);
        for more in
            [&[] as &[&str], &["model.mixer=['bk', 'attention']", "model.tied_embeddings=false"]]
        {
            let config = config(&[&all[..], more].concat());
            let Need { least, .. } = need(&config, usize::MAX, DType::F32, true);
            assert!(least > 1e28 && least.is_finite(), "{least}");
        }
    }

    #[test]
    fn free_memory_is_read_where_linux_tells_it() {
        let meminfo =
            "MemTotal:   100 kB\nMemFree: 7 kB\nMemAvailable:    50 kB\nSwapFree:  2 kB\n";
        assert_eq!(free(meminfo), Some(52.0 * 1024.0));
        assert_eq!(free("MemAvailable: 50 kB\n"), Some(50.0 * 1024.0));
        for other in ["", "MemTotal: 100 kB\nSwapFree: 2 kB\n", "MemAvailable: much\n"] {
            assert_eq!(free(other), None, "{other}");
        }
    }
}

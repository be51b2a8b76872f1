//! Whether there is room to train, before anything is allocated: an allocation that fails ends the process.
//!
//! Training takes at least, in bytes for P parameters,
//!
//! values 4·P + moments of AdamW 8·P (from the second step on) + the larger of gradients 4·P and activations,
//!
//! since activations go as gradients come. (In 16 bits values take 2·P more, and gradients as much less.) Of activations
//! only what certainly stands in memory at once is counted: the residual stream, and the scores of one block where
//! attention stores them. Logits are made in chunks. What is refused would not have fit now; what is not may still not fit.

use super::TrainError;
use crate::config::{Config, MixerKind, OptimizerKind};
use burn::tensor::{DType, Device};
use kiln_ops::device;
use std::fs;
use std::path::Path;

/// Refuses a configuration that takes more memory than the device has, where that is known.
///
/// # Errors
///
/// [`TrainError::Memory`].
pub(super) fn check(config: &Config, vocab_size: usize, device: &Device) -> Result<(), TrainError> {
    let Some(memory) = memory(device) else { return Ok(()) };
    let dtype = config.train.precision.dtype(device);
    // Where no kernels run attention is the reference, which stores its scores.
    let need = need(config, vocab_size, dtype, !device::is_cube(device));
    let least = need.least();
    if least <= memory {
        return Ok(());
    }
    let Need { parameters, gradients, activations } = need;
    let (rest, what) =
        if gradients < activations { (activations, "a batch") } else { (gradients, "gradients") };
    let (free, device) = (!device::is_cube(device), device::name(device));
    Err(TrainError::Memory { least, parameters, rest, what, device, memory, free })
}

/// Bytes that training takes. Floats, which no configuration overflows.
#[derive(Debug, PartialEq)]
struct Need {
    /// Of the parameters with the moments of the optimizer.
    parameters: f64,
    gradients: f64,
    /// Of one batch, at least.
    activations: f64,
}

impl Need {
    /// What stands in memory at once.
    fn least(&self) -> f64 {
        self.parameters + self.gradients.max(self.activations)
    }
}

fn need(config: &Config, vocab_size: usize, dtype: DType, scores: bool) -> Need {
    let Config { model, train, optimizer, .. } = config;
    let parameters = model.parameters(vocab_size);
    let mut kinds = optimizer.groups.iter().filter_map(|group| group.kind).chain([optimizer.kind]);
    let moments = match train.steps {
        0 | 1 => 0.0,
        // The momentum alone of the matrices that Muon moves, which may be nearly all.
        _ if kinds.any(|kind| kind == OptimizerKind::Muon) => 4.0 * parameters,
        _ => 8.0 * parameters,
    };
    let (values, gradients) = (4.0 * parameters, 4.0 * parameters);
    let tokens = train.batch_size as f64 * model.context as f64;
    let width = model.residual_streams() as f64 * model.width as f64;
    let stream = tokens * width * dtype.size() as f64;
    let scores = if scores && model.has(MixerKind::Attention) {
        tokens * model.context as f64 * model.heads as f64 * 4.0
    } else {
        0.0
    };
    Need { parameters: values + moments, gradients, activations: stream + scores }
}

/// The memory of a device in bytes, where it is known: all of a GPU, and what nobody uses of the host.
fn memory(device: &Device) -> Option<f64> {
    if device::is_cube(device) {
        return device::memory(device).map(|bytes| bytes as f64);
    }
    let (free, swap) = free(&fs::read_to_string("/proc/meminfo").ok()?)?;
    Some(allowed().map_or(free, |allowed| allowed.min(free)) + swap)
}

/// What Linux can still give in memory and in swap, in what it says of them.
fn free(meminfo: &str) -> Option<(f64, f64)> {
    let bytes = |name: &str| -> Option<f64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024.0)
    };
    Some((bytes("MemAvailable:")?, bytes("SwapFree:").unwrap_or(0.0)))
}

/// What the control group of this process and those around it (version 2) leave of memory, if they bound it.
fn allowed() -> Option<f64> {
    let root = Path::new("/sys/fs/cgroup");
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = root.join(groups.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let around = own.ancestors().take_while(|folder| folder.starts_with(root));
    let left = around.filter_map(|folder| {
        let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
        left(&read("memory.max")?, &read("memory.current")?, &read("memory.stat")?)
    });
    left.reduce(f64::min)
}

/// What a control group leaves, in what it says of itself: it gives up pages of files first.
fn left(max: &str, current: &str, stat: &str) -> Option<f64> {
    let bytes = |text: &str| text.trim().parse::<u64>().ok().map(|bytes| bytes as f64);
    let pages = |name: &str| stat.lines().find_map(|line| bytes(line.strip_prefix(name)?));
    let files: f64 = ["inactive_file ", "active_file "].into_iter().filter_map(pages).sum();
    Some((bytes(max)? - bytes(current)? + files).max(0.0))
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
        let (gradients, stream, scores) = (4.0 * P, 3.0 * 12.0 * 16.0, 3.0 * 12.0 * 12.0 * 4.0);
        let small = Need { parameters: 12.0 * P, gradients, activations: 4.0 * stream };
        assert_eq!(need(&[], DType::F32, false), small);
        assert_eq!(small.least(), 16.0 * P);
        let activations = 2.0 * stream + 4.0 * scores;
        assert_eq!(need(&[], DType::BF16, true), Need { activations, ..small });

        let batch = "train.batch_size=3000";
        let activations = 1e3 * (4.0 * stream + 4.0 * scores);
        let large = Need { activations, ..small };
        assert_eq!(need(&[batch], DType::F32, true), large);
        assert_eq!(large.least(), 12.0 * P + activations);
        // One step has no moments before its end.
        let one = Need { parameters: 4.0 * P, ..large };
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
            let least = need(&config, usize::MAX, DType::F32, true).least();
            assert!(least > 1e28 && least.is_finite(), "{least}");
        }
    }

    #[test]
    fn free_memory_is_read_where_linux_tells_it() {
        let meminfo =
            "MemTotal:   100 kB\nMemFree: 7 kB\nMemAvailable:    50 kB\nSwapFree:  2 kB\n";
        assert_eq!(free(meminfo), Some((50.0 * 1024.0, 2.0 * 1024.0)));
        assert_eq!(free("MemAvailable: 50 kB\n"), Some((50.0 * 1024.0, 0.0)));
        for other in ["", "MemTotal: 100 kB\nSwapFree: 2 kB\n", "MemAvailable: much\n"] {
            assert_eq!(free(other), None, "{other}");
        }
    }

    #[test]
    fn a_control_group_leaves_what_it_does_not_use_and_its_pages_of_files() {
        let stat = "anon 40\nfile 30\ninactive_anon 1\ninactive_file 20\nactive_file 5\n";
        assert_eq!(left("100\n", "70\n", stat), Some(55.0));
        assert_eq!(left("100\n", "70\n", ""), Some(30.0));
        assert_eq!(left("60\n", "70\n", ""), Some(0.0));
        assert_eq!(left("max\n", "70\n", stat), None);
        assert_eq!(left("100\n", "", stat), None);
    }
}

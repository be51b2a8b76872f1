//! The board while it is timed: driver, limits, clocks and power, as `nvidia-smi` tells them.

use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use tempfile::NamedTempFile;

/// What does not change in a run.
const FIXED: &str = "driver_version,power.limit,clocks.max.sm";
/// What is sampled.
const SAMPLED: &str = "clocks.sm,clocks.mem,power.draw,temperature.gpu";
/// Milliseconds between two samples.
const EVERY: &str = "200";

/// Lowest, middle and highest of the samples of a run, pauses included.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// Lowest.
    pub low: f64,
    /// Half of the samples were lower.
    pub middle: f64,
    /// Highest.
    pub high: f64,
}

/// An NVIDIA board in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Board {
    /// Version of the driver.
    pub driver: String,
    /// Power limit, W.
    pub power_limit_w: f64,
    /// Highest clock of the multiprocessors, MHz.
    pub sm_limit_mhz: f64,
    /// Clock of the multiprocessors, MHz.
    pub sm_mhz: Samples,
    /// Clock of the memory, MHz.
    pub memory_mhz: Samples,
    /// Power, W.
    pub power_w: Samples,
    /// Temperature, °C.
    pub temperature_c: Samples,
}

impl std::fmt::Display for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (sm, power) = (self.sm_mhz, self.power_w);
        write!(
            f,
            "driver {}; {} to {} of {} MHz; {:.0} to {:.0} of {:.0} W",
            self.driver,
            sm.low,
            sm.high,
            self.sm_limit_mhz,
            power.low,
            power.high,
            self.power_limit_w
        )
    }
}

impl Board {
    /// From a line of what does not change and lines of samples; none if something is missing.
    fn read(fixed: &str, samples: &str) -> Option<Self> {
        let fields: Vec<&str> = fixed.trim().split(',').map(str::trim).collect();
        let [driver, power_limit, sm_limit] = fields[..] else { return None };
        let numbers = |line: &str| -> Option<[f64; 4]> {
            let values = line.split(',').map(|value| value.trim().parse::<f64>());
            values.collect::<Result<Vec<_>, _>>().ok()?.try_into().ok()
        };
        let lines: Vec<[f64; 4]> = samples.lines().filter_map(numbers).collect();
        if lines.is_empty() {
            return None;
        }
        let of = |field: usize| {
            let mut values: Vec<f64> = lines.iter().map(|line| line[field]).collect();
            values.sort_by(f64::total_cmp);
            let last = values.len() - 1;
            Samples { low: values[0], middle: values[last / 2], high: values[last] }
        };
        Some(Self {
            driver: driver.into(),
            power_limit_w: power_limit.parse().ok()?,
            sm_limit_mhz: sm_limit.parse().ok()?,
            sm_mhz: of(0),
            memory_mhz: of(1),
            power_w: of(2),
            temperature_c: of(3),
        })
    }
}

/// A board that is being watched.
pub struct Watch {
    /// Its address on the bus.
    id: String,
    /// What does not change.
    fixed: String,
    sampler: Child,
    log: NamedTempFile,
}

impl Watch {
    /// Begins to sample the board of `device`; none where there is no `nvidia-smi` or the device is no board.
    pub fn begin(device: &Device) -> Option<Self> {
        let id = kiln_ops::device::pci_address(device)?;
        let fixed = ask(&id, FIXED)?;
        let log = NamedTempFile::new().ok()?;
        let sampler =
            query(&id, SAMPLED).args(["-lms", EVERY]).stdout(log.reopen().ok()?).spawn().ok()?;
        Some(Self { id, fixed, sampler, log })
    }

    /// The board up to now.
    pub fn board(&self) -> Option<Board> {
        // One more sample, for a run that was shorter than the time between two.
        let (mut samples, mut log) = (ask(&self.id, SAMPLED)?, String::new());
        self.log.reopen().ok()?.read_to_string(&mut log).ok()?;
        // The last line may be written just now.
        samples.push_str(log.rsplit_once('\n').map_or("", |(whole, _)| whole));
        Board::read(&self.fixed, &samples)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.sampler.kill();
        let _ = self.sampler.wait();
    }
}

/// What `nvidia-smi` says of these fields of this board, once.
fn ask(id: &str, fields: &str) -> Option<String> {
    String::from_utf8(query(id, fields).output().ok()?.stdout).ok()
}

/// `nvidia-smi` asked for these fields of this board.
fn query(id: &str, fields: &str) -> Command {
    let mut command = Command::new("nvidia-smi");
    let fields = format!("--query-gpu={fields}");
    command.args(["-i", id, &fields, "--format=csv,noheader,nounits"]);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_board_is_read_from_what_nvidia_smi_prints() {
        let samples = "1980, 2619, 120.4, 35\n1410, 2619, 690.0, 55\n1755, 2619, 400.0, 50\n16";
        let board = Board::read("570.86.15, 700.00, 1980\n", samples).unwrap();
        assert_eq!(board.sm_mhz, Samples { low: 1410.0, middle: 1755.0, high: 1980.0 });
        assert_eq!(
            board.to_string(),
            "driver 570.86.15; 1410 to 1980 of 1980 MHz; 120 to 690 of 700 W"
        );
        assert_eq!(Board::read("570.86.15, [N/A], 1980", samples), None);
        assert_eq!(Board::read("570.86.15, 700.00, 1980", "[N/A], 1, 2, 3"), None);
    }
}

//! Which family of kernels a product runs on.

use crate::device::{self, Hardware};
use burn::tensor::{DType, Device};
use cubecl::client::Client;
use std::cell::Cell;

/// A family of product kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Hopper's tensor cores through wgmma and TMA: bf16 and f16 operands.
    Wgmma,
    /// Tensor cores through mma.sync and TMA, from compute capability 9.0 on: bf16 and f16 operands.
    MmaTma,
    /// Tensor cores through mma.sync and cp.async, from compute capability 8.0 on: bf16 and f16
    /// operands.
    Mma,
    /// Plain arithmetic in f32, on any device; the only one that multiplies f32 in f32.
    Simt,
}

impl Family {
    /// All of them, the fastest first.
    pub const ALL: [Self; 4] = [Self::Wgmma, Self::MmaTma, Self::Mma, Self::Simt];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wgmma => "wgmma",
            Self::MmaTma => "mma_tma",
            Self::Mma => "mma",
            Self::Simt => "simt",
        }
    }

    /// Whether it runs on this device with operands of this element type.
    fn runs(self, client: &Client, dtype: DType) -> bool {
        let half = matches!(dtype, DType::BF16 | DType::F16);
        // The others are written in PTX.
        let (hardware, tensor_cores) = (Hardware::of(client), half && cfg!(feature = "cuda"));
        match self {
            Self::Wgmma => tensor_cores && hardware.wgmma,
            Self::MmaTma => tensor_cores && hardware.tma,
            Self::Mma => tensor_cores && hardware.async_copies,
            Self::Simt => true,
        }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Family {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        // `units` is what `simt` was called before.
        let s = if s == "units" { "simt" } else { s };
        Self::ALL.into_iter().find(|family| family.name() == s).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(Self::to_string).collect();
            format!("`{s}` is no family of tiles, expected one of {}", names.join(", "))
        })
    }
}

thread_local! {
    static FORCED: Cell<Option<Family>> = const { Cell::new(None) };
}

/// Runs `f` with every product that this thread asks for on one family, where that runs.
pub fn force<T>(family: Family, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<Family>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.with(|forced| forced.set(self.0));
        }
    }
    let _restore = Restore(FORCED.with(|forced| forced.replace(Some(family))));
    f()
}

/// The family that this thread has forced. Part of what is asked for: the product itself may be
/// launched by another thread.
pub(crate) fn forced() -> Option<Family> {
    FORCED.with(Cell::get)
}

/// The families that run on a device, the fastest first; none where there are no kernels.
pub fn families(device: &Device, dtype: DType) -> Vec<Family> {
    match device::client(device) {
        Some(client) => available(&client, dtype),
        None => vec![],
    }
}

fn available(client: &Client, dtype: DType) -> Vec<Family> {
    Family::ALL.into_iter().filter(|family| family.runs(client, dtype)).collect()
}

/// The family of a product: the wanted one if it runs here, else the fastest.
pub(crate) fn choose(wanted: Option<Family>, client: &Client, dtype: DType) -> Family {
    let available = available(client, dtype);
    wanted.filter(|family| available.contains(family)).unwrap_or(available[0])
}

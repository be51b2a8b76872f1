//! Which family of kernels a product runs on.

use burn::tensor::DType;
use cubecl::client::Client;
use std::cell::Cell;

/// A family of product kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Plain arithmetic in f32, on any device; the only one for f32 operands.
    Units,
}

impl Family {
    /// All of them, the fastest first.
    pub const ALL: [Self; 1] = [Self::Units];

    /// Whether it runs on this device with operands of this element type.
    fn runs(self, _client: &Client, _dtype: DType) -> bool {
        match self {
            Self::Units => true,
        }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Units => "units",
        })
    }
}

impl std::str::FromStr for Family {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|family| family.to_string() == s).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(Self::to_string).collect();
            format!("`{s}` is no family of tiles, expected one of {}", names.join(", "))
        })
    }
}

thread_local! {
    static FORCED: Cell<Option<Family>> = const { Cell::new(None) };
}

/// Runs `f` with every product that this thread launches on one family.
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

/// The families that run here, the fastest first.
pub fn available(client: &Client, dtype: DType) -> Vec<Family> {
    Family::ALL.into_iter().filter(|family| family.runs(client, dtype)).collect()
}

/// The family of a product: the forced one if it runs here, else the fastest.
pub(super) fn choose(client: &Client, dtype: DType) -> Family {
    let available = available(client, dtype);
    let forced = FORCED.with(Cell::get).filter(|family| available.contains(family));
    forced.unwrap_or(available[0])
}

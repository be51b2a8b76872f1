//! Which implementation of an operator runs: the fused kernel or the reference.
//!
//! [`Implementation::Auto`] takes what a measured [`Table`] found faster for the operator, size
//! class, element type and kind of device, and without an entry the fused kernel on CubeCL devices and the
//! reference elsewhere. Asking for [`Implementation::Fused`] where it cannot run is an error, never
//! a silent fallback.

mod table;

pub use table::{Measured, Table};

use crate::{OpError, device};
use burn::tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::RwLock;

/// An implementation, or the wish for the better one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Implementation {
    /// The measured choice; without a measurement the kernel where there is one.
    #[default]
    Auto,
    /// The CubeCL kernel; an error where it cannot run.
    Fused,
    /// Plain Burn operations.
    Reference,
}

impl std::fmt::Display for Implementation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Fused => "fused",
            Self::Reference => "reference",
        })
    }
}

impl std::str::FromStr for Implementation {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "fused" => Ok(Self::Fused),
            "reference" => Ok(Self::Reference),
            other => {
                Err(format!("`{other}` is no implementation, expected auto, fused or reference"))
            }
        }
    }
}

/// Wishes by operator, and what was measured. Plain data: print it, save it, put it in a config.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// For operators that `ops` does not name.
    pub default: Implementation,
    /// By operator.
    pub ops: BTreeMap<String, Implementation>,
    /// Measurements that `auto` looks into.
    pub table: Table,
}

static POLICY: RwLock<Option<Policy>> = RwLock::new(None);

thread_local! {
    static FORCED: Cell<Option<Implementation>> = const { Cell::new(None) };
}

/// Replaces the policy of the process.
///
/// Tables of earlier versions name CUDA devices by index. Such a measurement counts for every GPU of the
/// kind that this machine has at that index.
pub fn set(mut policy: Policy) {
    policy.table.resolve(device::cuda_kind);
    *POLICY.write().unwrap_or_else(|e| e.into_inner()) = Some(policy);
}

/// The policy of the process.
pub fn get() -> Policy {
    POLICY.read().unwrap_or_else(|e| e.into_inner()).clone().unwrap_or_default()
}

/// Runs `f` with one implementation for every operator that this thread calls, whatever the policy.
pub fn force<T>(implementation: Implementation, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<Implementation>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.with(|forced| forced.set(self.0));
        }
    }
    let _restore = Restore(FORCED.with(|forced| forced.replace(Some(implementation))));
    f()
}

/// A call as the policy sees it.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    /// Operator.
    pub op: &'static str,
    /// Elements of the largest input.
    pub elements: usize,
    /// Element type of the operation.
    pub dtype: DType,
    /// Where it runs.
    pub device: &'a Device,
    /// Whether the operator has a kernel at all.
    pub has_kernel: bool,
}

/// Whether the fused kernel runs (`true`) or the reference.
pub fn fused(call: &Call<'_>) -> Result<bool, OpError> {
    let wish = FORCED.with(Cell::get).unwrap_or_else(|| wish(call.op));
    match (wish, kernel_runs(call)) {
        (Implementation::Reference, _) => Ok(false),
        (Implementation::Fused, Ok(())) => Ok(true),
        (Implementation::Fused, Err(reason)) => {
            Err(OpError::Unsupported { op: call.op, device: device::name(call.device), reason })
        }
        (Implementation::Auto, Err(_)) => Ok(false),
        (Implementation::Auto, Ok(())) => {
            let policy = POLICY.read().unwrap_or_else(|e| e.into_inner());
            let measured = policy.as_ref().and_then(|p| p.table.find(call));
            Ok(measured.is_none_or(|m| m.faster() == Implementation::Fused))
        }
    }
}

/// What an operator calls.
pub(crate) enum Choice {
    /// Its kernel.
    #[cfg(feature = "cube")]
    Fused,
    /// Its reference.
    Reference,
}

/// What an operator with a kernel calls, for inputs of which the largest has so many elements, on the
/// device and in the element type of `like`.
pub(crate) fn choose<const D: usize>(
    op: &'static str,
    elements: usize,
    like: &Tensor<D>,
) -> Result<Choice, OpError> {
    let (dtype, device) = (like.dtype(), &like.device());
    Ok(match fused(&Call { op, elements, dtype, device, has_kernel: true })? {
        #[cfg(feature = "cube")]
        true => Choice::Fused,
        _ => Choice::Reference,
    })
}

/// The same of an operator whose kernels do not take every call: where this one does not fit, for a reason, the
/// reference runs, and to ask for the kernel is an error.
pub(crate) fn choose_if<const D: usize>(
    op: &'static str,
    elements: usize,
    like: &Tensor<D>,
    fits: Result<(), String>,
) -> Result<Choice, OpError> {
    let wish = || FORCED.with(Cell::get).unwrap_or_else(|| wish(op));
    match fits {
        Ok(()) => choose(op, elements, like),
        Err(reason) if wish() == Implementation::Fused => {
            Err(OpError::Unsupported { op, device: device::name(&like.device()), reason })
        }
        Err(_) => Ok(Choice::Reference),
    }
}

fn wish(op: &str) -> Implementation {
    let policy = POLICY.read().unwrap_or_else(|e| e.into_inner());
    policy.as_ref().map_or(Implementation::Auto, |p| p.ops.get(op).copied().unwrap_or(p.default))
}

fn kernel_runs(call: &Call<'_>) -> Result<(), String> {
    if !call.has_kernel {
        return Err(format!("`{}` has no kernel yet, only its reference", call.op));
    }
    if !device::is_cube(call.device) {
        return Err("kernels run on CubeCL devices (cuda, wgpu, vulkan)".into());
    }
    if !call.device.supports_dtype(call.dtype) {
        return Err(format!("the device does not have {:?}", call.dtype));
    }
    Ok(())
}

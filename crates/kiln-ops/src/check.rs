//! Checks on the host that operators share: shapes, element types, devices, attributes.

use crate::OpError;
use burn::tensor::{DType, Device, Tensor};

/// Name of an operator, for error messages.
#[derive(Clone, Copy)]
pub(crate) struct Check(pub(crate) &'static str);

impl Check {
    pub(crate) fn shape(
        self,
        tensor: &'static str,
        found: &[usize],
        ok: bool,
        expected: impl Into<String>,
    ) -> Result<(), OpError> {
        if ok {
            return Ok(());
        }
        Err(OpError::Shape { op: self.0, tensor, found: found.to_vec(), expected: expected.into() })
    }

    /// f32, bf16 or f16.
    pub(crate) fn float<const D: usize>(
        self,
        tensor: &'static str,
        t: &Tensor<D>,
    ) -> Result<DType, OpError> {
        match t.dtype() {
            // Every device has it.
            DType::F32 => Ok(DType::F32),
            dtype => self.float_on(tensor, dtype, &t.device()),
        }
    }

    /// f32, bf16 or f16, as far as the device has them: else a kernel would fail late.
    pub(crate) fn float_on(
        self,
        tensor: &'static str,
        found: DType,
        device: &Device,
    ) -> Result<DType, OpError> {
        let expected = match found {
            DType::F32 | DType::BF16 | DType::F16 if device.supports_dtype(found) => {
                return Ok(found);
            }
            DType::F32 | DType::BF16 | DType::F16 => "an element type that the device has",
            _ => "F32, BF16 or F16",
        };
        Err(OpError::DType { op: self.0, tensor, found, expected: expected.into() })
    }

    /// Of one of these element types.
    pub(crate) fn dtype<const D: usize>(
        self,
        tensor: &'static str,
        t: &Tensor<D>,
        allowed: &[DType],
    ) -> Result<(), OpError> {
        if allowed.contains(&t.dtype()) {
            return Ok(());
        }
        let expected = allowed.iter().map(|d| format!("{d:?}")).collect::<Vec<_>>().join(" or ");
        Err(OpError::DType { op: self.0, tensor, found: t.dtype(), expected })
    }

    pub(crate) fn device(
        self,
        tensor: &'static str,
        found: &Device,
        expected: &Device,
    ) -> Result<(), OpError> {
        if found == expected {
            return Ok(());
        }
        Err(OpError::Device {
            op: self.0,
            tensor,
            found: format!("{found:?}"),
            expected: format!("{expected:?}"),
        })
    }

    /// A finite number in range.
    pub(crate) fn number(
        self,
        attribute: &'static str,
        value: f64,
        ok: bool,
        expected: &str,
    ) -> Result<(), OpError> {
        if ok && value.is_finite() {
            return Ok(());
        }
        Err(OpError::Attribute {
            op: self.0,
            attribute,
            found: written(value),
            expected: expected.into(),
        })
    }
}

/// A number, in powers of ten where it would be long.
fn written(value: f64) -> String {
    match value.abs() {
        size if size.is_finite() && size != 0.0 && !(1e-5..1e16).contains(&size) => {
            format!("{value:e}")
        }
        _ => value.to_string(),
    }
}

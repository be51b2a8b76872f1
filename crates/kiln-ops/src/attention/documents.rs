//! Packed sequences: documents one after the other along one sequence, each of which attends to itself alone.

use super::OP;
use crate::OpError;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Where documents begin and end in a sequence that holds nothing else, made once for all layers of a model.
#[derive(Debug, Clone)]
pub struct Documents {
    /// `[2, T]` u32: for each row the first row of its document, and one past the last.
    pub(crate) bounds: Tensor<2, Int>,
    total: usize,
}

impl Documents {
    /// Documents of these lengths; those of length 0 are not there.
    ///
    /// # Errors
    ///
    /// [`OpError`] if there are no rows, or 2³¹ and more.
    pub fn new(lengths: &[usize], device: &Device) -> Result<Self, OpError> {
        Self::of_lengths(lengths, "lengths", device)
    }

    fn of_lengths(
        lengths: &[usize],
        attribute: &'static str,
        device: &Device,
    ) -> Result<Self, OpError> {
        let total = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length));
        let Some(total) = total.filter(|total| (1..1 << 31).contains(total)) else {
            return Err(OpError::Attribute {
                op: OP,
                attribute,
                found: total.map_or_else(|| "more than 2⁶⁴".into(), |total| total.to_string()),
                expected: "1 to 2³¹ − 1 rows in all documents".into(),
            });
        };
        let ends = lengths.iter().scan(0usize, |end, length| {
            *end += length;
            Some(*end)
        });
        let spans = lengths.iter().zip(ends);
        let rows = |of: fn(usize, usize) -> usize| {
            let row = move |(length, end): (&usize, usize)| {
                std::iter::repeat_n(of(end - length, end) as u32, *length)
            };
            spans.clone().flat_map(row)
        };
        let bounds: Vec<u32> = rows(|start, _| start).chain(rows(|_, end| end)).collect();
        let data = TensorData::new(bounds, [2, total]);
        Ok(Self { bounds: Tensor::from_data(data, (&device.clone().inner(), DType::U32)), total })
    }

    /// The same from cumulative lengths: 0, then where each document ends.
    ///
    /// # Errors
    ///
    /// [`OpError`] if they do not begin with 0 or decrease, and as [`new`](Self::new).
    pub fn from_cu_seqlens(ends: &[usize], device: &Device) -> Result<Self, OpError> {
        let wrong = |found: String, expected: &str| {
            let expected = expected.into();
            Err(OpError::Attribute { op: OP, attribute: "cu_seqlens", found, expected })
        };
        if ends.first() != Some(&0) {
            let first = ends.first().map_or_else(|| "none".into(), usize::to_string);
            return wrong(first, "0 first");
        }
        if let Some(pair) = ends.windows(2).find(|pair| pair[1] < pair[0]) {
            return wrong(format!("{} after {}", pair[1], pair[0]), "ends that do not decrease");
        }
        let lengths: Vec<usize> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
        Self::of_lengths(&lengths, "cu_seqlens", device)
    }

    /// Rows of all documents together.
    pub fn total(&self) -> usize {
        self.total
    }
}

//! Tensors that were read back, in the element type that they are stored in: a result may have 10⁹ elements.

use crate::host::one_line;
use burn::tensor::{DType, Tensor, TensorData};
use half::{bf16, f16};

/// A tensor that was read back.
pub(crate) struct Stored {
    data: TensorData,
    shape: Vec<usize>,
}

/// Its elements.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl Stored {
    /// Reads a tensor that stands for one of this shape.
    pub(super) fn read<const D: usize>(
        tensor: &Tensor<D>,
        shape: &[usize],
    ) -> Result<Self, String> {
        let data = tensor.try_to_data().map_err(|e| one_line(&format!("{e:?}")))?;
        Self::new(data, shape)
    }

    pub(super) fn new(data: TensorData, shape: &[usize]) -> Result<Self, String> {
        Values::of(&data)?;
        Ok(Self { data, shape: shape.to_vec() })
    }

    pub(crate) fn values(&self) -> Values<'_> {
        Values::of(&self.data).expect("it was tried when the tensor was read")
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its rows.
    pub(crate) fn lines(&self) -> Lines<'_> {
        Lines { values: self.values(), width: super::width(&self.shape) }
    }

    /// Its last two dimensions as matrices.
    pub(crate) fn stack(&self) -> Stack<'_> {
        let last = self.shape.len() - 2;
        Stack {
            batches: self.shape[..last].iter().product(),
            matrix: Matrix {
                values: self.values(),
                rows: self.shape[last],
                columns: self.shape[last + 1],
                transposed: false,
                lower: false,
            },
        }
    }
}

impl<'a> Values<'a> {
    fn of(data: &'a TensorData) -> Result<Self, String> {
        let values = match data.dtype() {
            DType::F32 => data.as_slice::<f32>().map(Self::F32),
            DType::BF16 => data.as_slice::<bf16>().map(Self::Bf16),
            DType::F16 => data.as_slice::<f16>().map(Self::F16),
            other => return Err(format!("not checked: numbers of {other:?}")),
        };
        values.map_err(|e| one_line(&format!("{e:?}")))
    }

    pub(super) fn at(self, i: usize) -> f64 {
        match self {
            Self::F32(values) => f64::from(values[i]),
            Self::Bf16(values) => f64::from(values[i]),
            Self::F16(values) => f64::from(values[i]),
        }
    }

    fn part(self, start: usize, length: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[start..][..length]),
            Self::Bf16(values) => Self::Bf16(&values[start..][..length]),
            Self::F16(values) => Self::F16(&values[start..][..length]),
        }
    }

    pub(super) fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
        }
    }

    pub(super) fn to_vec(self) -> Vec<f64> {
        (0..self.len()).map(|i| self.at(i)).collect()
    }
}

/// Rows of a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    values: Values<'a>,
    width: usize,
}

impl Lines<'_> {
    /// A row.
    pub(crate) fn row(&self, row: usize) -> Vec<f64> {
        self.values.part(row * self.width, self.width).to_vec()
    }

    pub(super) fn count(&self) -> usize {
        self.values.len() / self.width.max(1)
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }
}

/// Matrices, as operands of products.
#[derive(Clone, Copy)]
pub(crate) struct Stack<'a> {
    pub(super) batches: usize,
    matrix: Matrix<'a>,
}

impl<'a> Stack<'a> {
    /// Transposed if `transposed`.
    pub(crate) fn transposed_if(self, transposed: bool) -> Self {
        let matrix = Matrix { transposed: self.matrix.transposed != transposed, ..self.matrix };
        Self { matrix, ..self }
    }

    /// Transposed.
    pub(crate) fn transposed(self) -> Self {
        self.transposed_if(true)
    }

    /// With zeros above the diagonal, whatever stands there.
    pub(crate) fn lower(self) -> Self {
        Self { matrix: Matrix { lower: true, ..self.matrix }, ..self }
    }

    pub(super) fn matrix(&self, z: usize) -> Matrix<'a> {
        let size = self.matrix.rows * self.matrix.columns;
        Matrix { values: self.matrix.values.part(z * size, size), ..self.matrix }
    }
}

/// A matrix, as an operand of a product.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    values: Values<'a>,
    /// As it is stored.
    rows: usize,
    columns: usize,
    /// The operand is its transpose.
    transposed: bool,
    /// Zeros stand for what is stored above the diagonal.
    lower: bool,
}

impl Matrix<'_> {
    /// Rows and columns of the operand.
    pub(super) fn size(&self) -> [usize; 2] {
        match self.transposed {
            true => [self.columns, self.rows],
            false => [self.rows, self.columns],
        }
    }

    /// An element of the operand.
    pub(super) fn at(&self, i: usize, j: usize) -> f64 {
        let (i, j) = if self.transposed { (j, i) } else { (i, j) };
        if self.lower && j > i { 0.0 } else { self.values.at(i * self.columns + j) }
    }

    pub(super) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// The operand at some rows and columns.
    pub(super) fn part(&self, rows: &[usize], columns: &[usize]) -> Vec<f64> {
        let row = |i: &usize| columns.iter().map(|j| self.at(*i, *j)).collect::<Vec<_>>();
        rows.iter().flat_map(row).collect()
    }
}

//! An operand as a stack of matrices with strides, read in place wherever the layout allows.

use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

/// Which dimension of a matrix has its elements side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Order {
    /// Columns of one row.
    Rows,
    /// Rows of one column: a transposed view.
    Columns,
}

/// Matrices `[batches, rows, cols]`: element (z, i, j) is at `z · batch + i · row + j · col`, where
/// `row` or `col` is 1, whichever `order` says.
pub(crate) struct Stack {
    pub(crate) tensor: CubeTensor,
    /// 1 if all products share one matrix.
    pub(crate) batches: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) batch: usize,
    /// Distance of two lines: of rows, or of columns in [`Order::Columns`].
    pub(crate) line: usize,
    pub(crate) order: Order,
}

impl Stack {
    /// `tensor`, of rank 2 or more, as operand of a product whose leading dimensions are `leading`
    /// (which its own broadcast to). Copies where lines are not contiguous or the matrices do not
    /// follow each other at one distance.
    pub(crate) fn new(tensor: CubeTensor, leading: &[usize]) -> Self {
        let tensor = untile(tensor);
        if let Some(stack) = Self::view(&tensor, leading) {
            return stack;
        }
        let tensor = into_contiguous(tensor);
        if let Some(stack) = Self::view(&tensor, leading) {
            return stack;
        }
        // Broadcast along some of the leading dimensions but not all: written out.
        let shape = tensor.meta.shape();
        let last = shape.num_dims() - 2;
        let full: Vec<usize> = leading.iter().chain(&shape[last..]).copied().collect();
        let strides: Vec<usize> = (0..full.len())
            .map(|i| if shape[i] == 1 && full[i] != 1 { 0 } else { tensor.meta.strides()[i] })
            .collect();
        let mut expanded = tensor;
        *expanded.meta = Metadata::new(full, strides);
        let tensor = into_contiguous(expanded);
        Self::view(&tensor, leading).expect("a contiguous tensor is a stack")
    }

    fn view(tensor: &CubeTensor, leading: &[usize]) -> Option<Self> {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let last = shape.num_dims() - 2;
        let [rows, cols] = [shape[last], shape[last + 1]];
        let (order, line) = order([rows, cols], [strides[last], strides[last + 1]])?;
        let (batches, batch) = stride(&shape[..last], &strides[..last], leading)?;
        Some(Self { tensor: tensor.clone(), batches, rows, cols, batch, line, order })
    }

    /// Distance of the matrices of two products: none if they share one.
    pub(crate) fn step(&self) -> usize {
        if self.batches > 1 { self.batch } else { 0 }
    }

    /// Distance of two rows and of two columns.
    pub(crate) fn strides(&self) -> (usize, usize) {
        match self.order {
            Order::Rows => (self.line, 1),
            Order::Columns => (1, self.line),
        }
    }

    /// Elements of a line.
    pub(crate) fn along(&self) -> usize {
        match self.order {
            Order::Rows => self.cols,
            Order::Columns => self.rows,
        }
    }

    /// Number of lines of a matrix.
    pub(crate) fn lines(&self) -> usize {
        match self.order {
            Order::Rows => self.rows,
            Order::Columns => self.cols,
        }
    }

    /// The widest vector, up to `bytes`, in which every line can be read.
    pub(crate) fn vector_size(&self, client: &Client, bytes: usize) -> usize {
        let element = self.tensor.dtype.size();
        let offset = self.tensor.handle.offset_start.unwrap_or(0) as usize;
        let fits = |size: &usize| {
            self.along().is_multiple_of(*size)
                && (self.lines() <= 1 || self.line.is_multiple_of(*size))
                && (self.batches <= 1 || self.batch.is_multiple_of(*size))
                && offset.is_multiple_of(size * element)
        };
        client
            .io_optimized_vector_sizes(element)
            .filter(|size| size * element <= bytes)
            .filter(fits)
            .max()
            .unwrap_or(1)
    }

    /// Copies it into lines that begin at multiples of 16 bytes.
    #[cfg(feature = "cuda")]
    pub(crate) fn align(&mut self) {
        let turned = self.order == Order::Columns;
        let [mut shape, mut strides] =
            [[self.batches, self.rows, self.cols], [self.batch, self.line, 1]];
        if turned {
            shape.swap(1, 2);
        }
        if self.batches == 1 {
            strides[0] = strides[1] * shape[1];
        }
        let mut lines = self.tensor.clone();
        *lines.meta = Metadata::new(shape, strides);
        let (client, device, dtype) = (lines.client.clone(), lines.device.clone(), lines.dtype);
        let elem = burn::backend::cubecl::dtype_to_storage_type(dtype);
        let copy = cubecl::std::tensor::into_contiguous_pitched(&client, lines.binding(), elem);
        let copy = CubeTensor::new(client, copy.handle, *copy.metadata, device, dtype);
        let strides = copy.meta.strides();
        (self.batch, self.line) = (strides[0], strides[1]);
        self.tensor = copy;
    }

    /// Whether every line begins at a multiple of 16 bytes, which TMA and cp.async want.
    #[cfg(feature = "cuda")]
    pub(crate) fn aligned(&self) -> bool {
        let element = self.tensor.dtype.size();
        let offset = self.tensor.handle.offset_start.unwrap_or(0) as usize;
        let aligned = |stride: usize| stride > 0 && (stride * element).is_multiple_of(16);
        offset.is_multiple_of(16)
            && (self.lines() <= 1 || aligned(self.line))
            && (self.batches <= 1 || aligned(self.batch))
    }
}

/// The order of a matrix and the distance of its lines, if elements stand side by side.
fn order([rows, cols]: [usize; 2], [row, col]: [usize; 2]) -> Option<(Order, usize)> {
    if cols == 1 && row == 1 {
        return Some((Order::Columns, rows));
    }
    if col == 1 || cols == 1 {
        // One column of a wider matrix is a row of one element each.
        return Some((Order::Rows, row));
    }
    (row == 1 || rows == 1).then_some((Order::Columns, col))
}

/// Number and distance of the matrices, if they follow each other at one distance or are shared.
fn stride(shape: &[usize], strides: &[usize], leading: &[usize]) -> Option<(usize, usize)> {
    let batches: usize = leading.iter().product();
    if shape.iter().all(|size| *size == 1) {
        return Some((1, 0));
    }
    let mut dims = (0..shape.len()).rev().filter(|i| leading[*i] != 1);
    let first = dims.next()?;
    let step = if shape[first] == 1 { return None } else { strides[first] };
    let mut expected = step * shape[first];
    for i in dims {
        if shape[i] != leading[i] || strides[i] != expected {
            return None;
        }
        expected *= shape[i];
    }
    // Expanded over all leading dimensions: shared.
    if step == 0 { Some((1, 0)) } else { Some((batches, step)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_of_matrices() {
        for (shape, strides, expected) in [
            ([4, 8], [8, 1], Some((Order::Rows, 8))),
            ([4, 8], [256, 1], Some((Order::Rows, 256))),
            ([4, 8], [1, 4], Some((Order::Columns, 4))),
            ([4, 1], [7, 3], Some((Order::Rows, 7))),
            ([1, 8], [5, 4], Some((Order::Columns, 4))),
            ([4, 8], [16, 2], None),
            ([4, 8], [0, 1], Some((Order::Rows, 0))),
            ([4, 8], [0, 0], None),
        ] {
            assert_eq!(order(shape, strides), expected, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn distances_of_matrices() {
        type Case = (&'static [usize], &'static [usize], &'static [usize], Option<(usize, usize)>);
        let cases: &[Case] = &[
            (&[], &[], &[], Some((1, 0))),
            (&[3], &[40], &[3], Some((3, 40))),
            (&[1], &[40], &[3], Some((1, 0))),
            (&[2, 3], &[120, 40], &[2, 3], Some((6, 40))),
            (&[2, 3], &[40, 80], &[2, 3], None),
            (&[1, 3], &[120, 40], &[2, 3], None),
            (&[2, 1], &[40, 40], &[2, 3], None),
            (&[1, 3], &[9, 40], &[1, 3], Some((3, 40))),
            (&[2, 3], &[0, 0], &[2, 3], Some((1, 0))),
        ];
        for (shape, strides, leading, expected) in cases {
            assert_eq!(stride(shape, strides, leading), *expected, "{shape:?} {strides:?}");
        }
    }
}

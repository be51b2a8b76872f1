//! Matrices by their strides, read in place wherever the layout allows; and views of tensors without a copy.

use burn::tensor::Shape;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

/// Which dimension of a matrix has its elements side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Order {
    /// Columns of one row.
    RowMajor,
    /// Rows of one column: a transposed view.
    ColMajor,
}

/// Matrices `[batches, rows, cols]`: element (z, i, j) is at `z · batch_stride + i · ld + j`, or
/// `z · batch_stride + i + j · ld` if column-major.
#[derive(Clone)]
pub(crate) struct MatrixView {
    pub(crate) tensor: CubeTensor,
    /// 1 if all products share one matrix.
    pub(crate) batches: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) batch_stride: usize,
    /// The leading dimension: the distance of two lines, of rows, or of columns if column-major.
    pub(crate) ld: usize,
    pub(crate) order: Order,
}

/// The distances of an operand's matrices and lines, as a kernel takes them, in its vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) batch_stride: usize,
    pub(crate) ld: usize,
}

impl MatrixView {
    /// Whether columns of one row stand side by side.
    pub(crate) fn row_major(&self) -> bool {
        self.order == Order::RowMajor
    }

    /// `tensor`, of rank 2 or more, as operand of a batch of products whose leading dimensions are `leading`
    /// (which its own broadcast to). Copies where lines are not contiguous or the matrices do not
    /// follow each other at one distance.
    pub(crate) fn new(tensor: CubeTensor, leading: &[usize]) -> Self {
        let tensor = untile(tensor);
        if let Some(view) = Self::view(&tensor, leading) {
            return view;
        }
        let tensor = into_contiguous(tensor);
        if let Some(view) = Self::view(&tensor, leading) {
            return view;
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
        Self::view(&tensor, leading).expect("a contiguous tensor has such strides")
    }

    fn view(tensor: &CubeTensor, leading: &[usize]) -> Option<Self> {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let last = shape.num_dims() - 2;
        let [rows, cols] = [shape[last], shape[last + 1]];
        let (order, ld) = order([rows, cols], [strides[last], strides[last + 1]])?;
        let (batches, batch_stride) = stride(&shape[..last], &strides[..last], leading)?;
        Some(Self { tensor: tensor.clone(), batches, rows, cols, batch_stride, ld, order })
    }

    /// Distance of the matrices of two products: none if they share one.
    pub(crate) fn batch_step(&self) -> usize {
        if self.batches > 1 { self.batch_stride } else { 0 }
    }

    /// Distance of two rows and of two columns.
    pub(crate) fn strides(&self) -> (usize, usize) {
        match self.order {
            Order::RowMajor => (self.ld, 1),
            Order::ColMajor => (1, self.ld),
        }
    }

    /// Elements of a line.
    pub(crate) fn along(&self) -> usize {
        match self.order {
            Order::RowMajor => self.cols,
            Order::ColMajor => self.rows,
        }
    }

    /// Number of lines of a matrix.
    pub(crate) fn lines(&self) -> usize {
        match self.order {
            Order::RowMajor => self.rows,
            Order::ColMajor => self.cols,
        }
    }

    /// Looks at it as its transpose.
    pub(crate) fn transpose(&mut self) {
        (self.rows, self.cols) = (self.cols, self.rows);
        self.order = match self.order {
            Order::RowMajor => Order::ColMajor,
            Order::ColMajor => Order::RowMajor,
        };
    }

    /// The widest vector, up to `bytes`, in which every line can be read.
    pub(crate) fn vector_size(&self, client: &Client, bytes: usize) -> usize {
        let element = self.tensor.dtype.size();
        let offset = self.tensor.handle.offset_start.unwrap_or(0) as usize;
        let fits = |size: &usize| {
            self.along().is_multiple_of(*size)
                && (self.lines() <= 1 || self.ld.is_multiple_of(*size))
                && (self.batches <= 1 || self.batch_stride.is_multiple_of(*size))
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
    pub(crate) fn align(&mut self) {
        let mut shape = [self.batches, self.rows, self.cols];
        let mut strides = [self.batch_stride, self.ld, 1];
        if !self.row_major() {
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
        (self.batch_stride, self.ld) = (strides[0], strides[1]);
        self.tensor = copy;
    }

    /// Whether every line begins at a multiple of 16 bytes, which TMA and cp.async want.
    pub(crate) fn aligned(&self) -> bool {
        let element = self.tensor.dtype.size();
        let offset = self.tensor.handle.offset_start.unwrap_or(0) as usize;
        let aligned = |stride: usize| stride > 0 && (stride * element).is_multiple_of(16);
        offset.is_multiple_of(16)
            && (self.lines() <= 1 || aligned(self.ld))
            && (self.batches <= 1 || aligned(self.batch_stride))
    }
}

/// The last two dimensions swapped.
pub(crate) fn transposed(mut tensor: CubeTensor) -> CubeTensor {
    let last = tensor.meta.shape().num_dims() - 1;
    tensor.meta.swap(last - 1, last);
    tensor
}

/// Indices `start .. start + length` of the first dimension, in the tensor's own memory.
pub(crate) fn narrow(tensor: &CubeTensor, start: usize, length: usize) -> CubeTensor {
    let step = tensor.meta.strides()[0] * tensor.dtype.size();
    let after = tensor.meta.shape()[0] - start - length;
    let mut part = tensor.clone();
    part.handle = part.handle.offset_start((start * step) as u64).offset_end((after * step) as u64);
    part.meta.shape_mut()[0] = length;
    part
}

/// Matrix `i` of a batch of them, in its memory.
pub(crate) fn matrix(batch: &CubeTensor, i: usize) -> CubeTensor {
    let mut matrix = narrow(batch, i, 1);
    let (shape, strides) = (batch.meta.shape(), batch.meta.strides());
    *matrix.meta = Metadata::new(Shape::new([shape[1], shape[2]]), vec![strides[1], strides[2]]);
    matrix
}

/// A matrix as a batch of one.
pub(crate) fn batch_of_one(mut matrix: CubeTensor) -> CubeTensor {
    let (shape, strides) = (matrix.meta.shape(), matrix.meta.strides());
    let (shape, strides) = (Shape::new([1, shape[0], shape[1]]), vec![0, strides[0], strides[1]]);
    *matrix.meta = Metadata::new(shape, strides);
    matrix
}

/// `tensor` expanded to `shape`, dimensions of one with a stride of zero, as matrices.
pub(crate) fn broadcast(tensor: CubeTensor, shape: &Shape) -> MatrixView {
    let last = shape.num_dims() - 2;
    let mut expanded = untile(tensor);
    let (from, strides) = (expanded.meta.shape().to_vec(), expanded.meta.strides().to_vec());
    let stride = |i: usize| if from[i] == 1 && shape[i] != 1 { 0 } else { strides[i] };
    let strides: Vec<usize> = (0..shape.num_dims()).map(stride).collect();
    *expanded.meta = Metadata::new(shape.clone(), strides);
    MatrixView::new(expanded, &shape[..last])
}

/// The order of a matrix and the distance of its lines, if elements stand side by side.
fn order([rows, cols]: [usize; 2], [row, col]: [usize; 2]) -> Option<(Order, usize)> {
    if cols == 1 && row == 1 {
        return Some((Order::ColMajor, rows));
    }
    if col == 1 || cols == 1 {
        // One column of a wider matrix is a row of one element each.
        return Some((Order::RowMajor, row));
    }
    (row == 1 || rows == 1).then_some((Order::ColMajor, col))
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
            ([4, 8], [8, 1], Some((Order::RowMajor, 8))),
            ([4, 8], [256, 1], Some((Order::RowMajor, 256))),
            ([4, 8], [1, 4], Some((Order::ColMajor, 4))),
            ([4, 1], [7, 3], Some((Order::RowMajor, 7))),
            ([1, 8], [5, 4], Some((Order::ColMajor, 4))),
            ([4, 8], [16, 2], None),
            ([4, 8], [0, 1], Some((Order::RowMajor, 0))),
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

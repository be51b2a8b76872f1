//! What every kernel launch needs: rows of a tensor without a copy where its strides allow,
//! the vector width, the outputs, and the device's limits.

pub mod audit;
#[cfg(feature = "cuda")]
pub(crate) mod kept;
pub mod limits;
pub mod plans;

use crate::device::{self, Hardware};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;
use std::sync::atomic::{AtomicU64, Ordering};

/// A tensor as rows of its last dimension: element i of row r is at `r · stride + i`.
pub(crate) struct Rows {
    pub(crate) tensor: CubeTensor,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) stride: usize,
}

impl Rows {
    /// Copies only where the rows do not follow each other at one distance: pitched rows, slices
    /// of wider tensors and broadcast rows are read as they are.
    pub(crate) fn new(tensor: CubeTensor) -> Self {
        let tensor = burn_cubecl::kernel::untile(tensor);
        let stride = row_stride(tensor.meta.shape(), tensor.meta.strides());
        let tensor = if stride.is_some() { tensor } else { into_contiguous(tensor) };
        let shape = tensor.meta.shape();
        let width = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / width.max(1);
        Self { rows, width, stride: stride.unwrap_or(width), tensor }
    }

    /// Whether a result may take their memory, [as that of a tensor](in_place).
    pub(crate) fn in_place(&mut self, op: &'static str, name: &'static str) -> bool {
        let apart = self.rows <= 1 || self.stride >= self.width;
        apart && takeable(&mut self.tensor, op, name)
    }

    /// Whether every row can be read in vectors of `size` elements.
    fn fits(&self, size: usize) -> bool {
        self.width.is_multiple_of(size) && self.begins(size)
    }

    /// Whether every row begins where a vector of `size` elements may, however it ends.
    pub(crate) fn begins(&self, size: usize) -> bool {
        let offset = self.tensor.handle.offset_start.unwrap_or(0) as usize;
        (self.rows <= 1 || self.stride.is_multiple_of(size))
            && offset.is_multiple_of(size * self.tensor.dtype.size())
    }
}

/// The distance of rows, if there is one.
fn row_stride(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let last = shape.len() - 1;
    if strides[last] != 1 && shape[last] > 1 {
        return None;
    }
    let mut leading = (0..last).rev().filter(|i| shape[*i] != 1);
    let Some(inner) = leading.next() else { return Some(shape[last]) };
    let mut expected = strides[inner] * shape[inner];
    for i in leading {
        if strides[i] != expected {
            return None;
        }
        expected *= shape[i];
    }
    Some(strides[inner])
}

/// Bytes that must divide where a slice of a tensor begins and ends for Burn to keep a view: it copies
/// any other. None where there are no kernels.
pub fn view_alignment(device: &Device) -> Option<usize> {
    let client = device::client(device)?;
    Some(client.properties().memory.alignment as usize)
}

/// The widest vector, up to 16 bytes of `dtype`, in which all of them can be read.
pub(crate) fn vector_size(client: &Client, dtype: DType, tensors: &[&Rows]) -> usize {
    widest(client, dtype, |size| tensors.iter().all(|t| t.fits(size)))
}

/// The same where a row may have a few elements behind its last vector, which are accessed one by one: through a
/// second argument that is the same memory, which wgpu refuses.
pub(crate) fn vector_size_and_more(client: &Client, dtype: DType, tensors: &[&Rows]) -> usize {
    if !Hardware::of(client).ptx {
        return vector_size(client, dtype, tensors);
    }
    widest(client, dtype, |size| tensors.iter().all(|t| t.begins(size)))
}

fn widest(client: &Client, dtype: DType, takes: impl Fn(usize) -> bool) -> usize {
    client
        .io_optimized_vector_sizes(dtype.size())
        .filter(|size| size * dtype.size() <= 16 && takes(*size))
        .max()
        .unwrap_or(1)
}

static ALLOCATED: AtomicU64 = AtomicU64::new(0);

fn count(bytes: usize) {
    ALLOCATED.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Bytes that the kernels of this process have allocated so far, for results and workspace.
pub fn allocated() -> u64 {
    ALLOCATED.load(Ordering::Relaxed)
}

/// The address type that reaches the end of each tensor.
pub(crate) fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    tensors.iter().map(|t| t.required_address_type()).max().unwrap_or_default()
}

/// A contiguous tensor that the kernel is going to write whole.
pub fn output(
    like: &CubeTensor,
    op: &'static str,
    name: &'static str,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    let width = shape[shape.num_dims() - 1];
    output_pitched(like, op, name, shape, dtype, width)
}

/// One whose rows begin at multiples of 16 bytes.
pub(crate) fn output_aligned(
    like: &CubeTensor,
    op: &'static str,
    name: &'static str,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    let pitch = shape[shape.num_dims() - 1].next_multiple_of(16 / dtype.size());
    output_pitched(like, op, name, shape, dtype, pitch)
}

/// One whose rows are `pitch` elements apart.
pub(crate) fn output_pitched(
    like: &CubeTensor,
    op: &'static str,
    name: &'static str,
    shape: Shape,
    dtype: DType,
    pitch: usize,
) -> CubeTensor {
    if let Some(tensor) = audit::output(like, [op, name], &shape, dtype, pitch, true) {
        return tensor;
    }
    let rows = shape.num_elements() / shape[shape.num_dims() - 1].max(1);
    count(rows * pitch * dtype.size());
    let (client, device) = (like.client.clone(), like.device.clone());
    if pitch == shape[shape.num_dims() - 1] {
        return empty_device_contiguous_dtype(client, device, shape, dtype);
    }
    let meta = pitched(&shape, pitch);
    let handle = client.empty(meta.strides()[0] * shape[0] * dtype.size());
    CubeTensor::new(client, handle, meta, device, dtype)
}

/// A tensor with rows `pitch` elements apart and nothing else between them.
fn pitched(shape: &Shape, pitch: usize) -> Metadata {
    let mut strides = vec![1; shape.num_dims()];
    let mut step = pitch;
    for i in (0..strides.len() - 1).rev() {
        strides[i] = step;
        step *= shape[i];
    }
    Metadata::new(shape.clone(), strides)
}

/// Whether a result may take this tensor's memory: nobody else holds it. wgpu refuses a buffer that is
/// read and written in one launch. An audit wants outputs of its own, or that all is done in place, and then puts a copy
/// between guard bands where the tensor was.
pub fn in_place(tensor: &mut CubeTensor, op: &'static str, name: &'static str) -> bool {
    tensor.is_contiguous() && takeable(tensor, op, name)
}

fn takeable(tensor: &mut CubeTensor, op: &'static str, name: &'static str) -> bool {
    Hardware::of(&tensor.client).ptx && is_own(tensor, op, name)
}

/// Whether a kernel may change a part of this tensor, which it has as an output alone: nobody else holds it. Audits as those
/// of [results in place](in_place).
pub(crate) fn is_own(tensor: &mut CubeTensor, op: &'static str, name: &'static str) -> bool {
    audit::in_place(tensor, [op, name]).unwrap_or_else(|| tensor.can_mut())
}

/// Whether a tensor begins at a multiple of 16 bytes, as TMA wants it.
#[cfg(feature = "cuda")]
pub(crate) fn begins_at_16(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// A contiguous tensor of which a kernel writes what another reads, and no more.
pub(crate) fn scratch(
    like: &CubeTensor,
    op: &'static str,
    name: &'static str,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    let pitch = shape[shape.num_dims() - 1];
    let audited = audit::output(like, [op, name], &shape, dtype, pitch, false);
    audited.unwrap_or_else(|| unread(like, shape, dtype))
}

/// Stands in for an output that this launch does not write.
pub(crate) fn unused(like: &CubeTensor, dtype: DType) -> CubeTensor {
    unread(like, Shape::new([16]), dtype)
}

/// A contiguous tensor that a kernel may write, but nobody reads.
pub(crate) fn unread(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    count(shape.num_elements() * dtype.size());
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// A tensor of zeros, for gradients of nothing.
pub(crate) fn zeros(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    count(shape.num_elements() * dtype.size());
    zeros_client(like.client.clone(), like.device.clone(), shape, dtype)
}

/// Units of a plane if the device has plane operations, else 1.
pub(crate) fn plane_size(client: &Client) -> u32 {
    let hardware = &client.properties().hardware;
    let fixed = hardware.plane_size_min == hardware.plane_size_max;
    if fixed && client.features().plane.contains(Plane::Ops) { hardware.plane_size_max } else { 1 }
}

/// What tensors of one launch have in common, where one takes several.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Kind {
    pub(crate) dtype: DType,
    /// Elements of a vector.
    pub(crate) size: usize,
    pub(crate) strided: bool,
    pub(crate) address: AddressType,
}

/// Things in groups of up to `most` that have something in common, each in the order in which they were.
pub(crate) fn alike<T, K: PartialEq>(
    all: Vec<T>,
    kind: impl Fn(&T) -> K,
    most: usize,
) -> Vec<Vec<T>> {
    let mut groups: Vec<(K, Vec<T>)> = vec![];
    for one in all {
        let kind = kind(&one);
        match groups.iter_mut().find(|(of, group)| *of == kind && group.len() < most) {
            Some((_, group)) => group.push(one),
            None => groups.push((kind, vec![one])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The grid of one launch: at least `cubes` cubes within the device's limits; kernels check their position.
pub fn grid(client: &Client, cubes: usize) -> CubeCount {
    let widest = client.properties().hardware.max_cube_count.0 as usize;
    let x = cubes.min(widest);
    CubeCount::Static(x as u32, cubes.div_ceil(x.max(1)) as u32, 1)
}

/// Number of multiprocessors, or a guess where the device does not say.
pub(crate) fn multiprocessors(client: &Client) -> usize {
    let own = || Hardware::of(client).multiprocessors.unwrap_or(8);
    limits::now().multiprocessors.unwrap_or_else(own)
}

#[cfg(test)]
mod tests {
    use super::row_stride;

    #[test]
    fn rows_of_strided_tensors() {
        let cases: &[(&[usize], &[usize], Option<usize>)] = &[
            (&[4, 8], &[8, 1], Some(8)),
            (&[4, 8], &[512, 1], Some(512)),
            (&[2, 3, 8], &[48, 16, 1], Some(16)),
            (&[2, 3, 8], &[64, 16, 1], None),
            (&[2, 1, 8], &[64, 5, 1], Some(64)),
            (&[1, 1, 8], &[9, 9, 1], Some(8)),
            (&[4, 8], &[1, 4], None),
            (&[4, 1], &[1, 7], Some(1)),
            (&[4, 8], &[0, 1], Some(0)),
            (&[8], &[1], Some(8)),
        ];
        for (shape, strides, expected) in cases {
            assert_eq!(row_stride(shape, strides), *expected, "{shape:?} {strides:?}");
        }
    }
}

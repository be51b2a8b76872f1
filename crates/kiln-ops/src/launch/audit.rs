//! An audit of what kernels write: outputs are handed out poisoned and between guard bands.
//!
//! While an audit runs, every kernel output stands inside a larger buffer that is filled with a
//! NaN pattern. Afterwards an element that still holds the pattern was never written, and a guard
//! that does not was written out of bounds. One audit runs at a time in a process.

use crate::device::Hardware;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::full_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// NaN as f32, as bf16 and as f16, and not one that arithmetic makes.
const POISON: u16 = 0x7FE5;
/// Bytes on either side; a multiple of every device's alignment.
const GUARD: usize = 1024;

static ACTIVE: AtomicBool = AtomicBool::new(false);
/// Whether the running audit wants results in the place of inputs.
static IN_PLACE: AtomicBool = AtomicBool::new(false);
/// How often a kernel asked the running audit for the place of an input, and got it if that is what the audit wants.
static PLACES: AtomicUsize = AtomicUsize::new(0);
static RUNNING: Mutex<()> = Mutex::new(());
static RECORDS: Mutex<Vec<Record>> = Mutex::new(Vec::new());

struct Record {
    op: &'static str,
    name: &'static str,
    client: Client,
    whole: Handle,
    /// Of a row, and from one row to the next.
    row: [usize; 2],
    bytes: usize,
    dtype: DType,
    shape: Vec<usize>,
    /// Every element has to be written.
    full: bool,
}

/// What an audit found of one output.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Operator.
    pub op: &'static str,
    /// Name of the output.
    pub output: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Every element has to be written: it is no workspace.
    pub full: bool,
    /// Number of elements that were never written.
    pub unwritten: usize,
    /// Flat index of the first of them.
    pub first_unwritten: Option<usize>,
    /// Flat index of the last of them.
    pub last_unwritten: Option<usize>,
    /// Bytes of the guard bands that were written.
    pub guard_bytes: usize,
    /// The kernel's error, if it did not run.
    pub error: Option<String>,
}

impl Finding {
    /// Whether all was written and nothing else.
    pub fn clean(&self) -> bool {
        self.unwritten == 0 && self.guard_bytes == 0 && self.error.is_none()
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} `{}` {:?}: ", self.op, self.output, self.shape)?;
        if let Some(error) = &self.error {
            return write!(f, "did not run: {error}");
        }
        match (self.first_unwritten, self.last_unwritten) {
            (Some(first), Some(last)) => write!(
                f,
                "{} elements never written, from {:?} to {:?}",
                self.unwritten,
                index(&self.shape, first),
                index(&self.shape, last)
            )?,
            _ => write!(f, "every element written")?,
        }
        if self.guard_bytes > 0 {
            write!(f, ", {} bytes written outside it", self.guard_bytes)?;
        }
        Ok(())
    }
}

/// Position of a flat index.
fn index(shape: &[usize], mut flat: usize) -> Vec<usize> {
    let mut position = vec![0; shape.len()];
    for (place, size) in position.iter_mut().zip(shape).rev() {
        *place = flat % size;
        flat /= size;
    }
    position
}

/// A running audit.
pub struct Audit {
    /// Held until the audit ends.
    _running: MutexGuard<'static, ()>,
}

impl Audit {
    /// Begins an audit; waits for a running one.
    pub fn begin() -> Self {
        Self::with(false)
    }

    /// Begins one in which every kernel that can writes its result in the place of an input, of a copy that stands between
    /// guard bands, whoever holds the input.
    pub fn begin_in_place() -> Self {
        Self::with(true)
    }

    fn with(in_place: bool) -> Self {
        let running = RUNNING.lock().unwrap_or_else(|e| e.into_inner());
        records().clear();
        IN_PLACE.store(in_place, Ordering::SeqCst);
        PLACES.store(0, Ordering::SeqCst);
        ACTIVE.store(true, Ordering::SeqCst);
        Self { _running: running }
    }

    /// How often a kernel could have written its result in the place of an input; in an audit that wants that, has.
    pub fn places(&self) -> usize {
        PLACES.load(Ordering::SeqCst)
    }

    /// Ends it: one finding for each kernel output. The device must have been synchronised.
    pub fn finish(self) -> Vec<Finding> {
        ACTIVE.store(false, Ordering::SeqCst);
        std::mem::take(&mut *records()).into_iter().map(Record::inspect).collect()
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        ACTIVE.store(false, Ordering::SeqCst);
    }
}

fn records() -> MutexGuard<'static, Vec<Record>> {
    RECORDS.lock().unwrap_or_else(|e| e.into_inner())
}

/// Whether an audit runs.
fn running() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

/// Whether a result has to be written in the place of a tensor, while an audit runs: then a copy stands there.
pub(crate) fn in_place(tensor: &mut CubeTensor, [op, name]: [&'static str; 2]) -> Option<bool> {
    if !running() {
        return None;
    }
    if !IN_PLACE.load(Ordering::SeqCst) {
        PLACES.fetch_add(1, Ordering::SeqCst);
        return Some(false);
    }
    let client = tensor.client.clone();
    // What cannot be read is an error of the kernel that should have made it.
    let Ok(bytes) = client.read_one(tensor.handle.clone()) else { return Some(false) };
    let row = row(tensor.meta.shape(), tensor.meta.strides(), tensor.dtype.size(), bytes.len());
    let width = (row[0] / tensor.dtype.size()).max(1);
    // Behind the last row of an allocation is what nobody writes.
    let size = tensor.meta.num_elements() / width * row[1];
    let kept = size.min(bytes.len());
    let padded = size.next_multiple_of(GUARD);
    let mut all = POISON.to_ne_bytes().repeat((padded + 2 * GUARD) / 2);
    all[GUARD..GUARD + kept].copy_from_slice(&bytes[..kept]);
    let whole = client.create_from_slice(&all);
    tensor.handle = inside(&whole, &client, padded - size);
    records().push(Record {
        op,
        name,
        client,
        whole,
        row,
        bytes: size,
        dtype: tensor.dtype,
        shape: tensor.meta.shape().to_vec(),
        full: true,
    });
    PLACES.fetch_add(1, Ordering::SeqCst);
    Some(true)
}

/// What stands between the guard bands. Elsewhere than on CUDA it reaches to the end of the one behind it, since WebGPU drops
/// what is written outside a binding.
fn inside(whole: &Handle, client: &Client, more: usize) -> Handle {
    let end = if Hardware::of(client).ptx { GUARD + more } else { 0 };
    whole.clone().offset_start(GUARD as u64).offset_end(end as u64)
}

/// A poisoned output between guard bands, while an audit runs; `full`: every element has to be written.
pub(crate) fn output(
    like: &CubeTensor,
    [op, name]: [&'static str; 2],
    shape: &Shape,
    dtype: DType,
    pitch: usize,
    full: bool,
) -> Option<CubeTensor> {
    if !running() {
        return None;
    }
    let width = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / width.max(1);
    let row = [width, pitch].map(|elements| elements * dtype.size());
    let bytes = rows * row[1];
    let padded = bytes.next_multiple_of(GUARD);
    // On the device: outputs of gigabytes would take seconds to make here.
    let whole = full_device_dtype(
        like.client.clone(),
        Shape::new([(padded + 2 * GUARD) / 4]),
        like.device.clone(),
        InputScalar::new(u32::from(POISON) * 0x10001, dtype_to_elem_type(DType::U32)),
        DType::U32,
    )
    .handle;
    let inside = inside(&whole, &like.client, padded - bytes);
    records().push(Record {
        op,
        name,
        client: like.client.clone(),
        whole,
        row,
        bytes,
        dtype,
        shape: shape.to_vec(),
        full,
    });
    let (client, device) = (like.client.clone(), like.device.clone());
    Some(CubeTensor::new(client, inside, super::pitched(shape, pitch), device, dtype))
}

/// Bytes of a row, and from one row to the next, of a tensor in memory of so many bytes. A single row owns the gap behind
/// it, too.
fn row(shape: &[usize], strides: &[usize], element: usize, bytes: usize) -> [usize; 2] {
    let last = shape.len() - 1;
    let (width, rows) = (shape[last], shape[..last].iter().product::<usize>());
    let pitch = match last {
        0 => width,
        _ if rows > 1 => super::row_stride(shape, strides).unwrap_or(width),
        _ => strides[last - 1].clamp(width, (bytes / element).max(width)),
    };
    [width * element, pitch * element]
}

impl Record {
    fn inspect(self) -> Finding {
        let mut finding = Finding {
            op: self.op,
            output: self.name,
            shape: self.shape,
            full: self.full,
            unwritten: 0,
            first_unwritten: None,
            last_unwritten: None,
            guard_bytes: 0,
            error: None,
        };
        let bytes = match self.client.read_one(self.whole) {
            Ok(bytes) => bytes,
            Err(error) => {
                finding.error =
                    Some(format!("{error:?}").lines().next().unwrap_or_default().into());
                return finding;
            }
        };
        let poison = POISON.to_ne_bytes();
        let untouched = |i: &usize| bytes[*i] == poison[i % 2];
        let outside = (0..GUARD).chain(GUARD + self.bytes..bytes.len());
        finding.guard_bytes = outside.filter(|i| !untouched(i)).count();
        if !self.full {
            return finding;
        }
        let [width, pitch] = self.row;
        let per_row = width / self.dtype.size();
        for row in 0..self.bytes / pitch.max(1) {
            // Rows own the gap to the next one: TMA stores 16 bytes at a time.
            let start = GUARD + row * pitch;
            let row_bytes = &bytes[start..start + width];
            // Nothing of the pattern is the rule, and this loop is made of vectors.
            let halves = row_bytes.as_chunks::<2>().0;
            if !halves.iter().fold(false, |found, half| found | (*half == poison)) {
                continue;
            }
            for (i, element) in row_bytes.chunks_exact(self.dtype.size()).enumerate() {
                if element.chunks_exact(2).all(|half| half == poison) {
                    finding.unwritten += 1;
                    finding.first_unwritten.get_or_insert(row * per_row + i);
                    finding.last_unwritten = Some(row * per_row + i);
                }
            }
        }
        finding
    }
}

#[cfg(test)]
mod tests {
    use super::row;

    #[test]
    fn rows_in_memory() {
        assert_eq!(row(&[3, 7], &[8, 1], 2, 48), [14, 16]);
        assert_eq!(row(&[2, 3, 7], &[21, 7, 1], 4, 256), [28, 28]);
        // One row, of an allocation with rows at multiples of 16 bytes, of its own, and cut out of a wider one.
        assert_eq!(row(&[1, 1, 9], &[16, 16, 1], 2, 32), [18, 32]);
        assert_eq!(row(&[1, 9], &[9, 1], 2, 32), [18, 18]);
        assert_eq!(row(&[1, 9], &[1000, 1], 2, 18), [18, 18]);
        assert_eq!(row(&[5], &[1], 4, 32), [20, 20]);
    }
}

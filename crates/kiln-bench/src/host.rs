//! Tensors on the host in float64, and their way to a device and back.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_ops::oracle::{Bounded, Number, Rounding};
use rand::{Rng, RngExt};

/// A tensor on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor<N = f64> {
    /// Shape.
    pub shape: Vec<usize>,
    /// Row-major numbers; integers are exact.
    pub values: Vec<N>,
}

/// A tensor of an oracle: what a result should be, and how far it may be off.
pub type BoundedTensor = HostTensor<Bounded>;

impl<N> HostTensor<N> {
    /// From a shape and its numbers.
    pub fn new(shape: impl Into<Vec<usize>>, values: Vec<N>) -> Self {
        let shape = shape.into();
        debug_assert_eq!(shape.iter().product::<usize>(), values.len());
        Self { shape, values }
    }
}

impl<N: Number> HostTensor<N> {
    /// The numbers as integers.
    pub fn integers(&self) -> Vec<i64> {
        self.values.iter().map(|v| v.value() as i64).collect()
    }
}

impl HostTensor {
    /// Normal numbers around `mean`.
    pub fn normal(shape: &[usize], mean: f64, rng: &mut impl Rng) -> Self {
        let n = shape.iter().product();
        let mut spare = None;
        let values = (0..n).map(|_| mean + normal(rng, &mut spare)).collect();
        Self::new(shape, values)
    }

    /// As an input of an oracle.
    pub fn bounded(&self, rounding: Rounding) -> BoundedTensor {
        BoundedTensor::new(self.shape.as_slice(), rounding.numbers(&self.values))
    }

    /// As an input of an oracle that is only asked for values.
    pub fn exact(&self) -> BoundedTensor {
        let values = self.values.iter().map(|value| Bounded::exact(*value)).collect();
        BoundedTensor::new(self.shape.as_slice(), values)
    }

    /// As `dtype` holds it.
    pub fn rounded(mut self, dtype: DType) -> Self {
        let data = TensorData::new(self.values, self.shape.clone()).convert_dtype(dtype);
        self.values = data.iter::<f64>().collect();
        self
    }
}

/// Σ y·dy in f32: a scalar whose gradient at `y` is `dy`.
pub(crate) fn weighted(y: Tensor<1>, dy: Tensor<1>) -> Tensor<1> {
    (y.cast(DType::F32) * dy.cast(DType::F32)).sum()
}

/// Box and Muller.
fn normal(rng: &mut impl Rng, spare: &mut Option<f64>) -> f64 {
    if let Some(value) = spare.take() {
        return value;
    }
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * rng.random::<f64>()).sin_cos();
    *spare = Some(radius * sin);
    radius * cos
}

/// How a float input lies in memory. Around it, and between its rows where they are cut out of wider ones, is what no
/// kernel may read, NaN, as far as Burn keeps a view of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// As the device allocates it; CUDA pitches rows.
    Allocated,
    /// Rows cut out of a wider tensor where Burn keeps a view: the operator sees a distance of rows
    /// that is not their width.
    Cut,
    /// Rows cut out at an odd column, which Burn copies for the operator.
    OddCut,
}

impl Layout {
    /// Rows before and behind those of an input of this width, and columns on either side of a row.
    fn rim(self, width: usize, dtype: DType, device: &Device) -> [usize; 2] {
        let alignment = view_alignment(device);
        let columns = match self {
            Self::Allocated => 0,
            Self::Cut => alignment / dtype.size(),
            Self::OddCut => 3,
        };
        let wide = width + 2 * columns;
        // As few as end where a view may begin. Of rows that are wide and odd that would be much.
        let rows =
            (1..=alignment).find(|rows| (rows * wide * dtype.size()).is_multiple_of(alignment));
        let rows = rows.filter(|rows| rows * wide <= WIDEST_RIM);
        [rows.unwrap_or(0), columns]
    }
}

/// Elements on either side of an input, at most.
const WIDEST_RIM: usize = 1 << 18;
/// An integer around those of an input: no class, no row of anything.
const POISON: i64 = 0x7FE5_7FE5;

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Allocated => "",
            Self::Cut => ", cut rows",
            Self::OddCut => ", rows cut at an odd column",
        })
    }
}

/// Bytes that must divide where a cut begins and ends, or Burn copies it.
fn view_alignment(device: &Device) -> usize {
    #[cfg(feature = "cube")]
    if let Some(alignment) = kiln_ops::launch::view_alignment(device) {
        return alignment;
    }
    let _ = device;
    32 // The CPU keeps views of anything.
}

/// A tensor on a device, as an operator's input.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // a handful of them at a time
pub enum Input {
    /// Rows of the last dimension, cut from `leaf`, which gets the gradient.
    Float {
        /// What was uploaded, with what stands around the rows.
        leaf: Tensor<2>,
        /// The rows of the input.
        rows: Tensor<2>,
        /// Shape of the input.
        shape: Vec<usize>,
    },
    /// Integers.
    Int {
        /// What was uploaded, with what stands around them.
        leaf: Tensor<1, Int>,
        /// Flat.
        flat: Tensor<1, Int>,
        /// Shape of the input.
        shape: Vec<usize>,
    },
}

impl Input {
    /// A matrix that is on the device already.
    pub(crate) fn of(matrix: Tensor<2>) -> Self {
        let shape = matrix.dims().to_vec();
        Self::Float { leaf: matrix.clone(), rows: matrix, shape }
    }

    /// Uploads a float input; `gradient` asks for its gradient.
    pub fn float(
        host: &HostTensor,
        dtype: DType,
        layout: Layout,
        gradient: bool,
        device: &Device,
    ) -> Self {
        let (data, [outside, pad]) = surrounded(host, dtype, layout, device);
        let mut leaf = Tensor::<2>::from_data(data, (device, dtype));
        if gradient {
            leaf = leaf.autodiff().require_grad();
        }
        let [rows, wide] = leaf.dims();
        let inside = [outside..rows - outside, pad..wide - pad];
        let rows = if outside + pad > 0 { leaf.clone().slice(inside) } else { leaf.clone() };
        Self::Float { leaf, rows, shape: host.shape.clone() }
    }

    /// Whether what was uploaded by [`float`](Self::float) or [`int`](Self::int) is still, bit for bit, what it was, and what stands around it.
    ///
    /// # Errors
    ///
    /// Says what is not, or that it cannot be read.
    pub fn unchanged(
        &self,
        host: &HostTensor,
        dtype: DType,
        layout: Layout,
        device: &Device,
    ) -> Result<(), String> {
        let changed = |inside: bool| match inside {
            true => Err("is not what it was before the call".to_string()),
            false => Err("had something written around it".to_string()),
        };
        match self {
            Self::Float { leaf, .. } => {
                let (uploaded, rim) = surrounded(host, dtype, layout, device);
                let found = leaf.try_to_data().map_err(|e| one_line(&format!("{e:?}")))?;
                let pairs = uploaded.as_bytes().iter().zip(found.as_bytes());
                let Some(byte) = pairs.clone().position(|(a, b)| a != b) else { return Ok(()) };
                let [rows, wide] = leaf.dims();
                let element = byte / dtype.size();
                let inside = |at: usize, size: usize, rim: usize| (rim..size - rim).contains(&at);
                changed(
                    inside(element / wide, rows, rim[0]) && inside(element % wide, wide, rim[1]),
                )
            }
            Self::Int { leaf, flat, .. } => {
                let (uploaded, outside) = surrounded_integers(host, device);
                let found = leaf.try_to_data().map_err(|e| one_line(&format!("{e:?}")))?;
                let mut pairs = uploaded.iter::<i64>().zip(found.iter::<i64>());
                match pairs.position(|(a, b)| a != b) {
                    Some(at) => changed((outside..outside + flat.dims()[0]).contains(&at)),
                    None => Ok(()),
                }
            }
        }
    }

    /// What is on the device.
    ///
    /// # Errors
    ///
    /// Says that it cannot be read.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, String> {
        let data = match self {
            Self::Float { leaf, .. } => leaf.try_to_data(),
            Self::Int { leaf, .. } => leaf.try_to_data(),
        };
        Ok(data.map_err(|e| one_line(&format!("{e:?}")))?.as_bytes().to_vec())
    }

    /// Uploads an integer input.
    pub fn int(host: &HostTensor, gradient: bool, device: &Device) -> Self {
        let (data, outside) = surrounded_integers(host, device);
        let leaf = Tensor::<1, Int>::from_data(data, device);
        let leaf = if gradient { leaf.autodiff() } else { leaf };
        let count = leaf.dims()[0] - 2 * outside;
        let flat = if outside > 0 { leaf.clone().narrow(0, outside, count) } else { leaf.clone() };
        Self::Int { leaf, flat, shape: host.shape.clone() }
    }

    /// An input without autodiff whose rows are not cut, as a leaf that gets a gradient.
    pub fn tracked(&self) -> Self {
        match self.clone() {
            Self::Float { leaf, shape, .. } => {
                let leaf = leaf.autodiff().require_grad();
                Self::Float { rows: leaf.clone(), leaf, shape }
            }
            Self::Int { flat, shape, .. } => {
                let flat = flat.autodiff();
                Self::Int { leaf: flat.clone(), flat, shape }
            }
        }
    }

    /// Shape of the input.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Float { shape, .. } | Self::Int { shape, .. } => shape,
        }
    }
}

/// Rows of the last dimension, and how wide they are.
fn as_rows(shape: &[usize]) -> [usize; 2] {
    let (width, leading) = shape.split_last().unwrap_or((&1, &[]));
    [leading.iter().product(), *width]
}

/// What is uploaded of an input, and how many rows and columns of it on either side are not the input's.
fn surrounded(
    host: &HostTensor,
    dtype: DType,
    layout: Layout,
    device: &Device,
) -> (TensorData, [usize; 2]) {
    let [rows, width] = as_rows(&host.shape);
    // Nothing cannot be cut out of something.
    let [outside, pad] = if rows * width > 0 { layout.rim(width, dtype, device) } else { [0, 0] };
    let wide = width + 2 * pad;
    let mut values = vec![f64::NAN; (rows + 2 * outside) * wide];
    let inside = values.chunks_mut(wide.max(1)).skip(outside);
    for (whole, row) in inside.zip(host.values.chunks(width.max(1))) {
        whole[pad..pad + width].copy_from_slice(row);
    }
    let data = TensorData::new(values, [rows + 2 * outside, wide]).convert_dtype(dtype);
    (data, [outside, pad])
}

/// The same of integers.
fn surrounded_integers(host: &HostTensor, device: &Device) -> (TensorData, usize) {
    // An integer has at least four bytes.
    let outside = if host.values.is_empty() { 0 } else { view_alignment(device) / 4 };
    let poison = std::iter::repeat_n(POISON, outside);
    let values: Vec<i64> = poison.clone().chain(host.integers()).chain(poison).collect();
    (TensorData::from(values.as_slice()), outside)
}

/// Flat numbers of a device tensor, or why they could not be read.
pub fn download<const D: usize>(tensor: &Tensor<D>) -> Result<Vec<f64>, String> {
    let data = tensor.try_to_data().map_err(|e| one_line(&format!("{e:?}")))?;
    Ok(data.iter::<f64>().collect())
}

/// The gradient of an input, without the columns it was cut from.
pub fn gradient(
    leaf: &Tensor<2>,
    shape: &[usize],
    grads: &burn::tensor::Gradients,
) -> Result<Option<HostTensor>, String> {
    let Some(grad) = leaf.grad(grads) else { return Ok(None) };
    if grad.dtype() != leaf.dtype() {
        return Err(format!("a gradient is {:?}, not {:?}", grad.dtype(), leaf.dtype()));
    }
    let (at, own) = (grad.device(), leaf.clone().inner().device());
    if at != own {
        return Err(format!("a gradient is on {at:?}, not on {own:?}"));
    }
    let [rows, width] = as_rows(shape);
    let [all, wide] = grad.dims();
    let (outside, pad) = ((all - rows) / 2, (wide - width) / 2);
    let values = download(&grad)?;
    let inside = values.chunks(wide.max(1)).skip(outside).take(rows);
    let values = inside.flat_map(|row| row[pad..pad + width].to_vec()).collect();
    Ok(Some(HostTensor::new(shape, values)))
}

/// The gradients of all float inputs, whose leaves are not cut.
pub(crate) fn gradients(
    inputs: &[Input],
    gradients: &burn::tensor::Gradients,
) -> Result<Vec<Tensor<2>>, String> {
    let leaves = inputs.iter().filter_map(|input| match input {
        Input::Float { leaf, .. } => Some(leaf),
        Input::Int { .. } => None,
    });
    let of = |leaf: &Tensor<2>| match leaf.grad(gradients) {
        // Burn keeps none for an empty leaf.
        None if leaf.dims().contains(&0) => Ok(leaf.clone().inner()),
        gradient => gradient.ok_or_else(|| "an input has no gradient".to_string()),
    };
    leaves.map(of).collect()
}

/// A text on one line; of a long one the beginning, which names the cause.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().take(60).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_that_are_overwritten_are_seen() {
        let device = kiln_ops::device::open("cpu").expect("the CPU is always there").device;
        let host = HostTensor::new([2, 3], (0..6).map(f64::from).collect());
        let Input::Int { leaf, flat, shape } = Input::int(&host, false, &device) else {
            unreachable!("integers")
        };
        let first = (leaf.dims()[0] - flat.dims()[0]) / 2;
        assert!(first > 0, "nothing stands around them");
        let overwritten = |at: usize| {
            let other = Tensor::<1, Int>::full([1], 9, &device);
            let leaf = leaf.clone().slice_assign(at..at + 1, other);
            let input = Input::Int { leaf, flat: flat.clone(), shape: shape.clone() };
            input.unchanged(&host, DType::I64, Layout::Allocated, &device)
        };
        for at in first..first + 6 {
            assert_eq!(overwritten(at).unwrap_err(), "is not what it was before the call");
        }
        for at in [0, first - 1, first + 6, leaf.dims()[0] - 1] {
            assert_eq!(overwritten(at).unwrap_err(), "had something written around it");
        }
        let kept = Input::Int { leaf, flat, shape };
        assert_eq!(kept.unchanged(&host, DType::I64, Layout::Allocated, &device), Ok(()));
    }
}

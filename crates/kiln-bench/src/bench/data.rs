//! What a case is timed on: which numbers its tensors hold, and the file that Kiln and its peers read them
//! from.
//!
//! A file is that of one operator, shape and element type and has the names of `kiln op`: inputs by their
//! names, the cotangent of an output as `grad.NAME`. Normal numbers are pieced together from a block of 2²⁰:
//! each piece of 4096 begins at a random place of the block and has a random sign. Drawing every number would
//! take minutes for the largest shapes, and nothing that is timed sees the difference.

use crate::host::{HostTensor, Input};
use crate::op_io::{self, Encoded};
use crate::registry::{Case, Holds, Operator};
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::{Dtype, SafeTensors};
use serde::Serialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Seed of the data, with and without a file.
pub(super) const SEED: u64 = 7;
/// Numbers that are drawn for a file.
const BLOCK: usize = 1 << 20;
/// Numbers that are taken of them at once.
const PIECE: usize = 1 << 12;

/// A tensor of a case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Part {
    /// Name: that of an input, or `grad.NAME` for the cotangent of an output.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// What it holds.
    pub holds: Numbers,
    /// f32 whatever the element type of the operation.
    pub f32: bool,
}

/// What a tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Numbers {
    /// Normal numbers.
    Normal {
        /// Their mean.
        mean: f64,
        /// Their standard deviation.
        deviation: f64,
    },
    /// Integers from 0 to one below this.
    Classes(usize),
    /// The same, the last a little more often than all others together.
    MostlyLast(usize),
    /// Evenly from 0 to 1.
    Shares,
    /// 0 to this, in equal steps.
    Ends(usize),
    /// The cotangent of a loss: 1.
    One,
}

impl Part {
    /// Its element type if that of the operation is `dtype`.
    fn dtype(&self, dtype: DType) -> DType {
        match self.holds {
            Numbers::Classes(_) | Numbers::MostlyLast(_) | Numbers::Ends(_) => DType::I64,
            _ if self.f32 => DType::F32,
            _ => dtype,
        }
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The tensors of a case: the inputs in the order of the spec, then the cotangents of the outputs.
///
/// # Errors
///
/// One line if the case does not fit the operator.
pub fn parts(op: &dyn Operator, case: &Case) -> Result<Vec<Part>, String> {
    let spec = op.spec();
    let (dims, attributes) = (spec.dims(&case.shapes)?, case.attributes(spec)?);
    let inputs = spec.inputs.iter().zip(&case.shapes).map(|(input, shape)| {
        let scale = input.scale(shape);
        let holds = match input.holds {
            Holds::Classes(dim) | Holds::Rows(dim) | Holds::RowsOrNone(dim) => {
                Numbers::Classes(dims[dim][0])
            }
            Holds::Codes(count) => Numbers::Classes(count),
            Holds::MostlyLast(count) => Numbers::MostlyLast(count),
            Holds::Shares => Numbers::Shares,
            Holds::Ends(dim) => Numbers::Ends(dims[dim][0]),
            _ => Numbers::Normal { mean: input.mean * scale, deviation: scale },
        };
        let f32 = input.holds.is_f32();
        Ok(Part { name: input.name.into(), shape: shape.clone(), holds, f32 })
    });
    let cotangents = spec.outputs.iter().filter(|output| spec.differentiable && !output.constant);
    let cotangents = cotangents.map(|output| {
        let shape = op.output_shape(output, &dims, &attributes)?;
        let holds = match shape.iter().product::<usize>() {
            1 => Numbers::One,
            _ => Numbers::Normal { mean: 0.1, deviation: 1.0 },
        };
        Ok(Part { name: format!("grad.{}", output.name), shape, holds, f32: output.f32 })
    });
    inputs.chain(cotangents).collect()
}

/// `n` ends of equal parts of `last`, the first 0.
fn ends(n: usize, last: usize) -> impl Iterator<Item = usize> {
    (0..n).map(move |i| i * last / (n - 1).max(1))
}

/// Name of the file of a case, without the element type and the ending.
pub fn file_stem(op: &dyn Operator, case: &Case) -> String {
    let shape = case.to_string().replace('×', "x").replace(", ", "-").replace([' ', '='], "-");
    format!("{}-{shape}", op.spec().name)
}

/// The tensors of a case from its file.
pub struct Data {
    tensors: HashMap<String, Encoded>,
}

impl Data {
    /// Reads the file of a case in `folder`, which is written first if it is not there.
    ///
    /// # Errors
    ///
    /// One line if the file cannot be read or written, or is not that of the case.
    pub fn open(
        folder: &Path,
        op: &dyn Operator,
        case: &Case,
        dtype: DType,
    ) -> Result<Self, String> {
        let parts = parts(op, case)?;
        let path = path(folder, op, case, dtype);
        let failed = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let metadata = [("op", op.spec().name.to_string()), ("seed", SEED.to_string())];
        let metadata: HashMap<String, String> =
            metadata.map(|(key, value)| (key.to_string(), value)).into();
        if !path.exists() {
            std::fs::create_dir_all(folder).map_err(|e| failed(&e))?;
            let tensors = generate(&parts, dtype);
            op_io::write(&path, &tensors, metadata)?;
            return Ok(Self { tensors: tensors.into_iter().collect() });
        }
        let bytes = std::fs::read(&path).map_err(|e| failed(&e))?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| failed(&e))?;
        if *header.metadata() != Some(metadata) {
            return Err(failed(&"was made from another seed or by another program: remove it"));
        }
        let file = SafeTensors::deserialize(&bytes).map_err(|e| failed(&e))?;
        let mut tensors = HashMap::new();
        for part in &parts {
            let wanted = (stored(part.dtype(dtype)), part.shape.as_slice());
            let view = file.tensor(&part.name).ok();
            let view = view.filter(|view| (view.dtype(), view.shape()) == wanted);
            let view = view.ok_or_else(|| {
                failed(&format!(
                    "has no `{}` of {:?} {:?}: remove it",
                    part.name, wanted.0, wanted.1
                ))
            })?;
            let encoded = (view.dtype(), part.shape.clone(), view.data().to_vec());
            tensors.insert(part.name.clone(), encoded);
        }
        Ok(Self { tensors })
    }

    /// The bytes of a tensor, for the set of this turn: its flat numbers, each set beginning another share
    /// of them further on.
    fn turned(&self, part: &Part, turn: usize, sets: usize) -> Vec<u8> {
        let (_, _, bytes) = &self.tensors[&part.name];
        let elements = part.elements();
        let start = turn * elements / sets * (bytes.len() / elements.max(1));
        [&bytes[start..], &bytes[..start]].concat()
    }
}

/// Where the file of a case is.
fn path(folder: &Path, op: &dyn Operator, case: &Case, dtype: DType) -> PathBuf {
    let dtype = format!("{dtype:?}").to_lowercase();
    folder.join(format!("{}-{dtype}.safetensors", file_stem(op, case)))
}

/// The element type as safetensors calls it.
fn stored(dtype: DType) -> Dtype {
    match dtype {
        DType::I64 => Dtype::I64,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// The tensors of a file.
fn generate(parts: &[Part], dtype: DType) -> Vec<(String, Encoded)> {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let block = HostTensor::normal(&[BLOCK], 0.0, &mut rng).values;
    let block: Vec<f32> = block.into_iter().map(|value| value as f32).collect();
    let mut tensors = vec![];
    for part in parts {
        let (n, own) = (part.elements(), part.dtype(dtype));
        let mut bytes = Vec::with_capacity(n * own.size());
        match part.holds {
            Numbers::One => extend(&mut bytes, [1.0].into_iter(), own),
            Numbers::Shares => {
                let shares: Vec<f32> = (0..n).map(|_| rng.random()).collect();
                extend(&mut bytes, shares.into_iter(), own);
            }
            Numbers::Classes(classes) => {
                for _ in 0..n {
                    bytes.extend_from_slice(&rng.random_range(0..classes as i64).to_le_bytes());
                }
            }
            Numbers::MostlyLast(count) => {
                for _ in 0..n {
                    let code = rng.random_range(0..2 * count as i64 - 1).min(count as i64 - 1);
                    bytes.extend_from_slice(&code.to_le_bytes());
                }
            }
            Numbers::Ends(last) => {
                for end in ends(n, last) {
                    bytes.extend_from_slice(&(end as i64).to_le_bytes());
                }
            }
            Numbers::Normal { mean, deviation } => {
                for done in (0..n).step_by(PIECE) {
                    let start = rng.random_range(0..=BLOCK - PIECE);
                    let sign = if rng.random::<bool>() { 1.0 } else { -1.0 };
                    let (mean, factor) = (mean as f32, (sign * deviation) as f32);
                    let piece = &block[start..start + PIECE.min(n - done)];
                    extend(&mut bytes, piece.iter().map(|value| mean + factor * value), own);
                }
            }
        }
        tensors.push((part.name.clone(), (stored(own), part.shape.clone(), bytes)));
    }
    tensors
}

/// Adds numbers as an element type has them.
fn extend(bytes: &mut Vec<u8>, values: impl Iterator<Item = f32>, dtype: DType) {
    match dtype {
        DType::BF16 => bytes.extend(values.flat_map(|x| bf16::from_f32(x).to_le_bytes())),
        DType::F16 => bytes.extend(values.flat_map(|x| f16::from_f32(x).to_le_bytes())),
        _ => bytes.extend(values.flat_map(f32::to_le_bytes)),
    }
}

/// Makes the sets of tensors that a pass rotates through: from a file, or on the device.
pub(crate) struct Maker<'a> {
    data: Option<&'a Data>,
    dtype: DType,
    device: &'a Device,
    sets: usize,
    rng: ChaCha8Rng,
}

impl<'a> Maker<'a> {
    pub(crate) fn new(
        data: Option<&'a Data>,
        dtype: DType,
        device: &'a Device,
        sets: usize,
    ) -> Self {
        device.seed(SEED);
        Self { data, dtype, device, sets, rng: ChaCha8Rng::seed_from_u64(SEED) }
    }

    /// An input, without autodiff.
    pub(crate) fn input(&mut self, part: &Part, turn: usize) -> Input {
        let n = part.elements();
        let integers = |values: Vec<i64>| {
            let flat = Tensor::from_data(TensorData::from(values.as_slice()), self.device);
            Input::Int { leaf: flat.clone(), flat, shape: part.shape.clone() }
        };
        if let Numbers::Ends(last) = part.holds {
            return integers(ends(n, last).map(|end| end as i64).collect());
        }
        // Numbers from `most` on stand for the last that there is.
        let (classes, most) = match part.holds {
            Numbers::Classes(classes) => (classes, classes),
            Numbers::MostlyLast(count) => (2 * count - 1, count),
            _ => {
                let width = part.shape.last().copied().unwrap_or(1);
                let rows = self.float(part, [n / width.max(1), width], turn);
                return Input::Float { leaf: rows.clone(), rows, shape: part.shape.clone() };
            }
        };
        integers(match self.data {
            Some(data) => {
                let bytes = data.turned(part, turn, self.sets);
                bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
            }
            None => {
                let one = |_| self.rng.random_range(0..classes).min(most - 1) as i64;
                (0..n).map(one).collect()
            }
        })
    }

    /// A cotangent, flat and without autodiff.
    pub(crate) fn cotangent(&self, part: &Part) -> Tensor<1> {
        self.float(part, [part.elements()], 0)
    }

    fn float<const D: usize>(&self, part: &Part, shape: [usize; D], turn: usize) -> Tensor<D> {
        let dtype = part.dtype(self.dtype);
        let to = (self.device, dtype);
        match (self.data, part.holds) {
            (Some(data), _) => {
                let bytes = data.turned(part, turn, self.sets);
                Tensor::from_data(TensorData::from_bytes_vec(bytes, shape, dtype), to)
            }
            (None, Numbers::Normal { mean, deviation }) => {
                Tensor::random(shape, Distribution::Normal(mean, deviation), to)
            }
            (None, Numbers::Shares) => Tensor::random(shape, Distribution::Uniform(0.0, 1.0), to),
            (None, _) => Tensor::ones(shape, to),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate;
    use crate::registry::find;
    use kiln_ops::oracle::{Format, Rounding};

    /// Mean and standard deviation.
    fn moments(values: &[f64]) -> (f64, f64) {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        (mean, square.sqrt())
    }

    fn floats(bytes: &[u8]) -> Vec<f64> {
        bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
    }

    #[test]
    fn the_bench_scales_weights_as_the_gate_does() {
        let op = find("linear_cross_entropy").unwrap();
        let case = Case::new([&[64, 256], &[256, 96], &[64]]);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let rounding = Rounding::fused(Format::F32);
        let gate = gate::Data::random(op, &case, DType::F32, rounding, &mut rng).unwrap();
        let parts = parts(op, &case).unwrap();
        let bench = generate(&parts, DType::F32);
        for (i, part) in parts.iter().enumerate().take(2) {
            let Numbers::Normal { mean, deviation } = part.holds else { panic!("{part:?}") };
            for values in [gate.inputs[i].values.clone(), floats(&bench[i].1.2)] {
                let (found, spread) = moments(&values);
                assert!((found - mean).abs() < 0.05 * deviation, "{part:?}: {found}");
                assert!((spread / deviation - 1.0).abs() < 0.05, "{part:?}: {spread}");
            }
        }
        assert_eq!(parts[1].holds, Numbers::Normal { mean: 0.0, deviation: 1.0 / 16.0 });
        assert_eq!(parts[2].holds, Numbers::Classes(96));
        assert_eq!((parts[3].name.as_str(), parts[3].holds), ("grad.loss", Numbers::One));
        assert_eq!(floats(&bench[3].1.2), [1.0]);
    }

    #[test]
    fn a_file_is_written_once_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let op = find("linear_cross_entropy").unwrap();
        let case = Case::new([&[6, 8], &[8, 10], &[6]]);
        let file = folder.path().join("linear_cross_entropy-6x8-8x10-bf16.safetensors");
        let written = Data::open(folder.path(), op, &case, DType::BF16).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        let read = Data::open(folder.path(), op, &case, DType::BF16).unwrap();
        assert_eq!(read.tensors, written.tensors);
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
        let names: Vec<_> = parts(op, &case).unwrap().into_iter().map(|part| part.name).collect();
        assert_eq!(names, ["x", "weight", "targets", "grad.loss"]);

        // Sets begin one after the other further on.
        let x = &parts(op, &case).unwrap()[0];
        let (first, third) = (read.turned(x, 0, 4), read.turned(x, 2, 4));
        assert_eq!(third, [&first[48..], &first[..48]].concat());

        // Another file in its place is refused.
        let other = Case::new([&[6, 8], &[8, 12], &[6]]);
        let theirs = folder.path().join("linear_cross_entropy-6x8-8x12-bf16.safetensors");
        std::fs::copy(&file, theirs).unwrap();
        let error = Data::open(folder.path(), op, &other, DType::BF16).err().unwrap();
        assert!(error.contains("has no `weight` of BF16 [8, 12]"), "{error}");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_device_gets_what_stands_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let op = find("cross_entropy").unwrap();
        let case = Case::new([&[4, 6], &[4]]);
        let data = Data::open(folder.path(), op, &case, DType::F32).unwrap();
        let parts = parts(op, &case).unwrap();
        let device = Device::flex();
        let mut maker = Maker::new(Some(&data), DType::F32, &device, 2);
        let Input::Float { rows, .. } = maker.input(&parts[0], 1) else {
            panic!("logits are float")
        };
        assert_eq!(rows.dims(), [4, 6]);
        let found = crate::host::download(&rows).unwrap();
        assert_eq!(found, floats(&data.turned(&parts[0], 1, 2)));
        let Input::Int { flat, .. } = maker.input(&parts[1], 0) else { panic!("targets are not") };
        assert!(flat.to_data().iter::<i64>().all(|class| (0..6).contains(&class)));
        assert_eq!(maker.cotangent(&parts[2]).to_data().iter::<f64>().collect::<Vec<_>>(), [1.0]);
    }
}

//! What an operator is to this crate: data and a few functions.

pub use crate::dims::Dims;

use crate::attributes::{Attribute, Attributes};
use crate::dims::{SHRUNK, shrink};
use crate::host::{BoundedTensor, HostTensor, Input};
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::{self, Spot};
use burn::tensor::{DType, Int, Tensor};
use kiln_ops::OpError;
use serde::Serialize;

/// What an input holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Numbers in the element type of the operation, which the first of them decides.
    Float,
    /// The same, from 0 to 1.
    Shares,
    /// Small float tensors that are f32 whatever the element type of the operation.
    F32,
    /// The same. May be missing: a call without has no elements of it, and all its sizes are 0.
    OptionalF32,
    /// Class indices below this dimension, or the attribute `ignore_index`.
    Classes(&'static str),
    /// Numbers of rows, below this dimension.
    Rows(&'static str),
    /// Numbers of rows, below this dimension, or −1 for none.
    RowsOrNone(&'static str),
    /// One of so many codes, from 0 on.
    Codes(usize),
    /// The same, the last a little more often than all others together.
    MostlyLast(usize),
    /// 0, then where parts of this dimension end, the last with it. May be missing: a call without has no
    /// elements of it.
    Ends(&'static str),
}

impl Holds {
    /// Whether it holds integers, which have no gradient.
    pub fn integers(self) -> bool {
        matches!(
            self,
            Self::Classes(_)
                | Self::Rows(_)
                | Self::RowsOrNone(_)
                | Self::Codes(_)
                | Self::MostlyLast(_)
                | Self::Ends(_)
        )
    }

    /// Whether it is f32 whatever the element type of the operation.
    pub fn is_f32(self) -> bool {
        matches!(self, Self::F32 | Self::OptionalF32)
    }

    /// Whether a call may be without it.
    pub fn optional(self) -> bool {
        matches!(self, Self::OptionalF32 | Self::Ends(_))
    }
}

/// An input.
#[derive(Debug, Clone, Copy)]
pub struct InputSpec {
    /// Name.
    pub name: &'static str,
    /// Shape: names of dimensions, `...` for any leading ones, numbers for themselves, `N-1` for one less than
    /// an N that stands before it.
    pub shape: &'static [&'static str],
    /// What it holds.
    pub holds: Holds,
    /// Mean of its test data: away from 0 and 1 where those hide mistakes.
    pub mean: f64,
    /// Of a weight matrix the dimension that products go along: its data is divided by the root of that, so that they
    /// neither grow nor saturate.
    pub fan_in: Option<usize>,
}

impl InputSpec {
    /// What its test data is multiplied with, in the gate as in the bench.
    pub fn scale(&self, shape: &[usize]) -> f64 {
        self.fan_in.map_or(1.0, |along| 1.0 / (shape[along] as f64).sqrt())
    }

    /// The element type of its numbers, if they are float, where that of the operation is `dtype`.
    pub fn dtype(&self, dtype: DType) -> DType {
        if self.holds.is_f32() { DType::F32 } else { dtype }
    }
}

/// An output.
#[derive(Debug, Clone, Copy)]
pub struct OutputSpec {
    /// Name.
    pub name: &'static str,
    /// Shape, in the inputs' names.
    pub shape: &'static [&'static str],
    /// f32 whatever the element type of the operation.
    pub f32: bool,
    /// It has no gradient, and takes no cotangent.
    pub constant: bool,
}

impl OutputSpec {
    /// Its element type, where that of the operation is `dtype`.
    pub fn dtype(&self, dtype: DType) -> DType {
        if self.f32 { DType::F32 } else { dtype }
    }
}

/// The families of product kernels, the fastest first.
pub const FAMILIES: [&str; 4] = ["wgmma", "mma_tma", "mma", "simt"];

/// An operator as data.
#[derive(Debug)]
pub struct Spec {
    /// Name.
    pub name: &'static str,
    /// One line of what it computes.
    pub formula: &'static str,
    /// Inputs, in order.
    pub inputs: &'static [InputSpec],
    /// Attributes.
    pub attributes: &'static [Attribute],
    /// Outputs, in order.
    pub outputs: &'static [OutputSpec],
    /// Whether it has a backward.
    pub differentiable: bool,
    /// Whether it has a fused kernel.
    pub kernel: bool,
}

/// A call on tensors of a device.
#[derive(Debug)]
pub struct Call<'a> {
    /// Inputs in the order of the spec.
    pub inputs: &'a [Input],
    /// Attributes.
    pub attributes: &'a Attributes,
}

impl Call<'_> {
    /// A float input of rank `D`.
    pub fn float<const D: usize>(&self, index: usize) -> Tensor<D> {
        let Input::Float { shape, .. } = &self.inputs[index] else {
            unreachable!("the spec says that input {index} is float")
        };
        self.shaped(index, shape.as_slice().try_into().expect("the rank was checked"))
    }

    /// A float input in another shape.
    pub fn shaped<const D: usize>(&self, index: usize, shape: [usize; D]) -> Tensor<D> {
        let rows = self.rows(index);
        if !shape.contains(&0) {
            return rows.reshape(shape);
        }
        // Burn's reshape takes a 0 for a size that stays. Nothing has no gradient.
        let nothing = Tensor::empty(shape, (&rows.clone().inner().device(), rows.dtype()));
        if rows.is_tracked() { nothing.autodiff().require_grad() } else { nothing }
    }

    /// A float input as rows of its last dimension.
    pub fn rows(&self, index: usize) -> Tensor<2> {
        let Input::Float { rows, .. } = &self.inputs[index] else {
            unreachable!("the spec says that input {index} is float")
        };
        rows.clone()
    }

    /// An integer input of rank 1.
    pub fn int(&self, index: usize) -> Tensor<1, Int> {
        let Input::Int { flat, .. } = &self.inputs[index] else {
            unreachable!("the spec says that input {index} is integer")
        };
        flat.clone()
    }
}

/// An output of a call.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its elements; of no elements their sum.
    pub flat: Tensor<1>,
    /// Its shape, as it was returned.
    pub shape: Vec<usize>,
}

impl<const D: usize> From<Tensor<D>> for Output {
    fn from(tensor: Tensor<D>) -> Self {
        let shape = tensor.dims().to_vec();
        // Burn's reshape takes a 0 for a size that stays, and nothing that is cut off is not tracked.
        let nothing = shape.contains(&0);
        let flat = if nothing { tensor.sum() } else { tensor.flatten(0, D - 1) };
        Self { flat, shape }
    }
}

/// A call on tensors of the host, for the oracle.
#[derive(Debug)]
pub struct HostCall<'a> {
    /// Inputs in the order of the spec.
    pub inputs: &'a [BoundedTensor],
    /// Attributes.
    pub attributes: &'a Attributes,
}

/// Shapes of the inputs, and attributes that are not the default.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// One shape an input.
    pub shapes: Vec<Vec<usize>>,
    /// Attributes.
    pub attributes: Vec<(&'static str, String)>,
    /// What holds numbers that are no average ones.
    pub special: Option<(Holder, Special)>,
}

impl Case {
    /// With default attributes.
    pub fn new<const N: usize>(shapes: [&[usize]; N]) -> Self {
        Self { shapes: shapes.map(<[usize]>::to_vec).to_vec(), attributes: vec![], special: None }
    }

    /// With one more attribute.
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.attributes.push((name, value.to_string()));
        self
    }

    /// The attributes, defaults included.
    ///
    /// # Errors
    ///
    /// One line if a value does not fit.
    pub fn attributes(&self, spec: &Spec) -> Result<Attributes, String> {
        let given = self.attributes.iter().map(|(k, v)| (k.to_string(), v.clone())).collect();
        Attributes::read(spec.name, spec.attributes, &given)
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let join =
            |shape: &Vec<usize>| shape.iter().map(usize::to_string).collect::<Vec<_>>().join("×");
        f.write_str(&join(&self.shapes[0]))?;
        for (i, shape) in self.shapes.iter().enumerate().skip(1) {
            let missing = shape.iter().all(|size| *size == 0);
            // A vector beside what has its length says nothing; a number of its own does.
            let own = i == 1
                && shape.len() == 1
                && self.shapes.len() > 2
                && !self.shapes[0].contains(&shape[0]);
            let new = !self.shapes[..i].contains(shape) && (shape.len() > 1 || own);
            if new && !missing {
                write!(f, ", {}", join(shape))?;
            }
        }
        for (name, value) in &self.attributes {
            write!(f, " {name}={value}")?;
        }
        if let Some((holder, special)) = self.special {
            write!(f, ", {} in {holder}", special.name())?;
        }
        Ok(())
    }
}

/// What a pass cannot avoid.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Bytes read once plus bytes written once.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
}

/// Of one pass and of the next.
impl std::ops::Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, flops: self.flops + other.flops }
    }
}

/// Size of the shapes to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Where launches dominate: the layers of a quickstart model.
    Small,
    /// The layers of a 124M model.
    Train,
    /// Where a kernel fills the GPU.
    Large,
    /// A large operand and a thin one: products of few columns, attention of one query.
    Thin,
    /// Rows of 2¹⁰ to 2²⁰ elements: how the cost of a scan grows.
    Lengths,
}

impl Scale {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Small, Self::Train, Self::Large, Self::Thin, Self::Lengths];
}

/// An operator.
pub trait Operator: Sync {
    /// What is known of it.
    fn spec(&self) -> &'static Spec;

    /// Calls the public function; outputs in the order of the spec. Leading dimensions may be one.
    ///
    /// # Errors
    ///
    /// What the public function returns.
    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError>;

    /// What the forward keeps for [`backward_kernels`](Self::backward_kernels) beside the inputs.
    fn saved(&self, _call: &Call<'_>) -> Vec<Tensor<2>> {
        vec![]
    }

    /// Whether the kernels make the gradients with the outputs, so that a backward alone would say little
    /// and only both passes together are timed.
    fn gradients_in_forward(&self) -> bool {
        false
    }

    /// Whether anybody wants the gradients of a call of these shapes.
    fn times_backward(&self, _case: &Case) -> bool {
        true
    }

    /// What the pass makes and uses up on its way, by name, of the first rows: the bench counts the exact
    /// zeros in it. The inputs are without autodiff.
    fn intermediates(&self, _call: &Call<'_>) -> Vec<(&'static str, Tensor<2>)> {
        vec![]
    }

    /// Whether the reference can be timed, beside kernels or by itself: not where what it stores fills a device.
    fn times_reference(&self, _case: &Case, _beside_kernels: bool) -> bool {
        true
    }

    /// Whether a call whose gradients nobody wants may run on kernels of its own, which the gate verifies too.
    fn untracked(&self) -> bool {
        false
    }

    /// The kernels of the backward, called past autodiff, whose bookkeeping on the host takes
    /// longer than many of them; none if the operator has no such way. What [`saved`](Self::saved) made
    /// follows the inputs. This is what `kiln bench` times; [`gradients`](Self::gradients) makes of it
    /// what autodiff would, and gate and bench check that.
    fn backward_kernels(
        &self,
        _call: &Call<'_>,
        _cotangents: &[Tensor<1>],
    ) -> Option<Vec<Tensor<2>>> {
        None
    }

    /// The gradients of the float inputs from what [`backward_kernels`](Self::backward_kernels)
    /// returned: one for each, flat, as autodiff hands them over.
    fn gradients(
        &self,
        _call: &Call<'_>,
        _cotangents: &[Tensor<1>],
        kernels: Vec<Tensor<2>>,
    ) -> Vec<Tensor<1>> {
        kernels.into_iter().map(|gradient| gradient.flatten(0, 1)).collect()
    }

    /// The outputs in float64, and how far an implementation may be off.
    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor>;

    /// The same of the gradients, one for each float input, for one cotangent for each output.
    fn oracle_backward(
        &self,
        call: &HostCall<'_>,
        cotangents: &[BoundedTensor],
    ) -> Vec<BoundedTensor>;

    /// Checks parts of a call that is too large for the oracle as a whole: what is timed. By default some
    /// rows, for operators whose rows stand for themselves.
    ///
    /// # Errors
    ///
    /// One line if a result is wrong or cannot be read.
    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::rows(self, spot, &[])
    }

    /// The families of kernels of an operator that is made of products, some of [`FAMILIES`]: the gate runs them all.
    fn families(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether its reference is Burn's matrix product, which multiplies f32 in TF32 on CUDA.
    fn tf32_reference(&self) -> bool {
        false
    }

    /// Inputs whose gradients Burn's operations make of what its kernels wrote, and outputs that no kernel writes.
    fn by_burn(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether its kernels can write a result in the place of a tensor that nobody else holds: on CUDA the gate wants
    /// to see that.
    fn in_place(&self) -> bool {
        false
    }

    /// Whether its kernels take inputs of these shapes; `auto` is the reference where they do not.
    fn kernels_take(&self, _shapes: &[Vec<usize>], _attributes: &Attributes) -> bool {
        true
    }

    /// Whether a call may have no elements of this input.
    fn may_be_empty(&self, input: usize) -> bool {
        self.spec().inputs[input].holds.optional()
    }

    /// The shape of an output for inputs with these dimensions.
    ///
    /// # Errors
    ///
    /// One line if they do not fit the attributes that decide it.
    fn output_shape(
        &self,
        output: &OutputSpec,
        dims: &Dims,
        _attributes: &Attributes,
    ) -> Result<Vec<usize>, String> {
        Ok(self.spec().output_shape(output, dims))
    }

    /// Dimensions that may be 0; a call where another one is 0 is refused.
    fn may_be_zero(&self) -> &'static [&'static str] {
        &["..."]
    }

    /// Makes one of these 0, and with it what hangs on it.
    fn zero(&self, dims: &mut Dims, dim: &'static str) {
        dims.insert(dim, vec![0]);
    }

    /// Refuses inputs of a call that each fit and together do not.
    ///
    /// # Errors
    ///
    /// One line that names the input and what was expected.
    fn refuse(&self, _inputs: &[HostTensor]) -> Result<(), String> {
        Ok(())
    }

    /// Whether the backward takes this element of an input for a constant, though outputs hang on it.
    fn frozen(&self, _inputs: &[HostTensor], _input: usize, _element: usize) -> bool {
        false
    }

    /// Operations of the oracle, or about as many: random cases have few.
    fn operations(&self, dims: &Dims) -> usize {
        dims.values().flatten().product()
    }

    /// Makes the dimensions of a random case fit where the shapes alone do not say it.
    fn fit(&self, _dims: &mut Dims) {}

    /// Puts small sizes in the place of those of a timed case, so that the oracle takes seconds, and says which sizes
    /// plans are to reckon with where they meet the small ones: kernels take both cases the same way then.
    /// Sizes that kernels are specialised on stay; some that are small already may grow a little.
    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        shrink(dims, |_, size| size > SHRUNK)
    }

    /// Gives a random case attributes that are not the default, by a random number.
    fn vary(&self, case: Case, _number: u64) -> Case {
        case
    }

    /// Why no case of an element type has such numbers here, if none has.
    fn leaves_out(&self, _holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        undefined(special == Special::Masked)
    }

    /// What the gate runs: one element, primes, ragged tails, rows that CUDA pitches.
    fn cases(&self) -> Vec<Case>;

    /// What is timed.
    fn shapes(&self, scale: Scale) -> Vec<Case>;

    /// What is stressed on CUDA, if it is not the first of [`Scale::Train`]: a size that fills a device several times.
    fn stressed(&self) -> Option<Case> {
        None
    }

    /// The least work of the forward and of the backward.
    fn work(&self, case: &Case, dtype: DType) -> (Work, Work);
}

/// The inputs of the backward kernels: those of the call, and what its forward keeps.
pub(crate) fn with_saved(
    op: &dyn Operator,
    inputs: Vec<Input>,
    attributes: &Attributes,
) -> Vec<Input> {
    let saved = op.saved(&Call { inputs: &inputs, attributes });
    inputs.into_iter().chain(saved.into_iter().map(Input::of)).collect()
}

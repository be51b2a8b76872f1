//! Sizes of the dimensions that an operator's spec names: checked against each other, filled in, made small.

use super::operator::{Holds, OutputSpec, Spec};
use burn::tensor::DType;
use std::collections::BTreeMap;

/// Sizes of the dimensions that a spec names.
pub type Dims = BTreeMap<&'static str, Vec<usize>>;

impl Spec {
    /// Checks the shapes of the inputs against each other; returns the size of each dimension.
    ///
    /// # Errors
    ///
    /// One line that names the input, its shape and what was expected.
    pub fn dims(&self, shapes: &[Vec<usize>]) -> Result<Dims, String> {
        let mut dims = Dims::new();
        for (input, shape) in self.inputs.iter().zip(shapes) {
            if input.holds == Holds::OptionalF32 && shape.iter().all(|size| *size == 0) {
                continue;
            }
            let known = dims.clone();
            let wrong = || {
                let expected = show(input.shape, &known);
                format!("{}: `{}` has shape {shape:?}, expected {expected}", self.name, input.name)
            };
            let (leading, fixed) = match input.shape.first() {
                Some(&"...") => (true, &input.shape[1..]),
                _ => (false, input.shape),
            };
            let extra = shape.len().checked_sub(fixed.len()).ok_or_else(wrong)?;
            if extra > 0 && !leading {
                return Err(wrong());
            }
            if leading
                && dims.entry("...").or_insert_with(|| shape[..extra].to_vec())[..]
                    != shape[..extra]
            {
                return Err(wrong());
            }
            for (name, size) in fixed.iter().zip(&shape[extra..]) {
                let Some(expected) = sizes_of(name, &dims) else {
                    dims.insert(name, vec![*size]);
                    continue;
                };
                if expected != [*size] {
                    return Err(wrong());
                }
            }
        }
        Ok(dims)
    }

    /// The shapes of the inputs with these dimensions, all of which are known.
    pub fn shapes(&self, dims: &Dims) -> Vec<Vec<usize>> {
        let sizes = |name: &&str| sizes_of(name, dims).unwrap_or_default();
        self.inputs.iter().map(|input| input.shape.iter().flat_map(sizes).collect()).collect()
    }

    /// The same for a call without those inputs that a call of the shapes `like` is without.
    pub(crate) fn shapes_like(&self, dims: &Dims, like: &[Vec<usize>]) -> Vec<Vec<usize>> {
        let mut shapes = self.shapes(dims);
        for (shape, like) in shapes.iter_mut().zip(like) {
            if like.iter().all(|size| *size == 0) {
                shape.clone_from(like);
            }
        }
        shapes
    }

    /// The shape of an output for inputs with these dimensions, where no attribute decides it.
    ///
    /// # Panics
    ///
    /// If it is not all of dimensions of inputs.
    pub fn output_shape(&self, output: &OutputSpec, dims: &Dims) -> Vec<usize> {
        let sizes = |name: &&str| sizes_of(name, dims).expect("a dimension of an input");
        output.shape.iter().flat_map(sizes).collect()
    }

    /// Whether it computes in this element type: what has no input of the operation's own computes in f32 alone.
    pub fn computes_in(&self, dtype: DType) -> bool {
        dtype == DType::F32
            || self.inputs.iter().any(|input| matches!(input.holds, Holds::Float | Holds::Shares))
    }

    /// Indices of the float inputs.
    pub fn float_inputs(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.inputs.len()).filter(|i| !self.inputs[*i].holds.integers())
    }
}

/// What a name in a shape stands for, if that is known: a number for itself, `N-1` for one less than N.
pub(crate) fn sizes_of(name: &str, dims: &Dims) -> Option<Vec<usize>> {
    if let Ok(number) = name.parse::<usize>() {
        return Some(vec![number]);
    }
    match name.strip_suffix("-1") {
        Some(of) => dims.get(of).map(|sizes| vec![sizes[0].saturating_sub(1)]),
        None => dims.get(name).cloned(),
    }
}

/// Sizes up to here stay as they are: kernels for a thin side are made for them.
pub(crate) const SHRUNK: usize = 128;

/// Makes the sizes small that are to be, each another one, and none a multiple of a tile; returns the pairs of small
/// and large.
pub(crate) fn shrink(dims: &mut Dims, which: impl Fn(&str, usize) -> bool) -> Vec<[usize; 2]> {
    let size_of = |sizes: &[usize]| sizes.iter().product::<usize>();
    let kept = dims
        .iter()
        .map(|(name, sizes)| (name, size_of(sizes)))
        .filter(|(name, size)| !which(name, *size));
    // Beside a thin side, as kernels for those want it.
    let least = kept.map(|(_, size)| 4 * size + 8).filter(|least| *least <= 328).max();
    let first = least.unwrap_or(0).max(264);
    let mut pairs = vec![];
    for (name, sizes) in dims {
        let size = size_of(sizes);
        if which(name, size) {
            // As aligned as the large one.
            let small = first + 16 * pairs.len() + size % 16;
            *sizes = vec![small];
            pairs.push([small, size]);
        }
    }
    pairs
}

/// Puts a small size in the place of a large one; returns the pair.
pub(crate) fn replace(dims: &mut Dims, name: &'static str, small: usize) -> [usize; 2] {
    let large = dims.insert(name, vec![small]).map_or(1, |sizes| sizes.iter().product());
    [small, large]
}

/// A shape with the sizes that are known.
fn show(shape: &[&str], dims: &Dims) -> String {
    let one = |name: &&str| match sizes_of(name, dims) {
        Some(sizes) => sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
        None => name.to_string(),
    };
    let parts: Vec<_> = shape.iter().map(one).filter(|part| !part.is_empty()).collect();
    format!("[{}]", parts.join(", "))
}

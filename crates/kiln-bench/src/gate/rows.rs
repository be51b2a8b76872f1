//! What is verified: operators, element types, and the families of kernels that products run on.

use crate::registry::Operator;
use burn::tensor::{DType, Device};
use kiln_ops::device;
use kiln_ops::policy::Implementation;

/// The implementation that `auto` would verify: the kernel if it has one that runs here.
pub fn candidate(op: &dyn Operator, device: &Device) -> Implementation {
    if op.spec().kernel && device::is_cube(device) {
        Implementation::Fused
    } else {
        Implementation::Reference
    }
}

/// The float types of a device.
pub fn dtypes(device: &Device) -> Vec<DType> {
    let [there, _] = types(device);
    there
}

/// Those that some of these operators compute in, and the device has not.
pub(super) fn missing_dtypes(ops: &[&dyn Operator], device: &Device) -> Vec<DType> {
    let [_, missing] = types(device);
    let some = |dtype: &DType| ops.iter().any(|op| op.spec().computes_in(*dtype));
    missing.into_iter().filter(some).collect()
}

/// The families of an operator's kernels that run on the device in no element type; none where there are no kernels.
pub(super) fn missing_families(op: &dyn Operator, device: &Device) -> Vec<&'static str> {
    if candidate(op, device) == Implementation::Reference {
        return vec![];
    }
    let here = |family: &str| dtypes(device).into_iter().any(|dtype| runs(family, dtype, device));
    op.families().iter().copied().filter(|family| !here(family)).collect()
}

fn types(device: &Device) -> [Vec<DType>; 2] {
    let all = [DType::F32, DType::BF16, DType::F16].into_iter();
    let (there, missing) = all.partition(|dtype| device.supports_dtype(*dtype));
    [there, missing]
}

/// A row of what is verified.
#[derive(Clone, Copy)]
pub struct Row {
    /// Operator.
    pub op: &'static dyn Operator,
    /// Element type.
    pub dtype: DType,
    /// Family of product kernels, of [`families`].
    pub family: Option<&'static str>,
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.op.spec().name, format!("{:?}", self.dtype).to_lowercase())?;
        self.family.map_or(Ok(()), |family| write!(f, " ({family})"))
    }
}

impl Row {
    /// How many parts it is verified in, each by itself if need be: [`verify_part`](super::verify_part).
    pub fn parts(&self, fuzz: usize, device: &Device) -> usize {
        parts(self.op, self.dtype, fuzz, device)
    }
}

/// Cases of a part of a row: some make a hundred kernels, which one thread would compile.
pub(super) const CASES_OF_A_PART: usize = 12;

pub(super) fn parts(op: &dyn Operator, dtype: DType, fuzz: usize, device: &Device) -> usize {
    in_parts(op, dtype, fuzz, device).div_ceil(CASES_OF_A_PART).max(1)
}

/// Cases of the registry, random ones, and those with special numbers.
fn in_parts(op: &dyn Operator, dtype: DType, fuzz: usize, device: &Device) -> usize {
    op.cases().len() + fuzz + super::fuzz::special(op, dtype, device).len()
}

/// How many cases that are, with the empty ones, which are all of the first part.
pub fn cases(op: &dyn Operator, dtype: DType, fuzz: usize, device: &Device) -> usize {
    in_parts(op, dtype, fuzz, device) + super::empty::cases(op).len()
}

/// The rows of these operators on a device, in their order.
pub fn rows(ops: &[&'static dyn Operator], device: &Device) -> Vec<Row> {
    let mut rows = vec![];
    for &op in ops {
        for dtype in dtypes(device).into_iter().filter(|dtype| op.spec().computes_in(*dtype)) {
            let families = families(op, dtype, device).into_iter();
            rows.extend(families.map(|family| Row { op, dtype, family }));
        }
    }
    rows
}

/// The families of product kernels that an operator is verified on: what would run if nobody asked for one,
/// and, for an operator that is made of products, the others that run on a device with kernels.
pub fn families(op: &dyn Operator, dtype: DType, device: &Device) -> Vec<Option<&'static str>> {
    let others = families_here(op, dtype, device).into_iter().skip(1);
    std::iter::once(None).chain(others.map(Some)).collect()
}

/// The family that products take by themselves, but for those with a thin side, which have kernels of their
/// own; none if the operator is not made of products.
pub(super) fn own_family(op: &dyn Operator, dtype: DType, device: &Device) -> Option<&'static str> {
    families_here(op, dtype, device).first().copied()
}

/// The families of an operator that run here, the fastest first.
pub(super) fn families_here(op: &dyn Operator, dtype: DType, device: &Device) -> Vec<&'static str> {
    #[cfg(feature = "cube")]
    if candidate(op, device) == Implementation::Fused {
        let names = kiln_ops::tile::families(device, dtype).into_iter().map(|family| family.name());
        return names.filter(|name| op.families().contains(name)).collect();
    }
    let _ = (op, dtype, device);
    vec![]
}

/// A family by its name.
///
/// # Errors
///
/// One line that lists the families there are.
pub fn family(name: &str) -> Result<&'static str, String> {
    #[cfg(feature = "cube")]
    return name.parse::<kiln_ops::tile::Family>().map(kiln_ops::tile::Family::name);
    #[cfg(not(feature = "cube"))]
    Err(format!("`{name}`: this build has no kernels"))
}

/// Whether the family of this name runs on a device with operands of this element type.
pub fn runs(name: &str, dtype: DType, device: &Device) -> bool {
    #[cfg(feature = "cube")]
    return kiln_ops::tile::families(device, dtype).iter().any(|family| family.name() == name);
    #[cfg(not(feature = "cube"))]
    {
        let _ = (name, dtype, device);
        false
    }
}

/// Runs `f` with its products on a family of kernels.
pub(crate) fn on_family<T>(family: Option<&'static str>, f: impl FnOnce() -> T) -> T {
    #[cfg(feature = "cube")]
    if let Some(family) = family.and_then(|name| name.parse().ok()) {
        return kiln_ops::tile::force(family, f);
    }
    let _ = family;
    f()
}

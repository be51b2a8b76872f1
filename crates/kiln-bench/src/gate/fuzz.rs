//! Random cases.

use super::report::LeftOut;
use crate::dims::sizes_of;
use crate::operator::Holds;
use crate::registry::{Case, Dims, Operator};
use crate::special::{Holder, Special, Why};
use burn::tensor::{DType, Device};
use kiln_ops::device;
use rand::{Rng, RngExt};
use std::collections::BTreeSet;

/// Sizes where indexing goes wrong: one, primes, powers of two and their neighbours.
const SIZES: &[usize] =
    &[1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 257];
/// Largest number of elements of an input.
const LARGEST: usize = 20_000;
/// Elements of a case with special numbers at most, and inputs that have one kind of them each.
const SPECIAL: usize = 6000;
const OF_A_KIND: usize = 3;

/// A case with random dimensions.
pub(super) fn case(op: &dyn Operator, rng: &mut impl Rng) -> Case {
    let spec = op.spec();
    loop {
        let mut dims = Dims::new();
        for name in spec.inputs.iter().flat_map(|input| input.shape) {
            if sizes_of(name, &dims).is_some() {
                continue;
            }
            let rank = if *name == "..." { rng.random_range(0..=3) } else { 1 };
            let sizes = (0..rank).map(|_| SIZES[rng.random_range(0..SIZES.len())]).collect();
            dims.insert(name, sizes);
        }
        op.fit(&mut dims);
        let shapes = spec.shapes(&dims);
        let small = |shape: &Vec<usize>| shape.iter().product::<usize>() <= LARGEST;
        // The oracle's products are plain loops.
        if shapes.iter().all(small) && op.operations(&dims) <= 40 * LARGEST {
            return op.vary(Case { shapes, attributes: vec![], special: None }, rng.random());
        }
    }
}

/// What may hold special numbers: inputs, each with its number, and cotangents.
fn holders(op: &dyn Operator) -> [Vec<(Option<usize>, Holder)>; 2] {
    let spec = op.spec();
    let float = |holds| matches!(holds, Holds::Float | Holds::F32 | Holds::OptionalF32);
    let inputs = spec.inputs.iter().enumerate().filter(|(_, input)| float(input.holds));
    let inputs = inputs.map(|(i, input)| (Some(i), Holder::Input(input.name)));
    let outputs = spec.outputs.iter().filter(|output| spec.differentiable && !output.constant);
    let cotangents = outputs.map(|output| (None, Holder::Cotangent(output.name)));
    [inputs.collect(), cotangents.collect()]
}

/// How many of those that take a kind of numbers have it, in turns.
fn turns(of: &[(Option<usize>, Holder)]) -> usize {
    match of.first() {
        Some((_, Holder::Input(_))) => OF_A_KIND.min(of.len()),
        Some((_, Holder::Cotangent(_))) => 1,
        None => 0,
    }
}

/// Whether there are cases with these numbers on a device: WGSL does not say what becomes of NaN and infinities.
fn has(device: &Device, kind: Special) -> bool {
    kind.finite() || !device::is_cube(device) || device::is_cuda(device)
}

/// The cases of the registry that have some elements and not many.
fn small_cases(op: &dyn Operator) -> Vec<Case> {
    op.cases().into_iter().filter(|case| size(case) >= 16 && !large(case)).collect()
}

/// Whether this input of a case, if it is one, has elements.
fn has_elements(case: &Case, input: Option<usize>) -> bool {
    input.is_none_or(|i| !case.shapes[i].contains(&0))
}

/// Which inputs and cotangents hold which special numbers in no case, and why.
pub(super) fn left_out(op: &dyn Operator, dtype: DType, device: &Device) -> BTreeSet<LeftOut> {
    let there = special(op, dtype, device);
    let small = small_cases(op);
    let mut left_out = BTreeSet::new();
    for kind in Special::ALL {
        for all in holders(op) {
            let mut taken = all.clone();
            taken.retain(|(_, holder)| op.leaves_out(*holder, kind, dtype).is_none());
            // Masks are for those who say so.
            if kind == Special::Masked && taken.is_empty() {
                continue;
            }
            for (i, holder) in &all {
                let held = there.iter().any(|case| case.special == Some((*holder, kind)));
                // As a missing one has no place in any.
                let possible = small.iter().any(|case| has_elements(case, *i));
                let why = match (has(device, kind), op.leaves_out(*holder, kind, dtype), held) {
                    (false, ..) => Why::Device,
                    (_, Some(why), _) => why,
                    (.., false) if possible && taken.len() > turns(&taken) => Why::OtherInputs,
                    (.., false) => Why::NoCase,
                    _ => continue,
                };
                let input = match holder {
                    Holder::Input(name) => (*name).into(),
                    Holder::Cotangent(_) => holder.to_string(),
                };
                left_out.insert(LeftOut { numbers: kind.name().into(), input, why });
            }
        }
    }
    left_out
}

/// Cases with numbers that are no average ones, one for each kind of them and each float input that takes them, of more than
/// three inputs three in turn, and a cotangent in turn, and of the small ones of the registry's cases in turn.
pub(super) fn special(op: &dyn Operator, dtype: DType, device: &Device) -> Vec<Case> {
    let cases = small_cases(op);
    let mut special = vec![];
    let kinds = Special::ALL.into_iter().enumerate();
    for (turn, kind) in kinds.filter(|(_, kind)| has(device, *kind)) {
        for mut taken in holders(op) {
            taken.retain(|(_, holder)| op.leaves_out(*holder, kind, dtype).is_none());
            let count = turns(&taken);
            for (i, holder) in taken.iter().cycle().skip(turn * count).take(count) {
                let there = |case: &&Case| has_elements(case, *i);
                let mut others = cases.iter().cycle().skip(special.len()).take(cases.len());
                if let Some(case) = others.find(there) {
                    special.push(Case { special: Some((*holder, kind)), ..case.clone() });
                }
            }
        }
    }
    special
}

/// A small case that kernels take the way they take `timed`, if plans reckon with the sizes that are returned with it.
pub(super) fn small(
    op: &dyn Operator,
    timed: &Case,
    dtype: DType,
) -> Result<(Case, Vec<[usize; 2]>), String> {
    let mut dims = op.spec().dims(&timed.shapes)?;
    let sizes = op.shrink(&mut dims, dtype);
    let shapes = op.spec().shapes_like(&dims, &timed.shapes);
    Ok((Case { shapes, ..timed.clone() }, sizes))
}

/// Size of a case as long as it is no burden to run again and again; 0 beyond.
pub(super) fn moderate(case: &Case) -> usize {
    let elements = size(case);
    if elements <= 2 * LARGEST { elements } else { 0 }
}

/// Whether a case is too large to have many like it.
pub(super) fn large(case: &Case) -> bool {
    size(case) > SPECIAL
}

/// Elements of all inputs.
fn size(case: &Case) -> usize {
    case.shapes.iter().map(|shape| shape.iter().product::<usize>()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_case_holds_is_known() {
        let cpu = device::open("cpu").expect("the CPU is always there").device;
        let of_type = |name: &str, dtype: DType, numbers: &str, input: &str| {
            let left_out = left_out(registry::find(name).unwrap(), dtype, &cpu);
            let mut left_out = left_out.into_iter();
            let here = |one: &LeftOut| one.numbers == numbers && one.input == input;
            left_out.find(here).map(|one| one.why)
        };
        let of = |name: &str, numbers: &str, input: &str| of_type(name, DType::F32, numbers, input);
        assert_eq!(of("attention", "NaN", "q"), Some(Why::Operator));
        assert_eq!(of("attention", "zeros", "q"), None);
        assert_eq!(of("rms_norm", "-inf", "x"), None);
        assert_eq!(of("cross_entropy", "-inf", "logits"), None);
        assert_eq!(of("linear_cross_entropy", "offset", "x"), Some(Why::Bound));
        assert_eq!(of_type("attention_qkv", DType::F16, "offset", "qkv"), Some(Why::Type));
        assert_eq!(of("attention_qkv", "offset", "qkv"), None);
        assert_eq!(of_type("attention_qkv", DType::BF16, "offset", "qkv"), Some(Why::Bound));
        // Every other operator has a case of what it defines.
        for op in registry::all() {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let left_out = left_out(*op, dtype, &cpu);
                let none = left_out.iter().find(|one| one.why == Why::NoCase);
                assert_eq!(none, None, "{} in {dtype:?}", op.spec().name);
            }
        }
    }
    use crate::attributes::Kind;
    use crate::registry::{self, Scale};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn random_cases_have_every_attribute() {
        let mut missing = vec![];
        for op in registry::all() {
            let spec = op.spec();
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let cases: Vec<Case> = (0..300).map(|_| case(*op, &mut rng)).collect();
            for attribute in spec.attributes {
                let (name, default) = (attribute.name, attribute.default);
                let values = cases.iter().flat_map(|case| &case.attributes);
                let others: BTreeSet<&str> = values
                    .filter(|(of, value)| *of == name && value != default)
                    .map(|(_, value)| value.as_str())
                    .collect();
                let all = match attribute.kind {
                    Kind::OneOf(words) => words.len() - 1,
                    _ => 1,
                };
                if others.len() < all {
                    missing.push(format!("{} {name}: {others:?}", spec.name));
                }
            }
        }
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn what_is_timed_has_a_small_case() {
        for op in registry::all() {
            for timed in Scale::ALL.into_iter().flat_map(|scale| op.shapes(scale)) {
                let name = op.spec().name;
                let (case, sizes) = small(*op, &timed, DType::BF16).unwrap();
                let dims = op.spec().dims(&case.shapes).unwrap();
                assert!(
                    op.kernels_take(&case.shapes, &case.attributes(op.spec()).unwrap()),
                    "{name} {timed}: {case}"
                );
                let elements = |case: &Case| -> usize {
                    case.shapes.iter().map(|shape| shape.iter().product::<usize>()).sum()
                };
                assert!(elements(&case) <= 1 << 24, "{name} {timed}: {case}");
                // No size stands for two, none that stays for another.
                let whole = op.spec().dims(&timed.shapes).unwrap();
                for [small, large] in &sizes {
                    let stays = |name: &&str| dims[name] == [*small] && whole[name] == [*small];
                    assert!(small == large || !dims.keys().any(stays), "{name} {timed}: {sizes:?}");
                    assert!(
                        sizes.iter().all(|[s, l]| s != small || l == large),
                        "{name} {timed}: {sizes:?}"
                    );
                }
            }
        }
    }
}

//! Random cases.

use crate::operator::sizes_of;
use crate::registry::{Case, Dims, Operator};
use rand::{Rng, RngExt};

/// Sizes where indexing goes wrong: one, primes, powers of two and their neighbours.
const SIZES: &[usize] =
    &[1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 257];
/// Largest number of elements of an input.
const LARGEST: usize = 20_000;

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
        let sizes = |name: &&str| sizes_of(name, &dims).expect("it was drawn");
        let shapes: Vec<Vec<usize>> =
            spec.inputs.iter().map(|input| input.shape.iter().flat_map(sizes).collect()).collect();
        let small = |shape: &Vec<usize>| shape.iter().product::<usize>() <= LARGEST;
        // The oracle's products are plain loops.
        let product: usize = dims.values().flatten().product();
        if shapes.iter().all(small) && product <= 40 * LARGEST {
            return op.vary(Case { shapes, attributes: vec![] }, rng.random());
        }
    }
}

/// Size of a case as long as it is no burden to run again and again; 0 beyond.
pub(super) fn moderate(case: &Case) -> usize {
    let elements: usize = case.shapes.iter().map(|s| s.iter().product::<usize>()).sum();
    if elements <= 2 * LARGEST { elements } else { 0 }
}

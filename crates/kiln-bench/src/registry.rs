//! The registry: every operator by its name, from the rows.

pub use crate::operator::*;
use crate::rows;

/// Every operator.
pub fn all() -> &'static [&'static dyn Operator] {
    rows::ALL
}

/// The operator called `name`.
///
/// # Errors
///
/// One line that lists the operators there are.
pub fn find(name: &str) -> Result<&'static dyn Operator, String> {
    all().iter().copied().find(|op| op.spec().name == name).ok_or_else(|| {
        let names: Vec<_> = all().iter().map(|op| op.spec().name).collect();
        format!("unknown operator `{name}`, expected one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn shapes_are_checked_against_each_other() {
        let spec = find("add_rms_norm").unwrap().spec();
        let dims = spec.dims(&[vec![2, 3, 4], vec![2, 3, 4], vec![4]]).unwrap();
        assert_eq!((&dims["..."][..], &dims["D"][..]), (&[2, 3][..], &[4][..]));
        assert_eq!(spec.output_shape(&spec.outputs[0], &dims), [2, 3, 4]);
        for (shapes, expected) in [
            ([vec![2, 4], vec![3, 4], vec![4]], "`residual` has shape [3, 4], expected [2, 4]"),
            ([vec![2, 4], vec![2, 4], vec![5]], "`weight` has shape [5], expected [4]"),
            ([vec![], vec![2, 4], vec![5]], "`x` has shape [], expected [..., D]"),
        ] {
            assert_eq!(spec.dims(&shapes).unwrap_err(), format!("add_rms_norm: {expected}"));
        }
        // `b` and `c` go by the N of `a`, not by each other.
        let spec = find("bk").unwrap().spec();
        let dims = |b, c| spec.dims(&[vec![2, 8], vec![2, b], vec![1, c], vec![1, 2]]);
        let expected = "bk: `b` has shape [2, 9], expected [Bb, 7]";
        assert_eq!(dims(9, 7).unwrap_err(), expected);
        assert_eq!(dims(9, 9).unwrap_err(), expected);
        assert_eq!(dims(7, 9).unwrap_err(), "bk: `c` has shape [1, 9], expected [Bc, 7]");
        assert_eq!(spec.output_shape(&spec.outputs[0], &dims(7, 7).unwrap()), [2, 8, 2]);
    }

    #[test]
    fn what_attributes_decide() {
        let op = find("attention_qkv").unwrap();
        let of = |heads: usize| {
            let case = Case::new([&[2, 3, 1032], &[0]]).with("heads", heads);
            (case.attributes(op.spec()).unwrap(), op.spec().dims(&case.shapes).unwrap(), case)
        };
        // Heads of 344, 258 and 172 numbers; kernels take up to 256.
        for (heads, takes, width) in [(1, false, 344), (2, false, 516), (4, true, 688)] {
            let (attributes, dims, case) = of(heads);
            assert_eq!(op.kernels_take(&case.shapes, &attributes), takes, "{heads}");
            let output = &op.spec().outputs[0];
            assert_eq!(op.output_shape(output, &dims, &attributes).unwrap(), [2, 3, width]);
        }
        let (attributes, dims, _) = of(3);
        let error = op.output_shape(&op.spec().outputs[0], &dims, &attributes).unwrap_err();
        let expected = "attention_qkv: `qkv` has shape [2, 3, 1032], expected [B, T, W], W a multiple of \
                        heads + 2·kv_heads = 5";
        assert_eq!(error, expected);
    }

    #[test]
    fn names_are_unique_and_found() {
        let names: BTreeSet<&str> = all().iter().map(|op| op.spec().name).collect();
        assert_eq!(names.len(), all().len());
        for name in names {
            assert_eq!(find(name).unwrap().spec().name, name);
        }
        assert!(
            find("nope")
                .err()
                .unwrap()
                .starts_with("unknown operator `nope`, expected one of rms_norm")
        );
    }
}

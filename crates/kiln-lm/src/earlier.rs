//! What earlier versions saved, as it is today.

use burn::tensor::{DType, TensorData};
use std::collections::BTreeMap;

/// Parameters that were matrices of their own, and the one in which they stand side by side.
const JOINED: ([&str; 3], &str) = (["w_q", "w_k", "w_v"], "w_qkv");

/// Tensors by the names of today: queries, keys and values of attention had a matrix each, and so had what an
/// optimizer keeps of them. What is no whole set of three is left as it is, for the reader to name.
pub(crate) fn renamed(mut record: BTreeMap<String, TensorData>) -> BTreeMap<String, TensorData> {
    let (parts, joined) = JOINED;
    let firsts: Vec<String> =
        record.keys().filter(|name| part_of(name, parts[0])).cloned().collect();
    for first in firsts {
        let named = |part: &str| first.replacen(&dotted(parts[0]), &dotted(part), 1);
        let names = parts.map(named);
        let found: Vec<&TensorData> = names.iter().filter_map(|name| record.get(name)).collect();
        let whole = found.len() == parts.len() && !record.contains_key(&named(joined));
        if let Some(all) = side_by_side(&found).filter(|_| whole) {
            names.iter().for_each(|name| drop(record.remove(name)));
            record.insert(named(joined), all);
        }
    }
    record
}

fn dotted(part: &str) -> String {
    format!(".attention.{part}.")
}

fn part_of(name: &str, part: &str) -> bool {
    name.contains(&dotted(part))
}

/// Matrices of as many rows as one.
fn side_by_side(matrices: &[&TensorData]) -> Option<TensorData> {
    let rows = matrices.first()?.shape().first().copied()?;
    let mut columns = vec![];
    for matrix in matrices {
        let shape = matrix.shape().as_slice();
        if matrix.dtype() != DType::F32 || shape.len() != 2 || shape[0] != rows {
            return None;
        }
        columns.push((matrix.as_slice::<f32>().ok()?, shape[1]));
    }
    let row = |row: usize| columns.iter().flat_map(move |(of, n)| &of[row * n..(row + 1) * n]);
    let values: Vec<f32> = (0..rows).flat_map(row).copied().collect();
    let all = columns.iter().map(|(_, n)| n).sum();
    Some(TensorData::new(values, [rows, all]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(values: &[f32], shape: [usize; 2]) -> TensorData {
        TensorData::new(values.to_vec(), shape)
    }

    #[test]
    fn three_matrices_become_one() {
        for suffix in ["weight", "weight.first"] {
            let name = |part: &str| format!("blocks.0.attention.{part}.{suffix}");
            let record = BTreeMap::from([
                (name("w_q"), matrix(&[1., 2., 3., 4.], [2, 2])),
                (name("w_k"), matrix(&[5., 6.], [2, 1])),
                (name("w_v"), matrix(&[7., 8.], [2, 1])),
                (name("w_o"), matrix(&[9.], [1, 1])),
            ]);
            let found = renamed(record);
            assert_eq!(found.len(), 2);
            let all = matrix(&[1., 2., 5., 7., 3., 4., 6., 8.], [2, 4]);
            assert_eq!(found[&name("w_qkv")], all);
        }
    }

    #[test]
    fn what_is_no_set_of_three_stays() {
        let name = |part: &str| format!("blocks.0.attention.{part}.weight");
        let two = BTreeMap::from([
            (name("w_q"), matrix(&[1.], [1, 1])),
            (name("w_k"), matrix(&[2.], [1, 1])),
        ]);
        assert_eq!(renamed(two.clone()), two);
        let mut other = two;
        other.insert(name("w_v"), matrix(&[1., 2.], [2, 1]));
        assert_eq!(renamed(other.clone()), other);
    }
}

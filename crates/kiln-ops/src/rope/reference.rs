//! RoPE in plain Burn operations.

use super::{RopeLayout, RopeTable};
use burn::tensor::{DType, Tensor};

/// [`rope`](super::rope) without its checks.
pub fn rope(x: Tensor<4>, table: &RopeTable, offset: usize) -> Tensor<4> {
    let dtype = x.dtype();
    let [batch, heads, length, width] = x.dims();
    // Burn's reshape, which `unsqueeze` is, takes a 0 for a size that stays.
    if length == 0 {
        return x;
    }
    let pairs = width / 2;
    let rows =
        |t: &Tensor<2>| t.clone().slice([offset..offset + length, 0..pairs]).unsqueeze::<4>();
    let (cos, sin) = (rows(&table.cos), rows(&table.sin));
    let x = x.cast(DType::F32);
    let y = match table.layout() {
        RopeLayout::Half => {
            let x1 = x.clone().narrow(3, 0, pairs);
            let x2 = x.narrow(3, pairs, pairs);
            let y1 = x1.clone() * cos.clone() + x2.clone() * sin.clone();
            let y2 = x2 * cos - x1 * sin;
            Tensor::cat(vec![y1, y2], 3)
        }
        RopeLayout::Interleaved => {
            let x = x.reshape([batch, heads, length, pairs, 2]);
            let part = |i| x.clone().narrow(4, i, 1).reshape([batch, heads, length, pairs]);
            let (x1, x2): (Tensor<4>, Tensor<4>) = (part(0), part(1));
            let y1 = x1.clone() * cos.clone() + x2.clone() * sin.clone();
            let y2 = x2 * cos - x1 * sin;
            Tensor::stack::<5>(vec![y1, y2], 4).reshape([batch, heads, length, width])
        }
    };
    y.cast(dtype)
}

/// [`rope_qkv`](super::rope_qkv) of so many heads without its checks.
pub fn rope_packed(qkv: Tensor<3>, heads: usize, table: &RopeTable, offset: usize) -> Tensor<3> {
    let [batch, length, all] = qkv.dims();
    let rotated = heads * table.head_dim();
    let x = qkv.clone().narrow(2, 0, rotated);
    let x = x.reshape([batch, length, heads, table.head_dim()]).swap_dims(1, 2);
    let y = rope(x, table, offset).swap_dims(1, 2).reshape([batch, length, rotated]);
    Tensor::cat(vec![y, qkv.narrow(2, rotated, all - rotated)], 2)
}

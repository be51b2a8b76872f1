//! `[B, H, T, D]` as it may lie in memory.

use burn::tensor::Tensor;

/// How an input lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// `[B, H, T, D]`.
    Heads,
    /// `[B, T, H, D]`.
    Positions,
    /// The middle heads of a `[B, T, 3·H, D]`.
    Cut,
    /// `[B, H, D, T]`: elements of a head apart.
    Channels,
}

pub const ORDERS: [Order; 4] = [Order::Heads, Order::Positions, Order::Cut, Order::Channels];

impl Order {
    /// The shape in memory.
    pub fn shape(self, [b, h, t, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::Heads => [b, h, t, d],
            Self::Positions => [b, t, h, d],
            Self::Cut => [b, t, 3 * h, d],
            Self::Channels => [b, h, d, t],
        }
    }

    /// What lies so, as `[B, H, T, D]`.
    pub fn view(self, x: Tensor<4>) -> Tensor<4> {
        match self {
            Self::Heads => x,
            Self::Positions => x.swap_dims(1, 2),
            Self::Cut => {
                let heads = x.dims()[2] / 3;
                x.narrow(2, heads, heads).swap_dims(1, 2)
            }
            Self::Channels => x.swap_dims(2, 3),
        }
    }
}

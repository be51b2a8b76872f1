//! Operations for scans and reductions: sums, 2×2 matrices, Möbius maps; and scans over arrays of them.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kiln_ops::launch;
use kiln_ops::reduce::Combine;
use kiln_ops::scan::{Scan, ScanRequest, scan};
use std::marker::PhantomData;

/// Real 2×2 matrices: earlier · later.
pub struct Matrices;

#[cube]
impl Combine for Matrices {
    const REGISTERS: usize = 4;
    const COMMUTATIVE: bool = false;

    fn identity() -> Array<f32> {
        let mut one = Array::<f32>::new(4usize);
        one[0] = 1.0f32;
        one[3] = 1.0f32;
        one
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        let mut product = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..2usize {
            #[unroll]
            for j in 0..2usize {
                product[comptime!(2 * i + j)] = earlier[comptime!(2 * i)] * later[j]
                    + earlier[comptime!(2 * i + 1)] * later[comptime!(2 + j)];
            }
        }
        product
    }
}

/// Complex 2×2 matrices up to a factor: later · earlier, as maps apply, scaled by a power of two so
/// that the largest component is in [½, 1).
pub struct Moebius;

#[cube]
impl Combine for Moebius {
    const REGISTERS: usize = 8;
    const COMMUTATIVE: bool = false;

    fn identity() -> Array<f32> {
        let mut one = Array::<f32>::new(8usize);
        one[0] = 1.0f32;
        one[6] = 1.0f32;
        one
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        let mut product = Array::<f32>::new(8usize);
        let mut largest = f32::new(0.0);
        #[unroll]
        for i in 0..2usize {
            #[unroll]
            for j in 0..2usize {
                #[unroll]
                for k in 0..2usize {
                    let (a, b) = (comptime!(4 * i + 2 * k), comptime!(4 * k + 2 * j));
                    let at = comptime!(4 * i + 2 * j);
                    product[at] +=
                        later[a] * earlier[b] - later[comptime!(a + 1)] * earlier[comptime!(b + 1)];
                    product[comptime!(at + 1)] +=
                        later[a] * earlier[comptime!(b + 1)] + later[comptime!(a + 1)] * earlier[b];
                }
            }
        }
        #[unroll]
        for k in 0..8usize {
            largest = max(largest, f32::abs(product[k]));
        }
        let exponent = u32::reinterpret(largest) & 0x7F80_0000u32;
        let scale = f32::reinterpret(0x7E80_0000u32 - exponent);
        #[unroll]
        for k in 0..8usize {
            product[k] *= scale;
        }
        product
    }
}

/// The scan of an array of items, one after another.
pub struct Items<C>(PhantomData<C>);

#[derive(CubeType, CubeLaunch)]
pub struct ItemsBuffers {
    x: Box<[f32]>,
    y: Box<[f32]>,
    length: usize,
}

#[cube]
impl<C: Combine> Scan for Items<C> {
    type Combine = C;
    type Buffers = ItemsBuffers;

    fn load(buffers: &Self::Buffers, sequence: usize, i: usize) -> Array<f32> {
        let at = (sequence * buffers.length + i) * comptime!(C::REGISTERS);
        let mut item = Array::<f32>::new(comptime!(C::REGISTERS));
        #[unroll]
        for k in 0..comptime!(C::REGISTERS) {
            item[k] = buffers.x[at + k];
        }
        item
    }

    fn store(buffers: &mut Self::Buffers, sequence: usize, i: usize, prefix: &Array<f32>) {
        let at = (sequence * buffers.length + i) * comptime!(C::REGISTERS);
        #[unroll]
        for k in 0..comptime!(C::REGISTERS) {
            buffers.y[at + k] = prefix[k];
        }
    }
}

/// Scans the items of `x`, `[sequences · length · registers]`.
pub fn scanned<C: Combine>(x: &CubeTensor, request: ScanRequest) -> CubeTensor {
    let elements = request.sequences * request.length * C::REGISTERS;
    let y = launch::output(x, request.op, "y", Shape::new([elements]), DType::F32);
    // SAFETY: x and y hold sequences × length items.
    unsafe {
        scan::<Items<C>>(x, x.required_address_type(), request, || {
            ItemsBuffersLaunch::new(
                x.clone().into_buffer_arg(),
                y.clone().into_buffer_arg(),
                request.length,
            )
        });
    }
    y
}

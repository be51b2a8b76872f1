//! What no public function reaches: scales on the device, and sums of nothing with something added.

use super::{Alpha, Family, Product, families, view};
use crate::device::{self, Opened};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

/// A device with kernels and its client: that of `KILN_DEVICE`, or wgpu; none where there is no driver.
fn kernels() -> Option<(Device, Client)> {
    let client = |opened: &Opened| device::client(&opened.device);
    let opened = kiln_test::kernels(device::open, |opened| client(opened).is_some())?;
    let client = client(&opened)?;
    Some((opened.device, client))
}

/// A tensor of small whole numbers, exact in every element type, and these numbers.
pub(super) fn tensor(
    like: &CubeTensor,
    shape: impl Into<Shape>,
    dtype: DType,
    seed: usize,
) -> (CubeTensor, Vec<f32>) {
    let shape = shape.into();
    let numbers: Vec<f32> =
        (0..shape.num_elements()).map(|i| ((i * 7 + seed * 5) % 9) as f32 - 4.0).collect();
    (upload(like, shape, dtype, &numbers), numbers)
}

pub(super) fn upload(like: &CubeTensor, shape: Shape, dtype: DType, numbers: &[f32]) -> CubeTensor {
    let bytes: Vec<u8> = match dtype {
        DType::BF16 => {
            // Exact: the upper half of the f32.
            numbers.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_ne_bytes()).collect()
        }
        _ => numbers.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    };
    let (client, device) = (like.client.clone(), like.device.clone());
    let handle = client.create_from_slice(&bytes);
    CubeTensor::new_contiguous(client, device, shape, handle, dtype)
}

/// The numbers of an f32 tensor.
pub(super) fn numbers(tensor: CubeTensor) -> Vec<f32> {
    let tensor = burn_cubecl::kernel::into_contiguous(tensor);
    let bytes = tensor.client.read_one(tensor.handle.clone()).expect("readable");
    let count = tensor.meta.shape().num_elements();
    let floats = bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    floats.take(count).collect()
}

/// Any tensor of the device.
pub(crate) fn like() -> Option<(Device, CubeTensor)> {
    let (device, client) = kernels()?;
    let cube = match device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(cube) => cube.clone(),
        _ => return None,
    };
    let handle = client.empty(4);
    let tensor = CubeTensor::new_contiguous(client, cube, Shape::new([1]), handle, DType::F32);
    Some((device, tensor))
}

/// The families of a device with operands of an element type, each as it is forced.
fn all(device: &Device) -> Vec<(DType, Family)> {
    let of = |dtype| families(device, dtype).into_iter().map(move |family| (dtype, family));
    let mut all: Vec<_> = of(DType::F32).collect();
    if device.supports_dtype(DType::BF16) {
        all.extend(of(DType::BF16));
    } else {
        kiln_test::skip("cuda", format!("bf16 on {device:?}"));
    }
    for (family, name) in [(Family::Wgmma, "wgmma"), (Family::Mma, "mma")] {
        if all.iter().all(|(_, there)| *there != family) {
            kiln_test::skip(name, format!("{device:?} has no {family}"));
        }
    }
    all
}

#[test]
fn a_scale_for_each_matrix_of_a_batch() {
    let Some((device, like)) = like() else { return };
    // Whole sums, parts of K, symmetric ones.
    for ([batches, m, k, n], symmetric) in
        [([3, 40, 24, 56], false), ([2, 24, 4096, 32], false), ([3, 200, 24, 200], true)]
    {
        for (dtype, family) in all(&device) {
            let (a, a_held) = tensor(&like, [batches, m, k], dtype, 1);
            let (b, b_held) = match symmetric {
                false => tensor(&like, [batches, k, n], dtype, 2),
                true => (view::transposed(a.clone()), vec![]),
            };
            let b_at = |z: usize, i: usize, j: usize| match symmetric {
                false => b_held[(z * k + i) * n + j],
                true => a_held[(z * m + j) * k + i],
            };
            let scales: Vec<f32> = (0..batches).map(|z| 0.25 * (z as f32 + 1.0)).collect();
            let device_scales = upload(&like, Shape::new([batches]), DType::F32, &scales);
            let alpha = Alpha { number: 2.0, scales: Some(device_scales) };
            let family_name = family.name();
            let product = || Product {
                alpha: alpha.clone(),
                symmetric,
                family: Some(family),
                ..Product::new("test", a.clone(), b.clone(), DType::F32)
            };
            // The scale multiplies what is added too. Of a symmetric result that is symmetric.
            let one = upload(&like, Shape::new([1, 1, 1]), DType::F32, &[3.0]);
            let added = numbers(product().accumulate(one, 4.0).run());
            let found = numbers(product().run());
            // C of the operands' type, a matrix for each product, as wgmma's ring takes it; and C where the result goes.
            let own = [(dtype, 4.0), (DType::F32, 1.0)].map(|(dtype, beta)| {
                let (c, held) = tensor(&like, [batches, m, n], dtype, 5);
                (numbers(product().accumulate(c, beta).run()), held, beta as f32)
            });
            for z in 0..batches {
                for i in 0..m {
                    for j in 0..n {
                        let sum: f32 =
                            (0..k).map(|l| a_held[(z * m + i) * k + l] * b_at(z, l, j)).sum();
                        // Whole numbers: exact whatever the order.
                        let at = (z * m + i) * n + j;
                        let expected = 2.0 * scales[z] * sum;
                        let what = format!("{dtype:?} {family_name} {z} {i} {j}");
                        assert_eq!(found[at], expected, "{what}");
                        assert_eq!(added[at], expected + 12.0 * scales[z], "{what}");
                        for (y, c, beta) in own.iter().filter(|_| !symmetric) {
                            assert_eq!(y[at], expected + beta * scales[z] * c[at], "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_sum_of_nothing_leaves_what_is_added() {
    let Some((device, like)) = like() else { return };
    for (dtype, family) in all(&device) {
        for rows in [1, 5] {
            let (a, _) = tensor(&like, [2, 5, 0], dtype, 1);
            let (b, _) = tensor(&like, [2, 0, 7], dtype, 1);
            let (c, held) = tensor(&like, [1, rows, 7], DType::F32, 3);
            let product = Product::new("test", a, b, DType::F32);
            let y = Product { family: Some(family), ..product }.accumulate(c, 0.5).run();
            let expected: Vec<f32> =
                (0..2 * 5 * 7).map(|i| 0.5 * held[i % (5 * 7) % (rows * 7)]).collect();
            assert_eq!(numbers(y), expected, "{dtype:?} {}", family.name());
        }
    }
    // In its own memory, as sums over chunks of rows do.
    let (c, held) = tensor(&like, [5, 7], DType::F32, 3);
    let (a, _) = tensor(&like, [5, 0], DType::F32, 1);
    let (b, _) = tensor(&like, [0, 7], DType::F32, 1);
    let y = Product::new("test", a, b, DType::F32).accumulate(c, 1.0).run();
    assert_eq!(numbers(y), held);
}

//! Scans and reductions against float64 on the host: exactly where every step is exact, which shows
//! that each item counts once and in its place, and within the bounds of rounding elsewhere.

mod host;
mod ops;
mod reductions;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use host::{Host, MATRICES, MOEBIUS, SUM};
use kiln_ops::launch::audit::Audit;
use kiln_ops::reduce::{Combine, Sums};
use kiln_ops::scan::ScanRequest;
use ops::{Matrices, Moebius, scanned};

/// The devices with kernels.
fn devices() -> Vec<cubecl::Device> {
    let found: Vec<_> = crate::common::devices()
        .iter()
        .filter_map(|device| match device.as_dispatch() {
            DispatchDevice::Cube(device) => Some(device.clone()),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        kiln_test::skip("kernels", "no device has them");
    }
    found
}

fn upload(values: &[f64], device: &cubecl::Device) -> CubeTensor {
    let client = device.client();
    let held: Vec<u8> = values.iter().flat_map(|v| (*v as f32).to_ne_bytes()).collect();
    let handle = client.create_from_slice(&held);
    let shape = Shape::new([values.len()]);
    CubeTensor::new_contiguous(client, device.clone(), shape, handle, DType::F32)
}

fn download(tensor: &CubeTensor) -> Vec<f32> {
    let bytes = tensor.client.read_one(tensor.handle.clone()).expect("the kernels ran");
    let elements = tensor.meta.num_elements();
    bytes
        .chunks_exact(4)
        .take(elements)
        .map(|b| f32::from_ne_bytes(b.try_into().unwrap()))
        .collect()
}

/// Forward inclusive and reverse exclusive scans for even `number`, the other two for odd.
fn two_scans(
    number: usize,
    (sequences, length, blocks): (usize, usize, Option<usize>),
) -> [ScanRequest; 2] {
    [false, true].map(|reverse| ScanRequest {
        op: "scan",
        sequences,
        length,
        reverse,
        exclusive: reverse != (number % 2 == 1),
        blocks,
    })
}

/// Around units, planes, tiles and blocks; primes.
const LENGTHS: &[usize] = &[
    1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 509, 511,
    512, 513, 1009, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4097, 6151, 8192, 8193,
];

/// Sequences, length, blocks.
fn cases() -> Vec<(usize, usize, Option<usize>)> {
    let mut cases: Vec<_> = LENGTHS.iter().map(|length| (1, *length, None)).collect();
    cases.extend([0, 1, 63, 1025].map(|length| (3, length, None)));
    cases.extend([5, 8, 65, 130].map(|length| (301, length, None)));
    for length in [1, 1024, 1025, 2049, 8193, 20_011] {
        cases.extend([(1, length, Some(1)), (3, length, Some(2)), (2, length, Some(1000))]);
    }
    cases.extend([(0, 9, None), (1, 65_537, None), (7, 40_009, None), (700, 5000, Some(5))]);
    cases
}

fn scans_are_exact<C: Combine>(host: &Host, scale: f64) {
    for device in devices() {
        for (number, case) in cases().into_iter().enumerate() {
            let (sequences, length, _) = case;
            let x = host.exact(sequences * length, 7 + length as u64);
            for request in two_scans(number, case) {
                let name = format!("{} {request:?}", host.name);
                let uploaded = upload(&x, &device);
                let audit = Audit::begin();
                let y = scanned::<C>(&uploaded, request);
                let y = if x.is_empty() { vec![] } else { download(&y) };
                for finding in audit.finish() {
                    assert!(x.is_empty() || finding.clean(), "{name}: {finding}");
                }
                let expected = host.scan(&x, &request);
                assert_eq!(y.len(), expected.len(), "{name}");
                let wrong = y.iter().zip(&expected).position(|(y, e)| f64::from(*y) != e * scale);
                assert_eq!(wrong.map(|at| (at, y[at], expected[at])), None, "{name}");
            }
        }
    }
}

#[test]
fn scans_of_exact_sums_are_exact() {
    let _alone = crate::alone();
    scans_are_exact::<Sums<1>>(&SUM, 1.0);
}

#[test]
fn scans_of_exact_products_are_exact() {
    let _alone = crate::alone();
    scans_are_exact::<Matrices>(&MATRICES, 1.0);
}

#[test]
fn scans_of_exact_maps_are_exact() {
    let _alone = crate::alone();
    scans_are_exact::<Moebius>(&MOEBIUS, 0.5);
}

fn scans_round_and_repeat<C: Combine>(host: &Host) {
    for device in devices() {
        let cases = [
            (3, 129, None),
            (2, 1009, None),
            (1, 8193, None),
            (5, 3001, Some(3)),
            (1, 1_000_003, None),
            (1, 1_000_003, Some(50)),
        ];
        for (number, case) in cases.into_iter().enumerate() {
            let (sequences, length, _) = case;
            let x = host.real(sequences * length, 3 + length as u64);
            for request in two_scans(number, case) {
                let name = format!("{} {request:?}", host.name);
                let run = || download(&scanned::<C>(&upload(&x, &device), request));
                let (y, again) = (run(), run());
                assert!(y.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
                let (expected, bounds) = (host.scan(&x, &request), host.bounds(&x, &request));
                for (at, y) in y.iter().enumerate() {
                    let (error, bound) = ((f64::from(*y) - expected[at]).abs(), bounds[at]);
                    assert!(error <= bound, "{name} at {at}: off by {error}, may be by {bound}");
                }
            }
        }
    }
}

#[test]
fn sums_round_and_repeat() {
    let _alone = crate::alone();
    scans_round_and_repeat::<Sums<1>>(&SUM);
}

#[test]
fn products_round_and_repeat() {
    let _alone = crate::alone();
    scans_round_and_repeat::<Matrices>(&MATRICES);
}

//! Scans and reductions against float64 on the host: exactly where every step is exact, which shows
//! that each item counts once and in its place, and within the bounds of rounding elsewhere.

#[allow(dead_code)] // some of it is for operators
mod common;
mod scans;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use common::numbers;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;
use kiln_ops::launch;
use kiln_ops::launch::audit::Audit;
use kiln_ops::reduce::{self, Combine, RowUnits, Sums};
use kiln_ops::scan::{self, ScanRequest};
use scans::{Matrices, Moebius, scanned};

/// The devices with kernels.
fn devices() -> Vec<cubecl::Device> {
    let found: Vec<_> = common::devices()
        .iter()
        .filter_map(|device| match device.as_dispatch() {
            DispatchDevice::Cube(device) => Some(device.clone()),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        eprintln!("SKIPPED: no device with kernels");
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

/// An operation in float64, on items of up to 8 registers.
struct Host {
    name: &'static str,
    registers: usize,
    identity: [f64; 8],
    combine: fn(&[f64; 8], &[f64; 8]) -> [f64; 8],
    /// Roundings that a term of a combination can meet in one.
    roundings: usize,
}

const SUM: Host = Host {
    name: "sum",
    registers: 1,
    identity: [0.0; 8],
    combine: |a, b| [a[0] + b[0], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    roundings: 1,
};

const MATRICES: Host = Host {
    name: "matrices",
    registers: 4,
    identity: [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    combine: |a, b| {
        let mut c = [0.0; 8];
        for (at, c) in c[..4].iter_mut().enumerate() {
            let (i, j) = (at / 2, at % 2);
            *c = a[2 * i] * b[j] + a[2 * i + 1] * b[2 + j];
        }
        c
    },
    roundings: 2,
};

/// Not scaled: powers of two are left to the comparison.
const MOEBIUS: Host = Host {
    name: "moebius",
    registers: 8,
    identity: [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    combine: |earlier, later| {
        let mut c = [0.0; 8];
        for i in 0..2 {
            for j in 0..2 {
                for k in 0..2 {
                    let (a, b) = (&later[4 * i + 2 * k..], &earlier[4 * k + 2 * j..]);
                    c[4 * i + 2 * j] += a[0] * b[0] - a[1] * b[1];
                    c[4 * i + 2 * j + 1] += a[0] * b[1] + a[1] * b[0];
                }
            }
        }
        c
    },
    roundings: 0,
};

impl Host {
    fn item(&self, x: &[f64], i: usize) -> [f64; 8] {
        let mut item = [0.0; 8];
        item[..self.registers].copy_from_slice(&x[i * self.registers..(i + 1) * self.registers]);
        item
    }

    /// Element i with all before it, or only those.
    fn scan(&self, x: &[f64], request: &ScanRequest) -> Vec<f64> {
        let (length, registers) = (request.length, self.registers);
        let mut out = vec![0.0; x.len()];
        for sequence in 0..request.sequences {
            let mut prefix = self.identity;
            for step in 0..length {
                let at = if request.reverse { length - 1 - step } else { step };
                let at = sequence * length + at;
                let next = (self.combine)(&prefix, &self.item(x, at));
                let result = if request.exclusive { &prefix } else { &next };
                out[at * registers..(at + 1) * registers].copy_from_slice(&result[..registers]);
                prefix = next;
            }
        }
        out
    }

    /// Most that rounding can do to a result, in any order of the combinations: with n items behind it
    /// γ of n times the roundings of one, of what the moduli combine to.
    fn bounds(&self, x: &[f64], request: &ScanRequest) -> Vec<f64> {
        let moduli: Vec<f64> = x.iter().map(|x| x.abs()).collect();
        let mut bounds = self.scan(&moduli, request);
        for (at, bound) in bounds.iter_mut().enumerate() {
            let i = at / self.registers % request.length;
            let step = if request.reverse { request.length - 1 - i } else { i };
            *bound *= gamma((step + 1) * self.roundings);
        }
        bounds
    }

    /// All of them.
    fn all(&self, x: &[f64]) -> [f64; 8] {
        let items = x.len() / self.registers;
        (0..items).fold(self.identity, |all, i| (self.combine)(&all, &self.item(x, i)))
    }

    /// Items on which combinations are exact in f32, whatever their order: small integers, signed
    /// permutations, and those times powers of i.
    fn exact(&self, items: usize, seed: u64) -> Vec<f64> {
        let mut state = seed * 2 + 1;
        let mut next = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut x = vec![0.0; items * self.registers];
        for item in x.chunks_mut(self.registers) {
            if self.registers == 1 {
                item[0] = next(7) as f64 - 3.0;
                continue;
            }
            let (crossed, half) = (next(2) as usize, self.registers / 2);
            for row in 0..2 {
                let column = row ^ crossed;
                let sign = [1.0, -1.0][next(2) as usize];
                let part = next((half / 2) as u64) as usize;
                item[row * half + column * (half / 2) + part] = sign;
            }
        }
        x
    }

    /// Items whose combinations stay of a size: numbers about 0.3, and rows of matrices that add up to
    /// one, some with a negative part.
    fn real(&self, items: usize, seed: u64) -> Vec<f64> {
        let x = numbers(items * self.registers, seed, 0.3);
        let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x as f32)).collect();
        if self.registers == 4 {
            for row in x.chunks_mut(2) {
                let share = (row[0].abs() / (row[0].abs() + row[1].abs() + 0.1)) as f32;
                row[0] = f64::from(share);
                row[1] = f64::from(1.0 - share) * if row[1] < -1.2 { -1.0 } else { 1.0 };
            }
        }
        x
    }
}

/// n roundings, one after another.
fn gamma(n: usize) -> f64 {
    let nu = n as f64 * 2f64.powi(-24);
    assert!(nu < 0.5);
    nu / (1.0 - nu)
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
    scans_are_exact::<Sums<1>>(&SUM, 1.0);
}

#[test]
fn scans_of_exact_products_are_exact() {
    scans_are_exact::<Matrices>(&MATRICES, 1.0);
}

#[test]
fn scans_of_exact_maps_are_exact() {
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
    scans_round_and_repeat::<Sums<1>>(&SUM);
}

#[test]
fn products_round_and_repeat() {
    scans_round_and_repeat::<Matrices>(&MATRICES);
}

/// The item of each unit reduced over the row, and scanned over it.
#[cube(launch_unchecked)]
fn units_kernel<C: Combine>(
    items: &[f32],
    reduced: &mut [f32],
    before: &mut [f32],
    all: &mut [f32],
    #[comptime] row: RowUnits,
) {
    let registers = comptime!(C::REGISTERS);
    let mut memory = Shared::<[f32]>::new_slice(comptime!(registers * row.shared()));
    let mut again = Shared::<[f32]>::new_slice(comptime!(registers * scan::shared(&row)));
    let at = ABSOLUTE_POS * registers;
    let mut item = Array::<f32>::new(registers);
    #[unroll]
    for k in 0..registers {
        item[k] = items[at + k];
    }
    let prefix = scan::rows::<C>(&item, &mut again, row);
    reduce::rows::<C>(&mut item, &mut memory, row);
    #[unroll]
    for k in 0..registers {
        reduced[at + k] = item[k];
        before[at + k] = prefix.before[k];
        all[at + k] = prefix.all[k];
    }
}

fn plane(client: &Client) -> u32 {
    let hardware = &client.properties().hardware;
    let fixed = hardware.plane_size_min == hardware.plane_size_max;
    if fixed && client.features().plane.contains(Plane::Ops) { hardware.plane_size_max } else { 1 }
}

/// Rows of all kinds that fit a cube of 256 units.
fn rows(plane: u32) -> Vec<RowUnits> {
    let mut rows = vec![];
    for units in [1, 2, 4, 8, 16, 32, 64, 128, 256].into_iter().chain([3, 5, 8].map(|n| n * plane))
    {
        for count in [1, 4, 7] {
            // Cubes of whole planes, or less than one.
            let whole = units * count % plane == 0 || count == 1;
            if (units.is_power_of_two() || plane > 1) && whole && units * count <= 256 {
                rows.push(RowUnits { units, rows: count, plane });
            }
        }
    }
    rows
}

fn units_reduce_and_scan<C: Combine>(host: &Host, scale: f64) {
    const CUBES: usize = 2;
    for device in devices() {
        let client = device.client();
        for row in rows(plane(&client)) {
            let units = row.units as usize;
            let count = CUBES * row.rows as usize;
            let x = host.exact(units * count, 11 + units as u64);
            let input = upload(&x, &device);
            let out = || launch::output(&input, "units", "out", Shape::new([x.len()]), DType::F32);
            let audit = Audit::begin();
            let outs = [out(), out(), out()];
            let [reduced, before, all] = outs.clone().map(CubeTensor::into_buffer_arg);
            // SAFETY: every unit has an item.
            unsafe {
                units_kernel::launch_unchecked::<C>(
                    &client,
                    CubeCount::Static(CUBES as u32, 1, 1),
                    row.cube_dim(),
                    input.clone().into_buffer_arg(),
                    reduced,
                    before,
                    all,
                    row,
                );
            }
            let [reduced, before, all] = outs.map(|out| download(&out));
            for finding in audit.finish() {
                assert!(finding.clean(), "{row:?}: {finding}");
            }
            for (r, x) in x.chunks(units * host.registers).enumerate() {
                let total = host.all(x);
                for unit in 0..units {
                    let prefix = host.all(&x[..unit * host.registers]);
                    for k in 0..host.registers {
                        let at = (r * units + unit) * host.registers + k;
                        let what = format!("{} {row:?}, row {r}, unit {unit}", host.name);
                        let near = |y: f32, e: f64| {
                            // Items that were never combined are not scaled.
                            f64::from(y) == e * scale || f64::from(y) == e
                        };
                        assert!(near(reduced[at], total[k]), "{what}: {}", reduced[at]);
                        assert!(near(all[at], total[k]), "{what}: {}", all[at]);
                        assert!(near(before[at], prefix[k]), "{what}: {}", before[at]);
                    }
                }
            }
        }
    }
}

#[test]
fn units_reduce_and_scan_sums() {
    units_reduce_and_scan::<Sums<1>>(&SUM, 1.0);
}

#[test]
fn units_reduce_and_scan_products() {
    units_reduce_and_scan::<Matrices>(&MATRICES, 1.0);
}

#[test]
fn units_reduce_and_scan_maps() {
    units_reduce_and_scan::<Moebius>(&MOEBIUS, 0.5);
}

fn columns_reduce<C: Combine>(host: &Host) {
    for device in devices() {
        for (rows, width) in [1, 2, 15, 16, 17, 100, 257]
            .into_iter()
            .flat_map(|rows| [1, 31, 32, 33, 70].map(|width| (rows, width)))
        {
            let x = host.exact(rows * width, rows as u64);
            // Rows of as many rows as an item has registers.
            let mut turned = vec![0.0; x.len()];
            for (at, x) in x.iter().enumerate() {
                let (item, k) = (at / host.registers, at % host.registers);
                let (row, column) = (item / width, item % width);
                turned[(row * host.registers + k) * width + column] = *x;
            }
            let input = upload(&turned, &device);
            let audit = Audit::begin();
            let shape = Shape::new([host.registers, width]);
            let out = launch::output(&input, "columns", "out", shape, DType::F32);
            reduce::columns::<C>(input, rows, &out);
            let out = download(&out);
            for finding in audit.finish() {
                assert!(finding.clean(), "{rows}×{width}: {finding}");
            }
            for column in 0..width {
                let items = (0..rows)
                    .flat_map(|row| host.item(&x, row * width + column)[..host.registers].to_vec());
                let expected = host.all(&items.collect::<Vec<_>>());
                for k in 0..host.registers {
                    let y = f64::from(out[k * width + column]);
                    assert_eq!(y, expected[k], "{} {rows}×{width}, column {column}", host.name);
                }
            }
        }
    }
}

#[test]
fn columns_reduce_sums_and_products() {
    columns_reduce::<Sums<1>>(&SUM);
    columns_reduce::<Matrices>(&MATRICES);
}

/// The elements of vectors combined.
#[cube(launch_unchecked)]
fn vector_kernel<C: Combine, N: Size>(x: &[Vector<f32, N>], out: &mut [f32]) {
    out[ABSOLUTE_POS] = reduce::vector::<C, N>(x[ABSOLUTE_POS]);
}

#[test]
fn vectors_reduce() {
    for device in devices() {
        let client = device.client();
        let x = numbers(64, 5, 0.3);
        let run = |max: bool| {
            let input = upload(&x, &device);
            let out = launch::output(&input, "vector", "out", Shape::new([16]), DType::F32);
            let (cubes, units) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(16));
            let (input, result) = (input.into_buffer_arg(), out.clone().into_buffer_arg());
            // SAFETY: 16 units, 16 vectors of 4.
            unsafe {
                if max {
                    vector_kernel::launch_unchecked::<reduce::Max>(
                        &client, cubes, units, 4, input, result,
                    );
                } else {
                    vector_kernel::launch_unchecked::<Sums<1>>(
                        &client, cubes, units, 4, input, result,
                    );
                }
            }
            download(&out)
        };
        let (sums, maxima) = (run(false), run(true));
        for (i, x) in x.chunks(4).enumerate() {
            let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
            assert_eq!(sums[i], x[0] + x[1] + x[2] + x[3]);
            assert_eq!(maxima[i], x.iter().copied().fold(f32::MIN, f32::max));
        }
    }
}

//! Reductions, and scans over the units of a row.

use super::host::{Host, MATRICES, MOEBIUS, SUM};
use super::ops::{Matrices, Moebius};
use super::{devices, download, upload};
use crate::common::numbers;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kiln_ops::launch;
use kiln_ops::launch::audit::Audit;
use kiln_ops::reduce::{self, Combine, RowUnits, Sums};
use kiln_ops::scan;

/// The item of each unit reduced over the row, and scanned over it both ways.
#[cube(launch_unchecked)]
fn units_kernel<C: Combine>(
    items: &[f32],
    reduced: &mut [f32],
    before: &mut [f32],
    all: &mut [f32],
    behind: &mut [f32],
    all_in_reverse: &mut [f32],
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
    let prefix = scan::rows::<C>(&item, &mut again, row, false);
    sync_cube();
    let suffix = scan::rows::<C>(&item, &mut again, row, true);
    reduce::rows::<C>(&mut item, &mut memory, row);
    #[unroll]
    for k in 0..registers {
        reduced[at + k] = item[k];
        before[at + k] = prefix.before[k];
        all[at + k] = prefix.all[k];
        behind[at + k] = suffix.before[k];
        all_in_reverse[at + k] = suffix.all[k];
    }
}

/// Rows of all kinds that fit a cube of 256 units.
fn rows(client: &Client) -> Vec<RowUnits> {
    let mut rows = vec![];
    let plane = RowUnits::new(client, 1, 1).plane;
    for units in [1, 2, 4, 8, 16, 32, 64, 128, 256].into_iter().chain([3, 5, 8].map(|n| n * plane))
    {
        for count in [1, 4, 7] {
            // Cubes of whole planes, or less than one.
            let whole = units * count % plane == 0 || count == 1;
            if (units.is_power_of_two() || plane > 1) && whole && units * count <= 256 {
                rows.push(RowUnits::new(client, units, count));
            }
        }
    }
    rows
}

fn units_reduce_and_scan<C: Combine>(host: &Host, scale: f64) {
    const CUBES: usize = 2;
    for device in devices() {
        let client = device.client();
        for row in rows(&client) {
            let units = row.units as usize;
            let count = CUBES * row.rows as usize;
            let x = host.exact(units * count, 11 + units as u64);
            let input = upload(&x, &device);
            let out = || launch::output(&input, "units", "out", Shape::new([x.len()]), DType::F32);
            let audit = Audit::begin();
            let outs = std::array::from_fn::<_, 5, _>(|_| out());
            let [reduced, before, all, behind, reversed] =
                outs.clone().map(CubeTensor::into_buffer_arg);
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
                    behind,
                    reversed,
                    row,
                );
            }
            let [reduced, before, all, behind, reversed] = outs.map(|out| download(&out));
            for finding in audit.finish() {
                assert!(finding.clean(), "{row:?}: {finding}");
            }
            for (r, x) in x.chunks(units * host.registers).enumerate() {
                let total = host.all(x);
                let of_reverse = host.all_in_reverse(x);
                for unit in 0..units {
                    let prefix = host.all(&x[..unit * host.registers]);
                    let suffix = host.all_in_reverse(&x[(unit + 1) * host.registers..]);
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
                        assert!(near(behind[at], suffix[k]), "{what}: {}", behind[at]);
                        assert!(near(reversed[at], of_reverse[k]), "{what}: {}", reversed[at]);
                    }
                }
            }
        }
    }
}

#[test]
fn units_reduce_and_scan_sums() {
    let _alone = crate::alone();
    units_reduce_and_scan::<Sums<1>>(&SUM, 1.0);
}

#[test]
fn units_reduce_and_scan_products() {
    let _alone = crate::alone();
    units_reduce_and_scan::<Matrices>(&MATRICES, 1.0);
}

#[test]
fn units_reduce_and_scan_maps() {
    let _alone = crate::alone();
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
    let _alone = crate::alone();
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
    let _alone = crate::alone();
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

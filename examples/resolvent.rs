//! A chain of atoms, its density of states by [`bk`], and what each site does to the states in its gap:
//!
//! ```text
//! cargo run --release --example resolvent -- auto resolvent.svg
//! ```
//!
//! The hoppings of the chain alternate between t and T (Su, Schrieffer and Heeger), it begins with the weak one, and one
//! site in its bulk is higher by U. With G(z) = (H − z)⁻¹ the density of states of site j is Im G_jj(E + iη)/π. Known
//! without a computer, and checked here:
//!
//! * The bands are T − t ≤ |E| ≤ T + t, and the density is highest at their edges.
//! * The weak end has a state at E = 0, with 1 − (t/T)² of it on site 0.
//! * The impurity has two, above the bands and in the gap, where U²E² = (E² − (T + t)²)(E² − (T − t)²).

use burn::tensor::{Device, Tensor, TensorData};
use kiln_ops::bk::{BkOptions, bk};
use kiln_ops::{OpError, device};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::f64::consts::PI;
use std::ops::RangeInclusive;

const WEAK: f64 = 0.5;
const STRONG: f64 = 1.0;
/// An odd number: the other end has the strong bond, and no state.
const SITES: usize = 201;
const IMPURITY: usize = 40;
const HEIGHT: f64 = 1.5;
/// η, the half width of a level.
const WIDTH: f64 = 0.02;
/// Energies of the density, from −3 to 3.
const ENERGIES: usize = 1201;
const STEP: f64 = 0.005;
/// From the impurity's state in the gap to that of the end, in steps.
const WINDOW: RangeInclusive<i32> = -350..=0;
const WINDOW_STEP: f64 = 1e-3;
/// Sites in the picture.
const SHOWN: usize = 60;

const INK: RGBColor = RGBColor(0x22, 0x2b, 0x38);
const MUTED: RGBColor = RGBColor(0x5f, 0x6b, 0x7a);
const BLUE: RGBColor = RGBColor(0x2f, 0x6f, 0xb7);
const ORANGE: RGBColor = RGBColor(0xd9, 0x5f, 0x0e);

type Failure = Box<dyn std::error::Error>;

fn energy(row: usize) -> f64 {
    (row as f64 - (ENERGIES / 2) as f64) * STEP
}

/// The density of states of each site, a row for each energy: all energies are one batch.
fn density(sites: Tensor<2>, energies: &[f64]) -> Result<Tensor<2>, OpError> {
    let (device, rows) = (sites.device(), energies.len());
    let bonds = (0..SITES - 1).map(|i| if i % 2 == 0 { WEAK as f32 } else { STRONG as f32 });
    let bonds = TensorData::new(bonds.collect(), [1, SITES - 1]);
    let bonds = Tensor::<2>::from_data(bonds, &device);
    let z = energies.iter().flat_map(|e| [*e as f32, WIDTH as f32]).collect();
    let z = Tensor::<2>::from_data(TensorData::new(z, [rows, 2]), &device);
    let g = bk(sites.expand([rows, SITES]), bonds.clone(), bonds, z, BkOptions::default())?;
    Ok(g.narrow(2, 1, 1).reshape([rows, SITES]) / PI)
}

/// How many states are in the window.
fn states(sites: Tensor<2>) -> Result<Tensor<1>, OpError> {
    let energies: Vec<f64> = WINDOW.map(|i| f64::from(i) * WINDOW_STEP).collect();
    Ok(density(sites, &energies)?.sum() * WINDOW_STEP)
}

/// The on-site energies, the first of them moved.
fn chain(first: f64, device: &Device) -> Tensor<2> {
    let mut energies = vec![0.0; SITES];
    (energies[0], energies[IMPURITY]) = (first as f32, HEIGHT as f32);
    Tensor::from_data(TensorData::new(energies, [1, SITES]), device)
}

/// The energy of a row and its density of states per site.
fn total((row, sites): (usize, &[f64])) -> (f64, f64) {
    (energy(row), sites.iter().sum::<f64>() / SITES as f64)
}

fn numbers(tensor: Tensor<2>) -> Vec<f64> {
    tensor.into_data().iter().collect()
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let opened = device::open(&arguments.next().unwrap_or_else(|| "auto".into()))?;
    let path = arguments.next().unwrap_or_else(|| "resolvent.svg".into());
    println!("device: {}", opened.why);
    let device = &opened.device;

    let energies: Vec<f64> = (0..ENERGIES).map(energy).collect();
    let local = numbers(density(chain(0.0, device), &energies)?);
    let integral = local.chunks(SITES).enumerate().map(|row| total(row).1).sum::<f64>() * STEP;
    println!("{SITES} sites, {ENERGIES} energies, integral of the density {integral:.3}");

    let (inner, outer) = (STRONG - WEAK, STRONG + WEAK);
    // The two roots for E²: the state above comes out of the upper band, that in the gap out of the lower one.
    let half = (inner * inner + outer * outer + HEIGHT * HEIGHT) / 2.0;
    let root = (half * half - (inner * outer).powi(2)).sqrt();
    let bound = [-(half - root).sqrt(), (half + root).sqrt()];
    for (what, site, range, exact) in [
        ("inner edge of a band", SITES / 2, 0.5 * inner..1.0, inner),
        ("outer edge of a band", SITES / 2, 1.0..3.0, outer),
        ("end state", 0, -0.5 * inner..0.5 * inner, 0.0),
        ("impurity, in the gap", IMPURITY, -0.9 * inner..0.0, bound[0]),
        ("impurity, above the bands", IMPURITY, 1.1 * outer..3.0, bound[1]),
    ] {
        let rows = (0..ENERGIES).filter(|row| range.contains(&energies[*row]));
        let at = |row: usize| local[row * SITES + site];
        let peak = rows.max_by(|i, j| at(*i).total_cmp(&at(*j))).ok_or("no energy is inside")?;
        println!("{what}: peak of site {site} at {:.3}, exact {exact:.3}", energies[peak]);
        assert!((energies[peak] - exact).abs() < WIDTH, "{what}");
    }

    // A site that goes up takes each level along by how much of it is on the site: over the window's lower edge
    // into it, and over the upper edge out of it.
    let leaf = chain(0.0, &device.clone().autodiff()).require_grad();
    let gradients = states(leaf.clone())?.backward();
    let gradient = numbers(leaf.grad(&gradients).ok_or("the sites have no gradient")?);
    let moved = |by: f64| states(chain(by, device)).map(|x| x.into_scalar::<f64>());
    let difference = (moved(WINDOW_STEP)? - moved(-WINDOW_STEP)?) / (2.0 * WINDOW_STEP);
    let level = |at: i32| WIDTH / PI / ((f64::from(at) * WINDOW_STEP).powi(2) + WIDTH * WIDTH);
    let weight = 1.0 - (WEAK / STRONG).powi(2);
    let exact = weight * (level(*WINDOW.start()) - level(*WINDOW.end()));
    let found = gradient[0];
    println!("d(states in the window)/d(energy of site 0): {found:.3}");
    println!("by differences {difference:.3}, of the end state alone {exact:.3}");
    assert!((found / difference - 1.0).abs() < 0.01 && (found / exact - 1.0).abs() < 0.01);

    let mut svg = String::new();
    draw(&mut svg, &local, &gradient, bound)?;
    std::fs::write(&path, svg).map_err(|error| format!("{path}: {error}"))?;
    println!("picture: {path}");
    Ok(())
}

fn draw(svg: &mut String, local: &[f64], gradient: &[f64], bound: [f64; 2]) -> Result<(), Failure> {
    let short = |x: &f64| ((100.0 * x).round() / 100.0).to_string();
    let text = |size: i32, color: RGBColor| ("sans-serif", size).into_font().color(&color);
    let root = SVGBackend::with_string(svg, (1200, 960)).into_drawing_area();
    root.fill(&WHITE)?;
    let (upper, lower) = root.split_vertically(420);
    let (left, right) = lower.split_horizontally(600);
    let panel = |area, title: &str, axes: [&str; 2], x: [f64; 2], y: [f64; 2]| {
        let mut chart = ChartBuilder::on(area)
            .caption(title, text(20, INK))
            .margin(16)
            .x_label_area_size(56)
            .y_label_area_size(76)
            .build_cartesian_2d(x[0]..x[1], y[0]..y[1])?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_mesh().axis_style(MUTED).label_style(text(20, MUTED));
        mesh.x_label_formatter(&short).y_label_formatter(&short);
        mesh.axis_desc_style(text(20, INK)).x_desc(axes[0]).y_desc(axes[1]).draw()?;
        Ok::<_, Failure>(chart)
    };

    let title = "density of states; dashed: the edges of the bands";
    let mut chart = panel(&upper, title, ["energy", "per site"], [-2.5, 2.5], [0.0, 1.2])?;
    for edge in [STRONG - WEAK, STRONG + WEAK].into_iter().flat_map(|edge| [-edge, edge]) {
        let line = [(edge, 0.0), (edge, 1.2)];
        chart.draw_series(DashedLineSeries::new(line, 6, 6, MUTED.into()))?;
    }
    let line = local.chunks(SITES).enumerate().map(total).filter(|(e, _)| e.abs() <= 2.5);
    chart.draw_series(LineSeries::new(line, BLUE.stroke_width(2)))?;
    for (name, at) in [("end", 0.0), ("impurity", bound[0]), ("impurity", bound[1])] {
        let style = text(16, ORANGE).pos(Pos::new(HPos::Center, VPos::Bottom));
        chart.draw_series([Text::new(name, (at, 0.22), style)])?;
    }

    let x = [-0.5, SHOWN as f64 - 0.5];
    let title = "density of states of each site";
    let mut chart = panel(&left, title, ["site", "energy"], x, [-1.83, 2.43])?;
    // From −1.8 to 2.4, rectangles as high as twelve energies; what is nearly white is not drawn.
    let cells = (0..SHOWN).flat_map(|site| (240..=1080).step_by(12).map(move |row| (site, row)));
    chart.draw_series(cells.filter_map(|(site, row)| {
        let mean = (row - 6..row + 6).map(|row| local[row * SITES + site]).sum::<f64>() / 12.0;
        let shade = (10.0 * mean / (mean + 0.7)).round() / 10.0;
        let (x, y) = (site as f64, energy(row));
        let corners = [(x - 0.5, y - 6.0 * STEP), (x + 0.5, y + 6.0 * STEP)];
        (shade > 0.0).then(|| Rectangle::new(corners, INK.mix(shade).filled()))
    }))?;

    let [from, to] =
        [WINDOW.start(), WINDOW.end()].map(|at| short(&(f64::from(*at) * WINDOW_STEP)));
    let title = format!("d(states between {from} and {to})/d(energy of a site)");
    let mut chart = panel(&right, &title, ["site", ""], x, [-13.0, 13.0])?;
    let points = || (0..SHOWN).map(|site| (site as f64, gradient[site]));
    chart.draw_series(LineSeries::new(points(), BLUE.stroke_width(2)))?;
    chart.draw_series(points().map(|point| Circle::new(point, 3, ORANGE.filled())))?;
    root.present()?;
    Ok(())
}

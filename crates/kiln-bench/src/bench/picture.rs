//! How times grow, drawn as SVG.

use super::Run;
use super::compare::of_one_gpu;
use plotters::prelude::*;

/// Pixels.
const SIZE: (u32, u32) = (1200, 720);
const INK: RGBColor = RGBColor(0x22, 0x2b, 0x38);
const MUTED: RGBColor = RGBColor(0x5f, 0x6b, 0x7a);
const GRID: RGBColor = RGBColor(0xe6, 0xe9, 0xed);
const LINES: [RGBColor; 6] = [
    RGBColor(0x2f, 0x6f, 0xb7),
    RGBColor(0xd9, 0x5f, 0x0e),
    RGBColor(0x2f, 0x8f, 0x5b),
    RGBColor(0x8a, 0x4f, 0xa8),
    RGBColor(0xb5, 0x2f, 0x4f),
    RGBColor(0x6b, 0x6b, 0x2f),
];

/// A line: an implementation of a pass, and its times over the lengths.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// The times of all runs over the last dimension of the first input, both axes logarithmic.
///
/// # Errors
///
/// One line if the runs are of different GPUs, or have no two lengths.
pub fn picture(runs: &[Run]) -> Result<String, String> {
    of_one_gpu(runs)?;
    let lines = lines(runs);
    let all = || lines.iter().flat_map(|line| line.points.iter().copied());
    let ends = |of: fn((f64, f64)) -> f64| {
        let (low, high) =
            (all().map(of).fold(f64::MAX, f64::min), all().map(of).fold(0.0, f64::max));
        (low, high)
    };
    let (shortest, longest) = ends(|point| point.0);
    let (quickest, slowest) = ends(|point| point.1);
    if shortest >= longest {
        return Err(
            "a picture needs runs of several lengths (kiln bench bk --shapes lengths)".into()
        );
    }
    let mut svg = String::new();
    let x = (shortest * 0.9..longest * 1.1).log_scale();
    let y = (quickest * 0.7..slowest * 1.5).log_scale();
    let mut draw = || {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(24)
            .x_label_area_size(64)
            .y_label_area_size(96)
            .build_cartesian_2d(x.clone(), y.clone())?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(MUTED)
            .label_style(("sans-serif", 24).into_font().color(&MUTED))
            .axis_desc_style(("sans-serif", 26).into_font().color(&INK))
            .x_desc("length of a row (last dimension of the first input)")
            .y_desc("time")
            .x_label_formatter(&|length| format!("{length:.0}"))
            .y_label_formatter(&|us| time(*us))
            .draw()?;
        for (line, color) in lines.iter().zip(LINES.iter().cycle()) {
            let points = line.points.iter().copied();
            chart
                .draw_series(LineSeries::new(points.clone(), color.stroke_width(3)))?
                .label(&line.name)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 28, y)], color.stroke_width(3)));
            chart.draw_series(points.map(|at| Circle::new(at, 4, color.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .legend_area_size(36)
            .margin(16)
            .label_font(("sans-serif", 24).into_font().color(&INK))
            .background_style(WHITE)
            .draw()?;
        root.present()
    };
    draw().map_err(|error: DrawingAreaErrorKind<_>| format!("cannot draw: {error}"))?;
    Ok(svg)
}

fn lines(runs: &[Run]) -> Vec<Line> {
    let mut lines: Vec<Line> = vec![];
    let mut ops: Vec<_> = runs.iter().flat_map(|run| &run.rows).map(|r| (&r.op, r.pass)).collect();
    ops.dedup();
    for row in runs.iter().flat_map(|run| &run.rows) {
        let name = match ops.iter().all(|op| *op == ops[0]) {
            true => row.implementation.clone(),
            false => format!("{} {}, {}", row.op, row.pass, row.implementation),
        };
        let Some(length) = length(&row.shape) else { continue };
        if !lines.iter().any(|line| line.name == name) {
            lines.push(Line { name: name.clone(), points: vec![] });
        }
        let line = lines.iter_mut().find(|line| line.name == name).expect("it is there");
        line.points.push((length, row.us));
    }
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines
}

/// The last dimension of the first input of a shape, as [`Case`](super::Case) is written.
fn length(shape: &str) -> Option<f64> {
    shape.split([',', ' ']).next()?.rsplit('×').next()?.parse().ok()
}

fn time(us: f64) -> String {
    match us {
        us if us < 1e3 => format!("{us:.0} µs"),
        us if us < 1e6 => format!("{:.0} ms", us / 1e3),
        us => format!("{:.0} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::{row, run};
    use super::super::{Pass, Row};
    use super::*;

    fn of(implementation: &str, shape: &str, us: f64) -> Row {
        Row { shape: shape.into(), us, ..row(implementation, Pass::Forward, true) }
    }

    #[test]
    fn every_implementation_has_a_line_and_a_point_for_each_length() {
        let rows = vec![of("fused", "16×1024, 16×1023, 1×2", 5.0), of("fused", "16×2048", 9.0)];
        let peers = vec![of("jax", "16×1024", 50.0), of("jax", "16×2048 mode=causal", 99.0)];
        let svg = picture(&[run("NVIDIA H200", rows), run("NVIDIA H200", peers)]).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("fused\n") && svg.contains("jax\n"));
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(!svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn runs_without_lengths_or_of_different_gpus_are_refused() {
        let one = || vec![of("fused", "16×1024", 5.0)];
        let runs = [run("NVIDIA H200", one())];
        assert!(picture(&runs).unwrap_err().contains("several lengths"));
        let runs = [run("NVIDIA H200", one()), run("NVIDIA H100", one())];
        assert!(picture(&runs).unwrap_err().contains("different GPUs"));
        assert_eq!(time(999.0) + &time(2e3) + &time(3e6), "999 µs2 ms3 s");
    }
}

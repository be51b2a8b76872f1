//! How times grow, drawn as SVG.

use super::compare::of_one_gpu;
use super::{Row, Run};
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

/// An implementation of a pass, and its times over the lengths.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// The times of all runs over the last dimension of the first input, both axes logarithmic.
///
/// # Errors
///
/// One line if the runs are of different GPUs, have no two lengths, or have two times of one.
pub fn picture(runs: &[Run]) -> Result<String, String> {
    of_one_gpu(runs)?;
    let lines = lines(runs)?;
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

/// The lines, with the names of their implementations and of what not all have in common.
fn lines(runs: &[Run]) -> Result<Vec<Line>, String> {
    let rows = || runs.iter().flat_map(|run| &run.rows);
    let of = |row: &Row| {
        let attributes = row.shape.split_once(' ').map_or("", |(_, attributes)| attributes);
        let launched = if row.recorded { "" } else { "call by call" };
        [&row.op, &row.pass.to_string(), &row.dtype, attributes, launched].map(String::from)
    };
    let all: Vec<_> = rows().map(of).collect();
    let mut lines: Vec<Line> = vec![];
    for row in rows() {
        let Some(length) = length(&row.shape) else { continue };
        let differs = |i: &usize| all.iter().any(|other| other[*i] != all[0][*i]);
        let parts = of(row);
        let apart = (0..parts.len()).filter(differs).map(|i| parts[i].as_str());
        let parts = std::iter::once(row.implementation.as_str()).chain(apart);
        let name = parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ");
        let line = match lines.iter().position(|line| line.name == name) {
            Some(i) => &mut lines[i],
            None => lines.push_mut(Line { name, points: vec![] }),
        };
        if line.points.iter().any(|point| point.0 == length) {
            return Err(format!("there are two times of {} at length {length}", line.name));
        }
        line.points.push((length, row.us));
    }
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    Ok(lines)
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
    use super::super::Pass;
    use super::super::table::tests::{row, run};
    use super::*;

    fn of(implementation: &str, shape: &str, us: f64) -> Row {
        Row { shape: shape.into(), us, ..row(implementation, Pass::Forward, true) }
    }

    #[test]
    fn every_implementation_has_a_line_and_a_point_for_each_length() {
        let rows = vec![of("fused", "16×1024, 16×1023, 1×2", 5.0), of("fused", "16×2048", 9.0)];
        let peers = vec![of("jax", "16×1024", 50.0), of("jax", "16×2048", 99.0)];
        let svg = picture(&[run("NVIDIA H200", rows), run("NVIDIA H200", peers)]).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("fused\n") && svg.contains("jax\n"));
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(!svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn what_differs_has_a_line_of_its_own() {
        let causal = |length, us| of("jax", &format!("16×{length} mode=causal"), us);
        let by_call = Row { recorded: false, ..of("jax", "16×1024", 50.0) };
        let rows = vec![by_call, causal(1024, 20.0), causal(2048, 30.0)];
        let lines = lines(&[run("NVIDIA H200", rows)]).unwrap();
        let named = lines.iter().map(|line| (line.name.as_str(), line.points.len()));
        let expected = [("jax, call by call", 1), ("jax, mode=causal", 2)];
        assert_eq!(named.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn two_times_of_one_length_are_refused() {
        let rows = vec![of("fused", "16×1024", 5.0), of("fused", "8×1024", 9.0)];
        let error = picture(&[run("NVIDIA H200", rows)]).unwrap_err();
        assert_eq!(error, "there are two times of fused at length 1024");
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

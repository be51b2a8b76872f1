//! The loss curve of a run as SVG, drawn from its metrics.

use super::disk::{DiskError, replace_file};
use super::metrics::{Kind, Record};
use super::plot::{
    COLORS, Chart, Entry, MUTED, Over, PlotError, SIZE, frame, line, nothing, plain, ranges,
};
use super::series::{LARGEST, Series};
use plotters::prelude::*;
use std::path::Path;
use thiserror::Error;

/// Why a curve cannot be drawn.
#[derive(Debug, Error)]
pub enum CurveError {
    /// The filesystem refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The plotting library refused.
    #[error("cannot draw the loss curve: {0}")]
    Plot(String),
}

const TRAINING: RGBColor = COLORS[0];
const VALIDATION: RGBColor = COLORS[1];

/// Draws training and validation loss over the steps to an SVG file, replacing it as a whole.
///
/// `baseline` is a loss to compare with, such as that of a unigram model, and its name. Losses
/// that are not finite are gaps; without any loss the picture says so.
pub fn draw(
    records: &[Record],
    path: &Path,
    title: &str,
    baseline: Option<(&str, f64)>,
) -> Result<(), CurveError> {
    let picture = Picture::of(records, title, baseline);
    let mut svg = String::new();
    picture.render(&mut svg).map_err(|error| CurveError::Plot(error.to_string()))?;
    Ok(replace_file(path, svg.as_bytes())?)
}

struct Picture {
    title: String,
    training: Series,
    validation: Series,
    baseline: Option<(String, f64)>,
}

impl Picture {
    fn of(records: &[Record], title: &str, baseline: Option<(&str, f64)>) -> Self {
        Self {
            title: plain(title),
            training: Series::losses(records, Kind::Train),
            validation: Series::losses(records, Kind::Validation),
            baseline: baseline
                .filter(|(_, loss)| loss.abs() <= LARGEST)
                .map(|(name, loss)| (plain(name), loss)),
        }
    }

    fn render(&self, svg: &mut String) -> Result<(), PlotError<'static>> {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let points = [&self.training, &self.validation].into_iter().flat_map(Series::points);
        let ranges = ranges(points, self.baseline.iter().map(|(_, loss)| *loss), Over::Steps);
        let mut chart = frame(&root, &self.title, &self.legend(), Over::Steps, ranges)?;
        self.curves(&mut chart)?;
        if self.training.is_empty() && self.validation.is_empty() {
            nothing(&root)?;
        }
        root.present()
    }

    fn curves(&self, chart: &mut Chart<'_, '_>) -> Result<(), PlotError<'static>> {
        if let Some((_, loss)) = &self.baseline {
            let steps = chart.x_range();
            let ends = [(steps.start, *loss), (steps.end, *loss)];
            chart.draw_series(DashedLineSeries::new(ends, 12, 10, MUTED.stroke_width(3)))?;
        }
        line(chart, &self.training, TRAINING.mix(0.35).stroke_width(2), false)?;
        line(chart, &self.training.smoothed(), TRAINING.stroke_width(4), false)?;
        line(chart, &self.validation, VALIDATION.stroke_width(4), true)
    }

    /// The lines, with the figures that one looks for first.
    fn legend(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        if let Some((_, last)) = self.training.last() {
            let label = format!("training, last {last:.3}");
            entries.push(Entry { color: TRAINING, dashed: false, label });
        }
        if let Some((_, last)) = self.validation.last() {
            let best = self.validation.lowest().map_or(last, |(_, best)| best);
            let label = format!("validation, last {last:.3}, best {best:.3}");
            entries.push(Entry { color: VALIDATION, dashed: false, label });
        }
        if let Some((name, loss)) = &self.baseline {
            entries.push(Entry { color: MUTED, dashed: true, label: format!("{name} {loss:.3}") });
        }
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn svg(records: &[Record], baseline: Option<(&str, f64)>) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("loss.svg");
        draw(records, &path, "a <title> & more\u{1}", baseline).expect("drawn");
        let svg = std::fs::read_to_string(path).expect("text");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("a &lt;title&gt; &amp; more\n"), "the title is escaped");
        for bad in ["NaN", "inf\"", "inf,", "nan"] {
            assert!(!svg.contains(bad), "{bad} in {svg}");
        }
        svg
    }

    fn loss(kind: Kind, step: u64, loss: f64) -> Record {
        Record::new(kind, step).with("loss", loss)
    }

    fn run(steps: u64) -> Vec<Record> {
        let curve = |step: u64| 1.5 + 3.0 * (-(step as f64) / 300.0).exp();
        let mut records = Vec::new();
        for step in (0..=steps).step_by(10) {
            let noise = 0.1 * ((step * 7919 % 101) as f64 / 50.0 - 1.0);
            records.push(loss(Kind::Train, step, curve(step) + noise));
            if step % 200 == 0 {
                records.push(loss(Kind::Validation, step, curve(step) + 0.05));
            }
        }
        records
    }

    #[test]
    fn a_run_has_its_curves_axes_and_legend() {
        let svg = svg(&run(2000), Some(("unigram", 3.31)));
        for text in
            ["step\n", "loss (nats per token)\n", "unigram 3.310\n", "2,000\n", "training, last "]
        {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.contains("validation, last 1.554, best 1.554\n"));
        // Eleven evaluations, no lone training point.
        assert_eq!(svg.matches("<circle").count(), 11);
    }

    #[test]
    fn too_little_data_is_drawn_all_the_same() {
        assert!(svg(&[], None).contains("no loss was logged yet"));
        assert!(svg(&[], Some(("unigram", 3.3))).contains("unigram 3.300"));
        let one = svg(&[loss(Kind::Train, 0, 4.0)], None);
        // Raw and smoothed.
        assert_eq!(one.matches("<circle").count(), 2);
        assert!(!one.contains("no loss was logged yet"));
        svg(&[loss(Kind::Validation, 5000, 4.0)], None);
        svg(&[loss(Kind::Train, 3, 0.0), loss(Kind::Train, 4, 0.0)], None);
        svg(&[loss(Kind::Train, 7, 2.0), loss(Kind::Validation, 7, 2.0)], None);
        svg(&[Record::new(Kind::Train, 1).with("seconds", 2.0)], None);
    }

    #[test]
    fn losses_that_are_no_numbers_are_gaps() {
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        for bad in odd {
            assert!(svg(&[loss(Kind::Train, 1, bad)], Some(("unigram", bad))).contains("no loss"));
            let mut records = run(1000);
            let whole = svg(&records, None).matches("<polyline").count();
            records[30].values.insert("loss".into(), bad);
            // The training loss is in two parts: twice raw, twice smoothed.
            assert_eq!(svg(&records, None).matches("<polyline").count(), whole + 2);
        }
        svg(&[loss(Kind::Train, 1, 1e300), loss(Kind::Train, 2, -1e300)], None);
        svg(&[loss(Kind::Train, 1, f64::MAX), loss(Kind::Train, 2, f64::MIN)], None);
        svg(&[loss(Kind::Train, u64::MAX, 1e-300), loss(Kind::Train, 2, 1e-320)], None);
    }

    #[test]
    fn a_long_run_stays_a_small_file() {
        assert!(svg(&run(1_000_000), None).len() < 200_000);
    }
}

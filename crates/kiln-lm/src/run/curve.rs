//! The loss curve of a run as SVG, drawn from its metrics.

use super::disk::{DiskError, replace_file};
use super::metrics::{Kind, Record};
use super::series::{LARGEST, Point, Series, smoothed, thinned};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;
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

/// Pixels. Lines go through whole pixels, so that a large picture is a smooth one.
const SIZE: (u32, u32) = (1600, 900);
/// Left end of title and legend, in line with the axis.
const LEFT: i32 = 120;
/// Points of one line beyond which more cannot be told apart.
const POINTS: usize = 1500;

const INK: RGBColor = RGBColor(0x22, 0x2b, 0x38);
const MUTED: RGBColor = RGBColor(0x5f, 0x6b, 0x7a);
const GRID: RGBColor = RGBColor(0xe6, 0xe9, 0xed);
const TRAINING: RGBColor = RGBColor(0x2f, 0x6f, 0xb7);
const VALIDATION: RGBColor = RGBColor(0xd9, 0x5f, 0x0e);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

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

/// What plotters' own errors are; the SVG backend that writes to a string never makes one.
type PlotError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

impl Picture {
    fn of(records: &[Record], title: &str, baseline: Option<(&str, f64)>) -> Self {
        // XML has no way to write control characters.
        let plain = |text: &str| text.chars().filter(|c| !c.is_control()).collect::<String>();
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
        root.fill(&WHITE)?;
        let mut title = text(34, INK);
        title.font = title.font.style(FontStyle::Bold);
        root.draw_text(&self.title, &anchored(&title, HPos::Left), (LEFT, 52))?;
        let (steps, losses) = self.ranges();
        let decimals = decimals(&losses);
        self.legend(&root)?;

        let mut chart = ChartBuilder::on(&root)
            .margin_top(132)
            .margin_right(48)
            .margin_bottom(16)
            .margin_left(16)
            .x_label_area_size(84)
            .y_label_area_size(LEFT - 16)
            .build_cartesian_2d(steps, losses)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID.stroke_width(2))
            .axis_style(MUTED.stroke_width(2))
            .set_all_tick_mark_size(8)
            .x_labels(9)
            .y_labels(9)
            .x_label_formatter(&|step| grouped(*step))
            .y_label_formatter(&|loss| format!("{loss:.decimals$}"))
            .label_style(text(24, MUTED))
            .axis_desc_style(text(26, INK))
            .x_desc("step")
            .y_desc("loss (nats per token)")
            .draw()?;
        self.curves(&mut chart)?;
        if self.training.is_empty() && self.validation.is_empty() {
            let middle = (SIZE.0 as i32 / 2, SIZE.1 as i32 / 2);
            let style = text(30, MUTED);
            root.draw_text("no loss was logged yet", &anchored(&style, HPos::Center), middle)?;
        }
        root.present()
    }

    fn curves(&self, chart: &mut Chart<'_, '_>) -> Result<(), PlotError<'static>> {
        if let Some((_, loss)) = &self.baseline {
            let steps = chart.x_range();
            let ends = [(steps.start, *loss), (steps.end, *loss)];
            chart.draw_series(DashedLineSeries::new(ends, 12, 10, MUTED.stroke_width(3)))?;
        }
        for part in self.training.parts() {
            let raw = TRAINING.mix(0.35).stroke_width(2);
            chart.draw_series(LineSeries::new(thinned(part, POINTS), raw))?;
        }
        for part in self.training.parts() {
            let line = thinned(&smoothed(part), POINTS);
            chart.draw_series(LineSeries::new(line, TRAINING.stroke_width(4)))?;
        }
        for part in self.validation.parts() {
            chart
                .draw_series(LineSeries::new(thinned(part, POINTS), VALIDATION.stroke_width(4)))?;
        }
        // Markers only where they do not run into one another, and for points without a line.
        let lone = |part: &&[Point]| part.len() == 1;
        let dots = self.validation.parts().filter(|part| self.validation.len() <= 60 || lone(part));
        let dot =
            |size: i32, color: RGBColor| move |at: &Point| Circle::new(*at, size, color.filled());
        chart.draw_series(dots.flatten().map(dot(7, VALIDATION)))?;
        chart.draw_series(self.training.parts().filter(lone).flatten().map(dot(6, TRAINING)))?;
        Ok(())
    }

    /// A row of line samples and names, with the figures that one looks for first.
    fn legend(&self, root: &Area<'_>) -> Result<(), PlotError<'static>> {
        let mut entries = Vec::new();
        if let Some((_, last)) = self.training.last() {
            entries.push((TRAINING, false, format!("training, last {last:.3}")));
        }
        if let Some((_, last)) = self.validation.last() {
            let best = self.validation.lowest().map_or(last, |(_, best)| best);
            entries.push((
                VALIDATION,
                false,
                format!("validation, last {last:.3}, best {best:.3}"),
            ));
        }
        if let Some((name, loss)) = &self.baseline {
            entries.push((MUTED, true, format!("{name} {loss:.3}")));
        }

        let (mut x, y) = (LEFT, 98);
        for (color, dashed, label) in entries {
            let line = color.stroke_width(if dashed { 3 } else { 5 });
            let dashes: &[(i32, i32)] =
                if dashed { &[(0, 12), (22, 34), (44, 56)] } else { &[(0, 56)] };
            for (from, to) in dashes {
                root.draw(&PathElement::new([(x + from, y), (x + to, y)], line))?;
            }
            root.draw_text(&label, &anchored(&text(25, INK), HPos::Left), (x + 70, y))?;
            // There is no font to measure with: 12 pixels are about its mean character.
            x += 70 + 12 * label.chars().count() as i32 + 50;
        }
        Ok(())
    }

    /// Ranges of the axes: all that is drawn and a little air.
    fn ranges(&self) -> (Range<f64>, Range<f64>) {
        let points = || [&self.training, &self.validation].into_iter().flat_map(Series::points);
        let losses =
            points().map(|(_, loss)| loss).chain(self.baseline.iter().map(|(_, loss)| *loss));
        let (low, high) = extent(losses).unwrap_or((0.0, 1.0));
        let air = (0.06 * (high - low)).max(1e-3 * high.abs()).max(1e-6);
        let (first, last) = extent(points().map(|(step, _)| step)).unwrap_or((0.0, 1.0));
        let start = if first <= 0.1 * last { 0.0 } else { first };
        // Fewer than ten steps would have labels between the steps.
        let end = last.max(start + 10.0);
        // A loss is not negative: no axis below 0 that only comes from the air.
        let bottom = if low >= 0.0 { (low - air).max(0.0) } else { low - air };
        (start..end, bottom..high + air)
    }
}

fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, value| {
        let (low, high) = range.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    })
}

fn text(size: u32, color: RGBColor) -> TextStyle<'static> {
    // Plotters divides sizes by this on their way to SVG.
    ("sans-serif", f64::from(size) * 1.24).into_font().color(&color)
}

fn anchored<'a>(style: &TextStyle<'a>, side: HPos) -> TextStyle<'a> {
    style.pos(Pos::new(side, VPos::Center))
}

/// Decimals that tell the labels of a loss axis apart.
fn decimals(losses: &Range<f64>) -> usize {
    // About eight labels.
    let between = (losses.end - losses.start) / 10.0;
    (-between.log10().floor()).clamp(0.0, 6.0) as usize
}

/// A number of steps with its digits in groups of three.
fn grouped(step: f64) -> String {
    let digits = format!("{step:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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
        assert_eq!(one.matches("<circle").count(), 1);
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

    #[test]
    fn labels_are_told_apart() {
        assert_eq!([999.0, 1000.0, 1234567.0].map(grouped), ["999", "1,000", "1,234,567"]);
        assert_eq!(decimals(&(0.0..30.0)), 0);
        assert_eq!(decimals(&(1.0..5.0)), 1);
        assert_eq!(decimals(&(1.0..1.5)), 2);
    }
}

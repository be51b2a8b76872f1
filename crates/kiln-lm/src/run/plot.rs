//! What pictures of losses share: colours, axes, legends and labels.

use super::series::{Point, Series, thinned};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

/// Pixels. Lines go through whole pixels, so that a large picture is a smooth one.
pub(super) const SIZE: (u32, u32) = (1600, 900);
/// Left end of title and legend, in line with the axis.
pub(super) const LEFT: i32 = 120;
/// Points of one line beyond which more cannot be told apart.
const POINTS: usize = 1500;
/// Points of a line up to which each is marked: more would run into one another.
const MARKED: usize = 60;
/// Right end of the legend.
const RIGHT: i32 = SIZE.0 as i32 - 48;
/// From a row of the legend to the next.
const ROW: i32 = 36;

pub(super) const INK: RGBColor = RGBColor(0x22, 0x2b, 0x38);
pub(super) const MUTED: RGBColor = RGBColor(0x5f, 0x6b, 0x7a);
const GRID: RGBColor = RGBColor(0xe6, 0xe9, 0xed);
/// Of lines, in their order.
pub(super) const COLORS: [RGBColor; 6] = [
    RGBColor(0x2f, 0x6f, 0xb7),
    RGBColor(0xd9, 0x5f, 0x0e),
    RGBColor(0x2a, 0x7f, 0x62),
    RGBColor(0x8a, 0x4f, 0xb5),
    RGBColor(0xb0, 0x3a, 0x4b),
    RGBColor(0x8c, 0x6d, 0x1f),
];

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Chart<'a, 'b> =
    ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
/// What plotters' own errors are; the SVG backend that writes to a string never makes one.
pub(super) type PlotError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

/// A line of the legend.
pub(super) struct Entry {
    pub(super) color: RGBColor,
    pub(super) dashed: bool,
    pub(super) label: String,
}

/// The text without control characters, which XML has no way to write.
pub(super) fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// What losses are drawn over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Steps.
    Steps,
    /// Seconds of training.
    Seconds,
}

impl Over {
    fn name(self) -> &'static str {
        match self {
            Self::Steps => "step",
            Self::Seconds => "seconds of training",
        }
    }

    /// The shortest axis: fewer than ten steps would have labels between them.
    fn shortest(self) -> f64 {
        match self {
            Self::Steps => 10.0,
            Self::Seconds => 1e-3,
        }
    }
}

/// Title, legend and axes of an empty picture.
pub(super) fn frame<'a, 'b>(
    root: &'a Area<'b>,
    title: &str,
    legend: &[Entry],
    over: Over,
    (steps, losses): (Range<f64>, Range<f64>),
) -> Result<Chart<'a, 'b>, PlotError<'static>>
where
    'b: 'a,
{
    root.fill(&WHITE)?;
    let mut bold = text(34, INK);
    bold.font = bold.font.style(FontStyle::Bold);
    root.draw_text(title, &anchored(&bold, HPos::Left), (LEFT, 52))?;
    let below = draw_legend(root, legend)?;
    let decimals = decimals(&losses);
    let wide = steps.end - steps.start >= Over::Steps.shortest();
    let mut chart = ChartBuilder::on(root)
        .margin_top(below)
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
        .x_label_formatter(&|at| if wide { grouped(*at) } else { format!("{at:.1}") })
        .y_label_formatter(&|loss| format!("{loss:.decimals$}"))
        .label_style(text(24, MUTED))
        .axis_desc_style(text(26, INK))
        .x_desc(over.name())
        .y_desc("loss (nats per token)")
        .draw()?;
    Ok(chart)
}

/// Says in the middle of the picture that there is nothing to see.
pub(super) fn nothing(root: &Area<'_>) -> Result<(), PlotError<'static>> {
    let middle = (SIZE.0 as i32 / 2, SIZE.1 as i32 / 2);
    let style = text(30, MUTED);
    root.draw_text("no loss was logged yet", &anchored(&style, HPos::Center), middle)
}

/// Line samples and names, in rows; where the picture goes on below them.
fn draw_legend(root: &Area<'_>, entries: &[Entry]) -> Result<i32, PlotError<'static>> {
    let (mut x, mut y) = (LEFT, 98);
    for Entry { color, dashed, label } in entries {
        // There is no font to measure with: 12 pixels are about its mean character.
        let width = 70 + 12 * label.chars().count() as i32;
        if x > LEFT && x + width > RIGHT {
            (x, y) = (LEFT, y + ROW);
        }
        let line = color.stroke_width(if *dashed { 3 } else { 5 });
        let dashes: &[(i32, i32)] =
            if *dashed { &[(0, 12), (22, 34), (44, 56)] } else { &[(0, 56)] };
        for (from, to) in dashes {
            root.draw(&PathElement::new([(x + from, y), (x + to, y)], line))?;
        }
        root.draw_text(label, &anchored(&text(25, INK), HPos::Left), (x + 70, y))?;
        x += width + 50;
    }
    Ok(y + 34)
}

/// Lines through the points. Points without a line are marked, and where that is asked for, all, if there are few.
pub(super) fn line(
    chart: &mut Chart<'_, '_>,
    series: &Series,
    style: ShapeStyle,
    marked: bool,
) -> Result<(), PlotError<'static>> {
    for part in series.parts() {
        chart.draw_series(LineSeries::new(thinned(part, POINTS), style))?;
    }
    let all = marked && series.len() <= MARKED;
    let marked = series.parts().filter(|part| all || part.len() == 1).flatten();
    chart.draw_series(marked.map(|at| Circle::new(*at, 6, style.color.filled())))?;
    Ok(())
}

/// Ranges of the axes: all points, the losses beside them, and a little air.
pub(super) fn ranges(
    points: impl Iterator<Item = Point> + Clone,
    beside: impl Iterator<Item = f64>,
    over: Over,
) -> (Range<f64>, Range<f64>) {
    let losses = points.clone().map(|(_, loss)| loss).chain(beside);
    let (low, high) = extent(losses).unwrap_or((0.0, 1.0));
    let air = (0.06 * (high - low)).max(1e-3 * high.abs()).max(1e-6);
    let (first, last) = extent(points.map(|(step, _)| step)).unwrap_or((0.0, 1.0));
    let start = if first <= 0.1 * last { 0.0 } else { first };
    let end = last.max(start + over.shortest());
    // A loss is not negative: no axis below 0 that only comes from the air.
    let bottom = if low >= 0.0 { (low - air).max(0.0) } else { low - air };
    (start..end, bottom..high + air)
}

fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, value| {
        let (low, high) = range.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    })
}

/// Text that begins at a place and is centred there from top to bottom.
pub(super) fn write(
    area: &Area<'_>,
    of: &str,
    size: u32,
    color: RGBColor,
    at: (i32, i32),
) -> Result<(), PlotError<'static>> {
    area.draw_text(of, &anchored(&text(size, color), HPos::Left), at)
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

    #[test]
    fn a_long_legend_has_rows() {
        let mut svg = String::new();
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let entry = || Entry { color: INK, dashed: false, label: "x".repeat(40) };
        let below = |count: usize| {
            let entries: Vec<Entry> = (0..count).map(|_| entry()).collect();
            draw_legend(&root, &entries).expect("drawn")
        };
        // Each is 550 and 50 pixels wide.
        assert_eq!([0, 1, 2, 3, 6].map(below), [132, 132, 132, 168, 204]);
    }

    #[test]
    fn labels_are_told_apart() {
        assert_eq!([999.0, 1000.0, 1234567.0].map(grouped), ["999", "1,000", "1,234,567"]);
        assert_eq!(decimals(&(0.0..30.0)), 0);
        assert_eq!(decimals(&(1.0..5.0)), 1);
        assert_eq!(decimals(&(1.0..1.5)), 2);
    }
}

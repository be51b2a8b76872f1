//! The lives of a run's seeds as SVG, drawn from its metrics: below the losses a bar for each seed, coloured by its state,
//! and its alpha in it as a line.

use super::curve::CurveError;
use super::disk::replace_file;
use super::metrics::{Kind, Record};
use super::plot::{
    Area, COLORS, Entry, INK, LEFT, MUTED, Over, PlotError, SIZE, frame, line, nothing, plain,
    ranges, write,
};
use super::series::Series;
use kiln_nn::kasmina::SeedState;
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// Pixels from one bar to the next, and of a bar.
const ROW: i32 = 44;
const BAR: i32 = 34;
/// Above the first bar, and below the last, where the states are named.
const ABOVE: i32 = 28;
const BELOW: i32 = 136;

/// Draws losses, states and alphas over the steps to an SVG file, replacing it as a whole.
///
/// # Errors
///
/// [`CurveError`] if the file cannot be written.
pub fn draw(records: &[Record], path: &Path, title: &str) -> Result<(), CurveError> {
    let svg = picture(records, title)?;
    Ok(replace_file(path, svg.as_bytes())?)
}

/// The same as text.
///
/// # Errors
///
/// [`CurveError`] if the plotting library refuses.
pub fn picture(records: &[Record], title: &str) -> Result<String, CurveError> {
    let mut svg = String::new();
    let drawn = render(records, &plain(title), &lives(records), &mut svg);
    drawn.map_err(|error| CurveError::Plot(error.to_string()))?;
    Ok(svg)
}

/// A seed at the end of an epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    step: f64,
    state: SeedState,
    alpha: f64,
}

/// Those of each seed, by block and number.
fn lives(records: &[Record]) -> BTreeMap<(usize, usize), Vec<Point>> {
    let mut lives: BTreeMap<(usize, usize), Vec<Point>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.kind == Kind::Seeds) {
        for (name, code) in &record.values {
            let Some(at) = seed_of(name) else { continue };
            let state = SeedState::ALL.into_iter().find(|state| state.code() as f64 == *code);
            let alpha = record.get(&Record::of_seed(at.0, at.1, "alpha")).unwrap_or(0.0);
            let Some(state) = state else { continue };
            lives.entry(at).or_default().push(Point { step: record.step as f64, state, alpha });
        }
    }
    lives
}

/// Block and number of the seed whose state a value is.
fn seed_of(name: &str) -> Option<(usize, usize)> {
    let (block, seed) = name.strip_suffix(".state")?.split_once('.')?;
    Some((block.strip_prefix("block")?.parse().ok()?, seed.strip_prefix("seed")?.parse().ok()?))
}

fn color(state: SeedState) -> RGBColor {
    match state {
        SeedState::Dormant | SeedState::Germinated => RGBColor(0xd3, 0xd8, 0xde),
        SeedState::Training => COLORS[0],
        SeedState::Grafting => COLORS[1],
        SeedState::Stabilization => RGBColor(0xc9, 0xa2, 0x27),
        SeedState::Evaluating => COLORS[3],
        SeedState::FineTuning => COLORS[2],
        SeedState::Fossilized => RGBColor(0x4a, 0x54, 0x63),
        SeedState::Culled | SeedState::Cancelled | SeedState::RolledBack => COLORS[4],
    }
}

fn render(
    records: &[Record],
    title: &str,
    lives: &BTreeMap<(usize, usize), Vec<Point>>,
    svg: &mut String,
) -> Result<(), PlotError<'static>> {
    let below = ABOVE + ROW * lives.len() as i32 + BELOW;
    let size = (SIZE.0, SIZE.1 + below as u32);
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    let (top, bottom) = root.split_vertically(SIZE.1 as i32);
    let training = Series::losses(records, Kind::Train);
    let validation = Series::losses(records, Kind::Validation);
    let entry = |color, label: &str, last: f64| Entry {
        color,
        dashed: false,
        label: format!("{label}, last {last:.3}"),
    };
    let legend = [(&training, COLORS[0], "training"), (&validation, COLORS[1], "validation")];
    let legend: Vec<Entry> = legend
        .into_iter()
        .filter_map(|(series, color, label)| Some(entry(color, label, series.last()?.1)))
        .collect();
    let steps = lives.values().flatten().map(|point| point.step);
    let points: Vec<(f64, f64)> =
        [&training, &validation].into_iter().flat_map(Series::points).collect();
    let (mut along, losses) = ranges(points.iter().copied(), std::iter::empty(), Over::Steps);
    along.end = steps.fold(along.end, f64::max);
    let mut chart = frame(&top, title, &legend, Over::Steps, (along, losses.clone()))?;
    line(&mut chart, &training, COLORS[0].mix(0.35).stroke_width(2), false)?;
    line(&mut chart, &training.smoothed(), COLORS[0].stroke_width(4), false)?;
    line(&mut chart, &validation, COLORS[1].stroke_width(4), true)?;
    if points.is_empty() {
        nothing(&top)?;
    }
    let across = |step: f64| chart.backend_coord(&(step, losses.start)).0;
    for (row, ((block, seed), points)) in lives.iter().enumerate() {
        let y = ABOVE + ROW * row as i32;
        write(&bottom, &format!("{block}.{seed}"), 22, INK, (LEFT - 60, y + BAR / 2))?;
        bars(&bottom, points, y, &across)?;
    }
    states(&bottom, lives, below - BELOW + 30)?;
    root.present()
}

/// The bar of a seed, from the first time that it is known to the last.
fn bars(
    area: &Area<'_>,
    points: &[Point],
    y: i32,
    across: &impl Fn(f64) -> i32,
) -> Result<(), PlotError<'static>> {
    for part in points.chunk_by(|a, b| a.state == b.state) {
        let (Some(first), Some(last)) = (part.first(), part.last()) else { continue };
        let next = points.iter().find(|point| point.step > last.step);
        let end = next.map_or(last.step, |next| next.step);
        // One epoch may be less than a pixel.
        let ends = (across(first.step), across(end).max(across(first.step) + 2));
        let bar = Rectangle::new([(ends.0, y), (ends.1, y + BAR)], color(first.state).filled());
        area.draw(&bar)?;
    }
    let at = |point: &Point| {
        (
            across(point.step),
            y + BAR - 2 - (point.alpha.clamp(0.0, 1.0) * f64::from(BAR - 4)) as i32,
        )
    };
    let alphas: Vec<(i32, i32)> = points.iter().map(at).collect();
    area.draw(&PathElement::new(alphas, WHITE.stroke_width(3)))
}

/// The names of the states that occur.
fn states(
    area: &Area<'_>,
    lives: &BTreeMap<(usize, usize), Vec<Point>>,
    y: i32,
) -> Result<(), PlotError<'static>> {
    let (mut x, mut y) = (LEFT, y);
    let occurs = |state: &SeedState| lives.values().flatten().any(|point| point.state == *state);
    for state in SeedState::ALL.into_iter().filter(occurs) {
        let name = format!("{state:?}");
        if x + 34 + 12 * name.len() as i32 > SIZE.0 as i32 {
            (x, y) = (LEFT, y + 32);
        }
        area.draw(&Rectangle::new([(x, y - 10), (x + 26, y + 10)], color(state).filled()))?;
        write(area, &name, 22, INK, (x + 34, y))?;
        x += 60 + 12 * name.len() as i32;
    }
    if !lives.is_empty() {
        let what = "a bar for each seed, block.seed; the line in it is alpha, from 0 to 1";
        write(area, what, 22, MUTED, (LEFT, y + 40))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64, states: &[(usize, usize, SeedState, f64)]) -> Record {
        let record = Record::new(Kind::Seeds, step);
        states.iter().fold(record, |record, (block, seed, state, alpha)| {
            record
                .with(&Record::of_seed(*block, *seed, "state"), state.code() as f64)
                .with(&Record::of_seed(*block, *seed, "alpha"), *alpha)
        })
    }

    #[test]
    fn each_seed_has_a_bar_of_its_states() {
        let records = [
            Record::new(Kind::Train, 1).with("loss", 4.0),
            at(10, &[(0, 1, SeedState::Training, 0.0)]),
            at(20, &[(0, 1, SeedState::Grafting, 0.5), (2, 0, SeedState::Germinated, 0.0)]),
            at(30, &[(0, 1, SeedState::Grafting, 1.0), (2, 0, SeedState::Training, 0.0)]),
            Record::new(Kind::Train, 30).with("loss", 3.0),
        ];
        let of = lives(&records);
        let point = |step: u64, state, alpha| Point { step: step as f64, state, alpha };
        assert_eq!(
            of[&(0, 1)],
            [
                point(10, SeedState::Training, 0.0),
                point(20, SeedState::Grafting, 0.5),
                point(30, SeedState::Grafting, 1.0),
            ]
        );
        assert_eq!(of.keys().collect::<Vec<_>>(), [&(0, 1), &(2, 0)]);
        let svg = picture(&records, "a <run>").expect("drawn");
        for text in
            ["a &lt;run&gt;\n", "0.1\n", "2.0\n", "Grafting\n", "Training\n", "Germinated\n"]
        {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        // Two states of the one, two of the other, and a sample of each of three.
        assert_eq!(svg.matches("<rect").count(), 1 + 4 + 3 + 1, "{svg}");
    }

    #[test]
    fn nothing_to_draw_is_said() {
        let svg = picture(&[], "").expect("drawn");
        assert!(svg.contains("no loss was logged yet"));
    }
}

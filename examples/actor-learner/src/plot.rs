//! The learning curve as an SVG file.
//!
//! Owns the drawing: axes with round ticks, one dot an episode, the mean of the last hundred as a line, evaluations as
//! rings, and the line to cross. What it does not do: compute any of it (see [`crate::curve`]).

use crate::curve::{Curve, WINDOW};
use crate::env::{MAX_STEPS, SOLVED_RETURN};
use crate::eval::EPISODES;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 56.0;
/// Dots beyond this many say nothing that fewer do not, and make the file large.
const MOST_DOTS: usize = 3_000;
const GRID: &str = "#e4e4e4";
const AXIS: &str = "#222";
const MEAN: &str = "#1b4f8f";
const GOAL: &str = "#b3261e";
const DASHED: &str = r#"stroke-dasharray="6 4""#;

/// Draws `curve` under `title`.
pub fn svg(curve: &Curve, title: &str) -> String {
    let last = curve.points.last().map_or(0, |p| p.steps).max(1) as f64;
    let tick = round_tick(last / 6.0);
    let x_end = (last / tick).ceil() * tick;
    let y_end = f64::from(MAX_STEPS);
    let x = |steps: f64| LEFT + steps / x_end * (WIDTH - LEFT - RIGHT);
    let y = |ret: f64| HEIGHT - BOTTOM - ret / y_end * (HEIGHT - TOP - BOTTOM);
    let (x0, x1, y0, y1) = (x(0.0), x(x_end), y(0.0), y(y_end));
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#222">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="26" font-size="16" font-weight="bold">{}</text>
"##,
        escape(title)
    );
    for i in 0..=(x_end / tick).round() as usize {
        let steps = i as f64 * tick;
        let at = x(steps);
        line(&mut out, (at, y0, at, y1), GRID, "");
        text(&mut out, at, y0 + 20.0, "middle", &thousands(steps));
    }
    for ret in (0..=MAX_STEPS).step_by(100).map(f64::from) {
        line(&mut out, (x0, y(ret), x1, y(ret)), GRID, "");
        text(&mut out, x0 - 8.0, y(ret) + 4.5, "end", &ret.to_string());
    }
    text(&mut out, (x0 + x1) / 2.0, HEIGHT - 12.0, "middle", "environment steps learned from");
    let middle = (y0 + y1) / 2.0;
    let _ = writeln!(
        out,
        r#"<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">return of an episode</text>"#
    );

    let every = curve.episodes.len().div_ceil(MOST_DOTS).max(1);
    for &(steps, ret) in curve.episodes.iter().step_by(every) {
        dot(&mut out, x(steps as f64), y(ret));
    }
    line(&mut out, (x0, y(SOLVED_RETURN), x1, y(SOLVED_RETURN)), GOAL, DASHED);
    let points: Vec<String> =
        curve.points.iter().map(|p| format!("{:.1},{:.1}", x(p.steps as f64), y(p.mean))).collect();
    let _ = writeln!(
        out,
        r#"<polyline points="{}" fill="none" stroke="{MEAN}" stroke-width="2.2" stroke-linejoin="round"/>"#,
        points.join(" ")
    );
    for evaluation in &curve.evaluations {
        ring(&mut out, x(evaluation.steps as f64), y(evaluation.mean()));
    }
    line(&mut out, (x0, y0, x1, y0), AXIS, "");
    line(&mut out, (x0, y0, x0, y1), AXIS, "");
    legend(&mut out);
    out.push_str("</svg>\n");
    out
}

/// One row above the plot.
fn legend(out: &mut String) {
    let (row, middle) = (52.0, 47.5);
    dot(out, LEFT + 6.0, middle);
    text(out, LEFT + 16.0, row, "start", "one episode");
    line(out, (LEFT + 112.0, middle, LEFT + 136.0, middle), MEAN, r#"stroke-width="2.2""#);
    text(out, LEFT + 142.0, row, "start", &format!("mean of the last {WINDOW}"));
    ring(out, LEFT + 298.0, middle);
    text(out, LEFT + 310.0, row, "start", &format!("evaluation: mean of {EPISODES} greedy episodes"));
    line(out, (LEFT + 612.0, middle, LEFT + 636.0, middle), GOAL, DASHED);
    text(out, LEFT + 642.0, row, "start", &format!("solved from {SOLVED_RETURN}"));
}

fn dot(out: &mut String, x: f64, y: f64) {
    let _ = writeln!(out, r##"<circle cx="{x:.1}" cy="{y:.1}" r="1.8" fill="#7f9fc6"/>"##);
}

fn ring(out: &mut String, x: f64, y: f64) {
    let _ =
        writeln!(out, r##"<circle cx="{x:.1}" cy="{y:.1}" r="5.5" fill="#fff" stroke="#2e7d32" stroke-width="2.2"/>"##);
}

fn line(out: &mut String, (x1, y1, x2, y2): (f64, f64, f64, f64), colour: &str, more: &str) {
    let _ = writeln!(out, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{colour}" {more}/>"#);
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let _ = writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#, escape(text));
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The least of 1, 2 and 5 times a power of ten that is not below `least`.
fn round_tick(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&tick| tick >= least).unwrap_or(10.0 * power)
}

fn thousands(steps: f64) -> String {
    match steps {
        s if s >= 1e6 => format!("{} M", (s / 1e4).round() / 100.0),
        s if s >= 1e3 => format!("{} k", s / 1e3),
        s => s.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::Point;
    use crate::eval::Evaluation;

    #[test]
    fn everything_is_drawn_inside_the_frame() {
        let point = |steps, mean| Point { steps, mean, figure: 0.5 };
        let curve = Curve {
            points: vec![point(1_000, 20.0), point(2_000, 480.0)],
            episodes: vec![(1_000, 20.0), (2_000, 500.0)],
            evaluations: vec![Evaluation { steps: 2_000, version: 2, returns: vec![500.0, 490.0] }],
        };
        let svg = svg(&curve, "a < b & c");
        for part in
            ["a &lt; b &amp; c", "environment steps", "return of an episode", "solved from 475", ">2 k<", ">500<"]
        {
            assert!(svg.contains(part), "`{part}` is not in {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 2 + 1 + 2, "episodes, evaluation, legend");
        assert_eq!(svg.matches("<polyline").count(), 1);
        let inside = |attribute: &str, end: f64| {
            svg.split(&format!(" {attribute}=\"")).skip(1).all(|rest| {
                let number = rest.split('"').next().unwrap_or_default();
                number.parse::<f64>().is_ok_and(|x| (0.0..=end).contains(&x))
            })
        };
        assert!(["cx", "x1", "x2", "x"].iter().all(|a| inside(a, WIDTH)), "{svg}");
        assert!(["cy", "y1", "y2", "y"].iter().all(|a| inside(a, HEIGHT)), "{svg}");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn many_episodes_are_thinned_out_and_none_is_no_trouble() {
        let curve = Curve { episodes: (0..10_000).map(|i| (i, 100.0)).collect(), ..Curve::default() };
        assert!(svg(&curve, "").matches("<circle").count() <= MOST_DOTS + 2);
        assert!(!svg(&Curve::default(), "").contains("NaN"));
    }

    #[test]
    fn ticks_are_round() {
        for (least, tick) in [(1.0, 1.0), (1.1, 2.0), (3.0, 5.0), (7.0, 10.0), (12_000.0, 20_000.0)] {
            assert_eq!(round_tick(least), tick);
        }
        assert_eq!([0.0, 500.0, 2_500.0, 1_250_000.0].map(thousands), ["0", "500", "2.5 k", "1.25 M"]);
    }
}

//! Tables on the terminal, printed as they grow, and the same as JSON.

use super::{Args, Failure, Mode, Spread};
use std::fmt::Write as _;

/// One place of a table.
#[derive(Clone, Debug)]
pub enum Cell {
    Text(String),
    Count(u64),
    /// A figure, and the digits behind its point.
    Figure(f64, usize),
    Spread(Spread, usize),
    /// Nothing was measured.
    None,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}

impl From<usize> for Cell {
    fn from(count: usize) -> Cell {
        Cell::Count(count as u64)
    }
}

impl Cell {
    fn text(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Count(count) => count.to_string(),
            Cell::Figure(figure, digits) => format!("{figure:.digits$}"),
            Cell::Spread(Spread { median, least, most }, digits) => {
                format!("{median:.digits$} [{least:.digits$}, {most:.digits$}]")
            }
            Cell::None => "-".to_owned(),
        }
    }

    fn json(&self) -> String {
        match self {
            Cell::Text(text) => json_string(text),
            Cell::Count(count) => count.to_string(),
            Cell::Figure(figure, _) => json_number(*figure),
            Cell::Spread(spread, _) => format!(
                "{{\"median\": {}, \"least\": {}, \"most\": {}}}",
                json_number(spread.median),
                json_number(spread.least),
                json_number(spread.most)
            ),
            Cell::None => "null".to_owned(),
        }
    }
}

#[derive(Debug)]
struct Table {
    name: String,
    columns: Vec<(String, usize)>,
    rows: Vec<Vec<Cell>>,
}

#[derive(Debug)]
struct Target {
    what: String,
    wanted: String,
    got: f64,
    met: bool,
}

/// What a bench found.
#[derive(Debug)]
pub struct Report {
    bench: &'static str,
    /// Whether there are only checks, so that no table is printed.
    quiet: bool,
    checked: usize,
    tables: Vec<Table>,
    targets: Vec<Target>,
}

impl Report {
    pub fn new(bench: &'static str, args: &Args) -> Report {
        match args.mode {
            Mode::Check => println!("{bench}: checks only (`cargo bench` measures)"),
            Mode::Quick => println!("{bench}: quick, so the figures say little; {}", machine()),
            Mode::Full => println!("{bench}: {}", machine()),
        }
        let quiet = args.mode == Mode::Check;
        Report { bench, quiet, checked: 0, tables: Vec::new(), targets: Vec::new() }
    }

    /// Begins a table: its columns, and how wide each is at least.
    pub fn table(&mut self, name: &str, columns: &[(&str, usize)]) {
        let columns: Vec<(String, usize)> =
            columns.iter().map(|&(name, width)| (name.to_owned(), width.max(name.chars().count()))).collect();
        if !self.quiet {
            println!("\n{name}");
            let heads: Vec<Cell> = columns.iter().map(|(name, _)| name.as_str().into()).collect();
            print_row(&columns, &heads);
        }
        self.tables.push(Table { name: name.to_owned(), columns, rows: Vec::new() });
    }

    /// Prints and keeps a row of the newest table.
    pub fn row(&mut self, cells: Vec<Cell>) {
        let Some(table) = self.tables.last_mut() else { return };
        print_row(&table.columns, &cells);
        table.rows.push(cells);
    }

    /// Counts a case whose results were checked.
    pub fn checked(&mut self) {
        self.checked += 1;
    }

    /// Notes whether `got` is at least `least`.
    pub fn at_least(&mut self, what: impl Into<String>, got: f64, least: f64) {
        self.targets.push(Target { what: what.into(), wanted: format!("≥ {least}"), got, met: got >= least });
    }

    /// Notes whether `got` is at most `most`.
    pub fn at_most(&mut self, what: impl Into<String>, got: f64, most: f64) {
        self.targets.push(Target { what: what.into(), wanted: format!("≤ {most}"), got, met: got <= most });
    }

    /// Prints the targets and writes the JSON.
    pub fn finish(&self, args: &Args) -> Result<(), Failure> {
        println!("\nchecked: {} cases", self.checked);
        if !self.targets.is_empty() {
            println!("\ntargets (nothing else running)");
        }
        for Target { what, wanted, got, met } in &self.targets {
            println!("  {} {what}: {got:.3}, wanted {wanted}", if *met { "met   " } else { "MISSED" });
        }
        if let Some(path) = &args.json {
            std::fs::write(path, self.json(args)).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    fn json(&self, args: &Args) -> String {
        let tables = self.tables.iter().map(|table| {
            let rows = table.rows.iter().map(|row| {
                let cells = table.columns.iter().zip(row);
                object(cells.map(|((name, _), cell)| (name.as_str(), cell.json())))
            });
            object([("name", json_string(&table.name)), ("rows", array(rows))])
        });
        let targets = self.targets.iter().map(|target| {
            object([
                ("what", json_string(&target.what)),
                ("wanted", json_string(&target.wanted)),
                ("got", json_number(target.got)),
                ("met", target.met.to_string()),
            ])
        });
        let mode = format!("{:?}", args.mode).to_lowercase();
        object([
            ("bench", json_string(self.bench)),
            ("version", json_string(env!("CARGO_PKG_VERSION"))),
            ("mode", json_string(&mode)),
            ("machine", json_string(&machine())),
            ("tables", array(tables)),
            ("targets", array(targets)),
        ]) + "\n"
    }
}

/// Text to the left, everything else to the right; a place that is too long pushes the rest on.
fn print_row(columns: &[(String, usize)], cells: &[Cell]) {
    let mut line = String::new();
    for (place, ((_, width), cell)) in columns.iter().zip(cells).enumerate() {
        let (text, gap) = (cell.text(), if place == 0 { "  " } else { "   " });
        let _ = match cell {
            Cell::Text(_) => write!(line, "{gap}{text:<width$}"),
            _ => write!(line, "{gap}{text:>width$}"),
        };
    }
    println!("{}", line.trim_end());
}

/// Cores and processor, as far as the system says.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']));
    format!("{cores} cores, {}", model.unwrap_or(std::env::consts::ARCH))
}

fn object<'a>(fields: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let fields = fields.into_iter().map(|(name, value)| format!("{}: {value}", json_string(name)));
    format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
}

fn array(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

fn json_number(number: f64) -> String {
    if number.is_finite() { number.to_string() } else { "null".to_owned() }
}

fn json_string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        let _ = match character {
            '"' | '\\' => write!(quoted, "\\{character}"),
            control if control < ' ' => write!(quoted, "\\u{:04x}", u32::from(control)),
            other => write!(quoted, "{other}"),
        };
    }
    quoted + "\""
}

"""Draws the GPU figures: from the folder that gpu-bench.sh wrote, SVG files and the figures they show as JSON.

    python3 scripts/plots/plot.py RESULTS [DOCS]     writes DOCS/{dispatch-stall,publish,sweep,h2d}.svg, DOCS/gpu-bench.json
    python3 scripts/plots/plot.py --selftest         draws made-up results into a temporary folder and checks them

Standard library only. A figure whose file is missing is left out and named; nothing is made up for it.
"""

import json
import math
import re
import sys
import tempfile
import xml.etree.ElementTree as xml
from html import escape
from pathlib import Path

WIDTH = 860
INK, FAINT, GRID = "#1f2933", "#616e7c", "#d9dee4"
COLOURS = {"ours": "#0b7a75", "hand": "#52606d", "bad": "#c0392b", "middle": "#d08a2e"}
LINES = ("#c0392b", "#d08a2e", "#8a6d3b", "#9b59b6", "#52606d", "#0b7a75", "#3fb8af")
FONT = 'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif"'


class Drawing:
    """An SVG that grows downwards."""

    def __init__(self, title, description):
        self.title, self.description, self.parts, self.height = title, description, [], 0

    def text(self, x, y, words, size=13, anchor="start", colour=INK, weight="normal"):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
            f'font-weight="{weight}">{escape(words)}</text>'
        )

    def line(self, x1, y1, x2, y2, colour=GRID, width=1.0):
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'
        )

    def box(self, x, y, width, height, colour):
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}"/>'
        )

    def path(self, points, colour):
        steps = " ".join(f"{'L' if i else 'M'}{x:.1f},{y:.1f}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{steps}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]

    def save(self, path):
        body = "\n".join(self.parts)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" {FONT}>\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n"
            f'<rect width="{WIDTH}" height="{self.height:.0f}" fill="#ffffff"/>\n{body}\n</svg>\n',
            encoding="utf-8",
        )


def colour_of(way):
    if way.startswith("pinring"):
        return COLOURS["ours"]
    if way.startswith("pageable") or way.endswith("pageable memory"):
        return COLOURS["bad"]
    return COLOURS["middle"] if "own thread" in way else COLOURS["hand"]


def rounded_up(value):
    """A number at or above a value whose quarters are round, for the end of an axis."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if power * step >= value)


# ---- what the learner's thread loses --------------------------------------------------------------------------


def stall_cases(results, names):
    """From the results: for each case, and each way in it, the time that dispatch takes more than without data."""
    cases = []
    for name in names:
        for table in results.get(f"dispatch_stall.{name}", {}).get("tables", []):
            rows = [
                {
                    "way": row["way"],
                    "blocked_us": row["blocked p50"],
                    "dispatch_us": row["dispatch p50"],
                    "more_us": row["dispatch - nothing [95 %]"],
                    "step_more_us": row["step - nothing [95 %]"],
                }
                for row in table["rows"]
            ]
            cases.append({"case": name, "title": table["name"].split(";")[0], "rows": rows})
    return cases


def draw_stall(cases, heading, machine, path):
    drawing = Drawing(
        heading,
        "For each way: how much longer the host takes to dispatch a step, in microseconds, with an interval of 95 %.",
    )
    drawing.text(20, 30, heading, 17, weight="600")
    drawing.text(20, 50, f"µs more than without data, median and 95 % interval, cut off at 0; {machine}", 12, colour=FAINT)
    left, right, y = 270, WIDTH - 90, 70
    for case in cases:
        rows = [row for row in case["rows"] if row["way"] != "nothing"]
        base = next((row["dispatch_us"] for row in case["rows"] if row["way"] == "nothing"), math.nan)
        end = rounded_up(max(max(row["more_us"]["most"], row["more_us"]["median"]) for row in rows))
        at = lambda value: left + (right - left) * min(max(value, 0.0), end) / end
        y += 24
        drawing.text(20, y, f"{case['title']}; dispatch without data {base:,.0f} µs", 13, weight="600")
        y += 10
        top = y
        for step in range(5):
            x = left + (right - left) * step / 4
            drawing.line(x, top, x, top + 22 * len(rows))
            drawing.text(x, top + 22 * len(rows) + 14, f"{end * step / 4:,.0f}", 11, "middle", FAINT)
        for row in rows:
            more = row["more_us"]
            drawing.text(left - 10, y + 15, row["way"], 12, "end")
            drawing.box(left, y + 4, at(more["median"]) - left, 14, colour_of(row["way"]))
            drawing.line(at(more["least"]), y + 11, at(more["most"]), y + 11, INK, 1.5)
            drawing.text(at(max(more["most"], more["median"])) + 6, y + 15, f"{more['median']:+,.0f}", 12)
            y += 22
        y += 26
    drawing.height = y + 4
    drawing.save(path)


# ---- from launch-bound to GPU-bound --------------------------------------------------------------------------


def sweep_points(results):
    """From the results: for each way, µs of a kernel and how much longer its step takes."""
    ways = {}
    for table in results.get("dispatch_stall.sweep", {}).get("tables", []):
        micros = float(re.search(r"kernels of ([0-9.]+) µs", table["name"]).group(1))
        for row in table["rows"]:
            if row["way"] != "nothing":
                more = row["step - nothing [95 %]"]
                ways.setdefault(row["way"], []).append({"kernel_us": micros, "step_more_us": more})
    return ways


def draw_sweep(ways, machine, path):
    heading = "How much longer a step takes, from launch-bound to GPU-bound"
    drawing = Drawing(heading, "For each way of feeding: µs more than without data, over the length of the 500 kernels.")
    drawing.text(20, 30, heading, 17, weight="600")
    about = f"µs more than without data, medians, on a logarithmic scale; 500 kernels of this length a step, a batch of 34.3 MB; {machine}"
    drawing.text(20, 50, about, 12, colour=FAINT)
    points = [point for of_way in ways.values() for point in of_way]
    low, high = (math.log2(pick(point["kernel_us"] for point in points)) for pick in (min, max))
    decades = max(1, math.ceil(math.log10(max(1.0, *(point["step_more_us"]["median"] for point in points)))))
    left, right, top, bottom = 70, WIDTH - 40, 80, 380
    x = lambda micros: left + (right - left) * (math.log2(micros) - low) / max(high - low, 1e-9)
    y = lambda more: bottom - (bottom - top) * math.log10(max(more, 1.0)) / decades
    for step in range(decades + 1):
        drawing.line(left, y(10**step), right, y(10**step))
        drawing.text(left - 8, y(10**step) + 4, f"{10**step:,}", 11, "end", FAINT)
    for micros in sorted({point["kernel_us"] for point in points}):
        drawing.text(x(micros), bottom + 18, f"{micros:g} µs", 11, "middle", FAINT)
    for index, (way, of_way) in enumerate(ways.items()):
        colour = LINES[index % len(LINES)]
        line = sorted((point["kernel_us"], point["step_more_us"]["median"]) for point in of_way)
        drawing.path([(x(micros), y(more)) for micros, more in line], colour)
        at, below = 70 + index % 2 * 390, bottom + 40 + index // 2 * 20
        drawing.box(at, below - 5, 22, 4, colour)
        drawing.text(at + 30, below, way, 12)
    drawing.height = bottom + 50 + (len(ways) + 1) // 2 * 20
    drawing.save(path)


# ---- bytes a second ---------------------------------------------------------------------------------------------

SERIES = (
    ("one copy, by hand", "one copy a batch, by hand", COLOURS["hand"]),
    ("pinring, rows there", "pinring, rows there", COLOURS["ours"]),
    ("pinring, rows written", "pinring, rows written meanwhile", COLOURS["middle"]),
    ("a copy a leaf, by hand", "one copy a leaf, by hand", COLOURS["bad"]),
)


def rate_points(results, leaves):
    """From the results: for each series, bytes of a batch and GB/s."""
    series = {column: [] for column, _, _ in SERIES}
    for table in results.get("h2d", {}).get("tables", []):
        for row in table["rows"]:
            if row["case"].endswith(f"/{leaves}-leaves"):
                for column in series:
                    if row[column] is not None:
                        series[column].append({"bytes": row["bytes a batch"], "gb_per_s": row[column]})
    return series


def draw_rates(panels, machine, path):
    drawing = Drawing(
        "Bytes a second to the device",
        "GB/s over the size of a batch, for batches of few and of many leaves: by hand with one copy, by pinring, and with a copy a leaf.",
    )
    drawing.text(20, 30, "Host to device, GB/s, by the size of a batch", 17, weight="600")
    drawing.text(20, 50, f"medians of turns in one run; {machine}", 12, colour=FAINT)
    figures = [point for series in panels.values() for points in series.values() for point in points]
    low = math.log2(min(point["bytes"] for point in figures))
    high = math.log2(max(point["bytes"] for point in figures))
    end = rounded_up(max(point["gb_per_s"]["median"] for point in figures))
    panel_width, top, bottom = (WIDTH - 110) / len(panels), 100, 340
    for index, (leaves, series) in enumerate(panels.items()):
        left = 60 + index * (panel_width + 30)
        right = left + panel_width - 20
        x = lambda size: left + (right - left) * (math.log2(size) - low) / max(high - low, 1e-9)
        y = lambda rate: bottom - (bottom - top) * rate / end
        drawing.text(left, top - 14, f"{leaves} leaves" if leaves != 1 else "1 leaf", 13, weight="600")
        for step in range(5):
            drawing.line(left, y(end * step / 4), right, y(end * step / 4))
            drawing.text(left - 8, y(end * step / 4) + 4, f"{end * step / 4:g}", 11, "end", FAINT)
        for size, label in ((1 << 16, "64 KB"), (1 << 20, "1 MB"), (1 << 24, "16 MB"), (1 << 28, "256 MB")):
            if low - 0.01 <= math.log2(size) <= high + 0.01:
                drawing.text(x(size), bottom + 18, label, 11, "middle", FAINT)
        for column, _, colour in SERIES:
            points = sorted((point["bytes"], point["gb_per_s"]["median"]) for point in series[column])
            if points:
                drawing.path([(x(size), y(rate)) for size, rate in points], colour)
    for index, (_, label, colour) in enumerate(SERIES):
        at, below = 60 + index % 2 * 390, bottom + 42 + index // 2 * 20
        drawing.box(at, below - 5, 22, 4, colour)
        drawing.text(at + 30, below, label, 12)
    drawing.height = bottom + 62 + (len(SERIES) - 1) // 2 * 20
    drawing.save(path)


# ---- files --------------------------------------------------------------------------------------------------------


BARS = (
    (
        "dispatch-stall.svg",
        "dispatch_stall",
        ("L500", "L2000", "L10000", "graph"),
        "How much longer dispatch takes when a batch of 34.3 MB arrives each step",
    ),
    ("publish.svg", "publish", ("publish",), "How much longer dispatch takes when weights are published each step"),
)


def read(folder):
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    lines = folder / "peers.jsonl"
    if lines.exists():
        results["peers"] = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return results


def draw(folder, docs):
    results = read(folder)
    host = folder / "host.txt"
    machine = host.read_text(encoding="utf-8").strip().splitlines() if host.exists() else []
    gpu = next((line.split(",")[0] for line in reversed(machine) if "," in line), "unknown device")
    label = ", ".join([gpu] + [line.split(" ")[0] for line in machine[:1]])
    docs.mkdir(parents=True, exist_ok=True)
    figures, written = {"host": machine}, []
    for file, key, names, heading in BARS:
        cases = stall_cases(results, names)
        if cases:
            draw_stall(cases, heading, label, docs / file)
            written.append(file)
            figures[key] = cases
    ways = sweep_points(results)
    if ways:
        draw_sweep(ways, label, docs / "sweep.svg")
        written.append("sweep.svg")
        figures["sweep"] = ways
    panels = {leaves: rate_points(results, leaves) for leaves in (1, 44)}
    panels = {leaves: series for leaves, series in panels.items() if any(series.values())}
    if panels:
        draw_rates(panels, label, docs / "h2d.svg")
        written.append("h2d.svg")
        figures["h2d"] = {str(leaves): series for leaves, series in panels.items()}
    figures.update({name: results[name] for name in ("peers", "devices", "torn", "soak") if name in results})
    if not written:
        sys.exit(f"{folder} has no results to draw: neither dispatch_stall.*.json nor h2d.json")
    text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    (docs / "gpu-bench.json").write_text(text, encoding="utf-8")
    for missing in sorted({"sweep.svg", "h2d.svg", *(file for file, *_ in BARS)} - set(written)):
        print(f"left out, since its results are missing: {missing}")
    print(f"{docs}: {', '.join(written)}, gpu-bench.json")


def selftest():
    def spread(median):
        return {"median": median, "least": median * 0.9, "most": median * 1.1}

    ways = {"nothing": 0, "pageable, own thread": 4500, "page-locked, own thread, one copy": 66, "pinring, rows there": 3}
    rows = [
        {
            "way": way,
            "blocked p50": more,
            "dispatch p50": 2000 + more,
            "dispatch - nothing [95 %]": spread(more),
            "step - nothing [95 %]": spread(more),
        }
        for way, more in ways.items()
    ]
    rates = [
        {
            "case": f"{size}/{leaves}-leaves",
            "bytes a batch": size,
            "one copy, by hand": spread(55.0),
            "pinring, rows there": spread(54.0),
            "pinring, rows written": spread(50.0),
            "a copy a leaf, by hand": None if leaves == 1 else spread(20.0),
        }
        for size in (1 << 16, 1 << 20, 1 << 28)
        for leaves in (1, 44)
    ]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for name in ("L500", "L10000", "publish"):
            table = {"tables": [{"name": f"{name}: made up; 3 steps", "rows": rows}]}
            (folder / f"dispatch_stall.{name}.json").write_text(json.dumps(table))
        tables = [{"name": f"sweep: L=500, kernels of {micros} µs: made up", "rows": rows} for micros in (2, 8, 32)]
        (folder / "dispatch_stall.sweep.json").write_text(json.dumps({"tables": tables}))
        (folder / "h2d.json").write_text(json.dumps({"tables": [{"name": "made up", "rows": rates}]}))
        (folder / "peers.jsonl").write_text('{"peer": "made up <&>"}\n')
        (folder / "host.txt").write_text("2000-01-01 00:00 UTC\nMade-up GPU, 1, 2\n")
        draw(folder, folder / "docs")
        shown = (
            ("dispatch-stall.svg", "+4,500"),
            ("publish.svg", "publish: made up; dispatch without data 2,000 µs"),
            ("sweep.svg", "32 µs"),
            ("h2d.svg", "256 MB"),
        )
        for name, words in shown:
            drawn = xml.parse(folder / "docs" / name).getroot()
            texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
            assert words in texts, (name, texts)
            assert any("Made-up GPU, 2000-01-01" in text for text in texts), texts
        figures = json.loads((folder / "docs" / "gpu-bench.json").read_text())
        assert figures["dispatch_stall"][0]["rows"][1]["more_us"]["median"] == 4500, figures
        assert [point["kernel_us"] for point in figures["sweep"]["pinring, rows there"]] == [2, 8, 32], figures
        assert len(figures["h2d"]["44"]["a copy a leaf, by hand"]) == 3, figures
        assert rounded_up(4950) == 6000 and rounded_up(0) == 1 and rounded_up(54) == 60
    print("ok")


def main(arguments):
    if arguments == ["--selftest"]:
        selftest()
    elif arguments and not arguments[0].startswith("-") and len(arguments) <= 2:
        draw(Path(arguments[0]), Path(arguments[1] if len(arguments) == 2 else "docs"))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

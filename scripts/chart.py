"""
Draws the charts of README.md and BENCHMARKS.md, as SVG, from JSON lines.

    python scripts/chart.py assets/results.jsonl --out assets

A line is what scripts/benchmark.py prints. A line of another engine names the
`engine`, its `version` and how it ran, as `detail`. `source` says where the
figure stands and when it was measured. A figure [low, high] is a range. Of two
lines of one configuration the later one counts, so append a newer measurement.
All lines are of one kind of GPU. A chart that has no line is left out.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cli.errors import report_errors
from cli.options import Parser
from hub.checkpoint import reading

# px from the left; the longest bar ends at BARS_END.
WIDTH, MARGIN, LABELS, BARS, BARS_END = 838, 24, 100, 340, 734
PITCH, THICK, GAP = 23, 15, 11  # px from bar to bar, of a bar, and between two groups
# What tells two lines apart, and what a missing key means.
CONFIGURATION = dict(
    engine="llama-fast",
    version=None,
    detail=None,
    what=None,
    quantize=None,
    group_size=None,
    batch=1,
    ranks=1,
    context=0,
    prompt_length=5,
    new_tokens=200,
    draft_tokens=None,
    compile=True,
    kernels=True,
    gpu=None,
)
PRECISIONS = {None: "bf16", "int8": "8 bits", "fp8": "8 bits", "int4": "4 bits"}
POLICIES = {
    "auto": "auto, by measured time",
    "hf": "hf, transformers' rule",
    "bass": "bass, BASS's rule",
}
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-size: 18px; font-weight: 600; } .strong { font-weight: 600; }
.soft { fill: #59636e; } .small { font-size: 12px; fill: #59636e; }
.card { fill: #ffffff; stroke: #d1d9e0; } .ours { fill: #e4572e; } .other { fill: #b4bcc6; }
.faint { fill-opacity: 0.5; } .spread { stroke: #1f2328; } .mark { stroke: #59636e; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .soft, .small { fill: #9198a1; } .card { fill: #0d1117; stroke: #3d444d; }
  .ours { fill: #f0683c; } .other { fill: #59626d; } .spread { stroke: #f0f6fc; } .mark { stroke: #9198a1; } }
"""


@dataclass(frozen=True)
class Bar:
    line: dict
    group: str  # stands to the left of the first of its bars
    label: str
    ends: tuple[float, float]  # of a range; else the figure twice
    text: str
    spread: tuple[float, float] | None = None  # of the runs


def read(path: Path) -> list[dict]:
    """The newest line of each configuration."""
    lines = [
        CONFIGURATION | json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line
    ]
    return list({tuple(line[key] for key in CONFIGURATION): line for line in lines}.values())


def ends(line: dict) -> tuple[float, float]:
    figure = line["tokens_per_s"]
    return tuple(figure) if isinstance(figure, list) else (figure, figure)


def rate(line: dict) -> str:
    """1347 -> 1,347; 302.48 -> 302.5; [209, 216] -> 209 to 216"""
    return " to ".join(
        f"{end:,.1f}" if isinstance(end, float) else f"{end:,}" for end in dict.fromkeys(ends(line))
    )


def words(*parts: str | None, between: str = ", ") -> str:
    return between.join(filter(None, parts))


def quantized(line: dict) -> str | None:
    return f"groups of {line['group_size']}" if line["quantize"] == "int4" else line["quantize"]


def precision(line: dict) -> int:
    return list(PRECISIONS.values()).index(PRECISIONS[line["quantize"]])


# What each chart draws, in order


def speed(lines: list[dict]) -> Iterator[Bar]:
    for line in sorted(lines, key=lambda line: (precision(line), -ends(line)[1])):
        if (
            line["what"] == "llama-2-7b"
            and line["ranks"] == line["batch"] == 1
            and not line["context"]
        ):
            label = words(
                words(line["engine"], line["version"], between=" "),
                quantized(line),
                line["detail"],
                None if line["compile"] else "eager",
                None if line["kernels"] else "without fast/",
            )
            yield Bar(line, PRECISIONS[line["quantize"]], label, ends(line), rate(line))


def bandwidth(lines: list[dict]) -> Iterator[Bar]:
    lines = [
        line
        for line in lines
        if line.get("share_of_read") and line["ranks"] == 1 and line["compile"]
    ]
    for line in sorted(lines, key=lambda line: (precision(line), -line["share_of_read"])):
        label = words(
            line["what"],
            quantized(line),
            f"batch {line['batch']}" if line["batch"] > 1 else None,
            f"at {line['context']:,} tokens" if line["context"] else None,
        )
        share = line["share_of_read"]
        yield Bar(line, PRECISIONS[line["quantize"]], label, (share, share), f"{share:.0%}")


def gpus(lines: list[dict]) -> Iterator[Bar]:
    models, formats = ["llama-2-7b", "llama-2-70b"], [(None, None), ("int4", 128)]
    lines = [
        line
        for line in lines
        if line["what"] in models
        and line["engine"] in ("llama-fast", "gpt-fast")
        and (line["quantize"], line["group_size"]) in formats
        and line["batch"] == 1
        and not line["context"]
        and line["compile"]
        and line["kernels"]
    ]
    lines.sort(
        key=lambda line: (
            models.index(line["what"]),
            precision(line),
            line["ranks"],
            -ends(line)[1],
        )
    )
    for line in lines:
        group = f"{line['what'].split('-')[-1].upper()}, {line['quantize'] or 'bf16'}"
        label = f"{line['ranks']} GPU{'s' if line['ranks'] > 1 else ''}, {line['engine']}"
        yield Bar(line, group, label, ends(line), rate(line))


def speculation(lines: list[dict]) -> Iterator[Bar]:
    order = [*POLICIES, *sorted({line["draft_tokens"] for line in lines} - {*POLICIES}, key=int)]
    for line in sorted(lines, key=lambda line: (line["batch"], order.index(line["draft_tokens"]))):
        label = POLICIES.get(line["draft_tokens"], f"always {line['draft_tokens']} tokens")
        figure, runs = line["speed_up"], line["speed_ups"]
        yield Bar(
            line,
            f"batch {line['batch']}",
            label,
            (figure, figure),
            f"{figure:.2f}×",
            (runs[0], runs[-1]),
        )


@dataclass(frozen=True)
class Chart:
    """Braces in its texts stand for keys of the first line drawn."""

    bars: Callable[[list[dict]], Iterator[Bar]]  # of the lines that have `figure`
    figure: str
    title: str
    subtitle: str
    setting: str  # the caption goes on with when the lines were measured
    # The bars whose line has this value are in the accent color.
    accent: tuple[str, str] = ("engine", "llama-fast")
    mark: tuple[float, str] | None = None  # a dashed line at a value, and its name


DECODE = (
    "a prompt of {prompt_length} tokens, {new_tokens} new ones, temperature {temperature}, top-k "
    "{top_k}, torch "
    "{torch}, random weights."
)
CHARTS = {
    "speed": Chart(
        speed,
        "tokens_per_s",
        "Llama-2-7B on one {gpu}, one sequence",
        "tokens a second; longer is better",
        f"Llama-2-7B's shape, batch 1, {DECODE}",
    ),
    "bandwidth": Chart(
        bandwidth,
        "share_of_read",
        "How much of the read bandwidth decoding uses, on one {gpu}",
        "bytes of weights, keys and values a second, as a share of a timed read of the same "
        "weights",
        f"Batch 1 unless said, {DECODE}",
        mark=(1, "100%"),
    ),
    "gpus": Chart(
        gpus,
        "tokens_per_s",
        "Llama 2 on several {gpu} GPUs, one sequence",
        "tokens a second; longer is better",
        f"GPUs of one host, batch 1, int4 in groups of 128, {DECODE}",
    ),
    "speculation": Chart(
        speculation,
        "speed_up",
        "Speculation: times as fast as plain decoding of the same batch",
        "by how the number of drafted tokens is chosen; the thin line is the range of the runs",
        "One {gpu}, bf16, Llama-2-7B's cost, the bundled pair's text, temperature {temperature}, "
        "top-p {top_p}.",
        accent=("draft_tokens", "auto"),
        mark=(1, "plain decoding"),
    ),
}


def measured(bars: list[Bar]) -> str:
    """Which engine, when."""
    times, engines = {}, {}
    for line in (bar.line for bar in bars):
        time = (
            line["source"].partition("; measured ")[2]
            if "source" in line
            else f"at commit {line['commit']}"
        )
        times.setdefault(line["engine"], {})[time] = None
    for engine, found in times.items():
        engines.setdefault(" and ".join(sorted(found)), []).append(engine)
    return (
        "Measured: "
        + "; ".join(f"{', '.join(names)} {time}" for time, names in engines.items())
        + "."
    )


def text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words, quote=False)}</text>'


def rect(x: float, y: float, width: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{THICK}" class="{style}"/>'


def draw(chart: Chart, bars: list[Bar]) -> str:
    first = bars[0].line
    title, subtitle, setting = (
        said.format_map(first) for said in (chart.title, chart.subtitle, chart.setting)
    )
    reach = [value for bar in bars for value in (*bar.ends, *(bar.spread or ()))]
    scale = (BARS_END - BARS) / max(reach + [chart.mark[0] if chart.mark else 0])
    shapes, y = [], 96 if chart.mark else 82
    for group, members in groupby(bars, lambda bar: bar.group):
        shapes.append(text(MARGIN, y + 12, group, "strong"))
        for bar in members:
            strong = bar.line[chart.accent[0]] == chart.accent[1]
            style, (low, high) = (
                "ours" if strong else "other",
                (scale * value for value in bar.ends),
            )
            shapes.append(text(LABELS, y + 12, bar.label, "" if strong else "soft"))
            shapes.append(rect(BARS, y, low, style if bar.line["kernels"] else f"{style} faint"))
            if high > low:
                shapes.append(rect(BARS + low, y, high - low, f"{style} faint"))
            if bar.spread:
                start, high = (scale * value for value in bar.spread)
                shapes.append(
                    f'<path d="M{BARS + start:.1f} {y + 7.5}H{BARS + high:.1f}" class="spread"/>'
                )
            shapes.append(
                text(round(BARS + high + 8, 1), y + 12, bar.text, "strong" if strong else "soft")
            )
            y += PITCH
        y += GAP
    if chart.mark:
        x = round(BARS + scale * chart.mark[0], 1)
        shapes += [
            f'<path d="M{x} 90V{y - GAP}" class="mark"/>',
            text(x, 85, chart.mark[1], "small", "middle"),
        ]
    caption = textwrap.wrap(f"{setting} {measured(bars)}", 126, break_on_hyphens=False)
    shapes += [text(MARGIN, y + 12 + 17 * i, line, "small") for i, line in enumerate(caption)]
    height = y + 18 + 17 * len(caption)
    spoken = "; ".join(f"{bar.group}, {bar.label}: {bar.text}" for bar in bars)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'role="img">',
            f"<title>{title}</title>",
            f"<desc>{escape(spoken, quote=False)}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="card"/>',
            text(MARGIN, 36, title, "title"),
            text(MARGIN, 58, subtitle, "soft"),
            *shapes,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("lines", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument(
        "--out", type=Path, default=Path("assets"), metavar="DIR", help="default: assets"
    )
    args = parser.parse_args()
    charts = {}
    with reading(args.lines):
        lines = read(args.lines)
        found = sorted({str(line["gpu"]) for line in lines})
        if len(found) > 1:
            raise ValueError(f"{args.lines} has lines of {', '.join(found)}: want one kind of GPU")
        for name, chart in CHARTS.items():
            bars = list(chart.bars([line for line in lines if line.get(chart.figure)]))
            if bars:
                charts[name] = draw(chart, bars)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, drawn in charts.items():
        (args.out / f"{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    report_errors(main)

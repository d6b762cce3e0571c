"""The charts are true: the committed lines draw the committed files, and say what BENCHMARKS.md
says."""

import json
import re
from xml.etree import ElementTree

import pytest

from helpers import ROOT, absent, one_line, python
from scripts import chart

RESULTS = ROOT / "assets" / "results.jsonl"
LINES = chart.read(RESULTS)
OURS = [line for line in LINES if line["engine"] == "llama-fast"]
# In BENCHMARKS.md's order.
OPTIONS = dict(ranks=1, quantize=None, group_size=None, batch=1, context=0, kernels=True)


def figures(line: dict) -> list[str]:
    """As BENCHMARKS.md prints them."""
    if "speed_up" in line:
        return ["{:.2f} ({:.2f} to {:.2f})".format(line["speed_up"], *line["speed_ups"])]
    share = [f"{line['share_of_read']:.0%}"] if line.get("share_of_read") else []
    return [
        chart.rate(line),
        *share,
        *([f"{line['ms_per_token']:.3f}"] if "ms_per_token" in line else []),
    ]


def section(line: dict) -> str:
    """What stands in BENCHMARKS.md under the heading that the line's source names; it says when
    that was measured."""
    name, time = re.fullmatch(r"BENCHMARKS\.md, (.+); measured (.+)", line["source"]).groups()
    text = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    [found] = re.findall(rf"^##+ {re.escape(name)}\n(.+?)(?=^##|\Z)", text, re.M | re.S)
    assert time in " ".join(found.split())
    return found


def cells(line: dict) -> list[str]:
    """Of the section's row of the line's configuration: found by its command or, in the table of
    speculation, by its batch, in the column of its drafted tokens."""
    table = [
        row.strip("| ").split(" | ") for row in section(line).splitlines() if row.startswith("|")
    ]
    if "speed_up" in line:
        [row] = [row for row in table if row[0] == str(line["batch"])]
        return [row[table[0].index(line["draft_tokens"])]]
    others = [name for name, default in OPTIONS.items() if line[name] != default]
    command = " ".join(
        [line["what"], *(f"--{name.replace('_', '-')} {line[name]}" for name in others)]
    )
    command = command.replace("--kernels False", "--no-kernels")
    [row] = [
        row
        for row in table
        if re.sub(r" --((runs|new-tokens) \d+|cold-start)|`", "", row[0]) == command
    ]
    return row


@pytest.mark.parametrize(
    "line", OURS, ids=lambda line: f"{line['source'].split(', ')[1]} {figures(line)[0]}"
)
def test_our_figures_stand_in_the_row_of_their_command(line):
    assert set(figures(line)) <= set(cells(line))


@pytest.mark.parametrize(
    "line",
    [line for line in LINES if line not in OURS],
    ids=lambda line: f"{line['engine']} {chart.rate(line)}",
)
def test_other_engines_figures_stand_in_their_section_beside_their_names(line):
    name = " ".join(filter(None, [line["engine"], line["version"]]))
    assert any(name in row and f" {chart.rate(line)} " in row for row in section(line).splitlines())


def test_the_committed_lines_draw_the_committed_charts(tmp_path):
    done = python("scripts/chart.py", RESULTS, "--out", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    drawn, committed = (
        {path.name: path.read_bytes() for path in folder.glob("*.svg")}
        for folder in (tmp_path, RESULTS.parent)
    )
    assert len(drawn) == 4 and drawn == committed


def test_each_line_is_a_bar_with_its_name_and_value_and_no_bar_leaves_its_chart():
    drawn = []
    for name, each in chart.CHARTS.items():
        text = (ROOT / "assets" / f"{name}.svg").read_text(encoding="utf-8")
        assert "var(" not in text  # not all programs know CSS variables
        svg = ElementTree.fromstring(text)
        texts = {element.text for element in svg.iterfind("{*}text")}
        bars = each.bars([line for line in LINES if line.get(each.figure)])
        drawn += [bar.line for bar in bars]
        assert {text for bar in bars for text in (bar.group, bar.label, bar.text)} <= texts
        assert all(
            float(rect.get("x")) + float(rect.get("width")) <= chart.WIDTH
            for rect in svg.iterfind("{*}rect")
        )
    assert all(line in drawn for line in LINES)


def test_lines_of_two_kinds_of_gpu_and_a_chart_without_a_line(tmp_path, call):
    for name in ("A", "AB"):
        (tmp_path / name).write_text("\n".join(json.dumps(OURS[0] | dict(gpu=gpu)) for gpu in name))
    one, two = (
        call("chart.py", chart.main, tmp_path / name, "--out", tmp_path / "out")
        for name in ("A", "AB")
    )
    assert one == (0, "", "") and "has lines of A, B: want one kind of GPU" in two[2]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "bandwidth.svg",
        "gpus.svg",
        "speed.svg",
    }


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[1]", "TypeError"),
        ('{"tokens_per_s": 1.0, "what": "llama-2-7b", "gpu": "A"}', "KeyError"),
    ],
)
def test_a_file_without_measurements_is_one_line(tmp_path, call, content, words):
    path = tmp_path / "lines"
    if content:
        path.write_text(content)
    message = one_line(call("chart.py", chart.main, path, "--out", tmp_path / "out"))
    assert absent(words, message) == [] and not (tmp_path / "out").exists()

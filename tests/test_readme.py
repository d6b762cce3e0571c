"""README.md and BENCHMARKS.md are true today."""

import re
import shlex

import pytest

import cli.options
import cli.quantize
from helpers import ROOT
from scripts import benchmark, evaluate

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
PARSERS = {
    "scripts/benchmark.py": benchmark.parse_args,
    "scripts/evaluate.py": evaluate.parse_args,
    "quantize.py": cli.quantize.parse_args,
    "generate.py": lambda: cli.options.generate_args(""),
}


def readme_commands() -> list[str]:
    lines = re.findall(
        r"^(?:echo .*\| )?(?:python|torchrun .*?\d) ((?:scripts/)?\w+\.py.*)$", README, re.M
    )
    return [re.sub(r" > [\w.-]+", "", line) for line in lines]


def benchmark_commands() -> list[str]:
    """Without "python". In a table the first code of a row follows the command that was named last,
    in the table's header or before it."""
    found, begun = [], ""
    wrapped = "`python generate.py --temperature 0"
    for line in BENCHMARKS.replace(f"{wrapped}\n", f"{wrapped} ").splitlines():
        command = re.search(r"python ((?:scripts/)?\w+\.py\b[^`]*)", line)
        row = re.match(r"\|.*?`(?!python)(.+?)`", line)
        if command:
            begun = command[1].strip()
            found += [begun] if line.startswith("python ") else []
        elif row:
            found.append(f"{begun} {row[1]}")
    return found


def test_the_links_and_scripts_are_there():

    links, scripts = r"\]\(([^)#]+)\)", r"python ((?:\w+/)*\w+\.py)"
    for target in re.findall(links, README + BENCHMARKS) + re.findall(scripts, README + BENCHMARKS):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_options_named_exist(call):
    _, known, _ = call("generate.py", PARSERS["generate.py"], "--help")
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= set(re.findall(r"--[a-z-]+", known))


def test_the_pages_have_commands():
    assert len(readme_commands()) >= 15 and len(benchmark_commands()) >= 30


@pytest.mark.parametrize("command", readme_commands() + benchmark_commands())
def test_a_command_is_understood(command, monkeypatch):
    script, *words = shlex.split(command, comments=True)
    monkeypatch.setattr(benchmark, "find_spec", lambda name: True)  # the page says what to install
    monkeypatch.setattr("sys.argv", [script, *words])
    if script in PARSERS:
        PARSERS[script]()  # ValueError for what it does not understand

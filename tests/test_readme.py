"""The README is true today."""
import re
import shlex
from pathlib import Path

import pytest

import generate
from cli.options import generate_args
from cli.quantize import parse_args
from scripts import benchmark, evaluate

ROOT = Path(generate.__file__).parent
README = (ROOT / "README.md").read_text()


BENCHMARKS = (ROOT / "BENCHMARKS.md").read_text()
PARSERS = {"scripts/benchmark.py": benchmark.parse_args, "scripts/evaluate.py": evaluate.parse_args,
           "quantize.py": parse_args, "generate.py": lambda: generate_args("")}


def commands() -> list[str]:
    """Of BENCHMARKS.md, without "python". In a table the first code of a row follows the command that was named last,
    in the table's header or before it."""
    found, begun = [], ""
    for line in BENCHMARKS.splitlines():
        command = re.search(r"python ((?:-m fast\.tune|(?:scripts/)?\w+\.py)\b[^`]*)", line)
        row = re.match(r"\|.*?`(?!python)(.+?)`", line)
        if command:
            begun = command[1].strip()
            found += [begun] if line.startswith("python ") else []
        elif row:
            found.append(f"{begun} {row[1]}")
    return found


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert README.count("\n") <= 200
    for target in re.findall(r"\]\(([^)#]+)\)", README + BENCHMARKS):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_scripts_named_exist():
    for script in re.findall(r"python ((?:scripts/)?\w+\.py)", README + BENCHMARKS):
        assert (ROOT / script).exists(), script


def test_options_named_exist(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["generate.py", "--help"])
    try:
        generate.generate_args("", "")
    except SystemExit:
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= known
    for command in re.findall(r"^python generate\.py (.*?)(?:  #.*)?$", README, re.M):
        assert set(re.findall(r"--[a-z-]+", command)) <= known


def test_the_bundled_pair_stays_small_and_shares_its_tokenizer():
    files = [path for path in (ROOT / "checkpoints").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 9_000_000
    tiny, draft = (ROOT / "checkpoints" / name / "tokenizer.model" for name in ("tiny", "tiny-draft"))
    assert tiny.read_bytes() == draft.read_bytes()


def test_benchmarks_has_commands():
    assert len(commands()) > 40


@pytest.mark.parametrize("command", commands())
def test_a_command_of_benchmarks_is_understood_and_has_no_placeholder(command, monkeypatch):
    script, *words = shlex.split(command)
    assert not {"A", "B", "C", "DIR", "FILE", "TEXT"} & set(re.findall(r"\w+", command))
    if script in PARSERS:
        monkeypatch.setattr(benchmark, "find_spec", lambda name: True)  # the page says what to install
        monkeypatch.setattr("sys.argv", [script, *words])
        PARSERS[script]()

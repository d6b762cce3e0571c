"""The README is true today."""
import re
from pathlib import Path

import generate

ROOT = Path(generate.__file__).parent
README = (ROOT / "README.md").read_text()


BENCHMARKS = (ROOT / "BENCHMARKS.md").read_text()


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

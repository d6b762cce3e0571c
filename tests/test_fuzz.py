"""The fuzzer finds nothing in 200 trials, and its judge finds what is accepted on purpose: see fuzz.py."""
import sys

from helpers import ROOT, ended


def test_200_broken_checkpoints_are_refused_in_one_line_or_load():
    done = ended([sys.executable, ROOT / "tests" / "fuzz.py", "--trials", 200], 300)
    assert done.returncode == 0 and done.stdout.startswith("200 trials in ") and "refused" in done.stdout, done.stdout

"""The fuzzer finds nothing in 300 trials, and its judge finds what is accepted on purpose: see fuzz.py."""
import sys

import pytest

from helpers import ROOT, ended


def test_300_broken_checkpoints_are_refused_in_one_line_or_load():
    done = ended([sys.executable, ROOT / "tests" / "fuzz.py", "--trials", 300], 300)
    assert done.returncode == 0 and done.stdout.startswith("300 trials in ") and "refused" in done.stdout, done.stdout


@pytest.mark.parametrize("check, seed", [("files", 3033), ("links", 3033), ("sampling", 3001), ("ends", 3117)])
def test_the_judge_finds_a_check_that_is_switched_off(check, seed):
    done = ended([sys.executable, ROOT / "tests" / "fuzz.py", "--trials", 1, "--seed", seed, "--sabotage", check], 300)
    assert done.returncode == 1 and " bad" in done.stdout, done.stdout + done.stderr

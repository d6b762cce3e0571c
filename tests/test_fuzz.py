"""The fuzzer finds nothing in 200 trials, and its judge finds what is accepted on purpose: see
programs/fuzz.py."""

from functools import partial

from helpers import beside, python


@beside
def fuzzed(directory):
    return partial(python, "tests/programs/fuzz.py", "--trials", 200)


def test_200_broken_checkpoints_are_refused_in_one_line_or_load(fuzzed):
    assert fuzzed.returncode == 0 and " refused" in fuzzed.stdout, fuzzed.stdout

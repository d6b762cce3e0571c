"""Each script says what it is for, and what is wrong with a command line."""

import pytest

from helpers import one_line
from scripts import benchmark, chart, download, evaluate, rivals, shapes, train_tiny

SCRIPTS = benchmark, chart, download, evaluate, rivals, shapes, train_tiny
of_each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


@of_each_script
def test_help_is_the_docstring_and_the_options(script, call):
    code, out, _ = call("script.py", script.main, "--help")
    assert code == 0 and script.__doc__.strip() in out and "options:" in out


@of_each_script
def test_an_unknown_option_is_one_line(script, call):
    assert "--" in one_line(call("script.py", script.main, "--no-such-option"))


def test_shapes_are_listed(call):
    code, out, _ = call("shapes.py", shapes.main)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == [*shapes.SHAPES]

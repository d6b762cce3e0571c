"""Without the folder fast/ every command works: in a copy of the repository that lacks it, or whose
fast/ is broken."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from helpers import ROOT, beside, ended, read_json, told, torchrun

GREEDY = (
    "generate.py",
    "--prompt",
    "One day",
    "--max-new-tokens",
    30,
    "--temperature",
    0,
    "--quiet",
)


def copy_tree(tree: Path) -> Path:
    """All but fast/ and the tests."""
    return shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".*", "fast", "tests", "__pycache__")
    )


def in_tree(tree: Path, command: list) -> CompletedProcess:
    """PYTHONPATH is empty, so that no other fast/ is found."""
    return ended(command, cwd=tree, PYTHONPATH="")


def commands_in_one_process(tree: Path, device: str, *options: str) -> dict:
    """What without_fast_worker.py gave."""
    worker = [
        sys.executable,
        ROOT / "tests" / "without_fast_worker.py",
        device,
        tree / "results.json",
        *options,
    ]
    done = in_tree(tree, worker)
    assert done.returncode == 0, done.stderr
    return read_json(tree / "results.json")


@pytest.fixture
def tree(tmp_path) -> Path:
    return copy_tree(tmp_path / "tree")


@beside
def done(directory: Path) -> Callable:
    """Each once: the worker's commands; generate.py as users start it, compiled, and on two
    ranks."""
    tree, options = copy_tree(directory / "tree"), (*GREEDY, "--device", "cpu")
    return lambda: dict(
        tree=tree,
        worker=commands_in_one_process(tree, "cpu"),
        compiled=in_tree(tree, [sys.executable, *options, "--compile"]),
        ranks=in_tree(tree, torchrun(*options)),
    )


def check(results: dict, tree: Path) -> None:
    """What without_fast_worker.py gave came from the copy and not from fast/, of which nothing
    speaks. That its values are right is what the core's other tests prove: eager code is the same
    with fast/."""
    assert results["generate"] == str(tree / "generate.py") and results["imported"] == []
    for name, result in results["commands"].items():
        assert result["code"] == 0 and "fast" not in result["err"], (name, result["err"])


def test_every_command_works(done):
    check(done["worker"], done["tree"])


def test_compiled_and_on_two_ranks_the_text_is_the_same(done):
    text = (
        "One day"
        + json.loads(done["worker"]["commands"]["plain"]["out"])["samples"][0]["text"]
        + "\n"
    )
    compiled, ranks = done["compiled"], done["ranks"]
    # A PyTorch that was built for CUDA says so where there is no GPU, in a line of its own logger.
    said = [line for line in compiled.stderr.splitlines() if not re.match(r"W\d{4} ", line)]
    assert (compiled.returncode, compiled.stdout, said) == (0, text, [])
    assert (ranks.returncode, ranks.stdout) == (0, text), ranks.stderr
    assert not told(ranks) and "fast/" not in ranks.stderr


def test_a_fast_that_cannot_be_imported_is_said_in_one_line(tree):
    """Then generate.py goes on as if there were none. Git may leave a folder without a file,
    perhaps with caches."""
    module = tree / "fast" / "__init__.py"
    command = [sys.executable, "-c", "import llm; print(llm.import_fast())"]
    module.parent.mkdir()
    module.write_text('raise RuntimeError("broken")\n')
    broken = in_tree(tree, command)
    module.unlink()
    empty = in_tree(tree, command)
    assert [(done.returncode, done.stdout, done.stderr) for done in (broken, empty)] == [
        (0, "None\n", "fast/ cannot be imported, plain PyTorch runs: RuntimeError: broken\n"),
        (0, "None\n", ""),
    ]


@pytest.mark.gpu
def test_compiled_on_a_gpu_every_command_works(tree):
    check(commands_in_one_process(tree, "cuda", "--compile"), tree)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus_give_the_text_of_one(tree):
    options = (*GREEDY, "--dtype", "float32", "--compile", "--device", "cuda")
    one, two = (
        in_tree(tree, command) for command in ([sys.executable, *options], torchrun(*options))
    )
    assert (one.returncode, two.returncode, two.stdout) == (0, 0, one.stdout), two.stderr
    assert one.stderr == "" and not told(two) and "fast/" not in two.stderr


@pytest.mark.gpu(alone=True)
def test_compiled_plain_pytorch_is_at_least_twice_as_fast_as_eager(tree):
    """Llama-2-7B's shape; both in one process, so that the machine does not count."""
    options = "--runs 2 --new-tokens 60 --against eager".split()
    done = in_tree(tree, [sys.executable, "scripts/benchmark.py", "llama-2-7b", *options])
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["against"]["eager"]["ratio"] >= 2 and line["share_of_read"] is None

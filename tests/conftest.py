import fcntl
import importlib
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import BinaryIO

import pytest

os.environ |= dict(
    # a thread that spins takes the core from what runs beside it, ten times as long
    OMP_WAIT_POLICY="passive",
    TORCHINDUCTOR_COMPILE_THREADS="1",  # no process that imports PyTorch beside each that compiles
    TORCHINDUCTOR_VEC_ISA_OK="1",  # else Inductor compiles four programs to find out, 7 s
)
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # pytest -n: they share the cores
    os.environ["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // int(workers)))
import torch

if (gpus := torch.cuda.device_count()) > 1 and workers:  # each GPU is the first one of some workers
    first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % gpus) for i in range(gpus))
from cli.errors import report_errors
from helpers import JOBS, ROOT, with_template
from tp import Shard

# Where fast/ cannot be imported, generate.py says so and goes on: what compiles would test plain
# PyTorch alone. So then no test runs here. A repository whose fast/ was deleted has the tests of
# the core left.
if (ROOT / "fast").exists():
    importlib.import_module("fast")
else:
    collect_ignore = ["fast"]
# -n 28 on two GPUs: 276 s, in order over 392
LONGEST = "test_without_fast test_llm test_tp test_speculative"


def pytest_configure(config):
    """pytest -n gives a worker one test after the other: of several in a row the first would hold
    up the rest."""
    config.option.maxschedchunk = 1


def alone(item) -> bool:
    """Whether no other GPU test may run beside it."""
    return any(mark.kwargs.get("alone") for mark in item.iter_markers("gpu"))


def pytest_collection_modifyitems(config, items):
    """GPU tests run where there is a GPU; elsewhere they count as deselected, and the header says
    so. Those that wait for all others come first, so that one worker has them and no other test
    behind them; then the longest."""
    items.sort(key=lambda item: (alone(item), item.path.stem in LONGEST), reverse=True)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not torch.cuda.is_available():
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)


def pytest_report_header():
    return "GPU tests: " + (
        "run" if torch.cuda.is_available() else "deselected, PyTorch finds no CUDA GPU here"
    )


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles anew; none inherits another's graphs, settings or seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def started(request, tmp_path_factory):
    """See helpers.beside(): one of the jobs after the other, from the first test on. Of pytest's
    workers (-n) one does a job, and the others read what it gave."""
    root, several = tmp_path_factory.getbasetemp(), hasattr(request.config, "workerinput")
    root = root.parent if several else root

    @cache
    def start(name: str) -> Callable:
        kept, lock = root / f"{name}.pickle", open(root / f"{name}.lock", "w")

        def read():
            fcntl.flock(lock, fcntl.LOCK_SH)
            return pickle.loads(kept.read_bytes())

        def run(job: Callable):
            with lock:
                result = outcome(job)
                kept.write_bytes(pickle.dumps(result))
            return result

        with suppress(BlockingIOError):  # another does it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not kept.exists():
                (root / name).mkdir()
                job = outcome(JOBS[name], root / name)
                return pool.submit(run, job if callable(job) else lambda: job).result
            fcntl.flock(lock, fcntl.LOCK_UN)
        return read

    with ThreadPoolExecutor(1) as pool:
        for item in request.session.items:
            [*map(start, JOBS.keys() & item.fixturenames)]
        yield lambda name: given(start(name)())
        pool.shutdown(cancel_futures=not several)  # which another worker may want


def outcome(function: Callable, *args):
    """What it returns or, for the tests that ask for it alone, raises."""
    try:
        return function(*args)
    except (Exception, pytest.skip.Exception, pytest.fail.Exception):
        return RuntimeError(traceback.format_exc())


def given(result):
    if isinstance(result, RuntimeError):
        raise RuntimeError(*result.args)
    return result


@pytest.fixture(autouse=True)
def others_wait(request, tmp_path_factory):
    """pytest -n runs several tests at once. A GPU test marked gpu(alone=True) measures times: it
    waits for those that run, and the next ones wait for it."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    with open(tmp_path_factory.getbasetemp().parent / "gpu-tests", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone(request.node) else fcntl.LOCK_SH)
        yield  # closing the file ends the lock


@pytest.fixture(scope="session")
def chatty(tmp_path_factory) -> str:
    """The bundled model with a chat template."""
    return str(with_template(tmp_path_factory.mktemp("chatty") / "tiny"))


@pytest.fixture
def lone(monkeypatch):
    """A rank's part is loaded without the other ranks."""
    monkeypatch.setattr(Shard, "parallelize", lambda self, model: None)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command's main() with these arguments in this process; returns exit code, stdout,
    stderr."""

    def run(
        name: str, main: Callable[[], None], *args, stdin: str | bytes | BinaryIO = ""
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        stdin = stdin.encode() if isinstance(stdin, str) else stdin
        stream = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        code = 0
        try:
            report_errors(main)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run

import importlib
import io
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import BinaryIO

import pytest

os.environ |= dict(
    OMP_WAIT_POLICY="passive",  # a thread that spins takes the core from what runs beside it, ten times as long
    TORCHINDUCTOR_VEC_ISA_OK="1")  # Inductor compiles four programs to find out, 7 s
import torch  # noqa: E402

from cli.errors import report_errors  # noqa: E402
from helpers import JOBS, ROOT  # noqa: E402
from tp import Shard  # noqa: E402

LEFT_OUT = pytest.StashKey[int]()  # how many GPU tests


def pytest_collection_modifyitems(config, items):
    """GPU tests run where there is a GPU; elsewhere they count as deselected, and a line says so."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not torch.cuda.is_available():
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)
        config.stash[LEFT_OUT] = len(gpu)


def pytest_report_header():
    return "GPU tests: " + ("run" if torch.cuda.is_available() else "deselected, PyTorch finds no CUDA GPU here")


def pytest_report_collectionfinish(config):
    if count := config.stash.get(LEFT_OUT, 0):
        return f"left out: {count} GPU tests, PyTorch finds no CUDA GPU here"


@pytest.fixture(scope="session", autouse=True)
def fast_imports():
    """Where fast/ cannot be imported, generate.py says so and goes on: what compiles would test plain PyTorch alone. So
    then every test fails here. A repository whose fast/ was deleted has the tests of the core left."""
    if (ROOT / "fast").exists():
        importlib.import_module("fast")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles anew; none inherits another's graphs, settings or seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def started(request, tmp_path_factory):
    """See helpers.beside(): one of the jobs after the other, from the first test on, as most tests use one core."""
    @cache
    def start(name: str):
        return pool.submit(JOBS[name](tmp_path_factory.mktemp(name)))

    with ThreadPoolExecutor(1) as pool:
        if not hasattr(request.config, "workerinput"):  # pytest -n uses all cores
            for item in request.session.items:
                [*map(start, JOBS.keys() & item.fixturenames)]
        yield lambda name: start(name).result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def others_wait(request, tmp_path_factory):
    """pytest -n runs several tests at once. A GPU test marked gpu(alone=True) measures times: it waits for those that
    run, and the next ones wait for it."""
    if not (marker := request.node.get_closest_marker("gpu")):
        yield
        return
    import fcntl  # not on Windows
    with open(tmp_path_factory.getbasetemp().parent / "gpu-tests", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if marker.kwargs.get("alone") else fcntl.LOCK_SH)
        yield  # closing the file ends the lock


@pytest.fixture
def lone(monkeypatch):
    """A rank's part is loaded without the other ranks."""
    monkeypatch.setattr(Shard, "parallelize", lambda self, model: None)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command's main() with these arguments in this process; returns exit code, stdout, stderr."""
    def run(name: str, main: Callable[[], None], *args, stdin: str | bytes | BinaryIO = "") -> tuple[int, str, str]:
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

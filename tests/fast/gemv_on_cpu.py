"""Runs fast/gemv.cu, fast/few.cu and fast/step.cu without a GPU."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from fast.layout import Packed
from fast.packed_few import few_arguments, few_sizes
from fast.nvrtc import in_c
from fast.step import Step
from fast.packed_gemv import OUT, Experts, arguments_for, macros_for, sizes_for, source_of

HEADER = Path(__file__).with_name("cuda_on_cpu.h")


def build(*args: str | Path) -> None:
    built = subprocess.run(
        [*"g++ -std=c++20 -O1 -fPIC -pthread -w".split(), *args], capture_output=True, text=True
    )
    assert not built.returncode, built.stderr


@cache
def prepared() -> TemporaryDirectory:
    """The C++ library's headers, compiled once: a kernel then takes half of the time."""
    directory = TemporaryDirectory()
    library = Path(directory.name, "library.h")
    library.write_text("".join(line for line in HEADER.open() if line.startswith("#include")))
    build("-x", "c++-header", library, "-o", f"{library}.gch")
    return directory


def run_on_cpu(
    directory: Path,
    name: str,
    macros: dict,
    programs: int,
    threads: int,
    shared_bytes: int,
    arguments: list,
    out: Tensor,
    source: str = "",
) -> Tensor:
    """out, of so many programs of this name, whose threads are threads of the CPU. source: if it is
    not packed_gemv.source_of()'s."""
    lines = [
        '#include "library.h"',
        *(f"#define {macro} {int(value)}" for macro, value in macros.items()),
        "#define CUDA_ON_CPU",
        f"#define {name.upper()}",
        f'#include "{HEADER}"',
        source or source_of(name),
    ]
    text = "\n".join(lines)
    library = directory / f"{name}{abs(hash(text))}.so"
    if not library.exists():
        library.with_suffix(".cpp").write_text(text)
        build("-shared", "-I", prepared().name, library.with_suffix(".cpp"), "-o", library)
    out.fill_(torch.nan)
    assert ctypes.CDLL(library).run(programs, threads, shared_bytes, *map(in_c, arguments))
    return out


def gemv_on_cpu(
    directory: Path,
    x: Tensor,
    packed: Packed,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    experts: Experts | None = None,
) -> Tensor:
    sizes, shared_bytes = sizes_for(packed, 60_000, experts)
    macros = macros_for(x, packed, norm, bias, residual, experts) | sizes
    arguments = arguments_for(x, packed, norm, bias, residual, 1e-5, experts)[0]
    threads = (sizes["WIDTH"] + 1) * sizes["TEAMS"] * 32
    return run_on_cpu(
        directory, "gemv", macros, 2, threads, shared_bytes, arguments, arguments[OUT]
    )


def few_on_cpu(
    directory: Path, cluster: int, x: Tensor, packed: Packed, *others: Tensor | None
) -> Tensor:
    """In clusters of so many programs. others: the norm's weight, the bias, the residual."""
    sizes, shared_bytes = few_sizes(packed, 100_000, (cluster,))
    arguments = few_arguments(x, packed, *others, 1e-5)
    return run_on_cpu(
        directory,
        "few",
        macros_for(x, packed, *others) | sizes,
        2 * cluster,
        (sizes["WIDTH"] + 1) * 32,
        shared_bytes,
        arguments,
        arguments[6],
    )


def step_on_cpu(
    directory: Path, step: Step, x: Tensor, positions: Tensor, late: int | None = None
) -> Tensor:
    """All of its programs run at once. late: milliseconds that a copy of a box may take."""
    macros = step.constants() | dict(WIDTH=step.warps, CLUSTER=step.programs)
    if late:
        macros["LATE"] = late
    arguments = step.arguments(x, positions)
    threads = (step.warps + 1) * 32
    sizes = step.programs, threads, step.memory
    source = step.source()
    return run_on_cpu(directory, "step", macros, *sizes, arguments, arguments[2], source)

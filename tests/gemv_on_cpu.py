"""Runs fast/gemv.cu without a GPU."""
import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from fast.layout import Packed
from fast.packed_gemv import OUT, SOURCE, Experts, arguments_for, in_c, macros_for, sizes_for

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
FLAGS = "-std=c++20 -O1 -fPIC -pthread -w".split()


def build(*args: str | Path) -> None:
    built = subprocess.run(["g++", *FLAGS, *args], capture_output=True, text=True)
    assert not built.returncode, built.stderr


@cache
def prepared() -> TemporaryDirectory:
    """The C++ library's headers, compiled once: a kernel then takes half of the time."""
    directory = TemporaryDirectory()
    library = Path(directory.name, "library.h")
    library.write_text("".join(line for line in HEADER.open() if line.startswith("#include")))
    build("-x", "c++-header", library, "-o", f"{library}.gch")
    return directory


def gemv_on_cpu(directory: Path, x: Tensor, packed: Packed, norm: Tensor | None = None, bias: Tensor | None = None,
                residual: Tensor | None = None, experts: Experts | None = None) -> Tensor:
    """gemv.cu's out, of two programs whose threads are threads of the CPU."""
    sizes, shared_bytes = sizes_for(packed, 60_000, experts)
    macros = macros_for(x, packed, norm, bias, residual, experts) | sizes
    library = directory / f"{abs(hash(str(macros)))}.so"
    lines = ['#include "library.h"', *(f"#define {name} {int(value)}" for name, value in macros.items()),
             "#define CUDA_ON_CPU", *(f'#include "{path}"' for path in (HEADER, SOURCE))]
    library.with_suffix(".cpp").write_text("\n".join(lines))
    build("-shared", "-I", prepared().name, library.with_suffix(".cpp"), "-o", library)
    arguments = arguments_for(x, packed, norm, bias, residual, 1e-5, experts)[0]
    arguments[OUT].fill_(torch.nan)
    threads = (sizes["WIDTH"] + 1) * sizes["TEAMS"] * 32
    assert ctypes.CDLL(library).run(2, threads, shared_bytes, *map(in_c, arguments))
    return arguments[OUT]

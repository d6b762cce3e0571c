"""Runs fast/gemv.cu without a GPU."""
import ctypes
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from fast.layout import Packed
from fast.packed_gemv import OUT, SOURCE, Experts, arguments_for, in_c, macros_for, sizes_for

HEADER = Path(__file__).with_name("cuda_on_cpu.h")


def gemv_on_cpu(directory: Path, x: Tensor, packed: Packed, norm: Tensor | None = None, bias: Tensor | None = None,
                residual: Tensor | None = None, experts: Experts | None = None) -> Tensor:
    """gemv.cu's out, of two programs whose threads are threads of the CPU."""
    sizes, shared_bytes = sizes_for(packed, 60_000, experts)
    macros = macros_for(x, packed, norm, bias, residual, experts) | sizes
    library = directory / f"{abs(hash(str(macros)))}.so"
    built = subprocess.run(
        ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-DCUDA_ON_CPU", "-x", "c++",
         *(f"-D{name}={int(value)}" for name, value in macros.items()), "-include", HEADER, SOURCE, "-o", library],
        capture_output=True, text=True)
    assert not built.returncode, built.stderr
    arguments = arguments_for(x, packed, norm, bias, residual, 1e-5, experts)[0]
    arguments[OUT].fill_(torch.nan)
    threads = (sizes["WIDTH"] + 1) * sizes["TEAMS"] * 32
    assert ctypes.CDLL(library).run(2, threads, shared_bytes, *map(in_c, arguments))
    return arguments[OUT]

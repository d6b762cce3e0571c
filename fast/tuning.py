"""
Which kernel multiplies, and with what sizes: tuned.json's choice for this GPU or, where it has
none, a rule of thumb.

tuned.json: GPU name -> format -> "NxK" -> a list of choices. A choice serves up to `rows` rows of
x, and the first that serves enough is taken. Its `kernel` is "gemm" or "library" (cuBLAS; quantized
weights are dequantized first). Its other fields are that kernel's sizes:

    16-bit gemm    block_n, block_k, stages, warps
    packed gemm    block_n, block_m, splits, stages, warps, occupancy, slices, scaled

    block_n     rows of w in a tile
    block_k     inputs in a step
    block_m     rows of x in a tile
    stages      tiles in flight from memory
    occupancy   programs that shall share a multiprocessor, whose registers are limited for it;
                0: no limit
    slices      of K, each another program's; their sums are added up in memory
    splits      blocks of the packed layout in a step, each with a sum of its own
    scaled      1: weights are multiplied by their scales; 0: sums are

A format is "16-bit", "int8" or "int4"; "int4-32" and "int4-64" have groups smaller than a block of
the packed layout. FP8 takes int8's choices: as many bytes come from memory. One row has
packed_gemv.py, 2 to 8 of int4 and int8 packed_few.py; their sizes follow from K. python
scripts/tune.py writes the file.
"""

import functools
import json
import sys
from pathlib import Path

import torch

from fast.common import gpu

PATH = Path(__file__).parent / "tuned.json"
LIBRARY = {"kernel": "library"}


@functools.cache
def table(name: str) -> dict:
    """tuned.json's choices for the GPU of this name. Where it has none that can be read, {}, and a
    line on stderr."""
    found = json.loads(PATH.read_text()).get(name)
    if found is None:
        print(
            f"tuned.json has nothing for {name}: rules of thumb choose the kernels; "
            "python scripts/tune.py finds the fastest",
            file=sys.stderr,
        )
        return {}
    if not all(
        isinstance(choice, dict)
        for shapes in found.values()
        for choices in shapes.values()
        for choice in choices
    ):
        print(
            f"tuned.json is in an old form for {name}: rules of thumb choose the kernels; "
            "python scripts/tune.py writes a new one",
            file=sys.stderr,
        )
        return {}
    return found


@functools.cache
def kernel_for(format: str, N: int, K: int, M: int, device: torch.device) -> dict:
    """The choice for M rows of x and weights [N, K]."""
    choices = table(gpu(device).name).get(format, {}).get(f"{N}x{K}", []) + rules_of_thumb(
        format, N, K, device
    )
    return next((choice for choice in choices if M <= choice["rows"]), LIBRARY)


def rules_of_thumb(format: str, N: int, K: int, device: torch.device) -> list[dict]:
    rules = rules_for_16_bits if format == "16-bit" else rules_for_packed
    return rules(N, device)


def rules_for_packed(N: int, device: torch.device) -> list[dict]:
    """With 4 rows 8% slower than the best on average, 30% at most (44 products of 7B, 8B and 70B,
    H200)."""
    # About four programs on each multiprocessor.
    slices = max(1, min(8, 2 * gpu(device).multi_processor_count * 64 // max(N, 1)))
    few = dict(
        rows=8,
        kernel="gemm",
        block_n=32,
        block_m=64,
        splits=4,
        stages=3,
        warps=4,
        occupancy=3,
        slices=slices,
        scaled=0,
    )
    more = dict(
        rows=64,
        kernel="gemm",
        block_n=64,
        block_m=64,
        splits=1,
        stages=3,
        warps=4,
        occupancy=3,
        slices=4,
        scaled=0,
    )
    most = dict(
        rows=512,
        kernel="gemm",
        block_n=64,
        block_m=128,
        splits=1,
        stages=3,
        warps=4,
        occupancy=2,
        slices=4,
        scaled=1,
    )
    if gpu(device).shared_memory_per_block_optin <= 128 * 1024:  # no room for the wide tiles
        most = more | dict(rows=128)
    return [few, more, most]


def rules_for_16_bits(N: int, device: torch.device) -> list[dict]:
    several = dict(rows=16, kernel="gemm", block_n=16, block_k=256, stages=6, warps=2)
    if N > 2 * 16 * gpu(device).multi_processor_count:  # two such programs share a multiprocessor
        several |= dict(block_n=32, stages=4, warps=4)
    if N > 8192:
        several |= dict(block_n=64, block_k=128, stages=4, warps=4)
    return [several]

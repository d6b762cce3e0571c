"""
The rate at which a GPU reads the model's weights and does nothing else: the ceiling of decode at
batch 1.
"""

import torch
from torch import nn

from fast.common import constexpr, jit, tl, triton

CHUNK = 2**16  # bytes that a program reads: 64 KiB read at 4.60 TB/s on an H200, 1 MiB at 4.57
PASSES = 10


@jit
def read_chunk(addresses, sums, BYTES: constexpr, BLOCK: constexpr):
    """Adds up BYTES bytes from an address [chunks] on, as 8-byte words, into sums [chunks].

    The sum is stored because the compiler would otherwise leave the reads out."""
    words = tl.multiple_of(tl.load(addresses + tl.program_id(0)), 16).to(tl.pointer_type(tl.int64))
    total = tl.zeros((BLOCK,), tl.int64)
    for at in range(0, BYTES // 8, BLOCK):
        total += tl.load(words + at + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read_bandwidth(model: nn.Module) -> float | None:
    """Bytes a second at which a CUDA GPU reads the model's parameters: the best of ten passes, each
    of one launch.

    None where Triton is missing."""
    if not triton:
        return None
    starts = []
    for weight in model.parameters():
        starts += range(weight.data_ptr(), weight.data_ptr() + weight.nbytes - CHUNK + 1, CHUNK)
    addresses = torch.tensor(starts, device=weight.device)
    sums = torch.empty_like(addresses)
    milliseconds = []
    for _ in range(PASSES):  # the first one compiles
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        read_chunk[(len(starts),)](addresses, sums, CHUNK, 4096, num_warps=8)
        ended.record()
        ended.synchronize()
        milliseconds.append(begun.elapsed_time(ended))
    return len(starts) * CHUNK / min(milliseconds) * 1e3

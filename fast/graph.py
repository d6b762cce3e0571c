"""
A step as a CUDA graph, which itself brings its results to the host.

A copy behind a graph waits 5 us until the GPU's copy engine has heard of the graph's end, and the
next graph waits 5 us for the copy. So the last kernels of the graph write the results where the
host reads them: in its pinned memory, which the GPU reaches by the same addresses. From the last
kernel of a step to the first of the next it is 4 us so, and was 14 with two copies (H200). There
are two places, as a step is launched before the one before it is read.
"""

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from fast.common import constexpr, jit, tl


@jit
def send_kernel(x, places, count, n, BLOCK: constexpr):
    """Writes x [n] to places [2, n], the place whose turn it is by the count."""
    sent = tl.load(count)
    for begin in range(0, n, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        tl.store(places + sent % 2 * n + i, tl.load(x + i, mask=i < n), mask=i < n)
    tl.debug_barrier()
    tl.store(count, sent + 1)


class CapturedStep:
    """step() as a CUDA graph. A call launches it and returns its results on the host, which are
    there when the GPU has come so far. The call after the next one overwrites them.

    results: those of a step that ran as it is, which compiled its kernels. pool: of graphs that
    share their memory."""

    def __init__(self, step: Callable, results: tuple[Tensor, ...], pool=None):
        self.places = [torch.empty(2, *x.shape, dtype=x.dtype, pin_memory=True) for x in results]
        self.counts = torch.zeros(len(results), dtype=torch.long, device=results[0].device)
        self.turns = cycle(zip(*self.places))
        self.send(results)  # compiles its kernel
        self.counts.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.send(step())

    def send(self, results: tuple[Tensor, ...]) -> None:
        for x, places, count in zip(results, self.places, self.counts.split(1), strict=True):
            send_kernel[(1,)](x.contiguous(), places, count, x.numel(), BLOCK=256)

    def __call__(self) -> tuple[Tensor, ...]:
        self.graph.replay()
        return next(self.turns)

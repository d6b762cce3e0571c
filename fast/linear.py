"""
Matrix products of 16-bit weights with norm, bias, SiLU and residual inside, each beside its plain twin.

At batch 1 a launch is over in 10 to 40 us, and what counts is that memory never idles in between. With programmatic
dependent launch (compute capability 9.0) a kernel starts while the one before drains, and its first weights are on
their way before it waits for its input.

Shapes: M = B x T rows, K inputs, N outputs.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, library

from fast.common import constexpr, gdc_launch_dependents, gdc_wait, gpu, jit, launch, tl, triton, tuned


@jit
def row_kernel(x, w, norm, bias, residual, out, N, K, eps,
               GATED: constexpr, BN: constexpr, BK: constexpr, STAGES: constexpr, PDL: constexpr):
    """One row of linear(). A program takes BN rows of w at a time, whole, through a ring of STAGES - 1 tiles."""
    k = tl.arange(0, BK)
    inside = k < K
    i = tl.arange(0, BN)
    N_OUT = N // 2 if GATED else N
    STEP: constexpr = BN // 2 if GATED else BN
    if PDL:
        gdc_launch_dependents()
    if norm is not None:
        g = tl.load(norm + k, mask=inside, other=0).to(tl.float32)
    xs = tl.zeros((BK,), tl.float32)
    scale = 1.0
    first = tl.program_id(0) * STEP
    for n0 in tl.range(first, N_OUT, tl.num_programs(0) * STEP, num_stages=STAGES):
        if GATED:  # a gate's row, its up's row, the next gate's ...
            rows = tl.minimum(n0 + i // 2, N_OUT - 1) + i % 2 * N_OUT
        else:
            rows = tl.minimum(n0 + i, N_OUT - 1)
        at = w + rows.to(tl.int64)[:, None] * K + k[None, :]
        tile = tl.load(at, mask=inside[None, :], other=0, eviction_policy="evict_first")
        if n0 == first:  # within the loop, so that the compiler puts the first tiles' loads before the wait
            if PDL:
                gdc_wait()
            xs = tl.load(x + k, mask=inside, other=0).to(tl.float32)
            if norm is not None:
                scale = tl.rsqrt(tl.sum(xs * xs, 0) / K + eps)
                xs *= g
        y = tl.sum(tile.to(tl.float32) * xs[None, :], 1) * scale
        if bias is not None:
            y += tl.load(bias + rows)
        n = n0 + tl.arange(0, STEP)
        if GATED:
            gate, up = tl.split(tl.reshape(y, (STEP, 2)))
            y = gate / (1 + tl.exp(-gate)) * up
        if residual is not None:
            y += tl.load(residual + n, mask=n < N_OUT, other=0)
        tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N_OUT)


@jit
def rows_kernel(x, w, bias, residual, out, M, N, K,
                GATED: constexpr, BM: constexpr, BN: constexpr, BK: constexpr, STAGES: constexpr,
                PDL: constexpr):
    """Several rows of linear(), without norm: w's tiles are the left operand of the matrix unit, which takes 8 rows of
    x for the price of one."""
    i = tl.arange(0, BN)
    m = tl.arange(0, BM)
    N_OUT = N // 2 if GATED else N
    STEP: constexpr = BN // 2 if GATED else BN
    n0 = tl.program_id(0) * STEP
    if GATED:
        rows = tl.minimum(n0 + i // 2, N_OUT - 1) + i % 2 * N_OUT
    else:
        rows = tl.minimum(n0 + i, N_OUT - 1)
    at_w = w + rows.to(tl.int64)[:, None] * K
    at_x = x + m[None, :] * K
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, BK)
    ahead = tl.load(at_w + k[None, :], mask=(k < K)[None, :], other=0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in tl.range(BK, K, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        tile = tl.load(at_w + k[None, :], mask=(k < K)[None, :], other=0, eviction_policy="evict_first")
        xs = tl.load(at_x + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0)
        acc = tl.dot(tile, xs, acc)
    k = tl.arange(0, BK)
    xs = tl.load(at_x + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0)
    acc = tl.dot(ahead, xs, acc)
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    n = n0 + tl.arange(0, STEP)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (STEP, 2, BM)), (0, 2, 1)))
        acc = gate / (1 + tl.exp(-gate)) * up
    at = m[None, :] * N_OUT + n[:, None]
    inside = (n < N_OUT)[:, None] & (m < M)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@jit
def norm_kernel(x, weight, out, K, eps, BK: constexpr, PDL: constexpr):
    """RMSNorm of one row a program."""
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
    g = tl.load(weight + k, mask=k < K, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    at = tl.program_id(0) * K + k
    xs = tl.load(x + at, mask=k < K, other=0).to(tl.float32)
    y = xs * tl.rsqrt(tl.sum(xs * xs, 0) / K + eps) * g
    tl.store(out + at, y.to(out.dtype.element_ty), mask=k < K)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, K], on a GPU, in one launch."""
    out, pdl = torch.empty_like(x), launch(x.device)
    norm_kernel[(len(x),)](x, weight, out, x.shape[1], eps, triton.next_power_of_2(x.shape[1]), bool(pdl), num_warps=8,
                           **pdl)
    return out


def plain_linear(x: Tensor, w: Tensor, norm: Tensor | None = None, bias: Tensor | None = None,
                 residual: Tensor | None = None, gated: bool = False, eps: float = 1e-5) -> Tensor:
    """The plain twin of linear()."""
    if norm is not None:
        x = F.rms_norm(x.float(), x.shape[-1:], norm.float(), eps).type_as(x)  # rounded once, as in the kernels
    y = F.linear(x, w, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


@library.custom_op("llama_fast::linear", mutates_args=(), device_types="cuda")
def linear(x: Tensor, w: Tensor, norm: Tensor | None = None, bias: Tensor | None = None,
           residual: Tensor | None = None, gated: bool = False, eps: float = 1e-5) -> Tensor:
    """x [M, K], w [N, K] -> residual [M, N] + rms_norm(x, norm) @ w.T + bias [N], what is None left out.

    gated: w's first half is the gate, its second half up, and the result silu(gate) * up, [M, N / 2]."""
    M, K = x.shape
    N = len(w)
    kernel, *sizes = tuned("16-bit", N, K, M, x.device)
    x = x.contiguous()
    if norm is not None and kernel != "row":
        x = rms_norm(x, norm, eps)
    if kernel == "library":
        return plain_linear(x, w, None, bias, residual, gated)
    out = x.new_empty(M, N // 2 if gated else N)
    pdl = launch(x.device)
    if kernel == "row":
        rows, stages, warps, programs = sizes
        grid = min(triton.cdiv(N, rows), programs * gpu(x.device).multi_processor_count)
        row_kernel[(grid,)](x, w, norm, bias, residual, out, N, K, eps, gated, rows, triton.next_power_of_2(K), stages,
                            bool(pdl), num_warps=warps, **pdl)
        return out
    rows, block, stages, warps = sizes
    rows_kernel[(triton.cdiv(N, rows),)](x, w, bias, residual, out, M, N, K, gated, max(16, triton.next_power_of_2(M)),
                                         rows, block, stages, bool(pdl), num_warps=warps, **pdl)
    return out


linear.register_kernel("cpu")(plain_linear)


@linear.register_fake
def _(x, w, norm=None, bias=None, residual=None, gated=False, eps=1e-5):
    return x.new_empty(len(x), len(w) // 2 if gated else len(w))


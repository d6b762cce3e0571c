"""
Linear layers of 16-bit weights, with RMSNorm, bias, SiLU gate and residual inside, beside their
plain twin; and a prompt's gate.

At batch 1 a launch takes 10 to 40 us, and what counts is that memory never idles between two
launches. With programmatic dependent launch (compute capability 9.0) a kernel starts while the
kernel before it drains. Its first weights are on their way before it waits for its input.

    gemv()        one row of x: packed_gemv.py
    gemm_kernel   a few rows of x: each program has BN rows of w and loops over K in tiles of BK,
                  on the matrix unit
    cuBLAS        many rows of x: there it is faster, and rms_norm() is a launch of its own

tuned.json says which one serves how many rows (fast/tuning.py).

Shapes: M = B x T rows, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from fast.common import (
    CLAMPED,
    GATES,
    constexpr,
    gate_function,
    gate_times_up,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)
from fast.packed_gemv import Plain, gemv, takes_gemv
from fast.tuning import kernel_for
from fast.twins import plain_add_norm, plain_gate, plain_linear
from model import Gate


@jit
def tile_rows(n0, i, N_OUT, GATED: constexpr):
    """The rows of w for the outputs from n0 on, i = 0 .. BN - 1; behind the last row, the last one
    again.

    Gated, each output needs two rows, which stand side by side: a gate's row, its up's row, the
    next gate's row, ..."""
    if GATED:
        rows = tl.minimum(n0 + i // 2, N_OUT - 1) + i % 2 * N_OUT
    else:
        rows = tl.minimum(n0 + i, N_OUT - 1)
    return rows


@jit
def gemm_kernel(
    x,
    w,
    bias,
    residual,
    out,
    M,
    N,
    K,
    GATED: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
    STAGES: constexpr,
    PDL: constexpr,
):
    """linear() of a few rows x [M, K], without the norm. A program computes BN rows of w times all
    rows of x.

    w's tile is the left operand of the matrix unit: the right operand, x, then costs the same for 1
    to 8 rows."""
    m = tl.arange(0, BM)
    N_OUT = N // 2 if GATED else N
    STEP: constexpr = BN // 2 if GATED else BN
    n0 = tl.program_id(0) * STEP
    rows = tile_rows(n0, tl.arange(0, BN), N_OUT, GATED)
    w_rows = w + rows.to(tl.int64)[:, None] * K
    x_rows = x + m[None, :] * K
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, BK)
    first_tile = tl.load(
        w_rows + k[None, :], mask=(k < K)[None, :], other=0, eviction_policy="evict_first"
    )
    if PDL:
        gdc_wait()

    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in tl.range(BK, K, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        tile = tl.load(
            w_rows + k[None, :], mask=(k < K)[None, :], other=0, eviction_policy="evict_first"
        )
        xs = tl.load(x_rows + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0)
        acc = tl.dot(tile, xs, acc)
    k = tl.arange(0, BK)
    xs = tl.load(x_rows + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0)
    acc = tl.dot(first_tile, xs, acc)

    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    n = n0 + tl.arange(0, STEP)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (STEP, 2, BM)), (0, 2, 1)))
        acc = gate_times_up(gate, up, GATED)
    at = m[None, :] * N_OUT + n[:, None]
    inside = (n < N_OUT)[:, None] & (m < M)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@jit
def norm_kernel(x, weight, residual, scale, out, K, eps, BK: constexpr, PDL: constexpr):
    """scale * (residual + RMSNorm (arXiv 1910.07467) of x), both [M, K], residual and scale [1] may
    be None; each program has one row."""
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
    norm_weight = tl.load(weight + k, mask=k < K, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    at = tl.program_id(0) * K + k
    xs = tl.load(x + at, mask=k < K, other=0).to(tl.float32)
    y = xs * tl.rsqrt(tl.sum(xs * xs, 0) / K + eps) * norm_weight
    if residual is not None:
        y += tl.load(residual + at, mask=k < K, other=0)
    if scale is not None:
        y *= tl.load(scale).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=k < K)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """x [M, K], weight [K], residual [M, K], scale [1], on a GPU -> scale times the sum of residual
    and the norm of x [M, K], in one launch."""
    M, K = x.shape
    out = torch.empty_like(x)
    BK, pdl = triton.next_power_of_2(K), pdl_options(x.device)
    norm_kernel[(M,)](x, weight, residual, scale, out, K, eps, BK, bool(pdl), num_warps=8, **pdl)
    return out


@library.custom_op("llama_fast::add_norm", mutates_args=(), device_types="cuda")
def add_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """rms_norm() for torch.compile: scale * (residual + the norm of x [M, K])."""
    residual = None if residual is None else residual.contiguous()
    return rms_norm(x.contiguous(), weight, eps, residual, scale)


add_norm.register_kernel("cpu")(plain_add_norm)


@add_norm.register_fake
def _(x, weight, eps, residual=None, scale=None):
    return torch.empty_like(x)


@jit
def add_norms_kernel(
    a,
    b,
    a_weight,
    b_weight,
    weight,
    residual,
    scale,
    out,
    K,
    a_eps,
    b_eps,
    eps,
    BK: constexpr,
    PDL: constexpr,
):
    """add_norms() of rows [K]; each program has one."""
    k = tl.arange(0, BK)
    inside = k < K
    if PDL:
        gdc_launch_dependents()
    of_a = tl.load(a_weight + k, mask=inside, other=0).to(tl.float32)
    of_b = tl.load(b_weight + k, mask=inside, other=0).to(tl.float32)
    of_both = tl.load(weight + k, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    at = tl.program_id(0) * K + k
    x = tl.load(a + at, mask=inside, other=0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / K + a_eps) * of_a
    x = tl.load(b + at, mask=inside, other=0).to(tl.float32)
    y += x * tl.rsqrt(tl.sum(x * x, 0) / K + b_eps) * of_b
    y = y * tl.rsqrt(tl.sum(y * y, 0) / K + eps) * of_both
    y += tl.load(residual + at, mask=inside, other=0)
    if scale is not None:
        y *= tl.load(scale).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@library.custom_op("llama_fast::add_norms", mutates_args=(), device_types="cuda")
def add_norms(
    a: Tensor,
    b: Tensor,
    weights: list[Tensor],
    eps: list[float],
    residual: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    """scale * (residual + norm(norm(a) + norm(b))), in one launch: a, b, residual [M, K], scale [1];
    weights: three of [K], of a's norm, of b's, and of that of both; eps: theirs."""
    a, b, residual = (x.contiguous() for x in (a, b, residual))
    out, K, pdl = torch.empty_like(a), a.shape[1], pdl_options(a.device)
    add_norms_kernel[(len(a),)](
        *(a, b, *weights, residual, scale, out, K, *eps),
        *(triton.next_power_of_2(K), bool(pdl)),
        num_warps=8,
        **pdl,
    )
    return out


@add_norms.register_kernel("cpu")
def _(a, b, weights, eps, residual, scale=None):
    y = plain_add_norm(b, weights[1], eps[1], plain_add_norm(a, weights[0], eps[0]))
    return plain_add_norm(y, weights[2], eps[2], residual, scale)


@add_norms.register_fake
def _(a, b, weights, eps, residual, scale=None):
    return torch.empty_like(a)


@jit
def cap_kernel(x, out, n, cap, BLOCK: constexpr, PDL: constexpr):
    """out [n]: cap * tanh(x / cap)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(x + i, mask=i < n, other=0).to(tl.float32) / cap
    small = tl.exp(-2 * tl.abs(y))
    y = tl.where(y < 0, -cap, cap) * ((1 - small) / (1 + small))
    tl.store(out + i, y.to(out.dtype.element_ty), mask=i < n)


@library.custom_op("llama_fast::capped", mutates_args=(), device_types="cuda")
def capped(x: Tensor, cap: float) -> Tensor:
    """Transformer.capped() of logits of any shape, in one launch."""
    x = x.contiguous()
    out, n, pdl = torch.empty_like(x), x.numel(), pdl_options(x.device)
    cap_kernel[(triton.cdiv(n, 2048),)](x, out, n, cap, 2048, bool(pdl), num_warps=4, **pdl)
    return out


@capped.register_kernel("cpu")
def _(x, cap):
    return cap * torch.tanh(x / cap)


@capped.register_fake
def _(x, cap):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@jit
def norm_linear_kernel(
    x, weight, w, out, product, M, K, N, eps, BN: constexpr, BK: constexpr, PDL: constexpr
):
    """out: the RMSNorm of x [M, K]; product [M, N]: of that and w [N, K]. Program (BN rows of w, and
    every so many-th row of x, for each of which it makes the norm anew)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
    norm_weight = tl.load(weight + k, mask=k < K, other=0).to(tl.float32)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(w + n[:, None] * K + k[None, :], mask=inside, other=0)
    if PDL:
        gdc_wait()
    for m in range(tl.program_id(1), M, tl.num_programs(1)):
        xs = tl.load(x + m * K + k, mask=k < K, other=0).to(tl.float32)
        y = xs * tl.rsqrt(tl.sum(xs * xs, 0) / K + eps) * norm_weight
        y = y.to(out.dtype.element_ty)
        tl.store(out + m * K + k, y, mask=(k < K) & (tl.program_id(0) == 0))
        found = tl.sum(tile.to(tl.float32) * y.to(tl.float32)[None, :], 1)
        tl.store(product + m * N + n, found.to(product.dtype.element_ty), mask=n < N)


@library.custom_op("llama_fast::norm_linear", mutates_args=(), device_types="cuda")
def norm_linear(x: Tensor, weight: Tensor, eps: float, w: Tensor) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x [M, K], and its product with a few rows w [N, K], in one launch: [M, K], [M,
    N]. gemm_kernel alone would take 9 us for N = 96, as it has six programs for these (H200)."""
    (M, K), N = x.shape, len(w)
    x = x.contiguous()
    out, product = torch.empty_like(x), x.new_empty(M, N)
    BN, BK, pdl = 4, triton.next_power_of_2(K), pdl_options(x.device)
    norm_linear_kernel[triton.cdiv(N, BN), min(M, 16)](
        *(x, weight, w, out, product, M, K, N, eps, BN, BK, bool(pdl)), num_warps=8, **pdl
    )
    return out, product


@norm_linear.register_kernel("cpu")
def _(x, weight, eps, w):
    y = plain_add_norm(x, weight, eps)
    return y, plain_linear(y, w)


@norm_linear.register_fake
def _(x, weight, eps, w):
    return torch.empty_like(x), x.new_empty(len(x), len(w))


@jit
def linear_gate_kernel(
    x,
    w,
    own,
    out,
    M,
    K,
    N,
    own_stride,
    GATED: constexpr,
    BN: constexpr,
    BK: constexpr,
    PDL: constexpr,
):
    """linear_gate(). Program (BN rows of w, and every so many-th row of x)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(w + n[:, None] * K + k[None, :], mask=inside, other=0)
    if PDL:
        gdc_wait()
    for m in range(tl.program_id(1), M, tl.num_programs(1)):
        xs = tl.load(x + m * K + k, mask=k < K, other=0).to(tl.float32)
        gate = tl.sum(tile.to(tl.float32) * xs[None, :], 1)
        up = tl.load(own + m * own_stride + n, mask=n < N, other=0).to(tl.float32)
        y = gate_times_up(gate, up, GATED)
        tl.store(out + m * N + n, y.to(out.dtype.element_ty), mask=n < N)


@library.custom_op("llama_fast::linear_gate", mutates_args=(), device_types="cuda")
def linear_gate(x: Tensor, w: Tensor, own: Tensor, number: int) -> Tensor:
    """f(x w^T) * own, in one launch: x [M, K], a few rows w [N, K], own [M, N] -> [M, N]. number:
    gate_number()'s."""
    (M, K), N = x.shape, len(w)
    x, out = x.contiguous(), x.new_empty(M, N)
    BN, BK, pdl = 4, triton.next_power_of_2(K), pdl_options(x.device)
    linear_gate_kernel[triton.cdiv(N, BN), min(M, 16)](
        *(x, w, own, out, M, K, N, own.stride(0), number, BN, BK, bool(pdl)), num_warps=8, **pdl
    )
    return out


@linear_gate.register_kernel("cpu")
def _(x, w, own, number):
    return plain_gate(torch.cat((F.linear(x, w), own), dim=-1), number)


@linear_gate.register_fake
def _(x, w, own, number):
    return torch.empty_like(own, memory_format=torch.contiguous_format)


@jit
def gate_kernel(x, out, F, limit, alpha, GATED: constexpr, BF: constexpr):
    """out [M, F] of x [M, 2F]. Program (row, BF of its outputs)."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    gate = tl.load(x + row * 2 * F + f, mask=f < F).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * F + f, mask=f < F).to(tl.float32)
    y = gate_function(gate, up, limit, alpha, GATED)
    tl.store(out + row * F + f, y.to(out.dtype.element_ty), mask=f < F)


def launch_gate(x: Tensor, number: int, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    F = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], F)
    grid = x.shape[:-1].numel(), triton.cdiv(F, 1024)
    gate_kernel[grid](x.contiguous(), out, F, limit, alpha, number, 1024)
    return out


@library.custom_op("llama_fast::gate", mutates_args=(), device_types="cuda")
def gate(x: Tensor, number: int, limit: float, alpha: float) -> Tensor:
    """model.Gate: [..., 2F] -> [..., F]. number: gate_number()'s; limit, alpha: its clamp."""
    return launch_gate(x, number, limit, alpha)


gate.register_kernel("cpu")(plain_gate)


@gate.register_fake
def _(x, number, limit, alpha):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def gate_number(gate: Gate) -> int:
    """What the kernels call it; 0: they do not know it."""
    return CLAMPED if gate.clamp else GATES.get(gate.activation, 0)


class FusedGate(nn.Module):
    """model.Gate of a prompt, in one launch. With PyTorch's operators, of which a clamp needs six,
    gpt-oss-20b took 216 ms for 8,192 tokens, with this 191; Llama-3.1-8B 236 and 229, the code by
    Inductor (H100)."""

    def __init__(self, gate: Gate):
        super().__init__()
        self.how = gate_number(gate), *(gate.clamp or (0.0, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return gate(x, *self.how)


def library_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, gated: int
) -> Tensor:
    """linear() of many rows: cuBLAS multiplies."""
    if gated:
        return launch_gate(F.linear(x, w), gated)
    return plain_linear(x, w, None, bias, residual)


def launch_gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: int,
    choice: dict,
) -> None:
    (M, K), N = x.shape, len(w)
    grid = (triton.cdiv(N, choice["block_n"]),)
    BM = max(16, triton.next_power_of_2(M))
    pdl = pdl_options(x.device)
    gemm_kernel[grid](
        x,
        w,
        bias,
        residual,
        out,
        M,
        N,
        K,
        GATED=gated,
        BM=BM,
        BN=choice["block_n"],
        BK=choice["block_k"],
        STAGES=choice["stages"],
        PDL=bool(pdl),
        num_warps=choice["warps"],
        **pdl,
    )


@library.custom_op("llama_fast::linear", mutates_args=(), device_types="cuda")
def linear(
    x: Tensor,
    w: Tensor,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: int = 0,
    eps: float = 1e-5,
) -> Tensor:
    """residual + rms_norm(x, norm) @ w.T + bias, where each of norm, bias and residual may be None.

    x [M, K], w [N, K], norm [K], bias [N], residual [M, N] -> [M, N], all of one 16-bit type; norm
    may be fp32. gated: w's first half is the gate, its second half up, and f(gate) * up [M, N / 2]
    takes the product's place. f is SiLU for 1, GELU by tanh for 2."""
    M, K = x.shape
    N = len(w)
    x = x.contiguous()
    if M == 1 and takes_gemv(plain := Plain(w, gated), x.device):
        return gemv(x, plain, norm, bias, residual, eps)
    choice = kernel_for("16-bit", N, K, M, x.device)
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if choice["kernel"] == "library":
        return library_linear(x, w, bias, residual, gated)
    out = x.new_empty(M, N // 2 if gated else N)
    launch_gemm(x, w, bias, residual, out, gated, choice)
    return out


linear.register_kernel("cpu")(plain_linear)


@linear.register_fake
def _(x, w, norm=None, bias=None, residual=None, gated=0, eps=1e-5):
    return x.new_empty(x.shape[0], w.shape[0] // 2 if gated else w.shape[0])

"""
A mixture of experts for a few rows of x (decode and verification), in three launches. The plain
twin is model.MoE.

    route()           norm, router, and which experts each row takes, with what weight
    expert_linear()   gate, up and their function, times the row's weight of the expert
    expert_linear()   down, the sum over the experts, and the residual

An expert that several rows chose is read once: it multiplies all rows, and the weight of a row that
did not choose it is 0. The matrix unit does 16 rows in the time of one, and memory is the limit.

    active experts    3    7   12   40
    rows of w      +----+----+----+----+    A program multiplies BN rows of one expert's matrix
            tile 0 |    |    |    |    |    by BM rows of x.
            tile 1 |    |    |    |    |    down: the last of a tile's programs to come adds up
            ...    +----+----+----+----+    the experts, in their order: the same bits each time.

A row's sum has its own experts in the order of their numbers, and zeros from others: it is what the
row gets alone.

One row with packed experts has packed_gemv.py instead: gpt-oss-20b made 629 tokens/s for 460
(H200).

Shapes: M rows, D model dim, X experts, n of which a row takes, A = min(M n, X) that may be active,
F ffn dim of an expert, N outputs and K inputs of a matrix; packed weights as layout.py draws them,
the experts' one behind the other.
"""

from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library, nn

from fast.collectives import fused_all_reduce
from fast.common import (
    constexpr,
    gate_function,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    last_arriver,
    pdl_options,
    tl,
    triton,
)
from fast.layout import KINDS, Packed
from fast.linear import FusedGate, gate_number
from fast.packed_gemv import Experts, Plain, gemv, takes_gemv
from fast.packed_linear import dequantize, pack_layer, packs
from fast.twins import plain_expert_linear, plain_route, plain_unpack_experts

from model import Experts as PlainExperts
from model import grouped_linear
from quantize import QuantizedExperts, QuantizedLinear
from tp import ParallelExperts, all_reduce, on_all_ranks

if triton:
    from fast.packed_gemm import GemmSizes, multiply_rows

ROWS = 64  # of x, in a tile; a prompt of more is sorted by expert (model.py)
MOST_ROWS = 512  # for which there are semaphores


# Which experts


@jit
def choose_experts(
    logits,
    weights,
    chosen,
    m,
    M,
    X,
    correction,
    expert_scale,
    scale,
    N_CHOSEN: constexpr,
    NORMALIZE: constexpr,
    SHARED: constexpr,
    BX: constexpr,
):
    """The n experts with the largest logits [M, X] of rows m [any]; of equals the one with the
    lower number. Stores weights [M, X], 0 for the others -> chosen [BX], with those of these
    rows. The others are as route() has them."""
    x = tl.arange(0, BX)
    inside = (m < M)[:, None] & (x < X)[None, :]
    at = m[:, None] * X + x[None, :]
    scores = tl.load(logits + at, mask=inside, other=float("-inf"))
    sigmoid = 1 / (1 + tl.exp(-scores))
    if SHARED:
        scores = tl.where((x < X - 1)[None, :], scores, float("-inf"))
    rest, mine = scores, inside & (x < 0)[None, :]  # none
    if correction is not None:
        of_choice = sigmoid + tl.load(correction + x, mask=x < X, other=0)[None, :]
        rest = tl.where(scores > float("-inf"), of_choice, float("-inf"))
    for _ in tl.static_range(N_CHOSEN):
        best = x[None, :] == tl.argmax(rest, 1)[:, None]
        mine = mine | best
        rest = tl.where(best, float("-inf"), rest)
    if correction is not None:
        share = tl.where(mine, sigmoid, 0.0)
        if NORMALIZE:
            share /= tl.sum(share, 1)[:, None] + 1e-20
    else:
        among = tl.where(mine, scores, float("-inf")) if NORMALIZE else scores
        largest = tl.max(scores, 1)[:, None]
        total = tl.sum(tl.exp(among - largest), 1)[:, None]
        share = tl.where(mine, tl.exp(scores - largest) / total, 0.0)
    share *= scale
    if expert_scale is not None:
        share *= tl.load(expert_scale + x, mask=x < X, other=0).to(tl.float32)[None, :]
    if SHARED:
        of_shared = sigmoid if SHARED == 1 else sigmoid * 0 + 1
        share = tl.where((x == X - 1)[None, :], of_shared, share)
        mine = mine | (x == X - 1)[None, :]
    tl.store(weights + at, share, mask=inside)
    return chosen | tl.max((mine & inside).to(tl.int32), 0)


@jit(do_not_specialize=["M"])
def route_kernel(
    x,
    norm,
    router,
    bias,
    router_norm,
    correction,
    expert_scale,
    normed,
    logits,
    weights,
    active,
    semaphore,
    M,
    K,
    X,
    eps,
    scale,
    N_CHOSEN: constexpr,
    NORMALIZE: constexpr,
    SHARED: constexpr,
    BN: constexpr,
    BK: constexpr,
    BX: constexpr,
    BM: constexpr,
    PDL: constexpr,
):
    """Program (BN experts, row): their logits. The last one to come chooses for all rows."""
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, BK)
    e = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1)
    w = tl.load(
        router + e[:, None] * K + k[None, :], mask=(e < X)[:, None] & (k < K)[None, :], other=0
    )
    if norm is not None:
        norm_weight = tl.load(norm + k, mask=k < K, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    xs = tl.load(x + m * K + k, mask=k < K, other=0)
    ys = xs.to(tl.float32)
    rms = tl.rsqrt(tl.sum(ys * ys, 0) / K + eps)
    if norm is not None:
        xs = (ys * rms * norm_weight).to(xs.dtype)
        if tl.program_id(0) == 0:
            tl.store(normed + m * K + k, xs, mask=k < K)
    if router_norm is not None:
        xs = (ys * rms * tl.load(router_norm + k, mask=k < K, other=0)).to(xs.dtype)
    y = tl.sum(w.to(tl.float32) * xs.to(tl.float32)[None, :], 1)
    if bias is not None:
        y += tl.load(bias + e, mask=e < X, other=0).to(tl.float32)
    tl.store(logits + m * X + e, y, mask=e < X)
    if last_arriver(semaphore, tl.num_programs(0) * M):
        chosen = tl.zeros((BX,), tl.int32)
        for m0 in range(0, M, BM):
            of_rows = m0 + tl.arange(0, BM)
            chosen = choose_experts(
                *(logits, weights, chosen, of_rows, M, X, correction, expert_scale, scale),
                *(N_CHOSEN, NORMALIZE, SHARED, BX),
            )
        tl.store(active + tl.cumsum(chosen, 0), tl.arange(0, BX), mask=chosen > 0)
        tl.store(active, tl.sum(chosen, 0))


class Router(NamedTuple):
    """What decides about experts: model.MoE.route(), without groups of experts.

    weight [X, D]; bias [X] or None; n experts a row, normalize, scale: see MoEConfig. shared: 0, or
    the last of the X is one more expert, which each row takes, with the sigmoid of its logit (1) or
    with weight 1 (2). correction [X] fp32 or None: with it the experts' weights are sigmoids, and
    it is added to them for the choice alone. norm [D] fp32: the router reads x after RMSNorm with
    this weight, and not what the experts read. expert_scale [X] or None: times the weights."""

    weight: Tensor
    bias: Tensor | None
    n: int
    normalize: bool
    shared: int = 0
    scale: float = 1.0
    correction: Tensor | None = None
    norm: Tensor | None = None
    expert_scale: Tensor | None = None


def route(
    x: Tensor, norm: Tensor | None, eps: float, router: Router, semaphore: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, D], norm [D] or None. semaphore: an int32 0, which is 0 again afterwards.

    -> x after RMSNorm [M, D]; each row's weights of all experts, fp32 [M, X], 0 for those that it
    does not take; and int32 [1 + A]: how many experts some row takes, and their numbers."""
    if not x.is_cuda:
        return plain_route(x, norm, eps, router)
    (M, K), X = x.shape, len(router.weight)
    x = x.contiguous()
    normed = x.clone() if norm is None else torch.empty_like(x)
    logits, weights = (torch.empty(M, X, device=x.device) for _ in range(2))
    shared = min(1, router.shared)
    most = min(M * router.n, X - shared) + shared
    active = torch.empty(1 + most, dtype=torch.int32, device=x.device)
    BN, BK, BX = 4, triton.next_power_of_2(K), max(16, triton.next_power_of_2(X))
    pdl = pdl_options(x.device)
    route_kernel[(triton.cdiv(X, BN), M)](
        *(x, norm, router.weight, router.bias, router.norm, router.correction),
        *(router.expert_scale, normed, logits, weights, active, semaphore, M, K, X, eps),
        router.scale,
        router.n,
        router.normalize,
        router.shared,
        BN,
        BK,
        BX,
        min(16, triton.next_power_of_2(M)),
        bool(pdl),
        num_warps=8,
        **pdl,
    )
    return normed, weights, active


# Their products


@jit
def multiply_plain_rows(x, m, M, w, row, K, S: constexpr):
    """Rows m [BM] of x [M, K] times rows `row` [BN] of w [any, K] -> fp32 [BN, BM]."""
    BN: constexpr = S.block_n
    BM: constexpr = S.block_m
    BK: constexpr = 32 * S.splits
    k = tl.arange(0, BK)
    at_w = w + row.to(tl.int64)[:, None] * K + k[None, :]
    at_x = x + m[None, :] * K + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=S.stages):
        inside = S.full | (k0 + k < K)
        tile = tl.load(at_w + k0, mask=inside[None, :], other=0, eviction_policy="evict_first")
        xs = tl.load(at_x + k0, mask=(m < M)[None, :] & inside[:, None], other=0)
        acc = tl.dot(tile, xs, acc)
    return acc


@jit(do_not_specialize=["M", "A"])
def expert_kernel(
    x,
    w,
    scales_and_zeros,
    shifts,
    bias,
    weights,
    active,
    residual,
    out,
    parts,
    semaphores,
    M,
    N,
    K,
    C,
    X,
    A,
    limit,
    alpha,
    S: constexpr,
    GATED: constexpr,
    PDL: constexpr,
):
    """Program (active expert, tile of its rows, tile of rows of x). Not gated, x is [A, M, K], one
    for each expert. parts fp32 [tiles of x, tiles, A, BN, BM]."""
    BN: constexpr = S.block_n
    BM: constexpr = S.block_m
    nth, tile = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, BN)
    c = tl.arange(0, BM)
    m = tl.program_id(2) * BM + c
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after it: gemv.cu's down reads `active` at once
    count = tl.load(active)
    if nth >= count:
        return
    expert = tl.load(active + 1 + nth)
    if GATED:  # 8 rows of the gate, then the 8 of up
        N_OUT = N // 2
        row = tl.minimum(tile * (BN // 2) + r // 16 * 8 + r % 8, N_OUT - 1) + r // 8 % 2 * N_OUT
        row_blocks = (N_OUT + 7) // 8
    else:
        N_OUT = N
        row = tl.minimum(tile * BN + r, N - 1)
        row_blocks = (N + 15) // 16
        x += nth.to(tl.int64) * M * K
    if S.bits == 16:
        acc = multiply_plain_rows(x, m, M, w + expert.to(tl.int64) * N * K, row, K, S)
    else:
        nb = expert * row_blocks + tl.minimum(tile * (BN // 16) + r // 16, row_blocks - 1)
        shift = tl.load(shifts + tl.arange(0, 16 // S.bits))
        acc = multiply_rows(x, m, M, w, scales_and_zeros, shift, nb, K, C, 0, K, S)
    share = tl.load(weights + m * X + expert, mask=m < M, other=0)
    if GATED:
        if bias is not None:
            acc += tl.load(bias + expert * N + row).to(tl.float32)[:, None]
        acc = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(acc, (BN // 2, BM, 2)))
        y = gate_function(gate, up, limit, alpha, GATED) * share[None, :]
        y = tl.where((share != 0)[None, :], y, 0.0)
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
        inside = (n < N_OUT)[:, None] & (m < M)[None, :]
        out += nth.to(tl.int64) * M * N_OUT
        tl.store(out + m[None, :] * N_OUT + n[:, None], y.to(out.dtype.element_ty), mask=inside)
    else:
        if bias is not None:
            acc += tl.load(bias + expert * N + row).to(tl.float32)[:, None] * share[None, :]
        which = tl.program_id(2) * tl.num_programs(1) + tile
        at = parts + which.to(tl.int64) * A * (BN * BM) + r[:, None] * BM + c[None, :]
        tl.store(at + nth * (BN * BM), acc)
        if last_arriver(semaphores + which, count):
            acc = tl.zeros((BN, BM), tl.float32)
            for i in range(count):
                acc += tl.load(at + i * (BN * BM))
            n = tile * BN + r
            inside = (n < N)[:, None] & (m < M)[None, :]
            if residual is not None:
                acc += tl.load(residual + m[None, :] * N + n[:, None], mask=inside, other=0)
            tl.store(out + m[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=inside)


def rule(bits: int, M: int) -> dict:
    """The sizes for M rows of x, as tuning.py names them; those of 16 bits step by 32 inputs a
    split.

    Eight sizes on an H100, us a layer, the best, these and the worst: gpt-oss-20b's MXFP4 for one
    row 50, 53, 70 and 16 rows 204, 204, 328; Qwen3-30B-A3B's int4 28, 30, 40 and 90, 90, 236; in
    int8 25, 25, 43 and 163, 163, 224; in bf16 39, 39, 46 and 293, 293, 353."""
    if bits == 16:
        splits = 8 if M <= 16 else 4  # 4: less than 8.9's 99 KiB
        return dict(block_n=32, splits=splits, stages=4, warps=4)
    if M <= 4 and bits == 8:
        return dict(block_n=16, splits=4, stages=4, warps=2)
    if M <= 4:
        return dict(block_n=32, splits=4, stages=3, warps=4)
    return dict(block_n=64, splits=1, stages=4, warps=4)


def sizes_for(choice: dict, M: int, w: Packed | Plain) -> "GemmSizes":
    """What expert_kernel() is compiled for."""
    of = w.constants
    splits, block_m = choice["splits"], max(16, min(ROWS, triton.next_power_of_2(M)))
    scaled = of["parts"] > 1 or block_m > 16 and not of["per_channel"]
    return GemmSizes(
        **of,
        block_n=choice["block_n"],
        block_m=block_m,
        splits=splits,
        stages=choice["stages"],
        sliced=False,
        scaled=scaled,
        full=w.bits == 16 and w.K % (32 * splits) == 0,
    )


def expert_linear(
    x: Tensor,
    experts: Experts,
    w: Packed | Plain,
    semaphores: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    prompt: bool = False,
) -> Tensor:
    """The products of the active experts.

    w.gated: x [M, K] -> [A, M, N / 2], f(gate) * up times the row's weight of the expert, 0 where
    that is 0. f is SiLU for 1, GELU by tanh for 2, and 3 is MoEConfig.clamp's (experts.limit and
    alpha). Else x [A, M, K], which was multiplied by the weights -> [M, N], the sum over the
    experts, plus the residual [M, N]. bias [X, N]. semaphores: int32 zeros, one for each tile,
    which are zeros again afterwards. prompt: with the sizes for ROWS rows, however many there are,
    so that a prompt of another length compiles nothing."""
    if not x.is_cuda:
        return plain_expert_linear(x, experts, w, bias, residual)
    M, gate = x.shape[-2], w.gated
    X, A = experts.weights.shape[1], len(experts.active) - 1
    x = x.contiguous()
    if M == 1 and takes_gemv(w, x.device, experts):
        return gemv(x, w, bias=bias, residual=residual, experts=experts)
    rows = ROWS if prompt else M
    choice = rule(w.bits, rows)
    sizes = sizes_for(choice, rows, w)
    columns = w.N // 2 if gate else w.N
    tiles, tiles_m = triton.cdiv(w.N, sizes.block_n), triton.cdiv(M, sizes.block_m)
    if gate:
        tiles = triton.cdiv(columns, sizes.block_n // 2)
    out = x.new_empty((A, M, columns) if gate else (M, columns))
    elements = 0 if gate else tiles * tiles_m * A * sizes.block_n * sizes.block_m
    parts = x.new_empty(elements, dtype=torch.float32)
    pdl = pdl_options(x.device)
    expert_kernel[(A, tiles, tiles_m)](
        x,
        w.qweight,
        w.scales_and_zeros,
        w.shifts,
        bias,
        experts.weights,
        experts.active,
        residual,
        out,
        parts,
        semaphores,
        M,
        w.N,
        w.K,
        w.chunks,
        X,
        A,
        experts.limit,
        experts.alpha,
        sizes,
        gate,
        bool(pdl),
        num_warps=choice["warps"],
        **pdl,
    )
    return out


def unpack_experts(w: Packed, X: int, dtype: torch.dtype) -> Tensor:
    """The weights [X, N, K]."""
    if not w.qweight.is_cuda:
        return plain_unpack_experts(w, X, dtype)
    return dequantize(w, dtype, X).unflatten(0, (X, w.N))


# The modules


class PackedExperts(nn.Module):
    """A QuantizedExperts in the kernels' layout. gate: as gated in expert_linear()."""

    def __init__(self, layer: QuantizedExperts, gate: int):
        super().__init__()
        self.n_expert, self.gate, self.bias = layer.n_expert, gate, layer.bias
        packed = pack_layer(layer, gate)
        self.N, self.K = packed.N, packed.K
        self.kind, self.group_size = packed.kind, packed.group_size
        self.qweight = nn.Parameter(packed.qweight, requires_grad=False)
        self.scales_and_zeros = nn.Parameter(packed.scales_and_zeros, requires_grad=False)
        self.register_buffer("shifts", packed.shifts, persistent=False)

    @property
    def packed(self) -> Packed:
        """Without semaphores: expert_linear() has its own."""
        tensors = self.qweight, self.scales_and_zeros, None, self.shifts, None
        return Packed(*tensors, self.N, self.K, self.kind, self.group_size, self.gate)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """model.Experts.forward(), of a long prompt: all matrices are unpacked."""
        w = unpack_experts(self.packed, self.n_expert, x.dtype)
        y = grouped_linear(x, w, experts)
        return y if self.bias is None else y + self.bias[experts]


def with_one_more(experts: nn.Module, shared: nn.Module) -> None:
    """Puts a shared expert's matrix behind the others, and lets it read the same memory."""
    names = ("weight",)
    if isinstance(experts, QuantizedExperts):
        names = [
            name for name in ("qweight", "scales", "zeros") if getattr(experts, name) is not None
        ]
    for name in names:
        joined = torch.cat((getattr(experts, name), getattr(shared, name)[None]))
        setattr(experts, name, nn.Parameter(joined, requires_grad=False))
        setattr(shared, name, nn.Parameter(joined[-1], requires_grad=False))
    if isinstance(experts, PlainExperts):
        experts.n_expert += 1


class FusedMoE(nn.Module):
    """MoE of model.py, with kernels for few rows. A shared expert is one more of the experts there;
    prompts have it by itself."""

    def __init__(self, ffn: nn.Module):
        super().__init__()
        self.parallel = isinstance(ffn, ParallelExperts)
        moe = self.moe = ffn.linear if self.parallel else ffn
        self.number = gate_number(moe.gate)
        moe.gate = FusedGate(moe.gate)
        self.router = moe.router.weight  # and of the shared expert, too
        self.correction, shared = moe.correction, 0
        if moe.shared is not None:
            shared = 2 if moe.shared_gate is None else 1
            last = torch.zeros_like(self.router[:1])
            if moe.shared_gate is not None:
                last = moe.shared_gate.weight
            router = torch.cat((moe.router.weight, last))
            self.router = nn.Parameter(router, requires_grad=False)
            moe.router.weight = nn.Parameter(self.router[:-1], requires_grad=False)
            if self.correction is not None:
                more = torch.cat((self.correction, self.correction[:1]))
                self.correction = nn.Parameter(more, requires_grad=False)
                moe.correction = nn.Parameter(more[:-1], requires_grad=False)
            for name in ("w_gate_up", "w_down"):
                with_one_more(getattr(moe, name), getattr(moe.shared, name))
        of, norm = moe.moe, None
        if moe.router_norm is not None:
            norm = moe.router_norm.weight.float() * moe.router_norm.weight.numel() ** -0.5
        self.how = Router(
            *(self.router, moe.router.bias, of.n_chosen, of.normalize, shared, of.scale),
            *(self.correction, norm, moe.expert_scale),
        )
        for name, gate in (("w_gate_up", self.number), ("w_down", 0)):
            if isinstance(getattr(moe, name), QuantizedExperts):
                setattr(moe, name, PackedExperts(getattr(moe, name), gate))
                # K = 2,880 is filled up to 2,944: no later layer would fit into what this one
                # leaves in PyTorch's pool, and gpt-oss-120b took 80 GB of an H100.
                torch.cuda.empty_cache()
        weight, self.buffer = self.router, 1  # of fused_all_reduce()
        MIXTURES[weight.data_ptr()] = self
        for name, size in (("semaphore", 1), ("semaphores", MOST_ROWS // ROWS * weight.shape[1])):
            zeros = torch.zeros(size, dtype=torch.int32, device=weight.device)
            self.register_buffer(name, zeros, persistent=False)

    def decode(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual [M, D] + MoE of RMSNorm of x [M, D], at most MOST_ROWS; norm [D] and residual
        may be None. A router with a norm of its own reads x."""
        router = self.router
        if not self.parallel:
            return few_rows_mixture(x, router, norm, eps, residual)
        y = few_rows_mixture(x, router, norm, eps, None)
        residual = torch.zeros_like(y) if residual is None else residual
        return fused_all_reduce(y, residual, self.buffer)

    def partial(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        residual: Tensor | None,
        prompt: bool = False,
        routed: Tensor | None = None,
    ) -> Tensor:
        """decode() of this rank's part of the experts. routed: as MoE.forward() has it; then there
        is no norm but the router's."""
        moe = self.moe
        read = x if routed is None else routed
        normed, weights, active = route(read, norm, eps, self.how, self.semaphore)
        x = normed if routed is None else x
        experts = Experts(active, weights, *map(float, moe.moe.clamp or (0, 0)))
        up, down = self.weight(moe.w_gate_up, self.number), self.weight(moe.w_down, 0)
        y = expert_linear(x, experts, up, self.semaphores, moe.w_gate_up.bias, None, prompt)
        return expert_linear(y, experts, down, self.semaphores, moe.w_down.bias, residual, prompt)

    def weight(self, experts: nn.Module, gate: int) -> Packed | Plain:
        if isinstance(experts, PackedExperts):
            return experts.packed
        return Plain(experts.weight, gate)

    def forward(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Prefill, as MoE.forward(): x [B, T, D] -> [B, T, D]"""
        y = mixture(x, self.router, routed)
        return all_reduce(y) if self.parallel else y

    def prefill(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """forward() of this rank's part of the experts. Short prompts read their experts alone."""
        if x.shape[:-1].numel() > ROWS:
            return self.moe(x, routed)
        norm = self.moe.router_norm
        eps = 0.0 if norm is None else norm.eps
        routed = None if routed is None else routed.flatten(0, -2)
        y = self.partial(x.flatten(0, -2), None, eps, None, prompt=True, routed=routed)
        return y.view_as(x)

    def try_prompts(self, most: int, dtype: torch.dtype) -> None:
        """As PackedLinear's."""
        router = self.router
        for fewer, rows in ((0, ROWS), (ROWS, ROWS + 1)):
            if fewer < most:
                self.prefill(torch.zeros(rows, router.shape[1], dtype=dtype, device=router.device))


# torch.compile does not look inside of a mixture: one code serves short prompts and long ones, and
# of a prompt of 8,192 Qwen3-30B-A3B's code for what stands around the products took 91 of 281 ms
# (H100).
MIXTURES = WeakValueDictionary()  # FusedMoE by the address of the router's weights


@library.custom_op("llama_fast::mixture", mutates_args=())
def mixture(x: Tensor, router: Tensor, routed: Tensor | None = None) -> Tensor:
    return MIXTURES[router.data_ptr()].prefill(x, routed)


@mixture.register_fake
def _(x, router, routed=None):
    return torch.empty_like(x)


@library.custom_op("llama_fast::few_rows_mixture", mutates_args=())
def few_rows_mixture(
    x: Tensor, router: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None
) -> Tensor:
    return MIXTURES[router.data_ptr()].partial(x, norm, eps, residual)


@few_rows_mixture.register_fake
def _(x, router, norm, eps, residual):
    return x.new_empty(x.shape)


def why_plain_experts(ffn: nn.Module) -> str | None:
    """Why this mixture of experts stays model.py's; None: it has kernels."""
    moe = ffn.linear if isinstance(ffn, ParallelExperts) else ffn
    if not gate_number(moe.gate):
        return f"{moe.gate.activation} as the gate's function"
    if moe.moe.n_chosen_group != moe.moe.n_group:
        return "a router that chooses groups of experts"
    if moe.shared is not None and moe.expert_scale is not None:
        return "a scale for each expert and a shared expert"
    if moe.moe.scaled_router != moe.moe.beside_dense:  # decode() tells one by the other
        return "a scaled router without a dense part beside it, or the reverse"
    device = moe.router.weight.device
    matrices = moe.w_gate_up, moe.w_down
    quantized = [experts for experts in matrices if isinstance(experts, QuantizedExperts)]
    if not all([packs(experts) and experts.g_idx is None for experts in quantized]):
        return "experts in codes or scales that no kernel knows"
    for experts in quantized:
        groups, block = experts.scales.shape[-1], KINDS[experts.codes.name].block
        size = experts.in_features // groups
        fits = groups == 1 or not (size % 32 or size % block and block % size)
        if not on_all_ranks(fits, device):
            return f"experts in groups of {size} codes"
    if moe.shared is not None:
        shared = moe.shared.w_gate_up, moe.shared.w_down
        # Ranks' shares may be equal where the wholes are not.
        if not on_all_ranks(all(map(is_one_more, matrices, shared)), device):
            return "a shared expert of another size, or in other codes, than the others"
    return None


def is_one_more(experts: nn.Module, shared: nn.Module) -> bool:
    """Whether a shared expert's matrix is of the same kind as the others."""
    if not isinstance(experts, QuantizedExperts):
        return isinstance(shared, nn.Linear) and experts.weight.shape[1:] == shared.weight.shape
    return (
        isinstance(shared, QuantizedLinear)
        and shared.codes == experts.codes
        and shared.g_idx is None
        and experts.qweight.shape[1:] == shared.qweight.shape
        and experts.scales.shape[1:] == shared.scales.shape
        and experts.scales.dtype == shared.scales.dtype
        and (experts.zeros is None) == (shared.zeros is None)
    )

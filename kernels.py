"""
Triton kernels of the GPU decode path, each beside its plain twin; fast.py puts them together.

At batch 1 a launch is over in 10 to 40 us, and what counts is that memory never idles in between. With programmatic
dependent launch (compute capability 9.0) a kernel starts while the one before drains, and its first weights are on
their way before it waits for its input.

Shapes: M = B x T rows of B sequences and T new tokens, K inputs, N outputs; in attention H query heads, K kv heads,
G = H / K, E head dim, L cache length.
"""
import functools
import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no GPU build of PyTorch: the plain twins serve
    triton = tl = constexpr = gdc_launch_dependents = gdc_wait = None

    def jit(kernel=None, **options):
        return jit if kernel is None else None


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


@jit
def turned(x, swapped, e, cos, sin, norm, eps, E: constexpr):
    """Heads x [rows, E], normed if there is a norm, and turned by rope; swapped: x with its halves exchanged."""
    half: constexpr = E // 2
    x = x.to(tl.float32)
    swapped = swapped.to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / E + eps)[:, None]
        x *= scale * tl.load(norm + e, mask=e < E, other=0).to(tl.float32)[None, :]
        other = tl.where(e < half, e + half, e - half)
        swapped *= scale * tl.load(norm + other, mask=e < E, other=0).to(tl.float32)[None, :]
    return x * cos + tl.where(e < half, -swapped, swapped) * sin


@jit
def attend(q, k, v, visible, scale, top, total, acc):
    """A tile of the online softmax (FlashAttention-2, arXiv 2307.08691): q [BM, E], k [E, BL], v [BL, E]."""
    s = tl.where(visible, tl.dot(q, k) * scale, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    keep = tl.exp2(top - new)
    return new, total * keep + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * keep[:, None])


@jit
def combine(tops, parts, first, splits, r, real, BE: constexpr, BS: constexpr):
    """Rows r of the softmax whose parts `first` .. first + splits - 1 were computed apart; always in the same order."""
    e = tl.arange(0, BE)
    top = tl.full(r.shape, -1e30, tl.float32)
    total = tl.zeros(r.shape, tl.float32)
    acc = tl.zeros((r.shape[0], BE), tl.float32)
    for s0 in range(0, splits, BS):
        s = s0 + tl.arange(0, BS)
        there = (s < splits)[:, None] & real[None, :]
        row = (first + s)[:, None] * r.shape[0] + r[None, :]
        part_top = tl.load(tops + row * 2, mask=there, other=-1e30)
        part_total = tl.load(tops + row * 2 + 1, mask=there, other=0)
        part = tl.load(parts + row[:, :, None] * BE + e[None, None, :], mask=there[:, :, None], other=0)
        new = tl.maximum(top, tl.max(part_top, 0))
        keep = tl.exp2(top - new)
        weight = tl.exp2(part_top - new[None, :])
        total = total * keep + tl.sum(part_total * weight, 0)
        acc = acc * keep[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = new
    return acc / total[:, None]


@jit
def attention_kernel(q, positions, cos, sin, q_norm, k_norm, k_cache, v_cache, out, tops, parts, arrived,
                     T, L, position_stride, scale, eps,
                     G: constexpr, KV: constexpr, E: constexpr, BE: constexpr, WINDOW: constexpr,
                     NEW: constexpr, SPLITS: constexpr, CHUNK: constexpr, BM: constexpr, BR: constexpr,
                     BT: constexpr, BL: constexpr, BS: constexpr, STAGES: constexpr, PDL: constexpr):
    """Program (row of the batch and kv head, block of BM (token, head) pairs, split of the slots).

    NEW: q is [B, T, H + 2K, E] fresh from the matrix product; its keys and values are turned, stored and seen here.
    Otherwise q is [B, T, H, E], turned, and the cache is complete."""
    group = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    b = group // KV
    kv = group % KV
    if PDL:
        gdc_launch_dependents()
    H: constexpr = KV * G
    HEADS: constexpr = H + 2 * KV if NEW else H  # of a token in q
    e = tl.arange(0, BE)
    other = tl.where(e < E // 2, e + E // 2, e - E // 2)
    r = block * BM + tl.arange(0, BM)
    t = tl.minimum(r // G, T - 1)
    real = (r < T * G)[:, None] & (e < E)[None, :]
    at_q = q + (((b * T + t) * HEADS + kv * G + r % G) * E)[:, None]
    # Positions come from before the layers, the cache's old slots from earlier steps: no need to wait for these.
    positions += b * position_stride
    pos = tl.load(positions + t)
    first_pos = tl.load(positions + block * BM // G)
    if NEW:
        end = first_pos
        n = tl.arange(0, BT)
        real_n = (n < T)[:, None] & (e < E)[None, :]
        pos_n = tl.load(positions + n, mask=n < T, other=0)
        at_n = q + (((b * T + n) * HEADS + H + kv) * E)[:, None]
        at_cos = pos[:, None] * E + e[None, :]
        at_cos_n = pos_n[:, None] * E + e[None, :]
        cos_q = tl.load(cos + at_cos, mask=real, other=0)
        sin_q = tl.load(sin + at_cos, mask=real, other=0)
        cos_n = tl.load(cos + at_cos_n, mask=real_n, other=0)
        sin_n = tl.load(sin + at_cos_n, mask=real_n, other=0)
    else:
        end = tl.load(positions + tl.minimum((block * BM + BM - 1) // G, T - 1)) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_pos - WINDOW + 1, 0) // BL * BL
    splits = tl.minimum(tl.maximum(tl.cdiv(end - begin, CHUNK), 1), SPLITS)  # those that have work
    if split >= splits:
        return
    share = tl.cdiv(tl.cdiv(end - begin, splits), BL) * BL
    start = begin + split * share
    stop = tl.minimum(start + share, end)

    base = group.to(tl.int64) * L * E
    qs = tl.zeros((BM, BE), k_cache.dtype.element_ty)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BE), tl.float32)
    for l0 in tl.range(start, tl.maximum(stop, start + 1), BL, num_stages=STAGES):
        slot = l0 + tl.arange(0, BL)
        k = tl.load(k_cache + base + slot[None, :] * E + e[:, None],
                    mask=(slot < stop)[None, :] & (e < E)[:, None], other=0)
        v = tl.load(v_cache + base + slot[:, None] * E + e[None, :],
                    mask=(slot < stop)[:, None] & (e < E)[None, :], other=0)
        if l0 == start:
            if PDL:
                gdc_wait()
            qs = tl.load(at_q + e[None, :], mask=real, other=0)
            if NEW:
                mine = real_n & (split == splits - 1)
                swapped = tl.load(at_q + other[None, :], mask=real, other=0)
                k_n = tl.load(at_n + e[None, :], mask=mine, other=0)
                swapped_n = tl.load(at_n + other[None, :], mask=mine, other=0)
                v_n = tl.load(at_n + KV * E + e[None, :], mask=mine, other=0)
                qs = turned(qs, swapped, e, cos_q, sin_q, q_norm, eps, E).to(k_cache.dtype.element_ty)
                if split == splits - 1:
                    k_n = turned(k_n, swapped_n, e, cos_n, sin_n, k_norm, eps, E).to(k_cache.dtype.element_ty)
                    at = base + pos_n[:, None] * E + e[None, :]
                    tl.store(k_cache + at, k_n, mask=real_n)
                    tl.store(v_cache + at, v_n, mask=real_n)
                    seen = (n < T)[None, :] & (pos_n[None, :] <= pos[:, None])
                    if WINDOW > 0:
                        seen = seen & (pos_n[None, :] > pos[:, None] - WINDOW)
                    top, total, acc = attend(qs, tl.trans(k_n), v_n, seen, scale, top, total, acc)
        seen = (slot < stop)[None, :] & (slot[None, :] <= pos[:, None])
        if WINDOW > 0:
            seen = seen & (slot[None, :] > pos[:, None] - WINDOW)
        top, total, acc = attend(qs, k, v, seen, scale, top, total, acc)

    if splits == 1:
        at = ((b * T + t) * H + kv * G + r % G) * E
        tl.store(out + at[:, None] + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    if SPLITS > 1:
        if splits > 1:  # each split leaves its part; the one that comes last adds them up
            i = tl.arange(0, BM)
            row = (group * SPLITS + split) * BR + i
            tl.store(parts + row[:, None] * BE + e[None, :], acc, mask=(i < BR)[:, None])
            tl.store(tops + row * 2, top, mask=i < BR)
            tl.store(tops + row * 2 + 1, total, mask=i < BR)
            tl.debug_barrier()
            if tl.atomic_add(arrived + group, 1, sem="acq_rel") == splits - 1:
                tl.debug_barrier()
                tl.store(arrived + group, 0)  # for the next launch
                j = tl.arange(0, BR)
                y = combine(tops, parts, group * SPLITS, splits, j, j < T * G, BE, BS)
                at_j = ((b * T + j // G) * H + kv * G + j % G) * E
                tl.store(out + at_j[:, None] + e[None, :], y.to(out.dtype.element_ty),
                         mask=(j < T * G)[:, None] & (e < E)[None, :])


@functools.cache
def gpu(device: torch.device):
    return torch.cuda.get_device_properties(device)


def launch(device: torch.device) -> dict:
    """Programmatic dependent launch, from compute capability 9.0 on."""
    return dict(launch_pdl=True) if gpu(device).major >= 9 else {}


@functools.cache
def table(name: str) -> dict:
    """What scripts/tune.py found for a GPU; a GPU that it never ran on has rules of thumb, and it is said once."""
    tables = json.loads((Path(__file__).parent / "tuned.json").read_text())
    if name not in tables:
        print(f"tuned.json has nothing for {name}: scripts/tune.py finds its fastest kernels", file=sys.stderr)
    return tables.get(name, {})


@functools.cache
def tuned(format: str, N: int, K: int, M: int, device: torch.device) -> list:
    """The kernel for M rows and w [N, K] in a format (16-bit, int8, int4; int4-32: groups smaller than a block), "row",
    "rows" or "library", and its sizes: tuned.json's or, for more rows than that has, a rule of thumb's.

    16 bits': row (rows, stages, warps, programs a multiprocessor), rows (rows, columns, stages, warps)."""
    choices = table(gpu(device).name).get(format, {}).get(f"{N}x{K}", []) + rule_of_thumb(format, N, K, device)
    return next((choice for most, *choice in choices if M <= most), ["library"])


def rule_of_thumb(format: str, N: int, K: int, device: torch.device) -> list:
    memory = gpu(device).shared_memory_per_block_optin
    if format != "16-bit":  # int8 or int4, -32 or -64 where groups are smaller than a block
        slices = max(1, min(8, 2 * gpu(device).multi_processor_count * 64 // max(N, 1)))  # four programs on each
        more = ["rows", 64, 64, 1, 3, 4, 3, 4, 0]
        most = [512, "rows", 64, 128, 1, 3, 4, 2, 4, 1] if memory > 128 * 1024 else [128, *more]
        return [[1, "row", 4, 2, 3, 6, 1], [8, "rows", 32, 64, 4, 3, 4, 3, slices, 0], [64, *more], most]
    row = 2 * triton.next_power_of_2(K)  # bytes
    rows = max(2 if row <= 32768 else 1, min(8, 16384 // row))  # 2: a gate's and its up's
    stages = max(2, min(4, min(memory, 192 * 1024) // (rows * row) + 1))
    one = [1, "row", rows, stages, 4 if row <= 8192 else 8, 12 if row <= 8192 else 1]
    several = [16, "rows", *((64, 128, 4, 4) if N > 8192 else (16, 256, 6, 2))]
    return [one, several] if 2 * row <= memory else [several]  # a gate's row and its up's must fit


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


def launch_attention(q, positions, k_cache, v_cache, window, heads, **new):
    """new: what is to be done with a fresh qkv, else q is turned and the cache is complete."""
    B, T = q.shape[:2]
    KV, L, E = k_cache.shape[1:]
    G = heads // KV
    BE = max(16, triton.next_power_of_2(E))  # the least that a matrix unit takes
    out = q.new_empty(B, T, heads, E)
    if new:
        BM, BL, warps, stages = max(16, triton.next_power_of_2(T * G)), 64, 4, 2
        splits = max(1, min(64, 2 * gpu(q.device).multi_processor_count // (B * KV)))
    else:
        BM, BL, warps, stages, splits = 128, 64, 8, 3, 1
    BR = triton.next_power_of_2(T * G)  # rows of a part
    parts = tops = None
    if splits > 1:
        parts, tops = (torch.empty(B * KV * splits * BR * n, device=q.device) for n in (BE, 2))
    pdl = launch(q.device)
    attention_kernel[(B * KV, triton.cdiv(T * G, BM), splits)](
        q, positions, new.get("cos"), new.get("sin"), new.get("q_norm"), new.get("k_norm"), k_cache, v_cache, out,
        tops, parts, new.get("arrived"), T, L, positions.stride(0) if len(positions) > 1 else 0,
        E ** -0.5 / math.log(2), new.get("eps", 0.0), G, KV, E, BE, window, bool(new), splits, 256, BM, BR,
        max(16, triton.next_power_of_2(T)), BL, max(1, 8192 // (BR * BE)), stages, bool(pdl), num_warps=warps, **pdl)
    return out


def plain_update(qkv, positions, cos, sin, k_cache, v_cache, q_norm, k_norm, eps) -> Tensor:
    """Puts qkv's keys and values into the cache -> its queries, turned, [B, T, H, E]."""
    KV = k_cache.shape[1]
    q, k, v = qkv.split([qkv.shape[2] - 2 * KV, KV, KV], dim=2)
    cos, sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)  # [B, T, 1, E]

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.float() if norm is None else F.rms_norm(x.float(), x.shape[-1:], norm.float(), eps)
        x1, x2 = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-x2, x1), dim=-1) * sin).type_as(qkv)

    rows = torch.arange(len(qkv), device=qkv.device)[:, None]
    k_cache[rows, :, positions] = turned(k, k_norm)
    v_cache[rows, :, positions] = v
    return turned(q, q_norm)


def plain_update_and_attend(qkv, positions, cos, sin, k_cache, v_cache, arrived, q_norm=None, k_norm=None, window=0,
                            eps=1e-5) -> Tensor:
    """The plain twin of update_and_attend()."""
    q = plain_update(qkv, positions, cos, sin, k_cache, v_cache, q_norm, k_norm, eps)
    slots = torch.arange(k_cache.shape[2], device=q.device)
    mask = slots <= positions[:, None, :, None]  # [B, 1, T, L]
    if window:
        mask &= slots > positions[:, None, :, None] - window
    k, v = k_cache[:len(q)], v_cache[:len(q)]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True).transpose(1, 2).contiguous()


@library.custom_op("llama_fast::update_and_attend", mutates_args=("k_cache", "v_cache", "arrived"), device_types="cuda")
def update_and_attend(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
                      arrived: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None, window: int = 0,
                      eps: float = 1e-5) -> Tensor:
    """qkv [B, T, H + 2K, E] fresh from the product: norms q and k [E], turns them by cos, sin [L, E], writes k and v
    into the caches' [>= B, K, L, E] first rows at positions [B, T] or [1, T], and attends -> [B, T, H, E].

    A token sees the slots up to its position, of these the last `window` if that is not 0; a row's positions follow
    one another. Nothing of T x L elements is ever in memory. arrived: int32 zeros [>= B * K], zeros again after."""
    heads, T = qkv.shape[2] - 2 * k_cache.shape[1], qkv.shape[1]
    if T > 16 or T * heads // k_cache.shape[1] > 64:  # prefill: bound by arithmetic
        q = plain_update(qkv, positions, cos, sin, k_cache, v_cache, q_norm, k_norm, eps)
        return launch_attention(q, positions, k_cache, v_cache, window, heads)
    return launch_attention(qkv.contiguous(), positions, k_cache, v_cache, window, heads, cos=cos, sin=sin,
                            arrived=arrived, q_norm=q_norm, k_norm=k_norm, eps=eps)


update_and_attend.register_kernel("cpu")(plain_update_and_attend)


@update_and_attend.register_fake
def _(qkv, positions, cos, sin, k_cache, v_cache, arrived, q_norm=None, k_norm=None, window=0, eps=1e-5):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * k_cache.shape[1], qkv.shape[3])


@jit
def read_chunk(addresses, sums, BYTES: constexpr, BLOCK: constexpr):
    """Sum one chunk of 8-byte words; a sum that is stored, or the reads would be left out."""
    words = tl.multiple_of(tl.load(addresses + tl.program_id(0)), 16).to(tl.pointer_type(tl.int64))
    total = tl.zeros((BLOCK,), tl.int64)
    for at in range(0, BYTES // 8, BLOCK):
        total += tl.load(words + at + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read_bandwidth(model: nn.Module) -> float | None:
    """Bytes a second at which a CUDA GPU reads the model's weights and does nothing else: the best of ten passes, each
    one launch. None where triton is missing. Chunks of 64 KiB read at 4.60 TB/s on an H200, of 1 MiB at 4.57."""
    if not triton:
        return None
    chunk, starts = 2 ** 16, []
    for weight in model.parameters():
        starts += range(weight.data_ptr(), weight.data_ptr() + weight.nbytes - chunk + 1, chunk)
    addresses = torch.tensor(starts, device=weight.device)
    sums, milliseconds = torch.empty_like(addresses), []
    for _ in range(10):  # the first one compiles
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        read_chunk[(len(starts),)](addresses, sums, chunk, 4096, num_warps=8)
        ended.record()
        ended.synchronize()
        milliseconds.append(begun.elapsed_time(ended))
    return len(starts) * chunk / min(milliseconds) * 1e3

"""
Attention with rope and the cache's update inside (FlashAttention-2 and split-K decode), beside its plain twin.

Shapes: B sequences, T new tokens, H query heads, K kv heads, G = H / K, E head dim, L cache length.
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fast.common import constexpr, gdc_launch_dependents, gdc_wait, gpu, jit, launch, tl, triton


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


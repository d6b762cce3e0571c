"""
Latent attention for a few tokens (decode and verification), in three launches. The plain twin is
model.LatentAttention.attend(), in its absorbed form.

    absorb_kernel    a head's query times its Wk: [N] -> [C]; beside it the part that turns; and the
                     tokens' latents, normed, and their keys' part, turned, go into the cache
    latent_kernel    attention of all heads of a token to the latents, as to one key/value head:
                     several programs share the cache, and leave parts, as in attention.py
    value_kernel     adds a head's parts up, and multiplies the sum by its Wv: [C] -> [V]

A tile of latents is read once and serves twice, as keys and as values:

    scores [pairs, slots] = q [pairs, C] c^T + q_turned [pairs, R] r^T
    acc    [pairs, C]    += softmax(scores) c

Pairs are tokens and heads, token by token.

Shapes: B sequences, T new tokens, M = B x T, H heads, L cache length, S parts; N, R, C, V as in
model.py.
"""

import torch
from torch import Tensor, library, nn

from fast.attention import (
    in_powers_of_2,
    least_tile,
    row_stride,
    softmax_start,
    split_slots,
    to_int8,
    visible,
)
from fast.common import (
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    gpu,
    jit,
    pdl_options,
    tl,
    triton,
)
from model import LatentAttention, RopeTable
from model import visible as plain_visible

# latent_kernel: pairs of a program, slots of a tile, warps
BM, BL, WARPS = 16, 32, 4


@jit
def turned(x, cos, sin, position, R: constexpr, BR: constexpr, INTERLEAVED: constexpr):
    """LatentAttention.turn() of x [R] at this position; behind its end 0."""
    i = tl.arange(0, BR)
    HALF: constexpr = R // 2
    if INTERLEAVED:
        own, other = i % HALF * 2 + i // HALF, i % HALF * 2 + 1 - i // HALF
    else:
        own, other = i, tl.where(i < HALF, i + HALF, i - HALF)
    inside = i < R
    y = tl.load(x + own, mask=inside, other=0).to(tl.float32)
    swapped = tl.load(x + other, mask=inside, other=0).to(tl.float32)
    c = tl.load(cos + position * R + i, mask=inside, other=0)
    s = tl.load(sin + position * R + i, mask=inside, other=0)
    return y * c + tl.where(i < HALF, -swapped, swapped) * s


@jit
def store_row(x, cache, scales, row, WIDTH: constexpr):
    """Stores x [any] in row `row` of a cache [any, WIDTH], as KVCache.write() does."""
    i = tl.arange(0, x.shape[0])
    x = x[None, :]
    if scales is not None:
        x, scale = to_int8(x)
        tl.store(scales + row + tl.arange(0, 1), scale)
    to = cache + row * WIDTH + i[None, :]
    tl.store(to, x.to(cache.dtype.element_ty), mask=(i < WIDTH)[None, :])


@jit
def absorb_kernel(
    q,
    made,
    positions,
    cos,
    sin,
    norm,
    w,
    r_cache,
    c_cache,
    r_scale,
    c_scale,
    out,
    M,
    T,
    L,
    position_stride,
    q_stride,
    made_stride,
    eps,
    H: constexpr,
    N: constexpr,
    R: constexpr,
    C: constexpr,
    V: constexpr,
    BN: constexpr,
    BR: constexpr,
    BC: constexpr,
    WHOLE: constexpr,
    INTERLEAVED: constexpr,
    PDL: constexpr,
):
    """Program (head, BC of the C columns, and every so many-th token). One more program of each head,
    behind those of the columns, turns the rest of the query; that of head 0 fills the cache, too. q: rows of H (N + R); made: rows that begin
    with a token's latent, [C + R]; w [H (N + V), C]; out [M, H, C + R]. WHOLE: C, rounded up to a
    power of two."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    c = part * BC + tl.arange(0, BC)
    n = tl.arange(0, BN)
    if PDL:
        gdc_launch_dependents()
    inside = (n < N)[:, None] & (c < C)[None, :]
    of_head = w + head * (N + V) * C
    tile = tl.load(of_head + n[:, None] * C + c[None, :], mask=inside, other=0)
    if PDL:
        gdc_wait()
    for m in range(tl.program_id(2), M, tl.num_programs(2)):
        of_query = q + m * q_stride + head * (N + R)
        to = out + (m * H + head) * (C + R)
        dtype: constexpr = out.dtype.element_ty
        if part < tl.num_programs(1) - 1:
            query = tl.load(of_query + n, mask=n < N, other=0).to(tl.float32)
            y = tl.sum(tile.to(tl.float32) * query[:, None], 0)
            tl.store(to + c, y.to(dtype), mask=c < C)
        else:
            position = tl.load(positions + m // T * position_stride + m % T).to(tl.int32)
            i = tl.arange(0, BR)
            rest = turned(of_query + N, cos, sin, position, R, BR, INTERLEAVED)
            tl.store(to + C + i, rest.to(dtype), mask=i < R)
            if head == 0:
                latent = made + m * made_stride
                row = m // T * L + position.to(tl.int64)
                key = turned(latent + C, cos, sin, position, R, BR, INTERLEAVED).to(dtype)
                store_row(key, r_cache, r_scale, row, R)
                e = tl.arange(0, WHOLE)
                x = tl.load(latent + e, mask=e < C, other=0).to(tl.float32)
                weight = tl.load(norm + e, mask=e < C, other=0).to(tl.float32)
                x = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps) * weight
                store_row(x.to(dtype), c_cache, c_scale, row, C)


@jit
def parts_of(position, T, SPLITS: constexpr, WINDOW: constexpr, BL: constexpr):
    """The first slot that T tokens from this position on see, rounded down to a tile, and how many
    parts the slots have. A part may be as small as one tile: value_kernel adds parts up anyway."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BL * BL
    return begin, tl.minimum(tl.cdiv(position + T - begin, BL), SPLITS)


@jit
def load_rows(cache, scales, row, inside, dtype: constexpr, WIDTH: constexpr, BW: constexpr):
    """KVCache.read() of these rows [BL] of a cache [any, WIDTH] -> [BL, BW], 0 where not inside."""
    i = tl.arange(0, BW)
    mask = inside[:, None] & (i < WIDTH)[None, :]
    x = tl.load(cache + row[:, None] * WIDTH + i[None, :], mask=mask, other=0)
    if scales is not None:
        scale = tl.load(scales + row, mask=inside, other=0)
        x = (x.to(tl.float32) * scale[:, None]).to(dtype)
    return x


@jit
def latent_kernel(
    q,
    positions,
    r_cache,
    c_cache,
    r_scale,
    c_scale,
    lses,
    accs,
    T,
    L,
    position_stride,
    scale,
    H: constexpr,
    R: constexpr,
    C: constexpr,
    BR: constexpr,
    BC: constexpr,
    WINDOW: constexpr,
    SPLITS: constexpr,
    BM: constexpr,
    BL: constexpr,
    STAGES: constexpr,
    PDL: constexpr,
):
    """Program (sequence, part, BM of its T H pairs). q [B, T H, C + R] -> lses [B, T H, SPLITS], the base 2 logarithms of the parts' sums, and accs fp32 [B, T H, SPLITS, C]. Parts from
    parts_of()'s number on store nothing, and value_kernel reads none of them."""
    b, split = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * BM + tl.arange(0, BM)
    if PDL:
        gdc_launch_dependents()
    end = tl.load(positions + b * position_stride).to(tl.int32)  # of the first new token
    position = end + tl.minimum(pair // H, T - 1)
    begin, splits = parts_of(end, T, SPLITS, WINDOW, BL)
    if split >= splits:
        return
    start, stop = split_slots(begin, end + T, split, splits, BL)
    if PDL:
        gdc_wait()
    dtype: constexpr = q.dtype.element_ty
    i, c = tl.arange(0, BR), tl.arange(0, BC)
    rows = q + (b * T * H + pair).to(tl.int64)[:, None] * (C + R)
    mask = (pair < T * H)[:, None]
    of_latent = tl.load(rows + c[None, :], mask=mask & (c < C)[None, :], other=0)
    of_turned = tl.load(rows + C + i[None, :], mask=mask & (i < R)[None, :], other=0)
    row_max, row_sum = softmax_start(None, pair, pair < 0, BM)
    acc = tl.zeros((BM, BC), tl.float32)
    for l0 in tl.range(start, stop, BL, num_stages=STAGES):
        slot = l0 + tl.arange(0, BL)
        row = b.to(tl.int64) * L + slot
        latent = load_rows(c_cache, c_scale, row, slot < stop, dtype, C, BC)
        keys = load_rows(r_cache, r_scale, row, slot < stop, dtype, R, BR)
        scores = tl.dot(of_turned, tl.trans(keys), tl.dot(of_latent, tl.trans(latent)))
        seen = (slot < stop)[None, :] & visible(slot, position, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(dtype), latent, acc * rescale[:, None])
        row_max = new_max
    row_sum = tl.maximum(row_sum, 1e-30)  # a window may hide a part
    at = (b * T * H + pair).to(tl.int64) * SPLITS + split
    tl.store(lses + at, row_max + tl.log2(row_sum), mask=pair < T * H)
    to = accs + at[:, None] * C + c[None, :]
    tl.store(to, acc / row_sum[:, None], mask=mask & (c < C)[None, :])


@jit
def value_kernel(
    lses,
    accs,
    positions,
    w,
    out,
    M,
    T,
    position_stride,
    H: constexpr,
    N: constexpr,
    C: constexpr,
    V: constexpr,
    BC: constexpr,
    BV: constexpr,
    WINDOW: constexpr,
    SPLITS: constexpr,
    BS: constexpr,
    BL: constexpr,
    PDL: constexpr,
):
    """Program (head, BV of the V elements of a value, and every so many-th token). It adds up the
    parts of a token, BS at a time, in their order. w [H (N + V), C], out [M, H V]."""
    head = tl.program_id(0)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    c = tl.arange(0, BC)
    if PDL:
        gdc_launch_dependents()
    of_head = w + (head * (N + V) + N) * C
    inside = (v < V)[:, None] & (c < C)[None, :]
    tile = tl.load(of_head + v[:, None] * C + c[None, :], mask=inside, other=0)
    if PDL:
        gdc_wait()
    dtype: constexpr = out.dtype.element_ty
    for m in range(tl.program_id(2), M, tl.num_programs(2)):
        end = tl.load(positions + m // T * position_stride).to(tl.int32)
        _, splits = parts_of(end, T, SPLITS, WINDOW, BL)
        first = (m * H + head) * SPLITS
        every = tl.arange(0, SPLITS)
        largest = tl.max(tl.load(lses + first + every, mask=every < splits, other=-1e30))
        total = 0.0
        y = tl.zeros((BC,), tl.float32)
        for s0 in range(0, splits, BS):
            s = s0 + tl.arange(0, BS)
            share = tl.exp2(tl.load(lses + first + s, mask=s < splits, other=-1e30) - largest)
            total += tl.sum(share)
            mask = (s < splits)[:, None] & (c < C)[None, :]
            of_parts = accs + (first + s)[:, None] * C + c[None, :]
            y += tl.sum(tl.load(of_parts, mask=mask, other=0) * share[:, None], 0)
        y = (y / total).to(dtype).to(tl.float32)  # as plain attention rounds it
        found = tl.sum(tile.to(tl.float32) * y[None, :], 1)
        tl.store(out + m * (H * V) + head * V + v, found.to(dtype), mask=v < V)


@library.custom_op(
    "llama_fast::latent_attend",
    device_types="cuda",
    mutates_args=("r_cache", "c_cache", "r_scale", "c_scale"),
)
def latent_attend(
    q: Tensor,
    latent: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    eps: float,
    w: Tensor,
    r_cache: Tensor,
    c_cache: Tensor,
    r_scale: Tensor | None,
    c_scale: Tensor | None,
    n_head: int,
    key_dim: int,
    interleaved: bool,
    scale: float,
    window: int,
) -> Tensor:
    """q [M, H (N + R)] and latent [M, C + R] fresh from the products, positions [B, T], or [1, T] for
    all sequences, of which those of one sequence follow one another; cos, sin [L, R]; norm [C], of
    the latent; w [H (N + V), C]: wkv's; r_cache [>= B, 1, L, R], c_cache [>= B, 1, L, C] and the
    scales of those that are int8: a KVCache's k and v -> [M, H V]. window: as update_and_attend()
    has it."""
    M, T = len(q), positions.shape[1]
    B, H, N, (L, R), C = M // T, n_head, key_dim, r_cache.shape[2:], c_cache.shape[3]
    V = len(w) // H - N
    processors, pdl = gpu(q.device).multi_processor_count, pdl_options(q.device)
    caches = r_cache, c_cache, r_scale, c_scale
    stride = row_stride(positions)
    absorbed = q.new_empty(M, H, C + R)
    BC, BR, columns = least_tile(C), least_tile(R), 64  # [N, 64] of Wk stay in registers
    absorb_kernel[H, triton.cdiv(C, columns) + 1, min(M, 16)](
        *(q, latent, positions, cos, sin, norm, w, *caches, absorbed),
        *(M, T, L, stride, q.stride(0), latent.stride(0), eps, H, N, R, C, V),
        BN=triton.next_power_of_2(N),
        BR=BR,
        BC=columns,
        WHOLE=BC,
        INTERLEAVED=interleaved,
        PDL=bool(pdl),
        num_warps=4,
        **pdl,
    )
    blocks = triton.cdiv(T * H, BM)
    splits = max(1, min(64, processors // (B * blocks)))
    splits = 1 << splits.bit_length() - 1
    lses = torch.empty(M, H, splits, device=q.device)
    accs = torch.empty(M, H, splits, C, device=q.device)
    how = dict(BC=BC, WINDOW=window, SPLITS=splits, BL=BL, PDL=bool(pdl), **pdl)
    latent_kernel[B, splits, blocks](
        *(absorbed, positions, *caches, lses, accs, T, L, stride),
        *(in_powers_of_2(scale, 1), H, R, C),
        BR=BR,
        BM=BM,
        STAGES=2,
        num_warps=WARPS,
        **how,
    )
    out = q.new_empty(M, H * V)
    value_kernel[H, triton.cdiv(V, 16), min(M, 16)](
        *(lses, accs, positions, w, out, M, T, stride, H, N, C, V),
        BV=16,
        BS=min(8, splits),
        num_warps=4,
        **how,
    )
    return out


@latent_attend.register_fake
def _(q, latent, positions, cos, sin, norm, eps, w, r, c, r_scale, c_scale, n_head, key_dim, *_):
    return q.new_empty(len(q), len(w) - n_head * key_dim)


class FusedLatent(nn.Module):
    """LatentAttention of model.py, whose decode is latent_attend(). Prompts have model.py's open
    form; on a CPU all is model.py's."""

    def __init__(self, attn: LatentAttention, table: RopeTable, window: int | None):
        super().__init__()
        self.attn, self.cache, self.table, self.window = attn, attn.cache, table, window
        self.kernel = attn.cache.k.is_cuda

    def attend(self, q: Tensor, made: Tensor, positions: Tensor) -> Tensor:
        """q [M, H (N + R)], made [M, any]: w_in's; positions [B, T] -> [M, H V]"""
        attn, cache = self.attn, self.cache
        if not self.kernel:
            made = made.unflatten(0, (-1, positions.shape[1]))
            rows, slots = torch.arange(len(made))[:, None], torch.arange(cache.k.shape[2])
            mask = plain_visible(slots, positions, self.window)
            turns = self.table(positions)
            return attn.attend(made, positions, *turns, mask, rows).flatten(0, 1)
        latent = attn.latent
        return latent_attend(
            q,
            made[:, attn.sizes[0] :],
            positions,
            self.table.cos,
            self.table.sin,
            attn.kv_norm.weight,
            attn.kv_norm.eps,
            attn.wkv.weight,
            *(cache.k, cache.v, cache.k_scale, cache.v_scale),
            attn.n_head,
            latent.key_dim,
            latent.interleaved,
            attn.scale,
            self.window or 0,
        )

    def forward(self, *inputs):
        """Prefill: x [B, T, D] -> [B, T, D]"""
        return self.attn(*inputs)

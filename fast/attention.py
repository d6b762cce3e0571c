"""
Attention with rope and the KV cache's update inside. Its plain twin is model.Attention.attend().

The softmax is online (FlashAttention-2, arXiv 2307.08691, section 3.1). A program serves one kv
head of one sequence. Its rows are pairs: a new token and one of the G query heads that share the kv
head. There are T x G of them, token by token.

Decode and verification: there are few pairs, and a program holds all of them. One for each kv head
would leave most of a GPU idle, so several share the cache (Flash-Decoding,
pytorch.org/blog/flash-decoding):

    old slots of the cache, those in use                the T new tokens of this step
    |----- split 0 -----|----- split 1 -----|----- split 2 -----| new |
          program 0           program 1           program 2  also turns the new keys by rope,
              |                   |                   |      stores new keys and values in the
              |                   |                   |      cache, and attends to them
           part 0              part 1              part 2    each split's attention [T x G, E]
              |                   |                   |      and log sum [T x G]
              '-------------------+-------------------'
         the program that finishes last combines the parts, in the order of the splits

Prefill: plain PyTorch turns queries and keys (Attention.rotate()) and stores keys and values
(KVCache.write()) first. Each program then has a block of BM pairs and goes through all slots that
these see. Only the tiles at the two ends need a mask:

        slots 0                                L
    pair 0    |mask|======|mask|                     =            all pairs see all slots
    pair BM      |mask|======|mask|                  mask, left   some pairs' window is past it
    pair 2 BM        |mask|======|mask|              mask, right  some pairs come before it

An int8 cache is read as 16-bit words of two codes, elements 2 e and 2 e + 1 of a key or a value.
Queries and sums are then in halves, a tuple of their even and their odd elements.

Shapes: B sequences, T new tokens, H query heads, K kv heads, G = H / K, E head dim, L cache length.
"""

import math

import torch
from torch import Tensor, library

from fast.common import (
    TensorDescriptor,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    gpu,
    jit,
    last_arriver,
    pdl_options,
    tl,
    triton,
)


@jit
def rope(x, swapped, e, cos, sin, norm, head, mean_square, eps, E: constexpr, PAIRS: constexpr):
    """Heads x [rows, E] after RMSNorm, if there is a norm's weight, and after rope; in fp32.

    norm: [E], the same for each head; or [heads x E], with the mean square of all heads' elements
    [rows], and head [rows] says which one a row is. swapped: x with the elements of each pair
    exchanged. It is loaded, since a thread cannot read what another has in its registers. cos, sin
    [rows, E]. With PAIRS = 0 there is no rope, and these three may be None."""
    x = x.to(tl.float32)
    if norm is not None:
        if mean_square is None:
            scale = tl.rsqrt(tl.sum(x * x, 1) / E + eps)[:, None]
            weights = norm + head[:, None] * 0
        else:
            scale = tl.rsqrt(mean_square + eps)[:, None]
            weights = norm + head[:, None] * E
        inside = (e < E)[None, :]
        x *= scale * tl.load(weights + e[None, :], mask=inside, other=0).to(tl.float32)
    if PAIRS > 0:
        swapped = swapped.to(tl.float32)
        if norm is not None:
            partner = partner_of(e, PAIRS)[None, :]
            swapped *= scale * tl.load(weights + partner, mask=inside, other=0).to(tl.float32)
        x = x * cos + tl.where(e < PAIRS, -swapped, swapped) * sin
    return x


@jit
def mean_squares(heads, stride, t, T, N: constexpr, BN: constexpr):
    """Of all heads' elements [N] of each row's token t [rows]. heads: the first token's; the next's
    lie `stride` on."""
    n = tl.arange(0, BN)
    found = tl.zeros(t.shape, tl.float32)
    for i in range(T):
        x = tl.load(heads + i * stride + n, mask=n < N, other=0).to(tl.float32)
        found = tl.where(t == i, tl.sum(x * x, 0) / N, found)
    return found


@jit
def partner_of(e, PAIRS: constexpr):
    """The element that e turns with: Hugging Face's layout pairs element i with i + PAIRS. The rest
    has a sine of 0."""
    return tl.where(e < PAIRS, e + PAIRS, e - PAIRS)


@jit
def load_rope(cos, sin, position, e, mask, E: constexpr):
    """The rows of cos, sin [L, E] at positions [rows]."""
    at = position[:, None] * E + e[None, :]
    return tl.load(cos + at, mask=mask, other=0), tl.load(sin + at, mask=mask, other=0)


@jit
def bare_norm(x, eps, E: constexpr):
    """model.BareNorm of heads x [rows, E]."""
    y = x.to(tl.float32)
    return (y * tl.rsqrt(tl.sum(y * y, 1) / E + eps)[:, None]).to(x.dtype)


@jit
def visible(slot, position, WINDOW: constexpr):
    """Whether tokens at positions [rows] see slots [slots]: those up to their own, the last WINDOW
    of them unless that is 0 -> [rows, slots]"""
    seen = slot[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (slot[None, :] > position[:, None] - WINDOW)
    return seen


@jit
def split_slots(begin, end, split, splits, BL: constexpr):
    """Of the slots begin .. end - 1, a split's start .. stop - 1: even shares, in multiples of
    BL."""
    share = tl.cdiv(tl.cdiv(end - begin, splits), BL) * BL
    start = begin + split * share
    return start, tl.minimum(start + share, end)


def unpacking(kind: str, ones: str, less: str, one: str, shift: int):
    """PTX of unpack() for two words. None without Triton."""
    return constexpr and constexpr(f"""{{
        .reg .b32 word, bits, base, one;
        shr.b32 word, $1, {shift};
        lop3.b32 bits, word, 0x007f007f, {ones}, 0xea;  // (word & 0x7f) | ones
        lop3.b32 base, word, 0x00800080, {less}, 0xea;
        mov.b32 one, {one};
        fma.rn.{kind} $0, bits, one, base; }}""")


BF16_EVEN, BF16_ODD = (
    unpacking("bf16x2", "0x43004300", "0xc300c300", "0x3f803f80", shift) for shift in (0, 8)
)
FP16_EVEN, FP16_ODD = (
    unpacking("f16x2", "0x64006400", "0xe400e400", "0x3c003c00", shift) for shift in (0, 8)
)


@jit
def unpack(words, ODD: constexpr, dtype: constexpr):
    """The even or the odd codes of int16 words.

    From 128 on bf16 counts by ones with its last 7 bits, and fp16 from 1,024 on. So a code's low 7
    bits are put there, and what is subtracted again is 128 more if its sign is set: 64 slots of 128
    elements take 530 instructions of a warp, and with .to() 850."""
    if dtype == tl.float32:
        x = ((words if ODD else words << 8) >> 8).to(dtype)
    elif dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            BF16_ODD if ODD else BF16_EVEN, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        x = tl.inline_asm_elementwise(
            FP16_ODD if ODD else FP16_EVEN, "=r,r", [words], tl.float16, is_pure=True, pack=2
        )
    return x


@jit
def halves(x):
    """x [rows, E] -> its even and its odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@jit
def repeat(x, ROWS: constexpr):
    """x [rows, E] -> [ROWS, E], its rows again and again."""
    R: constexpr = x.shape[0]
    if R < ROWS:
        x = tl.reshape(
            tl.broadcast_to(x[None, :, :], (ROWS // R, R, x.shape[1])), (ROWS, x.shape[1])
        )
    return x


@jit
def zeros(BM: constexpr, BE: constexpr, scales):
    """acc [BM, BE] for softmax_tile(), in halves if there are scales."""
    if scales is None:
        acc = tl.zeros((BM, BE), tl.float32)
    else:
        acc = halves(tl.zeros((BM, BE), tl.float32))
    return acc


@jit
def joined(acc, scales):
    """acc [BM, BE], which was in halves if there are scales."""
    if scales is not None:
        acc = tl.reshape(tl.join(acc[0], acc[1]), (acc[0].shape[0], acc[0].shape[1] * 2))
    return acc


@jit
def softmax_tile(q, k, v, k_scale, v_scale, seen, scale, row_max, row_sum, acc, dtype: constexpr):
    """One step of the online softmax: q [BM, E], k [BL, E], v [BL, E] -> the new row_max, row_sum
    [BM], acc [BM, E].

    seen [BM, BL], or None: all. scale: E ** -0.5 / ln 2, so that exp2, which the GPU has as an
    instruction, takes the place of exp. k_scale, v_scale: None, or k and v are int8. Then they are
    words [BL, E / 2] and scales [BL], which go to the scores, as these are fewer; and q and acc are
    in halves."""
    if k_scale is None:
        scores = tl.dot(q, tl.trans(k))
    else:
        words = tl.trans(k[0])
        scores = (
            tl.dot(q[1], unpack(words, True, dtype), tl.dot(q[0], unpack(words, False, dtype)))
            * k[1][None, :]
        )
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if v_scale is None:
        acc = tl.dot(p.to(dtype), v, acc * rescale[:, None])
    else:
        p = (p * v[1][None, :]).to(dtype)
        acc = (
            tl.dot(p, unpack(v[0], False, dtype), acc[0] * rescale[:, None]),
            tl.dot(p, unpack(v[0], True, dtype), acc[1] * rescale[:, None]),
        )
    return new_max, row_sum, acc


@jit
def load_tile(
    cache,
    scales,
    group,
    l0,
    end,
    L,
    E: constexpr,
    BE: constexpr,
    BL: constexpr,
    MASKED: constexpr,
    TMA: constexpr,
):
    """Keys or values of the slots from l0 on [BL, BE], or their words [BL, BE / 2] and scales [BL].
    MASKED: 0 from slot `end` on."""
    slot = l0 + tl.arange(0, BL)
    inside = (slot < end)[:, None]
    WIDE: constexpr = E if scales is None else E // 2
    BW: constexpr = BE if scales is None else BE // 2
    if TMA:
        x = tl.reshape(cache.load([group, l0, 0]), (BL, BW))
        if MASKED:
            x = tl.where(inside, x, 0)
    else:
        e = tl.arange(0, BW)
        at = cache + group.to(tl.int64) * L * WIDE + slot[:, None] * WIDE + e[None, :]
        if MASKED or WIDE < BW:
            x = tl.load(at, mask=inside & (e < WIDE)[None, :], other=0)
        else:
            x = tl.load(at)
    if scales is not None:
        x = (x, tl.load(scales + group.to(tl.int64) * L + slot, mask=slot < end, other=0))
    return x


@jit
def to_int8(x):
    """model.to_int8(): x [rows, E] -> codes [rows, E], in fp32, and scales [rows]."""
    x = x.to(tl.float32)
    scale = tl.max(tl.abs(x), 1) / 127
    # 1.5 * 2 ** 23: fp32 counts by ones there, and rounds halves to even.
    rounder: tl.constexpr = 12582912.0
    return x / tl.maximum(scale, 1e-30)[:, None] + rounder - rounder, scale


@jit
def store_new(
    x, cache, scales, group, L, n, T, position, E: constexpr, BE: constexpr, BT: constexpr
):
    """Stores new keys, or values, x [NEW, BE] of tokens n < T in the cache -> what load_tile()
    would read of them, in BT rows."""
    at = group.to(tl.int64) * L + position
    WIDE: constexpr = E if scales is None else E // 2
    BW: constexpr = BE if scales is None else BE // 2
    e = tl.arange(0, BW)
    rows = cache + at[:, None] * WIDE + e[None, :]
    mask = (n < T)[:, None] & (e < WIDE)[None, :]
    if scales is None:
        tl.store(rows, x, mask=mask)
        x = repeat(x, BT)
    else:
        x, scale = to_int8(x)
        even, odd = halves(x.to(tl.int16))
        words = (even & 255) | (odd << 8)
        tl.store(scales + at, scale, mask=n < T)
        tl.store(rows, words, mask=mask)
        x = (repeat(words, BT), tl.reshape(repeat(scale[:, None], BT), (BT,)))
    return x


@jit
def store_heads(
    y,
    out,
    gates,
    pair,
    end,
    HEADS: constexpr,
    STEP: constexpr,
    H: constexpr,
    G: constexpr,
    E: constexpr,
):
    """Attention y [pairs, BE] of pairs < end. out: the kv head's first query head of the sequence's
    first token. gates: None, or this head's gate in q; the next query head's is STEP heads on, and
    a token has HEADS heads there."""
    e = tl.arange(0, y.shape[1])
    mask = (pair < end)[:, None] & (e < E)[None, :]
    if gates is not None:
        of_gates = gates + (pair // G * HEADS + pair % G * STEP)[:, None] * E
        gate = tl.load(of_gates + e[None, :], mask=mask, other=0).to(tl.float32)
        # As PyTorch rounds it.
        y = y.to(out.dtype.element_ty).to(tl.float32) / (1 + tl.exp(-gate))
    rows = out + (pair // G * H + pair % G)[:, None] * E
    tl.store(rows + e[None, :], y.to(out.dtype.element_ty), mask=mask)


@jit
def store_part(part_lses, part_accs, part, row_max, row_sum, acc, BR: constexpr):
    """Stores a split's attention for combine_parts(): part_accs [parts, BR, BE], and the base 2
    logarithms of its softmax's sums, part_lses [parts, BR]."""
    i = tl.arange(0, acc.shape[0])
    e = tl.arange(0, acc.shape[1])
    row = part * BR + i
    row_sum = tl.maximum(row_sum, 1e-30)  # a split may be empty, or hidden by a window
    tl.store(
        part_accs + row[:, None] * acc.shape[1] + e[None, :],
        acc / row_sum[:, None],
        mask=(i < BR)[:, None],
    )
    tl.store(part_lses + row, row_max + tl.log2(row_sum), mask=i < BR)


@jit
def combine_parts(
    part_lses,
    part_accs,
    first,
    splits,
    out,
    pairs,
    HEADS: constexpr,
    STEP: constexpr,
    BR: constexpr,
    H: constexpr,
    G: constexpr,
    E: constexpr,
    BE: constexpr,
    BS: constexpr,
    gates,
):
    """Adds up the `splits` <= BS parts from part `first` on, and stores the attention of pairs <
    `pairs`.

    It takes as many pairs at once as registers hold, as each turn takes 2 us. The order of the
    splits is the same each time, and so are the bits."""
    BP: constexpr = min(BR, max(1, 16384 // (BS * BE)))
    s = tl.arange(0, BS)
    inside = (s < splits)[None, :]
    e = tl.arange(0, BE)
    for p0 in range(0, pairs, BP):
        pair = p0 + tl.arange(0, BP)
        # In this order warps share no pair if they can.
        row = (first + s)[None, :] * BR + pair[:, None]
        accs = tl.load(
            part_accs + row[:, :, None] * BE + e[None, None, :], mask=inside[:, :, None], other=0
        )
        lses = tl.load(part_lses + row, mask=inside, other=-1e30)
        shares = tl.exp2(lses - tl.max(lses, 1)[:, None])
        shares /= tl.sum(shares, 1)[:, None]
        y = tl.sum(accs * shares[:, :, None], 1)
        store_heads(y, out, gates, pair, pairs, HEADS, STEP, H, G, E)


@jit
def softmax_start(sinks, heads, counts, BM: constexpr):
    """row_max and row_sum [BM] of no slot or, where `counts`, of the sinks of these heads: what one
    more slot with this score and no value would leave."""
    row_max = tl.full((BM,), -1e30, tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    if sinks is not None:
        row_max = tl.where(
            counts, tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634, row_max
        )
        row_sum += tl.where(counts, 1.0, 0.0)
    return row_max, row_sum


@jit
def active_splits(begin, end, SPLITS: constexpr, SPLIT_SLOTS: constexpr):
    """How many splits of the slots begin .. end - 1 have work.

    To combine two parts of 7B's 250 slots takes longer than a second tile: 5.6 us for 5.2."""
    splits = tl.minimum(tl.cdiv(end - begin, SPLIT_SLOTS), SPLITS)
    return tl.where(end - begin <= 2 * SPLIT_SLOTS, 1, splits)


@jit
def store_result(
    row_max,
    row_sum,
    acc,
    out,
    part_lses,
    part_accs,
    semaphore,
    group,
    split,
    splits,
    pairs,
    HEADS: constexpr,
    STEP: constexpr,
    H: constexpr,
    G: constexpr,
    E: constexpr,
    BE: constexpr,
    BM: constexpr,
    BR: constexpr,
    BS: constexpr,
    SPLITS: constexpr,
    gates,
):
    """Stores the attention of pairs < `pairs` or, of one split of several, its part; the last one
    to come combines these."""
    if splits == 1:
        pair = tl.arange(0, BM)
        store_heads(acc / row_sum[:, None], out, gates, pair, pairs, HEADS, STEP, H, G, E)
    if SPLITS > 1:
        if splits > 1:
            first = group * SPLITS
            store_part(part_lses, part_accs, first + split, row_max, row_sum, acc, BR)
            if last_arriver(semaphore + group, splits):
                parts = part_lses, part_accs, first, splits, out, pairs
                if splits <= 8:
                    combine_parts(*parts, HEADS, STEP, BR, H, G, E, BE, 8, gates=gates)
                elif SPLITS > 8:
                    combine_parts(*parts, HEADS, STEP, BR, H, G, E, BE, BS, gates=gates)


@jit
def attention_kernel(
    q,
    qkv,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    sinks,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    out,
    part_lses,
    part_accs,
    semaphore,
    T,
    L,
    position_stride,
    scale,
    growth,
    original,
    eps,
    G: constexpr,
    K: constexpr,
    E: constexpr,
    PAIRS: constexpr,
    GROWS: constexpr,
    GATED: constexpr,
    KV: constexpr,
    STORED: constexpr,
    NORM_VALUES: constexpr,
    BE: constexpr,
    WINDOW: constexpr,
    CAUSAL: constexpr,
    BH: constexpr,
    SPLITS: constexpr,
    SPLIT_SLOTS: constexpr,
    BM: constexpr,
    BR: constexpr,
    BT: constexpr,
    ROWS: constexpr,
    NEW: constexpr,
    BL: constexpr,
    BS: constexpr,
    STAGES: constexpr,
    PDL: constexpr,
):
    """Program (b * K + kv head, split).

    q and qkv are [B, T, H + KV K, E] fresh from the product, and the cache lacks its keys and
    values, unless STORED: then q may be what turn_kernel made. KV: 2, or 1, and the key as it is
    there is the value, too, or 0. GATED: 1 or 2, and qkv has H heads more, behind each query head
    its gate or all gates last. NORM_VALUES: values are normed, without a weight. BH: 0, or q_norm
    and k_norm are of all heads together, and this is H E, rounded up to a power of two. tl.dot()
    has BM pairs and BT new tokens, what comes before it ROWS and NEW: as many, or fewer. It is
    longer than a screen because the first pass of the loop must hold all that waits for the kernel
    before: there the compiler puts the first tiles' loads ahead of the wait."""
    group = tl.program_id(0)
    split = tl.program_id(1)
    b = group // K
    kv = group % K
    if PDL:
        gdc_launch_dependents()
    H: constexpr = K * G
    EACH: constexpr = 2 if GATED == 1 else 1  # a query head, and its gate
    HEADS: constexpr = (2 if GATED else 1) * H + KV * K  # of a token in q
    e = tl.arange(0, BE)
    partner = partner_of(e, PAIRS)
    pair = tl.arange(0, ROWS)
    t = tl.minimum(pair // G, T - 1)
    pair_mask = (pair < T * G)[:, None] & (e < E)[None, :]
    q_rows = q + (((b * T + t) * HEADS + (kv * G + pair % G) * EACH) * E)[:, None]

    # Positions were there before the first layer, and old slots before this step: loading them need
    # not wait. Of a STORED cache the new slots are others: see below.
    positions += b * position_stride
    position = tl.load(positions + t).to(tl.int32)
    end = tl.load(positions).to(tl.int32)
    n = tl.arange(0, NEW)
    new_mask = (n < T)[:, None] & (e < E)[None, :]
    new_position = tl.load(positions + n, mask=n < T, other=0).to(tl.int32)
    new_rows = q + (((b * T + n) * HEADS + EACH * H + kv) * E)[:, None]
    row_position = end + tl.minimum(tl.arange(0, BM) % ROWS // G, T - 1)  # [BM]
    if not CAUSAL:
        row_position = row_position * 0 + end + T - 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW + 1, 0) // BL * BL
    stored = end + T if STORED else end
    splits = active_splits(begin, stored, SPLITS, SPLIT_SLOTS)
    if split >= splits:
        return
    start, stop = split_slots(begin, stored, split, splits, BL)
    if PDL and STORED:
        # The kernel before, or one before that, stores the new slots, which a tile may hold.
        if stop > end:
            gdc_wait()

    dtype: constexpr = out.dtype.element_ty
    queries = tl.zeros((BM, BE), dtype)
    if k_scale is not None:
        queries = halves(queries)
    row_max, row_sum = softmax_start(sinks, kv * G + tl.arange(0, BM) % G, split == 0, BM)
    acc = zeros(BM, BE, v_scale)
    for l0 in tl.range(start, tl.maximum(stop, start + 1), BL, num_stages=STAGES):
        slot = l0 + tl.arange(0, BL)
        k = load_tile(k_cache, k_scale, group, l0, stop, L, E, BE, BL, True, False)
        v = load_tile(v_cache, v_scale, group, l0, stop, L, E, BE, BL, True, False)
        if l0 == start:
            # Here, as before the loop they would take 64 registers in all of it.
            cos_q, sin_q, cos_k, sin_k, swapped, swapped_k = None, None, None, None, None, None
            if PAIRS > 0:
                cos_q, sin_q = load_rope(cos, sin, position, e, pair_mask, E)
                if not STORED:
                    cos_k, sin_k = load_rope(cos, sin, new_position, e, new_mask, E)
            if PDL:
                gdc_wait()
            new_q = tl.load(q_rows + e[None, :], mask=pair_mask, other=0)
            if PAIRS > 0:
                swapped = tl.load(q_rows + partner[None, :], mask=pair_mask, other=0)
            if not STORED:
                has_new = split == splits - 1  # this one attends to the new tokens, too
                load_new = new_mask & has_new
                new_k = tl.load(new_rows + e[None, :], mask=load_new, other=0)
                if PAIRS > 0:
                    swapped_k = tl.load(new_rows + partner[None, :], mask=load_new, other=0)
                new_v = tl.load(new_rows + (KV - 1) * K * E + e[None, :], mask=load_new, other=0)
            q_square = None
            if BH > 0:
                q_square = mean_squares(q + b * T * HEADS * E, HEADS * E, t, T, H * E, BH)
            new_q = rope(
                new_q, swapped, e, cos_q, sin_q, q_norm, kv * G + pair % G, q_square, eps, E, PAIRS
            )
            if GROWS:
                new_q *= (1 + growth * tl.log(1.0 + position // original))[:, None]
            new_q = repeat(new_q.to(dtype), BM)
            queries = new_q if k_scale is None else halves(new_q)
            if not STORED and has_new:
                k_square = None
                if BH > 0:
                    k_square = mean_squares(q + (b * T * HEADS + H) * E, HEADS * E, n, T, K * E, BH)
                keys = rope(
                    new_k, swapped_k, e, cos_k, sin_k, k_norm, kv + n * 0, k_square, eps, E, PAIRS
                )
                keys = store_new(
                    keys.to(dtype), k_cache, k_scale, group, L, n, T, new_position, E, BE, BT
                )
                if NORM_VALUES:
                    new_v = bare_norm(new_v, eps, E)
                values = store_new(new_v, v_cache, v_scale, group, L, n, T, new_position, E, BE, BT)
                at = tl.arange(0, BT)
                seen = (at < T)[None, :] & visible(end + at, row_position, WINDOW)
                row_max, row_sum, acc = softmax_tile(
                    *(queries, keys, values, k_scale, v_scale, seen, scale, row_max, row_sum, acc),
                    dtype,
                )
        seen = (slot < stop)[None, :] & visible(slot, row_position, WINDOW)
        row_max, row_sum, acc = softmax_tile(
            queries, k, v, k_scale, v_scale, seen, scale, row_max, row_sum, acc, dtype
        )

    acc = joined(acc, v_scale)
    out += (b * T * H + kv * G) * E
    gates = None
    if GATED == 1:
        gates = qkv + (b * T * HEADS + kv * G * 2 + 1) * E
    elif GATED == 2:
        gates = qkv + (b * T * HEADS + H + KV * K + kv * G) * E
    store_result(
        *(row_max, row_sum, acc, out, part_lses, part_accs, semaphore),
        *(group, split, splits, T * G, HEADS, EACH, H, G, E, BE, BM, BR, BS, SPLITS),
        gates=gates,
    )


@jit
def turn_kernel(
    qkv,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    q,
    T,
    L,
    position_stride,
    growth,
    original,
    eps,
    H: constexpr,
    K: constexpr,
    E: constexpr,
    PAIRS: constexpr,
    GROWS: constexpr,
    GATED: constexpr,
    KV: constexpr,
    NORM_VALUES: constexpr,
    BE: constexpr,
    PDL: constexpr,
):
    """Program (token, query head or, behind these, key head): what attention_kernel() does with new
    queries, keys and values, for heads of so many elements that there it would lack registers. q:
    laid out as qkv; only its query heads are written."""
    b, t = tl.program_id(0) // T, tl.program_id(0) % T
    head = tl.program_id(1)
    EACH: constexpr = 2 if GATED == 1 else 1
    HEADS: constexpr = (2 if GATED else 1) * H + KV * K
    e, none = tl.arange(0, BE), tl.arange(0, 1)
    n = t + none  # [1]: what follows is made for several rows
    mask = (e < E)[None, :]
    if PDL:
        gdc_launch_dependents()
    position = tl.load(positions + b * position_stride + n).to(tl.int32)
    cos_x, sin_x, swapped = None, None, None
    if PAIRS > 0:
        cos_x, sin_x = load_rope(cos, sin, position, e, mask, E)
    if PDL:
        gdc_wait()
    token = tl.program_id(0) * HEADS
    at = token + (head * EACH if head < H else EACH * H + head - H)
    rows = (at * E + none)[:, None]
    x = tl.load(qkv + rows + e[None, :], mask=mask, other=0)
    if PAIRS > 0:
        swapped = tl.load(qkv + rows + partner_of(e, PAIRS)[None, :], mask=mask, other=0)
    if head < H:
        y = rope(x, swapped, e, cos_x, sin_x, q_norm, none, None, eps, E, PAIRS)
        if GROWS:
            y *= (1 + growth * tl.log(1.0 + position // original))[:, None]
        tl.store(q + rows + e[None, :], y.to(x.dtype), mask=mask)
    else:
        group = b * K + head - H
        keys = rope(x, swapped, e, cos_x, sin_x, k_norm, none, None, eps, E, PAIRS).to(x.dtype)
        store_new(keys, k_cache, k_scale, group, L, n, T, position, E, BE, 1)
        value = tl.load(qkv + rows + (KV - 1) * K * E + e[None, :], mask=mask, other=0)
        if NORM_VALUES:
            value = bare_norm(value, eps, E)
        store_new(value, v_cache, v_scale, group, L, n, T, position, E, BE, 1)


@jit
def attend_to(
    begin,
    end,
    q,
    position,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    group,
    L,
    scale,
    row_max,
    row_sum,
    acc,
    dtype: constexpr,
    E: constexpr,
    BE: constexpr,
    WINDOW: constexpr,
    BL: constexpr,
    STAGES: constexpr,
    MASKED: constexpr,
    TMA: constexpr,
):
    """Slots begin .. end - 1. MASKED: not every pair sees each of them, or they are no whole
    tiles."""
    for l0 in tl.range(begin, end, BL, num_stages=STAGES):
        slot = l0 + tl.arange(0, BL)
        k = load_tile(k_cache, k_scale, group, l0, end, L, E, BE, BL, MASKED, TMA)
        v = load_tile(v_cache, v_scale, group, l0, end, L, E, BE, BL, MASKED, TMA)
        seen = None
        if MASKED:
            seen = visible(slot, position, WINDOW)
        row_max, row_sum, acc = softmax_tile(
            q, k, v, k_scale, v_scale, seen, scale, row_max, row_sum, acc, dtype
        )
    return row_max, row_sum, acc


# Not specialized on the number of tokens: a prompt of another length compiles nothing.
@jit(do_not_specialize=["T", "position_stride"])
def prefill_kernel(
    q,
    positions,
    sinks,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    out,
    T,
    L,
    position_stride,
    scale,
    G: constexpr,
    K: constexpr,
    E: constexpr,
    BE: constexpr,
    WINDOW: constexpr,
    BM: constexpr,
    BL: constexpr,
    STAGES: constexpr,
    TMA: constexpr,
):
    """Program (b * K + kv head, block of BM pairs). q [B, T, H, E] after rope; the cache is
    complete. TMA: k_cache and v_cache are descriptors of [B K, L, E], in tiles of BL slots."""
    group = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    b = group // K
    kv = group % K
    e = tl.arange(0, BE)
    pair = block * BM + tl.arange(0, BM)
    t = tl.minimum(pair // G, T - 1)
    mask = (pair < T * G)[:, None] & (e < E)[None, :]
    at = (((b * T + t) * (K * G) + kv * G + pair % G) * E)[:, None] + e[None, :]
    positions += b * position_stride
    position = tl.load(positions + t)
    first = tl.load(positions + block * BM // G).to(tl.int32)
    end = tl.load(positions + tl.minimum((block * BM + BM - 1) // G, T - 1)).to(tl.int32) + 1
    dtype: constexpr = out.dtype.element_ty
    queries = tl.load(q + at, mask=mask, other=0)
    if k_scale is not None:
        queries = halves(queries)
    row_max = tl.full((BM,), -1e30, tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    if sinks is not None:
        row_max = tl.load(sinks + kv * G + pair % G).to(tl.float32) * 1.4426950408889634
        row_sum += 1
    acc = zeros(BM, BE, v_scale)

    of = queries, position, k_cache, v_cache, k_scale, v_scale, group, L, scale
    begin = 0
    whole = (first + 1) // BL * BL  # the tiles before are seen by all pairs, but for the window
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BL * BL
        left = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BL) * BL, whole)
        row_max, row_sum, acc = attend_to(
            begin, left, *of, *(row_max, row_sum, acc, dtype, E, BE, WINDOW, BL, STAGES, True, TMA)
        )
        begin = tl.maximum(begin, left)
    row_max, row_sum, acc = attend_to(
        begin, whole, *of, *(row_max, row_sum, acc, dtype, E, BE, WINDOW, BL, STAGES, False, TMA)
    )
    begin = tl.maximum(begin, whole)
    row_max, row_sum, acc = attend_to(
        begin, end, *of, *(row_max, row_sum, acc, dtype, E, BE, WINDOW, BL, STAGES, True, TMA)
    )
    tl.store(
        out + at, (joined(acc, v_scale) / row_sum[:, None]).to(out.dtype.element_ty), mask=mask
    )


def few_pairs(T: int, G: int) -> bool:
    """Whether memory is the limit, not arithmetic: one block then holds all pairs.
    update_and_attend() wants it so."""
    return T <= 16 and T * G <= 64


def least_tile(n: int) -> int:
    """A dimension of tl.dot() that holds n."""
    return max(16, triton.next_power_of_2(n))


def head_tile(E: int) -> int:
    """Each of its halves is a dimension of tl.dot(), too."""
    return 2 * least_tile((E + 1) // 2)


def prefill_sizes(E: int, memory: int) -> dict:
    """For so many bytes of shared memory.

    Of 8B's 4,096 tokens after as many, tiles of 128 slots by TMA take 0.75 ms, of 64 without it
    0.90, and with masks everywhere they took 1.17; cuDNN takes 1.78 (H200)."""
    hopper = memory >= 230_400
    if E > 256:
        sizes = dict(BM=64, BL=32, num_warps=8) if hopper else dict(BM=32, BL=16, num_warps=4)
        return dict(STAGES=2, TMA=False) | sizes
    if E > 128:
        sizes = dict(BM=128, BL=64, num_warps=8) if hopper else dict(BM=64, BL=32, num_warps=4)
        return dict(STAGES=2, TMA=False) | sizes
    tma = E == 128 and hopper
    return dict(BM=128, BL=128 if tma else 64, STAGES=3, TMA=tma, num_warps=8 if E > 64 else 4)


def as_words(cache: Tensor) -> Tensor:
    return cache.view(torch.int16) if cache.dtype == torch.int8 else cache


def decode_sizes(E: int, BR: int, BN: int, int8: bool, groups: int, L: int, of) -> dict:
    """For `groups` (B x K) of BR pairs and BN new tokens, both powers of two; of: what gpu() says.

    A few groups, with multiprocessors of their own, want many bytes on the way; the fewest, in 16
    bits, are split the soonest. Where there are many, several programs share a multiprocessor: with
    few pairs each they have two warps and, in 16 bits, no more ROWS than pairs before tl.dot(),
    which takes 16. us, H200, of BL, STAGES, warps; what is not taken was timed in part before the
    last changes of the kernel:

                                           128, 2, 4    128, 3, 4    64, 3, 4    two warps
        512 groups of 100 / 230 slots    14.3 / 24.3  20.9 / 34.1  14.6 / 21.7  10.1 / 19.6
        512 groups of 300, in int8                           26.0                      17.7
        128 groups of 8,192, in int8                         77.2                      73.7
        32 groups of 250 / 4,000          6.1 / 20.7   5.2 / 25.7    - / 20.3     - / 23.8
        8 groups of 250 / 32,768          5.6 / 36.5                4.4 / 35.7     - / 48.7
        8 groups of 32,768, in int8             27.5         25.2        31.3         31.8
        the same of 20 pairs each               48.0                     50.1"""
    processors, memory = of.multi_processor_count, of.shared_memory_per_block_optin
    many, programs = groups > processors, 2  # programs of a multiprocessor
    sizes = dict(
        SPLIT_SLOTS=128,
        BM=max(16, BR),
        BR=BR,
        BT=max(16, BN),
        ROWS=max(16, BR),
        NEW=max(16, BN),
        BL=128,
        STAGES=2,
        num_warps=4,
    )
    if E > 256:
        narrow = BR > 32 or memory < 160_000
        sizes |= dict(BL=16 if narrow else 32, num_warps=8 if BR > 16 else 4)
    elif E > 128 or BR > 32:
        # Large tiles want many registers; the largest, of 64 slots, 112 KB of shared memory.
        sizes |= dict(BL=32 if E > 128 and BR > 32 and memory < 120_000 else 64)
    elif int8 and BR <= 16:
        sizes |= dict(STAGES=3)
        if 2 * groups > processors:
            programs = 4
            sizes |= dict(BL=64, num_warps=2)
    elif many and not int8:
        sizes |= dict(ROWS=BR, NEW=BN, BL=64, num_warps=2) if BR <= 4 else dict(BL=64, STAGES=3)
    elif 8 * groups <= processors and not int8:
        sizes |= dict(SPLIT_SLOTS=64, BL=64, STAGES=3)
    elif memory >= 160_000 and groups * triton.cdiv(L, 128) <= processors:
        sizes |= dict(STAGES=3)
    # As many parts are combined at once as registers hold.
    splits = max(1, min(64 if E <= 256 else 32, programs * processors // groups))
    if splits > 32:
        # Combining 33, which 132 multiprocessors give 8 groups, takes twice the registers of 32.
        splits -= splits % 8
    return sizes | dict(SPLITS=splits, BS=triton.next_power_of_2(splits))


def row_stride(positions: Tensor) -> int:
    """0: one row of positions serves all sequences."""
    return positions.stride(0) if len(positions) > 1 else 0


def in_powers_of_2(scale: float | None, E: int) -> float:
    return (E**-0.5 if scale is None else scale) / math.log(2)


@library.custom_op("llama_fast::attend", mutates_args=(), device_types="cuda")
def attend(
    q: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, T, H, E], after norm and rope; the tokens' keys and values are in the cache -> [B, T,
    H, E].

    The other arguments are update_and_attend()'s."""
    B, T, H, E = q.shape
    K, L = k_cache.shape[1:3]
    sizes = prefill_sizes(E, gpu(q.device).shared_memory_per_block_optin)
    caches = as_words(k_cache), as_words(v_cache)
    if sizes["TMA"]:
        caches = (
            TensorDescriptor.from_tensor(cache.flatten(0, 1), [1, sizes["BL"], cache.shape[-1]])
            for cache in caches
        )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    prefill_kernel[(B * K, triton.cdiv(T * (H // K), sizes["BM"]))](
        *(q.contiguous(), positions, sinks, *caches, k_scale, v_scale, out, T, L),
        *(row_stride(positions), in_powers_of_2(scale, E)),
        **dict(G=H // K, K=K, E=E, BE=head_tile(E), WINDOW=window),
        **sizes,
    )
    return out


@attend.register_fake
def _(q, positions, k_cache, v_cache, k_scale, v_scale, window, scale=None, sinks=None):
    return q.new_empty(q.shape)


@library.custom_op(
    "llama_fast::update_and_attend",
    device_types="cuda",
    mutates_args=("k_cache", "v_cache", "k_scale", "v_scale", "semaphore"),
)
def update_and_attend(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    semaphore: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    eps: float = 1e-5,
    scale: float | None = None,
    pairs: int = 0,
    growth: float = 0.0,
    original: int = 1,
    gated: int = 0,
    causal: bool = True,
    kv: int = 2,
    norm_values: bool = False,
) -> Tensor:
    """Norms (if there are norms) and turns queries and keys, stores keys and values in the cache,
    and attends.

    qkv [B, T, H + kv K, E], fresh from the product, of few_pairs(); kv is 2, or 1 where the key
    before its norm and rope is the value, too, or 0 where the tokens' keys and values are in the
    cache already; norm_values: values are normed, without a weight; positions [B, T], or [1, T] for
    all sequences, of which those of one sequence follow one another; k_cache, v_cache [>= B, K, L,
    E], whose first B rows are used, and k_scale, v_scale fp32 [>= B, K, L] of those that are int8;
    q_norm, k_norm [E], or [H E] and [K E] of all heads together -> [B, T, H, E]. A token sees the
    slots up to its own position, of these the last `window` unless that is 0. Where it is not
    causal, which wants no window, each of the T tokens sees all of them. The kernel finds the slots
    in use by itself, and nothing of T x L elements is ever in memory. scale: of q k^T, None
    for E ** -0.5. Rope turns element i < pairs with i + pairs; cos, sin [L, E] are all positions'.
    growth, original: model.Rope's q_growth and original. gated: qkv has H heads more, behind each
    query head its gate (1) or all gates last (2); norms are then of a head. sinks [H]: one more
    score of each head, whose value is 0. semaphore: int32 zeros [>= B * K]; they are zeros again
    afterwards."""
    B, T, heads, E = qkv.shape
    K, L = k_cache.shape[1:3]
    H = (heads - kv * K) // (1 + (gated > 0))
    BE, BR, BN = head_tile(E), triton.next_power_of_2(T * H // K), triton.next_power_of_2(T)
    int8 = k_scale is not None and v_scale is not None
    sizes = decode_sizes(E, BR, BN, int8, B * K, L, gpu(qkv.device))
    splits = sizes["SPLITS"]
    part_lses = part_accs = None
    if splits > 1:
        part_lses = torch.empty(B * K * splits * BR, device=qkv.device)
        part_accs = torch.empty(B * K * splits * BR * BE, device=qkv.device)
    out = qkv.new_empty(B, T, H, E)
    whole_norm = q_norm is not None and len(q_norm) > E
    pdl = pdl_options(qkv.device)
    q = qkv = qkv.contiguous()
    caches = as_words(k_cache), as_words(v_cache), k_scale, v_scale
    how = dict(K=K, E=E, GATED=gated, KV=kv, NORM_VALUES=norm_values, BE=BE, PDL=bool(pdl))
    how |= pdl
    of_rope = dict(PAIRS=pairs, GROWS=growth != 0)
    if E > 256:  # a launch of its own turns queries and keys
        if whole_norm:
            raise ValueError(f"heads of {E} elements and a norm of all heads together")
        q = torch.empty_like(qkv)
        turn_kernel[(B * T, H + (K if kv else 0))](
            *(qkv, positions, cos, sin, q_norm, k_norm, *caches, q, T, L, row_stride(positions)),
            *(growth, original, eps, H),
            **of_rope,
            **how,
        )
        q_norm = k_norm = None
        of_rope = dict(PAIRS=0, GROWS=False)
    attention_kernel[(B * K, splits)](
        *(q, qkv, positions, cos, sin, q_norm, k_norm, sinks, *caches),
        *(out, part_lses, part_accs, semaphore, T, L, row_stride(positions)),
        *(in_powers_of_2(scale, E), growth, original, eps),
        G=H // K,
        STORED=E > 256 or not kv,
        WINDOW=window,
        CAUSAL=causal,
        BH=triton.next_power_of_2(H * E) if whole_norm else 0,
        **of_rope,
        **how,
        **sizes,
    )
    return out


@update_and_attend.register_fake
def _(
    qkv,
    positions,
    cos,
    sin,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    semaphore,
    q_norm=None,
    k_norm=None,
    sinks=None,
    window=0,
    eps=1e-5,
    scale=None,
    pairs=0,
    growth=0.0,
    original=1,
    gated=0,
    causal=True,
    kv=2,
    norm_values=False,
):
    heads = (qkv.shape[2] - kv * k_cache.shape[1]) // (1 + (gated > 0))
    return qkv.new_empty(*qkv.shape[:2], heads, qkv.shape[3])


@jit(do_not_specialize=["T", "position_stride"])
def store_kernel(
    kv,
    positions,
    cos,
    sin,
    k_norm,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    T,
    L,
    position_stride,
    eps,
    K: constexpr,
    E: constexpr,
    PAIRS: constexpr,
    BE: constexpr,
    BT: constexpr,
    PDL: constexpr,
):
    """Program (b * K + kv head, BT of the tokens)."""
    group = tl.program_id(0)
    b = group // K
    n = tl.program_id(1) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    if PDL:
        gdc_launch_dependents()
    mask = (n < T)[:, None] & (e < E)[None, :]
    position = tl.load(positions + b * position_stride + n, mask=n < T, other=0).to(tl.int32)
    cos_k, sin_k = load_rope(cos, sin, position, e, mask, E)
    if PDL:
        gdc_wait()
    rows = kv + ((b * T + n).to(tl.int64) * 2 * K + group % K)[:, None] * E
    k = tl.load(rows + e[None, :], mask=mask, other=0)
    swapped = tl.load(rows + partner_of(e, PAIRS)[None, :], mask=mask, other=0)
    v = tl.load(rows + K * E + e[None, :], mask=mask, other=0)
    keys = rope(k, swapped, e, cos_k, sin_k, k_norm, n * 0, None, eps, E, PAIRS).to(v.dtype)
    store_new(keys, k_cache, k_scale, group, L, n, T, position, E, BE, BT)
    store_new(v, v_cache, v_scale, group, L, n, T, position, E, BE, BT)


@library.custom_op(
    "llama_fast::store",
    device_types="cuda",
    mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"),
)
def store(
    kv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    pairs: int,
) -> None:
    """What update_and_attend() does with new keys and values kv [B, T, 2K, E], without queries. The
    norm is of a head."""
    B, T, heads, E = kv.shape
    K, L = heads // 2, k_cache.shape[2]
    pdl = pdl_options(kv.device)
    store_kernel[B * K, triton.cdiv(T, 16)](
        *(kv, positions, cos, sin, k_norm, as_words(k_cache), as_words(v_cache), k_scale, v_scale),
        *(T, L, row_stride(positions), eps, K, E, pairs),
        BE=head_tile(E),
        BT=16,
        PDL=bool(pdl),
        **pdl,
    )


@store.register_fake
def _(kv, positions, cos, sin, k_cache, v_cache, k_scale, v_scale, k_norm, eps, pairs):
    return None

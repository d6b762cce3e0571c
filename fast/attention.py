"""
Attention with rope and the KV cache's update inside. Its plain twin is model.Attention.attend().

The softmax is online (FlashAttention-2, arXiv 2307.08691, section 3.1). A program serves one kv head of one sequence.
Its rows are pairs: a new token and one of the G query heads that share the kv head. There are T x G of them, token by
token.

Decode and verification (NEW, few pairs): one block holds all pairs. One program for each kv head would leave most of a
GPU idle, so several share the cache (Flash-Decoding, pytorch.org/blog/flash-decoding):

        old slots of the cache, those in use               the T new tokens of this step
        |----- split 0 -----|----- split 1 -----|----- split 2 -----| new |
              program 0           program 1           program 2 also turns the new keys by rope, stores new keys and
                  |                   |                   |     values in the cache, and attends to them
               part 0              part 1              part 2   a split's row_max, row_sum [T x G] and acc [T x G, E]
                  '-------------------+-------------------'
             the program that finishes last combines the parts, in the order of the splits

Prefill: plain PyTorch turns queries and keys (Attention.rotate()) and stores keys and values (KVCache.write()) first.
Of many pairs each program then has a block of BM and goes through all slots that these see; few pairs share the cache
as above.

Shapes: B sequences, T new tokens, H query heads, K kv heads, G = H / K, E head dim, L cache length.
"""
import math

import torch
from torch import Tensor, library

from fast.common import constexpr, gdc_launch_dependents, gdc_wait, gpu, jit, last_arriver, pdl_options, tl, triton


@jit
def rope(x, swapped, e, cos, sin, norm, head, mean_square, eps, E: constexpr, PAIRS: constexpr):
    """Heads x [rows, E] after RMSNorm, if there is a norm's weight, and after rope; in fp32.

    norm: [E], the same for each head; or [heads x E], with the mean square of all heads' elements [rows], and head
    [rows] says which one a row is.
    swapped: x with the elements of each pair exchanged. It is loaded, since a thread cannot read what another has in
    its registers. cos, sin [rows, E]."""
    x = x.to(tl.float32)
    swapped = swapped.to(tl.float32)
    if norm is not None:
        if mean_square is None:
            scale = tl.rsqrt(tl.sum(x * x, 1) / E + eps)[:, None]
            weights = norm + head[:, None] * 0
        else:
            scale = tl.rsqrt(mean_square + eps)[:, None]
            weights = norm + head[:, None] * E
        inside = (e < E)[None, :]
        x *= scale * tl.load(weights + e[None, :], mask=inside, other=0).to(tl.float32)
        partner = partner_of(e, PAIRS)[None, :]
        swapped *= scale * tl.load(weights + partner, mask=inside, other=0).to(tl.float32)
    return x * cos + tl.where(e < PAIRS, -swapped, swapped) * sin


@jit
def mean_squares(heads, stride, t, T, N: constexpr, BN: constexpr):
    """Of all heads' elements [N] of each row's token t [rows]. heads: the first token's; the next's lie `stride` on."""
    n = tl.arange(0, BN)
    found = tl.zeros(t.shape, tl.float32)
    for i in range(T):
        x = tl.load(heads + i * stride + n, mask=n < N, other=0).to(tl.float32)
        found = tl.where(t == i, tl.sum(x * x, 0) / N, found)
    return found


@jit
def partner_of(e, PAIRS: constexpr):
    """The element that e turns with: Hugging Face's layout pairs element i with i + PAIRS. The rest has a sine of 0."""
    return tl.where(e < PAIRS, e + PAIRS, e - PAIRS)


@jit
def load_rope(cos, sin, position, e, mask, E: constexpr):
    """The rows of cos, sin [L, E] at positions [rows]."""
    at = position[:, None] * E + e[None, :]
    return tl.load(cos + at, mask=mask, other=0), tl.load(sin + at, mask=mask, other=0)


@jit
def visible(slot, position, WINDOW: constexpr):
    """Whether tokens at positions [rows] see slots [slots]: those up to their own, the last WINDOW of them unless that
    is 0 -> [rows, slots]"""
    seen = slot[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (slot[None, :] > position[:, None] - WINDOW)
    return seen


@jit
def split_slots(begin, end, split, splits, BL: constexpr):
    """Of the slots begin .. end - 1, a split's start .. stop - 1: even shares, in multiples of BL."""
    share = tl.cdiv(tl.cdiv(end - begin, splits), BL) * BL
    start = begin + split * share
    return start, tl.minimum(start + share, end)


@jit
def softmax_tile(q, k, v, k_scale, v_scale, seen, scale, row_max, row_sum, acc):
    """One step of the online softmax: q [BM, E], k [E, BL], v [BL, E] -> the new row_max, row_sum [BM], acc [BM, E].

    scale: E ** -0.5 / ln 2, so that exp2, which the GPU has as an instruction, takes the place of exp. k_scale, v_scale
    [BL]: of an int8 cache, whose codes k and v then are. They go to the scores, which are fewer."""
    scores = tl.dot(q, k.to(q.dtype)) * scale
    if k_scale is not None:
        scores *= k_scale[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    p = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if v_scale is not None:
        p *= v_scale[None, :]
    return new_max, row_sum, tl.dot(p.to(q.dtype), v.to(q.dtype), acc * rescale[:, None])


@jit
def to_int8(x):
    """model.to_int8(): x [rows, E] -> codes [rows, E], in fp32, and scales [rows]."""
    x = x.to(tl.float32)
    scale = tl.max(tl.abs(x), 1) / 127
    rounder: tl.constexpr = 12582912.0  # 1.5 * 2 ** 23: fp32 counts by ones there, and rounds halves to even
    return x / tl.maximum(scale, 1e-30)[:, None] + rounder - rounder, scale


@jit
def store_new(x, cache, scales, group, L, T, at, e, E: constexpr):
    """Stores new keys, or values, x [BT, BE] in the cache -> what attention sees of them, as KVCache.read() gives it.
    at: the numbers of the new tokens [BT], their positions, and which elements there are."""
    n, position, mask = at
    cache += group.to(tl.int64) * L * E + position[:, None] * E + e[None, :]
    if scales is None:
        tl.store(cache, x, mask=mask)
        seen = x
    else:
        codes, scale = to_int8(x)
        tl.store(scales + group.to(tl.int64) * L + position, scale, mask=n < T)
        tl.store(cache, codes.to(cache.dtype.element_ty), mask=mask)
        seen = (codes * scale[:, None]).to(x.dtype)
    return seen


@jit
def store_part(part_stats, part_accs, part, row_max, row_sum, acc, BR: constexpr, BE: constexpr):
    """Stores a split's softmax for combine_parts(): part_stats [parts, BR, 2], part_accs [parts, BR, BE]."""
    i = tl.arange(0, acc.shape[0])
    row = part * BR + i
    tl.store(part_accs + row[:, None] * BE + tl.arange(0, BE)[None, :], acc, mask=(i < BR)[:, None])
    tl.store(part_stats + row * 2, row_max, mask=i < BR)
    tl.store(part_stats + row * 2 + 1, row_sum, mask=i < BR)


@jit
def combine_parts(part_stats, part_accs, first, splits, pair, pair_mask, BE: constexpr, BS: constexpr):
    """Adds up the `splits` parts from part `first` on, BS at a time -> the attention of pairs [BR]: [BR, BE].

    The order is the same each time, and so are the bits."""
    e = tl.arange(0, BE)
    BR: constexpr = pair.shape[0]
    row_max = tl.full((BR,), -1e30, tl.float32)
    row_sum = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, BE), tl.float32)
    for s0 in range(0, splits, BS):
        s = s0 + tl.arange(0, BS)
        inside = (s < splits)[:, None] & pair_mask[None, :]
        row = (first + s)[:, None] * BR + pair[None, :]
        part_max = tl.load(part_stats + row * 2, mask=inside, other=-1e30)
        part_sum = tl.load(part_stats + row * 2 + 1, mask=inside, other=0)
        part_acc = tl.load(part_accs + row[:, :, None] * BE + e[None, None, :], mask=inside[:, :, None], other=0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        rescale = tl.exp2(row_max - new_max)
        weight = tl.exp2(part_max - new_max[None, :])
        row_sum = row_sum * rescale + tl.sum(part_sum * weight, 0)
        acc = acc * rescale[:, None] + tl.sum(part_acc * weight[:, :, None], 0)
        row_max = new_max
    return acc / row_sum[:, None]


@jit
def attention_kernel(q, positions, cos, sin, offset, q_norm, k_norm, sinks, k_cache, v_cache, k_scale, v_scale,
                     out, part_stats, part_accs, semaphore, T, L, position_stride, scale, growth, original, eps,
                     G: constexpr, K: constexpr, E: constexpr, PAIRS: constexpr, GROWS: constexpr, BE: constexpr,
                     WINDOW: constexpr, NEW: constexpr, BH: constexpr,
                     SPLITS: constexpr, SPLIT_SLOTS: constexpr, BM: constexpr, BR: constexpr, BT: constexpr,
                     BL: constexpr, BS: constexpr, STAGES: constexpr, PDL: constexpr):
    """Program (b * K + kv head, block of BM pairs, split).

    NEW: q is [B, T, H + 2K, E] fresh from the product, and the cache lacks its keys and values. BH: 0, or q_norm and
    k_norm are of all heads together, and this is H E, rounded up to a power of two.
    Otherwise q is [B, T, H, E], after rope, and the cache is complete.
    It is longer than a screen because the first pass of the loop must hold all that waits for the kernel before: there
    the compiler puts the first tiles' loads ahead of the wait."""
    group = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    b = group // K
    kv = group % K
    if PDL:
        gdc_launch_dependents()
    H: constexpr = K * G
    HEADS: constexpr = H + 2 * K if NEW else H  # of a token in q
    e = tl.arange(0, BE)
    partner = partner_of(e, PAIRS)
    pair = block * BM + tl.arange(0, BM)
    t = tl.minimum(pair // G, T - 1)
    pair_mask = (pair < T * G)[:, None] & (e < E)[None, :]
    q_rows = q + (((b * T + t) * HEADS + kv * G + pair % G) * E)[:, None]

    # Positions were there before the first layer, and old slots before this step: loading them need not wait.
    positions += b * position_stride
    position = tl.load(positions + t)
    first_position = tl.load(positions + block * BM // G)
    if NEW:
        end = first_position
        n = tl.arange(0, BT)
        new_mask = (n < T)[:, None] & (e < E)[None, :]
        new_position = tl.load(positions + n, mask=n < T, other=0)
        new_rows = q + (((b * T + n) * HEADS + H + kv) * E)[:, None]
        if offset is not None:  # where the sequence's table begins
            cos += tl.load(offset + b) * E
            sin += tl.load(offset + b) * E
        cos_q, sin_q = load_rope(cos, sin, position, e, pair_mask, E)
        cos_k, sin_k = load_rope(cos, sin, new_position, e, new_mask, E)
    else:
        end = tl.load(positions + tl.minimum((block * BM + BM - 1) // G, T - 1)) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BL * BL
    splits = tl.minimum(tl.maximum(tl.cdiv(end - begin, SPLIT_SLOTS), 1), SPLITS)  # those that have work
    if split >= splits:  # not after split_slots(): prefill would take 236 registers instead of 220 (Triton 3.6, sm_90)
        return
    start, stop = split_slots(begin, end, split, splits, BL)

    cache_row = group.to(tl.int64) * L * E
    queries = tl.zeros((BM, BE), out.dtype.element_ty)
    row_max = tl.full((BM,), -1e30, tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    if sinks is not None:  # what one more slot with this score and no value would leave, once
        row_max = tl.where(split == 0, tl.load(sinks + kv * G + pair % G).to(tl.float32) * 1.4426950408889634, row_max)
        row_sum += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros((BM, BE), tl.float32)
    for l0 in tl.range(start, tl.maximum(stop, start + 1), BL, num_stages=STAGES):
        slot = l0 + tl.arange(0, BL)
        k = tl.load(k_cache + cache_row + slot[None, :] * E + e[:, None],
                    mask=(slot < stop)[None, :] & (e < E)[:, None], other=0)
        v = tl.load(v_cache + cache_row + slot[:, None] * E + e[None, :],
                    mask=(slot < stop)[:, None] & (e < E)[None, :], other=0)
        k_s, v_s = None, None
        if k_scale is not None:
            k_s = tl.load(k_scale + group.to(tl.int64) * L + slot, mask=slot < stop, other=0)
        if v_scale is not None:
            v_s = tl.load(v_scale + group.to(tl.int64) * L + slot, mask=slot < stop, other=0)
        if l0 == start:
            if PDL:
                gdc_wait()
            queries = tl.load(q_rows + e[None, :], mask=pair_mask, other=0)
            if NEW:
                has_new = split == splits - 1  # the last split's program attends to the new tokens, too
                load_new = new_mask & has_new
                swapped = tl.load(q_rows + partner[None, :], mask=pair_mask, other=0)
                new_k = tl.load(new_rows + e[None, :], mask=load_new, other=0)
                swapped_k = tl.load(new_rows + partner[None, :], mask=load_new, other=0)
                new_v = tl.load(new_rows + K * E + e[None, :], mask=load_new, other=0)
                q_square = None
                if BH > 0:
                    q_square = mean_squares(q + b * T * HEADS * E, HEADS * E, t, T, H * E, BH)
                queries = rope(queries, swapped, e, cos_q, sin_q, q_norm, kv * G + pair % G, q_square, eps, E, PAIRS)
                if GROWS:
                    queries *= (1 + growth * tl.log(1.0 + position // original))[:, None]
                queries = queries.to(out.dtype.element_ty)
                if has_new:
                    k_square = None
                    if BH > 0:
                        k_square = mean_squares(q + (b * T * HEADS + H) * E, HEADS * E, n, T, K * E, BH)
                    keys = rope(new_k, swapped_k, e, cos_k, sin_k, k_norm, kv + n * 0, k_square, eps, E, PAIRS)
                    at = n, new_position, new_mask
                    keys = store_new(keys.to(out.dtype.element_ty), k_cache, k_scale, group, L, T, at, e, E)
                    values = store_new(new_v, v_cache, v_scale, group, L, T, at, e, E)
                    seen = (n < T)[None, :] & visible(new_position, position, WINDOW)
                    row_max, row_sum, acc = softmax_tile(queries, tl.trans(keys), values, None, None, seen, scale,
                                                         row_max, row_sum, acc)
        seen = (slot < stop)[None, :] & visible(slot, position, WINDOW)
        row_max, row_sum, acc = softmax_tile(queries, k, v, k_s, v_s, seen, scale, row_max, row_sum, acc)

    if splits == 1:
        y = acc / row_sum[:, None]
        rows = out + (((b * T + t) * H + kv * G + pair % G) * E)[:, None]
        tl.store(rows + e[None, :], y.to(out.dtype.element_ty), mask=pair_mask)
    if SPLITS > 1:
        if splits > 1:
            store_part(part_stats, part_accs, group * SPLITS + split, row_max, row_sum, acc, BR, BE)
            if last_arriver(semaphore + group, splits):
                i = tl.arange(0, BR)  # BR <= BM pairs, as the block is the only one
                y = combine_parts(part_stats, part_accs, group * SPLITS, splits, i, i < T * G, BE, BS)
                rows = out + (((b * T + i // G) * H + kv * G + i % G) * E)[:, None]
                tl.store(rows + e[None, :], y.to(out.dtype.element_ty), mask=(i < T * G)[:, None] & (e < E)[None, :])


def few_pairs(T: int, G: int) -> bool:
    """Whether memory is the limit, not arithmetic: one block then holds all pairs. update_and_attend() wants it so."""
    return T <= 16 and T * G <= 64


def launch_attention(q: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                     v_scale: Tensor | None, semaphore: Tensor, window: int, scale: float | None, heads: int,
                     cos: Tensor | None = None, sin: Tensor | None = None, sinks: Tensor | None = None,
                     offset: Tensor | None = None, pairs: int = 0, growth: float = 0.0,
                     original: int = 1,
                     q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """With cos and sin: q is a fresh qkv [B, T, H + 2K, E]. Without: q [B, T, H, E] is after rope, and the cache is
    complete. heads: H -> [B, T, H, E]."""
    B, T = q.shape[:2]
    K, L, E = k_cache.shape[1:]
    G = heads // K
    new = cos is not None
    BL, BE = 64, max(16, triton.next_power_of_2(E))  # 16: the least inner dimension of tl.dot
    if few_pairs(T, G):
        BR, BT = triton.next_power_of_2(T * G), max(16, triton.next_power_of_2(T))
        BM, warps, stages = max(16, BR), 4, 2
        splits = max(1, min(64, 2 * gpu(q.device).multi_processor_count // (B * K)))
    else:
        BM, BR, BT, warps, stages, splits = 128, 128, 16, 8, 3, 1
    part_stats = part_accs = None
    if splits > 1:
        part_stats = torch.empty(B * K * splits * BR * 2, device=q.device)
        part_accs = torch.empty(B * K * splits * BR * BE, device=q.device)
    out = q.new_empty(B, T, heads, E)
    whole_norm = q_norm is not None and len(q_norm) > E
    position_stride = positions.stride(0) if len(positions) > 1 else 0  # 0: one row of positions serves all sequences
    scale = (E ** -0.5 if scale is None else scale) / math.log(2)
    # The kernel reads the cache before it waits for the kernel before it. Where that one stored keys and values, this
    # one must not start early.
    pdl = pdl_options(q.device) if new else {}
    attention_kernel[(B * K, triton.cdiv(T * G, BM), splits)](
        q, positions, cos, sin, offset, q_norm, k_norm, sinks, k_cache, v_cache, k_scale, v_scale, out, part_stats,
        part_accs, semaphore,
        T, L, position_stride, scale, growth, original, eps, G=G, K=K, E=E, PAIRS=pairs, GROWS=growth != 0, BE=BE,
        WINDOW=window, NEW=new, BH=triton.next_power_of_2(heads * E) if whole_norm else 0, SPLITS=splits,
        SPLIT_SLOTS=256, BM=BM, BR=BR, BT=BT, BL=BL, BS=max(1, 8192 // (BR * BE)), STAGES=stages, PDL=bool(pdl),
        num_warps=warps, **pdl)
    return out


@library.custom_op("llama_fast::attend", mutates_args=("semaphore",), device_types="cuda")
def attend(q: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
           v_scale: Tensor | None, semaphore: Tensor, window: int, scale: float | None = None,
           sinks: Tensor | None = None) -> Tensor:
    """q [B, T, H, E], after norm and rope; the tokens' keys and values are in the cache -> [B, T, H, E].

    The other arguments are update_and_attend()'s."""
    return launch_attention(q.contiguous(), positions, k_cache, v_cache, k_scale, v_scale, semaphore, window, scale,
                            q.shape[2], sinks=sinks)


@attend.register_fake
def _(q, positions, k_cache, v_cache, k_scale, v_scale, semaphore, window, scale=None, sinks=None):
    return q.new_empty(q.shape)


@library.custom_op("llama_fast::update_and_attend", device_types="cuda",
                   mutates_args=("k_cache", "v_cache", "k_scale", "v_scale", "semaphore"))
def update_and_attend(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
                      k_scale: Tensor | None, v_scale: Tensor | None, semaphore: Tensor,
                      q_norm: Tensor | None = None, k_norm: Tensor | None = None,
                      sinks: Tensor | None = None, offset: Tensor | None = None, window: int = 0, eps: float = 1e-5,
                      scale: float | None = None, pairs: int = 0, growth: float = 0.0, original: int = 1) -> Tensor:
    """Norms (if there are norms) and turns queries and keys, stores keys and values in the cache, and attends.

    qkv [B, T, H + 2K, E], fresh from the product, of few_pairs(); positions [B, T], or [1, T] for all sequences, of
    which those of one sequence follow one another; k_cache, v_cache [>= B, K, L, E], whose first B rows are used, and
    k_scale, v_scale fp32 [>= B, K, L] of those that are int8;
    q_norm, k_norm [E], or [H E] and [K E] of all heads together -> [B, T, H, E].
    A token sees the slots up to its own position, of these the last `window` unless that is 0. The kernel finds the
    slots in use by itself, and nothing of T x L elements is ever in memory. scale: of q k^T, None for E ** -0.5.
    Rope turns element i < pairs with i + pairs. cos, sin [any, E]: a sequence's begin at row offset [>= B, 1], or 0.
    growth, original: model.Rope's q_growth and original. sinks [H]: one more score of each head, whose value is 0.
    semaphore: int32 zeros [>= B * K]; they are zeros again afterwards."""
    heads = qkv.shape[2] - 2 * k_cache.shape[1]
    return launch_attention(qkv.contiguous(), positions, k_cache, v_cache, k_scale, v_scale, semaphore, window, scale,
                            heads, cos, sin, sinks, offset, pairs, growth, original, q_norm, k_norm, eps)


@update_and_attend.register_fake
def _(qkv, positions, cos, sin, k_cache, v_cache, k_scale, v_scale, semaphore, q_norm=None, k_norm=None, *_, **__):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * k_cache.shape[1], qkv.shape[3])

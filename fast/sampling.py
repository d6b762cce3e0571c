"""
Kernels of sampling and of speculative acceptance: no sort, and the host waits for nothing.

The kernels read the settings from a tensor on the GPU: fp32 [7] with temperature, top-k, top-p and
min-p. So a CUDA graph serves all settings. Behind them stand Sampling.penalties, which
generate.penalize() reads before the kernels. Each row of logits is divided among many programs:

    count_kernel    how many tokens have which logit
    cut_kernel      which logit is the least that is kept; alone it has a program for a row
    draw_kernel     the probabilities, and a token drawn from them: the best of each block of
                    logits; a row's last program chooses among these
    accept_kernel   whether drafted tokens are kept, and the one behind them

16-bit logits have 65,536 values at most. Top-k, top-p and min-p all keep the tokens whose logit is
at least one of these values, and tokens with the same logit have the same probability. So the
counts of the values say all that the cut depends on, without a sort:

    key            0 . . . . . . . . f . . . . p . 65535    f: the least that is kept, the floor
    counts         3 0 9 4 7 0 2 5 1 2 0 1 0 0 1 0 0        p: that of the largest logit

Counts are integers, so programs may add them up in any order: the same logits give the same bits,
in a batch and on several ranks.

A draw is an exponential race (the Gumbel-max trick): with exponential noise n of rate 1, argmax p /
n is token i with probability p[i]. The noise is made outside the kernels, by PyTorch's generator.

Shapes: B sequences, R rows, V vocabulary, k drafted tokens, T = k + 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fast.common import (
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    last_arriver,
    pdl_options,
    tl,
    triton,
)
from fast.known import unknown_values
from fast.twins import plain_distribute, plain_sample
from generate import Sampling
from quantize import say_once


def make_settings(sampling: Sampling, device: torch.device) -> Tensor | None:
    """What the kernels read: fp32 [7]. None, and a line on stderr, where a field that they do not
    know has another value than its default."""
    if unknown := unknown_values(sampling):
        say_once(f"plain PyTorch samples: fast/ does not know {', '.join(unknown)}")
        return None
    temperature = 0.0 if sampling.greedy else sampling.temperature
    cuts = max(sampling.top_k, 0), sampling.top_p, sampling.min_p
    penalties = sampling.penalties or (1, 0, 0)
    return torch.tensor([temperature, *cuts, *penalties], dtype=torch.float32, device=device)


@jit
def read_settings(settings, V):
    """temperature (0: greedy), top_k (an integer, 0: off), top_p (1: off), min_p (0: off). Greedy,
    the rest is off."""
    temperature = tl.load(settings)
    top_k = tl.load(settings + 1)
    top_p = tl.load(settings + 2)
    min_p = tl.load(settings + 3)
    greedy = temperature < 1e-5
    top_k = tl.where(greedy | (top_k >= V), 0.0, top_k).to(tl.int32)
    return (
        tl.where(greedy, 0.0, temperature),
        top_k,
        tl.where(greedy, 1.0, top_p),
        tl.where(greedy, 0.0, min_p),
    )


@jit
def sortable_key(logits):
    """16-bit floats as integers 0 .. 65535 in the same order."""
    bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFF, bits) + 0x8000


@jit
def place_of(key):
    """Where a row's counts have a key. Neighbouring keys are 1 KB apart. A row's logits are close to
    each other, and additions to places in one sector of the L2 cache wait for each other. Counting
    248,320 logits takes an H200 4.6 us; with neighbours side by side it took 27."""
    return (key & 255) * 256 + (key >> 8)


@jit
def kth_largest(counts, k):
    """counts [256] of the values 0 .. 255 -> the k-th largest value, and how many values are
    larger."""
    larger = tl.sum(counts) - tl.cumsum(counts)  # of each value, how many are larger
    value = tl.sum((larger >= k).to(tl.int32))
    return value, tl.sum(tl.where(tl.arange(0, 256) > value, counts, 0))


@jit
def logit_of(key, dtype: constexpr):
    """The 16-bit float of a sortable_key(), in fp32."""
    bits = key - 0x8000
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@jit
def count_kernel(logits, counts, V, BV: constexpr, PDL: constexpr):
    """Program (row, block of BV logits): adds its block to counts int32 [R, 65536 + 256]: how many
    logits have each key, at place_of(), and behind these how many have each high byte."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    x = tl.load(logits + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    # A NaN of either sign is the largest: else a negative one would go unnoticed.
    exact = x.to(tl.float32)
    key = tl.where(exact == exact, sortable_key(x), 0xFFFF)
    counts += row.to(tl.int64) * (65536 + 256)
    counted = x != float("-inf")  # the others' probability is 0, and they may be many
    tl.atomic_add(counts + place_of(key), 1, mask=counted, sem="relaxed")
    found = tl.histogram(key >> 8, 256, mask=counted)
    bins = tl.arange(0, 256)
    tl.atomic_add(counts + 65536 + bins, found, mask=found > 0, sem="relaxed")


@jit
def rows_of(counts, coarse, rank, chunk, ROWS: constexpr):
    """Of the high bytes that some token has, from the largest down, the chunk-th ROWS -> their keys
    [ROWS, 256], and how many tokens have them. rank [256]: which one a high byte is."""
    bins = tl.arange(0, 256)
    nth = chunk * ROWS + tl.arange(0, ROWS)
    is_nth = (rank[None, :] == nth[:, None]) & (coarse > 0)[None, :]
    high = tl.sum(tl.where(is_nth, bins[None, :], 0), 1)
    there = tl.sum(is_nth.to(tl.int32), 1) > 0
    key = high[:, None] * 256 + bins[None, :]
    return key, tl.load(counts + place_of(key), mask=there[:, None], other=0)


@jit
def mass_of(key, count, peak, temperature, floor, least, dtype: constexpr):
    """The mass of the tokens of some keys, count * exp((logit - peak) / temperature): 0 where the key
    is below `floor`, or that exponential below `least`."""
    weight = tl.exp((logit_of(key, dtype) - peak) / temperature)
    return tl.where((count > 0) & (key >= floor) & (weight >= least), count * weight, 0.0)


@jit
def nucleus(
    counts, coarse, rank, n, goal, peak, temperature, floor, dtype: constexpr, ROWS: constexpr
):
    """The largest key, `floor` at least, such that the tokens of that key and of larger ones have a
    mass of `goal`."""
    bins = tl.arange(0, 256)
    above = peak * 0
    found = floor
    for chunk in range(tl.cdiv(n, ROWS)):
        if above < goal:
            key, count = rows_of(counts, coarse, rank, chunk, ROWS)
            mass = mass_of(key, count, peak, temperature, floor, 0.0, dtype)
            of_rows = tl.sum(mass, 1)
            with_row = above + tl.cumsum(of_rows)
            in_row = (with_row >= goal) & (with_row - of_rows < goal)  # of one row at most
            before = tl.sum(tl.where(in_row, with_row - of_rows, 0.0))
            of_row = tl.sum(tl.where(in_row[:, None], mass, 0.0), 0)
            reached = before + tl.cumsum(of_row, reverse=True) >= goal
            low = tl.max(tl.where(reached, bins, 0))
            first = tl.max(tl.where(in_row[:, None], key - bins[None, :], 0))
            found = tl.maximum(found, tl.where(first > 0, first + low, 0))
            above += tl.sum(of_rows)
    return found


@jit
def cut_kernel(logits, settings, counts, cuts, V, ROWS: constexpr, PDL: constexpr):
    """Program (row): of counts [R, 65536 + 256], cuts [R, 4]: the largest logit, the logsumexp of the
    raw logits, the floor, the mass of the tokens that are kept."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    counts += row.to(tl.int64) * (65536 + 256)
    coarse = counts + 65536
    cuts += row * 4
    dtype: constexpr = logits.dtype.element_ty
    temperature, top_k, top_p, min_p = read_settings(settings, V)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    bins = tl.arange(0, 256)
    if PDL:
        gdc_wait()
    coarse = tl.load(coarse + bins)
    some = (coarse > 0).to(tl.int32)
    n = tl.sum(some)
    rank = n - tl.cumsum(some)
    high = tl.max(some * bins)
    low = tl.max(tl.where(tl.load(counts + place_of(high * 256 + bins)) > 0, bins, 0))
    peak = logit_of(high * 256 + low, dtype)
    floor = high * 0
    if top_k > 0:
        high, larger = kth_largest(coarse, top_k)
        low, _ = kth_largest(tl.load(counts + place_of(high * 256 + bins)), top_k - larger)
        floor = high * 256 + low
    least = tl.where(top_p < 1, 0.0, min_p)
    raw = tl.zeros((ROWS, 256), tl.float32)
    kept = tl.zeros((ROWS, 256), tl.float32)
    for chunk in range(tl.cdiv(n, ROWS)):
        key, count = rows_of(counts, coarse, rank, chunk, ROWS)
        raw += mass_of(key, count, peak, 1.0, 0, 0.0, dtype)
        kept += mass_of(key, count, peak, temperature, floor, least, dtype)
    total = tl.sum(kept)
    if top_p < 1:
        goal = top_p * total
        floor = nucleus(counts, coarse, rank, n, goal, peak, temperature, floor, dtype, ROWS)
        kept = tl.zeros((ROWS, 256), tl.float32)
        for chunk in range(tl.cdiv(n, ROWS)):
            key, count = rows_of(counts, coarse, rank, chunk, ROWS)
            kept += mass_of(key, count, peak, temperature, floor, min_p, dtype)
        total = tl.sum(kept)
    tl.store(cuts, peak)
    tl.store(cuts + 1, peak + tl.log(tl.sum(raw)))
    tl.store(cuts + 2, floor.to(tl.float32))
    tl.store(cuts + 3, total)


@jit
def best_of_block(score, v, V):
    """The largest score of a block, and the first token that has it, as the bits of a float."""
    best = tl.max(score, 0)
    token = tl.min(tl.where((score == best) & (v < V), v, V), 0)
    return best, token.to(tl.float32, bitcast=True)


@jit
def best_of_blocks(bests, blocks, V, STRIDE: constexpr, BP: constexpr):
    """bests [blocks, STRIDE] of a row, each begins with what best_of_block() returns -> the largest
    score, and its token."""
    p = tl.arange(0, BP)
    scores = tl.load(bests + p * STRIDE, mask=p < blocks, other=float("-inf"))
    tokens = tl.load(bests + p * STRIDE + 1, mask=p < blocks, other=0).to(tl.int32, bitcast=True)
    best = tl.max(scores, 0)
    token = tl.min(tl.where((scores == best) & (p < blocks), tokens, V), 0)
    return best, tl.minimum(token, V - 1)  # with a NaN, which equals nothing, no token is left


@jit
def draw_kernel(
    logits,
    noise,
    settings,
    cuts,
    semaphore,
    bests,
    probs,
    tokens,
    totals,
    V,
    PROBS: constexpr,
    BV: constexpr,
    BP: constexpr,
    PDL: constexpr,
):
    """Program (row, block of BV logits): their probabilities, and the best token of the block; a
    row's last program chooses among the bests, fp32 [R, blocks, 2]. BP: the number of blocks,
    rounded up to a power of two.

    PROBS: distribute(), and totals is the row's logsumexp. Otherwise sample(), and totals is the
    token's log-probability."""
    temperature, _, _, min_p = read_settings(settings, V)
    row = tl.program_id(0)
    blocks = tl.num_programs(1)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    at = row.to(tl.int64) * V + v
    x = tl.load(logits + at, mask=v < V, other=float("-inf"))
    if PDL:
        gdc_wait()
    peak = tl.load(cuts + row * 4)
    floor = tl.load(cuts + row * 4 + 2).to(tl.int32)
    if temperature == 0:
        score = tl.where(x.to(tl.float32) == peak, 1.0, 0.0)
        p = score * 0  # of the likeliest, the first of them, it is 1: see below
    else:
        weight = tl.exp((x.to(tl.float32) - peak) / temperature)
        p = tl.where((sortable_key(x) >= floor) & (weight >= min_p), weight, 0.0)
        p = p / tl.load(cuts + row * 4 + 3)
        score = p
        if noise is not None:
            score = p / tl.load(noise + at, mask=v < V, other=1)
    if PROBS:
        tl.store(probs + at, p, mask=v < V)
    best, token = best_of_block(tl.where(v < V, score, -1.0), v, V)
    mine = bests + (row * blocks + tl.program_id(1)) * 2
    tl.store(mine, best)
    tl.store(mine + 1, token)
    if last_arriver(semaphore + row, blocks):
        _, chosen = best_of_blocks(bests + row * blocks * 2, blocks, V, 2, BP)
        at_chosen = row.to(tl.int64) * V + chosen
        tl.store(tokens + row, chosen)
        total = tl.load(cuts + row * 4 + 1)
        if PROBS:
            if temperature == 0:
                tl.store(probs + at_chosen, 1.0)
        else:
            total = tl.load(logits + at_chosen).to(tl.float32) - total
        tl.store(totals + row, total)


BLOCK = 1024  # logits of a program: a row of 32,000 takes less time than in blocks of 4,096 (H200)
MOST_ROWS = 512  # at once, as their counts take 135 MB


def launch_draw(
    logits: Tensor,
    noise: Tensor | None,
    settings: Tensor,
    probs: Tensor | None,
    totals: Tensor,
    tokens: Tensor,
) -> None:
    R, V = logits.shape
    if R > MOST_ROWS:
        for i in range(0, R, MOST_ROWS):
            at = slice(i, i + MOST_ROWS)
            noise_at, probs_at = (x if x is None else x[at] for x in (noise, probs))
            launch_draw(logits[at], noise_at, settings, probs_at, totals[at], tokens[at])
        return
    blocks = triton.cdiv(V, BLOCK)
    zeros = torch.zeros(R * (65536 + 256 + 1), dtype=torch.int32, device=logits.device)
    semaphore, counts = zeros[:R], zeros[R:]
    cuts, bests = (torch.empty(R * n, device=logits.device) for n in (4, 2 * blocks))
    grid, pdl = (R, blocks), pdl_options(logits.device)
    PDL = bool(pdl)
    count_kernel[grid](logits, counts, V, BV=BLOCK, PDL=PDL, num_warps=4)
    cut_kernel[(R,)](logits, settings, counts, cuts, V, ROWS=8, PDL=PDL, num_warps=8, **pdl)
    draw_kernel[grid](
        *(logits, noise, settings, cuts, semaphore, bests, probs, tokens, totals, V),
        PROBS=probs is not None,
        BV=BLOCK,
        BP=triton.next_power_of_2(blocks),
        PDL=PDL,
        num_warps=4,
        **pdl,
    )


def sample(logits: Tensor, noise: Tensor, settings: Tensor) -> tuple[Tensor, Tensor]:
    """16-bit logits [B, V] -> tokens [B] and their log-probabilities [B] under the raw logits.

    noise [B, V]: exponential, of rate 1. torch.topk alone takes 65 us for 32,000 logits on an
    H200."""
    if not logits.is_cuda:
        return plain_sample(logits, noise, settings)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), device=logits.device)
    launch_draw(logits.contiguous(), noise, settings, None, logprobs, tokens)
    return tokens, logprobs


def exponential(like: Tensor) -> Tensor:
    """Exponential noise of rate 1, fp32, in the shape of `like`."""
    return torch.empty_like(like, dtype=torch.float32).exponential_()


def distribute(
    logits: Tensor, noise: Tensor | None, settings: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """16-bit logits [R, V] -> generate.probabilities() [R, V], logsumexp [R] of the raw logits, and
    tokens [R] drawn from the probabilities.

    noise [R, V]: exponential, of rate 1; None: tokens are the likeliest."""
    if not logits.is_cuda:
        return plain_distribute(logits, noise, settings)
    R, V = logits.shape
    probs = torch.empty(R, V, device=logits.device)
    logsumexp = torch.empty(R, device=logits.device)
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    launch_draw(logits.contiguous(), noise, settings, probs, logsumexp, tokens)
    return probs, logsumexp, tokens


@jit
def accept_kernel(
    logits,
    p,
    logsumexp,
    tokens,
    q,
    proposed,
    uniform,
    noise,
    semaphore,
    bests,
    out,
    logprobs,
    accepted,
    k,
    V,
    BT: constexpr,
    BV: constexpr,
    BP: constexpr,
):
    """speculative.accept(). Program (sequence, block of BV tokens): each finds which drafted tokens
    are kept, position i of 0 .. k holds drafted token i + 1, and the best of its block for the one
    behind them, of max(p - q, 0) and of p; a sequence's last program chooses among the bests, fp32
    [B, blocks, 4]: of p where nothing is left of p - q.

    logits, p, q [B, k + 1, V]; logsumexp, tokens, out, logprobs [B, k + 1]; uniform [B, k]; noise
    [B, V]. Greedy, p is 1 for one token, and no noise changes what is drawn."""
    b = tl.program_id(0)
    blocks = tl.num_programs(1)
    i = tl.arange(0, BT)
    drafted = tl.load(tokens + b * (k + 1) + 1 + i, mask=i < k, other=0)
    at = (b * (k + 1) + i).to(tl.int64) * V + drafted
    p_x = tl.load(p + at, mask=i < k, other=0)
    q_x = tl.load(q + at, mask=i < k, other=0)
    count = tl.load(proposed + b)
    kept = (tl.load(uniform + b * k + i, mask=i < k, other=0) * q_x < p_x) & (i < count)
    # The first position whose token is not kept, or k.
    n = tl.min(tl.where(kept & (i < k), k, tl.minimum(i, k)), 0)

    v = tl.program_id(1) * BV + tl.arange(0, BV)
    at = (b * (k + 1) + n).to(tl.int64) * V + v
    p_v = tl.load(p + at, mask=v < V, other=0)
    q_v = tl.load(q + at, mask=(v < V) & (n < count), other=0)
    noise_v = tl.load(noise + b.to(tl.int64) * V + v, mask=v < V, other=1)
    mine = bests + (b * blocks + tl.program_id(1)) * 4
    best, token = best_of_block(tl.where(v < V, tl.maximum(p_v - q_v, 0) / noise_v, -1.0), v, V)
    tl.store(mine, best)
    tl.store(mine + 1, token)
    best, token = best_of_block(tl.where(v < V, p_v / noise_v, -1.0), v, V)
    tl.store(mine + 2, best)
    tl.store(mine + 3, token)
    if last_arriver(semaphore + b, blocks):
        bests += b * blocks * 4
        left, new = best_of_blocks(bests, blocks, V, 4, BP)
        _, new_p = best_of_blocks(bests + 2, blocks, V, 4, BP)
        text = tl.where(i == n, tl.where(left > 0, new, new_p), drafted)
        place = b * (k + 1) + i
        tl.store(accepted + b, n)
        tl.store(out + place, text, mask=i <= k)
        raw = tl.load(logits + place.to(tl.int64) * V + text, mask=i <= k, other=0).to(tl.float32)
        raw -= tl.load(logsumexp + place, mask=i <= k, other=0)
        tl.store(logprobs + place, raw, mask=i <= k)


def fast_choose(logits: Tensor, settings: Tensor) -> tuple[Tensor, Tensor]:
    """generate.choose() with the kernels: 16-bit logits [B, V] -> tokens [B] and their
    log-probabilities [B]."""
    return sample(logits, exponential(logits), settings)


def fast_choose_draft(logits: Tensor, vocab_size: int, settings: Tensor) -> tuple[Tensor, Tensor]:
    """speculative.choose_draft() with the kernel: a draft's logits [B, T, any] -> tokens [B], q [B,
    vocab_size]."""
    logits = logits[:, -1, :vocab_size]
    q, _, tokens = distribute(logits, exponential(logits), settings)
    missing = vocab_size - q.shape[-1]
    return tokens, F.pad(q, (0, missing)) if missing else q


def fast_accept(
    logits: Tensor, tokens: Tensor, q: Tensor, proposed: Tensor, settings: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """speculative.accept(), its plain twin, for CUDA tensors.

    16-bit logits [B, T, V], tokens [B, T], q [B, T, V], proposed [B] -> tokens [B, T],
    log-probabilities [B, T], accepted [B]."""
    B, T, V = logits.shape
    logits, q = logits.contiguous(), q.contiguous()
    p, logsumexp, _ = distribute(logits.view(-1, V), None, settings)
    uniform = torch.rand(B, T - 1, device=q.device)
    noise = exponential(q[:, 0])
    out = torch.empty_like(tokens)
    logprobs = logsumexp.new_empty(B, T)
    accepted = proposed.new_empty(B)
    blocks = triton.cdiv(V, BLOCK)
    semaphore = torch.zeros(B, dtype=torch.int32, device=q.device)
    bests = torch.empty(B * blocks * 4, device=q.device)
    accept_kernel[(B, blocks)](
        *(logits, p, logsumexp, tokens.contiguous(), q, proposed, uniform, noise),
        *(semaphore, bests, out, logprobs, accepted, T - 1, V),
        BT=triton.next_power_of_2(T),
        BV=BLOCK,
        BP=triton.next_power_of_2(blocks),
        num_warps=4,
    )
    return out, logprobs, accepted

"""
Kernels of sampling and of speculative acceptance: no sort, and the host waits for nothing.

The kernels read the settings from a tensor on the GPU: fp32 [7] with temperature, top-k, top-p and
min-p. So a CUDA graph serves all settings. Behind them stand Sampling.penalties, which
generate.penalize() reads before the kernels. sample() launches its kernels always, and those that
the settings do not want return at once:

    histogram_kernel     twice, for top-k alone
    choose_kernel        temperature and top-k: many programs for each row
    distribution_kernel  top-p and min-p, which need a row's whole distribution: one program for
                         each row

Top-k without a sort: 16-bit logits have 65,536 values at most. Two histograms of 256 bins, first of
the high bytes and then of the low bytes under the k-th largest logit's high byte, give the k-th
largest logit itself.

    high byte      0 . . . . . . . h . . . 255    h: that of the k-th largest, by sums from the
                                   |              right
    low byte           0 . . . . . l . . . 255    of the logits with high byte h alone

Top-p, and distribution_kernel()'s top-k, without a sort: a search for the largest logit such that
it and the larger ones have mass p, or are k in number, two bits a pass.

A draw is an exponential race (the Gumbel-max trick): with exponential noise n of rate 1, argmax p /
n is token i with probability p[i], and so is argmax log p - log n. The noise is made outside the
kernels, by PyTorch's generator.

Shapes: B sequences, R rows, V vocabulary, k drafted tokens, T = k + 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fast.common import constexpr, jit, last_arriver, tl, triton
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
def kth_largest(counts, k):
    """counts [256] of the values 0 .. 255 -> the k-th largest value, and how many values are
    larger."""
    larger = tl.sum(counts) - tl.cumsum(counts)  # of each value, how many are larger
    value = tl.sum((larger >= k).to(tl.int32))
    return value, tl.sum(tl.where(tl.arange(0, 256) > value, counts, 0))


@jit
def histogram_kernel(logits, settings, counts, V, LOW: constexpr, BV: constexpr):
    """Program (row, block of BV logits): adds its block to counts [B, 2, 256], of high bytes or,
    LOW, of low bytes.

    LOW: the high bytes are counted, and only logits count whose high byte is that of the top_k-th
    largest."""
    temperature, top_k, top_p, min_p = read_settings(settings, V)
    if (top_k == 0) | (top_p < 1) | (min_p > 0):
        return
    row = tl.program_id(0)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    key = sortable_key(tl.load(logits + row.to(tl.int64) * V + v, mask=v < V, other=0))
    bins = tl.arange(0, 256)
    counts += row * 512
    if LOW:
        high, _ = kth_largest(tl.load(counts + bins), top_k)
        found = tl.histogram(key & 255, 256, mask=(v < V) & (key >> 8 == high))
        counts += 256
    else:
        found = tl.histogram(key >> 8, 256, mask=v < V)
    tl.atomic_add(counts + bins, found, mask=found > 0, sem="relaxed")


@jit
def kth_largest_key(counts, top_k):
    """counts [2, 256] of a row, both halves filled by histogram_kernel() -> the key of the top_k-th
    largest logit."""
    bins = tl.arange(0, 256)
    high, larger = kth_largest(tl.load(counts + bins), top_k)
    low, _ = kth_largest(tl.load(counts + 256 + bins), top_k - larger)
    return high * 256 + low


@jit
def best_of_blocks(bests, blocks, V, BP: constexpr):
    """bests [blocks, 4] of a row, as choose_kernel() leaves them -> the best token, and the
    logsumexp of the row."""
    p = tl.arange(0, BP)
    scores = tl.load(bests + p * 4, mask=p < blocks, other=float("-inf"))
    tokens = tl.load(bests + p * 4 + 1, mask=p < blocks, other=0).to(tl.int32, bitcast=True)
    peaks = tl.load(bests + p * 4 + 2, mask=p < blocks, other=float("-inf"))
    sums = tl.load(bests + p * 4 + 3, mask=p < blocks, other=0)
    token = tl.min(tl.where((scores == tl.max(scores, 0)) & (p < blocks), tokens, V), 0)
    token = tl.minimum(token, V - 1)  # with a NaN, which equals nothing, no token is left
    peak = tl.max(peaks, 0)
    return token, peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))


@jit
def choose_kernel(
    logits,
    noise,
    settings,
    counts,
    semaphore,
    bests,
    tokens,
    logprobs,
    V,
    BV: constexpr,
    BP: constexpr,
):
    """Program (row, block of BV logits): the best token of its block; a row's last program chooses
    among the bests.

    bests, fp32 [B, blocks, 4]: score, token (the bits of an int32), largest logit, sum of exp(logit
    - largest). BP: the number of blocks, rounded up to a power of two."""
    temperature, top_k, top_p, min_p = read_settings(settings, V)
    if (top_p < 1) | (min_p > 0):
        return
    row = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    v = block * BV + tl.arange(0, BV)
    at = row.to(tl.int64) * V + v
    raw = tl.load(logits + at, mask=v < V, other=float("-inf"))
    x = raw.to(tl.float32)
    score = x
    if temperature > 0:
        score = x / temperature - tl.log(tl.load(noise + at, mask=v < V, other=1))
    if top_k > 0:
        score = tl.where(
            sortable_key(raw) >= kth_largest_key(counts + row * 512, top_k), score, float("-inf")
        )
    best = tl.max(score, 0)
    peak = tl.max(x, 0)
    at = bests + (row * blocks + block) * 4
    tl.store(at, best)
    tl.store(
        at + 1, tl.min(tl.where((score == best) & (v < V), v, V), 0).to(tl.float32, bitcast=True)
    )
    tl.store(at + 2, peak)
    tl.store(at + 3, tl.sum(tl.exp(x - peak), 0))

    if last_arriver(semaphore + row, blocks):
        token, logsumexp = best_of_blocks(bests + row * blocks * 4, blocks, V, BP)
        tl.store(tokens + row, token)
        chosen = tl.load(logits + row.to(tl.int64) * V + token).to(tl.float32)
        tl.store(logprobs + row, chosen - logsumexp)


def sample(logits: Tensor, noise: Tensor, settings: Tensor) -> tuple[Tensor, Tensor]:
    """16-bit logits [B, V] -> tokens [B] and their log-probabilities [B] under the raw logits.

    noise [B, V]: exponential, of rate 1. torch.topk alone takes 65 us for 32,000 logits on an
    H200."""
    if not logits.is_cuda:
        return plain_sample(logits, noise, settings)
    B, V = logits.shape
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(B, device=logits.device)
    # Of 32,000 logits top-k and a draw take 12.5 us, with 4,096 and 8 warps 15.5 (H200).
    block = 1024
    blocks = triton.cdiv(V, block)
    zeros = torch.zeros(B * 513, dtype=torch.int32, device=logits.device)  # in one launch
    counts, semaphore = zeros[: B * 512], zeros[B * 512 :]
    bests = torch.empty(B * blocks * 4, device=logits.device)
    logits = logits.contiguous()
    histogram_kernel[(B, blocks)](logits, settings, counts, V, LOW=False, BV=block, num_warps=4)
    histogram_kernel[(B, blocks)](logits, settings, counts, V, LOW=True, BV=block, num_warps=4)
    choose_kernel[(B, blocks)](
        logits,
        noise,
        settings,
        counts,
        semaphore,
        bests,
        tokens,
        logprobs,
        V,
        BV=block,
        BP=triton.next_power_of_2(blocks),
        num_warps=4,
    )
    launch_distribution(logits, noise, settings, None, logprobs, tokens)
    return tokens, logprobs


@jit
def load_block(at, inside, row, WHOLE: constexpr):
    """The logits of a row at pointers `at`; WHOLE: the program has the row in registers, one block,
    and it is `row`."""
    if WHOLE:
        x = row
    else:
        x = tl.load(at, mask=inside, other=float("-inf"))
    return x


@jit
def threshold(
    logits, row, goal, mass, peak, temperature, floor, V, WHOLE: constexpr, BV: constexpr
):
    """The largest key such that the tokens of that key and of larger ones, none under `floor`,
    reach `goal`.

    They reach it in number or, if `mass`, in the sum of exp((logit - peak) / temperature). A pass
    finds two bits of the key: it sums for three candidates at once."""
    key = floor * 0
    for step in range(8):
        quarter = 16384 >> (2 * step)
        one = tl.zeros((BV,), tl.float32)
        two = tl.zeros((BV,), tl.float32)
        three = tl.zeros((BV,), tl.float32)
        for v0 in range(0, V, BV):
            v = v0 + tl.arange(0, BV)
            x = load_block(logits + v, v < V, row, WHOLE)
            weight = tl.full((BV,), 1.0, tl.float32)
            if mass:
                weight = tl.exp((x.to(tl.float32) - peak) / temperature)
            found = tl.where(v < V, sortable_key(x), -1)
            found = tl.where(found >= floor, found, -1)
            one += tl.where(found >= key + quarter, weight, 0.0)
            two += tl.where(found >= key + 2 * quarter, weight, 0.0)
            three += tl.where(found >= key + 3 * quarter, weight, 0.0)
        reached = (
            (tl.sum(one, 0) >= goal).to(tl.int32)
            + (tl.sum(two, 0) >= goal)
            + (tl.sum(three, 0) >= goal)
        )
        key += reached * quarter
    return tl.maximum(key, floor)


@jit
def peak_and_sum(logits, row, V, WHOLE: constexpr, BV: constexpr):
    """A row's largest logit, the sum of exp(logit - largest), and the first token that has the
    largest logit."""
    v = tl.arange(0, BV)
    largest = row.to(tl.float32)
    for v0 in range(BV, V, BV):
        x = tl.load(logits + v0 + v, mask=v0 + v < V, other=float("-inf"))
        largest = tl.maximum(largest, x.to(tl.float32))
    peak = tl.max(largest, 0)
    total = tl.zeros((BV,), tl.float32)
    first = tl.full((BV,), 2**30, tl.int32)
    for v0 in range(0, V, BV):
        x = load_block(logits + v0 + v, v0 + v < V, row, WHOLE)
        total += tl.exp(x.to(tl.float32) - peak)
        first = tl.where(x.to(tl.float32) == peak, tl.minimum(first, v0 + v), first)
    return peak, tl.sum(total, 0), tl.min(first, 0)


@jit
def kept_weight(x, peak, temperature, floor, least):
    """exp((logit - peak) / temperature) of logits x whose key is `floor` or larger, if it is
    `least` or larger; else 0.

    A token's probability is this, divided by the sum over all tokens; the likeliest has 1."""
    weight = tl.exp((x.to(tl.float32) - peak) / temperature)
    return tl.where((sortable_key(x) >= floor) & (weight >= least), weight, 0.0)


@jit
def kept_mass(logits, row, peak, temperature, floor, least, V, WHOLE: constexpr, BV: constexpr):
    """The sum of kept_weight() over all tokens."""
    v = tl.arange(0, BV)
    kept = tl.zeros((BV,), tl.float32)
    for v0 in range(0, V, BV):
        x = load_block(logits + v0 + v, v0 + v < V, row, WHOLE)
        kept += kept_weight(x, peak, temperature, floor, least)
    return tl.sum(kept, 0)


@jit
def distribution_kernel(
    logits,
    noise,
    settings,
    probs,
    totals,
    tokens,
    V,
    PROBS: constexpr,
    WHOLE: constexpr,
    BV: constexpr,
):
    """A row's distribution and a token drawn from it. A program has a row; WHOLE: it fits into a
    block of BV logits.

    PROBS: distribute(), and totals is the row's logsumexp. Otherwise this is the rest of sample(),
    which has nothing to do without top-p and min-p, and totals is the token's log-probability."""
    temperature, top_k, top_p, min_p = read_settings(settings, V)
    if (top_p == 1) & (min_p == 0) & (not PROBS):
        return
    r = tl.program_id(0)
    logits += r.to(tl.int64) * V
    v = tl.arange(0, BV)
    row = tl.load(logits + v, mask=v < V, other=float("-inf"))
    peak, raw_sum, likeliest = peak_and_sum(logits, row, V, WHOLE, BV)
    logsumexp = peak + tl.log(raw_sum)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)

    floor = r * 0  # the least key that is kept
    total = peak * 0  # the mass that is kept
    parts = tl.where(top_p < 1, 2, 1)
    for part in range(parts):  # top-k, then top-p; with the last of them min-p
        nucleus = part == 1
        if nucleus | (top_k > 0):
            goal = tl.where(nucleus, top_p * total, top_k * 1.0)
            floor = threshold(logits, row, goal, nucleus, peak, temperature, floor, V, WHOLE, BV)
        least = tl.where(part == parts - 1, min_p, 0.0)
        total = kept_mass(logits, row, peak, temperature, floor, least, V, WHOLE, BV)

    best = tl.full((BV,), -1.0, tl.float32)
    token = tl.zeros((BV,), tl.int32)
    for v0 in range(0, V, BV):
        x = load_block(logits + v0 + v, v0 + v < V, row, WHOLE)
        p = kept_weight(x, peak, temperature, floor, min_p) / total
        p = tl.where(greedy, tl.where(v0 + v == likeliest, 1.0, 0.0), p)
        score = p
        if noise is not None:
            score = p / tl.load(noise + r.to(tl.int64) * V + v0 + v, mask=v0 + v < V, other=1)
        score = tl.where(v0 + v < V, score, -1.0)
        token = tl.where(score > best, v0 + v, token)
        best = tl.maximum(score, best)
        if PROBS:
            tl.store(probs + r.to(tl.int64) * V + v0 + v, p, mask=v0 + v < V)
    chosen = tl.min(tl.where(best == tl.max(best, 0), token, V - 1), 0)
    tl.store(tokens + r, chosen)
    if PROBS:
        tl.store(totals + r, logsumexp)
    else:
        tl.store(totals + r, tl.load(logits + chosen).to(tl.float32) - logsumexp)


def launch_distribution(
    logits: Tensor,
    noise: Tensor | None,
    settings: Tensor,
    probs: Tensor | None,
    totals: Tensor,
    tokens: Tensor,
) -> None:
    R, V = logits.shape
    block = min(32768, triton.next_power_of_2(V))
    distribution_kernel[(R,)](
        logits,
        noise,
        settings,
        probs,
        totals,
        tokens,
        V,
        PROBS=probs is not None,
        WHOLE=V <= block,
        BV=block,
        num_warps=max(4, block // 1024),
    )


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
    launch_distribution(logits.contiguous(), noise, settings, probs, logsumexp, tokens)
    return probs, logsumexp, tokens


@jit
def draw_rest(p, q, noise, has_q, V, BV: constexpr):
    """Draws a token from max(p - q, 0) [V] or, where nothing is left of it, from p; has_q: else q
    counts as 0."""
    best = tl.full((BV,), -1.0, tl.float32)  # of p - q
    best_p = tl.full((BV,), -1.0, tl.float32)  # of p
    token = tl.zeros((BV,), tl.int32)
    token_p = tl.zeros((BV,), tl.int32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        p_v = tl.load(p + v, mask=v < V, other=0)
        q_v = tl.load(q + v, mask=(v < V) & has_q, other=0)
        noise_v = tl.load(noise + v, mask=v < V, other=1)
        score = tl.where(v < V, tl.maximum(p_v - q_v, 0) / noise_v, -1.0)
        score_p = tl.where(v < V, p_v / noise_v, -1.0)
        token = tl.where(score > best, v, token)
        token_p = tl.where(score_p > best_p, v, token_p)
        best = tl.maximum(best, score)
        best_p = tl.maximum(best_p, score_p)
    top = tl.max(best, 0)
    drawn = tl.min(tl.where(best == top, token, V - 1), 0)
    drawn_p = tl.min(tl.where(best_p == tl.max(best_p, 0), token_p, V - 1), 0)
    return tl.where(top > 0, drawn, drawn_p)


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
    out,
    logprobs,
    accepted,
    k,
    V,
    BT: constexpr,
    BV: constexpr,
):
    """speculative.accept() of a sequence, which one program has. Position i of 0 .. k holds drafted
    token i + 1.

    logits, p, q [B, k + 1, V]; logsumexp, tokens, out, logprobs [B, k + 1]; uniform [B, k]; noise
    [B, V]. Greedy, p is 1 for one token, and no noise changes what is drawn."""
    b = tl.program_id(0)
    i = tl.arange(0, BT)
    drafted = tl.load(tokens + b * (k + 1) + 1 + i, mask=i < k, other=0)
    at = (b * (k + 1) + i).to(tl.int64) * V + drafted
    p_x = tl.load(p + at, mask=i < k, other=0)
    q_x = tl.load(q + at, mask=i < k, other=0)
    count = tl.load(proposed + b)
    kept = (tl.load(uniform + b * k + i, mask=i < k, other=0) * q_x < p_x) & (i < count)
    # The first position whose token is not kept, or k.
    n = tl.min(tl.where(kept & (i < k), k, tl.minimum(i, k)), 0)
    tl.store(accepted + b, n)

    row = (b * (k + 1) + n).to(tl.int64) * V
    new = draw_rest(p + row, q + row, noise + b.to(tl.int64) * V, n < count, V, BV)
    token = tl.where(i == n, new, drafted)
    at = b * (k + 1) + i
    tl.store(out + at, token, mask=i <= k)
    raw = tl.load(logits + at.to(tl.int64) * V + token, mask=i <= k, other=0).to(tl.float32)
    tl.store(logprobs + at, raw - tl.load(logsumexp + at, mask=i <= k, other=0), mask=i <= k)


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
    """speculative.accept(), its plain twin, in two launches and those of the random numbers; for
    CUDA tensors.

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
    accept_kernel[(B,)](
        logits,
        p,
        logsumexp,
        tokens.contiguous(),
        q,
        proposed,
        uniform,
        noise,
        out,
        logprobs,
        accepted,
        T - 1,
        V,
        BT=triton.next_power_of_2(T),
        BV=min(4096, triton.next_power_of_2(V)),
        num_warps=8,
    )
    return out, logprobs, accepted

"""
Kernels of sampling and of speculative acceptance: no sort, and the host waits for nothing.

choose()'s top-k without a sort: 16-bit logits have 65,536 values at most. Two histograms of 256 bins, first of the high
bytes and then of the low bytes under the k-th largest logit's high byte, give the k-th largest logit itself.

        high byte      0 . . . . . . . h . . . 255        h: the high byte of the k-th largest, by sums from the right
                                       |
        low byte           0 . . . . . l . . . 255        of the logits with high byte h alone

top-p, and distribution()'s top-k, without a sort: a search for the largest logit such that it and the larger ones have
mass p, or are k in number, two bits a pass.

A draw is an exponential race (the Gumbel-max trick): with exponential noise n of rate 1, argmax p / n is token i with
probability p[i], and so is argmax log p - log n. The noise is made outside the kernels, by PyTorch's generator.

Shapes: B sequences, R rows, V vocabulary, k drafted tokens, T = k + 1.
"""
from dataclasses import astuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fast.common import constexpr, jit, last_arriver, tl, triton
from sampling import Sampling, probabilities


@jit
def sortable_key(logits):
    """16-bit floats as integers 0 .. 65535 in the same order."""
    bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7fff, bits) + 0x8000


@jit
def kth_largest(counts, k):
    """counts [256] of the values 0 .. 255 -> the k-th largest value, and how many values are larger."""
    larger = tl.sum(counts) - tl.cumsum(counts)  # of each value, how many are larger
    value = tl.sum((larger >= k).to(tl.int32))
    return value, tl.sum(tl.where(tl.arange(0, 256) > value, counts, 0))


@jit
def histogram_kernel(logits, counts, top_k, V, LOW: constexpr, BV: constexpr):
    """Program (row, block of BV logits): adds its block to counts [B, 2, 256], of high bytes or, LOW, of low bytes.

    LOW: the high bytes are counted, and only logits count whose high byte is that of the top_k-th largest."""
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
    """counts [2, 256] of a row, both halves filled by histogram_kernel() -> the key of the top_k-th largest logit."""
    bins = tl.arange(0, 256)
    high, larger = kth_largest(tl.load(counts + bins), top_k)
    low, _ = kth_largest(tl.load(counts + 256 + bins), top_k - larger)
    return high * 256 + low


@jit
def best_of_blocks(bests, blocks, V, BP: constexpr):
    """bests [blocks, 4] of a row, as choose_kernel() leaves them -> the best token, and the logsumexp of the row."""
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
def choose_kernel(logits, noise, counts, semaphore, bests, tokens, logprobs, temperature, top_k, V,
                  BV: constexpr, BP: constexpr):
    """Program (row, block of BV logits): the best token of its block; a row's last program chooses among the bests.

    bests, fp32 [B, blocks, 4]: score, token (the bits of an int32), largest logit, sum of exp(logit - largest).
    BP: the number of blocks, rounded up to a power of two."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    v = block * BV + tl.arange(0, BV)
    at = row.to(tl.int64) * V + v
    raw = tl.load(logits + at, mask=v < V, other=float("-inf"))
    x = raw.to(tl.float32)
    score = x
    if noise is not None:
        score = x / temperature - tl.log(tl.load(noise + at, mask=v < V, other=1))
    if top_k > 0:
        score = tl.where(sortable_key(raw) >= kth_largest_key(counts + row * 512, top_k), score, float("-inf"))
    best = tl.max(score, 0)
    peak = tl.max(x, 0)
    at = bests + (row * blocks + block) * 4
    tl.store(at, best)
    tl.store(at + 1, tl.min(tl.where((score == best) & (v < V), v, V), 0).to(tl.float32, bitcast=True))
    tl.store(at + 2, peak)
    tl.store(at + 3, tl.sum(tl.exp(x - peak), 0))

    if last_arriver(semaphore + row, blocks):
        token, logsumexp = best_of_blocks(bests + row * blocks * 4, blocks, V, BP)
        tl.store(tokens + row, token)
        chosen = tl.load(logits + row.to(tl.int64) * V + token).to(tl.float32)
        tl.store(logprobs + row, chosen - logsumexp)


def plain_sample(logits: Tensor, noise: Tensor | None, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """The plain twin of sample()."""
    score = logits.float()
    if 0 < top_k < logits.shape[-1]:
        score = score.masked_fill(score < score.topk(top_k).values[..., -1:], -torch.inf)
    if noise is not None:
        score = score / temperature - noise.log()
    tokens = score.argmax(-1)
    return tokens, logits.float().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


@library.custom_op("llama_fast::sample", mutates_args=(), device_types="cuda")
def sample(logits: Tensor, noise: Tensor | None, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """16-bit logits [B, V] -> tokens [B] and their log-probabilities [B] under the raw logits. top_k 0: all tokens.

    noise [B, V]: exponential, of rate 1; None: the likeliest token, whatever the temperature.
    torch.topk alone takes 65 us for 32,000 logits on an H200."""
    B, V = logits.shape
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(B, device=logits.device)
    block = 4096
    blocks = triton.cdiv(V, block)
    zeros = torch.zeros(B * 513, dtype=torch.int32, device=logits.device)  # in one launch
    counts, semaphore = zeros[:B * 512], zeros[B * 512:]
    bests = torch.empty(B * blocks * 4, device=logits.device)
    logits = logits.contiguous()
    if top_k >= V:
        top_k = 0
    if top_k:
        histogram_kernel[(B, blocks)](logits, counts, top_k, V, LOW=False, BV=block, num_warps=8)
        histogram_kernel[(B, blocks)](logits, counts, top_k, V, LOW=True, BV=block, num_warps=8)
    choose_kernel[(B, blocks)](logits, noise, counts, semaphore, bests, tokens, logprobs, temperature, top_k, V,
                               BV=block, BP=triton.next_power_of_2(blocks), num_warps=8)
    return tokens, logprobs


sample.register_kernel("cpu")(plain_sample)


@sample.register_fake
def _(logits, noise, temperature, top_k):
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.float32)


@jit
def load_block(at, inside, row, WHOLE: constexpr):
    """The logits of a row at pointers `at`; WHOLE: the program has the row in registers, one block, and it is `row`."""
    if WHOLE:
        x = row
    else:
        x = tl.load(at, mask=inside, other=float("-inf"))
    return x


@jit
def threshold(logits, row, goal, peak, temperature, floor, V, MASS: constexpr, WHOLE: constexpr, BV: constexpr):
    """The largest key such that the tokens of that key and of larger ones, none under `floor`, reach `goal`.

    They reach it in number or, MASS, in the sum of exp((logit - peak) / temperature). A pass finds two bits of the
    key: it sums for three candidates at once."""
    key = floor * 0
    for step in range(8):
        quarter = 16384 >> (2 * step)
        one = tl.zeros((BV,), tl.float32)
        two = tl.zeros((BV,), tl.float32)
        three = tl.zeros((BV,), tl.float32)
        for v0 in range(0, V, BV):
            v = v0 + tl.arange(0, BV)
            x = load_block(logits + v, v < V, row, WHOLE)
            weight = tl.exp((x.to(tl.float32) - peak) / temperature) if MASS else 1.0
            found = tl.where(v < V, sortable_key(x), -1)
            found = tl.where(found >= floor, found, -1)
            one += tl.where(found >= key + quarter, weight, 0.0)
            two += tl.where(found >= key + 2 * quarter, weight, 0.0)
            three += tl.where(found >= key + 3 * quarter, weight, 0.0)
        reached = (tl.sum(one, 0) >= goal).to(tl.int32) + (tl.sum(two, 0) >= goal) + (tl.sum(three, 0) >= goal)
        key += reached * quarter
    return tl.maximum(key, floor)


@jit
def peak_and_sum(logits, row, V, WHOLE: constexpr, BV: constexpr):
    """A row's largest logit, the sum of exp(logit - largest), and the first token that has the largest logit."""
    v = tl.arange(0, BV)
    largest = row.to(tl.float32)
    for v0 in range(BV, V, BV):
        x = tl.load(logits + v0 + v, mask=v0 + v < V, other=float("-inf"))
        largest = tl.maximum(largest, x.to(tl.float32))
    peak = tl.max(largest, 0)
    total = tl.zeros((BV,), tl.float32)
    first = tl.full((BV,), 2 ** 30, tl.int32)
    for v0 in range(0, V, BV):
        x = load_block(logits + v0 + v, v0 + v < V, row, WHOLE)
        total += tl.exp(x.to(tl.float32) - peak)
        first = tl.where(x.to(tl.float32) == peak, tl.minimum(first, v0 + v), first)
    return peak, tl.sum(total, 0), tl.min(first, 0)


@jit
def kept_mass(logits, row, peak, temperature, floor, V, WHOLE: constexpr, BV: constexpr):
    """The sum of exp((logit - peak) / temperature) over the tokens whose keys are `floor` or larger."""
    v = tl.arange(0, BV)
    kept = tl.zeros((BV,), tl.float32)
    for v0 in range(0, V, BV):
        x = load_block(logits + v0 + v, v0 + v < V, row, WHOLE)
        weight = tl.exp((x.to(tl.float32) - peak) / temperature)
        kept += tl.where(sortable_key(x) >= floor, weight, 0.0)
    return tl.sum(kept, 0)


@jit
def distribution_kernel(logits, noise, probs, logsumexp, tokens, temperature, top_k, top_p, V,
                        GREEDY: constexpr, WHOLE: constexpr, BV: constexpr):
    """distribution() and draw() of a row, which one program has; WHOLE: it fits into a block of BV logits."""
    r = tl.program_id(0)
    logits += r.to(tl.int64) * V
    probs += r.to(tl.int64) * V
    v = tl.arange(0, BV)
    row = tl.load(logits + v, mask=v < V, other=float("-inf"))
    peak, raw_sum, likeliest = peak_and_sum(logits, row, V, WHOLE, BV)
    tl.store(logsumexp + r, peak + tl.log(raw_sum))

    floor = r * 0  # the least key that is kept
    if top_k > 0:
        floor = threshold(logits, row, top_k * 1.0, peak, 1.0, floor, V, False, WHOLE, BV)
    total = peak * 0
    for part in range(tl.where(top_p < 1, 2, 1)):  # the mass that top-k keeps, then what top-p keeps of that
        if part == 1:
            floor = threshold(logits, row, top_p * total, peak, temperature, floor, V, True, WHOLE, BV)
        total = kept_mass(logits, row, peak, temperature, floor, V, WHOLE, BV)

    best = tl.full((BV,), -1.0, tl.float32)
    token = tl.zeros((BV,), tl.int32)
    for v0 in range(0, V, BV):
        x = load_block(logits + v0 + v, v0 + v < V, row, WHOLE)
        if GREEDY:
            p = tl.where(v0 + v == likeliest, 1.0, 0.0)
        else:
            p = tl.where(sortable_key(x) >= floor, tl.exp((x.to(tl.float32) - peak) / temperature) / total, 0.0)
        score = p
        if noise is not None:
            score = p / tl.load(noise + r.to(tl.int64) * V + v0 + v, mask=v0 + v < V, other=1)
        score = tl.where(v0 + v < V, score, -1.0)
        token = tl.where(score > best, v0 + v, token)
        best = tl.maximum(score, best)
        tl.store(probs + v0 + v, p, mask=v0 + v < V)
    tl.store(tokens + r, tl.min(tl.where(best == tl.max(best, 0), token, V - 1), 0))


def exponential(like: Tensor, sampling: Sampling) -> Tensor | None:
    """Exponential noise of rate 1, fp32, in the shape of `like`; None where sampling is greedy."""
    return None if sampling.greedy else torch.empty_like(like, dtype=torch.float32).exponential_()


@library.custom_op("llama_fast::distribute", mutates_args=(), device_types="cuda")
def distribute(logits: Tensor, noise: Tensor | None, temperature: float, top_k: int,
               top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """16-bit logits [R, V] -> sampling.distribution(), which is probs [R, V] and logsumexp [R], and tokens [R] drawn
    from probs.

    noise [R, V]: exponential, of rate 1; None: tokens are the likeliest."""
    R, V = logits.shape
    logits = logits.contiguous()
    probs = torch.empty(R, V, device=logits.device)
    logsumexp = torch.empty(R, device=logits.device)
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    block = min(32768, triton.next_power_of_2(V))
    greedy = Sampling(temperature).greedy
    if greedy:
        temperature, top_k, top_p = 1.0, 0, 1.0
    if top_k >= V:
        top_k = 0
    distribution_kernel[(R,)](logits, noise, probs, logsumexp, tokens, temperature, top_k, top_p, V, GREEDY=greedy,
                              WHOLE=V <= block, BV=block, num_warps=max(4, block // 1024))
    return probs, logsumexp, tokens


@distribute.register_kernel("cpu")
def plain_distribute(logits: Tensor, noise: Tensor | None, temperature: float, top_k: int,
                     top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of distribute()."""
    probs = probabilities(logits.float(), Sampling(temperature, top_k, top_p))
    return probs, logits.float().logsumexp(-1), (probs if noise is None else probs / noise).argmax(-1)


@distribute.register_fake
def _(logits, noise, temperature, top_k, top_p):
    R = len(logits)
    return (logits.new_empty(logits.shape, dtype=torch.float32), logits.new_empty(R, dtype=torch.float32),
            logits.new_empty(R, dtype=torch.int64))


@jit
def draw_rest(p, q, noise, has_q, V, BV: constexpr):
    """Draws a token from max(p - q, 0) [V] or, where nothing is left of it, from p; has_q: else q counts as 0."""
    best = tl.full((BV,), -1.0, tl.float32)  # of p - q
    best_p = tl.full((BV,), -1.0, tl.float32)  # of p
    token = tl.zeros((BV,), tl.int32)
    token_p = tl.zeros((BV,), tl.int32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        p_v = tl.load(p + v, mask=v < V, other=0)
        q_v = tl.load(q + v, mask=(v < V) & has_q, other=0)
        noise_v = tl.load(noise + v, mask=v < V, other=1) if noise is not None else 1.0
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
def accept_kernel(logits, p, logsumexp, tokens, q, proposed, uniform, noise, out, logprobs, accepted, k, V,
                  BT: constexpr, BV: constexpr):
    """speculative.accept() of a sequence, which one program has. Position i of 0 .. k holds drafted token i + 1.

    logits, p, q [B, k + 1, V]; logsumexp, tokens, out, logprobs [B, k + 1]; uniform [B, k]; noise [B, V] or None."""
    b = tl.program_id(0)
    i = tl.arange(0, BT)
    drafted = tl.load(tokens + b * (k + 1) + 1 + i, mask=i < k, other=0)
    at = (b * (k + 1) + i).to(tl.int64) * V + drafted
    p_x = tl.load(p + at, mask=i < k, other=0)
    q_x = tl.load(q + at, mask=i < k, other=0)
    count = tl.load(proposed + b)
    kept = (tl.load(uniform + b * k + i, mask=i < k, other=0) * q_x < p_x) & (i < count)
    n = tl.min(tl.where(kept & (i < k), k, tl.minimum(i, k)), 0)  # the first position whose token is not kept, or k
    tl.store(accepted + b, n)

    row = (b * (k + 1) + n).to(tl.int64) * V
    row_noise = noise
    if noise is not None:
        row_noise = noise + b.to(tl.int64) * V
    new = draw_rest(p + row, q + row, row_noise, n < count, V, BV)
    token = tl.where(i == n, new, drafted)
    at = b * (k + 1) + i
    tl.store(out + at, token, mask=i <= k)
    raw = tl.load(logits + at.to(tl.int64) * V + token, mask=i <= k, other=0).to(tl.float32)
    tl.store(logprobs + at, raw - tl.load(logsumexp + at, mask=i <= k, other=0), mask=i <= k)


def fast_choose(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """sampling.choose() with the kernels: 16-bit logits [B, V] -> tokens [B] and their log-probabilities [B]."""
    noise = exponential(logits, sampling)
    if sampling.top_p < 1 and not sampling.greedy:
        _, logsumexp, tokens = distribute(logits, noise, *astuple(sampling))
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1).float() - logsumexp
    return sample(logits, noise, sampling.temperature, sampling.top_k)


def fast_propose(logits: Tensor, vocab_size: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """speculative.propose() with the kernel: a draft's logits [B, T, any] -> tokens [B] and q [B, vocab_size]."""
    logits = logits[:, -1, :vocab_size]
    q, _, tokens = distribute(logits, exponential(logits, sampling), *astuple(sampling))
    missing = vocab_size - q.shape[-1]
    return tokens, F.pad(q, (0, missing)) if missing else q


def fast_accept(logits: Tensor, tokens: Tensor, q: Tensor, proposed: Tensor,
                sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """speculative.accept(), its plain twin, in two launches and those of the random numbers; for CUDA tensors.

    16-bit logits [B, T, V], tokens [B, T], q [B, T, V], proposed [B] -> tokens [B, T], log-probabilities [B, T],
    accepted [B]."""
    B, T, V = logits.shape
    logits, q = logits.contiguous(), q.contiguous()
    p, logsumexp, _ = distribute(logits.view(-1, V), None, *astuple(sampling))
    uniform = torch.rand(B, T - 1, device=q.device)
    noise = exponential(q[:, 0], sampling)
    out = torch.empty_like(tokens)
    logprobs = logsumexp.new_empty(B, T)
    accepted = proposed.new_empty(B)
    accept_kernel[(B,)](logits, p, logsumexp, tokens.contiguous(), q, proposed, uniform, noise, out, logprobs, accepted,
                        T - 1, V, BT=triton.next_power_of_2(T), BV=min(4096, triton.next_power_of_2(V)), num_warps=8)
    return out, logprobs, accepted

"""
Kernels of sampling and of speculative acceptance, without a sort and without a wait of the host.

Shapes: B rows, V vocabulary.
"""
from dataclasses import astuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fast.common import constexpr, jit, tl, triton
from sampling import Sampling, distribution


@jit
def order(logits):
    """16-bit floats as integers 0 .. 65535 in the same order."""
    bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7fff, bits) + 0x8000


@jit
def kth_largest(counts, k):
    """counts [256] of the values 0 .. 255 -> the k-th largest value, and how many are larger."""
    above = tl.sum(counts) - tl.cumsum(counts)  # of each value, how many are larger
    value = tl.sum((above >= k).to(tl.int32))
    return value, tl.sum(tl.where(tl.arange(0, 256) > value, counts, 0))


@jit
def count_kernel(logits, counts, top_k, V, LOW: constexpr, BV: constexpr):
    """Adds up how many of BV logits have each high byte or, LOW, each low byte under the k-th largest one's high."""
    row = tl.program_id(0)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    key = order(tl.load(logits + row.to(tl.int64) * V + v, mask=v < V, other=0))
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
def choose_kernel(logits, waits, counts, arrived, bests, tokens, logprobs, temperature, top_k, V, BV: constexpr,
                  BP: constexpr):
    """The best of BV logits, those under the top_k-th left out; a row's last program chooses among the bests."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    v = part * BV + tl.arange(0, BV)
    at = row.to(tl.int64) * V + v
    x16 = tl.load(logits + at, mask=v < V, other=float("-inf"))
    x = x16.to(tl.float32)
    score = x
    if waits is not None:
        score = x / temperature - tl.log(tl.load(waits + at, mask=v < V, other=1))
    if top_k > 0:
        bins = tl.arange(0, 256)
        high, larger = kth_largest(tl.load(counts + row * 512 + bins), top_k)
        low, _ = kth_largest(tl.load(counts + row * 512 + 256 + bins), top_k - larger)
        score = tl.where(order(x16) >= high * 256 + low, score, float("-inf"))
    best = tl.max(score, 0)
    top = tl.max(x, 0)
    at = bests + (row * parts + part) * 4
    tl.store(at, best)
    tl.store(at + 1, tl.min(tl.where((score == best) & (v < V), v, V), 0).to(tl.float32, bitcast=True))
    tl.store(at + 2, top)
    tl.store(at + 3, tl.sum(tl.exp(x - top), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
        p = tl.arange(0, BP)
        at_p = bests + (row * parts + p) * 4
        score_p = tl.load(at_p, mask=p < parts, other=float("-inf"))
        token_p = tl.load(at_p + 1, mask=p < parts, other=0).to(tl.int32, bitcast=True)
        top_p = tl.load(at_p + 2, mask=p < parts, other=float("-inf"))
        total_p = tl.load(at_p + 3, mask=p < parts, other=0)
        token = tl.min(tl.where((score_p == tl.max(score_p, 0)) & (p < parts), token_p, V), 0)
        token = tl.minimum(token, V - 1)  # NaN is equal to nothing
        peak = tl.max(top_p, 0)
        total = tl.sum(total_p * tl.exp(top_p - peak), 0)
        tl.store(tokens + row, token)
        chosen = tl.load(logits + row.to(tl.int64) * V + token).to(tl.float32)
        tl.store(logprobs + row, chosen - peak - tl.log(total))


def plain_sample(logits: Tensor, waits: Tensor | None, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """The plain twin of sample()."""
    score = logits.float()
    if 0 < top_k < logits.shape[-1]:
        score = score.masked_fill(score < score.topk(top_k).values[..., -1:], -torch.inf)
    if waits is not None:
        score = score / temperature - waits.log()
    tokens = score.argmax(-1)
    return tokens, logits.float().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


@library.custom_op("llama_fast::sample", mutates_args=(), device_types="cuda")
def sample(logits: Tensor, waits: Tensor | None, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """16-bit logits [B, V], waits [B, V] (exponential, of rate 1) -> tokens [B] and their log-probabilities [B].

    waits None: the likeliest token. torch.topk alone takes 65 us for 32,000 logits on an H200."""
    B, V = logits.shape
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(B, device=logits.device)
    block = 4096
    parts = triton.cdiv(V, block)
    scratch = torch.zeros(B * 513, dtype=torch.int32, device=logits.device)
    counts, arrived = scratch[:B * 512], scratch[B * 512:]
    bests = torch.empty(B * parts * 4, device=logits.device)
    logits, top_k = logits.contiguous(), top_k if top_k < V else 0
    for low in (False, True) if top_k else ():
        count_kernel[(B, parts)](logits, counts, top_k, V, low, block, num_warps=8)
    choose_kernel[(B, parts)](logits, waits, counts, arrived, bests, tokens, logprobs, temperature, top_k, V, block,
                              triton.next_power_of_2(parts), num_warps=8)
    return tokens, logprobs


sample.register_kernel("cpu")(plain_sample)


@sample.register_fake
def _(logits, waits, temperature, top_k):
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.float32)


@jit
def threshold(logits, row, goal, top, temperature, floor, V, MASS: constexpr, WHOLE: constexpr, BV: constexpr):
    """The largest key (of order()) such that the tokens of that key and of larger ones, none under `floor`, are `goal`
    or more: in number or, MASS, in exp((logit - top) / temperature). Two bits of it a pass."""
    key = floor * 0
    for step in range(8):
        quarter = 16384 >> (2 * step)
        one = tl.zeros((BV,), tl.float32)
        two = tl.zeros((BV,), tl.float32)
        three = tl.zeros((BV,), tl.float32)
        for v0 in range(0, V, BV):
            v = v0 + tl.arange(0, BV)
            x = row if WHOLE else tl.load(logits + v, mask=v < V, other=float("-inf"))
            weight = tl.exp((x.to(tl.float32) - top) / temperature) if MASS else 1.0
            found = tl.where(v < V, order(x), -1)
            found = tl.where(found >= floor, found, -1)
            one += tl.where(found >= key + quarter, weight, 0.0)
            two += tl.where(found >= key + 2 * quarter, weight, 0.0)
            three += tl.where(found >= key + 3 * quarter, weight, 0.0)
        reached = (tl.sum(one, 0) >= goal).to(tl.int32) + (tl.sum(two, 0) >= goal) + (tl.sum(three, 0) >= goal)
        key += reached * quarter
    return tl.maximum(key, floor)


@jit
def distribution_kernel(logits, waits, probs, totals, tokens, temperature, top_k, top_p, V, GREEDY: constexpr,
                        WHOLE: constexpr, BV: constexpr):
    """distribution() and draw() of one row a program, which holds the row if it is a WHOLE tile of BV logits."""
    r = tl.program_id(0)
    logits += r.to(tl.int64) * V
    probs += r.to(tl.int64) * V
    v = tl.arange(0, BV)
    row = tl.load(logits + v, mask=v < V, other=float("-inf"))
    tops = row.to(tl.float32)
    for v0 in range(BV, V, BV):
        tops = tl.maximum(tops, tl.load(logits + v0 + v, mask=v0 + v < V, other=float("-inf")).to(tl.float32))
    top = tl.max(tops, 0)
    raw = tl.zeros((BV,), tl.float32)
    first = tl.full((BV,), 2 ** 30, tl.int32)
    for v0 in range(0, V, BV):
        x = row if WHOLE else tl.load(logits + v0 + v, mask=v0 + v < V, other=float("-inf"))
        raw += tl.exp(x.to(tl.float32) - top)
        first = tl.where(x.to(tl.float32) == top, tl.minimum(first, v0 + v), first)
    tl.store(totals + r, top + tl.log(tl.sum(raw, 0)))
    likeliest = tl.min(first, 0)
    floor = r * 0
    if top_k > 0:
        floor = threshold(logits, row, top_k * 1.0, top, 1.0, floor, V, False, WHOLE, BV)
    total = top * 0
    for part in range(tl.where(top_p < 1, 2, 1)):  # what top-k keeps, then what top-p keeps of that
        if part == 1:
            floor = threshold(logits, row, top_p * total, top, temperature, floor, V, True, WHOLE, BV)
        kept = tl.zeros((BV,), tl.float32)
        for v0 in range(0, V, BV):
            x = row if WHOLE else tl.load(logits + v0 + v, mask=v0 + v < V, other=float("-inf"))
            weight = tl.exp((x.to(tl.float32) - top) / temperature)
            kept += tl.where(order(x) >= floor, weight, 0.0)
        total = tl.sum(kept, 0)
    best = tl.full((BV,), -1.0, tl.float32)
    token = tl.zeros((BV,), tl.int32)
    for v0 in range(0, V, BV):
        x = row if WHOLE else tl.load(logits + v0 + v, mask=v0 + v < V, other=float("-inf"))
        if GREEDY:
            p = tl.where(v0 + v == likeliest, 1.0, 0.0)
        else:
            p = tl.where(order(x) >= floor, tl.exp((x.to(tl.float32) - top) / temperature) / total, 0.0)
        score = p
        if waits is not None:
            score = p / tl.load(waits + r.to(tl.int64) * V + v0 + v, mask=v0 + v < V, other=1)
        score = tl.where(v0 + v < V, score, -1.0)
        token = tl.where(score > best, v0 + v, token)
        best = tl.maximum(score, best)
        tl.store(probs + v0 + v, p, mask=v0 + v < V)
    tl.store(tokens + r, tl.min(tl.where(best == tl.max(best, 0), token, V - 1), 0))


@jit
def accept_kernel(logits, p, totals, read, q, proposed, uniform, waits, tokens, logprobs, accepted, L, V,
                  BL: constexpr, BV: constexpr):
    """speculative.accept() of one row a program: L drafted tokens."""
    b = tl.program_id(0)
    i = tl.arange(0, BL)
    drafted = tl.load(read + b * (L + 1) + 1 + i, mask=i < L, other=0)
    at = (b * (L + 1) + i).to(tl.int64) * V + drafted
    p_x = tl.load(p + at, mask=i < L, other=0)
    q_x = tl.load(q + at, mask=i < L, other=0)
    count = tl.load(proposed + b)
    kept = (tl.load(uniform + b * L + i, mask=i < L, other=0) * q_x < p_x) & (i < count)
    n = tl.min(tl.where(kept & (i < L), L, tl.minimum(i, L)), 0)
    tl.store(accepted + b, n)
    row = (b * (L + 1) + n).to(tl.int64) * V
    best = tl.full((BV,), -1.0, tl.float32)  # of what p has more than q
    best_p = tl.full((BV,), -1.0, tl.float32)
    token = tl.zeros((BV,), tl.int32)
    token_p = tl.zeros((BV,), tl.int32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        p_v = tl.load(p + row + v, mask=v < V, other=0)
        q_v = tl.load(q + row + v, mask=(v < V) & (n < count), other=0)
        wait = tl.load(waits + b.to(tl.int64) * V + v, mask=v < V, other=1) if waits is not None else 1.0
        score = tl.where(v < V, tl.maximum(p_v - q_v, 0) / wait, -1.0)
        score_p = tl.where(v < V, p_v / wait, -1.0)
        token = tl.where(score > best, v, token)
        token_p = tl.where(score_p > best_p, v, token_p)
        best = tl.maximum(best, score)
        best_p = tl.maximum(best_p, score_p)
    top = tl.max(best, 0)
    new = tl.min(tl.where(best == top, token, V - 1), 0)
    new_p = tl.min(tl.where(best_p == tl.max(best_p, 0), token_p, V - 1), 0)
    tokens_i = tl.where(i == n, tl.where(top > 0, new, new_p), drafted)
    at = b * (L + 1) + i
    tl.store(tokens + at, tokens_i, mask=i <= L)
    raw = tl.load(logits + at.to(tl.int64) * V + tokens_i, mask=i <= L, other=0).to(tl.float32)
    tl.store(logprobs + at, raw - tl.load(totals + at, mask=i <= L, other=0), mask=i <= L)


def exponential(like: Tensor, sampling: Sampling) -> Tensor | None:
    """Waits for draw(); None where the likeliest token is wanted."""
    return None if sampling.temperature < 1e-5 else torch.empty_like(like, dtype=torch.float32).exponential_()


@library.custom_op("llama_fast::distribute", mutates_args=(), device_types="cuda")
def distribute(logits: Tensor, waits: Tensor | None, temperature: float, top_k: int,
               top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """16-bit logits [R, V], waits [R, V] (exponential, of rate 1; None: the likeliest) -> distribution()'s [R, V] and
    [R], and a token [R] of each row; without a sort."""
    R, V = logits.shape
    logits = logits.contiguous()
    probs = torch.empty(R, V, device=logits.device)
    totals = torch.empty(R, device=logits.device)
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    block = min(32768, triton.next_power_of_2(V))
    greedy = temperature < 1e-5
    distribution_kernel[(R,)](logits, waits, probs, totals, tokens, 1.0 if greedy else temperature,
                              top_k if top_k < V and not greedy else 0, 1.0 if greedy else top_p, V, greedy, V <= block,
                              block, num_warps=max(4, block // 1024))
    return probs, totals, tokens


@distribute.register_kernel("cpu")
def _(logits, waits, temperature, top_k, top_p):
    probs, totals = distribution(logits, Sampling(temperature, top_k, top_p))
    return probs, totals, (probs if waits is None else probs / waits).argmax(-1)


@distribute.register_fake
def _(logits, waits, temperature, top_k, top_p):
    R = len(logits)
    return (logits.new_empty(logits.shape, dtype=torch.float32), logits.new_empty(R, dtype=torch.float32),
            logits.new_empty(R, dtype=torch.int64))


def fast_propose(logits: Tensor, vocabulary: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """speculative.propose() with the kernel."""
    logits = logits[:, -1, :vocabulary]
    q, _, tokens = distribute(logits, exponential(logits, sampling), *astuple(sampling))
    return tokens, F.pad(q, (0, vocabulary - q.shape[-1])) if q.shape[-1] < vocabulary else q


def fast_accept(logits: Tensor, read: Tensor, q: Tensor, proposed: Tensor,
                sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """What speculative.accept(), its plain twin, does, in two launches; for CUDA tensors."""
    (B, T, V), logits, q = logits.shape, logits.contiguous(), q.contiguous()
    p, totals, _ = distribute(logits.view(-1, V), None, *astuple(sampling))
    logprobs, accepted, uniform = totals.new_empty(B, T), proposed.new_empty(B), torch.rand(B, T - 1, device=q.device)
    tokens = torch.empty_like(read)
    accept_kernel[(B,)](logits, p, totals, read.contiguous(), q, proposed, uniform, exponential(q[:, 0], sampling),
                        tokens, logprobs, accepted, T - 1, V, triton.next_power_of_2(T),
                        min(4096, triton.next_power_of_2(V)), num_warps=8)
    return tokens, logprobs, accepted


def fast_choose(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """choose() with the kernels."""
    waits = exponential(logits, sampling)
    if sampling.top_p < 1 and waits is not None:
        _, totals, tokens = distribute(logits, waits, *astuple(sampling))
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1).float() - totals
    return sample(logits, waits, sampling.temperature, sampling.top_k)

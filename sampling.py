"""
Sampling: temperature, top-k and top-p in plain PyTorch, and kernels for a GPU where top-p is off.

Shapes: B rows, V vocabulary.
"""
import math
from dataclasses import dataclass

import torch
from torch import Tensor, library

from kernels import constexpr, jit, tl, triton


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8  # 0: the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off

    def __post_init__(self):
        if not (0 <= self.temperature <= 100 and isinstance(self.top_k, int) and 0 < self.top_p <= 1):
            raise ValueError(f"{self}: want temperature from 0 to 100, a whole top_k, top_p above 0 and up to 1")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from: logits [..., V] after temperature, then top-k, then top-p."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], -math.inf)
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p, 0)  # the likeliest always stays
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def choose(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> the next token [B] and its log-probability [B] under the raw logits."""
    logits = logits.float()
    if sampling.temperature < 1e-5:  # a quotient by less overflows
        tokens = logits.argmax(-1)
    else:  # of clocks with exponential waits of rates p, the i-th rings first with probability p[i]; multinomial blocks
        probs = probabilities(logits, sampling)
        tokens = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
    return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


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


def fast_choose(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """choose() with the kernels; where top_p is off."""
    waits = None
    if sampling.temperature >= 1e-5:
        waits = torch.empty_like(logits, dtype=torch.float32).exponential_()
    return sample(logits, waits, sampling.temperature, sampling.top_k)

"""
Sampling: temperature, top-k and top-p.

Shapes: B rows, V vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8  # 0: the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off

    def __post_init__(self):
        if not (0 <= self.temperature <= 100 and isinstance(self.top_k, int) and 0 < self.top_p <= 1):
            raise ValueError(f"{self}: want temperature from 0 to 100, a whole top_k, top_p above 0 and up to 1")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from: logits [..., V] after temperature, then top-k, then top-p; at
    temperature 0 the likeliest token has all of it. Of equally likely tokens all stay or none."""
    if sampling.temperature < 1e-5:  # a quotient by less overflows
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], -math.inf)
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered = probs.sort(dim=-1, descending=True).values
        cut = ordered.cumsum(-1) - ordered >= sampling.top_p  # what is likelier makes up top_p already
        probs = probs.masked_fill(probs < ordered.masked_fill(cut, 1).amin(-1, keepdim=True), 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, sampling: Sampling) -> Tensor:
    """probs [..., V], of any sum -> a token [...]. Of clocks with exponential waits of rates p, the i-th rings first
    with probability p[i]; torch.multinomial would make the host wait."""
    if sampling.temperature < 1e-5:
        return probs.argmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def distribution(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [..., V] -> probabilities() [..., V], and the logarithm [...] of what a softmax of them divides by."""
    logits = logits.float()
    return probabilities(logits, sampling), logits.logsumexp(-1)


def choose(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> the next token [B] and its log-probability [B] under the raw logits."""
    if sampling.temperature < 1e-5:
        tokens, total = logits.argmax(-1), logits.float().logsumexp(-1)
    else:
        probs, total = distribution(logits, sampling)
        tokens = draw(probs, sampling)
    return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1).float() - total

"""
Sampling in plain PyTorch: temperature, top-k, top-p and min-p.

A rule of your own is a field of Sampling and a few lines in probabilities(). fast/ does not know
the field: where it has another value than its default, this file samples.

Shapes: B rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


LIMITS = dict(
    temperature=(float, 0, 100),
    top_k=(int, 0, math.inf),
    top_p=(float, 1e-6, 1),  # 0 would leave no token
    min_p=(float, 0, 1),
)


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8  # 0: greedy, the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off

    def __post_init__(self):
        for name, (kind, low, high) in LIMITS.items():
            value = getattr(self, name)
            if type(value) not in (int, kind) or not low <= value <= high:
                raise ValueError(f"{name}={value!r}: want {kind.__name__} from {low} to {high}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # it is to within rounding; a division by far less overflows


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [..., V] -> the distribution [..., V] that tokens are drawn from.

    Temperature comes first, then top-k, top-p and min-p, as in transformers. Greedy, the likeliest
    token has probability 1, the first one of several. Top-k, top-p and min-p keep all of equally
    likely tokens, or none."""
    if sampling.greedy:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(
            logits < logits.topk(sampling.top_k).values[..., -1:], -math.inf
        )
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered = probs.sort(dim=-1, descending=True).values
        # A token is cut if the likelier ones make up top_p already.
        cut = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.masked_fill(probs < ordered.masked_fill(cut, 1).amin(-1, keepdim=True), 0)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0)
    if sampling.top_p < 1 or sampling.min_p > 0:
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, sampling: Sampling) -> Tensor:
    """probs [..., V], of any sum -> a token [...] with a probability in proportion.

    An exponential race: token i arrives after an exponential time of rate p[i], so it is first with
    probability p[i]. torch.multinomial() does the same but makes the host wait for the GPU."""
    if sampling.greedy:
        return probs.argmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def choose(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> the next token [B] and its log-probability [B] under the raw logits."""
    logits = logits.float()
    # Greedy, without the distribution: 64 rows of 49,152 logits take two CPU cores 10 ms so, 56 ms
    # with it.
    tokens = (
        logits.argmax(-1) if sampling.greedy else draw(probabilities(logits, sampling), sampling)
    )
    return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

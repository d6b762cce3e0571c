"""
The plain twins: PyTorch operators that compute what a kernel does, with the same arguments. They
run on CPUs, and the tests compare both with float64.

Attention's twin is model.Attention.attend(), the ranks' exchanges have tp.py's, and what accepts
drafts has speculative.accept().

Shapes: M rows, K inputs, N outputs, V vocabulary; of experts as in experts.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fast.common import CLAMPED, GATES
from fast.layout import Packed, unpack
from fast.packed_gemv import Experts, Plain
from generate import Sampling, probabilities
from model import Gate
from quantize import CODES

# linear.py


def plain_add_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The plain twin of add_norm()."""
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    y = y if residual is None else residual + y
    return (y if scale is None else y * scale).type_as(x)


def plain_gate(x: Tensor, number: int, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    """The plain twin of gate()."""
    name = next((name for name, n in GATES.items() if n == number), "")
    return Gate(name, (limit, alpha) if number == CLAMPED else None)(x)


def plain_linear(
    x: Tensor,
    w: Tensor,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: int = 0,
    eps: float = 1e-5,
) -> Tensor:
    """The plain twin of linear()."""
    if norm is not None:
        # Rounded once, as in norm_kernel.
        x = F.rms_norm(x.float(), x.shape[-1:], norm.float(), eps).type_as(x)
    y = F.linear(x, w, bias)
    if gated:
        y = plain_gate(y, gated)
    return y if residual is None else residual + y


# packed_linear.py


def plain_weights(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The plain twin of dequantize() for a weight [N, K], whose inputs stay in the codes' order."""
    codes, scales, zeros = unpack(packed)
    numbers = CODES[packed.kind].decode(codes).unflatten(1, (scales.shape[1], packed.group_size))
    return ((numbers - zeros[:, :, None]) * scales[:, :, None]).flatten(1).to(dtype)


def plain_packed_linear(
    x: Tensor,
    w: Packed,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The plain twin of packed_linear()."""
    if w.perm is not None:
        x, norm = x[:, w.perm], None if norm is None else norm[w.perm]
    return plain_linear(x, plain_weights(w, x.dtype), norm, bias, residual, w.gated, eps)


# experts.py


def plain_route(
    x: Tensor, norm: Tensor | None, eps: float, router: "Router"
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of route()."""

    def normed(weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).type_as(x)

    for_experts = x.clone() if norm is None else normed(norm)
    read = for_experts if router.norm is None else normed(router.norm)
    bias = None if router.bias is None else router.bias.float()
    logits = F.linear(read.float(), router.weight.float(), bias)
    shared = min(1, router.shared)
    X = logits.shape[1] - shared
    logits, gate = logits.split([X, shared], dim=1)
    scores = logits
    if router.correction is not None:
        scores = logits.sigmoid() + router.correction[:X]
    experts = scores.topk(router.n).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)
    if router.correction is not None:
        weights = logits.sigmoid() * chosen
        if router.normalize:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    else:
        among = logits.masked_fill(~chosen, float("-inf")) if router.normalize else logits
        weights = (logits - among.logsumexp(1, keepdim=True)).exp() * chosen
    weights = weights * router.scale
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.float()
    weights = torch.cat((weights, gate.sigmoid() if router.shared == 1 else gate * 0 + 1), dim=1)
    chosen = torch.cat((chosen, gate == gate), dim=1)
    found = chosen.any(0).nonzero()[:, 0].int()
    active = found.new_zeros(1 + min(len(x) * router.n, X) + shared)
    active[0], active[1 : 1 + len(found)] = len(found), found
    return for_experts, weights, active


def plain_expert_linear(
    x: Tensor,
    experts: Experts,
    w: Packed | Plain,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The plain twin of expert_linear()."""
    active, weights, limit, alpha = experts
    matrices = w.qweight
    if w.bits < 16:
        matrices = plain_unpack_experts(w, weights.shape[1], x.dtype)
    gate, columns = w.gated, w.N // 2 if w.gated else w.N
    out = x.new_zeros(len(active) - 1, x.shape[-2], columns, dtype=torch.float32)
    for i, expert in enumerate(active[1 : 1 + active[0]].tolist()):
        y = ((x if gate else x[i]) @ matrices[expert].T).float()
        share = weights[:, expert, None]
        if bias is not None:
            y += bias[expert] if gate else bias[expert] * share
        if gate:
            y = plain_gate(y, gate, limit, alpha)
            y = torch.where(share != 0, y * share, 0)
        out[i] = y
    if gate:
        return out.type_as(x)
    y = out.sum(0)
    return (y if residual is None else residual + y).type_as(x)


def plain_unpack_experts(w: Packed, X: int, dtype: torch.dtype) -> Tensor:
    """The plain twin of unpack_experts()."""
    pairs = zip(w.qweight.chunk(X), w.scales_and_zeros.chunk(X), strict=True)
    parts = (w._replace(qweight=codes, scales_and_zeros=scales) for codes, scales in pairs)
    return torch.stack([plain_weights(part, dtype) for part in parts])


# sampling.py


def plain_sample(logits: Tensor, noise: Tensor, settings: Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin of sample()."""
    probs, logsumexp, tokens = plain_distribute(logits, noise, settings)
    return tokens, logits.float().gather(-1, tokens[:, None]).squeeze(-1) - logsumexp


def plain_distribute(
    logits: Tensor, noise: Tensor | None, settings: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of distribute()."""
    temperature, top_k, top_p, min_p = settings[:4].tolist()
    logits = logits.float()
    probs = probabilities(logits, Sampling(temperature, int(top_k), top_p, min_p))
    return probs, logits.logsumexp(-1), (probs if noise is None else probs / noise).argmax(-1)

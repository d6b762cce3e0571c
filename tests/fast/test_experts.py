"""
Kernels for mixtures of experts and their plain twins, each judged by the plain module in float64,
right by its goldens.
"""

import copy

import pytest
import torch
from torch import nn

from fast import experts
from fast.experts import FusedMoE
from gemv_on_cpu import gemv_on_cpu
from helpers import error
from model import Config, LayerConfig, MoE, MoEConfig
from quantize import (
    QuantizedExperts,
    QuantizedLinear,
    join_experts,
    plain_layer,
    replace_layers,
)
from test_packed import random_weight

BF16 = torch.bfloat16
# D, F, X, n, kind of codes, inputs of a group, what else there is: "clamp" for gpt-oss's gate, with
# biases
# More experts than a warp has lanes.
CASES = [
    (72, 24, 5, 5, "16-bit", 0, "all"),
    (192, 64, 8, 2, "int4", 64, "clamp bias"),
    (96, 40, 8, 2, "16-bit", 0, ""),
    (320, 96, 32, 4, "16-bit", 0, "clamp bias"),
    (128, 96, 20, 3, "int4", 32, "zeros"),
    (96, 72, 8, 2, "int8", -1, "gelu"),
    (128, 40, 8, 2, "fp8", -1, "all"),
    (288, 96, 32, 4, "mxfp4", 32, "clamp bias"),
    (64, 32, 8, 2, "mxfp4", 32, ""),
    (32, 16, 40, 34, "int8", -1, ""),
    (96, 40, 12, 3, "16-bit", 0, "sigmoid all"),
    (128, 64, 9, 2, "int4", 64, "sigmoid shared"),
    (72, 24, 20, 4, "16-bit", 0, "scaled gelu"),
]
LARGE = [
    (2048, 1536, 64, 4, "16-bit", 0, "sigmoid shared"),
    (2816, 704, 32, 8, "16-bit", 0, "scaled gelu"),
    (2048, 768, 16, 4, "16-bit", 0, ""),
    (2880, 2880, 6, 2, "mxfp4", 32, "clamp bias"),
    (2048, 768, 16, 4, "int4", 128, "zeros"),
    (2048, 768, 16, 4, "fp8", 128, ""),
    (2880, 2880, 4, 2, "16-bit", 0, "clamp bias"),
    (4096, 1792, 4, 2, "int4", 32, ""),
]


def random_experts(X, N, K, kind, group, more, device) -> nn.Module:
    if kind == "16-bit":
        weight, bias = (
            torch.randn(X, N, K, device=device) / K**0.5,
            torch.randn(X, N, device=device),
        )
        return plain_layer(weight.to(BF16), bias.to(BF16) if "bias" in more else None)
    C = 1 if group == -1 else K // group
    return join_experts(random_weight(N, K, kind, C, more, device, BF16).layer for _ in range(X))


def exact(plain, norm, x, residual):
    """What the mixture in float64 gives [M, D], which gathers what each row needs, and by how much
    the last expert that a row takes is ahead of the next one [M]."""
    given = x.double()
    x = nn.functional.rms_norm(given, norm.shape, norm.double(), 1e-5)
    routed = given if plain.router_norm else x
    scores = plain.router_norm(given) * given.shape[1] ** -0.5 if plain.router_norm else x
    scores = plain.router(scores.type_as(plain.router.weight))
    if plain.moe.sigmoid:
        scores = 4 * (scores.sigmoid() + plain.correction)  # a sigmoid's slope is 1 / 4 at most
    scores = nn.functional.pad(scores, (0, 1), value=-torch.inf)
    last, following = scores.topk(plain.moe.n_chosen + 1).values[:, -2:].unbind(1)
    found = [plain(*rows) for rows in zip(x.split(1), routed.split(1), strict=True)]
    return residual + torch.cat(found), last - following


def random_mixture(D, F, X, n, kind, group, more, device):
    """-> the module, the same with its weights in float64, and its norm's weight."""
    clamp = (1.5, 1.702) if "clamp" in more else None
    sigmoid, scaled = "sigmoid" in more, "scaled" in more
    config = MoEConfig(
        *(X, n, F, "all" not in more, "bias" in more, clamp),
        sigmoid=sigmoid,
        scale=1.8 if sigmoid else 1.0,
        shared_dim=F if "shared" in more else 0,
        shared_gate=not sigmoid,
        scaled_router=scaled,
        beside_dense=scaled,
    )
    activation = "gelu" if "gelu" in more else "silu"
    with torch.device(device):
        moe = MoE(Config(D, (LayerConfig(),), 1, 1, D, F, 8, 8, activation=activation), config).to(
            BF16
        )
        moe.router.weight.normal_(std=2 / D**0.5)
        if sigmoid:  # both are read in fp32
            moe.router.float()
            moe.correction.data = torch.randn(X) * 0.3
        if scaled:  # the norm's input is divided by the root of D
            moe.router.weight.mul_(D**0.5)
            moe.expert_scale.uniform_(-1.5, 1.5)  # a trained number may have any sign
            moe.router_norm.weight.uniform_(0.5, 1.5)
            moe.router_norm.eps = 1e-5
        norm = (torch.rand(D) + 0.5).to(BF16)
    moe.w_gate_up = random_experts(X, 2 * F, D, kind, group, more, device)
    moe.w_down = random_experts(X, D, F, kind, min(group, F), more, device)
    if "shared" in more:
        of_shared = dict(w_gate_up=(2 * F, D, group), w_down=(D, F, min(group, F)))
        for name, (N, K, size) in of_shared.items():
            one = random_experts(1, N, K, kind, size, more, device)
            setattr(moe.shared, name, one_of(one))
    plain = copy.deepcopy(moe)
    replace_layers(
        plain,
        QuantizedExperts,
        lambda layer: plain_layer(layer.dequantize(torch.float64), layer.bias),
    )
    replace_layers(
        plain, QuantizedLinear, lambda layer: plain_layer(layer.dequantize(torch.float64), None)
    )
    plain = plain.double()
    if sigmoid:
        plain.router.float()
    return moe, plain, norm


def one_of(experts: nn.Module) -> nn.Module:
    """The first expert's layer."""
    if not isinstance(experts, QuantizedExperts):
        return plain_layer(experts.weight[0], None)
    zeros = None if experts.zeros is None else experts.zeros[0]
    return QuantizedLinear(experts.qweight[0], experts.scales[0], zeros, experts.codes)


@pytest.mark.parametrize(
    "device, case",
    [
        *(("cpu", case) for case in CASES),
        *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES + LARGE),
    ],
    ids=str,
)
@torch.no_grad()
def test_experts_and_their_twin(device, case):
    D = case[0]
    moe, plain, norm = random_mixture(*case, device)
    fused = FusedMoE(moe)
    for rows in (1, 3, 16, 100):
        x, residual = (torch.randn(2 * rows + 8, D, device=device, dtype=BF16) for _ in range(2))
        ref, ahead = exact(plain, norm, x, residual)
        # x is rounded to bf16 before the router, and a prompt's router reads a norm in bf16.
        sure = (ahead > (0.1 if plain.router_norm else 0.02)).nonzero()[:rows, 0]
        x, residual, ref = x[sure], residual[sure], ref[sure]
        assert len(x) == rows
        if device == "cuda":
            torch.full((64, 1024, 1024), torch.nan, device="cuda")  # freed at once
        out = fused.decode(x, norm, 1e-5, residual)
        assert error(out, ref) < 6e-3
        assert not fused.semaphores.any()
        routed = x[None] if plain.router_norm else None
        whole = fused(nn.functional.rms_norm(x, norm.shape, norm, 1e-5)[None], routed)[0] + residual
        assert error(whole, ref) < 8e-3
        alone = torch.cat(
            [
                fused.decode(x[i : i + 1], norm, 1e-5, residual[i : i + 1])
                for i in range(min(rows, 3))
            ]
        )
        assert error(alone, ref[:3]) < 6e-3


@pytest.mark.parametrize("case", CASES[2:], ids=str)  # the first two say nothing new of gemv()
@torch.no_grad()
def test_gemv_of_experts_on_a_cpu(case, tmp_path, monkeypatch):
    """With GELU there is room for an expert more than were chosen, as where logits are NaN: gemv()
    must not take it. It takes the first one, whose weight is 0."""

    def on_cpu(x, chosen, w, semaphores, bias=None, residual=None, prompt=False):
        if w.gated == 2:
            chosen.active.data = nn.functional.pad(chosen.active, (0, 1), value=10**9)
        return gemv_on_cpu(tmp_path, x, w, None, bias, residual, chosen)

    monkeypatch.setattr(experts, "expert_linear", on_cpu)
    moe, plain, norm = random_mixture(*case, "cpu")
    x, residual = (torch.randn(40, case[0], dtype=BF16) for _ in range(2))
    ref, ahead = exact(plain, norm, x, residual)
    i = ahead.argmax()
    assert (
        error(FusedMoE(moe).decode(x[i : i + 1], norm, 1e-5, residual[i : i + 1]), ref[i : i + 1])
        < 6e-3
    )

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
from quantize import QuantizedExperts, join_experts, plain_layer, replace_layers
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
]
LARGE = [
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
    x = nn.functional.rms_norm(x.double(), norm.shape, norm.double(), 1e-5)
    logits = nn.functional.pad(plain.router(x), (0, 1), value=-torch.inf)
    last, following = logits.topk(plain.moe.n_chosen + 1).values[:, -2:].unbind(1)
    return residual + torch.cat([plain(row) for row in x.split(1)]), last - following


def random_mixture(D, F, X, n, kind, group, more, device):
    """-> the module, the same with its weights in float64, and its norm's weight."""
    clamp = (1.5, 1.702) if "clamp" in more else None
    config = MoEConfig(X, n, F, "all" not in more, "bias" in more, clamp)
    activation = "gelu" if "gelu" in more else "silu"
    with torch.device(device):
        moe = MoE(Config(D, (LayerConfig(),), 1, 1, D, F, 8, 8, activation=activation), config).to(
            BF16
        )
        moe.router.weight.normal_(std=2 / D**0.5)
        norm = (torch.rand(D) + 0.5).to(BF16)
    moe.w_gate_up = random_experts(X, 2 * F, D, kind, group, more, device)
    moe.w_down = random_experts(X, D, F, kind, min(group, F), more, device)
    plain = copy.deepcopy(moe)
    replace_layers(
        plain,
        QuantizedExperts,
        lambda layer: plain_layer(layer.dequantize(torch.float64), layer.bias),
    )
    return moe, plain.double(), norm


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
        sure = (ahead > 0.02).nonzero()[:rows, 0]  # x is rounded to bf16 before the router
        x, residual, ref = x[sure], residual[sure], ref[sure]
        assert len(x) == rows
        if device == "cuda":
            torch.full((64, 1024, 1024), torch.nan, device="cuda")  # freed at once
        out = fused.decode(x, norm, 1e-5, residual)
        assert error(out, ref) < 6e-3
        assert not fused.semaphores.any()
        whole = residual + fused(nn.functional.rms_norm(x, norm.shape, norm, 1e-5)[None])[0]
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

"""Kernels for mixtures of experts and their plain twins, each judged by float64 alone."""
import pytest
import torch
from torch import nn

import model
from fast import experts
from fast.experts import FusedMoE
from fast.packed_gemv import Experts, Plain
from gemv_on_cpu import gemv_on_cpu
from helpers import error
from model import Config, LayerConfig, MoE, MoEConfig
from quantize import CODES, QuantizedExperts, pack

BF16, F32 = torch.bfloat16, torch.float32
CASES = [  # D, F, X, n, kind of codes, inputs of a group, what else there is
    (96, 40, 8, 2, "16-bit", 0, ""), (72, 24, 5, 5, "16-bit", 0, "all"), (320, 96, 32, 4, "16-bit", 0, "clamp"),
    (128, 96, 20, 3, "int4", 32, "zeros"), (192, 64, 8, 2, "int4", 64, "clamp"), (96, 72, 8, 2, "int8", -1, "gelu"),
    (128, 40, 8, 2, "fp8", -1, "all"), (288, 96, 32, 4, "mxfp4", 32, "clamp"), (64, 32, 8, 2, "mxfp4", 32, ""),
    (32, 16, 40, 34, "int8", -1, "")]  # more experts than a warp has lanes
LARGE = [(2048, 768, 16, 4, "16-bit", 0, ""), (2880, 2880, 6, 2, "mxfp4", 32, "clamp"),
         (2048, 768, 16, 4, "int4", 128, "zeros"), (2048, 768, 16, 4, "fp8", 128, ""),
         (2880, 2880, 4, 2, "16-bit", 0, "clamp"), (4096, 1792, 4, 2, "int4", 32, "")]


def random_experts(X, N, K, kind, group, bias, zeros, device) -> tuple[nn.Module, torch.Tensor]:
    """-> the layer, and its weights in float64 [X, N, K]."""
    b = torch.randn(X, N, device=device, dtype=BF16) if bias else None
    if kind == "16-bit":
        layer = model.Experts(X, N, K, bias).to(device, BF16)
        layer.weight.data = torch.randn(X, N, K, device=device, dtype=BF16) / K ** 0.5
        layer.bias = None if b is None else nn.Parameter(b)
        return layer, layer.weight.double()
    codes, C = CODES[kind], 1 if group == -1 else K // group
    drawn = torch.randint(0, 2 ** codes.bits, (X, N, K), device=device)
    if kind == "fp8":
        drawn[drawn % 128 == 127] = 0  # NaN
    size = dict(int4=5, int8=80, fp8=150, mxfp4=3)[kind]  # of the numbers
    scales = (torch.rand(X, N, C, device=device) + 0.5) / K ** 0.5 / size
    points = torch.randint(3, 12, (X, N, C), device=device) if zeros else None
    numbers = codes.decode(drawn.to(torch.uint8)).double().unflatten(2, (C, -1))
    if kind == "mxfp4":
        scales = (scales.log2().round() + 127).to(torch.uint8)
    else:
        scales = scales.to(torch.float32 if kind == "fp8" else torch.float16)
    middle = points[..., None] if zeros else codes.zero
    weight = (numbers - middle) * codes.decode_scales(scales).double()[..., None]
    words = torch.stack([pack(of.to(torch.uint8), codes.bits) for of in drawn])
    layer = QuantizedExperts(words, scales, points, codes, b)
    return layer, weight.flatten(2)


def exact(x, norm, moe, gate_up, down, residual, gelu):
    """The module in float64, all experts for all rows -> what it gives [M, D], and by how much the last expert that a
    row takes is ahead of the next one [M]."""
    of, x, out = moe.moe, x.double(), residual.double()
    x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
    biases = [0 if bias is None else bias.double() for bias in (moe.router.bias, moe.w_gate_up.bias, moe.w_down.bias)]
    logits = x @ moe.router.weight.double().T + biases[0]
    order = logits.sort(descending=True).values
    order = torch.cat((order, torch.full_like(order[:, :1], -torch.inf)), 1)
    last = order[:, of.n_chosen - 1:of.n_chosen]
    weights = logits.exp() / (logits.exp() * (logits >= last if of.normalize else 1)).sum(1, keepdim=True)
    for expert in range(of.n_expert):
        gate_bias, down_bias = (bias if isinstance(bias, int) else bias[expert] for bias in biases[1:])
        gate, up = (x @ gate_up[expert].T + gate_bias).chunk(2, dim=1)
        if of.clamp:
            limit, alpha = of.clamp
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            gate = gate * torch.sigmoid(alpha * gate)
        else:
            gate = nn.functional.gelu(gate, approximate="tanh") if gelu else gate / (1 + (-gate).exp())
        y = (gate * up) @ down[expert].T + down_bias
        out = out + torch.where(logits[:, expert:expert + 1] >= last, weights[:, expert:expert + 1] * y, 0)
    return out, last[:, 0] - order[:, of.n_chosen]


def random_mixture(D, F, X, n, kind, group, more, device):
    """-> the module, its norm's weight, and its experts' weights in float64."""
    clamp, gelu = (1.5, 1.702) if "clamp" in more else None, "gelu" in more
    config = MoEConfig(X, n, F, "all" not in more, bool(clamp), clamp)
    with torch.device(device):
        moe = MoE(Config(D, (LayerConfig(),), 1, 1, D, F, 8, 8, activation="gelu" if gelu else "silu"), config).to(BF16)
        moe.router.weight.normal_(std=2 / D ** 0.5)
        norm = (torch.rand(D) + 0.5).to(BF16)
    moe.w_gate_up, gate_up = random_experts(X, 2 * F, D, kind, group, bool(clamp), "zeros" in more, device)
    moe.w_down, down = random_experts(X, D, F, kind, min(group, F), bool(clamp), "zeros" in more, device)
    return moe, norm, gate_up, down


@pytest.mark.parametrize("device, case", [
    *(("cpu", case) for case in CASES), *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES + LARGE)],
    ids=str)
@torch.no_grad()
def test_experts_and_their_twin(device, case):
    D = case[0]
    moe, norm, gate_up, down = random_mixture(*case, device)
    fused = FusedMoE(moe)
    for rows in (1, 3, 16, 100):
        x, residual = (torch.randn(2 * rows + 8, D, device=device, dtype=BF16) for _ in range(2))
        ref, ahead = exact(x, norm, moe, gate_up, down, residual, "gelu" in case[-1])
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
        alone = torch.cat([fused.decode(x[i:i + 1], norm, 1e-5, residual[i:i + 1]) for i in range(min(rows, 3))])
        assert error(alone, ref[:3]) < 6e-3


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_gemv_of_experts_on_a_cpu(case, tmp_path, monkeypatch):
    def on_cpu(x, weights, active, w, scales, shifts, semaphores, N, kind, group, bias=None, residual=None, gate=0,
               limit=0.0, alpha=0.0):
        packed = experts.as_experts(w, scales, shifts, semaphores, N, x.shape[-1], kind, group, gate) or Plain(w, gate)
        return gemv_on_cpu(tmp_path, x, packed, None, bias, residual, Experts(active, weights, limit, alpha))

    monkeypatch.setattr(experts, "expert_linear", on_cpu)
    moe, norm, gate_up, down = random_mixture(*case, "cpu")
    x, residual = (torch.randn(40, case[0], dtype=BF16) for _ in range(2))
    ref, ahead = exact(x, norm, moe, gate_up, down, residual, "gelu" in case[-1])
    i = ahead.argmax()
    assert error(FusedMoE(moe).decode(x[i:i + 1], norm, 1e-5, residual[i:i + 1]), ref[i:i + 1]) < 6e-3


def test_gemv_reads_no_expert_that_is_not_there(tmp_path):
    """One was chosen where there is room for two."""
    layer = experts.PackedExperts(random_experts(4, 32, 64, "int8", -1, False, False, "cpu")[0], 1)
    packed = experts.as_experts(layer.qweight, layer.scales_and_zeros, None, None, 32, 64, "int8", 64, 1)
    active, weights = torch.tensor([1, 2, 10 ** 9], dtype=torch.int32), torch.tensor([[0.0, 0, 1, 0]])
    chosen, other = gemv_on_cpu(tmp_path, torch.randn(1, 64, dtype=BF16), packed, experts=Experts(active, weights))
    assert chosen.all() and not other.any()

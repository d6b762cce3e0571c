"""
Linear layers for a CPU: with few rows of x, products and sums that torch.compile fuses into one pass over the weights.

Shapes: M rows of x, N outputs, K inputs, C groups of a row.
"""
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fast.layout import group_inputs
from quantize import QuantizedLinear

FEW_ROWS = 8  # twice as many for quantized weights, which MKL wants dequantized into memory first


class CpuLinear(nn.Module):
    """nn.Linear whose product with few rows, once compiled, is one pass over the weights.

    It reads them at 30 to 48 GB/s, MKL's matrix-vector product at 16 (fp32, 2 cores of an AMD EPYC): SmolLM2-135M
    decodes at 79 tokens/s instead of 32. A feed-forward layer of its size takes 0.51 ms with 1 row, 0.46 with 2, 0.85
    with 4, 1.7 with 9 and 2.2 with 16, with MKL 1.3, 1.9, 1.5, 1.6 and 1.3 (such cores, busier). Eager code and more
    rows take the plain twin, F.linear."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        N, K = self.weight.shape
        if not torch.compiler.is_compiling() or x.numel() > FEW_ROWS * K:
            return F.linear(x, self.weight, self.bias)
        w, rows = self.weight.float(), x.reshape(-1, K).float().unbind()
        y = torch.stack([(w * row).sum(-1) for row in rows])  # [M, N], in one loop: what is read of w serves all rows
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


class CpuQuantizedLinear(nn.Module):
    """QuantizedLinear with a code a byte, int4 too. Groups lie side by side (see group_inputs()).

    If it `decodes` and is compiled, few rows go over the codes as CpuLinear's go over the weights; a group's scale and
    zero point come to its sum. Else the weights are dequantized first."""

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        codes, scales, zeros, perm = group_inputs(layer)
        middle, scales = 2 ** (layer.bits - 1), scales.float()
        zeros = torch.zeros_like(scales) if zeros is None else zeros - middle
        codes = (codes.to(torch.int16) - middle).to(torch.int8)
        self.codes, self.scales, self.offsets = (nn.Parameter(tensor, requires_grad=False)
                                                 for tensor in (codes, scales, scales * zeros))
        self.bias, self.decodes = layer.bias, False
        self.register_buffer("perm", perm, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        (N, K), C = self.codes.shape, self.scales.shape[1]  # K with what fills the groups up
        if self.perm is not None:
            x = x[..., self.perm]
        codes = self.codes.view(N, C, K // C).float()
        if not self.decodes or not torch.compiler.is_compiling() or x.numel() > 2 * FEW_ROWS * K:
            w = codes * self.scales[:, :, None] - self.offsets[:, :, None]
            return F.linear(x, w.flatten(1).to(x.dtype), self.bias)
        rows = x.reshape(-1, C, K // C).float().unbind()  # [C, K / C] each
        y = torch.stack([((codes * row).sum(-1) * self.scales - self.offsets * row.sum(-1)).sum(-1) for row in rows])
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


def row_decoder(module: nn.Module) -> nn.Module:
    """A copy of the module for decoding on a CPU: the same weights and caches, and linear layers for few rows.

    Prefill keeps the original. Its number of rows is dynamic, so that one compiled code serves all prompts, and a layer
    that asks for the number would make the compiler specialize on it."""
    if type(module) is nn.Linear:
        return CpuLinear(module)
    decoder = copy.copy(module)
    decoder._modules = {name: row_decoder(child) for name, child in module.named_children()}
    decoder._compiled_call_impl = None
    if isinstance(module, CpuQuantizedLinear):
        decoder.decodes = True
    return decoder

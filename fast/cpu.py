"""
For a CPU: products of few rows as sums that torch.compile fuses into one pass over the weights.
"""
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantize import PackedLinear, unpack

MOST_ROWS = 8  # of RowLinear; of ByteLinear twice as many, as MKL would want its weights unpacked into memory first


class RowLinear(nn.Module):
    """nn.Linear for few rows on a CPU as products and sums, which torch.compile fuses into one pass over the weights.

    It reads them at 30 to 48 GB/s, MKL's matrix-vector product at 16 (fp32, 2 cores of an AMD EPYC): SmolLM2-135M
    decodes at 79 tokens/s instead of 32. A feed-forward layer of its size takes 0.51 ms with 1 row, 0.46 with 2, 0.85
    with 4, 1.7 with 9 and 2.2 with 16, with MKL 1.3, 1.9, 1.5, 1.6 and 1.3 (such cores, busier). Eager code and more
    rows take the plain twin."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        N, K = self.weight.shape
        if not torch.compiler.is_compiling() or x.numel() > MOST_ROWS * K:
            return F.linear(x, self.weight, self.bias)
        w, rows = self.weight.float(), x.reshape(-1, K).float().unbind()
        y = torch.stack([(w * row).sum(-1) for row in rows])  # [M, N], in one loop: what is read of w serves all rows
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


class ByteLinear(nn.Module):
    """PackedLinear for a CPU, a code a byte, int4 too; if it `decodes`, few rows, in C groups, as RowLinear does it."""

    def __init__(self, packed: PackedLinear):
        super().__init__()
        middle = 2 ** (packed.bits - 1)
        zeros = torch.zeros_like(packed.scales) if packed.zeros is None else packed.zeros - middle
        codes = unpack(packed.words, packed.bits, packed.in_features) - middle
        self.codes, self.scales, self.offsets = (nn.Parameter(tensor, requires_grad=False) for tensor in (
            codes.to(torch.int8), packed.scales.float(), packed.scales.float() * zeros))
        self.bias, self.order, self.decodes = packed.bias, packed.order, False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        (N, K), C = self.codes.shape, self.scales.shape[1]
        if self.order is not None:
            x = x[..., self.order]
        codes = self.codes.view(N, C, -1).float()
        if not self.decodes or not torch.compiler.is_compiling() or x.numel() > 2 * MOST_ROWS * K:
            w = codes * self.scales[:, :, None] - self.offsets[:, :, None]
            return F.linear(x, w.flatten(1).to(x.dtype), self.bias)
        rows = x.reshape(-1, C, K // C).float().unbind()  # [C, K / C] each
        y = torch.stack([((codes * row).sum(-1) * self.scales - self.offsets * row.sum(-1)).sum(-1) for row in rows])
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


def row_decoder(module: nn.Module) -> nn.Module:
    """For a CPU: the module again, with the same weights and caches, and linear layers for few rows. Prefill keeps the
    others: where the number of rows is open, so that one code serves all prompts, the compiler must not ask for it."""
    if type(module) is nn.Linear:
        return RowLinear(module)
    again = copy.copy(module)
    again._modules = {name: row_decoder(child) for name, child in module.named_children()}
    again._compiled_call_impl = None
    if isinstance(module, ByteLinear):
        again.decodes = True
    return again

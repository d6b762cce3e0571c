"""
Linear layers for a CPU: many rows of x go to oneDNN; few rows are products and sums, which torch.compile fuses into one
pass over the weights.

Shapes: M rows of x, N outputs, K inputs, C groups of a row.
"""
import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from fast.layout import group_inputs
from quantize import QuantizedLinear, replace_layers, unpack

FEW_ROWS = 4  # with 8, 4096 x 4096 weights take 4.3 ms in one pass, oneDNN 3.1; with 4, 2.9 each (2 cores)
FEW_QUANTIZED_ROWS = 16  # then int8 takes 6.1 ms, and 10.7 dequantized into memory for oneDNN
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's. PyTorch has no public name for it.

    oneDNN makes a kernel for each number of rows and keeps it: 124 numbers of rows took 326 MiB with 5 layers of a
    small model. So rows of zeros fill that number up, and 8 rows and more have 22 numbers up to 4096."""
    rows = x.reshape(-1, x.shape[-1])
    step = next(step for most, step in ((8, 1), (64, 8), (512, 64), (math.inf, 512)) if len(rows) <= most)
    filled = F.pad(rows, (0, 0, 0, -len(rows) % step))
    out = torch.ops.mkldnn._linear_pointwise(filled, w, bias, "none", [], "")
    return out[:len(rows)].view(*x.shape[:-1], len(w))


# Inductor compiles calls of that name for constant weights alone.
compiled_product = library.custom_op("llama_fast::cpu_linear", product, mutates_args=(), device_types="cpu")


@compiled_product.register_fake
def _(x, w, bias):
    return x.new_empty(*x.shape[:-1], len(w))


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear(), in fp32 by oneDNN.

    F.linear() calls MKL, which does without AVX-512 on AMD's CPUs. 512 rows and 4096 x 4096 weights take it 180 ms,
    oneDNN 78 ms; 16 rows take 9.8 and 5.3 ms (one core of an EPYC)."""
    if not ONEDNN or not x.dtype == w.dtype == torch.float32:
        return F.linear(x, w, bias)
    return (compiled_product if torch.compiler.is_compiling() else product)(x, w, bias)


class CpuLinear(nn.Module):
    """nn.Linear by linear(). If it `decodes` and is compiled, its product with few rows is one pass over the weights.

    It reads them at 30 to 48 GB/s, MKL's matrix-vector product at 16 (fp32, 2 cores of an AMD EPYC): SmolLM2-135M
    decodes at 79 tokens/s instead of 32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias, self.decodes = linear.weight, linear.bias, False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        N, K = self.weight.shape
        if not self.decodes or not torch.compiler.is_compiling() or x.numel() > FEW_ROWS * K:
            return linear(x, self.weight, self.bias)
        w, rows = self.weight.float(), x.reshape(-1, K).float().unbind()
        y = torch.stack([(w * row).sum(-1) for row in rows])  # [M, N], in one loop: what is read of w serves all rows
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


class CpuQuantizedLinear(nn.Module):
    """QuantizedLinear with a code a byte, int4 too. Groups lie side by side (see group_inputs()).

    If it `decodes` and is compiled, few rows go over the codes as CpuLinear's go over the weights; a group's scale and
    zero point come to its sum. Else the weights are dequantized first. One row and 4096 x 4096 weights take 1.5 ms in
    int8 and 1.6 ms in e4m3, whose conversion by PyTorch's own type would make it 2.9 (2 cores)."""

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        codes = unpack(layer.qweight, layer.codes.bits)
        codes, scales, zeros, perm = group_inputs(codes, layer.scales, layer.zeros, layer.g_idx, layer.codes.zero)
        middle, scales = layer.codes.zero, scales.float()
        zeros = torch.zeros_like(scales) if zeros is None else zeros - middle
        self.decode = layer.codes.decode
        if middle:  # integers; a signed byte needs no zero point
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
        codes = self.codes.view(N, C, K // C)
        codes = self.decode(codes)
        if not self.decodes or not torch.compiler.is_compiling() or x.numel() > FEW_QUANTIZED_ROWS * K:
            w = codes * self.scales[:, :, None] - self.offsets[:, :, None]
            return linear(x, w.flatten(1).to(x.dtype), self.bias)
        rows = x.reshape(-1, C, K // C).float().unbind()  # [C, K / C] each
        y = torch.stack([((codes * row).sum(-1) * self.scales - self.offsets * row.sum(-1)).sum(-1) for row in rows])
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


def install_linears(model: nn.Module) -> None:
    """Puts a CpuLinear in the place of each nn.Linear, a CpuQuantizedLinear in that of each QuantizedLinear."""
    replace_layers(model, nn.Linear, lambda layer, name: CpuLinear(layer))
    replace_layers(model, QuantizedLinear, lambda layer, name: CpuQuantizedLinear(layer))


def row_decoder(module: nn.Module) -> nn.Module:
    """A copy of the module for decoding on a CPU: the same weights and caches, and linear layers for few rows.

    Prefill keeps the original. Its number of rows is dynamic, so that one compiled code serves all prompts, and a layer
    that asks for the number would make the compiler specialize on it."""
    decoder = copy.copy(module)
    decoder._modules = {name: row_decoder(child) for name, child in module.named_children()}
    decoder._compiled_call_impl = None
    if isinstance(module, (CpuLinear, CpuQuantizedLinear)):
        decoder.decodes = True
    return decoder

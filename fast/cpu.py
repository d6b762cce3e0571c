"""
Linear layers for a CPU: many rows of x go to oneDNN. Few rows go to PyTorch's product of int4 or
int8, or are products and sums, which torch.compile fuses into one pass over the weights.

Shapes: M rows of x, N outputs, K inputs, C groups of a row.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from fast.layout import group_inputs
from model import buffer
from quantize import INT4, QuantizedLinear, pack, parameter, replace_layers, unpack

# With 4096 x 4096 weights in fp32, one pass and oneDNN, ms: 8 rows 5.2 and 6.1 on 2 cores of an
# EPYC with AVX2, 4.4 and 8.1 on 2 of a Xeon with AVX-512; 16 rows 12.6 and 7.2, 9.7 and 5.0.
FEW_ROWS = 8
FEW_QUANTIZED_ROWS = 16  # then int8 takes 6.1 ms, and 10.7 dequantized into memory for oneDNN
AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"  # and no AVX-512
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's. PyTorch has no public name for it.

    oneDNN makes a kernel for each number of rows and keeps it: 124 numbers of rows took 326 MiB
    with 5 layers of a small model. So rows of zeros fill that number up, and 8 rows and more have
    22 numbers up to 4096."""
    rows = x.reshape(-1, x.shape[-1])
    step = next(
        step for most, step in ((8, 1), (64, 8), (512, 64), (math.inf, 512)) if len(rows) <= most
    )
    filled = F.pad(rows, (0, 0, 0, -len(rows) % step))
    out = torch.ops.mkldnn._linear_pointwise(filled, w, bias, "none", [], "")
    return out[: len(rows)].view(*x.shape[:-1], len(w))


# Inductor compiles calls of that name for constant weights alone.
compiled_product = library.custom_op(
    "llama_fast::cpu_linear", product, mutates_args=(), device_types="cpu"
)


@compiled_product.register_fake
def _(x, w, bias):
    return x.new_empty(*x.shape[:-1], len(w))


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear(), in fp32 by oneDNN.

    F.linear() calls MKL, which does without AVX-512 on AMD's CPUs. 512 rows and 4096 x 4096 weights
    take it 180 ms, oneDNN 78 ms; 16 rows take 9.8 and 5.3 ms (one core of an EPYC)."""
    if not ONEDNN or not x.dtype == w.dtype == torch.float32:
        return F.linear(x, w, bias)
    return (compiled_product if torch.compiler.is_compiling() else product)(x, w, bias)


def row_sums(w: Tensor, row: Tensor) -> Tensor:
    """The sums over the last dimension of w [N, ..., K] times row [..., K] -> [N, ...].

    In Inductor's loop a sum is one addition behind the other. So up to four parts of w have loops
    of their own, which it makes one: 4096 x 4096 weights in int8 take 0.63 ms, not 1.23, and as
    more is read from memory at once, in fp32 2.8 ms, not 5.0 (2 Xeon cores)."""
    parts = next(n for n in (4, 2, 1) if len(w) % n == 0)
    return torch.cat(
        [(part.float() * row).sum(-1) for part in w.unflatten(0, (parts, -1)).unbind()]
    )


class CpuLinear(nn.Module):
    """nn.Linear by linear(). If it `decodes` and is compiled, its product with few rows is one pass
    over the weights.

    It reads them at 30 to 48 GB/s, MKL's matrix-vector product at 16 (fp32, 2 cores of an AMD
    EPYC): SmolLM2-135M decodes at 79 tokens/s instead of 32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias, self.decodes = linear.weight, linear.bias, False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        N, K = self.weight.shape
        if not self.decodes or not torch.compiler.is_compiling() or x.numel() > FEW_ROWS * K:
            return linear(x, self.weight, self.bias)
        rows = x.reshape(-1, K).float().unbind()  # what is read of w serves all of them
        y = torch.stack([row_sums(self.weight, row) for row in rows])  # [M, N]
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


class CpuQuantizedLinear(nn.Module):
    """QuantizedLinear for a CPU. Groups lie side by side (see group_inputs()).

    If it `decodes` and is compiled, few rows go to PyTorch's product of int4, which takes x in bf16
    and gives bf16: it is off by 0.3%, where int4's rounding is off by 10%. Other codes are gone
    over as CpuLinear's weights are, in fp32; a group's scale and zero point come to its sum. One
    row and 4096 x 4096 weights take 1.5 ms in int8, whose product by PyTorch made SmolLM2 8%
    slower, and 1.6 ms in e4m3, whose conversion by PyTorch's own type would make it 2.9 (2 cores).
    Many rows: the weights are dequantized first.

    Without AVX-512 Inductor converts bytes one by one, and the pass takes 8.2 ms in int8, more than
    the 2.6 of weights in fp32. There int8 with one scale a row and no zero points goes to PyTorch's
    product, in bf16 as well: 1.1 ms."""

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        self.kind, self.bias, self.decodes = layer.codes, layer.bias, False
        codes = unpack(layer.qweight, layer.codes.bits)
        codes, scales, zeros, perm = group_inputs(
            codes, layer.scales, layer.zeros, layer.g_idx, layer.codes.zero
        )
        self.N, self.K = codes.shape
        self.middle, scales = layer.codes.zero, layer.codes.decode_scales(scales)
        offsets = None if zeros is None else scales * (zeros - self.middle)
        self.packed = self.pairs = None
        if layer.codes == INT4 and self.K // scales.shape[1] % 32 == 0:
            packed, pairs = int4_operands(codes, scales, offsets)
            self.packed, self.pairs = parameter(packed), parameter(pairs)
            self.group = self.K // len(pairs)
            codes = pack(codes, 4)
        elif self.middle:  # integers; a signed byte needs no zero point
            codes, self.middle = (codes.to(torch.int16) - self.middle).to(torch.int8), 0
        # What a step does not read is a buffer: parameters are what is counted as read.
        hold = parameter if self.packed is None else buffer
        self.codes, self.scales = hold(codes), hold(scales)
        self.offsets = None if offsets is None else hold(offsets)
        whole_rows = codes.dtype == torch.int8 and scales.shape[1] == 1 and offsets is None
        # The product's own scales are bf16: it gets ones, and ours come in fp32. A K of 97 gave
        # NaN.
        in_bf16 = AVX2 and whole_rows and self.K % 32 == 0
        self.ones = buffer(torch.ones(self.N).bfloat16()) if in_bf16 else None
        self.register_buffer("perm", perm, persistent=False)

    def numbers(self) -> Tensor:
        """The codes less the middle, [N, C, K / C], so that a weight is one times its scale, less
        its offset."""
        codes = self.codes if self.packed is None else unpack(self.codes, 4)
        C = self.scales.shape[1]
        numbers = self.kind.decode(codes.view(self.N, C, self.K // C))
        return numbers - self.middle if self.middle else numbers

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        if self.perm is not None:
            x = x[..., self.perm]
        if (
            not self.decodes
            or not torch.compiler.is_compiling()
            or x.numel() > FEW_QUANTIZED_ROWS * self.K
        ):
            w = self.numbers() * self.scales[:, :, None]
            w = w if self.offsets is None else w - self.offsets[:, :, None]
            return linear(x, w.flatten(1).to(x.dtype), self.bias)
        y = self.few_rows(x.reshape(-1, self.K))
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.N)

    def few_rows(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N], without the bias, in bf16 or fp32."""
        if self.packed is not None:
            return int4_product(x.bfloat16(), self.packed, self.group, self.pairs)[:, : self.N]
        if self.ones is not None:
            return int8_product(x.bfloat16(), self.codes, self.ones) * self.scales[:, 0]
        numbers, C = self.numbers(), self.scales.shape[1]
        # as_strided() has Inductor write x to memory. Otherwise what makes x, a norm for example,
        # is fused into the loop and computed anew for each output: 960 x 576 weights in int8 then
        # take 161 us, not 103 (2 Xeon cores).
        rows = x.float().contiguous().as_strided(x.shape, (self.K, 1)).view(-1, C, self.K // C)
        return torch.stack(
            [self.scaled(row_sums(numbers, row), row.sum(-1)) for row in rows.unbind()]
        )

    def scaled(self, sums: Tensor, inputs: Tensor) -> Tensor:
        """The outputs [N] of a row, from its groups' sums of number times input [N, C] and of
        inputs [C]."""
        sums = sums * self.scales
        return (sums if self.offsets is None else sums - self.offsets * inputs).sum(-1)


# int4_product(x bf16 [M, K], packed, group, pairs) and int8_product(x bf16 [M, K], codes [N, K],
# scales bf16 [N]) -> bf16 [M, N]: PyTorch's, under names of ours, as Inductor's own lowering of
# int4 loses the group size where layers share code (torch 2.11 to 2.13). library.custom_op would
# cost 10 us a call.
OPERATORS = library.Library("llama_fast", "FRAGMENT")
OPERATORS.define("cpu_int8(Tensor x, Tensor codes, Tensor scales) -> Tensor")
OPERATORS.impl("cpu_int8", torch.ops.aten._weight_int8pack_mm, "CPU")
OPERATORS.impl("cpu_int8", lambda x, codes, scales: x.new_empty(len(x), len(codes)), "Meta")
int8_product = torch.ops.llama_fast.cpu_int8
OPERATORS.define("cpu_int4(Tensor x, Tensor packed, int group, Tensor pairs) -> Tensor")
OPERATORS.impl("cpu_int4", torch.ops.aten._weight_int4pack_mm_for_cpu, "CPU")
OPERATORS.impl(
    "cpu_int4", lambda x, packed, group, pairs: x.new_empty(len(x), pairs.shape[1]), "Meta"
)
int4_product = torch.ops.llama_fast.cpu_int4


def int4_operands(codes: Tensor, scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """What int4_product() takes of codes [N, K], scales and offsets [N, C], which may be None:
    codes in an order of its own, and of each group the scale and the number to add, bf16 [K / G, N,
    2]. Rows of 0 fill N up to 16's multiple."""
    (N, K), C = codes.shape, scales.shape[1]
    G = next(G for G in (256, 128, 64, 32) if K // C % G == 0)  # the sizes that the product knows
    offsets = torch.zeros_like(scales) if offsets is None else offsets
    pairs = torch.stack((scales, -offsets), dim=-1).repeat_interleave(K // C // G, 1)
    codes, pairs = (
        F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, -N % 16)) for tensor in (codes, pairs)
    )
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return packed, pairs.transpose(0, 1).bfloat16()


def install_linears(model: nn.Module) -> None:
    """Puts a CpuLinear in the place of each nn.Linear, a CpuQuantizedLinear in that of each
    QuantizedLinear."""
    replace_layers(model, nn.Linear, CpuLinear)
    replace_layers(model, QuantizedLinear, CpuQuantizedLinear)


def row_decoder(module: nn.Module) -> nn.Module:
    """A copy of the module for decoding on a CPU: the same weights and caches, and linear layers
    for few rows.

    Prefill keeps the original. Its number of rows is dynamic, so that one compiled code serves all
    prompts, and a layer that asks for the number would make the compiler specialize on it."""
    decoder = copy.copy(module)
    decoder._modules = {name: row_decoder(child) for name, child in module.named_children()}
    decoder._compiled_call_impl = None
    if isinstance(module, (CpuLinear, CpuQuantizedLinear)):
        decoder.decodes = True
    return decoder

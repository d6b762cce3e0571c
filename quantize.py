"""
Quantization to int8 and int4: the plain quantized layer, and rounding. GPTQ is in gptq.py. What
reads quantized checkpoints is hub/formats.py, what writes them hub/write.py; the command that makes
them:

    python quantize.py --checkpoint DIR --quantize int4 --out DIR-int4      # round to nearest
    python quantize.py --checkpoint DIR --gptq --act-order --calibration TEXT --out DIR-gptq
    python quantize.py --checkpoint DIR --quantize int8 --sym --out DIR-w8a16 \\
        --format compressed-tensors

A weight is (decode(q) - zero) * scale, where q is its code: a small whole number. `codes`, a Codes
such as INT4, says what codes stand for. A group of G weights of one row, along K, shares scale and
zero.

Shapes: N outputs, K inputs, C groups of a row (K / G), X experts.
"""

import os
import signal

if __name__ == "__main__":  # as in generate.py
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Experts, Transformer, always, grouped_linear


# The plain quantized layer


def from_numbers(q: Tensor) -> Tensor:
    """Codes that are integers, or scales of fp16 or fp32 -> fp32"""
    return q.float()


def from_float(q: Tensor, bits: int, mantissa: int, bias: int):
    """Codes of a small floating-point type, uint8 -> the numbers, fp32. By bits, so that no device
    need know the type.

    A code is a sign, an exponent and bits of mantissa. They go where fp32 has its sign and the low
    bits of its exponent. fp32's exponents count from -127, the type's from -bias: what is read is 2
    ** (bias - 127) times the number. e4m3's 0x3c is 0 0111 100: 2 ** (7 - 7) * (1 + 4 / 8) =
    1.5."""
    q = q.int()
    sign = 1 << (bits - 1)
    placed = (q & sign) << (32 - bits) | (q & (sign - 1)) << (23 - mantissa)
    return placed.view(torch.float32) * 2.0 ** (127 - bias)


from_e4m3 = partial(from_float, bits=8, mantissa=3, bias=7)
from_e2m1 = partial(from_float, bits=4, mantissa=1, bias=1)


def from_e8m0(scales: Tensor):
    """e8m0's scales, uint8 -> 2 ** (scale - 127), fp32. Of 0 it is 2 ** -127, below fp32's normal
    numbers: its bits are 1 << 22."""
    bits = scales.int() << 23
    return bits.clamp(min=1 << 22).view(torch.float32)


@dataclass(frozen=True)
class Codes:
    """What the codes of a weight stand for: a weight is (decode(q) - zero) * scale.

    Your own kind of codes, if they are whole numbers, is two places, the second for --quantize:

        # quantize.py, below: CODES = {
        INT2 = Codes("int2", 2, 2, from_numbers, from_numbers)
        CODES[INT2.name] = INT2

        # llm.py, below: INTS = (
        "int2",

    round_model(model, "int2") and gptq_model() then make such layers, hub/formats.py may read them,
    and fast/cpu.py serves them. The kernels serve the kinds that fast/layout.py has an entry
    for."""

    name: str
    bits: int  # of a code: 2, 4 or 8
    zero: int  # the zero point of layers that have none of their own
    decode: Callable[[Tensor], Tensor]  # codes, uint8 -> the numbers that they stand for, fp32
    decode_scales: Callable[[Tensor], Tensor]  # scales as they are held -> fp32


INT4 = Codes("int4", 4, 8, from_numbers, from_numbers)
INT8 = Codes("int8", 8, 128, from_numbers, from_numbers)
E4M3 = Codes("fp8", 8, 0, from_e4m3, from_numbers)
MXFP4 = Codes("mxfp4", 4, 0, from_e2m1, from_e8m0)  # groups of 32
NVFP4 = Codes("nvfp4", 4, 0, from_e2m1, from_numbers)  # groups of 16
CODES = {codes.name: codes for codes in (INT4, INT8, E4M3, MXFP4, NVFP4)}


def pack(q: Tensor, bits: int):
    """Codes q [..., K] -> int32 [..., K * bits / 32]; a word's first code lies in its low bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=q.device)
    return (q.int().unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int):
    """int32 [..., W] -> the codes, uint8 [..., W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def parameter(tensor: Tensor | None):
    """A parameter that is not trained, None for None."""
    return None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False)


class QuantizedLinear(nn.Module):
    """nn.Linear whose weights are codes, which it dequantizes in each call.

    w[n, k] = (decode(q[n, k]) - zeros[n, c]) * scales[n, c], where c is the group of input k.

    qweight: the codes, int32 [N, K * bits / 32] as pack() gives them; scales: fp16 or fp32 [N, C],
    of MXFP4 e8m0 in uint8; zeros: integers [N, C], None for codes.zero everywhere; g_idx: each
    input's group [K], None where each K / C consecutive inputs are a group."""

    def __init__(
        self,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        codes: Codes,
        bias: Tensor | None = None,
        g_idx: Tensor | None = None,
    ):
        super().__init__()
        self.codes = codes
        self.out_features, words = qweight.shape[-2:]
        self.in_features = words * 32 // codes.bits
        self.qweight = parameter(qweight)
        self.scales = parameter(scales)
        self.zeros = parameter(None if zeros is None else zeros.to(torch.int16))
        self.bias = parameter(bias)
        self.g_idx = parameter(g_idx)

    def groups(self) -> Tensor:
        """Each input's group [K]."""
        K, C = self.in_features, self.scales.shape[-1]
        if self.g_idx is not None:
            return self.g_idx
        return torch.arange(K, device=self.scales.device) // (K // C)

    def zero_points(self) -> Tensor:
        """[..., N, C], int16, of a layer without its own codes.zero everywhere."""
        if self.zeros is not None:
            return self.zeros
        return torch.full_like(self.scales, self.codes.zero, dtype=torch.int16)

    def dequantize(self, dtype: torch.dtype, experts=...) -> Tensor:
        """The weights [N, K]; of a QuantizedExperts, these experts' [any, N, K], by default all."""
        scales = self.codes.decode_scales(self.scales[experts])
        zeros = torch.full_like(scales, self.codes.zero)
        if self.zeros is not None:
            zeros = self.zeros[experts]
        w = self.codes.decode(unpack(self.qweight[experts], self.codes.bits))
        if self.g_idx is not None:
            groups = self.g_idx[experts].unsqueeze(-2)
            scales, zeros = (torch.take_along_dim(of, groups, -1) for of in (scales, zeros))
            return ((w - zeros) * scales).to(dtype)
        w = w.unflatten(-1, (scales.shape[-1], -1))  # [..., N, C, G]
        return ((w - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2).to(dtype)

    def forward(self, x: Tensor):
        """x [..., K] -> [..., N]"""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


class QuantizedExperts(QuantizedLinear):
    """model.Experts whose weights are codes: all tensors as QuantizedLinear has them, with X in
    front."""

    def forward(self, x: Tensor, experts: Tensor):
        """As Experts. Few rows dequantize the matrices of their experts alone."""
        if always(x.shape[0] <= self.n_expert):
            chosen = self.dequantize(x.dtype, experts)  # [M, N, K]
            y = (chosen @ x[:, :, None]).squeeze(2)
        else:
            y = grouped_linear(x, self.dequantize(x.dtype), experts)
        return y if self.bias is None else y + self.bias[experts]

    @property
    def n_expert(self) -> int:
        return len(self.qweight)

    def expert(self, x: int) -> QuantizedLinear:
        tensors = self.qweight, self.scales, self.zeros, self.bias, self.g_idx
        own = [None if tensor is None else tensor[x] for tensor in tensors]
        return QuantizedLinear(*own[:3], self.codes, *own[3:])


def replace_layers(model: nn.Module, kind: type, build: Callable[[nn.Module], nn.Module]):
    """Puts build(layer) in the place of each layer of this kind, not of its subclasses."""
    # Names, so that each layer is freed once its place is taken.
    for name in [name for name, layer in model.named_modules() if type(layer) is kind]:
        model.set_submodule(name, build(model.get_submodule(name)))


def plain_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear | Experts:
    """A linear layer of a weight [N, K], Experts of [X, N, K]."""
    with torch.device("meta"):
        if weight.dim() == 3:
            layer = Experts(*weight.shape, bias=False)
        else:
            layer = nn.Linear(*weight.T.shape, bias=False)
    layer.weight, layer.bias = parameter(weight), parameter(bias)
    return layer


def alike(linears: list[nn.Module]) -> bool:
    """Whether all are quantized, with the same codes and as many groups."""
    kinds = {
        isinstance(linear, QuantizedLinear) and (linear.codes, linear.scales.shape[-1])
        for linear in linears
    }
    return len(kinds) == 1 and False not in kinds


def join_experts(linears: Iterable[nn.Module]) -> QuantizedExperts:
    """ValueError for layers that differ in their codes or their number of groups."""
    linears = [*linears]
    if not alike(linears):
        raise ValueError("the experts of a layer are quantized in several ways; want one for all")
    g_idx = None
    if any(linear.g_idx is not None for linear in linears):
        g_idx = torch.stack([linear.groups() for linear in linears])
    return QuantizedExperts(*merge(linears, torch.stack), g_idx)


def merge(linears: list[QuantizedLinear], join: Callable) -> tuple:
    """What QuantizedLinear takes, but for g_idx, of several that are alike(). join: torch.cat or
    torch.stack."""
    zeros = bias = None
    if any(linear.zeros is not None for linear in linears):
        zeros = join([linear.zero_points() for linear in linears])
    if linears[0].bias is not None:
        bias = join([linear.bias for linear in linears])
    qweight = join([linear.qweight for linear in linears])
    scales = join([linear.scales for linear in linears])
    return qweight, scales, zeros, linears[0].codes, bias


@cache
def say_once(message: str):
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr)


# Which layers, which groups


SIZES = 128, 64, 32
DEFAULT_GROUP = "the largest of 128, 64 and 32 that divides the inputs of each layer"


# Small, and what they give decides: which experts, how much of one, how much a state forgets, what
# a token brings to a layer. wkv: latent attention's decode multiplies by parts of it, see
# model.LatentAttention.
LEFT_OUT = ".router", ".shared_gate", ".w_gates", ".wkv", "ple.gate", "ple.up", "ple.project"


def find_layers(model: Transformer, head: bool) -> list[str]:
    """The names in the model of the layers that quantization replaces: all linear ones and experts,
    but LEFT_OUT; the head only if asked for and not tied."""
    names = [
        name
        for name, layer in model.layers.named_modules(prefix="layers")
        if type(layer) in (nn.Linear, Experts) and not name.endswith(LEFT_OUT)
    ]
    if head and not model.config.tied and type(model.head) is nn.Linear:
        names.append("head")
    return names


def group_of(K: int, group_size: int) -> int:
    """The number of inputs that group_size stands for: all of them for -1. A ValueError says which
    sizes there are."""
    G = K if group_size == -1 else group_size
    if K % 32:
        raise ValueError(
            f"a layer has {K} inputs; want a multiple of 32: this model cannot be quantized here"
        )
    if not isinstance(G, int) or G < 32 or G % 32 or K % G:
        sizes = [size for size in (*SIZES, -1) if K % size == 0]
        raise ValueError(
            f"group size {group_size} does not divide the {K} inputs of a layer; want one of "
            f"{sizes}"
        )
    return G


def default_group(quantize: str | None, columns: Iterable[int]) -> int:
    """The group size where none is given: for int8 -1, a scale a row; for int4 the largest of SIZES
    that divides all these numbers, the inputs of each layer; 1 where nothing is quantized."""
    if not quantize:
        return 1
    if CODES[quantize].bits == 8:
        return -1
    columns = {*columns}
    fit = [size for size in SIZES if all(K % size == 0 for K in columns)]
    return max(fit, default=min(SIZES))  # which group_of() then refuses


# Rounding

SMALLEST = torch.finfo(torch.float32).smallest_normal


def find_scales(w: Tensor, codes: Codes, sym: bool, widest: Callable | None = None):
    """w [..., G], fp32 -> scale and zero [..., 1] of the range that spans the weights and 0.

    widest(low, high): the range of a group of which only a part is here. Zero points start at 1:
    files of the "gptq" format store zero - 1, and engines disagree on how -1 is read. ValueError
    for codes that are no whole numbers."""
    if codes.decode is not from_numbers:
        raise ValueError(f"{codes.name}: only codes that are whole numbers are rounded to")
    top = 2**codes.bits - 1
    low = w.amin(-1, keepdim=True).clamp(max=0)
    high = w.amax(-1, keepdim=True).clamp(min=0)
    if widest:
        low, high = widest(low, high)
    if sym:
        scale = 2 * torch.maximum(-low, high) / top
        return scale, torch.full_like(scale, codes.zero)
    # A zero point is 1 or more, so that at most top - 1 codes lie above it.
    scale = torch.maximum((high - low) / top, high / (top - 1))
    return scale, (-low / scale.clamp(min=SMALLEST)).round().clamp(1, top)


def as_held(scale: Tensor) -> Tensor:
    """Scales as layers hold them, in fp32: as fp16 rounds them where it has room, else as they are.
    None is 0, as what is divided by them may be.

    Below 2 ** -14 fp16's numbers are 2 ** -24 apart. There it rounds up, so that no code is cut
    off, down to 2 ** -20: a step that is 1/16 wider at most."""
    up = (scale * 2**24).ceil() / 2**24
    half = torch.where(scale < 2**-14, up, scale.half().float())
    has_room = (scale >= 2**-20) & (scale <= 65504) | (scale == 0)
    return torch.where(has_room, half.clamp(min=2**-24), scale.clamp(min=SMALLEST))


def in_half(scales: Tensor) -> Tensor:
    """fp16 where that holds all of them, else fp32."""
    half, scales = scales.half(), scales.float()
    return half if half.float().equal(scales) else scales


def encode(w: Tensor, scale: Tensor, zero: Tensor, codes: Codes) -> Tensor:
    return ((w / scale).round_() + zero).clamp_(0, 2**codes.bits - 1)


def round_to_nearest(
    w: Tensor, codes: Codes, group_size: int, sym: bool, widest: Callable | None = None
):
    """w [..., N, K] -> q, uint8, scales [..., N, C], fp16 or, if that has no room, fp32, and zeros,
    None for codes.zero everywhere."""
    groups = w.float().unflatten(-1, (-1, group_of(w.shape[-1], group_size)))  # [..., N, C, G]
    scale, zero = find_scales(groups, codes, sym, widest)  # [..., N, C, 1]
    scale = as_held(scale)
    q = encode(groups, scale, zero, codes).to(torch.uint8)
    zeros = None if sym else zero.squeeze(-1).to(torch.uint8)
    return q.flatten(-2), in_half(scale.squeeze(-1)), zeros


def rounded(layer: nn.Linear | Experts, codes: Codes, *how) -> QuantizedLinear:
    """how: round_to_nearest()'s arguments after the codes."""
    q, scales, zeros = round_to_nearest(layer.weight, codes, *how)
    kind = QuantizedExperts if isinstance(layer, Experts) else QuantizedLinear
    return kind(pack(q, codes.bits), scales, zeros, codes, layer.bias)


@torch.no_grad()
def round_model(
    model: Transformer,
    quantize: str,
    group_size: int | None = None,
    sym: bool | None = None,
    head: bool = False,
    shard=None,
    progress: bool = False,
):
    """Replaces each linear layer, and the experts of a layer, by ones with codes, rounded to "int8"
    or "int4", or another of CODES that is whole numbers.

    group_size, sym: None for those of --quantize. shard: the tp.Shard whose part of the model this
    is; group_size is then the whole model's."""
    from tqdm import tqdm

    names = find_layers(model, head)
    if group_size is None:
        columns = (model.get_submodule(name).weight.shape[-1] for name in names)
        group_size = default_group(quantize, columns)
    sym = quantize == "int8" if sym is None else sym
    for name in tqdm(names, "quantizing", unit="layer", disable=None if progress else True):
        widest = partial(shard.widest, name) if shard and group_size == -1 else None
        layer = model.get_submodule(name)
        model.set_submodule(name, rounded(layer, CODES[quantize], group_size, sym, widest))


def round_head(model: Transformer, quantize: str):
    """Rounds the output head to "int8", a scale a row, or "int4", groups of 32. A tied model's gets
    codes of its own, and the embedding stays; with several ranks each has rounded its own rows.
    ValueError for a head that cannot be rounded."""
    name = "head.linear" if hasattr(model.head, "linear") else "head"
    head = model.get_submodule(name)
    if isinstance(head, QuantizedLinear):
        raise ValueError(
            f"quantize_head={quantize}: this checkpoint's head is quantized already; leave the "
            f"option out"
        )
    group = -1 if quantize == "int8" else 32
    model.set_submodule(name, rounded(head, CODES[quantize], group, quantize == "int8"))


def main():
    from cli.quantize import main

    main()


if __name__ == "__main__":
    sys.modules["quantize"] = sys.modules["__main__"]  # so that cli/ does not load this file again
    from cli.errors import report_errors

    report_errors(main)

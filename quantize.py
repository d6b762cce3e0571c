"""
Quantization to int8 and int4: the plain quantized layer, rounding, GPTQ. What reads and writes the files of quantized
checkpoints is formats.py; the command that makes them:

    python quantize.py --checkpoint DIR --bits 4 --group-size 128 --out DIR-int4               # round to nearest
    python quantize.py --checkpoint DIR --bits 4 --gptq --act-order --calibration TEXT --out DIR-gptq
    python quantize.py --checkpoint DIR --bits 8 --sym --format compressed-tensors --out DIR-w8a16

GPTQ (Frantar et al. 2022, arXiv 2210.17323) chooses the codes column by column. The columns that are not quantized yet
make up for each error, as measured on the inputs that a calibration text gives.

A weight is (code - zero) * scale. A group of G weights of one row, along K, shares scale and zero.

Shapes: N outputs, K inputs, C groups of a row (K / G), S sequences of T tokens, D model dim.
"""
import signal

# PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import Checkpoint, UserError, hf_weights
from model import Transformer, visible

SHRINK = [1 - 0.03 * i for i in range(8)]  # factors of a group's range among which GPTQ chooses
# Columns whose errors are passed on to the rest at once: arXiv 2210.17323, section 3.3, step 2.
BLOCK = 128
CHUNK = 8192  # calibration tokens at a time


# The plain quantized layer


def from_integers(codes: Tensor) -> Tensor:
    """uint8 -> fp32"""
    return codes.float()


def from_e4m3(codes: Tensor):
    """e4m3's codes, uint8 -> the numbers, fp32. By bits, so that a device need not know the type.

    A code is a sign, 4 bits of exponent and 3 of mantissa. They go where fp32 has its sign and the low bits of its
    exponent. fp32's exponents count from -127, e4m3's from -7: what is read is 2 ** -120 times the number."""
    codes = codes.int()
    return ((codes & 0x80) << 24 | (codes & 0x7F) << 20).view(torch.float32) * 2.0**120


@dataclass(frozen=True)
class Codes:
    """What the codes of a weight are. A weight is (decode(code) - zero) * scale.

    Another kind is one more of these, and an entry of CODES. MXFP4's e2m1 would be Codes("mxfp4", 4, 0, from_e2m1): a
    sign, 2 bits of exponent and 1 of mantissa, with a scale, a power of two, for 32 weights. The plain layer and a
    CPU's serve it then. The kernels serve the kinds that fast/layout.py has an entry for."""
    name: str
    bits: int
    zero: int  # the zero point of layers that have none of their own
    decode: Callable[[Tensor], Tensor]  # codes, uint8 -> the numbers that they stand for, fp32


INT4 = Codes("int4", 4, 8, from_integers)
INT8 = Codes("int8", 8, 128, from_integers)
E4M3 = Codes("fp8", 8, 0, from_e4m3)
CODES = {codes.name: codes for codes in (INT4, INT8, E4M3)}


def pack(codes: Tensor, bits: int):
    """codes [N, K] below 2 ** bits -> int32 [N, K * bits / 32]; a word's first code lies in its low bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return (codes.int().unflatten(1, (-1, 32 // bits)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int):
    """int32 [N, W] -> the codes, uint8 [N, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & 2**bits - 1).to(torch.uint8).flatten(1)


def parameter(tensor: Tensor | None):
    """A parameter that is not trained, None for None."""
    return None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False)


class QuantizedLinear(nn.Module):
    """nn.Linear whose weights are codes, which it dequantizes in each call.

    w[n, k] = (decode(code[n, k]) - zeros[n, c]) * scales[n, c], where c is the group of input k.

    qweight: the codes, int32 [N, K * bits / 32] as pack() gives them; scales: fp16 or fp32 [N, C]; zeros: integers
    [N, C], None for codes.zero everywhere; g_idx: each input's group [K], None where each K / C consecutive inputs are
    a group."""

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
        self.out_features, self.in_features = len(qweight), qweight.shape[1] * 32 // codes.bits
        self.qweight, self.scales = parameter(qweight), parameter(scales)
        self.zeros = parameter(None if zeros is None else zeros.to(torch.int16))
        self.bias, self.g_idx = parameter(bias), parameter(g_idx)

    def groups(self) -> Tensor:
        """Each input's group [K]."""
        K, C = self.in_features, self.scales.shape[1]
        return (
            torch.arange(K, device=self.scales.device) // (K // C)
            if self.g_idx is None
            else self.g_idx
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K]."""
        scales = self.scales.float()
        zeros = torch.full_like(scales, self.codes.zero) if self.zeros is None else self.zeros
        w = self.codes.decode(unpack(self.qweight, self.codes.bits))
        if self.g_idx is not None:
            return ((w - zeros[:, self.g_idx]) * scales[:, self.g_idx]).to(dtype)
        w = w.unflatten(1, (scales.shape[1], self.in_features // scales.shape[1]))  # [N, C, G]
        return ((w - zeros[:, :, None]) * scales[:, :, None]).flatten(1).to(dtype)

    def forward(self, x: Tensor):
        """x [..., K] -> [..., N]"""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def replace_layers(model: nn.Module, kind: type, build: Callable[[nn.Module, str], nn.Module]):
    """Puts build(layer, its name) in the place of each layer of this kind, subclasses apart."""
    # The list holds no such layer itself, so that each is freed once its place is taken.
    for module in [module for module in model.modules() if type(module) is not kind]:
        for name, child in list(module.named_children()):
            if type(child) is kind:
                setattr(module, name, build(child, name))


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight, linear.bias = parameter(weight), parameter(bias)
    return linear


def unpack_layers(model: Transformer):
    """Puts plain layers with the same weights in the place of quantized ones.

    Eager code dequantizes a quantized layer in each call, and is several times slower than with plain layers."""
    dtype = model.embed.weight.dtype
    replace_layers(
        model, QuantizedLinear, lambda layer, _: plain_linear(layer.dequantize(dtype), layer.bias)
    )


@cache
def say_once(message: str):
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr)


# Which layers, which groups


def find_linears(model: Transformer, head: bool) -> list[str]:
    """The names in the model of the layers that quantization replaces, the head's only if asked for."""
    weights = [
        weight
        for weight in hf_weights(model.config).values()
        if weight.quantized or head and weight.ours == "head.weight"
    ]
    # The names of q, k and v are one.
    return list(dict.fromkeys(weight.ours.removesuffix(".weight") for weight in weights))


def group_of(K: int, group_size: int) -> int:
    """The number of inputs that group_size stands for: all of them for -1. A UserError says which sizes there are."""
    G = K if group_size == -1 else group_size
    if K % 32:
        raise UserError(
            f"a layer has {K} inputs; want a multiple of 32: this model cannot be quantized here"
        )
    if not isinstance(G, int) or G < 32 or G % 32 or K % G:
        sizes = [size for size in (32, 64, 128, -1) if K % size == 0]
        raise UserError(
            f"group size {group_size} does not divide the {K} inputs of a layer; want one of {sizes}"
        )
    return G


# Rounding


def find_scales(
    w: Tensor, codes: Codes, sym: bool, costs: Tensor | None = None, widest: Callable | None = None
):
    """w [..., G], fp32 -> scale, as fp16 rounds it, and zero [..., 1], of the range that spans the weights and 0.

    costs [G]: the range is shrunk to the least sum of squared errors times costs; without costs, shrinking made the
    perplexity worse. widest(low, high): the range of a group of which only a part is here. Zero points start at 1:
    files of the "gptq" format store zero - 1, and engines disagree on how -1 is read."""
    top = 2**codes.bits - 1
    low = w.amin(-1, keepdim=True).clamp(max=0)
    high = w.amax(-1, keepdim=True).clamp(min=0)
    if widest:
        low, high = widest(low, high)
    if sym:
        span = 2 * torch.maximum(-low, high) / top
        zero = torch.full_like(span, codes.zero)
    else:
        span = torch.maximum((high - low) / top, high / (top - 1))
        zero = (-low / span.clamp(min=1e-30)).round().clamp(1, top)
    # Fp16's, and never 0.
    scales = [(span * shrink).clamp(2**-24, 65504).half().float() for shrink in SHRINK]
    if costs is None:
        return scales[0], zero
    errors = []
    for scale in scales:
        rounded = (encode(w, scale, zero, codes) - zero) * scale
        errors.append(((rounded - w).square() * costs).sum(-1, keepdim=True))
    best = torch.cat(errors, dim=-1).argmin(-1, keepdim=True)
    return torch.cat(scales, dim=-1).gather(-1, best), zero


def encode(w: Tensor, scale: Tensor, zero: Tensor, codes: Codes) -> Tensor:
    return ((w / scale).round_() + zero).clamp_(0, 2**codes.bits - 1)


def round_to_nearest(
    w: Tensor, codes: Codes, group_size: int, sym: bool, widest: Callable | None = None
):
    """w [N, K] -> codes [N, K], uint8, scales [N, C], fp16, and zeros [N, C], None for codes.zero everywhere."""
    groups = w.float().unflatten(1, (-1, group_of(w.shape[1], group_size)))  # [N, C, G]
    scale, zero = find_scales(groups, codes, sym, widest=widest)  # [N, C, 1]
    found = encode(groups, scale, zero, codes).to(torch.uint8)
    return (
        found.flatten(1),
        scale.squeeze(-1).half(),
        None if sym else zero.squeeze(-1).to(torch.uint8),
    )


def rounded(linear: nn.Linear, codes: Codes, *how) -> QuantizedLinear:
    """how: round_to_nearest()'s arguments after the codes."""
    found, scales, zeros = round_to_nearest(linear.weight, codes, *how)
    return QuantizedLinear(pack(found, codes.bits), scales, zeros, codes, linear.bias)


# GPTQ


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper triangular U with U^T U the inverse of hessian [K, K], which it damps in place.

    L is the Cholesky factor of the matrix with rows and columns reversed; U is the inverse of L, reversed again. So no
    inverse has to be factored. An input that is always 0 has a row of zeros; the damping suffices for it."""
    damping = 0.01 * hessian.diagonal().abs().mean().clamp(min=1e-30)
    failed = True
    while failed:
        hessian.diagonal().add_(damping)
        L, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        damping *= 10
        if failed:
            say_once("GPTQ: a Hessian is not positive definite; damped ten times more until it is")
    eye = torch.eye(len(L), device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(0, 1)


def gptq(
    w: Tensor,
    hessian: Tensor,
    codes: Codes,
    group_size: int,
    sym: bool,
    act_order: bool,
    drift: Tensor | None = None,
):
    """arXiv 2210.17323, algorithm 1. w [N, K], hessian X X^T [K, K] of inputs X -> codes [N, K], uint8, scales [N, C],
    fp16, zeros [N, C] or None, g_idx [K] or None, loss.

    drift: (Y - X) X^T [K, K], where Y are the inputs of the model before it is quantized. The weights are first moved
    so that their outputs for X come nearest to those for Y: by W drift (X X^T)^-1 (after GPTAQ, arXiv 2504.02692).

    A group's scales are found when the group begins: from weights that make up for the errors so far, and with what an
    error costs once the columns after it make up for it. Act-order takes the columns by falling diagonal of the
    Hessian; g_idx then names each input's group. loss: ||(W - Q) X||^2 / ||W X||^2, with the damping."""
    K = w.shape[1]
    G = group_of(K, group_size)
    if not hessian.isfinite().all():
        raise UserError("the calibration text's activations overflow; `dtype`=float32 holds more")
    perm = torch.arange(K, device=w.device)
    if act_order:
        perm = hessian.diagonal().argsort(descending=True, stable=True)
    w, hessian = w.float()[:, perm], hessian.float()[perm][:, perm]
    U = inverse_factor(hessian)
    if drift is not None:
        w = w + w @ drift.float()[perm][:, perm] @ U.T @ U
    diagonal = U.diagonal()
    # [K, N], so that a column is contiguous; column by column it turns into the errors.
    rest = w.T.contiguous()
    found, scales, zeros = torch.empty_like(rest, dtype=torch.uint8), [], []
    for begin in range(0, K, G):
        group = slice(begin, begin + G)
        scale, zero = find_scales(rest[group].T, codes, sym, costs=diagonal[group] ** -2)  # [N, 1]
        scale, zero = scale.squeeze(1), zero.squeeze(1)
        scales.append(scale)
        zeros.append(zero)
        for start in range(begin, begin + G, BLOCK):
            end = min(start + BLOCK, begin + G)
            for k in range(start, end):
                code = encode(rest[k], scale, zero, codes)
                found[k] = code
                error = (rest[k] - (code - zero) * scale) / diagonal[k]
                rest[k + 1 : end].addr_(U[k, k + 1 : end], error, alpha=-1)
                rest[k] = error
            rest[end:].addmm_(U[start:end, end:].T, rest[start:end], alpha=-1)
    # As W - Q is errors^T U.
    loss = rest.square().sum() / ((w @ hessian) * w).sum().clamp(min=1e-30)
    zeros = None if sym else torch.stack(zeros, dim=1).to(torch.uint8)
    back = perm.argsort()
    g_idx = back // G if act_order else None
    return found[back].T, torch.stack(scales, dim=1).half(), zeros, g_idx, loss.item()


@torch.no_grad()
def quantize_model(
    model: Transformer,
    codes: Codes,
    group_size: int,
    sym: bool,
    act_order: bool = False,
    head: bool = False,
    calibration: Tensor | None = None,
    progress: bool = False,
    shard=None,
):
    """Replaces each linear layer by a QuantizedLinear: rounded or, with calibration tokens [S, T], by GPTQ.

    shard: the tp.Shard whose part of the model this is. UserError for weights that are not finite and for groups that
    do not divide a layer."""
    from tqdm import tqdm

    for name, weight in hf_weights(model.config).items():
        rows = slice(weight.row, weight.row + weight.shape[0])
        parameter = model.get_parameter(weight.ours)
        # An EAGLE head's embedding may be its target's, and not be there yet.
        if not parameter.is_meta and not parameter[rows].isfinite().all():
            raise UserError(
                f"the tensor {name} has NaN or infinite weights; take a checkpoint that is whole"
            )
    names = find_linears(model, head)
    for name in names:
        group_of(model.get_submodule(name).in_features, group_size)
    layers = ((name, None, None) for name in names)
    if calibration is not None:
        layers = calibrate(model, calibration, head)
    how = codes, group_size, sym
    with tqdm(
        layers, "quantizing", len(names), unit="matrix", disable=None if progress else True
    ) as bar:
        for name, hessian, drift in bar:
            linear = model.get_submodule(name)
            if hessian is None:
                widest = partial(shard.widest, name) if shard and group_size == -1 else None
                model.set_submodule(name, rounded(linear, *how, widest))
                continue
            found, scales, zeros, g_idx, loss = gptq(linear.weight, hessian, *how, act_order, drift)
            bar.set_postfix({name: f"{loss:.1e}"})
            qweight = pack(found, codes.bits)
            model.set_submodule(
                name, QuantizedLinear(qweight, scales, zeros, codes, linear.bias, g_idx)
            )


def calibrate(
    model: Transformer, tokens: Tensor, head: bool
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """tokens [S, T] -> each linear layer's name, hessian and drift, in turn. The caller quantizes the layer before it
    asks for the next.

    hessian: of the inputs in the model whose earlier layers are quantized. drift: how far these inputs are from those
    in the original model."""
    T = tokens.shape[1]
    model.setup(T)
    size = max(1, CHUNK // T)
    # [size, T, D] each: the hidden states so far of the quantized model, and of the original
    chunks, exact = ((model.embed(tokens) * model.embedding_scale).split(size) for _ in range(2))

    def calibrate_half(
        name: str,
        norm: nn.Module,
        post_norm: nn.Module,
        first: str,
        second: str,
        others: tuple = (),
    ):
        # 1. The inputs of the second matrix in the original: with an identity in its place, the half returns them.
        half = model.get_submodule(name)
        linear = getattr(half, second)
        setattr(half, second, nn.Identity())
        wanted = [half(norm(x), *others) for x in exact]
        # 2. Once the first matrix is quantized, the half returns the second one's inputs in the quantized model.
        yield f"{name}.{first}", *correlations(map(norm, chunks), map(norm, exact))
        inputs = [half(norm(x), *others) for x in chunks]
        # 3. The second matrix is quantized, and both models go on.
        setattr(half, second, linear)
        for x, y in zip(exact, wanted):
            x.add_(post_norm(linear(y)), alpha=model.config.residual_scale)
        yield f"{name}.{second}", *correlations(inputs, wanted)
        for x, y in zip(chunks, inputs):
            x.add_(post_norm(getattr(half, second)(y)), alpha=model.config.residual_scale)

    positions = torch.arange(T, device=tokens.device)[None]
    turns = {table.rope: table(positions, 1) for table in model.ropes}
    for i, layer in enumerate(model.layers):
        mask = visible(model.slots[:T], positions, layer.config.window)
        # What a Block takes besides x.
        others = positions, *turns[layer.config.rope], mask, model.rows
        yield from calibrate_half(
            f"layers.{i}.attn", layer.attn_norm, layer.attn_post_norm, "wqkv", "wo", others
        )
        yield from calibrate_half(
            f"layers.{i}.ffn", layer.ffn_norm, layer.ffn_post_norm, "w_gate_up", "w_down"
        )
    if head:
        yield "head", *correlations(map(model.norm, chunks), map(model.norm, exact))


def correlations(chunks: Iterable[Tensor], exact: Iterable[Tensor]):
    """X X^T and (Y - X) X^T [K, K], fp32, of inputs X and Y that come in chunks [S, T, K]."""
    hessian = drift = 0
    for x, y in zip(chunks, exact):
        x, y = x.flatten(0, 1).float(), y.flatten(0, 1).float()
        hessian = hessian + x.T @ x
        drift = drift + (y - x).T @ x
    return hessian, drift


# What --quantize does


def default_group(quantize: str | None, group_size: int | None) -> int:
    """The group size of --quantize: -1 for a scale a row, 1 where nothing is quantized."""
    return dict(int4=32, int8=-1).get(quantize, 1) if group_size is None else group_size


def round_model(model: Transformer, quantize: str, group_size: int | None, shard=None):
    """ "int8" or "int4", with its defaults."""
    quantize_model(
        model,
        CODES[quantize],
        default_group(quantize, group_size),
        sym=quantize == "int8",
        shard=shard,
    )


def round_head(model: Transformer, quantize: str):
    """The output head to "int8", a scale a row, or "int4", groups of 32. A tied model's gets codes of its own, and the
    embedding stays; with several ranks each has rounded its own rows. UserError for a head that cannot be rounded."""
    name = "head.linear" if hasattr(model.head, "linear") else "head"
    head = model.get_submodule(name)
    if isinstance(head, QuantizedLinear):
        raise UserError(
            f"`quantize_head`={quantize}: this checkpoint's head is quantized already; leave the option out"
        )
    if not head.weight.isfinite().all():
        raise UserError("the output head has NaN or infinite weights; take a checkpoint that is whole")
    group = default_group(quantize, None)
    model.set_submodule(name, rounded(head, CODES[quantize], group, quantize == "int8"))


def check_quantize(
    checkpoint: Checkpoint, settings: dict, quantize: str | None, group_size: int | None
):
    """UserError where --quantize and --group-size do not suit the checkpoint. settings: formats.read_settings()'s."""
    if not quantize:
        return
    if settings:
        raise UserError(
            f"`quantize`={quantize}: {checkpoint.directory} is quantized already; leave the option out"
        )
    for weight in checkpoint.weights.values():
        if weight.quantized:
            group_of(weight.shape[1], default_group(quantize, group_size))


def main():
    from cli.quantize import main

    main()


if __name__ == "__main__":
    from cli.errors import report_errors

    report_errors(main)

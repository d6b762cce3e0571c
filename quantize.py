"""
Quantization: the plain quantized layer, rounding to int8 and int4, GPTQ, and the command that writes a quantized
checkpoint. What reads and writes the files is in formats.py.

    python quantize.py --checkpoint DIR --bits 4 --group-size 128 --out DIR-int4               # round to nearest
    python quantize.py --checkpoint DIR --bits 4 --gptq --act-order --calibration TEXT --out DIR-gptq
    python quantize.py --checkpoint DIR --bits 8 --sym --format compressed-tensors --out DIR-w8a16

GPTQ (Frantar et al. 2022, arXiv 2210.17323) chooses the codes column by column. The columns that are not quantized yet
make up for each error, as measured on the inputs that a calibration text gives.

A weight is (code - zero) * scale. A group of G weights of one row, along K, shares scale and zero.

Shapes: N outputs, K inputs, C groups of a row (K / G), S sequences of T tokens, D model dim.
"""
import signal

if __name__ == "__main__":  # PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import (Tokenizer, UserError, find_checkpoint, hf_weights, load_config, load_model, read_json,
                        read_text, reading, tensor_files)
from cli import (DTYPES, GIB, Parser, check_memory, find_device, find_dtype, memory_advice, report_errors, within,
                 written_whole)
from model import Transformer

SHRINK = [1 - 0.03 * i for i in range(8)]  # factors of a group's range among which GPTQ chooses
BLOCK = 128  # columns whose errors are passed on to the rest at once: arXiv 2210.17323, section 3.3, step 2
CHUNK = 8192  # calibration tokens at a time
say_once = cache(tqdm.write)


# The plain quantized layer


def from_integers(codes: Tensor) -> Tensor:
    """uint8 -> fp32"""
    return codes.float()


def from_e4m3(codes: Tensor) -> Tensor:
    """e4m3's codes, uint8 -> the numbers, fp32. By bits, so that a device need not know the type.

    A code is a sign, 4 bits of exponent and 3 of mantissa. They go where fp32 has its sign and the low bits of its
    exponent. fp32's exponents count from -127, e4m3's from -7: what is read is 2 ** -120 times the number."""
    codes = codes.int()
    return ((codes & 0x80) << 24 | (codes & 0x7F) << 20).view(torch.float32) * 2.0 ** 120


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


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K] below 2 ** bits -> int32 [N, K * bits / 32]; a word's first code lies in its low bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return (codes.int().unflatten(1, (-1, 32 // bits)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [N, W] -> the codes, uint8 [N, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & 2 ** bits - 1).to(torch.uint8).flatten(1)


class QuantizedLinear(nn.Module):
    """nn.Linear whose weights are codes, which it dequantizes in each call.

    w[n, k] = (decode(code[n, k]) - zeros[n, c]) * scales[n, c], where c is the group of input k.

    qweight: the codes, int32 [N, K * bits / 32] as pack() gives them; scales: fp16 or fp32 [N, C]; zeros: integers
    [N, C], None for codes.zero everywhere; g_idx: each input's group [K], None where each K / C consecutive inputs are
    a group."""

    def __init__(self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, codes: Codes, bias: Tensor | None = None,
                 g_idx: Tensor | None = None):
        super().__init__()
        self.codes = codes
        self.out_features, self.in_features = len(qweight), qweight.shape[1] * 32 // codes.bits

        def parameter(tensor: Tensor | None) -> nn.Parameter | None:
            return None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False)

        self.qweight, self.scales = parameter(qweight), parameter(scales)
        self.zeros = parameter(None if zeros is None else zeros.to(torch.int16))
        self.bias, self.g_idx = parameter(bias), parameter(g_idx)

    def groups(self) -> Tensor:
        """Each input's group [K]."""
        K, C = self.in_features, self.scales.shape[1]
        return torch.arange(K, device=self.scales.device) // (K // C) if self.g_idx is None else self.g_idx

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K]."""
        scales = self.scales.float()
        zeros = torch.full_like(scales, self.codes.zero) if self.zeros is None else self.zeros
        w = self.codes.decode(unpack(self.qweight, self.codes.bits))
        if self.g_idx is not None:
            return ((w - zeros[:, self.g_idx]) * scales[:, self.g_idx]).to(dtype)
        w = w.unflatten(1, (scales.shape[1], self.in_features // scales.shape[1]))  # [N, C, G]
        return ((w - zeros[:, :, None]) * scales[:, :, None]).flatten(1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def replace_layers(model: nn.Module, kind: type, build: Callable[[nn.Module, str], nn.Module]) -> None:
    """Puts build(layer, its name) in the place of each layer of this kind, subclasses apart."""
    # The list holds no such layer itself, so that each is freed once its place is taken.
    for module in [module for module in model.modules() if type(module) is not kind]:
        for name, child in list(module.named_children()):
            if type(child) is kind:
                setattr(module, name, build(child, name))


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return linear


def unpack_layers(model: Transformer) -> None:
    """Puts plain layers with the same weights in the place of quantized ones.

    Eager code dequantizes a quantized layer in each call, and is several times slower than with plain layers."""
    dtype = model.embed.weight.dtype
    replace_layers(model, QuantizedLinear, lambda layer, _: plain_linear(layer.dequantize(dtype), layer.bias))


def group_of(K: int, group_size: int) -> int:
    """The number of inputs that group_size stands for: all of them for -1. A UserError says which sizes there are."""
    G = K if group_size == -1 else group_size
    if K % 32:
        raise UserError(f"a layer has {K} inputs; want a multiple of 32: this model cannot be quantized here")
    if not isinstance(G, int) or G < 32 or G % 32 or K % G:
        sizes = [size for size in (32, 64, 128, -1) if K % size == 0]
        raise UserError(f"group size {group_size} does not divide the {K} inputs of a layer; want one of {sizes}")
    return G


def find_linears(model: Transformer, head: bool) -> list[tuple[str, nn.Module, str]]:
    """The linear layers, the head only if asked for: the name in the model, the parent module, the name there."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    split = [(name, *name.rpartition(".")[::2]) for name in names if head or name != "head"]
    return [(name, model.get_submodule(parent), own) for name, parent, own in split]


# Rounding


def find_scales(w: Tensor, bits: int, sym: bool, costs: Tensor | None = None,
                widest: Callable | None = None) -> tuple[Tensor, Tensor]:
    """w [..., G], fp32 -> scale, as fp16 rounds it, and zero [..., 1], of the range that spans the weights and 0.

    costs [G]: the range is shrunk to the least sum of squared errors times costs; without costs, shrinking made the
    perplexity worse. widest(low, high): the range of a group of which only a part is here. Zero points start at 1:
    files of the "gptq" format store zero - 1, and engines disagree on how -1 is read."""
    top = 2 ** bits - 1
    low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    if widest:
        low, high = widest(low, high)
    if sym:
        span = 2 * torch.maximum(-low, high) / top
        zero = torch.full_like(span, 2 ** (bits - 1))
    else:
        span = torch.maximum((high - low) / top, high / (top - 1))
        zero = (-low / span.clamp(min=1e-30)).round().clamp(1, top)
    scales = [(span * shrink).clamp(2 ** -24, 65504).half().float() for shrink in SHRINK]  # fp16's, and never 0
    if costs is None:
        return scales[0], zero
    errors = [(((encode(w, scale, zero, bits) - zero) * scale - w).square() * costs).sum(-1, keepdim=True)
              for scale in scales]
    best = torch.cat(errors, dim=-1).argmin(-1, keepdim=True)
    return torch.cat(scales, dim=-1).gather(-1, best), zero


def encode(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return ((w / scale).round_() + zero).clamp_(0, 2 ** bits - 1)


def round_to_nearest(w: Tensor, bits: int, group_size: int, sym: bool,
                     widest: Callable | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """w [N, K] -> codes [N, K], uint8, scales [N, C], fp16, and zeros [N, C], None for 2 ** (bits - 1) everywhere."""
    groups = w.float().unflatten(1, (-1, group_of(w.shape[1], group_size)))  # [N, C, G]
    scale, zero = find_scales(groups, bits, sym, widest=widest)  # [N, C, 1]
    codes = encode(groups, scale, zero, bits).to(torch.uint8)
    return codes.flatten(1), scale.squeeze(-1).half(), None if sym else zero.squeeze(-1).to(torch.uint8)


# GPTQ


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper triangular U with U^T U the inverse of hessian [K, K], which it damps in place.

    L is the Cholesky factor of the matrix with rows and columns reversed; U is the inverse of L, reversed again. So no
    inverse has to be factored. An input that is always 0 has a row of zeros; the damping suffices for it."""
    damping, failed = 0.01 * hessian.diagonal().abs().mean().clamp(min=1e-30), True
    while failed:
        hessian.diagonal().add_(damping)
        L, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        damping *= 10
        if failed:
            say_once("GPTQ: a Hessian is not positive definite; damped ten times more until it is", file=sys.stderr)
    eye = torch.eye(len(L), device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(0, 1)


def gptq(w: Tensor, hessian: Tensor, bits: int, group_size: int, sym: bool, act_order: bool,
         drift: Tensor | None = None) -> tuple:
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
        raise UserError("the calibration text's activations overflow; --dtype float32 holds more")
    perm = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(K, device=w.device)
    w, hessian = w.float()[:, perm], hessian.float()[perm][:, perm]
    U = inverse_factor(hessian)
    if drift is not None:
        w = w + w @ drift.float()[perm][:, perm] @ U.T @ U
    diagonal = U.diagonal()
    rest = w.T.contiguous()  # [K, N], so that a column is contiguous; column by column it turns into the errors
    codes, scales, zeros = torch.empty_like(rest, dtype=torch.uint8), [], []
    for begin in range(0, K, G):
        group = slice(begin, begin + G)
        scale, zero = (t.squeeze(1) for t in find_scales(rest[group].T, bits, sym, diagonal[group] ** -2))  # [N]
        scales.append(scale)
        zeros.append(zero)
        for start in range(begin, begin + G, BLOCK):
            end = min(start + BLOCK, begin + G)
            for k in range(start, end):
                code = encode(rest[k], scale, zero, bits)
                codes[k] = code
                error = (rest[k] - (code - zero) * scale) / diagonal[k]
                rest[k + 1:end].addr_(U[k, k + 1:end], error, alpha=-1)
                rest[k] = error
            rest[end:].addmm_(U[start:end, end:].T, rest[start:end], alpha=-1)
    loss = rest.square().sum() / ((w @ hessian) * w).sum().clamp(min=1e-30)  # as W - Q is errors^T U
    zeros = None if sym else torch.stack(zeros, dim=1).to(torch.uint8)
    back = perm.argsort()
    g_idx = back // G if act_order else None
    return codes[back].T, torch.stack(scales, dim=1).half(), zeros, g_idx, loss.item()


@torch.no_grad()
def quantize_model(model: Transformer, bits: int, group_size: int, sym: bool, act_order: bool = False,
                   head: bool = False, calibration: Tensor | None = None, progress: bool = False, shard=None) -> None:
    """Replaces each linear layer by a QuantizedLinear: rounded or, with calibration tokens [S, T], by GPTQ.

    shard: the tp.Shard whose part of the model this is. UserError for weights that are not finite and for groups that
    do not divide a layer."""
    for name, (ours, row, shape) in hf_weights(model.config).items():
        if not model.get_parameter(ours)[row:row + shape[0]].isfinite().all():
            raise UserError(f"the tensor {name} has NaN or infinite weights; take a checkpoint that is whole")
    found = find_linears(model, head)
    for _, parent, own in found:
        group_of(getattr(parent, own).in_features, group_size)

    def replace(parent: nn.Module, own: str, hessian: Tensor | None = None, drift: Tensor | None = None) -> None:
        linear, g_idx = getattr(parent, own), None
        if hessian is None:
            widest = partial(shard.widest, own) if shard and group_size == -1 else None
            codes, scales, zeros = round_to_nearest(linear.weight, bits, group_size, sym, widest)
        else:
            codes, scales, zeros, g_idx, loss = gptq(linear.weight, hessian, bits, group_size, sym, act_order, drift)
            bar.set_postfix({own: f"{loss:.1e}"})
        setattr(parent, own, QuantizedLinear(pack(codes, bits), scales, zeros, CODES[f"int{bits}"], linear.bias, g_idx))
        bar.update()

    with tqdm(total=len(found), desc="quantizing", unit="matrix", disable=None if progress else True) as bar:
        if calibration is None:
            for _, parent, own in found:
                replace(parent, own)
        else:
            calibrate(model, calibration, replace, head)


def calibrate(model: Transformer, tokens: Tensor, replace: Callable, head: bool) -> None:
    """Calls replace(parent, name, hessian, drift) for each linear layer in turn, tokens [S, T].

    hessian: of the inputs in the model whose earlier layers are quantized. drift: how far these inputs are from those
    in the original model. An identity takes the place of a half's second matrix, so that the half returns that one's
    inputs."""
    model.setup(tokens.shape[1])
    block_inputs = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs))
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    model(tokens[:1], positions, last=positions[0, :1])
    hook.remove()
    _, *shared = block_inputs[0]  # positions, cos, sin, mask, rows: the same for each sequence
    size = max(1, CHUNK // tokens.shape[1])
    chunks, exact = (model.embed(tokens).split(size) for _ in range(2))  # [size, T, D] each
    for layer in model.layers:
        attention = layer.attn, layer.attn_norm, "wqkv", "wo", shared
        feed_forward = layer.ffn, layer.ffn_norm, "w_gate_up", "w_down", ()
        for half, norm, first, second, others in (attention, feed_forward):
            linear = getattr(half, second)
            setattr(half, second, nn.Identity())
            wanted = [half(norm(chunk), *others) for chunk in exact]
            replace(half, first, *correlations(map(norm, chunks), map(norm, exact)))
            inputs = [half(norm(chunk), *others) for chunk in chunks]
            for chunk, wants in zip(exact, wanted):
                chunk += linear(wants)
            setattr(half, second, linear)
            replace(half, second, *correlations(inputs, wanted))
            for chunk in chunks:
                chunk += getattr(half, second)(inputs.pop(0))
    if head:
        replace(model, "head", *correlations(map(model.norm, chunks), map(model.norm, exact)))


def correlations(chunks: Iterable[Tensor], exact: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """X X^T and (Y - X) X^T [K, K], fp32, of inputs X and Y that come in chunks [S, T, K]."""
    hessian = drift = 0
    for x, y in zip(chunks, exact):
        x, y = x.flatten(0, 1).float(), y.flatten(0, 1).float()
        hessian, drift = hessian + x.T @ x, drift + (y - x).T @ x
    return hessian, drift


# Loading


def default_group(quantize: str | None, group_size: int | None) -> int:
    """The group size of --quantize: -1 for a scale a row, 1 where nothing is quantized."""
    return dict(int4=32, int8=-1).get(quantize, 1) if group_size is None else group_size


def round_model(model: Transformer, quantize: str, group_size: int | None, shard=None) -> None:
    """--quantize's "int8" or "int4", with its defaults."""
    bits = dict(int8=8, int4=4)[quantize]
    quantize_model(model, bits, default_group(quantize, group_size), sym=bits == 8, shard=shard)


def check_quantize(directory: Path, quantize: str | None, group_size: int | None) -> None:
    """UserError where --quantize and --group-size do not suit the checkpoint."""
    from formats import read_settings
    if quantize and read_settings(directory):
        raise UserError(f"--quantize {quantize}: {directory} is quantized already; leave the option out")
    for name, (_, _, shape) in hf_weights(load_config(directory)).items() if quantize else ():
        if "_proj.weight" in name:
            group_of(shape[1], default_group(quantize, group_size))


def load_checkpoint(directory: Path, device: torch.device, dtype: torch.dtype, quantize: str | None = None,
                    group_size: int | None = None, progress: bool = False,
                    split: Callable | None = None) -> Transformer:
    """As load_model(), of quantized checkpoints too.

    quantize: "int8" or "int4" rounds the layers' weights. split: tp.splitter()'s, for this rank's part."""
    from formats import QuantizedReader, read_settings, shared_inputs
    check_quantize(directory, quantize, group_size)
    settings = read_settings(directory)
    group = shared_inputs(settings) if settings else default_group(quantize, group_size)
    shard = split(load_config(directory), group) if split else None
    replace_layers = QuantizedReader(settings, device, dtype, shard).replace_layers if settings else None
    model = load_model(directory, device, dtype, progress, replace_layers, shard)
    if settings.get("activations"):
        say_once("nothing but weights is quantized, which is more exact than what the checkpoint asks", file=sys.stderr)
    if quantize:
        round_model(model, quantize, group_size, shard)
    if shard:
        shard.parallelize(model)
    return model


# The command


def read_calibration(path: Path, tokenizer: Tokenizer, wanted: int, context: int) -> Tensor:
    """The text's first `wanted` tokens in rows of 2,048, or as many as the context holds; a partial row is left out."""
    with reading(path):
        tokens = tokenizer.encode(read_text(path))
    if len(tokens) < wanted:
        raise UserError(f"--calibration {path}: {len(tokens)} of --calibration-tokens {wanted}; give more text")
    length = min(2048, context, wanted)
    return torch.tensor(tokens[:wanted // length * length]).view(-1, length)


def parse_args() -> argparse.Namespace:
    from formats import CONFIGS
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, help="directory or Hub id")
    add("--out", type=Path, required=True, metavar="DIR", help="the directory to make")
    add("--bits", type=int, choices=(8, 4), default=4, help="of a weight (default: 4)")
    add("--group-size", type=int, choices=(32, 64, 128, -1), help="-1: a row (default: 128 for 4 bits, -1 for 8)")
    add("--sym", action="store_true", help="zero points in the middle: less exact, and some engines want it")
    add("--format", choices=CONFIGS, default="gptq", help="of the files (default: gptq)")
    add("--gptq", action="store_true", help="better codes, from the inputs that --calibration gives")
    add("--calibration", type=Path, metavar="FILE", help="text of the kind that the model is for")
    add("--calibration-tokens", type=within(int, 2), metavar="N", help="in rows of 2,048 (default: 131072)")
    add("--act-order", action="store_true", help="with --gptq: columns of large inputs first")
    add("--head", action="store_true", help="quantize the output head too")
    add("--device", help="cpu, cuda, cuda:N or mps (default: the first GPU, else cpu)")
    add("--dtype", choices=DTYPES, help="to compute in; default: bfloat16 on a GPU, float32 on a CPU")
    args = parser.parse_args()
    if args.gptq != bool(args.calibration) or (args.act_order or args.calibration_tokens) and not args.gptq:
        parser.error("--gptq and --calibration go together, --act-order and --calibration-tokens with both")
    args.calibration_tokens = args.calibration_tokens or 131072
    args.group_size = args.group_size or (128 if args.bits == 4 else -1)
    return args


def size_of(directory: Path) -> str:
    """Of the files that hold its tensors."""
    return tqdm.format_sizeof(sum(path.stat().st_size for path in set(tensor_files(directory).values())), "B")


def main() -> None:
    from formats import CONFIGS, write_checkpoint
    args = parse_args()
    how = dict(bits=args.bits, group_size=args.group_size, sym=args.sym, act_order=args.act_order, head=args.head)
    quantization_config = CONFIGS[args.format](**how)
    device = find_device(args.device)
    dtype, source = find_dtype(args.dtype, device), find_checkpoint(args.checkpoint)
    config = load_config(source)
    if read_json(source / "config.json").get("quantization_config"):
        raise UserError(f"--checkpoint {args.checkpoint} is quantized already; start from the original")
    if args.head and (config.tied or config.vocab_size % 8):
        raise UserError("--head: the head is the embedding here, or has no multiple of 8 rows; leave the option out")
    for name, (_, _, shape) in hf_weights(config).items():
        if "_proj.weight" in name and shape[0] % 8:
            raise UserError(f"{name} has {shape[0]} rows: the formats want a multiple of 8; --quantize serves it")
    if os.path.lexists(args.out):
        raise UserError(f"--out {args.out} exists; remove it, or name another directory")
    if not (parent := args.out.absolute().parent).is_dir():
        raise UserError(f"--out {args.out}: there is no directory {parent}; make it first")
    tokens = None
    if args.gptq:
        tokens = read_calibration(args.calibration, Tokenizer(source), args.calibration_tokens, config.context)
        tokens = tokens.to(device)
    check_memory([(config, None)], 0, 0, device, dtype)
    size = sum(math.prod(shape) * (args.bits / 8 if "_proj.weight" in name else 2)
               for name, (_, _, shape) in hf_weights(config).items())
    if size > (free := shutil.disk_usage(parent).free):
        raise UserError(f"--out {args.out}: {size / GIB:.2f} GiB are wanted, {free / GIB:.2f} are free there: "
                        "free more, or name another place")
    with written_whole(args.out) as made:
        with memory_advice(f"out of memory on {device}: fewer --calibration-tokens need less"):
            model = load_model(source, device, dtype, progress=True)
            quantize_model(model, **how, calibration=tokens, progress=True)
        made.mkdir()
        write_checkpoint(model, source, made, quantization_config)
    print(f"{args.out}: {size_of(args.out)} of weights, {size_of(source)} before\n"
          f"next: python generate.py --checkpoint {shlex.quote(str(args.out))} --compile", file=sys.stderr)


if __name__ == "__main__":
    import quantize  # as formats.py does: layers are of the same classes then
    report_errors(quantize.main)

"""
int8 and int4 weights: rounding, GPTQ, and checkpoints in the GPTQ layout that the Hub uses; AWQ's are read.

    python quantize.py --checkpoint DIR --bits 4 --group-size 128 --out DIR-int4               # round to nearest
    python quantize.py --checkpoint DIR --bits 4 --gptq --act-order --calibration TEXT --out DIR-gptq

GPTQ chooses the codes column by column, and lets the columns to come make up for each one's error, as measured on the
inputs that a calibration text gives (Frantar et al. 2022, arXiv 2210.17323).

A weight is (code - zero) * scale; a group of weights of one row, G of them along K, shares scale and zero.

Shapes: N outputs, K inputs, C groups of a row (K / G), S sequences of T tokens, D model dim.
"""
import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

import checkpoint
from checkpoint import Tokenizer, UserError, blame, find_checkpoint, load_config, read_json, read_tensor, tensor_files
from cli import DTYPES, GIB, Parser, find_device, find_dtype, memory_advice, report_errors, within
from model import Transformer

SHRINK = [1 - 0.03 * i for i in range(8)]
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight codes in a word, which of its places holds the first, the second ...
BLOCK = 128  # columns whose errors are passed on to the rest at once: arXiv 2210.17323, section 3.3, step 2
PIECE = 8192  # calibration tokens at a time
SHARD = 4 * GIB


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K] below 2 ** bits -> int32 [N, K * bits / 32]; a word's first code lies in its low bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return (codes.int().unflatten(1, (-1, 32 // bits)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [N, W] -> the codes, uint8 [N, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & 2 ** bits - 1).to(torch.uint8).flatten(1)


class QuantizedLinear(nn.Module):
    """nn.Linear with int4 or int8 weights, which it dequantizes in each call.

    w[n, k] = (code[n, k] - zeros[n, c]) * scales[n, c], where c is the group of input k.

    qweight: the codes, int32 [N, K * bits / 32] as pack() gives them; scales: fp16 [N, C]; zeros: integers [N, C], None
    for 2 ** (bits - 1) everywhere; g_idx: each input's group [K], None where groups are K / C neighbours."""

    def __init__(self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, bias: Tensor | None = None,
                 g_idx: Tensor | None = None):
        super().__init__()
        self.bits, self.out_features, self.in_features = bits, len(qweight), qweight.shape[1] * 32 // bits

        def parameter(tensor: Tensor | None) -> nn.Parameter | None:
            return None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False)

        self.qweight, self.scales = parameter(qweight), parameter(scales.half())
        self.zeros = parameter(None if zeros is None else zeros.to(torch.int16))
        self.bias, self.g_idx = parameter(bias), parameter(g_idx)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K]."""
        codes, scales = unpack(self.qweight, self.bits), self.scales.float()
        zeros = torch.full_like(scales, 2 ** (self.bits - 1)) if self.zeros is None else self.zeros.float()
        if self.g_idx is not None:
            return ((codes - zeros[:, self.g_idx]) * scales[:, self.g_idx]).to(dtype)
        C = scales.shape[1]
        groups = codes.unflatten(1, (C, self.in_features // C))
        return ((groups - zeros[:, :, None]) * scales[:, :, None]).flatten(1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def group_of(K: int, group_size: int) -> int:
    """The number of inputs that group_size stands for: all of them for -1. A UserError says which sizes there are."""
    G = K if group_size == -1 else group_size
    if K % 32:
        raise UserError(f"a layer has {K} inputs; want a multiple of 32: this model cannot be quantized here")
    if not isinstance(G, int) or G < 32 or G % 32 or K % G:
        sizes = [str(size) for size in (32, 64, 128) if K % size == 0]
        raise UserError(f"group size {group_size} does not divide the {K} inputs of a layer into groups of 32 or a "
                        f"multiple: {', '.join(sizes)} or -1 does")
    return G


def find_scales(w: Tensor, bits: int, sym: bool, costs: Tensor | None = None,
                widest: Callable | None = None) -> tuple[Tensor, Tensor]:
    """w [..., G], fp32 -> scale, as fp16 rounds it, and zero [..., 1], of the range that spans the weights and 0.

    With costs [G] it is shrunk to the least sum of squared errors times costs (without, that made perplexity worse).
    Zero points start at 1: "gptq" files store zero - 1, and engines read -1 differently. widest: of low and high those
    of a group that is not here as a whole."""
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


@cache
def say_once(message: str) -> None:
    tqdm.write(message, file=sys.stderr)


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper triangular U with U^T U the inverse of hessian [K, K], which it damps in place.

    From the Cholesky factor L of the matrix turned by half: U is the inverse of L turned back, so that no inverse is
    factored. Inputs that are always 0, with zeros in their rows, need nothing beyond the damping."""
    damping, failed = 0.01 * hessian.diagonal().abs().mean().clamp(min=1e-30), True
    while failed:
        hessian.diagonal().add_(damping)
        L, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        damping *= 10
        if failed:
            say_once("GPTQ: a Hessian is not positive definite; damped ten times more until it is")
    eye = torch.eye(len(L), device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(0, 1)


def gptq(w: Tensor, hessian: Tensor, bits: int, group_size: int, sym: bool, act_order: bool,
         drift: Tensor | None = None) -> tuple:
    """w [N, K], hessian X X^T [K, K] of inputs X -> codes [N, K], scales, zeros [N, C], order [K] or None, loss.

    drift: (Y - X) X^T [K, K] of the inputs Y that the model has before it is quantized. The weights are first moved to
    where their outputs for X are the nearest to those for Y: by W drift (X X^T)^-1 (after GPTAQ, arXiv 2504.02692).

    arXiv 2210.17323, algorithm 1. A group's scales are found when it begins, from weights that make up for the errors
    so far, and with what an error costs once the columns after it make up for it. Act-order takes the columns by
    falling diagonal; order is theirs, and that of the codes. loss: ||(W - Q) X||^2 / ||W X||^2, with the damping."""
    K = w.shape[1]
    G = group_of(K, group_size)
    if not hessian.isfinite().all():
        raise UserError("the calibration text's activations overflow; --dtype float32 holds more")
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    columns = slice(None) if order is None else order
    w, hessian = w.float()[:, columns], hessian.float()[columns][:, columns].clone()
    U = inverse_factor(hessian)
    if drift is not None:
        w = w + w @ drift.float()[columns][:, columns] @ U.T @ U
    diagonal = U.diagonal()
    rest = w.T.contiguous()  # [K, N], so that a column lies in one piece; turns into the errors, column by column
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
    return codes.T.contiguous(), torch.stack(scales, dim=1).half(), zeros, order, loss.item()


def linears(model: Transformer, head: bool) -> list[tuple[str, nn.Module, str]]:
    """The linear layers, the head's too if asked for: the name in the model, the parent, the name there."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    split = [(name, *name.rpartition(".")[::2]) for name in names if head or name != "head"]
    return [(name, model.get_submodule(parent), own) for name, parent, own in split]


@torch.no_grad()
def quantize_model(model: Transformer, bits: int, group_size: int, sym: bool, act_order: bool = False,
                   head: bool = False, calibration: Tensor | None = None, progress: bool = False, shard=None) -> None:
    """Put a PackedLinear in the place of each linear layer, one by one: rounded, or by GPTQ with calibration [S, T]."""
    for name, (ours, row, shape) in model.config.hf_weights().items():
        if not model.get_parameter(ours)[row:row + shape[0]].isfinite().all():
            raise UserError(f"the tensor {name} has NaN or infinite weights; take a checkpoint that is whole")
    found = linears(model, head)
    for _, parent, own in found:
        group_of(getattr(parent, own).in_features, group_size)

    def replace(parent: nn.Module, own: str, hessian: Tensor | None = None, drift: Tensor | None = None) -> None:
        linear, order = getattr(parent, own), None
        if hessian is None:
            widest = partial(shard.widest, own) if shard and group_size == -1 else None
            codes, scales, zeros = round_to_nearest(linear.weight, bits, group_size, sym, widest)
        else:
            codes, scales, zeros, order, loss = gptq(linear.weight, hessian, bits, group_size, sym, act_order, drift)
        packed = PackedLinear(codes, scales, zeros, bits, linear.bias, order)
        setattr(parent, own, packed)
        if progress:
            if hessian is None:
                error, weight = packed.dequantize(torch.float32) - linear.weight, linear.weight.float()
                loss = (error.square().sum() / weight.square().sum().clamp(min=1e-30)).item()
            bar.set_postfix({own: f"{loss:.1e}"})
        bar.update()

    with tqdm(total=len(found), desc="quantizing", unit="matrix", disable=not progress) as bar:
        if calibration is None:
            for _, parent, own in found:
                replace(parent, own)
        else:
            calibrate(model, calibration, replace, head)


def calibrate(model: Transformer, tokens: Tensor, replace: Callable, head: bool) -> None:
    """replace(parent, name, hessian, drift) for each linear layer in turn, with the inputs that the replaced ones
    before give, and how far these have drifted from those of the model as it was.

    tokens [S, T]. With an identity in the place of its second matrix a half of a layer gives that one's inputs."""
    model.setup(tokens.shape[1])
    block_inputs = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs))
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    model(tokens[:1], positions, last=positions[0, :1])
    hook.remove()
    _, *shared = block_inputs[0]  # positions, cos, sin, mask, rows: the same for each sequence
    size = max(1, PIECE // tokens.shape[1])
    pieces, exact = (model.embed(tokens).split(size) for _ in range(2))  # [size, T, D] each
    for layer in model.layers:
        attention = layer.attn, layer.attn_norm, "wqkv", "wo", shared
        feed_forward = layer.ffn, layer.ffn_norm, "w_gate_up", "w_down", ()
        for half, norm, first, second, others in (attention, feed_forward):
            linear = getattr(half, second)
            setattr(half, second, nn.Identity())
            wanted = [half(norm(piece), *others) for piece in exact]
            replace(half, first, *grams(map(norm, pieces), map(norm, exact)))
            inputs = [half(norm(piece), *others) for piece in pieces]
            for piece, wants in zip(exact, wanted):
                piece += linear(wants)
            setattr(half, second, linear)
            replace(half, second, *grams(inputs, wanted))
            for piece in pieces:
                piece += getattr(half, second)(inputs.pop(0))
    if head:
        replace(model, "head", *grams(map(model.norm, pieces), map(model.norm, exact)))


def grams(pieces: Iterator[Tensor], exact: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """X X^T and (Y - X) X^T [K, K], fp32, of inputs X and Y [S, T, K] that come in pieces."""
    hessian = drift = 0
    for x, y in zip(pieces, exact):
        x, y = x.flatten(0, 1).float(), y.flatten(0, 1).float()
        hessian, drift = hessian + x.T @ x, drift + (y - x).T @ x
    return hessian, drift


def hub_tensors(model: Transformer, source: Path) -> Iterator[tuple[str, Tensor]]:
    """What a GPTQ checkpoint holds, on the host: packed layers as their files' layout has them, others from source."""
    files = tensor_files(source)
    for name, (ours, row, shape) in model.config.hf_weights().items():
        module = model.get_submodule(ours.rpartition(".")[0])
        if not isinstance(module, PackedLinear) or name.endswith(".bias"):
            yield name, read_tensor(files, name, shape)
            continue
        name, rows, K = name.removesuffix("weight"), slice(row, row + shape[0]), shape[1]
        codes, scales = unpack(module.words[rows], module.bits, K), module.scales[rows]
        zeros = torch.full_like(scales, 2 ** (module.bits - 1)) if module.zeros is None else module.zeros[rows]
        group = torch.arange(K, device=codes.device) // (K // scales.shape[1])
        if module.order is not None:
            back = module.order.argsort()
            codes, group = codes[:, back], group[back]
        yield name + "qweight", pack_rows(codes.T, module.bits).cpu()
        yield name + "qzeros", pack_rows(zeros - 1, module.bits).T.contiguous().cpu()
        yield name + "scales", scales.T.contiguous().cpu()
        yield name + "g_idx", group.int().cpu()


def write_shards(tensors: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    """Safetensors files of at most SHARD bytes, and an index if there are several; one of them is held at a time."""
    held, shard, size = [], {}, 0  # the names in each file so far; the file to come
    for name, tensor in chain(tensors, [(None, None)]):
        if shard and (tensor is None or size + tensor.nbytes > SHARD):
            with blame(path := directory / f"{len(held)}.safetensors"):  # a full disk has an exception of its own
                save_file(shard, path, metadata={"format": "pt"})
                path.chmod(0o644)  # safetensors lets its owner alone read it
            held.append(list(shard))
            shard, size = {}, 0
        if tensor is not None:
            shard[name] = tensor.contiguous()
            size += tensor.nbytes
    files = [f"model-{i + 1:05}-of-{len(held):05}.safetensors" for i in range(len(held))]
    if len(held) == 1:
        files = ["model.safetensors"]
    for i, file in enumerate(files):
        (directory / f"{i}.safetensors").rename(directory / file)
    if len(held) > 1:
        places = {name: file for file, names in zip(files, held) for name in names}
        total = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        index = dict(metadata=dict(total_size=total), weight_map=places)
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_checkpoint(model: Transformer, source: Path, directory: Path, quantization_config: dict) -> None:
    write_shards(hub_tensors(model, source), directory)
    for path in source.iterdir():  # the tokenizer's files, the chat template and the like
        if path.is_file() and path.suffix in (".json", ".model", ".jinja", ".txt") and ".index" not in path.suffixes:
            shutil.copyfile(path, directory / path.name)
    config = read_json(source / "config.json") | dict(quantization_config=quantization_config)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class Parts(nn.ModuleList):
    """q, k and v, or gate and up, of which some are not packed or take the inputs in an order of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self], dim=-1)


def filled(codes: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor, order: Tensor) -> tuple:
    """Of groups that differ in size, as a rank has them of an act-order layer's inputs, groups of 32 of the same
    weights: what is missing to a multiple of 32 is filled up with weights of 0. As read_part, without bias."""
    counts = g_idx.bincount(minlength=scales.shape[1])  # [C]
    missing = -counts % 32
    group = torch.arange(len(counts), device=codes.device).repeat_interleave((counts + missing) // 32)
    at = torch.arange(len(order), device=codes.device) + (missing.cumsum(0) - missing)[g_idx[order]]
    wide, wide_order = zeros[:, group].repeat_interleave(32, dim=1), order.new_zeros(32 * len(group))
    wide[:, at], wide_order[at] = codes[:, order], order
    return wide_order, wide, scales[:, group], zeros[:, group]


def read_part(read: Callable, names: Collection[str], name: str, shape: tuple[int, int], bias: bool, settings: dict,
              part: tuple) -> tuple | nn.Linear:
    """Hugging Face's linear layer `name`, or some of its rows and columns -> order [K], codes [N, K], scales, zeros
    [N, C], bias [N] or None; an nn.Linear if it is not packed.

    read(name, shape, kinds, part) gives a tensor on the device, if it is among names."""
    (N, K), bits, (rows, columns) = shape, settings["bits"], part
    bias = read(name + "bias", (N,), part=(rows,)) if bias else None
    if name + "weight" in names and name + "qweight" not in names:
        weight = nn.Parameter(read(name + "weight", shape, part=part), requires_grad=False)
        linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        linear.weight, linear.bias = weight, bias if bias is None else nn.Parameter(bias, requires_grad=False)
        return linear
    C = K // group_of(K, settings["group_size"])

    def words(codes: slice) -> slice:
        return codes if codes.stop is None else slice(codes.start * bits // 32, codes.stop * bits // 32)

    awq = settings["quant_method"] == "awq"
    if awq:  # words along the outputs
        codes = unpack_rows(read(name + "qweight", (K, N * bits // 32), "I32", (columns, words(rows))).T, bits)
    else:
        codes = unpack_rows(read(name + "qweight", (K * bits // 32, N), "I32", (words(columns), rows)), bits).T
    zeros = unpack_rows(read(name + "qzeros", (C, N * bits // 32), "I32", (slice(None), words(rows))).T, bits)
    if awq:
        codes, zeros = (t.unflatten(0, (-1, 8))[:, AWQ_ORDER].flatten(0, 1) for t in (codes, zeros))
    elif settings["checkpoint_format"] == "gptq":
        zeros = zeros + 1 & 2 ** bits - 1
    g_idx = (torch.arange(K, device=codes.device) // (K // C))[columns]
    if name + "g_idx" in names or settings.get("desc_act"):
        g_idx = read(name + "g_idx", (K,), "I32", (columns,)).long()
    order, scales = g_idx.argsort(stable=True), read(name + "scales", (C, N), part=(slice(None), rows)).T
    counts = g_idx.clamp(0, C).bincount(minlength=C)
    if g_idx.amin() < 0 or len(counts) > C or len(g_idx) == K and not (counts == K // C).all():
        raise UserError(f"{name}g_idx: want each of {C} groups {K // C} times; config.json is of another model")
    here = counts.nonzero().squeeze(1)
    if C > 1 and not (counts[here] == K // C).all():
        return *filled(codes, scales, zeros, g_idx, order), bias
    return order, codes[:, order], scales[:, here], zeros[:, here], bias


def side_by_side(parts: list[tuple | nn.Linear], bits: int) -> nn.Module:
    """What read_part gave for q, k and v, or for gate and up, as one layer."""
    if not all(isinstance(part, tuple) and torch.equal(parts[0][0], part[0]) for part in parts):
        return Parts(side_by_side([part], bits) if isinstance(part, tuple) else part for part in parts)
    order = parts[0][0]
    codes, scales, zeros, bias = (None if t[0] is None else torch.cat(t) for t in list(zip(*parts))[1:])
    zeros = None if (zeros == 2 ** (bits - 1)).all() else zeros
    order = None if torch.equal(order, torch.arange(len(order), device=order.device)) else order
    return PackedLinear(codes, scales, zeros, bits, bias, order)


def read_settings(directory: Path) -> dict:
    """config.json's quantization_config, if this file can read such a checkpoint; {} where there is none."""
    settings = read_json(directory / "config.json").get("quantization_config") or {}
    if not settings:
        return {}
    group = settings.get("group_size", -1) if isinstance(settings, dict) else None
    if not isinstance(group, int) or group != -1 and (group < 32 or group % 32):
        raise UserError(f"{directory}: quantization_config {settings!r} is not supported, want an object whose "
                        "group_size is -1 or a multiple of 32")
    settings = dict(checkpoint_format="gptq", group_size=-1) | settings
    supported = dict(quant_method=["gptq", "awq"], bits=[4, 8], checkpoint_format=["gptq", "gptq_v2"])
    if settings.get("quant_method") == "awq":
        supported |= dict(bits=[4], version=["gemm"])
    for key, values in supported.items():
        if settings.get(key) not in values or isinstance(settings[key], float):
            raise UserError(f"quantization_config: {key} {settings.get(key)!r} is not supported, want one of {values}")
    return settings


def swap_in(settings: dict, device: torch.device, dtype: torch.dtype, shard, model: Transformer, files: dict) -> None:
    """PackedLinears for what a checkpoint holds packed, which leaves files; repacked on the device, one by one."""
    def read(name: str, *wanted, **part) -> Tensor:
        tensor = read_tensor(files, name, *wanted, **part).to(device)
        return tensor.to(dtype) if name.endswith((".bias", ".weight")) else tensor

    def part(name: str) -> tuple[slice, slice]:
        return shard.part(name) if shard else (slice(None), slice(None))

    parts = {}  # of our layers: Hugging Face's names, less "weight", and shapes
    for name, (ours, _, shape) in (shard.full if shard else model.config.hf_weights()).items():
        parts.setdefault(ours, []).append((name.removesuffix("weight"), shape))
    for name, parent, own in linears(model, head=not model.config.tied):
        found, bias = parts[f"{name}.weight"], getattr(parent, own).bias is not None
        if any(theirs + "qweight" in files for theirs, _ in found):
            layers = [read_part(read, files, theirs, shape, bias, settings, part(theirs)) for theirs, shape in found]
            setattr(parent, own, side_by_side(layers, settings["bits"]))


def default_group(quantize: str | None, group_size: int | None) -> int:
    return dict(int4=32, int8=-1).get(quantize, 1) if group_size is None else group_size  # 1: not quantized


def round_model(model: Transformer, quantize: str, group_size: int | None, shard=None) -> None:
    """--quantize's "int8" or "int4", with its defaults."""
    bits = dict(int8=8, int4=4)[quantize]
    quantize_model(model, bits, default_group(quantize, group_size), sym=bits == 8, shard=shard)


def load_model(directory: Path, device: torch.device, dtype: torch.dtype, quantize: str | None = None,
               group_size: int | None = None, progress: bool = False, split: Callable | None = None) -> Transformer:
    """As checkpoint.load_model, of GPTQ and AWQ checkpoints too; quantize, "int8" or "int4", rounds the layers'
    weights. split, tp.splitter()'s: this rank's part."""
    settings = read_settings(directory)
    if settings and quantize:
        raise UserError(f"--quantize {quantize}: {directory} is quantized already; leave the option out")
    group = settings.get("group_size", default_group(quantize, group_size))
    shard = split(load_config(directory), group) if split else None
    swap = partial(swap_in, settings, device, dtype, shard) if settings else lambda model, files: None
    model = checkpoint.load_model(directory, device, dtype, progress, swap, shard)
    if quantize:
        round_model(model, quantize, group_size, shard)
    if shard:
        shard.wire(model)
    return model


def read_calibration(path: Path, tokenizer: Tokenizer, wanted: int, length: int) -> Tensor:
    """The text's first `wanted` tokens, less what is no whole row, in rows of `length`."""
    with blame(path):
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
    if len(tokens) < wanted:
        raise UserError(f"--calibration {path}: {len(tokens)} tokens, {wanted} are wanted: give more text, or lower "
                        "--calibration-tokens")
    length = min(length, wanted)
    return torch.tensor(tokens[:wanted // length * length]).view(-1, length)


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, help="directory or Hub id")
    add("--out", type=Path, required=True, metavar="DIR", help="the directory to make")
    add("--bits", type=int, choices=(8, 4), default=4)
    add("--group-size", type=int, choices=(32, 64, 128, -1), help="-1: a row (default: 128 for 4 bits, -1 for 8)")
    add("--sym", action="store_true", help="zero points in the middle: less exact, and some engines want it")
    add("--gptq", action="store_true", help="better codes, from the inputs that --calibration gives")
    add("--calibration", type=Path, metavar="FILE", help="text of the kind that the model is for")
    add("--calibration-tokens", type=within(int, 2), default=131072, metavar="N", help="in whole sequences of 2,048")
    add("--act-order", action="store_true", help="with --gptq: columns of large inputs first")
    add("--head", action="store_true", help="quantize the output head too")
    add("--device", help="cpu, cuda, cuda:N or mps (default: the first GPU, else cpu)")
    add("--dtype", choices=DTYPES, help="to compute in; default: bfloat16 on a GPU, float32 on a CPU")
    args = parser.parse_args()
    if args.gptq != bool(args.calibration) or args.act_order and not args.gptq:
        parser.error("--gptq and --calibration go together, and --act-order with both")
    args.group_size = args.group_size or (128 if args.bits == 4 else -1)
    return args


def main() -> None:
    args = parse_args()
    device = find_device(args.device)
    dtype, source = find_dtype(args.dtype, device), find_checkpoint(args.checkpoint)
    config = load_config(source)
    if read_json(source / "config.json").get("quantization_config"):
        raise UserError(f"--checkpoint {args.checkpoint} is quantized already; start from the original")
    if args.head and (config.tied or config.vocab_size % 8):
        raise UserError("--head: the head is the embedding here, or has no multiple of 8 rows; leave the option out")
    for name, (_, _, shape) in config.hf_weights().items():
        if "_proj.weight" in name and shape[0] % 8:
            raise UserError(f"{name} has {shape[0]} rows: GPTQ's layout wants a multiple of 8; --quantize serves it")
    if os.path.lexists(args.out):
        raise UserError(f"--out {args.out} exists; remove it, or name another directory")
    if not (parent := args.out.absolute().parent).is_dir():
        raise UserError(f"--out {args.out}: there is no directory {parent}; make it first")
    tokens = None
    if args.gptq:
        length = min(2048, config.context)
        tokens = read_calibration(args.calibration, Tokenizer(source), args.calibration_tokens, length).to(device)
    how = dict(bits=args.bits, group_size=args.group_size, sym=args.sym)
    hub = dict(how, desc_act=args.act_order, lm_head=args.head, quant_method="gptq", checkpoint_format="gptq")
    with TemporaryDirectory(prefix=f"{args.out.name}.partial-", dir=parent) as partial_out:
        with memory_advice(f"out of memory on {device}: fewer --calibration-tokens need less"):
            model = checkpoint.load_model(source, device, dtype, progress=True)
            quantize_model(model, **how, act_order=args.act_order, head=args.head, calibration=tokens, progress=True)
        made = Path(partial_out, "made")
        made.mkdir()
        write_checkpoint(model, source, made, hub)
        made.rename(args.out)


if __name__ == "__main__":
    report_errors(main)

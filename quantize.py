"""
int8 and int4 weights: the plain quantized layer, rounding, GPTQ, and quantized checkpoints. This file writes the Hub's
GPTQ layout, and it reads that and AWQ's.

    python quantize.py --checkpoint DIR --bits 4 --group-size 128 --out DIR-int4               # round to nearest
    python quantize.py --checkpoint DIR --bits 4 --gptq --act-order --calibration TEXT --out DIR-gptq

GPTQ (Frantar et al. 2022, arXiv 2210.17323) chooses the codes column by column. The columns that are not quantized yet
make up for each error, as measured on the inputs that a calibration text gives.

A weight is (code - zero) * scale. A group of G weights of one row, along K, shares scale and zero.

Shapes: N outputs, K inputs, C groups of a row (K / G), S sequences of T tokens, D model dim.
"""
import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import (Tokenizer, UserError, find_checkpoint, hf_weights, load_config, load_model, read_json,
                        read_tensor, reading, tensor_files)
from cli import DTYPES, GIB, Parser, find_device, find_dtype, memory_advice, report_errors, within
from model import Transformer

SHRINK = [1 - 0.03 * i for i in range(8)]  # factors of a group's range among which GPTQ chooses
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ puts the first, the second ... of the eight codes of a word
BLOCK = 128  # columns whose errors are passed on to the rest at once: arXiv 2210.17323, section 3.3, step 2
CHUNK = 8192  # calibration tokens at a time
SHARD_BYTES = 4 * GIB
say_once = cache(tqdm.write)


# The plain quantized layer


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
    for 2 ** (bits - 1) everywhere; g_idx: each input's group [K], None where each K / C consecutive inputs
    are a group."""

    def __init__(self, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, bias: Tensor | None = None,
                 g_idx: Tensor | None = None):
        super().__init__()
        self.bits, self.out_features, self.in_features = bits, len(qweight), qweight.shape[1] * 32 // bits

        def parameter(tensor: Tensor | None) -> nn.Parameter | None:
            return None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False)

        self.qweight, self.scales = parameter(qweight), parameter(scales.half())
        self.zeros = parameter(None if zeros is None else zeros.to(torch.int16))
        self.bias, self.g_idx = parameter(bias), parameter(g_idx)

    def groups(self) -> Tensor:
        """Each input's group [K]."""
        K, C = self.in_features, self.scales.shape[1]
        return torch.arange(K, device=self.scales.device) // (K // C) if self.g_idx is None else self.g_idx

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K]."""
        codes, scales = unpack(self.qweight, self.bits).float(), self.scales.float()
        zeros = torch.full_like(scales, 2 ** (self.bits - 1)) if self.zeros is None else self.zeros
        if self.g_idx is not None:
            return ((codes - zeros[:, self.g_idx]) * scales[:, self.g_idx]).to(dtype)
        codes = codes.unflatten(1, (scales.shape[1], self.in_features // scales.shape[1]))  # [N, C, G]
        return ((codes - zeros[:, :, None]) * scales[:, :, None]).flatten(1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


# Rounding


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
    perm = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    columns = slice(None) if perm is None else perm
    w, hessian = w.float()[:, columns], hessian.float()[columns][:, columns].clone()
    U = inverse_factor(hessian)
    if drift is not None:
        w = w + w @ drift.float()[columns][:, columns] @ U.T @ U
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
    g_idx = None
    if perm is not None:
        back = perm.argsort()
        codes, g_idx = codes[back], (torch.arange(K, device=codes.device) // G)[back]
    return codes.T, torch.stack(scales, dim=1).half(), zeros, g_idx, loss.item()


def find_linears(model: Transformer, head: bool) -> list[tuple[str, nn.Module, str]]:
    """The linear layers, the head only if asked for: the name in the model, the parent module, the name there."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    split = [(name, *name.rpartition(".")[::2]) for name in names if head or name != "head"]
    return [(name, model.get_submodule(parent), own) for name, parent, own in split]


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
        setattr(parent, own, QuantizedLinear(pack(codes, bits), scales, zeros, bits, linear.bias, g_idx))
        bar.update()

    with tqdm(total=len(found), desc="quantizing", unit="matrix", disable=not progress) as bar:
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


# Writing a checkpoint


def gptq_tensors(model: Transformer, source: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a GPTQ checkpoint, on the host: quantized layers in its layout, the others as source has them."""
    files = tensor_files(source)
    for name, (ours, row, shape) in hf_weights(model.config).items():
        module = model.get_submodule(ours.rpartition(".")[0])
        if not isinstance(module, QuantizedLinear) or name.endswith(".bias"):
            yield name, read_tensor(files, name, shape)
            continue
        name, rows = name.removesuffix("weight"), slice(row, row + shape[0])
        scales = module.scales[rows]
        zeros = torch.full_like(scales, 2 ** (module.bits - 1)) if module.zeros is None else module.zeros[rows]
        yield name + "qweight", module.qweight[rows].T.contiguous().cpu()
        yield name + "qzeros", pack(zeros.T - 1, module.bits).cpu()
        yield name + "scales", scales.T.contiguous().cpu()
        yield name + "g_idx", module.groups().int().cpu()


def write_shards(tensors: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    """Writes safetensors files of at most SHARD_BYTES, one at a time, and an index if there are several."""
    held, shard, size = [], {}, 0  # the names in each file so far; the file to come
    for name, tensor in chain(tensors, [(None, None)]):
        if shard and (tensor is None or size + tensor.nbytes > SHARD_BYTES):
            with reading(path := directory / f"{len(held)}.safetensors"):  # a full disk raises an exception of its own
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
    write_shards(gptq_tensors(model, source), directory)
    for path in source.iterdir():  # the tokenizer's files, the chat template and the like
        if path.is_file() and path.suffix in (".json", ".model", ".jinja", ".txt") and ".index" not in path.suffixes:
            shutil.copyfile(path, directory / path.name)
    config = read_json(source / "config.json") | dict(quantization_config=quantization_config)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# Reading a checkpoint


class SeparateLinears(nn.ModuleList):
    """q, k and v, or gate and up, as layers of their own: some are not quantized, or their inputs' groups differ."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self], dim=-1)


class QuantizedReader:
    """Reads the quantized layers of a checkpoint, one by one, to the device. Another format is another method here.

    settings: read_settings()'s. shard: this rank's part of the model, a tp.Shard."""

    def __init__(self, settings: dict, device: torch.device, dtype: torch.dtype, shard=None):
        self.settings, self.bits, self.device, self.dtype, self.shard = settings, settings["bits"], device, dtype, shard
        self.part = shard.part if shard else lambda name: (slice(None), slice(None))

    def replace_layers(self, model: Transformer, files: dict[str, Path]) -> None:
        """Puts the layers that the files hold quantized into the model. What was read is removed from files."""
        self.files = files
        tensors = {}  # our parameter -> Hugging Face's names, without "weight", and shapes
        for name, (ours, _, shape) in hf_weights(self.shard.whole if self.shard else model.config).items():
            tensors.setdefault(ours, []).append((name.removesuffix("weight"), shape))
        for name, parent, own in find_linears(model, head=not model.config.tied):
            found, bias = tensors[f"{name}.weight"], getattr(parent, own).bias is not None
            if any(theirs + "qweight" in files for theirs, _ in found):
                setattr(parent, own, fuse([self.read_linear(theirs, shape, bias) for theirs, shape in found]))

    def read(self, name: str, shape: tuple[int, ...], dtypes: str = "BF16 F16 F32 F64",
             part: tuple[slice, ...] = ()) -> Tensor:
        return read_tensor(self.files, name, shape, dtypes, part).to(self.device)

    def words(self, codes: slice) -> slice:
        """Codes from where to where -> the words that hold them."""
        return codes if codes.stop is None else slice(codes.start * self.bits // 32, codes.stop * self.bits // 32)

    def read_linear(self, name: str, shape: tuple[int, int], bias: bool) -> nn.Module:
        """Hugging Face's linear layer `name` of that shape, or the rank's part of it; plain where it is not quantized.

        UserError for a g_idx that does not name each group K / C times."""
        (N, K), (rows, columns) = shape, self.part(name)
        bias = self.read(name + "bias", (N,), part=(rows,)).to(self.dtype) if bias else None
        if name + "weight" in self.files and name + "qweight" not in self.files:
            weight = self.read(name + "weight", shape, part=(rows, columns)).to(self.dtype)
            linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
            return linear
        C = K // group_of(K, self.settings["group_size"])
        read_codes = self.read_awq if self.settings["quant_method"] == "awq" else self.read_gptq
        qweight, zeros = read_codes(name, N, K, C)
        scales = self.read(name + "scales", (C, N), part=(slice(None), rows)).T
        consecutive = (torch.arange(K, device=self.device) // (K // C))[columns]
        if name + "g_idx" not in self.files and not self.settings.get("desc_act"):
            g_idx = consecutive
        else:
            g_idx = self.read(name + "g_idx", (K,), "I32", (columns,)).long()
            counts = g_idx.clamp(0, C).bincount(minlength=C)
            if g_idx.amin() < 0 or len(counts) > C or len(g_idx) == K and not (counts == K // C).all():
                raise UserError(f"{name}g_idx: want each of {C} groups {K // C} times; config.json is of another model")
        if torch.equal(g_idx, consecutive):  # a rank's columns are whole groups
            here = slice(int(g_idx[0]), int(g_idx[-1]) + 1)
            return QuantizedLinear(qweight, scales[:, here], zeros[:, here], self.bits, bias)
        return QuantizedLinear(qweight, scales, zeros, self.bits, bias, g_idx)

    def read_gptq(self, name: str, N: int, K: int, C: int) -> tuple[Tensor, Tensor]:
        """qweight int32 [K * bits / 32, N], words along K, and qzeros [C, N * bits / 32] -> qweight, zeros [N, C]."""
        rows, columns = self.part(name)
        qweight = self.read(name + "qweight", (K * self.bits // 32, N), "I32", (self.words(columns), rows)).T
        qzeros = self.read(name + "qzeros", (C, N * self.bits // 32), "I32", (slice(None), self.words(rows)))
        zeros = unpack(qzeros, self.bits).T
        if self.settings["checkpoint_format"] == "gptq":  # which stores zero - 1; "gptq_v2" stores zero
            zeros = zeros + 1 & 2 ** self.bits - 1
        return qweight, zeros

    def read_awq(self, name: str, N: int, K: int, C: int) -> tuple[Tensor, Tensor]:
        """AWQ's gemm version: qweight int32 [K, N / 8] and qzeros [C, N / 8], words along N -> as read_gptq()."""
        rows, columns = self.part(name)
        words = (self.read(name + "qweight", (K, N // 8), "I32", (columns, self.words(rows))),
                 self.read(name + "qzeros", (C, N // 8), "I32", (slice(None), self.words(rows))))
        codes, zeros = (unpack(t, 4).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1).T for t in words)
        return pack(codes, 4), zeros


def fuse(linears: list[nn.Module]) -> nn.Module:
    """One layer of q, k and v, or of gate and up, where all are quantized and have the same groups."""
    first = linears[0]
    quantized = all(isinstance(linear, QuantizedLinear) for linear in linears)
    if not quantized or not all(torch.equal(linear.groups(), first.groups()) for linear in linears):
        return SeparateLinears(linears)
    qweight, scales, zeros = (torch.cat([getattr(linear, name) for linear in linears])
                              for name in ("qweight", "scales", "zeros"))
    bias = None if first.bias is None else torch.cat([linear.bias for linear in linears])
    zeros = None if (zeros == 2 ** (first.bits - 1)).all() else zeros
    return QuantizedLinear(qweight, scales, zeros, first.bits, bias, first.g_idx)


def read_settings(directory: Path) -> dict:
    """config.json's quantization_config; {} where there is none. UserError for a format that is not read here."""
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


def default_group(quantize: str | None, group_size: int | None) -> int:
    """The group size of --quantize: -1 for a scale a row, 1 where nothing is quantized."""
    return dict(int4=32, int8=-1).get(quantize, 1) if group_size is None else group_size


def round_model(model: Transformer, quantize: str, group_size: int | None, shard=None) -> None:
    """--quantize's "int8" or "int4", with its defaults."""
    bits = dict(int8=8, int4=4)[quantize]
    quantize_model(model, bits, default_group(quantize, group_size), sym=bits == 8, shard=shard)


def load_checkpoint(directory: Path, device: torch.device, dtype: torch.dtype, quantize: str | None = None,
                    group_size: int | None = None, progress: bool = False,
                    split: Callable | None = None) -> Transformer:
    """As load_model(), of quantized checkpoints too.

    quantize: "int8" or "int4" rounds the layers' weights. split: tp.splitter()'s, for this rank's part."""
    settings = read_settings(directory)
    if settings and quantize:
        raise UserError(f"--quantize {quantize}: {directory} is quantized already; leave the option out")
    group = settings.get("group_size", default_group(quantize, group_size))
    shard = split(load_config(directory), group) if split else None
    replace_layers = QuantizedReader(settings, device, dtype, shard).replace_layers if settings else None
    model = load_model(directory, device, dtype, progress, replace_layers, shard)
    if quantize:
        round_model(model, quantize, group_size, shard)
    if shard:
        shard.parallelize(model)
    return model


# The command


def read_calibration(path: Path, tokenizer: Tokenizer, wanted: int, context: int) -> Tensor:
    """The text's first `wanted` tokens in rows of 2,048, or as many as the context holds; a partial row is left out."""
    with reading(path):
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
    if len(tokens) < wanted:
        raise UserError(f"--calibration {path}: {len(tokens)} tokens, {wanted} are wanted: give more text, or lower "
                        "--calibration-tokens")
    length = min(2048, context, wanted)
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
    for name, (_, _, shape) in hf_weights(config).items():
        if "_proj.weight" in name and shape[0] % 8:
            raise UserError(f"{name} has {shape[0]} rows: GPTQ's layout wants a multiple of 8; --quantize serves it")
    if os.path.lexists(args.out):
        raise UserError(f"--out {args.out} exists; remove it, or name another directory")
    if not (parent := args.out.absolute().parent).is_dir():
        raise UserError(f"--out {args.out}: there is no directory {parent}; make it first")
    tokens = None
    if args.gptq:
        tokens = read_calibration(args.calibration, Tokenizer(source), args.calibration_tokens, config.context)
        tokens = tokens.to(device)
    how = dict(bits=args.bits, group_size=args.group_size, sym=args.sym)
    hub = dict(how, desc_act=args.act_order, lm_head=args.head, quant_method="gptq", checkpoint_format="gptq")
    with TemporaryDirectory(prefix=f"{args.out.name}.partial-", dir=parent) as partial_out:
        with memory_advice(f"out of memory on {device}: fewer --calibration-tokens need less"):
            model = load_model(source, device, dtype, progress=True)
            quantize_model(model, **how, act_order=args.act_order, head=args.head, calibration=tokens, progress=True)
        made = Path(partial_out, "made")
        made.mkdir()
        write_checkpoint(model, source, made, hub)
        made.rename(args.out)


if __name__ == "__main__":
    report_errors(main)

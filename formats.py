"""
Quantized checkpoints: the Hub's formats, and how they are read and written.

    quant_method         what is read                                                            what is written
    gptq                 4 and 8 bits, both formats of zero points, act-order, dynamic           4 and 8 bits
    awq                  4 bits, version gemm
    compressed-tensors   pack-, int-, float- and naive-quantized: 4 and 8 bits, FP8 e4m3         pack-quantized
    fp8                  e4m3 with a scale a block or a tensor

A weight is (code - zero) * scale; FP8's codes are numbers by themselves, and have no zero. A group of G weights of one
row, along K, shares scale and zero. The layouts of the files are in the docstrings of QuantizedReader's methods. They
follow the packages that define them: gptqmodel 7.7, autoawq 0.2.9, compressed-tensors 0.20, transformers 5.23.

Shapes: N outputs, K inputs, C groups of a row (K / G).
"""
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from subprocess import run

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoint import (MOST_TOKENIZER, UserError, hf_weights, is_inside, read_json, read_tensor, reading,
                        tensor_files)
from cli import GIB, free_memory
from model import Transformer
from quantize import (CODES, E4M3, QuantizedLinear, find_linears, group_of, pack, plain_linear, unpack, unpack_layers)

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ puts the first, the second ... of the eight codes of a word
SHARD_BYTES = 4 * GIB


def unpack_quantized(model: Transformer, reserve: int = 0, quiet: bool = False) -> None:
    """unpack_layers(), if memory allows and leaves `reserve` bytes."""
    weight = model.embed.weight
    needed = weight.itemsize * sum(module.out_features * module.in_features for module in model.modules()
                                   if isinstance(module, QuantizedLinear))
    if not needed:
        return
    if fits := needed + reserve < 0.9 * free_memory(weight.device):
        unpack_layers(model)
    if not quiet:
        how = f"once, to {needed / 1e6:,.0f} MB" if fits else "at every step, for lack of memory: slow"
        print(f"without --compile, quantized weights are unpacked {how}", file=sys.stderr)


class SeparateLinears(nn.ModuleList):
    """q, k and v, or gate and up, as layers of their own: some are not quantized, or differ in codes or groups."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self], dim=-1)


def fuse(linears: list[nn.Module]) -> nn.Module:
    """One layer of q, k and v, or of gate and up, where all are quantized alike and have the same groups."""
    first = linears[0]
    quantized = all(isinstance(linear, QuantizedLinear) for linear in linears)
    if not quantized or not all(linear.codes == first.codes and torch.equal(linear.groups(), first.groups())
                                for linear in linears):
        return SeparateLinears(linears)
    qweight, scales = (torch.cat([getattr(linear, name) for linear in linears]) for name in ("qweight", "scales"))
    zeros = torch.cat([torch.full_like(linear.scales, first.codes.zero, dtype=torch.int16) if linear.zeros is None
                       else linear.zeros for linear in linears])
    bias = None if first.bias is None else torch.cat([linear.bias for linear in linears])
    zeros = None if (zeros == first.codes.zero).all() else zeros
    return QuantizedLinear(qweight, scales, zeros, first.codes, bias, first.g_idx)


# What config.json says


@dataclass(frozen=True)
class Scheme:
    """How a file holds a quantized layer. `rows` rows and `group` inputs share a scale; -1: all of them do.

    layout: gptq, gptq_v2 or awq; of compressed-tensors packed (words of codes) or int (int8); e4m3."""
    layout: str
    bits: int
    group: int = -1
    rows: int = 1
    zeros: bool = True  # the file has zero points
    act_order: bool = False  # the file must say which group an input belongs to


# The first rule whose pattern matches the beginning of a layer's name says how the layer is held. None: unquantized.
Rules = list[tuple[str, Scheme | None]]
EVERY = ""
OTHERS = {"mxfp4": "MXFP4", "mxfp6": "MXFP6", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "-24": "2:4 sparse",
          "sparse": "sparse", "hqq": "HQQ", "gguf": "GGUF"}  # parts of names -> what people call these formats


def wanted(settings: dict, key: str, values: list, default=None):
    """settings[key], which must be one of the values. UserError names what was found and what is read."""
    found = settings.get(key, default)
    if not any(type(found) is type(value) and found == value for value in values):
        told = f"{found} {settings.get('quant_algo')}".lower()  # modelopt's own key
        known = next((f" ({name})" for part, name in OTHERS.items() if part in told), "")
        raise UserError(f"quantization_config: {key} {found!r}{known} is not supported, want one of {values}")
    return found


FIND_MATCHES = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
patterns, names = json.load(sys.stdin)
compiled = [re.compile(pattern) for pattern in patterns]
print(json.dumps([next((i for i, pattern in enumerate(compiled) if pattern.match(name)), None) for name in names]))
"""


def first_matches(patterns: list[str], names: list[str]) -> list[int | None]:
    """Which of a file's regular expressions is the first that matches the beginning of each name.

    A search can take ages, as that of "(a?){99}b" does, so a process makes it, which ends after 3 s."""
    if not any(patterns):
        return [0] * len(names)
    with reading("config.json: quantization_config: its patterns of layers' names"):
        done = run([sys.executable, "-I", "-c", FIND_MATCHES], input=json.dumps([patterns, names]), capture_output=True,
                   text=True)
        if done.returncode:
            raise ValueError((done.stderr.splitlines() or ["they take more than 3 s"])[-1])
        return json.loads(done.stdout)


def wanted_group(settings: dict) -> int:
    found = settings.get("group_size", -1)
    if type(found) is not int or found != -1 and (not 32 <= found <= 2 ** 20 or found % 32):
        raise UserError(f"quantization_config: group_size {found!r:.60} is not supported, want -1 or a multiple of 32")
    return found


def wanted_block(settings: dict, key: str) -> tuple[int, int]:
    """The rows and inputs of a block."""
    found = settings.get(key)
    if type(found) is not list or [type(n) for n in found] != [int, int] or min(found) < 1 or found[1] % 32:
        raise UserError(f"quantization_config: {key} {found!r} is not supported, want [rows, inputs], inputs % 32 = 0")
    return found[0], found[1]


def gptq_rules(settings: dict) -> Rules:
    """gptqmodel's `dynamic`: "-:REGEX" leaves layers as they were, "+:REGEX" or "REGEX" has settings of their own."""
    def scheme(of: dict) -> Scheme:
        layout = wanted(of, "checkpoint_format", ["gptq", "gptq_v2"], of.get("format", "gptq"))
        return Scheme(layout, wanted(of, "bits", [4, 8]), wanted_group(of), act_order=bool(of.get("desc_act")))

    rules = [(re.sub(r"^[-+]:", "", key), None if key.startswith("-:") else scheme(settings | changes))
             for key, changes in (settings.get("dynamic") or {}).items()]
    return [*rules, (EVERY, scheme(settings))]


def awq_rules(settings: dict) -> Rules:
    """autoawq calls the layout `version`, gptqmodel `checkpoint_format` or `format`."""
    version = next((settings[key] for key in ("version", "checkpoint_format", "format") if settings.get(key)), "gemm")
    wanted(dict(version=str(version).lower()), "version", ["gemm"])
    return [(EVERY, Scheme("awq", wanted(settings, "bits", [4]), wanted_group(settings)))]


def fp8_rules(settings: dict) -> Rules:
    """A name in modules_to_not_convert or ignored_layers stands for a module and all in it, or is the end of a name, as
    in transformers' should_convert_module()."""
    wanted(settings, "fmt", ["e4m3"], "e4m3")
    rows = group = -1
    if settings.get("weight_block_size") is not None:
        rows, group = wanted_block(settings, "weight_block_size")
    names = (settings.get("modules_to_not_convert") or []) + (settings.get("ignored_layers") or [])
    rules = [(rf"(?:{name})(?:(?<=\.)|\.|$)|.*{re.escape(name)}$", None) for name in names]
    return [*rules, (EVERY, Scheme("e4m3", 8, group, rows, zeros=False))]


def compressed_tensors_rules(settings: dict) -> Rules:
    """`ignore` comes first, then `targets`: names, "re:" and a regular expression, then "Linear", the class."""
    sparsity = settings.get("sparsity_config") or {}
    wanted(dict(sparsity_config=sparsity.get("format", "dense")), "sparsity_config", ["dense"])
    transforms = settings.get("transform_config") or {}  # of the weights, which would have to be undone
    wanted(dict(transform_config=transforms.get("config_groups") or {}), "transform_config", [{}])

    def pattern(target: str) -> str:
        if target == "Linear":
            return EVERY
        return target[3:] if target.startswith("re:") else re.escape(target) + "$"

    targets = {}
    for group in settings["config_groups"].values():
        form = group.get("format") or settings.get("format")
        weights = None if group.get("weights") is None else compressed_tensors_scheme(group["weights"], form)
        targets |= dict.fromkeys(group["targets"], weights)
    order = sorted(targets, key=lambda target: (target == "Linear", "re:" in target, target))
    ignored = [(pattern(target), None) for target in settings.get("ignore") or []]
    return [*ignored, *((pattern(target), targets[target]) for target in order)]


def compressed_tensors_scheme(weights: dict, form: str) -> Scheme:
    """weights: the description of a config group's weights; form: what the package calls its format."""
    wanted(dict(format=form), "format", ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"])
    kind = wanted(weights, "type", ["int"] if form[:3] in ("pac", "int") else ["int", "float"], "int")
    bits = wanted(weights, "num_bits", [8] if kind == "float" else [4, 8])
    inferred = {None: "tensor", -1: "channel"}.get(weights.get("group_size"), "group")
    strategy = wanted(dict(strategy=weights.get("strategy") or inferred), "strategy",
                      ["tensor", "channel", "group", "block"])
    wanted(weights, "dynamic", [False], False)
    layout = {"float": "e4m3", "int": "packed" if form == "pack-quantized" else "int"}[kind]
    zeros = not wanted(weights, "symmetric", [True] if kind == "float" else [True, False], True)
    act_order = weights.get("actorder") in ("group", "dynamic", True)
    if strategy == "block":
        rows, group = wanted_block(weights, "block_structure")
        return Scheme(layout, bits, group, rows, zeros)
    group = wanted_group(weights) if strategy == "group" else -1
    return Scheme(layout, bits, group, -1 if strategy == "tensor" else 1, zeros, act_order)


RULES = {"gptq": gptq_rules, "awq": awq_rules, "compressed-tensors": compressed_tensors_rules, "fp8": fp8_rules}


def read_settings(directory: Path) -> dict:
    """What config.json's quantization_config says; {} where there is none. UserError for a format that is not read.

    quant_method; rules; name, such as "int4", and bits: of the most exact scheme; activations: whether these or the KV
    cache are to be quantized, too."""
    path = directory / "config.json"
    config = read_json(path)
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if not settings:
        return {}
    with reading(f"{path}: quantization_config"):
        settings = settings | dict(quant_method=settings.get("quant_method") or settings.get("method"))
        method = wanted(settings, "quant_method", list(RULES))
        rules = RULES[method](settings)
        schemes = [scheme for _, scheme in rules if scheme]
        if not schemes:
            return {}
        bits, integer = max((scheme.bits, scheme.layout != "e4m3") for scheme in schemes)
        activations = settings.get("activation_scheme") or settings.get("kv_cache_scheme") or any(
            group.get("input_activations") for group in (settings.get("config_groups") or {}).values())
        return dict(quant_method=method, rules=rules, name=f"int{bits}" if integer else "fp8", bits=bits,
                    activations=activations)


def shared_inputs(settings: dict) -> int:
    """The inputs that ranks must not part: a group of each scheme. Blocks may be parted; 32 inputs are whole words."""
    return math.lcm(*(32 if scheme.group == -1 or scheme.rows > 1 else scheme.group
                      for _, scheme in settings["rules"] if scheme))


# Reading a checkpoint


def lossless(scales: Tensor) -> Tensor:
    """The scales in fp16 where that holds them exactly, else in fp32."""
    half = scales.half()
    return half if torch.equal(half.float(), scales.float()) else scales.float()


@dataclass(frozen=True)
class Layer:
    """What is read of one of Hugging Face's layers: its name with a dot, its shape, and the rank's part of it."""
    name: str
    N: int
    K: int
    rows: slice
    columns: slice
    scheme: Scheme

    @property
    def G(self) -> int:
        """Inputs of a group. A file's block may be larger than the matrix."""
        return self.K if self.scheme.group == -1 else min(self.scheme.group, self.K)

    @property
    def C(self) -> int:
        return -(-self.K // self.G)

    def words(self, codes: slice) -> slice:
        """Codes from where to where -> the words that hold them."""
        per = 32 // self.scheme.bits
        return codes if codes.stop is None else slice(codes.start // per, -(-codes.stop // per))


class QuantizedReader:
    """Reads the quantized layers of a checkpoint, one by one, to the device. Another layout is another method here.

    settings: read_settings()'s. shard: this rank's part of the model, a tp.Shard.

    A read_LAYOUT method gives a layer's qweight int32 [N, K * bits / 32], as pack() does, scales [N, C], and zeros
    [N, C] or None, with the rank's rows, and of qweight its columns."""

    def __init__(self, settings: dict, device: torch.device, dtype: torch.dtype, shard=None):
        self.settings, self.device, self.dtype, self.shard = settings, device, dtype, shard
        self.part = shard.part if shard else lambda name: (slice(None), slice(None))
        self.layouts: dict[str, Callable] = dict(gptq=self.read_gptq, gptq_v2=self.read_gptq, awq=self.read_awq,
                                                 packed=self.read_packed, int=self.read_int, e4m3=self.read_e4m3)

    def replace_layers(self, model: Transformer, files: dict[str, Path]) -> None:
        """Puts the layers that the files hold quantized into the model. What was read is removed from files."""
        self.files = files
        tensors = {}  # our parameter -> Hugging Face's names, without "weight", and shapes
        for name, (ours, _, shape) in hf_weights(self.shard.whole if self.shard else model.config).items():
            tensors.setdefault(ours, []).append((name.removesuffix("weight"), shape))
        rules, names = self.settings["rules"], [name for found in tensors.values() for name, _ in found]
        first = first_matches([pattern for pattern, _ in rules], [name[:-1] for name in names])
        self.schemes = {name: None if i is None else rules[i][1] for name, i in zip(names, first)}
        for name, parent, own in find_linears(model, head=not model.config.tied):
            found, bias = tensors[f"{name}.weight"], getattr(parent, own).bias is not None
            schemes = [self.scheme(theirs) for theirs, _ in found]
            if any(schemes):
                setattr(parent, own, fuse([self.read_linear(theirs, shape, scheme, bias)
                                           for (theirs, shape), scheme in zip(found, schemes)]))
        for name in list(files):  # neither activations nor the cache are quantized here
            if re.search(r"\.(input|output|activation|q|k|v|kv)_(scale|zero_point)$", name):
                del files[name]
                self.settings["activations"] = True

    def scheme(self, name: str) -> Scheme | None:
        """The layer's scheme, None where the file has it as it was. name: with a dot at the end.

        config.json decides. But GPTQ and AWQ files tell only by their tensors what they left out, and so do all files
        of the head."""
        scheme = self.schemes[name]
        if scheme and name + "weight" in self.files:
            told = name == "lm_head." or scheme.layout in ("gptq", "gptq_v2", "awq")
            parts = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
            if told and not any(name + part in self.files for part in parts):
                return None
        return scheme

    def read(self, name: str, shape: tuple[int, ...], dtypes: str = "BF16 F16 F32 F64", part: tuple[slice, ...] = (),
             others: Iterable[tuple] = ()) -> Tensor:
        """The tensor, on the device, of this shape or one of the others. UserError for NaN and infinite numbers: a
        bias's, a scale's."""
        tensor = read_tensor(self.files, name, [shape, *others], dtypes, part).to(self.device)
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.isfinite().all():
            raise UserError(f"the tensor {name} has NaN or infinite values; take a checkpoint that is whole")
        return tensor

    def read_linear(self, name: str, shape: tuple[int, int], scheme: Scheme | None, bias: bool) -> nn.Module:
        """Hugging Face's linear layer `name` of that shape, or the rank's part of it; plain where scheme is None."""
        (N, K), (rows, columns) = shape, self.part(name)
        bias = self.read(name + "bias", (N,), part=(rows,)).to(self.dtype) if bias else None
        if scheme is None:
            return plain_linear(self.read(name + "weight", shape, part=(rows, columns)).to(self.dtype), bias)
        group_of(K, scheme.group if scheme.rows == 1 else -1)
        if scheme.layout in ("gptq", "gptq_v2", "awq") and N * scheme.bits % 32:
            raise UserError(f"the layer {name[:-1]} has {N} rows; want a multiple of {32 // scheme.bits}")
        layer = Layer(name, N, K, rows, columns, scheme)
        qweight, scales, zeros = self.layouts[scheme.layout](layer)
        kept, g_idx = self.read_groups(layer)
        scales, zeros = lossless(scales)[:, kept], None if zeros is None else zeros[:, kept]
        codes = E4M3 if scheme.layout == "e4m3" else CODES[f"int{scheme.bits}"]
        return QuantizedLinear(qweight, scales.float() if codes is E4M3 else scales, zeros, codes, bias, g_idx)

    def read_groups(self, layer: Layer) -> tuple[Tensor, Tensor | None]:
        """-> which groups' scales are kept, and the inputs' groups g_idx [K]: None where groups are side by side.

        A block may end early, at K or where a rank's columns begin or end. Then it becomes several groups of one size.
        UserError for a g_idx that does not name each group K / C times."""
        K, G, C = layer.K, layer.G, layer.C
        consecutive = (torch.arange(K, device=self.device) // G)[layer.columns]
        g_idx = None
        name = layer.name + ("g_idx" if layer.scheme.layout.startswith("gptq") else "weight_g_idx")
        if name in self.files or layer.scheme.act_order:
            g_idx = self.read(name, (K,), "I32", (layer.columns,)).long()
            counts = g_idx.clamp(0, C).bincount(minlength=C)
            if g_idx.amin() < 0 or len(counts) > C or len(g_idx) == K and not (counts == K // C).all():
                raise UserError(f"{name}: want each of {C} groups {K // C} times; config.json is of another model")
        if g_idx is None or torch.equal(g_idx, consecutive):
            here = len(consecutive)
            step = math.gcd(G, layer.columns.start or 0, here) if C > 1 else here
            return consecutive[::max(1, step)], None
        return torch.arange(C, device=self.device), g_idx

    def read_gptq(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
        """qweight int32 [K * bits / 32, N], words along K; qzeros [C, N * bits / 32], words along N; scales [C, N]."""
        name, N, K, C, bits = layer.name, layer.N, layer.K, layer.C, layer.scheme.bits
        rows, all_groups = layer.rows, slice(None)
        qweight = self.read(name + "qweight", (K * bits // 32, N), "I32", (layer.words(layer.columns), rows)).T
        qzeros = self.read(name + "qzeros", (C, N * bits // 32), "I32", (all_groups, layer.words(rows)))
        if layer.scheme.layout == "gptq":
            # The first version stores zero - 1, taken from whole words: a zero of 0 borrows from its neighbour. Added
            # to whole words, the borrow comes back.
            qzeros = qzeros + {4: 0x11111111, 8: 0x01010101}[bits]
        return qweight, self.read(name + "scales", (C, N), part=(all_groups, rows)).T, unpack(qzeros, bits).T

    def read_awq(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gemm version: qweight int32 [K, N / 8] and qzeros [C, N / 8], words along N; scales [C, N]."""
        name, N, K, C, rows = layer.name, layer.N, layer.K, layer.C, layer.rows
        words = (self.read(name + "qweight", (K, N // 8), "I32", (layer.columns, layer.words(rows))),
                 self.read(name + "qzeros", (C, N // 8), "I32", (slice(None), layer.words(rows))))
        codes, zeros = (unpack(t, 4).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1).T for t in words)
        return pack(codes, 4), self.read(name + "scales", (C, N), part=(slice(None), rows)).T, zeros

    def read_packed(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
        """weight_packed int32 [N, K * bits / 32], words along K; weight_zero_point [N * bits / 32, C], words along N;
        weight_scale [N, C]; weight_shape, which is [N, K]. Codes and zero points are stored plus 2 ** (bits - 1)."""
        name, N, K, C, bits = layer.name, layer.N, layer.K, layer.C, layer.scheme.bits
        shape = self.read(name + "weight_shape", (2,), "I64 I32").tolist()
        if shape != [N, K]:
            raise UserError(f"{name}weight_shape says {shape}, want {[N, K]}: config.json is of another model")
        part = layer.rows, layer.words(layer.columns)
        qweight = self.read(name + "weight_packed", (N, K * bits // 32), "I32", part)
        zeros = None
        if layer.scheme.zeros:
            words = self.read(name + "weight_zero_point", (-(-N * bits // 32), C), "I32", (layer.words(layer.rows),))
            zeros = unpack(words.T, bits).T[:len(qweight)]
        return qweight, self.read_scales(layer, "weight_scale"), zeros

    def read_int(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
        """weight int8 [N, K], weight_zero_point int8 and weight_scale, as read_scales() says."""
        name, bits = layer.name + "weight", layer.scheme.bits
        codes = self.read(name, (layer.N, layer.K), "I8", (layer.rows, layer.columns)).view(torch.uint8)
        codes = codes + 2 ** (bits - 1)
        if (codes > 2 ** bits - 1).any():
            raise UserError(f"the tensor {name} has numbers of more than {bits} bits; config.json is of another model")
        zeros = None
        if layer.scheme.zeros:
            zeros = self.read_scales(layer, "weight_zero_point", "I8").to(torch.int16) + 2 ** (bits - 1)
        qweight = codes.view(torch.int32) if bits == 8 else pack(codes, bits)
        return qweight, self.read_scales(layer, "weight_scale"), zeros

    def read_e4m3(self, layer: Layer) -> tuple[Tensor, Tensor, None]:
        """weight float8_e4m3fn [N, K]; weight_scale or weight_scale_inv, which multiplies too: see read_scales()."""
        name = layer.name + "weight"
        codes = self.read(name, (layer.N, layer.K), "F8_E4M3", (layer.rows, layer.columns)).view(torch.uint8)
        if (codes & 0x7F).eq_(0x7F).any():
            raise UserError(f"the tensor {name} has NaN codes; take a checkpoint that is whole")
        inverse = self.settings["quant_method"] == "fp8" and layer.name + "weight_scale" not in self.files
        scales = self.read_scales(layer, "weight_scale_inv" if inverse else "weight_scale")
        return codes.contiguous().view(torch.int32), scales, None

    def read_scales(self, layer: Layer, kind: str, dtypes: str = "BF16 F16 F32 F64") -> Tensor:
        """One number for each block of `rows` rows and G inputs -> [N, C] with the rank's rows.

        A tensor's one number may be [] or [1]; a number a row may be [N]."""
        rows = layer.N if layer.scheme.rows == -1 else min(layer.scheme.rows, layer.N)
        shape = -(-layer.N // rows), layer.C
        flat = [(math.prod(shape),)] + [()] * (shape == (1, 1))
        block = torch.arange(layer.N, device=self.device)[layer.rows] // rows
        return self.read(layer.name + kind, shape, dtypes, others=flat).view(shape)[block]


# Writing a checkpoint


def gptq_config(bits: int, group_size: int, sym: bool, act_order: bool, head: bool) -> dict:
    """quantization_config of a GPTQ checkpoint.

    gptqmodel 7.7 reads other programs' asymmetric weights as gptq_v2 alone. Symmetric ones stay gptq, which older
    programs read too."""
    return dict(bits=bits, group_size=group_size, sym=sym, desc_act=act_order, lm_head=head, quant_method="gptq",
                checkpoint_format="gptq" if sym else "gptq_v2")


def compressed_tensors_config(bits: int, group_size: int, sym: bool, act_order: bool, head: bool) -> dict:
    """quantization_config of a compressed-tensors checkpoint, pack-quantized. UserError for act-order, whose g_idx the
    package no longer reads."""
    if act_order:
        raise UserError("--act-order: compressed-tensors reads it no more; leave it out, or take --format gptq")
    strategy = dict(strategy="channel") if group_size == -1 else dict(strategy="group", group_size=group_size)
    weights = dict(num_bits=bits, type="int", symmetric=sym, dynamic=False) | strategy
    groups = dict(group_0=dict(targets=["Linear"], weights=weights))
    return dict(quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed",
                ignore=[] if head else ["lm_head"], config_groups=groups)


CONFIGS = {"gptq": gptq_config, "compressed-tensors": compressed_tensors_config}


def gptq_tensors(layer: QuantizedLinear, rows: slice, config: dict) -> dict[str, Tensor]:
    """The tensors of some rows of a layer, as QuantizedReader.read_gptq() describes them."""
    scales = layer.scales[rows]
    zeros = torch.full_like(scales, layer.codes.zero) if layer.zeros is None else layer.zeros[rows]
    stored = zeros - int(config["checkpoint_format"] == "gptq")
    return dict(qweight=layer.qweight[rows].T, qzeros=pack(stored.T, layer.codes.bits), scales=scales.T,
                g_idx=layer.groups().int())


def packed_tensors(layer: QuantizedLinear, rows: slice, config: dict) -> dict[str, Tensor]:
    """The tensors of some rows of a layer, as QuantizedReader.read_packed() describes them."""
    qweight = layer.qweight[rows]
    tensors = dict(weight_packed=qweight, weight_scale=layer.scales[rows],
                   weight_shape=torch.tensor([len(qweight), layer.in_features]))
    if layer.zeros is not None:
        tensors["weight_zero_point"] = pack(layer.zeros[rows].T, layer.codes.bits).T
    return tensors


def quantized_tensors(model: Transformer, source: Path, config: dict) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, on the host: quantized layers as config says, the others as source has them."""
    make = {"gptq": gptq_tensors, "compressed-tensors": packed_tensors}[config["quant_method"]]
    files = tensor_files(source)
    for name, (ours, row, shape) in hf_weights(model.config).items():
        module = model.get_submodule(ours.rpartition(".")[0])
        if not isinstance(module, QuantizedLinear) or name.endswith(".bias"):
            yield name, read_tensor(files, name, [shape])
            continue
        for kind, tensor in make(module, slice(row, row + shape[0]), config).items():
            yield name.removesuffix("weight") + kind, tensor.contiguous().cpu()


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
    write_shards(quantized_tensors(model, source, quantization_config), directory)
    for path in source.iterdir():  # the tokenizer's files, the chat template and the like
        wanted = path.suffix in (".json", ".model", ".jinja", ".txt") and ".index" not in path.suffixes
        # Nothing that a link takes from elsewhere, nor what is no such file by its size.
        if wanted and path.is_file() and is_inside(path) and path.stat().st_size <= MOST_TOKENIZER:
            shutil.copyfile(path, directory / path.name)
    config = read_json(source / "config.json") | dict(quantization_config=quantization_config)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

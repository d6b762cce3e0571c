"""
Quantized checkpoints: the Hub's formats, and how they are read and written.

    quant_method         what is read                                                            what is written
    gptq                 4 and 8 bits, both formats of zero points, act-order, dynamic           4 and 8 bits
    awq                  4 bits, version gemm
    compressed-tensors   pack-, int-, float- and naive-quantized: 4 and 8 bits, FP8 e4m3,        pack-quantized
                         mxfp4- and nvfp4-pack-quantized
    fp8                  e4m3 with a scale a block or a tensor
    mxfp4                gpt-oss's experts

A weight is (code - zero) * scale; FP8's codes are numbers by themselves, and have no zero. A group
of G weights of one row, along K, shares scale and zero. The layouts of the files are in the
docstrings of the functions in READERS. They follow the packages that define them: gptqmodel 7.7,
autoawq 0.2.9, compressed-tensors 0.20, transformers 5.23.

A new format is a function in RULES, which makes schemes of its settings, and one in READERS, if its
layout is new. Which weights can be quantized stands in the table of weights: see checkpoint.Weight.

Shapes: N outputs, K inputs, C groups of a row (K / G).
"""

import json
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hub.checkpoint import FLOATS, INDEX, Checkpoint, Weight, hf_weights, load_model, read_tensor
from hub.vet import GIB, MOST_TOKENIZER, first_matches, free_memory, is_inside, reading
from model import Experts, KVCache, Transformer
from quantize import (
    CODES,
    E4M3,
    INT4,
    MXFP4,
    NVFP4,
    Codes,
    QuantizedExperts,
    QuantizedLinear,
    default_group,
    group_of,
    pack,
    parameter,
    replace_layers,
    round_head,
    round_model,
    say_once,
    unpack,
)

AWQ_ORDER = [
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
]  # where AWQ puts the first, the second ... of the eight codes of a word
GPTQ_AND_AWQ = "gptq", "gptq_v2", "awq"  # layouts
SHARD_BYTES = 4 * GIB
ALL = slice(None)


def check_quantize(
    checkpoint: Checkpoint, settings: dict, quantize: str | None, group_size: int | None
) -> None:
    """ValueError where --quantize and --group-size do not suit the checkpoint. settings:
    read_settings()'s."""
    if not quantize:
        return
    if (
        settings and settings.get("quant_method") != "mxfp4"
    ):  # of gpt-oss what has no codes is rounded
        raise ValueError(
            f"quantize={quantize}: {checkpoint.directory} is quantized already; leave the option "
            f"out"
        )
    for weight in checkpoint.weights.values():
        if weight.quantized:
            group_of(weight.shape[1], default_group(quantize, group_size))


def load(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None = None,
    group_size: int | None = None,
    quantize_head: str | None = None,
    progress: bool = False,
    split: Callable | None = None,
) -> Transformer:
    """Reads a checkpoint's weights, quantized or not.

    quantize, quantize_head: "int8" or "int4" rounds the layers' weights, the head's. split:
    tp.splitter()'s, for this rank's part."""
    settings = read_settings(checkpoint)
    group = default_group(quantize, group_size)
    if settings:
        group = shared_inputs(settings, group)
    shard = (
        split(checkpoint.config, group, outputs=checkpoint.counted().vocab_size) if split else None
    )
    reader = QuantizedReader(settings, device, dtype, shard) if settings else None
    model = load_model(checkpoint, device, dtype, progress, reader and reader.read_layers, shard)
    if quantize or quantize_head:
        check_finite(model)
    if quantize:
        round_model(model, quantize, group_size, shard=shard)
    if shard:
        shard.parallelize(model)
    if quantize_head:
        round_head(model, quantize_head)
    return model


def check_finite(model: Transformer) -> None:
    """ValueError for NaN and infinite weights, which rounding would hide."""
    held = dict(model.named_parameters())
    for name, weight in hf_weights(model.config).items():
        parameter = held.get(weight.ours)
        # What has codes is not there, nor is an EAGLE head's embedding, which may be its target's.
        if parameter is not None and not parameter.is_meta:
            vet_numbers(weight.of(parameter), f"the tensor {name} has")


def vet_numbers(tensor: Tensor, subject: str) -> None:
    """subject: what "NaN or infinite values" goes on, if there are any."""
    broken = tensor.isnan() if tensor.dtype == torch.float8_e4m3fn else ~tensor.isfinite()
    if broken.any():
        raise ValueError(f"{subject} NaN or infinite values; take a checkpoint that is whole")


def plain_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear | Experts:
    """A linear layer of a weight [N, K], Experts of [X, N, K]."""
    with torch.device("meta"):
        if weight.dim() == 3:
            layer = Experts(*weight.shape, bias=False)
        else:
            layer = nn.Linear(*weight.T.shape, bias=False)
    layer.weight, layer.bias = parameter(weight), parameter(bias)
    return layer


def unpack_quantized(
    model: Transformer | None, slots: int = 0, quiet: bool = False, ranks: int = 1
) -> None:
    """Puts plain layers with the same weights in the place of quantized ones, if memory allows and
    leaves room for a KV cache of so many slots over all rows. Eager code dequantizes a quantized
    layer in each call."""
    layers = (
        [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        if model
        else []
    )
    if not layers:
        return
    weight = model.embed.weight
    needed = weight.itemsize * sum(
        layer.qweight.numel() * 32 // layer.codes.bits for layer in layers
    )
    cache = slots * KVCache.bytes_per_token(model.config, weight.dtype)
    fits = needed + cache < 0.9 * free_memory(weight.device, ranks)
    if fits:
        for kind in (QuantizedLinear, QuantizedExperts):
            replace_layers(
                model, kind, lambda layer: plain_layer(layer.dequantize(weight.dtype), layer.bias)
            )
    if not quiet:
        how = (
            f"once, to {needed / 1e6:,.0f} MB"
            if fits
            else "at every step, for lack of memory: slow"
        )
        print(f"without --compile, quantized weights are unpacked {how}", file=sys.stderr)


class SeparateLinears(nn.ModuleList):
    """q, k and v, or gate and up, as layers of their own: some are not quantized, or differ in
    codes or groups."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self], dim=-1)


def alike(linears: list[nn.Module]) -> bool:
    """Whether all are quantized, with the same codes and as many groups."""
    kinds = {
        isinstance(linear, QuantizedLinear) and (linear.codes, linear.scales.shape[-1])
        for linear in linears
    }
    return len(kinds) == 1 and False not in kinds


def fuse(linears: list[nn.Module]) -> nn.Module:
    """One layer of q, k and v, or of gate and up, where all are quantized with the same codes and
    groups."""
    if alike(linears) and all(linear.groups().equal(linears[0].groups()) for linear in linears):
        return QuantizedLinear(*merge(linears, torch.cat), linears[0].g_idx)
    return SeparateLinears(linears)


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
    """What QuantizedLinear takes, but for g_idx, of several with the same codes and as many groups.
    join: torch.cat or torch.stack."""
    zeros = bias = None
    if any(linear.zeros is not None for linear in linears):
        zeros = join([zeros_of(linear) for linear in linears])
    if linears[0].bias is not None:
        bias = join([linear.bias for linear in linears])
    qweight = join([linear.qweight for linear in linears])
    scales = join([linear.scales for linear in linears])
    return qweight, scales, zeros, linears[0].codes, bias


def zeros_of(layer: QuantizedLinear) -> Tensor:
    """The zero points [N, C], int16, if the layer has none of its own, too."""
    if layer.zeros is None:
        return torch.full_like(layer.scales, layer.codes.zero, dtype=torch.int16)
    return layer.zeros


# What config.json says


@dataclass(frozen=True)
class Scheme:
    """How a file holds a quantized layer. `rows` rows and `group` inputs share a scale; group -1:
    all of a row do.

    layout: gptq, gptq_v2 or awq; of compressed-tensors packed (words of codes), int (int8), mxfp4
    or nvfp4; fp8; experts, gpt-oss's MXFP4."""

    layout: str
    codes: Codes
    group: int = -1
    rows: int = 1
    zeros: bool = False  # a file of compressed-tensors has zero points
    act_order: bool = False  # the file must say which group an input belongs to


# The first rule whose pattern matches the beginning of a layer's name says how the layer is held.
# None: unquantized.
Rules = list[tuple[str, Scheme | None]]
EVERY = ""
TENSOR = (
    sys.maxsize,
    sys.maxsize,
)  # rows and inputs of a block that is the whole matrix, whatever its size
OTHERS = {  # parts of names -> what people call these formats
    "mxfp4": "MXFP4",
    "mxfp6": "MXFP6",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "-24": "2:4 sparse",
    "sparse": "sparse",
    "hqq": "HQQ",
    "gguf": "GGUF",
}


def wanted(settings: dict, key: str, values: list, default=None):
    """settings[key], which must be one of the values; null is as if it were missing. ValueError
    names what was found and what is read."""
    found = settings.get(key)
    if found is None:
        found = default
    if found not in values:
        told = f"{found} {settings.get('quant_algo')}".lower()  # modelopt's own key
        known = next((f" ({name})" for part, name in OTHERS.items() if part in told), "")
        raise ValueError(
            f"quantization_config: {key} {found!r}{known} is not supported, want one of {values}"
        )
    return values[values.index(found)]  # which is 4 where the file has 4.0


def wanted_group(settings: dict) -> int:
    found = settings.get("group_size", -1)
    if type(found) is not int or found != -1 and found not in range(32, 2**20 + 1, 32):
        raise ValueError(
            f"quantization_config: group_size {found!r:.60} is not supported, want -1 or a "
            f"multiple of 32"
        )
    return found


def wanted_block(settings: dict, key: str) -> list[int]:
    """The rows and inputs of a block."""
    found = settings.get(key)
    if (
        type(found) is not list
        or [type(n) for n in found] != [int, int]
        or min(found) < 1
        or found[1] % 32
    ):
        raise ValueError(
            f"quantization_config: {key} {found!r} is not supported, want [rows, inputs], inputs % "
            f"32 = 0"
        )
    return found


def gptq_scheme(settings: dict) -> Scheme:
    layout = wanted(
        settings, "checkpoint_format", ["gptq", "gptq_v2"], settings.get("format", "gptq")
    )
    bits = wanted(settings, "bits", [4, 8])
    return Scheme(
        layout,
        CODES[f"int{bits}"],
        wanted_group(settings),
        act_order=bool(settings.get("desc_act")),
    )


def gptq_rules(settings: dict) -> Rules:
    """gptqmodel's `dynamic`: "-:REGEX" leaves layers as they were, "+:REGEX" or "REGEX" has
    settings of their own."""
    rules = []
    for key, changes in (settings.get("dynamic") or {}).items():
        scheme = None if key.startswith("-:") else gptq_scheme(settings | changes)
        rules.append((re.sub(r"^[-+]:", "", key), scheme))
    return [*rules, (EVERY, gptq_scheme(settings))]


def awq_rules(settings: dict) -> Rules:
    """autoawq calls the layout `version`, gptqmodel `checkpoint_format` or `format`."""
    default = settings.get("checkpoint_format") or settings.get("format") or "gemm"
    wanted(settings, "version", ["gemm", "GEMM"], default)
    wanted(settings, "bits", [4])
    return [(EVERY, Scheme("awq", INT4, wanted_group(settings)))]


def fp8_rules(settings: dict) -> Rules:
    wanted(settings, "fmt", ["e4m3"], "e4m3")
    rows, group = TENSOR
    if settings.get("weight_block_size") is not None:
        rows, group = wanted_block(settings, "weight_block_size")
    return [*exceptions(settings), (EVERY, Scheme("fp8", E4M3, group, rows))]


def exceptions(settings: dict) -> Rules:
    """A name in modules_to_not_convert or ignored_layers stands for a module and all in it, or is
    the end of a name, as in transformers' should_convert_module()."""
    names = (settings.get("modules_to_not_convert") or []) + (settings.get("ignored_layers") or [])
    return [(rf"(?:{name})(?:(?<=\.)|\.|$)|.*{re.escape(name)}$", None) for name in names]


def mxfp4_rules(settings: dict) -> Rules:
    """Of gpt-oss, where experts alone have codes."""
    scheme = Scheme("experts", MXFP4, 32)
    return [
        *exceptions(settings),
        (r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj$", scheme),
    ]


COMPRESSED = {  # compressed-tensors' formats -> the types that they hold -> the layout
    "pack-quantized": {"int": "packed"},
    "int-quantized": {"int": "int"},
    "float-quantized": {"int": "int", "float": "fp8"},
    "naive-quantized": {"int": "int", "float": "fp8"},
    "mxfp4-pack-quantized": {"float": "mxfp4"},
    "nvfp4-pack-quantized": {"float": "nvfp4"},
}
GROUPS = dict(mxfp4=32, nvfp4=16)


def compressed_tensors_rules(settings: dict) -> Rules:
    """`ignore` comes first, then `targets`: names, "re:" and a regular expression, then "Linear",
    the class."""
    # A transform of the weights would have to be undone.
    for key, part, plain in (
        ("sparsity_config", "format", "dense"),
        ("transform_config", "config_groups", {}),
    ):
        found = settings.get(key) or {}
        wanted({key: found.get(part)}, key, [plain], plain)

    def pattern(target: str) -> str:
        if target == "Linear":
            return EVERY
        return target[3:] if target.startswith("re:") else f"{re.escape(target)}$"

    rules = [(target, None) for target in settings.get("ignore") or []]
    schemes = {}
    for group in settings["config_groups"].values():
        scheme = None
        if group.get("weights"):
            form = wanted(group, "format", list(COMPRESSED), settings.get("format"))
            scheme = compressed_tensors_scheme(group["weights"], COMPRESSED[form])
        schemes |= dict.fromkeys(group["targets"], scheme)
    rules += sorted(
        schemes.items(), key=lambda rule: (rule[0] == "Linear", "re:" in rule[0], rule[0])
    )
    return [(pattern(target), scheme) for target, scheme in rules]


def compressed_tensors_scheme(weights: dict, layouts: dict[str, str]) -> Scheme:
    """weights: the description of a config group's weights; layouts: one of COMPRESSED."""
    kind = wanted(weights, "type", list(layouts), "int")
    layout = layouts[kind]
    wanted(weights, "dynamic", [False], False)
    if kind == "float":
        codes = CODES[layout]
        wanted(weights, "num_bits", [codes.bits], codes.bits)
        wanted(weights, "symmetric", [True], True)
    else:
        bits = wanted(weights, "num_bits", [4, 8])
        codes = CODES[f"int{bits}"]
    if layout in GROUPS:
        group = wanted(weights, "group_size", [GROUPS[layout]], GROUPS[layout])
        return Scheme(layout, codes, group)
    zeros = not wanted(weights, "symmetric", [True, False], True)
    inferred = {None: "tensor", -1: "channel"}.get(weights.get("group_size"), "group")
    strategy = wanted(weights, "strategy", ["tensor", "channel", "group", "block"], inferred)
    rows, group = 1, -1
    if strategy == "tensor":
        rows, group = TENSOR
    if strategy == "group":
        group = wanted_group(weights)
    if strategy == "block":
        rows, group = wanted_block(weights, "block_structure")
    act_order = weights.get("actorder") in ("group", "dynamic", True)
    return Scheme(layout, codes, group, rows, zeros, act_order)


RULES = {
    "gptq": gptq_rules,
    "awq": awq_rules,
    "compressed-tensors": compressed_tensors_rules,
    "fp8": fp8_rules,
    "mxfp4": mxfp4_rules,
}


def read_settings(checkpoint: Checkpoint) -> dict:
    """What config.json's quantization_config says; {} where there is none. ValueError for a format
    that is not read.

    quant_method; rules; name, such as "int4", and bits: of the most exact scheme; activations:
    whether these or the KV cache are to be quantized, too."""
    settings = (
        checkpoint.hf.get("quantization_config") or checkpoint.hf.get("compression_config") or {}
    )
    if not settings:
        return {}
    with reading(f"{checkpoint.directory / 'config.json'}: quantization_config"):
        method = wanted(settings, "quant_method", list(RULES), settings.get("method"))
        rules = RULES[method](settings)
        codes = [scheme.codes for _, scheme in rules if scheme]
        if not codes:
            return {}
        most = max(codes, key=lambda codes: (codes.bits, codes is not E4M3))
        groups = (settings.get("config_groups") or {}).values()
        activations = (
            settings.get("activation_scheme")
            or settings.get("kv_cache_scheme")
            or any(group.get("input_activations") for group in groups)
        )
        return dict(
            quant_method=method,
            rules=rules,
            name=most.name,
            bits=most.bits,
            activations=activations,
        )


def shared_inputs(settings: dict, group: int = 1) -> int:
    """The inputs that ranks must not part: a group of each scheme. Blocks may be parted; 32 inputs
    are whole words.

    group: of weights that the files hold unquantized, and that are rounded, -1 for a row."""
    groups = [scheme.group for _, scheme in settings["rules"] if scheme and scheme.rows == 1]
    return math.lcm(32, group, *groups)  # lcm() takes -1 as 1


# Reading a checkpoint


def stem(name: str) -> str:
    """The name of the module whose weight this is."""
    return name.removesuffix(".weight")


@dataclass
class QuantizedReader:
    """Reads the quantized layers of a checkpoint, one by one, to the device.

    settings: read_settings()'s. shard: this rank's part of the model, a tp.Shard."""

    settings: dict
    device: torch.device
    dtype: torch.dtype
    shard: object = None

    def read_layers(self, model: Transformer, files: dict[str, Path]) -> None:
        """Puts the layers that the files hold quantized into the model. What was read is removed
        from files."""
        self.files = files
        self.table = hf_weights(self.shard.whole if self.shard else model.config)
        schemes = self.find_schemes()
        matrices = defaultdict(list)  # our layer -> Hugging Face's names of its matrices
        for name in schemes:
            matrices[stem(self.table[name].ours)].append(name)
        for ours, names in matrices.items():
            first = self.table[names[0]]
            if not any(schemes[name] for name in names):
                continue
            if first.experts:
                layer = self.read_experts(names[0], first, model.get_submodule(ours).bias)
            else:
                by_expert = groupby(names, key=lambda name: self.table[name].expert)
                layers = [
                    fuse([self.read_linear(name, schemes[name]) for name in own])
                    for _, own in by_expert
                ]
                layer = layers[0] if first.expert is None else join_experts(layers)
            model.set_submodule(ours, layer)
        for name in list(files):  # neither activations nor the cache are quantized here
            if re.search(
                r"\.(input|output|activation|q|k|v|kv)_((global_)?scale|zero_point)$", name
            ):
                del files[name]
                self.settings["activations"] = True
        if self.settings["activations"]:
            say_once(
                "nothing but weights is quantized, which is more exact than what the checkpoint "
                "asks"
            )

    def find_schemes(self) -> dict[str, Scheme | None]:
        """How each matrix is held. config.json decides. But GPTQ and AWQ files tell only by their
        tensors what they left out, and so do all files of the head."""
        matrices = [
            name
            for name, weight in self.table.items()
            if weight.quantized or weight.ours == "head.weight"
        ]
        rules = self.settings["rules"]
        first = first_matches([pattern for pattern, _ in rules], [stem(name) for name in matrices])
        found = {}
        for name, i in zip(matrices, first):
            scheme = None if i is None else rules[i][1]
            if scheme and (scheme.layout in GPTQ_AND_AWQ or self.table[name].ours == "head.weight"):
                scales = {f"{stem(name)}.weight_scale", f"{stem(name)}.weight_scale_inv"}
                if name in self.files and not scales & self.files.keys():
                    scheme = None
            found[name] = scheme
        return found

    def read(
        self, name: str, shapes: list[tuple], dtypes: str = FLOATS, part: tuple[slice, ...] = ()
    ) -> Tensor:
        """The tensor, on the device, of one of the shapes. ValueError for NaN and infinite
        numbers."""
        tensor = read_tensor(self.files, name, shapes, dtypes, part).to(self.device)
        if tensor.is_floating_point():
            vet_numbers(tensor, f"the tensor {name} has")
        return tensor

    def read_linear(self, name: str, scheme: Scheme | None) -> nn.Module:
        """The matrix `name`, or the rank's part of it, as a layer; plain where scheme is None."""
        weight, bias = self.table[name], None
        N, K = weight.shape
        part = self.shard.part(weight) if self.shard else (ALL, ALL)
        module = stem(name)
        if f"{module}.bias" in self.table:
            bias = self.read(f"{module}.bias", [(N,)], part=part[:1]).to(self.dtype)
        if scheme is None:
            return plain_layer(self.read(name, [(N, K)], part=part).to(self.dtype), bias)
        codes = scheme.codes
        if scheme.rows > 1 or codes == NVFP4:
            G = min(scheme.group, group_of(K, -1))  # a file's block may be larger than the matrix
        else:
            G = group_of(K, scheme.group)
        if scheme.layout in GPTQ_AND_AWQ and N * codes.bits % 32:
            raise ValueError(
                f"the layer {module} has {N} rows; want a multiple of {32 // codes.bits}"
            )
        rows, columns = part
        scattered = isinstance(
            rows, Tensor
        )  # of what Phi's files hold as one: taken once all are read
        layer = Layer(
            self, module, N, K, -(-K // G), G, ALL if scattered else rows, columns, scheme
        )
        found = READERS[scheme.layout](layer)
        if scattered:
            found = [tensor if tensor is None else tensor[rows] for tensor in found]
        qweight, scales, zeros = found
        vet_numbers(codes.decode_scales(scales), f"the scales of {module} have")
        if codes.zero:  # fp16 where that holds them
            half, scales = scales.half(), scales.float()
            if half.float().equal(scales):
                scales = half
        kept, g_idx = layer.groups()
        if zeros is not None:
            zeros = None if (zeros == codes.zero).all() else zeros[:, kept]
        return QuantizedLinear(
            qweight.contiguous().view(torch.int32), scales[:, kept], zeros, codes, bias, g_idx
        )

    def read_experts(self, name: str, weight: Weight, bias: nn.Parameter) -> QuantizedExperts:
        """gpt-oss's: `name`_blocks uint8 [X, N, C, 16], in a byte an even input's code and then an
        odd one's, and `name`_scales uint8 [X, N, C]. Rows of gate and up take turns. bias: what
        load_model() reads later."""
        X, K, N = weight.shape
        C = K // group_of(K, 32)
        part = ()
        if self.shard:
            _, columns, rows = self.shard.part(weight)
            part = ALL, rows, packed(columns, 32)
        blocks = self.read(f"{name}_blocks", [(X, N, C, 16)], "U8", part)
        scales = self.read(f"{name}_scales", [(X, N, C)], "U8", part)
        vet_numbers(MXFP4.decode_scales(scales), f"the scales of {name} have")
        if weight.rows == "pairs":
            blocks, scales = (
                of.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for of in (blocks, scales)
            )
        return QuantizedExperts(blocks.flatten(2).view(torch.int32), scales, None, MXFP4, bias)


def packed(codes: slice, per: int) -> slice:
    """Where these codes are, `per` side by side in an element."""
    return codes if codes == ALL else slice(codes.start // per, -(-codes.stop // per))


@dataclass(frozen=True)
class Layer:
    """One of Hugging Face's matrices in the files: its module's name, its shape, the rank's part of
    it, and how it is held."""

    reader: QuantizedReader
    name: str
    N: int
    K: int
    C: int
    G: int  # inputs of a group
    rows: slice
    columns: slice
    scheme: Scheme

    @property
    def bits(self) -> int:
        return self.scheme.codes.bits

    def read(self, kind: str, axes: str, dtypes: str = FLOATS) -> Tensor:
        """The rank's part of a tensor. axes: its shape, such as "C N/w"; /w: in words of codes, or
        bytes of them."""
        per = (8 if dtypes == "U8" else 32) // self.bits
        known = {
            "N": (self.N, self.rows),
            "K": (self.K, self.columns),
            "C": (self.C, ALL),
            "N/w": (-(-self.N // per), packed(self.rows, per)),
            "K/w": (self.K // per, packed(self.columns, per)),
        }
        shape, part = zip(*[known[axis] for axis in axes.split()])
        return self.reader.read(f"{self.name}.{kind}", [shape], dtypes, part)

    def read_scales(self, kind: str, dtypes: str = FLOATS) -> Tensor:
        """One number for each block of `rows` rows and G inputs -> [N, C] with the rank's rows.

        A tensor's one number may be [] or [1]; a number a row may be [N]."""
        rows = min(self.scheme.rows, self.N)
        shape = -(-self.N // rows), self.C
        shapes = [shape, (math.prod(shape),)]
        if shape == (1, 1):
            shapes.append(())
        scales = self.reader.read(f"{self.name}.{kind}", shapes, dtypes).view(shape)
        return scales.repeat_interleave(rows, 0)[: self.N][self.rows]

    def groups(self) -> tuple[Tensor | slice, Tensor | None]:
        """-> which groups' scales are kept, and the inputs' groups g_idx [K]: None where groups are
        side by side.

        A block may end early, at K or where a rank's columns begin or end. Then it becomes several
        groups of one size: K = 256, G = 128, and a rank with columns 64 to 255 has groups of 64,
        with the scales 0, 1, 1. ValueError for a g_idx that does not name each group K / C times."""
        K, C = self.K, self.C
        consecutive = groups = torch.arange(K, device=self.reader.device) // self.G
        kind = "g_idx" if self.scheme.layout.startswith("gptq") else "weight_g_idx"
        name = f"{self.name}.{kind}"
        if name in self.reader.files or self.scheme.act_order:
            groups = self.reader.read(name, [(K,)], "I32").long()
            if not groups.sort().values.equal(consecutive):
                raise ValueError(
                    f"{name}: want each of {C} groups {K // C} times; config.json is of another "
                    f"model"
                )
        own = groups[self.columns]
        if not own.equal(consecutive[self.columns]):
            return ALL, own
        step = len(own)
        if C > 1:
            step = math.gcd(self.G, self.columns.start or 0, step)
        return own[::step], None


# A reader gives a layer's qweight, the bytes of pack()'s [N, K * bits / 32], scales [N, C], and
# zeros [N, C] or None, with the rank's rows, and of qweight its columns.


def read_gptq(layer: Layer):
    """qweight int32 [K * bits / 32, N], words along K; qzeros [C, N * bits / 32], words along N;
    scales [C, N]."""
    qweight = layer.read("qweight", "K/w N", "I32").T
    zeros = layer.read("qzeros", "C N/w", "I32")
    if layer.scheme.layout == "gptq":
        # The first version stores zero - 1, taken from whole words: a zero of 0 borrows from its
        # neighbour. Added to whole words, the borrow comes back.
        zeros = zeros + {4: 0x11111111, 8: 0x01010101}[layer.bits]
    return qweight, layer.read("scales", "C N").T, unpack(zeros, layer.bits).T


def read_awq(layer: Layer):
    """The gemm version: qweight int32 [K, N / 8] and qzeros [C, N / 8], words along N; scales [C,
    N]."""

    def codes(kind: str, axes: str) -> Tensor:
        words = layer.read(kind, axes, "I32")
        return unpack(words, 4).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1).T

    return (
        pack(codes("qweight", "K N/w"), 4),
        layer.read("scales", "C N").T,
        codes("qzeros", "C N/w"),
    )


def read_packed(layer: Layer):
    """weight_packed int32 [N, K * bits / 32], words along K; weight_zero_point [N * bits / 32, C],
    words along N; weight_scale [N, C]; weight_shape, which is [N, K]. Codes and zero points are
    stored plus 2 ** (bits - 1)."""
    shape = layer.reader.read(f"{layer.name}.weight_shape", [(2,)], "I64 I32").tolist()
    if shape != [layer.N, layer.K]:
        raise ValueError(
            f"{layer.name}.weight_shape says {shape}, want {[layer.N, layer.K]}: config.json is of "
            "another model"
        )
    qweight, zeros = layer.read("weight_packed", "N K/w", "I32"), None
    if layer.scheme.zeros:
        words = layer.read("weight_zero_point", "N/w C", "I32")
        zeros = unpack(words.T, layer.bits).T[: len(qweight)]
    return qweight, layer.read_scales("weight_scale"), zeros


def read_int(layer: Layer):
    """weight int8 [N, K], weight_zero_point int8 and weight_scale, as read_scales() says."""
    bits, middle, zeros = layer.bits, layer.scheme.codes.zero, None
    codes = layer.read("weight", "N K", "I8").view(torch.uint8) + middle
    if (codes > 2**bits - 1).any():
        raise ValueError(
            f"the tensor {layer.name}.weight has numbers of more than {bits} bits; config.json is "
            f"of "
            "another model"
        )
    if layer.scheme.zeros:
        zeros = layer.read_scales("weight_zero_point", "I8").to(torch.int16) + middle
    return pack(codes, bits), layer.read_scales("weight_scale"), zeros


def read_fp8(layer: Layer):
    """weight float8_e4m3fn [N, K]; weight_scale or, of fp8, weight_scale_inv, which multiplies too.
    See read_scales()."""
    inverse = f"{layer.name}.weight_scale_inv" in layer.reader.files
    scales = layer.read_scales("weight_scale_inv" if inverse else "weight_scale")
    return layer.read("weight", "N K", "F8_E4M3"), scales.float(), None


def read_mxfp4(layer: Layer):
    """weight_packed uint8 [N, K / 2], in a byte an even input's code and then an odd one's;
    weight_scale uint8 [N, C], e8m0."""
    return layer.read("weight_packed", "N K/w", "U8"), layer.read_scales("weight_scale", "U8"), None


def read_nvfp4(layer: Layer):
    """As read_mxfp4(), but weight_scale is float8_e4m3fn, and is divided by the one number
    weight_global_scale."""
    scales = layer.read_scales("weight_scale", "F8_E4M3").float()
    whole = layer.reader.read(f"{layer.name}.weight_global_scale", [(1,), ()]).float()
    return layer.read("weight_packed", "N K/w", "U8"), scales / whole, None


READERS = dict(
    gptq=read_gptq,
    gptq_v2=read_gptq,
    awq=read_awq,
    packed=read_packed,
    int=read_int,
    fp8=read_fp8,
    mxfp4=read_mxfp4,
    nvfp4=read_nvfp4,
)


# Writing a checkpoint


def gptq_config(bits: int, group_size: int, sym: bool, act_order: bool, head: bool) -> dict:
    """quantization_config of a GPTQ checkpoint.

    gptqmodel 7.7 reads other programs' asymmetric weights as gptq_v2 alone. Symmetric ones stay
    gptq, which older programs read too."""
    return dict(
        bits=bits,
        group_size=group_size,
        sym=sym,
        desc_act=act_order,
        lm_head=head,
        quant_method="gptq",
        checkpoint_format="gptq" if sym else "gptq_v2",
    )


def compressed_tensors_config(
    bits: int, group_size: int, sym: bool, act_order: bool, head: bool
) -> dict:
    """quantization_config of a compressed-tensors checkpoint, pack-quantized. ValueError for
    act-order, whose g_idx the package no longer reads."""
    if act_order:
        raise ValueError(
            "--act-order: compressed-tensors reads it no more; leave it out, or take --format gptq"
        )
    strategy = "channel" if group_size == -1 else "group"
    weights = dict(
        num_bits=bits,
        type="int",
        symmetric=sym,
        dynamic=False,
        strategy=strategy,
        group_size=group_size,
    )
    groups = dict(group_0=dict(targets=["Linear"], weights=weights))
    return dict(
        quant_method="compressed-tensors",
        format="pack-quantized",
        quantization_status="compressed",
        ignore=[] if head else ["lm_head"],
        config_groups=groups,
    )


CONFIGS = {"gptq": gptq_config, "compressed-tensors": compressed_tensors_config}


def gptq_tensors(layer: QuantizedLinear, rows: slice, config: dict) -> dict[str, Tensor]:
    """The tensors of some rows of a layer, as read_gptq() describes them."""
    stored = zeros_of(layer)[rows] - int(config["checkpoint_format"] == "gptq")
    return dict(
        qweight=layer.qweight[rows].T,
        qzeros=pack(stored.T, layer.codes.bits),
        scales=layer.scales[rows].T,
        g_idx=layer.groups().int(),
    )


def packed_tensors(layer: QuantizedLinear, rows: slice, config: dict) -> dict[str, Tensor]:
    """The tensors of some rows of a layer, as read_packed() describes them."""
    qweight = layer.qweight[rows]
    tensors = dict(
        weight_packed=qweight,
        weight_scale=layer.scales[rows],
        weight_shape=torch.tensor([len(qweight), layer.in_features]),
    )
    if layer.zeros is not None:
        tensors["weight_zero_point"] = pack(layer.zeros[rows].T, layer.codes.bits).T
    return tensors


TENSORS = {"gptq": gptq_tensors, "compressed-tensors": packed_tensors}


def quantized_tensors(
    model: Transformer, source: Checkpoint, config: dict
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint: quantized layers as config says, the others as source has
    them."""
    files = source.files()
    for name, weight in source.weights.items():
        layer = model.get_submodule(weight.ours.rpartition(".")[0])
        if len(weight.shape) == 1 or not isinstance(layer, QuantizedLinear):
            yield name, read_tensor(files, name, [weight.shape])
            continue
        if weight.expert is not None:
            layer = layer.expert(weight.expert)
        rows = slice(weight.row, weight.row + weight.shape[0])
        for kind, tensor in TENSORS[config["quant_method"]](layer, rows, config).items():
            yield f"{stem(name)}.{kind}", tensor


def write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Writes safetensors files of at most SHARD_BYTES, and an index if there are several. The host
    holds what is not quantized, and the codes of one file at a time."""
    from huggingface_hub import split_torch_state_dict_into_shards

    held = dict(tensors)
    sizes = {
        name: tensor.to("meta") for name, tensor in held.items()
    }  # what shares memory is not split otherwise
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        path = directory / file
        with reading(path):  # a full disk raises an exception of its own
            save_file(
                {name: held[name].contiguous().cpu() for name in names},
                path,
                metadata={"format": "pt"},
            )
            path.chmod(0o644)  # safetensors lets its owner alone read it
    if split.is_sharded:
        write_json(
            directory / INDEX, dict(metadata=split.metadata, weight_map=split.tensor_to_filename)
        )


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_checkpoint(
    model: Transformer, source: Checkpoint, directory: Path, quantization_config: dict
) -> None:
    write_shards(quantized_tensors(model, source, quantization_config), directory)
    for path in source.directory.iterdir():  # the tokenizer's files, the chat template and the like
        copied = (
            path.suffix in (".json", ".model", ".jinja", ".txt") and ".index" not in path.suffixes
        )
        # Nothing that a link takes from elsewhere, nor what is no such file by its size.
        if copied and path.is_file() and is_inside(path) and path.stat().st_size <= MOST_TOKENIZER:
            shutil.copyfile(path, directory / path.name)
    routers = [stem(name) for name, weight in source.weights.items() if "router" in weight.ours]
    if "ignore" in quantization_config:  # to other readers they are linear layers like others
        quantization_config = quantization_config | dict(
            ignore=quantization_config["ignore"] + routers
        )
    hf = source.hf | dict(quantization_config=quantization_config)
    if "text_config" in hf:  # of a model that also sees: what is written is its text part
        hf = {
            key: value
            for key, value in hf.items()
            if key not in ("text_config", "vision_config", "architectures")
        }
    write_json(directory / "config.json", hf)

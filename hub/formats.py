"""
Quantized checkpoints: the Hub's formats, and how they are read. write.py writes two of them.

    quant_method         what is read
    gptq                 4 and 8 bits, both formats of zero points, act-order, dynamic
    awq                  4 bits, version gemm
    compressed-tensors   pack-, int-, float- and naive-quantized: 4 and 8 bits, FP8 e4m3,
                         mxfp4- and nvfp4-pack-quantized
    fp8                  e4m3 with a scale a block or a tensor
    mxfp4                gpt-oss's experts

A weight is (decode(q) - zero) * scale: see quantize.py. The layouts of the files are in the
docstrings of the functions in READERS. They follow the packages that define them: gptqmodel 7.7,
autoawq 0.2.9, compressed-tensors 0.20, transformers 5.23.

A format of your own is an entry of RULES, which makes schemes of config.json's quantization_config,
and a function in READERS, if its layout is new. Int8 codes with a scale a row, quant_method
"rows8", are three places:

    # hub/formats.py, below: RULES = {
    "rows8": lambda settings: [(EVERY, Scheme("rows8", CODES["int8"]))],

    # hub/formats.py, above: READERS = {
    def read_rows8(matrix: Matrix):
        # The file has weight int8 [N, K] and scale [N].
        N, K = matrix.N, matrix.K
        q = matrix.read("weight", (N, K), "I8").view(torch.uint8) + 128
        return pack(q, 8), matrix.read("scale", (N,))[:, None], None

    # hub/formats.py, below: READERS = {
    "rows8": read_rows8,

A reader knows nothing of ranks: it writes the shapes of whole tensors, in which N and K are Axis,
and read() gives it the rank's part of them. Why it does not read whole matrices, of which tp.py
could slice the layers: AWQ's words and int8's codes are put into our order by arithmetic, and each
rank would do all of it. On one CPU thread, of a layer of Llama-3-70B in AWQ, that is 30 s for the
whole and 7.3 s for a quarter; in int8 12.4 s and 3.1 s.

Which weights can be quantized stands in the table of weights: see checkpoint.Weight.

What is read, and what it means:

- quantization_config comes before compression_config, its older name.
- Rules are for a module's name in the files, and for transformers' name of it. Of models that also
  see these are language_model.model.layers.0 and model.language_model.layers.0; the lists of fp8
  may have either, as in transformers' FineGrainedFP8HfQuantizer. Patterns match from the
  beginning (re.match), as in compressed-tensors' match_name().
- compressed-tensors: `ignore` comes before `targets`; of these names before "re:" and a regular
  expression, and that before "Linear", as in its match_targets().
- GPTQ and AWQ: where a file has a layer's plain weight, it was left out, whatever the rules say; so
  with the head, with quantize.LEFT_OUT and with all experts in one tensor in all formats.
- What --quantize leaves out, quantize.LEFT_OUT, is made plain where a file has codes of it.
- Schemes and scales of activations and of the KV cache are read past, and a line says so. Where
  nothing else has a scheme, the model is the plain one.

Shapes: N outputs, K inputs, C groups of a row (K / G).
"""

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from hub.checkpoint import (
    FLOATS,
    WHOLE_AXIS,
    Checkpoint,
    Part,
    Place,
    Weight,
    hf_weights,
    load_model,
    part_of,
    read_tensor,
    reading,
    take,
)
from hub.families import value_of
from hub.vet import free_memory
from model import DeltaCache, KVCache, Transformer
from quantize import (
    CODES,
    DEFAULT_GROUP,
    E4M3,
    INT4,
    LEFT_OUT,
    MXFP4,
    NVFP4,
    Codes,
    QuantizedExperts,
    QuantizedLinear,
    alike,
    default_group,
    from_numbers,
    group_of,
    in_half,
    join_experts,
    merge,
    pack,
    plain_layer,
    replace_layers,
    round_head,
    round_model,
    say_once,
    unpack,
)

# Where AWQ puts the first, the second ... of the eight codes of a word.
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
# Names of scales of activations and of the KV cache, which are not quantized here.
OTHER_SCALES = re.compile(r"\.(input|output|activation|q|k|v|kv)_((global_)?scale|zero_point)$")
GPTQ_AND_AWQ = "gptq", "gptq_v2", "awq"  # layouts


def find_group(weights: dict[str, Weight], quantize: str | None, group_size: int | None) -> int:
    """The group size of --quantize and --group-size, for a model with these hf_weights()."""
    if group_size is not None:
        return group_size
    return default_group(quantize, (of.inputs for of in weights.values() if of.quantized))


def say_group(quantize: str, group: int) -> None:
    """For one that find_group() has chosen; a scale a row needs no word."""
    if group != -1:
        print(f"quantize={quantize}: groups of {group}, {DEFAULT_GROUP}", file=sys.stderr)


def check_quantize(
    checkpoint: Checkpoint, settings: dict, quantize: str | None, group_size: int | None
) -> None:
    """ValueError where --quantize and --group-size do not suit the checkpoint. settings:
    read_settings()'s."""
    if not quantize:
        return
    # Of gpt-oss what has no codes is rounded.
    if settings and settings.get("quant_method") != "mxfp4":
        raise ValueError(
            f"quantize={quantize}: {checkpoint.directory} is quantized already; leave the option "
            f"out"
        )
    group = find_group(checkpoint.weights, quantize, group_size)
    for weight in checkpoint.weights.values():
        if weight.quantized:
            group_of(weight.inputs, group)


def check_draft_quantize(checkpoint: Checkpoint, quantize: str) -> None:
    """ValueError for a draft that is quantized already."""
    if bits_of(checkpoint):
        raise ValueError(
            f"draft_quantize={quantize}: the draft in {checkpoint.directory} is quantized already; "
            "leave the option out"
        )


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
    settings, more = read_settings(checkpoint), more_than_weights(checkpoint)
    rounded = find_group(checkpoint.weights, quantize, group_size)
    group = shared_inputs(settings, rounded) if settings else rounded
    shard = None
    if split:
        shard = split(checkpoint.config, group, outputs=checkpoint.counted().vocab_size)
    reader = QuantizedReader(checkpoint, settings, device, dtype, shard) if settings else None
    scales = []

    def read_layers(model: Transformer, files: dict[str, Place]) -> None:
        if reader:
            reader.read_layers(model, files)
        scales.extend(name for name in files if OTHER_SCALES.search(name))
        for name in scales:
            del files[name]

    model = load_model(checkpoint, device, dtype, progress, read_layers, shard)
    if scales or more:
        say_once(
            "nothing but weights is quantized, which is more exact than what the checkpoint asks"
        )
    if quantize or quantize_head:
        check_finite(model)
    if quantize:
        if progress and group_size is None:
            say_group(quantize, rounded)
        round_model(model, quantize, rounded, shard=shard)
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


def unpack_quantized(
    model: Transformer | None,
    rows: int = 0,
    length: int = 0,
    quiet: bool = False,
    ranks: int = 1,
) -> None:
    """Puts plain layers with the same weights in the place of quantized ones, if memory allows and
    leaves room for caches of so many rows of `length` tokens. Eager code dequantizes a quantized
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
    cache = rows * length * KVCache.bytes_per_token(model.config, weight.dtype)
    cache += rows * DeltaCache.bytes_per_row(model.config, weight.dtype)
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


def fuse(linears: list[nn.Module]) -> nn.Module:
    """One layer of q, k and v, or of gate and up, where all are quantized with the same codes and
    groups."""
    if alike(linears) and all(linear.groups().equal(linears[0].groups()) for linear in linears):
        return QuantizedLinear(*merge(linears, torch.cat), linears[0].g_idx)
    return SeparateLinears(linears)


def unpacked(layer: nn.Module, dtype: torch.dtype) -> nn.Linear:
    """A linear layer without codes, of one of any kind without a bias."""
    weights = [
        linear.dequantize(dtype) if isinstance(linear, QuantizedLinear) else linear.weight
        for linear in (layer if isinstance(layer, SeparateLinears) else [layer])
    ]
    return plain_layer(torch.cat(weights), None)


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


# The first rule whose pattern, a regular expression, matches the beginning of one of a layer's
# names says how the layer is held: the file's name, and transformers'. None: unquantized.
Rules = list[tuple[str, Scheme | None]]
EVERY = ""
# Rows and inputs of a block that is the whole matrix, whatever its size.
TENSOR = sys.maxsize, sys.maxsize
# Parts of names -> what people call these formats.
OTHERS = {
    "mxfp4": "MXFP4",
    "mxfp6": "MXFP6",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "-24": "2:4 sparse",
    "sparse": "sparse",
    "hqq": "HQQ",
    "gguf": "GGUF",
}


def module_name(name: str) -> str:
    """How transformers calls a module of a model that also sees, whose files and lists of modules
    may have older names: language_model.model.X, language_model.lm_head."""
    name = re.sub(r"^language_model\.(model\.)?", "model.language_model.", name)
    return name.removeprefix("model.language_model.") if name.endswith(".lm_head") else name


def wanted(settings: dict, key: str, values: list, default=None):
    """settings[key], which must be one of the values; null is as if it were missing. ValueError
    names what was found and what is read."""
    found = settings.get(key)
    if found is None:
        found = default
    if found not in values:
        told = f"{found} {settings.get('quant_algo')}".lower()  # modelopt's own key
        known = next((f" ({name})" for part, name in OTHERS.items() if part in told), "")
        raise ValueError(f"{key} {found!r}{known} is not supported, want one of {values}")
    return values[values.index(found)]  # 4 where the file has 4.0


def wanted_group(settings: dict) -> int:
    found = settings.get("group_size", -1)
    if type(found) is not int or found != -1 and found not in range(32, 2**20 + 1, 32):
        raise ValueError(f"group_size {found!r:.60} is not supported, want -1 or a multiple of 32")
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
        raise ValueError(f"{key} {found!r} is not supported, want [rows, inputs], inputs % 32 = 0")
    return found


def whole_numbers() -> dict[int, Codes]:
    """Bits -> the codes that are whole numbers."""
    return {of.bits: of for of in CODES.values() if of.decode is from_numbers}


def gptq_scheme(settings: dict) -> Scheme:
    layout = wanted(
        settings, "checkpoint_format", ["gptq", "gptq_v2"], settings.get("format", "gptq")
    )
    numbers = whole_numbers()
    return Scheme(
        layout,
        numbers[wanted(settings, "bits", [*numbers])],
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
    names += [module_name(name) for name in names]
    return [(rf"(?:{name})(?:(?<=\.)|\.|$)|.*{re.escape(name)}$", None) for name in names]


def mxfp4_rules(settings: dict) -> Rules:
    """Of gpt-oss, where experts alone have codes."""
    scheme = Scheme("experts", MXFP4, 32)
    return [
        *exceptions(settings),
        (r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj$", scheme),
    ]


# compressed-tensors' formats -> the types that they hold -> the layout.
COMPRESSED = {
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
    for group in (settings.get("config_groups") or {}).values():
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
        numbers = whole_numbers()
        codes = numbers[wanted(weights, "num_bits", [*numbers])]
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


def written_settings(checkpoint: Checkpoint) -> dict:
    with reading(checkpoint.directory / "config.json"):
        keys = "quantization_config", "compression_config"
        return next(filter(None, (value_of(checkpoint.hf, key, dict, {}) for key in keys)), {})


def more_than_weights(checkpoint: Checkpoint) -> bool:
    """Whether activations or the KV cache are to be quantized."""
    settings = written_settings(checkpoint)
    with reading(f"{checkpoint.directory / 'config.json'}: quantization_config"):
        groups = (settings.get("config_groups") or {}).values()
        asked = [group.get("input_activations") for group in groups]
    return any([settings.get("activation_scheme"), settings.get("kv_cache_scheme"), *asked])


def read_settings(checkpoint: Checkpoint) -> dict:
    """What config.json's quantization_config says; {} where there is none, or it wants no weights
    quantized. ValueError for a format that is not read.

    quant_method; rules, their patterns compiled; name, such as "int4": of the most exact scheme."""
    settings = written_settings(checkpoint)
    if not settings:
        return {}
    with reading(f"{checkpoint.directory / 'config.json'}: quantization_config"):
        method = wanted(settings, "quant_method", list(RULES), settings.get("method"))
        rules = [(re.compile(pattern), scheme) for pattern, scheme in RULES[method](settings)]
        codes = [scheme.codes for _, scheme in rules if scheme]
        if not codes:
            return {}
        most = max(codes, key=lambda codes: (codes.bits, codes is not E4M3))
        return dict(quant_method=method, rules=rules, name=most.name)


def bits_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Hugging Face's name of each matrix that stays quantized -> the bits of a weight."""
    settings = read_settings(checkpoint)
    if not settings:
        return {}
    reader = QuantizedReader(checkpoint, settings, torch.device("cpu"), torch.float32)
    reader.files, reader.table = checkpoint.files(), checkpoint.weights
    return {
        name: scheme.codes.bits
        for name, scheme in reader.find_schemes().items()
        if scheme and not is_left_out(reader.table[name])
    }


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


def is_left_out(weight: Weight) -> bool:
    return stem(weight.ours).endswith(LEFT_OUT)


@dataclass(frozen=True)
class Axis:
    """The outputs or the inputs of a matrix in the files, and the part of them that is read: this
    rank's."""

    size: int
    part: Part = WHOLE_AXIS

    def packed(self, per: int) -> "Axis":
        """As elements of a tensor, each of which holds `per` of these."""
        ends = (own.indices(self.size)[:2] for own in self.part)
        part = tuple(slice(start // per, -(-stop // per)) for start, stop in ends)
        return Axis(-(-self.size // per), part)


@dataclass
class QuantizedReader:
    """Reads the quantized layers of a checkpoint, one by one, to the device.

    checkpoint: whose weights_of() names them. settings: read_settings()'s. shard: this rank's part
    of the model, a tp.Shard."""

    checkpoint: Checkpoint
    settings: dict
    device: torch.device
    dtype: torch.dtype
    shard: object = None

    def read_layers(self, model: Transformer, files: dict[str, Path]) -> None:
        """Puts the layers that the files hold quantized into the model. What was read is removed
        from files."""
        self.files = files
        self.table = self.checkpoint.weights
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
            if is_left_out(first):
                layer = unpacked(layer, self.dtype)
            model.set_submodule(ours, layer)

    def find_schemes(self) -> dict[str, Scheme | None]:
        """How each matrix of the table is held in the files. config.json decides. But GPTQ and AWQ files tell only by their
        tensors what they left out, and so do all files of the head, of LEFT_OUT and of all experts
        in one tensor: transformers has parameters there, which no rule for layers is about, and no
        layers that draft (told_by_tensors)."""
        matrices = [
            name
            for name, weight in self.table.items()
            if weight.quantized or weight.ours == "head.weight" or is_left_out(weight)
        ]
        stored = {  # a module's name in the files, which have other names of its tensors
            name.rpartition(".")[0]: place.name.rpartition(".")[0]
            for name, place in self.files.items()
        }
        found = {}
        for name in matrices:
            module = stem(name)
            held = stored.get(module, module)
            theirs = module_name(held) if "language_model." in held else module
            matching = (
                scheme
                for rule, scheme in self.settings["rules"]
                if rule.match(held) or rule.match(theirs)
            )
            scheme, weight = next(matching, None), self.table[name]
            told = weight.ours == "head.weight" or is_left_out(weight) or weight.experts
            told = told or self.checkpoint.told_by_tensors
            if scheme and (told or scheme.layout in GPTQ_AND_AWQ):
                scales = {f"{stem(name)}.weight_scale", f"{stem(name)}.weight_scale_inv"}
                if name in self.files and not scales & self.files.keys():
                    scheme = None
            found[name] = scheme
        return found

    def read(
        self,
        name: str,
        shape: tuple[int | Axis, ...],
        dtypes: str = FLOATS,
        other_shapes: tuple[tuple[int, ...], ...] = (),
    ) -> Tensor:
        """The rank's part of a tensor, on the device. ValueError for NaN and infinite numbers."""
        axes = [axis if isinstance(axis, Axis) else Axis(axis) for axis in shape]
        sizes = tuple(axis.size for axis in axes)
        tensor = read_tensor(self.files, name, [sizes, *other_shapes], dtypes)
        tensor = take(tensor, tuple(axis.part for axis in axes)).to(self.device)
        if tensor.is_floating_point():
            vet_numbers(tensor, f"the tensor {name} has")
        return tensor

    def axes(self, weight: Weight) -> list[Axis]:
        """Of the tensor that a file has of an unquantized weight."""
        # Rows in another order than ours are read whole, and so are few: see by_kind().
        whole = not self.shard or weight.by_head or is_left_out(weight)
        parts = [WHOLE_AXIS] * len(weight.shape) if whole else part_of(weight, self.shard)
        return [Axis(*axis) for axis in zip(weight.shape, parts)]

    def by_kind(self, layer: nn.Module, weight: Weight) -> nn.Module:
        """A layer whose rows are in the file's order, in ours, and this rank's of them."""
        rows = weight.by_kind(torch.arange(weight.shape[0], device=self.device))
        if self.shard:
            rows = take(rows, part_of(weight, self.shard)[:1])
        if not isinstance(layer, QuantizedLinear):
            return plain_layer(layer.weight[rows], None)
        zeros = None if layer.zeros is None else layer.zeros[rows]
        parts = layer.qweight[rows], layer.scales[rows], zeros
        return QuantizedLinear(*parts, layer.codes, None, layer.g_idx)

    def read_linear(self, name: str, scheme: Scheme | None) -> nn.Module:
        """The matrix `name`, or the rank's part of it, as a layer; plain where scheme is None."""
        weight = self.table[name]
        layer = self.read_matrix(name, scheme)
        return self.by_kind(layer, weight) if weight.by_head or is_left_out(weight) else layer

    def read_matrix(self, name: str, scheme: Scheme | None) -> nn.Module:
        """read_linear(), its rows in the file's order."""
        weight, bias, module = self.table[name], None, stem(name)
        N, K = self.axes(weight)
        if f"{module}.bias" in self.table:
            bias = self.read(f"{module}.bias", (N,)).to(self.dtype)
        if scheme is None:
            return plain_layer(self.read(name, (N, K)).to(self.dtype), bias)
        codes = scheme.codes
        if scheme.rows > 1 or codes == NVFP4:
            G = min(scheme.group, group_of(K.size, -1))  # a file's block may exceed the matrix
        else:
            G = group_of(K.size, scheme.group)
        if scheme.layout in GPTQ_AND_AWQ and N.size * codes.bits % 32:
            raise ValueError(
                f"the layer {module} has {N.size} rows; want a multiple of {32 // codes.bits}"
            )
        matrix = Matrix(self, module, N, K, G, scheme)
        qweight, scales, zeros = READERS[scheme.layout](matrix)
        vet_numbers(codes.decode_scales(scales), f"the scales of {module} have")
        if codes.zero:
            scales = in_half(scales)
        kept, g_idx = matrix.groups()
        if zeros is not None:
            zeros = None if (zeros == codes.zero).all() else zeros[:, kept]
        return QuantizedLinear(
            qweight.contiguous().view(torch.int32), scales[:, kept], zeros, codes, bias, g_idx
        )

    def read_experts(self, name: str, weight: Weight, bias: nn.Parameter) -> QuantizedExperts:
        """gpt-oss's: `name`_blocks uint8 [X, N, C, 16], in a byte an even input's code and then an
        odd one's, and `name`_scales uint8 [X, N, C]. Rows of gate and up take turns. bias: what
        load_model() reads later."""
        X, K, N = self.axes(weight)
        group_of(K.size, 32)
        C = K.packed(32)
        blocks = self.read(f"{name}_blocks", (X, N, C, 16), "U8")
        scales = self.read(f"{name}_scales", (X, N, C), "U8")
        vet_numbers(MXFP4.decode_scales(scales), f"the scales of {name} have")
        if weight.rows == "pairs":
            blocks, scales = (
                of.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for of in (blocks, scales)
            )
        return QuantizedExperts(blocks.flatten(2).view(torch.int32), scales, None, MXFP4, bias)


@dataclass(frozen=True)
class Matrix:
    """One of Hugging Face's matrices in the files: its module's name, its outputs N and inputs K,
    the inputs of a group, and how it is held."""

    reader: QuantizedReader
    name: str
    N: Axis
    K: Axis
    G: int
    scheme: Scheme

    @property
    def C(self) -> int:
        """Groups of a whole row; the last one may be smaller."""
        return -(-self.K.size // self.G)

    @property
    def bits(self) -> int:
        return self.scheme.codes.bits

    def read(self, kind: str, shape: tuple[int | Axis, ...], dtypes: str = FLOATS) -> Tensor:
        return self.reader.read(f"{self.name}.{kind}", shape, dtypes)

    def read_scales(self, kind: str, dtypes: str = FLOATS) -> Tensor:
        """One number for each block of `rows` rows and G inputs -> [N, C].

        A tensor's one number may be [] or [1]; a number a row may be [N]."""
        rows = min(self.scheme.rows, self.N.size)
        shape = -(-self.N.size // rows), self.C
        others = ((math.prod(shape),), ()) if shape == (1, 1) else ((math.prod(shape),),)
        scales = self.reader.read(f"{self.name}.{kind}", shape, dtypes, others).view(shape)
        return take(scales.repeat_interleave(rows, 0)[: self.N.size], (self.N.part,))

    def groups(self) -> tuple[Tensor | slice, Tensor | None]:
        """-> which groups' scales are kept, and the inputs' groups g_idx [K]: None where groups are
        side by side.

        A block may end early, at K or where a rank's inputs begin or end. Then it becomes several
        groups of one size: K = 256, G = 128, and a rank with inputs 64 to 255 has groups of 64,
        with the scales 0, 1, 1. ValueError for a g_idx that does not name each group G times."""
        K, own = self.K.size, (self.K.part,)
        consecutive = groups = torch.arange(K) // self.G
        kind = "g_idx" if self.scheme.layout.startswith("gptq") else "weight_g_idx"
        name = f"{self.name}.{kind}"
        if name in self.reader.files or self.scheme.act_order:
            groups = read_tensor(self.reader.files, name, [(K,)], "I32").long()
            if not groups.sort().values.equal(consecutive):
                raise ValueError(
                    f"{name}: want each of {self.C} groups {K // self.C} times; config.json is of "
                    "another model"
                )
        groups = take(groups, own)
        if not groups.equal(take(consecutive, own)):
            return slice(None), groups.to(self.reader.device)
        _, sizes = groups.unique_consecutive(return_counts=True)
        return groups[:: math.gcd(*sizes.tolist())], None


# A reader gives a matrix's qweight, the bytes of pack()'s [N, K * bits / 32], scales [N, C], and
# zeros [N, C] or None.


def read_gptq(matrix: Matrix):
    """qweight int32 [K * bits / 32, N], words along K; qzeros [C, N * bits / 32], words along N;
    scales [C, N]."""
    N, K, C, bits = matrix.N, matrix.K, matrix.C, matrix.bits
    qweight = matrix.read("qweight", (K.packed(32 // bits), N), "I32").T
    zeros = matrix.read("qzeros", (C, N.packed(32 // bits)), "I32")
    if matrix.scheme.layout == "gptq":
        # The first version stores zero - 1, taken from whole words: a zero of 0 borrows from its
        # neighbour. Added to whole words, the borrow comes back.
        zeros = zeros + pack(torch.ones(32 // bits), bits)
    return qweight, matrix.read("scales", (C, N)).T, unpack(zeros, bits).T


def read_awq(matrix: Matrix):
    """The gemm version: qweight int32 [K, N / 8] and qzeros [C, N / 8], words along N; scales [C,
    N]."""
    N, K, C = matrix.N, matrix.K, matrix.C

    def in_order(words: Tensor) -> Tensor:
        """[any, N / 8] -> [N, any]"""
        return unpack(words, 4).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1).T

    q = in_order(matrix.read("qweight", (K, N.packed(8)), "I32"))
    zeros = in_order(matrix.read("qzeros", (C, N.packed(8)), "I32"))
    return pack(q, 4), matrix.read("scales", (C, N)).T, zeros


def read_packed(matrix: Matrix):
    """weight_packed int32 [N, K * bits / 32], words along K; weight_zero_point [N * bits / 32, C],
    words along N; weight_scale [N, C]; weight_shape, which is [N, K]. Codes and zero points are
    stored plus 2 ** (bits - 1)."""
    N, K, C, per = matrix.N, matrix.K, matrix.C, 32 // matrix.bits
    shape = matrix.read("weight_shape", (2,), "I64 I32").tolist()
    if shape != [N.size, K.size]:
        raise ValueError(
            f"{matrix.name}.weight_shape says {shape}, want {[N.size, K.size]}: config.json is of "
            "another model"
        )
    qweight, zeros = matrix.read("weight_packed", (N, K.packed(per)), "I32"), None
    if matrix.scheme.zeros:
        words = matrix.read("weight_zero_point", (N.packed(per), C), "I32")
        zeros = unpack(words.T, matrix.bits).T[: len(qweight)]
    return qweight, matrix.read_scales("weight_scale"), zeros


def read_int(matrix: Matrix):
    """weight int8 [N, K], weight_zero_point int8 and weight_scale, as read_scales() says."""
    bits, middle, zeros = matrix.bits, matrix.scheme.codes.zero, None
    q = matrix.read("weight", (matrix.N, matrix.K), "I8").view(torch.uint8) + middle
    if (q > 2**bits - 1).any():
        raise ValueError(
            f"the tensor {matrix.name}.weight has numbers of more than {bits} bits; config.json is "
            f"of another model"
        )
    if matrix.scheme.zeros:
        zeros = matrix.read_scales("weight_zero_point", "I8").to(torch.int16) + middle
    return pack(q, bits), matrix.read_scales("weight_scale"), zeros


def read_fp8(matrix: Matrix):
    """weight float8_e4m3fn [N, K]; weight_scale or, of fp8, weight_scale_inv, which multiplies too.
    See read_scales()."""
    inverse = f"{matrix.name}.weight_scale_inv" in matrix.reader.files
    scales = matrix.read_scales("weight_scale_inv" if inverse else "weight_scale")
    return matrix.read("weight", (matrix.N, matrix.K), "F8_E4M3"), scales.float(), None


def read_mxfp4(matrix: Matrix):
    """weight_packed uint8 [N, K / 2], in a byte an even input's code and then an odd one's;
    weight_scale uint8 [N, C], e8m0."""
    qweight = matrix.read("weight_packed", (matrix.N, matrix.K.packed(2)), "U8")
    return qweight, matrix.read_scales("weight_scale", "U8"), None


def read_nvfp4(matrix: Matrix):
    """As read_mxfp4(), but weight_scale is float8_e4m3fn, and is divided by the one number
    weight_global_scale."""
    qweight = matrix.read("weight_packed", (matrix.N, matrix.K.packed(2)), "U8")
    scales = matrix.read_scales("weight_scale", "F8_E4M3").float()
    name = f"{matrix.name}.weight_global_scale"
    whole = matrix.reader.read(name, (1,), other_shapes=((),)).float()
    return qweight, scales / whole, None


READERS = {
    "gptq": read_gptq,
    "gptq_v2": read_gptq,
    "awq": read_awq,
    "packed": read_packed,
    "int": read_int,
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
    "nvfp4": read_nvfp4,
}

"""
Reads a checkpoint in Hugging Face layout: its files, and its weights by their names. families.py
knows what its config means, tokenizer.py its texts.

    checkpoint = Checkpoint(Path("checkpoints/tiny"))
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer(checkpoint)

Files are read plainly here: nothing is unpickled and no code of a checkpoint runs, but whoever
reads a directory of unknown origin calls vet.open_checkpoint(), which vets it first and gives a
tokenizer that takes typed special tokens as text. What a user can get wrong is a ValueError of one
line.

Shapes: as in model.py.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from hub.families import config_from_hf, text_settings
from model import Config, MoEConfig, Transformer

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = "BF16 F16 F32 F64"  # safetensors' names of types
VISION = "vision_tower.", "multi_modal_projector."  # of models that also see


class ValueError(ValueError):
    """A user's mistake: what was wrong, the limit and the remedy, in one line of at most 1,000
    characters.

    The message has keywords in backticks, "`top_k`=-1: want 0 or more". str() writes them as Python
    does, top_k=-1, and cli.errors.message_of() as the command line does, --top-k -1."""

    def __init__(self, message: str):
        self.message = message
        super().__init__(one_line(re.sub(r"`(\w+)`", r"\1", message)))


def one_line(text: str) -> str:
    """What a file holds may be part of the text, so control characters, which a terminal would
    obey, are escaped."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) <= 1000 else f"{line[:700]} ... {line[-295:]}"


class Checkpoint:
    """A directory, each JSON file of which is read once.

    An EAGLE head's, eagle.HeadCheckpoint, has its own make_model, settings(), weights_of() and
    counted()."""

    make_model = Transformer  # of its config, or of that of a rank's part

    def __init__(self, directory: Path):
        self.directory = directory
        self.hf = self.settings(json.loads((directory / "config.json").read_text("utf-8")))
        self.generation = self.read_json("generation_config.json")
        self.index = self.read_json(INDEX)
        self.config = config_from_hf(self.hf)

    settings = staticmethod(text_settings)  # what config.json says

    @cached_property
    def weights(self):
        return self.weights_of(self.config)

    def weights_of(self, config: Config):
        return hf_weights(config)

    def counted(self) -> Config:
        """The Config by which memory is counted and the output head shared. Of an EAGLE head: its
        vocabulary is what it may draft, and its embedding, as a rule the target's, does not
        count."""
        return self.config

    def read_json(self, name: str) -> dict:
        """{} where the file is not there."""
        path = self.directory / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def files(self) -> dict[str, "Place"]:
        """Where each tensor of the language model is. Of a model that also sees, the rest is left
        out."""
        open_shard.cache_clear()  # a file of this name may be another one by now
        paths = {
            name: self.directory / file
            for name, file in (self.index.get("weight_map") or {}).items()
        }
        if not self.index:
            whole = self.directory / WHOLE
            if not whole.exists():
                raise ValueError(
                    f"{self.directory}: no {WHOLE}, nor its index; *.bin and *.gguf are not read"
                )
            paths = dict.fromkeys(open_shard(whole).keys(), whole)
        if "vision_config" in self.hf:
            seeing = [name for name in paths if name.removeprefix("model.").startswith(VISION)]
            print(
                f"{self.directory}: text only: {len(seeing)} tensors of its vision part are left "
                f"out",
                file=sys.stderr,
            )
            for name in seeing:
                del paths[name]
        return {
            name.replace("language_model.", "", 1): Place(path, name)
            for name, path in paths.items()
        }


class Place(NamedTuple):
    """A tensor in a safetensors file: the name that it has there."""

    path: Path
    name: str


# Weights


class Weight(NamedTuple):
    """Where a tensor of Hugging Face's goes: into our parameter, from a row on. Llama-3-8B's
    k_proj.weight, behind the 4,096 rows of q_proj.weight: Weight("attn.wqkv.weight", 4096, (1024,
    4096), "kv", quantized=True).

    rows, columns: how ranks share our parameter's outputs, and its inputs: see part_of(). None:
    each rank has all of them. quantized: whether quantization replaces this
    matrix. norm: it is a norm's. expert: the index of the one whose tensor it is. experts: it holds
    all experts', as in gpt-oss:

        ours               the file's         rows
        [X, N, K]          [X, K, N]          None
        [X, 2F, K]         [X, K, 2F]         "pairs": the file has gate 0, up 0, gate 1, ..., we all gates first
        [X, 2F], a bias    [X, 2F]            "pairs"
    """

    ours: str
    row: int
    shape: tuple[int, ...]
    rows: str | None = None
    columns: str | None = None
    quantized: bool = False
    norm: bool = False
    expert: int | None = None
    experts: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """The view of our parameter that the tensor fills, once it has the view's shape."""
        if self.expert is not None:
            parameter = parameter[self.expert]
        if not self.experts:
            return parameter[self.row : self.row + self.shape[0]]
        if len(self.shape) == 3:
            parameter = parameter.mT  # [X, N, K] -> the file's [X, K, N]
        if self.rows == "pairs":
            # [..., 2F], all gates first -> [..., F, 2]
            parameter = parameter.unflatten(-1, (2, -1)).mT
        return parameter


def hf_weights(config: Config) -> dict[str, Weight]:
    """Hugging Face's name of each tensor -> its Weight: the one table of all names. Reading,
    quantizing and sharing among ranks go by it."""
    V, D = config.vocab_size, config.dim
    table = {
        "model.embed_tokens.weight": Weight("embed.weight", 0, (V, D)),
        "model.norm.weight": Weight("norm.weight", 0, (D,), norm=True),
    }
    if not config.tied:
        table["lm_head.weight"] = Weight("head.weight", 0, (V, D), "vocab")
    for i, layer in enumerate(config.layers):
        for name, weight in hf_layer(config, layer.moe).items():
            table[f"model.layers.{i}.{name}"] = weight._replace(ours=f"layers.{i}.{weight.ours}")
    return table


# A layer's tensors: Hugging Face's name, ours, what its rows and columns are (D and E: each rank
# has all of them), and what fields of Config must be, if it depends on them. Those that fill one of
# ours stand in the order of its rows.
LAYER = """
self_attn.q_proj.weight             attn.wqkv.weight       q,D        fused_files=False
self_attn.k_proj.weight             attn.wqkv.weight       kv,D       fused_files=False
self_attn.v_proj.weight             attn.wqkv.weight       kv,D       fused_files=False
self_attn.qkv_proj.weight           attn.wqkv.weight       qkv,D      fused_files=True
self_attn.q_proj.bias               attn.wqkv.bias         q          qkv_bias=True
self_attn.k_proj.bias               attn.wqkv.bias         kv         qkv_bias=True
self_attn.v_proj.bias               attn.wqkv.bias         kv         qkv_bias=True
self_attn.o_proj.weight             attn.wo.weight         D,q
self_attn.o_proj.bias               attn.wo.bias           D          o_bias=True
self_attn.sinks                     attn.sinks             heads      sinks=True
self_attn.q_norm.weight             attn.q_norm.weight     E          qk_norm=head
self_attn.k_norm.weight             attn.k_norm.weight     E          qk_norm=head
self_attn.q_norm.weight             attn.q_norm.weight     q          qk_norm=whole
self_attn.k_norm.weight             attn.k_norm.weight     kv         qk_norm=whole
input_layernorm.weight              attn_norm.weight       D          pre_norm=True
post_attention_layernorm.weight     ffn_norm.weight        D          pre_norm=True post_norm=False
pre_feedforward_layernorm.weight    ffn_norm.weight        D          pre_norm=True post_norm=True
post_attention_layernorm.weight     attn_post_norm.weight  D          post_norm=True
post_feedforward_layernorm.weight   ffn_post_norm.weight   D          post_norm=True
mlp.gate_proj.weight                ffn.w_gate_up.weight   ffn,D      fused_files=False
mlp.up_proj.weight                  ffn.w_gate_up.weight   ffn,D      fused_files=False
mlp.gate_up_proj.weight             ffn.w_gate_up.weight   gate_up,D  fused_files=True
mlp.down_proj.weight                ffn.w_down.weight      D,ffn
"""


@lru_cache
def hf_layer(config: Config, moe: MoEConfig | None) -> dict[str, Weight]:
    """hf_weights() of a layer, from LAYER."""
    E, F = config.head_dim, config.ffn_dim
    q, kv = config.n_head * E, config.n_kv_head * E
    sizes = dict(D=config.dim, E=E, heads=config.n_head, q=q, kv=kv, qkv=q + 2 * kv)
    sizes |= dict(ffn=F, gate_up=2 * F)
    table = {}
    for line in LAYER.strip().splitlines():
        name, ours, axes, *values = line.split()
        fields = [value.split("=") for value in values]
        there = all(str(getattr(config, field)) == value for field, value in fields)
        if there and not (moe and ours.startswith("ffn.")):
            axes = axes.split(",")
            shape = tuple(sizes[axis] for axis in axes)
            shared = [None if axis in ("D", "E") else axis for axis in axes]
            row = sum(weight.shape[0] for weight in table.values() if weight.ours == ours)
            is_matrix, is_norm = len(axes) == 2, "norm" in name
            table[name] = Weight(ours, row, shape, *shared, quantized=is_matrix, norm=is_norm)
    return table | hf_experts(config, moe) if moe else table


def hf_experts(config: Config, moe: MoEConfig) -> dict[str, Weight]:
    """hf_layer() of a mixture of experts."""
    D, F, X = config.dim, moe.ffn_dim, moe.n_expert
    part, router, *names = config.expert_files.split()
    gate_up = partial(Weight, "ffn.w_gate_up.weight", quantized=True)
    down = partial(Weight, "ffn.w_down.weight", 0, columns="expert", quantized=True)
    table = {f"{router}.weight": Weight("ffn.router.weight", 0, (X, D))}
    if names:
        gate_name, up_name, down_name = names
        for x in range(X):
            expert = f"experts.{x}"
            table |= {
                f"{expert}.{gate_name}.weight": gate_up(0, (F, D), "expert", expert=x),
                f"{expert}.{up_name}.weight": gate_up(F, (F, D), "expert", expert=x),
                f"{expert}.{down_name}.weight": down((D, F), expert=x),
            }
    else:  # gpt-oss's, all experts in one tensor
        table |= {
            f"{router}.bias": Weight("ffn.router.bias", 0, (X,)),
            "experts.gate_up_proj": gate_up(0, (X, D, 2 * F), "pairs", experts=True),
            "experts.gate_up_proj_bias": Weight(
                "ffn.w_gate_up.bias", 0, (X, 2 * F), "pairs", experts=True
            ),
            "experts.down_proj": down((X, F, D), experts=True),
            "experts.down_proj_bias": Weight("ffn.w_down.bias", 0, (X, D), experts=True),
        }
    return {f"{part}.{name}": weight for name, weight in table.items()}


Part = tuple[slice, ...]  # of an axis of a tensor: what lies in these slices, side by side
WHOLE_AXIS: Part = (slice(None),)


def part_of(weight: Weight, shard) -> tuple[Part, ...]:
    """What a rank reads of the file's tensor: of its rows and of its columns, or of all experts'
    [X, K, N]. shard: the rank's tp.Shard."""
    whole, shares = shard.whole, shard.shares

    def behind(n: int, share: slice) -> slice:
        return slice(n + share.start, n + share.stop)

    def part(axis: str | None) -> Part:
        if axis is None:
            return WHOLE_AXIS
        if axis == "qkv":  # Phi's files: q, k and v
            q, kv = (n * whole.head_dim for n in (whole.n_head, whole.n_kv_head))
            return shares["q"], behind(q, shares["kv"]), behind(q + kv, shares["kv"])
        if axis == "gate_up":  # Phi's: gate, then up
            return shares["ffn"], behind(whole.ffn_dim, shares["ffn"])
        if axis == "pairs":  # gpt-oss's: they take turns
            return (slice(2 * shares["expert"].start, 2 * shares["expert"].stop),)
        return (shares[axis],)

    rows, columns = part(weight.rows), part(weight.columns)
    if weight.experts:
        return (WHOLE_AXIS, columns, rows) if len(weight.shape) == 3 else (WHOLE_AXIS, rows)
    return rows, columns


def take(tensor: Tensor, parts: tuple[Part, ...]) -> Tensor:
    """The parts of a tensor along its axes. Of one slice an axis it is a view: of a tensor in a
    file, what lies beside it is not read."""
    for axis, part in enumerate(parts[: tensor.dim()]):
        if part != WHOLE_AXIS:
            before = (slice(None),) * axis
            found = [tensor[*before, own] for own in part]
            tensor = found[0] if len(found) == 1 else torch.cat(found, axis)
    return tensor


def count_parameters(config: Config) -> int:
    return sum(math.prod(weight.shape) for weight in hf_weights(config).values())


@lru_cache(maxsize=1)
def open_shard(path: Path):
    """A safetensors file, which stays open for its next tensor: with its header read anew for each
    of 740 tensors Llama-2-7B in 4 bits took 1.36 s to load in place of 0.95 (H200, the file in the
    page cache)."""
    return safe_open(path, framework="pt")


def read_tensor(
    files: dict[str, Place], name: str, shapes: list[tuple], dtypes: str = FLOATS
) -> Tensor:
    """The tensor as a view of its file: what is used of it is read then. ValueError if it is
    missing, or has another type or shape than one of these.

    Its name is removed from `files`: a name that is still there at the end has no place in the
    model."""
    if name not in files:
        raise ValueError(
            f"the tensor {name} is missing from the safetensors files: config.json is of another "
            f"model, or "
            "the weights are quantized (formats.load reads these)"
        )
    path, stored = files.pop(name)
    found = open_shard(path).get_slice(stored)
    dtype, shape = found.get_dtype(), tuple(found.get_shape())
    if dtype not in dtypes.split() or shape not in shapes:
        raise ValueError(
            f"{path}: {name} is {dtype} {list(shape)}, want {dtypes} {list(shapes[0])}"
        )
    return open_shard(path).get_tensor(stored)


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool = False,
    read_layers: Callable | None = None,
    shard=None,
) -> Transformer:
    """The model, ready for setup(). Its weights go tensor by tensor from the files to the device.

    read_layers(model, files): puts in layers that read their weights from files by themselves, such
    as quantized ones. shard: this rank's part of the model, a tp.Shard."""
    from tqdm import tqdm

    files = checkpoint.files()
    with torch.device("meta"):
        make = checkpoint.make_model
        model = shard.model(make) if shard else make(checkpoint.config)
    if read_layers:
        read_layers(model, files)
    table = checkpoint.weights_of(model.config)
    dtypes = {
        weight.ours: torch.float32 if weight.norm and model.config.norm_fp32 else dtype
        for weight in table.values()
    }
    parameters = {
        name: torch.empty_like(parameter, device=device, dtype=dtypes[name])
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name in dtypes  # not what read_layers() has put in
    }
    names = [name for name, weight in table.items() if weight.ours in parameters]
    names.sort(key=lambda name: str(files.get(name)))  # file by file
    for name in tqdm(names, "loading", delay=1, leave=False, disable=None if progress else True):
        whole, weight = checkpoint.weights[name], table[name]  # of all ranks, and of this one
        tensor = read_tensor(files, name, [whole.shape])
        if shard:
            tensor = take(tensor, part_of(whole, shard))
        if weight.norm:
            tensor = tensor.float() + model.config.norm_offset
        view = weight.of(parameters[weight.ours])
        view.copy_(tensor.reshape(view.shape))
    refuse_surplus(files, checkpoint)
    open_shard.cache_clear()
    model.load_state_dict(parameters, strict=False, assign=True)
    if model.config.tied:
        model.head.weight = model.embed.weight
    return model.eval()


def refuse_surplus(files: dict[str, Place], checkpoint: Checkpoint) -> None:
    """ValueError for a tensor that the model has no place for. Not wanted are rope's frequencies, a
    tied model's head, and biases of zeros."""
    sizes = [weight.shape[:1] for weight in checkpoint.weights.values()]
    for name, (path, _) in list(files.items()):
        unwanted = (
            name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and checkpoint.config.tied)
            or (name.endswith(".bias") and not read_tensor(files, name, sizes).any())
        )
        if not unwanted:
            raise ValueError(f"{path}: no place for tensor {name}; config.json is of another model")

"""
Reads a checkpoint in Hugging Face layout: its files, and its weights by their names. families.py
knows what its config means, tokenizer.py its texts.

    checkpoint = Checkpoint(Path("checkpoints/tiny"))
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer(checkpoint)

Nothing is unpickled, no code of a checkpoint runs, and no path leads out of its directory. What is
wrong with a file is a ValueError of one line that begins with the file's name: see reading().

What is read, and what it means (as in transformers 5.24, but where a line says otherwise):

- model.safetensors.index.json says which files there are; what is in a file, its own header says.
  With an index model.safetensors is opened only if the index names it; transformers takes it first.
- "model." may be missing from the names, and language_model. may stand in them.
- What the model has no place for is left out. A line names what is more than LEFTOVERS, layers
  behind the last that draft, keys and values of layers that read another's, a tied head, tensors without
  numbers and biases of zeros.
- A weight of the model that is missing is refused: transformers draws one, with a warning.
- Whether the output head is the embedding: see hub/__init__.py.

Shapes: as in model.py.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from fnmatch import fnmatch
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hub.families import EXPERTS, config_from_hf, text_settings, value_of
from model import Config, DeltaConfig, LatentConfig, LayerConfig, MoEConfig, Transformer

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = "BF16 F16 F32 F64"  # safetensors' names of types
VISION = (  # of models that also see
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "embed_vision.",
    "vision_embedder.",
    "vision_adapter.",
    "vision_projection.",
)
AUDIO = "audio_tower.", "embed_audio."  # of models that also hear
# What files have beside a model's weights: what rope and masks computed, and heads that draft.
LEFTOVERS = re.compile(
    r"(.*\.)?(rotary_emb\w*\.\w+|(self_)?attn\.bias|attention\.bias|masked_bias|position_ids)$"
    r"|(model\.)?mtp\."
)

MOST_JSON, MOST_TEXT = 2**24, 2**26  # bytes of a JSON file or a template, and of a text
LAYOUT = "a directory in Hugging Face layout: config.json, *.safetensors and the tokenizer's files"
PICKLE = "a pickle, which is never read, as it could run code"
CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "save_file({n: t.contiguous() for n, t in "
    "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
)
# What people have in the place of a checkpoint: like which names, what it is, and what to do.
OTHERS = {
    **dict.fromkeys(
        ("*.incomplete", ".cache/huggingface/download/*.incomplete"),
        "part of a download that broke off: fetch the checkpoint again",
    ),
    "adapter_config.json": "a LoRA adapter's: merge it into its model, and give that one's directory",
    "adapter_model.*": "a LoRA adapter: merge it into its model, and give that one's directory",
    "*.gguf": "a GGUF file, which is not read: take the repository that it was made from, with "
    "*.safetensors, and quantize='int4'",
    "model.pth": f"gpt-fast's, {PICKLE}: take the directory that it was made from, with "
    "*.safetensors",
    "*.bin": f"{PICKLE}: take a repository with *.safetensors or, if you trust this one, convert "
    f"it there: {CONVERT}",
    **dict.fromkeys(
        ("*.pt", "*.pth", "*.ckpt", "*.pkl"), f"{PICKLE}: take a repository with *.safetensors"
    ),
    "consolidated*.safetensors": "Mistral's own layout: take the repository's other files too, "
    "config.json and model*.safetensors",
    "model-*-of-*.safetensors": f"a part of the weights, without {INDEX}: fetch the checkpoint "
    "again",
}


# Files


@contextmanager
def reading(source: Path | str):
    """Turns whatever the content of a file makes anyone raise into a ValueError of one line that
    begins with the source."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        # The tokenizers library's PanicException is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        # An OSError's own words name the file once more.
        reason = getattr(error, "strerror", None) or error
        raise ValueError(one_line(f"{source}: {kind}{reason}")) from error


@contextmanager
def reading_text(source: Path | str):
    """reading() of a text, which is UTF-8."""
    with reading(source):
        try:
            yield
        except UnicodeDecodeError as error:
            raise ValueError(
                f"byte {error.start} is 0x{error.object[error.start]:02x}, no UTF-8: save it as "
                "UTF-8, as iconv -f latin1 -t utf-8 does"
            ) from error


def one_line(text: str) -> str:
    """At most 1,000 characters. What a file holds may be part of the text, so control characters,
    which a terminal would obey, are escaped."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) <= 1000 else f"{line[:700]} ... {line[-295:]}"


def is_inside(path: Path) -> bool:
    """Whether a file, its links followed, lies in its directory or, as in the Hub's cache, among
    the blobs beside."""
    home, target = path.parent.resolve(), path.resolve()
    caches = [parent.parent for parent in home.parents if parent.name == "snapshots"]
    in_blobs = any(target.is_relative_to(cache / "blobs") for cache in caches)
    return in_blobs or target.is_relative_to(home)


def is_file(path: Path, most: int | None = None, inside=True) -> bool:
    """Whether it is there. ValueError for more bytes than `most`, of what is read whole.

    inside: it is a checkpoint's JSON, template or tokenizer, which no link may take from elsewhere.
    Weights, without `most`, may be links, as they may lie on another disk."""
    if not path.exists():
        return False
    if inside and not path.is_file():
        raise ValueError(f"{path}: want a file")
    if most and inside and not is_inside(path):
        raise ValueError(
            f"{path}: a link to {path.resolve()}, out of its directory; copy the file itself there"
        )
    size = path.stat().st_size
    if most and size > most:
        raise ValueError(f"{path}: {size} bytes, want {most} at most")
    return True


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Line ends of any system become newlines."""
    is_file(path, MOST_TEXT, inside=False)
    with reading_text(path):
        text = read_bytes(path).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(path: Path) -> bytes:
    """ValueError for more than MOST_TEXT. The size of a pipe is not known before."""
    with path.open("rb") as file:
        found = file.read(MOST_TEXT + 1)
    if len(found) > MOST_TEXT:
        raise ValueError(f"more than {MOST_TEXT} bytes; give a part of them")
    return found


def read_json(path: Path) -> dict:
    """A JSON object; {} where the file is not there."""
    if not is_file(path, MOST_JSON):
        return {}
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"want a JSON object, found {type(content).__name__}")
        json.dumps(content, ensure_ascii=False).encode()  # raises for half of a character
        return content


class Checkpoint:
    """A directory, each JSON file of which is read once.

    An EAGLE head's, eagle.HeadCheckpoint, has its own make_model, settings(), weights_of() and
    counted()."""

    make_model = Transformer  # of its config, or of that of a rank's part
    # Whether a matrix's tensors alone say that it is not quantized, whatever config.json's rules
    # do.
    told_by_tensors = False
    told_seeing = False  # whether a line has said what is left out
    # Names in the file of a model without its head begin so; elsewhere "model." stands before.
    bare = "layers.", "embed_tokens.", "norm."

    def __init__(self, directory: Path):
        self.directory = directory
        path = directory / "config.json"
        hf = read_json(path)
        with reading(path):
            self.hf = self.settings(hf)
            self.config = config_from_hf(self.hf)
        self.generation = read_json(directory / "generation_config.json")
        self.index = read_json(directory / INDEX)
        if self.config.expert_files and self.has_fused_experts():
            self.config = replace(self.config, expert_files=self.config.expert_files[:2])
        if self.config.tied and self.has_own_head():
            print(
                f"{directory}: lm_head is another matrix than the embedding, though config.json, "
                "or its family, ties them: each is read",
                file=sys.stderr,
            )
            self.hf |= dict(tie_word_embeddings=False)
            self.config = replace(self.config, tied=False)

    settings = staticmethod(text_settings)  # what config.json says

    @cached_property
    def weights(self):
        return self.weights_of(self.config)

    def weights_of(self, config: Config):
        return hf_weights(config)

    def counted(self) -> Config:
        """The Config by which ranks share the draft and its output head. Of an EAGLE head: its
        vocabulary is what it may draft, and its embedding, as a rule the target's, does not
        count."""
        return self.config

    @cached_property
    def paths(self) -> dict[str, Path]:
        """The safetensors file of each tensor. As in transformers the index says which files there
        are, and each file what is in it. ValueError where one is not there, or not whole."""
        open_shard.cache_clear()  # a file of this name may be another one by now
        if self.index:
            with reading(self.directory / INDEX):
                files = value_of(self.index, "weight_map", dict)
                for name, file in files.items():
                    if not isinstance(file, str) or os.path.isabs(file) or ".." in Path(file).parts:
                        raise ValueError(
                            f"{name} is in {file!r:.60}: want a file inside of the directory"
                        )
        else:
            files = {"": WHOLE}
            if not (self.directory / WHOLE).exists():
                raise ValueError(f"{self.directory}: no {WHOLE}; {instead_of(self.directory)}")
        found = {}
        for file in sorted(set(files.values())):
            path = self.directory / file
            with reading(path):
                found |= dict.fromkeys(open_shard(path).keys(), path)
        return found

    def files(self) -> dict[str, "Place"]:
        """Where each tensor of the language model is. Of a model that also sees, the rest is left
        out."""
        paths = dict(self.paths)
        parts = [("vision", VISION), ("audio", AUDIO)]
        parts = [(part, names) for part, names in parts if f"{part}_config" in self.hf]
        if parts:
            left = [
                name
                for name in paths
                if any(name.removeprefix("model.").startswith(names) for _, names in parts)
            ]
            of = " and ".join(part for part, _ in parts)
            told = f"text only: {len(left)} tensors of its {of} part are left out"
            if not self.told_seeing:
                print(f"{self.directory}: {told}", file=sys.stderr)
            self.told_seeing = True
            for name in left:
                del paths[name]
        files = self.of_text(paths)
        if self.config.tied and EMBEDDING not in files and HEAD in files:
            files[EMBEDDING] = files.pop(HEAD)  # the one matrix, by its other name
        return files

    def has_weights(self) -> bool:
        return bool(self.index) or (self.directory / WHOLE).exists()

    def has_fused_experts(self) -> bool:
        """Whether a layer's experts are one tensor in the files: Qwen3.5 is published either
        way."""
        if not self.has_weights():
            return False
        # Layers that draft may have theirs the other way.
        own = [name for name in self.paths if not LEFTOVERS.match(name)]
        return any(name.endswith(".gate_up_proj") for name in own)

    def has_own_head(self) -> bool:
        """Whether the files hold an output head that is not the embedding: then it counts, whatever
        config.json says. A directory may lack its weights."""
        if not self.has_weights():
            return False
        files = self.of_text(self.paths)
        parts = [name for name in files if name.startswith("lm_head.") and name != "lm_head.bias"]
        if parts != [HEAD] or EMBEDDING not in files:
            return parts not in ([], [HEAD])  # true of a quantized head
        head, embedding = (tensor_at(files[name]) for name in (HEAD, EMBEDDING))
        return not torch.equal(head.to(embedding.dtype), embedding)

    def of_text(self, paths: dict[str, Path]) -> dict[str, "Place"]:
        """Tensors by their names in a model of the text part alone."""
        places = {}
        for stored, path in paths.items():
            name = stored.replace("language_model.", "", 1)
            places["model." * name.startswith(self.bare) + name] = Place(path, stored)
        return places


def instead_of(directory: Path) -> str:
    """What a directory has in the place of what is missing, and what to do."""
    for pattern, told in OTHERS.items():
        for path in sorted(directory.glob(pattern)):
            return f"{path.name} is {told}"
    return f"want {LAYOUT}; is the download complete?"


def what_is(file: str) -> str | None:
    """What a file of this name is, if it is known to be no checkpoint."""
    return next((told for like, told in OTHERS.items() if fnmatch(file.lower(), like)), None)


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
        [X, 2F, K]         [X, K, 2F]         "pairs"
        [X, 2F], a bias    [X, 2F]            "pairs"
        [X, N, K]          [X, N, K]          None, and not `transposed`
        [X, 2F, K]         [X, 2F, K]         "gate and up", and not `transposed`

    "pairs": the file has gate 0, up 0, gate 1, ..., we have all gates first.

    by_head: the file has, for each key head of a recurrent layer, so many rows of each kind, and we
    have all rows of the first kind first: (128, 128, 256, 256) of q, k, v and z in Qwen3-Next.
    fp32: our parameter is, whatever the model's dtype. heads: K and E of the attention that it is
    of.
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
    transposed: bool = True
    by_head: tuple[int, ...] = ()
    fp32: bool = False
    heads: tuple[int, int] | None = None

    @property
    def inputs(self) -> int:
        """K of a matrix [N, K], and of all experts' [X, K, N] or [X, N, K]."""
        return self.shape[2 if self.experts and not self.transposed else 1]

    def by_kind(self, tensor: Tensor) -> Tensor:
        """The file's tensor with its rows in our order."""
        if not self.by_head:
            return tensor
        kinds = tensor.unflatten(0, (-1, sum(self.by_head))).split(self.by_head, dim=1)
        return torch.cat([kind.flatten(0, 1) for kind in kinds])

    def of(self, parameter: Tensor) -> Tensor:
        """The view of our parameter that the tensor fills, once it has the view's shape."""
        if self.expert is not None:
            parameter = parameter[self.expert]
        if not self.experts:
            return parameter[self.row : self.row + self.shape[0]]
        if len(self.shape) == 3 and self.transposed:
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
        EMBEDDING: Weight("embed.weight", 0, (V, D)),
        "model.norm.weight": Weight("norm.weight", 0, (D,), norm=True),
    }
    if config.plain_last_norm:  # without norm_offset
        table["model.norm.weight"] = Weight("norm.weight", 0, (D,), fp32=config.norm_fp32)
    if not config.tied:
        table[HEAD] = Weight("head.weight", 0, (V, D), "vocab")
    if P := config.ple_dim:
        rows, width = config.ple_vocab_size, config.n_layer * P
        table |= {
            "model.embed_tokens_per_layer.weight": Weight("ple.table.weight", 0, (rows, width)),
            "model.per_layer_model_projection.weight": Weight("ple.project.weight", 0, (width, D)),
            "model.per_layer_projection_norm.weight": Weight("ple.norm.weight", 0, (P,), norm=True),
        }
    for i, layer in enumerate(config.layers):
        for name, weight in hf_layer(config, layer).items():
            table[f"model.layers.{i}.{name}"] = weight._replace(ours=f"layers.{i}.{weight.ours}")
    return table


def borrowing_weights(config: Config) -> dict[str, Weight]:
    """hf_weights() of a draft whose embedding and head are its target's, without "model."."""
    return {
        name.removeprefix("model."): weight
        for name, weight in hf_weights(config).items()
        if weight.ours not in ("embed.weight", "head.weight")
    }


@lru_cache
def hf_layer(config: Config, layer: LayerConfig) -> dict[str, Weight]:
    """hf_weights() of a layer."""
    D, F, P = config.dim, layer.ffn_dim or config.ffn_dim, config.ple_dim
    moe, delta, latent = layer.moe, layer.delta, layer.latent
    both = bool(moe and moe.beside_dense)
    table = {}

    def add(
        name: str,
        ours: str,
        shape: tuple[int, ...],
        rows: str | None = None,
        columns: str | None = None,
        **more,
    ):
        """Those that fill one of ours are added in the order of its rows."""
        row = sum(weight.shape[0] for weight in table.values() if weight.ours == ours)
        is_matrix = len(shape) == 2
        weight = Weight(ours, row, shape, rows, columns, is_matrix, norm="norm" in name)
        table[name] = weight._replace(**more)

    if delta:
        add_delta(config, delta, add)
    elif latent:
        add_latent(config, latent, add)
    else:
        add_attention(config, layer, add)

    # Theirs is named by its place: before the feed-forward part, or behind attention.
    before_ffn = "pre_feedforward" if config.post_norm else "post_attention"
    if config.pre_norm:
        add("input_layernorm.weight", "attn_norm.weight", (D,))
        ours = "ffn.dense_norm" if both else "ffn_norm"
        add(f"{before_ffn}_layernorm.weight", f"{ours}.weight", (D,))
    if config.post_norm:
        add("post_attention_layernorm.weight", "attn_post_norm.weight", (D,))
        add("post_feedforward_layernorm.weight", "ffn_post_norm.weight", (D,))
    if both:
        add("post_feedforward_layernorm_1.weight", "ffn.dense_post_norm.weight", (D,))
        add("pre_feedforward_layernorm_2.weight", "ffn.moe_norm.weight", (D,))
        add("post_feedforward_layernorm_2.weight", "ffn.moe_post_norm.weight", (D,))
    if P:
        add("per_layer_input_gate.weight", "ple.gate.weight", (P, D), quantized=False)
        add("per_layer_projection.weight", "ple.up.weight", (D, P), quantized=False)
        add("post_per_layer_input_norm.weight", "ple.norm.weight", (D,))
    if config.layer_scale:
        add("layer_scalar", "layer_scale", (1,))

    if moe and moe.shared_dim:
        F = moe.shared_dim
        shared = "mlp.shared_expert" if moe.shared_gate else "mlp.shared_experts"
        add(f"{shared}.gate_proj.weight", "ffn.shared.w_gate_up.weight", (F, D), "shared")
        add(f"{shared}.up_proj.weight", "ffn.shared.w_gate_up.weight", (F, D), "shared")
        add(f"{shared}.down_proj.weight", "ffn.shared.w_down.weight", (D, F), None, "shared")
    if moe and moe.shared_dim and moe.shared_gate:
        name = "mlp.shared_expert_gate.weight"
        add(name, "ffn.shared_gate.weight", (1, D), quantized=False)
    if moe and not both:
        return table | hf_experts(config, moe)
    dense = "ffn.dense" if both else "ffn"
    if config.fused_files:
        add("mlp.gate_up_proj.weight", f"{dense}.w_gate_up.weight", (2 * F, D), "gate_up")
    else:
        add("mlp.gate_proj.weight", f"{dense}.w_gate_up.weight", (F, D), "ffn")
        add("mlp.up_proj.weight", f"{dense}.w_gate_up.weight", (F, D), "ffn")
    add("mlp.down_proj.weight", f"{dense}.w_down.weight", (D, F), columns="ffn")
    return table | hf_experts(config, moe) if both else table


def add_attention(config: Config, layer: LayerConfig, add: Callable) -> None:
    """Adds attention's weights to hf_layer()."""
    D, (H, K, E) = config.dim, config.heads(layer)
    q, kv = H * E, K * E
    makes_k, makes_v = layer.kv_of is None, layer.kv_of is None and not layer.key_is_value
    add = partial(add, heads=(K, E))
    if config.fused_files:
        add("self_attn.qkv_proj.weight", "attn.wqkv.weight", (q + 2 * kv, D), "qkv")
    else:
        # With gates the file has each head's q, and then its gate.
        apart = config.attention_gate and config.gate_apart
        by_head = config.attention_gate and not apart
        q_rows = ((2 * q, D), "q and gate") if by_head else ((q, D), "q")
        add("self_attn.q_proj.weight", "attn.wqkv.weight", *q_rows)
        if makes_k:
            add("self_attn.k_proj.weight", "attn.wqkv.weight", (kv, D), "kv")
        if makes_v:
            add("self_attn.v_proj.weight", "attn.wqkv.weight", (kv, D), "kv")
        if apart:
            add("self_attn.gate_proj.weight", "attn.wqkv.weight", (q, D), "q")
    if config.qkv_bias:
        add("self_attn.q_proj.bias", "attn.wqkv.bias", (q,), "q")
        add("self_attn.k_proj.bias", "attn.wqkv.bias", (kv,), "kv")
        add("self_attn.v_proj.bias", "attn.wqkv.bias", (kv,), "kv")
    add("self_attn.o_proj.weight", "attn.wo.weight", (D, q), columns="q")
    if config.o_bias:
        add("self_attn.o_proj.bias", "attn.wo.bias", (D,))
    if config.sinks:
        add("self_attn.sinks", "attn.sinks", (config.n_head,), "heads")
    if config.qk_norm == "head":
        add("self_attn.q_norm.weight", "attn.q_norm.weight", (E,))
        if makes_k:
            add("self_attn.k_norm.weight", "attn.k_norm.weight", (E,))
    if config.qk_norm == "whole":
        add("self_attn.q_norm.weight", "attn.q_norm.weight", (q,), "q")
        add("self_attn.k_norm.weight", "attn.k_norm.weight", (kv,), "kv")


def add_latent(config: Config, latent: LatentConfig, add: Callable) -> None:
    """Adds latent attention's weights to hf_layer(). What makes latents is whole on each rank."""
    D, C, R, H = config.dim, latent.dim, config.head_dim, config.n_head
    queries, values = H * (latent.key_dim + R), H * latent.value_dim
    if latent.q_dim:
        add("self_attn.q_a_proj.weight", "attn.w_in.weight", (latent.q_dim, D))
        add("self_attn.q_a_layernorm.weight", "attn.q_norm.weight", (latent.q_dim,))
        add("self_attn.q_b_proj.weight", "attn.wq.weight", (queries, latent.q_dim), "latent q")
    else:
        add("self_attn.q_proj.weight", "attn.w_in.weight", (queries, D), "latent q")
    add("self_attn.kv_a_proj_with_mqa.weight", "attn.w_in.weight", (C + R, D))
    add("self_attn.kv_a_layernorm.weight", "attn.kv_norm.weight", (C,))
    kv = H * latent.key_dim + values, C
    add("self_attn.kv_b_proj.weight", "attn.wkv.weight", kv, "latent kv", quantized=False)
    add("self_attn.o_proj.weight", "attn.wo.weight", (D, values), columns="latent o")


def add_delta(config: Config, delta: DeltaConfig, add: Callable) -> None:
    """Adds a recurrent layer's weights to hf_layer(). Its norm's weight is stored as it is."""
    D, H, C = config.dim, delta.n_value_head, delta.channels
    values, each = H * delta.value_dim, H // delta.n_key_head
    if config.delta_by_head:
        qkvz = delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim
        name = "linear_attn.in_proj_qkvz.weight"
        add(name, "attn.w_in.weight", (C + values, D), "qkvz", by_head=qkvz)
        ba = dict(quantized=False, by_head=(each, each))
        add("linear_attn.in_proj_ba.weight", "attn.w_gates.weight", (2 * H, D), "gates", **ba)
    else:
        add("linear_attn.in_proj_qkv.weight", "attn.w_in.weight", (C, D), "channels")
        add("linear_attn.in_proj_z.weight", "attn.w_in.weight", (values, D), "values")
        for name in ("b", "a"):
            stored = f"linear_attn.in_proj_{name}.weight"
            add(stored, "attn.w_gates.weight", (H, D), "value heads", quantized=False)
    add("linear_attn.conv1d.weight", "attn.filter", (C, 1, delta.width), "channels")
    add("linear_attn.A_log", "attn.log_a", (H,), "value heads", fp32=True)
    add("linear_attn.dt_bias", "attn.dt_bias", (H,), "value heads", fp32=True)
    add("linear_attn.norm.weight", "attn.norm", (delta.value_dim,), norm=False)
    add("linear_attn.out_proj.weight", "attn.wo.weight", (D, values), columns="values")


def hf_experts(config: Config, moe: MoEConfig) -> dict[str, Weight]:
    """hf_layer() of a mixture of experts."""
    D, F, X = config.dim, moe.ffn_dim, moe.n_expert
    part, router, *names = config.expert_files
    ours = "ffn.moe" if moe.beside_dense else "ffn"
    gate_up = partial(Weight, f"{ours}.w_gate_up.weight", quantized=True)
    down = partial(Weight, f"{ours}.w_down.weight", 0, columns="expert", quantized=True)
    table = {f"{router}.weight": Weight(f"{ours}.router.weight", 0, (X, D), fp32=moe.sigmoid)}
    if moe.sigmoid:
        correction = Weight(f"{ours}.correction", 0, (X,), fp32=True)
        table[f"{router}.e_score_correction_bias"] = correction
    if moe.scaled_router:
        scale = Weight(f"{ours}.router_norm.weight", 0, (D,), norm=True)
        table |= {
            "router.scale": scale,
            "router.per_expert_scale": Weight(f"{ours}.expert_scale", 0, (X,)),
        }
    if names:
        gate_name, up_name, down_name = names
        for x in range(X):
            expert = f"experts.{x}"
            table |= {
                f"{expert}.{gate_name}.weight": gate_up(0, (F, D), "expert", expert=x),
                f"{expert}.{up_name}.weight": gate_up(F, (F, D), "expert", expert=x),
                f"{expert}.{down_name}.weight": down((D, F), expert=x),
            }
    elif not moe.bias:  # all experts in one tensor, gates first
        how = dict(experts=True, transposed=False)
        table |= {
            "experts.gate_up_proj": gate_up(0, (X, 2 * F, D), "gate and up", **how),
            "experts.down_proj": down((X, D, F), **how),
        }
    else:  # gpt-oss's, all experts in one tensor
        table |= {
            f"{router}.bias": Weight(f"{ours}.router.bias", 0, (X,)),
            "experts.gate_up_proj": gate_up(0, (X, D, 2 * F), "pairs", experts=True),
            "experts.gate_up_proj_bias": Weight(
                f"{ours}.w_gate_up.bias", 0, (X, 2 * F), "pairs", experts=True
            ),
            "experts.down_proj": down((X, F, D), experts=True),
            "experts.down_proj_bias": Weight(f"{ours}.w_down.bias", 0, (X, D), experts=True),
        }
    return {f"{part}.{name}".lstrip("."): weight for name, weight in table.items()}


def each_expert(config: Config) -> Config:
    """For files that have each expert's matrices by themselves, as quantized ones have them; gpt-oss's
    have not."""
    fused = len(config.expert_files) == 2 and not config.sinks
    names = config.expert_files + EXPERTS[2:]
    return replace(config, expert_files=names) if fused else config


Part = tuple[slice, ...]  # of an axis of a tensor: what lies in these slices, side by side
WHOLE_AXIS: Part = (slice(None),)


def part_of(weight: Weight, shard) -> tuple[Part, ...]:
    """What a rank reads of the file's tensor: of its rows and of its columns, or of all experts'
    [X, K, N]. shard: the rank's tp.Shard."""
    whole, shares = shard.whole, shard.own_shares(weight)

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
        if axis == "gate and up":  # of all experts
            return shares["expert"], behind(weight.shape[1] // 2, shares["expert"])
        if axis == "q and gate":  # of each head, side by side
            return (slice(2 * shares["q"].start, 2 * shares["q"].stop),)
        if axis == "gates":  # b, then a, of a recurrent layer
            heads = shares["value heads"]
            return heads, behind(weight.shape[0] // 2, heads)
        if axis in ("channels", "qkvz"):  # q, k and v of a recurrent layer, and z
            keys, values = shares["keys"], shares["values"]
            n = shard.delta.n_key_head * shard.delta.key_dim
            parts = keys, behind(n, keys), behind(2 * n, values)
            return parts if axis == "channels" else (*parts, behind(shard.delta.channels, values))
        if axis == "pairs":  # gpt-oss's: they take turns
            return (slice(2 * shares["expert"].start, 2 * shares["expert"].stop),)
        return (shares[axis],)

    rows, columns = part(weight.rows), part(weight.columns)
    if weight.experts:
        of_matrix = (columns, rows) if weight.transposed else (rows, columns)
        return (WHOLE_AXIS, *of_matrix) if len(weight.shape) == 3 else (WHOLE_AXIS, rows)
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
    page cache). ValueError for half a download."""
    if not path.exists():
        raise ValueError(f"no such file, though {INDEX} names it; fetch the checkpoint again")
    if not path.is_file():
        raise ValueError("want a file")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        with path.open("rb") as file:
            if file.read(8) == b"version ":
                raise ValueError(
                    "a pointer of git-lfs, not the file itself; `git lfs pull` fetches it"
                ) from None
        raise ValueError(f"half downloaded, or damaged ({error}); fetch it again") from None


def tensor_at(place: Place) -> Tensor:
    with reading(place.path):
        return open_shard(place.path).get_tensor(place.name)


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
            "model, or the weights are quantized (formats.load reads these)"
        )
    path, stored = files.pop(name)
    with reading(path):
        shard = open_shard(path)
        found = shard.get_slice(stored)
    dtype, shape = found.get_dtype(), tuple(found.get_shape())
    if dtype not in dtypes.split() or shape not in shapes:
        raise ValueError(
            f"{path}: {name} is {dtype} {list(shape)}, want {dtypes} {list(shapes[0])}"
        )
    return shard.get_tensor(stored)


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
        weight.ours: (
            torch.float32 if weight.fp32 or weight.norm and model.config.norm_fp32 else dtype
        )
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
        tensor = whole.by_kind(read_tensor(files, name, [whole.shape]))
        if shard:
            tensor = take(tensor, part_of(whole, shard))
        if weight.norm:
            tensor = tensor.float() + model.config.norm_offset
        view = weight.of(parameters[weight.ours])
        view.copy_(tensor.reshape(view.shape))
    pass_over(files, checkpoint)
    open_shard.cache_clear()
    model.load_state_dict(parameters, strict=False, assign=True)
    if model.config.tied:
        model.head.weight = model.embed.weight
    return model.eval()


def pass_over(files: dict[str, Place], checkpoint: Checkpoint) -> None:
    """What the model has no place for is left out, as in transformers. One line names what is more
    than leftovers."""
    config = checkpoint.config
    with reading(checkpoint.directory / "config.json"):
        drafting = int(config.layers[-1].latent is not None)  # as DeepSeek's class has it
        drafting = value_of(checkpoint.hf, "num_nextn_predict_layers", int, drafting, or_zero=True)
    behind = range(config.n_layer, config.n_layer + drafting)
    strange = sorted(name for name in files if not is_leftover(files, name, config, behind))
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        told = (
            f"left out, as config.json's model has no place for it: {', '.join(strange[:3])}{more}"
        )
        print(one_line(f"{checkpoint.directory}: {told}"), file=sys.stderr)


def is_leftover(files: dict[str, Place], name: str, config: Config, behind: range) -> bool:
    """Whether a tensor that the model has no place for would change nothing: one by its name, of a
    layer `behind` the last that drafts, such as DeepSeek's, keys and values of one that reads
    another's, a tied model's head, one without numbers, and a bias of zeros."""
    layer = re.match(r"model\.layers\.(\d+)\.(self_attn\.[kv]_(proj|norm)\.)?", name)
    number, keys = (int(layer[1]), layer[2]) if layer else (0, None)
    if (
        LEFTOVERS.match(name)
        or number in behind
        or (keys and number < config.n_layer and config.layers[number].kv_of is not None)
        or (name == HEAD and config.tied)
    ):
        return True
    path, stored = files[name]
    with reading(path):
        shard = open_shard(path)
        found = shard.get_slice(stored)
        if 0 in found.get_shape():
            return True
        is_bias = name.endswith(".bias") and found.get_dtype() in FLOATS.split()
        return is_bias and not shard.get_tensor(stored).any()

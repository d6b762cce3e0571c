"""
EAGLE-3 heads (arXiv 2503.01840): the small draft that is trained for one model, the target, and
reads its features.

It is a Transformer whose first layer reads 2 D inputs. heads.py says what it reads when, and drafts
with it.

Contents: the head, its files in both published layouts. Shapes: as in heads.py.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from drafts.heads import DraftHead
from hub.checkpoint import (
    Checkpoint,
    Place,
    Weight,
    hf_weights,
    open_shard,
    read_tensor,
    reading,
)
from hub.families import check_supported, numbers_of, text_settings, value_of
from model import Block, Config, RMSNorm, Transformer


# The head


@dataclass(frozen=True)
class HeadConfig:
    """What a head has beyond its decoder's Config. The norms are options that published heads
    use."""

    places: tuple[int, ...]  # whose hidden states make a feature: see Transformer.setup()
    target_dim: int
    vocab_size: int  # of the tokens that it may draft
    norm_before_residual: bool = False  # the first layer adds to the normed state
    norm_before_fc: bool = False  # one norm over all places
    fc_norm: bool = False  # a norm for each place
    norm_output: bool = False  # the state that it hands on to itself is normed: EAGLE 3.1

    @property
    def width(self) -> int:
        """Of a feature: n target_dim."""
        return len(self.places) * self.target_dim


class FirstBlock(Block):
    """The head's first layer: q, k and v read 2 D inputs, the normed embedding and, beside it, the
    normed state."""

    def __init__(self, config: Config, options: HeadConfig):
        super().__init__(config, config.layers[0])
        self.norm_before_residual = options.norm_before_residual
        self.state_norm = RMSNorm(config.dim, config)
        self.attn.wqkv = nn.Linear(2 * config.dim, sum(self.attn.sizes), bias=config.qkv_bias)

    def forward(self, x, *where):
        """x [B, T, 2 D], embeddings and states side by side -> [B, T, D]. where: see
        Attention.attend()."""
        embedded, state = x.chunk(2, dim=-1)
        normed = self.state_norm(state)
        y = self.attn(torch.cat((self.attn_norm(embedded), normed), dim=-1), *where)
        x = y + (normed if self.norm_before_residual else state)
        return x + self.ffn(self.ffn_norm(x))


class Head(DraftHead):
    def __init__(self, config: Config, options: HeadConfig, vocabulary: Tensor | None = None):
        super().__init__(config)
        self.options, self.vocabulary = options, vocabulary
        self.target_places, self.norm_output = options.places, options.norm_output
        self.head_size = options.vocab_size
        self.layers[0] = FirstBlock(config, options)
        self.fc = nn.Linear(options.width, config.dim, bias=False)
        normed = options.places if options.fc_norm else ()
        self.fc_norm = nn.ModuleList(RMSNorm(options.target_dim, config) for _ in normed)
        self.input_norm = (
            RMSNorm(options.width, config) if options.norm_before_fc else nn.Identity()
        )
        self.head = nn.Linear(config.dim, options.vocab_size, bias=False)

    def share(self, target: Transformer):
        if self.embed.weight.is_meta:
            self.embed = target.embed

    def project(self, features):
        x = self.input_norm(features)
        if self.fc_norm:
            parts = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(x)

    def inputs(self, tokens, states):
        return torch.cat((self.embed(tokens), states), dim=-1)


# Its files

# What a missing key stands for. The speculators package leaves out what is transformers' default.
DEFAULTS = {
    "llama": dict(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        vocab_size=32000,
    ),
    "qwen3": dict(
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        vocab_size=151936,
    ),
}
NORMS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
SUPPORTED = {  # as families.SUPPORTED
    "model_type": tuple(DEFAULTS),
    "speculators_model_type": ("eagle3",),
    "use_aux_hidden_state": (True,),
    "quantization_config": (None,),
    **dict.fromkeys(NORMS, (False, True)),
}
EMBEDDING = "embed_tokens.weight"
# Tensors without a place in the model: of training, and the vocabulary's. t2d says no more than d2t
# does.
UNUSED = "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"


def head_settings(hf: dict) -> dict:
    """config.json of either layout as one dictionary: the keys of a model of one or a few layers,
    and the head's own.

    The authors' layout is flat. The speculators package's has the layers' keys in
    transformer_layer_config. NVIDIA's heads have some of the head's in eagle_config."""
    nested = value_of(hf, "transformer_layer_config", dict, None)
    kind = "llama" if nested is None else "qwen3"
    hf = dict(model_type=kind) | hf | (nested or {}) | value_of(hf, "eagle_config", dict, {})
    check_supported(hf, SUPPORTED)
    hf = DEFAULTS[hf["model_type"]] | hf | dict(tie_word_embeddings=False)
    if hf.get("layer_types"):  # which say what Qwen3's use_sliding_window says
        hf["use_sliding_window"] = False
    return hf


def find_places(ids: list[int] | None, n_layer: int) -> tuple[int, ...]:
    """eagle_aux_hidden_state_layer_ids of a head for a target of n_layer layers -> the places of
    Transformer.setup().

    Heads are published with two meanings of an id. If the first id is 1, an id names the layer
    whose output it is, so the place is one more. Else an id is the place: that before the layer, or
    n_layer, behind the last one. SGLang tells them apart so (sgl-project/sglang, pull request
    25454); heads without ids use what vLLM and SGLang use."""
    if ids is None:
        places = 2, n_layer // 2, n_layer - 3
    else:
        places = tuple(i + (ids[0] == 1) for i in ids)
    if not places or len(set(places).intersection(range(n_layer + 1))) < len(places):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={ids} stands for the hidden states at {places}: "
            f"want distinct ones, from 0 to {n_layer}, as the target has {n_layer} layers"
        )
    return places


class HeadCheckpoint(Checkpoint):
    """A head's directory. target: its target's Checkpoint. ValueError for a head of another
    target."""

    bare = ()

    @staticmethod
    def settings(hf: dict) -> dict:
        return text_settings(head_settings(hf))

    def __init__(self, directory: Path, target: Checkpoint):
        super().__init__(directory)
        files = super().files()
        hf, whole = self.hf, target.config
        with reading(directory / "config.json"):
            types = hf.get("layer_types") or ["full_attention"] * self.config.n_layer
            window = value_of(hf, "sliding_window", int, None, most=10**9)
            layers = (
                replace(layer, window=window if of == "sliding_attention" else None)
                for layer, of in zip(self.config.layers, types)
            )
            self.config = replace(self.config, layers=tuple(layers))
            self.options = HeadConfig(
                find_places(numbers_of(hf, "eagle_aux_hidden_state_layer_ids"), whole.n_layer),
                whole.dim,
                value_of(hf, "draft_vocab_size", int, whole.vocab_size, most=2**24),
                **{name: bool(hf.get(name)) for name in NORMS},
            )
        self.places = self.options.places
        self.has_embedding = EMBEDDING in files
        self.check_sizes(files, whole)
        self.vocabulary = self.read_vocabulary(files, whole.vocab_size)

    def check_sizes(self, files: dict[str, Place], target: Config) -> None:
        config, options = self.config, self.options
        if "fc.weight" not in files:
            raise ValueError(f"{self.directory}: fc.weight is missing: want an EAGLE-3 head")
        path, name = files["fc.weight"]
        want = [config.dim, options.width]
        with reading(path):
            found = open_shard(path).get_slice(name).get_shape()
        if found != want:
            raise ValueError(
                f"{self.directory}: fc.weight is {found}, want {want} for {len(options.places)} "
                f"places and the checkpoint's {target.dim} dimensions: the head is of another model"
            )
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"{self.directory}: vocab_size is {config.vocab_size}, the checkpoint's is "
                f"{target.vocab_size}: the head is of another model"
            )
        if options.vocab_size > target.vocab_size:
            raise ValueError(
                f"{self.directory}: draft_vocab_size is {options.vocab_size}, more than the "
                f"checkpoint's {target.vocab_size} tokens: the head is of another model"
            )
        if not self.has_embedding and config.dim != target.dim:
            raise ValueError(
                f"{self.directory}: {EMBEDDING} is missing, and the checkpoint's embedding has "
                f"{target.dim} dimensions, not the head's {config.dim}: want a file that has it"
            )

    def read_vocabulary(self, files: dict[str, Place], vocab_size: int) -> Tensor | None:
        """From d2t [draft's V]: token i of the head is token i + d2t[i] of the target."""
        n = self.options.vocab_size
        if "d2t" not in files and n == vocab_size:
            return None
        vocabulary = torch.arange(n) + read_tensor(files, "d2t", [(n,)], dtypes="I64 I32")
        low, high = vocabulary.aminmax()
        if low < 0 or high >= vocab_size or len(vocabulary.unique()) < n:
            raise ValueError(
                f"{self.directory}: d2t makes {n} tokens from {low} to {high}: want distinct ones "
                f"from 0 to {vocab_size - 1}, the checkpoint's"
            )
        return vocabulary

    def files(self) -> dict[str, Place]:
        """By the speculators package's names."""
        return {
            name.replace("midlayer.", "layers.0."): place
            for name, place in super().files().items()
            if name not in UNUSED
        }

    def counted(self) -> Config:
        """Its output has rows for fewer tokens; its embedding, as a rule, is the target's."""
        return replace(self.config, vocab_size=self.options.vocab_size, tied=True)

    def make_model(self, config: Config):
        return Head(config, self.options, self.vocabulary)

    def weights_of(self, config: Config):
        return head_weights(config, self.options, self.has_embedding)


def head_weights(config: Config, options: HeadConfig, embedding=True) -> dict[str, Weight]:
    """As checkpoint.hf_weights()."""
    D = config.dim
    table = {}
    for name, weight in hf_weights(config).items():
        if weight.ours == "layers.0.attn.wqkv.weight":  # see FirstBlock
            weight = weight._replace(shape=(weight.shape[0], 2 * D))
        table[name.removeprefix("model.")] = weight
    if not embedding:
        del table[EMBEDDING]
    table |= {
        "lm_head.weight": Weight("head.weight", 0, (options.vocab_size, D), "vocab"),
        "fc.weight": Weight("fc.weight", 0, (D, options.width)),
        "layers.0.hidden_norm.weight": Weight("layers.0.state_norm.weight", 0, (D,), norm=True),
    }
    if options.norm_before_fc:
        table["input_norm.weight"] = Weight("input_norm.weight", 0, (options.width,), norm=True)
    if options.fc_norm:
        for i in range(len(options.places)):
            name = f"fc_norm.{i}.weight"
            table[name] = Weight(name, 0, (options.target_dim,), norm=True)
    return table

"""
DFlash (arXiv 2602.06036): a draft of a few layers that proposes a whole block of tokens in one
forward.

A block is the text's last token and, in the place of the tokens to come, masks: a token of its own
that the target embeds. Behind the draft's final norm the target's output head gives the logits of
all masks at once, each by itself. In a layer the block's queries see

    the context       keys and values of the text's earlier tokens, made of the target's features:
                      hidden states behind a few of its layers, side by side, through fc and a norm
    the block itself  keys and values of its own states; masks see what stands behind them, too

So the KV cache holds nothing of the draft's own but the block, which stands behind the text, in the
slots of the tokens that it proposes. What the target kept of these is written over it.

DFlash 2 has a convolution over the block's tokens around each attention and feed-forward part, and
draws the tokens one after the other: of each mask's likeliest candidates, by the mask's logits and
how well a candidate goes with the token before it.

Muse Glimmer's draft (muse_glimmer_assistant) is one whose files have other names and keys: see
muse_settings().

Contents: the drafts, their files, the Drafter. Shapes: as in model.py and speculative.py; n
features."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from generate import Engine
from hub.checkpoint import (
    Checkpoint,
    Place,
    Weight,
    borrowing_weights,
    open_shard,
    read_json,
    reading,
)
from hub.formats import unpack_quantized
from hub.families import (
    MUSE_DRAFT,
    check_known,
    numbers_of,
    text_settings,
    value_of,
    values_of,
)
from model import Block, Config, LayerConfig, RMSNorm, Transformer
from quantize import QuantizedLinear
from speculative import DraftModel, choose_draft

MOST = 32  # tokens of a block
KNOWN = (  # keys of dflash_config
    "block_size",
    "conv_group_size",
    "conv_kernel_size",
    "final_logit_softcapping",
    "input_embedding_scale",
    "is_causal",
    "mask_token_id",
    "output_multiplier",
    "selector_rank",
    "selector_top_k",
    "target_layer_ids",
)
MUSE = dict(  # what a missing key of Muse Glimmer's draft stands for
    hidden_size=6656,
    intermediate_size=19968,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    sliding_window=2048,
    block_size=16,
    mask_token_id=201818,
    target_layer_ids=[1, 13, 25, 37, 49],
)
MUSE_MORE = (  # its other keys
    "attention_bias",
    "attention_dropout",
    "hidden_act",
    "layer_types",
    "num_target_layers",
    "rope_parameters",
    "rope_scaling",
    "vocab_size",
)
MUSE_NAMES = {  # of tensors that z-lab's files call otherwise
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


@dataclass(frozen=True)
class BlockConfig:
    """What a DFlash draft has beyond its decoder's Config."""

    places: tuple[int, ...]  # whose hidden states make a feature: see Transformer.setup()
    target_dim: int
    size: int  # tokens of a block
    mask: int  # the token that stands for those to come
    causal: bool | None = None  # None: layers with a window are
    second: "Second | None" = None  # of DFlash 2


@dataclass(frozen=True)
class Second:
    """What DFlash 2 has beyond that."""

    taps: int  # tokens that a convolution sees, a token's own included
    group: int  # channels that share what a token adds to the convolution's weights
    rank: int  # of what scores pairs of tokens
    candidates: int


class DFlash(Transformer):
    def __init__(self, config: Config, block: BlockConfig):
        super().__init__(config)
        self.block = block
        self.fc = nn.Linear(len(block.places) * block.target_dim, config.dim, bias=False)
        self.context_norm = RMSNorm(config.dim, config)

    def share(self, target: Transformer):
        self.embed, self.head = target.embed, target.head

    def read(self, features, positions):
        """Features [B, T, n target_dim] of the text's tokens at positions [B, T], which become
        context."""
        context = self.context_norm(self.fc(features))
        rows = self.rows[: len(features)]
        turns = {table.rope: table(positions) for table in self.ropes}
        for layer in self.layers:
            attn = layer.attn
            _, k, v = attn.rotate(attn.wqkv(context), positions, *turns[layer.config.rope])
            attn.cache.write(k, v, rows, positions)

    def forward(self, tokens, positions, slots):
        """A block: tokens [B, T], of which all but the first are masks, at positions [B, T] -> the
        masks' states behind the final norm [B, T - 1, D]."""
        rows = self.rows[: len(tokens)]
        turns = {table.rope: table(positions) for table in self.ropes}
        x = self.embedded(tokens)
        for layer in self.layers:
            mask = self.visible(slots, positions, layer.config.window)
            x = layer(x, positions, *turns[layer.config.rope], mask, rows)
        return self.norm(x[:, 1:])

    def logits(self, states):
        """[B, k, D] -> [B, k, V]"""
        return self.capped(self.head(states * self.config.logits_scale))

    def draw(self, logits, states, last, choose: Callable):
        """The masks' logits [B, k, V] and states [B, k, D], the token before them [B] -> tokens [B,
        k] and the distributions [B, k, V] they were drawn from. choose(logits [B, 1, V]) -> a token
        [B], and its distribution [B, V]."""
        k = logits.shape[1]
        drafted, q = choose(logits.flatten(0, 1)[:, None])
        return drafted.unflatten(0, (-1, k)), q.unflatten(0, (-1, k))

    def is_causal(self, window: int | None) -> bool:
        return window is not None if self.block.causal is None else self.block.causal

    def visible(self, slots, positions, window: int | None):
        """Which slots [L] the tokens of a block attend to: a mask [B, 1, T, L]."""
        causal = self.is_causal(window)
        at, last = positions[:, None, :, None], positions[:, None, -1:, None]
        mask = slots <= (at if causal else last)
        if window:
            mask = mask & (slots > at - window) & (slots < at + window)
        return mask


class DynamicConv(nn.Module):
    """A causal depthwise convolution over a block, before and behind a part of a layer, whose
    weights are each channel's own and, added to these, what a token's state makes of them for each
    group of channels."""

    def __init__(self, dim: int, taps: int, group: int):
        super().__init__()
        self.sizes, self.group = (2, taps, dim // group), group
        self.base = nn.Parameter(torch.empty(2, taps, dim))
        self.own = nn.Linear(dim, 2 * taps * (dim // group), bias=False)

    def around(self, part: Callable, x):
        """x [B, T, D], normed -> [B, T, D]"""
        own = self.own(x).unflatten(-1, self.sizes).repeat_interleave(self.group, dim=-1)
        before, behind = (self.base + own).unbind(2)  # [B, T, taps, D] each
        return convolve(part(convolve(x, before)), behind)


def convolve(x, weights):
    """x [B, T, D], weights [B, T, taps, D], the token's own first -> [B, T, D]"""
    T = x.shape[1]
    taps = enumerate(weights.unbind(2))
    return sum(F.pad(x, (0, 0, i, 0))[:, :T] * weight for i, weight in taps)


class ConvBlock(Block):
    def __init__(self, config: Config, layer: LayerConfig, second: Second):
        super().__init__(config, layer)
        sizes = config.dim, second.taps, second.group
        self.attn_conv, self.ffn_conv = DynamicConv(*sizes), DynamicConv(*sizes)

    def forward(self, x, *where):
        attend = lambda y: self.attn(y, *where)  # noqa: E731
        x = x + self.attn_conv.around(attend, self.attn_norm(x))
        return x + self.ffn_conv.around(self.ffn, self.ffn_norm(x))


class DFlash2(DFlash):
    def __init__(self, config: Config, block: BlockConfig):
        super().__init__(config, block)
        second = block.second
        self.layers = nn.ModuleList(ConvBlock(config, layer, second) for layer in config.layers)
        # A pair's score is the sum of before[token] * of_mask(state) * after[candidate].
        V, R = config.vocab_size, second.rank
        self.before, self.after = (nn.Parameter(torch.empty(V, R)) for _ in range(2))
        self.of_mask = nn.Linear(config.dim, R, bias=False)

    def draw(self, logits, states, last, choose):
        of_masks = self.of_mask(states)
        scores, candidates = logits.topk(self.block.second.candidates)  # [B, k, candidates]
        drafted, distributions = [], []
        for i in range(states.shape[1]):
            pair = self.before[last] * of_masks[:, i]  # [B, R]
            fit = (self.after[candidates[:, i]] @ pair[:, :, None]).squeeze(-1)
            none = torch.full_like(logits[:, 0], torch.finfo(logits.dtype).min)
            found = none.scatter(1, candidates[:, i], scores[:, i] + fit)
            last, q = choose(found[:, None])
            drafted.append(last)
            distributions.append(q)
        return torch.stack(drafted, 1), torch.stack(distributions, 1)


# Their files


def default_layers(n_target: int, n_layer: int) -> list[int]:
    """target_layer_ids where the file names none, as its authors and SGLang have it: from layer 1 to
    the third before the last, evenly."""
    if n_layer == 1:
        return [n_target // 2]
    return [round(1 + i * (n_target - 4) / (n_layer - 1)) for i in range(n_layer)]


def muse_settings(hf: dict) -> dict:
    """config.json of Muse Glimmer's draft, as z-lab's files would say it.

    Its layers have windows, unless layer_types say otherwise, and masks see what stands behind them
    there, too. A window counts the tokens on one side, where others count the token itself as well.
    The logits are the output head's as they are, without the target's scale and cap. As in every
    draft here the embeddings are the table's, without the norm that the target puts behind them."""
    check_known(hf, (*MUSE, *MUSE_MORE))
    if hf.get("architectures") not in (None, ["MuseGlimmerAssistantModel"]):
        raise ValueError(
            f"architectures={hf['architectures']!r:.60}: want MuseGlimmerAssistantModel of a "
            f"{MUSE_DRAFT}"
        )
    hf = MUSE | {key: value for key, value in hf.items() if value is not None}
    n = value_of(hf, "num_hidden_layers", int, most=10**4)
    window = value_of(hf, "sliding_window", int, most=10**9 - 1)
    return (
        dict(layer_types=["sliding_attention"] * n)
        | hf
        | dict(
            model_type="qwen3",
            architectures=["DFlashDraftModel"],
            sliding_window=window + 1,
            is_causal=False,
        )
    )


class DFlashCheckpoint(Checkpoint):
    """A draft's directory. target: its target's Checkpoint. ValueError for a draft of another
    target."""

    bare = ()

    @staticmethod
    def settings(hf: dict) -> dict:
        if hf.get("model_type") == MUSE_DRAFT:
            hf = muse_settings(hf)
        kinds = hf.get("architectures")
        if kinds not in (["DFlashDraftModel"], ["DFlash2DraftModel"]):
            raise ValueError(
                f"architectures={kinds!r:.60}: want one of DFlashDraftModel and DFlash2DraftModel"
            )
        # Its layers are Qwen3's, whatever its target is: model_type may be the target's. layer_types
        # say what Qwen3's use_sliding_window says. Biases: __init__().
        nested = value_of(hf, "dflash_config", dict, {})
        if nested.get("is_causal") is None:  # Qwen3 has no such key
            nested = nested | dict(is_causal=hf.get("is_causal"))
        as_qwen3 = dict(
            model_type="qwen3",
            tie_word_embeddings=False,
            use_sliding_window=False,
            attention_bias=False,
            is_causal=None,
            dflash_config=nested,
        )
        return text_settings(hf | as_qwen3)

    def __init__(self, directory: Path, target: Checkpoint):
        super().__init__(directory)
        hf, whole = self.hf, target.config
        with reading(directory / "config.json"):
            given = read_json(directory / "config.json")  # without what missing keys stand for
            nested = value_of(hf, "dflash_config", dict, {})
            if unknown := sorted(nested.keys() - KNOWN):
                raise ValueError(f"dflash_config has {', '.join(unknown)}: want {', '.join(KNOWN)}")
            own = hf | {key: value for key, value in nested.items() if value is not None}
            for key, there in (
                ("num_target_layers", whole.n_layer),
                ("vocab_size", whole.vocab_size),
            ):
                if given.get(key) not in (None, there):
                    raise ValueError(
                        f"{key}={given[key]!r:.60}: the checkpoint's is {there}, and the draft is of "
                        "another model"
                    )
            n, kinds = self.config.n_layer, ("full_attention", "sliding_attention")
            types = values_of(hf, "layer_types", kinds, n, [kinds[0]] * n)
            window = None
            if kinds[1] in types:
                window = value_of(hf, "sliding_window", int, most=10**9)
            layers = (
                replace(layer, window=window if of == kinds[1] else None)
                for layer, of in zip(self.config.layers, types)
            )
            ids = numbers_of(own, "target_layer_ids")
            if ids is None:
                ids = default_layers(whole.n_layer, self.config.n_layer)
            # Of the layers' outputs; what transformers has of the last one is behind the final
            # norm.
            self.places, last = tuple(i + 1 for i in ids), whole.n_layer - 2
            if not ids or len(set(ids).intersection(range(last + 1))) < len(ids):
                raise ValueError(
                    f"target_layer_ids={ids}: want distinct ones from 0 to {last}, as the checkpoint "
                    f"has {whole.n_layer} layers"
                )
            size = value_of(own, "block_size", int, 16)
            if not 2 <= size <= MOST:
                raise ValueError(f"block_size={size}: want 2 to {MOST}")
            mask = value_of(own, "mask_token_id", int, most=2**24, or_zero=True)
            if mask >= whole.vocab_size:
                raise ValueError(
                    f"mask_token_id={mask}: the checkpoint has {whole.vocab_size} tokens, and the "
                    "draft is of another model"
                )
            second = None
            if hf["architectures"] == ["DFlash2DraftModel"]:
                second = Second(
                    value_of(own, "conv_kernel_size", int, most=size),
                    value_of(own, "conv_group_size", int),
                    value_of(own, "selector_rank", int),
                    value_of(own, "selector_top_k", int, most=whole.vocab_size),
                )
                if self.config.dim % second.group:
                    raise ValueError(
                        f"conv_group_size={second.group} does not divide hidden_size="
                        f"{self.config.dim}"
                    )
            scale = value_of(own, "input_embedding_scale", float, 1.0)
            bias = value_of(given, "attention_bias", bool, False)  # of gpt-oss's drafts
            self.block = BlockConfig(
                self.places,
                whole.dim,
                size,
                mask,
                value_of(own, "is_causal", bool, None),
                second,
            )
            self.config = replace(
                self.config,
                layers=tuple(layers),
                vocab_size=whole.vocab_size,
                qkv_bias=bias,
                o_bias=bias,
                embedding_scale=scale,
                logits_scale=value_of(own, "output_multiplier", float, 1.0),
                # 0 stands for none.
                logits_cap=value_of(own, "final_logit_softcapping", float, None, or_zero=True),
            )
        self.check_sizes(whole)

    def files(self) -> dict[str, Place]:
        """By z-lab's names."""
        return {MUSE_NAMES.get(name, name): place for name, place in super().files().items()}

    def check_sizes(self, target: Config) -> None:
        files, want = self.files(), [self.config.dim, len(self.places) * target.dim]
        if "fc.weight" not in files:
            raise ValueError(
                f"{self.directory}: fc.weight, or encoder.fc.weight, is missing: want a DFlash draft"
            )
        path, name = files["fc.weight"]
        with reading(path):
            found = open_shard(path).get_slice(name).get_shape()
        if found != want or self.config.dim != target.dim:
            raise ValueError(
                f"{self.directory}: {name} is {found}, want {want} for {len(self.places)} layers "
                f"and the checkpoint's {target.dim} dimensions: the draft is of another model"
            )

    def counted(self) -> Config:
        """Embedding and head are the target's, and count there."""
        return replace(self.config, vocab_size=0, tied=True)

    def make_model(self, config: Config) -> DFlash:
        return (DFlash2 if self.block.second else DFlash)(config, self.block)

    def weights_of(self, config: Config) -> dict[str, Weight]:
        return dflash_weights(config, self.block)


def dflash_weights(config: Config, block: BlockConfig) -> dict[str, Weight]:
    """As checkpoint.hf_weights()."""
    D = config.dim
    table = borrowing_weights(config) | {
        "fc.weight": Weight("fc.weight", 0, (D, len(block.places) * block.target_dim)),
        "hidden_norm.weight": Weight("context_norm.weight", 0, (D,), norm=True),
    }
    if second := block.second:
        V, R, outputs = config.vocab_size, second.rank, 2 * second.taps * D // second.group
        parts = ("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")
        for i, (theirs, ours) in itertools.product(range(config.n_layer), parts):
            at, to = f"layers.{i}.{theirs}", f"layers.{i}.{ours}"
            table[f"{at}.base_kernel"] = Weight(f"{to}.base", 0, (2, second.taps, D))
            table[f"{at}.kernel_projection.weight"] = Weight(f"{to}.own.weight", 0, (outputs, D))
        table |= {
            "candidate_selector.predecessor_codebook": Weight("before", 0, (V, R)),
            "candidate_selector.successor_codebook": Weight("after", 0, (V, R)),
            "candidate_selector.hidden_projection.weight": Weight("of_mask.weight", 0, (R, D)),
        }
    return table


# The Drafter


class DFlashDraft(DraftModel):
    """Between steps the cache holds slots 0 to last - 1 - unread: follow() reads the features of all
    tokens that were kept. The block's slots begin with that of the last token, whose feature the
    target makes when it verifies.

    Each drafted token is drawn from a distribution of its own, which is q: see DFlash.draw().

    engine: the draft's generate.Engine, eager; target: the target's, which keeps the features."""

    READ_TOKENS = 4096

    def __init__(self, engine: Engine, target: Engine):
        self.draft = engine.model
        super().__init__(engine, target.model.config.vocab_size, engine.max_seq_len)
        self.target, self.fast = target, target.faster(self.draft)
        self.most = self.draft.block.size - 1

    captures = True

    def slots(self, n_slots: int) -> Tensor:
        """A CUDA graph serves texts of any length, so that it reads all slots."""
        return self.draft.slots if self.target.captures else self.engine.slots(n_slots)

    def read_prompts(self, text, slots):
        """Once for all samples of a prompt. What lies behind a shorter prompt is overwritten before
        it is seen."""
        P, samples, width = len(self.prompts), self.samples, max(map(len, self.prompts))
        at = torch.arange(width, device=text.device).expand(P, -1)
        for chunk in at.split(max(32, self.READ_TOKENS // P), dim=1):
            self.read_features(chunk, samples)
        if samples > 1:
            self.draft.arrange_rows([row for row in range(P) for _ in range(samples)], width)

    def read(self, text, last, at, slots):
        self.read_features(at)

    def read_features(self, at, samples: int = 1):
        """Of slots at [B, any]; row b is the text's row b * samples."""
        features = self.target.model.features[::samples]
        self.fast.read(features[self.draft.rows[: len(at)], at], at)

    def propose(self, text, last, k, n_slots):
        at = last[:, None] + torch.arange(k + 1, device=last.device)
        tokens = F.pad(text.gather(1, last[:, None]), (0, k), value=self.draft.block.mask)
        states = self.fast(tokens, at, self.slots(n_slots))  # [B, k, D]
        logits = self.fast.logits(states)
        drafted, q = self.draft.draw(logits, states, tokens[:, 0], self.choose)
        proposed = torch.full_like(last, k)  # the cache has slots for all: see SLACK
        return drafted, F.pad(q, (0, 0, 0, 1)), proposed

    def choose(self, logits):
        """With the target's sampler, which may be a kernel."""
        target = self.target
        return target.twin(choose_draft)(logits, self.vocab_size, target.sampling)

    def follow(self, text, at, accepted, n_slots):
        self.read_features(at)


def make_dflash(model: DFlash, target: Engine, spare: int) -> DFlashDraft:
    model.share(target.model)
    rows = target.batch_size
    engine = Engine(model, target.limit, rows, spare=spare, cache=target.cache)
    draft = DFlashDraft(engine, target)
    if any(isinstance(layer, QuantizedLinear) for layer in model.layers.modules()):
        unpack_quantized(model, rows, target.limit, quiet=True)  # no kernels serve it
    return draft

"""
Gemma 4's drafts (gemma4_assistant): a few small layers of the target's kind that have queries
alone. They attend to keys and values of the target: those of its last layer with a window that
makes its own, and of its last one without. So the draft has no KV cache, reads no prompt and has
nothing to catch up with.

What goes in is the last token's embedding and the hidden state that the target had before it,
behind its final norm, both the target's, side by side. What comes out, behind the draft's final
norm, is the logits of the next token, and a state of the target's width. To draft more than one
token the draft runs again, on that token and this state, and stays where it is: its queries have
the position of the text's last token, and see the slots before it, which hold all that the target
has read.

With several ranks each has the queries of its own key/value heads, as of the target.

The draft's output head is its own. Of the E models' it is in clusters: centroids say which of them
count, and only their tokens have logits of their own. The rest stand below the least of these by 1.

transformers' generation hands on keys of rejected tokens, too: one slot more, that of the last
token, after a step that rejected any. Here no draft sees it, as none does behind a prompt there.

Contents: the draft, its files, the Drafter. Shapes: as in model.py and speculative.py; W the
target's dim, C clusters."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from generate import Engine
from hub.checkpoint import Checkpoint, Place, Weight, hf_weights, read_json, read_tensor, reading
from hub.families import KV_DRAFTS, check_known, check_supported, text_settings, value_of
from hub.formats import unpack_quantized
from model import Config, LayerConfig, RopeTable, Transformer, visible
from quantize import QuantizedLinear
from speculative import Drafter, choose_draft

KNOWN = (  # keys of config.json
    "backbone_hidden_size",
    "centroid_intermediate_top_k",
    "num_centroids",
    "text_config",
    "tie_word_embeddings",
    "use_ordered_embeddings",
)
SUPPORTED = {  # of text_config, as families.SUPPORTED
    "hidden_size_per_layer_input": (0,),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (False,),
}
ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True)
class SharedKVConfig:
    """What such a draft has beyond its layers' Config, whose kv_of is the number of a layer of the
    target."""

    target_dim: int
    target_places: tuple[int, ...]  # whose hidden states it reads: see Transformer.setup()
    clusters: int = 0  # of the output head; 0: it has none
    chosen: int = 0  # clusters whose tokens have logits


class SharedKV(Transformer):
    """order [V]: the tokens, cluster by cluster, if the output head has clusters."""

    def __init__(self, config: Config, options: SharedKVConfig, order: Tensor | None = None):
        super().__init__(config)
        self.options, self.order, self.target_places = options, order, options.target_places
        self.before = nn.Linear(2 * options.target_dim, config.dim, bias=False)
        self.behind = nn.Linear(config.dim, options.target_dim, bias=False)
        self.centroids = None
        if options.clusters:
            self.centroids = nn.Linear(config.dim, options.clusters, bias=False)

    def attach(self, target: Transformer, max_seq_len: int):
        """In the place of setup(): takes the caches of the target, whose setup() is over."""
        config, self.slots, self.rows = self.config, target.slots, target.rows
        L, device = len(self.slots), self.slots.device
        ropes = {layer.rope: config.heads(layer)[-1] for layer in config.layers}
        self.ropes = nn.ModuleList(
            RopeTable(rope, E, max_seq_len, L, device) for rope, E in ropes.items()
        )
        for layer in self.layers:
            source = layer.config.kv_of
            cache, K = target.layers[source].attn.cache, config.heads(layer.config)[1]
            if cache.k.shape[1] != K:
                raise ValueError(
                    f"this rank has {cache.k.shape[1]} key/value heads of the checkpoint's layer "
                    f"{source}, and queries of the draft for {K}: want fewer ranks, or another draft"
                )
            layer.attn.cache = cache
        if self.order is not None:
            self.order = self.order.to(device)

    def forward(self, embedded, states, positions, slots):
        """embedded, states [B, 1, W]: of the token before the one that is drafted; positions [B, 1]:
        of the text's last token -> logits [B, 1, V] and the next state [B, 1, W]."""
        rows = self.rows[: len(embedded)]
        turns = {table.rope: table(positions) for table in self.ropes}
        windows = dict.fromkeys(layer.window for layer in self.config.layers)
        # The last token's slot is not written yet.
        masks = {window: visible(slots, positions - 1, window) for window in windows}
        x = self.before(torch.cat((embedded, states), dim=-1))  # [B, 1, D]
        for layer in self.layers:
            of = layer.config
            x = layer(x, positions, *turns[of.rope], masks[of.window], rows)
        x = self.norm(x)
        return self.logits(x), self.behind(x)

    def logits(self, x):
        """[B, T, D] -> [B, T, V]"""
        if self.centroids is None:
            return self.head(x)
        best = self.centroids(x).topk(self.options.chosen).indices  # [B, T, chosen]
        tokens = self.order.unflatten(0, (self.options.clusters, -1))[best].flatten(-2)
        scores = (self.embed.weight[tokens] @ x[..., None]).squeeze(-1)  # [B, T, chosen V / C]
        rest = scores.amin(-1, keepdim=True) - 1
        return rest.repeat(1, 1, self.config.vocab_size).scatter(-1, tokens, scores)


# Its files


def source_of(target: Config, layer: LayerConfig) -> int | None:
    """The target's layer whose keys and values a layer of the draft reads."""
    found = [
        i
        for i, own in enumerate(target.layers)
        if (own.window is None) == (layer.window is None)
        and (own.kv_of, own.delta, own.latent) == (None, None, None)
    ]
    return found[-1] if found else None


class SharedKVCheckpoint(Checkpoint):
    """A draft's directory. target: its target's Checkpoint. ValueError for a draft of another
    target."""

    @staticmethod
    def settings(hf: dict) -> dict:
        check_known(hf, KNOWN)
        text = value_of(hf, "text_config", dict)
        whole = KV_DRAFTS[hf["model_type"]]
        text = {key: values[0] for key, values in SUPPORTED.items()} | text
        check_supported(text, SUPPORTED | dict(model_type=(None, f"{whole}_text")))
        n = value_of(text, "num_hidden_layers", int, most=10**4)
        if text.get("num_kv_shared_layers") not in (None, 0, n):
            raise ValueError(
                f"num_kv_shared_layers={text['num_kv_shared_layers']!r:.60}: want "
                f"num_hidden_layers={n}, as no layer of such a draft has keys"
            )
        text["num_kv_shared_layers"] = 0  # of this model's own layers
        return text_settings(hf | dict(model_type=whole, text_config=text))

    def __init__(self, directory: Path, target: Checkpoint):
        super().__init__(directory)
        whole = target.config
        with reading(directory / "config.json"):
            hf = read_json(directory / "config.json")
            width = value_of(hf, "backbone_hidden_size", int)
            for key, own, there in (
                ("backbone_hidden_size", width, whole.dim),
                ("vocab_size", self.config.vocab_size, whole.vocab_size),
            ):
                if own != there:
                    raise ValueError(
                        f"{key}={own}: the checkpoint's is {there}, and the draft is of another "
                        "model"
                    )
            layers = tuple(self.reading_of(i, whole) for i in range(self.config.n_layer))
            self.config = replace(self.config, layers=layers)
            self.places, clusters = (whole.n_layer,), {}
            if value_of(hf, "use_ordered_embeddings", bool, False):
                C = value_of(hf, "num_centroids", int, 2048)
                if whole.vocab_size % C:
                    raise ValueError(f"num_centroids={C} does not divide {whole.vocab_size} tokens")
                chosen = value_of(hf, "centroid_intermediate_top_k", int, 32, most=C)
                clusters = dict(clusters=C, chosen=chosen)
                if not self.config.tied:  # ranks have the embedding whole, and a part of the head
                    raise ValueError(
                        "use_ordered_embeddings=True: want an output head that is the embedding, "
                        "which tie_word_embeddings and the file do not say"
                    )
            self.options = SharedKVConfig(width, self.places, **clusters)
        self.order = self.read_order() if clusters else None

    def reading_of(self, i: int, target: Config) -> LayerConfig:
        """Layer i, as it reads a layer of the target."""
        config, layer = self.config, self.config.layers[i]
        source = source_of(target, layer)
        if source is None:
            kind = "full_attention" if layer.window is None else "sliding_attention"
            raise ValueError(
                f"layer {i} is of {kind}, and the checkpoint has no such layer with keys of its "
                "own: the draft is of another model"
            )
        (_, K, E), (_, *there) = config.heads(layer), target.heads(target.layers[source])
        if [K, E] != there:
            raise ValueError(
                f"layer {i} wants {K} key/value heads of {E} elements, and the checkpoint's layer "
                f"{source} has {there[0]} of {there[1]}: the draft is of another model"
            )
        # In transformers a window counts the slots before the one that it begins at, and that is
        # the last one with a key.
        window = layer.window and layer.window + 1
        return replace(layer, kv_of=source, key_is_value=False, window=window)

    def read_order(self) -> Tensor:
        n = self.config.vocab_size
        order = read_tensor(super().files(), ORDER, [(n,)], dtypes="I64 I32").long()
        if not order.sort().values.equal(torch.arange(n)):
            raise ValueError(f"{self.directory}: {ORDER}: want each of {n} tokens once")
        return order

    def files(self) -> dict[str, Place]:
        return {name: place for name, place in super().files().items() if name != ORDER}

    def make_model(self, config: Config) -> SharedKV:
        return SharedKV(config, self.options, self.order)

    def weights_of(self, config: Config) -> dict[str, Weight]:
        return shared_kv_weights(config, self.options)


def shared_kv_weights(config: Config, options: SharedKVConfig) -> dict[str, Weight]:
    """As checkpoint.hf_weights()."""
    D, W, C = config.dim, options.target_dim, options.clusters
    table = hf_weights(config) | {
        "pre_projection.weight": Weight("before.weight", 0, (D, 2 * W)),
        "post_projection.weight": Weight("behind.weight", 0, (W, D)),
    }
    if C:
        table["masked_embedding.centroids.weight"] = Weight("centroids.weight", 0, (C, D))
    return table


# The Drafter


class SharedKVDraft(Drafter):
    """target: the target's generate.Engine, which keeps its last hidden states."""

    def __init__(self, draft: SharedKV, target: Engine):
        super().__init__(target.model.config.vocab_size, target.max_seq_len)
        self.draft, self.target = draft, target

    def propose(self, text, last, k, n_slots):
        target, model = self.target, self.target.model
        # A CUDA graph serves texts of any length, so that it reads all slots.
        slots = model.slots if target.captures else target.slots(n_slots)
        at = last[:, None]
        states = model.norm(model.features[model.rows[: len(last)], at - 1])  # [B, 1, W]
        token, drafted, distributions = text.gather(1, at), [], []
        for _ in range(k):
            logits, states = self.draft(model.embedded(token), states, at, slots)
            chosen, q = target.twin(choose_draft)(logits, self.vocab_size, target.sampling)
            token = chosen[:, None]
            drafted.append(chosen)
            distributions.append(q)
        q = F.pad(torch.stack(distributions, 1), (0, 0, 0, 1))
        return torch.stack(drafted, 1), q, torch.full_like(last, k)


def make_shared_kv(model: SharedKV, target: Engine) -> SharedKVDraft:
    model.attach(target.model, target.limit)
    if any(isinstance(layer, QuantizedLinear) for layer in model.layers.modules()):
        # No kernels serve it.
        unpack_quantized(model, target.batch_size, target.limit, quiet=True)
    return SharedKVDraft(model, target)

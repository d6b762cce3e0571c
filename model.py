"""
A Llama-family decoder in plain PyTorch, and nothing else. README lists the families that it serves.

One forward serves prefill, decode, speculative verification and ragged batches. They differ only in
T and in the positions: each token carries its own position, writes its key and value into that slot
of the KV cache, and attends to the slots up to its own position. A slot is written before it
becomes visible. So right-padding and rejected drafts need no clean-up and no mask of their own:
what they left in the cache is overwritten before any token attends to it. Recurrent layers have a
cache that works alike, see DeltaCache, but want to know where padding begins.

Shapes: B batch, T new tokens, L cache length, D model dim, H query heads, K kv heads, E head dim, F
ffn dim, V vocabulary. In a recurrent layer: G key heads of E elements, H value heads of V elements,
C channels of the convolution. In latent attention: C elements of the latent that keys and values
come from, R elements of a head that turn, N that do not, V of a value. In a mixture of experts: X
experts, n of which a token takes; M rows, which are tokens or, n times as many, tokens at an expert
of theirs; matrices [N, K], of N outputs and K inputs. P elements of a per-layer embedding. Where a
letter has several meanings, it has that of the module it stands in.

What a new family of models brings is a field of Config or, where its layers differ, of LayerConfig.
hub/families.py reads it, and hub/checkpoint.py names the weights. fast/ leaves a
model to this file where a field that it does not know, also of Rope or MoEConfig, has another value
than its default.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = dict(silu=F.silu, gelu=partial(F.gelu, approximate="tanh"))
# Buffers, so that a CUDA graph finds them at fixed addresses; not persistent, so that no checkpoint
# holds them.
buffer = partial(nn.Buffer, persistent=False)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (RoPE, arXiv 2104.09864): pairs of a head's elements turn with the
    position.

    hub/families.py has the ways to stretch the frequencies for longer texts."""

    # Of each pair, in radians a position; the rest of a head does not turn.
    frequencies: tuple[float, ...] = ()
    scale: float = 1.0  # of cos and sin
    original: int = 0  # the positions that the model was first trained for
    # LongRoPE: the frequencies for texts that may go beyond `original`.
    long: tuple[float, ...] = ()
    # Ministral 3: queries are multiplied by 1 + q_growth * ln(1 + position // original).
    q_growth: float = 0.0


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: small feed-forward parts, of which each token takes a few (arXiv
    1701.06538)."""

    n_expert: int
    n_chosen: int  # of a token
    ffn_dim: int  # of an expert
    # The weights are a softmax over a token's experts alone, or over all.
    normalize: bool = True
    bias: bool = False  # of the router and the experts: gpt-oss
    # gpt-oss: gate is clamp[0] at most, up from -clamp[0] to clamp[0]; gate * sigmoid(clamp[1] *
    # gate) * (up + 1).
    clamp: tuple[float, float] | None = None
    # The ffn dim of one more expert that every token takes: Qwen3-Next. 0: there is none. Several
    # of them, as DeepSeek-V3 may have, are one whose ffn dim is the sum of theirs.
    shared_dim: int = 0
    # Each token weighs the shared expert by a sigmoid of its own; False, by 1: DeepSeek-V3
    shared_gate: bool = True
    # The mixture stands beside a dense part, and the two are summed: DenseAndMoE. Gemma 4
    beside_dense: bool = False
    # The router reads its rows normed, and an expert's weight is times a number of its own: Gemma 4
    scaled_router: bool = False
    # An expert's weight is the sigmoid of its logit, and no softmax's share; with normalize,
    # divided by the sum over the token's experts. A correction is added to choose the experts, and
    # is not in the weights. All in fp32: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2),
    # GLM-4.7-Flash.
    sigmoid: bool = False
    # Experts stand in so many groups, and a token takes its own from the n_chosen_group best. A
    # group is as good as its best two experts together.
    n_group: int = 1
    n_chosen_group: int = 1
    scale: float = 1.0  # of the weights, but for the shared expert's


@dataclass(frozen=True)
class DeltaConfig:
    """A recurrent layer, a gated delta net (arXiv 2412.06464): its state has a fixed size, however
    long the text."""

    n_key_head: int
    n_value_head: int  # a multiple of n_key_head: each key head serves as many value heads
    key_dim: int  # of a key head, and of the query that goes with it
    value_dim: int  # of a value head
    width: int = 4  # tokens that the convolution sees, a token's own included

    @property
    def channels(self) -> int:
        """Of the convolution: all heads' queries, keys and values."""
        return 2 * self.n_key_head * self.key_dim + self.n_value_head * self.value_dim


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): a token's keys and values come
    from a latent vector, and so may its queries. Each head has its own keys, but for the elements
    that turn: these are the same for all heads. Config.head_dim counts them; there are as many
    key/value heads as query heads."""

    dim: int  # of the latent that keys and values come from
    key_dim: int  # elements of a head's query and key that do not turn
    value_dim: int  # of a head
    q_dim: int = 0  # of the latent that queries come from; 0: they have none
    interleaved: bool = True  # rope turns element 2i with 2i + 1, and not i with i + R / 2
    norm_eps: float = 1e-6  # of the latents' norms


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None = None  # a token attends to the last `window` positions, its own included
    rope: Rope = Rope()  # this default: none, as in some layers of SmolLM3
    moe: MoEConfig | None = None  # None: the feed-forward part is dense
    delta: DeltaConfig | None = None  # None: attention; else a recurrent layer stands in its place
    n_kv_head: int | None = None  # None, here and below: Config's. Gemma 4
    head_dim: int | None = None
    ffn_dim: int | None = None
    # The value is the key as it is before its norm and rope: Gemma 4
    key_is_value: bool = False
    # The number of an earlier layer whose keys and values this one reads. It makes none: Gemma 4
    kv_of: int | None = None
    latent: LatentConfig | None = None  # attention's keys and values come from a latent vector


@dataclass(frozen=True)
class Config:
    """A family of models is a set of values of these fields, and hub/families.py knows them by the
    model_type of config.json; hub/checkpoint.py names the weights. Where a family wants something
    new, it is one more field, whose default turns it off, and the line that uses it. A Llama whose
    last hidden state is scaled to one length, as nGPT's is (arXiv 2410.01131), is three places:

        # model.py, below: logits_scale: float = 1.0
        state_length: float | None = None  # of the last hidden state, behind its norm

        # model.py, above: return self.capped(
        if length := self.config.state_length:
            x = F.normalize(x, dim=-1) * length

        # hub/families.py, below: "llama": {},
        "unit_llama": dict(state_length=3.0),

    A value that config.json gives is read in config_from_hf() there. fast/ does not know the field:
    where it has another value, this file decodes."""

    dim: int
    layers: tuple[LayerConfig, ...]
    n_head: int
    n_kv_head: int
    head_dim: int  # not always dim / n_head: Qwen3 and Mistral-Nemo set it apart
    ffn_dim: int
    vocab_size: int
    context: int  # the most positions that the model was trained for
    norm_eps: float = 1e-5
    qkv_bias: bool = False  # Qwen2, gpt-oss
    o_bias: bool = False  # gpt-oss
    sinks: bool = False  # each head has a score that takes its share of the softmax: gpt-oss
    # RMSNorm of q and k: of each "head" (Qwen3, Gemma 3), of each head and "weightless" (Muse
    # Glimmer), or of the "whole" (OLMo).
    qk_norm: str | None = None
    v_norm: bool = False  # weightless RMSNorm of each head's value: Gemma 4
    # RMSNorm of what goes into attention and the feed-forward part; not in OLMo.
    pre_norm: bool = True
    # What attention gives is multiplied by sigmoid(gate), which wqkv makes of each q head: Qwen3.5
    attention_gate: bool = False
    gate_apart: bool = False  # the gates are wqkv's last outputs, a matrix in files: Muse Glimmer
    post_norm: bool = False  # RMSNorm of what comes out of them: OLMo, Gemma 3
    post_norm_eps: float | None = None  # of these norms; None: norm_eps. Muse Glimmer
    # Norms' weights are fp32, and so is the product with them: OLMo, Gemma 3, gpt-oss.
    norm_fp32: bool = False
    norm_offset: float = 0.0  # files hold the norms' weights less this: Gemma 3
    plain_last_norm: bool = False  # but the last norm's as it is: Muse Glimmer
    fused_files: bool = False  # files hold q, k and v as one tensor, and gate and up: Phi
    # Files hold a recurrent layer's w_in and w_gates by key head: Qwen3-Next
    delta_by_head: bool = False
    # Names in files: a layer's mixture, its router and, if each expert has tensors of its own,
    # their gate, up and down, such as ("mlp", "gate", "gate_proj", "up_proj", "down_proj").
    expert_files: tuple[str, ...] = ()
    activation: str = "silu"
    tied: bool = False  # the output head is the embedding: Llama 3.2, SmolLM2, small Qwens
    # Of q k^T; None: E ** -0.5, where E counts all elements of a key. Granite, Gemma 3, DeepSeek-V3
    attention_scale: float | None = None
    embedding_scale: float = 1.0  # Granite, Gemma 3
    embedding_norm: bool = False  # weightless RMSNorm of the embedding: Muse Glimmer
    residual_scale: float = 1.0  # of what attention and the feed-forward part add: Granite
    layer_scale: bool = False  # a layer's whole output is times a number of its own: Gemma 4
    logits_scale: float = 1.0  # of what goes into the output head: Granite, Muse Glimmer
    logits_cap: float | None = None  # logits become cap * tanh(logits / cap): Gemma 4, Muse Glimmer
    # P of PerLayerEmbedding, and the rows of its table; 0: there is none. Gemma 4's E models
    ple_dim: int = 0
    ple_vocab_size: int = 0

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    def heads(self, layer: LayerConfig) -> tuple[int, int, int]:
        """H, K, E of a layer's attention."""
        return self.n_head, layer.n_kv_head or self.n_kv_head, layer.head_dim or self.head_dim


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # nn.Embedding() would draw normal numbers, for which the meta device imports torch._dynamo,
        # 0.7 s a start.
        self.embed = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.dim), freeze=False
        )
        self.embed_norm = BareNorm(config.dim, config) if config.embedding_norm else nn.Identity()
        self.ple = PerLayerEmbedding(config) if config.ple_dim else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config.dim, config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def setup(
        self,
        max_seq_len: int,
        batch_size: int = 0,
        features: tuple[int, ...] = (),
        cache: str = "16-bit",
        spare: int = 0,
    ):
        """Makes rope tables for texts of max_seq_len tokens and, in each layer, a KV cache
        [batch_size, K, L, E], or a DeltaCache. L is max_seq_len, and `spare` slots more for what
        stands behind a text: padding, drafts.

        The weights are in place by then: it takes their device and dtype. Another call makes all
        anew. Without a batch_size there is no cache, and the tokens of a forward, at positions 0 to
        T - 1, attend to each other alone (training).

        features: the places whose hidden states are kept in self.features [batch_size, L, n D], by
        position: place i is before layer i, place n_layer after the last one. A draft head reads
        them, and so may whoever wants to look inside. They need a batch_size. cache: of CACHES."""
        config, weight = self.config, self.embed.weight
        device, dtype = weight.device, weight.dtype
        L = max_seq_len + spare
        # Each once, with the size of its heads.
        ropes = {layer.rope: config.heads(layer)[-1] for layer in config.layers}
        self.ropes = nn.ModuleList(
            RopeTable(rope, E, max_seq_len, L, device) for rope, E in ropes.items()
        )
        # Rounded, as Gemma's own code rounds it.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        if self.ple is not None:
            self.ple.scale = torch.tensor(config.ple_dim**0.5, dtype=dtype).item()
        self.slots = buffer(torch.arange(L, device=device))  # [L]
        self.rows = buffer(torch.arange(batch_size, device=device)[:, None])  # [B, 1]
        read_by_others = {layer.kv_of for layer in config.layers}
        for i, layer in enumerate(self.layers):
            shape, make = cache_shape(config, layer.config, batch_size, L), CACHES[cache]
            if delta := layer.config.delta:
                shape, make = (batch_size, delta), DeltaCache
            source = layer.config.kv_of
            if source is not None:
                layer.attn.cache = self.layers[source].attn.cache
            elif batch_size:
                layer.attn.cache = make(shape, device, dtype)
            else:
                layer.attn.cache = LastKV() if i in read_by_others else None
        if any(place not in range(config.n_layer + 1) for place in features):
            raise ValueError(f"features={features}: want numbers of layers, 0 to {config.n_layer}")
        self.places = features
        shape = batch_size, L, len(features) * config.dim
        self.features = buffer(torch.zeros(shape, device=device, dtype=dtype))

    def arrange_rows(self, rows: list[int], n: int):
        """The cache's first rows, and the features', become what these rows are, as far as their
        first n slots: [0, 0, 1, 1] makes two samples of each of two prompts."""
        rows = torch.tensor(rows, device=self.rows.device)
        for layer in self.layers:
            if layer.config.kv_of is None:  # each cache once
                layer.attn.cache.arrange_rows(rows, n)
        self.features[: len(rows), :n] = self.features[rows, :n]

    def states(self) -> list[Tensor]:
        """What goes with a text's end, and not by the position alone: all that recurrent layers
        hold. Copied, and copied back, they go back to where they were."""
        return [
            part
            for layer in self.layers
            if layer.config.delta
            for part in layer.attn.cache.buffers()
        ]

    def oldest(self, n: int) -> int:
        """The first token that a forward may begin with, once n tokens have been read, padding not
        counted but rejected drafts: 0 but for recurrent layers."""
        return max(layer.attn.cache.oldest(n) for layer in self.layers)

    def forward(
        self,
        tokens,
        positions,
        slots: Tensor | None = None,
        last: Tensor | None = None,
        inputs: Tensor | None = None,
        ends: Tensor | None = None,
    ):
        """tokens [B, T], positions [B, T] or [1, T] -> logits [B, T, V] or, with last [B], of those
        columns [B, V]. A row's positions follow one another.

        slots: a prefix of self.slots that covers all positions. Attention reads only these slots of
        the cache. fast/'s kernels need none: they go by the positions. inputs: what the first layer
        reads in the place of the tokens' embeddings [B, T, D]. ends [B]: columns at these positions
        and behind are padding; None: there is none. Attention does not ask, recurrent layers do."""
        rows = self.rows[: len(tokens)]  # [B, 1]; empty without a cache
        if slots is None:
            slots = self.slots if len(rows) else self.slots[: tokens.shape[1]]
        turns = {table.rope: table(positions) for table in self.ropes}
        masks = {
            window: visible(slots, positions, window)
            for window in dict.fromkeys(layer.window for layer in self.config.layers)
        }
        x = self.embedded(tokens) if inputs is None else inputs  # [B, T, D]
        own = None if self.ple is None else self.ple(tokens, x)  # [B, T, n_layer, P]
        run = compiled_once
        if torch.is_grad_enabled():
            # Torch 2.11 to 2.13 computes wrong gradients through nested regions.
            run = nn.Module.__call__
        for i, layer in enumerate(self.layers):
            self.keep(i, x, rows, positions)
            mask = masks[layer.config.window]
            more = {} if own is None else dict(own=own[:, :, i])
            x = run(layer, x, positions, *turns[layer.config.rope], mask, rows, ends, **more)
        self.keep(len(self.layers), x, rows, positions)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last]  # [B, D]
        x = self.norm(x) * self.config.logits_scale
        return self.capped(self.head(x))

    def capped(self, logits):
        cap = self.config.logits_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def embedded(self, tokens):
        """[B, T] -> [B, T, D]"""
        x = self.embed_norm(self.embed(tokens))
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def keep(self, place: int, x, rows, positions):
        """Keeps hidden states x [B, T, D], if setup() was asked for those of this place."""
        if place in self.places:
            n, D = self.places.index(place), self.config.dim
            self.features[:, :, n * D : (n + 1) * D][rows, positions] = x


@torch.compiler.nested_compile_region
def compiled_once(layer, *inputs, **more):
    """Where torch.compile has the whole forward (decode), all layers share the code of one: SmolLM2
    is ready in 15 s, not 61 s, on 2 CPU cores. Elsewhere it is a call."""
    return layer(*inputs, **more)


def always(condition) -> bool:
    """Whether this holds for all sizes that the compiled code is to serve: one code serves prompts
    of all lengths."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def visible(slots, positions, window: int | None):
    """Which slots [L] tokens at positions [B, T] attend to: a mask [B, 1, T, L]."""
    at = positions[:, None, :, None]
    mask = slots <= at
    if window:
        mask = mask & (slots > at - window)
    return mask


class Block(nn.Module):
    def __init__(self, config: Config, layer: LayerConfig):
        super().__init__()
        self.config = layer
        self.scale = config.residual_scale
        norm = partial(RMSNorm, config.dim, config)
        before = norm if config.pre_norm else nn.Identity
        after = partial(norm, eps=config.post_norm_eps) if config.post_norm else nn.Identity
        self.attn_norm = before()
        self.attn = attention_of(config, layer)
        self.attn_post_norm = after()
        both = layer.moe and layer.moe.beside_dense  # which have norms of their own
        self.ffn_norm = nn.Identity() if both else before()
        self.ffn_post_norm = after()
        if both:
            self.ffn = DenseAndMoE(config, layer)
        elif layer.moe:
            self.ffn = MoE(config, layer.moe)
        else:
            self.ffn = FeedForward(config, layer.ffn_dim or config.ffn_dim)
        self.ple = PerLayerGate(config) if config.ple_dim else None
        self.layer_scale = nn.Parameter(torch.ones(1)) if config.layer_scale else None

    def forward(self, x, *where, own=None):
        """x [B, T, D] -> [B, T, D]. where: positions, cos, sin, mask, rows, ends, as
        Attention.attend() and DeltaNet.mix() have them. own [B, T, P]: the layer's part of
        PerLayerEmbedding, if the model has one."""
        y = self.attn(self.attn_norm(x), *where)
        x = torch.add(x, self.attn_post_norm(y), alpha=self.scale)
        y = self.ffn(self.ffn_norm(x))
        x = torch.add(x, self.ffn_post_norm(y), alpha=self.scale)
        return self.end(x, own)

    def end(self, x, own):
        """What comes behind both halves: x [B, T, D] -> [B, T, D]."""
        if self.ple is not None:
            x = self.ple(x, own)
        return x if self.layer_scale is None else x * self.layer_scale


class PerLayerEmbedding(nn.Module):
    """What a token brings to each layer beside the residual stream, P elements: from a table of its
    own, and from the token's embedding."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_layer, width = config.n_layer, config.n_layer * config.ple_dim
        self.table = nn.Embedding.from_pretrained(
            torch.empty(config.ple_vocab_size, width), freeze=False
        )
        self.project = nn.Linear(config.dim, width, bias=False)
        self.norm = RMSNorm(config.ple_dim, config)  # of each layer's
        self.scale = 1.0  # P ** 0.5, rounded: see Transformer.setup()

    def forward(self, tokens, x):
        """tokens [B, T] and their embeddings [B, T, D] -> [B, T, n_layer, P]"""
        y = self.norm(self.project(x) * x.shape[-1] ** -0.5)
        y = (y + self.table(tokens) * self.scale) * 2**-0.5
        return y.unflatten(-1, (self.n_layer, -1))


class PerLayerGate(nn.Module):
    """Adds a layer's part of PerLayerEmbedding to the residual stream, whose gate it passes."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ple_dim, bias=False)
        self.up = nn.Linear(config.ple_dim, config.dim, bias=False)
        self.norm = RMSNorm(config.dim, config)
        self.activation = config.activation

    def forward(self, x, own):
        """x [B, T, D], own [B, T, P] -> [B, T, D]"""
        y = self.up(ACTIVATIONS[self.activation](self.gate(x)) * own)
        return x + self.norm(y)


def attention_of(config: Config, layer: LayerConfig) -> nn.Module:
    """Attention, or what stands in its place."""
    if layer.delta:
        return DeltaNet(config, layer.delta)
    return LatentAttention(config, layer) if layer.latent else Attention(config, layer)


class Attention(nn.Module):
    def __init__(self, config: Config, layer: LayerConfig):
        super().__init__()
        self.rope = layer.rope
        H, K, E = config.heads(layer)
        self.head_dim = E
        self.scale = E**-0.5 if config.attention_scale is None else config.attention_scale
        self.sizes = [H * E, K * E, K * E]  # of q, k, v, if the layer makes them
        if layer.key_is_value:
            del self.sizes[2:]
        if layer.kv_of is not None:
            del self.sizes[1:]
        self.gated, self.gate_apart = config.attention_gate, config.gate_apart
        outputs = sum(self.sizes) + self.gated * self.sizes[0]
        self.wqkv = nn.Linear(config.dim, outputs, bias=config.qkv_bias)
        self.wo = nn.Linear(self.sizes[0], config.dim, bias=config.o_bias)
        self.sinks = nn.Parameter(torch.zeros(config.n_head)) if config.sinks else None
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.qk_norm:
            norm = BareNorm if config.qk_norm == "weightless" else RMSNorm
            q, k = (H * E, K * E) if config.qk_norm == "whole" else (E, E)
            self.q_norm = norm(q, config)
            if layer.kv_of is None:
                self.k_norm = norm(k, config)
        self.v_norm = BareNorm(E, config) if config.v_norm else nn.Identity()
        self.cache = None  # a KVCache, made by Transformer.setup()

    def forward(self, x, *where):
        return self.wo(self.attend(self.wqkv(x), *where))

    def attend(self, qkv, positions, cos, sin, mask, rows, ends=None):
        """qkv [B, T, (H + 2K) E], positions [B, T] or [1, T], cos and sin of these [B, T, 1, E],
        mask [B, 1, T, L], and the rows of the cache [B, 1] -> [B, T, H E]. With gates qkv has H E
        more, behind each q head its gate or, gate_apart, all behind v. It has less where the layer
        makes no v, or no k either."""
        gate = None
        if self.gated:
            qkv, gate = self.split_gates(qkv)
        q, k, v = self.rotate(qkv, positions, cos, sin)
        if self.cache is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            if k is not None:
                self.cache.write(k, v, rows, positions)
            k, v = self.cache.read(rows, mask.shape[-1])  # [B, K, L, E]
        if self.sinks is not None:
            q, k, v, mask = self.with_sinks(q, k, v, mask)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, mask, scale=self.scale, enable_gqa=True
        )
        y = y.transpose(1, 2)[..., : self.head_dim]  # without what with_sinks() added to a head
        return y.flatten(2) if gate is None else y.flatten(2) * torch.sigmoid(gate)

    def split_gates(self, qkv):
        """[B, T, (2H + 2K) E], each q head's gate behind it or all of them last -> qkv [B, T, (H +
        2K) E] and the gates [B, T, H E]."""
        if self.gate_apart:
            return qkv.split([sum(self.sizes), self.sizes[0]], dim=-1)
        q, *kv = qkv.split([2 * self.sizes[0], *self.sizes[1:]], dim=-1)
        q, gate = q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)  # [B, T, H, E]
        return torch.cat((q.flatten(-2), *kv), dim=-1), gate.flatten(-2)

    def with_sinks(self, q, k, v, mask):
        """One more slot, whose value is 0 and whose score is a head's sink.

        q gets 8 elements, each the sink, and the slot's key has 1 / 8 / scale in each. Its score
        then is scale * (8 * sink * 1 / 8 / scale) = sink. There are 8 elements and 8 slots, of
        which 7 are masked, because SDPA wants multiples of 8."""
        sinks = self.sinks[:, None].expand(*q.shape[:-1], 8)  # [B, T, H, 8]
        k, v = (F.pad(x, (0, 8, 0, 8)) for x in (k, v))  # [B, K, L + 8, E + 8]
        k[:, :, -8, -8:] = 1 / 8 / self.scale
        q = torch.cat((q, sinks), dim=-1)
        mask = F.pad(mask, (0, 1), value=True)
        return q, k, v, F.pad(mask, (0, 7))

    def rotate(self, qkv, positions, cos, sin):
        """qkv [B, T, (H + 2K) E] -> q [B, T, H, E], k and v [B, T, K, E]; cos, sin [B, T, 1, E]. k
        and v are None where the layer makes none.

        A norm splits its input by the length of its weight: heads, or the whole."""
        q, *kv = qkv.split(self.sizes, dim=-1)
        heads, pairs = (-1, self.head_dim), len(self.rope.frequencies)
        q = turn(self.q_norm(q).unflatten(-1, heads), cos, sin, pairs)
        if self.rope.q_growth:
            growth = 1 + self.rope.q_growth * torch.log1p(positions // self.rope.original)  # [B, T]
            q = q * growth[:, :, None, None].type_as(q)
        if not kv:
            return q, None, None
        k, v = kv[0], kv[-1]  # the same where the key is the value
        k = turn(self.k_norm(k).unflatten(-1, heads), cos, sin, pairs)
        return q, k, self.v_norm(v).unflatten(-1, heads)


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): see LatentConfig.

    w_in makes of a token the latent of its queries, or the queries, and the latent of its keys and
    values, beside the one key's part that turns. wq makes all heads' queries of their latent. wkv
    makes of the other latent, in each head, a key's part that does not turn, and a value:

        q [N + R], of which R turn    k = (Wk c, r) [N + R]    v = Wv c [V]    c [C], r [R]

    The cache holds c, normed, and r, turned, and nothing for each head: of GLM-4.7-Flash 576
    numbers a token, where 20 heads' keys and values are 10,240. Two forms attend to them, with the
    same result:

        open        k and v are made of all slots in use; then comes attention as usual
        absorbed    q k = (Wk^T q) c + q r, and the sum of shares times v is Wv times the sum of
                    shares times c. So it is attention with one key/value head, whose keys are
                    (c, r) and whose values are c. Wk and Wv are views of wkv's weight.

    Decode and verification, a few tokens, take the absorbed form: it reads the C + R numbers of a
    slot and makes nothing of them. Prompts take the open form. It makes H (N + V) numbers of a
    slot, by C products each, but once for all tokens; then a token has N + R + V products a slot
    and head, the absorbed form 2 C + R.

    Wk^T q sums over rows of wkv, which no product of codes does, as their groups lie along C. So
    wkv is in 16 bits, whatever the others are (quantize.LEFT_OUT), and neither form has a copy of
    it."""

    def __init__(self, config: Config, layer: LayerConfig):
        super().__init__()
        self.latent = latent = layer.latent
        self.n_head, self.rope_dim = config.n_head, config.head_dim
        self.scale = config.attention_scale
        if self.scale is None:
            self.scale = (latent.key_dim + self.rope_dim) ** -0.5
        queries = self.n_head * (latent.key_dim + self.rope_dim)
        self.sizes = [latent.q_dim or queries, latent.dim, self.rope_dim]
        self.w_in = nn.Linear(config.dim, sum(self.sizes), bias=False)
        self.q_norm, self.wq = nn.Identity(), nn.Identity()
        if latent.q_dim:
            self.q_norm = RMSNorm(latent.q_dim, config, latent.norm_eps)
            self.wq = nn.Linear(latent.q_dim, queries, bias=False)
        self.kv_norm = RMSNorm(latent.dim, config, latent.norm_eps)
        outputs = self.n_head * (latent.key_dim + latent.value_dim)
        self.wkv = nn.Linear(latent.dim, outputs, bias=False)
        self.wo = nn.Linear(self.n_head * latent.value_dim, config.dim, bias=False)
        # The tokens for which the absorbed form has no more products.
        opened = latent.key_dim + latent.value_dim  # numbers of a slot and head
        self.most_absorbed = latent.dim * opened // max(1, 2 * latent.dim - opened)
        self.cache = None  # a KVCache, made by Transformer.setup()

    def forward(self, x, *where):
        return self.wo(self.attend(self.w_in(x), *where))

    def attend(self, made, positions, cos, sin, mask, rows, ends=None):
        """made [B, T, any]: w_in's; the others as Attention.attend() has them -> [B, T, H V]"""
        _, c, r = made.split(self.sizes, dim=-1)
        q = self.wq(self.queries_latent(made)).unflatten(-1, (self.n_head, -1))  # [B, T, H, N + R]
        q, q_turned = q.split([self.latent.key_dim, self.rope_dim], dim=-1)
        c, r = self.kv_norm(c)[:, :, None], r[:, :, None]  # [B, T, 1, C], [B, T, 1, R]
        q_turned, r = (self.turn(x, cos, sin) for x in (q_turned, r))
        if self.cache is None:
            c, r = c.transpose(1, 2), r.transpose(1, 2)
        else:
            self.cache.write(r, c, rows, positions)
            r, c = self.cache.read(rows, mask.shape[-1])  # [B, 1, L, R], [B, 1, L, C]
        few = always(made.shape[1] <= self.most_absorbed)
        y = (self.absorbed if few else self.opened)(q, q_turned, c, r, mask)  # [B, T, H, V]
        return y.flatten(2)

    def queries_latent(self, made):
        """What wq reads of what w_in made."""
        return self.q_norm(made[..., : self.sizes[0]])

    def turn(self, x, cos, sin):
        """x [B, T, any, R] by the angles. Its order may change, as it does alike in queries and
        keys: even elements come first, and each turns with an odd one."""
        if self.latent.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return turn(x, cos, sin, self.rope_dim // 2)

    def opened(self, q, q_turned, c, r, mask):
        """q [B, T, H, N], q_turned [B, T, H, R], c [B, 1, L, C], r [B, 1, L, R] -> [B, T, H, V]"""
        kv = self.wkv(c[:, 0]).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        k, v = kv.split([self.latent.key_dim, self.latent.value_dim], dim=-1)  # [B, H, L, N or V]
        k = torch.cat((k, r.expand(-1, self.n_head, -1, -1)), dim=-1)
        q = torch.cat((q, q_turned), dim=-1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return y.transpose(1, 2)

    def absorbed(self, q, q_turned, c, r, mask):
        """As opened(). All heads' queries are so many tokens of one head."""
        B, T, H, _ = q.shape
        wk, wv = self.matrices()
        q = torch.cat((torch.einsum("bthn,hnc->bthc", q, wk), q_turned), dim=-1)
        q = q.flatten(1, 2)[:, None]  # [B, 1, T H, C + R]
        mask = mask.repeat_interleave(H, dim=2)
        k = torch.cat((c, r), dim=-1)
        y = F.scaled_dot_product_attention(q, k, c, mask, scale=self.scale)  # [B, 1, T H, C]
        return torch.einsum("bthc,hvc->bthv", y.view(B, T, H, -1), wv)

    def matrices(self):
        """Each head's Wk [H, N, C] and Wv [H, V, C], views of wkv's weight."""
        weight = self.wkv.weight.unflatten(0, (self.n_head, -1))
        return weight.split([self.latent.key_dim, self.latent.value_dim], dim=1)


class KVCache(nn.Module):
    """The keys and values of a layer: k, v [B, K, L, E]. Its buffers begin with [B, K, L].

    Of latent attention, which has no keys and values of its own until they are made, k is the part
    that turns [B, 1, L, R] and v the latent [B, 1, L, C]: see cache_shape().

    int8: whether keys, and whether values, are int8. Then each token's head has a scale [B, K, L],
    its largest element / 127. All that attention reads has been int8, the new token's key and value
    too: so a prompt in chunks, verification and a batch give what decode alone gives.

    Another kind is a subclass with its own write() and read(), and a name in CACHES; --kv-cache has
    it then, and fast/ leaves attention to this file. Keys and values as e4m3 are two places:

        # model.py, below: "16-bit": KVCache,
        "fp8": Float8Cache,

        # model.py, above: # The kinds of KV cache.
        class Float8Cache(KVCache):
            def __init__(self, shape, device, dtype):
                super().__init__(shape, device, torch.uint8)
                self.dtype = dtype

            def write(self, k, v, rows, positions):
                k, v = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (k, v))
                super().write(k, v, rows, positions)

            def read(self, rows, n):
                k, v = super().read(rows, n)
                return [x.view(torch.float8_e4m3fn).to(self.dtype) for x in (k, v)]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        int8: tuple[bool, bool] = (False, False),
    ):
        """shape: B, K, L, E and, where a value's elements are more or fewer than a key's, these."""
        super().__init__()
        self.dtype = dtype
        self.k, self.v = (
            buffer(torch.zeros(*shape[:3], E, device=device, dtype=torch.int8 if small else dtype))
            for E, small in zip((shape[3], shape[-1]), int8)
        )
        self.k_scale, self.v_scale = (
            buffer(torch.zeros(shape[:3], device=device)) if small else None for small in int8
        )

    @staticmethod
    def bytes_per_token(
        config: Config, dtype: torch.dtype, kind: str = "16-bit", ranks: int = 1
    ) -> int:
        """Of all layers that have keys and values of their own, on the rank with the most heads, of
        which each has one at least. kind: of CACHES."""
        own = [of for of in config.layers if of.delta is None and of.kv_of is None]
        shapes = [cache_shape(config, layer) for layer in own]
        shapes = [(B, -(-K // ranks), *rest) for B, K, *rest in shapes]
        caches = [CACHES[kind](shape, torch.device("meta"), dtype) for shape in shapes]
        return sum(part.nbytes for cache in caches for part in cache.buffers())

    @staticmethod
    def oldest(n: int) -> int:
        """The first token that a forward may begin with, once n tokens have been read."""
        return 0

    def arrange_rows(self, rows: Tensor, n: int):
        """As Transformer.arrange_rows(), of this layer."""
        for part in self.buffers():
            part[: len(rows), :, :n] = part[rows, :, :n]

    def write(self, k, v, rows, positions):
        """k, v [B, T, K, E]. Each of the rows [B, 1] writes at its own positions [B, T].

        cache[rows, :, positions] is [B, T, K, E], as x is: two indices with a slice between them
        come first."""
        for cache, scales, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if scales is not None:
                x, scales[rows, :, positions] = to_int8(x)
            cache[rows, :, positions] = x

    def read(self, rows, n: int):
        """The first len(rows) rows as far as their first n slots: k, v [B, K, n, E]."""
        found = []
        for cache, scales in ((self.k, self.k_scale), (self.v, self.v_scale)):
            x = cache[: len(rows), :, :n]
            if scales is not None:
                x = (x * scales[: len(rows), :, :n, None]).to(self.dtype)
            found.append(x)
        return found


def cache_shape(config: Config, layer: LayerConfig, B: int = 1, L: int = 1) -> tuple[int, ...]:
    """Of a KVCache of B rows of L tokens."""
    _, K, E = config.heads(layer)
    if layer.latent:
        return B, 1, L, E, layer.latent.dim
    return B, K, L, E


# The kinds of KV cache. "16-bit", without --kv-cache: in the model's dtype, whichever that is.
CACHES = {
    "16-bit": KVCache,
    "int8": partial(KVCache, int8=(True, True)),
    "int8-values": partial(KVCache, int8=(False, True)),
}


class LastKV(nn.Module):
    """In a KVCache's place where there is none: what a layer's forward made goes on to later layers
    that read its keys and values."""

    def write(self, k, v, rows, positions):
        self.k, self.v = k.transpose(1, 2), v.transpose(1, 2)

    def read(self, rows, n: int):
        return self.k, self.v


def to_int8(x):
    """x [..., E] -> codes int8 [..., E] and scales fp32 [...]."""
    scale = x.float().abs().amax(-1) / 127
    return (x / scale.clamp(min=1e-30)[..., None]).round().to(torch.int8), scale


class DeltaNet(nn.Module):
    """A gated delta net in Attention's place (arXiv 2412.06464): a state for each value head, a
    matrix that maps keys to values, in the place of all past keys and values.

    Each token lets the state forget a part, and then corrects what it maps the token's key to:

        S <- decay S;  S <- S + k (beta (v - S^T k))^T;  y = S^T q         S [E, V], k, q [E], v [V]

    where decay is between 0 and 1; below, the name is for its logarithm. Here that is computed for
    BLOCK tokens at once, see delta_rule(). DeltaCache says what is kept between two forwards, and
    why a rejected draft spoils nothing.

    w_in makes q and k of all key heads, v and z of all value heads, w_gates b and a of each value
    head. A depthwise convolution over the last tokens goes over q, k and v."""

    def __init__(self, config: Config, delta: DeltaConfig):
        super().__init__()
        self.delta = delta
        G, H = delta.n_key_head, delta.n_value_head
        values = H * delta.value_dim
        self.sizes = [G * delta.key_dim, G * delta.key_dim, values]  # of q, k, v
        self.w_in = nn.Linear(config.dim, delta.channels + values, bias=False)
        self.w_gates = nn.Linear(config.dim, 2 * H, bias=False)
        self.filter = nn.Parameter(torch.empty(delta.channels, delta.width))  # the newest last
        self.log_a = nn.Parameter(torch.empty(H, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(H, dtype=torch.float32))
        self.norm = nn.Parameter(torch.empty(delta.value_dim))
        self.eps = config.norm_eps
        self.wo = nn.Linear(values, config.dim, bias=False)
        # Tokens before a token that its output depends on, beside the state before its block.
        self.n_before = BLOCK - 1 + delta.width - 1
        self.shape_of_states = 2, H, delta.key_dim, delta.value_dim
        self.cache = None  # a DeltaCache, made by Transformer.setup()

    def forward(self, x, *where):
        return self.wo(self.mix(self.w_in(x), self.w_gates(x), *where))

    def mix(self, qkvz, gates, positions, cos, sin, mask, rows, ends=None):
        """qkvz [B, T, C + H V], gates [B, T, 2H], positions [B, T] or [1, T], the rows of the cache
        [B, 1], ends [B] or None: see Transformer.forward() -> [B, T, H V]"""
        B, T, _ = qkvz.shape
        qkv, z = qkvz.split([self.delta.channels, self.sizes[-1]], dim=-1)
        first = positions[:, 0].expand(B)
        n = torch.full_like(first, T) if ends is None else (ends - first).clamp(0, T)
        new = torch.cat((qkv, gates), dim=-1)  # [B, T, C + 2H]
        if self.cache is None:
            before = new.new_zeros(B, self.n_before, new.shape[-1])
            states = torch.zeros(B, *self.shape_of_states, device=new.device)
        else:
            before, states = self.cache.before(first, self.n_before), self.cache.states[:B]
        inputs = torch.cat((before, new), dim=1)
        qkv, gates = inputs.split([self.delta.channels, gates.shape[-1]], dim=-1)
        n_conv = qkv.shape[1] - self.delta.width + 1
        taps = enumerate(self.filter.float().unbind(-1))
        qkv = sum(qkv[:, i : i + n_conv].float() * tap for i, tap in taps)
        qkv = F.silu(qkv.type_as(z))  # [B, BLOCK - 1 + T, C]
        gates = gates[:, self.delta.width - 1 :]

        # Columns from the beginning of first's block on: whole blocks, enough for any `into`.
        L = (T + BLOCK - 2) // BLOCK * BLOCK + BLOCK
        into = first % BLOCK  # tokens of the block that are there already
        at = (BLOCK - 1 - into)[:, None] + torch.arange(L, device=first.device)  # [B, L]
        at = at.clamp(max=qkv.shape[1] - 1)[:, :, None]
        q, k, v = qkv.gather(1, at.expand(-1, -1, qkv.shape[-1])).float().split(self.sizes, -1)
        b, a = gates.gather(1, at.expand(-1, -1, gates.shape[-1])).float().chunk(2, dim=-1)
        beta = torch.sigmoid(b)  # [B, L, H]
        decay = -self.log_a.exp() * F.softplus(a + self.dt_bias)
        q, k = (unit(x.unflatten(-1, (-1, self.delta.key_dim))) for x in (q, k))  # [B, L, G, E]
        q = q * self.delta.key_dim**-0.5
        v = v.unflatten(-1, (-1, self.delta.value_dim))  # [B, L, H, V]
        rule = opaque_delta_rule if torch.compiler.is_compiling() else delta_rule
        y, states = rule(q, k, v, decay, beta, states, first, n)
        if self.cache is not None:
            self.cache.write(new, first, n)
            self.cache.states[:B] = states
        own = into[:, None] + torch.arange(T, device=first.device)  # [B, T]
        y = y.gather(1, own[:, :, None, None].expand(-1, -1, *y.shape[2:]))  # [B, T, H, V]
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm
        y = y.flatten(2) * F.silu(z.float())
        return y.type_as(z)


def unit(x):
    """x [..., E] to unit length."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


BLOCK = 32  # tokens between two states of a DeltaCache: at least as many as are drafted at once
# Tokens whose inputs it holds: two blocks, and what the convolution sees before, width - 1.
RING = 2 * BLOCK + 8


class DeltaCache(nn.Module):
    """What a recurrent layer keeps of each row:

        states [B, 2, H, E, V]    the states at the last two ends of blocks: that before token
                                  n BLOCK lies in place n % 2. fp32
        inputs [B, RING, C + 2H]  what w_in and w_gates made of the last RING tokens: that of token
                                  t lies in place t % RING

    A forward begins with the state before its first token's block, and reads this block's earlier
    tokens from the ring. When a block is complete, the state behind it is written. What would come
    from before token 0 counts as zero, so that nothing is cleared for a new text.

    So it is with a recurrent layer as it is with a KV cache: all lies in places that go by the
    position, and what a rejected draft left is overwritten before it is read. Other than there it
    also erased something, but nothing that is still needed: if at most BLOCK tokens are rejected,
    the state before the block to go on from is in the other place, and this block's inputs are in
    the ring.

        62 tokens read    the state before 32, the inputs of 0 to 61
        5 drafted         block 32 to 63 is complete with two drafts: the state before 64 is written
        1 kept            the next forward begins with token 63: with the state before 32, and the
                          inputs of 32 to 62. It writes the state before 64 once more.

    Whoever has read n tokens may go back to oldest(n). Whatever was read and left behind in
    between, a token's output comes from the same state and the same inputs."""

    def __init__(self, shape: tuple[int, DeltaConfig], device: torch.device, dtype: torch.dtype):
        super().__init__()
        B, delta = shape
        H = delta.n_value_head
        states = B, 2, H, delta.key_dim, delta.value_dim
        self.states = buffer(torch.zeros(states, device=device, dtype=torch.float32))
        inputs = B, RING, delta.channels + 2 * H
        self.inputs = buffer(torch.zeros(inputs, device=device, dtype=dtype))

    @staticmethod
    def bytes_per_row(config: Config, dtype: torch.dtype) -> int:
        """Of all recurrent layers."""
        meta = torch.device("meta")
        caches = [
            DeltaCache((1, layer.delta), meta, dtype) for layer in config.layers if layer.delta
        ]
        return sum(part.nbytes for cache in caches for part in cache.buffers())

    @staticmethod
    def oldest(n: int) -> int:
        """The first token that a forward may begin with, once n tokens have been read, rejected ones
        included."""
        return max(0, (n // BLOCK - 1) * BLOCK)

    def before(self, first, n: int):
        """The inputs of the n tokens before the first [B]: [B, n, C + 2H]."""
        at = first[:, None] + torch.arange(-n, 0, device=first.device)
        rows = torch.arange(len(first), device=first.device)[:, None]
        return torch.where((at >= 0)[:, :, None], self.inputs[rows, at % RING], 0)

    def write(self, new, first, n):
        """new [B, T, C + 2H]: inputs of tokens from first [B] on, n [B] of which are text."""
        B = len(new)
        end = (first + n)[:, None]
        place = torch.arange(RING, device=first.device)
        # The last token of the text that belongs in each place, as a column of new: negative if it
        # was there before.
        column = end - 1 - (end - 1 - place) % RING - first[:, None]  # [B, RING]
        found = new.gather(1, column.clamp(min=0)[:, :, None].expand(-1, -1, new.shape[-1]))
        self.inputs[:B] = torch.where((column >= 0)[:, :, None], found, self.inputs[:B])

    def arrange_rows(self, rows: Tensor, n: int):
        """As Transformer.arrange_rows(), of this layer."""
        for part in self.buffers():
            part[: len(rows)] = part[rows]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    first: Tensor,
    n: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule for whole blocks, with matrix products (arXiv 2406.06484, section 3, and
    2412.06464, section 3.3).

    q, k [B, L, G, E], v [B, L, H, V], decay (its logarithm) and beta [B, L, H]: the columns from
    the beginning of the block of first [B] on, of which n [B] from first on are text. states [B, 2,
    H, E, V]: as DeltaCache has them -> y [B, L, H, V] and the states, with those before blocks that
    begin within the text or at its end.

    In a block, with d the sum of decay from its beginning, S the state there, and u the
    corrections:

        u_t = beta_t (v_t - exp(d_t) S^T k_t - sum over s < t of exp(d_t - d_s) (k_t k_s) u_s)
        y_t = exp(d_t) S^T q_t + sum over s <= t of exp(d_t - d_s) (q_t k_s) u_s

    The first is a triangular system. Its right side is linear in S, so that it is solved for all
    blocks at once, and only the states follow one another."""
    H, G = v.shape[2], k.shape[2]
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))  # of each value head
    q, k, v, decay, beta = (
        x.unflatten(1, (-1, BLOCK)).movedim(3, 1) for x in (q, k, v, decay, beta)
    )  # q, k [B, H, n_block, BLOCK, E], decay, beta [B, H, n_block, BLOCK]
    d = decay.cumsum(-1)
    beta = beta[..., None]
    # exp(d_t - d_s) for s <= t; as a difference of two large sums it would lose digits.
    since = decay[..., None].expand(*decay.shape, BLOCK).tril(-1).cumsum(-2).exp().tril()
    system = beta * (k @ k.mT) * since  # its diagonal is taken as 1
    right = torch.cat((beta * v, beta * d.exp()[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    # u = without_state - of_state S
    without_state, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.mT) * since
    q = q * d.exp()[..., None]
    k = k * since[..., -1, :, None]  # as the block's end sees them

    B, places = len(v), torch.arange(2, device=v.device)
    block = first // BLOCK  # [B]
    complete = (first + n) // BLOCK  # so many blocks of the text are
    state = states[torch.arange(B, device=v.device), block % 2]  # [B, H, E, V]
    state = torch.where((block > 0)[:, None, None, None], state, 0)
    ys = []
    for i in range(v.shape[2]):
        u = without_state[:, :, i] - of_state[:, :, i] @ state  # [B, H, BLOCK, V]
        ys.append(q[:, :, i] @ state + within[:, :, i] @ u)
        state = state * d[:, :, i, -1:, None].exp() + k[:, :, i].mT @ u
        block = block + 1
        is_new = (block <= complete)[:, None] & (block[:, None] % 2 == places)  # [B, 2]
        states = torch.where(is_new[:, :, None, None, None], state[:, None], states)
    return torch.stack(ys, dim=2).flatten(2, 3).transpose(1, 2).contiguous(), states


# torch.compile does not look inside: it would make one code for each number of blocks.
opaque_delta_rule = torch.library.custom_op("llama_fast::delta_rule", delta_rule, mutates_args=())


@opaque_delta_rule.register_fake
def _(q, k, v, decay, beta, states, first, n):
    return torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(states)


class FeedForward(nn.Module):
    def __init__(self, config: Config, ffn_dim: int):
        super().__init__()
        self.w_gate_up = nn.Linear(config.dim, 2 * ffn_dim, bias=False)
        self.w_down = nn.Linear(ffn_dim, config.dim, bias=False)
        self.gate = Gate(config.activation)

    def forward(self, x):
        return self.w_down(self.gate(self.w_gate_up(x)))


class Gate(nn.Module):
    """A gated linear unit (arXiv 2002.05202): [..., 2F], the gate and then up -> [..., F]. clamp:
    see MoEConfig."""

    def __init__(self, activation: str, clamp: tuple | None = None):
        super().__init__()
        self.activation, self.clamp = activation, clamp

    def forward(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        if self.clamp:
            limit, alpha = self.clamp
            gate = gate.clamp(max=limit)
            up = up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + 1)
        return ACTIVATIONS[self.activation](gate) * up


class MoE(nn.Module):
    """A mixture of experts, in FeedForward's place. A row is computed by its n experts alone and, if
    there is one, by the shared expert."""

    def __init__(self, config: Config, moe: MoEConfig):
        super().__init__()
        self.moe = moe
        self.gate = Gate(config.activation, moe.clamp)
        X = moe.n_expert
        dtype = torch.float32 if moe.sigmoid else None
        self.router = nn.Linear(config.dim, X, bias=moe.bias, dtype=dtype)
        self.correction = None
        if moe.sigmoid:
            self.correction = nn.Parameter(torch.zeros(X, dtype=torch.float32))
        self.w_gate_up = Experts(X, 2 * moe.ffn_dim, config.dim, moe.bias)
        self.w_down = Experts(X, config.dim, moe.ffn_dim, moe.bias)
        self.shared = self.shared_gate = None
        if moe.shared_dim:
            self.shared = FeedForward(config, moe.shared_dim)
        if moe.shared_dim and moe.shared_gate:
            self.shared_gate = nn.Linear(config.dim, 1, bias=False)
        self.router_norm = self.expert_scale = None
        if moe.scaled_router:
            self.router_norm = RMSNorm(config.dim, config)
            self.expert_scale = nn.Parameter(torch.ones(X))

    def forward(self, x, routed=None):
        """x [..., D] -> [..., D]. routed [..., D]: what the router reads; None: x"""
        y = self.mixture(x, x if routed is None else routed)
        if self.shared is not None:
            y = y + self.shared_weight(x) * self.shared(x)
        return y

    def shared_weight(self, x):
        """[..., D] -> the weight of the shared expert [..., 1], or 1."""
        return 1 if self.shared_gate is None else torch.sigmoid(self.shared_gate(x))

    def mixture(self, x, routed):
        """[..., D] -> [..., D], without the shared expert."""
        n = self.moe.n_chosen
        rows = x.flatten(0, -2)  # [M, D]
        weights, experts = self.route(routed.flatten(0, -2))  # [M, n]
        experts, order = experts.flatten().sort()
        y = self.gate(self.w_gate_up(rows[order // n], experts))  # [M n, F]
        y = self.w_down(y, experts)
        y = y[order.argsort()].unflatten(0, (-1, n))  # [M, n, D]
        return (y * weights[:, :, None]).sum(1).view_as(x)

    def route(self, x):
        """x [M, D] -> the weights of each row's experts and their indices [M, n]."""
        moe = self.moe
        if self.router_norm is not None:
            x = self.router_norm(x) * x.shape[-1] ** -0.5
        if moe.sigmoid:
            scores = torch.sigmoid(self.router(x.float()))  # [M, X]
            experts = self.in_best_groups(scores + self.correction).topk(moe.n_chosen).indices
            weights = scores.gather(1, experts)
            if moe.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        else:
            logits = self.router(x).float()  # [M, X]
            top, experts = logits.topk(moe.n_chosen)
            among = top if moe.normalize else logits
            weights = (top - among.logsumexp(-1, keepdim=True)).exp()
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[experts]
        return (weights * moe.scale).type_as(x), experts

    def in_best_groups(self, scores):
        """scores [M, X], those of experts in other groups become -inf."""
        if self.moe.n_chosen_group == self.moe.n_group:
            return scores
        groups = scores.unflatten(1, (self.moe.n_group, -1))  # [M, groups, X / groups]
        best = groups.topk(2).values.sum(-1).topk(self.moe.n_chosen_group).indices
        left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        return groups.masked_fill(left_out[..., None], float("-inf")).flatten(1)


class DenseAndMoE(nn.Module):
    """A dense part and a mixture side by side, in FeedForward's place. Both read the residual
    stream, each through a norm of its own, and the router reads it as it is. A norm is behind each
    of the two, too."""

    def __init__(self, config: Config, layer: LayerConfig):
        super().__init__()
        norm = partial(RMSNorm, config.dim, config)
        self.dense_norm, self.dense_post_norm = norm(), norm()
        self.moe_norm, self.moe_post_norm = norm(), norm()
        self.dense = FeedForward(config, layer.ffn_dim or config.ffn_dim)
        self.moe = MoE(config, layer.moe)

    def forward(self, x):
        dense = self.dense(self.dense_norm(x))
        mixture = self.moe(self.moe_norm(x), x)
        return self.dense_post_norm(dense) + self.moe_post_norm(mixture)


class Experts(nn.Module):
    """A linear layer for each of X experts."""

    def __init__(self, X: int, N: int, K: int, bias: bool):
        super().__init__()
        self.n_expert = X
        self.weight = nn.Parameter(torch.empty(X, N, K))
        self.bias = nn.Parameter(torch.empty(X, N)) if bias else None

    def forward(self, x, experts):
        """x [M, K], sorted by its experts [M] -> [M, N]"""
        y = grouped_linear(x, self.weight, experts)
        return y if self.bias is None else y + self.bias[experts]


def grouped_linear(x, weight, experts):
    """x [M, K] by the matrices [X, N, K] of its experts [M], in order -> [M, N]. Few rows gather
    theirs.

    torch.compile does not look inside: it would take F.grouped_mm() in bf16 alone, and make one
    code for few rows and another for many."""
    product = opaque_product if torch.compiler.is_compiling() else plain_product
    return product(x, weight, experts)


def plain_product(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    if len(x) <= len(weight):
        chosen = weight[experts]  # [M, N, K]
        return (chosen @ x[:, :, None]).squeeze(2)
    numbers = torch.arange(len(weight), device=x.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return F.grouped_mm(x, weight.mT, offs=ends)


opaque_product = torch.library.custom_op(
    "llama_fast::grouped_linear", plain_product, mutates_args=()
)


@opaque_product.register_fake
def _(x, weight, experts):
    return x.new_empty(x.shape[0], weight.shape[1])  # len() would fix the number of rows


class RMSNorm(nn.Module):
    """Each `dim` elements of the last dimension by themselves: a weight of a head's size norms each
    head."""

    def __init__(self, dim: int, config: Config, eps: float | None = None):
        super().__init__()
        self.eps = config.norm_eps if eps is None else eps
        self.weight = nn.Parameter(
            torch.ones(dim, dtype=torch.float32 if config.norm_fp32 else None)
        )

    def forward(self, x):
        y = x.float().unflatten(-1, (-1, len(self.weight)))
        y = y * torch.rsqrt(self.mean(y.pow(2)) + self.eps)
        return (y.type_as(self.weight) * self.weight).type_as(x).flatten(-2)

    def mean(self, squares):  # in tp.ParallelRMSNorm over all ranks' heads
        return squares.mean(-1, keepdim=True)


class BareNorm(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, dim: int, config: Config):
        super().__init__()
        self.dim, self.eps = dim, config.norm_eps

    def forward(self, x):
        y = x.float().unflatten(-1, (-1, self.dim))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x).flatten(-2)


class RopeTable(nn.Module):
    """cos and sin [L, E] of a Rope, for all layers that have it, in fp32, as bf16's error would be
    2e-3. Where nothing turns, cos is 1 and sin is 0.

    LongRoPE (Phi) has two sets of frequencies. The length that texts may reach decides, once for
    all of them: a text's first keys stay in the cache as they were turned, so that no set can take
    the other's place in the middle of a text."""

    def __init__(self, rope: Rope, head_dim: int, max_seq_len: int, L: int, device: torch.device):
        super().__init__()
        self.rope = rope
        is_long = rope.long and max_seq_len > rope.original
        frequencies = torch.tensor(rope.long if is_long else rope.frequencies)
        angle = torch.outer(torch.arange(L).float(), frequencies).repeat(1, 2)
        rest = (0, head_dim - angle.shape[1])
        self.cos = buffer(F.pad(angle.cos() * rope.scale, rest, value=1).to(device))
        self.sin = buffer(F.pad(angle.sin() * rope.scale, rest).to(device))

    def forward(self, positions):
        """positions [B, T] or [1, T] -> cos, sin [B, T, 1, E] or [1, T, 1, E]"""
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)


def turn(x, cos, sin, pairs: int):
    """x [B, T, any, E] by the angles of cos, sin: in Hugging Face's layout element i turns with
    element i + pairs."""
    x1, x2, rest = x.float().split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    return (x.float() * cos + torch.cat((-x2, x1, rest), dim=-1) * sin).type_as(x)

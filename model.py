"""
A Llama-family decoder in plain PyTorch, and nothing else. README lists the families that it serves.

One forward serves prefill, decode, speculative verification and ragged batches. They differ only in
T and in the positions: each token carries its own position, writes its key and value into that slot
of the KV cache, and attends to the slots up to its own position. A slot is written before it
becomes visible. So right-padding and rejected drafts need no clean-up and no mask of their own:
what they left in the cache is overwritten before any token attends to it.

Shapes: B batch, T new tokens, L cache length, D model dim, H query heads, K kv heads, E head dim, F
ffn dim, V vocabulary. In a mixture of experts: X experts, n of which a token takes; M rows, which
are tokens or, n times as many, tokens at an expert of theirs; matrices [N, K], of N outputs and K
inputs.

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


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None = None  # a token attends to the last `window` positions, its own included
    rope: Rope = Rope()  # this default: none, as in some layers of SmolLM3
    moe: MoEConfig | None = None  # None: the feed-forward part is dense


@dataclass(frozen=True)
class Config:
    """A family of models is a set of values of these fields, and hub/families.py knows them by the
    model_type of config.json; hub/checkpoint.py names the weights. Where a family wants something
    new, it is one more field, whose default turns it off, and the line that uses it. A Llama whose
    logits are capped, as Gemma 2's are, is three places:

        # model.py, below: logits_scale: float = 1.0
        logits_cap: float | None = None  # logits become cap * tanh(logits / cap)

        # model.py, above: return logits
        if cap := self.config.logits_cap:
            logits = cap * torch.tanh(logits / cap)

        # hub/families.py, below: "llama": {},
        "capped_llama": dict(logits_cap=3.0),

    fast/ does not know the field: where it has another value, this file decodes."""

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
    # RMSNorm of q and k: of each "head" (Qwen3, Gemma 3), or of the "whole" (OLMo).
    qk_norm: str | None = None
    # RMSNorm of what goes into attention and the feed-forward part; not in OLMo.
    pre_norm: bool = True
    post_norm: bool = False  # RMSNorm of what comes out of them: OLMo, Gemma 3
    # Norms' weights are fp32, and so is the product with them: OLMo, Gemma 3, gpt-oss.
    norm_fp32: bool = False
    norm_offset: float = 0.0  # files hold the norms' weights less this: Gemma 3
    fused_files: bool = False  # files hold q, k and v as one tensor, and gate and up: Phi
    # Names in files: a layer's mixture, its router and, if each expert has tensors of its own,
    # their gate, up and down, such as ("mlp", "gate", "gate_proj", "up_proj", "down_proj").
    expert_files: tuple[str, ...] = ()
    activation: str = "silu"
    tied: bool = False  # the output head is the embedding: Llama 3.2, SmolLM2, small Qwens
    attention_scale: float | None = None  # of q k^T; None: E ** -0.5. Granite, Gemma 3
    embedding_scale: float = 1.0  # Granite, Gemma 3
    residual_scale: float = 1.0  # of what attention and the feed-forward part add: Granite
    logits_scale: float = 1.0  # of what goes into the output head: Granite

    @property
    def n_layer(self) -> int:
        return len(self.layers)


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # nn.Embedding() would draw normal numbers, for which the meta device imports torch._dynamo,
        # 0.7 s a start.
        self.embed = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.dim), freeze=False
        )
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
        [batch_size, K, L, E]. L is max_seq_len, and `spare` slots more for what stands behind a
        text: padding, drafts.

        The weights are in place by then: it takes their device and dtype. Another call makes all
        anew. Without a batch_size there is no cache, and the tokens of a forward, at positions 0 to
        T - 1, attend to each other alone (training).

        features: the places whose hidden states are kept in self.features [batch_size, L, n D], by
        position: place i is before layer i, place n_layer after the last one. A draft head reads
        them, and so may whoever wants to look inside. They need a batch_size. cache: of CACHES."""
        config, weight = self.config, self.embed.weight
        device, dtype = weight.device, weight.dtype
        L = max_seq_len + spare
        ropes = dict.fromkeys(layer.rope for layer in config.layers)  # each once
        self.ropes = nn.ModuleList(
            RopeTable(rope, config.head_dim, max_seq_len, L, device) for rope in ropes
        )
        # Rounded, as Gemma's own code rounds it.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.slots = buffer(torch.arange(L, device=device))  # [L]
        self.rows = buffer(torch.arange(batch_size, device=device)[:, None])  # [B, 1]
        for layer in self.layers:
            shape = batch_size, config.n_kv_head, L, config.head_dim
            layer.attn.cache = CACHES[cache](shape, device, dtype) if batch_size else None
        self.places = features
        shape = batch_size, L, len(features) * config.dim
        self.features = buffer(torch.zeros(shape, device=device, dtype=dtype))

    def arrange_rows(self, rows: list[int], n: int):
        """The cache's first rows, and the features', become what these rows are, as far as their
        first n slots: [0, 0, 1, 1] makes two samples of each of two prompts."""
        rows = torch.tensor(rows, device=self.rows.device)
        for layer in self.layers:
            for cache in layer.attn.cache.buffers():
                cache[: len(rows), :, :n] = cache[rows, :, :n]
        self.features[: len(rows), :n] = self.features[rows, :n]

    def forward(
        self,
        tokens,
        positions,
        slots: Tensor | None = None,
        last: Tensor | None = None,
        inputs: Tensor | None = None,
    ):
        """tokens [B, T], positions [B, T] or [1, T] -> logits [B, T, V] or, with last [B], of those
        columns [B, V].

        slots: a prefix of self.slots that covers all positions. Attention reads only these slots of
        the cache. fast/'s kernels need none: they go by the positions. inputs: what the first layer
        reads in the place of the tokens' embeddings [B, T, D]."""
        rows = self.rows[: len(tokens)]  # [B, 1]; empty without a cache
        if slots is None:
            slots = self.slots if len(rows) else self.slots[: tokens.shape[1]]
        turns = {table.rope: table(positions) for table in self.ropes}
        masks = {
            window: visible(slots, positions, window)
            for window in dict.fromkeys(layer.window for layer in self.config.layers)
        }
        x = self.embedded(tokens) if inputs is None else inputs  # [B, T, D]
        run = compiled_once
        if torch.is_grad_enabled():
            # Torch 2.11 to 2.13 computes wrong gradients through nested regions.
            run = nn.Module.__call__
        for i, layer in enumerate(self.layers):
            self.keep(i, x, rows, positions)
            x = run(
                layer, x, positions, *turns[layer.config.rope], masks[layer.config.window], rows
            )
        self.keep(len(self.layers), x, rows, positions)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last]  # [B, D]
        logits = self.head(self.norm(x) * self.config.logits_scale)
        return logits

    def embedded(self, tokens):
        """[B, T] -> [B, T, D]"""
        x = self.embed(tokens)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def keep(self, place: int, x, rows, positions):
        """Keeps hidden states x [B, T, D], if setup() was asked for those of this place."""
        if place in self.places:
            n, D = self.places.index(place), self.config.dim
            self.features[:, :, n * D : (n + 1) * D][rows, positions] = x


@torch.compiler.nested_compile_region
def compiled_once(layer, *inputs):
    """Where torch.compile has the whole forward (decode), all layers share the code of one: SmolLM2
    is ready in 15 s, not 61 s, on 2 CPU cores. Elsewhere it is a call."""
    return layer(*inputs)


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
        after = norm if config.post_norm else nn.Identity
        self.attn_norm = before()
        self.attn = Attention(config, layer)
        self.attn_post_norm = after()
        self.ffn_norm = before()
        self.ffn_post_norm = after()
        self.ffn = MoE(config, layer.moe) if layer.moe else FeedForward(config)

    def forward(self, x, *where):
        """x [B, T, D] -> [B, T, D]. where: positions, cos, sin, mask, rows, as Attention.attend()
        has them."""
        y = self.attn(self.attn_norm(x), *where)
        x = torch.add(x, self.attn_post_norm(y), alpha=self.scale)
        y = self.ffn(self.ffn_norm(x))
        return torch.add(x, self.ffn_post_norm(y), alpha=self.scale)


class Attention(nn.Module):
    def __init__(self, config: Config, layer: LayerConfig):
        super().__init__()
        self.rope = layer.rope
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        if self.scale is None:
            self.scale = config.head_dim**-0.5
        self.sizes = [
            n * config.head_dim for n in (config.n_head, config.n_kv_head, config.n_kv_head)
        ]
        self.wqkv = nn.Linear(config.dim, sum(self.sizes), bias=config.qkv_bias)
        self.wo = nn.Linear(self.sizes[0], config.dim, bias=config.o_bias)
        self.sinks = nn.Parameter(torch.zeros(config.n_head)) if config.sinks else None
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.qk_norm:
            q, k, _ = self.sizes if config.qk_norm == "whole" else [config.head_dim] * 3
            self.q_norm = RMSNorm(q, config)
            self.k_norm = RMSNorm(k, config)
        self.cache = None  # a KVCache, made by Transformer.setup()

    def forward(self, x, *where):
        return self.wo(self.attend(self.wqkv(x), *where))

    def attend(self, qkv, positions, cos, sin, mask, rows):
        """qkv [B, T, (H + 2K) E], positions [B, T] or [1, T], cos and sin of these [B, T, 1, E],
        mask [B, 1, T, L], and the rows of the cache [B, 1] -> [B, T, H E]"""
        q, k, v = self.rotate(qkv, positions, cos, sin)
        if self.cache is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            self.cache.write(k, v, rows, positions)
            k, v = self.cache.read(rows, mask.shape[-1])  # [B, K, L, E]
        if self.sinks is not None:
            q, k, v, mask = self.with_sinks(q, k, v, mask)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, mask, scale=self.scale, enable_gqa=True
        )
        y = y.transpose(1, 2)[..., : self.head_dim]  # without what with_sinks() added to a head
        return y.flatten(2)

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
        """qkv [B, T, (H + 2K) E] -> q [B, T, H, E], k and v [B, T, K, E]; cos, sin [B, T, 1, E].

        A norm splits its input by the length of its weight: heads, or the whole."""
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in (self.q_norm(q), self.k_norm(k), v)
        )
        q, k = (turn(x, cos, sin, len(self.rope.frequencies)) for x in (q, k))
        if self.rope.q_growth:
            growth = 1 + self.rope.q_growth * torch.log1p(positions // self.rope.original)  # [B, T]
            q = q * growth[:, :, None, None].type_as(q)
        return q, k, v


class KVCache(nn.Module):
    """The keys and values of a layer: k, v [B, K, L, E]. Its buffers begin with [B, K, L]:
    arrange_rows() copies them.

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
        super().__init__()
        self.dtype = dtype
        self.k, self.v = (
            buffer(torch.zeros(shape, device=device, dtype=torch.int8 if small else dtype))
            for small in int8
        )
        self.k_scale, self.v_scale = (
            buffer(torch.zeros(shape[:3], device=device)) if small else None for small in int8
        )

    @staticmethod
    def bytes_per_token(config: Config, dtype: torch.dtype, kind: str = "16-bit") -> int:
        """Of all layers. kind: of CACHES."""
        shape = 1, config.n_kv_head, 1, config.head_dim
        cache = CACHES[kind](shape, torch.device("meta"), dtype)
        return config.n_layer * sum(part.nbytes for part in cache.buffers())

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


# The kinds of KV cache. "16-bit", without --kv-cache: in the model's dtype, whichever that is.
CACHES = {
    "16-bit": KVCache,
    "int8": partial(KVCache, int8=(True, True)),
    "int8-values": partial(KVCache, int8=(False, True)),
}


def to_int8(x):
    """x [..., E] -> codes int8 [..., E] and scales fp32 [...]."""
    scale = x.float().abs().amax(-1) / 127
    return (x / scale.clamp(min=1e-30)[..., None]).round().to(torch.int8), scale


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.w_gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w_down = nn.Linear(config.ffn_dim, config.dim, bias=False)
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
    """A mixture of experts, in FeedForward's place. A row is computed by its n experts alone."""

    def __init__(self, config: Config, moe: MoEConfig):
        super().__init__()
        self.moe = moe
        self.gate = Gate(config.activation, moe.clamp)
        X = moe.n_expert
        self.router = nn.Linear(config.dim, X, bias=moe.bias)
        self.w_gate_up = Experts(X, 2 * moe.ffn_dim, config.dim, moe.bias)
        self.w_down = Experts(X, config.dim, moe.ffn_dim, moe.bias)

    def forward(self, x):
        n = self.moe.n_chosen
        rows = x.flatten(0, -2)  # [M, D]
        weights, experts = self.route(rows)  # [M, n]
        experts, order = experts.flatten().sort()
        y = self.gate(self.w_gate_up(rows[order // n], experts))  # [M n, F]
        y = self.w_down(y, experts)
        y = y[order.argsort()].unflatten(0, (-1, n))  # [M, n, D]
        return (y * weights[:, :, None]).sum(1).view_as(x)

    def route(self, x):
        """x [M, D] -> the weights of each row's experts and their indices [M, n]."""
        logits = self.router(x).float()  # [M, X]
        top, experts = logits.topk(self.moe.n_chosen)
        among = top if self.moe.normalize else logits
        weights = (top - among.logsumexp(-1, keepdim=True)).exp()
        return weights.type_as(x), experts


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

    def __init__(self, dim: int, config: Config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(
            torch.ones(dim, dtype=torch.float32 if config.norm_fp32 else None)
        )

    def forward(self, x):
        y = x.float().unflatten(-1, (-1, len(self.weight)))
        y = y * torch.rsqrt(self.mean(y.pow(2)) + self.eps)
        return (y.type_as(self.weight) * self.weight).type_as(x).flatten(-2)

    def mean(self, squares):  # in tp.ParallelRMSNorm over all ranks' heads
        return squares.mean(-1, keepdim=True)


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

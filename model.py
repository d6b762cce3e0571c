"""
A Llama-family decoder (Llama 2 and 3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM2) in plain PyTorch, and nothing else.

One forward serves prefill, decode, speculative verification and ragged batches. They differ only in T and in the
positions: each token carries its own position, writes its key and value into that slot of the KV cache, and attends to
the slots up to its own position. A slot is written before it becomes visible. So right-padding and rejected drafts need
no clean-up and no mask of their own: what they left in the cache is overwritten before any token attends to it.

Shapes: B batch, T new tokens, L cache length, D model dim, H query heads, K kv heads, E head dim, F ffn dim,
V vocabulary.

A new family of models is a field of Config or, where its layers differ, of LayerConfig. checkpoint.config_from_hf()
reads it, and checkpoint.hf_weights() names its weights. fast/ leaves a value that it does not know to this file.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's: see rope_tables()."""
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""
    window: int | None = None  # Mistral 7B v0.1: a token attends to the last `window` positions, its own included
    rope: Rope | None = Rope()  # None: heads are not rotated


@dataclass(frozen=True)
class Config:
    dim: int
    layers: tuple[LayerConfig, ...]
    n_head: int
    n_kv_head: int
    head_dim: int  # not always dim / n_head: Qwen3 and Mistral-Nemo set it apart
    ffn_dim: int
    vocab_size: int
    context: int  # the most positions that the model was trained for
    norm_eps: float = 1e-5
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    tied: bool = False  # the output head is the embedding: Llama 3.2, SmolLM2, small Qwens

    @property
    def n_layer(self) -> int:
        return len(self.layers)


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # from_pretrained() draws no random numbers. On the meta device these would import torch._dynamo, 0.7 s a start.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.dim), freeze=False)
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def setup(self, max_seq_len: int, batch_size: int = 0, features: tuple[int, ...] = ()) -> None:
        """Makes rope tables [max_seq_len, E] and, in each layer, a KV cache [batch_size, K, max_seq_len, E].

        Call it once the weights are in place: it takes their device and dtype. Without a batch_size there is no cache,
        and the tokens of a forward attend to each other alone (training).

        features: the places whose hidden states are kept in self.features [batch_size, max_seq_len, n D], by position:
        place i is before layer i, place n_layer behind the last one. A draft head reads them."""
        config, weight = self.config, self.embed.weight
        device, dtype = weight.device, weight.dtype
        ropes = dict.fromkeys(layer.rope for layer in config.layers)  # each once
        self.ropes = nn.ModuleList(RopeTable(rope, config.head_dim, max_seq_len, device) for rope in ropes)
        # Buffers, so that a CUDA graph finds them at fixed addresses; not persistent, so that no checkpoint holds them.
        self.register_buffer("slots", torch.arange(max_seq_len, device=device), persistent=False)  # [L]
        self.register_buffer("rows", torch.arange(batch_size, device=device)[:, None], persistent=False)  # [B, 1]
        for layer in self.layers if batch_size else ():
            shape = batch_size, config.n_kv_head, max_seq_len, config.head_dim
            layer.attn.cache = KVCache(shape, device, dtype)
        self.places = features
        kept = None
        if features:
            kept = torch.zeros(batch_size, max_seq_len, len(features) * config.dim, device=device, dtype=dtype)
        self.register_buffer("features", kept, persistent=False)

    def arrange_rows(self, rows: list[int], n: int) -> None:
        """The cache's first rows become what these rows are, as far as their first n slots: [0, 0, 1, 1] makes two
        samples of each of two prompts."""
        rows = torch.tensor(rows, device=self.rows.device)
        for layer in self.layers:
            layer.attn.cache.copy_rows(rows, n)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None,
                last: Tensor | None = None) -> Tensor:
        """tokens [B, T], positions [B, T] or [1, T] -> logits [B, T, V] or, with last [B], of those columns [B, V].

        slots: a prefix of self.slots that covers all positions. Attention reads only these slots of the cache."""
        rows = self.rows[:len(tokens)]  # [B, 1]; empty without a cache
        if slots is None:
            slots = self.slots if len(rows) else self.slots[:tokens.shape[1]]
        turns = {table.rope: table(positions) for table in self.ropes}
        masks = {layer.window: visible(slots, positions, layer.window) for layer in self.config.layers}
        x = self.embed(tokens)  # [B, T, D]
        run = compiled_once
        if torch.is_grad_enabled():
            run = nn.Module.__call__  # torch 2.11 to 2.13 computes wrong gradients through nested regions
        for i, layer in enumerate(self.layers):
            self.keep(i, x, rows, positions)
            x = run(layer, x, positions, *turns[layer.config.rope], masks[layer.config.window], rows)
        self.keep(len(self.layers), x, rows, positions)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last]  # [B, D]
        return self.head(self.norm(x))

    def keep(self, place: int, x: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Keeps hidden states x [B, T, D], if setup() was asked for those of this place."""
        if place in self.places:
            n, D = self.places.index(place), self.config.dim
            self.features[:, :, n * D:(n + 1) * D][rows, positions] = x

    def table(self, layer: int) -> "RopeTable":
        """The rope table of a layer."""
        rope = self.config.layers[layer].rope
        return next(table for table in self.ropes if table.rope == rope)


@torch.compiler.nested_compile_region
def compiled_once(layer: nn.Module, *inputs: Tensor) -> Tensor:
    """Under torch.compile all layers share the code of one: SmolLM2 is ready in 15 s, not 61 s, on 2 CPU cores."""
    return layer(*inputs)


def visible(slots: Tensor, positions: Tensor, window: int | None) -> Tensor:
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
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), positions, cos, sin, mask, rows)
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.sizes = [n * config.head_dim for n in (config.n_head, config.n_kv_head, config.n_kv_head)]
        self.wqkv = nn.Linear(config.dim, sum(self.sizes), bias=config.qkv_bias)
        self.wo = nn.Linear(self.sizes[0], config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.cache = None  # a KVCache, made by Transformer.setup()

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return self.wo(self.attend(self.wqkv(x), positions, cos, sin, mask, rows))

    def attend(self, qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """qkv [B, T, (H + 2K) E] -> [B, T, H E]"""
        q, k, v = self.rotate(qkv, cos, sin)
        if self.cache is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            self.cache.write(k, v, rows, positions)
            k, v = self.cache.read(rows, mask.shape[-1])  # [B, K, L, E]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [B, T, (H + 2K) E] -> q [B, T, H, E], k and v [B, T, K, E]; cos, sin [B, T, 1, E]."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.sizes, dim=-1))
        return rope(self.q_norm(q), cos, sin), rope(self.k_norm(k), cos, sin), v


class KVCache(nn.Module):
    """The keys and values of a layer: k, v [B, K, L, E]. A cache of another type is a class with these methods."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("k", torch.zeros(shape, device=device, dtype=dtype), persistent=False)
        self.register_buffer("v", torch.zeros(shape, device=device, dtype=dtype), persistent=False)

    @staticmethod
    def bytes_per_token(config: Config, dtype: torch.dtype) -> int:
        """Of all layers."""
        return 2 * config.n_layer * config.n_kv_head * config.head_dim * dtype.itemsize

    def write(self, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> None:
        """k, v [B, T, K, E]. Each of the rows [B, 1] writes at its own positions [B, T]."""
        self.k[rows, :, positions] = k
        self.v[rows, :, positions] = v

    def read(self, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The first len(rows) rows as far as their first n slots: k, v [B, K, n, E]."""
        return self.k[:len(rows), :, :n], self.v[:len(rows), :, :n]

    def copy_rows(self, rows: Tensor, n: int) -> None:
        """The first rows become what `rows` [any] are, as far as their first n slots."""
        for cache in (self.k, self.v):
            cache[:len(rows), :, :n] = cache[rows, :, :n]


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.w_gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w_down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w_gate_up(x).chunk(2, dim=-1)  # [B, T, F]
        return self.w_down(F.silu(gate) * up)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


class RopeTable(nn.Module):
    """cos and sin [L, E] of a Rope, for all layers that have it."""

    def __init__(self, rope: Rope | None, head_dim: int, length: int, device: torch.device):
        super().__init__()
        self.rope = rope
        cos, sin = rope_tables(rope, head_dim, length)
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] -> cos, sin [B, T, 1, E]"""
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)


def rope_tables(rope: Rope | None, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """cos, sin [L, E] in fp32 (bf16 loses 2e-3). Hugging Face's layout rotates element i of a head with i + E / 2.

    RoPE: arXiv 2104.09864. Llama 3.1 stretches the long wavelengths, keeps the short ones and blends in between.
    Without rope the angle is 0."""
    freq = torch.zeros(head_dim // 2)
    if rope:
        freq = rope.theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)  # [E/2]
        if s := rope.scaling:
            turns = s.original_context * freq / (2 * torch.pi)  # full turns within the original context
            keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
            freq = keep * freq + (1 - keep) * freq / s.factor
    angle = torch.outer(torch.arange(length).float(), freq).repeat(1, 2)
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-x2, x1), dim=-1) * sin).type_as(x)

"""
A Llama-family decoder (Llama 2 and 3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM2) in plain PyTorch, and nothing else.

One forward serves prefill, decode, speculative verification and ragged batches. They differ only in T and in the
positions: each token carries its own position, writes its key and value into that slot of the KV cache, and attends to
the slots up to its own position. A slot is written before it becomes visible. So right-padding and rejected drafts need
no clean-up and no mask of their own: what they left in the cache is overwritten before any token attends to it.

Shapes: B batch, T new tokens, L cache length, D model dim, H query heads, K kv heads, E head dim, F ffn dim,
V vocabulary.

A new family of models is a field of Config, read in checkpoint.config_from_hf(), and its use below; new weights have
their names in checkpoint.hf_weights(). fast/decoder.py fuses this forward, unless there is a field that it does not
know.
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
class Config:
    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int  # not always dim / n_head: Qwen3 and Mistral-Nemo set it apart
    ffn_dim: int
    vocab_size: int
    context: int  # the most positions that the model was trained for
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    window: int | None = None  # Mistral 7B v0.1: a token attends to the last `window` positions, its own included
    tied: bool = False  # the output head is the embedding: Llama 3.2, SmolLM2, small Qwens


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # from_pretrained() draws no random numbers. On the meta device these would import torch._dynamo, 0.7 s a start.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.dim), freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def setup(self, max_seq_len: int, batch_size: int = 0) -> None:
        """Makes rope tables [max_seq_len, E] and, in each layer, KV caches [batch_size, K, max_seq_len, E].

        Call it once the weights are in place: it takes their device and dtype. Without a batch_size there is no cache,
        and the tokens of a forward attend to each other alone (training)."""
        # Buffers, so that a CUDA graph finds them at fixed addresses; not persistent, so that no checkpoint holds them.
        device, dtype = self.embed.weight.device, self.embed.weight.dtype
        for name, table in zip(("cos", "sin"), rope_tables(self.config, max_seq_len)):
            self.register_buffer(name, table.to(device), persistent=False)
        self.register_buffer("slots", torch.arange(max_seq_len, device=device), persistent=False)  # [L]
        self.register_buffer("rows", torch.arange(batch_size, device=device)[:, None], persistent=False)  # [B, 1]
        shape = (batch_size, self.config.n_kv_head, max_seq_len, self.config.head_dim)
        for layer in self.layers if batch_size else ():
            for name in ("k_cache", "v_cache"):
                layer.attn.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype), persistent=False)

    def arrange_rows(self, rows: list[int], n: int) -> None:
        """The cache's first rows become what these rows are, as far as their first n slots: [0, 0, 1, 1] makes two
        samples of each of two prompts."""
        rows = torch.tensor(rows, device=self.rows.device)
        for layer in self.layers:
            for cache in (layer.attn.k_cache, layer.attn.v_cache):
                cache[:len(rows), :, :n] = cache[rows, :, :n]

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None,
                last: Tensor | None = None) -> Tensor:
        """tokens [B, T], positions [B, T] or [1, T] -> logits [B, T, V] or, with last [B], of those columns [B, V].

        slots: a prefix of self.slots that covers all positions. Attention reads only these slots of the cache."""
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)  # [B, T, 1, E]
        rows = self.rows[:len(tokens)]  # [B, 1]; empty without a cache
        if slots is None:
            slots = self.slots if len(rows) else self.slots[:tokens.shape[1]]
        mask = slots <= positions[:, None, :, None]  # [B, 1, T, L]
        if self.config.window:
            mask &= slots > positions[:, None, :, None] - self.config.window
        x = self.embed(tokens)  # [B, T, D]
        run = nn.Module.__call__ if torch.is_grad_enabled() else compiled_once
        for layer in self.layers:
            x = run(layer, x, positions, cos, sin, mask, rows)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last]  # [B, D]
        return self.head(self.norm(x))


@torch.compiler.nested_compile_region
def compiled_once(layer: nn.Module, *inputs: Tensor) -> Tensor:
    """Under torch.compile all layers share the code of one: SmolLM2 is ready in 15 s, not 61 s, on 2 CPU cores.

    Not for training: torch 2.11 to 2.13 computes wrong gradients through such a region."""
    return layer(*inputs)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
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
        self.register_buffer("k_cache", None)  # [B, K, L, E], made by Transformer.setup()
        self.register_buffer("v_cache", None)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.wqkv(x).split(self.sizes, dim=-1))
        q = rope(self.q_norm(q), cos, sin)  # [B, T, H, E]
        k = rope(self.k_norm(k), cos, sin)  # [B, T, K, E]
        if self.k_cache is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            self.k_cache[rows, :, positions] = k  # each row writes at its own positions
            self.v_cache[rows, :, positions] = v
            k, v = (cache[:len(rows), :, :mask.shape[-1]] for cache in (self.k_cache, self.v_cache))  # [B, K, L, E]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))  # [B, T, D]


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


def rope_tables(config: Config, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """cos, sin [L, E] in fp32 (bf16 loses 2e-3). Hugging Face's layout rotates element i of a head with i + E / 2.

    RoPE: arXiv 2104.09864. Llama 3.1 stretches the long wavelengths, keeps the short ones and blends in between."""
    freq = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)  # [E/2]
    if s := config.rope_scaling:
        turns = s.original_context * freq / (2 * torch.pi)  # full turns within the original context
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
        freq = keep * freq + (1 - keep) * freq / s.factor
    angle = torch.outer(torch.arange(max_seq_len).float(), freq).repeat(1, 2)
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-x2, x1), dim=-1) * sin).type_as(x)

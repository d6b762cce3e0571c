"""
The Llama family (Llama 2 and 3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM2) in one file of plain PyTorch.

One forward serves prefill, decode, verification and ragged batches, which differ in T and in the positions alone: each
token carries its own position, writes its key and value into that slot of the cache, and sees the slots up to its own.
A slot is written before it becomes visible, so padding and rejected drafts need neither clean-up nor a mask of theirs.

Shapes: B batch, T new tokens, L cache length, D model dim, H query heads, K kv heads, E head dim, F ffn dim,
V vocabulary.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Config:
    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int  # not always dim / n_head: Qwen3 and Mistral-Nemo set it apart
    ffn_dim: int
    vocab_size: int
    context: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Llama 3.1's: the four keys of LLAMA3_ROPE
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    window: int | None = None  # Mistral 7B v0.1: a token sees the last `window` positions, its own included
    tied: bool = False  # the output head is the embedding: Llama 3.2, SmolLM2, small Qwens

    @staticmethod
    def from_hf(hf: dict) -> "Config":
        """hf: a checkpoint's config.json; the one place that knows its keys. ValueError names what is not supported."""
        kind = hf.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(f"model_type {kind!r} is not supported: want llama, mistral, qwen2 or qwen3")
        rope = dict(rope_theta=hf.get("rope_theta", 10000.0))
        rope |= hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type not in ("default", "llama3"):
            raise ValueError(f"rope_type {rope_type!r} is not supported: want 'default' or 'llama3'")
        plain = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False,
                     partial_rotary_factor=1.0)
        for key, want in plain.items():
            if (found := {**rope, **hf}.get(key, want)) != want:
                raise ValueError(f"{key}={found!r} is not supported: want {want!r}")

        def number(key: str, default: int | None = None, of: dict = hf, kind: type = int, most: float = 1e12):
            value = of.get(key) or default
            if type(value) not in (int, kind) or not 0 < value <= most:
                raise ValueError(f"{key}={of.get(key)!r}: want {kind.__name__} above 0, up to {most:.0e}")
            return value

        dim, heads = number("hidden_size"), number("num_attention_heads")
        kv_heads = number("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
        if dim % heads and not hf.get("head_dim"):
            raise ValueError(f"hidden_size={dim} is no multiple of num_attention_heads={heads}; head_dim is missing")
        return Config(
            dim=dim, n_layer=number("num_hidden_layers", most=1e4), n_head=heads, n_kv_head=kv_heads,
            head_dim=number("head_dim", default=dim // heads),
            ffn_dim=number("intermediate_size"), vocab_size=number("vocab_size"),
            context=number("max_position_embeddings"), norm_eps=number("rms_norm_eps", kind=float),
            rope_theta=number("rope_theta", of=rope, kind=float),
            rope_scaling=None if rope_type == "default" else {
                key: number(key, of=rope, kind=float) for key in LLAMA3_ROPE},
            qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
            window=number("sliding_window") if kind == "mistral" and hf.get("sliding_window") else None,
            tied=hf.get("tie_word_embeddings", False))

    def hf_weights(self) -> dict[str, tuple[str, int, tuple[int, ...]]]:
        """Hugging Face's name of each tensor -> our parameter, its row where the tensor starts, the tensor's shape.

        q, k and v are rows of one matrix here, gate and up of another."""
        D, E, F, V = self.dim, self.head_dim, self.ffn_dim, self.vocab_size
        q, kv = self.n_head * E, self.n_kv_head * E
        layer = {
            "self_attn.q_proj.weight": ("attn.wqkv.weight", 0, (q, D)),
            "self_attn.k_proj.weight": ("attn.wqkv.weight", q, (kv, D)),
            "self_attn.v_proj.weight": ("attn.wqkv.weight", q + kv, (kv, D)),
            "self_attn.o_proj.weight": ("attn.wo.weight", 0, (D, q)),
            "mlp.gate_proj.weight": ("ffn.w_gate_up.weight", 0, (F, D)),
            "mlp.up_proj.weight": ("ffn.w_gate_up.weight", F, (F, D)),
            "mlp.down_proj.weight": ("ffn.w_down.weight", 0, (D, F)),
            "input_layernorm.weight": ("attn_norm.weight", 0, (D,)),
            "post_attention_layernorm.weight": ("ffn_norm.weight", 0, (D,)),
        }
        if self.qkv_bias:
            layer |= {"self_attn.q_proj.bias": ("attn.wqkv.bias", 0, (q,)),
                      "self_attn.k_proj.bias": ("attn.wqkv.bias", q, (kv,)),
                      "self_attn.v_proj.bias": ("attn.wqkv.bias", q + kv, (kv,))}
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": ("attn.q_norm.weight", 0, (E,)),
                      "self_attn.k_norm.weight": ("attn.k_norm.weight", 0, (E,))}
        names = {"model.embed_tokens.weight": ("embed.weight", 0, (V, D)),
                 "model.norm.weight": ("norm.weight", 0, (D,))}
        if not self.tied:
            names["lm_head.weight"] = ("head.weight", 0, (V, D))
        for i in range(self.n_layer):
            for theirs, (ours, row, shape) in layer.items():
                names[f"model.layers.{i}.{theirs}"] = (f"layers.{i}.{ours}", row, shape)
        return names


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # Not drawn at random, which on the meta device would import torch._dynamo: 0.7 s of each start.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.dim), freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def setup(self, length: int, batch: int = 0) -> None:
        """Rope tables for `length` positions and KV caches of `batch` rows; without rows, tokens see each other alone
        (training). Call it once the weights are in place: their device and dtype are taken."""
        # Buffers, so that a CUDA graph finds them at fixed addresses; not persistent, so that no checkpoint holds them.
        device, dtype = self.embed.weight.device, self.embed.weight.dtype
        tables = dict(zip(("cos", "sin"), rope_tables(self.config, length)))  # [L, E]
        tables |= dict(slots=torch.arange(length), rows=torch.arange(batch)[:, None])
        for name, table in tables.items():
            self.register_buffer(name, table.to(device), persistent=False)
        for layer in self.layers if batch else ():
            for name in ("k_cache", "v_cache"):
                shape = (batch, self.config.n_kv_head, length, self.config.head_dim)
                layer.attn.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype), persistent=False)

    def repeat_rows(self, n: int) -> None:
        """The caches of rows 0, 1, ... go to n rows each: 0..n-1, n..2n-1, ...; one prefill serves n samples."""
        for layer in self.layers if n > 1 else ():
            for cache in (layer.attn.k_cache, layer.attn.v_cache):
                cache.copy_(cache[:len(cache) // n].repeat_interleave(n, dim=0))

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None,
                last: Tensor | None = None) -> Tensor:
        """tokens [B, T], positions [B, T] or [1, T] -> logits [B, T, V], or [B, V] of one column each, last [B].

        slots: the part of self.slots to look at, where the caller knows that no position lies beyond it."""
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)  # [B, T, 1, E]
        rows = self.rows[:len(tokens)]  # [B, 1]; none without a cache
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
    """Compiled, all layers share the code of one: SmolLM2 is ready in 15 s, not 61 s, on 2 CPU cores. Not for training:
    torch 2.11 to 2.13 computes wrong gradients through such a region."""
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
        self.register_buffer("k_cache", None)  # [B, K, L, E], made by Transformer.setup
        self.register_buffer("v_cache", None)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.wqkv(x).split(self.sizes, dim=-1))
        q = rope(self.q_norm(q), cos, sin)  # [B, T, H, E]
        k = rope(self.k_norm(k), cos, sin)  # [B, T, K, E]
        if self.k_cache is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            self.k_cache[rows, :, positions] = k  # each row writes at positions of its own
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


def rope_tables(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """cos, sin [L, E], in fp32 (bf16 loses 2e-3), for Hugging Face's layout: a head's first half turns with its second.

    RoPE: arXiv 2104.09864. Llama 3.1 stretches the long wavelengths, keeps the short ones and blends in between."""
    freq = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)  # [E/2]
    if s := config.rope_scaling:
        turns = s["original_max_position_embeddings"] * freq / (2 * torch.pi)  # full turns within the original context
        keep = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
        freq = keep * freq + (1 - keep) * freq / s["factor"]
    angle = torch.outer(torch.arange(length).float(), freq).repeat(1, 2)
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-x2, x1), dim=-1) * sin).type_as(x)

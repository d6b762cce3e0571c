"""
Swaps a model.py Transformer's modules for fast ones on a CUDA GPU, in 16-bit types.

On one GPU a decode step of one row is five launches a layer; with several ranks two all-reduces are launches too:

    wqkv         norm, product, bias               fused_linear
    attention    rope, cache update, attention     update_and_attend
    wo           product, residual                 fused_linear; with several ranks fused_all_reduce adds the residual
    w_gate_up    norm, product, SiLU gate          fused_linear
    w_down       product, residual                 fused_linear; with several ranks fused_all_reduce adds the residual

With several rows the norms are launches of their own: seven. Prefill keeps the model's own forward, with attention and
quantized feed-forward layers swapped.

Shapes: as in model.py, and M = B x T rows.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from threading import Thread

import torch
from torch import Tensor, nn

from fast.attention import update_and_attend
from fast.collectives import communication_buffers, fused_all_gather, fused_all_reduce
from fast.linear import linear
from fast.packed_linear import PackedLinear
from quantize import QuantizedLinear, replace_layers
from sampling import Sampling
from tp import ColumnParallelLinear, RowParallelLinear

OPERATORS = ("linear", "packed_linear", "update_and_attend", "sample", "distribute", "fused_all_reduce",
             "fused_all_gather")


# The fields of model.Config that this file's modules, or model.py's around them, take into account.
KNOWN_FIELDS = {"dim", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn_dim", "vocab_size", "context", "norm_eps",
                "rope_theta", "rope_scaling", "qkv_bias", "qk_norm", "window", "tied"}


def fusible(model: nn.Module) -> bool:
    """Whether each layer's q, k and v are one matrix, and gate and up are: of one type, their inputs in one order.

    False, too, for a model with a Config field that this file does not know: its forward may have changed.
    Raises ValueError for a model that has its kernels already."""
    if any(isinstance(layer.attn, FusedAttention) for layer in model.layers):
        raise ValueError("this model has its kernels already: load it again")
    known = {field.name for field in fields(model.config)} <= KNOWN_FIELDS
    return known and all(isinstance(layer, nn.Linear | QuantizedLinear) for block in model.layers
               for layer in (block.attn.wqkv, block.ffn.w_gate_up))


def fused_linear(layer: nn.Module, buffer: int = 0) -> Callable:
    """A linear layer as a function (x [M, K], norm's weight [K], residual=, gated=, eps=) -> [M, N], in one launch or
    two; gated -> [M, N / 2].

    The layer's type decides which. A ColumnParallelLinear takes no residual, because each rank has a part of the
    outputs. A RowParallelLinear takes only a residual, because the ranks' parts must be summed first. buffer: see
    collectives.py."""
    if isinstance(layer, RowParallelLinear):
        partial_sum = fused_linear(layer.linear)
        return lambda x, residual: fused_all_reduce(partial_sum(x), residual, buffer)
    if isinstance(layer, ColumnParallelLinear):
        part = fused_linear(layer.linear)
        return lambda x, norm, eps: fused_all_gather(part(x, norm, eps=eps), layer.vocab_size)
    if isinstance(layer, PackedLinear):
        return layer.fused
    return lambda x, norm=None, **options: linear(x, layer.weight, norm, layer.bias, **options)


class FusedAttention(nn.Module):
    """Attention of model.py, with one kernel in the place of rope, the cache's update and the masked product."""

    def __init__(self, attn: nn.Module, model: nn.Module):
        super().__init__()
        self.attn = attn
        self.window = model.config.window or 0
        self.norms = getattr(attn.q_norm, "weight", None), getattr(attn.k_norm, "weight", None)
        self.eps = getattr(attn.q_norm, "eps", 0.0)
        B, K = attn.k_cache.shape[:2]
        buffers = dict(k_cache=attn.k_cache, v_cache=attn.v_cache, cos=model.cos, sin=model.sin,
                       semaphore=attn.k_cache.new_zeros(B * K, dtype=torch.int32))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)

    def attend(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """qkv [M, (H + 2K) E] fresh from the product, positions [B, T] -> [M, H E]"""
        E = self.attn.head_dim
        qkv = qkv.view(-1, positions.shape[1], qkv.shape[-1] // E, E)  # [B, T, H + 2K, E]
        y = update_and_attend(qkv, positions, self.cos, self.sin, self.k_cache, self.v_cache, self.semaphore,
                              *self.norms, self.window, self.eps)
        return y.flatten(0, 1).flatten(1)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """Prefill: x [B, T, D] -> [B, T, D]. The kernel finds cos, sin and the slots in use by itself."""
        qkv = self.attn.wqkv(x).flatten(0, 1)  # [M, (H + 2K) E]
        return self.attn.wo(self.attend(qkv, positions).unflatten(0, x.shape[:2]))


class FusedFeedForward(nn.Module):
    """FeedForward of model.py whose w_gate_up is a gated PackedLinear. Prefill: x [B, T, D] -> [B, T, D]"""

    def __init__(self, ffn: nn.Module):
        super().__init__()
        self.w_gate_up, self.w_down = ffn.w_gate_up, ffn.w_down

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(self.w_gate_up(x))


class FusedBlock(nn.Module):
    """A decoder layer of model.py for decode: its five launches."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block
        self.qkv, self.gate_up = fused_linear(block.attn.attn.wqkv), fused_linear(block.ffn.w_gate_up)
        self.out, self.down = fused_linear(block.attn.attn.wo, buffer=0), fused_linear(block.ffn.w_down, buffer=1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [M, D], positions [B, T] -> [M, D]"""
        norm = self.block.attn_norm
        qkv = self.qkv(x, norm.weight, eps=norm.eps)
        x = self.out(self.block.attn.attend(qkv, positions), residual=x)

        norm = self.block.ffn_norm
        h = self.gate_up(x, norm.weight, gated=True, eps=norm.eps)  # [M, F]
        return self.down(h, residual=x)


class FusedDecoder(nn.Module):
    """A Transformer's forward for decode and verification. The positions of one sequence follow one another.

    A Config field that changes model.py's forward must be handled here, too: see KNOWN_FIELDS."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(FusedBlock(block) for block in model.layers)
        self.head = fused_linear(model.head)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        """tokens, positions [B, T] -> logits [B, T, V]; slots are not needed, and ignored."""
        model = self.model
        x = model.embed(tokens).flatten(0, 1)  # [M, D]
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x, model.norm.weight, eps=model.norm.eps).unflatten(0, tokens.shape)

    @contextmanager
    def warm_up(self, rows: int, choose: Callable, sampling: Sampling) -> Iterator[None]:
        """While the body compiles a step, a thread runs one of so many rows: Triton compiles its kernels while Dynamo
        and Inductor are busy with the rest. With full caches Llama-2-7B is ready in 3.6 s on an H200, without it in
        5.2 s.

        Two steps that ran at once, on two streams, may leave a count that a later step would mistake for its own: in
        the end all semaphores are 0."""
        device = self.model.embed.weight.device

        @torch.no_grad()
        def step() -> None:
            with torch.cuda.device(device):  # a thread starts with the first GPU
                zeros = torch.zeros(rows, 1, dtype=torch.long, device=device)
                choose(self(zeros, zeros).squeeze(1), sampling)

        thread = Thread(target=step)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        for name, buffer in self.named_buffers():
            if name.rpartition(".")[2] in ("semaphore", "semaphores"):
                buffer.zero_()


def install_kernels(model: nn.Module) -> FusedDecoder:
    """Swaps in packed layers and attention, for prefill, and returns the module that decodes.

    Both share the weights and the caches. On a CPU the kernels' plain twins serve, as in the tests.
    With several ranks all of them call this together. Raises ValueError for a model that is not
    fusible() or has its kernels already."""
    if not fusible(model):
        raise ValueError("this model's layers cannot be fused")
    allow_fallback()
    if isinstance(model.head, ColumnParallelLinear) and model.embed.weight.is_cuda:
        communication_buffers(model.embed.weight.device)
    replace_layers(model, QuantizedLinear, lambda layer, name: PackedLinear(layer, gated=name == "w_gate_up"))
    for layer in model.layers:
        if isinstance(layer.ffn.w_gate_up, PackedLinear):
            layer.ffn = FusedFeedForward(layer.ffn)
        layer.attn = FusedAttention(layer.attn, model)
    return FusedDecoder(model)


def allow_fallback() -> None:
    """Tells Inductor that our operators have no lowering.

    Otherwise it writes out, for its message, all that an operator's arguments are made of, and each residual doubles
    that text: with 32 layers no end was seen in 400 s (torch 2.11)."""
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # imported here, as it takes a second
    FALLBACK_ALLOW_LIST.update(f"llama_fast::{name}" for name in OPERATORS)

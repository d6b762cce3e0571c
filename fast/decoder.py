"""
Swaps a model.py Transformer's slow modules for fast ones; generate.py does so with --compile.

On a CUDA GPU in 16-bit types a decode step of one row is five launches a layer: the four matrix products, with norms,
biases, residuals and SiLU inside of them, and attention, with rope and the cache's update inside of it. On a CPU a
product with few rows is one pass over the weights. Shapes as in model.py, and M = B x T.
"""
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fast.attention import update_and_attend
from fast.common import triton
from fast.cpu import ByteLinear, row_decoder
from fast.exchange import all_gather, all_reduce, mailboxes
from fast.linear import linear
from fast.packed import KernelLinear
from fast.sampling import fast_accept, fast_choose, fast_propose
from quantize import PackedLinear
from tp import RowParallel, SplitHead


class Fast(NamedTuple):
    """What decodes and what samples in the place of the plain functions; None: the plain one stays."""
    decoder: nn.Module
    choose: Callable | None = None
    propose: Callable | None = None
    accept: Callable | None = None


def swap_packed(model: nn.Module, fast: Callable[[PackedLinear, str], nn.Module]) -> None:
    """Put fast(layer, its name) in the place of each PackedLinear."""
    # Not the packed layers themselves: each is to be freed when its place is taken.
    for module in [module for module in model.modules() if not isinstance(module, PackedLinear)]:
        for name, child in list(module.named_children()):
            if isinstance(child, PackedLinear):
                setattr(module, name, fast(child, name))


class FastAttention(nn.Module):
    """Attention of model.py with the kernel in the place of rope, the cache's update and the masked product."""

    def __init__(self, attn: nn.Module, model: nn.Module):
        super().__init__()
        self.attn, self.window = attn, model.config.window or 0
        self.norms = getattr(attn.q_norm, "weight", None), getattr(attn.k_norm, "weight", None)
        self.eps = getattr(attn.q_norm, "eps", 0.0)
        B, K = attn.k_cache.shape[:2]
        buffers = dict(k_cache=attn.k_cache, v_cache=attn.v_cache, cos=model.cos, sin=model.sin,
                       arrived=attn.k_cache.new_zeros(B * K, dtype=torch.int32))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)

    def attend(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """qkv [M, (H + 2K) E] fresh from the product, positions [B, T] -> [M, H E]"""
        qkv = qkv.view(-1, positions.shape[1], qkv.shape[-1] // self.attn.head_dim, self.attn.head_dim)
        y = update_and_attend(qkv, positions, self.cos, self.sin, self.k_cache, self.v_cache, self.arrived, *self.norms,
                              self.window, self.eps)
        return y.flatten(0, 1).flatten(1)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """For prefill: x [B, T, D] -> [B, T, D]; the kernel finds cos, sin and the slots in use by itself."""
        return self.attn.wo(self.attend(self.attn.wqkv(x).flatten(0, 1), positions).unflatten(0, x.shape[:2]))


def product(layer: nn.Module, box: int = 0) -> Callable:
    """A linear layer as (x [M, K], norm's weight, residual, gated, eps) -> [M, N], in one launch or two."""
    if isinstance(layer, RowParallel):  # box: of the two mailboxes, this layer's
        partial_sum = product(layer.linear)
        return lambda x, residual: all_reduce(partial_sum(x), residual, box)
    if isinstance(layer, SplitHead):
        part = product(layer.linear)
        return lambda x, norm, eps: all_gather(part(x, norm, eps=eps), layer.vocabulary)
    if isinstance(layer, KernelLinear):
        return layer.fused
    return lambda x, norm=None, **parts: linear(x, layer.weight, norm, layer.bias, **parts)


class FastFeedForward(nn.Module):
    """FeedForward of model.py with packed weights, for prefill: x [B, T, D] -> [B, T, D]"""

    def __init__(self, ffn: nn.Module):
        super().__init__()
        self.w_gate_up, self.w_down = ffn.w_gate_up, ffn.w_down

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(self.w_gate_up(x))


class FastBlock(nn.Module):
    """A decoder layer of model.py as five launches, with several rows seven: norms then have their own."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block
        self.qkv, self.gate_up = product(block.attn.attn.wqkv), product(block.ffn.w_gate_up)
        self.out, self.down = product(block.attn.attn.wo, box=0), product(block.ffn.w_down, box=1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [M, D] -> [M, D]"""
        norm, attend = self.block.attn_norm, self.block.attn.attend
        x = self.out(attend(self.qkv(x, norm.weight, eps=norm.eps), positions), residual=x)
        norm = self.block.ffn_norm
        return self.down(self.gate_up(x, norm.weight, gated=True, eps=norm.eps), residual=x)


class FastDecoder(nn.Module):
    """The forward of a Transformer for decode. Each row's positions follow one another."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.layers, self.head = nn.ModuleList(map(FastBlock, model.layers)), product(model.head)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        """tokens, positions [B, T] -> logits [B, T, V]"""
        model = self.model
        x = model.embed(tokens).flatten(0, 1)  # [M, D]
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x, model.norm.weight, eps=model.norm.eps).unflatten(0, tokens.shape)


def swap_in(model: nn.Module) -> Fast:
    """After model.setup(): puts fast modules into the model and returns what decodes, the same module or another, which
    shares weights and caches, and what samples."""
    weight = model.embed.weight
    if weight.device.type == "cpu":
        swap_packed(model, lambda layer, name: ByteLinear(layer))
        return Fast(row_decoder(model))
    nvidia = weight.device.type == "cuda" and triton and torch.version.cuda
    apart = any(isinstance(linear, nn.ModuleList) for layer in model.layers
                for linear in (layer.attn.wqkv, layer.ffn.w_gate_up))  # quantize.Parts
    if nvidia and weight.itemsize == 2 and torch.cuda.get_device_capability(weight.device) >= (8, 0) and not apart:
        return Fast(fast_path(model), fast_choose, fast_propose, fast_accept)
    if weight.device.type == "cuda":
        print("plain PyTorch decodes: kernels want Triton, compute capability 8.0, 16-bit activations, and q, k, v, "
              "or gate and up, all quantized, in one order", file=sys.stderr)
    return Fast(model)


def fast_path(model: nn.Module) -> FastDecoder:
    """Swaps in attention, for prefill, and returns the model for decode."""
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # not above: it takes a second to import
    # Unless they are listed, Inductor writes out all that an operator's arguments are made of, and each residual
    # doubles that text: with 32 layers no end was seen in 400 s (torch 2.11).
    operators = "linear packed_linear update_and_attend sample distribute fused_all_reduce fused_all_gather".split()
    FALLBACK_ALLOW_LIST.update(f"llama_fast::{name}" for name in operators)
    if isinstance(model.head, SplitHead) and model.embed.weight.is_cuda:
        mailboxes(model.embed.weight.device)  # all ranks come here together
    swap_packed(model, lambda layer, name: KernelLinear(layer, gated=name == "w_gate_up"))
    for layer in model.layers:
        if isinstance(layer.attn, FastAttention):
            raise ValueError("this model's attention is swapped already: load it again")
        if isinstance(layer.ffn.w_gate_up, KernelLinear):
            layer.ffn = FastFeedForward(layer.ffn)
        layer.attn = FastAttention(layer.attn, model)
    return FastDecoder(model)

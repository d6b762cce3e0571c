"""
Swaps a model.py Transformer's slow modules for fast ones; generate.py does so with --compile.

On a CUDA GPU in 16-bit types a decode step of one row is five launches a layer: the four matrix products, with norms,
biases, residuals and SiLU inside of them, and attention, with rope and the cache's update inside of it. On a CPU a
product with few rows is one pass over the weights. Shapes as in model.py, and M = B x T.
"""
import copy
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import linear, triton, update_and_attend
from packed import KernelLinear, PackedLinear, unpack


MOST_ROWS = 8  # of RowLinear; of ByteLinear twice as many, as MKL would want its weights unpacked into memory first


class RowLinear(nn.Module):
    """nn.Linear for few rows on a CPU as products and sums, which torch.compile fuses into one pass over the weights.

    It reads them at 30 to 48 GB/s, MKL's matrix-vector product at 16 (fp32, 2 cores of an AMD EPYC): SmolLM2-135M
    decodes at 79 tokens/s instead of 32. A feed-forward layer of its size takes 0.51 ms with 1 row, 0.46 with 2, 0.85
    with 4, 1.7 with 9 and 2.2 with 16, with MKL 1.3, 1.9, 1.5, 1.6 and 1.3 (such cores, busier). Eager code and more
    rows take the plain twin."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        N, K = self.weight.shape
        if not torch.compiler.is_compiling() or x.numel() > MOST_ROWS * K:
            return F.linear(x, self.weight, self.bias)
        w, rows = self.weight.float(), x.reshape(-1, K).float().unbind()
        y = torch.stack([(w * row).sum(-1) for row in rows])  # [M, N], in one loop: what is read of w serves all rows
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


class ByteLinear(nn.Module):
    """PackedLinear for a CPU, a code a byte, int4 too; if it `decodes`, few rows, in C groups, as RowLinear does it."""

    def __init__(self, packed: PackedLinear):
        super().__init__()
        middle = 2 ** (packed.bits - 1)
        zeros = torch.zeros_like(packed.scales) if packed.zeros is None else packed.zeros - middle
        codes = unpack(packed.words, packed.bits, packed.in_features) - middle
        self.codes, self.scales, self.offsets = (nn.Parameter(tensor, requires_grad=False) for tensor in (
            codes.to(torch.int8), packed.scales.float(), packed.scales.float() * zeros))
        self.bias, self.order, self.decodes = packed.bias, packed.order, False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        (N, K), C = self.codes.shape, self.scales.shape[1]
        if self.order is not None:
            x = x[..., self.order]
        codes = self.codes.view(N, C, -1).float()
        if not self.decodes or not torch.compiler.is_compiling() or x.numel() > 2 * MOST_ROWS * K:
            w = codes * self.scales[:, :, None] - self.offsets[:, :, None]
            return F.linear(x, w.flatten(1).to(x.dtype), self.bias)
        rows = x.reshape(-1, C, K // C).float().unbind()  # [C, K / C] each
        y = torch.stack([((codes * row).sum(-1) * self.scales - self.offsets * row.sum(-1)).sum(-1) for row in rows])
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


def swap_packed(model: nn.Module, fast: Callable[[PackedLinear, str], nn.Module]) -> None:
    """Put fast(layer, its name) in the place of each PackedLinear."""
    # Not the packed layers themselves: each is to be freed when its place is taken.
    for module in [module for module in model.modules() if not isinstance(module, PackedLinear)]:
        for name, child in list(module.named_children()):
            if isinstance(child, PackedLinear):
                setattr(module, name, fast(child, name))


def row_decoder(module: nn.Module) -> nn.Module:
    """For a CPU: the module again, with the same weights and caches, and linear layers for few rows. Prefill keeps the
    others: where the number of rows is open, so that one code serves all prompts, the compiler must not ask for it."""
    if type(module) is nn.Linear:
        return RowLinear(module)
    again = copy.copy(module)
    again._modules = {name: row_decoder(child) for name, child in module.named_children()}
    again._compiled_call_impl = None
    if isinstance(module, ByteLinear):
        again.decodes = True
    return again


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


def product(layer: nn.Module) -> Callable:
    """A linear layer as (x [M, K], norm's weight, residual, gated, eps) -> [M, N], in one launch or two."""
    if hasattr(layer, "fused"):
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
        layers = block.attn.attn.wqkv, block.attn.attn.wo, block.ffn.w_gate_up, block.ffn.w_down
        self.qkv, self.out, self.gate_up, self.down = map(product, layers)

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


def swap_in(model: nn.Module) -> nn.Module:
    """After model.setup(): puts fast modules into the model and returns the one to decode with, the same or another;
    they share weights and caches."""
    weight = model.embed.weight
    if weight.device.type == "cpu":
        swap_packed(model, lambda layer, name: ByteLinear(layer))
        return row_decoder(model)
    nvidia = weight.device.type == "cuda" and triton and torch.version.cuda
    apart = any(isinstance(linear, nn.ModuleList) for layer in model.layers
                for linear in (layer.attn.wqkv, layer.ffn.w_gate_up))  # quantize.Parts
    if nvidia and weight.itemsize == 2 and torch.cuda.get_device_capability(weight.device) >= (8, 0) and not apart:
        return fast_path(model)
    if weight.device.type == "cuda":
        print("plain PyTorch decodes: kernels want Triton, compute capability 8.0, 16-bit activations, and q, k, v, "
              "or gate and up, all quantized, in one order", file=sys.stderr)
    return model


def fast_path(model: nn.Module) -> FastDecoder:
    """Swaps in attention, for prefill, and returns the model for decode."""
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # not above: it takes a second to import
    # Unless they are listed, Inductor writes out all that an operator's arguments are made of, and each residual
    # doubles that text: with 32 layers no end was seen in 400 s (torch 2.11).
    operators = "linear packed_linear update_and_attend sample distribute all_reduce all_gather".split()
    FALLBACK_ALLOW_LIST.update(f"llama_fast::{name}" for name in operators)
    swap_packed(model, lambda layer, name: KernelLinear(layer, gated=name == "w_gate_up"))
    for layer in model.layers:
        if isinstance(layer.attn, FastAttention):
            raise ValueError("this model's attention is swapped already: load it again")
        if isinstance(layer.ffn.w_gate_up, KernelLinear):
            layer.ffn = FastFeedForward(layer.ffn)
        layer.attn = FastAttention(layer.attn, model)
    return FastDecoder(model)

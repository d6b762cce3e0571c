"""
Swaps a model.py Transformer's modules for fast ones on a CUDA GPU, in 16-bit types.

On one GPU a decode step of one row is five launches a layer; with several ranks two all-reduces are
launches too:

    wqkv         norm, product, bias               fused_linear
    attention    rope, cache update, attention     update_and_attend
    wo           product, residual                 fused_linear
    w_gate_up    norm, product, SiLU gate          fused_linear
    w_down       product, residual                 fused_linear

Of mixtures of experts, and of many dense models, all layers of a step of one row are one launch,
recurrent ones too, and what two ranks exchange is in it: see step.py.

With several ranks fused_all_reduce adds the residual, behind wo and w_down. With several rows the
norms are launches of their own: seven. So is always a norm behind a branch (OLMo, Gemma 3), which
adds the residual in the product's place. Prefill keeps the model's own forward, with attention and
quantized feed-forward layers swapped.

A mixture of experts takes three launches in the place of the last two: see experts.py. A recurrent
layer takes five in the place of the first three: norm and w_gates, w_in, two of delta.py, wo.
Latent attention takes six: w_in, wq, three of latent.py, wo.

A layer's two halves, attention and feed-forward part, are replaced each for itself. A half of
another kind, such as experts in codes that no kernel knows, stays model.py's, and the other half
keeps its kernels.

Shapes: as in model.py, and M = B x T rows.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread

import torch
from torch import Tensor, nn

from drafts.dflash import DFlash
from drafts.eagle import FirstBlock
from drafts.heads import DraftHead
from fast.attention import attend, few_pairs, store, update_and_attend
from fast.collectives import MIXTURE, communication_buffers, fused_all_gather, fused_all_reduce
from fast.common import GATES
from fast.delta import FusedDelta
from fast.experts import MOST_ROWS, FusedMoE, why_plain_experts
from fast.known import unknown_values
from fast.latent import FusedLatent
from fast.linear import (
    FusedGate,
    add_norm,
    add_norms,
    capped,
    gate_number,
    linear,
    linear_gate,
    norm_linear,
)
from fast.packed_linear import PackedLinear, packs
from fast.step import compiled, step_of
from model import (
    Attention,
    BareNorm,
    Block,
    DeltaCache,
    DeltaNet,
    DenseAndMoE,
    FeedForward,
    KVCache,
    LatentAttention,
    MoE,
    PerLayerGate,
    RMSNorm,
    RopeTable,
    Transformer,
    visible,
)
from quantize import QuantizedLinear, replace_layers
from tp import ColumnParallelLinear, ParallelExperts, RowParallelLinear

OPERATORS = (
    "linear",
    "packed_product",
    "add_norm",
    "add_norms",
    "capped",
    "linear_gate",
    "norm_linear",
    "gate",
    "attend",
    "update_and_attend",
    "latent_attend",
    "store",
    "gated_delta",
    "delta_rule",
    "fused_all_reduce",
    "fused_all_gather",
    "mixture",
    "few_rows_mixture",
    "all_layers",
    "grouped_linear",
)


# What can be replaced


def unknown_fields(model: Transformer) -> list[str]:
    """The values of Config and its parts that fast/ does not know, each once: "Config.cap=30.0"."""
    layers = model.config.layers
    parts = [part for layer in layers for part in (layer.rope, layer.moe) if part]
    described = dict.fromkeys([model.config, *layers, *parts])
    found = [*dict.fromkeys(value for values in described for value in unknown_values(values))]
    scale = model.config.residual_scale
    if scale == 0 or scale != 1 and model.ple is not None:  # FusedDecoder divides by it
        found.append(f"Config.residual_scale={scale}")
    return found


def fusible(layer: nn.Module) -> bool:
    """Whether fused_linear() takes this layer. q, k and v, or gate and up, that are quantized apart
    are none."""
    if isinstance(layer, RowParallelLinear | ColumnParallelLinear):
        layer = layer.linear
    if isinstance(layer, QuantizedLinear):
        return packs(layer)
    return isinstance(layer, nn.Linear | PackedLinear)


def why_plain_attention(block: Block) -> str | None:
    """Why this layer's attention stays model.py's; None: it has a kernel."""
    attn = block.attn
    if type(attn) is DeltaNet and type(attn.cache) is DeltaCache:
        plain_gates = type(attn.w_gates) is nn.Linear
        if not (plain_gates and fusible(attn.w_in) and fusible(attn.wo)):
            return "a recurrent layer's matrices are quantized apart, or in unknown codes or scales"
        is_known = type(block.attn_norm) is RMSNorm and not unknown_norm(block.attn_post_norm)
        return None if is_known else "a norm that is no RMSNorm"
    if type(attn) not in (Attention, LatentAttention):
        return f"{type(attn).__name__} in the place of Attention"
    if type(attn.cache) is not KVCache:
        return f"{type(attn.cache).__name__} in the place of KVCache"
    norms = block.attn_norm, block.attn_post_norm, attn.q_norm
    if type(attn) is LatentAttention:
        products = attn.w_in, *([attn.wq] if attn.latent.q_dim else []), attn.wo
        if type(attn.wkv) is not nn.Linear or not all(map(fusible, products)):
            return "latent attention's matrices are quantized apart, or in unknown codes or scales"
        is_known = type(block.attn_norm) is RMSNorm and not unknown_norm(*norms, attn.kv_norm)
        return None if is_known else "a norm that is no RMSNorm"
    if not (fusible(attn.wqkv) and fusible(attn.wo)):
        return "q, k and v are quantized apart, or in codes or scales that no kernel knows"
    whole = isinstance(attn.q_norm, RMSNorm) and len(attn.q_norm.weight) > attn.head_dim
    if whole and (
        attn.gated
        or len(attn.sizes) < 3
        or isinstance(attn.v_norm, BareNorm)
        or attn.head_dim > 256
    ):
        return "a norm of all heads and gates, values of another kind, or heads of above 256"
    of_heads = attn.q_norm, attn.k_norm, attn.v_norm
    if unknown_norm(*norms[:2], *(norm for norm in of_heads if type(norm) is not BareNorm)):
        return "a norm that is no RMSNorm"
    return None


def why_plain_ffn(block: Block) -> str | None:
    """Why this layer's feed-forward part stays model.py's; None: it has kernels."""
    ffn = block.ffn
    if unknown_norm(block.ffn_norm, block.ffn_post_norm):
        return "a norm that is no RMSNorm"
    if type(ffn) is DenseAndMoE:
        norms = ffn.dense_norm, ffn.dense_post_norm, ffn.moe_norm, ffn.moe_post_norm
        norms = *norms, block.ffn_post_norm
        if not all(type(norm) is RMSNorm for norm in norms):
            return "a norm that is no RMSNorm"
        return why_plain_dense(ffn.dense) or why_plain_experts(ffn.moe)
    if type(ffn) in (MoE, ParallelExperts):
        return why_plain_experts(ffn)
    return why_plain_dense(ffn)


def why_plain_dense(ffn: nn.Module) -> str | None:
    """why_plain_ffn() of what may be a FeedForward."""
    if type(ffn) is not FeedForward:
        return f"{type(ffn).__name__} in the place of FeedForward"
    if not gate_number(ffn.gate):
        return f"{ffn.gate.activation} as the gate's function"
    if not (fusible(ffn.w_gate_up) and fusible(ffn.w_down)):
        return "gate and up are quantized apart, or in codes or scales that no kernel knows"
    return None


def unknown_norm(*norms: nn.Module) -> bool:
    return any(type(norm) not in (RMSNorm, nn.Identity) for norm in norms)


def plain_halves(model: Transformer) -> Counter[str]:
    """Why halves of layers stay model.py's, and how many do for each reason.

    Raises ValueError for a model that has its kernels already."""
    fused = FusedAttention | FusedDelta | FusedLatent | FusedFeedForward | FusedMoE
    if any(isinstance(half, fused) for block in model.layers for half in (block.attn, block.ffn)):
        raise ValueError("this model has its kernels already: load it again")
    reasons = Counter(
        why(block) for block in model.layers for why in (why_plain_attention, why_plain_ffn)
    )
    del reasons[None]
    return reasons


# The modules


def fused_linear(layer: nn.Module, buffer: int = 0) -> Callable:
    """A linear layer as a function (x [M, K], norm's weight [K], residual=, gated=, eps=) -> [M,
    N], in one launch or two; gated -> [M, N / 2].

    The layer's type decides which. A ColumnParallelLinear takes no residual, because each rank has
    a part of the outputs. A RowParallelLinear takes only a residual, because the ranks' parts must
    be summed first. buffer: see collectives.py."""
    if isinstance(layer, RowParallelLinear):
        partial_sum = fused_linear(layer.linear)

        def summed(x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = partial_sum(x)
            return fused_all_reduce(
                y, torch.zeros_like(y) if residual is None else residual, buffer
            )

        return summed
    if isinstance(layer, ColumnParallelLinear):
        part = fused_linear(layer.linear)
        return lambda x, norm, eps: fused_all_gather(part(x, norm, eps=eps), layer.vocab_size)
    if isinstance(layer, PackedLinear):
        return layer.fused
    return lambda x, norm=None, **options: linear(x, layer.weight, norm, layer.bias, **options)


class FusedAttention(nn.Module):
    """Attention of model.py, with one kernel in the place of rope, the cache's update and the
    masked product.

    On a CPU it is model.py's."""

    def __init__(self, attn: Attention, table: RopeTable, window: int | None, causal: bool = True):
        super().__init__()
        self.attn, self.cache, self.table, self.window = attn, attn.cache, table, window
        self.causal = causal
        B, K = attn.cache.k.shape[:2]
        # A BareNorm has no weight, and the kernel's has 1.
        ones = torch.ones(attn.head_dim, device=attn.cache.k.device)
        self.register_buffer("ones", ones, persistent=False)
        self.norms = [
            self.ones if isinstance(norm, BareNorm) else getattr(norm, "weight", None)
            for norm in (attn.q_norm, attn.k_norm)
        ]
        self.norm_values = isinstance(attn.v_norm, BareNorm)
        self.eps = getattr(attn.q_norm, "eps", getattr(attn.v_norm, "eps", 0.0))
        self.G = attn.sizes[0] // attn.head_dim // K
        self.gated = 0 if not attn.gated else 2 if attn.gate_apart else 1
        self.kernel = attn.cache.k.is_cuda
        semaphore = torch.zeros(B * K, dtype=torch.int32, device=attn.cache.k.device)
        self.register_buffer("semaphore", semaphore, persistent=False)

    def attend(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Decode and verification: qkv [M, (H + 2K) E] fresh from the product, positions [B, T] ->
        [M, H E]"""
        attn, cache, T = self.attn, self.cache, positions.shape[1]
        qkv = qkv.unflatten(0, (-1, T))  # [B, T, (H + 2K) E]
        if not self.kernel:
            rows, slots = torch.arange(len(qkv))[:, None], torch.arange(cache.k.shape[2])
            mask = visible(slots, positions, self.window)
            return attn.attend(qkv, positions, *self.table(positions), mask, rows).flatten(0, 1)
        if not few_pairs(T, self.G):
            rows = torch.arange(len(qkv), device=qkv.device)[:, None]
            cos, sin = self.table(positions)
            return self.update_then_attend(qkv, positions, cos, sin, rows).flatten(0, 1)
        qkv = qkv.unflatten(-1, (-1, attn.head_dim))  # [B, T, H + 2K, E]
        rope = attn.rope
        y = update_and_attend(
            qkv,
            positions,
            self.table.cos,
            self.table.sin,
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            self.semaphore,
            *self.norms,
            attn.sinks,
            self.window or 0,
            self.eps,
            attn.scale,
            len(rope.frequencies),
            rope.q_growth,
            rope.original,
            self.gated,
            self.causal,
            len(attn.sizes) - 1,
            self.norm_values,
        )
        return y.flatten(0, 1).flatten(1)

    def update_then_attend(
        self, qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, rows: Tensor
    ) -> Tensor:
        """model.Attention.attend() with a kernel in the place of the masked product alone."""
        attn, gate = self.attn, None
        if attn.gated:
            qkv, gate = attn.split_gates(qkv)
        q, k, v = attn.rotate(qkv, positions, cos, sin)
        if k is not None:
            self.cache.write(k, v, rows, positions)
        caches = self.cache.k, self.cache.v, self.cache.k_scale, self.cache.v_scale
        y = attend(q, positions, *caches, self.window or 0, attn.scale, attn.sinks).flatten(2)
        return y if gate is None else y * torch.sigmoid(gate)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        rows: Tensor,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Prefill: x [B, T, D] -> [B, T, D]. The kernel finds the slots in use by itself."""
        if not self.kernel:
            return self.attn(x, positions, cos, sin, mask, rows)
        return self.attn.wo(self.update_then_attend(self.attn.wqkv(x), positions, cos, sin, rows))


class FusedNorm(nn.Module):
    """RMSNorm of model.py in one launch, for what a draft's head norms outside of its layers."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return add_norm(x.flatten(0, -2), self.weight, self.eps).view_as(x)


class FusedFeedForward(nn.Module):
    """FeedForward of model.py, whose w_gate_up may be a gated PackedLinear."""

    def __init__(self, ffn: FeedForward):
        super().__init__()
        self.number = gate_number(ffn.gate)
        ffn.gate = FusedGate(ffn.gate)
        if isinstance(ffn.w_gate_up, QuantizedLinear):
            ffn.w_gate_up = PackedLinear(ffn.w_gate_up, self.number)
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        """Prefill: x [B, T, D] -> [B, T, D]"""
        if isinstance(self.ffn.w_gate_up, PackedLinear):
            return self.ffn.w_down(self.ffn.w_gate_up(x))
        return self.ffn(x)


class Half(nn.Module):
    """What both halves of a Block for decode have: norms before and behind, and the residual
    stream.

    The stream is 1 / scale times model.py's (see FusedDecoder). An RMSNorm of it is the same with
    eps / scale ** 2."""

    def __init__(self, norm: nn.Module, post_norm: nn.Module, scale: float):
        super().__init__()
        self.norm, self.post_norm, self.scale = norm, post_norm, scale
        self.layer_scale = None  # [1]: all of the stream, times this
        self.before = (
            dict(norm=norm.weight, eps=norm.eps / scale**2) if isinstance(norm, RMSNorm) else {}
        )

    def plain_norm(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale)

    def add(self, x: Tensor, out: Callable, y: Tensor) -> Tensor:
        """The stream x with what the half's last product makes of y."""
        if isinstance(self.post_norm, nn.Identity):
            x = out(y, residual=x)
            return x if self.layer_scale is None else x * self.layer_scale
        return add_norm(out(y), self.post_norm.weight, self.post_norm.eps, x, self.layer_scale)


class AttentionHalf(Half):
    """The first half of a Block for decode: norm, attention, residual. Three launches, if it is
    fused; five, if it is a recurrent layer; six of latent attention."""

    def __init__(self, block: Block, table: RopeTable):
        super().__init__(block.attn_norm, block.attn_post_norm, block.scale)
        self.attn, self.table, self.window = block.attn, table, block.config.window
        self.fused = isinstance(block.attn, FusedAttention)
        self.recurrent = isinstance(block.attn, FusedDelta)
        self.latent = isinstance(block.attn, FusedLatent)
        self.kernel = self.fused or self.recurrent or self.latent
        if self.fused:
            self.qkv = fused_linear(block.attn.attn.wqkv)
            self.out = fused_linear(block.attn.attn.wo, buffer=0)
        if self.recurrent:
            mixer = block.attn.mixer
            self.qkvz, self.gates = fused_linear(mixer.w_in), mixer.w_gates
            self.out = fused_linear(mixer.wo, buffer=0)
        if self.latent:
            attn = block.attn.attn
            self.made, self.q_norm, self.q_dim = fused_linear(attn.w_in), attn.q_norm, attn.sizes[0]
            self.queries = fused_linear(attn.wq) if attn.latent.q_dim else None
            self.out = fused_linear(attn.wo, buffer=0)

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """x [M, D], positions [B, T], slots [any], rows [B, 1] -> [M, D]"""
        if self.fused:
            return self.add(x, self.out, self.attn.attend(self.qkv(x, **self.before), positions))
        if self.latent:
            made = self.made(x, **self.before)  # [M, any]
            q = made[:, : self.q_dim]
            if self.queries is not None:
                q = self.queries(q, self.q_norm.weight, eps=self.q_norm.eps)
            return self.add(x, self.out, self.attn.attend(q, made, positions))
        if self.recurrent:
            y, gates = norm_linear(x, self.norm.weight, self.before["eps"], self.gates.weight)
            made = self.qkvz(y), gates
            qkvz, gates = (part.unflatten(0, (-1, positions.shape[1])) for part in made)
            return self.add(x, self.out, self.attn.mix(qkvz, gates, positions).flatten(0, 1))
        mask = visible(slots, positions, self.window)
        y = self.plain_norm(x).unflatten(0, (-1, positions.shape[1]))  # [B, T, D]
        y = self.attn(y, positions, *self.table(positions), mask, rows)
        return x + self.post_norm(y).flatten(0, 1)


class FirstHalf(AttentionHalf):
    """The first half of an EAGLE head's first layer: three launches more than another's, two for
    both norms, and one for the residual."""

    def __init__(self, block: FirstBlock, table: RopeTable):
        super().__init__(block, table)
        weights = torch.stack((block.attn_norm.weight, block.state_norm.weight))  # [2, D]
        self.register_buffer("weights", weights.detach(), persistent=False)
        self.register_buffer("ones", torch.ones_like(weights[0]), persistent=False)
        self.eps, self.norm_before_residual = block.state_norm.eps, block.norm_before_residual

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """x [M, 2 D], embeddings and states side by side, positions [B, T], slots [any], rows [B,
        1] -> [M, D]"""
        x = x.unflatten(-1, self.weights.shape)  # [M, 2, D]
        normed = add_norm(x.flatten(0, 1), self.ones, self.eps).view_as(x) * self.weights
        residual = (normed if self.norm_before_residual else x)[:, 1].contiguous()
        if self.fused:
            return self.out(
                self.attn.attend(self.qkv(normed.flatten(1)), positions), residual=residual
            )
        mask = visible(slots, positions, self.window)
        y = normed.flatten(1).unflatten(0, (-1, positions.shape[1]))  # [B, T, 2 D]
        return residual + self.attn(y, positions, *self.table(positions), mask, rows).flatten(0, 1)


class FeedForwardHalf(Half):
    """The second half of a Block for decode: norm, feed-forward part, residual. Two launches, if it
    is fused; three, if it is a mixture of experts; six of a dense part and a mixture."""

    def __init__(self, block: Block):
        super().__init__(block.ffn_norm, block.ffn_post_norm, block.scale)
        self.ffn = block.ffn
        if block.ple is None:  # else FusedBlock.end has it, behind the layer's own gate
            self.layer_scale = block.layer_scale
        part = block.ffn
        self.both = isinstance(part, DenseAndMoE) and isinstance(part.moe, FusedMoE)
        if self.both:
            part.moe.buffer = MIXTURE
            part = part.dense
        self.experts = isinstance(part, FusedMoE)
        self.fused = isinstance(part, FusedFeedForward)
        if self.fused:
            self.gate_up = partial(fused_linear(part.ffn.w_gate_up), gated=part.number)
            self.down = fused_linear(part.ffn.w_down, buffer=1)

    def forward(self, x: Tensor, T: int) -> Tensor:
        """x [M, D] -> [M, D]. T: tokens of a sequence."""
        if self.both and len(x) <= MOST_ROWS:
            return self.side_by_side(x)
        if self.fused and not self.both:
            return self.add(x, self.down, self.gate_up(x, **self.before))
        if self.experts and len(x) <= MOST_ROWS:
            return self.add(x, partial(self.ffn.decode, **self.before), x)
        y = self.post_norm(self.ffn(self.plain_norm(x).unflatten(0, (-1, T)))).flatten(0, 1)
        return x + y if self.layer_scale is None else (x + y) * self.layer_scale

    def side_by_side(self, x: Tensor) -> Tensor:
        """forward() of a DenseAndMoE."""
        ffn = self.ffn
        of_dense, of_moe = (
            (norm.weight, norm.eps / self.scale**2) for norm in (ffn.dense_norm, ffn.moe_norm)
        )
        dense = self.down(self.gate_up(x, of_dense[0], eps=of_dense[1]))
        mixture = ffn.moe.decode(x, *of_moe)
        norms = ffn.dense_post_norm, ffn.moe_post_norm, self.post_norm
        weights, eps = [norm.weight for norm in norms], [norm.eps for norm in norms]
        return add_norms(dense, mixture, weights, eps, x, self.layer_scale)


class FusedPerLayerGate(nn.Module):
    """Block.end() of model.py for decode: PerLayerGate and the layer's scale, in three launches."""

    def __init__(self, ple: PerLayerGate, layer_scale: Tensor | None):
        super().__init__()
        self.ple, self.layer_scale = ple, layer_scale
        self.number, self.up = GATES[ple.activation], fused_linear(ple.up)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """x [M, D], own [M, P] -> [M, D]"""
        norm = self.ple.norm
        y = self.up(linear_gate(x, self.ple.gate.weight, own, self.number))
        return add_norm(y, norm.weight, norm.eps, x, self.layer_scale)


class FusedBlock(nn.Module):
    """A decoder layer of model.py for decode."""

    def __init__(self, block: Block, table: RopeTable):
        super().__init__()
        half = FirstHalf if isinstance(block, FirstBlock) else AttentionHalf
        self.attention, self.feed_forward = half(block, table), FeedForwardHalf(block)
        self.block, ple = block, block.ple
        known = ple is not None and type(ple.gate) is nn.Linear and fusible(ple.up)
        if known and ple.activation in GATES:
            self.end = FusedPerLayerGate(ple, block.layer_scale)
        else:
            self.end = block.end

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        rows: Tensor,
        own: Tensor | None = None,
    ) -> Tensor:
        """x [M, D], positions [B, T], slots [any], rows [B, 1], own [M, P] or None -> [M, D]"""
        x = self.attention(x, positions, slots, rows)
        x = self.feed_forward(x, positions.shape[1])
        return x if own is None else self.end(x, own)


class FusedDecoder(nn.Module):
    """A Transformer's forward for decode and verification. The positions of one sequence follow one
    another.

    kernels: all layers' attention has a kernel for decode, which finds the slots in use by itself.
    finds_slots: so have prompts; those of latent attention are model.py's, and want slots.
    one_row: a step.Step for the layers of one row, if they need no launches of their own.

    The residual stream is 1 / residual_scale times model.py's: so the scale costs nothing, as
    RMSNorms take it out. A Config field that changes model.py's forward must be handled here before
    known.py may have it."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(
            FusedBlock(block, rope_table(model, block)) for block in model.layers
        )
        self.kernels = all(layer.attention.kernel for layer in self.layers)
        self.finds_slots = self.kernels and not any(layer.attention.latent for layer in self.layers)
        self.scale = model.config.residual_scale
        self.head = None
        if fusible(model.head) and type(model.norm) is RMSNorm:
            self.head = fused_linear(model.head)
            self.register_buffer("last_norm", last_norm(model), persistent=False)
        self.one_row = step_of(self)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """tokens, positions [B, T] -> logits [B, T, V]. slots, as in model.py, are for attention
        without a kernel; inputs are as there."""
        model, rows = self.model, self.model.rows[: len(tokens)]
        slots = model.slots if slots is None else slots
        x = (model.embedded(tokens) if inputs is None else inputs).flatten(0, 1)  # [M, D]
        own = None if model.ple is None else model.ple(tokens.flatten(), x)  # [M, n_layer, P]
        if self.scale != 1:
            x = x / self.scale
        if self.one_row is not None and len(x) == 1:
            x = self.one_row(x, positions)
        else:
            for i, layer in enumerate(self.layers):
                self.keep(i, x, tokens.shape, rows, positions)
                x = layer(x, positions, slots, rows, None if own is None else own[:, i])
            self.keep(len(self.layers), x, tokens.shape, rows, positions)
        if self.head is not None:
            x = self.head(x, self.last_norm, eps=model.norm.eps / self.scale**2)
        else:
            # forward() would take a prompt's kernels.
            head = model.head.fused if isinstance(model.head, PackedLinear) else model.head
            x = head(model.norm(x * self.scale) * model.config.logits_scale)
        if cap := model.config.logits_cap:
            x = capped(x, cap)
        return x.unflatten(0, tokens.shape)

    def keep(
        self, place: int, x: Tensor, shape: torch.Size, rows: Tensor, positions: Tensor
    ) -> None:
        """model.keep() of the residual stream x [M, D]."""
        if place in self.model.places:
            x = x if self.scale == 1 else x * self.scale
            self.model.keep(place, x.unflatten(0, shape), rows, positions)

    @torch.no_grad()
    def try_prompts(self, most: int) -> None:
        """Compiles the kernels that prompts of up to so many rows have, beside what any prompt
        has."""
        for module in self.model.layers.modules():
            if isinstance(module, PackedLinear | FusedMoE):
                module.try_prompts(most, self.model.embed.weight.dtype)

    def step(self, rows: int, choose: Callable, settings: Tensor) -> list[Callable]:
        """The forward of so many rows, and the choice: each compiles its kernels."""
        weight, vocab_size = self.model.embed.weight, self.model.config.vocab_size
        zeros = torch.zeros(rows, 1, dtype=torch.long, device=weight.device)
        logits = torch.zeros(rows, vocab_size, dtype=weight.dtype, device=weight.device)

        def forward() -> None:
            if rows == 1 and self.one_row is not None:
                self.one_row = compiled(self.one_row)
            self(zeros, zeros)

        return [forward, partial(choose, logits, settings)]

    @contextmanager
    def beside(self, functions: list[Callable]) -> Iterator[None]:
        """While the body compiles prefill, threads run these functions: Triton compiles its kernels
        while Dynamo and Inductor are busy with the layers. With full caches Llama-2-7B was ready in
        3.6 s on an H200, without it in 5.2 s (2026-11-23).

        Functions that ran at once, on several streams, may leave a count that a later step would
        mistake for its own: in the end all semaphores are 0."""
        device = self.model.embed.weight.device

        @torch.no_grad()
        def run(function: Callable) -> None:
            with torch.cuda.device(device):  # a thread starts with the first GPU
                function()

        threads = [Thread(target=run, args=[function]) for function in functions]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join()
        for name, buffer in self.named_buffers():
            if name.rpartition(".")[2] in ("semaphore", "semaphores"):
                buffer.zero_()


class BlockHalf(Half):
    """The first half of a layer of drafts/dflash.py. Where its kernel is not right, as for many pairs,
    attention is model.py's.

    causal: whether a token of a block sees those behind it."""

    def __init__(self, block: Block, table: RopeTable, causal: bool):
        super().__init__(block.attn_norm, block.attn_post_norm, block.scale)
        self.attn, self.table, window = block.attn, table, block.config.window
        self.qkv, self.out = fused_linear(block.attn.wqkv), fused_linear(block.attn.wo, buffer=0)
        self.fused = FusedAttention(block.attn, table, window, causal)
        self.has_kernel = self.fused.kernel and (causal or window is None)

    def takes(self, T: int) -> bool:
        return self.has_kernel and few_pairs(T, self.fused.G)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, rows: Tensor) -> Tensor:
        """x [M, D], positions [B, T], mask [B, 1, T, L], which the kernel does without, rows [B, 1]
        -> [M, D]"""
        qkv = self.qkv(x, **self.before)
        if self.takes(positions.shape[1]):
            return self.add(x, self.out, self.fused.attend(qkv, positions))
        qkv = qkv.unflatten(0, (-1, positions.shape[1]))
        y = self.attn.attend(qkv, positions, *self.table(positions), mask, rows)
        return self.add(x, self.out, y.flatten(0, 1))

    def store(self, context: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Keys and values of the context [M, D] at positions [B, T]."""
        attn = self.attn
        of_queries, of_keys, _ = attn.sizes
        if not (self.has_kernel and isinstance(attn.k_norm, nn.Identity | RMSNorm)):
            qkv = self.qkv(context).unflatten(0, positions.shape)
            _, k, v = attn.rotate(qkv, positions, *self.table(positions))
            return attn.cache.write(k, v, rows, positions)
        if isinstance(attn.wqkv, nn.Linear):  # of queries there are none
            w, bias = attn.wqkv.weight, attn.wqkv.bias
            bias = None if bias is None else bias[of_queries:]
            kv = linear(context, w[of_queries:], None, bias)
        else:
            kv = self.qkv(context)[:, of_queries:].contiguous()
        kv = kv.view(*positions.shape, 2 * of_keys // attn.head_dim, attn.head_dim)
        fused, cache, rope = self.fused, attn.cache, attn.rope
        caches = cache.k, cache.v, cache.k_scale, cache.v_scale
        cos, sin = self.table.cos, self.table.sin
        store(kv, positions, cos, sin, *caches, fused.norms[1], fused.eps, len(rope.frequencies))


class BlockDecoder(nn.Module):
    """DFlash.read(), forward() and logits(), for layers that are Blocks. The final norm is with the
    head."""

    def __init__(self, model: DFlash):
        super().__init__()
        self.model = model
        for block in model.layers:
            block.ffn = FusedFeedForward(block.ffn)
        pack_linears(model)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                (BlockHalf(block, rope_table(model, block), causal), FeedForwardHalf(block))
            )
            for block in model.layers
            for causal in [model.is_causal(block.config.window)]
        )
        self.fc = fused_linear(model.fc) if fusible(model.fc) else model.fc
        self.head = None
        if fusible(model.head):
            self.head = fused_linear(model.head)
            self.register_buffer("last_norm", last_norm(model), persistent=False)

    def read(self, features: Tensor, positions: Tensor) -> None:
        """features [B, T, n target_dim] at positions [B, T]"""
        model = self.model
        context = self.fc(features.flatten(0, 1))
        context = add_norm(context, model.context_norm.weight, model.context_norm.eps)
        for attention, _ in self.layers:
            attention.store(context, positions, model.rows[: len(positions)])

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """tokens, positions [B, T] -> states in front of the final norm [B, T - 1, D]"""
        model, rows, T = self.model, self.model.rows[: len(tokens)], tokens.shape[1]
        windows = {half.fused.window for half, _ in self.layers if not half.takes(T)}
        masks = {window: model.visible(slots, positions, window) for window in windows}
        x = model.embedded(tokens).flatten(0, 1)  # [M, D]
        for attention, feed_forward in self.layers:
            x = attention(x, positions, masks.get(attention.fused.window), rows)
            x = feed_forward(x, T)
        return x.unflatten(0, tokens.shape)[:, 1:]

    def logits(self, states: Tensor) -> Tensor:
        """[B, k, D] -> [B, k, V]"""
        model = self.model
        if self.head is None:
            return model.logits(model.norm(states))
        logits = self.head(states.flatten(0, 1), self.last_norm, eps=model.norm.eps)
        return model.capped(logits).unflatten(0, states.shape[:2])


def faster(model: nn.Module) -> nn.Module:
    """What runs in the place of a draft's model that no engine decodes: a BlockDecoder, or the
    model."""
    takes = type(model) is DFlash and all(
        isinstance(block.attn.v_norm, nn.Identity)
        and fusible(block.attn.wqkv)
        and fusible(block.attn.wo)
        and not why_plain_ffn(block)
        and not unknown_norm(block.attn_norm, block.attn_post_norm)
        for block in model.layers
    )
    return BlockDecoder(model) if takes else model


def install_kernels(model: Transformer) -> FusedDecoder:
    """Swaps in packed layers, attention and feed-forward parts, for prefill, and returns the module
    that decodes.

    Both share the weights and the caches. On a CPU the kernels' plain twins serve, as in the tests.
    With several ranks all of them call this together. Raises ValueError for a model that has its
    kernels already."""
    plain_halves(model)  # may raise
    # Of one layer there are few kernels to compile, and a process does not end before a pool of
    # workers has begun, 4 s.
    torch._inductor.config.compile_threads = 1
    allow_fallback()
    if isinstance(model.head, ColumnParallelLinear) and model.embed.weight.is_cuda:
        communication_buffers(model.embed.weight.device)
    for block in model.layers:
        if not why_plain_attention(block):
            if isinstance(block.attn, DeltaNet):
                block.attn = FusedDelta(block.attn)
            else:
                kind = FusedLatent if isinstance(block.attn, LatentAttention) else FusedAttention
                block.attn = kind(block.attn, rope_table(model, block), block.config.window)
        if not why_plain_ffn(block):
            block.ffn = fused_ffn(block.ffn)
    pack_linears(model)
    decoder = FusedDecoder(model)
    if isinstance(model, DraftHead):
        for name, norm in model.named_children():
            if type(norm) is RMSNorm:
                setattr(model, name, FusedNorm(norm))
    return decoder


def fused_ffn(ffn: nn.Module) -> nn.Module:
    if isinstance(ffn, DenseAndMoE):
        ffn.dense, ffn.moe = fused_ffn(ffn.dense), fused_ffn(ffn.moe)
        return ffn
    return (FusedFeedForward if isinstance(ffn, FeedForward) else FusedMoE)(ffn)


def last_norm(model: nn.Module) -> Tensor:
    """The final norm's weight [D], times what logits are multiplied by."""
    weight, scale = model.norm.weight.detach(), model.config.logits_scale
    return weight if scale == 1 else weight.float() * scale


def pack_linears(model: nn.Module) -> None:
    replace_layers(
        model,
        QuantizedLinear,
        lambda layer: PackedLinear(layer) if packs(layer) else layer,
    )


def rope_table(model: Transformer, block: Block) -> RopeTable:
    return next(table for table in model.ropes if table.rope == block.config.rope)


def allow_fallback() -> None:
    """Tells Inductor that our operators have no lowering.

    Otherwise it writes out, for its message, all that an operator's arguments are made of, and each
    residual doubles that text: with 32 layers no end was seen in 400 s (torch 2.11)."""
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # imported here, as it takes a second

    FALLBACK_ALLOW_LIST.update(f"llama_fast::{name}" for name in OPERATORS)

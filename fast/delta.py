"""
Recurrent layers: the gated delta rule of model.DeltaNet in one launch, and its gated norm in another.
The plain twin is DeltaNet.mix().

A program serves one value head of one sequence, and BV of the head's V elements: a state's columns
have nothing to do with each other. It goes over the text block by block, as model.delta_rule() does,
with the block's state [E, BV] in registers, whether the text is a token of decode, a draft that is
verified or a prompt:

    tokens of a block     0 ... r - 1 | r ... r + T - 1 | ... 31
                          old          new               not there yet

    keys           of old and new ones are made of the inputs, in the ring or fresh from the product
    corrections    of old ones are in a ring of their own, by position; only new ones are computed,
                   one after the other
    the state      before the block is read; it is written where the block is complete

So a token reads each state once, and one of BLOCK writes it. The ring of corrections follows the
same rule as the cache: see model.DeltaCache.

Shapes: as in model.py; C channels: G queries and G keys of E elements, H values of V. M = B x T rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from fast.common import (
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    gpu,
    jit,
    pdl_options,
    tl,
    triton,
)
from model import BLOCK, RING, DeltaCache, DeltaNet, buffer

CORRECTIONS = 2 * BLOCK  # tokens in their ring


@jit
def load_inputs(new, ring, position, first, end, channel, inside, STRIDE, WIDTH, RING: constexpr):
    """Inputs of tokens at position [BT] and channel [n] -> [BT, n], fp32; 0 before the text, and
    from `end` on. Tokens before `first` are in the ring [RING, WIDTH], the others in rows of new."""
    old = ((position >= 0) & (position < first))[:, None] & inside[None, :]
    is_new = ((position >= first) & (position < end))[:, None] & inside[None, :]
    of_ring = ring + (position % RING)[:, None] * WIDTH + channel[None, :]
    rows = new + (position - first).to(tl.int64)[:, None] * STRIDE + channel[None, :]
    x = tl.load(of_ring, mask=old, other=0).to(tl.float32)
    return x + tl.load(rows, mask=is_new, other=0).to(tl.float32)


@jit
def convolved(
    new,
    ring,
    filter,
    position,
    first,
    end,
    channel,
    inside,
    STRIDE,
    WIDTH,
    RING: constexpr,
    TAPS: constexpr,
    dtype: constexpr,
):
    """SiLU of the convolution, for tokens at position [BT] and channel [n] -> [BT, n], fp32."""
    y = tl.zeros((position.shape[0], channel.shape[0]), tl.float32)
    for tap in tl.static_range(TAPS):
        at = position - (TAPS - 1 - tap)
        x = load_inputs(new, ring, at, first, end, channel, inside, STRIDE, WIDTH, RING)
        weight = tl.load(filter + channel * TAPS + tap, mask=inside, other=0).to(tl.float32)
        y += x * weight[None, :]
    y = y.to(dtype).to(tl.float32)
    return (y / (1 + tl.exp(-y))).to(dtype).to(tl.float32)


@jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@jit
def store_inputs(new, ring, position, first, end, channel, inside, STRIDE, WIDTH, RING: constexpr):
    """Copies new tokens' inputs to the ring."""
    mask = ((position >= first) & (position < end))[:, None] & inside[None, :]
    rows = new + (position - first)[:, None] * STRIDE + channel[None, :]
    at = ring + (position % RING)[:, None] * WIDTH + channel[None, :]
    tl.store(at, tl.load(rows, mask=mask, other=0), mask=mask)


# Not specialized on the number of tokens: a prompt of another length compiles nothing.
@jit(do_not_specialize=["T", "position_stride"])
def delta_kernel(
    qkvz,
    gates,
    positions,
    ends,
    filter,
    log_a,
    dt_bias,
    inputs,
    states,
    corrections,
    y,
    T,
    position_stride,
    qkvz_stride,
    G: constexpr,
    H: constexpr,
    E: constexpr,
    V: constexpr,
    BE: constexpr,
    BV: constexpr,
    TAPS: constexpr,
    BLOCK: constexpr,
    RING: constexpr,
    CORRECTIONS: constexpr,
    WRITE: constexpr,
    PRECISION: constexpr,
    PDL: constexpr,
):
    """Program (b * H + value head, BV of its elements).

    qkvz [B, T, C + H V] and gates [B, T, 2H]: fresh from the products; inputs, states, corrections:
    the caches; y [B, T, H, V] fp32. WRITE: new inputs go to their ring, which T of up to 33 leaves
    room for."""
    group = tl.program_id(0)
    b = (group // H).to(tl.int64)
    h = group % H
    if PDL:
        gdc_launch_dependents()
    dtype: constexpr = qkvz.dtype.element_ty
    C: constexpr = 2 * G * E + H * V
    WIDTH: constexpr = C + 2 * H
    e = tl.arange(0, BE)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    t = tl.arange(0, BLOCK)
    of_e = e < E
    of_v = v < V
    key_head = h // (H // G)
    q_channel = key_head * E + e
    k_channel = G * E + key_head * E + e
    v_channel = 2 * G * E + h * V + v
    # Positions were there before the first layer, and states and rings before this step.
    first = tl.load(positions + b * position_stride).to(tl.int32)
    end = first + T
    if ends is not None:
        end = tl.minimum(tl.load(ends + b).to(tl.int32), end)
    ring = inputs + b * RING * WIDTH
    states += (b * 2 * H + h) * E * V + e[:, None] * V + v[None, :]
    state_mask = of_e[:, None] & of_v[None, :]
    corrections += (b * CORRECTIONS * H + h) * V + v[None, :]
    block = first // BLOCK
    last = end // BLOCK  # the block that the text ends in
    state = tl.load(states + (block % 2) * (H * E * V), mask=state_mask & (block > 0), other=0)
    a_scale = -tl.exp(tl.load(log_a + h).to(tl.float32))
    bias = tl.load(dt_bias + h).to(tl.float32)
    if PDL:
        gdc_wait()
    new = qkvz + b * T * qkvz_stride
    new_gates = gates + b * T * 2 * H
    for i in range(block, tl.cdiv(end, BLOCK)):
        position = i * BLOCK + t
        is_old = position < first
        is_new = (position >= first) & (position < end)
        k = convolved(
            new,
            ring,
            filter,
            position,
            first,
            end,
            k_channel,
            of_e,
            qkvz_stride,
            WIDTH,
            RING,
            TAPS,
            dtype,
        )
        q = convolved(
            new,
            ring,
            filter,
            position,
            first,
            end,
            q_channel,
            of_e,
            qkvz_stride,
            WIDTH,
            RING,
            TAPS,
            dtype,
        )
        values = convolved(
            new,
            ring,
            filter,
            position,
            first,
            end,
            v_channel,
            of_v,
            qkvz_stride,
            WIDTH,
            RING,
            TAPS,
            dtype,
        )
        k = tl.where((position < end)[:, None], unit(k), 0)
        q = unit(q) * (1.0 / tl.sqrt(E * 1.0))
        of_old = ring + (position % RING) * WIDTH + C + h
        of_new = new_gates + (position - first) * (2 * H) + h
        beta = tl.load(of_old, mask=is_old, other=0).to(tl.float32)
        beta += tl.load(of_new, mask=is_new, other=0).to(tl.float32)
        a = tl.load(of_old + H, mask=is_old, other=0).to(tl.float32)
        a += tl.load(of_new + H, mask=is_new, other=0).to(tl.float32)
        beta = 1 / (1 + tl.exp(-beta))
        a += bias
        softplus = tl.where(a > 20, a, tl.log(1 + tl.exp(a)))
        d = tl.cumsum(tl.where(position < end, a_scale * softplus, 0), 0)

        decay = tl.exp(d)
        seen = t[None, :] <= t[:, None]
        since = tl.where(seen, tl.exp(tl.where(seen, d[:, None] - d[None, :], 0)), 0)
        system = beta[:, None] * since * tl.dot(k, tl.trans(k), input_precision=PRECISION)
        right = beta[:, None] * (
            values - decay[:, None] * tl.dot(k, state, input_precision=PRECISION)
        )
        of_ring = corrections + (position % CORRECTIONS)[:, None] * (H * V)
        u = tl.load(of_ring, mask=is_old[:, None] & of_v[None, :], other=0)
        for s in range(tl.maximum(first - i * BLOCK, 0), tl.minimum(end - i * BLOCK, BLOCK)):
            is_row = t == s
            row = tl.sum(tl.where(is_row[:, None] & (t < s)[None, :], system, 0), 0)
            found = tl.sum(tl.where(is_row[:, None], right, 0) - row[:, None] * u, 0)
            u = tl.where(is_row[:, None], found[None, :], u)
        found = decay[:, None] * tl.dot(q, state, input_precision=PRECISION)
        within = since * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        found += tl.dot(within, u, input_precision=PRECISION)
        mask = is_new[:, None] & of_v[None, :]
        at = ((b * T + position - first) * H + h)[:, None] * V + v[None, :]
        tl.store(y + at, found, mask=mask)
        tl.store(of_ring, u, mask=mask)
        if i < last:  # it is complete
            total = tl.sum(tl.where(t == BLOCK - 1, d, 0), 0)
            k *= tl.exp(total - d)[:, None]
            state = tl.exp(total) * state + tl.dot(tl.trans(k), u, input_precision=PRECISION)
            if i + 2 >= last:
                tl.store(states + ((i + 1) % 2) * (H * E * V), state, mask=state_mask)
        if WRITE:
            head = tl.program_id(1) == 0
            store_inputs(new, ring, position, first, end, v_channel, of_v, qkvz_stride, WIDTH, RING)
            shared = of_e & head & (h % (H // G) == 0)
            store_inputs(
                new, ring, position, first, end, q_channel, shared, qkvz_stride, WIDTH, RING
            )
            store_inputs(
                new, ring, position, first, end, k_channel, shared, qkvz_stride, WIDTH, RING
            )
            at = ring + (position % RING) * WIDTH + C + h
            tl.store(at, tl.load(of_new, mask=is_new & head, other=0), mask=is_new & head)
            tl.store(at + H, tl.load(of_new + H, mask=is_new & head, other=0), mask=is_new & head)


@jit
def norm_kernel(
    y,
    qkvz,
    weight,
    out,
    heads,
    qkvz_stride,
    z_at,
    eps,
    H: constexpr,
    V: constexpr,
    BV: constexpr,
    BH: constexpr,
    PDL: constexpr,
):
    """RMSNorm of y [M, H, V], times SiLU(z) -> out [M, H V]. Program: BH of the M H heads."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0) * BH + tl.arange(0, BH)
    v = tl.arange(0, BV)
    mask = (head < heads)[:, None] & (v < V)[None, :]
    w = tl.load(weight + v, mask=v < V, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    at = head.to(tl.int64)[:, None] * V + v[None, :]
    x = tl.load(y + at, mask=mask, other=0)
    z = qkvz + z_at + (head // H).to(tl.int64)[:, None] * qkvz_stride
    z = tl.load(z + (head % H)[:, None] * V + v[None, :], mask=mask, other=0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * w[None, :]
    x *= z / (1 + tl.exp(-z))
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


# Of products of fp32: three of the matrix unit's in tf32 make up for what one would lose. In "ieee",
# without the matrix unit, all of a tile would stand in registers: 500 us in place of 10 (H100).
PRECISION = "tf32x3"


def delta_sizes(V: int) -> dict:
    return dict(BV=min(32, max(16, triton.next_power_of_2(V))), num_warps=4)


@library.custom_op(
    "llama_fast::gated_delta",
    mutates_args=("inputs", "states", "corrections"),
    device_types="cuda",
)
def gated_delta(
    qkvz: Tensor,
    gates: Tensor,
    positions: Tensor,
    ends: Tensor | None,
    filter: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    inputs: Tensor,
    states: Tensor,
    corrections: Tensor,
    key_dim: int,
    eps: float,
    write: bool,
) -> Tensor:
    """DeltaNet.mix(): qkvz [B, T, C + H V], gates [B, T, 2H], positions [B, T] or [1, T] of which
    those of one sequence follow one another, ends [B] or None -> [B, T, H V]. inputs, states: a
    DeltaCache's; corrections [>= B, CORRECTIONS, H, V] fp32. write: puts new inputs, of up to 33
    tokens, into their ring."""
    B, T, N = qkvz.shape
    H, V = corrections.shape[2:]
    E, G = key_dim, (N - 2 * H * V) // 2 // key_dim
    qkvz, gates = qkvz.contiguous(), gates.contiguous()
    # Of padding it stays 0: NaN in a slot of a KV cache would spoil what is masked, too.
    make = torch.empty if ends is None else torch.zeros
    y = make(B, T, H, V, device=qkvz.device)
    pdl = pdl_options(qkvz.device)
    sizes = delta_sizes(V)
    delta_kernel[(B * H, triton.cdiv(V, sizes["BV"]))](
        qkvz,
        gates,
        positions,
        ends,
        filter,
        log_a,
        dt_bias,
        inputs,
        states,
        corrections,
        y,
        T,
        positions.stride(0) if len(positions) > 1 else 0,
        N,
        G=G,
        H=H,
        E=E,
        V=V,
        BE=max(16, triton.next_power_of_2(E)),
        TAPS=filter.shape[1],
        BLOCK=BLOCK,
        RING=RING,
        CORRECTIONS=CORRECTIONS,
        WRITE=write,
        PRECISION=PRECISION,
        PDL=bool(pdl),
        **sizes,
        **pdl,
    )
    out = qkvz.new_empty(B, T, H * V)
    heads, BH = B * T * H, 4
    norm_kernel[(triton.cdiv(heads, BH),)](
        y,
        qkvz,
        norm,
        out,
        heads,
        N,
        N - H * V,
        eps,
        H=H,
        V=V,
        BV=triton.next_power_of_2(V),
        BH=BH,
        PDL=bool(pdl),
        num_warps=4,
        **pdl,
    )
    return out


@gated_delta.register_fake
def _(qkvz, gates, positions, ends, filter, log_a, dt_bias, norm, inputs, states, corrections, *_):
    H, V = corrections.shape[2:]
    return qkvz.new_empty(*qkvz.shape[:2], H * V)


class FusedDelta(nn.Module):
    """DeltaNet of model.py, by gated_delta(). On a CPU it is model.py's."""

    def __init__(self, mixer: DeltaNet):
        super().__init__()
        self.mixer, self.cache = mixer, mixer.cache
        self.kernel = self.cache.states.is_cuda
        if self.kernel:
            B, _, H, _, V = self.cache.states.shape
            shape = B, CORRECTIONS, H, V
            # A part of the cache, so that arrange_rows() copies it.
            self.cache.corrections = buffer(torch.zeros(shape, device=self.cache.states.device))

    def mix(
        self, qkvz: Tensor, gates: Tensor, positions: Tensor, ends: Tensor | None = None
    ) -> Tensor:
        """qkvz [B, T, C + H V], gates [B, T, 2H] -> [B, T, H V]"""
        mixer, cache, (B, T, _) = self.mixer, self.cache, qkvz.shape
        if not self.kernel:
            rows = torch.arange(B)[:, None]
            return mixer.mix(qkvz, gates, positions, None, None, None, rows, ends)
        few = T <= BLOCK + 1 and ends is None
        y = gated_delta(
            qkvz,
            gates,
            positions,
            ends,
            mixer.filter,
            mixer.log_a,
            mixer.dt_bias,
            mixer.norm,
            cache.inputs,
            cache.states,
            cache.corrections,
            mixer.delta.key_dim,
            mixer.eps,
            few,
        )
        if not few:
            first = positions[:, 0].expand(B)
            n = torch.full_like(first, T) if ends is None else (ends - first).clamp(0, T)
            new = torch.cat((qkvz[..., : mixer.delta.channels], gates), dim=-1)
            cache.write(new, first, n)
        return y

    def forward(self, x, positions, cos, sin, mask, rows, ends=None):
        """Prefill: x [B, T, D] -> [B, T, D]"""
        mixer = self.mixer
        return mixer.wo(self.mix(mixer.w_in(x), mixer.w_gates(x), positions, ends))

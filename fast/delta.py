"""
Recurrent layers: the gated delta rule of model.DeltaNet for decode and verification, in one launch,
and its gated norm in another. The plain twin is DeltaNet.mix(), which also reads prompts.

A program serves BV of the V elements of a value head of one sequence: a state's columns have nothing
to do with each other. It holds the state before the token's block [E, BV], the block's keys and its
corrections, and takes the new tokens one after the other, as in model.delta_rule():

    u_t = beta_t (v_t - exp(d_t) S^T k_t - sum over s < t of exp(d_t - d_s) (k_t k_s) u_s)
    y_t = exp(d_t) S^T q_t + sum over s <= t of exp(d_t - d_s) (q_t k_s) u_s

    tokens of a block     0 ... r - 1 | r ... r + T - 1 | ... 31
                          keys, decays and corrections of
                          the old ones lie in rings     new     not there yet

Only where a block is complete the state is computed anew, and written. So a step reads each state
once, and one step of BLOCK writes it. The rings go by the position, as DeltaCache's does: what a
rejected draft left there is overwritten before it is read. After a prompt remember_tokens() fills
them, from the inputs in DeltaCache.

Shapes: as in model.py; C channels: G queries and G keys of E elements, H values of V. M = B x T rows.
"""

import torch
from torch import Tensor, library, nn

from fast.common import constexpr, gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton
from model import BLOCK, RING, DeltaNet, buffer

TOKENS = 2 * BLOCK  # of which the rings hold keys, decays and corrections


@jit
def convolved(
    new,
    ring,
    filter,
    position,
    first,
    channel,
    inside,
    STRIDE,
    WIDTH: constexpr,
    RING: constexpr,
    TAPS: constexpr,
):
    """The token at `position`: its channels after the convolution and SiLU, and its own inputs, fp32
    [channels]. Tokens before `first` are in the ring [RING, WIDTH], the others in rows of new."""
    dtype: constexpr = new.dtype.element_ty
    y = tl.zeros(channel.shape, tl.float32)
    x = y
    for tap in tl.static_range(TAPS):
        at = position - (TAPS - 1 - tap)
        old = inside & (at >= 0) & (at < first)
        x = tl.load(ring + (at % RING) * WIDTH + channel, mask=old, other=0).to(tl.float32)
        row = new + (at - first).to(tl.int64) * STRIDE
        x += tl.load(row + channel, mask=inside & (at >= first), other=0).to(tl.float32)
        y += x * tl.load(filter + channel * TAPS + tap, mask=inside, other=0).to(tl.float32)
    y = y.to(dtype).to(tl.float32)  # as PyTorch rounds it
    return (y / (1 + tl.exp(-y))).to(dtype).to(tl.float32), x


@jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@jit(do_not_specialize=["T", "position_stride"])
def delta_kernel(
    qkvz,
    gates,
    positions,
    filter,
    log_a,
    dt_bias,
    inputs,
    states,
    keys,
    decays,
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
    TOKENS: constexpr,
    REPLAY: constexpr,
    PDL: constexpr,
):
    """Program (b * H + value head, BV of its elements).

    qkvz [B, T, C + H V] and gates [B, T, 2H]: fresh from the products; inputs, states: DeltaCache's;
    keys, decays, corrections: the rings; y [B, T, H, V] fp32. REPLAY: the tokens of the last two
    blocks before positions [B], whose inputs are in their ring, go to the other rings again."""
    group = tl.program_id(0)
    b = (group // H).to(tl.int64)
    h = group % H
    if PDL:
        gdc_launch_dependents()
    C: constexpr = 2 * G * E + H * V
    WIDTH: constexpr = C + 2 * H
    e = tl.arange(0, BE)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BLOCK)
    of_e = e < E
    of_v = v < V
    key_head = h // (H // G)
    q_channel = key_head * E + e
    v_channel = 2 * G * E + h * V + v
    # What one program of those that share it stores.
    stores = tl.program_id(1) == 0
    stores_key = stores & (h % (H // G) == 0)

    # Positions were there before the first layer, and states and rings before this step.
    first = tl.load(positions + b * position_stride).to(tl.int32)
    begin = first
    end = first + T
    if REPLAY:
        begin = tl.maximum(first // BLOCK - 1, 0) * BLOCK
        end = first
    block = begin // BLOCK
    ring = inputs + b * RING * WIDTH
    states += (b * 2 * H + h) * E * V + e[:, None] * V + v[None, :]
    state_mask = of_e[:, None] & of_v[None, :]
    keys += (b * TOKENS * G + key_head) * E
    decays += b * TOKENS * H + h
    corrections += (b * TOKENS * H + h) * V
    state = tl.load(states + block % 2 * (H * E * V), mask=state_mask & (block > 0), other=0)
    place = (block * BLOCK + row) % TOKENS
    old = block * BLOCK + row < begin
    k_block = tl.load(
        keys + (place * G * E)[:, None] + e[None, :], mask=old[:, None] & of_e[None, :], other=0
    )
    u_block = tl.load(
        corrections + (place * H * V)[:, None] + v[None, :],
        mask=old[:, None] & of_v[None, :],
        other=0,
    )
    d_block = tl.cumsum(tl.load(decays + place * H, mask=old, other=0), 0)
    d = tl.sum(tl.load(decays + place * H, mask=old, other=0), 0)
    scale = -tl.exp(tl.load(log_a + h).to(tl.float32))
    bias = tl.load(dt_bias + h).to(tl.float32)
    if PDL:
        gdc_wait()

    new = qkvz + b * T * qkvz_stride
    for position in range(begin, end):
        q, q_in = convolved(
            new, ring, filter, position, first, q_channel, of_e, qkvz_stride, WIDTH, RING, TAPS
        )
        k, k_in = convolved(
            new,
            ring,
            filter,
            position,
            first,
            q_channel + G * E,
            of_e,
            qkvz_stride,
            WIDTH,
            RING,
            TAPS,
        )
        value, v_in = convolved(
            new, ring, filter, position, first, v_channel, of_v, qkvz_stride, WIDTH, RING, TAPS
        )
        of_gates = ring + position % RING * WIDTH + C + h
        if not REPLAY:
            of_gates = gates + (b * T + position - first) * (2 * H) + h
        b_in = tl.load(of_gates)
        a_in = tl.load(of_gates + H)
        a = a_in.to(tl.float32) + bias
        beta = 1 / (1 + tl.exp(-b_in.to(tl.float32)))
        decay = scale * tl.where(a > 20, a, tl.log(1 + tl.exp(a)))
        q = unit(q) * (1.0 / tl.sqrt(E * 1.0))
        k = unit(k)

        at = position % BLOCK
        d += decay
        since = tl.where(row < at, tl.exp(tl.minimum(d - d_block, 0)), 0)
        of_keys = since * tl.sum(k_block * k[None, :], 1)  # [BLOCK]
        of_queries = since * tl.sum(k_block * q[None, :], 1)
        found = tl.exp(d) * tl.sum(state * k[:, None], 0) + tl.sum(of_keys[:, None] * u_block, 0)
        u = beta * (value - found)  # [BV]
        if not REPLAY:
            found = tl.exp(d) * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * u
            found += tl.sum(of_queries[:, None] * u_block, 0)
            tl.store(y + ((b * T + position - first) * H + h) * V + v, found, mask=of_v)
        is_row = row == at
        k_block = tl.where(is_row[:, None], k[None, :], k_block)
        u_block = tl.where(is_row[:, None], u[None, :], u_block)
        d_block = tl.where(is_row, d, d_block)

        slot = position % TOKENS
        tl.store(corrections + slot * (H * V) + v, u, mask=of_v)
        tl.store(keys + slot * (G * E) + e, k, mask=of_e & stores_key)
        tl.store(decays + slot * H, decay, mask=stores)
        if not REPLAY:
            to = ring + position % RING * WIDTH
            dtype: constexpr = inputs.dtype.element_ty
            tl.store(to + v_channel, v_in.to(dtype), mask=of_v)
            tl.store(to + q_channel, q_in.to(dtype), mask=of_e & stores_key)
            tl.store(to + q_channel + G * E, k_in.to(dtype), mask=of_e & stores_key)
            tl.store(to + C + h, b_in, mask=stores)
            tl.store(to + C + H + h, a_in, mask=stores)
        if at == BLOCK - 1:  # the block is complete
            rest = tl.exp(d - d_block)
            state = tl.exp(d) * state + tl.dot(
                tl.trans(k_block * rest[:, None]), u_block, input_precision="tf32x3"
            )
            if not REPLAY:
                done = position // BLOCK + 1
                tl.store(states + done % 2 * (H * E * V), state, mask=state_mask)
            k_block = k_block * 0
            u_block = u_block * 0
            d_block = d_block * 0
            d = d * 0


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


def delta_sizes(V: int) -> dict:
    return dict(BV=min(32, max(16, triton.next_power_of_2(V))), num_warps=4)


def launch_delta(
    qkvz: Tensor | None,
    gates: Tensor | None,
    positions: Tensor,
    y: Tensor | None,
    B: int,
    T: int,
    weights: list[Tensor],
    caches: list[Tensor],
    pdl: dict,
) -> None:
    """weights: filter, log_a, dt_bias; caches: inputs, states, keys, decays, corrections. Without
    qkvz: a replay."""
    keys, corrections = caches[2], caches[4]
    (G, E), (H, V) = keys.shape[2:], corrections.shape[2:]
    sizes = delta_sizes(V)
    delta_kernel[(B * H, triton.cdiv(V, sizes["BV"]))](
        caches[0] if qkvz is None else qkvz,
        gates,
        positions,
        *weights,
        *caches,
        y,
        T,
        positions.stride(0) if len(positions) > 1 else 0,
        0 if qkvz is None else qkvz.shape[-1],
        G=G,
        H=H,
        E=E,
        V=V,
        BE=max(16, triton.next_power_of_2(E)),
        TAPS=weights[0].shape[1],
        BLOCK=BLOCK,
        RING=RING,
        TOKENS=TOKENS,
        REPLAY=qkvz is None,
        PDL=bool(pdl),
        **sizes,
        **pdl,
    )


@library.custom_op(
    "llama_fast::gated_delta",
    mutates_args=("inputs", "states", "keys", "decays", "corrections"),
    device_types="cuda",
)
def gated_delta(
    qkvz: Tensor,
    gates: Tensor,
    positions: Tensor,
    filter: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    inputs: Tensor,
    states: Tensor,
    keys: Tensor,
    decays: Tensor,
    corrections: Tensor,
    norm: Tensor,
    eps: float,
) -> Tensor:
    """DeltaNet.mix() of up to BLOCK + 1 tokens: qkvz [B, T, C + H V], gates [B, T, 2H], positions
    [B, T] or [1, T], of which those of one sequence follow one another -> [B, T, H V]. inputs,
    states: a DeltaCache's, fp32 keys [>= B, TOKENS, G, E], decays [>= B, TOKENS, H], corrections
    [>= B, TOKENS, H, V]: the first B rows are used."""
    B, T, N = qkvz.shape
    H, V = corrections.shape[2:]
    qkvz, gates = qkvz.contiguous(), gates.contiguous()
    y = torch.empty(B, T, H, V, device=qkvz.device)
    pdl = pdl_options(qkvz.device)
    caches = [inputs, states, keys, decays, corrections]
    launch_delta(qkvz, gates, positions, y, B, T, [filter, log_a, dt_bias], caches, pdl)
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
def _(
    qkvz, gates, positions, filter, log_a, dt_bias, inputs, states, keys, decays, corrections, *_
):
    H, V = corrections.shape[2:]
    return qkvz.new_empty(*qkvz.shape[:2], H * V)


@library.custom_op(
    "llama_fast::remember_tokens",
    mutates_args=("keys", "decays", "corrections"),
    device_types="cuda",
)
def remember_tokens(
    end: Tensor,
    filter: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    inputs: Tensor,
    states: Tensor,
    keys: Tensor,
    decays: Tensor,
    corrections: Tensor,
) -> None:
    """Fills the rings for texts of end [B] tokens, whose last ones are in inputs; see
    gated_delta()."""
    caches = [inputs, states, keys, decays, corrections]
    weights = [filter, log_a, dt_bias]
    launch_delta(None, None, end[:, None], None, len(end), 0, weights, caches, {})


@remember_tokens.register_fake
def _(*_):
    return None


class FusedDelta(nn.Module):
    """DeltaNet of model.py, by gated_delta(). On a CPU it is model.py's."""

    def __init__(self, mixer: DeltaNet):
        super().__init__()
        self.mixer, self.cache = mixer, mixer.cache
        self.kernel = self.cache.states.is_cuda
        if self.kernel:
            self.add_rings()

    def add_rings(self) -> None:
        """As parts of the cache, so that arrange_rows() copies them."""
        B, _, H, E, V = self.cache.states.shape
        zeros = self.cache.states.new_zeros
        self.cache.keys = buffer(zeros(B, TOKENS, self.mixer.delta.n_key_head, E))
        self.cache.decays = buffer(zeros(B, TOKENS, H))
        self.cache.corrections = buffer(zeros(B, TOKENS, H, V))

    def mix(
        self, qkvz: Tensor, gates: Tensor, positions: Tensor, ends: Tensor | None = None
    ) -> Tensor:
        """qkvz [B, T, C + H V], gates [B, T, 2H] -> [B, T, H V]"""
        mixer, cache, (B, T, _) = self.mixer, self.cache, qkvz.shape
        is_prompt = ends is not None or T > BLOCK + 1
        weights = mixer.filter, mixer.log_a, mixer.dt_bias
        if self.kernel and not is_prompt:
            caches = cache.inputs, cache.states, cache.keys, cache.decays, cache.corrections
            return gated_delta(qkvz, gates, positions, *weights, *caches, mixer.norm, mixer.eps)
        rows = torch.arange(B, device=qkvz.device)[:, None]
        y = mixer.mix(qkvz, gates, positions, None, None, None, rows, ends)
        if self.kernel:
            first = positions[:, 0].expand(B)
            n = torch.full_like(first, T) if ends is None else (ends - first).clamp(0, T)
            caches = cache.inputs, cache.states, cache.keys, cache.decays, cache.corrections
            remember_tokens(first + n, *weights, *caches)
        return y

    def forward(self, x, positions, cos, sin, mask, rows, ends=None):
        """Prefill: x [B, T, D] -> [B, T, D]"""
        mixer = self.mixer
        return mixer.wo(self.mix(mixer.w_in(x), mixer.w_gates(x), positions, ends))

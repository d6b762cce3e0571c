"""
Recurrent layers: the gated delta rule of model.DeltaNet, and its gated norm. The plain twin is
DeltaNet.mix().

One token takes two launches. A program of token_kernel serves BV of the V elements of a value head
of one sequence: a state's columns have nothing to do with each other. It holds the state before the
token's block [E, BV], and the keys and corrections of the block's earlier tokens, and computes, as
in model.delta_rule(),

    u_t = beta_t (v_t - exp(d_t) S^T k_t - sum over s < t of exp(d_t - d_s) (k_t k_s) u_s)
    y_t = exp(d_t) S^T q_t + sum over s <= t of exp(d_t - d_s) (q_t k_s) u_s

    tokens of a block     0 ... t - 1 | t  | t + 1 ... 31
                          keys, decays and corrections of the
                          old ones lie in rings, t is new

Only where a block is complete the state is computed anew, and written. So a step reads each state
once, and one step of BLOCK writes it. The rings go by the position, as DeltaCache's does: what a
rejected draft left there is overwritten before it is read.

Several tokens, a prompt's or those of a verification, take three. A program of blocks_kernel makes
of one block and value head all that needs no state, and solves the triangular system for it. A
program of states_kernel takes BV columns of a state from block to block.

Shapes: as in model.py; C channels: G queries and G keys of E elements, H values of V. M = B x T
rows.
"""

import math
from functools import partial

import torch
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
from model import BLOCK, RING, DeltaNet, buffer

TOKENS = 2 * BLOCK  # of which the rings hold keys, decays and corrections
FEW = 8  # tokens that are taken one by one
AT_ONCE = 2048  # tokens of all rows, for which blocks_kernel writes what states_kernel reads
# No prompt of another length or place compiles a kernel anew.
RUNTIME = ["positions", "ends", "position_stride", "has_ends", "T", "n_before", "n"]


@jit
def convolved(
    new,
    ring,
    filter,
    position,
    first,
    is_text,
    channel,
    of_channel,
    some_old,
    STRIDE,
    WIDTH: constexpr,
    RING: constexpr,
    TAPS: constexpr,
):
    """Channels of tokens after the convolution and SiLU, and as they were before it, fp32. One token
    and [channels], or tokens [n, 1] and channels [1, n]. Tokens before `first`, if there are some,
    are in the ring [RING, WIDTH], the others in rows of new."""
    dtype: constexpr = new.dtype.element_ty
    y = 0.0
    x = 0.0
    for tap in tl.static_range(TAPS):
        at = position - (TAPS - 1 - tap)
        row = new + (at - first).to(tl.int64) * STRIDE
        is_new = of_channel & is_text & (at >= first)
        x = tl.load(row + channel, mask=is_new, other=0).to(tl.float32)
        if some_old:
            old = of_channel & is_text & (at >= 0) & (at < first)
            place = (at % RING) * WIDTH + channel
            x += tl.load(ring + place, mask=old, other=0).to(tl.float32)
        y += x * tl.load(filter + channel * TAPS + tap, mask=of_channel, other=0).to(tl.float32)
    y = y.to(dtype).to(tl.float32)  # as PyTorch rounds it
    return (y / (1 + tl.exp(-y))).to(dtype).to(tl.float32), x


@jit
def unit(x):
    """To unit length, over the last dimension."""
    return x * tl.rsqrt(tl.sum(x * x, -1, keep_dims=True) + 1e-6)


@jit
def halves(x):
    """Two of bf16, whose sum is x but for 2^-17 of it."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@jit
def product(a, a_low, b, b_low):
    """Of matrices in two halves each, fp32."""
    return tl.dot(a, b, tl.dot(a, b_low, tl.dot(a_low, b)))


@jit
def gate_values(b_in, a_in, log_a, dt_bias):
    """-> beta, and decay's logarithm"""
    a = a_in.to(tl.float32) + dt_bias
    beta = 1 / (1 + tl.exp(-b_in.to(tl.float32)))
    return beta, -tl.exp(log_a) * tl.where(a > 20, a, tl.log(1 + tl.exp(a)))


@jit(do_not_specialize=["positions", "position_stride", "T", "t"])
def token_kernel(
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
    position_stride,
    T,
    t,
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
    PDL: constexpr,
):
    """Token t of the T of each sequence. Program (b * H + value head, BV of its elements).

    qkvz [B, T, C + H V] and gates [B, T, 2H]: fresh from the products; positions [B, T]; inputs,
    states: DeltaCache's; keys, decays, corrections: the rings; y [B, T, H, V] fp32."""
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

    position = tl.load(positions + b * position_stride).to(tl.int32) + t
    block = position // BLOCK
    at = position % BLOCK
    ring = inputs + b * RING * WIDTH
    if PDL:
        gdc_wait()  # before it reads states and rings: those of the last token are from this step

    states += (b * 2 * H + h) * E * V + e[:, None] * V + v[None, :]
    state_mask = of_e[:, None] & of_v[None, :]
    keys += (b * TOKENS * G + key_head) * E
    decays += b * TOKENS * H + h
    corrections += (b * TOKENS * H + h) * V
    state = tl.load(states + block % 2 * (H * E * V), mask=state_mask & (block > 0), other=0)
    place = (block * BLOCK + row) % TOKENS
    old = row < at
    k_block = tl.load(
        keys + (place * G * E)[:, None] + e[None, :], mask=old[:, None] & of_e[None, :], other=0
    )
    u_block = tl.load(
        corrections + (place * H * V)[:, None] + v[None, :],
        mask=old[:, None] & of_v[None, :],
        other=0,
    )
    from_start = tl.sum(tl.load(decays + place * H, mask=old, other=0), 0)
    # Each the sum of what came after its token: as a difference of two sums it would lose digits.
    since = tl.load(decays + (place + 1) % TOKENS * H, mask=row + 1 < at, other=0)
    since = tl.cumsum(since, 0, reverse=True)
    log_a = tl.load(log_a + h).to(tl.float32)
    bias = tl.load(dt_bias + h).to(tl.float32)
    new = qkvz + (b * T + t) * qkvz_stride
    where = new, ring, filter, position, position, True
    k_channel = q_channel + G * E
    q, q_in = convolved(*where, q_channel, of_e, True, qkvz_stride, WIDTH, RING, TAPS)
    k, k_in = convolved(*where, k_channel, of_e, True, qkvz_stride, WIDTH, RING, TAPS)
    value, v_in = convolved(*where, v_channel, of_v, True, qkvz_stride, WIDTH, RING, TAPS)
    b_in = tl.load(gates + (b * T + t) * (2 * H) + h)
    a_in = tl.load(gates + (b * T + t) * (2 * H) + H + h)
    beta, decay = gate_values(b_in, a_in, log_a, bias)
    q = unit(q) * (1.0 / tl.sqrt(E * 1.0))
    k = unit(k)

    from_start = tl.exp(from_start + decay)
    since = tl.where(old, tl.exp(since + decay), 0)
    of_keys = since * tl.sum(k_block * k[None, :], 1)  # [BLOCK]
    of_queries = since * tl.sum(k_block * q[None, :], 1)
    found = from_start * tl.sum(state * k[:, None], 0) + tl.sum(of_keys[:, None] * u_block, 0)
    u = beta * (value - found)  # [BV]
    found = from_start * tl.sum(state * q[:, None], 0) + tl.sum(of_queries[:, None] * u_block, 0)
    tl.store(y + ((b * T + t) * H + h) * V + v, found + tl.sum(q * k, 0) * u, mask=of_v)

    slot = position % TOKENS
    tl.store(corrections + slot * (H * V) + v, u, mask=of_v)
    tl.store(keys + slot * (G * E) + e, k, mask=of_e & stores_key)
    tl.store(decays + slot * H, decay, mask=stores)
    to = ring + position % RING * WIDTH
    dtype: constexpr = inputs.dtype.element_ty
    tl.store(to + v_channel, v_in.to(dtype), mask=of_v)
    tl.store(to + q_channel, q_in.to(dtype), mask=of_e & stores_key)
    tl.store(to + k_channel, k_in.to(dtype), mask=of_e & stores_key)
    tl.store(to + C + h, b_in, mask=stores)
    tl.store(to + C + H + h, a_in, mask=stores)
    if at == BLOCK - 1:  # the block is complete
        is_row = row == at
        k_block = tl.where(is_row[:, None], k[None, :], k_block * since[:, None])
        u_block = tl.where(is_row[:, None], u[None, :], u_block)
        state = from_start * state + tl.dot(tl.trans(k_block), u_block, input_precision="tf32x3")
        tl.store(states + (block + 1) % 2 * (H * E * V), state, mask=state_mask)


@jit
def end_of_text(positions, ends, position_stride, has_ends, b, T):
    """-> the first token's position, and that behind the last one's"""
    first = tl.load(positions + b * position_stride).to(tl.int32)
    end = tl.load(ends + b, mask=has_ends != 0, other=first + T).to(tl.int32)
    return first, tl.maximum(first, tl.minimum(end, first + T))


@jit(do_not_specialize=RUNTIME)
def blocks_kernel(
    qkvz,
    gates,
    positions,
    ends,
    filter,
    log_a,
    dt_bias,
    inputs,
    keys,
    decays,
    q_out,
    k_out,
    u_out,
    w_out,
    within_out,
    from_start_out,
    to_end_out,
    position_stride,
    has_ends,
    T,
    n_before,
    n,
    qkvz_stride,
    G: constexpr,
    H: constexpr,
    E: constexpr,
    V: constexpr,
    BE: constexpr,
    BV: constexpr,
    TAPS: constexpr,
    BLOCK: constexpr,
    LEVELS: constexpr,
    RING: constexpr,
    TOKENS: constexpr,
    PDL: constexpr,
):
    """Program (block * H + value head, b): n blocks of each row, n_before behind the one of its
    first token. BV >= V.

    With A [t, s] = beta_t exp(d_t - d_s) (k_t k_s) for s < t, else 0, the corrections are u - w S
    for u = (1 + A)^-1 (beta v) and w = (1 + A)^-1 (beta exp(d) k). Out:

        q, k [B, n, G, BLOCK, E]: normed    within [B, n, H, BLOCK, BLOCK]: exp(d_t - d_s) (q_t k_s)
        u [B, n, H, BLOCK, V]               from_start, to_end [B, n, H, BLOCK]: exp(d_t), and
        w [B, n, H, BLOCK, E]               exp(d at the block's end - d_t)

    And the rings' keys and decays of the last two blocks."""
    b = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) % H
    i_block = tl.program_id(0) // H
    if PDL:
        gdc_launch_dependents()
    first, end = end_of_text(positions, ends, position_stride, has_ends, b, T)
    begin = (first // BLOCK + n_before + i_block) * BLOCK
    if PDL:
        gdc_wait()  # before it returns, too: whoever waits for this launch waits for all before it
    if begin >= end:
        return
    C: constexpr = 2 * G * E + H * V
    WIDTH: constexpr = C + 2 * H
    e = tl.arange(0, BE)
    v = tl.arange(0, BV)
    row = tl.arange(0, BLOCK)
    of_e = (e < E)[None, :]
    of_v = (v < V)[None, :]
    key_head = h // (H // G)
    q_channel = (key_head * E + e)[None, :]
    v_channel = (2 * G * E + h * V + v)[None, :]
    position = begin + row
    is_text = position < end
    is_new = is_text & (position >= first)
    at = position[:, None]
    in_text = is_text[:, None]
    ring = inputs + b * RING * WIDTH
    log_a = tl.load(log_a + h).to(tl.float32)
    bias = tl.load(dt_bias + h).to(tl.float32)

    new = qkvz + b * T * qkvz_stride
    some_old = begin - (TAPS - 1) < first
    where = new, ring, filter, at, first, in_text
    k_channel = q_channel + G * E
    q, _ = convolved(*where, q_channel, of_e, some_old, qkvz_stride, WIDTH, RING, TAPS)
    k, _ = convolved(*where, k_channel, of_e, some_old, qkvz_stride, WIDTH, RING, TAPS)
    value, _ = convolved(*where, v_channel, of_v, some_old, qkvz_stride, WIDTH, RING, TAPS)
    from_ring = ring + position % RING * WIDTH + C + h
    fresh = gates + (b * T + position - first) * (2 * H) + h
    was_old = is_text & (position < first)
    b_in = tl.load(from_ring, mask=was_old, other=0) + tl.load(fresh, mask=is_new, other=0)
    a_in = tl.load(from_ring + H, mask=was_old, other=0) + tl.load(fresh + H, mask=is_new, other=0)
    beta, decay = gate_values(b_in, a_in, log_a, bias)
    q = unit(q) * (1.0 / tl.sqrt(E * 1.0))
    k = unit(k)

    below = row[:, None] > row[None, :]
    since = tl.cumsum(tl.where(below, decay[:, None], 0), 0)  # [t, s]: d_t - d_s
    to_end = tl.exp(tl.sum(tl.where(below, decay[:, None], 0), 0))
    from_start = tl.exp(tl.cumsum(decay, 0))
    since = tl.where(row[:, None] >= row[None, :], tl.exp(since), 0)
    k, k_low = halves(k)
    q, q_low = halves(q)
    k_t, k_t_low = tl.trans(k), tl.trans(k_low)
    system = beta[:, None] * product(k, k_low, k_t, k_t_low) * since
    within = product(q, q_low, k_t, k_t_low) * since
    # Of squares along the diagonal, in pairs: the inverse of [a, 0; b, c] is [1/a, 0; -1/c b 1/a,
    # 1/c].
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for i in range(0, LEVELS):
        square_row, square = row[:, None] >> i, row[None, :] >> i
        in_pair = (square_row == square + 1) & (square_row % 2 == 1)
        step = tl.dot(inverse, tl.where(in_pair, system, 0), input_precision="tf32x3")
        inverse -= tl.dot(step, inverse, input_precision="tf32x3")
    inverse, inverse_low = halves(inverse)
    u = product(inverse, inverse_low, *halves(beta[:, None] * value))
    k_full = k.to(tl.float32) + k_low.to(tl.float32)
    w, w_low = halves(product(inverse, inverse_low, *halves((beta * from_start)[:, None] * k_full)))

    of_heads = (b * n + i_block) * H + h
    tl.store(from_start_out + of_heads * BLOCK + row, from_start)
    tl.store(to_end_out + of_heads * BLOCK + row, to_end)
    square = row[:, None] * BLOCK + row[None, :]
    tl.store(within_out + of_heads * (BLOCK * BLOCK) + square, within)
    tl.store(u_out + of_heads * (BLOCK * V) + row[:, None] * V + v[None, :], u, mask=of_v)
    keys_tile = row[:, None] * E + e[None, :]
    to = w_out + of_heads * (2 * BLOCK * E) + keys_tile
    tl.store(to, w, mask=of_e)
    tl.store(to + BLOCK * E, w_low, mask=of_e)
    stores_key = h % (H // G) == 0
    to = q_out + ((b * n + i_block) * G + key_head) * (2 * BLOCK * E) + keys_tile
    tl.store(to, q, mask=of_e & stores_key)
    tl.store(to + BLOCK * E, q_low, mask=of_e & stores_key)
    to = k_out + ((b * n + i_block) * G + key_head) * (2 * BLOCK * E) + keys_tile
    tl.store(to, k, mask=of_e & stores_key)
    tl.store(to + BLOCK * E, k_low, mask=of_e & stores_key)
    kept = is_new & (position >= (end // BLOCK - 1) * BLOCK)
    slot = b * TOKENS + position % TOKENS
    tl.store(decays + slot * H + h, decay, mask=kept)
    to = keys + ((slot * G + key_head) * E)[:, None] + e[None, :]
    tl.store(to, k_full, mask=kept[:, None] & of_e & stores_key)


@jit(do_not_specialize=[*RUNTIME, "is_last"])
def states_kernel(
    q_in,
    k_in,
    u_in,
    w_in,
    within_in,
    from_start_in,
    to_end_in,
    qkvz,
    gates,
    positions,
    ends,
    inputs,
    states,
    corrections,
    y,
    position_stride,
    has_ends,
    T,
    n_before,
    n,
    is_last,
    qkvz_stride,
    G: constexpr,
    H: constexpr,
    E: constexpr,
    V: constexpr,
    BE: constexpr,
    BV: constexpr,
    BLOCK: constexpr,
    RING: constexpr,
    TOKENS: constexpr,
    PDL: constexpr,
):
    """Program (b * H + value head, BV of its elements): from block to block. In: see
    blocks_kernel. y [B, T, H, V] fp32; corrections: the ring's of the last two blocks. The last
    launch for a text also writes what DeltaCache keeps of its inputs."""
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    if PDL:
        gdc_launch_dependents()
    C: constexpr = 2 * G * E + H * V
    WIDTH: constexpr = C + 2 * H
    e = tl.arange(0, BE)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BLOCK)
    of_e = (e < E)[None, :]
    of_v = (v < V)[None, :]
    key_head = h // (H // G)
    first, end = end_of_text(positions, ends, position_stride, has_ends, b, T)
    first_block = first // BLOCK + n_before
    complete = end // BLOCK  # so many blocks
    states += (b * 2 * H + h) * E * V + e[:, None] * V + v[None, :]
    state_mask = (e < E)[:, None] & of_v
    corrections += (b * TOKENS * H + h) * V + v[None, :]
    y += ((b * T - first) * H + h) * V + v[None, :]
    if PDL:
        gdc_wait()

    state = tl.load(
        states + first_block % 2 * (H * E * V), mask=state_mask & (first_block > 0), other=0
    )
    n_blocks = tl.minimum(n, tl.cdiv(end, BLOCK) - first_block)
    keys_tile = row[:, None] * E + e[None, :]
    values_tile = row[:, None] * V + v[None, :]
    square = row[:, None] * BLOCK + row[None, :]
    for i in range(n_blocks):
        of_heads = (b * n + i) * H + h
        w_at = w_in + of_heads * (2 * BLOCK * E) + keys_tile
        q_at = q_in + ((b * n + i) * G + key_head) * (2 * BLOCK * E) + keys_tile
        k_at = k_in + ((b * n + i) * G + key_head) * (2 * BLOCK * E) + keys_tile
        w = tl.load(w_at, mask=of_e, other=0)
        w_low = tl.load(w_at + BLOCK * E, mask=of_e, other=0)
        q = tl.load(q_at, mask=of_e, other=0)
        q_low = tl.load(q_at + BLOCK * E, mask=of_e, other=0)
        k = tl.load(k_at, mask=of_e, other=0)
        k_low = tl.load(k_at + BLOCK * E, mask=of_e, other=0)
        u = tl.load(u_in + of_heads * (BLOCK * V) + values_tile, mask=of_v, other=0)
        within = tl.load(within_in + of_heads * (BLOCK * BLOCK) + square)
        from_start = tl.load(from_start_in + of_heads * BLOCK + row)
        to_end = tl.load(to_end_in + of_heads * BLOCK + row)
        whole = tl.load(from_start_in + of_heads * BLOCK + BLOCK - 1)

        state_high, state_low = halves(state)
        u -= product(w, w_low, state_high, state_low)
        found = from_start[:, None] * product(q, q_low, state_high, state_low)
        found += product(*halves(within), *halves(u))
        at_end = halves(to_end[:, None] * u)
        state = state * whole + product(tl.trans(k), tl.trans(k_low), *at_end)

        position = (first_block + i) * BLOCK + row
        is_new = (position >= first) & (position < end)
        kept = is_new & (position >= (complete - 1) * BLOCK)
        to = corrections + (position % TOKENS)[:, None] * (H * V)
        tl.store(to, u, mask=kept[:, None] & of_v)
        to = y + position.to(tl.int64)[:, None] * (H * V)
        tl.store(to, found, mask=is_new[:, None] & of_v)
        done = first_block + i + 1
        if (done <= complete) & ((done >= complete - 1) | (i == n - 1)):
            tl.store(states + done % 2 * (H * E * V), state, mask=state_mask)

    if is_last != 0:
        is_first_slice = tl.program_id(1) == 0
        of_keys = key_head * E + e[None, :]
        stores_key = of_e & is_first_slice & (h % (H // G) == 0)
        of_values = 2 * G * E + h * V + v[None, :]
        pair = tl.arange(0, 2)[None, :] * H + h
        for begin in range(0, RING, BLOCK):
            # In each place stands the last token before the end that belongs there: a new one?
            place = begin + row
            position = end - 1 - (end - 1 - place + RING) % RING
            is_new = ((place < RING) & (position >= first))[:, None]
            to = inputs + ((b * RING + place) * WIDTH)[:, None]
            new = qkvz + ((b * T + position - first) * qkvz_stride)[:, None]
            mask = is_new & of_v
            tl.store(to + of_values, tl.load(new + of_values, mask=mask, other=0), mask=mask)
            mask = is_new & stores_key
            tl.store(to + of_keys, tl.load(new + of_keys, mask=mask, other=0), mask=mask)
            to += G * E
            new += G * E
            tl.store(to + of_keys, tl.load(new + of_keys, mask=mask, other=0), mask=mask)
            mask = is_new & is_first_slice
            to += C - G * E
            new = gates + ((b * T + position - first) * (2 * H))[:, None]
            tl.store(to + pair, tl.load(new + pair, mask=mask, other=0), mask=mask)


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


def tile(n: int) -> int:
    """The side of a tile for n elements. tl.dot takes no less than 16."""
    return max(16, triton.next_power_of_2(n))


def launch_delta_rule(
    qkvz: Tensor,
    gates: Tensor,
    positions: Tensor,
    ends: Tensor | None,
    weights: list[Tensor],
    caches: list[Tensor],
) -> Tensor:
    """weights: filter, log_a, dt_bias; caches: inputs, states, keys, decays, corrections; the others
    as gated_delta() has them -> y [B, T, H, V] fp32"""
    inputs, states, keys, decays, corrections = caches
    (B, T, width), (G, E), (H, V) = qkvz.shape, keys.shape[2:], corrections.shape[2:]
    device, pdl = qkvz.device, pdl_options(qkvz.device)
    stride = positions.stride(0) if len(positions) > 1 else 0
    sizes = dict(G=G, H=H, E=E, V=V, BE=tile(E), BLOCK=BLOCK, RING=RING, TOKENS=TOKENS)
    sizes |= dict(PDL=bool(pdl), **pdl)
    BV = min(32, tile(V))
    programs = B * H, triton.cdiv(V, BV)
    if T <= FEW and ends is None:
        y = torch.empty(B, T, H, V, device=device)
        for t in range(T):
            token_kernel[programs](
                *(qkvz, gates, positions, *weights, *caches, y, stride, T, t, width),
                TAPS=weights[0].shape[1],
                BV=BV,
                # Where programs wait for their turn, small ones are faster.
                num_warps=4 if math.prod(programs) <= 4 * gpu(device).multi_processor_count else 2,
                **sizes,
            )
        return y
    y = torch.zeros(B, T, H, V, device=device)  # padding stays 0
    n_block = triton.cdiv(T + BLOCK - 1, BLOCK)  # the first one may have but its last token here
    n = min(n_block, max(1, AT_ONCE // (B * BLOCK)))
    halves = partial(torch.empty, dtype=torch.bfloat16, device=device)
    empty = partial(torch.empty, B, n, H, BLOCK, device=device)
    q, k, w = (halves(B, n, heads, 2, BLOCK, E) for heads in (G, G, H))
    between = q, k, empty(V), w, empty(BLOCK), empty(), empty()
    place = positions, positions if ends is None else ends
    for n_before in range(0, n_block, n):
        how = stride, int(ends is not None), T, n_before, n
        blocks_kernel[n * H, B](
            *(qkvz, gates, *place, *weights, inputs, keys, decays, *between, *how, width),
            TAPS=weights[0].shape[1],
            LEVELS=BLOCK.bit_length() - 1,
            BV=tile(V),
            num_warps=8,
            **sizes,
        )
        is_last = int(n_before + n >= n_block)
        states_kernel[programs](
            *(*between, qkvz, gates, *place, inputs, states, corrections, y),
            *(*how, is_last, width),
            BV=BV,
            num_warps=4,
            num_stages=2,
            **sizes,
        )
    return y


@library.custom_op(
    "llama_fast::gated_delta",
    mutates_args=("inputs", "states", "keys", "decays", "corrections"),
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
    inputs: Tensor,
    states: Tensor,
    keys: Tensor,
    decays: Tensor,
    corrections: Tensor,
    norm: Tensor,
    eps: float,
) -> Tensor:
    """DeltaNet.mix(): qkvz [B, T, C + H V], gates [B, T, 2H], positions [B, T] or [1, T], of which
    those of one sequence follow one another, ends [B] or None -> [B, T, H V]. inputs, states: a
    DeltaCache's, fp32 keys [>= B, TOKENS, G, E], decays [>= B, TOKENS, H], corrections [>= B, TOKENS,
    H, V]: the first B rows are used."""
    B, T, N = qkvz.shape
    H, V = corrections.shape[2:]
    qkvz, gates = qkvz.contiguous(), gates.contiguous()
    caches = [inputs, states, keys, decays, corrections]
    y = launch_delta_rule(qkvz, gates, positions, ends, [filter, log_a, dt_bias], caches)
    out = qkvz.new_empty(B, T, H * V)
    heads, BH, pdl = B * T * H, 4, pdl_options(qkvz.device)
    norm_kernel[(triton.cdiv(heads, BH),)](
        *(y, qkvz, norm, out, heads, N, N - H * V, eps),
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
def _(qkvz, gates, positions, ends, filter, log_a, dt_bias, inputs, states, keys, decays, u, *_):
    H, V = u.shape[2:]
    return qkvz.new_empty(*qkvz.shape[:2], H * V)


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
        mixer, cache = self.mixer, self.cache
        if not self.kernel:
            rows = torch.arange(len(qkvz), device=qkvz.device)[:, None]
            return mixer.mix(qkvz, gates, positions, None, None, None, rows, ends)
        weights = mixer.filter, mixer.log_a, mixer.dt_bias
        caches = cache.inputs, cache.states, cache.keys, cache.decays, cache.corrections
        return gated_delta(qkvz, gates, positions, ends, *weights, *caches, mixer.norm, mixer.eps)

    def forward(self, x, positions, cos, sin, mask, rows, ends=None):
        """Prefill: x [B, T, D] -> [B, T, D]"""
        mixer = self.mixer
        return mixer.wo(self.mix(mixer.w_in(x), mixer.w_gates(x), positions, ends))

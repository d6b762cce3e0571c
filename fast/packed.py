"""
Linear layers whose weights are int4 or int8 codes: the packing, the plain layer, and the kernels of a GPU.

A group of weights of one row, G of them along K, shares a scale and a zero point: w = (code - zero) * scale.

Codes are packed into 32-bit words in the order in which a warp's matrix instruction (mma.m16n8k16) takes its left
operand, so that a kernel loads 16 bytes and has, without any exchange between threads, what its registers need. With
P = 16 / bits, a block of 16 words holds 32 P codes of a row: word 4t + c has, at bits `shifts(bits)[s, e]`, the code of
k = 8P c + 8 s + 2 t + e. For the kernels, 16 rows' blocks stand together: 1 KiB, read as one piece.

One row of x and int4, as an example: of a row's block, thread t of four loads words 4t to 4t + 3. In word c, AND
0x000f000f leaves the codes of k = 32c + 2t and the next, OR 0x64006400 makes them fp16's 1024 + code, a pair, fit for
the matrix unit; AND 0x00f000f0 and OR 0x54005400 make 64 + code for k + 8. The word 8 bits down gives k + 16 and k +
24. The unit adds up x (offset + code). As w = (code - zero) scale, a group's part of the product is scale (this sum -
sum of x offset - zero sum of x); the two sums of x are the same for all rows of w, and are made once.

Shapes: M rows of x, N outputs, K inputs, W = 16 ceil(K / 32 P) words of a row, C groups of a row (K / G). For the
kernels groups are [blocks of 16 rows, C, 16, PARTS]: there C counts blocks of PARTS groups, zeros behind the last one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from fast.common import constexpr, gdc_launch_dependents, gdc_wait, gpu, jit, launch, tl, triton, tuned
from fast.linear import plain_linear, rms_norm
from quantize import PackedLinear, shifts, unpack

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.runtime.jit import constexpr_function
except ImportError:  # no GPU build of PyTorch: the plain layer serves
    gluon, constexpr_function = None, lambda function: function

gluon_jit = gluon.jit if gluon else jit
MOST_ROWS = 512  # of x for packed_rows_kernel, each of whose tiles of x unpacks the weights once more
LEAST_COLUMNS = 64  # in a tile of it, where that is not all of x
WHOLE = constexpr(2 ** 30) if gluon else 2 ** 30  # the size of a group that is all of K


# Codes to fp16, two at a time: OR-ed into the mantissa of 1024, or of 64 where they stand 4 bits higher. No conversion
# from integers, which runs at a quarter of the rate; what is too much is taken from the sums, see packed_row_kernel.
INT4_TO_HALF = """{ .reg .b32 t, a0, a1, a2, a3; shr.u32 t, $8, 8;
    lop3.b32 a0, $8, 0x000f000f, 0x64006400, 0xea; lop3.b32 a1, $8, 0x00f000f0, 0x54005400, 0xea;
    lop3.b32 a2, t, 0x000f000f, 0x64006400, 0xea; lop3.b32 a3, t, 0x00f000f0, 0x54005400, 0xea;
    mov.b32 {$0, $1}, a0; mov.b32 {$2, $3}, a1; mov.b32 {$4, $5}, a2; mov.b32 {$6, $7}, a3; }"""
INT8_TO_HALF = """{ .reg .b32 a0, a1; prmt.b32 a0, $4, 0x64646464, 0x4140; prmt.b32 a1, $4, 0x64646464, 0x4342;
    mov.b32 {$0, $1}, a0; mov.b32 {$2, $3}, a1; }"""
if gluon:
    INT4_TO_HALF, INT8_TO_HALF = gl.constexpr(INT4_TO_HALF), gl.constexpr(INT8_TO_HALF)


@constexpr_function
def doubled(n, base):
    """Bases of a layout's dimension with n values: base, 2 base, 4 base ..."""
    return [[2 ** i * b for b in base] for i in range(n.bit_length() - 1)]


@constexpr_function
def word_layout(WARPS):
    """Of words [blocks, 16 rows, 16]: a thread has 4 adjacent ones of 2 rows, as the matrix instruction wants them."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        doubled(WARPS, [1, 0, 0]), [], [WARPS, 16, 16])


@constexpr_function
def input_layout(WARPS, CHAINS, BK):
    """Of x [chains of a block, blocks, BK]: the right operand's, whose 8 columns are all the same."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 8]] + doubled(BK // 16, [0, 0, 16]) + doubled(CHAINS, [1, 0, 0]),
        [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]], doubled(WARPS, [0, 1, 0]), [], [CHAINS, WARPS, BK])


@constexpr_function
def sum_layout(WARPS, PARTS):
    """Of the sums of x [parts of a block, blocks]."""
    return gl.DistributedLinearLayout(doubled(PARTS, [1, 0]), [[0, 0]] * 5, doubled(WARPS, [0, 1]), [], [PARTS, WARPS])


@constexpr_function
def group_layout(WARPS, PARTS):
    """Of scales and zero points [blocks, 16 rows, parts of a block], which are adjacent in memory."""
    return gl.DistributedLinearLayout(
        doubled(PARTS, [0, 0, 1]) + [[0, 8, 0]], [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        doubled(WARPS, [1, 0, 0]), [], [WARPS, 16, PARTS])


@constexpr_function
def column_layout(WARPS, PARTS):
    """Of every second column of a product [parts and blocks, 16 rows, 8 columns]."""
    return gl.DistributedLinearLayout(
        [[0, 8, 0]] + doubled(PARTS, [WARPS, 0, 0]), [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        doubled(WARPS, [1, 0, 0]), [], [PARTS * WARPS, 16, 4])


@constexpr_function
def chunk_size(SHARE, WARPS):
    """How many numbers of a slice of x are brought into shape at a time, 8 to 32 a thread: those of which whole chunks
    have least to spare, of these the most. It shows: with 32, 8 warps took 11,008 numbers for 16,384, and a layer of
    Llama-2-7B, int4, 46.9 us; with 16 12,288, and 45.1 us (each tuned, H200, two calls)."""
    return min((256 * WARPS * n for n in (1, 2, 4)), key=lambda size: (triton.cdiv(SHARE, size) * size, -size))


@gluon_jit
def fetch(rings, words, item, items, first, step, begin, KB, WARPS: constexpr, DEPTH: constexpr, STAGES: constexpr,
          ROUNDS: constexpr, FULL: constexpr):
    """Starts the copy of an item's words: one round, DEPTH blocks a warp, of 16 rows. begin: the slice's first round.
    FULL: no round has fewer."""
    WORDS: constexpr = word_layout(WARPS)
    block = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    at = block * 256 + row * 16 + word
    if item < items:
        start = (begin + item % ROUNDS) * (WARPS * DEPTH)
        words += ((first + item // ROUNDS * step).to(gl.int64) * KB + start) * 256
        for d in gl.static_range(DEPTH):
            mask = None if FULL else (start + d * WARPS + block < KB) & (at >= 0)
            async_copy.async_copy_global_to_shared(rings[d].index(item % STAGES), words + d * WARPS * 256 + at,
                                                   mask=mask, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon_jit
def fetch_groups(groups, nb, nth, C, G: constexpr, BLOCK: constexpr, PARTS: constexpr, WARPS: constexpr,
                 DEPTH: constexpr, FULL: constexpr, LAYOUT: constexpr):
    """Scales and zero points of K's nth round, DEPTH times [parts and blocks, 16 rows], or once [1, 16 rows] if all of
    K is one group."""
    if G == WHOLE:
        row = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        part = gl.arange(0, 1, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        return (gl.load(groups + nb * 16 + part + row),)
    else:
        GROUPS: constexpr = group_layout(WARPS, PARTS)
        block = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, GROUPS)))[:, None, None].to(gl.int64)
        row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))[None, :, None]
        part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, GROUPS)))[None, None, :]
        groups += nb * C * 16 * PARTS
        found = ()
        for d in gl.static_range(DEPTH):
            chunk = ((nth * DEPTH + d) * WARPS + block) * BLOCK // (G * PARTS)
            at = groups + (chunk * 16 + row) * PARTS + part
            both = gl.load(at) if FULL else gl.load(at, mask=(chunk < C) & (row + part >= 0), other=0)
            both = gl.reshape(gl.permute(both, [2, 0, 1]), [PARTS * WARPS, 16])
            found = found + (gl.convert_layout(both, LAYOUT, assert_trivial=True),)
        return found


@gluon_jit
def load_inputs(x, order, k, stop):
    source = k
    if order is not None:
        source = gl.load(order + k, mask=k < stop, other=0)
    return gl.load(x + source, mask=k < stop, other=0)


@gluon_jit
def load_sums(sums, at, WARPS: constexpr, PARTS: constexpr, LAYOUT: constexpr):
    found = gl.reshape(sums.index(at).permute([1, 0]).load(sum_layout(WARPS, PARTS)), [PARTS * WARPS])
    return gl.expand_dims(gl.convert_layout(found, LAYOUT, assert_trivial=True), 1)


@gluon_jit
def add_slices(total, totals, arrived, SLICES: constexpr, LAYOUT: constexpr):
    """The last program to come gets the sums of 16 rows over all slices of K, in a fixed order, and True."""
    i = gl.arange(0, 16, layout=LAYOUT)
    gl.store(totals + gl.program_id(1) * 16 + i, total)
    gl.thread_barrier()
    complete = gl.atomic_add(arrived, 1, sem="acq_rel") == SLICES - 1
    gl.thread_barrier()
    total = gl.zeros([16], gl.float32, LAYOUT)
    if complete:
        gl.store(arrived, 0)  # for the next launch
        for slice in gl.static_range(SLICES):
            total += gl.load(totals + slice * 16 + i)
    return total, complete


@gluon_jit
def packed_row_kernel(x, words, groups, order, norm, bias, residual, out, totals, arrived, N, K, C, eps,
                      G: constexpr, BITS: constexpr, GATED: constexpr, WARPS: constexpr, DEPTH: constexpr,
                      STAGES: constexpr, PARTS: constexpr, ROUNDS: constexpr, FULL: constexpr, SLICES: constexpr,
                      PDL: constexpr):
    """One row of packed_linear(): a program takes 16 rows of w at a time and a slice of K (all, if there is a norm), of
    which each of its warps takes every WARPSth block, DEPTH of them in each of ROUNDS.

    A group that is smaller than a block cuts it into PARTS. Weights come to the matrix unit with an offset, 1024 or 64,
    and their zero point; these times the sums of x are then taken away. x goes to fp16: after a norm, as it is then at
    most sqrt(K) times the norm's weight, in units of 16, fit for weights of 1e-4 to 1e4; else scaled by a power of two,
    which rounds no number but those below 2^-28 of its slice's length."""
    BLOCK: constexpr = 512 // BITS
    # Chains of dependent products in a block: one for each part, but four for int8, where a layer of Llama-2-7B took
    # 63.2 us so and 63.7 with one (int4: 48.1 with four, 47.4 with one; H200).
    CHAINS: constexpr = PARTS if BITS == 4 else 4
    BK: constexpr = BLOCK // CHAINS
    PART: constexpr = BLOCK // PARTS
    SHARE: constexpr = ROUNDS * DEPTH * WARPS * BLOCK
    CHUNK: constexpr = chunk_size(SHARE, WARPS)  # numbers of x at a time
    CHUNKS: constexpr = (SHARE + CHUNK - 1) // CHUNK
    TURNS: constexpr = CHUNKS * CHUNK // (WARPS * BLOCK)  # blocks of x for a warp, ROUNDS * DEPTH and what is to spare
    MMA: constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: constexpr = gl.DotOperandLayout(1, MMA, 2)
    GROUPS: constexpr = gl.SliceLayout(2, MMA)
    ROWS: constexpr = gl.SliceLayout(0, GROUPS)
    BLOCKS: constexpr = gl.SliceLayout(1, GROUPS)
    COLUMNS: constexpr = column_layout(WARPS, PARTS)
    TOTAL: constexpr = column_layout(WARPS, 1)
    FLAT: constexpr = gl.BlockedLayout([CHUNK // (32 * WARPS)], [32], [WARPS], [0])
    KB = (K + BLOCK - 1) // BLOCK
    N_OUT = N // 2 if GATED else N
    NB = (N_OUT + 7) // 8 if GATED else (N + 15) // 16
    first = gl.program_id(0)
    step = gl.num_programs(0)
    items = (NB - first + step - 1) // step * ROUNDS
    begin = gl.program_id(1) * ROUNDS
    if PDL:
        gdc_launch_dependents()

    rings = ()  # one for each d: of the same one, the compiler would have each copy wait for the one before
    for d in gl.static_range(DEPTH):
        rings = rings + (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, 16, 16],
                                                   gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])),)
    for item in gl.static_range(STAGES - 1):
        fetch(rings, words, item, items, first, step, begin, KB, WARPS, DEPTH, STAGES, ROUNDS, FULL)
    next_group = fetch_groups(groups, first, begin, C, G, BLOCK, PARTS, WARPS, DEPTH, FULL, GROUPS)

    inputs = gl.allocate_shared_memory(gl.float16, [TURNS, WARPS, CHAINS, BK],
                                       gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    sums = gl.allocate_shared_memory(gl.float32, [2 * TURNS, WARPS, PARTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k = begin * (DEPTH * WARPS * BLOCK) + gl.arange(0, CHUNK, layout=FLAT)
    stop = gl.minimum(K, (begin + ROUNDS) * (DEPTH * WARPS * BLOCK))
    weights, xs = (), ()
    if norm is not None:
        for c in gl.static_range(CHUNKS):
            weights = weights + (load_inputs(norm, order, c * CHUNK + k, stop),)
    if PDL:
        gdc_wait()
    squares = gl.zeros([CHUNK], gl.float32, FLAT)
    for c in gl.static_range(CHUNKS):
        xs = xs + (load_inputs(x, order, c * CHUNK + k, stop),)
        squares += xs[c].to(gl.float32) * xs[c].to(gl.float32)
    squares = gl.sum(squares, 0)
    if norm is not None:
        factor = 16.0
        unit = gl.rsqrt(squares / K + eps) / factor
    else:  # no |x| is larger than size; power, its exponent alone, is more than half of it
        size = gl.sqrt(gl.maximum(squares, 1e-30))
        power = (size.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        factor = power / 16384
        unit = 16384 / power
    flat = inputs._reinterpret(gl.float16, [CHUNKS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    flat_sums = sums._reinterpret(gl.float32, [2 * CHUNKS, CHUNK // PART], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for c in gl.static_range(CHUNKS):
        scaled = xs[c].to(gl.float32)
        if norm is not None:
            scaled *= weights[c].to(gl.float32)
        scaled *= unit
        flat.index(c).store(scaled.to(gl.float16))
        if norm is not None:
            scaled = scaled.to(gl.float16).to(gl.float32)
        # By parts: the sums of x, and of x times its weights' offset, which depends on bit 3 of k in int4.
        eights = gl.sum(gl.reshape(scaled, [CHUNK // 8, 8]), 1)
        flat_sums.index(c).store(-gl.sum(gl.reshape(eights, [CHUNK // PART, PART // 8]), 1))
        odd = gl.arange(0, CHUNK // 8, layout=eights.type.layout) % 2 == 1
        eights *= gl.where(odd & (BITS == 4), 64.0, 1024.0)
        flat_sums.index(CHUNKS + c).store(-gl.sum(gl.reshape(eights, [CHUNK // PART, PART // 8]), 1))

    none = gl.zeros([CHAINS * WARPS, 16, 8], gl.float32, MMA)
    acc = gl.zeros([WARPS, 16, 4], gl.float32, TOTAL)
    i = gl.arange(0, 16, layout=ROWS)
    for item in range(items):
        nb = first + item // ROUNDS * step
        turn = item % ROUNDS
        async_copy.wait_group(STAGES - 2)
        fetch(rings, words, item + STAGES - 1, items, first, step, begin, KB, WARPS, DEPTH, STAGES, ROUNDS, FULL)
        group = next_group
        ahead = gl.minimum(first + (item + 1) // ROUNDS * step, NB - 1)
        following = begin + (item + 1) % ROUNDS
        next_group = fetch_groups(groups, ahead, following, C, G, BLOCK, PARTS, WARPS, DEPTH, FULL, GROUPS)
        last = turn == ROUNDS - 1
        n = nb * 16 + i
        extra = gl.zeros([16], gl.float32, ROWS)
        if not GATED:
            if bias is not None:
                extra += gl.load(bias + n, mask=(n < N) & last, other=0).to(gl.float32)
            if residual is not None:
                extra += gl.load(residual + n, mask=(n < N) & last, other=0).to(gl.float32)

        for d in gl.static_range(DEPTH):
            left = rings[d].index(item % STAGES).load(word_layout(WARPS))
            left = gl.reshape(left, [WARPS, 16, 4, CHAINS, 4 // CHAINS])
            if BITS == 4:
                p = gl.inline_asm_elementwise(INT4_TO_HALF, "=h,=h,=h,=h,=h,=h,=h,=h,r", [left],
                                              dtype=(gl.float16,) * 8, is_pure=True, pack=1)
                a = gl.join(gl.join(gl.join(p[0], p[4]), gl.join(p[2], p[6])),
                            gl.join(gl.join(p[1], p[5]), gl.join(p[3], p[7])))
            else:
                p = gl.inline_asm_elementwise(INT8_TO_HALF, "=h,=h,=h,=h,r", [left], dtype=(gl.float16,) * 4,
                                              is_pure=True, pack=1)
                a = gl.join(gl.join(p[0], p[2]), gl.join(p[1], p[3]))
            a = gl.reshape(a, [WARPS, 16, 4, CHAINS, 4 // CHAINS, 16 // BITS, 2])
            a = gl.reshape(gl.permute(a, [3, 0, 1, 4, 5, 2, 6]), [CHAINS * WARPS, 16, BK])
            a = gl.convert_layout(a, LEFT, assert_trivial=True)
            at = turn * DEPTH + d
            right = inputs.index(at).permute([1, 0, 2]).load(input_layout(WARPS, CHAINS, BK))
            right = gl.reshape(right, [CHAINS * WARPS, BK])
            right = gl.expand_dims(gl.convert_layout(right, gl.SliceLayout(2, RIGHT), assert_trivial=True), 2)
            right = gl.convert_layout(right.broadcast_to([CHAINS * WARPS, BK, 8]), RIGHT, assert_trivial=True)
            y, _ = gl.split(gl.reshape(mma_v2(a, right, none), [PARTS, CHAINS // PARTS, WARPS, 16, 4, 2]))
            y = gl.reshape(gl.sum(y, 1), [PARTS * WARPS, 16, 4])
            y = gl.convert_layout(y, COLUMNS, assert_trivial=True)
            both = group[0 if G == WHOLE else d]
            zero = gl.inline_asm_elementwise("prmt.b32 $0, $1, 0x4B000000, 0x7632;", "=r,r", [both], dtype=gl.int32,
                                             is_pure=True, pack=1)  # 2^23 and the zero point
            zero = zero.to(gl.float32, bitcast=True) - 8388608
            scale = (both & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            offset = load_sums(sums, TURNS + at, WARPS, PARTS, BLOCKS)
            offset += load_sums(sums, at, WARPS, PARTS, BLOCKS) * zero
            offset = gl.convert_layout(offset, gl.SliceLayout(2, COLUMNS), assert_trivial=True)
            scale = gl.convert_layout(scale, gl.SliceLayout(2, COLUMNS), assert_trivial=True)
            y = (y + gl.expand_dims(offset, 2)) * gl.expand_dims(scale, 2)
            acc += gl.convert_layout(gl.sum(gl.reshape(y, [PARTS, WARPS, 16, 4]), 0), TOTAL, assert_trivial=True)
        if last:
            total = gl.convert_layout(gl.sum(gl.sum(acc, 2), 0) * (factor / 4), ROWS, assert_trivial=True)
            acc = gl.zeros([WARPS, 16, 4], gl.float32, TOTAL)
            complete = last  # true; a constant would not do for a type
            if SLICES > 1:
                total, complete = add_slices(total, totals + nb * (SLICES * 16), arrived + nb, SLICES, ROWS)
            if complete:
                if GATED:  # 8 gates, then their ups
                    gate, up = gl.split(gl.permute(gl.reshape(total, [2, 8]), [1, 0]))
                    product = gate / (1 + gl.exp(-gate)) * up
                    gates = nb * 8 + gl.arange(0, 8, layout=product.type.layout)
                    gl.store(out + gates, product.to(out.dtype.element_ty), mask=gates < N_OUT)
                else:
                    gl.store(out + n, (total + extra).to(out.dtype.element_ty), mask=n < N_OUT)


def unpacking(bits: int, half: bool, scaled: bool) -> tuple[str, int, int]:
    """For packed_rows_kernel: what makes a pair of 16-bit weights of a word ($1), at bits $3, less the zero point ($5),
    and, scaled, times the scale ($7); and what is to be added to a zero point, and its factor then, to give $5."""
    one, magic, kind = ("3c00", "6400", "f16x2") if half else ("3f80", "4300", "bf16x2")
    get = "shr.u32 t, $1, $3; "
    if bits == 4:
        get += f"lop3.b32 t, t, 0x000f000f, 0x{magic}{magic}, 0xea; fma.rn.{kind} t, t, one, $5;"
    elif half:
        get += "prmt.b32 t, t, 0x64646464, 0x4140; fma.rn.f16x2 t, t, one, $5;"
    else:  # bf16 has 8 bits: through fp32
        get += """prmt.b32 a, t, 0x4b000000, 0x7440; prmt.b32 b, t, 0x4b000000, 0x7441; mov.b32 f, a; mov.b32 g, b;
            mov.b32 z, $5; add.rn.f32 f, f, z; add.rn.f32 g, g, z; mov.b32 a, f; mov.b32 b, g;
            prmt.b32 t, a, b, 0x7632;"""
    result = f"mov.b32 a, 0x80008000; fma.rn.{kind} $0, t, $7, a;" if scaled else "mov.b32 $0, t;"
    asm = f"{{ .reg .b32 t, a, b, one; .reg .f32 f, g, z; mov.b32 one, 0x{one}{one}; {get} {result} }}"
    if bits == 8 and not half:
        return asm, -0x35000000, 1
    return asm, 0xE400 if half else 0xC300, 0x10001


@jit
def scale_of(groups):
    """fp16, the low half of a group's word; its zero point is the high half."""
    return (groups & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


# One code for all numbers of rows, or tuned.json's choices would be timed with one and run with another.
@jit(do_not_specialize=["M", "whole", "slices"])
def packed_rows_kernel(x, words, groups, shifts, bias, residual, out, sums, arrived, M, N, K, C, whole,
                       slices, G: constexpr, BITS: constexpr, ASM: constexpr, ZERO: constexpr, PAIR: constexpr,
                       GATED: constexpr, BM: constexpr, BN: constexpr, SPLITS: constexpr, SLICED: constexpr,
                       SCALED: constexpr, PARTS: constexpr, STAGES: constexpr, FULL: constexpr, PDL: constexpr):
    """Several rows of packed_linear(), without norm. Program (BM rows of x, BN of w and a slice of K).

    SPLITS > 1: so many warps share the slice, each a block. SLICED: the first whole tiles of w have one slice each; a
    program's second index goes on from them to the others' first slices, their second slices ..., whose sums meet in
    memory. SCALED: weights are multiplied by their scales, both rounded to x's type as a dequantized weight is; else
    sums are, in fp32, which wants groups of whole blocks. FULL: all steps are whole.

    shifts is an input because the compiler moves a tile into the matrix unit's layout before it is unpacked, not after,
    only if all that goes into the unpacking was loaded."""
    BLOCK: constexpr = 512 // BITS
    P: constexpr = 16 // BITS
    dtype: constexpr = x.dtype.element_ty
    KB = (K + BLOCK - 1) // BLOCK
    N_OUT = N // 2 if GATED else N
    NB = (N_OUT + 7) // 8 if GATED else (N + 15) // 16
    tile, slice = tl.program_id(1), 0
    if SLICED:
        sliced = tl.maximum((tl.num_programs(1) - whole) // slices, 1)  # with 0, all tiles being whole, 0 / 0
        slice = tl.maximum(tile - whole, 0) // sliced
        tile -= slice * sliced
        slices = tl.where(tile < whole, 1, slices)
    r = tl.arange(0, BN)
    c = tl.arange(0, BM)
    m = tl.program_id(0) * BM + c
    s = tl.arange(0, SPLITS)
    i = tl.arange(0, 16)
    nb = tl.minimum(tile * (BN // 16) + r // 16, NB - 1)
    at_w = words + (nb.to(tl.int64) * KB * 256 + r % 16 * 16)[None, :, None]
    at_w += (s[:, None] * 256 + i[None, :])[:, None, :]
    # One block wide, x's tile has two dimensions: the matrix unit then reads it where the copy put it.
    ms, ks = m[None, :], tl.arange(0, BLOCK)[:, None]
    if SPLITS > 1:
        ms, ks = ms[None], s[:, None, None] * BLOCK + ks[None]
    at_x = x + ms * K + ks
    at_s = ((nb * C * 16 + r % 16) * PARTS)[None, :, None] + tl.arange(0, PARTS)[None, None, :]
    if PDL:
        gdc_launch_dependents()
    shift = tl.load(shifts + tl.arange(0, P) * 2)
    if PDL:
        gdc_wait()
    if SPLITS == 1:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((SPLITS, BN, BM), tl.float32)
    shape: constexpr = (SPLITS, BN, 16, P, 2)
    wide: constexpr = (SPLITS, BN, 4, PARTS, 4 // PARTS)
    share = tl.cdiv(tl.cdiv(K, SPLITS * BLOCK), slices) * (SPLITS * BLOCK)
    first = slice * share
    for k0 in tl.range(first, tl.minimum(first + share, K), SPLITS * BLOCK, num_stages=STAGES):
        q = tl.load(at_w + k0 // BLOCK * 256, mask=FULL | (k0 // BLOCK + s < KB)[:, None, None], other=0,
                    eviction_policy="evict_first")
        xs = tl.load(at_x + k0, mask=(ms < M) & (FULL | (k0 + ks < K)), other=0)
        chunk = tl.minimum((k0 + s * BLOCK) // (G * PARTS), C - 1)
        group = tl.load(groups + at_s + (chunk * 16 * PARTS)[:, None, None])
        scale = scale_of(group)
        pair = (scale.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
        zero = ((group >> 16) + ZERO) * PAIR
        # a part's scale and zero point for each of its words; if a block has one scale, the product takes it
        pair = tl.broadcast_to(tl.reshape(pair, (SPLITS, BN, 1, PARTS, 1)), wide)
        zero = tl.broadcast_to(tl.reshape(zero, (SPLITS, BN, 1, PARTS, 1)), wide)
        pair = tl.broadcast_to(tl.reshape(pair, (SPLITS, BN, 16, 1, 1)), shape)
        zero = tl.broadcast_to(tl.reshape(zero, (SPLITS, BN, 16, 1, 1)), shape)
        w = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r,r,r,r,r", [tl.broadcast_to(tl.reshape(q, (SPLITS, BN, 16, 1, 1)), shape),
                                        tl.broadcast_to(tl.reshape(shift, (1, 1, 1, P, 1)), shape), zero, pair],
            dtype=x.dtype.element_ty, is_pure=True, pack=2)
        w = tl.permute(tl.reshape(w, (SPLITS, BN, 4, 4, P, 2)), (0, 1, 3, 4, 2, 5))
        if SPLITS == 1:
            w = tl.reshape(w, (BN, BLOCK))
            scale = tl.reshape(scale, (BN, PARTS))
        else:
            w = tl.reshape(w, (SPLITS, BN, BLOCK))
        if SCALED or G == WHOLE:
            acc = tl.dot(w, xs, acc)
            if SPLITS == 1:
                # Uses acc, so that the step waits for the product: Triton 3.6 else has it go on while the next step
                # unpacks weights into the registers that it reads.
                acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], tl.float32, is_pure=True, pack=1)
        else:
            acc += tl.dot(w, xs) * scale.to(tl.float32)
    if SPLITS > 1:
        acc = tl.sum(acc, 0)
    if G == WHOLE:
        acc *= scale_of(tl.load(groups + nb * 16 + r % 16)).to(tl.float32)[:, None]
    if SLICED:
        nth = (tile - whole) * tl.num_programs(0) + tl.program_id(0)
        at = sums + (nth * slices * BN + r[:, None]) * BM + c[None, :]
        missing = slices - 1
        if slices > 1:
            tl.store(at + slice * (BN * BM), acc)
            tl.debug_barrier()
            missing -= tl.atomic_add(arrived + nth, 1, sem="acq_rel")
            tl.debug_barrier()
        if missing > 0:
            return
        if slices > 1:  # the last one to come adds all up, always in the same order
            tl.store(arrived + nth, 0)  # for the next launch
            acc = tl.zeros((BN, BM), tl.float32)
            for slice in range(slices):
                acc += tl.load(at + slice * (BN * BM))
    n = tile * BN + r
    if GATED:
        acc = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(acc, (BN // 2, BM, 2)))
        acc = gate / (1 + tl.exp(-gate)) * up
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
    at = m[None, :] * N_OUT + n[:, None]
    inside = (n < N_OUT)[:, None] & (m < M)[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N_OUT, other=0).to(tl.float32)[:, None]
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0)
    tl.store(out + at, acc.to(dtype), mask=inside)


@jit
def dequantize_kernel(words, groups, out, N, K, C, G: constexpr, PARTS: constexpr, BITS: constexpr, GATED: constexpr,
                      SPAN: constexpr):
    """SPAN blocks of 16 rows -> their weights, in out [N, K] in the rows' own order."""
    BLOCK: constexpr = 512 // BITS
    P: constexpr = 16 // BITS
    KB = (K + BLOCK - 1) // BLOCK
    nb = tl.program_id(0)
    r = tl.arange(0, 16)
    kb = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    at = (nb.to(tl.int64) * KB + kb)[None, :, None] * 256 + r[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    q = tl.load(words + at, mask=(kb < KB)[None, :, None], other=0)
    j = tl.arange(0, 2 * P)  # s and e
    shift = j // 2 * 4 + j % 2 * 16 if BITS == 4 else j * 8
    codes = (tl.reshape(q, (16, SPAN * 16))[:, :, None] >> shift[None, None, :]) & (2 ** BITS - 1)
    codes = tl.permute(tl.reshape(codes, (16, SPAN, 4, 4, P, 2)), (0, 1, 3, 4, 2, 5))
    codes = tl.reshape(codes, (16, SPAN * BLOCK))
    k = tl.program_id(1) * (SPAN * BLOCK) + tl.arange(0, SPAN * BLOCK)
    chunk = tl.minimum(k // (G * PARTS), C - 1)[None, :]
    group = tl.load(groups + ((nb * C + chunk) * 16 + r[:, None]) * PARTS + (k // G % PARTS)[None, :])
    scale = scale_of(group).to(tl.float32)
    # OR-ed into 2^23, integers are floats without a conversion, which runs at a quarter of the rate
    w = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (group >> 16 | 0x4B000000).to(tl.float32, bitcast=True)
    w *= scale
    if GATED:
        n = nb * 8 + r % 8 + r // 8 * (N // 2)
        inside = nb * 8 + r % 8 < N // 2
    else:
        n = nb * 16 + r
        inside = n < N
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], w.to(out.dtype.element_ty),
             mask=inside[:, None] & (k < K)[None, :])


def tile(rows: Tensor, width: int, gated: bool) -> Tensor:
    """[N, C width] -> [blocks of 16 rows, C, 16 rows, width]; gated: a block is 8 gates and their 8 ups.

    Rows of zeros are added where a block is not full."""
    if gated:
        rows = F.pad(rows.view(2, len(rows) // 2, -1), (0, 0, 0, -(len(rows) // 2) % 8))
        rows = rows.unflatten(1, (-1, 8)).transpose(0, 1)
    else:
        rows = F.pad(rows, (0, 0, 0, -len(rows) % 16))
    return rows.reshape(-1, 16, rows.shape[-1] // width, width).transpose(1, 2).contiguous()


def untile(tiles: Tensor, N: int, gated: bool) -> Tensor:
    """The inverse of tile()."""
    rows = tiles.transpose(1, 2).flatten(2)  # [blocks of 16 rows, 16, W or C]
    if not gated:
        return rows.flatten(0, 1)[:N]
    return rows.unflatten(1, (2, 8)).transpose(0, 1).flatten(1, 2)[:, :N // 2].flatten(0, 1)


def plain_packed_linear(x, words, groups, order, shifts, arrived, N, bits, group, norm=None, bias=None, residual=None,
                        gated=False, eps=1e-5) -> Tensor:
    """The plain twin of packed_linear()."""
    K = x.shape[1] if order is None else len(order)
    groups = untile(groups, N, gated)[:, :K // group]
    codes = unpack(untile(words, N, gated), bits, K).view(N, -1, group)
    scales, zeros = groups.to(torch.int16).view(torch.float16).float(), groups >> 16
    w = ((codes - zeros[:, :, None]) * scales[:, :, None]).flatten(1).to(x.dtype)
    if order is not None:
        x, norm = x[:, order], None if norm is None else norm[order]
    return plain_linear(x, w, norm, bias, residual, gated, eps)


# Nothing is mutated: when the kernels are done, arrived is as it was.
@library.custom_op("llama_fast::packed_linear", mutates_args=(), device_types="cuda")
def packed_linear(x: Tensor, words: Tensor, groups: Tensor, order: Tensor | None, shifts: Tensor, arrived: Tensor,
                  N: int, bits: int, group: int, norm: Tensor | None = None, bias: Tensor | None = None,
                  residual: Tensor | None = None, gated: bool = False, eps: float = 1e-5) -> Tensor:
    """kernels.linear() with the weights of a KernelLinear, whose tiles are words and groups: x [M, K] ->
    residual [M, N] + rms_norm(x, norm)[:, order] @ w.T + bias [N]; gated as there. arrived: int32 zeros, a number for
    each tile, zeros again after.

    kernels.tuned()'s sizes: row (warps, depth, stages, programs a multiprocessor, slices), rows (rows of w and of x,
    splits, stages, warps, occupancy, slices, 1 for scaled); occupancy: how many programs are to share a multiprocessor,
    or 0."""
    M, K = len(x), x.shape[1] if order is None else len(order)
    (_, C, _, parts), block = groups.shape, 512 // bits
    x = x.contiguous()
    G = group if group < K else 2 ** 30  # WHOLE
    fits = M <= MOST_ROWS and (G % block == 0 or parts > 1)
    format = f"int{bits}" + (f"-{G}" if parts > 1 else "")
    kernel, *sizes = tuned(format, N, K, M, x.device) if fits else ("library",)
    pdl = launch(x.device)
    if kernel == "row" and M == 1:
        out = x.new_empty(M, N // 2 if gated else N)
        warps, depth, stages, programs, slices = sizes
        # Slices shorten what each program does to x: int4 [14336, 21504] took an H200 58.0 us with one, 49.1 with four.
        # A norm wants all of x.
        slices = 1 if norm is not None else slices
        rounds = triton.cdiv(triton.cdiv(K, block), warps * depth * slices)
        slices = triton.cdiv(triton.cdiv(K, block), warps * depth * rounds)  # without those that nothing is left for
        programs = min(len(words), triton.cdiv(programs * gpu(x.device).multi_processor_count, slices))
        totals = x.new_empty(len(words) * slices * 16 if slices > 1 else 0, dtype=torch.float32)
        packed_row_kernel[(programs, slices)](
            x, words, groups, order, norm, bias, residual, out, totals, arrived, N, K, C, eps, G, bits, gated, warps,
            depth, stages, parts, rounds, K == rounds * slices * warps * depth * block, slices, bool(pdl),
            num_warps=warps, **pdl)
        return out
    if norm is not None:
        x = rms_norm(x, norm, eps)  # whose kernel reads norm before the launch before it is done: not norm[order]
    if order is not None:
        x = x[:, order]
    if kernel == "library":
        w = x.new_empty(N, K)
        # Of 1 to 16 blocks and 2 to 8 warps, 4 and 2 are the fastest for 14336 x 21504, int4, on an H200.
        dequantize_kernel[(len(words), triton.cdiv(K, 4 * block))](words, groups, w, N, K, C, G, parts, bits, gated, 4,
                                                                   num_warps=2)
        return plain_linear(x, w, None, bias, residual, gated)
    out = x.new_empty(M, N // 2 if gated else N)
    rows, columns, splits, stages, warps, occupancy, slices, scaled = sizes
    # Beside a wide tile's sums there is no room for those of a group.
    scaled = group < K and (parts > 1 or columns > LEAST_COLUMNS or bool(scaled))
    columns = min(columns, max(8, triton.next_power_of_2(M)))
    tiles = triton.cdiv(M, columns), triton.cdiv(len(words) * 16, rows)
    # Slices fill the GPU where tiles are few: 64 rows of x and int4 weights [8192, 28672] took an H200 190 us with one,
    # 81 with four.
    whole, limit = 0, {}
    if occupancy and slices > 1:
        # As many tiles as fill the GPU stay whole, once or more; the rest, sliced, fill it once more: 512 rows of x and
        # int4 weights [10240, 8192] took an H200 209 us with four slices of every tile, 175 so.
        wave = max(1, occupancy * gpu(x.device).multi_processor_count // tiles[0])  # tiles of w
        whole = tiles[1] // wave * wave
    if occupancy * warps > 8:  # or one program might take the registers of another
        # By eights, as a GPU gives them out: 102 would be 104, and of ten programs one has no place. 4 rows of int4
        # weights [12288, 4096] took an H200 5% less so (each way tuned; 16 products 0.4% on average).
        limit = dict(maxnreg=gpu(x.device).regs_per_multiprocessor // (32 * warps * occupancy) // 8 * 8)
    # Loads without a mask for K: up to 5% faster with 64 rows of x and more, up to 6% slower with 16 (H200).
    full = columns >= 64 and K % (splits * block) == 0
    sums = x.new_empty(tiles[0] * (tiles[1] - whole) * slices * rows * columns if slices > 1 else 0,
                       dtype=torch.float32)
    packed_rows_kernel[(tiles[0], whole + (tiles[1] - whole) * slices)](
        x, words, groups, shifts, bias, residual, out, sums, arrived, M, N, K, C, whole, slices, G, bits,
        *unpacking(bits, x.dtype == torch.float16, scaled), gated, columns, rows, splits, slices > 1, scaled, parts,
        stages, full, bool(pdl), num_warps=warps, **pdl, **limit)
    return out


packed_linear.register_kernel("cpu")(plain_packed_linear)


@packed_linear.register_fake
def _(x, words, groups, order, shifts, arrived, N, bits, group, norm=None, bias=None, residual=None, gated=False,
      eps=1e-5):
    return x.new_empty(len(x), N // 2 if gated else N)


class KernelLinear(nn.Module):
    """A PackedLinear as the kernels want it, in the same memory; gated: its rows are gates, then as many ups."""

    def __init__(self, packed: PackedLinear, gated: bool = False):
        super().__init__()
        self.bits, self.N, self.gated, self.bias, self.order = (packed.bits, packed.out_features, gated, packed.bias,
                                                                packed.order)
        zeros = 2 ** (packed.bits - 1) if packed.zeros is None else packed.zeros.int()
        groups = packed.scales.view(torch.int16).int() & 0xFFFF | zeros << 16  # fp16's bits
        self.group, block = packed.in_features // groups.shape[1], 512 // packed.bits
        parts = block // self.group if groups.shape[1] > 1 and block % self.group == 0 else 1
        groups = F.pad(groups, (0, -groups.shape[1] % parts))
        self.groups = nn.Parameter(tile(groups, parts, gated), requires_grad=False)
        self.words = nn.Parameter(tile(packed.words.data, 16, gated), requires_grad=False)
        self.register_buffer("shifts", shifts(self.bits, self.words.device).flatten(), persistent=False)
        arrived = self.shifts.new_zeros(MOST_ROWS // LEAST_COLUMNS * len(self.words))
        self.register_buffer("arrived", arrived, persistent=False)

    def fused(self, x: Tensor, norm: Tensor | None = None, residual: Tensor | None = None, gated: bool = False,
              eps: float = 1e-5) -> Tensor:
        """x [M, K] -> [M, N or N / 2]"""
        return packed_linear(x, self.words, self.groups, self.order, self.shifts, self.arrived, self.N, self.bits,
                             self.group, norm, self.bias, residual, gated, eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]; gated: [..., N / 2]"""
        return self.fused(x.flatten(0, -2), gated=self.gated).unflatten(0, x.shape[:-1])

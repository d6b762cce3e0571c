"""
The product of one row of x with packed weights, in Gluon: as fast as the weights come from memory.

    out [N] = residual + bias + rms_norm(x) [K] @ w.T      or, gated,      out [N / 2] = silu(gate) * up

A program takes one tile of 16 rows of w after the other, and of each its slice of K, in `rounds` rounds. In a round a
warp multiplies `depth` times 16 rows of a block (see layout.py), 1 KiB, or of a pair of neighbouring blocks, while the
next rounds come to shared memory:

                +------------------- a slice of K -------------------+--
                |       round 0        |       round 1        |      |
    16 rows     |  d = 0   |  d = 1    |  d = 0   |  d = 1    |      |  the next slice: another program
    of w        | warp 0 1 | warp 0 1  | warp 0 1 | warp 0 1  |      |
                +----------------------------------------------------+--

mma.m16n8k16 multiplies a warp's 16 rows by 16 inputs. x is the right operand, whose 8 columns are all the same.

The matrix unit gets code + offset, with an offset of 64 or 1024 (see code_to_half()). The offset and the zero point are
taken away from a group's sum, which costs a few instructions for 16 rows:

    sum of (code - zero) x  =  sum of (code + offset) x  -  sum of offset x  -  zero * sum of x

The last two sums are the same for all rows of w. prepare_x() makes them once. FP8, e4m3, has neither offset nor zero
point: its code's bits in fp16's places are 2^-8 times the number, and its scales are stored 2^8 times as large.

The matrix unit takes fp16, so x is rescaled. After a norm it is divided by 16: |x| is at most sqrt(K) times the norm's
weight, so it fits for weights from 1e-4 to 1e4. Without a norm it is divided by a power of two near the length of the
slice of x, which rounds only numbers below 2^-28 of that length.

Names: S the sizes (GemvSizes); PAIR blocks that a warp multiplies at once, of INPUTS inputs; PARTS groups in a block;
CHAINS sums that the matrix unit makes of them side by side, each of BK inputs; KB blocks of a row; C groups of a row,
counted by PARTS; an item is one round of one tile.

This file, layout.py and common.py are all that another project needs:

    packed = pack(codes, scales, zeros)    # uint8 [N, K], fp16 [N, C], [N, C], on the GPU
    y = gemv(x, packed)                    # x [1, K] -> [1, N]
"""
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fast.common import gate_times_up, gdc_launch_dependents, gdc_wait, gpu, last_arriver, pdl_options, triton
from fast.layout import Packed

RULE = dict(warps=4, depth=2, stages=3, programs=6, slices=1)  # sizes for any product; tuning.py says what they mean


@dataclass(frozen=True)
class GemvSizes:
    """What packed_gemv() is compiled for."""
    bits: int
    e4m3: bool  # codes are numbers of their own: FP8
    per_channel: bool  # one group a row
    group: int  # inputs of a group; 2 ** 30, more than any K, if per_channel
    parts: int  # groups in a block, 1 if they are as large as a block or larger
    scale_rows: int  # of a tile's 16 rows: 16, or 2 where 8 rows share their scales
    pair: int  # neighbouring blocks that a warp multiplies at once: 1 or 2
    warps: int
    depth: int  # times that a warp multiplies in a round
    stages: int  # rounds in shared memory
    rounds: int  # of a slice
    slices: int  # of K
    full: bool  # the last slice's last round is a whole one: loads need no mask


# Two codes at a time become fp16: $0 to $7 are the weights of a word $8.
INT4_TO_HALF = gl.constexpr("""{ .reg .b32 t, a0, a1, a2, a3; shr.u32 t, $8, 8;
    lop3.b32 a0, $8, 0x000f000f, 0x64006400, 0xea; lop3.b32 a1, $8, 0x00f000f0, 0x54005400, 0xea;
    lop3.b32 a2, t, 0x000f000f, 0x64006400, 0xea; lop3.b32 a3, t, 0x00f000f0, 0x54005400, 0xea;
    mov.b32 {$0, $1}, a0; mov.b32 {$2, $3}, a1; mov.b32 {$4, $5}, a2; mov.b32 {$6, $7}, a3; }""")


@gluon.constexpr_function
def byte_asm(S):
    """As INT4_TO_HALF, for 8 bits: $0 to $3 are the weights of a word $4. See code_to_half().

    For e4m3 Hopper has a conversion, two instructions a word, and these five are faster: Llama-2-7B made 90% of int8's
    tokens/s so, and 97% with these (H200, two calls)."""
    halves = "mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
    if S.e4m3:
        return """{ .reg .b32 t, a, b; and.b32 a, $4, 0xbf80bf80; shl.b32 t, $4, 1; and.b32 t, t, 0x80008000;
            shl.b32 b, $4, 7; lop3.b32 b, b, 0x3f803f80, t, 0xea; """ + halves
    return """{ .reg .b32 a, b; prmt.b32 a, $4, 0x64646464, 0x4140; prmt.b32 b, $4, 0x64646464, 0x4342; """ + halves


@gluon.constexpr_function
def warp_inputs(S):
    """How many inputs a warp multiplies at once: those of a block, or of two."""
    return S.pair * (512 // S.bits)


@gluon.constexpr_function
def chains(S):
    """Sums that the matrix unit makes side by side: one for each part, but four for int8, where a layer of Llama-2-7B
    took 63.2 us so and 63.7 with one (int4: 48.1 with four, 47.4 with one; H200, a block at once)."""
    return S.parts if S.bits == 4 else 4


@gluon.constexpr_function
def chunk_size(S):
    """How many numbers of a slice of x prepare_x() handles at a time, 8 to 32 a thread. Of these sizes, the one whose
    whole chunks exceed the slice least, and of two that tie the larger: with 32 a thread, 8 warps handle 16,384 numbers
    for a K of 11,008, and a layer of Llama-2-7B, int4, took 46.9 us; with 16 they handle 12,288, and it took 45.1 us
    (each tuned, H200, two calls)."""
    share = S.rounds * S.depth * S.warps * warp_inputs(S)
    return min((256 * S.warps * n for n in (1, 2, 4)), key=lambda size: (-(-share // size) * size, -size))


@gluon.constexpr_function
def chunk_count(S):
    return -(-S.rounds * S.depth * S.warps * warp_inputs(S) // chunk_size(S))


@gluon.constexpr_function
def turn_count(S):
    """How often a warp could multiply with the part of x in shared memory: in all rounds, and with what the last chunk
    has beyond the slice."""
    return chunk_count(S) * chunk_size(S) // (S.warps * warp_inputs(S))


# A layout says which register, lane and warp hold which element: for each of them, where bit 0, 1, 2 ... of its index
# leads. No step from memory to the sums exchanges values between lanes; assert_trivial=True has the compiler check it.


@gluon.constexpr_function
def bases(n, base):
    """The bases of a layout's dimension with n values: base, 2 base, 4 base ..."""
    return [[2 ** i * b for b in base] for i in range(n.bit_length() - 1)]


@gluon.constexpr_function
def word_layout(S):
    """Of words [WARPS * PAIR, 16 rows, 16]: a lane has 4 neighbours of 2 rows, as layout.py draws it."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + bases(S.pair, [1, 0, 0]),
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        bases(S.warps, [S.pair, 0, 0]), [], [S.warps * S.pair, 16, 16])


@gluon.constexpr_function
def x_layout(S):
    """Of x [CHAINS, WARPS, BK]: the right operand's, whose 8 columns are all the same."""
    BK = warp_inputs(S) // chains(S)
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 8]] + bases(BK // 16, [0, 0, 16]) + bases(chains(S), [1, 0, 0]),
        [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        bases(S.warps, [0, 1, 0]), [], [chains(S), S.warps, BK])


@gluon.constexpr_function
def x_sum_layout(S):
    """Of the sums of x [PARTS, WARPS]."""
    return gl.DistributedLinearLayout(
        bases(S.parts, [1, 0]), [[0, 0]] * 5, bases(S.warps, [0, 1]), [], [S.parts, S.warps])


@gluon.constexpr_function
def group_layout(S):
    """Of groups [WARPS, 16 rows, PARTS], which are neighbours in memory."""
    return gl.DistributedLinearLayout(
        bases(S.parts, [0, 0, 1]) + [[0, 8, 0]], [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        bases(S.warps, [1, 0, 0]), [], [S.warps, 16, S.parts])


@gluon.constexpr_function
def mma_layout(S):
    """Of a product [CHAINS or PARTS * WARPS, 16 rows, 8 columns]."""
    return gl.NVMMADistributedLayout([2, 0], [S.warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def row_layout(S):
    """Of a product's [CHAINS or PARTS * WARPS, 16 rows]."""
    return gl.SliceLayout(2, mma_layout(S))


@gluon.constexpr_function
def column_layout(S, parts):
    """Of every second column of a product [parts * WARPS, 16 rows, 4 columns]."""
    return gl.DistributedLinearLayout(
        [[0, 8, 0]] + bases(parts, [S.warps, 0, 0]), [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        bases(S.warps, [1, 0, 0]), [], [parts * S.warps, 16, 4])


@gluon.jit
def fetch_words(rings, qweight, item, items, start, KB, S: gl.constexpr):
    """Start the copy of an item's words, `depth` blocks or pairs a warp, to shared memory. start: the program's first
    tile, the step to its next one, and the first round of its slice."""
    BLOCKS: gl.constexpr = S.warps * S.pair
    WORDS: gl.constexpr = word_layout(S)
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    at = block * 256 + row * 16 + word
    if item < items:
        DEPTH: gl.constexpr = S.depth
        first_tile, step, first_round = start
        first = (first_round + item % S.rounds) * (BLOCKS * DEPTH)
        tile = first_tile + item // S.rounds * step
        qweight += (tile.to(gl.int64) * KB + first) * 256
        for d in gl.static_range(DEPTH):
            mask = None if S.full else (first + d * BLOCKS + block < KB) & (at >= 0)
            async_copy.async_copy_global_to_shared(rings[d].index(item % S.stages), qweight + d * BLOCKS * 256 + at,
                                                   mask=mask, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon.jit
def load_groups(scales_and_zeros, tile, nth, C, S: gl.constexpr):
    """The scales and zero points of a tile's nth round along K: `depth` times [PARTS * WARPS, 16 rows], or once
    [1, 16 rows] if there is one group a row.

    They come a round ahead, to registers. Through shared memory, as far ahead as the words, Llama-2-7B in FP8 with
    128 x 128 blocks is 1% slower, int4 as fast (H200)."""
    WARPS: gl.constexpr = S.warps
    PARTS: gl.constexpr = S.parts
    ROWS: gl.constexpr = row_layout(S)
    if S.per_channel:
        row = gl.arange(0, 16, layout=gl.SliceLayout(0, ROWS))[None, :]
        part = gl.arange(0, 1, layout=gl.SliceLayout(1, ROWS))[:, None]
        return (gl.load(scales_and_zeros + tile * 16 + part + row),)
    else:
        GROUPS: gl.constexpr = group_layout(S)
        DEPTH: gl.constexpr = S.depth
        warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, GROUPS)))[:, None, None].to(gl.int64)
        row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))[None, :, None]
        part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, GROUPS)))[None, None, :]
        scales_and_zeros += tile * C * S.scale_rows * PARTS
        groups = ()
        for d in gl.static_range(DEPTH):
            chunk = ((nth * DEPTH + d) * WARPS + warp) * warp_inputs(S) // (S.group * PARTS)
            scale_row = chunk * S.scale_rows + row // (16 // S.scale_rows)
            at = scales_and_zeros + scale_row * PARTS + part
            group = gl.load(at) if S.full else gl.load(at, mask=(chunk < C) & (row + part >= 0), other=0)
            group = gl.reshape(gl.permute(group, [2, 0, 1]), [PARTS * WARPS, 16])
            groups = groups + (gl.convert_layout(group, ROWS, assert_trivial=True),)
        return groups


@gluon.jit
def load_inputs(x, perm, k, stop):
    """x[perm[k]], 0 from stop on."""
    source = k
    if perm is not None:
        source = gl.load(perm + k, mask=k < stop, other=0)
    return gl.load(x + source, mask=k < stop, other=0)


@gluon.jit
def scale_of_x(squares, norm, K, eps):
    """-> what x is to be multiplied by so that it fits fp16, and what the product is to be multiplied by then."""
    if norm is not None:
        factor = 16.0
        unit = gl.rsqrt(squares / K + eps) / factor
        return unit, factor
    else:  # no |x| is larger than length; power, its exponent alone, is more than half of it
        length = gl.sqrt(gl.maximum(squares, 1e-30))
        power = (length.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        factor = power / 16384
        return 16384 / power, factor


@gluon.jit
def prepare_x(x, norm, perm, first_round, K, eps, S: gl.constexpr, PDL: gl.constexpr):
    """Norm, permute and rescale the slice of x. Waits for the kernel before, once norm is loaded.

    -> in shared memory, x in fp16 [TURNS, WARPS, CHAINS, BK] and the sums of the parts [2 TURNS, WARPS, PARTS], first
    minus the sums of x, then minus the sums of offset * x; and the factor of scale_of_x()."""
    WARPS: gl.constexpr = S.warps
    PARTS: gl.constexpr = S.parts
    INPUTS: gl.constexpr = warp_inputs(S)
    PART: gl.constexpr = INPUTS // PARTS
    ROUND: gl.constexpr = S.depth * WARPS * INPUTS  # inputs
    CHUNK: gl.constexpr = chunk_size(S)
    CHUNKS: gl.constexpr = chunk_count(S)
    TURNS: gl.constexpr = turn_count(S)
    CHAINS: gl.constexpr = chains(S)
    FLAT: gl.constexpr = gl.BlockedLayout([CHUNK // (32 * WARPS)], [32], [WARPS], [0])
    xs = gl.allocate_shared_memory(gl.float16, [TURNS, WARPS, CHAINS, INPUTS // CHAINS],
                                   gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    sums = gl.allocate_shared_memory(gl.float32, [2 * TURNS, WARPS, PARTS],
                                     gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k = first_round * ROUND + gl.arange(0, CHUNK, layout=FLAT)
    stop = gl.minimum(K, (first_round + S.rounds) * ROUND)
    weights, chunks = (), ()
    if norm is not None:
        for c in gl.static_range(CHUNKS):
            weights = weights + (load_inputs(norm, perm, c * CHUNK + k, stop),)
    if PDL:
        gdc_wait()
    squares = gl.zeros([CHUNK], gl.float32, FLAT)
    for c in gl.static_range(CHUNKS):
        chunks = chunks + (load_inputs(x, perm, c * CHUNK + k, stop),)
        squares += chunks[c].to(gl.float32) * chunks[c].to(gl.float32)
    unit, factor = scale_of_x(gl.sum(squares, 0), norm, K, eps)
    flat = xs._reinterpret(gl.float16, [CHUNKS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    flat_sums = sums._reinterpret(gl.float32, [2 * CHUNKS, CHUNK // PART], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for c in gl.static_range(CHUNKS):
        scaled = chunks[c].to(gl.float32)
        if norm is not None:
            scaled *= weights[c].to(gl.float32)
        scaled *= unit
        flat.index(c).store(scaled.to(gl.float16))
        if norm is not None:  # the sums are of what the matrix unit gets; without a norm that is x itself, not rounded
            scaled = scaled.to(gl.float16).to(gl.float32)
        eights = gl.sum(gl.reshape(scaled, [CHUNK // 8, 8]), 1)
        flat_sums.index(c).store(-gl.sum(gl.reshape(eights, [CHUNK // PART, PART // 8]), 1))
        odd = gl.arange(0, CHUNK // 8, layout=eights.type.layout) % 2 == 1
        eights *= gl.where(odd & (S.bits == 4), 64.0, 1024.0)  # int4's offset depends on bit 3 of k
        flat_sums.index(CHUNKS + c).store(-gl.sum(gl.reshape(eights, [CHUNK // PART, PART // 8]), 1))
    return xs, sums, factor


@gluon.jit
def load_sums(sums, at, S: gl.constexpr):
    """The sums of prepare_x() for the warps' inputs, [PARTS * WARPS, 1]."""
    WARPS: gl.constexpr = S.warps
    PARTS: gl.constexpr = S.parts
    found = gl.reshape(sums.index(at).permute([1, 0]).load(x_sum_layout(S)), [PARTS * WARPS])
    return gl.expand_dims(gl.convert_layout(found, gl.SliceLayout(1, row_layout(S)), assert_trivial=True), 1)


@gluon.jit
def code_to_half(words, S: gl.constexpr):
    """words [WARPS * PAIR, 16 rows, 16] -> code + offset as the left operand [CHAINS * WARPS, 16 rows, BK], in fp16.

    int4: AND 0x000f000f leaves a pair of codes, and OR 0x64006400 puts them into the mantissa of 1024, where fp16
    counts by ones: 1024 + code. AND 0x00f000f0 leaves the pair 4 bits higher, and OR 0x54005400 puts it into the
    mantissa of 64, where these bits count by ones: 64 + code. The word shifted down by 8 bits gives the other two
    pairs. int8: prmt joins each byte with the byte 0x64: 1024 + code. This replaces the conversion from integers, which
    runs at a quarter of the rate. From "Who Says Elephants Can't Run" (arXiv 2211.10017); Marlin (arXiv 2408.11743)
    does so, too. e4m3: layout.py has half of the codes where fp16 has its bits, and the others are shifted there; fp16
    reads 2^-8 times the number."""
    WARPS: gl.constexpr = S.warps
    CHAINS: gl.constexpr = chains(S)
    BK: gl.constexpr = warp_inputs(S) // CHAINS
    PAIR: gl.constexpr = S.pair
    words = gl.reshape(words, [WARPS, PAIR, 16, 4, CHAINS // PAIR, 4 * PAIR // CHAINS])
    if S.bits == 4:
        p = gl.inline_asm_elementwise(INT4_TO_HALF, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=(gl.float16,) * 8,
                                      is_pure=True, pack=1)
        w = gl.join(gl.join(gl.join(p[0], p[4]), gl.join(p[2], p[6])),
                    gl.join(gl.join(p[1], p[5]), gl.join(p[3], p[7])))
    else:
        ASM: gl.constexpr = byte_asm(S)
        p = gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=1)
        w = gl.join(gl.join(p[0], p[2]), gl.join(p[1], p[3]))
    w = gl.reshape(w, [WARPS, PAIR, 16, 4, CHAINS // PAIR, 4 * PAIR // CHAINS, 16 // S.bits, 2])
    w = gl.reshape(gl.permute(w, [1, 4, 0, 2, 5, 6, 3, 7]), [CHAINS * WARPS, 16, BK])
    return gl.convert_layout(w, gl.DotOperandLayout(0, mma_layout(S), 2), assert_trivial=True)


@gluon.jit
def load_x(xs, at, S: gl.constexpr):
    """The right operand [CHAINS * WARPS, BK, 8]: the warps' inputs, in each of the 8 columns."""
    WARPS: gl.constexpr = S.warps
    CHAINS: gl.constexpr = chains(S)
    BK: gl.constexpr = warp_inputs(S) // CHAINS
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, mma_layout(S), 2)
    x = xs.index(at).permute([1, 0, 2]).load(x_layout(S))
    x = gl.reshape(x, [CHAINS * WARPS, BK])
    x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(2, RIGHT), assert_trivial=True), 2)
    return gl.convert_layout(x.broadcast_to([CHAINS * WARPS, BK, 8]), RIGHT, assert_trivial=True)


@gluon.jit
def sums_of_parts(w, x, S: gl.constexpr):
    """The parts' sums [PARTS * WARPS, 16 rows, 4]. Of the 8 columns, all equal, a lane holds 2 and keeps one."""
    WARPS: gl.constexpr = S.warps
    PARTS: gl.constexpr = S.parts
    CHAINS: gl.constexpr = chains(S)
    none = gl.zeros([CHAINS * WARPS, 16, 8], gl.float32, mma_layout(S))
    y, _ = gl.split(gl.reshape(mma_v2(w, x, none), [PARTS, CHAINS // PARTS, WARPS, 16, 4, 2]))
    y = gl.reshape(gl.sum(y, 1), [PARTS * WARPS, 16, 4])
    return gl.convert_layout(y, column_layout(S, PARTS), assert_trivial=True)


@gluon.jit
def scale_sums(y, group, sums, at, S: gl.constexpr):
    """(y - sum of offset x - zero * sum of x) * scale, or y * scale of e4m3, summed over the parts: [WARPS, 16, 4]."""
    WARPS: gl.constexpr = S.warps
    PARTS: gl.constexpr = S.parts
    TURNS: gl.constexpr = turn_count(S)
    COLUMNS: gl.constexpr = column_layout(S, PARTS)
    if group.dtype == gl.float32:
        zero = gl.full(group.shape, 2 ** (S.bits - 1), gl.float32, group.type.layout)
        scale = group
    else:
        zero = gl.inline_asm_elementwise("prmt.b32 $0, $1, 0x4B000000, 0x7632;", "=r,r", [group], dtype=gl.int32,
                                         is_pure=True, pack=1)  # 2^23 and the zero point
        zero = zero.to(gl.float32, bitcast=True) - 8388608
        scale = (group & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    if not S.e4m3:
        offset = load_sums(sums, TURNS + at, S)
        offset += load_sums(sums, at, S) * zero
        y += gl.expand_dims(gl.convert_layout(offset, gl.SliceLayout(2, COLUMNS), assert_trivial=True), 2)
    y *= gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(2, COLUMNS), assert_trivial=True), 2)
    return gl.convert_layout(gl.sum(gl.reshape(y, [PARTS, WARPS, 16, 4]), 0), column_layout(S, 1),
                             assert_trivial=True)


@gluon.jit
def load_addends(bias, residual, n, N, last):
    """bias + residual of 16 rows, 0 where neither is given. Memory is read in a tile's last round alone."""
    ROWS: gl.constexpr = n.type.layout
    extra = gl.zeros([16], gl.float32, ROWS)
    if bias is not None:
        extra += gl.load(bias + n, mask=(n < N) & last, other=0).to(gl.float32)
    if residual is not None:
        extra += gl.load(residual + n, mask=(n < N) & last, other=0).to(gl.float32)
    return extra


@gluon.jit
def sum_row_slices(total, partial_sums, semaphore, SLICES: gl.constexpr):
    """-> the sums of all slices of K and True, in the last program to come; zeros and False in the others."""
    ROWS: gl.constexpr = total.type.layout
    i = gl.arange(0, 16, layout=ROWS)
    gl.store(partial_sums + gl.program_id(1) * 16 + i, total)
    last = last_arriver(semaphore, SLICES)
    total = gl.zeros([16], gl.float32, ROWS)
    if last:  # always in the same order, so that the same input gives the same bits
        for slice in gl.static_range(SLICES):
            total += gl.load(partial_sums + slice * 16 + i)
    return total, last


@gluon.jit
def store_rows(out, total, extra, tile, n, N_OUT, GATED: gl.constexpr):
    """Store a tile's 16 outputs, or the 8 that 8 gates and 8 ups give."""
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(total, [2, 8]), [1, 0]))
        product = gate_times_up(gate, up, GATED)
        gates = tile * 8 + gl.arange(0, 8, layout=product.type.layout)
        gl.store(out + gates, product.to(out.dtype.element_ty), mask=gates < N_OUT)
    else:
        gl.store(out + n, (total + extra).to(out.dtype.element_ty), mask=n < N_OUT)


@gluon.jit
def packed_gemv(x, qweight, scales_and_zeros, perm, norm, bias, residual, out, partial_sums, semaphores, N, K, C, eps,
                S: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr):
    """Program (first tile, slice of K); with a norm there is one slice. partial_sums fp32 [tiles, slices, 16].

    With PDL it starts while the kernel before it ends: it loads weights, scales and norm before it waits for x."""
    WARPS: gl.constexpr = S.warps
    ROWS: gl.constexpr = gl.SliceLayout(0, row_layout(S))
    SUMS: gl.constexpr = column_layout(S, 1)
    DEPTH: gl.constexpr = S.depth
    STAGES: gl.constexpr = S.stages
    KB = (K + 512 // S.bits - 1) // (512 // S.bits)
    N_OUT = N // 2 if GATED else N
    tiles = (N_OUT + 7) // 8 if GATED else (N + 15) // 16
    first_tile = gl.program_id(0)
    step = gl.num_programs(0)
    items = (tiles - first_tile + step - 1) // step * S.rounds
    first_round = gl.program_id(1) * S.rounds
    start = first_tile, step, first_round
    if PDL:
        gdc_launch_dependents()

    rings = ()  # one for each d: the compiler makes each copy to the same one wait for the copy before
    for d in gl.static_range(DEPTH):
        rings = rings + (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS * S.pair, 16, 16],
                                                   gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])),)
    for item in gl.static_range(STAGES - 1):
        fetch_words(rings, qweight, item, items, start, KB, S)
    next_groups = load_groups(scales_and_zeros, first_tile, first_round, C, S)
    xs, sums, factor = prepare_x(x, norm, perm, first_round, K, eps, S, PDL)
    factor /= 4  # four columns are equal

    acc = gl.zeros([WARPS, 16, 4], gl.float32, SUMS)
    i = gl.arange(0, 16, layout=ROWS)
    for item in range(items):
        tile = first_tile + item // S.rounds * step
        turn = item % S.rounds
        async_copy.wait_group(STAGES - 2)
        fetch_words(rings, qweight, item + STAGES - 1, items, start, KB, S)
        groups = next_groups
        next_tile = gl.minimum(first_tile + (item + 1) // S.rounds * step, tiles - 1)
        next_groups = load_groups(scales_and_zeros, next_tile, first_round + (item + 1) % S.rounds, C, S)
        last_round = turn == S.rounds - 1
        n = tile * 16 + i
        extra = load_addends(None if GATED else bias, None if GATED else residual, n, N, last_round)

        for d in gl.static_range(DEPTH):
            w = code_to_half(rings[d].index(item % STAGES).load(word_layout(S)), S)
            at = turn * DEPTH + d
            y = sums_of_parts(w, load_x(xs, at, S), S)
            acc += scale_sums(y, groups[0 if S.per_channel else d], sums, at, S)
        if last_round:
            total = gl.convert_layout(gl.sum(gl.sum(acc, 2), 0) * factor, ROWS, assert_trivial=True)
            acc = gl.zeros([WARPS, 16, 4], gl.float32, SUMS)
            complete = last_round  # True here; not the constant, as the variable must keep its type
            if S.slices > 1:
                sums_at = partial_sums + tile * (S.slices * 16)
                total, complete = sum_row_slices(total, sums_at, semaphores + tile, S.slices)
            if complete:
                store_rows(out, total, extra, tile, n, N_OUT, GATED)


def gemv(x: Tensor, packed: Packed, norm: Tensor | None = None, bias: Tensor | None = None,
         residual: Tensor | None = None, eps: float = 1e-5, choice: dict = RULE) -> Tensor:
    """residual + rms_norm(x, norm) @ w.T + bias in one launch, what is None left out. All of one 16-bit type.

    x [1, inputs], norm [inputs], bias [N], residual [1, N] -> [1, N]. packed.gated: silu(gate) * up [1, N / 2], without
    bias and residual. choice: the sizes named in tuning.py. Wants compute capability 8.0."""
    if not packed.fits_kernels:
        raise ValueError(f"groups of {packed.group_size} codes: want a multiple of {packed.block}, or a part of it")
    row_blocks, blocks = len(packed.qweight), triton.cdiv(packed.K, packed.block)
    warps, depth = choice["warps"], choice["depth"]
    # With slices each program prepares less of x: int4 [14336, 21504] took an H200 58.0 us with one, 49.1 with four.
    # A norm needs all of x, and so there is one slice.
    slices = 1 if norm is not None else choice["slices"]
    rounds = triton.cdiv(blocks, warps * depth * slices)
    slices = triton.cdiv(blocks, warps * depth * rounds)  # drops slices that would be empty
    programs = min(row_blocks, triton.cdiv(choice["programs"] * gpu(x.device).multi_processor_count, slices))
    constants = packed.constants
    if constants.pop("e2m1"):
        raise ValueError("mxfp4: want packed_gemm.py")
    # Two neighbouring blocks that share a group are multiplied at once, and their sum is scaled: in FP8 with 128 x 128
    # blocks Llama-2-7B made 471.7 tokens/s instead of 457.4, with a scale a row 508.8 instead of 496.3, and in int8
    # 509.5 instead of 512.0 (H200, one call).
    pair = 2 if packed.bits == 8 and depth % 2 == 0 and constants["group"] % (2 * packed.block) == 0 else 1
    sizes = GemvSizes(**constants, pair=pair, warps=warps, depth=depth // pair, stages=choice["stages"], rounds=rounds,
                      slices=slices, full=packed.K == rounds * slices * warps * depth * packed.block)
    out = packed.new_output(x)
    partial_sums = x.new_empty(row_blocks * slices * 16 if slices > 1 else 0, dtype=torch.float32)
    pdl = pdl_options(x.device)
    packed_gemv[(programs, slices)](
        x, packed.qweight, packed.scales_and_zeros, packed.perm, norm, bias, residual, out, partial_sums,
        packed.semaphores, packed.N, packed.K, packed.chunks, eps, sizes, packed.gated, bool(pdl),
        num_warps=warps, **pdl)
    return out

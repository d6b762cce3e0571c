"""
The product of several rows of x with packed weights, in Triton: codes become 16-bit weights in
registers. Up to 512 rows, from 9 on where packed_few.py has the others.

    out [M, N] = residual + bias + x [M, K] @ w.T
    gated:     out [M, N / 2] = silu(gate) * up, the halves of that product

w is the left operand of the matrix unit, so out is made transposed: a tile is BN rows of w by BM
rows of x.

                         K
          +------------+------------+-----
    BN    |  slice 0   |  slice 1   |  ..
    rows  | step step  |            |
    of w  +------------+------------+-----

A program takes a slice of K, in steps of SPLITS blocks (see layout.py). With SPLITS > 1 each block
of a step belongs to other warps and has a sum of its own; they are added up at the end. That suits
few rows of x, which need many loads in flight and no large tile.

As in stream-K (Osama et al. 2023, arXiv 2301.03598): the first `whole` tiles of w are
data-parallel, one program each. The remainder is split along K into `slices` and reduced through
memory: the last program to come adds the slices up.

Names: S the sizes (GemmSizes); BLOCK codes of a row in a block; P = 16 / bits; PARTS groups in a
block; KB blocks of a row; C groups of a row, counted by PARTS; nb the row block of w that a row
belongs to.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.jit import constexpr_function

from fast.common import (
    arrive,
    constexpr,
    gate_times_up,
    gdc_launch_dependents,
    gdc_wait,
    gpu,
    jit,
    pdl_options,
    tl,
    triton,
)
from fast.layout import MIN_BLOCK_M, Packed


@dataclass(frozen=True)
class GemmSizes:
    """What packed_gemm() is compiled for."""

    bits: int
    e4m3: bool  # codes are numbers of their own: FP8
    e2m1: bool  # MXFP4
    per_channel: bool  # one group a row
    group: int  # inputs of a group; 2 ** 30, more than any K, if per_channel
    parts: int  # groups in a block, 1 if they are as large as a block or larger
    scale_rows: int  # of 16 rows of w: 16, or 2 where 8 rows share their scales
    block_n: int  # rows of w in a tile
    block_m: int  # rows of x in a tile
    splits: int  # blocks in a step
    stages: int  # steps whose loads are under way
    sliced: bool  # some tiles are split along K
    scaled: bool  # weights are multiplied by their scales, else sums are; see multiply_step()
    full: bool  # K ends with a step: loads need no mask


@constexpr_function
def weights_asm(bits, half, scaled, wide, e4m3, e2m1):
    """PTX that makes a pair of weights, fp16 (half) or bf16: $0 the pair, $1 a word of codes, $3
    the bit at which the codes start, $5 a pair of -(offset + zero point), $7 a pair of scales.

    -> the PTX, the bits of -offset, to which a zero point is added, and the factor that makes a
    pair of the sum.

    wide: the zero point is 2 ** (bits - 1), a constant of the PTX. e4m3: the weights are 2^-8 times
    the numbers. e2m1: they are the numbers, as its bits in the type's places are 2^-14 times these
    in fp16, 2^-126 times in bf16."""
    one, magic, kind = ("3c00", "6400", "f16x2") if half else ("3f80", "4300", "bf16x2")
    get = "shr.u32 t, $1, $3; "
    if e4m3:
        # The seven bits start at 7 and the sign is in its place, or they start at 0 and the sign is
        # one place too low. bf16 has the seven three places lower. Its exponent's offset makes that
        # 2^-120 times the number.
        get = """sub.u32 a, 7, $3; shr.u32 t, a, 2; shl.b32 a, $1, a; shl.b32 t, $1, t;
            and.b32 t, t, 0x80008000; """
        if half:
            get += "lop3.b32 t, a, 0x3f803f80, t, 0xea;"
        else:
            # The FMA multiplies by 2^112.
            get += """shr.u32 a, a, 3; lop3.b32 t, a, 0x07f007f0, t, 0xea;
                mov.b32 a, 0x77807780; mov.b32 b, 0x80008000; fma.rn.bf16x2 t, t, a, b;"""
    elif e2m1:
        shift, mask, power = (9, "0e000e00", "7400") if half else (6, "01c001c0", "7e80")
        get += f"""shl.b32 a, t, 12; and.b32 a, a, 0x80008000; shl.b32 t, t, {shift};
            lop3.b32 t, t, 0x{mask}, a, 0xea; mov.b32 a, 0x{power}{power}; mov.b32 b, 0x80008000;
            fma.rn.{kind} t, t, a, b;"""
    elif bits == 4:
        get += f"lop3.b32 t, t, 0x000f000f, 0x{magic}{magic}, 0xea; fma.rn.{kind} t, t, one, $5;"
    elif half:
        get += "prmt.b32 t, t, 0x64646464, 0x4140; fma.rn.f16x2 t, t, one, $5;"
    else:  # bf16 holds 8 bits, too few for 128 + code: through fp32
        get += """prmt.b32 a, t, 0x4b000000, 0x7440; prmt.b32 b, t, 0x4b000000, 0x7441;
            mov.b32 f, a; mov.b32 g, b; mov.b32 z, $5; add.rn.f32 f, f, z; add.rn.f32 g, g, z;
            mov.b32 a, f; mov.b32 b, g; prmt.b32 t, a, b, 0x7632;"""
    result = f"mov.b32 a, 0x80008000; fma.rn.{kind} $0, t, $7, a;" if scaled else "mov.b32 $0, t;"
    registers = f".reg .b32 t, a, b, one; .reg .f32 f, g, z; mov.b32 one, 0x{one}{one};"
    asm = f"{{ {registers} {get} {result} }}"
    if bits == 8 and not half:
        offset, pair = -0x35000000, 1  # the bits of -2^23
    else:
        offset, pair = 0xE400 if half else 0xC300, 0x10001  # the bits of -1024, or of -128
    if wide:
        constant = (2 ** (bits - 1) + offset) * pair & 0xFFFFFFFF
        asm = asm.replace("{ ", f"{{ .reg .b32 c; mov.b32 c, 0x{constant:08x}; ", 1).replace(
            "$5", "c"
        )
    return asm, offset, pair


@jit
def scale_of(group):
    """The fp16 scale in the low half of a word of scales_and_zeros, or the scale that is all of it:
    fp32, or MXFP4's e8m0."""
    if group.dtype == tl.float32:
        scale = group
    elif group.dtype == tl.uint8:
        # 1 << 22: 2^-127 is not normal.
        scale = tl.maximum(group.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        scale = (group & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return scale


@jit
def codes_to_weights(q, shift, group, xs, S: constexpr):
    """A step's words q [SPLITS, BN, 16] and groups [SPLITS, BN, PARTS] -> weights [SPLITS, BN,
    BLOCK] of xs's type: code - zero point, e4m3: 2^-8 times the code's number; with S.scaled, times
    the scale.

    A code OR-ed into the mantissa of 1024 in fp16, of 128 in bf16 or of 2^23 in fp32 makes that
    offset + code, as these types count by ones there. An FMA takes the offset and the zero point
    away, without rounding. This replaces the conversion from integers, which runs at a quarter of
    the rate. From "Who Says Elephants Can't Run" (arXiv 2211.10017); Marlin (arXiv 2408.11743) does
    so, too.

    shift [P] is loaded from memory, though it is constant: the compiler brings the words into the
    matrix unit's layout before they are dequantized only if every input of the dequantization was
    loaded. After it, they are larger."""
    P: constexpr = 16 // S.bits
    ASM: constexpr = weights_asm(
        S.bits, xs.dtype == tl.float16, S.scaled, group.dtype == tl.float32, S.e4m3, S.e2m1
    )
    SPLITS: constexpr = S.splits
    BN: constexpr = S.block_n
    PARTS: constexpr = S.parts
    shape: constexpr = (SPLITS, BN, 16, P, 2)
    wide: constexpr = (SPLITS, BN, 4, PARTS, 4 // PARTS)
    pair = (scale_of(group).to(xs.dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
    if group.dtype == tl.uint8:
        zero = group.to(tl.int32)  # not read
    elif group.dtype == tl.float32:
        zero = group.to(tl.int32, bitcast=True)  # not read
    else:
        zero = ((group >> 16) + ASM[1]) * ASM[2]
    # a part's scale and zero point for each of its words
    pair = tl.broadcast_to(tl.reshape(pair, (SPLITS, BN, 1, PARTS, 1)), wide)
    zero = tl.broadcast_to(tl.reshape(zero, (SPLITS, BN, 1, PARTS, 1)), wide)
    pair = tl.broadcast_to(tl.reshape(pair, (SPLITS, BN, 16, 1, 1)), shape)
    zero = tl.broadcast_to(tl.reshape(zero, (SPLITS, BN, 16, 1, 1)), shape)
    words = tl.broadcast_to(tl.reshape(q, (SPLITS, BN, 16, 1, 1)), shape)
    shift = tl.broadcast_to(tl.reshape(shift, (1, 1, 1, P, 1)), shape)
    w = tl.inline_asm_elementwise(
        ASM[0],
        "=r,r,r,r,r,r,r,r,r",
        [words, shift, zero, pair],
        dtype=xs.dtype,
        is_pure=True,
        pack=2,
    )
    # t c s e -> c s t e
    w = tl.permute(tl.reshape(w, (SPLITS, BN, 4, 4, P, 2)), (0, 1, 3, 4, 2, 5))
    return tl.reshape(w, (SPLITS, BN, 32 * P))


@jit
def multiply_step(acc, w, xs, group, S: constexpr):
    """acc + w @ xs, the product scaled by its groups unless w is scaled. With one group a row, the
    kernel scales acc.

    Scaled weights are rounded to x's type, as dequantized weights are. A sum is scaled in fp32, but
    a block must not hold several groups then."""
    if S.splits == 1:
        w = tl.reshape(w, (w.shape[1], w.shape[2]))
    if S.scaled or S.per_channel:
        acc = tl.dot(w, xs, acc)
        if S.splits == 1:
            # Uses acc, so that the step waits for the product: Triton 3.6 else has it go on while
            # the next step dequantizes weights into the registers that the product reads.
            acc = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=f,f", [acc], tl.float32, is_pure=True, pack=1
            )
    else:
        scale = scale_of(group)
        if S.splits == 1:
            scale = tl.reshape(scale, (scale.shape[1], scale.shape[2]))
        acc += tl.dot(w, xs) * scale.to(tl.float32)
    return acc


@jit
def multiply_rows(x, m, M, qweight, scales_and_zeros, shift, nb, K, C, first, stop, S: constexpr):
    """Rows m [BM] of x [M, K] times rows of w, which are in row blocks nb [BN], along K from first
    to stop -> fp32 [BN, BM]."""
    BLOCK: constexpr = 512 // S.bits
    SPLITS: constexpr = S.splits
    BN: constexpr = S.block_n
    BM: constexpr = S.block_m
    KB = (K + BLOCK - 1) // BLOCK
    r = tl.arange(0, BN)
    s = tl.arange(0, SPLITS)
    i = tl.arange(0, 16)
    at_w = qweight + (nb.to(tl.int64) * KB * 256 + r % 16 * 16)[None, :, None]
    at_w += (s[:, None] * 256 + i[None, :])[:, None, :]
    # With one block a step, the tile of x has two dimensions: the matrix unit then reads it from
    # shared memory.
    ms, ks = m[None, :], tl.arange(0, BLOCK)[:, None]
    if SPLITS > 1:
        ms, ks = ms[None], s[:, None, None] * BLOCK + ks[None]
    at_x = x + ms * K + ks
    scale_row = nb * C * S.scale_rows + r % 16 // (16 // S.scale_rows)
    at_s = (scale_row * S.parts)[None, :, None]
    BYTES: constexpr = scales_and_zeros.dtype.element_ty == tl.uint8
    if not BYTES:
        at_s += tl.arange(0, S.parts)[None, None, :]
    if SPLITS == 1:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((SPLITS, BN, BM), tl.float32)
    for k0 in tl.range(first, stop, SPLITS * BLOCK, num_stages=S.stages):
        q = tl.load(
            at_w + k0 // BLOCK * 256,
            mask=S.full | (k0 // BLOCK + s < KB)[:, None, None],
            other=0,
            eviction_policy="evict_first",
        )
        xs = tl.load(at_x + k0, mask=(ms < M) & (S.full | (k0 + ks < K)), other=0)
        chunk = tl.minimum((k0 + s * BLOCK) // (S.group * S.parts), C - 1)
        at_group = at_s + (chunk * S.scale_rows * S.parts)[:, None, None]
        if BYTES:
            # Four at once: with loads of bytes, products of 16 rows were wrong (Triton 3.6, sm_90).
            # `shift` is no constant here either: see codes_to_weights().
            words = tl.load(
                scales_and_zeros.to(tl.pointer_type(tl.int32), bitcast=True) + at_group // 4
            )
            group = (words >> 2 * tl.reshape(shift, (1, 1, 4))).to(tl.uint8)
        else:
            group = tl.load(scales_and_zeros + at_group)
        w = codes_to_weights(q, shift, group, xs, S)
        acc = multiply_step(acc, w, xs, group, S)
    if SPLITS > 1:
        acc = tl.sum(acc, 0)
    if S.per_channel:
        acc *= scale_of(tl.load(scales_and_zeros + nb * 16 + r % 16)).to(tl.float32)[:, None]
    return acc


@jit
def find_slice(whole, slices, S: constexpr):
    """-> this program's tile of w, its slice of K, and how many slices the tile has.

    Program ids count the whole tiles first, then the first slices of all other tiles, then their
    second slices ..."""
    tile, slice = tl.program_id(1), 0
    if S.sliced:
        # 1: no division by 0 if all tiles are whole.
        sliced = tl.maximum((tl.num_programs(1) - whole) // slices, 1)
        slice = tl.maximum(tile - whole, 0) // sliced
        tile -= slice * sliced
        slices = tl.where(tile < whole, 1, slices)
    return tile, slice, slices


@jit
def store_slice(acc, at, semaphores, nth, slice, slices):
    """Store acc beside the tile's other slices -> how many of these are still missing, 0 for the
    last program to come. at: where the tile's first slice stands [BN, BM]; nth: the tile, counted
    without the whole ones."""
    missing = slices - 1
    if slices > 1:
        tl.store(at + slice * (acc.shape[0] * acc.shape[1]), acc)
        missing -= arrive(semaphores + nth)
    return missing


@jit
def sum_tile_slices(acc, at, semaphores, nth, slices):
    """The sum of all slices, always in the same order, so that the same input gives the same
    bits."""
    # Not last_arriver(): with it ptxas gave the loop over K 166 registers instead of 150 (int4, 64
    # rows, sm_90).
    if slices > 1:
        tl.store(semaphores + nth, 0)  # for the next launch
        acc = tl.zeros((acc.shape[0], acc.shape[1]), tl.float32)
        for slice in range(slices):
            acc += tl.load(at + slice * (acc.shape[0] * acc.shape[1]))
    return acc


@jit
def epilogue(acc, bias, residual, out, tile, m, M, N_OUT, GATED: constexpr, S: constexpr):
    """Store a tile [BN, BM] of out.T, with gate, bias and residual."""
    BN: constexpr = S.block_n
    BM: constexpr = S.block_m
    n = tile * BN + tl.arange(0, BN)
    if GATED:  # 8 rows of the gate, then 8 of up, in each row block
        acc = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(acc, (BN // 2, BM, 2)))
        acc = gate_times_up(gate, up, GATED)
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
    at = m[None, :] * N_OUT + n[:, None]
    inside = (n < N_OUT)[:, None] & (m < M)[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N_OUT, other=0).to(tl.float32)[:, None]
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


# Not specialized on numbers of rows and slices: else the tuner would time one code, and another
# would run.
@jit(do_not_specialize=["M", "whole", "slices"])
def packed_gemm(
    x,
    qweight,
    scales_and_zeros,
    shifts,
    bias,
    residual,
    out,
    partial_sums,
    semaphores,
    M,
    N,
    K,
    C,
    whole,
    slices,
    S: constexpr,
    GATED: constexpr,
    PDL: constexpr,
):
    """Program (tile of x, tile of w or slice of one). shifts [P]: the bits of a word at which the
    first codes of pairs start. partial_sums fp32 [split tiles, slices, BN, BM]. With PDL it starts
    while the kernel before it ends, and waits for that before it reads."""
    BN: constexpr = S.block_n
    BM: constexpr = S.block_m
    N_OUT = N // 2 if GATED else N
    row_blocks = (N_OUT + 7) // 8 if GATED else (N + 15) // 16
    tile, slice, slices = find_slice(whole, slices, S)
    r = tl.arange(0, BN)
    c = tl.arange(0, BM)
    m = tl.program_id(0) * BM + c
    nb = tl.minimum(tile * (BN // 16) + r // 16, row_blocks - 1)
    if PDL:
        gdc_launch_dependents()
    shift = tl.load(shifts + tl.arange(0, 16 // S.bits))
    if PDL:
        gdc_wait()
    STEP: constexpr = S.splits * (512 // S.bits)
    share = tl.cdiv(tl.cdiv(K, STEP), slices) * STEP
    first = slice * share
    acc = multiply_rows(
        x, m, M, qweight, scales_and_zeros, shift, nb, K, C, first, tl.minimum(first + share, K), S
    )

    if S.sliced:
        nth = (tile - whole) * tl.num_programs(0) + tl.program_id(0)
        at = partial_sums + (nth * slices * BN + r[:, None]) * BM + c[None, :]
        if store_slice(acc, at, semaphores, nth, slice, slices) > 0:
            return
        acc = sum_tile_slices(acc, at, semaphores, nth, slices)
    epilogue(acc, bias, residual, out, tile, m, M, N_OUT, GATED, S)


def gemm(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    residual: Tensor | None,
    choice: dict,
    rows: int,
) -> Tensor:
    """residual + x @ w.T + bias in one launch, what is None left out. All of one 16-bit type.

    x [M, K] with inputs in the codes' order, bias [N], residual [M, N] -> [M, N]. packed.gated:
    silu(gate) * up [M, N / 2], without bias and residual. choice: the sizes named in tuning.py, for
    so many rows, M or more."""
    M, block, parts = len(x), packed.block, packed.parts
    block_n, block_m = choice["block_n"], choice["block_m"]
    splits, warps = choice["splits"], choice["warps"]
    slices, occupancy = choice["slices"], choice["occupancy"]
    # Beside a wide tile's sums there are no registers for a group's.
    scaled = not packed.per_channel and (
        parts > 1 or block_m > MIN_BLOCK_M or bool(choice["scaled"])
    )
    block_m = min(block_m, max(8, triton.next_power_of_2(rows)))
    tiles_m, tiles_n = triton.cdiv(M, block_m), triton.cdiv(len(packed.qweight) * 16, block_n)
    # Slices fill the GPU where tiles are few: 64 rows of x and int4 weights [8192, 28672] took an
    # H200 190 us with one, 81 with four.
    whole = 0
    if occupancy and slices > 1:
        # As in stream-K: full waves of tiles stay whole, the remainder is sliced. 512 rows of x and
        # int4 weights [10240, 8192] took an H200 209 us with four slices of every tile, 175 us so.
        wave = max(1, occupancy * gpu(x.device).multi_processor_count // tiles_m)  # tiles of w
        whole = tiles_n // wave * wave
    # Loads without a mask for K: up to 5% faster with 64 rows of x and more, up to 6% slower with
    # 16 (H200).
    full = block_m >= 64 and packed.K % (splits * block) == 0
    sizes = GemmSizes(
        **packed.constants,
        block_n=block_n,
        block_m=block_m,
        splits=splits,
        stages=choice["stages"],
        sliced=slices > 1,
        scaled=scaled,
        full=full,
    )
    out = packed.new_output(x)
    split_tiles = tiles_m * (tiles_n - whole)
    partial_sums = x.new_empty(
        split_tiles * slices * block_n * block_m if slices > 1 else 0, dtype=torch.float32
    )
    options = pdl_options(x.device) | register_limit(occupancy, warps, x.device)
    packed_gemm[(tiles_m, whole + (tiles_n - whole) * slices)](
        x,
        packed.qweight,
        packed.scales_and_zeros,
        packed.shifts,
        bias,
        residual,
        out,
        partial_sums,
        packed.semaphores,
        M,
        packed.N,
        packed.K,
        packed.chunks,
        whole,
        slices,
        sizes,
        packed.gated,
        "launch_pdl" in options,
        num_warps=warps,
        **options,
    )
    return out


def register_limit(occupancy: int, warps: int, device: torch.device) -> dict:
    """The launch option that lets `occupancy` programs share a multiprocessor's registers; {} where
    none is needed.

    A thread gets a multiple of eight registers. With a limit of 102 it would get 104, and the last
    of ten programs would not fit. 4 rows of int4 weights [12288, 4096] took an H200 5% less time
    with 96 (each way tuned; 16 products 0.4% less on average)."""
    if occupancy * warps <= 8:  # a thread may have 255 registers, the most there are
        return {}
    return dict(maxnreg=gpu(device).regs_per_multiprocessor // (32 * warps * occupancy) // 8 * 8)

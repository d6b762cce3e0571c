"""
The order of the codes that the packed kernels read: what a warp's matrix instruction wants in its
registers. On plain tensors: nothing of this repository is imported. pack() puts a weight into this
order, unpack() takes it out.

mma.m16n8k16 multiplies 16 rows of w by 16 inputs. Lane 4g + t of the warp (g = 0..7, t = 0..3) must
hold four pairs of neighbours (PTX ISA, "Matrix fragments for mma.m16n8k16"):

                 inputs 0 to 7             inputs 8 to 15
    row g        2t, 2t + 1                2t + 8, 2t + 9
    row g + 8    2t, 2t + 1                2t + 8, 2t + 9

The codes are packed so that a lane's 16-byte load brings it just these: no thread passes a code to
another.

A block is 16 words of one row: 128 int4 or 64 int8 codes. A word holds P = 16 / bits pairs of
codes. Thread t loads words 4t to 4t + 3, which are c = 0..3:

    word     0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
    t        0  0  0  0 |  1  1  1  1 |  2  2  2  2 |  3  3  3  3
    c        0  1  2  3 |  0  1  2  3 |  0  1  2  3 |  0  1  2  3

Word (t, c) holds these inputs k of the block, which are k = 8P c + 8s + 2t + e with s = 0..P - 1
and e = 0, 1:

    int4    bits        31-28  27-24  23-20  19-16 | 15-12   11-8    7-4    3-0
            s, e         3, 1   2, 1   1, 1   0, 1 |  3, 0   2, 0   1, 0   0, 0
            k-32c-2t       25     17      9      1 |    24     16      8      0

    int8    bits            31-24           23-16  |      15-8             7-0
            s, e             1, 1            1, 0  |      0, 1            0, 0
            k-16c-2t            9               8  |         1               0

So an int4 word serves two matrix instructions, the first with s = 0, 1 and the second with s = 2,
3. An int4 pair's codes stand 16 bits apart: one AND with 0x000f000f leaves both of them, each in
its half of the register.

FP8's codes, e4m3, have the same places along K, but not each a byte. A code is a sign and 7 more
bits, exponent and mantissa; in fp16 these belong at bits 15 and 13 to 7. In each half of a word the
code with s = 0 stands there already, so that one AND makes a pair of fp16 numbers, and the code
with s = 1 fills the gaps:

    e4m3    bits       31    30  29-23  22-16 |    15    14   13-7    6-0
            s, e     0, 1  1, 1   0, 1   1, 1 |  0, 0  1, 0   0, 0   1, 0
                     sign  sign   bits   bits |  sign  sign   bits   bits

The blocks of 16 rows at one place along K are contiguous: 1 KiB, which a warp loads with two
16-byte loads a lane:

    qweight int32 [row blocks, blocks along K, 16 rows, 16 words]

Of a gated layer a row block holds 8 rows of the gate and the 8 rows of up that they gate. Where N
or K ends inside of a block, the rest is zeros: codes, and a row's scales.

A group's scale and zero point are one word, the zero point in the high half, fp16's bits of the
scale in the low half. A group may be smaller than a block (int4 in groups of 32 or 64); a block
then has `parts` groups:

    scales_and_zeros int32 [row blocks, C / parts, 16 rows, parts]

Where the scales are fp32, they take the whole word, and scales_and_zeros is fp32: zero points are 8
or 128 then. FP8's blocks of 128 x 128 weights give neighbouring rows the same scales, which would
be 3% of all bytes. Where a row has several groups of one block or more, and in every row block the
first 8 rows share their scales and so do the last 8, these stand there once:

    scales_and_zeros fp32 [row blocks, C, 2, 1]

e4m3 has fp32 scales always, and no zero points. Its scales are stored 2 ** 8 times as large,
because what the kernels make of a code is 2 ** -8 times the number.

MXFP4's codes, e2m1, stand where int4's do. Its scales are powers of two, e8m0 in a byte each, and
have no zero points:

    scales_and_zeros uint8 [row blocks, C / parts, 16 rows, parts]

With one group a row they are fp32, as a kernel reads four of the bytes at once.

Another kind of codes is another entry of KINDS, lines in places(), and in each kernel what makes
16-bit weights of it.

Shapes: N outputs, K inputs, C groups of a row, W = 16 ceil(K / (512 / bits)) words of a row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 512  # of x for packed_gemm.py, which makes 16-bit weights anew for each tile of x
MIN_BLOCK_M = 64  # rows of x in its tiles, unless x has fewer


@dataclass(frozen=True)
class Kind:
    """What the kernels know of a kind of codes. bits and zero are those of quantize.Codes, again,
    as another project takes this file without quantize.py."""

    bits: int
    zero: int  # the zero point of weights that have none of their own
    # the kernels make number / scale of a code, and packed scales are as many times as large
    scale: int

    @property
    def block(self) -> int:
        """How many codes of a row make a block of 16 words."""
        return 512 // self.bits

    @property
    def pairs(self) -> int:
        """P, the pairs of codes in a word."""
        return 16 // self.bits


# By the names of quantize.Codes.
KINDS = {
    "int4": Kind(4, 8, 1),
    "int8": Kind(8, 128, 1),
    "fp8": Kind(8, 0, 256),
    "mxfp4": Kind(4, 0, 1),
}


def places(s: int, e: int, kind: str) -> list[tuple[int, int]]:
    """Where code (s, e) stands in a word: for each of its parts, the bits of the code and by how
    much they are shifted to the left."""
    if KINDS[kind].bits == 4:
        return [(0xF, 4 * s + 16 * e)]
    if kind == "int8":
        return [(0xFF, 16 * s + 8 * e)]
    return [(0x7F, 16 * e + 7 - 7 * s), (0x80, 16 * e + 8 - s)]


def to_mma_order(codes: Tensor, kind: str) -> Tensor:
    """codes uint8 [N, K] -> int32 [N, W]"""
    P, block = KINDS[kind].pairs, KINDS[kind].block
    codes = F.pad(codes, (0, -codes.shape[1] % block))
    codes = codes.unflatten(1, (-1, 4, P, 4, 2))  # [N, blocks, c, s, t, e]
    N, blocks = codes.shape[:2]
    # [N, blocks, t, c]
    words = torch.zeros(N, blocks, 4, 4, dtype=torch.int32, device=codes.device)
    # One (s, e) after the other: all at once would take 8 times the memory of the words, or 16
    # times.
    for s in range(P):
        for e in range(2):
            some = codes[:, :, :, s, :, e].transpose(2, 3).int()
            for mask, shift in places(s, e, kind):
                words |= (some & mask) << shift
    return words.flatten(1)


def from_mma_order(words: Tensor, kind: str, K: int) -> Tensor:
    """int32 [N, W] -> the codes, uint8 [N, K]; the inverse of to_mma_order()."""
    P = KINDS[kind].pairs
    words = words.unflatten(1, (-1, 4, 4)).transpose(2, 3)  # [N, blocks, c, t]
    # [N, blocks, c, s, t, e]
    codes = words.new_empty((*words.shape[:3], P, 4, 2), dtype=torch.uint8)
    for s in range(P):
        for e in range(2):
            codes[:, :, :, s, :, e] = sum(
                words >> shift & mask for mask, shift in places(s, e, kind)
            )
    return codes.flatten(1)[:, :K]


def in_row_blocks(rows: Tensor, gated: int) -> Tensor:
    """[..., N, W] -> [16 row blocks, W]: the rows as row blocks hold them, filled up with zeros."""
    parts, size = (2, 8) if gated else (1, 16)
    rows = rows.unflatten(-2, (parts, rows.shape[-2] // parts))
    rows = F.pad(rows, (0, 0, 0, -rows.shape[-2] % size)).unflatten(-2, (-1, size))
    # [..., row blocks, gate or up, 8 rows, W], or 16 rows
    return rows.transpose(-4, -3).flatten(0, -2)


def tile(rows: Tensor, width: int) -> Tensor:
    """[16 row blocks, C width] -> [row blocks, C, 16 rows, width]"""
    return rows.reshape(-1, 16, rows.shape[-1] // width, width).transpose(1, 2).contiguous()


def untile(tiles: Tensor, N: int, gated: int) -> Tensor:
    """[row blocks, C, 16 rows, width] -> [N, C width]; the inverse of tile() and
    in_row_blocks()."""
    rows = tiles.transpose(1, 2).flatten(2)  # [row blocks, 16 rows, C width]
    if not gated:
        return rows.flatten(0, 1)[:N]
    return rows.unflatten(1, (2, 8)).transpose(0, 1).flatten(1, 2)[:, : N // 2].flatten(0, 1)


def from_e8m0(scales: Tensor) -> Tensor:
    """uint8 -> 2 ** (scale - 127), fp32"""
    return (scales.int() << 23).clamp(min=1 << 22).view(torch.float32)


def pack_scales(scales: Tensor, zeros: Tensor | None, zero: int, parts: int) -> Tensor:
    """scales fp16 [16 row blocks, C], zeros likewise or None for `zero` everywhere ->
    scales_and_zeros. Or scales fp32 or e8m0 in uint8, and None."""
    C = scales.shape[1]
    if scales.dtype != torch.float16:
        words = scales
    else:
        zeros = zero if zeros is None else zeros.int()
        words = scales.view(torch.int16).int() & 0xFFFF | zeros << 16
    tiles = tile(F.pad(words, (0, -C % parts)), parts)
    shared = tiles[:, :, ::8]
    if (
        words.dtype == torch.float32
        and C > parts == 1
        and torch.equal(tiles, shared.repeat_interleave(8, 2))
    ):
        return shared.contiguous()
    return tiles


def unpack_scales(
    scales_and_zeros: Tensor, N: int, C: int, zero: int, gated: int
) -> tuple[Tensor, Tensor]:
    """scales_and_zeros -> scales fp32 [N, C] and zeros int32 [N, C]; the inverse of
    pack_scales()."""
    tiles = scales_and_zeros.repeat_interleave(16 // scales_and_zeros.shape[2], 2)
    words = untile(tiles, N, gated)[:, :C]
    if words.dtype == torch.uint8:
        words = from_e8m0(words)
    if words.dtype == torch.float32:
        return words, torch.full_like(words, zero, dtype=torch.int32)
    return words.to(torch.int16).view(torch.float16).float(), words >> 16


def group_inputs(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, zero: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes with the inputs of a group side by side, and all groups of one size, as the kernels
    need them.

    codes uint8 [N, K], scales [N, C], zeros [N, C] or None for `zero` everywhere, g_idx: each
    input's group [K], or None if they lie so already. -> codes [N, K'], scales [N, C'], zeros [N,
    C'] or None, and perm [K']: x[:, perm] are the inputs in the order of the codes; None if they
    are in that order already. A group has K' / C' inputs.

    GPTQ's act-order gives each input a group (g_idx). A rank that holds some of the inputs has
    groups without an input, which are dropped, and groups that differ in size. Each of these is
    filled up to a multiple of 32 with weights of 0, and then counts as several groups of 32, so K'
    is larger than K."""
    if g_idx is None:
        return codes, scales, zeros, None
    K = codes.shape[1]
    perm = g_idx.argsort(stable=True)
    counts = g_idx.bincount(minlength=scales.shape[1])  # [C]: the inputs of each group
    group = counts.nonzero().squeeze(1)
    sizes = counts[group]
    if len(group) == 1 or (sizes == sizes[0]).all() and sizes[0] % 32 == 0:
        codes = codes[:, perm]
    else:
        codes, perm = fill_groups(codes, zeros, zero, g_idx, perm, counts)
        group = group.repeat_interleave((sizes + 31) // 32)
    if len(perm) == K and torch.equal(perm, torch.arange(K, device=perm.device)):
        perm = None
    return codes, scales[:, group], None if zeros is None else zeros[:, group], perm


def fill_groups(
    codes: Tensor, zeros: Tensor | None, zero: int, g_idx: Tensor, perm: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """For group_inputs(): codes [N, K'] and perm [K'] with each group filled up to a multiple of
    32.

    A filled place has the group's zero point for a code, which is a weight of 0; its input is the
    layer's first."""
    missing = -counts % 32  # [C]
    # [K']: the group of each.
    wide = torch.arange(len(counts), device=codes.device).repeat_interleave(counts + missing)
    # How many places are filled in the groups before.
    before = (missing.cumsum(0) - missing)[g_idx[perm]]
    at = torch.arange(len(perm), device=codes.device) + before
    if zeros is None:
        filled = codes.new_full((len(codes), len(wide)), zero)
    else:
        filled = zeros.to(torch.uint8)[:, wide]
    filled[:, at] = codes[:, perm]
    wide_perm = perm.new_zeros(len(wide))
    wide_perm[at] = perm
    return filled, wide_perm


class Packed(NamedTuple):
    """A weight [N, K] as the kernels read it. K counts what fills groups up (see group_inputs()).

    qweight and scales_and_zeros are drawn above. perm int64 [K] or None: which inputs the codes
    belong to. shifts int32 [P]: for packed_gemm.py, the bits of a word at which the first codes of
    pairs start. semaphores int32: a 0 for each tile whose programs share its sums; when a kernel is
    done, they are 0 again."""

    qweight: Tensor
    scales_and_zeros: Tensor
    perm: Tensor | None
    shifts: Tensor
    semaphores: Tensor
    N: int
    K: int
    kind: str
    group_size: int
    gated: int  # 1: SiLU, 2: GELU by tanh

    @property
    def bits(self) -> int:
        return KINDS[self.kind].bits

    @property
    def block(self) -> int:
        return KINDS[self.kind].block

    @property
    def parts(self) -> int:
        """Groups in a block, 1 if they are as large as a block or larger."""
        return self.scales_and_zeros.shape[3]

    @property
    def chunks(self) -> int:
        """C / parts."""
        return self.scales_and_zeros.shape[1]

    @property
    def per_channel(self) -> bool:
        """One group a row."""
        return self.group_size >= self.K

    @property
    def fits_kernels(self) -> bool:
        """The kernels want groups that are whole blocks, or blocks that are whole groups."""
        return self.per_channel or self.parts > 1 or self.group_size % self.block == 0

    @property
    def constants(self) -> dict:
        """What each kernel is compiled for."""
        return dict(
            bits=self.bits,
            e4m3=self.kind == "fp8",
            e2m1=self.kind == "mxfp4",
            per_channel=self.per_channel,
            parts=self.parts,
            scale_rows=self.scales_and_zeros.shape[2],
            group=2**30 if self.per_channel else self.group_size,
        )

    def new_output(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x), self.N // 2 if self.gated else self.N)


def pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    kind: str = "int4",
    gated: int = 0,
) -> Packed:
    """A weight w[n, k] = (number of codes[n, k] - zeros[n, c]) * scales[n, c], where c is the group
    of input k.

    codes uint8 [N, K]: fp8's stand for e4m3's numbers, mxfp4's for e2m1's. scales fp16 or fp32 [N,
    C], of mxfp4 e8m0 in uint8; zeros [N, C], below 256, want fp16 scales; None: 8 for int4, 128 for
    int8, else 0. g_idx: each input's group [K], None where K / C consecutive inputs are one. gated:
    the first half of the rows is gate, the second half up."""
    codes, scales, zeros, perm = group_inputs(codes, scales, zeros, g_idx, KINDS[kind].zero)
    wanted = [torch.float16, torch.float32] if zeros is None else [torch.float16]
    if scales.dtype not in ([torch.uint8] if kind == "mxfp4" else wanted):
        raise ValueError(
            f"scales are {scales.dtype}: want fp16 or, without zero points, fp32; of mxfp4 uint8"
        )
    (N, K), C, of = codes.shape, scales.shape[1], KINDS[kind]
    if kind == "fp8":
        scales = scales.float() * of.scale
    if kind == "mxfp4" and C == 1:
        scales = from_e8m0(scales)
    group_size = K // C
    parts = of.block // group_size if C > 1 and of.block % group_size == 0 else 1
    codes, scales = in_row_blocks(codes, gated), in_row_blocks(scales, gated)
    zeros = None if zeros is None else in_row_blocks(zeros, gated)
    qweight = tile(to_mma_order(codes, kind), 16)
    scales_and_zeros = pack_scales(scales, zeros, of.zero, parts)
    first_bits = [places(s, 0, kind)[0][1] for s in range(of.pairs)]
    shifts = torch.tensor(first_bits, dtype=torch.int32, device=codes.device)
    return Packed(
        qweight,
        scales_and_zeros,
        perm,
        shifts,
        new_semaphores(qweight),
        N,
        K,
        kind,
        group_size,
        gated,
    )


def new_semaphores(qweight: Tensor) -> Tensor:
    return torch.zeros(
        MAX_ROWS // MIN_BLOCK_M * len(qweight), dtype=torch.int32, device=qweight.device
    )


def unpack(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """-> codes uint8 [N, K], in the order of perm, scales fp32 [N, C], zeros int32 [N, C]; the
    inverse of pack()."""
    of, C = KINDS[packed.kind], packed.K // packed.group_size
    codes = from_mma_order(untile(packed.qweight, packed.N, packed.gated), packed.kind, packed.K)
    scales, zeros = unpack_scales(packed.scales_and_zeros, packed.N, C, of.zero, packed.gated)
    return codes, scales / of.scale, zeros

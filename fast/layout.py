"""
The order of the codes that the packed kernels read: what a warp's matrix instruction wants in its registers.

mma.m16n8k16 multiplies 16 rows of w by 16 inputs. Lane 4g + t of the warp (g = 0..7, t = 0..3) must hold four pairs of
neighbours (PTX ISA, "Matrix fragments for mma.m16n8k16"):

                 inputs 0 to 7             inputs 8 to 15
    row g        2t, 2t + 1                2t + 8, 2t + 9
    row g + 8    2t, 2t + 1                2t + 8, 2t + 9

The codes are packed so that a lane's 16-byte load brings it just these: no thread passes a code to another.

A block is 16 words of one row: 128 int4 or 64 int8 codes. A word holds P = 16 / bits pairs of codes. Thread t loads
words 4t to 4t + 3, which are c = 0..3:

    word     0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
    t        0  0  0  0 |  1  1  1  1 |  2  2  2  2 |  3  3  3  3
    c        0  1  2  3 |  0  1  2  3 |  0  1  2  3 |  0  1  2  3

Word (t, c) holds these inputs k of the block, which are k = 8P c + 8s + 2t + e with s = 0..P - 1 and e = 0, 1:

    int4    bits        31-28  27-24  23-20  19-16 | 15-12   11-8    7-4    3-0
            s, e         3, 1   2, 1   1, 1   0, 1 |  3, 0   2, 0   1, 0   0, 0
            k-32c-2t       25     17      9      1 |    24     16      8      0

    int8    bits            31-24           23-16  |      15-8             7-0
            s, e             1, 1            1, 0  |      0, 1            0, 0
            k-16c-2t            9               8  |         1               0

So an int4 word serves two matrix instructions, the first with s = 0, 1 and the second with s = 2, 3. An int4
pair's codes stand 16 bits apart: one AND with 0x000f000f leaves both of them, each in its half of the register.

FP8's codes, e4m3, have the same places along K, but not each a byte. A code is a sign and 7 more bits, exponent and
mantissa; in fp16 these belong at bits 15 and 13 to 7. In each half of a word the code with s = 0 stands there already,
so that one AND makes a pair of fp16 numbers, and the code with s = 1 fills the gaps:

    e4m3    bits       31    30  29-23  22-16 |    15    14   13-7    6-0
            s, e     0, 1  1, 1   0, 1   1, 1 |  0, 0  1, 0   0, 0   1, 0
                     sign  sign   bits   bits |  sign  sign   bits   bits

The blocks of 16 rows at one place along K are contiguous: 1 KiB, which a warp loads with two 16-byte loads a lane:

    qweight int32 [row blocks, blocks along K, 16 rows, 16 words]

Of a gated layer a row block holds 8 rows of the gate and the 8 rows of up that they gate. Where N or K ends inside of a
block, the rest is zeros.

A group's scale and zero point are one word, the zero point in the high half, fp16's bits of the scale in the low half.
A group may be smaller than a block (int4 in groups of 32 or 64); a block then has `parts` groups:

    scales_and_zeros int32 [row blocks, C / parts, 16 rows, parts]

Where the scales are fp32, they take the whole word, and scales_and_zeros is fp32: zero points are 2 ** (bits - 1) then.
FP8's blocks of 128 x 128 weights give neighbouring rows the same scales, which would be 3% of all bytes. Where a row
has several groups, and in every row block the first 8 rows share their scales and so do the last 8, these stand there
once:

    scales_and_zeros fp32 [row blocks, C / parts, 2, parts]

e4m3 has fp32 scales always, and no zero points. Its scales are stored 2 ** 8 times as large (E4M3_SCALE), because what
the kernels make of a code is 2 ** -8 times the number.

Shapes: N outputs, K inputs, C groups of a row, W = 16 ceil(K / (512 / bits)) words of a row.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from quantize import QuantizedLinear, unpack


E4M3_SCALE = 256


def block_size(bits: int) -> int:
    """How many codes of a row make a block of 16 words."""
    return 512 // bits


def places(s: int, e: int, bits: int, e4m3: bool = False) -> list[tuple[int, int]]:
    """Where code (s, e) stands in a word: for each of its parts, the bits of the code and by how much they are shifted
    to the left."""
    if e4m3:
        return [(0x7F, 16 * e + 7 - 7 * s), (0x80, 16 * e + 8 - s)]
    return [(2 ** bits - 1, 4 * s + 16 * e if bits == 4 else 16 * s + 8 * e)]


def pairs(bits: int) -> list[tuple[int, int]]:
    """All s and e."""
    return [(s, e) for s in range(16 // bits) for e in range(2)]


def to_mma_order(codes: Tensor, bits: int, e4m3: bool = False) -> Tensor:
    """codes [N, K], integers below 2 ** bits -> int32 [N, W]."""
    codes = F.pad(codes, (0, -codes.shape[1] % block_size(bits)))
    codes = codes.unflatten(1, (-1, 4, 16 // bits, 4, 2))  # [N, blocks, c, s, t, e]
    N, blocks = codes.shape[:2]
    words = torch.zeros(N, blocks, 4, 4, dtype=torch.int32, device=codes.device)  # [N, blocks, t, c]
    for s, e in pairs(bits):
        # one (s, e) after the other: all at once would take 8 times the memory of the words, or 16 times
        some = codes[:, :, :, s, :, e].transpose(2, 3).int()
        for mask, shift in places(s, e, bits, e4m3):
            words |= (some & mask) << shift
    return words.flatten(1)


def from_mma_order(words: Tensor, bits: int, K: int, e4m3: bool = False) -> Tensor:
    """int32 [N, W] -> the codes, uint8 [N, K]; the inverse of to_mma_order()."""
    words = words.unflatten(1, (-1, 4, 4)).transpose(2, 3)  # [N, blocks, c, t]
    codes = words.new_empty((*words.shape[:3], 16 // bits, 4, 2), dtype=torch.uint8)  # [N, blocks, c, s, t, e]
    for s, e in pairs(bits):
        codes[:, :, :, s, :, e] = sum(words >> shift & mask for mask, shift in places(s, e, bits, e4m3))
    return codes.flatten(1)[:, :K]


def tile(rows: Tensor, width: int, gated: bool) -> Tensor:
    """[N, C width] -> [row blocks, C, 16 rows, width]."""
    if gated:
        half = len(rows) // 2
        rows = F.pad(rows.view(2, half, -1), (0, 0, 0, -half % 8))
        rows = rows.unflatten(1, (-1, 8)).transpose(0, 1)  # [row blocks, gate or up, 8 rows, C width]
    else:
        rows = F.pad(rows, (0, 0, 0, -len(rows) % 16))
    return rows.reshape(-1, 16, rows.shape[-1] // width, width).transpose(1, 2).contiguous()


def untile(tiles: Tensor, N: int, gated: bool) -> Tensor:
    """[row blocks, C, 16 rows, width] -> [N, C width]; the inverse of tile()."""
    rows = tiles.transpose(1, 2).flatten(2)  # [row blocks, 16 rows, C width]
    if not gated:
        return rows.flatten(0, 1)[:N]
    return rows.unflatten(1, (2, 8)).transpose(0, 1).flatten(1, 2)[:, :N // 2].flatten(0, 1)


def pack_scales(scales: Tensor, zeros: Tensor | None, bits: int, parts: int, gated: bool) -> Tensor:
    """scales fp16 [N, C], zeros [N, C] or None for 2 ** (bits - 1) -> scales_and_zeros. Or scales fp32 and None."""
    C = scales.shape[1]
    if scales.dtype == torch.float32:
        words = scales
    else:
        zeros = 2 ** (bits - 1) if zeros is None else zeros.int()
        words = scales.view(torch.int16).int() & 0xFFFF | zeros << 16
    tiles = tile(F.pad(words, (0, -C % parts)), parts, gated)
    shared = tiles[:, :, ::8]
    if words.dtype == torch.float32 and C > 1 and torch.equal(tiles, shared.repeat_interleave(8, 2)):
        return shared.contiguous()
    return tiles


def unpack_scales(scales_and_zeros: Tensor, N: int, C: int, bits: int, gated: bool) -> tuple[Tensor, Tensor]:
    """scales_and_zeros -> scales fp32 [N, C] and zeros int32 [N, C]; the inverse of pack_scales()."""
    tiles = scales_and_zeros.repeat_interleave(16 // scales_and_zeros.shape[2], 2)
    words = untile(tiles, N, gated)[:, :C]
    if words.dtype == torch.float32:
        return words, torch.full_like(words, 2 ** (bits - 1), dtype=torch.int32)
    return words.to(torch.int16).view(torch.float16).float(), words >> 16


def group_inputs(layer: QuantizedLinear) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The layer's codes with the inputs of a group side by side, and all groups of one size, as the kernels need them.

    -> codes uint8 [N, K'], scales [N, C'], zeros int16 [N, C'] or None, and perm [K']: x[:, perm] are the inputs
    in the order of the codes; None if they are in that order already. A group has K' / C' inputs.

    GPTQ's act-order gives each input a group (g_idx). A rank that holds some of the inputs has groups without an input,
    which are dropped, and groups that differ in size. Each of these is filled up to a multiple of 32 with weights of 0,
    and then counts as several groups of 32, so K' is larger than K."""
    codes = unpack(layer.qweight, layer.codes.bits)
    scales, zeros, g_idx = layer.scales.data, None if layer.zeros is None else layer.zeros.data, layer.g_idx
    if g_idx is None:
        return codes, scales, zeros, None
    perm = g_idx.argsort(stable=True)
    counts = g_idx.bincount(minlength=scales.shape[1])  # [C]: the inputs of each group
    group = counts.nonzero().squeeze(1)
    sizes = counts[group]
    if len(group) == 1 or (sizes == sizes[0]).all() and sizes[0] % 32 == 0:
        codes = codes[:, perm]
    else:
        codes, perm = fill_groups(codes, zeros, layer.codes.bits, g_idx, perm, counts)
        group = group.repeat_interleave((sizes + 31) // 32)
    if len(perm) == layer.in_features and torch.equal(perm, torch.arange(len(perm), device=perm.device)):
        perm = None
    return codes, scales[:, group], None if zeros is None else zeros[:, group], perm


def fill_groups(codes: Tensor, zeros: Tensor | None, bits: int, g_idx: Tensor, perm: Tensor,
                counts: Tensor) -> tuple[Tensor, Tensor]:
    """For group_inputs(): codes [N, K'] and perm [K'] with each group filled up to a multiple of 32.

    A filled place has the group's zero point for a code, which is a weight of 0; its input is the layer's first. Where
    zeros is None the code is 2 ** (bits - 1): the middle of integers, and e4m3's -0."""
    missing = -counts % 32  # [C]
    wide = torch.arange(len(counts), device=codes.device).repeat_interleave(counts + missing)  # [K']: the group of each
    before = (missing.cumsum(0) - missing)[g_idx[perm]]  # how many places are filled in the groups before
    at = torch.arange(len(perm), device=codes.device) + before
    if zeros is None:
        filled = codes.new_full((len(codes), len(wide)), 2 ** (bits - 1))
    else:
        filled = zeros.to(torch.uint8)[:, wide]
    filled[:, at] = codes[:, perm]
    wide_perm = perm.new_zeros(len(wide))
    wide_perm[at] = perm
    return filled, wide_perm

"""
A linear layer with int4, int8 or FP8 weights for a GPU: its custom operator, and the choice between three ways to
multiply.

    one row of x        packed_gemv.py
    2 to 512 rows       packed_gemm.py
    more rows           the weights are dequantized into memory, and cuBLAS multiplies

tuning.py says where one ends and the next begins. The plain twin is plain_packed_linear().

Shapes: M rows of x, N outputs, K inputs, C groups of a row; qweight and scales_and_zeros as layout.py draws them.
"""
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, library, nn

from fast.common import constexpr, gpu, jit, pdl_options, tl, triton
from fast.layout import (E4M3_SCALE, block_size, from_mma_order, group_inputs, pack_scales, places, tile,
                         to_mma_order, unpack_scales, untile)
from fast.linear import plain_linear, rms_norm
from fast.tuning import kernel_for
from quantize import E4M3, QuantizedLinear, from_e4m3, say_once

if triton:
    from fast.packed_gemm import GemmSizes, packed_gemm, scale_of
    from fast.packed_gemv import GemvSizes, packed_gemv

MAX_ROWS = 512  # of x for packed_gemm(), which dequantizes the weights for each tile of x
MIN_BLOCK_M = 64  # rows of x in its tiles, unless x has fewer
# Rows of w that are repacked at once. A whole layer's codes, unpacked, made the peak of Llama-2-7B in int4 19% larger
# than its weights and caches (H200).
REPACKED_ROWS = 1024


class Weights(NamedTuple):
    """What the operator gets of a PackedLinear. K counts what fills groups up (see group_inputs())."""
    qweight: Tensor
    scales_and_zeros: Tensor
    perm: Tensor | None
    shifts: Tensor
    semaphores: Tensor
    N: int
    K: int
    bits: int
    group_size: int
    gated: bool
    e4m3: bool

    @property
    def per_channel(self) -> bool:
        return self.group_size >= self.K

    @property
    def sizes(self) -> dict:
        """The fields that GemvSizes and GemmSizes have in common."""
        scale_rows, parts = self.scales_and_zeros.shape[2:]
        return dict(bits=self.bits, e4m3=self.e4m3, per_channel=self.per_channel, parts=parts, scale_rows=scale_rows,
                    group=2 ** 30 if self.per_channel else self.group_size)

    def new_output(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x), self.N // 2 if self.gated else self.N)


def choose(w: Weights, M: int, device: torch.device) -> dict:
    """kernel_for()'s choice for M rows of x. cuBLAS multiplies where no kernel does: groups must be whole blocks, or
    blocks whole groups."""
    parts = w.scales_and_zeros.shape[3]
    whole_blocks = w.per_channel or w.group_size % block_size(w.bits) == 0
    if M > MAX_ROWS or not (whole_blocks or parts > 1):
        return {"kernel": "library"}
    format = f"int{w.bits}" + (f"-{w.group_size}" if parts > 1 else "")
    return kernel_for(format, w.N, w.K, M, device)


def launch_gemv(x: Tensor, w: Weights, choice: dict, norm: Tensor | None, bias: Tensor | None,
                residual: Tensor | None, eps: float) -> Tensor:
    """One row of x: norm, perm, product, bias, SiLU gate and residual in one launch."""
    row_blocks, blocks = len(w.qweight), triton.cdiv(w.K, block_size(w.bits))
    warps, depth = choice["warps"], choice["depth"]
    # With slices each program prepares less of x: int4 [14336, 21504] took an H200 58.0 us with one, 49.1 with four.
    # A norm needs all of x, and so there is one slice.
    slices = 1 if norm is not None else choice["slices"]
    rounds = triton.cdiv(blocks, warps * depth * slices)
    slices = triton.cdiv(blocks, warps * depth * rounds)  # drops slices that would be empty
    programs = min(row_blocks, triton.cdiv(choice["programs"] * gpu(x.device).multi_processor_count, slices))
    # Two neighbouring blocks that share a group are multiplied at once, and their sum is scaled: in FP8 with 128 x 128
    # blocks Llama-2-7B made 471.7 tokens/s instead of 457.4, with a scale a row 508.8 instead of 496.3, and in int8
    # 509.5 instead of 512.0 (H200, one call).
    pair = 2 if w.bits == 8 and depth % 2 == 0 and w.sizes["group"] % (2 * block_size(8)) == 0 else 1
    sizes = GemvSizes(**w.sizes, pair=pair, warps=warps, depth=depth // pair, stages=choice["stages"], rounds=rounds,
                      slices=slices, full=w.K == rounds * slices * warps * depth * block_size(w.bits))
    out = w.new_output(x)
    partial_sums = x.new_empty(row_blocks * slices * 16 if slices > 1 else 0, dtype=torch.float32)
    pdl = pdl_options(x.device)
    packed_gemv[(programs, slices)](
        x, w.qweight, w.scales_and_zeros, w.perm, norm, bias, residual, out, partial_sums, w.semaphores, w.N, w.K,
        w.scales_and_zeros.shape[1], eps, sizes, w.gated, bool(pdl), num_warps=warps, **pdl)
    return out


def launch_gemm(x: Tensor, w: Weights, choice: dict, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Several rows of x, normed and in the codes' order: product, bias, SiLU gate and residual in one launch."""
    M, block, parts = len(x), block_size(w.bits), w.scales_and_zeros.shape[3]
    block_n, block_m, splits, warps = choice["block_n"], choice["block_m"], choice["splits"], choice["warps"]
    slices, occupancy = choice["slices"], choice["occupancy"]
    # Beside a wide tile's sums there are no registers for a group's.
    scaled = not w.per_channel and (parts > 1 or block_m > MIN_BLOCK_M or bool(choice["scaled"]))
    block_m = min(block_m, max(8, triton.next_power_of_2(M)))
    tiles_m, tiles_n = triton.cdiv(M, block_m), triton.cdiv(len(w.qweight) * 16, block_n)
    # Slices fill the GPU where tiles are few: 64 rows of x and int4 weights [8192, 28672] took an H200 190 us with one,
    # 81 with four.
    whole = 0
    if occupancy and slices > 1:
        # As in stream-K: full waves of tiles stay whole, the remainder is sliced. 512 rows of x and int4 weights
        # [10240, 8192] took an H200 209 us with four slices of every tile, 175 us so.
        wave = max(1, occupancy * gpu(x.device).multi_processor_count // tiles_m)  # tiles of w
        whole = tiles_n // wave * wave
    # Loads without a mask for K: up to 5% faster with 64 rows of x and more, up to 6% slower with 16 (H200).
    full = block_m >= 64 and w.K % (splits * block) == 0
    sizes = GemmSizes(**w.sizes, block_n=block_n, block_m=block_m, splits=splits, stages=choice["stages"],
                      sliced=slices > 1, scaled=scaled, full=full)
    out = w.new_output(x)
    split_tiles = tiles_m * (tiles_n - whole)
    partial_sums = x.new_empty(split_tiles * slices * block_n * block_m if slices > 1 else 0, dtype=torch.float32)
    options = pdl_options(x.device) | register_limit(occupancy, warps, x.device)
    packed_gemm[(tiles_m, whole + (tiles_n - whole) * slices)](
        x, w.qweight, w.scales_and_zeros, w.shifts, bias, residual, out, partial_sums, w.semaphores, M, w.N, w.K,
        w.scales_and_zeros.shape[1], whole, slices, sizes, w.gated, "launch_pdl" in options, num_warps=warps, **options)
    return out


def register_limit(occupancy: int, warps: int, device: torch.device) -> dict:
    """The launch option that lets `occupancy` programs share a multiprocessor's registers; {} where none is needed.

    A thread gets a multiple of eight registers. With a limit of 102 it would get 104, and the last of ten programs
    would not fit. 4 rows of int4 weights [12288, 4096] took an H200 5% less time with 96 (each way tuned; 16 products
    0.4% less on average)."""
    if occupancy * warps <= 8:  # a thread may have 255 registers, the most there are
        return {}
    return dict(maxnreg=gpu(device).regs_per_multiprocessor // (32 * warps * occupancy) // 8 * 8)


@jit
def dequantize_kernel(qweight, scales_and_zeros, out, N, K, C, G: constexpr, PARTS: constexpr,
                      SCALE_ROWS: constexpr, BITS: constexpr, E4M3: constexpr, GATED: constexpr, SPAN: constexpr):
    """Program (row block, SPAN blocks along K): write their weights to out [N, K], rows in the layer's order."""
    BLOCK: constexpr = 512 // BITS
    P: constexpr = 16 // BITS
    KB = (K + BLOCK - 1) // BLOCK
    nb = tl.program_id(0)
    r = tl.arange(0, 16)
    kb = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    at = (nb.to(tl.int64) * KB + kb)[None, :, None] * 256 + r[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    q = tl.load(qweight + at, mask=(kb < KB)[None, :, None], other=0)
    words = tl.reshape(q, (16, SPAN * 16))[:, :, None]
    s, e = (tl.arange(0, 2 * P) // 2)[None, None, :], (tl.arange(0, 2 * P) % 2)[None, None, :]
    if E4M3:  # as places() in layout.py has it
        codes = words >> (16 * e + 7 - 7 * s) & 0x7F | words >> (16 * e + 8 - s) & 0x80
    else:
        codes = words >> (4 * s + 16 * e if BITS == 4 else 16 * s + 8 * e) & (2 ** BITS - 1)
    codes = tl.permute(tl.reshape(codes, (16, SPAN, 4, 4, P, 2)), (0, 1, 3, 4, 2, 5))  # t c s e -> c s t e
    codes = tl.reshape(codes, (16, SPAN * BLOCK))

    k = tl.program_id(1) * (SPAN * BLOCK) + tl.arange(0, SPAN * BLOCK)
    chunk = tl.minimum(k // (G * PARTS), C - 1)[None, :]
    scale_row = (nb * C + chunk) * SCALE_ROWS + r[:, None] // (16 // SCALE_ROWS)
    group = tl.load(scales_and_zeros + scale_row * PARTS + (k // G % PARTS)[None, :])
    scale = scale_of(group).to(tl.float32)
    if E4M3:  # the code's bits in fp32's places are 2^-120 times the number, and the scale is 2^8 times as large
        w = ((codes & 0x80) << 24 | (codes & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0 ** 112
    elif group.dtype == tl.float32:
        w = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (2 ** 23 + 2 ** (BITS - 1))
    else:
        # OR-ed into 2^23, an integer is a float without a conversion (see dequantize() in packed_gemm.py)
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


def dequantize(x: Tensor, w: Weights) -> Tensor:
    """The weights [N, K] in x's type."""
    out = x.new_empty(w.N, w.K)
    # Of 1 to 16 blocks and 2 to 8 warps, 4 and 2 are the fastest for 14336 x 21504, int4, on an H200.
    grid = len(w.qweight), triton.cdiv(w.K, 4 * block_size(w.bits))
    sizes = w.sizes
    dequantize_kernel[grid](w.qweight, w.scales_and_zeros, out, w.N, w.K, w.scales_and_zeros.shape[1], sizes["group"],
                            sizes["parts"], sizes["scale_rows"], w.bits, w.e4m3, w.gated, 4, num_warps=2)
    return out


def plain_packed_linear(x, qweight, scales_and_zeros, perm, shifts, semaphores, N, bits, group_size, norm=None,
                        bias=None, residual=None, gated=False, eps=1e-5, e4m3=False) -> Tensor:
    """The plain twin of packed_linear()."""
    K = x.shape[1] if perm is None else len(perm)
    scales, zeros = unpack_scales(scales_and_zeros, N, K // group_size, bits, gated)
    codes = from_mma_order(untile(qweight, N, gated), bits, K, e4m3).view(N, K // group_size, group_size)
    w = from_e4m3(codes) / E4M3_SCALE if e4m3 else codes - zeros[:, :, None]
    w = (w * scales[:, :, None]).flatten(1).to(x.dtype)
    if perm is not None:
        x, norm = x[:, perm], None if norm is None else norm[perm]
    return plain_linear(x, w, norm, bias, residual, gated, eps)


# Nothing is mutated: when the kernels are done, semaphores is as it was.
@library.custom_op("llama_fast::packed_linear", mutates_args=(), device_types="cuda")
def packed_linear(x: Tensor, qweight: Tensor, scales_and_zeros: Tensor, perm: Tensor | None, shifts: Tensor,
                  semaphores: Tensor, N: int, bits: int, group_size: int, norm: Tensor | None = None,
                  bias: Tensor | None = None, residual: Tensor | None = None, gated: bool = False,
                  eps: float = 1e-5, e4m3: bool = False) -> Tensor:
    """x [M, K] -> residual [M, N] + rms_norm(x, norm)[:, perm] @ w.T + bias [N], what is None left out.

    gated: the first half of w is the gate, the second half up, and the result silu(gate) * up [M, N / 2], without bias
    and residual. The other arguments are a PackedLinear's. semaphores holds an int32 0 for each tile; when the kernel
    is done, they are 0 again."""
    K = x.shape[1] if perm is None else len(perm)
    w = Weights(qweight, scales_and_zeros, perm, shifts, semaphores, N, K, bits, group_size, gated, e4m3)
    choice = choose(w, len(x), x.device)
    x = x.contiguous()
    if choice["kernel"] == "gemv":
        return launch_gemv(x, w, choice, norm, bias, residual, eps)
    if norm is not None:
        x = rms_norm(x, norm, eps)  # before perm: rms_norm()'s kernel may read norm while norm[perm] is being made
    if perm is not None:
        x = x[:, perm]
    if choice["kernel"] == "library":
        return plain_linear(x, dequantize(x, w), None, bias, residual, gated)
    return launch_gemm(x, w, choice, bias, residual)


packed_linear.register_kernel("cpu")(plain_packed_linear)


@packed_linear.register_fake
def _(x, qweight, scales_and_zeros, perm, shifts, semaphores, N, bits, group_size, norm=None, bias=None, residual=None,
      gated=False, eps=1e-5, e4m3=False):
    return x.new_empty(len(x), N // 2 if gated else N)


def row_chunks(layer: QuantizedLinear) -> Iterator[QuantizedLinear]:
    """The layer's rows, REPACKED_ROWS at a time; they share its memory."""
    for at in range(0, max(1, layer.out_features), REPACKED_ROWS):
        rows = slice(at, at + REPACKED_ROWS)
        zeros = None if layer.zeros is None else layer.zeros[rows]
        yield QuantizedLinear(layer.qweight[rows], layer.scales[rows], zeros, layer.codes, None, layer.g_idx)


class PackedLinear(nn.Module):
    """A QuantizedLinear in the kernels' layout (see layout.py); gated: its rows are the gate's, then as many of up.

    qweight and scales_and_zeros as in layout.py; perm [K'] or None as of group_inputs(); shifts int32 [P] for
    packed_gemm(); semaphores int32 [tiles] for programs that share a tile. perm, shifts and semaphores are buffers."""

    def __init__(self, layer: QuantizedLinear, gated: bool = False):
        super().__init__()
        if gated and layer.bias is not None:
            raise ValueError("a gated layer with a bias: the kernels have no place for it")
        words, scales, zeros = [], [], []
        for chunk in row_chunks(layer):
            codes, chunk_scales, chunk_zeros, perm = group_inputs(chunk)
            words.append(to_mma_order(codes, layer.codes.bits, layer.codes == E4M3))
            scales.append(chunk_scales)
            zeros.append(chunk_zeros)
        scales, zeros = torch.cat(scales), None if layer.zeros is None else torch.cat(zeros)
        if layer.codes == E4M3:
            scales = scales.float() * E4M3_SCALE
        elif zeros is not None and scales.dtype == torch.float32:
            say_once("scales in fp32 are rounded to fp16 where zero points stand beside them", file=sys.stderr)
            scales = scales.half()
        self.N, K, C, block = layer.out_features, codes.shape[1], scales.shape[1], block_size(layer.codes.bits)
        self.bits, self.e4m3, self.group_size, self.gated = layer.codes.bits, layer.codes == E4M3, K // C, gated
        self.bias = layer.bias
        parts = block // self.group_size if C > 1 and block % self.group_size == 0 else 1
        qweight = tile(torch.cat(words), 16, gated)
        self.qweight = nn.Parameter(qweight, requires_grad=False)
        self.scales_and_zeros = nn.Parameter(pack_scales(scales, zeros, self.bits, parts, gated), requires_grad=False)
        semaphores = torch.zeros(MAX_ROWS // MIN_BLOCK_M * len(qweight), dtype=torch.int32, device=qweight.device)
        starts = [places(s, 0, self.bits, self.e4m3)[0][1] for s in range(16 // self.bits)]
        shifts = torch.tensor(starts, dtype=torch.int32, device=qweight.device)
        buffers = dict(perm=perm, shifts=shifts, semaphores=semaphores)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)

    def fused(self, x: Tensor, norm: Tensor | None = None, residual: Tensor | None = None, gated: bool = False,
              eps: float = 1e-5) -> Tensor:
        """packed_linear() with these weights: x [M, K] -> [M, N], gated [M, N / 2]."""
        return packed_linear(x, self.qweight, self.scales_and_zeros, self.perm, self.shifts, self.semaphores, self.N,
                             self.bits, self.group_size, norm, self.bias, residual, gated, eps, self.e4m3)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]; gated: [..., N / 2]"""
        return self.fused(x.flatten(0, -2), gated=self.gated).unflatten(0, x.shape[:-1])

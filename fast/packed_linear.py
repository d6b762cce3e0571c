"""
A linear layer with int4, int8 or FP8 weights for a GPU: its custom operator, and the choice between
four ways to multiply.

    one row of x        packed_gemv.py
    2 to 8 rows         packed_few.py, int4 and int8
    up to 512 rows      packed_gemm.py
    more rows           the weights are dequantized into memory, and cuBLAS multiplies

tuning.py says where the last two meet. The plain twin is plain_packed_linear().

Shapes: M rows of x, N outputs, K inputs, C groups of a row; qweight and scales_and_zeros as
layout.py draws them.
"""

from weakref import WeakValueDictionary

import torch
from torch import Tensor, library, nn

from fast.common import constexpr, jit, tl, triton
from fast.layout import KINDS, MAX_ROWS, Packed, in_row_blocks, new_semaphores, pack
from fast.linear import library_linear, rms_norm
from fast.packed_few import MOST_ROWS, few, takes_few
from fast.packed_gemv import gemv, takes_gemv
from fast.tuning import kernel_for
from fast.twins import plain_packed_linear
from quantize import QuantizedLinear, say_once
from quantize import unpack as codes_of
from tp import on_all_ranks

if triton:
    from fast.packed_gemm import gemm, scale_of

# A prompt's products have the kernels for so many rows or, beyond, cuBLAS: few kernels, so that
# warm_up() can compile them all. With those of its own number a prompt of another length compiled
# anew, 1 to 3 s (H100); the host takes longer to launch a short prompt than the GPU to run it.
PROMPT_ROWS = 256, MAX_ROWS

# Codes that are repacked at once, which takes 8 bytes each. A whole layer's made the peak of
# Llama-2-7B in int4 19% larger than its weights and caches (H200).
REPACKED = 2**24


def choice_for(w: Packed, M: int, device: torch.device) -> dict:
    """The kernel for M rows of x, and its sizes: gemv() for one row, few() for a few, else
    kernel_for()'s choice. Where gemv() cannot be, one row gets packed_gemm.py's choice for two, and
    where no kernel can, cuBLAS multiplies."""
    if M > MAX_ROWS or not w.fits_kernels:
        return {"kernel": "library"}
    if M == 1 and takes_gemv(w, device):
        return {"kernel": "gemv"}
    if takes_few(w, M, device):
        return {"kernel": "few"}
    format = f"int{w.bits}" + (f"-{w.group_size}" if w.parts > 1 else "")
    return kernel_for(format, w.N, w.K, max(M, 2), device)


@jit
def dequantize_kernel(
    qweight,
    scales_and_zeros,
    out,
    N,
    K,
    C,
    G: constexpr,
    PARTS: constexpr,
    SCALE_ROWS: constexpr,
    BITS: constexpr,
    E4M3: constexpr,
    E2M1: constexpr,
    GATED: constexpr,
    SPAN: constexpr,
):
    """Program (row block, SPAN blocks along K, expert): write their weights to out [experts, N, K],
    rows in the layer's order."""
    BLOCK: constexpr = 512 // BITS
    P: constexpr = 16 // BITS
    KB = (K + BLOCK - 1) // BLOCK
    expert = tl.program_id(2)
    out += expert.to(tl.int64) * N * K
    nb = tl.program_id(0)
    first = expert * tl.num_programs(0) + nb  # row block, counted over all experts
    r = tl.arange(0, 16)
    kb = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    at = (
        (first.to(tl.int64) * KB + kb)[None, :, None] * 256
        + r[:, None, None] * 16
        + tl.arange(0, 16)[None, None, :]
    )
    q = tl.load(qweight + at, mask=(kb < KB)[None, :, None], other=0)
    words = tl.reshape(q, (16, SPAN * 16))[:, :, None]
    s, e = (tl.arange(0, 2 * P) // 2)[None, None, :], (tl.arange(0, 2 * P) % 2)[None, None, :]
    if E4M3:  # as places() in layout.py has it
        codes = words >> (16 * e + 7 - 7 * s) & 0x7F | words >> (16 * e + 8 - s) & 0x80
    else:
        codes = words >> (4 * s + 16 * e if BITS == 4 else 16 * s + 8 * e) & (2**BITS - 1)
    # t c s e -> c s t e
    codes = tl.permute(tl.reshape(codes, (16, SPAN, 4, 4, P, 2)), (0, 1, 3, 4, 2, 5))
    codes = tl.reshape(codes, (16, SPAN * BLOCK))

    k = tl.program_id(1) * (SPAN * BLOCK) + tl.arange(0, SPAN * BLOCK)
    chunk = tl.minimum(k // (G * PARTS), C - 1)[None, :]
    scale_row = (first * C + chunk) * SCALE_ROWS + r[:, None] // (16 // SCALE_ROWS)
    group = tl.load(scales_and_zeros + scale_row * PARTS + (k // G % PARTS)[None, :])
    scale = scale_of(group).to(tl.float32)
    # the code's bits in fp32's places are 2^-120 times the number, and the scale is 2^8 times as
    # large
    if E4M3:
        w = ((codes & 0x80) << 24 | (codes & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**112
    elif E2M1:
        w = ((codes & 8) << 28 | (codes & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
    elif group.dtype == tl.float32:
        w = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (2**23 + 2 ** (BITS - 1))
    else:
        # OR-ed into 2^23, an integer is a float without a conversion (see codes_to_weights() in
        # packed_gemm.py)
        w = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (group >> 16 | 0x4B000000).to(
            tl.float32, bitcast=True
        )
    w *= scale
    if GATED:
        n = nb * 8 + r % 8 + r // 8 * (N // 2)
        inside = nb * 8 + r % 8 < N // 2
    else:
        n = nb * 16 + r
        inside = n < N
    tl.store(
        out + n.to(tl.int64)[:, None] * K + k[None, :],
        w.to(out.dtype.element_ty),
        mask=inside[:, None] & (k < K)[None, :],
    )


def dequantize(w: Packed, dtype: torch.dtype, experts: int = 1) -> Tensor:
    """The weights [N, K]; of so many experts, whose row blocks lie one behind the other, [experts
    N, K]."""
    out = torch.empty(experts * w.N, w.K, dtype=dtype, device=w.qweight.device)
    # Of 1 to 16 blocks and 2 to 8 warps, 4 and 2 are the fastest for 14336 x 21504, int4, on an
    # H200.
    grid = len(w.qweight) // experts, triton.cdiv(w.K, 4 * w.block), experts
    of = w.constants
    dequantize_kernel[grid](
        w.qweight,
        w.scales_and_zeros,
        out,
        w.N,
        w.K,
        w.chunks,
        of["group"],
        of["parts"],
        of["scale_rows"],
        of["bits"],
        of["e4m3"],
        of["e2m1"],
        w.gated,
        4,
        num_warps=2,
    )
    return out


def packed_linear(
    x: Tensor,
    w: Packed,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prompt: bool = False,
) -> Tensor:
    """x [M, K] -> residual [M, N] + rms_norm(x, norm)[:, perm] @ w.T + bias [N], what is None left
    out. w.gated: see linear(); then there is no bias and no residual. prompt: see PROMPT_ROWS."""
    if not x.is_cuda:
        return plain_packed_linear(x, w, norm, bias, residual, eps)
    rows = len(x)
    if prompt and rows > MOST_ROWS:  # few() serves fewer
        rows = next((most for most in PROMPT_ROWS if rows <= most), rows)
    choice = choice_for(w, rows, x.device)
    x = x.contiguous()
    if choice["kernel"] == "gemv":
        return gemv(x, w, norm, bias, residual, eps)
    if choice["kernel"] == "few" and w.perm is None:
        if norm is not None and norm.dtype != x.dtype:  # fp32: few.cu has no registers for it
            x, norm = rms_norm(x, norm, eps), None
        return few(x, w, norm, bias, residual, eps)
    if norm is not None:
        # Before perm: a kernel may read norm while norm[perm] is being made.
        x = rms_norm(x, norm, eps)
    if w.perm is not None:
        x = x[:, w.perm]
    if choice["kernel"] == "few":
        return few(x, w, None, bias, residual, eps)
    if choice["kernel"] == "library":
        return library_linear(x, dequantize(w, x.dtype), bias, residual, w.gated)
    return gemm(x, w, bias, residual, choice, rows)


# torch.compile does not look inside of a product, and an operator of its own takes tensors and
# numbers only: the layer is found by the address of its qweight, which differs from layer to layer
# and is yet no constant of the code that layers share.
LAYERS = WeakValueDictionary()


# Nothing is mutated: when the kernels are done, semaphores is as it was.
@library.custom_op("llama_fast::packed_product", mutates_args=())
def packed_product(
    x: Tensor,
    qweight: Tensor,
    columns: int,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prompt: bool = False,
) -> Tensor:
    """packed_linear() of the layer that has this qweight: x [M, K] -> [M, columns]."""
    if not columns:  # of a rank
        return x.new_empty(len(x), 0)
    layer = LAYERS[qweight.data_ptr()]
    return packed_linear(x, layer.packed, norm, layer.bias, residual, eps, prompt)


@packed_product.register_fake
def _(x, qweight, columns, norm=None, residual=None, eps=1e-5, prompt=False):
    return x.new_empty(x.shape[0], columns)  # len() would compile for each number of rows anew


def packs(layer: QuantizedLinear) -> bool:
    """Whether the kernels serve this layer: they know its codes, and fp16 has room for scales that
    zero points stand beside. It has if no weight is moved by more than half the widest step."""
    if layer.codes.name not in KINDS:
        return False
    scales, most = layer.scales.float(), 2**layer.codes.bits - 1
    fits = True
    if scales.numel() and layer.zeros is not None:  # of one rank's rows they may all be the same
        off = (scales.half().float() - scales).abs().amax()
        fits = bool(off * most <= scales.amax() / 2)
    return on_all_ranks(fits, scales.device)


def pack_layer(layer: QuantizedLinear, gated: int) -> Packed:
    """layout.pack() of a layer or of experts, some rows at a time; experts' row blocks lie one
    behind the other. ValueError where no kernel serves it."""
    kind, scales, zeros = layer.codes.name, layer.scales, layer.zeros
    if not packs(layer):
        raise ValueError(f"{kind}: the kernels know {', '.join(KINDS)}, and scales that fp16 holds")
    if zeros is not None:
        zeros = in_row_blocks(zeros, gated)
        if scales.dtype == torch.float32:
            say_once("scales in fp32 are rounded to fp16 where zero points stand beside them")
            scales = scales.half()
    words, scales = in_row_blocks(layer.qweight, gated), in_row_blocks(scales, gated)
    size = max(16, REPACKED // layer.in_features // 16 * 16)
    parts = []
    for start in range(0, max(1, len(words)), size):
        rows = slice(start, start + size)
        codes = codes_of(words[rows], layer.codes.bits)
        points = None if zeros is None else zeros[rows]
        parts.append(pack(codes, scales[rows], points, layer.g_idx, kind))
    qweight = torch.cat([part.qweight for part in parts])
    # 2 only where the rows of all parts share scales.
    most = max(part.scales_and_zeros.shape[2] for part in parts)
    scales = [
        part.scales_and_zeros.repeat_interleave(most // part.scales_and_zeros.shape[2], 2)
        for part in parts
    ]
    return parts[0]._replace(
        qweight=qweight,
        scales_and_zeros=torch.cat(scales),
        semaphores=new_semaphores(qweight),
        N=layer.out_features,
        gated=gated,
    )


class PackedLinear(nn.Module):
    """A QuantizedLinear in the kernels' layout (see layout.py); gated: its rows are the gate's,
    then as many of up.

    Its attributes are a Packed's and the bias; perm, shifts and semaphores are buffers."""

    def __init__(self, layer: QuantizedLinear, gated: int = 0):
        super().__init__()
        if gated and layer.bias is not None:
            raise ValueError("a gated layer with a bias: the kernels have no place for it")
        packed = pack_layer(layer, gated)
        self.N, self.K, self.kind = packed.N, packed.K, packed.kind
        self.group_size, self.gated = packed.group_size, gated
        self.qweight = nn.Parameter(packed.qweight, requires_grad=False)
        self.scales_and_zeros = nn.Parameter(packed.scales_and_zeros, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("perm", packed.perm, persistent=False)
        self.register_buffer("shifts", packed.shifts, persistent=False)
        self.register_buffer("semaphores", packed.semaphores, persistent=False)
        LAYERS[self.qweight.data_ptr()] = self

    @property
    def packed(self) -> Packed:
        tensors = self.qweight, self.scales_and_zeros, self.perm, self.shifts, self.semaphores
        return Packed(*tensors, self.N, self.K, self.kind, self.group_size, self.gated)

    def fused(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        gated: int = 0,
        eps: float = 1e-5,
        prompt: bool = False,
    ) -> Tensor:
        """packed_linear() with these weights: x [M, K] -> [M, N], gated [M, N / 2]. gated: as the
        layer is, which fused_linear()'s other functions must be told."""
        columns = self.N // 2 if self.gated else self.N
        return packed_product(x, self.qweight, columns, norm, residual, eps, prompt)

    def forward(self, x: Tensor) -> Tensor:
        """Prefill, and the halves of a layer that stay model.py's: x [..., K] -> [..., N]; gated:
        [..., N / 2]"""
        return self.fused(x.flatten(0, -2), prompt=True).unflatten(0, x.shape[:-1])

    def try_prompts(self, most: int, dtype: torch.dtype) -> None:
        """Compiles the kernels that prompts of up to so many rows have."""
        for fewer, rows in zip((0, *PROMPT_ROWS), (*PROMPT_ROWS, MAX_ROWS + 1)):
            if fewer < most:
                self(torch.zeros(rows, self.K, dtype=dtype, device=self.qweight.device))

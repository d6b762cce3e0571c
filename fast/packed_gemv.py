"""
The product of one row of x with packed or 16-bit weights, in CUDA C++ (gemv.cu): as fast as they
come from memory.

    out [N] = residual + bias + rms_norm(x) [K] @ w.T
    gated:  out [N / 2] = silu(gate) * up, the halves of that product

A multiprocessor has one program, of one or more teams. A team takes one tile of 16 rows of w after
the other. One of its warps, the producer, streams the tiles through a ring in shared memory and
waits for nothing but a free slot, so that the memory is busy while the kernel before this one ends;
the others divide K among them:

                +------- a slot of the ring -------+--------------+-
                | unit 0    unit 1   ...           | unit WIDTH   |      the next slot
    16 rows     | warp 0    warp 1   ... WIDTH - 1 | warp 0       |
                +----------------------------------+--------------+-

A unit is two blocks of layout.py, 2 KiB. x becomes an integer of 26 bits below the largest |x| of a
warp's inputs, and this four signed digits of 8 bits: digit n of the inputs is column n of the right
operand of mma.m16n8k32, u8 x s8, and a word of codes is its left operand as it is. Sums are exact
integers: nothing is rounded but x, and a group's sum when its scale multiplies it. The other four
columns serve the other half of the unit, so that two groups have sums of their own.

A byte of int4 codes is 16 h + l. With xh and xl, the inputs of the two,

    16 sum (h xh + l xl)  =  sum (16 h + l) xh  +  sum l (16 xl - xh)

needs the byte as it is and, for the second sum, l alone: one AND for eight weights. int8 needs
none. MXFP4's codes become a byte each, by a table: twice the number + 16. FP8's are no integers:
they become fp16, and so does x, divided by a power of two.

The sum of x over a group, which a zero point multiplies, comes from the same digits. The norm's
factor multiplies what a tile's 16 rows give in the end.

Weights of 16 bits stay as PyTorch has them, for a prompt's products. A slot then has 16 rows, each
copied by a lane of the producer, and sums are in fp32. On an H200 gpt-oss-20b makes 695 tokens/s
so, with a Triton kernel for its attention part and its head it made 630; Qwen3-30B-A3B 411 for 374;
Llama-2-7B's share of the read bandwidth stayed at 84 to 85%, and 1B's fell from 73 to 71%.

The experts that a row of x chose are one weight: gate and up have the experts' tiles one behind the
other, each with the same x, and down has longer rows, an expert's behind the other's, so that their
sum needs no other program.

This file, common.cu, gemv.cu, nvrtc.py and layout.py are all that another project needs:

    packed = pack(codes, scales, zeros)    # uint8 [N, K], fp16 [N, C], [N, C], on the GPU
    y = gemv(x, packed)                    # x [1, K] -> [1, N]
"""

import ctypes
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fast import nvrtc
from fast.layout import Packed

HERE = Path(__file__).parent
MOST_WARPS = 16, 8, 4  # of a program, less where shared memory is small
MOST_STAGES = 8


def source_of(name: str) -> str:
    """common.cu and, behind it, gemv.cu, step.cu behind its pieces, or few.cu behind the part of gemv.cu
    that both share."""
    pieces = [f"step_{piece}" for piece in ("base", "product", "router", "attention", "delta")]
    files = dict(gemv=["gemv"], few=["gemv", "few"], step=[*pieces, "step"])[name]
    source = "".join((HERE / f"{file}.cu").read_text() for file in ["common", *files])
    return "#define FEW\n" + source if name == "few" else source


@functools.cache
def kernel(device: int, name: str, shared_bytes: int, **macros: int) -> ctypes.c_void_p:
    """The kernel of gemv.cu or few.cu that is compiled with these macros."""
    major, minor = torch.cuda.get_device_capability(device)
    cubin = nvrtc.compile_cuda(source_of(name), nvrtc.options_for(10 * major + minor, macros))
    return nvrtc.load(cubin, name, shared_bytes)


@functools.cache
def has_gemv(device: torch.device) -> bool:
    """Whether this GPU, and this installation, can run gemv(); a line on stderr if not."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        if major < 8:
            raise OSError(f"gemv.cu wants compute capability 8.0, and {device} has {major}.{minor}")
        nvrtc.compiler(), nvrtc.driver()
    except OSError as error:
        print(
            f"few rows of x are multiplied as many are, which is slower: {error}", file=sys.stderr
        )
        return False
    return True


class Experts(NamedTuple):
    """What a row of x does with the experts of a mixture (fast/experts.py), whose Packed has them
    all.

    active int32 [1 + n]: n, and the numbers of the experts. weights fp32 [1, X] of all experts.
    limit, alpha: of gated = 3, MoEConfig.clamp's."""

    active: Tensor
    weights: Tensor
    limit: float = 0.0
    alpha: float = 0.0


class Plain(NamedTuple):
    """A weight [N, K], or experts' [X, N, K], of x's type, in the place of a Packed."""

    qweight: Tensor
    gated: int = 0
    kind, bits, block, parts, per_channel, chunks = "16-bit", 16, 32, 1, True, 1
    perm = scales_and_zeros = shifts = None
    constants = dict(
        bits=16, e4m3=False, e2m1=False, per_channel=False, group=1, parts=1, scale_rows=16
    )

    @property
    def N(self) -> int:
        return self.qweight.shape[-2]

    @property
    def K(self) -> int:
        return self.qweight.shape[-1]

    @property
    def fits_kernels(self) -> bool:
        return self.K % 8 == 0 and self.qweight.data_ptr() % 16 == 0

    def new_output(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x), self.N // 2 if self.gated else self.N)


def row_blocks(packed: Packed | Plain) -> int:
    """Tiles of 16 rows, of all experts."""
    if packed.bits < 16:
        return len(packed.qweight)
    rows = packed.N // 2 if packed.gated else packed.N
    return -(-rows // (8 if packed.gated else 16)) * packed.qweight.shape[:-2].numel()


def group_in_kernel(packed: Packed | Plain, experts: Experts | None) -> int:
    """GROUP. The sum over experts has scales for each, even of codes with one scale a row."""
    if not packed.per_channel:
        return packed.group_size
    if packed.bits == 16 or experts is None or packed.gated:
        return 0
    return -(-packed.K // packed.block) * packed.block


def sizes_for(
    packed: Packed | Plain, memory: int, experts: Experts | None = None
) -> tuple[dict, int] | None:
    """WIDTH, TEAMS and STAGES, and how much these take of so many bytes of shared memory; None: K
    is too large for it. A team's warps have the same number of units, or one less."""
    n = 0 if experts is None else len(experts.active) - 1
    units = -(-packed.K // (2 * packed.block)) * (1 if packed.gated else max(n, 1))
    words = 4 if packed.kind == "int8" else 8
    parts, group = packed.parts, group_in_kernel(packed, experts)
    scales = packed.scales_and_zeros
    # Bytes of a chunk.
    staged = 16 * parts * scales.element_size() if group and scales.shape[2] == 16 else 0
    plain = packed.bits == 16
    for most in MOST_WARPS:
        width = -(-units // -(-units // most))
        teams = max(1, most // width)
        inputs = max(units * 256, 1024) + 16 if plain else units * (128 * words + 16 * parts)
        fixed = inputs + width * (64 * width + 8) + 16 * MOST_STAGES + 4 * (n + 2)
        stage = (
            width * 2048
            + plain * 1024
            + (width + 1 if group > packed.block else 2 * width) * staged
        )
        stages = min(MOST_STAGES, (memory // teams - fixed - 128) // stage)
        if stages >= 2:
            return dict(WIDTH=width, TEAMS=teams, STAGES=stages), teams * (
                -(-(fixed + stages * stage) // 128) * 128
            )
    return None


def takes_gemv(
    packed: Packed | Plain, device: torch.device, experts: Experts | None = None
) -> bool:
    """Whether gemv() multiplies one row."""
    memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return (
        packed.fits_kernels and has_gemv(device) and sizes_for(packed, memory, experts) is not None
    )


def macros_for(
    x: Tensor,
    packed: Packed | Plain,
    norm: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    experts: Experts | None = None,
) -> dict:
    """What gemv.cu is compiled for, but for its sizes."""
    scales = packed.scales_and_zeros
    return dict(
        BITS=packed.bits,
        E4M3=packed.kind == "fp8",
        E2M1=packed.kind == "mxfp4",
        BF16=x.dtype == torch.bfloat16,
        K=packed.K,
        GROUP=group_in_kernel(packed, experts),
        PARTS=packed.parts,
        SHARED_ROWS=scales is not None and scales.shape[2] == 2,
        FLOAT_SCALES=scales is not None and scales.dtype == torch.float32,
        GATED=packed.gated,
        NORM=norm is not None,
        FLOAT_NORM=norm is not None and norm.dtype == torch.float32,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PERM=packed.perm is not None,
        EXPERTS=0 if experts is None else len(experts.active) - 1,
    )


OUT = 9  # its place among the arguments


def arguments_for(
    x: Tensor,
    packed: Packed | Plain,
    norm: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    experts: Experts | None = None,
) -> tuple[list, int]:
    """-> those of gemv.cu, and how many tiles there are to multiply."""
    active, weights, limit, alpha = experts or Experts(None, None)
    out, tiles = packed.new_output(x[0] if x.dim() == 3 else x), row_blocks(packed)
    tiles = items = tiles if experts is None else tiles // weights.shape[1]
    if experts is not None and packed.gated:
        n = len(active) - 1
        out, items = out.new_empty(n, *out.shape), tiles * n
    return [
        x,
        packed.qweight,
        packed.scales_and_zeros,
        packed.perm,
        norm,
        bias,
        residual,
        active,
        weights,
        out,
        out.shape[-1],
        tiles,
        eps,
        limit,
        alpha,
    ], items


def gemv(
    x: Tensor,
    packed: Packed | Plain,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    experts: Experts | None = None,
) -> Tensor:
    """residual + rms_norm(x, norm) @ w.T + bias in one launch, what is None left out. All of one
    16-bit type; the norm's weights may be fp32.

    x [1, inputs], norm [inputs], bias [N], residual [1, N] -> [1, N]. packed.gated: silu(gate) * up
    [1, N / 2], without residual. With experts bias is [X, N], and what x is and comes is
    expert_linear()'s (fast/experts.py)."""
    properties = torch.cuda.get_device_properties(x.device)
    found = sizes_for(packed, properties.shared_memory_per_block_optin, experts)
    if not packed.fits_kernels or not found:
        raise ValueError(
            f"{packed.kind} in groups of {packed.group_size}, K = {packed.K}: want packed_gemm.py"
        )
    sizes, shared_bytes = found
    macros = macros_for(x, packed, norm, bias, residual, experts)
    arguments, items = arguments_for(x, packed, norm, bias, residual, eps, experts)
    nvrtc.launch(
        kernel(x.device.index, "gemv", shared_bytes, **macros, **sizes),
        min(-(-items // sizes["TEAMS"]), properties.multi_processor_count),
        (sizes["WIDTH"] + 1) * sizes["TEAMS"] * 32,
        shared_bytes,
        arguments,
    )
    return arguments[OUT]

"""
The product of 2 to 8 rows of x with int4 or int8 weights, in CUDA C++ (few.cu), from
packed_gemv.py's ring. This is what verifies a draft's tokens, and what small batches take.

    out [M, N] = residual + bias + rms_norm(x) [M, K] @ w.T
    gated:     out [M, N / 2] = silu(gate) * up, the halves of that product

As in packed_gemv.py a producer streams tiles of 16 rows of w, and the program's other warps divide
K among them. Each keeps its inputs of all rows of x in registers, in fp16, after division by a
power of two that the warp chooses for its part of a row. bf16's numbers stay exact unless they are
far below the largest of that part; with a norm, x times its weight is rounded to fp16. A code needs
no conversion, as the bits of a small integer are, in fp16, that integer times 2^-24: one AND makes
two weights. Sums are in fp32. The sum of a group is scaled when it is complete, and the zero point,
times the sum of the group's x, is taken from it.

Where K is more than a program's registers, or three slots of its shared memory, hold, the two or
four programs of a cluster share it (compute capability 9.0 on; elsewhere packed_gemm.py
multiplies). A warp sends its sums of a tile to the program that adds them up, goes on with the next
tile, and adds up its part of the previous one after that.

Llama-2-7B's four products of a layer took an H200 44 us with 4 rows, int4 in groups of 128; with
packed_gemm.py 61, and with one row 33. With 16 rows this way, in twice the registers or in
clusters, it was 66, with packed_gemm.py 55.
"""

import itertools

import torch
from torch import Tensor

from fast.layout import Packed
from fast.nvrtc import launch, most_clusters
from fast.packed_gemv import has_gemv, kernel, macros_for, row_blocks

MOST_ROWS = 8
WARPS = (16, 32), (11, 64)  # the most of a program, and the most of a thread's registers for x
MOST_STAGES = 16
BUSY, IDLE = 68_000, 34_000  # bytes on their way once x is in registers, and before that


def few_sizes(packed: Packed, memory: int, clusters: tuple[int, ...]) -> tuple[dict, int] | None:
    """few.cu's sizes, and how much they take of so many bytes of shared memory; None: K is too
    large."""
    blocks, parts = -(-packed.K // packed.block), packed.parts
    for cluster, (most, registers) in itertools.product(clusters, WARPS):
        share = -(-blocks // cluster)
        steps = -(-share // most)
        if steps * packed.block // 8 > registers or (cluster - 1) * share >= blocks:
            continue
        width, chunks = -(-share // steps), 0
        if not packed.per_channel:
            chunks = share // max(packed.group_size // packed.block, 1) + 2
        slot = share * 1024 + chunks * 16 * parts * packed.scales_and_zeros.element_size()
        sources, pairs = cluster * width, 4 // cluster
        fixed = (
            sources * (2 * 16 * (8 * pairs + 2) + 8 * pairs)
            + width * steps * parts * 32
            + 16 * MOST_STAGES
            + 160
        )
        # Of `fixed` 256 are barriers, 160 for rounding up.
        stages = min(MOST_STAGES, (memory - fixed) // slot)
        if stages >= 3:
            sizes = dict(
                CLUSTER=cluster,
                WIDTH=width,
                STAGES=stages,
                BUSY=min(stages, max(2, BUSY // slot)),
                IDLE=min(stages, max(1, IDLE // slot)),
            )
            return sizes, -(-(fixed + stages * slot) // 128) * 128
    return None


def sizes_on(packed: Packed, device: torch.device) -> tuple[dict, int] | None:
    properties = torch.cuda.get_device_properties(device)
    return few_sizes(
        packed,
        properties.shared_memory_per_block_optin,
        (1, 2, 4) if properties.major >= 9 else (1,),
    )


def takes_few(packed: Packed, M: int, device: torch.device) -> bool:
    """Whether few() multiplies M rows."""
    return (
        2 <= M <= MOST_ROWS
        and packed.kind in ("int4", "int8")
        and packed.K % 8 == 0
        and packed.fits_kernels
        and packed.scales_and_zeros.shape[2] == 16
        and packed.group_size >= 32
        and has_gemv(device)
        and sizes_on(packed, device) is not None
    )


def few_arguments(
    x: Tensor,
    packed: Packed,
    norm: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
) -> list:
    """Those of few.cu. The seventh is the output."""
    out = packed.new_output(x)
    return [
        x,
        packed.qweight,
        packed.scales_and_zeros,
        norm,
        bias,
        residual,
        out,
        len(x),
        out.shape[1],
        row_blocks(packed),
        eps,
    ]


def few(
    x: Tensor,
    packed: Packed,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """gemv() of 2 to 8 rows: x [M, K] in the codes' order, norm [K], bias [N], residual [M, N] ->
    [M, N]; gated [M, N / 2], without bias and residual."""
    sizes, shared_bytes = sizes_on(packed, x.device)
    threads, cluster = (sizes["WIDTH"] + 1) * 32, sizes["CLUSTER"]
    arguments = few_arguments(x, packed, norm, bias, residual, eps)
    function = kernel(
        x.device.index, "few", shared_bytes, **macros_for(x, packed, norm, bias, residual), **sizes
    )
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    clusters = min(
        row_blocks(packed),
        most_clusters(function.value, threads, shared_bytes, cluster, processors),
    )
    launch(function, clusters * cluster, threads, shared_bytes, arguments, cluster)
    return arguments[6]

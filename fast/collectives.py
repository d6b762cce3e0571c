"""
All-reduce and all-gather of the ranks of one host, each in one launch, which also adds the
residual.

A decode step's messages are a few KB, and what counts is how soon they arrive. So the all-reduce is
one-shot: each rank writes all of x straight into the memory of every peer (PyTorch's symmetric
memory) and sums for itself. The flag is in the data (a Lamport flag, as in TensorRT-LLM's one-shot
all-reduce): -0.0 marks a number that is not written yet.

    rank 0                       rank 1
      x  -------------------->     place 0 of the buffer   1. push x to every peer, 0.0 for -0.0
      place 1 of the buffer <-     x
                                                           2. poll one's buffer until no -0.0
                                                              is left
      x + place 1                  place 0 + x             3. sum in rank order: the same bits
                                                              everywhere
      place 1 = -0.0               place 0 = -0.0          4. reset what was read, for the next
                                                              time

A rank has four buffers [R, CAPACITY], a place for each sender: 0 for wo, 1 for w_down, 2 for the
logits, 3 for a mixture beside a dense part. With launches two exchanges in a row never share a
buffer. So a buffer is always ready: a rank that has finished the second exchange has everyone's
numbers of it, and everyone put -0.0 back into the buffer of the first before sending them. Where
all layers of a step are one launch (step.py), only the logits use a buffer here. That is safe, too:
between two gathers each rank waits in that launch for words of all others, which these send after
they have put -0.0 back.

tp.py's NCCL serves long messages, GPUs that do not reach each other's memory, and fp32.

Shapes: R ranks, M rows, D columns.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor, library

import tp
from fast.common import constexpr, gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton

# Numbers of a place in a buffer; NCCL takes longer messages. One shot took four H200s 8.0 us for
# 512 KiB, PyTorch's two shots 9.8, NCCL 17.4; for 1 MiB 13.0 and 12.6. Eight took, with a residual,
# 17.1 us and 28.3, by NCCL 23.0 and 29.4.
CAPACITY = 2**19
BUFFERS = 4
LOGITS = 2  # fused_all_gather()'s buffer
MIXTURE = 3
NOT_WRITTEN = -32768  # the bits of -0.0 in bf16 and in fp16, as an int16


@jit
def exchange_kernel(
    x,
    residual,
    out,
    buffers,
    N,
    PART,
    RANK: constexpr,
    RANKS: constexpr,
    BUFFER: constexpr,
    SUM: constexpr,
    CAPACITY: constexpr,
    EMPTY: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
):
    """Program (block of BLOCK columns, row): SUM: fused_all_reduce(), else fused_all_gather(); the
    file's steps 1 to 4.

    buffers: each rank's, int16 [BUFFERS, RANKS, CAPACITY]. PART: columns of a rank, N: of the
    result. EMPTY: NOT_WRITTEN."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # fused_all_gather(): the last ranks have fewer columns.
    width = PART if SUM else tl.minimum(PART, N - RANK * PART)
    own = tl.load(x + m * width + c, mask=c < width, other=0).to(tl.int16, bitcast=True)
    own = tl.where(own == EMPTY, 0, own).to(tl.int16)
    at = m * PART + c
    for i in tl.static_range(1, RANKS):
        peer = buffers[(RANK + i) % RANKS]
        tl.store(peer + (BUFFER * RANKS + RANK) * CAPACITY + at, own, mask=c < width)

    received = buffers[RANK] + BUFFER * RANKS * CAPACITY
    total = tl.zeros((BLOCK,), tl.float32)
    if residual is not None:
        total += tl.load(residual + m * N + c, mask=c < N, other=0).to(tl.float32)
    for r in tl.static_range(RANKS):
        inside = c < (PART if SUM else tl.minimum(PART, N - r * PART))
        part = own
        if r != RANK:
            place = received + r * CAPACITY + at
            part = tl.load(place, mask=inside, other=0, volatile=True)
            while tl.sum((part == EMPTY).to(tl.int32)) > 0:
                part = tl.load(place, mask=inside, other=0, volatile=True)
            tl.store(place, tl.full((BLOCK,), EMPTY, tl.int16), mask=inside)
        part = part.to(x.dtype.element_ty, bitcast=True)
        if SUM:
            total += part.to(tl.float32)
        else:
            tl.store(out + m * N + r * PART + c, part, mask=inside)
    if SUM:
        tl.store(out + m * N + c, total.to(out.dtype.element_ty), mask=c < N)


# For on_all_ranks(): gloo adds tensors of the CPU, and no GPU has to wait.
ON_CPU = torch.device("cpu")
# Memory that ranks share is never freed: freeing it waits for the GPU, which is not allowed while a
# graph is captured.
KEPT = []


def memory_of_ranks(
    shape: tuple[int, ...], dtype: torch.dtype, fill: int, device: torch.device
) -> tuple[Tensor, ...] | None:
    """A tensor in each rank's memory, filled with `fill`, in the order of the ranks: this rank can
    read and write all of them. None, on all ranks alike, where some GPU cannot reach another's
    memory.

    All ranks call this together, while no CUDA graph is being captured."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own = tensors = None
    try:
        own = symmetric_memory.empty(shape, dtype=dtype, device=device).fill_(fill)
    except RuntimeError:
        pass  # the other ranks learn it below
    if not tp.on_all_ranks(own is not None, ON_CPU):
        return None
    try:
        handle = symmetric_memory.rendezvous(own, dist.group.WORLD)
        torch.cuda.synchronize(device)
        tensors = [handle.get_buffer(r, shape, dtype) for r in range(dist.get_world_size())]
        tensors[dist.get_rank()] = own
    except RuntimeError:
        pass  # as above
    KEPT.append((own, tensors))
    return tuple(tensors) if tp.on_all_ranks(tensors is not None, ON_CPU) else None


@functools.cache
def communication_buffers(device: torch.device) -> tuple[Tensor, ...] | None:
    """Each rank's buffers, int16 [BUFFERS, R, CAPACITY], as memory_of_ranks() has them."""
    shape = (BUFFERS, dist.get_world_size(), CAPACITY)
    return memory_of_ranks(shape, torch.int16, NOT_WRITTEN, device)


def one_shot(x: Tensor, residual: Tensor | None, columns: int, buffer: int) -> Tensor | None:
    """x [M, D] on a GPU -> the ranks' sum [M, columns] plus the residual or, if buffer is LOGITS,
    the ranks' columns side by side [M, columns]. None, on all ranks alike, where the kernel cannot
    serve."""
    M, D = x.shape
    ranks = dist.get_world_size()
    part = tp.logits_per_rank(columns, ranks) if buffer == LOGITS else D
    if not triton or x.itemsize != 2 or M * part > CAPACITY or not communication_buffers(x.device):
        return None
    out = x.new_empty(M, columns)
    if residual is not None:
        residual = residual.contiguous()
    # At least 128, one number for each thread: if two threads had the same, one would reset it
    # before the other reads.
    block = max(128, min(1024, triton.next_power_of_2(part)))
    pdl = pdl_options(x.device)
    exchange_kernel[(triton.cdiv(part, block), M)](
        x.contiguous(),
        residual,
        out,
        communication_buffers(x.device),
        columns,
        part,
        RANK=dist.get_rank(),
        RANKS=ranks,
        BUFFER=buffer,
        SUM=buffer != LOGITS,
        CAPACITY=CAPACITY,
        EMPTY=NOT_WRITTEN,
        BLOCK=block,
        PDL=bool(pdl),
        num_warps=4,
        **pdl,
    )
    return out


@library.custom_op("llama_fast::fused_all_reduce", mutates_args=())
def fused_all_reduce(x: Tensor, residual: Tensor | None, buffer: int) -> Tensor:
    """The sum of all ranks' x [M, D], plus the residual [M, D] if there is one; the same bits on
    all ranks.

    buffer: 0, 1 and MIXTURE; two sums in a row want different ones."""
    if x.is_cuda and (out := one_shot(x, residual, x.shape[-1], buffer)) is not None:
        return out
    total = tp.all_reduce(x)
    return total if residual is None else residual + total


@fused_all_reduce.register_fake
def _(x, residual, buffer):
    return x.new_empty(x.shape)


@library.custom_op("llama_fast::fused_all_gather", mutates_args=())
def fused_all_gather(x: Tensor, columns: int) -> Tensor:
    """All ranks' x [M, tp.logits_per_rank(columns, R)] side by side -> [M, columns]; the last have
    fewer, or none."""
    if x.is_cuda and (out := one_shot(x, None, columns, LOGITS)) is not None:
        return out
    return tp.all_gather(x, columns)


@fused_all_gather.register_fake
def _(x, columns):
    return x.new_empty(*x.shape[:-1], columns)

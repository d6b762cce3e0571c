"""
What ranks of one host tell each other in a decode step: one shot through symmetric memory, in one launch that also adds
the residual. Long messages, GPUs that do not reach each other's memory and float32 take tp.py's NCCL.

Shapes: R ranks, M rows, D columns.
"""
import functools

import torch
import torch.distributed as dist
from torch import Tensor, library

import tp
from fast.common import constexpr, gdc_launch_dependents, gdc_wait, jit, launch, tl, triton
from tp import part_of

# Of a rank's place in a mailbox, in numbers; NCCL takes what is longer. One shot took four H200s 8.0 us for 512 KiB,
# PyTorch's two shots 9.8, NCCL 17.4; for 1 MiB 13.0 and 12.6. Eight took, with a residual, 17.1 us and 28.3, by NCCL
# 23.0 and 29.4.
CAPACITY = 2 ** 19
LIBRARY, LOGITS = -1, 2  # in the place of a mailbox: none of them; the one that all_gather() has for itself


@jit
def exchange_kernel(x, residual, out, boxes, N, PART, RANK: constexpr, RANKS: constexpr, BOX: constexpr,
                    SUM: constexpr, CAPACITY: constexpr, BLOCK: constexpr, PDL: constexpr):
    """all_reduce() or, if not SUM, all_gather() of BLOCK columns of a row.

    -0 says that a number is not there yet: each rank writes its own, among which there is none, to its place in the
    others' mailboxes, reads its own box until theirs have come, and puts -0 back. The order of the sum is the same on
    all ranks, and so are its bits."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    width = PART if SUM else tl.minimum(PART, N - RANK * PART)
    mine = tl.load(x + m * width + c, mask=c < width, other=0).to(tl.int16, bitcast=True)
    mine = tl.where(mine == -32768, 0, mine).to(tl.int16)
    at = m * PART + c
    for i in tl.static_range(1, RANKS):
        box = boxes[(RANK + i) % RANKS]
        tl.store(box + (BOX * RANKS + RANK) * CAPACITY + at, mine, mask=c < width)
    box = boxes[RANK] + BOX * RANKS * CAPACITY
    total = tl.zeros((BLOCK,), tl.float32)
    if residual is not None:
        total += tl.load(residual + m * N + c, mask=c < N, other=0).to(tl.float32)
    for r in tl.static_range(RANKS):
        inside = c < (PART if SUM else tl.minimum(PART, N - r * PART))
        part = mine
        if r != RANK:
            place = box + r * CAPACITY + at
            part = tl.load(place, mask=inside, other=0, volatile=True)
            while tl.sum((part == -32768).to(tl.int32)) > 0:
                part = tl.load(place, mask=inside, other=0, volatile=True)
            tl.store(place, tl.full((BLOCK,), -32768, tl.int16), mask=inside)
        part = part.to(x.dtype.element_ty, bitcast=True)
        if SUM:
            total += part.to(tl.float32)
        else:
            tl.store(out + m * N + r * PART + c, part, mask=inside)
    if SUM:
        tl.store(out + m * N + c, total.to(out.dtype.element_ty), mask=c < N)


@functools.cache
def mailboxes(device: torch.device) -> tuple[Tensor, ...] | None:
    """Three boxes [3, R, CAPACITY] of each rank, all of which all ranks write into; None where some GPU cannot reach
    another's memory. The ranks call it together, no CUDA graph being captured."""
    import torch.distributed._symmetric_memory as symmetric_memory
    shape, found = (3, dist.get_world_size(), CAPACITY), torch.zeros(1)
    try:
        own = symmetric_memory.empty(shape, dtype=torch.int16, device=device).fill_(-32768)
        handle = symmetric_memory.rendezvous(own, dist.group.WORLD)
        torch.cuda.synchronize(device)
        found += 1
    except RuntimeError:
        pass
    dist.all_reduce(found, dist.ReduceOp.MIN)  # a host's tensor: gloo
    if not found:
        return None
    boxes = [handle.get_buffer(r, shape, torch.int16) for r in range(shape[1])]
    boxes[dist.get_rank()] = own  # which keeps them all alive
    return tuple(boxes)


def exchange(x: Tensor, residual: Tensor | None, columns: int, box: int) -> Tensor | None:
    """x [M, D], of 16 bits -> the sum [M, columns] or, of LOGITS, the ranks' columns side by side; None where it is not
    for the kernel. Of two exchanges in a row, each has another box: a rank that is in the next one has emptied it."""
    M, D = x.shape
    part = D if box != LOGITS else part_of(columns, dist.get_world_size())
    if box == LIBRARY or not triton or x.itemsize != 2 or M * part > CAPACITY or not mailboxes(x.device):
        return None
    # No thread shares a number with another: one would read it when the other has put -0 back.
    block, pdl = max(128, min(1024, triton.next_power_of_2(part))), launch(x.device)
    out, residual = x.new_empty(M, columns), None if residual is None else residual.contiguous()
    exchange_kernel[(triton.cdiv(part, block), M)](
        x.contiguous(), residual, out, mailboxes(x.device), columns, part, dist.get_rank(), dist.get_world_size(),
        box, box != LOGITS, CAPACITY, block, bool(pdl), num_warps=4, **pdl)
    return out


@library.custom_op("llama_fast::fused_all_reduce", mutates_args=())
def all_reduce(x: Tensor, residual: Tensor | None, box: int) -> Tensor:
    """The sum of all ranks' x [M, D], and residual; the same bits on all ranks. box: 0 and 1 in turn."""
    if x.is_cuda and (out := exchange(x, residual, x.shape[-1], box)) is not None:
        return out
    total = tp.all_reduce(x)
    return total if residual is None else residual + total


@all_reduce.register_fake
def _(x, residual, box):
    return x.new_empty(x.shape)


@library.custom_op("llama_fast::fused_all_gather", mutates_args=())
def all_gather(x: Tensor, columns: int) -> Tensor:
    """All ranks' x [M, part_of(columns, R)], side by side: [M, columns]; the last have fewer columns, or none."""
    if x.is_cuda and (out := exchange(x, None, columns, LOGITS)) is not None:
        return out
    return tp.all_gather(x, columns)


@all_gather.register_fake
def _(x, columns):
    return x.new_empty(*x.shape[:-1], columns)

"""
The ranks of tensor parallelism as processes, and what they tell each other: sums of vectors, the parts of the logits.

A decode step's messages are a few KB, and what counts is how soon they are there. On one host each GPU writes its part
straight into the memory of the others (PyTorch's symmetric memory, one shot) in one launch, which also adds the
residual up. Long messages, GPUs that do not reach each other's memory and float32 take NCCL; CPUs take gloo.

Shapes: R ranks, M rows, D columns.
"""
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library

from checkpoint import UserError
from command import find_device, report_errors, world_size
from kernels import constexpr, gdc_launch_dependents, gdc_wait, jit, launch, tl, triton

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


def part_of(columns: int, ranks: int) -> int:
    """How many columns each rank has but the last: a multiple of 8, as packed weights want it."""
    return -(-columns // (8 * ranks)) * 8


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


@library.custom_op("llama_fast::all_reduce", mutates_args=())
def all_reduce(x: Tensor, residual: Tensor | None, box: int) -> Tensor:
    """The sum of all ranks' x [..., D], and residual; the same bits on all ranks. box: LIBRARY, or 0 and 1 in turn."""
    rows = x.flatten(0, -2)
    if x.is_cuda and (out := exchange(rows, residual, x.shape[-1], box)) is not None:
        return out.view(x.shape)
    total = (x if x.is_cuda else x.float()).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.to(x.dtype) if residual is None else (residual + total).to(x.dtype)


@all_reduce.register_fake
def _(x, residual, box):
    return x.new_empty(x.shape)


@library.custom_op("llama_fast::all_gather", mutates_args=())
def all_gather(x: Tensor, columns: int, box: int) -> Tensor:
    """All ranks' x [..., part_of(columns, R)], side by side: [..., columns]; the last have fewer columns, or none. box:
    LIBRARY or LOGITS."""
    rows, ranks = x.flatten(0, -2), dist.get_world_size()
    if x.is_cuda and (out := exchange(rows, None, columns, box)) is not None:
        return out.view(*x.shape[:-1], columns)
    part = part_of(columns, ranks)
    parts = [rows.new_empty(len(rows), part) for _ in range(ranks)]
    dist.all_gather(parts, F.pad(rows, (0, part - rows.shape[1])))
    return torch.cat(parts, dim=1)[:, :columns].reshape(*x.shape[:-1], columns)


@all_gather.register_fake
def _(x, columns, box):
    return x.new_empty(*x.shape[:-1], columns)


@dataclass
class Team:
    """The ranks of this run, one if torchrun did not start it."""
    rank: int = 0
    ranks: int = 1
    store: dist.Store | None = None
    agreed: int = 0

    def agree(self, value):
        """Rank 0's value, on all ranks; of a function, what it gives there. Anything that JSON holds."""
        if self.rank == 0:
            value = value() if callable(value) else value
        if self.ranks == 1:
            return value
        self.agreed += 1
        if self.rank == 0:
            self.store.set(f"agreed {self.agreed}", json.dumps(value))
            self.store.delete_key(f"agreed {self.agreed - 1000}")  # no rank is that late
        return json.loads(self.store.get(f"agreed {self.agreed}"))


def join(device: str | None) -> tuple[torch.device, Team]:
    """This rank's device and its team; --device names the kind."""
    if (ranks := world_size()) == 1:
        return find_device(device), Team()
    names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    if missing := [name for name in names if name not in os.environ]:
        raise UserError(f"WORLD_SIZE is {ranks}, {', '.join(missing)} not set: torchrun starts ranks, and sets them")
    rank, local, here = (int(os.environ[name]) for name in names[:3])
    kind, gpus = device or ("cuda" if torch.cuda.is_available() else "cpu"), torch.cuda.device_count()
    if kind not in ("cuda", "cpu"):
        raise UserError(f"--device {device}: {ranks} ranks take a GPU each, or a CPU; want cuda or cpu")
    if kind == "cuda" and here > gpus > 0:
        raise UserError(f"{here} ranks and {gpus} GPUs on this host: want --nproc-per-node {gpus} at most, or "
                        "--device cpu")
    found = find_device(f"cuda:{local}" if kind == "cuda" else "cpu")
    # NVLink multicast stays off: a program that dies with it can leave a host's GPUs unusable for all.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    store, _, _ = next(dist.rendezvous("env://"))
    store.set_timeout(timedelta(days=365))  # a chat waits for its user
    store.set(f"torch {rank}", torch.__version__)
    versions = [store.get(f"torch {r}").decode() for r in range(ranks)]
    if len(set(versions)) > 1:
        raise UserError(f"the ranks have PyTorch {', '.join(versions)}: install the same version everywhere")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=ranks)
    return found, Team(rank, ranks, store)


def run(main: Callable[[], None]) -> None:
    """command.report_errors() for torchrun's ranks: rank 0 speaks, and when one ends, all do, wherever they are."""
    rank = int(os.environ.get("RANK", 0))
    if world_size() == 1:
        return report_errors(main, ranks=True)
    came, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)  # the main thread may be waiting for a GPU that waits for another
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, lambda *_: None)

    def end_on_signal() -> None:
        interrupted = os.read(came, 1)[0] == signal.SIGINT
        try:
            if rank == 0:
                why = "interrupted" if interrupted else "ended from outside, or as another rank did"
                os.write(2, f"{os.path.basename(sys.argv[0])}: {why}\n".encode())
        finally:
            os._exit(130 if interrupted else 143)

    def work() -> None:
        try:
            main()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if dist.is_initialized():
                dist.all_reduce(torch.zeros(1))  # no rank leaves while another needs its memory
        except (UserError, OSError):
            time.sleep(2 * (rank > 0))  # by then torchrun has ended this rank if rank 0 failed, too
            sys.stderr = sys.__stderr__
            raise
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                sys.stderr = sys.__stderr__
                raise
            time.sleep(5)  # torchrun tells it first
            raise UserError(f"another rank ended: {error}") from error

    threading.Thread(target=end_on_signal, daemon=True).start()
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    code = 1
    try:
        report_errors(work, ranks=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # a bug
        sys.stderr = sys.__stderr__
        sys.excepthook(*sys.exc_info())
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)  # what NCCL and CUDA graphs hold would hang on its way out

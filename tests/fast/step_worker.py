"""
What test_step.py has ranks do: torchrun ... step_worker.py DEVICE DIRECTORY CASES ...

DIRECTORY has a checkpoint for each case. Each rank writes to DIRECTORY/out.RANK, of three tokens of
each case, what its step gives, what the whole model gives in float64, and what entered both.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cli.errors import run as run_rank
from fast import use_kernels
from fast.collectives import memory_of_ranks
from fast.step import WARPS, Step, unsupported
from gemv_on_cpu import step_on_cpu
from helpers import CPU, load_checkpoint
from hub.vet import find_device
from test_step import (
    BF16,
    SHARED_CASES,
    fill_rings,
    in_float64,
    with_clear_choices,
    with_clearer_routers,
)
from tp import Team, join, splitter
from tp_worker import late


def words_of_ranks(
    directory: Path, team: Team, dim: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Of CPUs in files that all ranks have in their memory."""
    if device.type == "cuda":
        return memory_of_ranks((2, team.ranks, dim), torch.int64, 0, device)
    paths = [str(directory / f"words.{rank}") for rank in range(team.ranks)]
    size = 2 * team.ranks * dim
    rank_words = [torch.from_file(path, True, size, dtype=torch.int64) for path in paths]
    dist.barrier()
    return tuple(rank_words)


@torch.no_grad()
def steps(team: Team, device: torch.device, directory: Path, case: str) -> list[tuple]:
    """[(found, expected, x)], of positions 0, 1 and 2"""
    _, _, quantize, group, programs = SHARED_CASES[case]
    exact = load_checkpoint(directory, CPU, BF16, quantize, group)
    model = load_checkpoint(directory, device, BF16, quantize, group, split=splitter(team))
    for whole_or_part in (exact, model):
        with_clearer_routers(whole_or_part)
        whole_or_part.setup(16, 1)
    exact = in_float64(exact)
    decoder, sizes = use_kernels(model).decoder, (programs, 232_448, 8)
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        sizes = of.multi_processor_count, of.shared_memory_per_block_optin, WARPS
        assert decoder.one_row.ranks == team.ranks
    assert unsupported(decoder) is None
    fill_rings(decoder, 0)
    rank_words = words_of_ranks(directory, team, exact.config.dim, device)
    step = Step(decoder, *sizes, team.rank, rank_words)
    own, found = directory / str(team.rank), []
    own.mkdir()
    torch.manual_seed(7)
    for at in range(3):
        x, expected = with_clear_choices(exact, at)
        positions = torch.tensor([[at]], device=device)
        if device.type == "cuda":
            y = step(x.to(device), positions).cpu()
        else:
            y = step_on_cpu(own, step, x, positions).clone()
        found.append((y, expected, x))
    if device.type == "cuda":
        assert repeats(team, device, partial(step, x.to(device), positions))
    return found


def repeats(team: Team, device: torch.device, step: Callable) -> bool:
    """Whether thousands of steps give the same bits, though now and then a rank is late."""
    first, others = step(), torch.zeros((), device=device)
    for n in range(3000):
        late(team, device, n)
        others += (step() != first).any()
    return others.item() == 0


def main() -> None:
    kind, directory, *cases = sys.argv[1:]
    (name, team), directory = join(kind), Path(directory)
    device = find_device(name)
    found = {case: steps(team, device, directory / case, case) for case in cases}
    torch.save(found, directory / f"out.{team.rank}")


if __name__ == "__main__":
    run_rank(main)

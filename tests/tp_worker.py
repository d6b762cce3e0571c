"""
What test_tp.py has ranks do: torchrun ... tp_worker.py DEVICE CASES OUT

CASES is a JSON file: of each case its name, a function of this file and its arguments. Each rank writes what the
functions gave to OUT.RANK; test_tp.py calls the same functions for what one rank gives.
"""
import sys
from pathlib import Path

import torch
from torch import Tensor

from cli.errors import run as run_rank
from generate import Engine
from guard import find_device
from helpers import EAGLE, TINY, load_checkpoint, open_tokenizer, read_json, run, speculator, tiny_head
from model import Transformer
from sampling import Sampling
from tp import Team, all_gather, all_reduce, join, part_of, splitter

SUMS, REPLAYS, VOCABULARIES = 100, 50, (2047, 2049, 49153)
DTYPES = dict(float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16)


def load(team: Team, device: torch.device, checkpoint: str, dtype: str = "float32", **how) -> Transformer:
    return load_checkpoint(Path(checkpoint), device, DTYPES[dtype], split=splitter(team), **how)


def prompts() -> list[list[int]]:
    """Of 17, 1 and 9 tokens."""
    tokenizer = open_tokenizer(TINY)
    story = tokenizer.encode_text("Tom had a red ball. Tom liked his red ball. One day, Tom and his ball went.")
    return [story[:n] for n in (17, 1, 9)]


@torch.no_grad()
def logits(team: Team, device: torch.device, checkpoint: str, fused: bool = False, **how) -> Tensor:
    """[2, 12, V]: of 8 tokens, then of 4 that see them in the cache. fused: with fast/'s modules."""
    model = load(team, device, checkpoint, **how)
    model.setup(12, 2)
    decoder = model
    if fused:
        from fast.decoder import install_kernels
        decoder = install_kernels(model)
    tokens = torch.arange(24).view(2, 12) * 7 % model.config.vocab_size
    positions = torch.arange(12).expand(2, 12)
    return torch.cat([read(tokens[:, at], positions[:, at])
                      for read, at in ((model, slice(0, 8)), (decoder, slice(8, 12)))], dim=1)


def tokens(team: Team, device: torch.device, checkpoint: str, draft: str | None = None, policy: str = "auto",
           split_draft: bool = False, mode: str = "eager", temperature: float = 0, new: int = 24,
           cache: str = "16-bit", **how) -> dict:
    """New tokens of a ragged batch; a speculator's counts; whether kernels decode."""
    model, smaller = load(team, device, checkpoint, **how), None
    if draft == str(EAGLE):
        smaller = tiny_head(split=splitter(team)).to(device, model.embed.weight.dtype)
    elif draft and draft != "prompt-lookup":
        smaller = load(team if split_draft else Team(), device, draft, how.get("dtype", "float32"))
    rows, sampling = len(prompts()), Sampling(temperature)
    if draft:
        runner = speculator(model, 17 + new, smaller, policy, rows, sampling, mode, team.agree, cache)
        engine = runner.target
    else:
        runner = engine = Engine(model, 17 + new, rows, sampling, mode, cache=cache)
    if mode != "eager":
        engine.warm_up(rows, runner if draft else None, team.ranks == 1)
    torch.manual_seed(5)
    return dict(rows=run(runner, prompts(), new), counts=dict(runner.counts) if draft else {}, kernels=engine.kernels)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Numbers, 0 and -0, which marks a number that is not written yet in fast/'s communication buffers."""
    x = torch.randn(shape, generator=random) * (torch.rand(shape, generator=random) < 0.7)
    x[..., ::5] = -0.0  # of all ranks
    return x.to(dtype)


def sum_inputs(ranks: int, dtype: str) -> list[tuple[Tensor, Tensor | None]]:
    """Each rank's x [R, M, D] and residual, the same on all ranks. The longest does not fit into a buffer."""
    random = torch.Generator().manual_seed(1)
    widths, inputs = (1000, 576, 4096, 1023, 2048, 48, 5120), []
    for n in range(SUMS):
        M, D = int(torch.randint(1, 17, (1,), generator=random)), widths[n % len(widths)]
        M = 150 if n % 40 == 23 else M
        x, residual = (drawn((*size, M, D), DTYPES[dtype], random) for size in ((ranks,), ()))
        inputs.append((x, None if n % 3 == 0 else residual))
    return inputs


def late(team: Team, device: torch.device, n: int) -> None:
    """Now and then a rank is."""
    if device.type == "cuda" and n % 7 == team.rank:
        torch.cuda._sleep(200_000)


def sums(team: Team, device: torch.device, dtype: str, fused: bool) -> list[Tensor]:
    """The all-reduce of sum_inputs(), one launched after the other; fast/'s adds the residual too."""
    out, inputs = [], [(x[team.rank].to(device), None if residual is None else residual.to(device))
                       for x, residual in sum_inputs(team.ranks, dtype)]
    for n, (x, residual) in enumerate(inputs):
        late(team, device, n)
        if fused:
            from fast.collectives import fused_all_reduce
            out.append(fused_all_reduce(x, residual, n % 2))
        else:
            out.append(all_reduce(x))
    return [t.cpu() for t in out]


def capacity(team: Team, device: torch.device) -> int:
    """The numbers that fast/'s kernel sends at once; 0 where the GPUs do not reach each other's memory."""
    from fast.collectives import CAPACITY, communication_buffers
    return CAPACITY if communication_buffers(device) else 0


def gather_inputs(ranks: int, dtype: str) -> list[Tensor]:
    """Logits [M, V]: of odd vocabularies, of one that leaves the last rank next to nothing, and of one too long for a
    communication buffer."""
    random = torch.Generator().manual_seed(2)
    shapes = [(M, V) for V in (*VOCABULARIES, ranks * (ranks - 1) + 1) for M in (1, 2, 5, 16)] + [(16, 151937)]
    return [drawn(shape, DTYPES[dtype], random) for shape in shapes]


def ranks_part(x: Tensor, team: Team) -> Tensor:
    part = part_of(x.shape[-1], team.ranks)
    return x[..., team.rank * part:(team.rank + 1) * part]


def gathers(team: Team, device: torch.device, dtype: str, fused: bool) -> list[Tensor]:
    """The all-gather of gather_inputs(); a sum between two of them, as layers are."""
    inputs, out = [ranks_part(x, team).to(device) for x in gather_inputs(team.ranks, dtype)], []
    widths, small = [x.shape[-1] for x in gather_inputs(team.ranks, dtype)], inputs[0].new_zeros(1, 256)
    for n, (x, width) in enumerate(zip(inputs, widths)):
        late(team, device, n)
        if fused:
            from fast.collectives import fused_all_gather, fused_all_reduce
            fused_all_reduce(small, None, 0)
            out.append(fused_all_gather(x, width))
        else:
            all_reduce(small)
            out.append(all_gather(x, width))
    return [t.cpu() for t in out]


def graph_inputs(ranks: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    sizes = (REPLAYS, ranks, 2, 1000), (REPLAYS, 2, 1000), (REPLAYS, 2, 2049)
    return tuple(drawn(size, DTYPES[dtype], random) for size in sizes)


def graph(team: Team, device: torch.device, dtype: str) -> tuple[Tensor, ...]:
    """A CUDA graph of two sums, the second of the first, and of logits, replayed with other inputs each time."""
    from fast.collectives import fused_all_gather, fused_all_reduce
    x, residual, whole = (t.to(device) for t in graph_inputs(team.ranks, dtype))
    mine, parts, out = x[:, team.rank].contiguous(), ranks_part(whole, team).contiguous(), []
    now = [t[0].clone() for t in (mine, residual, parts)]

    def step() -> tuple[Tensor, ...]:
        first = fused_all_reduce(now[0], now[1], 0)
        return first, fused_all_reduce(first, now[1], 1), fused_all_gather(now[2], whole.shape[-1])

    step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        given = step()
    for n in range(REPLAYS):
        for place, inputs in zip(now, (mine, residual, parts)):
            place.copy_(inputs[n])
        late(team, device, n)
        captured.replay()
        out.append([t.clone() for t in given])
    return tuple(torch.stack(t).cpu() for t in zip(*out))


def main() -> None:
    kind, cases, out = sys.argv[1:]
    (name, team), cases = join(kind), read_json(Path(cases))
    device, results = find_device(name), dict(cases=cases)
    for name, (function, args) in cases.items():
        torch._dynamo.reset()
        try:
            results[name] = globals()[function](team, device, **args)
        except Exception as error:  # that of one case, if it is the same on all ranks, spoils no other
            results[name] = repr(error)
    torch.save(results, f"{out}.{team.rank}")


if __name__ == "__main__":
    run_rank(main)

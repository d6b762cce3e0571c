"""
What test_tp.py has ranks do: torchrun ... tp_worker.py DEVICE CASES OUT

CASES is a JSON file: of each case its name, a function of this file and its arguments. Each rank
writes what the functions gave to OUT.RANK; test_tp.py calls the same functions for what one rank
gives.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cli.errors import run as run_rank
from drafts import open_draft
from hub import formats
from hub.checkpoint import Checkpoint
from hub.vet import find_device
from helpers import (
    ENGINES,
    EAGLE,
    TINY,
    load_checkpoint,
    open_tokenizer,
    read_json,
    run,
    speculator,
    tiny_head,
    traced,
)
from model import Transformer
from generate import Sampling
from speculative import Speculator
from tp import Team, all_gather, all_reduce, join, logits_per_rank, splitter

REPLAYS = 50


def load(
    team: Team, device: torch.device, checkpoint: str, dtype: str = "float32", **how
) -> Transformer:
    return load_checkpoint(
        Path(checkpoint), device, getattr(torch, dtype), split=splitter(team), **how
    )


def prompts() -> list[list[int]]:
    """Of 17, 1 and 9 tokens."""
    text = "Tom had a red ball. Tom liked his red ball. One day, Tom and his ball went."
    story = open_tokenizer(TINY).encode_text(text)
    return [story[:n] for n in (17, 1, 9)]


@torch.no_grad()
def logits(team: Team, device: torch.device, checkpoint: str, fused: bool = False, **how) -> Tensor:
    """[2, 12, V]: of 8 tokens, then of 4 that see them in the cache. fused: with fast/'s
    modules."""
    model = decoder = load(team, device, checkpoint, **how)
    model.setup(12, 2)
    if fused:
        from fast.decoder import install_kernels

        decoder = install_kernels(model)
    tokens = torch.arange(24).view(2, 12) * 7 % model.config.vocab_size
    positions = torch.arange(12).expand(2, 12)
    read = model(tokens[:, :8], positions[:, :8])
    return torch.cat([read, decoder(tokens[:, 8:], positions[:, 8:])], dim=1)


def watch(runner: Speculator) -> list[list[list[int]]]:
    """What is drafted in each step."""
    propose, drafts = runner.draft.propose, []

    def watched(*step):
        drafted, *more = propose(*step)
        drafts.append(drafted.tolist())
        return drafted, *more

    runner.draft.propose = watched
    return drafts


def tokens(
    team: Team,
    device: torch.device,
    checkpoint: str,
    draft: str | None = None,
    policy: str = "auto",
    split_draft: bool = False,
    mode: str = "eager",
    temperature: float = 0,
    new: int = 24,
    cache: str = "16-bit",
    batch: int = 3,
    **how,
) -> dict:
    """New tokens of a ragged batch; a speculator's counts; what was drafted, eagerly; whether
    kernels decode, and whether all layers of a row are one launch."""
    model, smaller = load(team, device, checkpoint, **how), None
    if draft == str(EAGLE):
        smaller = tiny_head(split=splitter(team)).to(device, model.embed.weight.dtype)
    elif draft and (draft == "mtp" or "dflash" in draft or "assistants" in draft):
        source = open_draft(draft, (Checkpoint(Path(checkpoint)), None))
        split = splitter(team) if split_draft else None
        smaller = formats.load(source, device, model.embed.weight.dtype, split=split)
    elif draft and draft != "prompt-lookup":
        smaller = load(team if split_draft else Team(), device, draft, how.get("dtype", "float32"))
    texts = [[token % model.config.vocab_size for token in text] for text in prompts()[:batch]]
    rows, sampling = len(texts), Sampling(temperature)
    if draft:
        runner = speculator(
            model, 17 + new, smaller, policy, rows, sampling, mode, team.agree, cache
        )
        engine = runner.target
    else:
        runner = engine = ENGINES[mode](model, 17 + new, rows, sampling, cache=cache)
    if mode != "eager":
        runner.warm_up(rows, team.ranks == 1)
    drafts = watch(runner) if draft and mode == "eager" else []
    torch.manual_seed(5)
    return dict(
        rows=run(runner, texts, new),
        counts=dict(runner.counts) if draft else {},
        drafts=drafts,
        kernels=getattr(engine, "kernels", False),
        one_launch=getattr(getattr(engine, "decoder", None), "one_row", None) is not None,
    )


def drawn(shape: tuple[int, ...], dtype: str, random: torch.Generator) -> Tensor:
    """Numbers, 0 and -0, which marks a number that is not written yet in fast/'s communication
    buffers."""
    x = torch.randn(shape, generator=random) * (torch.rand(shape, generator=random) < 0.7)
    x[..., ::5] = -0.0  # of all ranks
    return x.to(getattr(torch, dtype))


def sum_inputs(ranks: int, dtype: str) -> list[tuple[Tensor, Tensor | None]]:
    """Each rank's x [R, M, D] and residual, the same on all ranks. The longest does not fit into a
    buffer."""
    random = torch.Generator().manual_seed(1)
    widths, inputs = (1000, 576, 4096, 1023, 2048, 48, 5120), []
    for n in range(100):
        M, D = int(torch.randint(1, 17, (1,), generator=random)), widths[n % len(widths)]
        M = 150 if n % 40 == 23 else M
        x, residual = drawn((ranks, M, D), dtype, random), drawn((M, D), dtype, random)
        inputs.append((x, None if n % 3 == 0 else residual))
    return inputs


def late(team: Team, device: torch.device, n: int) -> None:
    """Now and then a rank is."""
    if device.type == "cuda" and n % 7 == team.rank:
        torch.cuda._sleep(200_000)


def collectives(fused: bool) -> tuple[Callable, Callable]:
    """(x, residual, buffer) -> the sum, and (part, columns) -> the whole: fast/'s kernels, or
    tp.py's, of which the sum is without the residual."""
    if not fused:
        return lambda x, residual, buffer: all_reduce(x), all_gather
    from fast.collectives import fused_all_gather, fused_all_reduce

    return fused_all_reduce, fused_all_gather


def exchange(team: Team, device: torch.device, dtype: str, fused: bool) -> dict[str, list[Tensor]]:
    """The sums of sum_inputs(), one launched after the other; then the whole of gather_inputs(), a
    sum between two of them, as layers are."""
    reduce, gather = collectives(fused)
    sums, inputs = (
        [],
        [
            (x[team.rank].to(device), None if residual is None else residual.to(device))
            for x, residual in sum_inputs(team.ranks, dtype)
        ],
    )
    for n, (x, residual) in enumerate(inputs):
        late(team, device, n)
        sums.append(reduce(x, residual, n % 2))
    sums = [x.cpu() for x in sums]
    gathered, parts = (
        [],
        [(ranks_part(x, team).to(device), x.shape[-1]) for x in gather_inputs(team.ranks, dtype)],
    )
    small = parts[0][0].new_zeros(1, 256)
    for n, (part, columns) in enumerate(parts):
        late(team, device, n)
        reduce(small, None, 0)
        gathered.append(gather(part, columns))
    return dict(sums=sums, gathered=[x.cpu() for x in gathered])


def capacity(team: Team, device: torch.device) -> int:
    """The numbers that fast/'s kernel sends at once; 0 where the GPUs do not reach each other's
    memory."""
    from fast.collectives import CAPACITY, communication_buffers

    return CAPACITY if communication_buffers(device) else 0


def gather_inputs(ranks: int, dtype: str) -> list[Tensor]:
    """Logits [M, V]: of odd vocabularies, of one that leaves the last rank next to nothing, and of
    one too long for a communication buffer."""
    random, vocabularies = (
        torch.Generator().manual_seed(2),
        (2047, 2049, 49153, ranks * (ranks - 1) + 1),
    )
    shapes = [(M, V) for V in vocabularies for M in (1, 2, 5, 16)] + [(16, 151937)]
    return [drawn(shape, dtype, random) for shape in shapes]


def ranks_part(x: Tensor, team: Team) -> Tensor:
    part = logits_per_rank(x.shape[-1], team.ranks)
    return x[..., team.rank * part : (team.rank + 1) * part]


def graph_inputs(ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    sizes = (REPLAYS, ranks, 2, 1000), (REPLAYS, 2, 1000), (REPLAYS, 2, 2049)
    return tuple(drawn(size, "bfloat16", random) for size in sizes)


def graph(team: Team, device: torch.device) -> tuple[Tensor, ...]:
    """A CUDA graph of two sums, the second of the first, and of logits, replayed with other inputs
    each time."""
    from fast.collectives import fused_all_gather, fused_all_reduce

    x, residual, whole = (t.to(device) for t in graph_inputs(team.ranks))
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
    if kind == "cpu":
        traced().start()
    device, results = find_device(name), dict(cases=cases)
    for name, (function, args) in cases.items():
        torch._dynamo.reset()
        results[name] = globals()[function](team, device, **args)
    torch.save(results, f"{out}.{team.rank}")


if __name__ == "__main__":
    run_rank(main)

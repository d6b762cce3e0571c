"""
What is printed and written: texts as they come, progress, the report, and files that are there
whole or not at all.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import torch

from llm import Completion
from llm import LLM, import_fast
from hub.vet import GIB

CONTROLS = dict.fromkeys(
    {*range(32), *range(127, 160)} - set(b"\n\t")
)  # for str.translate(), which drops them


# Texts


def add_headings(completions: list[Completion], chat: bool, samples: int):
    """What is printed before each text: the prompt that it continues or, of a batch, a line that
    names the prompt."""
    for i, completion in enumerate(completions):
        sample = f" ({i % samples + 1})" if samples > 1 else ""
        completion.heading = f"--- {completion.prompt}{sample}\n"
    if len(completions) == 1:
        completions[0].heading = "" if chat else completions[0].prompt


def show(completions: list[Completion], steps: Iterator[None] = iter(()), thinking: bool = False):
    """Takes the steps that fill the completions, and prints what each brings, under its heading.
    The first unfinished completion is streamed, the others follow in their turn. A terminal gets no
    control characters: the model may have learnt, or been told, to write some that it obeys.
    thinking: what the model thinks goes to stderr."""
    dropped = CONTROLS if sys.stdout.isatty() else {}
    for completion in completions:
        heading = completion.heading
        if completion.finish_reason == "time":
            heading = f"{heading.rstrip()} [unfinished]\n".lstrip()
        sys.stdout.write(heading.translate(dropped))
        shown = told = 0
        while True:
            if thinking:
                thoughts = completion.thoughts
                print(thoughts[told:].translate(CONTROLS), end="", file=sys.stderr, flush=True)
                told = len(thoughts)
            text = completion.visible()
            if heading != completion.prompt:  # the text stands alone: no leading space
                text = text.lstrip(" ")
            sys.stdout.write(text[shown:].translate(dropped))
            sys.stdout.flush()
            shown = len(text)
            if completion.finish_reason:
                break
            next(steps)
        print(end="\n" if told else "", file=sys.stderr)
        print(end="\n" if completion is completions[-1] else "\n\n")
    for _ in steps:  # without completions: the steps alone
        pass


@contextmanager
def progress():
    """Says on a terminal that it compiles, and the seconds that pass."""
    ended = Event()

    def count():
        begun = time.monotonic()
        while not ended.wait(1):
            print(
                f"compiling ... {time.monotonic() - begun:.0f} s",
                end="\r",
                file=sys.stderr,
                flush=True,
            )

    print(
        "compiling ...", end="\r", file=sys.stderr, flush=True
    )  # another line may take the place of this one
    Thread(target=count, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        print(file=sys.stderr)


# The report


def report(llm: LLM, runs: list[list[Completion]], args) -> dict:
    """The object of --json. runs: the batch, or each answer of a chat; args: the command line's."""
    model, device = llm.model, llm.device
    completions = sum(runs, [])
    steps = sum(max(c.steps for c in run) - 1 for run in runs)
    if llm.speculator:
        steps = min(steps, llm.speculator.counts["steps"])
    seconds = max(1e-9, sum(max(c.seconds for c in run) - run[0].first_s for run in runs))
    peak = (
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    )  # before the read rate is timed
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if getattr(model.head, "weight", None) is not model.embed.weight:
        weights -= model.embed.weight.nbytes  # a token reads one row of it
    weights_read = weights
    for layer in (
        model.layers
    ):  # a token reads its experts; those of several rows are taken for different ones
        if moe := layer.config.moe:
            unread = 1 - min(1, len(runs[0]) * moe.n_chosen / moe.n_expert)
            experts = [
                weight.nbytes
                for name, weight in layer.ffn.named_parameters()
                if "router" not in name
            ]
            weights_read -= unread * sum(experts)
    rate = weights_read * steps / seconds
    return dict(
        checkpoint=args.checkpoint,
        device=str(device),
        dtype=str(llm.dtype).removeprefix("torch."),
        quantize=args.quantize or llm.quantization.get("name"),
        world_size=llm.team.ranks,
        batch=len(completions),
        samples=[sample(completion, args.logprobs) for completion in completions],
        load_s=llm.load_s,
        compile_s=llm.compile_s,
        first_token_s=sum(run[0].first_s for run in runs) / len(runs),
        decode_tokens_per_s=sum(max(0, len(c.tokens) - 1) for c in completions) / seconds,
        per_token_ms=per_token(completions),
        weights_bytes=weights,
        bandwidth_gb_s=rate / 1e9,
        bandwidth_utilization=utilization(llm, rate, weights),
        peak_memory_bytes=peak,
        speculation=speculation(llm.speculator.counts) if llm.speculator else None,
    )


def sample(completion: Completion, logprobs: bool) -> dict:
    keys = "prompt text tokens finish_reason seconds mean_logprob".split()
    found = {key: getattr(completion, key) for key in keys + ["logprobs"] * logprobs}
    return found | dict(prompt_tokens=len(completion.prompt_tokens))


def per_token(completions: list[Completion]) -> dict:
    """Milliseconds of the sequence that ends first, of the last, and the mean over all that have
    two steps."""
    ended = sorted((c for c in completions if c.steps > 1), key=lambda c: c.seconds)
    ms = [1e3 * (c.seconds - c.first_s) / (c.steps - 1) for c in ended]
    if not ms:
        return dict.fromkeys(("first", "last", "all"))
    return dict(first=ms[0], last=ms[-1], all=sum(ms) / len(ms))


def utilization(llm: LLM, rate: float, weights: int) -> float | None:
    """The share of the read bandwidth: None without --compile or fast/, below 1 GiB of weights and
    off CUDA."""
    fast = import_fast() if llm.options.compile else None
    if not fast or llm.device.type != "cuda" or weights < GIB:
        return None
    read_rate = fast.read_bandwidth(llm.model)
    return read_rate and rate / read_rate


def speculation(counts: dict[str, int]) -> dict:
    drafted, accepted = counts["drafted"], counts["accepted"]
    return dict(
        steps=counts["steps"],
        drafted=drafted,
        accepted=accepted,
        acceptance_rate=accepted / max(1, drafted),
        tokens_per_step=1 + accepted / max(1, counts["row_steps"]),
    )


def format_report(result: dict) -> str:
    """The table on stderr, and a second one of the draft."""
    share, peak, counts = (
        result["bandwidth_utilization"],
        result["peak_memory_bytes"],
        result["speculation"],
    )
    share = f"{share:.0%}" if share else "-"
    peak = f"{peak / GIB:.2f}" if peak else "-"
    rate = f"{result['bandwidth_gb_s']:4.1f}"  # the one value that may be wider than its name
    values = "{load_s:6.2f}  {compile_s:9.1f}  {first_token_s:13.3f}  {decode_tokens_per_s:15.1f}".format_map(
        result
    )
    lines = [
        f"load s  compile s  first token s  decode tokens/s  {'GB/s':>{len(rate)}}  of read bw  "
        f"peak GiB",
        f"{values}  {rate}  {share:>10}  {peak:>8}",
    ]
    if counts:
        lines += [
            "accepted  tokens a step",
            "{acceptance_rate:8.0%}  {tokens_per_step:13.2f}".format_map(counts),
        ]
    return "\n".join(lines)


# Files


def partial_directory(path: Path) -> TemporaryDirectory:
    """For what is to become `path`, beside it. OSError for a device, a pipe or a directory, and
    where none is made."""
    if path.exists() and not path.is_file():
        raise FileExistsError("want a file, or a name that is free")
    return TemporaryDirectory(prefix=f"{path.name}.partial-", dir=path.parent)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place for a file or a directory that is not whole yet; at the end it becomes `path`. After
    an error it is removed, and here what killed runs left: their lock files are unlocked, as the
    system does when a process ends. Where `path` is a link, what it names is written. OSError as of
    partial_directory()."""
    path = Path(os.path.realpath(path))
    for lock in path.parent.glob(f"{escape(path.name)}.partial-*/lock"):
        with suppress(OSError), open(lock, "a") as file:
            flock(file, LOCK_EX | LOCK_NB)
            shutil.rmtree(lock.parent)
    with partial_directory(path) as directory:
        with open(Path(directory, "lock"), "w") as file:
            flock(file, LOCK_EX)
            partial = Path(
                directory, f"made-{path.name}"
            )  # PyTorch zips a trace whose name ends in .gz
            yield partial
            partial.replace(path)

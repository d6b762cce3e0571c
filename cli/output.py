"""
What is printed and written: texts as they come, progress, the report, and files that are there
whole or not at all.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import torch

from hub.vet import GIB
from llm import LLM, Completion, import_fast
from model import DeltaCache, KVCache, Transformer

# For str.translate(), which drops them.
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - set(b"\n\t"))


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


def with_bar(llm: LLM, completions: list[Completion], steps: Iterator[None]) -> Iterator[None]:
    """The steps. Says on stderr what the batch needs and, on a terminal, how far it is and how long
    it takes at most: it may end before its last step."""
    from tqdm import tqdm

    models = filter(None, (llm.model, llm.draft_model))
    kinds = KVCache | DeltaCache
    caches = [part for model in models for part in model.modules() if isinstance(part, kinds)]
    size = sum(tensor.nbytes for cache in caches for tensor in cache.buffers())
    rows, limit = len(completions), completions[0].limit
    room = max(completion.room for completion in completions)
    print(
        f"{rows} rows of up to {room} tokens: {size / GIB:.2f} GiB of cache, at most {limit} steps",
        file=sys.stderr,
    )
    yield from tqdm(steps, total=limit, unit="step", leave=False, disable=None)


@contextmanager
def progress():
    """Says on a terminal that it compiles, and the seconds that pass."""
    ended = Event()
    # Another line may take the place of this one.
    say = partial(print, end="\r", file=sys.stderr, flush=True)

    def count():
        begun = time.monotonic()
        while not ended.wait(1):
            say(f"compiling ... {time.monotonic() - begun:.0f} s")

    say("compiling ...")
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
    # Before the read rate is timed.
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if getattr(model.head, "weight", None) is not model.embed.weight:
        weights -= model.embed.weight.nbytes  # a token reads one row of it
    rate = (weights - unread_experts(model, len(runs[0]))) * steps / seconds
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


def unread_experts(model: Transformer, rows: int) -> float:
    """Bytes. A token reads its experts; those of several rows are taken for different ones."""
    unread = 0.0
    for layer in model.layers:
        moe = layer.config.moe
        if not moe:
            continue
        named = layer.ffn.named_parameters()
        experts = sum(weight.nbytes for name, weight in named if "router" not in name)
        unread += experts * (1 - min(1, rows * moe.n_chosen / moe.n_expert))
    return unread


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
    share, peak = result["bandwidth_utilization"], result["peak_memory_bytes"]
    text = table(
        {
            "load s": f"{result['load_s']:.2f}",
            "compile s": f"{result['compile_s']:.1f}",
            "first token s": f"{result['first_token_s']:.3f}",
            "decode tokens/s": f"{result['decode_tokens_per_s']:.1f}",
            "GB/s": f"{result['bandwidth_gb_s']:.1f}",
            "of read bw": f"{share:.0%}" if share else "-",
            "peak GiB": f"{peak / GIB:.2f}" if peak else "-",
        }
    )
    counts = result["speculation"]
    if counts:
        accepted, tokens = f"{counts['acceptance_rate']:.0%}", f"{counts['tokens_per_step']:.2f}"
        text += "\n" + table({"accepted": accepted, "tokens a step": tokens})
    return text


def table(columns: dict[str, str]) -> str:
    """The names and, below them, the values."""
    widths = {name: max(len(name), len(value)) for name, value in columns.items()}
    rows = columns.keys(), columns.values()
    return "\n".join("  ".join(map(str.rjust, row, widths.values())) for row in rows)


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
    an error it is removed; a run that is killed leaves its directory. Where `path` is a link, what
    it names is written. OSError as of partial_directory()."""
    path = Path(os.path.realpath(path))
    with partial_directory(path) as directory:
        partial = Path(directory, path.name)
        yield partial
        partial.replace(path)

"""
Measure how well a checkpoint predicts a text, or what quantization costs it.

    python scripts/evaluate.py --checkpoint checkpoints/tiny \\
        --text checkpoints/stories.txt --compare checkpoints/tiny:int4
    python scripts/evaluate.py --checkpoint DIR --text FILE \\
        --compare DIR:int8 DIR:int4-g64 GPTQ_DIR
    python scripts/evaluate.py --checkpoint DIR --tasks hellaswag,winogrande

Choose a text of the kind that the model is for, and not the text that GPTQ was
calibrated on. Windows of --context tokens move over it by --stride. Each token
is scored once, in the first window that has it.

stdout gets one JSON object on one line, stderr a table; with --compare, stdout
gets the table, where "same choice" says how often the likeliest token is that
of --checkpoint; with --json, stdout gets a JSON line for each model. The word
perplexity is left out ("-", null) above a million: the spaces then do not part
words that the model knows.

--tasks runs tasks of lm-evaluation-harness (`pip install lm_eval`), which
fetches their data.
"""

# Where the tokenizer adds no beginning of sequence, nothing predicts the first token (or several,
# of one character): its bytes do not count. Bytes and words are the text's own. A token is scored
# after context - stride others at least, or all there are.  Shapes: N tokens, T tokens of a window,
# W windows, B windows at once, V vocabulary.
import os
import signal

if __name__ == "__main__":  # as in generate.py
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import math
import re
import sys
import time
from argparse import Namespace
from bisect import bisect_right
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cli.errors import run
from cli.options import DEVICE, QUANTIZATION, Parser, within
from hub.checkpoint import read_bytes, reading, reading_text
from hub.formats import unpack_quantized
from hub.tokenizer import Tokenizer
from hub.vet import GIB, memory_advice
from llm import INTS, LLM, Options, import_fast
from model import CACHES, Transformer
from tp import world_size

MOST_WORDS = 10**6  # more than a large dictionary's entries


def parse_spec(spec: str) -> dict:
    """DIR, DIR:int8, DIR:int4-g64 or, behind any of them, :head-int8 and :kv-int8 -> its part of
    the JSON line; a group size of None is generate.py's default."""
    ints, caches = "|".join(INTS), "|".join([*CACHES][1:])
    form = rf"(.*?)(?::({ints})(?:-g(-1|\d+))?)?(?::head-({ints}))?(?::kv-({caches}))?"
    checkpoint, quantize, group, head, cache = re.fullmatch(form, spec, re.S).groups()
    return dict(
        model=spec,
        checkpoint=checkpoint,
        quantize=quantize,
        group_size=int(group) if group else None,
        quantize_head=head,
        kv_cache=cache,
    )


def beginning(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """As much of the text as `limit` tokens hold, one more given. Not the decoded text of its first
    tokens, which may end inside of a character and may not be the text: Qwen's tokenizer, for one,
    normalizes."""
    return text[
        : bisect_right(
            range(len(text)), limit + 1, key=lambda end: len(tokenizer.encode_text(text[: end + 1]))
        )
    ]


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], int, int]:
    """The tokens, how many of them are not scored (one at least), and how many characters of the
    text these are."""
    ids = tokenizer.encode_text(text)
    for characters in range(min(len(text), 1000)):  # longer than any token
        start = tokenizer.encode_text(text[:characters])
        if 0 < len(start) < len(ids) and start == ids[: len(start)]:
            return ids, len(start), characters
    raise ValueError(
        f"--text: {len(ids)} tokens in {len(text)} characters, none to score: want 2 tokens or more"
    )


@torch.no_grad()
def score(
    model: Transformer,
    ids: Tensor,
    first: int,
    context: int,
    stride: int,
    cache: str | None,
    bar: tqdm,
) -> tuple[float, Tensor]:
    """Nats of ids[first:], ids [N], first > 0, and the likeliest token at each of these places.
    cache: keys and values go through one of this kind (model.CACHES), None: through none."""
    N, T, V = len(ids), min(context, len(ids) - 1), model.config.vocab_size
    W = 1 + math.ceil((N - 1 - T) / stride)
    # A row is a window and the token after it, the last to predict; the last is padded on its
    # right, where none looks.
    rows = F.pad(ids, (0, (W - 1) * stride + T + 1 - N)).unfold(0, T + 1, stride)  # [W, T + 1]
    positions = torch.arange(T, device=ids.device)[None]
    B = max(1, GIB // 4 // (4 * T * V))  # logits of 256 MiB in fp32: 1 GiB is slower on a CPU
    model.setup(T, min(B, W) if cache else 0, cache=cache or "16-bit")
    nats, choices = 0.0, []
    for at in range(0, W, B):
        batch = rows[at : at + B]
        # row [T + 1], logits [T, V]
        for w, row, logits in zip(range(at, W), batch, model(batch[:, :-1], positions)):
            # Earlier windows scored what is before.
            begin = max(T - stride if w else 0, first - 1 - w * stride)
            end = min(T, N - 1 - w * stride)
            choices.append(logits[begin:end].argmax(-1).cpu())
            losses = F.cross_entropy(
                logits[begin:end].float(), row[begin + 1 : end + 1], reduction="none"
            )
            nats += losses.cpu().double().sum().item()  # on the host, as MPS has no float64
            bar.update(len(losses))
    return nats, torch.cat(choices)


def perplexity(nats: float, count: int, most: float = 1e300) -> float | None:
    """None (JSON's null) above `most`, by default what a float holds."""
    return math.exp(nats / count) if nats < math.log(most) * count else None


def speed_up(llm: LLM) -> None:
    """On a CPU fast/'s products serve eager code too: on AMD's a text takes 60% of the time."""
    if llm.device.type == "cpu" and (fast := import_fast()):
        fast.optimize(llm.model)


def evaluate(spec: dict, llm: LLM, text: str, args: Namespace, choices: list[Tensor]) -> dict:
    """The JSON line of one model. choices: of the models before, to which its own are added."""
    ids, first, skipped = encode(llm.tokenizer, text)
    tokens, size, words = (
        len(ids) - first,
        len(text[skipped:].encode()),
        len(text[skipped:].split()),
    )
    with memory_advice(
        f"{spec['model']}: out of memory on {llm.device}; a smaller --context or dtype helps"
    ):
        llm._load(1, 1)
        model_bytes = sum(
            tensor.nbytes for tensor in (*llm.model.parameters(), *llm.model.buffers())
        )
        speed_up(llm)
        begun = time.perf_counter()
        with tqdm(total=tokens, desc=spec["model"], unit="token", disable=None) as bar:
            nats, chosen = score(
                llm.model,
                torch.tensor(ids, device=llm.device),
                first,
                args.context,
                args.stride,
                spec["kv_cache"],
                bar,
            )
    llm.model = None
    if not math.isfinite(nats):
        advice = (
            "its weights may be broken"
            if llm.dtype == torch.float32
            else "--dtype float32 may help"
        )
        raise ValueError(f"{spec['model']}: its logits are not finite in {llm.dtype}; {advice}")
    choices.append(chosen)
    same = (
        (chosen == choices[0]).double().mean().item() if chosen.shape == choices[0].shape else None
    )
    return spec | dict(
        dtype=str(llm.dtype).removeprefix("torch."),
        device=str(llm.device),
        context=args.context,
        stride=args.stride,
        tokens=tokens,
        bytes=size,
        words=words,
        bits_per_byte=nats / math.log(2) / size,
        word_perplexity=perplexity(nats, words, MOST_WORDS),
        token_perplexity=perplexity(nats, tokens),
        greedy_agreement=same,
        model_bytes=model_bytes,
        seconds=time.perf_counter() - begun,
    )


def comparison_table(results: list[dict]) -> str:
    """Markdown; the first model is what the others are measured against."""
    lines = [
        "| model | bits per byte | difference | same choice | word perplexity | token perplexity | "
        "weights, MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        bits, *perplexities = (
            result[key] for key in ("bits_per_byte", "word_perplexity", "token_perplexity")
        )
        worse = (
            "-"
            if result is results[0]
            else f"{100 * (bits / results[0]['bits_per_byte'] - 1):+.2f} %"
        )
        word, token = ("-" if value is None else f"{value:,.3f}" for value in perplexities)
        same = result["greedy_agreement"]
        same = "-" if result is results[0] or same is None else f"{same:.2%}"
        size = f"{result['model_bytes'] / 1e6:,.1f}"
        lines.append(
            f"| {result['model']} | {bits:.4f} | {worse} | {same} | {word} | {token} | {size} |"
        )
    return "\n".join(lines)


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, help="directory or Hub id")
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--text", type=Path, metavar="FILE", help="plain text in UTF-8")
    measured.add_argument(
        "--tasks", metavar="NAME,...", help="tasks of lm-evaluation-harness, in place of a text"
    )
    add(
        "--task-path",
        metavar="DIR",
        help="with --tasks: where tasks of your own are defined (default: nowhere)",
    )
    add(
        "--few-shot",
        type=within(int, 0),
        metavar="N",
        help="with --tasks: examples before each (default: the task's)",
    )
    add(
        "--limit",
        type=within(int, 1),
        metavar="N",
        help="with --tasks: only the first N of each (default: all)",
    )
    parser.add_options(Options, *QUANTIZATION)
    add(
        "--compare",
        nargs="+",
        default=[],
        type=parse_spec,
        metavar="CHECKPOINT",
        help="others to measure against --checkpoint; DIR:int8 or DIR:int4-g64 rounds the weights "
        "of DIR, :head-int8 "
        "behind it the head",
    )
    add(
        "--max-tokens",
        type=within(int, 1),
        metavar="N",
        help="read as much of the text as N tokens of --checkpoint hold (default: all of it)",
    )
    add(
        "--context",
        type=within(int, 1),
        metavar="C",
        help="tokens of a window (default: 2048, or what the model has)",
    )
    add(
        "--stride",
        type=within(int, 1),
        metavar="S",
        help="tokens from window to window (default: half of --context)",
    )
    parser.add_options(Options, *DEVICE)
    add("--json", action="store_true", help="a JSON line for each model, and no table")
    args = parser.parse_args()
    if args.group_size is not None and not args.quantize:
        parser.error(f"--group-size {args.group_size} goes with --quantize int8 or int4")
    for name in (
        ("max_tokens", "context", "stride") if args.tasks else ("task_path", "few_shot", "limit")
    ):
        if getattr(args, name) is not None:
            parser.error(
                f"--{name.replace('_', '-')} goes with {'--text' if args.tasks else '--tasks'}"
            )
    return args


def task_table(results: list[dict]) -> str:
    """Markdown: a row for each model, a column for each task's metrics."""
    columns = [(task, metric) for task, found in results[0]["tasks"].items() for metric in found]
    lines = [
        "| model | " + " | ".join(f"{task} {metric}" for task, metric in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for result in results:
        cells = " | ".join(f"{result['tasks'][task][metric]:.4f}" for task, metric in columns)
        lines.append(f"| {result['model']} | {cells} |")
    return "\n".join(lines)


def evaluate_tasks(spec: dict, llm: LLM, args: Namespace) -> dict:
    """The JSON line of one model: task -> metric -> value, and how far a value may be off by
    chance."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from scripts.tasks import Harness
    except ImportError as error:
        raise ValueError(f"--tasks: {error}; pip install lm_eval") from error
    manager, names = TaskManager(include_path=args.task_path), args.tasks.split(",")
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ValueError(
            f"--tasks {unknown[0]}: no such task; `lm_eval ls tasks` lists them, --task-path adds "
            f"others"
        )
    llm._load(1, 1)
    unpack_quantized(llm.model, quiet=True)
    speed_up(llm)
    begun = time.perf_counter()
    # It gives rank 0 alone a result.
    found = simple_evaluate(
        Harness(llm),
        tasks=names,
        task_manager=manager,
        num_fewshot=args.few_shot,
        limit=args.limit,
        log_samples=False,
    ) or dict(results={})
    llm.model = llm.engine = llm.speculator = None
    tasks = {
        name: {
            metric.removesuffix(",none"): float(value)
            for metric, value in metrics.items()
            if "," in metric and isinstance(value, float)
        }
        for name, metrics in found["results"].items()
    }
    return spec | dict(
        dtype=str(llm.dtype).removeprefix("torch."),
        device=str(llm.device),
        tasks=llm.team.agree(tasks),
        seconds=time.perf_counter() - begun,
    )


def main() -> None:
    args = parse_args()
    if world_size() == 1:
        # A comparison then shows what it has.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    text = None
    if args.text:
        with reading_text(args.text):
            text = read_bytes(args.text).decode()  # line ends as they are: bytes count
            if not text:
                raise ValueError("it is empty; want a text")
    group = "" if args.group_size is None else f"-g{args.group_size}"
    rounded = f":{args.quantize}{group}" if args.quantize else ""
    head = f":head-{args.quantize_head}" if args.quantize_head else ""
    cache = f":kv-{args.kv_cache}" if args.kv_cache else ""
    specs = [parse_spec(args.checkpoint + rounded + head + cache), *args.compare]
    llms = [
        LLM(
            spec["checkpoint"],
            load=False,
            quiet=not sys.stderr.isatty(),
            quantize=spec["quantize"],
            group_size=spec["group_size"],
            quantize_head=spec["quantize_head"],
            device=args.device,
            dtype=args.dtype,
        )
        for spec in specs
    ]
    limits = [llm.context for llm in llms]
    args.context = args.context or min(2048, *limits)
    if args.context > min(limits):
        raise ValueError(
            f"--context {args.context}: {specs[limits.index(min(limits))]['model']} has "
            f"{min(limits)}"
        )
    args.stride = args.stride or max(1, args.context // 2)
    if args.stride > args.context:
        raise ValueError(
            f"--stride {args.stride} leaves tokens out: want at most --context, {args.context}"
        )
    if text and args.max_tokens:
        text = beginning(llms[0].tokenizer, text, args.max_tokens)
    results, choices = [], []
    try:
        for spec, llm in zip(specs, llms):
            results.append(
                evaluate_tasks(spec, llm, args)
                if args.tasks
                else evaluate(spec, llm, text, args, choices)
            )
            if args.json or not args.compare:
                print(json.dumps(results[-1]), flush=True)
    finally:  # should one fail or Ctrl-C come, the others are not lost
        if results and not args.json:
            table = task_table(results) if args.tasks else comparison_table(results)
            print(table, file=sys.stdout if args.compare else sys.stderr)


if __name__ == "__main__":
    run(main)

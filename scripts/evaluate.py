"""
Measure how well a checkpoint predicts a text, or what quantization costs it.

    python scripts/evaluate.py --checkpoint checkpoints/tiny --text README.md
    python scripts/evaluate.py --checkpoint DIR --text FILE --compare DIR:int8 DIR:int4-g64 GPTQ_DIR

Windows of --context tokens move over the text by --stride. Each token is scored once, in the first window that has it:
after context - stride others at least, or all there are. Where the tokenizer adds no beginning of sequence, nothing
predicts the first token (or several, of one character): its bytes do not count. Bytes and words are the text's own.

One JSON object on one line of stdout and a table on stderr; with --compare, a Markdown table on stdout; with --json,
JSON alone, a line for each model. All models of a comparison read the same text, in windows of the same length.

Shapes: N tokens, T tokens of a window, W windows, B windows at once, V vocabulary.
"""
import json
import math
import re
import sys
import time
from argparse import Namespace
from bisect import bisect_right
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from checkpoint import Tokenizer, UserError, find_checkpoint, hf_weights, load_config, reading  # noqa: E402
from cli import DTYPES, GIB, Parser, find_dtype, memory_advice, within  # noqa: E402
from model import Transformer  # noqa: E402
from quantize import default_group, group_of, load_checkpoint, read_settings  # noqa: E402
from tp import Team, join, run, splitter  # noqa: E402


def parse_spec(spec: str) -> dict:
    """DIR, DIR:int8 or DIR:int4-g64 -> its part of the JSON line; a group size of None is generate.py's default."""
    checkpoint, quantize, group = re.fullmatch(r"(.*?)(?::(int4|int8)(?:-g(-1|\d+))?)?", spec, re.S).groups()
    return dict(model=spec, checkpoint=checkpoint, quantize=quantize, group_size=int(group) if group else None)


def beginning(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """As much of the text as `limit` tokens hold, one more given. Not the decoded text of its first tokens, which may
    end inside of a character and may not be the text: Qwen's tokenizer, for one, normalizes."""
    return text[:bisect_right(range(len(text)), limit + 1, key=lambda end: len(tokenizer.encode(text[:end + 1])))]


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], int, int]:
    """The tokens, how many of them are not scored (one at least), and how many characters of the text these are."""
    ids = tokenizer.encode(text)
    for characters in range(min(len(text), 1000)):  # longer than any token
        start = tokenizer.encode(text[:characters])
        if 0 < len(start) < len(ids) and start == ids[:len(start)]:
            return ids, len(start), characters
    raise UserError(f"--text: {len(ids)} tokens in {len(text)} characters, none to score: want 2 tokens or more")


@torch.no_grad()
def score(model: Transformer, ids: Tensor, first: int, context: int, stride: int, bar: tqdm) -> float:
    """Nats of ids[first:], ids [N], first > 0."""
    N, T, V = len(ids), min(context, len(ids) - 1), model.config.vocab_size
    W = 1 + math.ceil((N - 1 - T) / stride)
    # A row is a window and the token after it, the last to predict; the last is padded on its right, where none looks.
    rows = F.pad(ids, (0, (W - 1) * stride + T + 1 - N)).unfold(0, T + 1, stride)  # [W, T + 1]
    model.setup(T)
    positions = torch.arange(T, device=ids.device)[None]
    B = max(1, GIB // 4 // (4 * T * V))  # logits of 256 MiB in fp32: 1 GiB is slower on a CPU
    nats = 0.0
    for at in range(0, W, B):
        batch = rows[at:at + B]
        for w, row, logits in zip(range(at, W), batch, model(batch[:, :-1], positions)):  # row [T + 1], logits [T, V]
            begin = max(T - stride if w else 0, first - 1 - w * stride)  # earlier windows scored what is before
            end = min(T, N - 1 - w * stride)
            losses = F.cross_entropy(logits[begin:end].float(), row[begin + 1:end + 1], reduction="none")
            nats += losses.cpu().double().sum().item()  # on the host, as MPS has no float64
            bar.update(len(losses))
    return nats


def perplexity(nats: float, count: int) -> float | None:
    """None (JSON's null) beyond a float: a long text without spaces is one word."""
    return math.exp(nats / count) if nats < 700 * count else None


def evaluate(spec: dict, directory: Path, text: str, device: torch.device, team: Team, args: Namespace) -> dict:
    """The JSON line of one model."""
    ids, first, skipped = encode(Tokenizer(directory), text)
    tokens, size, words = len(ids) - first, len(text[skipped:].encode()), len(text[skipped:].split())
    dtype = find_dtype(args.dtype, device)
    with memory_advice(f"{spec['model']}: out of memory on {device}; a smaller --context or dtype helps"):
        model = load_checkpoint(directory, device, dtype, spec["quantize"], spec["group_size"], sys.stderr.isatty(),
                           splitter(team))
        model_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        begun = time.perf_counter()
        with tqdm(total=tokens, desc=spec["model"], unit="token", disable=None) as bar:
            nats = score(model, torch.tensor(ids, device=device), first, args.context, args.stride, bar)
    if not math.isfinite(nats):
        advice = "its weights may be broken" if dtype == torch.float32 else "--dtype float32 may help"
        raise UserError(f"{spec['model']}: its logits are not finite in {dtype}; {advice}")
    return spec | dict(
        dtype=str(dtype).removeprefix("torch."), device=str(device), context=args.context, stride=args.stride,
        tokens=tokens, bytes=size, words=words, bits_per_byte=nats / math.log(2) / size,
        word_perplexity=perplexity(nats, words), token_perplexity=perplexity(nats, tokens), model_bytes=model_bytes,
        seconds=time.perf_counter() - begun)


def comparison_table(results: list[dict]) -> str:
    """Markdown; the first model is what the others are measured against."""
    lines = ["| model | bits per byte | difference | word perplexity | token perplexity | weights, MB |",
             "|---|---:|---:|---:|---:|---:|"]
    for result in results:
        bits, *perplexities = (result[key] for key in ("bits_per_byte", "word_perplexity", "token_perplexity"))
        worse = "-" if result is results[0] else f"{100 * (bits / results[0]['bits_per_byte'] - 1):+.2f} %"
        word, token = ("-" if value is None else f"{value:,.3f}" for value in perplexities)
        size = f"{result['model_bytes'] / 1e6:,.1f}"
        lines.append(f"| {result['model']} | {bits:.4f} | {worse} | {word} | {token} | {size} |")
    return "\n".join(lines)


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, help="directory or Hub id")
    add("--text", required=True, type=Path, metavar="FILE", help="plain text in UTF-8")
    add("--quantize", choices=("int8", "int4"), help="round the weights of --checkpoint")
    add("--group-size", type=within(int, -1), metavar="G", help="weights that share a scale; -1: a row's")
    add("--compare", nargs="+", default=[], type=parse_spec, metavar="CHECKPOINT",
        help="others to measure against --checkpoint; DIR:int8, DIR:int4 or DIR:int4-g64 rounds the weights of DIR")
    add("--max-tokens", type=within(int, 1), metavar="N", help="read as much of the text as N tokens of --checkpoint")
    add("--context", type=within(int, 1), metavar="C", help="tokens of a window (default: 2048, or what the model has)")
    add("--stride", type=within(int, 1), metavar="S", help="tokens from window to window (default: half of --context)")
    add("--device", help="as generate.py's")
    add("--dtype", choices=DTYPES, help="as generate.py's")
    add("--json", action="store_true", help="a JSON line for each model, and no table")
    args = parser.parse_args()
    if args.group_size is not None and not args.quantize:
        parser.error(f"--group-size {args.group_size} goes with --quantize int8 or int4")
    return args


def main() -> None:
    args = parse_args()
    with reading(args.text):
        text = args.text.read_bytes().decode()  # line ends as they are: bytes count
    group = "" if args.group_size is None else f"-g{args.group_size}"
    specs = [parse_spec(args.checkpoint + (f":{args.quantize}{group}" if args.quantize else "")), *args.compare]
    directories = [find_checkpoint(spec["checkpoint"]) for spec in specs]
    configs = [load_config(directory) for directory in directories]
    limits = [config.context for config in configs]
    for spec, directory, config in zip(specs, directories, configs):
        if not spec["quantize"]:
            continue
        if read_settings(directory):
            raise UserError(f"{spec['model']}: {directory} is quantized already; leave out {spec['quantize']}")
        for name, (_, _, shape) in hf_weights(config).items():
            if "_proj.weight" in name:
                group_of(shape[1], default_group(spec["quantize"], spec["group_size"]))
    args.context = args.context or min(2048, *limits)
    if args.context > min(limits):
        raise UserError(f"--context {args.context}: {specs[limits.index(min(limits))]['model']} has {min(limits)}")
    args.stride = args.stride or max(1, args.context // 2)
    if args.stride > args.context:
        raise UserError(f"--stride {args.stride} leaves tokens out: want at most --context, {args.context}")
    if args.max_tokens:
        text = beginning(Tokenizer(directories[0]), text, args.max_tokens)
    (device, team), results = join(args.device), []
    try:
        for spec, directory in zip(specs, directories):
            results.append(evaluate(spec, directory, text, device, team, args))
            if args.json or not args.compare:
                print(json.dumps(results[-1]), flush=True)
    finally:  # should one fail or Ctrl-C come, the others are not lost
        if results and not args.json:
            print(comparison_table(results), file=sys.stdout if args.compare else sys.stderr)


if __name__ == "__main__":
    run(main)

"""
Generate text with a Llama-family checkpoint.

    python generate.py                                                    # the bundled model tells a story
    python generate.py --prompt "One day, a fox" --num-samples 3 --compile
    python generate.py --checkpoint meta-llama/Llama-3.1-8B-Instruct --compile --interactive

Text goes to stdout as it comes, everything else to stderr; with --json, stdout is one JSON object on one line.
"""
import argparse
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import Tokenizer, UserError, blame, find_checkpoint, load_config, read_json, report_errors
from command import DTYPES, GIB, Parser, add_quantize, check_memory, find_device, find_dtype, within
from fast import swap_in
from kernels import read_bandwidth
from model import Transformer
from quantize import load_model, read_settings
from sampling import Sampling, choose, fast_choose

TINY = str(Path(__file__).parent / "checkpoints" / "tiny")
PREFILL_TOKENS = 4096  # at a time, prompts counted in


def prefill(model: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor, sampling: Sampling,
            choose: Callable, samples: int) -> Tensor:
    """tokens [P, T], padded on the right, at positions [1, T]; last [P], their last columns -> as decode_one_token."""
    return torch.stack(choose(model(tokens, positions, slots, last).repeat_interleave(samples, dim=0), sampling))


def decode_one_token(model: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, sampling: Sampling,
                     choose: Callable) -> Tensor:
    """tokens, positions [B] -> the next tokens and their log-probabilities [2, B]; moves tokens and positions on."""
    chosen = torch.stack(choose(model(tokens[:, None], positions[:, None], slots).squeeze(1), sampling))
    tokens.copy_(chosen[0])  # floats hold them exactly: up to 2 ** 24
    positions += 1
    return chosen


class Generator:
    """A model with caches for `prompts` x `samples` rows of `length` tokens, its prefill and its decode function.

    Shapes: P prompts, B = P x samples rows, T tokens of the longest prompt."""

    def __init__(self, model: Transformer, length: int, sampling: Sampling, prompts: int = 1, samples: int = 1,
                 compile: bool = False, kernels: bool = True):
        self.model, self.decoder, self.sampling, self.samples, self.compiled = model, model, sampling, samples, compile
        self.device = model.embed.weight.device
        self.prefill, self.decode, self.choose = prefill, decode_one_token, choose
        self.tokens, self.positions = (
            torch.zeros(prompts * samples, dtype=torch.long, device=self.device) for _ in range(2))
        # A slot more for a prompt, or its last piece, of one token, padded to two, 8 that stay unseen, and a multiple
        # of 8, which attention kernels want of a mask's rows.
        model.setup((length + 16) // 8 * 8, prompts * samples)
        if compile:
            torch._inductor.config.fallback_random = True  # a seed draws the same with and without --compile
            torch._dynamo.config.specialize_float = True  # dynamic=True is for the prompt's length alone
            torch.fx.experimental._config.use_duck_shape = False  # sizes that are equal once need not stay so
            for layer in model.layers:  # prefill: the code of one layer serves all; decode: one graph
                layer.compile(dynamic=True, fullgraph=True)
            self.decode = torch.compile(decode_one_token, mode="reduce-overhead", fullgraph=True)
            if kernels:
                self.decoder = swap_in(model)
            if self.decoder is not model and sampling.top_p == 1:
                self.choose = fast_choose
            for state in (self.tokens, self.positions):  # the graph then changes them where they are
                torch._dynamo.mark_static_address(state)
            for _ in self.generate([[0, 0]] * prompts, 4):  # compiles; decode warms up, records its graph, replays it
                pass

    def slots(self, n: int) -> Tensor:
        """The cache's slots to look at when n are in use: a power of two, as each count is a CUDA graph of its own, and
        never all, as torch.compile makes a case of its own of that. The kernels look by themselves."""
        if self.decoder is not self.model:
            return self.model.slots[:0]
        slots = self.model.slots[:-8][:max(256, 1 << (n - 1).bit_length())]
        if self.compiled:
            torch._dynamo.maybe_mark_dynamic(slots, 0)
        return slots

    @torch.no_grad()
    def steps(self, prompts: list[list[int]], new_tokens: int, start: int) -> Iterator[Tensor]:
        """The tokens and log-probabilities [2, B] of each step, on the device; the next step overwrites them."""
        size = max(2, PREFILL_TOKENS // len(prompts))  # columns at a time: memory does not grow with the prompt
        width = max(2, *map(len, prompts))
        width += width % size == 1  # dynamic=True would compile once more for a width of 1
        tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        chosen = 0
        for at in range(0, width, size):
            piece, end = tokens[:, at:at + size], (last - at).clamp(0, size - 1)
            # Not a slice of all positions, whose strides would be new to the compiler.
            positions = start + at + torch.arange(piece.shape[1], device=self.device)[None]
            slots = self.slots(start + at + piece.shape[1])
            fresh = self.prefill(self.model, piece, positions, slots, end, self.sampling, self.choose, self.samples)
            chosen = torch.where((last // size == at // size).repeat_interleave(self.samples), fresh, chosen)
        self.model.repeat_rows(self.samples)
        yield chosen
        self.tokens.copy_(chosen[0])
        self.positions.copy_((start + 1 + last).repeat_interleave(self.samples))
        for n in range(start + width + 1, start + width + new_tokens):
            yield self.decode(self.decoder, self.tokens, self.positions, self.slots(n), self.sampling, self.choose)

    def generate(self, prompts: list[list[int]], new_tokens: int, start: int = 0) -> Iterator[tuple[list, list]]:
        """The tokens and log-probabilities of each step, on the host; `start` tokens before the prompts' are cached.

        A GPU's are handed over once the step after theirs is launched: it computes while the host looks."""
        cuda = self.device.type == "cuda"

        def to_host(chosen: Tensor):
            host = torch.empty_like(chosen, device="cpu", pin_memory=cuda).copy_(chosen, non_blocking=cuda)
            return host, torch.cuda.current_stream().record_event() if cuda else None

        steps = map(to_host, self.steps(prompts, new_tokens, start))
        if cuda:
            steps = (step for step, _ in pairwise(chain(steps, [None])))
        for host, copied in steps:
            if copied:
                copied.synchronize()
            yield [int(token) for token in host[0].tolist()], host[1].tolist()


@dataclass
class Completion:
    """One row of the batch: the tokens that follow its prompt, their text so far, and why they ended."""
    prompt: str
    prompt_tokens: list[int]
    tokenizer: Tokenizer
    limit: int  # new tokens at most
    stop_texts: list[str] = field(default_factory=list)
    heading: str = ""  # what is shown before the text
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    steps: int = 0  # the one of a stop token included
    first_s: float = 0.0  # when the first step came, since the start
    seconds: float = 0.0  # when the last one did

    def __post_init__(self):
        self.window = self.prompt_tokens[-8:]  # tokens decoded together with new ones, whose spaces depend on them
        self.decoded = len(self.window)  # how many of them have given their text

    def add(self, token: int, logprob: float, seconds: float) -> None:
        self.steps, self.first_s, self.seconds = self.steps + 1, self.first_s or seconds, seconds
        if token in self.tokenizer.stops:
            self.finish_reason = "stop"
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.window.append(token)
        before, after = self.tokenizer.decode(self.window[:self.decoded]), self.tokenizer.decode(self.window)
        if len(after) > len(before) and not after.endswith("\ufffd"):  # else the last character is not whole yet
            self.text += after[len(before):]
            self.window, self.decoded = self.window[self.decoded:], len(self.window) - self.decoded
        ends = [at for stop in self.stop_texts if (at := self.text.find(stop)) >= 0]
        if ends:
            self.text, self.finish_reason = self.text[:min(ends)], "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"

    def visible(self) -> str:
        """The text, less an end that may yet turn out to begin a stop text."""
        stops = [] if self.finish_reason else self.stop_texts
        held = max((n for stop in stops for n in range(len(stop)) if self.text.endswith(stop[:n])), default=0)
        return self.text[:len(self.text) - held]


def show(completions: list[Completion]) -> Iterator[None]:
    """Each next() prints what has come: of the first unfinished completion at once, of the others in their turn."""
    for completion in completions:
        sys.stdout.write(completion.heading)
        shown = 0
        while True:
            text = completion.visible()
            if completion.heading != completion.prompt:  # the text stands alone: no space before its first word
                text = text.lstrip(" ")
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
            if completion.finish_reason:
                break
            yield
        sys.stdout.write("\n" if completion is completions[-1] else "\n\n")


def complete(generator: Generator, completions: list[Completion], printing: Iterator, start: int = 0) -> None:
    """Generate until each completion has ended; `start` tokens of the prompts are in the cache already."""
    next(printing, None)
    begun = time.perf_counter()
    prompts = [completion.prompt_tokens[start:] for completion in completions[::generator.samples]]
    for tokens, logprobs in generator.generate(prompts, completions[0].limit, start):
        seconds = time.perf_counter() - begun
        for completion, token, logprob in zip(completions, tokens, logprobs):
            if not completion.finish_reason:
                completion.add(token, logprob, seconds)
        next(printing, None)
        if all(completion.finish_reason for completion in completions):
            break


def chat(generator: Generator, tokenizer: Tokenizer, length: int, args: argparse.Namespace) -> list[Completion]:
    """Answer line by line; without a chat template, continue the text so far and the line typed."""
    with suppress(ImportError):
        import readline  # noqa: F401: input() then edits lines and recalls them
    hint = "Ctrl-C stops an answer, Ctrl-D leaves."
    print(hint if tokenizer.template else f"{hint} No chat template: your text is continued.", file=sys.stderr)

    def encode(messages: list[dict]) -> list[int]:
        if tokenizer.template:
            return tokenizer.encode(tokenizer.render(messages), rendered=True)
        return tokenizer.encode("".join(message["content"] for message in messages))

    messages, cached, answers = [], [], []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
        except EOFError:
            return answers
        except KeyboardInterrupt:
            print()
            continue
        if not line.strip():
            continue
        messages.append(dict(role="user", content=line))
        try:
            tokens = encode(messages)
            if len(tokens) >= length and len(messages) > 1:
                print(f"the chat fills the {length} tokens of --max-seq-length and starts afresh", file=sys.stderr)
                messages = messages[-1:]
                tokens = encode(messages)
            if len(tokens) >= length:
                raise UserError(f"{len(tokens)} tokens leave no room in {length}: shorten, or raise --max-seq-length")
        except UserError as error:
            print(error, file=sys.stderr)
            messages = []
            continue
        start = len(os.path.commonprefix([cached, tokens[:-1]]))  # the last token is read again: its logits are wanted
        limit = min(args.max_new_tokens or length, length - len(tokens))
        answer = Completion(line, tokens, tokenizer, limit, args.stop)
        printing = show([answer])
        signal.signal(signal.SIGINT, lambda *_: setattr(answer, "finish_reason", "interrupted"))  # ends after this step
        complete(generator, [answer], printing, start)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        answers.append(answer)
        cached = tokens + answer.tokens[:-1]  # the model may not have read the last one
        messages.append(dict(role="assistant", content=answer.text if tokenizer.template else answer.text + "\n"))
        if not tokenizer.template and answer.steps > len(answer.tokens):  # a stop token: the text is told
            messages = []


def report(generator: Generator, runs: list[list[Completion]], **known) -> dict:
    """The JSON line, part of which is the table on stderr; runs: the batch, or each answer of a chat."""
    model, device = generator.model, generator.device
    weights = sum(p.nbytes for p in model.parameters())
    if not model.config.tied:
        weights -= model.embed.weight.nbytes  # a token reads one row of it
    completions = [completion for run in runs for completion in run]
    decode_steps = sum(max(c.steps for c in run) - 1 for run in runs)
    decode_s = max(1e-9, sum(max(c.seconds for c in run) - run[0].first_s for run in runs))
    rate = weights * decode_steps / decode_s
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    ceiling = read_bandwidth(model) if device.type == "cuda" and weights >= GIB else None
    ended = sorted((c for c in completions if c.steps > 1), key=lambda c: c.seconds)
    per_token = [1e3 * (c.seconds - c.first_s) / (c.steps - 1) for c in ended] or [None]
    samples = [dict(prompt=c.prompt, text=c.text, prompt_tokens=len(c.prompt_tokens), tokens=c.tokens,
                    finish_reason=c.finish_reason, seconds=c.seconds,
                    mean_logprob=sum(c.logprobs) / len(c.logprobs) if c.tokens else None) for c in completions]
    return known | dict(
        device=str(device), dtype=str(model.embed.weight.dtype).removeprefix("torch."), world_size=1,
        batch=len(completions), samples=samples, first_token_s=sum(run[0].first_s for run in runs) / len(runs),
        decode_tokens_per_s=sum(max(0, len(c.tokens) - 1) for c in completions) / decode_s,
        per_token_ms=dict(first=per_token[0], last=per_token[-1], all=sum(per_token) / len(ended) if ended else None),
        weights_bytes=weights, bandwidth_gb_s=rate / 1e9,
        bandwidth_utilization=rate / ceiling if ceiling else None, peak_memory_bytes=peak, speculation=None)


def table(result: dict) -> str:
    share, peak = result["bandwidth_utilization"], result["peak_memory_bytes"]
    cells = {"load s": f"{result['load_s']:.2f}", "compile s": f"{result['compile_s']:.1f}",
             "first token s": f"{result['first_token_s']:.3f}",
             "decode tokens/s": f"{result['decode_tokens_per_s']:.1f}", "GB/s": f"{result['bandwidth_gb_s']:.1f}",
             "of read bandwidth": f"{share:.0%}" if share else "-", "peak GiB": f"{peak / GIB:.2f}" if peak else "-"}
    return "  ".join(cells) + "\n" + "  ".join(value.rjust(len(name)) for name, value in cells.items())


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", default=TINY, help="directory or Hub id (default: the bundled model)")
    add("--prompt", action="append", default=[], metavar="TEXT", help="several: a batch (default: Once upon a time)")
    add("--prompt-file", type=Path, metavar="FILE", help="a prompt a line")
    add("--interactive", action="store_true", help="chat, or continue your text if there is no chat template")
    add("--chat", action="store_true", help="put each prompt into the chat template")
    add("--max-new-tokens", type=within(int, 1), metavar="N", help="default: 256; in a chat, what the context leaves")
    add("--temperature", type=within(float, 0, 100), help="0: greedy (default: generation_config.json's, else 0.8)")
    add("--top-k", type=within(int, 0), metavar="K", help="0: off (default: generation_config.json's, else 0)")
    add("--top-p", type=within(float, 1e-6, 1), metavar="P", help="1: off (default: generation_config.json's, else 1)")
    add("--seed", type=within(int, 0, 2 ** 63 - 1), help="the same seed, the same text")
    add("--num-samples", type=within(int, 1, 10 ** 5), default=1, metavar="N", help="completions of each prompt")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeat it for more")
    add("--compile", action="store_true", help="torch.compile: a wait first, then faster")
    add("--no-kernels", action="store_true", help="with --compile: plain PyTorch only")
    add_quantize(parser)
    add("--max-seq-length", type=within(int, 2), metavar="N", help="prompt and new tokens at most")
    add("--device", help="cpu, cuda, cuda:N or mps (default: the first GPU, else cpu)")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--profile", type=Path, metavar="FILE", help="write a Chrome trace of the generation")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--quiet", action="store_true", help="no loading bar, no table")
    args = parser.parse_args()
    if "" in args.stop:
        parser.error("--stop: an empty text would end everything at once")
    if args.interactive and (args.prompt or args.prompt_file or args.json or args.num_samples > 1):
        parser.error("--interactive does not go with --prompt, --prompt-file, --json and --num-samples")
    if args.group_size and not args.quantize:
        parser.error(f"--group-size {args.group_size} goes with --quantize; a quantized checkpoint has its own")
    if args.profile and (args.profile.is_dir() or not args.profile.absolute().parent.is_dir()):
        parser.error(f"--profile {args.profile}: want a file, in a directory that exists")
    if args.prompt_file:
        with blame(args.prompt_file):
            lines = [line for line in args.prompt_file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        if not lines:
            parser.error(f"--prompt-file {args.prompt_file}: no prompt in it; want one a line")
        args.prompt += lines
    args.prompt = args.prompt or ["Once upon a time"]
    return args


def prepare(args: argparse.Namespace, tokenizer: Tokenizer, limit: int) -> list[Completion]:
    """A completion for each prompt and sample, with its tokens and its room."""
    encoded = [tokenizer.encode(tokenizer.render([dict(role="user", content=prompt)]), rendered=True) if args.chat
               else tokenizer.encode(prompt) for prompt in args.prompt]
    if [] in encoded:
        raise UserError("--prompt: the text is empty, and this tokenizer adds no beginning of sequence; give some text")
    longest = max(map(len, encoded))
    new_tokens = args.max_new_tokens or max(1, min(256, limit - longest))
    if longest + new_tokens > limit:
        raise UserError(f"{longest} prompt tokens and {new_tokens} new ones exceed {limit}, the context or "
                        "--max-seq-length: shorten the prompt or lower --max-new-tokens")
    completions = []
    for prompt, tokens in zip(args.prompt, encoded):
        for sample in range(args.num_samples):
            heading = "" if args.chat else prompt
            if len(encoded) * args.num_samples > 1:
                heading = f"--- {prompt}" + (f" ({sample + 1})\n" if args.num_samples > 1 else "\n")
            completions.append(Completion(prompt, tokens, tokenizer, new_tokens, args.stop, heading))
    return completions


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # the compiler's hints to its developers
    sys.stdout.reconfigure(errors="replace")  # not all terminals show all of Unicode
    args = parse_args()
    device = find_device(args.device)
    dtype = find_dtype(args.dtype, device)
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if args.compile and device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise UserError("--compile on a CPU needs a C++ compiler: install g++ or clang++, or leave out --compile")
    directory = find_checkpoint(args.checkpoint)
    config, tokenizer = load_config(directory), Tokenizer(directory)
    if args.chat and not tokenizer.template:
        raise UserError(f"--chat: {args.checkpoint} has no chat template; without --chat the prompt is continued")
    with blame(directory / "generation_config.json"):
        asked = read_json(directory / "generation_config.json", {}), vars(args)
        sampling = Sampling(**{key: value for source in asked for key, value in source.items()
                               if key in ("temperature", "top_k", "top_p") and value is not None})
    limit = args.max_seq_length or config.context
    if limit > config.context:
        raise UserError(f"--max-seq-length {limit}: the model's context is {config.context}")
    if args.interactive:
        sys.stdin.reconfigure(errors="replace")
        prompts, length = 1, args.max_seq_length or min(limit, 8192)
    else:
        completions, prompts = prepare(args, tokenizer, limit), len(args.prompt)
        length = max(len(c.prompt_tokens) + c.limit for c in completions)
    packed = read_settings(directory)
    quantized = args.quantize or (f"int{packed['bits']}" if packed else None)
    advice = check_memory(config, prompts * args.num_samples, length, device, dtype, packed.get("bits"))

    profiler, begun = torch.profiler.profile() if args.profile else nullcontext(), time.perf_counter()
    try:
        model = load_model(directory, device, dtype, args.quantize, args.group_size, progress=not args.quiet)
        loaded = time.perf_counter()
        if quantized and not args.compile:
            print("without --compile, quantized weights are unpacked at every step: slow", file=sys.stderr)
        if args.compile and not args.quiet:
            print("compiling ...", file=sys.stderr, flush=True)
        generator = Generator(model, length, sampling, prompts, args.num_samples, args.compile, not args.no_kernels)
        ready = time.perf_counter()
        torch.seed() if args.seed is None else torch.manual_seed(args.seed)
        with profiler:
            if args.interactive:
                runs = [[answer] for answer in chat(generator, tokenizer, length, args) if answer.steps]
            else:
                complete(generator, completions, iter(()) if args.json else show(completions))
                runs = [completions]
    except (MemoryError, RuntimeError) as error:  # a GPU's torch.OutOfMemoryError, a CPU's plain RuntimeError
        if isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error):
            raise UserError(advice) from None
        raise
    if args.profile:
        partial = args.profile.with_stem(args.profile.stem + ".partial")
        profiler.export_chrome_trace(str(partial))
        partial.replace(args.profile)
    if not runs:
        return
    result = report(generator, runs, checkpoint=args.checkpoint, quantize=quantized, load_s=loaded - begun,
                    compile_s=ready - loaded if args.compile else 0.0)
    if args.json:
        print(json.dumps(result))
    if not args.quiet:
        print("\n" + table(result), file=sys.stderr)


if __name__ == "__main__":
    report_errors(main)

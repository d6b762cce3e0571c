"""
Generate text with a Llama-family checkpoint.

    python generate.py                                                    # the bundled model tells a story
    python generate.py --prompt "One day, a fox" --num-samples 3 --compile
    python generate.py --checkpoint meta-llama/Llama-3.1-8B-Instruct --compile --interactive
    torchrun --standalone --nproc-per-node 4 generate.py --checkpoint DIR --compile

Text goes to stdout as it comes, everything else to stderr; with --json, stdout is one JSON object on one line.
"""
import signal

if __name__ == "__main__":  # to import PyTorch takes seconds, and to compile: Ctrl-C ends it there and then
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import Tokenizer, UserError, blame, find_checkpoint, load_config, read_json
from cli import (check_compiler, check_memory, find_draft, find_dtype, generate_args, memory_advice, ranked, report,
                     save_trace, show, table)
from model import Transformer
from quantize import load_model, read_settings
from sampling import Sampling, choose, distribution, draw
from speculative import SLACK, Speculator, accept, propose
from tp import Team, draft_splitter, join, run, splitter

try:
    import fast
except ImportError:  # the folder is gone: plain PyTorch
    kernels = None

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


class Reader:
    """A model with caches for `rows` rows of `length` tokens, `samples` of them for a prompt, and its prefill."""

    def __init__(self, model: Transformer, length: int, sampling: Sampling, rows: int, samples: int, compile: bool,
                 use_kernels: bool):
        self.model, self.decoder, self.sampling, self.samples, self.compiled = model, model, sampling, samples, compile
        self.device = model.embed.weight.device
        self.prefill, self.choose, self.fast = prefill, choose, None
        # A slot more for a prompt, or its last piece, of one token, padded to two, 8 that stay unseen, and a multiple
        # of 8, which attention kernels want of a mask's rows.
        model.setup((length + 16) // 8 * 8, rows)
        if compile:
            torch._inductor.config.fallback_random = True  # a seed draws the same with and without --compile
            torch._inductor.config.size_asserts = False  # a tenth of checkpoints/tiny's step on a CPU
            torch._dynamo.config.specialize_float = True  # dynamic=True is for the prompt's length alone
            torch.fx.experimental._config.use_duck_shape = False  # sizes that are equal once need not stay so
            torch._dynamo.config.automatic_dynamic_shapes = False  # nor to be open, as they change for the first time
            for layer in model.layers:  # prefill: the code of one layer serves all
                layer.compile(dynamic=True, fullgraph=True)
            if use_kernels and kernels:
                fast = kernels.swap_in(model)
                self.decoder, self.choose = fast.decoder, fast.choose or choose
                self.fast = fast if fast.choose else None

    def slots(self, n: int) -> Tensor:
        """The cache's slots to look at when n are in use: a power of two, as each count is a CUDA graph of its own, and
        never all, as torch.compile makes a case of its own of that. The kernels look by themselves."""
        if self.fast:
            return self.model.slots[:0]
        slots = self.model.slots[:-8][:max(256, 1 << (n - 1).bit_length())]
        if self.compiled:
            torch._dynamo.maybe_mark_dynamic(slots, 0)
        return slots

    @torch.no_grad()
    def read(self, prompts: list[list[int]], start: int) -> Tensor:
        """Prefill, behind `start` tokens that are cached -> the tokens after it and their log-probabilities [2, B]."""
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
        return chosen

    def logits(self, tokens: Tensor, *rest: Tensor) -> Tensor:
        """The decoder's logits; tokens that the vocabulary lacks are read as its last."""
        return self.decoder(tokens.clamp(max=self.model.config.vocab_size - 1), *rest)


class Generator(Reader):
    """Prefill and decode of `prompts` x `samples` rows; with a draft, a smaller Transformer or "prompt-lookup", by a
    speculator, whose policy is draft_tokens. A team's ranks do the same, each with its part of the model.

    Shapes: P prompts, B = P x samples rows, T tokens of the longest prompt."""

    def __init__(self, model: Transformer, length: int, sampling: Sampling, prompts: int = 1, samples: int = 1,
                 compile: bool = False, use_kernels: bool = True, draft: Transformer | str | None = None,
                 draft_tokens: str = "auto", team: Team | None = None):
        super().__init__(model, length + SLACK * bool(draft), sampling, prompts * samples, samples, compile, use_kernels)
        self.decode, self.draft, self.speculator, self.team = decode_one_token, None, None, team or Team()
        self.tokens, self.positions = (
            torch.zeros(prompts * samples, dtype=torch.long, device=self.device) for _ in range(2))
        if compile:
            self.decode = torch.compile(decode_one_token, mode="reduce-overhead", fullgraph=True)
            for state in (self.tokens, self.positions):  # the graph then changes them where they are
                torch._dynamo.mark_static_address(state)
        if draft:
            self.add_speculator(draft, draft_tokens, length, prompts * samples, use_kernels)
        elif compile:
            beside = threading.Thread(target=self.warm_up)
            beside.start()
            for _ in self.generate([[0, 0]] * prompts, 4):  # compiles; decode warms up, records its graph, replays it
                pass
            beside.join()

    @torch.no_grad()
    def warm_up(self) -> None:
        """A step as it is, so that Triton compiles its kernels while Dynamo and Inductor are busy with the rest: with
        full caches Llama-2-7B is ready in 3.6 s on an H200, without this in 5.2."""
        if self.fast and self.team.ranks == 1:  # ranks would exchange out of order
            with torch.cuda.device(self.device):  # a thread begins with the first
                state = torch.zeros(2, len(self.tokens), dtype=torch.long, device=self.device)
                decode_one_token(self.decoder, *state, self.slots(1), self.sampling, self.choose)

    @torch.no_grad()
    def add_speculator(self, draft: Transformer | str, draft_tokens: str, length: int, rows: int, use_kernels: bool):
        room = length + SLACK
        if isinstance(draft, Transformer):
            room = min(room, draft.config.context)
            self.draft = Reader(draft, room, self.sampling, rows, self.samples, self.compiled, use_kernels)
            if room < length:
                print(f"the draft's context is {room} tokens: no token beyond is drafted", file=sys.stderr)
        vocabulary, fast = self.model.config.vocab_size, self.fast
        suggest, judge = (fast.propose, fast.accept) if fast else (
            partial(piece, distribution=distribution, draw=draw) for piece in (propose, accept))
        self.speculator = Speculator(
            target=self.decoder, draft=self.draft and self.draft.logits, accept=partial(judge, sampling=self.sampling),
            propose=partial(suggest, sampling=self.sampling, vocabulary=vocabulary),
            decode=lambda *state: self.decode(self.decoder, *state, self.sampling, self.choose),
            slots=(self.slots, (self.draft or self).slots), rows=rows, length=length + SLACK, room=room,
            vocabulary=vocabulary, device=self.device, agree=self.team.agree)
        for reader in filter(None, (self, self.draft)) if self.compiled else ():
            reader.read([[0, 0]] * (rows // self.samples), 0)
        # A CUDA graph takes the kernels as they are.
        self.speculator.prepare(draft_tokens, compile=self.compiled and not fast)

    def steps(self, prompts: list[list[int]], new_tokens: int, start: int) -> Iterator[Tensor]:
        """Each step's tokens and log-probabilities [2, B], a speculator's [B, 2, T + 1]; the next takes their place."""
        chosen = self.read(prompts, start)
        rows = [prompt for prompt in prompts for _ in range(self.samples)]
        draft_reads = self.speculator and self.speculator.begin(rows, start, chosen[0].long(), new_tokens)
        yield chosen  # and not before begin(): with its first token a row may end
        if draft_reads:
            last, room = self.draft.model.config.vocab_size - 1, self.speculator.room - start
            self.draft.read([[min(token, last) for token in prompt[:room]] for prompt in prompts], start)
        if self.speculator:
            yield from self.speculator.steps()
            return
        self.tokens.copy_(chosen[0])
        ends = torch.tensor([start + len(prompt) for prompt in prompts], device=self.device)
        self.positions.copy_(ends.repeat_interleave(self.samples))
        width = start + max(2, *map(len, prompts))
        for n in range(width + 1, width + new_tokens):
            yield self.decode(self.decoder, self.tokens, self.positions, self.slots(n), self.sampling, self.choose)

    def finish(self, row: int) -> None:
        """Nothing more is wanted of this row."""
        if self.speculator:
            self.speculator.finish(row)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int,
                 start: int = 0) -> Iterator[list[list[tuple[int, float]]]]:
        """Of each step and row the new tokens and their log-probabilities, on the host; `start` tokens before the
        prompts' are cached.

        A GPU's are handed over once the step after theirs is launched: it computes while the host looks."""
        cuda = self.device.type == "cuda"

        def to_host(step: Tensor):
            host = torch.empty_like(step, device="cpu", pin_memory=cuda).copy_(step, non_blocking=cuda)
            return host, torch.cuda.current_stream().record_event() if cuda else None

        steps = map(to_host, self.steps(prompts, new_tokens, start))
        if cuda:
            steps = (step for step, _ in pairwise(chain(steps, [None])))
        for host, copied in steps:
            if copied:
                copied.synchronize()
            if host.dim() == 3:
                yield self.speculator.learn(host.tolist())
            else:
                yield [[(int(token), logprob)] for token, logprob in zip(*host.tolist())]


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
        if logprob != logprob:  # NaN
            raise UserError("the logits are not finite: the weights are broken, or --dtype float32 helps")
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

    def mean_logprob(self) -> float:
        return sum(self.logprobs) / max(1, len(self.logprobs))

    def visible(self) -> str:
        """The text, less an end that may yet turn out to begin a stop text."""
        stops = [] if self.finish_reason else self.stop_texts
        held = max((n for stop in stops for n in range(len(stop)) if self.text.endswith(stop[:n])), default=0)
        return self.text[:len(self.text) - held]


def complete(generator: Generator, completions: list[Completion], printing: Iterator, start: int = 0,
             budget: float | None = None) -> None:
    """Generate until each completion has ended or `budget` seconds are over; `start` tokens of the prompts are in the
    cache already."""
    next(printing, None)
    begun, agree = time.perf_counter(), generator.team.agree if budget else float  # all ranks end at once
    prompts = [completion.prompt_tokens[start:] for completion in completions[::generator.samples]]
    for rows in generator.generate(prompts, completions[0].limit, start):
        seconds = agree(time.perf_counter() - begun)
        unfinished = [(b, completion) for b, completion in enumerate(completions) if not completion.finish_reason]
        for b, completion in unfinished:
            if budget and seconds > budget:
                completion.finish_reason = "time"
            for token, logprob in rows[b]:
                if not completion.finish_reason:
                    completion.add(token, logprob, seconds)
            if completion.finish_reason:
                generator.finish(b)
        next(printing, None)
        if all(completion.finish_reason for completion in completions):
            break
    if budget and not any(completion.steps for completion in completions):
        raise UserError(f"--time-budget {budget}: the first token took {seconds:.3f} s; allow more")


def chat(generator: Generator, tokenizer: Tokenizer, length: int, args: argparse.Namespace) -> list[Completion]:
    """Answer line by line; without a chat template, continue the text so far and the line typed."""
    with suppress(ImportError):
        import readline  # noqa: F401: input() then edits lines and recalls them
    hint = "Ctrl-C stops an answer, Ctrl-D leaves." if generator.team.ranks == 1 else "Ctrl-C and Ctrl-D leave."
    print(hint if tokenizer.template else f"{hint} No chat template: your text is continued.", file=sys.stderr)

    def encode(messages: list[dict]) -> list[int]:
        if tokenizer.template:
            return tokenizer.encode(tokenizer.render(messages), rendered=True)
        return tokenizer.encode("".join(message["content"] for message in messages))

    def ask() -> str | None:
        try:
            return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            return ""

    messages, cached, answers = [], [], []
    while (line := generator.team.agree(ask)) is not None:
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
    return answers


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
    args = generate_args(__doc__, TINY)
    device, team = join(args.device)
    dtype = find_dtype(args.dtype, device)
    check_compiler(args.compile, device)
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
    packed, draft = read_settings(directory), args.draft
    models = [(config, packed.get("bits"))]
    if draft and draft != "prompt-lookup":
        draft_directory = find_draft(draft, config, tokenizer)
        models.append((load_config(draft_directory), read_settings(draft_directory).get("bits")))
    quantized = args.quantize or (f"int{packed['bits']}" if packed else None)
    advice = check_memory(models, prompts * args.num_samples, length + SLACK * bool(draft), device, dtype, team.ranks)

    profiler, begun = torch.profiler.profile() if args.profile else nullcontext(), time.perf_counter()
    with memory_advice(advice):
        model = load_model(directory, device, dtype, args.quantize, args.group_size, not args.quiet, splitter(team))
        if draft and draft != "prompt-lookup":
            draft = load_model(draft_directory, device, dtype, args.draft_quantize, None, not args.quiet,
                               draft_splitter(team, models[1][0], dtype))
        loaded = time.perf_counter()
        if quantized and not args.compile:
            print("without --compile, quantized weights are unpacked at every step: slow", file=sys.stderr)
        if args.compile and not args.quiet:
            print("compiling ...", file=sys.stderr, flush=True)
        generator = Generator(model, length, sampling, prompts, args.num_samples, args.compile, not args.no_kernels,
                              draft, args.draft_tokens or "auto", team)
        ready = time.perf_counter()
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # not torchrun's ranks
            signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.manual_seed(team.agree(torch.seed() if args.seed is None else args.seed))
        with profiler:
            if args.interactive:
                runs = [[answer] for answer in chat(generator, tokenizer, length, args) if answer.steps]
            else:
                streamed = not args.json and not args.time_budget
                complete(generator, completions, show(completions) if streamed else iter(()), budget=args.time_budget)
                runs = [completions]
                if args.time_budget:
                    runs = [ranked(completions, args.num_samples)]
                    for _ in show(runs[0]) if not args.json else ():
                        pass
    if args.profile and team.rank == 0:
        save_trace(profiler, args.profile)
    if not runs:
        return
    result = report(generator, runs, kernels and kernels.read_bandwidth, checkpoint=args.checkpoint, quantize=quantized, load_s=loaded - begun,
                    compile_s=ready - loaded if args.compile else 0.0, world_size=team.ranks)
    if args.json:
        print(json.dumps(result))
    if not args.quiet:
        print("\n" + table(result), file=sys.stderr)


if __name__ == "__main__":
    run(main)

"""
Generate text with a Llama-family checkpoint.

    python generate.py                                                    # the bundled model tells a story
    python generate.py --prompt "One day, a fox" --num-samples 3 --compile
    python generate.py --checkpoint meta-llama/Llama-3.1-8B-Instruct --compile --interactive
    torchrun --standalone --nproc-per-node 4 generate.py --checkpoint DIR --compile

Text goes to stdout as it is generated, everything else to stderr. With --json, stdout is one JSON object on one line.
"""
import signal

if __name__ == "__main__":  # PyTorch takes seconds to import, and compiling takes longer: Ctrl-C ends both at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from chat import Chat, check_messages
from checkpoint import Tokenizer, UserError, find_checkpoint, load_config, read_json, reading
from cli import (add_headings, as_messages, cache_bytes, check_compiler, check_memory, find_draft, find_dtype,
                 format_report, generate_args, keyword_options, memory_advice, rank_completions, read_prompts, report,
                 show, written_whole)
from formats import read_settings, unpack_quantized
from model import Transformer
from quantize import check_quantize, load_checkpoint
from sampling import Sampling, choose
from speculative import SLACK, Draft, DraftModel, PromptLookup, Speculator, accept, propose
from tp import Team, draft_splitter, join, run, splitter

TINY = str(Path(__file__).parent / "checkpoints" / "tiny")
PREFILL_TOKENS = 4096  # at a time, over all prompts: the memory of prefill does not grow with the prompt


def prefill(model: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor) -> Tensor:
    """tokens [P, T], padded on the right, at positions [1, T] -> the logits of columns last [P], [P, V]."""
    return model(tokens, positions, slots, last)


def decode_one_token(model: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, sampling: Sampling,
                     choose: Callable) -> Tensor:
    """tokens, positions [B] -> the next tokens and their log-probabilities [2, B]; tokens and positions move on."""
    logits = model(tokens[:, None], positions[:, None], slots).squeeze(1)  # [B, V]
    chosen = torch.stack(choose(logits, sampling))
    tokens.copy_(chosen[0])  # floats hold tokens exactly: up to 2 ** 24
    positions += 1
    return chosen


@cache
def import_fast():
    """fast/, the speed layer. None where the folder was deleted or, after a line on stderr, does not import."""
    try:
        import fast
        return fast if fast.__file__ else None  # an empty folder is a package without a file
    except Exception as error:  # whatever is wrong with it, the plain path runs
        if not isinstance(error, ModuleNotFoundError) or error.name != "fast":
            print(f"fast/ cannot be imported, plain PyTorch runs: {type(error).__name__}: {error}", file=sys.stderr)


class ModelRunner:
    """A model with its KV cache, and its prefill and decode functions, compiled or not.

    The cache has `samples` rows for each of `prompts` prompts; a call may use fewer. mode: "eager"; "compile",
    torch.compile and nothing else; or "fast", torch.compile and what fast/ puts in the place of the model's modules."""

    def __init__(self, model: Transformer, max_seq_len: int, sampling: Sampling, prompts: int = 1, samples: int = 1,
                 mode: str = "eager"):
        self.model, self.max_seq_len, self.sampling, self.samples = model, max_seq_len, sampling, samples
        self.batch_size, self.device = prompts * samples, model.embed.weight.device
        self.prefill, self.decode_one_token, self.decoder = prefill, decode_one_token, model
        self.choose, self.accept, self.propose = choose, accept, propose
        self.compiled, self.kernels, self.read_bandwidth = mode != "eager", False, None
        # Behind the last token are up to 15 slots for the columns that fill up a prompt, and 8 that slots() leaves out
        # when compiled. Rounded up to 8 for SDPA's masks.
        model.setup((max_seq_len + 30) // 8 * 8, self.batch_size)
        if self.compiled:
            self.compile(mode)

    def compile(self, mode: str) -> None:
        torch._inductor.config.fallback_random = True  # a seed draws the same with and without --compile
        torch._inductor.config.size_asserts = False  # a tenth of checkpoints/tiny's step on a CPU
        torch._dynamo.config.specialize_float = True  # dynamic=True is for the length of the prompt alone
        # decode_one_token is compiled for each Sampling.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
        torch.fx.experimental._config.use_duck_shape = False  # do not unify dynamic sizes that happen to coincide
        torch._dynamo.config.automatic_dynamic_shapes = False  # do not make a size dynamic when it first changes
        for layer in self.model.layers:  # prefill: the code of one layer serves all
            layer.compile(dynamic=True, fullgraph=True)
        self.decode_one_token = torch.compile(decode_one_token, mode="reduce-overhead", fullgraph=True)
        fast = import_fast()
        self.read_bandwidth = fast and fast.read_bandwidth
        if found := fast.optimize(self.model) if fast and mode == "fast" else None:
            self.decoder, self.kernels = found.decoder, found.kernels
            self.choose, self.accept, self.propose = found.choose, found.accept, found.propose

    def slots(self, n: int) -> Tensor:
        """The cache's first slots, at least the n that are in use. Kernels find these by themselves."""
        if self.kernels:
            return self.model.slots[:0]
        if self.device.type != "cuda" and not self.compiled:
            return self.model.slots[:(n + 7) // 8 * 8]
        # A power of two: each length is a CUDA graph of its own or, eager, a plan of cuDNN's (see prefill_prompts()).
        # Always a strict slice: the full view would specialize and recompile.
        slots = self.model.slots[:-8][:max(256, 1 << (n - 1).bit_length())]
        if self.compiled:
            torch._dynamo.maybe_mark_dynamic(slots, 0)
        return slots

    @torch.no_grad()
    def prefill_prompts(self, prompts: list[list[int]], start: int, samples: int) -> Tensor:
        """Reads prompts, chunk by chunk, behind `start` cached tokens -> the next tokens of each prompt's samples and
        their log-probabilities [2, P x samples]."""
        # A chunk has a multiple of 2 columns: dynamic=True would compile once more for a single one. On a GPU, in plain
        # PyTorch, it has a multiple of 16: for each shape cuDNN's attention makes a plan of 1.8 MiB, which PyTorch
        # keeps.
        step = 2
        if self.device.type == "cuda" and not self.kernels and 16 * len(prompts) <= PREFILL_TOKENS:
            step = 16
        size = max(step, PREFILL_TOKENS // len(prompts) // step * step)
        if self.device.type == "cpu":
            # Eager, prompts leave with the chunk they end in: 64 of 8 to 68 tokens, the longest first, took SmolLM2
            # 2.4 s so, and 4.2 s in one chunk (two cores). In another order both took the same time.
            size = min(size, max(16, size // 8 * 2))
        width = -(-max(map(len, prompts)) // step) * step
        tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        logits = [None] * len(prompts)
        for at in range(0, width, size):
            # Eager, prompts that have ended leave, unless a longer one follows them.
            used = 1 + max(row for row, prompt in enumerate(prompts) if self.compiled or len(prompt) > at)
            chunk, end = tokens[:used, at:at + size], (last[:used] - at).clamp(0, size - 1)
            # Not a slice of all positions: its strides would be new to the compiler.
            positions = start + at + torch.arange(chunk.shape[1], device=self.device)[None]
            slots = self.slots(start + at + chunk.shape[1])
            for row, found in enumerate(self.prefill(self.model, chunk, positions, slots, end)):
                if at < len(prompts[row]) <= at + size:
                    logits[row] = found.clone()  # a view would keep the logits of all prompts
        if samples > 1:
            self.model.arrange_rows([row for row in range(len(prompts)) for _ in range(samples)], start + width)
        return torch.stack(self.choose(torch.stack(logits).repeat_interleave(samples, dim=0), self.sampling))

    def decode(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """As decode_one_token(); compiled, the next step overwrites what this one returned."""
        return self.decode_one_token(self.decoder, tokens, positions, slots, self.sampling, self.choose)


class Generator(ModelRunner):
    """The loop: prefill, then one decode step after the other or, with a draft, speculative steps.

    max_seq_len: tokens of a prompt and its completion at most. prompts, samples: the usual number of prompts, and of
    samples of each. Their product, B, is the number of rows at most; compiled, a step always has B rows. Under tensor
    parallelism each of the team's ranks runs a Generator with its part of the model.

    Shapes: B rows, P prompts of a call, T tokens of the longest prompt."""

    def __init__(self, model: Transformer, max_seq_len: int, sampling: Sampling, prompts: int = 1, samples: int = 1,
                 mode: str = "eager", draft: Draft | None = None, team: Team | None = None):
        super().__init__(model, max_seq_len + SLACK * bool(draft), sampling, prompts, samples, mode)
        self.team, self.speculator, self.runners = team or Team(), None, [self]
        self.tokens = torch.zeros(self.batch_size, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        if self.compiled:
            for state in (self.tokens, self.positions):  # the CUDA graph then updates them in place
                torch._dynamo.mark_static_address(state)
        if draft:
            self.speculator = Speculator(self, self.make_drafter(draft.model, prompts, mode), draft.policy)
            if self.compiled:
                self.compile_prefill(prompts)
            self.speculator.prepare()
        elif self.compiled:
            alone = self.kernels and self.team.ranks == 1  # ranks would exchange their sums in different orders
            with self.decoder.warm_up(self.batch_size, self.choose, sampling) if alone else nullcontext():
                for _ in self.generate([[0, 0]] * prompts, 4):  # compiles; decode runs, records its graph, replays it
                    pass

    def make_drafter(self, model: Transformer | None, prompts: int, mode: str) -> DraftModel | PromptLookup:
        if model is None:
            return PromptLookup(self)
        length = min(self.max_seq_len, model.config.context)
        if length < self.max_seq_len - SLACK:
            print(f"the draft's context is {length} tokens: no token beyond is drafted", file=sys.stderr)
        self.runners.append(ModelRunner(model, length, self.sampling, prompts, self.samples, mode))
        return DraftModel(self.runners[1], self.model.config.vocab_size)

    def compile_prefill(self, prompts: int) -> None:
        """Reads so many prompts of two tokens. The compiler has one code for a single prompt and one for several."""
        for runner in self.runners:
            runner.prefill_prompts([[0, 0]] * prompts, 0, 1)

    def set_sampling(self, sampling: Sampling) -> None:
        """For the calls from now on. Compiled, each setting is compiled once; speculative steps are made anew."""
        for runner in self.runners:
            runner.sampling = sampling
        if self.speculator:
            self.speculator.prepare()

    def steps(self, prompts: list[list[int]], new_tokens: int, start: int, samples: int) -> Iterator[Tensor]:
        """Each step's tokens and log-probabilities [2, B], a speculative one's [B, 2, T + 1]. The next step overwrites
        them. Rows that are not in use come last; they are decoded, too, where the batch is compiled. Eager and greedy,
        rows that the caller wants no more of leave, at least a quarter at a time; numbers in their place mean
        nothing."""
        chosen = self.prefill_prompts(prompts, start, samples)
        if self.speculator:
            self.speculator.begin(prompts, start, samples, chosen[0].long(), new_tokens)
            yield chosen  # only now: a row may finish with its first token
            yield from self.speculator.steps()
            return
        yield chosen
        used = chosen.shape[1]
        self.tokens[:used] = chosen[0]
        self.positions.zero_()
        self.positions[:used] = torch.tensor([start + len(prompt) for prompt in prompts for _ in range(samples)])
        tokens, positions, leave = self.tokens, self.positions, False
        if not self.compiled:  # a CUDA graph wants the same tensors each time
            # Sampled rows stay: a seed draws the same numbers as compiled.
            tokens, positions, leave = tokens[:used], positions[:used], self.sampling.greedy
        longest, rows = start + max(map(len, prompts)), list(range(used))
        for n in range(longest + 1, longest + new_tokens):
            if leave and len(rows) // 4 < len(self.ended.intersection(rows)) < len(rows):
                kept = [i for i, row in enumerate(rows) if row not in self.ended]
                self.model.arrange_rows(kept, n)
                rows, tokens, positions = [rows[i] for i in kept], tokens[kept], positions[kept]
                places = torch.tensor(rows, device=self.device)
            step = self.decode(tokens, positions, self.slots(n))
            yield step if len(rows) == used else chosen.index_copy(1, places, step)

    def finish(self, row: int) -> None:
        """The caller wants no more tokens of this row."""
        self.ended.add(row)
        if self.speculator:
            self.speculator.finish(row)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int, start: int = 0,
                 samples: int | None = None) -> Iterator[list[list[tuple[int, float]]]]:
        """For each step and row the new tokens with their log-probabilities, on the host.

        Ragged prompts need no padding mask: see model.py. start: so many tokens, the same for all prompts, are in the
        cache already; not where greedy rows left an eager batch, as the others moved up. samples: rows of each prompt,
        the constructor's if None. On a GPU a step is yielded after the next one is launched, so that the GPU never
        waits."""
        samples, self.ended = samples or self.samples, set()
        rows = len(prompts) * samples
        steps = map(self.copy_to_host, self.steps(prompts, new_tokens, start, samples))
        if self.device.type == "cuda":
            steps = one_behind(steps)
        for host, copied in steps:
            if copied:
                copied.synchronize()
            if host.dim() == 3:
                yield self.speculator.learn(host.tolist())[:rows]
            else:
                yield [[(int(token), logprob)] for token, logprob in zip(*host[:, :rows].tolist())]

    def copy_to_host(self, step: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy, and the event that says when it is there."""
        if self.device.type != "cuda":
            return step.to("cpu", copy=True), None
        host = torch.empty_like(step, device="cpu", pin_memory=True).copy_(step, non_blocking=True)
        return host, torch.cuda.current_stream().record_event()


def one_behind(steps: Iterator) -> Iterator:
    """Holds a step, launches the next, yields the held one."""
    held = next(steps, None)
    for step in steps:
        yield held
        held = step
    if held is not None:
        yield held


@dataclass
class Completion:
    """One row of the batch: the tokens that follow its prompt, their text so far, and why they ended."""
    prompt: str
    prompt_tokens: list[int]
    tokenizer: Tokenizer = field(repr=False)
    limit: int  # new tokens at most
    stop_texts: list[str] = field(default_factory=list)
    heading: str = field(default="", repr=False)  # what the command line prints before the text
    tokens: list[int] = field(default_factory=list)  # the new ones, without the stop token
    logprobs: list[float] = field(default_factory=list, repr=False)
    text: str = ""
    finish_reason: str | None = None  # "stop", "length", "time" or, in a chat, "interrupted"
    steps: int = 0  # that of a stop token included
    first_s: float = 0.0  # when the first step came, since the start
    seconds: float = 0.0  # when the last one came

    def __post_init__(self):
        # New tokens are decoded together with the tokens before them: their spaces depend on these.
        self.window = self.prompt_tokens[-8:]
        self.decoded = len(self.window)  # how many tokens of the window are in the text already

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
        if len(after) > len(before) and not after.endswith("\ufffd"):  # else the last character is incomplete
            self.text += after[len(before):]
            self.window, self.decoded = self.window[self.decoded:], len(self.window) - self.decoded
        ends = [at for stop in self.stop_texts if (at := self.text.find(stop)) >= 0]
        if ends:
            self.text, self.finish_reason = self.text[:min(ends)], "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"

    @property
    def mean_logprob(self) -> float | None:
        """Of the tokens under the model's raw logits; None without tokens."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else None

    def visible(self) -> str:
        """The text, without an end that may yet turn out to begin a stop text."""
        stops = [] if self.finish_reason else self.stop_texts
        held = max((n for stop in stops for n in range(len(stop)) if self.text.endswith(stop[:n])), default=0)
        return self.text[:len(self.text) - held]


def complete(generator: Generator, completions: list[Completion], samples: int = 1, start: int = 0,
             budget: float | None = None) -> Iterator[None]:
    """Generates until each completion has ended or `budget` seconds are over, and yields after each step.

    Each prompt has `samples` completions, one after the other. `start` tokens of the prompts are in the cache
    already."""
    begun = time.perf_counter()
    agree = generator.team.agree if budget else float  # with a budget all ranks must stop at the same step
    prompts = [completion.prompt_tokens[start:] for completion in completions[::samples]]
    for rows in generator.generate(prompts, completions[0].limit, start, samples):
        seconds = agree(time.perf_counter() - begun)
        for b, completion in enumerate(completions):
            if completion.finish_reason:
                continue
            if budget and seconds > budget:
                completion.finish_reason = "time"
            for token, logprob in rows[b]:
                if not completion.finish_reason:
                    completion.add(token, logprob, seconds)
            if completion.finish_reason:
                generator.finish(b)
        yield
        if all(completion.finish_reason for completion in completions):
            break
    if budget and not any(completion.steps for completion in completions):
        raise UserError(f"--time-budget {budget}: the first token took {seconds:.3f} s; allow more")


class LLM:
    """A checkpoint, ready to generate: the Python API, and what the command line runs.

        llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", compile=True)
        print(llm("The capital of France is", max_new_tokens=20, temperature=0).text)

    Keywords are the options of generate.py: max_new_tokens=20 is --max-new-tokens 20. Those of a generation, from
    max_new_tokens to time_budget in --help, may be given here, for all calls, or to a call.

    The KV cache has max_batch_size rows (prompts times samples) of max_seq_length tokens. The first call sets what is
    not given, and a larger call lets it grow. With compile=True the first call takes 2,048 tokens at least if the model
    has them, and when the cache grows the model is loaded and compiled again, and so are other LLMs of the process.
    Calls of any size within these limits compile nothing again, but each new temperature, top_k or top_p is compiled
    once; with a draft, each change of these takes seconds. Compiled, a step costs what max_batch_size rows cost, and
    draws random numbers for as many.

    ValueError for a mistake: an unknown keyword, a value out of its limits, a prompt or a batch that is too large. One
    call at a time: another one ends a stream() that goes on. Under torchrun each rank makes the same calls."""

    def __init__(self, checkpoint: str = TINY, max_batch_size: int | None = None, load: bool = True,
                 quiet: bool = False, **options):
        """load: False puts off reading the weights to load() or the first call. quiet: no loading bar."""
        self.options = keyword_options(dict(checkpoint=checkpoint, **options))
        if not (max_batch_size is None or type(max_batch_size) is int and max_batch_size > 0):
            raise UserError(f"max_batch_size={max_batch_size!r}: want a whole number, 1 or more")
        self.max_batch_size, self.quiet = max_batch_size, quiet
        self.device, self.team = join(self.options.device)
        self.dtype = find_dtype(self.options.dtype, self.device)
        check_compiler(self.options.compile, self.device)
        self.directory = find_checkpoint(str(checkpoint))
        self.config, self.tokenizer = load_config(self.directory), Tokenizer(self.directory)
        self.context = self.options.max_seq_length or self.config.context
        if self.context > self.config.context:
            raise UserError(f"--max-seq-length {self.context}: the model's context is {self.config.context}")
        settings = read_settings(self.directory)
        check_quantize(self.directory, self.options.quantize, self.options.group_size)
        self.quantized = self.options.quantize or settings.get("name")
        self.models, self.draft_directory = [(self.config, settings.get("bits"))], None
        if self.options.draft not in (None, "prompt-lookup"):
            self.draft_directory = find_draft(self.options.draft, self.config, self.tokenizer)
            self.models.append((load_config(self.draft_directory), read_settings(self.draft_directory).get("bits")))
        self.model = self.draft_model = self.generator = self.running = None
        self.load_s, self.compile_s, self.room = 0.0, 0.0, 0  # room: tokens of a prompt and its completion
        if self.team.ranks > 1:
            torch.manual_seed(self.team.agree(torch.seed()))
        if load and max_batch_size and self.options.max_seq_length:
            self.prepare_for_any(max_batch_size, self.context)
        elif load:
            self.load(max_batch_size or 1, self.options.max_seq_length or 1)

    def load(self, rows: int = 1, length: int = 1) -> None:
        """Reads the weights. UserError where they and a cache of so many rows of `length` tokens do not fit."""
        begun = time.perf_counter()
        with memory_advice(self.check_memory(rows, length)):
            options = self.options
            load = partial(load_checkpoint, device=self.device, dtype=self.dtype, progress=not self.quiet)
            self.model = load(self.directory, quantize=options.quantize, group_size=options.group_size,
                              split=splitter(self.team))
            if self.draft_directory:
                split = draft_splitter(self.team, self.models[1][0])
                self.draft_model = load(self.draft_directory, quantize=options.draft_quantize, split=split)
        self.load_s = time.perf_counter() - begun

    def check_memory(self, rows: int, length: int) -> str:
        return check_memory(self.models, rows, length + SLACK * bool(self.options.draft), self.device, self.dtype,
                            self.team.ranks, loaded=self.model is not None)

    def prepare(self, prompts: int, samples: int, length: int, sampling: Sampling | None = None) -> None:
        """Makes the generator for so many prompts, samples of each, and tokens of a prompt and its completion. What is
        not loaded yet is loaded, and what is to be compiled is compiled."""
        options, rows = self.options, prompts * samples
        if self.generator and options.compile:  # compiled code and kernels hold the old cache
            if not self.quiet:
                print(f"compiling again: the KV cache grows to max_batch_size={rows}, max_seq_length={length}",
                      file=sys.stderr)
            self.generator = self.model = self.draft_model = None
            torch._dynamo.reset()
        elif self.generator:
            self.generator = None
            for model in filter(None, (self.model, self.draft_model)):
                model.setup(1, 1)  # frees the old cache
        gc.collect()
        if self.model is None:
            self.load(rows, length)
        self.advice, begun = self.check_memory(rows, length), time.perf_counter()
        reserve = rows * length * sum(cache_bytes(config, self.dtype) for config, _ in self.models)
        for model in filter(None, () if options.compile else (self.model, self.draft_model)):
            unpack_quantized(model, reserve, self.quiet)
        mode = "compile" if options.no_kernels else "fast"
        draft = Draft(self.draft_model, options.draft_tokens or "auto") if options.draft else None
        if options.compile and not self.quiet and sys.stderr.isatty():
            print("compiling ...", file=sys.stderr)
        with memory_advice(self.advice):
            self.generator = Generator(self.model, length, sampling or find_sampling(self.directory, options), prompts,
                                       samples, mode if options.compile else "eager", draft, self.team)
        self.room = length
        self.compile_s = time.perf_counter() - begun if options.compile else 0.0

    def prepare_for_any(self, rows: int, length: int, sampling: Sampling | None = None) -> None:
        """prepare() for any call of up to so many rows and tokens."""
        self.prepare(rows, 1, length, sampling)
        if self.options.compile and rows > 1:
            self.generator.compile_prefill(1)

    def fit(self, rows: int, length: int, sampling: Sampling) -> None:
        """Makes a generator for any call of so many rows and tokens, unless the one that is there serves."""
        if self.max_batch_size and rows > self.max_batch_size:
            raise UserError(f"{rows} rows (prompts x samples) exceed max_batch_size={self.max_batch_size}: give fewer")
        if not self.generator or rows > self.generator.batch_size or length > self.room:
            least = min(2048, self.context) if self.options.compile else 1
            there = (self.generator.batch_size, self.room) if self.generator else (1, least)
            rows = self.max_batch_size or max(rows, there[0])
            self.prepare_for_any(rows, self.options.max_seq_length or max(length, least, there[1]), sampling)
        elif sampling != self.generator.sampling:
            self.generator.set_sampling(sampling)

    def completions(self, prompts: list, options: argparse.Namespace) -> list[Completion]:
        """A completion for each prompt and sample. A prompt is a text, or a chat's messages. UserError where the
        context, or max_seq_length, has no room for it."""
        if not prompts:
            raise UserError("no prompt: want a text, messages, or a list of these")
        encoded = [self.encode(prompt) for prompt in prompts]
        texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
        if [] in encoded:
            raise UserError("the prompt is empty, and this tokenizer adds no beginning of sequence; give some text")
        longest = max(map(len, encoded))
        new_tokens = options.max_new_tokens or max(1, min(256, self.context - longest))
        if longest + new_tokens > self.context:
            limit = "--max-seq-length" if self.options.max_seq_length else "the model's context"
            raise UserError(f"{longest} prompt tokens and {new_tokens} new ones exceed {self.context}, {limit}: "
                            "shorten the prompt or lower --max-new-tokens")
        return [self.completion(text, tokens, new_tokens, options.stop)
                for text, tokens in zip(texts, encoded) for _ in range(options.num_samples)]

    def completion(self, text: str, tokens: list[int], new_tokens: int, stop_texts: list[str]) -> Completion:
        return Completion(text, tokens, self.tokenizer, new_tokens, stop_texts)

    def encode(self, prompt: str | list[dict]) -> list[int]:
        """A text's tokens or, through the chat template, those of messages."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        with reading("a prompt"):
            check_messages(prompt)
        if not self.tokenizer.template:
            raise UserError(f"{self.options.checkpoint} has no chat template: give a text, which is continued")
        return self.tokenizer.encode_messages(prompt)

    def steps(self, completions: list[Completion], options: argparse.Namespace) -> Iterator[None]:
        """The steps that fill the completions, all of one limit; what they need is made first."""
        if self.running:
            self.running.close()  # a stream that goes on ends here
        length = max(len(completion.prompt_tokens) for completion in completions) + completions[0].limit
        self.fit(len(completions), length, find_sampling(self.directory, options))
        if options.seed is not None:
            torch.manual_seed(options.seed)
        self.running = self.complete(completions, options.num_samples, budget=options.time_budget)
        return self.running

    def complete(self, completions: list[Completion], samples: int = 1, start: int = 0,
                 budget: float | None = None) -> Iterator[None]:
        """The function complete(), with advice where memory runs out."""
        with memory_advice(self.advice):
            yield from complete(self.generator, completions, samples, start, budget)

    def __call__(self, prompts: str | list, **options) -> Completion | list[Completion]:
        """Completes a text or, given as a list of {"role": ..., "content": ...}, a chat's messages; or a list of these
        as one batch. Of a list, and of several samples, a list of Completions: in the order of the prompts, then of
        the samples or, with a time budget, of their rank."""
        options = keyword_options(options, self.options)
        if not isinstance(prompts, (str, list, tuple)):
            raise UserError(f"{prompts!r:.60}: want a text, messages, or a list of these")
        single = isinstance(prompts, str) or bool(prompts) and isinstance(prompts[0], dict)
        completions = self.completions([prompts] if single else prompts, options)
        for _ in self.steps(completions, options):
            pass
        if options.time_budget:
            completions = rank_completions(completions, options.num_samples)
        return completions[0] if single and options.num_samples == 1 else completions

    def stream(self, prompt: str | list[dict], **options) -> Iterator[str]:
        """The completion of one prompt, piece by piece, as it is generated. Another call ends it."""
        options = keyword_options(options, self.options)
        if options.num_samples > 1:
            raise UserError(f"num_samples={options.num_samples}: a stream is of one sample")
        [completion] = self.completions([prompt], options)
        return self.pieces(completion, self.steps([completion], options))

    @staticmethod
    def pieces(completion: Completion, steps: Iterator[None]) -> Iterator[str]:
        shown = 0
        for _ in steps:
            text = completion.visible()
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)


def find_sampling(directory: Path, options: argparse.Namespace) -> Sampling:
    """The command line's options, else generation_config.json's, else Sampling's defaults."""
    with reading(directory / "generation_config.json"):
        found = read_json(directory / "generation_config.json", {})
        found |= {key: value for key, value in vars(options).items() if value is not None}
        return Sampling(**{key: found[key] for key in ("temperature", "top_k", "top_p") if found.get(key) is not None})


def run_prompts(llm: LLM, completions: list[Completion], args: argparse.Namespace) -> list[Completion]:
    """Generates and prints them; with a time budget in the order of their rank, once it is over."""
    streamed = not args.json and not args.time_budget
    steps = llm.complete(completions, args.num_samples, budget=args.time_budget)
    try:
        show(completions if streamed else [], steps)
    except UserError:
        print(end="\n" * streamed, flush=True)  # the message to come has a line of its own
        raise
    if args.time_budget:
        completions = rank_completions(completions, args.num_samples)
        show([] if args.json else completions)
    return completions


def main() -> None:
    """Opens the checkpoint, loads, compiles, generates and reports, in that order."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # the compiler's hints to its developers
    sys.stdout.reconfigure(errors="replace")  # not every terminal shows all of Unicode
    args = generate_args(__doc__, TINY)
    known = vars(keyword_options({}))  # LLM's keywords
    llm = LLM(load=False, quiet=args.quiet, **{name: value for name, value in vars(args).items() if name in known})
    if (args.chat or args.system is not None) and not llm.tokenizer.template:
        raise UserError(f"--chat, --system: {args.checkpoint} has no chat template; without them its text is continued")
    if args.interactive:
        sys.stdin.reconfigure(errors="replace")
        size = 1, 1, args.max_seq_length or min(llm.context, 8192)  # a chat's cache is allocated whole
    else:
        prompts = llm.team.agree(lambda: read_prompts(args))
        completions = llm.completions(as_messages(prompts, args, llm.tokenizer), args)
        add_headings(completions, args)
        longest = max(len(completion.prompt_tokens) for completion in completions)
        size = len(prompts), args.num_samples, longest + completions[0].limit
    llm.prepare(*size)
    if llm.team.ranks == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    profiler = torch.profiler.profile() if args.profile else nullcontext()
    with profiler:
        if args.interactive:
            runs = [[answer] for answer in Chat(llm, args).run() if answer.steps]
        else:
            runs = [run_prompts(llm, completions, args)]
    if runs:
        result = report(llm.generator, runs, checkpoint=args.checkpoint, quantize=llm.quantized, load_s=llm.load_s,
                        compile_s=llm.compile_s, world_size=llm.team.ranks)
        if args.json:
            print(json.dumps(result))
        if not args.quiet:
            print("\n" + format_report(result), file=sys.stderr)
    if args.profile and llm.team.rank == 0:
        with reading(f"--profile {args.profile}: cannot be written"), written_whole(args.profile) as trace:
            profiler.export_chrome_trace(str(trace))


if __name__ == "__main__":
    run(main)

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
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import Tokenizer, UserError, find_checkpoint, load_config, read_json, reading
from cli import (check_compiler, check_memory, find_draft, find_dtype, format_report, generate_args, memory_advice,
                 rank_completions, report, save_trace, show)
from model import Transformer
from quantize import load_checkpoint, read_settings
from sampling import Sampling, choose
from speculative import SLACK, Draft, DraftModel, PromptLookup, Speculator, accept, propose
from tp import Team, draft_splitter, join, run, splitter

TINY = str(Path(__file__).parent / "checkpoints" / "tiny")
PREFILL_TOKENS = 4096  # at a time, over all prompts: the memory of prefill does not grow with the prompt


def prefill(model: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor, sampling: Sampling,
            choose: Callable, samples: int) -> Tensor:
    """tokens [P, T], padded on the right, at positions [1, T]; last [P], each prompt's last column -> the next tokens
    and their log-probabilities [2, P x samples]."""
    logits = model(tokens, positions, slots, last)  # [P, V]
    return torch.stack(choose(logits.repeat_interleave(samples, dim=0), sampling))


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

    The batch has `samples` rows for each of `prompts` prompts. mode: "eager"; "compile", torch.compile and nothing
    else; or "fast", torch.compile and what fast/ puts in the place of the model's modules."""

    def __init__(self, model: Transformer, max_seq_len: int, sampling: Sampling, prompts: int = 1, samples: int = 1,
                 mode: str = "eager"):
        self.model, self.max_seq_len, self.sampling, self.samples = model, max_seq_len, sampling, samples
        self.batch_size, self.device = prompts * samples, model.embed.weight.device
        self.prefill, self.decode_one_token, self.decoder = prefill, decode_one_token, model
        self.choose, self.accept, self.propose = choose, accept, propose
        self.compiled, self.kernels, self.read_bandwidth = mode != "eager", False, None
        # +1: a 1-token chunk is padded to 2; +8: slots() never exposes the last 8; rounded up to 8 for SDPA's masks
        model.setup((max_seq_len + 16) // 8 * 8, self.batch_size)
        if self.compiled:
            self.compile(mode)

    def compile(self, mode: str) -> None:
        torch._inductor.config.fallback_random = True  # a seed draws the same with and without --compile
        torch._inductor.config.size_asserts = False  # a tenth of checkpoints/tiny's step on a CPU
        torch._dynamo.config.specialize_float = True  # dynamic=True is for the length of the prompt alone
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
        # A power of two: each length is a CUDA graph of its own. Always a strict slice: the full view would specialize
        # and recompile.
        slots = self.model.slots[:-8][:max(256, 1 << (n - 1).bit_length())]
        if self.compiled:
            torch._dynamo.maybe_mark_dynamic(slots, 0)
        return slots

    @torch.no_grad()
    def prefill_prompts(self, prompts: list[list[int]], start: int) -> Tensor:
        """Reads prompts, chunk by chunk, behind `start` cached tokens -> the next tokens and their log-probabilities
        [2, B]."""
        size = max(2, PREFILL_TOKENS // len(prompts))  # columns of a chunk
        width = max(2, *map(len, prompts))
        width += width % size == 1  # dynamic=True would compile once more for a width of 1
        tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        chosen = 0
        for at in range(0, width, size):
            chunk, end = tokens[:, at:at + size], (last - at).clamp(0, size - 1)
            # Not a slice of all positions: its strides would be new to the compiler.
            positions = start + at + torch.arange(chunk.shape[1], device=self.device)[None]
            slots = self.slots(start + at + chunk.shape[1])
            fresh = self.prefill(self.model, chunk, positions, slots, end, self.sampling, self.choose, self.samples)
            ends_here = last // size == at // size  # [P]
            chosen = torch.where(ends_here.repeat_interleave(self.samples), fresh, chosen)
        self.model.repeat_rows(self.samples)
        return chosen

    def decode(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """As decode_one_token(); compiled, the next step overwrites what this one returned."""
        return self.decode_one_token(self.decoder, tokens, positions, slots, self.sampling, self.choose)


class Generator(ModelRunner):
    """The loop: prefill, then one decode step after the other or, with a draft, speculative steps.

    max_seq_len: tokens of a prompt and its completion at most. Under tensor parallelism each of the team's ranks runs
    a Generator with its part of the model.

    Shapes: P prompts, B = P x samples rows, T tokens of the longest prompt."""

    def __init__(self, model: Transformer, max_seq_len: int, sampling: Sampling, prompts: int = 1, samples: int = 1,
                 mode: str = "eager", draft: Draft | None = None, team: Team | None = None):
        super().__init__(model, max_seq_len + SLACK * bool(draft), sampling, prompts, samples, mode)
        self.team, self.speculator = team or Team(), None
        self.tokens = torch.zeros(self.batch_size, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        if self.compiled:
            for state in (self.tokens, self.positions):  # the CUDA graph then updates them in place
                torch._dynamo.mark_static_address(state)
        if draft:
            self.speculator = self.make_speculator(draft, prompts, mode)
        elif self.compiled:
            warm_up = threading.Thread(target=self.warm_up_kernels)
            warm_up.start()
            for _ in self.generate([[0, 0]] * prompts, 4):  # compiles; decode warms up, records its graph, replays it
                pass
            warm_up.join()
            if self.kernels:
                self.decoder.reset_semaphores()

    @torch.no_grad()
    def warm_up_kernels(self) -> None:
        """One eager step: Triton compiles its kernels while Dynamo and Inductor are busy with the rest.

        With full caches Llama-2-7B is ready in 3.6 s on an H200, without this in 5.2 s. Several ranks would exchange
        their sums in different orders, so they do without."""
        if self.kernels and self.team.ranks == 1:
            with torch.cuda.device(self.device):  # a thread starts with the first GPU
                tokens, positions = torch.zeros_like(self.tokens), torch.zeros_like(self.positions)
                decode_one_token(self.decoder, tokens, positions, self.slots(1), self.sampling, self.choose)

    @torch.no_grad()
    def make_speculator(self, draft: Draft, prompts: int, mode: str) -> Speculator:
        if draft.model is None:
            drafter, runners = PromptLookup(self), [self]
        else:
            length = min(self.max_seq_len, draft.model.config.context)
            runner = ModelRunner(draft.model, length, self.sampling, prompts, self.samples, mode)
            drafter, runners = DraftModel(runner, self.model.config.vocab_size), [self, runner]
            if length < self.max_seq_len - SLACK:
                print(f"the draft's context is {length} tokens: no token beyond is drafted", file=sys.stderr)
        speculator = Speculator(self, drafter, self.team.agree)
        for runner in runners if self.compiled else ():
            runner.prefill_prompts([[0, 0]] * prompts, 0)
        # A CUDA graph captures kernels as they are, without torch.compile.
        speculator.prepare(draft.policy, compile=self.compiled and not self.kernels)
        return speculator

    def steps(self, prompts: list[list[int]], new_tokens: int, start: int) -> Iterator[Tensor]:
        """Each step's tokens and log-probabilities [2, B], a speculative one's [B, 2, T + 1]. The next step overwrites
        them."""
        chosen = self.prefill_prompts(prompts, start)
        if self.speculator:
            self.speculator.begin(prompts, start, chosen[0].long(), new_tokens)
            yield chosen  # only now: a row may finish with its first token
            yield from self.speculator.steps()
            return
        yield chosen
        self.tokens.copy_(chosen[0])
        ends = torch.tensor([start + len(prompt) for prompt in prompts], device=self.device)
        self.positions.copy_(ends.repeat_interleave(self.samples))
        width = start + max(2, *map(len, prompts))
        for n in range(width + 1, width + new_tokens):
            yield self.decode(self.tokens, self.positions, self.slots(n))

    def finish(self, row: int) -> None:
        """The caller wants no more tokens of this row."""
        if self.speculator:
            self.speculator.finish(row)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int,
                 start: int = 0) -> Iterator[list[list[tuple[int, float]]]]:
        """For each step and row the new tokens with their log-probabilities, on the host.

        Ragged prompts need no padding mask: see model.py. start: so many tokens, the same for all prompts, are in the
        cache already. On a GPU a step is yielded after the next one is launched, so that the GPU never waits."""
        steps = map(self.copy_to_host, self.steps(prompts, new_tokens, start))
        if self.device.type == "cuda":
            steps = one_behind(steps)
        for host, copied in steps:
            if copied:
                copied.synchronize()
            if host.dim() == 3:
                yield self.speculator.learn(host.tolist())
            else:
                yield [[(int(token), logprob)] for token, logprob in zip(*host.tolist())]

    def copy_to_host(self, step: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy, and the event that says when it is there."""
        if self.device.type != "cuda":
            return step.to("cpu", copy=True), None
        host = torch.empty_like(step, device="cpu", pin_memory=True).copy_(step, non_blocking=True)
        return host, torch.cuda.current_stream().record_event()


def one_behind(steps: Iterator) -> Iterator:
    """Holds a step, launches the next, yields the held one."""
    held = None
    for step in steps:
        if held is not None:
            yield held
        held = step
    if held is not None:
        yield held


@dataclass
class Completion:
    """One row of the batch: the tokens that follow its prompt, their text so far, and why they ended."""
    prompt: str
    prompt_tokens: list[int]
    tokenizer: Tokenizer
    limit: int  # new tokens at most
    stop_texts: list[str] = field(default_factory=list)
    heading: str = ""  # shown before the text
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
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

    def mean_logprob(self) -> float:
        return sum(self.logprobs) / max(1, len(self.logprobs))

    def visible(self) -> str:
        """The text, without an end that may yet turn out to begin a stop text."""
        held = 0
        for stop in () if self.finish_reason else self.stop_texts:
            for n in range(held + 1, len(stop)):
                if self.text.endswith(stop[:n]):
                    held = n
        return self.text[:len(self.text) - held]


def complete(generator: Generator, completions: list[Completion], printing: Iterator, start: int = 0,
             budget: float | None = None) -> None:
    """Generates until each completion has ended or `budget` seconds are over. `start` tokens of the prompts are in the
    cache already."""
    next(printing, None)
    begun = time.perf_counter()
    agree = generator.team.agree if budget else float  # with a budget all ranks must stop at the same step
    prompts = [completion.prompt_tokens[start:] for completion in completions[::generator.samples]]
    for rows in generator.generate(prompts, completions[0].limit, start):
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
        next(printing, None)
        if all(completion.finish_reason for completion in completions):
            break
    if budget and not any(completion.steps for completion in completions):
        raise UserError(f"--time-budget {budget}: the first token took {seconds:.3f} s; allow more")


def ask() -> str | None:
    """The next line that the user types; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def fit_messages(messages: list[dict], tokenizer: Tokenizer, max_seq_len: int) -> tuple[list[dict], list[int]]:
    """The messages and their tokens or, where they leave no room for an answer, those of the last message.

    Without a chat template the messages are one text. UserError where the last message alone is too long."""
    if tokenizer.template:
        tokens = tokenizer.encode_messages(messages)
    else:
        tokens = tokenizer.encode("".join(message["content"] for message in messages))
    if len(tokens) < max_seq_len:
        return messages, tokens
    if len(messages) == 1:
        raise UserError(f"{len(tokens)} tokens leave no room in {max_seq_len}: shorten, or raise --max-seq-length")
    print(f"the chat fills the {max_seq_len} tokens of --max-seq-length and starts afresh", file=sys.stderr)
    return fit_messages(messages[-1:], tokenizer, max_seq_len)


def chat(generator: Generator, tokenizer: Tokenizer, max_seq_len: int, args: argparse.Namespace) -> list[Completion]:
    """Answers line by line. Without a chat template it continues the text so far and the line typed."""
    with suppress(ImportError):
        import readline  # noqa: F401: input() then edits lines and recalls them
    hint = "Ctrl-C stops an answer, Ctrl-D leaves." if generator.team.ranks == 1 else "Ctrl-C and Ctrl-D leave."
    print(hint if tokenizer.template else f"{hint} No chat template: your text is continued.", file=sys.stderr)
    messages, cached, answers = [], [], []
    while (line := generator.team.agree(ask)) is not None:
        if not line.strip():
            continue
        try:
            messages, tokens = fit_messages([*messages, dict(role="user", content=line)], tokenizer, max_seq_len)
        except UserError as error:
            print(error, file=sys.stderr)
            messages = []
            continue
        start = len(os.path.commonprefix([cached, tokens[:-1]]))  # the last token is read again, for its logits
        limit = min(args.max_new_tokens or max_seq_len, max_seq_len - len(tokens))
        answer = Completion(line, tokens, tokenizer, limit, args.stop)
        printing = show([answer])
        if generator.team.ranks == 1:
            signal.signal(signal.SIGINT, lambda *_: setattr(answer, "finish_reason", "interrupted"))  # after this step
        complete(generator, [answer], printing, start)
        if generator.team.ranks == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        answers.append(answer)
        cached = tokens + answer.tokens[:-1]  # the model may not have read the last one
        messages.append(dict(role="assistant", content=answer.text if tokenizer.template else answer.text + "\n"))
        if not tokenizer.template and answer.steps > len(answer.tokens):  # a stop token: the story has ended
            messages = []
    return answers


def make_completions(args: argparse.Namespace, tokenizer: Tokenizer, max_seq_len: int) -> list[Completion]:
    """A completion for each prompt and sample. UserError where max_seq_len has no room for it."""
    if args.chat:
        encoded = [tokenizer.encode_messages([dict(role="user", content=prompt)]) for prompt in args.prompt]
    else:
        encoded = [tokenizer.encode(prompt) for prompt in args.prompt]
    if [] in encoded:
        raise UserError("--prompt: the text is empty, and this tokenizer adds no beginning of sequence; give some text")
    longest = max(map(len, encoded))
    new_tokens = args.max_new_tokens or max(1, min(256, max_seq_len - longest))
    if longest + new_tokens > max_seq_len:
        raise UserError(f"{longest} prompt tokens and {new_tokens} new ones exceed {max_seq_len}, the context or "
                        "--max-seq-length: shorten the prompt or lower --max-new-tokens")
    completions = []
    for prompt, tokens in zip(args.prompt, encoded):
        for sample in range(args.num_samples):
            heading = "" if args.chat else prompt
            if len(encoded) * args.num_samples > 1:
                heading = f"--- {prompt}" + (f" ({sample + 1})\n" if args.num_samples > 1 else "\n")
            completions.append(Completion(prompt, tokens, tokenizer, new_tokens, args.stop, heading))
    return completions


def find_sampling(directory: Path, args: argparse.Namespace) -> Sampling:
    """The command line's options, else generation_config.json's, else Sampling's defaults."""
    with reading(directory / "generation_config.json"):
        found = read_json(directory / "generation_config.json", {})
        found |= {key: value for key, value in vars(args).items() if value is not None}
        return Sampling(**{key: found[key] for key in ("temperature", "top_k", "top_p") if found.get(key) is not None})


def run_prompts(generator: Generator, completions: list[Completion], args: argparse.Namespace) -> list[Completion]:
    """Generates and prints them; with a time budget in the order of their rank, once it is over."""
    streamed = not args.json and not args.time_budget
    complete(generator, completions, show(completions) if streamed else iter(()), budget=args.time_budget)
    if args.time_budget:
        completions = rank_completions(completions, args.num_samples)
        for _ in show(completions) if not args.json else ():
            pass
    return completions


def main() -> None:
    """Loads, compiles, generates and reports, in that order. Long, because it is the whole program."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # the compiler's hints to its developers
    sys.stdout.reconfigure(errors="replace")  # not every terminal shows all of Unicode
    args = generate_args(__doc__, TINY)
    device, team = join(args.device)
    dtype = find_dtype(args.dtype, device)
    check_compiler(args.compile, device)
    directory = find_checkpoint(args.checkpoint)
    config, tokenizer = load_config(directory), Tokenizer(directory)
    if args.chat and not tokenizer.template:
        raise UserError(f"--chat: {args.checkpoint} has no chat template; without --chat the prompt is continued")
    sampling, prompts, max_seq_len = find_sampling(directory, args), 1, args.max_seq_length or config.context
    if max_seq_len > config.context:
        raise UserError(f"--max-seq-length {max_seq_len}: the model's context is {config.context}")
    if args.interactive:
        sys.stdin.reconfigure(errors="replace")
        max_seq_len = args.max_seq_length or min(max_seq_len, 8192)  # a chat's cache is allocated whole
    else:
        completions, prompts = make_completions(args, tokenizer, max_seq_len), len(args.prompt)
        max_seq_len = max(len(c.prompt_tokens) + c.limit for c in completions)
    settings = read_settings(directory)
    quantized = args.quantize or (f"int{settings['bits']}" if settings else None)
    models, draft_directory = [(config, settings.get("bits"))], None
    if args.draft not in (None, "prompt-lookup"):
        draft_directory = find_draft(args.draft, config, tokenizer)
        models.append((load_config(draft_directory), read_settings(draft_directory).get("bits")))
    cache_length = max_seq_len + SLACK * bool(args.draft)
    advice = check_memory(models, prompts * args.num_samples, cache_length, device, dtype, team.ranks)

    profiler, begun = torch.profiler.profile() if args.profile else nullcontext(), time.perf_counter()
    with memory_advice(advice):
        progress, draft_model = not args.quiet, None
        model = load_checkpoint(directory, device, dtype, args.quantize, args.group_size, progress, splitter(team))
        if draft_directory:
            split = draft_splitter(team, models[1][0])
            draft_model = load_checkpoint(draft_directory, device, dtype, args.draft_quantize, None, progress, split)
        draft = Draft(draft_model, args.draft_tokens or "auto") if args.draft else None
        loaded = time.perf_counter()
        if quantized and not args.compile:
            print("without --compile, quantized weights are unpacked at every step: slow", file=sys.stderr)
        if args.compile and not args.quiet:
            print("compiling ...", file=sys.stderr, flush=True)
        mode = "compile" if args.no_kernels else "fast"
        generator = Generator(model, max_seq_len, sampling, prompts, args.num_samples,
                              mode if args.compile else "eager", draft, team)
        ready = time.perf_counter()
        if team.ranks == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.manual_seed(team.agree(torch.seed() if args.seed is None else args.seed))
        with profiler:
            if args.interactive:
                runs = [[answer] for answer in chat(generator, tokenizer, max_seq_len, args) if answer.steps]
            else:
                runs = [run_prompts(generator, completions, args)]
    if args.profile and team.rank == 0:
        save_trace(profiler, args.profile)
    if not runs:
        return
    result = report(generator, runs, checkpoint=args.checkpoint, quantize=quantized, load_s=loaded - begun,
                    compile_s=ready - loaded if args.compile else 0.0, world_size=team.ranks)
    if args.json:
        print(json.dumps(result))
    if not args.quiet:
        print("\n" + format_report(result), file=sys.stderr)


if __name__ == "__main__":
    run(main)

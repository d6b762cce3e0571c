"""
The Python API: a checkpoint, ready to generate.

    from llm import LLM

    llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", compile=True)
    print(llm("The capital of France is", max_new_tokens=20, temperature=0).text)

Contents: the options, completions (a row's tokens and the text that they make), LLM.
"""

import gc
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, make_dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path

import torch

from drafts import NAMED, DFlash, DraftHead, make_draft, open_draft
from drafts.policies import NAMES as DRAFT_TOKENS
from drafts.policies import POLICIES, make_policy
from generate import Engine, Sampling, check_limits, generate, option
from hub import formats, vet
from hub.checkpoint import reading
from hub.families import contexts
from hub.generation import read_sampling
from hub.tokenizer import Tokenizer, text_of
from model import CACHES
from quantize import DEFAULT_GROUP
from speculative import SLACK, Speculator
from tp import draft_splitter, join, splitter

MOST_BYTES = 4  # of a character in UTF-8, each of which may be a token
TINY = str(Path(__file__).parent / "checkpoints" / "tiny")


# Options


# A field is a keyword of LLM, and an option of the command line: its name, its type, its default
# and, by option(), its limits and its help. More that option() takes:
#
#     choices   the values that there are
#     metavar   what the command line calls the value
#     flags     what it calls the option, if that is not the field's name; (): it has none
#     group     the heading in --help
of_model = partial(option, group="model")
of_speed = partial(option, group="speed")
of_quantization = partial(option, group="quantization")
of_speculation = partial(option, group="speculation")
of_prompt = partial(option, group="prompt")
of_generation = partial(option, group="generation")
of_output = partial(option, group="output")

INTS = (
    "int8",
    "int4",
)
ROUND = dict(choices=INTS)

# Sampling's fields. None: generation_config.json's value or, without one, Sampling's.
SamplingOptions = make_dataclass(
    "SamplingOptions",
    [
        (each.name, each.type | None, of_generation(None, **(dict(metavar="X") | each.metadata)))
        for each in fields(Sampling)
    ],
    kw_only=True,
)


@dataclass(kw_only=True)
class CallOptions(SamplingOptions):
    """What a call of LLM may set, too."""

    max_new_tokens: int | None = of_generation(
        None, "default: 256, or what the context leaves; in a chat, what the context leaves", 1
    )
    seed: int | None = of_generation(None, "the same seed, the same text", 0, 2**63 - 1)
    num_samples: int = of_generation(1, "of each prompt", 1, 10**5)
    stop: str | list[str] = of_generation([], "end before TEXT; repeat it for more", metavar="TEXT")
    time_budget: float | None = of_generation(None, "seconds; then rank what there is", 1e-9)
    # The command line has --template-option tools=[...].
    tools: list[dict] | None = of_prompt(
        None, "with messages: the tools that the model may call, a JSON schema each", flags=()
    )

    def __post_init__(self):
        check_limits(self)
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"stop={self.stop!r:.60}: want a text, or a list of texts")
        if "" in texts:
            raise ValueError("stop='': an empty text would end everything at once")
        check_tools(self.tools)


def check_tools(tools):
    """ValueError unless it is None or a list of JSON schemas."""
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"tools={tools!r:.60}: want a list of JSON schemas, [{{'type': 'function', "
            "'function': {'name': ..., 'parameters': ...}}, ...]"
        )
    with reading("tools"):
        json.dumps(tools)


@dataclass(kw_only=True)
class Options(CallOptions):
    """The keywords of LLM."""

    checkpoint: str = of_model(
        TINY, "directory or Hub id, e.g. HuggingFaceTB/SmolLM2-135M-Instruct", metavar="DIR"
    )
    max_batch_size: int | None = of_model(
        None, "rows (prompts x samples) of the KV cache", 1, flags=()
    )
    max_seq_length: int | None = of_model(
        None, "prompt and new tokens at most; default: the context; in a chat at most 8192", 2
    )
    device: str | None = of_model(
        None, "cpu, cuda, cuda:N or mps; default: the first GPU, else cpu", metavar="NAME"
    )
    dtype: str | None = of_model(
        None, "default: bfloat16 on a GPU, float32 on a CPU", choices=tuple(vet.DTYPES)
    )
    compile: bool = of_speed(False, "torch.compile: a wait first, then faster")
    no_kernels: bool = of_speed(False, "with --compile: plain PyTorch, without fast/")
    quantize: str | None = of_quantization(
        None, "round the layers' weights as they are loaded", **ROUND
    )
    group_size: int | None = of_quantization(
        None,
        "weights that share a scale: a multiple of 32, or -1: a row; default: int8 -1, int4 "
        + DEFAULT_GROUP,
        -1,
    )
    quantize_head: str | None = of_quantization(
        None, "round the output head: int8 a row, int4 in groups of 32", **ROUND
    )
    kv_cache: str | None = of_quantization(
        None,
        "round keys and values, or values alone, a scale for each token and head",
        choices=(*CACHES,)[1:],
    )
    draft: str | None = of_speculation(
        None,
        "a smaller checkpoint with the same tokenizer, an EAGLE-3 head, mtp (what the checkpoint "
        f"brings), or {', '.join(NAMED)}",
        metavar="DRAFT",
    )
    draft_tokens: int | str | None = of_speculation(
        None,
        f"1 to {DRAFT_TOKENS[-1]}, or a policy: {', '.join(POLICIES)}; default: auto",
        metavar="N",
    )
    draft_quantize: str | None = of_speculation(None, "round the draft's weights", **ROUND)
    template_options: dict | None = of_prompt(
        None,
        "a variable of the chat template, e.g. enable_thinking=false",
        flags=("--template-option",),
        metavar="KEY=VALUE",
    )
    quiet: bool = of_output(False, "no progress, no hints, no table")

    def __post_init__(self):
        super().__post_init__()
        values = self.template_options or {}
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ValueError(
                f"template_options={values!r:.60}: want the template's variables and their values"
            )
        if "messages" in values:
            raise ValueError("template_options: messages are what a call is given, no option")
        with reading("template_options"):
            json.dumps(values)
            check_tools(values.get("tools"))
        if self.group_size and not self.quantize:
            raise ValueError(
                f"group_size={self.group_size} goes with quantize; a quantized checkpoint has its "
                "own"
            )
        if self.draft is not None and (not isinstance(self.draft, str | Path) or self.draft == ""):
            raise ValueError(
                f"draft={self.draft!r:.60}: want a checkpoint, mtp or {', '.join(NAMED)}; for no draft, "
                "leave the option out"
            )
        for name in ("draft_tokens", "draft_quantize"):
            if not self.draft and (value := getattr(self, name)):
                raise ValueError(f"{name}={value} goes with draft, the model that drafts")
        if self.draft in NAMED and self.draft_quantize:
            raise ValueError(f"draft_quantize: {self.draft} has no weights; leave it out")
        if self.draft_tokens is not None and str(self.draft_tokens) not in DRAFT_TOKENS:
            raise ValueError(
                f"draft_tokens={self.draft_tokens!r:.60}: want 1 to {DRAFT_TOKENS[-1]}, or "
                f"{', '.join(POLICIES)}"
            )


def takes(kind: type) -> Callable:
    """A decorator: **options are the fields of this dataclass, whose names, types and defaults
    help() and a shell's completion then show, and whose meaning stands behind the docstring."""

    def show(function: Callable) -> Callable:
        found = inspect.signature(function)
        own = [each for each in found.parameters.values() if each.kind != each.VAR_KEYWORD]
        theirs = [
            each.replace(annotation=each.annotation)
            for each in inspect.signature(kind).parameters.values()
            if each.name not in found.parameters
        ]
        function.__signature__ = found.replace(parameters=own + theirs)
        meanings = [f"    {each.name}: {each.metadata['help']}" for each in fields(kind)]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), "", *meanings])
        return function

    return show


# Completions


@dataclass(repr=False)
class Completion:
    """One row of the batch: the tokens that follow its prompt, their text so far, and why they
    ended."""

    prompt: str
    prompt_tokens: list[int]
    tokenizer: Tokenizer = field(repr=False)
    limit: int  # new tokens at most
    stop_texts: list[str] = ()
    tokens: list[int] = field(default_factory=list)  # the new ones, without the stop token
    logprobs: list[float] = field(default_factory=list, repr=False)
    text: str = ""
    heading: str = ""  # what the command line prints before the text
    # What is no answer in a text of parts (hub/tokenizer.py), and the header of what is being
    # written.
    thoughts: str = ""
    header: str = ""
    finish_reason: str | None = None  # "stop", "length", "time" or, in a chat, "interrupted"
    steps: int = 0  # that of a stop token included
    first_s: float = 0.0  # when the first step came, since the start
    seconds: float = 0.0  # when the last one came

    def __post_init__(self):
        # New tokens are decoded together with the tokens before them: their spaces depend on these.
        self.before = self.prompt_tokens[-8:]
        self.pending = []  # tokens that are not in the text yet
        self.writes = "text"  # or "thoughts", "header" or "line": what tokens are added to
        if self.tokenizer.parts:
            self.go_on_from_prompt()

    def __repr__(self) -> str:
        """Without fields that are empty."""
        shown = [each.name for each in fields(self) if each.repr and getattr(self, each.name)]
        return f"Completion({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def add(self, token: int, logprob: float, seconds: float):
        if logprob != logprob:  # NaN
            raise ValueError(
                "the logits are not finite: the weights are broken, or dtype=float32 helps"
            )
        self.steps += 1
        self.first_s, self.seconds = self.first_s or seconds, seconds
        if token in self.tokenizer.stops:
            self.finish("stop")
        else:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if kind := self.tokenizer.parts.get(token):
                self.begin_part(kind)
            else:
                self.decode(token)
            if len(self.tokens) == self.limit:
                self.finish("length")
        ends = [self.text.find(stop) for stop in self.stop_texts if stop in self.text]
        if ends:
            self.text, self.finish_reason = self.text[: min(ends)], "stop"

    def finish(self, reason: str):
        self.flush()
        self.finish_reason = reason

    def go_on_from_prompt(self):
        """Writes what the prompt's last tokens begin, as a chat's template ends within a header."""
        parts, tokens = self.tokenizer.parts, self.prompt_tokens
        begins = [i for i, token in enumerate(tokens) if parts.get(token, "body") != "body"]
        if not begins:
            return
        kind, rest = parts[tokens[begins[-1]]], tokens[begins[-1] + 1 :]
        self.begin_part(kind)
        if kind in ("header", "line"):
            end = next((i for i, token in enumerate(rest) if token in parts), len(rest))
            self.write(self.before, self.tokenizer.decode(rest[:end]))
            if rest[end:]:
                self.begin_part("body")
        self.thoughts = ""

    def begin_part(self, kind: str):
        """kind: one of hub.tokenizer.Parts.begins."""
        self.flush()
        if kind == "body":
            kind = "text" if self.tokenizer.is_answer(self.header.strip()) else "thoughts"
        self.writes, self.header = kind, ""

    def decode(self, token: int):
        """Adds the token to what is being written, once its characters are complete."""
        self.pending.append(token)
        text = self.decoded(self.pending)
        if text and not text.endswith("\ufffd"):
            self.write(self.pending, text)
            self.pending = []
        elif len(self.pending) == MOST_BYTES:
            # A character that began in the first one would be complete.
            first = [self.pending.pop(0)]
            self.write(first, self.decoded(first))

    def flush(self):
        """A character that is incomplete stays so: U+FFFD stands for it."""
        self.write(self.pending, self.decoded(self.pending))
        self.pending = []

    def write(self, tokens: list[int], text: str):
        if text:
            self.before = tokens
        if self.writes == "line":
            self.header, newline, text = (self.header + text).partition("\n")
            if not newline:
                return
            self.writes, self.header = "thoughts", ""
        vars(self)[self.writes] += text

    def decoded(self, tokens: list[int]) -> str:
        before = self.tokenizer.decode(self.before)
        return self.tokenizer.decode(self.before + tokens)[len(before) :]

    @property
    def room(self) -> int:
        """Tokens of the prompt and of what may follow."""
        return len(self.prompt_tokens) + self.limit

    @property
    def mean_logprob(self) -> float | None:
        """Of the tokens under the model's raw logits; None without tokens."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else None

    def visible(self) -> str:
        """The text, without an end that may yet turn out to begin a stop text."""
        stops = [] if self.finish_reason else self.stop_texts
        held = max(
            (n for stop in stops for n in range(len(stop)) if self.text.endswith(stop[:n])),
            default=0,
        )
        return self.text[: len(self.text) - held]


def make_completions(
    prompts: list, options, tokenizer: Tokenizer, context: int
) -> list[Completion]:
    """A completion for each prompt, a text or a chat's messages, and each sample of it. ValueError
    where the context, or max_seq_length, has no room for it."""
    if not prompts:
        raise ValueError("no prompt: want a text, messages, or a list of these")
    texts, encoded = zip(*(encode(prompt, options.tools, tokenizer) for prompt in prompts))
    if [] in encoded:
        raise ValueError(
            "the prompt is empty, and this tokenizer adds no beginning of sequence; give some text"
        )
    longest = max(map(len, encoded))
    new_tokens = options.max_new_tokens or max(1, min(256, context - longest))
    if longest + new_tokens > context:
        limit = "max_seq_length" if options.max_seq_length else "the model's context"
        raise ValueError(
            f"{longest} prompt tokens and {new_tokens} new ones exceed {context}, {limit}: "
            "shorten the prompt or lower max_new_tokens"
        )
    return [
        make_completion(text, tokens, tokenizer, new_tokens, options)
        for text, tokens in zip(texts, encoded)
        for _ in range(options.num_samples)
    ]


def make_completion(
    text: str, tokens: list[int], tokenizer: Tokenizer, new_tokens: int, options
) -> Completion:
    """Of one prompt and its tokens. options: a call's or, in a chat, the command line's."""
    stops = [options.stop] if isinstance(options.stop, str) else options.stop
    return Completion(text, tokens, tokenizer, new_tokens, stops)


def encode(
    prompt: str | list[dict], tools: list[dict] | None, tokenizer: Tokenizer
) -> tuple[str, list[int]]:
    """A text, or a chat's last message, and the tokens of all."""
    with reading("a prompt"):
        # Raises for half of a character: a command line that is not UTF-8.
        json.dumps(prompt, ensure_ascii=False, default=str).encode()
        if isinstance(prompt, str):
            if tools:
                raise ValueError("tools go with messages; a text is continued as it is")
            return prompt, tokenizer.encode_text(prompt)
        if not isinstance(prompt, list):
            raise ValueError(f"{type(prompt).__name__} is no text, and no list of messages")
        vet.check_messages(prompt)
        if not tokenizer.template and not tokenizer.find_template(tools):
            raise ValueError(
                "this checkpoint has no chat template: give a text, which is continued"
            )
        return text_of(prompt[-1]), tokenizer.encode_chat(prompt, tools)


def pieces(completion: Completion, steps: Iterator[None]) -> Iterator[str]:
    """The text that each step adds."""
    shown = 0
    for _ in steps:
        piece = completion.visible()[shown:]
        if piece:
            yield piece
            shown += len(piece)


def rank_completions(completions: list[Completion], samples: int) -> list[Completion]:
    """After a time budget: for each prompt the finished ones first, and the likeliest first among
    these."""

    def place(completion: Completion):
        return (
            completion.finish_reason == "time",
            not completion.tokens,
            -(completion.mean_logprob or 0),
        )

    ranked = []
    for at in range(0, len(completions), samples):
        ranked += sorted(completions[at : at + samples], key=place)
    return ranked


# The API


class LLM:
    """A checkpoint, ready to generate: the Python API, and what the command line runs.

        llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", compile=True)
        print(llm("The capital of France is", max_new_tokens=20, temperature=0).text)

    Keywords are the options of generate.py: max_new_tokens=20 is --max-new-tokens 20. Those of
    CallOptions may be given here, for all calls, or to a call.

    The KV cache has max_batch_size rows (prompts times samples) of max_seq_length tokens. The first
    call sets what is not given, and a larger call lets it grow. With compile=True the first call
    takes 2,048 tokens at least if the model has them, and when the cache grows the model is loaded
    and compiled again; other LLMs of the process are compiled again, too. Calls of any size and
    sampling within these limits compile nothing again. Compiled, a step costs what max_batch_size
    rows cost, and draws random numbers for as many.

    ValueError for a mistake: a value out of its limits, a prompt or a batch that is too large.

    One call runs at a time, and other threads' calls wait for it. A stream() is not waited for: a
    call ends it, and who reads on gets a ValueError. Under torchrun each rank makes the same
    calls."""

    @takes(Options)
    def __init__(self, checkpoint: str = TINY, *, load: bool = True, **options):
        """load: False puts off reading the weights to the first call. The other keywords:"""
        self.options = options = make_options(Options, options | dict(checkpoint=checkpoint))
        name, self.team = join(options.device)
        self.device = vet.find_device(name, options.compile)
        self.dtype = vet.find_dtype(options.dtype, self.device)
        opened = self.checkpoint, self.tokenizer = vet.open_checkpoint(options.checkpoint)
        self.tokenizer.template_options = options.template_options or {}
        self.recommended, said = read_sampling(self.checkpoint)
        if said and not self.team.rank:
            print(said, file=sys.stderr)
        length = options.max_seq_length
        self.context = self.checkpoint.config.context
        reach = contexts(self.checkpoint.hf)[1]
        if length and length > reach:
            raise ValueError(f"max_seq_length={length}: the model's context is {reach}")
        if length and length > self.context and not self.team.rank:
            print(
                f"max_seq_length={length}: the model's context is {self.context} by config.json, "
                f"whose stretched rope reaches {reach}",
                file=sys.stderr,
            )
        self.context = length or self.context
        self.quantization = formats.read_settings(self.checkpoint)
        formats.check_quantize(
            self.checkpoint, self.quantization, options.quantize, options.group_size
        )
        self.draft_checkpoint = open_draft(options.draft, opened)
        if options.draft_quantize and self.draft_checkpoint:
            formats.check_draft_quantize(self.draft_checkpoint, options.draft_quantize)
        # The places whose hidden states the draft reads: see Transformer.setup().
        self.features = getattr(self.draft_checkpoint, "places", ())
        self._sizes = [
            (checkpoint.config, checkpoint.weights, formats.bits_of(checkpoint))
            for checkpoint in (self.checkpoint, self.draft_checkpoint)
            if checkpoint
        ]
        self.model = self.draft_model = self.engine = self.speculator = None
        self._running = None  # the steps of the last call, which may be a stream that goes on
        self._lock = threading.Lock()  # a call holds it, or a stream while it makes a step
        # Room: tokens of a prompt and its completion.
        self.load_s, self.compile_s, self.room = 0.0, 0.0, 0
        self.progress = say_compiling
        if self.team.ranks > 1:
            torch.manual_seed(self.team.agree(torch.seed()))
        if load and options.max_batch_size and length:
            self.prepare(options.max_batch_size, length)
        elif load:
            self._load(options.max_batch_size or 1, length or 1)

    def __repr__(self) -> str:
        return f"LLM({str(self.checkpoint.directory)!r}, device={str(self.device)!r})"

    @takes(CallOptions)
    def __call__(self, prompts: str | list, **options) -> Completion | list[Completion]:
        """Completes a text, a chat's messages (a list of {"role": ..., "content": ...}), or a list
        of these as one batch. options: those of CallOptions.

        Returns a list if given a list or if num_samples > 1: in the order of the prompts, then of
        the samples or, with a time budget, by rank_completions()."""
        options = self._options(options)
        if not isinstance(prompts, (str, list, tuple)):
            kind = type(prompts).__name__
            raise ValueError(f"a {kind} is no prompt: want a text, messages, or a list of these")
        single = is_single(prompts)
        prompts = [prompts] if single else prompts
        completions = make_completions(prompts, options, self.tokenizer, self.context)
        with self._lock:
            for _ in self._steps(completions, options):
                pass
        if options.time_budget:
            completions = rank_completions(completions, options.num_samples)
        return completions[0] if single and options.num_samples == 1 else completions

    @takes(CallOptions)
    def stream(self, prompt: str | list[dict], **options) -> Iterator[str]:
        """The completion of one prompt, piece by piece, as it is generated. Another call ends it:
        ValueError for who reads on."""
        options = self._options(options)
        if options.num_samples > 1:
            raise ValueError(f"num_samples={options.num_samples}: a stream is of one sample")
        if not is_single(prompt):
            raise ValueError(
                f"stream() of a {type(prompt).__name__}: a stream is of one prompt, a text or a "
                "chat's messages; for several call the LLM itself, or make a stream of each"
            )
        completions = make_completions([prompt], options, self.tokenizer, self.context)
        with self._lock:
            steps = self._steps(completions, options)
        return pieces(completions[0], self._taken(steps, completions[0]))

    def _taken(self, steps: Iterator[None], completion: Completion) -> Iterator[None]:
        """A stream's steps, as it takes them, one under the lock at a time: who leaves a stream
        holds up nobody."""
        ended = object()
        while True:
            with self._lock:
                is_left = self._running is not steps
                if is_left and not completion.finish_reason:
                    raise ValueError(
                        "another call ended this stream: read a stream to its end first, or load "
                        "a second LLM"
                    )
                if is_left or next(steps, ended) is ended:
                    return
            yield

    def _options(self, given: dict) -> Options:
        """The constructor's options with those of a call in their place. None: as if it were not
        given."""
        check_names(Options, given)
        for name in given.keys() - {each.name for each in fields(CallOptions)}:
            raise ValueError(f"{name}: an option of LLM(...), not of a call")
        return replace(
            self.options, **{name: value for name, value in given.items() if value is not None}
        )

    def _sampling(self, options: Options) -> Sampling:
        """The options that were given, else generation_config.json's, else Sampling's defaults."""
        found = {}
        for source in (self.recommended, vars(options)):
            for each in fields(Sampling):
                if source.get(each.name) is not None:
                    found[each.name] = source[each.name]
        return Sampling(**found)

    # Weights, cache and compiled code

    def _load(self, rows: int, length: int) -> None:
        """Reads the weights, for a cache of so many rows and tokens."""
        options = self.options
        begun = time.perf_counter()
        where = dict(device=self.device, dtype=self.dtype, progress=not options.quiet)
        read = partial(formats.load, **where)
        self.advice = self._check_memory(rows, length)
        with vet.memory_advice(self.advice):
            # Kept once all is read: Ctrl-C may come in between.
            draft = None
            model = read(
                self.checkpoint,
                quantize=options.quantize,
                group_size=options.group_size,
                quantize_head=options.quantize_head,
                split=splitter(self.team),
            )
            if self.draft_checkpoint:
                draft = read(
                    self.draft_checkpoint,
                    quantize=options.draft_quantize,
                    split=draft_splitter(self.team, self.draft_checkpoint.counted()),
                )
                if isinstance(draft, DraftHead | DFlash):
                    draft.share(model)
        self.model, self.draft_model = model, draft
        self.load_s = time.perf_counter() - begun

    def _check_memory(self, rows: int, length: int) -> str:
        """What to say if memory runs out. ValueError if weights and caches alone do not fit."""
        return vet.check_memory(
            self._sizes,
            rows,
            length + self._spare(),
            self.device,
            self.dtype,
            self.team.ranks,
            loaded=self.model is not None,
            kind=self.options.kv_cache or "16-bit",
            features=len(self.features) * self.checkpoint.config.dim,
        )

    def _spare(self) -> int:
        """Slots beyond the end of a text, for drafted tokens that are refused."""
        return SLACK if self.options.draft else 0

    def prepare(self, rows: int, length: int, prompts: int | None = None) -> None:
        """Makes room for calls of so many rows and of `length` tokens, a prompt's and its
        completion's together. What is not loaded yet is loaded, and what is to be compiled is
        compiled.

        prompts: how many a call has, where that is known; for other numbers prefill compiles when
        they come."""
        if self.engine and rows <= self.engine.batch_size and length <= self.room:
            return
        self._free_cache(rows, length)
        if self.model is None:
            self._load(rows, length)
        else:
            self.advice = self._check_memory(rows, length)
        begun = time.perf_counter()
        with vet.memory_advice(self.advice), self._loaded_again():
            if self.options.compile:
                with nullcontext() if self.options.quiet else self.progress():
                    runner = self._make_engine(rows, length)
                    for count in {prompts} if prompts else {1, rows}:
                        runner.warm_up(count, self.team.ranks == 1)
                self.compile_s = time.perf_counter() - begun
            else:
                for model in (self.model, self.draft_model):
                    formats.unpack_quantized(
                        model, rows, length, self.options.quiet, self.team.ranks
                    )
                self._make_engine(rows, length)
        self.room = length

    @contextmanager
    def _loaded_again(self) -> Iterator[None]:
        """Where making the engine ends early, by Ctrl-C or for want of memory, the next call makes
        it anew. Compiled, kernels may be in the model already, and it is loaded again."""
        try:
            yield
        except BaseException:
            self.engine = self.speculator = None
            if self.options.compile:
                self.model = self.draft_model = None
            raise

    def _free_cache(self, rows: int, length: int) -> None:
        """Frees the old one, before one of so many rows and tokens is made."""
        if not self.engine:
            return
        if self.options.compile:  # compiled code and kernels hold it
            if not self.options.quiet:
                print(
                    f"compiling again: the KV cache grows to max_batch_size={rows}, "
                    f"max_seq_length={length}",
                    file=sys.stderr,
                )
            self.model = self.draft_model = None
            torch._dynamo.reset()
        self.engine = self.speculator = None
        for model in (self.model, self.draft_model):
            if model is not None:
                model.setup(1, 1)  # the smallest cache takes the old one's place
        gc.collect()

    def _make_engine(self, rows: int, length: int) -> Engine | Speculator:
        """Makes self.engine and, with a draft, self.speculator: what generate() runs."""
        options = self.options
        engine = partial(
            find_engine(options.compile, options.no_kernels),
            batch_size=rows,
            sampling=self._sampling(options),
            cache=options.kv_cache or "16-bit",
        )
        self.engine = engine(self.model, length, features=self.features, spare=self._spare())
        if not options.draft:
            return self.engine
        draft = make_draft(self.engine, self.draft_model, engine, options.draft)
        if draft.max_seq_len < length:
            print(
                f"the draft's context is {draft.max_seq_len} tokens: no token beyond is drafted",
                file=sys.stderr,
            )
        policy = make_policy(str(options.draft_tokens or "auto"))
        self.speculator = Speculator(self.engine, draft, policy, self.team.agree)
        return self.speculator

    # Generation

    def _steps(self, completions: list[Completion], options) -> Iterator[None]:
        """What complete() yields for a call, once room for it is made."""
        rows, most = len(completions), self.options.max_batch_size
        if most and rows > most:
            raise ValueError(
                f"{rows} rows (prompts x samples) exceed max_batch_size={most}: give fewer"
            )
        if self._running:
            self._running.close()  # a stream that goes on ends here
            self._running = None
        length = max(completion.room for completion in completions)
        # max_batch_size and max_seq_length if given, else what is needed, and never less than there
        # is.
        least = min(2048, self.context) if self.options.compile else 1
        there = self.engine.batch_size if self.engine else 1
        self.prepare(
            most or max(rows, there), self.options.max_seq_length or max(length, self.room, least)
        )
        (self.speculator or self.engine).set_sampling(self._sampling(options))
        if options.seed is not None:
            torch.manual_seed(options.seed)
        self._running = self.complete(completions, options.num_samples, budget=options.time_budget)
        return self._running

    def complete(
        self,
        completions: list[Completion],
        samples: int = 1,
        start: int = 0,
        budget: float | None = None,
    ) -> Iterator[None]:
        """Generates until each completion has ended or `budget` seconds are over, and yields after
        each step.

        Each prompt has `samples` completions, one after the other, all of one limit. `start` tokens
        of the prompts are in the cache already."""
        begun, limit = time.perf_counter(), completions[0].limit
        # With a budget all ranks must stop at the same step.
        agree = self.team.agree if budget else float
        prompts = [completion.prompt_tokens[start:] for completion in completions[::samples]]
        if start:  # penalties may be new, and want to know what is in the cache
            cached = [completion.prompt_tokens[:start] for completion in completions[::samples]]
            at = torch.arange(start, device=self.device)[None]
            self.engine.remember(torch.tensor(cached, device=self.device), at)
        with vet.memory_advice(self.advice):
            for rows in generate(self.speculator or self.engine, prompts, limit, start, samples):
                seconds = agree(time.perf_counter() - begun)
                for b, completion in enumerate(completions):
                    if budget and seconds > budget and not completion.finish_reason:
                        completion.finish("time")
                    for token, logprob in rows[b]:
                        if not completion.finish_reason:
                            completion.add(token, logprob, seconds)
                    if completion.finish_reason and self.speculator:
                        self.speculator.finish(b)
                yield
                if all(completion.finish_reason for completion in completions):
                    break
        if budget and not any(completion.steps for completion in completions):
            raise ValueError(
                f"time_budget={budget}: the first token took {seconds:.3f} s; allow more"
            )


def is_single(prompts) -> bool:
    """Whether it is a text or a chat's messages, and no list of these."""
    if isinstance(prompts, list | tuple):
        return len(prompts) > 0 and isinstance(prompts[0], dict)
    return isinstance(prompts, str)


def say_compiling():
    print("compiling ...", file=sys.stderr)
    return nullcontext()


def make_options(kind: type, given: dict):
    """An instance of a dataclass of options. None: not given. ValueError for a name that it lacks."""
    check_names(kind, given)
    return kind(**{name: value for name, value in given.items() if value is not None})


def check_names(kind: type, given: dict) -> None:
    names = [each.name for each in fields(kind)]
    for name in given.keys() - {*names}:
        near = get_close_matches(name, names, 1)
        raise ValueError(f"{name}: no such option" + (f", did you mean {near[0]}?" if near else ""))


def find_engine(compile: bool, no_kernels: bool = False) -> Callable[..., Engine]:
    """The class of engines, eager, compiled or with fast/ in it."""
    fast = import_fast() if compile and not no_kernels else None
    return fast.FastEngine if fast else partial(Engine, compile=compile)


@cache
def import_fast():
    """fast/engine.py, the door of the speed layer. None where the folder was deleted or, after a
    line on stderr, does not import."""
    try:
        import fast.engine

        return fast.engine
    except Exception as error:  # whatever is wrong with it, the plain path runs
        missing = isinstance(error, ModuleNotFoundError) and error.name in ("fast", "fast.engine")
        if not missing:
            print(
                f"fast/ cannot be imported, plain PyTorch runs: {type(error).__name__}: {error}",
                file=sys.stderr,
            )

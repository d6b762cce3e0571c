"""
Generate text with a Llama-family checkpoint.

    python generate.py  # the bundled model tells a story
    python generate.py --prompt "One day, a fox" --num-samples 3 --compile
    python generate.py --checkpoint meta-llama/Llama-3.1-8B-Instruct --compile \\
        --interactive
    torchrun --standalone --nproc-per-node 4 generate.py --checkpoint DIR \\
        --compile

Text goes to stdout as it is generated, everything else to stderr. With --json,
stdout is one JSON object on one line.
"""

import signal

# PyTorch takes seconds to import, and compiling takes longer: Ctrl-C ends both at once.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import formats
import guard
from checkpoint import UserError
from completion import Completion, make_completions, pieces, rank_completions
from eagle import make_draft
from model import Transformer
from sampling import LIMITS, Sampling, choose
from speculative import SLACK, Speculator, accept, choose_draft
from tp import draft_splitter, join, splitter

TINY = str(Path(__file__).parent / "checkpoints" / "tiny")
# At a time, over all prompts: the memory of prefill does not grow with the prompt.
PREFILL_TOKENS = 4096
PLAIN = SimpleNamespace(choose=choose, choose_draft=choose_draft, accept=accept)

# Prefill and decode


def prefill(engine: "Engine", prompts: list[list[int]], start: int) -> Tensor:
    """Reads P prompts, which may differ in length, after `start` cached tokens -> the logits after
    each [P, V]."""
    logits, end = None, start
    for tokens, positions, last, is_last in chunks(prompts, start, engine.columns(), engine.device):
        end += tokens.shape[1]
        found = engine.model(tokens, positions, engine.slots(end), last)
        # A prompt's logits are those of the piece that has its last token.
        logits = found if logits is None else torch.where(is_last[:, None], found, logits)
    return logits


def chunks(
    prompts: list[list[int]], start: int, columns: int, device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    """Cuts P prompts, padded on the right, into pieces of about PREFILL_TOKENS tokens, multiples of
    `columns` wide.

    Yields tokens [P, T], positions [1, T], a column of each prompt [P], and whether that is the
    prompt's last token [P]. Padding needs no mask: see model.py."""
    width = round_up(max(map(len, prompts)), columns)
    size = max(columns, PREFILL_TOKENS // len(prompts) // columns * columns)
    tokens = torch.tensor(
        [prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device
    )
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    for at in range(0, width, size):
        piece = tokens[:, at : at + size]
        positions = start + at + torch.arange(piece.shape[1], device=device)[None]
        column = (last - at).clamp(0, piece.shape[1] - 1)
        yield piece, positions, column, column == last - at


def decode_one_token(
    model: Callable,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    choose: Callable,
    sampling: Sampling | Tensor,
) -> tuple[Tensor, Tensor]:
    """tokens, positions [B] -> the next tokens [B] and their log-probabilities [B]. In place,
    tokens become the next ones, and positions go up by one."""
    logits = model(tokens[:, None], positions[:, None], slots).squeeze(1)  # [B, V]
    chosen, logprobs = choose(logits, sampling)
    tokens.copy_(chosen)
    positions += 1
    return chosen, logprobs


# The engine


class Engine:
    """A model with a KV cache of batch_size rows of max_seq_len tokens, and the functions that run
    it.

    mode: "eager"; "compile", torch.compile and nothing else; or "fast", torch.compile and what
    fast/ puts in the place of the model's modules. features, cache: see Transformer.setup().

    model(tokens, positions, slots, last) reads prompts; forward(tokens [B, T], positions [B, T],
    slots) -> logits [B, T, V] decodes and verifies. What a step runs:

                       forward             decode              sampler    one CUDA graph is
        eager          model               decode_one_token    PLAIN      -
        compiled       compiled_decoder    decode_one_token    PLAIN      the forward
        captured       decoder             captured_decode     fast/'s    the whole step

    compiled: any mode but "eager". captured: mode "fast", where kernels run on the device and know
    all values of Sampling. decoder: in mode "fast" a second module over the same weights and
    caches, else the model itself.
    """

    def __init__(
        self,
        model: Transformer,
        max_seq_len: int,
        batch_size: int = 1,
        sampling: Sampling = Sampling(),
        mode: str = "eager",
        features: tuple[int, ...] = (),
        cache: str = "16-bit",
    ):
        self.model = model
        # LLM's length and, with a draft, SLACK more; the cache has 23 or more on top
        self.max_seq_len = max_seq_len
        self.batch_size = batch_size
        self.device = model.embed.weight.device
        # Behind the last token are up to 15 slots for the columns that fill up a prompt, and 8 that
        # slots() leaves out. SDPA's masks want a multiple of 8.
        model.setup(round_up(max_seq_len + 15 + 8, 8), batch_size, features, cache)
        # The length that each row may reach (Transformer.begin_rows()), where its prompt and new
        # tokens do not say it: a draft is not told how many these are, and a chat's turns share one
        # rope.
        self.row_length = None
        self.tokens = torch.zeros(batch_size, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        self.compiled = mode != "eager"
        self.kernels = False
        self.graph = None
        if self.compiled:
            self.compile(use_fast=mode == "fast")
        self.set_sampling(sampling)

    def compile(self, use_fast: bool) -> None:
        """Every switch of the compiler, and the swap for what fast/ has."""
        # A seed draws the same with and without --compile, if all rows are in use.
        torch._inductor.config.fallback_random = True
        torch._inductor.config.size_asserts = False  # a tenth of checkpoints/tiny's step on a CPU
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1000
        # Do not unify dynamic sizes that happen to coincide.
        torch.fx.experimental._config.use_duck_shape = False
        # A float is a constant: dynamic=True would trace each layer twice, first with numbers such
        # as eps as inputs.
        dynamo.specialize_float = True
        # Do not make a size dynamic when it first changes.
        dynamo.automatic_dynamic_shapes = False
        # Prefill calls the model, which is not compiled as a whole: each layer is, and the code of
        # one serves all lengths and layers. Decode's forward is compiled once more, below.
        for layer in self.model.layers:
            layer.compile(dynamic=True, fullgraph=True)
        self.decoder = self.model
        fast = import_fast() if use_fast else None
        self.fast = fast and fast.optimize(self.model)
        if self.fast:
            self.decoder, self.kernels = self.fast.decoder, self.fast.kernels
        self.compiled_decoder = torch.compile(self.decoder, mode="reduce-overhead", fullgraph=True)
        self.settings = torch.zeros(4, device=self.device)  # fast/'s values of Sampling

    def set_sampling(self, sampling: Sampling) -> None:
        """For the steps from now on. It compiles nothing: plain PyTorch samples beside the compiled
        code, and kernels read the values on the device.

        sampler: PLAIN, or fast/'s functions of the same names; all take `sampling` as their last
        argument. captures: kernels do all of a step, so that one CUDA graph holds it."""
        values = self.fast.settings(sampling) if self.kernels else None
        self.captures = values is not None
        if self.captures:
            self.settings.copy_(values)
            self.sampler = self.fast
            self.sampling = self.settings
            self.forward = self.decoder
            self.decode = self.captured_decode
        else:
            self.sampler = PLAIN
            self.sampling = sampling
            self.forward = self.compiled_decoder if self.compiled else self.model
            self.decode = decode_one_token

    def columns(self) -> int:
        """A prompt is filled up to a multiple of this. dynamic=True would compile once more for a
        single column. On a GPU, in plain PyTorch, cuDNN's attention makes a plan of 1.8 MiB for
        each shape, which PyTorch keeps."""
        return 16 if self.device.type == "cuda" and not self.kernels else 2

    def slots(self, n: int) -> Tensor:
        """The cache's first slots, at least the n that are in use."""
        if self.kernels:
            # Kernels find the slots in use by themselves, also those that fast/ put into the model
            # for prefill.
            return self.model.slots[:0]
        length = round_up(n, 8)
        if self.device.type == "cuda":
            # A power of two: each length is a CUDA graph of its own or, eager, a plan of cuDNN's.
            length = max(256, 1 << (n - 1).bit_length())
        # Always a strict slice: the full view would specialize and recompile.
        slots = self.model.slots[:-8][:length]
        if self.compiled:
            torch._dynamo.maybe_mark_dynamic(slots, 0)
        return slots

    def prefill(
        self, prompts: list[list[int]], start: int = 0, samples: int = 1, new_tokens: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The function prefill() for P prompts after `start` cached tokens, and for each prompt's
        samples the first token and its log-probability [P x samples]. new_tokens: how many will
        follow."""
        lengths = [self.row_length or start + len(prompt) + new_tokens for prompt in prompts]
        self.model.begin_rows(lengths)
        logits = prefill(self, prompts, start)
        if samples > 1:
            rows = [row for row in range(len(prompts)) for _ in range(samples)]
            self.model.arrange_rows(rows, start + max(map(len, prompts)))
            self.model.begin_rows([lengths[row] for row in rows])
            logits = logits.repeat_interleave(samples, dim=0)
        return self.sampler.choose(logits, self.sampling)

    def begin(
        self, prompts: list[list[int]], new_tokens: int, start: int, samples: int
    ) -> tuple[Tensor, Tensor]:
        """prefill(), and makes step() ready for the new_tokens - 1 tokens that follow."""
        chosen, logprobs = self.prefill(prompts, start, samples, new_tokens)
        used = len(chosen)
        self.tokens[:used] = chosen
        self.positions.zero_()
        self.positions[:used] = torch.tensor(
            [start + len(prompt) for prompt in prompts for _ in range(samples)]
        )
        # Eager, the rows that are not in use are left out. A CUDA graph wants the same tensors each
        # time.
        rows = slice(None if self.compiled else used)
        self.state = self.tokens[rows], self.positions[rows]
        self.length = start + max(map(len, prompts))
        self.end = self.length + new_tokens - 1
        return chosen, logprobs

    def step(self) -> tuple[Tensor, Tensor] | None:
        """Launches the next token of each row: what decode_one_token() returns, None at the end.
        Compiled, the next step overwrites it; captured, it is in the host's memory once the GPU is
        done (fast/graph.py), and the step after the next overwrites it."""
        if self.length == self.end:
            return None
        self.length += 1
        return self.decode(
            self.forward, *self.state, self.slots(self.length), self.sampler.choose, self.sampling
        )

    def captured_decode(self, *step):
        """decode_one_token() as a CUDA graph. The first call runs it as it is, which compiles the
        kernels.

        torch.compile would trace all layers to record the same launches: Llama-2-7B would be ready
        in 17 s with empty caches and in 6 with full ones, captured it is in 8.5 and 2.6 (H200). The
        graph has no arguments: it reads tokens, positions and settings where they are, and changes
        the first two there."""
        if self.graph:
            return self.graph()
        chosen = decode_one_token(*step)
        self.graph = self.fast.capture(partial(decode_one_token, *step), chosen)
        return chosen

    def receive(self, tokens: Tensor, logprobs: Tensor) -> list[list[tuple[int, float]]]:
        """A step's tensors, now on the host -> the new tokens of each row and their
        log-probabilities."""
        return [[pair] for pair in zip(tokens.tolist(), logprobs.tolist())]

    @torch.no_grad()
    def warm_up(
        self, prompts: int, speculator: Speculator | None = None, alone: bool = True
    ) -> None:
        """Compiles what a batch of so many prompts needs: prefill, then decode, which captures its
        graph.

        alone: this is the only rank. Ranks that compile and run at once would exchange their sums
        out of order."""
        if speculator:  # whose prepare() has made its steps
            speculator.begin([[0, 0]] * prompts, 1, 0, 1)
            speculator.draft.catch_up(speculator.text, speculator.last, speculator.n_slots())
            return
        with (
            self.decoder.warm_up(self.batch_size, self.sampler.choose, self.sampling)
            if self.captures and alone
            else nullcontext()
        ):
            self.begin([[0, 0]] * prompts, 4, 0, 1)
        while self.step():
            pass


@cache
def import_fast():
    """fast/, the speed layer. None where the folder was deleted or, after a line on stderr, does
    not import."""
    try:
        import fast

        return fast if fast.__file__ else None  # an empty folder is a package without a file
    except Exception as error:  # whatever is wrong with it, the plain path runs
        if not isinstance(error, ModuleNotFoundError) or error.name != "fast":
            print(
                f"fast/ cannot be imported, plain PyTorch runs: {type(error).__name__}: {error}",
                file=sys.stderr,
            )


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# The loop


@torch.no_grad()
def generate(
    runner: "Engine | Speculator",
    prompts: list[list[int]],
    new_tokens: int,
    start: int = 0,
    samples: int = 1,
) -> Iterator[list[list[tuple[int, float]]]]:
    """Yields for each step and row the new tokens with their log-probabilities, until all rows have
    new_tokens.

    Rows are `samples` of each prompt. Ragged prompts need no padding mask: see model.py. start: so
    many tokens, the same for all prompts, are in the cache already. On a GPU a step is yielded
    after the next one is launched, so that the GPU never waits; a speculative step may go beyond
    new_tokens."""
    step = runner.begin(prompts, new_tokens, start, samples)
    while step:
        if runner.device.type == "cuda":
            host = to_host(step)
            step = runner.step()
            yield runner.receive(*host())
        else:
            yield runner.receive(*step)
            step = runner.step()


def to_host(tensors: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """Begins to copy the tensors of a GPU's step to the host, and returns the function that waits
    for them. A captured step's are on the host already, where the graph writes them
    (fast/graph.py), and need the wait alone."""
    copies = [t.to("cpu", non_blocking=True) for t in tensors]
    event = torch.cuda.current_stream().record_event()

    def wait() -> list[Tensor]:
        event.synchronize()
        return copies

    return wait


# From text to text


class LLM:
    """A checkpoint, ready to generate: the Python API, and what the command line runs.

        llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", compile=True)
        print(llm("The capital of France is", max_new_tokens=20, temperature=0).text)

    Keywords are the options of generate.py: max_new_tokens=20 is --max-new-tokens 20. Those from
    max_new_tokens on may be given here, for all calls, or to a call.

    The KV cache has max_batch_size rows (prompts times samples) of max_seq_length tokens. The first
    call sets what is not given, and a larger call lets it grow. With compile=True the first call
    takes 2,048 tokens at least if the model has them, and when the cache grows the model is loaded
    and compiled again; other LLMs of the process are compiled again, too. Calls of any size and
    sampling within these limits compile nothing again. Compiled, a step costs what max_batch_size
    rows cost, and draws random numbers for as many.

    ValueError for a mistake: a value out of its limits, a prompt or a batch that is too large. One
    call at a time: another one ends a stream() that goes on. Under torchrun each rank makes the
    same calls."""

    def __init__(
        self,
        checkpoint: str = TINY,
        *,
        max_batch_size: int | None = None,
        max_seq_length: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        compile: bool = False,
        no_kernels: bool = False,
        quantize: str | None = None,
        group_size: int | None = None,
        quantize_head: str | None = None,
        kv_cache: str | None = None,
        draft: str | None = None,
        draft_tokens: int | str | None = None,
        draft_quantize: str | None = None,
        template_options: dict | None = None,
        load: bool = True,
        quiet: bool = False,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        num_samples: int = 1,
        stop: str | list[str] = (),
        time_budget: float | None = None,
    ):
        """template_options: variables of the chat template, such as {"enable_thinking": False}.
        load: False puts off reading the weights to the first call. quiet: no progress on stderr.

        Half of these lines are the signature, so that help(LLM) shows every option with its
        default."""
        keywords = {name: value for name, value in locals().items() if name != "self"}
        guard.check_options(keywords)
        self.options = SimpleNamespace(**keywords)
        name, self.team = join(device)
        self.device = guard.find_device(name, compile)
        self.dtype = guard.find_dtype(dtype, self.device)
        opened = self.checkpoint, self.tokenizer = guard.open_checkpoint(checkpoint)
        self.tokenizer.template_options = template_options or {}
        guard.check_model(keywords, self.checkpoint.config)
        self.context = max_seq_length or self.checkpoint.config.context
        self.quantization = formats.read_settings(self.checkpoint)
        formats.check_quantize(self.checkpoint, self.quantization, quantize, group_size)
        self.draft_checkpoint = None
        if draft not in (None, "prompt-lookup"):
            self.draft_checkpoint = guard.open_draft(draft, opened)
        # An EAGLE head's HeadConfig, else None.
        self.eagle = getattr(self.draft_checkpoint, "options", None)
        self._sizes = [
            (checkpoint.counted(), formats.read_settings(checkpoint).get("bits"))
            for checkpoint in (self.checkpoint, self.draft_checkpoint)
            if checkpoint
        ]
        self.model = self.draft_model = self.engine = self.speculator = self._running = None
        # Room: tokens of a prompt and its completion.
        self.load_s, self.compile_s, self.room = 0.0, 0.0, 0
        self.progress = say_compiling
        if self.team.ranks > 1:
            torch.manual_seed(self.team.agree(torch.seed()))
        if load and max_batch_size and max_seq_length:
            self.prepare(max_batch_size, max_seq_length)
        elif load:
            self._load(max_batch_size or 1, max_seq_length or 1)

    def __repr__(self) -> str:
        return f"LLM({str(self.checkpoint.directory)!r}, device={str(self.device)!r})"

    def __call__(self, prompts: str | list, **options) -> Completion | list[Completion]:
        """Completes a text, a chat's messages (a list of {"role": ..., "content": ...}), or a list
        of these as one batch. options: the constructor's, from max_new_tokens on.

        Returns a list if given a list or if num_samples > 1: in the order of the prompts, then of
        the samples or, with a time budget, by rank_completions()."""
        options = self._options(options)
        if not isinstance(prompts, (str, list, tuple)):
            raise UserError(f"{prompts!r:.60}: want a text, messages, or a list of these")
        single = isinstance(prompts, str) or (prompts and isinstance(prompts[0], dict))
        prompts = [prompts] if single else prompts
        completions = make_completions(prompts, options, self.tokenizer, self.context)
        for _ in self._steps(completions, options):
            pass
        if options.time_budget:
            completions = rank_completions(completions, options.num_samples)
        return completions[0] if single and options.num_samples == 1 else completions

    def stream(self, prompt: str | list[dict], **options) -> Iterator[str]:
        """The completion of one prompt, piece by piece, as it is generated. Another call ends
        it."""
        options = self._options(options)
        if options.num_samples > 1:
            raise UserError(f"`num_samples`={options.num_samples}: a stream is of one sample")
        completions = make_completions([prompt], options, self.tokenizer, self.context)
        return pieces(completions[0], self._steps(completions, options))

    def _options(self, given: dict) -> SimpleNamespace:
        """The constructor's options with those of a call in their place. None: as if it were not
        given."""
        guard.check_call(given, vars(self.options))
        options = vars(self.options) | {
            name: value for name, value in given.items() if value is not None
        }
        guard.check_options(options)
        return SimpleNamespace(**options)

    def _sampling(self, options) -> Sampling:
        """The options that were given, else generation_config.json's, else Sampling's defaults."""
        found = {}
        for source in (self.checkpoint.generation, vars(options)):
            found |= {name: source[name] for name in LIMITS if source.get(name) is not None}
        return Sampling(**found)

    # Weights, cache and compiled code

    def _load(self, rows: int, length: int) -> None:
        """Reads the weights, for a cache of so many rows and tokens."""
        options = self.options
        begun = time.perf_counter()
        where = dict(device=self.device, dtype=self.dtype, progress=not options.quiet)
        read = partial(formats.load, **where)
        self.advice = self._check_memory(rows, length)
        with guard.memory_advice(self.advice):
            self.model = read(
                self.checkpoint,
                quantize=options.quantize,
                group_size=options.group_size,
                quantize_head=options.quantize_head,
                split=splitter(self.team),
            )
            if self.draft_checkpoint:
                self.draft_model = read(
                    self.draft_checkpoint,
                    quantize=options.draft_quantize,
                    split=draft_splitter(self.team, self.draft_checkpoint.counted()),
                )
                if self.eagle:
                    self.draft_model.share_embedding(self.model)
        self.load_s = time.perf_counter() - begun

    def _check_memory(self, rows: int, length: int) -> str:
        """What to say if memory runs out. UserError if weights and caches alone do not fit."""
        where = self.device, self.dtype, self.team.ranks
        loaded = self.model is not None
        kind = self.options.kv_cache or "16-bit"
        features = self.eagle.width if self.eagle else 0
        return guard.check_memory(
            self._sizes, rows, self._engine_length(length), *where, loaded, kind, features
        )

    def _engine_length(self, length: int) -> int:
        """An Engine's max_seq_len for texts of so many tokens. With a draft also for drafted ones
        that are refused."""
        return length + SLACK if self.options.draft else length

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
        with guard.memory_advice(self.advice):
            if self.options.compile:
                with nullcontext() if self.options.quiet else self.progress():
                    self._make_engine(rows, length)
                    for count in {prompts} if prompts else {1, rows}:
                        self.engine.warm_up(count, self.speculator, self.team.ranks == 1)
                self.compile_s = time.perf_counter() - begun
            else:
                for model in (self.model, self.draft_model):
                    formats.unpack_quantized(
                        model, rows * length, self.options.quiet, self.team.ranks
                    )
                self._make_engine(rows, length)
        self.room = length

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

    def _make_engine(self, rows: int, length: int) -> None:
        options = self.options
        slots = self._engine_length(length)
        mode = "eager"
        if options.compile:
            mode = "compile" if options.no_kernels else "fast"
        engine = partial(
            Engine,
            batch_size=rows,
            sampling=self._sampling(options),
            mode=mode,
            cache=options.kv_cache or "16-bit",
        )
        self.engine = engine(self.model, slots, features=self.eagle.places if self.eagle else ())
        if not options.draft:
            return
        draft = make_draft(self.engine, self.draft_model, engine, slots)
        if draft.max_seq_len < length:
            print(
                f"the draft's context is {draft.max_seq_len} tokens: no token beyond is drafted",
                file=sys.stderr,
            )
        self.speculator = Speculator(
            self.engine, draft, str(options.draft_tokens or "auto"), self.team.agree
        )

    # Generation

    def _steps(self, completions: list[Completion], options) -> Iterator[None]:
        """What complete() yields for a call, once room for it is made."""
        if self._running:
            self._running.close()  # a stream that goes on ends here
        rows, most = len(completions), self.options.max_batch_size
        if most and rows > most:
            raise UserError(
                f"{rows} rows (prompts x samples) exceed `max_batch_size`={most}: give fewer"
            )
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
        with guard.memory_advice(self.advice):
            for rows in generate(self.speculator or self.engine, prompts, limit, start, samples):
                seconds = agree(time.perf_counter() - begun)
                for b, completion in enumerate(completions):
                    if budget and seconds > budget and not completion.finish_reason:
                        completion.finish_reason = "time"
                    for token, logprob in rows[b]:
                        if not completion.finish_reason:
                            completion.add(token, logprob, seconds)
                    if completion.finish_reason and self.speculator:
                        self.speculator.finish(b)
                yield
                if all(completion.finish_reason for completion in completions):
                    break
        if budget and not any(completion.steps for completion in completions):
            raise UserError(
                f"`time_budget`={budget}: the first token took {seconds:.3f} s; allow more"
            )


def say_compiling():
    print("compiling ...", file=sys.stderr)
    return nullcontext()


def main() -> None:
    from cli.generate import main

    main(__doc__)


if __name__ == "__main__":
    from cli.errors import run

    run(main)

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

# This file is the plain engine: from tokens to tokens, with model.py and nothing else.
#
#     Sampling, probabilities(), draw(), choose()   the next token, from its logits
#     penalize()                                    its logits, by the tokens before it
#     prefill(), chunks(), decode_one_token()       the two ways to call the model
#     Engine                                        a model with its cache, eager or compiled
#     generate()                                    the loop
#
# llm.py puts text around it, speculative.py drafts around it, fast/engine.py kernels into it.
#
# Shapes: B rows, P prompts, T tokens, V vocabulary.

import os
import signal

if __name__ == "__main__":  # before PyTorch is imported
    # It takes seconds to import, and compiling takes longer: Ctrl-C ends both at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # OpenMP's threads sleep while they wait: spinning, they take the cores from other processes,
    # and wait for them. One busy process beside two cores halved the tokens a second and more.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Transformer

# At a time, over all prompts: the memory of prefill does not grow with the prompt.
PREFILL_TOKENS = 4096


# Sampling


def option(default, help: str, low: float = -math.inf, high: float = math.inf, **more):
    """A field of Sampling, or of llm.Options, that is an option: llm.py and the command line read
    its limits, low and high included, and its help. more: see llm.Options."""
    metadata = dict(help=help, low=low, high=high, **more)
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_limits(options) -> None:
    """ValueError for a value in a dataclass's field that is beyond the field's limits, or none of
    its choices, or of a switch neither true nor false. None: it is not given."""
    for each in fields(options):
        value, limits = getattr(options, each.name), each.metadata
        if each.type in (bool, bool | None) and value not in (None, True, False):
            raise ValueError(f"{each.name}={value!r:.60}: want true or false")
        choices = limits.get("choices")
        if choices and value is not None and str(value).removeprefix("torch.") not in choices:
            raise ValueError(f"{each.name}={value!r:.60}: want one of {', '.join(choices)}")
        low, high = limits.get("low", -math.inf), limits.get("high", math.inf)
        if value is None or (low, high) == (-math.inf, math.inf):
            continue
        kind = float if each.type in (float, float | None) else int
        if type(value) not in (int, kind) or not low <= value <= high:
            want = f"{kind.__name__} from {low} to {high}"
            raise ValueError(f"{each.name}={value!r:.60}: want {want}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. A rule of your own is one more field, with a default that turns it off,
    and its lines in probabilities(); README shows one. llm.LLM and the command line then have it,
    and fast/ leaves sampling to this file wherever the rule is on."""

    temperature: float = option(0.8, "0: greedy, the likeliest token", 0, 100)
    top_k: int = option(0, "draw from the K likeliest tokens; 0 or -1: off", -1)
    top_p: float = option(1.0, "draw from the likeliest that make up P; 1: off, 0: greedy", 0, 1)
    min_p: float = option(0.0, "drop what is less likely than P times the likeliest; 0: off", 0, 1)
    repetition_penalty: float = option(
        1.0, "above 1: tokens of the prompt and the text become less likely; 1: off", 0.01, 100
    )
    presence_penalty: float = option(
        0.0, "taken from the logit of each token of the text, without the prompt; 0: off", -2, 2
    )
    frequency_penalty: float = option(
        0.0, "the same, as many times as the text has the token; 0: off", -2, 2
    )

    def __post_init__(self):
        check_limits(self)

    @property
    def greedy(self) -> bool:
        # So small, it is to within rounding; a division by far less overflows, and a top_p of 0
        # would leave no token.
        return self.temperature < 1e-5 or self.top_p < 1e-6

    @property
    def penalties(self) -> tuple[float, float, float] | None:
        """Those of repetition, presence and frequency; None: all are off."""
        found = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return None if found == (1, 0, 0) else found


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [..., V] -> the distribution [..., V] that tokens are drawn from.

    Temperature comes first, then top-k, top-p and min-p, as in transformers. Greedy, the likeliest
    token has probability 1, the first one of several. Top-k, top-p and min-p keep all of equally
    likely tokens, or none."""
    if sampling.greedy:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / sampling.temperature

    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = logits.softmax(-1)

    if sampling.top_p < 1:
        ordered = probs.sort(dim=-1, descending=True).values
        # A token is cut if the likelier ones make up top_p already.
        cut = ordered.cumsum(-1) - ordered >= sampling.top_p
        least = ordered.masked_fill(cut, 1).amin(-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0)

    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0)

    return probs / probs.sum(-1, keepdim=True)


def draw(probs: Tensor, sampling: Sampling) -> Tensor:
    """probs [..., V], of any sum -> a token [...] with a probability in proportion.

    An exponential race: token i arrives after an exponential time of rate p[i], so it is first with
    probability p[i]. torch.multinomial() does the same but makes the host wait for the GPU."""
    if sampling.greedy:
        return probs.argmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def choose(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> the next token [B] and its log-probability [B] under the raw logits."""
    logits = logits.float()
    if sampling.greedy:
        # Without the distribution: 64 rows of 49,152 logits take two CPU cores 10 ms so, not 56.
        tokens = logits.argmax(-1)
    else:
        tokens = draw(probabilities(logits, sampling), sampling)
    return tokens, logprobs_of(logits, tokens)


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits [..., V], tokens [...] -> the tokens' log-probabilities [...]."""
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def penalize(
    logits: Tensor, at: Tensor, history: Tensor, begins: Tensor, penalties: Tensor | tuple
) -> Tensor:
    """logits [B, T, V] behind the tokens at positions at [B, T] -> what tokens are drawn from,
    fp32.

    history [B, L]: each row's tokens by position; begins [B]: where the prompt ends; penalties: as
    Sampling has them. Repetition, of the prompt's tokens too, is transformers' (arXiv 1909.05858);
    presence and frequency, of the others alone, are those of OpenAI's API and of vLLM."""
    repetition, presence, frequency = penalties
    place = torch.arange(history.shape[1], device=history.device)
    before = place <= at[:, :, None]  # [B, T, L]
    made = before & (place >= begins[:, None, None])
    tokens = history[:, None].expand_as(before)
    logits = logits.float()
    zeros = torch.zeros_like(logits)
    seen = zeros.scatter_add(-1, tokens, before.float()) > 0  # [B, T, V]
    count = zeros.scatter_add(-1, tokens, made.float())
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - presence * (count > 0) - frequency * count


# Prefill and decode


def prefill(engine: "Engine", prompts: list[list[int]], start: int) -> Tensor:
    """Reads P prompts, which may differ in length, after `start` cached tokens -> the logits after
    each [P, V]."""
    logits, end = None, start
    ends = torch.tensor([start + len(prompt) for prompt in prompts], device=engine.device)
    for tokens, positions, last, is_last in chunks(prompts, start, engine.columns(), engine.device):
        end += tokens.shape[1]
        engine.remember(tokens, positions)
        found = engine.model(tokens, positions, engine.slots(end), last, ends=ends)
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
    padded = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
    tokens = torch.tensor(padded, device=device)
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
) -> tuple[Tensor, Tensor]:
    """tokens, positions [B] -> the next tokens [B] and their log-probabilities [B], which
    choose(logits [B, V], positions) gives. In place, tokens become the next ones, and positions go
    up by one."""
    logits = model(tokens[:, None], positions[:, None], slots).squeeze(1)  # [B, V]
    chosen, logprobs = choose(logits, positions)
    tokens.copy_(chosen)
    positions += 1
    return chosen, logprobs


# The engine


class Engine:
    """A model with a KV cache of batch_size rows of max_seq_len tokens, and the steps that fill it.

    features, cache: see Transformer.setup(). spare: more slots, for drafted tokens that go beyond a
    text's end. self.limit is a text's most tokens, self.max_seq_len counts the spare slots, too.

    self.model reads prompts: model(tokens, positions, slots, last). self.forward decodes and
    verifies: forward(tokens [B, T], positions [B, T], slots) -> logits [B, T, V]. Eager, both are
    the model; compiled, forward is the model as a CUDA graph of torch.compile.

    Penalties go by history [B, L], the tokens by position, and begins [B], where each row's prompt
    ends. The history is written, while penalties are on, as the cache is: by what reads tokens,
    before they become visible. So drafts that were rejected and padding need no clean-up there,
    either. A text that goes on from the cache after penalties came on has its beginning from
    llm.LLM.complete().

    fast/engine.py's FastEngine overrides what kernels change."""

    captures = False  # whether a step runs as one CUDA graph: see capture()
    keeps_states = False  # whether prefill() keeps those of the prompt's end, for go_back()

    def __init__(
        self,
        model: Transformer,
        max_seq_len: int,
        batch_size: int = 1,
        sampling: Sampling = Sampling(),
        compile: bool = False,
        features: tuple[int, ...] = (),
        cache: str = "16-bit",
        spare: int = 0,
    ):
        self.model = self.forward = model
        self.limit, self.max_seq_len = max_seq_len, max_seq_len + spare
        self.batch_size, self.cache = batch_size, cache
        self.device = model.embed.weight.device
        # Behind the last token are up to 15 slots for the columns that fill up a prompt, and 8 that
        # slots() leaves out. SDPA's masks want a multiple of 8.
        behind = round_up(self.max_seq_len + 15 + 8, 8) - max_seq_len
        model.setup(max_seq_len, batch_size, features, cache, behind)
        self.tokens = torch.zeros(batch_size, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        self.begins = torch.zeros_like(self.tokens)
        self.kept = 0, []  # the prompt's tokens, and copies of Transformer.states() behind it
        self.history = self.tokens.new_zeros(batch_size, len(model.slots))
        self.compiled = compile
        if compile:
            self.compile()
        self.set_sampling(sampling)

    def compile(self) -> None:
        """The compiler's switches; they hold for the whole process. fast/decoder.py has two more,
        for kernels."""
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
        # Do not pad the products of a width that 8 does not divide: whether that pays depends on
        # the length, and each range of lengths would be code of its own.
        torch._inductor.config.shape_padding = False
        # Prefill calls the model, which is not compiled as a whole: each layer is, and the code of
        # one serves all lengths and layers. Decode's forward is compiled once more.
        for layer in self.model.layers:
            layer.compile(dynamic=True, fullgraph=True)
        self.forward = self.compile_whole(self.model)

    def compile_whole(self, model: Callable) -> Callable:
        return torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def set_sampling(self, sampling: Sampling) -> None:
        """For the steps from now on. It compiles nothing: plain PyTorch samples beside the compiled
        code, and kernels read the values on the device. But where kernels know a value no longer,
        such as a field of your own, the forward is compiled, once, for the sampling beside it."""
        self.sampling = sampling
        self.penalties = sampling.penalties

    def twin(self, function: Callable) -> Callable:
        """What runs in the place of a function of this file, or of speculative.py, whose last
        argument is the sampling: here itself."""
        return function

    def faster(self, model: Transformer) -> Callable:
        """What runs in the place of a draft's model that has no engine of its own kind: here
        itself."""
        return model

    def read(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """forward(), for a text's own tokens."""
        self.remember(tokens, positions)
        return self.forward(tokens, positions, slots)

    def remember(self, tokens: Tensor, positions: Tensor) -> None:
        """tokens [B, T] that are read at positions [B, T] or [1, T]."""
        if self.penalties is not None:
            self.history[: len(tokens)].scatter_(1, positions.expand_as(tokens), tokens)

    def sample(self, function: Callable, logits: Tensor, at: Tensor, *given) -> tuple[Tensor, ...]:
        """What choose() gives or, function, speculative.accept(): tokens, log-probabilities, and
        more. The logits [B, V] or [B, T, V] are behind the tokens at positions at [B] or [B, T].
        given: what function takes beside logits and sampling."""
        function = self.twin(function)
        if self.penalties is None:
            return function(logits, *given, self.sampling)
        tokens, _, *more = function(self.penalized(logits, at), *given, self.sampling)
        return tokens, logprobs_of(logits, tokens), *more

    def penalized(self, logits: Tensor, at: Tensor) -> Tensor:
        """penalize(), for sample()."""
        B, V = len(at), logits.shape[-1]
        of_rows = self.history[:B], self.begins[:B]
        found = penalize(logits.reshape(B, -1, V), at.reshape(B, -1), *of_rows, self.penalties)
        return found.view(logits.shape)

    def columns(self) -> int:
        """A prompt is filled up to a multiple of this. dynamic=True would compile once more for a
        single column. On a GPU Triton would compile once more for numbers that 16 does not divide
        and, in plain PyTorch, cuDNN's attention makes a plan of 1.8 MiB for each shape, which
        PyTorch keeps."""
        return 16 if self.device.type == "cuda" else 2

    def slots(self, n: int) -> Tensor:
        """The cache's first slots, at least the n that are in use."""
        length = round_up(n, 8)
        if self.device.type == "cuda":
            # A power of two: each length is a CUDA graph of its own or, eager, a plan of cuDNN's.
            length = max(256, 1 << (n - 1).bit_length())
        # Always a strict slice: the full view would specialize and recompile.
        slots = self.model.slots[:-8][:length]
        if self.compiled:
            torch._dynamo.maybe_mark_dynamic(slots, 0)
        return slots

    @torch.no_grad()
    def prefill(
        self, prompts: list[list[int]], start: int = 0, samples: int = 1
    ) -> tuple[Tensor, Tensor]:
        """The function prefill() for P prompts after `start` cached tokens, and for each prompt's
        samples the first token and its log-probability [P x samples]."""
        logits = prefill(self, prompts, start)
        if self.keeps_states:
            states = [part.clone() for part in self.model.states()]
            self.kept = start + max(map(len, prompts)), states
        if samples > 1:
            rows = [row for row in range(len(prompts)) for _ in range(samples)]
            self.model.arrange_rows(rows, start + max(map(len, prompts)))
            self.history[: len(rows)] = self.history[rows]
            logits = logits.repeat_interleave(samples, dim=0)
        lengths = [start + len(prompt) for prompt in prompts for _ in range(samples)]
        self.begins[: len(lengths)] = torch.tensor(lengths)
        return self.sample(choose, logits, self.begins[: len(lengths)] - 1)

    def begin(
        self, prompts: list[list[int]], new_tokens: int, start: int, samples: int
    ) -> tuple[Tensor, Tensor]:
        """prefill(), and makes step() ready for the new_tokens - 1 tokens that follow."""
        chosen, logprobs = self.prefill(prompts, start, samples)
        used = len(chosen)
        self.tokens[:used] = chosen
        self.positions.zero_()
        self.positions[:used] = self.begins[:used]
        # Eager, the rows that are not in use are left out. A CUDA graph wants the same tensors each
        # time.
        rows = slice(None if self.compiled else used)
        self.state = self.tokens[rows], self.positions[rows]
        self.length = start + max(map(len, prompts))
        self.end = self.length + new_tokens - 1
        return chosen, logprobs

    @torch.no_grad()
    def step(self) -> tuple[Tensor, Tensor] | None:
        """Launches the next token of each row: what decode_one_token() returns, None at the end.
        Compiled, the next step overwrites it; captured, it is in the host's memory once the GPU is
        done (fast/graph.py), and the step after the next overwrites it."""
        if self.length == self.end:
            return None
        self.length += 1
        return self.decode()

    def oldest(self, n: int) -> int:
        """The shortest text that begin() can go on from, `start` tokens, once a text of n tokens
        was made: 0, but where layers are recurrent. Two steps may go beyond the text."""
        return self.model.oldest(n + 2)

    def go_back(self, start: int, n: int) -> int:
        """Where the next begin() may start, at most at `start`, once a text of n tokens was made.
        A template that drops what the model thought needs this: the next turn goes on from about
        the end of the last prompt, which may be long ago."""
        return start if start >= self.oldest(n) or self.restore(start) else 0

    def restore(self, start: int) -> bool:
        """Brings recurrent layers back to the end of the last prompt, if begin() may start there."""
        n, states = self.kept
        if not self.model.oldest(n) <= start <= n or not states:
            return False
        for part, kept in zip(self.model.states(), states):
            part.copy_(kept)
        return True

    def decode(self) -> tuple[Tensor, Tensor]:
        slots = self.slots(self.length)
        return decode_one_token(self.read, *self.state, slots, partial(self.sample, choose))

    def receive(self, tokens: Tensor, logprobs: Tensor) -> list[list[tuple[int, float]]]:
        """A step's tensors, now on the host -> the new tokens of each row and their
        log-probabilities."""
        return [[pair] for pair in zip(tokens.tolist(), logprobs.tolist())]

    def capture(self, step: Callable, results: tuple[Tensor, ...]) -> Callable:
        """step() as one CUDA graph, where that is possible: here it stays as it is. results: those
        of a first call."""
        return step

    @torch.no_grad()
    def warm_up(self, prompts: int, alone: bool = True) -> None:
        """Compiles what a batch of so many prompts needs: prefill, then decode.

        alone: this is the only rank; see FastEngine, which compiles and runs at once."""
        self.begin([[0, 0]] * prompts, 4, 0, 1)
        while self.step():
            pass

    def warm_up_prompts(self, prompts: int) -> None:
        """Compiles what so many prompts need that are longer: here nothing."""


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# The loop


@torch.no_grad()
def generate(
    runner,
    prompts: list[list[int]],
    new_tokens: int,
    start: int = 0,
    samples: int = 1,
) -> Iterator[list[list[tuple[int, float]]]]:
    """Yields for each step and row the new tokens with their log-probabilities, until all rows have
    new_tokens.

    runner: an Engine or, with a draft, a speculative.Speculator.
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


def main() -> None:
    from cli.generate import main

    main()


if __name__ == "__main__":
    sys.modules["generate"] = sys.modules["__main__"]  # so that cli/ does not load this file again
    from cli.errors import run

    run(main)

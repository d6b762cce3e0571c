"""
A completion: the tokens that follow a prompt, as they come, and the text that they make.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hub import vet
from hub.tokenizer import Tokenizer


@dataclass
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
    # What gpt-oss writes in other channels than "final", and how the part begins that is being
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
        self.writes = "text"  # or "thoughts" or "header": what tokens are added to

    def add(self, token: int, logprob: float, seconds: float):
        if logprob != logprob:  # NaN
            raise ValueError(
                "the logits are not finite: the weights are broken, or dtype=float32 helps"
            )
        self.steps += 1
        self.first_s, self.seconds = self.first_s or seconds, seconds
        if token in self.tokenizer.stops:
            self.finish_reason = "stop"
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if mark := self.tokenizer.parts.get(token):
            self.begin_part(mark)
        else:
            self.decode(token)
        ends = [self.text.find(stop) for stop in self.stop_texts if stop in self.text]
        if ends:
            self.text, self.finish_reason = self.text[: min(ends)], "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"

    def begin_part(self, mark: str):
        """mark: one of tokenizer.PARTS."""
        self.writes = "header"
        if mark == "<|message|>":
            self.writes = "text" if self.header.startswith("final") else "thoughts"
        self.header, self.pending = "", []

    def decode(self, token: int):
        """Adds the token to what is being written, once its characters are complete."""
        self.pending.append(token)
        before = self.tokenizer.decode(self.before)
        after = self.tokenizer.decode(self.before + self.pending)
        if len(after) > len(before) and not after.endswith(
            "\ufffd"
        ):  # else the last character is incomplete
            vars(self)[self.writes] += after[len(before) :]
            self.before, self.pending = self.pending, []

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
    texts, encoded = zip(*(encode(prompt, tokenizer) for prompt in prompts))
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
    stops = [options.stop] if isinstance(options.stop, str) else options.stop
    return [
        Completion(text, tokens, tokenizer, new_tokens, stops)
        for text, tokens in zip(texts, encoded)
        for _ in range(options.num_samples)
    ]


def encode(prompt: str | list[dict], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """A text, or a chat's last message, and the tokens of all."""
    with vet.reading("a prompt"):
        if isinstance(prompt, str):
            return prompt, tokenizer.encode_text(prompt)
        vet.check_messages(prompt)
        if not tokenizer.template:
            raise ValueError(
                "this checkpoint has no chat template: give a text, which is continued"
            )
        return prompt[-1]["content"], tokenizer.encode_chat(prompt)


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

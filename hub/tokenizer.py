"""
Text to tokens and back, and the chat template, from a checkpoint in Hugging Face layout.

    tokenizer = Tokenizer(checkpoint)

A chat is encoded in three steps: mark, render, encode. Each special token that is typed in a
message gives way to a mark, a private character; the template renders and writes its own special
tokens; the text is parted at the marks, and a mark is encoded as the plain text that it stands for.
So the template alone begins and ends turns.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

from hub.checkpoint import MOST_JSON, Checkpoint, is_file, read_json, reading
from hub.families import value_of

MOST_TOKENIZER = 2**28  # bytes of a tokenizer's file
MARKS = range(0x102000, 0x10FFFE)  # the last of Unicode's private characters
# They end a turn, whether or not generation_config.json lists them.
CHAT_ENDS = "<|eot_id|>", "<|im_end|>"
# gpt-oss's answers have parts: <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>.
PARTS = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"


@contextmanager
def silenced(path: Path) -> Iterator[None]:
    """reading(), and lines that a library writes to stderr by itself go nowhere, nor does what
    other threads write meanwhile."""
    with open(os.devnull, "w") as null, reading(path):
        saved = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def render_template(template: str, values: dict) -> str:
    """jinja2's sandbox keeps a template from other code, but not from taking all time and
    memory."""
    from jinja2 import TemplateError, ext, nodes, sandbox

    def raise_exception(message: str):
        raise TemplateError(message)

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %} marks an answer, for training: what is between
        stays.

        What is set there is not set behind it, as in transformers."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True))

    env = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    # Jinja2's own filter escapes for HTML.
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = datetime.now().strftime
    return env.from_string(template).render(values)


class Tokenizer:
    """Text to tokens and back, the tokens that end a text, and the chat template (None where there
    is none)."""

    def __init__(self, checkpoint: Checkpoint):
        directory = checkpoint.directory
        self.vocab_size = checkpoint.config.vocab_size
        self.template_options = {}  # variables of the template, such as enable_thinking
        settings = read_json(directory / "tokenizer_config.json")
        with reading(directory / "tokenizer_config.json"):
            self.special_tokens = read_special(settings)
            self.template = read_template(directory, settings)
            # None: tokenizer.json's post-processor decides.
            self.add_bos = value_of(settings, "add_bos_token", bool, None)
            added = read_added(settings)

        self.bos = checkpoint.hf.get("bos_token_id")
        self.path = directory / "tokenizer.json"
        if is_file(self.path, MOST_TOKENIZER):
            with silenced(self.path):
                self.backend = TokenizerJson(self.path)
                if bos := self.special_tokens.get("bos_token"):
                    self.bos = self.backend.id(bos)
        else:
            self.path = directory / "tokenizer.model"
            if not is_file(self.path, MOST_TOKENIZER):
                raise ValueError(
                    f"{directory}: neither tokenizer.json nor tokenizer.model is there"
                )
            with silenced(self.path):
                self.backend = SentencePiece(self.path, added)
            self.add_bos = True

        ids = [self.backend.id(text) for text in CHAT_ENDS]
        with reading(directory / "tokenizer_config.json"):
            if end := self.special_tokens.get("eos_token"):
                ids.append(self.backend.id(end))
                self.check("eos_token_id", ids[-1:])
            if self.add_bos:
                self.check("bos_token_id", [self.bos])
        for file, found in ("generation_config", checkpoint.generation), ("config", checkpoint.hf):
            with reading(directory / f"{file}.json"):
                ends = read_ends(found)
                self.check("eos_token_id", ends)
            if ends:  # they take the place of config.json's
                break
        ids += ends
        self.stops = {*ids} - {None}
        parts = {self.backend.id(text): text for text in PARTS}
        self.parts = {} if None in parts else parts  # those tokens, of a model that has them all

        # What a user's text must not give. An end may be no special token, but a usual piece; one
        # character is what any text has.
        ends = {self.token(i): i for i in self.stops if i < self.vocab_size}
        self.reserved = self.backend.special | {
            text: i for text, i in ends.items() if len(text or "") > 1
        }
        self.marks = dict(zip(self.reserved, map(chr, MARKS)))

    def check(self, key: str, ids: list[int | None]):
        """ValueError for what is no token of the model's. An end that is none would end no text."""
        for i in ids:
            if i is not None and (type(i) is not int or not 0 <= i < self.vocab_size):
                raise ValueError(
                    f"{key}={i!r:.60}: want a token, from 0 to {self.vocab_size - 1}, as "
                    f"config.json has a vocab_size of {self.vocab_size}"
                )

    def encode(self, text: str, **how) -> list[int]:
        """The tokens of a text; special tokens that are written in it count."""
        with silenced(self.path):
            ids = self.backend.encode(text, **how)
            self.check("token", ids)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """A special token that is written in the text is one. The beginning of sequence is added by
        tokenizer.json's post-processor, unless add_bos_token overrides that; with tokenizer.model
        alone it is config.json's."""
        ids = self.encode(text, post_process=self.add_bos is None)
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def encode_typed(self, text: str) -> list[int]:
        """As encode_text(), but a special token that is written in the text is text."""
        return self.encode_text("") + self.encode_marked(self.mark(text))

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template.

        In transformers a user can end a turn: apply_chat_template() encodes the rendered text as a
        whole, where <|im_end|> is the token, whoever wrote it."""
        return self.encode_marked(self.render(self.mark(messages)))

    def mark(self, value):
        """Messages, or a part of them, with a mark in the place of each reserved text."""
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        if isinstance(value, str):
            return re.sub(any_of(self.reserved), lambda found: self.marks[found[0]], value)
        return value

    def render(self, messages: list[dict]) -> str:
        """The text that the chat template makes of messages, up to where the answer begins."""
        values = dict(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        with reading("the chat template"):
            return render_template(
                self.template, self.template_options | values | self.special_tokens
            )

    def encode_marked(self, text: str) -> list[int]:
        """A mark is encoded as the plain text that it stands for."""
        typed = {mark: reserved for reserved, mark in self.marks.items()}
        ids = []
        for part in re.split(f"({any_of(typed)})", text):
            if part not in typed:
                ids += self.encode(part)
                continue
            found = self.encode(typed[part], plain=True)
            if self.reserved[typed[part]] in found:  # an end that is no special token
                found = [i for c in typed[part] for i in self.encode(c, plain=True)]
            ids += found
        return ids

    def token(self, i: int) -> str | None:
        """The token's own text."""
        with reading(self.path):
            return self.backend.token(i)

    def decode(self, ids: list[int]) -> str:
        """The text, without special tokens."""
        with reading(self.path):
            return self.backend.decode(ids)


def any_of(texts: Iterable[str]) -> str:
    """A regular expression. Of texts that begin alike it finds the longest; of no texts,
    nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


def read_ends(settings: dict) -> list[int]:
    """eos_token_id of a JSON file: a token, a list of tokens, or nothing."""
    ids = settings.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return [i for i in ids if i is not None]


def read_special(settings: dict) -> dict[str, str]:
    """bos_token, eos_token and the like, which chat templates insert."""
    special = {}
    for key, text in settings.items():
        if isinstance(text, dict):
            text = value_of(text, "content", str, None) if key.endswith("_token") else None
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return special


def read_added(settings: dict) -> dict[str, int]:
    """The text of each token that is added to those of tokenizer.model."""
    added = {}
    for i, token in value_of(settings, "added_tokens_decoder", dict, {}).items():
        text = value_of(token, "content", str)
        if not text:
            raise ValueError("added_tokens_decoder: a token without content")
        added[text] = int(i)
    return added


def read_template(directory: Path, settings: dict) -> str | None:
    path = directory / "chat_template.jinja"
    if is_file(path, MOST_JSON):
        with reading(path.name):
            return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {value_of(of, "name", str): value_of(of, "template", str) for of in template}
        return named.get("default")
    return value_of(settings, "chat_template", str, None)


class TokenizerJson:
    """tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        self.tokenizer = tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        self.id = tokenizer.token_to_id
        self.token = tokenizer.id_to_token
        self.decode = tokenizer.decode  # leaves special tokens out
        # A decoder that panics does so here, not in the middle of a text (151,000 tokens: 0.1 s on
        # two cores).
        tokens = [*range(tokenizer.get_vocab_size())]
        tokenizer.decode_batch([tokens, *([i] for i in tokens)])

    def encode(self, text: str, post_process: bool = False, plain: bool = False) -> list[int]:
        """plain: special tokens that are written in the text are text."""
        self.tokenizer.encode_special_tokens = plain
        return self.tokenizer.encode(text, add_special_tokens=post_process).ids


class SentencePiece:
    """tokenizer.model, through sentencepiece, which leaves finding special tokens in a text to its
    callers."""

    def __init__(self, path: Path, added: dict[str, int]):
        from sentencepiece import SentencePieceProcessor

        self.processor = processor = SentencePieceProcessor(model_file=str(path))
        self.size = processor.vocab_size()
        control = filter(processor.is_control, range(self.size))
        self.special = {processor.id_to_piece(i): i for i in control}
        self.special |= added

    def id(self, text: str) -> int | None:
        found = self.special.get(text, self.processor.piece_to_id(text))
        return None if found == self.processor.unk_id() else found

    def token(self, i: int) -> str | None:
        return self.processor.id_to_piece(i) if i < self.size else None

    def encode(self, text: str, post_process: bool = False, plain: bool = False) -> list[int]:
        special = {} if plain else self.special
        ids = []
        for part in re.split(f"({any_of(special)})", text):
            if part in special:
                ids.append(special[part])
            else:
                ids += self.processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode([i for i in ids if i < self.size])

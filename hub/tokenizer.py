"""
Text to tokens and back, and the chat template, from a checkpoint in Hugging Face layout.

    tokenizer = Tokenizer(checkpoint)

A chat is encoded in three steps: mark, render, encode. Each special token that is typed in a
message gives way to a mark, a private character; the template renders and writes its own special
tokens; the text is parted at the marks, and a mark is encoded as the plain text that it stands for.
So the template alone begins and ends turns.

What is read, and what it means: as in transformers 5.24, but where a line says otherwise.

- Vocabulary: tokenizer.json, as it stands; without it tokenizer.model, as LlamaTokenizer reads it.
- bos_token and other keys that end in _token: tokenizer_config.json. Where that file has no
  added_tokens_decoder, special_tokens_map.json wins, null included: see _from_pretrained() of
  PreTrainedTokenizerBase. Such a token is special, and a variable of the chat template. With
  tokenizer.model alone <s>, </s> and <unk>, or what the model calls them, need no file.
- Tokens beside the vocabulary: tokenizer_config.json's added_tokens_decoder, whose flags win over
  tokenizer.json's; without it added_tokens.json, special where a file names them so. Then special
  tokens that are still missing, in the order of NAMES: see TokenizersBackend. Their numbers follow
  tokenizer.json's without a gap; with tokenizer.model alone they are those of the file. A name
  makes no special token of a single letter, nor of what config.json's vocab_size has no room for;
  transformers makes it one.
- split_special_tokens is not read: a special token in the text of a prompt is one. In transformers
  true splits it, in a chat those of the template, too.
- additional_special_tokens: special, whichever file lists them. transformers overlooks those that
  special_tokens_map.json lists and added_tokens.json numbers.
- Beginning of a text: what tokenizer.json's post-processor adds, unless add_bos_token says whether
  it is bos_token or nothing; transformers ignores that key here. Without a bos_token it is
  config.json's bos_token_id.
- Beginning, with tokenizer.model alone: bos_token, unless add_bos_token is false. config.json's
  bos_token_id is not read. Without add_bos_token one is added, as LlamaTokenizer's documentation
  says; its code adds none.
- legacy, with tokenizer.model alone: true: a space comes before each text behind a special token;
  false, null or missing: before the first text alone.
- add_prefix_space, with tokenizer.model alone: whether that space comes; missing: as the model says
  (LlamaTokenizer: yes). A text that begins with a space gets one more, as in sentencepiece and in
  training; LlamaTokenizer leaves it out.
- End of a text: eos_token, CHAT_ENDS, and eos_token_id of generation_config.json or, without one,
  of config.json, of which the top level wins over text_config. transformers ends at eos_token_id
  alone.
- Chat template: chat_template.jinja and additional_chat_templates/NAME.jinja; without these files
  tokenizer_config.json's chat_template, a text or a list of named ones. The one named tool_use
  where there are tools, else the default: see get_chat_template().
- Its variables: a call's tools, then template_options, special tokens, ours: see
  apply_chat_template(). A key of a message that is null is absent. A template that knows no text
  parts gets their texts with spaces between, as from transformers' server.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hub.checkpoint import MOST_JSON, Checkpoint, is_file, read_json, reading
from hub.families import value_of

SETTINGS = "tokenizer_config.json"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"  # read where SETTINGS has no list
NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
MOST_TOKENIZER = 2**28  # bytes of a tokenizer's file
MARKS = range(0x102000, 0x10FFFE)  # the last of Unicode's private characters
# Of tokenizer.model, which is protobuf: normalizer_spec.add_dummy_prefix. What comes once more at
# the end of a file counts.
PREFIX_SPACE = b"\x1a\x02\x18"
# They end a turn, whether or not generation_config.json lists them.
CHAT_ENDS = "<|eot_id|>", "<|im_end|>", "<|eot|>", "<turn|>"


class Parts(NamedTuple):
    """Special tokens that divide a model's answer, and what each begins: "text", "thoughts", a
    "header", a "line" (a header up to the end of its line, and thoughts behind it), or a "body",
    which is text where is_answer(header), and thoughts else."""

    begins: dict[str, str]
    is_answer: Callable[[str], bool] = bool


PARTS = {
    # <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>
    "gpt-oss": Parts(
        {
            "<|start|>": "header",
            "<|channel|>": "header",
            "<|message|>": "body",
            "<|end|>": "header",
        },
        lambda header: header.startswith("final"),
    ),
    # <|start|>assistant to=NAME<|message|>TEXT<|eom|>
    "Muse Glimmer": Parts(
        {"<|start|>": "header", "<|message|>": "body", "<|eom|>": "header"},
        lambda header: "to=" not in header or header.endswith("to=user"),
    ),
    # <|channel>NAME, a newline, TEXT<channel|>TEXT
    "Gemma 4": Parts({"<|channel>": "line", "<channel|>": "text"}),
}


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


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """As transformers has it; jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@cache  # once
def say_unread(name: str) -> None:
    print(f"template_options: the chat template reads no {name}", file=sys.stderr)


def render_template(template: str, values: dict, options: Iterable[str] = ()) -> str:
    """jinja2's sandbox keeps a template from other code, but not from taking all time and
    memory. options: names among the values of which a line says that the template reads none."""
    from jinja2 import TemplateError, ext, meta, nodes, sandbox

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
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = datetime.now().strftime
    asked = values["tools"] or options
    read = meta.find_undeclared_variables(env.parse(template)) if asked else ()
    if values["tools"] and "tools" not in read:
        raise ValueError("it reads no tools: leave them out, or take a model that knows some")
    for name in options:
        if name not in read:
            say_unread(name)
    return env.from_string(template).render(values)


def render_parts(template: str, values: dict, options: Iterable[str]) -> str:
    """render_template() of messages whose content may be a list of text parts."""
    contents = [message.get("content") for message in values["messages"]]
    lists = [repr(content) for content in contents if isinstance(content, list)]
    if not lists:
        return render_template(template, values, options)
    # A template that knows no parts fails over them, or writes the list as Python does.
    with suppress(Exception):
        text = render_template(template, values, options)
        if not any(written in text for written in lists):
            return text
    joined = [
        message | dict(content=text_of(message)) if "content" in message else message
        for message in values["messages"]
    ]
    return render_template(template, values | dict(messages=joined), options)


class Tokenizer:
    """Text to tokens and back, the tokens that end a text, and the chat template."""

    def __init__(self, checkpoint: Checkpoint):
        directory = checkpoint.directory
        self.vocab_size = checkpoint.config.vocab_size
        self.template_options = {}  # variables of the template, such as enable_thinking
        settings = read_json(directory / SETTINGS)
        with reading(directory / SETTINGS):
            self.templates = read_templates(directory, settings)
            # None: tokenizer.json's post-processor decides.
            self.add_bos = value_of(settings, "add_bos_token", bool, None)
            legacy = value_of(settings, "legacy", bool, False)
            prefix_space = value_of(settings, "add_prefix_space", bool, None)
        tokens = read_tokens(directory, settings)
        end = tokens.named.get("eos_token")

        self.path = directory / "tokenizer.json"
        if is_file(self.path, MOST_TOKENIZER):
            with silenced(self.path):
                self.backend = TokenizerJson(self.path, tokens, self.vocab_size)
            self.bos = checkpoint.hf.get("bos_token_id")
        else:
            self.path = directory / "tokenizer.model"
            if not is_file(self.path, MOST_TOKENIZER):
                raise ValueError(
                    f"{directory}: no tokenizer, neither tokenizer.json nor tokenizer.model is "
                    "there; fetch one from where the model is from, or copy that of its base model"
                )
            with silenced(self.path):
                self.backend = SentencePiece(
                    self.path, tokens, self.vocab_size, legacy, prefix_space
                )
            self.add_bos = self.add_bos is not False
            self.bos = None
        if bos := tokens.named.get("bos_token"):
            self.bos = self.backend.id(bos.content)
        self.special_tokens = {key: token.content for key, token in tokens.named.items() if token}

        ids = [self.backend.id(text) for text in CHAT_ENDS]
        with reading(directory / "tokenizer_config.json"):
            if end:
                ids.append(self.backend.id(end.content))
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
        self.parts, self.is_answer = {}, bool  # as Parts has them, by token
        for begins, is_answer in PARTS.values():
            of_tokens = {self.backend.id(text): kind for text, kind in begins.items()}
            if None not in of_tokens:  # the model has them all
                self.parts, self.is_answer = of_tokens, is_answer
                break

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
        alone it is bos_token, unless add_bos_token is false."""
        ids = self.encode(text, post_process=self.add_bos is None)
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def encode_typed(self, text: str) -> list[int]:
        """As encode_text(), but a special token that is written in the text is text."""
        return self.encode_text("") + self.encode_marked(self.mark(text))

    def encode_chat(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template.

        In transformers a user can end a turn: apply_chat_template() encodes the rendered text as a
        whole, where <|im_end|> is the token, whoever wrote it."""
        return self.encode_marked(self.render(messages, tools, self.mark))

    def mark(self, value):
        """Messages, or a part of them, with a mark in the place of each reserved text."""
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        if isinstance(value, str):
            return re.sub(any_of(self.reserved), lambda found: self.marks[found[0]], value)
        return value

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        mark: Callable = lambda typed: typed,
    ) -> str:
        """The text that the chat template makes of messages, up to where the answer begins.

        mark: what becomes of the variables that hold what users type."""
        values = dict(tools=None, documents=None, add_generation_prompt=True)
        values |= self.special_tokens | self.template_options
        if tools is not None:
            values["tools"] = tools
        # Templates test whether a key is there: null is not.
        values["messages"] = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        values |= {key: mark(values[key]) for key in ("messages", "tools", "documents")}
        template = self.find_template(values["tools"])
        with reading("the chat template"):
            return render_parts(template, values, self.template_options)

    def find_template(self, tools: list[dict] | None) -> str | None:
        """Of several templates, which have names, the one for tools where there are some."""
        for_tools = tools is not None and "tool_use" in self.templates
        return self.templates.get("tool_use" if for_tools else "default")

    @property
    def template(self) -> str | None:
        """The chat template; None: there is none."""
        return self.find_template(self.template_options.get("tools"))

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


def text_of(message: dict) -> str:
    """Its content; text parts as transformers' server joins them for a model that takes texts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content)


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


class Tokens(NamedTuple):
    """What the files beside the vocabulary say of its tokens; each is a tokenizers.AddedToken."""

    named: dict  # bos_token and the like, which templates insert; None: there is none
    others: list  # special tokens without a name
    added: dict  # by their numbers

    def special(self) -> list:
        """Those with a name first, in the order in which they get numbers."""
        named = [self.named.get(key) for key in {**dict.fromkeys(NAMES), **self.named}]
        return [*filter(None, named), *self.others]

    def all(self, there: Iterable, id_of: Callable, free: int) -> list:
        """With those that are there already, which come first.

        id_of: a text's number in the vocabulary, if any. free: numbers that the model has behind
        it."""
        found = {token.content: token for token in there}
        found |= {token.content: token for _, token in sorted(self.added.items())}
        free -= sum(id_of(text) is None for text in found)
        for token in filter(None, self.named.values()):
            if token.content in found:  # whatever else is said of it
                found[token.content].special = True
        for token in self.special():
            text = token.content
            is_new = id_of(text) is None
            # What the model has no number for is text, and so is a single letter.
            if text in found or len(text) < 2 or (is_new and free < 1):
                continue
            found[text] = token
            free -= is_new
        return [*found.values()]


def read_tokens(directory: Path, settings: dict) -> Tokens:
    with reading(directory / SETTINGS):
        tokens = read_special(settings)
        for i, said in value_of(settings, "added_tokens_decoder", dict, {}).items():
            tokens.added[int(i)] = token = added_token(said)
            if not token.content:
                raise ValueError("added_tokens_decoder: a token without content")
    if settings.get("added_tokens_decoder") is not None:
        return tokens
    found = read_json(directory / SPECIAL)
    with reading(directory / SPECIAL):
        more = read_special(found)
        tokens = Tokens(tokens.named | more.named, tokens.others + more.others, {})
    found = read_json(directory / ADDED)
    with reading(directory / ADDED):
        special = {token.content for token in tokens.special()}
        for text in found:
            token = added_token(text, special=text in special)
            tokens.added[value_of(found, text, int)] = token
    return tokens


def read_special(settings: dict) -> Tokens:
    """A special token is a text, or an object with a content; those without a name are a list."""
    named = {
        key: said
        for key, said in settings.items()
        if key.endswith("_token") and isinstance(said, str | dict | None)  # not add_bos_token
    }
    others = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(settings.get(key), dict):
            named |= settings[key]
        else:
            others += value_of(settings, key, list, [])
    return Tokens(
        {
            key: None if said is None else added_token(said, special=True)
            for key, said in named.items()
        },
        [added_token(said, special=True) for said in others],
        {},
    )


def added_token(said: str | dict, **flags):
    from tokenizers import AddedToken

    if isinstance(said, str):
        return AddedToken(said, **flags)
    text = value_of(said, "content", str)
    names = "single_word", "lstrip", "rstrip", "normalized", "special"
    said = {name: value_of(said, name, bool) for name in names if name in said}
    return AddedToken(text, **(said | flags))


def read_templates(directory: Path, settings: dict) -> dict[str, str]:
    """The chat templates by their names. Files win over those of tokenizer_config.json."""
    paths = dict(default=directory / "chat_template.jinja")
    paths |= {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    found = {}
    for name, path in paths.items():
        if is_file(path, MOST_JSON):
            with reading(path.relative_to(directory)):
                found[name] = path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if found or template is None:
        return found
    if isinstance(template, list):
        return {value_of(of, "name", str): value_of(of, "template", str) for of in template}
    return dict(default=value_of(settings, "chat_template", str))


class TokenizerJson:
    """tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path, tokens: Tokens, vocab_size: int):
        from tokenizers import Tokenizer

        self.tokenizer = tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.id = tokenizer.token_to_id
        there = tokenizer.get_added_tokens_decoder().values()
        free = vocab_size - tokenizer.get_vocab_size()
        tokenizer.add_tokens(tokens.all(there, self.id, free))
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
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

    def __init__(
        self,
        path: Path,
        tokens: Tokens,
        vocab_size: int,
        legacy: bool = False,
        prefix_space: bool | None = None,
    ):
        """legacy: a space comes before each text that follows a token found in the text, too, not
        only before the first. prefix_space: whether one comes at all; None: as the model says."""
        from sentencepiece import SentencePieceProcessor
        from tokenizers import AddedToken

        model = path.read_bytes()
        if prefix_space is not None:
            model += PREFIX_SPACE + bytes([prefix_space])
        try:
            self.processor = processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:  # in words of its source code
            raise ValueError(f"half downloaded, or damaged ({error}); fetch it again") from error
        self.inner = SentencePieceProcessor(model_proto=model + PREFIX_SPACE + bytes([False]))
        self.behind = self.processor if legacy else self.inner
        self.size = processor.vocab_size()
        own = dict(
            bos_token=processor.bos_id(), eos_token=processor.eos_id(), unk_token=processor.unk_id()
        )
        for key, i in own.items():
            if i >= 0:
                tokens.named.setdefault(key, AddedToken(processor.id_to_piece(i), special=True))

        control = filter(processor.is_control, range(self.size))
        control = [AddedToken(processor.id_to_piece(i), special=True) for i in control]
        numbers = {token.content: i for i, token in tokens.added.items()}

        def piece(text: str) -> int | None:
            i = processor.piece_to_id(text)
            return i if processor.id_to_piece(i) == text else None

        self.added = {}  # the number of each text that is a token, wherever it is written
        self.special = {}
        patterns = {}
        for token in tokens.all(control, piece, vocab_size - self.size):
            text = token.content
            i = piece(text)
            if i is None:
                i = numbers.get(text, max([self.size - 1, *self.added.values()]) + 1)
            self.added[text] = i
            patterns[text] = pattern_of(token)
            if token.special:
                self.special[text] = i
        self.texts = {i: text for text, i in self.added.items()}
        longest_first = sorted(patterns, key=len, reverse=True)
        self.pattern = re.compile("|".join(patterns[text] for text in longest_first) or "(?!)")

    def id(self, text: str) -> int | None:
        found = self.added.get(text, self.processor.piece_to_id(text))
        return None if found == self.processor.unk_id() else found

    def token(self, i: int) -> str | None:
        return self.texts.get(i) or (self.processor.id_to_piece(i) if i < self.size else None)

    def encode(self, text: str, post_process: bool = False, plain: bool = False) -> list[int]:
        if plain:
            return self.processor.encode(text)
        ids, at, processor = [], 0, self.processor
        for found in self.pattern.finditer(text):
            ids += processor.encode(text[at : found.start()])
            ids.append(self.added[found[found.lastindex]])
            at, processor = found.end(), self.behind
        return ids + processor.encode(text[at:])

    def decode(self, ids: list[int]) -> str:
        special, text = {*self.special.values()}, ""
        told = [i for i in ids if i not in special]
        for added, run in groupby(told, key=self.texts.get):
            if added is None:
                processor = self.inner if text else self.processor
                text += processor.decode([i for i in run if i < self.size])
            else:
                text += added * len([*run])
        return text


def pattern_of(token) -> str:
    """A regular expression that finds an AddedToken, its text as a group."""
    pattern = f"({re.escape(token.content)})"
    if token.single_word:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return r"\s*" * token.lstrip + pattern + r"\s*" * token.rstrip

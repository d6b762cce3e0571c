"""
Text to tokens and back, and the chat template, from a checkpoint in Hugging Face layout.

    tokenizer = Tokenizer(checkpoint)

vet.open_checkpoint() gives one that takes typed special tokens as text.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from hub.checkpoint import Checkpoint

# They end a turn, whether or not generation_config.json lists them.
CHAT_ENDS = "<|eot_id|>", "<|im_end|>"
# gpt-oss's answers have parts: <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>.
PARTS = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"


def render_plainly(template: str, values: dict) -> str:
    """The text of a chat template. jinja2's sandbox keeps it from other code, but not from taking
    all time and memory: vet.render() does."""
    import json
    from datetime import datetime
    from functools import partial
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

    render_template = staticmethod(render_plainly)

    def __init__(self, checkpoint: Checkpoint):
        settings = checkpoint.read_json("tokenizer_config.json")
        directory = checkpoint.directory
        self.special_tokens = read_special(settings)
        self.template = read_template(directory, settings)
        self.template_options = {}  # variables of the template, such as enable_thinking
        self.bos = checkpoint.hf.get("bos_token_id")
        path = directory / "tokenizer.json"
        if path.exists():
            self.backend = TokenizerJson(path)
            self.add_bos = settings.get("add_bos_token")  # None: the file's post-processor decides
            if bos := self.special_tokens.get("bos_token"):
                self.bos = self.backend.id(bos)
        else:
            self.backend = SentencePiece(directory / "tokenizer.model", settings)
            self.add_bos = True
        ends = *CHAT_ENDS, self.special_tokens.get("eos_token")
        ids = [self.backend.id(text) for text in ends if text]
        ids += read_ends(checkpoint.hf) + read_ends(checkpoint.generation)
        self.stops = {*ids} - {None}
        parts = {self.backend.id(text): text for text in PARTS}
        self.parts = {} if None in parts else parts  # those tokens, of a model that has them all

    def encode_text(self, text: str) -> list[int]:
        """A special token that is written in the text is one. The beginning of sequence is added by
        tokenizer.json's post-processor, unless add_bos_token overrides that; with tokenizer.model
        alone it is config.json's."""
        ids = self.backend.encode(text, post_process=self.add_bos is None)
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template.

        A special token that is typed in a message counts as a token here, as in transformers: a
        user who types <|im_end|> ends the turn. For vet.VettedTokenizer, which the commands and
        LLM use, it is text."""
        return self.backend.encode(self.render(messages))

    def render(self, messages: list[dict]) -> str:
        """The text that the chat template makes of messages, up to where the answer begins."""
        values = dict(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        return self.render_template(
            self.template, self.template_options | values | self.special_tokens
        )

    def token(self, i: int) -> str | None:
        """The token's own text."""
        return self.backend.token(i)

    def decode(self, ids: list[int]) -> str:
        """The text, without special tokens."""
        return self.backend.decode(ids)


def any_of(texts: Iterable[str]) -> str:
    """A regular expression. Of texts that begin alike it finds the longest; of no texts,
    nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


def read_ends(settings: dict) -> list[int | None]:
    """eos_token_id of a JSON file: a token, a list of tokens, or nothing."""
    ids = settings.get("eos_token_id")
    return ids if isinstance(ids, list) else [ids]


def read_special(settings: dict) -> dict[str, str]:
    """bos_token, eos_token and the like, which chat templates insert."""
    special = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return special


def read_template(directory: Path, settings: dict) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {of.get("name"): of.get("template") for of in template}
        return named.get("default")
    return template


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

    def encode(self, text: str, post_process: bool = False, plain: bool = False) -> list[int]:
        """plain: special tokens that are written in the text are text."""
        self.tokenizer.encode_special_tokens = plain
        return self.tokenizer.encode(text, add_special_tokens=post_process).ids


class SentencePiece:
    """tokenizer.model, through sentencepiece, which leaves finding special tokens in a text to its
    callers."""

    def __init__(self, path: Path, settings: dict):
        from sentencepiece import SentencePieceProcessor

        self.processor = processor = SentencePieceProcessor(model_file=str(path))
        self.size = processor.vocab_size()
        control = filter(processor.is_control, range(self.size))
        self.special = {processor.id_to_piece(i): i for i in control}
        added = settings.get("added_tokens_decoder") or {}
        self.special |= {token["content"]: int(i) for i, token in added.items()}

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

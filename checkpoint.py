"""
Reading a checkpoint in Hugging Face layout: config, weights, tokenizer, chat template. Nothing is unpickled, no code of
a checkpoint runs, no file outside of its directory is opened. What a user can get wrong is a UserError that says so.
"""
import json
import os
import re
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

import torch
from safetensors import safe_open
from torch import Tensor, nn

from model import Config, Transformer

HUB_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
             "chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
CHAT_ENDS = ("<|eot_id|>", "<|im_end|>")  # they end a turn, whether or not generation_config.json knows


class UserError(Exception):
    """What was wrong, the limit and the remedy, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


@contextmanager
def blame(path: Path):
    """What a file makes libraries raise, of whatever kind, is a UserError that names the file."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        raise UserError(f"{path}: {kind}{error}") from error


def find_checkpoint(name: str) -> Path:
    """A directory as it is; a Hub id (owner/name) from the Hub's cache, downloaded into it where needed."""
    if os.path.isdir(os.path.expanduser(name)):
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except ValueError:
        raise UserError(f"{name}: no such directory, and not a Hub id of the form owner/name") from None
    except Exception as error:  # the client and its transport raise many kinds; each means that there is no checkpoint
        answers = (getattr(e, "response", None) for e in (error, error.__cause__))
        status = next((answer.status_code for answer in answers if answer is not None), None)
        reason, remedy = f"is out of reach ({type(error).__name__})", "check the network, or download it beforehand"
        if status in (401, 403, 404):
            reason = f"answers {status}: a wrong name, or a gated or private repository"
            remedy = "accept its licence on its page, then run `hf auth login`"
        raise UserError(f"{name}: no such directory, and the Hub {reason}; {remedy}") from error


def read_json(path: Path, default: dict | None = None) -> dict:
    if not path.exists():
        if default is None:
            raise UserError(f"{path}: no such file; a checkpoint is a directory in Hugging Face layout")
        return default
    with blame(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"want a JSON object, found {type(content).__name__}")
        return content


def load_config(directory: Path) -> Config:
    with blame(directory / "config.json"):
        return Config.from_hf(read_json(directory / "config.json"))


def tensor_files(directory: Path) -> dict[str, Path]:
    """The safetensors file that holds each tensor; none lies outside of the directory."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not index.exists():
        if not whole.exists():
            raise UserError(f"{directory}: no model.safetensors, nor its index; other formats (*.bin) are not read")
        with blame(whole), safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    with blame(index):
        files = read_json(index)["weight_map"]
        for name, file in files.items():
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                raise ValueError(f"puts {name} into {file}, which is outside of the checkpoint's directory")
        return {name: directory / file for name, file in files.items()}


def read_tensor(files: dict[str, Path], name: str, shape: tuple = None, kinds: str = "BF16 F16 F32 F64",
                part: tuple[slice, ...] = ()) -> Tensor:
    """The tensor, or a part, in the host's memory. Its name leaves `files`: what stays has no place in the model."""
    if name not in files:
        raise UserError(f"the tensor {name} is missing from the safetensors files: config.json is of another model, or "
                        "the weights are quantized (quantize.load_model reads these)")
    with blame(path := files.pop(name)), safe_open(path, framework="pt") as file:
        found = file.get_slice(name)
        if found.get_dtype() not in kinds.split() or shape not in (None, tuple(found.get_shape())):
            raise ValueError(f"{name} is {found.get_dtype()} {found.get_shape()}, want {kinds} {list(shape or ())}")
        return found[part[:len(shape)]] if part else file.get_tensor(name)


def load_model(directory: Path, device: torch.device, dtype: torch.dtype, progress: bool = False,
               swap=lambda model, files: None, shard=None) -> Transformer:
    """The model, its weights read tensor by tensor straight to the device; swap puts in layers that have theirs.
    shard: the part to read, a tp.Shard."""
    from tqdm import tqdm
    config, files = load_config(directory), tensor_files(directory)
    with torch.device("meta"):
        model = shard.model() if shard else Transformer(config)
    swap(model, files)
    weights = {name: nn.Parameter(torch.empty(parameter.shape, device=device, dtype=dtype), requires_grad=False)
               for name, parameter in model.named_parameters() if parameter.is_meta}
    places, shapes = model.config.hf_weights(), {name: place[2] for name, place in config.hf_weights().items()}
    wanted = [(name, *place) for name, place in places.items() if place[0] in weights]
    for name, ours, row, (rows, *_) in tqdm(wanted, "loading", delay=1, leave=False, disable=not progress):
        tensor = read_tensor(files, name, shapes[name], part=shard.part(name) if shard else ())
        weights[ours][row:row + rows].copy_(tensor)
    for name, path in list(files.items()):
        if not (name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight" and model.config.tied
                or name.endswith(".bias") and not read_tensor(files, name).any()):
            raise UserError(f"{path}: no place for tensor {name}; config.json is of another model")
    if model.config.tied:
        weights["head.weight"] = weights["embed.weight"]
    model.load_state_dict(weights, strict=False, assign=True)
    return model.eval()


class Tokenizer:
    """Text to tokens and back, the tokens that end a text, and the chat template (None where there is none)."""

    def __init__(self, directory: Path):
        settings = read_json(directory / "tokenizer_config.json", {})
        config = read_json(directory / "config.json")
        generation = read_json(directory / "generation_config.json", {})
        self.vocab_size, self.add_bos = config.get("vocab_size"), settings.get("add_bos_token")
        with blame(directory / "tokenizer_config.json, generation_config.json or chat_template.jinja"):
            if (directory / "tokenizer.json").exists():
                self.backend = TokenizerJson(directory / "tokenizer.json")
            elif (directory / "tokenizer.model").exists():
                self.backend, self.add_bos = SentencePiece(directory / "tokenizer.model", settings), True
            else:
                raise UserError(f"{directory}: neither tokenizer.json nor tokenizer.model is there")
            special = {key: value["content"] if isinstance(value, dict) else value
                       for key, value in settings.items() if key.endswith("_token") and isinstance(value, (str, dict))}
            self.special_tokens = special  # bos_token, eos_token and the like, which templates write
            self.token, self.decode = self.backend.token, self.backend.decode  # special tokens show no text
            self.bos = config.get("bos_token_id")
            if isinstance(self.backend, TokenizerJson) and special.get("bos_token"):
                self.bos = self.backend.id(special["bos_token"])
            self.stops = {self.backend.id(token) for token in (special.get("eos_token"), *CHAT_ENDS) if token}
            for ids in (generation.get("eos_token_id"), config.get("eos_token_id")):
                self.stops |= set(ids if isinstance(ids, list) else [ids])
            self.stops -= {None}
            self.template = settings.get("chat_template")
            if isinstance(self.template, list):
                self.template = {entry["name"]: entry["template"] for entry in self.template}.get("default")
            if (directory / "chat_template.jinja").exists():
                self.template = (directory / "chat_template.jinja").read_text(encoding="utf-8")

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Who adds a beginning of sequence: tokenizer.json's post-processor, unless add_bos_token says otherwise; with
        tokenizer.model alone, we, config.json's bos_token_id; nobody, to text that a chat template rendered."""
        with blame(Path("the text")):
            text.encode()  # raises what says where a command line's text is not UTF-8
            ids = self.backend.encode(text, post_process=self.add_bos is None and not rendered)
        if self.add_bos and not rendered and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if wrong := [i for i in ids if type(i) is not int or not 0 <= i < self.vocab_size]:
            raise UserError(f"the tokenizer, or config.json's bos_token_id, gives token {wrong[0]!r}; config.json has "
                            f"a vocab_size of {self.vocab_size}")
        return ids

    def render(self, messages: list[dict]) -> str:
        """[{"role": ..., "content": ...}, ...] as the model was trained to read it, up to where its answer begins."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str):
            raise TemplateError(message)

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.add_extension("jinja2.ext.loopcontrols")
        env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes for HTML
        env.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
        with blame(Path("the chat template")):
            return env.from_string(self.template).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self.special_tokens)


class TokenizerJson:
    """tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer
        with blame(path):
            self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.id, self.token = self.tokenizer.token_to_id, self.tokenizer.id_to_token

    def encode(self, text: str, post_process: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=post_process).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


class SentencePiece:
    """tokenizer.model, through sentencepiece, which leaves it to its callers to find special tokens in a text."""

    def __init__(self, path: Path, settings: dict):
        from sentencepiece import SentencePieceProcessor
        with blame(path):
            self.processor = SentencePieceProcessor(model_file=str(path))
        self.size = self.processor.vocab_size()
        self.special = {self.processor.id_to_piece(i): i for i in range(self.size) if self.processor.is_control(i)}
        self.special |= {token["content"]: int(i) for i, token in settings.get("added_tokens_decoder", {}).items()}

    def id(self, token: str) -> int | None:
        found = self.special.get(token, self.processor.piece_to_id(token))
        return None if found == self.processor.unk_id() else found

    def token(self, i: int) -> str | None:
        return self.processor.id_to_piece(i) if i < self.size else None

    def encode(self, text: str, post_process: bool) -> list[int]:
        longest_first = sorted(map(re.escape, self.special), key=len, reverse=True)
        ids = []
        for part in re.split(f"({'|'.join(longest_first)})", text) if self.special else [text]:
            ids += [self.special[part]] if part in self.special else self.processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode([i for i in ids if i < self.size])

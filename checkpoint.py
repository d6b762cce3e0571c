"""
Reads a checkpoint in Hugging Face layout: config, weights, tokenizer, chat template. Hugging Face's keys and names are
here and in no other file.

Nothing is unpickled, no code of a checkpoint runs, and no path in it leads out of its directory. What a user can get
wrong is raised as a UserError of one line.

Shapes: as in model.py.
"""
import json
import math
import os
import re
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

import torch
from safetensors import safe_open
from torch import Tensor, nn

from model import Config, RopeScaling, Transformer

HUB_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
             "chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
CHAT_ENDS = ("<|eot_id|>", "<|im_end|>")  # They end a turn, whether or not generation_config.json lists them.


class UserError(Exception):
    """A user's mistake: what was wrong, the limit and the remedy, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


@contextmanager
def reading(source: Path | str):
    """Turns whatever the content of a file makes libraries raise into a UserError that names the file."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        raise UserError(f"{source}: {kind}{error}") from error


def find_checkpoint(name: str) -> Path:
    """A directory is taken as it is. A Hub id (owner/name) comes from the Hub's cache and is downloaded if needed."""
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
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"want a JSON object, found {type(content).__name__}")
        return content


def load_config(directory: Path) -> Config:
    with reading(directory / "config.json"):
        return config_from_hf(read_json(directory / "config.json"))


def config_from_hf(hf: dict) -> Config:
    """hf: the content of config.json. ValueError names the key and the value that are not supported."""
    kind = hf.get("model_type")
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(f"model_type {kind!r} is not supported: want llama, mistral, qwen2 or qwen3")
    rope = dict(rope_theta=hf.get("rope_theta", 10000.0))
    rope |= hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type {rope_type!r} is not supported: want 'default' or 'llama3'")
    supported = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False,
                     partial_rotary_factor=1.0)
    for key, want in supported.items():
        if (found := {**rope, **hf}.get(key, want)) != want:
            raise ValueError(f"{key}={found!r} is not supported: want {want!r}")

    def number(key: str, default: int | None = None, of: dict = hf, kind: type = int, most: float = 1e12):
        value = of.get(key) or default
        if type(value) not in (int, kind) or not 0 < value <= most:
            raise ValueError(f"{key}={of.get(key)!r}: want {kind.__name__} above 0, up to {most:.0e}")
        return value

    dim, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if dim % heads and not hf.get("head_dim"):
        raise ValueError(f"hidden_size={dim} is no multiple of num_attention_heads={heads}; head_dim is missing")
    scaling = None
    if rope_type == "llama3":
        keys = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        scaling = RopeScaling(*(number(key, of=rope, kind=float) for key in keys))
    return Config(
        dim=dim, n_layer=number("num_hidden_layers", most=1e4), n_head=heads, n_kv_head=kv_heads,
        head_dim=number("head_dim", default=dim // heads),
        ffn_dim=number("intermediate_size"), vocab_size=number("vocab_size"),
        context=number("max_position_embeddings"), norm_eps=number("rms_norm_eps", kind=float),
        rope_theta=number("rope_theta", of=rope, kind=float), rope_scaling=scaling,
        qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
        window=number("sliding_window") if kind == "mistral" and hf.get("sliding_window") else None,
        tied=hf.get("tie_word_embeddings", False))


def hf_weights(config: Config) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Hugging Face's name of each tensor -> our parameter, the row of it where the tensor starts, the tensor's shape.

    q, k and v are rows of one matrix here, gate and up rows of another."""
    D, E, F, V = config.dim, config.head_dim, config.ffn_dim, config.vocab_size
    q, kv = config.n_head * E, config.n_kv_head * E
    layer = {
        "self_attn.q_proj.weight": ("attn.wqkv.weight", 0, (q, D)),
        "self_attn.k_proj.weight": ("attn.wqkv.weight", q, (kv, D)),
        "self_attn.v_proj.weight": ("attn.wqkv.weight", q + kv, (kv, D)),
        "self_attn.o_proj.weight": ("attn.wo.weight", 0, (D, q)),
        "mlp.gate_proj.weight": ("ffn.w_gate_up.weight", 0, (F, D)),
        "mlp.up_proj.weight": ("ffn.w_gate_up.weight", F, (F, D)),
        "mlp.down_proj.weight": ("ffn.w_down.weight", 0, (D, F)),
        "input_layernorm.weight": ("attn_norm.weight", 0, (D,)),
        "post_attention_layernorm.weight": ("ffn_norm.weight", 0, (D,)),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": ("attn.wqkv.bias", 0, (q,)),
                  "self_attn.k_proj.bias": ("attn.wqkv.bias", q, (kv,)),
                  "self_attn.v_proj.bias": ("attn.wqkv.bias", q + kv, (kv,))}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": ("attn.q_norm.weight", 0, (E,)),
                  "self_attn.k_norm.weight": ("attn.k_norm.weight", 0, (E,))}
    names = {"model.embed_tokens.weight": ("embed.weight", 0, (V, D)), "model.norm.weight": ("norm.weight", 0, (D,))}
    if not config.tied:
        names["lm_head.weight"] = ("head.weight", 0, (V, D))
    for i in range(config.n_layer):
        for theirs, (ours, row, shape) in layer.items():
            names[f"model.layers.{i}.{theirs}"] = (f"layers.{i}.{ours}", row, shape)
    return names


def count_parameters(config: Config) -> int:
    return sum(math.prod(shape) for _, _, shape in hf_weights(config).values())


def tensor_files(directory: Path) -> dict[str, Path]:
    """The safetensors file that holds each tensor. UserError where the index leads out of the directory."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not index.exists():
        if not whole.exists():
            raise UserError(f"{directory}: no model.safetensors, nor its index; other formats (*.bin) are not read")
        with reading(whole), safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    with reading(index):
        files = read_json(index)["weight_map"]
        for name, file in files.items():
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                raise ValueError(f"puts {name} into {file}, which is outside of the checkpoint's directory")
        return {name: directory / file for name, file in files.items()}


def read_tensor(files: dict[str, Path], name: str, shape: tuple | None = None, dtypes: str = "BF16 F16 F32 F64",
                part: tuple[slice, ...] = ()) -> Tensor:
    """The tensor, or a part of it, in the host's memory.

    Its name is removed from `files`: a name that is still there at the end has no place in the model."""
    if name not in files:
        raise UserError(f"the tensor {name} is missing from the safetensors files: config.json is of another model, or "
                        "the weights are quantized (quantize.load_checkpoint reads these)")
    with reading(path := files.pop(name)), safe_open(path, framework="pt") as file:
        found = file.get_slice(name)
        if found.get_dtype() not in dtypes.split() or shape not in (None, tuple(found.get_shape())):
            raise ValueError(f"{name} is {found.get_dtype()} {found.get_shape()}, want {dtypes} {list(shape or ())}")
        return found[part[:len(shape)]] if part else file.get_tensor(name)


def load_model(directory: Path, device: torch.device, dtype: torch.dtype, progress: bool = False,
               replace_layers=None, shard=None) -> Transformer:
    """The model, ready for setup(). Its weights go tensor by tensor from the files to the device.

    replace_layers(model, files): puts in layers that read their weights from files by themselves, such as quantized
    ones. shard: this rank's part of the model, a tp.Shard."""
    from tqdm import tqdm
    config, files = load_config(directory), tensor_files(directory)
    with torch.device("meta"):
        model = shard.model() if shard else Transformer(config)
    if replace_layers:
        replace_layers(model, files)
    weights = {name: nn.Parameter(torch.empty(parameter.shape, device=device, dtype=dtype), requires_grad=False)
               for name, parameter in model.named_parameters() if parameter.is_meta}
    whole_shapes = {name: shape for name, (_, _, shape) in hf_weights(config).items()}
    wanted = [(name, *place) for name, place in hf_weights(model.config).items() if place[0] in weights]
    for name, ours, row, (rows, *_) in tqdm(wanted, "loading", delay=1, leave=False, disable=not progress):
        tensor = read_tensor(files, name, whole_shapes[name], part=shard.part(name) if shard else ())
        weights[ours][row:row + rows].copy_(tensor)
    refuse_surplus(files, model.config.tied)
    if model.config.tied:
        weights["head.weight"] = weights["embed.weight"]
    model.load_state_dict(weights, strict=False, assign=True)
    return model.eval()


def refuse_surplus(files: dict[str, Path], tied: bool) -> None:
    """UserError for a tensor that the model has no place for, unless it would change nothing."""
    for name, path in list(files.items()):
        unused = name.endswith("rotary_emb.inv_freq") or tied and name == "lm_head.weight"
        if not unused and not (name.endswith(".bias") and not read_tensor(files, name).any()):
            raise UserError(f"{path}: no place for tensor {name}; config.json is of another model")


class Tokenizer:
    """Text to tokens and back, the tokens that end a text, and the chat template (None where there is none)."""

    def __init__(self, directory: Path):
        settings = read_json(directory / "tokenizer_config.json", {})
        config = read_json(directory / "config.json")
        generation = read_json(directory / "generation_config.json", {})
        self.vocab_size, self.add_bos = config.get("vocab_size"), settings.get("add_bos_token")
        with reading(directory / "tokenizer_config.json, generation_config.json or chat_template.jinja"):
            if (directory / "tokenizer.json").exists():
                self.backend = TokenizerJson(directory / "tokenizer.json")
            elif (directory / "tokenizer.model").exists():
                self.backend, self.add_bos = SentencePiece(directory / "tokenizer.model", settings), True
            else:
                raise UserError(f"{directory}: neither tokenizer.json nor tokenizer.model is there")
            special = {key: value["content"] if isinstance(value, dict) else value
                       for key, value in settings.items() if key.endswith("_token") and isinstance(value, (str, dict))}
            self.special_tokens = special  # bos_token, eos_token and the like, which chat templates insert
            self.token, self.decode = self.backend.token, self.backend.decode  # decode() leaves special tokens out
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
        """Text -> tokens. rendered: a chat template made the text, and no beginning of sequence is added.

        Otherwise tokenizer.json's post-processor adds it, unless add_bos_token overrides that. With tokenizer.model
        alone this function adds config.json's bos_token_id."""
        with reading("the text"):
            text.encode()  # raises UnicodeEncodeError, which says where the text of a command line is not UTF-8
            ids = self.backend.encode(text, post_process=self.add_bos is None and not rendered)
        if self.add_bos and not rendered and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if wrong := [i for i in ids if type(i) is not int or not 0 <= i < self.vocab_size]:
            raise UserError(f"the tokenizer, or config.json's bos_token_id, gives token {wrong[0]!r}; config.json has "
                            f"a vocab_size of {self.vocab_size}")
        return ids

    def encode_messages(self, messages: list[dict]) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template."""
        return self.encode(self.render(messages), rendered=True)

    def render(self, messages: list[dict]) -> str:
        """The text that the chat template makes of messages, up to where the answer begins.

        The template runs in jinja2's sandbox. UserError for whatever goes wrong in it."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str):
            raise TemplateError(message)

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.add_extension("jinja2.ext.loopcontrols")
        env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own filter escapes for HTML
        env.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
        with reading("the chat template"):
            return env.from_string(self.template).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self.special_tokens)


class TokenizerJson:
    """tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer
        with reading(path):
            self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.id, self.token = self.tokenizer.token_to_id, self.tokenizer.id_to_token

    def encode(self, text: str, post_process: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=post_process).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


class SentencePiece:
    """tokenizer.model, through sentencepiece, which leaves finding special tokens in a text to its callers."""

    def __init__(self, path: Path, settings: dict):
        from sentencepiece import SentencePieceProcessor
        with reading(path):
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

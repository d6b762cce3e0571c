"""
Reads a checkpoint in Hugging Face layout: config, weights, tokenizer, chat template. Hugging Face's keys and names are
here and in no other file.

    checkpoint = Checkpoint(Path("checkpoints/tiny"))
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer(checkpoint)

Files are read plainly here: nothing is unpickled and no code of a checkpoint runs, but who reads a directory of unknown
origin calls guard.open_checkpoint(), which vets it first and gives a tokenizer that takes typed special tokens as text.
What a user can get wrong is a UserError of one line.

Shapes: as in model.py.
"""
import json
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from model import Config, LayerConfig, Rope, RopeScaling, Transformer

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = "BF16 F16 F32 F64"  # safetensors' names of types
CHAT_ENDS = "<|eot_id|>", "<|im_end|>"  # They end a turn, whether or not generation_config.json lists them.


class UserError(ValueError):
    """A user's mistake: what was wrong, the limit and the remedy, in one line of at most 1,000 characters.

    The message has keywords in backticks, "`top_k`=-1: want 0 or more". str() writes them as Python does, top_k=-1, and
    command_line() as the command line does, --top-k -1."""

    def __init__(self, message: str):
        self.message = message
        super().__init__(one_line(re.sub(r"`(\w+)`", r"\1", message)))

    def command_line(self) -> str:
        message = self.message.replace("`=", "` ")
        return one_line(re.sub(r"`(\w+)`", lambda found: "--" + found[1].replace("_", "-"), message))


def one_line(text: str) -> str:
    """What a file holds may be part of the text, so control characters, which a terminal would obey, are escaped."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) <= 1000 else f"{line[:700]} ... {line[-295:]}"


class Checkpoint:
    """A directory, each JSON file of which is read once. weights: hf_weights() of its config."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.hf = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.generation = self.read_json("generation_config.json")
        self.index = self.read_json(INDEX)
        self.config = config_from_hf(self.hf)
        self.weights = hf_weights(self.config)

    def read_json(self, name: str) -> dict:
        """{} where the file is not there."""
        path = self.directory / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def files(self) -> dict[str, Path]:
        """The safetensors file that holds each tensor."""
        open_shard.cache_clear()  # a file of this name may be another one by now
        if self.index:
            places = self.index.get("weight_map") or {}
            return {name: self.directory / file for name, file in places.items()}
        whole = self.directory / WHOLE
        if not whole.exists():
            raise UserError(f"{self.directory}: no {WHOLE}, nor its index; *.bin and *.gguf are not read")
        return dict.fromkeys(open_shard(whole).keys(), whole)


# config.json


# In the order of RopeScaling's fields:
LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
SUPPORTED = {  # key -> the values that are read here, first what a missing key stands for
    "model_type": ("llama", "mistral", "qwen2", "qwen3"),
    "rope_type": ("default", "llama3"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
}


def rope_settings(hf: dict) -> dict:
    """What newer files have in rope_parameters, older ones in rope_scaling and rope_theta."""
    rope = dict(rope_theta=hf.get("rope_theta", 10000.0))
    rope |= hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return rope | dict(rope_type=rope.get("rope_type") or rope.get("type") or "default")


def check_supported(hf: dict) -> None:
    """ValueError names the key and the value that are not supported."""
    rope = rope_settings(hf)
    settings = rope | hf | dict(rope_type=rope["rope_type"], model_type=hf.get("model_type"))
    for key, values in SUPPORTED.items():
        found = settings.get(key, values[0])
        if found not in values:
            raise ValueError(f"{key}={found!r} is not supported: want {' or '.join(map(repr, values))}")


def config_from_hf(hf: dict) -> Config:
    """hf: the content of config.json. ValueError for a value that is not supported."""
    check_supported(hf)
    kind, rope = hf["model_type"], rope_settings(hf)
    scaling = window = None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(*[rope[key] for key in LLAMA3])
    if kind == "mistral":
        window = hf.get("sliding_window") or None
    layer = LayerConfig(window, Rope(rope["rope_theta"], scaling))
    n_head = hf["num_attention_heads"]
    return Config(
        dim=hf["hidden_size"],
        layers=(layer,) * hf["num_hidden_layers"],
        n_head=n_head,
        n_kv_head=hf.get("num_key_value_heads") or n_head,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // n_head,
        ffn_dim=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        context=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tied=hf.get("tie_word_embeddings") or False)


# Weights


class Weight(NamedTuple):
    """Where a tensor of Hugging Face's goes: into our parameter, from a row on.

    rows, columns: what ranks share these by, "q" or "kv" heads, "ffn" units or "vocab"; None: each rank has all of
    them. quantized: whether quantization replaces this matrix."""
    ours: str
    row: int
    shape: tuple[int, ...]
    rows: str | None = None
    columns: str | None = None
    quantized: bool = False


def hf_weights(config: Config) -> dict[str, Weight]:
    """Hugging Face's name of each tensor -> its place. q, k and v are rows of one matrix, gate and up of another."""
    D, E, F, V = config.dim, config.head_dim, config.ffn_dim, config.vocab_size
    q, kv = config.n_head * E, config.n_kv_head * E
    sizes = {"q": q, "kv": kv, "ffn": F, None: D}

    def matrix(ours: str, row: int, rows: str | None, columns: str | None = None):
        return Weight(ours, row, (sizes[rows], sizes[columns]), rows, columns, quantized=True)

    of_layer = {
        "self_attn.q_proj.weight": matrix("attn.wqkv.weight", 0, "q"),
        "self_attn.k_proj.weight": matrix("attn.wqkv.weight", q, "kv"),
        "self_attn.v_proj.weight": matrix("attn.wqkv.weight", q + kv, "kv"),
        "self_attn.o_proj.weight": matrix("attn.wo.weight", 0, None, "q"),
        "mlp.gate_proj.weight": matrix("ffn.w_gate_up.weight", 0, "ffn"),
        "mlp.up_proj.weight": matrix("ffn.w_gate_up.weight", F, "ffn"),
        "mlp.down_proj.weight": matrix("ffn.w_down.weight", 0, None, "ffn"),
        "input_layernorm.weight": Weight("attn_norm.weight", 0, (D,)),
        "post_attention_layernorm.weight": Weight("ffn_norm.weight", 0, (D,)),
    }
    if config.qkv_bias:
        of_layer |= {
            "self_attn.q_proj.bias": Weight("attn.wqkv.bias", 0, (q,), "q"),
            "self_attn.k_proj.bias": Weight("attn.wqkv.bias", q, (kv,), "kv"),
            "self_attn.v_proj.bias": Weight("attn.wqkv.bias", q + kv, (kv,), "kv"),
        }
    if config.qk_norm:
        of_layer |= {
            "self_attn.q_norm.weight": Weight("attn.q_norm.weight", 0, (E,)),
            "self_attn.k_norm.weight": Weight("attn.k_norm.weight", 0, (E,)),
        }
    table = {
        "model.embed_tokens.weight": Weight("embed.weight", 0, (V, D)),
        "model.norm.weight": Weight("norm.weight", 0, (D,)),
    }
    if not config.tied:
        table["lm_head.weight"] = Weight("head.weight", 0, (V, D), "vocab")
    for i in range(config.n_layer):
        for name, weight in of_layer.items():
            table[f"model.layers.{i}.{name}"] = weight._replace(ours=f"layers.{i}.{weight.ours}")
    return table


def count_parameters(config: Config) -> int:
    return sum(math.prod(weight.shape) for weight in hf_weights(config).values())


@lru_cache(maxsize=1)
def open_shard(path: Path):
    """A safetensors file, which stays open for its next tensor: with its header read anew for each of 740 tensors
    Llama-2-7B in 4 bits took 1.36 s to load in place of 0.95 (H200, the file in the page cache)."""
    return safe_open(path, framework="pt")


def read_tensor(files: dict[str, Path], name: str, shapes: list[tuple], dtypes: str = FLOATS,
                part: tuple[slice, ...] = ()) -> Tensor:
    """The tensor, or a part of it, in the host's memory. UserError unless it has one of the shapes.

    Its name is removed from `files`: a name that is still there at the end has no place in the model."""
    if name not in files:
        raise UserError(f"the tensor {name} is missing from the safetensors files: config.json is of another model, or "
                        "the weights are quantized (generate.load reads these)")
    path = files.pop(name)
    found = open_shard(path).get_slice(name)
    dtype, shape = found.get_dtype(), tuple(found.get_shape())
    if dtype not in dtypes.split() or shape not in shapes:
        raise UserError(f"{path}: {name} is {dtype} {list(shape)}, want {dtypes} {list(shapes[0])}")
    return found[part[:len(shape)]] if part else open_shard(path).get_tensor(name)


def load_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: bool = False,
               replace_layers: Callable | None = None, shard=None) -> Transformer:
    """The model, ready for setup(). Its weights go tensor by tensor from the files to the device.

    replace_layers(model, files): puts in layers that read their weights from files by themselves, such as quantized
    ones. shard: this rank's part of the model, a tp.Shard."""
    from tqdm import tqdm
    files = checkpoint.files()
    with torch.device("meta"):
        model = shard.model() if shard else Transformer(checkpoint.config)
    if replace_layers:
        replace_layers(model, files)
    parameters = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            parameters[name] = torch.empty_like(parameter, device=device, dtype=dtype)
    places = hf_weights(model.config)
    names = [name for name, place in places.items() if place.ours in parameters]
    names.sort(key=lambda name: str(files.get(name)))  # file by file
    for name in tqdm(names, "loading", delay=1, leave=False, disable=None if progress else True):
        whole, place = checkpoint.weights[name], places[name]
        tensor = read_tensor(files, name, [whole.shape], part=shard.part(whole) if shard else ())
        parameters[place.ours][place.row:place.row + place.shape[0]].copy_(tensor)
    refuse_surplus(files, checkpoint)
    open_shard.cache_clear()
    model.load_state_dict(parameters, strict=False, assign=True)
    if model.config.tied:
        model.head.weight = model.embed.weight
    return model.eval()


def refuse_surplus(files: dict[str, Path], checkpoint: Checkpoint) -> None:
    """UserError for a tensor that the model has no place for, unless it would change nothing, as a bias of zeros."""
    sizes = [weight.shape[:1] for weight in checkpoint.weights.values()]
    for name, path in list(files.items()):
        unused = name.endswith("rotary_emb.inv_freq") or checkpoint.config.tied and name == "lm_head.weight"
        if not unused and (not name.endswith(".bias") or read_tensor(files, name, sizes).any()):
            raise UserError(f"{path}: no place for tensor {name}; config.json is of another model")


# Tokenizer


def render_plainly(template: str, values: dict) -> str:
    """The text of a chat template. jinja2's sandbox keeps it from other code, but not from taking all time and memory:
    guard.render() does."""
    import json
    from functools import partial
    from time import strftime
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own filter escapes for HTML
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime)
    return env.from_string(template).render(values)


class Tokenizer:
    """Text to tokens and back, the tokens that end a text, and the chat template (None where there is none)."""
    render_template = staticmethod(render_plainly)

    def __init__(self, checkpoint: Checkpoint):
        settings = checkpoint.read_json("tokenizer_config.json")
        self.special_tokens = read_special(settings)
        self.template = read_template(checkpoint.directory, settings)
        self.bos = checkpoint.hf.get("bos_token_id")
        path = checkpoint.directory / "tokenizer.json"
        if path.exists():
            self.backend = TokenizerJson(path)
            self.add_bos = settings.get("add_bos_token")  # None: the file's post-processor decides
            if self.special_tokens.get("bos_token"):
                self.bos = self.backend.id(self.special_tokens["bos_token"])
        else:
            self.backend = SentencePiece(checkpoint.directory / "tokenizer.model", settings)
            self.add_bos = True
        ends = *CHAT_ENDS, self.special_tokens.get("eos_token")
        self.stops = {self.backend.id(text) for text in ends if text}
        self.stops.update(read_ends(checkpoint.hf), read_ends(checkpoint.generation))
        self.stops.discard(None)

    def encode_text(self, text: str) -> list[int]:
        """A special token that is written in the text is one. The beginning of sequence is added by tokenizer.json's
        post-processor, unless add_bos_token overrides that; with tokenizer.model alone it is config.json's."""
        ids = self.backend.encode(text, post_process=self.add_bos is None)
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template.

        A special token that is typed in a message counts as a token here, as in transformers: a user who types
        <|im_end|> ends the turn. For guard.VettedTokenizer, which the commands and LLM use, it is text."""
        return self.backend.encode(self.render(messages))

    def render(self, messages: list[dict]) -> str:
        """The text that the chat template makes of messages, up to where the answer begins."""
        values = dict(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        return self.render_template(self.template, values | self.special_tokens)

    def token(self, i: int) -> str | None:
        """The token's own text."""
        return self.backend.token(i)

    def decode(self, ids: list[int]) -> str:
        """The text, without special tokens."""
        return self.backend.decode(ids)


def any_of(texts: Iterable[str]) -> str:
    """A regular expression. Of texts that begin alike it finds the longest; of no texts, nothing."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"


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
        template = {of.get("name"): of.get("template") for of in template}.get("default")
    return template


class TokenizerJson:
    """tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        self.id, self.token = self.tokenizer.token_to_id, self.tokenizer.id_to_token

    def encode(self, text: str, post_process: bool = False, plain: bool = False) -> list[int]:
        """plain: special tokens that are written in the text are text."""
        self.tokenizer.encode_special_tokens = plain
        return self.tokenizer.encode(text, add_special_tokens=post_process).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


class SentencePiece:
    """tokenizer.model, through sentencepiece, which leaves finding special tokens in a text to its callers."""

    def __init__(self, path: Path, settings: dict):
        from sentencepiece import SentencePieceProcessor
        self.processor = SentencePieceProcessor(model_file=str(path))
        self.size = self.processor.vocab_size()
        self.special = {self.processor.id_to_piece(i): i for i in range(self.size) if self.processor.is_control(i)}
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
            ids += [special[part]] if part in special else self.processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode([i for i in ids if i < self.size])

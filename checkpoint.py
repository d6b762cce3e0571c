"""
Reads a checkpoint in Hugging Face layout: config, weights, tokenizer, chat template. Hugging Face's keys and names are
here and in no other file.

Nothing is unpickled, no code of a checkpoint runs, and no path in it leads out of its directory. What a user can get
wrong is raised as a UserError of one line.

Shapes: as in model.py.
"""
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, PIPE, Popen

import torch
from safetensors import safe_open
from torch import Tensor, nn

from model import Config, LayerConfig, Rope, RopeScaling, Transformer

HUB_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
             "chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
LAYOUT = "a directory in Hugging Face layout: config.json, *.safetensors and the tokenizer's files"
OTHER_FILES = {".gguf": "a GGUF file, which is not read here"}
OTHER_FILES |= dict.fromkeys((".bin", ".pt", ".pth"), "a pickle, which is never read, as it could run code")
MOST_JSON, MOST_TOKENIZER = 2 ** 24, 2 ** 28  # bytes of a JSON file or template, and of a tokenizer
MOST_TEXT = 2 ** 26  # bytes of a text: to encode it takes 42 times as many with sentencepiece, 90 with tokenizers
MOST_WEIGHTS = 10 ** 13  # of a model: its bytes are far from the 2 ** 63 at which PyTorch's sums overflow
CHAT_ENDS = ("<|eot_id|>", "<|im_end|>")  # They end a turn, whether or not generation_config.json lists them.


class UserError(ValueError):
    """A user's mistake: what was wrong, the limit and the remedy, in one line of at most 1,000 characters.

    What a file holds may be part of it, so control characters, which a terminal would obey, are escaped."""

    def __init__(self, message: str):
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
        super().__init__(line if len(line) <= 1000 else f"{line[:700]} ... {line[-295:]}")


@contextmanager
def reading(source: Path | str):
    """Turns whatever the content of a file makes libraries raise into a UserError that names the file."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # of the tokenizers library; no Exception
        if not isinstance(error, Exception) and not panic:
            raise
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        reason = getattr(error, "strerror", None) or error  # an OSError's own words name the file once more
        raise UserError(f"{source}: {kind}{reason}") from error


def find_checkpoint(name: str) -> Path:
    """A directory is taken as it is. A Hub id (owner/name) comes from the Hub's cache and is downloaded if needed."""
    path = Path(os.path.expanduser(name))
    parent = path.absolute().parent
    if name and os.path.isdir(path):
        return path.resolve()  # in full, for the messages to come: the name may be "."
    if name and os.path.exists(path):
        what, beside = OTHER_FILES.get(path.suffix.lower(), "a file"), (parent / "config.json").exists()
        raise UserError(f"{name} is {what}; want " + (f"its directory, {parent}" if beside else LAYOUT))
    missing = f"{name}: no such directory" + (f" in {parent}" if os.path.isdir(parent) else "")
    if near := near_checkpoints(path):
        missing += f" (near it: {', '.join(near)})"
    no_id = f"{missing}, and not a Hub id of the form owner/name, as HuggingFaceTB/SmolLM2-135M is"
    if "/" not in name:
        raise UserError(no_id)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except ValueError:
        raise UserError(no_id) from None
    except Exception as error:  # the client and its transport raise many kinds; each means that there is no checkpoint
        answers = (getattr(e, "response", None) for e in (error, error.__cause__))
        status = next((answer.status_code for answer in answers if answer is not None), None)
        answer = (f"is out of reach ({type(error.__cause__ or error).__name__}); check the network and HF_HUB_OFFLINE, "
                  "or fetch it on another machine and copy its directory here")
        if status in (401, 403, 404):
            answer = f"answers {status}; correct the name, or accept its licence on its page and run `hf auth login`"
        raise UserError(f"{missing}; as a Hub id: the Hub {answer}") from error


def near_checkpoints(path: Path) -> list[str]:
    """The checkpoints beside `path` and in ./checkpoints whose names are much like its name, the nearest first."""
    found = {file.parent for parent in (path.parent, Path("checkpoints")) if os.path.isdir(parent)
             for file in parent.glob("*/config.json")}
    near = get_close_matches(path.name.lower(), {place.name.lower() for place in found}, cutoff=0.5)
    return [str(place) for name in near for place in sorted(found) if place.name.lower() == name]


def is_inside(path: Path) -> bool:
    """Whether a file, its links followed, lies in its directory or, as in the Hub's cache, among the blobs beside."""
    home = path.parent.resolve()
    places = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    return any(path.resolve().is_relative_to(place) for place in places)


def is_file(path: Path, most: int | None = None, inside: bool = True) -> bool:
    """Whether it is there. UserError for what would block or never end, such as a pipe or a device.

    most: bytes, of what is read whole. inside: it is a checkpoint's JSON, template or tokenizer, which no link may take
    from elsewhere. Weights, without `most`, may be links, as they may lie on another disk."""
    if not os.path.lexists(path):
        return False
    with reading(path):
        if not path.exists():
            raise ValueError(f"a link to {os.readlink(path)}, which is not there; copy or download the file again")
        if not path.is_file():
            raise ValueError("want a regular file, not a directory, a pipe or a device")
        if most and inside and not is_inside(path):
            raise ValueError(f"a link to {path.resolve()}, out of its directory; copy the file itself there")
        if most and (size := path.stat().st_size) > most:
            raise ValueError(f"{size} bytes, want {most} at most")
        return True


def read_text(path: Path, encoding: str = "utf-8") -> str:
    is_file(path, MOST_TEXT, inside=False)
    with reading(path):
        return path.read_text(encoding)


def read_json(path: Path, default: dict | None = None) -> dict:
    if not is_file(path, MOST_JSON):
        if default is None:
            raise UserError(f"{path.resolve()}: no such file; want {LAYOUT}")
        return default
    with reading(path):
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise ValueError(f"want a JSON object, found {type(content).__name__}")
        return content


def typed(of: dict, key: str, *kinds: type):
    """of[key], None where it is missing or null. ValueError unless it is of one of these types."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if not isinstance(of, dict):
        raise ValueError(f"{of!r:.60}: want an object with a {key}")
    value = of.get(key)
    if value is not None and type(value) not in kinds:
        raise ValueError(f"{key}={value!r:.60}: want {' or '.join(names[kind] for kind in kinds)}")
    return value


def load_config(directory: Path) -> Config:
    with reading(directory / "config.json"):
        return config_from_hf(read_json(directory / "config.json"))


def config_from_hf(hf: dict) -> Config:
    """hf: the content of config.json. ValueError names the key and the value that are not supported."""
    kind = hf.get("model_type")
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(f"model_type {kind!r} is not supported: want llama, mistral, qwen2 or qwen3")
    rope = dict(rope_theta=hf.get("rope_theta", 10000.0))
    rope |= typed(hf, "rope_parameters", dict) or typed(hf, "rope_scaling", dict) or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type {rope_type!r} is not supported: want 'default' or 'llama3'")
    supported = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False,
                     partial_rotary_factor=1.0)
    for key, want in supported.items():
        if (found := {**rope, **hf}.get(key, want)) != want:
            raise ValueError(f"{key}={found!r} is not supported: want {want!r}")

    def number(key: str, default: int | None = None, of: dict = hf, kind: type = int, most: float = 1e9):
        value = default if of.get(key) is None else of[key]
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
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(f"low_freq_factor={scaling.low_freq_factor}: want less than high_freq_factor")
    window = number("sliding_window") if kind == "mistral" and hf.get("sliding_window") else None
    layer = LayerConfig(window, Rope(number("rope_theta", of=rope, kind=float, most=1e12), scaling))
    config = Config(
        dim=dim, layers=(layer,) * number("num_hidden_layers", most=1e4), n_head=heads, n_kv_head=kv_heads,
        head_dim=number("head_dim", default=dim // heads),
        ffn_dim=number("intermediate_size"),
        vocab_size=number("vocab_size", most=2 ** 24),  # generate.py has tokens in floats, which hold these exactly
        context=number("max_position_embeddings"), norm_eps=number("rms_norm_eps", kind=float, most=1),
        qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
        tied=typed(hf, "tie_word_embeddings", bool) or False)
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim}: want an even number, as rope turns pairs")
    if (weights := count_parameters(config)) > MOST_WEIGHTS:
        raise ValueError(f"{weights:.0e} weights: want {MOST_WEIGHTS:.0e} at most; a size is wrong")
    return config


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
        layer |= {name.replace("weight", "bias"): ("attn.wqkv.bias", row, shape[:1])
                  for name, (ours, row, shape) in layer.items() if ours == "attn.wqkv.weight"}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": ("attn.q_norm.weight", 0, (E,)),
                  "self_attn.k_norm.weight": ("attn.k_norm.weight", 0, (E,))}
    names = {"model.embed_tokens.weight": ("embed.weight", 0, (V, D)), "model.norm.weight": ("norm.weight", 0, (D,))}
    if not config.tied:
        names["lm_head.weight"] = ("head.weight", 0, (V, D))
    return names | {f"model.layers.{i}.{theirs}": (f"layers.{i}.{ours}", row, shape)
                    for i in range(config.n_layer) for theirs, (ours, row, shape) in layer.items()}


def count_parameters(config: Config) -> int:
    return sum(math.prod(shape) for _, _, shape in hf_weights(config).values())


def tensor_files(directory: Path) -> dict[str, Path]:
    """The safetensors file that holds each tensor. UserError where the index leads out of the directory."""
    open_shard.cache_clear()  # a file of this name may be another one by now
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not is_file(index, MOST_JSON):
        if not is_file(whole):
            raise UserError(f"{directory}: no model.safetensors, nor its index; *.bin and *.gguf are not read")
        with reading(whole):
            return dict.fromkeys(open_shard(whole).keys(), whole)
    with reading(index):
        files = typed(read_json(index), "weight_map", dict) or {}
        for file in {typed(files, name, str) for name in files}:
            path = PurePosixPath(file or "/")
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"names the file {file}, which is outside of the checkpoint's directory")
            is_file(directory / path)
        return {name: directory / file for name, file in files.items()}


@lru_cache(maxsize=1)
def open_shard(path: Path):
    """A safetensors file, which stays open for its next tensor: with its header read anew for each of 740 tensors
    Llama-2-7B in 4 bits took 1.36 s to load in place of 0.95 (H200, the file in the page cache)."""
    with open(path, "rb") as file:
        if (size := int.from_bytes(file.read(8), "little")) > MOST_JSON:
            raise ValueError(f"a header of {size} bytes, want {MOST_JSON} at most")
    return safe_open(path, framework="pt")


def read_tensor(files: dict[str, Path], name: str, shapes: list[tuple], dtypes: str = "BF16 F16 F32 F64",
                part: tuple[slice, ...] = ()) -> Tensor:
    """The tensor, or a part of it, in the host's memory. UserError unless it has one of the shapes.

    Its name is removed from `files`: a name that is still there at the end has no place in the model."""
    if name not in files:
        raise UserError(f"the tensor {name} is missing from the safetensors files: config.json is of another model, or "
                        "the weights are quantized (quantize.load_checkpoint reads these)")
    with reading(path := files.pop(name)):
        found = open_shard(path).get_slice(name)
        if found.get_dtype() not in dtypes.split() or (shape := tuple(found.get_shape())) not in shapes:
            raise ValueError(f"{name} is {found.get_dtype()} {found.get_shape()}, want {dtypes} {list(shapes[0])}")
        return found[part[:len(shape)]] if part else open_shard(path).get_tensor(name)


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
    wanted.sort(key=lambda item: str(files.get(item[0])))  # file by file
    hidden = None if progress else True  # None: where stderr is no terminal
    for name, ours, row, (rows, *_) in tqdm(wanted, "loading", delay=1, leave=False, disable=hidden):
        tensor = read_tensor(files, name, [whole_shapes[name]], part=shard.part(name) if shard else ())
        weights[ours][row:row + rows].copy_(tensor)
    refuse_surplus(files, config)
    open_shard.cache_clear()
    if model.config.tied:
        weights["head.weight"] = weights["embed.weight"]
    model.load_state_dict(weights, strict=False, assign=True)
    return model.eval()


def refuse_surplus(files: dict[str, Path], config: Config) -> None:
    """UserError for a tensor that the model has no place for, unless it would change nothing, as a bias of zeros."""
    shapes = [shape[:1] for _, _, shape in hf_weights(config).values()]
    for name, path in list(files.items()):
        unused = name.endswith("rotary_emb.inv_freq") or config.tied and name == "lm_head.weight"
        if not unused and not (name.endswith(".bias") and not read_tensor(files, name, shapes).any()):
            raise UserError(f"{path}: no place for tensor {name}; config.json is of another model")


class Tokenizer:
    """Text to tokens and back, the tokens that end a text, and the chat template (None where there is none)."""

    def __init__(self, directory: Path):
        settings = read_json(directory / "tokenizer_config.json", {})
        config = read_json(directory / "config.json")
        self.vocab_size, self.bos = load_config(directory).vocab_size, config.get("bos_token_id")
        with reading(directory / "tokenizer_config.json"):
            self.add_bos = typed(settings, "add_bos_token", bool)
            special = self.special_tokens = {  # bos_token, eos_token and the like, which chat templates insert
                key: value if isinstance(value, str) else typed(value, "content", str)
                for key, value in settings.items() if key.endswith("_token") and isinstance(value, (str, dict))}
            self.template = typed(settings, "chat_template", str, list)
            if isinstance(self.template, list):
                templates = {typed(of, "name", str): typed(of, "template", str) for of in self.template}
                self.template = templates.get("default")
            added = {typed(token, "content", str): int(i)
                     for i, token in (typed(settings, "added_tokens_decoder", dict) or {}).items()}
            if not all(added):
                raise ValueError("added_tokens_decoder: a token without content")
        if is_file(directory / "tokenizer.json", MOST_TOKENIZER):
            self.backend = TokenizerJson(directory / "tokenizer.json")
        elif is_file(directory / "tokenizer.model", MOST_TOKENIZER):
            self.backend, self.add_bos = SentencePiece(directory / "tokenizer.model", added), True
        else:
            raise UserError(f"{directory}: neither tokenizer.json nor tokenizer.model is there")
        self.token, self.decode = self.backend.token, self.backend.decode  # decode() leaves special tokens out
        with reading(directory / "tokenizer_config.json"):
            if isinstance(self.backend, TokenizerJson) and special.get("bos_token"):
                self.bos = self.backend.id(special["bos_token"])
            self.stops = {self.backend.id(token) for token in CHAT_ENDS} - {None}
            if special.get("eos_token"):
                self.stops |= self.stop_ids(self.backend.id(special["eos_token"]))
        for file in ("config.json", "generation_config.json"):
            with reading(directory / file):
                self.stops |= self.stop_ids(read_json(directory / file, {}).get("eos_token_id"))
        # An end may be no special token. A user's text may not give it either, unless it is of one character.
        self.ends = {token: i for i in self.stops if len(token := self.token(i) or "") > 1}
        if any(len(token) > 1000 for token in self.backend.special | self.ends):
            raise UserError(f"{directory}: a special token has more than 1000 characters: this is no such token")
        if is_file(path := directory / "chat_template.jinja", MOST_JSON):
            self.template = read_text(path)

    def stop_ids(self, ids) -> set[int]:
        """eos_token_id: a token, a list of tokens, or None. ValueError for what is no token: the text would not end."""
        ids = [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
        if wrong := [i for i in ids if type(i) is not int or not 0 <= i < self.vocab_size]:
            raise ValueError(f"eos_token_id={wrong[0]!r}: want a token, from 0 to {self.vocab_size - 1}")
        return set(ids)

    def encode(self, text: str, rendered: bool = False, marks: dict[int, str] | None = None) -> list[int]:
        """Text -> tokens. marks: mark()'s, where the text is of messages: a special token that is written in it is one,
        but what a mark stands for is text.

        rendered: a chat template made the text, and no beginning of sequence is added. Otherwise tokenizer.json's
        post-processor adds it, unless add_bos_token overrides that. With tokenizer.model alone this function adds
        config.json's bos_token_id."""
        with reading("the text"):
            text.encode()  # raises UnicodeEncodeError, which says where the text of a command line is not UTF-8
            ids = self.backend.encode(text, post_process := self.add_bos is None and not rendered)
            if marks is not None:
                special, as_text = self.backend.special | self.ends, partial(self.backend.encode, as_text=True)
                parts = self.backend.encode("", post_process) + encode_parts(text, special, as_text, marks)
                # The whole where it has the same special tokens: some tokenizers treat the beginning of a text apart.
                special = {*special.values()}
                one, other = ([i for i in found if i in special] for found in (ids, parts))
                ids = parts if marks or one != other else ids
        if self.add_bos and not rendered and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if wrong := [i for i in ids if type(i) is not int or not 0 <= i < self.vocab_size]:
            raise UserError(f"the tokenizer, or config.json's bos_token_id, gives token {wrong[0]!r}; config.json has "
                            f"a vocab_size of {self.vocab_size}")
        return ids

    def encode_messages(self, messages: list[dict]) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template."""
        messages, marks = self.mark(messages)
        return self.encode(self.render(messages), rendered=True, marks=marks)

    def mark(self, messages: list[dict]) -> tuple[list[dict], dict[int, str]]:
        """The messages with a private character, a mark, in the place of each special token, and which text each mark
        stands for. encode() puts it back as text. So only the template begins and ends a turn.

        In transformers a user can: apply_chat_template() encodes the rendered text as a whole, where <|im_end|> is the
        token whoever wrote it, unless split_special_tokens=True, and then the template's is none either."""
        marks = {}

        def marked(value):
            if isinstance(value, dict):
                return {marked(key): marked(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):  # of a tool's calls, say
                return [marked(item) for item in value]
            for token in typed if isinstance(value, str) else ():
                if token in value:
                    marks[token] = marks.get(token) or next(free)
                    value = value.replace(token, marks[token])
            return value

        with reading("the messages"):
            said = json.dumps(messages, ensure_ascii=False)
            free = (mark for mark in map(chr, range(0x100000, 0x10FFFE)) if mark not in said)
            longest_first = sorted(self.backend.special | self.ends, key=len, reverse=True)
            typed = [text for text in longest_first if json.dumps(text, ensure_ascii=False)[1:-1] in said]
            return marked(messages), {ord(mark): token for token, mark in marks.items()}

    def render(self, messages: list[dict]) -> str:
        """The text that the chat template makes of messages, up to where the answer begins."""
        return render(self.template, dict(messages=messages, tools=None, documents=None, add_generation_prompt=True,
                                          **self.special_tokens))


def render(template: str, values: dict) -> str:
    """The text of a chat template, made in a process of its own. UserError for whatever goes wrong there."""
    with reading("the messages"):
        line = json.dumps([template, values])
    process, answer = template_process(os.getpid()), ""
    try:
        with suppress(BrokenPipeError):
            print(line, file=process.stdin, flush=True)
            answer = process.stdout.readline()
    finally:
        if not answer.endswith("\n"):  # or it would answer the next time
            process.kill()
            template_process.cache_clear()
    if not answer.endswith("\n"):
        raise UserError(f"the chat template's process ended, code {process.wait()}: it may take 3 s and 512 MB")
    kind, text = json.loads(answer)
    if kind:
        raise UserError(f"the chat template: {kind}: {text}")
    return text


@cache
def template_process(pid: int) -> Popen:
    """The process that renders templates for the process `pid`, for all of its turns. It ends when its stdin does."""
    program = f"{inspect.getsource(render_lines)}\nrender_lines()"
    return Popen([sys.executable, "-I", "-c", program, *sys.path], stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True,
                 start_new_session=True)  # so that a terminal's Ctrl-C does not reach it


def render_lines() -> None:
    """The program of template_process(): for each line of stdin, a template and its values, it prints a line, the kind
    of an error or "" and the text.

    jinja2's sandbox keeps a template from other code, but not from taking all time and memory."""
    import json, re, resource, signal, sys  # noqa: E401
    from contextlib import suppress
    from datetime import datetime
    from functools import partial
    sys.path += sys.argv[1:]
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.add_extension("jinja2.ext.loopcontrols")
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own filter escapes for HTML
    env.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    signal.alarm(10)  # for the first line to come
    with suppress(ValueError, OSError):  # macOS refuses this
        resource.setrlimit(resource.RLIMIT_AS, (2 ** 29, 2 ** 29))
    for line in sys.stdin:
        used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (used + 3, hard))  # in seconds; past it the process ends
        signal.alarm(10)  # so it does when as much time went by otherwise
        try:
            template, values = json.loads(line)
            text = env.from_string(template).render(values)
            if len(text) > 10 ** 6 + 4 * len(json.dumps(values)):
                raise TemplateError(f"{len(text)} characters are too many for these messages")
            # No address of a function or object, unless a message has it.
            answer = "", re.sub(" at 0x[0-9a-f]+", lambda found: found[0] if found[0] in line else "", text)
        except Exception as error:
            answer = type(error).__name__, str(error)[:10 ** 4]
        print(json.dumps(answer), flush=True)
        signal.alarm(0)


@contextmanager
def silenced():
    """Lines that a library writes to stderr by itself go nowhere, nor does what other threads write meanwhile."""
    with open(os.devnull, "w") as null:
        saved = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def encode_parts(text: str, special: dict[str, int], encode: Callable, marks: dict | None = None) -> list[int]:
    """The tokens of a text whose special tokens and marks stand apart; encode() gets the parts between.

    With marks, no part gives a special token of several characters. It could where the tokenizer folds case or width,
    or has merges that lead to one: then it is encoded character by character."""
    apart, ids = sorted([*special, *map(chr, marks or {})], key=len, reverse=True), []
    # An unknown token may be special, but any text may give it: the last character of all does.
    forbidden = set() if marks is None else {*special.values()}.difference(encode("\U0010fffd"))
    for part in re.split(f"({'|'.join(map(re.escape, apart))})", text) if apart else [text]:
        plain = part.translate(marks or {})
        found = [special[part]] if part in special else encode(plain)
        if part not in special and forbidden.intersection(found):
            found = [i for character in plain for i in encode(character)]
        ids += found
    return ids


class TokenizerJson:
    """tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer
        self.path = path
        with reading(path), silenced():
            self.tokenizer = Tokenizer.from_file(str(path))
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            # A decoder that panics does so here and not in the middle of a text (151,000 tokens: 0.1 s on two cores).
            tokens = [*range(self.tokenizer.get_vocab_size())]
            self.tokenizer.decode_batch([tokens, *([i] for i in tokens)])
            added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        self.id, self.token = self.tokenizer.token_to_id, self.tokenizer.id_to_token

    def encode(self, text: str, post_process: bool = False, as_text: bool = False) -> list[int]:
        """as_text: special tokens that are written in the text are text."""
        with reading(self.path), silenced():
            self.tokenizer.encode_special_tokens = as_text
            return self.tokenizer.encode(text, add_special_tokens=post_process).ids

    def decode(self, ids: list[int]) -> str:
        with reading(self.path):
            return self.tokenizer.decode(ids)


class SentencePiece:
    """tokenizer.model, through sentencepiece, which leaves finding special tokens in a text to its callers."""

    def __init__(self, path: Path, added: dict[str, int]):
        from sentencepiece import SentencePieceProcessor
        self.path = path
        with reading(path):
            self.processor = SentencePieceProcessor(model_file=str(path))
            self.size = self.processor.vocab_size()
            self.special = {self.processor.id_to_piece(i): i for i in range(self.size) if self.processor.is_control(i)}
        self.special |= added

    def id(self, token: str) -> int | None:
        found = self.special.get(token, self.processor.piece_to_id(token))
        return None if found == self.processor.unk_id() else found

    def token(self, i: int) -> str | None:
        with reading(self.path):  # a piece may be no UTF-8
            return self.processor.id_to_piece(i) if i < self.size else None

    def encode(self, text: str, post_process: bool = False, as_text: bool = False) -> list[int]:
        return encode_parts(text, {} if as_text else self.special, self.processor.encode)

    def decode(self, ids: list[int]) -> str:
        with reading(self.path):
            return self.processor.decode([i for i in ids if i < self.size])

"""
What protects from broken and hostile files, and what is checked before work begins: memory, device,
options.

A directory is vetted once, before it is read: open_checkpoint() finds it and looks at every file
that will be read (its kind, size and links, the JSON's types and ranges, the headers of the
weights); then checkpoint.py and tokenizer.py read it plainly. The tokenizer's files are looked at
for those alone who want a tokenizer. No path in a checkpoint leads out of its directory. What calls
code that a file can steer runs in a process of its own with limits of time and memory: chat
templates, and patterns of layers' names. Each mistake is a ValueError of one line.
"""

import gc
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import fields
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import torch
from safetensors import safe_open

from hub.checkpoint import INDEX, WHOLE, Checkpoint, count_parameters, hf_weights
from hub.families import FAMILIES, config_from_hf, head_dim, is_head, rope_settings, text_settings
from generate import Sampling
from model import Config, KVCache
from hub.tokenizer import Tokenizer, any_of, read_ends, render_plainly

GIB = 2**30
HUB_FILES = f"""
config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json chat_template.jinja
{WHOLE} {INDEX} model-*-of-*.safetensors
""".split()
LAYOUT = "a directory in Hugging Face layout: config.json, *.safetensors and the tokenizer's files"
PICKLE = "a pickle, which is never read, as it could run code"
OTHER_FILES = {
    ".gguf": "a GGUF file, which is not read here",
    ".bin": PICKLE,
    ".pt": PICKLE,
    ".pth": PICKLE,
}
CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; save_file({n: t.contiguous() for n, t '
    "in torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
)
MOST_JSON, MOST_TOKENIZER = 2**24, 2**28  # bytes of a JSON file or template, and of a tokenizer
MOST_TEXT = (
    2**26
)  # bytes of a text: to encode it takes 42 times as many with sentencepiece, 90 with tokenizers
MARKS = range(
    0x102000, 0x10FFFE
)  # characters without a meaning: the last of Unicode's private ones
MOST_WEIGHTS = (
    10**13
)  # of a model: its bytes are far from the 2 ** 63 at which PyTorch's sums overflow


@contextmanager
def reading(source: Path | str):
    """Turns whatever the content of a file makes libraries raise into a ValueError that names the
    source."""
    try:
        yield
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        # The tokenizers library's PanicException is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        reason = (
            getattr(error, "strerror", None) or error
        )  # an OSError's own words name the file once more
        raise ValueError(f"{source}: {kind}{reason}") from error


# Finding a checkpoint


def open_checkpoint(name: str | Path, tokenizer=True) -> tuple[Checkpoint, Tokenizer | None]:
    """name: a directory or a Hub id."""
    directory = find_checkpoint(str(name))
    vet(directory)
    checkpoint = Checkpoint(directory)
    return checkpoint, VettedTokenizer(checkpoint) if tokenizer else None


def check_head_files(directory: Path):
    """ValueError for a head's directory without safetensors, as the authors publish some."""
    if not any(is_file(directory / file) for file in (WHOLE, INDEX)):
        raise ValueError(
            f"{directory}: no {WHOLE}; a pytorch_model.bin is {PICKLE}. If you trust it, convert it "
            f"there: {CONVERT}"
        )


def find_checkpoint(name: str) -> Path:
    """A directory is taken as it is. A Hub id (owner/name) comes from the Hub's cache and is
    downloaded if needed."""
    path = Path(os.path.expanduser(name))
    parent = path.absolute().parent
    if name and os.path.isdir(path):
        return path.resolve()  # in full, for the messages to come: the name may be "."
    if name and os.path.exists(path):
        what = OTHER_FILES.get(path.suffix.lower(), "a file")
        wanted = f"its directory, {parent}" if (parent / "config.json").exists() else LAYOUT
        raise ValueError(f"{name} is {what}; want {wanted}")
    missing = f"{name}: no such directory"
    if os.path.isdir(parent):
        missing += f" in {parent}"
    if near := near_checkpoints(path):
        missing += f" (near it: {', '.join(near)})"
    from huggingface_hub import snapshot_download

    try:
        if "/" not in name:  # the Hub would know some of these, of old
            raise ValueError
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except ValueError:
        raise ValueError(
            f"{missing}, and not a Hub id of the form owner/name, as HuggingFaceTB/SmolLM2-135M is"
        ) from None
    # the client and its transport raise many kinds; each means that there is no checkpoint
    except Exception as error:
        raise ValueError(f"{missing}; as a Hub id: the Hub {hub_answer(error)}") from error


def hub_answer(error: Exception) -> str:
    for failure in (error, error.__cause__):
        status = getattr(getattr(failure, "response", None), "status_code", None)
        if status in (401, 403, 404):
            return f"answers {status}; correct the name, or accept its licence on its page and run `hf auth login`"
    return (
        f"is out of reach ({type(error.__cause__ or error).__name__}); check the network and "
        f"HF_HUB_OFFLINE, or "
        "fetch it on another machine and copy its directory here"
    )


def near_checkpoints(path: Path) -> list[str]:
    """The checkpoints beside `path` and in ./checkpoints whose names are much like its name, the
    nearest first."""
    found = {}
    for parent in (Path("checkpoints"), path.parent):
        if os.path.isdir(parent):
            found |= {
                file.parent.name.lower(): str(file.parent) for file in parent.glob("*/config.json")
            }
    return [found[name] for name in get_close_matches(path.name.lower(), found, cutoff=0.5)]


# Files


def is_inside(path: Path) -> bool:
    """Whether a file, its links followed, lies in its directory or, as in the Hub's cache, among
    the blobs beside."""
    home, target = path.parent.resolve(), path.resolve()
    in_blobs = home.parent.name == "snapshots" and target.is_relative_to(
        home.parent.parent / "blobs"
    )
    return in_blobs or target.is_relative_to(home)


def is_file(path: Path, most: int | None = None, inside=True) -> bool:
    """Whether it is there. ValueError for what would block or never end, such as a pipe or a device.

    most: bytes, of what is read whole. inside: it is a checkpoint's JSON, template or tokenizer,
    which no link may take from elsewhere. Weights, without `most`, may be links, as they may lie on
    another disk."""
    if not os.path.lexists(path):
        return False
    with reading(path):
        if not path.exists():
            raise ValueError(
                f"a link to {os.readlink(path)}, which is not there; copy or download the file "
                f"again"
            )
        if not path.is_file():
            raise ValueError("want a regular file, not a directory, a pipe or a device")
        if most and inside and not is_inside(path):
            raise ValueError(
                f"a link to {path.resolve()}, out of its directory; copy the file itself there"
            )
        size = path.stat().st_size
        if most and size > most:
            raise ValueError(f"{size} bytes, want {most} at most")
    return True


def read_text(path: Path, encoding: str = "utf-8") -> str:
    is_file(path, MOST_TEXT, inside=False)
    with reading(path):
        return path.read_text(encoding)


@contextmanager
def read_json(path: Path):
    """A JSON object, {} where the file is not there. Errors over what it says, too, are UserErrors
    that name it."""
    with reading(path):
        content = json.loads(read_text(path)) if is_file(path, MOST_JSON) else {}
        if not isinstance(content, dict):
            raise ValueError(f"want a JSON object, found {type(content).__name__}")
        json.dumps(content, ensure_ascii=False).encode()  # raises for half of a character
        yield content


# Vetting a directory


# Tables of keys of a JSON object: what each must be. Numbers are above 0. An optional key may be
# missing, or null; one that is nonnull may be missing.

# Of text_settings(). hidden_size and head_dim end at 2 ** 20: for every two elements rope computes
# a frequency, here still at once.
CONFIG = """
hidden_size                       needed    int up to 1048576
num_attention_heads               needed    int up to 1e9
num_hidden_layers                 needed    int up to 1e4
intermediate_size                 needed    int up to 1e9
vocab_size                        needed    int up to 16777216
max_position_embeddings           needed    int up to 1e9
rms_norm_eps                      needed    float up to 1
num_key_value_heads               optional  int up to 1e9
head_dim                          optional  int up to 1048576
sliding_window                    optional  int up to 1e9
sliding_window_pattern            optional  int up to 1e9
no_rope_layer_interval            optional  int up to 1e9
query_pre_attn_scalar             optional  float up to 1e9
embedding_multiplier              optional  float up to 1e9
attention_multiplier              optional  float up to 1e9
residual_multiplier               optional  float up to 1e9
logits_scaling                    optional  float up to 1e9
tie_word_embeddings               optional  true or false
layer_types                       optional  a list
no_rope_layers                    optional  a list
rope_parameters                   optional  an object
rope_scaling                      optional  an object
"""
# Of config.json and of its text_config, before text_settings() makes them one.
PARTS = """
model_type                        optional  a text
text_config                       optional  an object
"""
# Of text_settings() of a mixture of experts.
EXPERTS = """
num_experts                       needed    int up to 1e9
num_experts_per_tok               needed    int up to 1e9
moe_intermediate_size             nonnull   int up to 1e9
decoder_sparse_step               nonnull   int up to 1e9
swiglu_limit                      nonnull   float up to 1e9
swiglu_alpha                      nonnull   float up to 1e9
norm_topk_prob                    optional  true or false
mlp_only_layers                   optional  numbers of layers
"""
MOST_EXPERTS = 10**5  # of all layers: each has tensors of its own
# Of an EAGLE head's config.json, before and after head_settings().
HEAD = """
transformer_layer_config          optional  an object
eagle_config                      optional  an object
draft_vocab_size                  optional  int up to 16777216
eagle_aux_hidden_state_layer_ids  optional  numbers of layers
"""
# Of rope_settings(), then what else a rope_type needs.
ROPE = """
rope_type                         needed    a text
rope_theta                        needed    float up to 1e12
partial_rotary_factor             needed    float up to 1
original_max_position_embeddings  needed    int up to 1e9
truncate                          optional  true or false
factor                            optional  float up to 1e9
low_freq_factor                   optional  float up to 1e9
high_freq_factor                  optional  float up to 1e9
beta_fast                         optional  float up to 1e9
beta_slow                         optional  float up to 1e9
mscale                            optional  float up to 1e9
mscale_all_dim                    optional  float up to 1e9
attention_factor                  optional  float up to 1e9
llama_4_scaling_beta              optional  float up to 1e9
"""
ROPE_OF_TYPE = dict(
    linear="""
    factor                        needed    float up to 1e9
    """,
    llama3="""
    factor                        needed    float up to 1e9
    low_freq_factor               needed    float up to 1e9
    high_freq_factor              needed    float up to 1e9
    """,
    longrope="""
    short_factor                  optional  a list
    long_factor                   optional  a list
    """,
)
# Of rope_parameters, where each kind of layer has its own.
ROPE_OF_LAYERS = """
full_attention                    optional  an object
sliding_attention                 optional  an object
"""
# Of tokenizer_config.json, and of a chat template in a list there.
SETTINGS = """
add_bos_token                     optional  true or false
chat_template                     optional  a text or a list
added_tokens_decoder              optional  an object
"""
TEMPLATE = """
name                              optional  a text
template                          optional  a text
"""
KINDS = {
    "an object": [dict],
    "a list": [list],
    "numbers of layers": [list],
    "a text": [str],
    "a text or a list": [str, list],
    "true or false": [bool],
    "int": [int],
    "float": [int, float],
}


def check_keys(of: dict, table: str):
    """ValueError unless the keys of a JSON object are what the table says."""
    for line in table.strip().splitlines():
        key, need, want = line.split(maxsplit=2)
        if not isinstance(of, dict):
            raise ValueError(f"{of!r:.60}: want an object with a {key}")
        value = of.get(key)
        if value is None and (need == "optional" or need == "nonnull" and key not in of):
            continue
        kind, _, most = want.partition(" up to ")
        fits = type(value) in KINDS[kind]
        if kind == "numbers of layers":
            fits = fits and all(type(item) is int for item in value)
        if most:
            fits = fits and 0 < value <= float(most)
            kind = f"{kind} above 0, up to {float(most):.0e}"
        if not fits:
            raise ValueError(f"{key}={value!r:.60}: want {kind}")


def vet(directory: Path, head: Callable | None = None):
    """ValueError for what checkpoint.py could not read. Files that are missing and not needed by all
    are left to it.

    head: drafts.eagle.head_settings() for an EAGLE head's directory, which no other may be."""
    path = directory / "config.json"
    if not is_file(path):
        raise ValueError(f"{path.resolve()}: no such file; want {LAYOUT}")
    with read_json(path) as hf:
        if is_head(hf):
            if not head:
                raise ValueError(
                    "an EAGLE head's, which drafts for a checkpoint: give its directory as draft"
                )
            check_keys(hf, HEAD)
            hf = head(hf)
            check_keys(hf, HEAD)  # also those that stood in the objects
            if hf.get("eagle_aux_hidden_state_layer_ids") == []:
                raise ValueError("eagle_aux_hidden_state_layer_ids=[]: want numbers of layers")
        vocab_size = vet_config(hf)
        vet_tokens("eos_token_id", read_ends(hf), vocab_size)
    with read_json(directory / "generation_config.json") as generation:
        vet_tokens("eos_token_id", read_ends(generation), vocab_size)
        Sampling(
            **{
                each.name: generation[each.name]
                for each in fields(Sampling)
                if generation.get(each.name) is not None
            }
        )
    vet_weights(directory)


def vet_config(hf: dict) -> int:
    """The vocabulary's size."""
    for part in (hf, hf.get("text_config") or {}):
        check_keys(part, PARTS)
    hf = text_settings(hf)
    check_keys(hf, CONFIG)
    n = hf["num_hidden_layers"]
    for key, values in (
        ("layer_types", ("full_attention", "sliding_attention")),
        ("no_rope_layers", (0, 1)),
    ):
        found = hf.get(key)
        if found is not None and (len(found) < n or any(value not in values for value in found)):
            raise ValueError(f"{key}={str(found):.60}: want one of {values} for each of {n} layers")
    for key in ("rope_parameters", "rope_scaling"):
        check_keys(hf.get(key) or {}, ROPE_OF_LAYERS)
    for sliding in (False, True):
        vet_rope(rope_settings(hf, sliding), head_dim(hf))
    if "expert_files" in FAMILIES[hf["model_type"]]:
        vet_experts(hf)
    config = config_from_hf(hf)
    heads = f"num_attention_heads={config.n_head}"
    if config.n_head % config.n_kv_head:
        raise ValueError(f"{heads} is no multiple of num_key_value_heads={config.n_kv_head}")
    if config.dim % config.n_head and not hf.get("head_dim"):
        raise ValueError(f"hidden_size={config.dim} is no multiple of {heads}; head_dim is missing")
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim}: want an even number, as rope turns pairs")
    weights = count_parameters(config)
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights:.0e} weights: want {MOST_WEIGHTS:.0e} at most; a size is wrong")
    return config.vocab_size


def vet_experts(hf: dict):
    """hf: text_settings()'s."""
    n = hf.get("num_experts") or hf.get("num_local_experts")
    check_keys(hf | dict(num_experts=n), EXPERTS)
    if hf["num_experts_per_tok"] > n:
        raise ValueError(
            f"num_experts_per_tok={hf['num_experts_per_tok']}: want {n} at most, as there are no "
            f"more "
            "experts"
        )
    if n * hf["num_hidden_layers"] > MOST_EXPERTS:
        raise ValueError(
            f"{n} experts in each of {hf['num_hidden_layers']} layers: want {MOST_EXPERTS} at "
            f"most; a "
            "number is wrong"
        )


def vet_rope(rope: dict, head_dim: int):
    """rope: rope_settings()'s."""
    check_keys(rope, ROPE)
    kind = rope["rope_type"]
    check_keys(rope, ROPE_OF_TYPE.get(kind, ""))
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(
            f"low_freq_factor={rope['low_freq_factor']}: want less than high_freq_factor"
        )
    if kind == "longrope":
        pairs = int(head_dim * rope["partial_rotary_factor"]) // 2
        for key in ("short_factor", "long_factor"):
            factors = rope.get(key) or []
            for factor in factors:
                check_keys({key: factor}, f"{key} needed float up to 1e9")
            if len(factors) != pairs:
                raise ValueError(
                    f"{key}={factors!r:.60}: want {pairs} numbers above 0, one for each pair of a "
                    f"head"
                )


def vet_tokens(key: str, ids: list, vocab_size: int):
    """None is none. An end that is no token would end no text."""
    for i in ids:
        if i is not None and (type(i) is not int or not 0 <= i < vocab_size):
            raise ValueError(
                f"{key}={i!r}: want a token, from 0 to {vocab_size - 1}, as config.json has a "
                f"vocab_size of {vocab_size}"
            )


def vet_tokenizer(directory: Path) -> Path:
    """The tokenizer's file. ValueError for what tokenizer.py could not read."""
    with read_json(directory / "tokenizer_config.json") as settings:
        check_keys(settings, SETTINGS)
        for key, value in settings.items():
            if key.endswith("_token") and isinstance(value, dict):
                check_keys(value, "content optional a text")
        templates = settings.get("chat_template")
        for template in templates if isinstance(templates, list) else []:
            check_keys(template, TEMPLATE)
        for i, token in (settings.get("added_tokens_decoder") or {}).items():
            int(i)
            check_keys(token, "content needed a text")
            if not token["content"]:
                raise ValueError("added_tokens_decoder: a token without content")
    template = directory / "chat_template.jinja"
    if is_file(template, MOST_JSON):
        read_text(template)
    paths = [directory / "tokenizer.json", directory / "tokenizer.model"]
    there = [path for path in paths if is_file(path, MOST_TOKENIZER)]
    if not there:
        raise ValueError(f"{directory}: neither tokenizer.json nor tokenizer.model is there")
    return there[0]


def vet_weights(directory: Path):
    """The index, and each file's header."""
    places = {}  # a file -> the tensors that the index says are in it
    with read_json(directory / INDEX) as index:
        check_keys(index, "weight_map optional an object")
        for name, file in (index.get("weight_map") or {}).items():
            if not isinstance(file, str) or os.path.isabs(file) or ".." in Path(file).parts:
                raise ValueError(
                    f"{name} is in {file!r:.60}: want a file inside of the checkpoint's directory"
                )
            places.setdefault(directory / file, set()).add(name)
    if not index and is_file(directory / WHOLE):
        places = {directory / WHOLE: set()}
    for path, names in places.items():
        is_file(path)
        with reading(path):
            with open(path, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
            if size > MOST_JSON:
                raise ValueError(f"a header of {size} bytes, want {MOST_JSON} at most")
            with safe_open(path, framework="pt") as opened:
                missing = names.difference(opened.keys())
            if missing:
                raise ValueError(f"{min(missing)} is not in it, though {INDEX} says so")


# Processes with limits


def render(template: str, values: dict) -> str:
    """The text of a chat template, made in a process of its own. ValueError for whatever goes wrong
    there."""
    process = template_process(os.getpid())
    try:
        print(json.dumps([template, values]), file=process.stdin, flush=True)
        kind, text = json.loads(process.stdout.readline())
    except BaseException as error:
        process.kill()  # or its answer would be the next one's
        template_process.cache_clear()
        if not isinstance(error, (BrokenPipeError, ValueError)):
            raise
        raise ValueError(
            f"the chat template's process ended, code {process.wait()}: it may take 3 s and 512 MB"
        ) from None
    if kind:
        raise ValueError(f"the chat template: {kind}: {text}")
    return text


@cache
def template_process(pid: int) -> Popen:
    """The process that renders templates for the process `pid`, for all of its turns. It ends when
    its stdin does."""
    program = (
        f"{inspect.getsource(render_plainly)}\n{inspect.getsource(render_lines)}\nrender_lines()"
    )
    return Popen(
        [sys.executable, "-I", "-c", program, *sys.path],
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        text=True,
        start_new_session=True,
    )  # so that a terminal's Ctrl-C does not reach it


def render_lines():
    """The program of template_process(): for each line of stdin, a template and its values, it
    prints a line, the kind of an error or "" and the text."""
    import json, re, resource, signal, sys, time  # noqa: E401
    from contextlib import suppress

    sys.path += sys.argv[1:]
    render_plainly("", {})  # imports what it needs
    with suppress(ValueError, OSError):  # macOS refuses this
        resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
    for line in sys.stdin:
        used = int(time.process_time())
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(
            resource.RLIMIT_CPU, (used + 3, hard)
        )  # in seconds; past it the process ends
        signal.alarm(10)  # so it does when as much time went by otherwise
        try:
            template, values = json.loads(line)
            text = render_plainly(template, values)
            if len(text) > 10**6 + 4 * len(json.dumps(values)):
                raise ValueError(f"{len(text)} characters are too many for these messages")
            # No address of a function or object, unless a message has it.
            answer = (
                "",
                re.sub(" at 0x[0-9a-f]+", lambda found: found[0] if found[0] in line else "", text),
            )
        except Exception as error:
            answer = type(error).__name__, str(error)[: 10**4]
        print(json.dumps(answer), flush=True)
        signal.alarm(0)


FIND_MATCHES = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
patterns, names = json.load(sys.stdin)
compiled = [re.compile(pattern) for pattern in patterns]
print(json.dumps([next((i for i, pattern in enumerate(compiled) if pattern.match(name)), None) for name in names]))
"""


def first_matches(patterns: list[str], names: list[str]) -> list[int | None]:
    """Which of a file's regular expressions is the first that matches the beginning of each name.

    A search can take ages, as that of "(a?){99}b" does, so a process makes it, which ends after 3
    s."""
    if not any(patterns):
        return [0] * len(names)
    done = subprocess.run(
        [sys.executable, "-I", "-c", FIND_MATCHES],
        input=json.dumps([patterns, names]),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.splitlines() or ["they take more than 3 s"])[-1]
        raise ValueError(
            f"config.json: quantization_config: its patterns of layers' names: {reason}"
        )
    return json.loads(done.stdout)


# The tokenizer


@contextmanager
def silenced():
    """Lines that a library writes to stderr by itself go nowhere, nor does what other threads write
    meanwhile."""
    with open(os.devnull, "w") as null:
        saved = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def vetted(encode):
    """encode(tokenizer, a text or a chat's messages) -> tokens. What is no text, and what is no
    token, is refused."""

    def call(tokenizer, of):
        with reading("the text"):
            # Raises for what is no JSON, and for half of a character: a command line that is not
            # UTF-8.
            json.dumps(of, ensure_ascii=False).encode()
        with reading(tokenizer.path), silenced():
            ids = encode(tokenizer, of)
            vet_tokens("token", ids, tokenizer.vocab_size)
        return ids

    return call


class VettedTokenizer(Tokenizer):
    """Special tokens that are typed in a chat are text. Whatever a library raises is a ValueError,
    and what it writes to stderr by itself goes nowhere.

    In messages each special token that is typed gives way to a mark, a character without a meaning,
    before the template writes its own. Then a mark is encoded as the text that it stands for."""

    render_template = staticmethod(render)
    encode_text = vetted(Tokenizer.encode_text)

    def __init__(self, checkpoint: Checkpoint):
        self.path = vet_tokenizer(checkpoint.directory)
        self.vocab_size = checkpoint.config.vocab_size
        with reading(self.path), silenced():
            super().__init__(checkpoint)
            # What a user's text must not give. An end may be no special token; one character is
            # what any text has.
            texts = {self.token(i): i for i in self.stops}
            self.reserved = self.backend.special | {
                text: i for text, i in texts.items() if len(text or "") > 1
            }
            if self.path.suffix == ".json":
                # A decoder that panics does so here, not in the middle of a text (151,000 tokens:
                # 0.1 s on two cores).
                tokens = [*range(self.backend.tokenizer.get_vocab_size())]
                self.backend.tokenizer.decode_batch([tokens, *([i] for i in tokens)])
        with reading(checkpoint.directory / "tokenizer_config.json"):
            if end := self.special_tokens.get("eos_token"):
                vet_tokens("eos_token_id", [self.backend.id(end)], self.vocab_size)
            if self.add_bos:
                vet_tokens("bos_token_id", [self.bos], self.vocab_size)
            if any(len(token) > 1000 for token in self.reserved):
                raise ValueError(
                    "a special token has more than 1000 characters: this is no such token"
                )
        self.marks = dict(zip(self.reserved, map(chr, MARKS)))
        self.meant = {mark: text for text, mark in self.marks.items()}

    def token(self, i: int) -> str | None:
        with reading(self.path):
            return super().token(i)

    def decode(self, ids: list[int]) -> str:
        with reading(self.path):
            return super().decode(ids)

    @vetted
    def encode_typed(self, text: str) -> list[int]:
        """As encode_text(), but a special token that is written in the text is text."""
        return self.encode_text("") + self.encode_marked(self.mark(text))

    @vetted
    def encode_chat(self, messages: list[dict]) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template, which alone
        begins and ends turns.

        In transformers a user can: apply_chat_template() encodes the rendered text as a whole,
        where <|im_end|> is the token whoever wrote it, unless split_special_tokens=True, and then
        the template's is none either."""
        return self.encode_marked(self.render(self.mark(messages)))

    def mark(self, value):
        """Messages, or a part of them, with a mark in the place of each reserved text."""
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        if not isinstance(value, str):
            return value
        if taken := re.search(f"[{chr(MARKS[0])}-{chr(MARKS[-1])}]", value):
            raise ValueError(
                f"the private character U+{ord(taken[0]):X} stands for others here; leave it out"
            )
        return re.sub(any_of(self.reserved), lambda found: self.marks[found[0]], value)

    def encode_marked(self, text: str) -> list[int]:
        """The tokens of a text whose reserved texts are tokens, while a mark is what it stands for,
        as plain text."""
        encode_plainly = partial(self.backend.encode, plain=True)
        parts = re.split(f"({any_of([*self.reserved, *self.meant])})", text)
        # Any text may give the unknown token, special or not. So does the last character of all.
        reserved = set(self.reserved.values()).difference(encode_plainly("\U0010fffd"))

        # The whole, where nothing was typed: some tokenizers treat the beginning of a text apart.
        whole = self.backend.encode(text)
        written = [self.reserved[part] for part in parts if part in self.reserved]
        same = [i for i in whole if i in reserved] == [i for i in written if i in reserved]
        if same and self.meant.keys().isdisjoint(parts):
            return whole

        ids = []
        for part in parts:
            plain = self.meant.get(part, part)
            found = encode_plainly(plain)
            if part in self.reserved:
                found = [self.reserved[part]]
            elif reserved.intersection(
                found
            ):  # case or width is folded, or merges lead to a reserved text
                found = [i for character in plain for i in encode_plainly(character)]
            ids += found
        return ids


# Device and memory


DTYPES = dict(
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    fp32=torch.float32,
    bf16=torch.bfloat16,
    fp16=torch.float16,
)


def find_device(name: str | torch.device | None, compile: bool = False) -> torch.device:
    """The device or, for None, the first GPU, else the CPU. A GPU becomes the current one: Triton
    launches there. compile: ValueError where Inductor would not find a C++ compiler."""
    # Where the driver is unusable, GPUs may be counted and yet not available.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [f"cuda:{i}" for i in range(gpus)]
    if torch.backends.mps.is_available():
        found.append("mps:0")
    found.append("cpu:0")
    if name is None:
        name = found[0].partition(":")[0]
    if str(name) not in found and f"{name}:0" not in found:
        raise ValueError(
            f"device={name}: want cpu, cuda, cuda:N or mps; PyTorch finds {', '.join(found)}"
        )
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    compiler = os.environ.get(
        "CXX", "clang++" if sys.platform == "darwin" else "g++"
    )  # the one that Inductor runs
    if compile and device.type == "cpu" and not shutil.which(compiler):
        raise ValueError(
            f"compile on a CPU runs {compiler}, which is not here: install it, or let CXX name "
            f"another"
        )
    return device


def find_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    default = "float32" if device.type == "cpu" else "bfloat16"
    dtype = DTYPES[str(name or default).removeprefix("torch.")]
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and not torch.cuda.is_bf16_supported(False)
    ):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16: dtype=float16 or float32 "
            f"runs there"
        )
    return dtype


def host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device, ranks=1) -> int:
    """Bytes that a GPU has left, or the host, for each rank: half of its memory, where the system
    does not say more."""
    if device.type == "cuda":
        gc.collect()  # models that are gone, where they refer to themselves
        torch.cuda.empty_cache()  # what PyTorch holds of them
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, TypeError):  # no such file, no such line
        said = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        return int(said[1]) * 1024 // ranks
    return host_memory() // 2 // ranks


@contextmanager
def memory_advice(advice: str):
    """Turns running out of memory into a ValueError with this advice."""
    try:
        yield
    except (
        MemoryError,
        RuntimeError,
    ) as error:  # a GPU's torch.OutOfMemoryError, a CPU's plain RuntimeError
        if isinstance(error, MemoryError) or re.search("(out of|allocate) memory", str(error)):
            raise ValueError(advice) from None
        raise


def check_memory(
    models: list[tuple[Config, int | None]],
    batch_size: int,
    cache_length: int,
    device: torch.device,
    dtype: torch.dtype,
    ranks=1,
    loaded=False,
    kind="16-bit",
    features=0,
) -> str:
    """What to say if memory runs out later. ValueError if weights and KV caches alone do not fit.

    models: their configs and, for a quantized checkpoint, the bits of a weight. The ranks' GPUs
    share both. loaded: the weights have their memory already. kind: the caches', of model.CACHES.
    features: numbers that are kept of each token for an EAGLE head."""
    share, there = 1, host_memory()
    if device.type == "cuda":
        share, there = ranks, free_memory(device)
    tokens = batch_size * cache_length
    weights, cache = 0, features * dtype.itemsize * tokens
    for config, bits in models:
        packed = bits / 8 if bits else dtype.itemsize  # scales are not counted
        for weight in hf_weights(config).values():
            size = math.prod(weight.shape) * (packed if weight.quantized else dtype.itemsize)
            weights += size / (share if weight.rows or weight.columns else 1)
        cache += KVCache.bytes_per_token(config, dtype, kind) * tokens / share
    no_draft = ", or no draft" if len(models) > 1 else ""
    advice = (
        f"out of memory: {weights / GIB:.2f} GiB of weights, {cache / GIB:.2f} GiB of cache "
        f"({batch_size} rows "
        f"of {cache_length}) for {there / GIB:.2f} GiB on {device}; fewer prompts, samples or "
        f"tokens, or dtype"
        f"{no_draft}, help"
    )
    if (0 if loaded else weights) + cache > there:
        raise ValueError(advice)
    return advice


def check_draft(name: str, draft: Tokenizer, target: Tokenizer):
    """ValueError if the draft's tokenizer is not the checkpoint's."""
    for i in range(min(draft.vocab_size, target.vocab_size)):
        theirs, ours = draft.token(i), target.token(i)
        if theirs != ours and None not in (theirs, ours):
            raise ValueError(
                f"draft={name}: token {i} is {theirs!r} there and {ours!r} in the checkpoint; "
                f"want a "
                "draft with the same tokenizer, or draft=prompt-lookup"
            )


# A chat


def check_messages(messages):
    """ValueError unless these are a chat's messages: [{"role": ..., "content": ...}, ...]."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{messages!r:.60}: want a text, or messages, [{{'role': ..., 'content': ...}}, ...]"
        )
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(f"message {message!r:.60}: want a role and a content, both text")

"""
Breaks checkpoints at random and watches what the commands make of them.

    python tests/programs/fuzz.py --trials 20000
    python tests/programs/fuzz.py --trials 1 --seed 1234     # one trial again; what is bad is shown

A trial copies a small checkpoint, mutates one of its files, and runs generate.py or quantize.py in
a child forked from this process, which has imported PyTorch, with limits on time and memory. The
judge puts it into one of these classes:

    refused      exit code 2, one printable line on stderr, nothing on stdout, no file left
    same text    the mutation changed nothing that is generated
    other text   it did, by changing data: weights, tokens, settings
    bad          all else: a traceback, a signal, a hang, several lines; or accepted although it must be refused

Some mutations must be refused (a size of -1, a pickle, a link out of the directory), some must
change nothing (weights that are a link); of the others the judge only wants one of the first three.
A pickle, a template and an index are hostile in some trials: no code of theirs may run, and nothing
outside may be read. In the end each of some checks is switched off for a trial, which must be bad
then.

As many trials go to what config.json means: keys missing, zero and null, at both levels of a model
that also sees, with both keys of rope; and as many to messages in a chat template: nulls, text
parts, tools. There transformers is the judge, where it is installed and reads the same: what we
make of it must be the same, or a refusal.
"""

import argparse
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from random import Random
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import torch  # noqa: E402
from jinja2 import Environment  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import generate  # noqa: E402
import quantize  # noqa: E402
from cli.errors import report_errors  # noqa: E402
from hub.checkpoint import reading  # noqa: E402
import judge as meaning  # noqa: E402
from helpers import (  # noqa: E402
    CHATS,
    TINY,
    awq,
    change,
    make,
    open_tokenizer,
    put,
    read_json,
    rewrite,
    save_tensors,
    with_json,
    with_model,
    write,
)

SECONDS, MEMORY = 20, 2**32  # of a trial: CPU time, and address space beyond what the parent has
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER, PIECES, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    0.5,
    -0.0,
    1e-300,
    1e300,
    math.nan,
    math.inf,
    2**31,
    2**63,
    10**12,
    10**400,
    "",
    "x",
    "2",
    "<s>",
    "\x1b]0;x\x07\n",
    "\ud800",
    "\u202e",
    "a" * 10**5,
    [],
    [[]],
    [None],
    {},
    {"a": {"b": []}},
    ["x"] * 100,
    {"-:(": {}},
    ["re:("],
    {"": {}},
]
# Keys that a file may lack, and that are read.
KEYS = [
    "config_groups",
    "method",
    "quant_method",
    "dynamic",
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "sparsity_config",
    "transform_config",
    "kv_cache_scheme",
    "activation_scheme",
    "weight_block_size",
    "targets",
    "input_activations",
    "actorder",
    "group_size",
    "desc_act",
    "format",
    "checkpoint_format",
    "strategy",
    "lm_head",
    "quantization_config",
    "compression_config",
    "rope_scaling",
    "rope_parameters",
    "rope_type",
    "sliding_window",
    "head_dim",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "eos_token",
    "bos_token",
    "chat_template",
    "add_bos_token",
    "added_tokens_decoder",
    "normalizer",
    "truncation",
]
NO_SIZE = [None, True, 0, -1, 1e300, math.nan, math.inf, "2", "x", [], {}, [2], 10**12, 10**400]
NO_ENDS = ["2", 99999, -1, 2.5, "</s>", True, [99999], [[1]], {}]
SIZES = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
]
WRONG = [  # a file, a key whose limits are known, and values that must be refused
    (CONFIG, "eos_token_id", NO_ENDS),
    (GENERATION, "eos_token_id", NO_ENDS),
    (GENERATION, "temperature", [True, -1, 101, "x", math.nan]),
    (GENERATION, "top_k", [True, -5, 0.5, "x"]),
    (GENERATION, "top_p", [True, -1, 2, math.nan, "x"]),
    (GENERATION, "repetition_penalty", [True, 0, -1, 101, math.nan, "x"]),
    (GENERATION, "do_sample", [1, "false", []]),
    (GENERATION, "min_p", [True, -1, 1.5, math.nan, "x"]),
    (CONFIG, "head_dim", [7, -2, "x", True]),
    (CONFIG, "tie_word_embeddings", ["false", "x", 2, [], {}]),
    (CONFIG, "model_type", ["gpt2", None, [], 3]),
    (SETTINGS, "added_tokens_decoder", [{"7": {"content": ""}}, {"x": {"content": "a"}}, [1], 3]),
    (CONFIG, "quantization_config", [{"quant_method": "x"}, [1], "x", 3]),
    (CONFIG, "quantization_config", [{"quant_method": "gptq", "bits": 3}]),
    *((CONFIG, key, NO_SIZE) for key in SIZES),
]
# What published files have beside a model's weights: it changes nothing, and no line names it.
LEFTOVERS = {
    "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 4, 4),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.0.self_attn.masked_bias": torch.tensor(-1e4),
    "model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4),
    "model.layers.0.self_attn.o_proj.bias": torch.zeros(64),
    "model.layers.9.mlp.up_proj.weight": torch.ones(4, 4),
    "model.mtp.fc.weight": torch.ones(4, 4),
    "mtp.layers.0.input_layernorm.weight": torch.ones(4),
    "model.none.weight": torch.ones(0, 4),
}
HOSTILE = [  # templates that would run code, or read what they are not given
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ messages.append(1) }}",
    "{{ x.y.z }}",
    "{% include 'MARK' %}",
    "{% if %}",
    "{{ raise_exception('\x1b[2J') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]
TEMPLATES = [*HOSTILE, "{{ 'a' * 10 ** 7 }}", "{{ messages | tojson }}", "", "\0", "\x1b[31m"]


def regex(kind: str, pattern: dict, **more) -> dict:
    return dict(type=kind, pattern=pattern) | more


def template(token: str, known: dict) -> dict:
    single = [dict(SpecialToken=dict(id=token, type_id=0))]
    return dict(type="TemplateProcessing", single=single, pair=[], special_tokens=known)


# Of tokenizer.json, which its library knows, in ways that it may not expect.
PARTS = {
    "normalizer": [
        dict(type="Precompiled", precompiled_charsmap=""),
        dict(type="Precompiled", precompiled_charsmap="AAAA"),
        dict(type="Precompiled", precompiled_charsmap="x"),
        dict(type="Prepend", prepend=""),
        regex("Replace", dict(Regex="(a*)*b"), content="x"),
        regex("Replace", dict(String=""), content="x" * 20),
        regex("Replace", dict(Regex="("), content=""),
        dict(type="Sequence", normalizers=[]),
        dict(type="NFKC"),
        dict(type="Nmt"),
    ],
    "pre_tokenizer": [
        dict(type="FixedLength", length=0),
        dict(type="FixedLength", length=-1),
        dict(type="FixedLength", length=2**63),
        dict(type="FixedLength", length=3),
        regex("Split", dict(Regex="."), behavior="Removed", invert=False),
        dict(type="Metaspace"),
        dict(type="Metaspace", replacement="", prepend_scheme="first", split=False),
        dict(type="Whitespace"),
    ],
    "decoder": [
        dict(type="Strip", content="h", start=0, stop=0),
        dict(type="Strip", content="h", start=0, stop=10**6),
        dict(type="Strip", content="h", start=10**6, stop=0),
        dict(type="CTC", pad_token="", word_delimiter_token="", cleanup=True),
        dict(type="WordPiece", prefix="", cleanup=True),
        dict(type="ByteFallback"),
        dict(type="Fuse"),
        regex("Replace", dict(String=""), content="x"),
    ],
    "post_processor": [
        template("<zz>", {}),
        template("<zz>", {"<zz>": {}}),
        template("A", {}),
        dict(type="BertProcessing", sep=["x", 10**6], cls=["x", 10**6]),
    ],
    "truncation": [dict(max_length=0, stride=9, strategy="LongestFirst", direction="Right")],
    "padding": [
        dict(
            strategy=dict(Fixed=10**6),
            direction="Left",
            pad_to_multiple_of=0,
            pad_id=0,
            pad_type_id=0,
            pad_token="x",
        )
    ],
    "model": [
        dict(type="WordLevel", vocab={}, unk_token="x"),
        dict(type="Unigram", vocab=[], unk_id=0),
        dict(type="BPE"),
    ],
}


# The checkpoints that are broken


def to_fp8(directory: Path) -> None:
    """A checkpoint as one of block-scaled FP8, which Qwen and DeepSeek publish."""
    held = load_file(directory / WEIGHTS)
    for name in [name for name in held if name.endswith("_proj.weight")]:
        scale = held[name].float().abs().amax() / 448
        held |= {
            name: (held[name].float() / scale).to(torch.float8_e4m3fn),
            f"{name}_scale_inv": scale.view(1, 1),
        }
    save_file(held, directory / WEIGHTS)
    rewrite(
        directory / CONFIG,
        quantization_config=dict(
            quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head"]
        ),
    )


def make_bases(root: Path) -> list[Path]:
    root.mkdir()
    torch.manual_seed(0)
    shape = dict(
        hidden_size=64,
        intermediate_size=64,
        head_dim=16,
        bos_token_id=1,
        eos_token_id=2,
        vocab_size=2048,
    )
    plain = make(root / "plain", **shape | dict(vocab_size=264, tie_word_embeddings=False))
    (root / "plain" / WEIGHTS).unlink()
    save_tensors(root / "plain", plain, shards=2)
    make(
        root / "qwen",
        "qwen3",
        **shape
        | dict(
            tie_word_embeddings=True,
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
    )
    write(root / "qwen", root / "gptq", 4, 32, False, act_order=True)
    write(root / "qwen", root / "gptq8", 8, -1, True)
    write(root / "qwen", root / "awq", 4, 32, False)
    change(root / "awq", dict(quant_method="awq", version="gemm"), **awq(root / "awq" / WEIGHTS))
    write(root / "qwen", root / "w4a16", 4, 32, False, form="compressed-tensors")
    to_fp8(shutil.copytree(root / "qwen", root / "fp8"))
    experts = shape | dict(num_local_experts=4, num_experts_per_tok=2)
    make(
        root / "gpt-oss",
        "gpt_oss",
        **experts | dict(sliding_window=5, swiglu_limit=7.0, swiglu_alpha=1.7),
    )
    make(
        root / "moe",
        "qwen3_moe",
        **experts
        | dict(
            moe_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            decoder_sparse_step=1,
        ),
    )
    bases = sorted(root.iterdir())
    for base in bases:
        config = read_json(base / CONFIG)
        if base.name == "plain":  # bytes as tokens, and a chat template
            with_json(base, config, eos_token=dict(content="</s>"))
            (base / TEMPLATE).write_text(
                "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<s>"
            )
        else:
            with_model(
                base,
                config,
                bos_token="<s>",
                add_bos_token=True,
                added_tokens_decoder={"2047": dict(content="<|im_end|>", special=True)},
            )
        put(
            base / GENERATION,
            b'{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "eos_token_id": [2]}',
        )
    return bases


# Mutations: each returns what it did, and True (must be refused), False (must change nothing) or
# None
Done = tuple[str, bool | None]


def change_json(rng: Random, path: Path) -> Done:
    """One value somewhere inside is replaced, removed, renamed or wrapped, or a key is added
    there."""
    held = read_json(path)
    value = rng.choice(VALUES)
    if rng.random() < 0.05:
        number = '{"a": 1' + "0" * 5000 + "}"
        text = rng.choice(
            ["[" * 10**5, "{", "", "[]", "null", '"x"', json.dumps(held)[:-1], number]
        )
        path.write_text(text)
        return f"the whole is {text[:20]!r}", True
    at, where = held, []
    while (
        not where
        or isinstance(at[where[-1]], (dict, list))
        and at[where[-1]]
        and rng.random() < 0.7
    ):
        at = at[where[-1]] if where else held
        key = rng.choice([*at] if isinstance(at, dict) else range(len(at)))
        where.append(key)
    how = rng.choice(["replace", "replace", "replace", "remove", "rename", "wrap", "add"])
    if how == "replace":
        at[key] = value
    elif how == "add":
        (at if isinstance(at, dict) else held)[rng.choice(KEYS)] = value
    elif how == "wrap":
        at[key] = rng.choice([{"x": at[key]}, [at[key]]])
    else:
        old = at.pop(key)
        if how == "rename" and isinstance(at, dict):
            at[str(key) + rng.choice(["s", "\x1b[2J", " "])] = old
    put(path, held)
    return f"{how} {where} {value if how in ('replace', 'add') else ''!r:.40}", None


def change_key(rng: Random, directory: Path) -> Done:
    file, key, values = rng.choice(WRONG)
    value = rng.choice(values)
    rewrite(directory / file, **{key: value})
    if (file, key) == (CONFIG, "eos_token_id"):  # read where the other file has none
        rewrite(directory / GENERATION, eos_token_id=None)
    return f"{file}: {key}={value!r:.40}", True


def change_bytes(rng: Random, path: Path) -> Done:
    held = path.read_bytes()
    how = rng.choice(["bits", "cut", "cut", "grow", "noise", "empty", "sparse"])
    at, noise, flipped = (
        rng.randrange(len(held)),
        rng.randbytes(rng.choice([1, 8, 64, 1000])),
        bytearray(held),
    )
    for _ in range(rng.choice([1, 1, 8, 64])):
        flipped[rng.randrange(len(held))] ^= 1 << rng.randrange(8)
    path.write_bytes(
        dict(
            bits=flipped,
            cut=held[:at],
            grow=held[:at] + noise + held[at:],
            noise=held[:at] + noise + held[at + len(noise) :],
            empty=b"",
            sparse=held,
        )[how]
    )
    if how == "sparse":
        os.truncate(path, 2**35)
    if path.suffix == ".safetensors":
        return how, how in ("empty", "cut", "sparse") or None
    files = CONFIG, TOKENIZER, PIECES, INDEX, GENERATION, SETTINGS
    return how, how == "sparse" or how == "empty" and path.name in files or None


def change_header(rng: Random, path: Path) -> Done:
    """A safetensors file's length of its header, or the header itself."""
    held = path.read_bytes()
    size = int.from_bytes(held[:8], "little")
    if rng.random() < 0.3:
        wrong = rng.choice(
            [0, 1, size - 1, size + 1, size * 2, 2**31, 2**40, 2**63, 2**64 - 1, len(held)]
        )
        path.write_bytes(wrong.to_bytes(8, "little") + held[8:])
        return f"header length {wrong}", wrong != size + 1 or None
    header = Path(path.parent, "header.tmp")
    header.write_bytes(held[8 : 8 + size].rstrip())
    said, _ = change_json(rng, header)
    text = header.read_bytes()
    header.unlink()
    path.write_bytes(len(text).to_bytes(8, "little") + text + held[8 + size :])
    return f"header: {said}", None


def change_tensor(rng: Random, path: Path) -> Done:
    """A tensor is gone, of another type or shape, or one too many; or as published files have
    them: more than the model reads, an index that names more, names without model."""
    held = load_file(path)
    name = rng.choice([name for name in held if held[name].numel() > 1])
    how = rng.choice(["gone", "shape", "type", "more", "nan", "leftovers", "index", "bare"])
    if how == "gone":
        del held[name]
    elif how == "shape":
        held[name] = rng.choice(
            [held[name].flatten()[:-1], held[name][None], held[name].flatten()[:1]]
        ).contiguous()
    elif how == "type":
        held[name] = torch.zeros(
            held[name].shape, dtype=rng.choice([torch.int8, torch.bool, torch.int64])
        )
    elif how == "nan":
        name = next(name for name in held if held[name].is_floating_point())
        held[name][:] = torch.nan
    elif how == "leftovers":
        names = rng.sample([*LEFTOVERS], rng.randrange(1, 4))
        held = {of: LEFTOVERS[of] for of in names} | held
    elif how == "index":  # as where a tensor was dropped as the files were written
        index = path.with_name(INDEX)
        places = (
            read_json(index)["weight_map"] if index.exists() else dict.fromkeys(held, path.name)
        )
        names = rng.sample([*LEFTOVERS, "lm_head.weight", "x"], 2)
        put(index, dict(weight_map=dict.fromkeys(names, path.name) | places))
    elif how == "bare":
        held = {of.removeprefix("model."): tensor for of, tensor in held.items()}
    else:
        held[
            rng.choice(["x", "\x1b]0;x\x07", "y" * 10**5, "model.layers.9.mlp.up_proj.weight"])
        ] = torch.ones(3)
    save_file(held, path)
    if how in ("more", "leftovers", "index", "bare"):
        return how, False
    return f"{how} {name}", None if how == "gone" and name.endswith("g_idx") else True


def change_kind(rng: Random, path: Path) -> Done:
    """Gone, a directory, or a link."""
    outside, inside = path.parent.with_name("outside"), path.with_name("content.bin")
    outside.mkdir(exist_ok=True)
    links = dict(
        dangling="nowhere", loop=path.name, outside=outside / "content", inside=inside.name
    )
    how = rng.choice(["directory", "gone", *links])
    path.rename(inside if how == "inside" else outside / "content")
    if how in links:
        path.symlink_to(links[how])
    elif how == "directory":
        path.mkdir()
    if how == "inside" or how == "outside" and path.suffix == ".safetensors":
        return how, False
    if how == "directory" or how == "outside":
        return how, True
    # The file is not there: some are needed.
    return how, None if path.name in (GENERATION, SETTINGS, TEMPLATE, INDEX) else True


def change_hostile(rng: Random, directory: Path) -> Done:
    """A pickle that makes a file once it is loaded, or an index that leads out."""
    outside = directory.with_name("outside")
    outside.mkdir(exist_ok=True)
    trap = f"cos\nmkdir\n(V{directory.parent / 'MARK'}\ntR.".encode()
    how = rng.choice(["pickle", "named", "absolute", "dots"])
    for file in directory.glob("*.safetensors*"):
        file.rename(outside / file.name)
    weights = next(outside.glob("*.safetensors")).name
    if how != "pickle":
        names = load_file(outside / weights)
        place = dict(
            named="pytorch_model.bin", absolute=str(outside / weights), dots=f"../outside/{weights}"
        )[how]
        put(directory / INDEX, dict(weight_map=dict.fromkeys(names, place)))
    put(directory / "pytorch_model.bin", trap)
    return how, True


def change_template(rng: Random, path: Path) -> Done:
    text = path.read_text()
    if rng.random() < 0.5:
        text = rng.choice(TEMPLATES)
    else:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            word = rng.choice(["{%", "}}", "{{", "|", "(", "'", "x", "%}", ""])
            text = text[:at] + word + text[at + rng.randrange(5) :]
    path.write_text(text.replace("MARK", str(path.parent.with_name("MARK"))))
    return repr(text)[:60], text in HOSTILE or None


def change_parts(rng: Random, path: Path) -> Done:
    key = rng.choice([key for key, values in PARTS.items() for _ in values])
    value = rng.choice(PARTS[key])
    rewrite(path, **{key: value})
    return f"{key}={value!r:.60}", None


def mutate(rng: Random, directory: Path) -> Done:
    file = rng.choice(sorted(directory.iterdir()))
    ways = [change_bytes, change_kind, change_hostile, change_key, change_key]
    ways += {".json": [change_json] * 6, ".safetensors": [change_header, change_tensor] * 2}.get(
        file.suffix, []
    )
    ways += {TEMPLATE: [change_template] * 4, TOKENIZER: [change_parts] * 8}.get(file.name, [])
    way = rng.choice(ways)
    place = directory if way in (change_key, change_hostile) else file
    said, refused = way(rng, place)
    return f"{way.__name__} {place.name} {said}", refused


# A trial


def run_limited(command: list[str], out: Path, err: Path) -> None:
    """generate.py or quantize.py in a forked child."""
    for stream, place in (sys.stdout, out), (sys.stderr, err):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.alarm(SECONDS + 10)
    sys.argv = command
    report_errors(generate.main if command[0] == "generate.py" else quantize.main)


def judge(code: int, out: str, err: str, expected: list | None, refused: bool | None) -> str:
    """The class, "bad" with the reason. expected: the tokens of the checkpoint as it was; None for
    quantize.py."""
    if code in (-signal.SIGALRM, -signal.SIGXCPU):
        return "bad: hang"
    if code not in (0, 2):
        return f"bad: code {code}"
    if code == 2:
        if out.strip() or err.count("\n") != 1 or not err[:-1].isprintable() or len(err) > 1100:
            return "bad: more than one line"
        return "refused" if refused is not False else "bad: refused what changes nothing"
    if refused:
        return "bad: accepted"
    if "Traceback" in err:
        return "bad: traceback"
    if expected is None or json.loads(out)["samples"][0]["tokens"] == expected:
        return "same text"
    return "other text" if refused is None else "bad: other text"


class Fuzzer:
    """One trial after the other, in a directory of its own."""

    def __init__(self, root: Path):
        self.bases, self.root, self.expected = make_bases(root / "bases"), root, {}
        for base in self.bases:
            for command in self.commands(base):
                _, _, err, out = self.run(base, command)
                assert out or command[0] == "quantize.py", (base, command, err)
                self.expected[base.name, *command[:2]] = (
                    json.loads(out)["samples"][0]["tokens"] if out else None
                )

    def commands(self, base: Path) -> list[list[str]]:
        """What is run: text, a chat where there is a template, and quantize.py where there is
        something to quantize."""
        common = f"--checkpoint {self.root}/in --device cpu"
        text = f"--json {common} -p Hello --seed 1 --max-new-tokens 4 --quiet"
        lines = [f"generate.py {text}"]
        if (base / TEMPLATE).exists():
            lines.append(f"generate.py --chat {text}")
        if base.name in ("plain", "qwen"):
            lines.append(f"quantize.py --out {self.root}/out {common} --group-size 32")
        return [line.split() for line in lines]

    def run(
        self, base: Path, command: list[str], rng: Random | None = None
    ) -> tuple[str, str, str, str]:
        """The class, what was done, what was printed on stderr and on stdout."""
        for name in ("in", "outside", "out"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        shutil.copytree(base, self.root / "in")
        said, refused = mutate(rng, self.root / "in") if rng else ("nothing", None)
        quantizes = command[0] == "quantize.py"
        if "--chat" not in command and "change_template" in said:
            refused = None  # which only a chat renders
        streams = self.root / "stdout", self.root / "stderr"
        child = get_context("fork").Process(target=run_limited, args=(command, *streams))
        child.start()
        child.join()
        code = child.exitcode
        out, err = (stream.read_text(errors="backslashreplace") for stream in streams)
        left = {path.name for path in self.root.iterdir()} - {
            "bases",
            "in",
            "outside",
            "stdout",
            "stderr",
        }
        if quantizes and code == 2:
            err = "".join(err.splitlines(True)[-1:])  # progress comes before
        kind = judge(code, out, err, self.expected.get((base.name, *command[:2])), refused)
        if "leftovers" in said and "left out" in err:
            kind = "bad: a line for what is in many files"
        if left != ({"out"} if quantizes and code == 0 else set()):
            kind = f"bad: left {left}"
        return kind, said, err, out

    def trial(self, seed: int) -> tuple[str, str, str]:
        rng = Random(seed)
        base = rng.choice(self.bases)
        command = rng.choice(self.commands(base))
        kind, said, err, _ = self.run(base, command, rng)
        return kind, f"{base.name} {' '.join(command[:2])}: {said}", err


# What config.json means


ROPE_TYPES = "default", "linear", "yarn", "llama3", "longrope", "proportional"
FEW = [None, 0, 0.0, 1, 0.5, 2.0, meaning.GONE]


def draw_rope(rng: Random, kind: str) -> dict:
    """Parameters of one rope, with some missing, null or 0."""
    names, nulls = ["rope_type"], ["factor", "attention_factor", "rope_theta"]
    if kind not in meaning.BY_LAYER:  # of which transformers does not read the two
        names, nulls = ["rope_type", "rope_type", "type"], [*nulls, "truncate"]
    rope = {rng.choice(names): rng.choice(ROPE_TYPES)}
    rope |= dict(factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0)
    rope |= dict(high_freq_factor=4.0, short_factor=[1.5] * 8, long_factor=[2.5] * 8)
    for key in rng.sample(["mscale", "mscale_all_dim", "beta_fast", "beta_slow"], 2):
        rope[key] = rng.choice(FEW)
    more = dict(rope_theta=rng.choice([5e4, meaning.GONE]), llama_4_scaling_beta=0.0)
    if rng.random() < 0.2:
        more[rng.choice(nulls)] = None
    if rng.random() < 0.2:
        more[rng.choice(list(rope))] = meaning.GONE
    return meaning.changed(rope, more)


def draw_config(rng: Random) -> dict:
    """A config.json of any family, perhaps within that of a model that also sees."""
    whole = rng.choice([None, None, *meaning.WRAPPERS])
    kind = rng.choice(meaning.WRAPPERS[whole] if whole else [*meaning.FAMILIES])
    config = meaning.SHAPE | meaning.MORE.get(kind, {}) | dict(model_type=kind)
    changes = dict(tie_word_embeddings=rng.choice([True, False, None, meaning.GONE]))
    keys = [*meaning.KEYS, *meaning.ZERO, "rope_theta", "logits_scaling"]
    for key in rng.sample(keys, rng.randrange(4)):
        changes[key] = rng.choice([None, 0, meaning.GONE, meaning.GONE])
    for key in ("rope_scaling", "rope_parameters"):
        by_layer = {of: draw_rope(rng, kind) for of in ("full_attention", "sliding_attention")}
        layers = kind in meaning.BY_LAYER and key == "rope_parameters"
        rope = by_layer if layers else draw_rope(rng, kind)
        changes[key] = rng.choice([rope, rope, None, {}, meaning.GONE, meaning.GONE])
    config = meaning.changed(config, changes)
    if not whole:
        return config
    above = meaning.changed(config, {}) if rng.random() < 0.3 else {}
    if rng.random() < 0.5:
        above["tie_word_embeddings"] = rng.choice([True, False])
    return above | dict(model_type=whole, text_config=config)


def judge_meaning(seed: int) -> str:
    """The class of a trial of draw_config(), "bad" with the reason."""
    hf = draw_config(Random(seed))
    try:
        ours = meaning.by_us(hf)
    except ValueError as error:
        return "refused" if str(error).isprintable() else f"bad: {error!r}"
    except Exception as error:
        return f"bad: {error!r} {json.dumps(hf)}"
    try:
        theirs = meaning.by_transformers(hf)
    except Exception:  # many kinds; each means that it does not read the file
        return "not read by transformers"
    if meaning.is_same(ours, theirs):
        return "same meaning"
    parts = [key for key in theirs if not meaning.is_same(ours.get(key, ""), theirs[key])]
    return f"bad: other {parts}: {json.dumps(hf)}"


# What a chat template makes of messages


TOOL_TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ bos_token }}{{ m.role }}
  {%- if m.name is defined %} by {{ m.name }}{% endif %}
  {%- if "tool_calls" in m %}{% for call in m.tool_calls %} {{ call | tojson }}{% endfor %}{% endif %}
  {%- if m.content is string %}: {{ m.content }}
  {%- else %}{% for part in m.content or [] %}: {{ part.text }}{% endfor %}{% endif %}
{%- endfor %}
"""


def draw_messages(rng: Random) -> list[dict]:
    """Turns of a chat: contents that are texts, text parts or null beside a call of a tool, and
    other keys that are there, missing or null."""
    messages = []
    for turn in range(rng.choice([1, 3, 5])):
        texts = rng.choices(["a", " b\n", 'It\'s "<c>"', "é"], k=2)
        parts = [dict(type="text", text=text) for text in texts]
        message = dict(role=("user", "assistant")[turn % 2], content=rng.choice([texts[0], parts]))
        calls = [dict(type="function", function=dict(name="find", arguments=dict(of="é")))]
        if message["role"] == "assistant" and rng.random() < 0.3:
            message |= dict(content=rng.choice([None, texts[0]]), tool_calls=calls)
        for key in rng.sample(["name", "tool_calls", "reasoning_content", "documents"], 2):
            message.setdefault(key, None)
        messages.append(message)
    return messages


def judge_messages(seed: int) -> str:
    """The class of a trial of draw_messages(), "bad" with the reason. Right is what transformers
    makes of them without the nulls."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rng = Random(seed)
    messages = draw_messages(rng)
    tools = rng.choice([None, None, [], [dict(type="function", function=dict(name="find"))]])
    options = dict(add_generation_prompt=rng.random() < 0.8)
    if rng.random() < 0.3:
        options |= rng.choice(
            [dict(enable_thinking=False), dict(bos_token="<b>"), dict(tools=tools)]
        )
    places = sorted(CHATS.glob("*.jinja"))
    template = rng.choice([TOOL_TEMPLATE, *(path.read_text() for path in places)])
    tokenizer = open_tokenizer(TINY)
    tokenizer.templates = dict(default=template)
    tokenizer.template_options = options
    there = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    values = tokenizer.special_tokens | dict(tools=tools) | options
    try:
        theirs = render_jinja_template([there], chat_template=template, **values)[0][0]
    except Exception:  # the template's own
        theirs = None
    if theirs and any(repr(message.get("content")) in theirs for message in there):
        theirs = None  # a list of parts in the place of a text
    given = json.dumps([messages, tools])
    try:
        ours = tokenizer.render(messages, tools)
    except ValueError as error:
        is_expected = theirs is None or "it reads no tools" in str(error)
        return "refused" if is_expected else f"bad: {error!r} {given}"
    except Exception as error:
        return f"bad: {error!r} {given}"
    if json.dumps([messages, tools]) != given:
        return f"bad: changed messages: {given}"
    if theirs is None:
        return "not read by transformers"
    return "same chat" if ours == theirs else f"bad: {ours!r} for {theirs!r} of {given}"


def judge_by_transformers(first: int, trials: int) -> Counter:
    try:
        import transformers
    except ImportError:
        print("what files and messages mean is not judged, as transformers is not installed")
        return Counter()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    counts = Counter()
    for seed in range(first, first + trials):
        for kind in judge_meaning(seed), judge_messages(seed):
            counts[kind.partition(":")[0]] += 1
            if kind.startswith("bad"):
                print(f"seed {seed}: {kind}", flush=True)
    return counts


SABOTAGES = {  # a check -> what switches it off, and the seed of a trial that must be bad then
    "hub.checkpoint.is_inside": (lambda path: True, 1058),
    "generate.Sampling.__post_init__": (lambda self: None, 1006),
    "hub.tokenizer.Tokenizer.check": (lambda self, key, ids: None, 1014),
    "hub.tokenizer.silenced": (reading, 6110),
    "jinja2.sandbox.ImmutableSandboxedEnvironment": (Environment, 13559),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fork keeps no other thread
    counts, begun = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        fuzzer = Fuzzer(Path(directory))
        for seed in range(args.seed, args.seed + args.trials):
            kind, said, err = fuzzer.trial(seed)
            counts[kind.partition(":")[0]] += 1
            if kind.startswith("bad"):
                print(f"seed {seed}: {kind}: {said}\n    {err[-1500:].strip()}", flush=True)
        for check, (off, wrong) in SABOTAGES.items():
            with patch(check, off):
                kind, said, _ = fuzzer.trial(wrong)
            if not kind.startswith("bad"):
                print(f"without {check} seed {wrong} is not bad: {kind}: {said}")
                counts["bad"] += 1
    counts += judge_by_transformers(args.seed, args.trials)
    print(
        f"{args.trials} trials in {time.monotonic() - begun:.0f} s: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    )
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())

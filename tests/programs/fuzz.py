"""
Breaks checkpoints at random and watches what the commands make of them.

    python tests/fuzz.py --trials 20000
    python tests/fuzz.py --trials 1 --seed 1234              # one trial again; what is bad is shown

A trial copies a small checkpoint, mutates one of its files, and runs generate.py or quantize.py in
a child forked from this process, which has imported PyTorch, with limits on time and memory. The
judge puts it into one of these classes:

    refused      exit code 2, one printable line on stderr, nothing on stdout, no file left
    same text    the mutation changed nothing that is generated
    other text   it did, by changing data: weights, tokens, settings
    bad          all else: a traceback, a signal, a hang, several lines; or accepted although it must be refused

Some mutations must be refused (a size of -1, a pipe, a link out of the directory), some must change
nothing (weights that are a link); of the others the judge only wants one of the first three. In the
end each of some checks is switched off for a trial, which must be bad then.
"""

import argparse
import json
import math
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from random import Random
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import generate  # noqa: E402
import quantize  # noqa: E402
from cli.errors import report_errors  # noqa: E402
from helpers import (
    awq,
    change,
    make,
    put,
    read_json,
    rewrite,
    save_tensors,
    with_json,
    with_model,  # noqa: E402
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
    {"-:" + ".?" * 40 + "!": {}},
    ["re:" + "(.|.)" * 40 + "!"],
    {"": {}},
]
# Keys that a file may lack, and that are read.
KEYS = """
    config_groups method quant_method dynamic ignore modules_to_not_convert ignored_layers sparsity_config
    transform_config kv_cache_scheme activation_scheme weight_block_size targets input_activations actorder
    group_size desc_act format checkpoint_format strategy lm_head quantization_config compression_config
    rope_scaling rope_parameters rope_type sliding_window head_dim partial_rotary_factor tie_word_embeddings
    eos_token_id bos_token_id eos_token bos_token chat_template add_bos_token added_tokens_decoder normalizer
    truncation
""".split()
NO_SIZE = f'null true 0 -1 1e300 NaN Infinity "2" "x" [] {{}} [2] 1000000000000 {10**400}'
WRONG = f"""
config.json eos_token_id "2" 99999 -1 2.5 "</s>" true [99999] [[1]] {{}}
generation_config.json eos_token_id "2" 99999 -1 2.5 "</s>" true [99999] [[1]] {{}}
generation_config.json temperature true -1 101 "x" NaN
generation_config.json top_k true -5 0.5 "x"
generation_config.json top_p true 0 1e-46 2 NaN "x"
generation_config.json min_p true -1 1.5 NaN "x"
config.json head_dim 7 -2 "x" true
config.json tie_word_embeddings "false" "x" 2 [] {{}}
config.json model_type "gpt2" null [] 3
tokenizer_config.json added_tokens_decoder {{"7":{{"content":""}}}} {{"x":{{"content":"a"}}}} [1] 3
config.json quantization_config {{"quant_method":"x"}} {{"quant_method":"gptq","bits":3}} [1] "x" 3
config.json hidden_size {NO_SIZE}
config.json num_hidden_layers {NO_SIZE}
config.json num_attention_heads {NO_SIZE}
config.json intermediate_size {NO_SIZE}
config.json vocab_size {NO_SIZE}
config.json max_position_embeddings {NO_SIZE}
config.json rms_norm_eps {NO_SIZE}
""".strip().splitlines()  # a file, a key whose limits are known, and values that must be refused
TEMPLATES = [
    "{{ 'a' * 10 ** 13 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ [1] | slice(10 ** 10) | list }}",
    "{{ lipsum(n=10 ** 7) }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ x.y.z }}",
    "{% if %}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ 'a' * 10 ** 7 }}",
    "{{ messages | tojson }}",
    "",
    "\0",
    "\x1b[31m",
]
PARTS = """
normalizer {"type": "Precompiled", "precompiled_charsmap": ""}
normalizer {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
normalizer {"type": "Precompiled", "precompiled_charsmap": "x"}
normalizer {"type": "Prepend", "prepend": ""}
normalizer {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x"}
normalizer {"type": "Replace", "pattern": {"String": ""}, "content": "xxxxxxxxxxxxxxxxxxxx"}
normalizer {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}
normalizer {"type": "Sequence", "normalizers": []}
normalizer {"type": "NFKC"}
normalizer {"type": "Nmt"}
pre_tokenizer {"type": "FixedLength", "length": 0}
pre_tokenizer {"type": "FixedLength", "length": -1}
pre_tokenizer {"type": "FixedLength", "length": 9223372036854775808}
pre_tokenizer {"type": "FixedLength", "length": 3}
pre_tokenizer {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Removed", "invert": false}
pre_tokenizer {"type": "Metaspace"}
pre_tokenizer {"type": "Metaspace", "replacement": "", "prepend_scheme": "first", "split": false}
pre_tokenizer {"type": "Whitespace"}
decoder {"type": "Strip", "content": "h", "start": 0, "stop": 0}
decoder {"type": "Strip", "content": "h", "start": 0, "stop": 1000000}
decoder {"type": "Strip", "content": "h", "start": 1000000, "stop": 0}
decoder {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true}
decoder {"type": "WordPiece", "prefix": "", "cleanup": true}
decoder {"type": "ByteFallback"}
decoder {"type": "Fuse"}
decoder {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
post_processor {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<zz>", "type_id": 0}}], "pair": [],\
 "special_tokens": {}}
post_processor {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<zz>", "type_id": 0}}], "pair": [],\
 "special_tokens": {"<zz>": {}}}
post_processor {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "A", "type_id": 0}}], "pair": [],\
 "special_tokens": {}}
post_processor {"type": "BertProcessing", "sep": ["x", 1000000], "cls": ["x", 1000000]}
truncation {"max_length": 0, "stride": 9, "strategy": "LongestFirst", "direction": "Right"}
padding {"strategy": {"Fixed": 1000000}, "direction": "Left", "pad_to_multiple_of": 0,\
 "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
model {"type": "WordLevel", "vocab": {}, "unk_token": "x"}
model {"type": "Unigram", "vocab": [], "unk_id": 0}
model {"type": "BPE"}
# of tokenizer.json, which its library knows, in ways that it may not expect
""".strip().splitlines()


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
    while not where or isinstance(at[key], (dict, list)) and at[key] and rng.random() < 0.7:
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
    file, key, *values = rng.choice(WRONG).split()
    value = json.loads(rng.choice(values))
    rewrite(directory / file, **{key: value})
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
    """A tensor is gone, of another type or shape, or one too many."""
    held = load_file(path)
    name = rng.choice([name for name in held if held[name].numel() > 1])
    how = rng.choice(["gone", "shape", "type", "more", "nan"])
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
    else:
        held[
            rng.choice(["x", "\x1b]0;x\x07", "y" * 10**5, "model.layers.9.mlp.up_proj.weight"])
        ] = torch.ones(3)
    save_file(held, path)
    unread = (
        how == "gone"
        and name.endswith("g_idx")
        or how == "more"
        and Path(path.parent, INDEX).exists()
    )
    return f"{how} {name}", not unread or None


def change_kind(rng: Random, path: Path) -> Done:
    """No regular file any more, gone, or a link."""
    outside, inside = path.parent.with_name("outside"), path.with_name("content.bin")
    outside.mkdir(exist_ok=True)
    links = dict(
        device="/dev/zero",
        full="/dev/full",
        dangling="nowhere",
        loop=path.name,
        outside=outside / "content",
        inside=inside.name,
    )
    how = rng.choice(["pipe", "directory", "socket", "gone", *links])
    path.rename(inside if how == "inside" else outside / "content")
    if how in links:
        path.symlink_to(links[how])
    elif how == "directory":
        path.mkdir()
    elif how != "gone":
        os.mknod(path, 0o600 | (stat.S_IFIFO if how == "pipe" else stat.S_IFSOCK))
    if how == "inside" or how == "outside" and path.suffix == ".safetensors":
        return how, False
    return how, None if how == "gone" and path.name in (GENERATION, SETTINGS, TEMPLATE) else True


def change_template(rng: Random, path: Path) -> Done:
    text = path.read_text()
    if rng.random() < 0.5:  # the first ones take 3 s each: they are rarer
        text = rng.choice(TEMPLATES[5:] if rng.random() < 0.9 else TEMPLATES)
    else:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            word = rng.choice(["{%", "}}", "{{", "|", "(", "'", "x", "%}", ""])
            text = text[:at] + word + text[at + rng.randrange(5) :]
    path.write_text(text)
    return repr(text)[:60], text in TEMPLATES[:6] or None


def change_parts(rng: Random, path: Path) -> Done:
    key, value = rng.choice(PARTS).split(" ", 1)
    rewrite(path, **{key: json.loads(value)})
    return f"{key}={value:.60}", None


def mutate(rng: Random, directory: Path) -> Done:
    file = rng.choice(sorted(directory.iterdir()))
    ways = [change_bytes, change_kind, change_key, change_key]
    ways += {".json": [change_json] * 6, ".safetensors": [change_header, change_tensor] * 2}.get(
        file.suffix, []
    )
    ways += {TEMPLATE: [change_template] * 4, TOKENIZER: [change_parts] * 8}.get(file.name, [])
    way = rng.choice(ways)
    place = directory if way is change_key else file
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
        copied = GENERATION, TOKENIZER, PIECES, SETTINGS, TEMPLATE, "eos_token_id"
        if quantizes and any(name in said for name in copied):
            refused = None  # quantize.py copies these and does not read them
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
        if left != ({"out"} if quantizes and code == 0 else set()):
            kind = f"bad: left {left}"
        return kind, said, err, out

    def trial(self, seed: int) -> tuple[str, str, str]:
        rng = Random(seed)
        base = rng.choice(self.bases)
        command = rng.choice(self.commands(base))
        kind, said, err, _ = self.run(base, command, rng)
        return kind, f"{base.name} {' '.join(command[:2])}: {said}", err


SABOTAGES = {  # a check -> what switches it off, and the seed of a trial that must be bad then
    "vet.is_inside": (lambda path: True, 1058),
    "vet.is_file": (lambda path, most=None, inside=True: path.exists(), 1036),
    "sampling.Sampling.__post_init__": (lambda self: None, 1020),
    "vet.vet_tokens": (lambda key, ids, vocab_size: None, 1048),
    "checkpoint.refuse_surplus": (lambda files, checkpoint: None, 1117),
    "vet.silenced": (nullcontext, 1096),
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
    print(
        f"{args.trials} trials in {time.monotonic() - begun:.0f} s: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    )
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())

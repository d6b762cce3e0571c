"""
Breaks checkpoints at random and watches what the commands make of them.

    python tests/fuzz.py --trials 20000
    python tests/fuzz.py --trials 1 --seed 1234 --show       # one trial again, with what it printed
    python tests/fuzz.py --trials 300 --sabotage links       # a check is switched off; the judge must find that

A trial copies a small checkpoint, mutates one of its files, and runs generate.py or quantize.py in a child forked from
this process, which has imported PyTorch, with limits on time and memory. The judge puts it into one of these classes:

    refused      exit code 2, one printable line on stderr, nothing on stdout, no file left
    same text    the mutation changed nothing that is generated
    other text   it did, by changing data: weights, tokens, settings
    bad          all else: a traceback, a signal, a hang, several lines; or accepted although it must be refused

Some mutations must be refused (a size of -1, a pipe, a link out of the directory), some must change nothing (weights
that are a link); of the others the judge only wants one of the first three.
"""
import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import checkpoint  # noqa: E402
import generate  # noqa: E402
import guard  # noqa: E402
import quantize  # noqa: E402
import sampling  # noqa: E402
from cli.errors import report_errors  # noqa: E402
from helpers import awq, change, make, with_json, with_model, write  # noqa: E402

SECONDS, MEMORY = 20, 2 ** 32  # of a trial: CPU time, and address space beyond what the parent has
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER, PIECES, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
         "max_position_embeddings", "rms_norm_eps"]
NO_SIZE = [None, True, 0, -1, 1e300, math.nan, math.inf, "2", "x", [], {}, [2], 10 ** 12, 10 ** 400]
VALUES = [None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e-300, 1e300, math.nan, math.inf, 2 ** 31, 2 ** 63, 10 ** 12,
          10 ** 400, "", "x", "2", "<s>", "\x1b]0;x\x07\n", "\ud800", "\u202e", "a" * 10 ** 5, [], [[]], [None], {},
          {"a": {"b": []}}, ["x"] * 100, {"-:" + ".?" * 40 + "!": {}}, ["re:" + "(.|.)" * 40 + "!"], {"": {}}]
# Keys that a file may lack, and that are read.
KEYS = """
    config_groups method quant_method dynamic ignore modules_to_not_convert ignored_layers sparsity_config
    transform_config kv_cache_scheme activation_scheme weight_block_size targets input_activations actorder
    group_size desc_act format checkpoint_format strategy lm_head quantization_config compression_config
    rope_scaling rope_parameters rope_type sliding_window head_dim partial_rotary_factor tie_word_embeddings
    eos_token_id bos_token_id eos_token bos_token chat_template add_bos_token added_tokens_decoder normalizer
    truncation
""".split()
NO_TOKEN = ["2", 99999, -1, 2.5, "</s>", True, [99999], [[1]], {}]
NO_SAMPLING = dict(temperature=[True, -1, 101, "x", math.nan], top_k=[True, -5, 0.5, "x"],
                   top_p=[True, 0, 1e-46, 2, math.nan, "x"], min_p=[True, -1, 1.5, math.nan, "x"])
TEMPLATES = ["{{ 'a' * 10 ** 13 }}", "{{ 10 ** (10 ** 10) }}", "{{ [1] | slice(10 ** 10) | list }}",
             "{{ lipsum(n=10 ** 7) }}",
             "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
             "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__ }}", "{{ x.y.z }}", "{% if %}",
             "{{ raise_exception('\x1b[2J') }}", "{{ 'a' * 10 ** 7 }}", "{{ messages | tojson }}", "", "\0", "\x1b[31m"]
PARTS = dict(
    normalizer=[dict(type="Precompiled", precompiled_charsmap=x) for x in ("", "AAAA", "x")] + [
        dict(type="Prepend", prepend=""), dict(type="Replace", pattern=dict(Regex="(a*)*b"), content="x"),
        dict(type="Replace", pattern=dict(String=""), content="x" * 99), dict(type="Sequence", normalizers=[]),
        dict(type="Replace", pattern=dict(Regex="("), content=""), dict(type="NFKC"), dict(type="Nmt")],
    pre_tokenizer=[dict(type="FixedLength", length=x) for x in (0, -1, 2 ** 63, 3)] + [
        dict(type="Split", pattern=dict(Regex="."), behavior="Removed", invert=False), dict(type="Metaspace"),
        dict(type="Metaspace", replacement="", prepend_scheme="first", split=False), dict(type="Whitespace")],
    decoder=[dict(type="Strip", content="h", start=x, stop=y) for x in (0, 10 ** 6) for y in (0, 10 ** 6)] + [
        dict(type="CTC", pad_token="", word_delimiter_token="", cleanup=True),
        dict(type="WordPiece", prefix="", cleanup=True), dict(type="ByteFallback"), dict(type="Fuse"),
        dict(type="Replace", pattern=dict(String=""), content="x")],
    post_processor=[dict(type="TemplateProcessing", single=[dict(SpecialToken=dict(id=name, type_id=0))], pair=[],
                         special_tokens=special) for name in ("<zz>", "A") for special in ({}, {"<zz>": {}})] + [
        dict(type="BertProcessing", sep=["x", 10 ** 6], cls=["x", 10 ** 6])],
    truncation=[dict(max_length=0, stride=9, strategy="LongestFirst", direction="Right")],
    padding=[dict(strategy=dict(Fixed=10 ** 6), direction="Left", pad_to_multiple_of=0, pad_id=0, pad_type_id=0,
                  pad_token="x")],
    model=[dict(type="WordLevel", vocab={}, unk_token="x"), dict(type="Unigram", vocab=[], unk_id=0), dict(type="BPE")])


# The checkpoints that are broken


def rewrite(path: Path, **changes) -> None:
    """Keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps(dict(metadata={}, weight_map=places)))


def to_fp8(directory: Path) -> None:
    """A checkpoint as one of block-scaled FP8, which Qwen and DeepSeek publish."""
    held = load_file(directory / WEIGHTS)
    for name in [name for name in held if name.endswith("_proj.weight")]:
        scale = held[name].float().abs().amax() / 448
        held[name + "_scale_inv"] = scale.view(1, 1)
        held[name] = (held[name].float() / scale).to(torch.float8_e4m3fn)
    save_file(held, directory / WEIGHTS)
    rewrite(directory / CONFIG, quantization_config=dict(
        quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head"]))


def make_bases(root: Path) -> list[Path]:
    root.mkdir()
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=64, head_dim=16, bos_token_id=1, eos_token_id=2, vocab_size=2048)
    make(root / "plain", **shape | dict(vocab_size=264, tie_word_embeddings=False))
    make(root / "qwen", "qwen3", **shape | dict(tie_word_embeddings=True, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)))
    write(root / "qwen", root / "gptq", 4, 32, False, act_order=True)
    write(root / "qwen", root / "gptq8", 8, -1, True)
    write(root / "qwen", root / "awq", 4, 32, False)
    change(root / "awq", dict(quant_method="awq", version="gemm"), **awq(root / "awq" / WEIGHTS))
    write(root / "qwen", root / "w4a16", 4, 32, False, form="compressed-tensors")
    shutil.copytree(root / "qwen", root / "fp8")
    to_fp8(root / "fp8")
    shard(root / "plain")
    bases = sorted(path for path in root.iterdir() if path.is_dir())
    for base in bases:
        config = json.loads((base / CONFIG).read_text())
        if base.name == "plain":  # bytes as tokens, and a chat template
            with_json(base, config, eos_token=dict(content="</s>"))
            (base / TEMPLATE).write_text(
                "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<s>")
        else:
            with_model(base, config, bos_token="<s>", add_bos_token=True, added_tokens_decoder={
                "2047": dict(content="<|im_end|>", special=True)})
        (base / GENERATION).write_text(json.dumps(dict(temperature=0.7, top_k=5, top_p=0.9, eos_token_id=[2])))
    return bases


# Mutations: each returns what it did, and True (must be refused), False (must change nothing) or None


def change_json(rng: random.Random, path: Path) -> tuple[str, bool | None]:
    """One value somewhere inside is replaced, removed, renamed or wrapped, or a key is added there."""
    held = json.loads(path.read_text())
    value = rng.choice(VALUES)
    if rng.random() < 0.05:
        number = '{"a": 1' + "0" * 5000 + "}"
        text = rng.choice(["[" * 10 ** 5, "{", "", "[]", "null", '"x"', json.dumps(held)[:-1], number])
        path.write_text(text)
        return f"the whole is {text[:20]!r}", True
    at, where = held, []
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        where.append(key)
        if not isinstance(at[key], (dict, list)) or not at[key] or rng.random() < 0.3:
            break
        at = at[key]
    how = rng.choice(["replace", "replace", "replace", "remove", "rename", "wrap", "add"])
    if how == "replace":
        at[key] = value
    elif how == "add":
        (at if isinstance(at, dict) else held)[rng.choice(KEYS)] = value
    elif how == "wrap":
        at[key] = {"x": at[key]} if rng.random() < 0.5 else [at[key]]
    else:
        old = at.pop(key)
        if how == "rename" and isinstance(at, dict):
            at[str(key) + rng.choice(["s", "\x1b[2J", " "])] = old
    path.write_text(json.dumps(held))
    return f"{how} {where} {value if how in ('replace', 'add') else ''!r:.40}", None


def change_key(rng: random.Random, directory: Path) -> tuple[str, bool]:
    """A value that must be refused, of a key whose limits are known."""
    file, key, values = rng.choice(
        [(CONFIG, key, NO_SIZE) for key in SIZES] + [(GENERATION, *item) for item in NO_SAMPLING.items()]
        + [(CONFIG, "eos_token_id", NO_TOKEN), (GENERATION, "eos_token_id", NO_TOKEN),
           (CONFIG, "head_dim", [7, -2, "x", True]),
           (CONFIG, "tie_word_embeddings", ["false", "x", 2, [], {}]), (CONFIG, "model_type", ["gpt2", None, [], 3]),
           (SETTINGS, "added_tokens_decoder", [{"7": dict(content="")}, {"x": dict(content="a")}, [1], 3]),
           (CONFIG, "quantization_config", [dict(quant_method="x"), dict(quant_method="gptq", bits=3), [1], "x", 3])])
    value = rng.choice(values)
    rewrite(directory / file, **{key: value})
    return f"{file}: {key}={value!r:.40}", True


def change_bytes(rng: random.Random, path: Path) -> tuple[str, bool | None]:
    held = bytearray(path.read_bytes())
    how = rng.choice(["bits", "cut", "cut", "grow", "zeros", "noise", "empty", "sparse", "swap"])
    at = rng.randrange(len(held))
    if how == "bits":
        for _ in range(rng.choice([1, 1, 8, 64])):
            held[rng.randrange(len(held))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del held[at:]
    elif how == "grow":
        held[at:at] = rng.randbytes(rng.choice([1, 8, 1000]))
    elif how in ("zeros", "noise"):
        n = min(rng.choice([1, 8, 64, 1000]), len(held) - at)
        held[at:at + n] = bytes(n) if how == "zeros" else rng.randbytes(n)
    elif how == "swap":
        held = held[at:] + held[:at]
    path.write_bytes(b"" if how == "empty" else bytes(held))
    if how == "sparse":
        os.truncate(path, 2 ** 35)
    refused = how in ("empty", "cut") and path.suffix == ".safetensors" or how == "sparse" or (
        how == "empty" and path.name in (CONFIG, TOKENIZER, PIECES, INDEX, GENERATION, SETTINGS))
    return how, refused or None


def change_header(rng: random.Random, path: Path) -> tuple[str, bool | None]:
    """A safetensors file's length of its header, or the header itself."""
    held = path.read_bytes()
    size = int.from_bytes(held[:8], "little")
    if rng.random() < 0.3:
        wrong = rng.choice([0, 1, size - 1, size + 1, size * 2, 2 ** 31, 2 ** 40, 2 ** 63, 2 ** 64 - 1, len(held)])
        path.write_bytes(wrong.to_bytes(8, "little") + held[8:])
        return f"header length {wrong}", True if wrong not in (size + 1,) else None
    header = Path(path.parent, "header.tmp")
    header.write_bytes(held[8:8 + size].rstrip())
    said, _ = change_json(rng, header)
    text = header.read_bytes()
    header.unlink()
    path.write_bytes(len(text).to_bytes(8, "little") + text + held[8 + size:])
    return f"header: {said}", None


def change_tensor(rng: random.Random, path: Path) -> tuple[str, bool]:
    """A tensor is gone, of another type or shape, or one too many."""
    held = load_file(path)
    name = rng.choice([name for name in held if held[name].numel() > 1])
    how = rng.choice(["gone", "shape", "type", "more", "nan"])
    if how == "gone":
        del held[name]
    elif how == "shape":
        held[name] = rng.choice([held[name].flatten()[:-1], held[name][None], held[name].flatten()[:1]]).contiguous()
    elif how == "type":
        held[name] = torch.zeros(held[name].shape, dtype=rng.choice([torch.int8, torch.bool, torch.int64]))
    elif how == "nan":
        name = next(name for name in held if held[name].is_floating_point())
        held[name][:] = torch.nan
    else:
        held[rng.choice(["x", "\x1b]0;x\x07", "y" * 10 ** 5, "model.layers.9.mlp.up_proj.weight"])] = torch.ones(3)
    save_file(held, path)
    unread = how == "gone" and name.endswith("g_idx") or how == "more" and Path(path.parent, INDEX).exists()
    return f"{how} {name}", None if unread else True


def change_kind(rng: random.Random, path: Path) -> tuple[str, bool | None]:
    """No regular file any more, gone, or a link."""
    outside = path.parent.with_name("outside")
    outside.mkdir(exist_ok=True)
    shutil.copy(path, outside / "content")
    path.unlink()
    how = rng.choice(["pipe", "directory", "device", "full", "dangling", "loop", "outside", "socket", "inside", "gone"])
    if how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    elif how == "inside":
        (outside / "content").rename(path.parent / "content.bin")
        path.symlink_to("content.bin")
    elif how == "socket":
        import socket
        socket.socket(socket.AF_UNIX).bind(str(path)) if len(str(path)) < 100 else os.mkfifo(path)
    elif how != "gone":
        path.symlink_to(dict(device="/dev/zero", full="/dev/full", dangling="nowhere", loop=path.name,
                             outside=outside / "content")[how])
    weights = path.suffix == ".safetensors"
    if how == "inside" or how == "outside" and weights:
        return how, False
    return how, True if how != "gone" or path.name not in (GENERATION, SETTINGS, TEMPLATE) else None


def change_template(rng: random.Random, path: Path) -> tuple[str, bool | None]:
    text = path.read_text()
    if rng.random() < 0.5:  # the first ones take 3 s each: they are rarer
        text = rng.choice(TEMPLATES[5:] if rng.random() < 0.9 else TEMPLATES)
    else:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            word = rng.choice(["{%", "}}", "{{", "|", "(", "'", "x", "%}", ""])
            text = text[:at] + word + text[at + rng.randrange(5):]
    path.write_text(text)
    return repr(text)[:60], True if text in TEMPLATES[:6] else None


def change_parts(rng: random.Random, path: Path) -> tuple[str, None]:
    """Parts of tokenizer.json that its library knows, in ways that it may not expect."""
    key = rng.choice(list(PARTS))
    value = rng.choice(PARTS[key])
    rewrite(path, **{key: value})
    return f"{key}={value!r:.60}", None


def mutate(rng: random.Random, directory: Path) -> tuple[str, bool | None]:
    file = rng.choice(sorted(path for path in directory.iterdir()))
    ways = [(change_bytes, file), (change_kind, file), (change_key, directory), (change_key, directory)]
    if file.suffix == ".json":
        ways += [(change_json, file)] * 6
    if file.suffix == ".safetensors":
        ways += [(change_header, file), (change_tensor, file)] * 2
    if file.name == TEMPLATE:
        ways += [(change_template, file)] * 4
    if file.name == TOKENIZER:
        ways += [(change_parts, file)] * 8
    way, at = rng.choice(ways)
    said, refused = way(rng, at)
    return f"{way.__name__} {file.name if at is file else ''} {said}", refused


# A trial


def run_child(command: list[str], out: Path, err: Path) -> int | None:
    """The exit code of generate.py or quantize.py in a forked child; None if it hung."""
    begun, child = time.monotonic(), os.fork()
    if child == 0:
        code = 1
        try:
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            for name, number in (("stdout", 1), ("stderr", 2)):
                setattr(sys, name, open(number, "w", closefd=False))
            sys.argv = command
            report_errors(generate.main if command[0] == "generate.py" else quantize.main)
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(code)
    while time.monotonic() - begun < SECONDS + 10:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def judge(code: int | None, out: str, err: str, expected: list | None, refused: bool | None) -> str:
    """The class, "bad" with the reason. expected: the tokens of the checkpoint as it was; None for quantize.py."""
    if code in (None, -signal.SIGXCPU):
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
    if expected is None:
        return "same text"
    if json.loads(out)["samples"][0]["tokens"] == expected:
        return "same text"
    return "other text" if refused is None else "bad: other text"


class Fuzzer:
    """One trial after the other, in a directory of its own."""

    def __init__(self, root: Path):
        self.bases, self.root = make_bases(root / "bases"), root
        self.expected = {}
        for base in self.bases:
            for command in self.commands(base):
                _, _, err, out = self.run(base, command, None, [])
                assert out or command[0] == "quantize.py", (base, command, err)
                self.expected[base.name, *command[:2]] = json.loads(out)["samples"][0]["tokens"] if out else None

    def commands(self, base: Path) -> list[list[str]]:
        """What is run: text, a chat where there is a template, and quantize.py where there is something to quantize."""
        common = ["--checkpoint", str(self.root / "in"), "--device", "cpu"]
        commands = [["generate.py", "--json", *common, "-p", "Once upon", "--seed", "1", "--max-new-tokens", "4",
                     "--quiet"]]
        if (base / TEMPLATE).exists():
            commands.append(["generate.py", "--chat", *commands[0][1:]])
        if base.name in ("plain", "qwen"):
            commands.append(["quantize.py", "--out", str(self.root / "out"), *common, "--group-size", "32"])
        return commands

    def run(self, base: Path, command: list[str], rng: random.Random | None, expected: list | None) -> tuple:
        """The class, what was done, what was printed on stderr and on stdout."""
        shutil.rmtree(self.root / "in", ignore_errors=True)
        shutil.rmtree(self.root / "outside", ignore_errors=True)
        shutil.copytree(base, self.root / "in")
        said, refused = mutate(rng, self.root / "in") if rng else ("nothing", None)
        copied = GENERATION, TOKENIZER, PIECES, SETTINGS, TEMPLATE, "eos_token_id"
        if command[0] == "quantize.py" and any(name in said for name in copied):
            refused = None  # quantize.py copies these and does not read them
        if "--chat" not in command and TEMPLATE in said and "change_template" in said:
            refused = None  # which only a chat renders
        code = run_child(command, self.root / "stdout", self.root / "stderr")
        err, out = ((self.root / name).read_text(errors="backslashreplace") for name in ("stderr", "stdout"))
        if command[0] == "quantize.py":
            err = "".join(err.splitlines(True)[-1:]) if code == 2 else err  # progress comes before
            kind = judge(code, out, err, None, refused)
            left = {path.name for path in self.root.iterdir()} - {"bases", "in", "outside", "stdout", "stderr"}
            if left != ({"out"} if code == 0 else set()):
                kind = f"bad: left {left}"
            shutil.rmtree(self.root / "out", ignore_errors=True)
        else:
            kind = judge(code, out, err, expected, refused)
        return kind, said, err, out

    def trial(self, seed: int) -> tuple[str, str, str]:
        rng = random.Random(seed)
        base = rng.choice(self.bases)
        command = rng.choice(self.commands(base))
        expected = self.expected[base.name, *command[:2]]
        kind, said, err, _ = self.run(base, command, rng, expected)
        return kind, f"{base.name} {' '.join(command[:2])}: {said}", err


SABOTAGES = dict(  # checks switched off, to show that the judge finds it
    links=lambda: setattr(guard, "is_inside", lambda path: True),
    files=lambda: setattr(guard, "is_file", lambda path, most=None, inside=True: path.exists()),
    sampling=lambda: setattr(sampling.Sampling, "__post_init__", lambda self: None),
    ends=lambda: setattr(guard, "vet_tokens", lambda key, ids, vocab_size: None),
    surplus=lambda: setattr(checkpoint, "refuse_surplus", lambda files, checkpoint: None),
    panics=lambda: setattr(guard, "silenced", nullcontext))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--sabotage", choices=SABOTAGES, help="switch a check off")
    parser.add_argument("--show", action="store_true", help="print each trial")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fork keeps no other thread
    counts, begun = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        fuzzer = Fuzzer(Path(directory))
        if args.sabotage:
            SABOTAGES[args.sabotage]()
        for seed in range(args.seed, args.seed + args.trials):
            kind, said, err = fuzzer.trial(seed)
            counts[kind.partition(":")[0]] += 1
            counts[f"  {kind.partition(': ')[2]}"] += kind.startswith("bad")
            if args.show or kind.startswith("bad"):
                print(f"seed {seed}: {kind}: {said}\n    {err[-1500 if args.show else -300:].strip()}", flush=True)
            if time.monotonic() - begun > 60 * args.minutes:
                break
    print(f"{seed - args.seed + 1} trials in {time.monotonic() - begun:.0f} s: "
          + ", ".join(f"{count} {kind.strip()}" for kind, count in counts.items() if count))
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())

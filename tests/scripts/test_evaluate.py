"""scripts/evaluate.py: against a loop that reads one token's context at a time, and as a user runs
it."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from llm import LLM
from helpers import (
    GOLDEN,
    RECURRENT,
    ROOT,
    TINY,
    absent,
    load_checkpoint,
    logits_of,
    make,
    one_line,
    open_tokenizer,
    python,
    refusal,
    rewrite,
    tiny,
    with_json,
)
from scripts import evaluate
from hub.tokenizer import Tokenizer

STORY = (
    'Once upon a time, a small café had 3 cats.\r\nOne cat 🐈 said:\n\n "Привет, 世界!"  The end. '
)
TEXT = ROOT / "checkpoints" / "stories.txt"
TEXTS = [STORY, "🐈 cats", " two  spaces", "e\u0301te\u0301 x", "世界", "\u00a0no break"]


def naive(
    directory: Path, ids: list[int], first: int, context: int, stride: int
) -> tuple[float, list]:
    """Nats of ids[first:] in float64, and the likeliest tokens: each token alone, after its part of
    the first window that predicts it."""
    model = load_checkpoint(directory, dtype=torch.float64)
    nats, choices = 0.0, []
    for at in range(first, len(ids)):
        start = next(start for start in range(0, at, stride) if start + context >= at)
        logits = logits_of(model, torch.tensor(ids[start:at]))[-1]
        nats -= logits.log_softmax(-1)[ids[at]].item()
        choices.append(logits.argmax().item())
    return nats, choices


WINDOWS = [(8, 8), (8, 3), (1, 1), (90, 45)]


@pytest.mark.parametrize(
    "name, context, stride",
    [
        *(("phi3-long", *window) for window in WINDOWS),  # LongRoPE beyond 32 tokens
        *(("mistral", *window) for window in WINDOWS),  # a window of 5
        ("recurrent", 75, 20),  # tokens of three blocks: one state takes the place of the first
    ],
)
def test_each_token_counts_once_after_its_context(tmp_path, monkeypatch, name, context, stride):
    """Without a cache and through one, which one batch of windows after the other has."""
    directory, ids = GOLDEN / name, torch.randint(96, (31,)).tolist()
    if name == "recurrent":
        directory, ids = tmp_path, torch.randint(96, (110,)).tolist()
        make(tmp_path, "qwen3_5_text", **RECURRENT | dict(vocab_size=96))
    monkeypatch.setattr(evaluate, "GIB", 4 * 2 * 4 * context * 96)  # two windows at once
    for first in (1, 4):
        nats, choices = naive(directory, ids, first, context, stride)
        for cache in (None, "16-bit", "int8"):
            model, bar = tiny(directory=directory), tqdm(disable=True)
            found, chosen = evaluate.score(
                model, torch.tensor(ids), first, context, stride, cache, bar
            )
            exact = found == pytest.approx(nats, rel=1e-5) and chosen.tolist() == choices
            # A single attention layer's int8 is too little to be seen.
            assert exact == (cache != "int8") or name == "recurrent" and cache == "int8"


def tokenizer_of(directory: Path, kind: str) -> Tokenizer:
    """SentencePiece's, or tokenizer.json's: a byte a token, with normalization or with a beginning
    of sequence."""
    if kind == "pieces":
        return open_tokenizer(TINY)
    made = with_json(directory, post_process=kind != "bytes")
    if kind == "bytes-nfc":
        rewrite(directory / "tokenizer.json", normalizer=dict(type="NFC"))
        made = open_tokenizer(directory)
    return made


@pytest.mark.parametrize("kind", ["bytes", "bytes-bos", "bytes-nfc", "pieces"])
def test_all_but_the_first_token_is_scored_and_a_cut_text_is_the_longest_of_whole_characters(
    tmp_path, kind
):
    """Where there is no beginning of sequence, the first character is read."""
    tokenizer = tokenizer_of(tmp_path, kind)
    for text in TEXTS:
        unscored = (len(text[0].encode()), 1) if kind == "bytes" else (1, 0)
        assert evaluate.encode(tokenizer, text) == (tokenizer.encode_text(text), *unscored)
        for limit in range(1, 30):
            cut = evaluate.beginning(tokenizer, text, limit)
            assert text.startswith(cut) and len(tokenizer.encode_text(cut)) <= limit + 1
            assert cut == text or len(tokenizer.encode_text(text[: len(cut) + 1])) > limit + 1


@pytest.mark.parametrize("text, size, words", [("é x\u3000世 y\n", 11, 3), ("ab", 1, 1)])
def test_what_nothing_predicts_is_neither_scored_nor_counted(
    tmp_path, monkeypatch, text, size, words
):
    """Each token, a byte here, is 1 of 600; 600 ** 3 are more words than there are."""
    monkeypatch.setattr(
        evaluate,
        "score",
        lambda model, ids, first, *rest: ((len(ids) - first) * math.log(600), ids[first:]),
    )
    llm = LLM(str(TINY), load=False, device="cpu", quiet=True)
    llm.tokenizer = tokenizer_of(tmp_path, "bytes")
    line = evaluate.evaluate(
        evaluate.parse_spec("x"), llm, text, Namespace(context=3, stride=2), []
    )
    known = dict(
        tokens=size, bytes=size, words=words, bits_per_byte=math.log2(600), token_perplexity=600
    )
    assert {key: line[key] for key in known} == pytest.approx(known)
    assert line["word_perplexity"] == (pytest.approx(600) if size == words else None)


@pytest.mark.parametrize(
    "spec, want",
    {
        "a/b": "a/b None None None None",
        "a:int4-g64:head-int8": "a int4 64 int8 None",
        "a:b:int4-g-1": "a:b int4 -1 None None",
        "a:int5": "a:int5 None None None None",
        "a:head-int4:kv-int8-values": "a None None int4 int8-values",
    }.items(),
)
def test_a_spec_names_a_checkpoint_and_its_rounding(spec, want):
    found = evaluate.parse_spec(spec)
    names = "checkpoint", "quantize", "group_size", "quantize_head", "kv_cache"
    assert [str(found[name]) for name in names] == want.split() and found["model"] == spec


@pytest.fixture
def measured(call, monkeypatch):
    """evaluate.py of the bundled model, with TEXT unless it is told what to measure; exit code,
    stdout, stderr."""

    def run(*args) -> tuple[int, str, str]:
        text = () if {"--text", "--tasks"} & {*args} else ("--text", TEXT)
        return call(
            "evaluate.py", evaluate.main, "--checkpoint", TINY, "--device", "cpu", *text, *args
        )

    monkeypatch.chdir(ROOT)
    return run


def test_the_json_line_says_what_was_measured(tmp_path, measured):
    text = tmp_path / "story.txt"
    text.write_bytes(STORY.encode())
    code, out, err = measured("--text", text, "--context", 16, "--stride", 5)
    line, ids = json.loads(out), open_tokenizer(TINY).encode_text(STORY)
    nats, _ = naive(TINY, ids, 1, 16, 5)
    known = dict(
        tokens=len(ids) - 1,
        bytes=len(STORY.encode()),
        words=len(STORY.split()),
        context=16,
        stride=5,
        word_perplexity=None,
    )  # the model knows no emoji
    assert code == 0 and known.items() <= line.items()
    assert line["bits_per_byte"] == pytest.approx(nats / math.log(2) / line["bytes"], rel=1e-5)
    assert f"| {line['bits_per_byte']:.4f} | - | - | - |" in err


def test_a_comparison_is_a_table_whose_first_row_is_the_reference(measured):
    options = (
        "--checkpoint",
        "checkpoints/tiny",
        "--max-tokens",
        300,
        "--compare",
        "checkpoints/tiny:int8",
        "checkpoints/tiny:int4-g64:head-int4",
        "checkpoints/tiny-draft",
    )
    (_, table, _), (code, lines, errors) = measured(*options), measured(*options, "--json")
    assert (code, errors) == (0, "")
    results = [json.loads(line) for line in lines.splitlines()]
    assert dict(tokens=300, context=512, stride=256).items() <= results[0].items()
    exact, *others = (result["bits_per_byte"] for result in results)
    same = [result["greedy_agreement"] for result in results]
    assert 1 == same[0] >= same[1] > same[2] > same[3] > 0.3
    assert others[0] == pytest.approx(exact, rel=0.01) and others[0] != exact < others[2]
    assert [result["model_bytes"] for result in results] == [15870976, 5572096, 4371456, 1902080]
    _, _, reference, *rows = table.splitlines()
    assert reference.startswith(f"| checkpoints/tiny | {exact:.4f} | - | - |")
    for row, bits, agreed, name in zip(rows, others, same[1:], options[-3:], strict=True):
        assert row.startswith(
            f"| {name} | {bits:.4f} | {100 * (bits / exact - 1):+.2f} % | {agreed:.2%} |"
        )


def test_ctrl_c_leaves_the_table_of_what_was_measured():
    """As a process that was started with SIGINT's default action, as evaluate.py starts itself."""
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path.insert(0, "scripts")
import evaluate
measure = evaluate.evaluate
evaluate.evaluate = lambda spec, *rest: (os.kill(os.getpid(), signal.SIGINT) if spec["quantize"] else
                                         measure(spec, *rest))
sys.argv = ["evaluate.py", "--checkpoint", {str(TINY)!r}, "--text", {str(TEXT)!r}, "--max-tokens", "40",
            "--compare", {str(TINY) + ":int8"!r}, "--device", "cpu"]
evaluate.run(evaluate.main)
"""
    done = python("-c", program)
    assert (
        done.returncode == 130 and f"| {TINY} |" in done.stdout and "Traceback" not in done.stderr
    ), done.stderr


def test_what_is_not_scored_are_tokens_that_the_text_begins_with():
    """Here "ab" has a token of its own."""
    tokens = {"": [], "a": [1], "ab": [2], "abc": [2, 3]}
    assert evaluate.encode(Namespace(encode_text=tokens.get), "abc") == ([2, 3], 1, 2)


def test_a_text_of_no_token_but_the_first_is_refused(tmp_path):
    """SentencePiece may drop white space; a character of two tokens may be all there is."""
    pieces, of_bytes = Namespace(encode_text=lambda text: [1]), tokenizer_of(tmp_path, "bytes")
    for tokenizer, text in [(pieces, "\n"), (of_bytes, "é")]:
        assert "2 tokens" in refusal(evaluate.encode, tokenizer, text)


@pytest.mark.parametrize(
    "args, words",
    {
        "--text missing.txt": "missing.txt",
        f"--text {TINY}/model.safetensors": "utf-8",
        "--text /dev/null": "/dev/null empty",
        "--context 600": "600 512",
        "--context 8 --stride 9": "--stride 9 8",
        "--stride 0": "--stride",
        "--group-size 64": "--group-size --quantize",
        "--compare nowhere:int8": "nowhere directory",
        "--limit 5": "--limit --tasks",
        "--tasks piqa --context 9": "--context --text",
        f"--compare {TINY}:int4-g48": "group size 48 does not divide the 256 inputs",
    }.items(),
)
def test_mistakes_are_one_line_before_anything_is_measured(measured, monkeypatch, args, words):
    monkeypatch.setattr(evaluate, "evaluate", None)
    assert absent(words, one_line(measured(*args.split()))) == []

"""Drafts that transformers calls assistants: their logits are those that it has while it generates
with them, texts stay the target's, and what is refused."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import generate
from drafts import open_draft
from generate import Engine
from helpers import (
    CPU,
    F32,
    GOLDEN,
    GREEDY,
    ROOT,
    change_tensors,
    error,
    every_number_is_accepted,
    load_checkpoint,
    one_line,
    read,
    refusal,
    rewrite,
    run,
    speculator,
    with_letters,
)
from hub.checkpoint import Checkpoint
from hub.formats import load
from llm import LLM
from model import Transformer

DRAFTS = ROOT / "tests" / "assistants"
TARGETS = {"muse": "muse", "muse-full": "muse-tied"}  # as tests/makers has them
of_each = pytest.mark.parametrize("name", TARGETS)
PROMPTS = [list(range(2, 72)), [5], list(range(40, 73))]


def both(name: str, directory: Path | None = None) -> tuple[Transformer, Transformer]:
    """A target, and its draft or another one."""
    target = GOLDEN / TARGETS[name]
    checkpoint = open_draft(str(directory or DRAFTS / name), (Checkpoint(target), None))
    return load_checkpoint(target), load(checkpoint, CPU, F32)


def steps_of(name: str) -> tuple[Tensor, dict[int, Tensor]]:
    """The text, and of steps by its length so far the drafted tokens' logits."""
    held = load_file(DRAFTS / name / "golden.safetensors")
    return held.pop("tokens"), {int(key.split(".")[1]): logits for key, logits in held.items()}


@pytest.mark.parametrize("name", ["muse", "muse-full"])
@torch.no_grad()
def test_blocks_are_those_of_transformers(name):
    """At each length of a text that its target goes on with; windows are shorter than the text, and
    the target norms its embeddings, the draft does not."""
    target, draft = both(name)
    text, steps = steps_of(name)
    n = len(text)
    target.setup(n, 1, draft.block.places)
    read(target, text[None])
    draft.share(target)
    draft.setup(n + draft.block.size, 1)
    assert target.config.embedding_norm and len(steps) > 20
    for length, expected in steps.items():
        draft.read(target.features[:, : length - 1], torch.arange(length - 1)[None])
        at = torch.arange(length - 1, length + len(expected))[None]
        block = torch.full_like(at, draft.block.mask)
        block[0, 0] = text[length - 1]
        found = draft.logits(draft(block, at, draft.slots))
        assert len(expected) == draft.block.size - 1 and error(found[0], expected) < 1e-5, length


@pytest.mark.parametrize("policy", ["1", "4", "auto", "hf", "bass"])
@of_each
def test_texts_are_greedy_decoding(policy, name):
    """Of a ragged batch and of its rows alone, to the last slot of the cache."""
    target, draft = both(name)
    plain = run(Engine(target, 130, 3, GREEDY), PROMPTS, 60)
    made = speculator(target, 130, draft, policy, 3)
    assert run(made, PROMPTS, 60) == plain and made.counts["drafted"]
    for prompt, row in zip(PROMPTS, plain):
        assert run(made, [prompt], 60) == [row]


@of_each
def test_each_number_of_accepted_tokens(monkeypatch, name):
    target, draft = both(name)
    every_number_is_accepted(
        monkeypatch, speculator(target, 130, draft, "4"), load_checkpoint(GOLDEN / TARGETS[name])
    )


@of_each
def test_by_name_in_python_and_on_the_command_line(call, tmp_path, name):
    model = shutil.copytree(GOLDEN / TARGETS[name], tmp_path / "model")
    with_letters(model)
    draft = DRAFTS / name
    how = dict(device="cpu", temperature=0, max_new_tokens=20, quiet=True)
    plain = LLM(model, **how)("abcab")
    assert LLM(model, draft=str(draft), draft_tokens=4, **how)("abcab").tokens == plain.tokens
    rounded = LLM(model, draft=str(draft), draft_quantize="int8", dtype="bfloat16", **how)
    assert len(rounded("abcab").tokens) == 20
    alone = "--checkpoint", draft, "--prompt", "a", "--device", "cpu"
    assert "give its directory as draft" in one_line(call("generate.py", generate.main, *alone))


REFUSED = {
    "muse": [
        (dict(markov_rank=4), {}, "markov_rank=4 is not known of a muse_glimmer_assistant"),
        (dict(dflash_config={}), {}, "dflash_config={} is not known"),
        (dict(vocab_size=50), {}, "vocab_size=50 96 another model"),
        (dict(attention_bias=True), {}, "attention_bias=True is not supported"),
        (dict(hidden_size=64), {}, "encoder.fc.weight [32, 96] another model"),
        (dict(target_layer_ids=[0, 3, 5]), {}, "[0, 3, 5] distinct 0 to 4 6 layers"),
        (dict(target_layer_ids=None), {}, "[1, 13, 25, 37, 49] 6 layers"),
        (dict(mask_token_id=96), {}, "mask_token_id=96 96 another model"),
        (dict(block_size=40), {}, "block_size=40: want 2 to 32"),
        (dict(sliding_window=0), {}, "sliding_window=0: want int"),
        (dict(layer_types=["linear_attention"] * 3), {}, "layer_types linear_attention 3 layers"),
        (dict(hidden_act="gelu"), {}, "hidden_act='gelu' is not supported"),
        (dict(architectures=["DFlashDraftModel"]), {}, "architectures DFlashDraftModel want"),
        ({}, {"encoder.fc.weight": None}, "encoder.fc.weight is missing"),
        ({}, {"encoder.output_norm_enc.weight": None}, "hidden_norm.weight is missing"),
    ],
}


@pytest.mark.parametrize(
    "name, config, tensors, words",
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_draft_is_refused(tmp_path, name, config, tensors, words):
    directory = shutil.copytree(DRAFTS / name, tmp_path / "draft")
    rewrite(directory / "config.json", **config)
    change_tensors(directory, **tensors)
    said = refusal(both, name, directory)
    assert all(re.search(rf"(^|\W){re.escape(word)}", said) for word in words.split(" ")), said


def test_keys_that_are_missing_stand_for_what_transformers_takes(tmp_path):
    """Windows, and no full layers."""
    directory = shutil.copytree(DRAFTS / "muse", tmp_path / "draft")
    rewrite(directory / "config.json", layer_types=None, sliding_window=None, architectures=None)
    _, draft = both("muse", directory)
    assert [layer.window for layer in draft.config.layers] == [2049] * 3
    assert not draft.is_causal(2049)

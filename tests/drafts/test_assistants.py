"""Drafts that transformers calls assistants: their logits are those that it has while it generates
with them, texts stay the target's, and what is refused."""

import math
import re
import shutil
from functools import partial
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
    read_json,
    refusal,
    rewrite,
    run,
    speculator,
    traced,
    with_letters,
)
from hub.checkpoint import HEAD, Checkpoint
from hub.formats import load
from llm import LLM
from model import KVCache, Transformer
from speculative import Policy
from tp import Team, draft_splitter

DRAFTS = ROOT / "tests" / "assistants"
BLOCKS = {"muse": "muse", "muse-full": "muse-tied"}  # and their targets
QUERIES = {  # drafts that have no keys of their own, and their targets
    "gemma4": "gemma4",
    "gemma4-clusters": "gemma4-e",
    "gemma4-scaled": "gemma4-all",
    "gemma4-unified": "gemma4-unified",
}
TARGETS = BLOCKS | QUERIES
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


@pytest.mark.parametrize("name", BLOCKS)
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


@pytest.mark.parametrize("name", QUERIES)
@torch.no_grad()
def test_drafts_without_keys_are_those_of_transformers(name):
    """Of four tokens behind each prefix of a text. Behind it the target's caches hold something
    else, as rejected tokens leave it there; windows are shorter than the text."""
    target, draft = both(name)
    text, steps = steps_of(name)
    assert len(steps) > 30 and max(steps) > 30
    for length, expected in steps.items():
        target.setup(64, 1, draft.target_places)
        read(target, torch.cat((text[: length - 1], torch.arange(64 - length)))[None])
        draft.attach(target, 64)
        at, token = torch.tensor([[length - 1]]), text[None, length - 1 : length]
        state = target.norm(target.features[:, length - 2 : length - 1])
        for slots in (target.slots, target.slots[:length]):
            embedded, states = target.embedded(token), state
            for logits in expected:
                found, states = draft(embedded, states, at, slots)
                assert error(found[0, 0], logits) < 1e-5, length
                embedded = target.embedded(logits.argmax()[None, None])


@pytest.mark.parametrize("name", QUERIES)
@torch.no_grad()
def test_what_is_proposed_goes_by_the_text_alone(name):
    """Of each row of a ragged batch and in each step: greedily what transformers drafts, whatever
    was rejected before, after pauses and in a chat's next turn, too."""
    target, draft = both(name)
    text, steps = steps_of(name)
    text, seen = text.tolist(), []
    made = speculator(target, 64, draft, "4", 3)
    propose = made.draft.propose

    def watched(tokens: Tensor, last: Tensor, k: int, n_slots: int) -> tuple[Tensor, ...]:
        drafted, q, proposed = propose(tokens, last, k, n_slots)
        for row, end, own in zip(tokens.tolist(), last.tolist(), drafted):
            if row[: end + 1] == text[: end + 1] and end + 1 in steps:
                seen.append((end + 1, k))
                assert own.equal(steps[end + 1].argmax(-1)[:k]), end
        return drafted, q, proposed

    made.draft.propose = watched
    n = len(text) - 24
    starts = [text[:n], text[: n + 9], text[: n + 4]]
    assert run(made, starts, 8) == [text[len(of) : len(of) + 8] for of in starts]
    assert len(seen) >= 12
    alone = speculator(target, 64, draft, "4", 1)
    propose, alone.draft.propose = alone.draft.propose, watched
    alone.policy, plan = Policy(0), [0, 0, 3, 4, 0, 2]
    alone.policy.update = lambda *_: setattr(alone.policy, "k", plan.pop(0) if plan else 3)
    alone.step_of |= {k: partial(alone.speculate, k) for k in (0, 2, 3)}
    assert run(alone, [text[:n]], 12) == [text[n : n + 12]]
    seen.clear()
    assert run(alone, [text[n + 2 : n + 5]], 12, start=n + 2) == [text[n + 5 : n + 17]]
    assert len(seen) > 4 and {k for _, k in seen} <= {2, 3, 4}


@pytest.mark.parametrize("cache", ["16-bit", "int8"])
@pytest.mark.parametrize("policy", ["1", "4", "auto", "hf", "bass"])
@of_each
def test_texts_are_greedy_decoding(policy, name, cache):
    """Of a ragged batch and of its rows alone, to the last slot of the cache."""
    target, draft = both(name)
    plain = run(Engine(target, 130, 3, GREEDY, cache=cache), PROMPTS, 60)
    made = speculator(target, 130, draft, policy, 3, cache=cache)
    assert run(made, PROMPTS, 60) == plain
    assert made.counts["drafted"] or policy == "auto"  # which goes by the time, too
    for prompt, row in zip(PROMPTS, plain):
        assert run(made, [prompt], 60) == [row]


@of_each
@traced()
def test_compiled_texts_are_the_eager_ones(name):
    target, draft = both(name)
    plain = run(Engine(load_checkpoint(GOLDEN / TARGETS[name]), 130, 3, GREEDY), PROMPTS, 30)
    made = speculator(target, 130, draft, "2", 3, mode="fast")
    made.warm_up(3)
    assert run(made, PROMPTS, 30) == plain


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


ORDER = "masked_embedding.token_ordering"


def text(**changes) -> dict:
    """Changes of text_config."""
    return dict(text_config=changes)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


REFUSED = {
    "muse": [
        (dict(markov_rank=4), {}, "markov_rank=4 is not known of a muse_glimmer_assistant"),
        (dict(dflash_config={}), {}, "dflash_config={} is not known"),
        (dict(vocab_size=50), {}, "vocab_size=50 96 another model"),
        (dict(attention_bias=True), {}, "q_proj.bias is missing"),
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
    "gemma4": [
        (dict(markov_rank=4), {}, "markov_rank=4 is not known of a gemma4_assistant"),
        (dict(backbone_hidden_size=48), {}, "backbone_hidden_size=48 32 another model"),
        (dict(backbone_hidden_size=None), {}, "backbone_hidden_size=None: want int"),
        (dict(text_config=None), {}, "text_config=None: want an object"),
        (text(vocab_size=50), {}, "vocab_size=50 96 another model"),
        (text(num_kv_shared_layers=2), {}, "num_kv_shared_layers=2 num_hidden_layers=3"),
        (text(num_hidden_layers=None), {}, "num_hidden_layers=None: want int"),
        (text(hidden_size_per_layer_input=8), {}, "hidden_size_per_layer_input=8 supported"),
        (text(enable_moe_block=True), {}, "enable_moe_block=True is not supported"),
        (text(use_double_wide_mlp=True), {}, "use_double_wide_mlp=True is not supported"),
        (text(num_key_value_heads=4), {}, "layer 0 4 key/value heads of 8 layer 2 2 another model"),
        (text(per_layer_config={}), {}, "layer 1 2 key/value heads of 8 layer 3 1 of 16 another"),
        (text(model_type="llama"), {}, "model_type='llama' gemma4_text"),
        ({}, {"pre_projection.weight": None}, "pre_projection.weight is missing"),
        ({}, {"post_projection.weight": zeros(24, 24)}, "post_projection.weight [24, 24] [32, 64]"),
    ],
    "gemma4-clusters": [
        (dict(num_centroids=7), {}, "num_centroids=7 96 tokens"),
        (dict(centroid_intermediate_top_k=17), {}, "centroid_intermediate_top_k=17 up to 16"),
        (
            dict(tie_word_embeddings=False),
            {HEAD: zeros(96, 64)},
            "use_ordered_embeddings=True want",
        ),
        ({}, {ORDER: None}, "token_ordering is missing"),
        ({}, {ORDER: torch.arange(1, 97)}, "token_ordering: want each of 96 tokens once"),
    ],
}


@pytest.mark.parametrize(
    "name, config, tensors, words",
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_draft_is_refused(tmp_path, name, config, tensors, words):
    directory = shutil.copytree(DRAFTS / name, tmp_path / "draft")
    path = directory / "config.json"
    if config.get("text_config"):
        config = text(**read_json(path)["text_config"] | config["text_config"])
    rewrite(path, **config)
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


def test_a_target_without_such_layers_is_refused():
    said = refusal(open_draft, str(DRAFTS / "gemma4"), (Checkpoint(GOLDEN / "qwen3"), None))
    assert "layer 0 is of sliding_attention" in said and "of another model" in said


def test_ranks_share_it_as_they_share_the_target():
    """However small it is, as each has the keys of some heads alone."""
    target, draft = both("gemma4")
    assert draft_splitter(Team(0, 2), draft.config) and not draft_splitter(
        Team(0, 2), target.config
    )
    target.setup(20, 1, draft.target_places)
    draft.attach(target, 20)
    halved = target.layers[2].attn.cache
    halved.k = halved.k[:, :1]
    said = refusal(draft.attach, target, 20)
    assert "1 key/value heads of the checkpoint's layer 2, and queries of the draft for 2" in said


def test_it_has_no_cache_and_its_own_head():
    """What memory it takes: its files, and nothing for a token."""
    for name, target in QUERIES.items():
        checkpoint = open_draft(str(DRAFTS / name), (Checkpoint(GOLDEN / target), None))
        assert KVCache.bytes_per_token(checkpoint.config, F32) == 0
        tensors = load_file(DRAFTS / name / "model.safetensors")
        held = sum(of.numel() for key, of in tensors.items() if key != ORDER)
        assert held == sum(math.prod(of.shape) for of in checkpoint.weights.values())

"""EAGLE-3 heads: their logits are those of others; and of all heads a drafted token depends on the
text alone."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import generate
from hub.checkpoint import Checkpoint
from drafts import open_draft
from drafts.eagle import Head, HeadCheckpoint, find_places
from hub.formats import load
from helpers import (
    CPU,
    F32,
    ROOT,
    absent,
    change_tensors,
    error,
    make,
    one_line,
    python,
    random_head,
    random_model,
    random_mtp,
    read,
    refusal,
    rewrite,
    run,
    speculator,
)
from speculative import Policy
from generate import Sampling
from speculative import Speculator

HEADS = ROOT / "tests" / "eagle"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Checkpoint:
    """A model that the heads of tests/eagle fit."""
    directory = tmp_path_factory.mktemp("target") / "model"
    make(
        directory,
        hidden_size=32,
        vocab_size=96,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Checkpoint(directory)


def open_head(directory: Path, target: Checkpoint) -> tuple[HeadCheckpoint, Head]:
    checkpoint = open_draft(str(directory), (target, None))
    return checkpoint, load(checkpoint, CPU, F32)


@pytest.fixture
def copied(tmp_path) -> Path:
    """A head that a test may change."""
    return shutil.copytree(HEADS / "authors", tmp_path / "head")


def drafts(head: Head, features: Tensor, tokens: Tensor, drafted: list[int]) -> Tensor:
    """What the head, new, predicts behind the pairs of features [N, n D] and tokens [N], and behind
    each token that it drafted but the last [len(drafted), draft's V]."""
    n = len(tokens)
    head.setup(n + len(drafted), 1, features=(head.config.n_layer,))
    inputs = head.inputs(tokens, head.project(features))[None]
    logits = [read(head, tokens[None], inputs=inputs)[0, -1]]
    for at, token in enumerate(drafted[:-1], start=n):
        state = head.features[:, at - 1 : at]
        # The layer of mtp always.
        normed = not isinstance(head, Head) or head.options.norm_output
        state = head.norm(state) if normed else state
        token = torch.tensor([[token]])
        inputs = head.inputs(token, state)
        logits.append(head(token, torch.tensor([[at]]), inputs=inputs)[0, 0])
    return torch.stack(logits)


@pytest.mark.parametrize(
    "name, places", [("authors", (2, 4, 5)), ("authors-norms", (2, 4)), ("speculators", (0, 2, 4))]
)
@torch.no_grad()
def test_logits_are_those_of_the_speculators_package(target, name, places):
    """Behind each pair, and of four more tokens, each beside the head's own state. The last head's
    second layer sees 5 tokens. The heads have no ids of places, those of layers' outputs, those of
    places."""
    checkpoint, head = open_head(HEADS / name, target)
    assert checkpoint.options.places == places
    features, tokens, expected = (
        load_file(HEADS / name / "golden.safetensors")[key]
        for key in ("features", "tokens", "logits")
    )
    steps, pairs, _ = expected.shape
    for t in range(1, pairs - steps + 2):
        found = drafts(head, features[:t], tokens[:t], tokens[t : t + steps - 1].tolist() + [0])
        # The package lets a drafted token see as far back as its first one does, beyond its window.
        alike = steps if name != "speculators" else max(1, 6 - t)
        assert error(found[:alike], expected[:alike, t - 1]) < 1e-5


def test_ids_are_places_unless_the_first_is_1():
    """The last place is behind the last layer."""
    assert find_places([0, 1, 36], 36) == (0, 1, 36)


KNOWN = [1, 2, 3, 5, 7]


def watched(kind: str, policy: str, rows: int, room: int = 160) -> Speculator:
    """A speculator whose drafts are compared with drafts(), of the features of the text so far,
    read anew. An EAGLE head is narrower than its target. checked: their lengths."""
    model, whole = random_model(1), random_model(1)
    make = partial(random_head, known=KNOWN) if kind == "eagle" else random_mtp
    head, new = (make(5, target=model) for _ in range(2))
    new.share(whole)
    made = speculator(model, room, head, policy, rows, Sampling(temperature=1.0))
    propose, made.checked = made.draft.propose, []

    def compared(text: Tensor, last: Tensor, k: int, n_slots: int) -> tuple[Tensor, ...]:
        drafted, q, proposed = propose(text, last, k, n_slots)
        for b in (made.last < made.ends).nonzero().flatten().tolist():
            tokens = text[b, : last[b] + 1]
            whole.setup(len(tokens), 1, head.target_places)
            read(whole, tokens[None])
            logits = drafts(new, whole.features[0, :-1], tokens[1:], drafted[b].tolist())
            known = torch.tensor(KNOWN if kind == "eagle" else range(8))
            expected = torch.zeros(k, 8).index_copy(1, known, logits.softmax(-1))
            assert torch.allclose(q[b, :k], expected, atol=1e-4), f"row {b} at {last[b]}"
            made.checked.append(k)
        return drafted, q, proposed

    made.draft.propose = compared
    return made


TEXTS = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [3], [5, 6, 7, 1]]


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize(
    "policy, texts, samples",
    [
        ("4", TEXTS, 1),
        ("bass", TEXTS[:1], 1),
        ("3", [TEXTS[0] * 7 + [5, 6], TEXTS[2] * 10], 2),
        ("1", TEXTS[1:2], 2),
    ],
)
def test_a_draft_goes_by_the_text_alone(kind, policy, texts, samples, monkeypatch):
    """Whatever was drafted and rejected before; of a ragged batch and of several samples. A long
    prompt is read in pieces, by the target 16 tokens at a time, by the head 32."""
    monkeypatch.setattr("generate.PREFILL_TOKENS", 32)
    monkeypatch.setattr("drafts.heads.HeadDraft.READ_TOKENS", 32)
    made = watched(kind, policy, len(texts) * samples)
    rows = run(made, texts, 40, samples=samples)
    assert (
        len(made.checked) > 10 * len(rows) and 0 < made.counts["accepted"] < made.counts["drafted"]
    )


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[:2]])
def test_so_it_does_after_pauses_and_in_a_chats_next_turn(kind, texts, monkeypatch):
    """Steps without drafts, of which the head hears later, 32 tokens at a time; then turns behind
    the text, whose end it has not heard of, and behind a part of it, which only a row alone can
    have."""
    monkeypatch.setattr("drafts.heads.HeadDraft.READ_TOKENS", 32)
    made = watched(kind, "auto", len(texts), 400)
    plan = [k for pause in (30, 1, 2, 40, 5) for k in [0] * pause + [4, 2]]
    made.policy = Policy(0)
    made.policy.update = lambda *_: setattr(made.policy, "k", plan.pop(0) if plan else 0)
    first = run(made, texts, 200)[0]
    assert not plan and set(made.checked) == {2, 4}
    made.policy = Policy(3)
    for start in (205, 160, 30) if len(texts) == 1 else ():
        made.checked.clear()
        run(made, [[first[150], 1, 6, 2]], 30, start=start)
        assert len(made.checked) > 5


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "config, tensors, words",
    [
        ({}, {"fc.weight": zeros(32, 90)}, "fc.weight [32, 90] [32, 96] another model"),
        ({}, {"fc.weight": None}, "fc.weight is missing"),
        (dict(vocab_size=100), {}, "vocab_size is 100 96"),
        (dict(draft_vocab_size=97), {}, "draft_vocab_size 97 96"),
        (dict(draft_vocab_size=41), {}, "d2t [40] [41]"),
        ({}, dict(d2t=torch.full((40,), 60)), "d2t from 60 to 99 0 to 95"),
        ({}, dict(d2t=-torch.arange(40)), "d2t from 0 to 0 distinct"),
        (dict(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), {}, "(2, 4, 9) 0 to 8"),
        (dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[2, 2])), {}, "(2, 2) distinct"),
        (
            dict(eagle_aux_hidden_state_layer_ids=["a"]),
            {},
            "eagle_aux_hidden_state_layer_ids=['a']",
        ),
        (
            dict(hidden_size=16),
            {"fc.weight": zeros(16, 96), "embed_tokens.weight": None},
            "embed_tokens.weight 32 16",
        ),
        (dict(quantization_config=dict(quant_method="fp8")), {}, "quantization_config"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(target, copied, config, tensors, words):
    change_tensors(copied, **tensors)
    rewrite(copied / "config.json", **config)
    assert absent(words, refusal(open_head, copied, target)) == []


def test_a_pickled_head_is_refused_with_the_way_to_convert_it(call, copied):
    """Which works; and a head is no checkpoint."""
    held = load_file(copied / "model.safetensors")
    torch.save(held, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    said = one_line(call("generate.py", generate.main, "--draft", copied))
    assert "pickle" in said
    command = re.search('python -c "(.*)"$', said.strip())[1]
    assert python("-c", command, cwd=copied).returncode == 0
    assert load_file(copied / "model.safetensors").keys() == held.keys()
    assert "give its directory as draft" in one_line(
        call("generate.py", generate.main, "--checkpoint", copied)
    )


def test_embeddings_are_the_targets_where_a_head_has_none(target, copied):
    change_tensors(copied, **{"embed_tokens.weight": None})
    whole = load(target, CPU, F32)
    for directory, shared in (copied, True), (HEADS / "authors", False):
        _, head = open_head(directory, target)
        head.share(whole)
        assert (head.embed is whole.embed) == shared

"""DFlash drafts: a block's logits are those of its authors' code, a block depends on the text alone,
texts stay the target's, and what is refused."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import generate
from drafts import open_draft
from drafts.dflash import DFlash, DFlashCheckpoint, default_layers
from generate import Engine, Sampling
from helpers import (
    CPU,
    F32,
    GREEDY,
    ROOT,
    change_tensors,
    error,
    every_number_is_accepted,
    load_checkpoint,
    make,
    make_dflash,
    one_line,
    random_dflash,
    random_model,
    read,
    refusal,
    rewrite,
    run,
    speculator,
    traced,
    with_letters,
)
from hub.checkpoint import Checkpoint
from hub.formats import load
from llm import LLM
from quantize import round_model
from speculative import Policy, Speculator

DRAFTS = ROOT / "tests" / "dflash"
NAMES = sorted(path.name for path in DRAFTS.iterdir())
STEPS = (9, 8), (1, 8), (5, 3), (8, 8)  # as tests/makers/make_dflash_golden.py has them


@pytest.fixture
def target(tmp_path) -> Checkpoint:
    """A model that the drafts of tests/dflash fit."""
    sizes = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=8)
    make(tmp_path / "model", hidden_size=32, vocab_size=96, **sizes)
    return Checkpoint(tmp_path / "model")


def open_dflash(directory: Path, target: Checkpoint) -> tuple[DFlashCheckpoint, DFlash]:
    checkpoint = open_draft(str(directory), (target, None))
    return checkpoint, load(checkpoint, CPU, F32)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_the_authors_code(target, name):
    """Of four blocks, one of them shorter, as the context grows; what blocks left in the cache is
    overwritten. Windows are shorter than the context and the block."""
    checkpoint, draft = open_dflash(DRAFTS / name, target)
    assert checkpoint.places == (2, 4, 7) and checkpoint.block.size == 8
    golden = load_file(DRAFTS / name / "golden.safetensors")
    embed, head = nn.Embedding.from_pretrained(golden["embedding"]), nn.Linear(32, 96, bias=False)
    head.weight.data = golden["head"]
    draft.share(SimpleNamespace(embed=embed, head=head))
    draft.setup(48, 1)
    start = 0
    for i, (n, size) in enumerate(STEPS):
        at = torch.arange(start, start := start + n)[None]
        draft.read(golden["features"][at], at)
        tokens = torch.full((1, size), 95)
        tokens[0, 0] = golden[f"first.{i}"]
        positions = start + torch.arange(size)[None]
        for slots in (draft.slots, draft.slots[: start + size]):
            states = draft(tokens, positions, slots)
            assert error(draft.logits(states)[0], golden[f"logits.{i}"]) < 1e-5
        if name == "second":
            check_draws(draft, states, tokens[:, 0], golden, i)


def check_draws(draft: DFlash, states: Tensor, first: Tensor, golden: dict, i: int) -> None:
    """DFlash 2: the greedy tokens and, given those that were drawn, the distributions."""
    argmax = lambda logits: (logits[:, -1].argmax(-1), logits[:, -1])  # noqa: E731
    logits = draft.logits(states)
    drafted, _ = draft.draw(logits, states, first, argmax)
    assert drafted[0].equal(golden[f"drafted.{i}"])
    drawn, q = golden[f"drawn.{i}"], []

    def follow(found: Tensor) -> tuple[Tensor, Tensor]:
        q.append(found[0, -1].softmax(-1))
        return drawn[len(q) - 1 : len(q)], q[-1][None]

    draft.draw(logits, states, first, follow)
    for found, candidates, expected in zip(q, golden[f"candidates.{i}"], golden[f"q.{i}"]):
        # Scores of 10 turn their errors of 1e-5 into ten times that.
        assert error(found[candidates], expected) < 1e-4 and found.sum() - expected.sum() < 1e-5


def test_layers_where_the_file_names_none():
    """As Qwen3-8B's draft of five layers and Qwen3-4B's have them in their files."""
    assert default_layers(36, 5) == [1, 9, 17, 25, 33] and default_layers(36, 1) == [18]


def watched(kind: str, policy: str, rows: int, room: int = 160) -> Speculator:
    """A speculator whose q is compared with a new draft's, of the features of the text so far, read
    anew. checked: their lengths."""
    model, whole = random_model(1), random_model(1)
    draft, new = (random_dflash(5, model, kind) for _ in range(2))
    new.share(whole)
    made = speculator(model, room, draft, policy, rows, Sampling(temperature=1.0))
    propose, made.checked = made.draft.propose, []

    def compared(text: Tensor, last: Tensor, k: int, n_slots: int) -> tuple[Tensor, ...]:
        drafted, q, proposed = propose(text, last, k, n_slots)
        for b in (made.last < made.ends).nonzero().flatten().tolist():
            tokens = text[b, : last[b] + 1]
            n = len(tokens)
            whole.setup(n, 1, new.block.places)
            read(whole, tokens[None])
            new.setup(n + k, 1)
            new.read(whole.features[:, : n - 1], torch.arange(n - 1)[None])
            block = torch.nn.functional.pad(tokens[-1:], (0, k), value=new.block.mask)
            states = new(block[None], torch.arange(n - 1, n + k)[None], new.slots)
            said = iter(drafted[b])
            softmax = lambda logits: (next(said)[None], logits[:, -1].softmax(-1))  # noqa: E731
            if kind == "first":
                softmax = lambda logits: (drafted[b], logits[:, -1].softmax(-1))  # noqa: E731
            _, expected = new.draw(new.logits(states), states, tokens[-1:], softmax)
            assert torch.allclose(q[b, :k], expected[0], atol=1e-4), f"{b} at {last[b]}"
            made.checked.append(k)
        return drafted, q, proposed

    made.draft.propose = compared
    return made


TEXTS = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [3], [5, 6, 7, 1]]


@pytest.mark.parametrize("kind", ["first", "second"])
@pytest.mark.parametrize(
    "policy, texts, samples",
    [
        ("7", TEXTS, 1),
        ("bass", TEXTS[:1], 1),
        ("3", [TEXTS[0] * 7 + [5, 6], TEXTS[2] * 10], 2),
        ("1", TEXTS[1:2], 2),
    ],
)
def test_a_block_goes_by_the_text_alone(kind, policy, texts, samples, monkeypatch):
    """Whatever was drafted and rejected before, of a ragged batch and of several samples. A long
    prompt is read in pieces."""
    monkeypatch.setattr("generate.PREFILL_TOKENS", 32)
    monkeypatch.setattr("drafts.dflash.DFlashDraft.READ_TOKENS", 32)
    made = watched(kind, policy, len(texts) * samples)
    rows = run(made, texts, 40, samples=samples)
    assert (
        len(made.checked) > 10 * len(rows) and 0 < made.counts["accepted"] < made.counts["drafted"]
    )


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[:2]])
def test_so_it_does_after_pauses_and_in_a_chats_next_turn(texts, monkeypatch):
    """Blocks of changing lengths, steps without drafts, and turns behind a part of the text, which
    only a row alone can have."""
    monkeypatch.setattr("drafts.dflash.DFlashDraft.READ_TOKENS", 32)
    made = watched("first", "auto", len(texts), 400)
    plan = [k for pause in (30, 1, 2, 40, 5) for k in [0] * pause + [4, 2, 6]]
    made.policy = Policy(0)
    made.policy.update = lambda *_: setattr(made.policy, "k", plan.pop(0) if plan else 0)
    first = run(made, texts, 200)[0]
    assert not plan and set(made.checked) == {2, 4, 6}
    made.policy = Policy(3)
    for start in (205, 160, 30) if len(texts) == 1 else ():
        made.checked.clear()
        run(made, [[first[150], 1, 6, 2]], 30, start=start)
        assert len(made.checked) > 5


PROMPTS = [list(range(2, 72)), [5], list(range(40, 73))]


@pytest.mark.parametrize("policy", ["1", "7", "auto", "hf"])
@pytest.mark.parametrize("recurrent, kind", [(False, "first"), (True, "first"), (True, "second")])
def test_texts_are_greedy_decoding(policy, recurrent, kind):
    """Of a ragged batch and of its rows alone, to the last slot of the cache; behind a recurrent
    target, too."""
    golden = ROOT / "tests" / "golden" / ("qwen3.5" if recurrent else "qwen3")
    plain = run(Engine(load_checkpoint(golden), 130, 3, GREEDY), PROMPTS, 60)
    target = load_checkpoint(golden)
    made = speculator(target, 130, random_dflash(3, target, kind), policy, 3)
    assert run(made, PROMPTS, 60) == plain
    for prompt, row in zip(PROMPTS, plain):
        assert run(made, [prompt], 60) == [row]


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@torch.no_grad()
def test_kernels_stand_in_for_a_block(quantize):
    """Their plain twins, on a CPU."""
    from fast.decoder import BlockDecoder, faster

    model = random_model(1)
    draft = random_dflash(5, model)
    if quantize:
        config = replace(draft.config, dim=64, ffn_dim=96, n_head=8)
        draft = DFlash(config, draft.block).requires_grad_(False)
        for p in draft.parameters():
            p.data = torch.randn(p.shape) * (0.1 if p.dim() > 1 else 1)
        round_model(draft, quantize, 32)
    draft.setup(40, 2)
    width = draft.fc.in_features
    draft.read(torch.randn(2, 20, width), torch.arange(20).expand(2, -1))
    block = torch.randint(8, (2, 5)), torch.tensor([[20], [7]]) + torch.arange(5), draft.slots
    draft.share(model)
    if quantize:  # of the draft's width
        draft.head = nn.Linear(64, 8, bias=False).requires_grad_(False)
        draft.embed = nn.Embedding(8, 64).requires_grad_(False)
    expected = draft.logits(draft(*block))
    fused = faster(draft)
    assert type(fused) is BlockDecoder and error(fused.logits(fused(*block)), expected) < 1e-5
    assert faster(random_dflash(5, model, "second")).block.second  # is itself


@traced()
def test_compiled_texts_are_the_eager_ones():
    golden = ROOT / "tests" / "golden" / "qwen3"
    plain = run(Engine(load_checkpoint(golden), 130, 3, GREEDY), PROMPTS, 30)
    target = load_checkpoint(golden)
    made = speculator(target, 130, random_dflash(3, target), "2", 3, mode="fast")
    made.warm_up(3)
    assert run(made, PROMPTS, 30) == plain


def test_by_name_in_python_and_on_the_command_line(call, target):
    with_letters(target.directory)
    model, draft = target.directory, DRAFTS / "windowed"
    how = dict(device="cpu", temperature=0, max_new_tokens=20)
    plain = LLM(model, **how)("abcab")
    assert LLM(model, draft=str(draft), draft_tokens=7, **how)("abcab").tokens == plain.tokens
    where = "--checkpoint", model, "--prompt", "abcab", "--device", "cpu", "--temperature", 0
    more = "--max-new-tokens", 20
    texts = [
        call("generate.py", generate.main, *where, *more, *drafted)[1]
        for drafted in ((), ("--draft", draft))
    ]
    assert texts[0] == texts[1]
    many = "--draft", draft, "--draft-tokens", 8
    said = one_line(call("generate.py", generate.main, *where, *many))
    assert "draft_tokens=8: the draft proposes 7 tokens at most" in said
    alone = "--checkpoint", draft, "--prompt", "a", "--device", "cpu"
    assert "give its directory as draft" in one_line(call("generate.py", generate.main, *alone))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "config, own, tensors, words",
    [
        ({}, dict(mask_token_id=None), {}, "mask_token_id=None: want int"),
        ({}, dict(mask_token_id=96), {}, "mask_token_id=96 96 another model"),
        ({}, dict(target_layer_ids=[1, 3, 8]), {}, "[1, 3, 8] distinct 0 to 6 8 layers"),
        ({}, dict(target_layer_ids=[1, 3, 7]), {}, "[1, 3, 7] distinct 0 to 6"),
        ({}, dict(markov_rank=4), {}, "dflash_config has markov_rank"),
        (dict(num_target_layers=36), {}, {}, "num_target_layers=36 8 another model"),
        (dict(vocab_size=50), {}, {}, "vocab_size=50 96 another model"),
        ({}, dict(target_layer_ids=[1, 3]), {}, "fc.weight [32, 96] [32, 64] another model"),
        (dict(block_size=33), {}, {}, "block_size=33: want 2 to 32"),
        (dict(block_size=1), {}, {}, "block_size=1: want 2 to 32"),
        ({}, {}, {"fc.weight": None}, "fc.weight is missing"),
        ({}, {}, {"fc.weight": zeros(32, 90)}, "fc.weight [32, 90] [32, 96]"),
        ({}, {}, {"hidden_norm.weight": None}, "hidden_norm.weight is missing"),
        (dict(architectures=["DFlash3DraftModel"]), {}, {}, "DFlash3DraftModel DFlash2DraftModel"),
        (dict(architectures=["DFlash2DraftModel"]), {}, {}, "conv_kernel_size=None: want int"),
        (dict(layer_types=["full_attention"]), {}, {}, "layer_types full_attention 3 layers"),
        (dict(layer_types=["sliding_attention"] * 3), {}, {}, "sliding_window=None: want int"),
    ],
)
def test_what_cannot_draft_is_refused(tmp_path, target, config, own, tensors, words):
    directory = shutil.copytree(DRAFTS / "plain", tmp_path / "draft")
    ids = dict(target_layer_ids=[1, 3, 6], mask_token_id=95) | own
    rewrite(directory / "config.json", dflash_config=ids, **config)
    change_tensors(directory, **tensors)
    said = refusal(open_dflash, directory, target)
    assert all(re.search(rf"(^|\W){re.escape(word)}", said) for word in words.split(" ")), said


def test_a_draft_for_a_target_of_another_width_is_refused(tmp_path):
    make(tmp_path / "wide", hidden_size=64, vocab_size=96, num_hidden_layers=8)
    said = refusal(open_dflash, DRAFTS / "plain", Checkpoint(tmp_path / "wide"))
    assert "64 dimensions: the draft is of another model" in said


def test_blocks_are_as_long_as_they_may_be_and_no_longer():
    """Also where a policy has no such length."""
    model = random_model(1)
    draft = random_dflash(5, model)
    for size in (3, 8, 11):
        draft.block = replace(draft.block, size=size)
        assert max(speculator(model, 60, draft, "auto").step_of) == size - 1


def test_what_is_null_in_dflash_config_is_read_outside_of_it(tmp_path, target):
    directory = shutil.copytree(DRAFTS / "plain", tmp_path / "draft")
    ids = dict(target_layer_ids=[1, 3, 6], mask_token_id=95, block_size=None)
    rewrite(directory / "config.json", dflash_config=ids, block_size=5)
    assert open_dflash(directory, target)[0].block.size == 5


@pytest.mark.parametrize("recurrent", [False, True])
def test_each_number_of_accepted_tokens(monkeypatch, recurrent):
    golden = ROOT / "tests" / "golden" / ("qwen3.5" if recurrent else "qwen3")
    target = load_checkpoint(golden)
    made = speculator(target, 130, random_dflash(3, target), "4")
    every_number_is_accepted(monkeypatch, made, load_checkpoint(golden))


@pytest.mark.parametrize(
    "how", [dict(), dict(compile=True, no_kernels=True), dict(kv_cache="int8")]
)
def test_a_rounded_draft_in_16_bits(target, how):
    """It runs unpacked where no kernels serve it, and with the target's kind of cache."""
    with_letters(target.directory)
    options = dict(device="cpu", dtype="bfloat16", temperature=0, max_new_tokens=9, quiet=True)
    make_dflash(target.directory / "draft", target.directory)
    llm = LLM(
        target.directory,
        draft=str(target.directory / "draft"),
        draft_quantize="int8",
        **options,
        **how,
    )
    assert len(llm("abcab").tokens) == 9
    layer = llm.draft_model.layers[0]
    assert type(layer.attn.wqkv) is nn.Linear and layer.attn.wqkv.weight.dtype == torch.bfloat16
    assert (layer.attn.cache.k.dtype == torch.int8) == ("kv_cache" in how)

"""The layer that drafts in a checkpoint's own files: its logits are those of others, texts stay the
target's, and what is refused. tests/drafts/test_eagle.py has what holds for all heads."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import generate
from drafts import open_draft
from drafts.mtp import MtpHead
from generate import Engine
from helpers import (
    CPU,
    F32,
    GREEDY,
    ROOT,
    change_tensors,
    error,
    one_line,
    read,
    refusal,
    rewrite,
    run,
    speculator,
    traced,
    with_letters,
)
from hub.checkpoint import Checkpoint
from hub.formats import bits_of, load
from hub.vet import check_memory
from llm import LLM
from model import Transformer
from quantize import QuantizedExperts, QuantizedLinear

MODELS = ROOT / "tests" / "mtp"
NAMES = sorted(path.name for path in MODELS.iterdir())
DENSE = MODELS / "qwen3.5"


def opened(directory: Path, **how) -> tuple[Transformer, MtpHead]:
    target = Checkpoint(directory)
    return load(target, CPU, F32), load(open_draft("mtp", (target, None)), CPU, F32, **how)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_the_modules_of_transformers(name):
    """Behind each token of a text, and of three more drafted tokens. The mixtures' experts are
    tensors each its own in the target, and one tensor in the draft."""
    golden = load_file(MODELS / name / "golden.safetensors")
    tokens, expected = golden["tokens"], golden["logits"]
    model, head = opened(MODELS / name)
    head.share(model)
    model.setup(len(tokens), 1, features=head.target_places)
    read(model, tokens[None])
    for n in range(1, len(tokens)):
        pairs, logits = tokens[1 : n + 1], []
        head.setup(n + 4, 1, features=(1,))
        inputs = head.inputs(pairs, head.project(model.features[0, :n]))[None]
        logits.append(read(head, pairs[None], inputs=inputs)[0, -1])
        for at in range(n, n + 3):
            token = logits[-1].argmax()[None, None]
            inputs = head.inputs(token, head.norm(head.features[:, at - 1 : at]))
            logits.append(head(token, torch.tensor([[at]]), inputs=inputs)[0, 0])
        assert error(torch.stack(logits), expected[n - 1]) < 1e-5


PROMPTS = [list(range(2, 72)), [5], list(range(40, 73))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["1", "3", "8", "auto", "bass"])
def test_texts_are_greedy_decoding(name, policy):
    """Of a ragged batch and of its rows alone, over several blocks of recurrent layers; the last
    token of each text is in the last slot."""
    plain = run(Engine(load(Checkpoint(MODELS / name), CPU, F32), 130, 3, GREEDY), PROMPTS, 60)
    model, head = opened(MODELS / name)
    made = speculator(model, 130, head, policy, 3)
    assert run(made, PROMPTS, 60) == plain
    for prompt, row in zip(PROMPTS, plain):
        assert run(made, [prompt], 60) == [row]
    assert policy == "auto" or made.counts["drafted"] > made.counts["accepted"]


def test_each_number_of_accepted_tokens(monkeypatch):
    """All from 0 to 4 are seen, by drafts that are the text's own tokens as far as a plan says."""
    model, head = opened(DENSE)
    plain = run(Engine(load(Checkpoint(DENSE), CPU, F32), 130, 1, GREEDY), PROMPTS[:1], 60)[0]
    made, seen = speculator(model, 130, head, "4"), []
    propose, text = made.draft.propose, torch.tensor([PROMPTS[0] + plain + [0] * 9])

    def planned(*step):
        drafted, q, proposed = propose(*step)
        at, right = int(step[1]) + 1, len(seen) % 5
        seen.append(right)
        drafted = text[:, at : at + 4].clone()
        drafted[:, right:] = (drafted[:, right:] + 1) % 96
        q = torch.nn.functional.one_hot(drafted, 96).float()
        return drafted, torch.nn.functional.pad(q, (0, 0, 0, 1)), proposed

    monkeypatch.setattr(made.draft, "propose", planned)
    assert run(made, PROMPTS[:1], 60) == [plain]
    assert set(seen) == {0, 1, 2, 3, 4} and made.counts["accepted"] > 30


def test_a_chats_next_turn_goes_on_from_what_is_there():
    model, head = opened(DENSE)
    made = speculator(model, 250, head, "3")
    engine = Engine(load(Checkpoint(DENSE), CPU, F32), 250, 1, GREEDY)
    text = PROMPTS[0] + run(made, PROMPTS[:1], 50)[0]
    for turn in ([1, 2, 3], list(range(40))):
        start = max(made.oldest(len(text)), len(text) - 9)
        found = run(made, [text[start:] + turn], 30, start=start)
        assert found == run(engine, [text + turn], 30)
        text = text + turn + found[0]


@traced()
def test_compiled_texts_are_the_eager_ones():
    """With fast/'s modules: the head is packed once, for both."""
    plain = run(Engine(load(Checkpoint(DENSE), CPU, F32), 130, 3, GREEDY), PROMPTS, 30)
    model, head = opened(DENSE)
    made = speculator(model, 130, head, "2", 3, mode="fast")
    made.warm_up(3)
    assert run(made, PROMPTS, 30) == plain
    assert made.draft.head.head is made.target.model.head


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_the_layer_is_rounded_and_fc_is_not(name):
    _, head = opened(MODELS / name, quantize="int8")
    assert type(head.layers[0].attn.wqkv) is QuantizedLinear and type(head.fc) is torch.nn.Linear
    kind = QuantizedExperts if "moe" in name else QuantizedLinear
    assert type(head.layers[0].ffn.w_down) is kind


def test_memory_counts_the_layer_and_not_what_it_shares(monkeypatch):
    """To the byte."""
    target = Checkpoint(DENSE)
    draft = open_draft("mtp", (target, None))
    own = sum(p.numel() for p in load(draft, CPU, F32).parameters() if not p.is_meta)
    norms = 2 * target.config.dim  # in front of fc
    counted = own - norms - 2 * target.config.dim**2
    monkeypatch.setattr("hub.vet.host_memory", lambda: 4 * counted)
    check_memory([(draft.counted(), bits_of(draft))], 0, 0, CPU, F32)
    monkeypatch.setattr("hub.vet.host_memory", lambda: 4 * counted - 1)
    assert "out of memory" in refusal(
        check_memory, [(draft.counted(), bits_of(draft))], 0, 0, CPU, F32
    )


@pytest.fixture
def model(tmp_path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(DENSE, directory)
    with_letters(directory)
    return directory


def test_by_name_in_python_and_on_the_command_line(call, model):
    prompt = "abcab"
    how = dict(device="cpu", temperature=0, max_new_tokens=20)
    plain = LLM(model, **how)(prompt)
    assert LLM(model, draft="mtp", draft_tokens=3, **how)(prompt).tokens == plain.tokens
    more = "--device", "cpu", "--temperature", 0, "--max-new-tokens", 20
    where = "--checkpoint", model, "--prompt", prompt
    texts = [
        call("generate.py", generate.main, *where, *more, *draft)[1]
        for draft in ((), ("--draft", "mtp"))
    ]
    assert texts[0] == texts[1]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "config, tensors, said",
    [
        ({}, {"mtp.fc.weight": None}, "has no mtp.fc.weight: want a checkpoint that brings"),
        (dict(mtp_num_hidden_layers=2), {}, "mtp_num_hidden_layers=2"),
        (dict(mtp_use_dedicated_embeddings=True), {}, "mtp_use_dedicated_embeddings=True"),
        ({}, {"mtp.fc.weight": zeros(32, 63)}, "fc.weight is BF16 [32, 63], want"),
        ({}, {"mtp.norm.weight": None}, "norm.weight is missing"),
        ({}, {"mtp.layers.0.self_attn.q_proj.weight": zeros(64, 32)}, "q_proj.weight is BF16 [64,"),
    ],
)
def test_what_cannot_draft_is_one_line(call, model, config, tensors, said):
    change_tensors(model, **tensors)
    rewrite(model / "config.json", **config)
    options = "--device", "cpu", "--checkpoint", model, "--prompt", "a", "--draft", "mtp"
    assert said in one_line(call("generate.py", generate.main, *options))


def test_a_typo_is_understood():
    assert "did you mean mtp?" in refusal(open_draft, "MTP", (None, None))

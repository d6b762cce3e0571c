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
    EAGLE,
    F32,
    GREEDY,
    ROOT,
    TINY,
    change_tensors,
    error,
    every_number_is_accepted,
    one_line,
    put,
    read,
    read_json,
    refusal,
    rewrite,
    run,
    speculator,
    traced,
    with_letters,
)
from hub.checkpoint import Checkpoint
from hub.formats import bits_of, check_draft_quantize, load
from hub.vet import check_memory
from llm import LLM
from model import Transformer
from quantize import QuantizedExperts, QuantizedLinear

MODELS = ROOT / "tests" / "mtp"
NAMES = sorted(path.name for path in MODELS.iterdir())
DENSE = MODELS / "qwen3.5"
BEHIND = "glm4-moe-lite", "deepseek-v3"  # whose layer that drafts is behind the last


def opened(directory: Path, **how) -> tuple[Transformer, MtpHead]:
    target = Checkpoint(directory)
    return load(target, CPU, F32), load(open_draft("mtp", (target, None)), CPU, F32, **how)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_the_modules_of_transformers(name):
    """Behind each token of a text, and of three more drafted tokens. The mixtures' experts are
    tensors each its own in the target and, of Qwen, one tensor in the draft. There the state that
    the layer hands on to itself is normed, in DeepSeek's manner it is not."""
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
            state = head.features[:, at - 1 : at]
            inputs = head.inputs(token, head.norm(state) if head.norm_output else state)
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
    model, head = opened(DENSE)
    every_number_is_accepted(
        monkeypatch, speculator(model, 130, head, "4"), load(Checkpoint(DENSE), CPU, F32)
    )


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe-lite"])
def test_a_chats_next_turn_goes_on_from_what_is_there(name):
    model, head = opened(MODELS / name)
    made = speculator(model, 250, head, "3")
    engine = Engine(load(Checkpoint(MODELS / name), CPU, F32), 250, 1, GREEDY)
    text = PROMPTS[0] + run(made, PROMPTS[:1], 50)[0]
    for turn in ([1, 2, 3], list(range(40))):
        start = max(made.oldest(len(text)), len(text) - 9)
        found = run(made, [text[start:] + turn], 30, start=start)
        assert found == run(engine, [text + turn], 30)
        text = text + turn + found[0]


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe-lite"])
@traced()
def test_compiled_texts_are_the_eager_ones(name):
    """With fast/'s modules: the head is packed once, for both."""
    plain = run(Engine(load(Checkpoint(MODELS / name), CPU, F32), 130, 3, GREEDY), PROMPTS, 30)
    model, head = opened(MODELS / name)
    made = speculator(model, 130, head, "2", 3, mode="fast")
    made.warm_up(3)
    assert run(made, PROMPTS, 30) == plain
    assert made.draft.head.head is made.target.model.head


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "glm4-moe-lite"])
def test_the_layer_is_rounded_and_fc_is_not(name):
    _, head = opened(MODELS / name, quantize="int8")
    first = head.layers[0].attn.w_in if name in BEHIND else head.layers[0].attn.wqkv
    assert type(first) is QuantizedLinear and type(head.fc) is torch.nn.Linear
    kind = QuantizedExperts if "moe" in name else QuantizedLinear
    assert type(head.layers[0].ffn.w_down) is kind


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe-lite"])
def test_memory_counts_the_layer_and_not_what_it_shares(name, monkeypatch):
    """To the byte."""
    draft = open_draft("mtp", (Checkpoint(MODELS / name), None))
    own = sum(p.numel() for p in load(draft, CPU, F32).parameters() if not p.is_meta)
    sizes = [(draft.config, draft.weights, bits_of(draft))], 0, 0, CPU, F32
    monkeypatch.setattr("hub.vet.host_memory", lambda: 4 * own)
    check_memory(*sizes)
    monkeypatch.setattr("hub.vet.host_memory", lambda: 4 * own - 1)
    assert "out of memory" in refusal(check_memory, *sizes)


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_a_rounded_draft_in_16_bits(model, kind):
    """Eager, it is unpacked in the target's type, whose embedding it has."""
    how = dict(device="cpu", dtype="bfloat16", temperature=0, max_new_tokens=9, quiet=True)
    llm = LLM(
        model if kind == "mtp" else TINY,
        draft="mtp" if kind == "mtp" else str(EAGLE),
        draft_quantize="int8",
        **how,
    )
    assert len(llm("abcab").tokens) == 9
    assert llm.draft_model.layers[0].attn.wqkv.weight.dtype == torch.bfloat16


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


def as_published(directory: Path) -> None:
    """Nested, beside a vision part."""
    held = load_file(directory / "model.safetensors")
    moved = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in held.items()
        if name.startswith("model.")
    }
    gone = {name: None for name in held if name.startswith("model.")}
    change_tensors(directory, **gone | moved, **{"model.visual.norm.weight": zeros(4)})
    text = read_json(directory / "config.json")
    put(
        directory / "config.json",
        dict(
            model_type="qwen3_5",
            text_config=text,
            vision_config={},
            tie_word_embeddings=text["tie_word_embeddings"],
        ),
    )


def e4m3(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One block: codes and the inverse scale."""
    scale = tensor.float().abs().max() / 448
    return (tensor.float() / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)


@pytest.mark.parametrize("rounded", ["nothing", "all but mtp, untold", "all"])
@torch.no_grad()
def test_as_it_is_published(tmp_path, capsys, rounded):
    """FP8 in blocks: of the target, whose quantizer left mtp out without a word, or of both, but
    for fc."""
    directory = shutil.copytree(DENSE, tmp_path / "model")
    as_published(directory)
    plain = open_draft("mtp", (Checkpoint(directory), None))
    exact = load(plain, CPU, F32)
    if rounded != "nothing":
        changes = {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            mine = name.startswith("mtp.")
            if "_proj.weight" in name and "in_proj_" not in name and (rounded == "all" or not mine):
                codes, scale = e4m3(tensor)
                changes |= {name: codes, f"{name}_scale_inv": scale}
        change_tensors(directory, **changes)
        settings = dict(quant_method="fp8", weight_block_size=[128, 128])
        left = [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "a", "b")] + ["mtp.fc"]
        settings["modules_to_not_convert"] = left
        rewrite(directory / "config.json", quantization_config=settings)
    target = Checkpoint(directory)
    draft = open_draft("mtp", (target, None))
    head = load(draft, CPU, F32)
    load(target, CPU, F32)
    held = [module for module in head.modules() if isinstance(module, QuantizedLinear)]
    assert bool(held) == (rounded == "all") == bool(bits_of(draft))
    assert set(bits_of(draft)) <= set(draft.weights)
    for module, other in ((head.layers[0].attn.wo, exact.layers[0].attn.wo),):
        weight = module.dequantize(F32) if held else module.weight
        assert error(weight, other.weight) < (0.05 if held else 1e-7)
    bits_of(target)
    assert capsys.readouterr().err.count("tensors of its vision part") == 1
    if held:
        said = refusal(check_draft_quantize, draft, "int8")
        assert "draft_quantize=int8" in said and "quantized already" in said


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


@pytest.mark.parametrize("name", BEHIND)
def test_the_layer_behind_the_last_is_read_past_without_a_draft(name, capsys):
    """Without a word, as it is no mistake."""
    model = load(Checkpoint(MODELS / name), CPU, F32)
    assert len(model.layers) == 3 and not capsys.readouterr().err


def test_its_layer_is_of_the_kind_that_its_tensors_say(tmp_path):
    """The model's last layer may be dense, and its draft have experts; or there is no such layer."""
    shutil.copytree(MODELS / "glm4-moe-lite", tmp_path / "model")
    for kinds in (["dense", "sparse", "dense"], ["dense"] * 3):
        rewrite(tmp_path / "model" / "config.json", mlp_layer_types=kinds)
        target = Checkpoint(tmp_path / "model")
        if "sparse" in kinds:
            assert open_draft("mtp", (target, None)).config.layers[0].moe
        else:
            with pytest.raises(ValueError, match="has no layer of the kind that its draft is"):
                open_draft("mtp", (target, None))


@torch.no_grad()
@pytest.mark.parametrize("all_of_it", [False, True])
def test_fp8_blocks_of_the_layer_behind_the_last(tmp_path, all_of_it):
    """Of the target alone, or of both. eh_proj stays as it is, and kv_b is made plain."""
    directory = shutil.copytree(MODELS / "deepseek-v3", tmp_path / "model")
    exact = load(open_draft("mtp", (Checkpoint(directory), None)), CPU, F32)
    changes = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        behind = name.startswith("model.layers.3.")
        if "_proj" in name and "eh_proj" not in name and (all_of_it or not behind):
            codes, scale = e4m3(tensor)
            changes |= {name: codes, f"{name}_scale_inv": scale}
    change_tensors(directory, **changes)
    settings = dict(quant_method="fp8", weight_block_size=[128, 128], fmt="e4m3")
    rewrite(directory / "config.json", quantization_config=settings)
    target = Checkpoint(directory)
    draft = open_draft("mtp", (target, None))
    head, model = load(draft, CPU, F32), load(target, CPU, F32)
    attn = head.layers[0].attn
    assert isinstance(attn.wo, QuantizedLinear) == all_of_it == bool(bits_of(draft))
    assert isinstance(model.layers[0].attn.wo, QuantizedLinear)
    assert type(attn.wkv) is type(head.fc) is torch.nn.Linear
    weight = attn.wo.dequantize(F32) if all_of_it else attn.wo.weight
    for found, of in ((weight, "wo"), (attn.wkv.weight, "wkv")):
        assert error(found, getattr(exact.layers[0].attn, of).weight) < 0.05


@pytest.mark.parametrize(
    "config, tensors, said",
    [
        ({}, {"model.layers.3.eh_proj.weight": None}, "has no layers.3.eh_proj.weight: want"),
        (dict(num_nextn_predict_layers=0), {}, "num_nextn_predict_layers=0, "),
        (dict(num_nextn_predict_layers=2), {}, "num_nextn_predict_layers=2, "),
        ({}, {"model.layers.3.eh_proj.weight": zeros(32, 63)}, "eh_proj.weight is BF16 [32, 63]"),
        ({}, {"model.layers.3.shared_head.norm.weight": None}, "shared_head.norm.weight is miss"),
        ({}, {"model.layers.3.mlp.experts.1.up_proj.weight": None}, "up_proj.weight is missing"),
    ],
)
def test_what_cannot_draft_behind_the_last_layer_is_one_line(call, tmp_path, config, tensors, said):
    directory = shutil.copytree(MODELS / "glm4-moe-lite", tmp_path / "model")
    with_letters(directory)
    change_tensors(directory, **tensors)
    rewrite(directory / "config.json", **config)
    options = "--device", "cpu", "--checkpoint", directory, "--prompt", "a", "--draft", "mtp"
    assert said in one_line(call("generate.py", generate.main, *options))


def test_a_typo_is_understood():
    assert "did you mean mtp?" in refusal(open_draft, "MTP", (None, None))

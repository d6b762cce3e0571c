"""Prefill and decode, eager and compiled; streaming and stops."""

import random
from copy import deepcopy
from itertools import islice, product

import pytest
import torch
from torch._dynamo.utils import counters

from cli.output import show
from generate import Engine, generate
from llm import Completion
from helpers import (
    ENGINES,
    DRAFT,
    EOS,
    F32,
    FAMILIES,
    GOLDEN,
    GREEDY,
    TINY,
    error,
    is_golden,
    load_checkpoint,
    make,
    on_each_device,
    open_tokenizer,
    python,
    read,
    run,
    speculator,
    tiny,
    trained,
    with_json,
)
from generate import Sampling
from hub.tokenizer import PARTS, Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(TINY)


@pytest.mark.parametrize(
    "family, mode, device",
    [
        *product(FAMILIES, ["eager"], ["cpu"]),
        *(
            pytest.param(*how, "cuda", marks=pytest.mark.gpu)
            for how in [
                *product(FAMILIES, ["eager"]),
                *product(["mistral", "llama3.1", "qwen3"], ["compile", "fast"]),
            ]
        ),
    ],
)
def test_greedy_ragged_batch_equals_transformers(family, mode, device):
    assert is_golden(ENGINES[mode](tiny(device, GOLDEN / family), 64, 3, GREEDY), GOLDEN / family)


def test_an_engine_used_by_hand_keeps_no_gradients():
    engine = Engine(tiny(), 20, 2)
    results = [*engine.begin([[1, 2], [3]], 5, 0, 1), *engine.step()]
    caches = [layer.attn.cache.k for layer in engine.model.layers]
    assert not any(tensor.requires_grad for tensor in results + caches)


PENALIZED = Sampling(0.9, 50, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)
SAMPLINGS = Sampling(0.9, 50, 0.95), Sampling(0.7), Sampling(1.2, 20, 0.8, 0.1), PENALIZED, GREEDY


def same_for_all(eager: Engine, compiled: Engine, monkeypatch) -> None:
    """Lengths 1 and 2, both sides of 256 slots in use, a cached start, chunks of 4 columns, lengths
    on both sides of their edges: no graph is added, and a seed draws what it draws in eager
    code."""
    graphs = counters["stats"]["unique_graphs"]
    cases = [([[5 + i] * n, [9] * 3], 0) for i, n in enumerate((1, 2, 7, 250, 390))] + [
        ([[1, 2], [3]], 4)
    ]
    drawn = {}
    for columns, cases in ((4096, cases), (8, chunk_cases())):
        monkeypatch.setattr("generate.PREFILL_TOKENS", columns)
        for sampling in SAMPLINGS:
            for engine in (eager, compiled):
                engine.set_sampling(sampling)
                torch.manual_seed(1)
                drawn[engine] = [
                    run(engine, prompts, 5, start, samples=2) for prompts, start in cases
                ]
            assert drawn[eager] == drawn[compiled], sampling
    assert counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fast", "compile"])
def test_what_is_compiled_once_serves_all_prompts_and_samplings(mode, monkeypatch):
    """On a CPU: test_llm.py, where the README's example compiles."""
    engines = [ENGINES[kind](tiny("cuda"), 400, 4, SAMPLINGS[0]) for kind in ("eager", mode)]
    engines[1].warm_up(2)
    same_for_all(*engines, monkeypatch)


@pytest.mark.parametrize("quantize", [None, "int4"])
@torch.no_grad()
def test_experts_are_compiled_once_for_prompts_of_all_lengths(tmp_path, quantize):
    """Few rows and many."""
    make(tmp_path, "mixtral", num_local_experts=40, num_experts_per_tok=2, intermediate_size=32)
    moe = load_checkpoint(tmp_path, quantize=quantize).layers[0].ffn
    graphs = counters["stats"]
    FusedMoE = pytest.importorskip("fast.experts").FusedMoE
    for module in (moe, FusedMoE(deepcopy(moe))):
        compiled, before = (
            torch.compile(module, dynamic=True, fullgraph=True, backend="eager"),
            graphs["unique_graphs"],
        )
        for n in (2, 3, 17, 40):
            compiled(torch.randn(5, n, 64))
        assert graphs["unique_graphs"] == before + 1


def chunk_cases() -> list[tuple[list[list[int]], int]]:
    """Prompts, and how many tokens are cached, for chunks of 4 columns and of 16."""
    lengths = 1, 3, 4, 5, 8, 9, 13, 16, 17, 33
    return [([[*range(30, 30 + n)], [39, 38, 37]], start) for n in lengths for start in (0, 6)]


@on_each_device
@pytest.mark.parametrize("columns", (4, 16))
def test_a_prompt_in_chunks_gives_what_it_gives_whole(device, columns, monkeypatch):
    """Compiled, the test above shows it."""
    engine, widths = Engine(tiny(device), 60, 4, GREEDY), set()
    expected = [run(engine, prompts, 6, start, 2) for prompts, start in chunk_cases()]
    engine.model.layers[0].register_forward_pre_hook(
        lambda _, inputs: widths.add(inputs[0].shape[1])
    )
    monkeypatch.setattr("generate.PREFILL_TOKENS", 2 * columns)
    assert [run(engine, prompts, 6, start, 2) for prompts, start in chunk_cases()] == expected
    assert max(widths) == max(columns, engine.columns())


@on_each_device
@pytest.mark.parametrize("start, length", [(0, 1), (0, 17), (1, 2), (5, 17)])
def test_a_text_may_fill_the_cache_to_the_last_token(device, start, length):
    """There is room behind it for the columns that fill up its prompt."""
    expected, found = (
        run(Engine(tiny(device), size, 1, GREEDY), [[7] * length], 1, start)
        for size in (99, start + length + 1)
    )
    assert found == expected


@on_each_device
@pytest.mark.parametrize("kind", ["int8", "int8-values"])
@torch.no_grad()
def test_a_cache_in_int8_gives_the_same_alone_in_batches_in_chunks_and_verified(
    device, kind, monkeypatch
):
    model, prompts = tiny(device), [[1, 300, 500, 20, 7, 8, 9, 300, 11], [1, 7]]
    alone = [run(Engine(model, 60, 1, GREEDY, cache=kind), [prompt], 30)[0] for prompt in prompts]
    cache, expected = model.layers[0].attn.cache, [row for row in alone for _ in range(2)]
    assert (cache.k.dtype, cache.v.dtype) == (torch.int8 if kind == "int8" else F32, torch.int8)
    assert (cache.v[0, :, :30].int().abs().amax(-1) == 127).all()  # the largest of each head
    draft = load_checkpoint(DRAFT, torch.device(device))
    assert run(speculator(model, 60, draft, "3", 4, cache=kind), prompts, 30, samples=2) == expected
    for columns in 4096, 4:
        monkeypatch.setattr("generate.PREFILL_TOKENS", columns)
        assert run(Engine(model, 60, 4, GREEDY, cache=kind), prompts, 30, samples=2) == expected
    tokens, logits = torch.tensor([[*prompts[0], *alone[0]]], device=device), []
    for of in (kind, "16-bit"):
        model.setup(40, 1, cache=of)
        logits.append(read(model, tokens)[0])
    assert error(*logits) < 2e-2


@pytest.mark.gpu
def test_a_gpu_step_is_handed_over_when_the_next_is_launched():
    engine, launched = Engine(tiny("cuda"), 40, 1, GREEDY), []
    step = engine.step
    engine.step = lambda: launched.append(1) or step()
    for count, _ in enumerate(islice(generate(engine, [[1, 300]], 20), 5), start=1):
        assert len(launched) == count


STORY, LETTERS = "The dog sat. The do not. A dog ran away.", "A naïve café: 火曜日 🦊👩‍🚀!"


def completion_of(
    tokens: list[int], tokenizer: Tokenizer, stops: list[str] = (), prompt: list[int] = [1]
):
    """A completion fed token by token, and what was visible after each."""
    completion, seen = Completion("", prompt, tokenizer, 999, list(stops)), []
    for token in tokens:
        completion.add(token, -1.0, 0.0)
        seen.append(completion.visible())
        if completion.finish_reason:
            break
    return completion, seen


def test_the_space_behind_a_prompt_is_kept(tmp_path):
    """By a tokenizer that drops the first space of what it decodes, as Llama's does; the bundled
    one does not. So is one behind tokens that have no text."""
    tokenizer = trained(tmp_path, ["Once upon a time there was a fox"] * 9, {}, vocab_size=40)
    prompt, tokens = (tokenizer.encode_text(text) for text in ("Once upon", "Once upon a time"))
    for more in [], [1] * 9:
        following = more + tokens[len(prompt) :]
        assert completion_of(following, tokenizer, prompt=prompt)[0].text == " a time"


def test_streamed_text_equals_the_text_decoded_at_once(tokenizer):
    """Random tokens, with a beginning of sequence, which has no text of its own, strewn among
    them."""
    tokens = torch.randint(259, 2048, (300,))
    tokens[torch.rand(300) < 0.1] = 1
    completion, _ = completion_of(tokens.tolist(), tokenizer)
    assert completion.text == tokenizer.decode(tokens.tolist())


# The bytes in the order of with_json()'s tokens: those that stand for themselves come first.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = PRINTED + [byte for byte in range(256) if byte not in PRINTED]


@pytest.mark.parametrize("end", ["stop", "length", "time"])
@pytest.mark.parametrize("kind", ["random", "invalid", "incomplete"])
def test_what_cannot_become_a_character_is_shown_as_it_comes_and_at_the_end(tmp_path, end, kind):
    """Bytes, each a token, as Python decodes them. At most three are held back, as they may yet
    become a character, and no step decodes more than a few tokens."""
    tokenizer, sizes = with_json(tmp_path), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: sizes.append(len(ids)) or decode(ids)
    data = {"random": b"", "invalid": b"\xff" * 300, "incomplete": b"\xf0\x9f\xa6" * 100}[kind]
    for _ in range(100 if kind == "random" else 0):
        data += random.choice(["é".encode(), "🦊".encode(), b"a", random.randbytes(1)])
    data += "🦊".encode()[: random.randrange(1, 4)]
    completion = Completion("", [64] * 20, tokenizer, len(data) + (end != "length"))
    for n, byte in enumerate(data, start=1):
        completion.add(BYTES.index(byte), -1.0, 0.0)
        text, shown = data[:n].decode(errors="replace"), completion.visible()
        assert text.startswith(shown) or n == len(data)
        assert len(text) - len(shown) <= 3
    if end == "stop":
        completion.add(EOS, -1.0, 0.0)
    if end == "time":
        completion.finish("time")
    assert completion.visible() == data.decode(errors="replace")
    assert completion.finish_reason == end and max(sizes) <= 12


def test_many_tokens_without_text_cost_no_more_than_few(tmp_path):
    tokenizer, sizes = with_json(tmp_path), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: sizes.append(len(ids)) or decode(ids)
    tokenizer.stops = set()
    completion, _ = completion_of([EOS] * 100 + [64], tokenizer)
    assert completion.text == "a" and max(sizes) <= 12


# Of which model, the prompt, what follows, its text, its thoughts
ANSWERS = [
    (
        "gpt-oss",
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>A fox, final?<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>1<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>Blue, ï.",
        "Blue, ï.",
        "A fox, final?1",
    ),
    (
        "gpt-oss",
        "<|start|>assistant<|channel|>analysis<|message|>A fox",
        ", blue<|end|><|start|>assistant<|channel|>final<|message|>Blue.",
        "Blue.",
        ", blue",
    ),
    ("gpt-oss", "Once upon", " a time", " a time", ""),
    (
        "Muse Glimmer",
        "<|start|>user<|message|>Hi<|eot|><|start|>assistant",
        " to=self<|message|>A fox<|eom|><|start|>assistant to=user<|message|>Blue, ï.",
        "Blue, ï.",
        "A fox",
    ),
    ("Muse Glimmer", "<|start|>assistant", "<|message|>Blue.", "Blue.", ""),
    (
        "Muse Glimmer",
        "<|start|>assistant",
        " to=f<|message|>{}<|eom|><|start|>assistant to=user<|message|>Blue",
        "Blue",
        "{}",
    ),
    (
        "Gemma 4",
        "<|turn>model\n",
        "<|channel>thought\nA fox\nis<channel|>Blue, ï.",
        "Blue, ï.",
        "A fox\nis",
    ),
    ("Gemma 4", "<|turn>model\n<|channel>thought\n<channel|>", "Blue\n.", "Blue\n.", ""),
    ("Gemma 4", "<|turn>model\n<|channel>tho", "ught\nA<channel|>Blue", "Blue", "A"),
    ("Gemma 4", "<|turn>model\n<|channel>thought\nA", " fox<channel|>Blue", "Blue", " fox"),
]


@pytest.mark.parametrize("model, prompt, answer, text, thoughts", ANSWERS)
def test_of_an_answer_in_parts_the_last_is_the_text(
    model, prompt, answer, text, thoughts, tmp_path, capsys
):
    """What it thinks, its tools and the stop token are no text; --show-thinking puts the former on
    stderr."""
    names = *PARTS[model].begins, "<|turn>"
    tokenizer = with_json(tmp_path, post_process=False, more=names)
    prompt, tokens = map(tokenizer.encode_text, (prompt, answer))
    completion, seen = completion_of([*tokens, EOS], tokenizer, ["A fox is"], prompt)
    assert (completion.text, completion.thoughts) == (text, thoughts)
    assert (completion.tokens, completion.finish_reason) == (tokens, "stop")
    assert all(text.startswith(shown) for shown in seen)
    for thinking in (False, True):
        show([completion], thinking=thinking)
        told = f"{thoughts}\n" if thinking and thoughts else ""
        assert capsys.readouterr() == (f"{text}\n", told)


@pytest.mark.parametrize("model", PARTS)
def test_a_model_that_lacks_a_mark_has_no_parts(model, tmp_path):
    assert not with_json(tmp_path, more=(*PARTS[model].begins,)[1:]).parts


@pytest.mark.parametrize(
    "text, stops, expected",
    [
        (STORY, ["dog ran"], "The dog sat. The do not. A "),
        (STORY, ["zzz", "dog"], "The "),
        (STORY, ["ran away", "do ran"], "The dog sat. The do not. A dog "),
        ("A do", ["dog"], "A do"),
        (LETTERS, [], LETTERS),
    ],
)
def test_a_stop_text_across_tokens_and_a_part_of_a_character_are_never_shown(
    tokenizer, text, stops, expected
):
    """What might have become a stop text shows in the end."""
    completion, seen = completion_of([*tokenizer.encode_text(text)[1:], 2], tokenizer, stops)
    assert completion.text == seen[-1] == expected and completion.finish_reason == "stop"
    assert all(expected.startswith(shown) for shown in seen)
    # The tokens include the stop text.
    assert tokenizer.decode(completion.tokens).startswith(expected)


def test_importing_generate_imports_no_library_ahead_of_its_use():
    late = {"huggingface_hub", "tokenizers", "sentencepiece", "jinja2", "torch._dynamo"}
    code = "import torch, sys; before = set(sys.modules); import llm; print(*(set(sys.modules) - before))"
    names = python("-c", code).stdout.split()
    assert "hub.checkpoint" in names and not late & set(names)


@pytest.mark.gpu
def test_attention_on_a_gpu_sees_few_shapes(monkeypatch):
    """For each of them cuDNN makes a plan of 1.8 MiB, which PyTorch keeps for good."""
    shapes, attend = set(), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "model.F.scaled_dot_product_attention",
        lambda q, k, *rest, **options: (
            shapes.add((q.shape, k.shape)),
            attend(q, k, *rest, **options),
        )[1],
    )
    engine = Engine(tiny("cuda"), 600, 1, GREEDY)
    for length in range(1, 500, 7):
        run(engine, [[5] * length], 9)
    prompts, caches = {q[2] for q, _ in shapes} - {1}, {k[2] for _, k in shapes}
    assert caches == {256, 512} and prompts == set(range(16, 513, 16))
    assert len(shapes) == 32 + 2  # prompts, and steps

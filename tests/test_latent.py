"""Multi-head latent attention and its families' routers (GLM-4.7-Flash, DeepSeek-V3): the absorbed
form against the open one, what the cache holds, the router by hand, and all that generates on top
of it. Logits are in test_model.py, ranks in test_tp.py."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from generate import Engine, Sampling
from helpers import (
    ENGINES,
    F32,
    GOLDEN,
    GREEDY,
    LATENT,
    error,
    golden,
    load_checkpoint,
    logits_of,
    make,
    random_dflash,
    random_head,
    read,
    refusal,
    run,
    speculator,
    traced,
)
from hub import vet
from hub.checkpoint import hf_weights
from model import KVCache, LatentAttention, MoE, Transformer
from quantize import QuantizedLinear

GLM, STRAIGHT = "glm4-moe-lite", "glm4-moe-lite-straight"
DEEPSEEK, MSCALE = "deepseek-v3", "deepseek-v3-mscale"
of_each = pytest.mark.parametrize("family", [GLM, STRAIGHT, DEEPSEEK, MSCALE])
PROMPTS = [[(37 * i + n) % 96 for i in range(n)] for n in (45, 1, 23)]


def model_of(family: str = GLM) -> Transformer:
    return load_checkpoint(GOLDEN / family)


def mixture(model: Transformer) -> MoE:
    return next(layer.ffn for layer in model.layers if layer.config.moe)


def in_form(model: Transformer, form: str) -> Transformer:
    """Whose attention takes this form alone."""
    for layer in model.layers:
        layer.attn.most_absorbed = 10**9 if form == "absorbed" else 0
    return model


# Attention


@of_each
@pytest.mark.parametrize("cache", ["16-bit", "int8", "int8-values"])
@torch.no_grad()
def test_both_forms_give_the_same_logits(family, cache):
    """Of a ragged prompt and of a step of 3 tokens, over slots full of rubbish."""
    tokens = torch.randint(96, (2, 20))
    lengths = torch.tensor([14, 5])
    steps = tokens.gather(1, lengths[:, None] + torch.arange(3))
    found = []
    for form in ("open", "absorbed"):
        model = in_form(model_of(family), form)
        model.setup(40, 3, cache=cache)
        for layer in model.layers:
            for part in layer.attn.cache.buffers():
                part.fill_(3)
        prompt = read(model, tokens[:, :14])
        found.append((prompt, model(steps, lengths[:, None] + torch.arange(3))))
    for opened, absorbed in zip(*found):
        assert not opened.equal(absorbed) and error(absorbed, opened) < 1e-5


@of_each
@pytest.mark.parametrize("form", ["open", "absorbed"])
@torch.no_grad()
def test_each_form_alone_gives_transformers_logits(family, form):
    """Token by token through the cache, and all at once."""
    for tokens, logits in zip(*golden(GOLDEN / family)):
        model = in_form(model_of(family), form)
        model.setup(len(tokens), 1)
        at_once = read(model, tokens[None])[0]
        alone = [
            model(token.view(1, 1), torch.tensor([[at]]))[0] for at, token in enumerate(tokens)
        ]
        assert error(at_once, logits) < 1e-5 and error(torch.cat(alone), logits) < 1e-5


@torch.no_grad()
def test_few_tokens_are_absorbed_and_many_opened(monkeypatch):
    """Few are those for which the products are fewer: by hand, of GLM-4.7-Flash's sizes, 512 x 448
    products a slot and head to open it, against 576 more a token."""
    model, taken = model_of(), []
    for form in ("opened", "absorbed"):
        plain = getattr(LatentAttention, form)

        def spied(self, *args, form=form, plain=plain):
            taken.append(form)
            return plain(self, *args)

        monkeypatch.setattr(LatentAttention, form, spied)
    few = model.layers[0].attn.most_absorbed
    assert few == 24 * 22 // (48 - 22)
    model.setup(64, 1)
    for T, form in ((1, "absorbed"), (few, "absorbed"), (few + 1, "opened"), (40, "opened")):
        taken.clear()
        read(model, torch.randint(96, (1, T)))
        assert taken == [form] * 3


@torch.no_grad()
def test_the_absorbed_matrices_take_no_memory_of_their_own():
    attn = model_of().layers[0].attn
    wk, wv = attn.matrices()
    assert wk.shape == (4, 12, 24) and wv.shape == (4, 10, 24)
    ends = attn.wkv.weight.data_ptr(), attn.wkv.weight.data_ptr() + attn.wkv.weight.nbytes
    assert all(ends[0] <= part.data_ptr() < ends[1] for part in (wk, wv))


@pytest.mark.parametrize("kind, numbers", [("16-bit", 32 * 2), ("int8", 32 + 8)])
@torch.no_grad()
def test_the_cache_holds_the_latent_and_what_turns_of_a_token(kind, numbers):
    """24 and 8 numbers a token and layer, and two scales: nothing for each head."""
    model = model_of()
    assert KVCache.bytes_per_token(model.config, torch.bfloat16, kind) == 3 * numbers
    model.setup(10, 2, cache=kind)
    cache = model.layers[0].attn.cache
    assert type(cache) is KVCache and cache.k.shape == (2, 1, 10, 8) and cache.v.shape[3] == 24
    assert {part.shape[:3] for part in cache.buffers()} == {(2, 1, 10)}


@torch.no_grad()
def test_what_turns_is_in_16_bits_where_values_alone_are_rounded():
    model = model_of()
    model.setup(10, 2, cache="int8-values")
    cache = model.layers[0].attn.cache
    assert (cache.k.dtype, cache.v.dtype, cache.k_scale) == (F32, torch.int8, None)


# The router


@torch.no_grad()
@pytest.mark.parametrize("n_group, n_chosen_group", [(1, 1), (2, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_router_by_hand(n_group, n_chosen_group, normalize):
    """In float64, a row at a time: groups by the sum of their best two, corrected; then the best of
    these groups' experts, corrected; their scores, not corrected."""
    moe = mixture(model_of(DEEPSEEK))
    settings = dict(n_group=n_group, n_chosen_group=n_chosen_group, normalize=normalize)
    moe.moe = replace(moe.moe, n_chosen=2, scale=1.7, **settings)
    moe.correction.copy_(torch.randn(8) / 2)
    x = torch.randn(300, 32)
    weights, experts = moe.route(x)
    size, changed = 8 // n_group, 0
    for row, found, chosen in zip(x, weights, experts):
        scores = torch.sigmoid(row.double() @ moe.router.weight.double().T).tolist()
        corrected = [score + c for score, c in zip(scores, moe.correction.tolist())]
        groups = [range(i, i + size) for i in range(0, 8, size)]

        def worth(group: range) -> float:
            return sum(sorted((corrected[i] for i in group), reverse=True)[:2])

        groups = sorted(groups, key=worth, reverse=True)[:n_chosen_group]
        among = sorted((i for group in groups for i in group), key=lambda i: -corrected[i])
        wanted = among[:2]
        changed += {*wanted} != {*sorted(range(8), key=lambda i: -scores[i])[:2]}
        total = sum(scores[i] for i in wanted) if normalize else 1
        assert chosen.tolist() == wanted
        exact = torch.tensor([1.7 * scores[i] / total for i in wanted])
        assert error(found, exact) < 1e-6
    assert changed > 30


@torch.no_grad()
def test_the_router_is_in_fp32_whatever_the_models_type():
    moe = mixture(load_checkpoint(GOLDEN / GLM, dtype=torch.bfloat16))
    assert moe.router.weight.dtype == moe.correction.dtype == F32
    x = torch.randn(50, 32).bfloat16()
    weights, experts = moe.route(x)
    exact = mixture(model_of()).route(x.float())
    assert experts.equal(exact[1]) and weights.equal(exact[0].bfloat16())


@torch.no_grad()
def test_shared_experts_are_one_whose_weight_is_1():
    moe, x = mixture(model_of(DEEPSEEK)), torch.randn(2, 3, 32)
    assert moe.shared_gate is None and moe.shared.w_down.weight.shape == (32, 2 * 16)
    torch.testing.assert_close(moe(x), moe.mixture(x, x) + moe.shared(x))


# Engines


def alone(model: Transformer, new_tokens: int, **how) -> list[list[int]]:
    engine = Engine(model, 100, 1, GREEDY, **how)
    return [run(engine, [prompt], new_tokens)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", [GLM, DEEPSEEK])
@pytest.mark.parametrize("cache", ["16-bit", "int8", "int8-values"])
def test_a_batch_its_samples_chunks_and_cached_starts(family, cache, monkeypatch):
    """Each gives what a prompt gives alone."""
    model = model_of(family)
    expected = alone(model, 28, cache=cache)
    twice = [row for row in expected for _ in range(2)]
    for columns in (4096, 3 * 6):
        monkeypatch.setattr("generate.PREFILL_TOKENS", columns)
        assert run(Engine(model, 100, 3, GREEDY, cache=cache), PROMPTS, 28) == expected
        assert run(Engine(model, 100, 6, GREEDY, cache=cache), PROMPTS, 28, samples=2) == twice
    fresh, engine = (Engine(deepcopy(model), 100, 1, GREEDY, cache=cache) for _ in range(2))
    text = PROMPTS[0] + run(engine, PROMPTS[:1], 20)[0]
    expected = run(fresh, [text], 8)
    for start in (64, 50, 9):
        assert run(engine, [text[start:]], 8, start) == expected


@pytest.mark.parametrize("family, mode", [(GLM, "fast"), (DEEPSEEK, "compile")])
@traced()
def test_compiled_code_draws_what_eager_code_draws(family, mode):
    """Also where both go on from what is cached."""
    model, drawn = model_of(family), []
    for kind in ("eager", mode):
        engine = ENGINES[kind](deepcopy(model), 100, 2, Sampling(0.9, 50))
        torch.manual_seed(3)
        rows = run(engine, PROMPTS[1:], 30)
        drawn.append(rows + run(engine, [[7, 8, 9], [5]], 9, start=38))
    assert drawn[0] == drawn[1]


@torch.no_grad()
def test_a_layer_is_compiled_once_for_prompts_of_all_lengths():
    """On both sides of the number that is few: the one code takes the open form."""
    model = model_of()
    model.setup(64, 2)
    layer = model.layers[1]
    layer.compile(dynamic=True, fullgraph=True, backend="eager")
    before = counters["stats"]["unique_graphs"]
    cos, sin = model.ropes[0].cos, model.ropes[0].sin
    for T in (2, 5, 20, 21, 40):
        at = torch.arange(T)[None]
        slots = model.slots[: T + 8]
        where = at, cos[at].unsqueeze(2), sin[at].unsqueeze(2), slots <= at[:, None, :, None]
        layer(torch.randn(2, T, 32), *where, model.rows)
    assert counters["stats"]["unique_graphs"] == before + 1


# Drafts


def noisy(model: Transformer) -> Transformer:
    """A copy that often, but not always, says the same token."""
    model, random = deepcopy(model), torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data += 0.1 * p.std() * torch.randn(p.shape, generator=random) if p.dim() == 2 else 0
    return model


@pytest.mark.parametrize("kind", ["prompt-lookup", "noisy", "llama2", "of llama2", "eagle"])
@pytest.mark.parametrize("policy", ["3", "8"])
def test_speculation_is_greedy_decoding(kind, policy):
    model = model_of(DEEPSEEK if policy == "8" else GLM)
    draft = None
    if kind == "noisy":
        draft = noisy(model)
    elif kind == "llama2":
        draft = model_of("llama2")
    elif kind == "of llama2":
        model, draft = model_of("llama2"), model
    elif kind == "eagle":
        plain = replace(model_of("llama2").config, layers=model_of("llama2").config.layers[:1])
        head = random_head(3, as_if(model, plain), [*range(0, 96, 2)], places=(0, 1, 3))
        draft = head
    expected = run(Engine(deepcopy(model), 100, 3, GREEDY), PROMPTS, 40)
    made = speculator(model, 100, draft, policy, 3)
    assert run(made, PROMPTS, 40) == expected
    assert run(made, PROMPTS[1:], 5) == [row[:5] for row in expected[1:]]
    counts = made.counts
    assert counts["drafted"] > counts["accepted"] and (counts["accepted"] or kind != "noisy")


def as_if(model: Transformer, config) -> Transformer:
    """A head's sizes are its own; of the target it asks for the width and the vocabulary."""
    with torch.device("meta"):
        return Transformer(replace(config, dim=model.config.dim))


@pytest.mark.parametrize("kind", ["first", "second"])
def test_dflash_reads_the_hidden_states_of_its_layers(kind):
    model = model_of()
    expected = run(Engine(deepcopy(model), 100, 3, GREEDY), PROMPTS, 30)
    made = speculator(model, 100, random_dflash(4, model, kind), "5", 3)
    assert run(made, PROMPTS, 30) == expected and made.counts["drafted"] > 0


# Rounding


@torch.no_grad()
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("q_lora_rank", [32, None])
def test_what_decode_multiplies_by_parts_of_stays_in_16_bits(tmp_path, quantize, q_lora_rank):
    make(tmp_path, "deepseek_v3", **LATENT | dict(q_lora_rank=q_lora_rank))
    exact, model = load_checkpoint(tmp_path), load_checkpoint(tmp_path, quantize=quantize)
    attn = model.layers[1].attn
    assert attn.wkv.weight.equal(exact.layers[1].attn.wkv.weight)
    assert isinstance(attn.w_in, QuantizedLinear) and isinstance(attn.wo, QuantizedLinear)
    assert isinstance(attn.wq, QuantizedLinear) == bool(q_lora_rank)
    assert isinstance(model.layers[1].ffn.shared.w_down, QuantizedLinear)
    assert 0 < error(logits_of(model), logits_of(exact)) < (0.02 if quantize == "int8" else 0.3)
    for form in ("open", "absorbed"):
        plain = logits_of(in_form(model, form))
        assert error(plain, logits_of(model)) < 1e-5


# Memory


@pytest.mark.parametrize("kind, dtype", [("16-bit", torch.bfloat16), ("int8", F32)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_counted_by_latents_of_which_each_rank_has_all(kind, dtype, ranks, monkeypatch):
    model = load_checkpoint(GOLDEN / GLM, dtype=dtype)
    model.setup(50, 3, cache=kind)
    config, table = model.config, hf_weights(model.config)
    caches = sum(part.nbytes for layer in model.layers for part in layer.attn.cache.buffers())
    assert KVCache.bytes_per_token(config, dtype, kind) * 3 * 50 == caches
    whole = sum(of.shape.numel() for of in model.parameters()) * dtype.itemsize
    shared = dtype.itemsize * sum(
        torch.Size(of.shape).numel() for of in table.values() if of.rows or of.columns
    )
    need = whole - shared + shared / ranks + caches
    monkeypatch.setattr(vet, "free_memory", lambda device, ranks=1: need)
    count = partial(
        vet.check_memory,
        [(config, table, {})],
        3,
        50,
        torch.device("cuda"),
        dtype,
        ranks,
        kind=kind,
    )
    count()
    monkeypatch.setattr(vet, "free_memory", lambda device, ranks=1: need - 1)
    assert "GiB of cache (3 rows of 50)" in refusal(count)

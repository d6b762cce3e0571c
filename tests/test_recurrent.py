"""Recurrent layers (Qwen3.5, Qwen3-Next): the delta rule against a loop over tokens, what a
DeltaCache holds, going back after rejected tokens, and all that generates on top of it."""

import math
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import generate
from generate import Engine, Sampling
from helpers import (
    ENGINES,
    CPU,
    F32,
    GOLDEN,
    GREEDY,
    error,
    load_checkpoint,
    one_line,
    random_mtp,
    read,
    refusal,
    rewrite,
    run,
    speculator,
    traced,
    with_letters,
)
from hub import vet
from hub.checkpoint import hf_weights
from model import BLOCK, RING, Config, DeltaCache, DeltaConfig, DeltaNet, KVCache, LayerConfig
from model import Transformer, delta_rule
from speculative import Policy, Speculator

THRICE, NEXT = "qwen3.5-thrice", "qwen3-next"
HEADS = [(2, 2), (2, 4), (1, 3)]  # key heads, value heads


def model_of(family: str = THRICE) -> Transformer:
    return load_checkpoint(GOLDEN / family)


def text_of(*shape: int) -> Tensor:
    return torch.randint(96, shape)


# The rule


def exact_rule(q, k, v, decay, beta, state) -> tuple[Tensor, list[Tensor]]:
    """One row token by token in float64: q, k [T, G, E], v [T, H, V], decay (its logarithm) and
    beta [T, H], state [H, E, V] -> y [T, H, V], and the states before each token and at the end."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    each, ys, states = v.shape[1] // k.shape[1], [], [state]
    for t in range(len(v)):
        y, after = torch.zeros_like(v[t]), torch.zeros_like(state)
        for h in range(v.shape[1]):
            S, key = state[h] * decay[t, h].exp(), k[t, h // each]
            S = S + torch.outer(key, beta[t, h] * (v[t, h] - S.T @ key))
            y[h], after[h] = S.T @ q[t, h // each], S
        state = after
        ys.append(y)
        states.append(state)
    return torch.stack(ys), states


@pytest.mark.parametrize("G, H", HEADS)
def test_the_delta_rule_is_the_recurrence_and_writes_states_where_they_belong(G, H):
    """Of rows that begin anywhere in a block and end anywhere, also at once. What heads forget in a
    token goes from next to nothing to all but nothing is left. In block 0 what the states were does
    not count."""
    firsts = torch.tensor([0, 0, 5, 31, 32, 63, 100, 64, 97, 40])
    counts = torch.tensor([0, 33, 27, 1, 64, 34, 40, 32, 0, 56])
    B, E, V, L = len(firsts), 6, 5, 96
    q, k = (F.normalize(torch.randn(B, L, G, E), dim=-1) for _ in range(2))
    v, beta = torch.randn(B, L, H, V), torch.rand(B, L, H)
    decay = -torch.randn(B, L, H).mul(3).exp()
    states = torch.randn(B, 2, H, E, V)
    ends = firsts % BLOCK + counts
    text = (torch.arange(L) < ends[:, None])[:, :, None]
    before = states.clone()
    y, found = delta_rule(q, k, v, decay * text, beta * text, states, firsts, counts)
    assert y.shape == (B, L, H, V) and states.equal(before)
    for b, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist())):
        block = first // BLOCK
        state = states[b, block % 2] if block else torch.zeros(H, E, V)
        parts = (x[b, :end] for x in (q, k, v, decay, beta))
        exact, after = exact_rule(*parts, state) if end else (v[b, :0], [state])
        assert not end or error(y[b, :end], exact) < 1e-5
        expected = states[b].clone()
        for complete in range(1, end // BLOCK + 1):
            expected[(block + complete) % 2] = after[complete * BLOCK].float()
        for place in (0, 1):
            kept = expected[place].equal(states[b, place])
            if kept:
                assert found[b, place].equal(states[b, place])
            assert error(found[b, place], expected[place]) < 1e-5


# A layer


def make_layer(G: int, H: int, width: int) -> DeltaNet:
    """Of random weights."""
    delta = DeltaConfig(G, H, key_dim=6, value_dim=5, width=width)
    config = Config(16, (LayerConfig(),), 1, 1, 16, 16, 16, 16)
    layer = DeltaNet(config, delta).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=0.4)
    layer.log_a.copy_(torch.linspace(-4, 1, H))
    return layer


def exact_layer(layer: DeltaNet, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A text x [T, D] token by token in float64 -> [T, D], and the states before each token and at
    the end."""
    delta = layer.delta
    G, H, E, V = delta.n_key_head, delta.n_value_head, delta.key_dim, delta.value_dim
    w_in, w_gates, taps, log_a, dt_bias, norm, wo = (
        of.double()
        for of in (
            layer.w_in.weight,
            layer.w_gates.weight,
            layer.filter,
            layer.log_a,
            layer.dt_bias,
            layer.norm,
            layer.wo.weight,
        )
    )
    made, qkv = x.double() @ w_in.T, []
    for t in range(len(x)):
        seen = torch.zeros(delta.channels, dtype=torch.float64)
        for back in range(min(delta.width, t + 1)):  # nothing is before the text
            seen += taps[:, -1 - back] * made[t - back, : delta.channels]
        qkv.append(seen * torch.sigmoid(seen))
    qkv = torch.stack(qkv)
    q, k = (qkv[:, n * G * E : (n + 1) * G * E].view(-1, G, E) for n in (0, 1))
    q, k = (of / (of.square().sum(-1, keepdim=True) + 1e-6).sqrt() for of in (q, k))
    v, z = qkv[:, 2 * G * E :].view(-1, H, V), made[:, delta.channels :].view(-1, H, V)
    gates = x.double() @ w_gates.T
    beta = torch.sigmoid(gates[:, :H])
    decay = -log_a.exp() * torch.log1p((gates[:, H:] + dt_bias).exp())
    state = torch.zeros(H, E, V, dtype=torch.float64)
    y, states = exact_rule(q / E**0.5, k, v, decay, beta, state)
    y = y / (y.square().mean(-1, keepdim=True) + layer.eps).sqrt() * norm
    return (y * z * torch.sigmoid(z)).flatten(1) @ wo.T, states


def forward(layer: DeltaNet, x: Tensor, first: Tensor, ends: Tensor | None = None) -> Tensor:
    """x [B, T, D] from positions first [B] on."""
    positions = first[:, None] + torch.arange(x.shape[1])
    rows = torch.arange(len(x))[:, None]
    return layer(x, positions, None, None, None, rows, ends)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("G, H", HEADS)
@torch.no_grad()
def test_a_layer_is_its_formula_and_keeps_the_last_two_states_and_inputs(G, H, width):
    """A convolution sees nothing before the text, whatever the cache held. Read at once without a
    cache, and through one in pieces that are as short as the convolution is wide, and longer."""
    layer, x = make_layer(G, H, width), torch.randn(2, 108, 16)
    exact, states = zip(*(exact_layer(layer, row) for row in x))
    at_once = forward(layer, x, torch.zeros(2, dtype=torch.long))
    assert error(at_once, torch.stack(exact)) < 1e-5
    cache = layer.cache = DeltaCache((3, layer.delta), CPU, F32)
    for part in cache.buffers():
        part.normal_(std=5)
    untouched = [part[2].clone() for part in cache.buffers()]
    n = 0
    for T in (1, 1, 2, 3, 1, 40, 31, 1, 28):
        y = forward(layer, x[:, n : n + T], torch.full((2,), n))
        assert error(y, torch.stack(exact)[:, n : n + T]) < 1e-5
        n += T
        made = torch.cat((layer.w_in(x)[..., : layer.delta.channels], layer.w_gates(x)), dim=-1)
        for t in range(max(0, n - RING), n):
            assert torch.allclose(cache.inputs[:2, t % RING], made[:, t], atol=1e-6)
        for block in range(max(1, n // BLOCK - 1), n // BLOCK + 1):
            for row in (0, 1):
                assert error(cache.states[row, block % 2], states[row][block * BLOCK]) < 1e-5
    assert n == x.shape[1] > RING + BLOCK
    assert all(part[2].equal(of) for part, of in zip(cache.buffers(), untouched))


# Forwards


class Rows:
    """Texts of a model, and what a forward gave wherever it read them, which one forward over the
    whole gives, too."""

    def __init__(self, model: Transformer, texts: Tensor):
        self.model, self.texts = model, texts
        B, L = texts.shape
        model.setup(L)
        self.expected = read(model, texts)
        model.setup(L, B, spare=80)
        for layer in model.layers:
            for part in layer.attn.cache.buffers():
                part.normal_(std=3)

    def read(
        self, first: list[int], true: list[int], wrong: list[int], T: int, beyond: list[int] = [0]
    ) -> None:
        """Each row's T columns from its first position on: its text, then wrong tokens, as drafts
        that are rejected, then padding. What is of the text must be right. beyond: so many
        positions behind the text the columns of a row begin that has nothing to read."""
        first, true, wrong, beyond = (torch.tensor(of) for of in (first, true, wrong, beyond))
        at = (first + beyond)[:, None] + torch.arange(T)
        tokens = self.texts.gather(1, at.clamp(max=self.texts.shape[1] - 1))
        is_true = at < (first + true)[:, None]
        tokens = torch.where(is_true, tokens, text_of(*at.shape))
        ends = first + true + wrong
        out = self.model(tokens, at, ends=None if (true + wrong == T).all() else ends)
        for b, n in enumerate(true.tolist()):
            expected = self.expected[b, first[b] : first[b] + n]
            assert not n or error(out[b, :n], expected) < 1e-5, (b, first[b], n)


@pytest.mark.parametrize("family", [THRICE, NEXT])
@torch.no_grad()
def test_pieces_padding_and_rejected_tokens_change_nothing(family):
    """Each row at its own pace: some columns are text, then come rejected tokens, then padding,
    perhaps nothing but padding, also far behind the text, as in the last chunks of other prompts.
    A row may go back as far as is promised, or begin anew."""
    random = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    B, L = 4, 230
    rows = Rows(model_of(family), text_of(B, L))
    right, oldest, most, back, anew = [0] * B, [0] * B, [0] * B, 0, 0
    for _ in range(70):
        T = number(1, [3, 12, 33, 70][number(0, 3)])
        first, true, wrong, beyond = [], [], [], []
        for b in range(B):
            if right[b] == L or number(0, 50) == 0:
                right[b], oldest[b] = 0, 0
                anew += 1
            if number(0, 9) == 0:
                first.append(right[b])
                true.append(0)
                wrong.append(0)
                beyond.append(number(0, L + 80 - T - right[b]))
                continue
            low = max(oldest[b], right[b] - (number(0, 60) if number(0, 2) == 0 else 0))
            back += low < right[b]
            first.append(low)
            true.append(min(number(0, T) if number(0, 2) else T, L - low))
            wrong.append(number(0, min(T - true[b], BLOCK)) if number(0, 1) else 0)
            beyond.append(0)
        rows.read(first, true, wrong, T, beyond)
        for b in range(B):
            right[b] = first[b] + true[b]
            most[b] = max(most[b], right[b])
            oldest[b] = max(oldest[b], rows.model.oldest(right[b] + wrong[b]))
    assert min(most) > 4 * BLOCK and max(most) == L and back > 40 and anew > 4


@pytest.mark.parametrize("k", [0, 1, 5, 31, 32])
@torch.no_grad()
def test_any_number_of_drafts_may_be_accepted_at_any_place_in_a_block(k):
    """Two verifications of up to 33 tokens, one after the other, and a step after these."""
    lasts = [1, 15, 30, 31, 32, 33, 62, 63, 64, 95]
    rows = Rows(model_of(), text_of(len(lasts), 180))
    for accepted in sorted({0, 1, k // 2, k - 1, k} & {*range(k + 1)}):
        rows.read([0] * len(lasts), lasts, [0] * len(lasts), max(lasts))
        at = lasts
        for kept in (accepted, k - accepted):
            rows.read(at, [kept + 1] * len(at), [k - kept] * len(at), k + 1)
            at = [of + kept + 1 for of in at]
        rows.read(at, [2] * len(at), [0] * len(at), 2)


@torch.no_grad()
def test_before_the_oldest_token_nothing_is_promised_and_from_there_on_all_is():
    """So nothing is read anew that need not be."""
    model, L = model_of(), 200
    text = text_of(1, L)
    rows = Rows(model, text)
    for n in (1, 31, 63, 64, 65, 95, 96, 127, 128, 150, 200):
        oldest = model.oldest(n)
        assert oldest <= max(0, n - BLOCK)
        for first in {oldest, (oldest + n) // 2}:
            rows.read([0], [n], [0], n)
            rows.read([first], [n - first], [0], n - first)
        if n >= 95:
            rows.read([0], [n], [0], n)
            out = model(text[:, oldest - 1 : n], torch.arange(oldest - 1, n)[None])
            assert error(out[0], rows.expected[0, oldest - 1 : n]) > 1e-3


@torch.no_grad()
def test_rows_that_are_arranged_go_on_as_those_that_they_were():
    texts = text_of(3, 130)
    rows, order = Rows(model_of(), texts), [2, 0, 0]
    lengths = [40, 7, 100]
    rows.read([0] * 3, lengths, [0] * 3, 100)
    rows.model.arrange_rows(order, 100)
    rows.texts, rows.expected = texts[order], rows.expected[order]
    at = [lengths[row] for row in order]
    rows.read(at, [30, 1, 12], [0, 29, 0], 30)


# Engines


PROMPTS = [[(37 * i + n) % 96 for i in range(n)] for n in (105, 1, 33)]


def alone(model: Transformer, prompts: list[list[int]], new_tokens: int, **how) -> list[list[int]]:
    return [
        run(Engine(model, 160, 1, GREEDY, **how), [prompt], new_tokens)[0] for prompt in prompts
    ]


@pytest.mark.parametrize("family", [THRICE, NEXT])
def test_a_batch_its_samples_and_chunks_give_what_each_prompt_gives_alone(family, monkeypatch):
    model = model_of(family)
    expected = alone(model, PROMPTS, 28)
    twice = [row for row in expected for _ in range(2)]
    for columns in (4096, 3 * 10):
        monkeypatch.setattr("generate.PREFILL_TOKENS", columns)
        assert run(Engine(model, 160, 4, GREEDY), PROMPTS, 28) == expected
        assert run(Engine(model, 160, 7, GREEDY), PROMPTS, 28, samples=2) == twice


@traced()
def test_a_seed_draws_the_same_in_eager_and_compiled_code():
    """Also where both go on from what is cached."""
    model, drawn = model_of("qwen3.5"), []
    sampling = Sampling(0.9, 50)
    for mode in ("eager", "eager", "compile"):
        engine = ENGINES[mode](deepcopy(model), 120, 2, sampling)
        torch.manual_seed(3)
        steps = [*generate.generate(engine, PROMPTS[1:], 40)]
        steps += generate.generate(engine, [[7, 8, 9], [5]], 9, start=38)
        drawn.append(torch.tensor(steps))  # tokens and their log-probabilities
    assert drawn[0].equal(drawn[1]) and drawn[0][..., 0].equal(drawn[2][..., 0])
    assert error(drawn[2], drawn[0]) < 1e-5


# Drafts


def noisy(model: Transformer, share: float = 0.1) -> Transformer:
    """A copy that often, but not always, says the same token."""
    model, random = deepcopy(model), torch.Generator().manual_seed(2)
    model.config = replace(model.config, context=512)
    for p in model.parameters():
        p.data += share * p.std() * torch.randn(p.shape, generator=random) if p.dim() == 2 else 0
    return model


def draft_of(name: str | None, target: Transformer) -> Transformer | None:
    makers = {"itself": deepcopy, "noisy": noisy}
    return makers[name](target) if name in makers else name and model_of(name)


@pytest.mark.parametrize(
    "family, name, policy",
    [
        (THRICE, None, "32"),
        (NEXT, None, "hf"),
        (THRICE, "llama2", "3"),
        ("llama2", "qwen3.5", "5"),
        ("qwen3.5", "noisy", "auto"),
        (NEXT, "noisy", "4"),
        ("qwen3.5", "itself", "32"),
    ],
)
def test_speculation_is_greedy_decoding_whichever_of_the_two_is_recurrent(family, name, policy):
    """None: prompt lookup. Of three rows at a pace of their own, twice: nothing is left of the
    texts before."""
    model = model_of(family)
    expected = run(Engine(model, 150, 3, GREEDY), PROMPTS, 40)
    made = speculator(model, 150, draft_of(name, model), policy, 3)
    if policy == "auto":  # so slow that drafting is worth it, whatever this machine is
        made.policy.begin({0: 1e3, 32: 2e3}, made.lengths())
    assert run(made, PROMPTS, 40) == expected
    assert run(made, PROMPTS[1:], 5) == [row[:5] for row in expected[1:]]
    counts = made.counts
    assert counts["drafted"] > 0 and (counts["accepted"] > 0 or "llama2" in (family, name))
    assert (counts["accepted"] == counts["drafted"]) == (name == "itself")


class Scripted(Policy):
    """So many drafts, step after step, over and over."""

    def __init__(self, *ks: int):
        self.k, self.ks, self.steps = ks[0], ks, 0

    def lengths(self, few):
        return tuple({*self.ks})

    def update(self, accepted, k, seconds):
        self.steps += 1
        self.k = self.ks[self.steps % len(self.ks)]


def watch_drafts(made: Speculator) -> Callable[[], int]:
    """-> a function that checks what was drafted until then: greedily, it is what the draft says
    to the same text. It returns how many drafts there were."""
    solo, propose, seen = deepcopy(made.draft.engine.model), made.draft.propose, []

    def watched(text, last, k, n_slots):
        found = propose(text, last, k, n_slots)
        for row, at, tokens in zip(text, last.tolist(), found[0]):
            if at > 1:  # else the row is done
                seen.append((row[: at + 1].clone(), tokens.clone()))
        return found

    @torch.no_grad()
    def check() -> int:
        for text, drafted in seen:
            tokens = torch.cat((text, drafted))
            solo.setup(len(tokens))
            said = read(solo, tokens[None])[0, len(text) - 1 : -1].argmax(-1)
            assert said.equal(drafted), (len(text), len(drafted))
        return len(seen)

    made.draft.propose = watched
    return check


@pytest.mark.parametrize(
    "ks",
    [
        (32, 0),
        (24, 0, 0, 0, 5),
        (4, *[0] * 15, 2, *[0] * 40),
        (1, 0),
    ],
)
def test_a_recurrent_draft_catches_up_after_steps_without_drafts(ks):
    """What it drafts comes from all of the text, and from nothing that was rejected."""
    model = model_of("qwen3.5")
    prompts = PROMPTS[0], PROMPTS[2]
    expected = run(Engine(model, 180, 2, GREEDY), prompts, 66)
    made = speculator(model, 180, noisy(model, 0.3), "1", 2)
    made.policy = Scripted(*ks)
    made.prepare()
    check = watch_drafts(made)
    assert run(made, prompts, 66) == expected
    assert check() > 3 and made.counts["rejecting_steps"] > 1


@pytest.mark.parametrize("ks", [None, (4,), (32, *[0] * 9), (2, *[0] * 30)])
def test_a_text_goes_on_from_any_start_that_is_not_too_old(ks):
    """Another text after the beginning of the one before, as a chat's next turn: it is what it is
    from the start, and so is what the draft says. None: no drafts."""
    model = model_of("qwen3.5")
    plain = Engine(deepcopy(model), 200, 1, GREEDY)
    made, check = Engine(model, 200, 1, GREEDY), lambda: 9
    if ks:
        made = speculator(model, 200, noisy(model, 0.3), "1")
        made.policy = Scripted(*ks)
        made.prepare()
        check = watch_drafts(made)
    starts = []
    for n in (70, 90):
        text = [(7 * i + n) % 96 for i in range(n)]
        for back in (0, 18, None):
            [answer] = run(made, [text], n // 4)
            cached = text + answer[:-1]
            start = oldest = made.oldest(len(cached))
            if back is not None:
                start = len(cached) - back
            if oldest <= start <= len(cached):
                again = cached[:start] + [5, 4, 3]
                assert run(made, [again[start:]], 8, start) == run(plain, [again], 8)
                starts.append(start)
    assert min(starts) >= BLOCK and len({*starts}) > 2 and check() > 4


@pytest.mark.parametrize("name", [None, "prompt-lookup", "mtp", "recurrent"])
def test_a_text_goes_on_from_about_the_end_of_its_prompt(name):
    """However long what came behind it: a chat whose template drops thoughts. From further back,
    and with a draft that is recurrent itself, it begins anew."""
    model = model_of("qwen3.5")
    plain = Engine(deepcopy(model), 300, 1, GREEDY)
    draft = {"mtp": random_mtp(4, model), "recurrent": noisy(model, 0.3)}.get(name)
    made = speculator(model, 300, draft, "3") if name else Engine(model, 300, 1, GREEDY)
    target = made.target if name else made
    assert not target.kept[1]
    target.keeps_states = True
    starts = []
    for n in (70, 100, 70):
        text = [(7 * i + n) % 96 for i in range(n)]
        for back in (0, 1, 20, n // 32 * 32 - 32, n - 20):
            [answer] = run(made, [text], 120)
            start = made.go_back(n - back, n + len(answer) - 1)
            assert start in (0, n - back)
            again = text[: n - back] + [5, 4, 3]
            assert run(made, [again[start:]], 40, start) == run(plain, [again], 40)
            starts.append(start)
    assert starts == [0] * 15 if name == "recurrent" else starts[:5] == [70, 69, 50, 38, 0]


@torch.no_grad()
def test_rows_that_end_early_change_nothing_nor_does_a_step_that_is_launched_ahead():
    """As on a GPU: a step is launched before the host knows of the last one. Then comes another
    batch."""
    model = model_of()
    expected = run(Engine(model, 150, 3, GREEDY), PROMPTS, 45)
    made, got = speculator(model, 150, deepcopy(model), "4", 3), []
    for ended in (0, 2):
        rows = [[token] for token in made.begin(PROMPTS, 45, 0, 1)[0].tolist()]
        launched = made.step()
        while launched:
            launched, held = made.step(), launched
            for row, pairs in zip(rows, made.receive(*held)):
                row += [token for token, _ in pairs]
            made.finish(ended)
        got.append([row[:45] for row in rows])
    for ended, rows in zip((0, 2), got):
        assert len(rows[ended]) < 20
        rows[ended] = expected[ended]
        assert rows == expected
    assert run(made, PROMPTS, 45) == expected


@pytest.mark.parametrize("kind", ["int8", "int8-values"])
def test_keys_and_values_in_int8_stand_beside_states_in_fp32(kind):
    model = model_of(NEXT)
    expected = alone(model, PROMPTS, 30, cache=kind)
    caches = [layer.attn.cache for layer in model.layers]
    assert [type(cache) for cache in caches] == [DeltaCache] * 3 + [KVCache]
    assert caches[0].states.dtype == caches[0].inputs.dtype == F32
    assert caches[3].v.dtype == torch.int8
    assert run(Engine(model, 160, 6, GREEDY, cache=kind), PROMPTS, 30, samples=2)[::2] == expected
    made = speculator(model, 140, None, "6", 3, cache=kind)
    assert run(made, PROMPTS, 30) == expected and made.counts["drafted"]


@pytest.mark.parametrize("kind, dtype", [("16-bit", torch.bfloat16), ("int8", F32)])
@pytest.mark.parametrize("family", [THRICE, NEXT])
def test_memory_is_counted_by_the_token_for_attention_and_by_the_row_for_states(
    family, kind, dtype, monkeypatch
):
    """To the byte what a model's caches take; states are fp32 in bf16, too."""
    model = load_checkpoint(GOLDEN / family, dtype=dtype)
    model.setup(50, 3, cache=kind)
    caches = [layer.attn.cache for layer in model.layers]
    assert caches[0].states.dtype == F32 and caches[0].inputs.dtype == dtype
    config = model.config
    sizes = [sum(part.nbytes for part in cache.buffers()) for cache in caches]
    assert DeltaCache.bytes_per_row(config, dtype) * 3 == sum(sizes[:3])
    assert KVCache.bytes_per_token(config, dtype, kind) * 3 * 50 == sizes[3]
    weights = sum(math.prod(weight.shape) for weight in hf_weights(config).values())
    need = weights * dtype.itemsize + sum(sizes)
    count = partial(
        vet.check_memory, [(config, hf_weights(config), {})], 3, 50, CPU, dtype, kind=kind
    )
    monkeypatch.setattr(vet, "host_memory", lambda: need)
    count()
    monkeypatch.setattr(vet, "host_memory", lambda: need - 1)
    assert "GiB of cache (3 rows of 50)" in refusal(count)


# What is refused


def refused(call, directory, *options) -> str:
    more = "--device", "cpu", "--checkpoint", directory, "--prompt", "a", *options
    return one_line(call("generate.py", generate.main, *more))


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(linear_num_value_heads=5), "linear_num_value_heads=5 is no multiple of linear_num_"),
        (dict(linear_num_key_heads=4), "linear_num_value_heads=6 is no multiple of linear_num_key"),
        (dict(linear_num_key_heads=0), "linear_num_key_heads=0: want int above 0"),
        (dict(linear_num_value_heads=4), "linear_attn."),
        (dict(linear_key_head_dim=6), "linear_attn."),
        (dict(linear_value_head_dim=24), "linear_attn."),
        (dict(linear_key_head_dim=2.5), "linear_key_head_dim=2.5: want int"),
        (dict(linear_conv_kernel_dim=9), "linear_conv_kernel_dim=9: want int above 0, up to 8"),
        (dict(linear_conv_kernel_dim=3), "linear_attn.conv1d.weight is BF16 [104, 1, 4], want"),
        (dict(layer_types=["mamba"] * 4), "layer_types=['mamba', 'mamba', 'mamba', 'mamba']: want"),
        (dict(layer_types=["linear_attention"] * 3), "for each of 4 layers"),
        (dict(layer_types=["full_attention"] * 4), "self_attn."),
        (dict(layer_types=None, full_attention_interval=0), "full_attention_interval=0: want int"),
        (dict(attn_output_gate=False), "attn_output_gate=False is not supported: want True"),
    ],
)
def test_what_does_not_fit_together_is_one_line(call, tmp_path, changes, said):
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / THRICE, directory)
    with_letters(directory)
    rewrite(directory / "config.json", **changes)
    assert said in refused(call, directory)


def test_states_that_do_not_fit_in_memory_are_one_line(call, tmp_path, monkeypatch):
    """They grow with the rows, however short the texts are."""
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / THRICE, directory)
    with_letters(directory)
    monkeypatch.setattr(vet, "host_memory", lambda: 10**8)
    options = "--num-samples", 3000, "--max-new-tokens", 1
    assert "3000 rows of 2" in refused(call, directory, *options)

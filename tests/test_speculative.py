"""Speculative decoding: its texts have the target's own distribution, its steps and policies do
what they say."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from generate import Engine, generate
from helpers import (
    DFLASH,
    ENGINES,
    DRAFT,
    GOLDEN,
    GREEDY,
    TINY,
    check_logprobs,
    golden,
    is_golden,
    load_checkpoint,
    of_each_family,
    on_each_device,
    open_tokenizer,
    random_head,
    random_mtp,
    random_dflash,
    random_model,
    random_shared_kv,
    read,
    run,
    same_but_for_ties,
    speculator,
    tiny,
    tiny_head,
    traced,
)
from model import Transformer
from drafts import make_draft
from drafts.policies import DRAFT_LENGTHS, Auto, Bass, Heuristic, make_policy
from generate import Sampling, probabilities
from speculative import SLACK, Speculator, accept, lookup

PLAIN, CUT = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=6, top_p=0.95, min_p=0.08)
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
SAMPLES = 20_000


def draft_of(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer | None:
    """For random_model(1) a smaller model, drawn apart from it, or a head; tiny's drafts; or what
    needs no model."""
    makers = {
        "fewer tokens": lambda: random_model(2, 6, 8, 1),
        "padded": lambda: random_model(2, 11, 8, 1),
        "head": lambda: random_head(5, random_model(1), [1, 2, 3, 5, 7], dim=16),
        "mtp": lambda: random_mtp(5, random_model(1)),
        "dflash": lambda: random_dflash(5, random_model(1)),
        "dflash, muse": lambda: random_dflash(5, random_model(1), "muse"),
        "shared keys": lambda: random_shared_kv(5, random_model(1)),
        "shared keys, clusters": lambda: random_shared_kv(5, random_model(1), True),
        "dflash 2": lambda: random_dflash(5, random_model(1), "second"),
        "tiny-draft": lambda: tiny(directory=DRAFT),
        "tiny-eagle": tiny_head,
        "tiny-dflash": lambda: tiny_head(DFLASH),
    }
    return makers[name]().to(device, dtype) if name in makers else None


def check_counts(counts: Tensor, probs: Tensor) -> None:
    """Chi-square at 1e-4. The cells of which under 5 are expected count as one."""
    assert not counts[probs == 0].any()
    expected = probs.double() * counts.sum()
    rare = expected < 5
    pooled, seen = (torch.cat([t[~rare], t[rare].sum()[None]]) for t in (expected, counts))
    half = ((seen - pooled) ** 2 / pooled.clamp(min=5)).sum() / 2
    assert torch.special.gammaincc(half.new_tensor((len(seen) - 1) / 2), half) > 1e-4


@torch.no_grad()
def exact(sampling: Sampling) -> Tensor:
    """[512]: how likely random_model(1) draws each second, third and fourth token after PROMPT, the
    first of the four summed over."""
    model, drawn = random_model(1), torch.cartesian_prod(*[torch.arange(8)] * 4)
    model.setup(len(PROMPT) + 4)
    tokens = torch.cat([torch.tensor(PROMPT).expand(len(drawn), -1), drawn], dim=1)
    p = probabilities(read(model, tokens)[:, len(PROMPT) - 1 : -1], sampling).double()
    return p.gather(-1, drawn[:, :, None]).prod(1).view(8, 512).sum(0)


@on_each_device
@pytest.mark.parametrize(
    "sampling, name",
    [
        (PLAIN, "prompt-lookup"),
        (CUT, "fewer tokens"),
        (PLAIN, "padded"),
        (PLAIN, "head"),
        (CUT, "mtp"),
        (PLAIN, "dflash"),
        (CUT, "dflash 2"),
        (CUT, "dflash, muse"),
        (PLAIN, "shared keys"),
        (CUT, "shared keys, clusters"),
    ],
)
def test_speculation_draws_from_the_targets_own_distribution(sampling, name, device):
    """Two tokens a step; of four the first is prefill's, none of the others. The seed is fixed: it
    passes or fails for good. It sees it where 2 % of the likeliest token are moved, or where a
    rejected token is drawn anew from all of the target's distribution."""
    dtype = torch.float32 if device == "cpu" else torch.float16  # of which there are kernels
    made = speculator(
        random_model(1).to(device, dtype),
        len(PROMPT) + 4,
        draft_of(name, device, dtype),
        "2",
        SAMPLES,
        sampling,
        "fast" if device == "cuda" else "eager",
    )
    torch.manual_seed(1)
    rows = torch.tensor(run(made, [PROMPT], 4, samples=SAMPLES))
    assert SAMPLES / 10 < made.counts["accepted"] < made.counts["drafted"] - SAMPLES / 10
    check_counts((rows[:, 1:] @ torch.tensor([64, 8, 1])).bincount(minlength=512), exact(sampling))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of 40, 1, 17, 3 and 9 tokens."""
    text = (
        "Tom had a red ball. Tom liked his red ball. One day, Tom and his ball went to the park. "
        "There he saw a dog. The dog wanted to play with the red ball."
    )
    story = open_tokenizer(TINY).encode_text(text)
    return [story[:n] for n in (40, 1, 17, 3, 9)]


def greedy(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The bundled model's own texts, of which no token is a tie: the best two logits are 3e-4
    apart."""
    return run(Engine(tiny(), 40 + new_tokens, len(prompts), GREEDY), prompts, new_tokens)


def check_greedy(prompts: list[list[int]], made: Speculator) -> None:
    """Up to the last token of the context; compiled, no graph more than those made up front, with
    any sampling."""
    made.warm_up(1)
    graphs, counts = counters["stats"]["unique_graphs"], made.counts
    assert not any(counts.values())  # what compilation ran is no result
    assert run(made, prompts[:1], 60) == greedy(prompts[:1], 60)
    assert isinstance(made.policy, Auto) or 0 < counts["accepted"] < counts["drafted"]
    made.set_sampling(CUT)
    assert len(run(made, prompts[:1], 60)[0]) == 60 and counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize(
    "name, policy",
    [
        ("tiny-draft", "1"),
        ("tiny-draft", "hf"),
        ("tiny-draft", "auto"),
        ("prompt-lookup", "bass"),
        ("tiny-eagle", "4"),
        ("tiny-dflash", "7"),
        ("tiny-dflash", "auto"),
    ],
)
def test_greedy_speculation_is_greedy_decoding(prompts, name, policy):
    check_greedy(prompts, speculator(tiny(), 40 + 60, draft_of(name), policy))


@traced()
def test_compiled_greedy_speculation_is_greedy_decoding(prompts):
    """With a head. A model that drafts is an Engine as in test_llm.py's example and, on GPUs, in
    the tests below."""
    check_greedy(prompts, speculator(tiny(), 40 + 60, draft_of("tiny-eagle"), "2", mode="fast"))


@of_each_family
def test_a_ragged_batch_of_each_family_is_greedy_decoding(family):
    """With the model itself as its draft, then without its last layer. Windows are shorter than the
    texts. Of LongRoPE's three rows first all exceed the original length, then only the first; a
    draft's always do."""
    model, draft = (load_checkpoint(GOLDEN / family) for _ in range(2))
    prompts = [row[:-24].tolist() for row in golden(GOLDEN / family, 80)[0]]
    expected = run(Engine(model, 80, 3, GREEDY), prompts, 40)
    made = speculator(model, 80, draft, "4", 3)
    assert run(made, prompts, 40) == expected and made.counts["accepted"] == made.counts["drafted"]
    del draft.layers[-1]
    made = speculator(model, 80, draft, "4", 3)
    assert is_golden(made, GOLDEN / family) and made.counts["accepted"] < made.counts["drafted"]


@pytest.mark.parametrize("drafted", [False, True])
def test_log_probabilities_are_those_of_the_raw_logits(prompts, drafted):
    model, prompt, sampling = tiny(), prompts[2], Sampling(temperature=0.5, top_p=0.9)
    made = Engine(model, 80, 1, sampling)
    if drafted:
        made = speculator(model, 80, draft_of("tiny-draft"), "3", sampling=sampling)
    check_logprobs(model, prompt, [pair for [row] in generate(made, [prompt], 50) for pair in row])


def test_a_rejection_that_leaves_nothing_draws_from_all_of_p():
    """p and q may differ by rounding alone. Here q is twice p."""
    q = torch.tensor([0.5, 0.0])[:, None].expand(SAMPLES, 2, 4)
    tokens, _, accepted = accept(
        torch.zeros(SAMPLES, 2, 4), torch.full((SAMPLES, 2), 3), q, torch.ones(SAMPLES), PLAIN
    )
    assert abs(accepted.float().mean() - 0.5) < 0.02
    check_counts(tokens[accepted == 0, 0].bincount(minlength=4), torch.full((4,), 0.25))


class Sometimes(Engine):
    """Its steps are captured for a top_k of 0 alone, as fast/'s are for what kernels know."""

    def set_sampling(self, sampling):
        super().set_sampling(sampling)
        self.captures = sampling.top_k == 0


@pytest.mark.parametrize("policy", ["auto", "3"])
def test_steps_of_another_kind_leave_a_chats_cache_as_it_is(prompts, policy):
    engine = partial(Sometimes, batch_size=1, sampling=GREEDY)
    target = engine(tiny(), 120, spare=SLACK)
    draft = make_draft(target, tiny(directory=DRAFT), engine)
    made = Speculator(target, draft, make_policy(policy))
    text = []
    for n, top_k in enumerate((0, 5, 0, 5)):
        made.set_sampling(Sampling(0, top_k))
        start = max(0, len(text) - 1)
        text += [300 + n, *prompts[0][:5]]
        answer = run(Engine(tiny(), 120, 1, GREEDY), [text], 12)[0]
        assert run(made, [text[start:]], 12, start) == [answer]
        text += answer


@pytest.mark.parametrize("rows", [1, 3])
def test_the_context_fills_to_its_last_slot_with_a_step_in_flight(rows):
    """One token is left when 32 are kept; as on a GPU, another step is launched before the host
    learns of it. Where a row is alone, it keeps its place: in a chat the cache serves the next
    line."""
    prompts, model, got = [PROMPT[: 10 - b] for b in range(rows)], random_model(1), []
    expected = run(Engine(model, 10 + 35, rows, GREEDY), prompts, 35)
    made = speculator(model, 10 + 35, random_model(1), "32", rows)
    with torch.no_grad():
        first, launched = made.begin(prompts, 35, 0, 1)[0].tolist(), made.step()
        while launched:
            launched, held = made.step(), launched
            got.append(made.receive(*held))
    assert [len(step[0]) for step in got] == [33, 33, 0]
    rest = [[token for step in got for token, _ in step[b]][:34] for b in range(rows)]
    assert [[token, *row] for token, row in zip(first, rest)] == expected
    assert rows > 1 or made.text[0, :45].tolist() == prompts[0] + expected[0]


def test_beyond_a_drafts_context_nothing_is_drafted(prompts):
    """A context of 32: one row's prompt is longer, one's text grows beyond it."""
    draft, reached, both = tiny(directory=DRAFT), [], [prompts[0], prompts[2]]
    draft.config = replace(draft.config, context=32)
    draft.register_forward_pre_hook(lambda _, inputs: reached.append(int(inputs[1].max())))
    made = speculator(tiny(), 40 + 40, draft, "4", rows=2)
    assert run(made, both, 40) == greedy(both, 40)
    assert (
        max(reached) < 32 + SLACK
        and len(reached) < 4 * made.counts["steps"]
        and made.counts["accepted"]
    )


def test_drafts_that_do_not_fit_overwrite_no_text():
    """Near the end of the draft's cache 8 tokens do not fit; then 2 do."""
    draft, target = tiny(directory=DRAFT), tiny()
    draft.config = replace(draft.config, context=64)
    made = speculator(target, 64, draft, "2").draft
    prompt, last = torch.randint(5, 400, (59,)).tolist(), torch.tensor([59])
    text = torch.tensor([[*prompt, 7] + [0] * 80])
    made.begin([prompt], 0, 1)
    made.catch_up(text, last, 100)
    slots = draft.layers[0].attn.cache.k[:, :, :59]
    before = slots.clone()
    proposed = [made.propose(text, last, k, 100)[2].item() for k in (8, 2)]
    assert proposed == [0, 2] and torch.allclose(slots, before, atol=1e-4)


@pytest.mark.parametrize("beyond", [0, 40])
def test_a_draft_has_the_frequencies_of_its_target(beyond):
    """LongRoPE's, where a text's limit is the original length, and beyond."""
    target, draft = (load_checkpoint(GOLDEN / "phi3-long") for _ in range(2))
    length = target.config.layers[0].rope.original + beyond
    made = speculator(target, length, draft, "2")
    prompt = torch.randint(target.config.vocab_size, (length // 2,)).tolist()
    run(made, [prompt], length - len(prompt))
    assert made.counts["accepted"] == made.counts["drafted"] > 0


@pytest.mark.parametrize(
    "policy, kept, expected",
    [
        (Heuristic(), [4, 0, 0, 0, 0, 1, 3], [4, 3, 2, 1, 1, 3, 5]),
        (Bass(), [6, 8, 3, 7, 5, 4, 0, 0, 0, 1, 1, 2], [9, 11, 9, 7, 5, 4, 2, 1, 1, 3, 2, 4]),
        (Bass(31), [24], [32]),
        (Heuristic(31), [24, 32, 0, 0], [32, 32, 31, 30]),
    ],
)
def test_heuristic_and_bass(policy, kept, expected):
    """kept: the most that a row accepted of what k drafts; expected: the next k, by algorithm 1 of
    arXiv 2404.15778 for Bass, with l_incre = 2, l_mod = 10, l_limit = 32, l0 = 7."""
    found = []
    for most in kept:
        policy.update([0, most, most // 2], max(n for n in DRAFT_LENGTHS if n <= policy.k), 1.0)
        found.append(policy.k)
    assert found == expected


TIMES = {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.4, 8: 1.8}


@pytest.mark.parametrize(
    "matches, times, k, most",
    [
        (lambda n: True, TIMES, 8, 2000 / 9 * 1.8),
        (lambda n: True, TIMES | {8: 4.0}, 4, 2000 / 5 * 1.4),
        (lambda n: False, TIMES, None, 2000),
        (lambda n: n > 500, TIMES, 8, 500 + 1500 / 2.1),
    ],
)
def test_auto(matches, times, k, most):
    """2,000 tokens of a draft whose tokens match or do not take little longer than they must. k:
    the last one, which may be any while it goes on trying."""
    policy, clock, n, tried = Auto(), 0.0, 0, 0
    policy.begin(times, [*times])
    while n < 2000:
        used = policy.k
        accepted, tried = (used, n) if used and matches(n) else (0, n if used else tried)
        policy.update([accepted], used, times[used])
        clock, n = clock + times[used], n + 1 + accepted
    assert clock < 1.05 * most and tried > 1500 and k in (None, policy.k)


def test_the_times_of_lengths_between_are_interpolated():
    policy = Auto()
    policy.begin({0: 1.0, 8: 1.8}, [*TIMES])
    assert policy.seconds == pytest.approx(TIMES)


def looked_up(text: list[int], k: int) -> list[int]:
    """What follows the latest earlier place that ends as the text does, in three tokens or else in
    two or one; where the text ends, what was found goes on."""
    for n in (3, 2, 1):
        for end in reversed(range(n, len(text))):
            if text[end - n : end] == text[-n:]:
                found = list(text)
                for at in range(end, end + k):
                    found.append(found[at])
                return found[len(text) :]
    return []


@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_lookup(alphabet):
    text, last = torch.randint(alphabet, (200, 24)), torch.randint(1, 24, (200,))
    for k in (1, 2, 5, 12):
        for row, end, tokens, proposed in zip(
            *(t.tolist() for t in (text, last, *lookup(text, last, k)))
        ):
            expected = looked_up(row[: end + 1], k)
            assert proposed == len(expected) and (tokens == expected or not expected)


def test_a_row_that_is_done_costs_little_and_changes_nothing(prompts):
    """It is verified at position 1."""
    made, seen = speculator(tiny(), 40 + 40, draft_of("tiny-draft"), "4", rows=2), []
    made.target.model.register_forward_pre_hook(lambda _, inputs: seen.append(int(inputs[1][0, 0])))
    steps = generate(made, prompts[:2], 40)
    next(steps)
    made.finish(0)
    assert not any(step[0] for step in steps) and set(seen[1:]) == {1}
    assert made.text[1, 1:41].tolist() == greedy(prompts[1:2], 40)[0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, policy",
    [
        ("tiny-draft", "1"),
        ("tiny-draft", "auto"),
        ("tiny-draft", "bass"),
        ("prompt-lookup", "hf"),
        ("tiny-eagle", "5"),
        ("tiny-eagle", "auto"),
        ("tiny-dflash", "7"),
        ("tiny-dflash", "auto"),
    ],
)
def test_captured_steps_change_greedy_tokens_at_ties_only(prompts, name, policy):
    """bf16, with kernels, a ragged batch."""
    target = tiny().to("cuda", torch.bfloat16)
    plain = run(ENGINES["fast"](target, 40 + 64, 5, GREEDY), prompts, 64)
    made = speculator(
        tiny().to("cuda", torch.bfloat16),
        40 + 64,
        draft_of(name, "cuda", torch.bfloat16),
        policy,
        5,
        mode="fast",
    )
    made.set_sampling(PLAIN)  # no graph is captured for one sampling
    run(made, prompts, 9)
    made.set_sampling(GREEDY)
    same_but_for_ties(tiny(), prompts, plain, run(made, prompts, 64), 0.02)

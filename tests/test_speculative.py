"""Speculative decoding: its texts have the target's own distribution, its steps and policies do what they say."""
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from checkpoint import Checkpoint
from generate import LLM, Engine, generate
from helpers import (DRAFT, FAMILIES, GOLDEN, GREEDY, TINY, check_logprobs, golden, load_checkpoint, of_each_family,
                     on_each_device, random_head, random_model, read, run, same_but_for_ties, speculator, tiny,
                     tiny_head)
from model import Transformer
from policies import DRAFT_LENGTHS, Auto, Bass, Fixed, Heuristic
from sampling import Sampling, probabilities
from speculative import DraftModel, Speculator, accept, lookup
from tokenizer import Tokenizer

PLAIN, CUT = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=6, top_p=0.95, min_p=0.08)
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
SAMPLES = 20_000


def draft_of(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Transformer | None:
    """For random_model(1) a smaller model, drawn apart from it, or a head; tiny's drafts; or what needs no model."""
    sizes = {"model": 8, "fewer tokens": 6, "padded": 11}
    if name == "prompt-lookup":
        return None
    if name == "head":
        return random_head(5, random_model(1), [1, 2, 3, 5, 7], dim=16).to(device, dtype)
    if name == "tiny-eagle":
        return tiny_head().to(device, dtype)
    model = random_model(2, sizes[name], 8, 1) if name in sizes else tiny(directory=DRAFT)
    return model.to(device, dtype)


def spy(speculator: Speculator) -> list[list[int]]:
    """The first position of each row, of each verification to come. It reads several tokens, plain decoding one."""
    seen, forward = [], speculator.target.forward

    def watch(tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        if tokens.shape[1] > 1:
            seen.append(positions[:, 0].tolist())
        return forward(tokens, positions, slots)

    speculator.target.forward = watch
    return seen


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Chi-square; the cells of which under 5 are expected count as one with the least of the others."""
    expected, order = (probs.double() * counts.sum()).sort()
    rare, impossible = int((expected < 5).sum()) + 1, bool(counts[probs == 0].any())
    pooled, seen = (torch.cat([t[:rare].sum()[None], t[rare:]]) for t in (expected, counts[order]))
    half = ((seen - pooled) ** 2 / pooled).sum() / 2
    return 0.0 if impossible else torch.special.gammaincc(half.new_tensor((len(seen) - 1) / 2), half).item()


@torch.no_grad()
def exact(sampling: Sampling) -> Tensor:
    """[512]: how likely random_model(1) draws each second, third and fourth token after PROMPT, the first of the four
    summed over."""
    model, prompt = random_model(1), torch.tensor(PROMPT)
    model.setup(len(PROMPT) + 3)
    tokens = torch.cat([prompt.expand(512, -1), torch.cartesian_prod(*[torch.arange(8)] * 3)], dim=1)
    p = probabilities(read(model, tokens)[:, len(PROMPT) - 1:], sampling)
    p = p.double().view(8, 8, 8, 4, 8)
    return torch.einsum("a,ab,abc,abcd->bcd", p[0, 0, 0, 0], p[:, 0, 0, 1], p[:, :, 0, 2], p[:, :, :, 3]).flatten()


def speculated_counts(sampling: Sampling, name: str, device: str = "cpu") -> Tensor:
    """[512]: how often speculation, two tokens a step, gave them; the first token is prefill's, none of the others."""
    dtype = torch.float32 if device == "cpu" else torch.float16  # of which there are kernels
    made = speculator(random_model(1).to(device, dtype), len(PROMPT) + 4, draft_of(name, device, dtype), "2", SAMPLES,
                      sampling, "fast" if device == "cuda" else "eager")
    if name == "model":  # as it is drawn, or through a map to the same tokens
        made.draft.vocabulary = torch.arange(8, device=device)
    torch.manual_seed(1)
    rows = torch.tensor(run(made, [PROMPT], 4, samples=SAMPLES))
    assert SAMPLES / 10 < made.counts["accepted"] < made.counts["drafted"] - SAMPLES / 10
    return (rows[:, 1:] @ torch.tensor([64, 8, 1])).bincount(minlength=512)


@on_each_device
@pytest.mark.parametrize("sampling, name", [
    (PLAIN, "model"), (CUT, "model"), (PLAIN, "prompt-lookup"), (CUT, "prompt-lookup"), (PLAIN, "fewer tokens"),
    (PLAIN, "padded"), (PLAIN, "head"), (CUT, "head")])
def test_speculation_draws_from_the_targets_own_distribution(sampling, name, device):
    """The seed is fixed: it passes or fails for good. It sees it where 2 % of the likeliest token are moved, or where a
    rejected token is drawn anew from all of the target's distribution."""
    assert p_value(speculated_counts(sampling, name, device), exact(sampling)) > 1e-4


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of 40, 1, 17, 3 and 9 tokens."""
    text = ("Tom had a red ball. Tom liked his red ball. One day, Tom and his ball went to the park. "
            "There he saw a dog. The dog wanted to play with the red ball.")
    story = Tokenizer(Checkpoint(TINY)).encode_text(text)
    return [story[:n] for n in (40, 1, 17, 3, 9)]


def same_greedy(prompts: list[list[int]], rows: list[list[int]]) -> None:
    """The rows are the target's greedy text, each up to where two logits are equal but for rounding."""
    n, model = len(rows[0]), tiny()
    expected = [run(Engine(model, len(prompt) + n, 1, GREEDY), [prompt], n)[0] for prompt in prompts]
    same_but_for_ties(model, prompts, expected, rows, 1e-4)


def check_greedy(prompts: list[list[int]], made: Speculator) -> None:
    """Up to the last token of the context; compiled, no graph more than those made up front, with any sampling."""
    made.target.warm_up(1, made)
    graphs, counts = counters["stats"]["unique_graphs"], made.counts
    assert not any(counts.values())  # what compilation ran is no result
    [row] = run(made, prompts[:1], 60)
    same_greedy(prompts[:1], [row])
    assert made.policy_name == "auto" or 0 < counts["accepted"] < counts["drafted"]
    made.set_sampling(CUT)
    assert len(row) == len(run(made, prompts[:1], 60)[0]) and counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("name, policy", [
    *product(["tiny-draft"], ["1", "4", "7", "auto", "hf", "bass"]), *product(["prompt-lookup"], ["4", "auto", "bass"]),
    *product(["tiny-eagle"], ["4", "auto", "bass"])])
def test_greedy_speculation_is_greedy_decoding(prompts, name, policy):
    check_greedy(prompts, speculator(tiny(), 40 + 60, draft_of(name), policy))


def test_compiled_greedy_speculation_is_greedy_decoding(prompts):
    """A head, then a model that drafts for the same target, which is compiled once."""
    made = speculator(tiny(), 40 + 60, draft_of("tiny-eagle"), "2", mode="fast")
    check_greedy(prompts, made)
    made.set_sampling(GREEDY)
    draft = Engine(draft_of("tiny-draft"), made.target.max_seq_len, 1, GREEDY, "fast")
    check_greedy(prompts, Speculator(made.target, DraftModel(draft, made.target.model.config.vocab_size), "2"))


@pytest.mark.parametrize("name, new_tokens", [("itself", 40), ("smaller", 24), ("prompt-lookup", 24), ("llama2", 24)])
@of_each_family
def test_a_ragged_batch_of_each_family_is_greedy_decoding(family, name, new_tokens):
    """Windows are shorter than the texts. Of LongRoPE's three rows all exceed the original length, or only the first;
    a draft's always do."""
    model, draft = (load_checkpoint(GOLDEN / of) for of in (family, name if name in FAMILIES else family))
    prompts = [row[:-24].tolist() for row in golden(GOLDEN / family)[0]]
    expected = run(Engine(model, 80, 3, GREEDY), prompts, new_tokens)
    if name == "smaller":
        del draft.layers[-1]
    made = speculator(model, 80, None if name == "prompt-lookup" else draft, "4", 3)
    assert run(made, prompts, new_tokens) == expected
    assert (made.counts["accepted"] == made.counts["drafted"]) == (name in ("itself", family))


def test_log_probabilities_are_those_of_the_raw_logits(prompts):
    model, prompt = tiny(), prompts[2]
    made = speculator(model, 80, draft_of("tiny-draft"), "3", sampling=Sampling(temperature=0.5, top_p=0.9))
    check_logprobs(model, prompt, [pair for [row] in generate(made, [prompt], 50) for pair in row])
    assert 0 < made.counts["accepted"] < made.counts["drafted"]


def test_a_drafts_tokens_are_mapped_to_the_targets():
    """A draft of three tokens that are the target's 6, 1 and 4."""
    vocabulary = torch.tensor([6, 1, 4])
    engine = Engine(random_model(2, 3, 8, 1), 40, 50, PLAIN)
    text, last = torch.full((50, 40), 2), torch.full((50,), 9)
    drafted, q, proposed = DraftModel(engine, 8, vocabulary).propose(text, last, 3, 40)
    assert set(drafted.unique().tolist()) == {1, 4, 6} and (proposed == 3).all()
    logits = engine.model(text[:, 8:10], torch.tensor([[8, 9]]))[:, -1]
    expected = torch.zeros(50, 8).index_copy(1, vocabulary, logits.softmax(-1))
    assert torch.allclose(q[:, 0], expected, atol=1e-5) and not q[:, 3].any()


P, Q, LAST = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("p, q, drafted, proposed, expected", [
    ([P, Q, P], [P, Q], [1, 2], 2, {2: (1, P)}),  # all are kept, one more is drawn
    ([P, P], [Q], [0], 1, {0: (0.75, [0, 0, 0.25, 0.75]), 1: (0.25, P)}),  # 0.1 / 0.4 is kept; else what p has more of
    ([Q, [0, 0, 0.5, 0.5], P, P], [P, P, P], [0, 1, 3], 3, {1: (1, [0, 0, 2 / 3, 1 / 3])}),  # the third would be kept
    ([P, P], [[0.2, 0.4, 0.6, 0.8]], [3], 1, {0: (0.5, P), 1: (0.5, P)}),  # a rejection leaves nothing: all of p
    ([P, P, P], [LAST, LAST], [3, 3], 0, {0: (1, P)}),  # none is proposed: q does not count
    ([LAST, P, P], [LAST, LAST], [3, 3], 1, {1: (1, P)})])
def test_accept(p, q, drafted, proposed, expected):
    """Many equal rows; expected: how likely so many are accepted, and the distribution of the token behind them."""
    read, logits = torch.tensor([0, *drafted]).expand(SAMPLES, -1), (torch.tensor(p).log() + 3).expand(SAMPLES, -1, -1)
    tokens, logprobs, accepted = accept(logits, read, torch.tensor([*q, [0.0] * 4]).expand(SAMPLES, -1, -1),
                                        torch.full((SAMPLES,), proposed), PLAIN)
    assert set(accepted.tolist()) == set(expected)
    for n, (share, after) in expected.items():
        assert abs((accepted == n).float().mean() - share) < 0.02
        ended = tokens[accepted == n, :n + 1]
        assert (ended[:, :n] == torch.tensor(drafted[:n])).all()
        assert p_value(ended[:, n].bincount(minlength=4), torch.tensor(after)) > 1e-4
        told = torch.tensor(p).log()[:n + 1].gather(1, ended.t()).t()  # logits less a constant
        assert torch.allclose(logprobs[accepted == n, :n + 1], told, atol=1e-5)


def test_a_text_ends_inside_an_accepted_run():
    """At a stop text of the 12th and 13th token, whose step gave the 10th to the 17th; at a limit of 13."""
    llm = LLM(device="cpu", temperature=0, draft=str(TINY), draft_tokens=7, quiet=True)  # its own draft: all are kept
    prompt, decode = "Once upon a time", llm.tokenizer.decode
    whole = llm(prompt, max_new_tokens=40)
    assert dict(steps=5, drafted=35, accepted=35).items() <= llm.speculator.counts.items()
    before, behind = (decode(whole.prompt_tokens + whole.tokens[:n]) for n in (11, 13))
    for options, reason, text in [(dict(stop=behind[len(before):]), "stop", before),
                                  (dict(max_new_tokens=13), "length", behind)]:
        ended = llm(prompt, **dict(max_new_tokens=40) | options)
        assert ended.tokens == whole.tokens[:13] and len(ended.logprobs) == 13
        assert (ended.finish_reason, prompt + ended.text) == (reason, text)
    assert llm.speculator.counts["steps"] == 5 + 2 + 2


@pytest.mark.parametrize("rows", [1, 3])
def test_the_context_fills_to_its_last_slot_with_a_step_in_flight(rows):
    """One token is left when 32 are kept; as on a GPU, another step is launched before the host learns of it."""
    prompts, model = [PROMPT[:10 - b] for b in range(rows)], random_model(1)
    expected = run(Engine(model, 10 + 35, rows, GREEDY), prompts, 35)
    made = speculator(model, 10 + 35, random_model(1), "32", rows)
    assert run(made, prompts, 35) == expected and made.counts["accepted"] == 64 * rows
    with torch.no_grad():
        first, launched, got = made.begin(prompts, 35, 0, 1)[0].tolist(), made.step(), []
        while launched:
            launched, held = made.step(), launched
            got.append(made.read(*held))
    assert [len(step[0]) for step in got] == [33, 33, 0]
    rest = [[token for step in got for token, _ in step[b]][:34] for b in range(rows)]
    assert [[token, *row] for token, row in zip(first, rest)] == expected


def test_beyond_a_drafts_context_nothing_is_drafted(prompts):
    """A context of 32: one row's prompt is longer, one's text grows beyond it."""
    draft, reached, both = tiny(directory=DRAFT), [], [prompts[0], prompts[2]]
    draft.config = replace(draft.config, context=32)
    draft.register_forward_pre_hook(lambda _, inputs: reached.append(int(inputs[1].max())))
    made = speculator(tiny(), 40 + 40, draft, "4", rows=2)
    seen = spy(made)
    same_greedy(both, run(made, both, 40))
    assert max(reached) < 32 and max(second for _, second in seen) < 32 and made.counts["accepted"]


@pytest.mark.parametrize("policy", ["hf", "bass", "4", "auto"])
def test_only_auto_waits_for_times_and_for_few_of_them(policy):
    forwards, draft = [], draft_of("tiny-draft")
    draft.register_forward_pre_hook(lambda *_: forwards.append(policy))
    made = speculator(tiny(), 40 + 40, draft, policy)
    assert bool(forwards) == (policy == "auto")
    if forwards:
        seconds = made.policy.seconds
        assert set(seconds) == set(DRAFT_LENGTHS) and seconds[32] == seconds[8]
        assert abs(2 * seconds[5] - seconds[2] - seconds[8]) < 1e-9
        made.set_sampling(CUT)
        assert made.policy.seconds is seconds  # which times nothing again


def test_a_chat_goes_on_after_steps_without_drafts_that_ended_early(prompts):
    """The target as its own draft: once it has read what it missed, all is accepted."""
    made = speculator(tiny(), 200, tiny(), "auto")
    made.policy = Fixed(0)
    text = prompts[0] + [row[0][0] for row, in islice(generate(made, prompts[:1], 60), 20)]
    assert made.text[0, :len(text)].tolist() == text and made.draft.unread == 19
    made.policy = Fixed(6)
    assert len(list(generate(made, [[text[-1], 9, 10, 11]], 36, start=len(text) - 1))) == 6
    assert made.counts["accepted"] == made.counts["drafted"] == 30


def test_a_draft_reads_what_came_while_it_paused():
    """The target as its own draft errs only where it has not read the text: after pauses of many lengths."""
    pauses, model, prompts = [1, 2, 31, 40, 5, 70], random_model(1), [PROMPT, PROMPT[3:7]]
    expected = run(Engine(model, 10 + 200, 2, GREEDY), prompts, 200)
    made = speculator(model, 10 + 200, random_model(1), "auto", rows=2)
    plan = [k for pause in pauses for k in [0] * pause + [4]]
    made.policy = Fixed(0)
    made.policy.update = lambda *_: setattr(made.policy, "k", plan.pop(0) if plan else 4)
    assert run(made, prompts, 200) == expected and not plan
    assert made.counts["accepted"] == made.counts["drafted"] > 0


@pytest.mark.parametrize("policy, kept, expected, limit", [
    (Heuristic(), [4, 0, 0, 0, 0, 1, 3, 5, 6], [4, 3, 2, 1, 1, 3, 5, 7, 9], 33),
    (Bass(), [6, 8, 3, 7, 5, 4, 0, 0, 0, 1, 1, 2], [9, 11, 9, 7, 5, 4, 2, 1, 1, 3, 2, 4], 32)])
def test_heuristic_and_bass(policy, kept, expected, limit):
    """kept: the most that a row accepted of what k drafts; expected: the next k, by algorithm 1 of arXiv 2404.15778
    for Bass, with l_incre = 2, l_mod = 10, l_limit = 32, l0 = 7."""
    found = []
    for most in kept:
        policy.update([0, most, most // 2], max(n for n in DRAFT_LENGTHS if n <= policy.k), 1.0)
        found.append(policy.k)
    assert found == expected
    policy.k = 31
    policy.update([24], 24, 1.0)
    assert policy.k == limit


TIMES = {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.4, 8: 1.8}


def simulate(matches: Callable, times=TIMES):
    """2,000 tokens of a draft whose tokens match or do not -> the last k, how long they took, by `times`, and the last
    token that followed drafted ones."""
    policy, clock, n, tried = Auto(times), 0.0, 0, 0
    while n < 2000:
        k = policy.k
        accepted, tried = (k, n) if k and matches(n) else (0, n if k else tried)
        policy.update([accepted], k, times[k])
        clock, n = clock + times[k], n + 1 + accepted
    return policy.k, clock, tried


def test_auto():
    k, clock, _ = simulate(lambda n: True)
    assert k == 8 and clock < 1.05 * 2000 / 9 * 1.8
    k, clock, _ = simulate(lambda n: True, TIMES | {8: 4.0})
    assert k == 4 and clock < 1.05 * 2000 / 5 * 1.4  # 8 would not pay
    k, clock, tried = simulate(lambda n: False)
    assert clock < 1.05 * 2000 and tried > 1500  # it goes on trying
    k, clock, _ = simulate(lambda n: n > 500)
    assert k == 8 and clock < 1.05 * 500 + 1500 / 2


def looked_up(text: list[int], k: int) -> list[int]:
    """What follows the latest earlier place that ends as the text does, in three tokens or else in two or one; where
    the text ends, what was found goes on."""
    for n in (3, 2, 1):
        for end in reversed(range(n, len(text))):
            if text[end - n:end] == text[-n:]:
                found = list(text)
                for at in range(end, end + k):
                    found.append(found[at])
                return found[len(text):]
    return []


@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_lookup(alphabet):
    text, last, hits = torch.randint(alphabet, (200, 24)), torch.randint(1, 24, (200,)), 0
    for k in (1, 2, 5, 12):
        for row, end, tokens, proposed in zip(*(t.tolist() for t in (text, last, *lookup(text, last, k)))):
            expected = looked_up(row[:end + 1], k)
            assert proposed == len(expected) and (tokens == expected or not expected)
            hits += bool(expected)
    assert 0 < hits < 800


def test_a_row_that_is_done_costs_little_and_changes_nothing(prompts):
    made, rows = speculator(tiny(), 40 + 40, draft_of("tiny-draft"), "4", rows=3), [[], [], []]
    expected, seen = run(made, prompts[:3], 40), spy(made)
    for n, step in enumerate(generate(made, prompts[:3], 40)):
        for row, new in zip(rows, step):
            row += [token for token, _ in new]
        if n == 3:
            made.finish(0)
            done = len(rows[0])
    assert [first >= 40 for first, *_ in seen] == [True] * 3 + [False] * (len(seen) - 3) and len(seen) > 9
    assert [rows[0], *(row[:40] for row in rows[1:])] == [expected[0][:done], *expected[1:]]


def test_one_row_alone_keeps_its_place_when_it_is_done(prompts):
    """In a chat the cache serves the next line; a GPU may have a step in flight when an answer ends."""
    made = speculator(tiny(), 40 + 40, None, "4")
    [tokens] = run(made, prompts[:1], 20)
    last = int(made.last)
    made.finish(0)
    with torch.no_grad():
        _, _, new, _ = made.speculate(4)
    assert made.last == last >= 59 and new == 0
    assert made.text[0, :60].tolist() == prompts[0] + tokens


@pytest.mark.parametrize("name", ["tiny-draft", "tiny-eagle", "prompt-lookup", None])
def test_a_seed_repeats_a_text(prompts, name):
    sampling, out = Sampling(0.9, 50, 0.95), []
    made = speculator(tiny(), 100, draft_of(name), "3", 2, sampling) if name else Engine(tiny(), 100, 2, sampling)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out.append(run(made, [prompts[2]], 40, samples=2))
    assert out[0] == out[1] != out[2] and out[0][0] != out[0][1]


@pytest.mark.gpu
@pytest.mark.parametrize("name, policy", [
    ("tiny-draft", "1"), ("tiny-draft", "5"), ("tiny-draft", "auto"), ("tiny-draft", "bass"), ("prompt-lookup", "hf"),
    ("tiny-eagle", "1"), ("tiny-eagle", "5"), ("tiny-eagle", "auto")])
def test_captured_steps_change_greedy_tokens_at_ties_only(prompts, name, policy):
    """bf16, with kernels, a ragged batch."""
    target = tiny().to("cuda", torch.bfloat16)
    plain = run(Engine(target, 40 + 64, 5, GREEDY, "fast"), prompts, 64)
    made = speculator(tiny().to("cuda", torch.bfloat16), 40 + 64, draft_of(name, "cuda", torch.bfloat16), policy, 5,
                      mode="fast")
    made.set_sampling(PLAIN)  # no graph is captured for one sampling
    run(made, prompts, 9)
    made.set_sampling(GREEDY)
    same_but_for_ties(tiny(), prompts, plain, run(made, prompts, 64), 0.02)

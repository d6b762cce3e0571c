"""Sampling's penalties in whole texts: against a loop over the tokens, in batches, in chunks, with
drafts, and captured."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from drafts import make_draft
from drafts.policies import make_policy
from generate import Engine, Sampling, generate, probabilities
from helpers import (
    DRAFT,
    ENGINES,
    GREEDY,
    TINY,
    check_logprobs,
    logits_of,
    on_each_device,
    open_tokenizer,
    penalized,
    random_head,
    random_model,
    read,
    run,
    speculator,
    tiny,
    tiny_head,
)
from llm import LLM, Completion
from model import Transformer
from speculative import SLACK, Speculator
from test_speculative import check_counts

PENALTIES = (1.3, 0, 0), (1, 0.9, 0), (1, 0, -0.4), (1.2, -0.5, 0.7)


def with_penalties(penalties: tuple, sampling: Sampling = GREEDY) -> Sampling:
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    return replace(sampling, **dict(zip(names, penalties)))


ALL = with_penalties(PENALTIES[-1])


def by_loop(model: Transformer, prompt: list[int], new_tokens: int, penalties: tuple) -> list[int]:
    made = []
    for _ in range(new_tokens):
        logits = logits_of(model, torch.tensor([*prompt, *made]))[-1]
        made.append(penalized(logits, prompt, made, *penalties).argmax().item())
    return made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of 17, 1 and 6 tokens."""
    text = "Tom had a red ball. Tom liked his red ball. One day, Tom and his ball went to the park."
    story = open_tokenizer(TINY).encode_text(text)
    return [story[:n] for n in (17, 1, 6)]


@pytest.fixture(scope="module")
def expected(prompts) -> dict[tuple, list[list[int]]]:
    model = tiny()
    return {each: [by_loop(model, prompt, 30, each) for prompt in prompts] for each in PENALTIES}


@pytest.mark.parametrize("penalties", PENALTIES)
def test_greedy_texts_are_those_of_a_loop(prompts, expected, penalties, monkeypatch):
    """A ragged batch, two samples of each prompt, and prompts in chunks; each penalty changes them,
    and without them they are what they were."""
    engine = Engine(tiny(), 60, 6, with_penalties(penalties))
    rows = expected[penalties]
    assert run(engine, prompts, 30) == rows
    monkeypatch.setattr("generate.PREFILL_TOKENS", 12)
    assert run(engine, prompts, 30, samples=2) == [row for row in rows for _ in range(2)]
    plain = run(Engine(tiny(), 60, 3, GREEDY), prompts, 30)
    engine.set_sampling(GREEDY)
    assert run(engine, prompts, 30) == plain != rows


@pytest.mark.parametrize("name", ["tiny-draft", "tiny-eagle", "prompt-lookup"])
def test_speculation_gives_the_same_texts(prompts, expected, name):
    """A drafted token counts for those behind it. Penalties come and go from call to call."""
    draft = {"tiny-draft": lambda: tiny(directory=DRAFT), "tiny-eagle": tiny_head}.get(name)
    made = speculator(tiny(), 60, draft and draft(), "4", 3)
    plain = run(made, prompts, 30)
    for penalties in PENALTIES:
        made.set_sampling(with_penalties(penalties))
        assert run(made, prompts, 30) == expected[penalties]
    assert made.counts["accepted"] > 0
    made.set_sampling(GREEDY)
    assert run(made, prompts, 30) == plain


@pytest.mark.parametrize("drafted", [False, True])
def test_a_text_that_goes_on_knows_its_beginning(prompts, drafted):
    """As a chat does, whose earlier turns lie in the cache; all of them are prompt by then."""
    engine = Engine(tiny(), 80, 1, ALL)
    if drafted:
        engine = speculator(tiny(), 80, tiny(directory=DRAFT), "3", sampling=ALL)
    first = run(engine, prompts[:1], 20)[0]
    text = prompts[0] + first
    more = [*text[-1:], 300, 301]
    found = run(engine, [more], 20, start=len(text) - 1)[0]
    assert found == by_loop(tiny(), text + more[1:], 20, PENALTIES[-1])


@pytest.mark.parametrize("options", [{}, dict(draft=str(DRAFT), draft_tokens=3)])
def test_penalties_may_come_in_the_middle_of_a_chat(prompts, options):
    """What was read without them counts."""
    llm = LLM(str(TINY), device="cpu", quiet=True, temperature=0, **options)
    llm.prepare(1, 80)

    def complete(tokens: list[int], start: int) -> list[int]:
        answer = Completion("", tokens, llm.tokenizer, 20)
        list(llm.complete([answer], start=start))
        return answer.tokens

    text = prompts[0] + complete(prompts[0], 0)
    (llm.speculator or llm.engine).set_sampling(ALL)
    more = [*text, 300, 301]
    assert complete(more, len(text) - 1) == by_loop(tiny(), more, 20, PENALTIES[-1])


def test_kernels_see_small_penalties():
    """They read 16 bits, and bf16 has no number between 39.75 and 40."""
    fast_engine = pytest.importorskip("fast.engine")
    engine = fast_engine.FastEngine(tiny(), 20, 1, with_penalties((1.0, 0.1, 0.0)))
    engine.captures = True
    engine.history[0, 3], engine.begins[0] = 7, 2
    logits = torch.full((1, 4096), 40.0).bfloat16()
    found = engine.penalized(logits, torch.tensor([5]))
    assert found.itemsize == 2 and found[0, 7].item() == pytest.approx(39.9, abs=0.02)
    assert found[0, 8] == 40


@pytest.mark.parametrize("drafted", [False, True])
def test_log_probabilities_stay_those_of_the_raw_logits(prompts, drafted):
    model, sampling = tiny(), with_penalties(PENALTIES[-1], Sampling(0.5, top_p=0.9))
    made = Engine(model, 80, 1, sampling)
    if drafted:
        made = speculator(model, 80, tiny(directory=DRAFT), "3", sampling=sampling)
    steps = generate(made, prompts[:1], 50)
    check_logprobs(model, prompts[0], [pair for [row] in steps for pair in row])


DRAWN = with_penalties((1.5, 0.4, 0.6), Sampling(0.9, top_k=6))
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
SAMPLES = 20_000


@torch.no_grad()
def exact(sampling: Sampling) -> Tensor:
    """As test_speculative.exact(), with penalties token by token."""
    model, drawn = random_model(1), torch.cartesian_prod(*[torch.arange(8)] * 4)
    model.setup(len(PROMPT) + 4)
    tokens = torch.cat([torch.tensor(PROMPT).expand(len(drawn), -1), drawn], dim=1)
    logits = read(model, tokens)[:, len(PROMPT) - 1 : -1].double()
    for row, made in zip(logits, drawn.tolist()):
        for t in range(4):
            row[t] = penalized(row[t], PROMPT, made[:t], *sampling.penalties)
    p = probabilities(logits, sampling).double()
    return p.gather(-1, drawn[:, :, None]).prod(1).view(8, 512).sum(0)


@on_each_device
@pytest.mark.parametrize("name", ["none", "fewer tokens", "head", "prompt-lookup"])
def test_drawn_texts_have_the_penalized_distribution(name, device):
    """As test_speculation_draws_from_the_targets_own_distribution(). On a GPU steps are captured,
    first without penalties."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    mode = "fast" if device == "cuda" else "eager"
    model = random_model(1).to(device, dtype)
    makers = {
        "fewer tokens": lambda: random_model(2, 6, 8, 1),
        "head": lambda: random_head(5, random_model(1), [1, 2, 3, 5, 7], dim=16),
    }
    length = len(PROMPT) + 4
    if name == "none":
        made = ENGINES[mode](model, length, SAMPLES, Sampling(1.0))
    else:
        draft = makers[name]().to(device, dtype) if name in makers else None
        made = speculator(model, length, draft, "2", SAMPLES, Sampling(1.0), mode)
    run(made, [PROMPT], 4, samples=SAMPLES)
    made.set_sampling(DRAWN)
    torch.manual_seed(1)
    rows = torch.tensor(run(made, [PROMPT], 4, samples=SAMPLES))
    assert name == "none" or made.counts["accepted"] > SAMPLES / 10
    check_counts((rows[:, 1:] @ torch.tensor([64, 8, 1])).bincount(minlength=512), exact(DRAWN))


def check_greedy(prompts: list[list[int]], rows: list[list[int]], bound: float) -> None:
    """Each token is the likeliest by a loop in fp32, up to a rounding."""
    model = tiny()
    for prompt, row in zip(prompts, rows, strict=True):
        logits = logits_of(model, torch.tensor([*prompt, *row]))[len(prompt) - 1 : -1]
        for t, token in enumerate(row):
            found = penalized(logits[t], prompt, row[:t], *PENALTIES[-1])
            assert found.max() - found[token] < bound * logits[t].abs().max(), t


def test_kernels_sample_behind_the_penalties(prompts, monkeypatch):
    """With their plain twins, on a CPU, and a graph that is none. There is one for steps with
    penalties and one for those without, and each serves all their values."""
    fast_engine = pytest.importorskip("fast.engine")
    made, kind = [], fast_engine.FastEngine
    monkeypatch.setattr(fast_engine, "optimize", pytest.importorskip("fast").use_kernels)
    monkeypatch.setattr(kind, "slots", lambda self, n: self.model.slots)  # which the twins need
    monkeypatch.setattr(kind, "capture", lambda self, step, _: made.append(step) or step)
    with torch.compiler.set_stance("force_eager"):
        engine = kind(tiny().bfloat16(), 60, 3, GREEDY)
        plain = run(engine, prompts, 20)
        assert engine.captures and len(made) == 1
        engine.set_sampling(ALL)
        rows = run(engine, prompts, 20)
        check_greedy(prompts, rows, 0.02)
        engine.set_sampling(with_penalties((1, 0, 1e-30)))
        assert run(engine, prompts, 20) == plain != rows and len(made) == 2
        engine.set_sampling(GREEDY)
        assert run(engine, prompts, 20) == plain and len(made) == 2


class Capturing(Engine):
    """Whose graphs are none."""

    captures = True

    def capture(self, step, results):
        self.made.append(step.args)
        return step


def test_graphs_with_penalties_are_made_when_they_are_wanted_and_leave_the_cache_alone(prompts):
    """In a chat penalties may come and go between turns. There is a graph for each k with them and
    one without."""
    engine = partial(Capturing, batch_size=1, sampling=GREEDY)
    engine.func.made = []
    target = engine(tiny(), 120, spare=SLACK)
    draft = make_draft(target, tiny(directory=DRAFT), engine)
    made = Speculator(target, draft, make_policy("3"))
    text = prompts[0] + run(made, prompts[:1], 10)[0]
    for penalties in (PENALTIES[0], (1, 0, 0), PENALTIES[-1], (1, 0, 0)):
        made.set_sampling(with_penalties(penalties))
        found = run(made, [[text[-1], 300]], 10, start=len(text) - 1)[0]
        text.append(300)
        if penalties == (1, 0, 0):
            assert found == run(Engine(tiny(), 120, 1, GREEDY), [text], 10)[0]
        text += found
    assert engine.func.made == [(3,)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["none", "tiny-draft", "tiny-eagle", "prompt-lookup"])
def test_captured_steps_penalize_up_to_ties(prompts, name):
    """bf16, with kernels, a ragged batch; a graph is captured where penalties come, and serves all
    their values."""
    model = tiny().to("cuda", torch.bfloat16)
    makers = {"tiny-draft": lambda: tiny(directory=DRAFT), "tiny-eagle": tiny_head}
    if name == "none":
        made = ENGINES["fast"](model, 60, 3, GREEDY)
    else:
        draft = makers[name]().to("cuda", torch.bfloat16) if name in makers else None
        made = speculator(model, 60, draft, "4", 3, mode="fast")
    plain = run(made, prompts, 30)
    made.set_sampling(with_penalties((1, 0, 1e-30)))
    assert run(made, prompts, 30) == plain
    made.set_sampling(ALL)
    rows = run(made, prompts, 30)
    check_greedy(prompts, rows, 0.02)
    made.set_sampling(GREEDY)
    assert run(made, prompts, 30) == plain != rows


def test_penalties_are_options_of_llm_and_of_a_call(prompts, expected):
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    told = dict(zip(names, PENALTIES[-1]))
    text = open_tokenizer(TINY).decode(prompts[0])
    plain, always = (
        LLM(str(TINY), device="cpu", quiet=True, temperature=0, max_new_tokens=30, **more)
        for more in ({}, told)
    )
    found = always(text)
    assert found.prompt_tokens == prompts[0] and found.tokens == expected[PENALTIES[-1]][0]
    assert plain(text, **told).tokens == found.tokens != plain(text).tokens
    assert always(text, **dict(zip(names, (1, 0, 0)))).tokens == plain(text).tokens

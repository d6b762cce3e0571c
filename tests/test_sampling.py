"""Sampling in plain PyTorch against its definition, and the kernels against it."""

import math
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F

from llm import CallOptions
from helpers import ROOT, error, on_each_device, penalized
from generate import Sampling, choose, draw, penalize, probabilities
from speculative import accept, choose_draft

with suppress(ModuleNotFoundError):  # see with_kernels
    from fast.sampling import (
        distribute,
        exponential,
        fast_accept,
        fast_choose,
        fast_choose_draft,
        make_settings,
        sample,
    )
with_kernels = pytest.mark.skipif(not (ROOT / "fast").exists(), reason="fast/ was deleted")


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("temperature", [0, 0.5, 100], [-0.1, 100.5, math.nan]),
        ("top_k", [-1, 0, 7, 10**12], [-2, 0.5]),
        ("top_p", [0, 1e-46, 0.5, 1], [-0.1, 1.5, math.nan]),
        ("min_p", [0, 0.05, 1], [-0.1, 1.5, math.nan]),
        ("repetition_penalty", [0.01, 1, 1.3, 100], [0, -1.3, 101, math.nan]),
        ("presence_penalty", [-2, 0, 1.5, 2], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 0, 1.5, 2], [-2.1, 2.1, math.nan]),
    ],
)
def test_files_and_options_have_the_same_limits(name, good, bad):
    for check in (Sampling, CallOptions):
        for value in good:
            check(**{name: value})
        for value in [*bad, True, "1"]:
            with pytest.raises(ValueError):
                check(**{name: value})


SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.0, 3, 0.5, 0.5),
    Sampling(0.8),
    Sampling(0.8, 0, 0.0),
    Sampling(0.8, -1, 1e-46),
    Sampling(0.7, -1),
    Sampling(0.7, 3),
    Sampling(0.7, 1),
    Sampling(0.7, 200),
    Sampling(1.0, 10**12),
    Sampling(0.2, 0, 0.95),
    Sampling(0.8, 50, 0.9),
    Sampling(0.8, 0, 1.0, 0.1),
    Sampling(1.3, 20, 0.9, 0.05),
    Sampling(2.0, 0, 1.0, 1.0),
]


def exact_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[R, V] in float64. Of equally likely tokens all stay or none."""
    if sampling.greedy:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    p = (logits.double() / sampling.temperature).softmax(-1)
    ordered = p.sort(dim=-1, descending=True).values
    if 0 < sampling.top_k < p.shape[-1]:
        p = p * (p >= ordered[:, sampling.top_k - 1, None])
        p = p / p.sum(-1, keepdim=True)
        ordered = p.sort(dim=-1, descending=True).values
    if sampling.top_p < 1:
        count = (ordered.cumsum(-1) - ordered < sampling.top_p).sum(-1, keepdim=True)
        p = p * (p >= ordered.gather(-1, count - 1))
    p = p * (p >= sampling.min_p * ordered[:, :1])
    return p / p.sum(-1, keepdim=True)


def some_logits(V: int, device: str) -> torch.Tensor:
    """[5, V], 16-bit; in the first row 30 tokens are the likeliest, more than some of the top-k."""
    logits = 3 * torch.randn(5, V, device=device, dtype=torch.bfloat16)
    logits[0, :30] = logits[0].max()
    return logits


@with_kernels
@pytest.mark.parametrize(
    "device, V",
    [
        ("cpu", 40),
        ("cpu", 5000),
        *(
            pytest.param("cuda", V, marks=pytest.mark.gpu)
            for V in (40, 2048, 4096, 32000, 151936, 248320)
        ),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_probabilities_and_the_sampling_kernels(device, V, sampling):
    """In plain PyTorch, and the kernels, on a CPU their plain twins."""
    logits = some_logits(V, device)
    settings, noise = make_settings(sampling, logits.device), exponential(logits)
    expected = exact_probabilities(logits, sampling)
    assert (
        error(probabilities(logits.float().cpu(), sampling), expected.cpu()) < 5e-5
    )  # sums of 248,320 in fp32
    logsumexp = logits.double().logsumexp(-1)
    probs, totals, tokens = distribute(logits, noise, settings)
    assert error(probs, expected) < 1e-5 and error(totals, logsumexp) < 1e-6
    assert tokens.equal((expected / noise.double()).argmax(-1))
    chosen, logprobs = sample(logits, noise, settings)
    assert chosen.equal(tokens)
    ref = logits.double().gather(-1, chosen[:, None])[:, 0] - logsumexp
    torch.testing.assert_close(logprobs.double(), ref, rtol=0, atol=1e-4)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalties", [(1.4, 0, 0), (0.7, 0, 0), (1, 0.7, 0), (1, -0.3, 1.1)])
def test_penalties_are_those_of_a_loop(penalties, dtype, device):
    """Of rows of several tokens, as verification has them. What lies behind a token, of a draft that
    was rejected, does not count."""
    B, T, L, V = 5, 3, 29, 13
    logits = (3 * torch.randn(B, T, V)).to(dtype)
    logits[0, 0, :3] = torch.tensor([0.0, -math.inf, math.inf])
    history, at = torch.randint(V, (B, L)), torch.randint(L - T, (B, 1)) + torch.arange(T)
    begins = torch.randint(1, L, (B,))
    expected = logits.double()
    for b, t in ((b, t) for b in range(B) for t in range(T)):
        text = history[b, : at[b, t] + 1].tolist()
        expected[b, t] = penalized(expected[b, t], text[: begins[b]], text[begins[b] :], *penalties)
    given = (each.to(device) for each in (logits, at, history, begins))
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    found = penalize(*given, Sampling(**dict(zip(names, penalties))).penalties)
    assert found.dtype == torch.float32 and logits.double().ne(expected).any()
    assert torch.allclose(found.cpu().double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "penalty, expected",
    [
        (1.3, [1.538461566, -1.949999928, 0.75, 3.076923132, -0.25, 0.0, -3.899999857, 1.0]),
        (0.8, [2.5, -1.200000048, 0.75, 5.0, -0.25, 0.0, -2.400000095, 1.0]),
    ],
)
def test_repetition_is_that_of_transformers(penalty, expected):
    """Of RepetitionPenaltyLogitsProcessor, for the tokens 3 1 3 0 6; all are the prompt's or none."""
    logits = torch.tensor([[[2.0, -1.5, 0.75, 4.0, -0.25, 0.0, -3.0, 1.0]]])
    history, at = torch.tensor([[3, 1, 3, 0, 6, 7, 7]]), torch.tensor([[4]])
    for begins in (1, 5):
        found = penalize(logits, at, history, torch.tensor([begins]), (penalty, 0.0, 0.0))
        assert torch.allclose(found, torch.tensor(expected), rtol=1e-6, atol=0)


def seeded(seed: int, function: Callable, *args):
    torch.manual_seed(seed)
    return function(*args)


@with_kernels
@on_each_device
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("draft_vocab", [300, 500, 700])
def test_fast_choose_draft_and_choose_draw_what_the_plain_ones_draw(draft_vocab, sampling, device):
    """A draft with fewer tokens than the target's 500, with as many, and with more. Greedy choose()
    draws no noise."""
    logits = torch.randn(9, 2, draft_vocab, device=device).bfloat16()
    settings = make_settings(sampling, logits.device)
    tokens, q = seeded(3, fast_choose_draft, logits, 500, settings)
    expected, expected_q = seeded(3, choose_draft, logits, 500, sampling)
    assert q.shape == (9, 500) and torch.allclose(q, expected_q, atol=1e-6)
    if (
        draft_vocab >= 500 or sampling.greedy
    ):  # else choose_draft() draws its noise for tokens that the draft lacks
        assert tokens.equal(expected)
    tokens, logprobs = seeded(3, fast_choose, logits[:, -1], settings)
    expected, expected_logprobs = seeded(3, choose, logits[:, -1], sampling)
    assert tokens.equal(expected) and torch.allclose(logprobs, expected_logprobs, atol=1e-4)


@with_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_fast_accept_equals_accept(sampling):
    """Drafts near the target and far from it, of which fewer may count than there are; the same
    random numbers."""
    B, k, V, seen = 6, 4, 5000, set()
    settings = make_settings(sampling, torch.device("cuda"))
    for trial in range(30):
        logits = 2 * torch.randn(B, k + 1, V, device="cuda", dtype=torch.bfloat16)
        q = probabilities((logits + (trial % 3) * torch.randn_like(logits)).float(), sampling)
        q[:, -1] = 0
        tokens = torch.cat(
            [torch.zeros(B, 1, device="cuda").long(), draw(q[:, :-1], sampling)], dim=1
        )
        proposed = torch.randint(k + 1, (B,), device="cuda")
        given = logits, tokens, q, proposed
        out, logprobs, accepted = seeded(trial, fast_accept, *given, settings)
        expected, expected_logprobs, expected_accepted = seeded(trial, accept, *given, sampling)
        text = torch.arange(k + 1, device="cuda") <= accepted[:, None]
        assert accepted.equal(expected_accepted) and out[text].equal(expected[text])
        assert torch.allclose(logprobs[text], expected_logprobs[text], atol=1e-3)
        seen |= set(accepted.tolist())
    assert seen == set(range(k + 1))


@with_kernels
@pytest.mark.gpu
def test_one_graph_serves_all_settings():
    """Captured once, with greedy settings; then others are copied into the tensor."""
    logits, noise = some_logits(32000, "cuda"), torch.empty(5, 32000, device="cuda").exponential_()
    settings = make_settings(SAMPLINGS[0], logits.device)
    sample(logits, noise, settings)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen, _ = sample(logits, noise, settings)
    for sampling in SAMPLINGS:
        settings.copy_(make_settings(sampling, logits.device))
        graph.replay()
        assert chosen.equal((exact_probabilities(logits, sampling) / noise.double()).argmax(-1)), (
            sampling
        )


@with_kernels
@on_each_device
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8), Sampling(0.8, 5, 0.9)], ids=str)
@pytest.mark.parametrize("bits", [0x7FC0, -0x40], ids=["positive", "negative"])
def test_a_nan_among_the_logits_is_told(bits, sampling, device):
    """By the token's log-probability, which llm.Completion looks at."""
    logits = torch.randn(2, 1500, device=device).bfloat16()
    logits.view(torch.int16)[1, 700] = bits
    _, logprobs = fast_choose(logits, make_settings(sampling, logits.device))
    assert logprobs.isnan().tolist() == [False, True]

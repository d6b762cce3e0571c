"""Sampling in plain PyTorch against its definition, and the kernels against it."""
import math
from contextlib import suppress

import pytest
import torch

from fast.sampling import distribute, exponential, fast_accept, fast_choose, fast_propose, plain_sample, sample
from guard import check_options
from helpers import error
from sampling import Sampling, choose, draw, probabilities
from speculative import accept, propose


def reference_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Spelt out: scale, keep the k likeliest, keep the likeliest until they make up p, normalise."""
    weights = [torch.tensor(x / temperature, dtype=torch.double).exp().item() for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[:top_k or None]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    return [weights[i] / sum(weights[j] for j in kept) if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (1.0, 0, 1.0), (0.3, 0, 1.0), (2.0, 3, 1.0), (0.8, 0, 0.5), (0.8, 5, 0.7), (1.0, 1, 1.0), (1.0, 0, 1e-6),
    (1.0, 99, 1.0)])
def test_probabilities_equal_the_spelt_out_ones(temperature, top_k, top_p):
    logits = torch.randn(4, 17) * 2
    out = probabilities(logits, Sampling(temperature, top_k, top_p))
    for row, ref in zip(out, logits.tolist()):
        assert error(row, torch.tensor(reference_probabilities(ref, temperature, top_k, top_p))) < 1e-5


@pytest.mark.parametrize("name, good, bad", [
    ("temperature", [0, 0.5, 100], [-0.1, 100.5, math.nan]), ("top_k", [0, 7, 10 ** 12], [-1, 0.5]),
    ("top_p", [1e-6, 0.5, 1], [0, 1e-46, 1.5, math.nan])])
def test_files_and_options_have_the_same_limits(name, good, bad):
    def takes(function, **values) -> bool:
        with suppress(ValueError):
            function(**values)
            return True
        return False

    for value in good + bad:
        assert takes(Sampling, **{name: value}) == takes(check_options, options={name: value}) == (value in good)
    assert not takes(Sampling, **{name: True}) and not takes(Sampling, **{name: "1"})  # files alone have types


def test_min_p_is_relative_to_the_likeliest_token_and_greedy_is_certain():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for sampling, expected in (Sampling(1.0, min_p=0.4), [0.625, 0.375, 0, 0]), (Sampling(0.0), [1, 0, 0, 0]):
        torch.testing.assert_close(probabilities(logits, sampling), torch.tensor(expected, dtype=torch.float32))


def test_choose_draws_from_the_probabilities():
    """Chi-square of 40,000 draws over 8 tokens: 7 degrees of freedom, whose 1 - 1e-6 quantile is 40.5."""
    logits, n = torch.randn(8), 40_000
    tokens, logprobs = choose(logits.expand(n, 8), Sampling(temperature=0.7))
    expected = n * (logits / 0.7).softmax(-1)
    assert ((tokens.bincount(minlength=8) - expected) ** 2 / expected).sum() < 40.5
    assert torch.allclose(logprobs, logits.log_softmax(-1)[tokens])  # under the raw logits, whatever the temperature


def test_temperature_zero_is_argmax():
    logits = torch.randn(5, 99)
    assert choose(logits, Sampling(temperature=0))[0].equal(logits.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("V", [40, 4096, 32000, 128256, 151936])
@pytest.mark.parametrize("top_k", [0, 1, 50, 200])
def test_sample(V, top_k):
    logits = 3 * torch.randn(5, V, device="cuda", dtype=torch.bfloat16)
    logits[0, :30] = logits[0].max()  # ties of the best, and at the edge of top_k
    noise = torch.empty(5, V, device="cuda").exponential_()
    tokens, logprobs = sample(logits, noise, 0.7, top_k)
    expected, expected_logprobs = plain_sample(logits, noise, 0.7, top_k)
    assert tokens.equal(expected) and torch.allclose(logprobs, expected_logprobs, atol=1e-4)
    tokens, logprobs = sample(logits, None, 0.0, 0)
    assert tokens.equal(logits.float().argmax(-1)) and tokens[0] < 30
    assert torch.allclose(logprobs, logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0], atol=1e-4)


def test_fast_choose_draws_what_choose_draws():
    logits = torch.randn(64, 500)
    for sampling in (Sampling(0.0), Sampling(0.8), Sampling(1.3, 20)):
        draws = []
        for function in (choose, fast_choose):
            torch.manual_seed(3)
            draws.append(function(logits, sampling))
        assert draws[0][0].equal(draws[1][0]) and torch.allclose(draws[0][1], draws[1][1], atol=1e-6)


SAMPLINGS = [Sampling(0.2, 0, 0.95), Sampling(1.0, 0, 0.5), Sampling(0.8, 50, 0.9), Sampling(0.7, 3), Sampling(0.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("V", [40, 2048, 32000, 128256, 151936])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_distribute(V, sampling):
    logits = 3 * torch.randn(5, V, device="cuda", dtype=torch.bfloat16)
    logits[0, :30] = logits[0].max()  # ties
    noise = exponential(logits, sampling)
    probs, totals, tokens = distribute(logits, noise, sampling.temperature, sampling.top_k, sampling.top_p)
    expected, expected_totals = probabilities(logits.float(), sampling), logits.float().logsumexp(-1)
    assert error(probs, expected) < 1e-5 and torch.allclose(totals, expected_totals, atol=1e-4)
    assert tokens.equal((expected if noise is None else expected / noise).argmax(-1))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("draft_vocab", [300, 500, 700])
def test_fast_propose_equals_propose(draft_vocab, sampling):
    """A draft with fewer tokens than the target's 500, with as many, and with more."""
    logits, outs = torch.randn(9, 2, draft_vocab), []
    for function in (fast_propose, propose):
        torch.manual_seed(3)
        outs.append(function(logits, 500, sampling))
    (tokens, q), (expected, expected_q) = outs
    assert q.shape == (9, 500) and torch.allclose(q, expected_q, atol=1e-6)
    if draft_vocab >= 500:  # else propose() draws its noise for tokens that the draft lacks, too
        assert tokens.equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_fast_accept_equals_accept(sampling):
    """Drafts near the target and far from it, of which fewer may count than there are; the same random numbers."""
    B, k, V, seen = 6, 4, 5000, set()
    for trial in range(30):
        logits = 2 * torch.randn(B, k + 1, V, device="cuda", dtype=torch.bfloat16)
        q = probabilities((logits + (trial % 3) * torch.randn_like(logits)).float(), sampling)
        q[:, -1] = 0
        tokens = torch.cat([torch.zeros(B, 1, device="cuda").long(), draw(q[:, :-1], sampling)], dim=1)
        proposed = torch.randint(k + 1, (B,), device="cuda")
        outs = []
        for function in (fast_accept, accept):
            torch.manual_seed(trial)
            outs.append(function(logits, tokens, q, proposed, sampling))
        (out, logprobs, accepted), (expected, expected_logprobs, expected_accepted) = outs
        text = torch.arange(k + 1, device="cuda") <= accepted[:, None]
        assert accepted.equal(expected_accepted) and out[text].equal(expected[text])
        assert torch.allclose(logprobs[text], expected_logprobs[text], atol=1e-3)
        seen |= set(accepted.tolist())
    assert seen == set(range(k + 1))

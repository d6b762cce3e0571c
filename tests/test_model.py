"""The model against golden values of transformers; what a token sees depends on its position alone."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import load_model
from model import Sampling, choose, probabilities, rope_tables

GOLDEN = sorted(path.parent for path in (Path(__file__).parent / "golden").glob("*/config.json"))
CPU = torch.device("cpu")


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def golden(family: Path):
    values = load_file(family / "golden.safetensors")
    rows = range(len(values) // 2)
    return [values[f"tokens.{i}"] for i in rows], [values[f"logits.{i}"] for i in rows]


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def family(request) -> Path:
    return request.param


def test_eight_families_have_golden_values():
    assert len(GOLDEN) == 8


def test_logits_equal_transformers(family):
    model = load_model(family, CPU, torch.float32)
    for tokens, logits in zip(*golden(family)):
        model.setup(length=64, batch=1)
        assert error(model(tokens[None], torch.arange(len(tokens))[None])[0], logits) < 1e-5


def test_token_by_token_equals_one_piece(family):
    model = load_model(family, CPU, torch.float32)
    tokens, logits = (rows[0] for rows in golden(family))
    model.setup(length=64, batch=1)
    steps = [model(token[None, None], torch.tensor([[i]])) for i, token in enumerate(tokens)]
    assert error(torch.cat(steps, dim=1)[0], logits) < 1e-5


def test_without_a_cache_as_with_one(family):
    model = load_model(family, CPU, torch.float32)
    tokens, logits = (rows[0] for rows in golden(family))
    model.setup(length=64)
    assert error(model(tokens[None], torch.arange(len(tokens))[None])[0], logits) < 1e-5


def test_ragged_batch_over_a_dirty_cache_equals_rows_alone(family):
    """A padded prefill, then a step of 3 tokens at positions of each row's own, over slots full of rubbish."""
    model = load_model(family, CPU, torch.float32)
    all_tokens, all_logits = golden(family)
    lengths = torch.tensor([17, 2, 9])
    model.setup(length=64, batch=3)
    for layer in model.layers:
        layer.attn.k_cache.normal_(std=9)
        layer.attn.v_cache.normal_(std=9)
    prompts = torch.randint(0, model.config.vocab_size, (3, 17))
    for row, n in enumerate(lengths):
        prompts[row, :n] = all_tokens[row][:n]
    last = model(prompts, torch.arange(17)[None], last=lengths - 1)
    steps = torch.stack([all_tokens[row][n:n + 3] for row, n in enumerate(lengths)])
    verified = model(steps, lengths[:, None] + torch.arange(3))
    for row, n in enumerate(lengths):
        assert error(last[row], all_logits[row][n - 1]) < 1e-5
        assert error(verified[row], all_logits[row][n:n + 3]) < 1e-5


def test_slots_in_use_suffice(family):
    model = load_model(family, CPU, torch.float32)
    tokens, logits = (rows[0] for rows in golden(family))
    model.setup(length=128, batch=1)
    out = model(tokens[None], torch.arange(len(tokens))[None], slots=model.slots[:len(tokens)])
    assert error(out[0], logits) < 1e-5


def test_repeated_rows_continue_as_their_source():
    model = load_model(GOLDEN[0], CPU, torch.float32)
    all_tokens, all_logits = golden(GOLDEN[0])
    model.setup(length=64, batch=4)
    prompts = torch.stack([all_tokens[0][:5], all_tokens[2][:5]])
    model(prompts, torch.arange(5)[None])
    model.repeat_rows(2)
    source = [0, 0, 2, 2]
    out = model(torch.stack([all_tokens[row][5:6] for row in source]), torch.full((4, 1), 5))
    for row, of in enumerate(source):
        assert error(out[row, 0], all_logits[of][5]) < 1e-5


def test_rope_tables_are_fp32_and_turn_by_the_published_angles():
    model = load_model(GOLDEN[0], CPU, torch.bfloat16)
    model.setup(length=128, batch=1)
    assert model.cos.dtype == model.sin.dtype == torch.float32
    E = model.config.head_dim
    angle = torch.arange(128, dtype=torch.double)[:, None] * 10000.0 ** (-torch.arange(0, E, 2, dtype=torch.double) / E)
    cos, sin = rope_tables(model.config, 128)
    assert error(cos, angle.cos().repeat(1, 2)) < 1e-5 and error(sin, angle.sin().repeat(1, 2)) < 1e-5


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


def test_choose_draws_from_the_probabilities():
    """Chi-square of 40,000 draws over 8 tokens: 7 degrees of freedom, whose 1 - 1e-6 quantile is 40.5."""
    logits, n = torch.randn(8), 40_000
    tokens, logprobs = choose(logits.expand(n, 8), Sampling(temperature=0.7))
    expected = n * (logits / 0.7).softmax(-1)
    assert ((tokens.bincount(minlength=8) - expected) ** 2 / expected).sum() < 40.5
    assert torch.allclose(logprobs, logits.log_softmax(-1)[tokens])  # of the raw logits, whatever the temperature


def test_temperature_zero_is_argmax():
    logits = torch.randn(5, 99)
    assert choose(logits, Sampling(temperature=0))[0].equal(logits.argmax(-1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_gradients_equal_eager_ones(device):
    """What train_tiny.py relies on; through nested_compile_region torch gets them wrong."""
    model = load_model(GOLDEN[0].parent / "qwen3", torch.device(device), torch.float32).requires_grad_(True)
    model.setup(length=32)
    tokens = torch.randint(0, model.config.vocab_size, (4, 32), device=device)

    def loss() -> torch.Tensor:
        logits = model(tokens[:, :-1], torch.arange(31, device=device)[None])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    gradients = []
    for function in (loss, torch.compile(loss)):
        model.zero_grad()
        function().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert error(gradients[1][name], gradient) < 1e-4, name

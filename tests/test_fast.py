"""The swapped-in modules against the ones they replace."""
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from checkpoint import load_model
from fast.cpu import RowLinear, row_decoder
from fast.decoder import install_kernels
from generate import Generator
from quantize import load_model as quantized_model
from sampling import Sampling

GOLDEN = Path(__file__).parent / "golden"
TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("bias", [False, True])
def test_compiled_row_linear_equals_linear(dtype, tolerance, bias):
    linear = nn.Linear(577, 131, bias=bias).to(dtype).requires_grad_(False)
    compiled = torch.compile(RowLinear(linear), fullgraph=True)
    for shape in [(577,), (1, 1, 577), (3, 577), (2, 4, 577), (9, 577)]:
        x = torch.randn(shape, dtype=dtype)
        b = linear.bias.double() if bias else None
        ref = F.linear(x.double(), linear.weight.double(), b)
        out = compiled(x)
        assert out.shape == ref.shape and out.dtype == dtype
        assert ((out.double() - ref).norm() / ref.norm()).item() < tolerance


def test_the_decoder_of_a_cpu_has_the_same_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU()))
    x, before = torch.randn(2, 3), dict(model.named_parameters())
    ref, decoder = model(x), row_decoder(model)
    assert isinstance(decoder[0], RowLinear) and isinstance(decoder[1][0], RowLinear)
    assert type(model[0]) is type(model[1][0]) is nn.Linear
    assert all(before[name] is parameter for name, parameter in decoder.named_parameters())
    assert decoder(x).equal(ref)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", sorted(path.name for path in GOLDEN.iterdir()))
@torch.no_grad()
def test_fast_decoder_equals_the_model(family, device):
    """Prefill, then tokens one at a time and three at once, ragged, over a dirty cache."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    plain, fast = (load_model(GOLDEN / family, torch.device(device), dtype) for _ in range(2))
    for model in (plain, fast):
        model.setup(64, 3)
        for layer in model.layers:
            layer.attn.k_cache.fill_(3)
            layer.attn.v_cache.fill_(-2)
    decoder, vocabulary = install_kernels(fast), plain.config.vocab_size
    prompt = torch.randint(vocabulary, (3, 17), device=device)
    last, positions = torch.tensor([16, 3, 9], device=device), torch.arange(17, device=device)[None]
    ref, out = plain(prompt, positions, last=last), fast(prompt, positions, fast.slots[:0], last)
    at = last[:, None] + 1
    for n in (0, 1, 1, 3, 1, 3):
        if n:
            tokens, where = torch.randint(vocabulary, (3, n), device=device), at + torch.arange(n, device=device)
            ref, out = plain(tokens, where), decoder(tokens, where)
            at += n
        assert out.shape == ref.shape
        assert ((out - ref).norm() / ref.norm()).item() < (1e-5 if device == "cpu" else 5e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantize, group_size", [("int8", None), ("int4", 64), ("int4", None)])
@torch.no_grad()
def test_fast_decoder_with_packed_weights(quantize, group_size, device):
    """Prefill of a few and of many tokens, then one at a time and three at once; a layer's inputs in another order."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    models = [quantized_model(TINY, torch.device(device), dtype, quantize, group_size) for _ in range(2)]
    order = torch.randperm(models[0].config.dim, device=device)
    for model in models:
        model.setup(300, 2)
        model.layers[0].attn.wqkv.order = nn.Parameter(order, requires_grad=False)
    plain, fast = models
    decoder = install_kernels(fast)
    for T in (3, 200):
        prompt, at = torch.randint(plain.config.vocab_size, (2, T), device=device), torch.arange(T, device=device)[None]
        last = torch.tensor([T - 1, T // 2], device=device)
        ref, out = plain(prompt, at, last=last), fast(prompt, at, fast.slots[:0], last)
        assert ((out - ref).norm() / ref.norm()).item() < (1e-5 if device == "cpu" else 3e-2)
    at = last[:, None] + 1
    for n in (1, 3, 1):
        tokens = torch.randint(plain.config.vocab_size, (2, n), device=device)
        where = at + torch.arange(n, device=device)
        ref, out = plain(tokens, where), decoder(tokens, where)
        assert ((out - ref).norm() / ref.norm()).item() < (1e-5 if device == "cpu" else 3e-2)
        at += n


@torch.no_grad()
def test_one_prefill_serves_many_samples():
    plain, fast = (load_model(GOLDEN / "llama3.1", torch.device("cpu"), torch.float32) for _ in range(2))
    for model in (plain, fast):
        model.setup(12, 6)
    decoder, vocabulary = install_kernels(fast), plain.config.vocab_size
    tokens, at = torch.randint(vocabulary, (2, 5)), torch.arange(5)[None]
    for model in (plain, fast):
        model(tokens, at)
        model.repeat_rows(3)
    tokens, at = torch.randint(vocabulary, (6, 1)), torch.full((6, 1), 5)
    assert torch.allclose(plain(tokens, at), decoder(tokens, at), atol=1e-4)


@pytest.mark.gpu
def test_one_graph_for_all_prompts_lengths_and_conversations():
    model = load_model(TINY, torch.device("cuda"), torch.bfloat16)
    counters.clear()
    generator = Generator(model, 500, Sampling(0.8, 50), prompts=2, compile=True)
    for prompts, start in ([[1], [2]], 0), ([[5] * 300, [6]], 0), ([[7, 8], [9]], 100), ([[5] * 17, [1] * 40], 3):
        assert len(list(generator.generate(prompts, 12, start))) == 12
    assert counters["stats"]["unique_graphs"] == 2  # a layer's, for prefill, and decode


@pytest.mark.gpu
def test_kernels_change_greedy_tokens_at_ties_only():
    """bf16, compiled, with and without kernels; where rows part, the two tokens' logits are a rounding apart."""
    rows = []
    prompts = [[1, 5 + i, 300 + 7 * i] for i in range(4)]
    for use_kernels in (False, True):
        model = load_model(TINY, torch.device("cuda"), torch.bfloat16)
        generator = Generator(model, 80, Sampling(0.0), prompts=4, compile=True, use_kernels=use_kernels)
        rows.append([[token for [(token, _)] in row] for row in zip(*generator.generate(prompts, 64))])
    exact = load_model(TINY, torch.device("cuda"), torch.float32)
    exact.setup(80)
    for prompt, plain, fast in zip(prompts, *rows):
        same = next((i for i, (a, b) in enumerate(zip(plain, fast)) if a != b), None)
        if same is not None:
            tokens = torch.tensor([[*prompt, *plain[:same]]], device="cuda")
            logits = exact(tokens, torch.arange(tokens.shape[1], device="cuda")[None])[0, -1]
            assert abs(logits[plain[same]] - logits[fast[same]]) < 0.02 * logits.abs().max()

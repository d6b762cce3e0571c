"""The modules that fast/ swaps in against those that they replace."""
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import library, nn
from torch._dynamo.utils import counters

from fast import optimize
from fast.cpu import ONEDNN, CpuLinear, compiled_product, install_linears, linear, row_decoder
from fast.decoder import fusible, install_kernels
from formats import SeparateLinears
from generate import Generator
from helpers import error
from quantize import QuantizedLinear, load_checkpoint
from sampling import Sampling, choose
from speculative import accept, propose

GOLDEN = Path(__file__).parent / "golden"
TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype, tolerance, bias", [(torch.float32, 1e-6, True), (torch.bfloat16, 4e-3, False)])
def test_compiled_cpu_linear_equals_linear(dtype, tolerance, bias):
    linear = nn.Linear(577, 131, bias=bias).to(dtype).requires_grad_(False)
    compiled = torch.compile(row_decoder(CpuLinear(linear)), fullgraph=True)
    for shape in [(577,), (2, 2, 577), (5, 577)]:  # 4 rows are few, 5 are not
        x = torch.randn(shape, dtype=dtype)
        b = linear.bias.double() if bias else None
        ref = F.linear(x.double(), linear.weight.double(), b)
        out = compiled(x)
        assert out.shape == ref.shape and out.dtype == dtype
        assert error(out, ref) < tolerance


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", [(577,), (1, 577), (2, 9, 577), (0, 577), (300, 577)])
def test_a_cpus_product_is_linears(shape, dtype, tolerance):
    x, w, bias = torch.randn(shape, dtype=dtype), torch.randn(131, 577, dtype=dtype), torch.randn(131, dtype=dtype)
    for b in bias, None:
        out, ref = linear(x, w, b), F.linear(x.double(), w.double(), None if b is None else b.double())
        assert out.shape == ref.shape and out.dtype == dtype
        assert not out.numel() or error(out, ref) < tolerance
        if ONEDNN and dtype == torch.float32:
            library.opcheck(compiled_product, (x, w, b))


@pytest.mark.parametrize("x", [torch.randn(4, 10, 577)[:, 3], torch.randn(577, 5).T, torch.randn(5, 1154)[:, ::2],
                               torch.randn(1, 577).expand(6, 577)])
def test_a_cpus_product_takes_any_strides(x):
    w = torch.randn(577, 131).T
    assert error(linear(x, w, None), F.linear(x.double(), w.double())) < 1e-6


def test_the_decoder_of_a_cpu_has_the_same_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU()))
    x, before = torch.randn(2, 3), dict(model.named_parameters())
    ref = model(x)
    install_linears(model)
    decoder = row_decoder(model)
    for found, decodes in (model, False), (decoder, True):
        assert type(found[0]) is type(found[1][0]) is CpuLinear
        assert found[0].decodes is found[1][0].decodes is decodes
        assert all(before[name] is parameter for name, parameter in found.named_parameters())
        torch.testing.assert_close(found(x), ref)


@torch.no_grad()
def test_optimize_on_a_cpu_replaces_quantized_layers_and_keeps_the_functions():
    model = load_checkpoint(TINY, torch.device("cpu"), torch.float32, "int8")
    model.setup(20, 1)
    tokens, positions = torch.randint(model.config.vocab_size, (1, 3)), torch.arange(3)[None]
    ref = model(tokens, positions)
    fast = optimize(model)
    assert not any(isinstance(module, QuantizedLinear) for module in [*model.modules(), *fast.decoder.modules()])
    assert not fast.kernels and (fast.choose, fast.propose, fast.accept) == (choose, propose, accept)
    assert error(fast.decoder(tokens, positions), ref) < 1e-5


def test_optimize_leaves_other_devices_alone():
    model = load_checkpoint(TINY, torch.device("cpu"), torch.float32).to("meta")
    assert optimize(model) is None


def test_layers_that_are_quantized_apart_are_not_fused():
    model = load_checkpoint(TINY, torch.device("cpu"), torch.float32)
    assert fusible(model)
    model.layers[1].attn.wqkv = SeparateLinears([model.layers[1].attn.wqkv])
    assert not fusible(model)


def test_kernels_are_installed_once():
    model = load_checkpoint(TINY, torch.device("cpu"), torch.float32)
    model.setup(20, 1)
    install_kernels(model)
    with pytest.raises(ValueError, match="load it again"):
        install_kernels(model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", sorted(path.name for path in GOLDEN.iterdir()))
@torch.no_grad()
def test_fast_decoder_equals_the_model(family, device):
    """Prefill, then tokens one at a time and three at once, ragged, over a dirty cache."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    plain, fast = (load_checkpoint(GOLDEN / family, torch.device(device), dtype) for _ in range(2))
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
        assert error(out, ref) < (1e-5 if device == "cpu" else 5e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantize, group_size", [("int8", None), ("int4", 64), ("int4", None)])
@torch.no_grad()
def test_fast_decoder_with_packed_weights(quantize, group_size, device):
    """Prefill of a few and of many tokens, then one at a time and three at once. A layer's groups are act-order's."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    models = [load_checkpoint(TINY, torch.device(device), dtype, quantize, group_size) for _ in range(2)]
    wqkv = models[0].layers[0].attn.wqkv
    K, C = wqkv.in_features, wqkv.scales.shape[1]
    g_idx = torch.randperm(K, device=device) // (K // C)
    for model in models:
        model.setup(300, 2)
        model.layers[0].attn.wqkv.g_idx = nn.Parameter(g_idx, requires_grad=False)
    plain, fast = models
    decoder = install_kernels(fast)
    for T in (3, 200):
        prompt, at = torch.randint(plain.config.vocab_size, (2, T), device=device), torch.arange(T, device=device)[None]
        last = torch.tensor([T - 1, T // 2], device=device)
        ref, out = plain(prompt, at, last=last), fast(prompt, at, fast.slots[:0], last)
        assert error(out, ref) < (1e-5 if device == "cpu" else 3e-2)
    at = last[:, None] + 1
    for n in (1, 3, 1):
        tokens = torch.randint(plain.config.vocab_size, (2, n), device=device)
        where = at + torch.arange(n, device=device)
        ref, out = plain(tokens, where), decoder(tokens, where)
        assert error(out, ref) < (1e-5 if device == "cpu" else 3e-2)
        at += n


@torch.no_grad()
def test_one_prefill_serves_many_samples():
    plain, fast = (load_checkpoint(GOLDEN / "llama3.1", torch.device("cpu"), torch.float32) for _ in range(2))
    for model in (plain, fast):
        model.setup(12, 6)
    decoder, vocabulary = install_kernels(fast), plain.config.vocab_size
    tokens, at = torch.randint(vocabulary, (2, 5)), torch.arange(5)[None]
    for model in (plain, fast):
        model(tokens, at)
        model.arrange_rows([0, 0, 0, 1, 1, 1], 5)
    tokens, at = torch.randint(vocabulary, (6, 1)), torch.full((6, 1), 5)
    assert torch.allclose(plain(tokens, at), decoder(tokens, at), atol=1e-4)


@pytest.mark.gpu
def test_one_graph_for_all_prompts_lengths_and_conversations():
    model = load_checkpoint(TINY, torch.device("cuda"), torch.bfloat16)
    counters.clear()
    generator = Generator(model, 500, Sampling(0.8, 50), prompts=2, mode="fast")
    for prompts, start in ([[1], [2]], 0), ([[5] * 300, [6]], 0), ([[7, 8], [9]], 100), ([[5] * 17, [1] * 40], 3):
        assert len(list(generator.generate(prompts, 12, start))) == 12
    assert counters["stats"]["unique_graphs"] == 2  # a layer's, for prefill, and decode


@pytest.mark.gpu
def test_kernels_change_greedy_tokens_at_ties_only():
    """bf16, compiled, with and without kernels. Where two rows part, the two tokens' logits are a rounding apart."""
    rows = []
    prompts = [[1, 5 + i, 300 + 7 * i] for i in range(4)]
    for mode in ("compile", "fast"):
        model = load_checkpoint(TINY, torch.device("cuda"), torch.bfloat16)
        generator = Generator(model, 80, Sampling(0.0), prompts=4, mode=mode)
        rows.append([[token for [(token, _)] in row] for row in zip(*generator.generate(prompts, 64))])
    exact = load_checkpoint(TINY, torch.device("cuda"), torch.float32)
    exact.setup(80)
    for prompt, plain, fast in zip(prompts, *rows):
        same = next((i for i, (a, b) in enumerate(zip(plain, fast)) if a != b), None)
        if same is not None:
            tokens = torch.tensor([[*prompt, *plain[:same]]], device="cuda")
            logits = exact(tokens, torch.arange(tokens.shape[1], device="cuda")[None])[0, -1]
            assert abs(logits[plain[same]] - logits[fast[same]]) < 0.02 * logits.abs().max()

"""Kernels of 16-bit types and their plain twins, each judged by float64 alone: neither loosens the
other's bound."""

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fast.bandwidth import read_bandwidth, read_chunk
from fast.decoder import FusedAttention
from fast.latent import FusedLatent
from fast.linear import add_norm, add_norms, capped, linear, linear_gate, norm_linear
from fast.twins import plain_add_norm, plain_linear
from helpers import ROOT, error, exact_attention, exact_linear, on_each_device, rope_of
from model import (
    CACHES,
    Attention,
    Config,
    KVCache,
    LatentAttention,
    LatentConfig,
    LayerConfig,
    RMSNorm,
    RopeTable,
    visible,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# The most that a result may differ from float64's: relative to its norm, and each element for
# itself, relative to its own size and the root mean square of all. bf16 rounds by 2e-3 on average;
# the twins round up to three times.
TOLERANCES = {BF16: (6e-3, 3e-2), F16: (1e-3, 4e-3), F32: (1e-5, 1e-4)}


def check(out: Tensor, ref: Tensor, slack: float = 1) -> None:
    """out is what float64 gives, as far as its type can tell. slack: a factor of the second
    bound."""
    norm, element = TOLERANCES[out.dtype]
    element *= slack
    out, ref = out.double().cpu(), ref.double().cpu()
    torch.testing.assert_close(
        out, ref, rtol=element, atol=element * ref.square().mean().sqrt().item()
    )
    assert error(out, ref) < norm


SMALL = [
    (576, 1536, "residual"),
    (961, 576, "norm bias"),
    (2 * 37, 136, "norm gated"),
    (35, 72, "bias residual"),
]
LARGE = [
    (4096, 4096, "residual"),
    (6144, 4096, "norm bias"),
    (22016, 4096, "norm gated"),
    (4096, 14336, "residual"),
    (512, 28672, "bias"),
]


@pytest.mark.parametrize(
    "device, N, K, parts",
    [
        *(("cpu", *shape) for shape in SMALL),
        *(pytest.param("cuda", *shape, marks=pytest.mark.gpu) for shape in SMALL + LARGE),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_linear_and_its_twin(device, dtype, N, K, parts):
    """The kernels' outputs come from torch.empty, so the memory that it will hand out is filled
    with NaN first."""

    def randn(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    w, gated = randn(N, K) / K**0.5, "gated" in parts
    norm = randn(K).abs() + 0.5 if "norm" in parts else None
    bias = randn(N) if "bias" in parts else None
    for rows in (1, 2, 7, 16, 40):
        x, residual = randn(rows, K), randn(rows, N) if "residual" in parts else None
        ref = exact_linear(x, w, norm, bias, residual, gated)
        for function in (linear, plain_linear):
            if device == "cuda":
                torch.full((64, 1024, 1024), torch.nan, device="cuda")  # freed at once
            out = function(x, w, norm, bias, residual, gated)
            assert out.dtype == dtype
            check(out, ref)


# B, T, H, K, E, L, and where they are not DEFAULTS: window, qk_norm, what else there is (a rope, a
# cache),
CASES = [
    # and whether all sequences share one row of positions, as in prefill
    (1, 1, 32, 32, 128, 230),
    (50, 1, 9, 3, 64, 300),
    (3, 5, 6, 2, 48, 700, None, "head"),
    (1, 1, 32, 8, 128, 9000),
    (20, 3, 8, 8, 64, 3000, 777),
    (4, 16, 16, 2, 128, 600, None, "head"),
    (1, 2, 4, 1, 80, 5000, 4096),
    (2, 300, 6, 2, 96, 500),
    (1, 400, 32, 8, 128, 900, 256, "head"),
    (2, 3, 4, 2, 64, 200, None, None, "", True),
    (70, 1, 4, 2, 128, 300, None, None, "part"),
    (70, 2, 6, 2, 96, 300, None, None, "long"),
    (2, 60, 4, 2, 64, 300, None, None, "long"),
    (2, 3, 8, 2, 128, 300, None, None, "grows"),
    (35, 1, 4, 4, 64, 300, 50, "whole"),
    (2, 4, 4, 1, 256, 300, 100, "head", "none"),
    (70, 1, 16, 2, 64, 900, 128, None, "sinks"),
    (70, 1, 6, 2, 48, 700, None, "head", "int8"),
    (2, 5, 16, 4, 64, 3000, 777, None, "int8"),
    (1, 5, 32, 8, 128, 2955, 777),
    (2, 60, 4, 2, 64, 300, 20, None, "int8"),
    (1, 1, 32, 8, 128, 900, None, None, "int8-values"),
    (1, 5, 32, 8, 128, 9000, None, None, "sinks"),
    (2, 50, 4, 2, 64, 200, 20, "head", "sinks", True),
    (2, 90, 2, 1, 256, 300, 40, "head", "none"),
    (2, 200, 4, 1, 128, 700, 130, None, "sinks"),
    (2, 200, 8, 4, 128, 700, None, None, "int8"),
]
DEFAULTS = (None, None, "", False)
ROPES = {  # what a rope has besides theta, the share of a head that turns, and the scale of q k^T
    "part": (dict(scale=1.2), 0.75, None),
    "none": ({}, 0, 0.1),
    "long": (dict(long=True, original=70, scale=1.1), 0.5, None),
    "grows": (dict(original=20, q_growth=0.3), 1, 0.07),
}


@pytest.mark.parametrize(
    "device, case",
    [
        *(
            ("cpu", case) for case in CASES if case[5] < 1000 and case[0] * case[1] < 150
        ),  # on a CPU nothing is split
        *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES),
    ],
    ids=str,
)
@torch.no_grad()
def test_attention(device, case):
    """Ragged sequences, GQA of any ratio, windows, norms, one split and many, more groups than
    multiprocessors: on a CPU Attention.attend(), on a GPU its kernel, which updates the cache or,
    as in prefill, finds it complete. The cache is full of numbers, and has a row more than there
    are sequences."""
    B, T, H, K, E, L, window, qk_norm, kind, shared = *case, *DEFAULTS[len(case) - 6 :]
    dtype = BF16 if device == "cuda" else F32

    def randn(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    more, share, scale = ROPES.get(kind, ({}, 1, None))
    if "long" in more:
        more = more | dict(long=rope_of(int(E * share), 300.0).frequencies)
    rope = rope_of(int(E * share), **more)
    with torch.device(device):
        config = Config(
            8,
            (LayerConfig(window, rope),),
            H,
            K,
            E,
            8,
            8,
            L,
            qk_norm=qk_norm,
            attention_scale=scale,
        )
        attn = Attention(config, config.layers[0]).to(dtype)
    int8 = kind if kind in CACHES else None
    attn.cache = CACHES[int8 or "16-bit"]((B + 1, K, L, E), device, dtype)
    table = RopeTable(rope, E, L, L, device)
    everywhere = torch.arange(B + 1, device=device)[:, None], torch.arange(L, device=device)[None]
    attn.cache.write(randn(B + 1, L, K, E), randn(B + 1, L, K, E), *everywhere)
    if kind == "sinks":
        attn.sinks = nn.Parameter(2 * randn(H))
    for norm in (attn.q_norm, attn.k_norm) if qk_norm else ():
        norm.weight.uniform_(0.5, 1.5)
    start = torch.randint(0, L - T + 1, (1 if shared else B, 1), device=device)
    start[0] = L - T if B == 1 else start[0] * shared  # a full cache, an empty one, and any between
    qkv, positions = randn(B, T, H + 2 * K, E), start + torch.arange(T, device=device)
    ref, *refs = exact_attention(
        qkv, positions, table, *attn.cache.read(everywhere[0], L), attn, window
    )
    fused, rows = FusedAttention(attn, table, window), torch.arange(B, device=device)[:, None]
    before = [of.clone() for of in attn.cache.buffers()]

    def decode():
        return fused.attend(qkv.flatten(2).flatten(0, 1), positions)

    def prefill():
        for cache, of in zip(attn.cache.buffers(), before, strict=True):
            cache.copy_(of)
        return fused.update_then_attend(qkv.flatten(2), positions, *table(positions), rows)

    for function in (decode, decode, prefill) if device == "cuda" else (decode, decode):
        out = function().view(B, T, H, E)  # the second time over what the first has left
        k, v = attn.cache.read(everywhere[0], L)
        if int8:  # a code may be the next one, as prefill rounds a key after its norm, too
            steps = [
                0 if of is None else of[..., None]
                for of in (attn.cache.k_scale, attn.cache.v_scale)
            ]
            for of, exact, step in zip((k, v), refs, steps):
                assert ((of - exact).abs() <= 1.5 * step + 8e-3 * exact.abs() + 1e-6).all()
            ref = exact_attention(qkv, positions, table, k, v, attn, window, complete=True)[0]
        else:
            check(k, refs[0])
            assert v.double().equal(refs[1])
        check(out, ref, slack=3)  # a softmax makes more of a rounded score
        assert k[B].double().equal(refs[0][B]) and not fused.semaphore.any()


# B, T, H, K, E, tokens in the cache, window, and what is different
OTHER_KINDS = [
    (2, 1, 4, 2, 64, 300, None, dict(key_is_value=True, v_norm=True)),
    (3, 4, 6, 3, 96, 700, 100, dict(v_norm=True)),
    (2, 3, 8, 2, 128, 900, None, dict(qk_norm="weightless", gate_apart=True)),
    (2, 2, 4, 2, 64, 300, 50, dict(v_norm=True, kv_of=0)),
    (1, 1, 32, 4, 512, 900, None, dict(key_is_value=True, v_norm=True)),
    (2, 4, 16, 2, 512, 3000, None, dict(v_norm=True)),
    (3, 8, 8, 1, 512, 500, None, dict(key_is_value=True, v_norm=True)),
    (2, 2, 8, 2, 512, 700, 100, dict(v_norm=True, kv_of=0)),
    (1, 3, 6, 2, 320, 400, None, dict(qk_norm="weightless", gate_apart=True)),
    (20, 1, 8, 2, 512, 700, None, dict(v_norm=True, cache="int8")),
    (2, 200, 8, 1, 512, 900, None, dict(key_is_value=True, v_norm=True)),
    (2, 90, 4, 2, 512, 900, 100, dict(v_norm=True, kv_of=0)),
]


@on_each_device
@pytest.mark.parametrize("case", OTHER_KINDS, ids=str)
@torch.no_grad()
def test_attention_of_other_kinds(case, device):
    """Values that are keys, or normed; norms without a weight; gates behind all heads; keys and
    values of another layer; heads of more than 256 elements. The judge is Attention in float64."""
    B, T, H, K, E, L, window, of = *case[:-1], dict(case[-1])
    own = {key: of.pop(key) for key in ("key_is_value", "kv_of") if key in of}
    int8, of = of.pop("cache", None), dict(qk_norm="head") | of
    if of.get("gate_apart"):
        of["attention_gate"] = True
    rope = rope_of(E)
    layer = LayerConfig(window, rope, **own)
    with torch.device(device):
        config = Config(8, (layer,), H, K, E, 8, 8, L, attention_scale=0.9 * E**-0.5, **of)
        attn = Attention(config, layer).to(BF16)
    attn.cache = CACHES[int8 or "16-bit"]((B + 1, K, L, E), device, BF16)
    everywhere = torch.arange(B + 1, device=device)[:, None], torch.arange(L, device=device)[None]
    attn.cache.write(*torch.randn(2, B + 1, L, K, E, device=device, dtype=BF16), *everywhere)
    for norm in (attn.q_norm, attn.k_norm):
        if isinstance(norm, RMSNorm):
            norm.weight.uniform_(0.5, 1.5)
    table = RopeTable(rope, E, L, L, device)
    start = torch.randint(0, L - T + 1, (B, 1), device=device)
    start[0] = L - T
    positions, rows = start + torch.arange(T, device=device), everywhere[0][:B]
    qkv = torch.randn(B, T, attn.wqkv.out_features, device=device, dtype=BF16)
    plain = copy.deepcopy(attn).double()
    plain.cache = KVCache((B + 1, K, L, E), device, torch.float64)
    plain.cache.k, plain.cache.v = (x.double() for x in attn.cache.read(everywhere[0], L))
    mask = visible(torch.arange(L, device=device), positions, window)
    ref = plain.attend(qkv.double(), positions, *table(positions), mask, rows)
    fused = FusedAttention(attn, table, window)
    before = [part.clone() for part in attn.cache.buffers()]
    for function in ("attend", "attend", "update_then_attend"):
        if function == "attend":
            out = fused.attend(qkv.flatten(0, 1), positions).view_as(ref)
        elif device == "cuda":
            for part, old in zip(attn.cache.buffers(), before, strict=True):
                part.copy_(old)
            out = fused.update_then_attend(qkv, positions, *table(positions), rows)
        for found, exact in zip(attn.cache.read(everywhere[0], L), (plain.cache.k, plain.cache.v)):
            assert error(found, exact) < (2e-2 if int8 else 1e-2)
        assert error(out, ref) < (3e-2 if int8 else 1.5e-2)
        assert not fused.semaphore.any()


@pytest.mark.gpu
@pytest.mark.parametrize("E, kv_of", [(512, None), (64, 0)])
@torch.no_grad()
def test_new_slots_are_not_read_before_they_are_stored(E, kv_of):
    """In a graph kernels follow each other at once, and attention_kernel() starts while those before
    it run. Here the first of them, a norm, has one program, and leaves the GPU to the others."""
    device, L = torch.device("cuda"), 200
    layer = LayerConfig(None, rope_of(E))
    with device:
        attn = Attention(Config(8, (layer,), 8, 2, E, 8, 8, L), layer).to(BF16)
        attn.cache = KVCache((1, 2, L, E), device, BF16)
        positions, table = torch.tensor([[100]]), RopeTable(layer.rope, E, L, L, device)
        x, weight = torch.randn(1, 12 * E).to(BF16), torch.ones(12 * E)
    fused = FusedAttention(attn, table, None)
    if kv_of is not None:  # the kernel before is the other layer's
        reading = replace(layer, kv_of=kv_of)
        reader = Attention(Config(8, (reading,), 8, 2, E, 8, 8, L), reading).to(device, BF16)
        reader.cache = attn.cache
        reader = FusedAttention(reader, table, None)

    def step():
        y = fused.attend(add_norm(x, weight, 1e-5), positions)
        return y if kv_of is None else reader.attend(y, positions)

    step()
    ref = step().clone()  # the cache is complete by then
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(20):
        for part in (attn.cache.k, attn.cache.v):
            part[:, :, 100] = 50
        torch.cuda.synchronize()
        graph.replay()
        assert out.equal(ref)


# B, T, H, N, R, C, V, of queries' latent, tokens in the cache, window, cache
LATENTS = [
    (2, 1, 5, 24, 16, 40, 24, 0, 300, None, "16-bit"),
    (1, 3, 4, 16, 8, 32, 16, 24, 200, None, "int8"),
    (2, 17, 3, 12, 8, 16, 10, 20, 300, 70, "16-bit"),
    (1, 1, 20, 192, 64, 512, 256, 768, 250, None, "16-bit"),
    (1, 4, 20, 192, 64, 512, 256, 768, 9000, None, "16-bit"),
    (5, 2, 20, 192, 64, 512, 256, 768, 900, None, "int8"),
    (16, 1, 16, 128, 64, 512, 128, 0, 3000, None, "int8-values"),
    (2, 33, 20, 192, 64, 512, 256, 768, 600, None, "16-bit"),
]


@on_each_device
@pytest.mark.parametrize("case", LATENTS, ids=str)
@torch.no_grad()
def test_latent_attention(case, device):
    """Ragged, over a cache full of numbers; the judge is LatentAttention in float64."""
    B, T, H, N, R, C, V, q_dim, L, window, kind = case
    layer = LayerConfig(window, rope_of(R), latent=LatentConfig(C, N, V, q_dim, H % 2 == 0))
    with torch.device(device):
        attn = LatentAttention(Config(48, (layer,), H, H, R, 8, 8, L), layer).to(BF16)
    for norm in (attn.q_norm, attn.kv_norm):
        if isinstance(norm, RMSNorm):
            norm.weight.uniform_(0.5, 1.5)
    attn.cache = CACHES[kind]((B + 1, 1, L, R, C), device, BF16)
    everywhere = torch.arange(B + 1, device=device)[:, None], torch.arange(L, device=device)[None]
    of_cache = (torch.randn(B + 1, L, 1, n, device=device, dtype=BF16) for n in (R, C))
    attn.cache.write(*of_cache, *everywhere)
    table = RopeTable(layer.rope, R, L, L, device)
    start = torch.randint(0, L - T + 1, (B, 1), device=device)
    start[0] = L - T
    positions, rows = start + torch.arange(T, device=device), everywhere[0][:B]
    made = torch.randn(B, T, attn.w_in.out_features, device=device, dtype=BF16)
    plain = copy.deepcopy(attn).double()
    plain.cache = KVCache((B + 1, 1, L, R, C), device, torch.float64)
    plain.cache.k, plain.cache.v = (x.double() for x in attn.cache.read(everywhere[0], L))
    mask = visible(torch.arange(L, device=device), positions, window)
    ref = plain.attend(made.double(), positions, *table(positions), mask, rows)
    q = attn.wq(attn.queries_latent(made)) if q_dim else made[..., : attn.sizes[0]]
    fused = FusedLatent(attn, table, window)
    loose = 1 if kind == "16-bit" else 2
    for _ in range(2):  # the second time over what the first has left
        out = fused.attend(q.flatten(0, 1), made.flatten(0, 1), positions).view_as(ref)
        assert error(out, ref) < loose * 1.5e-2
        for found, exact in zip(attn.cache.read(everywhere[0], L), (plain.cache.k, plain.cache.v)):
            assert error(found, exact) < loose * 1e-2


@on_each_device
@pytest.mark.parametrize("shape", [(1, 5000), (3, 2, 777)], ids=str)
def test_capped_logits(shape, device):
    x = (60 * torch.randn(shape, device=device)).to(BF16)
    check(capped(x, 30.0), 30 * torch.tanh(x.double() / 30))
    extremes = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], device=device).to(BF16)
    assert str(capped(extremes, 20.0).tolist()) == "[0.0, 20.0, -20.0, nan]"


@on_each_device
@pytest.mark.parametrize("K", [72, 4096, 8192])
def test_norms_and_their_twin(K, device):
    """A norm's weight may be fp32, as Gemma's and OLMo's are."""
    x, residual = torch.randn(2, 5, K, device=device).bfloat16()
    weight = torch.rand(K, device=device) + 0.5
    ref = F.rms_norm(x.double(), (K,), weight.double(), 1e-5)
    for function in (add_norm, plain_add_norm):
        check(function(x, weight, 1e-5, residual), ref + residual.double())
        scale = torch.full((1,), 0.3, device=device).bfloat16()
        check(
            function(x, weight, 1e-5, residual, scale), (ref + residual.double()) * scale.double()
        )


@on_each_device
@pytest.mark.parametrize("K", [72, 2816])
def test_norms_of_a_dense_part_and_a_mixture(K, device):
    a, b, residual = torch.randn(3, 5, K, device=device).bfloat16()
    weights, scale = list(torch.rand(3, K, device=device) + 0.5), torch.rand(1, device=device)

    def norm(x, i):
        return F.rms_norm(x.double(), (K,), weights[i].double(), 10.0 ** -(i + 3))

    ref = norm(norm(a, 0) + norm(b, 1), 2) + residual.double()
    for of, factor in (None, 1), (scale, scale.double()):
        found = add_norms(a, b, weights, [1e-3, 1e-4, 1e-5], residual, of)
        check(found, ref * factor)


@on_each_device
@pytest.mark.parametrize("number, f", [(1, F.silu), (2, partial(F.gelu, approximate="tanh"))])
@pytest.mark.parametrize("N, K", [(256, 2560), (7, 72)])
def test_a_product_as_a_gate(N, K, number, f, device):
    w = torch.randn(N, K, device=device, dtype=BF16) / K**0.5
    for rows in (1, 3, 40):
        x = torch.randn(rows, K, device=device, dtype=BF16)
        own = torch.randn(rows, 3, N, device=device, dtype=BF16)[:, 1]
        check(linear_gate(x, w, own, number), f(x.double() @ w.double().T) * own.double())


@on_each_device
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("N, K", [(64, 2048), (96, 5120), (7, 72)])
def test_a_norm_with_a_product_of_few_outputs(N, K, dtype, device):
    w, weight = torch.randn(N, K, device=device).to(dtype) / K**0.5, torch.rand(K, device=device)
    for rows in (1, 2, 16, 40):
        x = torch.randn(rows, K, device=device).to(dtype)
        y, product = norm_linear(x, weight, 1e-5, w)
        ref = F.rms_norm(x.double(), (K,), weight.double(), 1e-5)
        check(y, ref)
        check(product, ref @ w.double().T)


@pytest.mark.gpu
def test_kernels_compile_for_compute_capability_8():
    program = ROOT / "tests" / "programs" / "compile_for_8.py"
    subprocess.run([sys.executable, program], check=True, timeout=300)


@pytest.mark.gpu
def test_the_timed_read_reads_every_word():
    chunk, data = 2**16, torch.randint(-(2**62), 2**62, (3 * 2**13,), device="cuda")
    sums, addresses = (
        torch.full((3,), -1, device="cuda"),
        data.data_ptr() + chunk * torch.arange(3, device="cuda"),
    )
    read_chunk[(3,)](addresses, sums, chunk, 4096, num_warps=8)
    assert sums.equal(data.view(3, -1).sum(1))


@pytest.mark.gpu(alone=True)
def test_read_bandwidth_is_a_rate_of_this_gpu():
    """PyTorch's sum of the same weights takes between half and five times as long, wherever this
    runs."""
    with torch.device("cuda"):
        model = nn.Sequential(
            *(nn.Linear(8192, 8192, bias=False) for _ in range(8))
        ).requires_grad_(False)
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first time warms up
        begun.record()
        for layer in model:
            layer.weight.sum()
        ended.record()
    ended.synchronize()
    rate = sum(weight.nbytes for weight in model.parameters()) / begun.elapsed_time(ended) * 1e3
    assert 0.5 < read_bandwidth(model) / rate < 5

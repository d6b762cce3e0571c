"""Each kernel of 16-bit types against its plain twin, and the twin against float64."""
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fast.attention import plain_update_and_attend, update_and_attend
from fast.bandwidth import read_bandwidth, read_chunk
from fast.linear import linear, plain_linear, rms_norm
from helpers import error, exact_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


SMALL = [(576, 1536, "residual"), (961, 576, "norm bias"), (2 * 37, 136, "norm gated"), (35, 72, "bias residual")]
LARGE = [(4096, 4096, "residual"), (6144, 4096, "norm bias"), (22016, 4096, "norm gated"), (4096, 14336, "residual"),
         (512, 28672, "bias")]


@pytest.mark.parametrize("device, N, K, parts", [
    *(("cpu", *shape) for shape in SMALL),
    *(pytest.param("cuda", *shape, marks=pytest.mark.gpu) for shape in SMALL + LARGE)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40])
def test_linear(device, dtype, rows, N, K, parts):
    x, w = torch.randn(rows, K, device=device, dtype=dtype), torch.randn(N, K, device=device, dtype=dtype) / K ** 0.5
    norm = torch.rand(K, device=device, dtype=dtype) + 0.5 if "norm" in parts else None
    bias = torch.randn(N, device=device, dtype=dtype) if "bias" in parts else None
    residual = torch.randn(rows, N, device=device, dtype=dtype) if "residual" in parts else None
    ref = exact_linear(x, w, norm, bias, residual, "gated" in parts)
    out = linear(x, w, norm, bias, residual, "gated" in parts)
    assert out.shape == ref.shape and out.dtype == dtype
    # At most the error of the plain twin, which rounds more often.
    assert error(out, ref) < max(1.1 * error(plain_linear(x, w, norm, bias, residual, "gated" in parts), ref), 3e-3)


CASES = [  # B, T, H, K, E, L, window, qk_norm
    (1, 1, 32, 32, 128, 230, 0, False), (2, 1, 9, 3, 64, 300, 0, False), (3, 5, 6, 2, 48, 700, 0, True),
    (1, 1, 32, 8, 128, 9000, 0, False), (2, 3, 8, 8, 64, 3000, 777, False), (4, 16, 16, 2, 128, 600, 0, True),
    (1, 2, 4, 1, 80, 5000, 4096, False), (2, 300, 6, 2, 64, 500, 0, False), (1, 400, 32, 8, 128, 900, 256, True)]


def inputs(B, T, H, K, E, L, window, qk_norm, device, dtype):
    def randn(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    start = torch.randint(0, L - T + 1, (B, 1), device=device)
    start[0] = L - T if B == 1 else 0  # a full cache, an empty one, and any between
    angle = torch.outer(torch.arange(L), 1e4 ** -(torch.arange(0, E, 2) / E)).repeat(1, 2).to(device)
    norms = (randn(E).abs() + 0.5, randn(E).abs() + 0.5) if qk_norm else (None, None)
    return (randn(B, T, H + 2 * K, E), start + torch.arange(T, device=device), angle.cos(), angle.sin(),
            randn(B, K, L, E), randn(B, K, L, E), *norms)


def exact_update(qkv, positions, cos, sin, k_cache, v_cache, q_norm, k_norm, window):
    """Sequence by sequence and token by token in float64 -> the output, and the caches afterwards."""
    B, T, heads, E = qkv.shape
    K = k_cache.shape[1]
    H, G = heads - 2 * K, heads // K - 2
    k_cache, v_cache, out = k_cache.double(), v_cache.double(), torch.zeros(B, T, H, E, dtype=torch.float64)

    def rotate(x, norm, at):
        x = x.double() if norm is None else F.rms_norm(x.double(), (E,), norm.double(), 1e-5)
        return x * cos[at].double() + torch.cat((-x[..., E // 2:], x[..., :E // 2]), -1) * sin[at].double()

    for b in range(B):
        for t, at in enumerate(positions[b].tolist()):
            k_cache[b, :, at] = rotate(qkv[b, t, H:H + K], k_norm, at)
            v_cache[b, :, at] = qkv[b, t, H + K:]
            first = max(0, at + 1 - window) if window else 0
            q = rotate(qkv[b, t, :H], q_norm, at).view(K, G, E)
            scores = q @ k_cache[b, :, first:at + 1].mT / E ** 0.5
            out[b, t] = (scores.softmax(-1) @ v_cache[b, :, first:at + 1]).view(H, E).cpu()
    return out, k_cache, v_cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_update_and_attend(device, case):
    """Ragged sequences, GQA of any ratio, windows; one split and many. The second launch finds used semaphores."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv, positions, cos, sin, k_cache, v_cache, q_norm, k_norm = inputs(*case, device, dtype)
    ref, k_ref, v_ref = exact_update(qkv, positions, cos, sin, k_cache, v_cache, q_norm, k_norm, case[6])
    semaphore = torch.zeros(case[0] * case[3], dtype=torch.int32, device=device)
    for _ in range(2):
        out = update_and_attend(qkv, positions, cos, sin, k_cache, v_cache, semaphore, q_norm, k_norm, case[6])
        assert error(out.cpu(), ref) < (5e-3 if device == "cuda" else 1e-5)
        assert error(k_cache, k_ref) < (4e-3 if device == "cuda" else 1e-6) and v_cache.double().equal(v_ref)
        assert not semaphore.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [3, 50])
def test_update_and_attend_of_shared_positions_in_a_larger_cache(device, T):
    """As in prefill: all prompts share one row of positions, and the cache has more rows, for each prompt's samples."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv, positions, cos, sin, k_cache, v_cache, *_ = inputs(4, T, 4, 2, 64, 200, 0, False, device, dtype)
    positions[:] = torch.arange(90, 90 + T, device=device)
    k_ref, v_ref, semaphore = k_cache.clone(), v_cache.clone(), torch.zeros(8, dtype=torch.int32, device=device)
    ref = plain_update_and_attend(qkv[:2], positions[:2], cos, sin, k_ref, v_ref, semaphore)
    out = update_and_attend(qkv[:2], positions[:1], cos, sin, k_cache, v_cache, semaphore)
    assert error(out, ref) < (1e-2 if device == "cuda" else 1e-6) and v_cache.equal(v_ref)
    assert error(k_cache, k_ref) < 1e-2 and k_cache[2:].equal(k_ref[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("K", [72, 4096, 8192])
def test_rms_norm(K):
    x, weight = torch.randn(5, K, device="cuda").bfloat16(), torch.rand(K, device="cuda").bfloat16() + 0.5
    assert error(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (K,), weight.double(), 1e-5)) < 3e-3


@pytest.mark.gpu
def test_every_output_is_written():
    """The kernels' outputs come from torch.empty, so the memory that it will hand out is filled with NaN first."""
    x, w = torch.randn(3, 200, device="cuda").half(), torch.randn(331, 200, device="cuda").half()
    for rows in (1, 3):
        torch.full((64, 1024, 1024), torch.nan, device="cuda")  # freed at once
        assert linear(x[:rows], w).isfinite().all()


COMPILE_FOR_8 = """
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

import fast.attention
import fast.linear
import fast.packed_linear
import fast.sampling
from quantize import CODES, E4M3, QuantizedLinear, pack

pretended = SimpleNamespace(name="8.0", major=8, multi_processor_count=108, shared_memory_per_block_optin=101376,
                            regs_per_multiprocessor=65536)
for name, module in list(sys.modules.items()):
    if name.startswith("fast.") and hasattr(module, "gpu"):
        module.gpu = lambda device: pretended

compile, targets = triton.compile, []

def compile_for_8(src, target=None, options=None, **more):
    few = {key: options[key] for key in ("num_warps", "num_stages", "maxnreg") if key in options}
    targets.append(compile(src, target=GPUTarget("cuda", 80, 32), options=few, **more))
    assert targets[-1].metadata.shared <= 101376
    return compile(src, target=target, options=options, **more)

triton.runtime.jit.JITFunction.compile = property(lambda self: compile_for_8, lambda self, value: None)
bf16 = dict(device="cuda", dtype=torch.bfloat16)

for rows in (1, 16):
    ones = torch.ones(4096, **bf16)
    fast.linear.linear(torch.randn(rows, 4096, **bf16), torch.randn(8192, 4096, **bf16), ones, gated=True)
    for K in (14336, 28672, 49152):
        fast.linear.linear(torch.randn(rows, K, **bf16), torch.randn(64, K, **bf16))

for bits, C, rows, N in ((4, 32, 1, 8192), (4, 128, 1, 8192), (8, 1, 1, 8192), (4, 32, 8, 8192), (4, 32, 16, 8192),
                         (8, 1, 8, 1024), (8, 1, 16, 1024), (8, 1, 100, 8192), (4, 32, 100, 1024),
                         (4, 128, 100, 1024)):  # N = 1024: programs share a tile's K
    codes = torch.randint(2 ** bits, (N, 4096), device="cuda")
    layer = QuantizedLinear(pack(codes, bits), torch.ones(N, C, device="cuda").half(), None, CODES[f"int{bits}"])
    packed = fast.packed_linear.PackedLinear(layer, gated=True)
    packed.fused(torch.randn(rows, 4096, **bf16), ones, gated=True)

for C, rows in ((1, 1), (32, 1), (1, 16), (32, 16), (32, 100), (128, 100), (32, 600)):  # FP8, its codes below NaN's
    words, scales = torch.randint(0x77777777, (1024, 1024), device="cuda").int(), torch.ones(1024, C, device="cuda")
    layer = QuantizedLinear(words & 0x77777777, scales, None, E4M3)
    packed = fast.packed_linear.PackedLinear(layer, gated=True)
    packed.fused(torch.randn(rows, 4096, **bf16), ones, gated=True)

cache, table = torch.randn(1, 8, 512, 128, **bf16), torch.randn(512, 128, device="cuda")
semaphore = torch.zeros(8, dtype=torch.int32, device="cuda")
for positions in (torch.full((1, 1), 300, device="cuda"), torch.arange(100, device="cuda")[None]):
    qkv = torch.randn(1, positions.shape[1], 48, 128, **bf16)
    fast.attention.update_and_attend(qkv, positions, table, table, cache, cache.clone(), semaphore)

logits, noise = torch.randn(1, 5000, **bf16), torch.ones(1, 5000, device="cuda")
fast.sampling.sample(logits, noise, 0.8, 50)
fast.sampling.distribute(logits, noise, 0.8, 50, 0.9)
torch.cuda.synchronize()
assert len(targets) >= 15, len(targets)
"""


@pytest.mark.gpu
def test_kernels_compile_for_compute_capability_8():
    """In a process that takes the GPU for one of 8.0: no programmatic dependent launch, less shared memory."""
    subprocess.run([sys.executable, "-c", COMPILE_FOR_8], check=True, timeout=300)


@pytest.mark.gpu
def test_the_timed_read_reads_every_word():
    chunk, data = 2 ** 16, torch.randint(-2 ** 62, 2 ** 62, (3 * 2 ** 13,), device="cuda")
    sums, addresses = torch.full((3,), -1, device="cuda"), data.data_ptr() + chunk * torch.arange(3, device="cuda")
    read_chunk[(3,)](addresses, sums, chunk, 4096, num_warps=8)
    assert sums.equal(data.view(3, -1).sum(1))


@pytest.mark.gpu
def test_read_bandwidth_is_that_of_a_gpu():
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(8)))
    assert 2e11 < read_bandwidth(model) < 2e13

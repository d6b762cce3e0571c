"""The kernels for compute capability 8.0 and 8.9, on a GPU of 9.0 that is taken for one of 8.0:

    python tests/programs/compile_for_8.py

There is no programmatic dependent launch, and less shared memory. What a kernel is compiled for on
this GPU, and run with, is compiled for 8.0 as well."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[2]))

import fast.attention
import fast.experts
import fast.latent
import fast.linear
import fast.packed_few
import fast.packed_linear
import fast.sampling
from quantize import CODES, E4M3, MXFP4, QuantizedExperts, QuantizedLinear, pack

pretended = SimpleNamespace(
    name="8.0",
    major=8,
    multi_processor_count=108,
    shared_memory_per_block_optin=101376,
    regs_per_multiprocessor=65536,
)
for name, module in list(sys.modules.items()):
    if name.startswith("fast.") and hasattr(module, "gpu"):
        module.gpu = lambda device: pretended

compile, targets = triton.compile, []


def compile_for_8(src, target=None, options=None, **more):
    few = {key: options[key] for key in ("num_warps", "num_stages", "maxnreg") if key in options}
    targets.append(compile(src, target=GPUTarget("cuda", 80, 32), options=few, **more))
    assert targets[-1].metadata.shared <= 101376
    return compile(src, target=target, options=options, **more)


fast.packed_linear.takes_few = lambda *_: False  # this GPU has it, and one of 8.9 not always
triton.runtime.jit.JITFunction.compile = property(
    lambda self: compile_for_8, lambda self, value: None
)
bf16 = dict(device="cuda", dtype=torch.bfloat16)

for rows in (1, 16):
    ones = torch.ones(4096, **bf16)
    fast.linear.linear(
        torch.randn(rows, 4096, **bf16), torch.randn(8192, 4096, **bf16), ones, gated=True
    )
    for K in (14336, 28672, 49152):
        fast.linear.linear(torch.randn(rows, K, **bf16), torch.randn(64, K, **bf16))

for bits, C, rows, N in (
    (4, 32, 1, 8192),
    (4, 128, 1, 8192),
    (8, 1, 1, 8192),
    (4, 32, 8, 8192),
    (4, 32, 16, 8192),
    (8, 1, 8, 1024),
    (8, 1, 16, 1024),
    (8, 1, 100, 8192),
    (4, 32, 100, 1024),
    (4, 128, 100, 1024),
):  # N = 1024: programs share a tile's K
    codes = torch.randint(2**bits, (N, 4096), device="cuda")
    layer = QuantizedLinear(
        pack(codes, bits), torch.ones(N, C, device="cuda").half(), None, CODES[f"int{bits}"]
    )
    packed = fast.packed_linear.PackedLinear(layer, gated=True)
    packed.fused(torch.randn(rows, 4096, **bf16), ones, gated=True)

for C, rows in (
    (1, 1),
    (32, 1),
    (1, 16),
    (32, 16),
    (32, 100),
    (128, 100),
    (32, 600),
):  # FP8, its codes below NaN's
    words, scales = (
        torch.randint(0x77777777, (1024, 1024), device="cuda").int(),
        torch.ones(1024, C, device="cuda"),
    )
    layer = QuantizedLinear(words & 0x77777777, scales, None, E4M3)
    packed = fast.packed_linear.PackedLinear(layer, gated=True)
    packed.fused(torch.randn(rows, 4096, **bf16), ones, gated=True)

gemv, nvrtc = fast.packed_gemv, fast.nvrtc
for kind, C, experts in (
    ("int4", 32, None),
    ("int8", 1, gemv.Experts(ones[:5], None)),
    ("fp8", 32, None),
    ("mxfp4", 128, gemv.Experts(ones[:5], None)),
):
    scales = (torch.rand if kind == "int4" else torch.ones)(
        16, C
    )  # ones: rows share them, which few.cu does not take
    scales = scales.to(torch.uint8 if kind == "mxfp4" else torch.float32)
    w = fast.layout.pack(torch.zeros(16, 4096, dtype=torch.uint8), scales, kind=kind)
    macros = (
        gemv.macros_for(ones, w, ones, None, None, experts) | gemv.sizes_for(w, 101376, experts)[0]
    )
    compiled = [("gemv", macros)]
    if kind == "int4":
        compiled.append(("few", macros | fast.packed_few.few_sizes(w, 166912, (1,))[0]))
    for name, defined in compiled:
        for capability in 80, 89:
            nvrtc.compile_cuda(gemv.source_of(name), nvrtc.options_for(capability, defined))

active, zeros = torch.tensor([2, 0, 3], device="cuda").int(), torch.zeros(99, device="cuda").int()
for rows in (1, 16, 64):
    x, shares = torch.randn(rows, 1024, **bf16), torch.ones(rows, 4, device="cuda")
    codes = torch.randint(2**31 - 1, (4, 512, 128), device="cuda").int()
    scales = torch.full((4, 512, 32), 120, device="cuda").to(torch.uint8)
    of = fast.experts.PackedExperts(QuantizedExperts(codes, scales, None, MXFP4), 1)
    for w in gemv.Plain(torch.randn(4, 512, 1024, **bf16), 1), of.packed:
        fast.experts.expert_linear(x, gemv.Experts(active, shares), w, zeros)
    router = fast.experts.Router(torch.randn(4, 1024, **bf16), None, 2, True)
    fast.experts.route(x, None, 0.0, router, zeros[:1])

cache, table = torch.randn(1, 8, 512, 128, **bf16), torch.randn(512, 128, device="cuda")
semaphore = torch.zeros(8, dtype=torch.int32, device="cuda")
position = torch.full((1, 1), 300, device="cuda")
fast.attention.update_and_attend(
    torch.randn(1, 1, 48, 128, **bf16),
    position,
    table,
    table,
    cache,
    cache.clone(),
    None,
    None,
    semaphore,
)
cache = torch.randn(1, 2, 512, 512, **bf16)
table = torch.randn(512, 512, device="cuda")
for T in (1, 4):  # heads of 512; latent attention
    positions = position + torch.arange(T, device="cuda")
    fast.attention.update_and_attend(
        torch.randn(1, T, 20, 512, **bf16),
        positions,
        table,
        table,
        cache,
        cache.clone(),
        None,
        None,
        semaphore,
    )
    fast.latent.latent_attend(
        torch.randn(T, 20 * 256, **bf16),
        torch.randn(T, 576, **bf16),
        positions,
        table[:, :64].contiguous(),
        table[:, :64].contiguous(),
        torch.ones(512, **bf16),
        1e-6,
        torch.randn(20 * 448, 512, **bf16),
        torch.randn(1, 1, 512, 64, **bf16),
        torch.randn(1, 1, 512, 512, **bf16),
        None,
        None,
        20,
        192,
        True,
        0.1,
        0,
    )
fast.attention.attend(
    torch.randn(1, 70, 16, 512, **bf16),
    torch.arange(70, device="cuda")[None],
    cache,
    cache.clone(),
    None,
    None,
    0,
)

cache = torch.randn(1, 8, 512, 128, **bf16)
for T in (2, 100):
    positions = torch.arange(T, device="cuda")[None]
    fast.attention.attend(
        torch.randn(1, T, 32, 128, **bf16), positions, cache, cache.clone(), None, None, 0
    )

logits, noise = torch.randn(1, 5000, **bf16), torch.ones(1, 5000, device="cuda")
settings = torch.tensor([0.8, 50, 0.9, 0.1], device="cuda")  # temperature, top-k, top-p, min-p
fast.sampling.sample(logits, noise, settings)
fast.sampling.distribute(logits, noise, settings)
torch.cuda.synchronize()
assert len(targets) >= 15, len(targets)

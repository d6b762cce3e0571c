"""Packed weights: the packing, and each kernel against its twin and float64."""
import pytest
import torch

from fast.cpu import ByteLinear
from fast.packed import KernelLinear, tile, untile
from quantize import PackedLinear, pack, unpack
from test_kernels import error, exact_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [  # N, K, bits, groups of a row, zero points, act-order, what else there is
    (1536, 576, 4, 9, True, False, "norm bias"), (2 * 37, 288, 4, 9, True, True, "norm gated"),
    (35, 96, 4, 1, False, False, "residual"), (100, 640, 8, 1, False, False, "norm gated"),
    (561, 512, 8, 16, True, True, "bias residual"), (48, 1024, 8, 8, True, False, "norm"),
    (80, 256, 4, 4, True, False, "norm bias"),
    (48, 192, 4, 2, False, False, "residual"), (48, 64, 4, 1, True, False, ""),
    (40, 32, 8, 1, True, False, "norm bias")]
LARGE = [(4096, 11008, 4, 86, False, False, "residual"), (22016, 4096, 4, 32, True, False, "norm gated"),
         (6144, 4096, 4, 128, True, True, "norm bias"), (4096, 14336, 8, 1, False, False, "residual"),
         (28672, 4096, 8, 32, True, False, "norm gated"), (520, 28672, 4, 224, True, False, "bias")]


def random_packed(N, K, bits, C, zeros, order, dtype, device, bias=False):
    codes = torch.randint(2 ** bits, (N, K), device=device)
    scales = (torch.rand(N, C, device=device) + 0.5) / K ** 0.5 / 2 ** (bits - 2)
    points = torch.randint(1, 2 ** bits, (N, C), device=device) if zeros else None
    return PackedLinear(codes, scales, points, bits, torch.randn(N, device=device, dtype=dtype) if bias else None,
                        torch.randperm(K, device=device) if order else None)


def plain_weights(codes, scales, zeros, bits):
    """Element by element, from the definition."""
    N, K = codes.shape
    group = torch.arange(K) * scales.shape[1] // K
    zero = zeros[:, group] if zeros is not None else 2 ** (bits - 1)
    return (codes - zero) * scales.half().double()[:, group]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("K", [32, 288, 576, 1000])
def test_packing(bits, K):
    """Each code where the docstring says, and all of them back."""
    codes = torch.randint(2 ** bits, (5, K))
    words, P = pack(codes, bits), 16 // bits
    assert unpack(words, bits, K).equal(codes.int()) and unpack(words, bits, K).dtype == torch.int32
    for k in torch.randint(K, (50,)).tolist():
        block, (c, s, t, e) = k // (32 * P), (k // (8 * P) % 4, k // 8 % P, k // 2 % 4, k % 2)
        shift = 4 * s + 16 * e if bits == 4 else 16 * s + 8 * e
        assert (words[:, 16 * block + 4 * t + c] >> shift & 2 ** bits - 1).equal(codes[:, k].int())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_without_outputs_gives_none(bits):
    """As a rank has it of a small head."""
    layer = PackedLinear(torch.zeros(0, 576, dtype=torch.uint8), torch.zeros(0, 9), None, bits)
    assert layer.dequantize(torch.float32).shape == (0, 576) and layer(torch.randn(3, 576)).shape == (3, 0)


@pytest.mark.parametrize("gated, N", [(False, 48), (False, 35), (True, 64), (True, 74)])
def test_tiles(gated, N):
    rows = torch.randint(1000, (N, 96), dtype=torch.int32)
    tiles = tile(rows, 16, gated)
    assert untile(tiles, N, gated).equal(rows)
    assert tiles[1, 2, 3].equal(rows[8 + 3 if gated else 16 + 3, 32:48])


@pytest.mark.parametrize("bits, C, zeros", [(4, 9, True), (4, 1, False), (8, 1, False), (8, 9, True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_linear_is_its_weights(bits, C, zeros, compiled):
    """The plain layer, and the one that takes its place on a CPU, compiled, where one row goes another way."""
    codes, scales = torch.randint(2 ** bits, (40, 576)), torch.rand(40, C)
    points = torch.randint(2 ** bits, (40, C)) if zeros else None
    order, bias = torch.randperm(576), torch.randn(40)
    layer = PackedLinear(codes, scales, points, bits, bias, order)
    w = plain_weights(codes, scales, points, bits)
    run = layer
    if compiled:
        run = ByteLinear(layer)
        run.decodes = True
        run = torch.compile(run, fullgraph=True, dynamic=False)
    for rows in (1, 3, 16, 17):
        x = torch.randn(rows, 576)
        with torch.no_grad():
            assert error(run(x), x.double()[:, order] @ w.T + bias) < 1e-6


@pytest.mark.parametrize("device, dtype, shape", [
    *(("cpu", torch.float32, shape) for shape in SHAPES),
    *(pytest.param("cuda", dtype, shape, marks=pytest.mark.gpu)
      for dtype in (torch.bfloat16, torch.float16) for shape in SHAPES + LARGE)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40, 128, 200, 520])  # 520: the library's
def test_packed_kernels(device, dtype, rows, shape):
    """int4 and int8 products equal float64's with the same dequantized weights; x spans six orders of magnitude."""
    N, K, bits, C, zeros, order, parts = shape
    packed = random_packed(N, K, bits, C, zeros, order, dtype, device, "bias" in parts)
    w = packed.dequantize(torch.float64)
    x = (torch.randn(rows, K, device=device) * 10 ** torch.empty(rows, 1, device=device).uniform_(-3, 3)).to(dtype)
    norm = torch.rand(K, device=device, dtype=dtype) + 0.5 if "norm" in parts else None
    residual = torch.randn(rows, N, device=device, dtype=dtype) if "residual" in parts else None
    moved = x if packed.order is None else x[:, packed.order]
    moved_norm = norm if packed.order is None or norm is None else norm[packed.order]
    gated = "gated" in parts
    ref = exact_linear(moved, w, moved_norm, packed.bias, residual, gated)
    layer = KernelLinear(packed, gated)
    if device == "cuda":
        torch.full((64, 1024, 1024), torch.nan, device="cuda")  # what torch.empty will hand out
    out = layer.fused(x, norm, residual, gated)
    assert out.shape == ref.shape and out.dtype == dtype
    for one, exact in zip(out, ref):
        # gated, two products' errors meet; where the library multiplies, PyTorch rounds in between, too
        assert error(one, exact) < (1e-5 if device == "cpu" else 1.5e-2 if gated else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2 * 1037, 2944, 4, 23, True, False, True), (563, 1760, 4, 55, True, True, False),
                                   (520, 28672, 4, 224, True, True, False), (1040, 1984, 8, 1, False, False, False),
                                   (17350, 640, 4, 5, True, False, True), (17001, 640, 8, 5, True, True, False)],
                         ids=str)  # the last two: whole tiles first
@pytest.mark.parametrize("choice, rows", [
    *((["rows", *sizes, scaled], rows) for scaled in (0, 1) for sizes, rows in [
        ((16, 64, 16, 2, 8, 0, 3), 5), ((16, 64, 2, 4, 2, 8, 3), 3), ((16, 64, 4, 5, 4, 8, 2), 11),
        ((32, 64, 2, 4, 2, 12, 4), 8), ((32, 64, 4, 3, 4, 3, 2), 7), ((32, 64, 4, 4, 4, 5, 4), 20),
        ((32, 64, 4, 3, 4, 0, 2), 200), ((64, 64, 1, 4, 4, 3, 8), 150),
        ((128, 64, 1, 3, 8, 2, 2), 256), ((128, 64, 1, 4, 4, 2, 6), 33), ((256, 64, 1, 3, 8, 2, 3), 129),
        ((64, 128, 1, 3, 4, 3, 4), 128), ((128, 128, 1, 3, 4, 2, 1), 70), ((128, 128, 1, 3, 8, 1, 3), 385),
        ((256, 128, 1, 3, 8, 0, 2), 100), ((128, 256, 1, 3, 8, 1, 2), 500), ((256, 64, 1, 3, 8, 2, 1), 512)]),
    *((["row", *sizes], 1) for sizes in [(4, 2, 3, 6, 2), (4, 4, 2, 1, 8), (4, 4, 2, 1, 2), (8, 2, 4, 12, 3),
                                         (16, 2, 3, 2, 5)])], ids=str)
def test_slices_of_k(monkeypatch, choice, rows, shape):
    """Programs that share a tile's K, more of them than K has blocks too: right, the same each time, ready for more."""
    *shape, gated = shape
    layer = KernelLinear(random_packed(*shape, torch.bfloat16, "cuda", bias=not gated), gated)
    N, K, *_ = shape
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    residual = None if gated else torch.randn(rows, N, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr("fast.packed.tuned", lambda *_: ["library"])
    ref = layer.fused(x, residual=residual, gated=gated)
    monkeypatch.setattr("fast.packed.tuned", lambda *_: choice)
    torch.full((64, 1024, 1024), torch.nan, device="cuda")  # what torch.empty will hand out
    outs = [layer.fused(x, residual=residual, gated=gated) for _ in range(3)]
    assert error(outs[0], ref) < (1.5e-2 if gated else 5e-3) and not layer.arrived.any()
    assert outs[0].equal(outs[1]) and outs[0].equal(outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("waves", [1, 2])
def test_tiles_that_fill_the_gpu_exactly(monkeypatch, waves):
    """None is left to be sliced."""
    N = 64 * 3 * waves * torch.cuda.get_device_properties("cuda").multi_processor_count
    layer = KernelLinear(random_packed(N, 640, 4, 5, True, False, torch.bfloat16, "cuda"))
    x = torch.randn(20, 640, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr("fast.packed.tuned", lambda *_: ["library"])
    ref = layer.fused(x)
    monkeypatch.setattr("fast.packed.tuned", lambda *_: ["rows", 64, 64, 1, 3, 4, 3, 4, 0])
    assert error(layer.fused(x), ref) < 5e-3 and not layer.arrived.any()


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_linear_in_a_model(device):
    """[B, T, K] in, as in prefill."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    packed = random_packed(64, 96, 4, 3, True, True, dtype, device)
    x = torch.randn(2, 5, 96, device=device, dtype=dtype)
    ref = packed(x)
    assert error(KernelLinear(packed)(x), ref) < (1e-6 if device == "cpu" else 5e-3)

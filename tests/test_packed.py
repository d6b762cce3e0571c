"""Quantized layers of the speed layer: the layout, the CPU's layer, each kernel against its twin and float64."""
import pytest
import torch

from fast.cpu import CpuQuantizedLinear
from fast.layout import (E4M3_SCALE, block_size, from_mma_order, group_inputs, pack_scales, tile, to_mma_order,
                         unpack_scales, untile)
from fast.packed_linear import PackedLinear, plain_packed_linear
from quantize import CODES, E4M3, QuantizedLinear, pack, say_once
from helpers import error, exact_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [  # N, K, bits, groups of a row, zero points, act-order, what else there is: "wide" for fp32 scales, "e4m3",
    # "shared" where 8 rows have the same scales
    (1536, 576, 4, 9, True, False, "norm bias"), (2 * 37, 288, 4, 9, True, True, "norm gated"),
    (35, 96, 4, 1, False, False, "residual"), (100, 640, 8, 1, False, False, "norm gated"),
    (561, 512, 8, 16, True, True, "bias residual"), (48, 1024, 8, 8, True, False, "norm"),
    (80, 256, 4, 4, True, False, "norm bias"),
    (48, 192, 4, 2, False, False, "residual"), (48, 64, 4, 1, True, False, ""),
    (40, 32, 8, 1, True, False, "norm bias"),
    (100, 640, 8, 1, False, False, "norm gated e4m3"), (561, 512, 8, 16, False, True, "bias residual e4m3"),
    (48, 1024, 8, 8, False, False, "norm e4m3"), (35, 288, 8, 9, False, False, "residual e4m3"),
    (48, 192, 4, 2, False, False, "residual wide"), (74, 288, 4, 9, False, True, "norm gated wide"),
    (80, 256, 8, 2, False, False, "bias wide"), (40, 640, 8, 1, False, False, "norm wide"),
    (40, 704, 8, 1, False, False, "norm"), (35, 288, 8, 1, False, False, "residual e4m3"),
    (144, 384, 8, 3, False, False, "norm gated e4m3 shared"), (200, 1408, 8, 11, False, False, "residual e4m3 shared"),
    (56, 640, 8, 10, False, True, "bias e4m3 shared"), (768, 192, 4, 6, False, False, "norm wide shared")]
LARGE = [(4096, 11008, 4, 86, False, False, "residual"), (22016, 4096, 4, 32, True, False, "norm gated"),
         (6144, 4096, 4, 128, True, True, "norm bias"), (4096, 14336, 8, 1, False, False, "residual"),
         (28672, 4096, 8, 32, True, False, "norm gated"), (520, 28672, 4, 224, True, False, "bias"),
         (4096, 11008, 8, 86, False, False, "residual e4m3"), (22016, 4096, 8, 32, False, False, "norm gated e4m3"),
         (6144, 4096, 8, 1, False, False, "norm e4m3"), (4096, 11008, 4, 86, False, False, "residual wide"),
         (4096, 11008, 8, 86, False, False, "residual e4m3 shared")]


def random_layer(N, K, bits, C, zeros, act_order, dtype, device, parts=""):
    codes = torch.randint(2 ** bits, (N, K), device=device)
    e4m3 = "e4m3" in parts
    codes -= (codes % 128 == 127).long() * e4m3  # NaN
    scales = (torch.rand(N, C, device=device) + 0.5) / K ** 0.5 / (256 if e4m3 else 2 ** (bits - 2))
    scales = scales if e4m3 or "wide" in parts else scales.half()
    scales = scales[torch.arange(N, device=device) // 8 * 8] if "shared" in parts else scales
    points = torch.randint(1, 2 ** bits, (N, C), device=device) if zeros else None
    bias = torch.randn(N, device=device, dtype=dtype) if "bias" in parts else None
    g_idx = torch.randperm(K, device=device) // (K // C) if act_order else None
    return QuantizedLinear(pack(codes, bits), scales, points, E4M3 if e4m3 else CODES[f"int{bits}"], bias, g_idx)


@pytest.mark.parametrize("bits, e4m3", [(4, False), (8, False), (8, True)])
@pytest.mark.parametrize("K", [32, 288, 576, 1000])
def test_each_code_lies_where_the_drawing_has_it(bits, e4m3, K):
    codes = torch.randint(2 ** bits, (5, K), dtype=torch.uint8)
    words, P = to_mma_order(codes, bits, e4m3), 16 // bits
    assert words.dtype == torch.int32 and words.shape == (5, 16 * -(-K // block_size(bits)))
    assert from_mma_order(words, bits, K, e4m3).equal(codes)
    for k in torch.randint(K, (50,)).tolist():
        block, (c, s, t, e) = k // (32 * P), (k // (8 * P) % 4, k // 8 % P, k // 2 % 4, k % 2)
        word = words[:, 16 * block + 4 * t + c]
        if e4m3:  # each half of the word, shifted by s, has the bits of fp16 that make 2^-8 times the number
            half = (word >> 16 * e << (7 * s) & 0x3F80 | word >> 16 * e << s & 0x8000).to(torch.int16)
            numbers = codes[:, k].view(torch.float8_e4m3fn).float()
            got = half.view(torch.float16).float() * 256
            assert got.where(numbers.isfinite(), 0).equal(numbers.where(numbers.isfinite(), 0))
        else:
            shift = 4 * s + 16 * e if bits == 4 else 16 * s + 8 * e
            assert (word >> shift & 2 ** bits - 1).equal(codes[:, k].int())


@pytest.mark.parametrize("gated, N", [(False, 48), (False, 35), (True, 64), (True, 74)])
def test_tiles(gated, N):
    rows = torch.randint(1000, (N, 96), dtype=torch.int32)
    tiles = tile(rows, 16, gated)
    assert untile(tiles, N, gated).equal(rows)
    assert tiles[1, 2, 3].equal(rows[8 + 3 if gated else 16 + 3, 32:48])


@pytest.mark.parametrize("zeros", [True, False])
def test_scales_and_zeros_come_back(zeros):
    scales, points = torch.randn(35, 5).half(), torch.randint(256, (35, 5)) if zeros else None
    packed = pack_scales(scales, points, 8, 2, False)  # 5 groups in blocks of 2: the last block is half full
    assert packed.shape == (3, 3, 16, 2)
    got = unpack_scales(packed, 35, 5, 8, False)
    assert got[0].equal(scales.float()) and got[1].equal(points.int() if zeros else torch.full((35, 5), 128).int())


@pytest.mark.parametrize("N, gated", [(40, False), (80, True)])
def test_scales_that_rows_share_stand_there_once(N, gated):
    scales = torch.rand(N // 8, 5).repeat_interleave(8, 0)
    packed = pack_scales(scales, None, 8, 2, gated)
    assert packed.shape == ((N + 15) // 16, 3, 2, 2)
    assert unpack_scales(packed, N, 5, 8, gated)[0].equal(scales)
    scales[N - 1, 4] += 1
    packed = pack_scales(scales, None, 8, 2, gated)
    assert packed.shape == ((N + 15) // 16, 3, 16, 2)
    assert unpack_scales(packed, N, 5, 8, gated)[0].equal(scales)


def regrouped_weights(layer):
    """What group_inputs() gives for a layer, as weights [N, K] in the layer's order; what is filled in must be 0."""
    codes, scales, zeros, perm = group_inputs(layer)
    assert codes.dtype == torch.uint8 and codes.shape[1] % scales.shape[1] == 0
    zeros = torch.full_like(scales, layer.codes.zero) if zeros is None else zeros
    w = (codes.double().unflatten(1, (scales.shape[1], -1)) - zeros[:, :, None]) * scales.double()[:, :, None]
    if perm is None:
        return w.flatten(1)
    return torch.zeros(len(codes), layer.in_features).double().index_add(1, perm, w.flatten(1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
def test_inputs_of_a_group_come_side_by_side(bits, zeros):
    plain, act_order = (random_layer(6, 96, bits, 3, zeros, ordered, None, "cpu") for ordered in (False, True))
    assert group_inputs(plain)[3] is None and group_inputs(act_order)[0].shape == (6, 96)
    assert group_inputs(act_order)[3].sort().values.equal(torch.arange(96))
    for layer in plain, act_order:
        assert regrouped_weights(layer).equal(layer.dequantize(torch.float64))
    in_order = QuantizedLinear(plain.qweight, plain.scales, plain.zeros, plain.codes, None, torch.arange(96) // 32)
    assert group_inputs(in_order)[3] is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
def test_filled_groups_give_the_same_weights(bits, zeros):
    """A rank's slice of an act-order layer: groups differ in size, and of group 1 no input is here."""
    for K, C in [(96, 3), (64, 5), (40, 2), (32, 9), (8, 3)]:
        g_idx = torch.randint(C, (K,))
        g_idx[g_idx == 1] = 0
        codes = torch.randint(2 ** bits, (6, K))
        points = torch.randint(2 ** bits, (6, C)) if zeros else None
        layer = QuantizedLinear(pack(codes, bits), torch.rand(6, C).half(), points, CODES[f"int{bits}"], None, g_idx)
        regrouped, scales, _, perm = group_inputs(layer)
        assert len(g_idx.unique()) == 1 or regrouped.shape[1] == len(perm) == 32 * scales.shape[1] < K + 32 * C
        assert regrouped_weights(layer).equal(layer.dequantize(torch.float64))
        x = torch.randn(3, K, dtype=torch.float64)
        torch.testing.assert_close(PackedLinear(layer)(x), layer(x))
        torch.testing.assert_close(CpuQuantizedLinear(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("e4m3", [True, False])
def test_fp32_scales_take_the_whole_word(bits, e4m3):
    """And come back as they were; e4m3's codes come as PyTorch reads them."""
    parts = "e4m3" if e4m3 and bits == 8 else "wide"
    layer = random_layer(35, 96, bits, 3, False, False, None, "cpu", parts)
    packed = PackedLinear(layer)
    assert packed.scales_and_zeros.dtype == torch.float32 and packed.e4m3 == (layer.codes == E4M3)
    assert unpack_scales(packed.scales_and_zeros, 35, 3, bits, False)[0].equal(
        layer.scales * (E4M3_SCALE if layer.codes == E4M3 else 1))
    if layer.codes == E4M3:
        numbers = layer.qweight.view(torch.uint8).view(torch.float8_e4m3fn).float()
        assert layer.dequantize(torch.float32).equal(numbers * layer.scales.repeat_interleave(32, 1))


def test_fp32_scales_beside_zero_points_are_rounded_and_a_line_says_so(capsys):
    say_once.cache_clear()
    layer = random_layer(35, 96, 4, 3, True, False, None, "cpu", "wide")
    x = torch.randn(3, 96)
    for _ in range(2):
        assert 0 < error(PackedLinear(layer)(x), layer(x)) < 1e-3
    assert capsys.readouterr().err.count("rounded to fp16") == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_without_outputs_gives_none(bits):
    """As a rank has it of a small head."""
    words, scales = torch.zeros(0, 576 * bits // 32, dtype=torch.int32), torch.zeros(0, 9).half()
    layer = QuantizedLinear(words, scales, None, CODES[f"int{bits}"])
    for one in layer, PackedLinear(layer), CpuQuantizedLinear(layer):
        assert one(torch.randn(3, 576)).shape == (3, 0)


@pytest.mark.parametrize("bits, C, zeros, compiled, parts", [
    (4, 9, True, False, "bias"), (4, 1, False, False, "bias"), (8, 1, False, False, "bias"),
    (8, 9, True, False, "bias"), (4, 9, True, True, "bias"), (8, 1, False, True, "bias"),
    (8, 9, False, False, "bias e4m3"),
    (8, 9, False, True, "bias e4m3"), (8, 1, False, True, "bias e4m3"), (4, 9, False, True, "bias wide")])
def test_the_cpu_layer_is_its_weights(bits, C, zeros, compiled, parts):
    """Compiled, few rows go another way."""
    layer = random_layer(40, 576, bits, C, zeros, True, torch.float32, "cpu", parts)
    run = CpuQuantizedLinear(layer)
    if compiled:
        run.decodes = True
        run = torch.compile(run, fullgraph=True, dynamic=False)
    for rows in (16, 17) if compiled else (1, 3, 16, 17):  # each number is compiled anew
        x = torch.randn(rows, 576)
        with torch.no_grad():
            assert error(run(x), exact_linear(x, layer.dequantize(torch.float64), None, layer.bias, None, False)) < 1e-6


@pytest.mark.parametrize("device, dtype, shape", [
    *(("cpu", torch.float32, shape) for shape in SHAPES),
    *(pytest.param("cuda", dtype, shape, marks=pytest.mark.gpu)
      for dtype in (torch.bfloat16, torch.float16) for shape in SHAPES + LARGE)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40, 128, 200, 520])  # 520: the library's
def test_packed_kernels(device, dtype, rows, shape):
    """The products equal float64's with the same dequantized weights; x spans six orders of magnitude."""
    N, K, bits, C, zeros, act_order, parts = shape
    layer = random_layer(N, K, bits, C, zeros, act_order, dtype, device, parts)
    w = layer.dequantize(torch.float64)
    x = (torch.randn(rows, K, device=device) * 10 ** torch.empty(rows, 1, device=device).uniform_(-3, 3)).to(dtype)
    norm = torch.rand(K, device=device, dtype=dtype) + 0.5 if "norm" in parts else None
    residual = torch.randn(rows, N, device=device, dtype=dtype) if "residual" in parts else None
    gated = "gated" in parts
    ref = exact_linear(x, w, norm, layer.bias, residual, gated)
    packed = PackedLinear(layer, gated)
    if device == "cuda":
        torch.full((64, 1024, 1024), torch.nan, device="cuda")  # what torch.empty will hand out
    out = packed.fused(x, norm, residual, gated)
    twin = plain_packed_linear(x, packed.qweight, packed.scales_and_zeros, packed.perm, packed.shifts,
                               packed.semaphores, N, bits, packed.group_size, norm, layer.bias, residual, gated,
                               e4m3=packed.e4m3)
    assert out.shape == ref.shape and out.dtype == dtype
    floor = 1e-5 if device == "cpu" else 1.5e-2 if gated else 5e-3  # gated, the errors of two products meet
    for one, plain, exact in zip(out, twin, ref):
        # The twin rounds the normed x, the weights and the output to 16 bits, and so does the path of 520 rows. With 32
        # inputs in bf16, the worst of 520 rows is off by 5.4e-3 then (emulated; the median of 200 seeds).
        assert error(one, exact) < max(1.1 * error(plain, exact), floor)


def gemv(*sizes):
    return dict(zip("kernel warps depth stages programs slices".split(), ("gemv", *sizes)))


def gemm(*sizes):
    return dict(zip("kernel block_n block_m splits stages warps occupancy slices scaled".split(), ("gemm", *sizes)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2 * 1037, 2944, 4, 23, True, False, True), (563, 1760, 4, 55, True, True, False),
                                   (520, 28672, 4, 224, True, True, False), (1040, 1984, 8, 1, False, False, False),
                                   (17350, 640, 4, 5, True, False, True), (17001, 640, 8, 5, True, True, False)],
                         ids=str)  # the last two: whole tiles first
@pytest.mark.parametrize("choice, rows", [
    *((gemm(*sizes, scaled), rows) for scaled in (0, 1) for sizes, rows in [
        ((16, 64, 16, 2, 8, 0, 3), 5), ((16, 64, 2, 4, 2, 8, 3), 3), ((16, 64, 4, 5, 4, 8, 2), 11),
        ((32, 64, 2, 4, 2, 12, 4), 8), ((32, 64, 4, 3, 4, 3, 2), 7), ((32, 64, 4, 4, 4, 5, 4), 20),
        ((32, 64, 4, 3, 4, 0, 2), 200), ((64, 64, 1, 4, 4, 3, 8), 150),
        ((128, 64, 1, 3, 8, 2, 2), 256), ((128, 64, 1, 4, 4, 2, 6), 33), ((256, 64, 1, 3, 8, 2, 3), 129),
        ((64, 128, 1, 3, 4, 3, 4), 128), ((128, 128, 1, 3, 4, 2, 1), 70), ((128, 128, 1, 3, 8, 1, 3), 385),
        ((256, 128, 1, 3, 8, 0, 2), 100), ((128, 256, 1, 3, 8, 1, 2), 500), ((256, 64, 1, 3, 8, 2, 1), 512)]),
    *((gemv(*sizes), 1) for sizes in [(4, 2, 3, 6, 2), (4, 4, 2, 1, 8), (4, 4, 2, 1, 2), (8, 2, 4, 12, 3),
                                      (16, 2, 3, 2, 5)])], ids=str)
def test_slices_of_k(monkeypatch, choice, rows, shape):
    """Programs that share a tile's K, more of them than K has blocks too: right, the same each time, ready for more."""
    *shape, gated = shape
    layer = PackedLinear(random_layer(*shape, torch.bfloat16, "cuda", "" if gated else "bias"), gated)
    N, K, *_ = shape
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    residual = None if gated else torch.randn(rows, N, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr("fast.packed_linear.kernel_for", lambda *_: {"kernel": "library"})
    ref = layer.fused(x, residual=residual, gated=gated)
    monkeypatch.setattr("fast.packed_linear.kernel_for", lambda *_: choice)
    torch.full((64, 1024, 1024), torch.nan, device="cuda")  # what torch.empty will hand out
    outs = [layer.fused(x, residual=residual, gated=gated) for _ in range(3)]
    assert error(outs[0], ref) < (1.5e-2 if gated else 5e-3) and not layer.semaphores.any()
    assert outs[0].equal(outs[1]) and outs[0].equal(outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("waves", [1, 2])
def test_tiles_that_fill_the_gpu_exactly(monkeypatch, waves):
    """None is left to be sliced."""
    N = 64 * 3 * waves * torch.cuda.get_device_properties("cuda").multi_processor_count
    layer = PackedLinear(random_layer(N, 640, 4, 5, True, False, torch.bfloat16, "cuda"))
    x = torch.randn(20, 640, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr("fast.packed_linear.kernel_for", lambda *_: {"kernel": "library"})
    ref = layer.fused(x)
    monkeypatch.setattr("fast.packed_linear.kernel_for", lambda *_: gemm(64, 64, 1, 3, 4, 3, 4, 0))
    assert error(layer.fused(x), ref) < 5e-3 and not layer.semaphores.any()


@pytest.mark.parametrize("device", DEVICES)
def test_packed_linear_in_a_model(device):
    """[B, T, K] in, as in prefill."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = random_layer(64, 96, 4, 3, True, True, dtype, device)
    x = torch.randn(2, 5, 96, device=device, dtype=dtype)
    ref = layer(x)
    assert error(PackedLinear(layer)(x), ref) < (1e-6 if device == "cpu" else 5e-3)

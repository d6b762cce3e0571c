"""Quantized layers of the speed layer: the layout, the CPU's layer, the kernels and their twins.

All are compared with float64's products of the weights that quantize.py's plain layer has, right by
its goldens."""

import shutil
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fast import nvrtc, packed_few, packed_gemv, packed_linear
from fast.cpu import CpuQuantizedLinear
from fast.decoder import fusible
from fast.layout import KINDS, pack
from fast.packed_linear import PackedLinear, choice_for
from gemv_on_cpu import few_on_cpu, gemv_on_cpu
from helpers import ROOT, error, exact_linear, on_each_device, program, python
from quantize import CODES, QuantizedLinear, say_once
from quantize import pack as pack_codes

ROWS = [1, 3, 8, 16, 40, 128, 200, 520]  # of x; 520: the library's
# N, K, kind of codes, groups of a row, and what else there is: "zeros", "order" for act-order,
# "wide" for
SHAPES = [
    # fp32 scales, "shared" where 8 rows have the same scales, and what goes into the product
    (1536, 576, "int4", 9, "zeros norm bias"),
    (2 * 37, 288, "int4", 9, "zeros order norm gated"),
    (35, 96, "int4", 1, "residual"),
    (100, 640, "int8", 1, "norm gated"),
    (561, 512, "int8", 16, "zeros order bias residual"),
    (48, 1024, "int8", 8, "zeros norm"),
    (80, 256, "int4", 4, "zeros norm bias"),
    (48, 64, "int4", 1, "zeros"),
    (40, 32, "int8", 1, "zeros norm bias"),
    (40, 704, "int8", 1, "norm"),
    (35, 288, "fp8", 9, "residual"),
    (100, 640, "fp8", 1, "norm gated"),
    (561, 512, "fp8", 16, "order bias residual"),
    (48, 1024, "fp8", 8, "norm"),
    (48, 192, "int4", 2, "wide residual"),
    (74, 288, "int4", 9, "wide order norm gated"),
    (80, 256, "int8", 2, "wide bias"),
    (40, 640, "int8", 1, "wide norm"),
    (100, 288, "mxfp4", 9, "norm gated"),
    (35, 192, "mxfp4", 6, "order bias residual"),
    (144, 384, "fp8", 3, "shared norm gated"),
    (200, 1408, "fp8", 11, "shared residual"),
    (56, 640, "fp8", 10, "shared order bias"),
    (256, 512, "int4", 4, "shared wide norm"),
]
LARGE = [
    (4096, 11008, "int4", 86, "residual"),
    (22016, 4096, "int4", 32, "zeros norm gated"),
    (6144, 4096, "int4", 128, "zeros order norm bias"),
    (4096, 14336, "int8", 1, "residual"),
    (28672, 4096, "int8", 32, "zeros norm gated"),
    (520, 28672, "int4", 224, "zeros bias"),
    (4096, 11008, "fp8", 86, "residual"),
    (22016, 4096, "fp8", 32, "norm gated"),
    (6144, 4096, "fp8", 1, "norm"),
    (4096, 11008, "mxfp4", 344, "residual"),
    (4096, 11008, "int4", 86, "wide residual"),
    (4096, 11008, "fp8", 86, "shared residual"),
]


class Weight(NamedTuple):
    """What a quantized weight [N, K] is, and its layer's bias."""

    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # [N, C]
    zeros: Tensor | None  # [N, C]
    g_idx: Tensor | None  # [K]
    kind: str
    bias: Tensor | None

    @property
    def layer(self) -> QuantizedLinear:
        codes = CODES[self.kind]
        # K may end inside a word.
        words = pack_codes(F.pad(self.codes, (0, -self.codes.shape[1] % 8)), codes.bits)
        return QuantizedLinear(words, self.scales, self.zeros, codes, self.bias, self.g_idx)

    @property
    def exact(self) -> Tensor:
        return self.layer.dequantize(torch.float64)[:, : self.codes.shape[1]]


def random_weight(N, K, kind, C, parts="", device="cpu", dtype=torch.float32) -> Weight:
    bits = KINDS[kind].bits
    codes = torch.randint(2**bits, (N, K), device=device, dtype=torch.uint8)
    if kind == "fp8":
        codes -= (codes % 128 == 127).to(torch.uint8)  # NaN
    scales = (
        (torch.rand(N, C, device=device) + 0.5)
        / K**0.5
        / (256 if kind == "fp8" else 2 ** (bits - 2))
    )
    shared = N if "shared" in parts else 16  # the first rows by chance
    scales[:shared] = scales[torch.arange(N)[:shared] // 8 * 8]
    scales = scales if kind == "fp8" or "wide" in parts else scales.half()
    if kind == "mxfp4":
        scales = (scales.float().log2().round() + 127).to(torch.uint8)
    zeros = torch.randint(1, 2**bits, (N, C), device=device) if "zeros" in parts else None
    g_idx = torch.randperm(K, device=device) // (K // C) if "order" in parts else None
    bias = torch.randn(N, device=device, dtype=dtype) if "bias" in parts else None
    return Weight(codes, scales, zeros, g_idx, kind, bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_the_kernels_is_one_of_codes(kind):
    """layout.py says again what quantize.py says, so that it can be copied alone."""
    assert (KINDS[kind].bits, KINDS[kind].zero) == (CODES[kind].bits, CODES[kind].zero)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("parts", ["", "zeros"])
def test_inputs_of_a_group_come_side_by_side(kind, parts):
    """A rank's slice of an act-order layer: groups differ in size, of group 1 no input is here, and
    what fills groups up is 0."""
    some = [torch.randint(C, (K,)) for K, C in ((96, 3), (64, 5), (32, 9), (8, 3))]
    for g_idx in (
        *some,
        torch.arange(96) // 32 % 2 * 2,
        torch.arange(40) % 2 * 2,
        torch.zeros(40).long(),
    ):
        g_idx[g_idx == 1] = 0
        weight, x = (
            random_weight(6, len(g_idx), kind, 9, parts)._replace(g_idx=g_idx),
            torch.randn(3, len(g_idx)),
        )
        packed, ref = PackedLinear(weight.layer), x.double() @ weight.exact.T
        assert packed.group_size % 32 == 0 or not g_idx.any()  # as the kernels need them
        for layer in packed, CpuQuantizedLinear(weight.layer):
            assert error(layer(x), ref) < 1e-5


def test_fp32_scales_beside_zero_points_are_rounded_and_a_line_says_so(capsys):
    say_once.cache_clear()
    weight, x = random_weight(35, 96, "int4", 3, "zeros wide"), torch.randn(3, 96)
    assert 0 < error(PackedLinear(weight.layer)(x), x.double() @ weight.exact.T) < 1e-3
    assert "rounded to fp16" in capsys.readouterr().err


@pytest.mark.parametrize("kind, C", [("int4", 3), ("int8", 1), ("int8", 3)])
def test_tiny_scales_are_packed_in_fp32_or_beside_zero_points_not_at_all(kind, C):
    """fp16 would leave nothing of them; where a few groups alone are tiny, it hides half a step of
    the others at most."""
    tiny = random_weight(37, 96, kind, C, "wide")
    tiny = tiny._replace(scales=tiny.scales * 1e-6)
    x = torch.randn(3, 96)
    assert fusible(tiny.layer)
    assert error(PackedLinear(tiny.layer)(x), x.double() @ tiny.exact.T) < 1e-5
    zeros = torch.randint(1, 2 ** CODES[kind].bits, (37, C))
    beside = tiny._replace(zeros=zeros)
    assert not fusible(beside.layer)
    with pytest.raises(ValueError, match="fp16"):
        PackedLinear(beside.layer)
    scales = beside.scales * 1e6
    scales[5] *= 1e-6
    mixed = beside._replace(scales=scales)
    assert fusible(mixed.layer)
    packed = PackedLinear(mixed.layer)
    off = packed(torch.eye(96)).T.double() - mixed.exact
    assert (off.abs()[5] <= scales.max() / 2).all()


def test_a_layer_without_outputs_gives_none():
    """As a rank has it of a small head."""
    layer = random_weight(0, 576, "int4", 9).layer
    for one in layer, PackedLinear(layer), CpuQuantizedLinear(layer):
        assert one(torch.randn(3, 576)).shape == (3, 0)


@pytest.mark.parametrize(
    "kind, C, parts, rows, most",
    [
        ("int4", 9, "zeros order bias", 1, 5e-3),
        ("int4", 6, "", 2, 5e-3),
        ("int8", 9, "zeros bias", 2, 1e-6),
        ("int8", 1, "order", 3, 5e-3),
        ("fp8", 9, "order", 1, 1e-6),
    ],
)
def test_the_cpu_layer_is_its_weights(kind, C, parts, rows, most, monkeypatch):
    """Compiled, few rows go another way, int4 and, without AVX-512, whole rows of int8 through a
    product in bf16."""
    monkeypatch.setattr("fast.cpu.AVX2", C == 1)
    weight, x = random_weight(40, 576, kind, C, parts), torch.randn(17, 576)
    ref, run = (
        exact_linear(x, weight.exact, None, weight.bias, None, False),
        CpuQuantizedLinear(weight.layer),
    )
    assert error(run(x), ref) < 1e-6
    run.decodes = True
    run = torch.compile(run, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert error(run(x[:rows]), ref[:rows]) < most


def random_inputs(weight: Weight, rows: int, parts: str, dtype: torch.dtype) -> tuple:
    """x [rows, K], which spans six orders of magnitude, norm and residual; the product of the first
    row is of the order of 1, as bias and residual are, so that none of them can be missed."""
    N, K = weight.codes.shape
    device = weight.codes.device
    magnitude = 10 ** torch.empty(rows, 1, device=device).uniform_(-3, 3)
    magnitude[0] = 1
    x = (torch.randn(rows, K, device=device) * magnitude).to(dtype)
    kind = torch.float32 if "norm32" in parts else dtype
    norm = torch.rand(K, device=device, dtype=kind) + 0.5 if "norm" in parts else None
    residual = torch.randn(rows, N, device=device, dtype=dtype) if "residual" in parts else None
    return x, norm, residual


def check_rows(out: Tensor, ref: Tensor, bound: float) -> None:
    """Each row for itself: x's rows differ by orders of magnitude."""
    assert out.shape == ref.shape
    worst = max(error(one, exact) for one, exact in zip(out, ref))
    assert worst < bound, (len(out), worst)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_the_product(shape, monkeypatch):
    """On a CPU, where the operator runs the twin, in fp32: nothing but the order of the sums
    differs. A layer's rows are packed some at a time, and are what they are packed at once."""
    monkeypatch.setattr(packed_linear, "REPACKED", 4096)
    parts = shape[-1]
    weight = random_weight(*shape)
    packed, whole = (
        PackedLinear(weight.layer, "gated" in parts),
        pack(*weight[:5], "gated" in parts),
    )
    for name in ("qweight", "scales_and_zeros", "shifts", "semaphores"):
        assert getattr(packed, name).equal(getattr(whole, name))
    assert (whole.scales_and_zeros.shape[2] == 2) == ("shared" in parts)
    x, norm, residual = random_inputs(weight, 3, parts, torch.float32)
    ref = exact_linear(x, weight.exact, norm, weight.bias, residual, packed.gated)
    check_rows(packed.fused(x, norm, residual, packed.gated), ref, 1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        (48, 1280, "int4", 10, "bf16 zeros norm"),
        (74, 288, "int4", 9, "zeros order norm gated"),
        (80, 256, "int4", 4, "zeros norm bias"),
        (35, 97, "int4", 1, "residual"),
        (48, 640, "int8", 10, "shared wide norm"),
        (61, 512, "int8", 16, "bf16 zeros residual"),
        (56, 640, "fp8", 10, "residual"),
        (48, 384, "fp8", 3, "shared norm gated"),
        (40, 288, "mxfp4", 9, "bf16 order norm bias"),
        (37, 1096, "int8", 1, "bf16 plain norm bias"),
        (44, 72, "int8", 1, "plain norm gated"),
        (44, 72, "int8", 1, "bf16 plain norm32"),
        (48, 640, "int4", 5, "bf16 zeros norm32"),
        (74, 288, "int4", 9, "order norm32 gated"),
        (48, 1280, "int4", 10, "bf16 zeros norm few 5 1"),
        (74, 896, "int4", 28, "zeros norm gated few 8 4"),
        (1100, 256, "int4", 2, "bf16 residual few 2 1"),
        (61, 3072, "int8", 96, "bf16 zeros residual bias few 8 2"),
        (40, 640, "int8", 1, "wide norm few 7 1"),
    ],
    ids=str,
)
def test_gemv_on_a_cpu(tmp_path, shape):
    """The result is the exact one, rounded once: sums are of integers. FP8's x becomes fp16,
    rounded after a norm. So does x in few.cu, whose rows and programs of a cluster are said. One
    input is 10,000 times the others, and its weights are 0: 26 bits are enough for these. plain:
    weights of 16 bits."""
    parts, few, rows = shape[-1].partition(" few ")
    kind, (rows, cluster) = shape[2], map(int, (rows or "1 1").split())
    dtype = torch.bfloat16 if "bf16" in parts else torch.float16
    weight = random_weight(*shape[:-1], parts, dtype=dtype)
    outlier = kind != "fp8" and weight.zeros is None
    if outlier:
        weight.codes[:, 7] = KINDS[kind].zero
    x, norm, residual = random_inputs(weight, rows, parts, dtype)
    x[:, 7] *= 1e4 if outlier and norm is None else 1
    packed, w = pack(*weight[:4], kind, int("gated" in parts)), weight.exact
    if "plain" in parts:
        packed = packed_gemv.Plain(w := w.to(dtype), packed.gated)
    if few:
        out = few_on_cpu(tmp_path, cluster, x, packed, norm, weight.bias, residual)
    else:
        out = gemv_on_cpu(tmp_path, x, packed, norm, weight.bias, residual)
    ref = exact_linear(x, w, norm, weight.bias, residual, packed.gated)
    bound = (5e-4 if kind == "fp8" or few and norm is not None else 2e-5) + 1.02 * error(
        ref.to(dtype), ref
    )
    assert error(out, ref) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_the_kernels_give_the_product(dtype, shape):
    """Rounded to 16 bits are the weights, x after a norm, and the result. With 32 inputs in bf16,
    the worst of 520 rows is off by 5.4e-3 then (emulated; the median of 200 seeds)."""
    parts = shape[-1]
    weight = random_weight(*shape, "cuda", dtype)
    packed = PackedLinear(weight.layer, "gated" in parts)
    bound = 2e-2 if packed.gated else 8e-3  # gated, the errors of two products meet
    w = weight.exact
    for rows in ROWS:
        x, norm, residual = random_inputs(weight, rows, parts, dtype)
        ref = exact_linear(x, w, norm, weight.bias, residual, packed.gated)
        torch.full((64, 1024, 1024), torch.nan, device="cuda")  # what torch.empty will hand out
        out = packed.fused(x, norm, residual, packed.gated)
        assert out.dtype == dtype
        check_rows(out, ref, bound)


def gemm_choice(*sizes):
    return dict(
        zip(
            "kernel block_n block_m splits stages warps occupancy slices scaled".split(),
            ("gemm", *sizes),
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        (2 * 1037, 2944, "int4", 23, "zeros gated"),
        (563, 1760, "int4", 55, "zeros order bias residual"),
        (520, 28672, "int4", 224, "zeros order bias residual"),
        (1040, 1984, "int8", 1, "bias residual"),
        (17350, 640, "int4", 5, "zeros gated"),
        (17001, 640, "int8", 5, "zeros order bias residual"),
    ],
    ids=str,
)  # the last two: whole tiles first
@pytest.mark.parametrize(
    "choice, rows",
    [
        (gemm_choice(*sizes, scaled), rows)
        for scaled in (0, 1)
        for sizes, rows in [
            ((16, 64, 16, 2, 8, 0, 3), 9),
            ((16, 64, 4, 5, 4, 8, 2), 11),
            ((32, 64, 4, 4, 4, 5, 4), 20),
            ((64, 64, 1, 4, 4, 3, 8), 150),
            ((128, 64, 1, 4, 4, 2, 6), 33),
            ((64, 128, 1, 3, 4, 3, 4), 128),
            ((128, 128, 1, 3, 4, 2, 1), 70),
            ((256, 128, 1, 3, 8, 0, 2), 100),
            ((128, 256, 1, 3, 8, 1, 2), 500),
        ]
    ],
    ids=str,
)
def test_slices_of_k(monkeypatch, choice, rows, shape):
    """Programs that share a tile's K, more of them than K has blocks too: right, the same each
    time, ready for more."""
    parts = shape[-1]
    weight = random_weight(*shape, "cuda", torch.bfloat16)
    layer = PackedLinear(weight.layer, "gated" in parts)
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    residual = (
        torch.randn(rows, shape[0], device="cuda", dtype=torch.bfloat16)
        if "residual" in parts
        else None
    )
    ref = exact_linear(x, weight.exact, None, weight.bias, residual, layer.gated)
    monkeypatch.setattr("fast.packed_linear.kernel_for", lambda *_: choice)
    torch.full((64, 1024, 1024), torch.nan, device="cuda")  # what torch.empty will hand out
    outs = [layer.fused(x, residual=residual, gated=layer.gated) for _ in range(3)]
    assert error(outs[0], ref) < (1.5e-2 if layer.gated else 5e-3) and not layer.semaphores.any()
    assert outs[0].equal(outs[1]) and outs[0].equal(outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("waves", [1, 2])
def test_tiles_that_fill_the_gpu_exactly(monkeypatch, waves):
    """None is left to be sliced."""
    N = 64 * 3 * waves * torch.cuda.get_device_properties("cuda").multi_processor_count
    weight = random_weight(N, 640, "int4", 5, "zeros", "cuda")
    layer = PackedLinear(weight.layer)
    x = torch.randn(20, 640, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(
        "fast.packed_linear.kernel_for", lambda *_: gemm_choice(64, 64, 1, 3, 4, 3, 4, 0)
    )
    assert error(layer(x), x.double() @ weight.exact.T) < 5e-3 and not layer.semaphores.any()


# What another project takes


@on_each_device
def test_the_int4_kernel_is_five_files(device, tmp_path):
    (tmp_path / "fast").mkdir()
    for name in ("layout.py", "nvrtc.py", "packed_gemv.py", "common.cu", "gemv.cu"):
        shutil.copy(ROOT / "fast" / name, tmp_path / "fast")
    (tmp_path / "try.py").write_text(program("int4_kernel.py"))
    done = python("try.py", device, cwd=tmp_path, PYTHONPATH="")
    loaded = "fast fast.layout"
    if device == "cuda":
        loaded += " fast.nvrtc fast.packed_gemv"
    assert (done.returncode, done.stdout.strip()) == (0, loaded), done.stderr


@pytest.mark.parametrize(
    "memory, missing, one_row, few",
    [
        (200_000, None, dict(kernel="gemv"), dict(kernel="few")),
        (3_000, None, 2, 2),
        (200_000, OSError("no libnvrtc.so.13"), 2, 2),
    ],
)
def test_without_the_gemv_one_row_gets_what_two_get(
    monkeypatch, capsys, memory, missing, one_row, few
):
    packed = pack(*random_weight(64, 256, "int4", 2)[:4])
    properties = Mock(shared_memory_per_block_optin=memory, major=9)
    for where, name, value in (
        (torch.cuda, "get_device_properties", lambda _: properties),
        (torch.cuda, "get_device_capability", lambda _: (9, 0)),
        (nvrtc, "compiler", Mock(side_effect=missing)),
        (nvrtc, "driver", Mock()),
        (packed_gemv, "has_gemv", packed_gemv.has_gemv.__wrapped__),  # which remembers
        (packed_few, "has_gemv", packed_gemv.has_gemv.__wrapped__),
        (packed_linear, "kernel_for", lambda format, N, K, M, device: M),
    ):
        monkeypatch.setattr(where, name, value)
    found = [choice_for(packed, M, torch.device("cpu")) for M in (1, 2, 8, 9, 513)]
    assert found == [one_row, few, few if few != 2 else 8, 9, dict(kernel="library")]
    assert ("no libnvrtc.so.13" in capsys.readouterr().err) == bool(missing)

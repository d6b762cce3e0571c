"""Each fast path against its plain twin."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernels
from kernels import RowLinear, read_bandwidth, swap_linears


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("bias", [False, True])
def test_compiled_row_linear_equals_linear(dtype, tolerance, bias):
    linear = nn.Linear(577, 131, bias=bias).to(dtype).requires_grad_(False)
    compiled = torch.compile(RowLinear(linear), fullgraph=True)
    for shape in [(577,), (1, 1, 577), (3, 577)]:
        x = torch.randn(shape, dtype=dtype)
        b = linear.bias.double() if bias else None
        ref = F.linear(x.double(), linear.weight.double(), b)
        out = compiled(x)
        assert out.shape == ref.shape and out.dtype == dtype
        assert ((out.double() - ref).norm() / ref.norm()).item() < tolerance


def test_swap_keeps_the_weights_where_they_are():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU()))
    x, before = torch.randn(2, 3), dict(model.named_parameters())
    ref = model(x)
    swap_linears(model)
    assert isinstance(model[0], RowLinear) and isinstance(model[1][0], RowLinear)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert model(x).equal(ref)


@pytest.mark.gpu
def test_the_timed_read_reads_every_word():
    chunk, data = 2 ** 16, torch.randint(-2 ** 62, 2 ** 62, (3 * 2 ** 13,), device="cuda")
    sums, addresses = torch.full((3,), -1, device="cuda"), data.data_ptr() + chunk * torch.arange(3, device="cuda")
    kernels.read_chunk[(3,)](addresses, sums, chunk, 4096, num_warps=8)
    assert sums.equal(data.view(3, -1).sum(1))


@pytest.mark.gpu
def test_read_bandwidth_is_that_of_a_gpu():
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(8)))
    assert 2e11 < read_bandwidth(model) < 2e13

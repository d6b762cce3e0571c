"""What several test files compare with."""
import torch
import torch.nn.functional as F
from torch import Tensor


def error(out: Tensor, ref: Tensor) -> float:
    """The relative error in the Frobenius norm."""
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def exact_linear(x: Tensor, w: Tensor, norm: Tensor | None, bias: Tensor | None, residual: Tensor | None,
                 gated: bool) -> Tensor:
    """fast.linear.linear() in float64."""
    x, w, norm, bias, residual = (None if t is None else t.double() for t in (x, w, norm, bias, residual))
    y = F.linear(x if norm is None else F.rms_norm(x, x.shape[-1:], norm, 1e-5), w, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y

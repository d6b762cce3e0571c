"""
What torch.compile does not find by itself, beside its plain twin; generate.py swaps it in with --compile.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RowLinear(nn.Module):
    """nn.Linear, for one row on a CPU as a product and a sum, which torch.compile fuses into one pass over the weights.

    It reads them at 30 to 48 GB/s, MKL's matrix-vector product at 16 (fp32, 2 cores of an AMD EPYC): SmolLM2-135M
    decodes at 80 tokens/s instead of 29. Several rows, and eager code, take the plain twin."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        N, K = self.weight.shape
        if not torch.compiler.is_compiling() or x.numel() != K:
            return F.linear(x, self.weight, self.bias)
        y = (self.weight.float() * x.view(K).float()).sum(-1)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], N)


def swap_linears(model: nn.Module) -> None:
    """Put a RowLinear in the place of each nn.Linear; the weights stay where they are."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, RowLinear(child))


def read_bandwidth(model: nn.Module) -> float:
    """Bytes a second at which a GPU reads the model's weights and does nothing else: the best of three passes."""
    weights = [p.view(-1).view(torch.int32) for p in model.parameters() if p.numel() > 2 ** 20]
    milliseconds = []
    for _ in range(3):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for weight in weights:
            weight.sum()
        ended.record()
        ended.synchronize()
        milliseconds.append(begun.elapsed_time(ended))
    return sum(weight.nbytes for weight in weights) / min(milliseconds) * 1e3

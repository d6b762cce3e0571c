"""
What torch.compile does not find by itself, beside its plain twin; generate.py swaps it in with --compile.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of PyTorch: nothing here needs it then
    triton = None


class RowLinear(nn.Module):
    """nn.Linear, for one row on a CPU as a product and a sum, which torch.compile fuses into one pass over the weights.

    It reads them at 30 to 48 GB/s, MKL's matrix-vector product at 16 (fp32, 2 cores of an AMD EPYC): SmolLM2-135M
    decodes at 79 tokens/s instead of 32. Several rows, and eager code, take the plain twin."""

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


if triton:
    @triton.jit
    def read_chunk(addresses, sums, BYTES: tl.constexpr, BLOCK: tl.constexpr):
        """Sum one chunk of 8-byte words; a sum that is stored, or the reads would be left out."""
        words = tl.multiple_of(tl.load(addresses + tl.program_id(0)), 16).to(tl.pointer_type(tl.int64))
        total = tl.zeros((BLOCK,), tl.int64)
        for at in range(0, BYTES // 8, BLOCK):
            total += tl.load(words + at + tl.arange(0, BLOCK))
        tl.store(sums + tl.program_id(0), tl.sum(total))


def read_bandwidth(model: nn.Module) -> float | None:
    """Bytes a second at which a CUDA GPU reads the model's weights and does nothing else: the best of ten passes, each
    one launch. None where triton is missing. Chunks of 64 KiB read at 4.60 TB/s on an H200, of 1 MiB at 4.57."""
    if not triton:
        return None
    chunk, starts = 2 ** 16, []
    for weight in model.parameters():
        starts += range(weight.data_ptr(), weight.data_ptr() + weight.nbytes - chunk + 1, chunk)
    addresses = torch.tensor(starts, device=weight.device)
    sums, milliseconds = torch.empty_like(addresses), []
    for _ in range(10):  # the first one compiles
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        read_chunk[(len(starts),)](addresses, sums, chunk, 4096, num_warps=8)
        ended.record()
        ended.synchronize()
        milliseconds.append(begun.elapsed_time(ended))
    return len(starts) * chunk / min(milliseconds) * 1e3

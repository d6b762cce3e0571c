"""
The speed layer: whatever makes a step faster than plain PyTorch. It changes no text, except where a rounding decides
between two tokens.

generate.py calls optimize(model) once, after model.setup(), and uses what it returns. The files here import the core
(model.py, quantize.py, sampling.py, speculative.py, tp.py). Of the core, only generate.py imports this folder, and it guards the import. Delete the folder, and
every command still works, slower. The package imports without Triton; the two packed kernels are then left out.

    decoder.py        swaps a model's modules for fast ones, by their type: decode of one row is five launches a layer
    linear.py         16-bit linear layers with norm, bias, SiLU gate and residual inside: gemv, gemm, rms_norm
    packed_linear.py  the same for int4, int8 and FP8 weights; the kernels are packed_gemv.py and packed_gemm.py
    layout.py         puts int4, int8 and FP8 weights into the matrix unit's order, at load
    attention.py      attention with rope and the KV cache's update inside
    sampling.py       temperature, top-k, top-p and speculative acceptance without a sort
    collectives.py    all-reduce and all-gather of one host's ranks in one launch
    cpu.py            a CPU's linear layers: oneDNN's products and, of few rows, loops for torch.compile to fuse
    bandwidth.py      the rate at which a GPU reads the model's weights
    tuning.py         chooses a linear layer's kernel and its sizes: from tuned.json, or by rules of thumb
    common.py         Triton or stand-ins, the GPU's properties, device functions that several kernels use

decoder.py imports the kernels' files, and these import common.py and tuning.py. Beside each kernel stands its plain
twin: PyTorch operators that compute the same. The twin runs on CPUs, and the tests compare the kernel with it.
"""
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fast.bandwidth import read_bandwidth
from fast.common import triton
from fast.cpu import install_linears, row_decoder
from fast.decoder import fusible, install_kernels
from fast.sampling import fast_accept, fast_choose, fast_propose
from sampling import choose
from speculative import accept, propose

__all__ = ["Fast", "optimize", "read_bandwidth"]


@dataclass(frozen=True)
class Fast:
    """What takes the place of the plain model and, on a GPU, of the plain functions of the same names."""
    decoder: nn.Module  # (tokens [B, T], positions [B, T], slots) -> logits [B, T, V]; shares weights and caches
    choose: Callable = choose
    propose: Callable = propose
    accept: Callable = accept
    # True where decode runs on this folder's kernels. They find the cache slots in use on the device, and a step can be
    # captured as a CUDA graph by hand, without torch.compile.
    kernels: bool = False


def optimize(model: nn.Module) -> Fast | None:
    """Puts fast modules into a Transformer whose setup() is done, and returns what decodes and samples from now on.

    None where nothing here serves: on other devices than CPUs and CUDA GPUs, and on a CUDA GPU where the kernels cannot
    serve this GPU or this model, which one line on stderr says. On a CUDA GPU ValueError for a model that was optimized
    before."""
    weight = model.embed.weight
    if weight.device.type == "cpu":
        install_linears(model)
        return Fast(row_decoder(model))
    if weight.device.type != "cuda":
        return None
    nvidia = bool(triton and torch.version.cuda) and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    if not nvidia or weight.itemsize != 2 or not fusible(model):
        print("plain PyTorch decodes: kernels want Triton, compute capability 8.0, 16-bit activations, and q, k, v, or "
              "gate and up, all quantized, in one order", file=sys.stderr)
        return None
    return Fast(install_kernels(model), fast_choose, fast_propose, fast_accept, kernels=True)

"""
The speed layer: whatever makes a step faster than plain PyTorch. It changes no text, except where a
rounding decides between two tokens.

engine.py is the door: llm.py imports it, at one guarded place, and gets FastEngine, a subclass of
generate.Engine. That calls optimize(model) once, after model.setup(), and uses what it returns. The
files here import model.py, generate.py, quantize.py, speculative.py, tp.py and drafts/, and none of
these imports them. Delete the folder, and every command still works, slower. The package imports
without Triton.

    engine.py         the captured engine
    decoder.py        swaps a model's modules for fast ones, by their type: decode of one row is
                      five launches a layer
    step.py           or one launch for all layers, in CUDA C++ (step.cu and step_*.cu), for
                      mixtures and small layers
    linear.py         16-bit linear layers with norm, bias, SiLU gate and residual inside
    packed_linear.py  the same for int4, int8, FP8 and MXFP4 weights, by one of three kernels:
      packed_gemv.py  one row, in CUDA C++ (gemv.cu), 16-bit weights too
      packed_few.py   2 to 8 rows, in CUDA C++ (few.cu behind a part of gemv.cu)
      packed_gemm.py  more rows, in Triton
    experts.py        mixtures of experts: the router, and the products of the experts that some row
                      chose
    layout.py         puts int4, int8, FP8 and MXFP4 weights into the matrix unit's order, at load
    nvrtc.py          compiles CUDA C++, with the compiler that comes with PyTorch, and launches it;
                      common.cu has what gemv.cu, few.cu and step.cu share
    attention.py      attention with rope and the KV cache's update inside
    delta.py          recurrent layers: the gated delta rule and its norm, for decode
    sampling.py       temperature, top-k, top-p, min-p and speculative acceptance without a sort
    graph.py          a step as a CUDA graph, which brings its results to the host
    collectives.py    all-reduce and all-gather of one host's ranks in one launch
    twins.py          what the kernels compute, in plain PyTorch
    cpu.py            a CPU's linear layers: oneDNN's and PyTorch's int4 products, or loops for
                      torch.compile to fuse
    bandwidth.py      the rate at which a GPU reads the model's weights
    tuning.py         chooses a linear layer's kernel and its sizes: from tuned.json, or by rules of
                      thumb
    known.py          the fields of Config, its parts and Sampling that are taken into account here
    common.py         Triton or stand-ins, the GPU's properties, device functions that several
                      kernels use

decoder.py imports the files of a layer's kernels, and these import common.py, tuning.py and
twins.py. This file imports them inside its functions. Each kernel but graph.py's, which only
copies, has a plain twin: PyTorch operators that compute the same. The twin runs on CPUs, and the
tests compare both with float64.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn


@dataclass(frozen=True)
class Fast:
    """What takes the place of the plain model and, with kernels, of the plain functions of the same
    names."""

    # (tokens [B, T], positions [B, T], slots) -> logits [B, T, V]; shares weights and caches.
    decoder: nn.Module
    # True where decode runs on this folder's kernels. They find the cache slots in use on the
    # device, and a step can be captured as a CUDA graph by hand, without torch.compile. False: all
    # that follows is None.
    kernels: bool = False
    # True where those in the model, for prompts, find the slots, too.
    finds_slots: bool = False
    # Sampling -> a tensor; None for a value that the kernels do not know.
    settings: Callable | None = None
    # As generate.choose(), speculative.choose_draft() and accept(), but with settings()'s tensor
    # for the Sampling. They read it on the device: a CUDA graph stays valid when other settings are
    # copied into it.
    choose: Callable | None = None
    choose_draft: Callable | None = None
    accept: Callable | None = None
    capture: Callable | None = None  # graph.CapturedStep
    faster: Callable | None = None  # decoder.faster()


def optimize(model: nn.Module) -> Fast | None:
    """Puts fast modules into a Transformer whose setup() is done, and returns what decodes and
    samples from now on.

    None where nothing here serves: on other devices than CPUs and CUDA GPUs, and on a CUDA GPU
    where the kernels cannot serve this GPU or this model, which one line on stderr says. On a CUDA
    GPU ValueError for a model that was optimized before."""
    device = model.embed.weight.device
    if device.type == "cpu":
        from fast.cpu import install_linears, row_decoder

        install_linears(model)
        return Fast(row_decoder(model))
    if device.type != "cuda":
        return None
    from fast.common import triton

    nvidia = bool(triton and torch.version.cuda)
    nvidia = nvidia and torch.cuda.get_device_capability(device) >= (8, 0)
    if not nvidia or model.embed.weight.itemsize != 2:
        print(
            "plain PyTorch decodes: kernels want Triton, compute capability 8.0 and 16-bit "
            "activations",
            file=sys.stderr,
        )
        return None
    return use_kernels(model)


def use_kernels(model: nn.Module) -> Fast | None:
    """optimize() for a GPU that has what the kernels want."""
    try:
        from fast import decoder, graph, sampling
    except (ImportError, AttributeError) as error:  # of Triton: its names come and go
        print(f"plain PyTorch decodes: the kernels cannot be imported: {error}", file=sys.stderr)
        return None
    if unknown := decoder.unknown_fields(model):
        print(f"plain PyTorch decodes: fast/ does not know {', '.join(unknown)}", file=sys.stderr)
        return None
    plain = decoder.plain_halves(model)
    total = 2 * len(model.layers)
    if plain:
        reasons = ", ".join(f"{n} with {reason}" for reason, n in plain.items())
        print(
            f"plain PyTorch runs {plain.total()} of {total} halves of layers: {reasons}",
            file=sys.stderr,
        )
    if plain.total() == total:
        return None
    found = decoder.install_kernels(model)
    if not found.kernels:
        return Fast(found)
    settings = partial(sampling.make_settings, device=model.embed.weight.device)
    return Fast(
        found,
        True,
        found.finds_slots,
        settings,
        sampling.fast_choose,
        sampling.fast_choose_draft,
        sampling.fast_accept,
        graph.CapturedStep,
        decoder.faster,
    )


def read_bandwidth(model: nn.Module) -> float | None:
    """bandwidth.read_bandwidth()"""
    from fast import bandwidth

    return bandwidth.read_bandwidth(model)

"""
What the kernels share: Triton, or stand-ins where it is missing, properties of the GPU, and the
device functions that several kernels use.
"""

import functools

import torch

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a build of PyTorch without Triton: the plain twins serve
    triton = tl = constexpr = gdc_launch_dependents = gdc_wait = TensorDescriptor = None

    def jit(kernel=None, **options):
        return jit if kernel is None else None


@functools.cache
def gpu(device: torch.device):
    return torch.cuda.get_device_properties(device)


def pdl_options(device: torch.device) -> dict:
    """Launch options for programmatic dependent launch, which needs compute capability 9.0."""
    return dict(launch_pdl=True) if gpu(device).major >= 9 else {}


GATES = dict(silu=1, gelu=2)  # model.ACTIVATIONS that the kernels know, and their numbers there
CLAMPED = 3  # a gate with MoEConfig.clamp


@jit
def gate_times_up(gate, up, GATED: constexpr):
    """silu(gate) * up or, GATED = 2, tanh-GELU(gate) * up, of fp32 tiles. Both are gate *
    sigmoid(z) * up."""
    z = gate
    if GATED == 2:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate / (1 + tl.exp(-z)) * up


@jit
def gate_function(gate, up, limit, alpha, GATED: constexpr):
    """model.Gate; GATED = 3: with clamp, which is limit and alpha."""
    if GATED == 3:
        gate = tl.minimum(gate, limit)
        y = gate / (1 + tl.exp(-alpha * gate)) * (tl.minimum(tl.maximum(up, -limit), limit) + 1)
    else:
        y = gate_times_up(gate, up, GATED)
    return y


@jit
def arrive(semaphore):
    """Counts this program in and returns how many came before it. The last one to come sees all
    that the others stored.

    Programs come in any order; whoever sums their parts in a fixed order gets the same bits each
    time."""
    tl.debug_barrier()
    before = tl.atomic_add(semaphore, 1, sem="acq_rel")
    tl.debug_barrier()
    return before


@jit
def last_arriver(semaphore, expected):
    """Counts this program in; True in the last of `expected` programs, which sets the semaphore
    back to 0 for the next launch."""
    last = arrive(semaphore) == expected - 1
    if last:
        tl.store(semaphore, 0)
    return last

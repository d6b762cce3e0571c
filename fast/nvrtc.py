"""
CUDA C++ without a toolkit: NVRTC, the compiler that comes with PyTorch, compiles it, and the
driver loads and launches it, both through ctypes. Nothing of this repository is imported.
"""

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor


def check(library: ctypes.CDLL, code: int, log: str = "") -> None:
    if code:
        raise RuntimeError(f"{library._name}: error {code} {log}")


@functools.cache
def compiler() -> ctypes.CDLL:
    """The compiler that comes with PyTorch."""
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        found = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/**/{name}"))
        return ctypes.CDLL(str(found[0]) if found else name)


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def options_for(capability: int, macros: dict) -> list[str]:
    """compile_cuda()'s, for a GPU of compute capability 9.0 with 90."""
    return [
        f"--gpu-architecture=sm_{capability}",
        "--std=c++17",
        "--device-as-default-execution-space",
        *(f"-D{name}={int(value)}" for name, value in macros.items()),
    ]


def compile_cuda(source: str, options: list[str]) -> bytes:
    """-> a cubin. Those of earlier starts lie beside Triton's."""
    key = hashlib.sha256("\n".join([source, torch.version.cuda, *options]).encode()).hexdigest()[
        :32
    ]
    cached = (
        Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
        / f"gemv-{key}.cubin"
    )
    if cached.exists():
        return cached.read_bytes()
    library, program, size = compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"gemv.cu", 0, None, None
        ),
    )
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), arguments)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    check(library, failed, log.value.decode())
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    cached.parent.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(f".{os.getpid()}")
    partial.write_bytes(cubin.raw)
    partial.replace(cached)
    return cubin.raw


def check_holds(function: ctypes.c_void_p, threads: int, shared_bytes: int) -> None:
    """RuntimeError if a multiprocessor cannot hold a program of this function."""
    count, cuda = ctypes.c_int(), driver()
    sizes = threads, ctypes.c_size_t(shared_bytes)
    check(
        cuda,
        cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(count), function, *sizes),
    )
    if count.value < 1:
        raise RuntimeError(
            f"a multiprocessor of this GPU cannot hold {threads} threads with {shared_bytes} bytes of "
            "shared memory"
        )


def use_context() -> None:
    """A thread that has launched nothing yet has no CUDA context: it gets PyTorch's, the primary one
    of the current GPU, without which the driver loads nothing (error 201)."""
    cuda, device, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    check(cuda, cuda.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        check(cuda, cuda.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()))
        check(cuda, cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(cuda, cuda.cuCtxSetCurrent(context))


def load(cubin: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    """The function of that name, which may have so many bytes of shared memory."""
    use_context()
    cuda, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda, cuda.cuModuleLoadData(ctypes.byref(module), cubin))
    check(cuda, cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    check(cuda, cuda.cuFuncSetAttribute(function, 8, shared_bytes))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    return function


class Attribute(ctypes.Structure):
    """CUlaunchAttribute; 2: COOPERATIVE, 4: CLUSTER_DIMENSION, 6: PROGRAMMATIC_STREAM_SERIALIZATION"""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("values", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


def tensor_map(
    tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> list[int]:
    """A CUtensorMap as 16 words: a view of 16-bit numbers in this tensor, sizes of five dimensions
    with the innermost first, bytes between neighbours in all but that, and the box, of 64 x ..., that
    one copy takes. In shared memory each 128 bytes have the 16-byte parts in an order of their own
    (CU_TENSOR_MAP_SWIZZLE_128B). What is outside of the view is 0.

    Of a tensor on a CPU: the arguments, as tests/fast/cuda_on_cpu.h reads them."""
    if not tensor.is_cuda:
        return [tensor.data_ptr(), *sizes, *strides, *box, 0]
    memory = (ctypes.c_uint64 * 24)()  # a map begins at a multiple of 64 bytes
    at = -(-ctypes.addressof(memory) // 64) * 64
    kind = 9 if tensor.dtype == torch.bfloat16 else 6
    cuda = driver()
    check(
        cuda,
        cuda.cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            kind,
            5,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * 5)(*sizes),
            (ctypes.c_uint64 * 4)(*strides),
            (ctypes.c_uint32 * 5)(*box),
            (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1),  # element strides
            0,  # no interleave
            3,  # SWIZZLE_128B
            3,  # L2_PROMOTION_L2_256B
            0,  # zeros outside
        ),
    )
    return [*(ctypes.c_int64 * 16).from_address(at)]


def in_c(value: Tensor | float | int | None):
    """A tensor is a pointer, None a null pointer."""
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


def launch_config(
    grid: int, threads: int, shared_bytes: int, cluster: int = 1, cooperative: bool = False
) -> LaunchConfig:
    """On the current stream, overlapping the kernel before where the GPU can. cluster: programs in
    one. cooperative: all programs run at once, or the launch fails; then it overlaps nothing."""
    values = [(2, [1])] if cooperative else []
    if torch.cuda.get_device_capability()[0] >= 9 and not cooperative:
        values.append((6, [1]))
    if cluster > 1:
        values.append((4, [cluster, 1, 1]))
    attributes = (Attribute * 2)(
        *(Attribute(id, 0, (ctypes.c_int * 16)(*value)) for id, value in values)
    )
    return LaunchConfig(
        (ctypes.c_uint * 7)(grid, 1, 1, threads, 1, 1, shared_bytes),
        torch.cuda.current_stream().cuda_stream,
        attributes,
        len(values),
    )


def launch(
    function: ctypes.c_void_p,
    grid: int,
    threads: int,
    shared_bytes: int,
    arguments: list,
    cluster: int = 1,
    cooperative: bool = False,
) -> None:
    """arguments: as in_c() takes them; the others: as launch_config() has them."""
    values = list(map(in_c, arguments))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    config = launch_config(grid, threads, shared_bytes, cluster, cooperative)
    cuda = driver()
    check(cuda, cuda.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))


@functools.cache
def most_clusters(
    function: int, threads: int, shared_bytes: int, cluster: int, processors: int
) -> int:
    """How many the GPU holds at once: one that must wait for a place would double the time."""
    if cluster == 1:
        return processors
    count, cuda = ctypes.c_int(), driver()
    config = launch_config(processors // cluster * cluster, threads, shared_bytes, cluster)
    check(
        cuda,
        cuda.cuOccupancyMaxActiveClusters(
            ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config)
        ),
    )
    return max(1, count.value)

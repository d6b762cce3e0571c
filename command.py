"""
What the commands share: options, the device and its memory.
"""
import argparse
import math
import os
from collections.abc import Callable

import torch

from checkpoint import UserError
from model import Config

DTYPES = dict(float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16)
GIB = 2 ** 30


def find_device(name: str | None) -> torch.device:
    """The device, which becomes the current one if it is a GPU: Triton launches there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = name.partition(":")
    count = dict(cpu=1, cuda=torch.cuda.device_count(), mps=int(torch.backends.mps.is_available())).get(kind)
    if count is None or not (index or "0").isdecimal():
        raise UserError(f"--device {name}: want cpu, cuda, cuda:N or mps")
    if int(index or 0) >= count:
        raise UserError(f"--device {name}: PyTorch {torch.__version__} finds {count} of those; --device cpu works")
    if kind == "cuda":
        torch.cuda.set_device(int(index or 0))
    return torch.device(name)


def find_dtype(name: str | None, device: torch.device) -> torch.dtype:
    dtype = DTYPES[name or ("float32" if device.type == "cpu" else "bfloat16")]
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        raise UserError(f"{torch.cuda.get_device_name(device)} has no bfloat16: --dtype float16 or float32 runs there")
    return dtype


def check_memory(config: Config, rows: int, length: int, device: torch.device, dtype: torch.dtype,
                 bits: int | None = None) -> str:
    """What to say when memory runs out later; UserError if weights and cache alone do not fit. bits: of a weight of the
    layers in a quantized checkpoint, scales not counted."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (_, _, shape) in config.hf_weights().items()}
    packed = bits / 8 / dtype.itemsize if bits else 1
    weights = sum(size * (packed if "_proj." in name else 1) for name, size in sizes.items())
    cache = dtype.itemsize * 2 * config.n_layer * config.n_kv_head * config.head_dim * rows * length
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[0]
    advice = (f"out of memory: {weights / GIB:.2f} GiB of weights, {cache / GIB:.2f} GiB of cache ({rows} rows "
              f"of {length}) for {there / GIB:.2f} GiB on {device}; fewer prompts, samples or tokens, or --dtype, help")
    if weights + cache > there:
        raise UserError(advice)
    return advice


def within(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argument's type: a number of that kind from low to high."""
    def parse(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value
    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantize", choices=("int8", "int4"), help="round the layers' weights as they are loaded")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128, -1), metavar="N",
                        help="weights of a row that share a scale: 32, 64, 128, -1 for all (default: -1, int4 32)")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; --help lists the options")

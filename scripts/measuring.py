"""
What benchmark.py and benchmark_speculation.py share: engines as the options say, what each line
says of its measurement, and a GPU's clocks.
"""

if __name__ == "__main__":
    import sys

    print("measuring.py is no command: scripts/benchmark.py uses it", file=sys.stderr)
    raise SystemExit(2)

import statistics
import subprocess
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from generate import Engine, Sampling
from hub.checkpoint import Checkpoint, hf_weights
from hub.formats import check_quantize, find_group, load, read_settings
from llm import find_engine, import_fast
from model import Config, Transformer
from quantize import round_head, round_model
from tp import Shard, Team, all_reduce, splitter


@dataclass
class Setup:
    """args: benchmark.py's. group_size: of the weights that were rounded last."""

    args: Namespace
    device: torch.device
    dtype: torch.dtype
    team: Team
    group_size: int | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def sampling(self) -> Sampling:
        return Sampling(self.args.temperature, self.args.top_k, self.args.top_p)

    def engine(
        self, model: Transformer, length: int, make: Callable | None = None, **more
    ) -> Engine:
        """length: tokens of a row. make: engines of another kind than that of the options."""
        args = self.args
        make = make or find_engine(not args.no_compile, args.no_kernels)
        cache = args.kv_cache or "16-bit"
        return make(model, length, args.batch, self.sampling(), cache=cache, **more)

    def check(self, checkpoint: Checkpoint) -> dict:
        """ValueError where the options ask to round a quantized checkpoint -> its settings."""
        settings = read_settings(checkpoint)
        check_quantize(checkpoint, settings, self.args.quantize, self.args.group_size)
        return settings

    def load(self, checkpoint: Checkpoint) -> Transformer:
        """This rank's part, rounded as the options say."""
        args = self.args
        rounded = args.quantize, self.group(checkpoint.config), args.quantize_head
        return load(checkpoint, self.device, self.dtype, *rounded, split=splitter(self.team))

    def group(self, config: Config) -> int | None:
        """That of the options, or the default for a whole model of this config."""
        args = self.args
        if args.quantize:
            self.group_size = find_group(hf_weights(config), args.quantize, args.group_size)
        return self.group_size

    def shard(self, config: Config) -> Shard | None:
        """This rank's part of a shape; None: all of it."""
        split = splitter(self.team)
        if not split:
            return None
        return split(config, self.group(config) or 1)

    def finish(self, model: Transformer, shard: Shard | None) -> Transformer:
        """A shape's model, of this rank's sizes: rounded and shared as load() does it."""
        args = self.args
        if args.quantize:
            whole = shard.whole if shard else model.config
            round_model(model, args.quantize, self.group(whole), shard=shard)
        if shard:
            shard.parallelize(model)
        if args.quantize_head:
            round_head(model, args.quantize_head)
        return model

    def describe(self, what: str) -> dict:
        """What each JSON line says of how it was measured."""
        args = self.args
        own = "batch", "new_tokens", "temperature", "top_k", "top_p", "seed"
        rounding = "quantize", "quantize_head", "kv_cache"
        kernels = not (args.no_compile or args.no_kernels) and import_fast() is not None
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
        return dict(
            what=what,
            dtype=str(self.dtype).removeprefix("torch."),
            # Of int8 None is a scale a row.
            group_size=self.group_size if args.quantize == "int4" else args.group_size,
            **{name: getattr(args, name) for name in (*rounding, *own)},
            compile=not args.no_compile,
            kernels=kernels,
            torch=torch.__version__,
            gpu=torch.cuda.get_device_name(self.device) if self.cuda else None,
            commit=commit.stdout.strip() or None,
        )


# A GPU's clocks


def gpu_seconds(run: Callable, runs: int) -> float:
    """The median by the GPU's own clock, three runs to warm up apart."""
    seconds = []
    for _ in range(runs + 3):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        seconds.append(begun.elapsed_time(ended) / 1e3)
    return statistics.median(seconds[3:])


def graph_seconds(run: Callable) -> float:
    """Of run() as a CUDA graph; the median of 20."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return gpu_seconds(graph.replay, 20)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square matrix product of random numbers; the median of 10."""
    size = 8192
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / gpu_seconds(lambda: a @ b, 10)


def all_reduce_us(device: torch.device) -> dict[str, float]:
    """Microseconds of an all-reduce of 16 KiB with the residual: by fast/'s one-shot kernel, by
    that and a norm, and by NCCL. Each is timed in a CUDA graph of 100."""
    from fast.collectives import fused_all_reduce
    from fast.linear import rms_norm

    x = torch.randn(1, 8192, device=device, dtype=torch.bfloat16)
    weight = torch.ones(8192, device=device, dtype=torch.bfloat16)

    def one_shot(h: Tensor, i: int) -> Tensor:
        return fused_all_reduce(x, h, i % 2)

    def one_shot_norm(h: Tensor, i: int) -> Tensor:
        return rms_norm(one_shot(h, i), weight, 1e-5)

    def nccl(h: Tensor, i: int) -> Tensor:
        return h + all_reduce(x)

    def chain(step: Callable) -> None:
        h = x
        for i in range(100):
            h = step(h, i)

    steps = one_shot, one_shot_norm, nccl
    return {step.__name__: 1e4 * graph_seconds(partial(chain, step)) for step in steps}


def busy_share(run: Callable) -> float:
    """The share of the decode phase in which the GPU is busy; run(at_first) calls at_first when
    prefill is over. Pauses of under 10 us count as busy: tracing puts microseconds between a CUDA
    graph's kernels, a late host takes longer."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    run(profiler.start)
    torch.cuda.synchronize()
    profiler.stop()
    cuda = torch.autograd.DeviceType.CUDA
    times = [event.time_range for event in profiler.events() if event.device_type == cuda]
    spans = sorted((time.start, time.end) for time in times)
    begun, last = spans[0]
    idle = 0.0
    for start, end in spans:
        if start - last > 10:
            idle += start - last
        last = max(last, end)
    return 1 - idle / (last - begun)

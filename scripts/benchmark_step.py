"""
Times a layer of a decode step of one row, all layers in one launch (fast/step.py) beside a layer's
own launches, on a GPU of compute capability 9.0 and up.

    python scripts/benchmark_step.py qwen3-30b-a3b --quantize int4 --group-size 128
    python scripts/benchmark_step.py llama-2-7b llama-3.2-1b --slots 200 2000 8000

Of each shape the first layers are made, with random weights and a random cache, whether or not the
engine would take one launch. A JSON line for each shape and number of slots: microseconds a layer,
the median of 20 CUDA graphs of ten steps, and how far what leaves the layers is apart, of its size. The
experts of close logits differ between both ways, which makes it larger.
"""

import signal

if __name__ == "__main__":
    # PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gc
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from cli.errors import report_errors
from cli.options import Parser, within

try:
    from fast.decoder import FusedDecoder, install_kernels
    from fast.step import LEAST_STAGES, Step, unsupported
except ModuleNotFoundError as error:
    if error.name != "fast":
        raise
    print("benchmark_step.py: fast/ is not there, whose step it times", file=sys.stderr)
    raise SystemExit(2)
from hub.checkpoint import hf_weights
from hub.formats import find_group
from llm import Options
from quantize import round_model
from scripts.measuring import graph_seconds
from scripts.shapes import MXFP4_SHAPES, SHAPES, random_model

STEPS = 10  # in a graph


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    shapes = ", ".join(SHAPES)
    parser.add_argument("what", help=f"shapes: {shapes}", nargs="+", choices=SHAPES, metavar="what")
    parser.add_options(Options, "quantize", "group_size")
    parser.add_argument(
        "--layers", help="of each (default: 12)", type=within(int, 1), default=12, metavar="N"
    )
    parser.add_argument(
        "--slots",
        help="of the cache that a step reads; a line for each (default: 200)",
        type=within(int, 1),
        nargs="+",
        default=[200],
        metavar="N",
    )
    args = parser.parse_args()
    if args.group_size and not args.quantize:
        parser.error(f"--group-size {args.group_size} goes with --quantize")
    return args


def decoder_of(what: str, args: Namespace) -> FusedDecoder:
    """The first layers of a shape, rounded as the options say, over a random cache."""
    config = SHAPES[what]
    config = replace(config, layers=config.layers[: args.layers])
    torch.manual_seed(0)
    model = random_model(config, torch.device("cuda"), torch.bfloat16, mxfp4=what in MXFP4_SHAPES)
    if args.quantize:
        group = find_group(hf_weights(config), args.quantize, args.group_size)
        round_model(model, args.quantize, group)
    model.setup(max(args.slots) + 1, 1)
    decoder = install_kernels(model)  # which adds to the caches of recurrent layers
    for layer in model.layers:
        for tensor in layer.attn.cache.buffers():
            tensor.normal_()
    return decoder


def microseconds(run: Callable, layers: int) -> float:
    return graph_seconds(lambda: [run() for _ in range(STEPS)]) / STEPS / layers * 1e6


@torch.no_grad()
def measure(what: str, args: Namespace) -> None:
    decoder = decoder_of(what, args)
    model = decoder.model
    if reason := unsupported(decoder):
        raise ValueError(f"{what}: its layers have launches of their own ({reason})")
    of = torch.cuda.get_device_properties(0)
    step = Step(decoder, of.multi_processor_count, of.shared_memory_per_block_optin)
    if step.stages() < LEAST_STAGES:
        raise ValueError(f"{what}: its inputs leave no room for a ring in shared memory")
    x = torch.randn(1, model.config.dim, device="cuda").bfloat16()
    for slots in args.slots:
        positions = torch.tensor([[slots]], device="cuda")

        def launches() -> torch.Tensor:
            y = x
            for layer in decoder.layers:
                y = layer(y, positions, None, model.rows[:1], None)
            return y

        apart = (step(x, positions).double() - launches()).norm() / launches().double().norm()
        result = dict(
            what=what,
            quantize=args.quantize,
            group_size=args.group_size,
            layers=len(decoder.layers),
            slots=slots,
            launches_us=microseconds(launches, len(decoder.layers)),
            one_launch_us=microseconds(lambda: step(x, positions), len(decoder.layers)),
            apart=apart.item(),
            gpu=torch.cuda.get_device_name(),
        )
        print(json.dumps(result), flush=True)


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise ValueError("no GPU of compute capability 9.0 and up, for which fast/step.py is")
    for what in args.what:
        measure(what, args)
        gc.collect()  # compiled layers refer to each other
        torch.cuda.empty_cache()


if __name__ == "__main__":
    report_errors(main)

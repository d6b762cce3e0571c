"""
Round a checkpoint's weights to 8 or 4 bits, and write it as a new one.

    python quantize.py --checkpoint DIR --out DIR-int4
    python quantize.py --checkpoint DIR --out DIR-gptq \\
        --gptq --act-order --calibration TEXT
    python quantize.py --checkpoint DIR --out DIR-w8a16 --quantize int8 --sym \\
        --format compressed-tensors
"""

import math
import os
import shlex
import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cli.options import DEVICE, Parser, place, within
from cli.output import written_whole
from gptq import gptq_model
from hub.checkpoint import Checkpoint, each_expert, hf_weights, load_model, read_text
from hub.formats import check_finite, find_group, say_group
from hub.tokenizer import Tokenizer
from hub.vet import (
    GIB,
    check_memory,
    find_device,
    find_dtype,
    memory_advice,
    open_checkpoint,
)
from llm import INTS, Options
from quantize import CODES, DEFAULT_GROUP, SIZES, group_of, round_model
from hub.write import CONFIGS, write_checkpoint


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    switch = partial(add, action="store_true")
    add("--checkpoint", required=True, metavar="DIR", help="directory or Hub id")
    add("--out", type=place, required=True, metavar="DIR", help="the directory to make")
    add(
        *("--quantize", "--bits"),
        type=lambda text: f"int{text}" if text.isdigit() else text,
        choices=INTS,
        default="int4",
        help="of a weight; --bits 4 and 8 say the same (default: int4)",
    )
    add(
        "--group-size",
        type=int,
        choices=(*SIZES, -1),
        help=f"weights that share a scale; -1: a row (default: int8 -1; int4 {DEFAULT_GROUP})",
    )
    add("--format", choices=CONFIGS, default="gptq", help="of the files (default: gptq)")
    switch("--gptq", help="better codes, from the inputs that --calibration gives (default: off)")
    switch("--act-order", help="with --gptq: columns of large inputs first (default: off)")
    add(
        "--calibration",
        type=place,
        metavar="FILE",
        help="with --gptq: text of the kind that the model is for (default: none)",
    )
    add(
        "--calibration-tokens",
        type=within(int, 2),
        metavar="N",
        help="with --gptq, of --calibration, in rows of 2,048 (default: 131072)",
    )
    switch(
        "--sym",
        help="zero points in the middle: less exact, and some engines want it (default: off)",
    )
    switch("--head", help="quantize the output head too (default: off)")
    parser.add_options(Options, *DEVICE)
    args = parser.parse_args()
    if args.gptq != bool(args.calibration):
        raise ValueError("--gptq and --calibration go together")
    if not args.gptq and (args.act_order or args.calibration_tokens):
        raise ValueError("--act-order and --calibration-tokens go with --gptq")
    args.calibration_tokens = args.calibration_tokens or 131072
    return args


def read_calibration(args, tokenizer: Tokenizer, context: int) -> Tensor:
    """The text's first tokens in rows of 2,048, or as many as the context holds; a partial row is
    left out."""
    path, wanted = args.calibration, args.calibration_tokens
    tokens = tokenizer.encode_text(read_text(path))
    if len(tokens) < wanted:
        raise ValueError(
            f"--calibration {path}: {len(tokens)} of --calibration-tokens {wanted}; give more text"
        )
    length = min(2048, context, wanted)
    return torch.tensor(tokens[: wanted // length * length]).view(-1, length)


def check_shapes(source: Checkpoint, args, group: int):
    """ValueError for weights that the formats cannot hold."""
    if source.hf.get("quantization_config"):
        raise ValueError(
            f"--checkpoint {args.checkpoint} is quantized already; start from the original"
        )
    if args.head and (source.config.tied or source.config.vocab_size % 8):
        raise ValueError(
            "--head: the head is the embedding here, or has no multiple of 8 rows; leave the "
            "option out"
        )
    weights = hf_weights(each_expert(source.config))
    for name, weight in weights.items():
        if weight.experts:
            raise ValueError(
                f"{name} holds all experts, the formats want them one by one: --quantize serves it"
            )
        if weight.quantized and weight.shape[0] % 8:
            raise ValueError(
                f"{name} has {weight.shape[0]} rows: the formats want a multiple of 8; --quantize "
                "serves it"
            )
    for weight in weights.values():  # after what no other group size cures
        if weight.quantized:
            group_of(weight.inputs, group)


def check_place(source: Checkpoint, out: Path, bits: int):
    """ValueError where a directory of that size cannot be made."""
    if os.path.lexists(out):
        raise ValueError(f"--out {out} exists; remove it, or name another directory")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"--out {out}: there is no directory {parent}; make it first")
    size = sum(
        math.prod(weight.shape) * (bits / 8 if weight.quantized else 2)
        for weight in source.weights.values()
    )
    free = shutil.disk_usage(parent).free
    if size > free:
        raise ValueError(
            f"--out {out}: {size / GIB:.2f} GiB are wanted, {free / GIB:.2f} are free there: free "
            "more, or name another place"
        )


def size_of(checkpoint: Checkpoint) -> str:
    """Of the files that hold its tensors."""
    from tqdm import tqdm

    paths = {place.path for place in checkpoint.files().values()}
    return tqdm.format_sizeof(sum(path.stat().st_size for path in paths), "B")


def main():
    args = parse_args()
    device = find_device(args.device)
    dtype = find_dtype(args.dtype, device)
    source, tokenizer = open_checkpoint(args.checkpoint)
    group = find_group(source.weights, args.quantize, args.group_size)
    bits = CODES[args.quantize].bits
    quantization_config = CONFIGS[args.format](bits, group, args.sym, args.act_order, args.head)
    check_shapes(source, args, group)
    check_memory([(source.config, source.weights, {})], 0, 0, device, dtype)
    check_place(source, args.out, bits)
    tokens = read_calibration(args, tokenizer, source.config.context) if args.gptq else None
    with written_whole(args.out) as made:
        with memory_advice(f"out of memory on {device}: fewer --calibration-tokens need less"):
            model = load_model(source, device, dtype, progress=True)
            check_finite(model)
            if args.group_size is None:
                say_group(args.quantize, group)
            how = args.quantize, group, args.sym
            if args.gptq:
                gptq_model(model, *how, tokens.to(device), args.act_order, args.head, progress=True)
            else:
                round_model(model, *how, args.head, progress=True)
        made.mkdir()
        write_checkpoint(model, source, made, quantization_config)
    print(
        f"{args.out}: {size_of(Checkpoint(args.out))} of weights, {size_of(source)} before\n"
        f"next: python generate.py --checkpoint {shlex.quote(str(args.out))} --compile",
        file=sys.stderr,
    )

"""
Measures decode and prefill of a public shape, with random weights made on the
device, or of a checkpoint; with --speculate, a draft against plain decoding.

    python scripts/benchmark.py llama-2-7b
    python scripts/benchmark.py llama-3.1-8b --context 32768 --against eager
    python scripts/benchmark.py llama-2-7b --quantize int4 --group-size 128
    python scripts/benchmark.py llama-2-70b --ranks 4
    python scripts/benchmark.py checkpoints/tiny --device cpu --new-tokens 100
    python scripts/benchmark.py llama-2-7b --speculate --draft-tokens 4
    python scripts/benchmark.py llama-2-7b --speculate --draft eagle --ranks 2

Each configuration is one JSON object on one line of stdout; the progress bar is
on stderr. What is compared is measured in the same run: the GPU's read
bandwidth and matrix rate, and the plain references of --against. Without fast/
there is no read bandwidth. Of several runs the median counts; first_call_s is
the first one's time to its first token, once all is compiled. one_launch says
whether all layers of a step are one (fast/step.py).
"""

import signal

if __name__ == "__main__":
    # PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tqdm import tqdm

from cli.errors import run
from cli.options import DEVICE, QUANTIZATION, Parser, within
from generate import Engine, generate
from hub.checkpoint import hf_weights
from hub.formats import bits_of
from hub.vet import (
    GIB,
    check_memory,
    find_device,
    find_dtype,
    memory_advice,
    open_checkpoint,
)
from llm import Options, find_engine, import_fast
from model import Config, DeltaCache, KVCache, MoE, Transformer
from scripts.benchmark_drafts import KINDS, STEPS, simulate
from scripts.benchmark_speculation import speculate
from scripts.measuring import Setup, all_reduce_us, matrix_rate
from scripts.others_on_cpu import CONVERTER, llama_cpp_run
from scripts.shapes import MXFP4_SHAPES, SHAPES, random_model
from tp import join


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    shapes = ", ".join(SHAPES)

    def add(name: str, help: str, **how) -> None:
        if "default" not in help and how.get("default"):
            help += f" (default: {how['default']})"
        parser.add_argument(name, help=help, **how)

    def number(name: str, default: int, least: int, help: str) -> None:
        add(name, help, type=within(int, least), default=default, metavar="N")

    def switch(name: str, help: str) -> None:
        add(name, help, action="store_true")

    add("what", f"shapes, or checkpoints (directories or Hub ids); shapes: {shapes}", nargs="*")
    number("--batch", 1, 1, "sequences at once")
    number("--prompt-length", 5, 1, "tokens of each prompt")
    number("--context", 0, 0, "tokens in the cache before it (default: 0)")
    number("--new-tokens", 200, 2, "tokens of each text")
    add("--temperature", "0: greedy", type=within(float, 0, 100), default=0.8)
    add("--top-k", "0: off", type=within(int, 0), default=200)
    add("--top-p", "1: off", type=within(float, 1e-6, 1), default=1.0)
    switch("--speculate", "give the shape the bundled model's function, and the bundled draft")
    add(
        "--draft",
        "with --speculate: the small model, or the EAGLE head at the cost of the shape's; mtp and "
        "dflash: random ones of the shape's size, whose acceptance is simulated (default: "
        "tiny-draft)",
        choices=("tiny-draft", "eagle", *KINDS),
    )
    add(
        "--tokens-per-step",
        "with --draft mtp or dflash: what acceptance is simulated for; a line for each (default: "
        "of 2,3,4 what is possible)",
        metavar="LIST",
    )
    add(
        "--draft-tokens",
        "with --speculate; each 1 to 32, auto, hf or bass; a line for each (default: auto; 3 with "
        "--draft mtp, a block with dflash)",
        metavar="LIST",
    )
    number("--seed", 0, 0, "of weights, prompts and texts (default: 0)")
    number("--runs", 5, 1, "the median counts")
    switch("--no-compile", "eager code")
    switch("--no-kernels", "compiled, but plain PyTorch only: cuBLAS and Inductor")
    add(
        "--against",
        "eager, cublas (as --no-kernels), or both, in the same run; of a checkpoint on the CPU "
        "llama.cpp, in turns; with --speculate transformers' assisted generation",
        default="",
        metavar="LIST",
    )
    add(
        "--llama-cpp",
        "llama.cpp's source, whose converter --against llama.cpp runs",
        type=Path,
        metavar="DIR",
    )
    switch("--cold-start", "time compilation with empty caches, then with full ones")
    parser.add_options(Options, *QUANTIZATION)
    number("--ranks", 1, 1, "GPUs; started under torchrun")
    parser.add_options(Options, *DEVICE)
    switch("--only-compile", "print the seconds from its start to the first token")

    args = parser.parse_args()
    args.against = [name for name in args.against.split(",") if name]
    check_against(parser, args)
    for name in ("draft_tokens", "draft"):
        if getattr(args, name) and not args.speculate:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} goes with --speculate")
    if args.cold_start and args.speculate:
        parser.error("--cold-start does not go with --speculate")
    if args.tokens_per_step and args.draft not in KINDS:
        parser.error(f"--tokens-per-step {args.tokens_per_step} goes with --draft mtp or dflash")
    try:
        wanted = args.tokens_per_step and args.tokens_per_step.split(",")
        args.tokens_per_step = wanted and [float(tokens) for tokens in wanted]
    except ValueError:
        parser.error(f"--tokens-per-step {args.tokens_per_step}: want numbers, with commas")
    args.draft_tokens = args.draft_tokens or ("" if args.draft in KINDS else "auto")
    for tokens in filter(None, args.draft_tokens.split(",")):
        Options(draft="prompt-lookup", draft_tokens=tokens)  # ValueError if it is none
    if args.group_size and not args.quantize:
        parser.error(
            f"--group-size {args.group_size} goes with --quantize; a quantized checkpoint has its "
            "own"
        )
    if not args.what:
        parser.error(f"no shape and no checkpoint given: want some of {shapes}, or a checkpoint")
    return args


def check_against(parser: Parser, args: Namespace) -> None:
    """That what --against names is known and installed."""
    known = ["transformers"] if args.speculate else ["eager", "cublas", "llama.cpp"]
    unknown = sorted({*args.against} - {*known})
    if unknown:
        wanted = " or ".join(known)
        parser.error(f"--against {','.join(unknown)}: want {wanted}, in a list with commas")
    packages = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}
    for name, package in packages.items():
        module = package.removesuffix("-python").replace("-", "_")
        if name in args.against and not find_spec(module):
            parser.error(f"--against {name}: it is not installed; pip install {package}")
    there = args.llama_cpp and (args.llama_cpp / CONVERTER).exists()
    if "llama.cpp" in args.against and not there:
        parser.error(
            f"--against llama.cpp: want --llama-cpp DIR, a clone of llama.cpp with its {CONVERTER}"
        )


def build(what: str, setup: Setup) -> Transformer:
    """The model, if it fits, once what was measured before it is gone."""
    torch._dynamo.reset()
    gc.collect()  # compiled layers refer to each other
    args, checkpoint, mxfp4 = setup.args, None, what in MXFP4_SHAPES
    bits = {}
    if what not in SHAPES:
        if not Path(what).exists() and "/" not in what:
            raise ValueError(
                f"{what}: no such shape and no such directory; the shapes are {', '.join(SHAPES)}"
            )
        checkpoint, _ = open_checkpoint(what, tokenizer=False)
        setup.check(checkpoint)
        bits = bits_of(checkpoint)
    config = checkpoint.config if checkpoint else SHAPES[what]
    if mxfp4:
        bits = {name: 4 for name, weight in hf_weights(config).items() if weight.experts}
    length = length_of(args)
    if length > config.context:
        raise ValueError(
            f"--context {args.context}, --prompt-length {args.prompt_length} and --new-tokens "
            f"{args.new_tokens} make {length} tokens: the context of {what} is {config.context}"
        )
    where = setup.device, setup.dtype
    kind = args.kv_cache or "16-bit"
    weights = checkpoint.weights if checkpoint else hf_weights(config)
    check_memory([(config, weights, bits)], args.batch, length, *where, setup.team.ranks, kind=kind)
    if checkpoint:
        return setup.load(checkpoint)
    shard = setup.shard(config)
    model = setup.finish(random_model(config, *where, shard, mxfp4), shard)
    torch.manual_seed(args.seed)  # parts may differ in size
    return model


def length_of(args: Namespace) -> int:
    return args.context + args.prompt_length + args.new_tokens


def ready(model: Transformer, setup: Setup, **how) -> Engine:
    """Compiled, where that is asked for."""
    engine = setup.engine(model, length_of(setup.args), **how)
    if engine.compiled:
        engine.warm_up(setup.args.batch, alone=setup.team.ranks == 1)
    return engine


def one_run(engine: Engine, args: Namespace, made: list | None = None) -> tuple[float, float]:
    """Seconds to the first token, and from it to the last a step. made: gets each step's tokens."""
    shape = args.batch, args.prompt_length
    prompts = torch.randint(engine.model.config.vocab_size, shape).tolist()
    times = []
    begun = time.perf_counter()
    for rows in generate(engine, prompts, args.new_tokens, args.context):
        times.append(time.perf_counter())
        if made is not None:
            made.append([pairs[0][0] for pairs in rows])
    return times[0] - begun, (times[-1] - times[0]) / (len(times) - 1)


def compile_seconds(what: str, setup: Setup) -> float:
    """From the start of compilation to the first token."""
    model = build(what, setup)
    begun = time.perf_counter()
    engine = ready(model, setup)
    one_run(engine, Namespace(**vars(setup.args) | dict(new_tokens=2)))
    return time.perf_counter() - begun


# What a step reads, what a prompt computes


@torch.no_grad()
def share_of_experts(engine: Engine, steps: list[list[int]]) -> float:
    """Which part of a layer's experts a step reads: those that its rows choose, together; the mean
    over steps and sparse layers. The tokens that each step gave are read once more, as a prompt,
    and what goes into the mixtures is routed once more, on the device."""
    model, chosen = engine.model, []
    tokens = torch.tensor(steps, device=engine.device).T  # [B, T]
    B, T = tokens.shape

    def look(ffn, inputs) -> None:  # a MoE, or what holds one
        moe = next(module for module in ffn.modules() if isinstance(module, MoE))
        _, experts = moe.route(inputs[0].flatten(0, 1))
        of_row = torch.zeros(B, T, moe.moe.n_expert, device=experts.device)
        chosen.append(of_row.scatter_(2, experts.view(B, T, -1), 1).amax(0).mean())

    sparse = [layer.ffn for layer in model.layers if layer.config.moe]
    hooks = [ffn.register_forward_pre_hook(look) for ffn in sparse]
    with torch.compiler.set_stance("force_eager"):
        model(tokens, torch.arange(T, device=engine.device)[None], engine.slots(T))
    for hook in hooks:
        hook.remove()
    assert len(chosen) == len(sparse)
    return torch.stack(chosen).mean().item()


def weight_bytes(model: Transformer) -> int:
    """Of the weights; what several modules have is counted once."""
    sizes = {}
    for weight in model.parameters():
        place = weight.data_ptr()
        sizes[place] = max(sizes.get(place, 0), weight.nbytes)
    return sum(sizes.values())


def step_bytes(model: Transformer, share: float | None) -> float:
    """Of the weights, as the engine has repacked them, what a step reads: all but embeddings of
    which one row is read, and but the experts that no row chose. share: of the experts."""
    read = weight_bytes(model)
    if model.ple is not None:
        read -= model.ple.table.weight.nbytes
    if getattr(model.head, "weight", None) is not model.embed.weight:
        read -= model.embed.weight.nbytes
    for layer in model.layers:
        if layer.config.moe:
            mixture = layer.ffn.moe if layer.config.moe.beside_dense else layer.ffn
            for name, weight in mixture.named_parameters():
                if not any(of in name for of in ("router", "shared", "expert_scale")):
                    read -= weight.nbytes * (1 - share)
    return read


def prompt_operations(config: Config, args: Namespace) -> float:
    """Two a token and weight of the layers, of experts those that it chose, and attention's under
    the mask."""
    weights = 0
    moe = next((layer.moe for layer in config.layers if layer.moe), None)
    for weight in hf_weights(config).values():
        is_expert = weight.experts or weight.expert is not None
        used = moe.n_chosen / moe.n_expert if is_expert else 1
        is_matrix = weight.quantized or weight.ours.endswith("attn.wkv.weight")
        weights += is_matrix * math.prod(weight.shape) * used
    T, attention = args.prompt_length, 0
    for layer in config.layers:
        if not layer.delta:
            H, _, E = config.heads(layer)
            latent, sizes = layer.latent, 2 * E  # of a head's key and value
            if latent:
                sizes = latent.key_dim + E + latent.value_dim
            seen = (min(layer.window or 2**62, args.context + t + 1) for t in range(T))
            attention += 2 * H * sizes * sum(seen)
    return args.batch * (2 * weights * T + attention)


def cached_bytes(config: Config, dtype: torch.dtype, kind: str, length: float) -> float:
    """Keys and values that a step reads of one row of so many tokens. A layer that reads an earlier
    one's counts, too."""
    read = 0
    for layer in config.layers:
        if not layer.delta:
            alone = replace(config, layers=(replace(layer, kv_of=None),))
            each = KVCache.bytes_per_token(alone, dtype, kind)
            read += each * min(layer.window or 2**62, length)
    return read


# The measurement


def measure(what: str, setup: Setup, bar: tqdm) -> dict:
    """The JSON line. Bytes of a step, see step_bytes(), and the keys and values in use; all are a
    rank's. It is long as one list of a line's keys: each is measured and named in one place."""
    args, device, dtype, cuda = setup.args, setup.device, setup.dtype, setup.cuda
    model = build(what, setup)
    config = model.config
    peak_rate = matrix_rate(device, dtype) if cuda else None
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    engine = ready(model, setup)
    plain = [name for name in args.against if name != "llama.cpp"]
    llama_cpp = None
    if "llama.cpp" in args.against:
        llama_cpp = llama_cpp_run(what, setup)
        llama_cpp()  # warms up

    runs, made, theirs = [], [], []
    for _ in range(args.runs):
        made.clear()
        runs.append(one_run(engine, args, made))
        bar.update()
        if llama_cpp:  # in turns: a CPU that others use is faster at one time than at another
            theirs.append(llama_cpp())
            bar.update()
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    first, step = (statistics.median(column) for column in zip(*runs))
    steps = sorted(1 / seconds for _, seconds in runs)

    sparse = any(layer.moe for layer in config.layers)
    share = share_of_experts(engine, made) if sparse else None
    weights = weight_bytes(model)
    kind = args.kv_cache or "16-bit"
    token_kv = args.batch * KVCache.bytes_per_token(config, dtype, kind)
    length = args.context + args.prompt_length + args.new_tokens / 2
    in_use = args.batch * cached_bytes(config, dtype, kind, length)
    # A step reads one of the two states of each row and recurrent layer.
    in_use += args.batch * sum(
        layer.attn.cache.states[0, 0].nbytes for layer in model.layers if layer.config.delta
    )
    rate = (step_bytes(model, share) + in_use) / step
    fast = import_fast()
    # Smaller ones sit in the cache.
    read = fast.read_bandwidth(model) if fast and cuda and weights >= GIB else None
    prompt_rate = prompt_operations(config, args) / first
    one_row = getattr(getattr(engine, "decoder", None), "one_row", None)
    result = setup.describe(what) | dict(
        ranks=setup.team.ranks,
        prompt_length=args.prompt_length,
        context=args.context,
        one_launch=args.batch == 1 and one_row is not None,
        tokens_per_s=args.batch / step,
        steps_per_s=dict(median=1 / step, low=steps[0], high=steps[-1], runs=len(runs)),
        ms_per_token=1e3 * step,
        gb_per_s=rate / 1e9,
        read_gb_per_s=read and read / 1e9,
        share_of_read=read and rate / read,
        first_token_s=first,
        first_call_s=runs[0][0],
        prefill_tflops=prompt_rate / 1e12,
        matrix_tflops=peak_rate and peak_rate / 1e12,
        share_of_matrix=peak_rate and prompt_rate / peak_rate,
        weights_bytes=weights,
        share_of_experts=share,
        cache_bytes=token_kv * len(model.slots)
        + args.batch * DeltaCache.bytes_per_row(config, dtype),
        compile_cold_s=None,
        compile_warm_s=None,
        peak_memory_bytes=peak,
        against={},
    )
    if llama_cpp:
        seconds = statistics.median(theirs)
        result["against"]["llama.cpp"] = dict(tokens_per_s=1 / seconds, ratio=seconds / step)
    for name in plain:
        model = engine = None  # their memory is needed
        make = find_engine(compile=name == "cublas", no_kernels=True)
        engine = ready(build(what, setup), setup, make=make)
        seconds = []
        for _ in range(args.runs):
            seconds.append(one_run(engine, args)[1])
            bar.update()
        middle = statistics.median(seconds)
        result["against"][name] = dict(steps_per_s=1 / middle, ratio=middle / step)
    if setup.team.ranks > 1:
        result["all_reduce_us"] = all_reduce_us(device) if cuda and fast else None
    return result


# Processes of their own


def in_processes(what: str, args: Namespace, *more: str, env: dict | None = None) -> str:
    """What this script prints for `what`, run anew, by torchrun if there are ranks."""
    command = [sys.executable]
    if args.ranks > 1:
        ranks = str(args.ranks)
        command += "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    options = [option for option in sys.argv[1:] if option not in ("--cold-start", *args.what)]
    ended = subprocess.run(
        [*command, __file__, what, *options, *more], env=env, stdout=subprocess.PIPE
    )
    if ended.returncode:
        raise ValueError(f"{what} ended with exit code {ended.returncode}, as said above")
    return ended.stdout


def cold_start(what: str, args: Namespace) -> dict[str, float]:
    """Seconds from the start of compilation to the first token, in new processes: without caches,
    then with them."""
    times = {}
    with tempfile.TemporaryDirectory() as caches:
        folders = dict(
            TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor", TRITON_CACHE_DIR=f"{caches}/triton"
        )
        for name in ("compile_cold_s", "compile_warm_s"):
            said = in_processes(what, args, "--only-compile", env=os.environ | folders)
            times[name] = float(said)
    return times


def measurements(what: str, setup: Setup) -> Iterator[dict]:
    args = setup.args
    count = args.runs * (1 + len(args.against))
    if args.speculate:
        lists = len(args.draft_tokens.split(","))
        count = 1 + args.runs * (1 + lists if setup.cuda else 2 * lists)
    if args.draft in KINDS:
        count = 1 + args.runs * (1 + lists * len(args.tokens_per_step or STEPS))
    advice = (
        f"{what}: the weights and caches fit, what is computed with them does not; a smaller "
        "--batch, --context or --prompt-length helps"
    )
    with tqdm(total=count, desc=what, unit="run", disable=None) as bar, memory_advice(advice):
        if args.draft in KINDS:
            yield from simulate(what, setup, bar)
        elif args.speculate:
            yield from speculate(what, setup, bar)
        else:
            yield measure(what, setup, bar)


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    args = parse_args()
    starts_ranks = args.ranks > 1 and "WORLD_SIZE" not in os.environ
    if not starts_ranks:
        name, team = join(args.device)
        device = find_device(name)
        setup = Setup(args, device, find_dtype(args.dtype, device), team)
        torch.manual_seed(args.seed)  # the ranks have the same embedding, prompts and draws
    for what in args.what:
        if args.only_compile and not starts_ranks:
            print(compile_seconds(what, setup))
            continue
        times = cold_start(what, args) if args.cold_start else {}
        if starts_ranks:
            lines = map(json.loads, in_processes(what, args).splitlines())
        else:
            lines = measurements(what, setup)
        for line in lines:
            print(json.dumps(line if args.only_compile else line | times), flush=True)


if __name__ == "__main__":
    run(main)

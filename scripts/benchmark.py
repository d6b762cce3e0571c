"""
Measures decode and prefill of a public shape, with random weights made on the
device, or of a checkpoint.

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
there is no read bandwidth.
"""

import signal

if (
    __name__ == "__main__"
):  # PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gc
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from hub.checkpoint import Checkpoint, Weight, hf_weights  # noqa: E402
from cli.errors import run  # noqa: E402
from cli.options import DEVICE, QUANTIZATION, Parser, within  # noqa: E402
from drafts import open_draft  # noqa: E402
from drafts.eagle import EagleDraft, Head, HeadCheckpoint, head_weights  # noqa: E402
from hub.formats import check_quantize, load, read_settings  # noqa: E402
from llm import TINY, Options, find_engine, import_fast  # noqa: E402
from generate import Engine, generate  # noqa: E402
from hub.vet import (
    GIB,
    check_memory,
    find_device,
    find_dtype,
    memory_advice,
    open_checkpoint,
)  # noqa: E402

# noqa: E402
from model import Block, Config, Experts, KVCache, LayerConfig, MoE, RMSNorm, Transformer
from drafts.policies import make_policy  # noqa: E402

# noqa: E402
from quantize import MXFP4, QuantizedExperts, default_group, replace_layers, round_head, round_model
from generate import Sampling  # noqa: E402
from shapes import MXFP4_SHAPES, SHAPES  # noqa: E402
from speculative import SLACK, DraftModel, Speculator  # noqa: E402
from tp import Shard, Team, all_reduce, draft_splitter, join, splitter  # noqa: E402

OPENINGS = [
    f"{time}, {who}"
    for who in ("a little girl named Lily", "a big dog", "Tom and his mom", "an old tree")
    for time in ("Once upon a time, there was", "One day", "In the park", "Every night")
]

CONVERTER = "convert_hf_to_gguf.py"


def random_model(
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard | None = None,
    mxfp4: bool = False,
) -> Transformer:
    """mxfp4: the experts have such codes."""
    with torch.device("meta"):
        model = shard.model() if shard else Transformer(config)
        if mxfp4:
            replace_layers(model, Experts, empty_mxfp4)
    return fill(model, device, dtype)


def fill(model: Transformer, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Normal weights of a scale that keeps activations near 1; norms are 1."""
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    if model.config.tied:
        model.head.weight = model.embed.weight
    for weight in model.parameters():
        if weight.dtype == torch.int32:
            weight.random_(-(2**31), 2**31 - 1)
        elif weight.dtype == torch.uint8:
            weight.fill_(120)  # 2 ** -7, for numbers whose mean square is 7
        else:
            weight.fill_(1) if weight.dim() == 1 else weight.normal_(std=0.02)
    return model


def empty_mxfp4(layer: Experts) -> QuantizedExperts:
    X, N, K = layer.weight.shape
    qweight = torch.empty(X, N, K // 8, dtype=torch.int32)
    return QuantizedExperts(
        qweight, torch.empty(X, N, K // 32, dtype=torch.uint8), None, MXFP4, layer.bias
    )


def widen(
    tiny: Transformer, config: Config, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A model of config's shape and cost, tiny's vocabulary and tiny's function: more heads, ffn
    rows and layers are random and write nothing, more residual coordinates stay zero, and norms
    make up for these in their mean square.

    ValueError if tiny does not fit into the shape."""
    small, D, d, E = tiny.config, config.dim, tiny.config.dim, config.head_dim
    for name in ("dim", "n_layer", "n_kv_head", "ffn_dim", "context"):
        if getattr(small, name) > getattr(config, name):
            raise ValueError(
                f"--speculate: the bundled model's {name} of {getattr(small, name)} exceeds the "
                f"shape's"
            )
    if E != small.head_dim or config.n_kv_head < small.n_head:
        raise ValueError(
            f"--speculate: want heads of {small.head_dim}, {small.n_head} kv heads, for the "
            f"bundled model"
        )
    layers = (LayerConfig(rope=small.layers[0].rope),) * config.n_layer
    wide = random_model(
        replace(
            config,
            vocab_size=small.vocab_size,
            norm_eps=small.norm_eps * d / D,
            qk_norm=None,
            layers=layers,
            tied=False,
        ),
        device,
        dtype,
    )
    copied = dict(tiny.named_parameters(remove_duplicate=False))
    wide.embed.weight[:, d:] = 0
    wide.embed.weight[:, :d] = copied["embed.weight"]
    wide.head.weight[:, :d] = copied["head.weight"]
    widen_norm(wide.norm, tiny.norm)
    for i, layer in enumerate(wide.layers):
        layer.attn.wo.weight.zero_()
        layer.ffn.w_down.weight.zero_()
        if i < small.n_layer:
            widen_layer(layer, tiny.layers[i], small, config, [0])
    return wide


def part_for(shard: Shard, whole: Transformer) -> Transformer:
    """The rank's part of a model, or of a head."""
    weight = whole.embed.weight

    def make(config: Config) -> Transformer:
        return Head(config, whole.options, whole.vocabulary) if head else Transformer(config)

    def weights(config: Config) -> dict[str, Weight]:
        return head_weights(config, whole.options) if head else hf_weights(config)

    head = isinstance(whole, Head)
    with torch.device("meta"):
        model = shard.model(make)
    model = model.to(weight.dtype).to_empty(device=weight.device).requires_grad_(False)
    ours, theirs = (dict(of.named_parameters()) for of in (model, whole))
    places = weights(model.config)
    for name, place in weights(whole.config).items():
        rows, columns = shard.part(place)
        tensor = place.of(theirs[place.ours])[rows]
        places[name].of(ours[place.ours]).copy_(tensor if tensor.dim() == 1 else tensor[:, columns])
    return model


def widen_norm(wide: RMSNorm, tiny: RMSNorm) -> None:
    d, D = len(tiny.weight), len(wide.weight)
    wide.weight[:d] = tiny.weight * (d / D) ** 0.5


def widen_layer(
    layer: Block, tiny: Block, small: Config, config: Config, inputs: list[int]
) -> None:
    """Gives the layer tiny's function. inputs: the columns of wqkv at which tiny's d inputs, and
    the next d, begin."""
    H, G, F, E, d = (
        config.n_head,
        config.n_head // config.n_kv_head,
        config.ffn_dim,
        config.head_dim,
        small.dim,
    )
    widen_norm(layer.attn_norm, tiny.attn_norm)
    widen_norm(layer.ffn_norm, tiny.ffn_norm)
    wqkv = layer.attn.wqkv.weight.unflatten(0, (-1, E))  # [H + 2 K, E, D or 2 D]
    theirs, wo = tiny.attn.wqkv.weight.unflatten(0, (-1, E)), tiny.attn.wo.weight
    for head in range(
        small.n_head
    ):  # each gets a kv head of its own, and is the first of those that share it
        kv = head // (small.n_head // small.n_kv_head)
        for n, at in enumerate(inputs):
            columns, own = slice(at, at + d), slice(n * d, (n + 1) * d)
            wqkv[head * G, :, columns] = theirs[head, :, own]
            wqkv[H + head, :, columns] = theirs[small.n_head + kv, :, own]
            wqkv[H + config.n_kv_head + head, :, columns] = theirs[
                small.n_head + small.n_kv_head + kv, :, own
            ]
        layer.attn.wo.weight[:d, head * G * E : (head * G + 1) * E] = wo[
            :, head * E : (head + 1) * E
        ]
    gate, up = tiny.ffn.w_gate_up.weight.chunk(2)
    layer.ffn.w_gate_up.weight[: len(gate), :d] = gate
    layer.ffn.w_gate_up.weight[F : F + len(up), :d] = up
    layer.ffn.w_down.weight[:d, : len(gate)] = tiny.ffn.w_down.weight


def widen_head(tiny: Head, target: Transformer, config: Config) -> Head:
    """The bundled head for target, the bundled model widened to config's shape: it costs what an
    EAGLE-3 head of that shape does, and has tiny's function. Of its 32,000 rows of output tiny's
    tokens are the first, and no other counts: see EagleDraft.choose()."""
    small, d, D = tiny.config, tiny.config.dim, config.dim
    sizes = dict(
        n_head=config.n_head, n_kv_head=config.n_kv_head, ffn_dim=config.ffn_dim
    )  # the target may be a part
    whole = replace(target.config, layers=target.config.layers[:1], **sizes)
    options = replace(tiny.options, target_dim=D, vocab_size=max(32000, tiny.options.vocab_size))
    with torch.device("meta"):
        wide = Head(whole, options, tiny.vocabulary)
    wide = fill(wide, target.embed.weight.device, target.embed.weight.dtype)
    wide.embed = target.embed
    layer, [own] = wide.layers[0], tiny.layers
    layer.attn.wo.weight.zero_()
    layer.ffn.w_down.weight.zero_()
    widen_layer(layer, own, small, config, [0, D])
    widen_norm(layer.state_norm, own.state_norm)
    widen_norm(wide.norm, tiny.norm)
    wide.head.weight[: len(tiny.head.weight), :d] = tiny.head.weight
    wide.fc.weight[d:] = 0
    for n in range(len(options.places)):
        wide.fc.weight[:d, n * D : n * D + d] = tiny.fc.weight[:, n * d : (n + 1) * d]
    return wide


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        help=f"shapes, or checkpoints (directories or Hub ids); shapes: {', '.join(SHAPES)}",
    )
    add(
        "--batch",
        type=within(int, 1),
        default=1,
        metavar="N",
        help="sequences at once (default: 1)",
    )
    add(
        "--prompt-length",
        type=within(int, 1),
        default=5,
        metavar="N",
        help="tokens of each prompt (default: 5)",
    )
    add(
        "--context",
        type=within(int, 0),
        default=0,
        metavar="N",
        help="tokens in the cache before it (default: 0)",
    )
    add("--new-tokens", type=within(int, 2), default=200, metavar="N", help="default: 200")
    add("--temperature", type=within(float, 0, 100), default=0.8, help="default: 0.8")
    add("--top-k", type=within(int, 0), default=200, help="default: 200")
    add("--top-p", type=within(float, 1e-6, 1), default=1.0, help="default: 1, off")
    add(
        "--speculate",
        action="store_true",
        help="give the shape the bundled model's function, and the bundled draft",
    )
    add(
        "--draft",
        choices=("tiny-draft", "eagle"),
        help="with --speculate: the small model, or the EAGLE head at the "
        "cost of the shape's (default: tiny-draft)",
    )
    add(
        "--draft-tokens",
        metavar="LIST",
        help="with --speculate; each 1 to 32, auto, hf or bass; a line for each (default: auto)",
    )
    add(
        "--seed",
        type=within(int, 0),
        default=0,
        metavar="N",
        help="of weights, prompts and texts (default: 0)",
    )
    add("--runs", type=within(int, 1), default=5, metavar="N", help="default: 5; the median counts")
    add("--no-compile", action="store_true", help="eager code")
    add(
        "--no-kernels",
        action="store_true",
        help="compiled, but plain PyTorch only: cuBLAS and Inductor",
    )
    add(
        "--against",
        default="",
        metavar="LIST",
        help="eager, cublas (as --no-kernels), or both, in the same run; of a "
        "checkpoint on the CPU llama.cpp, in turns; with --speculate transformers' assisted "
        "generation",
    )
    add(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help="llama.cpp's source, whose converter --against llama.cpp runs",
    )
    add(
        "--cold-start",
        action="store_true",
        help="time compilation with empty caches, then with full ones",
    )
    parser.add_options(Options, *QUANTIZATION)
    add(
        "--ranks",
        type=within(int, 1),
        default=1,
        metavar="N",
        help="GPUs; started under torchrun (default: 1)",
    )
    parser.add_options(Options, *DEVICE)
    add(
        "--only-compile",
        action="store_true",
        help="print the seconds from its start to the first token",
    )
    args = parser.parse_args()
    known = ["transformers"] if args.speculate else ["eager", "cublas", "llama.cpp"]
    if unknown := set(args.against.split(",")) - {"", *known}:
        parser.error(
            f"--against {','.join(sorted(unknown))}: want {' or '.join(known)}, in a list with "
            f"commas"
        )
    for name, module, package in (
        ("transformers",) * 3,
        ("llama.cpp", "llama_cpp", "llama-cpp-python"),
    ):
        if name in args.against and not find_spec(module):
            parser.error(f"--against {name}: it is not installed; pip install {package}")
    if "llama.cpp" in args.against and not (
        args.llama_cpp and (args.llama_cpp / CONVERTER).exists()
    ):
        parser.error(
            f"--against llama.cpp: want --llama-cpp DIR, a clone of llama.cpp with its {CONVERTER}"
        )
    for name in ("draft_tokens", "draft"):
        if getattr(args, name) and not args.speculate:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} goes with --speculate")
    args.draft_tokens = args.draft_tokens or "auto"
    for tokens in args.draft_tokens.split(","):
        Options(draft="prompt-lookup", draft_tokens=tokens)
    if args.group_size and not args.quantize:
        parser.error(
            f"--group-size {args.group_size} goes with --quantize; a quantized checkpoint has its "
            f"own"
        )
    if not args.what:
        parser.error(
            f"no shape and no checkpoint given: want some of {', '.join(SHAPES)}, or a checkpoint"
        )
    return args


def build(
    what: str, args: Namespace, device: torch.device, dtype: torch.dtype, team: Team
) -> Transformer:
    """The model, if it fits, once what was measured before it is gone."""
    torch._dynamo.reset()
    gc.collect()  # compiled layers refer to each other
    checkpoint, settings, mxfp4 = None, {}, what in MXFP4_SHAPES
    if what not in SHAPES:
        if not Path(what).exists() and "/" not in what:
            raise ValueError(
                f"{what}: no such shape and no such directory; the shapes are {', '.join(SHAPES)}"
            )
        checkpoint, _ = open_checkpoint(what, tokenizer=False)
        settings = read_settings(checkpoint)
        check_quantize(checkpoint, settings, args.quantize, args.group_size)
    config = checkpoint.config if checkpoint else SHAPES[what]
    length = args.context + args.prompt_length + args.new_tokens
    if length > config.context:
        raise ValueError(
            f"--context {args.context}, --prompt-length {args.prompt_length} and --new-tokens "
            f"{args.new_tokens} make {length} tokens: the context of {what} is {config.context}"
        )
    check_memory(
        [(config, settings.get("bits", 4 if mxfp4 else None))],
        args.batch,
        length,
        device,
        dtype,
        team.ranks,
        kind=args.kv_cache or "16-bit",
    )
    split = splitter(team)
    if checkpoint:
        return load(
            checkpoint,
            device,
            dtype,
            args.quantize,
            args.group_size,
            args.quantize_head,
            split=split,
        )
    shard = split(config, default_group(args.quantize, args.group_size)) if split else None
    model = finish(random_model(config, device, dtype, shard, mxfp4), args, shard)
    torch.manual_seed(args.seed)  # parts may differ in size
    return model


def finish(model: Transformer, args: Namespace, shard: Shard | None) -> Transformer:
    """A shape's model, quantized and shared as the options say."""
    if args.quantize:
        round_model(model, args.quantize, args.group_size, shard=shard)
    if shard:
        shard.parallelize(model)
    if args.quantize_head:
        round_head(model, args.quantize_head)
    return model


def ready(model: Transformer, args: Namespace, team: Team, make: Callable | None = None) -> Engine:
    """Compiled, where that is asked for. make: another class of engines than the options'."""
    max_seq_len = args.context + args.prompt_length + args.new_tokens
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    make = make or find_engine(not args.no_compile, args.no_kernels)
    engine = make(model, max_seq_len, args.batch, sampling, cache=args.kv_cache or "16-bit")
    if engine.compiled:
        engine.warm_up(args.batch, alone=team.ranks == 1)
    return engine


def all_reduce_us(device: torch.device) -> dict[str, float]:
    """Microseconds of an all-reduce of 16 KiB with the residual: by fast/'s one-shot kernel, by
    that and a norm, and by NCCL. Each is timed in a CUDA graph of 100."""
    from fast.collectives import fused_all_reduce
    from fast.linear import rms_norm

    x, weight = (
        torch.randn(1, 8192, device=device, dtype=torch.bfloat16),
        torch.ones(8192, device=device).bfloat16(),
    )

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

    return {
        step.__name__: 1e4 * graph_seconds(partial(chain, step))
        for step in (one_shot, one_shot_norm, nccl)
    }


def one_run(engine: Engine, args: Namespace, made: list | None = None) -> tuple[float, float]:
    """Seconds to the first token, and from it to the last a step. made: gets each step's tokens."""
    prompts = torch.randint(
        engine.model.config.vocab_size, (args.batch, args.prompt_length)
    ).tolist()
    times = []
    begun = time.perf_counter()
    for rows in generate(engine, prompts, args.new_tokens, args.context):
        times.append(time.perf_counter())
        if made is not None:
            made.append([pairs[0][0] for pairs in rows])
    return times[0] - begun, (times[-1] - times[0]) / (len(times) - 1)


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


def llama_cpp_run(
    what: str, args: Namespace, device: torch.device, dtype: torch.dtype
) -> Callable[[], float]:
    """llama.cpp with the weights of a checkpoint, converted by its own code, and our number of
    threads -> a run as one_run()'s, which returns the seconds a step."""
    if what in SHAPES or device.type != "cpu" or args.batch > 1 or args.context or args.temperature:
        raise ValueError(
            "--against llama.cpp: want a checkpoint on the CPU, --batch 1, --context 0, "
            "--temperature 0"
        )
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(
        logging.ERROR
    )  # it tells of each matrix that it rounds
    directory = open_checkpoint(what, tokenizer=False)[0].directory
    kind = dict(float32="f32", float16="f16", bfloat16="bf16")[str(dtype).removeprefix("torch.")]
    with tempfile.TemporaryDirectory() as folder:
        path, rounded = Path(folder, "model.gguf"), Path(folder, "rounded.gguf")
        convert = (
            sys.executable,
            args.llama_cpp / CONVERTER,
            directory,
            "--outfile",
            path,
            "--outtype",
            kind,
        )
        done = subprocess.run(convert, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                f"--against llama.cpp: {CONVERTER}: "
                f"{(done.stderr.strip() or 'failed').splitlines()[-1]}"
            )
        if args.quantize:
            params = llama_cpp.llama_model_quantize_default_params()
            kind = dict(int8="Q8_0", int4="Q4_0")[args.quantize]
            params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
            if llama_cpp.llama_model_quantize(bytes(path), bytes(rounded), params):
                raise ValueError(f"--against llama.cpp: it cannot round {what} to {kind}")
            path = rounded
        threads = torch.get_num_threads()
        model = llama_cpp.Llama(
            str(path),
            n_ctx=args.prompt_length + args.new_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            use_mmap=False,
            verbose=False,
        )

    def run() -> float:
        prompt = torch.randint(model.n_vocab(), (args.prompt_length,)).tolist()
        tokens = model.generate(prompt, temp=0)
        next(tokens)
        begun = time.perf_counter()
        for _ in range(args.new_tokens - 1):
            next(tokens)
        return (time.perf_counter() - begun) / (args.new_tokens - 1)

    return run


def in_processes(what: str, args: Namespace, *more: str, env: dict | None = None) -> str:
    """What this script prints for `what`, run anew, by torchrun if there are ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    options = [option for option in sys.argv[1:] if option not in ("--cold-start", *args.what)]
    command = [
        sys.executable,
        *(torchrun if args.ranks > 1 else ()),
        __file__,
        what,
        *options,
        *more,
    ]
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE)
    if ended.returncode:
        raise ValueError(f"{what} ended with exit code {ended.returncode}, as said above")
    return ended.stdout


def cold_start(what: str, args: Namespace) -> tuple[float, float]:
    """Seconds from the start of compilation to the first token, in new processes: without caches,
    then with them."""
    with tempfile.TemporaryDirectory() as caches:
        env = os.environ | dict(
            TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor", TRITON_CACHE_DIR=f"{caches}/triton"
        )
        return tuple(float(in_processes(what, args, "--only-compile", env=env)) for _ in range(2))


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


def setting(what: str, args: Namespace, device: torch.device, dtype: torch.dtype) -> dict:
    """What every JSON line says of how it was measured."""
    return dict(
        what=what,
        dtype=str(dtype).removeprefix("torch."),
        quantize=args.quantize,
        group_size=args.group_size,
        quantize_head=args.quantize_head,
        kv_cache=args.kv_cache,
        batch=args.batch,
        new_tokens=args.new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        compile=not args.no_compile,
        kernels=not (args.no_compile or args.no_kernels) and import_fast() is not None,
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        commit=commit(),
    )


def measure(what: str, args: Namespace, device: torch.device, team: Team, bar: tqdm) -> dict:
    """The JSON line. Bytes of a step are the weights, less an embedding of which one row is read
    and the experts that no row chose, and the keys and values in use; operations of a prompt: two a
    token and weight of the layers (of experts, those that it chose), and attention's under the
    mask. All of these are a rank's. It is long as one list of a line's keys: each is measured and
    named in one place."""
    dtype = find_dtype(args.dtype, device)
    cuda = device.type == "cuda"
    model = build(what, args, device, dtype, team)
    config = model.config
    moe = next((layer.moe for layer in config.layers if layer.moe), None)
    layers = 0
    for weight in hf_weights(config).values():
        used = moe.n_chosen / moe.n_expert if weight.experts or weight.expert is not None else 1
        layers += weight.quantized * math.prod(weight.shape) * used
    peak_rate = matrix_rate(device, dtype) if cuda else None

    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    engine = ready(model, args, team)
    weights = sum(weight.nbytes for weight in model.parameters())  # as the engine has repacked them
    embedding = (
        model.embed.weight.nbytes
        if getattr(model.head, "weight", None) is not model.embed.weight
        else 0
    )
    experts = sum(
        weight.nbytes
        for layer in model.layers
        if layer.config.moe
        for name, weight in layer.ffn.named_parameters()
        if "router" not in name
    )
    others = args.against.split(",") if args.against else []
    runs, made, theirs = [], [], []
    if "llama.cpp" in others:
        others.remove("llama.cpp")
        llama_cpp = llama_cpp_run(what, args, device, dtype)
        llama_cpp()  # warms up
    else:
        llama_cpp = None
    for _ in range(args.runs):
        made.clear()
        runs.append(one_run(engine, args, made))
        bar.update()
        if llama_cpp:  # in turns: a CPU that others use is faster at one time than at another
            theirs.append(llama_cpp())
            bar.update()
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    share = share_of_experts(engine, made) if moe else None
    fast = import_fast()
    read = (
        fast.read_bandwidth(model) if fast and cuda and weights >= GIB else None
    )  # smaller ones sit in the cache
    first, step = (statistics.median(column) for column in zip(*runs))
    steps = sorted(1 / seconds for _, seconds in runs)
    token_kv = KVCache.bytes_per_token(config, dtype, args.kv_cache or "16-bit")
    T = args.prompt_length
    windows = [layer.window or 2**62 for layer in config.layers]
    length = args.context + T + args.new_tokens / 2
    in_use = args.batch * token_kv * statistics.mean(min(window, length) for window in windows)
    cache = args.batch * token_kv * len(model.slots)
    rate = (weights - embedding - experts * (1 - (share or 0)) + in_use) / step
    seen = sum(
        min(window, args.context + t + 1) for window in windows for t in range(T)
    )  # (layer, token, token seen)
    operations = args.batch * (2 * layers * T + 4 * config.n_head * config.head_dim * seen)
    result = setting(what, args, device, dtype) | dict(
        ranks=team.ranks,
        prompt_length=T,
        context=args.context,
        tokens_per_s=args.batch / step,
        steps_per_s=dict(median=1 / step, low=steps[0], high=steps[-1], runs=len(runs)),
        ms_per_token=1e3 * step,
        gb_per_s=rate / 1e9,
        read_gb_per_s=read and read / 1e9,
        share_of_read=read and rate / read,
        first_token_s=first,
        prefill_tflops=operations / first / 1e12,
        matrix_tflops=peak_rate and peak_rate / 1e12,
        share_of_matrix=peak_rate and operations / first / peak_rate,
        weights_bytes=weights,
        share_of_experts=share,
        cache_bytes=cache,
        compile_cold_s=None,
        compile_warm_s=None,
        peak_memory_bytes=peak,
        against={},
    )
    if llama_cpp:
        seconds = statistics.median(theirs)
        result["against"]["llama.cpp"] = dict(tokens_per_s=1 / seconds, ratio=seconds / step)
    for name in others:
        model = engine = None  # their memory is needed
        make = find_engine(compile=name == "cublas", no_kernels=True)
        engine = ready(build(what, args, device, dtype, team), args, team, make)
        seconds = []
        for _ in range(args.runs):
            seconds.append(one_run(engine, args)[1])
            bar.update()
        result["against"][name] = dict(
            steps_per_s=1 / statistics.median(seconds), ratio=statistics.median(seconds) / step
        )
    if team.ranks > 1:
        result["all_reduce_us"] = all_reduce_us(device) if cuda and fast else None
    return result


def until_the_end(
    engine: Engine,
    speculator: Speculator | None,
    prompts: list[list[int]],
    new_tokens: int,
    stops: set[int],
    at_first: Callable = lambda: None,
) -> list[float]:
    """Milliseconds a token after the first, of each row, up to a stop token; at_first is called
    when that came."""
    counts, ended, first = [0] * len(prompts), {}, None
    for step in generate(speculator or engine, prompts, new_tokens):
        if first is None:
            at_first()
        now = time.perf_counter()
        first = first or now
        for b, new in enumerate(step):
            for token, _ in new:
                counts[b] += b not in ended
                if b not in ended and (token in stops or counts[b] == new_tokens):
                    ended[b] = 1e3 * (now - first) / max(1, counts[b] - 1)
                    if speculator:
                        speculator.finish(b)
        if len(ended) == len(prompts):
            break
    return list(ended.values())


def forward_ms(engine: Engine, rows: int, T: int) -> float:
    """A forward of T tokens a row at position 100, a CUDA graph of its own; the median of 20."""
    tokens = torch.randint(engine.model.config.vocab_size, (rows, T), device=engine.device)
    positions = 100 + torch.arange(T, device=engine.device).repeat(rows, 1)
    decoder = getattr(engine, "decoder", engine.model)
    with torch.no_grad():
        return 1e3 * graph_seconds(lambda: decoder(tokens, positions, engine.slots(200)))


def busy_share(run: Callable) -> float:
    """The share of the decode phase in which the GPU is busy; run(at_first) calls at_first when
    prefill is over. Pauses of under 10 us count as busy: tracing puts microseconds between a CUDA
    graph's kernels, a late host takes longer."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    run(profiler.start)
    torch.cuda.synchronize()
    profiler.stop()
    events = [
        e.time_range for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    spans, idle = sorted((span.start, span.end) for span in events), 0.0
    begun, last = spans[0]
    for start, end in spans:
        idle += start - last if start - last > 10 else 0
        last = max(last, end)
    return 1 - idle / (last - begun)


def assisted_tokens_per_s(
    directories: list[Path], prompt: list[int], dtype: torch.dtype, args: Namespace
) -> float:
    """transformers' assisted generation, greedy, on the CPU; the median of the runs."""
    from transformers import AutoModelForCausalLM

    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype) for path in directories
    )
    rates = []
    for _ in range(args.runs):
        begun = time.perf_counter()
        out = target.generate(
            torch.tensor([prompt]),
            assistant_model=draft,
            max_new_tokens=args.new_tokens,
            do_sample=False,
        )
        rates.append((out.shape[1] - len(prompt)) / (time.perf_counter() - begun))
    return statistics.median(rates)


def speculation_target(
    what: str,
    checkpoint: Checkpoint,
    args: Namespace,
    device: torch.device,
    dtype: torch.dtype,
    team: Team,
) -> Transformer:
    """The checkpoint or, of a shape, the bundled model widened to it; a rank's part."""
    split = splitter(team)
    if what not in SHAPES:
        return load(
            checkpoint,
            device,
            dtype,
            args.quantize,
            args.group_size,
            args.quantize_head,
            split=split,
        )
    model = widen(load(checkpoint, torch.device("cpu"), torch.float32), SHAPES[what], device, dtype)
    shard = split(model.config, default_group(args.quantize, args.group_size)) if split else None
    return finish(part_for(shard, model) if shard else model, args, shard)


def make_draft(
    what: str, checkpoint: Checkpoint, target: Engine, make_engine: Callable, team: Team
) -> DraftModel:
    """The bundled draft that --draft names, at its own cost, or the head at that of the shape's."""
    weight = target.model.embed.weight
    if not isinstance(checkpoint, HeadCheckpoint):
        draft = load(
            checkpoint, weight.device, weight.dtype, split=draft_splitter(team, checkpoint.config)
        )
        return DraftModel(make_engine(draft), target.model.config.vocab_size)
    if what in SHAPES:
        head = widen_head(
            load(checkpoint, torch.device("cpu"), torch.float32), target.model, SHAPES[what]
        )
        if split := draft_splitter(team, replace(head.config, vocab_size=head.options.vocab_size)):
            shard = split(head.config, 1, outputs=head.options.vocab_size)
            head = part_for(shard, head)
            shard.parallelize(head)
    else:
        head = load(checkpoint, weight.device, weight.dtype)
        head.share_embedding(target.model)
    return EagleDraft(make_engine(head), target)


def forwards_ms(speculator: Speculator, k: int, rows: int) -> tuple[float, float, float]:
    """Milliseconds of the target's forward that verifies k drafted tokens, of the draft's k
    forwards, and of the last of these, which reads a token a row. The first of a head reads what
    was kept, and makes states of its features."""
    draft, target = speculator.draft, speculator.target
    head = isinstance(draft, EagleDraft)
    first, other = (forward_ms(draft.engine, rows, T) for T in (k + 1 if head else 2, 1))
    if head:
        features = target.model.features[:rows, : k + 1]
        with torch.no_grad():
            first += 1e3 * graph_seconds(lambda: draft.engine.model.project(features))
    return forward_ms(target, rows, k + 1), first + (k - 1) * other, other


def read_bytes(draft: DraftModel) -> int:
    """Of the draft's weights, what a forward of one token reads: its layers and its output."""
    model = draft.engine.model
    return sum(
        weight.nbytes
        for part in (model.layers, model.norm, model.head)
        for weight in part.parameters()
    )


def middle(runs: list[dict], key: str = "mean") -> dict:
    return sorted(runs, key=lambda run: run[key])[len(runs) // 2]


def speculate(
    what: str, args: Namespace, device: torch.device, team: Team, bar: tqdm
) -> Iterator[dict]:
    """A JSON line for each of --draft-tokens: the bundled model with a draft, the target at the
    shape's cost, against plain decoding of the same batch. It is long as target, draft and plain
    runs share one set of models and texts."""
    dtype, cuda = find_dtype(args.dtype, device), device.type == "cuda"
    opened = checkpoint, tokenizer = open_checkpoint(TINY if what in SHAPES else what)
    check_quantize(checkpoint, read_settings(checkpoint), args.quantize, args.group_size)
    eagle = args.draft == "eagle"
    draft_checkpoint = open_draft(
        str(Path(TINY).with_name("tiny-eagle" if eagle else "tiny-draft")), opened
    )
    places = draft_checkpoint.options.places if eagle else ()
    if args.against and (eagle or cuda or what in SHAPES or args.batch > 1 or args.temperature > 0):
        raise ValueError(
            "--against transformers: want a checkpoint on the CPU, --batch 1, --temperature 0, no "
            "--draft"
        )
    prompts = [tokenizer.encode_text(OPENINGS[row % len(OPENINGS)]) for row in range(args.batch)]
    sampling = Sampling(args.temperature, args.top_k, args.top_p)

    length = max(map(len, prompts)) + args.new_tokens
    seeds = itertools.count(args.seed)

    def make_engine(draft: Transformer | None = None, features: tuple[int, ...] = ()) -> Engine:
        """Of the draft, or else of the target."""
        model = draft or speculation_target(what, checkpoint, args, device, dtype, team)
        size = length if eagle else min(length, model.config.context - SLACK)
        make = find_engine(not args.no_compile, args.no_kernels)
        places = (model.config.n_layer,) if draft and eagle else features
        return make(model, size, args.batch, sampling, features=places, spare=SLACK)

    def one_run(engine: Engine, speculator: Speculator | None = None) -> dict:
        torch.manual_seed(next(seeds))  # the steps were timed, and drew, any number of times
        times = until_the_end(engine, speculator, prompts, args.new_tokens, tokenizer.stops)
        bar.update()
        return dict(first=min(times), last=max(times), mean=statistics.mean(times))

    gc.collect()
    torch._dynamo.reset()
    slow, plains = make_engine(), []
    if slow.compiled:
        slow.warm_up(args.batch, alone=team.ranks == 1)
    one_run(slow)  # warms up
    if cuda:  # its memory is needed
        plains, slow = [one_run(slow) for _ in range(args.runs)], None
        gc.collect()
    torch._dynamo.reset()
    names = args.draft_tokens.split(",")
    fast = make_engine(features=places)
    draft = make_draft(what, draft_checkpoint, fast, make_engine, team)
    policy = make_policy(names[0] if len(names) == 1 else "auto")
    speculator = Speculator(fast, draft, policy, team.agree)
    if fast.compiled:
        speculator.warm_up(args.batch)
    seconds = speculator.policy.seconds if len(names) > 1 else {}
    for name in names:
        if name.isdecimal() and int(name) not in speculator.step_of:
            raise ValueError(
                f"--draft-tokens {name}: a list takes {sorted(speculator.step_of)}; give others "
                f"alone"
            )
        if len(names) > 1:
            speculator.policy = make_policy(name)
            speculator.policy.begin(seconds, list(seconds))
        runs, plains = [], plains if cuda else []
        for _ in range(args.runs):
            if slow:  # in turns: a CPU that others use is faster at one time than at another
                plains.append(one_run(slow))
            speculator.counts = n = Counter(dict.fromkeys(speculator.counts, 0))
            runs.append(
                one_run(fast, speculator) | n | dict(tokens=1 + n["accepted"] / n["row_steps"])
            )
            runs[-1]["speed_up"] = (plains[-1] if slow else middle(plains))["mean"] / runs[-1][
                "mean"
            ]
        result = setting(what, args, device, dtype) | dict(
            draft=args.draft or "tiny-draft", ranks=team.ranks
        )
        result |= summarize(name, runs, middle(plains))
        if cuda and name.isdecimal():
            verify, drafts, one = forwards_ms(speculator, int(name), args.batch)
            cost = (verify + drafts) / result[
                "plain_ms_per_token"
            ]  # the bound: tokens a step over this
            share = statistics.median(run["speed_up"] * cost / run["tokens"] for run in runs)
            result |= dict(
                verify_ms=verify, drafts_ms=drafts, draft_ms=one, draft_bytes=read_bytes(draft)
            )
            result |= dict(bound=result["tokens_per_step"] / cost, share_of_bound=share)
        if cuda:
            run = partial(
                until_the_end, fast, speculator, prompts, args.new_tokens, tokenizer.stops
            )
            result |= dict(gpu_busy=busy_share(run))
        if args.against:
            directories = [checkpoint.directory, draft_checkpoint.directory]
            rate = assisted_tokens_per_s(directories, prompts[0], dtype, args)
            ratio = 1e3 / result["ms_per_token"]["mean"] / rate
            result["against"] = dict(transformers=dict(tokens_per_s=rate, ratio=ratio))
        yield result


def summarize(draft_tokens: str, runs: list[dict], plain: dict) -> dict:
    """The middle run, as part of speculate()'s line; what only a GPU measures is None."""
    run = middle(runs)
    return dict(
        draft_tokens=draft_tokens,
        plain_ms_per_token=plain["mean"],
        ms_per_token={key: run[key] for key in ("first", "last", "mean")},
        speed_up=statistics.median(run["speed_up"] for run in runs),
        speed_ups=sorted(run["speed_up"] for run in runs),
        tokens_per_step=run["tokens"],
        acceptance=run["accepted"] / max(1, run["accepted"] + run["rejecting_steps"]),
        accepted_of_drafted=run["accepted"] / max(1, run["drafted"]),
        verify_ms=None,
        drafts_ms=None,
        draft_ms=None,
        draft_bytes=None,
        bound=None,
        share_of_bound=None,
        gpu_busy=None,
    )


def commit() -> str | None:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return run.stdout.strip() or None


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    args = parse_args()
    if args.ranks > 1 and "WORLD_SIZE" not in os.environ:
        for what in args.what:
            times = cold_start(what, args) if args.cold_start else (None, None)
            for line in in_processes(what, args).splitlines():
                more = (
                    dict(compile_cold_s=times[0], compile_warm_s=times[1])
                    if args.cold_start
                    else {}
                )
                print(json.dumps(json.loads(line) | more), flush=True)
        return
    name, team = join(args.device)
    torch.manual_seed(args.seed)  # the ranks have the same embedding, prompts and draws
    device = find_device(name)
    for what in args.what:
        if args.only_compile:
            model = build(what, args, device, find_dtype(args.dtype, device), team)
            begun = time.perf_counter()
            engine = ready(model, args, team)
            one_run(engine, Namespace(**vars(args) | dict(new_tokens=2)))
            print(time.perf_counter() - begun)
            continue
        if args.speculate:
            names = len(args.draft_tokens.split(","))
            count = 1 + args.runs * (1 + names if device.type == "cuda" else 2 * names)
            with tqdm(total=count, desc=what, unit="run", disable=None) as bar:
                for result in speculate(what, args, device, team, bar):
                    print(json.dumps(result), flush=True)
            continue
        times = cold_start(what, args) if args.cold_start else (None, None)
        count = args.runs * (1 + len(list(filter(None, args.against.split(",")))))
        with tqdm(total=count, desc=what, unit="run", disable=None) as bar:
            with memory_advice(
                f"{what}: the weights and caches fit, what is computed with them does not; a "
                f"smaller "
                "--batch, --context or --prompt-length helps"
            ):
                result = measure(what, args, device, team, bar)
        print(
            json.dumps(result | dict(compile_cold_s=times[0], compile_warm_s=times[1])), flush=True
        )


if __name__ == "__main__":
    run(main)

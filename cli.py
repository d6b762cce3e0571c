"""
The command line: what the commands share (errors, device, memory, options), and generate.py's options and report.
"""
import argparse
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fcntl import LOCK_EX, LOCK_NB, flock
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

import torch

from checkpoint import (MOST_TEXT, Tokenizer, UserError, count_parameters, find_checkpoint, hf_weights, load_config,
                        read_text, reading)
from model import Config
from sampling import LIMITS

DTYPES = dict(float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, fp32=torch.float32,
              bf16=torch.bfloat16, fp16=torch.float16)
CONTROLS = "".join(map(chr, {*range(32), *range(127, 160)} - set(b"\n\t")))
GIB = 2 ** 30


def world_size() -> int:
    """The number of processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def report_errors(main, ranks: bool = False) -> None:
    """Runs a command. A UserError is one line on stderr and exit code 2; Ctrl-C and a closed pipe end it quietly.

    ranks: the command may be one of several processes."""
    for name, mode in dict(stdin="r", stdout="w", stderr="w").items():
        if getattr(sys, name) is None:  # whoever started the command closed it
            setattr(sys, name, open(os.devnull, mode))
    try:
        if world_size() > 1 and not ranks:
            raise UserError(f"{world_size()} processes, want one: start it without torchrun")
        if world_size() == 1:  # half-written files are removed; for ranks see tp.run()
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            if not ranks:  # commands that may be ranks decide for themselves: see generate.py's main()
                signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has read enough
        sys.stdout = None
        sys.exit(141)
    except (UserError, OSError, MemoryError) as error:
        sys.stdout = None  # it may be what failed
        message = "out of memory" if isinstance(error, MemoryError) else str(error)
        print(f"{Path(sys.argv[0]).name}: {UserError(message)}", file=sys.stderr)
        sys.exit(2)


def find_device(name: str | None) -> torch.device:
    """The device or, for None, the first GPU, else the CPU. A GPU becomes the current one: Triton launches there."""
    # How many of each kind are here. Where the driver is unusable, GPUs may be counted and yet not available.
    num = dict(cuda=torch.cuda.device_count() * torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=1)
    name = next(kind for kind, count in num.items() if count) if name is None else name
    kind, _, index = name.partition(":")
    if (count := num.get(kind)) is None or not re.fullmatch(r"\w+(:(0|[1-9]\d{0,3}))?", name, re.ASCII):
        raise UserError(f"--device {name}: want cpu, cuda, cuda:N or mps")
    if int(index or 0) >= count:
        raise UserError(f"--device {name}: PyTorch finds {int(count) or 'none'} of those; --device cpu works")
    if kind == "cuda":
        torch.cuda.set_device(int(index or 0))
    return torch.device(name)


def free_memory(device: torch.device) -> int:
    """Bytes that a GPU has left, or the host, for each rank: half of its memory, where the system does not say more."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what PyTorch holds of models that are gone
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, TypeError):  # no such file, no such line
        return int(re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024 // world_size()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // world_size()


@contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """Turns running out of memory into a UserError with this advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # a GPU's torch.OutOfMemoryError, a CPU's plain RuntimeError
        if isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error):
            raise UserError(advice) from None
        raise


def check_compiler(compile: bool, device: torch.device) -> None:
    """UserError where Inductor would not find a C++ compiler."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # the one that Inductor runs
    if compile and device.type == "cpu" and not shutil.which(compiler):
        raise UserError(f"--compile on a CPU runs {compiler}, which is not here: install it, or let CXX name another")


def find_dtype(name: str | None, device: torch.device) -> torch.dtype:
    dtype = DTYPES[name or ("float32" if device.type == "cpu" else "bfloat16")]
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        raise UserError(f"{torch.cuda.get_device_name(device)} has no bfloat16: --dtype float16 or float32 runs there")
    return dtype


def cache_bytes(config: Config, dtype: torch.dtype) -> int:
    """Of a token's keys and values."""
    return 2 * config.n_layer * config.n_kv_head * config.head_dim * dtype.itemsize


def check_memory(models: list[tuple[Config, int | None]], batch_size: int, cache_length: int, device: torch.device,
                 dtype: torch.dtype, ranks: int = 1, loaded: bool = False) -> str:
    """What to say if memory runs out later. UserError if weights and KV caches alone do not fit.

    models: their configs and, for a quantized checkpoint, the bits of a weight. The ranks' GPUs share both. loaded:
    the weights have their memory already."""
    weights, cache, share = 0, 0, ranks if device.type == "cuda" else 1
    for config, bits in models:
        packed = bits / 8 / dtype.itemsize if bits else 1  # scales are not counted
        for name, (_, _, shape) in hf_weights(config).items():
            size = math.prod(shape) * dtype.itemsize * (packed if "_proj." in name else 1)
            weights += size / (1 if "embed" in name else share)
        cache += cache_bytes(config, dtype) * batch_size * cache_length
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        there, cache = free_memory(device), cache / share
    advice = (f"out of memory: {weights / GIB:.2f} GiB of weights, {cache / GIB:.2f} GiB of cache ({batch_size} rows "
              f"of {cache_length}) for {there / GIB:.2f} GiB on {device}; fewer prompts, samples or tokens, or --dtype"
              f"{', or no --draft' if len(models) > 1 else ''}, help")
    if weights * (not loaded) + cache > there:
        raise UserError(advice)
    return advice


def find_draft(name: str, config: Config, tokenizer: Tokenizer) -> Path:
    """The draft's directory. UserError if its tokenizer is not the checkpoint's."""
    directory = find_checkpoint(name)
    theirs, draft = Tokenizer(directory), load_config(directory)
    for i in range(min(config.vocab_size, draft.vocab_size)):
        if None not in (pair := (theirs.token(i), tokenizer.token(i))) and pair[0] != pair[1]:
            raise UserError(f"--draft {name}: token {i} is {pair[0]!r} there and {pair[1]!r} in the checkpoint; want a "
                            "draft with the same tokenizer, or --draft prompt-lookup")
    if count_parameters(draft) > count_parameters(config):
        print(f"--draft {name} has {count_parameters(draft):,} parameters, the checkpoint {count_parameters(config):,}:"
              " this draft costs more than it can save", file=sys.stderr)
    return directory


def within(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type for argparse: a number of that kind from low to high."""
    def parse(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value
    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def add_quantize(parser) -> None:
    """parser: or a group of its arguments."""
    parser.add_argument("--quantize", choices=("int8", "int4"),
                        help="round the layers' weights as they are loaded (default: no rounding)")
    parser.add_argument("--group-size", type=within(int, -1), metavar="N",
                        help="weights that share a scale: a multiple of 32, or -1: a row (default: int8 -1, int4 32)")


def draft_tokens(text: str) -> str:
    """A type for argparse: how many tokens to draft, or the name of a policy."""
    if text not in ("auto", "hf", "bass") and not (text.isdecimal() and 1 <= int(text) <= 32):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 1 to 32, auto, hf and bass")
    return text


class Parser(argparse.ArgumentParser):
    """Its errors are UserErrors, and name the option that was probably meant."""

    def __init__(self, description: str = "", **options):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False, **options)

    def error(self, message: str):
        raise UserError(f"{message}; --help lists the options")

    def parse_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None):
        args, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = get_close_matches(name.lstrip("-"), re.findall(r"--([a-z-]+)", self.format_usage()), 1)
            advice = f", did you mean --{near[0]}?" if near else ""
            if not name.startswith("-") and "--prompt" in self.format_usage():
                advice = ", want -p before a prompt"
            self.error(f"{name}: no such option{advice}")
        return args


def add_model_options(parser: argparse.ArgumentParser, default_checkpoint: str | None = None) -> None:
    """What is run, and how fast: the options of the constructor of generate.LLM."""
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", default=default_checkpoint, metavar="DIR",
        help="directory or Hub id, e.g. HuggingFaceTB/SmolLM2-135M-Instruct (default: the bundled model)")
    add("--max-seq-length", type=within(int, 2), metavar="N",
        help="prompt and new tokens at most (default: the model's context; in a chat at most 8192)")
    add("--device", help="cpu, cuda, cuda:N or mps (default: the first GPU, else cpu)")
    add("--dtype", choices=DTYPES, metavar="TYPE",
        help="float32 (fp32), bfloat16 (bf16) or float16 (fp16) (default: bfloat16 on a GPU, float32 on a CPU)")
    add = parser.add_argument_group("speed").add_argument
    add("--compile", action="store_true", help="torch.compile: a wait first, then faster (default: off)")
    add("--no-kernels", action="store_true", help="with --compile: plain PyTorch, without fast/ (default: off)")
    add_quantize(parser.add_argument_group("quantization", "e.g. --compile --quantize int4 --group-size 128"))
    add = parser.add_argument_group("speculation", "e.g. --draft checkpoints/tiny-draft --draft-tokens 4").add_argument
    add("--draft", metavar="D", help="a smaller checkpoint with the same tokenizer, or prompt-lookup (default: none)")
    add("--draft-tokens", type=draft_tokens, metavar="N", help="1 to 32, or a rule: auto, hf or bass (default: auto)")
    add("--draft-quantize", choices=("int8", "int4"), help="round the draft's weights (default: no rounding)")


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """What a single call of generate.LLM may set, too."""
    add = parser.add_argument_group("generation", "e.g. --temperature 0.7 --top-p 0.9 --seed 1").add_argument
    add("--max-new-tokens", type=within(int, 1), metavar="N",
        help="default: 256, or what the context leaves; in a chat, what the context leaves")
    add("--temperature", type=within(*LIMITS["temperature"]), metavar="T",
        help="0: greedy (default: generation_config.json's, else 0.8)")
    add("--top-k", type=within(*LIMITS["top_k"]), metavar="K", help="0: off (default: the checkpoint's, else 0)")
    add("--top-p", type=within(*LIMITS["top_p"]), metavar="P", help="1: off (default: the checkpoint's, else 1)")
    add("--seed", type=within(int, 0, 2 ** 63 - 1), help="the same seed, the same text (default: a random one)")
    add("--num-samples", type=within(int, 1, 10 ** 5), default=1, metavar="N", help="of each prompt (default: 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeat it for more")
    add("--time-budget", type=within(float, 1e-9), metavar="S", help="seconds; then rank what there is (default: none)")


def check_options(args: argparse.Namespace, parser: Parser) -> None:
    """UserError where options of the two functions above contradict each other."""
    if "" in args.stop:
        parser.error("--stop: an empty text would end everything at once")
    if args.group_size is not None and not args.quantize:
        parser.error(f"--group-size {args.group_size} goes with --quantize; a quantized checkpoint has its own")
    if args.draft == "":
        parser.error("--draft: want a checkpoint or prompt-lookup; for no draft, leave the option out")
    if not args.draft and (args.draft_tokens or args.draft_quantize):
        parser.error("--draft-tokens and --draft-quantize go with --draft")
    if args.draft == "prompt-lookup" and args.draft_quantize:
        parser.error("--draft-quantize: prompt-lookup has no weights; leave it out")


def keyword_options(keywords: dict, defaults: argparse.Namespace | None = None) -> argparse.Namespace:
    """Keywords, read as the command line reads options: top_k=5 is --top-k 5, compile=True is --compile.

    Without defaults they are those of the constructor of generate.LLM, with defaults those of a call. None: as if the
    keyword were not given."""
    parser, argv = Parser(add_help=False), []
    if defaults is None:
        add_model_options(parser)
    add_generation_options(parser)
    for name, value in keywords.items():
        option = "--" + name.replace("_", "-")
        if defaults and name in vars(defaults) and option not in parser.format_usage():
            raise UserError(f"{name}: an option of LLM(...), not of a call")
        for item in value if name == "stop" and isinstance(value, (list, tuple)) else [value]:
            if item is True:
                argv.append(option)
            elif name == "stop" and item is not False and not isinstance(item, str | None):
                raise UserError(f"stop={value!r:.60}: want a text, or a list of texts")
            elif item is not None and item is not False:
                argv.append(f"{option}={str(item).removeprefix('torch.') if name == 'dtype' else item}")
    given = vars(defaults or argparse.Namespace())
    stop = {} if keywords.get("stop") is None else dict(stop=[])  # the call's take the place of the constructor's
    try:
        options = parser.parse_args(argv, argparse.Namespace(**given | stop))
        check_options(options, parser)
        return options
    except UserError as error:  # which names options, not keywords
        message = re.sub(r"--([a-z][a-z-]*)", lambda name: name[1].replace("-", "_"), str(error))
        raise UserError(message.replace("; help lists the options", "")) from None


def generate_args(description: str, default_checkpoint: str) -> argparse.Namespace:
    """generate.py's options, checked against each other."""
    parser = Parser(description)
    add_model_options(parser, default_checkpoint)
    add = parser.add_argument_group(
        "prompt", 'e.g. -p "One day" -p "Tom and Sue", or echo "One day" | python generate.py').add_argument
    add("-p", "--prompt", action="append", default=[], metavar="TEXT",
        help="several: a batch; -: what stdin holds (default: a pipe's or a redirected file's text, else Once upon a "
             "time)")
    add("--prompt-file", type=Path, metavar="FILE", help="a prompt a line; -: stdin's lines (default: none)")
    add("--whole", action="store_true", help="the whole of --prompt-file is one prompt (default: off)")
    add("--chat", action="store_true", help="put each prompt into the chat template (default: off)")
    add("--interactive", action="store_true", help="chat or, without a template, continue your text (default: off)")
    add("--system", metavar="TEXT", help="with --chat or --interactive: the system message (default: the template's)")
    add_generation_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object instead of the text (default: off)")
    add("--quiet", action="store_true", help="no progress, no hints, no table (default: off)")
    add("--profile", metavar="FILE", help="write a Chrome trace of the generation (default: none)")
    args = parser.parse_args()
    check_options(args, parser)
    others = args.prompt or args.prompt_file or args.json or args.num_samples > 1 or args.time_budget
    if args.interactive and others:
        parser.error("--interactive does not go with --prompt, --prompt-file, --json, --num-samples and --time-budget")
    if args.system is not None and not (args.chat or args.interactive):
        parser.error("--system goes with --chat or --interactive")
    if args.whole and not args.prompt_file:
        parser.error("--whole goes with --prompt-file")
    if [*args.prompt, str(args.prompt_file)].count("-") > 1:
        parser.error("stdin can be read once: one - among --prompt and --prompt-file")
    if args.profile:
        args.profile = Path(os.path.realpath(args.profile))
        if args.profile.exists() and not args.profile.is_file():
            parser.error(f"--profile {args.profile}: want a file")
        with reading(f"--profile {args.profile}: cannot write there, name another place"):  # said before the work
            TemporaryDirectory(prefix=f"{args.profile.name}.partial-", dir=args.profile.parent).cleanup()
    return args


# Prompts


def read_stdin(quiet: bool) -> str:
    """All of it. After a second of waiting a line on stderr says what is awaited, unless `quiet`."""
    hint = Timer(1, print, ["reading the prompt from stdin; Ctrl-D ends it"], dict(file=sys.stderr, flush=True))
    hint.daemon = True
    if not quiet:
        hint.start()
    try:
        with reading("stdin"):
            if len(text := sys.stdin.buffer.read(MOST_TEXT + 1)) > MOST_TEXT:
                raise ValueError(f"more than {MOST_TEXT} bytes; give a part of them")
            return text.decode().replace("\r\n", "\n")
    finally:
        hint.cancel()


def read_prompts(args: argparse.Namespace) -> list[str]:
    """--prompt's texts, then --prompt-file's; without both, what a pipe or a redirected file holds. One newline at the
    end of a text is left out. UserError where a source that was named has no text."""
    if not args.prompt and not args.prompt_file:
        text = "" if sys.stdin.isatty() else read_stdin(args.quiet).removesuffix("\n")
        return [text if text.strip() else "Once upon a time"]
    prompts = []
    for prompt in args.prompt:
        if prompt == "-" and not (prompt := read_stdin(args.quiet).removesuffix("\n")).strip():
            raise UserError("--prompt -: stdin is empty; want a text")
        prompts.append(prompt)
    if args.prompt_file:
        stdin = str(args.prompt_file) == "-"
        text = read_stdin(args.quiet) if stdin else read_text(args.prompt_file, encoding="utf-8-sig")
        lines = [text.removesuffix("\n")] if args.whole else text.split("\n")
        if not text.strip():
            raise UserError(f"--prompt-file {args.prompt_file}: no prompt in it; want one a line")
        prompts += [line for line in lines if line.strip()]
    return prompts


def as_messages(prompts: list[str], args: argparse.Namespace, tokenizer: Tokenizer) -> list:
    """With --chat each prompt as a chat's messages. Without it a line on stderr says that there is a template."""
    if args.chat:
        system = [] if args.system is None else [dict(role="system", content=args.system)]
        return [[*system, dict(role="user", content=prompt)] for prompt in prompts]
    if tokenizer.template and not args.quiet:
        print("the prompt is continued as it is; --chat puts it into the checkpoint's chat template", file=sys.stderr)
    return prompts


# Output


def add_headings(completions: list, args: argparse.Namespace) -> None:
    """What is printed before each text: the prompt that it continues or, of a batch, a line that names the prompt."""
    for i, completion in enumerate(completions):
        completion.heading = "" if args.chat else completion.prompt
        if len(completions) > 1:
            sample = f" ({i % args.num_samples + 1})" if args.num_samples > 1 else ""
            completion.heading = f"--- {completion.prompt}{sample}\n"


def rank_completions(completions: list, samples: int) -> list:
    """After a time budget: for each prompt the finished ones first, and the likeliest first among these."""
    def place(completion) -> tuple[bool, bool, float]:
        return completion.finish_reason == "time", not completion.tokens, -(completion.mean_logprob or 0)

    return sum((sorted(completions[at:at + samples], key=place) for at in range(0, len(completions), samples)), [])


def show(completions: list, steps: Iterator[None] = iter(())) -> None:
    """Takes the steps that fill the completions, and prints what each brings. The first unfinished completion is
    streamed, the others follow in their turn. A terminal gets no control characters: the model may have learnt, or been
    told, to write some that it obeys."""
    dropped = str.maketrans("", "", CONTROLS if sys.stdout.isatty() else "")
    for completion in completions:
        if completion.finish_reason == "time":
            completion.heading = (completion.heading.rstrip("\n") + " [unfinished]\n").lstrip()
        sys.stdout.write(completion.heading.translate(dropped))
        shown = 0
        while True:
            text = completion.visible()
            if completion.heading != completion.prompt:  # the text stands alone: no leading space
                text = text.lstrip(" ")
            sys.stdout.write(text[shown:].translate(dropped))
            sys.stdout.flush()
            shown = len(text)
            if completion.finish_reason:
                break
            next(steps)
        sys.stdout.write("\n" if completion is completions[-1] else "\n\n")
    for _ in steps:  # without completions: the steps alone
        pass


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place beside `path` for a file or a directory that is not whole yet; at the end it becomes `path`. After an
    error it is removed, and here what killed runs left: their lock files are unlocked, as the system does when a
    process ends. Where `path` is a link, what it names is written. OSError for a device, a pipe or a directory."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise FileExistsError("want a file, or a name that is free")
    for lock in path.parent.glob(f"{escape(path.name)}.partial-*/lock"):
        with suppress(OSError), open(lock, "a") as file:
            flock(file, LOCK_EX | LOCK_NB)
            shutil.rmtree(lock.parent)
    with TemporaryDirectory(prefix=f"{path.name}.partial-", dir=path.parent) as directory:
        with open(Path(directory, "lock"), "w") as file:
            flock(file, LOCK_EX)
            partial = Path(directory, f"made-{path.name}")  # PyTorch zips a trace whose name ends in .gz
            yield partial
            partial.replace(path)


def report(generator, runs: list[list], **known) -> dict:
    """The object of --json, of generate.Generator and its Completions. runs: the batch, or each answer of a chat.

    The share of the read bandwidth is null without --compile or fast/, below 1 GiB of weights and off CUDA."""
    model, device = generator.model, generator.device
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not model.config.tied:
        weights -= model.embed.weight.nbytes  # a token reads one row of it
    completions = [completion for run in runs for completion in run]
    decode_steps, speculation = sum(max(c.steps for c in run) - 1 for run in runs), None
    if generator.speculator:
        n = generator.speculator.counts
        decode_steps = min(decode_steps, n["steps"])
        speculation = dict(steps=n["steps"], drafted=n["drafted"], accepted=n["accepted"],
                           acceptance_rate=n["accepted"] / max(1, n["drafted"]),
                           tokens_per_step=1 + n["accepted"] / max(1, n["row_steps"]))
    decode_s = max(1e-9, sum(max(c.seconds for c in run) - run[0].first_s for run in runs))
    rate, cuda = weights * decode_steps / decode_s, device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if cuda else None  # without what is measured next
    read_rate = generator.read_bandwidth(model) if generator.read_bandwidth and cuda and weights >= GIB else None
    ended = sorted((c for c in completions if c.steps > 1), key=lambda c: c.seconds)
    per_token = [1e3 * (c.seconds - c.first_s) / (c.steps - 1) for c in ended] or [None]
    samples = [dict(prompt=c.prompt, text=c.text, prompt_tokens=len(c.prompt_tokens), tokens=c.tokens,
                    finish_reason=c.finish_reason, seconds=c.seconds, mean_logprob=c.mean_logprob)
               for c in completions]
    return known | dict(
        device=str(device), dtype=str(model.embed.weight.dtype).removeprefix("torch."), batch=len(completions),
        samples=samples, first_token_s=sum(run[0].first_s for run in runs) / len(runs),
        decode_tokens_per_s=sum(max(0, len(c.tokens) - 1) for c in completions) / decode_s,
        per_token_ms=dict(first=per_token[0], last=per_token[-1], all=sum(per_token) / len(ended) if ended else None),
        weights_bytes=weights, bandwidth_gb_s=rate / 1e9, bandwidth_utilization=rate / read_rate if read_rate else None,
        peak_memory_bytes=peak, speculation=speculation)


def format_report(result: dict) -> str:
    """The table on stderr: a line of names and a line of values."""
    share, peak = result["bandwidth_utilization"], result["peak_memory_bytes"]
    cells = {"load s": f"{result['load_s']:.2f}", "compile s": f"{result['compile_s']:.1f}",
             "first token s": f"{result['first_token_s']:.3f}",
             "decode tokens/s": f"{result['decode_tokens_per_s']:.1f}", "GB/s": f"{result['bandwidth_gb_s']:.1f}",
             "of read bandwidth": f"{share:.0%}" if share else "-", "peak GiB": f"{peak / GIB:.2f}" if peak else "-"}
    if speculation := result["speculation"]:
        cells |= {"accepted": f"{speculation['acceptance_rate']:.0%}",
                  "tokens a step": f"{speculation['tokens_per_step']:.2f}"}
    return "  ".join(cells) + "\n" + "  ".join(value.rjust(len(name)) for name, value in cells.items())

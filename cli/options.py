"""
The parser of all commands, and the options of generate.py. What they share with generate.LLM stands there and in
guard.py: defaults in LLM's signature, types, limits and choices in guard's tables.
"""
import argparse
import inspect
import math
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory

from checkpoint import UserError
from generate import LLM
from guard import CHOICES, LIMITS, user_errors

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(LLM).parameters.items()}


class Parser(argparse.ArgumentParser):
    """Its errors are UserErrors, and name the option that was probably meant."""

    def __init__(self, description: str = ""):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False)

    def error(self, message: str):
        raise UserError(f"{message}; --help lists the options")

    def parse_args(self) -> argparse.Namespace:
        args, unknown = self.parse_known_args()
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"{name}: no such option{self.advice(name)}")
        return args

    def advice(self, name: str) -> str:
        usage = self.format_usage()
        if not name.startswith("-") and "--prompt" in usage:
            return ", want -p before a prompt"
        near = get_close_matches(name.lstrip("-"), re.findall(r"--([a-z-]+)", usage), 1)
        return f", did you mean --{near[0]}?" if near else ""


def within(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type for argparse: a number of that kind from low to high."""
    def parse(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def add_keyword(group, name: str, **how) -> None:
    """Adds the option for a keyword of generate.LLM."""
    how["default"] = DEFAULTS[name]
    if name in LIMITS:
        how["type"] = within(*LIMITS[name])
    if name in CHOICES:
        how["choices"] = CHOICES[name]
    group.add_argument("--" + name.replace("_", "-"), **how)


def add_quantize(group) -> None:
    add_keyword(group, "quantize", help="round the layers' weights as they are loaded (default: no rounding)")
    add_keyword(group, "group_size", metavar="N",
                help="weights that share a scale: a multiple of 32, or -1: a row (default: int8 -1, int4 32)")


def add_model_options(parser: Parser) -> None:
    """What is run, and how fast."""
    group = parser.add_argument_group("model")
    add_keyword(group, "checkpoint", metavar="DIR",
                help="directory or Hub id, e.g. HuggingFaceTB/SmolLM2-135M-Instruct (default: the bundled model)")
    add_keyword(group, "max_seq_length", metavar="N",
                help="prompt and new tokens at most (default: the model's context; in a chat at most 8192)")
    add_keyword(group, "device", help="cpu, cuda, cuda:N or mps (default: the first GPU, else cpu)")
    add_keyword(group, "dtype", metavar="TYPE",
                help="float32 (fp32), bfloat16 (bf16) or float16 (fp16) (default: bfloat16 on a GPU, float32 on a CPU)")
    group = parser.add_argument_group("speed")
    add_keyword(group, "compile", action="store_true", help="torch.compile: a wait first, then faster (default: off)")
    add_keyword(group, "no_kernels", action="store_true",
                help="with --compile: plain PyTorch, without fast/ (default: off)")
    add_quantize(parser.add_argument_group("quantization", "e.g. --compile --quantize int4 --group-size 128"))
    group = parser.add_argument_group("speculation", "e.g. --draft checkpoints/tiny-draft --draft-tokens 4")
    add_keyword(group, "draft", metavar="D",
                help="a smaller checkpoint with the same tokenizer, or prompt-lookup (default: none)")
    add_keyword(group, "draft_tokens", metavar="N", help="1 to 32, or a rule: auto, hf or bass (default: auto)")
    add_keyword(group, "draft_quantize", help="round the draft's weights (default: no rounding)")


def add_prompt_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "prompt", 'e.g. -p "One day" -p "Tom and Sue", or echo "One day" | python generate.py')
    add = group.add_argument
    add("-p", "--prompt", action="append", default=[], metavar="TEXT",
        help="several: a batch; -: what stdin holds (default: a pipe's or a redirected file's text, else Once upon a "
             "time)")
    add("--prompt-file", type=Path, metavar="FILE", help="a prompt a line; -: stdin's lines (default: none)")
    add("--whole", action="store_true", help="the whole of --prompt-file is one prompt (default: off)")
    add("--chat", action="store_true", help="put each prompt into the chat template (default: off)")
    add("--interactive", action="store_true", help="chat or, without a template, continue your text (default: off)")
    add("--system", metavar="TEXT", help="with --chat or --interactive: the system message (default: the template's)")


def add_generation_options(parser: Parser) -> None:
    """What a single call of generate.LLM may set, too."""
    group = parser.add_argument_group("generation", "e.g. --temperature 0.7 --top-p 0.9 --seed 1")
    add_keyword(group, "max_new_tokens", metavar="N",
                help="default: 256, or what the context leaves; in a chat, what the context leaves")
    add_keyword(group, "temperature", metavar="T", help="0: greedy (default: generation_config.json's, else 0.8)")
    add_keyword(group, "top_k", metavar="K", help="0: off (default: the checkpoint's, else 0)")
    add_keyword(group, "top_p", metavar="P", help="1: off (default: the checkpoint's, else 1)")
    add_keyword(group, "min_p", metavar="P",
                help="drop what is less likely than P times the likeliest; 0: off (default: the checkpoint's, else 0)")
    add_keyword(group, "seed", help="the same seed, the same text (default: a random one)")
    add_keyword(group, "num_samples", metavar="N", help="of each prompt (default: 1)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="end before TEXT; repeat it for more")
    add_keyword(group, "time_budget", metavar="S", help="seconds; then rank what there is (default: none)")


def add_output_options(parser: Parser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object instead of the text (default: off)")
    add("--logprobs", action="store_true", help="with --json: the tokens' log-probabilities, too (default: off)")
    add("--quiet", action="store_true", help="no progress, no hints, no table (default: off)")
    add("--profile", metavar="FILE", help="write a Chrome trace of the generation (default: none)")


def generate_args(description: str) -> argparse.Namespace:
    """generate.py's options. What LLM checks itself is left to it."""
    parser = Parser(description)
    for add in (add_model_options, add_prompt_options, add_generation_options, add_output_options):
        add(parser)
    args = parser.parse_args()
    others = args.prompt or args.prompt_file or args.json or args.num_samples > 1 or args.time_budget
    if args.interactive and others:
        parser.error("--interactive does not go with --prompt, --prompt-file, --json, --num-samples and --time-budget")
    if args.system is not None and not (args.chat or args.interactive):
        parser.error("--system goes with --chat or --interactive")
    if args.whole and not args.prompt_file:
        parser.error("--whole goes with --prompt-file")
    if args.logprobs and not args.json:
        parser.error("--logprobs goes with --json")
    if [*args.prompt, str(args.prompt_file)].count("-") > 1:
        parser.error("stdin can be read once: one - among --prompt and --prompt-file")
    if args.profile:
        args.profile = writable(args.profile, parser)
    return args


def writable(profile: str, parser: Parser) -> Path:
    """--profile's file. UserError, before the work, where it cannot be written."""
    path = Path(os.path.realpath(profile))
    if path.exists() and not path.is_file():
        parser.error(f"--profile {path}: want a file")
    with user_errors(f"--profile {path}: cannot write there, name another place"):
        TemporaryDirectory(prefix=f"{path.name}.partial-", dir=path.parent).cleanup()
    return path


def keywords(args: argparse.Namespace) -> dict:
    """Those of generate.LLM among the options."""
    return {name: value for name, value in vars(args).items() if name in DEFAULTS}

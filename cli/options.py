"""
The parser of all commands, and the options of generate.py. What they share with generate.LLM stands
there and in guard.py: defaults in LLM's signature, types, limits and choices in guard's tables.
"""

import argparse
import inspect
import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from checkpoint import UserError
from cli.output import partial_directory
from generate import LLM
from guard import CHOICES, LIMITS, user_errors

# The keywords of generate.LLM:
DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(LLM).parameters.items()
}


class Parser(argparse.ArgumentParser):
    """Its errors are UserErrors, and name the option that was probably meant."""

    def __init__(self, description: str):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise UserError(f"{message}; --help lists the options")

    def parse_args(self) -> argparse.Namespace:
        args, unknown = self.parse_known_args()
        if not unknown:
            return args
        name, usage = unknown[0].partition("=")[0], self.format_usage()
        near = get_close_matches(name.lstrip("-"), re.findall(r"--([a-z-]+)", usage), 1)
        advice = f", did you mean --{near[0]}?" if near else ""
        if not name.startswith("-") and "--prompt" in usage:
            advice = ", want -p before a prompt"
        self.error(f"{name}: no such option{advice}")


def within(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type for argparse: a number of that kind from low to high."""

    def parse(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


# An option -> what its value is called, and its help; only a help: the option is a switch. Scripts
# have these, too:
DEVICE = dict(
    device=(None, "cpu, cuda, cuda:N or mps (default: the first GPU, else cpu)"),
    dtype=(
        "TYPE",
        "float32 (fp32), bfloat16 (bf16) or float16 (fp16) (default: bfloat16 on a GPU, float32 on "
        "a CPU)",
    ),
)
QUANTIZATION = dict(
    quantize=(None, "round the layers' weights as they are loaded (default: no rounding)"),
    group_size=(
        "N",
        "weights that share a scale: a multiple of 32, or -1: a row (default: int8 -1, int4 32)",
    ),
    quantize_head=(
        None,
        "round the output head: int8 a row, int4 in groups of 32 (default: no rounding)",
    ),
    kv_cache=(
        None,
        "round keys and values, or values alone, a scale for each token and head (default: no "
        "rounding)",
    ),
)


def add_keywords(group, **options: tuple[str | None, str] | str):
    """Adds options to a parser, or to a group of its options. Keywords of generate.LLM have its
    defaults."""
    for name, said in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(said, str):
            group.add_argument(option, action="store_true", help=said)
        else:
            metavar, text = said
            kind = within(*LIMITS[name]) if name in LIMITS else None
            group.add_argument(
                option,
                type=kind,
                choices=CHOICES.get(name),
                default=DEFAULTS.get(name),
                metavar=metavar,
                help=text,
            )


def generate_args(description: str) -> argparse.Namespace:
    """generate.py's options, in the order of --help. What LLM checks itself is left to it. The
    function is long because each option stands here with its help."""
    parser = Parser(description)
    group = parser.add_argument_group
    add_keywords(
        group("model"),
        checkpoint=(
            "DIR",
            "directory or Hub id, e.g. HuggingFaceTB/SmolLM2-135M-Instruct "
            "(default: the bundled model)",
        ),
        max_seq_length=(
            "N",
            "prompt and new tokens at most (default: the model's context; in a chat at most 8192)",
        ),
        **DEVICE,
    )
    add_keywords(
        group("speed"),
        compile="torch.compile: a wait first, then faster (default: off)",
        no_kernels="with --compile: plain PyTorch, without fast/ (default: off)",
    )
    add_keywords(
        group("quantization", "e.g. --compile --quantize int4 --group-size 128"), **QUANTIZATION
    )
    add_keywords(
        group("speculation", "e.g. --draft checkpoints/tiny-draft --draft-tokens 4"),
        draft=(
            "D",
            "a smaller checkpoint with the same tokenizer, an EAGLE-3 head, or prompt-lookup "
            "(default: none)",
        ),
        draft_tokens=("N", "1 to 32, or a rule: auto, hf or bass (default: auto)"),
        draft_quantize=(None, "round the draft's weights (default: no rounding)"),
    )
    prompt = group(
        "prompt", 'e.g. -p "One day" -p "Tom and Sue", or echo "One day" | python generate.py'
    )
    prompt.add_argument(
        "-p",
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="several: a batch; -: what stdin holds (default: a pipe's or a redirected file's "
        "text, "
        "else Once upon a time)",
    )
    add_keywords(
        prompt,
        prompt_file=("FILE", "a prompt a line; -: stdin's lines (default: none)"),
        whole="the whole of --prompt-file is one prompt (default: off)",
        chat="put each prompt into the chat template (default: off)",
        interactive="chat or, without a template, continue your text (default: off)",
        system=(
            "TEXT",
            "with --chat or --interactive: the system message (default: the template's)",
        ),
    )
    prompt.add_argument(
        "--template-option",
        action="append",
        dest="template_options",
        metavar="KEY=VALUE",
        help="a variable of the chat template, e.g. enable_thinking=false (default: the "
        "template's)",
    )
    generation = group("generation", "e.g. --temperature 0.7 --top-p 0.9 --seed 1")
    add_keywords(  # what a single call of LLM may set, too
        generation,
        max_new_tokens=(
            "N",
            "default: 256, or what the context leaves; in a chat, what the context leaves",
        ),
        temperature=("T", "0: greedy (default: generation_config.json's, else 0.8)"),
        top_k=("K", "0: off (default: the checkpoint's, else 0)"),
        top_p=("P", "1: off (default: the checkpoint's, else 1)"),
        min_p=(
            "P",
            "drop what is less likely than P times the likeliest; 0: off (default: the "
            "checkpoint's, else 0)",
        ),
        seed=(None, "the same seed, the same text (default: a random one)"),
        num_samples=("N", "of each prompt (default: 1)"),
        time_budget=("S", "seconds; then rank what there is (default: none)"),
    )
    generation.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before TEXT; repeat it for more",
    )
    add_keywords(
        group("output"),
        show_thinking="of gpt-oss: what it thinks before it answers, to stderr (default: off)",
        json="print one JSON object instead of the text (default: off)",
        logprobs="with --json: the tokens' log-probabilities, too (default: off)",
        quiet="no progress, no hints, no table (default: off)",
        profile=("FILE", "write a Chrome trace of the generation (default: none)"),
    )

    args = parser.parse_args()
    others = (
        args.prompt or args.prompt_file or args.json or args.num_samples > 1 or args.time_budget
    )
    if args.interactive and others:
        parser.error(
            "--interactive does not go with --prompt, --prompt-file, --json, --num-samples and "
            "--time-budget"
        )
    if args.system is not None and not (args.chat or args.interactive):
        parser.error("--system goes with --chat or --interactive")
    if args.whole and not args.prompt_file:
        parser.error("--whole goes with --prompt-file")
    if args.logprobs and not args.json:
        parser.error("--logprobs goes with --json")
    if [*args.prompt, args.prompt_file].count("-") > 1:
        parser.error("stdin can be read once: one - among --prompt and --prompt-file")
    args.template_options = dict(
        template_option(text, parser) for text in args.template_options or []
    )
    if args.profile:
        args.profile = Path(os.path.realpath(args.profile))
        with user_errors(f"--profile {args.profile}: cannot write there, name another place"):
            partial_directory(args.profile).cleanup()  # before the work
    return args


def template_option(text: str, parser: Parser) -> tuple[str, object]:
    """KEY=VALUE; a value that is no JSON is a text."""
    key, is_there, value = text.partition("=")
    if not key or not is_there:
        parser.error(f"--template-option {text}: want KEY=VALUE")
    with suppress(ValueError):
        value = json.loads(value)
    return key, value

"""
Command lines from dataclasses: a field that generate.option() made is an option. llm.Options are
generate.py's and LLM's; CommandLine, below, has what a terminal needs beside them.
"""

import argparse
import json
import math
import re
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from cli.output import partial_directory
from hub.vet import reading
from llm import Options, of_output, of_prompt

GROUPS = {  # the headings of --help, in their order
    "model": None,
    "speed": None,
    "quantization": "e.g. --compile --quantize int4 --group-size 128",
    "speculation": "e.g. --draft checkpoints/tiny-draft --draft-tokens 4",
    "prompt": 'e.g. -p "One day" -p "Tom and Sue", or echo "One day" | python generate.py',
    "generation": "e.g. --temperature 0.7 --top-p 0.9 --seed 1",
    "output": None,
}


# The options that scripts have, too:
DEVICE = "device", "dtype"
QUANTIZATION = "quantize", "group_size", "quantize_head", "kv_cache"


class Parser(argparse.ArgumentParser):
    """Its errors are ValueErrors, and name the option that was probably meant."""

    def __init__(self, description: str):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise ValueError(f"{message}; --help lists the options")

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

    def add_options(self, kind: type, *names: str) -> None:
        """Adds the fields of a dataclass, or those of these names, in groups of GROUPS."""
        groups = {}
        wanted = [each for each in fields(kind) if not names or each.name in names]
        for name, example in GROUPS.items():
            if any(each.metadata["group"] == name for each in wanted):
                groups[name] = self.add_argument_group(name, example)
        for each in wanted:
            flag = f"--{each.name.replace('_', '-')}"
            if flags := each.metadata.get("flags", [flag]):
                groups[each.metadata["group"]].add_argument(*flags, dest=each.name, **how(each))


def how(each) -> dict:
    """A dataclass's field -> what argparse wants to know."""
    said, default = each.metadata, each.default
    if default is MISSING:
        default = each.default_factory()
    text = said["help"]
    if each.type is bool:
        return dict(action="store_true", help=f"{text} (default: off)")
    if "default" not in text:
        text += f" (default: {default or 'none'})"
    settings = dict(
        default=default, choices=said.get("choices"), metavar=said.get("metavar"), help=text
    )
    kinds = each.type.__args__ if isinstance(each.type, types.UnionType) else [each.type]
    if list[str] in kinds:
        settings["action"] = "append"
    elif dict in kinds:
        settings |= dict(action="append", type=key_and_value)
    elif str not in kinds:
        settings["type"] = next(kind for kind in (int, float, Path) if kind in kinds)
        settings["metavar"] = settings["metavar"] or "N"
    return settings


def within(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type for argparse: a number of that kind from low to high."""

    def parse(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def key_and_value(text: str) -> tuple[str, object]:
    """KEY=VALUE; a value that is no JSON is a text."""
    key, is_there, value = text.partition("=")
    if not key or not is_there:
        raise argparse.ArgumentTypeError(f"{text}: want KEY=VALUE")
    with suppress(ValueError):
        value = json.loads(value)
    return key, value


@dataclass(kw_only=True)
class CommandLine(Options):
    """generate.py's options. What contradicts itself is a ValueError."""

    prompt: list[str] = of_prompt(
        [],
        "several: a batch; -: what stdin holds (default: a pipe's or a redirected file's text, "
        "else Once upon a time)",
        flags=("-p", "--prompt"),
        metavar="TEXT",
    )
    prompt_file: str | None = of_prompt(None, "a prompt a line; -: stdin's lines", metavar="FILE")
    whole: bool = of_prompt(False, "the whole of --prompt-file is one prompt")
    chat: bool = of_prompt(False, "put each prompt into the chat template")
    interactive: bool = of_prompt(False, "chat or, without a template, continue your text")
    system: str | None = of_prompt(
        None,
        "with --chat or --interactive: the system message (default: the template's)",
        metavar="TEXT",
    )
    show_thinking: bool = of_output(
        False, "of gpt-oss: what it thinks before it answers, to stderr"
    )
    json: bool = of_output(False, "print one JSON object instead of the text")
    logprobs: bool = of_output(False, "with --json: the tokens' log-probabilities, too")
    profile: Path | None = of_output(None, "write a Chrome trace of the generation", metavar="FILE")

    def __post_init__(self):
        super().__post_init__()
        others = self.prompt or self.prompt_file or self.json or self.num_samples > 1
        if self.interactive and (others or self.time_budget):
            raise ValueError(
                "--interactive does not go with --prompt, --prompt-file, --json, --num-samples and "
                "--time-budget"
            )
        if self.system is not None and not (self.chat or self.interactive):
            raise ValueError("--system goes with --chat or --interactive")
        if self.whole and not self.prompt_file:
            raise ValueError("--whole goes with --prompt-file")
        if self.logprobs and not self.json:
            raise ValueError("--logprobs goes with --json")
        if [*self.prompt, self.prompt_file].count("-") > 1:
            raise ValueError("stdin can be read once: one - among --prompt and --prompt-file")
        if self.profile:
            self.profile = self.profile.resolve()
            with reading(f"--profile {self.profile}: cannot write there, name another place"):
                partial_directory(self.profile).cleanup()  # before the work


def generate_args(description: str) -> CommandLine:
    parser = Parser(description)
    parser.add_options(CommandLine)
    args = vars(parser.parse_args())
    args["template_options"] = dict(args["template_options"] or [])
    return CommandLine(**args)

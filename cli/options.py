"""
Command lines from dataclasses: a field that generate.option() made is an option. llm.Options are
generate.py's and LLM's; CommandLine, below, has what a terminal needs beside them.
"""

import argparse
import json
import math
import os
import re
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from cli.output import partial_directory
from generate import Sampling
from hub.checkpoint import reading
from llm import TINY, Options, of_output, of_prompt

# The headings of --help, in their order.
GROUPS = {
    "model": None,
    "speed": None,
    "quantization": "e.g. --compile --quantize int4 --group-size 128",
    "speculation": "e.g. --draft checkpoints/tiny-eagle --draft-tokens 4",
    "prompt": 'e.g. -p "One day" -p "Tom and Sue", or echo "One day" | python generate.py',
    "generation": "e.g. --temperature 0.7 --top-p 0.9 --seed 1",
    "output": None,
}
# The options that scripts have, too.
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
        raise ValueError(f"{message.removeprefix('argument ')}; --help lists the options")

    def parse_args(self) -> argparse.Namespace:
        args, unknown = self.parse_known_args()
        if not unknown:
            return args
        name = unknown[0].partition("=")[0]
        options = [option[2:] for option in self._option_string_actions if option[:2] == "--"]
        near = near_options(name.lstrip("-"), options)
        advice = f", did you mean {' or '.join(f'--{option}' for option in near)}?" if near else ""
        if not name.startswith("-") and "prompt" in options:
            advice = ", want -p before a prompt"
        self.error(f"{name}: no such option{advice}")

    def add_options(self, kind: type, *names: str) -> None:
        """Adds the fields of a dataclass, or those of these names, under the headings of GROUPS.
        What the class has of its own comes before what it inherits."""
        inherited = getattr(kind.__base__, "__dataclass_fields__", {})
        groups = {heading: [] for heading in GROUPS}
        for each in sorted(fields(kind), key=lambda each: each.name in inherited):
            flags = each.metadata.get("flags", [f"--{each.name.replace('_', '-')}"])
            if flags and (not names or each.name in names):
                groups[each.metadata["group"]].append((flags, each))
        for heading, members in groups.items():
            if members:
                group = self.add_argument_group(heading, GROUPS[heading])
            for flags, each in members:
                group.add_argument(*flags, dest=each.name, **settings(each))


def near_options(name: str, options: list[str]) -> list[str]:
    """What was probably meant: those that the name begins, else one that is much like it, else what
    begins the name."""
    name = name.replace("_", "-")
    return (
        [each for each in options if each.startswith(name)]
        or get_close_matches(name, options, 1, cutoff=0.7)
        or [each for each in options if name.startswith(each)]
    )


def settings(each: Field) -> dict:
    """A dataclass's field -> what argparse wants to know about the option."""
    said = each.metadata
    default = each.default_factory() if each.default is MISSING else each.default
    text = said["help"]
    if "default:" not in text:
        text += f" (default: {name_of(default, each.name)})"
    if each.type in (bool, bool | None):
        return dict(action="store_true", default=default, help=text)
    found = dict(
        default=default, choices=said.get("choices"), metavar=said.get("metavar"), help=text
    )
    kinds = each.type.__args__ if isinstance(each.type, types.UnionType) else [each.type]
    if list[str] in kinds:
        found["action"] = "append"
    elif dict in kinds:
        found |= dict(action="append", type=key_and_value)
    elif Path in kinds:
        found["type"] = place
    elif str not in kinds:
        if int not in kinds and float not in kinds:
            raise TypeError(f"{each.name}: no option has a value of {each.type}")
        found["type"] = within(int if int in kinds else float, said["low"], said["high"])
        found["metavar"] = found["metavar"] or "N"
    return found


def name_of(default, option: str) -> str:
    """A default as --help names it."""
    for each in fields(Sampling):
        if default is None and each.name == option:
            return f"the checkpoint's, else {each.default}"
    if default is False:
        return "off"
    if default is None or default == []:
        return "none"
    return "the bundled model" if default == TINY else str(default)


def within(kind: type, low: float = -math.inf, high: float = math.inf) -> Callable[[str], float]:
    """A type for argparse: a number of that kind from low to high."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"got {text!r:.60}, want {kind.__name__} from {low} to {high}"
            )
        return value

    return parse


def place(text: str) -> Path:
    """A type for argparse. An empty text, an unset variable of the shell say, would name the
    current directory."""
    if not text:
        raise argparse.ArgumentTypeError("got '', want a name")
    return Path(text)


def key_and_value(text: str) -> tuple[str, object]:
    """KEY=VALUE; a value that is no JSON is a text."""
    key, is_there, value = text.partition("=")
    if not key or not is_there:
        raise argparse.ArgumentTypeError(f"got {text!r:.60}, want KEY=VALUE")
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
        False, "print to stderr what the model thinks before it answers"
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
        if self.template_options and not (self.chat or self.interactive):
            raise ValueError("--template-option goes with --chat or --interactive")
        if self.prompt_file == "":
            raise ValueError("--prompt-file: got '', want a name")
        if self.whole and not self.prompt_file:
            raise ValueError("--whole goes with --prompt-file")
        if self.logprobs and not self.json:
            raise ValueError("--logprobs goes with --json")
        if [*self.prompt, self.prompt_file].count("-") > 1:
            raise ValueError("stdin can be read once: one - among --prompt and --prompt-file")
        if self.profile:
            self.profile = Path(os.path.realpath(self.profile))
            with reading(f"--profile {self.profile}: cannot write there, name another place"):
                partial_directory(self.profile).cleanup()  # before the work


def generate_args(description: str) -> CommandLine:
    parser = Parser(description)
    parser.add_options(CommandLine)
    args = vars(parser.parse_args())
    args["template_options"] = dict(args["template_options"] or [])
    return CommandLine(**args)

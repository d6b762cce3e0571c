"""
What `python generate.py` does: options, prompts, llm.LLM, output and report.
"""

import json
import signal
import sys
import warnings
from contextlib import nullcontext
from dataclasses import fields

import torch

import generate
from cli.chat import Chat
from cli.options import generate_args
from cli.output import (
    add_headings,
    format_report,
    progress,
    report,
    show,
    with_bar,
    written_whole,
)
from cli.prompts import read_prompts, system_messages
from hub.checkpoint import reading
from hub.tokenizer import PARTS
from llm import LLM, Completion, Options, make_completions, rank_completions

LARGE = 64  # rows; of fewer the texts are streamed


def main():
    """Opens the checkpoint, loads, compiles, generates and reports, in that order."""
    # The compiler's hints to its developers.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    sys.stdout.reconfigure(errors="replace")  # not every terminal shows all of Unicode
    args = generate_args(generate.__doc__)
    llm = LLM(load=False, **{each.name: getattr(args, each.name) for each in fields(Options)})
    if sys.stderr.isatty():
        llm.progress = progress
    wants_template = args.chat or args.system is not None or args.template_options
    if wants_template and not llm.tokenizer.template:
        raise ValueError(
            f"--chat, --system, --template-option: {args.checkpoint} has no chat template; without them its text is "
            f"continued"
        )
    if args.show_thinking and not llm.tokenizer.parts:
        raise ValueError(
            f"--show-thinking: {args.checkpoint} marks no thoughts, as {', '.join(PARTS)} do; "
            "leave it out"
        )
    if args.interactive:
        sys.stdin.reconfigure(errors="replace")
        # A chat's cache is allocated whole.
        llm.prepare(1, args.max_seq_length or min(llm.context, 8192))
    else:
        prompts = llm.team.agree(lambda: read_prompts(args))
        if args.chat:
            begin = system_messages(args.system)
            prompts = [[*begin, dict(role="user", content=prompt)] for prompt in prompts]
        completions = make_completions(prompts, args, llm.tokenizer, llm.context)
        room = max(completion.room for completion in completions)
        llm.prepare(len(completions), room, len(prompts))
        if llm.tokenizer.template and not args.chat and not args.quiet:
            # After what may fail: a reason stands first.
            print(
                "the prompt is continued as it is; --chat puts it into the checkpoint's chat "
                "template",
                file=sys.stderr,
            )
    if llm.team.ranks == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    with torch.profiler.profile() if args.profile else nullcontext() as profiler:
        if args.interactive:
            runs = [[answer] for answer in Chat(llm, args).run()]
        else:
            runs = [run_prompts(llm, completions, args)]
    if runs:
        result = report(llm, runs, args)
        if args.json:
            print(json.dumps(result))
        if not args.quiet:
            print("\n" + format_report(result), file=sys.stderr)
    if args.profile and llm.team.rank == 0:
        told = f"--profile {args.profile}: cannot be written"
        with reading(told), written_whole(args.profile) as trace:
            profiler.export_chrome_trace(str(trace))


def run_prompts(llm: LLM, completions: list[Completion], args) -> list[Completion]:
    """Generates and prints them; with a time budget in the order of their rank, once it is over. Of
    a large batch a terminal shows how far it is, then the texts."""
    add_headings(completions, args.chat, args.num_samples)
    steps = llm.complete(completions, args.num_samples, budget=args.time_budget)
    is_large = len(completions) > LARGE and not args.quiet
    if is_large:
        steps = with_bar(llm, completions, steps)
    if args.time_budget or (is_large and sys.stdout.isatty()):
        for _ in steps:
            pass
    if args.time_budget:
        completions = rank_completions(completions, args.num_samples)
    try:
        show([] if args.json else completions, steps, args.show_thinking)
    except ValueError:
        # The message to come has a line of its own.
        print(end="" if args.json else "\n", flush=True)
        raise
    steps.close()
    return completions

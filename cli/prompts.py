"""
Where prompts come from: options, files and stdin.
"""
import sys
from argparse import Namespace
from threading import Timer

from checkpoint import Tokenizer, UserError
from guard import MOST_TEXT, read_text, user_errors


def read_stdin(quiet: bool) -> str:
    """All of it. After a second of waiting a line on stderr says what is awaited, unless `quiet`."""
    hint = Timer(1, print, ["reading the prompt from stdin; Ctrl-D ends it"], dict(file=sys.stderr, flush=True))
    hint.daemon = True
    if not quiet:
        hint.start()
    try:
        with user_errors("stdin"):
            text = sys.stdin.buffer.read(MOST_TEXT + 1)
            if len(text) > MOST_TEXT:
                raise ValueError(f"more than {MOST_TEXT} bytes; give a part of them")
            return text.decode().replace("\r\n", "\n")
    finally:
        hint.cancel()


def read_prompts(args: Namespace) -> list[str]:
    """--prompt's texts, then --prompt-file's; without both, what a pipe or a redirected file holds. One newline at the
    end of a text is left out. UserError where a source that was named has no text."""
    if not args.prompt and not args.prompt_file:
        text = "" if sys.stdin.isatty() else read_stdin(args.quiet).removesuffix("\n")
        return [text if text.strip() else "Once upon a time"]
    prompts = [read_option(prompt, args.quiet) for prompt in args.prompt]
    return prompts + (read_file(args) if args.prompt_file else [])


def read_option(prompt: str, quiet: bool) -> str:
    if prompt != "-":
        return prompt
    text = read_stdin(quiet).removesuffix("\n")
    if not text.strip():
        raise UserError("--prompt -: stdin is empty; want a text")
    return text


def read_file(args: Namespace) -> list[str]:
    if str(args.prompt_file) == "-":
        text = read_stdin(args.quiet)
    else:
        text = read_text(args.prompt_file, encoding="utf-8-sig")
    if not text.strip():
        raise UserError(f"--prompt-file {args.prompt_file}: no prompt in it; want one a line")
    lines = [text.removesuffix("\n")] if args.whole else text.split("\n")
    return [line for line in lines if line.strip()]


def as_messages(prompts: list[str], args: Namespace, tokenizer: Tokenizer) -> list:
    """With --chat each prompt as a chat's messages. Without it a line on stderr says that there is a template."""
    if args.chat:
        system = [] if args.system is None else [dict(role="system", content=args.system)]
        return [[*system, dict(role="user", content=prompt)] for prompt in prompts]
    if tokenizer.template and not args.quiet:
        print("the prompt is continued as it is; --chat puts it into the checkpoint's chat template", file=sys.stderr)
    return prompts

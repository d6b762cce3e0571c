"""
Where prompts come from: options, files and stdin.
"""

import sys
from pathlib import Path
from threading import Timer

from hub.checkpoint import MOST_TEXT, read_text, reading_text


def read_stdin(quiet: bool) -> str:
    """All of it but for a newline at the end. After a second of waiting a line on stderr says what
    is awaited, unless `quiet`."""
    hint = Timer(
        1,
        print,
        ["reading the prompt from stdin; Ctrl-D ends it"],
        dict(file=sys.stderr, flush=True),
    )
    if not quiet:
        hint.start()
    try:
        with reading_text("stdin"):
            text = sys.stdin.buffer.read(MOST_TEXT + 1)
            if len(text) > MOST_TEXT:
                raise ValueError(f"more than {MOST_TEXT} bytes; give a part of them")
            return text.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    finally:
        hint.cancel()


def read_prompts(args) -> list[str]:
    """--prompt's texts, then --prompt-file's; without both, what a pipe or a redirected file holds.
    One newline at the end of a text is left out. ValueError where a source that was named has no
    text."""
    if not args.prompt and args.prompt_file is None:
        text = "" if sys.stdin.isatty() else read_stdin(args.quiet)
        return [text if text.strip() else "Once upon a time"]
    prompts = []
    for prompt in args.prompt:
        if prompt == "-":
            prompt = read_stdin(args.quiet)
            if not prompt.strip():
                raise ValueError("--prompt -: stdin is empty; want a text")
        prompts.append(prompt)
    if args.prompt_file is None:
        return prompts
    if args.prompt_file == "-":
        text = read_stdin(args.quiet)
    else:
        text = read_text(Path(args.prompt_file), encoding="utf-8-sig").removesuffix("\n")
    if not text.strip():
        raise ValueError(f"--prompt-file {args.prompt_file}: no prompt in it; want one a line")
    return prompts + ([text] if args.whole else [line for line in text.split("\n") if line.strip()])


def system_messages(text: str | None) -> list[dict]:
    return [] if text is None else [dict(role="system", content=text)]

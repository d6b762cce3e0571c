"""
How a command ends: exit code 0, 2 after a user's mistake, 130 after Ctrl-C, 141 after a closed pipe, 143 after SIGTERM.
"""
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from checkpoint import UserError, one_line
from tp import world_size


def report_errors(main: Callable[[], None], ranks=False):
    """Runs a command. A UserError is one line on stderr and exit code 2; Ctrl-C and a closed pipe end it quietly.

    ranks: the command may be one of several processes."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started the command closed it
            setattr(sys, name, open(os.devnull, "r+"))
    try:
        if not ranks:  # commands that may be ranks decide for themselves: see cli/generate.py's main()
            if world_size() > 1:
                raise UserError(f"{world_size()} processes, want one: start it without torchrun")
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if world_size() == 1:  # half-written files are removed; for ranks see ranks.run()
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has read enough
        sys.stdout = None
        sys.exit(141)
    except BaseException as error:
        if not is_expected(error):
            raise
        sys.stdout = None  # it may be what failed
        print(f"{Path(sys.argv[0]).name}: {message_of(error)}", file=sys.stderr)
        sys.exit(2)


def is_expected(error: BaseException) -> bool:
    """Whether it is no bug. The tokenizers library panics, with no Exception, over files that it does not expect."""
    return isinstance(error, (UserError, OSError, MemoryError)) or type(error).__name__ == "PanicException"


def message_of(error: BaseException) -> str:
    """Of a UserError with its keywords as options."""
    if isinstance(error, UserError):
        message = error.message.replace("`=", "` ")
        return one_line(re.sub(r"`(\w+)`", lambda found: "--" + found[1].replace("_", "-"), message))
    return "out of memory" if isinstance(error, MemoryError) else one_line(str(error))

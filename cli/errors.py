"""
How a command ends: exit code 0, 2 after a user's mistake, 130 after Ctrl-C, 141 after a closed
pipe, 143 after SIGTERM. Of the processes that torchrun started rank 0 speaks, and when one rank
ends, all do.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from hub.checkpoint import one_line
from tp import world_size


def report_errors(main: Callable[[], None], ranks=False):
    """Runs a command. A ValueError is one line on stderr and exit code 2; Ctrl-C and a closed pipe
    end it quietly.

    ranks: the command may be one of several processes."""
    for name in ("stdin", "stdout", "stderr"):  # None where whoever started the command closed it
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "r+"))
    try:
        if (
            not ranks
        ):  # commands that may be ranks decide for themselves: see cli/generate.py's main()
            if world_size() > 1:
                raise ValueError(f"{world_size()} processes, want one: start it without torchrun")
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if world_size() == 1:  # half-written files are removed; for ranks see run()
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
    """Whether it is no bug. The tokenizers library panics, with no Exception, over files that it
    does not expect."""
    return (
        isinstance(error, (ValueError, OSError, MemoryError))
        or type(error).__name__ == "PanicException"
    )


def message_of(error: BaseException) -> str:
    """Of a ValueError with its keywords as options."""
    if isinstance(error, ValueError):
        message = error.message.replace("`=", "` ")
        return one_line(
            re.sub(r"`(\w+)`", lambda found: f"--{found[1].replace('_', '-')}", message)
        )
    return "out of memory" if isinstance(error, MemoryError) else one_line(str(error))


# Ranks


def run(main: Callable[[], None]):
    """report_errors() for a command that may be one of several ranks.

    torchrun ends the others with SIGTERM, and passes Ctrl-C on. Both signals keep their default
    action, which ends a process at once. A Python handler would not run while the main thread waits
    for another rank, or for a GPU that waits for one."""
    if world_size() == 1:
        return report_errors(main, ranks=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    rank, code = int(os.environ.get("RANK", 0)), 1
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        report_errors(lambda: run_rank(main, rank), ranks=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # a bug
        tell_torchrun(f"{type(error).__name__}: {error}")
        sys.stderr = sys.__stderr__
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.flush()
    os._exit(code)  # NCCL and CUDA graphs would hang in Python's own clean-up


def run_rank(main: Callable[[], None], rank: int):
    try:
        main()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))  # no rank leaves while another needs its memory
    except BaseException as error:
        if is_expected(error):
            time.sleep(
                2 * (rank > 0)
            )  # where rank 0 fails too, it speaks, and torchrun ends this rank meanwhile
            sys.stderr = sys.__stderr__
            tell_torchrun(message_of(error))
        elif (
            isinstance(error, dist.DistError)
            or isinstance(error, RuntimeError)
            and "gloo" in str(error)
        ):
            tell_torchrun(
                "another rank ended", delay=1
            )  # that rank's own reason comes first, in the same second too
            raise ValueError(f"another rank ended: {error}") from error
        raise


def tell_torchrun(reason: str, delay=0):
    """torchrun's own report comes last, and long: it ends with the reason that stands in this file.
    Of several ranks' it takes the one with the earliest time, in whole seconds; `delay` is added to
    it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # as torch.distributed.elastic writes it
        details = dict(py_callstack=reason, timestamp=str(int(time.time()) + delay))
        with suppress(OSError), open(path, "w") as file:
            json.dump(dict(message=dict(message=reason, extraInfo=details)), file)

"""
How a command ends: exit code 0, 2 after a user's mistake, 130 after Ctrl-C, 141 after a closed
pipe, 143 after SIGTERM. A mistake is one line on stderr; a bug leaves its traceback. Of the
processes that torchrun started one speaks, and when one ends, all do.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hub.checkpoint import one_line
from tp import world_size


def report_errors(main: Callable[[], None], ranks: bool = False) -> None:
    """Runs a command of one process.

    ranks: it may be several, and Ctrl-C is the command's own matter: see run()."""
    for name in ("stdin", "stdout", "stderr"):
        # It is None where whoever started the command closed it.
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "r+"))
    try:
        if not ranks:
            if world_size() > 1:
                raise ValueError(f"{world_size()} processes, want one: start it without torchrun")
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if world_size() == 1:
            # An exception, so that half-written files are removed.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader, `head` say, has read enough.
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
    expected = isinstance(error, (ValueError, OSError, MemoryError))
    return expected or type(error).__name__ == "PanicException"


def message_of(error: BaseException) -> str:
    return "out of memory" if isinstance(error, MemoryError) else one_line(str(error))


# Ranks


def run(main: Callable[[], None]) -> None:
    """report_errors() for a command that may be one of several ranks.

    When one ends, torchrun ends the others with SIGTERM; Ctrl-C reaches all. Both signals keep
    their default action, which ends a process at once. A Python handler would not run while the
    main thread waits for another rank, or for a GPU that waits for one."""
    if world_size() == 1:
        return report_errors(main, ranks=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    code = 1
    try:
        report_errors(partial(run_rank, main), ranks=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # a bug
        traceback.print_exc()
    if sys.stdout:
        sys.stdout.flush()
    os._exit(code)  # NCCL and CUDA graphs would hang in Python's own clean-up


def run_rank(main: Callable[[], None]) -> None:
    """Rank 0 speaks. Another one does where it alone fails: torchrun gives it the time to."""
    rank, stderr = int(os.environ.get("RANK", 0)), sys.stderr
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        main()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))  # no rank leaves while another needs its memory
    except BaseException as error:
        # Gloo has no class of its own.
        of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
        left = of_gloo or isinstance(error, dist.DistError)
        if rank or left:
            # Another rank has the reason, or the same one, and speaks: torchrun ends this one now.
            time.sleep(2)
        sys.stderr = stderr
        if left:
            raise ValueError(f"another rank ended: {error}") from error
        raise

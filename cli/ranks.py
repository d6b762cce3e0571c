"""
How the processes that torchrun started end: rank 0 speaks, and when one rank ends, all do.
"""
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from checkpoint import UserError
from cli.errors import is_expected, message_of, report_errors
from tp import world_size


def run(main: Callable[[], None]):
    """report_errors() for a command that may be one of several ranks.

    torchrun ends the others with SIGTERM, and passes Ctrl-C on. Both signals keep their default action, which ends a
    process at once. A Python handler would not run while the main thread waits for another rank, or for a GPU that
    waits for one."""
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
            time.sleep(2 * (rank > 0))  # where rank 0 fails too, it speaks, and torchrun ends this rank meanwhile
            sys.stderr = sys.__stderr__
            tell_torchrun(message_of(error))
        elif isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "gloo" in str(error):
            tell_torchrun("another rank ended", delay=1)  # that rank's own reason comes first, in the same second too
            raise UserError(f"another rank ended: {error}") from error
        raise


def tell_torchrun(reason: str, delay=0):
    """torchrun's own report comes last, and long: it ends with the reason that stands in this file. Of several ranks'
    it takes the one with the earliest time, in whole seconds; `delay` is added to it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # as torch.distributed.elastic writes it
        details = dict(py_callstack=reason, timestamp=str(int(time.time()) + delay))
        with suppress(OSError), open(path, "w") as file:
            json.dump(dict(message=dict(message=reason, extraInfo=details)), file)

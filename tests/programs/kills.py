"""
Ends quantize.py and two ranks of generate.py at random moments, and looks at what is left.

    python tests/programs/kills.py --quantize 100 --ranks 20

With two GPUs:

    python tests/programs/kills.py --quantize 0 --ranks 20 --seconds 150 --device cuda --compile

quantize.py gets SIGTERM, SIGINT or SIGKILL. Then --out is not there, or it is whole, byte for byte;
SIGKILL alone may leave a directory out.partial-* beside it. Of two ranks, which start and then decode a text
of 16,000 tokens, one gets SIGKILL, or torchrun SIGTERM or SIGINT; all processes end within 15
seconds. Any other end is bad, and the exit code is 1.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from subprocess import DEVNULL, PIPE

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
from helpers import ROOT, TINY, make_endless, torchrun  # noqa: E402

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
MARK = f"KILLED_BY_{os.getpid()}"


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def quantize(out: Path) -> list:
    return [
        sys.executable,
        ROOT / "quantize.py",
        *f"--checkpoint {TINY} --out {out} --device cpu".split(),
    ]


def kill_quantize(root: Path, whole: dict[str, bytes], longest: float) -> str:
    """What happened; it begins with "bad" where that must not be."""
    out = root / "out"
    process = subprocess.Popen(quantize(out), stderr=PIPE, text=True)
    time.sleep(random.uniform(0, longest))
    number = random.choice(SIGNALS)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if out.exists() and content(out) != whole:
        return f"bad: {number.name}: out is not whole"
    shutil.rmtree(out, ignore_errors=True)
    left = [*root.iterdir()]
    allowed = [path for path in left if path.name.startswith("out.partial-")]
    if "Traceback" in errors or left != (allowed if number == signal.SIGKILL else []):
        return f"bad: {number.name}: left {left}, said {errors[-300:]}"
    for path in left:
        shutil.rmtree(path)
    return "quantize.py as it should be"


def running() -> list[int]:
    """torchrun and what it started, by the environment that all of them have."""
    found = subprocess.run(
        f"grep -ls {MARK} /proc/[0-9]*/environ", shell=True, capture_output=True, text=True
    )
    return [int(path.split("/")[2]) for path in found.stdout.split()]


def kill_ranks(options: list, longest: float) -> str:
    process = subprocess.Popen(
        torchrun(ROOT / "generate.py", *options),
        stdout=DEVNULL,
        stderr=DEVNULL,
        env=os.environ | {MARK: "1"},
    )
    time.sleep(random.uniform(0, longest))
    started = [pid for pid in running() if pid != process.pid]
    number = random.choice(SIGNALS if started else SIGNALS[:2])
    os.kill(random.choice(started) if number == signal.SIGKILL else process.pid, number)
    begun = time.monotonic()
    while running():
        if time.monotonic() - begun > 15:
            for pid in running():
                os.kill(pid, signal.SIGKILL)
            process.wait()
            return f"bad: {number.name}: processes are left after 15 s"
        time.sleep(0.05)
    process.wait()
    return "ranks as they should be"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantize", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=20)
    parser.add_argument(
        "--seconds",
        type=float,
        default=20,
        help="within which ranks are ended; they start and decode",
    )
    parser.add_argument("--device", default="cpu", help="of the ranks")
    parser.add_argument(
        "--compile", action="store_true", help="the ranks' code: on GPUs, CUDA graphs and kernels"
    )
    args, counts = parser.parse_args(), Counter()
    random.seed(0)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        root, endless = Path(directory, "quantized"), Path(directory, "endless")
        begun = time.monotonic()
        subprocess.run(quantize(Path(directory, "whole")), check=True, capture_output=True)
        longest, whole = time.monotonic() - begun, content(Path(directory, "whole"))
        make_endless(endless)
        options = (
            f"-p Once --checkpoint {endless} --max-new-tokens 16000 --device {args.device}".split()
        )
        options += ["--compile"] * args.compile
        root.mkdir()
        for trial in range(args.quantize + args.ranks):
            of_ranks = trial >= args.quantize
            happened = (
                kill_ranks(options, args.seconds)
                if of_ranks
                else kill_quantize(root, whole, longest)
            )
            print(happened, flush=True)
            counts[happened.partition(":")[0]] += 1
        subprocess.run(quantize(root / "out"), check=True, capture_output=True)
        counts["bad"] += [path.name for path in root.iterdir()] != ["out"]
    print(counts)
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""
Ends quantize.py and two ranks of generate.py at random moments, and looks at what is left.

    python tests/kills.py --quantize 100 --ranks 20
    python tests/kills.py --quantize 0 --ranks 20 --decoding --device cuda --compile      # wants two GPUs

quantize.py gets SIGTERM, SIGINT or SIGKILL. Then --out is not there, or it is whole, byte for byte; what SIGKILL left
beside it goes with the next run. Of two ranks one gets SIGKILL, or torchrun SIGTERM or SIGINT; all processes end
within 15 seconds. Any other end is bad, and the exit code is 1.
"""
import argparse
import hashlib
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
from threading import Timer

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from helpers import ROOT, TINY, make_endless, torchrun  # noqa: E402

PROMPT = "Once upon a time"
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGKILL


def digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def quantize(out: Path) -> list:
    return [sys.executable, ROOT / "quantize.py", "--checkpoint", TINY, "--out", out, "--device", "cpu"]


def kill_quantize(rng: random.Random, root: Path, whole: dict[str, str], longest: float) -> str:
    """What was left: "" where it is as it should be."""
    out, before = root / "out", {path.name for path in root.iterdir()}
    process = subprocess.Popen(quantize(out), stderr=subprocess.PIPE, text=True)
    time.sleep(rng.uniform(0, longest))
    number = rng.choice(SIGNALS)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    # A run that ends while it imports leaves what an earlier SIGKILL left.
    left = [path.name for path in root.iterdir() if path.name.startswith("out.partial-") and path.name not in before]
    if out.exists() and digest(out) != whole:
        return f"{number.name}: out is not whole"
    if "Traceback" in errors or left and number != signal.SIGKILL:
        return f"{number.name}: left {left}, said {errors[-300:]}"
    shutil.rmtree(out, ignore_errors=True)
    return ""


def descendants(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout.split()
    return [child for one in map(int, found) for child in (one, *descendants(one))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_all(pids: list[int]) -> None:
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)


def decodes(process: subprocess.Popen) -> bool:
    """Whether text comes behind the prompt, which is printed before the first step, within five minutes."""
    late = Timer(300, lambda: kill_all([process.pid, *descendants(process.pid)]))
    late.start()
    text = process.stdout.read(len(PROMPT) + 1)
    late.cancel()
    return len(text) > len(PROMPT)


def kill_ranks(rng: random.Random, options: list, decoding: bool) -> str:
    """What happened; it begins with "bad" where that must not be."""
    command = torchrun(ROOT / "generate.py", "-p", PROMPT, *options)
    begun = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if decoding and not decodes(process):
        kill_all([process.pid, *descendants(process.pid)])
        return f"bad: no text came, exit code {process.wait()}"
    ready, delay = time.monotonic() - begun, rng.uniform(0, 2 if decoding else 20)
    time.sleep(delay)
    if decoding and process.poll() is not None:
        return "bad: the text was whole before the signal"
    started = descendants(process.pid)
    number = rng.choice(SIGNALS)
    victim = rng.choice(started) if number == signal.SIGKILL and started else process.pid
    if process.poll() is None:
        os.kill(victim, number if victim != process.pid or number != signal.SIGKILL else signal.SIGTERM)
    begun = time.monotonic()
    while process.poll() is None or any(map(alive, started)):
        if time.monotonic() - begun > 15:
            kill_all([process.pid, *started])
            process.wait()
            return f"bad: {number.name}: processes are left after 15 s"
        time.sleep(0.05)
    return f"{number.name} {delay:.1f} s after {ready:.1f} s: all ended in {time.monotonic() - begun:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="of the ranks")
    parser.add_argument("--compile", action="store_true", help="the ranks' code: on GPUs, CUDA graphs and kernels")
    parser.add_argument("--decoding", action="store_true", help="of the ranks: only while they decode")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, counts = random.Random(args.seed), Counter()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        begun, root = time.monotonic(), Path(directory)
        subprocess.run(quantize(root / "whole"), check=True, capture_output=True)
        longest, whole = time.monotonic() - begun, digest(root / "whole")
        for _ in range(args.quantize):
            wrong = kill_quantize(rng, root, whole, longest)
            counts["bad" if wrong else "quantize.py as it should be"] += 1
            print(wrong, end="\n" * bool(wrong), flush=True)
        subprocess.run(quantize(root / "out"), check=True, capture_output=True)
        counts["bad"] += sorted(path.name for path in root.iterdir()) != ["out", "whole"]
        options = ["--device", args.device, *["--compile"] * args.compile]
        if args.decoding:
            make_endless(root / "endless")
            options += ["--checkpoint", root / "endless", "--max-new-tokens", "16000"]
        for _ in range(args.ranks):
            happened = kill_ranks(rng, options, args.decoding)
            counts["bad" if happened.startswith("bad") else "ranks as they should be"] += 1
            print(happened, flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())

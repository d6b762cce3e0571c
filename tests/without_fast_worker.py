"""
What test_without_fast.py does in one process. The current directory is a copy of the repository
without fast/.

    python without_fast_worker.py DEVICE OUT [OPTION ...]

OUT is a JSON file: what each command gave. generate.py gets the options.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

# In the place of this file's folder, which has a folder fast, too.
sys.path[0] = str(Path.cwd())

import torch  # noqa: E402

import generate  # noqa: E402
import quantize  # noqa: E402
from cli.errors import report_errors  # noqa: E402
from scripts import benchmark, evaluate  # noqa: E402

TEXT = (
    "--prompt",
    "One day",
    "--prompt",
    "Tom and Sue went to the park",
    "--max-new-tokens",
    30,
    "--temperature",
    0,
    "--quiet",
    "--json",
    "--dtype",
    "float32",
)
COMMANDS = dict(
    write=(
        quantize.main,
        "--checkpoint checkpoints/tiny --out gptq --gptq --group-size 64 --calibration "
        "checkpoints/tiny/README.md --calibration-tokens 256",
    ),
    evaluate=(
        evaluate.main,
        "--checkpoint checkpoints/tiny --text checkpoints/tiny/README.md --max-tokens 200 --json "
        "--dtype float32 --compare checkpoints/tiny:int8 gptq",
    ),
    benchmark=(benchmark.main, "checkpoints/tiny --no-compile --runs 1 --new-tokens 5"),
)
TEXTS = dict(
    plain="",
    int8="--quantize int8",
    gptq="--checkpoint gptq",
    draft="--draft checkpoints/tiny-draft --draft-tokens 4",
    lookup="--draft prompt-lookup --draft-tokens 4",
)


def command(main, *args) -> dict:
    """A command's exit code, stdout and stderr."""
    torch._dynamo.reset()
    sys.argv, code = ["command", *map(str, args)], 0
    with (
        redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            report_errors(main)
        except SystemExit as stop:
            code = stop.code
        out.flush()
    return dict(code=code, out=out.buffer.getvalue().decode(), err=err.getvalue())


def main() -> None:
    device, out, *options = sys.argv[1:]
    done = {
        name: command(main, *line.split(), "--device", device)
        for name, (main, line) in COMMANDS.items()
    }
    for name, line in TEXTS.items():
        done[name] = command(generate.main, *TEXT, *line.split(), *options, "--device", device)
    imported = [name for name in sys.modules if name.partition(".")[0] == "fast"]
    results = dict(commands=done, generate=generate.__file__, imported=imported)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""
What test_without_fast.py does in one process. The current directory is a copy of the repository without fast/.

    python without_fast_worker.py DEVICE OUT [OPTION ...]

OUT is a JSON file: what each command gave, and what the golden checkpoints did. generate.py gets the options, but where
that would compile many draft lengths.
"""
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

import torch  # noqa: E402

import generate  # noqa: E402
import quantize  # noqa: E402
from checkpoint import Checkpoint, load_model  # noqa: E402
from cli.errors import report_errors  # noqa: E402
from helpers import GOLDEN, GREEDY, error, golden, is_golden, put, read  # noqa: E402
from scripts import benchmark, evaluate  # noqa: E402

TEXT = ("--prompt", "One day", "--prompt", "Tom and Sue went to the park", "--max-new-tokens", 30, "--temperature", 0,
        "--quiet", "--json", "--dtype", "float32")
DRAFT = ("--draft", "checkpoints/tiny-draft", "--draft-tokens")
EVALUATED = ("--checkpoint", "checkpoints/tiny", "--text", "checkpoints/tiny/README.md", "--max-tokens", 200, "--json",
             "--dtype", "float32", "--compare", "checkpoints/tiny:int8", "checkpoints/tiny:int4", "gptq")
QUANTIZED = ("--checkpoint", "checkpoints/tiny", "--out", "gptq", "--gptq", "--group-size", 64, "--calibration",
             "checkpoints/tiny/README.md", "--calibration-tokens", 256)
MEASURED = ("checkpoints/tiny", "--no-compile", "--runs", 1, "--new-tokens", 5)
COMMANDS = {  # name -> script, its main(), its arguments; in this order
    "plain": ("generate.py", generate.main, TEXT),
    "int8": ("generate.py", generate.main, (*TEXT, "--quantize", "int8")),
    "int4": ("generate.py", generate.main, (*TEXT, "--quantize", "int4")),
    "write": ("quantize.py", quantize.main, QUANTIZED),
    "gptq": ("generate.py", generate.main, (*TEXT, "--checkpoint", "gptq")),
    **{f"draft {policy}": ("generate.py", generate.main, (*TEXT, *DRAFT, policy))
       for policy in ("4", "auto", "hf", "bass")},
    "prompt-lookup": ("generate.py", generate.main, (*TEXT, "--draft", "prompt-lookup", "--draft-tokens", 4)),
    "samples": ("generate.py", generate.main, (*TEXT, "--num-samples", 2)),
    "evaluate": ("scripts/evaluate.py", evaluate.main, EVALUATED),
    "benchmark": ("scripts/benchmark.py", benchmark.main, MEASURED)}


def command(script: str, main, *args) -> dict:
    """A command's exit code, stdout and stderr."""
    torch._dynamo.reset()
    sys.argv, code = [script, *map(str, args)], 0
    with redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out, redirect_stderr(io.StringIO()) as err:
        try:
            report_errors(main)
        except SystemExit as stop:
            code = stop.code
        out.flush()
    return dict(code=code, out=out.buffer.getvalue().decode(), err=err.getvalue())


@torch.no_grad()
def check_golden(family: Path, device: torch.device) -> dict:
    """How far the logits are from transformers', and whether the greedy tokens of a ragged batch are the same."""
    model, errors = load_model(Checkpoint(family), device, torch.float32), []
    tokens, logits = golden(family)
    model.setup(64, 1)
    for row, ref in zip(tokens, logits):
        model.begin_rows([len(row)])
        out = read(model, row[None].to(device))[0]
        errors.append(error(out.cpu(), ref))
    return dict(error=max(errors), same=is_golden(generate.Engine(model, 64, 3, GREEDY), family))


# Without kernels each draft length is compiled as a whole: with a fixed one that is done once, here not.
EAGER = {"draft auto", "draft hf", "draft bass"}


def main() -> None:
    device, out, *options = sys.argv[1:]
    commands = {}
    for name, (script, command_main, args) in COMMANDS.items():
        more = options if script == "generate.py" and name not in EAGER else []
        commands[name] = command(script, command_main, *args, *more, "--device", device)
    results = dict(commands=commands, generate=generate.__file__)
    results["golden"] = {family.name: check_golden(family, torch.device(device)) for family in sorted(GOLDEN.iterdir())}
    results["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] == "fast")
    put(Path(out), results)


if __name__ == "__main__":
    main()

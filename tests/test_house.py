"""The house of the repository: who imports whom. A fork may add files to every room."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from helpers import ROOT, TINY, program, python, python_blocks

# Each room, a file or a folder, may import those of the rows above it, and itself.
ROWS = [
    ["model"],
    ["generate", "quantize", "tp"],
    ["speculative"],
    ["gptq", "hub"],
    ["drafts"],
    ["llm"],
    ["cli"],
]
ALLOWED = {room: {room, *sum(ROWS[:n], [])} for n, row in enumerate(ROWS) for room in row}
ALLOWED["fast"] = {"fast", "triton", *sum(ROWS[:3], []), "drafts"}
ROOMS = {*ALLOWED, "triton", "scripts", "tests", "helpers"}
# The two exceptions: a function, and what it imports.
UPWARDS = {
    ("generate", "main"): "cli",
    ("quantize", "main"): "cli",
    ("llm", "import_fast"): "fast",
}
SHELL = {"argparse", "fcntl", "readline", "termios", "tty"}  # modules of a command line
FILES = [
    path
    for room in ALLOWED
    for path in [ROOT / f"{room}.py", *(ROOT / room).glob("*.py")]
    if path.exists()
]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(tree: ast.AST) -> set[str]:
    """The first parts of the names of the modules that are imported, wherever in the file."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_what_is_below_it_alone(path):
    """So there is no circle. But for UPWARDS."""
    tree, room = ast.parse(path.read_text(encoding="utf-8")), room_of(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (room, node.name) in UPWARDS:
            assert imports(node) & ROOMS == {UPWARDS[room, node.name]}
            node.body = [ast.Pass()]
    if room in ("generate", "quantize"):  # how a command starts: see the ends of these files
        tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if __name__")]
    assert imports(tree) & ROOMS <= ALLOWED[room]
    assert room == "cli" or not imports(tree) & SHELL


def test_the_model_imports_torch_alone():
    tree = ast.parse((ROOT / "model.py").read_text(encoding="utf-8"))
    assert imports(tree) <= {"collections", "dataclasses", "functools", "math", "torch", "typing"}


def test_llm_needs_no_command_line():
    """And loads no file twice."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from llm import LLM
ours = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
ours = [file for file in ours if file.startswith({str(ROOT) + "/"!r})]
print(len(ours) == len(set(ours)))
print(*sorted(name for name in sys.modules if name == "cli" or name.startswith("cli.")))
print(*({SHELL!r} & {{name for module in [*sys.modules.values()] for name in vars(module)
        if (getattr(module, "__file__", None) or "") in ours}}))
"""
    done = python("-c", code)
    assert done.stdout.splitlines() == ["True", "", ""], done.stderr


@pytest.mark.parametrize("command", ["generate.py", "quantize.py"])
def test_a_command_is_loaded_once(command):
    """Although it starts as __main__."""
    code = f"""
import runpy, sys
sys.argv = [{command!r}, "--help"]
sys.path.insert(0, {str(ROOT)!r})
try:
    runpy.run_path({str(ROOT / command)!r}, run_name="__main__")
except SystemExit:
    pass
"""
    done = python("-X", "importtime", "-c", code)
    name = command.removesuffix(".py")
    assert "usage:" in done.stdout
    assert not re.search(rf"\| +{name}$", done.stderr, re.M), "imported beside __main__"


def test_model_and_generate_alone_are_an_engine(tmp_path):
    """A loop with random weights, in an empty folder with two files."""
    for name in ("model.py", "generate.py"):
        shutil.copy(ROOT / name, tmp_path)
    done = python("-c", program("two_files.py"), cwd=tmp_path, PYTHONPATH="")
    assert done.stdout.split() == ["2"] * 5, done.stderr


def test_the_readmes_loop_runs_on_model_and_three_files_of_hub(tmp_path):
    [loop] = [block for block in python_blocks() if "load_model" in block]
    shutil.copy(ROOT / "model.py", tmp_path)
    (tmp_path / "hub").mkdir()
    for name in ("__init__.py", "families.py", "checkpoint.py", "tokenizer.py"):
        shutil.copy(ROOT / "hub" / name, tmp_path / "hub")
    done = python("-c", loop.replace("checkpoints/tiny", str(TINY)), cwd=tmp_path, PYTHONPATH="")
    assert done.stdout.startswith("Once upon a time") and len(done.stdout) > 200, done.stderr


def test_the_readme_has_a_row_for_each_room():
    rows = re.findall(
        r"^\| \[(\S+?)/?\]\(\1/?\) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M
    )
    rooms = [f"{room}.py" if (ROOT / f"{room}.py").exists() else room for room in ALLOWED]
    assert {*rooms, "scripts", "tests"} <= {*rows}

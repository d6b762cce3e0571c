"""The house of the repository: who imports whom, how much there is to read, and how it is laid
out."""

import ast
import re
from pathlib import Path

import pytest

from helpers import ROOT, python

REFERENCE = [
    ROOT / f"{name}.py"
    for name in "model checkpoint sampling generate speculative quantize tp".split()
]
CLI, FAST, SCRIPTS, TESTS = (
    sorted((ROOT / name).glob("*.py")) for name in ("cli", "fast", "scripts", "tests")
)
TOP = sorted(ROOT.glob("*.py"))
CORE = [*TOP, *CLI]  # all but fast/, scripts/ and tests/

# What each file may import of this repository: always files of the lines above its own, so there is
# no circle.
MAY_IMPORT = {
    file: set(others)
    for file, *others in map(
        str.split,
        """
model
policies
sampling
families     model
checkpoint   families model
tokenizer    checkpoint
speculative  policies sampling
eagle        checkpoint families model speculative
quantize     checkpoint model
tp           checkpoint model
guard        checkpoint eagle families model sampling tokenizer
completion   checkpoint guard tokenizer
formats      checkpoint guard model quantize
gptq         checkpoint formats model quantize
generate     checkpoint completion eagle formats guard model sampling speculative tp
""".strip().splitlines(),
    )
}
UPPER_MAY_IMPORT = dict(
    cli=["cli", *MAY_IMPORT],
    fast="eagle fast model quantize sampling speculative tp triton".split(),
)
SHELL = {"argparse", "fcntl", "readline", "termios", "tty"}  # modules of a command line


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def imports(tree: ast.AST) -> set[str]:
    """The first parts of the names of the modules that are imported, wherever in the file."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


def project_imports(tree: ast.AST) -> set[str]:
    return imports(tree) & {
        "fast",
        "cli",
        "scripts",
        "tests",
        "helpers",
        "triton",
        *(path.stem for path in CORE),
    }


UPWARDS = {
    ("generate", "main"): "cli",
    ("quantize", "main"): "cli",
    ("generate", "import_fast"): "fast",
}


@each(TOP)
def test_a_file_imports_what_is_below_it_alone(path):
    """But for UPWARDS: main() of generate.py and of quantize.py imports cli/, import_fast() of
    generate.py fast/."""
    tree = parse(path)
    for node in functions(tree):
        if (path.stem, node.name) in UPWARDS:
            assert project_imports(node) == {UPWARDS[path.stem, node.name]}
            node.body = [ast.Pass()]
    tree.body = [
        node for node in tree.body if not ast.unparse(node).startswith("if __name__ == '__main__'")
    ]
    assert project_imports(tree) <= MAY_IMPORT[path.stem]
    assert not imports(tree) & SHELL


def test_the_table_of_imports_has_no_circle():
    below = set()
    for file, names in MAY_IMPORT.items():
        assert names <= below, file
        below.add(file)
    assert below == {path.stem for path in TOP}


def test_the_model_imports_torch_alone():
    assert imports(parse(ROOT / "model.py")) == {"dataclasses", "functools", "torch"}


@each([*FAST, *CLI])
def test_the_command_line_stands_on_top_and_fast_imports_nothing_that_reads_files_or_talks(path):
    assert project_imports(parse(path)) <= {*UPPER_MAY_IMPORT[path.parent.name]}


def test_llm_needs_no_command_line():
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from generate import LLM
ours = {{name: module for name, module in sys.modules.items()
        if (getattr(module, "__file__", None) or "").startswith({str(ROOT) + "/"!r})}}
print(*sorted(ours))
print(*sorted(name for name in {SHELL!r} for module in ours.values() if name in vars(module)))
"""
    done = python("-c", code)
    assert done.stdout.splitlines() == [" ".join(sorted(MAY_IMPORT.keys() - {"gptq"})), ""], (
        done.stderr
    )


def test_the_readme_has_a_row_for_each_file_of_the_core_and_for_the_command_line():
    rows = re.findall(
        r"^\| \[(\S+?)/?\]\(\1/?\) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M
    )
    assert {*(path.name for path in TOP), "cli", "fast", "scripts"} <= set(rows)

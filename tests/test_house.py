"""The house of the repository: who imports whom, how large the core is, and how it is laid out."""
import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from helpers import ROOT

CORE_LINES = 2785  # of code, as many as there are: the design asks for 2,600, so none may be added before some go
CORE = sorted(ROOT.glob("*.py"))
FAST, SCRIPTS, TESTS = (sorted((ROOT / name).glob("*.py")) for name in ("fast", "scripts", "tests"))
FILES = [*CORE, *FAST, *SCRIPTS, *TESTS]
FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER}


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


def imports(tree: ast.AST) -> set[str]:
    """The first part of the name of each module that is imported, wherever in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found.add(node.module.partition(".")[0])
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, FUNCTION)]


def code_lines(path: Path) -> int:
    """Without blank lines, comments and docstrings."""
    text, docstrings, lines = path.read_text(encoding="utf-8"), set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@each(CORE)
def test_the_core_imports_neither_fast_nor_triton_and_generate_guards_the_one_import(path):
    tree = parse(path)
    if path.name == "generate.py":
        [guard] = [node for node in ast.walk(tree) if isinstance(node, FUNCTION) and node.name == "import_fast"]
        assert "fast" in imports(guard) and any(isinstance(node, ast.Try) for node in guard.body)
        guard.body = [ast.Pass()]  # in place: what is left of the file imports no fast
    assert not {"fast", "triton"} & imports(tree)


def test_the_model_imports_torch_alone():
    assert imports(parse(ROOT / "model.py")) == {"dataclasses", "torch"}


@each([path for path in (*CORE, *FAST) if path.name != "generate.py"])
def test_only_scripts_and_tests_import_generate(path):
    assert "generate" not in imports(parse(path))


def test_the_cores_imports_make_no_circle():
    names = {path.stem for path in CORE}
    left = {path.stem: imports(parse(path)) & names - {path.stem} for path in CORE}
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def test_the_core_is_small():
    assert sum(map(code_lines, CORE)) <= CORE_LINES, {path.name: code_lines(path) for path in CORE}


@each(CORE)
def test_a_function_of_over_60_lines_has_a_docstring_that_says_why(path):
    """Of more than one sentence: what it does, and why it is long."""
    for node in functions(path):
        if node.end_lineno - node.lineno + 1 > 60:
            said = ast.get_docstring(node) or ""
            assert len(re.findall(r"\.(?:\s|$)", said)) > 1, f"{node.name}: {node.end_lineno - node.lineno + 1} lines"


@each([*CORE, *FAST, *SCRIPTS])
def test_a_constructor_has_at_most_8_arguments(path):
    for node in functions(path):
        given = node.args
        count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
        assert node.name != "__init__" or count <= 8, f"line {node.lineno}: {count}"


@each(FILES)
def test_lines_have_at_most_120_characters(path):
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [n for n, line in enumerate(lines, 1) if len(line) > 120] == []


@each([*CORE, *FAST, *SCRIPTS])
def test_no_conditional_expression_is_part_of_another(path):
    nested = [inner.lineno for outer in ast.walk(parse(path)) if isinstance(outer, ast.IfExp)
              for inner in ast.walk(outer) if isinstance(inner, ast.IfExp) and inner is not outer]
    assert nested == []


def test_the_readme_has_a_row_for_each_file_of_the_core():
    rows = re.findall(r"^\| \[(\S+)\]\(\1\) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert {path.name for path in CORE} <= set(rows)

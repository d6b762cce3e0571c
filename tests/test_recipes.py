"""What README and docstrings tell who forks, followed to the letter: all recipes in one copy of the
repository, whose commands and tests must like them."""

import ast
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import (
    DRAFT,
    ROOT,
    TINY,
    beside,
    change_tensors,
    ended,
    error,
    make,
    program,
    put,
    read_json,
    rewrite,
    same_but_for_ties,
    tiny,
)
from llm import LLM

# What a recipe's part begins with: the file, and the beginning of the one line beside which it goes.
PLACE = re.compile(r"^# (?P<file>[\w/]+\.py), (?:(?P<side>above|below): (?P<line>.+)|a new file)$")
SOURCES = [
    "README.md",
    "model.py",
    "quantize.py",
    "hub/formats.py",
    "drafts/__init__.py",
    "drafts/policies.py",
]


def texts(path: Path) -> list[str]:
    """README's blocks of Python, or a file's docstrings, without indentation."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.findall(r"```python\n(.*?)```", text, re.S)
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [ast.get_docstring(n) for n in ast.walk(ast.parse(text)) if isinstance(n, nodes)]
    # Paragraphs of code are those that are indented.
    return [
        textwrap.dedent(found)
        for doc in docs
        if doc
        for found in re.findall(r"(?:^    .*\n|^\n(?=\n*    ))+", doc + "\n", re.M)
    ]


def parts_of(source: str) -> list[tuple[str, str | None, str | None, str]]:
    """The parts of a file's recipes: file, side, line, code."""
    found = []
    for text in texts(ROOT / source):
        code = None
        for line in text.splitlines():
            if place := PLACE.match(line):
                code = []
                found.append((*place.group("file", "side", "line"), code))
            elif code is not None:
                code.append(line)
    return [(*place, "\n".join(code).strip("\n") + "\n") for *place, code in found]


def follow(tree: Path, file: str, side: str | None, line: str | None, code: str) -> None:
    path = tree / file
    if side is None:
        path.write_text(code)
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    # In the code, not in the docstring that holds the recipe.
    docs = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs |= set(range(node.lineno - 1, node.end_lineno))
    [at] = [n for n, of in enumerate(lines) if of.strip().startswith(line) and n not in docs]
    opens = side == "below" and lines[at].endswith(("{", "("))
    indent = re.match(" *", lines[at + opens])[0]
    new = textwrap.indent(code, indent).rstrip("\n").split("\n")
    if side == "below":
        at += 1
    elif not indent:
        new += ["", ""]
    lines[at:at] = new
    path.write_text("\n".join(lines))


def forked(tree: Path) -> Path:
    """A copy of the repository with all recipes."""
    hidden = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=hidden)
    for source in SOURCES:
        parts = parts_of(source)
        assert parts, source
        for part in parts:
            follow(tree, *part)
    return tree


# Those of the rooms that the recipes change.
TESTS = "test_house", "test_readme", "test_sampling", "test_quantize", "hub/test_formats"
GREEDY_20 = dict(temperature=0, max_new_tokens=20)


WO = "model.layers.0.self_attn.o_proj.weight"


def write_rows8(directory: Path) -> Tensor:
    """A checkpoint of the format of the recipe -> what WO is, in float64."""
    for name, dense in make(directory).items():
        if name.endswith("proj.weight"):
            numbers = torch.randint(-128, 128, dense.shape)
            scale = torch.rand(len(dense)) / 100 + 0.001
            module = name.removesuffix(".weight")
            held = {name: numbers.to(torch.int8), f"{module}.scale": scale}
            change_tensors(directory, **held)
        if name == WO:
            exact = numbers.double() * scale.double()[:, None]
    rewrite(directory / "config.json", quantization_config=dict(quant_method="rows8"))
    return exact


@beside
def fork(directory: Path) -> Callable:
    """The tree; what recipes.py says; the command line's text and its refusal; the fork's own tests."""
    tree = forked(directory / "tree")
    unit = directory / "unit"
    shutil.copytree(TINY, unit)
    put(unit / "config.json", read_json(unit / "config.json") | dict(model_type="unit_llama"))
    rows8, layers = directory / "rows8", directory / "layers.safetensors"
    exact = write_rows8(rows8)
    command = (sys.executable, "generate.py", "-p", "One day", "--max-new-tokens", "20", "--quiet")
    tests = [f"tests/{name}.py" for name in TESTS]

    def run(*command):
        return ended(command, cwd=tree, PYTHONPATH="")

    quantize = sys.executable, "quantize.py", "--checkpoint", TINY, "--bits", "2", "--out"

    return lambda: dict(
        use=run(sys.executable, "-c", program("recipes.py"), TINY, DRAFT, unit),
        layers=run(sys.executable, "-c", program("recipe_layers.py"), TINY, rows8, layers),
        held=layers.exists() and load_file(layers),
        rows8=exact,
        greedy=run(*command, "--temperature", "0"),
        always=run(*command, "--epsilon", "1"),
        refused=run(*command, "--epsilon", "2"),
        written=[
            (run(*quantize, out, "--format", of), run(*command, "--checkpoint", out))
            for of in ("gptq", "compressed-tensors")
            for out in [directory / of]
        ],
        help=run(sys.executable, "generate.py", "--help"),
        tests=run(
            sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "not command", *tests
        ),
    )


@pytest.fixture
def told(fork) -> dict:
    assert fork["use"].returncode == 0, fork["use"].stderr
    return json.loads(fork["use"].stdout)


def test_a_sampler_of_ones_own(fork, told):
    """With epsilon at 1 the likeliest token alone is left: through LLM, a call, a stream and the
    command line, with a draft and without."""
    greedy = told["greedy"]
    assert len(greedy) == 20
    # Also with attention's weights made, to look at.
    assert greedy == LLM(str(TINY), device="cpu", quiet=True)("One day", **GREEDY_20).tokens
    for name in ("always", "call", "draft"):
        assert told[name] == greedy, name
    assert told["stream"]
    assert fork["always"].stdout == fork["greedy"].stdout != "", fork["always"].stderr
    assert "--epsilon" in fork["help"].stdout
    assert "epsilon=2: want float from 0 to 1" in told["refused"]
    assert fork["refused"].returncode == 2
    assert "epsilon: got '2', want float from 0 to 1" in fork["refused"].stderr
    assert fork["refused"].stderr.count("\n") == 1


@pytest.mark.gpu
def test_a_sampler_of_ones_own_with_kernels(tmp_path):
    """Where the rule is on, the sampling kernels step aside, a line says so, and the model's stay;
    then they are back."""
    tree = forked(tmp_path / "tree")
    done = ended(
        (sys.executable, "-c", program("recipe_on_a_gpu.py"), TINY, DRAFT), cwd=tree, PYTHONPATH=""
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        prompt, told = json.loads(line)
        captures, kernels, (greedy, always, again) = zip(*told)
        assert captures == (True, False, True) and all(kernels) and again == greedy
        same_but_for_ties(tiny(), [prompt], [greedy], [always], 0.02)
    assert "plain PyTorch samples: fast/ does not know Sampling.epsilon" in done.stderr


def test_a_draft_and_a_policy_of_ones_own(told):
    assert told["repeat"] == told["growing"] == told["greedy"]
    assert told["repeat k"] == 2 and told["growing k"] >= 1


def test_a_family_by_a_field_of_config(told):
    assert told["lengths"] == pytest.approx([3.0, 3.0], rel=1e-4)


def test_a_kv_cache_of_ones_own(told):
    assert len(told["fp8"]) == 20


def products(fork: dict, kind: str, w: Tensor) -> list[float]:
    """How far a layer's products with x are from those in float64 with w [N, K]."""
    held = fork["held"]
    assert held, fork["layers"].stderr
    want = held[f"{kind} x"].double() @ w.T
    return [error(held[f"{kind} {how}"], want) for how in ("y", "fast")]


def test_a_kind_of_codes_of_ones_own(fork, told):
    """Its weights are the nearest of four values, half a step away at most."""
    held = fork["held"]
    assert held, fork["layers"].stderr
    words, scales, zeros = (held[f"int2 {name}"] for name in ("qweight", "scales", "zeros"))
    exact = load_file(TINY / "model.safetensors")[WO].double()
    q = torch.stack([words >> shift & 3 for shift in range(0, 32, 2)], -1).flatten(1)
    assert q.shape == exact.shape and [*q.unique()] == [0, 1, 2, 3]
    of = torch.arange(q.shape[1]) // (q.shape[1] // scales.shape[1])  # each input's group
    step = scales.double()[:, of]
    w = (q - zeros[:, of]) * step
    assert ((w - exact).abs() <= 0.501 * step).all()
    assert max(products(fork, "int2", w)) < 1e-5
    assert len(told["int2"]) == 20
    assert "int2" in fork["help"].stdout
    for steps in fork["written"]:  # quantize.py's files, and what generate.py makes of them
        assert [step.returncode for step in steps] == [0, 0], steps


def test_a_quantized_format_of_ones_own(fork):
    w = fork["rows8"]
    assert max(products(fork, "rows8", w)) < 1e-5
    for rank, inputs in enumerate(torch.arange(w.shape[1]).chunk(2)):
        assert max(products(fork, f"rank {rank}", w[:, inputs])) < 1e-5


def test_the_forks_own_tests_stay_green(fork):
    done = fork["tests"]
    assert done.returncode == 0, done.stdout[-3000:]

"""scripts/rivals.py as far as it goes without a GPU and a network: its commands, and what it reads of
their output."""

import shlex

import pytest

from helpers import absent, one_line
from scripts.rivals import COMMIT, PACKAGES, figures, main

SAID = """Compilation time: 77.12 seconds
Time for inference 1: 0.98 sec total, 203.60 tokens/sec
==========
Average tokens/sec: 203.81
Memory used: 13.88 GB
"""


@pytest.fixture
def planned(call, tmp_path):
    """-> the commands, each as its folder's name and its words."""

    def run(*args) -> list[tuple[str, list[str]]]:
        code, out, err = call("rivals.py", main, *args, "--dry-run", "--folder", tmp_path)
        assert code == 0 and list(tmp_path.iterdir()) == []
        found = [line.removeprefix("(cd ").removesuffix(")") for line in out.splitlines()]
        parts = [line.split(" && ") for line in found]
        return [(folder.rpartition("/")[2], shlex.split(words)) for folder, words in parts]

    return run


@pytest.mark.parametrize("engine", PACKAGES)
def test_an_engine_is_installed_where_it_then_runs(planned, engine):
    commands = planned(engine)
    assert commands[0] == (engine, [*commands[0][1][:1], "-m", "venv", "env"])
    python = commands[1][1][0]
    assert python.endswith(f"{engine}/env/bin/python")
    assert absent(" ".join(PACKAGES[engine]), commands[1][1]) == []
    assert commands[-1][1][0] == python


@pytest.mark.parametrize(
    "weights, file", [("bf16", "model.pth"), ("int8", "model_int8.pth"), ("int4", "int4.g32.pth")]
)
def test_gpt_fast_runs_at_its_commit_with_the_weights_that_it_made(planned, weights, file):
    commands = planned("gpt-fast", "--weights", weights)
    assert any(words[:2] == ["git", "checkout"] and COMMIT in words for _, words in commands)
    assert any("quantize.py" in words for _, words in commands) == (weights != "bf16")
    folder, words = commands[-1]
    assert folder == "source" and words[words.index("--checkpoint_path") + 1].endswith(file)
    setting = "--prompt 5 --max_new_tokens 200 --batch_size 1 --temperature 0.8 --top_k 200"
    assert setting in " ".join(words)


def test_ranks_start_under_torchrun(planned):
    [*_, (_, words)] = planned("gpt-fast", "--ranks", 4)
    assert words[words.index("--nproc-per-node") + 1] == "4"


def test_figures_are_those_of_the_output():
    assert figures("gpt-fast", SAID) == dict(tokens_per_s=203.81, start_s=77.12)
    said = '{"loading": 1}\n{"tokens_per_s": 216.0, "start_s": 68.0}\nbye\n'
    assert figures("vllm", said) == dict(tokens_per_s=216.0, start_s=68.0)


@pytest.mark.parametrize(
    "args, words",
    [
        ("", "ENGINE"),
        ("sglang", "sglang gpt-fast"),
        ("vllm --weights int8", "--weights int8 vllm bf16, fp8"),
        ("vllm --ranks 2", "--ranks 2 gpt-fast"),
        ("gpt-fast --batch 0", "--batch 0"),
    ],
)
def test_mistakes_are_one_line(call, args, words):
    assert absent(words, one_line(call("rivals.py", main, *args.split()))) == []

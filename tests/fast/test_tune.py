"""scripts/tune.py with made-up times: what it finds is what kernel_for() then takes."""

import sys
from copy import deepcopy
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
from tqdm import tqdm

from fast import common, tuning
from fast.tuning import LIBRARY, kernel_for
from helpers import ROOT, absent, put, read_json

sys.path.insert(0, str(ROOT / "scripts"))
import tune

GPU = SimpleNamespace(
    name="made-up GPU", major=9, multi_processor_count=132, shared_memory_per_block_optin=232448
)
CPU = torch.device("cpu")


def cost(shape: tuple[int, int], rows: int, choice: dict) -> float:
    tiles = -(-rows // 16) if rows > 8 else -(rows - 1).bit_length()
    return 1 + Random(str([shape, tiles, tune.without_rows(choice)])).randrange(1000)


def entry(rows: int, choice: dict) -> dict:
    return dict(rows=rows) | choice


@pytest.fixture
def bar() -> tqdm:
    """What it said is in bar.said."""
    made = tqdm(disable=True)
    made.said = []
    made.write = made.said.append
    return made


@pytest.fixture
def table(monkeypatch) -> dict:
    """tuned.json's of a made-up GPU."""
    made = {}
    monkeypatch.setattr(tuning, "table", lambda name: made)
    for module in common, tuning:
        monkeypatch.setattr(module, "gpu", lambda device: GPU)
    kernel_for.cache_clear()
    yield made
    kernel_for.cache_clear()


@pytest.fixture
def timed(monkeypatch, table):
    """A tuner whose times are those of a function of rows, choice and spend; of one shape if not
    otherwise named."""
    monkeypatch.setattr(tune.Tuner, "cublas", lambda *sizes: 1.0)
    monkeypatch.setattr(
        tune.Tuner,
        "__init__",
        lambda self, what, format: self.__dict__.update(
            format=format, device=CPU, shapes=tune.shapes_of(what, format)
        ),
    )

    def make(time, what: str = "512x256", format: str = "int4") -> tune.Tuner:
        def take(self, name: str, rows: int, choice: dict, spend: int = 12) -> float:
            self.take(name, rows, choice)
            return time(rows, choice, spend, self.shapes[name])

        monkeypatch.setattr(tune.Tuner, "time", take)
        return tune.Tuner(what, format)

    return make


@pytest.mark.parametrize("format", ["16-bit", "int4"])
@pytest.mark.parametrize("what", ["llama-3.1-8b/2", "512x16384"])  # the last one's best has slices
def test_the_fastest_of_each_number_of_rows_is_taken(timed, monkeypatch, bar, what, format):
    made = timed(lambda rows, choice, spend, shape: cost(shape, rows, choice), what, format)
    monkeypatch.setattr(tune, "KEPT", 1)
    monkeypatch.setattr(tuning, "rules_of_thumb", lambda *_: [])

    def chosen_by_others() -> list[dict]:
        others = *range(2, 33), *range(41, 201)
        return [
            tune.without_rows(kernel_for(format, N, K, M, CPU))
            for N, K in made.shapes.values()
            for M in others
        ]

    made.tune(ROWS := [2, 8, 24, 64, 200], bar)
    chosen = chosen_by_others()
    made.tune([40], bar)  # 33 to 40 rows
    assert chosen_by_others() == chosen
    for N, K in made.shapes.values():
        for M in ROWS:
            costs = [cost((N, K), M, choice) for choice in tune.candidates(format, M, N, K)]
            assert cost((N, K), M, kernel_for(format, N, K, M, CPU)) == min(costs)
        assert kernel_for(format, N, K, 1000, CPU) == LIBRARY
    before = deepcopy(made.table)
    made.check(ROWS, bar)
    assert "worst 1.000" in bar.said[-1] and made.table == before


def test_a_check_of_what_no_table_has_compares_the_rules_of_thumb(timed, monkeypatch, bar):
    monkeypatch.setattr(tuning, "rules_of_thumb", lambda *_: [entry(40, tune.PACKED_FEW[0])])
    made = timed(lambda rows, choice, *_: 2 + (choice == LIBRARY))
    made.check([3, 24, 80], bar)
    assert made.table == {}
    assert absent("1 more than 3% behind, the worst 1.500 512x256 with 80 rows", bar.said[0]) == []


def test_many_rows_take_the_library_where_its_time_drops(timed, bar):
    own = next(
        choice for choice in tune.candidates("int4", 400, 512, 256) if choice["kernel"] == "gemm"
    )
    library = {270: 90, 271: 90, 272: 100.5, 273: 102}

    def time(rows: int, choice: dict, *_) -> float:
        if choice == LIBRARY:
            return library.get(rows, 150)
        return 200 if choice != own or rows == 290 else 100

    made = timed(time)
    made.tune([320], bar)
    assert made.table["512x256"] == [entry(269, own), entry(272, LIBRARY), entry(320, own)]
    assert bar.said[0].endswith("320: 100.0 (100.00)")


def test_the_table_is_replaced_as_a_whole(table, tmp_path, monkeypatch):
    """Or not at all. It is pruned: an entry that says what the next one says goes."""
    path, old = (
        tmp_path / "tuned.json",
        {"another": {"int8": {"64x64": [entry(1, LIBRARY)]}}, GPU.name: {}},
    )
    put(path, old)
    own, other = tune.PACKED_FEW[:2]
    table["int4"] = {"512x256": [entry(4, own), entry(8, own), entry(9, other), entry(12, own)]}
    with monkeypatch.context() as failing, pytest.raises(ZeroDivisionError):
        failing.setattr(Path, "replace", lambda *paths: 1 / 0)
        tune.write(path, GPU.name)
    assert read_json(path) == old
    tune.write(path, GPU.name)
    assert read_json(path) == old | {GPU.name: {"int4": {"512x256": table["int4"]["512x256"][1:]}}}
    assert [*tmp_path.iterdir()] == [path]


def test_a_choice_of_an_old_tuned_json_is_not_taken(tmp_path, monkeypatch, capsys):
    """One line says so, and rules of thumb choose."""
    path = tmp_path / "tuned.json"
    put(
        path, {"a GPU of old": {"int4": {"512x256": [[1, "row", 4, 2, 3, 1, 1], [512, "library"]]}}}
    )
    monkeypatch.setattr(tuning, "PATH", path)
    assert tuning.table("a GPU of old") == {}
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "in an old form" in said and "python scripts/tune.py" in said


@pytest.mark.parametrize(
    "what, formats, made",
    [
        ("4096x576", "16-bit,int4,int4-64,int8", ["16-bit", "int4-64", "int8"]),
        ("4096x64", "int4", []),
        ("llama-2-70b/16", "int4", ["int4"]),
    ],
)
def test_groups_that_do_not_divide_are_left_out(call, monkeypatch, what, formats, made):
    units = []
    monkeypatch.setattr(tune, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(common, "triton", True)
    monkeypatch.setattr(tune, "compile_all", lambda found, *_: units.extend(found) or sys.exit())
    code, _, err = call("tune.py", tune.main, what, "--formats", formats)
    assert (code, units) == (None if made else 2, [(what, format) for format in made])
    assert ("128 do not divide K" in err) == ("70b" not in what)


def test_kernels_are_compiled_on_the_device_that_was_asked_for(monkeypatch):
    """In a worker, whose current GPU is the first; what needs too much of one is passed over."""
    did = MagicMock(shapes=dict(down=(256, 64)), layers=[{}])
    did.run.side_effect = did.runtime.errors.OutOfResources = MemoryError
    for owner, name in ((common, "triton"), (tune, "small_tuner"), (torch.cuda, "device")):
        monkeypatch.setattr(owner, name, did)
    did.return_value = did
    tune.compile_kernel("small", "int4", CPU, "down", 3, LIBRARY)
    assert did.mock_calls[1:4] == [call.take("down", 3, LIBRARY), call(CPU), call.__enter__()]


def test_what_was_not_tuned_has_a_rule_of_thumb(table, monkeypatch):
    rules = [entry(1, tune.PACKED_FEW[2]), entry(16, tune.PACKED_FEW[0])]
    tuned = [entry(1, tune.PACKED_FEW[3]), entry(8, LIBRARY)]
    monkeypatch.setattr(tuning, "rules_of_thumb", lambda *_: rules)
    table["int4"] = {"512x256": tuned}
    taken = [kernel_for("int4", 512, 256, M, CPU) for M in (1, 8, 9, 17)]
    assert taken == [*tuned, rules[1], LIBRARY] and kernel_for("int4", 256, 256, 1, CPU) == rules[0]


def test_a_rank_without_outputs_has_rules_of_thumb(table):
    assert kernel_for("int4", 0, 256, 1, CPU)["kernel"] == "gemm"


def test_each_product_is_timed(monkeypatch, table):
    """On a CPU, by the plain twins."""
    runs = []
    monkeypatch.setattr(tune, "milliseconds", lambda run, *spend: runs.append(run()) or 2.0)
    monkeypatch.setattr(tune, "LAYERS", 3)
    for format in ("16-bit", "int8"):
        made = tune.Tuner("smollm2-135m", format, CPU)
        with torch.no_grad():
            assert [made.time(name, 3, LIBRARY) for name in made.shapes] == [2e3 / 3] * 4
    assert [len(run) for run in runs] == [3] * 8

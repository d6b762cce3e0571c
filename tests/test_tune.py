"""scripts/tune.py with made-up times: what it finds is what kernel_for() then takes."""
import json
import sys
import zlib
from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from checkpoint import UserError
from fast import common, tuning
from fast.tuning import LIBRARY, kernel_for
from helpers import ROOT, absent

sys.path.insert(0, str(ROOT / "scripts"))
import tune  # noqa: E402

GPU = SimpleNamespace(name="made-up GPU", major=9, multi_processor_count=132, shared_memory_per_block_optin=232448)
CPU = torch.device("cpu")


def cost(shape: tuple[int, int], rows: int, choice: dict) -> float:
    tiles = -(-rows // 16) if rows > 8 else -(rows - 1).bit_length()
    return 1 + zlib.crc32(json.dumps([shape, tiles, tune.without_rows(choice)]).encode()) % 1000


def use_gpu(monkeypatch):
    for module in common, tuning:
        monkeypatch.setattr(module, "gpu", lambda device: GPU)


def entry(rows: int, choice: dict) -> dict:
    return dict(rows=rows) | choice


@pytest.fixture
def small(monkeypatch):
    """A model of this name."""
    monkeypatch.setitem(tune.SHAPES, "small", replace(tune.SHAPES["llama-3.1-8b"], dim=256, n_head=4, n_kv_head=2,
                                                      head_dim=64, ffn_dim=768))


@pytest.fixture
def bar() -> tqdm:
    """What it said is in bar.said."""
    made = tqdm(disable=True)
    made.said = []
    made.write = made.said.append
    return made


@pytest.fixture
def tuner(monkeypatch, small):
    table = {}
    monkeypatch.setattr(tuning, "table", lambda name: table)
    use_gpu(monkeypatch)
    kernel_for.cache_clear()
    monkeypatch.setattr(tune.Tuner, "cublas", lambda *sizes: 1.0)
    monkeypatch.setattr(tune.Tuner, "__init__", lambda self, what, format: self.__dict__.update(
        format=format, device=CPU, shapes=tune.shapes_of(what, format)))
    yield tune.Tuner
    kernel_for.cache_clear()


@pytest.fixture
def timed(monkeypatch, tuner):
    """A tuner whose times are those of a function of rows, choice and spend; of one shape if not otherwise named."""
    def make(time, what: str = "512x256", format: str = "int4", kept: float = 1.01) -> tune.Tuner:
        def take(self, name: str, rows: int, choice: dict, spend: int = 12) -> float:
            self.take(name, rows, choice)
            return time(rows, choice, spend, self.shapes[name])

        monkeypatch.setattr(tune, "KEPT", kept)
        monkeypatch.setattr(tune.Tuner, "time", take)
        return tuner(what, format)
    return make


@pytest.mark.parametrize("format", ["16-bit", "int4"])
@pytest.mark.parametrize("what", ["small", "small/2", "512x256", "512x16384"])  # the last one's best has slices
def test_the_fastest_of_each_number_of_rows_is_taken(timed, monkeypatch, bar, what, format):
    made = timed(lambda rows, choice, spend, shape: cost(shape, rows, choice), what, format, 1)
    monkeypatch.setattr(tuning, "rules_of_thumb", lambda *_: [])
    made.tune(ROWS := [2, 8, 24, 64, 200], bar)
    made.tune([40], bar)  # changes nothing for others
    for N, K in made.shapes.values():
        for M in ROWS:
            costs = [cost((N, K), M, choice) for choice in tune.candidates(format, M, N, K)]
            assert cost((N, K), M, kernel_for(format, N, K, M, CPU)) == min(costs)
        assert kernel_for(format, N, K, 1000, CPU) == LIBRARY
    before = deepcopy(tuning.table(GPU.name))
    made.check(ROWS, bar)
    assert "worst 1.000" in bar.said[-1] and tuning.table(GPU.name) == before

    costs = {cost((N, K), 24, choice): choice for choice in tune.candidates(format, 24, N, K)}
    tuning.table(GPU.name)[format][f"{N}x{K}"] = [entry(24, costs[max(costs)])]
    kernel_for.cache_clear()
    made.check([24], bar)
    ratio = max(costs) / min(costs)
    assert f"worst {ratio:.3f}" in bar.said[-1] and f"{N}x{K} with 24 rows" in bar.said[-1]


def test_a_check_of_what_no_table_has_compares_the_rules_of_thumb(timed, monkeypatch, bar):
    times, rule = Counter(), tune.PACKED_FEW[0]
    monkeypatch.setattr(tuning, "rules_of_thumb", lambda format, N, K, device: [entry(40, rule)])

    def time(rows: int, choice: dict, *_) -> float:
        times[rows, *choice.values()] += 1
        return 2 + (choice == LIBRARY)

    timed(time, kept=1).check([3, 24, 80], bar)
    assert tuning.table(GPU.name) == {"int4": {}}
    # once as a candidate, three times as one of eight, twelve as one of three; as it is what is chosen, too, no more
    assert times[24, *rule.values()] == times[3, *rule.values()] == 16
    assert times[80, "library"] == 10
    assert absent("1 more than 3% behind, the worst 1.500 with 80 rows", bar.said[0]) == []


def test_a_choice_stays_until_another_gains(timed, bar):
    second_takes = {2: 95, 3: 100.5, 48: 95, 49: 97, 57: 97, 64: 97}  # the first takes 100
    first, second = [choice for choice in tune.candidates("int4", 24, 512, 256) if choice["kernel"] == "gemm"][:2]

    made = timed(lambda rows, choice, *_: 100 if choice == first else second_takes.get(rows, 103) if choice == second
                 else 200)
    made.tune([64, 4, 3, 48, 2], bar)
    assert made.table["512x256"] == [entry(2, second), entry(3, second), entry(4, first), entry(48, first),
                                     entry(64, second)]


def test_one_bad_time_does_not_end_a_choice(timed, bar):
    """Timed badly at first, the choice of fewer rows is still among those timed carefully."""
    stays = tune.PACKED_FEW[3]

    def time(rows: int, choice: dict, spend: int, _) -> float:
        if choice == stays:
            return 300 if spend == 2 and rows == 24 else 100
        return 99.5 if rows > 16 else 200

    made = timed(time)
    made.tune([16, 24], bar)
    assert made.table["512x256"] == [entry(16, stays), entry(24, stays)]


@pytest.mark.parametrize("gain, scales", [(0, False), (3, True)])
def test_weights_are_scaled_for_a_gain_of_2_percent_only(timed, bar, gain, scales):
    """Also where fewer rows have chosen that."""
    plain, scaled = tune.PACKED_MORE[:2]
    assert (plain["scaled"], scaled["scaled"]) == (0, 1)

    made = timed(lambda rows, choice, *_: 100 - (3 if rows <= 32 else gain) if choice == scaled
                 else 100 if choice == plain else 200)
    made.tune([48, 32], bar)
    assert made.table["512x256"] == [entry(32, scaled), entry(48, scaled if scales else plain)]


def test_many_rows_take_the_library_where_its_time_drops(timed, bar):
    first, second = [choice for choice in tune.candidates("int4", 400, 512, 256) if choice["kernel"] == "gemm"][:2]
    library = {270: 90, 271: 90, 272: 100.5, 273: 102, 447: 99.5, 448: 90, 449: 94}

    def time(rows: int, choice: dict, *_) -> float:
        if choice == LIBRARY:
            return library.get(rows, 150)
        return (100 if choice == first else 95 if choice == second and rows > 448 else 200) * (2 if rows == 290 else 1)

    made = timed(time)
    made.table["512x256"] = [entry(256, second), entry(288, first), entry(360, LIBRARY), entry(416, LIBRARY),
                              entry(512, first)]
    made.tune([512, 320, 448], bar)
    assert made.table["512x256"] == [
        entry(256, second), entry(269, first), entry(272, LIBRARY), entry(320, first), entry(360, LIBRARY),
        entry(384, LIBRARY), entry(447, first), entry(448, LIBRARY), entry(449, LIBRARY), entry(512, second)]
    assert bar.said[0].endswith("320: 100.0 (100.00), 448: 90.0 (90.00), 512: 95.0 (95.00)")


def test_the_table_is_replaced_as_a_whole(tuner, tmp_path, monkeypatch):
    old = {"another": {"int8": {"64x64": [entry(1, LIBRARY)]}}, GPU.name: {}}
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(old))
    tuning.table(GPU.name)["int4"] = {"512x256": [entry(1, tune.PACKED_FEW[2]), entry(8, LIBRARY)]}
    with monkeypatch.context() as failing:
        failing.setattr(Path, "replace", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tune.write(path, GPU.name)
    assert json.loads(path.read_text()) == old
    tune.write(path, GPU.name)
    assert json.loads(path.read_text()) == old | {GPU.name: tuning.table(GPU.name)}
    assert '    {"rows": 8, "kernel": "library"}\n' in path.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]


def served(entries: list[dict], rows: int) -> dict | None:
    """The choice for so many rows, as kernel_for() finds it."""
    return next((tune.without_rows(entry) for entry in entries if rows <= entry["rows"]), None)


def test_pruned_and_cut_entries_choose_the_same():
    a, b = tune.PACKED_FEW[1], tune.PACKED_FEW[0]
    entries = [entry(rows, choice) for rows, choice in
               [(1, a), (2, b), (4, b), (8, a), (16, b), (32, b), (48, b), (50, LIBRARY), (64, LIBRARY)]]
    pruned = tune.prune(entries)
    assert pruned == [entries[i] for i in (0, 2, 3, 6, 8)] and tune.prune(pruned) == pruned and tune.prune([]) == []
    again = {*range(9, 17), *range(17, 33), *range(53, 60)}
    left = tune.cut(pruned, again)
    assert [entry["rows"] for entry in left] == [1, 4, 8, 48, 52, 64] and tune.cut(pruned, {500}) == pruned
    for rows in range(70):
        assert served(pruned, rows) == served(entries, rows)
        assert rows in again or served(left, rows) == served(entries, rows)
    assert tune.cut(left, {*range(1, 65)}) == []


def test_tuned_json_is_as_the_tuner_writes_it():
    text = tuning.PATH.read_text()
    tables = json.loads(text)
    assert tune.to_json(tables) + "\n" == text
    for shapes in (shapes for formats in tables.values() for shapes in formats.values()):
        assert all(tune.prune(entries) == entries for entries in shapes.values())
    assert tune.to_json({"GPU": {"int4": {}}}) == '{\n "GPU": {\n  "int4": {}\n }\n}'


def test_a_choice_of_an_old_tuned_json_is_not_taken(tmp_path, monkeypatch, capsys):
    """One line says so, and rules of thumb choose."""
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({GPU.name: {"int4": {"512x256": [[1, "row", 4, 2, 3, 1, 1], [512, "library"]]}}}))
    monkeypatch.setattr(tuning, "PATH", path)
    use_gpu(monkeypatch)
    tuning.table.cache_clear()
    kernel_for.cache_clear()
    taken = [kernel_for("int4", 512, 256, M, CPU)["kernel"] for M in (1, 300)]
    tuning.table.cache_clear()
    kernel_for.cache_clear()
    said = capsys.readouterr().err
    assert taken == ["gemm", "gemm"]
    assert said.count("\n") == 1 and "in an old form" in said and "python scripts/tune.py" in said


@pytest.mark.parametrize("what, formats, made", [
    ("4096x576", "16-bit,int4,int4-64,int8", ["16-bit", "int4-64", "int8"]), ("4096x64", "int4", None),
    ("llama-2-70b/16", "int4", ["int4"])])
def test_groups_that_do_not_divide_are_left_out(monkeypatch, capsys, what, formats, made):
    units = []
    monkeypatch.setattr(sys, "argv", ["tune.py", what, "--formats", formats])
    monkeypatch.setattr(tune, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(common, "triton", True)
    monkeypatch.setattr(tune, "compile_all", lambda found, rows, device: units.extend(found))
    monkeypatch.setattr(tune, "Tuner", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError if made else UserError, match=None if made else "none is left"):
        tune.main()
    assert units == [(what, format) for format in made or ()]
    assert ("128 do not divide K" in capsys.readouterr().err) == ("70b" not in what)


def test_kernels_are_compiled_on_the_device_that_was_asked_for(monkeypatch):
    """In a worker, whose current GPU is the first; what needs too much of one is passed over."""
    did, errors = [], SimpleNamespace(OutOfResources=MemoryError)
    monkeypatch.setattr(common, "triton", SimpleNamespace(runtime=SimpleNamespace(errors=errors)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: did.append(device) or nullcontext())

    def run(layer, name, x, residual):
        did.append((name, x.shape))
        raise MemoryError

    tuner = SimpleNamespace(shapes=dict(down=(256, 64)), layers=[{}], take=lambda *choice: did.append(choice), run=run)
    monkeypatch.setattr(tune, "small_tuner", lambda *unit: tuner)
    tune.compile_kernel("small", "int4", CPU, "down", 3, LIBRARY)
    assert did == [("down", 3, LIBRARY), CPU, ("down", (3, 64))]


def test_what_was_not_tuned_has_a_rule_of_thumb(tuner, monkeypatch):
    rules = [entry(1, tune.PACKED_FEW[2]), entry(16, tune.PACKED_FEW[0]), entry(64, tune.PACKED_FEW[1])]
    tuned = [entry(1, tune.PACKED_FEW[3]), entry(8, LIBRARY)]
    monkeypatch.setattr(tuning, "rules_of_thumb", lambda *_: rules)
    tuning.table(GPU.name)["int4"] = {"512x256": tuned}
    taken = [kernel_for("int4", N, 256, M, CPU) for N, M in ((512, 1), (512, 8), (512, 9), (512, 17), (512, 65),
                                                                (256, 1), (256, 16))]
    assert taken == [*tuned, *rules[1:], LIBRARY, *rules[:2]]


def test_a_rank_without_outputs_has_rules_of_thumb(monkeypatch):
    use_gpu(monkeypatch)
    assert [choice["rows"] for choice in tuning.rules_of_thumb("int4", 0, 256, CPU)] == [8, 64, 512]


def test_each_product_is_timed(monkeypatch, small):
    """On a CPU, by the plain twins."""
    runs, tables = [], {}
    monkeypatch.setattr(tuning, "table", lambda name: tables)
    use_gpu(monkeypatch)
    monkeypatch.setattr(tune, "milliseconds", lambda run, *spend: runs.append(run()) or 2.0)
    monkeypatch.setattr(tune, "LAYERS", 3)
    for format in ("16-bit", "int8"):
        made = tune.Tuner("small", format, CPU)
        with torch.no_grad():
            assert [made.time(name, 3, LIBRARY) for name in made.shapes] == [2e3 / 3] * 4
    assert [len(run) for run in runs] == [3] * 8

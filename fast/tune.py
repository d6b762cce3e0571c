"""
Find the fastest kernel for each weight shape, format and number of rows on this GPU, and write it into tuned.json.

    python scripts/tune.py llama-2-7b llama-3.1-8b
    python scripts/tune.py llama-2-70b/4                                       # the first rank's part of four
    python scripts/tune.py 14336x21504 --formats int4                          # one product, N x K
    python scripts/tune.py llama-2-7b --check --rows 3,28,112                  # is its choice right in between?

One row: the best sizes of a layer's kernels depend on each other, as one's first loads share the GPU with the end of
the one before; they are searched in turn, in a chain of whole layers, attention included. Several rows: each product
alone, with the library's (for int8 and int4: after dequantizing) as one of the candidates. No weight is in the cache: a
graph reads each once, and the cache is cleared before it is replayed.
"""
import functools
import json
import multiprocessing
import os
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

import kernels  # noqa: E402
from benchmark import SHAPES  # noqa: E402
from checkpoint import UserError  # noqa: E402
from cli import Parser, find_device, report_errors  # noqa: E402
from fast import product as fused  # noqa: E402
from model import Config  # noqa: E402
from packed import LEAST_COLUMNS, MOST_ROWS, KernelLinear, PackedLinear  # noqa: E402
from tp import Shard  # noqa: E402

FORMATS = {"16-bit": None, "int8": (8, -1), "int4": (4, 128), "int4-64": (4, 64), "int4-32": (4, 32)}
ROWS = [1, 2, 4, 8, 16, 32, 48, *range(64, 256, 32), *range(256, 513, 64)]
KEPT = 1.01  # times the best time: that long, what fewer rows chose is kept
MANY = 256  # rows; beyond, the library comes near the kernels, and each number of rows has the faster of the two
LAYERS = 8  # in a graph, whose start then counts for little
# The sizes of "row" and "rows": see kernels.tuned and packed.packed_linear.
PLAIN_ROW = [["row", *sizes] for sizes in product((2, 4, 8), (2, 3, 4, 5), (4, 8), (1, 2, 4, 8, 12))]
PLAIN_ROWS = [["rows", *sizes] for sizes in ((16, 256, 6, 1), (16, 256, 6, 2), (16, 512, 3, 2), (32, 256, 3, 2),
                                             (64, 64, 5, 4), (64, 128, 4, 4), (64, 128, 6, 4), (128, 64, 4, 8))]
PACKED_ROW = [["row", *sizes, programs, slices] for sizes, programs, slices in product(
    ((4, 2, 3), (4, 2, 6), (4, 4, 2), (4, 4, 3), (4, 4, 4), (8, 2, 3), (8, 2, 4), (8, 4, 2), (8, 4, 3), (16, 2, 3)),
    (1, 2, 3, 4, 5, 6, 8, 12), (1, 2, 3, 4, 6))]
# With an occupancy, and of two warps too, 4 and 16 rows take 6% less than without (60 products, one scan, H200).
PACKED_FEW = [["rows", *sizes, slices, 0] for sizes, slices in product(
    ((16, 64, 2, 4, 2, 8), (16, 64, 2, 4, 2, 10), (16, 64, 4, 3, 4, 5), (16, 64, 4, 5, 4, 8), (32, 64, 2, 4, 2, 8),
     (32, 64, 2, 4, 2, 10), (32, 64, 2, 4, 2, 12), (32, 64, 4, 3, 4, 3), (32, 64, 4, 3, 4, 6), (32, 64, 4, 4, 4, 5),
     (32, 64, 4, 5, 4, 5)), (1, 2, 3, 4))]
PACKED_MORE = [["rows", *sizes, slices, scaled] for sizes, slices, scaled in product(
    ((64, 64, 1, 3, 4, 3), (64, 64, 1, 4, 4, 3), (128, 64, 1, 3, 4, 2), (128, 64, 1, 4, 4, 2), (128, 64, 1, 3, 8, 2),
     (256, 64, 1, 3, 8, 2), (64, 128, 1, 3, 4, 2), (64, 128, 1, 3, 4, 3), (128, 128, 1, 3, 4, 2),
     (128, 128, 1, 3, 8, 1), (256, 128, 1, 3, 8, 1), (128, 256, 1, 3, 8, 1)), (1, 2, 3, 4, 6, 8), (0, 1))]


def make_linear(N: int, K: int, format: str, gated: bool, device: torch.device) -> nn.Module:
    """Random weights; packed ones straight from random codes."""
    if format == "16-bit":
        linear = nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
        return linear.requires_grad_(False)
    bits, group = FORMATS[format]
    C = 1 if group == -1 else K // group
    codes = torch.randint(2 ** bits, (N, K), device=device, dtype=torch.uint8)
    return KernelLinear(PackedLinear(codes, torch.rand(N, C, device=device) / K ** 0.5, None, bits), gated)


def copies(size: int) -> int:
    """How many products with weights of so many bytes make a graph: of large ones fewer, which saves time."""
    return min(LAYERS, max(4, 400_000_000 // size))


def milliseconds(run: Callable[[], None], spend: int = 12) -> float:
    """Of one call, replayed as a CUDA graph for so many milliseconds; the median. Infinite if it does not fit the
    GPU."""
    try:
        run()
    except kernels.triton.runtime.errors.OutOfResources:
        return float("inf")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return kernels.triton.testing.do_bench(graph.replay, warmup=spend / 3, rep=spend, return_mode="median")


def config_of(what: str, format: str) -> Config | None:
    """A model's, or that of the first rank's part of it."""
    name, _, ranks = what.partition("/")
    if not ranks:
        return SHAPES.get(name)
    return Shard(SHAPES[name], (FORMATS[format] or (16, 1))[1], 0, int(ranks)).config


def shapes_of(what: str, format: str) -> dict[str, tuple[int, int]]:
    """N and K of a layer's four products, or of the one."""
    if not (config := config_of(what, format)):
        return {"down": tuple(map(int, what.split("x")))}
    D, E, F = config.dim, config.head_dim, config.ffn_dim
    heads = config.n_head + 2 * config.n_kv_head
    return {"qkv": (heads * E, D), "out": (D, config.n_head * E), "gate_up": (2 * F, D), "down": (D, F)}


class Tuner:
    """A model shape's four products in one format, LAYERS times over."""

    def __init__(self, what: str, format: str, device: torch.device, few_outputs: bool = False):
        self.format, self.device, self.shapes = format, device, shapes_of(what, format)
        self.config = config_of(what, format)
        if few_outputs:
            self.shapes = {name: (256, K) for name, (_, K) in self.shapes.items()}
        self.bits = (FORMATS[format] or (16, 0))[0]
        self.layers = [{name: fused(make_linear(*shape, format, name == "gate_up", device))
                        for name, shape in self.shapes.items()}
                       for _ in range(1 if few_outputs else LAYERS)]
        self.norm = torch.ones(next(iter(self.shapes.values()))[1], device=device, dtype=torch.bfloat16)

    @property
    def table(self) -> dict:
        """What tuned.json has for this GPU and format, shape by shape, and what is found now."""
        return kernels.table(kernels.gpu(self.device).name).setdefault(self.format, {})

    def choose(self, name: str, rows: int, choice: list) -> None:
        """From now on, that kernel and those sizes for the product with up to so many rows."""
        N, K = self.shapes[name]
        more = [entry for entry in self.table.get(f"{N}x{K}", []) if entry[0] > rows]
        self.table[f"{N}x{K}"] = [[rows, *choice], *more]
        kernels.tuned.cache_clear()

    def run(self, layer: dict, name: str, x: Tensor, residual: Tensor) -> Tensor:
        if name in ("qkv", "gate_up"):
            return layer[name](x, self.norm, gated=name == "gate_up")
        return layer[name](x, residual=residual)

    def time(self, name: str, rows: int, choice: list, spend: int = 12) -> float:
        """us of one product."""
        self.choose(name, rows, choice)
        N, K = self.shapes[name]
        layers = self.layers[:copies(N * K * self.bits // 8)]
        x = torch.randn(rows, K, device=self.device, dtype=torch.bfloat16)
        residual = torch.randn(rows, self.shapes["down"][0], device=self.device, dtype=torch.bfloat16)
        return 1e3 * milliseconds(lambda: [self.run(layer, name, x, residual) for layer in layers], spend) / len(layers)

    def chain(self, name: str, rows: int, choice: list, spend: int = 12) -> float:
        """us of a layer with one row, that choice for one of its products: all four, and attention to 300 tokens."""
        self.choose(name, rows, choice)
        config, device = self.config, self.device
        KV, E = config.n_kv_head, config.head_dim
        x = torch.randn(1, config.dim, device=device, dtype=torch.bfloat16)
        caches = [torch.randn(2, 1, KV, 512, E, device=device, dtype=torch.bfloat16) for _ in self.layers]
        table = torch.ones(512, E, device=device)
        position = torch.tensor([[300]], device=device)
        arrived = torch.zeros(KV, device=device, dtype=torch.int32)

        def run():
            h = x
            for layer, (k_cache, v_cache) in zip(self.layers, caches):
                qkv = self.run(layer, "qkv", h, x).view(1, 1, -1, E)
                y = kernels.update_and_attend(qkv, position, table, table, k_cache, v_cache, arrived)
                h = self.run(layer, "out", y.view(1, -1), h)
                h = self.run(layer, "down", self.run(layer, "gate_up", h, h), h)

        return 1e3 * milliseconds(run, spend) / len(self.layers)

    def best(self, name: str, rows: list[int], choices: list, bar: tqdm, timer: Callable,
             before: list | None = None) -> tuple[float, list]:
        """us and choice of the fastest, or of the one before if that takes no more than KEPT times as long.

        All are timed a little with the most rows, the first eight then in turns with each of these numbers, the first
        three of them again, four times as often: near the GPU's power limit one time differs from the next by up to 4%.
        int4's weights are scaled, and so rounded, for a gain of 2% and no less (rounded())."""
        timed = []
        for choice in choices:
            timed.append((timer(name, rows[-1], choice, 2), choice))
            bar.update()
        for most, turns in ((8, 1), (3, 4)):
            timed.sort(key=self.rounded)
            finalists = [choice for i, (_, choice) in enumerate(timed) if i < most or choice == before]
            rounds = [[timer(name, M, choice, 4) for choice in finalists] for M in rows * turns]
            timed = list(zip(map(statistics.mean, zip(*rounds)), finalists))
        best = min(timed, key=self.rounded)
        return next((one for one in timed if one[1] == before and self.rounded(one) <= KEPT * self.rounded(best)), best)

    def rounded(self, timed: tuple[float, list]) -> float:
        """The time of a choice, longer where that rounds weights and others do not."""
        us, choice = timed
        return us * 1.02 if self.format == "int4" and choice[8:] == [1] else us

    def tune(self, rows: list[int], bar: tqdm) -> None:
        if 1 in rows:
            self.one_row(bar)
        self.several_rows([M for M in rows if M > 1], bar)

    def one_row(self, bar: tqdm) -> None:
        """Each product's in the chain, twice over; a single product's alone."""
        for name in [*self.shapes] * 2 if self.config else self.shapes:
            choices = candidates(self.format, 1, *self.shapes[name])
            us, choice = self.best(name, [1] * 3, choices, bar, self.chain if self.config else self.time)
            self.choose(name, 1, choice)
        if self.config:
            bar.write(f"{self.format}: {us:.1f} us a layer with one row")

    def several_rows(self, rows: list[int], bar: tqdm) -> None:
        for name, (N, K) in self.shapes.items():
            old = self.table.get(f"{N}x{K}", [])
            found, report = [entry for entry in old if not any(entry[0] in alike(M) for M in rows)], []
            if found and found[0][0] == 1:
                report.append((1, self.time(name, 1, found[0][1:]), self.cublas(N, K, 1)))
            before = None
            for M in sorted(rows):
                several = [alike(M)[0], alike(M)[len(alike(M)) // 2], M]
                choices = candidates(self.format, M, N, K)
                one_by_one = M > MANY and len(choices) > 1
                if one_by_one:
                    choices.remove(["library"])
                _, before = self.best(name, several, choices, bar, self.time, before)
                entries = self.against_library(name, M, before) if one_by_one else [[M, *before]]
                found += entries
                # one after the other, as a hot GPU is slower
                report.append((M, self.time(name, M, entries[-1][1:]), self.cublas(N, K, M)))
            self.table[f"{N}x{K}"] = sorted(found)
            kernels.tuned.cache_clear()
            bar.write(f"{self.format} {name} {N}x{K}, us by rows (over 16-bit weights and cuBLAS): " + ", ".join(
                f"{M}: {us:.1f} ({us / cublas:.2f})" for M, us, cublas in report))

    def against_library(self, name: str, rows: int, kernel: list) -> list:
        """The entries of alike(rows). cuBLAS's time jumps from one number of rows to the next: 4096x11008 with 279, 280
        and 281 takes it 47, 41 and 47 us (bf16, H200). The kernel's does not: it is smoothed."""
        library, own = zip(*[(self.time(name, M, ["library"]), self.time(name, M, kernel, 4)) for M in alike(rows)])
        found = []
        for i, M in enumerate(alike(rows)):
            times = {"library": library[i], "rows": statistics.median(own[max(0, i - 4):i + 5])}
            best = min(times, key=times.get)
            if not found or times[found[-1][1]] > KEPT * times[best]:
                found.append([M, *(["library"] if best == "library" else kernel)])
            found[-1][0] = M
        return found

    def check(self, rows: list[int], bar: tqdm) -> None:
        """What the table chooses against the best that could be had, for numbers of rows that it was not made with; not
        for one row, as that is chosen in a chain."""
        found = []
        for name, (N, K) in self.shapes.items():
            before = self.table.get(f"{N}x{K}")
            for M in (M for M in rows if M > 1 and len(candidates(self.format, M, N, K)) > 1):
                chosen = kernels.tuned(self.format, N, K, M, self.device)
                _, best = self.best(name, [M] * 3, candidates(self.format, M, N, K), bar, self.time)
                ratios = [1.0 if chosen == best else self.time(name, M, chosen) / self.time(name, M, best)
                          for _ in range(9)]
                del self.table[f"{N}x{K}"]
                self.table.update({} if before is None else {f"{N}x{K}": before})
                kernels.tuned.cache_clear()
                found.append((statistics.median(ratios), f", {name} {N}x{K} with {M} rows: {chosen}, not {best}"))
        behind = sum(ratio > 1.03 for ratio, _ in found)
        worst, where = max(found, default=(1.0, ""))
        bar.write(f"{self.format}: {len(found)} choices, {behind} more than 3% behind, the worst {worst:.3f} of the "
                  f"best's time{where}")

    def cublas(self, N: int, K: int, M: int) -> float:
        """us of the library's product alone, with 16-bit weights."""
        weights = [torch.randn(N, K, device=self.device, dtype=torch.bfloat16) for _ in range(copies(2 * N * K))]
        x = torch.randn(M, K, device=self.device, dtype=torch.bfloat16)
        return 1e3 * milliseconds(lambda: [nn.functional.linear(x, w) for w in weights]) / len(weights)


def alike(rows: int) -> range:
    """The numbers of rows that have one choice of kernel, made with the first, the middle and the last: a tile that is
    not full can take 10% longer than a full one, or less (int8 12288x4096, tiles of 128 rows: 300, 384, 450 and 512
    rows take 113, 114, 132 and 120 us, on an H200)."""
    if rows <= 8:
        return range(rows // 2 + 1, rows + 1)
    step = 16 if rows <= 64 else 32 if rows <= MANY else 64
    return range(max(8, (rows - 1) // step * step) + 1, rows + 1)


def candidates(format: str, rows: int, N: int, K: int) -> list:
    if format == "16-bit":
        several = [choice for choice in PLAIN_ROWS if rows <= 64 or choice[1] >= 64 and rows <= 128]
        return [["library"], *(PLAIN_ROW if rows == 1 else []), *several]
    more = [choice for choice in PACKED_MORE if fits(choice, format, rows)]
    # Slices of K for one row: 7% slower for 11,008 inputs, 15% faster for 21,504 (int4, H200).
    row = [choice for choice in PACKED_ROW if K > 12288 or choice[-1] == 1]
    return [["library"], *(row if rows == 1 else []), *(PACKED_FEW if rows <= 64 else []),
            *(more if 8 < rows <= MOST_ROWS else [])]


def fits(choice: list, format: str, rows: int) -> bool:
    """Whether sizes of packed_rows_kernel are worth their time, and not the same as others."""
    _, _, width, *_, scaled = choice
    wide = width > LEAST_COLUMNS
    if wide and width >= 2 * rows or not wide and rows > 5 * width:
        return False
    if format == "int4" and rows <= 64:
        return True
    return scaled == (format != "int8")  # one scale a row is for the sums; groups smaller than a block always scale


small_tuner = functools.cache(functools.partial(Tuner, few_outputs=True))


@torch.no_grad()
def compile_kernel(what: str, format: str, device: torch.device, name: str, rows: int, choice: list) -> None:
    """In a process of its own: Triton keeps what it compiles on disk, by a layer's K and not by its N."""
    tuner = small_tuner(what, format, device)
    tuner.choose(name, rows, choice)
    x = torch.zeros(rows, tuner.shapes[name][1], device=device, dtype=torch.bfloat16)
    with torch.cuda.device(device), suppress(kernels.triton.runtime.errors.OutOfResources):  # Triton launches there
        tuner.run(tuner.layers[0], name, x, x.new_zeros(rows, 256))


def compile_all(units: list[tuple[str, str]], rows: list[int], device: torch.device) -> None:
    # what Triton's code depends on; fewer rows have more candidates
    rows = {(M == 1, min(max(8, kernels.triton.next_power_of_2(M)), 256), M % 16 == 0): M
            for M in sorted(rows, reverse=True)}.values()
    tasks = [(what, format, device, name, M, choice) for (what, format), M in product(units, rows)
             for name, shape in shapes_of(what, format).items()
             for choice in candidates(format, M, *shape)
             if choice[0] == "row" or choice[7:8] <= [2]]  # "rows" with more slices is the same code
    workers = min(os.cpu_count(), 32)  # each takes some of the GPU's memory
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(tqdm(pool.map(compile_kernel, *zip(*tasks), chunksize=8), "compiling", len(tasks), disable=None))


def write(path: Path, name: str) -> None:
    """One line a shape."""
    tables = json.loads(path.read_text()) | {name: kernels.table(name)}
    text = json.dumps(tables, indent=1)
    for formats in tables.values():
        for shapes in formats.values():
            for shape, choices in shapes.items():
                text = text.replace(f'"{shape}": ' + json.dumps(choices, indent=1).replace("\n", "\n   "),
                                    f'"{shape}": ' + json.dumps(choices))
    partial = path.with_stem(path.stem + ".partial")  # interrupted, the table stays whole
    partial.write_text(text + "\n")
    partial.replace(path)


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    parser.add_argument("what", nargs="+", help=f"shapes, {', '.join(SHAPES)}, or single products, NxK")
    parser.add_argument("--formats", default=",".join(FORMATS), metavar="LIST", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), metavar="LIST", help="numbers of rows")
    parser.add_argument("--check", action="store_true", help="compare the table with the best, write nothing")
    parser.add_argument("--device")
    args = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.rows):
        parser.error(f"--rows {args.rows}: want numbers from 1 on, with commas in between")
    args.formats, args.rows = args.formats.split(","), [int(rows) for rows in args.rows.split(",")]
    if args.check and args.rows == [1]:
        parser.error("--check --rows 1: one row is chosen in a chain of kernels; want more rows")
    named = [what for what in args.what if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", what)]
    named = [re.sub(r"/([2-9]|[1-9]\d+)$", "", what) for what in named]
    for given, known in ((named, SHAPES), (args.formats, FORMATS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: want some of {', '.join(known)}")
    return args


def main() -> None:
    args = parse_args()
    device = find_device(args.device)
    if device.type != "cuda" or not kernels.triton:
        raise UserError(f"--device {device}: the kernels are for NVIDIA GPUs, and want Triton")
    units = []
    for what, format in product(args.what, args.formats):
        group = (FORMATS[format] or (16, 1))[1]
        if group > 0 and any(K % group for _, K in shapes_of(what, format).values()):
            print(f"{what}: groups of {group} do not divide K", file=sys.stderr)
        else:
            units.append((what, format))
    if not units:
        raise UserError(f"--formats {','.join(args.formats)}: none is left; 16-bit and int8 always are")
    compile_all(units, args.rows, device)
    with tqdm(unit="kernel", disable=None) as bar:
        for what, format in units:
            bar.set_description(f"{what} {format}")
            tuner = Tuner(what, format, device)
            with torch.no_grad():
                if args.check:
                    tuner.check(args.rows, bar)
                else:
                    tuner.tune(args.rows, bar)
                    write(ROOT / "tuned.json", kernels.gpu(device).name)
            del tuner
            torch.cuda.empty_cache()


if __name__ == "__main__":
    report_errors(main)

"""
Find the fastest kernel for each weight shape, format and number of rows on this
GPU, and write it into tuned.json.

    python scripts/tune.py llama-2-7b llama-3.1-8b
    python scripts/tune.py llama-2-70b/4                      # a rank of four
    python scripts/tune.py 14336x21504 --formats int4         # a product, N x K
    python scripts/tune.py llama-2-7b --check --rows 3,28,112 # in between?

Each product is timed alone, and cuBLAS is one of the candidates (for int8 and
int4 after dequantizing). No weight is in the GPU's cache: a CUDA graph reads
each weight once, and the cache is cleared before the graph is replayed. One row
of x has fast/packed_gemv.py, whose sizes follow from K. So has fast/packed_few.py
for 2 to 8 with int4 or int8; choices for these are of what it does not take.
"""

import signal

# PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

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

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cli.errors import report_errors
from cli.options import Parser

try:
    from fast import common, packed_linear, tuning
    from fast.decoder import fused_linear
    from fast.layout import MAX_ROWS, MIN_BLOCK_M
except ModuleNotFoundError as error:
    if error.name != "fast":
        raise
    print("tune.py: fast/ is not there, whose kernels it times", file=sys.stderr)
    raise SystemExit(2)
from hub.vet import find_device
from model import Config
from quantize import INT4, INT8, QuantizedLinear, pack
from shapes import SHAPES
from tp import Shard

# codes and group size of a format
FORMATS = {
    "16-bit": None,
    "int8": (INT8, -1),
    "int4": (INT4, 128),
    "int4-64": (INT4, 64),
    "int4-32": (INT4, 32),
}
ROWS = [2, 4, 8, 16, 32, 48, *range(64, 256, 32), *range(256, 513, 64)]
KEPT = (
    1.01  # a choice of fewer rows is kept while it takes no more than that many times the best time
)
# rows; beyond, cuBLAS comes near the kernels, and each number of rows has the faster of the two
MANY = 256
LAYERS = 8  # in a graph, whose start then counts for little
LIBRARY = tuning.LIBRARY


def choices(kernel: str, names: str, *values) -> list[dict]:
    """All combinations of the values: a group of names, as "stages warps", goes with a list of
    tuples."""
    groups = [group.split() for group in names.split(", ")]
    found = []
    for combination in product(*values):
        sizes = {}
        for group, some in zip(groups, combination):
            sizes |= zip(group, some if isinstance(some, tuple) else (some,))
        found.append(dict(kernel=kernel) | sizes)
    return found


# What the sizes mean stands in tuning.py.
PLAIN_GEMM = choices(
    "gemm",
    "block_n block_k stages warps",
    [
        (16, 256, 6, 1),
        (16, 256, 6, 2),
        (16, 512, 3, 2),
        (32, 256, 3, 2),
        (64, 64, 5, 4),
        (64, 128, 4, 4),
        (64, 128, 6, 4),
        (128, 64, 4, 8),
    ],
)
# With an occupancy, and of two warps too, 4 and 16 rows take 6% less than without (60 products, one
# scan, H200).
PACKED_FEW = choices(
    "gemm",
    "block_n block_m splits stages warps occupancy, slices, scaled",
    [
        (16, 64, 2, 4, 2, 8),
        (16, 64, 2, 4, 2, 10),
        (16, 64, 4, 3, 4, 5),
        (16, 64, 4, 5, 4, 8),
        (32, 64, 2, 4, 2, 8),
        (32, 64, 2, 4, 2, 10),
        (32, 64, 2, 4, 2, 12),
        (32, 64, 4, 3, 4, 3),
        (32, 64, 4, 3, 4, 6),
        (32, 64, 4, 4, 4, 5),
        (32, 64, 4, 5, 4, 5),
    ],
    (1, 2, 3, 4),
    (0,),
)
PACKED_MORE = choices(
    "gemm",
    "block_n block_m splits stages warps occupancy, slices, scaled",
    [
        (64, 64, 1, 3, 4, 3),
        (64, 64, 1, 4, 4, 3),
        (128, 64, 1, 3, 4, 2),
        (128, 64, 1, 4, 4, 2),
        (128, 64, 1, 3, 8, 2),
        (256, 64, 1, 3, 8, 2),
        (64, 128, 1, 3, 4, 2),
        (64, 128, 1, 3, 4, 3),
        (128, 128, 1, 3, 4, 2),
        (128, 128, 1, 3, 8, 1),
        (256, 128, 1, 3, 8, 1),
        (128, 256, 1, 3, 8, 1),
    ],
    (1, 2, 3, 4, 6, 8),
    (0, 1),
)


def candidates(format: str, rows: int, N: int, K: int) -> list[dict]:
    """The choices that are worth timing for so many rows of x and weights [N, K]."""
    if format == "16-bit":
        gemm = [
            choice for choice in PLAIN_GEMM if rows <= 64 or choice["block_n"] >= 64 and rows <= 128
        ]
        return [LIBRARY, *gemm]
    more = [choice for choice in PACKED_MORE if fits(choice, format, rows)]
    return [LIBRARY, *(PACKED_FEW if rows <= 64 else []), *(more if 8 < rows <= MAX_ROWS else [])]


def fits(choice: dict, format: str, rows: int) -> bool:
    """Whether sizes of packed_gemm() are worth their time, and not the same as others."""
    block_m, wide = choice["block_m"], choice["block_m"] > MIN_BLOCK_M
    if wide and block_m >= 2 * rows or not wide and rows > 5 * block_m:
        return False
    if format == "int4" and rows <= 64:
        return True
    # Of int8 the one scale a row is the sum's; small groups always scale w.
    return choice["scaled"] == (format != "int8")


def alike(rows: int) -> range:
    """The numbers of rows that share a choice. It is timed with the first, the middle and the last:
    a tile that is not full can take 10% longer than a full one, or less (int8 12288x4096, tiles of
    128 rows: 300, 384, 450 and 512 rows take 113, 114, 132 and 120 us, on an H200)."""
    if rows <= 8:
        return range(rows // 2 + 1, rows + 1)
    step = next(step for most, step in ((64, 16), (MANY, 32), (rows, 64)) if rows <= most)
    return range(max(8, (rows - 1) // step * step) + 1, rows + 1)


def make_linear(N: int, K: int, format: str, gated: bool, device: torch.device) -> nn.Module:
    """Random weights; quantized ones straight from random codes."""
    if format == "16-bit":
        linear = nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
        return linear.requires_grad_(False)
    codes, group = FORMATS[format]
    C = 1 if group == -1 else K // group
    random = torch.randint(2**codes.bits, (N, K), device=device, dtype=torch.uint8)
    scales = torch.rand(N, C, device=device).half() / K**0.5
    return packed_linear.PackedLinear(
        QuantizedLinear(pack(random, codes.bits), scales, None, codes), gated
    )


def group_size(format: str) -> int:
    return 1 if format == "16-bit" else FORMATS[format][1]


def copies(size: int) -> int:
    """How many products make a graph, if the weights of one have so many bytes: of large ones
    fewer, to save time."""
    return min(LAYERS, max(4, 400_000_000 // size))


def milliseconds(run: Callable[[], None], spend: int = 12) -> float:
    """The median time of run() as a CUDA graph, replayed for `spend` milliseconds; infinite if it
    does not fit the GPU."""
    try:
        run()
    except common.triton.runtime.errors.OutOfResources:
        return float("inf")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return common.triton.testing.do_bench(
        graph.replay, warmup=spend / 3, rep=spend, return_mode="median"
    )


def config_of(what: str, format: str) -> Config | None:
    """A named model's config, or that of the first rank's part of it; None for a single product."""
    name, _, ranks = what.partition("/")
    if not ranks:
        return SHAPES.get(name)
    return Shard(SHAPES[name], group_size(format), 0, int(ranks)).config


def shapes_of(what: str, format: str) -> dict[str, tuple[int, int]]:
    """N and K of a layer's four products, or of the one."""
    if not (config := config_of(what, format)):
        return {"down": tuple(map(int, what.split("x")))}
    D, E, F = config.dim, config.head_dim, config.ffn_dim
    heads = config.n_head + 2 * config.n_kv_head
    return {
        "qkv": (heads * E, D),
        "out": (D, config.n_head * E),
        "gate_up": (2 * F, D),
        "down": (D, F),
    }


class Tuner:
    """A model shape's four products in one format, LAYERS times over.

    few_outputs: one layer with 256 outputs a product, enough to compile the kernels."""

    def __init__(self, what: str, format: str, device: torch.device, few_outputs: bool = False):
        self.format, self.device, self.shapes = format, device, shapes_of(what, format)
        if few_outputs:
            self.shapes = {name: (256, K) for name, (_, K) in self.shapes.items()}
        self.bits = 16 if format == "16-bit" else FORMATS[format][0].bits
        self.layers = [
            {
                name: fused_linear(make_linear(*shape, format, name == "gate_up", device))
                for name, shape in self.shapes.items()
            }
            for _ in range(1 if few_outputs else LAYERS)
        ]
        self.norm = torch.ones(
            next(iter(self.shapes.values()))[1], device=device, dtype=torch.bfloat16
        )

    @property
    def table(self) -> dict[str, list[dict]]:
        """tuned.json's choices for this GPU and format, shape by shape, and those that are found
        now."""
        return tuning.table(common.gpu(self.device).name).setdefault(self.format, {})

    def set_choices(self, name: str, found: list[dict]) -> None:
        """From now on, these choices for the product."""
        N, K = self.shapes[name]
        self.table[f"{N}x{K}"] = sorted(found, key=lambda choice: choice["rows"])
        tuning.kernel_for.cache_clear()

    def take(self, name: str, rows: int, choice: dict) -> None:
        """From now on, this choice for the product with up to so many rows."""
        N, K = self.shapes[name]
        more = [entry for entry in self.table.get(f"{N}x{K}", []) if entry["rows"] > rows]
        self.set_choices(name, [dict(rows=rows) | choice, *more])

    def run(self, layer: dict, name: str, x: Tensor, residual: Tensor) -> Tensor:
        if name in ("qkv", "gate_up"):
            return layer[name](x, self.norm, gated=name == "gate_up")
        return layer[name](x, residual=residual)

    def time(self, name: str, rows: int, choice: dict, spend: int = 12) -> float:
        """us of one product."""
        packed_linear.takes_few = lambda *_: False  # it would run whatever the choice is
        self.take(name, rows, choice)
        N, K = self.shapes[name]
        layers = self.layers[: copies(N * K * self.bits // 8)]
        x = torch.randn(rows, K, device=self.device, dtype=torch.bfloat16)
        residual = torch.randn(
            rows, self.shapes["down"][0], device=self.device, dtype=torch.bfloat16
        )
        return (
            1e3
            * milliseconds(lambda: [self.run(layer, name, x, residual) for layer in layers], spend)
            / len(layers)
        )

    def best(
        self, name: str, rows: list[int], choices: list[dict], bar: tqdm, before: dict | None = None
    ) -> tuple[float, dict]:
        """us and choice of the fastest, or of the one before if that takes no more than KEPT times
        as long.

        All are timed a little with the most rows. Then the first eight are timed in turns with each
        of these numbers of rows, and the first three of them again, four times as often: near the
        GPU's power limit one time differs from the next by up to 4%. Scaling int4's weights rounds
        them, and must gain 2% for that (see handicapped())."""
        timed = []
        for choice in choices:
            timed.append((self.time(name, rows[-1], choice, 2), choice))
            bar.update()
        for most, turns in ((8, 1), (3, 4)):
            timed.sort(key=self.handicapped)
            finalists = [
                choice for i, (_, choice) in enumerate(timed) if i < most or choice == before
            ]
            rounds = [[self.time(name, M, choice, 4) for choice in finalists] for M in rows * turns]
            timed = list(zip(map(statistics.mean, zip(*rounds)), finalists))
        best = min(timed, key=self.handicapped)
        limit = KEPT * self.handicapped(best)
        return next(
            (one for one in timed if one[1] == before and self.handicapped(one) <= limit), best
        )

    def handicapped(self, timed: tuple[float, dict]) -> float:
        """The time of a choice, 2% longer where that rounds weights and others do not."""
        us, choice = timed
        return us * 1.02 if self.format == "int4" and choice.get("scaled") else us

    def tune(self, rows: list[int], bar: tqdm) -> None:
        for name, (N, K) in self.shapes.items():
            entries = cut(self.table.get(f"{N}x{K}", []), {few for M in rows for few in alike(M)})
            report, before = [], None
            for M in sorted(rows):
                few = [alike(M)[0], alike(M)[len(alike(M)) // 2], M]
                found = candidates(self.format, M, N, K)
                one_by_one = M > MANY and len(found) > 1
                if one_by_one:
                    found.remove(LIBRARY)
                _, before = self.best(name, few, found, bar, before)
                new = (
                    self.against_library(name, M, before) if one_by_one else [dict(rows=M) | before]
                )
                entries += new
                # one after the other, as a hot GPU is slower
                report.append((M, self.time(name, M, without_rows(new[-1])), self.cublas(N, K, M)))
            self.set_choices(name, entries)
            bar.write(
                f"{self.format} {name} {N}x{K}, us by rows (over 16-bit weights and cuBLAS): "
                + ", ".join(f"{M}: {us:.1f} ({us / cublas:.2f})" for M, us, cublas in report)
            )

    def against_library(self, name: str, rows: int, kernel: dict) -> list[dict]:
        """The entries of alike(rows): for each number of rows the kernel or cuBLAS, whichever is
        faster.

        cuBLAS's time jumps from one number to the next: 4096x11008 with 279, 280 and 281 rows takes
        it 47, 41 and 47 us (bf16, H200). The kernel's time does not jump, so it is smoothed."""
        library, own = zip(
            *[(self.time(name, M, LIBRARY), self.time(name, M, kernel, 4)) for M in alike(rows)]
        )
        found, fastest = [], None
        for i, M in enumerate(alike(rows)):
            times = {"library": library[i], "kernel": statistics.median(own[max(0, i - 4) : i + 5])}
            best = min(times, key=times.get)
            if not found or times[fastest] > KEPT * times[best]:
                found.append(dict(rows=M) | (LIBRARY if best == "library" else kernel))
                fastest = best
            found[-1]["rows"] = M
        return found

    def check(self, rows: list[int], bar: tqdm) -> None:
        """Report how far the table's choices are behind the best that could be had, for other
        numbers of rows than it was made with."""
        found = []
        for name, (N, K) in self.shapes.items():
            before = self.table.get(f"{N}x{K}")
            for M in (M for M in rows if len(candidates(self.format, M, N, K)) > 1):
                chosen = without_rows(tuning.kernel_for(self.format, N, K, M, self.device))
                _, best = self.best(name, [M] * 3, candidates(self.format, M, N, K), bar)
                ratios = [
                    1.0 if chosen == best else self.time(name, M, chosen) / self.time(name, M, best)
                    for _ in range(9)
                ]
                del self.table[f"{N}x{K}"]
                self.table.update({} if before is None else {f"{N}x{K}": before})
                tuning.kernel_for.cache_clear()
                found.append(
                    (
                        statistics.median(ratios),
                        f", {name} {N}x{K} with {M} rows: {chosen}, not {best}",
                    )
                )
        behind = sum(ratio > 1.03 for ratio, _ in found)
        worst, where = max(found, default=(1.0, ""))
        bar.write(
            f"{self.format}: {len(found)} choices, {behind} more than 3% behind, the worst "
            f"{worst:.3f} of the "
            f"best's time{where}"
        )

    def cublas(self, N: int, K: int, M: int) -> float:
        """us of the library's product alone, with 16-bit weights."""
        weights = [
            torch.randn(N, K, device=self.device, dtype=torch.bfloat16)
            for _ in range(copies(2 * N * K))
        ]
        x = torch.randn(M, K, device=self.device, dtype=torch.bfloat16)
        return (
            1e3 * milliseconds(lambda: [nn.functional.linear(x, w) for w in weights]) / len(weights)
        )


def without_rows(entry: dict) -> dict:
    """The choice in an entry of the table."""
    return {key: value for key, value in entry.items() if key != "rows"}


def cut(entries: list[dict], rows: set[int]) -> list[dict]:
    """The entries without these numbers of rows. An entry that serves others too goes on to do
    that, in pieces."""
    found, before = [], 0
    for entry in entries:
        kept = [M for M in range(before + 1, entry["rows"] + 1) if M not in rows]
        found += [entry | dict(rows=M) for M in kept if M + 1 not in kept]
        before = entry["rows"]
    return found


def prune(entries: list[dict]) -> list[dict]:
    """The entries without those that say what the next one says: the next one serves fewer rows,
    too."""
    return [
        entry
        for entry, after in zip(entries, [*entries[1:], {}])
        if without_rows(entry) != without_rows(after)
    ]


@functools.cache
def small_tuner(what: str, format: str, device: torch.device) -> Tuner:
    return Tuner(what, format, device, few_outputs=True)


@torch.no_grad()
def compile_kernel(
    what: str, format: str, device: torch.device, name: str, rows: int, choice: dict
) -> None:
    """In a process of its own: Triton keeps what it compiles on disk, by a layer's K and not by its
    N."""
    tuner = small_tuner(what, format, device)
    tuner.take(name, rows, choice)
    x = torch.zeros(rows, tuner.shapes[name][1], device=device, dtype=torch.bfloat16)
    # Triton launches there.
    with (
        torch.cuda.device(device),
        suppress(common.triton.runtime.errors.OutOfResources),
    ):
        tuner.run(tuner.layers[0], name, x, x.new_zeros(rows, 256))


def compile_all(units: list[tuple[str, str]], rows: list[int], device: torch.device) -> None:
    """Fill Triton's cache on all CPU cores, so that the timing does not wait for one."""
    # one M for each code that Triton compiles; the smallest, as fewer rows have more candidates
    rows = {
        (min(max(8, common.triton.next_power_of_2(M)), 256), M % 16 == 0): M
        for M in sorted(rows, reverse=True)
    }.values()
    # The code of packed_gemm has slices or has none.
    tasks = [
        (what, format, device, name, M, choice)
        for (what, format), M in product(units, rows)
        for name, shape in shapes_of(what, format).items()
        for choice in candidates(format, M, *shape)
        if choice.get("slices", 1) <= 2
    ]
    workers = min(os.cpu_count(), 32)  # each takes some of the GPU's memory
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(
            tqdm(
                pool.map(compile_kernel, *zip(*tasks), chunksize=8),
                "compiling",
                len(tasks),
                disable=None,
            )
        )


def to_json(value, indent: int = 1) -> str:
    """As json.dumps(value, indent=1) gives it, but a choice stands on one line."""
    if not value or not isinstance(value, dict | list) or "kernel" in value:
        return json.dumps(value)
    if isinstance(value, dict):
        items, (left, right) = (
            [f"{json.dumps(key)}: {to_json(item, indent + 1)}" for key, item in value.items()],
            "{}",
        )
    else:
        items, (left, right) = [to_json(item, indent + 1) for item in value], "[]"
    between = "\n" + " " * indent
    return left + between + ("," + between).join(items) + "\n" + " " * (indent - 1) + right


def write(path: Path, name: str) -> None:
    """Put this GPU's table into the file, in the place of what that has for it."""
    pruned = {
        format: {shape: prune(entries) for shape, entries in shapes.items()}
        for format, shapes in tuning.table(name).items()
    }
    tables = json.loads(path.read_text()) | {name: pruned}
    partial = path.with_stem(path.stem + ".partial")  # interrupted, the file stays whole
    partial.write_text(to_json(tables) + "\n")
    partial.replace(path)


def parse_args() -> Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "what", nargs="+", help=f"shapes, {', '.join(SHAPES)}, or single products, NxK"
    )
    parser.add_argument(
        "--formats", default=",".join(FORMATS), metavar="LIST", help=f"of {', '.join(FORMATS)}"
    )
    parser.add_argument(
        "--rows", default=",".join(map(str, ROWS)), metavar="LIST", help="numbers of rows"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the table with the best, write nothing"
    )
    parser.add_argument("--device")
    args = parser.parse_args()
    if not re.fullmatch(r"([2-9]|[1-9]\d+)(,([2-9]|[1-9]\d+))*", args.rows):
        parser.error(
            f"--rows {args.rows}: want numbers from 2 on, with commas in between; one row is not "
            f"tuned"
        )
    args.formats, args.rows = args.formats.split(","), [int(rows) for rows in args.rows.split(",")]
    named = [what for what in args.what if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", what)]
    named = [re.sub(r"/([2-9]|[1-9]\d+)$", "", what) for what in named]
    for given, known in ((named, SHAPES), (args.formats, FORMATS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: want some of {', '.join(known)}")
    return args


def main() -> None:
    args = parse_args()
    device = find_device(args.device)
    if device.type != "cuda" or not common.triton:
        raise ValueError(f"--device {device}: the kernels are for NVIDIA GPUs, and want Triton")
    units = []
    for what, format in product(args.what, args.formats):
        group = group_size(format)
        if group > 0 and any(K % group for _, K in shapes_of(what, format).values()):
            print(f"{what}: groups of {group} do not divide K", file=sys.stderr)
        else:
            units.append((what, format))
    if not units:
        raise ValueError(
            f"--formats {','.join(args.formats)}: none is left; 16-bit and int8 always are"
        )
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
                    write(tuning.PATH, common.gpu(device).name)
            del tuner
            torch.cuda.empty_cache()


if __name__ == "__main__":
    report_errors(main)

"""
Tensor parallelism: torchrun starts a process, a rank, for each GPU, and each computes with a part of every matrix.

As in Megatron-LM (arXiv 1909.08053, section 3), a rank has some of the heads and of the feed-forward rows: it keeps
rows of q, k, v, gate and up, whose results are its own, and columns of o and down, whose results the ranks add up; and
it has a part of the vocabulary of the output head. So each rank has the same residual, logits and, of one seed, tokens.

    torchrun --standalone --nproc-per-node 4 generate.py --checkpoint DIR --compile

Shapes: as in model.py; R ranks.
"""
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library, nn

from checkpoint import UserError
from cli import find_device, report_errors, world_size
from model import Config, Transformer


def cut(n: int, unit: int, rank: int, ranks: int) -> tuple[int, int]:
    """From where to where a rank's part of n goes, all of them in multiples of unit and as even as that allows."""
    each, more = divmod(-(-n // unit), ranks)
    begin, end = (min(n, unit * (each * r + min(r, more))) for r in (rank, rank + 1))
    return begin, end


class Shard:
    """What a rank holds of a model; its config is that of the part, but for the vocabulary.

    group: inputs of a quantized layer that share a scale, -1 for all, 1 if it is not quantized; those of o and down are
    cut between groups, so that all numbers of ranks have the same quantized weights. UserError if there are too many
    ranks."""

    def __init__(self, config: Config, group: int, rank: int, ranks: int):
        self.whole, self.full = config, config.hf_weights()
        H, K, E, F = config.n_head, config.n_kv_head, config.head_dim, config.ffn_dim
        group = 32 if group == -1 else group  # what packed weights want
        word = 1 if group == 1 else 8  # outputs whose zero points may share a checkpoint's int32
        # kv heads whose own outputs are whole words, and whose q heads' are whole groups
        unit = math.lcm(word // math.gcd(word, E), group // math.gcd(group, H // K * E))
        kv = cut(K, unit, rank, ranks)
        q = kv[0] * (H // K), kv[1] * (H // K)
        if ranks > -(-K // unit):
            if ranks % K or H % ranks or H // ranks * E % group or E % word:
                groups = f", in groups of {group} quantized weights" if group > 1 else ""
                raise UserError(f"{ranks} ranks cannot share {H} heads with {K} key/value heads{groups}; want at most "
                                f"{-(-K // unit)}, or a multiple of {K} that divides {H}{groups}")
            kv = rank * K // ranks, rank * K // ranks + 1  # several ranks have the same one
            q = rank * H // ranks, (rank + 1) * H // ranks
        unit = math.lcm(group, 32 if F % 32 == 0 else 1)
        if ranks > -(-F // unit):
            raise UserError(f"{ranks} ranks cannot share {F} feed-forward rows in units of {unit}; want at most "
                            f"{-(-F // unit)} ranks")
        ffn, part = cut(F, unit, rank, ranks), part_of(config.vocab_size, ranks)
        vocabulary = min(config.vocab_size, rank * part), min(config.vocab_size, (rank + 1) * part)
        q_rows, kv_rows = ((begin * E, end * E) for begin, end in (q, kv))
        self.rows = dict(q_proj=q_rows, k_proj=kv_rows, v_proj=kv_rows, gate_proj=ffn, up_proj=ffn, lm_head=vocabulary)
        self.columns = dict(o_proj=q_rows, down_proj=ffn)
        self.config = replace(config, n_head=q[1] - q[0], n_kv_head=kv[1] - kv[0], ffn_dim=ffn[1] - ffn[0])

    def part(self, name: str) -> tuple[slice, slice]:
        """Of Hugging Face's tensor, or of its layer if the tensor is packed: the rows and columns to read."""
        layer = name.split(".")[-2]
        return tuple(slice(*of.get(layer, (None,))) for of in (self.rows, self.columns))

    def model(self) -> Transformer:
        """The rank's part, not yet wired; for the meta device."""
        model = Transformer(self.config)
        if not self.whole.tied:
            begin, end = self.rows["lm_head"]
            model.head = nn.Linear(self.whole.dim, end - begin, bias=False)
        return model

    def widest(self, name: str, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The ranges of weights of a layer, "wo" say, some of whose columns each rank has."""
        if name in ("wo", "w_down"):
            ranges = torch.stack([-low, high])
            dist.all_reduce(ranges, dist.ReduceOp.MAX)
            low, high = -ranges[0], ranges[1]
        return low, high

    def wire(self, model: Transformer) -> None:
        """Put what talks to the other ranks into the model, whose layers are in place."""
        device = model.embed.weight.device
        all_reduce(torch.zeros(1, 1, device=device))  # the first one takes seconds
        for layer in model.layers:
            layer.attn.wo, layer.ffn.w_down = RowParallel(layer.attn.wo), RowParallel(layer.ffn.w_down)
        if self.whole.tied:
            begin, end = self.rows["lm_head"]
            model.head = nn.Linear(self.whole.dim, end - begin, bias=False, device="meta")
            model.head.weight = nn.Parameter(model.embed.weight[begin:end], requires_grad=False)
            model.config = replace(model.config, tied=False)
        model.head = SplitHead(model.head, self.whole.vocab_size)


class RowParallel(nn.Module):
    """A linear layer of which each rank has some columns: x [..., K / R] -> [..., N]"""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(self.linear(x))


class SplitHead(nn.Module):
    """The output head, of which each rank has some rows: x [..., D] -> logits [..., V]"""

    def __init__(self, linear: nn.Module, vocabulary: int):
        super().__init__()
        self.linear, self.vocabulary = linear, vocabulary

    def forward(self, x: Tensor) -> Tensor:
        return all_gather(self.linear(x), self.vocabulary)


def part_of(columns: int, ranks: int) -> int:
    """How many columns each rank has but the last: a multiple of 8, as packed weights want it."""
    return -(-columns // (8 * ranks)) * 8


@library.custom_op("llama_fast::all_reduce", mutates_args=())
def all_reduce(x: Tensor) -> Tensor:
    """The sum of all ranks' x; the same bits on all ranks."""
    total = (x if x.is_cuda else x.float()).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.to(x.dtype)


@all_reduce.register_fake
def _(x):
    return x.new_empty(x.shape)


@library.custom_op("llama_fast::all_gather", mutates_args=())
def all_gather(x: Tensor, columns: int) -> Tensor:
    """All ranks' x [..., part_of(columns, R)], side by side: [..., columns]; the last have fewer columns, or none."""
    rows, ranks = x.flatten(0, -2), dist.get_world_size()
    part = part_of(columns, ranks)
    parts = [rows.new_empty(len(rows), part) for _ in range(ranks)]
    dist.all_gather(parts, F.pad(rows, (0, part - rows.shape[1])))
    return torch.cat(parts, dim=1)[:, :columns].reshape(*x.shape[:-1], columns)


@all_gather.register_fake
def _(x, columns):
    return x.new_empty(*x.shape[:-1], columns)


@dataclass
class Team:
    """The ranks of this run, one if torchrun did not start it."""
    rank: int = 0
    ranks: int = 1
    store: dist.Store | None = None
    agreed: int = 0

    def agree(self, value):
        """Rank 0's value, on all ranks; of a function, what it gives there. Anything that JSON holds."""
        if self.rank == 0:
            value = value() if callable(value) else value
        if self.ranks == 1:
            return value
        self.agreed += 1
        if self.rank == 0:
            self.store.set(f"agreed {self.agreed}", json.dumps(value))
            self.store.delete_key(f"agreed {self.agreed - 1000}")  # no rank is that late
        return json.loads(self.store.get(f"agreed {self.agreed}"))


def join(device: str | None) -> tuple[torch.device, Team]:
    """This rank's device and its team; --device names the kind."""
    if (ranks := world_size()) == 1:
        return find_device(device), Team()
    names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    if missing := [name for name in names if name not in os.environ]:
        raise UserError(f"WORLD_SIZE is {ranks}, {', '.join(missing)} not set: torchrun starts ranks, and sets them")
    rank, local, here = (int(os.environ[name]) for name in names[:3])
    kind, gpus = device or ("cuda" if torch.cuda.is_available() else "cpu"), torch.cuda.device_count()
    if kind not in ("cuda", "cpu"):
        raise UserError(f"--device {device}: {ranks} ranks take a GPU each, or a CPU; want cuda or cpu")
    if kind == "cuda" and here > gpus > 0:
        raise UserError(f"{here} ranks and {gpus} GPUs on this host: want --nproc-per-node {gpus} at most, or "
                        "--device cpu")
    found = find_device(f"cuda:{local}" if kind == "cuda" else "cpu")
    # NVLink multicast stays off: a program that dies with it can leave a host's GPUs unusable for all.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    store, _, _ = next(dist.rendezvous("env://"))
    store.set_timeout(timedelta(days=365))  # a chat waits for its user
    store.set(f"torch {rank}", torch.__version__)
    versions = [store.get(f"torch {r}").decode() for r in range(ranks)]
    if len(set(versions)) > 1:
        raise UserError(f"the ranks have PyTorch {', '.join(versions)}: install the same version everywhere")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=ranks)
    return found, Team(rank, ranks, store)


def run(main: Callable[[], None]) -> None:
    """cli.report_errors() for torchrun's ranks: rank 0 speaks, and when one ends, all do, wherever they are."""
    rank = int(os.environ.get("RANK", 0))
    if world_size() == 1:
        return report_errors(main, ranks=True)
    came, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)  # the main thread may be waiting for a GPU that waits for another
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, lambda *_: None)

    def end_on_signal() -> None:
        interrupted = os.read(came, 1)[0] == signal.SIGINT
        try:
            if rank == 0:
                why = "interrupted" if interrupted else "ended from outside, or as another rank did"
                os.write(2, f"{os.path.basename(sys.argv[0])}: {why}\n".encode())
        finally:
            os._exit(130 if interrupted else 143)

    def work() -> None:
        try:
            main()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if dist.is_initialized():
                dist.all_reduce(torch.zeros(1))  # no rank leaves while another needs its memory
        except (UserError, OSError):
            time.sleep(2 * (rank > 0))  # by then torchrun has ended this rank if rank 0 failed, too
            sys.stderr = sys.__stderr__
            raise
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                sys.stderr = sys.__stderr__
                raise
            time.sleep(5)  # torchrun tells it first
            raise UserError(f"another rank ended: {error}") from error

    threading.Thread(target=end_on_signal, daemon=True).start()
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    code = 1
    try:
        report_errors(work, ranks=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # a bug
        sys.stderr = sys.__stderr__
        sys.excepthook(*sys.exc_info())
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)  # what NCCL and CUDA graphs hold would hang on its way out


def splitter(team: Team) -> Callable[[Config, int], Shard] | None:
    """Of a config and a group size this rank's Shard, for quantize.load_model(); None for a rank that is alone."""
    return partial(Shard, rank=team.rank, ranks=team.ranks) if team.ranks > 1 else None


def draft_splitter(team: Team, config: Config, dtype: torch.dtype) -> Callable[[Config, int], Shard] | None:
    """splitter() for a draft that can be shared and is then faster, by an H200's figures: 5 us a sum, 4.6 TB/s."""
    size = dtype.itemsize * sum(math.prod(shape) for _, _, shape in config.hf_weights().values())
    if size * (1 - 1 / team.ranks) / 4.6e12 > 2 * config.n_layer * 5e-6:
        with suppress(UserError):
            Shard(config, 128, team.rank, team.ranks)
            return splitter(team)
    return None

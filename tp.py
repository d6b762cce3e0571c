"""
Tensor parallelism: torchrun starts a process, a rank, for each GPU, and each computes with a part of every matrix.

As in Megatron-LM (arXiv 1909.08053, section 3), a rank has some of the heads and of the feed-forward rows: it keeps
rows of q, k, v, gate and up, whose results are its own, and columns of o and down, whose results the ranks add up; and
it has a part of the vocabulary of the output head. So each rank has the same residual, logits and, of one seed, tokens.

    torchrun --standalone --nproc-per-node 4 generate.py --checkpoint DIR --compile

Shapes: as in model.py; R ranks.
"""
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint import UserError
from collectives import LIBRARY, LOGITS, Team, all_gather, all_reduce, mailboxes, part_of
from fast import product
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
        if device.type == "cuda":
            mailboxes(device)
        all_reduce(torch.zeros(1, 1, device=device), None, LIBRARY)  # the first one takes seconds
        for layer in model.layers:
            layer.attn.wo, layer.ffn.w_down = RowParallel(layer.attn.wo, 0), RowParallel(layer.ffn.w_down, 1)
        if self.whole.tied:
            begin, end = self.rows["lm_head"]
            model.head = nn.Linear(self.whole.dim, end - begin, bias=False, device="meta")
            model.head.weight = nn.Parameter(model.embed.weight[begin:end], requires_grad=False)
            model.config = replace(model.config, tied=False)
        model.head = SplitHead(model.head, self.whole.vocab_size)


class RowParallel(nn.Module):
    """A linear layer of which each rank has some columns. box: of the two, the one for its kernel's messages."""

    def __init__(self, linear: nn.Module, box: int):
        super().__init__()
        self.linear, self.box = linear, box

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K / R] -> [..., N]"""
        return all_reduce(self.linear(x), None, LIBRARY)

    def fused(self, x: Tensor, residual: Tensor) -> Tensor:
        """The same with kernels, for fast.py, plus residual: x [M, K / R] -> [M, N]"""
        return all_reduce(product(self.linear)(x), residual, self.box)


class SplitHead(nn.Module):
    """The output head, of which each rank has some rows: x [..., D] -> logits [..., V]"""

    def __init__(self, linear: nn.Module, vocabulary: int):
        super().__init__()
        self.linear, self.vocabulary = linear, vocabulary

    def forward(self, x: Tensor) -> Tensor:
        return all_gather(self.linear(x), self.vocabulary, LIBRARY)

    def fused(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return all_gather(product(self.linear)(x, norm, eps=eps), self.vocabulary, LOGITS)


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

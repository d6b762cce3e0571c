"""
Tensor parallelism: torchrun starts a process, a rank, for each GPU, and each has a part of each
layer's matrices.

As in Megatron-LM (arXiv 1909.08053, section 3), a rank has some of the heads and of the
feed-forward rows. Its q, k, v, gate and up are column-parallel: some of their outputs, which stay
on the rank. Its o and down are row-parallel: some of their inputs, and the ranks sum what they
give. The output head is column-parallel, and the ranks gather its logits. So every rank has the
same residual stream, the same logits and, with one seed, draws the same tokens.

    torchrun --standalone --nproc-per-node 4 generate.py --checkpoint DIR --compile

Contents: a rank's slices, the parallel layers, the collectives, how ranks start and agree.

Shapes: as in model.py; R ranks.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library, nn

from model import Config, DeltaConfig, DenseAndMoE, LatentConfig, MoE, RMSNorm, Transformer


# A rank's slices


def share_of(n: int, unit: int, rank: int, ranks: int) -> slice:
    """A rank's share of n. Shares are multiples of unit, and as even as that allows."""
    each, more = divmod(-(-n // unit), ranks)
    return slice(*(min(n, unit * (each * r + min(r, more))) for r in (rank, rank + 1)))


def scaled(share: slice, up: int, down: int = 1) -> slice:
    """The same share, counted in other units: up of these for `down` of its own. One that it has in
    part counts."""
    return slice(share.start * up // down, -(-share.stop * up // down))


def size(share: slice) -> int:
    return share.stop - share.start


def logits_per_rank(columns: int, ranks: int) -> int:
    """Logits per rank: a multiple of 8, as the packed kernels need. The last ranks have fewer, or
    none."""
    return -(-columns // (8 * ranks)) * 8


def units(config: Config, group: int, ranks: int) -> tuple[int, int]:
    """A rank's q heads, and its inputs of down, are multiples of these.

    o's inputs are the q heads' outputs, E of each. A unit is the q heads that look at one kv head,
    as k and v are cut with them; where ranks share each kv head evenly, it is a rank's H / R q
    heads. It is as many of these as fill quantized groups of inputs, and make k's and v's outputs
    come in eights, whose zero points share an int32 of the file:

        H = 32, K = 8, E = 80, groups of 128: 4 q heads of one kv head have 320 inputs;
        lcm(320, 128) = 640 inputs, 8 q heads, are a unit, and 4 ranks or fewer can share these

    Where layers differ in E or K, a rank has the same q heads in all of them. With latent attention
    E is a value's size, and q's outputs come in eights.
    """
    eights, unit = 1 if group == 1 else 8, 1
    if latent := latent_of(config):
        heads = eights // math.gcd(eights, latent.key_dim + config.head_dim)
        unit = math.lcm(heads * latent.value_dim, group) // latent.value_dim
    else:
        for H, K, E in kinds_of_heads(config):
            shared_evenly = ranks % K == 0 and H % ranks == 0
            heads = H // ranks if shared_evenly else H // K
            unit = math.lcm(unit, math.lcm(heads * math.lcm(E, eights), group) // E)
    return unit, math.lcm(group, 32 if all(n % 32 == 0 for n in ffn_dims(config)) else 1)


def kinds_of_heads(config: Config) -> list[tuple[int, int, int]]:
    """H, K and E of the layers' attention, each once, the most kv heads first."""
    return sorted({config.heads(layer) for layer in config.layers}, reverse=True)


def ffn_dims(config: Config) -> set[int]:
    """Of the model's dense feed-forward parts and of its experts."""
    dims = set()
    for layer in config.layers:
        moe = layer.moe
        if not moe or moe.beside_dense:
            dims.add(layer.ffn_dim or config.ffn_dim)
        if moe:
            dims |= {moe.ffn_dim, moe.shared_dim} - {0}
    return dims


def delta_of(config: Config) -> DeltaConfig | None:
    """That of all recurrent layers, None without one."""
    return next((layer.delta for layer in config.layers if layer.delta), None)


def latent_of(config: Config) -> LatentConfig | None:
    """That of all layers, None without one."""
    return config.layers[0].latent


def o_inputs(config: Config) -> int:
    """Of a head."""
    latent = latent_of(config)
    return latent.value_dim if latent else config.head_dim


def key_heads_unit(delta: DeltaConfig, group: int) -> int:
    """A rank has a multiple of so many key heads of a recurrent layer, and the value heads that go
    with them, so that their outputs, wo's inputs, fill quantized groups, and the keys' elements
    come in eights: see units()."""
    values = delta.n_value_head // delta.n_key_head * delta.value_dim
    eights = 1 if group == 1 else 8 // math.gcd(8, delta.key_dim)
    return math.lcm(math.lcm(values, group) // values, eights)


def cannot_share(config: Config, group: int, ranks: int) -> str | None:
    """Why so many ranks cannot share the model, None where they can."""
    H = config.n_head
    heads_unit, ffn_unit = units(config, group, ranks)
    groups = f", in groups of {group} quantized weights" if group > 1 else ""
    if ranks > -(-H // heads_unit):
        K = " and ".join(dict.fromkeys(str(K) for _, K, _ in kinds_of_heads(config)))
        return f"{ranks} ranks cannot share {H} heads with {K} key/value heads{groups}"
    least = min(ffn_dims(config))
    if ranks > -(-least // ffn_unit):
        return f"{ranks} ranks cannot share {least} feed-forward rows in units of {ffn_unit}"
    delta = delta_of(config)
    if delta and ranks > -(-delta.n_key_head // key_heads_unit(delta, group)):
        return (
            f"{ranks} ranks cannot share {delta.n_key_head} key heads of recurrent layers{groups}"
        )
    return None


# Of these each rank has some inputs: see RowParallelLinear.
ROW_PARALLEL = (
    "attn.wo",
    "ffn.w_down",
    "ffn.shared.w_down",
    "ffn.dense.w_down",
    "ffn.moe.w_down",
)


class Shard:
    """A rank's part of a model; its config describes that part, but for the vocabulary. shares: the
    rank's q heads, outputs of q, outputs of k and of v, rows of gate and of up in a dense
    feed-forward part, in an expert and in a shared one, and rows of the output head; of recurrent
    layers the elements of the key heads, the value heads and their elements; of latent attention
    the heads' queries, their keys and values, and their values alone. own_shares() has those of a
    layer whose heads or feed-forward part have a size of their own.

    outputs: rows of the output head, 0 for vocab_size. group: inputs of a quantized layer that
    share a scale, -1 for all, 1 where nothing is quantized. The inputs of o and down are cut
    between groups, so that any number of ranks holds the same quantized weights. ValueError if
    there are too many ranks."""

    def __init__(self, config: Config, group: int, rank: int, ranks: int, outputs: int = 0):
        # Packed codes want whole words, kernels multiples of 32.
        group = 32 if group == -1 else group
        if reason := cannot_share(config, group, ranks):
            works = [n for n in range(1, 65) if not cannot_share(config, group, n)]
            raise ValueError(f"{reason}; want one of {works}")
        self.whole = config
        self.rank = rank
        self.outputs = outputs or config.vocab_size
        H = config.n_head
        # A model's mixtures are alike, and so are its recurrent layers.
        moe = next((layer.moe for layer in config.layers if layer.moe), None)
        self.delta = delta_of(config)
        heads_unit, ffn_unit = units(config, group, ranks)
        self.heads = share_of(H, heads_unit, rank, ranks)
        self.ffn_share = partial(share_of, unit=ffn_unit, rank=rank, ranks=ranks)
        ffn = self.ffn_share(config.ffn_dim)
        expert = share_of(moe.ffn_dim if moe else 0, ffn_unit, rank, ranks)
        shared = share_of(moe.shared_dim if moe else 0, ffn_unit, rank, ranks)
        each = logits_per_rank(self.outputs, ranks)
        vocab = slice(*(min(self.outputs, each * r) for r in (rank, rank + 1)))
        self.shares = dict(heads=self.heads, ffn=ffn, expert=expert, shared=shared, vocab=vocab)
        self.shares |= self.of_heads(config.n_kv_head, config.head_dim)
        if latent := latent_of(config):
            self.shares |= {
                "latent q": scaled(self.heads, latent.key_dim + config.head_dim),
                "latent kv": scaled(self.heads, latent.key_dim + latent.value_dim),
                "latent o": scaled(self.heads, latent.value_dim),
            }
        if moe:
            moe = replace(moe, ffn_dim=size(expert), shared_dim=size(shared))
        delta = self.delta
        if delta:
            of_keys = share_of(delta.n_key_head, key_heads_unit(delta, group), rank, ranks)
            of_values = scaled(of_keys, delta.n_value_head, delta.n_key_head)
            self.shares |= {
                "keys": scaled(of_keys, delta.key_dim),
                "value heads": of_values,
                "values": scaled(of_values, delta.value_dim),
            }
            delta = replace(delta, n_key_head=size(of_keys), n_value_head=size(of_values))
        layers = tuple(
            replace(
                layer,
                moe=layer.moe and moe,
                delta=layer.delta and delta,
                n_kv_head=layer.n_kv_head and size(self.kv_heads(layer.n_kv_head)),
                ffn_dim=layer.ffn_dim and size(self.ffn_share(layer.ffn_dim)),
            )
            for layer in config.layers
        )
        self.config = replace(
            config,
            layers=layers,
            n_head=size(self.heads),
            n_kv_head=size(self.kv_heads(config.n_kv_head)),
            ffn_dim=size(ffn),
        )

    def kv_heads(self, K: int) -> slice:
        """Of K, those that the rank's q heads look at."""
        return scaled(self.heads, K, self.whole.n_head)

    def of_heads(self, K: int, E: int) -> dict[str, slice]:
        """The rank's outputs of q, and of k and of v, in a layer with K kv heads of E elements."""
        return dict(q=scaled(self.heads, E), kv=scaled(self.kv_heads(K), E))

    def own_shares(self, weight) -> dict[str, slice]:
        """shares, as they are for a hub.checkpoint.Weight."""
        shares = dict(self.shares)
        if weight.heads:
            shares |= self.of_heads(*weight.heads)
        for axis, n in ((weight.rows, weight.shape[0]), (weight.columns, weight.shape[-1])):
            if axis == "ffn":
                shares["ffn"] = self.ffn_share(n)
        return shares

    def model(self, make=Transformer) -> Transformer:
        """The rank's part without what talks to other ranks: see parallelize(). Made for the meta
        device."""
        model = make(self.config)
        if not self.whole.tied:
            model.head = self.make_head()
        return model

    def make_head(self) -> nn.Linear:
        return nn.Linear(self.whole.dim, size(self.shares["vocab"]), bias=False, device="meta")

    def widest(self, name: str, low: Tensor, high: Tensor):
        """low and high of each row's weights over all ranks. name: the layer's in the model."""
        if name.endswith(ROW_PARALLEL):
            ranges = torch.stack([-low, high])
            dist.all_reduce(ranges, dist.ReduceOp.MAX)
            low, high = -ranges[0], ranges[1]
        return low, high

    def parallelize(self, model: Transformer):
        """Puts in what talks to the other ranks, once the model's layers are in place."""
        # The first sum takes seconds: here, not in the first step.
        all_reduce(torch.zeros(1, 1, device=model.embed.weight.device))
        for layer in model.layers:
            self.keep_one_bias(layer.attn.wo)
            layer.attn.wo = RowParallelLinear(layer.attn.wo)
            if isinstance(layer.ffn, DenseAndMoE):  # each is summed, as a norm is behind it
                layer.ffn.dense = self.summed(layer.ffn.dense)
                layer.ffn.moe = self.summed(layer.ffn.moe)
            else:
                layer.ffn = self.summed(layer.ffn)
        if self.whole.tied:
            model.head = self.make_head()
            model.head.weight = nn.Parameter(
                model.embed.weight[self.shares["vocab"]], requires_grad=False
            )
            model.config = replace(model.config, tied=False)
        model.head = ColumnParallelLinear(model.head, self.outputs)
        if self.whole.qk_norm == "whole":
            for layer in model.layers:
                layer.attn.q_norm = ParallelRMSNorm(layer.attn.q_norm)
                layer.attn.k_norm = ParallelRMSNorm(layer.attn.k_norm)

    def summed(self, ffn: nn.Module) -> nn.Module:
        """A feed-forward part, or a mixture, whose outputs the ranks sum."""
        self.keep_one_bias(ffn.w_down)
        if isinstance(ffn, MoE):
            return ParallelExperts(ffn)
        ffn.w_down = RowParallelLinear(ffn.w_down)
        return ffn

    def keep_one_bias(self, layer: nn.Module) -> None:
        if layer.bias is not None and self.rank:  # the sum has rank 0's
            layer.bias.data.zero_()


def splitter(team: "Team"):
    """(config, group, outputs) -> this rank's Shard, for formats.load(); None for a rank that is
    alone."""
    return partial(Shard, rank=team.rank, ranks=team.ranks) if team.ranks > 1 else None


def draft_splitter(team: "Team", config: Config):
    """splitter() for a draft that can be split and has enough to read; another one runs whole on
    each rank.

    config: Checkpoint.counted(). A split saves reading weights and costs two sums a layer: at 4.6
    TB/s and 5 us a sum (H200) they break even at 46 million bf16 parameters a layer, on two ranks;
    the logits cost as much as a sum. So 60 million are asked for. It must be divisible in groups of
    128, quantized or not. A draft that reads its target's keys, of which each rank has a part, is
    always split."""
    if config.layers[0].kv_of is not None:  # it has no layer before
        return splitter(team)
    with torch.device("meta"):  # a draft that borrows its head has no rows, of which PyTorch warns
        model = Transformer(replace(config, vocab_size=config.vocab_size or 1))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    pays = parameters >= 6e7 * config.n_layer
    return splitter(team) if pays and not cannot_share(config, 128, team.ranks) else None


# The parallel layers


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has some inputs: x [..., K / R] -> [..., N], summed over
    the ranks."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear

    def forward(self, *x: Tensor):
        return all_reduce(self.linear(*x))


class ParallelExperts(RowParallelLinear):
    """A MoE; of every expert each rank has some of the F rows. fast/ knows it by this type."""


class ParallelRMSNorm(RMSNorm):
    """RMSNorm over the heads of all ranks, of which each has some: x [..., N / R] -> [..., N / R].

    Where several ranks hold the same kv head, they hold each one equally often, so that the mean is
    right."""

    def __init__(self, norm: RMSNorm):
        nn.Module.__init__(self)
        self.weight, self.eps = norm.weight, norm.eps
        size = torch.tensor([float(len(norm.weight))], device=norm.weight.device)
        self.elements = all_reduce(size).item()

    def mean(self, squares):
        return all_reduce(squares.sum(-1, keepdim=True)) / self.elements


class ColumnParallelLinear(nn.Module):
    """The output head, of which each rank has some outputs: x [..., D] -> logits [..., V], gathered
    from the ranks."""

    def __init__(self, linear: nn.Module, vocab_size: int):
        super().__init__()
        self.linear, self.vocab_size = linear, vocab_size

    def forward(self, x: Tensor):
        return all_gather(self.linear(x), self.vocab_size)


# The collectives


@library.custom_op("llama_fast::all_reduce", mutates_args=())
def all_reduce(x: Tensor) -> Tensor:
    """The sum of all ranks' x, with the same bits on all ranks. On CPUs it is summed in fp32."""
    total = (x if x.is_cuda else x.float()).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.to(x.dtype)


@all_reduce.register_fake
def _(x):
    return x.new_empty(x.shape)


def on_all_ranks(fact: bool, device: torch.device) -> bool:
    """Whether it is so on all ranks, each of which asks. Those that went different ways would wait
    for each other."""
    if not dist.is_initialized():
        return fact
    agreed = torch.tensor(float(fact), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


@library.custom_op("llama_fast::all_gather", mutates_args=())
def all_gather(x: Tensor, columns: int) -> Tensor:
    """All ranks' x [..., logits_per_rank(columns, R)] side by side: [..., columns]. The last have
    fewer, or none."""
    rows, ranks = x.flatten(0, -2), dist.get_world_size()
    part = logits_per_rank(columns, ranks)
    parts = [rows.new_empty(len(rows), part) for _ in range(ranks)]
    dist.all_gather(parts, F.pad(rows, (0, part - rows.shape[1])))
    return torch.cat(parts, dim=1)[:, :columns].reshape(*x.shape[:-1], columns)


@all_gather.register_fake
def _(x, columns):
    return x.new_empty(*x.shape[:-1], columns)


# How ranks start and agree


def world_size() -> int:
    """The number of processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


@dataclass
class Team:
    """The ranks of this run: one, unless torchrun started it."""

    rank: int = 0
    ranks: int = 1
    store: dist.Store | None = None
    agreed: int = 0

    def agree(self, value):
        """Broadcasts rank 0's value, or what a function returns there. Anything that JSON holds."""
        if self.rank == 0 and callable(value):
            value = value()
        if self.ranks == 1:
            return value
        self.agreed += 1
        if self.rank == 0:
            self.store.set(f"agreed {self.agreed}", json.dumps(value))
            self.store.delete_key(f"agreed {self.agreed - 1000}")  # no rank is that late
        return json.loads(self.store.get(f"agreed {self.agreed}"))


def join(device: str | None):
    """The name of this rank's device and its team. device: cuda, cpu or None, the kind of device
    that each rank gets.

    ValueError where torchrun did not start the ranks, or where there are too few GPUs."""
    if world_size() == 1:
        return device, Team()
    return join_ranks(device or ("cuda" if torch.cuda.is_available() else "cpu"), world_size())


@cache
def join_ranks(kind: str, ranks: int):
    """Once a process, as its device stays the same. kind: cuda or cpu."""
    names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is {ranks}, {', '.join(missing)} not set: torchrun starts ranks, and sets "
            f"them"
        )
    rank, local, here = (int(os.environ[name]) for name in names[:3])
    if kind not in ("cuda", "cpu"):
        raise ValueError(
            f"device={kind}: {ranks} ranks take a GPU each, or a CPU; want cuda or cpu"
        )
    device, backend = "cpu", "gloo"
    if kind == "cuda":
        gpus = torch.cuda.device_count()
        if not gpus:
            raise ValueError("device=cuda: PyTorch finds none of those; device=cpu works")
        if here > gpus:
            raise ValueError(
                f"{here} ranks and {gpus} GPUs on this host: want --nproc-per-node {gpus} at most, "
                f"or "
                "device=cpu"
            )
        torch.cuda.set_device(local)
        device, backend = f"cuda:{local}", "cpu:gloo,cuda:nccl"
    # NVLink multicast stays off: a program that dies with it can leave a host's GPUs unusable for
    # all.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    store, _, _ = next(dist.rendezvous("env://"))
    store.set_timeout(timedelta(days=365))  # a chat waits for its user
    dist.init_process_group(
        backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=ranks
    )
    return device, Team(rank, ranks, store)

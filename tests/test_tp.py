"""
Tensor parallelism: two ranks give what one gives. torchrun starts a pair once for many cases
(tp_worker.py), and once for each thing that the command is to do.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import generate
import tp_worker
from hub.checkpoint import hf_weights, part_of, take
from hub.families import config_from_hf
from helpers import (
    CPU,
    DRAFT,
    EAGLE,
    GEMMA4,
    GEMMA4_E,
    GEMMA4_MOE,
    GOLDEN,
    MUSE,
    LATENT,
    ON_GPUS,
    RECURRENT,
    RECURRENT_MOE,
    ROOT,
    SHAPE,
    TINY,
    absent,
    awq,
    beside,
    change,
    ended,
    error,
    fuse_experts,
    interrupted,
    load_checkpoint,
    make,
    make_endless,
    program,
    put,
    python,
    refusal,
    same_but_for_ties,
    told,
    torchrun,
    traced,
    write,
    add_mtp,
    make_dflash,
)
from model import Config, Transformer, visible
from quantized_golden import unfold
from tp import Shard, Team, draft_splitter, join

TINY, DRAFT, EAGLE = str(TINY), str(DRAFT), str(EAGLE)  # as cases.json has them

# Random checkpoints. Of 3 kv heads a rank has 2, the other 1; of 11 * 32 feed-forward rows 6 * 32
# and 5 * 32.
UNEVEN = dict(
    num_attention_heads=6, num_key_value_heads=3, head_dim=16, intermediate_size=352, vocab_size=77
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
MADE = dict(
    uneven=("llama", UNEVEN),
    tied=("llama", UNEVEN | dict(tie_word_embeddings=True)),
    bias=("qwen2", UNEVEN),
    qk_norm=("qwen3", dict(vocab_size=77, tie_word_embeddings=True)),
    odd_rows=("llama", dict(intermediate_size=97)),
    one_kv_head=("qwen2", dict(num_key_value_heads=1)),
    phi=("phi3", UNEVEN),
    olmo=("olmo3", UNEVEN | dict(sliding_window=5)),
    shared_norm=("olmo2", dict(num_key_value_heads=1)),
    gemma=("gemma3_text", UNEVEN | dict(query_pre_attn_scalar=24, sliding_window=5)),
    mixtral=("mixtral", UNEVEN | EXPERTS),
    gpt_oss=("gpt_oss", UNEVEN | EXPERTS | dict(sliding_window=5)),
    qwen3_moe=(
        "qwen3_moe",
        UNEVEN | EXPERTS | dict(moe_intermediate_size=96, decoder_sparse_step=2),
    ),
    # Of 3 key heads a rank has 2, the other 1; each serves as many value heads.
    once=("qwen3_5_text", UNEVEN | RECURRENT | dict(linear_num_value_heads=3)),
    twice=("qwen3_5_text", UNEVEN | RECURRENT | dict(tie_word_embeddings=True)),
    thrice=("qwen3_5_text", UNEVEN | RECURRENT | dict(linear_num_value_heads=9)),
    qwen3_5_moe=("qwen3_5_moe_text", UNEVEN | RECURRENT_MOE),
    fused=("qwen3_5_moe_text", UNEVEN | RECURRENT_MOE),
    qwen3_next=("qwen3_next", UNEVEN | RECURRENT_MOE | dict(mlp_only_layers=[1])),
    gemma4=("gemma4_text", UNEVEN | GEMMA4),
    gemma4_moe=("gemma4_text", UNEVEN | GEMMA4_MOE),
    gemma4_everyone=("gemma4_text", UNEVEN | GEMMA4_MOE | dict(top_k_experts=4)),
    gemma4_e=("gemma4_text", UNEVEN | GEMMA4_E | dict(tie_word_embeddings=True)),
    gemma4_all=("gemma4_text", UNEVEN | GEMMA4_E | GEMMA4_MOE | dict(num_kv_shared_layers=1)),
    muse=("muse_glimmer_text", UNEVEN | MUSE),
    gemma4_text=("gemma4_text", UNEVEN | GEMMA4_E | dict(vocab_size=2048)),
    # Of 3 pairs of heads a rank has 2, the other 1; each has all of the latents.
    glm=(
        "glm4_moe_lite",
        UNEVEN | LATENT | dict(n_group=1, topk_group=1, n_routed_experts=3, head_dim=8),
    ),
    deepseek=("deepseek_v3", UNEVEN | LATENT | dict(head_dim=8, n_shared_experts=1)),
    straight=("deepseek_v3", UNEVEN | LATENT | dict(head_dim=8, q_lora_rank=None)),
    latent=("glm4_moe_lite", UNEVEN | LATENT | dict(head_dim=8, vocab_size=2048)),
    recurrent=("qwen3_5_text", UNEVEN | RECURRENT | dict(vocab_size=2048)),
    recurrent_moe=("qwen3_next", UNEVEN | RECURRENT_MOE | dict(vocab_size=2048)),
)
# Of these too: the source, and as in GPTQ.
GPTQ_OF = {
    "experts-gptq": ("qwen3_moe", 4, 32, False, True),
    "thrice-gptq": ("thrice", 8, 32, False, True),
    "fused-gptq": ("fused", 4, 32, False, False),
    "gemma4_e-gptq": ("gemma4_e", 4, 32, False, True),
    "gemma4_moe-gptq": ("gemma4_moe", 8, 32, False, False),
    "muse-gptq": ("muse", 4, 32, False, True),
    "qwen3_next-gptq": ("qwen3_next", 4, 32, False, True),
    "glm-gptq": ("glm", 4, 32, False, True),
    "deepseek-gptq": ("deepseek", 4, 32, False),
    "straight-gptq": ("straight", 8, -1, True),
}
# What quantize.py writes of them: bits, group size, sym, act_order, head.
GPTQ = {
    f"gptq-{bits}-{group}{'-act' * act}": (bits, group, False, act, False)
    for bits in (4, 8)
    for group in (32, -1)
    for act in (False, True)
}
GPTQ |= {"gptq-head": (4, 32, False, False, True)}

LOGITS_CASES = {
    name: dict(checkpoint=name)
    for name in (*MADE, *GPTQ, *GPTQ_OF, "awq", "experts-awq", "fused-awq", "mxfp4")
} | {
    "int4": dict(checkpoint=TINY, quantize="int4"),
    "int4, a row": dict(checkpoint=TINY, quantize="int4", group_size=-1),
    "bias, int8": dict(checkpoint="bias", quantize="int8"),
    "head int4": dict(checkpoint="uneven", quantize_head="int4"),
    "tied, head int8": dict(checkpoint="tied", quantize="int4", quantize_head="int8"),
    "phi, int4": dict(checkpoint="phi", quantize="int4"),
    "mixtral, int8": dict(checkpoint="mixtral", quantize="int8"),
    "gpt_oss, int4": dict(checkpoint="gpt_oss", quantize="int4"),
    "mxfp4, fused": dict(checkpoint="mxfp4", fused=True),
    "qwen3_moe, fused": dict(checkpoint="qwen3_moe", quantize="int4", fused=True),
    "once, int4": dict(checkpoint="once", quantize="int4"),
    "twice, int8": dict(checkpoint="twice", quantize="int8", quantize_head="int8"),
    "fused, int4, a row": dict(checkpoint="fused", quantize="int4", group_size=-1),
    "qwen3_next, int8": dict(checkpoint="qwen3_next", quantize="int8"),
    "qwen3_5_moe, fused": dict(checkpoint="qwen3_5_moe", quantize="int4", fused=True),
    "gemma4, int4": dict(checkpoint="gemma4", quantize="int4"),
    "gemma4_moe, int8": dict(checkpoint="gemma4_moe", quantize="int8"),
    "gemma4_moe, int4, a row": dict(checkpoint="gemma4_moe", quantize="int4", group_size=-1),
    "gemma4_e, int8": dict(checkpoint="gemma4_e", quantize="int8", quantize_head="int8"),
    "muse, int4": dict(checkpoint="muse", quantize="int4"),
    "glm, int4": dict(checkpoint="glm", quantize="int4"),
    "glm, int8": dict(checkpoint="glm", quantize="int8", quantize_head="int8"),
    "straight, int4": dict(checkpoint="straight", quantize="int4"),
    "deepseek, fused": dict(checkpoint="deepseek", quantize="int4", fused=True),
    "mxfp4, int8": dict(checkpoint="mxfp4", quantize="int8", quantize_head="int8"),
}
# Which the ranks share as they share the target.
SELF = dict(draft=TINY, policy="3", split_draft=True)
HEAD = dict(draft=EAGLE, policy="3")  # which is always shared


def assistant(name: str) -> str:
    """A draft for one of GOLDEN."""
    return str(ROOT / "tests" / "assistants" / name)


TOKENS_CASES = {
    "plain": {},
    "plain, int8": dict(quantize="int8", cache="int8"),
    "drawn": dict(temperature=0.9),
    "draft 3": dict(draft=DRAFT, policy="3"),
    "draft auto": dict(draft=DRAFT, policy="auto"),
    "draft head": HEAD,
    "draft split": SELF,
    "prompt-lookup": dict(draft="prompt-lookup", policy="4"),
    "compiled": dict(mode="fast", quantize="int8"),
    "gemma4, compiled": dict(checkpoint="gemma4_text", mode="fast"),
    "gemma4, int8 cache": dict(checkpoint="gemma4_text", cache="int8"),
    "gemma4, draft split": dict(
        checkpoint="gemma4_text", draft="gemma4_text", policy="3", split_draft=True
    ),
    "recurrent, compiled": dict(checkpoint="recurrent", mode="fast"),
    "recurrent, int8 cache": dict(checkpoint="recurrent", cache="int8"),
    "recurrent, drawn": dict(checkpoint="recurrent_moe", temperature=0.9),
    "recurrent, prompt-lookup": dict(checkpoint="recurrent", draft="prompt-lookup", policy="4"),
    "recurrent, draft": dict(checkpoint="recurrent_moe", draft=DRAFT, policy="3"),
    "recurrent draft": dict(draft="recurrent_moe", policy="3", split_draft=True),
    "recurrent, draft split": dict(
        checkpoint="recurrent", draft="recurrent", policy="3", split_draft=True
    ),
    "latent, plain": dict(checkpoint="latent"),
    "latent, int8 cache": dict(checkpoint="latent", cache="int8"),
    "latent, compiled": dict(checkpoint="latent", mode="fast"),
    "latent, draft": dict(checkpoint="latent", draft=DRAFT, policy="3"),
    "latent draft": dict(draft="latent", policy="3", split_draft=True),
    "mtp": dict(checkpoint="recurrent_moe", draft="mtp", policy="3"),
    "latent, mtp": dict(checkpoint="latent", draft="mtp", policy="3"),
    "latent, mtp split": dict(checkpoint="latent", draft="mtp", policy="3", split_draft=True),
    "mtp split": dict(checkpoint="recurrent", draft="mtp", policy="3", split_draft=True),
    "dflash": dict(checkpoint="recurrent", draft="dflash", policy="3"),
    "dflash split": dict(checkpoint="recurrent", draft="dflash", policy="3", split_draft=True),
    "dflash, compiled": dict(checkpoint="recurrent", draft="dflash", policy="3", mode="fast"),
    "mtp, compiled": dict(checkpoint="recurrent", draft="mtp", policy="2", mode="fast"),
    "muse's draft": dict(checkpoint=str(GOLDEN / "muse"), draft=assistant("muse"), policy="3"),
    "gemma4's draft": dict(
        checkpoint=str(GOLDEN / "gemma4"),
        draft=assistant("gemma4"),
        policy="3",
        split_draft=True,
    ),
    "gemma4's draft, clusters": dict(
        checkpoint=str(GOLDEN / "gemma4-e"),
        draft=assistant("gemma4-clusters"),
        policy="3",
        split_draft=True,
        cache="int8",
    ),
}
CASES = {name: ("logits", case) for name, case in LOGITS_CASES.items()} | {
    name: ("tokens", dict(checkpoint=TINY) | case) for name, case in TOKENS_CASES.items()
}
GPU_TOKENS = {
    "plain": {},
    "int4": dict(quantize="int4", group_size=32),
    "gptq": dict(checkpoint="gptq-4-32-act"),
    "draft split": SELF,
    "auto": dict(draft=DRAFT, policy="auto"),
    "head": HEAD,
    "experts": dict(checkpoint="experts"),
    "experts, int8": dict(checkpoint="experts", quantize="int8"),
    "dense and experts": dict(checkpoint="gemma4_everyone"),
    "one row": dict(batch=1),
    "one row, int4": dict(batch=1, quantize="int4", group_size=32),
    "one row, auto": dict(batch=1, draft=DRAFT, policy="auto"),
    "wide": dict(checkpoint="wide"),
    "wide, int4": dict(checkpoint="wide", quantize="int4", quantize_head="int8"),
}
WIDE = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=2048,
    max_position_embeddings=256,
)
# Which the bundled model's heads are too few for.
PAIRED = [name for name in GPU_TOKENS if "wide" not in name]
GPU_CASES = {
    name: ("tokens", dict(checkpoint=TINY, dtype="bfloat16", mode="fast", new=48) | case)
    for name, case in GPU_TOKENS.items()
}
# The collectives: the dtype, whether fast/'s fused kernels serve or tp.py's plain ones.
EXCHANGES = [("float32", False), ("bfloat16", False)]
GPU_EXCHANGES = [(dtype, fused) for dtype in ("bfloat16", "float16") for fused in (True, False)]
for cases, kinds in ((CASES, EXCHANGES), (GPU_CASES, GPU_EXCHANGES)):
    cases.update(
        {f"{dtype} {fused}": ("exchange", dict(dtype=dtype, fused=fused)) for dtype, fused in kinds}
    )
GPU_CASES |= {name: (name, {}) for name in ("graph", "capacity")}


def run_ranks(directory: Path, kind: str, cases: dict, ranks: int = 2) -> list[dict]:
    """What each rank gave for each case."""
    directory.mkdir(exist_ok=True)
    put(directory / "cases.json", cases)
    worker = ROOT / "tests" / "tp_worker.py"
    command = torchrun(worker, kind, directory / "cases.json", directory / "out", ranks=ranks)
    done = ended(command, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return results(directory, ranks)


def results(directory: Path, ranks: int) -> list[dict]:
    return [torch.load(f"{directory / 'out'}.{rank}") for rank in range(ranks)]


def of_each(ranks: list[dict], name: str) -> list:
    return [rank[name] for rank in ranks]


@traced()
def alone(case: tuple[str, dict]):
    """What one rank gives, in this process."""
    function, args = case
    return getattr(tp_worker, function)(Team(), CPU, **args)


def placed(cases: dict, directory: Path) -> dict[str, tuple[str, dict]]:
    """cases, with the paths of their checkpoints; the bundled ones' are whole and stay."""
    return {
        name: (
            function,
            args
            | {
                key: str(directory / args[key])
                for key in args
                if key == "checkpoint" or key == "draft" and args[key] in (*MADE, "dflash")
            },
        )
        for name, (function, args) in cases.items()
    }


@beside
def pair(directory: Path) -> Callable:
    """What each of two ranks gave for CASES, whose checkpoints are made here."""
    torch.manual_seed(0)
    for name, (kind, changes) in MADE.items():
        make(directory / name, kind, **changes)
    for name in ("recurrent", "recurrent_moe", "latent"):
        add_mtp(directory / name)
    make_dflash(directory / "dflash", directory / "recurrent")
    for name in ("fused", "gemma4_moe"):
        fuse_experts(directory / name)
    # 36 rows of the head a rank: no multiple of 8.
    make(directory / "exact", "qwen2", **UNEVEN | dict(vocab_size=72))
    for name, how in GPTQ.items():
        write(directory / "exact", directory / name, *how)
    for name, (source, *how) in GPTQ_OF.items():
        write(directory / source, directory / name, *how)
    unfold("mxfp4", directory / "mxfp4")
    for source, out in (("exact", "awq"), ("mixtral", "experts-awq"), ("fused", "fused-awq")):
        write(directory / source, directory / out, 4, 32, False)
        words = awq(directory / out / "model.safetensors")
        change(directory / out, dict(quant_method="awq", version="gemm"), **words)
    return partial(run_ranks, directory, "cpu", placed(CASES, directory))


@pytest.mark.parametrize("name", LOGITS_CASES)
def test_two_ranks_have_the_logits_of_one(pair, name):
    """A code or a scale of another value would show: a step of int8 is a hundredth of a row's
    largest weight."""
    (first, second), expected = of_each(pair, name), alone(pair[0]["cases"][name])
    assert torch.equal(first, second)
    assert first.shape == expected.shape and error(first, expected) < 1e-5


@pytest.mark.parametrize("name", TOKENS_CASES)
def test_two_ranks_give_the_tokens_of_one(pair, name):
    first, second = of_each(pair, name)
    assert first == second  # the counts of what was drafted, too
    function, args = pair[0]["cases"][name]
    expected = alone((function, args | dict(mode="eager")))
    assert first["rows"] == expected["rows"]
    assert name == "draft auto" or first["counts"] == expected["counts"]
    if "mode" not in args and name != "draft auto":  # tiny random drafts are not accepted
        assert first["drafts"] == expected["drafts"]


def config_of(**changes) -> Config:
    return config_from_hf(SHAPE | dict(hidden_size=128) | changes)


LLAMA_70B = dict(
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=32000,
)
# A rank has an even number of key heads, so that their elements fill words of zero points.
KEYS_OF_4 = dict(linear_num_key_heads=8, linear_num_value_heads=8, linear_key_head_dim=4)
# So that it is not the feed-forward parts that ranks cannot share.
ROWS = dict(moe_intermediate_size=768, shared_expert_intermediate_size=512, intermediate_size=1024)
QWEN3_5_27B = dict(
    model_type="qwen3_5_text",
    num_hidden_layers=4,
    head_dim=256,
    intermediate_size=17408,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
)
GEMMA4_31B = dict(
    model_type="gemma4_text",
    num_hidden_layers=6,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
    global_head_dim=512,
    num_global_key_value_heads=4,
    head_dim=256,
    intermediate_size=21504,
)
QWEN3_NEXT_80B = dict(
    model_type="qwen3_next",
    num_hidden_layers=4,
    head_dim=256,
    num_experts=2,
    num_experts_per_tok=2,
    **ROWS,
)
TEXT = dict(model_type="gemma4_text")
GLM_47_FLASH = dict(
    model_type="glm4_moe_lite", num_hidden_layers=2, n_routed_experts=4, intermediate_size=10240
)
SHARED = [  # heads, kv heads, other changes, group, ranks
    (6, 3, UNEVEN, 32, 2),
    (6, 3, UNEVEN, -1, 3),
    (8, 2, dict(intermediate_size=512), 16, 4),
    (7, 7, dict(head_dim=8, intermediate_size=89, vocab_size=83), 1, 5),
    (64, 8, LLAMA_70B, 128, 6),
    (64, 8, LLAMA_70B, 128, 16),
    (64, 8, dict(head_dim=20), -1, 3),
    (6, 3, UNEVEN | RECURRENT | dict(model_type="qwen3_5_text"), 32, 2),
    (12, 3, RECURRENT_MOE | ROWS | dict(model_type="qwen3_next"), -1, 3),
    (8, 8, RECURRENT_MOE | ROWS | KEYS_OF_4 | dict(model_type="qwen3_5_moe_text"), 32, 3),
    (24, 4, QWEN3_5_27B, 128, 8),
    (32, 16, GEMMA4_31B, 128, 8),
    (32, 16, GEMMA4_31B | dict(attention_k_eq_v=False), 128, 4),
    (6, 6, GEMMA4 | TEXT, 32, 3),
    (6, 6, GEMMA4_MOE | TEXT, -1, 2),
    (6, 6, GEMMA4_MOE | GEMMA4_E | TEXT, 1, 2),
    (6, 3, MUSE | dict(model_type="muse_glimmer_text"), 32, 3),
    (16, 2, QWEN3_NEXT_80B, 128, 4),
    (6, 6, LATENT | dict(model_type="glm4_moe_lite"), 32, 2),
    (6, 6, LATENT | dict(model_type="deepseek_v3", q_lora_rank=None), -1, 3),
    (6, 6, LATENT | dict(model_type="glm4_moe_lite", v_head_dim=32), 32, 2),
    (20, 20, GLM_47_FLASH, 128, 4),
    (20, 20, GLM_47_FLASH, 128, 6),
]


@pytest.mark.parametrize("heads, kv_heads, changes, group, ranks", SHARED)
def test_the_ranks_have_every_row_and_column_once(heads, kv_heads, changes, group, ranks):
    """But for kv heads, of which each rank has those that its q heads look at, and no others."""
    config = config_of(**dict(changes, num_attention_heads=heads, num_key_value_heads=kv_heads))
    check_shares(config, group, ranks)
    if config.layers[-1].moe:  # in one tensor, too
        check_shares(replace(config, expert_files=config.expert_files[:2]), group, ranks)


def check_shares(config: Config, group: int, ranks: int) -> None:
    parts, heads = shards(config, group, ranks), config.n_head
    latent = config.layers[0].latent
    times = dict.fromkeys(("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"), 1)
    times |= dict.fromkeys(
        "in_proj_qkv in_proj_z in_proj_b in_proj_a in_proj_qkvz in_proj_ba conv1d linear_attn "
        "out_proj experts q_b_proj kv_b_proj".split(),
        1,
    )
    for name, weight in hf_weights(config).items():
        seen = torch.zeros(weight.shape, dtype=torch.int)
        for shard in parts:
            part = take(torch.arange(seen.numel()).view(seen.shape), part_of(weight, shard))
            seen.view(-1)[part.flatten()] += 1
            assert name == "lm_head.weight" or part.shape == hf_weights(shard.config)[name].shape, (
                name
            )
        module, wanted = name.split(".")[-2], ranks
        if module in ("k_proj", "v_proj"):
            wanted = max(1, ranks // weight.heads[0])
        assert (seen == times.get(module, wanted)).all(), name
    unit = 32 if group == -1 else group
    for shard in parts:
        for layer, of in zip(config.layers, shard.config.layers):
            (_, kv_heads, E), (n, k, _) = config.heads(layer), shard.config.heads(of)
            E = latent.value_dim if latent else E
            q, kv = (shard.of_heads(kv_heads, E)[name] for name in ("q", "kv"))
            ffn = shard.ffn_share(layer.ffn_dim or config.ffn_dim)
            looked_at = [h * kv_heads // heads * E for h in range(q.start // E, q.stop // E)]
            # As attention takes it.
            assert n % k == 0 and looked_at == [kv.start + h // (n // k) * E for h in range(n)]
            # Of o and of down: between groups.
            assert not any(end % unit for end in (q.start, q.stop, ffn.start, ffn.stop))
            assert group == 1 or kv.start % 8 == kv.stop % 8 == 0  # between words
        if latent:
            queries = shard.shares["latent q"]
            assert group == 1 or queries.start % 8 == queries.stop % 8 == 0
            assert queries.stop * latent.value_dim == shard.shares["latent o"].stop * (
                latent.key_dim + config.head_dim
            )
        if shard.delta:
            keys, values = shard.shares["keys"], shard.shares["values"]
            own = next(layer.delta for layer in shard.config.layers if layer.delta)
            assert not any(end % unit for end in (values.start, values.stop))
            assert group == 1 or keys.start % 8 == keys.stop % 8 == 0
            # Each key head has its value heads beside it.
            each = own.n_value_head // own.n_key_head * own.value_dim
            assert values.start * own.key_dim == keys.start * each
    rows = [shard.config.ffn_dim for shard in parts]
    assert max(rows) - min(rows) <= max(unit, 32)


def shards(config: Config, group: int, ranks: int) -> list[Shard]:
    return [Shard(config, group, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    "heads, kv_heads, E, ffn, group, ranks, words, works",
    [
        (12, 3, 16, 1024, 1, 5, "5 ranks 12 heads 3 key/value", [1, 2, 3, 6, 12]),
        (8, 8, 16, 96, 1, 4, "4 ranks 96 feed-forward units 32", [1, 2, 3]),
        (2, 2, 16, 96, 32, 2, "2 ranks 2 heads 32", [1]),
        (32, 2, 20, 512, -1, 4, "4 ranks 32 heads 2 key/value 32", [1]),
    ],
)
def test_too_many_ranks_are_refused_with_the_numbers_that_work(
    heads, kv_heads, E, ffn, group, ranks, words, works
):
    """Some of these ranks' heads would have half of a quantized group, or half of a word of zero
    points."""
    config = config_of(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=ffn, head_dim=E
    )
    said = refusal(shards, config, group, ranks)
    assert absent(words, said) == [] and said.endswith(f"; want one of {works}")
    assert all(shards(config, group, n) for n in works)


@pytest.mark.parametrize(
    "changes, group, ranks, words, works",
    [
        ({}, 1, 4, "4 ranks 3 key recurrent", [1, 2, 3]),
        (dict(linear_num_value_heads=3), 64, 3, "3 ranks 3 key recurrent groups 64", [1, 2]),
        (KEYS_OF_4, 32, 8, "8 ranks 8 key recurrent", [1, 2, 3, 4]),
        (KEYS_OF_4 | dict(shared_expert_intermediate_size=64), 32, 4, "64 feed-forward", [1, 2]),
    ],
)
def test_ranks_that_recurrent_layers_are_too_few_for_are_refused(
    changes, group, ranks, words, works
):
    """A key head with its value heads is whole, and so are groups of quantized weights."""
    heads = dict(num_attention_heads=24, num_key_value_heads=24)
    shape = RECURRENT_MOE | ROWS | heads | changes
    config = config_of(**shape, model_type="qwen3_5_moe_text")
    said = refusal(shards, config, group, ranks)
    assert absent(words, said) == [] and said.endswith(f"; want one of {works}")
    assert all(shards(config, group, n) for n in works)


@torch.no_grad()
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(
    "kind, changes, how",
    [
        ("qwen3_5_text", dict(linear_num_value_heads=15), {}),
        ("qwen3_5_moe_text", {}, {}),
        ("qwen3_5_moe_text", dict(linear_key_head_dim=4, linear_num_key_heads=10), "gptq"),
        ("qwen3_next", dict(linear_num_value_heads=5), dict(quantize="int4", group_size=32)),
    ],
)
def test_the_parts_of_more_ranks_add_up_to_the_whole(tmp_path, lone, kind, changes, how, ranks):
    """Of each layer's attention or recurrent part and its feed-forward part. Of 5 key heads two
    ranks have 2, or one, and the others one. Experts are one tensor, but for Qwen3-Next's."""
    shape = RECURRENT | dict(intermediate_size=256)
    if kind != "qwen3_5_text":
        shape = RECURRENT_MOE | ROWS
    shape |= dict(num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    shape |= dict(linear_num_key_heads=5, linear_num_value_heads=10)
    make(tmp_path / "in", kind, **shape | changes)
    if kind == "qwen3_5_moe_text":
        fuse_experts(tmp_path / "in")
    directory = tmp_path / "in"
    if how == "gptq":
        directory, how = tmp_path / "out", {}
        write(tmp_path / "in", directory, 4, 32, False)
    x, positions = torch.randn(2, 40, 64), torch.arange(40)[None]

    def outputs(model: Transformer) -> list[Tensor]:
        model.setup(40)
        rope = model.config.layers[1].rope
        [turn] = [table(positions) for table in model.ropes if table.rope == rope]
        where = positions, *turn, visible(model.slots, positions, None), model.rows
        return [y for layer in model.layers for y in (layer.attn(x, *where), layer.ffn(x))]

    whole = outputs(load_checkpoint(directory, **how))
    parts = [
        outputs(load_checkpoint(directory, split=partial(Shard, rank=rank, ranks=ranks), **how))
        for rank in range(ranks)
    ]
    for want, *own in zip(whole, *parts, strict=True):
        assert error(sum(own), want) < 1e-5


def test_a_draft_is_split_where_that_pays_and_can_be():
    """Llama 3.2 1B, whose 8 kv heads 11 ranks cannot share."""
    llama_1b = dict(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
    )
    for changes, ranks, split in (
        ({}, 4, True),
        (dict(intermediate_size=2048), 4, False),
        ({}, 11, False),
    ):
        assert bool(draft_splitter(Team(1, ranks), config_of(**llama_1b | changes))) == split


@pytest.mark.parametrize(
    "device, gpus, unset, words",
    [
        (None, 2, "", "3 ranks 2 GPUs --nproc-per-node device=cpu"),
        ("cuda", 0, "", "finds none of those; device=cpu"),
        ("cuda:1", 4, "", "device=cuda:1: 3 ranks want cuda or cpu"),
        ("cpu", 0, "LOCAL_RANK", "WORLD_SIZE is 3, LOCAL_RANK not set: torchrun"),
    ],
)
def test_ranks_that_cannot_start_are_told_why(monkeypatch, device, gpus, unset, words):
    """Rank 0 of three of this host, which has so many GPUs."""
    found = dict(
        WORLD_SIZE=3,
        LOCAL_WORLD_SIZE=3,
        RANK=0,
        LOCAL_RANK=0,
        MASTER_ADDR="localhost",
        MASTER_PORT=1,
    )
    for name in found.keys() - {unset}:
        monkeypatch.setenv(name, str(found[name]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(dist, "rendezvous", lambda *_: 1 / 0)  # which would wait for the others
    assert absent(words, refusal(join, device)) == []


def test_ranks_agree_on_what_rank_0_has():
    store = dist.HashStore()
    first, second = (Team(rank, 2, store) for rank in range(2))
    for value in (0.1, None, "a line with \udcff", [1, {"a": 2**63}]):
        assert first.agree(lambda: value) == value == second.agree(lambda: 1 / 0)
        assert first.agree(value) == value == second.agree("other")


GREEDY = ("--temperature", 0, "--max-new-tokens", 12)
TEXT = ("--prompt", "One day", "--prompt", "Tom and Sue", "--num-samples", 2, *GREEDY)
SPECULATED = (*TEXT, "--draft", DRAFT, "--draft-tokens", 3, "--quantize", "int8", "--json")
CHAT, TYPED = ("--interactive", *GREEDY), "Once upon a time\nThen\n"
UNREADABLE = """
import os, sys
sys.path.insert(0, {root!r})
import generate
from cli.errors import run
if os.environ["RANK"] == "1":
    sys.argv += ["--checkpoint", {checkpoint!r}]
run(generate.main)
"""


@beside
def commands(directory: Path) -> Callable:
    """Commands under torchrun. The last has a rank 1 whose checkpoint cannot be read."""
    make(directory / "unreadable", vocab_size=2048)
    put(directory / "unreadable" / "tokenizer.model", (Path(TINY) / "tokenizer.model").read_bytes())
    put(directory / "unreadable" / "model.safetensors", b"no tensors")
    program, wrapper = ROOT / "generate.py", directory / "unreadable.py"
    wrapper.write_text(UNREADABLE.format(root=str(ROOT), checkpoint=str(directory / "unreadable")))
    started = dict(
        json=torchrun(program, *SPECULATED),
        chat=torchrun(program, *CHAT),
        mistake=torchrun(program, "--checkpoint", "no/such/dir", "--prompt", "One day"),
        unreadable=torchrun(wrapper, *TEXT),
    )
    return lambda: {
        name: ended([*command, "--device", "cpu"], TYPED) for name, command in started.items()
    }


@pytest.fixture
def one_rank(call):
    """stdout of generate.py without torchrun, in this process."""
    return lambda *args, stdin="": call(
        "generate.py", generate.main, *args, "--device", "cpu", stdin=stdin
    )[1]


def test_only_rank_0_prints_json(commands, one_rank):
    done = commands["json"]
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    both, one = json.loads(done.stdout), json.loads(one_rank(*SPECULATED))
    assert (both["world_size"], one["world_size"]) == (2, 1)
    found, expected = ([sample["tokens"] for sample in result["samples"]] for result in (both, one))
    assert found == expected
    # A rank's: the kv head is whole.
    assert 0.5 < both["weights_bytes"] / one["weights_bytes"] < 0.6


def test_a_chat_answers_as_one_rank_does_and_ends_with_its_input(commands, one_rank):
    done = commands["chat"]
    assert (done.returncode, done.stdout) == (
        0,
        one_rank(*CHAT, stdin=TYPED),
    ) and done.stdout.count("\n") == 2


def test_a_mistake_is_one_line_of_rank_0(commands):
    done = commands["mistake"]
    [said] = told(done)
    assert (done.returncode, done.stdout) == (1, "")  # torchrun's own code
    assert "no/such/dir" in said


def test_what_one_rank_cannot_read_is_one_line_of_that_rank(commands):
    done = commands["unreadable"]
    [said] = told(done, "unreadable.py")
    assert done.returncode == 1 and "model.safetensors" in said


def test_a_bug_on_one_rank_leaves_its_traceback():
    program = "from cli.errors import run; run(lambda: {}['a bug'])"
    done = python("-c", program, WORLD_SIZE="2", RANK="1")
    assert done.returncode == 1 and "KeyError: 'a bug'" in done.stderr


def test_ctrl_c_ends_a_rank_whatever_thread_it_meets(monkeypatch):
    """One that a library started before, say, while the main thread waits for a GPU and runs no
    Python."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert interrupted("-c", program("sleeper.py"), path=ROOT) == (-signal.SIGINT, b"")


def test_when_a_rank_is_killed_rank_0_says_so(tmp_path):
    """Started without torchrun, which may end rank 0 before it does."""
    make_endless(tmp_path / "endless")
    options = "--device cpu --temperature 0 --max-new-tokens 10000 --max-seq-length 12000"
    command = [
        sys.executable,
        ROOT / "generate.py",
        "--checkpoint",
        tmp_path / "endless",
        *options.split(),
    ]
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    shared = os.environ | dict(
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="localhost",
        MASTER_PORT=port,
        OMP_NUM_THREADS="1",
    )
    first, second = (
        subprocess.Popen(
            command,
            stdout=PIPE,
            stderr=PIPE,
            text=True,
            env=shared | dict(RANK=rank, LOCAL_RANK=rank),
        )
        for rank in "01"
    )
    try:
        assert first.stdout.read(30)  # the ranks are at it
        second.kill()
        _, errors = first.communicate(timeout=15)
        assert first.returncode == 2 and errors.startswith("generate.py: another rank ended: "), (
            errors
        )
        assert errors.count("\n") == 1
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory) -> Callable:
    """Of a case of GPU_CASES its arguments and what each rank gave: two ranks for PAIRED, else all
    GPUs of the host. Of pytest's workers (-n) the first starts the ranks: with a pair from each
    they took longer than all other tests."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    directory = tmp_path_factory.getbasetemp().parent / f"ranks-{run}"
    cases, groups = placed(GPU_CASES, directory), {"pair": 2, "all": torch.cuda.device_count()}
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            directory.mkdir()
            torch.manual_seed(0)
            make(directory / "wide", **WIDE)
            # Every token takes all 4: where 2 are chosen and the choice is a tie, a rounding of bf16
            # changes an expert, and logits by up to 0.13 of the largest, on a CPU too; here by 0.008.
            make(directory / "experts", "gpt_oss", **WIDE | EXPERTS | dict(num_experts_per_tok=4))
            kind, changes = MADE["gemma4_everyone"]
            make(directory / "gemma4_everyone", kind, **changes | dict(vocab_size=2048))
            # A rank has parts of its groups.
            write(Path(TINY), directory / "gptq-4-32-act", *GPTQ["gptq-4-32-act"])
            for group, ranks in groups.items():
                chosen = {
                    name: case
                    for name, case in cases.items()
                    if (name in PAIRED) == (group == "pair")
                }
                run_ranks(directory / group, "cuda", chosen, ranks)
    given = {group: results(directory / group, ranks) for group, ranks in groups.items()}
    return lambda name: (cases[name][1], of_each(given["pair" if name in PAIRED else "all"], name))


def rounded(out: Tensor, terms: Tensor, one_shot: bool) -> bool:
    """out is the sum of terms [n, ...], of whose size fp32 may lose 1e-6, rounded to out's type;
    NCCL adds up in that type, one after the other."""
    exact, size, eps = (
        terms.double().sum(0),
        terms.double().abs().sum(0),
        torch.finfo(out.dtype).eps,
    )
    sums = 0 if one_shot else len(terms) - 1
    # The last: the least steps of fp16.
    bound = eps / 2 * exact.abs() + (eps / 2 * sums + 1e-6) * size + 1e-7
    return bool(((out.double() - exact).abs() <= bound).all())


def exchanged(request, device: str, name: str) -> tuple[list, int]:
    """What each rank got, and how many numbers fast/'s kernel sends at once."""
    if device == "cpu":
        return of_each(request.getfixturevalue("pair"), name), 0
    on_gpus = request.getfixturevalue("on_gpus")
    return on_gpus(name)[1], on_gpus("capacity")[1][0]


@pytest.mark.parametrize(
    "device, dtype, fused",
    [
        *(("cpu", *kind) for kind in EXCHANGES),
        *(pytest.param("cuda", *kind, marks=ON_GPUS) for kind in GPU_EXCHANGES),
    ],
)
def test_sums_are_exact_with_the_same_bits_everywhere_and_logits_are_the_parts(
    request, device, dtype, fused
):
    ranks, capacity = exchanged(request, device, f"{dtype} {fused}")
    inputs = tp_worker.sum_inputs(len(ranks), dtype)
    for n, ((x, residual), first, *rest) in enumerate(
        zip(inputs, *(rank["sums"] for rank in ranks), strict=True)
    ):
        assert first.dtype == x.dtype and rest
        assert all(
            torch.equal(first.view(torch.uint8), other.view(torch.uint8)) for other in rest
        ), n
        one_shot = fused and x[0].numel() <= capacity
        terms = torch.cat([x, residual[None]]) if fused and residual is not None else x
        assert rounded(first, terms, device == "cpu" or one_shot), (n, x.shape)
    expected = tp_worker.gather_inputs(len(ranks), dtype)
    for rank in ranks:
        assert len(rank["gathered"]) == len(expected) and all(
            map(torch.equal, rank["gathered"], expected)
        )


@ON_GPUS[0]
@ON_GPUS[1]
def test_a_captured_graph_exchanges_anew_each_time(request):
    outs, capacity = exchanged(request, "cuda", "graph")
    x, residual, logits = tp_worker.graph_inputs(len(outs))
    for first, *rest in zip(*outs, strict=True):
        assert (
            len(first) == tp_worker.REPLAYS
            and rest
            and all(torch.equal(first, other) for other in rest)
        )
    first, second, gathered = outs[0]
    for out, terms in (
        (first, [*x.unbind(1), residual]),
        (second, [*[first] * len(outs), residual]),
    ):
        assert rounded(out, torch.stack(terms), capacity > 0)
    assert torch.equal(gathered, logits)


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPUS) for name in GPU_TOKENS])
def test_gpus_give_the_tokens_of_one_but_for_ties(on_gpus, name):
    """bf16, compiled, with kernels, a ragged batch."""
    args, (first, *rest) = on_gpus(name)
    assert rest and all(other == first for other in rest) and first["kernels"]
    if torch.cuda.get_device_capability() >= (9, 0):
        assert first["one_launch"] == ("one row" in name)
    one = tp_worker.tokens(Team(), torch.device("cuda:0"), **args)
    how = {
        key: value for key, value in args.items() if key in ("checkpoint", "quantize", "group_size")
    }
    same_but_for_ties(
        tp_worker.load(Team(), CPU, **how),
        tp_worker.prompts()[: len(first["rows"])],
        one["rows"],
        first["rows"],
        0.02,
    )
    assert {len(row) for row in one["rows"]} == {48}

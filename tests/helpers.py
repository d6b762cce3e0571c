"""What several test files share: paths, tiny models and checkpoints, and running a generator, a
command or ranks."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE
from unittest.mock import patch

import pytest
import tokenizers as hf
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceTrainer
from torch import Tensor, nn

from hub import formats
from hub import vet
from hub.checkpoint import Checkpoint, hf_weights, load_model
from drafts import make_draft, open_draft
from drafts.dflash import BlockConfig, DFlash, DFlash2, DFlashCheckpoint, Second
from drafts.eagle import Head, HeadConfig
from drafts.heads import DraftHead
from drafts.mtp import MtpCheckpoint, MtpHead, names_of
from drafts.policies import make_policy
from drafts.shared_kv import SharedKV, SharedKVConfig
from hub.families import config_from_hf
from generate import Engine, generate
from llm import find_engine
from gptq import gptq_model
from model import Config, LayerConfig, MoE, Rope, Transformer
from quantize import QuantizedLinear, round_model
from generate import Sampling
from speculative import SLACK, Speculator
from hub.tokenizer import Tokenizer
from hub.write import CONFIGS, write_checkpoint
from tp import Team

ROOT = Path(__file__).parents[1]
BUNDLED = "tiny", "tiny-draft", "tiny-eagle", "tiny-dflash"
TINY, DRAFT, EAGLE, DFLASH = (ROOT / "checkpoints" / name for name in BUNDLED)
GOLDEN = ROOT / "tests" / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())
CHATS = ROOT / "tests" / "chats"
ENVIRONMENT = dict(os.environ)  # which tests change
CPU, F32 = torch.device("cpu"), torch.float32
on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
ON_GPUS = (
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
)
of_each_family = pytest.mark.parametrize("family", FAMILIES)
GREEDY = Sampling(temperature=0)
ENGINES = {
    "eager": Engine,
    "compile": find_engine(True, no_kernels=True),
    "fast": find_engine(True),
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\\n{% endfor %}assistant:"  # a chat's
)


def error(out: Tensor, ref: Tensor) -> float:
    """How far out is from ref, relative to ref's norm."""
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def exact_linear(
    x: Tensor,
    w: Tensor,
    norm: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """fast.linear.linear() in float64."""
    x, w, norm, bias, residual = (
        None if t is None else t.double() for t in (x, w, norm, bias, residual)
    )
    y = F.linear(x if norm is None else F.rms_norm(x, x.shape[-1:], norm, 1e-5), w, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def rope_of(E: int, theta: float = 10000.0, **more) -> Rope:
    """The usual one, of heads of E elements."""
    return Rope(tuple(theta ** (-i / E) for i in range(0, E, 2)), **more)


def exact_attention(qkv, positions, table, k_cache, v_cache, attn, window, complete=False):
    """Sequence by sequence and token by token in float64 -> the output [B, T, H, E], and the caches
    afterwards. complete: the new keys and values are in the caches already."""
    B, T, heads, E = qkv.shape
    rope, R = attn.rope, len(attn.rope.frequencies)
    K = k_cache.shape[1]
    H, G = heads - 2 * K, heads // K - 2
    k_cache, v_cache, out = (
        k_cache.double(),
        v_cache.double(),
        torch.zeros(B, T, H, E, dtype=torch.float64),
    )

    def turned(x, norm, at):
        x = x.double()
        if isinstance(norm, nn.Module) and hasattr(norm, "weight"):
            of = x.reshape(-1, len(norm.weight))  # a head or, of the whole, all of them
            x = (
                of / (of.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
            ).view(x.shape)
        half = torch.cat((-x[..., R : 2 * R], x[..., :R], torch.zeros_like(x[..., 2 * R :])), -1)
        return x * table.cos[at].double() + half * table.sin[at].double()

    for b in range(B):
        for t, at in enumerate(positions[b % len(positions)].tolist()):
            if not complete:
                k_cache[b, :, at] = turned(qkv[b, t, H : H + K], attn.k_norm, at)
                v_cache[b, :, at] = qkv[b, t, H + K :].double()
            first = max(0, at + 1 - window) if window else 0
            q = turned(qkv[b, t, :H], attn.q_norm, at).view(K, G, E)
            if rope.q_growth:
                q = q * (1 + rope.q_growth * math.log(1 + at // rope.original))
            scores = q @ k_cache[b, :, first : at + 1].mT * (attn.scale or E**-0.5)
            if attn.sinks is not None:
                scores = torch.cat((scores, attn.sinks.double().view(K, G, 1)), -1)
            shares = scores.softmax(-1)[..., : at + 1 - first]
            out[b, t] = (shares @ v_cache[b, :, first : at + 1]).view(H, E).cpu()
    return out, k_cache, v_cache


def refusal(function, *args, **options) -> str:
    """The message of the ValueError that the call raises; each is one line."""
    with pytest.raises(ValueError) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def absent(words: str, text: str) -> list[str]:
    return [word for word in words.split() if word not in text]


def penalized(
    logits: Tensor,
    prompt: list[int],
    made: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """logits [V] behind these tokens, token by token in float64."""
    logits = logits.double().clone()
    for token in {*prompt, *made}:
        x = logits[token].item()
        logits[token] = x / repetition if x > 0 else x * repetition
    for token in {*made}:
        logits[token] -= presence + frequency * made.count(token)
    return logits


# Models


def read(model: Callable, tokens: Tensor, **how) -> Tensor:
    """Logits of texts [B, T] that begin at position 0."""
    return model(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None], **how)


def tiny(device: str = "cpu", directory: Path = TINY) -> Transformer:
    """A bundled model or another small one, not vetted."""
    return load_model(Checkpoint(directory), torch.device(device), F32)


def tiny_head(directory: Path = EAGLE, **how) -> Head:
    """The bundled head, beside an embedding of its own."""
    target = vet.open_checkpoint(TINY)
    head = formats.load(open_draft(directory, target), CPU, F32, **how)
    head.share(tiny())
    return head


def golden(family: Path, max_seq_len: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Of each row tokens, as transformers goes on greedily, and their logits.

    max_seq_len: of a LongRoPE model only the rows whose factors a cache for such texts has."""
    values = load_file(family / "golden.safetensors")
    rows = range(len(values) // 2)
    rope = config_from_hf(read_json(family / "config.json")).layers[0].rope
    if max_seq_len and rope.long:
        is_long = max_seq_len > rope.original
        rows = [n for n in rows if (len(values[f"tokens.{n}"]) > rope.original) == is_long]
    return tuple([values[f"{kind}.{row}"] for row in rows] for kind in ("tokens", "logits"))


def is_golden(engine: Engine, family: Path) -> bool:
    """Whether greedy rows go on as the golden ones do, of which a ragged batch has read all but 24
    tokens."""
    length = len((engine.target if isinstance(engine, Speculator) else engine).model.slots)
    rows = [row.tolist() for row in golden(family, length)[0]]
    return run(engine, [row[:-24] for row in rows], 24) == [row[-24:] for row in rows]


def load_checkpoint(
    directory: Path,
    device: torch.device = CPU,
    dtype: torch.dtype = F32,
    quantize: str | None = None,
    group_size: int | None = None,
    **more,
) -> Transformer:
    """A checkpoint, vetted and loaded."""
    opened, _ = vet.open_checkpoint(directory, tokenizer=False)
    formats.check_quantize(opened, formats.read_settings(opened), quantize, group_size)
    return formats.load(opened, device, dtype, quantize, group_size, **more)


def random_model(seed: int, vocab_size: int = 8, dim: int = 16, layers: int = 2) -> Transformer:
    """Of one head and 512 positions; its distributions are neither flat nor certain."""
    layer = LayerConfig(rope=rope_of(8))
    model = Transformer(
        Config(
            dim,
            (layer,) * layers,
            n_head=1,
            n_kv_head=1,
            head_dim=8,
            ffn_dim=32,
            vocab_size=vocab_size,
            context=512,
        )
    )
    random = torch.Generator().manual_seed(seed)
    for p in (p for p in model.parameters() if p.dim() == 2):
        p.data = (
            torch.randn(p.shape, generator=random)
            * (1.2 if p is model.head.weight else 2)
            / p.shape[1] ** 0.5
        )
    return model


def run(
    engine: Engine | Speculator,
    prompts: list[list[int]],
    new_tokens: int,
    start: int = 0,
    samples: int = 1,
) -> list[list[int]]:
    """The new tokens of each row that is in use."""
    rows = [[] for _ in range(len(prompts) * samples)]
    for step in generate(engine, prompts, new_tokens, start, samples):
        for row, pairs in zip(rows, step):
            row += [token for token, _ in pairs]
    return [row[:new_tokens] for row in rows]


def speculator(
    model: Transformer,
    length: int,
    draft: Transformer | None,
    policy: str,
    rows: int = 1,
    sampling: Sampling = GREEDY,
    mode: str = "eager",
    agree: Callable = Team().agree,
    cache: str = "16-bit",
) -> Speculator:
    """For texts of `length` tokens. draft: a model, an EAGLE head or, None, prompt lookup."""
    places = draft.target_places if isinstance(draft, DraftHead | SharedKV) else ()
    if isinstance(draft, DFlash):
        places = draft.block.places
    engine = partial(ENGINES[mode], batch_size=rows, sampling=sampling, cache=cache)
    target = engine(model, length, features=places, spare=SLACK)
    return Speculator(target, make_draft(target, draft, engine), make_policy(policy), agree)


def every_number_is_accepted(monkeypatch, made: Speculator, model: Transformer) -> None:
    """Of a speculator that drafts 4 tokens, whose drafts are the text's own tokens as far as a plan
    says: 0 to 4. model: its target, anew."""
    prompt = list(range(2, 72))
    plain = run(Engine(model, 130, 1, GREEDY), [prompt], 60)[0]
    propose, text, seen = made.draft.propose, torch.tensor([prompt + plain + [0] * 9]), []

    def planned(*step):
        drafted, q, proposed = propose(*step)
        at, right = int(step[1]) + 1, len(seen) % 5
        seen.append(right)
        drafted = text[:, at : at + 4].clone()
        drafted[:, right:] = (drafted[:, right:] + 1) % 96
        q = F.one_hot(drafted, 96).float()
        return drafted, F.pad(q, (0, 0, 0, 1)), proposed

    monkeypatch.setattr(made.draft, "propose", planned)
    assert run(made, [prompt], 60) == [plain]
    assert set(seen) == {0, 1, 2, 3, 4} and made.counts["accepted"] > 30


def random_head(
    seed: int,
    target: Transformer,
    known: list[int],
    places: tuple[int, ...] = (0, 1, 2),
    dim: int = 12,
    **options,
) -> Head:
    """An EAGLE head of a width of its own for a random_model(), of whose tokens it knows some."""
    config = replace(target.config, dim=dim, layers=target.config.layers[:1])
    head = Head(
        config, HeadConfig(places, target.config.dim, len(known), **options), torch.tensor(known)
    )
    random = torch.Generator().manual_seed(seed)
    for p in head.parameters():
        p.data = torch.randn(p.shape, generator=random) * (
            2 / p.shape[-1] ** 0.5 if p.dim() == 2 else 0.3
        )
        p.data += p.dim() == 1
    return head.requires_grad_(False)


def random_mtp(seed: int, target: Transformer) -> MtpHead:
    """For a random_model(); make_draft() lets it share what is the target's."""
    layer = next(layer for layer in target.config.layers if not layer.delta)
    config = replace(target.config, layers=(layer,), tied=False)
    head, random = MtpHead(config, target.config.n_layer), torch.Generator().manual_seed(seed)
    for p in head.parameters():
        p.data = torch.randn(p.shape, generator=random) * (2 / p.shape[-1] ** 0.5)
        p.data += p.dim() == 1
    return head.requires_grad_(False)


def random_dflash(seed: int, target: Transformer, kind: str = "first") -> DFlash:
    """A block of 8 tokens for a target, in two layers, of which the second has a window, which is
    causal but for the kind "muse"; of DFlash 2, too."""
    config, random = target.config, torch.Generator().manual_seed(seed)
    whole = LayerConfig(rope=Rope(tuple(10000.0 ** (-i / 4) for i in range(4))))
    config = Config(
        config.dim, (whole, replace(whole, window=9)), 2, 1, 8, 24, config.vocab_size, 999
    )
    second = Second(2, 4, 5, 6) if kind == "second" else None
    causal = False if kind == "muse" else None
    block = BlockConfig((1, target.config.n_layer), config.dim, 8, 6, causal, second)
    draft = (DFlash2 if second else DFlash)(replace(config, qk_norm="head"), block)
    for p in draft.parameters():
        p.data = torch.randn(p.shape, generator=random) * (2 / p.shape[-1] ** 0.5)
        p.data += p.dim() == 1
    return draft.requires_grad_(False)


def random_shared_kv(seed: int, target: Transformer, clusters: bool = False) -> SharedKV:
    """Two layers of queries for a random_model(), of whose last two layers they read the keys."""
    config, random = target.config, torch.Generator().manual_seed(seed)
    n = config.n_layer
    layers = tuple(replace(config.layers[i], kv_of=i) for i in (n - 2, n - 1))
    options = SharedKVConfig(config.dim, (n,), *((4, 2) if clusters else ()))
    order = torch.randperm(config.vocab_size, generator=random)
    draft = SharedKV(
        replace(config, dim=12, layers=layers, ffn_dim=24, tied=True),
        options,
        order if clusters else None,
    )
    for p in draft.parameters():
        p.data = torch.randn(p.shape, generator=random) * (2 / p.shape[-1] ** 0.5)
        p.data += p.dim() == 1
    return draft.requires_grad_(False)


@torch.no_grad()
def logits_of(model: Transformer, tokens: Tensor = torch.arange(20, 60)) -> Tensor:
    """[T, V] of one text."""
    model.setup(len(tokens))
    return read(model, tokens[None])[0]


def with_all_experts(model: Transformer) -> Transformer:
    """Of routers by sigmoids, or with a norm of their own, an expert changes here and there where
    fp16 rounds in two ways, and logits by up to 0.13. test_experts.py has the choice."""
    for part in model.modules():
        if type(part) is MoE:
            n = dict(n_chosen=part.moe.n_expert, n_chosen_group=part.moe.n_group)
            part.moe = replace(part.moe, **n)
    return model


def same_but_for_ties(
    exact: Transformer,
    prompts: list[list[int]],
    rows: list[list[int]],
    found: list[list[int]],
    bound: float,
) -> None:
    """Greedy rows are those found; where two part, the two tokens' logits in exact, on a CPU, are a
    rounding apart."""
    for prompt, row, other in zip(prompts, rows, found, strict=True):
        assert len(row) == len(other)
        if row != other:
            at = next(at for at, (a, b) in enumerate(zip(row, other)) if a != b)
            logits = logits_of(exact, torch.tensor([*prompt, *row[:at]]))[-1]
            gap = logits[row[at]] - logits[other[at]]
            assert gap.abs() < bound * logits.abs().max(), (
                f"token {at} is {other[at]}, not {row[at]}"
            )


def check_logprobs(model: Transformer, prompt: list[int], pairs: list[tuple[int, float]]) -> None:
    """Tokens behind the prompt have the log-probabilities of the model's raw logits."""
    tokens, logprobs = zip(*pairs)
    logits = logits_of(model, torch.tensor([*prompt, *tokens]))[len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)


def traced():
    """While it holds, what torch.compile traces runs as PyTorch runs it: two ranks need 20 s of CPU
    time, not 60."""
    return patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))


# Tokenizers


def trained(directory: Path, sentences: list[str], settings: dict, **options) -> Tokenizer:
    """A tokenizer.model of one's own, opened."""
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        minloglevel=2,
        **options,
    )
    return described(
        directory, dict(vocab_size=400, bos_token_id=None, eos_token_id=None), settings
    )


LLAMA = dict(
    model_type="llama",
    hidden_act="silu",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=64,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)


def put(path: Path, content) -> None:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def open_tokenizer(directory: Path) -> Tokenizer:
    """Of a directory that has no weights, as a rule."""
    return Tokenizer(Checkpoint(directory))


def described(directory: Path, config: dict, settings: dict) -> Tokenizer:
    """The tokenizer that lies there, once both files say what it is for."""
    put(directory / "config.json", LLAMA | config)
    put(directory / "tokenizer_config.json", settings)
    return open_tokenizer(directory)


# Of tokenizer.json; the bundled tokenizer.model has <s> 1 and </s> 2.
BOS, EOS, EOT, IM_END = range(256, 260)


def with_json(
    directory: Path,
    config: dict | None = None,
    post_process: bool = True,
    more: tuple[str, ...] = (),
    **settings,
) -> Tokenizer:
    """Bytes as tokens, special tokens, and a post-processor that adds <s>."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    made = hf.Tokenizer(hf.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = (
        hf.pre_tokenizers.ByteLevel(add_prefix_space=False),
        hf.decoders.ByteLevel(),
    )
    made.add_special_tokens(["<s>", "</s>", "<|eot_id|>", "<|im_end|>", *more])
    if post_process:
        made.post_processor = hf.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    made.save(str(directory / "tokenizer.json"))
    ids = dict(vocab_size=260 + len(more), bos_token_id=BOS, eos_token_id=EOS)
    return described(
        directory, ids | (config or {}), dict(bos_token="<s>", eos_token="</s>") | settings
    )


def with_letters(directory: Path) -> None:
    """A tokenizer for golden models: each of their 96 tokens is a letter, so that any text is read
    as it was written."""
    letters = hf.Tokenizer(hf.models.BPE({chr(32 + i): i for i in range(96)}, []))
    letters.decoder = hf.decoders.Fuse()
    letters.save(str(directory / "tokenizer.json"))


def with_model(directory: Path, config: dict | None = None, **settings) -> Tokenizer:
    shutil.copy(TINY / "tokenizer.model", directory)
    return described(directory, dict(vocab_size=2048) | (config or {}), settings)


# Checkpoints


SHAPE = LLAMA | dict(hidden_size=64, intermediate_size=96, max_position_embeddings=64)


# Of a family whose layers are recurrent and attention by turns. A key head's two value heads have
# two groups of 32.
RECURRENT = dict(
    full_attention_interval=2,
    head_dim=16,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)
# With experts, and a shared one.
RECURRENT_MOE = RECURRENT | dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    shared_expert_intermediate_size=64,
)


# Of Gemma 4: full layers have larger heads, and as many keys for two of its query heads.
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = dict(
    num_hidden_layers=3,
    layer_types=[SLIDING, FULL, FULL],
    num_attention_heads=6,
    num_key_value_heads=6,
    num_global_key_value_heads=3,
    head_dim=16,
    global_head_dim=32,
    attention_k_eq_v=True,
    sliding_window=5,
    final_logit_softcapping=3.0,
    hidden_size_per_layer_input=0,
)
GEMMA4_MOE = GEMMA4 | dict(
    enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=96
)
# The last two layers read the first two's keys.
GEMMA4_E = GEMMA4 | dict(
    num_hidden_layers=4,
    layer_types=[SLIDING, FULL] * 2,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=32,
    vocab_size_per_layer_input=2048,
)
MUSE = dict(num_hidden_layers=3, head_dim=16, sliding_window=5)
# Of a family with latent attention: two heads' values are a group of 32.
LATENT = dict(
    num_attention_heads=6,
    num_key_value_heads=6,
    q_lora_rank=32,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    moe_intermediate_size=96,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
)


def make(directory: Path, kind: str = "llama", **changes) -> dict[str, Tensor]:
    """A checkpoint with random bf16 weights, and biases for qwen2."""
    directory.mkdir(exist_ok=True)
    weights = drawn(directory, SHAPE | dict(model_type=kind) | changes)
    save_file(weights, directory / "model.safetensors")
    return weights


def fuse_experts(directory: Path) -> None:
    """Makes one tensor of each layer's gates and ups, and one of its downs, as Qwen3.5 is
    published."""
    tensors = load_file(directory / "model.safetensors")
    fused = {}
    for name in [name for name in tensors if ".experts." in name]:
        layer, _, expert = name.partition(".experts.")
        fused.setdefault(layer, {})[expert] = tensors.pop(name)
    for layer, own in fused.items():
        X = len(own) // 3
        gates, ups, downs = (
            torch.stack([own[f"{x}.{part}_proj.weight"] for x in range(X)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        tensors[f"{layer}.experts.down_proj"] = downs
    save_file(tensors, directory / "model.safetensors")


def drawn(directory: Path, config: dict, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """config.json, and random tensors that go with it, not saved yet."""
    put(directory / "config.json", config)
    weights = hf_weights(config_from_hf(config))
    return {name: (torch.randn(weight.shape) / 8).to(dtype) for name, weight in weights.items()}


def write(
    directory: Path,
    out: Path,
    bits: int,
    group_size: int,
    sym: bool,
    act_order: bool = False,
    head: bool = False,
    form: str = "gptq",
    **config,
) -> Transformer:
    """A quantized checkpoint as the command writes it; the model of which it was written. config:
    keys to change."""
    source = Checkpoint(directory)
    model = load_model(source, CPU, F32)
    how = f"int{bits}", group_size, sym
    if act_order:
        gptq_model(model, *how, torch.randint(model.config.vocab_size, (24, 32)), act_order, head)
    else:
        round_model(model, *how, head)
    out.mkdir()
    config = CONFIGS[form](bits, group_size, sym, act_order, head) | config
    write_checkpoint(model, source, out, config)
    return model


def change(directory: Path, config: dict = {}, **tensors) -> None:
    """Replaces tensors, or drops them where they are None, and keys of quantization_config."""
    change_tensors(directory, **tensors)
    held = read_json(directory / "config.json")["quantization_config"]
    rewrite(directory / "config.json", quantization_config=held | config)


def awq(path: Path) -> dict[str, Tensor | None]:
    """Random codes and zero points as AWQ has them, eight outputs to a word, for a file in GPTQ's
    layout."""
    changes = {}
    for name, t in load_file(path).items():
        if name.endswith(("qweight", "qzeros")):  # zero points are as wide already
            shape = t.shape if name.endswith("qzeros") else (len(t) * 8, t.shape[1] // 8)
            changes[name] = torch.randint(-(2**31), 2**31 - 1, shape).int()
        elif name.endswith("g_idx"):
            changes[name] = None
    return changes


def quantized_layers(model: Transformer) -> dict[str, QuantizedLinear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


# Processes and the README


def python_blocks() -> list[str]:
    """The README's Python code."""
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )


def torchrun(*args, ranks: int = 2) -> list[str]:
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    return [sys.executable, *map(str, (*command, *args))]


def ended(
    command: list, typed: str = "", cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess:
    """A command that is over, and all that it started with it; so is one that hangs."""
    process = subprocess.Popen(
        [*map(str, command)],
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        cwd=cwd,
        env=ENVIRONMENT | dict(OMP_NUM_THREADS="1") | environment,
    )
    try:
        out, errors = process.communicate(typed, timeout=550)
    finally:
        process.terminate()  # which torchrun passes on
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def interrupted(*args, path="") -> tuple[int, bytes]:
    """Exit code and stderr of a script that gets Ctrl-C once it has printed something. path: where
    it looks first."""
    process = subprocess.Popen(
        [sys.executable, *args],
        stdout=PIPE,
        stderr=PIPE,
        cwd=ROOT,
        env=os.environ | dict(PYTHONPATH=str(path)),
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    return process.returncode, errors


JOBS = {}  # of a fixture's name what prepares it


def beside(job: Callable):
    """A fixture of what job(directory) prepares, a function: it runs other processes, beside the
    tests of this one. So job itself may draw random numbers, the function may not."""
    JOBS[job.__name__] = job
    return pytest.fixture(scope="session", name=job.__name__)(lambda started: started(job.__name__))


def program(name: str) -> str:
    """Code for python("-c"), of the folder tests/programs: it finds modules as if it lay elsewhere."""
    return (ROOT / "tests" / "programs" / name).read_text(encoding="utf-8")


def python(*args, **more) -> subprocess.CompletedProcess:
    """A script or code (-c) in a process of its own. With cwd and PYTHONPATH="" it finds no other
    module of ours."""
    return ended([sys.executable, *args], **more)


def one_line(result: tuple[int, str, str]) -> str:
    """What a command said that refused: exit code 2, one line on stderr, nothing on stdout."""
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


def told(done: subprocess.CompletedProcess, script: str = "generate.py") -> list[str]:
    """The lines of the program's own on stderr; torchrun has many."""
    return [line for line in done.stderr.splitlines() if line.startswith(f"{script}: ")]


def change_tensors(directory: Path, **tensors: Tensor | None) -> None:
    """Replaces tensors of model.safetensors, or drops them where they are None."""
    held = load_file(directory / "model.safetensors") | tensors
    save_file(
        {name: t.contiguous() for name, t in held.items() if t is not None},
        directory / "model.safetensors",
    )


def make_dflash(directory: Path, target: Path) -> None:
    """A draft of two layers with random tensors."""
    config = Checkpoint(target).config
    hf = SHAPE | dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        hidden_size=config.dim,
        vocab_size=config.vocab_size,
        dflash_config=dict(mask_token_id=7, target_layer_ids=[0]),
    )
    directory.mkdir()
    put(directory / "config.json", hf)
    save_file({"fc.weight": torch.zeros(config.dim, config.dim)}, directory / "model.safetensors")
    weights = DFlashCheckpoint(directory, Checkpoint(target)).weights
    change_tensors(
        directory,
        **{name: torch.randn(of.shape).bfloat16() / 4 for name, of in weights.items()},
    )


def add_mtp(directory: Path) -> None:
    """Random tensors that draft, for a checkpoint whose family has such a layer."""
    names = names_of(Checkpoint(directory).config)
    prefix = "model." * names.prefix.startswith("layers.") + names.prefix
    change_tensors(directory, **{f"{prefix}{names.fc}.weight": torch.zeros(1)})
    weights = MtpCheckpoint(Checkpoint(directory)).weights
    drawn = {f"{prefix}{name}": torch.randn(of.shape) / 4 for name, of in weights.items()}
    change_tensors(directory, **{name: of.bfloat16() for name, of in drawn.items()})


def save_tensors(directory: Path, tensors: dict[str, Tensor], shards: int = 0) -> None:
    """model.safetensors; with an index where shards are asked for."""
    file = {
        name: f"model-{i % shards}.safetensors" if shards else "model.safetensors"
        for i, name in enumerate(tensors)
    }
    if shards:
        put(directory / "model.safetensors.index.json", dict(weight_map=file))
    for one in set(file.values()):
        save_file(
            {name: tensor for name, tensor in tensors.items() if file[name] == one}, directory / one
        )


def with_template(directory: Path, source: Path = TINY) -> Path:
    """A copy of a bundled model that has a chat template."""
    shutil.copytree(source, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def make_endless(directory: Path) -> None:
    """The bundled model with a context of 2 ** 14 tokens, and without the token that ends a
    story."""
    shutil.copytree(TINY, directory)
    rewrite(directory / "config.json", max_position_embeddings=2**14, eos_token_id=None)
    rewrite(directory / "generation_config.json", eos_token_id=None)


def rewrite(path: Path, **changes) -> None:
    """Keys of a JSON file."""
    put(path, read_json(path) | changes)

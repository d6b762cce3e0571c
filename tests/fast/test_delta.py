"""The kernels of recurrent layers, of gates of heads and of a shared expert, on a GPU: each beside
its plain twin, which tests/test_recurrent.py judges."""

import copy

import pytest
import torch

from drafts import open_draft
from fast.decoder import install_kernels, plain_halves
from helpers import (
    ENGINES,
    add_mtp,
    load_checkpoint,
    make,
    make_dflash,
    run,
    same_but_for_ties,
    speculator,
)
from hub import formats
from hub.checkpoint import Checkpoint
from model import Config, DeltaCache, DeltaConfig, DeltaNet, LayerConfig
from generate import Sampling

pytestmark = pytest.mark.gpu
GREEDY = Sampling(0)
RECURRENT = dict(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1000,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=32,
    linear_value_head_dim=64,
    full_attention_interval=2,
    max_position_embeddings=2048,
)
MIXTURE = dict(
    num_experts=8,
    num_experts_per_tok=8,  # a tie of a router decides nothing
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
)
KINDS = {
    "dense": ("qwen3_5_text", RECURRENT),
    "mixture": ("qwen3_5_moe_text", RECURRENT | MIXTURE),
    "next": ("qwen3_next", RECURRENT | MIXTURE | dict(shared_expert_intermediate_size=64)),
}


def random_mixer(G: int, H: int, E: int, V: int, B: int, dtype: torch.dtype) -> DeltaNet:
    delta = DeltaConfig(G, H, E, V)
    config = Config(64, (LayerConfig(delta=delta),), 4, 2, 16, 96, 100, 999, norm_eps=1e-6)
    with torch.device("cuda"):
        mixer = DeltaNet(config, delta).to(dtype).requires_grad_(False)
    for parameter in mixer.parameters():
        parameter.normal_(std=0.3 if parameter.dim() > 1 else 1)
    mixer.log_a.data = torch.rand(H, device="cuda").mul(2).add(0.01).log()
    mixer.dt_bias.data = mixer.dt_bias.data.float()
    mixer.cache = DeltaCache((B, delta), torch.device("cuda"), dtype)
    return mixer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "G, H, E, V, B", [(2, 4, 16, 24, 2), (1, 3, 128, 128, 1), (2, 2, 40, 64, 3), (4, 8, 64, 32, 17)]
)
@torch.no_grad()
def test_pieces_prompts_and_rejected_drafts_as_the_twin_has_them(G, H, E, V, B, dtype):
    from fast.delta import FusedDelta

    twin = random_mixer(G, H, E, V, B, dtype)
    fused = FusedDelta(copy.deepcopy(twin))
    at = torch.zeros(B, dtype=torch.long, device="cuda")
    rows = torch.arange(B, device="cuda")[:, None]
    for step in range(25):
        is_prompt = step % 5 == 0
        T = int(torch.randint(60, 150, ()) if is_prompt else torch.randint(1, 34, ()))
        positions = at[:, None] + torch.arange(T, device="cuda")
        ends = at + torch.randint(0, T + 1, (B,), device="cuda") if is_prompt else None
        made = [
            (torch.randn(B, T, n, device="cuda")).to(dtype)
            for n in (twin.delta.channels + H * V, 2 * H)
        ]
        found = fused.mix(*made, positions, ends)
        expected = twin.mix(*made, positions, None, None, None, rows, ends)
        text = (
            torch.ones(B, T, dtype=torch.bool, device="cuda")
            if ends is None
            else positions < ends[:, None]
        )
        error = (found - expected).float()[text].abs().max() if text.any() else 0
        assert error <= 0.02 * expected.float().abs().max().clamp(min=1), step
        assert found.isfinite().all()
        assert torch.equal(fused.cache.inputs, twin.cache.inputs)
        # Some of what was read is rejected.
        at = ends if is_prompt else at + torch.randint(1, T + 1, (B,), device="cuda")


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_as_near_as_plain_ones(tmp_path, kind, quantize):
    """In bf16, to those of fp32 on a CPU: a prompt, steps of 1 to 33 tokens, some of them read
    twice."""
    family, sizes = KINDS[kind]
    make(tmp_path / "in", family, **sizes)
    how = dict(quantize=quantize, group_size=32 if quantize == "int4" else None)
    exact = load_checkpoint(tmp_path / "in", torch.device("cpu"), torch.float32, **how)
    plain = load_checkpoint(tmp_path / "in", torch.device("cuda"), torch.bfloat16, **how)
    fast = load_checkpoint(tmp_path / "in", torch.device("cuda"), torch.bfloat16, **how)
    tokens = torch.randint(sizes["vocab_size"], (3, 200))
    for model in (exact, plain, fast):
        model.setup(256, 3)
    expected = exact(tokens, torch.arange(200)[None])
    assert not plain_halves(fast) or kind == "next"
    decoder = install_kernels(fast)
    assert decoder.kernels
    errors = []
    for forward, read in ((plain, plain), (decoder, fast)):
        on = tokens.cuda()
        positions = torch.arange(200, device="cuda").expand(3, -1)
        ends = torch.full((3,), 100, device="cuda")
        read(on[:, :112], positions[:, :112], ends=ends)
        found = []
        for start, n, kept in ((100, 33, 5), (105, 1, 1), (106, 8, 8), (114, 33, 33), (147, 12, 1)):
            found.append(
                forward(on[:, start : start + n], positions[:, start : start + n])[:, :kept]
            )
        difference = torch.cat(found, 1).float().cpu() - expected[:, 100:148]
        errors.append(difference.pow(2).mean().sqrt() / expected.std())
    assert errors[1] < 1.5 * errors[0] + 1e-3 and errors[0] < 0.2, errors


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_captured_engines_and_drafts_give_the_eager_texts(tmp_path, kind):
    family, sizes = KINDS[kind]
    make(tmp_path / "in", family, **sizes)
    exact = load_checkpoint(tmp_path / "in", torch.device("cpu"), torch.float32)
    load = lambda: load_checkpoint(tmp_path / "in", torch.device("cuda"), torch.bfloat16)  # noqa: E731
    prompts = [torch.randint(1000, (n,)).tolist() for n in (70, 1, 33)]
    engine = ENGINES["fast"](load(), 200, 3, GREEDY)
    engine.warm_up(3)
    assert engine.captures
    rows = run(engine, prompts, 60)
    alone = [run(engine, [prompt], 60)[0] for prompt in prompts]
    same_but_for_ties(exact, prompts, alone, rows, 0.05)
    for policy in ("3", "8"):
        with_draft = speculator(load(), 200, load(), policy, 3, GREEDY, "fast")
        found = [row[:60] for row in run(with_draft, prompts, 60)]
        same_but_for_ties(exact, prompts, rows, found, 0.05)
        # The draft is the target: but for ties it keeps all.
        assert with_draft.counts["accepted"] > 0.8 * with_draft.counts["drafted"]


@pytest.mark.parametrize("name", ["mtp", "dflash"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_with_what_drafts_for_these_models(tmp_path, kind, name):
    """Random ones, whose drafts are hardly ever kept; tests/drafts has more, on a CPU."""
    family, sizes = KINDS[kind]
    make(tmp_path / "in", family, **sizes)
    add_mtp(tmp_path / "in")
    make_dflash(tmp_path / "dflash", tmp_path / "in")
    exact = load_checkpoint(tmp_path / "in", torch.device("cpu"), torch.float32)
    load = lambda: load_checkpoint(tmp_path / "in", torch.device("cuda"), torch.bfloat16)  # noqa: E731
    prompts = [torch.randint(1000, (n,)).tolist() for n in (70, 1, 33)]
    rows = run(ENGINES["fast"](load(), 200, 3, GREEDY), prompts, 60)
    source = "mtp" if name == "mtp" else str(tmp_path / "dflash")
    opened = open_draft(source, (Checkpoint(tmp_path / "in"), None))
    draft = formats.load(opened, torch.device("cuda"), torch.bfloat16)
    made = speculator(load(), 200, draft, "3", 3, GREEDY, "fast")
    assert made.captures
    same_but_for_ties(exact, prompts, rows, run(made, prompts, 60), 0.05)
    assert made.counts["drafted"] > 100
    made.set_sampling(Sampling(1.0, top_p=0.9))
    assert all(len(row) == 60 for row in run(made, prompts, 60))


@pytest.mark.parametrize("T, G, L", [(1, 6, 40), (4, 2, 300), (9, 3, 129)])
@torch.no_grad()
def test_gates_of_heads_inside_of_attention(T, G, L):
    from fast.decoder import FusedAttention
    from model import Attention, KVCache, RopeTable, Rope

    rope = Rope(tuple(10000.0 ** (-i / 16) for i in range(16)))
    layer = LayerConfig(rope=rope)
    config = Config(128, (layer,), 2 * G, 2, 256, 64, 100, 999, qk_norm="head", attention_gate=True)
    with torch.device("cuda"):
        attn = Attention(config, layer).to(torch.bfloat16).requires_grad_(False)
        attn.cache = KVCache((3, 2, 320, 256), torch.device("cuda"), torch.bfloat16)
        attn.cache.k.normal_()
        attn.cache.v.normal_()
    twin = copy.deepcopy(attn)
    table = RopeTable(rope, 256, 320, 320, torch.device("cuda"))
    positions = torch.tensor([L - T, 5, 0], device="cuda")[:, None] + torch.arange(T, device="cuda")
    qkv = torch.randn(3 * T, (2 * 2 * G + 4) * 256, device="cuda", dtype=torch.bfloat16)
    found = FusedAttention(attn, table, None).attend(qkv, positions)
    slots = torch.arange(320, device="cuda")
    mask = slots <= positions[:, None, :, None]
    rows = torch.arange(3, device="cuda")[:, None]
    expected = twin.attend(qkv.unflatten(0, (3, T)), positions, *table(positions), mask, rows)
    torch.testing.assert_close(found, expected.flatten(0, 1), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@torch.no_grad()
def test_a_norm_of_fp32_before_a_product(quantize, rows):
    """Gemma 3's and Qwen3.5's norms; few.cu and linear.py's kernel have it as a launch before."""
    from fast.linear import linear
    from fast.packed_linear import PackedLinear
    from quantize import CODES, plain_layer, rounded

    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    norm = torch.rand(512, device="cuda") + 0.5
    layer = plain_layer(torch.randn(768, 512, device="cuda", dtype=torch.bfloat16) / 16, None)
    if quantize:
        layer = rounded(
            layer, CODES[quantize], 32 if quantize == "int4" else -1, quantize == "int8"
        )
        weight = layer.dequantize(torch.float32)
        found = PackedLinear(layer).fused(x, norm=norm, eps=1e-6)
    else:
        weight = layer.weight.float()
        found = linear(x, layer.weight, norm, None, eps=1e-6)
    expected = torch.nn.functional.rms_norm(x.double(), (512,), norm.double(), 1e-6)
    torch.testing.assert_close(found.double(), expected @ weight.double().T, atol=0.02, rtol=0.02)

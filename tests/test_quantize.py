"""
Rounding and GPTQ, against what is written here from the definitions, and the command that writes
quantized checkpoints.
"""

import os
import shutil
import signal
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantize
from hub import write as hub_write
from gptq import calibrate, find_best_scales, gptq, gptq_model
from hub.checkpoint import hf_weights
from hub.families import config_from_hf
from helpers import (
    CPU,
    F32,
    FAMILIES,
    GOLDEN,
    LATENT,
    RECURRENT,
    RECURRENT_MOE,
    ROOT,
    TINY,
    absent,
    change_tensors,
    error,
    fuse_experts,
    load_checkpoint,
    logits_of,
    make,
    open_tokenizer,
    quantized_layers,
    read,
    read_json,
    refusal,
    rewrite,
    tiny,
    write,
)
from model import Transformer
from quantize import (
    INT4,
    INT8,
    Codes,
    QuantizedLinear,
    as_held,
    group_of,
    in_half,
    pack,
    round_to_nearest,
    round_model,
)
from tp import ROW_PARALLEL

K = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """quantize.py, of the checkpoint "in", which is made here, to "out"."""

    def run(*options, group_size: int | None = 32) -> None:
        begin = ("--checkpoint", tmp_path / "in", "--out", tmp_path / "out")
        group = () if group_size is None else ("--group-size", group_size)
        options = *begin, *group, *options
        monkeypatch.setattr("sys.argv", ["quantize.py", *map(str, options), "--device", "cpu"])
        quantize.main()

    make(tmp_path / "in")
    shutil.copy(TINY / "tokenizer.model", tmp_path / "in")
    return run


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def dense(module: QuantizedLinear) -> Tensor:
    return module.dequantize(torch.float64)


def values(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, kind: Codes, g_idx: Tensor | None = None
) -> Tensor:
    """What round_to_nearest and gptq give -> weights [N, K], fp64."""
    return dense(QuantizedLinear(pack(codes, kind.bits), scales, zeros, kind, None, g_idx))


def steps(w: Tensor, kind: Codes, C: int, sym: bool) -> Tensor:
    """The widest step [N, C] that rounding w [N, K] may take, in float64."""
    groups, top = w.double().unflatten(1, (C, -1)), 2**kind.bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if sym:
        return 2 * torch.maximum(-low, high) / top
    return torch.maximum((high - low) / top, high / (top - 1))


@pytest.mark.parametrize("size", [1, 1e-4, 1e-5, 1e-6, 1e-9, 1e-20, 1e-30, 1e7])
@pytest.mark.parametrize(
    "kind, group_size, C, sym",
    [(INT4, 32, 6, True), (INT4, 64, 3, False), (INT8, -1, 1, True), (INT8, 32, 6, False)],
)
def test_rounding_gives_the_nearest_of_evenly_spaced_values(kind, group_size, C, sym, size):
    """Which are as near to each other as fits the group's range: nothing is off by more than half
    of its step, whether or not fp16 has room for the scales."""
    w = torch.randn(5, 192) * torch.rand(5, 1) * size
    w[1] = w[1].abs()
    w[2, :64] = 0
    codes, scales, zeros = round_to_nearest(w, kind, group_size, sym)
    off = (values(codes, scales, zeros, kind) - w.double()).unflatten(1, (C, -1))
    # Of int8 the scale's own rounding is a part.
    assert (off.abs().amax(-1) <= 0.57 * steps(w, kind, C, sym)).all()
    assert zeros is None if sym else zeros.amin() >= 1


def test_scales_are_fp16_where_that_has_room():
    """To the nearest, or up among the smallest, so that no code is cut off."""
    scale = torch.cat(
        [
            torch.zeros(1),
            2.0 ** torch.empty(10_000).uniform_(-20, -14),
            2.0 ** torch.empty(10_000).uniform_(-14, 15.99),
        ]
    )
    held = as_held(scale)
    assert in_half(held).dtype == torch.float16 and in_half(held).float().equal(held)
    assert held[0] > 0 and scale[10_001:].half().float().equal(held[10_001:])
    grown = held[1:10_001].double() / scale[1:10_001].double()
    assert 1 <= grown.amin() and 1.05 < grown.amax() <= 1 + 1 / 16
    without_room = torch.tensor([1e-44, 3e-20, 2**-20.1, 7e4, 3e38])
    assert as_held(without_room)[1:].equal(without_room[1:]) and as_held(without_room)[0] > 0
    for one in without_room:
        assert in_half(torch.stack([one, torch.ones(())])).dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize("size", [1e-5, 1e-9])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("form, bits", [("gptq", 4), ("gptq", 8), ("compressed-tensors", 8)])
def test_tiny_weights_stay_half_a_step_away_in_layers_files_and_fast(
    tmp_path, form, bits, sym, size
):
    """Also where only some of q, k and v, and some rows, are tiny; in a file, as it is read again,
    and by fast/cpu.py."""
    import fast

    make(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors[K] = tensors[K].float() * size
    down = "model.layers.0.mlp.down_proj.weight"
    tensors[down] = tensors[down].float()
    tensors[down][::3] *= size
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    write(tmp_path / "in", tmp_path / "out", bits, 32, sym, form=form)
    rounded = load_checkpoint(tmp_path / "in", quantize=f"int{bits}", group_size=32)
    if sym == (bits == 8):  # as --quantize rounds
        read_again = load_checkpoint(tmp_path / "out")
        for name, layer in quantized_layers(rounded).items():
            assert dense(layer).equal(dense(quantized_layers(read_again)[name])), name
    model = load_checkpoint(tmp_path / "out")
    kind = INT4 if bits == 4 else INT8
    table = hf_weights(model.config)
    for name in (K, down):
        layer = model.get_submodule(table[name].ours.removesuffix(".weight"))
        held = table[name].of(layer.dequantize(torch.float64))
        C, w = tensors[name].shape[1] // 32, tensors[name].double()
        off = (held - w).unflatten(1, (C, -1)).abs().amax(-1)
        assert (off <= 0.57 * steps(w, kind, C, sym)).all(), name
    layer = model.layers[0].ffn.w_down
    x = torch.randn(3, layer.in_features)
    want = x.double() @ layer.dequantize(torch.float64).T
    fast.optimize(model)
    assert error(model.layers[0].ffn.w_down(x), want) < 1e-5
    tiny_rows = slice(None, None, 3)
    assert error(model.layers[0].ffn.w_down(x)[:, tiny_rows], want[:, tiny_rows]) < 1e-5


def correlated(K: int):
    x = torch.randn(500, 24) @ torch.randn(24, K) + 0.3 * torch.randn(500, K)
    return x * (1 + 3 * torch.rand(K))


@pytest.mark.parametrize(
    "N, K, kind, group_size", [(33, 288, INT4, 96), (16, 320, INT4, -1), (9, 256, INT8, 128)]
)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("sym", [False, True])
def test_gptq_loses_less_than_rounding_and_says_how_much(N, K, kind, group_size, act_order, sym):
    w, x = torch.randn(N, K), correlated(K)
    hessian = x.T @ x
    codes, scales, zeros, g_idx, loss = gptq(w, hessian, kind, group_size, sym, act_order)
    plain = round_to_nearest(w, kind, group_size, sym)
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(K)
    found = values(codes, scales, zeros, kind, g_idx), values(*plain, kind), 0
    ours, rounded, nothing = (
        ((off @ damped) * off).sum().item() for off in (of - w.double() for of in found)
    )
    assert ours < 0.7 * rounded and loss == pytest.approx(ours / nothing, rel=0.02)
    if act_order:  # each group's inputs are larger than the next one's
        falling = hessian.diagonal().argsort(descending=True)
        assert g_idx[falling].equal(torch.arange(K) // (K // scales.shape[1]))


@pytest.mark.parametrize(
    "name, other",
    [
        ("SHRINK", [1.0]),
        ("find_best_scales", lambda w, codes, sym, costs: find_best_scales(w, codes, sym, 1)),
    ],
)
def test_gptq_gains_by_narrower_ranges_and_by_what_each_weights_error_costs(
    monkeypatch, name, other
):
    w, x = torch.randn(33, 288), correlated(288)
    loss = gptq(w, x.T @ x, INT4, 96, False, False)[-1]
    monkeypatch.setattr(f"gptq.{name}", other)
    assert loss < 0.95 * gptq(w, x.T @ x, INT4, 96, False, False)[-1]


def test_inputs_that_are_always_0_are_rounded_and_a_hessian_that_is_not_positive_definite_is_damped(
    capsys,
):
    quantize.say_once.cache_clear()
    w, x = torch.randn(6, 64), correlated(64)
    x[:, 7] = 0
    for hessian, damped in (
        (x.T @ x, False),
        (torch.zeros(64, 64), False),
        (2 * torch.eye(64) - 1, True),
    ):
        codes, scales, zeros, _, loss = gptq(w, hessian, INT8, -1, False, False)
        assert (
            values(codes, scales, zeros, INT8)[:, 7] - w[:, 7]
        ).abs().max() <= 2 * scales.max() and loss == loss
        assert ("not positive definite" in capsys.readouterr().err) == damped
    assert "overflow" in refusal(gptq, w, torch.full((64, 64), torch.inf), INT4, 32, False, True)


def test_groups_that_do_not_fit_are_refused():
    assert absent("48 96 32", refusal(group_of, 96, 48)) == [] and "multiple of 32" in refusal(
        group_of, 56, -1
    )


@pytest.mark.parametrize("act_order", [False, True])
def test_weights_are_moved_to_answer_to_the_inputs_as_they_were(act_order):
    """8 bits lose next to nothing: what is left is what the nearest outputs, by least squares,
    leave."""
    w, before = torch.randn(24, 64), correlated(64)
    x = before + 0.3 * torch.randn_like(before)
    hessian, drift = x.T @ x, (before - x).T @ x
    codes, scales, zeros, g_idx, _ = gptq(w, hessian, INT8, 32, False, act_order, drift)
    w, x, wanted, drift = w.double(), x.double(), before.double() @ w.double().T, drift.double()
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(64)
    best = w + w @ drift @ damped.inverse()
    moved, least = (
        error(x @ of.T, wanted) for of in (values(codes, scales, zeros, INT8, g_idx), best)
    )
    assert moved == pytest.approx(least, rel=0.01)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe_lite"])
def test_each_matrix_was_calibrated_on_the_inputs_that_it_gets(tmp_path, monkeypatch, kind):
    """In the quantized model each matrix has the inputs whose Hessian its quantization was given,
    and the drift is that from the inputs in the model before. Of experts those of the rows that the
    model before routes to them are meant: they are left out here, and what is behind them is not."""
    shapes = dict(qwen3_5_text=RECURRENT, qwen3_5_moe_text=RECURRENT_MOE)
    shapes["glm4_moe_lite"] = LATENT | dict(n_group=1, topk_group=1)
    if kind != "llama":
        make(tmp_path, kind, **shapes[kind] | dict(num_hidden_layers=4))
    model, seen = tiny(directory=TINY if kind == "llama" else tmp_path), {}
    monkeypatch.setattr("gptq.CHUNK", 64)  # several chunks

    def spied(*args):
        for name, *given in calibrate(*args):
            seen[name] = given
            yield name, *given

    monkeypatch.setattr("gptq.calibrate", spied)
    tokens = torch.randint(model.config.vocab_size, (8, 40))

    def inputs(names):
        found = {}
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: found.update({name: args[0].flatten(0, -2)})
            )
        read(model, tokens)
        return {**found}

    model.setup(40)
    experts = "ffn.w_gate_up", "ffn.w_down"
    layers = quantize.find_layers(model, head=False)
    if "moe" in kind:
        mixed = [i for i, layer in enumerate(model.config.layers) if layer.moe]
        left_out = {f"layers.{i}.{name}" for i in mixed for name in experts}
        layers = [name for name in layers if name not in left_out]
    before = inputs(layers)
    gptq_model(model, "int4", 128 if kind == "llama" else 32, False, tokens, True)
    after = inputs(layers)
    assert len(layers) == len(after) and {*layers} <= seen.keys()
    for name in layers:
        (hessian, drift), y, x = seen[name], before[name], after[name]
        least = 1e-3 * hessian.abs().max().item()
        torch.testing.assert_close(hessian, x.T @ x, rtol=1e-4, atol=least)
        torch.testing.assert_close(drift, (y - x).T @ x, rtol=1e-3, atol=least)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize(
    "group_size, act_order, form, config",
    [
        (32, False, "gptq", dict(checkpoint_format="gptq")),
        (32, False, "gptq", dict(checkpoint_format="gptq_v2")),
        (-1, False, "gptq", {}),
        (32, True, "gptq", {}),
        (32, False, "compressed-tensors", {}),
        (-1, False, "compressed-tensors", {}),
    ],
)
def test_what_is_written_loads_bit_for_bit(
    tmp_path, bits, sym, group_size, act_order, form, config
):
    """And what others write is read right: see test_formats.py. So they read what is written: see
    the README, too."""
    theirs = make(tmp_path / "in", "qwen2")
    made = write(
        tmp_path / "in", tmp_path / "out", bits, group_size, sym, act_order, True, form, **config
    )
    want, got = made.state_dict(), load_checkpoint(tmp_path / "out").state_dict()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(quantized_layers(made)) == 2 * 4 + 1
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.equal(held[name], theirs[name]) for name in held if name in theirs
    )  # as it was, its dtype too


# Of recurrent families; "fused": all experts of a layer are one tensor in the files.
RECURRENT_KINDS = {
    "qwen3_5": ("qwen3_5_text", RECURRENT | dict(linear_num_value_heads=9)),
    "qwen3_5_moe": ("qwen3_5_moe_text", RECURRENT_MOE),
    "fused": ("qwen3_5_moe_text", RECURRENT_MOE),
    "qwen3_next": ("qwen3_next", RECURRENT_MOE | dict(mlp_only_layers=[1])),
}


def make_recurrent(directory: Path, name: str, **changes) -> dict[str, Tensor]:
    """One of RECURRENT_KINDS; the tensors of its file."""
    kind, shape = RECURRENT_KINDS[name]
    make(directory, kind, **shape | changes)
    if name == "fused":
        fuse_experts(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("name", RECURRENT_KINDS)
@pytest.mark.parametrize(
    "bits, group_size, sym, act_order, form",
    [
        (4, 32, False, True, "gptq"),
        (8, -1, True, False, "gptq"),
        (4, 32, False, False, "compressed-tensors"),
        (8, -1, True, False, "compressed-tensors"),
    ],
)
def test_what_is_written_of_recurrent_models_loads_bit_for_bit(
    tmp_path, name, bits, group_size, sym, act_order, form
):
    """Rows go back to the order of Qwen3-Next's files, and each expert becomes one of its own. What
    decides over states and experts stays as it was."""
    theirs = make_recurrent(tmp_path / "in", name)
    made = write(tmp_path / "in", tmp_path / "out", bits, group_size, sym, act_order, True, form)
    model = load_checkpoint(tmp_path / "out")
    torch.testing.assert_close(model.state_dict(), made.state_dict(), rtol=0, atol=0)
    if not act_order and sym == (bits == 8):  # as --quantize rounds
        rounded = load_checkpoint(tmp_path / "in", quantize=f"int{bits}", group_size=group_size)
        for layer, codes in quantized_layers(rounded).items():
            assert dense(codes).equal(dense(model.get_submodule(layer))), layer
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(held[of], theirs[of]) for of in held if of in theirs)
    left = {of for of in theirs if of in held and theirs[of].dim() == 2}
    gates = ("in_proj_ba",) if name == "qwen3_next" else ("in_proj_a", "in_proj_b")
    wanted = {f"model.layers.0.linear_attn.{of}.weight" for of in gates}
    if name != "qwen3_5":
        layers = (0,) if name == "qwen3_next" else (0, 1)
        wanted |= {f"model.layers.{i}.mlp.gate.weight" for i in layers}
        wanted |= {f"model.layers.{i}.mlp.shared_expert_gate.weight" for i in layers}
    assert left == wanted | {"model.embed_tokens.weight"}
    config = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    if form == "compressed-tensors":
        assert {f"{of}.weight" for of in config["ignore"]} == wanted


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT_KINDS)
def test_gptq_of_recurrent_models_loses_less_than_rounding(tmp_path, name):
    """On other texts than the one that it was calibrated on, with inputs that depend on each
    other."""
    make_recurrent(tmp_path, name)
    few = torch.randn(64, 8) @ torch.randn(8, 64) / 8
    change_tensors(tmp_path, **{"model.embed_tokens.weight": few})
    exact, rounded, ours = (tiny(directory=tmp_path) for _ in range(3))
    round_model(rounded, "int4", 32, False)
    gptq_model(ours, "int4", 32, False, torch.randint(64, (32, 40)))
    text = torch.randint(64, (60,))
    losses = [error(logits_of(model, text), logits_of(exact, text)) for model in (rounded, ours)]
    assert losses[1] < 0.8 * losses[0]


LATENT_KINDS = {
    "glm4_moe_lite": dict(n_group=1, topk_group=1, q_lora_rank=64),
    "deepseek_v3": dict(q_lora_rank=None),
}


@pytest.mark.parametrize("kind", LATENT_KINDS)
@pytest.mark.parametrize(
    "bits, group_size, sym, act_order, form",
    [
        (4, 32, False, True, "gptq"),
        (8, -1, True, False, "gptq"),
        (4, 32, False, False, "compressed-tensors"),
    ],
)
def test_what_is_written_of_latent_attention_loads_bit_for_bit(
    tmp_path, kind, bits, group_size, sym, act_order, form
):
    """What decode multiplies by parts of stays as it was, and so does the router."""
    theirs = make(tmp_path / "in", kind, **LATENT | LATENT_KINDS[kind])
    made = write(tmp_path / "in", tmp_path / "out", bits, group_size, sym, act_order, True, form)
    model = load_checkpoint(tmp_path / "out")
    torch.testing.assert_close(model.state_dict(), made.state_dict(), rtol=0, atol=0)
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(held[of], theirs[of]) for of in held if of in theirs)
    left = {of for of in theirs if of in held and theirs[of].dim() == 2}
    wanted = {f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in (0, 1)}
    wanted.add("model.layers.1.mlp.gate.weight")
    assert left == wanted | {"model.embed_tokens.weight"}
    config = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    if form == "compressed-tensors":
        assert {f"{of}.weight" for of in config["ignore"]} == wanted


@torch.no_grad()
@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_gptq_of_latent_attention_loses_less_than_rounding(tmp_path, kind):
    """As of recurrent models."""
    make(tmp_path, kind, **LATENT | LATENT_KINDS[kind])
    few = torch.randn(64, 8) @ torch.randn(8, 64) / 8
    change_tensors(tmp_path, **{"model.embed_tokens.weight": few})
    exact, rounded, ours = (tiny(directory=tmp_path) for _ in range(3))
    round_model(rounded, "int4", 32, False)
    gptq_model(ours, "int4", 32, False, torch.randint(64, (32, 40)))
    text = torch.randint(64, (60,))
    losses = [error(logits_of(model, text), logits_of(exact, text)) for model in (rounded, ours)]
    assert losses[1] < 0.8 * losses[0]


@pytest.mark.parametrize("how", ["--format compressed-tensors", "--gptq --act-order --calibration"])
def test_the_command_writes_experts_that_were_one_tensor_each_by_itself(
    tmp_path, command, capsys, how
):
    """The groups are those that all experts' inputs allow, 32 of the 32 of down, and the text is
    read with the layers' states."""
    shape = dict(vocab_size=2048, moe_intermediate_size=32, max_position_embeddings=128)
    make_recurrent(tmp_path / "in", "fused", **shape)
    text = tmp_path / "text"
    text.write_text((ROOT / "README.md").read_text())
    more = (text, "--calibration-tokens", 512) if "calibration" in how else ()
    command(*how.split(), *more, group_size=None)
    assert "groups of 32, the largest of 128, 64 and 32" in capsys.readouterr().err
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(of.endswith("gate_up_proj") for of in held)
    experts = {of.split(".")[5] for of in held if ".experts." in of}
    assert experts == {"0", "1", "2", "3"}
    exact, found = (logits_of(load_checkpoint(tmp_path / part)) for part in ("in", "out"))
    assert 0 < error(found, exact) < 0.5
    assert len(quantized_layers(load_checkpoint(tmp_path / "out"))) == 2 * 2 + 2 * 4
    by_load = load_checkpoint(tmp_path / "in", quantize="int4")
    assert by_load.layers[0].ffn.w_down.scales.shape == (4, 64, 1)


def test_rounding_while_loading_stays_near_the_exact_weights():
    exact = logits_of(tiny())
    int8, int4, int4_coarse = (
        error(logits_of(load_checkpoint(TINY, CPU, F32, *how)), exact)
        for how in (("int8",), ("int4", 32), ("int4", 128))
    )
    assert 0 < int8 < 0.02 < int4 < int4_coarse < 0.3


@pytest.mark.parametrize("kind, group, most", [("int8", 64, 0.01), ("int4", 32, 0.15)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rounded_head_has_codes_of_its_own(tmp_path, tied, kind, group, most):
    """The embedding and the other layers stay."""
    make(tmp_path, tie_word_embeddings=tied)
    plain, model = load_checkpoint(tmp_path), load_checkpoint(tmp_path, quantize_head=kind)
    assert quantized_layers(model) == {"head": model.head} and torch.equal(
        model.embed.weight, plain.embed.weight
    )
    assert (
        model.head.scales.shape == (64, 64 // group)
        and error(dense(model.head), plain.head.weight) < most
    )


def test_a_head_that_cannot_be_rounded_is_refused(tmp_path):
    make(tmp_path / "in")
    write(tmp_path / "in", tmp_path / "head", 4, 32, False, head=True)
    assert "quantize_head=int8" in refusal(load_checkpoint, tmp_path / "head", quantize_head="int8")
    weights = make(tmp_path / "in", tie_word_embeddings=True)
    weights["model.embed_tokens.weight"][3, 5] = float("nan")
    save_file(weights, tmp_path / "in" / "model.safetensors")
    assert "model.embed_tokens.weight has NaN" in refusal(
        load_checkpoint, tmp_path / "in", quantize_head="int8"
    )


@pytest.mark.parametrize("dim, ffn, group", [(256, 384, 128), (192, 256, 64), (128, 224, 32)])
@pytest.mark.parametrize("word, codes", [("--quantize", "int4"), ("--bits", "4")])
def test_both_commands_round_alike_in_the_largest_groups_that_fit(
    tmp_path, capsys, monkeypatch, dim, ffn, group, word, codes
):
    """The group is the largest of 128, 64 and 32 that divides the inputs of each layer, and is
    said."""
    source, out = tmp_path / "in", tmp_path / "out"
    make(source, hidden_size=dim, intermediate_size=ffn, head_dim=64)
    shutil.copy(TINY / "tokenizer.model", source)
    argv = ["quantize.py", "--checkpoint", source, "--out", out, word, codes, "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*map(str, argv)])
    quantize.main()
    assert f"groups of {group}, the largest of 128, 64 and 32" in capsys.readouterr().err
    written = load_checkpoint(out)
    assert read_json(out / "config.json")["quantization_config"]["group_size"] == group
    rounded = load_checkpoint(source, quantize="int4", progress=True)
    assert f"groups of {group}, the largest of 128, 64 and 32" in capsys.readouterr().err
    torch.testing.assert_close(written.state_dict(), rounded.state_dict(), rtol=0, atol=0)
    model = load_checkpoint(source)
    round_model(model, "int4")
    torch.testing.assert_close(written.state_dict(), model.state_dict(), rtol=0, atol=0)
    for layer in quantized_layers(written).values():
        assert layer.in_features == group * layer.scales.shape[1]


@pytest.mark.parametrize("codes", ["fp8", "mxfp4", "nvfp4"])
def test_only_whole_numbers_are_rounded_to(codes):
    with pytest.raises(ValueError, match=f"{codes}: only codes that are whole numbers"):
        round_model(tiny(), codes, 32)


def test_inputs_that_no_group_divides_are_refused(tmp_path):
    make(tmp_path, intermediate_size=80)
    assert "80 inputs; want a multiple of 32" in refusal(load_checkpoint, tmp_path, quantize="int4")


def test_the_command_writes_a_checkpoint_by_gptq(tmp_path, command):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text((ROOT / "README.md").read_text() * 2)
    tokens = torch.tensor(open_tokenizer(TINY).encode_text(text.read_text()))[:400]
    command(
        "--checkpoint",
        TINY,
        "--group-size",
        128,
        "--gptq",
        "--act-order",
        "--calibration",
        text,
        "--calibration-tokens",
        2048,
    )
    model = load_checkpoint(out)
    assert error(logits_of(model, tokens), logits_of(tiny(), tokens)) < 0.08  # rounded: 0.17
    assert model.layers[0].ffn.w_down.g_idx is not None  # act-order's
    assert {"config.json", "generation_config.json", "tokenizer.model", "model.safetensors"} <= {
        *names(out)
    }
    assert "quantized already" in refusal(load_checkpoint, out, CPU, F32, "int8")
    assert read_json(out / "config.json")["quantization_config"] == dict(
        bits=4,
        group_size=128,
        sym=False,
        desc_act=True,
        lm_head=False,
        quant_method="gptq",
        checkpoint_format="gptq_v2",
    )


def test_shards_are_small_and_load_as_one_file_does(tmp_path, monkeypatch):
    """Of a source in shards no index is left behind, nor a link to nothing."""
    source, out = tmp_path / "in", tmp_path / "out"
    weights, whole = make(source), load_checkpoint(source).state_dict()
    (source / "model.safetensors").unlink()
    (source / "gone.json").symlink_to(tmp_path / "nowhere")
    with monkeypatch.context() as small:
        small.setattr(hub_write, "SHARD_BYTES", 20_000)
        hub_write.write_shards(iter(weights.items()), source)
    files = sorted(source.glob("*.safetensors"))
    assert (
        len(files) > 2
        and max(sum(t.nbytes for t in load_file(file).values()) for file in files) <= 20_000
    )
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}
    torch.testing.assert_close(load_checkpoint(source).state_dict(), whole, rtol=0, atol=0)
    write(source, out, 4, 32, False)
    assert names(out) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "options, config, words",
    [
        ("--group-size 64", {}, "64 96 32"),
        ("--head", {}, "--head"),
        ("--gptq", {}, "--calibration"),
        ("--act-order", {}, "--gptq"),
        ("--out .", {}, "exists"),
        (
            f"--format compressed-tensors --gptq --act-order --calibration {__file__}",
            {},
            "--act-order gptq",
        ),
        (f"--gptq --calibration {__file__} --calibration-tokens 99999999", {}, "99999999 tokens"),
        ("--out /none/x", {}, "/none make"),
        ("--out {}/link", {}, "link exists"),
        ("", dict(hidden_size=2**16, intermediate_size=2**20), "GiB of weights"),
        (
            "",
            dict(num_attention_heads=8, num_key_value_heads=1, head_dim=20),
            "k_proj.weight 20 rows",
        ),
        ("", dict(quantization_config=dict(quant_method="gptq")), "quantized already"),
        ("", {}, K + " NaN"),
    ],
)
def test_what_cannot_be_quantized_is_refused_and_leaves_nothing(
    tmp_path, command, options, config, words
):
    """Before any weight is read: of one that is NaN the last row alone speaks."""
    weights = make(tmp_path / "in", tie_word_embeddings=True, vocab_size=2048)
    weights[K][3, 5] = float("nan")
    save_file(weights, tmp_path / "in" / "model.safetensors")
    rewrite(tmp_path / "in" / "config.json", **config)
    shutil.copy(TINY / "tokenizer.model", tmp_path / "in")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert absent(words, refusal(command, *options.format(tmp_path).split())) == []
    assert names(tmp_path) == ["in", "link"]


@pytest.mark.parametrize(
    "end, code",
    [
        (partial(signal.raise_signal, signal.SIGINT), 130),
        (partial(signal.raise_signal, signal.SIGTERM), 143),
        (partial(os.truncate, "/none", 0), 2),
    ],
)
@pytest.mark.parametrize(
    "module, where", [(hub_write, "save_file"), (quantize, "round_to_nearest")]
)
def test_an_interrupted_run_leaves_nothing(
    tmp_path, monkeypatch, call, command, end, code, module, where
):
    calls, plain = [], getattr(module, where)

    def end_later(*args, **more):
        calls.append(where)
        if len(calls) == 2:
            end()
        return plain(*args, **more)

    monkeypatch.setattr(module, where, end_later)
    monkeypatch.setattr(hub_write, "SHARD_BYTES", 20_000)
    assert (call("quantize.py", command)[0], len(calls), names(tmp_path)) == (code, 2, ["in"])


def test_nothing_is_copied_through_a_link_but_the_hubs_blobs(tmp_path, command):
    source, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    templates = source / "additional_chat_templates"
    for place in (templates, blobs):
        place.mkdir(parents=True)
    make(source)
    shutil.copy(TINY / "tokenizer.model", source)

    def link(place: Path, file: Path) -> None:
        (place / file.name).write_text("words")
        file.symlink_to(place / file.name)

    link(blobs, source / "vocab.txt")
    link(tmp_path, source / "secret.txt")
    link(blobs, templates / "tool_use.jinja")
    command("--checkpoint", source)
    out = tmp_path / "out"
    held = ["config.json", "model.safetensors", "tokenizer.model", "vocab.txt"]
    assert names(out) == [templates.name, *held]
    assert names(out / templates.name) == ["tool_use.jinja"]
    link(tmp_path, templates / "secret.jinja")  # what is read, too, is refused
    assert "out of its directory" in refusal(command, "--checkpoint", source, "--out", out / "b")


def test_what_generate_would_refuse_for_its_tokenizer_is_not_written(tmp_path, command):
    (tmp_path / "in" / "tokenizer.model").unlink()
    assert absent("no tokenizer fetch copy", refusal(command)) == []
    assert names(tmp_path) == ["in"]


def test_a_disk_without_room_is_said(monkeypatch, command):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Namespace(free=1000))
    assert "are free there" in refusal(command)


def test_the_layers_to_quantize_and_to_sum_over_ranks_are_those_of_the_table_of_weights():
    for family in FAMILIES:
        config = config_from_hf(read_json(GOLDEN / family / "config.json"))
        with torch.device("meta"):
            model = Transformer(config)
        matrices = {
            weight.ours.removesuffix(".weight"): weight.columns
            for weight in hf_weights(config).values()
            if weight.quantized
        }
        assert {*quantize.find_layers(model, head=False)} == {*matrices}
        assert {name for name in matrices if name.endswith(ROW_PARALLEL)} == {
            name for name, columns in matrices.items() if columns
        }
        head = [] if config.tied else ["head"]
        assert quantize.find_layers(model, head=True)[len(matrices) :] == head

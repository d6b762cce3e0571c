"""
Quantized checkpoints that other packages made (see make_quantized_golden.py), how ranks read them,
and what is refused.
"""

import copy
import functools
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hub import formats
from hub.checkpoint import Checkpoint, hf_weights, part_of, take
from hub.formats import read_settings
from helpers import (
    F32,
    absent,
    change_tensors,
    error,
    load_checkpoint,
    logits_of,
    make,
    quantized_layers,
    read,
    refusal,
    rewrite,
    write,
)
from model import Transformer
from quantized_golden import CONFIGS, unfold
from quantize import INT8, MXFP4, QuantizedLinear, from_e2m1, from_e4m3, from_e8m0, say_once
from tp import Shard


@pytest.mark.parametrize("setting", CONFIGS)
def test_what_other_packages_packed_gives_their_logits(tmp_path, setting):
    """To 1e-5, and the same greedy tokens; also with what fast/ makes of the layers on a CPU."""
    import fast

    tokens, logits = unfold(setting, tmp_path)
    model = load_checkpoint(tmp_path)
    assert quantized_layers(model)
    got = logits_of(model, tokens)
    assert error(got, logits) < 1e-5
    assert got.argmax(-1)[8:-1].equal(tokens[9:])
    with torch.no_grad():
        assert error(read(fast.optimize(model).decoder, tokens[None])[0], logits) < 1e-5


def weight_of(module) -> Tensor:
    """[N, K] of a linear layer of any kind."""
    if isinstance(module, formats.SeparateLinears):
        return torch.cat([weight_of(part) for part in module])
    return module.dequantize(F32) if isinstance(module, QuantizedLinear) else module.weight


def matrices(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face's, which may be quantized: [N, K, 1], or all experts' [X, K, N]."""
    found = {}
    for name, weight in hf_weights(model.config).items():
        if weight.quantized:
            of = weight.of(weight_of(model.get_submodule(weight.ours.removesuffix(".weight"))))
            found[name] = of.reshape(*of.shape[:2], -1)
    return found


def load_rank(directory: Path, rank: int) -> Transformer:
    return load_checkpoint(directory, split=partial(Shard, rank=rank, ranks=2))


@pytest.mark.parametrize("setting", [setting for setting in CONFIGS if setting != "gptq dynamic"])
def test_ranks_hold_the_same_weights(tmp_path, lone, setting):
    """Cut inside of 128 x 128 blocks too, along N and K, and where act-order scatters a group."""
    unfold(setting, tmp_path)
    compare_ranks(tmp_path)


def compare_ranks(directory: Path) -> None:
    whole = load_checkpoint(directory)
    table, want = hf_weights(whole.config), matrices(whole)
    for rank in (0, 1):
        shard = Shard(
            whole.config, formats.shared_inputs(read_settings(Checkpoint(directory))), rank, 2
        )
        for name, got in matrices(load_rank(directory, rank)).items():
            assert got.equal(take(want[name], part_of(table[name], shard))), name


@pytest.mark.parametrize(
    "form, act_order", [("gptq", True), ("gptq", False), ("compressed-tensors", False)]
)
def test_ranks_take_scattered_rows_of_what_phis_files_hold_as_one(tmp_path, lone, form, act_order):
    make(tmp_path / "phi", "phi3")
    write(tmp_path / "phi", tmp_path / "out", 4, 32, False, act_order, form=form)
    compare_ranks(tmp_path / "out")


@torch.no_grad()
def test_modules_left_as_they_were_load_as_they_are(tmp_path):
    """By its tensors alone a GPTQ file tells what was left out, here k of q, k and v, which have
    biases, and down."""
    tokens, logits = unfold("gptq act-order", tmp_path)
    weights, names = matrices(load_checkpoint(tmp_path)), ("self_attn.k_proj", "mlp.down_proj")
    left = [f"model.layers.0.{name}" for name in names]
    change_tensors(
        tmp_path,
        **{f"{name}.weight": weights[f"{name}.weight"][:, :, 0] for name in left},
        **{
            f"{name}.{part}": None
            for name in left
            for part in ("qweight", "qzeros", "scales", "g_idx")
        },
        **{"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)},
    )  # AutoGPTQ writes them
    model = load_checkpoint(tmp_path)
    assert len(quantized_layers(model)) == 5 and error(logits_of(model, tokens), logits) < 1e-5


def test_groups_that_no_two_ranks_can_share_are_refused(tmp_path):
    unfold("gptq dynamic", tmp_path)
    assert "192" in refusal(load_rank, tmp_path, 0)


@pytest.mark.parametrize(
    "setting, settings, ending, shape",
    [
        ("fp8 blocks", dict(weight_block_size=[10**40, 32 * 10**40]), "weight_scale_inv", (1, 1)),
        ("fp8 blocks", dict(quant_method=None, method="fp8"), "weight_scale_inv", (1, 1)),
        ("fp8 blocks", {}, "weight_scale_inv", ()),
        ("fp8 blocks", {}, "weight_scale_inv", (1,)),
        ("gptq 4 sym", {}, "g_idx", None),
    ],
)
def test_files_as_others_write_them(tmp_path, setting, settings, ending, shape):
    """Blocks larger than the matrix; the method under gptqmodel's key; the one scale of a tensor
    with fewer dimensions; old GPTQ, which does not say that groups are side by side."""
    tokens, logits = unfold(setting, tmp_path, settings)
    held = load_file(tmp_path / "model.safetensors")
    changed = {
        name: None if shape is None else tensor.view(shape)
        for name, tensor in held.items()
        if name.endswith(ending)
    }
    change_tensors(tmp_path, **changed)
    assert len(changed) == 7 and error(logits_of(load_checkpoint(tmp_path), tokens), logits) < 1e-5


def test_e4m3_e2m1_and_e8m0_are_read_by_bits():
    """All numbers that there are, the 16 of OCP's table; 2 ** -127 is no normal number."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[codes % 128 < 127]  # the others are NaN
    assert from_e4m3(numbers).equal(numbers.view(torch.float8_e4m3fn).float())
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert from_e2m1(codes[:16]).equal(torch.cat([numbers, -numbers]))
    assert from_e8m0(codes[:255]).double().equal(2.0 ** (codes[:255].double() - 127))


def test_of_gpt_oss_the_rest_is_rounded_and_experts_stay_mxfp4(tmp_path):
    tokens, logits = unfold("mxfp4", tmp_path)
    model = load_checkpoint(tmp_path, quantize="int8", quantize_head="int8")
    assert {name: layer.codes for name, layer in quantized_layers(model).items()} == {
        "layers.0.ffn.w_gate_up": MXFP4,
        "layers.0.ffn.w_down": MXFP4,
        "layers.0.attn.wqkv": INT8,
        "layers.0.attn.wo": INT8,
        "head": INT8,
    }
    found = logits_of(model, tokens)
    assert 1e-5 < error(found, logits) < 0.05
    formats.unpack_quantized(model, quiet=True)
    assert not quantized_layers(model) and error(logits_of(model, tokens), found) < 1e-6


@pytest.mark.parametrize(
    "setting, scale, told",
    [
        ("fp8 a tensor, static, cache", None, 1),
        ("fp8 blocks", None, 1),
        ("w4a16", None, 0),
        ("w4a16", "k_scale", 1),
        ("nvfp4-pack dense", "q_proj.input_global_scale", 1),
    ],
)
def test_what_the_file_asks_of_activations_is_told(tmp_path, capsys, setting, scale, told):
    """With a scale: what config.json does not say."""
    say_once.cache_clear()
    unfold(
        setting, tmp_path, **{f"model.layers.0.self_attn.{scale}": torch.ones(1) if scale else None}
    )
    load_checkpoint(tmp_path)
    assert capsys.readouterr().err.count("more exact") == told


def test_rows_that_leave_a_word_of_zero_points_unfilled_are_refused(tmp_path):
    """Four rows of queries: the files round their words down."""
    tensors = make(tmp_path, num_attention_heads=1, num_key_value_heads=1, head_dim=4)
    change_tensors(tmp_path, **{name: None for name in tensors if name.endswith("_proj.weight")})
    rewrite(
        tmp_path / "config.json",
        quantization_config=dict(quant_method="gptq", bits=4, group_size=32),
    )
    assert absent("q_proj 4 rows multiple of 8", refusal(load_checkpoint, tmp_path)) == []


@pytest.mark.parametrize(
    "setting, key, value, words",
    [
        ("w4a16", "quant_method", "bitsandbytes", "bitsandbytes gptq compressed-tensors fp8"),
        ("w4a16", "sparsity_config", dict(format="sparse-24-bitmask"), "2:4 sparse"),
        ("w4a16", "transform_config", dict(config_groups=dict(u=1)), "transform_config"),
        ("w4a16", "config_groups.group_0.format", "mxfp8-quantized", "MXFP8 pack-quantized"),
        ("mxfp4-pack", "config_groups.group_0.weights.group_size", 16, "group_size 16 32"),
        ("w4a16", "config_groups.group_0.weights.num_bits", 3, "num_bits 3 [4, 8]"),
        ("w4a16", "config_groups.group_0.weights.type", "float", "type float"),
        ("w4a16", "config_groups.group_0.weights.strategy", "tensor_group", "tensor_group"),
        ("w4a16", "config_groups.group_0.weights.dynamic", True, "dynamic True"),
        ("w4a16", "config_groups.group_0.targets", ["re:.*q_proj$"], "k_proj.weight missing"),
        ("w8a8", "config_groups.group_0.weights.num_bits", 4, "weight more than 4 bits"),
        ("w4a16", "ignore", ["re:("], "config.json quantization_config unterminated"),
        ("gptq 4 sym", "dynamic", {"(" * 10**5: {}}, "config.json quantization_config"),
        ("gptq 4 sym", "dynamic", {"+:.*": dict(bits=3)}, "bits 3"),
        ("gptq 4 sym", "checkpoint_format", "marlin", "checkpoint_format marlin gptq_v2"),
        ("gptq 4 sym", "group_size", 2**20 + 32, "group_size 1048608"),
        ("awq gemm", "config_groups", dict(a=1), "int"),
        ("awq gemm", "version", "gemv", "version gemv gemm"),
        ("awq gemm", "bits", 8, "bits 8 [4]"),
        ("fp8 blocks", "fmt", "e5m2", "fmt e5m2"),
        ("fp8 blocks", "weight_block_size", [128, 48], "weight_block_size 48 32"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(tmp_path, setting, key, value, words):
    settings = copy.deepcopy(CONFIGS[setting]["quantization_config"])
    *path, last = key.split(".")
    functools.reduce(dict.get, path, settings)[last] = value
    unfold(setting, tmp_path, settings)
    assert absent(words, refusal(load_checkpoint, tmp_path)) == []


NAN = float("nan")


@pytest.mark.parametrize(
    "setting, name, tensor, words",
    [
        ("w4a16", "self_attn.q_proj.weight_scale", None, "q_proj.weight_scale missing"),
        (
            "w4a16",
            "self_attn.q_proj.weight_scale",
            torch.full((64, 2), NAN),
            "q_proj.weight_scale NaN infinite",
        ),
        (
            "w4a16",
            "self_attn.q_proj.weight_shape",
            torch.tensor([64, 32]),
            "q_proj.weight_shape [64, 32] [64, 64]",
        ),
        ("w4a16 act-order", "self_attn.q_proj.weight_g_idx", None, "q_proj.weight_g_idx missing"),
        (
            "w4a16 act-order",
            "self_attn.q_proj.weight_g_idx",
            torch.zeros(64).int(),
            "q_proj.weight_g_idx 2 32",
        ),
        (
            "fp8 blocks",
            "self_attn.q_proj.weight_scale_inv",
            torch.ones(10**6),
            "weight_scale_inv [1000000] [1, 1]",
        ),
        (
            "fp8 blocks",
            "mlp.up_proj.weight",
            torch.full((128, 128), NAN).to(torch.float8_e4m3fn),
            "up_proj.weight NaN",
        ),
        (
            "fp8 blocks",
            "mlp.up_proj.weight",
            torch.ones(128, 128).to(torch.float8_e5m2),
            "weight F8_E5M2 F8_E4M3",
        ),
        ("fp8 blocks", "self_attn.q_proj.extra", torch.ones(1), "q_proj.extra place"),
        (
            "mxfp4",
            "mlp.experts.down_proj_scales",
            torch.full((4, 96, 3), 255).byte(),
            "scales down_proj NaN",
        ),
        (
            "nvfp4-pack",
            "mlp.experts.3.up_proj.weight_global_scale",
            torch.zeros(1),
            "scales 3.up_proj NaN",
        ),
    ],
)
def test_tensors_that_are_not_as_config_json_says_are_refused_by_name(
    tmp_path, setting, name, tensor, words
):
    unfold(setting, tmp_path, **{f"model.layers.0.{name}": tensor})
    assert absent(words, refusal(load_checkpoint, tmp_path)) == []

"""
Quantized checkpoints that other packages made (see make_quantized_golden.py), how ranks read them, and what is refused.
"""
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import checkpoint
import formats
from checkpoint import Checkpoint
from formats import read_settings
from helpers import (F32, ROOT, absent, change_tensors, error, load_checkpoint, logits_of, make, put, quantized_layers,
                     read, refusal, rewrite, write)
from model import Config, Transformer
from quantize import INT8, MXFP4, QuantizedLinear, from_e2m1, from_e4m3, from_e8m0, say_once
from tp import Shard

FILE = ROOT / "tests" / "quantized_golden.safetensors"
with safe_open(FILE, framework="pt") as file:
    CONFIGS = {setting: json.loads(config) for setting, config in sorted(file.metadata().items())}


def unfold(setting: str, directory: Path, settings: dict = {}, **tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Writes a setting's checkpoint -> its tokens [T] and logits [T, V].

    settings: other keys of quantization_config; tensors: other tensors, None for one that is to be missing."""
    directory.mkdir(exist_ok=True)
    held, config = load_file(FILE), dict(CONFIGS[setting])
    own = {name.partition("/")[2]: tensor for name, tensor in held.items()
           if name in config["shared"] or name.startswith(setting + "/")}
    golden = own.pop("golden tokens"), own.pop("golden logits")
    config["quantization_config"] = config["quantization_config"] | settings
    put(directory / "config.json", config)
    save_file({name: tensor.contiguous() for name, tensor in (own | tensors).items() if tensor is not None},
              directory / "model.safetensors")
    return golden


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


def test_there_are_goldens_of_each_format():
    methods = [config["quantization_config"].get("quant_method") for config in CONFIGS.values()]
    assert set(methods) == set(formats.RULES)


def weight_of(module) -> Tensor:
    """[N, K] of a linear layer of any kind."""
    if isinstance(module, formats.SeparateLinears):
        return torch.cat([weight_of(part) for part in module])
    return module.dequantize(F32) if isinstance(module, QuantizedLinear) else module.weight


def load_rank(directory: Path, rank: int) -> Transformer:
    return load_checkpoint(directory, split=partial(Shard, rank=rank, ranks=2))


ALL = slice(None)


@pytest.mark.parametrize("setting", [setting for setting in CONFIGS if setting != "gptq dynamic"])
def test_ranks_hold_the_same_weights(tmp_path, lone, setting):
    """Cut inside of 128 x 128 blocks too, along N and K, and where act-order scatters a group."""
    unfold(setting, tmp_path)
    whole = load_checkpoint(tmp_path)
    H, K, E, F = (getattr(whole.config, name) for name in ("n_head", "n_kv_head", "head_dim", "ffn_dim"))
    moe = whole.config.layers[0].moe
    units, F = ("expert", moe.ffn_dim) if moe else ("ffn", F)
    for rank in (0, 1):
        shard = Shard(whole.config, formats.shared_inputs(read_settings(Checkpoint(tmp_path))), rank, 2)
        q, kv, ffn = (torch.arange(1000)[shard.shares[name]] for name in ("q", "kv", units))
        parts = {"attn.wqkv": (torch.cat([q, H * E + kv, (H + K) * E + kv]), ALL), "attn.wo": (ALL, q),
                 "ffn.w_gate_up": (torch.cat([ffn, F + ffn]), ALL), "ffn.w_down": (ALL, ffn)}
        for mine, all_of in zip(load_rank(tmp_path, rank).layers, whole.layers):
            for name, (rows, columns) in parts.items():
                want = weight_of(all_of.get_submodule(name))[..., rows, :][..., columns]
                assert weight_of(mine.get_submodule(name)).equal(want)


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_the_table_of_weights_says_what_is_quantized_and_shared_whatever_its_name(tmp_path, monkeypatch, lone, form):
    """Here "mlp.second" is, which ends in no ".weight", and the attention's output is not."""
    plain = checkpoint.hf_weights

    def table(config: Config) -> dict[str, checkpoint.Weight]:
        made = {}
        for name, weight in plain(config).items():
            if weight.ours.endswith("attn.wo.weight"):
                weight = weight._replace(quantized=False)
            made[name.replace("down_proj.weight", "second")] = weight
        return made

    for module in ("checkpoint", "formats", "guard", "helpers", "quantize", "tp"):
        monkeypatch.setattr(f"{module}.hf_weights", table)
    theirs, out, second = make(tmp_path / "in"), tmp_path / "out", "model.layers.1.mlp.second"
    made = write(tmp_path / "in", out, 4, 32, False, form=form)
    held = load_file(out / "model.safetensors")
    assert second in theirs and second not in held and any(name.startswith(second + ".") for name in held)
    models = made, load_checkpoint(out), load_rank(out, 0), load_rank(out, 1)
    assert quantized_layers(models[1]).keys() == quantized_layers(made).keys() and len(quantized_layers(made)) == 2 * 3
    for name in ("layers.0.attn.wo", "layers.1.attn.wo", "layers.0.ffn.w_down", "layers.1.ffn.w_down"):
        want, got, *parts = (weight_of(model.get_submodule(name)) for model in models)
        assert got.equal(want) and torch.cat(parts, dim=1).equal(want)


def test_groups_that_no_two_ranks_can_share_are_refused(tmp_path):
    unfold("gptq dynamic", tmp_path)
    assert "192" in refusal(load_rank, tmp_path, 0)


def test_blocks_of_fp8_may_end_early(tmp_path):
    """quant_method fp8 with 288 inputs and outputs; by the definition, as transformers 5.23 refuses partial blocks."""
    unfold("fp8 naive in blocks", tmp_path)
    held, want = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in held if name.endswith("weight_scale")]:
        held[name + "_inv"] = scale = held.pop(name)
        layer = name.removesuffix("_scale")
        N, K = held[layer].shape
        want[layer] = held[layer].float() * scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    save_file(held, tmp_path / "model.safetensors")
    rewrite(tmp_path / "config.json", quantization_config=dict(
        quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic"))
    layer = load_checkpoint(tmp_path).layers[0]
    gate, up, down = (want[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert weight_of(layer.ffn.w_gate_up).equal(torch.cat([gate, up])) and weight_of(layer.ffn.w_down).equal(down)
    assert layer.ffn.w_down.scales.shape == (64, 9)  # 288 inputs in groups of 32


@pytest.mark.parametrize("settings, shape", [
    (dict(weight_block_size=[10 ** 40, 32 * 10 ** 40]), (1, 1)), (dict(quant_method=None, method="fp8"), (1, 1)),
    ({}, ()), ({}, (1,))])
def test_fp8_blocks_as_others_write_them(tmp_path, settings, shape):
    """Larger than the matrix; the method under gptqmodel's key; the one scale of a tensor with fewer dimensions."""
    tokens, logits = unfold("fp8 blocks", tmp_path, settings)
    held = load_file(tmp_path / "model.safetensors")
    scales = {name: scale.view(shape) for name, scale in held.items() if name.endswith("weight_scale_inv")}
    change_tensors(tmp_path, **scales)
    assert len(scales) == 7 and error(logits_of(load_checkpoint(tmp_path), tokens), logits) < 1e-5


def test_scales_keep_their_files_precision(tmp_path):
    """fp32 where fp16 would round them, fp16 where it does not; e4m3 has fp32 always."""
    for setting, dtype in {"w4a16": F32, "w8a16 a channel": F32, "gptq 4 sym": torch.float16,
                           "fp8 a channel, bf16": F32}.items():
        unfold(setting, tmp_path)
        layers = quantized_layers(load_checkpoint(tmp_path))
        assert {layer.scales.dtype for layer in layers.values()} == {dtype}, setting
    unfold("w4a16 bf16", tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.o_proj.weight_scale"]
    ours = load_checkpoint(tmp_path).layers[0].attn.wo.scales
    assert (theirs.dtype, ours.dtype) == (torch.bfloat16, torch.float16) and ours.float().equal(theirs.float())


def test_e4m3_e2m1_and_e8m0_are_read_by_bits():
    """All 16 numbers of OCP's table; 2 ** -127 is no normal number."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    assert from_e4m3(codes)[numbers == numbers].equal(numbers[numbers == numbers])
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert from_e2m1(torch.arange(16, dtype=torch.uint8)).equal(torch.cat([numbers, -numbers]))
    scales = torch.arange(255, dtype=torch.uint8)
    assert from_e8m0(scales).double().equal(2.0 ** (scales.double() - 127))


def test_of_gpt_oss_the_rest_is_rounded_and_experts_stay_mxfp4(tmp_path):
    tokens, logits = unfold("mxfp4", tmp_path)
    model = load_checkpoint(tmp_path, quantize="int8", quantize_head="int8")
    kinds = {name: layer.codes for name, layer in quantized_layers(model).items()}
    experts = {f"layers.0.ffn.{name}": MXFP4 for name in ("w_gate_up", "w_down")}
    assert kinds == experts | {"layers.0.attn.wqkv": INT8, "layers.0.attn.wo": INT8, "head": INT8}
    for name in experts:
        layer = model.get_submodule(name)
        bits = 8 * (layer.qweight.nbytes + layer.scales.nbytes) / (4 * layer.out_features * layer.in_features)
        assert bits == 4.25
    found = logits_of(model, tokens)
    assert 1e-5 < error(found, logits) < 0.05
    formats.unpack_quantized(model, quiet=True)
    assert not quantized_layers(model) and error(logits_of(model, tokens), found) < 1e-6


@pytest.mark.parametrize("setting, name, change, words", [
    ("mxfp4", "down_proj_scales", lambda t: t + 255 - t, "scales down_proj NaN"),
    ("mxfp4", "gate_up_proj_blocks", lambda t: t[:, 2:], "gate_up_proj_blocks [4, 190, 3, 16] want [4, 192, 3, 16]"),
    ("mxfp4", "gate_up_proj_scales", lambda t: t.short(), "I16 want U8"),
    ("mxfp4", "down_proj_bias", lambda t: None, "down_proj_bias is missing"),
    ("mxfp4-pack", "3.up_proj.weight_scale", lambda t: t[:, 1:], "weight_scale [96, 1] want [96, 2]"),
    ("nvfp4-pack", "3.up_proj.weight_global_scale", lambda t: 0 * t, "scales up_proj NaN"),
    ("w4a16 of experts", "3.up_proj.weight_packed", lambda t: None, "3.up_proj.weight_packed is missing"),
    ("w4a16 of experts", "4.up_proj.weight_packed", lambda t: torch.zeros(1), "no place 4.up_proj.weight_packed")])
def test_experts_that_do_not_fit_are_refused(tmp_path, setting, name, change, words):
    unfold(setting, tmp_path)
    name = f"model.layers.0.mlp.experts.{name}"
    changed = change(load_file(tmp_path / "model.safetensors").get(name))
    change_tensors(tmp_path, **{name: changed})
    assert absent(words, refusal(load_checkpoint, tmp_path)) == []


def test_what_the_file_asks_of_activations_is_told_once(tmp_path, capsys):
    for setting, told in {"fp8 a tensor, static, cache": 1, "w8a8": 1, "fp8 blocks": 1, "w4a16": 0}.items():
        say_once.cache_clear()
        unfold(setting, tmp_path)
        load_checkpoint(tmp_path)
        load_checkpoint(tmp_path)
        assert capsys.readouterr().err.count("more exact") == told, setting
    for setting, scale in {"w4a16": "k_scale", "nvfp4-pack dense": "q_proj.input_global_scale"}.items():
        say_once.cache_clear()
        unfold(setting, tmp_path, **{f"model.layers.0.self_attn.{scale}": torch.ones(1)})  # config.json says nothing
        load_checkpoint(tmp_path)
        assert "more exact" in capsys.readouterr().err


@pytest.mark.parametrize("setting, name", [("awq", "int4"), ("fp8 blocks", "fp8"), ("several groups", "int8")])
def test_the_name_of_what_was_read(tmp_path, setting, name):
    unfold(setting, tmp_path)
    assert read_settings(Checkpoint(tmp_path))["name"] == name


def test_a_layer_that_no_target_names_is_as_it_was(tmp_path):
    groups = CONFIGS["w4a16"]["quantization_config"]["config_groups"]["group_0"] | dict(targets=["re:.*q_proj$"])
    unfold("w4a16", tmp_path, dict(config_groups=dict(some=groups)))
    assert absent("k_proj.weight missing", refusal(load_checkpoint, tmp_path)) == []


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_rows_that_leave_a_word_of_zero_points_unfilled_are_refused(tmp_path, method):
    """Four rows of keys: files of both formats round their words down."""
    tensors = make(tmp_path, hidden_size=32, num_key_value_heads=1, head_dim=4, intermediate_size=32)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer, N = name.removesuffix("weight"), len(tensors.pop(name))
        shape = (4, N) if method == "gptq" else (32, N // 8)
        tensors |= {layer + "qweight": torch.zeros(shape).int(), layer + "scales": torch.ones(1, N),
                    layer + "qzeros": torch.zeros(1, N // 8).int()}
    save_file(tensors, tmp_path / "model.safetensors")
    rewrite(tmp_path / "config.json", quantization_config=dict(quant_method=method, bits=4, group_size=32))
    assert absent("k_proj 4 rows multiple of 8", refusal(load_checkpoint, tmp_path)) == []


def weights(**of) -> dict:
    """config_groups of one group, as the golden "w4a16" has it, but for these."""
    group = CONFIGS["w4a16"]["quantization_config"]["config_groups"]["group_0"]
    return dict(group_0=group | dict(format=of.pop("form", None), weights=group["weights"] | of))


@pytest.mark.parametrize("setting, key, value, words", [
    ("w4a16", "quant_method", "bitsandbytes", "bitsandbytes gptq compressed-tensors fp8"),
    ("w4a16", "quant_method", "hqq", "HQQ compressed-tensors"),
    ("w4a16", "sparsity_config", dict(format="sparse-24-bitmask"), "2:4 sparse"),
    ("w4a16", "transform_config", dict(config_groups=dict(u=1)), "transform_config"),
    ("w4a16", "config_groups", weights(form="mxfp8-quantized"), "MXFP8 pack-quantized"),
    ("mxfp4-pack", "config_groups", weights(form="mxfp4-pack-quantized", type="float", group_size=16),
     "group_size 16 32"),
    ("w4a16", "config_groups", weights(form="marlin-24"), "2:4 sparse"),
    ("w4a16", "config_groups", weights(num_bits=3), "num_bits 3 [4, 8]"),
    ("w4a16", "config_groups", weights(type="float"), "type float"),
    ("w4a16", "config_groups", weights(strategy="tensor_group"), "tensor_group"),
    ("w4a16", "config_groups", weights(group_size=48), "group_size 48 32"),
    ("w4a16", "config_groups", weights(dynamic=True), "dynamic True"),
    ("w4a16", "config_groups", weights(group_size=64), "scale [64, 2] [64, 1]"),
    ("w4a16", "config_groups", [], "config.json"),
    ("w4a16", "config_groups", dict(all=dict(targets=["Linear"], weights=0)), "config.json"),
    ("w4a16", "ignore", ["re:("], "config.json quantization_config unterminated"),
    ("gptq 4 sym", "dynamic", {"-:" + ".?" * 40 + "!": {}}, "config.json patterns 3 s"),
    ("gptq 4 sym", "dynamic", {"(" * 10 ** 5: {}}, "config.json patterns"),
    ("gptq 4 sym", "dynamic", {"+:.*": dict(bits=3)}, "bits 3"),
    ("gptq 4 sym", "checkpoint_format", "marlin", "checkpoint_format marlin gptq_v2"),
    ("gptq 4 sym", "group_size", 2 ** 20 + 32, "group_size 1048608"),
    ("awq gemm", "config_groups", dict(a=1), "int"), ("awq gemm", "version", "gemv", "version gemv gemm"),
    ("awq gemm", "bits", 8, "bits 8 [4]"), ("fp8 blocks", "fmt", "e5m2", "fmt e5m2"),
    ("fp8 blocks", "weight_block_size", [128], "weight_block_size [128] [rows, inputs]"),
    ("fp8 blocks", "weight_block_size", 128, "weight_block_size 128 [rows, inputs]"),
    ("fp8 blocks", "weight_block_size", [128, 48], "weight_block_size 48 32"),
    ("fp8 naive in blocks", "config_groups", weights(form="naive-quantized", num_bits=8, type="float",
                                                     strategy="block"), "block_structure None [rows, inputs]")])
def test_settings_that_are_not_read_are_refused_by_name(tmp_path, setting, key, value, words):
    unfold(setting, tmp_path, {key: value})
    assert absent(words, refusal(load_checkpoint, tmp_path)) == []


def test_what_a_format_is_called_comes_of_its_quant_algo_too(tmp_path):
    unfold("w4a16", tmp_path, dict(quant_method="modelopt", quant_algo="NVFP4"))
    assert absent("modelopt NVFP4", refusal(load_checkpoint, tmp_path)) == []


NAN = float("nan")


@pytest.mark.parametrize("setting, name, tensor, words", [
    ("w4a16", "weight_scale", None, "missing"), ("w4a16", "weight_packed", None, "missing"),
    ("w4a16", "weight_shape", torch.tensor([64, 32]), "[64, 32] [64, 64]"),
    ("w4a16", "weight_scale", torch.ones(64, 2).int(), "I32 F32"),
    ("w4a16", "weight_scale", torch.full((64, 2), NAN), "NaN infinite"),
    ("fp8 a channel", "weight_scale", torch.full((64, 1), float("inf")), "NaN infinite"),
    ("gptq 4 sym", "scales", torch.full((2, 64), NAN), "NaN"),
    ("w4a16 asymmetric", "weight_zero_point", None, "missing"),
    ("w4a16 asymmetric", "weight_zero_point", torch.ones(8, 3).int(), "[8, 3] [8, 2]"),
    ("w4a16 act-order", "weight_g_idx", None, "missing"),
    ("w4a16 act-order", "weight_g_idx", torch.zeros(64).int(), "2 32"),
    ("w8a8", "weight", torch.zeros(64, 64), "F32 I8"), ("fp8 blocks", "weight_scale_inv", None, "missing"),
    ("fp8 blocks", "weight_scale_inv", torch.ones(10 ** 6), "[1000000] [1, 1]"),
    ("fp8 blocks", "weight", torch.full((128, 128), NAN).to(torch.float8_e4m3fn), "NaN"),
    ("fp8 blocks", "weight", torch.ones(128, 128).to(torch.float8_e5m2), "F8_E5M2 F8_E4M3"),
    ("fp8 blocks", "extra", torch.ones(1), "place")])
def test_tensors_that_are_not_as_config_json_says_are_refused_by_name(tmp_path, setting, name, tensor, words):
    name = f"model.layers.0.self_attn.q_proj.{name}"
    unfold(setting, tmp_path, **{name: tensor})
    assert absent(f"{name} {words}", refusal(load_checkpoint, tmp_path)) == []


def test_codes_of_more_bits_than_config_json_says_are_refused(tmp_path):
    groups = weights(form="int-quantized", strategy="channel", group_size=None)
    codes = {"model.layers.0.self_attn.q_proj.weight": torch.full((64, 64), 9).to(torch.int8)}
    unfold("w8a8", tmp_path, dict(config_groups=groups), **codes)
    assert absent("weight more than 4 bits", refusal(load_checkpoint, tmp_path)) == []

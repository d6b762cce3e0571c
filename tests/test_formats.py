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
from helpers import F32, ROOT, absent, error, load_checkpoint, make, quantized_layers, refusal, write
from model import Config
from quantize import QuantizedLinear, from_e4m3, say_once
from tp import Shard

FILE = ROOT / "tests" / "quantized_golden.safetensors"
with safe_open(FILE, framework="pt") as file:
    CONFIGS = {setting: json.loads(config) for setting, config in file.metadata().items()}


def unfold(setting: str, directory: Path, settings: dict = {}, **tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Writes a setting's checkpoint -> its tokens [T] and logits [T, V].

    settings: other keys of quantization_config; tensors: other tensors, None for one that is to be missing."""
    directory.mkdir(exist_ok=True)
    held, config = load_file(FILE), dict(CONFIGS[setting])
    own = {name.partition("/")[2]: tensor for name, tensor in held.items()
           if name in config["shared"] or name.startswith(setting + "/")}
    golden = own.pop("golden tokens"), own.pop("golden logits")
    config["quantization_config"] = config["quantization_config"] | settings
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in (own | tensors).items() if tensor is not None},
              directory / "model.safetensors")
    return golden


def configure(directory: Path, settings: dict) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=settings)))


@torch.no_grad()
def logits_of(model, tokens: Tensor) -> Tensor:
    model.setup(64, 1)
    return model(tokens[None], torch.arange(len(tokens))[None])[0]


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
        assert error(fast.optimize(model).decoder(tokens[None], torch.arange(len(tokens))[None])[0], logits) < 1e-5


def test_there_are_goldens_of_each_format():
    methods = [config["quantization_config"].get("quant_method") for config in CONFIGS.values()]
    assert set(methods) == set(formats.RULES)


def weight_of(module) -> Tensor:
    """[N, K] of a linear layer of any kind."""
    if isinstance(module, formats.SeparateLinears):
        return torch.cat([weight_of(part) for part in module])
    return module.dequantize(F32) if isinstance(module, QuantizedLinear) else module.weight


@pytest.mark.parametrize("setting", [setting for setting in CONFIGS if setting != "gptq dynamic"])
def test_ranks_hold_the_same_weights(tmp_path, lone, setting):
    """Cut inside of 128 x 128 blocks too, along N and K, and where act-order scatters a group."""
    unfold(setting, tmp_path)
    whole = load_checkpoint(tmp_path)
    H, K, E, F = (getattr(whole.config, name) for name in ("n_head", "n_kv_head", "head_dim", "ffn_dim"))
    for rank in (0, 1):
        shard = Shard(whole.config, formats.shared_inputs(read_settings(Checkpoint(tmp_path))), rank, 2)
        part = load_checkpoint(tmp_path, split=partial(Shard, rank=rank, ranks=2))
        q, kv, ffn = (torch.arange(shard.shares[name].start, shard.shares[name].stop) for name in ("q", "kv", "ffn"))
        for mine, all_of in zip(part.layers, whole.layers):
            rows = torch.cat([q, H * E + kv, (H + K) * E + kv])
            assert weight_of(mine.attn.wqkv).equal(weight_of(all_of.attn.wqkv)[rows])
            assert weight_of(mine.attn.wo).equal(weight_of(all_of.attn.wo)[:, q])
            assert weight_of(mine.ffn.w_gate_up).equal(weight_of(all_of.ffn.w_gate_up)[torch.cat([ffn, F + ffn])])
            assert weight_of(mine.ffn.w_down).equal(weight_of(all_of.ffn.w_down)[:, ffn])


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
    theirs = make(tmp_path / "in")
    made = write(tmp_path / "in", tmp_path / "out", 4, 32, False, form=form)
    held = load_file(tmp_path / "out" / "model.safetensors")
    whole, *ranks = (load_checkpoint(tmp_path / "out", split=split)
                     for split in (None, *(partial(Shard, rank=rank, ranks=2) for rank in (0, 1))))
    second = "model.layers.1.mlp.second"
    assert second in theirs and second not in held and any(name.startswith(second + ".") for name in held)
    assert quantized_layers(whole).keys() == quantized_layers(made).keys() and len(quantized_layers(made)) == 2 * 3
    for layer, of_both, *of_each in zip(made.layers, whole.layers, *(rank.layers for rank in ranks)):
        for half, name in (("attn", "wo"), ("ffn", "w_down")):
            want, got, *parts = (weight_of(getattr(getattr(one, half), name)) for one in (layer, of_both, *of_each))
            assert got.equal(want) and torch.cat(parts, dim=1).equal(want)


def test_groups_that_no_two_ranks_can_share_are_refused(tmp_path):
    unfold("gptq dynamic", tmp_path)
    assert "192" in refusal(partial(load_checkpoint, split=partial(Shard, rank=0, ranks=2)), tmp_path)


def test_blocks_of_fp8_may_end_early(tmp_path):
    """quant_method fp8 with 288 inputs and outputs; by the definition, as transformers 5.23 refuses partial blocks."""
    unfold("fp8 naive in blocks", tmp_path)
    held, want = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in held if name.endswith("weight_scale")]:
        held[name + "_inv"] = scale = held.pop(name)
        codes = held[layer := name.removesuffix("_scale")].float()
        want[layer] = torch.stack([torch.stack([w * scale[n // 128, k // 128] for k, w in enumerate(row)])
                                   for n, row in enumerate(codes)])
    save_file(held, tmp_path / "model.safetensors")
    configure(tmp_path, dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic"))
    layer = load_checkpoint(tmp_path).layers[0]
    assert weight_of(layer.ffn.w_down).equal(want["model.layers.0.mlp.down_proj.weight"])
    gate_up = torch.cat([want[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert weight_of(layer.ffn.w_gate_up).equal(gate_up)
    assert layer.ffn.w_down.scales.shape == (64, 9)  # 288 inputs in groups of 32


@pytest.mark.parametrize("settings, shape", [
    (dict(weight_block_size=[10 ** 40, 32 * 10 ** 40]), (1, 1)), (dict(quant_method=None, method="fp8"), (1, 1)),
    ({}, ()), ({}, (1,))])
def test_fp8_blocks_as_others_write_them(tmp_path, settings, shape):
    """Larger than the matrix; the method under gptqmodel's key; the one scale of a tensor with fewer dimensions."""
    unfold("fp8 blocks", tmp_path)
    scales = {name: tensor.view(shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()
              if name.endswith("weight_scale_inv")}
    tokens, logits = unfold("fp8 blocks", tmp_path, settings, **scales)
    assert len(scales) == 7 and error(logits_of(load_checkpoint(tmp_path), tokens), logits) < 1e-5


def test_scales_keep_their_files_precision(tmp_path):
    """fp32 where fp16 would round them, fp16 where it does not; e4m3 has fp32 always."""
    for setting, dtype in {"w4a16": F32, "w8a16 a channel": F32, "gptq 4 sym": torch.float16,
                           "fp8 a channel, bf16": F32}.items():
        unfold(setting, tmp_path)
        layers = quantized_layers(load_checkpoint(tmp_path))
        assert {layer.scales.dtype for layer in layers.values()} == {dtype}, setting
    unfold("w4a16 bf16", tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    wo = load_checkpoint(tmp_path).layers[0].attn.wo
    assert held["model.layers.0.self_attn.o_proj.weight_scale"].dtype == torch.bfloat16
    assert wo.scales.dtype == torch.float16
    assert wo.scales.float().equal(held["model.layers.0.self_attn.o_proj.weight_scale"].float())


def test_e4m3_is_read_by_bits():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    assert from_e4m3(codes)[numbers == numbers].equal(numbers[numbers == numbers])


def test_what_the_file_asks_of_activations_is_told_once(tmp_path, capsys):
    for setting, told in {"fp8 a tensor, static, cache": 1, "w8a8": 1, "fp8 blocks": 1, "w4a16": 0}.items():
        say_once.cache_clear()
        unfold(setting, tmp_path)
        load_checkpoint(tmp_path)
        load_checkpoint(tmp_path)
        assert capsys.readouterr().err.count("more exact") == told, setting
    unfold("w4a16", tmp_path, **{"model.layers.0.self_attn.k_scale": torch.ones(1)})  # and config.json says nothing
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
    tensors, weights = {}, make(tmp_path, hidden_size=32, num_key_value_heads=1, head_dim=4, intermediate_size=32)
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        (N, K), layer = weight.shape, name.removesuffix("weight")
        shape = (K // 8, N) if method == "gptq" else (K, N // 8)
        tensors |= {layer + "qweight": torch.zeros(shape, dtype=torch.int32), layer + "scales": torch.ones(1, N),
                    layer + "qzeros": torch.zeros(1, N // 8, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    configure(tmp_path, dict(quant_method=method, bits=4, group_size=32))
    assert absent("k_proj 4 rows multiple of 8", refusal(load_checkpoint, tmp_path)) == []


Q = "model.layers.0.self_attn.q_proj."


def weights(form: str = "pack-quantized", **of) -> dict:
    """config_groups of one group, as the golden "w4a16" has it, but for these."""
    group = CONFIGS["w4a16"]["quantization_config"]["config_groups"]["group_0"]
    return dict(config_groups=dict(group_0=group | dict(format=form, weights=group["weights"] | of)))


@pytest.mark.parametrize("setting, settings, tensors, words", [
    ("w4a16", dict(quant_method="bitsandbytes", load_in_4bit=True), {}, "bitsandbytes gptq compressed-tensors fp8"),
    ("w4a16", dict(quant_method="hqq"), {}, "HQQ compressed-tensors"),
    ("w4a16", dict(quant_method="modelopt", quant_algo="NVFP4"), {}, "modelopt NVFP4"),
    *(("w4a16", dict(format=form, config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(num_bits=4)))), {},
       words) for form, words in [("mxfp4-pack-quantized", "MXFP4 pack-quantized"), ("marlin-24", "2:4 sparse"),
                                  ("dense", "dense")]),
    ("w4a16", dict(sparsity_config=dict(format="sparse-24-bitmask")), {}, "2:4 sparse"),
    ("w4a16", dict(transform_config=dict(config_groups=dict(u=1))), {}, "transform_config"),
    ("w4a16", weights(num_bits=3), {}, "num_bits 3 [4, 8]"),
    ("w4a16", weights(type="float"), {}, "type float"), ("w4a16", weights(strategy="tensor_group"), {}, "tensor_group"),
    ("w4a16", weights(group_size=48), {}, "group_size 48 32"), ("w4a16", weights(dynamic=True), {}, "dynamic True"),
    ("w4a16", weights(group_size=64), {}, "scale [64, 2] [64, 1]"),
    ("w4a16", dict(config_groups=[]), {}, "config.json"),
    ("w4a16", dict(config_groups=dict(all=dict(targets=["Linear"], weights=0))), {}, "config.json"),
    ("w4a16", dict(ignore=["re:("]), {}, "config.json quantization_config unterminated"),
    ("gptq 4 sym", dict(dynamic={"-:" + ".?" * 40 + "!": {}}), {}, "config.json patterns 3 s"),
    ("gptq 4 sym", dict(dynamic={"(" * 10 ** 5: {}}), {}, "config.json patterns"),
    ("gptq 4 sym", dict(dynamic={"+:.*": dict(bits=3)}), {}, "bits 3"),
    ("gptq 4 sym", dict(checkpoint_format="marlin"), {}, "checkpoint_format marlin gptq_v2"),
    ("gptq 4 sym", dict(group_size=2 ** 20 + 32), {}, "group_size 1048608"),
    ("gptq 4 sym", dict(config_groups=[1]), {}, "config.json"), ("awq gemm", dict(config_groups=dict(a=1)), {}, "int"),
    ("awq gemm", dict(version="gemv"), {}, "version gemv gemm"), ("awq gemm", dict(bits=8), {}, "bits 8 [4]"),
    ("fp8 blocks", dict(weight_block_size=[128]), {}, "weight_block_size [128] [rows, inputs]"),
    ("fp8 blocks", dict(weight_block_size=128), {}, "weight_block_size 128 [rows, inputs]"),
    ("fp8 naive in blocks", weights("naive-quantized", num_bits=8, type="float", strategy="block"), {},
     "block_structure None [rows, inputs]"),
    ("fp8 blocks", dict(weight_block_size=[128, 48]), {}, "weight_block_size 48 32"),
    ("fp8 blocks", dict(fmt="e5m2"), {}, "fmt e5m2"),
    ("w4a16", {}, {Q + "weight_scale": None}, Q + "weight_scale missing"),
    ("w4a16", {}, {Q + "weight_packed": None}, Q + "weight_packed missing"),
    ("w4a16", {}, {Q + "weight_shape": torch.tensor([64, 32])}, Q + "weight_shape [64, 32] [64, 64]"),
    ("w4a16", {}, {Q + "weight_scale": torch.ones(64, 2).int()}, Q + "weight_scale I32 F32"),
    *((setting, {}, {Q + "weight_scale": torch.full(shape, float(bad))}, Q + "weight_scale NaN infinite")
      for setting, shape, bad in [("w4a16", (64, 2), "nan"), ("fp8 a channel", (64, 1), "inf"),
                                  ("w8a8", (64, 1), "nan")]),
    ("gptq 4 sym", {}, {Q + "scales": torch.full((2, 64), float("nan"))}, Q + "scales NaN"),
    ("w4a16 asymmetric", {}, {Q + "weight_zero_point": None}, Q + "weight_zero_point missing"),
    ("w4a16 asymmetric", {}, {Q + "weight_zero_point": torch.ones(8, 3).int()}, Q + "weight_zero_point [8, 3] [8, 2]"),
    ("w4a16 act-order", {}, {Q + "weight_g_idx": None}, Q + "weight_g_idx missing"),
    ("w4a16 act-order", {}, {Q + "weight_g_idx": torch.zeros(64).int()}, Q + "weight_g_idx 2 32"),
    ("w8a8", {}, {Q + "weight": torch.zeros(64, 64)}, Q + "weight F32 I8"),
    ("w8a8", weights("int-quantized", strategy="channel", group_size=None),
     {Q + "weight": torch.full((64, 64), 9).to(torch.int8)}, "weight more than 4 bits"),
    ("fp8 blocks", {}, {Q + "weight_scale_inv": None}, Q + "weight_scale_inv missing"),
    ("fp8 blocks", {}, {Q + "weight_scale_inv": torch.ones(10 ** 6)}, Q + "weight_scale_inv [1000000] [1, 1]"),
    ("fp8 blocks", {}, {Q + "weight": torch.full((128, 128), float("nan")).to(torch.float8_e4m3fn)}, Q + "weight NaN"),
    ("fp8 blocks", {}, {Q + "weight": torch.ones(128, 128).to(torch.float8_e5m2)}, Q + "weight F8_E5M2 F8_E4M3"),
    ("fp8 blocks", {}, {Q + "extra": torch.ones(1)}, Q + "extra place")])
def test_what_is_not_read_is_refused_by_name(tmp_path, setting, settings, tensors, words):
    unfold(setting, tmp_path, settings, **tensors)
    assert absent(words, refusal(load_checkpoint, tmp_path)) == []

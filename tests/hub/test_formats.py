"""
Quantized checkpoints that other packages made (see make_quantized_golden.py), how ranks read them,
and what is refused.
"""

import copy
import functools
import json
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hub import formats
from hub.checkpoint import Checkpoint, hf_weights, part_of, take
from hub.formats import read_settings
from helpers import (
    CPU,
    F32,
    RECURRENT,
    RECURRENT_MOE,
    absent,
    awq,
    change,
    change_tensors,
    error,
    load_checkpoint,
    logits_of,
    make,
    put,
    quantized_layers,
    read,
    read_json,
    refusal,
    rewrite,
    write,
)
from model import Transformer
from quantized_golden import CONFIGS, unfold
from quantize import (
    INT8,
    MXFP4,
    QuantizedExperts,
    QuantizedLinear,
    from_e2m1,
    from_e4m3,
    from_e8m0,
    say_once,
)
from tp import Shard


@pytest.mark.parametrize("setting", CONFIGS)
def test_what_other_packages_packed_gives_their_logits(tmp_path, setting):
    """To 1e-5, and the same greedy tokens; also with what fast/ makes of the layers on a CPU."""
    import fast

    tokens, logits = unfold(setting, tmp_path)
    model = load_checkpoint(tmp_path)
    assert quantized_layers(model)
    check_bits(tmp_path, model)
    got = logits_of(model, tokens)
    assert error(got, logits) < 1e-5
    assert got.argmax(-1)[8:-1].equal(tokens[9:])
    with torch.no_grad():
        assert error(read(fast.optimize(model).decoder, tokens[None])[0], logits) < 1e-5


def check_bits(directory: Path, model: Transformer) -> None:
    """Memory is counted by the bits that the model's weights have, of so many weights."""
    counted, held = Counter(), Counter()
    for name, bits in formats.bits_of(checkpoint := Checkpoint(directory)).items():
        counted[bits] += math.prod(checkpoint.weights[name].shape)
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            held[module.codes.bits] += module.qweight.numel() * 32 // module.codes.bits
    assert counted == held


def weight_of(module) -> Tensor:
    """[N, K] of a linear layer of any kind."""
    if isinstance(module, formats.SeparateLinears):
        return torch.cat([weight_of(part) for part in module])
    return module.dequantize(F32) if isinstance(module, QuantizedLinear) else module.weight


def matrices(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face's, which may be quantized: [N, K, 1], or all experts' [X, K, N]."""
    found = {}
    for name, weight in hf_weights(model.config).items():
        if weight.quantized or formats.is_left_out(weight):
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


MIXER = "in_proj_qkv", "in_proj_z", "out_proj"  # matrices of a recurrent layer that may have codes


@torch.no_grad()
@pytest.mark.parametrize("names", [MIXER, ("in_proj_z",)], ids=["all", "z"])
@pytest.mark.parametrize("form", ["gptq", "gptq dynamic", "awq", "compressed-tensors"])
def test_recurrent_layers_that_were_left_out_are_plain(tmp_path, lone, form, names):
    """All of a layer or z alone, which our layer holds with q, k and v: by `dynamic` or `ignore`, or
    by the tensors alone. Two ranks hold the same."""
    out = tmp_path / "out"
    make(tmp_path / "in", "qwen3_5_moe_text", **RECURRENT_MOE)
    write(tmp_path / "in", out, 4, 32, False, form=form.split()[0] if form != "awq" else "gptq")
    if form == "awq":
        change(out, dict(quant_method="awq", version="gemm"), **awq(out / "model.safetensors"))
    whole = load_checkpoint(out)
    left = [f"model.layers.0.linear_attn.{name}" for name in names]
    held, weights = load_file(out / "model.safetensors"), matrices(whole)
    tensors = {name: None for name in held if name.rpartition(".")[0] in left}
    tensors |= {f"{name}.weight": weights[f"{name}.weight"][:, :, 0] for name in left}
    settings = read_json(out / "config.json")["quantization_config"]
    rule = rf"model\.layers\.0\.linear_attn\.({'|'.join(names)})$"
    if form == "gptq dynamic":
        settings = dict(dynamic={f"-:{rule}": {}})
    if form == "compressed-tensors":
        settings = dict(ignore=[*settings["ignore"], f"re:{rule}"])
    change(out, settings, **tensors)
    model = load_checkpoint(out)
    assert error(logits_of(model), logits_of(whole)) < 1e-5
    mixer, kind = model.layers[0].attn, torch.nn.Linear
    if names == MIXER:
        assert type(mixer.w_in) is type(mixer.wo) is kind
    else:
        assert [type(part) for part in mixer.w_in] == [QuantizedLinear, kind]
        assert type(mixer.wo) is QuantizedLinear
    assert type(model.layers[1].attn.wqkv) is QuantizedLinear
    check_bits(out, model)
    compare_ranks(out)


# Of recurrent models that others packed: whether the file has codes of w_in, wo, b and a, and the
# experts. None: of q, k and v, and not of z.
HELD = {
    "w4a16, mixers left out": (False, False, False, False),
    "w4a16 of gates": (True, True, True, False),
    "fp8 a channel of qkv": (None, True, False, False),
    "nvfp4-pack, mixers left out": (False, False, False, True),
    "w4a16, experts in one tensor": (True, True, True, False),
    "fp8 blocks of mixers": (True, True, False, True),
    "w4a16 by key head": (True, True, False, True),
    "fp8 blocks by key head": (True, True, True, True),
}


@pytest.mark.parametrize("setting", HELD)
def test_of_a_recurrent_model_what_has_codes_in_the_file_has_them_here(tmp_path, setting):
    """But for b and a: some recipes quantize them, and they are made plain."""
    unfold(setting, tmp_path)
    w_in, wo, gates, experts = HELD[setting]
    stored = [name.rpartition(".")[0] for name in load_file(tmp_path / "model.safetensors")]
    assert any(stored.count(name) > 1 for name in stored if "in_proj_b" in name) == gates
    model = load_checkpoint(tmp_path)
    check_bits(tmp_path, model)
    layer = model.layers[0]
    if w_in is None:
        assert [type(part) for part in layer.attn.w_in] == [QuantizedLinear, torch.nn.Linear]
    else:
        assert isinstance(layer.attn.w_in, QuantizedLinear) == w_in
    assert isinstance(layer.attn.wo, QuantizedLinear) == wo
    assert type(layer.attn.w_gates) is torch.nn.Linear
    if layer.config.moe:
        assert isinstance(layer.ffn.w_down, QuantizedExperts) == experts
        assert type(layer.ffn.shared_gate) is type(layer.ffn.router) is torch.nn.Linear


def see(
    directory: Path,
    begin: str,
    quantization: dict,
    kinds: tuple[str, str, str] = ("mistral3", "mistral", "pixtral"),
) -> None:
    """Makes of a checkpoint the text part of one that also sees: Mistral 3, whose files call a
    layer language_model.model.layers.X or, newer ones, model.language_model.layers.X. kinds: the
    model_type of the whole, of the text part and of the part that sees."""
    config = read_json(directory / "config.json")
    text = config | dict(model_type=kinds[1])
    del text["quantization_config"]
    vision = dict(model_type=kinds[2], hidden_size=32)
    both = dict(model_type=kinds[0], text_config=text, vision_config=vision)
    put(directory / "config.json", both | dict(quantization_config=quantization))
    head = "language_model.lm_head" if begin == "language_model.model." else "lm_head"
    tensors = load_file(directory / "model.safetensors")
    names = {name: name.replace("model.", begin, 1).replace("lm_head", head) for name in tensors}
    save_file({names[name]: t for name, t in tensors.items()}, directory / "model.safetensors")


# In the manner of files of both ages.
BEGINNINGS = "model.language_model.", "language_model.model."
# Rules for MODULE, and whether compressed-tensors 0.20 matches them with the name that
# transformers 5.24 has of it, model.language_model.layers.1.mlp.down_proj. The last ones match what
# older files have.
MODULE = "model.layers.1.mlp.down_proj"
RULES = {
    "model.language_model.layers.1.mlp.down_proj": True,
    r"re:model\.language_model\.layers\.1\.mlp\.down.*": True,
    r"re:.*language_model.*\.1\.mlp\.down_proj$": True,
    r"re:model\.layers\..*": False,
    r"re:^(?!.*(language_model|lm_head)).*": False,
    "language_model.model.layers.1.mlp.down_proj": None,
    r"re:language_model\.model\.layers\.1\.mlp\.down.*": None,
}


@torch.no_grad()
@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_a_model_that_also_sees_are_for_its_modules_names(tmp_path, rule, begin):
    """In `ignore`, where the file has MODULE's weight where it should be left as it was, and in
    `targets`."""
    tokens, logits = unfold("several groups", tmp_path)
    matches = RULES[rule] if RULES[rule] is not None else begin == BEGINNINGS[1]
    dense = matrices(load_checkpoint(tmp_path))[f"{MODULE}.weight"][:, :, 0]
    settings = json.dumps(read_json(tmp_path / "config.json")["quantization_config"])
    settings = json.loads(settings.replace('"model.layers', '"model.language_model.layers'))
    ignored = settings | dict(ignore=[*settings["ignore"], rule])
    eight, four, _ = settings["config_groups"].values()
    groups = {"0": eight | dict(targets=[rule]), "1": four | dict(targets=["Linear"])}
    if matches:
        parts = {f"{MODULE}.{part}": None for part in ("weight_packed", "weight_scale")}
        parts |= {f"{MODULE}.weight_shape": None, f"{MODULE}.weight_zero_point": None}
        change_tensors(tmp_path, **parts, **{f"{MODULE}.weight": dense})
    see(tmp_path, begin, ignored)
    model = load_checkpoint(tmp_path)
    held = model.get_submodule("layers.1.ffn.w_down")
    assert isinstance(held, QuantizedLinear) != matches
    assert error(logits_of(model, tokens), logits) < 1e-5
    rewrite(tmp_path / "config.json", quantization_config=settings | dict(config_groups=groups))
    checkpoint = Checkpoint(tmp_path)
    reader = formats.QuantizedReader(checkpoint, read_settings(checkpoint), CPU, F32)
    reader.files, reader.table = checkpoint.files(), checkpoint.weights
    assert reader.find_schemes()[f"{MODULE}.weight"].codes.bits == (8 if matches else 4)


@torch.no_grad()
@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("other", BEGINNINGS)
def test_other_formats_lists_of_a_model_that_also_sees(tmp_path, begin, other):
    """fp8's list may have the other names, as in transformers 5.24; gptqmodel's patterns have the
    file's or transformers'."""
    tokens, logits = unfold("fp8 modules_to_not_convert", tmp_path / "fp8")
    settings = read_json(tmp_path / "fp8" / "config.json")["quantization_config"]
    left = [name.replace("model.", other, 1) for name in settings["modules_to_not_convert"]]
    see(tmp_path / "fp8", begin, settings | dict(modules_to_not_convert=left))
    assert error(logits_of(load_checkpoint(tmp_path / "fp8"), tokens), logits) < 1e-5
    tokens, logits = unfold("gptq dynamic", tmp_path / "gptq")
    settings = read_json(tmp_path / "gptq" / "config.json")["quantization_config"]
    newer = re.escape(BEGINNINGS[0])
    dynamic = {
        key.replace("model\\.", newer).replace(".*\\.1\\.", f"{newer}layers\\.1\\."): value
        for key, value in settings["dynamic"].items()
    }
    assert all("language_model" in key for key in dynamic if "down" not in key)
    see(tmp_path / "gptq", begin, settings | dict(dynamic=dynamic))
    assert error(logits_of(load_checkpoint(tmp_path / "gptq"), tokens), logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_lists_of_a_recurrent_model_that_also_sees(tmp_path, kind):
    """As Qwen3.5 is published, with the file's names in fp8's list; another part that drafts."""
    setting = "fp8 blocks of mixers" if kind == "qwen3_5_moe" else "w4a16, mixers left out"
    tokens, logits = unfold(setting, tmp_path)
    settings = json.dumps(read_json(tmp_path / "config.json")["quantization_config"])
    settings = json.loads(settings.replace('"model.layers', '"model.language_model.layers'))
    change_tensors(tmp_path, **{"mtp.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 2)})
    see(tmp_path, BEGINNINGS[0], settings, (kind, f"{kind}_text", kind))
    assert error(logits_of(load_checkpoint(tmp_path), tokens), logits) < 1e-5


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


def test_weights_are_unpacked_where_caches_have_room_beside_them(tmp_path, monkeypatch, capsys):
    """Of 1,000 rows a recurrent layer's states, two of 6 matrices [16, 32] a row, are 25 MB."""
    make(tmp_path, "qwen3_5_text", **RECURRENT)
    monkeypatch.setattr("hub.formats.free_memory", lambda *_: 20e6)
    for rows, told in ((10, "once, to 0 MB"), (1000, "at every step")):
        model = load_checkpoint(tmp_path, quantize="int8")
        formats.unpack_quantized(model, rows, length=1)
        assert told in capsys.readouterr().err
        assert bool(quantized_layers(model)) == (rows == 1000)


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


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("groups", [{}, None])
def test_where_the_cache_alone_has_a_scheme_the_model_is_the_plain_one(
    tmp_path, capsys, groups, quantize
):
    """As transformers 5.24 reads it, with a warning."""
    say_once.cache_clear()
    make(tmp_path)
    want = load_checkpoint(tmp_path, quantize=quantize).state_dict()
    scales = {f"model.layers.1.self_attn.{of}_scale": torch.tensor([0.05]) for of in "kv"}
    change_tensors(tmp_path, **scales)
    cache = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    settings = dict(quant_method="compressed-tensors", format="dense", ignore=[])
    settings |= dict(config_groups=groups, kv_cache_scheme=cache)
    rewrite(tmp_path / "config.json", quantization_config=settings)
    got = load_checkpoint(tmp_path, quantize=quantize).state_dict()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    said = capsys.readouterr().err
    assert said.count("more exact") == 1 == said.count("\n")


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
        ("w4a16", "config_groups.group_0.weights.num_bits", 3, "num_bits 3 [4, 8"),
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

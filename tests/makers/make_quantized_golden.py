"""
Write tests/quantized_golden.safetensors: tiny quantized checkpoints, each packed by the package
that defines its format, with the logits and greedy tokens that transformers gives for the weights
as that package dequantizes them.

Run it in an environment of its own; the packages are needed here alone. compressed-tensors 0.20 no
longer writes activation ordering, so a second run with an older one adds it. transformers 5.24
wrote what has experts, e2m1 or recurrent layers:

    pip install transformers==5.23 compressed-tensors==0.20 && pip install --no-deps gptqmodel==7.7 autoawq==0.2.9
    python tests/makers/make_quantized_golden.py
    pip install --no-deps compressed-tensors==0.12.2 && python tests/makers/make_quantized_golden.py act-order
    pip install transformers==5.24 compressed-tensors==0.20 && python tests/makers/make_quantized_golden.py moe
    python tests/makers/make_quantized_golden.py recurrent
    python tests/makers/make_quantized_golden.py latent  # quantized_golden_latent.safetensors

Tensors are named SETTING/NAME, and those that several settings share SHAPE/NAME. The file's
metadata has each SETTING's config.json, which says in `shared` what the setting shares. Written
with torch 2.13.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from make_golden import greedy, new_model, random_model

OUT = Path(__file__).parents[1] / "quantized_golden.safetensors"
PROMPT, NEW_TOKENS = 9, 15
F32 = torch.float32
COMMON = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=None,
)
RECURRENT = COMMON | dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=16,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
)
MIXTURE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
LATENT = {key: value for key, value in COMMON.items() if key != "head_dim"} | dict(
    num_hidden_layers=2,
    num_key_value_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
)
SHAPES = {
    "llama": LlamaConfig(**COMMON),
    "two": LlamaConfig(**COMMON | dict(num_hidden_layers=2)),
    "qwen2": Qwen2Config(**{key: value for key, value in COMMON.items() if key != "head_dim"}),
    "288": Qwen3Config(**COMMON | dict(intermediate_size=288)),
    "128": Qwen3Config(
        **COMMON
        | dict(hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4)
    ),
    "gpt_oss": GptOssConfig(
        **COMMON | dict(hidden_size=96, intermediate_size=96),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96
    ),
    "qwen3_5": Qwen3_5TextConfig(**RECURRENT),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**RECURRENT | MIXTURE),
    "qwen3_5_moe fused": Qwen3_5MoeTextConfig(**RECURRENT | MIXTURE),
    "qwen3_next": Qwen3NextConfig(**RECURRENT | MIXTURE, norm_topk_prob=True),
    "glm4_moe_lite": Glm4MoeLiteConfig(**LATENT),
    "deepseek_v3": DeepseekV3Config(
        **LATENT | dict(q_lora_rank=None), n_group=2, topk_group=1, first_k_dense_replace=1
    ),
}
LATENTS = "glm4_moe_lite", "deepseek_v3"
SEPARATE = (
    "qwen3_moe",
    "qwen3_5_moe",
    "qwen3_next",
    *LATENTS,
)  # whose files have each expert by itself


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All but the head."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


class SeparateExperts(nn.Module):
    """The linear layers of a transformers model, with those of its experts one by one, as their
    files name them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        parts = {name: module.weight for name, module in linears(model).items()}
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                for i, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj)):
                    gate, up = gate_up.chunk(2)
                    parts |= {
                        f"{name}.{i}.{part}_proj": w
                        for part, w in dict(gate=gate, up=up, down=down).items()
                    }
        for name, weight in parts.items():
            *places, last = name.split(".")
            here = self
            for place in places:
                if not hasattr(here, place):
                    here.add_module(place, nn.Module())
                here = getattr(here, place)
            layer = nn.Linear(*reversed(weight.shape), bias=False)
            layer.weight.data = weight.detach().clone()
            here.add_module(last, layer)


def fuse_experts(weights: dict[str, Tensor]) -> None:
    """Per-expert weights become those that transformers' modules hold."""
    for first in [name for name in weights if name.endswith(".experts.0.gate_proj.weight")]:
        experts = first.removesuffix(".0.gate_proj.weight")
        gate, up, down = (
            torch.stack([weights.pop(f"{experts}.{i}.{part}_proj.weight") for i in range(4)])
            for part in ("gate", "up", "down")
        )
        weights |= {
            f"{experts}.gate_up_proj": torch.cat((gate, up), 1),
            f"{experts}.down_proj": down,
        }


# GPTQ


def gptq(
    model: nn.Module,
    bits: int,
    group_size: int,
    sym: bool,
    form: str,
    act_order: bool = False,
    dynamic: dict | None = None,
    key: str = "checkpoint_format",
):
    """gptqmodel's TorchLinear packs, dequantizes, and makes the first version of the second.

    key: where quantization_config names the form; "": nowhere."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    config = QuantizeConfig(
        bits=bits, group_size=group_size, sym=sym, desc_act=act_order, dynamic=dynamic
    )
    tensors, weights = {}, {}
    for name, linear in linears(model).items():
        found = config.dynamic_get(name) if dynamic else None
        if found is False:
            continue
        own = dict(bits=bits, group_size=group_size) | (found or {})
        here, G = own["bits"], own["group_size"]
        (N, K), top = linear.weight.shape, 2**here - 1
        C = 1 if G == -1 else K // G
        perm = torch.randperm(K) if act_order else torch.arange(K)
        groups = linear.weight.detach()[:, perm].view(N, C, -1)
        low, high = groups.amin(-1), groups.amax(-1)
        if sym:
            scales, zeros = (
                (2 * torch.maximum(-low, high) / top).half().float(),
                torch.full((N, C), 2.0 ** (here - 1)),
            )
        else:
            scales = ((high - low) / top).half().float()
            zeros = (-low / scales).round().clamp(0, top)
            zeros[torch.rand(N, C) < 0.2] = 0  # which borrows, in the first version
        g_idx = torch.empty(K, dtype=torch.int32)
        g_idx[perm] = torch.arange(K, dtype=torch.int32) // (K // C)
        layer = TorchLinear(
            bits=here,
            group_size=G,
            sym=sym,
            desc_act=act_order,
            in_features=K,
            out_features=N,
            bias=linear.bias is not None,
            format=form,
        )
        layer.pack(linear, scales, zeros, g_idx=g_idx)
        layer.eval().post_init()
        scales = layer.scales
        layer.scales = scales.float()
        weights[name + ".weight"] = layer.dequantize_weight().T.float()
        layer.scales = scales
        if form == "gptq":
            convert_gptq_v2_to_v1_format_module(layer, config)
        tensors |= {
            f"{name}.{part}": value.clone()
            for part, value in layer.state_dict().items()
            if part in ("qweight", "qzeros", "scales", "g_idx", "bias") and value is not None
        }
    settings = dict(
        quant_method="gptq", bits=bits, group_size=group_size, sym=sym, desc_act=act_order
    )
    return tensors, weights, settings | dict(dynamic=dynamic) | ({key: form} if key else {})


# AWQ


def awq(model: nn.Module, group_size: int, **version):
    """autoawq's WQLinear_GEMM. The package's own __init__ wants an older transformers, and is left
    out."""
    if "awq" not in sys.modules:
        root = Path(importlib.util.find_spec("awq").origin).parent
        for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    tensors, weights = {}, {}
    for name, linear in linears(model).items():
        groups = linear.weight.detach().unflatten(1, (-1, group_size))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round().clamp(0, 15)
        layer = WQLinear_GEMM.from_linear(
            linear, 4, group_size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        tensors |= {f"{name}.{key}": value for key, value in layer.state_dict().items()}
        weights[name + ".weight"] = dequantize_gemm(
            layer.qweight, layer.qzeros, layer.scales.float(), 4, group_size
        ).T
    return (
        tensors,
        weights,
        dict(quant_method="awq", bits=4, group_size=group_size, zero_point=True) | version,
    )


# compressed-tensors


def observe(w: Tensor, args, **more) -> tuple[Tensor, Tensor]:
    """Scale and zero point of the range of each part that shares them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    (N, K), w = w.shape, w.detach().float()
    shapes = dict(tensor=(N, K), channel=(1, K), block=args.block_structure)
    rows, columns = shapes.get(args.strategy) or (1, args.group_size)
    w = nn.functional.pad(w, (0, -K % columns, 0, -N % rows))
    w = w.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    low, high = w.amin((1, 3)), w.amax((1, 3))
    return calculate_qparams(low, high, args, **more)


def compressed_tensors(
    model: nn.Module,
    *groups: dict,
    ignore: list[str] = ["lm_head"],
    dtype: torch.dtype = F32,
    **config,
):
    """The package puts its parameters into the model, compresses it, and decompresses each
    layer."""
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    model.to(dtype)
    config |= dict(
        config_groups={f"group_{i}": group for i, group in enumerate(groups)}, ignore=ignore
    )
    apply_quantization_config(model, QuantizationConfig(quantization_status="frozen", **config))
    schemes = {
        name: module.quantization_scheme
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme") and module.quantization_scheme.weights
    }
    for name, scheme in schemes.items():
        module = model.get_submodule(name)
        whole = getattr(module, "weight_global_scale", None)
        if whole is not None:
            whole.data.copy_(448 * 6 / module.weight.abs().max())
        scale, zero = observe(module.weight, scheme.weights, global_scale=whole)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    before = set(model.state_dict())
    for name, parameter in model.named_parameters():
        if name.endswith(("input_scale", "output_scale", "k_scale", "v_scale")):
            parameter.data.fill_(0.125)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors, weights = {}, {}
    for name, scheme in schemes.items():
        held = {
            key: value
            for key, value in model.get_submodule(name).state_dict().items()
            if key != "bias"
        }
        tensors |= {f"{name}.{key}": value for key, value in held.items()}
        if held["weight_scale"].dtype != torch.uint8:
            held["weight_scale"] = held["weight_scale"].float()
        K = model.get_submodule(name).in_features
        if "weight_global_scale" in held:  # decompress() would round to bf16
            unpacked = unpack_fp4_from_uint8(
                held["weight_packed"], len(held["weight_packed"]), K, F32
            )
            found = dequantize(
                unpacked,
                held["weight_scale"],
                args=scheme.weights,
                dtype=F32,
                global_scale=held["weight_global_scale"],
            )
        else:
            found = BaseCompressor.get_value_from_registry(scheme.format).decompress(held, scheme)[
                "weight"
            ]
        weights[name + ".weight"] = found.float()
    tensors |= {
        name: value
        for name, value in model.state_dict().items()
        if name in before and name.endswith("_scale")
    }
    settings = json.loads(compressor.quantization_config.model_dump_json())
    return tensors, weights, settings


def scheme(weights: dict, activations: dict | None = None, targets: list[str] = ["Linear"]) -> dict:
    return dict(targets=targets, weights=weights, input_activations=activations)


def act_order(model: nn.Module, group_size: int):
    """compressed-tensors 0.12's actorder "group": the columns of a group lie apart, and
    weight_g_idx names them."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group_size, actorder="group")
    compressor, tensors, weights = PackedQuantizationCompressor(), {}, {}
    for name, linear in linears(model).items():
        w = linear.weight.detach()
        perm = torch.randperm(w.shape[1])
        g_idx = torch.empty(w.shape[1], dtype=torch.int32)
        g_idx[perm] = torch.arange(w.shape[1], dtype=torch.int32) // group_size
        scale, zero = observe(w[:, perm], args)
        held = compressor.compress_weight(w, scale, args, zero, g_idx)
        held |= dict(weight_scale=scale, weight_g_idx=g_idx)
        weights[name + ".weight"] = compressor.decompress_weight(held, args).float()
        tensors |= {f"{name}.{key}": value for key, value in held.items()}
    group = scheme(json.loads(args.model_dump_json()))
    return (
        tensors,
        weights,
        dict(
            quant_method="compressed-tensors",
            format="pack-quantized",
            ignore=["lm_head"],
            quantization_status="compressed",
            config_groups=dict(group_0=group),
        ),
    )


# Block-scaled FP8


def fp8(
    model: nn.Module,
    *block: int,
    key: str = "modules_to_not_convert",
    left_out: list[str] | None = None,
):
    """transformers' own operations of its finegrained FP8. key: what quantization_config calls what
    is left out."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = FineGrainedFP8Config(weight_block_size=block or None, modules_to_not_convert=left_out)
    quantizer, tensors, weights = SimpleNamespace(quantization_config=config), {}, {}
    for name, linear in linears(model).items():
        if not should_convert_module(name, config.modules_to_not_convert):
            continue
        made = Fp8Quantize(quantizer).convert({f"{name}.weight": linear.weight.detach()})
        if len(made) == 1:  # as no blocks fill it, it stays as it was
            continue
        tensors |= made
        weights[name + ".weight"] = Fp8Dequantize(quantizer)._dequantize_one(*made.values(), F32)
    settings = json.loads(config.to_json_string())
    settings[key] = settings.pop("modules_to_not_convert", None)
    return tensors, weights, settings


# gpt-oss's MXFP4


def mxfp4(model: nn.Module):
    """Random codes, and transformers' own dequantization of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, weights = {}, {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            X, K, N = parameter.shape
            blocks = torch.randint(256, (X, N, K // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, (X, N, K // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=F32)
    return (
        tensors,
        weights,
        dict(
            quant_method="mxfp4",
            modules_to_not_convert=[
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        ),
    )


INT4, INT8, FP8 = dict(num_bits=4), dict(num_bits=8), dict(num_bits=8, type="float")
DYNAMIC = dict(num_bits=8, strategy="token", dynamic=True)
CHANNEL, TENSOR = dict(strategy="channel"), dict(strategy="tensor")
G32, ASYMMETRIC = dict(strategy="group", group_size=32), dict(symmetric=False)
BF16 = dict(dtype=torch.bfloat16)


def of(shape: str, make: Callable, *args, **more) -> tuple[str, Callable]:
    """A setting: its shape and what makes it of a model."""
    return shape, lambda model: make(model, *args, **more)


def packed(
    shape: str, weights: dict, activations: dict | None = None, **more
) -> tuple[str, Callable]:
    """A setting of compressed-tensors with one config group."""
    return of(shape, compressed_tensors, scheme(weights, activations), **more)


SETTINGS = {
    "gptq 4 sym": of("llama", gptq, 4, 32, True, "gptq"),
    "gptq 4 asymmetric": of("llama", gptq, 4, 32, False, "gptq", key=""),
    "gptq 8 asymmetric": of("llama", gptq, 8, 32, False, "gptq"),
    "gptq 8 a row": of("llama", gptq, 8, -1, True, "gptq"),
    "gptq act-order": of("qwen2", gptq, 4, 32, False, "gptq", act_order=True),
    "gptq_v2 4": of("llama", gptq, 4, 32, False, "gptq_v2"),
    "gptq_v2 by format": of("llama", gptq, 4, -1, False, "gptq_v2", key="format"),
    "gptq_v2 8 act-order": of("llama", gptq, 8, 32, True, "gptq_v2", act_order=True),
    "gptq dynamic": of(
        "two",
        gptq,
        4,
        32,
        False,
        "gptq",
        dynamic={
            r"-:model\.layers\.0\.mlp\.up_proj": {},
            r"+:.*\.down_proj": dict(bits=8, group_size=96),
            r".*\.1\.self_attn\.[qkv]_proj": dict(group_size=64),
        },
    ),
    "awq gemm": of("llama", awq, 32, version="gemm"),
    "awq GEMM": of("llama", awq, 32, version="GEMM"),
    "awq": of("qwen2", awq, 32),
    "w4a16": packed("llama", INT4 | G32),
    "w4a16 bf16": packed("qwen2", INT4 | G32, **BF16),
    "w4a16 asymmetric": packed("llama", INT4 | G32 | ASYMMETRIC),
    "w4a16 a channel": packed("llama", INT4 | CHANNEL),
    "w8a16 asymmetric": packed("llama", INT8 | G32 | ASYMMETRIC),
    "w8a16 a channel": packed("llama", INT8 | CHANNEL),
    "w8a8": packed("llama", INT8 | CHANNEL, DYNAMIC),
    "w8a8 asymmetric, static": packed("qwen2", INT8 | CHANNEL | ASYMMETRIC, INT8 | TENSOR),
    "fp8 a tensor, static, cache": packed(
        "llama", FP8 | TENSOR, FP8 | TENSOR, kv_cache_scheme=FP8 | TENSOR
    ),
    "fp8 a channel": packed("llama", FP8 | CHANNEL, DYNAMIC | FP8),
    "fp8 a channel, bf16": packed("llama", FP8 | CHANNEL, DYNAMIC | FP8, **BF16),
    "fp8 naive in blocks": packed("288", FP8 | dict(strategy="block", block_structure=[128, 128])),
    "several groups": of(
        "two",
        compressed_tensors,
        scheme(INT8 | G32, targets=["re:.*self_attn.*"]),
        scheme(FP8 | CHANNEL, targets=["re:.*down_proj", "model.layers.0.mlp.up_proj"]),
        scheme(INT4 | G32),
        ignore=["re:.*layers.1.mlp.gate_proj", "model.layers.0.self_attn.k_proj"],
    ),
    "fp8 blocks": of("128", fp8, 128, 128),
    "fp8 small blocks": of("llama", fp8, 16, 32),
    "fp8 modules_to_not_convert": of(
        "two",
        fp8,
        32,
        32,
        left_out=["lm_head", "model.layers.0.mlp", "v_proj", "model.layers.1.self_attn.q_pr"],
    ),
    "fp8 ignored_layers": of(
        "llama", fp8, 32, 32, key="ignored_layers", left_out=["lm_head", "mlp.gate_proj"]
    ),
    "fp8 a tensor": of("llama", fp8),
}
FP4 = dict(num_bits=4, type="float", symmetric=True, dynamic=False)
MXFP4 = FP4 | dict(
    strategy="group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"
)
NVFP4 = FP4 | dict(
    strategy="tensor_group",
    group_size=16,
    scale_dtype="torch.float8_e4m3fn",
    zp_dtype="torch.float8_e4m3fn",
)
MOE = {
    "mxfp4": of("gpt_oss", mxfp4),
    "mxfp4-pack": packed("qwen3_moe", MXFP4),
    "nvfp4-pack": packed("qwen3_moe", NVFP4),
    "nvfp4-pack dense": packed("llama", NVFP4),
    "w4a16 of experts": packed("qwen3_moe", INT4 | G32 | ASYMMETRIC),
    "fp8 of experts": of("qwen3_moe", fp8, 32, 32, left_out=["lm_head"]),
}
# What recipes leave of recurrent models in 16 bits.
SMALL = ["lm_head", r"re:.*mlp\.gate$", "re:.*shared_expert_gate$"]
GATES, MIXER = "re:.*in_proj_(a|b|ba)$", "re:.*linear_attn.*"
RECURRENT_SETTINGS = {
    "w4a16, mixers left out": packed("qwen3_5", INT4 | G32 | ASYMMETRIC, ignore=[*SMALL, MIXER]),
    "w4a16 of gates": packed("qwen3_5", INT4 | G32),
    "nvfp4-pack, mixers left out": packed("qwen3_5_moe", NVFP4, ignore=[*SMALL, MIXER]),
    "fp8 a channel of qkv": packed(
        "qwen3_5", FP8 | CHANNEL, DYNAMIC | FP8, ignore=["lm_head", "re:.*in_proj_z", GATES]
    ),
    "w4a16, experts in one tensor": packed("qwen3_5_moe fused", INT4 | G32),
    "fp8 blocks of mixers": of(
        "qwen3_5_moe",
        fp8,
        32,
        32,
        left_out=[
            "lm_head",
            "model.layers.0.linear_attn.in_proj_a",
            "model.layers.0.linear_attn.in_proj_b",
            "model.layers.0.mlp.shared_expert_gate",
        ],
    ),
    "w4a16 by key head": packed("qwen3_next", INT4 | G32 | ASYMMETRIC, ignore=[*SMALL, GATES]),
    "fp8 blocks by key head": of("qwen3_next", fp8, 8, 32, left_out=["lm_head"]),
}
# kv_b has codes, or has none, in one file as in the next.
LATENT_SETTINGS = {
    "w4a16 of latents": packed("glm4_moe_lite", INT4 | G32 | ASYMMETRIC),
    "nvfp4-pack of latents": packed("glm4_moe_lite", NVFP4, ignore=["lm_head", "re:.*kv_b_proj"]),
    "fp8 blocks of latents": of("deepseek_v3", fp8, 8, 32, left_out=["lm_head"]),
    "fp8 a channel of q": packed(
        "glm4_moe_lite", FP8 | CHANNEL, DYNAMIC | FP8, ignore=["lm_head", "re:.*kv_a_proj_with_mqa"]
    ),
}
ACT_ORDER = {"w4a16 act-order": of("llama", act_order, 32)}

ADDED = {"act-order": ACT_ORDER, "moe": MOE, "recurrent": RECURRENT_SETTINGS}


@torch.no_grad()
def main() -> None:
    wanted, golden, configs, out = SETTINGS, {}, {}, OUT
    if sys.argv[1:] == ["latent"]:
        wanted, out = LATENT_SETTINGS, OUT.with_stem(f"{OUT.stem}_latent")
    elif sys.argv[1:]:  # added to what is there
        wanted, golden = ADDED[sys.argv[1]], load_file(OUT)
        with safe_open(OUT, framework="pt") as file:
            configs = file.metadata()
    shapes = [*SHAPES]
    for setting, (shape, make) in sorted(wanted.items(), key=lambda item: shapes.index(item[1][0])):
        config = SHAPES[shape]
        torch.manual_seed(0)
        base = random_model(config)
        state = base.state_dict()
        torch.manual_seed(len(golden))
        model = new_model(config)
        model.load_state_dict(state)
        tensors, weights, settings = make(SeparateExperts(model) if shape in SEPARATE else model)
        fuse_experts(weights)
        settings = {key: value for key, value in settings.items() if value is not None}
        kept = {
            f"{shape}/{name}": tensor.bfloat16()
            for name, tensor in state.items()
            if name not in weights and name not in tensors
        }
        configs[setting] = json.dumps(
            config.to_dict() | dict(quantization_config=settings, shared=list(kept))
        )
        golden |= kept
        golden |= {
            f"{setting}/{name}": tensor.contiguous().clone() for name, tensor in tensors.items()
        }
        base.load_state_dict(state | weights)
        tokens, logits = greedy(base, PROMPT, NEW_TOKENS)
        golden |= {f"{setting}/golden tokens": tokens, f"{setting}/golden logits": logits}
        print(f"{setting}: {tokens[PROMPT:].tolist()}")
    save_file(golden, out, metadata=configs)
    out.chmod(0o644)  # safetensors lets its owner alone read it


if __name__ == "__main__":
    main()

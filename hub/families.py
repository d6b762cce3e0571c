"""
What config.json says of a model, for each family: model.Config. A new family is an entry of
FAMILIES, of DEFAULTS where keys may be missing, and, where its layers differ, a case of
layers_from_hf(); its names are checkpoint.LAYER's.

hf: the content of config.json, or text_settings() of it.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from model import Config, LayerConfig, MoEConfig, Rope

OLMO = dict(qk_norm="whole", pre_norm=False, post_norm=True, norm_fp32=True)
FAMILIES = {  # model_type -> the fields of Config that it stands for
    "llama": {},
    "mistral": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm="head"),
    "smollm3": {},
    "phi3": dict(fused_files=True),
    "granite": {},
    "ministral3": {},
    "olmo2": OLMO,
    "olmo3": OLMO,
    "gemma3_text": dict(
        qk_norm="head", post_norm=True, norm_fp32=True, norm_offset=1.0, activation="gelu"
    ),
    "mixtral": dict(expert_files="block_sparse_moe gate w1 w3 w2"),
    "qwen3_moe": dict(qk_norm="head", expert_files="mlp gate gate_proj up_proj down_proj"),
    "gpt_oss": dict(
        qkv_bias=True, o_bias=True, sinks=True, norm_fp32=True, expert_files="mlp router"
    ),
}
DEFAULTS = {  # model_type -> what a missing key stands for, as in transformers
    "smollm3": dict(
        rope_theta=2e6, rms_norm_eps=1e-6, tie_word_embeddings=True, no_rope_layer_interval=4
    ),
    "olmo3": dict(rope_theta=5e5, sliding_window=4096),
    "gemma3_text": dict(
        vocab_size=262208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": dict(moe_intermediate_size=768),
    "gpt_oss": dict(
        head_dim=64,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
        ),
        sliding_window=128,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    ),
}
SUPPORTED = {  # key -> the values that are read here, first what a missing key stands for
    "model_type": tuple(FAMILIES),
    "hidden_act": ("silu",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1, None),
    "n_shared_experts": (0, None),
    "shared_expert_intermediate_size": (0, None),
    "routed_scaling_factor": (1,),
}


LACKING = {  # model_type -> what it has that is not here
    "gemma2": "caps of attention scores and logits",
    "gemma3n": "layers that are left out for some tokens",
    "qwen3_5": "recurrent layers",
    "qwen3_next": "recurrent layers",
    "granitemoehybrid": "recurrent layers",
    **dict.fromkeys(
        ("qwen2_moe", "granitemoe", "phimoe", "olmoe", "llama4", "deepseek_v3"), "kind of experts"
    ),
}


def check_supported(settings: dict, supported: dict) -> None:
    """ValueError names the key and the value that are not supported."""
    for key, values in supported.items():
        found = settings.get(key, values[0])
        if found not in values:
            lacking = ""
            if key == "model_type" and found in LACKING:
                lacking = f", as its {LACKING[found]} are not here"
            raise ValueError(
                f"{key}={found!r} is not supported{lacking}: want {' or '.join(map(repr, values))}"
            )


def is_head(hf: dict) -> bool:
    """Whether config.json is an EAGLE head's, and not a whole model's."""
    named = "eagle" in str(hf.get("architectures", "")).lower()
    return named or "draft_vocab_size" in hf or "speculators_model_type" in hf


def text_settings(hf: dict) -> dict:
    """Those of the language model, where config.json is of a model that also sees, and what missing
    keys stand for."""
    settings = hf | (hf.get("text_config") or {})
    kind = settings.get("model_type")
    kind = dict(gemma3="gemma3_text", mistral3="mistral").get(kind, kind)
    settings = DEFAULTS.get(kind, {}) | settings | dict(model_type=kind)
    # gpt-oss has the biases that are in no other family.
    check_supported(settings, SUPPORTED | dict(attention_bias=(kind == "gpt_oss",)))
    return settings


def config_from_hf(hf: dict) -> Config:
    """hf: the content of config.json. ValueError for a value that is not supported."""
    hf = text_settings(hf)
    n_head, kind, scales = hf["num_attention_heads"], hf["model_type"], {}
    if kind == "granite":
        scales = dict(
            attention_scale=hf.get("attention_multiplier", 1.0),
            embedding_scale=hf.get("embedding_multiplier", 1.0),
            residual_scale=hf.get("residual_multiplier", 1.0),
            logits_scale=1 / hf.get("logits_scaling", 1.0),
        )
    elif kind == "gemma3_text":
        scales = dict(
            attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
            embedding_scale=hf["hidden_size"] ** 0.5,
        )
    return Config(
        dim=hf["hidden_size"],
        layers=layers_from_hf(hf),
        n_head=n_head,
        n_kv_head=hf.get("num_key_value_heads") or n_head,
        head_dim=head_dim(hf),
        ffn_dim=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        context=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        tied=hf.get("tie_word_embeddings") or False,
        **scales,
        **FAMILIES[kind],
    )


def head_dim(hf: dict) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def layers_from_hf(hf: dict) -> tuple[LayerConfig, ...]:
    """hf: text_settings()'s."""
    kind, n, window = hf["model_type"], hf["num_hidden_layers"], hf.get("sliding_window") or None
    numbers = range(1, n + 1)
    windowed = kind in ("mistral", "ministral3", "phi3", "mixtral")
    full = LayerConfig(window if windowed else None, rope_from_hf(hf), moe_from_hf(hf))
    if kind == "smollm3":
        turned = hf.get("no_rope_layers") or [i % hf["no_rope_layer_interval"] for i in numbers]
        return tuple(full if turn else LayerConfig() for turn in turned[:n])
    if kind in ("olmo3", "gemma3_text", "gpt_oss"):
        sliding = replace(full, window=window, rope=rope_from_hf(hf, sliding=kind != "gpt_oss"))
        layers = dict(full_attention=full, sliding_attention=sliding)
        every = dict(olmo3=4, gemma3_text=hf.get("sliding_window_pattern", 6), gpt_oss=2)[kind]
        nth = ["sliding_attention" if i % every else "full_attention" for i in numbers]
        return tuple(layers[of] for of in (hf.get("layer_types") or nth)[:n])
    if kind == "qwen3_moe":
        dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
        without = replace(full, moe=None)
        return tuple(without if i - 1 in dense or i % step else full for i in numbers)
    return (full,) * n


def moe_from_hf(hf: dict) -> MoEConfig | None:
    """hf: text_settings()'s. None for a model without experts."""
    kind = hf["model_type"]
    if "expert_files" not in FAMILIES[kind]:
        return None
    return MoEConfig(
        n_expert=hf.get("num_experts") or hf["num_local_experts"],
        n_chosen=hf["num_experts_per_tok"],
        ffn_dim=hf["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
        normalize=hf.get("norm_topk_prob", kind != "qwen3_moe"),
        bias=kind == "gpt_oss",
        clamp=(hf["swiglu_limit"], hf["swiglu_alpha"]) if kind == "gpt_oss" else None,
    )


# Rotary position embeddings


def rope_settings(hf: dict, sliding: bool = False) -> dict:
    """rope_theta, rope_type and what the type needs, of the layers with or without a window. hf:
    text_settings()'s.

    Newer files have them in rope_parameters, in OLMo 3 and Gemma 3 a dictionary for each kind of
    layer. Older files have rope_theta and rope_scaling, which in these two families is not for
    layers with a window."""
    found = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = hf.get("rope_theta", 10000.0)
    if sliding:
        theta = hf.get("rope_local_base_freq", theta)
    if "full_attention" in found or "sliding_attention" in found:
        found = found.get("sliding_attention" if sliding else "full_attention") or {}
    elif sliding:
        found = {}
    rope = dict(
        rope_theta=theta,
        partial_rotary_factor=hf.get("partial_rotary_factor", 1.0),
        original_max_position_embeddings=hf["max_position_embeddings"],
    )
    rope |= found
    if "original_max_position_embeddings" in hf:  # Phi has it beside the other settings
        rope["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if hf["model_type"] == "phi3" and kind in ("su", "yarn"):  # older names
        kind = "longrope"
    return rope | dict(rope_type=kind)


def rope_from_hf(hf: dict, sliding: bool = False) -> Rope:
    rope = rope_settings(hf, sliding)
    check_supported(rope, dict(rope_type=tuple(STRETCH)))
    original = rope["original_max_position_embeddings"]
    turned = int(head_dim(hf) * rope["partial_rotary_factor"])
    plain = rope["rope_theta"] ** -(torch.arange(0, turned, 2).float() / turned)  # [R / 2]
    rope["stretch"] = rope.get("factor") or hf["max_position_embeddings"] / original
    scale, *tables = STRETCH[rope["rope_type"]](plain, rope)
    frequencies, *long = [tuple(table.tolist()) for table in tables]
    return Rope(
        frequencies, scale, original, *long, q_growth=rope.get("llama_4_scaling_beta") or 0.0
    )


# Ways to stretch the frequencies [R / 2] for longer texts -> the scale of cos and sin, then the
# frequencies; LongRoPE's are two sets.


def llama3_rope(plain: Tensor, rope: dict) -> tuple:
    """Llama 3.1 stretches the long wavelengths, keeps the short ones and blends in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    # Full turns within the original context.
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0, keep * plain + (1 - keep) * plain / rope["factor"]


def yarn_rope(plain: Tensor, rope: dict) -> tuple:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): frequencies that make beta_fast turns within
    the original context stay, those that make beta_slow are stretched, and a ramp lies between. The
    scale sharpens attention."""
    original, pairs = rope["original_max_position_embeddings"], len(plain)
    factor = rope["stretch"]

    def place(turns: float) -> float:
        """The index of the frequency that makes so many turns."""
        return pairs * math.log(original / (2 * math.pi * turns)) / math.log(rope["rope_theta"])

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs) - low) / (high - low or 0.001)).clamp(0, 1)

    def temperature(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        m, m_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = temperature(m) / temperature(m_all) if m and m_all else temperature(1)
    return scale, ramp * plain / factor + (1 - ramp) * plain


def longrope(plain: Tensor, rope: dict) -> tuple:
    """LongRoPE (arXiv 2402.13753): a factor for each frequency, others for texts beyond the
    original context."""
    factor, original = rope["stretch"], rope["original_max_position_embeddings"]
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return scale, *(plain / torch.tensor(rope[key]) for key in ("short_factor", "long_factor"))


STRETCH = dict(
    default=lambda plain, rope: (1.0, plain),
    linear=lambda plain, rope: (1.0, plain / rope["factor"]),
    llama3=llama3_rope,
    yarn=yarn_rope,
    longrope=longrope,
)

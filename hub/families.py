"""
What config.json says of a model, for each family: model.Config. A new family is an entry of
FAMILIES, of DEFAULTS where keys may be missing, and, where its layers differ, a case of
layers_from_hf(); hub/checkpoint.py's hf_layer() names its weights.

hf: the content of config.json, or text_settings() of it. Whatever is read of it is checked where it
is read, by value_of(): a ValueError names the key, the value and what is wanted.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from model import Config, DeltaConfig, LatentConfig, LayerConfig, MoEConfig, Rope

EXPERTS = "mlp", "gate", "gate_proj", "up_proj", "down_proj"
QWEN_NEXT = dict(qk_norm="head", norm_fp32=True, norm_offset=1.0, attention_gate=True)
GEMMA4_EXPERTS = "", "router.proj", *EXPERTS[2:]
GEMMA4 = dict(
    qk_norm="head",
    v_norm=True,
    post_norm=True,
    norm_fp32=True,
    layer_scale=True,
    activation="gelu",
    attention_scale=1.0,
)
OLMO = dict(qk_norm="whole", pre_norm=False, post_norm=True, norm_fp32=True)
FAMILIES = {  # model_type -> the fields of Config that it stands for
    "llama": {},
    "mistral": {},
    "ministral": {},
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
    "gemma4_text": GEMMA4 | dict(expert_files=GEMMA4_EXPERTS),
    "gemma4_unified_text": GEMMA4,
    "muse_glimmer_text": dict(
        qk_norm="weightless",
        attention_gate=True,
        gate_apart=True,
        post_norm=True,
        norm_fp32=True,
        norm_offset=1.0,
        plain_last_norm=True,
        embedding_norm=True,
    ),
    "mixtral": dict(expert_files=("block_sparse_moe", "gate", "w1", "w3", "w2")),
    "qwen3_moe": dict(qk_norm="head", expert_files=EXPERTS),
    "qwen3_5_text": QWEN_NEXT,
    "qwen3_5_moe_text": QWEN_NEXT | dict(expert_files=EXPERTS),
    "qwen3_next": QWEN_NEXT | dict(expert_files=EXPERTS, delta_by_head=True),
    "gpt_oss": dict(
        qkv_bias=True, o_bias=True, sinks=True, norm_fp32=True, expert_files=("mlp", "router")
    ),
    "deepseek_v3": dict(expert_files=EXPERTS),
    "glm4_moe_lite": dict(expert_files=EXPERTS),
}
# What a missing key stands for, as in the family's configuration class in transformers, by which
# files leave out what is the class's own. Theta: of rope.
LLAMA = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)
MISTRAL = LLAMA | dict(
    intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072
)
QWEN = LLAMA | dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
)
# Qwen3.5, 3.6, 3.8 and Qwen3-Next: three layers of four are recurrent.
RECURRENT = LLAMA | dict(
    vocab_size=248320,
    intermediate_size=12288,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=32768,
    partial_rotary_factor=0.25,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
RECURRENT_MOE = RECURRENT | dict(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=40,
    num_key_value_heads=2,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    norm_topk_prob=True,
)
GEMMA4_ROPE = dict(
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
)
GEMMA4_KEYS = dict(
    vocab_size=262144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_parameters=GEMMA4_ROPE,
    sliding_window=512,
    tie_word_embeddings=True,
)
OLMO3_THETA = 5e5  # of layers with a window, whatever the file says
OLMO2 = LLAMA | dict(vocab_size=50304, rms_norm_eps=1e-5)
# Latent attention, and a router of sigmoids in groups.
LATENT = LLAMA | dict(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    max_position_embeddings=4096,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_interleave=True,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
DEFAULTS = {  # model_type -> its keys
    "llama": LLAMA,
    "mistral": MISTRAL | dict(sliding_window=4096),
    "ministral": MISTRAL | dict(sliding_window=4096),
    "qwen2": QWEN,
    "qwen3": QWEN | dict(head_dim=128),
    "smollm3": LLAMA
    | dict(
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2e6,
        tie_word_embeddings=True,
        no_rope_layer_interval=4,
    ),
    "phi3": LLAMA
    | dict(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "granite": LLAMA,
    "ministral3": MISTRAL
    | dict(
        vocab_size=131072,
        num_hidden_layers=34,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e6,
            factor=16.0,
            original_max_position_embeddings=16384,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "olmo2": OLMO2,
    "olmo3": OLMO2 | dict(rope_theta=OLMO3_THETA, sliding_window=4096),
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
    "gemma4_text": GEMMA4_KEYS
    | dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144),
    "gemma4_unified_text": GEMMA4_KEYS | dict(max_position_embeddings=262144, sliding_window=1024),
    "muse_glimmer_text": dict(
        vocab_size=202048,
        hidden_size=6656,
        intermediate_size=19968,
        num_hidden_layers=52,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        post_norm_eps=1e-8,
        rope_theta=1e4,
        sliding_window=2048,
        qk_scale_factor=3.87,
        output_multiplier=0.19611613513818404,
        final_logit_softcapping=20.0,
    ),
    "mixtral": MISTRAL
    | dict(rms_norm_eps=1e-5, rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": QWEN
    | dict(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_key_value_heads=4,
        num_local_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": RECURRENT_MOE,
    "qwen3_next": RECURRENT_MOE
    | dict(vocab_size=151936, num_hidden_layers=48, num_experts=512, num_experts_per_tok=10),
    "gpt_oss": dict(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_parameters=dict(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
        ),
        sliding_window=128,
        num_local_experts=128,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    ),
    "deepseek_v3": LATENT | dict(first_k_dense_replace=3),
    "glm4_moe_lite": LATENT
    | dict(
        vocab_size=154880,
        hidden_size=2048,
        intermediate_size=10240,
        moe_intermediate_size=1536,
        num_hidden_layers=47,
        num_attention_heads=20,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        n_routed_experts=64,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
    ),
}
# A model that also sees: model_type -> what its text_config is of, where that does not say so, and
# whether the embedding is the output head, where the file does not say so. None: as the text part
# has it.
WRAPPERS = {
    "gemma3": ("gemma3_text", True),
    "gemma4": ("gemma4_text", True),
    "gemma4_unified": ("gemma4_unified_text", True),
    "muse_glimmer": ("muse_glimmer_text", False),
    "mistral3": ("mistral", True),
    "internvl": ("qwen2", True),
    "got_ocr2": ("qwen2", True),
    "llava": ("llama", None),
    "qwen3_5": ("qwen3_5_text", False),
    "qwen3_5_moe": ("qwen3_5_moe_text", False),
}
# What the whole says, before its text part.
OF_THE_WHOLE = (
    "audio_config",
    "bos_token_id",
    "compression_config",
    "eos_token_id",
    "is_causal",
    "quantization_config",
    "vision_config",
)
SUPPORTED = {  # key -> the values that are read here, first what a missing key, or null, stands for
    "model_type": tuple(FAMILIES),
    "hidden_act": ("silu",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "routed_scaling_factor": (1,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
}
# The values that some families have in the place of SUPPORTED's. Gemma 4 with "vision" reads text
# as any model does: what stands for a picture sees all of it.
GEMMA4_SUPPORTED = dict(
    use_bidirectional_attention=(None, "vision"), final_logit_softcapping=None, rope_scaling=(None,)
)
SUPPORTED_BY = {  # model_type -> key -> the values, None for any
    "gpt_oss": dict(attention_bias=(True,)),
    "gemma4_text": GEMMA4_SUPPORTED,
    "gemma4_unified_text": GEMMA4_SUPPORTED
    | dict(enable_moe_block=(False,), hidden_size_per_layer_input=(0,)),
    "muse_glimmer_text": dict(hidden_activation=("silu",), final_logit_softcapping=None),
}
GEMMA4_KINDS = "gemma4_text", "gemma4_unified_text"
BY_LAYER = "olmo3", "gemma3_text", *GEMMA4_KINDS  # rope differs by the kind of layer
# Of families with latent attention, in the place of SUPPORTED's.
SUPPORTED_LATENT = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
LACKING = {  # model_type -> what it has that is not here
    "gemma2": "caps of attention scores and logits",
    "gemma3n": "layers that are left out for some tokens",
    "granitemoehybrid": "recurrent layers",
    **dict.fromkeys(
        ("qwen2_moe", "granitemoe", "phimoe", "olmoe", "llama4", "deepseek_v2"), "kind of experts"
    ),
}
MUSE_DRAFT = "muse_glimmer_assistant"  # model_type of Muse Glimmer's DFlash draft
# model_type of a draft that reads its target's keys -> of a whole that has such a text part.
KV_DRAFTS = {
    "gemma4_assistant": "gemma4",
    "gemma4_unified_assistant": "gemma4_unified",
}
# Keys that any config.json may have, and that change nothing of what is computed here.
OF_ANY = (
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "quantization_config",  # hub/formats.py reads it
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# They make vectors of a text or a picture, and write no text.
ENCODERS = (
    "albert",
    "bert",
    "clip",
    "clip_text_model",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "siglip",
    "siglip_text_model",
    "vit",
    "xlm-roberta",
)


KINDS = {int: "int", float: "float", bool: "true or false", str: "a text"}
KINDS |= {list: "a list", dict: "an object"}
MOST = {int: 2**20, float: 1e9}
MOST_POSITIONS = 10**9
MOST_LAYERS, MOST_EXPERTS = 10**4, 10**5  # experts: of all layers
NEEDED = object()


def value_of(
    hf: dict, key: str, kind: type, default=NEEDED, most: float | None = None, or_zero=False
):
    """The value of a key, or the default where it is missing or null. ValueError without both, and
    for a value of another kind.

    A number is above 0, or_zero: or 0, and at most `most`: what is larger makes no sense, and a
    model of that size would be made before its weights are missed."""
    if not isinstance(hf, dict):
        raise ValueError(f"{hf!r:.60}: want an object with a {key}")
    value = hf.get(key)
    if value is None and default is not NEEDED:
        return default
    if kind in MOST:
        most = most or MOST[kind]
        limit = most if kind is int else f"{most:g}"
        # True is an int to isinstance(), 1 is one in the place of 1.0, and NaN is not above 0.
        fits = type(value) in (int, kind) and (0 < value <= most or or_zero and value == 0)
        if not fits:
            least = "from 0" if or_zero else "above 0,"
            raise ValueError(f"{key}={value!r:.60}: want {KINDS[kind]} {least} up to {limit}")
    elif type(value) is not kind:
        raise ValueError(f"{key}={value!r:.60}: want {KINDS[kind]}")
    return value


def values_of(hf: dict, key: str, wanted: tuple, n: int, default: list) -> list:
    """The first n values of a list, each one of those wanted."""
    values = value_of(hf, key, list, default)
    if len(values) < n or any(value not in wanted for value in values):
        names = " or ".join(map(repr, wanted))
        raise ValueError(f"{key}={values!r:.60}: want {names} for each of {n} layers")
    return values[:n]


def numbers_of(hf: dict, key: str) -> list[int] | None:
    """A list of numbers of layers, of which 0 is one."""
    numbers = value_of(hf, key, list, None)
    if numbers is not None and any(type(number) is not int for number in numbers):
        raise ValueError(f"{key}={numbers!r:.60}: want numbers of layers")
    return numbers


def check_supported(settings: dict, supported: dict) -> None:
    """ValueError names the key and the value that are not supported."""
    for key, values in supported.items():
        found = settings.get(key)
        if found is None and key != "model_type":
            found = values[0]
        if found not in values:
            lacking = ""
            if key == "model_type" and found in LACKING:
                lacking = f", as its {LACKING[found]} are not here"
            if key == "model_type" and found in ENCODERS:
                lacking = ", as an encoder writes no text"
            raise ValueError(
                f"{key}={found!r} is not supported{lacking}: want {' or '.join(map(repr, values))}"
            )


def check_known(hf: dict, known: tuple) -> None:
    """ValueError for a key that is neither known nor of OF_ANY: a draft that does not do what its
    file says would be accepted less, and nobody would see why."""
    unknown = {key for key, value in hf.items() if value is not None}.difference(known, OF_ANY)
    if unknown:
        key = min(unknown)
        raise ValueError(
            f"{key}={hf[key]!r:.60} is not known of a {hf.get('model_type')}: want a draft whose "
            "keys are those that transformers 5.24 has"
        )


def is_dflash(hf: dict) -> bool:
    """Whether config.json is a DFlash draft's, and not a whole model's."""
    if hf.get("model_type") == MUSE_DRAFT:
        return True
    return "dflash" in str(hf.get("architectures", "")).lower() or "dflash_config" in hf


def is_head(hf: dict) -> bool:
    """Whether config.json is an EAGLE head's, and not a whole model's."""
    named = "eagle" in str(hf.get("architectures", "")).lower()
    return named or "draft_vocab_size" in hf or "speculators_model_type" in hf


def is_shared_kv(hf: dict) -> bool:
    """Whether config.json is of a draft that reads its target's keys and values."""
    return str(hf.get("model_type")) in KV_DRAFTS


def draft_kind(hf: dict) -> str | None:
    """What kind of draft config.json is of, where it is no whole model's."""
    if is_head(hf):
        return "an EAGLE head"
    if is_dflash(hf):
        return "a DFlash draft"
    return "a Gemma 4 assistant" if is_shared_kv(hf) else None


def text_settings(hf: dict) -> dict:
    """Those of the language model, and what missing keys stand for.

    Where config.json is of a model that also sees, text_config alone describes the language model:
    what the level above says of sizes or rope is not for it. But whether the head is the embedding
    is said above, as the head is the whole's."""
    settings, kind = hf, value_of(hf, "model_type", str, None)
    if kind in WRAPPERS or hf.get("text_config") is not None:
        text = value_of(hf, "text_config", dict)
        default, tied = WRAPPERS.get(kind, (kind, None))
        kind = value_of(text, "model_type", str, default)
        if tied is None:
            tied = value_of(DEFAULTS.get(kind, {}) | text, "tie_word_embeddings", bool, False)
            tied = value_of(hf, "tie_word_embeddings", bool, False) or tied
        else:
            tied = value_of(hf, "tie_word_embeddings", bool, tied)
        if kind == "mistral":  # its class reads none, and AutoConfig's rule is for a whole model
            text = {key: value for key, value in text.items() if key != "layer_types"}
        whole = {key: hf[key] for key in OF_THE_WHOLE if hf.get(key) is not None}
        settings = text | whole | dict(tie_word_embeddings=tied)
    elif kind == "mistral" and "layer_types" in hf:  # Ministral-8B's, as AutoConfig has it
        kind = "ministral"
    settings = DEFAULTS.get(kind, {}) | settings | dict(model_type=kind)
    supported = SUPPORTED | SUPPORTED_BY.get(kind, {})
    supported = {key: values for key, values in supported.items() if values is not None}
    if "shared_expert_intermediate_size" in DEFAULTS.get(kind, {}):
        del supported["shared_expert_intermediate_size"]
    if has_latents(kind):
        for key in ("n_group", "n_shared_experts", "routed_scaling_factor"):
            del supported[key]
        supported |= SUPPORTED_LATENT
    check_supported(settings, supported)
    return settings


def has_latents(kind: str | None) -> bool:
    """Whether a family has latent attention."""
    return "kv_lora_rank" in DEFAULTS.get(kind, {})


def config_from_hf(hf: dict) -> Config:
    """hf: the content of config.json."""
    hf = text_settings(hf)
    kind, dim = hf["model_type"], value_of(hf, "hidden_size", int)
    n_head, n_kv_head = value_of(hf, "num_attention_heads", int, most=2**16), kv_heads(hf)
    scales = {}
    if kind == "granite":
        scales = dict(
            attention_scale=value_of(hf, "attention_multiplier", float, 1.0, or_zero=True),
            embedding_scale=value_of(hf, "embedding_multiplier", float, 1.0, or_zero=True),
            residual_scale=value_of(hf, "residual_multiplier", float, 1.0, or_zero=True),
            logits_scale=1 / value_of(hf, "logits_scaling", float, 1.0),
        )
    elif kind == "gemma3_text":
        scales = dict(
            attention_scale=value_of(hf, "query_pre_attn_scalar", float) ** -0.5,
            embedding_scale=dim**0.5,
        )
    elif kind in GEMMA4_KINDS:
        ple_dim = value_of(hf, "hidden_size_per_layer_input", int, 0, or_zero=True)
        cap = value_of(hf, "final_logit_softcapping", float, None)
        scales = dict(embedding_scale=dim**0.5, logits_cap=cap, ple_dim=ple_dim)
        if ple_dim:
            rows = value_of(hf, "vocab_size_per_layer_input", int, most=2**24)
            vocab_size = value_of(hf, "vocab_size", int, most=2**24)
            if rows < vocab_size:
                raise ValueError(
                    f"vocab_size_per_layer_input={rows}: want vocab_size={vocab_size} at least"
                )
            scales |= dict(ple_vocab_size=rows)
    elif kind == "muse_glimmer_text":
        scales = dict(
            attention_scale=value_of(hf, "qk_scale_factor", float) * head_dim(hf) ** -0.5,
            logits_scale=value_of(hf, "output_multiplier", float),
            logits_cap=value_of(hf, "final_logit_softcapping", float),
            post_norm_eps=value_of(hf, "post_norm_eps", float, most=1),
        )
    elif has_latents(kind):
        if n_kv_head != n_head:
            raise ValueError(
                f"num_key_value_heads={n_kv_head}: want num_attention_heads={n_head}, as in latent "
                "attention each head has its own keys"
            )
        scales = dict(attention_scale=latent_scale(hf))
    return Config(
        dim=dim,
        layers=layers_from_hf(hf),
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim(hf),
        ffn_dim=value_of(hf, "intermediate_size", int),
        vocab_size=value_of(hf, "vocab_size", int, most=2**24),
        context=contexts(hf)[0],
        norm_eps=value_of(hf, "rms_norm_eps", float, most=1),
        tied=value_of(hf, "tie_word_embeddings", bool, False),
        **scales,
        **FAMILIES[kind],
    )


def kv_heads(hf: dict) -> int:
    n_head = value_of(hf, "num_attention_heads", int, most=2**16)
    n_kv_head = value_of(hf, "num_key_value_heads", int, n_head)
    if n_head % n_kv_head:
        raise ValueError(
            f"num_attention_heads={n_head} is no multiple of num_key_value_heads={n_kv_head}"
        )
    return n_kv_head


def contexts(hf: dict) -> tuple[int, int]:
    """The positions that the model was trained for, and those that its stretched rope reaches. hf:
    text_settings()'s.

    Of YaRN, model cards tell users to add the original context and the factor, and to leave
    max_position_embeddings. Where no original is named, max_position_embeddings may be the one or
    the other: so the second number is for who asks for it."""
    context = value_of(hf, "max_position_embeddings", int, most=MOST_POSITIONS)
    rope = rope_settings(hf)
    if rope["rope_type"] not in ("yarn", "linear"):
        return context, context
    factor = value_of(rope, "factor", float, 1.0)
    original = value_of(rope, "original_max_position_embeddings", int, None, most=MOST_POSITIONS)
    reach = min(MOST_POSITIONS, max(context, int((original or context) * factor)))
    return (reach if original and rope["rope_type"] == "yarn" else context), reach


def head_dim(hf: dict) -> int:
    """With latent attention: of the part that turns."""
    size = value_of(hf, "head_dim", int, None, most=2**16)
    if has_latents(hf["model_type"]):
        turned = value_of(hf, "qk_rope_head_dim", int, most=2**16)
        # To transformers' GLM it is another name, to its DeepSeek a size that must be the same.
        if hf["model_type"] != "glm4_moe_lite" and "head_dim" in hf and size != turned:
            raise ValueError(f"head_dim={size}: want qk_rope_head_dim={turned}, or no head_dim")
        size = size or turned
    if size is None:
        dim, n_head = hf["hidden_size"], hf["num_attention_heads"]
        if dim % n_head:
            raise ValueError(
                f"hidden_size={dim} is no multiple of num_attention_heads={n_head}; head_dim is "
                "missing"
            )
        size = dim // n_head
    if size % 2:
        raise ValueError(f"head_dim={size}: want an even number, as rope turns pairs")
    return size


def layers_from_hf(hf: dict) -> tuple[LayerConfig, ...]:
    """hf: text_settings()'s."""
    kind, n = hf["model_type"], value_of(hf, "num_hidden_layers", int, most=MOST_LAYERS)
    numbers = range(1, n + 1)
    full = LayerConfig(None, rope_from_hf(hf), moe_from_hf(hf), latent=latent_from_hf(hf))
    if kind in GEMMA4_KINDS:
        return gemma4_layers(hf, n)
    if kind == "muse_glimmer_text":
        return muse_layers(hf, full)
    if kind in ("mistral", "ministral3", "phi3", "mixtral"):
        full = replace(full, window=value_of(hf, "sliding_window", int, None, most=MOST_POSITIONS))
    if kind == "smollm3":
        values_of(hf, "layer_types", ("full_attention",), n, ["full_attention"] * n)
        nth = 1
        if hf.get("no_rope_layers") is None:
            nth = value_of(hf, "no_rope_layer_interval", int)
        every = [int(i % nth > 0) for i in numbers]
        turned = values_of(hf, "no_rope_layers", (0, 1), n, every)
        return tuple(full if turn else LayerConfig() for turn in turned)
    if kind in ("ministral", "olmo3", "gemma3_text", "gpt_oss"):
        nth = dict(
            ministral=1 if hf.get("sliding_window") is None else n + 1,  # none, or all, have one
            olmo3=4,
            gpt_oss=2,
            gemma3_text=value_of(hf, "sliding_window_pattern", int, 6),
        )
        every = ["sliding_attention" if i % nth[kind] else "full_attention" for i in numbers]
        kinds = values_of(hf, "layer_types", ("full_attention", "sliding_attention"), n, every)
        layers = dict(full_attention=full)
        if "sliding_attention" in kinds:
            window = value_of(hf, "sliding_window", int, most=MOST_POSITIONS)
            rope = rope_from_hf(hf, sliding=True)
            layers |= dict(sliding_attention=replace(full, window=window, rope=rope))
        return tuple(layers[of] for of in kinds)
    recurrent = replace(full, delta=delta_from_hf(hf))
    if recurrent.delta:
        nth = value_of(hf, "full_attention_interval", int)
        every = ["linear_attention" if i % nth else "full_attention" for i in numbers]
        kinds = values_of(hf, "layer_types", ("linear_attention", "full_attention"), n, every)
        layers = [recurrent if of == "linear_attention" else full for of in kinds]
        return tuple(dense_from_hf(hf, layers) if kind == "qwen3_next" else layers)
    if kind == "qwen3_moe":
        return tuple(dense_from_hf(hf, [full] * n))
    dense = replace(full, moe=None)
    if kind == "deepseek_v3":
        first = value_of(hf, "first_k_dense_replace", int, most=MOST_LAYERS, or_zero=True)
        return tuple(dense if i <= first else full for i in numbers)
    if kind == "glm4_moe_lite":
        every = ["dense"] + ["sparse"] * (n - 1)
        kinds = values_of(hf, "mlp_layer_types", ("dense", "sparse"), n, every)
        return tuple(full if of == "sparse" else dense for of in kinds)
    return (full,) * n


def gemma4_layers(hf: dict, n: int) -> tuple[LayerConfig, ...]:
    """n layers, of which the last num_kv_shared_layers read the keys and values of the last one of
    their kind before them."""
    every = ["full_attention" if i % 6 == 0 else "sliding_attention" for i in range(1, n + 1)]
    kinds = values_of(hf, "layer_types", ("full_attention", "sliding_attention"), n, every)
    kinds[-1] = "full_attention"  # whatever the file says, as in transformers
    value_of(hf, "enable_moe_block", bool, False)  # moe_from_hf() takes what is true
    key_is_value = value_of(hf, "attention_k_eq_v", bool, False)
    window = value_of(hf, "sliding_window", int, most=MOST_POSITIONS)
    described, made = [*zip(kinds, gemma4_heads(hf, kinds))], {}
    for of, (K, E) in dict.fromkeys(described):
        sliding = of == "sliding_attention"
        made[of, (K, E)] = LayerConfig(
            window if sliding else None,
            rope_from_hf(hf, sliding, E),
            moe_from_hf(hf),
            n_kv_head=None if K == kv_heads(hf) else K,
            head_dim=None if E == head_dim(hf) else E,
            key_is_value=key_is_value and not sliding,
        )
    layers = [made[kind] for kind in described]

    shared = value_of(hf, "num_kv_shared_layers", int, 0, most=MOST_LAYERS, or_zero=True)
    own = kinds[: max(0, n - shared)]
    if set(kinds) > set(own):
        raise ValueError(
            f"num_kv_shared_layers={shared} of {n} layers: want a layer of each kind before them"
        )
    wide = {}
    if value_of(hf, "use_double_wide_mlp", bool, False):
        wide = dict(ffn_dim=2 * value_of(hf, "intermediate_size", int))
    for i in range(len(own), n):
        source = max(at for at, of in enumerate(own) if of == kinds[i])
        if layers[source].head_dim != layers[i].head_dim:
            raise ValueError(
                f"per_layer_config: layer {i} reads the keys of layer {source}, and their heads "
                "differ in size: want one size for a kind of layers"
            )
        keys = dict(kv_of=source, key_is_value=False, n_kv_head=layers[source].n_kv_head)
        layers[i] = replace(layers[i], **keys, **wide)
    return tuple(layers)


def gemma4_heads(hf: dict, kinds: list[str]) -> list[tuple[int, int]]:
    """The number of kv heads and the size of the heads of each layer.

    transformers 5.24 writes them by layer, files before it have those of all layers without a
    window."""
    by_layer = value_of(hf, "per_layer_config", dict, None)
    if by_layer is None:
        whole = dict(head_dim=hf["global_head_dim"])
        if value_of(hf, "attention_k_eq_v", bool, False):
            whole |= dict(num_key_value_heads=hf.get("num_global_key_value_heads"))
        by_layer = {str(i): whole for i, of in enumerate(kinds) if of == "full_attention"}
    found, n = [], len(kinds)
    if strange := sorted(by_layer.keys() - {str(i) for i in range(n)}):
        raise ValueError(f"per_layer_config: {strange[0]!r:.60}: want numbers of layers, below {n}")
    for i in range(n):
        own = by_layer.get(str(i), {})
        if not isinstance(own, dict):
            raise ValueError(f"per_layer_config: {i}={own!r:.60}: want an object")
        if others := sorted(own.keys() - {"head_dim", "num_key_value_heads"}):
            raise ValueError(
                f"per_layer_config: {others[0]}={own[others[0]]!r:.60} is not supported for a layer "
                "of its own: want head_dim and num_key_value_heads alone"
            )
        layer = hf | {key: value for key, value in own.items() if value is not None}
        found.append((kv_heads(layer), head_dim(layer)))
    return found


def muse_layers(hf: dict, full: LayerConfig) -> tuple[LayerConfig, ...]:
    n = hf["num_hidden_layers"]
    whole = [(n - 1 - i) % 4 == 0 for i in range(n)]
    every = ["full_attention" if of else "sliding_attention" for of in whole]
    kinds = values_of(hf, "layer_types", ("full_attention", "sliding_attention"), n, every)
    theta = rope_settings(hf)["rope_theta"]
    thetas = [0 if of else theta for of in whole]
    # transformers has one theta for all layers that turn.
    thetas = values_of(hf, "layer_rope_theta", (0, theta), n, thetas)
    window = None
    if "sliding_attention" in kinds:
        window = value_of(hf, "sliding_window", int, most=MOST_POSITIONS)
    return tuple(
        replace(
            full,
            window=window if of == "sliding_attention" else None,
            rope=full.rope if turns else Rope(),
        )
        for of, turns in zip(kinds, thetas)
    )


def dense_from_hf(hf: dict, layers: list[LayerConfig]) -> list[LayerConfig]:
    """Layers with experts, of which some have none."""
    dense = numbers_of(hf, "mlp_only_layers") or []
    step = value_of(hf, "decoder_sparse_step", int, 1)
    return [
        replace(layer, moe=None) if i in dense or (i + 1) % step else layer
        for i, layer in enumerate(layers)
    ]


def delta_from_hf(hf: dict) -> DeltaConfig | None:
    """hf: text_settings()'s. None for a family without recurrent layers."""
    if "linear_num_key_heads" not in DEFAULTS.get(hf["model_type"], {}):
        return None
    found = DeltaConfig(
        n_key_head=value_of(hf, "linear_num_key_heads", int, most=2**12),
        n_value_head=value_of(hf, "linear_num_value_heads", int, most=2**12),
        key_dim=value_of(hf, "linear_key_head_dim", int, most=2**10),
        value_dim=value_of(hf, "linear_value_head_dim", int, most=2**10),
        width=value_of(hf, "linear_conv_kernel_dim", int, most=8),
    )
    if found.n_value_head % found.n_key_head:
        raise ValueError(
            f"linear_num_value_heads={found.n_value_head} is no multiple of "
            f"linear_num_key_heads={found.n_key_head}"
        )
    return found


def latent_from_hf(hf: dict) -> LatentConfig | None:
    """hf: text_settings()'s. None for a family without latent attention."""
    if not has_latents(hf["model_type"]):
        return None
    q_dim = 0
    if hf["q_lora_rank"] is not None:  # null: queries have no latent
        q_dim = value_of(hf, "q_lora_rank", int)
    return LatentConfig(
        dim=value_of(hf, "kv_lora_rank", int),
        key_dim=value_of(hf, "qk_nope_head_dim", int, most=2**16),
        value_dim=value_of(hf, "v_head_dim", int, most=2**16),
        q_dim=q_dim,
        interleaved=value_of(hf, "rope_interleave", bool, False),  # null is false
    )


def latent_scale(hf: dict) -> float | None:
    """Of q k^T where the stretch of rope has mscale_all_dim: cos and sin cannot scale the part of a
    key that does not turn. None: the usual one."""
    rope = rope_settings(hf)
    m = value_of(rope, "mscale_all_dim", float, 0.0, or_zero=True)
    if rope["rope_type"] == "default" or not m:
        return None
    size = value_of(hf, "qk_nope_head_dim", int) + head_dim(hf)
    return size**-0.5 * yarn_temperature(value_of(rope, "factor", float), m) ** 2


def sigmoid_moe(hf: dict) -> MoEConfig:
    """The mixture of experts of families with latent attention. hf: text_settings()'s."""
    key = "num_local_experts" if hf.get("num_local_experts") is not None else "n_routed_experts"
    n_expert = value_of(hf, key, int, most=MOST_EXPERTS // hf["num_hidden_layers"])
    n_group = value_of(hf, "n_group", int, most=n_expert)
    if n_expert % n_group or n_expert < 2 * n_group:
        raise ValueError(
            f"n_group={n_group}: want a number that divides {key}={n_expert}, of two experts or "
            "more in a group"
        )
    n_chosen_group = value_of(hf, "topk_group", int, most=n_group)
    ffn_dim = value_of(hf, "moe_intermediate_size", int)
    n_shared = value_of(hf, "n_shared_experts", int, most=2**10, or_zero=True)
    return MoEConfig(
        n_expert=n_expert,
        n_chosen=value_of(
            hf, "num_experts_per_tok", int, most=n_expert // n_group * n_chosen_group
        ),
        ffn_dim=ffn_dim,
        normalize=value_of(hf, "norm_topk_prob", bool, False),  # null is false
        shared_dim=n_shared * ffn_dim,
        shared_gate=False,
        sigmoid=True,
        n_group=n_group,
        n_chosen_group=n_chosen_group,
        scale=value_of(hf, "routed_scaling_factor", float),
    )


def moe_from_hf(hf: dict) -> MoEConfig | None:
    """hf: text_settings()'s. None for a model without experts."""
    kind = hf["model_type"]
    gemma4 = kind == "gemma4_text"
    if "expert_files" not in FAMILIES[kind] or gemma4 and not hf.get("enable_moe_block"):
        return None
    if has_latents(kind):
        return sigmoid_moe(hf)
    named = gemma4 or hf.get("num_experts") is not None
    key = "num_experts" if named else "num_local_experts"
    n_expert = value_of(hf, key, int, most=MOST_EXPERTS // hf["num_hidden_layers"])
    return MoEConfig(
        n_expert=n_expert,
        n_chosen=value_of(
            hf, "top_k_experts" if gemma4 else "num_experts_per_tok", int, most=n_expert
        ),
        ffn_dim=value_of(
            hf,
            "moe_intermediate_size" if gemma4 or kind.startswith("qwen3") else "intermediate_size",
            int,
        ),
        normalize=kind not in ("qwen3_moe", "qwen3_next")
        or value_of(hf, "norm_topk_prob", bool, kind == "qwen3_next"),
        shared_dim=value_of(hf, "shared_expert_intermediate_size", int, 0, or_zero=True),
        bias=kind == "gpt_oss",
        clamp=(
            (value_of(hf, "swiglu_limit", float), value_of(hf, "swiglu_alpha", float))
            if kind == "gpt_oss"
            else None
        ),
        beside_dense=gemma4,
        scaled_router=gemma4,
    )


# Rotary position embeddings


def rope_settings(hf: dict, sliding: bool = False) -> dict:
    """rope_theta, rope_type and what the type needs, of the layers with or without a window. hf:
    text_settings()'s.

    Newer files have them in rope_parameters, in OLMo 3 and Gemma 3 a dictionary for each kind of
    layer. Older files have rope_theta and rope_scaling, which in these two families is not for
    layers with a window. A file may have both, as model cards tell users to add rope_scaling: then
    rope_scaling wins."""
    kind = hf["model_type"]
    default = DEFAULTS.get(kind, {}).get("rope_parameters", {})
    found = value_of(hf, "rope_parameters", dict, default)
    scaling = value_of(hf, "rope_scaling", dict, {})
    theta = hf["rope_theta"]
    by_layer = kind in BY_LAYER
    if not by_layer:
        found = scaling or found
    if found and by_layer != any(key.endswith("_attention") for key in found):
        wanted = "full_attention and sliding_attention" if by_layer else "an object for all layers"
        raise ValueError(f"rope_parameters={found!r:.60}: want {wanted}")
    if kind in GEMMA4_KINDS:
        found = value_of(found, "sliding_attention" if sliding else "full_attention", dict)
    elif by_layer and sliding:
        theta = OLMO3_THETA if kind == "olmo3" else hf["rope_local_base_freq"]
        found = value_of(found, "sliding_attention", dict, {})
    elif by_layer:
        found = value_of(found, "full_attention", dict, {}) | scaling
    rope = dict(
        rope_theta=theta,
        partial_rotary_factor=hf.get("partial_rotary_factor", 1.0),
    )
    rope |= found
    original = hf.get("original_max_position_embeddings")
    if original is not None and not by_layer:  # Phi has it beside the other settings
        rope["original_max_position_embeddings"] = original
    stretch = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "phi3" and stretch in ("su", "yarn"):  # older names
        stretch = "longrope"
    return rope | dict(rope_type=stretch)


def rope_from_hf(hf: dict, sliding: bool = False, size: int | None = None) -> Rope:
    """size: of the layer's heads, where it is not the model's."""
    size = size or head_dim(hf)
    context = value_of(hf, "max_position_embeddings", int, most=MOST_POSITIONS)
    rope = rope_settings(hf, sliding)
    check_supported(rope, dict(rope_type=tuple(STRETCH)))
    turns_parts = hf["model_type"] == "phi3" or delta_from_hf(hf)
    unread = ["default"]
    if hf["model_type"] in GEMMA4_KINDS:  # where whole heads go into the product
        unread = [of for of in STRETCH if of != "proportional"]
    if (rope["rope_type"] in unread or has_latents(hf["model_type"])) and not turns_parts:
        check_supported(rope, dict(partial_rotary_factor=(1.0,)))  # elsewhere it is not read
    original = value_of(rope, "original_max_position_embeddings", int, context, most=MOST_POSITIONS)
    rope["original_max_position_embeddings"] = original
    part = value_of(rope, "partial_rotary_factor", float, most=1)
    turned = size if rope["rope_type"] == "proportional" else int(size * part)
    theta = value_of(rope, "rope_theta", float, most=1e12)
    # To the last bit as transformers has them: at position 700 the last bit of an angle is 3e-5,
    # and Gemma 4's scores, whose scale is 1, multiply it by the size of a head.
    plain = 1 / theta ** (torch.arange(0, turned, 2).float() / turned)  # [R / 2]
    rope["stretch"] = value_of(rope, "factor", float, context / original)
    scale, *tables = STRETCH[rope["rope_type"]](plain, rope)
    frequencies, *long = [tuple(table.tolist()) for table in tables]
    growth = 0.0
    if hf["model_type"] == "ministral3":
        growth = value_of(rope, "llama_4_scaling_beta", float, 0.0, or_zero=True)
    return Rope(frequencies, scale, original, *long, q_growth=growth)


# Ways to stretch the frequencies [R / 2] for longer texts -> the scale of cos and sin, then the
# frequencies; LongRoPE's are two sets.


def llama3_rope(plain: Tensor, rope: dict) -> tuple:
    """Llama 3.1 stretches the long wavelengths, keeps the short ones and blends in between."""
    low, high = value_of(rope, "low_freq_factor", float), value_of(rope, "high_freq_factor", float)
    if low >= high:
        raise ValueError(f"low_freq_factor={low}: want less than high_freq_factor={high}")
    # Full turns within the original context.
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0, keep * plain + (1 - keep) * plain / value_of(rope, "factor", float)


def yarn_rope(plain: Tensor, rope: dict) -> tuple:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): frequencies that make beta_fast turns within
    the original context stay, those that make beta_slow are stretched, and a ramp lies between. The
    scale sharpens attention."""
    original, pairs = rope["original_max_position_embeddings"], len(plain)
    factor = rope["stretch"]

    def place(turns: float) -> float:
        """The index of the frequency that makes so many turns."""
        return pairs * math.log(original / (2 * math.pi * turns)) / math.log(rope["rope_theta"])

    # 0 stands for a missing value here, and in mscale: files have both.
    low = place(value_of(rope, "beta_fast", float, None, or_zero=True) or 32)
    high = place(value_of(rope, "beta_slow", float, None, or_zero=True) or 1)
    if value_of(rope, "truncate", bool, "truncate" not in rope):  # null is false
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs) - low) / (high - low or 0.001)).clamp(0, 1)

    temperature = partial(yarn_temperature, factor)
    scale = value_of(rope, "attention_factor", float, None)
    if scale is None:
        m, m_all = (
            value_of(rope, key, float, None, or_zero=True) for key in ("mscale", "mscale_all_dim")
        )
        scale = temperature(m) / temperature(m_all) if m and m_all else temperature(1)
    return scale, ramp * plain / factor + (1 - ramp) * plain


def yarn_temperature(factor: float, m: float) -> float:
    """What q and k are each multiplied by, where m is 1: arXiv 2309.00071, section 3.4."""
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def longrope(plain: Tensor, rope: dict) -> tuple:
    """LongRoPE (arXiv 2402.13753): a factor for each frequency, others for texts beyond the
    original context."""
    factor, original, pairs = rope["stretch"], rope["original_max_position_embeddings"], len(plain)

    def factors(key: str) -> Tensor:
        found = value_of(rope, key, list, [])
        if len(found) != pairs or not all(type(of) in (int, float) and of > 0 for of in found):
            raise ValueError(
                f"{key}={found!r:.60}: want {pairs} numbers above 0, one for each pair of a head"
            )
        return torch.tensor(found)

    scale = value_of(rope, "attention_factor", float, None)
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return scale, *(plain / factors(key) for key in ("short_factor", "long_factor"))


def proportional_rope(plain: Tensor, rope: dict) -> tuple:
    """Gemma 4's: of all pairs of a head the first part turns, as it would in whole heads."""
    n = int(rope["partial_rotary_factor"] * 2 * len(plain) // 2)
    turned = torch.arange(len(plain)) < n
    return 1.0, torch.where(turned, plain / value_of(rope, "factor", float, 1.0), 0.0)


STRETCH = dict(
    default=lambda plain, rope: (1.0, plain),
    linear=lambda plain, rope: (1.0, plain / value_of(rope, "factor", float)),
    llama3=llama3_rope,
    yarn=yarn_rope,
    longrope=longrope,
    proportional=proportional_rope,
)

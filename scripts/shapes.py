"""
The shapes of public models, as their config.json files have them: what
benchmark.py measures with random weights, and tune.py chooses kernels for. This
lists them:

    python scripts/shapes.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from hub.families import config_from_hf
from model import Config, Experts, Transformer
from quantize import MXFP4, QuantizedExperts, replace_layers
from tp import Shard

LLAMA31 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
OLMO3_YARN = dict(
    rope_type="yarn",
    factor=8.0,
    original_max_position_embeddings=8192,
    beta_fast=32,
    beta_slow=1,
    attention_factor=1.2079441541679836,
)
GPT_OSS = dict(head_dim=64, sliding_window=128, num_experts_per_tok=4)
GEMMA_LINEAR = dict(rope_type="linear", factor=8.0)
# Where these models' configs come from has no more digits than the model has use for: the factors
# change no speed.
PHI_LONG = dict(type="longrope", short_factor=[1.0] * 48, long_factor=[1.0] * 48)


def shape(
    kind: str,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    context: int,
    theta: float = 1e4,
    **more,
) -> Config:
    return config_from_hf(
        dict(
            model_type=kind,
            hidden_size=dim,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=ffn,
            vocab_size=vocab,
            max_position_embeddings=context,
            rope_theta=theta,
            rms_norm_eps=1e-5,
        )
        | more
    )


# Qwen3.5's key heads; its value heads differ.
RECURRENT = dict(
    head_dim=256,
    rms_norm_eps=1e-6,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    partial_rotary_factor=0.25,
)
QWEN35 = 248320, 262144, 1e7  # vocabulary, context, theta
EXPERTS = dict(moe_intermediate_size=512, shared_expert_intermediate_size=512)
GEMMA4 = dict(head_dim=256, rms_norm_eps=1e-6, final_logit_softcapping=30.0)
GEMMA4_LARGE = GEMMA4 | dict(
    sliding_window=1024, attention_k_eq_v=True, hidden_size_per_layer_input=0
)

MXFP4_SHAPES = "gpt-oss-20b", "gpt-oss-120b"  # whose experts are published so
SHAPES = {  # kind, dim, layers, heads, kv heads, ffn dim, vocabulary, context
    "llama-2-7b": shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": shape("llama", 5120, 40, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": shape("llama", 8192, 80, 64, 8, 28672, 32000, 4096),
    "llama-3.1-8b": shape(
        "llama", 4096, 32, 32, 8, 14336, 128256, 131072, 5e5, rope_scaling=LLAMA31
    ),
    "llama-3.1-70b": shape(
        "llama", 8192, 80, 64, 8, 28672, 128256, 131072, 5e5, rope_scaling=LLAMA31
    ),
    "llama-3.2-1b": shape(
        "llama",
        2048,
        16,
        32,
        8,
        8192,
        128256,
        131072,
        5e5,
        tie_word_embeddings=True,
        rope_scaling=LLAMA31 | dict(factor=32.0),
    ),
    "qwen3-8b": shape(
        "qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, 1e6, head_dim=128, rms_norm_eps=1e-6
    ),
    "mistral-7b": shape("mistral", 4096, 32, 32, 8, 14336, 32000, 32768, sliding_window=4096),
    "smollm2-135m": shape("llama", 576, 30, 9, 3, 1536, 49152, 8192, 1e5, tie_word_embeddings=True),
    "smollm3-3b": shape("smollm3", 2048, 36, 16, 4, 11008, 128256, 65536, 5e6, rms_norm_eps=1e-6),
    "phi-4": shape("phi3", 5120, 40, 40, 10, 17920, 100352, 16384, 2.5e5),
    "phi-4-mini": shape(
        "phi3",
        3072,
        32,
        24,
        8,
        8192,
        200064,
        131072,
        tie_word_embeddings=True,
        rope_scaling=PHI_LONG,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
    ),
    "granite-3.3-8b": shape(
        "granite",
        4096,
        40,
        32,
        8,
        12800,
        49159,
        131072,
        1e7,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=16.0,
    ),
    "olmo-3-7b": shape(
        "olmo3",
        4096,
        32,
        32,
        32,
        11008,
        100278,
        65536,
        5e5,
        rms_norm_eps=1e-6,
        rope_scaling=OLMO3_YARN,
    ),
    "gemma-3-4b": shape(
        "gemma3_text",
        2560,
        34,
        8,
        4,
        10240,
        262208,
        131072,
        1e6,
        rms_norm_eps=1e-6,
        sliding_window=1024,
        rope_scaling=GEMMA_LINEAR,
    ),
    "gemma-3-12b": shape(
        "gemma3_text",
        3840,
        48,
        16,
        8,
        15360,
        262208,
        131072,
        1e6,
        rms_norm_eps=1e-6,
        sliding_window=1024,
        rope_scaling=GEMMA_LINEAR,
    ),
    "gemma-4-31b": shape(
        "gemma4_text",
        5376,
        60,
        32,
        16,
        21504,
        262144,
        262144,
        num_global_key_value_heads=4,
        **GEMMA4_LARGE,
    ),
    "gemma-4-26b-a4b": shape(
        "gemma4_text",
        2816,
        30,
        16,
        8,
        2112,
        262144,
        262144,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        **GEMMA4_LARGE,
    ),
    "gemma-4-e4b": shape(
        "gemma4_text", 2560, 42, 8, 2, 10240, 262144, 131072, num_kv_shared_layers=18, **GEMMA4
    ),
    "muse-glimmer-30b": shape(
        "muse_glimmer_text", 6656, 52, 32, 2, 19968, 202048, 131072, head_dim=128
    ),
    "mixtral-8x7b": shape(
        "mixtral",
        4096,
        32,
        32,
        8,
        14336,
        32000,
        32768,
        1e6,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-30b-a3b": shape(
        "qwen3_moe",
        2048,
        48,
        32,
        4,
        6144,
        151936,
        40960,
        1e6,
        head_dim=128,
        rms_norm_eps=1e-6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "qwen3.5-4b": shape(
        "qwen3_5_text",
        2560,
        32,
        16,
        4,
        9216,
        *QWEN35,
        linear_num_value_heads=32,
        tie_word_embeddings=True,
        **RECURRENT,
    ),
    "qwen3.5-9b": shape(
        "qwen3_5_text", 4096, 32, 16, 4, 12288, *QWEN35, linear_num_value_heads=32, **RECURRENT
    ),
    "qwen3.5-27b": shape(
        "qwen3_5_text", 5120, 64, 24, 4, 17408, *QWEN35, linear_num_value_heads=48, **RECURRENT
    ),
    "qwen3.5-35b-a3b": shape(
        "qwen3_5_moe_text",
        2048,
        40,
        16,
        2,
        512,
        *QWEN35,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        **RECURRENT,
        **EXPERTS,
    ),
    "qwen3-next-80b-a3b": shape(
        "qwen3_next",
        2048,
        48,
        16,
        2,
        5120,
        151936,
        262144,
        1e7,
        linear_num_value_heads=32,
        num_experts=512,
        num_experts_per_tok=10,
        **RECURRENT,
        **EXPERTS,
    ),
    "glm-4.7-flash": shape(
        "glm4_moe_lite",
        2048,
        47,
        20,
        20,
        10240,
        154880,
        202752,
        1e6,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
    ),
    "gpt-oss-20b": shape(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, 131072, 1.5e5, num_local_experts=32, **GPT_OSS
    ),
    "gpt-oss-120b": shape(
        "gpt_oss", 2880, 36, 64, 8, 2880, 201088, 131072, 1.5e5, num_local_experts=128, **GPT_OSS
    ),
}


# Random weights


def random_model(
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard | None = None,
    mxfp4: bool = False,
) -> Transformer:
    """shard: a rank's part. mxfp4: the experts have such codes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # norms that are fp32 stay so
    try:
        with torch.device("meta"):
            model = shard.model() if shard else Transformer(config)
            if mxfp4:
                replace_layers(model, Experts, empty_mxfp4)
    finally:
        torch.set_default_dtype(before)
    return fill(model, device)


def fill(model: Transformer, device: torch.device) -> Transformer:
    """Normal weights of a scale that keeps activations near 1; norms are 1."""
    model = model.to_empty(device=device).requires_grad_(False)
    if model.config.tied:
        model.head.weight = model.embed.weight
    for weight in model.parameters():
        if weight.dtype == torch.int32:
            weight.random_(-(2**31), 2**31 - 1)
        elif weight.dtype == torch.uint8:
            weight.fill_(120)  # 2 ** -7, for numbers whose mean square is 7
        elif weight.dim() == 1:
            weight.fill_(1)
        else:
            weight.normal_(std=0.02)
    return model


def empty_mxfp4(layer: Experts) -> QuantizedExperts:
    X, N, K = layer.weight.shape
    qweight = torch.empty(X, N, K // 8, dtype=torch.int32)
    scales = torch.empty(X, N, K // 32, dtype=torch.uint8)
    return QuantizedExperts(qweight, scales, None, MXFP4, layer.bias)


def main() -> None:
    from cli.options import Parser
    from hub.checkpoint import count_parameters

    Parser(__doc__).parse_args()
    for name, config in SHAPES.items():
        print(f"{name:16} {count_parameters(config) / 1e9:7.2f} billion parameters")


if __name__ == "__main__":
    from cli.errors import report_errors

    report_errors(main)

"""
Write tests/golden: a tiny random model of every family as transformers saves it, with the logits
and greedy tokens that transformers gives for it. Run once; transformers is needed here and in
make_chat_golden.py alone. Written with transformers 5.24 (the first eight families with 5.23) and
torch 2.13.

    pip install transformers==5.24 && python tests/makers/make_golden.py [FAMILY ...]
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerConfig,
    MuseGlimmerTextConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

OUT = Path(__file__).parents[1] / "golden"
PROMPT_LENGTHS, NEW_TOKENS = (13, 1, 6), 24
# With LongRoPE transformers changes the frequencies where a text reaches the original context of
# 32: no text does.
COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
# Frequencies that differ enough for a wrong one to be seen.
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    original_max_position_embeddings=32,
    short_factor=[1.0, 1.1, 1.3, 1.6],
    long_factor=[1.0, 1.5, 3.0, 4.0],
)
SIX = dict(short_factor=[1.0, 1.1, 1.3, 1.6, 1.7, 1.8], long_factor=[1.0, 1.5, 2.0, 3.0, 3.5, 4.0])
MINISTRAL = YARN | dict(
    factor=16.0,
    original_max_position_embeddings=8,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
TIED = dict(tie_word_embeddings=True)
# Keys and values of recurrent layers differ in size, and half of attention's heads turns, where a
# missing key means a quarter.
RECURRENT = COMMON | dict(
    hidden_size=24,
    intermediate_size=40,
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
)
MIXTURE = dict(
    moe_intermediate_size=16,
    shared_expert_intermediate_size=20,
    num_experts=6,
    num_experts_per_tok=2,
)
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4_ROPE = dict(
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
)
# Full layers have larger heads and fewer of keys, which are the values, too.
GEMMA4 = COMMON | dict(
    num_hidden_layers=4,
    layer_types=[SLIDING, FULL, SLIDING, FULL],
    head_dim=8,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=5,
    rope_parameters=GEMMA4_ROPE,
    hidden_size_per_layer_input=0,
)
GEMMA4_MOE = dict(enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=24)
# The last two layers read the keys and values of layers 2 and 1.
GEMMA4_E = dict(
    num_hidden_layers=5,
    layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=12,
    vocab_size_per_layer_input=96,
)
MUSE = COMMON | dict(
    num_hidden_layers=6,
    head_dim=16,
    sliding_window=5,
    qk_scale_factor=2.5,
    output_multiplier=0.3,
    final_logit_softcapping=2.0,
    post_norm_eps=0.1,
)
# Sizes differ, so that none can stand for another, and so does eps from that of the latents' norms.
LATENT = COMMON | dict(
    rms_norm_eps=1e-3,
    num_key_value_heads=4,
    num_hidden_layers=3,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    moe_intermediate_size=16,
    n_routed_experts=6,
    num_experts_per_tok=2,
)
# Of an original context that texts exceed.
DEEPSEEK_YARN = YARN | dict(
    original_max_position_embeddings=16, factor=8.0, mscale=1.0, mscale_all_dim=1.0
)
THREE = ["linear_attention"] * 3 + ["full_attention"]
FAMILIES = {
    "llama2": LlamaConfig(**COMMON | dict(num_key_value_heads=4)),
    "llama3": LlamaConfig(**COMMON, rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
    "llama3.1": LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "llama3.2": LlamaConfig(**COMMON | TIED, rope_parameters=LLAMA3 | dict(factor=32.0)),
    "mistral": MistralConfig(**COMMON, sliding_window=5, head_dim=16),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "smollm2": LlamaConfig(
        **COMMON | TIED | dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    ),
    "qwen2-yarn": Qwen2Config(
        **COMMON, rope_parameters=YARN | dict(truncate=False, mscale=0.7, mscale_all_dim=0.3)
    ),
    "smollm3": SmolLM3Config(**COMMON | TIED | dict(num_hidden_layers=4)),
    "phi3": Phi3Config(**COMMON, sliding_window=5),
    "phi3-long": Phi3Config(
        **COMMON, original_max_position_embeddings=32, rope_parameters=LONGROPE
    ),
    "phi4-mini": Phi3Config(
        **COMMON | TIED | dict(num_attention_heads=2, num_key_value_heads=1),
        original_max_position_embeddings=32,
        rope_parameters=LONGROPE | SIX | dict(partial_rotary_factor=0.75),
    ),
    "granite": GraniteConfig(
        **COMMON | TIED,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=4.0,
    ),
    "ministral3": Ministral3Config(**COMMON, head_dim=16, rope_parameters=MINISTRAL),
    "olmo2": Olmo2Config(**COMMON),
    "olmo3": Olmo3Config(
        **COMMON | dict(num_hidden_layers=4),
        sliding_window=5,
        rope_parameters=dict(
            full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=10000.0)
        ),
    ),
    "gemma3": Gemma3TextConfig(
        **COMMON | TIED | dict(num_hidden_layers=7),
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=24,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **COMMON | dict(num_hidden_layers=4),
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        norm_topk_prob=False,
    ),
    "gpt-oss": GptOssConfig(
        **COMMON | dict(hidden_size=40, intermediate_size=32),
        head_dim=16,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
        swiglu_alpha=1.5,
        rope_parameters=YARN | dict(rope_theta=150000.0, truncate=False),
    ),
    "qwen3.5": Qwen3_5TextConfig(**RECURRENT | TIED | dict(linear_num_value_heads=2)),
    "qwen3.5-thrice": Qwen3_5TextConfig(
        **RECURRENT | dict(linear_num_value_heads=6, num_hidden_layers=4, layer_types=THREE)
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**RECURRENT | MIXTURE),
    "qwen3-next": Qwen3NextConfig(
        **RECURRENT
        | MIXTURE
        | dict(num_hidden_layers=4, layer_types=THREE, mlp_only_layers=[1], norm_topk_prob=True)
    ),
    "gemma4": Gemma4TextConfig(**GEMMA4, final_logit_softcapping=3.0),
    "gemma4-moe": Gemma4TextConfig(**GEMMA4 | GEMMA4_MOE | dict(attention_k_eq_v=False)),
    "gemma4-e": Gemma4TextConfig(
        **GEMMA4 | GEMMA4_E | TIED | dict(attention_k_eq_v=False),
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
    ),
    "gemma4-all": Gemma4TextConfig(
        **GEMMA4
        | GEMMA4_MOE
        | GEMMA4_E
        | dict(
            num_kv_shared_layers=3,
            rope_parameters=GEMMA4_ROPE
            | dict(full_attention=GEMMA4_ROPE["full_attention"] | dict(factor=4.0)),
        ),
    ),
    "gemma4-unified": Gemma4UnifiedTextConfig(
        **{key: of for key, of in GEMMA4.items() if key != "hidden_size_per_layer_input"},
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "muse": MuseGlimmerTextConfig(**MUSE),
    # No layer's window goes with its rope.
    "muse-tied": MuseGlimmerTextConfig(
        **MUSE | TIED | dict(num_hidden_layers=4),
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        layer_rope_theta=[1e4, 0, 1e4, 0],
        rope_parameters=YARN | dict(truncate=False),
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(**LATENT),
    "glm4-moe-lite-straight": Glm4MoeLiteConfig(
        **LATENT
        | TIED
        | dict(q_lora_rank=None, rope_interleave=False, n_shared_experts=2, norm_topk_prob=False),
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "deepseek-v3": DeepseekV3Config(
        **LATENT | dict(n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2),
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek-v3-mscale": DeepseekV3Config(
        **LATENT | dict(q_lora_rank=None, num_hidden_layers=2),
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        rope_parameters=DEEPSEEK_YARN | dict(mscale=0.7, mscale_all_dim=0.4),
    ),
    "ministral": MinistralConfig(
        **COMMON | dict(num_hidden_layers=4),
        head_dim=16,
        sliding_window=5,
        layer_types=["full_attention"] + ["sliding_attention"] * 3,
    ),
}


def new_model(config) -> PreTrainedModel:
    if config.model_type == "muse_glimmer_text":  # transformers has the whole alone
        seeing = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
        whole = MuseGlimmerConfig(text_config=config, vision_config=seeing)
        whole.tie_word_embeddings = config.tie_word_embeddings
        return AutoModelForImageTextToText.from_config(
            whole, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def randomize(model: Module) -> Module:
    for name, weight in model.named_parameters():  # every one matters: no ones, no zeros
        weight.copy_(
            1 + 0.3 * torch.randn_like(weight)
            if "norm" in name
            else 0.25 * torch.randn_like(weight)
        )
        if name.endswith("A_log"):  # states that soon forget, and others that do not
            weight.copy_(torch.linspace(-5, 0.5, len(weight)))
        if name.endswith("scale"):  # of Gemma 4's router, whose choice is to be clear
            weight.copy_(4 + torch.randn_like(weight))
        weight.copy_(weight.bfloat16())  # the files hold bf16
    for name, number in model.named_buffers():
        if name.endswith("layer_scalar"):
            number.copy_((1 + 0.3 * torch.randn_like(number)).bfloat16())
    for name, correction in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # so that it decides, now and then
            correction.copy_((0.2 * torch.randn_like(correction)).bfloat16())
    return model


def random_model(config) -> PreTrainedModel:
    return randomize(new_model(config))


def greedy(model: PreTrainedModel, prompt_length: int, new_tokens: int) -> tuple[Tensor, Tensor]:
    """A random prompt and what follows -> tokens [T] and logits [T, V]."""
    tokens = torch.randint(model.config.get_text_config().vocab_size, (1, prompt_length))
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[0], model(tokens).logits[0].contiguous()


def save_text_part(model: PreTrainedModel, directory: Path) -> None:
    """Of a model that also sees, as transformers would save it by itself."""
    config = model.config.get_text_config()
    config.save_pretrained(directory)
    held = {
        name.replace("language_model.", "", 1): of.contiguous()
        for name, of in model.state_dict().items()
        if "language_model." in name or name == "lm_head.weight" and not config.tie_word_embeddings
    }
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def main() -> None:
    for seed, (family, config) in enumerate(FAMILIES.items()):
        if family not in (sys.argv[1:] or FAMILIES):
            continue
        torch.manual_seed(seed)
        model, golden = random_model(config), {}
        # Beyond the original context, and beyond a block of a recurrent layer.
        long = (config.rope_parameters or {}).get("rope_type") == "longrope"
        long = long or "linear_attention" in (getattr(config, "layer_types", None) or ())
        for row, length in enumerate((40, 1, 6) if long else PROMPT_LENGTHS):
            golden[f"tokens.{row}"], golden[f"logits.{row}"] = greedy(model, length, NEW_TOKENS)
        if family.startswith("muse"):
            save_text_part(model.bfloat16(), OUT / family)
        else:
            model.bfloat16().save_pretrained(
                OUT / family, max_shard_size="20kB" if family == "llama3" else "1GB"
            )
        save_file(golden, OUT / family / "golden.safetensors")


if __name__ == "__main__":
    main()

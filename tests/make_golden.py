"""
Write tests/golden: a tiny random model of every family as transformers saves it, with the logits and greedy tokens that
transformers gives for it. Run once; transformers is needed here alone. Written with transformers 5.23 and torch 2.13.

    pip install transformers==5.23 && python tests/make_golden.py
"""
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config,
                          Qwen3Config)

OUT = Path(__file__).parent / "golden"
PROMPT_LENGTHS, NEW_TOKENS = (13, 1, 6), 24
COMMON = dict(vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
              bos_token_id=1, eos_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
FAMILIES = {
    "llama2": LlamaConfig(**COMMON | dict(num_key_value_heads=4)),
    "llama3": LlamaConfig(**COMMON, rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
    "llama3.1": LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "llama3.2": LlamaConfig(**COMMON | dict(tie_word_embeddings=True), rope_parameters=LLAMA3 | dict(factor=32.0)),
    "mistral": MistralConfig(**COMMON, sliding_window=5, head_dim=16),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "smollm2": LlamaConfig(**COMMON | dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3,
                                           tie_word_embeddings=True)),
}


def new_model(config) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def random_model(config) -> PreTrainedModel:
    model = new_model(config)
    for name, weight in model.named_parameters():  # every one matters: no ones, no zeros
        weight.copy_(1 + 0.3 * torch.randn_like(weight) if "norm" in name else 0.25 * torch.randn_like(weight))
        weight.copy_(weight.bfloat16())  # the files hold bf16
    return model


def greedy(model: PreTrainedModel, prompt_length: int, new_tokens: int) -> tuple[Tensor, Tensor]:
    """A random prompt and what follows -> tokens [T] and logits [T, V]."""
    tokens = torch.randint(model.config.vocab_size, (1, prompt_length))
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[0], model(tokens).logits[0].contiguous()


@torch.no_grad()
def main() -> None:
    for seed, (family, config) in enumerate(FAMILIES.items()):
        torch.manual_seed(seed)
        model, golden = random_model(config), {}
        for row, length in enumerate(PROMPT_LENGTHS):
            golden[f"tokens.{row}"], golden[f"logits.{row}"] = greedy(model, length, NEW_TOKENS)
        model.bfloat16().save_pretrained(OUT / family, max_shard_size="20kB" if family == "llama3" else "1GB")
        save_file(golden, OUT / family / "golden.safetensors")
        print(family, golden["tokens.1"].tolist())


if __name__ == "__main__":
    main()

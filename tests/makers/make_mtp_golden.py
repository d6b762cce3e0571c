"""
Write tests/mtp: tiny random models of Qwen3.5, its mixture and Qwen3-Next with the layer that
drafts (`mtp.*`), and of GLM-4.7-Flash and DeepSeek-V3 with the layer behind the last, and the logits
that it gives, by the modules of transformers put together as vLLM's qwen3_5_mtp.py does (commit
01d9980), and glm4_moe_lite_mtp.py (055e47c). One departure: vLLM takes zeros for the embedding at
position 0, SGLang and transformers do not.

    pip install transformers==5.24 && python tests/makers/make_mtp_golden.py [MODEL ...]
"""

import sys

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

OUT = Path(__file__).parents[1] / "mtp"
TEXT, DRAFTED = 24, 4  # tokens
COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    full_attention_interval=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
)
MIXTURE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
LATENT = dict(
    num_key_value_heads=4,
    num_hidden_layers=3,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    rms_norm_eps=1e-5,
)
PLAIN = {key: of for key, of in COMMON.items() if "linear_" not in key and key != "head_dim"}
del PLAIN["full_attention_interval"]
MODELS = {
    "qwen3.5": Qwen3_5TextConfig(
        **COMMON | dict(tie_word_embeddings=True), mtp_num_hidden_layers=1
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**COMMON | MIXTURE, mtp_num_hidden_layers=1),
    "qwen3-next": Qwen3NextConfig(**COMMON | MIXTURE),
    "glm4-moe-lite": Glm4MoeLiteConfig(**PLAIN | LATENT, num_nextn_predict_layers=1),
    "deepseek-v3": DeepseekV3Config(
        **PLAIN | LATENT | dict(q_lora_rank=None, n_routed_experts=8),
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
}


class Predictor(nn.Module):
    """Its parameters have the names of the files, behind `mtp.`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        config, layers = model.config, model.model.layers
        i = config.layer_types.index("full_attention")
        norm = type(model.model.norm)
        self.layers = nn.ModuleList([type(layers[i])(config, i)])
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            setattr(self, name, norm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, model: nn.Module, tokens: Tensor, states: Tensor) -> Tensor:
        """tokens [n], states [n, D]: of each pair -> states behind the norm [n, D]"""
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(tokens))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(states)), dim=-1))[None]
        n = len(tokens)
        turns = model.model.rotary_emb(x, torch.arange(n)[None])
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        x = self.layers[0](x, position_embeddings=turns, attention_mask=mask)
        x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)[0]


class LayerBehind(nn.Module):
    """Predictor as DeepSeek-V3 has it. Its states are those in front of its norm."""

    def __init__(self, model: nn.Module):
        super().__init__()
        config, layer = model.config, model.model.layers[-1]
        norm = type(model.model.norm)
        self.block = type(layer)(config, config.num_hidden_layers - 1)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("enorm", "hnorm"):
            setattr(self, name, norm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, model: nn.Module, tokens: Tensor, states: Tensor) -> Tensor:
        embedded = self.enorm(model.model.embed_tokens(tokens))
        x = self.eh_proj(torch.cat((embedded, self.hnorm(states)), dim=-1))[None]
        n = len(tokens)
        turns = model.model.rotary_emb(x, torch.arange(n)[None])
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        return self.block(x, position_embeddings=turns, attention_mask=mask)[0]

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """Its tensors, and copies of the model's, by the names of the files."""
        found = {name.removeprefix("block."): of for name, of in self.state_dict().items()}
        found |= separate(found)
        found["embed_tokens.weight"] = model.model.embed_tokens.weight.data
        found["shared_head.head.weight"] = model.lm_head.weight.data
        prefix = f"model.layers.{model.config.num_hidden_layers}"
        return {f"{prefix}.{name}": tensor for name, tensor in found.items()}


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes the experts, which are one tensor, out -> each by itself."""
    gate_up = tensors.pop("mlp.experts.gate_up_proj")
    down = tensors.pop("mlp.experts.down_proj")
    found = {}
    for x in range(len(down)):
        gate, up = gate_up[x].chunk(2)
        for part, matrix in dict(gate=gate, up=up, down=down[x]).items():
            found[f"mlp.experts.{x}.{part}_proj.weight"] = matrix
    return found


def randomize(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_((0.2 * torch.randn_like(buffer)).bfloat16())
    for name, parameter in module.named_parameters():
        parameter.data = (
            torch.randn(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5)
            if parameter.dim() > 1
            else torch.randn(parameter.shape) * 0.3
        )
        parameter.data = parameter.data.bfloat16().float()


@torch.no_grad()
def main() -> None:
    for seed, (name, config) in enumerate(MODELS.items()):
        if name not in (sys.argv[1:] or MODELS):
            continue
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float().eval()
        behind = hasattr(config, "kv_lora_rank")
        predictor = (LayerBehind if behind else Predictor)(model).float().eval()
        randomize(model)
        randomize(predictor)
        tokens = torch.randint(config.vocab_size, (TEXT,))
        # Behind the final norm.
        states = model.model(tokens[None]).last_hidden_state[0]
        logits = []  # behind text of 1, 2 ... tokens: of each the drafted ones
        for n in range(1, TEXT):
            read, seen, found = tokens[1 : n + 1], states[:n], []
            for _ in range(DRAFTED):
                own = predictor(model, read, seen)[-1:]
                found.append(model.lm_head(predictor.shared_head.norm(own) if behind else own)[0])
                read = torch.cat((read, found[-1].argmax()[None]))
                seen = torch.cat((seen, own))
            logits.append(torch.stack(found))
        out = OUT / name
        model.config.architectures = None
        model.bfloat16().save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        from safetensors.torch import load_file

        held = load_file(out / "model.safetensors")
        own = {f"mtp.{key}": tensor for key, tensor in predictor.state_dict().items()}
        if behind:
            own = predictor.named(model)
        held |= {key: tensor.bfloat16().contiguous() for key, tensor in own.items()}
        save_file(held, out / "model.safetensors")
        save_file(dict(tokens=tokens, logits=torch.stack(logits)), out / "golden.safetensors")


if __name__ == "__main__":
    main()

"""
Write tests/mtp: tiny random models of Qwen3.5, its mixture and Qwen3-Next with the layer that
drafts (`mtp.*`), and the logits that it gives, by the modules of transformers put together as
vLLM's qwen3_5_mtp.py does (commit 01d9980): transformers itself leaves the layer out.

    pip install transformers==5.24 && python tests/makers/make_mtp_golden.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
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
MODELS = {
    "qwen3.5": Qwen3_5TextConfig(
        **COMMON | dict(tie_word_embeddings=True), mtp_num_hidden_layers=1
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**COMMON | MIXTURE, mtp_num_hidden_layers=1),
    "qwen3-next": Qwen3NextConfig(**COMMON | MIXTURE),
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


def randomize(module: nn.Module) -> None:
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
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float().eval()
        predictor = Predictor(model).float().eval()
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
                found.append(model.lm_head(own)[0])
                read = torch.cat((read, found[-1].argmax()[None]))
                seen = torch.cat((seen, own))
            logits.append(torch.stack(found))
        out = OUT / name
        model.config.architectures = None
        model.bfloat16().save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        from safetensors.torch import load_file

        held = load_file(out / "model.safetensors")
        held |= {
            f"mtp.{key}": tensor.bfloat16().contiguous()
            for key, tensor in predictor.state_dict().items()
        }
        save_file(held, out / "model.safetensors")
        save_file(dict(tokens=tokens, logits=torch.stack(logits)), out / "golden.safetensors")


if __name__ == "__main__":
    main()

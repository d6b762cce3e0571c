"""
Write tests/eagle: tiny random EAGLE-3 heads in both published layouts, with the logits that the
speculators package gives for five drafted tokens, one after the other. Run once, in an environment
of its own. Written with speculators 0.9.0, transformers 5.19 and torch 2.14.

    pip install speculators==0.9.0 && python tests/makers/make_eagle_golden.py
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from make_golden import randomize

OUT = Path(__file__).parents[1] / "eagle"
V, DRAFT_V, D, PAIRS, DRAFTED = 96, 40, 32, 14, 5
COMMON = dict(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=56,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
HEADS = {  # the layers' config and the head's own options
    "authors": (LlamaConfig(**COMMON, num_hidden_layers=1), dict()),
    "authors-norms": (
        LlamaConfig(**COMMON, num_hidden_layers=1),
        dict(
            norm_before_fc=True, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 3]
        ),
    ),
    "speculators": (
        Qwen3Config(
            **COMMON,
            num_hidden_layers=2,
            sliding_window=5,
            use_sliding_window=True,
            layer_types=["full_attention", "sliding_attention"],
        ),
        dict(fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[0, 2, 4]),
    ),
}


def random_head(layers: LlamaConfig | Qwen3Config, options: dict) -> Eagle3DraftModel:
    layers._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=DRAFTED)
    whole = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[proposal],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=DRAFT_V,
        speculators_config=whole,
        **options,
    )
    head = Eagle3DraftModel(config).float().eval()
    known = torch.randperm(V)[:DRAFT_V].sort().values
    head.load_vocab_mappings(
        torch.zeros(V, dtype=torch.bool).index_fill(0, known, True), known - torch.arange(DRAFT_V)
    )
    return randomize(head)


def drafted_logits(head: Eagle3DraftModel, features: Tensor, tokens: Tensor) -> Tensor:
    """[DRAFTED, PAIRS, draft's V]: behind each pair, and behind as many of the next tokens as were
    drafted since.

    The package's forward returns no logits."""
    seen = []
    head.lm_head.register_forward_hook(lambda module, inputs, out: seen.append(out[0]))
    head(features[None], tokens[None], torch.zeros_like(tokens)[None], ttt_steps=DRAFTED)
    return torch.stack(seen)


def weights_of(head: Eagle3DraftModel, authors: bool) -> dict[str, Tensor]:
    held = {}
    for name, tensor in head.state_dict().items():
        if not name.startswith("verifier_"):
            name = name.replace("layers.0.", "midlayer.") if authors else name
            held[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    return held


@torch.no_grad()
def main() -> None:
    for seed, (name, (layers, options)) in enumerate(HEADS.items()):
        torch.manual_seed(seed)
        head, authors = random_head(layers, options), name.startswith("authors")
        n = len(options.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5]))
        features, tokens = torch.randn(PAIRS, n * D), torch.randint(V, (PAIRS,))
        out = OUT / name
        out.mkdir(parents=True, exist_ok=True)
        if authors:
            config = (
                dict(
                    architectures=["LlamaForCausalLMEagle3"],
                    model_type="llama",
                    hidden_act="silu",
                    num_hidden_layers=1,
                    draft_vocab_size=DRAFT_V,
                )
                | COMMON
                | options
            )
        else:
            config = json.loads(head.config.to_json_string(use_diff=True))
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights_of(head, authors), out / "model.safetensors")
        save_file(
            dict(features=features, tokens=tokens, logits=drafted_logits(head, features, tokens)),
            out / "golden.safetensors",
        )


if __name__ == "__main__":
    main()

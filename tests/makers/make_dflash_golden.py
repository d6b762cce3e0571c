"""
Write tests/dflash: tiny random DFlash drafts, with the logits that their authors' code gives
(https://github.com/z-lab/dflash, dflash/model.py of commit 44947fb), in fp32. What is newer in it
(commit 1012959) is done here: masks of layers with a window, and what config.json may say of the
embeddings and of the logits. Of DFlash 2 the newer code itself is wanted.

    pip install transformers==5.24 && git clone https://github.com/z-lab/dflash
    PYTHONPATH=dflash python tests/makers/make_dflash_golden.py
"""

import json
from pathlib import Path

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

OUT = Path(__file__).parents[1] / "dflash"
V, D, TARGET_LAYERS = 96, 32, 8
COMMON = dict(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
    num_target_layers=TARGET_LAYERS,
    block_size=8,
)
WINDOWED = dict(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=6,
    use_sliding_window=True,
    max_window_layers=0,
)
IDS = dict(target_layer_ids=[1, 3, 6], mask_token_id=95)
DRAFTS = {
    "plain": COMMON | dict(dflash_config=IDS),
    "windowed": COMMON | WINDOWED | dict(dflash_config=IDS),
    "windowed-not-causal": COMMON
    | WINDOWED
    | dict(
        is_causal=False,
        dflash_config=IDS
        | dict(output_multiplier=0.5, input_embedding_scale=2.0, final_logit_softcapping=3.0),
    ),
}
SECOND = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=5)
DRAFTS["second"] = COMMON | WINDOWED | dict(is_causal=False, dflash_config=IDS | SECOND)
# gpt-oss-20b's and 120b's files: biases, and the target's kind and rope.
YARN = dict(
    rope_type="yarn",
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=32,
)
DRAFTS["gpt-oss"] = COMMON | dict(
    attention_bias=True, rope_theta=150000, rope_scaling=YARN, dflash_config=IDS
)
# Tokens of context that come before each block, and tokens of the block.
STEPS = (9, 8), (1, 8), (5, 3), (8, 8)


def watch(layer: nn.Module, causal: bool | None, seen: list[Tensor]) -> None:
    """Gives a layer's attention its mask, by the positions that are seen."""
    window = layer.self_attn.sliding_window
    causal = window is not None if causal is None else causal

    def masked(_, args, kwargs):
        ends, size = len(seen[0]), kwargs["hidden_states"].shape[1]
        key = torch.arange(ends)
        query = key[-size:, None]
        mask = torch.ones(size, ends, dtype=torch.bool)
        if causal:
            mask &= key <= query
        if window:
            mask &= (query - key).abs() < window
        return args, kwargs | dict(attention_mask=mask[None, None])

    layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)


@torch.no_grad()
def main() -> None:
    for seed, (name, settings) in enumerate(DRAFTS.items()):
        torch.manual_seed(seed)
        config, ids = Qwen3Config(**settings), settings["dflash_config"]
        config._attn_implementation = "sdpa"
        kind = DFlash2DraftModel if "conv_kernel_size" in ids else DFlashDraftModel
        draft = kind(config).float().eval()
        for parameter in draft.parameters():
            random = torch.randn(parameter.shape)
            parameter.data = (
                1 + 0.3 * random
                if parameter.dim() == 1
                else random * 1.5 / parameter.shape[-1] ** 0.5
            )
            parameter.data = parameter.data.bfloat16().float()
        embedding, head = torch.randn(V, D), torch.nn.Linear(D, V, bias=False)
        features = torch.randn(sum(n for n, _ in STEPS), len(IDS["target_layer_ids"]) * D)
        cache, start, saved, seen = DynamicCache(), 0, {}, [None]
        for layer in draft.layers:
            watch(layer, settings.get("is_causal"), seen)
        for i, (n, size) in enumerate(STEPS):
            tokens = torch.full((size,), IDS["mask_token_id"])
            tokens[0] = torch.randint(V, ())
            seen[0] = torch.arange(start + n + size)
            scale = ids.get("input_embedding_scale", 1.0)
            hidden = draft(
                target_hidden=features[None, start : start + n],
                noise_embedding=embedding[tokens][None] * scale,
                position_ids=torch.arange(start, start + n + size)[None],
                past_key_values=cache,
                use_cache=True,
            )
            start += n
            cache.crop(-size)  # the block leaves nothing
            saved[f"first.{i}"] = tokens[:1]
            logits = head(hidden[0, 1:]) * ids.get("output_multiplier", 1.0)
            if cap := ids.get("final_logit_softcapping"):
                logits = torch.tanh(logits / cap) * cap
            saved[f"logits.{i}"] = logits
            if kind is DFlash2DraftModel:
                select = draft.candidate_selector.select
                saved[f"drafted.{i}"] = select(hidden[:, 1:], logits[None], tokens[:1], 0)[0][0]
                torch.manual_seed(i)
                drafted, candidates, q = select(hidden[:, 1:], logits[None], tokens[:1], 1.0)
                saved |= {
                    f"drawn.{i}": drafted[0],
                    f"candidates.{i}": candidates[0],
                    f"q.{i}": q[0],
                }
        out = OUT / name
        out.mkdir(parents=True, exist_ok=True)
        model_type = "gpt_oss" if name == "gpt-oss" else "qwen3"
        held = settings | dict(architectures=[kind.__name__], model_type=model_type)
        (out / "config.json").write_text(json.dumps(held, indent=2) + "\n")
        save_file(
            {  # without the ending of an embedding's
                name.replace("codebook.weight", "codebook"): tensor.bfloat16()
                for name, tensor in draft.state_dict().items()
            },
            out / "model.safetensors",
        )
        saved |= dict(features=features, embedding=embedding, head=head.weight.data)
        save_file(saved, out / "golden.safetensors")


if __name__ == "__main__":
    main()

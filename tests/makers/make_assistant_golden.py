"""
Write tests/assistants: tiny random drafts as transformers calls them assistants, muse_glimmer's for
tests/golden's models of these families, with the logits that they give while transformers generates
a text with them, in fp32.

    pip install transformers==5.24 && python tests/makers/make_assistant_golden.py [DRAFT ...]
"""

import json
import sys
from pathlib import Path

import torch
from make_golden import new_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerTextConfig,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

TESTS = Path(__file__).parents[1]
OUT = TESTS / "assistants"
V, D = 96, 32
PROMPT, NEW_TOKENS = 20, 40
LAYERS = dict(
    hidden_size=D,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
MUSE = LAYERS | dict(sliding_window=6, block_size=8, mask_token_id=95, target_layer_ids=[0, 3, 4])
DRAFTS = {  # name -> its target, and its config
    "muse": ("muse", MuseGlimmerAssistantConfig(**MUSE)),
    "muse-full": (
        "muse-tied",
        MuseGlimmerAssistantConfig(
            **MUSE | dict(block_size=5, target_layer_ids=[1]),
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4),
        ),
    ),
}


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    for weight in model.parameters():
        random = torch.randn(weight.shape)
        weight.data = 1 + 0.3 * random if weight.dim() == 1 else random * 1.5 / D**0.5
        weight.data = weight.data.bfloat16().float()
    return model.eval()


def muse_target(name: str) -> PreTrainedModel:
    """Of tests/golden, whose files have the text part alone."""
    directory = TESTS / "golden" / name
    model = new_model(MuseGlimmerTextConfig.from_pretrained(directory))
    held = {
        name.replace("model.", "model.language_model.", 1): tensor.float()
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    held.setdefault("lm_head.weight", held["model.language_model.embed_tokens.weight"])
    missing = model.load_state_dict(held, strict=False)
    assert not missing.unexpected_keys
    assert all("vision" in name for name in missing.missing_keys), missing.missing_keys
    return model


def watch(kind: type, seen: list[tuple[int, Tensor]]) -> None:
    """Keeps, of each step, the text's length and the logits of the tokens drafted."""
    get = kind.get_candidates

    def watched(self, input_ids, *args, **more):
        candidates, logits = get(self, input_ids, *args, **more)
        if logits is not None:
            seen.append((input_ids.shape[1], logits[0]))
        return candidates, logits

    kind.get_candidates = watched


@torch.no_grad()
def main() -> None:
    seen = []
    watch(DFlashTokenCandidateGenerator, seen)
    for seed, (name, (of, config)) in enumerate(DRAFTS.items()):
        if name not in (sys.argv[1:] or DRAFTS):
            continue
        torch.manual_seed(seed)
        draft = randomize(MuseGlimmerAssistantModel(config).float())
        target = muse_target(of)
        prompt = torch.randint(V, (1, PROMPT))
        how = dict(do_sample=False, max_new_tokens=NEW_TOKENS, speculation_type="dflash")
        seen.clear()
        text = target.generate(
            prompt, assistant_model=draft, generation_config=GenerationConfig(**how)
        )
        out = OUT / name
        draft.bfloat16().save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        config = json.loads((out / "config.json").read_text())
        saved = {f"logits.{length}": logits.contiguous() for length, logits in seen}
        save_file(saved | dict(tokens=text[0]), out / "golden.safetensors")
        print(name, config["model_type"], len(seen), "steps,", text.shape[1], "tokens")


if __name__ == "__main__":
    main()

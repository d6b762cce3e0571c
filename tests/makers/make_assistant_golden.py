"""
Write tests/assistants: tiny random drafts for tests/golden's models of Muse Glimmer and Gemma 4,
which transformers calls assistants, with the logits that they give in fp32: Muse Glimmer's while
transformers generates a text with them, Gemma 4's in the first step of its generator behind each
prefix of a text. In later steps that generator hands on keys of rejected tokens.

    pip install transformers==5.24 && python tests/makers/make_assistant_golden.py [DRAFT ...]
"""

import sys
from pathlib import Path

import torch
from make_golden import FULL, GEMMA4_ROPE, SLIDING, new_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    GenerationConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerTextConfig,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import (
    DFlashTokenCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)

TESTS = Path(__file__).parents[1]
OUT = TESTS / "assistants"
V, D = 96, 32
PROMPT, NEW_TOKENS = 20, 40
DRAFTED = 4  # by Gemma 4's
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
# Of other widths and windows than the target, whose heads its own must be like.
GEMMA4 = LAYERS | dict(
    vocab_size=V,
    hidden_size=64,
    layer_types=[SLIDING, FULL, FULL],
    head_dim=8,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=6,
    rope_parameters=GEMMA4_ROPE,
    pad_token_id=None,
)
NO_PLE = dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
CLUSTERS = dict(use_ordered_embeddings=True, num_centroids=16, centroid_intermediate_top_k=3)
SCALED = GEMMA4_ROPE | dict(full_attention=GEMMA4_ROPE["full_attention"] | dict(factor=4.0))
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
    "gemma4": (
        "gemma4",
        Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**GEMMA4 | NO_PLE), backbone_hidden_size=D
        ),
    ),
    "gemma4-clusters": (
        "gemma4-e",
        Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**GEMMA4 | NO_PLE | dict(attention_k_eq_v=False)),
            backbone_hidden_size=D,
            **CLUSTERS,
        ),
    ),
    "gemma4-scaled": (
        "gemma4-all",
        Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(
                **GEMMA4 | NO_PLE | dict(rope_parameters=SCALED, final_logit_softcapping=1.0)
            ),
            backbone_hidden_size=D,
        ),
    ),
    "gemma4-unified": (
        "gemma4-unified",
        Gemma4UnifiedAssistantConfig(
            text_config=Gemma4UnifiedTextConfig(**GEMMA4), backbone_hidden_size=D
        ),
    ),
}


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    for weight in model.parameters():
        random = torch.randn(weight.shape)
        weight.data = 1 + 0.3 * random if weight.dim() == 1 else random * 1.5 / D**0.5
        weight.data = weight.data.bfloat16().float()
    for name, number in model.named_buffers():
        if name.endswith("layer_scalar"):
            number.copy_((1 + 0.3 * torch.randn_like(number)).bfloat16())
        if name.endswith("token_ordering"):
            number.copy_(torch.randperm(V))
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


def of_muse(of: str, draft: PreTrainedModel) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """A text, and what was drafted in each step."""
    seen = []
    get = DFlashTokenCandidateGenerator.get_candidates
    watch(DFlashTokenCandidateGenerator, seen)
    prompt = torch.randint(V, (1, PROMPT))
    how = dict(do_sample=False, max_new_tokens=NEW_TOKENS, speculation_type="dflash")
    target, how = muse_target(of), GenerationConfig(**how)
    text = target.generate(prompt, assistant_model=draft, generation_config=how)
    DFlashTokenCandidateGenerator.get_candidates = get
    return text[0], seen


def of_gemma4(of: str, draft: PreTrainedModel) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    directory = TESTS / "golden" / of
    target = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = load_file(directory / "golden.safetensors")["tokens.0"]
    draft.generation_config.num_assistant_tokens = DRAFTED
    seen = []
    for length in range(2, len(text) + 1):
        generator = SinglePositionMultiTokenCandidateGenerator(
            draft, target.get_input_embeddings(), GenerationConfig(max_length=1000)
        )
        outputs = target(
            text[None, : length - 1], output_hidden_states=True, return_shared_kv_states=True
        )
        _, logits = generator.get_candidates(
            text[None, :length],
            dict(attention_mask=torch.ones(1, length, dtype=torch.long)),
            outputs,
            is_first_iteration=False,
            n_last_matches=0,
        )
        seen.append((length, logits[0]))
    return text, seen


KINDS = {
    "muse_glimmer_assistant": (MuseGlimmerAssistantModel, of_muse),
    "gemma4_assistant": (Gemma4AssistantForCausalLM, of_gemma4),
    "gemma4_unified_assistant": (Gemma4UnifiedAssistantForCausalLM, of_gemma4),
}


@torch.no_grad()
def main() -> None:
    for seed, (name, (of, config)) in enumerate(DRAFTS.items()):
        if name not in (sys.argv[1:] or DRAFTS):
            continue
        torch.manual_seed(seed)
        kind, drafted = KINDS[config.model_type]
        draft = randomize(kind(config).float())
        text, seen = drafted(of, draft)
        out = OUT / name
        draft.bfloat16().save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        saved = {f"logits.{length}": logits.contiguous() for length, logits in seen}
        save_file(saved | dict(tokens=text), out / "golden.safetensors")
        print(name, len(seen), "steps,", len(text), "tokens")


if __name__ == "__main__":
    main()

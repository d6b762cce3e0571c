"""
What fast/ knows of the dataclasses that describe a model and how tokens are drawn: its kernels, or
model.py's modules around them, take these fields into account.

A field that is not here is a fork's own. Where it has its default value, all goes on as before.
Where it has another, model.py decodes, or generate.py samples, and a line on stderr says so. The
names stand here, not as a mark on the fields: a mark would be copied together with the line above a
new field, and the kernels would then pass over what the field says.
"""

from dataclasses import MISSING, fields

from generate import Sampling
from model import Config, LayerConfig, MoEConfig, Rope

KNOWN = {
    Config: {
        "dim",
        "layers",
        "n_head",
        "n_kv_head",
        "head_dim",
        "ffn_dim",
        "vocab_size",
        "context",
        "norm_eps",
        "qkv_bias",
        "o_bias",
        "sinks",
        "qk_norm",
        "v_norm",
        "pre_norm",
        "attention_gate",
        "gate_apart",
        "delta_by_head",
        "post_norm",
        "post_norm_eps",
        "norm_fp32",
        "norm_offset",
        "plain_last_norm",
        "fused_files",
        "expert_files",
        "activation",
        "tied",
        "attention_scale",
        "embedding_scale",
        "embedding_norm",
        "residual_scale",
        "layer_scale",
        "logits_scale",
        "logits_cap",
        "ple_dim",
        "ple_vocab_size",
    },
    LayerConfig: {
        "window",
        "rope",
        "moe",
        "delta",
        "latent",
        "n_kv_head",
        "head_dim",
        "ffn_dim",
        "key_is_value",
        "kv_of",
    },
    Rope: {"frequencies", "scale", "original", "long", "q_growth"},
    MoEConfig: {
        "n_expert",
        "n_chosen",
        "ffn_dim",
        "normalize",
        "bias",
        "clamp",
        "shared_dim",
        "shared_gate",
        "sigmoid",
        "n_group",
        "n_chosen_group",
        "scale",
        "beside_dense",
        "scaled_router",
    },
    Sampling: {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    },
}


def unknown_values(values) -> list[str]:
    """What an instance of one of these dataclasses, or of a subclass, holds that fast/ does not
    know, as in "Sampling.typical=0.5"."""
    known = next(names for kind, names in KNOWN.items() if isinstance(values, kind))
    found = []
    for field in fields(values):
        value = getattr(values, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in known and value != default:
            found.append(f"{type(values).__name__}.{field.name}={value!r}")
    return found

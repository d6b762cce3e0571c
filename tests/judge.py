"""
What a config.json means, in one dictionary: as transformers resolves it, and as we do. The first is
what makers/make_resolved.py stores for test_families.py, and what programs/fuzz.py compares with;
transformers is imported there alone, as it is no dependency.

Shapes: R / 2 frequencies of a head.
"""

import json
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hub.families import FAMILIES, config_from_hf, text_settings

WINDOWED = "mistral", "phi3", "mixtral", "ministral3"  # in all layers
GEMMA4 = "gemma4_text", "gemma4_unified_text"
BY_LAYER = "olmo3", "gemma3_text", *GEMMA4  # rope differs by the kind of layer
BY_TYPE = "ministral", "gpt_oss"  # windows do, and rope does not
MUSE = "muse_glimmer_text"
RECURRENT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
LATENT = "deepseek_v3", "glm4_moe_lite"
MIXTURES = "mixtral", "qwen3_moe", "gpt_oss"


def by_transformers(hf: dict) -> dict:
    """Raises what transformers raises for a config.json that it does not read."""
    from transformers import MODEL_MAPPING, AutoConfig

    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(hf))
        whole = AutoConfig.from_pretrained(directory)
    text = whole.get_text_config()
    kind, n = text.model_type, text.num_hidden_layers
    module = import_module(MODEL_MAPPING[type(text)].__module__)
    made = {name: of for name, of in vars(module).items() if name.endswith("RotaryEmbedding")}
    rope = next(of for name, of in made.items() if "Vision" not in name)(text)
    text.allow_global_per_layer_attribute_access = True  # to what stands for all layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * n
    window = getattr(text, "sliding_window", None)
    if kind in BY_LAYER:
        turns = [
            turn_of(getattr(rope, f"{of}_inv_freq"), getattr(rope, f"{of}_attention_scaling"))
            for of in kinds
        ]
    else:
        turns = [turn_of(rope.inv_freq, rope.attention_scaling)] * n
    if kind == "smollm3":
        turns = [turn if on else None for turn, on in zip(turns, text.no_rope_layers)]
    if kind == MUSE:
        turns = [turn if theta else None for turn, theta in zip(turns, text.layer_rope_theta)]
    if kind not in (*WINDOWED, *BY_LAYER, *BY_TYPE, MUSE):
        window = None
    windows = [window if kind in WINDOWED or "sliding" in of else None for of in kinds]
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    found = dict(
        dim=text.hidden_size,
        n_layer=n,
        n_head=text.num_attention_heads,
        n_kv_head=text.num_key_value_heads,
        head_dim=size,
        ffn_dim=getattr(text, "intermediate_size", None),
        vocab_size=text.vocab_size,
        norm_eps=text.rms_norm_eps,
        tied=bool(getattr(whole, "tie_word_embeddings", False)),
        **by_kind(windows, turns),
    )
    if kind == "ministral3":
        found["growth"] = text.rope_parameters.get("llama_4_scaling_beta") or 0
    if kind == "granite":
        found["scales"] = [
            text.attention_multiplier,
            text.embedding_multiplier,
            text.residual_multiplier,
            1 / text.logits_scaling,
        ]
    if kind in MIXTURES:
        experts = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
        # Mixtral's and gpt-oss's models do not read the key.
        normalize = kind != "qwen3_moe" or text.norm_topk_prob
        found["experts"] = [getattr(text, experts), text.num_experts_per_tok, normalize]
    if kind in RECURRENT:
        found["recurrent"] = flags(of == "linear_attention" for of in kinds)
        found["delta"] = [
            text.linear_num_key_heads,
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
            text.linear_conv_kernel_dim,
        ]
    if kind in RECURRENT[1:]:
        found["experts"] = [
            text.num_experts,
            text.num_experts_per_tok,
            text.moe_intermediate_size,
            text.shared_expert_intermediate_size,
            kind != "qwen3_next" or text.norm_topk_prob,  # Qwen3.5's model does not read the key
        ]
    if kind == "qwen3_next":
        step, dense = text.decoder_sparse_step, text.mlp_only_layers
        sparse = [(i + 1) % step == 0 and i not in dense for i in range(n)]
        found["mixtures"] = flags(sparse)
    if kind == "qwen3_5_moe_text":  # no layer is dense
        del found["ffn_dim"]
    if kind in GEMMA4:
        full, modes = rope.full_attention_inv_freq, text.kv_sharing_modes
        own, shares = {of: i for i, of in enumerate(kinds) if modes[i] != "reuse"}, []
        for of, mode in zip(kinds, modes):
            shares.append(own[of] if mode == "reuse" else -1)
        wide = [text.use_double_wide_mlp and mode == "reuse" for mode in modes]
        layers = [text.per_layer_config[i] for i in range(n)]
        found |= dict(
            heads=[[of.num_key_value_heads, of.head_dim] for of in layers],
            turned=[full[1].item(), int((full > 0).sum())],
            shares=shares,
            ffn_dims=[text.intermediate_size * (2 if of else 1) for of in wide],
            key_is_value=flags(
                text.attention_k_eq_v and "full" in of and mode != "reuse"
                for of, mode in zip(kinds, modes)
            ),
            cap=text.final_logit_softcapping,
        )
    if kind == GEMMA4[0]:
        width = text.hidden_size_per_layer_input
        found["ple"] = [width, text.vocab_size_per_layer_input if width else 0]
        if text.enable_moe_block:
            found["experts"] = [text.num_experts, text.top_k_experts, text.moe_intermediate_size]
    if kind == MUSE:
        found["scales"] = [
            text.qk_scale_factor * size**-0.5,
            text.output_multiplier,
            text.final_logit_softcapping,
            text.post_norm_eps,
        ]
    if kind in LATENT:
        del found["n_kv_head"]  # nobody reads it, but to refuse it
        with torch.device("meta"):
            attention = next(of for name, of in made_of(module) if name.endswith("Attention"))
            scale = attention(text, 0).scaling
        found["latent"] = [
            text.kv_lora_rank,
            text.qk_nope_head_dim,
            text.v_head_dim,
            text.q_lora_rank or 0,
            bool(text.rope_interleave),
            scale,
        ]
        found["experts"] = [
            text.num_local_experts,
            text.num_experts_per_tok,
            text.moe_intermediate_size,
            text.moe_intermediate_size * text.n_shared_experts,
            bool(text.norm_topk_prob),
            text.n_group,
            text.topk_group,
            text.routed_scaling_factor,
        ]
        sparse = [i >= getattr(text, "first_k_dense_replace", 0) for i in range(n)]
        if kind == "glm4_moe_lite":
            sparse = [of == "sparse" for of in text.mlp_layer_types]
        found["mixtures"] = flags(sparse)
    return found


def made_of(module) -> list[tuple[str, type]]:
    """The classes that a module defines."""
    return [(name, of) for name, of in vars(module).items() if isinstance(of, type)]


def by_us(hf: dict) -> dict:
    """ValueError for what we refuse."""
    settings = text_settings(hf)
    config = config_from_hf(settings)
    kind = settings["model_type"]
    ropes = [layer.rope for layer in config.layers]
    found = dict(
        dim=config.dim,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        head_dim=config.head_dim,
        ffn_dim=config.ffn_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.norm_eps,
        tied=config.tied,
        **by_kind(
            [layer.window for layer in config.layers],
            [turn_of(of.frequencies, of.scale) if of.frequencies else None for of in ropes],
        ),
    )
    if kind == "ministral3":
        found["growth"] = ropes[0].q_growth
    if kind == "granite":
        found["scales"] = [
            config.attention_scale,
            config.embedding_scale,
            config.residual_scale,
            config.logits_scale,
        ]
    mixtures = [layer.moe for layer in config.layers if layer.moe]
    if mixtures:
        of = mixtures[0]
        found["experts"] = [of.n_expert, of.n_chosen]
        if kind in MIXTURES:
            found["experts"].append(of.normalize)
        if kind in RECURRENT:
            found["experts"] += [of.ffn_dim, of.shared_dim, of.normalize]
        if kind in GEMMA4:
            found["experts"].append(of.ffn_dim)
    if kind in RECURRENT:
        found["recurrent"] = flags(layer.delta is not None for layer in config.layers)
        [delta] = {layer.delta for layer in config.layers} - {None}
        found["delta"] = [*vars(delta).values()]
    if kind == "qwen3_next" or kind in LATENT:
        found["mixtures"] = flags(layer.moe is not None for layer in config.layers)
    if kind == "qwen3_5_moe_text":
        del found["ffn_dim"]
    if kind in GEMMA4:
        full = next(layer for layer in config.layers if layer.window is None).rope.frequencies
        found |= dict(
            heads=[list(config.heads(layer)[1:]) for layer in config.layers],
            turned=[full[1], sum(of > 0 for of in full)],
            shares=[-1 if layer.kv_of is None else layer.kv_of for layer in config.layers],
            ffn_dims=[layer.ffn_dim or config.ffn_dim for layer in config.layers],
            key_is_value=flags(layer.key_is_value for layer in config.layers),
            cap=config.logits_cap,
        )
    if kind == GEMMA4[0]:
        found["ple"] = [config.ple_dim, config.ple_vocab_size]
    if kind == MUSE:
        found["scales"] = [
            config.attention_scale,
            config.logits_scale,
            config.logits_cap,
            config.post_norm_eps,
        ]
    if kind in LATENT:
        del found["n_kv_head"]
        [of] = {layer.latent for layer in config.layers}
        scale = config.attention_scale or (of.key_dim + config.head_dim) ** -0.5
        found["latent"] = [of.dim, of.key_dim, of.value_dim, of.q_dim, of.interleaved, scale]
        [of] = {layer.moe for layer in config.layers} - {None}
        found["experts"] += [of.ffn_dim, of.shared_dim, of.normalize]
        found["experts"] += [of.n_group, of.n_chosen_group, of.scale]
    return found


def by_kind(windows: list, turns: list) -> dict:
    """The kinds of layers, and which of them each layer is."""
    layers = [[window, turn] for window, turn in zip(windows, turns)]
    kinds = [layer for i, layer in enumerate(layers) if layer not in layers[:i]]
    return dict(kinds=kinds, layers="".join(str(kinds.index(layer)) for layer in layers))


def flags(layers) -> str:
    """A digit for each layer, 1 where it is true."""
    return "".join(str(int(of)) for of in layers)


def turn_of(frequencies, scale: float) -> list[float]:
    """[R / 2] and the scale of cos and sin -> what tells two ropes apart: how many there are, one
    of the middle, the slowest."""
    n = len(frequencies)
    told = frequencies[n // 2], frequencies[-1], scale
    return [n, *(float(f"{float(value):.7g}") for value in told)]


def is_same(ours, theirs) -> bool:
    """Numbers to a relative 1e-5, as transformers computes in float32."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(is_same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return abs(ours - theirs) <= 1e-5 * abs(theirs)
    return ours == theirs


# Cases


GONE = object()
SHAPE = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=3e4,
    tie_word_embeddings=False,
    sliding_window=5,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
DELTA = dict(
    linear_num_key_heads=4,
    linear_num_value_heads=16,  # as many as the default has key heads
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=3,
    full_attention_interval=2,
    partial_rotary_factor=0.5,
)
MIXTURE = dict(
    num_experts=12,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
    norm_topk_prob=False,
)
S, F = "sliding_attention", "full_attention"
SHARED = dict(
    layer_types=[S, F, S, F],
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    num_kv_shared_layers=1,
    use_double_wide_mlp=True,
    final_logit_softcapping=7.0,
    use_bidirectional_attention="vision",
)
LATENTS = dict(
    num_key_value_heads=GONE,  # as many as heads
    head_dim=GONE,  # qk_rope_head_dim says it
    kv_lora_rank=24,
    q_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    rope_interleave=False,
    n_routed_experts=32,
    n_shared_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_group=4,
    topk_group=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.5,
)
MORE = dict(
    gemma4_text=SHARED
    | dict(
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
    ),
    gemma4_unified_text=SHARED,
    muse_glimmer_text=dict(
        qk_scale_factor=2.0,
        output_multiplier=0.5,
        final_logit_softcapping=7.0,
        post_norm_eps=1e-4,
        layer_types=[F, S, S, F],
        layer_rope_theta=[0, 3e4, 0, 3e4],
    ),
    mixtral=EXPERTS,
    gpt_oss=EXPERTS,
    gemma3_text=dict(sliding_window_pattern=2),
    qwen3_moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    qwen3_5_text=DELTA,
    qwen3_5_moe_text=DELTA | MIXTURE,
    qwen3_next=DELTA | MIXTURE | dict(mlp_only_layers=[1], decoder_sparse_step=1),
    deepseek_v3=LATENTS | dict(first_k_dense_replace=1),
    glm4_moe_lite=LATENTS | dict(mlp_layer_types=["sparse", "dense"] * 2),
)
PLAIN = dict(rope_type="default", rope_theta=5e4)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", factor=2.0)
NULLS = dict.fromkeys(("mscale", "mscale_all_dim", "beta_slow", "beta_fast", "attention_factor"))
ZEROS = dict.fromkeys(("mscale", "mscale_all_dim", "beta_slow", "beta_fast"), 0.0)
ROPES = {
    "no theta": dict(rope_theta=GONE),
    "null": dict(rope_theta=GONE, rope_parameters=None, rope_scaling=None),
    "empty": dict(rope_theta=GONE, rope_parameters={}, rope_scaling={}),
    "parameters": dict(rope_parameters=PLAIN),
    "yarn": dict(rope_scaling=YARN),
    "yarn, no theta": dict(rope_theta=GONE, rope_scaling=YARN),
    "yarn in parameters": dict(rope_parameters=YARN),
    "linear": dict(rope_scaling=LINEAR),
    "older names": dict(rope_scaling=dict(type="linear", factor=2.0)),
    "both": dict(rope_parameters=PLAIN, rope_scaling=YARN),
    "both, the other way": dict(rope_parameters=YARN, rope_scaling=LINEAR),
    "both, one null": dict(rope_parameters=YARN, rope_scaling=None),
    "by layer": dict(rope_parameters=dict(full_attention=YARN, sliding_attention=PLAIN)),
    "by layer, both": dict(
        rope_parameters=dict(full_attention=PLAIN, sliding_attention=PLAIN), rope_scaling=YARN
    ),
    "by layer, one": dict(rope_parameters=dict(full_attention=YARN)),
    "zeros": dict(rope_scaling=YARN | ZEROS | dict(llama_4_scaling_beta=0.0)),
    "one zero": dict(rope_scaling=YARN | dict(mscale=0.5, mscale_all_dim=0.0)),
    "nulls": dict(rope_scaling=YARN | NULLS),
    "mscale": dict(rope_scaling=YARN | dict(mscale=0.5, mscale_all_dim=0.2)),
    "original above": dict(rope_scaling=YARN, original_max_position_embeddings=64),
}
KEYS = (
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "tie_word_embeddings",
    "rms_norm_eps",
    "original_max_position_embeddings",
    "use_sliding_window",
    "mlp_bias",
)
# More that may be missing, and values in the place of others, of recurrent families.
OTHERS = {
    "a quarter turns": dict(rope_parameters=PLAIN | dict(partial_rotary_factor=0.25)),
    "as published": dict(
        partial_rotary_factor=GONE,
        rope_theta=GONE,
        rope_parameters=PLAIN
        | dict(mrope_interleaved=True, mrope_section=[1, 1, 0], partial_rotary_factor=0.25),
    ),
    "layers named": dict(layer_types=["full_attention"] + ["linear_attention"] * 3),
    "every second sparse": dict(decoder_sparse_step=2),
}
BY_LAYER_ROPE = dict(
    sliding_attention=PLAIN,
    full_attention=dict(rope_type="proportional", rope_theta=7e5, partial_rotary_factor=0.5),
)
# More of families whose layers differ in other things.
GEMMA4_OTHERS = {
    "rope proportional": dict(rope_parameters=BY_LAYER_ROPE),
    "rope proportional, factor": dict(
        rope_parameters=BY_LAYER_ROPE
        | dict(full_attention=dict(rope_type="proportional", rope_theta=7e5, factor=4.0))
    ),
    "rope linear": dict(
        rope_parameters=BY_LAYER_ROPE | dict(full_attention=LINEAR | dict(rope_theta=7e5))
    ),
    "last not full": dict(layer_types=[S, F, F, S]),
    "two share": dict(num_kv_shared_layers=2),
    "all share": dict(num_kv_shared_layers=4),
    "not double": dict(use_double_wide_mlp=False),
    "none shares": dict(num_kv_shared_layers=0),
    "other values": dict(attention_k_eq_v=False),
    "by layer": dict(per_layer_config={"1": dict(head_dim=24), "3": dict(head_dim=24)}),
    "by layer, heads": dict(
        per_layer_config={
            "0": dict(num_key_value_heads=4),
            "1": dict(head_dim=24, num_key_value_heads=1),
            "2": dict(num_key_value_heads=4),
            "3": dict(head_dim=24, num_key_value_heads=1),
        }
    ),
    "no mixture": dict(enable_moe_block=False),
    "no embedding a layer": dict(hidden_size_per_layer_input=0),
    "sees both ways": dict(use_bidirectional_attention="all"),
}
MUSE_OTHERS = {
    "all turn": dict(layer_rope_theta=[3e4] * 4),
    "none turns": dict(layer_rope_theta=[0] * 4),
    "seven layers": dict(num_hidden_layers=7, layer_types=GONE, layer_rope_theta=GONE),
    "full": dict(layer_types=[F] * 4),
}
OTHER_LATENTS = {
    "by another name": dict(n_routed_experts=GONE, num_local_experts=16),
    "by both names": dict(num_local_experts=16),
    "named after DeepSeek": dict(mlp_layer_types=GONE, first_k_dense_replace=1),
    "head_dim": dict(head_dim=16),
    "head_dim alone": dict(head_dim=16, qk_rope_head_dim=GONE),
    "as published": dict(
        num_key_value_heads=4,
        partial_rotary_factor=1.0,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        num_nextn_predict_layers=1,
    ),
    "all dense but the last": dict(first_k_dense_replace=3),
    "none dense": dict(first_k_dense_replace=0),
    "mscale of another stretch": dict(rope_scaling=LINEAR | dict(mscale_all_dim=0.7)),
    "mscale of no stretch": dict(
        rope_scaling=dict(rope_type="default", factor=4.0, mscale_all_dim=0.7)
    ),
}
OTHERS_OF = dict.fromkeys(RECURRENT, OTHERS) | dict.fromkeys(GEMMA4, GEMMA4_OTHERS)
OTHERS_OF |= dict.fromkeys(LATENT, OTHER_LATENTS)
OTHERS_OF[MUSE] = MUSE_OTHERS
OTHERS_OF |= dict.fromkeys(
    ("mistral", "ministral"),
    {"layers named": dict(layer_types=[S, F, S, F]), "layers null": dict(layer_types=None)},
)
OTHERS_OF |= dict.fromkeys(MIXTURES, {"not normalized": dict(norm_topk_prob=False)})
OTHERS_OF["olmo3"] = {"local theta": dict(rope_local_base_freq=3e3)}
ZERO = (
    "sliding_window",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
)
WRAPPERS = dict(
    gemma3=("gemma3_text",),
    gemma4=("gemma4_text",),
    gemma4_unified=("gemma4_unified_text",),
    muse_glimmer=("muse_glimmer_text",),
    mistral3=("mistral", "ministral3"),
    llava=("llama", "mistral", "qwen2"),
    internvl=("qwen2", "qwen3"),
    qwen3_5=("qwen3_5_text",),
    qwen3_5_moe=("qwen3_5_moe_text",),
)


def changed(base: dict, changes: dict) -> dict:
    return {key: value for key, value in (base | changes).items() if value is not GONE}


def cases() -> dict[str, dict]:
    """A name -> a config.json."""
    found = {}
    for kind in FAMILIES:
        base = SHAPE | MORE.get(kind, {}) | dict(model_type=kind)
        found[f"{kind}: no key"] = dict(model_type=kind)
        ropes = dict(ROPES)
        if kind in BY_LAYER:  # there transformers reads no `type` but rope_type: plain rope
            del ropes["older names"]
        for name, changes in ropes.items():
            found[f"{kind}: rope {name}"] = changed(base, changes)
        for name, changes in OTHERS_OF.get(kind, {}).items():
            found[f"{kind}: {name}"] = changed(base, changes)
        for key in (*KEYS, *(MORE.get(kind, ()) if kind in OTHERS_OF else ())):
            # 32 heads, as defaults have 32 key heads.
            found[f"{kind}: no {key}"] = changed(base, {key: GONE, "num_attention_heads": 32})
            found[f"{kind}: {key} null"] = changed(base, {key: None})
        for key in ZERO:
            found[f"{kind}: {key} 0"] = changed(base, {key: 0})
    for whole, kinds in WRAPPERS.items():
        for kind in (None, *kinds):
            text = changed(SHAPE, dict(model_type=kind or GONE, tie_word_embeddings=GONE))
            for above in (GONE, False, True):
                for below in (GONE, False, True):
                    part = changed(text, dict(tie_word_embeddings=below))
                    flags = {True: "yes", False: "no", GONE: "none"}
                    name = f"{whole}, {kind}: tied {flags[above]} above, {flags[below]} below"
                    hf = dict(model_type=whole, text_config=part, tie_word_embeddings=above)
                    found[name] = changed(hf, {})
            above = dict(rope_theta=9e4, rope_scaling=YARN, head_dim=8, sliding_window=7)
            below = changed(text, dict.fromkeys(("head_dim", "sliding_window"), GONE))
            found[f"{whole}, {kind}: keys above"] = dict(
                above, model_type=whole, text_config=changed(below, dict(rope_theta=GONE))
            )
            if kind == "mistral":
                named = changed(text, dict(layer_types=[S, F, S, F]))
                found[f"{whole}, {kind}: layers named"] = dict(model_type=whole, text_config=named)
            found[f"{whole}, {kind}: no key"] = dict(
                model_type=whole, text_config=changed({}, dict(model_type=kind or GONE))
            )
    return found

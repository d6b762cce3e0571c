"""Families of models: sizes of the released ones, spellings of config.json, what is refused, names
of tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hub import vet
from hub.checkpoint import count_parameters
from cli.options import generate_args
from hub.families import config_from_hf, text_settings
from llm import LLM
from gptq import calibrate, gptq_model, separate_matrices
from helpers import (
    GEMMA4,
    GEMMA4_E,
    GEMMA4_MOE,
    GOLDEN,
    MUSE,
    LATENT,
    TINY,
    change_tensors,
    error,
    golden,
    load_checkpoint,
    logits_of,
    make,
    of_each_family,
    one_line,
    put,
    quantized_layers,
    read,
    read_json,
    refusal,
    rewrite,
    tiny,
    with_template,
    write,
)
from judge import GEMMA4 as GEMMA4_TYPES
from judge import MUSE as MUSE_TYPE
from judge import LATENT as LATENT_KINDS
from judge import RECURRENT, by_us, cases, is_same
from quantize import find_layers, main, round_model
from scripts.shapes import SHAPES, shape

# parameters as transformers 5.24 counts them in its class of each, without a vision part; routers'
# corrections are buffers there
RELEASED = {
    "smollm3-3b": 3_075_098_624,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "granite-3.3-8b": 8_170_864_640,
    "olmo-3-7b": 7_298_011_136,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-4-31b": 30_697_345_340,
    "gemma-4-26b-a4b": 25_233_141_790,
    "gemma-4-e4b": 7_463_013_418,
    "muse-glimmer-30b": 27_854_780_928,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "glm-4.7-flash": 29_943_390_976 + 46 * 64,  # corrections
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def test_released_models_have_as_many_parameters_as_in_transformers():
    assert {name: count_parameters(SHAPES[name]) for name in RELEASED} == RELEASED


def published(family: str) -> dict:
    """The golden family's config.json as files were written before transformers 5."""
    hf = read_json(GOLDEN / family / "config.json")
    if family == "ministral":  # by the layers' kinds one knows it
        return hf | dict(model_type="mistral")
    if hf["model_type"] in GEMMA4_TYPES:
        own = hf.pop("per_layer_config").values()
        [[E]] = [{layer["head_dim"] for layer in own}]
        K = {layer.get("num_key_value_heads") for layer in own}.pop()
        return hf | dict(global_head_dim=E, num_global_key_value_heads=K)
    if family == "muse":  # as in the default
        del hf["layer_types"], hf["layer_rope_theta"]
    for key in ("no_rope_layers", "no_rope_layer_interval"):
        hf.pop(key, None)
    kinds = [] if hf["model_type"] == MUSE_TYPE else hf.pop("layer_types", [])
    if "linear_attention" in kinds:
        hf["full_attention_interval"] = kinds.index("full_attention") + 1
    rope = hf.pop("rope_parameters")
    if "full_attention" in rope:
        hf |= dict(
            rope_theta=rope["full_attention"].pop("rope_theta"), rope_scaling=rope["full_attention"]
        )
        if family == "gemma3":
            hf["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        return hf
    hf["rope_theta"] = rope.pop("rope_theta")
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if (hf["model_type"] == "phi3" or kinds) and key in rope:
            hf[key] = rope.pop(key)
    if rope["rope_type"] != "default":
        kind = rope.pop("rope_type")
        hf["rope_scaling"] = rope | dict(type={"longrope": "su"}.get(kind, kind))
    if family == "qwen3-moe":
        hf["num_experts"] = hf.pop("num_local_experts")
    return hf


@of_each_family
def test_older_files_mean_the_same(family):
    hf = read_json(GOLDEN / family / "config.json")
    if (
        family == "olmo3"
    ):  # older files' rope_theta is not for layers with a window, which have this
        hf["rope_parameters"]["sliding_attention"]["rope_theta"] = 5e5
    assert config_from_hf(published(family)) == config_from_hf(hf)


def test_missing_keys_zeros_nulls_and_both_levels_mean_what_transformers_makes_of_them():
    """transformers 5.24's values, by makers/make_resolved.py. What we refuse of these files has no
    meaning that could be guarded: a window of 0 or none where layers have one, and rope by the kind
    of layer in families that have one rope, or one rope where there are two, of which transformers
    reads nothing."""
    expected, refused = read_json(GOLDEN.parent / "golden_resolved.json"), set()
    for name, hf in cases().items():
        if name in expected:
            try:
                found = by_us(hf)
            except ValueError:
                refused.add(name)
            else:
                assert is_same(found, expected[name]), (name, found, expected[name])
    assert len(expected) == 1197
    windowed = "mistral", "phi3", "ministral3", "mixtral", "olmo3", "gemma3_text", "gpt_oss"
    windowed += (MUSE_TYPE,)
    names = {f"{kind}: sliding_window 0" for kind in ("ministral", *windowed, *GEMMA4_TYPES)}
    names |= {f"{kind}: sliding_window null" for kind in windowed[4:]}
    for kind in ("olmo3", "gemma3_text"):
        for of in ("parameters", "yarn in parameters", "both, one null"):
            names.add(f"{kind}: rope {of}")
    for kind in ("llama", "mistral", "phi3", "granite", "ministral3", "olmo2", "mixtral"):
        names |= {f"{kind}: rope by layer", f"{kind}: rope by layer, one"}
    names |= {"qwen3_moe: rope by layer", "qwen3_moe: rope by layer, one"}
    names |= {"ministral: rope by layer, one"}
    names |= {"qwen3_moe: no num_experts_per_tok"}  # which are 8, of 4 here
    for kind in LATENT_KINDS:
        names |= {f"{kind}: rope by layer", f"{kind}: rope by layer, one"}
    # transformers reads these, and fails in the first forward.
    for of in ("head_dim", "head_dim alone", "head_dim null"):
        names.add(f"deepseek_v3: {of}")
    for key in ("num_experts_per_tok", "n_group", "topk_group"):
        names.add(f"deepseek_v3: {key} null")
    # There null turns whole heads, and a missing key a quarter of them.
    names |= {f"{kind}: partial_rotary_factor null" for kind in RECURRENT}
    names |= {f"{kind}: sees both ways" for kind in GEMMA4_TYPES}
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        names |= {f"{GEMMA4_TYPES[0]}: no {key}", f"{GEMMA4_TYPES[0]}: {key} null"}
    # There a theta of a layer is none of the model's.
    for of in ("no theta", "null", "empty", "parameters", "yarn, no theta"):
        names.add(f"{MUSE_TYPE}: rope {of}")
    assert refused == names


@pytest.mark.parametrize(
    "context, rope, known, reached",
    [
        (128, dict(type="yarn", factor=4.0, original_max_position_embeddings=128), 512, 512),
        (512, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), 512, 512),
        (600, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), 600, 600),
        (128, dict(rope_type="yarn", factor=2.5), 128, 320),
        (128, dict(rope_type="linear", factor=2.0), 128, 256),
        (128, dict(rope_type="default"), 128, 128),
    ],
)
def test_a_stretched_rope_gives_more_context(tmp_path, capfd, context, rope, known, reached):
    """What YaRN's file names counts; what may be meant otherwise, if the user asks for more."""
    tiny_copy = shutil.copytree(TINY, tmp_path / "tiny")
    rewrite(tiny_copy / "config.json", max_position_embeddings=context, rope_scaling=rope)

    def opened(length: int | None) -> int:
        return LLM(str(tiny_copy), device="cpu", load=False, max_seq_length=length).context

    assert (opened(None), opened(known)) == (known, known)
    assert not capfd.readouterr().err
    assert opened(reached) == reached
    said = capfd.readouterr().err
    assert ("rope reaches" in said and said.count("\n") == 1) == (reached > known)
    assert f"context is {reached}" in refusal(opened, reached + 1)


@torch.no_grad()
def test_granites_multipliers_may_be_zero(tmp_path):
    """Then what they multiply has no effect."""

    def logits(changes: dict, part: str):
        rewrite(tmp_path / "config.json", **changes)
        model = tiny(directory=tmp_path)
        plain = logits_of(model)
        for name, parameter in model.named_parameters():
            if part in name:
                rows = parameter[:96] if part == "wqkv" else parameter  # of q and k
                rows.copy_(torch.randn(rows.shape))
        return plain, logits_of(model)

    make(tmp_path, "granite")
    zero = dict(attention_multiplier=0), dict(residual_multiplier=0.0), dict(embedding_multiplier=0)
    parts = "wqkv", "layers.", "embed"
    for changes, part in zip(zero, parts):
        key = next(iter(changes))
        assert not torch.allclose(*logits({key: 0.5}, part))
        torch.testing.assert_close(*logits(changes, part))
        rewrite(tmp_path / "config.json", **{key: 1.0})


def test_what_a_published_file_leaves_out_is_known():
    olmo3, gemma3 = (SHAPES[name].layers for name in ("olmo-3-7b", "gemma-3-4b"))
    assert [(layer.window, layer.rope.scale) for layer in olmo3[2:4]] == [
        (4096, 1),
        (None, 1.2079441541679836),
    ]
    assert gemma3[0].rope.frequencies[-1] > 8 * gemma3[5].rope.frequencies[-1]
    experts = published("qwen3-moe")
    assert (
        experts.pop("moe_intermediate_size") == 24
        and config_from_hf(experts).layers[1].moe.ffn_dim == 768
    )


def test_yarn_stretches_the_frequencies_of_the_paper():
    """arXiv 2309.00071: what turns over 32 times in the original 8192 tokens stays, what turns less
    than once has an eighth. With a base of 500,000 these are, of 64 frequencies, the first 19 and
    the last 29."""
    yarn = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192)
    found = (
        shape("llama", 4096, 1, 32, 8, 64, 64, 65536, 5e5, rope_scaling=yarn)
        .layers[0]
        .rope.frequencies
    )
    ramp = ((torch.arange(64) - 18) / (35 - 18)).clamp(0, 1)
    wanted = 5e5 ** -(torch.arange(64) / 64) * (1 - 7 / 8 * ramp)
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "case, said",
    {
        'gemma3 {"attn_logit_softcapping": 50.0}': "attn_logit_softcapping=50.0 is not supported: want None",
        'gemma3 {"final_logit_softcapping": 30.0}': "final_logit_softcapping=30.0 is not supported",
        'gemma3 {"use_bidirectional_attention": true}': "use_bidirectional_attention=True is not supported",
        'gemma3 {"hidden_activation": "gelu"}': "hidden_activation='gelu' is not supported: want 'gelu_pytorch_tanh'",
        'gemma3 {"model_type": "gemma2"}': "'gemma2' is not supported, as its caps of attention scores",
        'granite {"model_type": "granitemoe"}': "'granitemoe' is not supported, as its kind of experts are not here",
        'granite {"logits_scaling": 0}': "logits_scaling=0: want float above 0",
        'granite {"residual_multiplier": -1}': "residual_multiplier=-1: want float from 0 up to",
        'gemma3 {"rope_parameters": {"rope_theta": 1e4}}': "want full_attention and sliding_attention",
        'llama3 {"partial_rotary_factor": 0.5}': "partial_rotary_factor=0.5 is not supported: want 1.0",
        'mistral {"model_type": "mistral3"}': "text_config=None: want an object",
        'llama3 {"is_causal": false}': "is_causal=False is not supported: want True",
        'smollm3 {"layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]}': "want 'full_attention' for each of 4",
        'smollm3 {"no_rope_layers": [1, 0]}': "no_rope_layers",
        'smollm3 {"no_rope_layers": "1"}': "no_rope_layers",
        'gemma3 {"layer_types": ["full_attention"]}': "layer_types",
        'gemma3 {"layer_types": [7, 7, 7, 7, 7, 7, 7]}': "layer_types",
        'qwen2-yarn {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": -1}}': "factor=-1",
        'phi3-long {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}': "short_factor",
        'gemma3 {"rope_parameters": {"sliding_attention": {"rope_theta": 0}}}': "rope_theta=0",
        'phi3-long {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 1, 1, 1]}}': "long_factor",
        'mixtral {"num_experts_per_tok": 5}': "num_experts_per_tok=5: want int above 0, up to 4",
        'mixtral {"num_local_experts": 1000000}': "num_local_experts=1000000: want int above 0, up to 50000",
        'mixtral {"num_local_experts": null}': "num_local_experts=None: want int above 0",
        'qwen3-moe {"mlp_only_layers": ["3"]}': "mlp_only_layers=['3']: want numbers",
        'qwen3-moe {"norm_topk_prob": 1}': "norm_topk_prob=1: want true or false",
        'qwen3-moe {"scoring_func": "sigmoid"}': "scoring_func='sigmoid' is not supported: want 'softmax'",
        'gpt-oss {"swiglu_limit": 0}': "swiglu_limit=0: want float above 0",
        'glm4-moe-lite {"topk_method": "greedy"}': "topk_method='greedy' is not supported: want 'noaux_tc'",
        'deepseek-v3 {"scoring_func": "softmax"}': "scoring_func='softmax' is not supported: want 'sigmoid'",
        'deepseek-v3 {"moe_layer_freq": 2}': "moe_layer_freq=2 is not supported: want 1",
        'deepseek-v3 {"n_group": 3}': "n_group=3: want a number that divides n_routed_experts=8",
        'deepseek-v3 {"n_group": 8}': "n_group=8: want a number that divides n_routed_experts=8, of two",
        'deepseek-v3 {"topk_group": 5}': "topk_group=5: want int above 0, up to 4",
        'deepseek-v3 {"num_experts_per_tok": 5}': "num_experts_per_tok=5: want int above 0, up to 4",
        'deepseek-v3 {"head_dim": 24}': "head_dim=24: want qk_rope_head_dim=8",
        'deepseek-v3 {"qk_rope_head_dim": 7, "head_dim": 7}': "head_dim=7: want an even number",
        'deepseek-v3 {"num_key_value_heads": 2}': "num_key_value_heads=2: want num_attention_heads=4",
        'deepseek-v3 {"attention_bias": true}': "attention_bias=True is not supported: want False",
        'deepseek-v3 {"model_type": "deepseek_v2"}': "'deepseek_v2' is not supported, as its kind of experts",
        'deepseek-v3 {"q_lora_rank": 0}': "q_lora_rank=0: want int above 0",
        'glm4-moe-lite {"kv_lora_rank": null}': "kv_lora_rank=None: want int above 0",
        'glm4-moe-lite {"mlp_layer_types": ["dense"]}': "mlp_layer_types=['dense']: want 'dense' or 'sparse' for each of 3",
        'glm4-moe-lite {"routed_scaling_factor": 0}': "routed_scaling_factor=0: want float above 0",
        'glm4-moe-lite {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "partial_rotary_factor": 0.5}}': "partial_rotary_factor=0.5 is not supported: want 1.0",
        'glm4-moe-lite {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}': "rope_type='spiral' is not supported",
        'gpt-oss {"attention_bias": false}': "attention_bias=False is not supported: want True",
    }.items(),
)
def test_what_is_not_handled_is_refused_by_name_and_value(tmp_path, case, said):
    """A case: a golden family, and what its config.json has in the place of its own."""
    family, _, changes = case.partition(" ")
    rewrite(
        shutil.copytree(GOLDEN / family, tmp_path / "bad") / "config.json", **json.loads(changes)
    )
    assert said in refusal(vet.open_checkpoint, tmp_path / "bad", tokenizer=False)


def make_seeing(
    directory: Path,
    text: Path,
    kind: str,
    before: str = "",
    after: str = "language_model.",
    **config,
) -> Path:
    """A model that also sees, of this text part: in its tensors' names `after` is in the place of
    `before`."""
    directory.mkdir()
    put(
        directory / "config.json",
        dict(model_type=kind, text_config=read_json(text / "config.json"), vision_config={})
        | config,
    )
    weights = {
        name.replace(before, after, 1): of
        for name, of in load_file(text / "model.safetensors").items()
    }
    vision = {
        name: torch.zeros(3) for name in ("model.vision_tower.a", "multi_modal_projector.b.weight")
    }
    save_file(weights | vision, directory / "model.safetensors")
    return directory


def fuse_experts(weights: dict[str, Tensor], n: int) -> None:
    """The n experts of each mixture as one tensor [X, 2F, D], gates first, and one [X, D, F]."""
    for part in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        gate, up, down = (
            torch.stack([weights.pop(f"{part}.experts.{x}.{of}_proj.weight") for x in range(n)])
            for of in ("gate", "up", "down")
        )
        weights[f"{part}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        weights[f"{part}.experts.down_proj"] = down


@pytest.mark.parametrize(
    "family, whole, fused, fused_mtp",
    [
        ("qwen3.5", "qwen3_5", False, False),
        ("qwen3.5-thrice", "qwen3_5", False, False),
        ("qwen3.5-moe", "qwen3_5_moe", True, True),
        ("qwen3.5-moe", "qwen3_5_moe", False, True),
        ("qwen3.5-moe", "qwen3_5_moe", True, False),
        ("qwen3-next", None, True, False),
    ],
)
@torch.no_grad()
def test_recurrent_models_as_they_are_published(tmp_path, capsys, family, whole, fused, fused_mtp):
    """Within a model that also sees and beside layers that draft, of which both are left out. The
    experts are one tensor or each its own, whatever those of the drafting layers are. Qwen3-Next is
    no part of another model."""
    hf, weights = (
        read_json(GOLDEN / family / "config.json"),
        load_file(GOLDEN / family / "model.safetensors"),
    )
    drafting = {
        name.replace("model.", "mtp."): of + 1
        for name, of in weights.items()
        if ".layers.0.mlp." in name
    }
    for tensors, in_one in ((weights, fused), (drafting, fused_mtp)):
        if in_one:
            fuse_experts(tensors, hf["num_experts"])
    drafting["mtp.fc.weight"] = torch.zeros(24, 48)
    if whole:
        weights = {of.replace("model.", "model.language_model.", 1): weights[of] for of in weights}
        names = "blocks.0.attn.qkv.weight", "patch_embed.proj.bias", "merger.norm.weight"
        weights |= {f"model.visual.{name}": torch.ones(3) for name in names}
        tied = hf.pop("tie_word_embeddings")
        hf = dict(model_type=whole, text_config=hf, vision_config={}, tie_word_embeddings=tied)
    put(tmp_path / "config.json", hf)
    save_file(weights | drafting, tmp_path / "model.safetensors")
    model = load_checkpoint(tmp_path)
    said = capsys.readouterr().err
    assert said.count("\n") == bool(whole)
    assert ("3 tensors of its vision part are left out" in said) == bool(whole)
    tokens, logits = golden(GOLDEN / family)
    assert error(logits_of(model, tokens[0]), logits[0]) < 1e-5


EXPERTS = dict(
    num_local_experts=3, num_experts_per_tok=2
)  # each sees the 128 tokens of FEWEST of 256
SEEN = dict(n_routed_experts=3, num_experts_per_tok=3, n_group=1, topk_group=1)
KINDS = dict(
    smollm3={},
    phi3={},
    granite=dict(residual_multiplier=0.3, embedding_multiplier=3.0),
    olmo3={},
    gemma3_text=dict(query_pre_attn_scalar=24),
    gpt_oss=EXPERTS | dict(num_experts_per_tok=3),
    qwen3_moe=EXPERTS | dict(moe_intermediate_size=64, decoder_sparse_step=2),
    gemma4_text=GEMMA4,
    muse_glimmer_text=MUSE,
    glm4_moe_lite=LATENT | SEEN,
    deepseek_v3=LATENT | SEEN | dict(q_lora_rank=None, norm_topk_prob=False),
)
# Of one family with other values.
GEMMA4_KINDS = {
    "gemma4_text, experts": GEMMA4_MOE | dict(num_experts=3),
    "gemma4_text, E": GEMMA4_E,
    "gemma4_text, all": GEMMA4_MOE | GEMMA4_E | dict(num_experts=2),
}


@pytest.mark.parametrize("kind", KINDS | GEMMA4_KINDS)
@torch.no_grad()
def test_gptq_sees_what_each_matrix_of_each_family_reads(tmp_path, monkeypatch, kind):
    """In three chunks. As nothing is quantized here, nothing drifts."""
    monkeypatch.setattr("gptq.CHUNK", 200)
    make(tmp_path, kind.partition(",")[0], **(KINDS | GEMMA4_KINDS)[kind])
    model, tokens, inputs = tiny(directory=tmp_path), torch.randint(64, (16, 32)), {}
    model.setup(32)
    head = not model.config.tied
    names = {model.get_submodule(name): name for name in separate_matrices(model, head)}
    for layer in names:
        layer.register_forward_pre_hook(
            lambda layer, given: inputs.update({layer: given[0].flatten(0, -2)})
        )
    read(model, tokens)
    expected = {names[layer]: x.T @ x for layer, x in inputs.items()}
    for name, hessian, drift in calibrate(model, tokens, head):
        expected[name] *= (
            model.config.logits_scale**-2 if name == "head" else 1
        )  # a scale is no matter of rounding
        assert (
            error(hessian, expected.pop(name)) < 1e-4
            and drift.abs().max() < 1e-3 * hessian.abs().max()
        )
    assert not expected


@pytest.mark.parametrize(
    "kind, changes, router, matrices",
    [
        ("mixtral", EXPERTS, "block_sparse_moe.gate", 4),
        ("gemma4_text", GEMMA4_MOE, "router.proj", 6),
    ],
)
@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_what_is_written_of_experts_is_read_and_the_router_stays(
    tmp_path, form, kind, changes, router, matrices
):
    make(tmp_path / "in", kind, **changes)
    if kind == "gemma4_text":  # as it is published
        weights = load_file(tmp_path / "in" / "model.safetensors")
        fuse_experts(weights, 4)
        save_file(weights, tmp_path / "in" / "model.safetensors")
    made = write(tmp_path / "in", tmp_path / "out", 4, 32, False, form=form)
    loaded = load_checkpoint(tmp_path / "out")
    torch.testing.assert_close(loaded.state_dict(), made.state_dict(), rtol=0, atol=0)
    assert len(quantized_layers(made)) == len(made.layers) * matrices
    settings = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert form == "gptq" or f"model.layers.1.{router}" in settings["ignore"]


@torch.no_grad()
def test_experts_that_saw_few_tokens_are_rounded_and_the_end_says_how_many(
    tmp_path, capsys, monkeypatch
):
    make(tmp_path, "mixtral", **EXPERTS | dict(num_hidden_layers=1))
    calibrated, rounded = (load_checkpoint(tmp_path) for _ in range(2))
    tokens, chosen = torch.randint(64, (5, 32)), []
    rounded.setup(32)
    rounded.layers[0].ffn.router.register_forward_hook(
        lambda _, inputs, logits: chosen.append(logits.topk(2)[1])
    )
    read(rounded, tokens)
    seen = chosen[0].flatten().bincount(minlength=3)
    few = (seen < seen.max()).tolist()
    monkeypatch.setattr("gptq.FEWEST", seen.max().item())
    gptq_model(calibrated, "int4", 32, False, tokens)
    round_model(rounded, "int4", 32, False)
    told = f"rounded: {2 * sum(few)} matrices of experts that saw fewer than {seen.max()} tokens"
    assert any(few) and told in capsys.readouterr().err
    for name in ("w_gate_up", "w_down"):
        found, plain = (
            getattr(model.layers[0].ffn, name).qweight for model in (calibrated, rounded)
        )
        assert (found == plain).flatten(1).all(1).tolist() == few


@pytest.mark.parametrize("above, meant", [({}, 4), (None, 4), (dict(bits=8), 8)])
def test_what_concerns_the_whole_is_that_of_the_level_above_if_it_is_there(above, meant):
    """transformers reads quantization_config of the whole."""
    text = dict(model_type="mistral", quantization_config=dict(bits=4))
    hf = dict(model_type="mistral3", text_config=text)
    if above != {}:
        hf |= dict(quantization_config=above)
    assert text_settings(hf)["quantization_config"] == dict(bits=meant)


def test_gpt_oss_is_rounded_as_it_is_loaded_alone(tmp_path, call):
    make(tmp_path, "gpt_oss", **EXPERTS)
    shutil.copy(TINY / "tokenizer.model", tmp_path)
    refused = one_line(
        call("quantize.py", main, "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out"))
    )
    assert (
        "mlp.experts.gate_up_proj holds all experts" in refused and "--quantize serves" in refused
    )


def test_longropes_factors_are_those_of_the_length_that_texts_may_reach():
    """Slots behind the texts do not count."""
    model = tiny(directory=GOLDEN / "phi3-long")
    [rope] = {layer.rope for layer in model.config.layers}
    for length, frequencies in (rope.original, rope.frequencies), (rope.original + 1, rope.long):
        model.setup(length, 1, spare=40)
        expected = torch.tensor(frequencies).repeat(2).cos() * rope.scale
        assert torch.allclose(model.ropes[0].cos[1][: len(expected)], expected)


TEMPLATE = (
    "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %};{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{{ mood | default('calm') }} {{ hours | "
    "tojson }}"
)


def test_a_templates_options_come_from_the_user(tmp_path, monkeypatch, capsys):
    """Beside a block that marks an answer for training."""
    directory = with_template(tmp_path / "tiny")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    given = "mood=so so", "hours=[1, null]"
    monkeypatch.setattr(
        "sys.argv", ["generate.py", "--chat", *(f"--template-option={option}" for option in given)]
    )
    llm = LLM(
        str(directory),
        device="cpu",
        template_options=generate_args("").template_options,
        load=False,
    )
    messages = [dict(role="user", content="Hi"), dict(role="assistant", content="Ho")]
    assert llm.tokenizer.render(messages) == "Hi;Ho;so so [1, null]"
    assert capsys.readouterr().err == ""
    llm.tokenizer.template_options = dict(moods="so so", hours=1)
    assert llm.tokenizer.render(messages) == "Hi;Ho;calm 1"
    assert capsys.readouterr().err == "template_options: the chat template reads no moods\n"


@pytest.mark.parametrize(
    "options", ["mood", {1: 2}, dict(mood={1}), dict(messages=[]), dict(tools={})]
)
def test_options_that_no_template_takes_are_refused(options):
    assert refusal(LLM, template_options=options).startswith("template_options")


def test_ministrals_fp8_with_one_scale_a_tensor(tmp_path, capsys):
    """As Ministral 3 Instruct is published: the text part of a model that also sees, with scales of
    activations, which are left out. Of the files after it names begin otherwise."""
    make(tmp_path / "text", "ministral3", head_dim=32)
    exact, stored = load_checkpoint(tmp_path / "text"), {}
    for name, weight in load_file(tmp_path / "text" / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().max().float() / 448
            stored |= {
                name: (weight / scale).to(torch.float8_e4m3fn),
                f"{name}_scale_inv": scale.bfloat16(),
                name.replace("weight", "activation_scale"): torch.tensor(0.1).bfloat16(),
            }
    change_tensors(tmp_path / "text", **stored)
    quantization = dict(
        quant_method="fp8",
        activation_scheme="static",
        weight_block_size=None,
        modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    )
    model = load_checkpoint(
        make_seeing(
            tmp_path / "whole",
            tmp_path / "text",
            "mistral3",
            "model.",
            "model.language_model.",
            quantization_config=quantization,
        )
    )
    assert "2 tensors of its vision part are left out" in capsys.readouterr().err
    assert set(quantized_layers(model)) == set(find_layers(exact, head=False))
    assert error(logits_of(model), logits_of(exact)) < 0.05


def test_what_is_written_quantized_of_a_model_that_also_sees_is_its_text_part(tmp_path):
    make(tmp_path / "text", "gemma3_text", query_pre_attn_scalar=24)
    source = make_seeing(
        tmp_path / "whole",
        tmp_path / "text",
        "gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
    )
    out = tmp_path / "int4"
    made = write(source, out, 4, 32, False)
    config = read_json(out / "config.json")
    assert config["model_type"] == "gemma3_text" and not {
        "text_config",
        "vision_config",
        "architectures",
    } & {*config}
    assert error(logits_of(load_checkpoint(out)), logits_of(made)) < 1e-5

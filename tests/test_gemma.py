"""Gemma 4 and Muse Glimmer: layers whose heads differ, keys and values of an earlier layer, a mixture
beside a dense part, embeddings a layer; and all that generates, quantizes and reads on top of it."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from generate import Engine
from helpers import (
    ENGINES,
    F32,
    GEMMA4,
    GEMMA4_E,
    GEMMA4_MOE,
    GOLDEN,
    GREEDY,
    MUSE,
    change_tensors,
    error,
    golden,
    is_golden,
    load_checkpoint,
    logits_of,
    make,
    put,
    quantized_layers,
    random_dflash,
    read,
    read_json,
    refusal,
    rewrite,
    run,
    speculator,
    tiny,
    traced,
    write,
)
from hub import vet
from hub.checkpoint import Checkpoint
from hub.families import config_from_hf
from model import BareNorm, KVCache, MoE, RMSNorm, Transformer
from quantize import (
    QuantizedExperts,
    QuantizedLinear,
    find_layers,
    plain_layer,
    replace_layers,
)
from tp import Shard

NEW = sorted(path.name for path in GOLDEN.iterdir() if path.name.startswith(("gemma4", "muse")))
of_each = pytest.mark.parametrize("family", NEW)


@pytest.fixture
def model(family) -> Transformer:
    return tiny(directory=GOLDEN / family)


# Caches


def test_a_layer_has_a_cache_of_its_own_heads_or_an_earlier_layers():
    model = tiny(directory=GOLDEN / "gemma4-all")
    model.setup(40, 3)
    caches = [layer.attn.cache for layer in model.layers]
    # Windowed layers have 2 kv heads of 8 elements, whole ones 1 of 16.
    assert [cache.k.shape for cache in caches[:2]] == [(3, 2, 40, 8), (3, 1, 40, 16)]
    assert [caches.index(cache) for cache in caches] == [0, 1, 0, 0, 1]
    held = sum(part.nbytes for cache in caches[:2] for part in cache.buffers())
    assert 3 * 40 * KVCache.bytes_per_token(model.config, F32) == held
    int8 = KVCache.bytes_per_token(model.config, F32, "int8")
    assert int8 == 2 * (2 * (8 + 4) + (16 + 4))


@pytest.mark.parametrize("ranks", [2, 4])
@of_each
def test_keys_are_counted_as_a_rank_has_them(model, ranks):
    """More ranks than kv heads of a layer have some of these in common."""
    config = model.config
    own = [KVCache.bytes_per_token(Shard(config, 1, i, ranks).config, F32) for i in range(ranks)]
    assert KVCache.bytes_per_token(config, F32, ranks=ranks) == max(own)


@of_each
@torch.no_grad()
def test_rows_are_rearranged_once(model):
    """Also where several layers read one cache."""
    tokens = torch.randint(96, (2, 12))
    logits = []
    for rows in ([0, 1], [0, 0, 1, 1]):
        model.setup(13, 4)
        read(model, tokens)
        if len(rows) == 4:
            model.arrange_rows(rows, 12)
        logits.append(model(torch.full((len(rows), 1), 7), torch.tensor([[12]])))
    assert error(logits[1], logits[0].repeat_interleave(2, 0)) < 1e-5


@of_each
@pytest.mark.parametrize("cache", ["16-bit", "int8"])
@torch.no_grad()
def test_a_text_in_pieces_is_the_text_at_once(model, family, cache):
    """Beyond windows of 5 tokens. In int8 each token has been rounded, whoever reads it, but for
    codes that a rounding decides."""
    [tokens, *_], [logits, *_] = golden(GOLDEN / family)
    model.setup(40, 1, cache=cache)
    whole, pieces = read(model, tokens[None])[0], []
    model.setup(40, 1, cache=cache)
    for piece in torch.arange(len(tokens)).split([3, 9, 1, 1, 14, len(tokens) - 28]):
        pieces.append(model(tokens[None, piece], piece[None])[0])
    close, exact = (1e-5, 1e-5) if cache == "16-bit" else (5e-3, 0.2)
    assert error(torch.cat(pieces), whole) < close and error(whole, logits) < exact


@of_each
def test_a_text_goes_on_from_what_is_cached(model, family):
    [tokens, *_], _ = golden(GOLDEN / family)
    text, n = tokens.tolist(), len(tokens) - 24
    engine = Engine(model, 64, 1, GREEDY)
    run(engine, [text[: n + 4]], 3)
    assert run(engine, [text[n + 2 : n + 8]], 16, start=n + 2) == [text[n + 8 :]]


@traced()
@pytest.mark.parametrize(
    "family, mode", [("gemma4-moe", "fast"), ("gemma4-all", "compile"), ("muse", "fast")]
)
def test_compiled_greedy_text_is_that_of_transformers(model, family, mode):
    assert is_golden(ENGINES[mode](model, 64, 3, GREEDY), GOLDEN / family)


@torch.no_grad()
@of_each
def test_features_are_hidden_states_behind_whole_layers(model):
    """With what is added behind both halves. A draft that reads them changes no text."""
    n, seen = model.config.n_layer, []
    model.setup(16, 2, features=(2, n))
    for layer in model.layers[1], model.layers[n - 1]:
        layer.register_forward_hook(lambda _, inputs, out: seen.append(out))
    model(torch.randint(96, (2, 10)), torch.arange(10)[None])
    assert model.features[:, :10].equal(torch.cat(seen, dim=-1))


@of_each
def test_a_dflash_draft_changes_no_text(model, family):
    made = speculator(model, 64, random_dflash(3, model), "3", 3)
    assert is_golden(made, GOLDEN / family) and made.counts["drafted"]


# Modules


@torch.no_grad()
def test_a_norm_without_a_weight_is_one_with_ones():
    config = config_from_hf(dict(model_type="llama", rms_norm_eps=1e-3))
    x = torch.randn(2, 3, 24)
    with_ones = RMSNorm(8, config)
    assert error(BareNorm(8, config)(x), with_ones(x)) < 1e-6


@torch.no_grad()
def test_the_router_is_its_formula():
    """Row by row in float64, of rows that it norms itself."""
    moe: MoE = tiny(directory=GOLDEN / "gemma4-moe").layers[0].ffn.moe
    x = torch.randn(5, 32)
    weights, experts = moe.route(x)
    for row, own, chosen in zip(x.double(), weights, experts):
        scale = moe.router_norm.weight.double()
        normed = row / (row.square().mean() + moe.router_norm.eps).sqrt() * scale / 32**0.5
        shares = (moe.router.weight.double() @ normed).softmax(0)
        best = shares.topk(3)
        expected = best.values / best.values.sum() * moe.expert_scale[best.indices].double()
        assert chosen.tolist() == best.indices.tolist() and error(own, expected) < 1e-6


def test_proportional_rope_turns_the_first_pairs_as_whole_heads_would():
    """64 of 256 pairs: element i with i + 256, and the exponent over 512."""
    hf = dict(model_type="gemma4_text", hidden_size_per_layer_input=0)
    rope = config_from_hf(hf).layers[-1].rope
    expected = 1e6 ** (-torch.arange(0, 128, 2) / 512)
    torch.testing.assert_close(torch.tensor(rope.frequencies[:64]), expected, rtol=1e-5, atol=0)
    assert rope.frequencies[64:] == (0.0,) * 192


# Files

SEEN = "vision_tower.encoder.a.weight", "embed_vision.embedding_projection.weight"
HEARD = "audio_tower.layers.0.b.weight", "embed_audio.embedding_projection.weight"
MUSE_SEEN = "vision_tower.c.weight", "vision_adapter.fc1.weight", "vision_projection.weight"
UNIFIED_SEEN = "vision_embedder.patch_dense.weight", "embed_vision.embedding_projection.weight"


@pytest.mark.parametrize(
    "family, whole, configs, left, said",
    [
        ("gemma4-e", "gemma4", "vision audio", SEEN + HEARD, "4 tensors of its vision and audio"),
        ("gemma4", "gemma4", "vision", SEEN, "2 tensors of its vision part"),
        (
            "gemma4-unified",
            "gemma4_unified",
            "vision audio",
            UNIFIED_SEEN + HEARD[1:],
            "3 tensors of its vision and audio part",
        ),
        ("muse", "muse_glimmer", "vision", MUSE_SEEN, "3 tensors of its vision part"),
    ],
)
@torch.no_grad()
def test_models_as_they_are_published(tmp_path, capsys, family, whole, configs, left, said):
    """Within one that sees and hears, whose tensors one line passes over. Layers that read another's
    keys have keys of their own in files, which nobody reads."""
    hf, weights = (
        read_json(GOLDEN / family / "config.json"),
        load_file(GOLDEN / family / "model.safetensors"),
    )
    weights = {
        name.replace("model.", "model.language_model.", 1): of for name, of in weights.items()
    }
    layers = config_from_hf(hf).layers
    for i, layer in enumerate(layers):
        if layer.kv_of is not None:
            for name in ("k_proj", "v_proj", "k_norm"):
                weights[f"model.language_model.layers.{i}.self_attn.{name}.weight"] = torch.ones(3)
    tied = hf.pop("tie_word_embeddings")
    whole_hf = dict(model_type=whole, text_config=hf, tie_word_embeddings=tied)
    whole_hf |= {f"{part}_config": {} for part in configs.split()}
    put(tmp_path / "config.json", whole_hf)
    save_file(
        weights | {f"model.{name}": torch.ones(3) for name in left}, tmp_path / "model.safetensors"
    )
    model = load_checkpoint(tmp_path)
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    tokens, logits = golden(GOLDEN / family)
    assert error(logits_of(model, tokens[0]), logits[0]) < 1e-5


def test_a_value_matrix_beside_keys_that_are_values_is_named(tmp_path, capsys):
    directory = shutil.copytree(GOLDEN / "gemma4", tmp_path / "gemma4")
    name = "model.layers.1.self_attn.v_proj.weight"
    change_tensors(directory, **{name: torch.ones(16, 32)})
    load_checkpoint(directory)
    assert (
        f"left out, as config.json's model has no place for it: {name}" in capsys.readouterr().err
    )


MADE = {
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4 experts": ("gemma4_text", GEMMA4_MOE),
    "gemma4 E": ("gemma4_text", GEMMA4_E),
    "muse": ("muse_glimmer_text", MUSE),
}
of_each_made = pytest.mark.parametrize("kind", MADE)


def matrices(directory: Path) -> list[str]:
    """The names of those that quantization replaces."""
    weights = Checkpoint(directory).weights
    return [name for name, weight in weights.items() if weight.quantized]


@of_each_made
@torch.no_grad()
def test_fp8_in_blocks(tmp_path, kind):
    """Of all matrices but those of gates, routers and embeddings a layer."""
    make(tmp_path, MADE[kind][0], **MADE[kind][1])
    stored, plain = {}, {}
    weights = load_file(tmp_path / "model.safetensors")
    for name in matrices(tmp_path):
        weight = weights[name].float()
        N, K = weight.shape
        rows, columns = -(-N // 32), -(-K // 32)
        scales = (torch.rand(rows, columns) + 1) * weight.abs().max() / 448
        of = scales.repeat_interleave(32, 0)[:N].repeat_interleave(32, 1)[:, :K]
        codes = (weight / of).to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = codes.float() * of
    change_tensors(tmp_path, **plain)
    exact = load_checkpoint(tmp_path)
    change_tensors(tmp_path, **stored)
    how = dict(quant_method="fp8", weight_block_size=[32, 32], activation_scheme="dynamic")
    rewrite(tmp_path / "config.json", quantization_config=how)
    model = load_checkpoint(tmp_path)
    assert set(quantized_layers(model)) == set(find_layers(exact, head=False))
    assert error(logits_of(model), logits_of(exact)) < 1e-5


@of_each_made
@pytest.mark.parametrize("how", ["int8", "int4", "gptq", "compressed-tensors"])
@torch.no_grad()
def test_quantized_models_are_their_dequantized_twins(tmp_path, kind, how):
    """Rounded as they are loaded, or written by either format and read."""
    make(tmp_path / "in", MADE[kind][0], **MADE[kind][1])
    if how in ("int8", "int4"):
        load = partial(load_checkpoint, tmp_path / "in", quantize=how)
    else:
        write(tmp_path / "in", tmp_path / "out", 4, 32, False, how == "gptq", form=how)
        load = partial(load_checkpoint, tmp_path / "out")
    model, twin = load(), load()
    for layers in (QuantizedLinear, QuantizedExperts):
        replace_layers(twin, layers, lambda layer: plain_layer(layer.dequantize(F32), layer.bias))
    assert quantized_layers(model) and not quantized_layers(twin)
    assert error(logits_of(model), logits_of(twin)) < 1e-5
    exact = load_checkpoint(tmp_path / "in")
    assert error(logits_of(model), logits_of(exact)) < 0.5


@pytest.mark.parametrize(
    "family, changes, said",
    [
        ("gemma4", dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all'"),
        ("gemma4", dict(rope_scaling=dict(rope_type="yarn")), "rope_scaling={'rope_type': 'yarn'}"),
        ("gemma4", dict(rope_parameters=dict(rope_theta=1e4)), "want full_attention and sliding"),
        (
            "gemma4",
            dict(rope_parameters=dict(full_attention=dict(rope_type="proportional"))),
            "sliding_attention=None: want an object",
        ),
        (
            "gemma4",
            dict(layer_types=["sliding_attention", "chunked_attention"] * 2),
            "want 'full_attention' or 'sliding_attention' for each of 4 layers",
        ),
        (
            "gemma4",
            dict(final_logit_softcapping=0),
            "final_logit_softcapping=0: want float above 0",
        ),
        ("gemma4", dict(attention_bias=True), "attention_bias=True is not supported"),
        ("gemma4", dict(hidden_activation="silu"), "hidden_activation='silu' is not supported"),
        ("gemma4", dict(attention_k_eq_v="yes"), "attention_k_eq_v='yes': want true or false"),
        (
            "gemma4",
            dict(per_layer_config={"1": dict(sliding_window=7)}),
            "per_layer_config: sliding_window=7 is not supported for a layer of its own",
        ),
        ("gemma4", dict(per_layer_config={"1": 3}), "per_layer_config: 1=3: want an object"),
        (
            "gemma4",
            dict(per_layer_config={"4": dict(head_dim=16)}),
            "per_layer_config: '4': want numbers of layers, below 4",
        ),
        (
            "gemma4",
            dict(per_layer_config={"1": dict(head_dim=15)}),
            "head_dim=15: want an even number",
        ),
        (
            "gemma4",
            dict(per_layer_config={"1": dict(num_key_value_heads=3)}),
            "num_attention_heads=4 is no multiple of num_key_value_heads=3",
        ),
        ("gemma4-e", dict(num_kv_shared_layers=4), "num_kv_shared_layers=4 of 5 layers: want"),
        ("gemma4-e", dict(num_kv_shared_layers=-1), "num_kv_shared_layers=-1: want int from 0"),
        (
            "gemma4-e",
            dict(per_layer_config={"1": dict(head_dim=16), "4": dict(head_dim=8)}),
            "layer 4 reads the keys of layer 1, and their heads differ in size",
        ),
        ("gemma4-e", dict(vocab_size_per_layer_input=95), "want vocab_size=96 at least"),
        ("gemma4-e", dict(vocab_size="96"), "vocab_size='96': want int above 0"),
        ("gemma4-moe", dict(top_k_experts=7), "top_k_experts=7: want int above 0, up to 6"),
        ("gemma4-moe", dict(scoring_func="sigmoid"), "scoring_func='sigmoid' is not supported"),
        ("gemma4-unified", dict(enable_moe_block=True), "enable_moe_block=True is not supported"),
        (
            "gemma4-unified",
            dict(hidden_size_per_layer_input=8),
            "hidden_size_per_layer_input=8 is not supported",
        ),
        ("muse", dict(layer_rope_theta=[5e5] * 6), "want 0 or 10000.0 for each of 6 layers"),
        ("muse", dict(final_logit_softcapping=None), "final_logit_softcapping=None: want float"),
        ("muse", dict(hidden_activation="gelu"), "hidden_activation='gelu' is not supported"),
        ("muse", dict(qk_scale_factor=0), "qk_scale_factor=0: want float above 0"),
    ],
)
def test_what_is_not_handled_is_refused_by_name_and_value(tmp_path, family, changes, said):
    directory = shutil.copytree(GOLDEN / family, tmp_path / "bad")
    rewrite(directory / "config.json", **changes)
    assert said in refusal(vet.open_checkpoint, directory, tokenizer=False)


def test_what_is_written_of_one_that_sees_and_hears_is_its_text_part(tmp_path, capsys):
    source, out = tmp_path / "in", tmp_path / "out"
    make(source, "gemma4_text", **GEMMA4_E)
    text = read_json(source / "config.json")
    parts = dict(text_config=text, vision_config={}, audio_config={})
    put(source / "config.json", dict(parts, model_type="gemma4"))
    made = write(source, out, 4, 32, False)
    capsys.readouterr()
    assert error(logits_of(load_checkpoint(out)), logits_of(made)) < 1e-5
    assert not capsys.readouterr().err

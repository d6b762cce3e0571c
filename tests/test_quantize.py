"""
Rounding, GPTQ, and quantized checkpoints in the Hub's GPTQ layout, against what is written here from the definitions.
"""
import fcntl
import signal
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cli.quantize
import formats
import quantize
from checkpoint import Checkpoint, UserError, hf_weights, load_model
from cli.errors import report_errors
from gptq import find_best_scales, gptq, gptq_model
from helpers import (CPU, F32, ROOT, SHAPE, TINY, absent, change, error, load_checkpoint, logits_of, make,
                     open_tokenizer, put, quantized_layers, read, read_json, refusal, rewrite, tiny, write)
from model import Transformer
from quantize import CODES, INT4, INT8, QuantizedLinear, round_to_nearest
from tp import Shard

Q, K, V = (f"model.layers.1.self_attn.{part}_proj." for part in "qkv")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """quantize.py, of the checkpoint "in", which is made here, to "out"."""
    def run(*options) -> None:
        options = ("--checkpoint", tmp_path / "in", "--out", tmp_path / "out", "--group-size", 32, *options)
        monkeypatch.setattr("sys.argv", ["quantize.py", *map(str, options), "--device", "cpu"])
        quantize.main()
    make(tmp_path / "in")
    return run


@pytest.fixture
def made(tmp_path):
    """Makes "in", a checkpoint, and of it "out", one of 4 bits in groups of 32; what the files hold."""
    def run(kind: str = "llama", bits: int = 4, act_order: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        theirs = make(tmp_path / "in", kind)
        write(tmp_path / "in", tmp_path / "out", bits, 32, False, act_order)
        return theirs, load_file(tmp_path / "out" / "model.safetensors")
    return run


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def parts_of(name: str) -> dict[str, None]:
    """The tensors of a quantized matrix, for change() to drop."""
    return dict.fromkeys(name + kind for kind in ("qweight", "qzeros", "scales", "g_idx"))


def dense(module: QuantizedLinear) -> Tensor:
    return module.dequantize(torch.float64)


def by_bytes(words: Tensor, bits: int) -> Tensor:
    """The codes of each row of words, from the low bits on, fp64."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    return codes.double()


def decode_by_hand(held: dict[str, Tensor], name: str, bits: int, offset: int = 0) -> Tensor:
    """The weights [N, K] of a file.

    offset: what each zero point lacks. It was taken from whole words, as if they were numbers of 32 bits."""
    words, qzeros, scales, g_idx = (held[name + kind] for kind in ("qweight", "qzeros", "scales", "g_idx"))
    zeros = by_bytes(qzeros + offset * {4: 0x11111111, 8: 0x01010101}[bits], bits)
    return ((by_bytes(words.T, bits).T - zeros[g_idx]) * scales[g_idx]).T


def values(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, g_idx: Tensor | None = None) -> Tensor:
    """codes, as round_to_nearest and gptq give them -> weights [N, K], fp64."""
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros
    if g_idx is None:
        g_idx = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes.double() - zeros.double()[:, g_idx]) * scales.double()[:, g_idx]


@pytest.mark.parametrize("bits, group_size, sym", [(4, 32, True), (4, 64, False), (8, -1, True), (8, 32, False)])
def test_rounding_gives_the_nearest_of_evenly_spaced_values(bits, group_size, sym):
    w = torch.randn(5, 192) * torch.rand(5, 1)
    w[1] = w[1].abs()
    w[2, :64] = 0
    codes, scales, zeros = round_to_nearest(w, CODES[f"int{bits}"], group_size, sym)
    assert codes.shape == w.shape and scales.dtype == torch.float16 and (zeros is None) == sym
    groups, got = (t.double().unflatten(1, (scales.shape[1], -1)) for t in (w, values(codes, scales, zeros, bits)))
    assert groups.shape[2] == (192 if group_size == -1 else group_size)
    low, high, top = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0), 2 ** bits - 1
    if sym:
        span, zero = 2 * torch.maximum(-low, high) / top, torch.full_like(low, 2 ** (bits - 1))
    else:
        span = torch.maximum((high - low) / top, high / (top - 1))
        zero = torch.where(span > 0, -low / span, 0).round().clamp(1, top)
        assert zeros.equal(zero.to(torch.uint8))
    torch.testing.assert_close(scales.double(), span.clamp(min=2 ** -24), rtol=1e-3, atol=2 ** -25)  # as fp16 has them
    scales = scales.double()[:, :, None, None]
    spaced = (torch.arange(2 ** bits) - zero[:, :, None, None]) * scales
    least = (groups[..., None] - spaced).abs().amin(-1)
    assert ((got - groups).abs() <= least + 1e-5 * scales[..., 0]).all()


def test_scales_are_chosen_by_what_each_weights_error_costs():
    w, costs = torch.randn(64, 100), torch.rand(64, 100) ** 8

    def loss(weighing: Tensor) -> Tensor:
        scale, zero = find_best_scales(w.T, INT4, False, weighing.T)
        return (((quantize.encode(w, scale, zero, INT4) - zero) * scale - w).square() * costs).sum(0)

    by_cost, alike = loss(costs), loss(torch.ones_like(costs))
    assert (by_cost <= alike).all() and by_cost.sum() < 0.9 * alike.sum()


def correlated(K: int):
    x = torch.randn(500, 24) @ torch.randn(24, K) + 0.3 * torch.randn(500, K)
    return x * (1 + 3 * torch.rand(K))


@pytest.mark.parametrize("N, K, bits, group_size", [(33, 288, 4, 96), (16, 320, 4, -1), (9, 256, 8, 128)])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("sym", [False, True])
def test_gptq_loses_less_than_rounding_and_says_how_much(N, K, bits, group_size, act_order, sym):
    w, x = torch.randn(N, K), correlated(K)
    hessian = x.T @ x
    *quantized, loss = gptq(w, hessian, CODES[f"int{bits}"], group_size, sym, act_order)
    g_idx = quantized[-1]
    q = values(*quantized[:3], bits, g_idx)
    rounded = values(*round_to_nearest(w, CODES[f"int{bits}"], group_size, sym), bits)
    ours, plain = ((t - w) @ x.double().T for t in (q, rounded))
    assert ours.square().sum() < 0.7 * plain.square().sum()
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(K)
    weighted = [((t @ damped) * t).sum() for t in (w.double() - q, w.double())]
    assert loss == pytest.approx((weighted[0] / weighted[1]).item(), rel=0.02)
    assert (g_idx is None) != act_order
    if act_order:  # each group's inputs are larger than the next one's
        sizes = [hessian.diagonal()[g_idx == c] for c in range(K // (K if group_size == -1 else group_size))]
        assert all(a.min() >= b.max() for a, b in pairwise(sizes)) and len({len(size) for size in sizes}) == 1


def test_gptq_gains_by_narrower_ranges(monkeypatch):
    w, x = torch.randn(33, 288), correlated(288)
    narrowed = gptq(w, x.T @ x, INT4, 96, False, False)[-1]
    monkeypatch.setattr("gptq.SHRINK", [1.0])
    assert narrowed < 0.99 * gptq(w, x.T @ x, INT4, 96, False, False)[-1]


def test_a_dead_input_is_rounded_and_disturbs_no_other():
    w, x = torch.randn(6, 64), correlated(64)
    x[:, 7] = 0
    codes, scales, zeros, _, _ = gptq(w, x.T @ x, INT8, -1, False, False)
    assert (values(codes, scales, zeros, 8)[:, 7] - w[:, 7]).abs().max() <= scales.max()
    codes, scales, zeros, g_idx, loss = gptq(w, torch.zeros(64, 64), INT4, 32, True, True)
    assert torch.isfinite(values(codes, scales, zeros, 4, g_idx)).all() and loss == loss


def test_a_hessian_that_is_not_positive_definite_is_damped_and_said_so_once(capsys):
    quantize.say_once.cache_clear()
    hessian = torch.eye(64) - 0.5 * torch.ones(64, 64).roll(1, 0)
    hessian = hessian + hessian.T
    for _ in range(2):
        codes, scales, zeros, g_idx, _ = gptq(torch.randn(4, 64), hessian, INT4, 32, False, True)
        assert torch.isfinite(values(codes, scales, zeros, 4, g_idx)).all()
    assert capsys.readouterr().err.count("not positive definite") == 1
    assert "overflow" in refusal(gptq, torch.randn(4, 64), hessian * float("inf"), INT4, 32, False, True)


@pytest.mark.parametrize("K, group_size, words", [
    (96, 64, "64 96 32"), (96, 48, "48"), (56, -1, "56 32"), (96, 0, "0")])
def test_groups_that_do_not_fit_are_refused(K, group_size, words):
    messages = [refusal(round_to_nearest, torch.randn(4, K), INT4, group_size, True),
                refusal(gptq, torch.randn(4, K), torch.eye(K), INT4, group_size, True, False)]
    assert [absent(words, message) for message in messages] == [[], []]


@pytest.mark.parametrize("act_order", [False, True])
def test_weights_are_moved_to_answer_to_the_inputs_as_they_were(act_order):
    """8 bits lose next to nothing: what is left is what the nearest outputs, by least squares, leave."""
    w, before = torch.randn(24, 64), correlated(64)
    x = before + 0.3 * torch.randn_like(before)
    hessian, drift = x.T @ x, (before - x).T @ x
    outputs = []
    for given in (None, drift):
        codes, scales, zeros, g_idx, _ = gptq(w, hessian, INT8, 32, False, act_order, given)
        outputs.append(x.double() @ values(codes, scales, zeros, 8, g_idx).T)
    wanted = before.double() @ w.double().T
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(64)
    best = w.double() + w.double() @ drift.double() @ damped.inverse()
    plain, moved, least = (error(out, wanted) for out in (*outputs, x.double() @ best.T))
    assert moved < 0.95 * plain and moved == pytest.approx(least, rel=0.01)


@torch.no_grad()
def test_each_matrix_was_calibrated_on_the_inputs_that_it_gets(monkeypatch):
    """In the quantized model each matrix has the inputs whose Hessian its quantization was given, and the drift is that
    from the inputs in the model before."""
    model, seen = tiny(), []
    monkeypatch.setattr("gptq.CHUNK", 64)  # several chunks
    monkeypatch.setattr("gptq.gptq", lambda w, hessian, *how: seen.append((hessian, how[-1])) or gptq(w, hessian, *how))
    tokens = torch.randint(2048, (5, 32))

    def inputs(modules):
        found = []
        for module in modules:
            module.register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, 1)))
        read(model, tokens)
        return list(found)

    model.setup(32)
    before = inputs(map(model.get_submodule, quantize.find_layers(model, head=False)))
    gptq_model(model, "int4", 128, False, tokens, True)
    after = inputs(quantized_layers(model).values())
    assert len(seen) == len(before) == len(after) == 20
    for (hessian, drift), y, x in zip(seen, before, after):
        least = 1e-3 * hessian.abs().max().item()
        torch.testing.assert_close(hessian, x.T @ x, rtol=1e-4, atol=least)
        torch.testing.assert_close(drift, (y - x).T @ x, rtol=1e-3, atol=least)
    assert seen[0][1].abs().max() == 0 < seen[-1][1].abs().max()


def written_and_loaded(directory: Path, *how, **more) -> tuple[Transformer, dict[str, Tensor]]:
    """The model, the head included, that was written, and what the file holds; it loads bit for bit."""
    theirs = make(directory / "in", "qwen2")
    made = write(directory / "in", directory / "out", *how, head=True, **more)
    held, loaded = load_file(directory / "out" / "model.safetensors"), load_checkpoint(directory / "out")
    want, got = quantized_layers(made), quantized_layers(loaded)
    assert want.keys() == got.keys() and len(want) == 2 * 4 + 1
    for name in want:
        assert torch.equal(dense(want[name]), dense(got[name])), name
    assert all(torch.equal(held[name], theirs[name]) for name in held if name in theirs)  # as it was, its dtype too
    torch.testing.assert_close(logits_of(made), logits_of(loaded))
    return made, held


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_what_is_written_loads_bit_for_bit(tmp_path, bits, group_size, sym, act_order, form):
    made, held = written_and_loaded(tmp_path, bits, group_size, sym, act_order, checkpoint_format=form)
    layers = quantized_layers(made)
    assert {layer.zeros is None for layer in layers.values()} == {sym}
    for name, (ours, row, (N, *_), *_) in hf_weights(made.config).items():
        if name not in held and (name.startswith("model.layers.1.self_attn") or name == "lm_head.weight"):
            w = dense(layers[ours.removesuffix(".weight")])[row:row + N]
            assert torch.equal(w, decode_by_hand(held, name.removesuffix("weight"), bits, form == "gptq")), name


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("sym", [False, True])
def test_compressed_tensors_written_and_loaded_bit_for_bit(tmp_path, bits, group_size, sym):
    """What the package reads of them: see the README."""
    made, held = written_and_loaded(tmp_path, bits, group_size, sym, form="compressed-tensors")
    scales, zeros = held[Q + "weight_scale"], torch.tensor([[2 ** (bits - 1)]])
    assert held[Q + "weight_shape"].tolist() == [64, 64] and scales.shape == (64, 1 if group_size == -1 else 2)
    assert (Q + "weight_zero_point" in held) != sym
    if not sym:
        zeros = by_bytes(held[Q + "weight_zero_point"].T, bits).T[:, :, None]
    codes = by_bytes(held[Q + "weight_packed"], bits).unflatten(1, (scales.shape[1], -1))
    w = ((codes - zeros) * scales[:, :, None]).flatten(1)
    assert torch.equal(dense(quantized_layers(made)["layers.1.attn.wqkv"])[:64], w)


@pytest.mark.parametrize("form, offset", [("gptq", 1), ("gptq_v2", 0), (None, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_file_made_by_hand_loads(tmp_path, made, form, offset, bits):
    """All codes and stored zero points there are, also those that borrowed from a neighbour when 1 was taken away. An
    old file, which names no form, here has no g_idx either: its groups are side by side."""
    _, held = made(bits=bits)
    for name in [name for name in held if name.endswith(("qweight", "qzeros"))]:
        held[name] = torch.randint(-2 ** 31, 2 ** 31 - 1, held[name].shape).int()
    held[Q + "qzeros"][0] = -1
    change(tmp_path / "out", dict(checkpoint_format=form), **held)
    if not form:
        change(tmp_path / "out", **{name: None for name in held if name.endswith("g_idx")})
        settings = read_json(tmp_path / "out" / "config.json")["quantization_config"]
        del settings["checkpoint_format"]
        rewrite(tmp_path / "out" / "config.json", quantization_config=settings)
    wqkv = load_checkpoint(tmp_path / "out").layers[1].attn.wqkv
    assert torch.equal(dense(wqkv), torch.cat([decode_by_hand(held, part, bits, offset) for part in (Q, K, V)]))


@pytest.mark.parametrize("kept", [(), (Q,), (K, V)])
@pytest.mark.parametrize("act_order", [False, True])
@torch.no_grad()
def test_some_of_q_k_and_v_may_be_left_as_they_were_or_have_groups_of_their_own(tmp_path, made, lone, kept, act_order):
    """Biases included; with what fast/ makes of them too, on a CPU bytes of codes; and of ranks, the parts."""
    import fast
    theirs, held = made("qwen2", act_order=act_order)
    held[V + "g_idx"] = held[V + "g_idx"].flip(0)
    change(tmp_path / "out", **held | {name + "weight": theirs[name + "weight"] for name in kept}
           | {part: None for name in kept for part in parts_of(name)})
    splits = None, *(partial(Shard, rank=rank, ranks=2) for rank in (0, 1))
    models = [load_checkpoint(tmp_path / "out", CPU, torch.float64, split=split) for split in splits]
    x = torch.randn(3, 64, dtype=torch.float64)
    for name, layer, *parts in zip((Q, K, V), *(model.layers[1].attn.wqkv for model in models), strict=True):
        w = theirs[name + "weight"].double() if name in kept else decode_by_hand(held, name, 4)
        torch.testing.assert_close(layer(x), x @ w.T + held[name + "bias"])
        torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1), layer(x))
    tokens, model = torch.randint(64, (1, 9)), load_checkpoint(tmp_path / "out")
    model.setup(16, 1)
    plain = read(model, tokens)
    torch.testing.assert_close(read(fast.optimize(model).decoder, tokens), plain)


def test_modules_left_as_they_were_load_as_they_are(tmp_path, made):
    (theirs, _), name = made(), "model.layers.0.mlp.down_proj."
    zero_bias = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}  # AutoGPTQ writes them
    change(tmp_path / "out", **parts_of(name), **zero_bias, **{name + "weight": theirs[name + "weight"]})
    model = load_checkpoint(tmp_path / "out")
    assert torch.equal(model.layers[0].ffn.w_down.weight, theirs[name + "weight"].float())
    assert len(quantized_layers(model)) == 7


@pytest.mark.parametrize("config, tensors, words", [
    ({}, {Q + "qweight": torch.zeros(8, 32).int()}, Q + "qweight [8, 32] [8, 64]"),
    ({}, {Q + "scales": torch.zeros(2, 64).int()}, Q + "scales I32 F16"),
    ({}, {Q + "scales": None}, Q + "scales missing"), (dict(desc_act=True), {Q + "g_idx": None}, "g_idx missing"),
    ({}, {K + "qweight": None}, K + "qweight missing"),
    ({}, {Q + "g_idx": torch.zeros(64).int()}, Q + "g_idx 32 2"),
    ({}, {Q + "weight": torch.zeros(64, 64)}, Q + "weight place"),
    (dict(bits=8), {}, "qweight [8, [16,"), (dict(group_size=64), {}, "qzeros [2, [1,"),
    (dict(group_size="x"), {}, "group_size x"), (dict(bits=4.0), {}, "bits 4.0")])
def test_what_disagrees_with_the_configuration_is_refused_by_name(tmp_path, made, config, tensors, words):
    made()
    change(tmp_path / "out", config, **tensors)
    assert absent(words, refusal(load_checkpoint, tmp_path / "out")) == []


def test_rounding_while_loading_stays_near_the_exact_weights():
    exact = logits_of(tiny())
    int8, int4, int4_coarse = (error(logits_of(load_checkpoint(TINY, CPU, F32, *how)), exact)
                               for how in (("int8",), ("int4",), ("int4", 128)))
    assert int8 < 0.02 < int4 < int4_coarse < 0.3
    assert len(quantized_layers(load_checkpoint(TINY, CPU, F32, "int4"))) == 5 * 4
    groups = [quantize.default_group(*how) for how in ((None, None), ("int8", None), ("int4", None), ("int8", 64))]
    assert groups == [1, -1, 32, 64]


@pytest.mark.parametrize("kind, group, step", [("int8", 64, 2 / 255), ("int4", 32, 2 / 15)])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_rounded_head_has_codes_of_its_own(tmp_path, tied, kind, group, step):
    """The embedding and the other layers stay. A step of a group is at most so much of its range from 0 on."""
    head = make(tmp_path, tie_word_embeddings=tied)["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    plain, model = load_checkpoint(tmp_path), load_checkpoint(tmp_path, quantize_head=kind)
    assert quantized_layers(model) == {"head": model.head} and torch.equal(model.embed.weight, plain.embed.weight)
    largest = head.abs().unflatten(1, (-1, group)).amax(-1)
    off = (model.head.dequantize(F32) - head).abs().unflatten(1, (-1, group)).amax(-1)
    assert (off <= largest * step * 0.6).all() and off.any() and model.head.scales.shape == largest.shape
    plain.head = nn.Linear(*reversed(head.shape), bias=False)
    plain.head.weight.copy_(model.head.dequantize(F32))
    assert error(logits_of(model), logits_of(plain)) < 1e-6


def test_a_head_that_cannot_be_rounded_is_refused(tmp_path, made):
    made()
    write(tmp_path / "in", tmp_path / "head", 4, 32, False, head=True)
    assert "quantize_head=int8" in refusal(load_checkpoint, tmp_path / "head", quantize_head="int8")
    make(tmp_path / "40", hidden_size=40)
    assert "multiple of 32" in refusal(load_checkpoint, tmp_path / "40", quantize_head="int4")
    weights = make(tmp_path / "nan", tie_word_embeddings=True)
    weights["model.embed_tokens.weight"][3, 5] = float("nan")
    save_file(weights, tmp_path / "nan" / "model.safetensors")
    assert "model.embed_tokens.weight has NaN" in refusal(load_checkpoint, tmp_path / "nan", quantize_head="int8")


def test_the_command_writes_a_checkpoint_that_is_better_with_gptq(tmp_path, command):
    text = tmp_path / "text"
    text.write_text((ROOT / "README.md").read_text() * 2)
    tokens = torch.tensor(open_tokenizer(TINY).encode_text(text.read_text()))[:400]
    losses, exact = [], logits_of(tiny(), tokens).log_softmax(-1)
    calibration = ["--gptq", "--act-order", "--calibration", text, "--calibration-tokens", 2048]
    for out, options in {"rounded": [], "gptq": calibration}.items():
        command("--checkpoint", TINY, "--out", tmp_path / out, "--group-size", 128, *options)
        written = {"config.json", "generation_config.json", "tokenizer.model", "model.safetensors"}
        assert written <= {*names(tmp_path / out)}
        assert "quantized already" in refusal(load_checkpoint, tmp_path / out, CPU, F32, "int8")
        found = logits_of(load_checkpoint(tmp_path / out), tokens).log_softmax(-1)
        losses.append(torch.nn.functional.kl_div(found, exact, log_target=True, reduction="batchmean"))
    assert losses[1] < 0.7 * losses[0]
    assert read_json(tmp_path / "gptq" / "config.json")["quantization_config"] == dict(
        bits=4, group_size=128, sym=False, desc_act=True, lm_head=False, quant_method="gptq",
        checkpoint_format="gptq_v2")
    assert names(tmp_path) == ["gptq", "in", "rounded", "text"]


def test_shards_are_small_and_load_as_one_file_does(tmp_path, monkeypatch):
    """Of a source in shards no index is left behind, nor a link to nothing."""
    weights = make(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").unlink()
    (tmp_path / "in" / "gone.json").symlink_to(tmp_path / "nowhere")
    with monkeypatch.context() as small:
        small.setattr(formats, "SHARD_BYTES", 20_000)
        formats.write_shards(iter(weights.items()), tmp_path / "in")
        made = write(tmp_path / "in", tmp_path / "shards", 4, 32, False)
    write(tmp_path / "in", tmp_path / "out", 4, 32, False)
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert max(sum(t.nbytes for t in load_file(file).values()) for file in files) <= 20_000
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}
    assert names(tmp_path / "out") == ["config.json", "model.safetensors"]
    for out in ("shards", "out"):
        assert torch.equal(logits_of(load_checkpoint(tmp_path / out)), logits_of(made))


@pytest.mark.parametrize("options, words", [
    ("--group-size 64", "64 96 32"), ("--head", "--head"), ("--bits 3", "3"), ("--gptq", "--calibration"),
    ("--act-order", "--gptq"), ("--calibration-tokens 9", "--gptq"),
    ("--format awq", "--format compressed-tensors"), ("--out .", "exists"),
    (f"--format compressed-tensors --gptq --act-order --calibration {__file__}", "--act-order gptq"),
    (f"--gptq --calibration {__file__} --calibration-tokens 99999999", "99999999 tokens"),
    ("--gptq --calibration /none", "/none"), ("--out /none/x", "/none make"), ("--out {}/link", "link exists")])
def test_what_cannot_be_quantized_is_refused_and_leaves_nothing(tmp_path, monkeypatch, command, options, words):
    """Before any weight is read."""
    monkeypatch.setattr("cli.quantize.load_model", None)
    make(tmp_path / "in", tie_word_embeddings=True, vocab_size=2048)
    (tmp_path / "in" / "tokenizer.model").write_bytes((TINY / "tokenizer.model").read_bytes())
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises((UserError, OSError)) as caught:
        command(*options.format(tmp_path).split())
    assert absent(words, str(caught.value)) == [] and names(tmp_path) == ["in", "link"]


@pytest.mark.parametrize("config, weight, words", [
    (dict(hidden_size=10 ** 12), 0, "hidden_size"),
    (dict(hidden_size=2 ** 16, intermediate_size=2 ** 20), 0, "GiB of weights"),
    ({}, float("nan"), K + "weight"), ({}, float("inf"), K + "weight")])
def test_sizes_no_machine_holds_and_weights_that_are_no_numbers_are_refused(tmp_path, command, config, weight, words):
    weights = make(tmp_path / "in")
    weights[K + "weight"][3, 5] = weight
    save_file(weights, tmp_path / "in" / "model.safetensors")
    put(tmp_path / "in" / "config.json", SHAPE | config)
    assert words in refusal(command) and names(tmp_path) == ["in"]


def test_rows_that_fill_no_words_are_refused(tmp_path, command):
    make(tmp_path / "in", num_attention_heads=8, num_key_value_heads=1, head_dim=20)
    assert "k_proj.weight has 20 rows" in refusal(command) and names(tmp_path) == ["in"]


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path, command, made):
    made()
    assert "already" in refusal(command, "--checkpoint", tmp_path / "out", "--out", tmp_path / "again")
    assert "quantize" in refusal(load_model, Checkpoint(tmp_path / "out"), CPU, F32)


@pytest.fixture
def handlers():
    """Those of signals, as they were."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ends, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (OSError(28, "No space left"), 2)])
@pytest.mark.parametrize("module, where", [(formats, "save_file"), (quantize, "round_to_nearest")])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, handlers, command, ends, code, module, where):
    calls, plain = [], getattr(module, where)

    def fail_later(*args, **more):
        calls.append(ends)
        if len(calls) == 2:
            if code == 2:
                raise ends
            signal.raise_signal(ends)
        return plain(*args, **more)

    monkeypatch.setattr(module, where, fail_later)
    monkeypatch.setattr(formats, "SHARD_BYTES", 20_000)
    with pytest.raises(SystemExit) as caught:
        report_errors(command)
    assert caught.value.code == code and len(calls) == 2 and names(tmp_path) == ["in"]


def test_what_a_killed_run_left_is_removed_and_what_another_makes_or_a_user_has_is_kept(tmp_path, command):
    for name in ("killed", "running", "user"):
        (tmp_path / f"out.partial-{name}").mkdir()
    (tmp_path / "out.partial-killed" / "lock").write_text("")
    with open(tmp_path / "out.partial-running" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command()
    assert names(tmp_path) == ["in", "out", "out.partial-running", "out.partial-user"]
    assert not (tmp_path / "out" / "lock").exists()


def test_nothing_is_copied_through_a_link_but_the_hubs_blobs(tmp_path, command):
    source, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    for place in (source, blobs):
        place.mkdir(parents=True)
    make(source)
    for place, name in ((blobs, "vocab.txt"), (tmp_path, "secret.txt")):
        (place / name).write_text("words")
        (source / name).symlink_to(place / name)
    command("--checkpoint", source)
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", "vocab.txt"]


def test_a_disk_without_room_is_said_before_the_work(monkeypatch, command):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Namespace(free=1000))
    monkeypatch.setattr(cli.quantize, "load_model", None)
    assert "are free there" in refusal(command)

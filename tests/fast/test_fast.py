"""The modules that fast/ swaps in against those that they replace."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import library, nn
from torch._dynamo.utils import counters

from drafts.eagle import Head, HeadConfig
from fast import nvrtc, optimize, use_kernels
from fast.engine import FastEngine
from fast.cpu import ONEDNN, CpuLinear, compiled_product, linear, row_decoder
from fast.decoder import (
    FusedAttention,
    FusedFeedForward,
    install_kernels,
    plain_halves,
    unknown_fields,
)
from fast.known import KNOWN
from fast.packed_linear import PackedLinear
from hub.formats import SeparateLinears
from generate import generate
from helpers import (
    ENGINES,
    F32,
    FAMILIES,
    GOLDEN,
    GREEDY,
    TINY,
    error,
    load_checkpoint,
    make,
    on_each_device,
    read,
    rope_of,
    run,
    same_but_for_ties,
    speculator,
    tiny,
    with_all_experts,
)
from model import Config, FeedForward, KVCache, LayerConfig, MoEConfig, Transformer
from quantize import NVFP4, QuantizedExperts, QuantizedLinear
from generate import Sampling, choose


@pytest.mark.parametrize(
    "dtype, tolerance, bias, N",
    [(torch.float32, 1e-6, True, 131), (torch.bfloat16, 4e-3, False, 130)],
)
def test_compiled_cpu_linear_equals_linear(dtype, tolerance, bias, N):
    """With outputs in one part and in two; with four: test_packed.py."""
    linear = nn.Linear(577, N, bias=bias).to(dtype).requires_grad_(False)
    compiled = torch.compile(row_decoder(CpuLinear(linear)), fullgraph=True)
    exact = deepcopy(linear).double()
    for shape in [(577,), (2, 4, 577), (9, 577)]:  # 8 rows are few, 9 are not
        x = torch.randn(shape, dtype=dtype)
        out, ref = compiled(x), exact(x.double())
        assert (out.shape, out.dtype) == (ref.shape, dtype) and error(out, ref) < tolerance


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(577),
        torch.randn(2, 9, 577),
        torch.randn(0, 577),
        torch.randn(300, 577),  # of any strides, too:
        torch.randn(4, 10, 577)[:, 3],
        torch.randn(577, 5).T,
        torch.randn(1, 577).expand(6, 577),
    ],
)
@pytest.mark.parametrize("w", [torch.randn(131, 577), torch.randn(577, 131).T])
def test_a_cpus_product_is_linears(x, w, dtype, tolerance):
    for bias in torch.randn(131), None:
        inputs = x, w, bias = [t if t is None else t.to(dtype) for t in (x, w, bias)]
        out, ref = linear(*inputs), F.linear(*(t if t is None else t.double() for t in inputs))
        assert (out.shape, out.dtype) == (ref.shape, dtype)
        assert not out.numel() or error(out, ref) < tolerance
        if ONEDNN and dtype == torch.float32:
            library.opcheck(compiled_product, inputs)


def test_optimize_on_a_cpu_replaces_layers_for_prefill_and_for_a_decoder_with_the_same_weights():
    model = load_checkpoint(TINY, quantize="int8")
    model.setup(20, 1)
    tokens = torch.randint(model.config.vocab_size, (1, 3))
    ref, fast = read(model, tokens), optimize(model)
    parameters = dict(fast.decoder.named_parameters())
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    for found, decodes in ((model, False), (fast.decoder, True)):
        layers = [layer for layer in found.modules() if hasattr(layer, "decodes")]
        assert len(layers) == 4 * len(model.layers) + 1 and all(
            layer.decodes == decodes for layer in layers
        )
        assert error(read(found, tokens), ref) < 1e-5
    assert not fast.kernels and optimize(tiny().to("meta")) is None


# What fast/ does not know


@pytest.fixture
def model() -> Transformer:
    """Whose cache has a row of 20 tokens."""
    model = tiny()
    model.setup(20, 1)
    return model


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_what_fast_knows_is_a_field(kind):
    """Not the other way round: a fork has fields of its own."""
    assert KNOWN[kind] <= {each.name for each in fields(kind)}


def with_field(values, name: str, value, **changes):
    """The same values in a dataclass that has one more field, as after a change of model.py or
    generate.py."""
    kind = make_dataclass(
        type(values).__name__,
        [(name, object, field(default=None))],
        bases=(type(values),),
        frozen=True,
    )
    return kind(**vars(values) | {name: value}, **changes)


@pytest.mark.parametrize(
    "changed, name",
    [
        ("", "cap"),
        ("Config", "scale"),
        ("LayerConfig", "clamp"),
        ("Rope", "window"),
        ("MoEConfig", "cap"),
    ],
)
def test_a_new_field_turns_kernels_off_by_its_value_and_says_which(model, capsys, changed, name):
    """A name that is known of another part is none."""

    def new(values):
        return (
            with_field(values, name, 30.0)
            if type(values).__name__ == changed
            else with_field(values, "cap", None)
        )

    first, *others = model.config.layers
    first = new(replace(first, rope=new(first.rope), moe=new(MoEConfig(4, 2, 8))))
    model.config = new(replace(model.config, layers=(first, *others)))
    assert (use_kernels(model) is None) == bool(changed)
    told = f"plain PyTorch decodes: fast/ does not know {changed}.{name}=30.0\n"
    assert capsys.readouterr().err == (told if changed else "")


def test_a_new_field_of_sampling_turns_the_sampling_kernels_off_by_its_value_and_them_alone(
    model, capsys
):
    fast, sampling = use_kernels(model), Sampling(0.7, 50, 0.9, 0.1)
    known, other = (with_field(sampling, "typical", value) for value in (None, 0.5))
    expected = torch.tensor([0.7, 50, 0.9, 0.1, 1, 0, 0])
    assert fast.settings(known).equal(expected)
    assert fast.settings(other) is fast.settings(other) is None
    assert (
        capsys.readouterr().err
        == "plain PyTorch samples: fast/ does not know Sampling.typical=0.5\n"
    )

    engine = FastEngine(tiny(), 20)
    engine.kernels, engine.fast = True, fast  # what an engine on a GPU has
    engine.decoder, engine.compiled_decoder = range(2)
    for setting, used in (other, (False, 1, choose)), (known, (True, 0, fast.choose)):
        engine.set_sampling(setting)
        assert (engine.captures, engine.forward, engine.twin(choose)) == used
    assert engine.settings.equal(expected)


def test_kernels_are_installed_once(model):
    install_kernels(model)
    with pytest.raises(ValueError, match="load it again"):
        install_kernels(model)


# The halves of a layer


class Experts(FeedForward):
    """A feed-forward part that fast/ does not know."""

    def forward(self, x):
        assert x.dim() == 3
        return super().forward(x) / 2


class OtherCache(KVCache):
    """A cache that fast/ does not know."""


def give_experts(block):
    block.ffn.__class__ = Experts


def give_another_cache(block):
    block.attn.cache.__class__ = OtherCache


def quantize_apart(block):
    block.attn.wqkv = SeparateLinears([block.attn.wqkv])


@pytest.mark.parametrize("family, quantize", [(GOLDEN / "gemma3", None), (TINY, "int8")])
@pytest.mark.parametrize(
    "change, reason, which",
    [
        (give_experts, "Experts in the place of FeedForward", "ffn"),
        (give_another_cache, "OtherCache in the place of KVCache", "attn"),
        (
            quantize_apart,
            "q, k and v are quantized apart, or in codes or scales that no kernel knows",
            "attn",
        ),
    ],
)
@torch.no_grad()
def test_the_halves_of_a_layer_are_replaced_separately(change, reason, which, family, quantize):
    """Of gemma3 the layer has a window and, of the others' ropes, its own."""
    plain, fast = (load_checkpoint(family, quantize=quantize) for _ in range(2))
    for model in (plain, fast):
        model.setup(64, 2)
        change(model.layers[1])
    assert plain_halves(fast) == {reason: 1}
    decoder = install_kernels(fast)
    assert decoder.kernels == (which == "ffn")
    for n, block in enumerate(fast.layers):
        found = isinstance(block.attn, FusedAttention), isinstance(block.ffn, FusedFeedForward)
        assert found == ((True, True) if n != 1 else (which == "ffn", which == "attn"))
    gated = sum(isinstance(module, PackedLinear) and module.gated for module in fast.modules())
    assert gated == bool(quantize) * (len(fast.layers) - (which == "ffn"))
    compare(plain, fast, decoder, 1e-5)


def test_experts_in_codes_that_no_kernel_knows_stay_as_they_are():
    model = load_checkpoint(GOLDEN / "mixtral")
    model.setup(16, 1)
    model.layers[0].ffn.w_down = QuantizedExperts(
        torch.zeros(2, 8, 4).int(), torch.ones(2, 8, 2), None, NVFP4
    )
    assert plain_halves(model) == {"experts in codes or scales that no kernel knows": 1}


def test_where_no_half_can_be_replaced_none_is(model, capsys):
    for block in model.layers:
        give_experts(block)
        give_another_cache(block)
    assert use_kernels(model) is None and capsys.readouterr().err.count("\n") == 1


def random_twice(config: Config) -> tuple[Transformer, Transformer]:
    """Two models of the same random weights."""
    plain = Transformer(config).requires_grad_(False)
    for weight in plain.parameters():
        weight.normal_(std=0.2) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
    return plain, deepcopy(plain)


@pytest.mark.parametrize("name", ["gate", "up"])
@torch.no_grad()
def test_a_layers_own_gate_in_codes_that_no_kernel_knows_stays_as_it_is(name):
    config = Config(
        *(32, (LayerConfig(rope=rope_of(8)),) * 2, 4, 2, 8, 40, 50, 64),
        activation="gelu",
        layer_scale=True,
        ple_dim=16,
        ple_vocab_size=50,
    )
    plain, fast = random_twice(config)
    N, K = getattr(plain.layers[1].ple, name).weight.shape
    words, scales = torch.randint(2**31 - 1, (N, K // 8)).int(), torch.full((N, K // 16), 0.05)
    for model in (plain, fast):
        setattr(model.layers[1].ple, name, QuantizedLinear(words, scales, None, NVFP4))
        model.setup(64, 3)
    compare(plain, fast, install_kernels(fast), 1e-5)


@pytest.mark.parametrize("beside_dense, scaled_router", [(True, False), (False, True)])
@torch.no_grad()
def test_a_router_that_reads_what_no_kernel_gives_it(beside_dense, scaled_router):
    """Beside a dense part it reads the residual stream, elsewhere what the experts read. Gemma 4 has
    both fields."""
    moe = MoEConfig(6, 2, 24, beside_dense=beside_dense, scaled_router=scaled_router)
    layers = (LayerConfig(rope=rope_of(8), moe=moe),) * 2
    plain, fast = random_twice(Config(32, layers, 4, 2, 8, 40, 50, 64, post_norm=True))
    for model in (plain, fast):
        model.setup(64, 3)
    compare(plain, fast, install_kernels(fast), 1e-5)


BESIDE = MoEConfig(6, 2, 24, beside_dense=True, scaled_router=True)


@pytest.mark.parametrize(
    "moe, change, more",
    [
        (None, None, dict(layer_scale=True)),
        (None, give_experts, dict(layer_scale=True, post_norm=True)),
        (BESIDE, None, dict(residual_scale=1 / 16, norm_eps=1e-3, post_norm=True)),
    ],
    ids=["no norm behind", "a plain half", "a scaled stream"],
)
@torch.no_grad()
def test_fields_together_that_no_family_has(moe, change, more):
    layers = (LayerConfig(rope=rope_of(8), moe=moe),) * 2
    plain, fast = random_twice(Config(32, layers, 4, 2, 8, 40, 50, 64, **more))
    for model in (plain, fast):
        model.setup(64, 3)
        if change:
            change(model.layers[0])  # the final norm would hide the last layer's scale
    compare(plain, fast, install_kernels(fast), 1e-5)


# The type, and how far the two may differ.
PRECISION = dict(cpu=(F32, 1e-5), cuda=(torch.float16, 1e-2))


@torch.no_grad()
def compare(
    plain: Transformer,
    fast: Transformer,
    decoder: nn.Module,
    tolerance: float,
    T: int = 17,
    inputs: Callable = lambda model, tokens, at: None,
) -> None:
    """Prefill of T tokens, then, with two rows exchanged, tokens one at a time and several at once,
    ragged. inputs: what a model's first layer reads of tokens at these positions."""
    device, B = plain.embed.weight.device, len(plain.rows)
    prompt = torch.randint(plain.config.vocab_size, (B, T), device=device)
    last = torch.tensor([T - 1, 2, T // 2], device=device)[:B]
    where = torch.arange(T, device=device).expand(B, T)
    ref = plain(prompt, where, last=last, inputs=inputs(plain, prompt, where))
    out = fast(prompt, where, fast.slots, last, inputs(fast, prompt, where))
    order = [1, 0, 2][:B]
    for model in (plain, fast):
        model.arrange_rows(order, T)
    at = last[order, None] + 1
    for n in (0, 1, 1, 3, 1, 3, 20):  # 20 are more than the decode kernel of attention takes
        if n:
            tokens = torch.randint(plain.config.vocab_size, (B, n), device=device)
            where = at + torch.arange(n, device=device)
            ref = plain(tokens, where, inputs=inputs(plain, tokens, where))
            out = decoder(tokens, where, fast.slots, inputs(fast, tokens, where))
            at += n
        assert out.shape == ref.shape
        assert error(out, ref) < tolerance


def load_twice(
    device: str, *sizes: int, directory: Path = TINY, **more
) -> tuple[Transformer, Transformer, float]:
    """A model that is set up and another of the same checkpoint, and how far the two may differ."""
    dtype, tolerance = PRECISION[device]
    plain, fast = (load_checkpoint(directory, torch.device(device), dtype) for _ in range(2))
    for model in (plain, fast):
        model.setup(*sizes, **more)
    return plain, fast, tolerance


NEWER = "glm4", "deepseek", "gemma4", "muse"


@on_each_device
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fast_decoder_equals_the_model(family, device):
    """Over a dirty cache. All of it has kernels, but for a mixture whose shared expert has another
    size, or whose router chooses groups. What keeps hidden states, of prefill and of decode, is the
    same code on a GPU."""
    plain, fast, tolerance = load_twice(
        device, 64, 3, directory=GOLDEN / family, features=(2, 0, 1)
    )
    mixtures = [layer.moe for layer in plain.config.layers if layer.moe]
    unknown = any(
        moe.shared_dim not in (0, moe.ffn_dim) or moe.n_group != moe.n_chosen_group
        for moe in mixtures
    )
    assert bool(plain_halves(fast)) == unknown
    assert not unknown_fields(fast)
    for layer in [*plain.layers, *fast.layers]:
        for n, part in enumerate(layer.attn.cache.buffers()):
            part.fill_(3 - 5 * n)
    if device == "cuda" and family.startswith(NEWER):
        plain, fast = with_all_experts(plain), with_all_experts(fast)
    if family.startswith("gemma4") and device == "cuda":
        tolerance *= 2  # scores times 1 make more of a rounding: fp16 is up to 1e-2 from fp32
    compare(plain, fast, install_kernels(fast), tolerance)
    assert device == "cuda" or error(fast.features, plain.features) < tolerance


@on_each_device
@pytest.mark.parametrize("kind", ["int8", "int8-values"])
@torch.no_grad()
def test_fast_decoder_with_a_cache_in_int8(kind, device):
    plain, fast, tolerance = load_twice(device, 300, 3, cache=kind)
    decoder = install_kernels(fast)
    for T in (17, 200):
        compare(plain, fast, decoder, 2 * tolerance, T)  # a code may be the next one


@on_each_device
@pytest.mark.parametrize(
    "options", [{}, dict(norm_before_residual=True, norm_output=True)], ids=["plain", "norms"]
)
@torch.no_grad()
def test_an_eagle_head_has_its_kernels(options, device):
    """What it predicts, and the hidden states that it keeps for itself."""
    dtype, tolerance = PRECISION[device]
    config = Config(
        64,
        (LayerConfig(9, rope_of(16)), LayerConfig(rope=rope_of(16))),
        n_head=4,
        n_kv_head=2,
        head_dim=16,
        ffn_dim=96,
        vocab_size=80,
        context=64,
        qk_norm="head",
    )
    plain, fast = (
        Head(config, HeadConfig((1, 2), 48, 32, **options)).to(device, dtype) for _ in range(2)
    )
    plain.embed.weight.normal_()
    for norm in (plain.layers[0].attn_norm, plain.layers[0].state_norm):
        norm.weight.uniform_(0.5, 1.5)
    fast.load_state_dict(plain.state_dict())
    for model in (plain, fast):
        model.requires_grad_(False).setup(64, 3, features=(2,))
    plain.features.normal_()
    fast.features.copy_(plain.features)

    def inputs(head, tokens, at):
        states = head.features[head.rows[: len(at)], (at - 1).clamp(min=0)]
        return head.inputs(tokens, head.norm(states) if head.options.norm_output else states)

    compare(plain, fast, install_kernels(fast), 2 * tolerance, inputs=inputs)
    assert error(fast.features, plain.features) < 2 * tolerance


@on_each_device
@pytest.mark.parametrize(
    "quantize, group_size, head",
    [("int8", None, None), ("int4", 64, "int8"), ("int4", None, "int4")],
)
@torch.no_grad()
def test_fast_decoder_with_packed_weights(quantize, group_size, head, device):
    """Prefill of a few and of many tokens. A layer's groups are act-order's."""
    dtype, tolerance = (F32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    how = TINY, torch.device(device), dtype, quantize, group_size
    plain, fast = (load_checkpoint(*how, quantize_head=head) for _ in range(2))
    g_idx = plain.layers[0].attn.wqkv.groups()[torch.randperm(plain.config.dim, device=device)]
    for model in (plain, fast):
        model.setup(300, 2)
        model.layers[0].attn.wqkv.g_idx = nn.Parameter(g_idx, requires_grad=False)
    decoder = install_kernels(fast)
    if device == "cuda":
        decoder = torch.compile(decoder, fullgraph=True, backend="eager")
    for T in (3, 200):
        compare(plain, fast, decoder, tolerance, T)


@pytest.mark.gpu
def test_one_graph_for_all_prompts_lengths_conversations_and_settings():
    counters.clear()
    model = load_checkpoint(TINY, torch.device("cuda"), torch.bfloat16)
    engine = FastEngine(model, 500, 2, Sampling(0.8, 50))
    samplings = Sampling(0.8, 50), Sampling(0.0), Sampling(1.1, 7, 0.9), Sampling(0.7, min_p=0.05)
    prompts = (
        ([[1], [2]], 0),
        ([[5] * 300, [6]], 0),
        ([[7, 8], [9]], 100),
        ([[5] * 17, [1] * 40], 3),
    )
    engine.warm_up(2)
    captured = engine.graphs[False]
    for (rows, start), sampling in zip(prompts, samplings):
        engine.set_sampling(sampling)
        assert len(list(generate(engine, rows, 12, start))) == 12
    assert counters["stats"]["unique_graphs"] == 1  # a layer's, for prefill
    assert engine.graphs == {False: captured}


@pytest.mark.parametrize("quantize", [None, "int4", "int8"])
def test_prompts_of_all_lengths_share_a_layers_code(quantize):
    counters.clear()
    model = load_checkpoint(TINY, quantize=quantize)
    model.setup(80, 1)
    install_kernels(model)
    layer = torch.compile(model.layers[0], backend="eager", dynamic=True, fullgraph=True)
    cos, sin = (torch.zeros(1, 80, 1, model.config.head_dim) for _ in range(2))
    for T in (2, 6, 16, 77):
        positions = torch.arange(T)[None]
        mask = torch.ones(1, 1, T, 80, dtype=torch.bool)
        x = torch.randn(1, T, model.config.dim)
        with torch.no_grad():
            layer(x, positions, cos[:, :T], sin[:, :T], mask, model.rows[:1])
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    "directory, quantize",
    [
        (TINY, None),
        (TINY, "int4"),
        (TINY, "int8"),
        (GOLDEN / "gemma3", None),
        (GOLDEN / "mixtral", None),
        (GOLDEN / "gpt-oss", None),
        (GOLDEN / "gemma4-all", None),
        (GOLDEN / "glm4-moe-lite", None),
    ],
)
def test_after_warm_up_no_prompt_compiles_anything(directory, quantize, draft, monkeypatch):
    """Whatever its length: no graph of torch.compile, no kernel of Triton's or NVRTC's."""
    from triton.runtime.jit import JITFunction

    compiled = []

    def told(function: Callable) -> Callable:
        def tell(*args, **options):
            compiled.append((length, rows == rows[:1], getattr(args[0], "__name__", "")))
            return function(*args, **options)

        return tell

    where = dict(device=torch.device("cuda"), dtype=torch.bfloat16, quantize=quantize)
    model = load_checkpoint(directory, **where)
    if draft:
        smaller = load_checkpoint(directory, **where)
        runner = speculator(model, 800, smaller, "2", rows=3, mode="fast")
    else:
        runner = FastEngine(model, 800, 3, Sampling(0.8, 50))
    runner.warm_up(1)
    runner.warm_up(3)
    counters.clear()
    monkeypatch.setattr(JITFunction, "_do_compile", told(JITFunction._do_compile))
    monkeypatch.setattr("fast.nvrtc.compile_cuda", told(nvrtc.compile_cuda))
    for length in (1, 2, 5, 16, 17, 31, 64, 65, 100, 250, 257, 300, 512, 513, 700):
        for rows in ([[3] * length], [[3] * length, [5], [6] * (length // 2 + 1)]):
            run(runner, rows, 3)
    assert not compiled and not counters["stats"]["unique_graphs"]


@pytest.mark.gpu
def test_kernels_change_greedy_tokens_at_ties_only():
    """bf16, compiled, with and without kernels."""
    rows, prompts = [], [[1, 5 + i, 300 + 7 * i] for i in range(4)]
    for mode in ("compile", "fast"):
        model = load_checkpoint(TINY, torch.device("cuda"), torch.bfloat16)
        rows.append(run(ENGINES[mode](model, 80, 4, GREEDY), prompts, 64))
    same_but_for_ties(tiny(), prompts, *rows, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.startswith(NEWER)])
def test_captured_engines_give_the_texts_of_plain_code(family, device="cuda"):
    """In a batch and alone, plain and with drafts, whose target is the draft, too. In bf16: of
    plain experts in fp16 PyTorch's product waits for the host, which no CUDA graph can hold."""
    exact = with_all_experts(load_checkpoint(GOLDEN / family, torch.device("cpu"), F32))

    def engine(mode: str, model: Transformer, rows: int) -> FastEngine:
        return ENGINES[mode](model, 60, rows, GREEDY)

    def load() -> Transformer:
        model = load_checkpoint(GOLDEN / family, torch.device(device), torch.bfloat16)
        return with_all_experts(model)

    prompts = [torch.randint(90, (n,)).tolist() for n in (9, 1, 14)]
    made = engine("fast", load(), 3)
    made.warm_up(3)
    assert made.captures == (device == "cuda")
    rows = run(made, prompts, 40)
    alone = [run(made, [prompt], 40)[0] for prompt in prompts]
    same_but_for_ties(exact, prompts, alone, rows, 0.05)
    same_but_for_ties(exact, prompts, run(engine("compile", load(), 3), prompts, 40), rows, 0.05)
    drafting = speculator(load(), 60, load(), "3", 3, GREEDY, "fast")
    same_but_for_ties(exact, prompts, rows, run(drafting, prompts, 40), 0.05)
    assert drafting.counts["accepted"] > 0.8 * drafting.counts["drafted"]


def test_fast_leaves_a_model_whose_layers_add_nothing_to_the_plain_decoder(tmp_path):
    """Its kernels divide by the scale of what a layer adds."""
    make(tmp_path, "granite", residual_multiplier=0)
    assert unknown_fields(tiny(directory=tmp_path)) == ["Config.residual_scale=0"]

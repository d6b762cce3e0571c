"""
All layers of a step in one launch (step.cu), judged by model.py in float64. On a CPU each of its
threads is a thread, and all programs run at once.
"""

import faulthandler
import functools
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from threading import Thread
from unittest.mock import MagicMock

import pytest
import torch

from fast import nvrtc, use_kernels
from fast.delta import TOKENS
from fast.decoder import FusedDecoder, install_kernels
from fast.layout import KINDS
from fast.step import LEAST_STAGES, NO_INT8_CACHE, Step, why_launches
from gemv_on_cpu import step_on_cpu
from helpers import (
    ENGINES,
    GREEDY,
    ON_GPUS,
    ROOT,
    ended,
    load_checkpoint,
    make,
    on_each_device,
    one_line,
    run,
    same_but_for_ties,
    speculator,
    torchrun,
    with_all_experts,
)
from model import BLOCK, RING, Experts, MoE, Transformer, unit
from quantize import (
    CODES,
    QuantizedExperts,
    QuantizedLinear,
    find_layers,
    join_experts,
    pack,
    plain_layer,
    replace_layers,
)
from scripts import benchmark_step
from test_experts import random_experts

BF16 = torch.bfloat16
SIZES = dict(
    hidden_size=256,
    intermediate_size=320,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=64,
    num_hidden_layers=2,
)
EXPERTS = dict(num_experts=6, num_local_experts=6, num_experts_per_tok=3, moe_intermediate_size=64)
MANY_HEADS = dict(num_attention_heads=32, num_key_value_heads=32, head_dim=128, num_hidden_layers=1)
WIDER = "experts in 16 bits"  # with two squads of warps, and rows of two slots
GPT_OSS = dict(intermediate_size=64, sliding_window=24, num_key_value_heads=1)
MANY_EXPERTS = "recurrent mixture of many"
RECURRENT = dict(
    num_hidden_layers=3,
    full_attention_interval=2,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
BEHIND = dict(query_pre_attn_scalar=64, sliding_window=24)
WIDE = dict(hidden_size=1152)  # a warp has several units
SEVERAL = dict(hidden_size=576, intermediate_size=1344)
LARGE = dict(intermediate_size=180_224, num_hidden_layers=1)
LONG_CACHE, LONG_INT8 = dict(max_seq_len=33_001), dict(max_seq_len=33_000)
LONG = dict(head_dim=256, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
ONE_HEAD = LONG | dict(head_dim=128)
# The kind of model and what its config changes; the format and its groups; the token's position;
# programs. Of several splits of a text there are at least two programs for each kv head.
CASES = {
    "splits": ("llama", dict(num_key_value_heads=1), "int4", 32, 300, 5),
    "odd sizes": ("qwen2", dict(hidden_size=288, intermediate_size=224), "int8", None, 40, 3),
    "groups and norms": ("qwen3", dict(head_dim=128, intermediate_size=384), "int4", 128, 0, 4),
    "experts": ("qwen3_moe", EXPERTS, "int4", 64, 70, 3),
    WIDER: ("mixtral", EXPERTS | dict(hidden_size=576, intermediate_size=64), None, None, 17, 3),
    "experts in int8": ("qwen3_moe", EXPERTS | dict(hidden_size=288), "int8", None, 33, 3),
    "fp8": ("qwen2", dict(hidden_size=288, intermediate_size=224), "fp8", -1, 40, 3),
    "fp8 in blocks": ("qwen3", dict(intermediate_size=768), "fp8", 128, 40, 3),
    "experts in fp8": ("qwen3_moe", EXPERTS | dict(hidden_size=288), "fp8", -1, 33, 3),
    # Of a row of experts three slots begin within the first, at the second and within the third.
    "experts in blocks": (
        "qwen3_moe",
        EXPERTS | dict(moe_intermediate_size=768),
        "fp8",
        128,
        33,
        3,
    ),
    "heads of 256": ("qwen3", dict(head_dim=256), "int8", None, 50, 3),
    "one split of two parts": ("llama", ONE_HEAD | dict(num_key_value_heads=2), "int4", 32, 300, 3),
    "a last split of one token": ("llama", ONE_HEAD, "int4", 32, 256, 5),
    "more splits than warps": (
        "qwen3",
        ONE_HEAD | dict(num_attention_heads=8),
        "int4",
        32,
        600,
        10,
    ),
    "long heads of 256": ("qwen3", LONG, "int8", None, 300, 3),
    "several units in 16 bits": ("qwen3", ONE_HEAD | SEVERAL, None, None, 140, 3),
    "round the ring": ("llama", LONG, "int4", 32, 700, 2),
    # Each program has more of the cache than its ring holds: this is for a GPU.
    "many heads": ("llama", MANY_HEADS, "int4", 32, 2500, None),
    "norms behind": ("gemma3_text", BEHIND, "int4", 64, 40, 3),
    "norms behind in 16 bits": ("gemma3_text", BEHIND | WIDE, None, None, 40, 5),
    "int8 cache": ("qwen3", dict(head_dim=128, intermediate_size=384), "int4", 128, 39, 4),
    "int8 cache, splits": (
        "qwen3",
        ONE_HEAD | dict(num_attention_heads=8),
        "int4",
        32,
        602,
        10,
    ),
    "int8 cache, first": ("qwen3", dict(head_dim=128), "int4", 64, 0, 3),
    "int8 cache, splits of a window": (
        "gemma3_text",
        ONE_HEAD
        | dict(query_pre_attn_scalar=64, sliding_window=303, layer_types=["sliding_attention"]),
        "int4",
        32,
        420,
        5,
    ),
    "int8 cache, heads of 256": ("qwen3", LONG, "int8", None, 300, 3),
    # Of which a layer begins at the 19th slot.
    "int8 cache, window": ("gemma3_text", BEHIND | dict(head_dim=128), "int4", 64, 41, 3),
    # With sinks, behind a window and, in splits, without.
    "mxfp4": ("gpt_oss", EXPERTS | GPT_OSS, None, None, 300, 3),
    "part of a head turns": ("phi3", dict(partial_rotary_factor=0.5), "int4", 32, 40, 3),
    "some layers turn": ("smollm3", dict(no_rope_layer_interval=2), "int4", 32, 40, 3),
    # Recurrent layers and, in the second, attention with gates in several splits.
    "recurrent": ("qwen3_5_text", RECURRENT, "int8", None, 62, 3),
    "recurrent, long": (
        "qwen3_5_text",
        RECURRENT | dict(num_key_value_heads=1, num_hidden_layers=2),
        "int4",
        32,
        350,
        4,
    ),
    "recurrent, int8 cache": (
        "qwen3_5_text",
        RECURRENT | dict(head_dim=128, linear_num_value_heads=4, num_hidden_layers=2),
        "int4",
        32,
        62,
        3,
    ),
    "recurrent mixture": (
        "qwen3_5_moe_text",
        RECURRENT | EXPERTS | dict(shared_expert_intermediate_size=64),
        "int4",
        64,
        62,
        4,
    ),
    # Several tasks of a program, and candidates of several groups of 32 experts.
    MANY_EXPERTS: (
        "qwen3_5_moe_text",
        RECURRENT
        | EXPERTS
        | dict(
            num_experts=64,
            num_local_experts=64,
            shared_expert_intermediate_size=64,
            linear_num_value_heads=6,
            num_attention_heads=12,
        ),
        "int4",
        64,
        62,
        2,
    ),
    "recurrent mixture in 16 bits": (
        "qwen3_next",
        RECURRENT | EXPERTS | dict(shared_expert_intermediate_size=64, linear_num_key_heads=2),
        None,
        None,
        62,
        3,
    ),
}


# Which ranks share: the kind of model and its changes, the format and its groups, and programs. Of
# "uneven" two ranks have 4 and 2 heads and 4 and 3 units of the feed-forward part.
SHARED = dict(moe_intermediate_size=128, intermediate_size=128)
SHARED_CASES = {
    "uneven": (
        "qwen2",
        dict(
            hidden_size=288,
            intermediate_size=224,
            num_attention_heads=6,
            num_key_value_heads=3,
        ),
        "int8",
        None,
        2,
    ),
    "norms behind": ("gemma3_text", BEHIND | dict(intermediate_size=384), None, None, 2),
    "experts, biases": (
        "gpt_oss",
        EXPERTS | SHARED | dict(sliding_window=24, num_key_value_heads=1),
        "int4",
        64,
        2,
    ),
    "experts": ("qwen3_moe", EXPERTS | SHARED, "int4", 64, 2),
    "recurrent mixture": (
        "qwen3_5_moe_text",
        RECURRENT
        | EXPERTS
        | SHARED
        | dict(
            shared_expert_intermediate_size=128,
            linear_num_key_heads=2,
        ),
        "int4",
        64,
        2,
    ),
}
SLOW_SHARED = "experts", "recurrent mixture"  # on a CPU
RECURRENT_CASES = [case for case in CASES if case.startswith("recurrent")]
OWN = "round the ring", "many heads", *RECURRENT_CASES  # which have tests of their own


def loaded(
    directory, case: str, device: str, dtype: torch.dtype = BF16, slots: int = 20, **more
) -> tuple[Transformer, Transformer, int, int]:
    """A model of random weights over a random cache, and the same in float64. slots: of the cache,
    from the case's position on. more: of the model's config."""
    kind, changes, quantize, group, position, programs = CASES[case]
    torch.manual_seed(3)
    make(directory, kind, **SIZES | changes | more)
    fp8 = quantize == "fp8"
    rounding = (None, None) if fp8 else (quantize, group)
    model = load_checkpoint(directory, torch.device("cpu"), dtype, *rounding)
    with_clearer_routers(model)
    for name in find_layers(model, head=False) if fp8 else []:
        model.set_submodule(name, to_fp8(model.get_submodule(name), group))
    for part in [part for part in model.modules() if type(part) is MoE]:
        if case == "mxfp4":
            X, D, F = part.moe.n_expert, *part.w_down.weight.shape[1:]
            for name, (N, K) in dict(w_gate_up=(2 * F, D), w_down=(D, F)).items():
                setattr(part, name, random_experts(X, N, K, "mxfp4", 32, "bias", "cpu"))
    cache = "int8" if "int8 cache" in case else "16-bit"
    model.setup((position + slots + 3) // 4 * 4, 1, cache=cache)
    for layer in model.layers:
        if getattr(layer.attn, "sinks", None) is not None:
            layer.attn.sinks.data = torch.tensor([7, -4, 6, 5]).to(BF16)
        for name, part in layer.attn.cache.named_buffers():
            if part.dtype == torch.int8:
                part.random_(-127, 128)
            elif "_scale" in name:
                part.uniform_(0.01, 0.03)
            else:
                part.normal_(std=8 if name == "v" else 1)
    exact = in_float64(model)
    return model.to(device), exact, position, programs


def to_fp8(layer: torch.nn.Linear | Experts, group: int) -> torch.nn.Module:
    """e4m3 with a scale a row or, of groups, one for each block of 128 x group weights."""
    if isinstance(layer, Experts):
        rows = [plain_layer(weight, None) for weight in layer.weight]
        return join_experts(to_fp8(row, group) for row in rows)
    weight = layer.weight.data.float()
    N, K = weight.shape
    rows, columns = (1, K) if group == -1 else (128, group)
    most = torch.nn.functional.pad(weight.abs(), (0, 0, 0, -N % rows))
    most = most.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    scales = most / 448 * 2 ** torch.randint(4, most.shape)  # so that another's would be far off
    scales = scales.repeat_interleave(rows, 0)[:N].contiguous()
    numbers = weight / scales.repeat_interleave(columns, 1)
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedLinear(pack(codes, 8), scales, None, CODES["fp8"], layer.bias)


def with_clearer_routers(model: Transformer) -> None:
    """So that no choice is a matter of a rounding."""
    for part in [part for part in model.modules() if type(part) is MoE]:
        part.router.weight.data *= 3


def in_float64(model: Transformer) -> Transformer:
    exact = deepcopy(model)
    for of in (QuantizedExperts, QuantizedLinear):
        replace_layers(
            exact, of, lambda layer: plain_layer(layer.dequantize(torch.float64), layer.bias)
        )
    exact.double()
    for layer in exact.layers:
        cache = layer.attn.cache
        cache.dtype = torch.float64  # what codes become
        if getattr(cache, "k_scale", None) is not None:
            cache.k_scale, cache.v_scale = cache.k_scale.float(), cache.v_scale.float()
    return exact


@torch.no_grad()
def through_layers(exact: Transformer, x: torch.Tensor, position: int) -> torch.Tensor:
    """x [1, D] -> what leaves the last layer [1, D]"""
    found = []
    hook = exact.norm.register_forward_pre_hook(lambda norm, given: found.append(given[0]))
    positions = torch.tensor([[position]])
    exact(torch.zeros(1, 1, dtype=torch.long), positions, inputs=x.double()[None])
    hook.remove()
    return found[0][0]


def with_clear_choices(exact: Transformer, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [1, D], for which no router's choice is a matter of a rounding, and what leaves the last
    layer."""
    margins = []

    def keep(router: torch.nn.Module, given: tuple, logits: torch.Tensor, n: int) -> None:
        last, next_one = logits.flatten().sort(descending=True).values[n - 1 : n + 1]
        margins.append(last - next_one)

    hooks = [
        part.router.register_forward_hook(partial(keep, n=part.moe.n_chosen))
        for part in exact.modules()
        if type(part) is MoE
    ]
    while True:
        x = torch.randn(1, exact.config.dim).to(BF16)
        expected = through_layers(exact, x, position)
        if not margins or min(margins) > 0.5:  # bf16 makes logits of 15 up to 0.2 others
            break
        margins.clear()
    for hook in hooks:
        hook.remove()
    return x, expected


def step_of_model(model: Transformer, programs: int, directory, case: str = "") -> Callable:
    """The step as a function of x and the position, whether or not launches are faster."""
    if model.embed.weight.is_cuda:
        decoder = install_kernels(model)
        fill_rings(decoder, CASES[case][4] if case else 0)
        step = on_gpu(decoder)
        return lambda x, at: step(x.cuda(), torch.tensor([[at]], device="cuda")).cpu()
    warps = 16 if case in (WIDER, "recurrent", "several units in 16 bits") else 8
    decoder = use_kernels(model).decoder
    fill_rings(decoder, CASES[case][4] if case else 0)
    step = Step(decoder, programs, 232_448, warps)
    return lambda x, at: step_on_cpu(directory, step, x, torch.tensor([[at]]))


@torch.no_grad()
def fill_rings(decoder: FusedDecoder, position: int) -> None:
    """What delta.py keeps of a block's tokens before `position`, beside DeltaCache's states and
    inputs, from which it follows: one token after the other, as model.DeltaNet's docstring has it."""
    for fused in [layer.attention.attn for layer in decoder.layers if layer.attention.recurrent]:
        if not fused.kernel:
            fused.add_rings()
        mixer, cache = fused.mixer, fused.cache
        delta, filter = mixer.delta, mixer.filter.double()
        inputs = cache.inputs[0].double()
        begin = position // BLOCK * BLOCK
        state = cache.states[0, position // BLOCK % 2].double() * (begin > 0)  # [H, E, V]
        for t in range(begin, position):
            before = [inputs[s % RING, : delta.channels] * (s >= 0) for s in range(t - 3, t + 1)]
            made = torch.nn.functional.silu((torch.stack(before, -1) * filter).sum(-1))
            _, k, v = made.split(mixer.sizes)
            k = unit(k.view(-1, delta.key_dim))
            b, a = inputs[t % RING, delta.channels :].chunk(2)
            decay = -mixer.log_a.double().exp() * torch.nn.functional.softplus(a + mixer.dt_bias)
            per_head = k.repeat_interleave(delta.n_value_head // delta.n_key_head, 0)  # [H, E]
            state = state * decay.exp()[:, None, None]
            v = v.view(-1, delta.value_dim) - torch.einsum("hev,he->hv", state, per_head)
            u = b.sigmoid()[:, None] * v
            state = state + torch.einsum("he,hv->hev", per_head, u)
            cache.keys[0, t % TOKENS], cache.decays[0, t % TOKENS] = k, decay
            cache.corrections[0, t % TOKENS] = u


def on_gpu(decoder: FusedDecoder) -> Step:
    of = torch.cuda.get_device_properties(0)
    return Step(decoder, of.multi_processor_count, of.shared_memory_per_block_optin)


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, most: float = 0.005
) -> None:
    """Up to bf16's roundings: of the stream, four times, and of what is added to it."""
    size = expected.norm() + (expected - x.double()).norm()
    assert (found.double() - expected).norm() < most * size


@on_each_device
@pytest.mark.parametrize("case", [case for case in CASES if case not in OWN])
@torch.no_grad()
def test_a_step_equals_the_layers_in_float64(tmp_path, case, device):
    """What comes out, twice the same to the bit, and the new token's key and value."""
    model, exact, position, programs = loaded(tmp_path, case, device)
    run = step_of_model(model, programs, tmp_path, case)
    x = torch.randn(1, model.config.dim).to(BF16)
    expected = through_layers(exact, x, position)
    found = run(x, position)
    assert_close(found, expected, x)
    for layer, same in zip(model.layers, exact.layers):
        caches = layer.attn.cache, same.attn.cache
        for a, b in zip(*(list(cache.buffers()) for cache in caches)):
            most = 0.02 if b.dtype == torch.int8 else 0.01  # some codes are others by one
            a, b = a.cpu().double(), b.double()
            new = b[:, :, position].clone()
            assert (a[:, :, position] - new).norm() < most * new.norm()
            a[:, :, position] = new
            assert torch.equal(a, b)  # no other slot was written
    assert torch.equal(run(x, position), found)


@on_each_device
@pytest.mark.parametrize("case", RECURRENT_CASES)
@torch.no_grad()
def test_recurrent_layers_token_by_token(tmp_path, case, device):
    """Over the end of a block, whose state is written, and from a text's beginning, where nothing of
    what lies there may count."""
    model, exact, position, programs = loaded(tmp_path, case, device, slots=10)
    run = step_of_model(model, programs, tmp_path, case)
    for at in (position, position + 1, position + 2, 0, 1):
        for cache in [layer.attn.cache for layer in model.layers] if at == 0 else []:
            if hasattr(cache, "states"):
                for part in cache.buffers():
                    part.fill_(float("nan"))
        x, expected = with_clear_choices(exact, at)
        assert_close(run(x, at), expected, x, 0.02)  # model.py in bf16 is up to 0.027 away
        block = position // BLOCK + 1
        for layer, same in zip(model.layers, exact.layers):
            cache, twin = layer.attn.cache, same.attn.cache
            if at == position + 2 and hasattr(cache, "states"):
                of_block, expected = cache.states[0, block % 2].cpu().double(), twin.states
                expected = expected[0, block % 2]
                assert (of_block - expected).norm() < 0.03 * expected.norm()
                kept, expected = cache.inputs[0].cpu().double(), twin.inputs[0]
                assert (kept - expected).norm() < 0.03 * expected.norm()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory) -> Callable:
    """What each of so many ranks gave for a case, on a device."""

    @functools.cache
    def run_all(device: str, ranks: int) -> list[dict]:
        directory = tmp_path_factory.mktemp(device)
        cases = [case for case in SHARED_CASES if device == "cuda" or case not in SLOW_SHARED]
        cases = ["uneven"] if ranks == 3 else cases
        torch.manual_seed(3)
        for case in cases:
            kind, changes, *_ = SHARED_CASES[case]
            make(directory / case, kind, **SIZES | changes)
        worker = ROOT / "tests" / "fast" / "step_worker.py"
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        command = torchrun(worker, device, directory, *cases, ranks=ranks)
        done = ended(command, PYTHONPATH=paths)
        assert done.returncode == 0, done.stderr
        return [torch.load(directory / f"out.{rank}") for rank in range(ranks)]

    return lambda device, ranks, case: [rank[case] for rank in run_all(device, ranks)]


@pytest.mark.parametrize(
    "device, ranks, case",
    [
        *(("cpu", 2, case) for case in SHARED_CASES if case not in SLOW_SHARED),
        ("cpu", 3, "uneven"),
        *(pytest.param("cuda", 2, case, marks=ON_GPUS) for case in SHARED_CASES),
    ],
)
def test_ranks_share_a_step(of_ranks, device, ranks, case):
    """From a text's beginning: the same bits on all, and what one model gives in float64."""
    for (found, expected, x), *others in zip(*of_ranks(device, ranks, case), strict=True):
        assert others and all(torch.equal(found, other) for other, *_ in others)
        assert_close(found, expected, x, 0.02 if "recurrent" in case else 0.005)


@on_each_device
@torch.no_grad()
def test_a_step_in_fp16(tmp_path, device):
    model, exact, position, programs = loaded(tmp_path, WIDER, device, torch.float16)
    run = step_of_model(model, programs, tmp_path, WIDER)
    x = torch.randn(1, model.config.dim).half()
    assert_close(run(x, position), through_layers(exact, x, position), x)


@on_each_device
@torch.no_grad()
def test_equal_logits_choose_as_many_experts(tmp_path, device):
    """All experts are the same: which of them are taken is not seen, how many are is."""
    model, exact, position, programs = loaded(tmp_path, WIDER, device)
    for part in [part for m in (model, exact) for part in m.modules() if type(part) is MoE]:
        part.router.weight.zero_()
        for experts in (part.w_gate_up, part.w_down):
            experts.weight.copy_(experts.weight[:1].expand_as(experts.weight).clone())
    run = step_of_model(model, programs, tmp_path)
    x = torch.randn(1, model.config.dim).to(BF16)
    expected = through_layers(exact, x, position)
    assert_close(run(x, position), expected, x)


@on_each_device
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.no_grad()
def test_nan_and_infinity_come_out(tmp_path, value, device):
    """In x, or as a norm's weight, where the digits of a product have neither. A router too."""
    model, _, position, programs = loaded(tmp_path, "experts", device)
    model.layers[1].ffn_norm.weight[5] = value
    router = model.layers[0].ffn.router.weight
    run = step_of_model(model, programs, tmp_path)
    x = torch.randn(1, model.config.dim).to(BF16)
    assert not run(x, position).isfinite().any()
    model.layers[1].ffn_norm.weight[5] = 1
    assert run(x, position).isfinite().all()
    x[0, 7] = value
    assert not run(x, position).isfinite().any()
    x[0, 7] = 1
    router[2, 9] = value
    assert not run(x, position).isfinite().any()


@on_each_device
@pytest.mark.parametrize("size", [1e-4, 1e4])
@torch.no_grad()
def test_logits_of_a_stream_that_attention_changes_a_lot(tmp_path, size, device):
    """Or hardly at all: the router's sums are fixed-point numbers in units of what enters the layer."""
    model, exact, position, programs = loaded(tmp_path, "experts", device)
    run = step_of_model(model, programs, tmp_path)
    x = (torch.randn(1, model.config.dim) * size).to(BF16)
    expected = through_layers(exact, x, position)
    assert_close(run(x, position), expected, x)


@torch.no_grad()
def test_copies_may_come_late_and_in_any_order(tmp_path):
    """The cache of a text is several times what the ring holds, and a warp takes every eighth slot
    of seven."""
    model, exact, position, programs = loaded(tmp_path, "round the ring", "cpu")
    decoder = use_kernels(model).decoder
    memory = next(n for n in range(100_000, 232_448, 1000) if stages_of(decoder, programs, n) == 7)
    step = Step(decoder, programs, memory)
    x = torch.randn(1, model.config.dim).to(BF16)
    found = step_on_cpu(tmp_path, step, x, torch.tensor([[position]]), late=1500)
    assert_close(found, through_layers(exact, x, position), x)


def stages_of(decoder: FusedDecoder, programs: int, memory: int) -> int:
    return Step(decoder, programs, memory).stages()


@torch.no_grad()
def test_tags_begin_anew_before_they_are_too_large(tmp_path):
    """The steps around the one, every 2 ** 32 layers, at which a tag would be 0."""
    model, exact, position, programs = loaded(tmp_path, "groups and norms", "cpu")
    step = Step(use_kernels(model).decoder, programs, 232_448, warps=8)
    x = torch.randn(1, model.config.dim).to(BF16)
    expected = through_layers(exact, x, position)
    step.started.fill_((2**31 - 3) * programs)
    for _ in range(4):
        found = step_on_cpu(tmp_path, step, x, torch.tensor([[position]]))
        assert_close(found, expected, x)


@pytest.mark.parametrize(
    "kind, changes, quantize, sizes, reason",
    [
        ("qwen3_moe", EXPERTS, "int4", {}, None),
        ("qwen3", {}, "int4", LONG_CACHE, "a cache of more than 33,000 slots"),
        ("qwen3_moe", EXPERTS, "int4", LONG_CACHE, None),
        (
            "qwen3_moe",
            EXPERTS,
            "int4",
            dict(max_seq_len=132_001),
            "a cache of more than 132,000 slots",
        ),
        ("qwen3_moe", EXPERTS, None, {}, None),
        ("gpt_oss", EXPERTS | dict(intermediate_size=96), None, {}, "16-bit weights of 96 inputs"),
        ("qwen3", {}, "int4", {}, None),
        ("qwen3", {}, None, {}, None),
        ("qwen3", LARGE, "int8", {}, "a dense layer of more than 128 MiB with int8 weights"),
        ("qwen3", LARGE, None, {}, None),
        ("qwen3_moe", EXPERTS, "int8", {}, None),
        ("qwen3", {}, "int8", {}, None),
        ("qwen3", dict(head_dim=128), "int4", dict(cache="int8"), None),
        (
            "qwen3",
            dict(head_dim=128),
            "int4",
            dict(cache="int8", max_seq_len=8_004),
            "an int8 cache of more than 8,000 slots",
        ),
        ("qwen3_moe", EXPERTS | dict(head_dim=128), "int4", dict(cache="int8") | LONG_INT8, None),
        ("qwen3", {}, "int4", dict(cache="int8"), NO_INT8_CACHE),
        ("qwen3", {}, "int4", dict(cache="int8-values"), "keys or values alone in int8"),
        ("qwen3", dict(head_dim=128), "int4", dict(cache="int8", max_seq_len=63), NO_INT8_CACHE),
        ("qwen3", {}, "int4", dict(features=(1,)), "hidden states that a draft reads"),
        ("qwen3", dict(head_dim=32), "int4", {}, "heads of 32 of which 32 turn"),
        ("qwen3", dict(num_attention_heads=32), "int4", {}, "16 queries of a key"),
        ("phi3", dict(partial_rotary_factor=0.5), "int4", {}, None),
        (
            "phi3",
            dict(head_dim=128, partial_rotary_factor=0.1),
            "int4",
            {},
            "heads of 128 of which 12 turn",
        ),
        ("qwen3_5_text", RECURRENT, "int4", {}, None),
        (
            "qwen3_5_text",
            RECURRENT | dict(linear_key_head_dim=64),
            "int4",
            {},
            "a state of 64 x 128",
        ),
        (
            "qwen3_5_text",
            RECURRENT | dict(linear_key_head_dim=256),
            "int4",
            {},
            "a state of 256 x 128",
        ),
        (
            "qwen3_5_text",
            RECURRENT | dict(linear_conv_kernel_dim=1),
            "int4",
            {},
            "a convolution over one token",
        ),
        (
            "qwen3_5_moe_text",
            RECURRENT | EXPERTS | dict(shared_expert_intermediate_size=64),
            "int4",
            {},
            None,
        ),
        ("olmo2", {}, "int4", {}, "no norm before a branch"),
        ("gemma3_text", {}, "int4", {}, None),
        ("qwen3_moe", EXPERTS | dict(decoder_sparse_step=2), "int4", {}, "layers that differ"),
    ],
)
def test_which_layers_keep_their_launches(tmp_path, kind, changes, quantize, sizes, reason):
    make(tmp_path, kind, **SIZES | changes)
    model = load_checkpoint(tmp_path, torch.device("cpu"), BF16, quantize)
    model.setup(**dict(max_seq_len=64, batch_size=1) | sizes)
    assert why_launches(use_kernels(model).decoder) == reason


def test_a_mixer_whose_types_were_changed_keeps_its_launches(tmp_path):
    model, *_ = loaded(tmp_path, "recurrent", "cpu")
    decoder = use_kernels(model).decoder
    assert why_launches(decoder) is None
    model.to(BF16)
    assert why_launches(decoder) == "a mixer of other types"


@pytest.mark.parametrize(
    "case, more, reason",
    [
        ("fp8", {}, None),
        ("fp8 in blocks", {}, None),
        ("experts in blocks", {}, None),
        (
            "fp8 in blocks",
            dict(hidden_size=384),
            "scales that rows share, of 128 of 384 inputs",
        ),
    ],
)
def test_which_fp8_weights_keep_their_launches(tmp_path, case, more, reason):
    model, *_ = loaded(tmp_path, case, "cpu", **more)
    assert why_launches(use_kernels(model).decoder) == reason


def test_codes_that_step_cu_does_not_know_keep_their_launches(tmp_path, monkeypatch):
    """As a fork adds them: step.cu would take them for int4."""
    monkeypatch.setitem(KINDS, "nf4", KINDS["int4"])
    model, *_ = loaded(tmp_path, "splits", "cpu")
    decoder = use_kernels(model).decoder
    decoder.layers[1].attention.attn.attn.wo.kind = "nf4"
    assert why_launches(decoder) == "nf4 weights"


def test_mxfp4_weights_keep_their_launches(tmp_path):
    model, *_ = loaded(tmp_path, "mxfp4", "cpu")
    assert why_launches(use_kernels(model).decoder) == "mxfp4 weights"


def test_what_does_not_fit_in_shared_memory_keeps_its_launches(tmp_path):
    """stages() is no larger than step.cu's own count, which does not compile below the least."""
    model, _, _, programs = loaded(tmp_path, "splits", "cpu")
    decoder = use_kernels(model).decoder
    least = next(
        memory
        for memory in range(50_000, 200_000, 1000)
        if Step(decoder, programs, memory, 8).stages() == LEAST_STAGES
    )
    step = Step(decoder, programs, least, 8)
    x = torch.randn(1, model.config.dim).to(BF16)
    assert step_on_cpu(tmp_path, step, x, torch.tensor([[2]])).isfinite().all()


def test_where_the_kernel_fails_layers_have_launches_and_a_line_says_why(tmp_path, capfd):
    model, _, position, programs = loaded(tmp_path, "experts", "cpu")
    decoder = use_kernels(model).decoder
    decoder.one_row = MagicMock()
    decoder.one_row.check.side_effect = RuntimeError("nvrtc: error 6 \nline\nline")
    forward, _ = decoder.step(1, lambda *_: None, None)
    with torch.no_grad():
        forward()
    said = capfd.readouterr().err
    assert decoder.one_row is None and "error 6" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["llama-2-7b"], "no GPU of compute capability 9.0 and up"),
        (["llama-2"], "what: invalid choice: 'llama-2'"),
        (["llama-2-7b", "--slots", "200", "x"], "--slots: got 'x', want int from 1"),
        (["llama-2-7b", "--group-size", "64"], "--group-size 64 goes with --quantize"),
    ],
)
def test_benchmark_step_says_what_it_wants(call, monkeypatch, arguments, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said in one_line(call("benchmark_step.py", benchmark_step.main, *arguments))


@pytest.mark.gpu
@torch.no_grad()
def test_a_long_text_goes_round_the_ring(tmp_path):
    model, exact, position, _ = loaded(tmp_path, "many heads", "cuda")
    x = torch.randn(1, model.config.dim).to(BF16)
    found = step_of_model(model, 0, tmp_path)(x, position)
    assert_close(found, through_layers(exact, x, position), x)


@pytest.mark.gpu
@torch.no_grad()
def test_who_has_no_tiles_reads_no_words(tmp_path):
    """Of more than 40 programs those behind have none, but the same norms behind branches. Nobody
    would wait until they have read, and the words could be gone: here they would end the launch."""
    model, exact, position, _ = loaded(tmp_path, "norms behind", "cuda")
    step = on_gpu(install_kernels(model))
    source, begin = step.source(), "    p.reload_ids();\n    const Norm* norm"
    assert source.count(begin) == 1
    step.source = lambda: source.replace(begin, f"if (blockIdx.x >= 40) give_up();\n{begin}")
    x = torch.randn(1, model.config.dim).to(BF16)
    found = step(x.cuda(), torch.tensor([[position]], device="cuda")).cpu()
    assert_close(found, through_layers(exact, x, position), x)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["groups and norms", "experts", "norms behind", "recurrent"])
def test_a_thread_that_launched_nothing_yet_compiles_the_step(tmp_path, case, capfd):
    """As the engine's do: else layers would have launches of their own, with a line that says so."""
    model, *_ = loaded(tmp_path, case, "cuda")
    decoder = install_kernels(model)
    forward, _ = decoder.step(1, lambda *_: None, None)
    thread = Thread(target=torch.no_grad()(forward))
    thread.start()
    thread.join()
    assert decoder.one_row is not None and not capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        "groups and norms",
        "experts",
        "norms behind",
        "several units in 16 bits",
        "recurrent",
        "recurrent mixture",
    ],
)
def test_an_engine_of_one_launch_gives_the_texts_of_plain_code(tmp_path, case):
    """Alone, where a step is one launch, and in a batch, where it is not. The draft is the target."""
    kind, changes, quantize, group, *_ = CASES[case]
    make(tmp_path, kind, **SIZES | changes)

    def load(device: str, dtype: torch.dtype) -> Transformer:
        model = load_checkpoint(tmp_path, torch.device(device), dtype, quantize, group)
        return with_all_experts(model)

    exact, length = load("cpu", torch.float32), 350
    prompts = [torch.randint(64, (n,)).tolist() for n in (9, 1, 14)]
    made = ENGINES["fast"](load("cuda", BF16), length, 3, GREEDY)
    made.warm_up(3)
    assert made.decoder.one_row is not None
    alone = [run(made, [prompt], 320)[0] for prompt in prompts]
    same_but_for_ties(exact, prompts, alone, run(made, prompts, 320), 0.05)
    plain = ENGINES["compile"](load("cuda", BF16), length, 3, GREEDY)
    same_but_for_ties(exact, prompts, alone, run(plain, prompts, 320), 0.05)
    drafting = speculator(load("cuda", BF16), length, load("cuda", BF16), "3", 1, GREEDY, "fast")
    same_but_for_ties(exact, prompts[:1], alone[:1], run(drafting, prompts[:1], 320), 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in RECURRENT_CASES if case != MANY_EXPERTS])
@torch.no_grad()
def test_steps_between_prompts_and_drafts(tmp_path, case):
    """What one launch keeps of a text other kernels read, and the other way round. Logits are as near
    to those of fp32 on a CPU as plain ones; a draft's last tokens are rejected, and read anew."""
    kind, changes, quantize, group, *_ = CASES[case]
    make(tmp_path, kind, **SIZES | changes)

    def load(device: str, dtype: torch.dtype) -> Transformer:
        model = load_checkpoint(tmp_path, torch.device(device), dtype, quantize, group)
        model.setup(512, 1)
        return with_all_experts(model)

    exact, plain, fast = load("cpu", torch.float32), load("cuda", BF16), load("cuda", BF16)
    tokens = torch.randint(64, (1, 400))
    expected = exact(tokens, torch.arange(400)[None])[0]
    decoder = install_kernels(fast)
    decoder.one_row = on_gpu(decoder)
    errors = []
    for forward, prompt in ((plain, plain), (decoder, fast)):
        found, at = [], 0
        # So many tokens are read, and so many of them are kept.
        for T, kept in (
            (150, 150),
            *[(1, 1)] * 20,
            (5, 2),
            *[(1, 1)] * 70,
            (5, 3),
            (1, 1),
            (40, 1),
        ):
            positions = torch.arange(at, at + T, device="cuda")[None]
            read = prompt if T > 8 else forward
            found.append(read(tokens[:, at : at + T].cuda(), positions)[0, :kept])
            at += kept
        found = torch.cat(found).float().cpu() - expected[:at]
        errors.append((found.pow(2).mean().sqrt() / expected.std()).item())
    assert errors[1] < 1.5 * errors[0] + 1e-3 and errors[0] < 0.2, errors


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_step_gives_what_launches_give(tmp_path):
    """300 tokens, each behind what the step before wrote into the cache, and another model's step
    between them."""
    model, exact, *_ = loaded(tmp_path, "groups and norms", "cuda", slots=300)
    other = deepcopy(model)
    steps = [on_gpu(install_kernels(m)) for m in (model, other)]
    x = torch.randn(1, model.config.dim, device="cuda").to(BF16)
    positions = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    for step in steps:
        step(x, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [step(x, positions) for step in steps]
    for position in range(300):
        x.copy_(torch.randn(1, model.config.dim))
        positions.fill_(position)
        graph.replay()
        assert torch.equal(*found)
        if position % 50 == 49:
            expected = through_layers(exact_after(exact, model, position), x.cpu(), position)
            assert_close(found[0].cpu(), expected, x.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case, ties", [("groups and norms", 0), ("experts", 100), ("recurrent", 0)]
)
@torch.no_grad()
def test_ten_thousand_steps_beside_launches(tmp_path, case, ties):
    """Each with a cache of its own. Where two experts' logits are a rounding apart, they may take
    others."""
    steps = 10_000
    model, *_ = loaded(tmp_path, case, "cuda", slots=steps)
    other = install_kernels(deepcopy(model))
    step = on_gpu(install_kernels(model))
    x = torch.zeros(1, model.config.dim, dtype=BF16, device="cuda")
    positions = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    apart = torch.zeros(steps, device="cuda")

    def both() -> None:
        x.normal_()
        found = step(x, positions).float()
        y = x
        for layer in other.layers:
            y = layer(y, positions, None, other.model.rows[:1], None)
        apart[positions[0]] = (found - y).norm() / y.float().norm()
        positions.add_(1)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for _ in range(steps - 1):
        graph.replay()
    assert positions.item() == steps and (apart > 0).sum() > steps / 2
    assert (apart <= 0.03).sum() >= steps - ties  # no NaN is


def steps_of_many(step: Step, x: torch.Tensor) -> torch.Tensor:
    """x [T, D], tokens at positions 0 to T - 1 -> what leaves the last layer [T, D]"""
    at = torch.arange(len(x), device="cuda")
    return torch.cat([step(x[i : i + 1], at[i].view(1, 1)) for i in range(len(x))])


@pytest.mark.gpu
@torch.no_grad()
def test_steps_of_two_streams_at_once(tmp_path):
    models = [loaded(tmp_path, case, "cuda", slots=200)[0] for case in ("experts", "splits")]
    steps = [on_gpu(install_kernels(model)) for model in models]
    x = torch.randn(200, models[0].config.dim, device="cuda").to(BF16)
    alone = [steps_of_many(step, x) for step in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    found = []
    for step, stream in zip(steps, streams):
        with torch.cuda.stream(stream):
            found.append(steps_of_many(step, x))
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, alone))


@pytest.mark.gpu
@torch.no_grad()
def test_a_step_waits_for_a_kernel_that_has_some_multiprocessors(tmp_path):
    source = """
    extern "C" __global__ void occupy(int milliseconds) {
      unsigned long long begin, now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
      do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      while (now - begin < milliseconds * 1000000ull);
    }"""
    major, minor = torch.cuda.get_device_capability()
    cubin = nvrtc.compile_cuda(source, nvrtc.options_for(10 * major + minor, {}))
    occupy = nvrtc.load(cubin, "occupy", 100_000)
    model, *_ = loaded(tmp_path, "experts", "cuda")
    step = on_gpu(install_kernels(model))
    x = torch.randn(8, model.config.dim, device="cuda").to(BF16)
    alone = steps_of_many(step, x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        nvrtc.launch(occupy, 20, 32, 100_000, [2000])
    found = steps_of_many(step, x)
    assert not side.query()  # it is still there
    assert torch.equal(found, alone)


def exact_after(exact: Transformer, model: Transformer, position: int) -> Transformer:
    """exact, with the cache of model up to this position."""
    for mine, of in zip(exact.layers, model.layers):
        for name in ("k", "v"):
            cached = getattr(of.attn.cache, name)[:, :, :position]
            getattr(mine.attn.cache, name)[:, :, :position] = cached.cpu().double()
    return exact


def test_a_step_that_waits_in_vain_fails(tmp_path):
    """Of a word that never comes: an error, not a hang. On a CPU that is the end of the process."""
    model, _, position, programs = loaded(tmp_path, "groups and norms", "cpu")
    step = Step(use_kernels(model).decoder, programs, 232_448, warps=8)
    source = step.source().replace("#define TRIES 2097152", "#define TRIES 20")
    # The first product's words have another tag.
    words = "qkv, tag, nullptr,\n"
    assert "#define TRIES 20\n" in source and source.count(words) == 1
    step.source = lambda: source.replace(words, "qkv, tag + 1, nullptr,\n")
    child = os.fork()
    if not child:
        faulthandler.disable()
        os.close(2)
        try:
            step_on_cpu(tmp_path, step, torch.randn(1, 256).to(BF16), torch.tensor([[position]]))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT

"""fast/decoder.py's BlockDecoder against the DFlash draft that it runs, in fp32."""

import copy
from dataclasses import replace

import pytest
import torch

from drafts.dflash import BlockConfig, DFlash, DFlash2, Second
from fast.decoder import BlockDecoder, faster
from helpers import on_each_device, rope_of
from model import Config, LayerConfig

# T tokens of a block, query heads of a kv head, head dim, windows of the layers, causal, cache
CASES = {
    "one mask": (2, 2, 64, (None, None), None, "16-bit"),
    "a whole block": (16, 4, 128, (None, None), None, "16-bit"),
    "many pairs": (16, 8, 64, (None, 40), None, "16-bit"),
    "windows": (9, 2, 64, (50, None), None, "16-bit"),
    "windows that see ahead": (9, 2, 64, (50, None), False, "16-bit"),
    "causal": (7, 3, 48, (None, 50), True, "16-bit"),
    "int8": (5, 2, 64, (None, None), None, "int8"),
}


@on_each_device
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.no_grad()
def test_a_block_by_kernels_is_the_drafts_own(case, device):
    """Ragged rows, of which each has a context of its own; twice, the second time over what the first
    block has left behind the text."""
    T, G, E, windows, causal, cache = case
    layers = tuple(LayerConfig(window, rope_of(E)) for window in windows)
    sizes = 64, layers, 2 * G, 2, E, 96, 200, 999
    config = Config(*sizes, qk_norm="head", logits_cap=3.0)
    plain = DFlash(config, BlockConfig((1, 2), 64, 16, 0, causal)).to(device)
    for name, weight in plain.named_parameters():
        weight.requires_grad_(False).normal_(std=1 / weight.shape[-1] ** 0.5)
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    rounded = copy.deepcopy(plain).bfloat16()
    plain.load_state_dict(rounded.state_dict())
    for model in plain, rounded:
        model.setup(180, 3, cache=cache, spare=40)
    fast = faster(copy.deepcopy(rounded))
    assert isinstance(fast, BlockDecoder)
    if device == "cuda":
        takes = [half.takes(T) for half, _ in fast.layers]
        assert takes == [T * G <= 64 and (causal is not False or not w) for w in windows]
    last = torch.tensor([0, 70, 150], device=device)
    for _ in range(2):
        slots = plain.slots[: last.max() + T + 7]
        for at in (
            torch.arange(150, device=device),
            last[:, None] + torch.arange(T, device=device),
        ):
            features = torch.randn(3, at.shape[-1], 128, device=device).bfloat16()
            for each in plain, rounded, fast:
                of = features.float() if each is plain else features
                each.read(of, at.expand(3, -1))
        last = last + torch.tensor([T, 0, 1], device=device)
        tokens = torch.randint(200, (3, T), device=device)
        positions = last[:, None] + torch.arange(T, device=device)
        found = [
            each.logits(each.forward(tokens, positions, slots)) for each in (plain, rounded, fast)
        ]
        exact, *others = (each.double() for each in found)
        of_plain, of_fast = ((each - exact).norm() / exact.norm() for each in others)
        assert of_fast < 2 * of_plain + 2e-3, (of_fast, of_plain)


def test_what_no_kernel_knows_stays_the_drafts():
    """A gate's function that fast/ does not know, and DFlash 2's convolutions."""
    layers = (LayerConfig(None, rope_of(64)),)
    config = Config(64, layers, 2, 2, 64, 96, 200, 999, qk_norm="head")
    block = BlockConfig((1,), 64, 8, 0)
    second = replace(block, second=Second(2, 16, 4, 3))
    models = DFlash(config, block), DFlash(replace(config, activation="relu2"), block)
    for model in (*models, DFlash2(config, second)):
        model.setup(20, 1)
        assert isinstance(faster(model), BlockDecoder) == (model is models[0])

"""The model against golden values of transformers; what a token sees depends on its position
alone."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from helpers import FAMILIES, GOLDEN, error, golden, of_each_family, on_each_device, read, tiny
from model import Transformer


def test_all_families_have_golden_values():
    assert len(FAMILIES) == 37


@pytest.fixture
def model(family) -> Transformer:
    return tiny(directory=GOLDEN / family)


@of_each_family
@pytest.mark.parametrize("cached, sliced", [(1, False), (1, True), (0, False)])
def test_logits_equal_transformers(model, family, cached, sliced):
    """Over the whole cache, over the slots in use of a longer one, and without a cache."""
    for tokens, logits in zip(*golden(GOLDEN / family)):
        n = len(tokens)
        model.setup(n, cached, spare=64 - n if sliced else 0)
        out = read(model, tokens[None], slots=model.slots[:n])
        assert error(out[0], logits) < 1e-5


@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_only_the_chosen_experts_are_computed(n):
    """Whatever the others' weights are. 3 rows have more pairs than there are experts, and are
    sorted."""
    moe, x = tiny(directory=GOLDEN / "qwen3-moe").layers[1].ffn, torch.randn(1, n, 32)
    expected, (_, chosen) = moe(x), moe.route(x[0])
    others = [expert for expert in range(8) if expert not in chosen]
    moe.w_gate_up.weight[others] = moe.w_down.weight[others] = math.nan
    assert others and moe(x).equal(expected)


@of_each_family
def test_ragged_batch_over_a_dirty_cache_equals_rows_alone(model, family):
    """A padded prefill, then a step of 3 tokens at positions of each row's own, over slots full of
    rubbish."""
    limit = 30  # LongRoPE: its original length or less
    rows, logits = golden(GOLDEN / family, limit)
    rows, logits = (rows * 2)[:3], (logits * 2)[:3]
    lengths = torch.tensor([17, 2, 9])
    model.setup(limit, batch_size=3, spare=34)
    for layer in model.layers:
        for part in layer.attn.cache.buffers():
            part.normal_(std=9)
    prompts = pad_sequence([row[:n] for row, n in zip(rows, lengths)], batch_first=True)
    last = read(model, prompts, last=lengths - 1, ends=lengths)
    steps = torch.stack([row[n : n + 3] for row, n in zip(rows, lengths)])
    verified = model(steps, lengths[:, None] + torch.arange(3))
    for out, ref, n in zip(torch.cat((last[:, None], verified), dim=1), logits, lengths):
        assert error(out, ref[n - 1 : n + 3]) < 1e-5


@torch.no_grad()
def test_hidden_states_of_named_places_are_kept_by_position():
    """The first layer's output and the last one's."""
    model, seen = tiny(directory=GOLDEN / "smollm3"), []
    for places in (-1,), (1, 5):
        with pytest.raises(ValueError, match="want numbers of layers, 0 to 4"):
            model.setup(16, 2, features=places)
    model.setup(16, 2, features=(1, 4))
    for layer in model.layers[0], model.layers[3]:
        layer.register_forward_hook(lambda _, inputs, out: seen.append(out))
    model(torch.randint(96, (2, 10)), torch.arange(4, 14)[None])
    assert (
        model.features[:, 4:14].equal(torch.cat(seen, dim=-1))
        and not model.features[:, [*range(4), 14, 15]].any()
    )


@on_each_device
def test_compiled_gradients_equal_eager_ones(device):
    """What train_tiny.py relies on; through nested_compile_region torch gets them wrong."""
    model = tiny(device, GOLDEN / "llama2").requires_grad_()
    model.setup(max_seq_len=32)
    tokens = torch.randint(96, (4, 32), device=device)

    def loss() -> torch.Tensor:
        return read(model, tokens).logsumexp(-1).mean()

    eager, compiled = (
        torch.autograd.grad(function(), [*model.parameters()])
        for function in (loss, torch.compile(loss))
    )
    assert max(map(error, compiled, eager)) < 1e-4

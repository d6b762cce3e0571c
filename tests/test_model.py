"""The model against golden values of transformers; what a token sees depends on its position alone."""
import math

import pytest
import torch

from helpers import (CPU, FAMILIES, GOLDEN, error, exact_attention, golden, load_checkpoint, of_each_family,
                     on_each_device, read, rope_of, tiny)
from model import Config, LayerConfig, Rope, RopeTable, Transformer

def test_all_families_have_golden_values():
    assert len(FAMILIES) == 21


@pytest.fixture
def model(family) -> Transformer:
    return tiny(directory=GOLDEN / family)


@of_each_family
@pytest.mark.parametrize("cached, sliced", [(1, False), (1, True), (0, False)])
def test_logits_equal_transformers(model, family, cached, sliced):
    """Over the whole cache, over its slots in use, and without a cache."""
    model.setup(max_seq_len=64, batch_size=cached)
    for tokens, logits in zip(*golden(GOLDEN / family)):
        n = len(tokens)
        model.begin_rows([n])
        out = read(model, tokens[None], slots=model.slots[:n] if sliced else None)
        assert error(out[0], logits) < 1e-5


@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_only_the_chosen_experts_are_computed(n):
    """Whatever the others' weights are. 3 rows have more pairs than there are experts, and are sorted."""
    model, tokens, found = tiny(directory=GOLDEN / "qwen3-moe"), torch.arange(n)[None], []
    model.setup(8, 1)
    sparse = [layer.ffn for layer in model.layers if layer.config.moe]
    for moe in sparse:
        moe.router.register_forward_hook(lambda _, inputs, logits: found.append(logits.topk(3).indices.flatten()))
    expected = read(model, tokens)
    assert len(sparse) == 1 and len(found) == 1 and len(found[0].unique()) < 8
    for moe, chosen in zip(sparse, found):
        for weight in (moe.w_gate_up.weight, moe.w_down.weight):
            weight[[x for x in range(8) if x not in chosen]] = math.nan
    assert read(model, tokens).equal(expected)


@of_each_family
def test_token_by_token_equals_one_chunk(model, family):
    tokens, logits = (rows[0] for rows in golden(GOLDEN / family))
    model.setup(max_seq_len=64, batch_size=1)
    model.begin_rows([len(tokens)])
    steps = [model(token[None, None], torch.tensor([[i]])) for i, token in enumerate(tokens)]
    assert error(torch.cat(steps, dim=1)[0], logits) < 1e-5


@of_each_family
def test_ragged_batch_over_a_dirty_cache_equals_rows_alone(model, family):
    """A padded prefill, then a step of 3 tokens at positions of each row's own, over slots full of rubbish."""
    all_tokens, all_logits = golden(GOLDEN / family)
    lengths = torch.tensor([17, 2, 9])
    model.setup(max_seq_len=64, batch_size=3)
    model.begin_rows([len(tokens) for tokens in all_tokens])
    for layer in model.layers:
        layer.attn.cache.k.normal_(std=9)
        layer.attn.cache.v.normal_(std=9)
    prompts = torch.randint(0, model.config.vocab_size, (3, 17))
    for row, n in enumerate(lengths):
        prompts[row, :n] = all_tokens[row][:n]
    last = read(model, prompts, last=lengths - 1)
    steps = torch.stack([all_tokens[row][n:n + 3] for row, n in enumerate(lengths)])
    verified = model(steps, lengths[:, None] + torch.arange(3))
    for row, n in enumerate(lengths):
        assert error(torch.cat((last[row][None], verified[row])), all_logits[row][n - 1:n + 3]) < 1e-5


def test_repeated_rows_continue_as_their_source():
    model = tiny(directory=GOLDEN / "llama2")
    tokens, logits = (torch.stack([rows[row][:6] for row in (0, 2)]) for rows in golden(GOLDEN / "llama2"))
    model.setup(max_seq_len=64, batch_size=4)
    read(model, tokens[:, :5])
    order = [0, 0, 1, 1]
    model.arrange_rows(order, 5)
    out = model(tokens[order, 5:], torch.full((4, 1), 5))
    for row, ref in zip(out, logits[order]):
        assert error(row[0], ref[5]) < 1e-5


def test_rope_tables_are_fp32_and_turn_by_the_published_angles():
    model = load_checkpoint(GOLDEN / "llama2", dtype=torch.bfloat16)
    model.setup(max_seq_len=128, batch_size=1)
    assert model.ropes[0].cos.dtype == model.ropes[0].sin.dtype == torch.float32
    E = model.config.head_dim
    angle = torch.arange(128, dtype=torch.double)[:, None] * 10000.0 ** (-torch.arange(0, E, 2, dtype=torch.double) / E)
    none, whole = (RopeTable(rope, E, 128, 1, CPU) for rope in (Rope(), rope_of(E)))
    assert (none.cos == 1).all() and (none.sin == 0).all()
    assert error(whole.cos, angle.cos().repeat(1, 2)) < 1e-5 and error(whole.sin, angle.sin().repeat(1, 2)) < 1e-5


MIXED = (LayerConfig(rope=rope_of(8)), LayerConfig(window=3), LayerConfig(rope=rope_of(8, 100.0)),
         LayerConfig(5, rope_of(8)))


def random_weights(layers: tuple[LayerConfig, ...]) -> Transformer:
    model = Transformer(Config(dim=32, layers=layers, n_head=4, n_kv_head=2, head_dim=8, ffn_dim=48, vocab_size=96,
                               context=64))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 1 if weight.dim() == 1 else 0, 0.25)
    return model


def mixed_model() -> Transformer:
    """Each layer has a window and a rope of its own."""
    return random_weights(MIXED).double()


@pytest.mark.parametrize("layer", range(4))
@torch.no_grad()
def test_a_layer_has_the_window_and_the_rope_that_its_config_names(layer):
    model, positions, found = mixed_model(), torch.arange(12)[None], []
    attn, (window, rope) = model.layers[layer].attn, (MIXED[layer].window, MIXED[layer].rope)
    model.setup(max_seq_len=16, batch_size=1)
    attn.register_forward_hook(lambda _, inputs, out: found.extend([inputs[0], out]))
    model(torch.randint(96, (1, 12)), positions)
    qkv = attn.wqkv(found[0]).unflatten(-1, (8, 8))
    table = RopeTable(rope, 8, 16, 1, CPU)
    out, _, _ = exact_attention(qkv, positions, table, *torch.zeros(2, 1, 2, 16, 8), attn, window)
    assert error(found[1], attn.wo(out.flatten(2))) < 1e-6  # rope's tables are fp32


def test_hidden_states_of_named_places_are_kept_by_position():
    model, tokens = mixed_model(), torch.randint(96, (2, 10))
    model.setup(max_seq_len=16, batch_size=2, features=(1, 4))
    seen = []
    model.layers[1].register_forward_hook(lambda _, inputs, out: seen.append(inputs[0]))
    model.layers[3].register_forward_hook(lambda _, inputs, out: seen.append(out))
    with torch.no_grad():
        whole = read(model, tokens)
        assert torch.equal(model.features[:, :10], torch.cat(seen, dim=-1)) and not model.features[:, 10:].any()
        kept = model.features.clone()
        model.features.zero_()
        for positions in (torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[3, 4], [3, 4]])):
            model(tokens.gather(1, positions), positions)
        assert error(model.features[:, :5], kept[:, :5]) < 1e-9 and not model.features[:, 5:].any()
    model.setup(max_seq_len=16, batch_size=2)
    assert not model.features.numel() and torch.equal(read(model, tokens), whole)


@on_each_device
def test_compiled_gradients_equal_eager_ones(device):
    """What train_tiny.py relies on; through nested_compile_region torch gets them wrong."""
    model = random_weights((LayerConfig(rope=rope_of(8)),) * 2).to(device)
    model.setup(max_seq_len=32)
    tokens = torch.randint(96, (4, 32), device=device)

    def loss() -> torch.Tensor:
        logits = read(model, tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    eager, compiled = (torch.autograd.grad(function(), list(model.parameters()))
                       for function in (loss, torch.compile(loss)))
    for (name, _), ref, gradient in zip(model.named_parameters(), eager, compiled):
        assert error(gradient, ref) < 1e-4, name

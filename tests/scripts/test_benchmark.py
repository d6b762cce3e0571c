"""scripts/benchmark.py as a user runs it, on the CPU."""

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from helpers import (
    CPU,
    F32,
    GOLDEN,
    ROOT,
    absent,
    error,
    load_checkpoint,
    logits_of,
    one_line,
    python,
    read,
    tiny,
    tiny_head,
)
from model import Config, LayerConfig
from scripts import benchmark as script, benchmark_drafts, benchmark_speculation
from scripts.benchmark import main
from scripts.benchmark_speculation import part_for, widen, widen_head
from scripts.shapes import SHAPES, random_model
from speculative import Speculator
from tp import Shard


@pytest.fixture
def benchmark(call, monkeypatch):
    """Runs it in this process, on the CPU -> its lines."""
    monkeypatch.chdir(ROOT)

    def run(options: str, what: str = "checkpoints/tiny") -> list[dict]:
        code, out, err = call(
            "benchmark.py", main, what, "--device", "cpu", "--no-compile", *options.split()
        )
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return run


def test_a_line_says_what_was_measured(benchmark):
    sizes = "--batch 2 --prompt-length 9 --context 20 --new-tokens 12 --runs 3"
    [line] = benchmark(f"{sizes} --against eager --top-p 0.5 --quantize int8")
    weights = 5572096  # tied: all of it is read
    assert (line["weights_bytes"], line["batch"], line["steps_per_s"]["runs"]) == (weights, 2, 3)
    assert line["tokens_per_s"] == pytest.approx(2e3 / line["ms_per_token"])
    keys = line["gb_per_s"] * 1e9 * line["ms_per_token"] / 1e3 - weights  # in use, of the cache's
    # 41 tokens and the engine's slack.
    assert keys / line["cache_bytes"] == pytest.approx((20 + 9 + 6) / 64)
    eager = line["against"]["eager"]
    assert eager["ratio"] == pytest.approx(line["steps_per_s"]["median"] / eager["steps_per_s"])
    assert line["share_of_read"] is line["peak_memory_bytes"] is None  # no GPU


def test_the_first_call_stands_beside_the_median(benchmark, monkeypatch):
    """Seconds to the first token, and a step."""
    times = iter([(0.5, 0.1), (0.2, 0.2), (0.3, 0.4)])
    monkeypatch.setitem(main.__globals__, "one_run", lambda *_: next(times))
    [line] = benchmark("--runs 3")
    assert (line["first_call_s"], line["first_token_s"]) == (0.5, 0.3)
    assert line["ms_per_token"] == 200


@pytest.mark.parametrize(
    "options, converter, error",
    [
        ("--quantize int4", "open(sys.argv[3], 'w')", ""),
        ("", "sys.exit('no converter')", "no converter"),
        ("--temperature 1", "", "--temperature 0"),
    ],
)
def test_llama_cpp_takes_turns(call, monkeypatch, tmp_path, options, converter, error):
    """A stand-in for its module, and one for its converter."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "convert_hf_to_gguf.py").write_text(f"import sys\n{converter}")
    module = MagicMock()
    module.llama_model_quantize.return_value = 0
    module.Llama.return_value.n_vocab.return_value = 2048
    module.Llama.return_value.generate.side_effect = lambda prompt, temp: iter(range(6))
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(main.__globals__, "find_spec", lambda name: name)
    line = "checkpoints/tiny --device cpu --no-compile --runs 3 --new-tokens 6 --against llama.cpp --temperature 0"
    code, out, err = call(
        "benchmark.py", main, *line.split(), "--llama-cpp", tmp_path, *options.split()
    )
    if error:
        assert code == 2 and error in err.splitlines()[-1]
        return
    found = json.loads(out)
    theirs = found["against"]["llama.cpp"]
    assert theirs["ratio"] == pytest.approx(found["tokens_per_s"] / theirs["tokens_per_s"])
    assert module.Llama.return_value.generate.call_count == 1 + 3  # one warms up
    [path], settings = module.Llama.call_args
    assert settings["n_threads"] == torch.get_num_threads() and path.endswith("rounded.gguf")
    assert module.llama_model_quantize.call_args[0][2].ftype is module.LLAMA_FTYPE_MOSTLY_Q4_0


@pytest.mark.parametrize(
    "rounding, group", [("int4", 128), ("int4 --group-size 32", 32), ("int8", None)]
)
def test_a_line_says_which_groups_were_rounded(benchmark, rounding, group):
    [found] = benchmark(f"--runs 1 --new-tokens 3 --no-compile --quantize {rounding}")
    assert found["group_size"] == group


def test_a_line_says_whether_all_layers_are_one_launch(benchmark, monkeypatch):
    """Of one row: here an engine that has such a step, as on a GPU."""
    line = "--runs 1 --new-tokens 3"
    assert [found["one_launch"] for found in benchmark(line)] == [False]
    ready = script.ready

    def with_step(*args):
        engine = ready(*args)
        engine.decoder = SimpleNamespace(one_row=object())
        return engine

    monkeypatch.setattr(script, "ready", with_step)
    lines = [*benchmark(line), *benchmark(f"{line} --batch 2")]
    assert [found["one_launch"] for found in lines] == [True, False]


@pytest.mark.parametrize("rows", [1, 3])
def test_of_experts_those_that_were_chosen_are_counted(benchmark, rows):
    """One row chooses 2 of 4; three rows choose others too."""
    [found] = benchmark(f"--runs 1 --new-tokens 8 --batch {rows}", "tests/golden/mixtral")
    share, read = found["share_of_experts"], found["gb_per_s"] * 1e6 * found["ms_per_token"]
    assert share == 0.5 if rows == 1 else 0.5 < share < 1
    experts = 4 * 2 * 4 * 3 * 56 * 32  # bytes, layers, experts, matrices
    embedding, cache = 4 * 96 * 32, 4 * rows * 2 * 2 * 2 * 8 * (5 + 8 / 2)
    assert read == pytest.approx(found["weights_bytes"] - embedding - experts * (1 - share) + cache)


def test_random_mxfp4_experts_are_as_large_as_published_ones():
    config = replace(
        SHAPES["gpt-oss-20b"], layers=SHAPES["gpt-oss-20b"].layers[:1], dim=64, vocab_size=64
    )
    model = random_model(config, CPU, F32, mxfp4=True)
    experts = [
        weight for weight in model.layers[0].ffn.parameters() if not weight.is_floating_point()
    ]
    assert sum(weight.nbytes for weight in experts) == 32 * 3 * 2880 * 64 * 4.25 / 8
    assert logits_of(model, torch.arange(6)).isfinite().all()


@pytest.mark.parametrize(
    "args, words",
    [
        ("llama-9b", "llama-9b llama-2-7b smollm2-135m"),
        ("", "llama-2-7b"),
        ("smollm2-135m --context 9000", "9000 8192"),
        ("llama-3.2-1b --device cpu --batch 100000", "GiB of cache 100000 rows"),
        ("smollm2-135m --against vllm", "vllm eager"),
        ("smollm2-135m --group-size 64", "--group-size 64 --quantize"),
        ("smollm2-135m --draft-tokens 6", "--draft-tokens 6 --speculate"),
        ("checkpoints/tiny --speculate --against transformers", "transformers pip install"),
        ("smollm2-135m --device cpu --quantize int4 --group-size 128", "128 576 64"),
        ("llama-3.2-1b --speculate --device cpu", "heads of 128"),
        ("llama-2-7b --speculate --draft-tokens 4,x --device cpu", "'x' bass"),
        ("llama-2-7b --speculate --against cublas --device cpu", "--against cublas"),
        ("llama-2-7b --speculate --cold-start --device cpu", "--cold-start --speculate"),
        ("checkpoints/tiny --speculate --new-tokens 510 --device cpu", "510 512"),
    ],
)
def test_mistakes_are_one_line(call, monkeypatch, args, words):
    monkeypatch.chdir(ROOT)
    # As if it were not installed.
    monkeypatch.setitem(main.__globals__, "find_spec", lambda name: None)
    assert absent(words, one_line(call("benchmark.py", main, *args.split()))) == []


@pytest.mark.parametrize(
    "shape", [(1024, 7, 8, 8, 128, 1100), (512, 6, 8, 4, 128, 700), (256, 5, 4, 2, 128, 640)]
)
@torch.no_grad()
def test_a_widened_model_keeps_the_logits(shape):
    """So does its head, of the features at the same places, and with 32,000 rows of output."""
    small, small_head = tiny(), tiny_head()
    dim, layers, *others = shape
    layer = LayerConfig(rope=small.layers[0].config.rope)
    config = Config(dim, (layer,) * layers, *others, vocab_size=32000, context=600)
    wide = widen(small, config, CPU, F32)
    wide_head = widen_head(small_head, wide, config)
    tokens, logits = torch.randint(2048, (2, 30)), []
    for model, head in ((small, small_head), (wide, wide_head)):
        model.setup(64, 2, head.options.places)
        head.setup(64, 2)
        ours = read(model, tokens)
        inputs = head.inputs(tokens, head.project(model.features[:, :30]))
        logits.append((ours, read(head, tokens, inputs=inputs)[..., : len(head.vocabulary)]))
    assert all(error(out, ref) < 1e-5 for ref, out in zip(*logits))
    assert (
        wide_head.head.weight.shape == (32000, dim)
        and wide_head.layers[0].attn.wqkv.weight.shape[1] == 2 * dim
    )


@pytest.mark.parametrize("draft", ["tiny-draft", "eagle"])
def test_speculation_is_measured_against_plain_decoding(benchmark, draft):
    options = "--speculate --batch 2 --runs 2 --new-tokens 20 --draft-tokens 3,bass --temperature 0"
    lines = benchmark(f"{options} --draft {draft}")
    assert [line["draft_tokens"] for line in lines] == ["3", "bass"]
    for line in lines:
        least, most = line["speed_ups"]  # of two texts, each against a plain one of its own
        assert line["speed_up"] == pytest.approx((least + most) / 2)
        assert (
            least * 0.999 < line["plain_ms_per_token"] / line["ms_per_token"]["mean"] < most * 1.001
        )
        assert (
            line["ms_per_token"]["first"]
            <= line["ms_per_token"]["mean"]
            <= line["ms_per_token"]["last"]
        )
        assert 0 < line["accepted_of_drafted"] <= line["acceptance"] <= 1 < line["tokens_per_step"]


@pytest.mark.parametrize("draft", ["tiny-draft", "eagle"])
def test_what_a_gpu_times_of_speculation_are_whole_forwards(benchmark, monkeypatch, draft):
    """Its clock stands still here: each forward runs once, and takes a millisecond."""

    def once(run) -> float:
        run()
        return 1e-3

    monkeypatch.setattr(benchmark_speculation, "graph_seconds", once)
    found = []

    class Kept(Speculator):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(benchmark_speculation, "Speculator", Kept)
    benchmark(f"--speculate --draft {draft} --runs 1 --new-tokens 120 --draft-tokens 4 --batch 2")
    verify, drafts, one = benchmark_speculation.forwards_ms(found[0], 4, 2)
    assert (verify, drafts, one) == (1, 4 if draft == "tiny-draft" else 5, 1)


@pytest.mark.parametrize("quantize", ["", "--quantize int8"])
@pytest.mark.parametrize("kind, tokens", [("mtp", 3), ("dflash", 7)])
def test_drafts_whose_acceptance_is_simulated(benchmark, monkeypatch, kind, tokens, quantize):
    """As many tokens a step as are asked for, but for the draw; of a recurrent target."""
    config = load_checkpoint(ROOT / "tests" / "mtp" / "qwen3.5").config
    config = replace(config, dim=64, ffn_dim=96, vocab_size=64, context=999)
    monkeypatch.setitem(SHAPES, "llama-2-7b", config)
    options = f"--speculate --draft {kind} --draft-tokens {tokens} {quantize} --runs 1"
    more = "--new-tokens 200 --batch 3 --tokens-per-step 1,2.5"
    lines = benchmark(f"{options} {more}", "llama-2-7b")
    assert [line["simulated_tokens_per_step"] for line in lines] == [1, 2.5]
    assert lines[0]["tokens_per_step"] == 1
    assert lines[1]["tokens_per_step"] == pytest.approx(2.5, rel=0.15)
    for line in lines:
        assert line["speed_up"] == pytest.approx(line["plain_ms_per_token"] / line["ms_per_token"])
    options = options.replace(f"--draft-tokens {tokens}", "--draft-tokens 1,auto,3")
    lines = benchmark(f"{options} --new-tokens 200 --tokens-per-step 2", "llama-2-7b")
    assert [line["draft_tokens"] for line in lines] == ["1", "auto", "3"]
    # 54% of the tokens are kept, so that three make two a step.
    assert lines[0]["tokens_per_step"] == pytest.approx(1.54, rel=0.15)
    assert lines[2]["tokens_per_step"] == pytest.approx(2, rel=0.2)


def test_a_mixture_has_the_published_drafts_sizes(benchmark, monkeypatch):
    """Biases, layers of its own number and width, and blocks of eight where nothing is said."""
    config = load_checkpoint(ROOT / "tests" / "golden" / "gpt-oss").config
    config = replace(config, layers=config.layers[:1] * 24, context=999)
    monkeypatch.setitem(SHAPES, "gpt-oss-20b", config)
    made = []
    random_draft = benchmark_drafts.random_draft
    keep = lambda *given: made.append(random_draft(*given)) or made[0]  # noqa: E731
    monkeypatch.setattr(benchmark_drafts, "random_draft", keep)
    options = "--speculate --draft dflash --runs 1 --new-tokens 60 --tokens-per-step 8"
    [line] = benchmark(options, "gpt-oss-20b")
    assert line["draft_tokens"] == "7" and line["tokens_per_step"] == 8
    [draft], layers = made, made[0].layers
    assert len(layers) == 8 and layers[0].ffn.w_down.weight.shape[1] == 7680
    assert layers[7].attn.wqkv.bias is not None and layers[7].attn.wo.bias is not None
    assert draft.block.places == (2, 7, 12, 17, 22)


@pytest.mark.parametrize(
    "options, said",
    [
        ("llama-3.2-1b --draft mtp --tokens-per-step 5", "--tokens-per-step 5: want 1 to 4"),
        ("llama-3.2-1b --draft mtp --tokens-per-step x", "--tokens-per-step x: want numbers"),
        ("llama-3.2-1b --draft eagle --tokens-per-step 2", "goes with --draft mtp or dflash"),
        ("mixtral-8x7b --draft dflash", "--draft dflash: want a dense shape, or one of"),
        ("checkpoints/tiny --draft dflash", "is no shape"),
    ],
)
def test_what_cannot_be_simulated_is_refused(call, monkeypatch, options, said):
    small = SHAPES["mixtral-8x7b"]
    small = replace(small, layers=small.layers[:1], dim=64, vocab_size=64, ffn_dim=64)
    moe = replace(small.layers[0].moe, ffn_dim=32)
    small = replace(small, layers=(replace(small.layers[0], moe=moe),))
    monkeypatch.setitem(SHAPES, "mixtral-8x7b", small)
    arguments = options.split() + ["--speculate", "--device", "cpu"]
    assert said in one_line(call("benchmark.py", main, *arguments))


def test_ranks_draw_and_speculate_as_one_does(benchmark):
    options = "--speculate --draft eagle --batch 2 --runs 1 --new-tokens 20 --draft-tokens 3,2"
    done = python(
        "scripts/benchmark.py",
        "checkpoints/tiny",
        "--device",
        "cpu",
        "--no-compile",
        "--ranks",
        "2",
        *options.split(),
    )
    assert done.returncode == 0, done.stderr
    for line, of_one in zip(
        map(json.loads, done.stdout.splitlines()), benchmark(options), strict=True
    ):
        assert (line["ranks"], of_one["ranks"]) == (2, 1)
        for name in "draft_tokens", "tokens_per_step", "acceptance", "accepted_of_drafted":
            assert line[name] == of_one[name]


def test_parts_of_a_model_and_of_a_head_are_those_that_the_ranks_load(lone):
    """Of a model with biases, which is not tied, as no widened one is."""
    qwen2 = GOLDEN / "qwen2"
    for rank in range(2):
        split = partial(Shard, rank=rank, ranks=2)
        for whole, loaded in (
            (tiny(directory=qwen2), load_checkpoint(qwen2, split=split)),
            (tiny_head(), tiny_head(split=split)),
        ):
            part = part_for(split(whole.config, 1, outputs=len(whole.head.weight)), whole)
            torch.testing.assert_close(part.state_dict(), loaded.state_dict(), rtol=0, atol=0)

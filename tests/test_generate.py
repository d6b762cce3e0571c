"""Prefill and decode, eager and compiled; streaming and stops."""
import subprocess
import sys
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from checkpoint import Tokenizer, load_model
from cli import show
from generate import Completion, Generator, complete
from helpers import DEVICES, GOLDEN, GREEDY, ROOT, TINY, run, tiny
from sampling import Sampling


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


COMPILED = ["mistral", "llama3.1", "qwen3"]  # on a CPU, where compiling takes 10 s, the first of them


@pytest.mark.parametrize("family, mode, device", [
    *((path.name, "eager", "cpu") for path in sorted(GOLDEN.iterdir())), (COMPILED[0], "fast", "cpu"),
    *(pytest.param(path.name, "eager", "cuda", marks=pytest.mark.gpu) for path in sorted(GOLDEN.iterdir())),
    *(pytest.param(name, mode, "cuda", marks=pytest.mark.gpu) for name in COMPILED for mode in ("compile", "fast"))])
def test_greedy_ragged_batch_equals_transformers(family, mode, device):
    values = load_file(GOLDEN / family / "golden.safetensors")
    rows, lengths = [values[f"tokens.{i}"].tolist() for i in range(3)], (13, 1, 6)
    model = load_model(GOLDEN / family, torch.device(device), torch.float32)
    generator = Generator(model, 13 + 24, GREEDY, prompts=3, mode=mode)
    out = run(generator, [row[:n] for row, n in zip(rows, lengths)], 24)
    assert out == [row[n:] for row, n in zip(rows, lengths)]


def drawn(generator: Generator, cases: list[tuple[list[list[int]], int]], seed: int) -> list[list[list[int]]]:
    """5 new tokens a row of each case: prompts, and how many tokens are cached."""
    torch.manual_seed(seed)
    return [run(generator, prompts, 5, start) for prompts, start in cases]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_once_for_all_prompts_and_a_seed_draws_what_it_draws_without(device, monkeypatch):
    """Lengths 1 and 2, both sides of 256 slots in use, a cached start: two graphs, made up front, serve them all. They
    also serve prompts that are read in chunks of 4 columns, with lengths on both sides of the chunks' edges."""
    sampling = Sampling(0.9, 50, 0.95)
    eager = Generator(tiny(device), 400, sampling, prompts=2, samples=2)
    cases = [([[5 + i] * n, [9] * 3], 0) for i, n in enumerate((1, 2, 7, 250, 390))] + [([[1, 2], [3]], 4)]
    expected = drawn(eager, cases, seed=1)
    counters.clear()
    compiled = Generator(tiny(device), 400, sampling, prompts=2, samples=2, mode="fast")
    assert counters["stats"]["unique_graphs"] == 2
    assert drawn(compiled, cases, seed=1) == expected
    monkeypatch.setattr("generate.PREFILL_TOKENS", 8)
    assert drawn(compiled, chunk_cases(), seed=1) == drawn(eager, chunk_cases(), seed=1)
    assert drawn(compiled, cases, seed=2) != expected
    assert counters["stats"]["unique_graphs"] == 2
    assert any(rows[0] != rows[1] and rows[2] != rows[3] for rows in expected)  # the samples of a prompt differ


def chunk_cases() -> list[tuple[list[list[int]], int]]:
    """Prompts, and how many tokens are cached, for chunks of 4 columns and of 16."""
    return [([[7] * n, [9, 8, 7]], start) for n in (1, 3, 4, 5, 8, 9, 13, 16, 17, 33) for start in (0, 6)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", (4, 16))
def test_a_prompt_in_chunks_gives_what_it_gives_whole(device, columns, monkeypatch):
    """Compiled, the test above shows it."""
    generator, read = Generator(tiny(device), 60, GREEDY, prompts=2, samples=2), set()
    expected = [run(generator, prompts, 6, start) for prompts, start in chunk_cases()]
    prefill = generator.prefill
    generator.prefill = lambda model, tokens, *rest: read.add(tokens.shape[1]) or prefill(model, tokens, *rest)
    monkeypatch.setattr("generate.PREFILL_TOKENS", 2 * columns)
    assert [run(generator, prompts, 6, start) for prompts, start in chunk_cases()] == expected
    assert max(read) == columns


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", (0, 1, 5))
@pytest.mark.parametrize("length", (1, 2, 17))
def test_a_text_may_fill_the_cache_to_the_last_token(device, start, length):
    """There is room behind it for the columns that fill up its prompt."""
    expected = run(Generator(tiny(device), 99, GREEDY), [[7] * length], 1, start)
    assert run(Generator(tiny(device), start + length + 1, GREEDY), [[7] * length], 1, start) == expected


def ragged_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Of 9, 2, 5 and 1 tokens; they go on in different ways."""
    texts = "Once upon a time there was a red fox", "One", "Tom and Sue went to", "A"
    return [tokenizer.encode(text)[:length] for text, length in zip(texts, (9, 2, 5, 1))]


def test_prompts_that_have_ended_leave_the_prefill(tokenizer, monkeypatch):
    """Where only shorter ones follow them; and the tokens are those of the prompts alone."""
    prompts, read = ragged_prompts(tokenizer), []
    alone = [run(Generator(tiny(), 60, GREEDY), [prompt], 30)[0] for prompt in prompts]
    generator = Generator(tiny(), 60, GREEDY, prompts=4, samples=2)
    prefill = generator.prefill
    generator.prefill = lambda model, tokens, *rest: read.append(tuple(tokens.shape)) or prefill(model, tokens, *rest)
    monkeypatch.setattr("generate.PREFILL_TOKENS", 16)  # four columns of four prompts
    assert run(generator, prompts, 30) == [tokens for tokens in alone for _ in range(2)]
    assert read == [(4, 4), (3, 4), (1, 2)]


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_rows_that_have_ended_leave_the_batch(tokenizer, device):
    """The others' tokens stay what they are. Nothing breaks when all have ended, and the next call begins anew."""
    generator = Generator(tiny(device), 60, GREEDY, prompts=3, samples=2)
    long, *short = ragged_prompts(tokenizer)[:3]
    prompts, ends, decode = [short[0], long, short[1]], {2: 4, 0: 5, 5: 6, 4: 20, 1: 30, 3: 30}, generator.decode
    expected = run(generator, prompts, 40)
    assert expected[1] != expected[3] != expected[5] != expected[1]
    for _ in range(2):
        got, read = [[] for _ in expected], []
        generator.decode = lambda tokens, *rest: read.append(len(tokens)) or decode(tokens, *rest)
        for n, step in enumerate(generator.generate(prompts, 40)):
            for row, [(token, _)] in enumerate(step):
                if n <= ends[row]:
                    got[row].append(token)
                if n == ends[row]:
                    generator.finish(row)
        assert got == [tokens[:ends[row] + 1] for row, tokens in enumerate(expected)]
        assert len(read) == 39 and sorted(set(read)) == [2, 4, 6]


def test_sampled_rows_stay_so_that_a_seed_draws_what_it_draws_compiled():
    generator, tokens = Generator(tiny(), 60, Sampling(0.9, 50, 0.95), samples=4), []
    for ended in ((), (0, 1, 3)):
        torch.manual_seed(1)
        tokens.append([])
        for step in generator.generate([[1, 300, 500]], 20):
            tokens[-1].append(step[2])
            for row in ended:
                generator.finish(row)
    assert tokens[0] == tokens[1]


def test_a_seed_repeats_a_text():
    generator, out = Generator(tiny(), 64, Sampling(0.9, 50, 0.95), samples=3), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out.append(run(generator, [[1, 300, 500]], 40))
    assert out[0] == out[1] != out[2] and len(set(map(tuple, out[0]))) == 3


def test_samples_of_a_ragged_batch_follow_their_prompts():
    model, prompts = tiny(), [[1, 300, 500, 20], [1, 7]]
    alone = [run(Generator(model, 40, GREEDY), [prompt], 30)[0] for prompt in prompts]
    batch = run(Generator(model, 40, GREEDY, prompts=2, samples=3), prompts, 30)
    assert batch == [alone[0]] * 3 + [alone[1]] * 3


def test_log_probabilities_are_those_of_the_raw_logits():
    model, prompt = tiny(), [1, 300, 500]
    generator = Generator(model, 40, Sampling(temperature=0.5, top_k=3))
    steps = list(generator.generate([prompt], 20))
    tokens = torch.tensor([prompt + [token for [[(token, _)]] in steps]])
    logits = model(tokens, torch.arange(tokens.shape[1])[None])[0].log_softmax(-1)
    expected = logits[torch.arange(2, 22), tokens[0, 3:]]
    assert torch.allclose(torch.tensor([logprob for [[(_, logprob)]] in steps]), expected, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_step_is_handed_over_when_the_next_is_launched():
    generator, launched = Generator(tiny("cuda"), 40, GREEDY), []
    decode = generator.decode
    generator.decode = lambda *args: launched.append(1) or decode(*args)
    for count, _ in enumerate(islice(generator.generate([[1, 300]], 20), 5), start=1):
        assert len(launched) == count


@pytest.mark.gpu
def test_attention_on_a_gpu_sees_few_shapes(monkeypatch):
    """For each of them cuDNN makes a plan of 1.8 MiB, which PyTorch keeps for good."""
    shapes, attend = set(), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr("model.F.scaled_dot_product_attention", lambda q, k, *rest, **options: (
        shapes.add((q.shape, k.shape)), attend(q, k, *rest, **options))[1])
    generator = Generator(tiny("cuda"), 600, GREEDY)
    for length in range(1, 500, 7):
        run(generator, [[5] * length], 9)
    prompts, caches = {q[2] for q, _ in shapes} - {1}, {k[2] for _, k in shapes}
    assert caches == {256, 512} and prompts == set(range(16, 513, 16))
    assert len(shapes) == 32 + 2  # prompts, and steps


def completion_of(tokens: list[int], tokenizer: Tokenizer, stops: list[str] = (), limit: int = 99):
    """A completion fed token by token, and what was visible after each."""
    completion, seen = Completion("", [1], tokenizer, limit, list(stops)), []
    for token in tokens:
        completion.add(token, -1.0, 0.0)
        seen.append(completion.visible())
        if completion.finish_reason:
            break
    return completion, seen


def test_streamed_text_never_splits_a_character(tokenizer):
    text = "A naïve café: 火曜日 🦊👩‍🚀!"
    completion, seen = completion_of(tokenizer.encode(text)[1:], tokenizer)
    assert completion.text == seen[-1] == text
    assert all(text.startswith(shown) for shown in seen)


def test_spaces_between_prompt_and_completion_are_kept(tokenizer):
    prompt, more = tokenizer.encode("Once upon"), tokenizer.encode("Once upon a time")
    completion = Completion("", prompt, tokenizer, 9)
    for token in more[len(prompt):]:
        completion.add(token, 0.0, 0.0)
    assert completion.text == " a time"


@pytest.mark.parametrize("seed", range(20))
def test_streamed_text_equals_the_text_decoded_at_once(tokenizer, seed):
    """Random tokens, with a beginning of sequence, which has no text of its own, strewn among them."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(259, tokenizer.vocab_size, (60,), generator=random)
    tokens[torch.rand(60, generator=random) < 0.1] = 1
    completion, _ = completion_of(tokens.tolist(), tokenizer)
    assert completion.text == tokenizer.decode(tokens.tolist())


def test_stop_token_ends_and_does_not_show(tokenizer):
    completion, seen = completion_of([*tokenizer.encode("The end.")[1:], 2, 400], tokenizer)
    assert (completion.text, completion.finish_reason) == ("The end.", "stop") and 2 not in completion.tokens


def test_limit_ends(tokenizer):
    completion, _ = completion_of(tokenizer.encode("one two three four")[1:], tokenizer, limit=2)
    assert completion.finish_reason == "length" and len(completion.tokens) == 2


@pytest.mark.parametrize("stops", [["dog ran"], ["ran away", "dog ran"], ["zzz", "dog"]])
def test_stop_text_across_tokens_is_never_shown(tokenizer, stops):
    tokens = tokenizer.encode("The dog sat. The do not. A dog ran away.")[1:]
    completion, seen = completion_of(tokens, tokenizer, stops)
    whole = "The dog sat. The do not. A dog ran away."
    expected = whole[:min(whole.find(stop) for stop in stops if stop in whole)]
    assert completion.text == seen[-1] == expected and completion.finish_reason == "stop"
    assert all(expected.startswith(shown) for shown in seen)
    assert tokenizer.decode(completion.tokens).startswith(expected)  # the tokens include the stop text


def test_what_might_have_become_a_stop_text_shows_in_the_end(tokenizer):
    completion, seen = completion_of([*tokenizer.encode("A do")[1:], 2], tokenizer, ["dog"])
    assert seen[-2] == "A " and seen[-1] == "A do"


def test_a_batch_prints_each_completion_whole_under_its_heading(tokenizer, capsys):
    words = ["One two.", "Three."]
    batch = [Completion(word, [1], tokenizer, 99, [], f"--- {word}\n") for word in words]
    streams = [[*tokenizer.encode(f" {word}")[1:], 2] for word in words]

    def steps():
        assert capsys.readouterr().out == "--- One two.\n"
        for step in range(max(map(len, streams))):
            for row, stream in zip(batch, streams):
                if step < len(stream) and not row.finish_reason:
                    row.add(stream[step], 0.0, 0.0)
            yield

    show(batch, steps())
    assert capsys.readouterr().out == "One two.\n\n--- Three.\nThree.\n"


def test_streams_from_the_first_token(tokenizer, capsys):
    generator = Generator(tiny(), 40, GREEDY)
    prompt = tokenizer.encode("Once upon a time")
    completion = Completion("Once upon a time", prompt, tokenizer, 20, [], "Once upon a time")
    shown = []
    add = completion.add
    completion.add = lambda *args: shown.append(capsys.readouterr().out) or add(*args)
    show([completion], complete(generator, [completion]))
    assert shown[:3] == ["Once upon a time", ",", " there"]


def test_importing_generate_imports_no_library_ahead_of_its_use():
    late = {"huggingface_hub", "tokenizers", "sentencepiece", "jinja2", "torch._dynamo"}
    code = "import torch, sys; before = set(sys.modules); import generate; print(*(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "checkpoint" in out.split() and not late & set(out.split())

"""scripts/tasks.py, the adapter for lm-evaluation-harness, without the harness: its modules have
stand-ins here."""

import importlib
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from generate import Sampling
from llm import LLM
from helpers import (
    DRAFT,
    GOLDEN,
    RECURRENT,
    ROOT,
    TINY,
    absent,
    ended,
    logits_of,
    make,
    refusal,
    rewrite,
    with_letters,
)
from model import DeltaCache
from scripts import evaluate

OPENINGS = [
    "One day",
    "Tom and Sue went to the park and",
    "A dog",
    "Once upon a time there was a big red ball",
]


def windows(tokens: list[int], prefix: int, max_seq_len: int, context_len: int):
    """Disjoint windows, each behind the last token of the one before."""
    for at in range(0, len(tokens), max_seq_len):
        yield [tokens[at - 1] if at else prefix], tokens[at : at + max_seq_len]


@pytest.fixture
def harness(monkeypatch):
    """scripts.tasks.Harness over what it needs of the harness."""

    def normalize(settings, limit):
        """As lm_eval 0.4.13, which leaves out a temperature that nobody gave."""
        found = dict(max_gen_toks=limit, until=[], do_sample=bool(settings.get("temperature")))
        return found | settings

    manager = SimpleNamespace(all_tasks=["task"])
    modules = {
        "lm_eval.tasks": dict(TaskManager=lambda include_path: manager),
        "lm_eval.api.model": dict(TemplateLM=object),
        "lm_eval.models.utils": dict(normalize_gen_kwargs=normalize),
        "lm_eval.utils": dict(
            get_rolling_token_windows=windows, make_disjoint_window=lambda pair: pair
        ),
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    monkeypatch.delitem(sys.modules, "scripts.tasks", raising=False)
    llm = LLM(str(TINY), device="cpu", quiet=True)
    return importlib.import_module("scripts.tasks").Harness(llm)


def plain_score(llm: LLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By one forward of the whole, in float64."""
    logits = logits_of(llm.model, torch.tensor([*context, *continuation]))[
        len(context) - 1 : -1
    ].double()
    told = torch.tensor(continuation)
    return -F.cross_entropy(logits, told, reduction="sum").item(), logits.argmax(-1).equal(told)


@pytest.fixture
def recurrent(tmp_path) -> LLM:
    """A model with the bundled one's vocabulary and context, whose layers are recurrent and
    attention by turns."""
    shape = RECURRENT | dict(vocab_size=2048, max_position_embeddings=512)
    make(tmp_path, "qwen3_5_text", **shape)
    shutil.copy(TINY / "tokenizer.model", tmp_path)
    return LLM(str(tmp_path), device="cpu", quiet=True)


@pytest.mark.parametrize("batch_tokens", [1, 60, 2048])
@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_a_choice_has_the_log_probability_that_one_forward_gives(
    request, harness, batch_tokens, kind
):
    """Ragged contexts and choices, 1 to 4 of them, in any order; a context of one token; one that
    is cut."""
    if kind == "recurrent":
        harness.llm = request.getfixturevalue("recurrent")
    harness.batch_tokens, encode = batch_tokens, harness.tok_encode
    requests = [
        (None, encode(opening), encode(ending, add_special_tokens=False))
        for i, opening in enumerate(OPENINGS)
        for ending in [" a boy", " ran away from the little dog.", " the", " happy"][i:]
    ]
    greedy = harness.llm("One day", temperature=0, max_new_tokens=5)
    requests += [(None, [1], encode("One day")), (None, [*range(600)], [7, 8, 9])]
    requests = [*requests[::2], *requests[1::2], (None, greedy.prompt_tokens, greedy.tokens)]
    found = harness._loglikelihood_tokens(requests)
    for (_, context, continuation), (total, is_greedy) in zip(requests, found):
        whole = [*context, *continuation][-513:]
        expected, chosen = plain_score(harness.llm, whole[: -len(continuation)], continuation)
        assert total == pytest.approx(expected, abs=1e-3) and is_greedy == chosen
    assert found[-1][1] and not all(is_greedy for _, is_greedy in found)


def test_the_padding_of_shorter_contexts_changes_no_state_of_a_recurrent_model(harness, tmp_path):
    """A context of one token, too, which is read twice."""
    directory = shutil.copytree(GOLDEN / "qwen3.5", tmp_path / "model")
    with_letters(directory)
    rewrite(directory / "config.json", eos_token_id=1)
    harness = type(harness)(LLM(str(directory), device="cpu", quiet=True))
    requests = [
        (None, torch.randint(96, (n,)).tolist(), torch.randint(96, (m,)).tolist())
        for n in (110, 1, 40, 9, 70)
        for m in (1, 5)
    ]
    found = harness._loglikelihood_tokens(requests)
    for (_, *request), (total, _) in zip(requests, found):
        assert total == pytest.approx(plain_score(harness.llm, *request)[0], abs=1e-3)


def test_a_context_that_choices_share_is_read_once_and_one_of_one_token_beside_others(harness):
    """Texts of a corpus begin with the same token: they are read in batches by length."""
    shapes, context = [], harness.tok_encode(OPENINGS[3])
    harness.llm.model.register_forward_pre_hook(
        lambda model, given: shapes.append(tuple(given[0].shape))
    )
    harness._loglikelihood_tokens(
        [(None, context, [7, 8]), (None, context, [9]), (None, context, [7, 9])]
    )
    assert shapes == [(1, len(context) - 1), (3, 2)]
    harness.batch_tokens = 60
    harness._loglikelihood_tokens([(None, [1], [7] * n) for n in (5, 50, 7, 9, 11, 60, 8, 6)])
    assert [shape for shape in shapes[2:] if shape[1] > 1] == [(1, 60), (1, 50), (5, 11), (1, 5)]


def test_a_batch_has_fewer_rows_where_each_has_a_large_state(harness, monkeypatch):
    """Of 25 MiB, on a device that may hold 60 tokens of 512 KiB: then two rows are too many."""
    monkeypatch.setattr(DeltaCache, "bytes_per_row", lambda config, dtype: 50 * 2**19)
    small, rows = type(harness)(harness.llm), []
    small.batch_tokens = 60
    harness.llm.model.register_forward_pre_hook(lambda model, given: rows.append(len(given[0])))
    small._loglikelihood_tokens([(None, [1, 5, 7], [n]) for n in (7, 8, 9)])
    assert rows == [1, 3]  # one context, whose choices stay together
    small._loglikelihood_tokens([(None, [1, 5, n], [7]) for n in (7, 8, 9)])
    asked = [SimpleNamespace(args=(opening, dict(max_gen_toks=2))) for opening in OPENINGS]
    small.generate_until(asked)
    assert rows[2:] == [1] * 14


def test_a_rolling_log_probability_is_the_sum_of_its_windows(harness):
    texts = ["One day Tom ran. " * 90, "A dog"]
    found = harness.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts])
    for text, total in zip(texts, found):
        parts = windows(harness.tok_encode(text), 1, 512, 1)
        assert total == pytest.approx(
            sum(plain_score(harness.llm, *part)[0] for part in parts), abs=2e-3
        )


@pytest.mark.parametrize("draft", [None, str(DRAFT)])
def test_generated_texts_are_those_of_each_prompt_alone(harness, draft):
    """But for a space: the harness decodes without the prompt."""
    harness.llm = llm = LLM(
        str(TINY), device="cpu", quiet=True, draft=draft, draft_tokens=draft and 3
    )
    kinds = [dict(max_gen_toks=9), dict(max_gen_toks=30, until=["was", "."]), dict(max_gen_toks=12)]
    asked = [(opening, kind) for kind in kinds for opening in OPENINGS]
    alone = [
        llm(opening, temperature=0, max_new_tokens=kind["max_gen_toks"], stop=kind.get("until"))
        for opening, kind in asked
    ]
    requests = [SimpleNamespace(args=args) for args in asked]
    harness.generate_until(requests)
    harness._loglikelihood_tokens([(None, [1, 5], [7])])  # which takes the cache
    found = harness.generate_until(requests)
    assert [text.lstrip() for text in found] == [completion.text.lstrip() for completion in alone]
    assert sum(map(bool, found)) > 9


@pytest.mark.parametrize("n", [0, 513, 600])
def test_a_continuation_that_is_empty_or_too_long_is_refused(harness, n):
    """As lm_eval's HFLM, whose assertions want 1 token to 512, the model's context. One of 512
    leaves room for one token before it."""
    context, whole = harness.tok_encode(OPENINGS[0]), [7] * 512
    said = refusal(harness._loglikelihood_tokens, [(None, context, [7]), (None, context, [7] * n)])
    assert absent(f"{n} tokens 1 to 512", said) == []
    assert "7 tokens behind 0" in refusal(harness._loglikelihood_tokens, [(None, [], [7] * 7)])
    [(total, _)] = harness._loglikelihood_tokens([(None, context, whole)])
    expected = plain_score(harness.llm, context[-1:], whole)[0]
    assert total == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(max_gen_toks=512), "max_gen_toks=512: 1 to 511 512"),
        (dict(max_gen_toks=10**6), "max_gen_toks=1000000: 1 to 511"),
        (dict(max_gen_toks=0), "max_gen_toks=0: 1 to 511"),
        (dict(max_gen_toks=-1), "max_gen_toks=-1: 1 to 511"),
        (dict(num_beams=4, max_gen_toks=9), "num_beams=4"),
        (dict(top_p=7.0, max_gen_toks=9), "top_p=7.0"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_is(harness, given, words):
    """HFLM asserts that max_gen_toks is less than the context."""
    harness.llm._steps = Mock(side_effect=AssertionError)
    asked = [(OPENINGS[0], dict(max_gen_toks=5)), (OPENINGS[1], given)]
    said = refusal(harness.generate_until, [SimpleNamespace(args=args) for args in asked])
    assert absent(words, said) == []


def test_of_a_prompt_the_end_is_kept_and_an_empty_one_begins_a_text(harness):
    """HFLM cuts a prompt from the left, to the context less max_gen_toks."""
    read, steps = [], harness.llm._steps
    harness.llm._steps = lambda done, options: read.extend(done) or steps(done, options)
    text = "One day Tom ran. " * 90
    tokens = harness.tok_encode(text)
    limits = 1, 500, 511
    asked = [SimpleNamespace(args=(text, dict(max_gen_toks=limit))) for limit in limits]
    harness.generate_until(asked)
    assert [each.prompt_tokens for each in read] == [tokens[-(512 - limit) :] for limit in limits]
    harness.tok_encode = lambda text: []
    harness.generate_until([SimpleNamespace(args=("", dict(max_gen_toks=5)))])
    assert read[-1].prompt_tokens == [harness.prefix_token_id]


def test_a_tasks_own_sampling_reaches_the_model(harness):
    """Without do_sample a text is greedy, whatever else is said."""
    told = []
    harness.llm._steps = lambda done, options: told.append(harness.llm._sampling(options)) or ()
    for given in (
        dict(until=["."]),
        dict(do_sample=False, temperature=0.7),
        dict(do_sample=True, temperature=0.7, top_k=9, repetition_penalty=1.3),
    ):
        harness.generate_until([SimpleNamespace(args=(OPENINGS[0], given))])
    # top_p is the checkpoint's.
    assert told == [
        Sampling(0.0, 0, 0.9),
        Sampling(0.0, 0, 0.9),
        Sampling(0.7, 9, 0.9, repetition_penalty=1.3),
    ]


def test_the_file_alone_says_in_one_line_what_to_install():
    done = ended((sys.executable, "scripts/tasks.py"), cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert absent("pip install lm_eval scripts/evaluate.py --tasks", done.stderr) == []


def test_all_ranks_have_rank_0s_results(harness, monkeypatch):
    """The harness gives the others None. What it calls a metric's filter is left out."""
    args = SimpleNamespace(task_path=None, tasks="task", few_shot=None, limit=None)
    values = {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "task"}
    for found, told in (dict(results=dict(task=values)), {"task": {"acc": 0.5}}), (None, {}):
        harness.llm.team = Mock(rank=0, ranks=1, **{"agree.return_value": "rank 0's"})
        simple_evaluate = Mock(return_value=found)
        monkeypatch.setitem(
            sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate)
        )
        assert evaluate.evaluate_tasks({}, harness.llm, args)["tasks"] == "rank 0's"
        harness.llm.team.agree.assert_called_once_with(told)

"""scripts/tasks.py, the adapter for lm-evaluation-harness, without the harness: its modules have
stand-ins here."""

import importlib
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from llm import LLM
from helpers import DRAFT, TINY, logits_of
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
    normalize = lambda settings, limit: (
        dict(max_gen_toks=limit, until=[], temperature=0.0) | settings
    )
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


@pytest.mark.parametrize("batch_tokens", [1, 60, 2048])
def test_a_choice_has_the_log_probability_that_one_forward_gives(harness, batch_tokens):
    """Ragged contexts and choices, 1 to 4 of them, in any order; a context of one token; one that
    is cut."""
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

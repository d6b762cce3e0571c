"""generation_config.json: what is read, what is said, what is refused. Right is what transformers
5.24 makes of a file, where it takes it."""

import shutil
from pathlib import Path

import pytest

from generate import Sampling
from helpers import DRAFT, TINY, absent, open_tokenizer, put, refusal, with_json
from hub.checkpoint import Checkpoint
from hub.generation import INERT, read_sampling
from llm import LLM


@pytest.fixture
def copied(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "tiny")


def with_file(directory: Path, content: dict, **options) -> LLM:
    put(directory / "generation_config.json", content)
    return LLM(str(directory), device="cpu", quiet=True, load=False, **options)


def sampling_of(llm: LLM, **given) -> Sampling:
    return llm._sampling(llm._options(given))


USUAL = dict(temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize(
    "content, expected",
    [
        ({}, Sampling()),
        (USUAL, Sampling(0.6, 20, 0.95)),
        (USUAL | dict(do_sample=True, top_k=None), Sampling(0.6, 0, 0.95)),
        (USUAL | dict(do_sample=False), Sampling(0, 20, 0.95)),
        (dict(do_sample=False, repetition_penalty=1.1), Sampling(0, repetition_penalty=1.1)),
        (dict(repetition_penalty=1.05, min_p=0.1), Sampling(min_p=0.1, repetition_penalty=1.05)),
        (
            dict(presence_penalty=1.5, frequency_penalty=-1),
            Sampling(presence_penalty=1.5, frequency_penalty=-1),
        ),
        (dict(temperature=1, top_k=50.0), Sampling(1, 50)),
    ],
)
def test_what_the_file_recommends(copied, content, expected):
    assert sampling_of(with_file(copied, content)) == expected


@pytest.mark.parametrize("content", [dict(do_sample=False), dict(top_p=0.0), dict(temperature=0.0)])
def test_greedy_is_said_in_several_ways(copied, content):
    """As transformers: with do_sample false it takes the likeliest token, and a top_p of 0 leaves
    that one alone."""
    assert sampling_of(with_file(copied, USUAL | content)).greedy


def test_what_is_given_wins_over_do_sample_false(copied):
    llm = with_file(copied, USUAL | dict(do_sample=False), top_k=7)
    assert sampling_of(llm).greedy and sampling_of(llm, top_p=0.5).greedy
    assert sampling_of(llm, temperature=0.9) == Sampling(0.9, 7, 0.95)


@pytest.mark.parametrize(
    "content, said",
    [
        (USUAL, ""),
        (dict(do_sample=False, max_length=20, use_cache=True, chat_format="chatml"), ""),
        ({key: neutral for key, neutral in INERT.items()}, ""),
        (dict(top_k=-1), "taken: top_k=-1 as off"),
        (dict(top_k=0, top_p=0.0), "taken: top_k=0 as off, top_p=0.0 as greedy"),
        (dict(top_k=50.0), "taken: top_k=50.0 as 50"),
        (dict(top_k=-1.0), "taken: top_k=-1.0 as -1, top_k=-1 as off"),
        (
            dict(no_repeat_ngram_size=3, typical_p=0.9, num_beams=4, max_new_tokens=2048),
            "does nothing here: num_beams=4, typical_p=0.9, no_repeat_ngram_size=3, "
            "max_new_tokens=2048",
        ),
        (
            dict(top_p=0.0, stop_strings=["\n"], forced_eos_token_id=0),
            "taken: top_p=0.0 as greedy; does nothing here: forced_eos_token_id=0, "
            "stop_strings=['\\n']",
        ),
    ],
)
def test_what_is_not_taken_as_it_stands_is_said_in_one_line(copied, capsys, content, said):
    with_file(copied, content)
    line = f"{copied / 'generation_config.json'}: {said}\n" if said else ""
    assert capsys.readouterr().err == line


def test_nothing_is_said_of_a_drafts_file(tmp_path, capsys):
    """It decides nothing."""
    shutil.copytree(DRAFT, tmp_path / "draft")
    put(tmp_path / "draft" / "generation_config.json", dict(top_k=-1, num_beams=4))
    LLM(str(TINY), device="cpu", quiet=True, load=False, draft=str(tmp_path / "draft"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "content",
    [
        dict(top_k=-2),
        dict(top_k=50.5),
        dict(top_k="50"),
        dict(top_k=float("nan")),
        dict(top_k=float("inf")),
        dict(top_p=-0.1),
        dict(temperature="warm"),
        dict(repetition_penalty=0),
        dict(repetition_penalty=True),
        dict(presence_penalty=2.5),
        dict(frequency_penalty=-3),
        dict(do_sample="false"),
        dict(do_sample=0),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_the_file_and_the_key(copied, content):
    put(copied / "generation_config.json", content)
    [(key, value)] = content.items()
    said = refusal(read_sampling, Checkpoint(copied))
    assert absent(f"{copied / 'generation_config.json'}: {key}={value!r}: want", said) == []
    assert said == refusal(LLM, str(copied), device="cpu")


BOTH = [1, 106]


@pytest.mark.parametrize(
    "config, content, expected",
    [
        (dict(eos_token_id=BOTH), dict(eos_token_id=7), {7}),
        (dict(eos_token_id=BOTH), None, {*BOTH}),
        (dict(eos_token_id=BOTH, text_config=dict(eos_token_id=5)), None, {*BOTH}),
        (dict(eos_token_id=None, text_config=dict(eos_token_id=5)), None, {5}),
        (dict(eos_token_id=7, text_config=dict(eos_token_id=None)), None, {7}),
        (dict(eos_token_id=7, text_config=dict(eos_token_id=5)), dict(eos_token_id=[0, 9]), {0, 9}),
        # Not so in transformers, which would not stop.
        (dict(eos_token_id=BOTH), dict(temperature=1), {*BOTH}),
        (dict(eos_token_id=BOTH), dict(eos_token_id=None), {*BOTH}),
    ],
)
def test_which_file_and_which_level_names_the_end(tmp_path, config, content, expected):
    """transformers 5.24: from_pretrained(...).generation_config.eos_token_id."""
    if content is not None:
        put(tmp_path / "generation_config.json", content)
    tokenizer = with_json(tmp_path, config, eos_token=None)
    chat = {tokenizer.backend.id(end) for end in ("<|eot_id|>", "<|im_end|>")}
    assert open_tokenizer(tmp_path).stops - chat == expected

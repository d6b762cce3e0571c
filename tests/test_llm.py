"""llm.LLM, the Python API."""

import asyncio
import io
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from llm import LLM
from generate import Engine
from hub import formats
from helpers import (
    DRAFT,
    DFLASH,
    EAGLE,
    TINY,
    python_blocks,
    quantized_layers,
    refusal,
    rewrite,
    tiny,
    with_template,
    write,
)
from test_generate import same_for_all

GREEDY = dict(device="cpu", quiet=True, temperature=0, max_new_tokens=12)
MESSAGES = [dict(role="user", content="Tell me a story")]


@pytest.fixture(scope="module")
def llm(chatty) -> LLM:
    return LLM(chatty, **GREEDY)


def tokens_of(completions) -> list[list[int]]:
    return [c.tokens for c in (completions if isinstance(completions, list) else [completions])]


def test_the_readmes_example_runs_and_nothing_else_compiles_again(tmp_path, capsys, monkeypatch):
    """With the smaller of the bundled models, whose layers look back 20 tokens here."""
    [example] = [
        block for block in python_blocks() if "from llm import LLM" in block and "stream" in block
    ]
    assert "compile=True" in example and "max_batch_size=4" in example
    directory, names = str(with_template(tmp_path / "draft", DRAFT)), {}
    rewrite(tmp_path / "draft" / "config.json", model_type="mistral", sliding_window=20)
    exec(example.replace("HuggingFaceTB/SmolLM2-135M-Instruct", directory), names)
    out, eager = capsys.readouterr().out, LLM(directory, **GREEDY | dict(max_new_tokens=9))
    assert eager.model.config.layers[0].window == 20
    assert (
        out.startswith(eager("The capital of France is", max_new_tokens=20).text)
        and out.count("[") == 4
    )
    compiled, graphs = partial(names["llm"], max_new_tokens=9), counters["stats"]["unique_graphs"]
    one, many = (
        "One day, a fox",
        ["One day", "Tom and Sue went to the park", "A", "Once upon a time there was a dog"],
    )
    for prompts, options in [
        (one, {}),
        (many, {}),
        (many[:3], {}),
        (many[:2], dict(num_samples=2)),
        (MESSAGES, {}),
        ("word " * 300, {}),
        (one, dict(num_samples=3)),
        (one, dict(max_new_tokens=1)),
    ]:
        expected, found = eager(prompts, **options), compiled(prompts, temperature=0, **options)
        assert tokens_of(found) == tokens_of(expected), prompts
    assert counters["stats"]["unique_graphs"] == graphs
    same_for_all(
        Engine(tiny(directory=tmp_path / "draft"), 400, 4), names["llm"].engine, monkeypatch
    )


def test_texts_and_messages_alone_in_a_batch_and_in_samples(llm):
    """A list comes in the order of the prompts."""
    text, chat = llm("One day"), llm(MESSAGES)
    assert text.prompt_tokens == llm.tokenizer.encode_text("One day")
    assert chat.prompt_tokens == llm.tokenizer.encode_chat(MESSAGES)
    batch = llm(["One day", MESSAGES], num_samples=2)
    assert tokens_of(batch) == [text.tokens, text.tokens, chat.tokens, chat.tokens]
    assert tokens_of(llm("One day", num_samples=3)) == [text.tokens] * 3 and isinstance(
        llm(["One day"]), list
    )


def test_tools_reach_the_template_of_each_kind_of_call(tmp_path):
    directory = with_template(tmp_path / "tiny")
    template = "{{ tools[0].name if tools }}:{{ messages[0].content }}"
    (directory / "chat_template.jinja").write_text(template)
    llm, tools = LLM(str(directory), **GREEDY), [dict(name="find")]
    expected = [llm.tokenizer.encode(text) for text in ("find:Tell me a story", "None:so")]
    assert llm(MESSAGES, tools=tools).prompt_tokens == expected[0]
    assert llm([MESSAGES] * 2, tools=tools)[1].prompt_tokens == expected[0]
    text = llm(MESSAGES, tools=tools).text
    assert "".join(llm.stream(MESSAGES, tools=tools)) == text
    assert llm([dict(role="user", content="so")]).prompt_tokens != expected[0]
    for options in (dict(tools=tools), dict(template_options=dict(tools=tools))):
        assert LLM(str(directory), **GREEDY, **options)(MESSAGES).text == text


def test_another_call_ends_a_stream_which_says_so(llm):
    """Nothing is left behind, and one that was read to its end is none that was ended."""
    expected = llm("One day").text
    stream = llm.stream("Tom and Sue", max_new_tokens=50)
    next(stream)
    other = llm.stream("One day")
    begin = next(other)
    assert "another call ended this stream" in refusal(list, stream)
    assert begin + "".join(other) == expected
    whole = llm.stream("One day")
    text = ""
    while text != expected:
        text += next(whole)
    unread = llm.stream("Tom and Sue")
    assert llm("One day").text == expected and list(whole) == []
    assert "another call ended this stream" in refusal(list, unread)


@pytest.mark.parametrize("prompts", [["One day", "Tom and Sue"], ("One day",), [MESSAGES]])
def test_a_stream_is_of_one_sample_of_one_prompt(llm, prompts):
    assert "a stream is of one prompt, a text or a chat's messages" in refusal(llm.stream, prompts)
    assert "num_samples=2: a stream is of one sample" in refusal(
        llm.stream, "One day", num_samples=2
    )


def test_one_call_runs_at_a_time_and_other_threads_wait(llm):
    """A stream is waited for while it makes a step, and no longer: one that nobody reads stops
    nobody."""
    prompts = ["One day", "Tom and Sue went to the park", "A", "Once upon a time there was a dog"]
    options = dict(max_new_tokens=40)
    expected = tokens_of([llm(prompt, **options) for prompt in prompts])
    unread = llm.stream("Sue", **options)
    next(unread)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(llm, **options), prompts * 3))
    assert tokens_of(found) == expected * 3
    assert "another call ended this stream" in refusal(list, unread)


def test_a_call_waits_for_a_streams_step_and_then_ends_it(llm, monkeypatch):
    expected, stream = llm("One day").text, llm.stream("Tom and Sue", max_new_tokens=50)
    next(stream)
    in_step, step = threading.Event(), llm.engine.step

    def slow_step():
        if not in_step.is_set():
            in_step.set()
            time.sleep(0.3)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    with ThreadPoolExecutor(1) as pool:
        piece = pool.submit(next, stream)
        assert in_step.wait(60) and not piece.done()
        assert llm("One day").text == expected and piece.result()
    assert "another call ended this stream" in refusal(list, stream)


def test_a_completion_shows_what_it_holds(llm):
    shown = repr(llm("One day", max_new_tokens=2))
    assert shown.startswith("Completion(prompt='One day', prompt_tokens=[1, 366, 317], limit=2, ")
    assert "tokens=[2015, 261], text=', a'" in shown and "finish_reason='length'" in shown
    for empty in ("=[]", "=''", "=None", "=()", "thoughts", "tokenizer"):
        assert empty not in shown


def test_options_of_the_constructor_hold_for_all_calls_and_a_calls_for_it_alone(chatty):
    llm = LLM(chatty, **GREEDY, stop=["was"])
    assert "was" in llm("Once upon a time", stop=[], max_new_tokens=30).text
    assert "was" not in llm("Once upon a time").text


@pytest.mark.parametrize(
    "prompts, options, said",
    [
        ("One day", dict(temprature=0), "temprature: no such option, did you mean temperature?"),
        ("One day", dict(compil=True), "compil: no such option, did you mean compile?"),
        ("One day", dict(temperature=200), "temperature=200: want float from 0 to 100"),
        ("One day", dict(top_k=True), "top_k=True: want int"),
        ("One day", dict(stop=[""]), "an empty text"),
        ("One day", dict(quantize="int4"), "quantize: an option of LLM(...), not of a call"),
        (MESSAGES, dict(tools=dict(name="find")), "tools={'name': 'find'}: want a list of JSON"),
        (MESSAGES, dict(tools=[len]), "tools=[<built-in function len>]: want a list of JSON"),
        (MESSAGES, dict(tools=[dict(of={1})]), "tools: "),
        (MESSAGES, dict(tools=[dict(name="find")]), "the chat template: it reads no tools"),
        ("One day", dict(tools=[dict(name="find")]), "tools go with messages"),
        ("One day", dict(max_new_tokens=600), "600 new ones exceed 512"),
        ([], {}, "no prompt"),
        ([[]], {}, "[]: want a text, or messages"),
        ([7], {}, "int is no text"),
        ([dict(role="user")], {}, "want a role and a content"),
        ([dict(role=None, content="a")], {}, "want a role and a content"),
        ([dict(role="user", content=None, tool_calls=[])], {}, "a text or text parts"),
        ([dict(role="user", content=7)], {}, "message {'role': 'user', 'content': 7}: want"),
        ([dict(role="user", content=["a"])], {}, "a text or text parts"),
        ([dict(role="user", content=[dict(type="image", url="a")])], {}, "a text or text parts"),
        ([dict(role="user", content=[dict(type="text", text=1)])], {}, "a text or text parts"),
        (torch.zeros(3, 3), {}, "want"),
        ([["a"]], {}, "want"),
    ],
)
def test_a_mistake_in_a_call_is_a_value_error_that_names_it(llm, prompts, options, said):
    assert said in refusal(llm, prompts, **options)
    refusal(llm.stream, prompts, **options)
    assert llm("One day").tokens  # nothing is broken


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(max_batch_size=0), "max_batch_size=0"),
        (dict(compil=True), "compil: no such option, did you mean compile?"),
        (dict(group_size=32), "group_size=32 goes with quantize"),
        (dict(kv_cache="int4"), "kv_cache"),
        (dict(quantize="int4", group_size=7), "7"),
        (dict(draft="/nowhere"), "/nowhere"),
        (dict(draft=5), "draft=5: want a checkpoint, mtp or prompt-lookup"),
        (dict(compile="no"), "compile='no': want true or false"),
        *[(dict(stop=stop), "stop=") for stop in (b"a", [b"a"])],
        (dict(device="cuda:²"), "cuda:²"),
    ],
)
def test_a_mistake_in_the_constructor_is_a_value_error_that_names_it(options, said):
    assert said in refusal(LLM, str(TINY), **dict(device="cpu") | options)


def test_a_cache_in_int8_is_made_for_the_draft_too():
    llm = LLM(str(TINY), kv_cache="int8", draft=str(DRAFT), device="cpu", quiet=True)
    llm("One day", max_new_tokens=4)
    for model in llm.model, llm.draft_model:
        assert model.layers[0].attn.cache.k.dtype == torch.int8


def test_what_exceeds_a_limit_that_was_given_is_a_value_error(chatty):
    llm = LLM(chatty, **GREEDY, max_batch_size=2, max_seq_length=40)
    assert re.search("3 rows .* exceed max_batch_size=2", refusal(llm, ["One day", "Tom", "Sue"]))
    assert "new ones exceed 40, max_seq_length" in refusal(llm, "word " * 40)
    assert len(llm(["One day", "Tom"])) == 2


def test_a_limit_that_was_not_given_grows(chatty, llm):
    small = LLM(chatty, **GREEDY)
    for prompts in "One day", ["One day", "word " * 40, "Tom"], "One day":
        assert tokens_of(small(prompts)) == tokens_of(llm(prompts))


@pytest.mark.parametrize("draft", [str(DRAFT), str(EAGLE), str(DFLASH), "prompt-lookup"])
def test_a_draft_changes_no_greedy_text_in_batches_of_any_size_nor_after_other_samplings(
    chatty, llm, draft
):
    """Which a seed repeats."""
    speculative = LLM(chatty, **GREEDY, draft=draft, draft_tokens=3, max_batch_size=4)
    for prompts in (["One day", "Tom"], ["Tom"], ["Sue", "A dog", "One day", "Tom"], ["One day"]):
        assert tokens_of(speculative(prompts)) == tokens_of(llm(prompts))
        first, again, other = (
            tokens_of(speculative(prompts, temperature=0.9, seed=seed)) for seed in (1, 1, 2)
        )
        assert first == again != other
    assert speculative.speculator.counts["drafted"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [None, "prompt-lookup", str(DRAFT), str(EAGLE)])
@pytest.mark.parametrize("no_kernels", [False, True])
def test_on_a_gpu_calls_of_any_size_and_sampling_give_what_eager_code_gives(
    chatty, draft, no_kernels
):
    """Four rows after one: it loads and compiles again.

    With kernels in bf16: they serve 16-bit types alone, where rounding decides about greedy text.
    Then the number of tokens counts."""
    load = partial(LLM, chatty, **GREEDY | dict(device="cuda"))
    eager = load(dtype="fp32")
    fast = load(
        dtype="fp32" if no_kernels else "bf16",
        compile=True,
        no_kernels=no_kernels,
        draft=draft,
        draft_tokens=2 if draft else None,
    )
    for prompts in (["Tom"], ["Sue", "A dog", "One day", "Tom"], ["One day", "Tom"], ["One day"]):
        found, expected = tokens_of(fast(prompts)), tokens_of(eager(prompts))
        assert found == expected if no_kernels else [*map(len, found)] == [*map(len, expected)]
        assert tokens_of(fast(prompts, temperature=0.9, seed=1)) == tokens_of(
            fast(prompts, temperature=0.9, seed=1)
        )
    assert fast.engine.batch_size == 4


def test_eager_code_unpacks_quantized_weights_once(chatty, tmp_path, monkeypatch, capsys):
    write(Path(chatty), tmp_path / "int4", bits=4, group_size=32, sym=False)
    load = partial(LLM, str(tmp_path / "int4"), **GREEDY | dict(quiet=False))
    unpacked = load()
    text = unpacked("One day").text
    assert (
        not quantized_layers(unpacked.model)
        and "unpacked once, to 14 MB" in capsys.readouterr().err
    )
    monkeypatch.setattr("hub.formats.free_memory", lambda *_: 2**20)
    packed = load()
    assert packed("One day").text == text and quantized_layers(packed.model)
    assert "at every step, for lack of memory" in capsys.readouterr().err


def test_a_draft_whose_loading_was_interrupted_is_loaded(chatty, monkeypatch):
    llm, load, loaded = LLM(chatty, load=False, draft=str(DRAFT), **GREEDY), formats.load, []

    def interrupt(checkpoint, **how):
        if loaded:
            raise KeyboardInterrupt
        loaded.append(checkpoint)
        return load(checkpoint, **how)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(formats, "load", interrupt)
        llm("One day")
    assert llm("One day").text == LLM(chatty, **GREEDY)("One day").text
    assert llm.speculator


def test_a_call_that_is_refused_ends_no_stream(chatty):
    llm = LLM(chatty, max_batch_size=1, **GREEDY)
    stream = llm.stream("Tom and Sue")
    first = next(stream)
    with pytest.raises(ValueError, match="max_batch_size"):
        llm(["a", "b"])
    assert first + "".join(stream) == llm("Tom and Sue").text


def test_an_interrupted_compilation_is_repeated(chatty, monkeypatch):
    """With kernels in it, a model cannot be given kernels again: it is loaded anew."""
    llm, begun = LLM(chatty, **GREEDY, compile=True), []

    def interrupt(self, *_):
        begun.append(self.model)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LLM, "_make_engine", interrupt)
        llm("One day")
    assert llm("One day").text == LLM(chatty, **GREEDY)("One day").text
    assert begun[0] is not llm.model


def test_it_works_where_a_notebook_runs_it(chatty, llm):
    """In a running event loop, with streams that are no files. The pieces of a stream are the text
    before a stop."""
    prompt, stop = "Once upon a time", ["was a little"]

    async def cell() -> list[str]:
        return [*LLM(chatty, **GREEDY | dict(quiet=False)).stream(prompt, stop=stop)]

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pieces = asyncio.run(cell())
    assert len(pieces) > 1 and "".join(pieces) == llm(prompt, stop=stop).text

"""The chat: turns, commands, Ctrl-C, a context that fills, and a session on a terminal."""

import builtins
import json
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from argparse import Namespace
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from cli.chat import Chat, dim
from helpers import (
    GOLDEN,
    ROOT,
    TINY,
    of_each_family,
    program,
    rewrite,
    with_letters,
    with_template,
)
from generate import Sampling
from hub.checkpoint import Checkpoint
from hub.tokenizer import Tokenizer
from llm import LLM, Completion


class Session:
    """A chat with these lines typed, "^C" for Ctrl-C; what it printed, and the width of each
    prefill. messages: those that it begins with."""

    def __init__(
        self,
        monkeypatch,
        capsys,
        chatty: str,
        *lines: str,
        directory: Path | None = None,
        length: int = 300,
        on_prefill=lambda count: None,
        draft: str | None = None,
        messages: list[dict] | None = None,
        terminal: bool = False,
        **options,
    ):
        llm = LLM(
            str(directory or chatty),
            device="cpu",
            max_batch_size=1,
            max_seq_length=length,
            temperature=0,
            quiet=True,
            draft=draft,
            draft_tokens=draft and 4,
        )
        typed = Mock(
            side_effect=[*(KeyboardInterrupt if line == "^C" else line for line in lines), EOFError]
        )
        self.widths, prefill = [], llm.engine.prefill

        def watch(prompts, *rest):
            self.widths.append(len(prompts[0]))
            on_prefill(len(self.widths))
            return prefill(prompts, *rest)

        llm.engine.prefill = watch
        monkeypatch.setattr(builtins, "input", typed)
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr("cli.chat.read_waiting", lambda: b"")
        monkeypatch.setattr(Chat, "without_echo", nullcontext)
        options = (
            dict(max_new_tokens=12, stop=[], system=None, quiet=False, show_thinking=False)
            | options
        )
        self.chat = Chat(llm, Namespace(**options))
        self.chat.messages += messages or []
        self.answers = self.chat.run()
        self.left = [*lines[typed.call_count :]]  # what nobody read
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def session(monkeypatch, capsys, chatty):
    return partial(Session, monkeypatch, capsys, chatty)


def asked(messages: list[dict]) -> list[str]:
    """What the user said, where no system message begins."""
    return [message["content"] for message in messages[::2]]


@pytest.mark.parametrize("draft", [None, "prompt-lookup", "itself"])
@of_each_family
def test_a_kept_cache_gives_what_a_fresh_one_gives_and_only_what_is_new_is_read(
    session, monkeypatch, tmp_path, family, draft
):
    """A window is full, and LongRoPE's original length exceeded, in the second turn."""
    directory = with_template(tmp_path / family, GOLDEN / family)
    with_letters(directory)
    # The 11th token ends a step that kept its 4 drafts: the draft has not read the last of them.
    options = dict(
        directory=directory,
        length=100,
        max_new_tokens=11,
        draft=str(directory) if draft == "itself" else draft,
    )
    kept = session("Hi", "And?", **options)
    monkeypatch.setattr(os.path, "commonprefix", lambda lists: [])
    fresh = session("Hi", "And?", **options)
    assert [answer.tokens for answer in kept.answers] == [answer.tokens for answer in fresh.answers]
    assert (
        fresh.widths[1] - kept.widths[1] == kept.widths[0] + 10
    )  # the last of 11 tokens may not have been read
    if draft == "itself":
        counts = kept.chat.llm.speculator.counts
        assert counts["accepted"] == counts["drafted"] > 0


# What is typed, and after how many tokens the answer is interrupted.
TURNS = [
    ("Hi", None),
    ("And?", 20),
    ("/again", 26),
    ("Then?", None),
    ("/again", None),
    ("Well?", 0),
    ("So?", 5),
    ("Is it?", 31),
    ("/again", 3),
    ("It is", None),
    ("And then?", None),
    ("/reset", None),
    ("Hi", 7),
    ("Why?", 9),
]


@pytest.mark.parametrize("draft", [None, "prompt-lookup", "itself"])
def test_a_recurrent_chat_goes_on_from_the_cache_or_begins_anew(
    session, monkeypatch, tmp_path, draft
):
    """It goes on where its layers can go back so far. Where they cannot, or where the oldest turns
    are dropped, it reads all again."""
    directory = with_template(tmp_path / "recurrent", GOLDEN / "qwen3.5")
    with_letters(directory)
    rewrite(directory / "config.json", max_position_embeddings=1024)
    answered = [stop for line, stop in TURNS if line != "/reset"]
    add, complete, starts, number = Completion.add, LLM.complete, [], {}

    def interrupt_later(completion, *token):
        add(completion, *token)
        stop = answered[number[id(completion)]]
        if stop and len(completion.tokens) == stop:
            signal.raise_signal(signal.SIGINT)

    def interrupt_at_once(count: int) -> None:
        if answered[count - 1] == 0:
            signal.raise_signal(signal.SIGINT)

    def watch(llm, completions, *how, start):
        number[id(completions[0])] = len(starts)
        starts.append(start)
        return complete(llm, completions, *how, start=start)

    monkeypatch.setattr(Completion, "add", interrupt_later)
    monkeypatch.setattr(LLM, "complete", watch)
    talk = partial(
        session,
        *(line for line, _ in TURNS),
        directory=directory,
        length=340,
        max_new_tokens=58,
        draft=str(directory) if draft == "itself" else draft,
        on_prefill=interrupt_at_once,
    )
    kept = talk()
    kept_starts, starts[:] = [*starts], []
    monkeypatch.setattr(os.path, "commonprefix", lambda lists: [])
    fresh = talk()
    assert [answer.tokens for answer in kept.answers] == [answer.tokens for answer in fresh.answers]
    assert not any(starts) and "oldest turns are dropped" in kept.err
    # The first; again after a long answer, if the draft cannot go back to the prompt's end; after
    # one that had not begun; as the oldest turns are dropped; after /reset.
    again = [4] if draft == "itself" else []
    assert [n for n, start in enumerate(kept_starts) if start == 0] == [0, *again, 6, 10, 11]
    if draft == "itself":
        counts = kept.chat.llm.speculator.counts
        assert counts["accepted"] == counts["drafted"] > 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(session):
    def interrupt_first(count: int) -> None:
        if count == 1:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    ended = session("Hello", "Hello again", on_prefill=interrupt_first)
    assert [len(answer.tokens) for answer in ended.answers] == [12]
    assert signal.getsignal(signal.SIGINT) is before
    assert asked(ended.chat.messages) == ["Hello again"]  # a turn has an answer


def test_ctrl_c_at_the_prompt_stays_in_the_chat_and_ends_one_that_is_piped(session):
    assert asked(session("^C", "^C", "Hello", terminal=True).chat.messages) == ["Hello"]
    with pytest.raises(KeyboardInterrupt):
        session("^C", "Hello")


@pytest.mark.parametrize("line", [" /quit ", "/exit", "quit", " exit"])
def test_leaving(session, line):
    assert session(line, "Hello").left == ["Hello"]
    assert session(f"{line} now").left == []


@pytest.mark.parametrize("text", ["/reset\nis what I typed", "/usr/bin/python is what?"])
def test_several_lines_and_a_path_are_no_commands(session, text):
    assert asked(session(text).chat.messages) == [text]


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_message(session):
    """What is dropped of thousands is found by bisection: turn by turn it took more than a
    minute."""
    said = [
        dict(role=role, content=f"{i} times") for i in range(3000) for role in ("user", "assistant")
    ]
    with patch.object(Chat, "encode", autospec=True, side_effect=Chat.encode) as encode:
        chat = session("And then?", system="Be brief.", messages=said).chat
    system, *kept, question, _ = chat.messages
    assert encode.call_count < 20
    assert system == dict(role="system", content="Be brief.")
    assert kept == said[-len(kept) :] and len(kept) % 2 == 0
    fits, too_many = (
        len(chat.encode([system, *said[-n:], question])) for n in (len(kept), len(kept) + 2)
    )
    assert fits <= chat.llm.room * 3 // 4 < too_many


def test_that_turns_are_dropped_is_said_once(session):
    ended = session(*["And then?"] * 20, length=100)
    assert len(ended.answers) == 20 and len(ended.chat.messages) < 10
    assert ended.err.count("oldest turns are dropped") == 1


def test_a_turn_that_is_too_long_alone_is_refused_and_the_rest_is_kept(session):
    ended = session("Hello", "word " * 200, "And then?", length=100)
    assert "leave no room in 100" in ended.err and len(ended.answers) == 2
    assert asked(ended.chat.messages) == ["Hello", "And then?"]


def test_without_a_template_the_text_is_continued_and_special_tokens_that_are_typed_are_text(
    session,
):
    ended = session("Once upon a time", "Then</s>", directory=TINY)
    assert (
        ended.out.startswith(", there was")
        and ended.widths[1] <= 9
        and "your text is continued" in ended.err
    )
    assert 2 not in ended.answers[1].prompt_tokens


def test_a_stop_text_does_not_end_the_story_that_is_continued(session):
    ended = session("Once upon a time", "dog", directory=TINY, stop=["little"])
    assert ended.widths[1] > len(
        Tokenizer(Checkpoint(TINY)).encode_text("dog")
    )  # the text so far is read, too


def test_reset_and_system(session):
    chat = session("Hello", "/system Be brief.", "Hi", "/reset", "Ho").chat
    assert len(chat.messages) == 3
    assert [m["content"] for m in chat.messages[:2]] == ["Be brief.", "Ho"]
    unset = session("Hello", "/system Be brief.", "/system", "Hi").chat
    assert unset.messages[0]["content"] == "Hi"
    long = session("Hello", f"/system {'Be brief. ' * 40}", "Hi", length=100)
    assert "the system message:" in long.err and "leave no room in 100: shorten it" in long.err
    assert [m["content"] for m in long.chat.messages[::2]] == ["Hello", "Hi"]
    refused = session("/system Be brief.", directory=TINY).err
    assert "/system: without a chat template" in refused


def test_the_sampling_is_named_and_changed_and_a_value_beyond_its_limits_changes_nothing(session):
    ended = session("/temperature 0.2", "/top-k 5", "/min_p 2", "/temperature warm", "/temperature")
    assert ended.err.splitlines()[1:] == [
        "Sampling: temperature 0, top_p 0.9 (greedy).",  # top_p: generation_config.json's
        "Sampling: temperature 0.2, top_p 0.9.",
        "Sampling: temperature 0.2, top_k 5, top_p 0.9.",
        "min_p=2: want float from 0 to 1",
        "temperature='warm': want float from 0 to 100",
        "Sampling: temperature 0.2, top_k 5, top_p 0.9.",
    ]
    assert ended.chat.llm.engine.sampling == Sampling(temperature=0.2, top_k=5, top_p=0.9)


@pytest.mark.parametrize("draft", [None, "prompt-lookup"])
def test_again_draws_another_answer_to_the_same_turn(session, draft):
    ended = session(
        "Hello", "And then?", "/temperature 20", "/again", "/temperature 0", "/again", draft=draft
    )
    first, asked_then, drawn, greedy = ended.answers
    assert asked_then.prompt_tokens == drawn.prompt_tokens == greedy.prompt_tokens
    assert asked_then.tokens == greedy.tokens != drawn.tokens
    assert [message["content"] for message in ended.chat.messages] == [
        "Hello",
        first.text,
        "And then?",
        greedy.text,
    ]


def test_again_wants_an_answer(session):
    for lines in [], ["Hello", "/reset"], ["Hello", "/system Be brief."]:
        assert "/again: there is no answer yet" in session(*lines, "/again").err


@pytest.mark.parametrize(
    "line, said",
    [
        ("/frobnicate", "/frobnicate: no such command; /help"),
        ("/temperatur 1", "/temperatur: no such command; did you mean /temperature? /help"),
        ("/temp 1", "/temp: no such command; did you mean /temperature? /help"),
        ("/save chat.json", "/save: no such command"),
        ("  /help  ", "/reset  "),
        ("/seed 3", "/seed: no such command"),
    ],
)
def test_what_a_command_says_that_changes_nothing(session, line, said):
    ended = session("Hello", line)
    assert said in ended.err and asked(ended.chat.messages) == ["Hello"]


def test_nothing_is_dim_where_the_user_wants_no_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert dim("3 tokens") == "\x1b[2m3 tokens\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dim("3 tokens") == "3 tokens"


class Terminal:
    """generate.py on a pseudo terminal."""

    def __init__(self, directory: str, new_tokens: int, kind: str):
        options = (
            f"--checkpoint {directory} --interactive --device cpu --temperature 0 "
            f"--max-new-tokens {new_tokens}"
        )
        environment = os.environ | dict(TERM=kind, OMP_NUM_THREADS="1")
        self.process, self.master = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            command = [sys.executable, "-c", program("watched_chat.py"), *options.split()]
            os.execve(sys.executable, command, environment)
        self.screen, self.seen = "", 0

    def type(self, text: str, want: str = "") -> None:
        """Types the text, then waits for what matches `want`."""
        os.write(self.master, text.encode())
        self.read(want)

    def read(self, want: str) -> None:
        """Waits for a text that matches `want`, behind what the last call waited for, a minute at a
        time."""
        while not (found := re.search(want, self.screen[self.seen :])):
            assert select.select([self.master], [], [], 60)[0], self.screen[self.seen :]
            self.screen += os.read(self.master, 65536).decode(errors="replace")
        self.seen += found.end()

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.master)[3] & termios.ECHO)

    def left(self) -> list[str]:
        """Leaves with Ctrl-D. What each turn was."""
        os.write(self.master, b"\x04")
        with suppress(OSError):  # the last writer has closed it
            self.read("(?!)")
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        assert code == 0 and "Traceback" not in self.screen and self.echoes()
        return json.loads(self.screen.partition("turns:")[2])


@pytest.fixture
def terminal(request, chatty):
    """It has begun to answer "Hello fox". Closing it ends what runs there."""
    new_tokens, kind = request.param
    screen = Terminal(chatty, new_tokens, kind)
    screen.read("> ")
    screen.type("Hello fox\r", r"fox\r\n(?s:.*)\w+ \w+ ")
    yield screen
    os.close(screen.master)


@pytest.mark.parametrize("terminal", [(400, "xterm")], indirect=True)
def test_a_session_on_a_terminal(terminal):
    """Typing, pasting, Ctrl-C in an answer and at the prompt, leaving."""
    terminal.type("\x03", r"tokens/s\S*\r\n(?s:.*?)> ")
    terminal.type("\x1b[200~one\ntwo\nthree\x1b[201~", "three")
    terminal.type("\r", r"\d+ tokens, [\d.]+ tokens/s\S*\r\n(?s:.*?)> ")
    terminal.type("never mind", "never mind")
    time.sleep(1)  # Python sees Ctrl-C here only while it waits for a key, not yet while it echoes
    terminal.type("\x03", "> ")
    assert terminal.left() == ["Hello fox", "one\ntwo\nthree"]


@pytest.mark.parametrize("terminal", [(400, "xterm")], indirect=True)
def test_a_terminal_whose_chat_is_ended_in_an_answer_echoes_again(terminal):
    assert not terminal.echoes()
    os.kill(terminal.process, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.process, 0)[1]) == 143
    assert terminal.echoes()


@pytest.mark.parametrize("terminal", [(20, "dumb")], indirect=True)
def test_lines_that_are_pasted_at_the_prompt_are_turns_without_control_characters(terminal):
    """Without bracketed paste the first line ends the turn; the others come during its answer, as
    the key sends them."""
    terminal.read("tokens/s(?s:.*)> ")
    terminal.type("one\rtwo\rthree\r", "> two\r\nthree\r\n(?s:.*)tokens/s(?s:.*)> ")
    assert terminal.left() == ["Hello fox", "one", "two\nthree"]


@pytest.mark.parametrize("terminal", [(150, "dumb")], indirect=True)
def test_lines_that_come_during_an_answer_are_one_turn(terminal):
    """A terminal sends what is pasted then as if it were typed. A last line without an end waits
    for the user's. This terminal understands no escape codes, and gets none."""
    terminal.type("one\ntwo\nthree\n", r"> one\r\ntwo\r\nthree\r\n(?s:.*)\w+ \w+ ")
    assert terminal.screen.count("two") == 1  # not in the middle of the answer, too
    terminal.type("four\nfive", "tokens/s(?s:.*)> four(?s:.*)five")
    terminal.type(" and six\r", "tokens/s(?s:.*)> ")
    assert terminal.left() == ["Hello fox", "one\ntwo\nthree", "four\nfive and six"]
    assert "\x1b" not in terminal.screen


@pytest.mark.parametrize("terminal", [(100, "dumb")], indirect=True)
def test_a_long_line_that_comes_during_an_answer_is_whole_and_backspace_and_ctrl_d_work(terminal):
    """A terminal that edits lines keeps 4,095 bytes of one. What is typed before is the first."""
    terminal.type(f"{'fox ' * 1500}a\x15{'fox ' * 1500}the endd\x7f no\x17.\r", r"the end \.")
    terminal.read("leave no room(?s:.*)> ")
    terminal.type("Hi\r", r"Hi\r\n(?s:.*)\w+ \w+ ")
    assert terminal.left() == ["Hello fox", f"{'fox ' * 1500}the end .", "Hi"]

"""The chat: turns, commands, Ctrl-C, a context that fills, and a session on a terminal."""
import builtins
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
import tokenizers as hf

from checkpoint import Checkpoint
from cli.chat import Chat
from generate import LLM
from helpers import GOLDEN, ROOT, TINY, of_each_family, put, read_json, with_template
from tokenizer import Tokenizer


class Session:
    """A chat with these lines typed, "^C" for Ctrl-C; what it printed, and the width of each prefill."""

    def __init__(self, monkeypatch, capsys, directory: str | Path, lines: list[str], length: int = 300,
                 on_prefill=lambda count: None, draft: str | None = None, **options):
        llm = LLM(str(directory), device="cpu", max_batch_size=1, max_seq_length=length, temperature=0, quiet=True,
                  draft=draft, draft_tokens=draft and 4)
        typed, self.widths, prefill = iter(lines), [], llm.engine.prefill

        def type_line(prompt: str = "") -> str:
            line = next(typed, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        def watch(prompts, *rest):
            self.widths.append(len(prompts[0]))
            on_prefill(len(self.widths))
            return prefill(prompts, *rest)

        llm.engine.prefill = watch
        monkeypatch.setattr(builtins, "input", type_line)
        options = dict(max_new_tokens=12, stop=[], system=None, quiet=False, show_thinking=False) | options
        self.chat = Chat(llm, Namespace(**options))
        self.answers = self.chat.run()
        self.left = list(typed)  # what nobody read
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def session(monkeypatch, capsys, chatty):
    def start(*lines: str, directory: str | Path = chatty, **options) -> Session:
        return Session(monkeypatch, capsys, directory, list(lines), **options)
    return start


def roles(messages: list[dict]) -> str:
    return " ".join(message["role"] for message in messages)


def asked(messages: list[dict]) -> list[str]:
    """What the user said, where no system message begins."""
    return [message["content"] for message in messages[::2]]


@pytest.mark.parametrize("draft", [None, "prompt-lookup", "itself"])
@of_each_family
def test_a_kept_cache_gives_what_a_fresh_one_gives_and_only_what_is_new_is_read(session, monkeypatch, tmp_path, family,
                                                                                draft):
    """The tokens are letters, so that any answer is read as it was written. A window is full, and LongRoPE's original
    length exceeded, in the second turn."""
    directory = with_template(tmp_path / family, GOLDEN / family)
    letters = hf.Tokenizer(hf.models.BPE({chr(32 + i): i for i in range(96)}, []))
    letters.decoder = hf.decoders.Fuse()
    letters.save(str(directory / "tokenizer.json"))
    # The 11th token ends a step that kept its 4 drafts: the draft has not read the last of them.
    options = dict(directory=directory, length=100, max_new_tokens=11,
                   draft=str(directory) if draft == "itself" else draft)
    kept = session("Hi", "And?", **options)
    monkeypatch.setattr(os.path, "commonprefix", lambda lists: [])
    fresh = session("Hi", "And?", **options)
    assert [answer.tokens for answer in kept.answers] == [answer.tokens for answer in fresh.answers]
    assert fresh.widths[1] - kept.widths[1] == kept.widths[0] + 10  # the last of 11 tokens may not have been read
    if draft == "itself":
        counts = kept.chat.llm.speculator.counts
        assert counts["accepted"] == counts["drafted"] > 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(session):
    def interrupt_first(count: int) -> None:
        if count == 1:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    ended = session("Hello", "^C", "Hello again", on_prefill=interrupt_first)
    assert [len(answer.tokens) for answer in ended.answers] == [12] and signal.getsignal(signal.SIGINT) is before
    assert asked(ended.chat.messages) == ["Hello again"]  # a turn has an answer


@pytest.mark.parametrize("lines, left", [
    (["^C", "^C", "Hello"], ["Hello"]), (["^C", "Hello", "^C", "bye"], []), (["/quit", "Hello"], ["Hello"]),
    ([" exit ", "Hello"], ["Hello"]), (["exit now"], [])])
def test_leaving(session, lines, left):
    """Ctrl-C leaves when it comes twice at one prompt."""
    assert session(*lines).left == left


@pytest.mark.parametrize("text", ["/reset\nis what I typed", "/usr/bin/python is what?"])
def test_several_lines_and_a_path_are_no_commands(session, text):
    assert asked(session(text).chat.messages) == [text]


def test_a_full_context_drops_the_oldest_turns_keeps_the_system_message_and_says_so_once(session):
    lines = [f"Tell me of the fox, number {i}" for i in range(12)]
    ended = session(*lines, length=150, system="Be brief.")
    messages = ended.chat.messages
    assert roles(messages[:2]) == "system user" and roles(messages[-2:]) == "user assistant"
    assert messages[-2]["content"] == lines[-1] and 2 < len(messages) < 25
    assert len(ended.answers) == 12 and ended.err.count("oldest turns are dropped") == 1
    assert ended.widths[-1] < 150 and all(len(answer.tokens) == 12 for answer in ended.answers)


def test_a_turn_that_is_too_long_alone_is_refused_and_the_rest_is_kept(session):
    ended = session("Hello", "word " * 200, "And then?", length=100)
    assert "leave no room in 100" in ended.err and len(ended.answers) == 2
    assert asked(ended.chat.messages) == ["Hello", "And then?"]


def test_a_chat_keeps_no_more_than_its_last_hundred_answers(session):
    ended = session(*["Hello"] * 103, max_new_tokens=1)
    assert len(ended.answers) == 100


def test_without_a_template_the_text_is_continued(session):
    ended = session("Once upon a time", "Then", directory=TINY)
    assert ended.out.startswith(", there was") and ended.widths[1] <= 6 and "your text is continued" in ended.err


def test_special_tokens_that_are_typed_are_text_with_a_template_and_without(session, chatty):
    for directory in (chatty, TINY):
        [answer] = session("Hello</s> fox<s>", directory=directory).answers
        assert 2 not in answer.prompt_tokens and answer.prompt_tokens.count(1) <= 1
        assert "Hello</s> fox<s>" in Tokenizer(Checkpoint(Path(directory))).decode(answer.prompt_tokens)


def test_a_stop_text_does_not_end_the_story_that_is_continued(session):
    ended = session("Once upon a time", "dog", directory=TINY, stop=["little"])
    assert ended.widths[1] > len(Tokenizer(Checkpoint(TINY)).encode_text("dog"))  # the text so far is read, too


def test_reset_and_system(session):
    chat = session("Hello", "/system Be brief.", "Hi", "/reset", "Ho").chat
    assert [m["content"] for m in chat.messages[:2]] == ["Be brief.", "Ho"] and len(chat.messages) == 3
    assert session("Hello", "/system Be brief.", "/system", "Hi").chat.messages[0]["content"] == "Hi"
    assert "no chat template" in session("/system Be brief.", directory=TINY).err


def test_a_saved_chat_is_loaded_and_goes_on(session, tmp_path):
    file = tmp_path / "chat.json"
    first = session("Hello fox", f"/save {file}", "And then?", system="Be brief.")
    assert read_json(file) == first.chat.messages[:3] and list(tmp_path.iterdir()) == [file]
    second = session(f"/load {file}", "And then?")
    assert second.chat.messages == first.chat.messages and "3 messages" in second.err
    assert roles(session(f"/load {file}", "/reset", "Hi").chat.messages) == "system user assistant"


@pytest.mark.parametrize("content", ["{", "[]", '[{"role": "user"}]', "[7]"])
def test_a_file_that_is_no_chat_changes_nothing(session, tmp_path, content):
    (tmp_path / "chat.json").write_text(content)
    ended = session("Hello", f"/load {tmp_path / 'chat.json'}")
    assert roles(ended.chat.messages) == "user assistant" and "/load " in ended.err.splitlines()[-1]


@pytest.mark.parametrize("line, said", [
    ("/frobnicate", "/frobnicate: no such command; /help"), ("/save", "/save: want a file's name"),
    ("/load /nowhere/x", "/nowhere/x: No such file"), ("/save /nowhere/x", "/save /nowhere/x: No such file"),
    ("/help", "/reset"), (" /help ", "/reset"), ("/reset", "is forgotten"), ("/system Be brief.", "message is set"),
    ("/save .", "/save .: ")])
def test_what_a_command_says(session, line, said):
    ended = session(line)
    assert said in ended.err and not ended.answers


def test_save_keeps_pipes_and_links_and_writes_where_a_link_points(session, tmp_path):
    """As root, /save /dev/null would take the device's place."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    ended = session(f"/save {tmp_path / 'pipe'}", "Hello", f"/save {tmp_path / 'link'}")
    assert f"/save {tmp_path / 'pipe'}: want a file" in ended.err and (tmp_path / "pipe").is_fifo()
    assert read_json(tmp_path / "file") == ended.chat.messages and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_a_chat_of_thousands_of_messages_is_loaded_and_goes_on(session, tmp_path, monkeypatch):
    """What is dropped is found by bisection: turn by turn it took more than a minute."""
    said = [dict(role=role, content=f"{i} times") for i in range(3000) for role in ("user", "assistant")]
    put(tmp_path / "long.json", said)
    encode, calls = Chat.encode, []
    monkeypatch.setattr(Chat, "encode", lambda chat, messages: calls.append(0) or encode(chat, messages))
    chat = session(f"/load {tmp_path}/long.json", "And then?").chat
    kept, question = chat.messages[:-2], chat.messages[-2]
    assert len(calls) < 20 and kept == said[-len(kept):] and kept[0]["role"] == "user"
    fits, too_many = (len(encode(chat, [*said[-n:], question])) for n in (len(kept), len(kept) + 2))
    assert fits <= chat.llm.room * 3 // 4 < too_many


class Terminal:
    """generate.py on a pseudo terminal."""

    def __init__(self, directory: str, new_tokens: int):
        self.master, slave = pty.openpty()
        line = f"generate.py --checkpoint {directory} --interactive --device cpu --temperature 0 " \
               f"--max-new-tokens {new_tokens}"
        self.process = subprocess.Popen([sys.executable, *line.split()], stdin=slave, stdout=slave, stderr=slave,
                                        cwd=ROOT, env=os.environ | dict(TERM="xterm", OMP_NUM_THREADS="1"),
                                        start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.screen, self.seen = "", 0

    def type(self, text: str, want: str = "") -> None:
        """Types the text, then waits for what matches `want`."""
        os.write(self.master, text.encode())
        self.read(want)

    def read(self, want: str) -> None:
        """Waits for a text that matches `want`, behind what the last call waited for."""
        while not (found := re.search(want, self.screen[self.seen:])):
            assert self.more(), self.screen[self.seen:]
        self.seen += found.end()

    def more(self) -> bool:
        """Reads on; false at the end, and where nothing comes for a minute."""
        with suppress(OSError):  # the last writer has closed it
            if select.select([self.master], [], [], 60)[0]:
                self.screen += os.read(self.master, 65536).decode(errors="replace")
                return True
        return False

    def ended(self) -> int:
        """The exit code; the rest of the screen is read."""
        while self.more():
            pass
        return self.process.wait(timeout=20)


@pytest.fixture
def terminal():
    open_ones = []

    def start(directory: str, new_tokens: int) -> Terminal:
        """It has begun to answer "Hello fox"."""
        open_ones.append(Terminal(directory, new_tokens))
        open_ones[-1].read("> ")
        open_ones[-1].type("Hello fox\r", r"fox\r\n(?s:.*)\w+ \w+ ")
        return open_ones[-1]

    yield start
    for one in open_ones:
        one.process.kill()
        one.process.wait()
        os.close(one.master)


def test_a_session_on_a_terminal(terminal, chatty, tmp_path):
    """Typing, pasting, Ctrl-C in an answer and at the prompt, /save, /load, leaving."""
    screen, file = terminal(chatty, 400), tmp_path / "chat.json"
    screen.type("\x03", r"tokens/s\S*\r\n(?s:.*?)> ")
    screen.type("\x1b[200~one\ntwo\nthree\x1b[201~", "three")
    screen.type("\r", r"\d+ tokens, [\d.]+ tokens/s\S*\r\n(?s:.*?)> ")
    screen.type(f"/save {file}\r", "> ")
    messages = read_json(file)
    assert roles(messages) == "user assistant user assistant" and asked(messages)[1] == "one\ntwo\nthree"
    screen.type(f"/load {file}\r", "4 messages")
    for _ in range(2):
        screen.read("> ")
        time.sleep(0.5)  # readline prints its prompt before it waits: a signal between the two is seen at the next key
        screen.type("\x03")
    assert screen.ended() == 0 and "Traceback" not in screen.screen


def test_lines_that_come_during_an_answer_are_one_turn(terminal, chatty, tmp_path):
    """A terminal sends what is pasted then as if it were typed. A last line without an end waits for the user's."""
    screen = terminal(chatty, 150)
    screen.type("one\ntwo\nthree\n", r"> one\r\ntwo\r\nthree\r\n(?s:.*)\w+ \w+ ")
    screen.type("four\nfive", "tokens/s(?s:.*)> four(?s:.*)five")
    screen.type(" and six\r", "tokens/s(?s:.*)> ")
    screen.type(f"/save {tmp_path}/chat.json\r", "6 messages")
    said = asked(read_json(tmp_path / "chat.json"))
    assert said == ["Hello fox", "one\ntwo\nthree", "four\nfive and six"]

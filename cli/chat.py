"""
The chat on a terminal: a line, or a pasted text of several, goes in as a turn, and the answer is
streamed. Lines that begin with a slash are commands: see HELP.

Without a chat template the text so far and what is typed are continued.
"""

import os
import re
import signal
import sys
from bisect import bisect_left
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from select import select
from threading import Event, Thread

from cli.errors import message_of
from cli.output import per_token, show
from cli.prompts import system_messages
from generate import Sampling
from llm import LLM, make_completion

HELP = """\
/again            draw the last answer anew; greedy, it is the same one
/temperature 0.2  sample so from now on; /top-k, /top-p and the rest likewise
/reset            forget the conversation
/system TEXT      set the system message and forget the conversation; without TEXT: remove it
/help             these lines
/quit             leave, as do exit and Ctrl-D
Ctrl-C stops an answer, or drops what is typed. A pasted text of several lines is one turn."""


class Chat:
    """llm: prepared for one row; args: the command line's."""

    def __init__(self, llm: LLM, args):
        self.llm = llm
        self.args = args
        self.tokenizer = llm.tokenizer
        self.team = llm.team
        self.sampling = llm._sampling(llm.options)
        self.messages = system_messages(args.system)
        self.check_room(self.messages)
        self.last = None  # of the last turn: the messages before it, and its text
        self.cached = []  # the tokens whose keys and values the cache has
        self.answers = deque(maxlen=100)  # what the report is of; more would fill the memory
        self.told_dropped = False
        self.readline = None
        self.typed = b""  # during the answer

    def run(self) -> deque:
        """Answers until the user leaves. Returns the last answers, a Completion each."""
        with suppress(ImportError):  # Windows has none
            import readline  # input() then edits lines and recalls them

            self.readline = readline
            if not is_dumb():
                # A pasted newline does not end the line.
                readline.parse_and_bind("set enable-bracketed-paste on")
        leaving = "Ctrl-C stops an answer, Ctrl-D leaves"
        if self.team.ranks > 1:
            leaving = "Ctrl-C and Ctrl-D leave"
        untold = "" if self.tokenizer.template else " No chat template: your text is continued."
        self.say(f"/help lists the commands, {leaving}.{untold}")
        self.say(described(self.sampling))
        while (line := self.team.agree(self.ask)) is not None:
            if line.strip() in ("exit", "quit", "/exit", "/quit"):
                break
            try:
                if command := re.fullmatch(r" */([\w-]+)(?: +(.*?))? *", line):
                    self.command(*command.groups())
                elif line.strip():
                    self.turn(self.messages, line)
            except ValueError as error:
                print(message_of(error), file=sys.stderr)
            except KeyboardInterrupt:  # before the answer began
                print()
        return self.answers

    def say(self, text: str):
        if not self.args.quiet:
            print(text, file=sys.stderr)

    # What is typed

    def ask(self) -> str | None:
        """What the user types; None when it is time to leave."""
        while True:
            try:
                return self.read_turn() if on_terminal() else input("")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not on_terminal():
                    raise
                print()

    def read_turn(self) -> str:
        """A line that is typed or, as one turn, all lines that came during the answer: a terminal
        sends what is pasted then as if it were typed. If the last of them is not ended, the user
        goes on with it."""
        if self.readline:
            waiting, self.typed = self.typed + read_waiting(), b""
            if waiting and not waiting.strip(ENDS):
                raise EOFError
            if waiting.rstrip(ENDS).endswith((b"\r", b"\n")) and waiting[-1:] in ENDS:
                self.typed = waiting[-1:]  # the next turn ends the chat
            waiting = edited(waiting)
            if waiting.endswith("\n"):
                print(f"> {waiting}", end="")
                return waiting.removesuffix("\n")
            self.readline.set_startup_hook(lambda: self.readline.insert_text(waiting))
        return input("> ")

    def command(self, name: str, text: str | None):
        """A line "/name text". ValueError where it cannot be done; then nothing has changed."""
        match name:
            case "help":
                print(HELP, file=sys.stderr)
            case "again":
                if not self.last:
                    raise ValueError("/again: there is no answer yet")
                self.turn(*self.last)
            case "reset":
                self.messages, self.last = system_of(self.messages), None
                self.say("The conversation is forgotten.")
            case "system":
                if not self.tokenizer.template:
                    raise ValueError("/system: without a chat template there is no system message")
                system = system_messages(text or None)
                self.check_room(system)
                self.messages, self.last = system, None
                now = "the system message is set" if text else "none is set"
                self.say(f"The conversation is forgotten; {now}.")
            case _ if (option := name.replace("-", "_")) in vars(self.sampling):
                if text:
                    self.sampling = replace(self.sampling, **{option: parsed(text)})
                    (self.llm.speculator or self.llm.engine).set_sampling(self.sampling)
                self.say(described(self.sampling))
            case _:
                known = "again", "reset", "system", "help", "quit", *vars(self.sampling)
                known = [each.replace("_", "-") for each in known]
                begun = [each for each in known if each.startswith(name)]
                meant = begun or get_close_matches(name, known, 1)
                meant = f" did you mean /{meant[0]}?" if meant else ""
                raise ValueError(f"/{name}: no such command;{meant} /help lists them")

    # A turn

    def turn(self, before: list[dict], text: str):
        """The user's turn after the messages before it, and the answer. ValueError where the turn
        alone is too long; it is then forgotten."""
        room = self.llm.room
        messages, tokens = self.fit([*before, dict(role="user", content=text)])
        # The last token is read again, for its logits.
        start = len(os.path.commonprefix([self.cached, tokens[:-1]]))
        start = (self.llm.speculator or self.llm.engine).go_back(start, len(self.cached))
        self.llm.engine.keeps_states = True
        limit = min(self.args.max_new_tokens or room, room - len(tokens))
        answer = make_completion(text, tokens, self.tokenizer, limit, self.args)
        self.cached = []
        handler = signal.getsignal(signal.SIGINT)
        if self.team.ranks == 1:
            # Ctrl-C ends the answer after the current step. Ranks all end: see errors.run().
            signal.signal(signal.SIGINT, lambda *_: setattr(answer, "finish_reason", "interrupted"))
        try:
            with self.without_echo():
                show([answer], self.llm.complete([answer], start=start), self.args.show_thinking)
        finally:
            signal.signal(signal.SIGINT, handler)
        if answer.finish_reason == "interrupted" and not answer.tokens:
            return  # as if the turn had not been
        self.last = before, text
        self.answers.append(answer)
        self.cached = tokens + answer.tokens[:-1]  # the model may not have read the last one
        ending = "" if self.tokenizer.template else "\n"
        self.messages = [*messages, dict(role="assistant", content=answer.text + ending)]
        if not self.tokenizer.template and answer.steps > len(answer.tokens):
            # A stop token: the story has ended.
            self.messages = []
        ms = per_token([answer])["all"]
        if sys.stderr.isatty() and ms:
            full = ", the context is full" if len(tokens) + len(answer.tokens) == room else ""
            self.say(dim(f"{len(answer.tokens)} tokens, {1e3 / ms:.1f} tokens/s{full}"))

    @contextmanager
    def without_echo(self):
        """What is typed or pasted meanwhile is not shown in the middle of the answer: read_turn()
        shows it. Nor does the terminal edit it by lines, which it would cut at 4,095 bytes; it is
        read at once, as behind more than that Ctrl-C would wait, too. Ranks may end at any time, and
        would leave the terminal so."""
        if not (self.readline and on_terminal()) or self.team.ranks > 1:
            yield
            return
        import termios

        before = termios.tcgetattr(sys.stdin)
        silent = [*before]
        silent[3] &= ~(termios.ECHO | termios.ICANON)  # of the local modes
        done = Event()

        def read():
            while not done.is_set() and not sys.stdin.closed:
                if select([sys.stdin], [], [], 0.05)[0]:
                    found = os.read(sys.stdin.fileno(), 2**16)
                    self.typed += found
                    if not found:  # the terminal is gone
                        return

        reader = Thread(target=read, daemon=True)
        try:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
            reader.start()
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
            done.set()
            if reader.is_alive():  # a signal may come before it is
                reader.join()

    def fit(self, messages: list[dict]) -> tuple[list[dict], list[int]]:
        """The messages and their tokens. Where these leave little room for an answer, the oldest
        turns are dropped until a quarter of the room is free; the system message stays. ValueError
        where the last turn alone is too long."""
        tokens, room, before = self.encode(messages), self.llm.room, len(messages)
        if room - len(tokens) < min(self.args.max_new_tokens or room, room // 8):
            kept = system_of(messages)
            turns = [i for i, message in enumerate(messages) if message["role"] == "user"]

            def fits(turn: int) -> bool:
                return len(self.encode(kept + messages[turn:])) <= room * 3 // 4

            first = bisect_left(turns[:-1], True, key=fits)
            messages = kept + messages[turns[first] :]
            tokens = self.encode(messages)
        if len(tokens) >= room:
            raise ValueError(
                f"{len(tokens)} tokens leave no room in {room}: shorten, or raise max_seq_length"
            )
        if len(messages) < before and not self.told_dropped:
            self.say(
                f"the chat fills the {room} tokens of --max-seq-length: its oldest turns are "
                f"dropped from now on"
            )
            self.told_dropped = True
        return messages, tokens

    def check_room(self, system: list[dict]) -> None:
        """ValueError where the system message leaves no room for a turn."""
        if not system:
            return
        n, room = len(self.encode([*system, dict(role="user", content="x")])), self.llm.room
        if n >= room:
            raise ValueError(
                f"the system message: {n} tokens leave no room in {room}: shorten it, or raise "
                "max_seq_length"
            )

    def encode(self, messages: list[dict]) -> list[int]:
        """Without a chat template the messages are one text."""
        if self.tokenizer.template:
            return self.tokenizer.encode_chat(messages)
        return self.tokenizer.encode_typed("".join(message["content"] for message in messages))


def described(sampling: Sampling) -> str:
    """The temperature, and what else is on."""
    values = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    off = vars(Sampling()) | dict(temperature=None)
    said = [f"{name} {value}" for name, value in values.items() if value != off[name]]
    return f"Sampling: {', '.join(said)}{' (greedy)' if sampling.greedy else ''}."


def parsed(text: str) -> int | float | bool | str:
    """What is no number and no switch stays a text, which Sampling refuses."""
    switches = dict(true=True, on=True, false=False, off=False)
    if text.lower() in switches:
        return switches[text.lower()]
    for kind in int, float:
        with suppress(ValueError):
            return kind(text)
    return text


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def is_dumb() -> bool:
    """Whether the terminal understands no escape codes."""
    return os.environ.get("TERM") == "dumb"


def dim(text: str) -> str:
    """In grey, where the user wants colours: see no-color.org."""
    return text if is_dumb() or os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[0m"


ENDS = b"\0\x04"  # Ctrl-D, as it comes from a terminal that edits lines, and from one that does not
# Keys that take away what stands before them in its line -> what they take.
ERASE = {"\b": r".?$", "\x7f": r".?$", "\x15": r".*$", "\x17": r"\S*\s*$"}


def edited(typed: bytes) -> str:
    """What was typed while the terminal did not edit: Backspace, Ctrl-U and Ctrl-W are done here."""
    lines = [""]
    for key in typed.translate(None, ENDS).decode(errors="replace").replace("\r", "\n"):
        if key == "\n":
            lines.append("")
        elif key in ERASE:
            lines[-1] = re.sub(ERASE[key], "", lines[-1], count=1)
        else:
            lines[-1] += key
    return "\n".join(lines)


def read_waiting() -> bytes:
    """What waits on the terminal."""
    import termios
    import tty

    stdin, waiting = sys.stdin.fileno(), b""
    if select([stdin], [], [], 0)[0]:
        before = termios.tcgetattr(stdin)
        tty.setcbreak(stdin, termios.TCSANOW)  # what comes after the last whole line is read, too
        try:
            while select([stdin], [], [], 0.05)[0]:
                waiting += os.read(stdin, 2**16)
        finally:
            termios.tcsetattr(stdin, termios.TCSANOW, before)
    return waiting


def system_of(messages: list[dict]) -> list[dict]:
    """The system message, if there is one: it is the first."""
    return [message for message in messages[:1] if message["role"] == "system"]

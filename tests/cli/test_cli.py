"""The command line as a user meets it: what is printed where, exit codes, and one line for each
mistake."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import make_dataclass
from argparse import SUPPRESS, ArgumentParser, Namespace
from functools import partial
from importlib import import_module
from itertools import count
from operator import itemgetter
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

import generate
import quantize

from cli.options import Parser
from cli.output import format_report, show, speculation, with_bar
from helpers import (
    DRAFT,
    EAGLE,
    RECURRENT,
    ROOT,
    SHAPE,
    TINY,
    absent,
    change_tensors,
    ended,
    interrupted,
    one_line,
    open_tokenizer,
    put,
    python,
    read_json,
    tiny,
    with_json,
)
from drafts.policies import POLICIES
from hub.families import config_from_hf
from llm import of_generation
from model import Transformer
from scripts import train_tiny

COMMANDS = [
    "generate",
    "quantize",
    "scripts.benchmark",
    "scripts.download",
    "scripts.evaluate",
    "scripts.train_tiny",
]
SHORT = "--max-new-tokens 3 --temperature 0 --json"


@pytest.fixture
def cli(call):
    """generate.py on the CPU, with a command line."""
    return lambda line="", **more: call(
        "generate.py", generate.main, "--device", "cpu", *shlex.split(line), **more
    )


@pytest.fixture
def result_of(cli):
    """The object of --json."""

    def run(line: str, **more) -> dict:
        code, out, err = cli(f"--json {line}", **more)
        assert code == 0 and out.count("\n") == 1, err
        return json.loads(out)

    return run


def test_no_arguments_tell_a_story_that_ends():
    """As a process of its own: the story on stdout, all else on stderr."""
    done = python(ROOT / "generate.py", "--seed", "1", cwd="/")
    assert done.returncode == 0 and re.fullmatch(r"Once upon a time(?s:.){200,}\n", done.stdout)
    assert "decode tokens/s" in done.stderr and len(done.stderr.strip().splitlines()) == 2


KEYS = {
    "checkpoint",
    "device",
    "dtype",
    "quantize",
    "world_size",
    "batch",
    "samples",
    "load_s",
    "compile_s",
    "first_token_s",
    "decode_tokens_per_s",
    "per_token_ms",
    "weights_bytes",
    "bandwidth_gb_s",
    "bandwidth_utilization",
    "peak_memory_bytes",
    "speculation",
}
SAMPLE_KEYS = {
    "prompt",
    "text",
    "prompt_tokens",
    "tokens",
    "finish_reason",
    "mean_logprob",
    "seconds",
    "logprobs",
}


def test_json_is_one_line_with_every_key(result_of):
    result = result_of(
        "--logprobs --prompt 'One day' --prompt 'Tom and Sue' --num-samples 2 --max-new-tokens 9"
    )
    assert result.keys() == KEYS and result["batch"] == 4
    prompts = [sample["prompt"] for sample in result["samples"]]
    assert prompts == ["One day"] * 2 + ["Tom and Sue"] * 2
    for sample in result["samples"]:
        assert sample.keys() == SAMPLE_KEYS and sample["mean_logprob"] < 0 < sample["seconds"]
        assert sample["mean_logprob"] == sum(sample["logprobs"]) / len(sample["tokens"])
    # Tied: all of the embedding.
    assert result["weights_bytes"] == 4 * sum(p.numel() for p in tiny().parameters())


def test_a_seed_repeats_the_text_and_another_does_not(cli):
    first, again, other = (cli(f"--seed {seed} --max-new-tokens 40")[1] for seed in (3, 3, 4))
    assert first == again != other


def test_stop_text_ends_the_text_before_it(cli):
    assert cli("--temperature 0 --stop 'little girl' --quiet")[1:] == (
        "Once upon a time, there was a \n",
        "",
    )


def test_prompt_file_is_a_batch_with_headings(cli, tmp_path):
    (tmp_path / "prompts.txt").write_text("One day\n\nTom and Sue\n")
    _, out, _ = cli(f"--prompt-file {tmp_path}/prompts.txt --max-new-tokens 5 --num-samples 2")
    headings = [line for line in out.splitlines() if line.startswith("--- ")]
    assert headings == [
        "--- One day (1)",
        "--- One day (2)",
        "--- Tom and Sue (1)",
        "--- Tom and Sue (2)",
    ]


@pytest.mark.parametrize("line", ["--max-new-tokens 3", "--interactive"])
def test_a_profile_replaces_a_file_and_leaves_nothing_else(cli, tmp_path, line):
    """A chat without an answer has one, too."""
    trace = tmp_path / "trace.json"
    trace.write_text("old")
    assert cli(f"{line} --profile {trace}")[0] == 0
    assert [*tmp_path.iterdir()] == [trace] and read_json(trace)["traceEvents"]


@pytest.mark.parametrize("name, said", [("pipe", "want a file"), ("none/file", "No such file")])
def test_a_profile_that_cannot_be_written_is_refused_before_the_work(
    cli, monkeypatch, tmp_path, name, said
):
    monkeypatch.setattr("hub.formats.load", None)
    os.mkfifo(tmp_path / "pipe")
    told = f"--profile {tmp_path / name}: cannot write there, name another place: {said}"
    assert told in one_line(cli(f"--profile {tmp_path / name}"))
    assert [*tmp_path.iterdir()] == [tmp_path / "pipe"]


def test_a_trace_that_cannot_be_written_in_the_end_leaves_the_text(cli, tmp_path, monkeypatch):
    """On a disk that fills up PyTorch writes nothing, and says so in its own way."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: None)
    code, out, err = cli(f"--profile {tmp_path}/trace.json {SHORT}")
    assert code == 2 and json.loads(out)["samples"] and list(tmp_path.iterdir()) == []
    assert f"--profile {tmp_path}/trace.json: cannot be written: " in err.splitlines()[-1]


def test_a_field_that_is_true_or_false_is_a_switch():
    """None, the default, of a sampler's own field is the checkpoint's."""
    Own = make_dataclass("Own", [("flat", bool | None, of_generation(None, "even"))])
    parser = Parser("")
    parser.add_options(Own, "flat")
    found = [parser.parse_known_args(line)[0].flat for line in ([], ["--flat"])]
    assert found == [None, True]


def test_quantize_ends_with_the_sizes_and_the_next_command(call, tmp_path):
    out = tmp_path / "a b"
    code, printed, err = call(
        "quantize.py", quantize.main, "--checkpoint", TINY, "--out", out, "--device", "cpu"
    )
    assert (code, printed) == (0, "") and err.endswith(
        f"MB of weights, 7.94MB before\nnext: python generate.py --checkpoint '{out}' --compile\n"
    )


def test_compile_wants_the_compiler_that_inductor_runs(cli, monkeypatch):
    monkeypatch.setenv("CXX", "/no/c++")
    assert absent("runs /no/c++ CXX", one_line(cli("--compile"))) == []


def test_sampling_defaults_come_from_generation_config(cli, tmp_path):
    directory = shutil.copytree(TINY, tmp_path / "greedy")
    put(directory / "generation_config.json", dict(temperature=0))
    greedy = cli("--max-new-tokens 30 --temperature 0")[1]
    assert cli(f"--checkpoint {directory} --max-new-tokens 30")[1] == greedy


# A command line, and words that the refusal has.
MISTAKES = [
    ("--checkpoint no/such/dir", "no/such/dir"),
    ("--device tpu", "device=tpu: want cpu, cuda, cuda:N or mps"),
    ("--device cuda:99", "device=cuda:99"),
    ("--interactive --chat", "has no chat template"),
    ("--temperature nan", "--temperature: got 'nan', want float from 0 to 100"),
    ("--temperature 200", "--temperature: got '200', want float from 0 to 100"),
    ("--temperature warm", "'warm'"),
    ("--top-k x", "--top-k: got 'x', want int from -1 to inf"),
    ("--repetition-penalty 0", "--repetition-penalty: got '0', want float from 0.01 to 100"),
    ("--presence-penalty 2.5", "--presence-penalty: got '2.5', want float from -2 to 2"),
    ("--frequency-penalty -3", "--frequency-penalty: got '-3', want float from -2 to 2"),
    ("--seed 1.5", "--seed: got '1.5', want int from 0 to 9223372036854775807"),
    ("--quantize int5", "--quantize: invalid choice: 'int5' (choose from"),
    ("--num-samples 99999", "out of memory"),
    ("--max-new-tokens 20 --max-seq-length 16", "20 new ones exceed 16, max_seq_length"),
    ("--group-size 64", "group_size=64 goes with quantize"),
    ("--prompt-file nowhere.txt", "nowhere.txt"),
    ("--prompt-file /dev/null", "no prompt in it"),
    (f"--checkpoint {TINY}/model.safetensors", f"want its directory, {TINY}"),
    ("--prompt '\udcff is not UTF-8'", "'utf-8' codec can't encode character '\\udcff'"),
    ("--stop ''", "stop='': an empty text"),
    ("--draft-tokens 4", "draft_tokens=4 goes with draft"),
    ("--draft prompt-lookup --draft-quantize int8", "no weights"),
    (
        f"--draft {DRAFT} --draft-tokens 40",
        f"draft_tokens='40': want 1 to 32, or {', '.join(POLICIES)}",
    ),
    (f"--draft {DRAFT} --num-samples 99999", "or no draft, help"),
    ("--draft ''", "draft='': want a checkpoint"),
    ("--time-budget 1e-6", "the first token took"),
    ("--interactive --json", "--interactive does not go with"),
    ("--logprobs", "--logprobs goes with --json"),
    ("-p -", "--prompt -: stdin is empty"),
    ("--prompt-file -", "--prompt-file -: no prompt"),
    ("-p - --prompt-file -", "stdin can be read once"),
    ("--whole", "--whole goes with --prompt-file"),
    ("--system x", "--system goes with --chat"),
    ("-p Hi --template-option mood=1", "--template-option goes with --chat or --interactive"),
    ("--promt Hi", "did you mean --prompt?"),
    ("--prompt-file /dev/zero", "/dev/zero: more than 67108864 bytes"),
    ("--template-option mood", "--template-option: got 'mood', want KEY=VALUE"),
    ("--prompt=a --max_new_tokens 1", "did you mean --max-new-tokens?"),
    ("--nonsense", "--nonsense: no such option; --help lists the options"),
    ("--temp 0.2", "did you mean --template-option or --temperature?"),
    ("--system-prompt x", "did you mean --system?"),
    ("--draft-tokenss 3", "did you mean --draft-tokens?"),
    ("--stream", "--stream: no such option; --help"),
    ("--profile ''", "--profile: got '', want a name"),
    ("--prompt-file ''", "--prompt-file: got '', want a name"),
    (
        "--draft prompt_lookup",
        "draft=prompt_lookup: no such directory; did you mean prompt-lookup?",
    ),
    ("--show-thinking", "marks no thoughts, as gpt-oss, Muse Glimmer, Gemma 4 do"),
    ("hello", "hello: no such option, want -p before a prompt; --help"),
]


@pytest.mark.parametrize("line, said", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(cli, line, said):
    err = one_line(cli(line))
    assert err.startswith("generate.py: ") and said in err


def test_a_line_has_no_end_of_5000_characters_and_none_that_a_terminal_obeys(cli):
    err = one_line(cli(f"--prompt-file '\x1b]0;\x07{'x' * 5000}'")).removesuffix("\n")
    assert err.isprintable() and r"\x1b]0;\x07x" in err
    assert len(err.removeprefix("generate.py: ")) == 1000 and "xxx ... xxx" in err


@pytest.mark.parametrize(
    "options, said", {f"--json --draft {DRAFT}": "", "": "Once upon a time\n"}.items()
)  # the message has a line of its own
def test_weights_that_are_no_numbers_are_said(cli, tmp_path, options, said):
    directory = shutil.copytree(TINY, tmp_path / "tiny")
    change_tensors(directory, **{"model.norm.weight": torch.full((256,), torch.nan)})
    code, out, err = cli(f"--checkpoint {directory} {options}")
    assert (code, out) == (2, said) and "the logits are not finite" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "redirected, code, out, said",
    [
        ("<&- 2>&-", 0, "Once upon ", ""),
        (">&-", 0, "", "tokens/s"),
        ("> /dev/full", 2, "", "generate.py: [Errno 28] No space left on device\n"),
        ("| head -c 10; exit ${PIPESTATUS[0]}", 141, "Once upon ", ""),
    ],
)
def test_streams_may_be_closed_full_or_read_in_part(redirected, code, out, said):
    command = f"{sys.executable} {ROOT}/generate.py --max-new-tokens 99 --stop zzz {redirected}"
    done = ended(["bash", "-c", command])
    assert (done.returncode, done.stdout[:10]) == (code, out)
    assert said in done.stderr and "Error" not in done.stderr and (code == 0 or done.stderr == said)


def test_ctrl_c_is_quiet():
    assert interrupted("generate.py", "--quiet", "--max-new-tokens", "400", "--stop", "zzz") == (
        130,
        b"",
    )


@pytest.mark.parametrize("name", [*COMMANDS, "scripts.tune"])
def test_ctrl_c_is_quiet_while_pytorch_is_imported(tmp_path, name):
    """A module that sleeps stands for it."""
    (tmp_path / "torch.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)"
    )
    assert interrupted(f"{name.replace('.', '/')}.py", path=tmp_path) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("name", ["generate", "quantize", "scripts/evaluate"])
@pytest.mark.parametrize("given, there", [("", "passive"), ("active", "active")])
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(tmp_path, name, given, there):
    """OpenMP reads the variable when PyTorch is imported. A module that prints it stands for
    that."""
    (tmp_path / "torch.py").write_text(
        "import os\nprint(os.environ['OMP_WAIT_POLICY'], flush=True)\nos._exit(0)"
    )
    unset = [] if given else ["-u", "OMP_WAIT_POLICY"]
    done = ended(
        ["env", *unset, sys.executable, ROOT / f"{name}.py"],
        PYTHONPATH=str(tmp_path),
        OMP_WAIT_POLICY=given,
    )
    assert done.stdout.split() == [there]


def test_what_is_for_one_process_is_not_for_torchrun(call, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = one_line(
        call("quantize.py", quantize.main, "--checkpoint", TINY, "--out", tmp_path / "out")
    )
    assert said == "quantize.py: 2 processes, want one: start it without torchrun\n"


def test_a_draft_with_other_tokens_is_named_by_the_first(cli, tmp_path):
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    with_json(tmp_path)
    assert "token 0 is '!' there and '<unk>' in" in one_line(cli(f"--draft {tmp_path}"))


def test_a_draft_larger_than_its_target_is_said_and_runs(cli):
    code, out, err = cli(f"--checkpoint {DRAFT} --draft {TINY} --max-new-tokens 9 --quiet")
    assert (
        code == 0 and err.count("\n") == 1 and "3,967,744 parameters, the checkpoint 475,520" in err
    )


@pytest.mark.parametrize("draft", [f"{EAGLE} --draft-quantize int4", "prompt-lookup"])
def test_a_draft_changes_the_counts_and_not_the_greedy_text(result_of, draft):
    """A stop text may end inside of an accepted run, and a row with its first token."""
    line = (
        "--temperature 0 --prompt One --prompt 'the dog and the cat and the dog and the cat and' "
        "--max-new-tokens 40 --stop ' play' --stop ' day' --quantize int8"
    )
    plain, fast = result_of(line), result_of(f"{line} --draft-tokens 3 --draft {draft}")
    outcome, counts = itemgetter("text", "tokens", "finish_reason"), fast["speculation"]
    assert [*map(outcome, plain["samples"])] == [*map(outcome, fast["samples"])]
    assert plain["speculation"] is None and counts["drafted"] > counts["accepted"] > 0


def test_a_time_budget_ranks_what_there_is(cli, result_of, monkeypatch):
    """Time passes by a second a step: rows of 3 tokens end, the others do not."""
    monkeypatch.setattr("llm.time.perf_counter", partial(next, count(0.0)))
    line = (
        "--num-samples 6 --seed 5 --prompt 'One day' --time-budget 12 --stop . --max-new-tokens 99"
    )
    ranks = [
        (sample["finish_reason"], -sample["mean_logprob"]) for sample in result_of(line)["samples"]
    ]
    assert ranks == sorted(ranks) and {reason for reason, _ in ranks} == {"stop", "time"}
    unfinished = [reason for reason, _ in ranks].count("time")
    assert cli(f"{line} --quiet")[1].count("[unfinished]") == unfinished


@pytest.mark.parametrize("terminal", [True, False])
def test_a_large_batch_says_what_it_needs_and_on_a_terminal_how_far_it_is(
    cli, monkeypatch, terminal
):
    """The texts are the same; a terminal gets them when all have ended, behind the bar."""
    line = "--max-new-tokens 3 --seed 1 --num-samples 65"
    quiet, ended = cli(f"{line} --quiet"), []

    def watch(completions, *rest):
        ended.append(all(completion.finish_reason for completion in completions))
        show(completions, *rest)

    monkeypatch.setattr("cli.generate.show", watch)
    for stream in sys.stdout, sys.stderr:
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    _, out, err = cli(line)
    # 3 new tokens after 5, and 23 slots more; 5 layers' k and v, of one head of 128 numbers in fp32.
    size = 65 * 32 * 5 * 2 * 128 * 4 / 2**30
    assert f"65 rows of up to 8 tokens: {size:.2f} GiB of cache, at most 3 steps\n" in err
    assert ("/3 [" in err) == terminal and (out, "") == quiet[1:]
    assert ended == [terminal]
    assert "of cache" not in cli(line.replace("65", "64"))[2]


def test_what_a_large_batch_needs_are_states_too(capsys):
    """A row's of a recurrent layer: two states of 6 matrices [16, 32], and the inputs of 72 tokens
    for its 288 channels and two gates of each head; keys and values of the other layer. In fp32."""
    config = config_from_hf(SHAPE | RECURRENT | dict(model_type="qwen3_5_text"))
    with torch.device("meta"):
        model = Transformer(config)
    model.setup(8, 10**5)
    completions = [Namespace(limit=3, room=8)] * 10**5
    [*_] = with_bar(Namespace(model=model, draft_model=None), completions, iter(()))
    row = 2 * 6 * 16 * 32 + 72 * (288 + 12) + 2 * 8 * 2 * 16
    assert f": {4e5 * row / 2**30:.2f} GiB of cache" in capsys.readouterr().err


def test_out_of_memory_later_on_says_what_was_needed(cli, monkeypatch):
    monkeypatch.setattr(
        "hub.formats.load", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    )
    assert "GiB of cache" in one_line(cli("--max-new-tokens 9"))


def test_train_tiny_writes_a_pair_that_generates_and_drafts_for_it(call, tmp_path, monkeypatch):
    """The end of the second and third command has all drafts speculate."""
    text, out = ROOT / "checkpoints" / "stories.txt", tmp_path / "out"
    line = f"--text {text} --eval {text} --out {out} --steps 3 --batch 2 --context 64 --vocab 350"
    monkeypatch.setattr(train_tiny, "NEW_TOKENS", 6)
    for more, words in (
        ("", "greedy agreement"),
        ("--eagle --texts 2", "tiny-eagle: of the 1st to 5th drafted token"),
        ("--dflash --texts 2", "tiny-dflash: of the 1st to 5th drafted token"),
    ):
        code, said, err = call("train_tiny.py", train_tiny.main, *line.split(), *more.split())
        assert code == 0 and words in said, err
    made = {"tiny", "tiny-draft", "tiny-eagle", "tiny-dflash"}
    assert {path.name for path in out.iterdir()} == made


@pytest.mark.parametrize(
    "more, said",
    [
        ("--lr nan", "--lr"),
        ("--eval none", "none: "),
        ("--out full/tiny/mine", "mine"),
        ("--out full", "mine"),
    ],
)
def test_train_tiny_refuses_before_it_trains_and_deletes_nothing_of_others(
    call, tmp_path, monkeypatch, more, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_tiny, "train_pair", None)
    mine, text = tmp_path / "full" / "tiny" / "mine", ROOT / "checkpoints" / "stories.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    line = f"--text {text} --eval {text} --out out {more}"
    assert said in one_line(call("train_tiny.py", train_tiny.main, *line.split())) and mine.exists()


@pytest.mark.parametrize(
    "line, stdin, prompts",
    [
        ("", "\ufeffOne\nday\n\n", "One\nday\n"),
        ("", " \n", "Once upon a time"),
        ("-p Tom --prompt -", "One\nday\n", "Tom|One\nday"),
        ("--prompt-file -", "One day\n\nTom\n", "One day|Tom"),
        ("-p A --prompt-file prompts", "", "A|One\u2028day|Tom"),
        ("--prompt-file prompts --whole", "", "One\u2028day\n\nTom"),
    ],
)
def test_prompts_from_options_stdin_and_files(
    result_of, tmp_path, monkeypatch, line, stdin, prompts
):
    """The file is from another system: a byte order mark, CRLF, and a character that str.splitlines
    would cut at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").write_bytes("\ufeffOne\u2028day\r\n\r\nTom\r\n".encode())
    samples = result_of(f"{line} --max-new-tokens 1", stdin=stdin)["samples"]
    assert [sample["prompt"] for sample in samples] == prompts.split("|")


def test_a_prompt_that_is_not_utf_8_is_one_line_with_the_remedy(cli, tmp_path):
    (tmp_path / "prompts").write_bytes("One day\nA café\n".encode("latin-1"))
    told = {
        "stdin: byte 0 is 0xff, ": cli(stdin=b"\xff"),
        f"{tmp_path}/prompts: byte 13 is 0xe9, ": cli(f"--prompt-file {tmp_path}/prompts"),
    }
    for begin, result in told.items():
        err = one_line(result)
        assert err.startswith(f"generate.py: {begin}no UTF-8: save it as UTF-8")


def test_a_text_without_end_is_refused(cli):
    with open("/dev/zero", "rb") as endless:
        assert "stdin: more than 67108864 bytes" in one_line(cli("--quiet", stdin=endless))


class Slow(io.BytesIO):
    def read(self, *size):
        time.sleep(1.1)
        return super().read(*size)


def test_after_a_second_of_waiting_it_says_that_stdin_is_read(cli):
    code, out, err = cli("--max-new-tokens 3", stdin=Slow(b"One day\r\n"))
    assert code == 0 and out.startswith("One day") and "\r" not in out
    assert err.startswith("reading the prompt from stdin")


def test_chat_puts_the_prompt_into_the_template_and_takes_a_system_message(cli, chatty):
    tokenizer = open_tokenizer(Path(chatty))
    user, system = dict(role="user", content="Hi"), dict(role="system", content="Be brief.")
    for more, tokens in {
        "": tokenizer.encode_text("Hi"),
        "--chat": tokenizer.encode_chat([user]),
        "--chat --system 'Be brief.'": tokenizer.encode_chat([system, user]),
    }.items():
        _, out, err = cli(f"--checkpoint {chatty} -p Hi {SHORT} {more}")
        assert json.loads(out)["samples"][0]["prompt_tokens"] == len(tokens)
        assert ("--chat puts it into the checkpoint's chat template" in err) == (not more)


def test_the_reason_of_a_mistake_stands_alone_where_a_template_gives_a_hint(cli, chatty, tmp_path):
    directory = shutil.copytree(chatty, tmp_path / "pickled")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "a pickle" in one_line(cli(f"--checkpoint {directory}"))


def test_texts_are_streamed_one_after_the_other_each_under_its_heading(capsys):
    first = Namespace(
        prompt="",
        heading="--- A\n",
        finish_reason=None,
        visible=Mock(side_effect=["", " 1", " 123"]),
    )
    second = Namespace(prompt="", heading="--- B\n", finish_reason="stop", visible=lambda: " abc")

    def steps():
        assert capsys.readouterr().out == "--- A\n"
        yield
        assert capsys.readouterr().out == "1"
        first.finish_reason = "stop"
        yield

    show([first, second], steps())
    assert capsys.readouterr().out == "23\n\n--- B\nabc\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_the_text_as_it_is(
    monkeypatch, capsys, terminal
):
    text = "a\x1b]0;title\x07b\tc\nd\r\x00\x9b2Je\u00e9\u65e5"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    show([Namespace(finish_reason="stop", prompt=text, heading=text, visible=lambda: text)])
    assert (
        capsys.readouterr().out
        == 2 * ("a]0;titleb\tc\nd2Je\u00e9\u65e5" if terminal else text) + "\n"
    )


@pytest.mark.parametrize(
    "more, terminal, said",
    [("", False, "compiling ...\n"), ("", True, "compiling ...\r\n"), ("--quiet", False, "")],
)
def test_the_command_says_once_that_it_compiles(cli, monkeypatch, more, terminal, said):
    monkeypatch.setattr("cli.generate.sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr(generate.Engine, "compile", Mock(side_effect=ValueError("")))
    assert cli(f"--compile {more}") == (2, "", f"{said}generate.py: \n")


@pytest.mark.parametrize(
    "error, said",
    [
        (type("PanicException", (BaseException,), {})("no such token\nxxx"), "no such token xxx"),
        (MemoryError(), "out of memory"),
    ],
)
def test_what_nobody_expects_of_a_library_is_one_line(call, error, said):
    assert one_line(call("generate.py", Mock(side_effect=error))) == f"generate.py: {said}\n"


def test_the_report_has_the_drafts_part_in_lines_of_its_own_and_no_line_over_80_columns():
    result = dict(
        load_s=123.456,
        compile_s=123.4,
        first_token_s=12.3,
        decode_tokens_per_s=12345.6,
        bandwidth_gb_s=4321,
        bandwidth_utilization=0.987,
        peak_memory_bytes=1e11,
        speculation=speculation(dict(steps=3, drafted=12, accepted=9, row_steps=3)),
    )
    assert (
        format_report(result)
        == """\
load s  compile s  first token s  decode tokens/s    GB/s  of read bw  peak GiB
123.46      123.4         12.300          12345.6  4321.0         99%     93.13
accepted  tokens a step
     75%           4.00"""
    )


@pytest.mark.parametrize("name", [*COMMANDS, "scripts.shapes"])
def test_help_fits_80_columns_and_names_each_default_but_no_developers_notes(monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    with patch.object(
        ArgumentParser, "parse_known_args", autospec=True, side_effect=KeyboardInterrupt
    ) as parse:
        with pytest.raises(KeyboardInterrupt):
            import_module(name).main()
    [parser] = parse.call_args.args
    text = parser.format_help()
    assert [line for line in text.splitlines() if len(line) > 80] == [] and "Shapes:" not in text
    for option in parser._actions:
        if option.nargs != 0 and option.default not in (None, "", [], SUPPRESS, str(TINY)):
            default = str(option.default).removesuffix(".0")
            assert f"default: {default}" in option.help, option.option_strings

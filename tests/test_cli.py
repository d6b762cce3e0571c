"""The command line as a user meets it: what is printed where, exit codes, and one line for each mistake."""
import argparse
import builtins
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import generate
import quantize
from cli import show
from helpers import DRAFT, ROOT, TEMPLATE, TINY, absent, interrupted, tiny
from scripts import benchmark, download, evaluate, train_tiny


SHORT = "--max-new-tokens", "3", "--temperature", "0", "--json"


@pytest.fixture
def cli(call):
    """generate.py on the CPU."""
    def run(*args: str) -> tuple[int, str, str]:
        return call("generate.py", generate.main, *args, *(() if "--device" in args else ("--device", "cpu")))
    return run


def test_no_arguments_tell_a_story_that_ends():
    """As a process of its own: the story on stdout, all else on stderr."""
    command = [sys.executable, ROOT / "generate.py", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0
    assert done.stdout.startswith("Once upon a time") and done.stdout.endswith("\n") and len(done.stdout) > 200
    assert "decode tokens/s" in done.stderr and len(done.stderr.strip().splitlines()) == 2


def test_a_closed_pipe_ends_it_quietly():
    command = f"{sys.executable} {ROOT / 'generate.py'} --max-new-tokens 300 --stop zzz | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "Once upon " and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_json_is_one_line_with_every_key(cli):
    code, out, err = cli("--json", "--seed", "7", "--prompt", "One day", "--prompt", "Tom and Sue",
                         "--num-samples", "2", "--max-new-tokens", "9")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert set(result) == {
        "checkpoint", "device", "dtype", "quantize", "world_size", "batch", "samples", "load_s", "compile_s",
        "first_token_s", "decode_tokens_per_s", "per_token_ms", "weights_bytes", "bandwidth_gb_s",
        "bandwidth_utilization", "peak_memory_bytes", "speculation"}
    assert result["batch"] == 4 and [s["prompt"] for s in result["samples"]] == ["One day"] * 2 + ["Tom and Sue"] * 2
    for sample in result["samples"]:
        assert set(sample) == {"prompt", "text", "prompt_tokens", "tokens", "finish_reason", "mean_logprob", "seconds"}
        assert sample["finish_reason"] in ("stop", "length") and len(sample["tokens"]) <= 9
        assert sample["mean_logprob"] < 0 < sample["seconds"]
    assert set(result["per_token_ms"]) == {"first", "last", "all"}
    parameters = sum(parameter.numel() for parameter in tiny().parameters())
    assert result["weights_bytes"] == 4 * parameters  # tied: the head reads the whole embedding


def test_a_seed_repeats_the_text_and_another_does_not(cli):
    first, again, other = (cli("--seed", seed, "--max-new-tokens", 40)[1] for seed in (3, 3, 4))
    assert first == again != other


def test_stop_text_ends_the_text_before_it(cli):
    assert cli("--temperature", "0", "--stop", "little girl", "--quiet")[1:] == ("Once upon a time, there was a \n", "")


def test_prompt_file_is_a_batch_with_headings(cli, tmp_path):
    (tmp_path / "prompts.txt").write_text("One day\n\nTom and Sue\n")
    _, out, _ = cli("--prompt-file", tmp_path / "prompts.txt", "--max-new-tokens", "5", "--num-samples", "2")
    headings = [line for line in out.splitlines() if line.startswith("--- ")]
    assert headings == ["--- One day (1)", "--- One day (2)", "--- Tom and Sue (1)", "--- Tom and Sue (2)"]


def test_greedy_batch_equals_solo(cli):
    prompts = ["One day", "Tom and Sue went to the park to play", "The"]
    options = ("--temperature", "0", "--max-new-tokens", "30", "--json")
    solo = [json.loads(cli("--prompt", prompt, *options)[1])["samples"][0]["tokens"] for prompt in prompts]
    batch = json.loads(cli(*(word for prompt in prompts for word in ("--prompt", prompt)), *options)[1])["samples"]
    assert [sample["tokens"] for sample in batch] == solo


def test_profile_writes_a_trace_and_no_partial_file(cli, tmp_path):
    cli("--max-new-tokens", "3", "--profile", tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_profile_replaces_files_alone(cli, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "trace.partial.json").write_text("kept")
    code, out, err = cli("--max-new-tokens", "3", "--profile", tmp_path / "pipe")
    assert code == 2 and not out and err.count("\n") == 1 and "want a file" in err
    cli("--max-new-tokens", "3", "--profile", tmp_path / "trace.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "trace.json", "trace.partial.json"]
    assert (tmp_path / "trace.partial.json").read_text() == "kept" and (tmp_path / "pipe").is_fifo()


def test_a_profile_that_cannot_be_written_is_refused_before_the_work(cli, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(generate, "load_checkpoint", lambda *_: 1 / 0)
    monkeypatch.setattr("cli.TemporaryDirectory", refuse)  # as root, the tests could write where a user cannot
    code, out, err = cli("--profile", tmp_path / "trace.json")
    assert (code, out, err.count("\n")) == (2, "", 1) and list(tmp_path.iterdir()) == []
    assert f"--profile {tmp_path / 'trace.json'}: cannot write there, name another place: Permission denied" in err


def test_a_chat_without_an_answer_has_a_trace_too(call, tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda prompt: "/quit")
    args = "--interactive", "--profile", tmp_path / "trace.json", "--device", "cpu", "--quiet"
    code, out, err = call("generate.py", generate.main, *args)
    assert (code, out) == (0, "") and json.loads((tmp_path / "trace.json").read_text())


def test_a_profile_behind_a_link_to_nowhere_is_refused_before_the_work(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "load_checkpoint", lambda *_: 1 / 0)
    (tmp_path / "trace.json").symlink_to(tmp_path / "none" / "trace.json")
    code, out, err = cli("--profile", tmp_path / "trace.json")
    assert (code, out, err.count("\n")) == (2, "", 1) and "cannot write there, name another place: " in err


def test_a_trace_that_cannot_be_written_in_the_end_leaves_the_text(cli, tmp_path, monkeypatch):
    """On a disk that fills up PyTorch writes nothing, and says so in its own way."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: None)
    code, out, err = cli("--profile", tmp_path / "trace.json", *SHORT)
    assert code == 2 and json.loads(out)["samples"] and list(tmp_path.iterdir()) == []
    assert f"--profile {tmp_path / 'trace.json'}: cannot be written: " in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["none/file", "x" * 250])
def test_a_profile_that_no_directory_holds_is_refused_before_the_work(cli, tmp_path, monkeypatch, name):
    monkeypatch.setattr(generate, "load_checkpoint", lambda *_: 1 / 0)
    code, out, err = cli("--profile", tmp_path / name)
    assert (code, out, err.count("\n")) == (2, "", 1) and "cannot write there, name another place: " in err


def test_a_profile_in_no_directory_is_refused(cli, tmp_path):
    code, out, err = cli("--profile", tmp_path / "none" / "file")
    assert (code, out) == (2, "") and "cannot write there, name another place: No such file or directory" in err


def test_quantize_ends_with_the_sizes_and_the_next_command(call, tmp_path):
    out = tmp_path / "a b"
    code, printed, err = call("quantize.py", quantize.main, "--checkpoint", TINY, "--out", out, "--device", "cpu")
    size, before = ((path / "model.safetensors").stat().st_size / 1e6 for path in (out, TINY))
    assert (code, printed) == (0, "") and err.splitlines()[-2:] == [
        f"{out}: {size:.2f}MB of weights, {before:.2f}MB before",
        f"next: python generate.py --checkpoint '{out}' --compile"]
    assert size < before / 2


@pytest.mark.parametrize("main", [quantize.main, benchmark.main, download.main, evaluate.main, train_tiny.main],
                         ids=lambda main: main.__module__)
def test_help_names_the_default_of_each_option_that_has_one(main, monkeypatch):
    parsers = []

    def stop(parser):
        parsers.append(parser)
        raise KeyboardInterrupt

    monkeypatch.setattr("cli.Parser.parse_args", stop)
    with pytest.raises(KeyboardInterrupt):
        main()
    for option in parsers[0]._actions:
        if {"--device", "--dtype", "--group-size", "--max-tokens", "--stride"} & set(option.option_strings):
            assert "default: " in option.help, option.option_strings  # one that is found later on
        elif option.nargs != 0 and option.default not in (None, "", [], argparse.SUPPRESS):
            assert f"default: {str(option.default).removesuffix('.0')}" in option.help, option.option_strings


@pytest.mark.parametrize("CXX, named", [
    (None, "clang++" if sys.platform == "darwin" else "g++"), ("/no/c++", "/no/c++")])
def test_compile_wants_the_compiler_that_inductor_runs(cli, monkeypatch, CXX, named):
    monkeypatch.delenv("CXX", raising=False)
    if CXX:
        monkeypatch.setenv("CXX", CXX)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == named else name)
    code, out, err = cli("--compile")
    assert code == 2 and not out and err.count("\n") == 1 and f"runs {named}" in err and "CXX" in err


def test_sampling_defaults_come_from_generation_config(cli, tmp_path):
    directory = shutil.copytree(TINY, tmp_path / "greedy")
    (directory / "generation_config.json").write_text('{"temperature": 0, "eos_token_id": [2, 7]}')
    outs = {cli("--checkpoint", directory, "--max-new-tokens", "30", "--seed", seed)[1] for seed in (1, 2)}
    assert len(outs) == 1
    assert outs == {cli("--max-new-tokens", "30", "--temperature", "0")[1]}


@pytest.mark.parametrize("values", [
    {"temperature": "hot"}, {"temperature": -1}, {"top_k": 50.5}, {"top_p": 0}, {"top_p": "all"}, {"temperature": 1e9},
    {"top_k": True}, {"temperature": True}, {"top_k": -5}, {"top_p": 1e-46}, {"top_p": True}])
def test_absurd_sampling_in_generation_config_is_one_line(cli, tmp_path, values):
    directory = shutil.copytree(TINY, tmp_path / "absurd")
    (directory / "generation_config.json").write_text(json.dumps(values))
    code, out, err = cli("--checkpoint", directory)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert absent(f"generation_config.json: {[*values][0]} want from to", err) == []


def test_a_full_disk_is_one_line():
    command = f"{sys.executable} {ROOT / 'generate.py'} --max-new-tokens 9 --quiet > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left" in done.stderr


def test_prompt_file_from_another_system(cli, tmp_path):
    """A byte order mark, CRLF, and characters that str.splitlines would cut at."""
    (tmp_path / "prompts.txt").write_bytes("\ufeffOnce upon a time\r\nOne\u2028day\r\n".encode())
    result = json.loads(cli("--prompt-file", tmp_path / "prompts.txt", "--max-new-tokens", "2", "--json")[1])
    assert [sample["prompt"] for sample in result["samples"]] == ["Once upon a time", "One\u2028day"]


def test_chat_puts_the_prompt_into_the_template(cli, tmp_path):
    directory = shutil.copytree(TINY, tmp_path / "chatty")
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }} upon a time")
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    options = ("--temperature", "0", "--max-new-tokens", "20", "--quiet")
    _, plain, _ = cli("--prompt", "Once upon a time", *options)
    code, chat, _ = cli("--checkpoint", directory, "--prompt", "Once", "--chat", *options)
    assert (code, "Once upon a time" + chat) == (0, plain)


@pytest.mark.parametrize("args, said", [
    (["--checkpoint", "no/such/dir"], "no/such/dir"),
    (["--device", "tpu"], "--device tpu: want cpu, cuda, cuda:N or mps"),
    (["--device", "cpu:"], "--device cpu:: want cpu"), (["--device", "cpu:x"], "--device cpu:x: want cpu"),
    (["--device", "cuda:99"], "--device cuda:99"),
    (["--dtype", "int3"], "int3"),
    (["--chat"], "has no chat template"),
    (["--temperature", "-1"], "-1 is not from 0 to 100"),
    (["--temperature", "nan"], "nan is not from"),
    (["--temperature", "warm"], "'warm'"),
    (["--top-p", "0"], "0 is not from"),
    (["--top-p", "1.5"], "1.5 is not from"),
    (["--top-k", "-3"], "-3 is not from 0"),
    (["--seed", "-1"], "-1 is not from 0"),
    (["--num-samples", "0"], "0 is not from 1"),
    (["--max-new-tokens", "0"], "0 is not from 1"),
    (["--max-new-tokens", "600"], "600 new ones exceed 512"),
    (["--max-new-tokens", "20", "--max-seq-length", "16"], "20 new ones exceed 16"),
    (["--max-seq-length", "4096"], "the model's context is 512"),
    (["--prompt", "word " * 600], "exceed 512"),
    (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    (["--prompt-file", "/dev/null"], "want a regular file"),
    (["--stop", ""], "--stop"),
    (["--interactive", "--json"], "--interactive"),
    (["--profile", "no/such/dir/trace.json"], "no/such/dir"),
    (["--profile", "/tmp"], "--profile /tmp"),
    (["--checkpoint", TINY / "model.safetensors"], f"want its directory, {TINY}"),
    (["--prompt", "\udcff is not UTF-8"], "the text: 'utf-8' codec can't encode character '\\udcff'"),
    (["--interactive", "--chat"], "has no chat template"),
    (["--num-samples", "99999"], "out of memory"),
    (["--frobnicate"], "--frobnicate"),
    (["--draft-tokens", "4"], "go with --draft"),
    (["--draft", "prompt-lookup", "--draft-quantize", "int8"], "no weights"),
    (["--draft", DRAFT, "--draft-tokens", "0"], "'0' is none of 1 to 32, auto, hf and bass"),
    (["--draft", DRAFT, "--draft-tokens", "33"], "'33' is none of 1 to 32"),
    (["--draft", DRAFT, "--draft-tokens", "many"], "'many' is none of"),
    (["--draft", DRAFT, "--num-samples", "99999"], "or no --draft, help"),
    (["--time-budget", "0"], "--time-budget"),
    (["--time-budget", "1e-6"], "the first token took"), (["--draft", ""], "--draft: want a checkpoint"),
    (["--time-budget", "1", "--interactive"], "--interactive"),
    (["--draft", DRAFT, "--time-budget", "1e-6"], "the first token took"),
])
def test_a_mistake_is_one_line_and_exit_code_2(cli, args, said):
    code, out, err = cli(*args)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("generate.py: ") and said in err


@pytest.mark.parametrize("options, said", [
    (["--json"], ""), (["--json", "--draft", DRAFT], ""), (["--json", "--draft", "prompt-lookup"], ""),
    ([], "Once upon a time\n")])  # the message has a line of its own
def test_weights_that_are_no_numbers_are_said(cli, tmp_path, options, said):
    directory = shutil.copytree(TINY, tmp_path / "tiny")
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    code, out, err = cli("--checkpoint", directory, *options)
    assert (code, out) == (2, said) and "the logits are not finite" in err.splitlines()[-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_the_text_as_it_is(monkeypatch, capsys, terminal):
    text = "a\x1b]0;title\x07b\tc\nd\r\x00\x9b2Je\u00e9\u65e5"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    completion = argparse.Namespace(finish_reason="stop", heading=text, prompt=text, visible=lambda: text)
    show([completion])
    assert capsys.readouterr().out == 2 * ("a]0;titleb\tc\nd2Je\u00e9\u65e5" if terminal else text) + "\n"


@pytest.mark.parametrize("stream", ["<", ">", "2>"])
def test_streams_may_be_closed(stream):
    command = f"{sys.executable} {ROOT / 'generate.py'} --max-new-tokens 5 {stream}&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout.startswith("Once") == (stream != ">") and "tokens/s" not in done.stdout


def test_ctrl_c_is_quiet(tmp_path):
    command = [sys.executable, ROOT / "generate.py", "--quiet", "--max-new-tokens", "400", "--stop", "zzz"]
    assert interrupted(command) == (130, b"")


@pytest.mark.parametrize("file", ["generate.py", "quantize.py", *(f"scripts/{name}.py" for name in (
    "benchmark", "download", "evaluate", "train_tiny"))])
def test_ctrl_c_is_quiet_while_pytorch_is_imported(tmp_path, file):
    """A module that sleeps stands for it."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)")
    assert interrupted([sys.executable, ROOT / file], tmp_path) == (-signal.SIGINT, b"")


def test_what_is_for_one_process_is_not_for_torchrun(call, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = call("quantize.py", quantize.main, "--checkpoint", TINY, "--out", tmp_path / "out")
    assert (code, out, err) == (2, "", "quantize.py: 2 processes, want one: start it without torchrun\n")


def test_a_draft_with_other_tokens_is_named_by_the_first(cli, tmp_path):
    from tokenizers import Tokenizer, models
    shutil.copytree(DRAFT, tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.model").unlink()
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "other": 3}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(tmp_path / "draft" / "tokenizer.json"))
    code, out, err = cli("--draft", tmp_path / "draft")
    assert (code, out, err.count("\n")) == (2, "", 1) and "token 3 is 'other' there and" in err


def test_a_draft_larger_than_its_target_is_said_and_runs(cli):
    code, out, err = cli("--checkpoint", DRAFT, "--draft", TINY, "--max-new-tokens", "9", "--quiet")
    assert code == 0 and err.count("\n") == 1 and "3,967,744 parameters, the checkpoint 475,520" in err


@pytest.mark.parametrize("draft", [DRAFT, "prompt-lookup"], ids=["model", "prompt-lookup"])
@pytest.mark.parametrize("ends", [("--max-new-tokens", "1"), ("--stop", " ", "--max-new-tokens", "30")])
def test_a_row_may_end_with_its_first_token(cli, draft, ends):
    """No step is speculated for one that has; the others go on."""
    prompts = ["--prompt", "One", "--prompt", "Once upon a time, there was a l", "--temperature", "0", "--json", *ends]
    _, plain, _ = cli(*prompts)
    code, out, _ = cli(*prompts, "--draft", draft, "--draft-tokens", "3")
    plain, result = json.loads(plain), json.loads(out)
    assert code == 0 and [s["text"] for s in result["samples"]] == [s["text"] for s in plain["samples"]]
    assert any(len(sample["tokens"]) == 1 for sample in plain["samples"])
    if "1" in ends:
        assert result["speculation"]["steps"] == 0


@pytest.mark.parametrize("draft", [DRAFT, "prompt-lookup"], ids=["model", "prompt-lookup"])
def test_a_draft_changes_the_counts_and_not_the_greedy_text(cli, draft):
    """int8 for the target, int4 for the draft; a stop text, which may end inside of an accepted run."""
    args = ("--temperature", "0", "--prompt", "One day", "--prompt", "the dog and the cat and the dog and the cat and",
            "--num-samples", "2", "--max-new-tokens", "40", "--stop", " play", "--quantize", "int8", "--json")
    options = ("--draft", draft, "--draft-tokens", "3", *(["--draft-quantize", "int4"] if draft is DRAFT else []))
    plain, fast = json.loads(cli(*args)[1]), json.loads(cli(*args, *options)[1])
    for a, b in zip(plain["samples"], fast["samples"]):
        assert (a["text"], a["tokens"], a["finish_reason"]) == (b["text"], b["tokens"], b["finish_reason"])
    counts = fast["speculation"]
    assert plain["speculation"] is None and counts["drafted"] > counts["accepted"] > 0
    assert counts["acceptance_rate"] == counts["accepted"] / counts["drafted"] and counts["tokens_per_step"] > 1


def test_a_time_budget_ranks_what_there_is(cli, monkeypatch):
    """Time passes by a second a step: rows of 3 tokens end, the others do not."""
    clock = iter(range(10 ** 9))
    monkeypatch.setattr(generate.time, "perf_counter", lambda: float(next(clock)))
    args = ("--num-samples", "6", "--seed", "5", "--prompt", "One day", "--time-budget", "12", "--stop", ".",
            "--max-new-tokens", "99")
    samples = json.loads(cli(*args, "--json")[1])["samples"]
    reasons = [sample["finish_reason"] for sample in samples]
    assert reasons == sorted(reasons) and set(reasons) == {"stop", "time"}
    for reason in ("stop", "time"):
        ranks = [sample["mean_logprob"] for sample in samples if sample["finish_reason"] == reason]
        assert ranks == sorted(ranks, reverse=True)
    out = cli(*args, "--quiet")[1]
    assert out.count("[unfinished]") == reasons.count("time")


def test_out_of_memory_later_on_says_what_was_needed(cli, monkeypatch):
    def burst(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(generate, "load_checkpoint", burst)
    code, out, err = cli("--max-new-tokens", "9")
    assert (code, out, err.count("\n")) == (2, "", 1) and "GiB of cache" in err


def test_train_tiny_writes_a_pair_that_generates(cli, tmp_path):
    story = "Once upon a time, there was a fox. The fox ran to the {} and said: \"Hello, {}!\" They played all day.\n"
    words = ["tree", "house", "bird", "river", "cat", "dog", "ball", "moon", "sun", "girl", "boy", "park"]
    text = "\n".join(story.format(a, b) + f"Then the {b} went home to the {a}.\n" for a in words for b in words) * 20
    (tmp_path / "stories.txt").write_text(text)
    paths = ("--text", tmp_path / "stories.txt", "--eval", tmp_path / "stories.txt", "--out", tmp_path / "out")
    sizes = ("--steps", "3", "--batch", "2", "--context", "64", "--vocab", "300")
    command = [sys.executable, ROOT / "scripts" / "train_tiny.py", *map(str, paths), *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "greedy agreement" in done.stdout, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tiny", "tiny-draft"]
    for name in ("tiny", "tiny-draft"):
        assert cli("--checkpoint", tmp_path / "out" / name, "--max-new-tokens", "5")[0] == 0


@pytest.mark.parametrize("more, said", [
    (["--batch", "-2"], "--batch"), (["--lr", "nan"], "--lr"), (["--steps", "0"], "--steps"),
    (["--eval", "none"], "none: "), (["--out", "stories.txt"], "stories.txt"), (["--out", "full"], "mine")])
def test_train_tiny_refuses_before_it_trains_and_deletes_nothing_of_others(call, tmp_path, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_tiny, "train_pair", lambda *_: 1 / 0)
    (tmp_path / "stories.txt").write_text("Once upon a time " * 20)
    (tmp_path / "full" / "tiny").mkdir(parents=True)
    (tmp_path / "full" / "tiny" / "mine").touch()
    paths = "--text", "stories.txt", "--eval", "stories.txt", "--out", "out"
    code, out, err = call("train_tiny.py", train_tiny.main, *paths, *more)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err and (tmp_path / "full" / "tiny" / "mine").exists()


def prompts_of(result: tuple[int, str, str]) -> list[str]:
    code, out, err = result
    assert code == 0, err
    return [sample["prompt"] for sample in json.loads(out)["samples"]]


@pytest.mark.parametrize("args, stdin, prompts", [
    ([], "One day\n", ["One day"]), ([], "One\nday\n\n", ["One\nday\n"]), ([], "", ["Once upon a time"]),
    ([], " \n", ["Once upon a time"]), (["-p", "Tom"], "One day", ["Tom"]), (["-p", "-"], "One day\n", ["One day"]),
    (["-p", "Tom", "--prompt", "-"], "One\nday", ["Tom", "One\nday"]),
    (["--prompt-file", "-"], "One day\n\nTom\n", ["One day", "Tom"]),
    (["--prompt-file", "-", "--whole"], "One day\n\nTom\n", ["One day\n\nTom"])])
def test_prompts_from_stdin(call, args, stdin, prompts):
    run = call("generate.py", generate.main, *args, *SHORT, "--device", "cpu", stdin=stdin)
    assert prompts_of(run) == prompts


@pytest.mark.parametrize("args, prompts", [([], ["One day", "Tom"]), (["--whole"], ["One day\n\nTom"])])
def test_prompts_from_a_file(cli, tmp_path, args, prompts):
    (tmp_path / "prompts").write_text("\ufeffOne day\n\nTom\n", encoding="utf-8")
    assert prompts_of(cli("--prompt-file", tmp_path / "prompts", *args, *SHORT)) == prompts


@pytest.mark.parametrize("args, stdin, said", [
    (["-p", "-"], b"", "--prompt -: stdin is empty"), (["--prompt-file", "-"], b"\n", "--prompt-file -: no prompt"),
    (["-p", "-", "--prompt-file", "-"], b"x", "stdin can be read once"), ([], b"\xff", "stdin: 'utf-8' codec"),
    (["--whole"], b"", "--whole goes with --prompt-file"), (["--system", "x"], b"", "--system goes with --chat"),
    (["--temprature", "1"], b"", "--temprature: no such option, did you mean --temperature?"),
    (["--prompt=a", "--max_new_tokens", "1"], b"", "did you mean --max-new-tokens?"),
    (["hello"], b"", "hello: no such option, want -p before a prompt; --help")])
def test_a_mistaken_input_is_one_line(args, stdin, said):
    command = [sys.executable, ROOT / "generate.py", "--device", "cpu", *args]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=60)
    err = done.stderr.decode()
    assert (done.returncode, done.stdout, err.count("\n")) == (2, b"", 1) and said in err


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_text_without_end_is_refused(tmp_path, source):
    (path := tmp_path / "text").touch()
    os.truncate(path, 2 ** 40)  # a hole, which takes no room on the disk
    place = path if source == "file" else "-"
    command = [sys.executable, ROOT / "generate.py", "--device", "cpu", "--prompt-file", place]
    with open("/dev/zero") as endless:
        done = subprocess.run(command, stdin=endless, capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert absent(f"{path if source == 'file' else 'stdin'}: 67108864 bytes", done.stderr) == []


def test_running_out_of_memory_where_nobody_expects_it_is_one_line(cli, monkeypatch):
    monkeypatch.setattr(generate, "read_prompts", lambda args: bytearray(2 ** 62))
    code, out, err = cli()
    assert (code, out, err) == (2, "", "generate.py: out of memory\n")


def test_after_a_second_of_waiting_it_says_that_stdin_is_read():
    command = [sys.executable, ROOT / "generate.py", "--device", "cpu", "--max-new-tokens", "3"]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)
    assert "reading the prompt from stdin" in process.stderr.readline()
    out, err = process.communicate("One day\r\n", timeout=60)
    assert out.startswith("One day") and "\r" not in out and "tokens/s" in err


@pytest.mark.parametrize("name, dtype", [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_names_of_types(cli, name, dtype):
    assert json.loads(cli("--dtype", name, *SHORT)[1])["dtype"] == dtype


def test_a_bare_prompt_and_a_chat_template_point_at_chat_which_takes_a_system_message(cli, tmp_path):
    directory = shutil.copytree(TINY, tmp_path / "chatty")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    bare, chat, system = (cli("--checkpoint", directory, "-p", "Hi", *SHORT, *args)
                          for args in ([], ["--chat"], ["--chat", "--system", "Be brief."]))
    assert "--chat puts it into the checkpoint's chat template" in bare[2] and "template" not in chat[2]
    counts = [json.loads(out)["samples"][0]["prompt_tokens"] for _, out, _ in (bare, chat, system)]
    assert counts == sorted(set(counts))
    assert "--chat" not in cli("--checkpoint", directory, "-p", "Hi", *SHORT, "--quiet")[2]


def test_help_has_its_options_in_groups_and_says_every_default(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--help"])
    with pytest.raises(SystemExit):
        generate.generate_args("", "")
    text = capsys.readouterr().out
    for group in ("model", "speed", "quantization", "speculation", "prompt", "generation", "output"):
        assert f"\n{group}:\n" in text
    entries = re.split(r"\n  (?=-)", text.partition("\nmodel:")[2])[1:]
    for entry in (" ".join(entry.split()) for entry in entries):
        assert "default" in entry or entry.startswith("--stop"), entry

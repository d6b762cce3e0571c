"""
Checkpoints in Hugging Face layout, as good and as bad as they come: config, weights, links, the
Hub. All but the bundled tokenizer.model is made here; the Hub is a server of our own, which the
real client asks. See test_tokenizer.py.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from unittest.mock import MagicMock

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

from cli.errors import message_of
from hub.checkpoint import read_text
from hub.families import config_from_hf
from hub.vet import find_checkpoint, open_checkpoint
from helpers import (
    LLAMA,
    ROOT,
    absent,
    beside,
    drawn,
    one_line,
    open_tokenizer,
    program,
    put,
    python,
    read_json,
    refusal,
    with_model,
)
from helpers import load_checkpoint as load
from helpers import save_tensors as save

INDEX, WHOLE, SHARD = "model.safetensors.index.json", "model.safetensors", "model-1.safetensors"
LAYER, Q = "model.layers.1.", "model.layers.1.self_attn.q_proj.weight"


def make(directory: Path, **changes) -> dict[str, torch.Tensor]:
    return drawn(directory, LLAMA | changes, torch.float32)


def test_tensors_are_of_the_wanted_dtype(tmp_path):
    """test_model.py shows that each lands where it belongs."""
    save(tmp_path, make(tmp_path))
    model = load(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    model.setup(8)
    assert model.ropes[0].cos.dtype == torch.float32


def test_shards_give_the_same_model_and_no_file_that_the_index_leaves_out_is_opened(tmp_path):
    tensors = make(tmp_path)
    save(tmp_path, tensors)
    whole = load(tmp_path).state_dict()
    save(tmp_path, tensors, shards=3)
    for name in (WHOLE, "consolidated.safetensors", "model-3.safetensors"):
        put(tmp_path / name, b"garbage, refused by whoever opens it")
    torch.testing.assert_close(load(tmp_path).state_dict(), whole, rtol=0, atol=0)


def test_a_tied_head_is_the_embedding(tmp_path):
    theirs = make(tmp_path, tie_word_embeddings=True)
    save(tmp_path, theirs | {"lm_head.weight": theirs["model.embed_tokens.weight"].clone()})
    model = load(tmp_path)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, theirs["model.embed_tokens.weight"])


LEFTOVERS = {
    LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(4),
    LAYER + "self_attn.rotary_emb.cos_cached": torch.ones(9, 4),
    LAYER + "self_attn.rotary_emb.sin_cached": torch.ones(9, 4),
    LAYER + "self_attn.masked_bias": torch.tensor(-1e9),
    LAYER + "self_attn.bias": torch.ones(1, 1, 9, 9),
    LAYER + "self_attn.o_proj.bias": torch.zeros(32),
    "model.layers.2.mlp.up_proj.weight": torch.ones(3),
    "mtp.layers.0.eh_proj.weight": torch.ones(2),
    "x.weight": torch.empty(0, 4),
}
STRANGE = {
    LAYER + "self_attn.o_proj.bias": torch.eye(32)[0],
    LAYER + "self_attn.k_norm.weight": torch.ones(8),
    "model.layers.3.mlp.up_proj.weight": torch.ones(3),
    "visual.weight": torch.ones(2, 3),
    "visual.e4m3.bias": torch.ones(3).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("more", [LEFTOVERS, STRANGE], ids=["leftovers", "strange"])
def test_what_the_model_has_no_place_for_is_passed_over(tmp_path, capsys, more, shards):
    """As transformers 5.24 does, whose logits are the same in each case, with a warning: here one
    line tells what is more than leftovers."""
    tensors = make(tmp_path, num_nextn_predict_layers=1)
    save(tmp_path, tensors)
    whole = load(tmp_path).state_dict()
    save(tmp_path, tensors | more, shards=shards)
    capsys.readouterr()
    torch.testing.assert_close(load(tmp_path).state_dict(), whole, rtol=0, atol=0)
    said = capsys.readouterr().err
    if more is LEFTOVERS:
        assert said == ""
    else:
        assert said.count("\n") == 1
        assert absent(f"{tmp_path}: {LAYER}self_attn.k_norm.weight 2 more", said) == []


def test_the_index_says_which_files_there_are_and_each_file_what_is_in_it(tmp_path):
    """As in transformers 5.24: with entries of tensors that are nowhere, and without some."""
    tensors = make(tmp_path)
    save(tmp_path, tensors, shards=2)
    whole, held = load(tmp_path).state_dict(), read_json(tmp_path / INDEX)["weight_map"]
    held[LAYER + "gone.weight"], moved = held[Q], held.pop(Q)
    assert moved
    put(tmp_path / INDEX, dict(weight_map=held))
    torch.testing.assert_close(load(tmp_path).state_dict(), whole, rtol=0, atol=0)


@pytest.mark.parametrize("begin", ["", "language_model."])
def test_names_of_a_model_without_its_head(tmp_path, begin):
    """As transformers 5.24 reads them: "model." may be missing."""
    tensors = make(tmp_path)
    save(tmp_path, tensors)
    whole = load(tmp_path).state_dict()
    (tmp_path / WHOLE).unlink()
    save(tmp_path, {begin + name.removeprefix("model."): t for name, t in tensors.items()})
    torch.testing.assert_close(load(tmp_path).state_dict(), whole, rtol=0, atol=0)


def test_a_head_that_is_not_the_embedding_counts_although_config_json_ties_them(tmp_path, capsys):
    """As in transformers, which warns."""
    theirs = make(tmp_path, tie_word_embeddings=True)
    head = torch.randn(64, 32)
    for stored in head, theirs["model.embed_tokens.weight"] + 1e-6, head.bfloat16():
        save(tmp_path, theirs | {"lm_head.weight": stored})
        model = load(tmp_path)
        assert torch.equal(model.head.weight, stored.float()) and not model.config.tied
        assert torch.equal(model.embed.weight, theirs["model.embed_tokens.weight"])
        assert "lm_head is another matrix than the embedding" in capsys.readouterr().err


def test_a_tied_file_may_hold_the_one_matrix_by_the_heads_name(tmp_path):
    theirs = make(tmp_path, tie_word_embeddings=True)
    matrix = theirs.pop("model.embed_tokens.weight")
    save(tmp_path, theirs | {"lm_head.weight": matrix})
    model = load(tmp_path)
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, matrix)
    save(tmp_path, theirs)
    assert "model.embed_tokens.weight is missing" in refusal(load, tmp_path)


@pytest.mark.parametrize(
    "name, tensor, words",
    [
        (Q, None, "missing"),
        (Q, torch.ones(16, 32), "[16, [32,"),
        (Q, torch.ones(32, 32).to(torch.int8), "I8"),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(tmp_path, name, tensor, words):
    tensors = make(tmp_path) | {name: tensor}
    save(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    assert absent(f"{name} {words}", refusal(load, tmp_path)) == []


@pytest.mark.parametrize(
    "file, content, words",
    [
        (SHARD, None, f"no such file {INDEX} fetch"),
        *product([SHARD], [4, 100, -1], ["half downloaded fetch"]),
        (SHARD, b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs pull"),
        (SHARD, (2**40).to_bytes(8, "little"), "Error"),
        (INDEX, dict(weight_map=[]), ""),
        *(
            (INDEX, dict(weight_map={Q: name}), "inside")
            for name in (1, "/x.safetensors", "x/../../x.safetensors")
        ),
        *product(["config.json"], [None, b"{", [1], b"\xff\xfe", b"[" * 100_000], [""]),
    ],
)
def test_a_damaged_file_and_an_index_that_misleads_are_refused(tmp_path, file, content, words):
    """It names what a file lacks, or leads out of the directory."""
    save(tmp_path, make(tmp_path), shards=2)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    if content is not None:
        put(tmp_path / file, whole[:content] if isinstance(content, int) else content)
    assert absent(f"{tmp_path}/ {file} {words}", refusal(load, tmp_path)) == []


def test_a_pickle_is_refused_and_never_loaded(tmp_path):
    """Alone, and where the index names it."""
    trap = f"cos\nmkdir\n(V{tmp_path / 'made'}\ntR.".encode()  # unpickled, it makes a directory
    put(tmp_path / "pytorch_model.bin", trap)
    tensors = make(tmp_path)
    for index in {}, dict(weight_map=dict.fromkeys(tensors, "pytorch_model.bin")):
        put(tmp_path / INDEX, index)
        assert str(tmp_path) in refusal(load, tmp_path) and not (tmp_path / "made").exists()
    pickle.loads(trap)
    assert (tmp_path / "made").exists()


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux' /proc"
)
def test_the_host_holds_the_model_and_one_shard_at_most(tmp_path):
    save(
        tmp_path,
        make(tmp_path, hidden_size=1024, intermediate_size=1024, num_hidden_layers=6),
        shards=6,
    )
    program = (
        "import torch, safetensors.torch, tqdm; from pathlib import Path\n"
        "from hub.checkpoint import Checkpoint, load_model\n"
        "def status(key): return int(Path('/proc/self/status').read_text().split(key + "
        "':')[1].split()[0])\n"
        f"checkpoint = Checkpoint(Path('{tmp_path}'))\n"
        "before = status('VmRSS')\n"
        "model = load_model(checkpoint, torch.device('cpu'), torch.float32)\n"
        "print(status('VmHWM') - before)"
    )
    grown = int(python("-c", program).stdout) / 1024
    shards = [
        file.stat().st_size / 2**20 for file in tmp_path.glob("*.safetensors")
    ]  # 144 MiB, the largest of 36
    assert sum(shards) < grown < sum(shards) + max(shards) + 25


REFUSED = """
"model_type": "gpt2" -> model_type 'gpt2'
"hidden_act": "gelu" -> hidden_act 'gelu'
"attention_bias": true -> attention_bias True
"mlp_bias": true -> mlp_bias True
"rope_theta": null -> rope_theta None
"partial_rotary_factor": 1.5 -> partial_rotary_factor 1.5
"num_attention_heads": 0 -> num_attention_heads 0
"num_key_value_heads": 0 -> num_key_value_heads 0
"vocab_size": -1 -> vocab_size -1
"num_hidden_layers": "2" -> num_hidden_layers '2'
"hidden_size": true -> hidden_size True
"num_hidden_layers": 1000000000 -> num_hidden_layers 1000000000
"rms_norm_eps": NaN -> rms_norm_eps nan
"intermediate_size": null -> intermediate_size None
"tie_word_embeddings": "false" -> tie_word_embeddings 'false'
"tie_word_embeddings": [] -> tie_word_embeddings []
"model_type": "qwen2", "use_sliding_window": true -> use_sliding_window True
"rope_scaling": {"rope_type": "dynamic"} -> rope_type dynamic
"rope_scaling": {"type": "ntk"} -> rope_type ntk
"rope_scaling": {"type": "linear"} -> factor None
"rope_parameters": {"rope_type": "longrope"} -> short_factor 4 numbers
"rope_parameters": {"partial_rotary_factor": 0} -> partial_rotary_factor 0
"num_key_value_heads": 3 -> num_key_value_heads 3 num_attention_heads 4
"num_attention_heads": 5, "num_key_value_heads": 5 -> hidden_size 32 num_attention_heads 5
"rope_theta": 1000000000000000000000000000000 -> rope_theta 100000
"rms_norm_eps": 1e12 -> rms_norm_eps 1
"head_dim": 7 -> head_dim 7 even
"hidden_size": 1048577 -> hidden_size 1048576
"vocab_size": 16777217 -> vocab_size 16777216
"intermediate_size": 1000000000 -> intermediate_size 1048576
"rope_scaling": [1] -> rope_scaling [1] object
"rope_parameters": "x" -> rope_parameters 'x' object
"rope_parameters": {"full_attention": 5} -> full_attention 5 object
"text_config": 5 -> text_config 5 object
"model_type": [] -> model_type [] text
"text_config": {"model_type": {}} -> model_type {} text
"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4} -> high_freq_factor None
"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4} -> low_freq_factor less
""".strip().splitlines()  # keys of config.json, and words that the refusal has


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_key_and_value(tmp_path, case):
    changes, words = case.split(" -> ")
    put(tmp_path / "config.json", LLAMA | json.loads(f"{{{changes}}}"))
    assert absent(f"config.json {words}", refusal(open_checkpoint, tmp_path, tokenizer=False)) == []


def test_only_mistral_has_a_sliding_window():
    for kind, window in dict(mistral=16, llama=None, qwen2=None).items():
        assert (
            config_from_hf(LLAMA | dict(model_type=kind, sliding_window=16)).layers[0].window
            == window
        )


def test_each_file_is_opened_once_to_look_and_once_to_load(tmp_path, monkeypatch):
    """Tensors that lie in two files by turns are read file by file: each opening reads a header."""
    save(tmp_path, make(tmp_path, num_hidden_layers=6), shards=2)
    opened = MagicMock(side_effect=safe_open)
    monkeypatch.setattr("hub.checkpoint.safe_open", opened)
    load(tmp_path)
    assert opened.call_count == 4


def test_a_message_shows_control_characters_escaped_and_is_cut(tmp_path, capsys):
    name = "\x1b]0;title\x07\x9b31m\u202e" + "x" * 10**6 + " end"
    save(tmp_path, make(tmp_path) | {name: torch.ones(1)})
    load(tmp_path)
    line = capsys.readouterr().err.removesuffix("\n")
    put(tmp_path / INDEX, dict(weight_map={name: "/x"}))
    refused = message_of(pytest.raises(ValueError, load, tmp_path).value)
    for said, end in ((line, " end"), (refused, "inside of the directory")):
        assert r"\x1b]0;title\x07\x9b31m\u202e" in said and said.isprintable()
        assert len(said) <= 1000
        assert said.startswith(str(tmp_path)) and said.endswith(end)  # the remedy is kept


LINKED = [
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    INDEX,
]


def open_all(directory: Path) -> None:
    open_tokenizer(directory)
    load(directory)
    read_text(directory / "prompts.txt")


@pytest.mark.parametrize("file", [*LINKED, "tokenizer.json", "prompts.txt"])
def test_a_file_of_absurd_size_is_refused_by_name(tmp_path, file):
    with_model(tmp_path)
    save(tmp_path, make(tmp_path, vocab_size=2048))
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).touch()
    os.truncate(tmp_path / file, 2**34)  # a hole: no disk is filled
    assert f"{tmp_path / file}: {2**34} bytes" in refusal(open_all, tmp_path)


def link_to(place: Path, directory: Path, file: str) -> None:
    """Moves the file to place, and leaves a link."""
    place.mkdir(parents=True, exist_ok=True)
    (directory / file).rename(place / file)
    (directory / file).symlink_to(place / file)


def with_all(directory: Path) -> None:
    directory.mkdir(parents=True)
    with_model(directory)
    put(directory / "chat_template.jinja", b"hello")
    for name in ("generation_config", "special_tokens_map", "added_tokens"):
        put(directory / f"{name}.json", {})
    save(directory, make(directory, vocab_size=2048), shards=2)


@pytest.mark.parametrize("file", LINKED)
def test_a_link_that_leads_out_of_the_directory_is_refused(tmp_path, file):
    with_all(tmp_path / "in")
    link_to(tmp_path / "elsewhere", tmp_path / "in", file)
    said = refusal(open_all, tmp_path / "in")
    assert f"{tmp_path / 'in' / file}: a link to {tmp_path / 'elsewhere' / file}, " in said


@pytest.mark.parametrize(
    "place, directory, files",
    [
        ("hub/blobs", "hub/snapshots/abc", [*LINKED, SHARD]),
        ("in/deeper", "in", [*LINKED, SHARD]),
        ("disk", "in", [SHARD]),
    ],
)  # weights may lie on another disk
def test_links_are_followed_in_the_hubs_cache_inside_of_the_directory_and_to_it(
    tmp_path, place, directory, files
):
    with_all(tmp_path / directory)
    for file in files:
        link_to(tmp_path / place, tmp_path / directory, file)
    (tmp_path / "name").symlink_to(tmp_path / directory)
    found = find_checkpoint(str(tmp_path / "name"))
    assert open_tokenizer(found).template == "hello"
    load(found)


def test_blobs_that_are_a_link_themselves_and_those_of_another_cache_are_not_followed(tmp_path):
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    with_all(snapshot)
    link_to(tmp_path / "elsewhere", snapshot, "config.json")
    (tmp_path / "hub" / "blobs").symlink_to(tmp_path / "elsewhere")
    assert "out of its" in refusal(open_checkpoint, snapshot)


WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    INDEX,
    "chat_template.jinja",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
]
SURPLUS = [
    "consolidated.safetensors",
    "pytorch_model.bin",
    "README.md",
    "original/consolidated.00.pth",
    "original/tokenizer.model",
    "onnx/model.safetensors",
]
COMMIT = "0123456789" * 4
# a name -> what the Hub refuses, with which status and error code (None: it hangs up); what is said
NOT_DOWNLOADED = {
    "a/b1": (("/api/", 401, "RepoNotFound"), "401 licence hf auth login"),
    "a/b2": (("/resolve/", 403, "GatedRepo"), "403 licence hf auth login"),
    "a/b3": (("/api/", 404, ""), "404"),
    "a/b4": (None, "network"),
}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the Hub."""

    def do_GET(self):
        path = self.path.split("?")[0]
        refused = [what for name, (what, _) in NOT_DOWNLOADED.items() if f"/{name}" in path]
        if refused == [None]:
            return self.connection.close()
        part, status, code = refused[0] if refused else ("", 200, "")
        answer = dict(id="owner/name", sha=COMMIT, siblings=[])
        if "/tree/" in path:
            answer = [
                dict(type="file", path=file, size=len(file), oid="") for file in WANTED + SURPLUS
            ]
        file = path.partition(f"/resolve/{COMMIT}/")[2]  # it holds its own name
        body = file.encode() if file else json.dumps(answer).encode()
        self.send_response(status if part in path else 200)
        for key, value in {
            "X-Error-Code": code,
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hash(body)}"',
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield server
        server.shutdown()


def download(home: Path, hub: ThreadingHTTPServer, *names: str) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of scripts/download.py for each name; one process, as each
    imports PyTorch."""
    environment = {key: "" for key in os.environ if key.upper().startswith(("HF_", "HUGGING"))}
    environment |= dict(
        HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}",
        HF_HOME=str(home),
        NO_PROXY="127.0.0.1",
        HF_HUB_DISABLE_XET="1",
        PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
    )
    done = python("-c", program("downloads.py"), *names, cwd=home, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_hub_gives_the_files_that_are_read_and_the_cache_gives_them_again(tmp_path, hub):
    [(code, out, errors)] = download(tmp_path, hub, "owner/name").values()
    assert code == 0, errors
    place = Path(out.strip())
    files = {
        str(file.relative_to(place)): file.read_text()
        for file in place.rglob("*")
        if file.is_file()
    }
    assert files == {file: file for file in WANTED}
    hub.shutdown()
    hub.server_close()
    [offline] = download(tmp_path, hub, "owner/name").values()
    assert offline[:2] == [0, out], offline


def test_what_does_not_download_is_one_line_and_exit_code_2(tmp_path, hub):
    for name, (code, out, errors) in download(tmp_path, hub, *NOT_DOWNLOADED).items():
        *progress, line = errors.splitlines()
        assert (code, out, absent(f"{name} {NOT_DOWNLOADED[name][1]}", line)) == (2, "", []), errors
        assert all(other.strip().startswith("Fetching") for other in progress if other.strip())


@pytest.mark.parametrize("name", ["/none", "~nobody-here/x", "x" * 300, "a/..", "a/b--c"])
def test_a_name_that_is_neither_directory_nor_id_is_refused_without_asking(name):
    assert "not a Hub id" in refusal(find_checkpoint, name)


def test_an_empty_name_is_refused_as_one():
    """It would be the current directory's, as a Path."""
    assert refusal(find_checkpoint, "").startswith("checkpoint='': want a directory, or a Hub id")


@pytest.mark.parametrize(
    "file, words",
    [
        ("M.GGUF", "a GGUF file repository safetensors quantize="),
        ("m.bin", "a pickle repository safetensors"),
        ("model.pth", "gpt-fast's a pickle directory safetensors"),
        ("notes", "a file Hugging Face layout: config.json, *.safetensors"),
    ],
)
def test_a_file_is_no_checkpoint_and_its_directory_is_named_if_it_is_one(tmp_path, file, words):
    path = tmp_path / file
    put(path, b"")
    assert absent(f"{path} is {words}", refusal(find_checkpoint, str(path))) == []
    put(tmp_path / "config.json", {})
    assert refusal(find_checkpoint, str(path)).endswith(f"want its directory, {tmp_path}")


NEAR = """
checkpoints/tin -> in {}/checkpoints (near it: checkpoints/tiny); as a Hub id: LocalEntryNotFoundError: offline; check
{}/checkpoints/tin -> in {}/checkpoints (near it: {}/checkpoints/tiny); as a Hub id
tiny -> in {} (near it: checkpoints/tiny, checkpoints/tiny-draft), and not a Hub id of the form owner/name
Tiny-Draft -> in {} (near it: checkpoints/tiny-draft
smol -> in {} (near it: SMOLLM), and not
checkpoint/tiny -> (near it: checkpoints/tiny
empt -> in {}, and not
""".strip().splitlines()  # a name, {} for the current directory, and what is said of it


@pytest.mark.parametrize("case", NEAR)
def test_near_checkpoints_come_first_and_a_name_without_a_slash_is_not_asked_of_the_hub(
    tmp_path, monkeypatch, case
):
    for directory in ("checkpoints/tiny", "checkpoints/tiny-draft", "SMOLLM"):
        (tmp_path / directory).mkdir(parents=True)
        put(tmp_path / directory / "config.json", {})
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        MagicMock(side_effect=LocalEntryNotFoundError("offline")),
    )
    name, said = case.replace("{}", str(tmp_path)).split(" -> ")
    assert refusal(find_checkpoint, name).startswith(f"{name}: no such directory {said}")


# What is in a directory, and words of the line about it.
OTHERS = {
    "adapter_config.json adapter_model.safetensors": "config.json: no such file LoRA merge",
    "config.json adapter_model.safetensors": "no model.safetensors LoRA merge",
    "m.gguf": "config.json: no such file GGUF repository safetensors quantize=",
    "config.json m.gguf": "no model.safetensors GGUF repository safetensors",
    "config.json pytorch_model.bin": "no model.safetensors pickle repository convert",
    "config.json pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json": "pickle repository",
    "config.json model.pt": "no model.safetensors pickle repository",
    "model.pth tokenizer.model": "config.json: no such file gpt-fast's pickle directory",
    "config.json model.pth": "no model.safetensors gpt-fast's pickle directory",
    "config.json .cache/huggingface/download/x.incomplete": "no model.safetensors broke off fetch",
    "x.safetensors.incomplete": "config.json: no such file broke off fetch",
    "params.json consolidated.safetensors": "config.json: no such file Mistral's layout",
    "config.json model-00001-of-00002.safetensors": f"no model.safetensors {INDEX} fetch",
    "config.json": "no model.safetensors complete?",
    "tokenizer.model": "config.json: no such file want complete?",
    "config.json model.safetensors.index.json": f"{SHARD} no such file fetch",
}


@pytest.mark.parametrize("files", OTHERS)
def test_what_a_directory_holds_in_the_place_of_a_checkpoint_is_said(tmp_path, files):
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        put(tmp_path / file, dict(weight_map={Q: SHARD}) if file == INDEX else LLAMA)
    assert absent(OTHERS[files], refusal(load, tmp_path)) == []


@pytest.mark.parametrize(
    "config", [dict(model_type="bert"), dict(model_type="clip", text_config=dict(hidden_size=8))]
)
def test_an_encoder_is_refused_as_one(tmp_path, config):
    make(tmp_path)
    put(tmp_path / "config.json", config)
    assert absent(f"config.json {config['model_type']} encoder", refusal(load, tmp_path)) == []


@beside
def refused(directory: Path) -> Callable:
    """What the command line says of directories that hold something else."""
    named = (
        "config.json pytorch_model.bin",
        "m.gguf",
        "adapter_config.json",
        "config.json model.pth",
    )
    for files in named:
        (directory / files).mkdir()
        for file in files.split():
            put(directory / files / file, LLAMA)
        with_chat = dict(chat_template="{{ messages }}")
        put(directory / files / "tokenizer_config.json", with_chat)

    def run(files: str):
        return python("generate.py", "--checkpoint", directory / files, "-p", "x")

    return lambda: {files: run(files) for files in named}


def test_the_command_line_says_so_in_one_line_and_nothing_before(refused):
    for files, done in refused.items():
        said = one_line((done.returncode, done.stdout, done.stderr))
        assert absent(OTHERS.get(files, "LoRA"), said) == []


def test_a_directory_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = find_checkpoint(".")
    assert refusal(open_checkpoint, directory).startswith(
        f"{tmp_path / 'config.json'}: no such file; want a dir"
    )
    put(directory / "config.json", LLAMA)
    assert refusal(load, directory).startswith(f"{tmp_path}: no ")

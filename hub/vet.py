"""
Finds a checkpoint, downloads it, and says in one line what is wrong with it; device and memory.

open_checkpoint() is the door: a directory or a Hub id becomes a Checkpoint and its Tokenizer. What
a file says is checked where it is read (families.py, checkpoint.py, tokenizer.py); here is what
concerns the directory as a whole. Each mistake is a ValueError of one line.
"""

import gc
import math
import os
import re
import shutil
import sys
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

import torch

from hub.checkpoint import (
    INDEX,
    LAYOUT,
    WHOLE,
    Checkpoint,
    Weight,
    instead_of,
    read_json,
    what_is,
)
from hub.families import draft_kind
from hub.generation import read_sampling
from hub.tokenizer import Tokenizer
from model import DeltaCache, Config, KVCache

GIB = 2**30
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    WHOLE,
    INDEX,
    "model-*-of-*.safetensors",
]
NO_ID = "not a Hub id of the form owner/name, as HuggingFaceTB/SmolLM2-135M is"


# Finding a checkpoint


def open_checkpoint(
    name: str | Path, tokenizer: bool = True
) -> tuple[Checkpoint, Tokenizer | None]:
    """name: a directory or a Hub id."""
    directory = find_checkpoint(str(name))
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"{path}: no such file; {instead_of(directory)}")
    hf = read_json(path)
    if kind := draft_kind(hf):
        raise ValueError(
            f"{path}: {kind}'s, which drafts for a checkpoint: give its directory as draft"
        )
    checkpoint = Checkpoint(directory)
    if not checkpoint.paths:  # a file of weights that is not there, or not whole, raises
        raise ValueError(f"{directory}: no tensors in its files; fetch the checkpoint again")
    read_sampling(checkpoint)  # may raise
    return checkpoint, Tokenizer(checkpoint) if tokenizer else None


def find_checkpoint(name: str) -> Path:
    """A directory is taken as it is. A Hub id (owner/name) comes from the Hub's cache and is
    downloaded if needed."""
    if not name:  # an unset variable of the shell, say; a Path makes it the current directory
        raise ValueError("checkpoint='': want a directory, or a Hub id of the form owner/name")
    path = Path(os.path.expanduser(name))
    parent = path.absolute().parent
    if os.path.isdir(path):
        return path.resolve()  # in full, for the messages to come: the name may be "."
    if os.path.exists(path):
        if (parent / "config.json").exists():
            raise ValueError(f"{name} is a file: want its directory, {parent}")
        raise ValueError(f"{name} is {what_is(path.name) or f'a file: want {LAYOUT}'}")
    missing = f"{name}: no such directory"
    if os.path.isdir(parent):
        missing += f" in {parent}"
    if near := near_checkpoints(path):
        missing += f" (near it: {', '.join(near)})"
    if "/" not in name:  # the Hub would know some of these, of old
        raise ValueError(f"{missing}, and {NO_ID}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError:
        raise ValueError(f"{missing}, and {NO_ID}") from None
    # The client and its transport raise many kinds; each means that there is no checkpoint.
    except Exception as error:
        told = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{missing}; as a Hub id: {type(error).__name__}: {told}; check the name, the network "
            "and, of a model with a licence, `hf auth login`"
        ) from error


def near_checkpoints(path: Path) -> list[str]:
    """The checkpoints beside `path` and in ./checkpoints whose names are much like its name, the
    nearest first."""
    found = {}
    for parent in (Path("checkpoints"), path.parent):
        if os.path.isdir(parent):
            found |= {
                file.parent.name.lower(): str(file.parent) for file in parent.glob("*/config.json")
            }
    return [found[name] for name in get_close_matches(path.name.lower(), found, cutoff=0.5)]


# Device and memory


DTYPES = dict(
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    fp32=torch.float32,
    bf16=torch.bfloat16,
    fp16=torch.float16,
)


def find_device(name: str | torch.device | None, compile: bool = False) -> torch.device:
    """The device or, for None, the first GPU, else the CPU. A GPU becomes the current one: Triton
    launches there. compile: ValueError where Inductor would not find a C++ compiler."""
    # Where the driver is unusable, GPUs may be counted and yet not available.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [f"cuda:{i}" for i in range(gpus)]
    if torch.backends.mps.is_available():
        found.append("mps:0")
    found.append("cpu:0")
    if name is None:
        name = found[0].partition(":")[0]
    if str(name) not in found and f"{name}:0" not in found:
        raise ValueError(
            f"device={name}: want cpu, cuda, cuda:N or mps; PyTorch finds {', '.join(found)}"
        )
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    # The one that Inductor runs.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if compile and device.type == "cpu" and not shutil.which(compiler):
        raise ValueError(
            f"compile on a CPU runs {compiler}, which is not here: install it, or let CXX name "
            "another"
        )
    return device


def find_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    default = "float32" if device.type == "cpu" else "bfloat16"
    dtype = DTYPES[str(name or default).removeprefix("torch.")]
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and not torch.cuda.is_bf16_supported(False)
    ):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16: dtype=float16 or float32 "
            "runs there"
        )
    return dtype


def host_memory() -> int:
    if not hasattr(os, "sysconf"):  # Windows does not say
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device, ranks=1) -> int:
    """Bytes that a GPU has left, or the host, for each rank: half of its memory, where the system
    does not say more."""
    if device.type == "cuda":
        gc.collect()  # models that are gone, where they refer to themselves
        torch.cuda.empty_cache()  # what PyTorch holds of them
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, TypeError):  # no such file, no such line
        said = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        return int(said[1]) * 1024 // ranks
    return host_memory() // 2 // ranks


@contextmanager
def memory_advice(advice: str):
    """Turns running out of memory into a ValueError with this advice."""
    try:
        yield
    # A GPU's torch.OutOfMemoryError is one, and so is a CPU's.
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search("(out of|allocate) memory", str(error)):
            raise ValueError(advice) from None
        raise


def check_memory(
    models: list[tuple[Config, dict[str, Weight], dict[str, int]]],
    batch_size: int,
    cache_length: int,
    device: torch.device,
    dtype: torch.dtype,
    ranks=1,
    loaded=False,
    kind="16-bit",
    features=0,
) -> str:
    """What to say if memory runs out later. ValueError if weights and KV caches alone do not fit.

    models: their configs, tables of weights and, of quantized checkpoints, formats.bits_of(). The
    ranks' GPUs share both. loaded: the weights have their memory already. kind: the caches', of
    model.CACHES. features: numbers that are kept of each token for an EAGLE head."""
    share, there = 1, host_memory()
    if device.type == "cuda":
        share, there = ranks, free_memory(device)
    tokens = batch_size * cache_length
    weights, cache = 0, features * dtype.itemsize * tokens
    for config, table, bits in models:
        for name, weight in table.items():
            # Scales are not counted.
            size = math.prod(weight.shape) * bits.get(name, 8 * dtype.itemsize) / 8
            weights += size / (share if weight.rows or weight.columns else 1)
        cache += KVCache.bytes_per_token(config, dtype, kind, share) * tokens
        cache += DeltaCache.bytes_per_row(config, dtype) * batch_size / share
    no_draft = ", or no draft" if len(models) > 1 else ""
    advice = (
        f"out of memory: {weights / GIB:.2f} GiB of weights, {cache / GIB:.2f} GiB of cache "
        f"({batch_size} rows of {cache_length}) for {there / GIB:.2f} GiB on {device}; fewer "
        f"prompts, samples or tokens, or dtype{no_draft}, help"
    )
    if (0 if loaded else weights) + cache > there:
        raise ValueError(advice)
    return advice


def check_draft(name: str, draft: Tokenizer, target: Tokenizer):
    """ValueError if the draft's tokenizer is not the checkpoint's."""
    for i in range(min(draft.vocab_size, target.vocab_size)):
        theirs, ours = draft.token(i), target.token(i)
        if theirs != ours and None not in (theirs, ours):
            raise ValueError(
                f"draft={name}: token {i} is {theirs!r} there and {ours!r} in the checkpoint; "
                "want a draft with the same tokenizer, or draft=prompt-lookup"
            )


# A chat


def check_messages(messages):
    """ValueError unless these are a chat's messages: [{"role": ..., "content": ...}, ...]."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{messages!r:.60}: want a text, or messages, [{{'role': ..., 'content': ...}}, ...]"
        )
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {message!r:.60}: want a role and a content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        is_text = isinstance(content, str | list) and all(map(is_text_part, parts))
        if not is_text and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"message {message!r:.60}: want a role and a content, a text or text parts: "
                "[{'type': 'text', 'text': ...}, ...]"
            )


def is_text_part(part) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)

"""
Other engines that benchmark.py --against times on a CPU in turns with ours: llama.cpp, and
transformers' assisted generation. scripts/rivals.py times others on a GPU.
"""

if __name__ == "__main__":
    import sys

    print("others_on_cpu.py is no command: scripts/benchmark.py uses it", file=sys.stderr)
    raise SystemExit(2)

import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hub.vet import open_checkpoint
from scripts.measuring import Setup
from scripts.shapes import SHAPES

CONVERTER = "convert_hf_to_gguf.py"


def llama_cpp_run(what: str, setup: Setup) -> Callable[[], float]:
    """llama.cpp with the weights of a checkpoint, converted by its own code, and our number of
    threads -> a run as benchmark.one_run()'s, which returns the seconds a step."""
    args = setup.args
    if what in SHAPES or setup.cuda or args.batch > 1 or args.context or args.temperature:
        raise ValueError(
            "--against llama.cpp: want a checkpoint on the CPU, --batch 1, --context 0, "
            "--temperature 0"
        )
    import llama_cpp

    # It tells of each matrix that it rounds.
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        path = convert(what, setup, Path(folder, "model.gguf"))
        if args.quantize:
            rounded = Path(folder, "rounded.gguf")
            kind = {"int8": "Q8_0", "int4": "Q4_0"}[args.quantize]
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
            if llama_cpp.llama_model_quantize(bytes(path), bytes(rounded), params):
                raise ValueError(f"--against llama.cpp: it cannot round {what} to {kind}")
            path = rounded
        threads = torch.get_num_threads()
        model = llama_cpp.Llama(
            str(path),
            n_ctx=args.prompt_length + args.new_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            use_mmap=False,
            verbose=False,
        )

    def run() -> float:
        prompt = torch.randint(model.n_vocab(), (args.prompt_length,)).tolist()
        tokens = model.generate(prompt, temp=0)
        next(tokens)
        begun = time.perf_counter()
        for _ in range(args.new_tokens - 1):
            next(tokens)
        return (time.perf_counter() - begun) / (args.new_tokens - 1)

    return run


def convert(what: str, setup: Setup, path: Path) -> Path:
    """The checkpoint's weights as a file of llama.cpp's."""
    directory = open_checkpoint(what, tokenizer=False)[0].directory
    kinds = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    script = setup.args.llama_cpp / CONVERTER
    command = [sys.executable, script, directory, "--outfile", path]
    command += "--outtype", kinds[setup.dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "failed").splitlines()[-1]
        raise ValueError(f"--against llama.cpp: {CONVERTER}: {reason}")
    return path


def assisted_tokens_per_s(directories: list[Path], prompt: list[int], setup: Setup) -> float:
    """transformers' assisted generation, greedy, on the CPU; the median of the runs. directories:
    the model's and the draft's."""
    from transformers import AutoModelForCausalLM

    load = partial(AutoModelForCausalLM.from_pretrained, dtype=setup.dtype)
    target, draft = map(load, directories)
    tokens = torch.tensor([prompt])
    how = dict(max_new_tokens=setup.args.new_tokens, do_sample=False)
    rates = []
    for _ in range(setup.args.runs):
        begun = time.perf_counter()
        out = target.generate(tokens, assistant_model=draft, **how)
        rates.append((out.shape[1] - len(prompt)) / (time.perf_counter() - begun))
    return statistics.median(rates)

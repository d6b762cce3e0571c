"""
Repeats what README's first table says of other engines: Llama-2-7B's shape, random weights, a
prompt of 5 tokens, 200 new ones, temperature 0.8, top-k 200.

    python scripts/rivals.py gpt-fast vllm transformers
    python scripts/rivals.py gpt-fast --weights int4
    python scripts/rivals.py gpt-fast --ranks 4
    python scripts/rivals.py vllm --weights fp8 --batch 16 --dry-run

It needs a CUDA GPU, git, a network and, in --folder, 10 GB for the environment that each engine
gets, and for gpt-fast's weights 14 to 25 GB. Each engine gives a JSON line. tokens_per_s is of each
sequence and of a whole call, its prompt included, as gpt-fast counts. start_s is the first call with
what it compiles and, of vLLM and transformers, with making the model.

Not run by us on a GPU, as those at hand had no network: written on 2026-11-27 from these engines'
code and documentation. Of gpt-fast all steps but --compile and int4 ran on a CPU with a small model;
of vLLM and transformers nothing did. The table's figures come from the same versions and setting, by
other scripts. Our tests run --dry-run alone.
"""

import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

PACKAGES = {
    "gpt-fast": ("torch==2.11.*", "numpy", "sentencepiece", "tiktoken", "blobfile", "safetensors"),
    "vllm": ("vllm==0.26.*",),
    "transformers": ("torch==2.11.*", "transformers==5.17.*"),
}
REPOSITORY = "https://github.com/meta-pytorch/gpt-fast"
COMMIT = "32971d3129541c5bfb4f715abc33d1c5f408d204"
FILES = dict(bf16="model.pth", int8="model_int8.pth", int4="model_int4.g32.pth")  # of gpt-fast
WEIGHTS = {"gpt-fast": tuple(FILES), "vllm": ("bf16", "fp8"), "transformers": ("bf16",)}
TEMPERATURE, TOP_K, NEW_TOKENS, RUNS = 0.8, 200, 200, 5
PROMPT = [1, 300, 4000, 50, 600]
LLAMA_2_7B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
    eos_token_id=None,
)


# What runs in an engine's environment, in its folder, without anything else of this repository


def make_gpt_fast(weights: str, batch: int) -> None:
    """Random weights, and a tokenizer of as many words, where gpt-fast looks for them; once."""
    place, size = Path("checkpoints/7B"), LLAMA_2_7B["vocab_size"]
    if (place / FILES["bf16"]).exists():
        return
    import torch
    from sentencepiece import SentencePieceTrainer

    sys.path.insert(0, ".")
    from model import Transformer  # gpt-fast's

    place.mkdir(parents=True, exist_ok=True)
    words, prefix = (f"word{n}" for n in range(size)), str(place / "tokenizer")
    SentencePieceTrainer.train(
        sentence_iterator=words, model_prefix=prefix, model_type="word", vocab_size=size
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Transformer.from_name("7B")
    torch.save(model.cpu().state_dict(), place / "part.pth")
    (place / "part.pth").rename(place / FILES["bf16"])


def time_vllm(weights: str, batch: int) -> None:
    from vllm import LLM, SamplingParams

    Path("config.json").write_text(json.dumps(LLAMA_2_7B))
    begun = time.perf_counter()
    how = dict(load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024)
    llm = LLM(model=".", quantization=None if weights == "bf16" else weights, **how)
    sampling = SamplingParams(
        temperature=TEMPERATURE,
        top_k=TOP_K,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [dict(prompt_token_ids=PROMPT)] * batch
    report(begun, lambda: llm.generate(prompts, sampling, use_tqdm=False))


def time_transformers(weights: str, batch: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    begun = time.perf_counter()
    with torch.device("cuda"):
        config = LlamaConfig(**LLAMA_2_7B)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        prompts = torch.tensor([PROMPT] * batch)
    # With a static cache generate() compiles the forward by itself.
    how = dict(max_new_tokens=NEW_TOKENS, do_sample=True, cache_implementation="static")
    how |= dict(temperature=TEMPERATURE, top_k=TOP_K)
    report(begun, lambda: model.generate(prompts, **how).tolist())


def report(begun: float, call: Callable) -> None:
    """Prints the figures. begun: when the start began; call() makes NEW_TOKENS of each sequence."""
    times = [begun]
    for _ in range(1 + RUNS):
        call()
        times.append(time.perf_counter())
    start, *seconds = (after - before for before, after in zip(times, times[1:]))
    print(json.dumps(dict(tokens_per_s=NEW_TOKENS / statistics.median(seconds), start_s=start)))


INSIDE = {"gpt-fast": make_gpt_fast, "vllm": time_vllm, "transformers": time_transformers}


# What runs here


def commands(engine: str, args: Namespace) -> list[tuple[Path, list]]:
    """Folders and what is run there, one after the other; the last one prints the figures."""
    folder = args.folder / engine
    python, source = folder / "env" / "bin" / "python", folder / "source"
    inside = [python, Path(__file__).resolve(), "--inside", engine, args.weights, args.batch]
    found = [
        (folder, [sys.executable, "-m", "venv", "env"]),
        (folder, [python, "-m", "pip", "install", "--quiet", *PACKAGES[engine]]),
    ]
    if engine != "gpt-fast":
        return [*found, (folder, inside)]
    # gpt-fast reads a model's kind from its path, so that is relative.
    path = Path("checkpoints/7B", FILES[args.weights])
    found += [
        (folder, ["git", "init", "--quiet", "source"]),
        (source, ["git", "fetch", "--quiet", "--depth", 1, REPOSITORY, COMMIT]),
        (source, ["git", "checkout", "--quiet", COMMIT]),
        (source, inside),
    ]
    if args.weights != "bf16":
        original = path.with_name(FILES["bf16"])
        rounding = ["--checkpoint_path", original, "--mode", args.weights, "--groupsize", 32]
        found.append((source, [python, "quantize.py", *rounding]))
    start = ["env", "ENABLE_INTRA_NODE_COMM=1", python, "-m", "torch.distributed.run"]
    start += ["--standalone", "--nproc-per-node", args.ranks]
    how = ["--compile", "--checkpoint_path", path, "--num_samples", RUNS]
    how += ["--prompt", len(PROMPT), "--max_new_tokens", NEW_TOKENS, "--batch_size", args.batch]
    how += ["--temperature", TEMPERATURE, "--top_k", TOP_K]
    start = start if args.ranks > 1 else [python]
    return [*found, (source, [*start, "generate.py", *how])]


def figures(engine: str, said: str) -> dict:
    """What the last command printed -> tokens_per_s and start_s."""
    if engine != "gpt-fast":
        return json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
    names = dict(tokens_per_s="Average tokens/sec", start_s="Compilation time")
    return {key: float(re.search(rf"{name}: ([\d.]+)", said)[1]) for key, name in names.items()}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from cli.options import Parser, within

    parser = Parser(__doc__)
    add = parser.add_argument
    add("engines", nargs="+", choices=PACKAGES, metavar="ENGINE", help=", ".join(PACKAGES))
    add("--weights", default="bf16", help="or int8, int4 of gpt-fast, fp8 of vllm (default: bf16)")
    add("--batch", type=within(int, 1), default=1, metavar="N", help="default: 1")
    add("--ranks", type=within(int, 1), default=1, metavar="N", help="GPUs, of gpt-fast")
    add("--folder", type=Path, default=Path("rivals"), help="default: rivals")
    add("--dry-run", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    for engine in args.engines:
        if args.weights not in WEIGHTS[engine]:
            known = ", ".join(WEIGHTS[engine])
            parser.error(f"--weights {args.weights}: {engine} has {known} here")
        if args.ranks > 1 and engine != "gpt-fast":
            parser.error(f"--ranks {args.ranks}: goes with gpt-fast alone")
    for engine in args.engines:
        for folder, command in commands(engine, args):
            command = [str(word) for word in command]
            if args.dry_run:
                print(f"(cd {shlex.quote(str(folder))} && {shlex.join(command)})")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise ValueError(f"{shlex.join(command)}: exit code {done.returncode}, see above")
        if not args.dry_run:
            what = dict(engine=engine, weights=args.weights, batch=args.batch, ranks=args.ranks)
            print(json.dumps(what | figures(engine, done.stdout)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        engine, weights, batch = sys.argv[2:]
        INSIDE[engine](weights, int(batch))
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from cli.errors import report_errors

        report_errors(main)

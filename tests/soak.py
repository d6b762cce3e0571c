"""
Generates for a long time in one process: memory stays flat, and the tokens are those of a fresh process.

    for how in plain compiled draft chat; do python tests/soak.py --how $how --generations 2500; done

Prompts, their number and lengths, new tokens, seeds and temperatures are random. Memory is what the process holds after
200 generations (a fifth, of fewer than 1000), and after each quarter of the rest: a growth that ends is a cache's, one
that goes on is a leak. 50 of the generations are done again in a fresh process, in another order.

A fresh process reads at once what a chat has read turn by turn. In bf16 another token may be the likeliest then: 5 of
50 answers differed, on an H200 and on a CPU. --dtype float32 shows whether there is another reason.
"""
import argparse
import json
import random
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import torch  # noqa: E402

from cli.chat import Chat  # noqa: E402
from completion import Completion  # noqa: E402
from generate import LLM  # noqa: E402
from helpers import DRAFT, TINY  # noqa: E402

WORDS = "Once upon a time there was little fox who lived in the wood and had friend Tom Sue dog cat".split()
OPTIONS = dict(plain={}, compiled=dict(compile=True), draft=dict(draft=str(DRAFT), draft_tokens="3"), chat={})
WARM_UP, REPEATED, GROWTH = 200, 50, 16  # MiB


def resident(device: str) -> float:
    """MiB: of the process, and on a GPU of PyTorch's tensors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = torch.cuda.memory_allocated() if device == "cuda" else 0
    return (pages * 4096 + tensors) / 2 ** 20


def answers(llm: LLM, seed: int, how: str) -> list[list[int]]:
    """A draft moves rows on at paces of their own, so sampled tokens need not repeat; greedy ones do."""
    rng = random.Random(seed)
    prompts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 40))) for _ in range(rng.randrange(1, 4))]
    temperature = 0 if how == "draft" or seed % 2 else 0.8
    completions = llm(prompts, max_new_tokens=rng.randrange(1, 24), temperature=temperature, seed=seed)
    return [completion.tokens for completion in completions]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=OPTIONS, default="plain")
    parser.add_argument("--generations", type=int, default=2500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--again", help=argparse.SUPPRESS)  # JSON: seeds or, of a chat, prompts' tokens and limits
    args = parser.parse_args()
    rows = 1 if args.how == "chat" else 3
    llm = LLM(str(TINY), max_batch_size=rows, max_seq_length=256, quiet=True, device=args.device, dtype=args.dtype,
              temperature=0, **OPTIONS[args.how])

    def repeat(what) -> list:
        if args.how != "chat":
            return answers(llm, what, args.how)
        prompt_tokens, limit = what
        completion = Completion("", prompt_tokens, llm.tokenizer, limit)
        list(llm.complete([completion]))
        return [completion.tokens]

    if args.again:
        print(json.dumps([repeat(what) for what in json.loads(args.again)]))
        return 0
    rng, kept, begun = random.Random(0), {}, time.monotonic()
    warm_up, memory = min(WARM_UP, args.generations // 5), []
    marks = {warm_up + (args.generations - warm_up) * quarter // 4 for quarter in range(5)}
    repeated = set(rng.sample(range(args.generations), min(REPEATED, args.generations)))
    chat = Chat(llm, Namespace(max_new_tokens=12, stop=[], system=None, quiet=True, show_thinking=False))
    for i in range(args.generations):
        if args.how == "chat":
            with open("/dev/null", "w") as null, redirect_stdout(null):
                chat.turn(" ".join(rng.choices(WORDS, k=rng.randrange(1, 30))))
            answer = chat.answers[-1]
            what, tokens = [answer.prompt_tokens, answer.limit], [answer.tokens]
        else:
            what, tokens = i, answers(llm, i, args.how)
        if i in repeated:
            kept[json.dumps(what)] = tokens
        if i + 1 in marks:
            memory.append(resident(args.device))
    grown = [now - memory[0] for now in memory[1:]]
    questions = sorted(kept, key=hash)
    dtype = ["--dtype", args.dtype] if args.dtype else []
    command = [sys.executable, __file__, "--how", args.how, "--device", args.device, *dtype,
               "--again", f"[{','.join(questions)}]"]
    fresh = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    different = sum(tokens != kept[question] for question, tokens in zip(questions, fresh))
    seconds, growth = time.monotonic() - begun, ", ".join(f"{more:+.1f}" for more in grown)
    print(f"{args.how}: {args.generations} generations in {seconds:.0f} s, memory {memory[0]:.0f} MiB, then {growth}; "
          f"{different} of {len(fresh)} differ from a fresh process's")
    return 1 if grown[-1] > GROWTH or different else 0


if __name__ == "__main__":
    sys.exit(main())

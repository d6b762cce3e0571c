"""
Generates for a long time in one process: memory stays flat, and the tokens are those of a fresh
process.

    for how in plain compiled draft chat; do
        python tests/programs/soak.py --how $how --generations 2500
    done

Prompts, their number and lengths, new tokens, seeds and temperatures are random. Memory is what the
process holds after each fifth of the generations: a growth that ends is a cache's, one that goes on
is a leak. The last 50 generations are done again in a fresh process, the last one first.

A fresh process reads at once what a chat has read turn by turn. In bf16 another token may be the
likeliest then: 5 of 50 answers differed, on an H200 and on a CPU. --dtype float32 shows whether
there is another reason.
"""

import argparse
import random
import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import torch  # noqa: E402

from cli.chat import Chat  # noqa: E402
from helpers import DRAFT, TINY  # noqa: E402
from llm import LLM, Completion  # noqa: E402

TEXT = "Once upon a time there was little fox who lived in the wood and had friend Tom Sue dog cat"
WORDS = TEXT.split()
OPTIONS = dict(
    plain={}, compiled=dict(compile=True), draft=dict(draft=str(DRAFT), draft_tokens="3"), chat={}
)
REPEATED, GROWTH = 50, 16  # MiB


def resident(device: str) -> float:
    """MiB: of the process, and on a GPU of PyTorch's tensors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = torch.cuda.memory_allocated() if device == "cuda" else 0
    return (pages * 4096 + tensors) / 2**20


def load(args: Namespace) -> LLM:
    return LLM(
        str(TINY),
        max_batch_size=1 if args.how == "chat" else 3,
        max_seq_length=256,
        quiet=True,
        device=args.device,
        dtype=args.dtype,
        temperature=0,
        **OPTIONS[args.how],
    )


def fresh_answers(args: Namespace, questions: list) -> list[list[list[int]]]:
    llm = load(args)
    return [answers(llm, question, args.how) for question in questions]


def answers(llm: LLM, question: int | list, how: str) -> list[list[int]]:
    """question: a seed or, of a chat, the prompt's tokens and a limit. A draft moves rows on at
    paces of their own, so sampled tokens need not repeat; greedy ones do."""
    if how == "chat":
        prompt_tokens, limit = question
        completions = [Completion("", prompt_tokens, llm.tokenizer, limit)]
        list(llm.complete(completions))
    else:
        rng = random.Random(question)
        prompts = [
            " ".join(rng.choices(WORDS, k=rng.randrange(1, 40))) for _ in range(rng.randrange(1, 4))
        ]
        temperature = 0 if how == "draft" or question % 2 else 0.8
        completions = llm(
            prompts, max_new_tokens=rng.randrange(1, 24), temperature=temperature, seed=question
        )
    return [completion.tokens for completion in completions]


def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--how", choices=OPTIONS, default="plain")
    parser.add_argument("--generations", type=int, default=2500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    args = parser.parse_args()
    llm = load(args)
    rng, asked, memory = random.Random(0), [], []
    chat = Chat(
        llm, Namespace(max_new_tokens=12, stop=[], system=None, quiet=True, show_thinking=False)
    )
    for i in range(args.generations):
        if args.how == "chat":
            with open("/dev/null", "w") as null, redirect_stdout(null):
                chat.turn(chat.messages, " ".join(rng.choices(WORDS, k=rng.randrange(1, 30))))
            answer = chat.answers[-1]
            asked.append(([answer.prompt_tokens, answer.limit], [answer.tokens]))
        else:
            asked.append((i, answers(llm, i, args.how)))
        if (i + 1) % (args.generations // 5) == 0:
            memory.append(resident(args.device))
    questions, expected = zip(*reversed(asked[-REPEATED:]))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        fresh = pool.submit(fresh_answers, args, questions).result()
    different = sum(tokens != other for tokens, other in zip(expected, fresh, strict=True))
    growth = ", ".join(f"{later - memory[0]:+.1f}" for later in memory[1:])
    print(
        f"{args.how}: {args.generations} generations, memory {memory[0]:.0f} MiB, then {growth}; "
        f"{different} of the last {len(fresh)} differ from a fresh process's"
    )
    return memory[-1] - memory[0] > GROWTH or different > 0


if __name__ == "__main__":
    sys.exit(main())

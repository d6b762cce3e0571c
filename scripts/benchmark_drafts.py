"""
benchmark.py --speculate --draft mtp, or dflash: what a draft of this kind and size gains where a step
makes so many tokens.

Shapes have random weights, and no draft knows what they would say: acceptance is simulated, which
the line says. All else runs as it does with a real draft: its forwards, the verification, sampling
and acceptance. Each drafted token is kept with the same probability: the one with which the largest of
--draft-tokens makes --tokens-per-step.
"""

if __name__ == "__main__":
    import sys

    print("benchmark_drafts.py is no command: scripts/benchmark.py uses it", file=sys.stderr)
    raise SystemExit(2)

import gc
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from drafts import make_draft
from drafts.dflash import BlockConfig, DFlash, default_layers
from drafts.mtp import MtpHead
from drafts.policies import make_policy
from generate import Engine
from model import Config, LayerConfig, Transformer
from quantize import round_model
from scripts.benchmark_speculation import bound, middle, policies_of, until_the_end
from scripts.measuring import Setup
from scripts.shapes import MXFP4_SHAPES, SHAPES, fill, random_model
from speculative import SLACK, Speculator, accept

KINDS = "mtp", "dflash"
MTP_TOKENS = 3  # drafted where nothing is said; of DFlash it is a block's
STEPS = 2, 3, 4  # tokens of a step
DFLASH_LAYERS, BLOCK_SIZE = 5, 16  # as Qwen3-4B's and 8B's drafts have them
GPT_OSS = dict(n_layer=8, ffn_dim=7680, qkv_bias=True, o_bias=True)
# shape -> what the published draft (z-lab's) has that is not as large as the target: places are the
# target's layers whose output it reads, size a block's tokens.
DFLASH = {
    "qwen3.5-27b": dict(n_head=32, n_kv_head=8, head_dim=128, places=(1, 16, 31, 46, 61)),
    "gpt-oss-20b": GPT_OSS | dict(places=(1, 6, 11, 16, 21), size=8),
    "gpt-oss-120b": GPT_OSS | dict(places=(1, 9, 17, 25, 33), size=10),
}


def random_draft(kind: str, own: dict, target: Transformer, setup: Setup) -> Transformer:
    """own: what dflash_sizes() takes. Rounded as the target is; it takes embedding and head from there."""
    config = target.config
    kinds = (layer for layer in reversed(config.layers) if not layer.delta and layer.kv_of is None)
    layer = next(kinds)
    before = torch.get_default_dtype()
    torch.set_default_dtype(setup.dtype)
    try:
        with torch.device("meta"):
            if kind == "mtp":
                one = replace(config, layers=(layer,), tied=False, ple_dim=0)
                draft = MtpHead(replace(one, vocab_size=1), config.n_layer)
                draft.head_size = config.vocab_size
            else:
                draft = DFlash(*dflash_sizes(config, own))
    finally:
        torch.set_default_dtype(before)
    draft = fill(draft, setup.device)
    if setup.args.quantize:
        round_model(draft, setup.args.quantize, setup.group(config))
    return draft


def dflash_sizes(config: Config, own: dict) -> tuple[Config, BlockConfig]:
    """Of a draft whose layers are as large as a dense target's, but for what own says (DFLASH).
    ValueError for a mixture of which that is not known."""
    if not own and any(layer.moe for layer in config.layers):
        raise ValueError(
            f"--draft dflash: want a dense shape, or one of {', '.join(DFLASH)}: drafts of mixtures "
            "have sizes of their own"
        )
    names = "dim", "n_head", "n_kv_head", "head_dim", "ffn_dim", "context", "norm_eps"
    sizes = {name: getattr(config, name) for name in names} | own
    n, size = sizes.pop("n_layer", DFLASH_LAYERS), sizes.pop("size", BLOCK_SIZE)
    places = sizes.pop("places", default_layers(config.n_layer, n))
    layer = next(layer for layer in config.layers if not layer.delta)
    layers = (LayerConfig(rope=layer.rope),) * n
    block = BlockConfig(tuple(i + 1 for i in places), config.dim, size, mask=0)
    return Config(layers=layers, vocab_size=1, qk_norm="head", **sizes), block


def rate_of(tokens: float, k: int) -> float:
    """How probable each of k drafted tokens must be kept, where those before it are, so that a step
    makes so many tokens in the mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        made = sum(middle**i for i in range(k + 1))
        low, high = (middle, high) if made < tokens else (low, middle)
    return low


class Simulated:
    """Engine.sample() of a target whose acceptance is drawn. rate: a tensor, which a CUDA graph
    reads anew."""

    def __init__(self, engine: Engine):
        self.sample, self.rate = engine.sample, torch.zeros((), device=engine.device)

    def __call__(self, function: Callable, logits: Tensor, at: Tensor, *given):
        found = self.sample(function, logits, at, *given)
        if function is not accept:
            return found
        tokens, logprobs, _ = found
        drafted, _, proposed = given
        drawn = torch.rand(len(drafted), drafted.shape[1] - 1, device=drafted.device)
        kept = (drawn < self.rate).long().cumprod(1).sum(1)
        return tokens, logprobs, torch.minimum(kept, proposed)


def simulate(what: str, setup: Setup, bar: tqdm) -> Iterator[dict]:
    """A JSON line for each of --tokens-per-step, and of --draft-tokens."""
    args, cuda = setup.args, setup.cuda
    if what not in SHAPES:
        raise ValueError(f"--draft {args.draft}: {what} is no shape: acceptance is simulated")
    if setup.team.ranks > 1:
        raise ValueError(f"--draft {args.draft}: want --ranks 1")
    own = DFLASH.get(what, {}) if args.draft == "dflash" else {}
    most = MTP_TOKENS if args.draft == "mtp" else own.get("size", BLOCK_SIZE) - 1
    names = (args.draft_tokens or str(most)).split(",")
    k = max((int(name) for name in names if name.isdecimal()), default=most)
    steps = args.tokens_per_step or [step for step in STEPS if step <= k + 1]
    for wanted in steps:
        if not 1 <= wanted <= k + 1:
            raise ValueError(
                f"--tokens-per-step {wanted:g}: want 1 to {k + 1} with --draft-tokens {k}"
            )
    gc.collect()
    torch._dynamo.reset()
    where = setup.device, setup.dtype
    model = random_model(SHAPES[what], *where, None, what in MXFP4_SHAPES)
    model = setup.finish(model, None)
    draft = random_draft(args.draft, own, model, setup)
    length = args.prompt_length + args.new_tokens
    places = draft.target_places if args.draft == "mtp" else draft.block.places
    target = setup.engine(model, length, features=places, spare=SLACK)
    target.sample = simulated = Simulated(target)
    made = make_draft(target, draft, setup.engine)
    policy = make_policy(names[0] if len(names) == 1 else "auto")
    speculator = Speculator(target, made, policy)
    if target.compiled:
        target.warm_up(args.batch)
        speculator.warm_up(args.batch)
    policies = policies_of(names, speculator)
    seeds = itertools.count(args.seed)

    def one_run(runner: Engine | Speculator) -> float:
        torch.manual_seed(next(seeds))
        prompts = torch.randint(model.config.vocab_size, (args.batch, args.prompt_length)).tolist()
        times = until_the_end(runner, prompts, args.new_tokens, set())
        bar.update()
        return statistics.mean(times)

    one_run(target)  # warms up
    plain = statistics.median(one_run(target) for _ in range(args.runs))
    for wanted, name in itertools.product(steps, names):
        simulated.rate.fill_(rate_of(wanted, k))
        speculator.policy = policies[name]
        runs = []
        for _ in range(args.runs):
            speculator.counts = Counter(dict.fromkeys(speculator.counts, 0))
            run = dict(mean=one_run(speculator)) | speculator.counts
            run["tokens"] = 1 + run["accepted"] / run["row_steps"]
            run["speed_up"] = plain / run["mean"]
            runs.append(run)
        run = middle(runs)
        result = setup.describe(what) | dict(
            draft=args.draft,
            draft_tokens=name,
            simulated_tokens_per_step=wanted,
            tokens_per_step=run["tokens"],
            plain_ms_per_token=plain,
            ms_per_token=run["mean"],
            tokens_per_s=1e3 * args.batch / run["mean"],
            speed_up=run["speed_up"],
        )
        if cuda and name.isdecimal():
            result |= bound(speculator, int(name), args.batch, result, runs)
        yield result

"""
benchmark.py --speculate: a draft against plain decoding of the same batch, in the same run.

A public shape has no small model that knows what a large one would say. So the bundled model is
widened to the shape: it costs what the shape does, and keeps its own function, which the bundled
drafts know. An EAGLE head is widened, too; the small draft keeps its own cost.

Names: tiny is what is bundled, wide what comes of it; d and D are their dims.
"""

if __name__ == "__main__":
    import sys

    print("benchmark_speculation.py is no command: scripts/benchmark.py uses it", file=sys.stderr)
    raise SystemExit(2)

import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from drafts import make_draft, open_draft
from drafts.dflash import DFlashDraft
from drafts.eagle import Head, HeadCheckpoint, head_weights
from drafts.heads import HeadDraft
from drafts.policies import make_policy
from drafts.shared_kv import SharedKVDraft
from generate import Engine, generate
from hub.checkpoint import Checkpoint, hf_weights, part_of, take
from hub.formats import load
from hub.vet import open_checkpoint
from llm import TINY
from model import Block, Config, LayerConfig, RMSNorm, Transformer
from scripts.measuring import Setup, busy_share, graph_seconds
from scripts.others_on_cpu import assisted_tokens_per_s
from scripts.shapes import SHAPES, fill, random_model
from speculative import SLACK, DraftModel, Policy, Speculator
from tp import Shard, draft_splitter

STARTS = "Once upon a time, there was", "One day", "In the park", "Every night"
HEROES = "a little girl named Lily", "a big dog", "Tom and his mom", "an old tree"
OPENINGS = [f"{start}, {hero}" for hero in HEROES for start in STARTS]


# Widening


@torch.no_grad()
def widen(
    tiny: Transformer, config: Config, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A model of config's shape and cost, tiny's vocabulary and tiny's function: more heads, ffn
    rows and layers are random and write nothing, more residual coordinates stay zero, and norms
    make up for these in their mean square.

    ValueError if tiny does not fit into the shape."""
    small = tiny.config
    d, D = small.dim, config.dim
    for name in ("dim", "n_layer", "n_kv_head", "ffn_dim", "context"):
        if getattr(small, name) > getattr(config, name):
            raise ValueError(
                f"--speculate: the bundled model's {name} of {getattr(small, name)} exceeds the "
                "shape's"
            )
    if config.head_dim != small.head_dim or config.n_kv_head < small.n_head:
        raise ValueError(
            f"--speculate: want heads of {small.head_dim}, {small.n_head} kv heads, for the "
            "bundled model"
        )
    own = dict(
        vocab_size=small.vocab_size,
        norm_eps=small.norm_eps * d / D,
        qk_norm=None,
        layers=(LayerConfig(rope=small.layers[0].rope),) * config.n_layer,
        tied=False,
    )
    wide = random_model(replace(config, **own), device, dtype)
    wide.embed.weight[:, d:] = 0
    wide.embed.weight[:, :d] = tiny.embed.weight
    wide.head.weight[:, :d] = tiny.head.weight
    widen_norm(wide.norm, tiny.norm)
    for layer in wide.layers:
        write_nothing(layer)
    for layer, of_tiny in zip(wide.layers, tiny.layers):
        widen_layer(layer, of_tiny, small, config, [0])
    return wide


@torch.no_grad()
def widen_head(tiny: Head, target: Transformer, config: Config) -> Head:
    """The bundled head for target, the bundled model widened to config's shape: it costs what an
    EAGLE-3 head of that shape does, and has tiny's function. Of its 32,000 rows of output tiny's
    tokens are the first, and no other counts: see HeadDraft.choose()."""
    d, D = tiny.config.dim, config.dim
    # The target may be a rank's part.
    sizes = dict(n_head=config.n_head, n_kv_head=config.n_kv_head, ffn_dim=config.ffn_dim)
    whole = replace(target.config, layers=target.config.layers[:1], **sizes)
    outputs = max(32000, tiny.options.vocab_size)
    options = replace(tiny.options, target_dim=D, vocab_size=outputs)
    with torch.device("meta"):
        wide = Head(whole, options, tiny.vocabulary)
    wide = fill(wide.to(target.embed.weight.dtype), target.embed.weight.device)
    wide.embed = target.embed
    [layer], [of_tiny] = wide.layers, tiny.layers
    write_nothing(layer)
    widen_layer(layer, of_tiny, tiny.config, config, [0, D])
    widen_norm(layer.state_norm, of_tiny.state_norm)
    widen_norm(wide.norm, tiny.norm)
    wide.head.weight[: len(tiny.head.weight), :d] = tiny.head.weight
    wide.fc.weight[d:] = 0
    for n in range(len(options.places)):
        wide.fc.weight[:d, n * D : n * D + d] = tiny.fc.weight[:, n * d : (n + 1) * d]
    return wide


def write_nothing(layer: Block) -> None:
    layer.attn.wo.weight.zero_()
    layer.ffn.w_down.weight.zero_()


def widen_norm(wide: RMSNorm, tiny: RMSNorm) -> None:
    d, D = len(tiny.weight), len(wide.weight)
    wide.weight[:d] = tiny.weight * (d / D) ** 0.5


def widen_layer(
    layer: Block, tiny: Block, small: Config, config: Config, inputs: list[int]
) -> None:
    """Gives the layer, which writes nothing, tiny's function. inputs: the columns of wqkv at which
    tiny's d inputs, and the next d, begin."""
    H, K, E, d = config.n_head, config.n_kv_head, config.head_dim, small.dim
    widen_norm(layer.attn_norm, tiny.attn_norm)
    widen_norm(layer.ffn_norm, tiny.ffn_norm)
    wqkv = layer.attn.wqkv.weight.unflatten(0, (-1, E))  # [H + 2 K, E, D or 2 D]
    of_tiny = tiny.attn.wqkv.weight.unflatten(0, (-1, E))
    wo, wo_of_tiny = layer.attn.wo.weight, tiny.attn.wo.weight
    for head in range(small.n_head):
        # Each gets a kv head of its own, and is the first of those that share it.
        q, kv = head * (H // K), head // (small.n_head // small.n_kv_head)
        places = {  # in wqkv: in tiny's
            q: head,
            H + head: small.n_head + kv,
            H + K + head: small.n_head + small.n_kv_head + kv,
        }
        for at, at_tiny in places.items():
            for n, column in enumerate(inputs):
                own = of_tiny[at_tiny, :, n * d : (n + 1) * d]
                wqkv[at, :, column : column + d] = own
        wo[:d, q * E : (q + 1) * E] = wo_of_tiny[:, head * E : (head + 1) * E]
    gates = layer.ffn.w_gate_up.weight.chunk(2)
    for wide, own in zip(gates, tiny.ffn.w_gate_up.weight.chunk(2)):
        wide[: len(own), :d] = own
    layer.ffn.w_down.weight[:d, : small.ffn_dim] = tiny.ffn.w_down.weight


def part_for(shard: Shard, whole: Transformer) -> Transformer:
    """The rank's part of a model, or of a head."""
    make, table = Transformer, hf_weights
    if isinstance(whole, Head):
        make = partial(Head, options=whole.options, vocabulary=whole.vocabulary)
        table = partial(head_weights, options=whole.options)
    with torch.device("meta"):
        model = shard.model(make)
    like = whole.embed.weight
    model = model.to(like.dtype).to_empty(device=like.device).requires_grad_(False)
    ours, theirs = dict(model.named_parameters()), dict(whole.named_parameters())
    places = table(model.config)
    for name, place in table(whole.config).items():
        tensor = take(place.of(theirs[place.ours]), part_of(place, shard))
        places[name].of(ours[place.ours]).copy_(tensor)
    return model


# The target and its draft


def make_target(what: str, checkpoint: Checkpoint, setup: Setup) -> Transformer:
    """The checkpoint or, of a shape, the bundled model widened to it; a rank's part."""
    if what not in SHAPES:
        return setup.load(checkpoint)
    tiny = load(checkpoint, torch.device("cpu"), torch.float32)
    model = widen(tiny, SHAPES[what], setup.device, setup.dtype)
    shard = setup.shard(model.config)
    return setup.finish(part_for(shard, model) if shard else model, shard)


def draft_model(
    what: str, checkpoint: Checkpoint, target: Transformer, setup: Setup
) -> Transformer:
    """The bundled draft at its own cost, or the head at that of the shape's; a rank's part."""
    if isinstance(checkpoint, HeadCheckpoint) and what in SHAPES:
        tiny = load(checkpoint, torch.device("cpu"), torch.float32)
        head = widen_head(tiny, target, SHAPES[what])
        outputs = head.options.vocab_size
        split = draft_splitter(setup.team, replace(head.config, vocab_size=outputs))
        if split:
            shard = split(head.config, 1, outputs=outputs)
            head = part_for(shard, head)
            shard.parallelize(head)
        return head
    split = draft_splitter(setup.team, checkpoint.counted())
    model = load(checkpoint, setup.device, setup.dtype, split=split)
    if isinstance(model, Head):
        model.share(target)
    return model


# The measurement


def until_the_end(
    runner: Engine | Speculator,
    prompts: list[list[int]],
    new_tokens: int,
    stops: set[int],
    at_first: Callable = lambda: None,
) -> list[float]:
    """Milliseconds a token after the first, of each row, up to a stop token; at_first is called
    when that came."""
    counts, ended, first = [0] * len(prompts), {}, None
    for step in generate(runner, prompts, new_tokens):
        if first is None:
            at_first()
        now = time.perf_counter()
        first = first or now
        for b, new in enumerate(step):
            for token, _ in new:
                if b in ended:
                    break
                counts[b] += 1
                if token in stops or counts[b] == new_tokens:
                    ended[b] = 1e3 * (now - first) / max(1, counts[b] - 1)
                    if isinstance(runner, Speculator):
                        runner.finish(b)
        if len(ended) == len(prompts):
            break
    return list(ended.values())


def forwards_ms(speculator: Speculator, k: int, rows: int) -> tuple[float, float, float]:
    """Milliseconds of the target's forward that verifies k drafted tokens, of the draft's k
    forwards, and of the last of these, which reads a token a row. The first of a head reads what
    was kept, and makes states of its features. DFlash has one forward, and another that makes
    context of what was kept."""
    draft, target = speculator.draft, speculator.target
    if isinstance(draft, DFlashDraft):
        block, context = dflash_ms(draft, k, rows)
        return forward_ms(target, rows, k + 1), block + context, block
    if isinstance(draft, SharedKVDraft):
        one = shared_kv_ms(draft, rows)
        return forward_ms(target, rows, k + 1), k * one, one
    is_head = isinstance(draft, HeadDraft)
    first, other = (forward_ms(draft.engine, rows, T, draft) for T in (k + 1 if is_head else 2, 1))
    if is_head:
        features = target.model.features[:rows, : k + 1]
        with torch.no_grad():
            first += 1e3 * graph_seconds(lambda: draft.head.project(features))
    return forward_ms(target, rows, k + 1), first + (k - 1) * other, other


def forward_ms(engine: Engine, rows: int, T: int, draft: DraftModel | None = None) -> float:
    """A forward of T tokens a row at position 100, a CUDA graph of its own; the median of 20."""
    tokens = torch.randint(engine.model.config.vocab_size, (rows, T), device=engine.device)
    positions = 100 + torch.arange(T, device=engine.device).repeat(rows, 1)
    decoder = getattr(engine, "decoder", engine.model)

    def forward() -> None:
        more = {}
        if isinstance(draft, HeadDraft):
            more = dict(inputs=draft.head.inputs(tokens, draft.own_states(positions)))
        decoder(tokens, positions, engine.slots(200), **more)

    with torch.no_grad():
        return 1e3 * graph_seconds(forward)


@torch.no_grad()
def dflash_ms(draft: DFlashDraft, k: int, rows: int) -> tuple[float, float]:
    """Of a block with k masks, and of making context of k + 1 tokens."""
    device = draft.engine.device
    tokens = torch.randint(draft.vocab_size, (rows, k + 1), device=device)
    at = 100 + torch.arange(k + 1, device=device).repeat(rows, 1)
    block = graph_seconds(lambda: draft.fast.logits(draft.fast(tokens, at, draft.slots(200))))
    return 1e3 * block, 1e3 * graph_seconds(lambda: draft.read_features(at))


@torch.no_grad()
def shared_kv_ms(draft: SharedKVDraft, rows: int) -> float:
    """Of one drafted token a row."""
    model = draft.draft
    weight = model.before.weight
    x = weight.new_zeros(rows, 1, model.options.target_dim)
    at = torch.full((rows, 1), 100, device=weight.device)
    return 1e3 * graph_seconds(lambda: model(x, x, at, draft.target.slots(200)))


def read_bytes(draft: DraftModel | SharedKVDraft) -> int:
    """Of the draft's weights, what a forward of one token reads: its layers and its output. An
    output head in clusters counts whole."""
    if isinstance(draft, SharedKVDraft):
        model, more = draft.draft, (draft.draft.before, draft.draft.behind)
    else:
        model, more = draft.engine.model, ()
    parts = model.layers, model.norm, model.head, *more
    return sum(weight.nbytes for part in parts for weight in part.parameters())


def policies_of(names: list[str], speculator: Speculator) -> dict[str, Policy]:
    """The speculator's own, or for a list one of each name. ValueError for a number of drafted tokens
    that it has made no step for."""
    if len(names) == 1:
        return {names[0]: speculator.policy}
    seconds, policies = speculator.policy.seconds, {name: make_policy(name) for name in names}
    for name, policy in policies.items():
        if name.isdecimal() and int(name) not in speculator.step_of:
            raise ValueError(
                f"--draft-tokens {name}: a list takes {sorted(speculator.step_of)}; give others "
                "alone"
            )
        policy.begin(seconds, list(seconds))
    return policies


def middle(runs: list[dict], key: str = "mean") -> dict:
    return sorted(runs, key=lambda run: run[key])[len(runs) // 2]


def speculate(what: str, setup: Setup, bar: tqdm) -> Iterator[dict]:
    """A JSON line for each of --draft-tokens. It is long as target, draft and plain runs share one
    set of models and texts."""
    args, cuda = setup.args, setup.cuda
    opened = checkpoint, tokenizer = open_checkpoint(TINY if what in SHAPES else what)
    setup.check(checkpoint)
    name = "tiny-eagle" if args.draft == "eagle" else "tiny-draft"
    draft_checkpoint = open_draft(str(Path(TINY).with_name(name)), opened)
    large = cuda or what in SHAPES or args.batch > 1
    if args.against and (large or args.draft == "eagle" or args.temperature > 0):
        raise ValueError(
            "--against transformers: want a checkpoint on the CPU, --batch 1, --temperature 0, no "
            "--draft"
        )
    prompts = [tokenizer.encode_text(OPENINGS[row % len(OPENINGS)]) for row in range(args.batch)]
    length, context = max(map(len, prompts)) + args.new_tokens, checkpoint.config.context
    if length > context:
        raise ValueError(
            f"--new-tokens {args.new_tokens} behind a prompt of {length - args.new_tokens} exceed "
            f"the context of {context}"
        )
    text = prompts, args.new_tokens, tokenizer.stops
    seeds = itertools.count(args.seed)

    def one_run(runner: Engine | Speculator) -> dict:
        torch.manual_seed(next(seeds))  # the steps were timed, and drew, any number of times
        times = until_the_end(runner, *text)
        bar.update()
        return dict(first=min(times), last=max(times), mean=statistics.mean(times))

    gc.collect()
    torch._dynamo.reset()
    plain = setup.engine(make_target(what, checkpoint, setup), length, spare=SLACK)
    if plain.compiled:
        plain.warm_up(args.batch, alone=setup.team.ranks == 1)
    one_run(plain)  # warms up
    plains = []
    if cuda:  # its memory is needed
        plains = [one_run(plain) for _ in range(args.runs)]
        plain = None
        gc.collect()
    torch._dynamo.reset()

    names = args.draft_tokens.split(",")
    places = getattr(draft_checkpoint, "places", ())
    model = make_target(what, checkpoint, setup)
    target = setup.engine(model, length, features=places, spare=SLACK)
    model = draft_model(what, draft_checkpoint, model, setup)
    draft = make_draft(target, model, setup.engine)
    policy = make_policy(names[0] if len(names) == 1 else "auto")
    speculator = Speculator(target, draft, policy, setup.team.agree)
    if target.compiled:
        speculator.warm_up(args.batch)
    for name, policy in policies_of(names, speculator).items():
        speculator.policy, runs = policy, []
        plains = plains if cuda else []
        for _ in range(args.runs):
            if plain:  # in turns: a CPU that others use is faster at one time than at another
                plains.append(one_run(plain))
            speculator.counts = Counter(dict.fromkeys(speculator.counts, 0))
            run = one_run(speculator) | speculator.counts
            against = plains[-1] if plain else middle(plains)
            run["speed_up"] = against["mean"] / run["mean"]
            run["tokens"] = 1 + run["accepted"] / run["row_steps"]
            runs.append(run)
        result = setup.describe(what) | dict(
            draft=args.draft or "tiny-draft", ranks=setup.team.ranks, draft_tokens=name
        )
        result |= summarize(runs, middle(plains))
        if cuda and name.isdecimal():
            result |= bound(speculator, int(name), args.batch, result, runs)
        if cuda:
            result["gpu_busy"] = busy_share(partial(until_the_end, speculator, *text))
        if args.against:
            directories = [checkpoint.directory, draft_checkpoint.directory]
            rate = assisted_tokens_per_s(directories, prompts[0], setup)
            ratio = 1e3 / result["ms_per_token"]["mean"] / rate
            result["against"] = dict(transformers=dict(tokens_per_s=rate, ratio=ratio))
        yield result


def summarize(runs: list[dict], plain: dict) -> dict:
    """The middle run; what only a GPU measures is None."""
    run = middle(runs)
    speed_ups = sorted(run["speed_up"] for run in runs)
    return dict(
        plain_ms_per_token=plain["mean"],
        ms_per_token={key: run[key] for key in ("first", "last", "mean")},
        speed_up=statistics.median(speed_ups),
        speed_ups=speed_ups,
        tokens_per_step=run["tokens"],
        acceptance=run["accepted"] / max(1, run["accepted"] + run["rejecting_steps"]),
        accepted_of_drafted=run["accepted"] / max(1, run["drafted"]),
        **dict.fromkeys(("verify_ms", "drafts_ms", "draft_ms", "draft_bytes")),
        **dict.fromkeys(("bound", "share_of_bound", "gpu_busy")),
    )


def bound(speculator: Speculator, k: int, rows: int, result: dict, runs: list[dict]) -> dict:
    """What the forwards alone would give: tokens a step over their cost in plain steps."""
    verify, drafts, one = forwards_ms(speculator, k, rows)
    cost = (verify + drafts) / result["plain_ms_per_token"]
    return dict(
        verify_ms=verify,
        drafts_ms=drafts,
        draft_ms=one,
        draft_bytes=read_bytes(speculator.draft),
        bound=result["tokens_per_step"] / cost,
        share_of_bound=statistics.median(run["speed_up"] * cost / run["tokens"] for run in runs),
    )

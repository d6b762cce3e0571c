"""
Train the bundled pair, checkpoints/tiny and the draft that imitates it, on any
file of short stories, a blank line between two: two minutes on an H200. With
--eagle or --dflash, train an EAGLE-3 head or a DFlash draft for
checkpoints/tiny, on texts that it writes behind openings of these stories: the
head takes two and a half minutes on an H100.

    python scripts/train_tiny.py --text stories.txt.xz --eval validation.txt
    python scripts/train_tiny.py --eagle --text stories.txt.xz --eval valid.txt
    python scripts/train_tiny.py --dflash --text stories.txt.xz --eval valid.txt
    python scripts/train_tiny.py --measure --eval validation.txt
    python scripts/train_tiny.py --measure --eagle --eval validation.txt

--measure measures what is there. Each checkpoint is written beside its place,
then renamed.
"""

import signal

if __name__ == "__main__":
    # PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import io
import json
import lzma
import math
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from cli.errors import report_errors
from cli.options import Parser, within
from drafts import make_draft, open_draft
from drafts.dflash import BlockConfig, DFlash, dflash_weights
from drafts.eagle import EMBEDDING, Head, HeadConfig, head_weights
from drafts.heads import DraftHead
from generate import Engine, Sampling, generate
from hub.checkpoint import Weight, hf_weights, is_file, load_model, read_text, reading
from hub.families import config_from_hf
from hub.tokenizer import Tokenizer
from hub.vet import memory_advice, open_checkpoint
from model import Config, Transformer
from speculative import SLACK, Policy, Speculator

COMMON = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_act="silu",
    head_dim=128,
    num_key_value_heads=1,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
)
PAIR = {
    "tiny": dict(
        hidden_size=256, num_hidden_layers=5, num_attention_heads=2, intermediate_size=640
    ),
    "tiny-draft": dict(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=1, intermediate_size=384
    ),
}
FILES = {
    "model.safetensors",
    "tokenizer.model",
    "config.json",
    "generation_config.json",
    "README.md",
}
BOS, EOS = 1, 2
TEXT = 244  # tokens of each text that a head learns from
TEMPERATURES = 0.2, 0.2, 0.6, 1.0  # of these texts, in turns
# Of the target's hidden states: before layers 2 and 4 of its five, and behind the last.
PLACES = 2, 4, 5
DRAFT_VOCAB = 1024  # tokens that a head may draft
DRAFTED = 5  # tokens that it learns to draft one after the other
HEAD, BLOCKS, MEASURED, NEW_TOKENS = "tiny-eagle", "tiny-dflash", 5, 200
# Of the block: tokens, layers, and places of a text that it learns at in a step. <unk>, which no
# text has, is the mask.
BLOCK, BLOCK_LAYERS, ANCHORS, MASK = 8, 2, 24, 0
BLOCK_PLACES = 2, 3, 4  # whose hidden states it reads


def read_stories(path: Path) -> list[str]:
    is_file(path, inside=False)
    with reading(path):
        text = lzma.open(path).read() if path.suffix == ".xz" else path.read_bytes()
        return [
            story.strip()
            for story in text.decode().replace("\r\n", "\n").split("\n\n")
            if story.strip()
        ]


def train_tokenizer(stories: list[str], vocab_size: int) -> bytes:
    """A sentencepiece BPE; no space is added in front, so that a paragraph alone reads as it does
    within its story."""
    from sentencepiece import SentencePieceTrainer

    paragraphs, model = (
        (line for story in stories[:30000] for line in story.split("\n")),
        io.BytesIO(),
    )
    with reading("sentencepiece"):
        SentencePieceTrainer.train(
            sentence_iterator=paragraphs,
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            character_coverage=0.9999,
            bos_id=BOS,
            eos_id=EOS,
            minloglevel=2,
        )
    return model.getvalue()


def token_stream(stories: list[str], tokenizer: bytes) -> tuple[Tensor, Tensor]:
    """All stories as one stream [N], and where a row may start: at each story and at each paragraph
    within one."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=tokenizer)
    stream = torch.tensor(
        [i for ids in processor.encode(stories, add_bos=True, add_eos=True) for i in ids]
    )
    newline = processor.piece_to_id("<0x0A>")
    return stream, ((stream == BOS) | (stream == newline)).nonzero().squeeze(1)


def train(
    config: Config,
    stream: Tensor,
    starts: Tensor,
    args: argparse.Namespace,
    teacher: Transformer | None,
) -> Transformer:
    """AdamW with a warm-up and a cosine to zero. A teacher's distribution is the target where there
    is one."""
    device = stream.device
    model = Transformer(config).to(device)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:  # GPT-2's: what writes into the residual stream starts smaller
            writers = name.endswith(("wo.weight", "w_down.weight"))
            torch.nn.init.normal_(
                weight, std=0.02 / math.sqrt(2 * config.n_layer) if writers else 0.02
            )
    model.setup(args.context)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    columns = torch.arange(args.context + 1, device=device)
    positions = columns[None, :-1]

    def loss_of(rows: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(rows[:, :-1], positions).flatten(0, 1)
            if teacher is None:
                return F.cross_entropy(logits, rows[:, 1:].flatten())
            target = teacher(rows[:, :-1], positions).flatten(0, 1)
        ours, theirs = (x.float().log_softmax(-1) for x in (logits, target))
        return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")

    step_loss = torch.compile(loss_of) if device.type == "cuda" else loss_of
    begins = starts[starts + args.context < len(stream)]
    if not len(begins):
        raise ValueError(
            f"--text: {len(stream)} tokens are fewer than a row of {args.context}; give more text"
        )
    bar = tqdm(range(args.steps), unit="step", mininterval=5)
    for step in bar:
        warm, left = min(1.0, (step + 1) / 300), (1 + math.cos(math.pi * step / args.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * left
        begin = begins[torch.randint(len(begins), (args.batch,), device=device)]
        rows = stream[begin[:, None] + columns]
        rows[:, 0] = BOS
        loss = step_loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 499:
            bar.set_postfix(loss=f"{loss.item():.4f}")
    return model


def write_texts(
    target: Transformer, tokenizer: Tokenizer, stories: list[str], count: int
) -> Tensor:
    """Texts of the target's own [count, TEXT], which go on from openings of the stories, at several
    temperatures."""
    rows, texts = min(432, count, len(stories)), []
    for i in tqdm(range(-(-count // rows)), "writing", unit="batch"):
        chosen = enumerate(random.sample(stories, rows))
        openings = [tokenizer.encode_text(story[:100])[: 4 + b % 7] for b, story in chosen]
        engine = Engine(
            target, TEXT + 7, rows, Sampling(TEMPERATURES[i % len(TEMPERATURES)], 0, 0.95)
        )
        found = [[*opening] for opening in openings]
        for step in generate(engine, openings, TEXT - 4):
            for row, [(token, _)] in zip(found, step):
                row.append(token)
        texts += [row[:TEXT] for row in found]
    return torch.tensor(texts[:count])


class Unrolled:
    """In the place of a KVCache: the keys and values of all steps of a head that is trained, one
    behind the other."""

    def __init__(self):
        self.k, self.v = [], []

    def write(self, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> None:
        self.k.append(k.transpose(1, 2))
        self.v.append(v.transpose(1, 2))

    def read(self, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return torch.cat(self.k, dim=2), torch.cat(self.v, dim=2)  # [B, K, steps x T, E]


def unrolled_loss(
    head: Head, features: Tensor, tokens: Tensor, targets: Tensor, drafted: int
) -> Tensor:
    """Training-time test (arXiv 2503.01840, section 3.2): the head drafts so many tokens from every
    place of the texts, and each of them counts.

    features [B, N, n D], tokens [B, N]; targets [B, N, draft's vocabulary]: the target's
    probabilities of its tokens. In step j, row t of T reads token t + 1 + j beside what the step
    before made of row t. It attends to the true pairs up to t, and to its own row in the steps
    between."""
    T, loss, device = tokens.shape[1] - drafted, 0.0, tokens.device
    own = torch.eye(T, dtype=torch.bool, device=device)
    causal = torch.ones_like(own).tril()
    [layer], [table] = head.layers, head.ropes
    layer.attn.cache = Unrolled()
    states = head.project(features[:, :T])
    for j in range(drafted):
        x = torch.cat((head.embed(tokens[:, 1 + j : 1 + j + T]), states), dim=-1)
        mask = torch.cat([causal] + [own] * j, dim=1)[None, None]
        states = layer(x, None, *table(j + torch.arange(T, device=device)[None]), mask, None)
        logprobs = head.head(head.norm(states)).log_softmax(-1)
        loss = loss - 0.8**j * (targets[:, 1 + j : 1 + j + T] * logprobs).sum(-1).mean()
    return loss


def new_head(target: Transformer, texts: Tensor) -> Head:
    """It begins as far as that goes as the target's last layer, norm and output, of what the last
    layer put out."""
    counts = texts.flatten().bincount(minlength=target.config.vocab_size)
    known = counts.topk(min(DRAFT_VOCAB, len(counts))).indices.sort().values
    config = replace(target.config, layers=target.config.layers[:1], tied=False)
    D, device = config.dim, texts.device
    head = Head(config, HeadConfig(PLACES, D, len(known)), known).to(device)
    last, layer = target.layers[-1], head.layers[0]
    torch.nn.init.normal_(head.fc.weight, std=0.02)
    torch.nn.init.normal_(layer.attn.wqkv.weight, std=0.02)
    with torch.no_grad():
        head.fc.weight[:, -D:] += torch.eye(D, device=device)
        layer.attn.wqkv.weight[:, D:] = last.attn.wqkv.weight
        layer.attn.wo.weight.copy_(last.attn.wo.weight)
        layer.state_norm.weight.copy_(last.attn_norm.weight)
        head.head.weight.copy_(target.head.weight[known])
        head.norm.weight.copy_(target.norm.weight)
    layer.ffn.load_state_dict(last.ffn.state_dict())
    layer.ffn_norm.load_state_dict(last.ffn_norm.state_dict())
    head.embed = target.embed  # which is not trained
    return head


def block_loss(draft: DFlash, features: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    """Blocks at random places of the texts, the anchors, all in one forward (arXiv 2602.06036,
    section 4.2): each sees the features before its anchor, and itself. A later mask counts less.

    features [B, N, n D], tokens [B, N]; targets [B, N, V]: the target's probabilities."""
    (B, N), S, device = tokens.shape, BLOCK, tokens.device
    anchors = 1 + torch.rand(N - S, device=device).argsort()[:ANCHORS].sort().values  # [A]
    A, place = len(anchors), anchors[:, None] + torch.arange(S, device=device)  # [A, S]
    positions = place.flatten()[None]
    for layer in draft.layers:
        layer.attn.cache = Unrolled()
    draft.read(features, torch.arange(N, device=device)[None])
    block = torch.full((B, A, S), MASK, device=device)
    block[:, :, 0] = tokens[:, anchors]
    of = torch.arange(A, device=device).repeat_interleave(S)
    before = torch.arange(N, device=device) < anchors[of, None]
    mask = torch.cat((before, of[:, None] == of), dim=1)[None, None]
    x, [table] = draft.embed(block.flatten(1)), draft.ropes
    for layer in draft.layers:
        x = layer(x, positions, *table(positions), mask, None)
    x = draft.norm(x).unflatten(1, (A, S))[:, :, 1:]
    loss = -(targets[:, place[:, :-1]] * draft.head(x).log_softmax(-1)).sum(-1)  # [B, A, S - 1]
    return (loss * 0.8 ** torch.arange(S - 1, device=device)).mean()


def new_blocks(target: Transformer) -> DFlash:
    """It begins as the target's last layers, of what goes into the last one."""
    D, whole = target.config.dim, target.config
    config = replace(whole, layers=whole.layers[:BLOCK_LAYERS], tied=False, qk_norm="head")
    draft = DFlash(config, BlockConfig(BLOCK_PLACES, D, BLOCK, MASK)).to(target.embed.weight.device)
    draft.share(target)  # what is not trained
    torch.nn.init.normal_(draft.fc.weight, std=0.02)
    with torch.no_grad():
        draft.fc.weight[:, -D:] += torch.eye(D, device=draft.fc.weight.device)
        draft.norm.weight.copy_(target.norm.weight)
    for layer, last in zip(draft.layers, target.layers[-BLOCK_LAYERS:]):
        layer.load_state_dict(last.state_dict(), strict=False)  # but for the norms of q and k
    return draft


def train_draft(
    draft: Transformer,
    places: tuple[int, ...],
    loss_of: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    target: Transformer,
    texts: Tensor,
    args: argparse.Namespace,
) -> None:
    """AdamW with a warm-up and a cosine to zero. places: of the features; loss_of: features, tokens,
    the target's probabilities, step -> loss."""
    device = texts.device
    draft.setup(texts.shape[1])
    target.setup(texts.shape[1], args.batch, places)
    positions = torch.arange(texts.shape[1], device=device)[None]
    trained = [weight for weight in draft.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    bar = tqdm(range(args.steps), unit="step", mininterval=5)
    for step in bar:
        warm, left = min(1.0, (step + 1) / 50), (1 + math.cos(math.pi * step / args.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * left
        rows = texts[torch.randint(len(texts), (args.batch,), device=device)]
        with torch.no_grad():
            targets = target(rows, positions).softmax(-1)
        loss = loss_of(target.features[:, : texts.shape[1]], rows, targets, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 19:
            bar.set_postfix(loss=f"{loss.item():.4f}")


def train_head(target: Transformer, texts: Tensor, args: argparse.Namespace) -> Head:
    """At first, while that is cheap, one token is drafted."""
    head = new_head(target, texts)

    def loss_of(features: Tensor, tokens: Tensor, targets: Tensor, step: int) -> Tensor:
        drafted = 1 if step < 0.7 * args.steps else DRAFTED
        return unrolled_loss(head, features, tokens, targets[:, :, head.vocabulary], drafted)

    train_draft(head, PLACES, loss_of, target, texts, args)
    return head


def train_blocks(target: Transformer, texts: Tensor, args: argparse.Namespace) -> DFlash:
    draft = new_blocks(target)
    loss_of = lambda *given: block_loss(draft, *given[:3])  # noqa: E731
    train_draft(draft, BLOCK_PLACES, loss_of, target, texts, args)
    return draft


def check_out(out: Path, names: list[str]) -> None:
    """ValueError where save() would delete other files than those of an earlier checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    for place in (out / name for name in names if (out / name).exists()):
        if others := sorted({path.name for path in place.iterdir()} - FILES):
            raise ValueError(
                f"--out {out}: {place} has other files ({others[0]}); name another directory"
            )


def held(model: Transformer, table: dict[str, Weight]) -> dict[str, Tensor]:
    """The model's tensors by their names in a file, in bf16."""
    ours = dict(model.named_parameters())
    return {
        name: ours[place.ours]
        .detach()[place.row : place.row + place.shape[0]]
        .bfloat16()
        .cpu()
        .contiguous()
        for name, place in table.items()
    }


def save(weights: dict[str, Tensor], files: dict[str, dict | bytes], out: Path) -> None:
    """The Hugging Face layout. It is written beside `out`, whose place it then takes."""
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        written = (
            content if isinstance(content, bytes) else f"{json.dumps(content, indent=2)}\n".encode()
        )
        (partial / name).write_bytes(written)
    if (card := out / "README.md").exists():
        shutil.copy(card, partial)
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def save_pair_member(model: Transformer, hf_config: dict, tokenizer: bytes, out: Path) -> None:
    generation = dict(
        bos_token_id=BOS, eos_token_id=EOS, do_sample=True, temperature=0.7, top_p=0.9
    )
    files = {
        "config.json": hf_config,
        "generation_config.json": generation,
        "tokenizer.model": tokenizer,
    }
    save(held(model, hf_weights(model.config)), files, out)


def save_head(head: Head, out: Path) -> None:
    """The layout of the paper's authors, without the embedding, which is the target's."""
    known, V = head.vocabulary.cpu(), head.config.vocab_size
    table = head_weights(head.config, head.options)
    del table[EMBEDDING]
    weights = {
        name.replace("layers.0.", "midlayer."): tensor for name, tensor in held(head, table).items()
    }
    weights |= dict(d2t=known - torch.arange(len(known)), t2d=torch.isin(torch.arange(V), known))
    shape = (
        COMMON
        | PAIR["tiny"]
        | dict(
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            vocab_size=V,
            draft_vocab_size=len(known),
            tie_word_embeddings=False,
            eagle_aux_hidden_state_layer_ids=list(PLACES),
        )
    )
    save(weights, {"config.json": shape}, out)


def save_blocks(draft: DFlash, out: Path) -> None:
    """The layout of the paper's authors."""
    ids = [place - 1 for place in BLOCK_PLACES]
    shape = (
        COMMON
        | PAIR["tiny"]
        | dict(
            model_type="qwen3",
            architectures=["DFlashDraftModel"],
            num_hidden_layers=BLOCK_LAYERS,
            vocab_size=draft.config.vocab_size,
            tie_word_embeddings=False,
            block_size=BLOCK,
            num_target_layers=PAIR["tiny"]["num_hidden_layers"],
            dflash_config=dict(mask_token_id=MASK, target_layer_ids=ids),
        )
    )
    weights = held(draft, dflash_weights(draft.config, draft.block))
    save(weights, {"config.json": shape}, out)


def read_paragraphs(text: Path) -> list[str]:
    """The first 200 of over 100 characters."""
    paragraphs = [line for line in read_text(text).split("\n") if len(line) > 100][:200]
    if not paragraphs:
        raise ValueError(f"--eval {text}: no line of over 100 characters in it")
    return paragraphs


@torch.no_grad()
def measure(directory: Path, paragraphs: list[str], device: torch.device) -> None:
    """Bits per byte of the paragraphs, each alone after the beginning of sequence, and on how many
    of their tokens the draft's greedy choice is the target's."""
    choices = {}
    for name in PAIR:
        checkpoint, tokenizer = open_checkpoint(directory / name)
        encoded = list(map(tokenizer.encode_text, paragraphs))
        model = load_model(checkpoint, device, torch.float32)
        model.setup(max(map(len, encoded)))
        nats, choices[name] = 0.0, []
        for ids in encoded:
            ids = torch.tensor(ids, device=device)[None]
            logits = model(ids[:, :-1], torch.arange(ids.shape[1] - 1, device=device)[None])[0]
            nats += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            choices[name].append(logits.argmax(-1))
        size = sum(p.numel() for p in model.parameters())
        text_bytes = sum(len(paragraph.encode()) for paragraph in paragraphs)
        print(
            f"{name}: {size / 1e6:.2f}M parameters, {nats / math.log(2) / text_bytes:.4f} bits per "
            f"byte"
        )
    target, draft = (torch.cat(choices[name]) for name in PAIR)
    print(f"greedy agreement: {(target == draft).float().mean():.1%} of {len(target)} tokens")


def train_pair(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    stories, teacher = read_stories(args.text), None
    tokenizer = train_tokenizer(stories, args.vocab)
    stream, starts = (t.to(device) for t in token_stream(stories, tokenizer))
    seen = args.steps * args.batch * args.context
    print(
        f"{len(stories)} stories, {len(stream) / 1e6:.1f}M tokens; {seen / len(stream):.1f} times "
        f"over"
    )
    for name, shape in PAIR.items():
        begun = time.perf_counter()
        hf_config = COMMON | shape | dict(vocab_size=args.vocab)
        teacher = train(config_from_hf(hf_config), stream, starts, args, teacher).requires_grad_(
            False
        )
        save_pair_member(teacher, hf_config, tokenizer, (args.out / name).resolve())
        print(f"{name}: trained in {time.perf_counter() - begun:.0f} s")


@torch.no_grad()
def acceptance(
    target: Transformer, draft: Transformer, openings: list[list[int]], stops: set[int]
) -> list[float]:
    """How often the 1st, 2nd, ... drafted token is kept where all before it are, in texts behind
    the openings at temperature 0.2 and top-p 0.95."""
    rows, tried = len(openings), Counter()
    length = max(map(len, openings)) + NEW_TOKENS
    engine = partial(Engine, batch_size=rows, sampling=Sampling(0.2, 0, 0.95))
    places = ()
    if isinstance(draft, DraftHead):
        places = draft.target_places
    if isinstance(draft, DFlash):
        places = draft.block.places
    whole = engine(target, length, features=places, spare=SLACK)
    drafter = make_draft(whole, draft, engine)
    speculator = Speculator(whole, drafter, Policy(MEASURED))
    ended, first = set(), True
    for step in generate(speculator, openings, NEW_TOKENS):
        for b, new in enumerate(step):
            if b not in ended and not first:
                tried.update(range(min(len(new), MEASURED + 1)))
            if b not in ended and stops.intersection(token for token, _ in new):
                ended.add(b)
                speculator.finish(b)
        first = False
    return [tried[j + 1] / max(1, tried[j]) for j in range(MEASURED)]


def measure_drafts(directory: Path, paragraphs: list[str], device: torch.device) -> None:
    torch.manual_seed(0)
    opened = checkpoint, tokenizer = open_checkpoint(directory / "tiny")
    target = load_model(checkpoint, device, torch.float32)
    openings = [tokenizer.encode_text(paragraph)[:8] for paragraph in paragraphs]
    for name in ("tiny-draft", HEAD, BLOCKS):
        if not (directory / name).exists():
            continue
        draft = load_model(open_draft(directory / name, opened), device, torch.float32)
        shares = " ".join(
            f"{share:.1%}" for share in acceptance(target, draft, openings, tokenizer.stops)
        )
        print(
            f"{name}: of the 1st to {MEASURED}th drafted token, where those before it are "
            f"accepted, {shares} are"
        )


def make_draft_of_tiny(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    random.seed(0)
    begun = time.perf_counter()
    checkpoint, tokenizer = open_checkpoint(args.out / "tiny")
    target = load_model(checkpoint, device, torch.float32).requires_grad_(False)
    texts = write_texts(target, tokenizer, read_stories(args.text), args.texts).to(device)
    print(f"{len(texts)} texts of {TEXT} tokens, written in {time.perf_counter() - begun:.0f} s")
    if args.eagle:
        save_head(train_head(target, texts, args), (args.out / HEAD).resolve())
    else:
        save_blocks(train_blocks(target, texts, args), (args.out / BLOCKS).resolve())
    name = HEAD if args.eagle else BLOCKS
    print(f"{name}: trained in {time.perf_counter() - begun:.0f} s")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--text", type=Path, help="stories, a blank line between two; .xz is unpacked"
    )
    parser.add_argument(
        "--eval", type=Path, required=True, help="text of the same kind that is not in --text"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("checkpoints"),
        help="the directory of all of them (default: checkpoints)",
    )
    parser.add_argument(
        "--eagle", action="store_true", help="the head for the tiny model in --out, not the pair"
    )
    parser.add_argument(
        "--dflash", action="store_true", help="the DFlash draft for it, not the pair"
    )
    parser.add_argument(
        "--measure", action="store_true", help="no training: measure what is in --out"
    )
    parser.add_argument(
        "--vocab",
        type=within(int, 1, 10**6),
        default=2048,
        help="pieces of the tokenizer (default: 2048)",
    )
    parser.add_argument(
        "--steps", type=within(int, 1), help="of each training (default: 6000; of the head 5000)"
    )
    parser.add_argument(
        "--batch", type=within(int, 1, 10**6), default=64, help="rows a step (default: 64)"
    )
    parser.add_argument(
        "--context", type=within(int, 1, 10**6), default=512, help="tokens a row (default: 512)"
    )
    parser.add_argument(
        "--texts",
        type=within(int, 1, 10**6),
        default=13000,
        help="that the head learns from (default: 13000)",
    )
    parser.add_argument(
        "--lr",
        type=within(float, 1e-9, 1),
        help="the highest learning rate (default: 0.01; of the head 0.005)",
    )
    args = parser.parse_args()
    drafts = args.eagle or args.dflash
    usual = dict(steps=5000, lr=5e-3) if drafts else dict(steps=6000, lr=1e-2)
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paragraphs = read_paragraphs(args.eval)
    with memory_advice(f"out of memory on {device}: less --batch, --context or text needs less"):
        if not args.measure:
            if not args.text:
                raise ValueError("--text is missing: name a file of stories, or give --measure")
            names = [HEAD] if args.eagle else [BLOCKS] if args.dflash else [*PAIR]
            check_out(args.out, names)
            (make_draft_of_tiny if drafts else train_pair)(args, device)
        (measure_drafts if drafts else measure)(args.out, paragraphs, device)


if __name__ == "__main__":
    report_errors(main)

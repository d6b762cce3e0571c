"""
Train the bundled pair, checkpoints/tiny and the draft that imitates it, on any
file of short stories, a blank line between two: two minutes on an H200.

    python scripts/train_tiny.py --text stories.txt.xz --eval validation.txt
    python scripts/train_tiny.py --measure --eval validation.txt

--measure measures the pair that is there. Each checkpoint is written beside its
place, then renamed.
"""
import signal

if __name__ == "__main__":  # PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import io
import json
import lzma
import math
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from checkpoint import UserError, config_from_hf, hf_weights, load_model  # noqa: E402
from cli.errors import report_errors  # noqa: E402
from cli.options import Parser, within  # noqa: E402
from guard import is_file, memory_advice, open_checkpoint, read_text, user_errors  # noqa: E402
from model import Config, Transformer  # noqa: E402

COMMON = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", head_dim=128,
              num_key_value_heads=1, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0,
              attention_bias=False, mlp_bias=False, tie_word_embeddings=True, dtype="bfloat16", bos_token_id=1,
              eos_token_id=2)
PAIR = {
    "tiny": dict(hidden_size=256, num_hidden_layers=5, num_attention_heads=2, intermediate_size=640),
    "tiny-draft": dict(hidden_size=128, num_hidden_layers=1, num_attention_heads=1, intermediate_size=384),
}
FILES = {"model.safetensors", "tokenizer.model", "config.json", "generation_config.json", "README.md"}
BOS, EOS = 1, 2


def read_stories(path: Path) -> list[str]:
    is_file(path)
    with user_errors(path):
        text = lzma.open(path).read() if path.suffix == ".xz" else path.read_bytes()
        return [story.strip() for story in text.decode().replace("\r\n", "\n").split("\n\n") if story.strip()]


def train_tokenizer(stories: list[str], vocab_size: int) -> bytes:
    """A sentencepiece BPE; no space is added in front, so that a paragraph alone reads as it does within its story."""
    from sentencepiece import SentencePieceTrainer
    paragraphs, model = (line for story in stories[:30000] for line in story.split("\n")), io.BytesIO()
    with user_errors("sentencepiece"):
        SentencePieceTrainer.train(
            sentence_iterator=paragraphs, model_writer=model, vocab_size=vocab_size, model_type="bpe",
            byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, character_coverage=0.9999, bos_id=BOS, eos_id=EOS, minloglevel=2)
    return model.getvalue()


def token_stream(stories: list[str], tokenizer: bytes) -> tuple[Tensor, Tensor]:
    """All stories as one stream [N], and where a row may start: at each story and at each paragraph within one."""
    from sentencepiece import SentencePieceProcessor
    processor = SentencePieceProcessor(model_proto=tokenizer)
    stream = torch.tensor([i for ids in processor.encode(stories, add_bos=True, add_eos=True) for i in ids])
    newline = processor.piece_to_id("<0x0A>")
    return stream, ((stream == BOS) | (stream == newline)).nonzero().squeeze(1)


def train(config: Config, stream: Tensor, starts: Tensor, args: argparse.Namespace,
          teacher: Transformer | None) -> Transformer:
    """AdamW with a warm-up and a cosine to zero. A teacher's distribution is the target where there is one."""
    device = stream.device
    model = Transformer(config).to(device)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:  # GPT-2's: what writes into the residual stream starts smaller
            writers = name.endswith(("wo.weight", "w_down.weight"))
            torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layer) if writers else 0.02)
    model.setup(args.context)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
                                  lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
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
        raise UserError(f"--text: {len(stream)} tokens are fewer than a row of {args.context}; give more text")
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


def check_out(out: Path) -> None:
    """UserError where save() would delete other files than those of an earlier pair."""
    out.mkdir(parents=True, exist_ok=True)
    for place in (out / name for name in PAIR if (out / name).exists()):
        if others := sorted({path.name for path in place.iterdir()} - FILES):
            raise UserError(f"--out {out}: {place} has other files ({others[0]}); name another directory")


def save(model: Transformer, hf_config: dict, tokenizer: bytes, out: Path) -> None:
    """The Hugging Face layout, in bf16. It is written beside `out`, whose place it then takes."""
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    ours = dict(model.named_parameters())
    weights = {}
    for name, place in hf_weights(model.config).items():
        rows = ours[place.ours].detach()[place.row:place.row + place.shape[0]]
        weights[name] = rows.bfloat16().cpu().contiguous()
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "tokenizer.model").write_bytes(tokenizer)
    generation = dict(bos_token_id=BOS, eos_token_id=EOS, do_sample=True, temperature=0.7, top_p=0.9)
    for name, content in {"config": hf_config, "generation_config": generation}.items():
        (partial / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    if (card := out / "README.md").exists():
        shutil.copy(card, partial)
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def read_paragraphs(text: Path) -> list[str]:
    """The first 200 of over 100 characters."""
    paragraphs = [line for line in read_text(text).split("\n") if len(line) > 100][:200]
    if not paragraphs:
        raise UserError(f"--eval {text}: no line of over 100 characters in it")
    return paragraphs


@torch.no_grad()
def measure(directory: Path, paragraphs: list[str], device: torch.device) -> None:
    """Bits per byte of the paragraphs, each alone after the beginning of sequence, and on how many of their tokens the
    draft's greedy choice is the target's."""
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
        print(f"{name}: {size / 1e6:.2f}M parameters, {nats / math.log(2) / text_bytes:.4f} bits per byte")
    target, draft = (torch.cat(choices[name]) for name in PAIR)
    print(f"greedy agreement: {(target == draft).float().mean():.1%} of {len(target)} tokens")


def train_pair(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    stories, teacher = read_stories(args.text), None
    tokenizer = train_tokenizer(stories, args.vocab)
    stream, starts = (t.to(device) for t in token_stream(stories, tokenizer))
    seen = args.steps * args.batch * args.context
    print(f"{len(stories)} stories, {len(stream) / 1e6:.1f}M tokens; {seen / len(stream):.1f} times over")
    for name, shape in PAIR.items():
        begun = time.perf_counter()
        hf_config = COMMON | shape | dict(vocab_size=args.vocab)
        teacher = train(config_from_hf(hf_config), stream, starts, args, teacher).requires_grad_(False)
        save(teacher, hf_config, tokenizer, (args.out / name).resolve())
        print(f"{name}: trained in {time.perf_counter() - begun:.0f} s")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--text", type=Path, help="stories, a blank line between two; .xz is unpacked")
    parser.add_argument("--eval", type=Path, required=True, help="text of the same kind that is not in --text")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"),
                        help="the directory of both (default: checkpoints)")
    parser.add_argument("--measure", action="store_true", help="no training: measure the pair in --out")
    parser.add_argument("--vocab", type=within(int, 1, 10 ** 6), default=2048,
                        help="pieces of the tokenizer (default: 2048)")
    parser.add_argument("--steps", type=within(int, 1), default=6000, help="of each model's training (default: 6000)")
    parser.add_argument("--batch", type=within(int, 1, 10 ** 6), default=64, help="rows a step (default: 64)")
    parser.add_argument("--context", type=within(int, 1, 10 ** 6), default=512, help="tokens a row (default: 512)")
    parser.add_argument("--lr", type=within(float, 1e-9, 1), default=1e-2,
                        help="the highest learning rate (default: 0.01)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paragraphs = read_paragraphs(args.eval)
    with memory_advice(f"out of memory on {device}: less --batch, --context or text needs less"):
        if not args.measure:
            if not args.text:
                raise UserError("--text is missing: name a file of stories, or give --measure")
            check_out(args.out)
            train_pair(args, device)
        measure(args.out, paragraphs, device)


if __name__ == "__main__":
    report_errors(main)

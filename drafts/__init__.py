"""
What proposes tokens, beyond speculative.py's smaller model and prompt lookup, and the policies that
say how many.

    eagle.py      EAGLE-3 heads
    mtp.py        the layer that drafts in the checkpoint's own files
    heads.py      what these two share
    dflash.py     DFlash, which proposes a block at once
    shared_kv.py  Gemma 4's assistants, which read the target's keys and values
    policies.py   how many tokens to draft

A draft of your own is a subclass of speculative.Drafter in a file here, and its name in NAMED. One
that says the last token again and again is three places:

    # drafts/repeat.py, a new file
    import torch
    import torch.nn.functional as F

    from speculative import Drafter


    class Repeat(Drafter):
        def propose(self, text, last, k, n_slots):
            drafted = text.gather(1, last[:, None]).expand(-1, k)  # [B, k]
            q = F.one_hot(drafted, self.vocab_size).float()
            return drafted, F.pad(q, (0, 0, 0, 1)), torch.full_like(last, k)

    # drafts/__init__.py, above: from generate import
    from drafts.repeat import Repeat

    # drafts/__init__.py, below: NAMED = {
    "repeat": Repeat,

One with weights is a case of open_draft(), which reads its directory, and of make_draft() instead.
"""

import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from drafts.dflash import DFlash, DFlashCheckpoint, make_dflash
from drafts.eagle import HeadCheckpoint
from drafts.heads import DraftHead, HeadDraft
from drafts.mtp import MtpCheckpoint
from drafts.shared_kv import SharedKV, SharedKVCheckpoint, make_shared_kv
from generate import Engine
from hub import vet
from hub.checkpoint import Checkpoint, count_parameters
from hub.families import is_dflash, is_head, is_shared_kv
from hub.tokenizer import Tokenizer
from model import Transformer
from speculative import Drafter, DraftModel, PromptLookup

NAMED = {
    "prompt-lookup": PromptLookup,
}


def open_draft(name: str | None, target: tuple[Checkpoint, Tokenizer]) -> Checkpoint | None:
    """A smaller model's checkpoint, an EAGLE head's, a DFlash draft's, a Gemma 4 assistant's or, of
    the target's own, what drafts; None where the draft has no weights. ValueError if it is not for
    the target."""
    if name is None or name in NAMED:
        return None
    if name == "mtp":
        return MtpCheckpoint(target[0])
    known = *NAMED, "mtp"
    if meant := get_close_matches(str(name).lower().replace("_", "-"), known, 1, cutoff=0.8):
        if not Path(name).exists():
            raise ValueError(f"draft={name}: no such directory; did you mean {meant[0]}?")
    directory = vet.find_checkpoint(name)
    hf = vet.read_json(directory / "config.json")
    if is_dflash(hf):
        return DFlashCheckpoint(directory, target[0])
    if is_head(hf):
        return HeadCheckpoint(directory, target[0])
    if is_shared_kv(hf):
        return SharedKVCheckpoint(directory, target[0])
    draft, tokenizer = vet.open_checkpoint(directory)
    vet.check_draft(name, tokenizer, target[1])
    smaller, larger = count_parameters(draft.config), count_parameters(target[0].config)
    if smaller > larger:
        print(
            f"the draft {name} has {smaller:,} parameters, the checkpoint {larger:,}: this draft "
            "costs more than it can save",
            file=sys.stderr,
        )
    return draft


def make_draft(
    target: Engine, model: Transformer | None, make_engine: Callable, name: str = "prompt-lookup"
) -> Drafter:
    """For the engine of the target. model: of open_draft()'s checkpoint, which
    make_engine(model, max_seq_len, spare=) runs; without one, name says which draft it is."""
    slots, vocab_size = target.max_seq_len, target.model.config.vocab_size
    spare = slots - target.limit
    if model is None:
        return NAMED[name](vocab_size, slots)
    if isinstance(model, DFlash):
        return make_dflash(model, target, spare)
    if isinstance(model, SharedKV):
        return make_shared_kv(model, target)
    if isinstance(model, DraftHead):
        model.share(target.model)
        # It reads its own last hidden state: see HeadDraft.
        places = (model.config.n_layer,)
        return HeadDraft(make_engine(model, target.limit, spare=spare, features=places), target)
    context = model.config.context
    engine = make_engine(model, min(target.limit, context), spare=spare)
    return DraftModel(engine, vocab_size, min(slots, context))

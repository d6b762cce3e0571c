"""
What drafts have in common that read the target's features: EAGLE heads (eagle.py) and the layers
that a checkpoint brings for several tokens at once (mtp.py).

A feature is what the target's hidden states at a few places make, side by side: see
Transformer.setup(). A head reads pairs: the embedding of token t + 1 with the feature of token t.
From the pair in slot t it predicts token t + 2. For the tokens that it drafts itself there is no
feature yet: the head's own hidden state takes the feature's place.

A head is a Transformer. Its engine keeps the head's own last hidden states by position, as the
target's keeps the features; HeadDraft makes the first layer's inputs of both.

Shapes: as in model.py and speculative.py; n places, D the head's dim, which may differ from the
target's.
"""

import math

import torch
from torch import Tensor

from generate import draw, probabilities
from model import Transformer
from speculative import DraftModel


class DraftHead(Transformer):
    """A kind of head is a subclass, whose Checkpoint open_draft() makes.

    target_places: whose hidden states make a feature: see Transformer.setup(). norm_output: whether
    the state that it hands on to itself is normed. head_size: how many tokens it has logits of;
    vocabulary [head_size]: the target's token of each; None: they are the same."""

    target_places: tuple[int, ...]
    norm_output: bool
    head_size: int
    vocabulary: Tensor | None = None

    def share(self, target: Transformer):
        """Takes what the files of a head leave to the target's. Once the target's engine is
        made."""

    def project(self, features):
        """features [..., n target_dim] -> states [..., D]"""
        raise NotImplementedError

    def inputs(self, tokens, states):
        """tokens [B, T], states [B, T, D] -> what the first layer reads [B, T, any]"""
        raise NotImplementedError


class HeadDraft(DraftModel):
    """Drafts with a head. Slot t of its cache is of the pair of token t's feature and token t + 1,
    so that the cache holds slots 0 to last - 1 - unread after every step: follow() reads the pairs
    of all tokens that were kept.

    engine: the head's generate.Engine, which keeps the head's last hidden states; target: the
    target's, which keeps the features of all slots. So pairs can be read late, and again: what was
    read of drafted tokens gives way to what the target made of those that were kept."""

    OFFSET = 1
    READ_TOKENS = 4096

    def __init__(self, engine, target):
        self.head = head = engine.model
        super().__init__(engine, target.model.config.vocab_size, engine.max_seq_len)
        self.features = target.model.features
        # [B, 1, draft's V]: behind the pair in slot last - 1 of each row, the last one that can be
        # made.
        shape = engine.batch_size, 1, head.head_size
        self.logits = head.fc.weight.new_zeros(shape)
        self.vocabulary = head.vocabulary
        if self.vocabulary is not None:
            self.vocabulary = self.vocabulary.to(engine.device)

    def readable(self, tokens):
        return tokens  # its embedding is the target's

    def read_prompts(self, text, slots):
        """Once for all samples of a prompt. What lies behind a shorter prompt is overwritten before
        it is seen."""
        head, P, samples = self.head, len(self.prompts), self.samples
        pairs = max(map(len, self.prompts)) - 1
        width = min(-(-pairs // 32) * 32, self.max_seq_len - 1)
        at = torch.arange(width, device=text.device).expand(P, -1)
        size = max(32, self.READ_TOKENS // P // 32 * 32)
        for chunk in at.split(size, dim=1) if width else ():
            tokens, inputs = self.pairs(text, chunk, samples)
            # Nobody reads the logits: column 0.
            head(tokens, chunk, slots, at[:, 0], inputs)
        if samples > 1:
            head.arrange_rows([row for row in range(P) for _ in range(samples)], width)

    def read(self, text, last, at, slots):
        tokens, inputs = self.pairs(text, at)
        wanted = last - 1 - at[:, 0]  # the column of slot last - 1
        column = wanted.clamp(0, at.shape[1] - 1)
        logits = self.head(tokens, at, slots, column, inputs)[:, None]
        here = (column == wanted)[:, None, None]
        self.logits.copy_(torch.where(here, logits, self.logits))

    def pairs(self, text, at, samples=1):
        """The pairs of slots at [B, T]: tokens [B, T] and what the first layer reads of them. Row b
        is of the text's row b * samples. Of slots behind the text, whose tokens and features may be
        anything, nothing is seen before they are written again."""
        head = self.head
        tokens = text[::samples].gather(1, at + 1)
        states = head.project(self.features[::samples][head.rows[: len(at)], at])
        return tokens, head.inputs(tokens, states)

    def own_states(self, at):
        """The head's own hidden states of the slots before at [B, T] -> [B, T, D]: they stand for
        the features that the target has not made yet."""
        head = self.head
        states = head.features[head.rows[: len(at)], (at - 1).clamp(min=0)]
        return head.norm(states) if head.norm_output else states

    def start(self, text, last, k, slots):
        """Nothing is left to read: follow() or catch_up() has read the last pair."""
        return last[:, None] - 1, self.logits

    def forward(self, tokens, at, slots):
        inputs = self.head.inputs(tokens, self.own_states(at))
        return self.engine.forward(tokens, at, slots, inputs=inputs)

    def choose(self, logits):
        """In the target's numbers. Tokens that the head lacks have probability 0."""
        if self.vocabulary is None:
            return super().choose(logits)
        n = len(self.vocabulary)
        if not self.engine.captures:
            # A fork's rule in probabilities() may name tokens, by the target's numbers. Noise is for
            # the draft's tokens alone, as where kernels draw: a seed then gives the same here.
            known = logits[:, -1, :n].float()
            every = known.new_full((len(known), self.vocab_size), -math.inf)
            q = probabilities(every.index_copy(1, self.vocabulary, known), self.engine.sampling)
            return self.vocabulary[draw(q[:, self.vocabulary], self.engine.sampling)], q
        token, q = super().choose(logits[..., :n])
        return self.vocabulary[token], torch.zeros_like(q).index_copy(1, self.vocabulary, q[:, :n])

    def follow(self, text, at, accepted, n_slots):
        tokens, inputs = self.pairs(text, at)
        slots = self.engine.slots(n_slots)
        logits = self.engine.forward(tokens, at, slots, inputs=inputs)  # [B, T, draft's V]
        self.logits.copy_(logits.take_along_dim(accepted[:, None, None], dim=1))

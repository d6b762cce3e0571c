"""
Speculative decoding: a draft proposes k tokens, and one forward of the target verifies them. The output has the
target's own distribution (arXiv 2211.17192 and 2302.01318). Each row of a batch moves on at its
own pace; no row waits for another's rejection (arXiv 2404.15778).

A rejected draft needs no clean-up. Its keys and values lie past the end of the text, where nothing attends to them, and
the tokens that come next overwrite them: see model.py.

A step runs on the device from drafting to the new ends of the rows; the host reads no value in between. On a GPU the
host learns a step late what came out. Before that it launches the next step, for which it decides k alone.

Contents: acceptance, the drafts, the steps of a ragged batch. policies.py chooses k; EAGLE heads are in eagle.py.

Shapes: B rows, k drafted tokens, T = k + 1, V the target's vocabulary, L cache length.
"""
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from policies import TIMED_LENGTHS, Auto, draft_lengths, interpolate, make_policy
from sampling import Sampling, draw, probabilities

# Slots beyond a text's limit: its last step may draft across the limit, and so may the step in flight. Two steps of up
# to 33 tokens, rounded up to a multiple of 8.
SLACK = 72
NGRAM = 3  # prompt lookup searches for the last 3 tokens, then for fewer


# Acceptance


def accept(logits: Tensor, tokens: Tensor, q: Tensor, proposed: Tensor, sampling: Sampling):
    """Speculative sampling (arXiv 2211.17192, algorithm 1).

    tokens [B, T]: the last token of the text, then the drafted ones; q [B, T, V]: the distributions these were drawn
    from, the last one zero; proposed [B]: how many of them count; logits [B, T, V]: the target's after each token ->
    tokens [B, T], of which accepted + 1 are text, their log-probabilities [B, T] under the raw logits, accepted [B].

    A drafted token x is kept with probability min(1, p(x) / q(x)). The first one that is not is drawn anew, from the
    positive part of p - q. Where all that count are kept, one more is drawn, from p."""
    drafted, logits = tokens[:, 1:], logits.float()  # [B, k]
    p = probabilities(logits, sampling)  # [B, T, V]
    nth = torch.arange(drafted.shape[1], device=logits.device)  # [k]
    p_x = p[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)  # [B, k]
    q_x = q[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    kept = (torch.rand_like(p_x) * q_x < p_x) & (nth < proposed[:, None])
    accepted = kept.long().cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p, q = p.gather(1, at).squeeze(1), q.gather(1, at).squeeze(1)  # [B, V]
    residual = (p - q * (accepted < proposed)[:, None]).clamp(min=0)
    # All zero: p and q differ by rounding only.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    tokens = F.pad(drafted, (0, 1)).scatter(1, accepted[:, None], draw(residual, sampling)[:, None])
    logprobs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens, logprobs, accepted


def propose(logits: Tensor, vocab_size: int, sampling: Sampling):
    """One token, of the k that Drafter.propose() gives: a draft's logits [B, T, any] -> a token [B] after the last
    column, and the distribution [B, V] it was drawn from.

    Tokens that the target lacks are left out. Tokens that the draft lacks have probability 0."""
    q = probabilities(logits[:, -1, :vocab_size].float(), sampling)
    q = F.pad(q, (0, vocab_size - q.shape[-1]))
    return draw(q, sampling), q


# Drafts


@dataclass
class Drafter:
    """What proposes tokens. Another kind of draft is a subclass with a propose() and, if it keeps a state, the rest.
    eagle.make_draft() makes it; what the user calls it stands in generate.LLM and guard.check_options().

    vocab_size: the target's; max_seq_len: no token beyond is drafted. unread: how many tokens before the last one the
    draft has not read. The Speculator adds those of its steps without drafts."""
    vocab_size: int
    max_seq_len: int
    unread: int = 0

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold propose()."""
        return True

    def set_sampling(self, sampling: Sampling):
        """For the drafts from now on."""

    def begin(self, prompts: list[list[int]], start: int, samples: int):
        """New texts: prompts after `start` tokens of the texts before, and one more token, from the target's prefill.
        Each prompt has `samples` rows."""

    def catch_up(self, text: Tensor, last: Tensor, reach: int):
        """Reads what is unread of text [B, L] up to last [B]. reach: no slot beyond it is in use."""

    def propose(self, text: Tensor, last: Tensor, k: int, reach: int):
        """text [B, L], each row's last token at last [B] -> drafted tokens [B, k], their distributions [B, T, V], the
        last one zero, and how many of them count [B]. Without the host: see captures."""
        raise NotImplementedError

    def follow(self, text: Tensor, last: Tensor, accepted: Tensor, k: int, reach: int):
        """The end of a step that propose() began: after last [B] of text [B, L] now stand the tokens that were
        accepted [B] and one more. Without the host, too."""


class PromptLookup(Drafter):
    """Drafts from the text's own n-grams: there is no model, and nothing to read."""

    def propose(self, text, last, k, reach):
        drafted, proposed = lookup(text, last, k)
        return drafted, F.pad(F.one_hot(drafted, self.vocab_size).float(), (0, 0, 0, 1)), proposed


def lookup(text: Tensor, last: Tensor, k: int):
    """text [B, L], each row's last token at last [B] -> drafted tokens [B, k], how many count [B], 0 or k.

    The draft is what followed the latest earlier match of the text's last NGRAM tokens or, where there is none, of
    fewer. Where the text ends before the draft is k tokens long, the draft starts over at the match."""
    L = text.shape[1]
    at = torch.arange(L, device=text.device)
    same = at < last[:, None]  # [B, L]: whether the last n + 1 tokens are found at this place, too
    best = torch.full_like(last, -1)
    for n in range(NGRAM):
        token = text.gather(1, (last - n).clamp(min=0)[:, None])  # [B, 1]
        same &= F.pad(text, (n, 0), value=-1)[:, :L] == token
        # The n-gram's length is the high digit, the place the low one: the maximum is the longest, then the latest.
        best = torch.maximum(best, torch.where(same, n * L + at, -1).amax(1))
    place = best % L
    following = torch.arange(k, device=text.device) % (last - place).clamp(min=1)[:, None]
    return text.gather(1, (place[:, None] + 1 + following) % L), torch.where(best < 0, 0, k)


class DraftModel(Drafter):
    """A smaller model with a KV cache of its own, which may be shorter than the target's and may lag behind the text:
    between steps it holds slots 0 to last - 1 - unread, or one slot less after a step that kept all its drafts.

    With k = 2 and last = 10, start() reads slots 9 and 10, which gives token 11, and slot 11 then gives token 12. If
    both are kept and one more is drawn, last is 13, and slot 12 was never read: so start() reads two slots, and
    catch_up() more than are unread.

    engine: its generate.Engine. vocabulary [draft's V]: the target's token for each of the draft's, if they differ."""

    AHEAD = 0  # so many tokens after a slot's own must be known before it is read
    READ_TOKENS = 1024  # at a time, over all rows

    def __init__(self, engine, vocab_size: int, vocabulary: Tensor | None = None):
        super().__init__(vocab_size, engine.max_seq_len)
        self.engine = engine
        self.vocabulary = vocabulary
        engine.row_length = engine.max_seq_len  # what a row is to be is not said to drafts
        # Read in place of tokens that the vocabulary lacks.
        self.last_token = engine.model.config.vocab_size - 1
        self.prompts = None  # what the texts begin with, until it is read; the rest is unread

    @property
    def captures(self) -> bool:
        return self.engine.captures

    def set_sampling(self, sampling):
        self.engine.set_sampling(sampling)

    def begin(self, prompts, start, samples):
        if start:  # 1: the cache may lack the last answer's last token, which was drafted
            self.unread += 1 + max(map(len, prompts))
        else:
            self.prompts, self.samples = prompts, samples
            self.unread = self.AHEAD

    def catch_up(self, text, last, reach):
        slots, room = self.engine.slots(reach), self.max_seq_len - self.AHEAD
        if self.prompts:
            self.read_prompts(text, slots)
            self.prompts = None
        if self.unread:
            # A power of two, so that there are few shapes: with 5 unread and last 40, slots 8 to 39 are read.
            width = min(max(32, 1 << self.unread.bit_length()), room)
            at = (last - width).clamp(0, room - width)[:, None]
            at = at + torch.arange(width, device=last.device)
            for chunk in at.split(max(32, self.READ_TOKENS // len(at)), dim=1):
                self.feed(text, last, chunk, slots)
            self.unread = 0

    def known(self, tokens: Tensor) -> Tensor:
        """Tokens that the draft's model can read."""
        return tokens.clamp(max=self.last_token)

    def read_prompts(self, text, slots):
        """Puts self.prompts into the cache, each for its samples."""
        short = [
            [min(token, self.last_token) for token in prompt[: self.max_seq_len]]
            for prompt in self.prompts
        ]
        self.engine.prefill(short, 0, self.samples)

    def feed(self, text, last, at, slots):
        """Puts what stands at [B, any] of the text into the cache."""
        tokens = self.known(text.gather(1, at))
        self.engine.model(tokens, at, slots, last=torch.zeros_like(last))

    def start(self, text, last, k, slots):
        """Where the last token that was read stands [B, 1], and the logits after it."""
        # Two tokens are read: after a step that kept all its drafts, the cache lacks the last of them.
        # Where its cache is full this stays within it; propose() then says that nothing counts.
        at = (last - 1).clamp(max=self.max_seq_len - k - 2)[:, None]
        at = at + torch.arange(2, device=last.device)
        tokens = self.known(text.gather(1, at))
        return at[:, -1:], self.engine.forward(tokens, at, slots)

    def propose(self, text, last, k, reach):
        slots = self.engine.slots(reach)
        at, logits = self.start(text, last, k, slots)
        drafted, distributions = [], []
        for i in range(k):
            if i:
                tokens = self.known(drafted[-1][:, None])
                logits = self.engine.forward(tokens, at + i, slots)
            token, q = self.draw(logits)
            drafted.append(token)
            distributions.append(q)
        distributions.append(torch.zeros_like(q))
        proposed = torch.where(last + k < self.max_seq_len, k, 0)
        return torch.stack(drafted, 1), torch.stack(distributions, 1), proposed

    def draw(self, logits: Tensor):
        """The draft's logits [B, T, any] -> a token [B] after the last column and its distribution [B, V], in the
        target's numbers."""
        if self.vocabulary is not None:
            logits = logits[..., : len(self.vocabulary)]
        engine = self.engine
        token, q = engine.sampler.propose(logits, self.vocab_size, engine.sampling)
        if self.vocabulary is None:
            return token, q
        n = len(self.vocabulary)
        return self.vocabulary[token], torch.zeros_like(q).index_copy(1, self.vocabulary, q[:, :n])


# The steps


class Speculator:
    """The texts of a batch on the device, and the steps that lengthen them: generate.generate() calls begin(), step()
    and to_lists().

    target: the target's generate.Engine; policy: see policies.make_policy(). agree: with several ranks, gives rank 0's
    value to all, so that they choose the same k."""

    def __init__(self, target, draft: Drafter, policy: str, agree: Callable = float):
        self.target = target
        self.draft = draft
        self.policy_name = policy
        self.agree = agree
        self.device = target.device
        rows = target.batch_size
        self.text = torch.zeros(rows, target.max_seq_len, dtype=torch.long, device=self.device)
        # The index of each row's last token.
        self.last = torch.ones(rows, dtype=torch.long, device=self.device)
        self.ends = torch.zeros_like(self.last)  # a row whose last token is there is done
        self.counts = Counter(steps=0, row_steps=0, drafted=0, accepted=0, rejecting_steps=0)
        self.prepare()

    @torch.no_grad()
    def prepare(self):
        """Captures, compiles and times the steps that the policy may use."""
        target, name = self.target, self.policy_name
        self.captures = target.captures and self.draft.captures
        lengths = draft_lengths(name, few=target.compiled and not self.captures)
        if name != "auto" and self.draft.max_seq_len >= target.max_seq_len:
            # Without 0, which is for "auto", and for texts that exceed the draft's cache.
            lengths = lengths[1:]
        lengths = [k for k in lengths if k + 2 <= self.draft.max_seq_len] or [0]
        self.step_of = {k: partial(self.speculate, k) for k in lengths}
        self.ends.fill_(target.max_seq_len)  # no row is done
        self.seq_lens = [2]
        pool = torch.cuda.graph_pool_handle() if self.captures else None
        seconds = {}
        for k in lengths:
            if target.compiled or name == "auto" and k in TIMED_LENGTHS:
                results = self.step_of[k]()
                if self.captures:
                    self.step_of[k] = target.fast.capture(self.step_of[k], results, pool)
                seconds[k] = self.time(self.step_of[k])
        self.policy = make_policy(name, interpolate(seconds, lengths))

    def time(self, step: Callable) -> float:
        """Seconds: the best of a few runs over texts of two tokens."""
        times = []
        while len(times) < 3 or sum(times) < 0.02:
            self.last.fill_(1)
            begun = time.perf_counter()
            step()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(self.agree(time.perf_counter() - begun))
        return min(times)

    def set_sampling(self, sampling: Sampling):
        """For the steps from now on. Graphs stay: they read the values on the device."""
        self.target.set_sampling(sampling)
        self.draft.set_sampling(sampling)
        if self.captures != (self.target.captures and self.draft.captures):
            self.prepare()

    def begin(self, prompts: list[list[int]], new_tokens: int, start: int, samples: int):
        """Reads the prompts, as Engine.begin() does: see there. Rows that are not in use are done."""
        tokens, logprobs = self.target.prefill(prompts, start, samples, new_tokens)  # [P x samples]
        rows = [prompt for prompt in prompts for _ in range(samples)]
        used = len(rows)
        for b, prompt in enumerate(rows):
            self.text[b, start : start + len(prompt)] = torch.tensor(prompt)
        # As far as the host knows: the lengths of the texts, and how many tokens they still lack.
        self.seq_lens = [start + len(prompt) + 1 for prompt in rows]
        self.missing = [new_tokens - 1] * used
        self.last.fill_(1)
        self.last[:used] = torch.tensor(self.seq_lens) - 1
        self.ends.zero_()
        self.ends[:used] = self.last[:used] + new_tokens - 1
        self.text[:used].scatter_(1, self.last[:used, None], tokens[:, None])
        self.draft.begin(prompts, start, samples)
        self.heard = time.perf_counter()
        return tokens, logprobs

    def finish(self, row: int):
        """The host has seen the row's text end."""
        self.missing[row] = 0
        self.ends[row] = 0

    def step(self):
        """Launches a step: what speculate() returns, None where all rows have ended."""
        live = [length for length, n in zip(self.seq_lens, self.missing) if n > 0]
        if not live:
            return None
        k = max(n for n in self.step_of if n <= self.policy.k)
        if min(live) >= self.draft.max_seq_len:
            k = 0
        if k:
            self.draft.catch_up(self.text, self.last, self.reach())
        else:
            self.draft.unread += 1
        return self.step_of[k]()

    def reach(self) -> int:
        """No slot beyond is in use, nor will be after the next two steps. A captured step keeps the value that it was
        captured with: kernels do without it, see Engine.slots()."""
        return max(self.seq_lens) + SLACK

    def speculate(self, k: int):
        """Drafts k tokens, verifies them and moves on -> tokens [B, T], their log-probabilities [B, T], how many of
        them are new text [B], and how many were proposed [B]."""
        target, active = self.target, self.last < self.ends
        # A row that is done moves to position 1, where its attention reads next to nothing. One row alone stays: its
        # cache may serve the next turn of a chat.
        last = torch.where(active, self.last, 1) if len(self.text) > 1 else self.last.clone()
        at = last[:, None] + torch.arange(k + 1, device=self.device)  # [B, T]
        tokens = self.text.gather(1, last[:, None])
        if k:
            drafted, q, proposed = self.draft.propose(self.text, last, k, self.reach())
            tokens = torch.cat([tokens, drafted], dim=1)
        logits = target.forward(tokens, at, target.slots(self.reach()))
        if k:
            tokens, logprobs, accepted = target.sampler.accept(
                logits, tokens, q, proposed, target.sampling
            )
        else:  # with accept() here, too, a useless draft cost the bundled model 11 to 20% on a CPU
            chosen = target.sampler.choose(logits.squeeze(1), target.sampling)
            tokens, logprobs = (each[:, None] for each in chosen)
            accepted = proposed = torch.zeros_like(last)
        self.text.scatter_(1, at + 1, tokens)  # what is no text is overwritten before it is read
        if k:
            self.draft.follow(self.text, last, accepted, k, self.reach())
        new = torch.where(active, accepted + 1, 0)
        self.last += new
        return tokens, logprobs, new, proposed

    def to_lists(self, tokens, logprobs, new: Tensor | None = None, proposed: Tensor | None = None):
        """A step's tensors, now on the host -> the new tokens of each row and their log-probabilities."""
        if new is None:  # begin()'s
            return self.target.to_lists(tokens, logprobs)
        rows, accepted, counts = [], [], self.counts
        lists = tokens.tolist(), logprobs.tolist(), new.tolist(), proposed.tolist()
        for b, (row_tokens, row_logprobs, n, drafted) in enumerate(zip(*lists)):
            rows.append(list(zip(row_tokens, row_logprobs))[:n])
            if n and self.missing[b] > 0:
                self.seq_lens[b] += n
                self.missing[b] -= n
                accepted.append(n - 1)
                counts["row_steps"] += 1
                counts["drafted"] += drafted
                counts["accepted"] += n - 1
                counts["rejecting_steps"] += n <= drafted
        counts["steps"] += bool(accepted)
        k, now = tokens.shape[1] - 1, time.perf_counter()
        # Else the policy wanted to draft, and there was no room.
        if accepted and (k or self.policy.k == 0):
            seconds = now - self.heard
            self.policy.update(
                accepted, k, self.agree(seconds) if isinstance(self.policy, Auto) else seconds
            )
        self.heard = now
        return rows

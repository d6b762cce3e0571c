"""
Speculative decoding: a draft proposes k tokens, and one forward of the target verifies them. The
output has the target's own distribution (arXiv 2211.17192 and 2302.01318). Each row of a batch
moves on at its own pace; no row waits for another's rejection (arXiv 2404.15778).

A rejected draft needs no clean-up. Its keys and values lie past the end of the text, where nothing
attends to them, and the tokens that come next overwrite them: see model.py.

A step runs on the device from drafting to the new ends of the rows; the host reads no value in
between. On a GPU the host learns a step late what came out. Before that it launches the next step,
for which it decides k alone.

Contents: acceptance, the drafts, how many tokens to draft, the steps of a ragged batch. drafts/ has
more drafts, EAGLE heads for one, and the policies that choose k from step to step.

Shapes: B rows, k drafted tokens, T = k + 1, V the target's vocabulary, L cache length.

Names:

    text [B, L]    each row's tokens; behind the last one stands anything
    last [B]       the index of each row's last token, which is known but not yet in the target's cache
    proposed [B]   how many of the k drafted tokens count; 0 where a draft has nothing to say
    accepted [B]   how many of these the target kept; each step adds accepted + 1 tokens to the text
    q [B, T, V]    the distributions that the drafted tokens were drawn from; the last one is zero
    slot           a place in a KV cache, numbered as the text's tokens are: that of token t is slot t
    n_slots        the first n_slots of a row hold all that are in use: attention reads Engine.slots(n_slots)
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from generate import Sampling, choose, draw, logprobs_of, probabilities, round_up

# Slots beyond a text's limit: its last step may draft across the limit, and so may the step in
# flight, of which the host has not heard. Two steps of up to 33 tokens are 66; 72 is the next
# multiple of 8.
SLACK = 72
NGRAM = 3  # prompt lookup searches for the last 3 tokens, then for fewer


# Acceptance


def accept(logits: Tensor, tokens: Tensor, q: Tensor, proposed: Tensor, sampling: Sampling):
    """Speculative sampling (arXiv 2211.17192, algorithm 1).

    tokens [B, T]: the last token of the text, then the drafted ones; logits [B, T, V]: the target's
    after each token; q, proposed: see above -> tokens [B, T], of which accepted + 1 are text, their
    log-probabilities [B, T] under the raw logits, accepted [B].

    A drafted token x is kept with probability min(1, p(x) / q(x)). The first one that is not is
    drawn anew, from the positive part of p - q. Where all that count are kept, one more is drawn,
    from p."""
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
    return tokens, logprobs_of(logits, tokens), accepted


def choose_draft(logits: Tensor, vocab_size: int, sampling: Sampling):
    """As generate.choose(), for one drafted token: a draft's logits [B, T, any] -> a token [B]
    after the last column, and the distribution [B, V] it was drawn from.

    Tokens that the target lacks are left out. Tokens that the draft lacks have probability 0."""
    q = probabilities(logits[:, -1, :vocab_size].float(), sampling)
    q = F.pad(q, (0, vocab_size - q.shape[-1]))
    return draw(q, sampling), q


# Drafts


@dataclass
class Drafter:
    """What proposes tokens. Another kind of draft is a subclass with a propose() and, if it keeps a
    state, the rest; drafts/__init__.py knows its name for --draft.

    begin() starts the texts. A step with drafts calls catch_up(), propose() and, once the target
    has verified them, follow(). propose() and follow() must not wait for the device: the host
    launches them ahead. They are also called before any begin(), by Speculator.prepare().

    vocab_size: the target's; max_seq_len: no token beyond is drafted. unread: how many tokens
    before the last one the draft has not read, a new text's prompt apart. A step without drafts
    adds one, see Speculator.step()."""

    vocab_size: int
    max_seq_len: int
    unread: int = 0

    most = 32  # tokens that it can draft at once
    captures = True  # whether a CUDA graph can hold propose() and follow()

    def set_sampling(self, sampling: Sampling):
        """For the drafts from now on."""

    def begin(self, prompts: list[list[int]], start: int, samples: int):
        """New texts: prompts after `start` tokens of the texts before, and one more token, from the
        target's prefill. Each prompt has `samples` rows."""

    def warm_up_prompts(self, prompts: int):
        """As Engine.warm_up_prompts()."""

    def oldest(self, n: int) -> int:
        """As Transformer.oldest(): the shortest text that a new one may begin with, once n tokens
        have been read."""
        return 0

    def catch_up(self, text: Tensor, last: Tensor, n_slots: int):
        """Reads what is unread."""

    def propose(self, text: Tensor, last: Tensor, k: int, n_slots: int):
        """-> drafted tokens [B, k], q, proposed."""
        raise NotImplementedError

    def follow(self, text: Tensor, at: Tensor, accepted: Tensor, n_slots: int):
        """The end of the step. at [B, T]: the indices of the token that was last for propose(), and
        of the drafted ones behind it, in whose place now stand those that were accepted and one
        more."""


class PromptLookup(Drafter):
    """Drafts from the text's own n-grams: there is no model, and nothing to read."""

    def propose(self, text, last, k, n_slots):
        drafted, proposed = lookup(text, last, k)
        return drafted, F.pad(F.one_hot(drafted, self.vocab_size).float(), (0, 0, 0, 1)), proposed


def lookup(text: Tensor, last: Tensor, k: int):
    """-> drafted tokens [B, k], proposed: 0 or k.

    The draft is what followed the latest earlier match of the text's last NGRAM tokens or, where
    there is none, of fewer. Where the text ends before the draft is k tokens long, the draft starts
    over behind the match. In 5 6 7 5 6 the earlier 5 6 ends at place 1, so a draft of four is 7 5 6
    7."""
    L = text.shape[1]
    at = torch.arange(L, device=text.device)
    # [B, L]; after n rounds, whether the text's last n tokens end at this place, too.
    same = at < last[:, None]
    best = torch.full_like(last, -1)
    for n in range(NGRAM):
        token = text.gather(1, (last - n).clamp(min=0)[:, None])  # [B, 1]
        same &= F.pad(text, (n, 0), value=-1)[:, :L] == token
        # The n-gram's length is the high digit, the place the low one: the maximum is the longest,
        # then the latest.
        best = torch.maximum(best, torch.where(same, n * L + at, -1).amax(1))
    place = best % L  # of the match's last token
    following = torch.arange(k, device=text.device) % (last - place).clamp(min=1)[:, None]
    return text.gather(1, (place[:, None] + 1 + following) % L), torch.where(best < 0, 0, k)


class DraftModel(Drafter):
    """A smaller model with a KV cache of its own, which may be shorter than the target's and may
    lag behind the text.

    A new text's prompt waits in self.prompts until something is drafted. From then on the cache
    holds, between steps, slots 0 to last - 1 - unread. After a step that kept all its drafts the
    last of these is missing, which unread does not count: the last draft is never read in its own
    step. With k = 2, last = 10 and nothing unread:

        start() reads slots 9 and 10, which gives token 11; slot 11 is read, which gives token 12
        if both are kept, the target adds token 13, so last is 13; slot 12 has not been read
        the next start() reads slots 12 and 13

    So start() always reads two slots, and catch_up() at least one more than are unread.

    drafts/heads.py's HeadDraft replaces read_prompts(), read(), start(), forward() and follow(),
    as its slots hold other things, and readable() and choose(), as its vocabulary differs.

    engine: its generate.Engine, with SLACK spare slots. max_seq_len: as Drafter has it."""

    OFFSET = 0  # slot t is read with the text's token at t + OFFSET
    READ_TOKENS = 1024  # at a time, over all rows
    READ_WIDTH = 16  # catch_up() reads a multiple

    def __init__(self, engine, vocab_size: int, max_seq_len: int):
        super().__init__(vocab_size, max_seq_len)
        self.engine = engine
        self.max_token = engine.model.config.vocab_size - 1
        # What new texts begin with, until catch_up() reads it, if anything is drafted.
        self.prompts = None

    @property
    def captures(self) -> bool:
        return self.engine.captures

    def set_sampling(self, sampling):
        self.engine.set_sampling(sampling)

    def warm_up_prompts(self, prompts):
        self.engine.warm_up_prompts(prompts)

    def begin(self, prompts, start, samples):
        if start:
            # One more than the prompts': the last step of the text before may have kept all its
            # drafts.
            self.unread += max(map(len, prompts)) + 1
        else:
            self.prompts, self.samples = prompts, samples
            # With an OFFSET of 1 a prompt's last slot waits for the token behind the prompt.
            self.unread = self.OFFSET

    def oldest(self, n):
        oldest = self.engine.model.oldest(n)
        return oldest and oldest + self.unread + 2  # where catch_up() would begin

    def catch_up(self, text, last, n_slots):
        slots = self.engine.slots(n_slots)
        if self.prompts:
            self.read_prompts(text, slots)
            self.prompts = None
        if self.unread:
            # What is unread, and one slot before it that may be missing, too; behind last is
            # padding, up to a multiple of 16, so that there are few shapes. With 40 unread and last
            # = 100, these are slots 59 to 106. It is on the right, as a recurrent draft can go back
            # by as many tokens as it drafted, and not by more: see DeltaCache. A row near either
            # end of the cache reads as many from that end.
            most = self.max_seq_len - self.OFFSET
            width = min(round_up(self.unread + 1, self.READ_WIDTH), most)
            first = (last - self.unread - 1).clamp(0, most - width)
            at = first[:, None] + torch.arange(width, device=last.device)
            for chunk in at.split(max(32, self.READ_TOKENS // len(at)), dim=1):
                self.read(text, last, chunk, slots)
            self.unread = 0

    def read_prompts(self, text, slots):
        """Puts self.prompts into the cache, each for its samples."""
        short = [
            [min(token, self.max_token) for token in prompt[: self.max_seq_len]]
            for prompt in self.prompts
        ]
        self.engine.prefill(short, 0, self.samples)

    def read(self, text, last, at, slots):
        """Puts the text's tokens at [B, any] into the cache."""
        tokens = self.readable(text.gather(1, at))
        # Nobody reads the logits: one column is computed.
        self.engine.model(tokens, at, slots, last=torch.zeros_like(last), ends=last)

    def readable(self, tokens: Tensor) -> Tensor:
        """The draft's last token takes the place of those that it lacks."""
        return tokens.clamp(max=self.max_token)

    def propose(self, text, last, k, n_slots):
        slots = self.engine.slots(n_slots)
        at, logits = self.start(text, last, k, slots)
        drafted, distributions = [], []
        for i in range(k):
            if i:
                logits = self.forward(drafted[-1][:, None], at + i, slots)
            token, q = self.choose(logits)
            drafted.append(token)
            distributions.append(q)
        distributions.append(torch.zeros_like(q))
        proposed = torch.where(last + k < self.max_seq_len, k, 0)
        return torch.stack(drafted, 1), torch.stack(distributions, 1), proposed

    def start(self, text, last, k, slots):
        """Reads the text's last two tokens, see above -> the last one's slot [B, 1], and the logits
        after it."""
        # Where k tokens do not fit behind last, propose() says that none counts. The clamp keeps
        # that row in the cache, in slots behind max_seq_len.
        at = (last - 1).clamp(max=self.engine.max_seq_len - k - 2)[:, None]
        at = at + torch.arange(2, device=last.device)
        return at[:, -1:], self.forward(text.gather(1, at), at, slots)

    def forward(self, tokens, at, slots):
        """tokens [B, T] in slots at [B, T] -> logits [B, T, any]"""
        return self.engine.forward(self.readable(tokens), at, slots)

    def choose(self, logits: Tensor):
        """choose_draft() with the draft's sampler."""
        engine = self.engine
        return engine.twin(choose_draft)(logits, self.vocab_size, engine.sampling)


# How many tokens to draft


@dataclass
class Policy:
    """How many tokens to draft: always k. drafts/policies.py has others, which change k.

    A step drafts the largest number up to self.k for which the Speculator has made a step."""

    k: int

    timed = ()  # the k whose steps are timed before the first, for begin()

    def lengths(self, few: bool) -> tuple[int, ...]:
        """The values that k may take. few: each costs seconds of compiling."""
        return (self.k,)

    def begin(self, seconds: dict[int, float], lengths: list[int]):
        """Before the first step. lengths: the k that steps are made for; seconds: of a step of each
        of these or, if steps are not compiled, of some."""

    def update(self, accepted: list[int], k: int, seconds: float):
        """A step drafted k tokens, took `seconds`, and accepted so many in each row that had not
        ended."""


# The steps


class Speculator:
    """The texts of a batch on the device, and the steps that lengthen them: generate.generate()
    calls begin(), step() and receive().

    A row is done when last >= ends. The device and the host each have both, and begin() sets them:

        device [B]    moved on by     host, rows in use    moved on by
        last          speculate()     host_last            record(): on a GPU a step after the
        device ends          finish()        host_ends            finish()

    text is on the device alone. It, last and ends change in place, as CUDA graphs of speculate()
    hold them. On the host alone are policy, counts (sums over all steps), received_at, the time
    when a step last came, in_flight, the tokens of the steps that have not come, and reached and
    draft_reached: target and draft have read no token at these places or behind, in this text.

    target: the target's generate.Engine. agree: with several
    ranks, gives rank 0's value to all, so that they choose the same k."""

    def __init__(self, target, draft: Drafter, policy: Policy, agree: Callable = float):
        self.target = target
        self.draft = draft
        self.policy = policy
        self.agree = agree
        self.device = target.device
        rows = target.batch_size
        self.text = torch.zeros(rows, target.max_seq_len, dtype=torch.long, device=self.device)
        self.last = torch.ones(rows, dtype=torch.long, device=self.device)
        self.ends = torch.zeros_like(self.last)
        self.reached = self.draft_reached = self.in_flight = 0
        self.counts = Counter(steps=0, row_steps=0, drafted=0, accepted=0, rejecting_steps=0)
        self.prepare()

    def begin(self, prompts, new_tokens, start, samples):
        """Reads the prompts, as Engine.begin() does: see there. Rows that are not in use are
        done."""
        tokens, logprobs = self.target.prefill(prompts, start, samples)  # [P x samples]
        rows = [prompt for prompt in prompts for _ in range(samples)]
        used = len(rows)
        for b, prompt in enumerate(rows):
            self.text[b, start : start + len(prompt)] = torch.tensor(prompt)
        self.host_last = [start + len(prompt) for prompt in rows]
        self.host_ends = [last + new_tokens - 1 for last in self.host_last]
        self.last.fill_(1)
        self.last[:used] = torch.tensor(self.host_last)
        self.ends.zero_()
        self.ends[:used] = torch.tensor(self.host_ends)
        self.text[:used].scatter_(1, self.last[:used, None], tokens[:, None])
        self.draft.begin(prompts, start, samples)
        end = start + max(map(len, prompts))
        self.reached = max(end, self.reached if start else 0)
        self.draft_reached = max(end, self.draft_reached if start else 0)
        self.in_flight = 0
        self.received_at = time.perf_counter()
        return tokens, logprobs

    def finish(self, row: int):
        """The host has seen the row's text end."""
        if self.host_ends[row]:
            self.ends[row] = self.host_ends[row] = 0

    def oldest(self, n: int) -> int:
        """As Engine.oldest(), of the text that is there. Its steps have gone beyond it by as much
        as they drafted."""
        return max(self.target.model.oldest(self.reached), self.draft.oldest(self.draft_reached))

    def go_back(self, start: int, n: int) -> int:
        """As Engine.go_back()."""
        if start >= self.oldest(n):
            return start
        # What the draft cannot go back to it would have to read from the beginning.
        if start < self.draft.oldest(self.draft_reached) or not self.target.restore(start):
            return 0
        self.reached, _ = self.target.kept
        return start

    def step(self):
        """Launches a step: what speculate() returns, None where all rows are done."""
        live = [last for last, end in zip(self.host_last, self.host_ends) if last < end]
        if not live:
            return None
        k = max(n for n in self.step_of if n <= self.policy.k)
        if min(live) + 1 >= self.draft.max_seq_len:  # all texts fill the draft's cache
            k = 0
        self.in_flight += k + 1
        self.reached = max(self.reached, max(live) + self.in_flight)
        if k:
            self.draft_reached = self.reached
            self.draft.catch_up(self.text, self.last, self.n_slots())
        else:
            self.draft.unread += 1  # the one token that the step adds
        return self.step_of[k]()

    def n_slots(self) -> int:
        """Enough for the two steps that the host has not received when this one runs. A captured
        step keeps the value that it was captured with: kernels do without it, see
        Engine.slots()."""
        return max(self.host_last) + 1 + SLACK

    def speculate(self, k: int):
        """Drafts k tokens, verifies them and moves on -> tokens [B, T], their log-probabilities [B,
        T], how many of them are new text [B], and proposed [B]."""
        target, n_slots = self.target, self.n_slots()
        active = self.last < self.ends
        # A row that is done moves to position 1, where its attention reads next to nothing. One row
        # alone stays: its cache may serve the next turn of a chat.
        last = torch.where(active, self.last, 1) if len(self.text) > 1 else self.last.clone()
        at = last[:, None] + torch.arange(k + 1, device=self.device)  # [B, T]
        tokens = self.text.gather(1, last[:, None])
        if k:
            drafted, q, proposed = self.draft.propose(self.text, last, k, n_slots)
            tokens = torch.cat([tokens, drafted], dim=1)
        logits = target.read(tokens, at, target.slots(n_slots))
        if k:
            tokens, logprobs, accepted = target.sample(accept, logits, at, tokens, q, proposed)
        else:  # with accept() here, too, a useless draft cost the bundled model 11 to 20% on a CPU
            chosen = target.sample(choose, logits.squeeze(1), last)
            tokens, logprobs = (each[:, None] for each in chosen)
            accepted = proposed = torch.zeros_like(last)
        # What is no text is overwritten before it is read. Of rows that are done nothing is read
        # any more.
        self.text.scatter_(1, at + 1, tokens)
        if k:
            self.draft.follow(self.text, at, accepted, n_slots)
        new = torch.where(active, accepted + 1, 0)
        self.last += new  # in place, so `last` is a copy
        return tokens, logprobs, new, proposed

    def receive(self, tokens, logprobs, new=None, proposed=None):
        """What begin() or a step returned, now on the host -> the new tokens of each row and their
        log-probabilities. A step is recorded."""
        if new is None:  # begin()'s
            return self.target.receive(tokens, logprobs)
        self.in_flight -= tokens.shape[1]
        self.record(tokens.shape[1] - 1, new.tolist(), proposed.tolist())
        rows = zip(tokens.tolist(), logprobs.tolist(), new.tolist())
        return [list(zip(row, of_row))[:n] for row, of_row, n in rows]

    def record(self, k: int, new: list[int], proposed: list[int]):
        """Brings host_last, the counts and the policy up to date after a step of k drafts."""
        kept, counts = [], self.counts
        for b, (n, drafted) in enumerate(zip(new, proposed)):
            # Not of a row that finish() ended while the step ran.
            if n and self.host_last[b] < self.host_ends[b]:
                self.host_last[b] += n
                kept.append(n - 1)
                counts["row_steps"] += 1
                counts["drafted"] += drafted
                counts["accepted"] += n - 1
                counts["rejecting_steps"] += n <= drafted
        counts["steps"] += bool(kept)
        seconds = time.perf_counter() - self.received_at
        self.received_at += seconds
        # A step without drafts tells nothing of a policy that wanted some and had no room for them.
        if kept and (k or self.policy.k == 0):
            if self.policy.timed:  # it goes by time
                seconds = self.agree(seconds)
            self.policy.update(kept, k, seconds)

    # What is made before the first step

    @torch.no_grad()
    def prepare(self):
        """Captures, compiles and times the steps that the policy, and step() where a draft's cache
        is full, may use: step_of[k](). It writes over texts and caches from slot 1 on."""
        target = self.target
        self.captures = target.captures and self.draft.captures
        # They run over texts of two tokens, none of which is done.
        self.last.fill_(1)
        self.ends.fill_(target.max_seq_len)
        self.host_last = [1]
        self.step_of = {}
        seconds = {}
        lengths = self.lengths()
        for k in lengths:
            step = partial(self.speculate, k)
            # Compiled, each step runs here, so that none compiles later.
            # The longest, too: beyond what is timed the times are taken as equal.
            timed = self.policy.timed and k in (*self.policy.timed, lengths[-1])
            if target.compiled or timed:
                results = step()
                if self.captures:
                    step = target.capture(step, results)
                seconds[k] = self.measure(step)
            self.step_of[k] = step
        self.policy.begin(seconds, lengths)
        self.steps_of = {self.kind_of_steps(): self.step_of}

    def first_step(self, k: int):
        """A step of k drafts for which there is no graph yet: it is made for the next ones."""
        step = partial(self.speculate, k)
        results = step()
        self.step_of[k] = self.target.capture(step, results)
        return results

    def lengths(self) -> list[int]:
        """The values of k that a step is made for: those of the policy that the draft can draft and
        its cache has room for, and 0, no draft, for texts that outgrow that cache."""
        room, most = self.draft.max_seq_len, self.draft.most
        if type(self.policy) is Policy and self.policy.k > most:
            raise ValueError(
                f"draft_tokens={self.policy.k}: the draft proposes {most} tokens at most"
            )
        wanted = {*self.policy.lengths(few=self.target.compiled and not self.captures)}
        if room < self.target.max_seq_len:
            wanted.add(0)
        if max(wanted) > most:  # a whole block costs little more than a part of it
            wanted.add(most)
        # The shortest text has two tokens.
        return sorted(k for k in wanted if 2 + k <= room and k <= most) or [0]

    @torch.no_grad()
    def warm_up(self, prompts: int, alone: bool = True):
        """Compiles what a batch of so many prompts needs beside the steps, which prepare() has
        made. alone: as Engine.warm_up() has it."""
        self.begin([[0, 0]] * prompts, 1, 0, 1)
        self.draft.catch_up(self.text, self.last, self.n_slots())
        self.target.warm_up_prompts(prompts)
        self.draft.warm_up_prompts(prompts)

    def measure(self, step: Callable) -> float:
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
        """For the steps from now on. Graphs stay, as they read the values on the device. Steps of
        another kind are made when they are first wanted: prepare() would write over a chat's
        cache."""
        self.target.set_sampling(sampling)
        self.draft.set_sampling(sampling)
        self.captures = self.target.captures and self.draft.captures
        make = self.first_step if self.captures else self.speculate
        new = {k: partial(make, k) for k in self.lengths()}
        self.step_of = self.steps_of.setdefault(self.kind_of_steps(), new)

    def kind_of_steps(self) -> tuple[bool, bool]:
        """Whether steps are CUDA graphs, and whether these have penalties in them."""
        return self.captures, self.captures and self.target.penalties is not None

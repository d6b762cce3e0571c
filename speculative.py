"""
Speculative decoding: a draft proposes tokens, one forward of the target checks them all, and what is kept has the
distribution of what the target writes alone (arXiv 2211.17192 and 2302.01318). Each row of a batch moves on at its own
pace, and no row waits for another's rejection (arXiv 2404.15778).

A step runs on the device from drafting to the new ends of the rows, without the host reading a value. The host learns a
step late what came out, launches the next one before, and says only how many tokens to draft; on a GPU each of a few
such lengths is a CUDA graph, drafts and all.

Shapes: B rows, l drafted tokens, T = l + 1, V the target's vocabulary, L slots of the cache.
"""
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from policies import LENGTHS, Auto, policy

SLACK = 72  # slots beyond a text's limit: its last step may draft across it, and the one launched by then
NGRAM = 3  # prompt lookup looks for the last so many tokens, then for fewer


def accept(logits: Tensor, read: Tensor, q: Tensor, proposed: Tensor, sampling, distribution: Callable,
           draw: Callable) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling. read [B, T]: the end of the text and the drafted tokens, with their distributions q [B, T,
    V], the last of which is zero; proposed [B]: how many of them count; the target's logits [B, T, V] after each ->
    tokens [B, T], of which accepted + 1 are text, their log-probabilities [B, T] under the raw logits, accepted [B].

    A token x is kept with probability min(1, p(x) / q(x)). The first that is not is drawn anew, from what p has more
    than q; where all are kept, one more is drawn from p, as q is zero there."""
    drafted = read[:, 1:]  # [B, l]
    p, total = distribution(logits, sampling)  # [B, T, V], [B, T]
    nth = torch.arange(drafted.shape[1], device=logits.device)  # [l]
    p_x, q_x = (dist[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1) for dist in (p, q))  # [B, l]
    kept = (torch.rand_like(p_x) * q_x < p_x) & (nth < proposed[:, None])
    accepted = kept.long().cumprod(1).sum(1)
    here = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p, q = p.gather(1, here).squeeze(1), q.gather(1, here).squeeze(1)  # [B, V]
    rest = (p - q * (accepted < proposed)[:, None]).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # nothing left: p and q are equal but for rounding
    tokens = F.pad(drafted, (0, 1)).scatter(1, accepted[:, None], draw(rest, sampling)[:, None])
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - total
    return tokens, logprobs, accepted


def propose(logits: Tensor, vocabulary: int, sampling, distribution: Callable, draw: Callable) -> tuple[Tensor, Tensor]:
    """A draft's logits [B, T, any] -> a token [B] after the last column and the distribution [B, V] it was drawn from:
    tokens that the target lacks are left out, those that the draft lacks have probability 0."""
    q, _ = distribution(logits[:, -1, :vocabulary], sampling)
    q = F.pad(q, (0, vocabulary - q.shape[-1]))
    return draw(q, sampling), q


def lookup(text: Tensor, last: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """What followed the latest earlier place that reads as the end of text [B, L] does, which is at last [B]: tokens
    [B, length], and 0 or `length` [B] of them. Longer agreement comes first, up to NGRAM tokens; a place so near that
    what follows is the end itself goes round in a circle."""
    B, L = text.shape
    at = torch.arange(L, device=text.device)
    same = torch.ones(B, L, dtype=torch.bool, device=text.device)
    best = at.new_full((B,), -1)
    for n in range(NGRAM):
        token = text.gather(1, (last - n).clamp(min=0)[:, None])  # [B, 1]
        same &= (F.pad(text, (n, 0), value=-1)[:, :L] == token) & (at < last[:, None]) & (at >= n)
        best = torch.maximum(best, torch.where(same, at + n * L, -1).amax(1))
    place = best % L
    steps = torch.arange(length, device=text.device) % (last - place).clamp(min=1)[:, None]
    return text.gather(1, (place[:, None] + 1 + steps) % L), torch.where(best < 0, 0, length)


def captured(run: Callable, slots: tuple[Tensor, Tensor], pool: tuple[int, int]) -> Callable:
    """run(slots) as a CUDA graph, which gives the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run(slots)

    def replay(_) -> Tensor:
        graph.replay()
        return out
    return replay


class Speculator:
    """The texts of a batch on the device, and the steps that lengthen them.

    target, draft (tokens [B, T], positions [B, T], slots) -> logits [B, T, V]; draft None: prompt lookup. accept,
    propose: as above, with all that they need but tensors. decode (tokens [B], positions [B], slots): a plain step, for
    a CPU. slots (n): of both models, those to look at when n are in use. length: of the target's cache; room: of the
    draft's. agree (seconds): rank 0's, on all ranks, or these would draft as their own clocks tell them."""

    def __init__(self, target: Callable, draft: Callable | None, accept: Callable, propose: Callable, decode: Callable,
                 slots: tuple[Callable, Callable], rows: int, length: int, room: int, vocabulary: int,
                 device: torch.device, agree: Callable):
        self.target, self.draft, self.accept, self.propose = target, draft, accept, propose
        self.decode, self.slots, self.agree = decode, slots, agree
        self.room, self.vocabulary, self.cuda = room, vocabulary, device.type == "cuda"
        self.text = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.last = torch.ones(rows, dtype=torch.long, device=device)  # where each text ends
        self.ends = torch.full_like(self.last, length)  # a row whose last is there is done
        self.lengths = [length if self.cuda else 2] * rows  # a captured step looks at all slots
        self.runs, self.seconds, self.unread = {}, {}, 0  # the first two by length; seconds as far as they are wanted
        self.counts = Counter(steps=0, row_steps=0, drafted=0, accepted=0, rejecting_steps=0)

    def prepare(self, draft_tokens: str, compile: bool) -> None:
        """Captures and times steps of the lengths that a policy may run. compile: each as a whole, so only few."""
        lengths = LENGTHS[1:] if not compile else [1, 2, 4, 8]
        if draft_tokens.isdecimal():
            lengths = [int(draft_tokens)]
        if draft_tokens == "auto" or self.room < self.text.shape[1]:
            lengths = [0, *lengths]
        lengths = [length for length in lengths if length + 2 <= self.room] or [0]
        pool = torch.cuda.graph_pool_handle() if self.cuda else None
        for length in lengths:
            run = partial(torch.compile(self.run, fullgraph=True) if compile else self.run, length)
            if length == 0 and not self.cuda:  # pause() runs these: run() has more to do around the model
                run = self.plain_step
            if not (self.cuda or compile or draft_tokens == "auto"):
                # Nothing to warm up, and no policy that asks for times: a large draft's took 40 s on a CPU.
                self.runs[length] = run
                continue
            run(self.slots_in_use())
            if self.cuda:
                run = captured(run, self.slots_in_use(), pool)
            times = []
            while len(times) < 3 or sum(times) < 0.02:
                self.last.fill_(1)
                begun = time.perf_counter()
                run(self.slots_in_use())
                if self.text.device.type != "cpu":
                    torch.accelerator.synchronize()
                times.append(self.agree(time.perf_counter() - begun))
            self.runs[length], self.seconds[length] = run, min(times)
        self.policy = policy(draft_tokens, self.seconds)

    def begin(self, prompts: list[list[int]], start: int, tokens: Tensor, limit: int) -> bool:
        """Texts of `start` tokens that are there, of a prompt each and of the token [B] drawn after it; at most `limit`
        new ones, that one counted. True: the draft is to read the prompts; not if nothing will be drafted at first."""
        width = max(map(len, prompts))
        padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
        self.text[:, start:start + width] = padded.to(self.text.device)
        self.lengths = [start + len(prompt) + 1 for prompt in prompts]  # of the texts, as far as the host knows
        self.limits = [length + limit - 1 for length in self.lengths]
        self.last.copy_(torch.tensor(self.lengths) - 1)
        self.ends.copy_(torch.tensor(self.limits) - 1)
        self.text.scatter_(1, self.last[:, None], tokens[:, None])
        read = self.draft is not None and start < self.room and (self.policy.length > 0 or width > 256)
        # Tokens at the end that the draft has not read; of a chat's last answer it may lack one that it drafted.
        self.unread = self.unread + 1 + width if start else 0 if read else width
        self.launched, self.heard = deque(), time.perf_counter()
        return read

    def plain_step(self, slots: tuple[Tensor, Tensor]) -> Tensor:
        """One to be timed; pause() runs those that count."""
        return self.decode(self.last * 0, self.last.clone(), slots[0])

    def finish(self, row: int) -> None:
        """The host has seen the row's text end."""
        self.limits[row], self.ends[row] = 0, 0

    def steps(self) -> Iterator[Tensor]:
        """Each step as it is launched, in the form of run() or, without drafts on a CPU, tokens and log-probabilities
        [2, B]."""
        while left := [limit - length for length, limit in zip(self.lengths, self.limits) if limit > length]:
            length = max(length for length in self.runs if length <= max(self.policy.length, min(self.runs)))
            if min(length for length, limit in zip(self.lengths, self.limits) if limit > length) >= self.room:
                length = 0
            if length == 0 and not self.cuda:
                yield from self.pause(min(self.policy.pause(), *left), len(left))
                continue
            if length and self.unread and self.draft:  # a power of two: few shapes
                width = min(max(32, 1 << self.unread.bit_length()), self.room)
                at = (self.last - width).clamp(0, self.room - width)[:, None]
                at = at + torch.arange(width, device=self.last.device)
                for piece in at.split(max(32, 1024 // len(at)), dim=1):  # each makes logits, which nobody wants
                    self.draft(self.text.gather(1, piece), piece, self.slots[1](self.reach()))
            self.unread = 0 if length else self.unread + 1
            self.launched.append(length)
            yield self.runs[length](self.slots_in_use())

    def pause(self, steps: int, rows: int) -> Iterator[Tensor]:
        """So many plain steps for `rows` unfinished rows."""
        active = self.last < self.ends
        tokens = self.text.gather(1, self.last[:, None]).squeeze(1)
        positions, chosen = torch.where(active, self.last, 0), []
        try:
            for reach in range(max(self.lengths), max(self.lengths) + steps):
                chosen.append(self.decode(tokens, positions, self.slots[0](reach)))
                yield chosen[-1]
        finally:  # the host may have enough of it before
            n = len(chosen)
            at = self.last[:, None] + torch.arange(1, n + 1, device=self.last.device)
            if chosen:
                self.text.scatter_(1, at.clamp(max=self.text.shape[1] - 1), torch.stack(chosen)[:, 0].t().long())
            self.last += n * active
            self.unread += n
            self.counts.update(steps=n, row_steps=rows * n)
            for b, limit in enumerate(self.limits):
                self.lengths[b] += n * (limit > self.lengths[b])
            self.policy.paused(n)
            self.heard = time.perf_counter()

    def learn(self, step: list) -> list[list[tuple[int, float]]]:
        """What run() gave, on the host now -> the new tokens of each row and their log-probabilities."""
        rows = [[(int(token), logprob) for token, logprob in zip(*row) if token >= 0] for row in step]
        live = [b for b, new in enumerate(rows) if new and self.lengths[b] < self.limits[b]]
        accepted, proposed = [len(rows[b]) - 1 for b in live], [int(step[b][1][-1]) for b in live]
        length, now = self.launched.popleft(), time.perf_counter()
        if live and (length or self.policy.length == 0):  # else there was no room to draft
            seconds = now - self.heard
            self.policy.update(accepted, length, self.agree(seconds) if isinstance(self.policy, Auto) else seconds)
        self.heard = now
        rejecting = sum(n < most for n, most in zip(accepted, proposed))
        self.counts.update(steps=bool(live), row_steps=len(live), drafted=sum(proposed), accepted=sum(accepted),
                           rejecting_steps=rejecting)
        for b in live:
            self.lengths[b] += len(rows[b])
        return rows

    def reach(self) -> int:
        """No slot beyond is in use, nor will be after the next two steps."""
        return max(self.lengths) + SLACK

    def slots_in_use(self) -> tuple[Tensor, Tensor]:
        return self.slots[0](self.reach()), self.slots[1](self.reach())

    def run(self, length: int, slots: tuple[Tensor, Tensor]) -> Tensor:
        """Drafts, checks and moves on -> [B, 2, T + 1]: tokens and log-probabilities, tokens of -1 where there is none;
        the last column has, in the place of log-probabilities, how many tokens were proposed."""
        B = len(self.text)
        active = self.last < self.ends
        # The attention of a row that is done reads next to nothing. One row alone: its cache may serve a chat on.
        last = torch.where(active, self.last, 1) if B > 1 else self.last
        step = torch.arange(length + 1, device=last.device)
        drafted, q, proposed = self.drafts(last, length, slots[1])
        tokens = torch.cat([self.text.gather(1, last[:, None]), drafted], dim=1)
        logits = self.target(tokens, last[:, None] + step, slots[0])
        tokens, logprobs, accepted = self.accept(logits, tokens, q, proposed)
        self.text.scatter_(1, last[:, None] + 1 + step, tokens)  # what is no text is written over before it is read
        self.last += torch.where(active, accepted + 1, 0)
        shown = torch.where(active[:, None] & (step <= accepted[:, None]), tokens, -1)
        return torch.stack([F.pad(shown, (0, 1), value=-1).float(),  # floats hold tokens exactly: up to 2 ** 24
                            torch.cat([logprobs, proposed[:, None]], dim=1)], dim=1)

    def drafts(self, last: Tensor, length: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Drafted tokens [B, l], their distributions [B, T, V] and how many of them count [B]."""
        if self.draft is None:
            drafted, proposed = lookup(self.text, last, length)
            return drafted, F.pad(F.one_hot(drafted, self.vocabulary).float(), (0, 0, 0, 1)), proposed
        # Two tokens at first: after a step that kept all its drafts, the draft has not read the last of them.
        at = (last - 1).clamp(max=self.room - length - 2)[:, None] + torch.arange(2, device=last.device)
        fed = self.text.gather(1, torch.stack([last - 1, last], dim=1))
        drafted, q = [], []
        for _ in range(length):
            for part, new in zip((drafted, q), self.propose(self.draft(fed, at, slots))):
                part.append(new)
            fed, at = drafted[-1][:, None], at[:, -1:] + 1
        q.append(torch.zeros(len(last), self.vocabulary, device=last.device))
        drafted = torch.stack(drafted, dim=1) if drafted else last.new_empty(len(last), 0)
        return drafted, torch.stack(q, dim=1), torch.where(last + length < self.room, length, 0)

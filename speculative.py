"""
Speculative decoding: a draft proposes k tokens, and one forward of the target verifies them. The output has the
target's own distribution (arXiv 2211.17192 and 2302.01318). Each row of a batch moves on at its
own pace; no row waits for another's rejection (arXiv 2404.15778).

A rejected draft needs no clean-up. Its keys and values lie past the end of the text, where nothing attends to them, and
the tokens that come next overwrite them: see model.py.

A step runs on the device from drafting to the new ends of the rows; the host reads no value in between. The host learns
a step late what came out. Before that it launches the next step, for which it decides k alone. On a GPU each k is a
CUDA graph, drafts and all.

Contents: acceptance, the drafts, the policies that choose k, the loop over a ragged batch.

Shapes: B rows, k drafted tokens, T = k + 1, V the target's vocabulary, L cache length.
"""
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Transformer
from sampling import Sampling, draw, probabilities

SLACK = 72  # slots beyond a text's limit: its last step may draft across the limit, and so may the step in flight
NGRAM = 3  # prompt lookup searches for the last 3 tokens, then for fewer
DRAFT_LENGTHS = 0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32  # the values of k that a policy may use


@dataclass(frozen=True)
class Draft:
    """What drafts, a smaller model or (None) prompt lookup, and how many tokens: a number, "auto", "hf" or "bass"."""
    model: Transformer | None = None
    policy: str = "auto"


# Acceptance


def accept(logits: Tensor, tokens: Tensor, q: Tensor, proposed: Tensor,
           sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling (arXiv 2211.17192, algorithm 1).

    tokens [B, T]: the last token of the text, then the drafted ones; q [B, T, V]: the distributions these were drawn
    from, the last one zero; proposed [B]: how many of them count; logits [B, T, V]: the target's after each token ->
    tokens [B, T], of which accepted + 1 are text, their log-probabilities [B, T] under the raw logits, accepted [B].

    A drafted token x is kept with probability min(1, p(x) / q(x)). The first one that is not is drawn anew, from the
    positive part of p - q. Where all are kept, one more is drawn from p, since q is zero there."""
    drafted, logits = tokens[:, 1:], logits.float()  # [B, k]
    p = probabilities(logits, sampling)  # [B, T, V]
    nth = torch.arange(drafted.shape[1], device=logits.device)  # [k]
    p_x, q_x = (probs[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1) for probs in (p, q))  # [B, k]
    kept = (torch.rand_like(p_x) * q_x < p_x) & (nth < proposed[:, None])
    accepted = kept.long().cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p, q = p.gather(1, at).squeeze(1), q.gather(1, at).squeeze(1)  # [B, V]
    residual = (p - q * (accepted < proposed)[:, None]).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)  # all zero: p and q differ by rounding only
    tokens = F.pad(drafted, (0, 1)).scatter(1, accepted[:, None], draw(residual, sampling)[:, None])
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return tokens, logprobs, accepted


def propose(logits: Tensor, vocab_size: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """A draft's logits [B, T, any] -> a token [B] after the last column, and the distribution [B, V] it was drawn from.

    Tokens that the target lacks are left out. Tokens that the draft lacks have probability 0."""
    q = probabilities(logits[:, -1, :vocab_size].float(), sampling)
    q = F.pad(q, (0, vocab_size - q.shape[-1]))
    return draw(q, sampling), q


# Drafts


def lookup(text: Tensor, last: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Prompt lookup: text [B, L], each row's last token at last [B] -> drafted tokens [B, k], how many count [B], 0 or
    k.

    The draft is what followed the latest earlier match of the text's last NGRAM tokens or, where there is none, of
    fewer. Where the text ends before the draft is k tokens long, the draft starts over at the match."""
    B, L = text.shape
    at = torch.arange(L, device=text.device)
    same = torch.ones(B, L, dtype=torch.bool, device=text.device)
    best = at.new_full((B,), -1)
    for n in range(NGRAM):
        token = text.gather(1, (last - n).clamp(min=0)[:, None])  # [B, 1]
        same &= (F.pad(text, (n, 0), value=-1)[:, :L] == token) & (at < last[:, None]) & (at >= n)
        best = torch.maximum(best, torch.where(same, at + n * L, -1).amax(1))
    place = best % L
    steps = torch.arange(k, device=text.device) % (last - place).clamp(min=1)[:, None]
    return text.gather(1, (place[:, None] + 1 + steps) % L), torch.where(best < 0, 0, k)


class PromptLookup:
    """Drafts from the text's own n-grams: there is no model, and nothing to read. target: a generate.ModelRunner."""

    def __init__(self, target):
        self.vocab_size, self.max_seq_len, self.slots = target.model.config.vocab_size, target.max_seq_len, target.slots
        self.unread = 0

    begin = prefill = catch_up = lambda self, *args: None

    def propose(self, text: Tensor, last: Tensor, k: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As DraftModel.propose()."""
        drafted, proposed = lookup(text, last, k)
        return drafted, F.pad(F.one_hot(drafted, self.vocab_size).float(), (0, 0, 0, 1)), proposed


class DraftModel:
    """A smaller model with a KV cache of its own, which may be shorter than the target's and may lag behind the text.

    runner: its generate.ModelRunner. vocab_size: the target's."""

    def __init__(self, runner, vocab_size: int):
        self.runner, self.max_seq_len, self.slots = runner, runner.max_seq_len, runner.slots
        self.last_token = runner.model.config.vocab_size - 1  # read in place of tokens that the vocabulary lacks
        self.vocab_size, self.unread = vocab_size, 0  # unread: trailing tokens of the text that the cache lacks

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return self.runner.decoder(tokens.clamp(max=self.last_token), positions, slots)

    def begin(self, prompts: list[list[int]], start: int, samples: int, drafting: bool) -> None:
        """New prompts behind `start` tokens that are cached. One more token follows each, from the target's prefill."""
        width = max(map(len, prompts))
        # 1: the cache may lack the last answer's last token, which was drafted. catch_up() reads what follows it.
        self.unread = self.unread + 1 + width if start else width
        self.prompts, self.samples = prompts, samples
        self.reads_prompts = not start and (drafting or width > 256)

    def prefill(self) -> None:
        if self.reads_prompts:
            prompts = [[min(token, self.last_token) for token in prompt[:self.max_seq_len]] for prompt in self.prompts]
            self.runner.prefill_prompts(prompts, 0, self.samples)
            self.unread = 0

    def catch_up(self, text: Tensor, last: Tensor, reach: int) -> None:
        """Reads what the cache lacks of text [B, L] up to last [B]. reach: no slot beyond it is in use."""
        if self.unread:
            width = min(max(32, 1 << self.unread.bit_length()), self.max_seq_len)  # a power of two: few shapes
            at = (last - width).clamp(0, self.max_seq_len - width)[:, None]
            at = at + torch.arange(width, device=last.device)
            for chunk in at.split(max(32, 1024 // len(at)), dim=1):  # in chunks: each makes logits that nobody wants
                self.forward(text.gather(1, chunk), chunk, self.slots(reach))
        self.unread = 0

    def propose(self, text: Tensor, last: Tensor, k: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """text [B, L], each row's last token at last [B] -> drafted tokens [B, k], their distributions [B, T, V], the
        last one zero, and how many of them count [B]."""
        # The first forward reads two tokens: after a step that kept all its drafts, the cache lacks the last of them.
        at = (last - 1).clamp(max=self.max_seq_len - k - 2)[:, None] + torch.arange(2, device=last.device)
        tokens = text.gather(1, torch.stack([last - 1, last], dim=1))
        drafted, q = [], []
        for _ in range(k):
            logits = self.forward(tokens, at, slots)
            token, probs = self.runner.propose(logits, self.vocab_size, self.runner.sampling)
            drafted.append(token)
            q.append(probs)
            tokens, at = token[:, None], at[:, -1:] + 1
        q.append(torch.zeros(len(last), self.vocab_size, device=last.device))
        drafted = torch.stack(drafted, dim=1) if drafted else last.new_empty(len(last), 0)
        return drafted, torch.stack(q, dim=1), torch.where(last + k < self.max_seq_len, k, 0)


# Policies


class Fixed:
    """How many tokens to draft: always k. The other policies change k from step to step."""

    def __init__(self, k: int = 0):
        self.k = k

    def update(self, accepted: list[int], k: int, seconds: float) -> None:
        """A step drafted k tokens, took `seconds`, and accepted so many in each row that had not ended."""

    def pause(self) -> int:
        """How many steps to go without drafts, now that k is 0."""
        return 1

    def paused(self, steps: int) -> None:
        """`steps` steps went without drafts."""


class Heuristic(Fixed):
    """That of transformers' assisted generation: 5 at first, 2 more when all match, else 1 less.

    Of a batch the row that accepted most counts."""

    def __init__(self):
        self.k = 5

    def update(self, accepted: list[int], k: int, seconds: float) -> None:
        self.k = self.k + 2 if max(accepted) == k else max(1, self.k - 1)


class Bass(Fixed):
    """arXiv 2404.15778, algorithm 1."""

    def __init__(self):
        self.k, self.decreased = 7, 0

    def update(self, accepted: list[int], k: int, seconds: float) -> None:
        if max(accepted) == k:
            self.k, self.decreased = min(self.k + 2, DRAFT_LENGTHS[-1]), 0
        else:
            shorter = self.k - ceil(self.k / 10) - self.decreased
            self.k, self.decreased = max(1, shorter, *accepted), 1


class Auto(Fixed):
    """The k that promises the most tokens a second.

    It estimates how often a token is accepted and how long a step of each k takes. It stops where drafting is slower
    than not drafting. It retries while the time lost in retries stays a small share of all time."""

    LOSS = 0.02  # that share
    MEMORY = 0.95  # how much of a step's counts remains after the next step

    def __init__(self, seconds: dict[int, float]):
        self.seconds = dict(seconds)  # of a step of each k, as the rows are now
        self.lost = self.elapsed = 0.0
        self.optimism()

    def optimism(self) -> None:
        self.accepted, self.tried = 1.6, 2.0
        self.k = self.best()

    def best(self) -> int:
        rate = min(0.999, self.accepted / self.tried)
        tokens = {k: (1 - rate ** (k + 1)) / (1 - rate) for k in self.seconds}  # 1 + rate + rate ** 2 + ...
        return max(tokens, key=lambda k: tokens[k] / self.seconds[k])

    def update(self, accepted: list[int], k: int, seconds: float) -> None:
        usual = self.seconds[k]
        self.seconds[k] += 0.1 * (min(max(seconds, usual / 2), 2 * usual) - usual)  # a hiccup moves it little
        spent = min(seconds, 10 * usual)  # what the draft had to catch up on counts, a wait for the reader does not
        self.elapsed += spent
        if k:  # without drafts nothing is learnt about the draft
            self.accepted = self.MEMORY * self.accepted + sum(accepted)
            self.tried = self.MEMORY * self.tried + sum(n + (n < k) for n in accepted)
            gained = 1 + sum(accepted) / len(accepted)
            self.lost = max(0.0, self.lost + spent - gained * self.seconds[0])
            self.k = self.best()
        if self.k == 0 and self.lost < self.LOSS * self.elapsed:
            self.optimism()

    def pause(self) -> int:
        return max(128, ceil((self.lost / self.LOSS - self.elapsed) / self.seconds[0]))

    def paused(self, steps: int) -> None:
        self.elapsed += steps * self.seconds[0]
        if self.lost <= self.LOSS * self.elapsed:
            self.optimism()


def make_policy(name: str, seconds: dict[int, float]) -> Fixed:
    """name: a number, auto, hf or bass. seconds: of a step of each k that auto may choose."""
    kinds = dict(auto=partial(Auto, seconds), hf=Heuristic, bass=Bass)
    return kinds[name]() if name in kinds else Fixed(int(name))


# The loop


class Speculator:
    """The texts of a batch on the device, and the steps that lengthen them.

    target: the target's generate.Generator; draft: a DraftModel or PromptLookup; policy_name: see make_policy(). The
    ranks agree on rank 0's timing, so that all choose the same k."""

    def __init__(self, target, draft: DraftModel | PromptLookup, policy_name: str):
        self.target, self.draft, self.policy_name, self.agree = target, draft, policy_name, target.team.agree
        self.device, self.max_seq_len = target.device, target.max_seq_len
        self.cuda = self.device.type == "cuda"
        rows = target.batch_size
        self.text = torch.zeros(rows, self.max_seq_len, dtype=torch.long, device=self.device)
        self.last = torch.ones(rows, dtype=torch.long, device=self.device)  # the index of each row's last token
        self.ends = torch.full_like(self.last, self.max_seq_len)  # a row whose last token is there is done
        self.seq_lens = [2] * rows  # the lengths of the texts as far as the host knows them
        self.limits = [0] * rows  # the lengths at which they end
        self.step_of, self.seconds = {}, {}  # k -> a step that drafts k tokens; k -> its time, if a policy asks for it
        self.launched = deque()  # k of each step that the host has not heard of yet
        self.counts = Counter(steps=0, row_steps=0, drafted=0, accepted=0, rejecting_steps=0)

    @torch.no_grad()
    def prepare(self) -> None:
        """Captures and times a step of each k that the policy may use. Without kernels, which a CUDA graph captures as
        they are, each step is compiled as a whole, so there are few."""
        policy, compile = self.policy_name, self.target.compiled and not self.target.kernels
        self.ends.fill_(self.max_seq_len)  # no row is done
        self.seq_lens = [self.max_seq_len if self.cuda else 2] * len(self.text)  # a captured step looks at all slots
        lengths = [1, 2, 4, 8] if compile else list(DRAFT_LENGTHS[1:])
        if policy.isdecimal():
            lengths = [int(policy)]
        if policy == "auto" or self.draft.max_seq_len < self.max_seq_len:
            lengths = [0, *lengths]
        lengths = [k for k in lengths if k + 2 <= self.draft.max_seq_len] or [0]
        pool = torch.cuda.graph_pool_handle() if self.cuda else None
        for k in lengths:
            step = partial(torch.compile(self.step, fullgraph=True) if compile else self.step, k)
            if k == 0 and not self.cuda:
                step = self.plain_step
            # Without graphs and without a policy that asks for times, there is nothing to run yet.
            if self.cuda or compile or policy == "auto":
                step(self.slots_in_use())
                if self.cuda:
                    step = capture(step, self.slots_in_use(), pool)
                self.seconds[k] = self.time(step)
            self.step_of[k] = step
        self.policy = make_policy(policy, self.seconds)

    def time(self, step: Callable) -> float:
        """Seconds: the best of a few runs over texts of two tokens."""
        times = []
        while len(times) < 3 or sum(times) < 0.02:
            self.last.fill_(1)
            begun = time.perf_counter()
            step(self.slots_in_use())
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(self.agree(time.perf_counter() - begun))
        return min(times)

    def begin(self, prompts: list[list[int]], start: int, samples: int, tokens: Tensor, limit: int) -> None:
        """Texts of `start` tokens that are there already, a prompt [for each `samples` rows] and the token [P x
        samples] that prefill drew after it. limit: new tokens at most, that one included. Other rows are done."""
        rows = [prompt for prompt in prompts for _ in range(samples)]
        width, unused = max(map(len, rows)), len(self.text) - len(rows)
        padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in rows])
        self.text[:len(rows), start:start + width] = padded.to(self.device)
        self.seq_lens = [start + len(prompt) + 1 for prompt in rows] + [2] * unused
        self.limits = [length + limit - 1 for length in self.seq_lens[:len(rows)]] + [0] * unused
        self.last.copy_(torch.tensor(self.seq_lens) - 1)
        self.ends.copy_(torch.tensor(self.limits) - 1)
        self.text[:len(rows)].scatter_(1, self.last[:len(rows), None], tokens[:, None])
        self.draft.begin(prompts, start, samples, self.policy.k > 0)
        self.launched.clear()
        self.heard = time.perf_counter()

    def unfinished(self) -> list[int]:
        return [b for b, limit in enumerate(self.limits) if limit > self.seq_lens[b]]

    def finish(self, row: int) -> None:
        """The host has seen the row's text end."""
        self.limits[row], self.ends[row] = 0, 0

    def steps(self) -> Iterator[Tensor]:
        """Each step as it is launched: what step() returns or, without drafts on a CPU, tokens and log-probabilities
        [2, B]."""
        self.draft.prefill()
        while rows := self.unfinished():
            wanted = max(self.policy.k, min(self.step_of))
            k = max(n for n in self.step_of if n <= wanted)
            if min(self.seq_lens[b] for b in rows) >= self.draft.max_seq_len:
                k = 0
            if k == 0 and not self.cuda:
                left = [self.limits[b] - self.seq_lens[b] for b in rows]
                yield from self.pause(min(self.policy.pause(), *left), len(rows))
                continue
            if k:
                self.draft.catch_up(self.text, self.last, self.reach())
            else:
                self.draft.unread += 1
            self.launched.append(k)
            yield self.step_of[k](self.slots_in_use())

    def pause(self, steps: int, rows: int) -> Iterator[Tensor]:
        """So many plain decode steps, on a CPU, for `rows` unfinished rows."""
        active = self.last < self.ends
        tokens = self.text.gather(1, self.last[:, None]).squeeze(1)
        positions, chosen = torch.where(active, self.last, 0), []
        longest = max(self.seq_lens)
        try:
            for n in range(steps):
                chosen.append(self.target.decode(tokens, positions, self.target.slots(longest + n)))
                yield chosen[-1]
        finally:  # the reader may stop early
            n = len(chosen)
            at = self.last[:, None] + torch.arange(1, n + 1, device=self.device)
            if chosen:
                self.text.scatter_(1, at.clamp(max=self.text.shape[1] - 1), torch.stack(chosen)[:, 0].t().long())
            self.last += n * active
            for b in self.unfinished():
                self.seq_lens[b] += n
            self.draft.unread += n
            self.policy.paused(n)
            self.counts.update(steps=n, row_steps=rows * n)
            self.heard = time.perf_counter()

    def plain_step(self, slots: tuple[Tensor, Tensor]) -> Tensor:
        """What pause() repeats, to be timed."""
        return self.target.decode(self.last * 0, self.last.clone(), slots[0])

    def learn(self, step: list) -> list[list[tuple[int, float]]]:
        """What step() returned, now on the host -> the new tokens of each row and their log-probabilities."""
        rows = [[(int(token), logprob) for token, logprob in zip(*row) if token >= 0] for row in step]
        live = [b for b in self.unfinished() if rows[b]]
        accepted, proposed = [len(rows[b]) - 1 for b in live], [int(step[b][1][-1]) for b in live]
        k, now = self.launched.popleft(), time.perf_counter()
        if live and (k or self.policy.k == 0):  # else the policy wanted to draft, and there was no room
            seconds = now - self.heard
            self.policy.update(accepted, k, self.agree(seconds) if isinstance(self.policy, Auto) else seconds)
        self.heard = now
        rejecting = sum(n < most for n, most in zip(accepted, proposed))
        self.counts.update(steps=bool(live), row_steps=len(live), drafted=sum(proposed), accepted=sum(accepted),
                           rejecting_steps=rejecting)
        for b in live:
            self.seq_lens[b] += len(rows[b])
        return rows

    def reach(self) -> int:
        """No slot beyond is in use, nor will be after the next two steps."""
        return max(self.seq_lens) + SLACK

    def slots_in_use(self) -> tuple[Tensor, Tensor]:
        """The target's and the draft's."""
        return self.target.slots(self.reach()), self.draft.slots(self.reach())

    def step(self, k: int, slots: tuple[Tensor, Tensor]) -> Tensor:
        """Drafts k tokens, verifies them and moves on -> [B, 2, T + 1]: tokens and their log-probabilities.

        A token is -1 where there is none. The last column has, in place of log-probabilities, how many tokens were
        proposed."""
        active = self.last < self.ends
        # A row that is done moves to position 1, where its attention reads next to nothing. One row alone stays: its
        # cache may serve the next turn of a chat.
        last = torch.where(active, self.last, 1) if len(self.text) > 1 else self.last
        nth = torch.arange(k + 1, device=last.device)
        drafted, q, proposed = self.draft.propose(self.text, last, k, slots[1])
        tokens = torch.cat([self.text.gather(1, last[:, None]), drafted], dim=1)
        logits = self.target.decoder(tokens, last[:, None] + nth, slots[0])
        tokens, logprobs, accepted = self.target.accept(logits, tokens, q, proposed, self.target.sampling)
        self.text.scatter_(1, last[:, None] + 1 + nth, tokens)  # what is no text is overwritten before it is read
        self.last += torch.where(active, accepted + 1, 0)
        shown = torch.where(active[:, None] & (nth <= accepted[:, None]), tokens, -1)
        return torch.stack([F.pad(shown, (0, 1), value=-1).float(),  # floats hold tokens exactly: up to 2 ** 24
                            torch.cat([logprobs, proposed[:, None]], dim=1)], dim=1)


def capture(step: Callable, slots: tuple[Tensor, Tensor], pool: tuple[int, int]) -> Callable:
    """step(slots) as a CUDA graph, which returns the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = step(slots)

    def replay(_) -> Tensor:
        graph.replay()
        return out
    return replay

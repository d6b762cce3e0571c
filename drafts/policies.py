"""
How many tokens to draft: policies that choose k from step to step. See speculative.Policy.

One of your own is a subclass here and its name in POLICIES. A policy that drafts one token more
after each step that kept all is two places:

    # drafts/policies.py, above: POLICIES = {
    @dataclass
    class Growing(Changing):
        def update(self, accepted, k, seconds):
            self.k = min(self.k + 1, self.longest) if max(accepted) == k else 1


    # drafts/policies.py, below: POLICIES = {
    "growing": Growing,
"""

from dataclasses import dataclass
from math import ceil

import numpy

from speculative import Policy

DRAFT_LENGTHS = 0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32  # the values of k that a policy may use
COMPILED_LENGTHS = 0, 1, 2, 4, 8  # where each costs seconds of compiling


@dataclass
class Changing(Policy):
    """A policy whose k changes."""

    k: int = 1
    longest: int = DRAFT_LENGTHS[-1]  # that there is a step for

    def begin(self, seconds, lengths):
        self.longest = lengths[-1]

    def lengths(self, few):
        found = COMPILED_LENGTHS if few else DRAFT_LENGTHS
        return found if self.timed else found[1:]


@dataclass
class Heuristic(Changing):
    """That of transformers' assisted generation: 5 at first, 2 more when all match, else 1 less.

    Of a batch the row that accepted most counts."""

    k: int = 5

    def update(self, accepted, k, seconds):
        change = 2 if max(accepted) == k else -1
        self.k = min(max(1, self.k + change), self.longest)


@dataclass
class Bass(Changing):
    """arXiv 2404.15778, algorithm 1."""

    k: int = 7
    decreased: int = 0

    def update(self, accepted, k, seconds):
        if max(accepted) == k:
            self.k, self.decreased = min(self.k + 2, self.longest), 0
        else:
            shorter = self.k - ceil(self.k / 10) - self.decreased
            self.k, self.decreased = max(1, shorter, *accepted), 1


class Auto(Changing):
    """The k that promises the most tokens a second.

    It estimates how often a token is accepted and how long a step of each k takes. It stops where
    drafting is slower than not drafting. It retries while the time lost in retries stays a small
    share of all time."""

    LOSS = 0.02  # that share
    MEMORY = 0.95  # how much of a step's counts remains after the next step

    timed = 0, 2, 8  # each costs as much as decoding; the others' times lie between

    def begin(self, seconds, lengths):
        times = numpy.interp(lengths, *zip(*seconds.items()))
        self.seconds = dict(zip(lengths, times))  # of a step of each k, as the rows are now
        self.lost = self.elapsed = 0.0
        self.be_optimistic()

    def be_optimistic(self):
        self.accepted, self.tried = 1.6, 2.0
        self.choose()

    def choose(self):
        rate = min(0.999, self.accepted / self.tried)
        # Of (1 - rate ** (k + 1)) / (1 - rate) = 1 + rate + ... + rate ** k tokens, the divisor is
        # the same for all k.
        self.k = max(self.seconds, key=lambda k: (1 - rate ** (k + 1)) / self.seconds[k])

    def update(self, accepted, k, seconds):
        usual = self.seconds[k]
        # A hiccup moves it little.
        self.seconds[k] += 0.1 * (min(max(seconds, usual / 2), 2 * usual) - usual)
        # What the draft had to catch up on counts, a wait for the reader does not.
        spent = min(seconds, 10 * usual)
        self.elapsed += spent
        if k:  # without drafts nothing is learnt about the draft
            self.accepted = self.MEMORY * self.accepted + sum(accepted)
            self.tried = self.MEMORY * self.tried + sum(min(n + 1, k) for n in accepted)
            gained = 1 + sum(accepted) / len(accepted)
            self.lost = max(0.0, self.lost + spent - gained * self.seconds[0])
            self.choose()
        if self.k == 0 and self.lost < self.LOSS * self.elapsed:
            self.be_optimistic()


POLICIES = {
    "auto": Auto,
    "hf": Heuristic,
    "bass": Bass,
}
NAMES = *POLICIES, *map(str, range(1, DRAFT_LENGTHS[-1] + 1))


def make_policy(name: str) -> Policy:
    """name: of NAMES. A number is always that."""
    return POLICIES[name]() if name in POLICIES else Policy(int(name))

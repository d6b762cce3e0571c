"""
How many tokens to draft: what speculative.py's steps are told, from what the steps before gave.
"""
from math import ceil

LENGTHS = 0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32  # those that a policy may run


class Fixed:
    """How many tokens to draft: `length`, always. The other policies move it as steps come in."""

    def __init__(self, length: int = 0):
        self.length = length

    def update(self, accepted: list[int], length: int, seconds: float) -> None:
        """A step drafted `length` tokens, took `seconds` and accepted so many of each row that had not ended."""

    def pause(self) -> int:
        """How many steps to go without drafts now that `length` is 0."""
        return 1

    def paused(self, steps: int) -> None:
        """So many were gone."""


class Heuristic(Fixed):
    """transformers' assisted generation: 5 at first, 2 more when all match, else 1 less; a batch's best row counts."""

    def __init__(self):
        self.length = 5

    def update(self, accepted: list[int], length: int, seconds: float) -> None:
        self.length = self.length + 2 if max(accepted) == length else max(1, self.length - 1)


class Bass(Fixed):
    """Algorithm 1 of arXiv 2404.15778."""

    def __init__(self):
        self.length, self.decreased = 7, 0

    def update(self, accepted: list[int], length: int, seconds: float) -> None:
        if max(accepted) == length:
            self.length, self.decreased = min(self.length + 2, LENGTHS[-1]), 0
        else:
            shorter = self.length - ceil(self.length / 10) - self.decreased
            self.length, self.decreased = max(1, shorter, *accepted), 1


class Auto(Fixed):
    """The length that promises the most tokens a second, from how often a token was accepted lately and how long a step
    of each length takes. Where drafting loses against not drafting it stops, and tries again once all such tries and
    what they would cost are a small share of the time."""

    LOSS, MEMORY = 0.02, 0.95  # the share; what a step's counts weigh after the next

    def __init__(self, seconds: dict[int, float]):
        self.seconds = dict(seconds)  # of a step of each length, as the rows are now
        self.lost = self.elapsed = 0.0
        self.optimism()

    def optimism(self) -> None:
        self.accepted, self.tried = 1.6, 2.0
        self.length = self.best()

    def best(self) -> int:
        rate = min(0.999, self.accepted / self.tried)
        tokens = {length: (1 - rate ** (length + 1)) / (1 - rate) for length in self.seconds}  # 1 + rate + rate ** 2 ..
        return max(tokens, key=lambda length: tokens[length] / self.seconds[length])

    def update(self, accepted: list[int], length: int, seconds: float) -> None:
        usual = self.seconds[length]
        self.seconds[length] += 0.1 * (min(max(seconds, usual / 2), 2 * usual) - usual)  # not by a hiccup
        spent = min(seconds, 10 * usual)  # what the draft had to catch up on counts, a wait for the reader does not
        self.elapsed += spent
        if length:  # else nothing was learnt of the draft
            self.accepted = self.MEMORY * self.accepted + sum(accepted)
            self.tried = self.MEMORY * self.tried + sum(n + (n < length) for n in accepted)
            gained = 1 + sum(accepted) / len(accepted)
            self.lost = max(0.0, self.lost + spent - gained * self.seconds[0])
            self.length = self.best()
        if self.length == 0 and self.lost < self.LOSS * self.elapsed:
            self.optimism()

    def pause(self) -> int:
        return max(128, ceil((self.lost / self.LOSS - self.elapsed) / self.seconds[0]))

    def paused(self, steps: int) -> None:
        self.elapsed += steps * self.seconds[0]
        if self.lost <= self.LOSS * self.elapsed:
            self.optimism()


def policy(name: str, seconds: dict[int, float]) -> Fixed:
    """name: a number, auto, hf or bass; seconds: a step's, of each length that auto may choose."""
    if name == "auto":
        return Auto(seconds)
    return Heuristic() if name == "hf" else Bass() if name == "bass" else Fixed(int(name))

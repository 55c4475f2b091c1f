"""What requests of late took, beside what their costs said: load on the machine, and errors of the costs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from sinkprune.contract.costs import Prediction

WINDOW = 40
"""How many requests are remembered. Where they come in any order alike, the next exceeds all of them once in
`WINDOW` + 1 times, whatever their distribution: 2.4 %."""
MARGIN = 1.05
"""What is expected is longer by this than what was."""
_UNKNOWN = 1.3
"""Stands among the first: of few the next often is the slowest."""


class Slower(NamedTuple):
    """How many times as long as by its costs a request is expected to take."""

    first: float
    """From behind the tower to the first token."""
    token: float
    """A token behind the first."""

    def of(self, usual: Prediction) -> Prediction:
        """What to expect where `usual` is what costs say."""
        return usual._replace(first=usual.first * self.first, token=usual.token * self.token)


class Learnt:
    """The last `WINDOW` requests: a slow one counts at once, and is forgotten after as many others."""

    def __init__(self) -> None:
        """Of no request yet."""
        self._first, self._token = deque([_UNKNOWN], WINDOW), deque([_UNKNOWN], WINDOW)

    def add(self, usual: Prediction, first: float, token: float | None) -> None:
        """A request took `first` milliseconds from behind the tower to its first token and `token` for each behind
        it (None where there was none), and `usual` is what costs say."""
        self._first.append(first / usual.first)
        if token is not None:
            self._token.append(token / usual.token)

    @property
    def slower(self) -> Slower:
        """What to expect of the next: that it is like the slowest of them."""
        return Slower(MARGIN * max(self._first), MARGIN * max(self._token))

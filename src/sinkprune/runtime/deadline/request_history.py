"""How recent requests compare with their costs: load on the machine, and errors of the costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from sinkprune.contract.costs.model import Prediction, Recent

WINDOW = 40
"""How many requests are remembered. Where they come in any order alike, the next exceeds all of them once in
`WINDOW` + 1 times, whatever their distribution: 2.4 %."""
MARGIN = 1.05
"""What is expected is longer by this than the slowest request was."""
_FEW = 20
"""Of fewer requests, the next exceeds all of them more often than once in 20 times."""
_UNKNOWN = 1.3
"""Until `_FEW` requests were seen, one that is slower than the fastest by this factor is expected."""
_NONE = Recent()


class Slower(NamedTuple):
    """How many times as long as by its costs a request is expected to take."""

    first: float
    """From behind the tower to the first token."""
    token: float
    """A token behind the first."""

    def of(self, usual: Prediction) -> Prediction:
        """What to expect where `usual` is what costs say."""
        return usual._replace(first=usual.first * self.first, token=usual.token * self.token)


class RequestHistory:
    """The last `WINDOW` requests: a slow one counts at once, and is forgotten after as many others.

    Requests that are faster than their costs lower what is expected in the same way.
    """

    def __init__(self, recent: Recent = _NONE) -> None:
        """Of `recent` requests, which an earlier process may have answered."""
        self._first, self._token = deque(recent.first, WINDOW), deque(recent.token, WINDOW)

    def add(self, usual: Prediction, first: float, token: float | None) -> None:
        """A request took `first` milliseconds from behind the tower to its first token and `token` for each behind
        it, and `usual` is what costs say. Where there was none (None), tokens compare as the first one does: answers
        of one token would leave costs that are too high as they are."""
        ratio = first / usual.first
        self._first.append(ratio)
        self._token.append(ratio if token is None else token / usual.token)

    @property
    def slower(self) -> Slower:
        """What to expect of the next: that it is like the slowest of them."""
        return Slower(_expected(self._first), _expected(self._token))

    @property
    def recent(self) -> Recent:
        """The requests, for a process to come."""
        return Recent(tuple(self._first), tuple(self._token))


def _expected(ratios: Collection[float]) -> float:
    unknown = [_UNKNOWN * min(ratios, default=1.0)] if len(ratios) < _FEW else []
    return MARGIN * max([*ratios, *unknown])

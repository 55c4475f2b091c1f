"""How recent requests compare with their costs: load on the machine, and errors of the costs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from sinkprune.contract.costs import Prediction

WINDOW = 40
"""How many requests are remembered. Where they come in any order alike, the next exceeds all of them once in
`WINDOW` + 1 times, whatever their distribution: 2.4 %."""
MARGIN = 1.05
"""What is expected is longer by this than the slowest request was."""
_FEW = 20
"""Of fewer requests, the next exceeds all of them more often than once in 20 times."""
_UNKNOWN = 1.3
"""Until `_FEW` requests were seen, one that is slower than the fastest by this factor is expected."""


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
    """The last `WINDOW` requests: a slow one counts at once, and is forgotten after as many others.

    Requests that are faster than their costs lower what is expected in the same way.
    """

    def __init__(self) -> None:
        """Of no request yet."""
        self._first, self._token = _Ratios(), _Ratios()

    def add(self, usual: Prediction, first: float, token: float | None) -> None:
        """A request took `first` milliseconds from behind the tower to its first token and `token` for each behind
        it, and `usual` is what costs say. Where there was none (None), tokens compare as the first one does: answers
        of one token would leave costs that are too high as they are."""
        ratio = first / usual.first
        self._first.add(ratio)
        self._token.add(ratio if token is None else token / usual.token)

    @property
    def slower(self) -> Slower:
        """What to expect of the next: that it is like the slowest of them."""
        return Slower(self._first.expected(), self._token.expected())

    @property
    def fastest(self) -> Slower:
        """What the fastest request took, of what its costs say; at most 1."""
        return Slower(self._first.fastest, self._token.fastest)


class _Ratios:
    """Times of requests over what their costs say."""

    def __init__(self) -> None:
        self._last, self.fastest = deque[float](maxlen=WINDOW), 1.0

    def add(self, ratio: float) -> None:
        self._last.append(ratio)
        self.fastest = min(self.fastest, ratio)

    def expected(self) -> float:
        unknown = [_UNKNOWN * self.fastest] if len(self._last) < _FEW else []
        return MARGIN * max([*self._last, *unknown])

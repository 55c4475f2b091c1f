"""Compares recent requests with their predicted costs, to correct for load and for errors of the costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from sinkprune.contract.costs.model import LEAST_MS, Prediction, RecentRatios

WINDOW = 40
"""How many requests the history holds. If their order is random, the next request is slower than all of them with
probability 1 / (`WINDOW` + 1), whatever their distribution: 2.4 %."""
MARGIN = 1.05
"""The expected time is the slowest recent request's times this."""
_FEW = 20
"""With fewer requests, the next one is slower than all of them with a probability of more than 5 %."""
_UNKNOWN = 1.3
"""With fewer than `_FEW` requests, the expected slowdown is at least the fastest request's times this."""
_NONE = RecentRatios()


class Slowdown(NamedTuple):
    """The expected time of a request as a multiple of its predicted costs."""

    first: float
    """From the end of the vision tower to the first token."""
    token: float
    """For the tokens after the first."""

    def of(self, usual: Prediction) -> Prediction:
        """Return the expected times, where `usual` are the predicted costs."""
        return usual._replace(first=usual.first * self.first, token=usual.token * self.token)


class RequestHistory:
    """The last `WINDOW` requests. A slow request counts at once, and leaves the history after `WINDOW` others.

    Requests that are faster than their costs lower the expected times in the same way.
    """

    def __init__(self, recent: RecentRatios = _NONE) -> None:
        """Start with `recent` requests, which an earlier process may have answered."""
        self._first, self._token = deque(recent.first, WINDOW), deque(recent.token, WINDOW)

    def add(self, usual: Prediction, first: float, later: float, tokens: int) -> None:
        """Add a request with the predicted costs `usual`.

        It took `first` milliseconds from the tower to its first token, and `later` for all `tokens` after it, one or
        more.
        """
        self._first.append(first / usual.first)
        self._token.append(later / max(usual.later(tokens), LEAST_MS))

    @property
    def slower(self) -> Slowdown:
        """The expected slowdown of the next request: that of the slowest recent one."""
        return Slowdown(_expected(self._first), _expected(self._token))

    @property
    def recent(self) -> RecentRatios:
        """The requests, for a later process."""
        return RecentRatios(tuple(self._first), tuple(self._token))


def _expected(ratios: Collection[float]) -> float:
    unknown = [_UNKNOWN * min(ratios, default=1.0)] if len(ratios) < _FEW else []
    return MARGIN * max([*ratios, *unknown])

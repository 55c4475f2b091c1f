"""Counters of energy that a program reads as often as it likes, and that move when their makers please."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from sinkprune.contract.errors import PowerError
from sinkprune.runtime.power import SILENT_SECONDS

C = TypeVar("C")


def next_count(read: Callable[[], C], last: C, period: float, name: str) -> tuple[float, C]:
    """The moment and the value of the next count that differs from `last`, asked for each `period` seconds.

    A count that stands still says nothing of when its joules were used. Raises `PowerError` where it does so for
    `SILENT_SECONDS`, and what `read` raises.
    """
    began = time.monotonic()
    while True:
        time.sleep(period)
        count, now = read(), time.monotonic()
        if count != last:
            return now, count
        if now - began > SILENT_SECONDS:
            raise PowerError(f"{name} has not moved for {SILENT_SECONDS:.0f} seconds.")

"""Temperatures, clocks and power over time: a row a second while a program does its work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sinkprune.contract.reports.rate_report import ConditionsReport
from sinkprune.runtime.power import ROOT, Reading
from sinkprune.runtime.power.conditions import Conditions, read_conditions
from sinkprune.runtime.power.meter import EnergyMeter

PERIOD_SECONDS = 1.0


class _Row(NamedTuple):
    seconds: float
    conditions: Conditions
    reading: Reading | None
    """The newest of the power sensor; None without one, and where it has died."""


class ConditionsLog:
    """The rows that were written since `logging_conditions` began."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []

    def add(self, meter: EnergyMeter | None, root: Path) -> None:
        """Write a row: what the system tells below `root`, and what `meter` adds."""
        conditions, reading = read_conditions(root), meter.newest if meter else None
        if reading is not None:
            # A board's tegrastats tells the system's zones by names of its own.
            conditions = Conditions(
                {**conditions.temperatures, **reading.temperatures}, {**conditions.clocks, **reading.clocks}
            )
        self.rows.append(_Row(time.monotonic(), conditions, reading))

    def report(self, start: float) -> ConditionsReport:
        """All rows, with seconds counted from `start`, a moment of `time.monotonic`."""
        found = [row.conditions for row in self.rows]
        places = dict.fromkeys(place for row in found for place in row.temperatures)
        units = dict.fromkeys(unit for row in found for unit in row.clocks)
        return ConditionsReport(
            seconds=tuple(row.seconds - start for row in self.rows),
            temperatures_c={place: tuple(row.temperatures.get(place) for row in found) for place in places},
            clocks_mhz={unit: tuple(row.clocks.get(unit) for row in found) for unit in units},
            watts=tuple(_watts([row.reading for row in self.rows])),
        )


@contextmanager
def logging_conditions(meter: EnergyMeter | None = None, root: Path = ROOT) -> Iterator[ConditionsLog]:
    """A log that is written to once a second while the block runs, and at its beginning and end."""
    log, ended = ConditionsLog(), threading.Event()

    def write() -> None:
        while not ended.wait(PERIOD_SECONDS):
            log.add(meter, root)

    log.add(meter, root)
    thread = threading.Thread(target=write, name="conditions", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        thread.join()
        log.add(meter, root)


def _watts(readings: Sequence[Reading | None]) -> Iterator[float | None]:
    """The mean power between each reading and the one of the row before; None where either is missing."""
    for before, now in zip([None, *readings[:-1]], readings, strict=True):
        if before is None or now is None or now.seconds <= before.seconds:
            yield None
        else:
            yield (now.joules - before.joules) / (now.seconds - before.seconds)

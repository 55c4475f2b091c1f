"""Reads a sensor in a thread while a program does its work, and counts the joules of stretches of time."""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from sinkprune.contract.checks import RealNumber
from sinkprune.contract.errors import PowerError
from sinkprune.contract.report import IDLE_SECONDS, BudgetEnergy, PowerReport
from sinkprune.runtime.power.sensors import SILENT_SECONDS, Sensor

IDLE = RealNumber("idle_seconds", 0.5, 3600, "from 0.5 to 3600 seconds")
MOST_GAP_SECONDS = 1.0
"""The longest time between two readings for which energy is interpolated."""


class Span(NamedTuple):
    """A stretch of time, by `time.monotonic`."""

    start: float
    end: float


class EnergyMeter:
    """All readings of a sensor since `measuring` began. A day of them takes some tens of megabytes."""

    idle_watts: float
    """The mean power before the block of `measuring` began."""

    def __init__(self, sensor: Sensor) -> None:
        """Start a thread that reads the sensor."""
        self._sensor = sensor
        self._seconds, self._joules = array("d"), array("d")
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="power", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the sensor died; None while it lives."""
        return None if self._error is None else str(self._error)

    def wait_for_reading(self) -> None:
        """Wait for a reading after this moment, if the sensor lives."""
        now = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._error or (self._seconds and self._seconds[-1] > now))
            if self._error and not isinstance(self._error, PowerError):
                raise self._error

    def joules(self, spans: Sequence[Span]) -> list[float | None]:
        """Return the joules of each of `spans`, idle included, interpolated linearly between readings.

        None without readings around a span, or with gaps. Waits for one more reading if the sensor lives.
        """
        self.wait_for_reading()
        with self._changed:
            seconds, joules = np.array(self._seconds), np.array(self._joules)

        def used(span: Span) -> float | None:
            first = int(np.searchsorted(seconds, span.start, side="right")) - 1
            last = int(np.searchsorted(seconds, span.end, side="left"))
            if first < 0 or last >= len(seconds):
                return None
            if np.diff(seconds[first : last + 1]).max(initial=0.0) > MOST_GAP_SECONDS:
                return None
            return float(np.diff(np.interp(span, seconds, joules))[0])

        return [used(span) for span in spans]

    def budget_energy(self, answers: Sequence[Span]) -> BudgetEnergy | None:
        """Return the mean joules of `answers`, without those that lack readings; None if all of them do."""
        pairs = zip(self.joules(answers), (span.end - span.start for span in answers), strict=True)
        known = [(joules, seconds) for joules, seconds in pairs if joules is not None]
        if not known:
            return None
        net = [joules - self.idle_watts * seconds for joules, seconds in known]
        joules, seconds = (sum(values) for values in zip(*known, strict=True))
        return BudgetEnergy(
            runs=len(known),
            left_out=len(answers) - len(known),
            joules=statistics.fmean(net),
            joules_with_idle=joules / len(known),
            deviation=statistics.stdev(net) if len(net) > 1 else None,
            watts=joules / seconds,
            estimated=seconds / len(known) < 2 * statistics.median(self._gaps()),
        )

    def report(self) -> PowerReport:
        """Describe the sensor and its readings so far."""
        gaps = self._gaps()
        return PowerReport(
            sensor=self._sensor.name,
            measures=self._sensor.measures,
            period_ms=1e3 * statistics.median(gaps),
            longest_gap_ms=1e3 * max(gaps),
            idle_watts=self.idle_watts,
            failure=self.failure,
        )

    def _gaps(self) -> list[float]:
        self.wait_for_reading()
        with self._changed:
            return np.diff(self._seconds).tolist()

    def measure_idle(self, seconds: float) -> None:
        """Measure idle power for this time. Raises `PowerError`."""
        self.wait_for_reading()
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._error, seconds)
        end = time.monotonic()
        (joules,) = self.joules([Span(start, end)])
        if self._error is not None:
            raise self._error
        values = sum(start <= moment <= end for moment in self._seconds)
        if joules is None or values < 3:
            raise PowerError(
                f"{self._sensor.name} gave {values} values in {seconds:g} idle seconds, expected 3 or "
                "more and none apart by more than a second. Give --idle more seconds, or end what keeps this machine "
                "busy."
            )
        self.idle_watts = joules / (end - start)

    def stop(self) -> None:
        """End the thread, which ends the sensor."""
        self._ended.set()
        self._thread.join(2 * SILENT_SECONDS)

    def _read(self) -> None:
        try:
            with closing(self._sensor.readings()) as readings:
                for reading in takewhile(lambda _: not self._ended.is_set(), readings):
                    with self._changed:
                        self._seconds.append(reading.seconds)
                        self._joules.append(reading.joules)
                        self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


@contextmanager
def measuring(sensor: Sensor, idle_seconds: float = IDLE_SECONDS) -> Iterator[EnergyMeter]:
    """Yield a meter that reads `sensor` while the block runs, after it measured idle power for `idle_seconds`.

    Raises `PowerError` if the sensor cannot be started, or has no readings meanwhile.
    """
    meter = EnergyMeter(sensor)
    try:
        meter.measure_idle(idle_seconds)
        yield meter
    finally:
        meter.stop()

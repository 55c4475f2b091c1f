"""Reads a sensor in a thread while a program does its work."""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import takewhile

from sinkprune.contract.checks.ranges import RealNumber
from sinkprune.contract.errors import PowerError
from sinkprune.contract.reports.energy import IDLE_SECONDS, IdlePower, PowerReport
from sinkprune.runtime.power.curve import EnergyCurve
from sinkprune.runtime.power.sensor import SILENT_SECONDS, Reading, Sensor

IDLE = RealNumber("idle_seconds", 0.5, 3600, "from 0.5 to 3600 seconds")


class EnergyMeter:
    """All readings of a sensor since `measuring` began. A day of them takes some tens of megabytes."""

    idle: IdlePower
    """Measured before the block of `measuring` began."""

    def __init__(self, sensor: Sensor) -> None:
        """Start a thread that reads the sensor."""
        self._sensor = sensor
        self._seconds, self._joules = array("d"), array("d")
        self._newest: Reading | None = None
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="power", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the sensor died; None while it lives."""
        return None if self._error is None else str(self._error)

    @property
    def newest(self) -> Reading | None:
        """The last reading; None if the sensor has died."""
        return None if self._error else self._newest

    def curve(self) -> EnergyCurve:
        """Return the energy over all readings. Waits for one more reading if the sensor lives."""
        now = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._error or (self._newest and self._newest.seconds > now))
            if self._error and not isinstance(self._error, PowerError):
                raise self._error
            return EnergyCurve(self._seconds, self._joules)

    def report(self) -> PowerReport:
        """Describe the sensor and its readings so far."""
        gaps = self.curve().gaps()
        return PowerReport(
            sensor=self._sensor.name,
            measures=self._sensor.measures,
            period_ms=1e3 * statistics.median(gaps),
            longest_gap_ms=1e3 * max(gaps),
            idle=self.idle,
            failure=self.failure,
        )

    def measure_idle(self, seconds: float) -> None:
        """Measure idle power for this time. Raises `PowerError`."""
        self.curve()
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._error, seconds)
        end = time.monotonic()
        curve = self.curve()
        if self._error is not None:
            raise self._error
        joules, watts = curve.joules(start, end), curve.watts(start, end)
        if joules is None or len(watts) < 2:
            raise PowerError(
                f"{self._sensor.name} gave {len(watts) + 1} values in {seconds:g} idle seconds, expected 3 or "
                "more and none apart by more than a second. Give --idle more seconds, or end what keeps this machine "
                "busy."
            )
        shares = statistics.quantiles(watts, n=20, method="inclusive")
        self.idle = IdlePower(joules / (end - start), shares[0], shares[-1], end - start, len(watts) + 1)

    def stop(self) -> None:
        """End the thread, which ends the sensor."""
        self._ended.set()
        self._thread.join(2 * SILENT_SECONDS)

    def _read(self) -> None:
        """Read until `stop`, or until the sensor dies: the work of the thread."""
        try:
            with closing(self._sensor.readings()) as readings:
                for reading in takewhile(lambda _: not self._ended.is_set(), readings):
                    with self._changed:
                        self._seconds.append(reading.seconds)
                        self._joules.append(reading.joules)
                        self._newest = reading
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

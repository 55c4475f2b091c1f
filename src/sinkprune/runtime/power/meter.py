"""A sensor, read in a thread while a program does its work."""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from sinkprune.contract.checks.ranges import RealNumber
from sinkprune.contract.errors import PowerError
from sinkprune.contract.reports.energy import IDLE_SECONDS, IdlePower, PowerReport
from sinkprune.runtime.power import SILENT_SECONDS, Reading, Sensor
from sinkprune.runtime.power.curve import EnergyCurve

IDLE = RealNumber("--idle", 0.5, 3600, "from 0.5 to 3600 seconds")


class EnergyMeter:
    """All readings of a sensor since `measuring` began, and the idle power that came before anything else."""

    def __init__(self, sensor: Sensor, readings: _Readings, idle: IdlePower) -> None:
        """For `measuring`, which makes it."""
        self._sensor, self._readings = sensor, readings
        self.idle = idle

    @property
    def failure(self) -> str | None:
        """Why the sensor tells nothing more; None while it does."""
        return None if self._readings.failure is None else str(self._readings.failure)

    @property
    def newest(self) -> Reading | None:
        """The last reading; None where the sensor has died."""
        return None if self._readings.failure else self._readings.newest

    def curve(self) -> EnergyCurve:
        """Through all readings, up to one that comes after this call where the sensor still lives."""
        self._readings.wait_for_one()
        return self._readings.curve()

    def report(self) -> PowerReport:
        """What was measured with, so far."""
        gaps = self.curve().gaps()
        return PowerReport(
            sensor=self._sensor.name,
            measures=self._sensor.measures,
            period_ms=1e3 * statistics.median(gaps),
            longest_gap_ms=1e3 * max(gaps),
            idle=self.idle,
            failure=self.failure,
        )


@contextmanager
def measuring(sensor: Sensor, idle_seconds: float = IDLE_SECONDS) -> Iterator[EnergyMeter]:
    """A meter that reads `sensor` while the block runs, after `idle_seconds` that are taken for doing nothing.

    Raises `PowerError` where the sensor cannot be started, or tells nothing meanwhile.
    """
    readings = _Readings(sensor)
    sensor.start()
    thread = threading.Thread(target=readings.take, name="power", daemon=True)
    thread.start()
    try:
        yield EnergyMeter(sensor, readings, _idle(sensor, readings, idle_seconds))
    finally:
        readings.ended.set()
        thread.join(2 * SILENT_SECONDS)
        sensor.stop()


class _Readings:
    """What a thread reads. A day of it is some tens of megabytes."""

    def __init__(self, sensor: Sensor) -> None:
        self._sensor = sensor
        self._seconds, self._joules = array("d"), array("d")
        self._writing = threading.Lock()
        self.newest: Reading | None = None
        self.ended = threading.Event()
        self.failure: PowerError | None = None
        self._bug: Exception | None = None

    def take(self) -> None:
        """Read until `ended`, or until the sensor dies: the work of the thread."""
        try:
            while not self.ended.is_set():
                reading = self._sensor.read()
                with self._writing:
                    self._seconds.append(reading.seconds)
                    self._joules.append(reading.joules)
                self.newest = reading
        except PowerError as error:
            self.failure = error
        except Exception as error:
            self._bug = error

    def curve(self) -> EnergyCurve:
        """Through all readings so far."""
        with self._writing:
            return EnergyCurve(self._seconds, self._joules)

    def wait_for_one(self) -> None:
        """Return when a reading of after this call is there, or none will come."""
        now = time.monotonic()
        # A sensor that tells nothing ends in a failure.
        while self.failure is None and not (self.newest and self.newest.seconds > now):
            if self._bug is not None:
                raise self._bug
            time.sleep(0.005)


def _idle(sensor: Sensor, readings: _Readings, seconds: float) -> IdlePower:
    readings.wait_for_one()
    start = time.monotonic()
    readings.ended.wait(seconds)
    end = time.monotonic()
    readings.wait_for_one()
    if readings.failure is not None:
        raise readings.failure
    curve = readings.curve()
    joules, watts = curve.joules(start, end), curve.watts(start, end)
    if joules is None or len(watts) < 2:
        raise PowerError(
            f"{sensor.name} told {len(watts) + 1} values in {seconds:g} seconds of idling, expected 3 or more and "
            "none apart by more than a second. Give --idle more seconds, or end what keeps this machine busy."
        )
    shares = statistics.quantiles(watts, n=20, method="inclusive")
    return IdlePower(joules / (end - start), shares[0], shares[-1], end - start, len(watts) + 1)

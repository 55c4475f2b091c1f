"""The options of commands that measure energy, and how they are used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import PowerError, UsageError
from sinkprune.contract.reports.energy import IDLE_SECONDS, BudgetEnergy, PowerReport
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.commands import Options
from sinkprune.runtime.power import AUTO, SENSORS, open_sensor
from sinkprune.runtime.power.meter import IDLE, EnergyMeter, measuring
from sinkprune.runtime.power.sensor import Sensor


def add_power_options(parser: argparse.ArgumentParser) -> None:
    """Add `--power` and `--idle`."""
    parser.add_argument(
        "--power",
        nargs="?",
        const=AUTO,
        choices=SENSORS,
        help="measure joules, with the named sensor or the first that covers the device in use",
    )
    parser.add_argument(
        "--idle",
        type=IDLE.named("--idle"),
        metavar="SECONDS",
        help=f"seconds of idle power before the first request, to be subtracted (default: {IDLE_SECONDS:g})",
    )


def wanted_sensor(options: Options, backend: str) -> Sensor | None:
    """Open the sensor of the device that `backend` computes on; None without `--power`.

    Raises `PowerError` and `UsageError`.
    """
    if options.power is None:
        if options.idle is not None:
            raise UsageError("--idle is for the power that --power subtracts. Add --power, or leave it out.")
        return None
    return open_sensor(options.power, on_gpu=KNOWN[backend].on_gpu)


@contextmanager
def maybe_measuring(options: Options, sensor: Sensor | None) -> Iterator[EnergyMeter | None]:
    """Measure idle power, then yield a meter on `sensor`; yields None without a sensor. Raises `PowerError`."""
    if sensor is None:
        yield None
        return
    with ExitStack() as held:
        seconds = IDLE_SECONDS if options.idle is None else options.idle
        with status(f"measuring idle power for {seconds:g} s"):
            meter = held.enter_context(measuring(sensor, seconds))
        yield meter


def check_lived(power: PowerReport | None) -> None:
    """Raise `PowerError` if a sensor failed; commands call this after all output is written."""
    if power is not None and power.failure is not None:
        raise PowerError(f"{power.failure.rstrip('.')}. Times are whole; joules are missing from then on.")


def power_line(power: PowerReport) -> str:
    """Return a line about the sensor and the idle power."""
    return (
        f"joules by {power.sensor} ({power.measures}), a reading every {power.period_ms:.0f} ms (longest gap "
        f"{power.longest_gap_ms:.0f}); {power.idle_watts:.2f} W when idle subtracted"
    )


def joules_text(energy: BudgetEnergy | None) -> str:
    """Return the joules of an answer with their standard deviation; a tilde marks an estimate."""
    if energy is None:
        return "no joules: the power sensor reported nothing for its runs"
    unit, factor = ("J", 1.0) if max(abs(energy.joules), energy.deviation or 0.0) >= 1 else ("mJ", 1e3)
    spread = "" if energy.deviation is None else f" ±{factor * energy.deviation:.2g}"
    left_out = f"; {counted(energy.left_out, 'run')} left out" if energy.left_out else ""
    joules = f"{'~' if energy.estimated else ''}{factor * energy.joules:.3g}{spread} {unit}"
    return f"{joules} an answer, {energy.watts:.2f} W meanwhile{left_out}"

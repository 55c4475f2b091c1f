"""Options of `sinkprune-profile`: a camera's rate, and power."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sinkprune.contract.checks import counted
from sinkprune.contract.command_line.options import CommandParser
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.command_line.table_console import TableConsole, make_table, plain_text
from sinkprune.contract.errors import ImageError, PowerError, UsageError
from sinkprune.contract.files.numbered_files import by_number
from sinkprune.contract.memory import compared_sizes
from sinkprune.contract.report import FEWEST_OF_P95, IDLE_SECONDS, BudgetEnergy, PowerReport, RateReport
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.power.meter import IDLE, EnergyMeter, measuring
from sinkprune.runtime.power.sensors import AUTO, SENSORS, Sensor, open_sensor
from sinkprune.runtime.profiling.rate import DURATION, RATE, FrameClock, frame_clock
from sinkprune.runtime.steps.pictures import decoded


def add_power_options(parser: CommandParser) -> None:
    """Add `--power` and `--idle`."""
    add = parser.group("measurement").add_argument
    add(
        "--power",
        nargs="?",
        const=AUTO,
        choices=SENSORS,
        help="measure joules, with the named sensor or the first that covers the device in use",
    )
    add(
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
    seconds = IDLE_SECONDS if options.idle is None else options.idle
    with ExitStack() as held:
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


DURATION_SECONDS = 60.0
_MOST_FRAME_BYTES = 1 << 30
_CHANNELS = 3
_FEWEST_OF_P99 = 100


def add_rate_options(parser: CommandParser) -> None:
    """Add `--rate` and `--duration`."""
    add = parser.group("measurement").add_argument
    add("--rate", type=RATE, metavar="HZ", help="send requests at a camera's rate, each budget for --duration")
    add("--duration", type=DURATION, metavar="SECONDS", help=f"for --rate (default: {DURATION_SECONDS:g})")


def wanted_camera(options: Options) -> FrameClock | None:
    """Return the clock of frames, or None without --rate; raises `UsageError` for options that exclude each other."""
    if options.rate is None:
        for name in ("frames", "duration"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for frames at a steady rate. Add --rate, or leave it out.")
        return None
    if options.repeat is not None:
        raise UsageError("--repeat counts rounds, and --rate goes by time. Leave --repeat out, and give --duration.")
    if options.warm:
        raise UsageError("--warm asks twice about a picture, and --rate shows each once. Leave one of them out.")
    return frame_clock(options.rate, DURATION_SECONDS if options.duration is None else options.duration)


def frame_files(folder: Path) -> list[Path]:
    """Return what a folder of frames holds, without hidden files, in the order of `by_number`.

    A folder among them is rejected when it is read, as a file that is no picture. Raises `ImageError`, and
    `UsageError` for an unclear order.
    """
    if not folder.is_dir():
        raise ImageError(
            f"'{folder}' is no folder. --frames takes a folder of pictures; give single ones by --image."
        )
    files = by_number(path for path in folder.iterdir() if not path.name.startswith("."))
    if not files:
        raise ImageError(f"'{folder}' holds no files, expected pictures.")
    return files


def read_frames(files: list[Path], family: Family) -> list[Picture]:
    """Return the pictures in `files`, decoded as those of a camera; raises `ImageError`, also for more than 1 GB."""
    pictures: list[Picture] = []
    held = 0
    for path in files:
        pictures.append(decoded(path, family))
        held += pictures[-1].size[0] * pictures[-1].size[1] * _CHANNELS
        if held > _MOST_FRAME_BYTES:
            size, most = compared_sizes(held, _MOST_FRAME_BYTES)
            raise ImageError(
                f"the first {len(pictures)} of {len(files)} pictures take {size} in memory, expected up "
                f"to {most}. Give fewer or smaller ones."
            )
    return pictures


def print_rates(report: RateReport) -> None:
    """Print a table with a row for each budget, and the power and conditions of the machine."""
    console = TableConsole()
    # An interrupt ends a budget early.
    whole = report.duration_s
    ran = [whole if budget.seconds >= whole else round(budget.seconds, 1) for budget in report.rates.values()]
    seconds = " to ".join(dict.fromkeys(f"{each:g}" for each in (min(ran), max(ran))))
    console.print_head(
        report,
        f"{report.rate_hz:g} frames a second for {seconds} s; milliseconds from a frame's arrival to its whole "
        "answer; jitter: their standard deviation",
    )
    headings = ["visual", "frames", "missed", "p50", "p95", "p99", "max", "jitter", "busy p50"]
    table = make_table(["budget"], [*headings, *(["J a frame", "W"] if report.power else [])])
    for name, budget in report.rates.items():
        late, energy = budget.latency_ms, budget.energy
        joules = [f"{energy.joules_per_frame:.3g}", f"{energy.watts:.2f}"] if energy else ["-", "-"]
        table.add_row(
            plain_text(name),
            f"{budget.visual_tokens}>{budget.kept_after_sanitizer}>{budget.tokens_per_layer[-1]}",
            f"{budget.frames}",
            f"{budget.missed}",
            *(f"{value:.1f}" for value in (late.p50, late.p95, late.p99, late.maximum, late.jitter)),
            f"{budget.busy_ms.p50:.1f}",
            *(joules if report.power else []),
        )
    console.print(table)
    fewest = min((budget.answered for budget in report.rates.values()), default=_FEWEST_OF_P99)
    if fewest < FEWEST_OF_P95:
        console.print(f"Of fewer than {FEWEST_OF_P95} answers, p95 and p99 are close to the slowest.")
    elif fewest < _FEWEST_OF_P99:
        console.print(f"Of fewer than {_FEWEST_OF_P99} answers, p99 is close to the slowest.")
    for name, budget in report.rates.items():
        if budget.busy_ms.p50 > 1000 / report.rate_hz:
            fastest = 1000 / budget.busy_ms.p50
            console.print(
                plain_text(f"{name}: at most {fastest:.2g} frames a second here: a request outlasts a frame")
            )
    if report.power is not None:
        console.print(plain_text(power_line(report.power)))
    console.print(plain_text(_conditions(report)))


def _conditions(report: RateReport) -> str:
    parts = []
    for unit, lines in (("C", report.conditions.temperatures_c), ("MHz", report.conditions.clocks_mhz)):
        for name, values in lines.items():
            known = [value for value in values if value is not None]
            parts.append(f"{name} {known[0]:.0f} to {known[-1]:.0f} {unit} ({min(known):.0f} to {max(known):.0f})")
    return "; ".join(parts) if parts else "no temperature or clock can be read here"

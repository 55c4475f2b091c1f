"""`sinkprune-profile`: measures every budget and the unpruned baseline, or frames at a rate, and power."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import counted
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.command_line.table_console import (
    USUAL_REPEAT,
    TableConsole,
    few_note,
    make_table,
    median_text,
    noise_note,
    plain_text,
    spread_text,
)
from sinkprune.contract.errors import ImageError, PowerError, UsageError
from sinkprune.contract.memory import compared_sizes, gigabytes
from sinkprune.contract.registry import Registry
from sinkprune.contract.report import (
    FEWEST_OF_P95,
    IDLE_SECONDS,
    BudgetEnergy,
    PowerReport,
    ProfileReport,
    RateReport,
    Spread,
)
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.commands.options import (
    Options,
    add_extensions,
    add_method,
    check_memory,
    chosen_backend,
    load_pipeline,
    new_parser,
    open_bundle,
    picture_sources,
    prompt_pieces,
)
from sinkprune.runtime.commands.reports import (
    add_new_tokens,
    add_report_options,
    check_report_options,
    frame_files,
    name_list,
    until_interrupt,
    write_measured,
)
from sinkprune.runtime.commands.run import note_pictures
from sinkprune.runtime.families import Family, load_family
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.power.meter import IDLE, EnergyMeter, measuring
from sinkprune.runtime.power.sensors import AUTO, SENSORS, Sensor, open_sensor
from sinkprune.runtime.profiling.other_load import LOADED
from sinkprune.runtime.profiling.plot import PART_NAMES, plot_rate, plot_report
from sinkprune.runtime.profiling.profile import REPEAT, WARMUP, NewSession, ProfileRounds, Rounds
from sinkprune.runtime.profiling.rate import DURATION, RATE, FrameClock, RateRun, frame_clock
from sinkprune.runtime.steps.answer import OF_TTFT
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.runtime.steps.pictures import decoded

R = TypeVar("R", ProfileReport, RateReport)
_EXAMPLES = """\
examples:
  sinkprune-profile bundle --image photo.jpg --prompt "What is on the table?"
  sinkprune-profile bundle --image photo.jpg --prompt "Is the door open?" --budgets none,retain-64 \\
      --new-tokens 32 --repeat 10 --json profile.json --plot profile.png
  sinkprune-profile bundle --image photo.jpg --prompt "What is on the table?" --power
  sinkprune-profile policy --camera base.jpg --camera wrist.jpg --instruction "pick up the cup" \\
      --state 0.1,0.2,0.3 --steps 10,5
  sinkprune-profile bundle --frames frames --prompt "What is ahead?" --budgets retain-64 --rate 5 --duration 60
"""

DURATION_SECONDS = 60.0
_MOST_FRAME_BYTES = 1 << 30
_CHANNELS = 3
_FEWEST_OF_P99 = 100
_NEW_TOKENS = 16
"""The default for `--new-tokens`."""
_LEGEND = "speed-ups are over none; ideal: by the FLOPs of the prefill; mean of layers: in % of none's visual tokens"


class ProfileExtension:
    """What another package adds to `sinkprune-profile`, by an entry point in the group `sinkprune.profile`.

    There is one for each run. The defaults add nothing.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @staticmethod
    def add_sources(group: Any) -> None:
        """Add options that name pictures to the `group` of those of which one is given."""

    @staticmethod
    def add_options(parser: CommandParser) -> None:
        """Add options to the command."""

    def profiled(self, bundle: Bundle) -> bool:
        """Return True after measuring a `bundle` of a kind of its own, with its report; else False.

        Raises `UsageError` for options that are not for the bundle's kind.
        """
        return False

    def new_session(self) -> NewSession | None:
        """Return what makes the session of warm runs; None without them."""
        return None


PROFILE_EXTENSIONS = Registry[type[ProfileExtension]]("sinkprune.profile")
"""Every extension of `sinkprune-profile` that an installed package registers."""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, Options)
    camera = wanted_camera(options)
    files = frame_files(options.frames) if options.frames else options.picture_files
    check_report_options(options, files)
    prompt = prompt_pieces(options.prompt)
    bundle = open_bundle(options, options.budgets or [], may_act=True)
    extensions = [extension(options) for extension in PROFILE_EXTENSIONS.values()]
    if any(extension.profiled(bundle) for extension in extensions):
        return
    new_session = next((found for extension in extensions if (found := extension.new_session())), None)
    budgets = options.budgets or [UNPRUNED, *bundle.manifest.plans[options.method]]
    sensor = wanted_sensor(options, chosen_backend(options, bundle))
    family = load_family(bundle.manifest, options.fit)
    if options.frames:
        prompts = [[frame] for frame in read_frames(files, family)]
    else:
        sources = picture_sources(options)
        check_picture_count(bundle.manifest, None, len(sources))
        prompts = [[decoded(source, family) for source in sources]]
    planned = list(dict.fromkeys([*([] if camera else [UNPRUNED]), *budgets]))
    largest = max(prompts, key=lambda pictures: sum(picture.size[0] * picture.size[1] for picture in pictures))
    layouts = [*map(family.layout, largest)]
    check_memory(options, bundle, layouts, options.method, planned, prompt, options.new_tokens or _NEW_TOKENS)
    pipeline = load_pipeline(options, bundle)

    # Before the measurement, because it may take long.
    pictures = [picture for own in prompts for picture in own]
    notes = note_pictures(family, files, pictures)
    most = pipeline.limits.new_tokens if pipeline.limits else _NEW_TOKENS
    new_tokens = min(_NEW_TOKENS, most) if options.new_tokens is None else options.new_tokens

    def write(report: R, plot: Callable[[R, str], bytes], in_words: Callable[[R], object], interrupted: str) -> None:
        def last() -> None:
            check_lived(report.power)

        write_measured(options, report, plot, lambda: in_words(report), notes, interrupted, last=last)

    with maybe_measuring(options, sensor) as meter:
        common: dict[str, Any] = {"method": options.method, "new_tokens": new_tokens, "meter": meter}
        if camera is None:
            rounds = ProfileRounds(pipeline, prompts[0], prompt, planned, new_session=new_session, **common)
            interrupted = measured_rounds(rounds, options.repeat or USUAL_REPEAT, options.warmup, "answers")
            write(rounds.report(), plot_report, _print_table, interrupted)
        else:
            run = RateRun(pipeline, prompts, prompt, planned, camera, **common)
            interrupted = _measured_frames(run, options.warmup, len(planned) * camera.frames)
            write(run.report(), plot_rate, print_rates, interrupted)


def measured_rounds(rounds: Rounds[Any, Any], repeat: int, warmup: int, unit: str) -> str:
    """Measure `rounds`, with progress in a `unit`; returns what their report counts after Ctrl-C, else "".

    Raises `KeyboardInterrupt` before the first round is complete, and what `Rounds.measure` raises.
    """
    measure = partial(rounds.measure, repeat, warmup)
    interrupt = until_interrupt(measure, rounds.kinds * (warmup + repeat), unit)
    if interrupt and not rounds.count:
        raise KeyboardInterrupt("no whole round was measured, so nothing was kept.") from interrupt
    return f"the report counts {rounds.count} of {counted(repeat, 'round')}." if interrupt else ""


def _measured_frames(run: RateRun, warmup: int, frames: int) -> str:
    """Answer the camera's `frames`; returns what the report counts after Ctrl-C, else ""."""
    interrupt = until_interrupt(partial(run.measure, warmup), frames, "frames")
    if interrupt and not run.count:
        raise KeyboardInterrupt("no whole answer was measured, so nothing was kept.") from interrupt
    return f"the report has the {counted(run.count, 'answer')} so far." if interrupt else ""


def _parser() -> CommandParser:
    parser = new_parser(
        "sinkprune profile",
        "Measure every budget against the unpruned engines, in turn, on one image and prompt. Without --rate, method "
        "downsample is measured too if the bundle has it: a smaller picture, or averaged tokens on a tower of one "
        "resolution.",
        _EXAMPLES,
        _add_sources,
        ("--prompt", "--instruction"),
    )
    parser.group("budget").add_argument(
        "--budgets",
        type=name_list,
        help="comma-separated; none always runs, but with --rate only if named (default: none and all of the bundle)",
    )
    add_method(parser)
    add_new_tokens(parser, default=_NEW_TOKENS, note=", or the engines' limit")
    parser.set_defaults(new_tokens=None)
    add = parser.group("measurement").add_argument
    add("--repeat", type=REPEAT, help=f"measured rounds (default: {USUAL_REPEAT})")
    add(
        "--warmup-rounds",
        dest="warmup",
        type=WARMUP.named("--warmup-rounds"),
        default=1,
        metavar="N",
        help="rounds before them that do not count (default: 1)",
    )
    add_extensions(parser, PROFILE_EXTENSIONS)
    add_rate_options(parser)
    add_power_options(parser)
    add_report_options(parser, "where the time goes; with --rate, latency and temperature over time")
    return parser


def _add_sources(group: Any) -> None:
    group.add_argument("--frames", type=Path, help="with --rate: a folder of pictures, one for each frame in turn")
    for extension in PROFILE_EXTENSIONS.values():
        extension.add_sources(group)


def _print_table(report: ProfileReport) -> None:
    console = TableConsole()
    console.print_head(
        report,
        f"milliseconds, median (95th percentile) of {counted(report.repeat, 'interleaved run')}"
        f"{few_note(report.repeat)}",
    )
    rows, unpruned = report.rows(), report.budgets[UNPRUNED].mean_visual_tokens
    compared = ["speed-up to\nfirst token", "speed-up\nof prefill", "ideal of\nprefill", "share of\nthe ideal"]
    times = make_table(["budget"], ["time to\nfirst token", "a further\ntoken", "whole\nanswer", *compared])
    parts = parts_table([*OF_TTFT])
    kept = ["visual\ntokens", "into\nthe LLM", "in its\nlast layer", "mean of\nlayers, %"]
    tokens = make_table(["budget"], [*kept, "KV cache\nMB", "prefill\nGFLOP/s", "decode\ntokens/s", "decode\nGB/s"])
    for name, budget in rows.items():
        ms, prefill = budget.ms, budget.ms["prefill"]
        times.add_row(
            row_name(name),
            spread_text(ms["ttft"]),
            median_text(ms["per_token"]),
            median_text(ms["latency"]),
            f"{budget.speedup.ttft:.2f}",
            f"{budget.speedup.prefill:.2f}",
            f"{budget.flops_speedup.prefill:.2f}",
            f"{100 * budget.efficiency.prefill:.0f} %",
        )
        parts.add_row(row_name(name), *(median_text(ms[part]) for part in (*OF_TTFT, "select")))
        decode, read = budget.decode_tokens_per_s, budget.decode_gb_per_s
        tokens.add_row(
            row_name(name),
            *map(str, (budget.visual_tokens, budget.kept_after_sanitizer, budget.tokens_per_layer[-1])),
            f"{100 * budget.mean_visual_tokens / unpruned:.1f}",
            f"{budget.kv_bytes / 1e6:.1f}",
            # A rate above the machine's peak is a bug.
            "-" if prefill is None else f"{budget.flops.prefill / prefill.median / 1e6:.0f}",
            "-" if decode is None else f"{decode:.1f}",
            "-" if read is None else f"{read:.1f}",
        )
    for table in (times, parts, tokens):
        console.print(table)
    console.print_text(_LEGEND)
    ttft = {name: spread for name, budget in rows.items() if (spread := budget.ms["ttft"])}
    print_spread(console, "the time to first token of one budget", report.repeat, ttft)
    print_load(console, report.other_load)
    for name, budget in rows.items():
        if budget.warm_ttft_ms and budget.ms["ttft"]:
            warm, share = budget.warm_ttft_ms, budget.warm_ttft_ms.median / budget.ms["ttft"].median
            console.print_text(
                f"{name}: time to first token in a session {spread_text(warm)}, {share:.2f} of a whole request"
            )
    peak = max(rows, key=lambda name: rows[name].peak_rss_bytes or 0)
    if (most := rows[peak].peak_rss_bytes) is not None:
        console.print_text(f"peak memory: {gigabytes(most)}, with {peak}; the JSON has each budget and stage")
    if report.power is not None:
        for name, budget in rows.items():
            console.print_text(f"{name}: {joules_text(budget.energy)}")
        console.print_text(power_line(report.power))
    if report.load_ms is not None and report.first_answer_ms is not None:
        console.print(f"loaded in {report.load_ms:.0f} ms, the first answer began at {report.first_answer_ms:.0f} ms")


def row_name(name: str) -> Text:
    """Return the name of a profile's row for its table, a baseline's budget on a second line."""
    return Text("\n").join(plain_text(word) for word in name.split(" "))


def parts_table(parts: Sequence[str], *more: str) -> Table:
    """Return an empty table of the `parts` of a request, by the names that plots have too, and of `more` columns."""
    names = [PART_NAMES[part].replace(" ", "\n") for part in parts]
    return make_table(["budget"], [*names, "selection\nin prefill", *more])


def print_spread(console: TableConsole, what: str, repeat: int, spreads: Mapping[str, Spread]) -> None:
    """Print how far apart the measurements of `what` are, by the names of several rows."""
    if len(spreads) > 1:
        console.print_text(noise_note(what, repeat, spreads))


def print_load(console: TableConsole, other_load: float | None) -> None:
    """Print a warning if other programs took a large share of the processors during a measurement."""
    if other_load is not None and other_load > LOADED:
        console.print_text(
            f"warning: other programs took {100 * other_load:.0f} % of the processors meanwhile, so times are "
            "doubtful; measure again on an idle machine"
        )


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

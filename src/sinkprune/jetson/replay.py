"""`sinkprune-replay`: answers a question about the frames of a recording of ROS 2."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.checks import RealNumber, WholeNumber, counted, escaped, to_json
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import RunningOutput, json_outputs, write_result
from sinkprune.contract.command_line.table_console import few_note
from sinkprune.contract.errors import BagError, ImageError, OutputError, UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.report import Spread
from sinkprune.jetson.bags.answers_file import FrameResult, Journal, open_journal, write_answers
from sinkprune.jetson.bags.bag import Bag, Frame, open_bag, read_frame
from sinkprune.jetson.bags.bag_files import MOST_BYTES, Message
from sinkprune.runtime.commands.options import (
    Options,
    add_method,
    add_most_tokens,
    add_system,
    bundle_parser,
    check_memory,
    load_pipeline,
    prompt_pieces,
)
from sinkprune.runtime.commands.run import note_pictures
from sinkprune.runtime.families import load_family
from sinkprune.runtime.loading import check_kind
from sinkprune.runtime.media.images import NEARLY_BLACK, largest_of_16_bits
from sinkprune.runtime.overlay import overlay, picture_bytes
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.profiling.profile import model_name
from sinkprune.runtime.steps.answer import PARTS
from sinkprune.runtime.steps.request import DEFAULT_NEW_TOKENS, check_texts
from sinkprune.serving.form_options import add_form_options, read_form

_NS = 1_000_000_000


@dataclass(frozen=True)
class Sampling:
    """The frames that are wanted. Seconds count from the first frame of the topic."""

    start_s: float | None = None
    end_s: float | None = None
    every_s: float = 0.0
    """The length of a period, of which the first frame is chosen; 0 chooses every frame."""
    limit: int | None = None
    """The most frames that are chosen."""


class FrameChooser:
    """Chooses frames one after the other. The same times and settings give the same choice again."""

    def __init__(self, sampling: Sampling) -> None:
        self._wanted = sampling
        self.counts = {"total": 0, "chosen": 0, "skipped": 0, "outside": 0, "after_limit": 0}
        """What became of the frames so far; all other numbers add up to `total`."""
        self.first_ns = self._last_ns = 0
        """The time of the first frame, from which `--start` and `--end` count."""
        self._chosen_ns: int | None = None
        self.goes_back: tuple[int, int] | None = None
        """The number of the first frame that is older than the frame before it, and by how many nanoseconds."""

    def chooses(self, time_ns: int) -> bool:
        """Return whether the next frame, which was recorded at `time_ns`, is wanted."""
        if not self.counts["total"]:
            self.first_ns = time_ns
        elif time_ns < self._last_ns and self.goes_back is None:
            self.goes_back = self.counts["total"], self._last_ns - time_ns
        fate, self._last_ns = self._fate(time_ns), time_ns
        self.counts["total"] += 1
        self.counts[fate] += 1
        if fate == "chosen":
            self._chosen_ns = time_ns
        return fate == "chosen"

    def _fate(self, time_ns: int) -> str:
        wanted = self._wanted
        # In whole nanoseconds, because a float of the seconds since 1970 is not exact.
        since_ns = time_ns - self.first_ns
        if (wanted.start_s is not None and since_ns < round(wanted.start_s * _NS)) or (
            wanted.end_s is not None and since_ns > round(wanted.end_s * _NS)
        ):
            return "outside"
        if wanted.limit is not None and self.counts["chosen"] >= wanted.limit:
            return "after_limit"
        if wanted.every_s and self._chosen_ns is not None:
            every_ns = max(1, round(wanted.every_s * _NS))
            period, chosen = since_ns // every_ns, (self._chosen_ns - self.first_ns) // every_ns
            # A frame that is older by a whole period is after a clock that was set back. Others came late.
            if period <= chosen and time_ns > self._chosen_ns - every_ns:
                return "skipped"
        return "chosen"


@dataclass(frozen=True)
class FrameCounts:
    """What became of the frames of a topic. All other numbers add up to `total`."""

    total: int
    """The frames of the topic that the bag holds, as far as it can be read."""
    answered: int
    failed: int
    """Frames that were chosen, and whose pictures could not be decoded."""
    skipped: int
    """Frames that --every or --max-rate left out."""
    outside: int
    """Frames before --start or after --end."""
    after_limit: int
    """Frames after the last of --limit."""


@dataclass(frozen=True)
class FrameFailure:
    """A frame that was chosen, and not answered."""

    frame: int
    """Its number in the topic, from 0."""
    time_ns: int
    """When it was recorded, in nanoseconds since 1970."""
    reason: str


@dataclass(frozen=True)
class ReplayReport:
    """A replay: what `--json` writes."""

    frames: FrameCounts
    failures: tuple[FrameFailure, ...]
    """The first failures, at most 10,000."""
    overlays: int
    """The drawings that were written."""
    ms: dict[str, Spread | None]
    """Milliseconds of the answers by part; None where no answer has the part."""
    seen_share: float
    """The smallest share of an answered frame's area that the model sees."""

    bag: str
    topic: str
    type: str
    prompt: str
    output: str
    model: str
    bundle_sha256: str
    backend: str
    precision: str
    method: str
    budget: str
    damage: str | None
    """Why the bag could not be read to its end; None for a whole bag."""
    resumed: int
    """The frames that an earlier replay had answered, or failed to decode."""
    seconds: float
    """The time that this replay took, without loading."""
    notes: list[str]
    """The notes that this replay printed on frames."""


_MOST_UNDECODED, _MOST_UNDECODED_BYTES = 100, 2 * MOST_BYTES
"""The frames after which a replay stops to look for a first one that can be decoded."""
_MOST_LISTED = 10_000
"""The most failures that a report lists."""


def _first_frame(bag: Bag, topic: str, sampling: Sampling) -> Frame:
    """Return the first wanted frame that can be decoded. Raises `BagError` if there is none."""
    type_name, chooser, reason, undecoded = bag.check_pictures(topic), FrameChooser(sampling), "", 0
    counts = chooser.counts
    for message in bag.messages(topic):
        if not chooser.chooses(message.time_ns):
            continue
        try:
            return read_frame(type_name, message.data)
        except ImageError as error:
            reason, undecoded = reason or str(error), undecoded + len(message.data)
        if counts["chosen"] == _MOST_UNDECODED or undecoded > _MOST_UNDECODED_BYTES:
            raise BagError(
                f"none of the first {counts['chosen']} wanted frames of topic '{topic}' in '{bag.path}' can be "
                f"decoded: {reason.rstrip('.')}. Choose another topic or --start."
            )
    found = [f"'{bag.path}' has {counts['total']} frames of topic '{topic}'"]
    found += [f"none of the {counts['chosen']} that are wanted can be decoded: {reason}"] if reason else []
    found += [f"{counts['outside']} are before --start or after --end"] if counts["outside"] else []
    found += [bag.damage] if bag.damage else []
    raise BagError("; ".join(part.rstrip(".") for part in found) + ". Choose another topic or other times.")


def _summarised(results: Iterable[FrameResult], counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the first fields of a report. Raises `BagError` where no frame was answered."""
    failures: list[FrameFailure] = []
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    answered, failed, overlays, seen_share = 0, 0, 0, 1.0
    for result in results:
        if result.failure is not None:
            failed += 1
            if failed <= _MOST_LISTED:
                failures.append(FrameFailure(result.number, result.time_ns, result.failure))
            continue
        answered, overlays = answered + 1, overlays + bool(result.overlay)
        seen_share = min(seen_share, result.seen_share)
        for part, value in (result.ms or {}).items():
            if value is not None:
                times[part].append(value)
    if not answered:
        first = f", the first because {failures[0].reason}" if failures else ""
        raise BagError(f"no frame was answered: {failed} failed{first}. Choose another topic or other times.")
    others = {name: counts[name] for name in ("skipped", "outside", "after_limit")}
    return {
        "frames": FrameCounts(counts["total"], answered, failed, **others),
        "failures": tuple(failures),
        "overlays": overlays,
        "ms": {part: Spread.of(found) if found else None for part, found in times.items()},
        "seen_share": seen_share,
    }


_SUFFIX = ".mcap"
_EXAMPLES = """\
examples:
  sinkprune-replay bundle drive.mcap --topic /camera/image_raw --prompt "Is the way clear?" -o answers.mcap
  sinkprune-replay bundle drive --topic /camera/image_raw/compressed --prompt "Is the way clear?" --choice yes \\
    --choice no --budget retain-64 --every 1 -o answers.mcap

A replay that was stopped goes on when the same command is given again. docs/ros2.md describes the output.
"""
_EVERY = RealNumber("every", 0.001, 86_400, "seconds, from 0.001 to 86400")
_MAX_RATE = RealNumber("max_rate", 0.001, 1000, "frames a second, from 0.001 to 1000")
_START = RealNumber("start", 0, 1e9, "seconds, 0 or more")
_END = _START.named("end")
_LIMIT = WholeNumber("limit", 1, 10**9)


class _Options(Options):
    @property
    def sampling(self) -> Sampling:
        return Sampling(self.start, self.end, 1 / self.max_rate if self.max_rate else self.every or 0.0, self.limit)

    @property
    def draws(self) -> bool:
        return self.budget != UNPRUNED and not self.no_overlay


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, _Options)
    bag_folders = [options.bag] if options.bag.is_dir() else []
    check_outputs(
        [(options.output, (_SUFFIX,)), *json_outputs(options.json)],
        [*options.key_files, *options.form_files, options.bag],
        [*options.folders, *bag_folders],
    )
    if options.output.exists() and not options.force:
        raise OutputError(
            f"'{options.output}' exists already. Add --force to replace it, or choose another file with -o."
        )
    if options.every and options.max_rate:
        raise UsageError("--every and --max-rate both choose frames by their times. Leave out one of the two.")
    if options.end is not None and options.start is not None and options.end < options.start:
        raise UsageError(f"--end is {options.end:g} and --start {options.start:g}, expected an end after the start.")
    form, prompt = read_form(options, []), prompt_pieces(options.prompt)
    if not isinstance(prompt, str):
        check_texts(prompt, 1)
    bag = open_bag(options.bag)
    first = _first_frame(bag, options.topic, options.sampling)
    bundle = read_runnable(options.bundle, options.trust)
    check_kind(bundle, acts=False)
    bundle.manifest.plan(options.method, options.budget)
    texts = [options.system or "", *([prompt] if isinstance(prompt, str) else prompt)]
    new_tokens = options.max_new_tokens or DEFAULT_NEW_TOKENS
    layout = load_family(bundle.manifest, options.fit).layout(first.picture)
    check_memory(options, bundle, [layout], options.method, [options.budget], texts, new_tokens)
    files = [(file.path.name, (found := file.path.stat()).st_size, found.st_mtime_ns) for file in bag.files]
    names = ("topic", "prompt", "method", "budget", "max_new_tokens", "system", "backend", "compute", "fit", "draws")
    # What must be equal for a replay to go on with the answers of an earlier one.
    settings = {
        "format": 2,
        "bag": [list(file) for file in files],
        "bundle": bundle.sha256,
        "engines": str(options.engines.resolve()) if options.engines else None,
        **form,
        **{name: getattr(options, name) for name in names},
        "frames": asdict(options.sampling),
    }
    with open_journal(options.output, settings) as journal:
        pipeline = load_pipeline(options, bundle)
        answering = _Answering(pipeline, options, prompt, form)
        answering.note(first)
        try:
            report = _answer_all(bag, journal, answering)
        except KeyboardInterrupt as interrupt:
            if not journal.count:
                raise KeyboardInterrupt("no frame was answered, so nothing was kept.") from interrupt
            raise KeyboardInterrupt(
                f"{counted(journal.count, 'frame')} are in '{journal.path}'; the same command goes on."
            ) from interrupt
    write_result(options.json, to_json(report), lambda: sys.stdout.write(_in_words(report)))
    sys.stderr.write(_warnings(report, no_overlay=options.no_overlay))


class _Answering:
    def __init__(self, pipeline: Pipeline, options: _Options, prompt: str | list[str], form: dict[str, Any]) -> None:
        self.pipeline, self.options, self._prompt = pipeline, options, prompt
        self._fields = {**form, "budget": options.budget, "method": options.method, "system": options.system}
        if options.max_new_tokens is not None:
            self._fields["max_new_tokens"] = options.max_new_tokens
        self._noted = set[tuple[int, int, bool]]()
        self.notes: list[str] = []

    def note(self, frame: Frame) -> None:
        """Print and keep notes on the first frame of a size, and on the first that is nearly black.

        Raises `ImageError` for what the family rejects.
        """
        largest = largest_of_16_bits(frame.picture)
        kind = (*frame.picture.size, largest is not None and largest < NEARLY_BLACK)
        if kind not in self._noted:
            self._noted.add(kind)
            self.notes += note_pictures(self.pipeline.family, [Path(self.options.topic)], [frame.picture])

    def answer(self, number: int, message: Message, type_name: str) -> FrameResult:
        """Return the answer about a frame, or why its picture cannot be decoded."""
        try:
            frame = read_frame(type_name, message.data)
            self.note(frame)
            answer = self.pipeline.generate(frame.picture, self._prompt, **self._fields)
        except ImageError as error:
            return FrameResult(number, message.time_ns, failure=str(error).rstrip("."))
        drawn = b""
        if self.options.draws:
            drawn = picture_bytes(overlay(answer, frame.picture, self.options.prompt), Path("overlay.jpg"))
        same = ("text", "finish", "budget", "confidence", "prompt_tokens", "visual_tokens", "kv_bytes", "ms")
        return FrameResult(
            number,
            message.time_ns,
            *frame[:3],
            **{name: getattr(answer, name) for name in same},
            tokens_per_layer=tuple(answer.tokens_per_layer),
            seen_share=answer.images[0].layout.seen_share,
            overlay=drawn,
        )


def _answer_all(bag: Bag, journal: Journal, answering: _Answering) -> ReplayReport:
    """Answer the wanted frames that the journal does not have yet, write the output, and return the report."""
    options, resumed, began = answering.options, journal.count, time.monotonic()
    if resumed:
        sys.stderr.write(f"goes on after {counted(resumed, 'frame')} of an earlier replay\n")
    type_name, chooser = bag.check_pictures(options.topic), FrameChooser(options.sampling)
    total, output = (bag.counts or {}).get(options.topic, 0), RunningOutput(options.json, options.output)
    earlier = islice(journal.results(), resumed)
    with output.until_written("replaying") as progress:
        for number, message in enumerate(bag.messages(options.topic)):
            if chooser.chooses(message.time_ns):
                known = next(earlier, None)
                if known is None:
                    result = answering.answer(number, message, type_name)
                    journal.add(result)
                    if result.failure is None:
                        seconds = (result.time_ns - chooser.first_ns) / _NS
                        output.write(f"{number} {seconds:.3f} s: {escaped(result.text)}\n")
                elif (known.number, known.time_ns) != (number, message.time_ns):
                    raise OutputError(f"'{journal.path}' has answers about other frames. Remove it to begin anew.")
            progress("replaying", number + 1, total, "frames")
    if chooser.goes_back is not None and options.sampling != Sampling(limit=options.limit):
        frame, by_ns = chooser.goes_back
        answering.notes.append(
            f"frame {frame} was recorded {by_ns / _NS:g} s earlier than the frame before it. --start, --end, "
            "--every and --max-rate choose frames by these times (docs/ros2.md)."
        )
        sys.stderr.write(f"{answering.notes[-1]}\n")
    manifest = answering.pipeline.bundle.manifest
    report = ReplayReport(
        **_summarised(journal.results(), chooser.counts),
        **{name: getattr(options, name) for name in ("topic", "prompt", "method", "budget")},
        bag=str(options.bag),
        type=type_name,
        output=str(options.output),
        model=model_name(manifest.checkpoint.source),
        bundle_sha256=answering.pipeline.bundle.sha256,
        backend=answering.pipeline.backend.name,
        precision=manifest.precision,
        damage=bag.damage,
        resumed=resumed,
        seconds=time.monotonic() - began,
        notes=answering.notes,
    )
    # The metadata of MCAP are texts; parts of the report are JSON.
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in to_json(report).items()
        if name not in ("output", "resumed", "seconds", "notes")
    }
    write_answers(options.output, journal.results(), metadata)
    return report


def _in_words(report: ReplayReport) -> str:
    frames, ttft = report.frames, report.ms["ttft"]
    others = {
        "failed": frames.failed,
        "skipped": frames.skipped,
        "before --start or after --end": frames.outside,
        "after --limit": frames.after_limit,
    }
    return (
        f"[{report.budget}] {frames.answered} of {counted(frames.total, 'frame')} answered"
        + "".join(f", {count} {what}" for what, count in others.items() if count)
        + (f"; TTFT {ttft.median:.0f} ms (p95 {ttft.p95:.0f}){few_note(frames.answered)}" if ttft else "")
        + f"; written to '{escaped(report.output)}'\n"
    )


def _warnings(report: ReplayReport, *, no_overlay: bool) -> str:
    lines = []
    if report.failures:
        first = report.failures[0]
        failed = counted(report.frames.failed, "frame")
        lines.append(f"warning: {failed} could not be decoded. Frame {first.frame}: {first.reason}.")
    if report.damage is not None:
        lines.append(f"warning: the bag ends early. {report.damage}. {report.frames.total} frames were read before.")
    if report.budget == UNPRUNED and not no_overlay:
        lines.append(f"note: no overlays were drawn, because budget {UNPRUNED} drops no tokens.")
    return "".join(f"{escaped(line)}\n" for line in lines)


def _parser() -> Any:
    parser = bundle_parser(
        "sinkprune replay", "Answer a question about the frames of a recording of ROS 2.", _EXAMPLES
    )
    parser.add_argument("bag", type=Path, metavar="BAG", help="a folder of rosbag2, or a file of it: .mcap or .db3")
    add = parser.group("picture and question").add_argument
    add("--topic", required=True, help="the topic, of sensor_msgs/msg/Image or CompressedImage")
    places = "{image} marks the frame's place, for chat templates that keep the order (default: frame first)"
    add("--prompt", required=True, help=f"the question; {places}")
    budgets = "a budget of the bundle, or none (default: none)"
    parser.group("budget").add_argument("--budget", default=UNPRUNED, help=budgets)
    add_method(parser)
    add_most_tokens(parser, DEFAULT_NEW_TOKENS)
    add_system(parser)
    add_form_options(parser)
    every = "answer the first frame of each period (default: every frame)"
    add("--every", type=_EVERY, metavar="SECONDS", help=every)
    add("--max-rate", type=_MAX_RATE, metavar="HZ", help="the same by frames a second: --every 1/HZ")
    add("--start", type=_START, metavar="SECONDS", help="begin so long after the topic's first frame")
    add("--end", type=_END, metavar="SECONDS", help="end so long after the topic's first frame")
    add("--limit", type=_LIMIT, metavar="N", help="take at most N frames, with those that cannot be decoded")
    add = parser.group("output").add_argument
    add("-o", "--output", type=Path, required=True, metavar="OUT.mcap", help="the file to write")
    add("--force", action="store_true", help="replace an existing OUT.mcap")
    add("--no-overlay", action="store_true", help="draw no kept and dropped tokens")
    parser.add_json("the counts of frames and the times")
    return parser

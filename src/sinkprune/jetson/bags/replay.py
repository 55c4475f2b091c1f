"""Answers about the frames of a recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from sinkprune.contract.errors import BagError, ImageError, OutputError
from sinkprune.contract.report import Spread
from sinkprune.jetson.bags.answers_file import FrameResult, Journal
from sinkprune.jetson.bags.bag import Bag, Frame, read_frame
from sinkprune.jetson.bags.bag_file import MOST_BYTES
from sinkprune.runtime.steps.answer import PARTS

_NS = 1_000_000_000


class Fate(Enum):
    """What becomes of a frame."""

    CHOSEN = "chosen"
    OUTSIDE = "outside"
    """Before --start or after --end."""
    SKIPPED = "skipped"
    """A frame of the same period was chosen, or one of a period before which this frame belongs."""
    AFTER_LIMIT = "after_limit"
    """--limit frames were chosen before."""


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
        """Start before the first frame."""
        self._wanted, self._count, self._chosen = sampling, 0, 0
        self._first_ns = self._last_ns = 0
        self._chosen_ns: int | None = None
        self.goes_back: tuple[int, int] | None = None
        """The number of the first frame that is older than the frame before it, and by how many nanoseconds."""

    def fate(self, time_ns: int) -> Fate:
        """Return what becomes of the next frame, which was recorded at `time_ns`."""
        wanted = self._wanted
        if not self._count:
            self._first_ns = time_ns
        elif time_ns < self._last_ns and self.goes_back is None:
            self.goes_back = self._count, self._last_ns - time_ns
        self._count, self._last_ns = self._count + 1, time_ns
        # In whole nanoseconds, because a float of the seconds since 1970 is not exact.
        since_ns = time_ns - self._first_ns
        if (wanted.start_s is not None and since_ns < round(wanted.start_s * _NS)) or (
            wanted.end_s is not None and since_ns > round(wanted.end_s * _NS)
        ):
            return Fate.OUTSIDE
        if wanted.limit is not None and self._chosen >= wanted.limit:
            return Fate.AFTER_LIMIT
        if wanted.every_s and self._chosen_ns is not None:
            every_ns = max(1, round(wanted.every_s * _NS))
            period, chosen = since_ns // every_ns, (self._chosen_ns - self._first_ns) // every_ns
            # A frame that is older by a whole period is after a clock that was set back. Others came late.
            if period <= chosen and time_ns > self._chosen_ns - every_ns:
                return Fate.SKIPPED
        self._chosen, self._chosen_ns = self._chosen + 1, time_ns
        return Fate.CHOSEN


_MOST_UNDECODED, _MOST_UNDECODED_BYTES = 100, 2 * MOST_BYTES
"""The frames after which a replay stops to look for a first one that can be decoded."""
_MOST_LISTED = 10_000


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
class Summary:
    """What a replay did with the frames of a topic."""

    frames: FrameCounts
    failures: tuple[FrameFailure, ...]
    """The first failures, at most 10,000."""
    overlays: int
    """The drawings that were written."""
    ms: dict[str, Spread | None]
    """Milliseconds of the answers by part; None where no answer has the part."""
    seen_share: float
    """The smallest share of an answered frame's area that the model sees."""


Answer = Callable[[FrameResult, Frame], FrameResult]
"""Returns the result of a frame, from a result with the frame's number and times. Raises `ImageError` for a picture
that the model cannot take."""


class TopicReplay:
    """The frames of a topic with pictures, of which some are wanted."""

    def __init__(self, bag: Bag, topic: str, sampling: Sampling) -> None:
        """Check that the topic has pictures; raises `BagError`."""
        self.bag, self.topic, self.sampling = bag, topic, sampling
        self.began_ns = 0
        """The time of the topic's first frame, from which `--start` and `--end` count."""
        self.goes_back: tuple[int, int] | None = None
        """`FrameChooser.goes_back`, once `run` has ended."""
        self.type_name = bag.check_pictures(topic)

    def first_frame(self) -> Frame:
        """Return the first wanted frame that can be decoded. Raises `BagError` if there is none."""
        chooser, fates, reason, undecoded = FrameChooser(self.sampling), Counter[Fate](), "", 0
        for message in self.bag.messages(self.topic):
            self.began_ns = self.began_ns if fates else message.time_ns
            fate = chooser.fate(message.time_ns)
            fates[fate] += 1
            if fate is Fate.CHOSEN:
                try:
                    return read_frame(self.type_name, message.data)
                except ImageError as error:
                    reason, undecoded = reason or str(error), undecoded + len(message.data)
                if fates[fate] == _MOST_UNDECODED or undecoded > _MOST_UNDECODED_BYTES:
                    raise BagError(
                        f"none of the first {fates[fate]} wanted frames of topic '{self.topic}' in "
                        f"'{self.bag.path}' can be decoded: {reason.rstrip('.')}. Choose another topic or --start."
                    )
        found = [f"'{self.bag.path}' has {fates.total()} frames of topic '{self.topic}'"]
        found += [f"none of the {fates[Fate.CHOSEN]} that are wanted can be decoded: {reason}"] if reason else []
        found += [f"{fates[Fate.OUTSIDE]} are before --start or after --end"] if fates[Fate.OUTSIDE] else []
        found += [self.bag.damage] if self.bag.damage else []
        raise BagError("; ".join(part.rstrip(".") for part in found) + ". Choose another topic or other times.")

    def run(self, journal: Journal, answer: Answer, on_frame: Callable[[FrameResult | None], None]) -> Counter[Fate]:
        """Answer the wanted frames that `journal` does not have yet, and add them to it. Return the fates of all.

        `on_frame` receives each frame's result, and None for a frame that is not answered now. Raises what `answer`
        raises, except `ImageError`.
        """
        chooser, fates = FrameChooser(self.sampling), Counter[Fate]()
        earlier = islice(journal.results(), journal.count)
        for number, message in enumerate(self.bag.messages(self.topic)):
            fate = chooser.fate(message.time_ns)
            fates[fate] += 1
            result = FrameResult(number, message.time_ns)
            if fate is not Fate.CHOSEN:
                on_frame(None)
                continue
            known = next(earlier, None)
            if known is not None:
                if (known.number, known.time_ns) != (number, message.time_ns):
                    raise OutputError(f"'{journal.path}' has answers about other frames. Remove it to begin anew.")
                on_frame(None)
                continue
            try:
                result = answer(result, read_frame(self.type_name, message.data))
            except ImageError as error:
                result = FrameResult(number, message.time_ns, failure=str(error).rstrip("."))
            journal.add(result)
            on_frame(result)
        self.goes_back = chooser.goes_back
        return fates


def summarise(results: Iterable[FrameResult], fates: Mapping[Fate, int]) -> Summary:
    """Return the summary of all frames. Raises `BagError` where no frame was answered."""
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
    counts = FrameCounts(
        sum(fates.values()),
        answered,
        failed,
        fates.get(Fate.SKIPPED, 0),
        fates.get(Fate.OUTSIDE, 0),
        fates.get(Fate.AFTER_LIMIT, 0),
    )
    if not answered:
        first = f", the first because {failures[0].reason}" if failures else ""
        raise BagError(f"no frame was answered: {failed} failed{first}. Choose another topic or other times.")
    return Summary(
        counts,
        tuple(failures),
        overlays,
        {part: Spread.of(found) if found else None for part, found in times.items()},
        seen_share,
    )

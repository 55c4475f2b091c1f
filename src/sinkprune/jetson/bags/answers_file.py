"""The file of a replay's answers, and the journal from which an interrupted replay goes on.

`.NAME.replaying` is next to `NAME`. Its first line has the settings of the replay, and each other line has the result
of a frame, as JSON. A line is complete with its line end. A replay that is killed leaves the file there, and the same
command goes on from its last complete line. The file is locked while a replay runs.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from sinkprune.contract.checks import Bounds, counted, from_json
from sinkprune.contract.errors import OutputError
from sinkprune.contract.files.output_files import whole_file
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.jetson.bags.bag_files import MOST_BYTES, CdrWriter
from sinkprune.runtime.steps.answer import PARTS

U32 = Annotated[int, Bounds(0, 2**32 - 1)]
U64 = Annotated[int, Bounds(0, 2**64 - 1)]
_DAMAGED = (UnreadableError, ValueError, TypeError, KeyError)


@dataclass(frozen=True)
class FrameResult:
    """The answer about a frame, or why there is none."""

    number: U32
    """The number of the frame in the topic, from 0."""
    time_ns: U64
    """When the frame was recorded, in nanoseconds since 1970."""
    seconds: U32 = 0
    nanoseconds: U32 = 0
    """The time in the frame's own header."""
    frame_id: str = ""
    failure: str | None = None
    """Why the picture could not be decoded; None for an answer."""
    text: str = ""
    finish: str = ""
    budget: str = ""
    confidence: float | None = None
    prompt_tokens: U32 = 0
    visual_tokens: U32 = 0
    tokens_per_layer: tuple[U32, ...] = ()
    kv_bytes: U64 = 0
    ms: dict[str, float | None] | None = None
    """Milliseconds by the parts of `PARTS`."""
    seen_share: float = 1.0
    """The share of the frame's area that the model sees."""
    overlay: bytes = b""
    """The drawing of the kept tokens as a JPEG; empty if there is none."""

    def line(self) -> bytes:
        return _line({**asdict(self), "overlay": base64.b64encode(self.overlay).decode()})

    @staticmethod
    def of_line(line: bytes) -> FrameResult:
        """Return the result in a line. Raises errors of `_DAMAGED` for a line that is damaged."""
        found = parsed_json(line)
        found["overlay"] = base64.b64decode(found["overlay"])
        result = from_json(FrameResult, found)
        if not set(PARTS).issuperset(result.ms or ()) or (result.failure is None and not result.tokens_per_layer):
            raise ValueError("no answer about a frame")
        return result


class Journal:
    """The results that are complete; see `open_journal`."""

    def __init__(self, path: Path, file: FileIO, settings: Mapping[str, object]) -> None:
        """Go on with the results in the open `file`, or begin it. Raises `OutputError` for another replay's."""
        self.path, self._file, self.count = path, file, 0
        head, first = _line(settings), next(self._lines(), b"")
        # A first line that is cut off has no results after it.
        if first and first != head:
            raise OutputError(
                f"'{path}' has answers of another replay: different {', '.join(_different(first, settings))}. Give "
                "the same options again, choose another -o, or remove that file to begin anew."
            )
        complete = len(first)
        if first != head:
            file.seek(0)
            file.truncate()
            self._write(head)
            complete = len(head)
        for _ in self.results():
            self.count += 1
        for line in islice(self._lines(), 1, 1 + self.count):
            complete += len(line)
        file.truncate(complete)
        file.seek(complete)

    def add(self, result: FrameResult) -> None:
        """Write a result. It stays if the process is killed afterwards. Raises `OutputError`, as on a full disk."""
        self._write(result.line())
        self.count += 1

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OutputError(
                f"'{self.path}' cannot be written: {error.strerror}. It has {counted(self.count, 'frame')}. Free "
                "space and repeat the command, which goes on from there."
            ) from error

    def results(self) -> Iterator[FrameResult]:
        for line in islice(self._lines(), 1, None):
            try:
                yield FrameResult.of_line(line)
            except _DAMAGED:
                # A power cut may leave zeros in place of the last lines.
                return

    def _lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while (line := file.readline(MOST_BYTES)).endswith(b"\n"):
                yield line


@contextmanager
def open_journal(output: Path, settings: Mapping[str, object]) -> Iterator[Journal]:
    """Open the journal of the replay that writes `output`, for one process at a time.

    If the block raises, results stay for the next replay; otherwise the file is removed. Raises `OutputError` if
    another process writes `output`, or if the file is of another replay.
    """
    path = output.absolute().with_name(f".{output.name}.replaying")
    with _open_own(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(file.fileno()).st_nlink > 0
        except BlockingIOError:
            held = False
        if not held:
            raise OutputError(f"another sinkprune-replay is writing '{output}'. Wait for it, or choose another -o.")
        journal, keep = Journal(path, file, settings), True
        try:
            yield journal
            keep = False
        finally:
            if not (keep and journal.count):
                path.unlink(missing_ok=True)


def _open_own(path: Path) -> FileIO:
    """Open a regular file of this user for reading and writing, or create it. Raises `OutputError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise OutputError(f"'{path}' {reason}, and the replay needs that place. Move it away.") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise OutputError(f"'{path}' is not a file of your own, and the replay needs that place. Move it away.")
    # Without a buffer, which would be written again when the file is closed, also after a full disk.
    return FileIO(descriptor, "r+b")


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _different(line: bytes, settings: Mapping[str, object]) -> list[str]:
    """Return the names of the settings that differ from those in a line."""
    try:
        found = parsed_json(line)
    except UnreadableError:
        found = None
    if not isinstance(found, dict):
        return list(settings)
    ours = json.loads(_line(settings))
    return [name for name in {**ours, **found} if found.get(name) != ours.get(name)]


ANSWER = "/sinkprune/answer"
FIGURES = "/sinkprune/figures"
OVERLAY = "/sinkprune/overlay"
METADATA_NAME = "sinkprune"
"""The name of the record of metadata."""

_HEADER = "".join(
    f"{'=' * 80}\nMSG: {name}\n{fields}"
    for name, fields in (
        ("std_msgs/Header", "builtin_interfaces/Time stamp\nstring frame_id\n"),
        ("builtin_interfaces/Time", "int32 sec\nuint32 nanosec\n"),
    )
)
"""The definitions of messages inside others, which follow theirs, as ros2 bag writes them."""
_FIGURES = (
    "std_msgs/Header header\nuint32 frame\nstring budget\nstring finish\nuint32 prompt_tokens\n"
    "uint32 visual_tokens\nuint32 kept_after_sanitizer\nuint32[] tokens_per_layer\nuint64 kv_bytes\n"
    "float64 confidence\n" + "".join(f"float64 {part}_ms\n" for part in PARTS) + _HEADER
)
_TYPES = {
    ANSWER: ("std_msgs/msg/String", "string data\n"),
    FIGURES: ("sinkprune_msgs/msg/Figures", _FIGURES),
    OVERLAY: ("sensor_msgs/msg/CompressedImage", "std_msgs/Header header\nstring format\nuint8[] data\n" + _HEADER),
}


def write_answers(path: Path, results: Iterable[FrameResult], metadata: Mapping[str, str]) -> None:
    """Write the answers among `results` to an MCAP file at `path`, whole or not at all. Raises `OutputError`.

    Messages have the times of their frames, and their headers those of the frames' headers. A topic without messages
    is left out.
    """
    from mcap.well_known import MessageEncoding, Profile, SchemaEncoding
    from mcap.writer import Writer

    with whole_file(path) as file:
        writer = Writer(file)
        writer.start(profile=Profile.ROS2, library="sinkprune")
        channels: dict[str, int] = {}
        for result in results:
            for topic, data in _messages(result).items():
                if topic not in channels:
                    name, definition = _TYPES[topic]
                    schema = writer.register_schema(name, SchemaEncoding.ROS2, definition.encode())
                    channels[topic] = writer.register_channel(
                        topic, MessageEncoding.CDR, schema, {"offered_qos_profiles": ""}
                    )
                writer.add_message(channels[topic], result.time_ns, data, result.time_ns, result.number)
        writer.add_metadata(METADATA_NAME, dict(metadata))
        writer.finish()  # type: ignore[no-untyped-call]


def _messages(result: FrameResult) -> dict[str, bytes]:
    """Return the messages about a frame by their topics; none for a frame that failed."""
    if result.failure is not None:
        return {}

    def begun() -> CdrWriter:
        return CdrWriter().u32(result.seconds, result.nanoseconds).text(result.frame_id)

    ms: Mapping[str, Any] = result.ms or {}
    times = [math.nan if (value := ms.get(part)) is None else value for part in PARTS]
    figures = begun().u32(result.number).text(result.budget).text(result.finish)
    figures.u32(result.prompt_tokens, result.visual_tokens, result.tokens_per_layer[0])
    figures.u32(len(result.tokens_per_layer), *result.tokens_per_layer).u64(result.kv_bytes)
    figures.f64(math.nan if result.confidence is None else result.confidence, *times)
    messages = {ANSWER: CdrWriter().text(result.text).message(), FIGURES: figures.message()}
    if result.overlay:
        messages[OVERLAY] = begun().text("jpeg").data(result.overlay).message()
    return messages

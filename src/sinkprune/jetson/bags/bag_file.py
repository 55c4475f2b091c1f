"""Files of a recording, and the CDR encoding of their messages.

mcap-ros2-support reads cut-off arrays as shorter ones, and writes each byte of an array by a call of its own. This
module rejects the first and avoids the second. Tests compare it with mcap-ros2-support and with rosbags.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from sinkprune.contract.files.untrusted import UnreadableError

MOST_BYTES = 257 << 20
"""The most bytes of a message, the largest part of a bag that is held: `MOST_PIXELS` of 4 bytes, and a header."""
NAME_BYTES = 1000
"""The most bytes of a name: of a topic, a type, a format, a coordinate frame."""
MOST_TOPICS = 10_000
"""The most topics of a file."""


class Topic(NamedTuple):
    """A topic of a bag."""

    type_name: str
    """The type of its messages, as in sensor_msgs/msg/Image."""
    encoding: str
    """The format of its messages, as in cdr."""


class Message(NamedTuple):
    """A message of a topic."""

    time_ns: int
    """When it was recorded, in nanoseconds since 1970."""
    data: bytes
    """The message as it was recorded: in CDR, or compressed with zstd or lz4."""


class DamagedError(Exception):
    """A bag cannot be read further. The message follows the name of the file, as in "is cut off ..."."""


def check_topics(count: int) -> None:
    """Raise `DamagedError` for more than `MOST_TOPICS`."""
    if count > MOST_TOPICS:
        raise DamagedError(f"is damaged: it lists more than {MOST_TOPICS} topics")


@dataclass(frozen=True)
class Contents:
    """What a file states, or what was found in it."""

    topics: Mapping[str, Topic]
    counts: Mapping[str, int]
    """The messages of topics; a topic may be absent, and a file may state a wrong number."""


class BagFile(Protocol):
    """A file of a bag."""

    path: Path

    def contents(self) -> Contents:
        """Return the topics of the file; reads all of it if it states none. Raises `DamagedError`."""

    def messages(self, topic: str) -> Iterator[Message]:
        """Yield the messages of a topic in the order of the file. Raises `DamagedError` where the file is damaged."""


_HEADER = 4
# The second byte of the header. ROS 2 writes these two kinds only.
_ENDS = {0: ">", 1: "<"}


class CdrReader:
    """Reads the fields of a message one after the other. Raises `UnreadableError` for a message that is cut off."""

    def __init__(self, data: bytes) -> None:
        """Read the header of a message, which says whether its numbers are little-endian."""
        if len(data) < _HEADER or data[0] != 0 or data[1] not in _ENDS:
            raise UnreadableError(
                "is neither CDR nor compressed with zstd or lz4: it begins with "
                f"{bytes(data[:_HEADER]).hex(' ') or 'nothing'}"
            )
        # Views are no copies, and pictures are large.
        self._data, self._place, self._end = memoryview(data)[_HEADER:], 0, _ENDS[data[1]]

    def u8(self) -> int:
        """Read a number of one byte."""
        return self._take(1)[0]

    def u32(self) -> int:
        """Read an unsigned number of four bytes, at a multiple of four."""
        self._place += -self._place % 4
        (value,) = struct.unpack(f"{self._end}I", self._take(4))
        return int(value)

    def text(self) -> str:
        """Read a short string. Raises `UnreadableError` for more than `NAME_BYTES`."""
        data = bytes(self.data())
        if len(data) > NAME_BYTES:
            raise UnreadableError(f"has a text of {len(data)} bytes, expected at most {NAME_BYTES}")
        try:
            return data.removesuffix(b"\0").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableError(f"has a text that is not UTF-8: {error.reason}") from error

    def data(self) -> memoryview:
        """Read a sequence of bytes, without a copy."""
        return self._take(self.u32())

    def _take(self, count: int) -> memoryview:
        left = max(0, len(self._data) - self._place)
        if count > left:
            raise UnreadableError(f"is cut off: a field has {count} bytes, and {left} are left")
        taken = self._data[self._place : self._place + count]
        self._place += count
        return taken


class CdrWriter:
    """Writes the fields of a little-endian message; each method returns the writer."""

    def __init__(self) -> None:
        self._data = bytearray()

    def u32(self, *values: int) -> CdrWriter:
        """Write unsigned numbers of four bytes."""
        return self._add(4, struct.pack(f"<{len(values)}I", *values))

    def u64(self, value: int) -> CdrWriter:
        """Write an unsigned number of eight bytes."""
        return self._add(8, struct.pack("<Q", value))

    def f64(self, *values: float) -> CdrWriter:
        """Write floats of eight bytes."""
        return self._add(8, struct.pack(f"<{len(values)}d", *values))

    def u32_sequence(self, values: Sequence[int]) -> CdrWriter:
        """Write a sequence of unsigned numbers of four bytes."""
        return self.u32(len(values), *values)

    def text(self, value: str) -> CdrWriter:
        """Write a string, which CDR ends with a zero byte."""
        return self.data(value.encode() + b"\0")

    def data(self, value: bytes) -> CdrWriter:
        """Write a sequence of bytes."""
        self.u32(len(value))
        return self._add(1, value)

    def message(self) -> bytes:
        """Return the whole message, with its header."""
        return b"\0\1\0\0" + bytes(self._data)

    def _add(self, alignment: int, data: bytes) -> CdrWriter:
        self._data += bytes(-len(self._data) % alignment) + data
        return self

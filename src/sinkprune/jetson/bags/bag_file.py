"""Files of a recording: the CDR encoding of their messages, and rosbag2's sqlite3 files (`.db3`).

mcap-ros2-support reads cut-off arrays as shorter ones, and writes each byte of an array by a call of its own. This
module rejects the first and avoids the second. Tests compare it with mcap-ros2-support and with rosbags.

A hostile sqlite3 file may have trees that lead in circles, cells of gigabytes, and programs in place of tables. So
sqlite3 has limits of memory and of steps, and the bytes of rows are counted.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from sinkprune.contract.files.untrusted import MissingError, UnreadableError, open_regular

MOST_BYTES = 257 << 20
"""The most bytes of a message, the largest part of a bag that is held: `MOST_PIXELS` of 4 bytes, and a header."""
NAME_BYTES = 1000
"""The most bytes of a name: of a topic, a type, a format, a coordinate frame."""
MOST_TOPICS = 10_000
"""The most topics of a file."""


class Topic(NamedTuple):
    type_name: str
    """The type of its messages, as in sensor_msgs/msg/Image."""
    encoding: str
    """The format of its messages, as in cdr."""


class Message(NamedTuple):
    time_ns: int
    """When it was recorded, in nanoseconds since 1970."""
    data: bytes
    """The message as it was recorded: in CDR, or compressed with zstd or lz4."""


class DamagedError(Exception):
    """A bag cannot be read further. The message follows the name of the file, as in "is cut off ..."."""


def check_topics(count: int) -> None:
    if count > MOST_TOPICS:
        raise DamagedError(f"is damaged: it lists more than {MOST_TOPICS} topics")


Contents = tuple[dict[str, Topic], dict[str, int]]


class BagFile(Protocol):
    """A file of a bag."""

    path: Path

    def contents(self) -> Contents:
        """Return the topics of the file, and how many messages it states for some of them, maybe wrongly.

        Reads all of a file that states no topics. Raises `DamagedError`.
        """

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
        return self._add(4, struct.pack(f"<{len(values)}I", *values))

    def u64(self, value: int) -> CdrWriter:
        return self._add(8, struct.pack("<Q", value))

    def f64(self, *values: float) -> CdrWriter:
        return self._add(8, struct.pack(f"<{len(values)}d", *values))

    def text(self, value: str) -> CdrWriter:
        """Write a string, which CDR ends with a zero byte."""
        return self.data(value.encode() + b"\0")

    def data(self, value: bytes) -> CdrWriter:
        self.u32(len(value))
        return self._add(1, value)

    def message(self) -> bytes:
        return b"\0\1\0\0" + bytes(self._data)

    def _add(self, alignment: int, data: bytes) -> CdrWriter:
        self._data += bytes(-len(self._data) % alignment) + data
        return self


SQLITE_MAGIC = b"SQLite format 3\0"
_COLUMNS = {
    "topics": ["id", "name", "type", "serialization_format"],
    "messages": ["id", "topic_id", "timestamp", "data"],
}
_NAMES = _COLUMNS["topics"][1:]
"""The first columns of each table, which every version of rosbag2 writes in this order."""
# sqlite3 finds types and the length of a blob without reading the value.
_TOPICS = (
    "SELECT CASE typeof(id) WHEN 'integer' THEN id END, "
    + ", ".join(f"CASE WHEN length({name}) <= {NAME_BYTES} THEN {name} END AS {name}" for name in _NAMES)
    + f" FROM topics NOT INDEXED LIMIT {MOST_TOPICS + 1}"
)
# Without an order, rows are in the order of recording, and are never sorted. Data of other topics is not read.
_MESSAGES = (
    "SELECT CASE typeof(timestamp) WHEN 'integer' THEN timestamp END, CASE WHEN typeof(timestamp) = 'integer' AND "
    f"typeof(data) = 'blob' AND length(data) <= {MOST_BYTES} THEN data END FROM messages NOT INDEXED "
    "WHERE typeof(id) <> 'integer' OR typeof(topic_id) <> 'integer' OR topic_id IN ({})"
)
_HEAP_BYTES = MOST_BYTES + (16 << 20)
"""The memory of sqlite3: a message, pages and the schema."""
_STEPS = 10_000
_STEPS_OF_SCHEMA = 3 * _STEPS
_FEWEST_STEPS, _STEPS_PER_BYTE = 100 * _STEPS, 2
"""More than any rows take: reading a row, which has at least 20 bytes, takes about 20."""
_TOO_MANY = "is damaged: it has more rows than its size allows"
_READS = {"sqlite_master", *_COLUMNS}
_FUNCTIONS = {"length", "typeof"}


class SqliteFile:
    """A sqlite3 file of rosbag2. It is opened as immutable, so that reading writes no file next to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def contents(self) -> Contents:
        with self._opened() as database:
            # Counting would read every row: an index over topics does not exist.
            return {name: topic for _, name, topic in _topics(database)}, {}

    def messages(self, topic: str) -> Iterator[Message]:
        size, read = self.path.stat().st_size, 0
        with self._opened() as database:
            # Numbers, so that they need no parameters, of which there may be few.
            ids = ",".join(str(number) for number, name, _ in _topics(database) if name == topic)
            for time_ns, data in database.execute(_MESSAGES.format(ids)):
                if time_ns is None or time_ns < 0 or data is None:
                    raise DamagedError(f"is damaged: a row has no time, or no message of at most {MOST_BYTES} bytes")
                read += len(data)
                # A damaged tree may lead in circles.
                if read > size:
                    raise DamagedError(_TOO_MANY)
                yield Message(time_ns, data)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the file, and check that it has plain tables. Raises `DamagedError`, also for errors of the block."""
        for log in (Path(f"{self.path}-wal"), Path(f"{self.path}-journal")):
            # sqlite3 overwrites the beginning of logs that are done with zeros.
            with suppress(MissingError), open_regular(log) as file:
                if file.read(1).strip(b"\0"):
                    raise DamagedError(
                        f"has changes in '{log.name}', because its recorder was stopped. Merge them with: sqlite3 "
                        f"'{self.path}' 'PRAGMA wal_checkpoint(TRUNCATE)'"
                    )
        turns = iter(range(_STEPS_OF_SCHEMA // _STEPS))
        try:
            database = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            try:
                database.set_progress_handler(lambda: next(turns, None) is None, _STEPS)
                database.set_authorizer(_authorize)
                database.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")
                database.execute("PRAGMA trusted_schema = OFF")
                # Otherwise sqlite3 reads nothing of a file that is cut off. Nothing is written.
                database.execute("PRAGMA writable_schema = ON")
                for table, expected in _COLUMNS.items():
                    _check_table(database, table, expected)
                # sqlite3 goes on after a schema that it could not read to its end.
                if next(turns, None) is None:
                    raise DamagedError(_TOO_MANY)
                turns = iter(range((_FEWEST_STEPS + _STEPS_PER_BYTE * self.path.stat().st_size) // _STEPS))
                yield database
            finally:
                database.close()
        except MemoryError as error:
            raise DamagedError(f"is damaged: sqlite3 needs more than {_HEAP_BYTES} bytes to read it") from error
        except sqlite3.Error as error:
            reason = f"is damaged: {' '.join(str(error).split())[:200]}"
            raise DamagedError(reason if next(turns, None) is not None else _TOO_MANY) from error


def _authorize(action: int, first: str | None, second: str | None, _database: str | None, program: str | None) -> int:
    allowed = (
        action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_PRAGMA)
        or (action == sqlite3.SQLITE_READ and first in _READS)
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
    )
    return sqlite3.SQLITE_OK if allowed and program is None else sqlite3.SQLITE_DENY


def _check_table(database: sqlite3.Connection, table: str, expected: list[str]) -> None:
    """Raise `DamagedError` for views and computed columns, which are programs, and for other columns."""
    place = database.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = ? AND type = 'table'", (table,)
    ).fetchone()
    columns = database.execute(f"PRAGMA table_xinfo({table})").fetchall() if place and place[0] else []
    if not columns or any(hidden for *_, hidden in columns):
        raise DamagedError(f"is no recording of rosbag2: it has no plain table '{table}'")
    if [name for _, name, *_ in columns][: len(expected)] != expected:
        raise DamagedError(
            f"is no recording of rosbag2: table '{table}' has other columns than {', '.join(expected)}"
        )


def _topics(database: sqlite3.Connection) -> list[tuple[int, str, Topic]]:
    """Return the number, the name and the facts of each topic. Raises `DamagedError` and `sqlite3.Error`."""
    topics = []
    for number, name, kind, encoding in database.execute(_TOPICS):
        if not isinstance(number, int) or not all(isinstance(text, str) for text in (name, kind, encoding)):
            raise DamagedError(f"is damaged: a topic has no number, or a name of more than {NAME_BYTES} characters")
        topics.append((number, name, Topic(kind, encoding)))
        check_topics(len(topics))
    return topics

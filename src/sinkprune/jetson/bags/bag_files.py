"""Files of a recording: the CDR encoding of their messages, MCAP (mcap.dev/spec), and sqlite3 files of rosbag2.

mcap-ros2-support reads cut-off arrays as shorter ones, and writes each byte of an array by a call of its own. This
module rejects the first and avoids the second. Tests compare it with mcap-ros2-support and with rosbags.

MCAP files are read from their start to their end, with one message in memory. That needs no index, and reads the
beginning of a file that is cut off. The libraries mcap and rosbags read whole chunks, attachments or indexes into
memory, and rosbags needs an end with an index. So this module reads records by itself.

A hostile sqlite3 file may have trees that lead in circles, cells of gigabytes, and programs in place of tables. So
sqlite3 has limits of memory and of steps, and the bytes of rows are counted.
"""

from __future__ import annotations

import io
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from sinkprune.contract.checks import format_value
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


MCAP_MAGIC = b"\x89MCAP0\r\n"
_FOOTER, _SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _STATISTICS, _DATA_END = 2, 3, 4, 5, 6, 11, 15
_RECORD_HEAD = struct.Struct("<BQ")
_MESSAGE_HEAD = struct.Struct("<HIQQ")
_CHUNK_HEAD = struct.Struct("<QQQI")
_STATISTICS_HEAD = struct.Struct("<QHIIIIQQI")
_COUNT = struct.Struct("<HQ")
_COUNTS_BYTES = _COUNT.size << 16
_ENDING = struct.Struct("<BQQQI8s")
_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_BLOCK = 1 << 20
_MOST_SKIPPED = 4 * MOST_BYTES
_SKIPPED_PER_BYTE = 1000
_MOST_RECORDS = 500_000
"""Records of chunks, beyond one for each byte: equal ones take less than a byte each, and reading them a second."""
_BEGINNINGS = {b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
_TOO_LARGE = "is damaged: compressed data is cut off, or has more than {} bytes"


class McapFile:
    """A file of MCAP. `messages` raises `DamagedError` where the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def contents(self) -> Contents:
        """Return the topics of the file, and how many messages it states for some of them, maybe wrongly.

        Reads all of a file that states no topics. Raises `DamagedError`.
        """
        stated = _Listing()
        try:
            stated.add_all(self._summary())
        except (DamagedError, UnreadableError):
            # `messages` reports the damage.
            stated = _Listing()
        # Recorders may repeat channels without their schemas.
        if stated.topics and stated.has_schemas:
            return stated.topics, stated.counts
        found = _Listing()
        try:
            found.add_all(self._records())
        except DamagedError:
            if not found.topics:
                raise
        return found.topics, found.counts

    def messages(self, topic: str) -> Iterator[Message]:
        ids: set[int] = set()
        for opcode, record in self._records():
            if opcode == _CHANNEL:
                number, _, name, _ = record.channel()
                if name == topic:
                    ids.add(number)
            elif opcode == _MESSAGE:
                number, _, time_ns, _ = record.unpack(_MESSAGE_HEAD)
                if number in ids:
                    if record.left > MOST_BYTES:
                        raise DamagedError(f"has a message of {record.left} bytes, expected at most {MOST_BYTES}")
                    yield Message(time_ns, record.read(record.left))

    def _summary(self) -> Iterator[tuple[int, _Source]]:
        """Yield the records at the end of the file, none if it has no end. Raises `DamagedError`."""
        with open_regular(self.path) as file:
            end = os.fstat(file.fileno()).st_size - _ENDING.size
            if end < 0:
                return
            file.seek(end)
            opcode, _, start, _, _, magic = _ENDING.unpack(file.read(_ENDING.size))
            if (opcode, magic) == (_FOOTER, MCAP_MAGIC) and 0 < start < end:
                file.seek(start)
                yield from _Source(io.BufferedReader(cast(io.RawIOBase, file)), end - start).records()

    def _records(self) -> Iterator[tuple[int, _Source]]:
        """Yield all records before the summary, those of chunks in place of chunks. Raises `DamagedError`."""
        with open_regular(self.path) as file:
            stream = io.BufferedReader(cast(io.RawIOBase, file))
            source, skipped, count = _Source(stream, os.fstat(file.fileno()).st_size), 0, 0
            if source.read(len(MCAP_MAGIC)) != MCAP_MAGIC:
                raise DamagedError("is damaged: it does not begin as MCAP")
            for opcode, record in source.records():
                if opcode == _DATA_END:
                    return
                if opcode != _CHUNK:
                    yield opcode, record
                    continue
                place = stream.tell()
                _, _, size, crc = record.unpack(_CHUNK_HEAD)
                compression = record.text()
                (packed,) = record.unpack(_U64)
                if packed > record.left:
                    raise DamagedError(f"is damaged: the chunk at byte {place} has more bytes than its record")
                # A few bytes may unpack to gigabytes. Messages that are read do not count.
                if skipped + size > _MOST_SKIPPED + _SKIPPED_PER_BYTE * place:
                    raise DamagedError(
                        f"is damaged: its first {place} bytes unpack to more than {skipped} bytes of other records"
                    )
                start = stream.tell()
                _check_sum(_unpacked(compression, _Window(file, start, packed)), place, size, crc)
                chunk = _Source(_unpacked(compression, _Window(file, start, packed)), size)
                for inner in chunk.records():
                    count += 1
                    if count > _MOST_RECORDS + place + packed:
                        raise DamagedError(f"is damaged: its first {place + packed} bytes have {count} records")
                    yield inner
                skipped += chunk.skipped
            raise DamagedError("is cut off: it has no record of its end")


class _Listing:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._types: dict[int, str] = {}
        self._channels: dict[int, tuple[int, str, str]] = {}

    @property
    def topics(self) -> dict[str, Topic]:
        """The topics by name, whose schemas may come after them."""
        return {name: Topic(self._types.get(schema, ""), own) for schema, name, own in self._channels.values()}

    @property
    def has_schemas(self) -> bool:
        """Whether each channel that has a schema is listed with it. Number 0 stands for none."""
        return all(schema in self._types for schema, _, _ in self._channels.values() if schema)

    def add_all(self, records: Iterator[tuple[int, _Source]]) -> None:
        stated: dict[int, int] | None = None
        for opcode, record in records:
            if opcode == _SCHEMA:
                (number,) = record.unpack(_U16)
                self._types[number] = record.text()
            elif opcode == _CHANNEL:
                number, schema, name, encoding = record.channel()
                self._channels[number] = schema, name, encoding
                check_topics(len(self._channels))
            elif opcode == _MESSAGE:
                (number,) = record.unpack(_U16)
                if number in self._channels:
                    _, name, _ = self._channels[number]
                    self.counts[name] = self.counts.get(name, 0) + 1
            elif opcode == _STATISTICS:
                *_, size = record.unpack(_STATISTICS_HEAD)
                size = min(size, record.left, _COUNTS_BYTES)
                stated = dict(record.unpack(_COUNT) for _ in range(size // _COUNT.size))
        if stated is not None:
            for number, (_, name, _) in self._channels.items():
                self.counts[name] = self.counts.get(name, 0) + stated.get(number, 0)


class _Source:
    """Bytes of a file, a chunk or a record, of which no more can be read than are left."""

    __slots__ = ("_stream", "left", "skipped")

    def __init__(self, stream: IO[bytes], left: int) -> None:
        self._stream, self.left = stream, left
        self.skipped = 0
        """The bytes of records that nobody read."""

    def read(self, count: int) -> bytes:
        """Return `count` bytes. Raises `DamagedError` if fewer are left."""
        if count > self.left:
            raise DamagedError(f"is cut off: a field has {count} bytes, and {self.left} are left")
        self.left -= count
        data: bytes = _guarded(self._stream.read, count)
        if len(data) != count:
            raise DamagedError(f"is cut off: a field has {count} bytes, and {len(data)} are left")
        return data

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        return fields.unpack(self.read(fields.size))

    def text(self) -> str:
        """Return a short text. Raises `DamagedError` for more than `NAME_BYTES`."""
        (size,) = self.unpack(_U32)
        if size > NAME_BYTES:
            raise DamagedError(f"is damaged: a name has {size} bytes, expected at most {NAME_BYTES}")
        return str(_guarded(self.read(size).decode))

    def channel(self) -> tuple[int, int, str, str]:
        """Return a channel's number, the number of its schema, its topic and its encoding."""
        return (*self.unpack(_U16), *self.unpack(_U16), self.text(), self.text())

    def records(self) -> Iterator[tuple[int, _Source]]:
        """Yield the opcode and the content of each record; what the caller leaves of the content is skipped."""
        while self.left:
            opcode, length = self.unpack(_RECORD_HEAD)
            if length > self.left:
                raise DamagedError(f"is cut off: a record has {length} bytes, and {self.left} are left")
            self.left -= length
            record = _Source(self._stream, length)
            yield opcode, record
            self.skipped += record.left
            if record.left > _BLOCK:
                _guarded(self._stream.seek, record.left, os.SEEK_CUR)
            else:
                record.read(record.left)


def _guarded(call: Callable[..., Any], *arguments: object) -> Any:
    """Call a library, whose errors on damaged bytes are of any kind. Raises `DamagedError`."""
    try:
        return call(*arguments)
    except DamagedError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedError(f"is damaged: {reason[:200]}") from error


class _Window(io.RawIOBase):
    """A part of an open file. Reading it does not move the file's own place."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._place, self._end = file, start, start + size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (self._place if whence == os.SEEK_CUR else 0)
        return self._place

    def readinto(self, buffer: Any) -> int:
        part = memoryview(buffer)[: max(0, self._end - self._place)]
        count = os.preadv(self._file.fileno(), [part], self._place)
        self._place += count
        return count


def compression_of(data: bytes) -> str:
    """Return the name of the compression that `data` begins with, "" for another beginning. CDR never does so."""
    return _BEGINNINGS.get(data[:4], "")


def decompressed(data: bytes, most: int = MOST_BYTES) -> bytes:
    """Return `data` without its compression by zstd or lz4, or `data` itself if it has none.

    Raises `DamagedError` for damaged data, and for more than `most` bytes before it allocates them.
    """
    name = compression_of(data)
    if name == "zstd":
        import zstandard

        if _guarded(zstandard.frame_content_size, data) > most:
            raise DamagedError(_TOO_LARGE.format(most))
        return cast(bytes, _guarded(zstandard.ZstdDecompressor().decompress, data, most))
    if name == "lz4":
        from lz4.frame import LZ4FrameDecompressor

        frame = LZ4FrameDecompressor()
        plain: bytes = _guarded(frame.decompress, data, most)
        if not frame.eof:
            raise DamagedError(_TOO_LARGE.format(most))
        return plain
    return data


def _unpacked(name: str, packed: io.RawIOBase) -> IO[bytes]:
    """Return a stream of what `packed` holds without its compression. Raises `DamagedError` for an unknown one."""
    if name == "zstd":
        import zstandard

        return cast(
            IO[bytes], zstandard.ZstdDecompressor().stream_reader(cast(IO[bytes], packed), read_across_frames=True)
        )
    if name == "lz4":
        from lz4.frame import LZ4FrameFile

        return cast(IO[bytes], LZ4FrameFile(packed))
    if name:
        raise DamagedError(f"is compressed with {format_value(name)}, expected zstd, lz4 or nothing")
    return io.BufferedReader(packed)


def _check_sum(stream: IO[bytes], place: int, size: int, crc: int) -> None:
    """Raise `DamagedError` for a chunk with other bytes than were written."""
    found_size = found_crc = 0
    while found_size <= size and (block := _guarded(stream.read, _BLOCK)):
        found_size += len(block)
        found_crc = zlib.crc32(block, found_crc) if crc else 0
    if (found_size, found_crc) != (size, crc):
        raise DamagedError(f"is damaged: the sum of the chunk at byte {place} differs")


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
    """A sqlite3 file of rosbag2, read as `McapFile` is. It is immutable: reading writes no file next to it."""

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

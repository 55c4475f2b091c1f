"""Read MCAP files (mcap.dev/spec), also those that are cut off, and hold no more than one message.

Files are read from their start to their end. That needs no index, and reads the beginning of a file that is cut off.
The libraries mcap and rosbags read whole chunks, attachments or indexes into memory, and rosbags needs an end with an
index. So this module reads records by itself.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from sinkprune.contract.checks import format_value
from sinkprune.contract.files.untrusted import UnreadableError, open_regular
from sinkprune.jetson.bags.bag_file import (
    MOST_BYTES,
    NAME_BYTES,
    Contents,
    DamagedError,
    Message,
    Topic,
    check_topics,
)

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
    def __init__(self, path: Path) -> None:
        self.path = path

    def contents(self) -> Contents:
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

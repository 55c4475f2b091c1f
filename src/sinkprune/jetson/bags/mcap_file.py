"""Read MCAP files, also those that are cut off, with the library mcap and limits of our own.

Files are read from their start to their end. That needs no index, and reads the beginning of a file that is cut off.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.files.untrusted import open_regular
from sinkprune.jetson.bags.bag_file import MOST_BYTES, Contents, DamagedError, Message, Topic

if TYPE_CHECKING:
    from mcap.records import Chunk, McapRecord

MAGIC = b"\x89MCAP0\r\n"
_BEGINNINGS = {b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
_TOO_LARGE = "is damaged: compressed data is cut off, or has more than {} bytes"


class McapFile:
    """An MCAP file."""

    def __init__(self, path: Path) -> None:
        """Read the file at `path`."""
        self.path = path

    def contents(self) -> Contents:
        summary = self._summary()
        if summary is None or not summary.channels:
            return self._scanned()
        kinds = {channel.id: _topic(channel, summary.schemas) for channel in summary.channels.values()}
        counts: dict[str, int] = {}
        stated = summary.statistics.channel_message_counts if summary.statistics else {}
        for channel in summary.channels.values():
            counts[channel.topic] = counts.get(channel.topic, 0) + stated.get(channel.id, 0)
        topics = {channel.topic: kinds[channel.id] for channel in summary.channels.values()}
        return Contents(topics, counts if summary.statistics else {})

    def messages(self, topic: str) -> Iterator[Message]:
        from mcap.records import Channel
        from mcap.records import Message as Record

        ids: set[int] = set()
        for record in self._records():
            if isinstance(record, Channel) and record.topic == topic:
                ids.add(record.id)
            elif isinstance(record, Record) and record.channel_id in ids:
                yield Message(record.log_time, record.data)

    def _summary(self) -> Any:
        """Return what the end of the file states; None if the file has no end, or states nothing."""
        from mcap.reader import SeekingReader

        with open_regular(self.path) as file:
            try:
                stream = cast(IO[bytes], _WholeReads(file))
                return SeekingReader(stream, record_size_limit=MOST_BYTES).get_summary()
            except Exception:
                # Damaged bytes cause any error of Python's arithmetic. `messages` reports the damage.
                return None

    def _scanned(self) -> Contents:
        """Return what is in the file, up to where it is damaged."""
        from mcap.records import Channel, Schema
        from mcap.records import Message as Record

        schemas: dict[int, Schema] = {}
        topics: dict[str, Topic] = {}
        names: dict[int, str] = {}
        counts: dict[str, int] = {}
        try:
            for record in self._records():
                if isinstance(record, Schema):
                    schemas[record.id] = record
                elif isinstance(record, Channel):
                    names[record.id] = record.topic
                    topics[record.topic] = _topic(record, schemas)
                elif isinstance(record, Record) and record.channel_id in names:
                    name = names[record.channel_id]
                    counts[name] = counts.get(name, 0) + 1
        except DamagedError:
            if not topics:
                raise
        return Contents(topics, counts)

    def _records(self) -> Iterator[McapRecord]:
        """Yield all records before the summary; raises `DamagedError`."""
        from mcap.records import Chunk, DataEnd
        from mcap.stream_reader import StreamReader, breakup_chunk

        with open_regular(self.path) as file:
            stream = _WholeReads(file)
            records = StreamReader(cast(IO[bytes], stream), emit_chunks=True, record_size_limit=MOST_BYTES).records
            while True:
                try:
                    record = next(records)
                    found = breakup_chunk(_plain(record)) if isinstance(record, Chunk) else [record]
                except DamagedError:
                    raise
                except Exception as error:
                    # Damaged bytes cause any error of Python's arithmetic: struct.error, UnicodeDecodeError ...
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise DamagedError(
                        f"is damaged at byte {stream.tell()} of {stream.size}: {reason[:200]}"
                    ) from error
                if isinstance(record, DataEnd):
                    return
                yield from found


class _WholeReads:
    """A file whose `read` returns as many bytes as it is asked for, and allocates nothing for more than there are."""

    def __init__(self, file: IO[bytes]) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self._file = io.BufferedReader(cast(io.RawIOBase, file))

    def read(self, count: int = -1) -> bytes:
        place = self._file.tell()
        wanted = self.size - place if count < 0 else count
        if wanted > self.size - place:
            raise DamagedError(f"is cut off: it ends at byte {self.size}, and a record goes on to {place + wanted}")
        return self._file.read(wanted)

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()


def compression_of(data: bytes) -> str:
    """Return the name of the compression that `data` begins with, "" for another beginning. CDR never does so."""
    return _BEGINNINGS.get(data[:4], "")


def decompressed(name: str, data: bytes, most: int = MOST_BYTES) -> bytes:
    """Return `data` without its compression: zstd, lz4 or none ("").

    Raises `DamagedError` for damaged data, and for more than `most` bytes before it allocates them.
    """
    try:
        if name == "zstd":
            import zstandard

            if zstandard.frame_content_size(data) > most:
                raise DamagedError(_TOO_LARGE.format(most))
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=most)
        if name == "lz4":
            from lz4.frame import LZ4FrameDecompressor

            frame = LZ4FrameDecompressor()
            plain: bytes = frame.decompress(data, max_length=most)
            if not frame.eof:
                raise DamagedError(_TOO_LARGE.format(most))
            return plain
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"is damaged: {name} cannot read it: {' '.join(str(error).split())[:200]}") from error
    if name:
        raise DamagedError(f"is compressed with {format_value(name)}, expected zstd, lz4 or nothing")
    return data


def _plain(chunk: Chunk) -> Chunk:
    """Return `chunk` without compression. Raises `DamagedError` for other bytes than were written."""
    data = decompressed(chunk.compression, chunk.data, min(chunk.uncompressed_size, MOST_BYTES))
    if len(data) != chunk.uncompressed_size or (
        chunk.uncompressed_crc and zlib.crc32(data) != chunk.uncompressed_crc
    ):
        raise DamagedError("is damaged: the sum of a chunk differs")
    return replace(chunk, compression="", data=data)


def _topic(channel: Any, schemas: dict[int, Any]) -> Topic:
    schema = schemas.get(channel.schema_id)
    return Topic(schema.name if schema else "", channel.message_encoding)

"""Recordings of ROS 2: their files, messages and pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from sinkprune.contract.checks import format_value, guessed, install_command, needs_package
from sinkprune.contract.errors import BagError, ImageError
from sinkprune.contract.files.numbered_files import by_number
from sinkprune.contract.files.untrusted import UnreadableError, open_regular, read_text
from sinkprune.jetson.bags import bag_files
from sinkprune.jetson.bags.bag_files import CdrReader, DamagedError, McapFile, Message, SqliteFile, Topic
from sinkprune.runtime.media.images import MOST_PIXELS, read_image_bytes, to_rgb

ENCODINGS = {
    "rgb8": ("RGB", "RGB", "RGB", 3),
    "bgr8": ("RGB", "BGR", "BGR", 3),
    "rgba8": ("RGB", "RGBX", "RGBX", 4),
    "bgra8": ("RGB", "BGRX", "BGRX", 4),
    "mono8": ("L", "L", "L", 1),
    "8UC1": ("L", "L", "L", 1),
    "mono16": ("I;16", "I;16", "I;16B", 2),
    "16UC1": ("I;16", "I;16", "I;16B", 2),
}
"""Pillow's mode, its layouts of little- and of big-endian bytes, and the bytes of a pixel, by `Image.encoding`.

Camera drivers leave alpha unset, so it is dropped.
"""


class Frame(NamedTuple):
    seconds: int
    nanoseconds: int
    """The time in the header, which a camera sets when it takes the picture."""
    frame_id: str
    """The coordinate frame of the camera."""
    picture: Image.Image
    """The picture in RGB. Values of 16 bits are scaled to 8 bits."""


def read_frame(type_name: str, data: bytes) -> Frame:
    """Return the picture in a message of one of `IMAGE_TYPES`, which may be compressed; raises `ImageError`."""
    try:
        # Recorders compress messages one by one, which only the metadata of a whole bag states.
        fields = CdrReader(bag_files.decompressed(data))
        return Frame(fields.u32(), fields.u32(), fields.text(), IMAGE_TYPES[type_name](fields))
    except (UnreadableError, DamagedError) as error:
        raise ImageError(f"the message {error}") from error


def _image(fields: CdrReader) -> Image.Image:
    height, width, name, big = fields.u32(), fields.u32(), fields.text(), bool(fields.u8())
    step, data = fields.u32(), fields.data()
    if name not in ENCODINGS:
        raise ImageError(f"the encoding is {format_value(name)}, expected one of {', '.join(ENCODINGS)}")
    if not 0 < width * height <= MOST_PIXELS:
        raise ImageError(f"the picture has {width}x{height} pixels, expected 1 to {MOST_PIXELS} in all")
    mode, little, big_endian, pixel_bytes = ENCODINGS[name]
    if step < width * pixel_bytes or len(data) != step * height:
        raise ImageError(
            f"the picture has {width}x{height} pixels in {name}, rows of {step} bytes and {len(data)} bytes in all, "
            f"expected rows of {width * pixel_bytes} or more, and as many bytes as all rows have"
        )
    layout = big_endian if big else little
    return to_rgb(Image.frombytes(mode, (width, height), data, "raw", layout, step))


def _compressed_image(fields: CdrReader) -> Image.Image:
    name, data = fields.text(), bytes(fields.data())
    if "compressedDepth" in name:
        raise ImageError(f"the format is {format_value(name)}, expected JPEG or PNG")
    return read_image_bytes(data)


IMAGE_TYPES: dict[str, Callable[[CdrReader], Image.Image]] = {
    "sensor_msgs/msg/Image": _image,
    "sensor_msgs/msg/CompressedImage": _compressed_image,
}
"""The types that are read, each with the function that reads the fields after the header."""


METADATA = "metadata.yaml"
_METADATA_BYTES = 1 << 20
_FILES_KEY = "relative_file_paths"
_HEAD_BYTES = 16
_SUFFIXES = (".mcap", ".db3")
_FILE = re.compile(r"\.(mcap|db3)(\.zstd|\.zst|\.lz4)?$")
_MOST_LISTED = 40
_GIVE = "Give a folder of rosbag2, or a file of it that ends in .mcap or .db3."


class Bag:
    def __init__(self, path: Path, files: list[McapFile | SqliteFile]) -> None:
        """Read the topics of all `files`. Raises `BagError`."""
        self.path, self.files = path, files
        self.topics: dict[str, Topic] = {}
        """The topics by name."""
        self.counts: dict[str, int] | None = {}
        """The messages that the files state for each topic; None if a file states none."""
        self.damage: str | None = None
        """Why reading ended early, once `messages` has ended; None for a whole bag."""
        for file in files:
            try:
                topics, counts = file.contents()
            except (DamagedError, UnreadableError) as error:
                if file is files[0]:
                    raise BagError(f"'{file.path}' {error}. {_GIVE}") from error
                # `messages` reports it when it reaches the file.
                break
            self.topics |= topics
            if not counts or self.counts is None:
                self.counts = None
            else:
                self.counts = {name: self.counts.get(name, 0) + counts.get(name, 0) for name in self.topics}

    def check_pictures(self, topic: str) -> str:
        found = self.topics.get(topic)
        if found is None:
            listed = [f"{name} ({self.topics[name].type_name})" for name in sorted(self.topics)[:_MOST_LISTED]]
            more = f" and {len(self.topics) - _MOST_LISTED} more" if len(self.topics) > _MOST_LISTED else ""
            raise BagError(
                f"'{self.path}' has no topic {format_value(topic)}{guessed(topic, self.topics) or '.'} Its topics "
                f"are: {', '.join(listed)}{more}."
                if listed
                else f"'{self.path}' has no topics."
            )
        if found.type_name not in IMAGE_TYPES or found.encoding != "cdr":
            raise BagError(
                f"topic '{topic}' has messages of type {found.type_name or 'unknown'} in "
                f"{found.encoding or 'an unknown format'}, expected {' or '.join(IMAGE_TYPES)} in cdr. "
                "Choose a topic with pictures."
            )
        return found.type_name

    def messages(self, topic: str) -> Iterator[Message]:
        """Yield the messages of a topic in the order of the files. Where a file is damaged, set `damage` and end."""
        self.damage = None
        for file in self.files:
            try:
                yield from file.messages(topic)
            except (DamagedError, UnreadableError) as error:
                self.damage = f"'{file.path}' {error}"
                return


def open_bag(path: Path) -> Bag:
    """Open the bag at `path`. Raises `BagError` for what is none.

    Raises `UsageError` without the extra `robots`, and for files whose order is unclear.
    """
    with needs_package("reading bags", install_command("robots")):
        for name in ("mcap", "lz4", "zstandard", "yaml"):
            import_module(name)
    if not path.is_dir():
        return Bag(path, [_open_file(path)])
    if not (path / METADATA).is_file():
        # ros2 bag writes the metadata last.
        found = by_number(file for file in path.iterdir() if _FILE.search(file.name))
        if not found:
            raise BagError(
                f"'{path}' is no bag: it has no {METADATA}, and no file that ends in .mcap or .db3. {_GIVE}"
            )
    else:
        try:
            listed = _listed_files(path / METADATA)
        except UnreadableError as error:
            raise BagError(f"'{path / METADATA}' {error}. Repair it with: ros2 bag reindex '{path}'") from error
        # Bags of early versions of ros2 have paths with the name of the folder.
        found = [path / Path(name).name for name in listed]
    return Bag(path, [_open_file(file) for file in dict.fromkeys(map(_unpacked, found))])


def _unpacked(path: Path) -> Path:
    """Return what zstd -d or lz4 -d wrote next to a compressed file, or `path` itself."""
    plain = path.with_suffix("")
    # Path.exists raises an error for a name that is too long.
    return plain if path.suffix not in _SUFFIXES and os.path.exists(plain) else path  # noqa: PTH110


def _open_file(path: Path) -> McapFile | SqliteFile:
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except UnreadableError as error:
        raise BagError(f"'{path}' {error}. {_GIVE}") from error
    # A power cut leaves the last file of a bag empty, or with zeros.
    lost = path.suffix if not head.strip(b"\0") else ""
    if head.startswith(bag_files.MCAP_MAGIC) or lost == ".mcap":
        return McapFile(path)
    if head.startswith(bag_files.SQLITE_MAGIC) or lost == ".db3":
        return SqliteFile(path)
    if name := bag_files.compression_of(head):
        raise BagError(
            f"'{path}' is compressed as a whole with {name}. Unpack it, and all other files of its bag, with: {name} "
            f"-d '{path}'"
        )
    raise BagError(f"'{path}' is no bag: it begins neither as MCAP nor as sqlite3. {_GIVE}")


def _listed_files(path: Path) -> list[str]:
    """Return the paths in a `metadata.yaml`. Raises `UnreadableError`.

    Nothing else of the file is constructed: no tags, and no aliases, which rosbag2 does not write.
    """
    import yaml

    # The parser in C takes a tenth of the time; wheels of PyYAML have it.
    events = yaml.parse(read_text(path, _METADATA_BYTES), Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    try:
        for event in events:
            if getattr(event, "value", "") == _FILES_KEY and isinstance(next(events), yaml.SequenceStartEvent):
                items = list(takewhile(lambda item: not isinstance(item, yaml.SequenceEndEvent), events))
                if items and all(
                    isinstance(item, yaml.ScalarEvent) and len(item.value) <= bag_files.NAME_BYTES for item in items
                ):
                    return [item.value for item in items]
                break
    except (yaml.YAMLError, ValueError, RecursionError, StopIteration) as error:
        raise UnreadableError(f"is not YAML: {' '.join(str(error).split())[:200]}") from error
    raise UnreadableError("lists no files")

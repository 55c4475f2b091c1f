"""What the two kinds of bag files have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

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

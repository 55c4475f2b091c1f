"""Read rosbag2's sqlite3 files (`.db3`) with Python's own sqlite3.

A hostile file may have trees that lead in circles, cells of gigabytes, and programs in place of tables. So sqlite3
has limits of memory and of steps, and the bytes of rows are counted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinkprune.contract.files.untrusted import MissingError, open_regular
from sinkprune.jetson.bags.bag_file import (
    MOST_BYTES,
    MOST_TOPICS,
    NAME_BYTES,
    Contents,
    DamagedError,
    Message,
    Topic,
    check_topics,
)

MAGIC = b"SQLite format 3\0"
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
        """Read the file at `path`."""
        self.path = path

    def contents(self) -> Contents:
        with self._opened() as database:
            # Counting would read every row: an index over topics does not exist.
            return Contents({name: topic for _, name, topic in _topics(database)}, {})

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
    """Allow reading the tables, and no program of the file."""
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

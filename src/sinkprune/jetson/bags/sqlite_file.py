"""Read rosbag2's sqlite3 files (`.db3`) with Python's own sqlite3."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sinkprune.jetson.bags.bag_file import MOST_BYTES, Contents, DamagedError, Message, Topic

MAGIC = b"SQLite format 3\0"
_TABLES = ("topics", "messages")


class SqliteFile:
    """A sqlite3 file of rosbag2. It is opened as immutable, so that reading writes no file next to it."""

    def __init__(self, path: Path) -> None:
        """Read the file at `path`."""
        self.path = path

    def contents(self) -> Contents:
        try:
            with closing(self._opened()) as database:
                rows = database.execute("SELECT name, type, serialization_format FROM topics").fetchall()
        except sqlite3.Error as error:
            raise DamagedError(f"is damaged: {error}") from error
        # Counting would read every row: an index over topics does not exist.
        return Contents({str(name): Topic(str(kind), str(encoding)) for name, kind, encoding in rows}, {})

    def messages(self, topic: str) -> Iterator[Message]:
        size, read, rows = self.path.stat().st_size, 0, 0
        try:
            with closing(self._opened()) as database:
                ids = [row[0] for row in database.execute("SELECT id FROM topics WHERE name = ?", (topic,))]
                # In the order of recording, row by row. Rows of other topics are counted and not read.
                found = database.execute(
                    "SELECT topic_id, timestamp, CASE WHEN length(data) <= ? AND topic_id IN "
                    f"({','.join('?' * len(ids))}) THEN data END FROM messages ORDER BY id",
                    (MOST_BYTES, *ids),
                )
                for number, time_ns, data in found:
                    rows, read = rows + 1, read + len(data or b"")
                    # A damaged tree may lead in circles.
                    if max(rows, read) > size:
                        raise DamagedError("is damaged: it has more rows than its size allows")
                    if number not in ids:
                        continue
                    if not isinstance(time_ns, int) or time_ns < 0 or not isinstance(data, bytes):
                        raise DamagedError(f"is damaged: row {rows} has no message of at most {MOST_BYTES} bytes")
                    yield Message(time_ns, data)
        except sqlite3.Error as error:
            raise DamagedError(f"is damaged after {rows} messages: {error}") from error

    def _opened(self) -> sqlite3.Connection:
        """Open the file, and check that it has plain tables. Raises `DamagedError` and `sqlite3.Error`."""
        log = Path(f"{self.path}-wal")
        if log.exists() and log.stat().st_size:
            raise DamagedError(
                f"has messages in '{log.name}', because its recorder was stopped. Merge them with: sqlite3 "
                f"{self.path.name} 'PRAGMA wal_checkpoint(TRUNCATE)'"
            )
        database = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            database.execute("PRAGMA trusted_schema = OFF")
            # Otherwise sqlite3 reads nothing of a file that is cut off. Nothing is written.
            database.execute("PRAGMA writable_schema = ON")
            for table in _TABLES:
                # Views and computed columns are programs.
                place = database.execute(
                    "SELECT rootpage FROM sqlite_master WHERE name = ? AND type = 'table'", (table,)
                ).fetchone()
                columns = database.execute(f"PRAGMA table_xinfo({table})").fetchall()
                if not (place and place[0]) or any(hidden for *_, hidden in columns):
                    raise DamagedError(f"is no recording of rosbag2: it has no plain table '{table}'")
        except BaseException:
            database.close()
            raise
        return database

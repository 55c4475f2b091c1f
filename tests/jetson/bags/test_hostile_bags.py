"""Recordings that a stranger made: each ends with exit code 2 and one message, soon and in little memory."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from sinkprune.jetson.bags.bag import open_bag
from support.models.bags import TOPIC

PAGE = 4096
TOPICS = "CREATE TABLE topics(id INTEGER PRIMARY KEY, name TEXT, type TEXT, serialization_format TEXT)"
MESSAGES = "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER, timestamp INTEGER, data BLOB)"
CAMERA = f"INSERT INTO topics VALUES(1, '{TOPIC}', 'sensor_msgs/msg/Image', 'cdr')"
ENDLESS = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, 1 AS topic_id, 1 AS timestamp"
FORGED = "INSERT INTO sqlite_master VALUES('table', 'messages', 'messages', 2, '{}')"

REPLAYS = '''
import json, resource, sys, time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
import lz4.frame, mcap, yaml, zstandard
from sinkprune.jetson.replay import main
def most_used():
    """Return the most bytes that were resident since the call before; ru_maxrss counts the parent's too."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) << 10
most_used()
before = most_used()
room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
found = {}
for path in sys.argv[1:]:
    began, stderr = time.process_time(), StringIO()
    try:
        with redirect_stderr(stderr):
            code = main(["none", path, "--topic", "/camera/image_raw", "--prompt", "a", "-o", f"{path}.out.mcap"])
    except SystemExit as end:
        code = end.code
    found[path] = code, stderr.getvalue(), time.process_time() - began, most_used() - before
print(json.dumps(found))
'''


def sqlite(*statements: str, endless: str = "") -> Callable[[Path], object]:
    """Return a function that writes a file; the table `endless` is a tree whose pages list others 400 times each."""

    def make(path: Path) -> None:
        path = path.with_suffix(".db3")
        with closing(sqlite3.connect(path)) as database:
            database.executescript(
                f"PRAGMA page_size={PAGE}; PRAGMA writable_schema=ON; BEGIN; {'; '.join(statements)};"
            )
            database.commit()
            root = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (endless,)).fetchone()
        if endless:
            data, first = bytearray(path.read_bytes()), 0 if root else 100
            place, count = ((root[0] if root else 1) - 1) * PAGE, len(data) // PAGE
            leaf = data[place + first : place + PAGE]
            cells = 8 + 2 * int.from_bytes(leaf[3:5], "big")
            data[place + first : place + PAGE] = _inner(count + 1, first)
            for level in range(2, 7):
                data += _inner(count + level)
            # The first page begins with the head of the file.
            data += leaf[:cells] + bytes(first) + leaf[cells:]
            struct.pack_into(">I", data, 28, len(data) // PAGE)
            path.write_bytes(data)

    return make


def _inner(child: int, first: int = 0) -> bytes:
    """Return a page of sqlite3 from its byte `first` on, which lists a page 400 times."""
    cells = [struct.pack(">IB", child, 1 + number % 100) for number in range(400)]
    places = [PAGE - 5 * (number + 1) for number in range(400)]
    head = struct.pack(">BHHHBI", 5, 0, 400, places[-1], 0, child) + struct.pack(">400H", *places)
    return head + bytes(places[-1] - first - len(head)) + b"".join(reversed(cells))


def record(opcode: int, content: bytes, more: int = 0) -> bytes:
    """Return a record of MCAP that begins with `content` and has `more` other bytes."""
    return struct.pack("<BQ", opcode, len(content) + more) + content


def words(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text.encode() for text in texts)


def message(channel: int, more: int = 0) -> bytes:
    return record(5, struct.pack("<HIQQ", channel, 0, 1, 1), more)


CHANNEL = record(3, struct.pack("<H", 1) + words("sensor_msgs/msg/Image", "ros2msg", "")) + record(
    4, struct.pack("<HH", 1, 1) + words(TOPIC, "cdr", "")
)
ZEROS = bytes(1 << 20)


def chunk(parts: Iterable[bytes], size: int | None = None) -> bytes:
    """Return a chunk of `parts`, which states that it has `size` bytes."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    found, packed = 0, []
    for part in parts:
        found += len(part)
        packed.append(packer.compress(part))
    data = b"".join([*packed, packer.flush()])
    head = struct.pack("<QQQI", 1, 1, found if size is None else size, 0) + words("zstd")
    return record(6, head + struct.pack("<Q", len(data)) + data)


def mcap(*records: bytes) -> Callable[[Path], object]:
    end = record(15, bytes(4)) + record(2, bytes(20)) + b"\x89MCAP0\r\n"
    whole = b"".join([b"\x89MCAP0\r\n", record(1, words("ros2", "")), *records, end])
    return lambda path: path.with_suffix(".mcap").write_bytes(whole)


def metadata(text: str) -> Callable[[Path], object]:
    """Return a function that writes a folder whose `metadata.yaml` has `text` next to a list of a file."""

    def make(path: Path) -> None:
        path.mkdir()
        listed = "  relative_file_paths: [a.db3]"
        (path / "metadata.yaml").write_text(f"rosbag2_bagfile_information:\n{text}\n{listed}\n")

    return make


LISTS = "\n".join(
    f"  l{level}: &l{level} [{', '.join([f'*l{level - 1}' if level else 'x'] * 10)}]" for level in range(10)
)
MERGES = "\n".join(
    f"  m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 10)}]}}" if level else "  m0: &m0 {a: b}"
    for level in range(10)
)
HOSTILE: dict[str, Callable[[Path], object]] = {
    "topics": sqlite(TOPICS, MESSAGES, CAMERA, endless="topics"),
    "messages": sqlite(TOPICS, MESSAGES, CAMERA, "INSERT INTO messages VALUES(1, 2, 1, x'')", endless="messages"),
    "schema": sqlite(TOPICS, MESSAGES, CAMERA, endless="sqlite_master"),
    "view": sqlite(TOPICS, CAMERA, FORGED.format("CREATE VIEW messages AS SELECT zeroblob(900000000) AS data")),
    "endless view": sqlite(TOPICS, CAMERA, f"CREATE VIEW messages AS {ENDLESS}, x'00' AS data FROM n"),
    "computed column": sqlite(TOPICS, CAMERA, MESSAGES.replace("data BLOB", "data AS (zeroblob(900000000))")),
    "virtual table": sqlite(TOPICS, CAMERA, "CREATE VIRTUAL TABLE messages USING fts5(topic_id, timestamp, data)"),
    "no messages": sqlite(TOPICS, CAMERA),
    "long name": sqlite(TOPICS, MESSAGES, "INSERT INTO topics VALUES(1, printf('%.20000000c', 'x'), '', '')"),
    "integer": sqlite(TOPICS, MESSAGES, CAMERA, "INSERT INTO messages VALUES(1, 1, 1, 5)"),
    "real": sqlite(TOPICS, MESSAGES, CAMERA, "INSERT INTO messages VALUES(1, 1, 1, 5.5)"),
    "null": sqlite(TOPICS, MESSAGES, CAMERA, "INSERT INTO messages VALUES(1, 1, NULL, x'00')"),
    "no name": sqlite(TOPICS, MESSAGES, "INSERT INTO topics VALUES(1, NULL, 5, x'00')"),
    "empty messages": mcap(chunk([CHANNEL, *[message(2) * 10_000] * 400])),
    "long messages": mcap(*[chunk([CHANNEL, message(2, 200 << 20), *[ZEROS] * 200])] * 60),
    "long frames": mcap(*[chunk([CHANNEL, message(1, 250 << 20), *[ZEROS] * 250])] * 30),
    "longest message": mcap(chunk([CHANNEL, message(1, 300 << 20), *[ZEROS] * 300])),
    "long schema": mcap(chunk([record(3, struct.pack("<HI", 1, 300 << 20), 300 << 20), *[ZEROS] * 300])),
    "stated size": mcap(chunk([CHANNEL], 1 << 60)),
    "lists": metadata(f"{LISTS}\n  compression_mode: *l9"),
    "merges": metadata(f"{MERGES}\n  compression_mode: *m9"),
    "words": metadata("  a: !!bool maybe\n  b: !!int ''\n  c: !!float _\n  d: !!timestamp 0000-99-99"),
    "dense": metadata("  a: [" + "{b: c}," * 40_000 + "]"),
}
PROGRAMS = ("view", "endless view", "computed column", "virtual table", "no messages")
"""What stands in place of a table of sqlite3."""


def test_hostile_recordings_end_soon_and_in_little_memory(tmp_path: Path) -> None:
    for name, make in HOSTILE.items():
        make(tmp_path / name)
    paths = sorted(map(str, tmp_path.iterdir()))
    ran = subprocess.run([sys.executable, "-c", REPLAYS, *paths], capture_output=True, check=True, timeout=300)
    found = json.loads(ran.stdout)
    assert len(found) == len(HOSTILE)
    for path, (code, stderr, seconds, grown) in found.items():
        assert code == 2 and stderr.count("\n") == 1 and path in stderr, (path, code, stderr)
        assert seconds < 10 and grown < 512 << 20, (path, seconds, grown)
        assert Path(path).stem not in PROGRAMS or "has no plain table 'messages'" in stderr, (path, stderr)


@pytest.mark.parametrize("opcode", [8, 9, 12, 200])
def test_attachments_indexes_metadata_and_unknown_records_are_skipped(opcode: int, tmp_path: Path) -> None:
    mcap(CHANNEL, record(opcode, b"", 3 << 20) + ZEROS * 3, message(1, 4) + b"\0\1\0\0")(tmp_path / "bag")
    bag = open_bag(tmp_path / "bag.mcap")
    assert [message.data for message in bag.messages(TOPIC)] == [b"\0\1\0\0"] and bag.damage is None

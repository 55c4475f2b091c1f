"""The system's files below a root, so that tests can use a recorded tree."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

_MOST_BYTES = 32 << 20
"""A limit above the largest file, dpkg's list of packages."""
_PIECE = 1 << 16
"""Some files of the kernel reject larger reads."""


class SystemFiles:
    """Reads small text files of the system. A file that cannot be read is recorded, without an error."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.unreadable: list[str] = []
        """Existing paths that cannot be read, without `root`, with the reason."""

    def text(self, path: str) -> str | None:
        """Return the text of `path`, relative to the root; None if it is missing or cannot be read."""
        try:
            with (self.root / path).open("rb") as file:
                pieces = iter(partial(file.read, _PIECE), b"")
                return b"".join(islice(pieces, _MOST_BYTES // _PIECE)).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.unreadable.append(f"/{path}: {error.strerror}")
            return None

    def line(self, path: str) -> str | None:
        """Return the first line of `path` without blanks and a device tree's final zero byte; None without one."""
        text = self.text(path)
        lines = text.replace("\0", "\n").split("\n") if text else []
        return (lines[0].strip() or None) if lines else None

    def number(self, path: str) -> int | None:
        """Return the whole number in `path`; None without one."""
        line = self.line(path)
        return int(line) if line and line.isdecimal() else None

    def matching(self, pattern: str) -> list[str]:
        """Return the sorted paths of a pattern of `Path.glob`."""
        try:
            return sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern))
        except OSError as error:
            self.unreadable.append(f"/{pattern}: {error.strerror}")
            return []

    def target(self, path: str) -> str | None:
        """Return the name of the target of the link `path`; None without a link."""
        try:
            return (self.root / path).readlink().name
        except OSError:
            return None

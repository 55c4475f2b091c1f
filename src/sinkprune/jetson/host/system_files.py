"""The system's files below one root, so that a recorded tree can stand in for a board."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

_MOST_BYTES = 32 << 20
"""More than any of them has; dpkg's list of packages has some."""
_PIECE = 1 << 16
"""The kernel gives nothing of some files to who asks for more."""


class SystemFiles:
    """Reads small text files of the system; what may not be read is noted, and no error."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.unreadable: list[str] = []
        """Paths that are there and gave nothing, as the system without `root` calls them, with the reason."""

    def text(self, path: str) -> str | None:
        """The text at `path`, which begins below the root; None where nothing is, or nothing may be read."""
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
        """The first line at `path` without blanks around it, and without the zero byte that ends it in a device tree;
        None where there is none."""
        text = self.text(path)
        lines = text.replace("\0", "\n").split("\n") if text else []
        return (lines[0].strip() or None) if lines else None

    def number(self, path: str) -> int | None:
        """The whole number at `path`; None where there is none."""
        line = self.line(path)
        return int(line) if line and line.isdecimal() else None

    def matching(self, pattern: str) -> list[str]:
        """The paths that fit a pattern of `Path.glob`, in order."""
        try:
            return sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern))
        except OSError as error:
            self.unreadable.append(f"/{pattern}: {error.strerror}")
            return []

    def target(self, path: str) -> str | None:
        """The name that the link at `path` leads to; None where no link is."""
        try:
            return (self.root / path).readlink().name
        except OSError:
            return None

"""Writing a file so that it is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sinkprune.contract.errors import OutputError


def check_writable(path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that could not be written later: a wrong ending, no such folder; raises `OutputError`."""
    if path.suffix.lower() not in suffixes:
        raise OutputError(f"'{path}' ends in '{path.suffix}', expected {' or '.join(suffixes)}.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OutputError(f"'{path}' cannot be written: its folder must exist and no folder bear its name.")
    if not os.access(path.absolute().parent, os.W_OK):
        raise OutputError(
            f"'{path}' cannot be written: no permission, or a read-only file system, at '{path.absolute().parent}'."
        )


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, then rename it there."""
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror}. Choose another place.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise

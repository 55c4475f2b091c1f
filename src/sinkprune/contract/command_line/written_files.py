"""The files that commands write for their users, with a line on stderr for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.files.output_files import write_whole


def write_output(path: Path, data: bytes) -> None:
    """Write a file that an option of a command names, as `write_whole` does, and print that it is written.

    Raises `OutputError`.
    """
    write_whole(path, data)
    note_written(path)


def write_each(*writers: Callable[[], object]) -> None:
    """Call the writers of a command's results in order, also after one has failed; then raise the first error.

    So what took minutes to measure reaches the terminal if the disk is full, and the files if the terminal is closed
    or a picture cannot be drawn.
    """
    errors: list[Exception] = []
    for write in writers:
        try:
            write()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def note_written(path: Path) -> None:
    """Print a line on stderr about a file or folder that a command wrote."""
    # The file is there, also where stderr is closed.
    with suppress(OSError):
        sys.stderr.write(f"wrote {escaped(str(path))}\n")

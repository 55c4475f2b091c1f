"""The progress of commands: bars on a terminal's stderr, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sinkprune.contract.progress import OnProgress, unreported


@contextmanager
def status(text: str) -> Iterator[OnProgress]:
    """Show `text` on a terminal while the block runs; yields a function that shows what is done and the time left."""
    if not sys.stderr.isatty():
        yield unreported
        return
    from sinkprune.contract.command_line.bars import status_bar

    with status_bar(text) as report:
        yield report

"""The pages about backends name every backend and no other."""

from __future__ import annotations

import re

from sinkprune.runtime.backends.known import KNOWN
from support.programs.repository import ROOT


def backends_in(page: str, heading: str, before: str) -> list[str]:
    """Return the backends in the first column of tables from `heading` up to `before`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(heading)[1].split(before)[0]
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_hardware_has_a_row_for_every_backend() -> None:
    assert sorted(backends_in("hardware.md", "## Backends on CPUs", "## A stand-in")) == sorted(KNOWN)


def test_the_table_of_threads_has_every_backend() -> None:
    assert sorted(backends_in("python.md", "## Threads", "Requests that run at once")) == sorted(KNOWN)

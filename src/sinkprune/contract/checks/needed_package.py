"""Packages of extras, which may not be installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sinkprune.contract.errors import SinkpruneError, UsageError


@contextmanager
def needs_package(doing: str, install: str, error: type[SinkpruneError] = UsageError) -> Iterator[None]:
    """Raise `error` if the block imports a package that is not installed: what it is for, and how to `install` it."""
    try:
        yield
    except ImportError as missing:
        raise error(
            f"{doing} needs the package '{missing.name}', which is not installed. Install it with: {install}"
        ) from missing

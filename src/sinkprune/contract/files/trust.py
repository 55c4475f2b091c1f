"""Whether a bundle is the one that its user expects: its sum and its signature."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sinkprune.contract.checks import escaped, format_value
from sinkprune.contract.errors import UsageError

Sign = Callable[[bytes], bytes]
"""Returns the signature of its argument."""


@dataclass(frozen=True)
class Trust:
    """The sum and the signature that a manifest must have. Raises `UsageError` for a malformed sum."""

    sha256: str | None = None
    """The expected sha256, in hexadecimal; None accepts any."""
    signed_by: Path | None = None
    """A file with the public key of the signature; None accepts unsigned manifests."""

    def __post_init__(self) -> None:
        if self.sha256 is None:
            return
        if not isinstance(self.sha256, str) or not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise UsageError(
                f"the sum is {format_value(self.sha256)}, expected a sha256 as sinkprune-export and sinkprune-build "
                "print it: 64 hexadecimal digits, the letters small."
            )


ANY = Trust()
"""Accepts any manifest."""


def add_trust_options(group: argparse._ArgumentGroup) -> None:
    """Add `--sha256` and `--signed-by`, the two fields of a `Trust`."""
    add = group.add_argument
    add(
        "--sha256",
        metavar="SUM",
        help="the sha256 that was printed when BUNDLE was written; other bundles are rejected",
    )
    add(
        "--signed-by",
        type=Path,
        metavar="KEY.pub",
        help="a public key; bundles and engines that it did not sign are rejected",
    )


def add_sign_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--sign` to a command that writes `what`."""
    parser.add_argument(
        "--sign", type=Path, metavar="KEY", help=f"sign {what} with this Ed25519 private key (PEM), for --signed-by"
    )


def sum_lines(sha256: str, key: Path | None) -> str:
    """Return the lines that a command prints about a manifest that it wrote, and signed with `key`, if any."""
    # The sum stays the last word, which scripts take.
    return (f"signed with '{escaped(str(key))}'\n" if key else "") + f"sha256 {sha256}\n"

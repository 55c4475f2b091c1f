"""What a user knows of a bundle or of engines before they are read, and the options that commands take it by."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError


@dataclass(frozen=True)
class Trust:
    """What a manifest must be; one that differs is refused. Raises `UsageError` for what is no sum."""

    sha256: str | None = None
    """The sha256 it has, in hexadecimal; None where it may have any."""
    signed_by: Path | None = None
    """A file with the public key that its signature must fit; None where it need not be signed."""

    def __post_init__(self) -> None:
        if self.sha256 is None:
            return
        if not isinstance(self.sha256, str) or not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise UsageError(
                f"the sum is {format_value(self.sha256)}, expected a sha256 as sinkprune-export and sinkprune-build "
                "print it: 64 hexadecimal digits, the letters small."
            )


ANY = Trust()
"""Any manifest is read."""


def add_trust_options(parser: argparse.ArgumentParser) -> None:
    """Add `--sha256` and `--signed-by`, of which a command that reads a bundle makes a `Trust`."""
    add = parser.add_argument
    add("--sha256", metavar="SUM", help="the sum that was printed when BUNDLE was written: any other is refused")
    add("--signed-by", type=Path, metavar="KEY.pub", help="a public key: what it did not sign is refused")


def add_sign_option(parser: argparse.ArgumentParser, what: str) -> None:
    """The argument of a command that writes `what`."""
    parser.add_argument(
        "--sign", type=Path, metavar="KEY", help=f"sign {what} with this Ed25519 private key (PEM), for --signed-by"
    )

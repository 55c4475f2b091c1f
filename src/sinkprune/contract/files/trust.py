"""Whether a bundle is the one that its user expects: its sum and its signature.

The signature of the manifest's bytes has 64 bytes in a file of its own, so that other tools can verify it:
`openssl pkeyutl -verify -rawin -pubin -inkey KEY.pub -in bundle.json -sigfile bundle.json.sig`. Needs the package
cryptography (extra `sign`), and no network.
"""

from __future__ import annotations

import argparse
import getpass
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkprune.contract.checks import escaped, format_value, install_command, needs_package
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.untrusted import UnreadableError, read_bytes

SIGNATURE_BYTES = 64
_KEY_BYTES = 64 << 10
_MAKE = "Make a pair with: openssl genpkey -algorithm ed25519 -out KEY; openssl pkey -in KEY -pubout -out KEY.pub"
_INSTALL = install_command("sign")

Sign = Callable[[bytes], bytes]
"""Returns the signature of its argument."""


def read_private_key(path: Path) -> Sign:
    """Return the signing function of the private key in the PEM file `path`. Prompts for a passphrase if needed.

    Raises `UsageError` for any other file, and without the package cryptography.
    """
    with needs_package("a signature", _INSTALL):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    def load(data: bytes) -> object:
        return load_pem_private_key(data, _passphrase(path) if b"ENCRYPTED" in data else None)

    key: Ed25519PrivateKey = _read_key(path, "private", load, Ed25519PrivateKey)
    return key.sign


def verify_signature(path: Path, data: bytes, signature: bytes) -> bool:
    """Return whether `signature` signs `data` with the key that belongs to the public key in the PEM file `path`.

    Raises `UsageError` for any other file, and without the package cryptography.
    """
    with needs_package("a signature", _INSTALL):
        from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key: Ed25519PublicKey = _read_key(path, "public", load_pem_public_key, Ed25519PublicKey)
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _read_key(path: Path, kind: str, load: Callable[[bytes], object], expected: Any) -> Any:
    """Return the `kind` key in the PEM file `path`. Raises `UsageError` for a key that is not `expected`."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        content = read_bytes(path, _KEY_BYTES)
    except UnreadableError as error:
        raise UsageError(f"the key '{path}' {error}. {_MAKE}") from error
    try:
        key = load(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        found = "a private key" if kind == "public" and b"PRIVATE KEY" in content else "no such key that can be read"
        raise UsageError(f"'{path}' holds {found}, expected the {kind} key. {_MAKE}") from error
    if not isinstance(key, expected):
        raise UsageError(f"'{path}' holds a {kind} key that is not Ed25519. {_MAKE}")
    return key


def _passphrase(path: Path) -> bytes:
    if not sys.stdin.isatty():
        raise UsageError(f"the key '{path}' has a passphrase, and there is no terminal to ask for it on.")
    return getpass.getpass(f"passphrase of {path}: ").encode()


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

"""Signatures of manifests: made, and compared with a public key.

The signature of the manifest's bytes has 64 bytes in a file of its own, so that other tools can verify it:
`openssl pkeyutl -verify -rawin -pubin -inkey KEY.pub -in bundle.json -sigfile bundle.json.sig`. Needs the package
cryptography (extra `sign`), and no network.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkprune.contract.checks import install_command, needs_package
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.trust import Sign
from sinkprune.contract.files.untrusted import UnreadableError, read_bytes

if TYPE_CHECKING:
    from sinkprune.contract.files.manifest_file import ManifestFile

SIGNATURE_BYTES = 64
_KEY_BYTES = 64 << 10
_MAKE = "Make a pair with: openssl genpkey -algorithm ed25519 -out KEY; openssl pkey -in KEY -pubout -out KEY.pub"
_INSTALL = install_command("sign")


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


def check_signature(kind: ManifestFile, path: Path, data: bytes, key: Path) -> None:
    """Raise `kind.error` unless the manifest `path`, which holds `data`, is signed with the private key of `key`."""
    signature = path.with_name(kind.signature)
    try:
        signed = read_bytes(signature, SIGNATURE_BYTES, follow_links=False)
    except UnreadableError as error:
        raise kind.error(
            f"'{signature}' {error}: found no signature of the {kind.folder} to compare with '{key}'. Make the "
            f"{kind.folder} again with --sign, or get a signed copy."
        ) from error
    if not verify_signature(key, data, signed):
        raise kind.error(
            f"'{path}' was not signed with the key that belongs to '{key}', or was altered since. Do not use it: "
            f"{kind.or_again}"
        )


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

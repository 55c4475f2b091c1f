"""Changes a bundle in its folder: its small files and its manifest, without copying weights."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import escaped
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import check_replaceable, replacing
from sinkprune.contract.files.trust import Trust, sum_lines
from sinkprune.contract.manifest import BUNDLE, Manifest

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_NEEDED_BYTES = 8 << 20


def check_changeable(bundle: Bundle, *, signed: bool) -> None:
    """Raise `BundleError` if the folder of `bundle` cannot be changed; with `signed`, it will be signed again."""
    check_replaceable(bundle.path, BUNDLE, force=True)
    folder = bundle.path.absolute().parent
    if not os.access(folder, os.W_OK) or not os.access(bundle.path, os.W_OK):
        raise BundleError(
            f"'{bundle.path}' cannot be written: no permission, or a read-only file system, at '{folder}'. Copy the "
            "bundle to a place of your own, or add --dry-run to get the report only."
        )
    if not signed and (bundle.path / BUNDLE.signature).exists():
        raise BundleError(
            f"'{bundle.path}' is signed, and its signature will not fit the changed bundle. Give the key "
            f"with --sign KEY, or remove '{BUNDLE.signature}' first."
        )


@contextmanager
def changed_folder(bundle: Bundle, files: Sequence[str]) -> Iterator[Path]:
    """Yield a new folder of hard links to `files` of `bundle`, which replaces the folder of `bundle` at the end.

    After a kill at any moment the next command finds either the old bundle or the new one. Raises `BundleError` if
    the bundle changed since it was read, or if its disk has no hard links.
    """
    with replacing(bundle.path, BUNDLE, _NEEDED_BYTES, "remove a budget", force=True) as new:
        for file in files:
            _link(bundle.path / file, new / file)
        yield new
        # Fail if another process changed the bundle meanwhile.
        BUNDLE.read(bundle.path, Manifest, Trust(bundle.sha256))


def changed_text(folder: Path, what: str, sha256: str | None, key: Path | None, *, dry_run: bool) -> str:
    """Return lines about the bundle in `folder`: `what` happened, its new `sha256`, and what to make again.

    None as the sum is that of an unchanged bundle. `key` is the private key that signed the new one, if any.
    """
    name = escaped(str(folder))
    if sha256 is None:
        return f"{name}: unchanged{', because of --dry-run' if dry_run else ''}\n"
    return (
        f"{name}: {what}\n{sum_lines(sha256, key)}The sha256 is new: replace it where you give --sha256 or sha256=, "
        "and make this bundle's engines again.\n"
    )


def _link(source: Path, target: Path) -> None:
    """Create a hard link, without reading or writing the file's bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise BundleError(
            f"'{source}' cannot be linked: {error.strerror}. Its disk must support hard links; copy the bundle to "
            "one that does."
        ) from error

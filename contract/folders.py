"""Writing a folder so that it is there whole or not at all: written beside its place, then renamed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sinkprune.contract.manifest_file import ManifestFile


def check_replaceable(output: Path, kind: ManifestFile, *, force: bool) -> None:
    """Refuse to write where something stands, unless it is of this kind and `force` is given."""
    if not output.exists():
        return
    if not (output / kind.name).is_file():
        raise kind.error(f"'{output}' exists and is not {kind.a_folder}. Choose another place; it is left as it is.")
    if not force:
        raise kind.error(
            f"'{output}' is {kind.a_folder} already. Add --force to replace it, or choose another place."
        )


@contextmanager
def replacing(output: Path, kind: ManifestFile, needed: int, way_out: str, *, force: bool) -> Iterator[Path]:
    """A temporary folder with `needed` bytes free, which becomes `output` when the block is done.

    Whatever goes wrong, `output` is left as it was and the temporary folder is removed. `way_out` says how to need
    less. Raises `kind.error`, also for what `check_replaceable` refuses.
    """
    check_replaceable(output, kind, force=force)
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    try:
        root = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=parent))
    except OSError as error:
        raise kind.error(
            f"'{output}' cannot be written: {error.strerror} in '{parent}'. Choose a place you may write to."
        ) from error
    try:
        free = shutil.disk_usage(root).free
        if free < needed:
            raise kind.error(
                f"no room for the {kind.folder}: {needed / 1e9:.1f} GB are needed, '{parent}' has {free / 1e9:.1f} "
                f"GB free. Free space, choose another place, or {way_out}."
            )
        yield root
        # Hours may have passed: what came to stand there meanwhile is not ours to replace.
        check_replaceable(output, kind, force=force)
        _install(root, output)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _install(root: Path, output: Path) -> None:
    """Rename the finished folder `root` to `output`; what stands there is removed only after."""
    root.chmod(0o755)
    output.parent.mkdir(parents=True, exist_ok=True)
    old = root.with_suffix(".old")
    if output.exists():
        output.rename(old)
    try:
        root.rename(output)
    except BaseException:
        if old.exists():
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)

"""Manifests: JSON files with a version, read without trust and written with sums of their files.

The common part of reading bundles and engines. Only files that the manifest lists are loaded, and they are held open
(`held_files` in this package). Other files in the folder are an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from sinkprune.contract.checks import Bounds, SchemaError, from_json, to_json
from sinkprune.contract.errors import SinkpruneError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.output_files import write_whole
from sinkprune.contract.files.trust import Sign, Trust
from sinkprune.contract.files.untrusted import (
    MANIFEST_BYTES,
    MissingError,
    UnreadableError,
    parsed_json,
    read_bytes,
    url_of,
)
from sinkprune.contract.progress import OnProgress, unreported

T = TypeVar("T")
M = TypeVar("M", bound="ListsFiles")


@dataclass(frozen=True)
class FileSpec:
    """The size in bytes and the sha256 that a file must have."""

    size: Annotated[int, Bounds(0, 1 << 50)]
    sha256: str


@dataclass(frozen=True)
class ManifestFile:
    """A kind of manifest, and the words of its error messages."""

    name: str
    """The file's name in its folder, e.g. `bundle.json`."""
    format_version: int
    folder: str
    """The folder's name in messages, e.g. `bundle`."""
    a_folder: str
    """The same with an article."""
    error: type[SinkpruneError]
    make: str
    """The command that makes such a folder; `{root}` is its place."""
    again: str
    """The remedy for a damaged folder, as a sentence."""
    upgrade: str
    """The remedy for a folder of an unknown format version, as a sentence."""

    @property
    def signature(self) -> str:
        """The name of the file with the manifest's signature, next to the manifest."""
        return f"{self.name}.sig"

    def read(self, root: Path, kind: type[T], trust: Trust) -> tuple[T, str]:
        """Return the manifest in the folder `root` as the dataclass `kind`, and its sha256. Raises `error`."""
        path = root / self.name
        try:
            data = read_bytes(path, MANIFEST_BYTES, follow_links=False)
        except MissingError as error:
            if not os.path.lexists(root):
                if url := url_of(root):
                    raise self.error(f"'{url}' is a URL, expected {self.a_folder}; download it first.") from error
                make = self.make.format(root=root)
                raise self.error(f"there is no folder '{root}'. Make {self.a_folder} with: {make}") from error
            if root.name == self.name and root.is_file():
                raise self.error(
                    f"'{root}' is the manifest of {self.a_folder}, expected its folder. Give '{root.parent}'."
                ) from error
            is_checkpoint = (root / "config.json").is_file()
            make = f"sinkprune-export {root} -o BUNDLE" if is_checkpoint else self.make.format(root="NEW")
            raise self.error(
                f"'{root}' is not {self.a_folder}: it holds no {self.name}. Make one with: {make}"
            ) from error
        except UnreadableError as error:
            raise self.error(f"'{path}' {error}. {self.again}") from error
        digest = hashlib.sha256(data).hexdigest()
        # Before the content is used.
        self._check_trust(path, data, digest, trust)
        return self.parsed(path, data, kind), digest

    def parsed(self, path: Path, data: bytes, kind: type[T]) -> T:
        """Return `data`, the manifest's content, as the dataclass `kind`. `path` is for messages. Raises `error`."""
        try:
            parsed = parsed_json(data)
        except UnreadableError as error:
            raise self.error(f"'{path}' {error}. {self.again}") from error
        version = parsed.get("format_version") if isinstance(parsed, dict) else None
        if type(version) is not int or version != self.format_version:
            raise self.error(
                f"'{path}' has format version {version!r}, this sinkprune reads {self.format_version}. {self.upgrade}"
            )
        try:
            return from_json(kind, parsed)
        except SchemaError as error:
            raise self.error(f"'{path}' is malformed at {error}. {self.again}") from error

    def check_consistent(self, path: Path, complaints: Iterator[str]) -> None:
        """Raise `error` with the first of the `complaints` about the manifest at `path`, if there is one."""
        for complaint in complaints:
            raise self.error(f"'{path}' {complaint}. {self.again}")

    def write(self, root: Path, manifest: Any, sign: Sign | None = None) -> None:
        """Write the manifest into the folder `root`, and its signature with `sign`.

        Raises `error` for a manifest that could not be read again.
        """
        data = encoded(manifest)
        try:
            from_json(type(manifest), parsed_json(data))
        except (SchemaError, UnreadableError) as error:
            raise self.error(f"the {self.folder} cannot be described by its {self.name}: {error}.") from error
        write_whole(root / self.name, data)
        if sign is not None:
            (root / self.signature).write_bytes(sign(data))

    def sha256(self, manifest: Any) -> str:
        """Return the sha256 of the manifest as `write` writes it, in hexadecimal."""
        return hashlib.sha256(encoded(manifest)).hexdigest()

    def hold(self, root: Path, files: Mapping[str, FileSpec], *, whole: bool = True) -> dict[str, HeldFile]:
        """Open the `files` that the manifest lists, by name. Files may be missing unless the folder must be `whole`.

        Raises `error` for a file that is missing, of another size, no regular file, or not listed.
        """
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise self.error(
                    f"'{root / self.name}' names the file '{name}', which lies outside the {self.folder}."
                )
        there = [name for name in files if whole or os.path.lexists(root / name)]
        held = {name: HeldFile(root / name, partial(self._refusal, root, name)) for name in there}
        for name, file in held.items():
            if file.size != files[name].size:
                raise self._refusal(root, name, f"has {file.size} bytes, expected {files[name].size}")
        for name in self.unlisted(root, files):
            raise self.error(
                f"{self.folder} '{root}': found the file '{name}', which {self.name} does not list. "
                f"Move it elsewhere, or {self.or_again}"
            )
        return held

    def unlisted(self, root: Path, files: Iterable[str]) -> list[str]:
        """Return the paths of everything below `root` but folders and the regular ones of `files`."""
        listed = {*files, self.name, self.signature}
        modes = {str(path.relative_to(root)): path.lstat().st_mode for path in root.rglob("*")}
        return sorted(
            name
            for name, mode in modes.items()
            if not stat.S_ISDIR(mode) and not (stat.S_ISREG(mode) and name in listed)
        )

    def check_sums(
        self,
        root: Path,
        held: Mapping[str, HeldFile],
        files: Mapping[str, FileSpec],
        progress: OnProgress = unreported,
    ) -> None:
        """Compare every held file with its sha256. Raises `error`."""
        counted = _counted(progress, sum(files[name].size for name in held))
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            found = pool.map(lambda file: file.sha256(counted), held.values())
            for name, digest in zip(held, found, strict=True):
                if digest != files[name].sha256:
                    reason = f"was altered: its sha256 is {digest}, expected {files[name].sha256}"
                    raise self._refusal(root, name, reason)

    def _check_trust(self, path: Path, data: bytes, digest: str, trust: Trust) -> None:
        if trust.sha256 is not None and trust.sha256 != digest:
            raise self.error(
                f"'{path}' has the sha256 {digest}, expected {trust.sha256}. It is not the expected manifest. If you "
                "made or changed it since, as when you add a budget, give the sum that the command "
                f"printed. Otherwise do not use it: {self.or_again}"
            )
        if trust.signed_by is not None:
            from sinkprune.contract.files.signature import check_signature

            check_signature(self, path, data, trust.signed_by)

    def _refusal(self, root: Path, name: str, reason: str) -> SinkpruneError:
        return self.error(f"{self.folder} '{root}': file '{name}' {reason}. {self.again}")

    @property
    def or_again(self) -> str:
        """The remedy for a damaged folder, to go on with in a sentence."""
        return self.again[0].lower() + self.again[1:]


class ListsFiles(Protocol):
    """A manifest that lists files."""

    @property
    def files(self) -> dict[str, FileSpec]:
        """Every other file of the folder, by its path relative to the folder."""


@dataclass(frozen=True)
class Folder(Generic[M]):
    """A folder with a manifest that was read: its place, the manifest, and the files, held open."""

    kind: ClassVar[ManifestFile]
    path: Path
    manifest: M
    sha256: str
    """The manifest's own sha256, in hexadecimal. It covers all files, because the manifest holds their sums."""
    files: Mapping[str, HeldFile]
    """Every file that the manifest lists, by its name there."""
    trust: Trust
    """The sum and the key that the manifest was compared with."""

    def verify(self, progress: OnProgress = unreported) -> None:
        """Compare every file with its sha256. Raises `kind.error`."""
        self.kind.check_sums(self.path, self.files, self.manifest.files, progress)


def file_specs(root: Path, known: Collection[str] = (), progress: OnProgress = unreported) -> dict[str, FileSpec]:
    """Return size and sha256 of all files below `root` except those `known`, sorted by path relative to `root`."""
    paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    sizes = {name: paths[name].stat().st_size for name in sorted(paths) if name not in known}
    counted = _counted(progress, sum(sizes.values()))
    return {name: FileSpec(size, sha256(paths[name], counted)) for name, size in sizes.items()}


def _counted(progress: OnProgress, total: int) -> Callable[[int], None]:
    """Return a function that takes bytes whose sum is done, of `total`. Any thread may call it."""
    done, lock = 0, Lock()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            progress("checking sums", done / 1e9, total / 1e9, "GB")

    return count


def sha256(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Return the sha256 of a file that sinkprune wrote, in hexadecimal. `on_bytes` takes what is done."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def encoded(value: object) -> bytes:
    """Return the content of a JSON file that holds `value`, a dataclass."""
    return (json.dumps(to_json(value), indent=1) + "\n").encode()

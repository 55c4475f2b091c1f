"""A folder with a manifest: a JSON file that names every other file with its size and sha256.

What reading a bundle and reading engines have in common, and the one place that decides what of a folder may be
loaded: files that the manifest lists, held open from then on (`held_files` in this package), and none beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from sinkprune.contract.checks.fields import Bounds, SchemaError, from_json, to_json
from sinkprune.contract.errors import SinkpruneError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.signature import SIGNATURE_BYTES, Sign, verify_signature
from sinkprune.contract.files.trust import Trust
from sinkprune.contract.files.untrusted import MANIFEST_BYTES, MissingError, UnreadableError, parsed_json, read_bytes

T = TypeVar("T")
M = TypeVar("M", bound="Lists")


@dataclass(frozen=True)
class FileSpec:
    """The size in bytes and the sha256 that a file must have."""

    size: Annotated[int, Bounds(0, 1 << 50)]
    sha256: str


@dataclass(frozen=True)
class ManifestFile:
    """A kind of manifest, and the words it is refused with."""

    name: str
    """The file's name in its folder, e.g. `bundle.json`."""
    format_version: int
    folder: str
    """What the folder is, e.g. `bundle`, and with an article."""
    a_folder: str
    error: type[SinkpruneError]
    make: str
    """The command that makes such a folder; `{root}` is its place."""
    again: str
    """What a user can do about a damaged folder, as a sentence."""
    upgrade: str
    """What a user can do about a folder of an unknown format version, as a sentence."""

    def read(self, root: Path, kind: type[T], trust: Trust) -> tuple[T, str]:
        """The manifest in the folder `root`, as the dataclass `kind`, and its sha256; raises `error`."""
        path = root / self.name
        data = self._bytes(root)
        digest = hashlib.sha256(data).hexdigest()
        # Before anything is made of what it says
        self._check_trust(path, data, digest, trust)
        return self.parsed(path, data, kind), digest

    def parsed(self, path: Path, data: bytes, kind: type[T]) -> T:
        """The manifest that stands in `data`, the content of `path`, as the dataclass `kind`; raises `error`."""
        try:
            parsed = parsed_json(data)
        except UnreadableError as error:
            raise self.error(f"'{path}' {error}. {self.again}") from error
        version = parsed.get("format_version") if isinstance(parsed, dict) else None
        if type(version) is not int or version != self.format_version:
            older = type(version) is int and version < self.format_version
            way_out = f"Make it again: {self.make.format(root=path.parent)} --force" if older else self.upgrade
            raise self.error(
                f"'{path}' has format version {version!r}, this sinkprune reads {self.format_version}. {way_out}"
            )
        try:
            return from_json(kind, parsed)
        except SchemaError as error:
            raise self.error(f"'{path}' is malformed at {error}. {self.again}") from error

    def write(self, root: Path, manifest: Any, sign: Sign | None = None) -> None:
        """Write the manifest into the folder `root`, and with `sign` its signature beside it.

        Raises `error` for one that could not be read again, because something in it is beyond what one may say.
        """
        data = _encoded(manifest)
        try:
            from_json(type(manifest), parsed_json(data))
        except (SchemaError, UnreadableError) as error:
            raise self.error(f"the {self.folder} cannot be described by its {self.name}: {error}.") from error
        (root / self.name).write_bytes(data)
        if sign is not None:
            (root / self.signature).write_bytes(sign(data))

    def sha256(self, manifest: Any) -> str:
        """The sha256 of the manifest as `write` writes it, in hexadecimal."""
        return hashlib.sha256(_encoded(manifest)).hexdigest()

    def hold(self, root: Path, files: Mapping[str, FileSpec], *, whole: bool = True) -> dict[str, HeldFile]:
        """Every file that the manifest lists, of its size and held open; if it need not be `whole`, those there are.

        A file that is missing, no regular file or of another size is refused, and so is one that nobody listed;
        raises `error`.
        """
        for name in files:
            if outside(name):
                raise self.error(
                    f"'{root / self.name}' names the file '{name}', which lies outside the {self.folder}."
                )
        there = [name for name in files if whole or os.path.lexists(root / name)]
        held = {name: HeldFile(root / name, partial(self._refusal, root, name)) for name in there}
        for name, file in held.items():
            if file.size != files[name].size:
                raise self.error(
                    f"{self.folder} '{root}': file '{name}' has {file.size} bytes, expected "
                    f"{files[name].size}. {self.again}"
                )
        listed = {*files, self.name, self.signature}
        for name in map(str, _all_below(root)):
            if name not in listed:
                raise self.error(
                    f"{self.folder} '{root}': nobody listed the file '{name}', so nobody can tell whose it is. "
                    f"Move it elsewhere, or {self.again[0].lower()}{self.again[1:]}"
                )
        return held

    def check_sums(
        self,
        root: Path,
        held: Mapping[str, HeldFile],
        files: Mapping[str, FileSpec],
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Compare every held file with its sha256; `on_bytes` is told of progress. Raises `error`."""
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            found = pool.map(lambda file: file.sha256(on_bytes), held.values())
            for name, digest in zip(held, found, strict=True):
                if digest != files[name].sha256:
                    raise self.error(
                        f"{self.folder} '{root}': file '{name}' was altered: its sha256 is {digest}, expected "
                        f"{files[name].sha256}. {self.again}"
                    )

    @property
    def signature(self) -> str:
        """The name of the file beside the manifest that holds its signature, where it was signed."""
        return f"{self.name}.sig"

    def _bytes(self, root: Path) -> bytes:
        path = root / self.name
        try:
            return read_bytes(path, MANIFEST_BYTES, follow_links=False)
        except MissingError as error:
            if not os.path.lexists(root):
                make = self.make.format(root=root)
                raise self.error(f"there is no folder '{root}'. Make {self.a_folder} with: {make}") from error
            is_checkpoint = (root / "config.json").is_file()
            make = f"sinkprune-export {root} -o BUNDLE" if is_checkpoint else self.make.format(root="NEW")
            raise self.error(
                f"'{root}' is not {self.a_folder}: it holds no {self.name}. Make one with: {make}"
            ) from error
        except UnreadableError as error:
            raise self.error(f"'{path}' {error}. {self.again}") from error

    def _check_trust(self, path: Path, data: bytes, digest: str, trust: Trust) -> None:
        if trust.sha256 is not None and trust.sha256 != digest:
            raise self.error(
                f"'{path}' has the sha256 {digest}, expected {trust.sha256}. It is not the one that is meant: "
                f"{self.again[0].lower()}{self.again[1:]}"
            )
        if trust.signed_by is None:
            return
        signature = path.with_name(self.signature)
        try:
            signed = read_bytes(signature, SIGNATURE_BYTES, follow_links=False)
        except UnreadableError as error:
            raise self.error(
                f"'{signature}' {error}: found no signature of the {self.folder} to compare with "
                f"'{trust.signed_by}'. Make the {self.folder} again with --sign, or get a signed copy."
            ) from error
        if not verify_signature(trust.signed_by, data, signed):
            raise self.error(
                f"'{path}' was not signed with the key that belongs to '{trust.signed_by}', or was altered since. "
                f"Do not use it: {self.again[0].lower()}{self.again[1:]}"
            )

    def _refusal(self, root: Path, name: str, reason: str) -> SinkpruneError:
        return self.error(f"{self.folder} '{root}': file '{name}' {reason}. {self.again}")


class Lists(Protocol):
    """A manifest, as far as all manifests are alike."""

    @property
    def files(self) -> dict[str, FileSpec]:
        """Every other file of the folder, by its path relative to it."""


@dataclass(frozen=True)
class Folder(Generic[M]):
    """A folder with a manifest that was read: where it lies, what its manifest says, and its files, held open."""

    kind: ClassVar[ManifestFile]
    path: Path
    manifest: M
    sha256: str
    """The manifest's own sha256, in hexadecimal; it stands for all files, whose sums the manifest holds."""
    files: Mapping[str, HeldFile]
    """Every file that the manifest lists, by its name there."""
    trust: Trust
    """What the manifest was compared with when it was read."""

    def file(self, name: str) -> Path:
        """The path of the file that the manifest calls `name`."""
        return self.path / name

    def verify(self, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """Compare every file with its sha256; `on_bytes` is told of bytes read. Raises the kind's `error`."""
        self.kind.check_sums(self.path, self.files, self.manifest.files, on_bytes)


def file_specs(root: Path, known: Collection[str] = ()) -> dict[str, FileSpec]:
    """Size and sha256 of all files below `root` but those `known`, by their paths relative to it, in order."""
    paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {
        name: FileSpec(paths[name].stat().st_size, sha256(paths[name])) for name in sorted(paths) if name not in known
    }


def outside(name: str) -> bool:
    """Whether the file `name` of a manifest would lie outside its folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def sha256(path: Path) -> str:
    """The sha256 of a file of our own making, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _encoded(manifest: Any) -> bytes:
    return (json.dumps(to_json(manifest), indent=1) + "\n").encode()


def _all_below(root: Path) -> Iterator[Path]:
    """Everything below `root` but folders, relative to it; links are not followed."""
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (Path(folder).relative_to(root) / name for name in sorted([*names, *links]))

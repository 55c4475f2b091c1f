"""A folder with a manifest: a JSON file that names every other file with its size and sha256.

What reading a bundle and reading engines have in common. Nothing is loaded before all of it was checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from sinkprune.contract.errors import SinkpruneError
from sinkprune.contract.schema import SchemaError, from_json, to_json

T = TypeVar("T")
M = TypeVar("M", bound="Lists")


@dataclass(frozen=True)
class FileSpec:
    """The size in bytes and the sha256 that a file must have."""

    size: int
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
    former: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    """By older format version: what puts its JSON into the words of the next."""

    def read(self, root: Path, kind: type[T]) -> T:
        """The manifest in the folder `root`, as the dataclass `kind`; raises `error`."""
        path = root / self.name
        data = self._parse(root, path)
        version = data.get("format_version") if isinstance(data, dict) else None
        read = " and ".join(map(str, [self.format_version, *self.former]))
        if type(version) is not int or version not in (self.format_version, *self.former):
            raise self.error(f"'{path}' has format version {version!r}, this sinkprune reads {read}. {self.upgrade}")
        try:
            return from_json(kind, self._current(data))
        except SchemaError as error:
            raise self.error(f"'{path}' is malformed at {error}. {self.again}") from error

    def _current(self, data: dict[str, Any]) -> dict[str, Any]:
        """Parsed JSON of a known format version, in the words of this one."""
        while data["format_version"] in self.former:
            version = data["format_version"]
            try:
                data = self.former[version](data)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise SchemaError(f"$: not of format version {version} ({type(error).__name__}: {error})") from error
        return data

    def write(self, root: Path, manifest: Any) -> None:
        """Write the manifest into the folder `root`."""
        text = json.dumps(to_json(manifest), indent=1) + "\n"
        (root / self.name).write_text(text, encoding="utf-8")

    def check_sizes(self, root: Path, files: Mapping[str, FileSpec]) -> None:
        """Refuse a file that is missing or not of its size; raises `error`."""
        for name, spec in files.items():
            found = _size(root / name)
            if found is None:
                raise self.error(f"{self.folder} '{root}': file '{name}' is missing. {self.again}")
            if found != spec.size:
                raise self.error(
                    f"{self.folder} '{root}': file '{name}' has {found} bytes (sha256 {sha256(root / name)}), "
                    f"expected {spec.size} bytes (sha256 {spec.sha256}). {self.again}"
                )

    def check_sums(
        self, root: Path, files: Mapping[str, FileSpec], on_bytes: Callable[[int], None] = lambda count: None
    ) -> None:
        """Compare every file with its sha256; `on_bytes` is told of progress. Raises `error`."""
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            found = pool.map(lambda name: sha256(root / name, on_bytes), files)
            for (name, spec), digest in zip(files.items(), found, strict=True):
                if digest != spec.sha256:
                    raise self.error(
                        f"{self.folder} '{root}': file '{name}' was altered: its sha256 is {digest}, expected "
                        f"{spec.sha256}. {self.again}"
                    )

    def _parse(self, root: Path, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.error(
                f"'{root}' is not {self.a_folder}: it holds no {self.name}. "
                f"Make one with: {self.make.format(root=root)}"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(f"'{path}' cannot be read: {error}. {self.again}") from error
        except (ValueError, RecursionError) as error:
            raise self.error(f"'{path}' is not JSON: {error}. {self.again}") from error


class Lists(Protocol):
    """A manifest, as far as all manifests are alike."""

    @property
    def files(self) -> dict[str, FileSpec]:
        """Every other file of the folder, by its path relative to it."""


@dataclass(frozen=True)
class Folder(Generic[M]):
    """A folder with a manifest that was read: where it lies and what its manifest says."""

    kind: ClassVar[ManifestFile]
    path: Path
    manifest: M

    def file(self, name: str) -> Path:
        """The path of the file that the manifest calls `name`."""
        return self.path / name

    def verify(self, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """Compare every file with its sha256; `on_bytes` is told of bytes read. Raises the kind's `error`."""
        self.kind.check_sums(self.path, self.manifest.files, on_bytes)


def file_specs(root: Path) -> dict[str, FileSpec]:
    """Size and sha256 of all files below `root`, by their paths relative to it, in order."""
    paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {name: FileSpec(paths[name].stat().st_size, sha256(paths[name])) for name in sorted(paths)}


def outside(name: str) -> bool:
    """Whether the file `name` of a manifest would lie outside its folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def sha256(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """The sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    """The size of a file; None where there is none, or cannot be one by that name."""
    # os.path, unlike pathlib in Python 3.11, says no to names the system does not take.
    return path.stat().st_size if os.path.isfile(path) else None  # noqa: PTH113

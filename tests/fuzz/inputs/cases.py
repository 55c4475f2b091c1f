"""A case: a subject, and changes of its files. As JSON it is a line of the corpus."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Place: TypeAlias = tuple["str | int", ...]
SPECIAL_FILES = (
    *("missing", "fifo", "zero", "folder", "socket", "sparse"),
    *("link", "dangling", "loop", "unreadable", "memory", "empty"),
)
_HUGE = 1 << 40


@dataclass(frozen=True)
class JsonEdit:
    """A new value at a place of a JSON file or of a safetensors header, or its removal."""

    file: str
    path: Place
    value: Any = None
    delete: bool = False

    def write(self, target: Path) -> None:
        data = target.read_bytes()
        if target.suffix == ".safetensors":
            size = int.from_bytes(data[:8], "little")
            header = self.applied(json.loads(data[8 : 8 + size])).encode()
            target.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        else:
            target.write_text(self.applied(json.loads(data)), encoding="utf-8")

    def applied(self, document: Any) -> str:
        """Return `document` with the change, as JSON; a place that is missing is not changed."""
        if not self.path:
            return json.dumps(self.value)
        document = copy.deepcopy(document)
        try:
            container = document
            for key in self.path[:-1]:
                container = container[key]
            if self.delete:
                del container[self.path[-1]]
            elif isinstance(container, list) and self.path[-1] == len(container):
                container.append(self.value)
            else:
                container[self.path[-1]] = self.value
        except (KeyError, IndexError, TypeError):
            pass
        return json.dumps(document)

    def json(self) -> dict[str, Any]:
        value = {"delete": True} if self.delete else {"value": self.value}
        return {"file": self.file, "path": list(self.path), **value}


@dataclass(frozen=True)
class Content:
    """New bytes for a file."""

    file: str
    data: bytes

    def write(self, target: Path) -> None:
        target.write_bytes(self.data)

    def json(self) -> dict[str, Any]:
        return {"file": self.file, "content": base64.b64encode(self.data).decode()}


@dataclass(frozen=True)
class SpecialFile:
    """Something in place of a file that cannot be read as a file: one of `SPECIAL_FILES`."""

    file: str
    special: str

    def write(self, target: Path) -> None:
        data = target.read_bytes()
        target.unlink()
        elsewhere = target.with_name(f"{target.name}.elsewhere")
        match self.special:
            case "fifo":
                os.mkfifo(target)
            case "zero":
                target.symlink_to("/dev/zero")
            case "memory":
                # A regular file of size 0 that cannot be read.
                target.symlink_to("/proc/self/mem")
            case "folder":
                target.mkdir()
            case "socket":
                _make_socket(target)
            case "sparse":
                with target.open("wb") as file:
                    file.truncate(_HUGE)
            case "link":
                elsewhere.write_bytes(data)
                target.symlink_to(elsewhere)
            case "dangling":
                target.symlink_to(elsewhere)
            case "loop":
                target.symlink_to(target)
            case "unreadable":
                target.write_bytes(data)
                target.chmod(0)
            case "empty":
                target.touch()
            case "missing":
                pass
            case other:
                raise ValueError(f"special file '{other}', expected one of {', '.join(SPECIAL_FILES)}")

    def json(self) -> dict[str, Any]:
        return {"file": self.file, "special": self.special}


Change: TypeAlias = "JsonEdit | Content | SpecialFile"


@dataclass(frozen=True)
class Case:
    """Changes to a subject's files; see `subjects.py` for the subjects."""

    subject: str
    changes: tuple[Change, ...]

    def apply(self, folder: Path) -> None:
        """Change the copied files in `folder`, and update their sums in the manifests of bundle and engines."""
        for change in self.changes:
            change.write(folder / change.file)
        for change in self.changes:
            root, _, name = change.file.partition("/")
            manifest = folder / root / {"bundle": "bundle.json", "engines": "engines.json"}.get(root, "")
            if manifest.is_file() and name != manifest.name:
                _update_sum(manifest, name)

    def json(self) -> dict[str, Any]:
        changes = [change.json() for change in self.changes]
        return {"subject": self.subject, **(changes[0] if len(changes) == 1 else {"changes": changes})}


def case_of(line: Mapping[str, Any]) -> Case:
    """Return the case of a line of the corpus."""
    rest = {key: value for key, value in line.items() if key != "subject"}
    return Case(line["subject"], tuple(_change_of(change) for change in rest.get("changes", [rest])))


def _change_of(line: Mapping[str, Any]) -> Change:
    if "special" in line:
        return SpecialFile(line["file"], line["special"])
    if "content" in line:
        return Content(line["file"], base64.b64decode(line["content"]))
    return JsonEdit(line["file"], tuple(line["path"]), line.get("value"), line.get("delete", False))


def _update_sum(manifest: Path, name: str) -> None:
    """Update the size and sum of the file `name` in a manifest that lists it."""
    path = manifest.parent / name
    if path.is_symlink() or not path.is_file() or path.stat().st_size >= _HUGE:
        return
    document, data = json.loads(manifest.read_bytes()), path.read_bytes()
    if name in document["files"]:
        document["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(document), encoding="utf-8")


def _make_socket(target: Path) -> None:
    """Make a socket at `target`, whose path may be too long for `bind`."""
    with socket.socket(socket.AF_UNIX) as listening:
        handle = os.open(target.parent, os.O_PATH)
        listening.bind(f"/proc/self/fd/{handle}/{target.name}")
        os.close(handle)

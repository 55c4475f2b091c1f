"""JSON files with the version of their kind, such as measured costs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from sinkprune.contract.checks import SchemaError, format_value, from_json
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.manifest_file import encoded
from sinkprune.contract.files.output_files import check_in_no_bundle, check_place, write_whole
from sinkprune.contract.files.untrusted import UnreadableError, read_json

T = TypeVar("T")


def write_versioned(path: str | os.PathLike[str], value: object) -> None:
    """Write `value`, a dataclass, to the JSON file `path`.

    Raises `OutputError` for a file that cannot be written, for a link or a device, and for a place within a bundle or
    engines, which may hold no other files.
    """
    file = Path(path)
    check_place(file)
    check_in_no_bundle(file)
    write_whole(file, encoded(value))


def read_versioned(
    path: str | os.PathLike[str],
    kind: type[T],
    what: str,
    version: int,
    remedy: str,
    others: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Return the `kind` in the JSON file `path`, whose field `<what>_version` must be `version`, with `_` for spaces.

    Raises `UsageError` for any other file; its message ends with `remedy`. `others` has the end of the message for
    other kinds of files, by the field of their version.
    """
    field = f"{what.replace(' ', '_')}_version"
    try:
        data = read_json(Path(path))
    except UnreadableError as error:
        raise UsageError(f"the file of {what} '{path}' {error}. {remedy}") from error
    if not isinstance(data, dict) or data.get(field) is None:
        for other, said in others.items():
            if isinstance(data, dict) and data.get(other) is not None:
                raise UsageError(f"'{path}' {said}")
        raise UsageError(f"'{path}' is no file of {what}: found no {field}. {remedy}")
    found = data[field]
    if type(found) is not int or found != version:
        raise UsageError(
            f"the {what} '{path}' have the version {format_value(found)}, this sinkprune reads {version}. {remedy}"
        )
    try:
        return from_json(kind, data)
    except SchemaError as error:
        raise UsageError(f"the {what} '{path}' are malformed at {error}. {remedy}") from error

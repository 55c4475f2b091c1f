"""Wrong values for fields, and wrong bytes for files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from fuzz.inputs.cases import JsonEdit, Place

WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**8, 10**18, 10**30, -0.5, 1e300),
    *("", "x", "../x", [], [1], {}, {"a": 1}),
)
_LISTED = 4
"""The number of entries of a list that are tried; the others are like them."""
_INTERESTING = (b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xff" * 4, b"\x00" * 4, b"\xff" * 8, b"\x80\x00\x00\x00")


def document_of(path: Path) -> Any:
    """Return the content of a JSON file, or the header of a safetensors file."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(data)


def places(document: Any, before: Place = ()) -> Iterator[Place]:
    """Yield the path of every value, containers and the whole document included; few entries of long containers."""
    yield before
    if isinstance(document, dict):
        keys: list[Any] = list(document) if len(document) <= 64 else [*list(document)[:4], *list(document)[-4:]]
    else:
        keys = list(range(min(len(document), _LISTED))) if isinstance(document, list) else []
    for key in keys:
        yield from places(document[key], (*before, key))


@cache
def edits_of(path: Path, file: str) -> list[JsonEdit]:
    """Return all `json_edits` of a file that never changes; its name in cases is `file`."""
    return json_edits(file, document_of(path))


def json_edits(file: str, document: Any) -> list[JsonEdit]:
    """Return edits: each wrong value of each field, each field removed, an unknown field in each object."""
    edits = []
    for path in places(document):
        edits += [JsonEdit(file, path, value) for value in WRONG_VALUES]
        edits += [JsonEdit(file, path, delete=True)] if path else []
        edits += [JsonEdit(file, (*path, "unknown"), 1)] if isinstance(value_at(document, path), dict) else []
    return edits


def crossed(file: str, document: Any, random: Random) -> JsonEdit:
    """Return an edit with one value of the document in the place of another."""
    every = list(places(document))
    return JsonEdit(file, random.choice(every[1:]), value_at(document, random.choice(every)))


def wrong_bytes(data: bytes, random: Random, other: bytes = b"") -> bytes:
    """Return `data` damaged in one to four places: bits, numbers, cuts, and pieces of itself or of `other`."""
    damaged = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if not damaged:
            break
        # Half of all damage is in the first bytes, where headers are.
        front = random.random() < 0.5
        at = random.randrange(min(len(damaged), 256) if front else len(damaged))
        match random.randrange(7):
            case 0:
                damaged[at] ^= 1 << random.randrange(8)
            case 1:
                damaged[at] = random.randrange(256)
            case 2:
                piece = random.choice(_INTERESTING)
                damaged[at : at + len(piece)] = piece
            case 3:
                del damaged[at:]
            case 4:
                del damaged[at : at + random.choice((1, 2, 4, 16, 256))]
            case 5:
                piece = _piece(bytes(damaged), random)
                damaged[at:at] = piece
            case _:
                piece = _piece(other or bytes(damaged), random)
                damaged[at : at + len(piece)] = piece
    return bytes(damaged)


def _piece(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data))
    return data[start : start + random.choice((1, 4, 16, 256, 4096))]


def value_at(document: Any, path: Place) -> Any:
    """Return the value of a JSON document at `path`; None if there is none."""
    for key in path:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return None
    return document

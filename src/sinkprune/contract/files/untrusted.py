"""Read untrusted files: regular files only, up to a limit of bytes, and JSON without bombs.

Only this module opens such files. The messages of its `UnreadableError` follow the file's name, and callers turn them
into errors of their own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from contextlib import closing
from math import isfinite
from typing import Any, BinaryIO

MANIFEST_BYTES = 16 << 20
"""The limit of a manifest or a configuration, a hundred times what any has."""
TOKENIZER_BYTES = 40 << 20
"""The limit of a tokenizer; the largest published ones have 33 MB."""
TEMPLATE_BYTES = 256 << 10
"""The limit of a chat template; the largest published ones have 30 kB."""
_DEPTH = 64
_TOO_DEEP = f"is nested more than {_DEPTH} deep"
_CONTAINERS = frozenset({dict, list})
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


_URL = re.compile(r"[a-z][a-z0-9+.-]+:/|data:", re.IGNORECASE)


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that was given as a path, with the slash that pathlib takes away; None for other paths."""
    text = os.fspath(path)
    return re.sub(r"(?<=:)/(?!/)", "//", text, count=1) if _URL.match(text) else None


class UnreadableError(Exception):
    """A file is not what it should be. The message follows the file's name, as in "is a FIFO, ..."."""


class ForbiddenError(UnreadableError):
    """The file's permissions forbid reading it."""


class MissingError(UnreadableError):
    """There is no such file."""


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """Open the regular file at `path` for reading, unbuffered and without waiting for the writer of a FIFO.

    Without `follow_links`, a link at the end of the path is an error. Raises `MissingError` and `UnreadableError`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingError("is a URL; download it first" if url_of(path) else "is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise UnreadableError("is a link, expected the file itself") from error
        if error.errno == errno.ENXIO:
            raise UnreadableError("is a socket or a device, expected a regular file") from error
        refusal = ForbiddenError if isinstance(error, PermissionError) else UnreadableError
        raise refusal(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MissingError(f"cannot be the name of a file ({error})") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((name for matches, name in _KINDS.items() if matches(mode)), "no regular file")
        raise UnreadableError(f"is {kind}, expected a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_bytes(path: str | os.PathLike[str], limit: int, *, follow_links: bool = True) -> bytes:
    """Return all bytes of the regular file at `path`. Raises `UnreadableError` for more than `limit`."""
    with closing(open_regular(path, follow_links=follow_links)) as file:
        return read_all(file, limit)


def read_all(file: BinaryIO, limit: int) -> bytes:
    """Return all bytes of an open file, from its start. Raises `UnreadableError` for more than `limit`."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise UnreadableError(f"has {size} bytes, expected at most {limit}")
    try:
        # One byte more than its size shows whether the file grows meanwhile.
        data = pread(file.fileno(), size + 1, 0)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    if len(data) != size:
        raise UnreadableError(f"changed while it was read: it had {size} bytes and gave {len(data)}")
    return data


def pread(descriptor: int, count: int, offset: int) -> bytes:
    """Return `count` bytes of an open file from `offset` on; fewer only at its end. Raises `OSError`."""
    parts = [os.pread(descriptor, count, offset)]
    # Network file systems may return less at a time.
    while parts[-1] and sum(map(len, parts)) < count:
        read = sum(map(len, parts))
        parts.append(os.pread(descriptor, count - read, offset + read))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_text(path: str | os.PathLike[str], limit: int, *, follow_links: bool = True) -> str:
    """Return the UTF-8 text of the regular file at `path`. Raises `UnreadableError`."""
    return decoded_text(read_bytes(path, limit, follow_links=follow_links))


def read_json(path: str | os.PathLike[str], limit: int = MANIFEST_BYTES, *, follow_links: bool = True) -> Any:
    """Return the content of the JSON file at `path`. Raises `UnreadableError`."""
    return parsed_json(read_bytes(path, limit, follow_links=follow_links))


def decoded_text(data: bytes | bytearray) -> str:
    """Return UTF-8 `data` as text. Raises `UnreadableError`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not UTF-8: {error.reason} at byte {error.start}") from error


def parsed_json(data: bytes | bytearray) -> Any:
    """Return UTF-8 `data` parsed as JSON (RFC 8259).

    Raises `UnreadableError`, also for NaN and Infinity (even as 1e999), more than 64 levels of nesting, numbers of
    thousands of digits, and halves of surrogate pairs.
    """
    try:
        text = decoded_text(data)
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise UnreadableError(_TOO_DEEP) from error
    except ValueError as error:
        raise UnreadableError(f"is not JSON: {error}") from error
    _check_depth(value)
    if b"\\ud" in data.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UnreadableError("holds half of a surrogate pair, which is no character") from error
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:20]} is no number in JSON, or too large")
    return value


def _check_depth(value: Any) -> None:
    """Reject deep nesting, which would exhaust the stack of later code."""
    level: list[Any] = [[value]]
    for _ in range(_DEPTH + 1):
        parts = (part for outer in level for part in (outer.values() if type(outer) is dict else outer))
        # By exact type, for speed: a tokenizer has a million words.
        level = [part for part in parts if type(part) in _CONTAINERS]
        if not level:
            return
    raise UnreadableError(_TOO_DEEP)

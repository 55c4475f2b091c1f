"""Reading files that strangers wrote: regular files only, never more bytes than asked for, JSON without bombs.

The one place that opens them. What is wrong is told as an `UnreadableError`, in words that go on from the file's
name; the caller, who knows what the file is for, makes its own error of it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, BinaryIO, NoReturn

MANIFEST_BYTES = 16 << 20
"""The most a manifest or a configuration may have: a hundred times what any has."""
TOKENIZER_BYTES = 40 << 20
"""The most a tokenizer may have; the largest published ones have 33 MB."""
TEMPLATE_BYTES = 256 << 10
"""The most a chat template may have; the largest published ones have some 30 kB."""
_DEPTH = 64
_CONTAINERS = frozenset({dict, list})
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


class UnreadableError(Exception):
    """A file is not what it should be; the message goes on from the file's name, as in "is a FIFO, ..."."""


class MissingError(UnreadableError):
    """There is no such file."""


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """The regular file at `path`, open for reading and unbuffered.

    Opening waits for nobody, as a FIFO would have it. With `follow_links` false a link in the last place of the path
    is refused. Raises `MissingError` and `UnreadableError`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingError("is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise UnreadableError("is a link, expected the file itself") from error
        if error.errno == errno.ENXIO:
            raise UnreadableError("is a socket or a device, expected a regular file") from error
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MissingError(f"cannot be the name of a file ({error})") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((name for matches, name in _KINDS.items() if matches(mode)), "no regular file")
        raise UnreadableError(f"is {kind}, expected a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_bytes(path: str | os.PathLike[str], limit: int, *, follow_links: bool = True) -> bytes:
    """All bytes of the regular file at `path`; raises `UnreadableError` for more than `limit`."""
    with closing(open_regular(path, follow_links=follow_links)) as file:
        return read_all(file, limit)


def read_all(file: BinaryIO, limit: int) -> bytes:
    """All bytes of an open file, from its start; raises `UnreadableError` for more than `limit`."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise UnreadableError(f"has {size} bytes, expected at most {limit}")
    try:
        # One byte more than its size: a file that grows meanwhile is none to trust.
        data = pread(file.fileno(), size + 1, 0)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    if len(data) != size:
        raise UnreadableError(f"changed while it was read: it had {size} bytes and gave {len(data)}")
    return data


def pread(descriptor: int, count: int, offset: int) -> bytes:
    """Up to `count` bytes of an open file from `offset` on; fewer only where it ends. Raises `OSError`."""
    parts = [os.pread(descriptor, count, offset)]
    # Network file systems may give less at a time than is asked for.
    while parts[-1] and sum(map(len, parts)) < count:
        read = sum(map(len, parts))
        parts.append(os.pread(descriptor, count - read, offset + read))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_text(path: str | os.PathLike[str], limit: int, *, follow_links: bool = True) -> str:
    """The UTF-8 text of the regular file at `path`; raises `UnreadableError`."""
    return decoded_text(read_bytes(path, limit, follow_links=follow_links))


def read_json(path: str | os.PathLike[str], limit: int = MANIFEST_BYTES, *, follow_links: bool = True) -> Any:
    """What the JSON file at `path` holds; raises `UnreadableError`."""
    return parsed_json(read_bytes(path, limit, follow_links=follow_links))


def decoded_text(data: bytes) -> str:
    """UTF-8 `data` as text; raises `UnreadableError`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not UTF-8: {error.reason} at byte {error.start}") from error


def parsed_json(data: bytes, new_object: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """What UTF-8 `data` holds as JSON (RFC 8259). `new_object` makes an object of its names and values; it may raise
    `ValueError`.

    Refused, with `UnreadableError`: what the RFC does not know (NaN, Infinity, also as 1e999), more than 64 levels of
    nesting, numbers of thousands of digits, and halves of characters that no text can hold.
    """
    try:
        text = decoded_text(data)
        value = json.loads(text, parse_constant=_not_json, parse_float=_finite, object_pairs_hook=new_object)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"is not JSON: {error}") from error
    _check_depth(value)
    if b"\\ud" in data.lower():
        _check_characters(value)
    return value


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def _check_depth(value: Any) -> None:
    """Refuse what is nested too deep: whoever walks over it later would run out of stack."""
    level = [value]
    for _ in range(_DEPTH):
        # Most of what is walked over are the words of a tokenizer: a million of them.
        level = [part for outer in level for part in _parts(outer) if type(part) in _CONTAINERS]
        if not level:
            return
    raise UnreadableError(f"is nested more than {_DEPTH} deep")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_characters(value: Any) -> None:
    """Refuse an escaped half of a surrogate pair: nothing can print it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnreadableError("holds half of a surrogate pair, which is no character") from error

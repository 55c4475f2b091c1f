"""Format values, counts and durations for messages."""

from __future__ import annotations

from numbers import Real

_SHOWN = 80


def counted(count: int, one: str) -> str:
    """Return a count with its noun, as in "1 thread" and "2 threads"."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def duration(seconds: float) -> str:
    """Return seconds in words: as minutes above two minutes, and as hours above two hours."""
    if seconds <= 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds <= 7200 else f"{seconds / 3600:.1f} h"


def type_name(value: object) -> str:
    """Return the name of a value's type, for values whose text would say little, such as tensors; "None" for None."""
    return "None" if value is None else type(value).__name__


def format_value(value: object) -> str:
    """Return a value on one line: texts in quotes, long values cut off."""
    if isinstance(value, int) and abs(value) > 10**_SHOWN:
        return f"a number of more than {_SHOWN} digits"
    try:
        text = " ".join((str(value) if isinstance(value, Real) else repr(value)).split())
    except ValueError:
        # Python rejects the conversion of numbers with thousands of digits.
        return f"{type_name(value)} with a number of more than {_SHOWN} digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

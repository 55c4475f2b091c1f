"""Values in messages."""

from __future__ import annotations

from numbers import Integral, Real

_SHOWN = 80


def format_value(value: object) -> str:
    """Return a value as messages print it, on one line: words in quotes, what is long by its beginning."""
    if isinstance(value, Integral) and abs(int(value)) > 10**_SHOWN:
        # Python writes no number of thousands of digits.
        return f"a number of more than {_SHOWN} digits"
    text = " ".join((str(value) if isinstance(value, Real) else repr(value)).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

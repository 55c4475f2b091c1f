"""Format values for messages."""

from __future__ import annotations

from numbers import Integral, Real

_SHOWN = 80


def format_value(value: object) -> str:
    """Return a value on one line: texts in quotes, long values cut off."""
    if isinstance(value, Integral) and abs(int(value)) > 10**_SHOWN:
        # Python rejects the conversion of numbers with thousands of digits.
        return f"a number of more than {_SHOWN} digits"
    text = " ".join((str(value) if isinstance(value, Real) else repr(value)).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

"""Text of strangers on its way to a terminal."""

from __future__ import annotations

import re

# C0 and C1, what breaks a line or turns the direction of writing, and halves of characters.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    """`text` with control characters written as in Python, an escape as `\\x1b`: no terminal obeys it.

    File names, manifests, answers and libraries' messages may hold them. Those in `keep` stay as they are.
    """
    return _CONTROL.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text
    )

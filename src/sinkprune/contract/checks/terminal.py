"""Escape control characters in untrusted text."""

from __future__ import annotations

import re

# C0 and C1, line breaks, changes of the writing direction, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    """Return `text` with control characters written as in Python, for example `\\x1b`. Those in `keep` stay.

    File names, manifests, answers and messages of libraries may hold control characters.
    """
    return _CONTROL.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text
    )

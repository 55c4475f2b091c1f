"""The order of numbered files that commands read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

from sinkprune.contract.errors import UsageError

_WHOLE, _DECIMAL = re.compile("([0-9]+)"), re.compile(r"([0-9]+(?:\.[0-9]+)?)")
_SUFFIX = re.compile(r"\.[A-Za-z]\w*$")


def by_number(paths: Iterable[Path]) -> list[Path]:
    """Return `paths` in the order of their names, in which numbers count as numbers: `frame9` before `frame10`.

    Raises `UsageError` for names such as `1.5.png` and `1.25.png`, whose order depends on what the point means.
    """
    found = [*paths]
    whole = sorted(found, key=lambda path: _key(_WHOLE, path.name))
    decimal = sorted(found, key=lambda path: _key(_DECIMAL, path.name))
    for one, other in zip(whole, decimal, strict=True):
        if one != other:
            raise UsageError(
                f"'{one.parent}' has '{one.name}' and '{other.name}', whose order is unclear: the point may begin a "
                "fraction or another number. Rename the files so that these numbers have equally many digits."
            )
    return whole


def _key(number: re.Pattern[str], name: str) -> tuple[list[str | Decimal], str]:
    # Texts are at even places and numbers at odd places, so that neither is compared with the other.
    parts = number.split(_SUFFIX.sub("", name))
    return [Decimal(part) if place % 2 else part for place, part in enumerate(parts)], name
